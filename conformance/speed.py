"""Measuring one op through the backend itself: operands placed once, then many calls, waited for at the end of each run.

Used by the cases of `perf_cases`, which run in a worker process like every other case. Nothing is compared here: that an op is right is
what the other cases are for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fastllm.api import CATALOGUE, No, Tensor, Yes

from .bench import Bench
from .case import NotApplicable
from .operands import NUMPY, Operand, Weight

__all__ = ["RUNS", "RUN_S", "Prepared", "Timing", "timed"]

RUNS, RUN_S = 5, 0.2
"""Runs of a measurement, and the seconds that each lasts at least."""
LONGEST_S = 4.0
"""A call that takes longer is not repeated: the item is not applicable, and says how long the call took."""


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the best run, the middle one and the middle half of them; calls of a run."""

    min_s: float
    median_s: float
    q1_s: float
    q3_s: float
    runs: int
    calls: int

    def as_dict(self) -> dict[str, Any]:
        """For the report."""
        return {"min_s": self.min_s, "median_s": self.median_s, "q1_s": self.q1_s, "q3_s": self.q3_s, "runs": self.runs, "calls": self.calls}


def timed(call: Callable[[], None], wait: Callable[[], None], runs: int = RUNS, run_s: float = RUN_S) -> Timing:
    """Times `call`; `wait` ends a run, when everything that was enqueued is done. Raises NotApplicable for a call of many seconds."""
    calls, spent = 1, _run(call, wait, 1)  # the first touches all memory and is not counted
    if spent > LONGEST_S:
        raise NotApplicable(f"one call takes {spent:.1f} s: too slow to repeat")
    while (spent := _run(call, wait, calls)) < run_s / 4:
        calls *= 2
    calls = max(1, math.ceil(1.1 * calls * run_s / spent))
    each = np.array([_run(call, wait, calls) / calls for _ in range(runs)])
    while (each * calls).min() < run_s:  # the machine was slower while it was calibrated
        calls = math.ceil(1.2 * run_s / each.min())
        each = np.array([_run(call, wait, calls) / calls for _ in range(runs)])
    q1, median, q3 = (float(q) for q in np.quantile(each, (0.25, 0.5, 0.75)))
    return Timing(float(each.min()), median, q1, q3, runs, calls)


def _run(call: Callable[[], None], wait: Callable[[], None], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    return time.perf_counter() - start


class Prepared:
    """An op whose operands lie on the device. A context manager; `call()` enqueues it once.

    copies: how many of each weight there are, used in turn, so that a weight is read from memory and not from a cache."""

    def __init__(
        self, bench: Bench, op: str, inputs: Sequence[Operand], outs: Sequence[tuple[tuple[int, ...], str]], attrs: Mapping[str, Any] | None = None,
        sizes: Mapping[str, int] | None = None, copies: int = 1,
    ):  # fmt: skip
        """Raises NotApplicable if the backend says No, and what its memory raises."""
        spec = CATALOGUE[op]
        self.attrs = spec.complete_attrs(attrs or {})
        operands = [*inputs, *[None] * (len(spec.inputs) - len(inputs))]
        answer, kept = bench.ask(op, operands, self.attrs, sizes or {})
        if isinstance(answer, No):
            raise NotApplicable(f"{bench.backend.name} answers No: {answer.reason}")
        self.yes: Yes = answer
        self.bench, self._turn, self._stack = bench, 0, ExitStack()
        self.inherited = answer.impl.startswith("ref.") and bench.backend.name != "ref"
        self.function = bench.functions[answer.impl]
        try:
            names = [n.rstrip("?") for n in spec.inputs]
            first = [bench.hold(self._stack, *what, op) for what in zip(names, operands, kept, strict=True)]
            weights = [i for i, operand in enumerate(operands) if isinstance(operand, Weight)]
            self.weight_bytes = sum(_bytes_of(first[i]) for i in weights)
            self._sets = [first] + [[self._again(t) if i in weights else t for i, t in enumerate(first)] for _ in range(1, copies)]
            results = tuple(self._result(shape, dtype) for shape, dtype in outs)
            self._out: Any = results[0] if len(results) == 1 else results
            self._ws = self._result((answer.workspace,), "i8") if answer.workspace else None
        except BaseException:
            self._stack.close()
            raise

    def _again(self, tensor: Tensor | None) -> Tensor:
        """A second copy of a weight, elsewhere in the device's memory."""
        assert tensor is not None
        backend, stream = self.bench.backend, self.bench.stream
        buffer = backend.alloc(tensor.buffer.nbytes, "weights")
        self._stack.callback(buffer.close)
        backend.copy(buffer, 0, tensor.buffer, 0, buffer.nbytes, stream)
        stream.synchronize()
        return replace(tensor, buffer=buffer)

    def _result(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        nbytes = max(1, int(np.prod(shape, dtype=np.int64)) * np.dtype(NUMPY[dtype]).itemsize)
        buffer = self.bench.backend.alloc(nbytes, "scratch")
        self._stack.callback(buffer.close)
        return Tensor(buffer, 0, shape, dtype)

    def call(self) -> None:
        """Enqueues the op once, with the next copy of its weights."""
        operands = self._sets[self._turn]
        self._turn = (self._turn + 1) % len(self._sets)
        self.function(*operands, out=self._out, stream=self.bench.stream, ws=self._ws, **self.attrs)

    def time(self) -> Timing:
        """Measures it."""
        return timed(self.call, self.bench.stream.synchronize)

    def time_alone(self) -> Timing:
        """The same, waiting after every call: what one op costs that nothing follows."""

        def call() -> None:
            self.call()
            self.bench.stream.synchronize()

        return timed(call, lambda: None)

    def __enter__(self) -> Prepared:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _bytes_of(weight: Tensor | None) -> int:
    """Bytes of a weight as the backend keeps it."""
    assert weight is not None
    return weight.packed.nbytes if weight.packed else int(np.prod(weight.shape)) * np.dtype(NUMPY[weight.dtype]).itemsize
