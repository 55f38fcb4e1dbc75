"""Operands of kernels: checked windows on buffers, as the arguments that the kernels of `kernels/` take.

A leading dimension may be a symbol (T, S, R) whose number is known when a step runs; everything else is an integer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastllm.api import FORMATS, PackedLayout, ShapeError, Tensor

__all__ = ["F32", "I32", "I64", "Absent", "Matrix", "Operand", "Pointer", "contiguous", "matrix", "packed", "vector"]

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
    t, strides = s.tensor, _checked_strides(s, dtypes or ("f32",))
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
    strides = _checked_strides(s, (dtype,))
    if len(s.tensor.shape) != 1 or (s.tensor.shape[0] > 1 and strides[0] != 1):
        raise ShapeError(f"a contiguous vector is needed, not shape {list(s.tensor.shape)} with strides {list(strides)}")
    return _pointer(s.tensor)


def packed(s: Operand) -> tuple[PackedLayout, Pointer]:
    """A packed weight: its layout and where it is, in bytes."""
    t, layout = s.tensor, s.tensor.packed
    if layout is None or tuple(t.shape) != tuple(layout.shape) or t.offset < 0 or t.offset + layout.nbytes > t.buffer.nbytes:
        raise ShapeError(f"this is not a weight that was packed here: {layout}")
    return layout, Pointer(t.buffer.handle, t.offset)


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides, step = [], 1
    for dim in reversed(shape):
        strides.append(step)
        step *= dim
    return tuple(reversed(strides))


def _pointer(t: Tensor) -> Pointer:
    return Pointer(t.buffer.handle, t.offset // FORMATS[t.dtype].block_bytes)


def _checked_strides(s: Operand, dtypes: tuple[str, ...]) -> tuple[int, ...]:
    t = s.tensor
    if t.dtype not in dtypes or t.packed is not None:
        raise ShapeError(f"an operand of {' or '.join(dtypes)} is needed, not {'packed ' if t.packed else ''}{t.dtype}")
    strides = t.strides if t.strides is not None else contiguous(t.shape)
    if 0 in t.shape:
        return contiguous(t.shape)  # nothing is read or written, whatever the strides say
    if len(strides) != len(t.shape) or min(strides, default=0) < 0:
        raise ShapeError(f"strides {list(strides)} of shape {list(t.shape)} are negative or of another rank")
    if len(t.shape) > 1 and t.shape[-1] > 1 and strides[-1] != 1:
        raise ShapeError(f"the last axis must be contiguous; strides are {list(strides)}")
    size = FORMATS[t.dtype].block_bytes
    span = 1 + sum((n - 1) * k for n, k in zip(t.shape, strides, strict=True))
    if t.offset < 0 or t.offset + span * size > t.buffer.nbytes or t.offset % size:
        raise ShapeError(f"a window of {span * size} bytes at {t.offset} leaves its buffer of {t.buffer.nbytes}, or is not aligned")
    return strides
