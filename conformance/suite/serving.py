"""Serving level: the engine on a tiny model. Many streams, joins, cancels, exhaustion, failing allocations, thousands of steps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from fastllm.api import Buffer, Engine, OutOfMemory, Request, SamplingParams

from ..case import Case, Failure, NotApplicable, Outcome
from ..loaded import Loaded, batch_of, loaded
from ..numbers import Numbers
from ..session import Session
from ..tiny import VOCABULARY
from .common import bind

__all__ = ["MODEL", "cancels", "cases", "exhaustion", "resident_bytes", "soak", "streams"]

MODEL = "llama-q8_0"
WAIT_S = 100.0


class _Borrowed:
    """An executor that the engine may close without ending it: the case closes it."""

    def __init__(self, kit: Loaded):
        self._executor: Any = kit.executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def close(self) -> None:
        """Nothing."""


@contextmanager
def _engine(kit: Loaded, **options: Any) -> Iterator[Engine]:
    runner: Any = _Borrowed(kit)
    with Engine(runner, **options) as engine:
        yield engine


def _requests(numbers: Numbers, count: int, tokens: int) -> list[Request]:
    found = []
    for i in range(count):
        prompt = numbers.integers(3 + int(numbers.integers(1, 0, 30)[0]), 3, VOCABULARY).tolist()
        warm = i % 2
        params = SamplingParams(max_tokens=tokens, temperature=0.9 * warm, top_k=0, top_p=0.95, seed=i, ignore_eos=True)
        found.append(Request(prompt, params))
    return found


def _alone(kit: Loaded, requests: list[Request]) -> list[list[int]]:
    found = []
    for request in requests:
        with _engine(kit, prefix_cache=False) as engine:
            found.append(list(engine.submit(request).result(WAIT_S).choices[0].token_ids))
    return found


def streams(case_id: str, session: Session, numbers: Numbers) -> Outcome:
    """Eight requests from four threads give the ids of a run alone, also found in the prefix cache the second time."""
    requests = _requests(numbers, 8, 12)
    with loaded(session.backend, MODEL, num_blocks=24) as kit:
        wanted = _alone(kit, requests)
        found: dict[int, list[int]] = {}
        errors: list[BaseException] = []
        with _engine(kit) as engine:

            def work(first: int) -> None:
                try:
                    for i in range(first, len(requests), 4):
                        found[i] = list(engine.submit(requests[i]).result(WAIT_S).choices[0].token_ids)
                except BaseException as error:
                    errors.append(error)

            for _ in range(2):
                threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(WAIT_S)
                if errors:
                    raise Failure("serve", f"a request failed among others: {errors[0]}")
                for i, ids in enumerate(wanted):
                    if found.get(i) != ids:
                        raise Failure("serve", f"request {i} gives {found.get(i)} among others, {ids} alone")
    return Outcome()


def cancels(case_id: str, session: Session, numbers: Numbers) -> Outcome:
    """Requests that are cancelled in the middle of a batch leave the others' ids as they were, and give their blocks back."""
    requests = _requests(numbers, 6, 14)
    with loaded(session.backend, MODEL, num_blocks=24) as kit:
        wanted = _alone(kit, requests)
        with _engine(kit, prefix_cache=False) as engine:
            handles = [engine.submit(r) for r in requests]
            for handle in handles[1::2]:
                next(iter(handle))
                handle.cancel()
            for i in range(0, 6, 2):
                ids = list(handles[i].result(WAIT_S).choices[0].token_ids)
                if ids != wanted[i]:
                    raise Failure("serve", f"request {i} gives {ids} beside cancelled ones, {wanted[i]} alone")
            again = list(engine.submit(requests[1]).result(WAIT_S).choices[0].token_ids)
            if again != wanted[1]:
                raise Failure("serve", f"a request that was cancelled gives {again} when it is sent again, {wanted[1]} alone")
    return Outcome()


def exhaustion(case_id: str, session: Session, numbers: Numbers) -> Outcome:
    """A cache that is too small for all: requests wait or are set aside, and still give the ids of a run alone."""
    requests = _requests(numbers, 6, 40)
    with loaded(session.backend, MODEL, num_blocks=9) as kit:
        wanted = _alone(kit, requests)
        with _engine(kit) as engine:
            handles = [engine.submit(r) for r in requests]
            found = [list(h.result(WAIT_S).choices[0].token_ids) for h in handles]
    for i, ids in enumerate(wanted):
        if found[i] != ids:
            raise Failure("serve", f"request {i} gives other ids when the cache runs out: {found[i]} instead of {ids}")
    return Outcome()


