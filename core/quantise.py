"""Converting a tensor to another format: blocks of rows are decoded and encoded by several threads.

Every block is computed alone and blocks have a fixed size, so the bytes never depend on the number of threads. At most a few blocks
are decoded at a time, however large the tensor is. `WeightRef.resolve` comes here when a model is loaded with another dtype, and
`fastllm convert` when it is written.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from .cgroup import cpu_quota
from .errors import ModelFileError, UnsupportedError
from .quant import FORMATS
from .weights import HostTensor

__all__ = ["ENCODED", "Loss", "convert"]

BLOCK_VALUES = 1 << 20
"""Values that are decoded at a time, by each thread."""

ENCODED = ("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", *(f.name for f in FORMATS.values() if f.code_bits))
"""Formats that can be written."""


@dataclass
class Loss:
    """What a conversion changed: sums over values of the squared difference and of the squared value, and the largest relative
    error of one block of rows' group (of 256 values where the format has no groups)."""

    squared_error: float = 0.0
    squared_value: float = 0.0
    worst: float = 0.0

    @property
    def relative(self) -> float:
        """‖W − W'‖ / ‖W‖."""
        return math.sqrt(self.squared_error / self.squared_value) if self.squared_value else 0.0

    def add(self, other: Loss) -> None:
        """Takes the sums of another part of the tensor in."""
        self.squared_error += other.squared_error
        self.squared_value += other.squared_value
        self.worst = max(self.worst, other.worst)


def convert(tensor: HostTensor, format: str, *, search: bool = True, loss: Loss | None = None, threads: int = 0) -> HostTensor:
    """The tensor in another format of ENCODED, whose blocks divide its rows.

    search: group formats are fitted instead of encoded by min-max. loss: takes in what was lost. threads: 0 = the cores this
    process may use. Raises ModelFileError for values that the format cannot hold, ShapeError for rows of another size,
    UnsupportedError for a format that cannot be written.
    """
    if format not in ENCODED:
        raise UnsupportedError(f"'{format}' cannot be written", why=f"these can: {', '.join(ENCODED)}")
    row = tensor.shape[-1] if tensor.shape else 1
    rows = int(np.prod(tensor.shape[:-1], dtype=np.int64)) if tensor.shape else 1
    row_bytes, out_bytes = tensor.quant.nbytes(row), FORMATS[format].nbytes(row)
    out = np.empty(rows * out_bytes, np.uint8)
    step = max(1, BLOCK_VALUES // max(1, row))

    def work(start: int) -> Loss:
        stop = min(rows, start + step)
        part = HostTensor(tensor.name, (stop - start, row), tensor.format, tensor.data[start * row_bytes : stop * row_bytes])
        encoded, lost = _encode(part, format, search)
        out[start * out_bytes : stop * out_bytes] = encoded
        return lost

    for lost in _in_order(work, range(0, rows, step), threads or _cores()):
        if loss is not None:
            loss.add(lost)
    return HostTensor(tensor.name, tensor.shape, format, out)


def _in_order(work, starts: range, threads: int) -> Iterator[Loss]:  # type: ignore[no-untyped-def]
    """work(start) of every start, in order, by several threads; not more than two blocks per thread are under way."""
    if threads <= 1 or len(starts) <= 1:
        yield from map(work, starts)
        return
    with ThreadPoolExecutor(min(threads, len(starts))) as pool:
        waiting: list[Future[Loss]] = []
        for start in starts:
            waiting.append(pool.submit(work, start))
            if len(waiting) >= 2 * threads:
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()


def _encode(part: HostTensor, format: str, search: bool) -> tuple[np.ndarray, Loss]:
    """Bytes of a block of rows in the format, and what was lost."""
    from . import _kernels

    values = np.ascontiguousarray(part.decode())  # [rows, row]
    group = FORMATS[format].block if FORMATS[format].block > 1 else math.gcd(part.shape[-1], 256)
    squares = np.square(values.reshape(-1, group), dtype=np.float64).sum(axis=1)  # [groups]
    try:
        if FORMATS[format].code_bits:
            data, errors = _kernels.encode_groups(format, values, search=search)
        else:
            data = np.ascontiguousarray(_kernels.encode(format, values)).reshape(-1)
            back = _kernels.decode(format, data, values.size).reshape(-1, group)
            errors = np.square(back.astype(np.float64) - values.reshape(-1, group)).sum(axis=1)
    except UnsupportedError as error:
        raise ModelFileError(f"tensor '{part.name}': {error.message}", fix="keep it as it is: --no-quant-layer") from None
    if not np.isfinite(errors).all():
        raise ModelFileError(f"tensor '{part.name}' holds NaN, infinity, or values beyond {format}", fix="download the model again")
    relative = np.divide(errors, squares, out=np.zeros_like(errors), where=squares > 0)
    return data, Loss(float(errors.sum()), float(squares.sum()), math.sqrt(float(relative.max(initial=0.0))))


def _cores() -> int:
    quota = cpu_quota()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores if quota is None else min(cores, int(quota)))
