"""Lowering of the ops with recurrent state, short_conv and delta_rule: a part of `lower.py`, which calls it.

A slot of state has its catalogue shape, f32 and contiguous; the kernels (native/kernels/recurrent.c) read and write it in place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from fastllm.api import ShapeError, SlotSpec

from . import _native
from .operands import Access, Source, access, address_of, matrix, vector

if TYPE_CHECKING:
    from .lower import _Lowering

__all__ = ["MAX_KEY", "MAX_TAPS", "delta_rule", "short_conv"]

MAX_TAPS: Final = _native.CONV_TAPS
"""Of a short convolution: its kernel keeps the weights of a block of channels on the stack."""
MAX_KEY: Final = 1024
"""Elements of a key of delta_rule: each thread keeps columns of the state in scratch memory."""


def short_conv(lowering: _Lowering, inputs: list[Any], out: Source, act: int) -> None:
    """act: number of the activation."""
    state, x, weight, *step = inputs
    if weight.tensor.shape[1] > MAX_TAPS:
        raise ShapeError(f"op 'short_conv' with {weight.tensor.shape[1]} taps; its kernel takes {MAX_TAPS} at most")
    slots, touched = _state(lowering, state, step)
    operands = (x, weight, *step)
    accesses = [*(access(s, False) for s in operands), access(out, True), touched]
    lowering.emit("short_conv", [matrix(x), matrix(weight), matrix(out)], accesses, ints=(*slots, act))


def delta_rule(lowering: _Lowering, inputs: list[Any], out: Source, attrs: Mapping[str, Any]) -> None:
    """The gated delta rule."""
    state, query, key, value, a, b, a_log, dt_bias, *step = inputs
    width = query.tensor.shape[2]
    if width > MAX_KEY:
        raise ShapeError(f"op 'delta_rule' with keys of {width} elements; its kernel takes {MAX_KEY} at most")
    slots, touched = _state(lowering, state, step)
    lowering.result.scratch_bytes = max(lowering.result.scratch_bytes, _native.delta_scratch(width))
    views = [matrix(s) for s in (query, key, value, a, b, out)]
    ints = (*slots, vector(a_log, "f32")[0], vector(dt_bias, "f32")[0])
    accesses = [*(access(s, False) for s in inputs[1:]), access(out, True), touched]
    lowering.emit("delta_rule", views, accesses, ints=ints, floats=(attrs["eps"],))


def _state(lowering: _Lowering, state: Source, step: list[Source]) -> tuple[tuple[int, ...], Access]:
    """(address of the slots, bytes of one, addresses of positions, query_start and state_slot), whose indices are checked; what the state touches."""
    t = state.tensor
    if not isinstance(t.spec, SlotSpec):
        raise ShapeError("short_conv and delta_rule need a state of fixed size")
    fits = t.num_blocks >= 0 and t.block_bytes >= 4 * math.prod(t.spec.shape) and t.block_bytes % 4 == 0
    if not fits or t.offset < 0 or address_of(t) % 4 or t.offset + t.num_blocks * t.block_bytes > t.buffer.nbytes:
        raise ShapeError(f"a state of {t.num_blocks} slots of {t.block_bytes} bytes at {t.offset} does not hold {t.spec} in its buffer of {t.buffer.nbytes} bytes")
    positions, starts, slots = (vector(s, "i32") for s in step)
    lowering.check_starts(starts[0])
    lowering.check_index(0, step[2], t.num_blocks)
    low = address_of(t)
    return (low, t.block_bytes, positions[0], starts[0], slots[0]), Access(low, low + t.num_blocks * t.block_bytes, True)
