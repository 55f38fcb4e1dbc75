"""Operands of an instruction: a tensor as address, sizes and strides, checked, and what touching it means for other threads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from fastllm.api import FORMATS, ShapeError, Tensor, checked_strides, contiguous

from . import _native

__all__ = [
    "ALIGNMENT",
    "DTYPES",
    "SYMBOLS",
    "Access",
    "Shape",
    "Source",
    "View",
    "access",
    "address_of",
    "cache_access",
    "matrix",
    "packed_stack",
    "packed_weight",
    "vector",
]

SYMBOLS: Final = {"T": 1, "S": 2, "R": 3, "S+1": 4, "R+1": 5}
DTYPES: Final = {"f32": 0, "f16": 1, "bf16": 2, "i32": 3, "i8": 4}

ALIGNMENT: Final = 64
"""Of the matrices of a stack (Limits.alignment)."""

Shape = tuple[int | str, ...]
View = tuple[int, int, int, int, int, int, int, int]
"""(address, symbol, rows, stride 0, stride 1, d1, d2, dtype)."""


@dataclass(frozen=True)
class Source:
    """An operand: where it lives (at its largest shape), its shape with symbols, and the address of the value it is a window on."""

    tensor: Tensor
    shape: Shape
    anchor: int


@dataclass(frozen=True)
class Access:
    """Memory that an instruction touches. part: how threads share it, None if a thread may touch all of it; anchor, stride: which
    base value, and bytes from one row of it to the next."""

    low: int
    high: int
    write: bool
    part: tuple[str, int | str] | None = None
    anchor: int = 0
    stride: int = 0

    def of_one_row(self) -> Access:
        """The same in a step of one row: one thread has it, whatever value it belongs to."""
        return replace(self, part=("rows", 1), anchor=0, stride=0) if self.part in (("rows", "T"), ("rows", "R")) else self

    def conflicts(self, other: Access) -> bool:
        """True if different threads may touch the same bytes, one of them writing."""
        if self.low >= other.high or other.low >= self.high or not (self.write or other.write):
            return False
        same = self.part is not None and (self.part, self.anchor, self.stride) == (other.part, other.anchor, other.stride)
        return not same or (self.part is not None and self.part[0] == "columns" and self.low != other.low)


def matrix(s: Source, dtypes: tuple[str, ...] = ("f32",)) -> View:
    """An operand of two or three dimensions, or of one where each element is a row (symbolic) or all are one row. Raises ShapeError
    for strides that no kernel takes, a dtype that is not among `dtypes`, or a window that leaves its buffer."""
    t, strides = s.tensor, _checked_strides(s, dtypes)
    symbol = SYMBOLS.get(str(s.shape[0]), 0) if isinstance(s.shape[0], str) else 0
    dtype = DTYPES[t.dtype]
    if len(t.shape) == 1:
        if symbol:
            return (address_of(t), symbol, t.shape[0], strides[0], 0, 1, 1, dtype)
        return (address_of(t), 0, 1, t.shape[0], 0, 1, t.shape[0], dtype)
    if len(t.shape) == 2:
        return (address_of(t), symbol, t.shape[0], strides[0], 0, 1, t.shape[1], dtype)
    if len(t.shape) == 3:
        return (address_of(t), symbol, t.shape[0], strides[0], strides[1], t.shape[1], t.shape[2], dtype)
    raise ShapeError(f"cpu_avx takes values of up to three dimensions, not {list(t.shape)}")


def vector(s: Source, dtype: str) -> View:
    """An operand of one dimension, contiguous."""
    t, strides = s.tensor, _checked_strides(s, (dtype,))
    if len(t.shape) != 1 or (t.shape[0] > 1 and strides[0] != 1):
        raise ShapeError(f"a contiguous vector is needed, not shape {list(t.shape)} with strides {list(strides)}")
    symbol = SYMBOLS.get(str(s.shape[0]), 0) if isinstance(s.shape[0], str) else 0
    return (address_of(t), symbol, t.shape[0], 1, 0, 1, t.shape[0], DTYPES[dtype])


def packed_weight(s: Source) -> tuple[int, int, int, int]:
    """(layout number, N, K, address) of a packed weight."""
    layout = s.tensor.packed
    number = -1 if layout is None else _native.layout_number(layout.id)
    fits = layout is not None and tuple(s.tensor.shape) == tuple(layout.shape) and len(layout.shape) == 2
    if layout is None or number < 0 or not fits or s.tensor.offset < 0 or s.tensor.offset + layout.nbytes > s.tensor.buffer.nbytes:
        raise ShapeError(f"this is not a weight that cpu_avx packed: {layout}")
    return (number, layout.shape[0], layout.shape[1], address_of(s.tensor))


def packed_stack(s: Source) -> tuple[int, int, int, int, int]:
    """(layout number, N, K, address, bytes from one matrix to the next) of a packed stack [E, N, K]."""
    layout = s.tensor.packed
    number = -1 if layout is None else _native.layout_number(layout.id)
    fits = layout is not None and len(s.tensor.shape) == 3 and tuple(s.tensor.shape[1:]) == tuple(layout.shape)
    stride = -(-layout.nbytes // ALIGNMENT) * ALIGNMENT if layout is not None else 0
    if layout is None or number < 0 or not fits or s.tensor.offset < 0 or s.tensor.offset + s.tensor.shape[0] * stride > s.tensor.buffer.nbytes:
        raise ShapeError(f"this is not a stack of weights that cpu_avx packed: {layout}")
    return (number, layout.shape[0], layout.shape[1], address_of(s.tensor), stride)


def _checked_strides(s: Source, dtypes: tuple[str, ...]) -> tuple[int, ...]:
    strides, size = checked_strides(s.tensor, dtypes), FORMATS[s.tensor.dtype].block_bytes
    if 0 not in s.tensor.shape and address_of(s.tensor) % size:
        raise ShapeError(f"host memory at {address_of(s.tensor):#x} is not aligned to elements of {size} bytes")
    return strides


def address_of(t: Tensor) -> int:
    """The first byte of a tensor."""
    return int(t.buffer.handle) + t.offset


def access(s: Source, write: bool, part: tuple[str, int | str] | None = None, stride: int = 0) -> Access:
    """What touching an operand touches; see `Access`."""
    t = s.tensor
    low = address_of(t)
    if t.packed is not None:
        return Access(low, low + t.packed.nbytes, write)
    strides = t.strides if t.strides is not None else contiguous(t.shape)
    span = 0 if 0 in t.shape else 1 + sum((n - 1) * k for n, k in zip(t.shape, strides, strict=True))
    return Access(low, low + span * FORMATS[t.dtype].block_bytes, write, part, s.anchor, stride)


def cache_access(c: tuple[int, ...], write: bool) -> Access:
    """What touching a cache (address, block bytes, blocks, …) touches: who writes owns slots."""
    return Access(c[0], c[0] + c[1] * c[2], write, ("slots", 0) if write else None, c[0], 0)