def _failing_allocations(case_id: str, session: Session, numbers: Numbers) -> Outcome:
    """The k-th allocation fails while a model is loaded: OutOfMemory, everything is freed, and the next load works."""
    backend: Any = session.backend
    used = backend.memory().used
    honest = backend.alloc
    for k in range(50):
        count = iter(range(10**6))

        def alloc(nbytes: int, kind: str, count: Any = count, k: int = k) -> Buffer:
            if next(count) == k:
                raise OutOfMemory(f"allocation {k} fails on purpose", requested=nbytes, kind=kind)
            return honest(nbytes, kind)

        backend.alloc = alloc
        try:
            with loaded(backend, MODEL):
                break  # more than there are
        except OutOfMemory:
            pass
        finally:
            del backend.alloc
        if backend.memory().used != used:
            raise Failure("leak", f"after allocation {k} failed, {backend.memory().used - used:,} bytes stay in use")
    if k < 2:
        raise NotApplicable("the model is loaded with fewer than two allocations")
    with loaded(backend, MODEL) as kit:
        kit.logits(np.arange(3, 11, dtype=np.int32), [8])
    return Outcome(facts={"allocations": k})


def _reopening(case_id: str, session: Session, numbers: Numbers) -> Outcome:
    """Open, load, run, close, two hundred times: device memory is flat, and the process does not grow."""
    sizes = []
    for _ in range(200):
        backend = session.fresh()
        before = backend.memory().used
        buffer = backend.alloc(1 << 16, "scratch")
        buffer.close()
        if backend.memory().used != before:
            raise Failure("leak", "a closed buffer stays in use")
        backend.close()
        sizes.append(resident_bytes())
    grown = sizes[-1] - sizes[100]
    if sizes[0] and grown > 16 << 20:
        raise Failure("leak", f"the process grew by {grown / (1 << 20):.1f} MiB over the last hundred times")
    return Outcome(facts={"grown_bytes": grown})


def soak(case_id: str, session: Session, numbers: Numbers, steps: int) -> Outcome:
    """Thousands of decode steps on one executor: memory is flat, and the bits of step n repeat."""
    with loaded(session.backend, MODEL, num_blocks=8) as kit:
        ids = numbers.integers(96, 3, VOCABULARY).astype(np.int32)
        tables = [[0, 1, 2, 3, 4, 5]]
        first: dict[int, bytes] = {}
        used = session.backend.memory().used
        sizes = []
        for step in range(steps):
            at = step % 96
            logits = kit.executor.run(batch_of([(ids, at, 1)], tables)).logits
            if at % 24 == 23:
                if first.setdefault(at, logits.tobytes()) != logits.tobytes():
                    raise Failure("serve", f"step {step}: the logits at position {at} have other bits than the first time")
                sizes.append(resident_bytes())
        if session.backend.memory().used != used:
            raise Failure("leak", f"{session.backend.memory().used - used:,} bytes more are in use after {steps} steps")
        grown = sizes[-1] - sizes[len(sizes) // 4]
        if sizes[0] and grown > 8 << 20:
            raise Failure("leak", f"the process grew by {grown / (1 << 20):.1f} MiB over the last three quarters of {steps} steps")
    return Outcome(facts={"steps": steps})


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096
    except OSError:
        return 0


def cases() -> Iterator[Case]:
    """Gold, but for the streams, which Silver has too."""
    for name, check, level, quick in (
        ("streams", streams, "silver", True),
        ("cancels", cancels, "gold", False),
        ("exhaustion", exhaustion, "gold", False),
        ("failing_allocations", _failing_allocations, "gold", False),
        ("reopening", _reopening, "gold", False),
    ):
        case_id = f"engine/{MODEL}/-/any/{name}#serve"
        yield Case(case_id, "engine", "serving", bind(check, case_id), level, True, quick, limit_s=120.0)
    case_id = f"engine/{MODEL}/-/steps2000/soak#serve"
    yield Case(case_id, "engine", "soak", bind(soak, case_id, 2000), "gold", True, limit_s=240.0)
