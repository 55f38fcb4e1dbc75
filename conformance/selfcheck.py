"""The self-test of a backend that is opened for the first time: one `linear` against the oracle, and eight greedy tokens of a tiny model.

It takes a fraction of a second (seconds, where a backend compiles its kernels first) and is no substitute for the suite: it finds a driver
that is broken as a whole, before its numbers reach a user. Called when a model is loaded, and by `fastllm backend check`.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from fastllm.api import Backend, Graph, OutOfMemory, UnsupportedError, read_model

from . import bounds, tiny
from .bench import Bench
from .case import Failure, NotApplicable
from .judge import judge
from .loaded import Loaded, batch_of
from .numbers import Numbers
from .operands import In, Weight

__all__ = ["GREEDY", "MODEL", "PROMPT", "NotChecked", "greedy", "self_check", "tiny_graph"]

MODEL = "llama-q8_0"
PROMPT = (146, 183, 189, 119, 139, 92)
GREEDY = (96, 121, 17, 118, 5, 213, 256, 98)
"""What every right backend answers: at each of these tokens the two best logits are more than 0.5 apart, a third of their deviation."""


class NotChecked(Exception):
    """The machine, not the backend, is in the way of the self-test: no temporary folder, no memory. The text says what."""


def self_check(backend: Backend) -> str:
    """What is wrong with an open backend, with numbers; "" if nothing was seen. What it does not support, or has no memory for, is not
    held against it. Raises NotChecked where the host cannot do its part: that says nothing about the backend."""
    try:
        return _linear(backend) or _tokens(backend)
    except (NotApplicable, OutOfMemory, UnsupportedError):
        return ""
    except Failure as failure:
        return failure.message
    except NotChecked:
        raise
    except (OSError, MemoryError) as error:
        raise NotChecked(f"{type(error).__name__}: {error}") from error
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _linear(backend: Backend) -> str:
    numbers = Numbers(3)
    x, w = numbers.normal(5, 96), numbers.normal(40, 96)
    try:
        ran = Bench(backend).run("linear", [In(x, "f32", "T"), Weight((40, 96), "f32", w.reshape(-1).view(np.uint8))], [((5, 40), "f32")])
    except NotApplicable:
        return ""
    verdict = judge(ran.outs[0], bounds.linear(x, w, None, ran.numerics))
    return f"linear ({ran.yes.impl}) of f32 [5, 96] and [40, 96]: {verdict.message}" if verdict.message else ""


def _tokens(backend: Backend) -> str:
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fastllm-selfcheck-", ignore_cleanup_errors=True))
            path = tiny.save(MODEL, Path(folder))
        except OSError as error:
            raise NotChecked(f"the tiny model cannot be written: {error}") from error
        kit = Loaded(backend, path)
        stack.callback(kit.close)
        found = greedy(kit)
    if found == GREEDY:
        return ""
    return f"eight greedy tokens of a tiny model: {list(found)} instead of {list(GREEDY)}"


def tiny_graph() -> Graph:
    """The graph of the tiny model. Raises NotChecked where it cannot be written."""
    try:
        with tempfile.TemporaryDirectory(prefix="fastllm-selfcheck-", ignore_cleanup_errors=True) as folder:
            model = read_model(tiny.save(MODEL, Path(folder)))
            model.close()
            return model.definition.graph
    except OSError as error:
        raise NotChecked(f"the tiny model cannot be written: {error}") from error


def greedy(kit: Loaded) -> tuple[int, ...]:
    """The tokens after PROMPT: it in one step, then token by token."""
    ids = list(PROMPT)
    at = 0
    for _ in GREEDY:
        logits = kit.executor.run(batch_of([(np.array(ids, np.int32), at, len(ids) - at)], [[0, 1]])).logits[-1]
        at = len(ids)
        ids.append(int(logits.argmax()))
    return tuple(ids[len(PROMPT) :])
