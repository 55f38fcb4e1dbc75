"""Operands of kernels: checked windows on buffers, as the arguments that the kernels of `kernels/` take.

A leading dimension may be a symbol (T, S, R) whose number is known when a step runs; everything else is an integer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastllm.api import FORMATS, PackedLayout, ShapeError, Tensor, checked_strides

__all__ = ["F32", "I32", "I64", "Absent", "Matrix", "Operand", "Pointer", "column", "matrix", "packed", "vector"]

Size = int | str


@dataclass(frozen=True)
class Operand:
    """An operand: where it lives (at its largest shape) and its shape with symbols."""

    tensor: Tensor
    shape: tuple[Size, ...]


@dataclass(frozen=True)
class Pointer:
    """A buffer and an offset in elements: the two arguments of BUF."""

    handle: Any
    offset: int


@dataclass(frozen=True)
class Absent:
    """An optional operand that is not there: any buffer, which the kernel does not touch."""


@dataclass(frozen=True)
class I32:
    """An int argument, or a symbol that becomes one."""

    value: Size


@dataclass(frozen=True)
class I64:
    """A long argument."""

    value: int


@dataclass(frozen=True)
class F32:
    """A float argument."""

    value: float


Arg = Pointer | Absent | I32 | I64 | F32


@dataclass(frozen=True)
class Matrix:
    """rows x heads x width; strides in elements. args: those of MAT."""

    pointer: Pointer
    rows: Size
    heads: int
    width: int
    row: int
    head: int

    @property
    def args(self) -> tuple[Arg, ...]:
        """Pointer, row stride, head stride."""
        return (self.pointer, I64(self.row), I64(self.head))


def matrix(s: Operand, *dtypes: str) -> Matrix:
    """An operand of two or three dimensions, or of one where each element is a row (symbolic) or all are one row. Raises ShapeError
    for strides that no kernel takes, a dtype that is not among `dtypes` (f32), or a window that leaves its buffer."""
    t, strides = s.tensor, checked_strides(s.tensor, dtypes or ("f32",))
    at = _pointer(t)
    if len(t.shape) == 1:
        if isinstance(s.shape[0], str):
            return Matrix(at, s.shape[0], 1, 1, strides[0], 0)
        return Matrix(at, 1, 1, t.shape[0], 0, 0)
    if len(t.shape) == 2:
        return Matrix(at, s.shape[0], 1, t.shape[1], strides[0], 0)
    if len(t.shape) == 3:
        return Matrix(at, s.shape[0], t.shape[1], t.shape[2], strides[0], strides[1])
    raise ShapeError(f"kernels take values of up to three dimensions, not {list(t.shape)}")


def vector(s: Operand, dtype: str) -> Pointer:
    """An operand of one dimension, contiguous."""
    strides = checked_strides(s.tensor, (dtype,))
    if len(s.tensor.shape) != 1 or (s.tensor.shape[0] > 1 and strides[0] != 1):
        raise ShapeError(f"a contiguous vector is needed, not shape {list(s.tensor.shape)} with strides {list(strides)}")
    return _pointer(s.tensor)


def column(s: Operand, dtype: str) -> tuple[Pointer, I64]:
    """An operand of one dimension that may be a column of a matrix: where it is, and how far one element is from the next."""
    strides = checked_strides(s.tensor, (dtype,))
    if len(s.tensor.shape) != 1:
        raise ShapeError(f"a vector is needed, not shape {list(s.tensor.shape)}")
    return _pointer(s.tensor), I64(strides[0])


def packed(s: Operand) -> tuple[PackedLayout, Pointer]:
    """A packed weight: its layout and where it is, in bytes."""
    t, layout = s.tensor, s.tensor.packed
    if layout is None or tuple(t.shape) != tuple(layout.shape) or t.offset < 0 or t.offset + layout.nbytes > t.buffer.nbytes:
        raise ShapeError(f"this is not a weight that was packed here: {layout}")
    return layout, Pointer(t.buffer.handle, t.offset)


def _pointer(t: Tensor) -> Pointer:
    return Pointer(t.buffer.handle, t.offset // FORMATS[t.dtype].block_bytes)
