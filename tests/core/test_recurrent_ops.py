"""`short_conv` and `delta_rule` on ref and cpu_avx: a sequence in any chunks, its own slot only, and zeros at position 0."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from fastllm.api import RefBackend, SlotSpec, Stream, Tensor
from fastllm.backends.cpu_avx import _native
from fastllm.backends.cpu_avx.backend import CpuBackend
from fastllm.core.errors import EngineError, ShapeError
from fastllm.core.graph import GraphBuilder

SLOTS, CHANNELS, TAPS = 3, 6, 4
RNG = np.random.default_rng(0)
RUNNABLE = [name for i, name in enumerate(_native.isa_names()) if _native.isa_missing(i) is None]


class State:
    """Slots of one layer, and the two ops on them."""

    def __init__(self, shape, isa=None):
        """isa: a variant of cpu_avx; None: ref."""
        self.backend, self.spec = RefBackend() if isa is None else CpuBackend(threads=2, isa=isa), SlotSpec(shape)
        self.prefix = "ref." if isa is None else ""
        self.nbytes = int(np.prod(shape)) * 4
        self.slots = np.full((SLOTS, *shape), 7.0, np.float32)  # of whoever had them before
        self.buffer = self.backend.wrap_host(self.slots.reshape(-1).view(np.uint8), False)
        self.tensor = Tensor(self.buffer, 0, (), "slot", spec=self.spec, num_blocks=SLOTS, block_bytes=self.nbytes)

    def run(self, op, rowed, fixed, first, slot, **attrs):
        """Rows of one sequence from position `first` on."""
        count = len(rowed[0])
        step = [np.arange(first, first + count, dtype=np.int32), np.array([0, count], np.int32), np.array([slot], np.int32)]
        shape = rowed[2].shape if op == "delta_rule" else rowed[0].shape
        out = np.full(shape, np.nan, np.float32)
        operands = [self.wrap(a) for a in (*rowed, *fixed, *step)]
        self.backend.ops()[f"{self.prefix}{op}"](self.tensor, *operands, out=self.wrap(out), stream=Stream(), ws=None, **attrs)
        return out

    def wrap(self, array):
        dtype = {"f": "f32", "i": "i32"}[array.dtype.kind]
        return Tensor(self.backend.wrap_host(array.reshape(-1).view(np.uint8), False), 0, array.shape, dtype)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


CONV = ("short_conv", (TAPS - 1, CHANNELS), [normal(20, CHANNELS)], [normal(CHANNELS, TAPS)], {"kind": "silu"})
DELTA = (
    "delta_rule",
    (4, 3, 5),
    [normal(20, 2, 3), normal(20, 2, 3), normal(20, 4, 5), normal(20, 4), normal(20, 4)],
    [normal(4), normal(4)],
    {"eps": 1e-6},
)


@pytest.mark.parametrize("isa", [None, *RUNNABLE])
@pytest.mark.parametrize(("op", "shape", "rowed", "fixed", "attrs"), [CONV, DELTA], ids=["short_conv", "delta_rule"])
def test_a_sequence_has_the_same_bits_in_any_chunks_and_leaves_other_slots_alone(op, shape, rowed, fixed, attrs, isa):
    whole_state = State(shape, isa)
    whole = whole_state.run(op, rowed, fixed, 0, 1, **attrs)
    assert np.isfinite(whole).all()
    for cuts in ([0, 1, 2, 9, 20], list(range(21))):
        state, parts = State(shape, isa), []
        for a, b in pairwise(cuts):
            parts.append(state.run(op, [np.ascontiguousarray(x[a:b]) for x in rowed], fixed, a, 2, **attrs))
        assert np.array_equal(np.concatenate(parts), whole)
        assert np.array_equal(state.slots[2], whole_state.slots[1])
        assert (state.slots[:2] == 7.0).all()
    again = whole_state.run(op, rowed, fixed, 0, 1, **attrs)
    assert np.array_equal(again, whole)
    later = whole_state.run(op, rowed, fixed, 20, 1, **attrs)
    assert not np.array_equal(later, whole)


WIDE_CONV = ("short_conv", (7, 150), [normal(9, 150)], [normal(150, 8)], {"kind": "gelu_tanh"})
WIDE_DELTA = (
    "delta_rule",
    (6, 40, 130),
    [normal(9, 3, 40), normal(9, 3, 40), normal(9, 6, 130), normal(9, 6) * 4, normal(9, 6) * 4],
    [normal(6), normal(6)],
    {"eps": 1e-6},
)


@pytest.mark.parametrize(("op", "shape", "rowed", "fixed", "attrs"), [CONV, DELTA, WIDE_CONV, WIDE_DELTA], ids=lambda v: v if isinstance(v, str) else "")
def test_every_variant_of_cpu_avx_gives_the_same_bits_and_those_of_ref_nearly(op, shape, rowed, fixed, attrs):
    wanted = State(shape).run(op, rowed, fixed, 0, 1, **attrs)
    found = []
    for isa in RUNNABLE:
        state = State(shape, isa)
        found.append((state.run(op, rowed, fixed, 0, 1, **attrs), state.slots.copy()))
    for values, slots in found:
        assert np.array_equal(values, found[0][0])
        assert np.array_equal(slots, found[0][1])
    np.testing.assert_allclose(found[0][0], wanted, rtol=2e-5, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.parametrize(("op", "shape", "rowed", "fixed", "attrs"), [CONV, DELTA], ids=["short_conv", "delta_rule"])
def test_cpu_avx_checks_slots_and_the_share_of_sequences_before_it_touches_memory(op, shape, rowed, fixed, attrs):
    state = State(shape, RUNNABLE[-1])
    for slot in (3, -1):
        with pytest.raises(EngineError, match=f"index {slot} at place 0 is outside of its table of 3 rows"):
            state.run(op, rowed, fixed, 0, slot, **attrs)


@pytest.mark.parametrize("isa", [None, RUNNABLE[-1]])
@pytest.mark.parametrize(("op", "shape", "rowed", "fixed", "attrs"), [CONV, DELTA], ids=["short_conv", "delta_rule"])
@pytest.mark.parametrize(("starts", "at"), [([0, 4], "1\\] = 4"), ([0, 2], "1\\] = 2"), ([1, 3], "0\\] = 1"), ([-1, 3], "0\\] = -1"), ([0, 3, 2], "2\\] = 2")])
def test_a_share_of_sequences_that_cannot_be_is_an_error_and_touches_nothing(op, shape, rowed, fixed, attrs, isa, starts, at):
    state = State(shape, isa)
    few = [np.ascontiguousarray(x[:3]) for x in rowed]
    step = [np.arange(3, dtype=np.int32), np.array(starts, np.int32), np.zeros(len(starts) - 1, np.int32)]
    out = np.full((rowed[2] if op == "delta_rule" else rowed[0])[:3].shape, np.nan, np.float32)
    with pytest.raises(EngineError, match=rf"query_start\[{at} does not divide the 3 tokens"):
        state.backend.ops()[f"{state.prefix}{op}"](
            state.tensor, *(state.wrap(a) for a in (*few, *fixed, *step)), out=state.wrap(out), stream=Stream(), ws=None, **attrs
        )
    assert (state.slots == 7.0).all()
    assert np.isnan(out).all()


def test_a_slot_that_does_not_exist_is_an_error():
    op, shape, rowed, fixed, attrs = CONV
    with pytest.raises(IndexError, match="state slot 3 is outside of 0…2"):
        State(shape).run(op, rowed, fixed, 0, 3, **attrs)


def test_states_and_windows_that_do_not_fit_are_refused():
    g = GraphBuilder("t")
    x = g.embed(g.input("ids"), g.weight("embed", (32, 6)))
    weight = g.weight("conv", (6, 4), "f32")
    with pytest.raises(ShapeError, match=r"a state of f32\[3, 6\]"):
        g.short_conv(g.slot_state("wrong", (4, 6)), x, weight)
    y = g.short_conv(g.slot_state("right", (3, 6)), x, weight)
    window = g.window(y, 2, (2, 2))
    assert (window.shape, window.view.offset, window.view.strides) == (("T", 2, 2), 2, (6, 2, 1))
    with pytest.raises(ShapeError, match=r"a row of 6 elements has no window of \[2, 2\] at 3"):
        g.window(y, 3, (2, 2))
    with pytest.raises(ShapeError, match="delta_rule"):
        g.delta_rule(g.slot_state("s", (2, 2, 2)), window, window, window, x, x, weight, weight)
