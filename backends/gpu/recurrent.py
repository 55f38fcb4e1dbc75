"""Lowering of the ops with recurrent state: a part of `lower.py`, which calls it. Kernels: kernels/recurrent.fl."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from fastllm.api import ShapeError, SlotSpec

from .operands import F32, I32, I64, Arg, Operand, Pointer, matrix, vector

if TYPE_CHECKING:
    from .lower import Lowering

__all__ = ["MAX_TAPS", "delta_rule", "short_conv"]

MAX_TAPS: Final = 64
"""Of a short convolution: a work-item keeps its last inputs."""
SPAN: Final = 64
"""Channels, or columns of a head's state, of a group."""


def short_conv(lowering: Lowering, inputs: list[Any], out: Operand) -> None:
    """The convolution without its activation."""
    state, x, weight, *step = inputs
    rows, w, y = matrix(x), matrix(weight), matrix(out)
    head, tail = _state(state), _step(step)
    args = (*head, *rows.args, w.pointer, I64(w.row), *tail, *y.args, lowering.fault, I32(rows.rows), _sequences(step), I32(rows.width))
    lowering.emit_recurrent("short_conv", {"TAPS": w.width}, args, step[2].shape[0], -(-rows.width // SPAN), SPAN)


def delta_rule(lowering: Lowering, inputs: list[Any], out: Operand, attrs: Mapping[str, Any]) -> None:
    """The gated delta rule."""
    state, query, key, value, a, b, a_log, dt_bias, *step = inputs
    v, q = matrix(value), matrix(query)
    moving = [arg for s in (query, key, value, a, b) for arg in matrix(s).args]
    fixed: tuple[Arg, ...] = (vector(a_log, "f32"), vector(dt_bias, "f32"))
    sizes = (I32(v.rows), _sequences(step), I32(v.heads), I32(v.heads // q.heads), I32(v.width), F32(attrs["eps"]))
    args = (*_state(state), *moving, *fixed, *_step(step), *matrix(out).args, lowering.fault, *sizes)
    lowering.emit_recurrent("delta_rule", {"DK": q.width}, args, step[2].shape[0], v.heads * -(-v.width // SPAN), SPAN)


def _step(step: list[Operand]) -> tuple[Arg, ...]:
    """positions, query_start, state_slot."""
    return tuple(vector(s, "i32") for s in step)


def _sequences(step: list[Operand]) -> I32:
    """How many the step has: state_slot has a number for each."""
    return I32(step[2].shape[0])


def _state(state: Operand) -> tuple[Arg, ...]:
    """Where the slots are, elements of one, how many."""
    t = state.tensor
    if not isinstance(t.spec, SlotSpec):
        raise ShapeError("short_conv and delta_rule need a state of fixed size")
    fits = t.num_blocks >= 0 and t.block_bytes >= 4 * math.prod(t.spec.shape) and t.block_bytes % 4 == 0 and t.offset % 4 == 0
    if not fits or t.offset < 0 or t.offset + t.num_blocks * t.block_bytes > t.buffer.nbytes:
        raise ShapeError(f"a state of {t.num_blocks} slots of {t.block_bytes} bytes at {t.offset} does not hold {t.spec} in its buffer of {t.buffer.nbytes} bytes")
    return (Pointer(t.buffer.handle, t.offset // 4), I64(t.block_bytes // 4), I32(t.num_blocks))
