"""What a device can do at most, measured now: bytes read per second and multiply-adds per second (kernels/probe.fl). Called by `backend.py`
for plans and reports."""

from __future__ import annotations

import time
from typing import Any, Final

import numpy as np

from .runtime import KernelKey, Runtime
from .tuning import Tuning

__all__ = ["multiply_adds", "read_rate"]

FLOATS: Final = 16384
"""Read by a group: whole steps of every shape of kernels (4 · LANES · VEC)."""
MOST_BYTES: Final = 256 << 20
ROUNDS: Final = 20_000
CHAINS: Final = 8
REPEATS: Final = 4
ENOUGH_GROUPS: Final = 512
"""Groups that occupy any GPU; a CPU has four for each of its units."""


def read_rate(runtime: Runtime, tuning: Tuning, nbytes: int) -> float:
    """Bytes per second of reading about `nbytes` (1 to 256 MiB) once: the best of some runs. Raises OutOfMemory."""
    groups = max(16, min(nbytes, MOST_BYTES) // (4 * FLOATS))
    source = runtime.alloc(groups * 4 * FLOATS, True)  # filled: pages that nobody wrote are no memory yet
    try:
        seconds = _seconds(runtime, tuning, "read_all", [source, np.uint64(0)], [np.int32(FLOATS)], groups)
    finally:
        runtime.free(source)
    return groups * 4 * FLOATS / seconds


def multiply_adds(runtime: Runtime, tuning: Tuning) -> float:
    """Operations per second in f32, a multiply-add counted as two."""
    groups = 4 * runtime.caps.units if runtime.caps.is_cpu else ENOUGH_GROUPS
    seconds = _seconds(runtime, tuning, "multiply_add", [], [np.int32(ROUNDS)], groups)
    return 2.0 * CHAINS * ROUNDS * groups * tuning.lanes * tuning.vec / seconds


def _seconds(runtime: Runtime, tuning: Tuning, entry: str, before: list[Any], after: list[Any], groups: int) -> float:
    """The shortest run of a probe, from launch to the end of waiting."""
    out = runtime.alloc(4 * groups * tuning.lanes, True)
    try:
        bound = runtime.bind(KernelKey.of("probe.fl", entry, tuning.row), [*before, out, np.uint64(0), *after])
        best = float("inf")
        for _ in range(1 + REPEATS):
            runtime.finish()
            start = time.perf_counter()
            runtime.launch(bound, (groups,), tuning.lanes)
            runtime.finish()
            best = min(best, time.perf_counter() - start)
    finally:
        runtime.free(out)
    return best
