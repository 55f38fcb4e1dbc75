"""`concat` and `short_conv` as core ops, on a device that lacks them: the same bits, and only where it copies exactly and is worth it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastllm.api import CATALOGUE, GraphBuilder, KVSpec, No, RefBackend, SlotSpec, Yes
from fastllm.backends.cpu_avx.backend import CpuBackend
from fastllm.core.errors import ShapeError, UnsupportedError
from fastllm.core.executor import Executor
from fastllm.core.placement import Placement
from fastllm.core.planner import StepLimits, make_plan
from fastllm.core.step import StepBatch

from .devices import random_weights
from .test_experts_decomposed import Other, Own

LIMITS = StepLimits(max_tokens=24, max_sequences=3, max_rows=24, context=48, block_size=16, num_blocks=9)


def conv_model(channels, taps, gap=False):
    """Logits of a `short_conv`; gap: its operand is a window on a wider value."""
    g = GraphBuilder("conv")
    weight, refs, sources = random_weights(g, 5, 1.0)
    x = g.embed(g.input("ids"), weight("embed", (32, channels + 3 * gap)))
    x = g.slice(x, 2, channels + 2) if gap else x
    out = g.short_conv(g.slot_state("conv.0", (taps - 1, channels)), x, weight("kernel", (channels, taps), "f32"))
    logits = g.embed(g.input("sample_rows"), out)
    return g.build(logits, g.sample(logits)), refs, sources


def concat_model(heads, left, right):
    """Values [T, heads, left + right], and what they are made of."""
    g = GraphBuilder("concat")
    weight, refs, sources = random_weights(g, 6, 1.0)
    lead = ("T", heads) if heads else ("T",)
    x, y = (g.view(g.embed(g.input("ids"), weight(name, (32, max(heads, 1) * n))), (*lead, n)) for name, n in (("x", left), ("y", right)))
    both = g.view(g.concat(x, y), ("T", max(heads, 1) * (left + right)))
    logits = g.embed(g.input("sample_rows"), both)
    return g.build(logits, g.sample(logits)), refs, sources


def step(parts):
    """A step of sequences: (sequence, first position, ids) each. Block b of sequence s is block 4 (3 s + b) + 2 mod 9."""
    ids = [i for _, _, part in parts for i in part]
    positions = np.concatenate([np.arange(a, a + len(part)) for _, a, part in parts]).astype(np.int32)
    table = np.array([[(4 * (3 * s + b) + 2) % 9 for b in range(3)] for s, _, _ in parts], np.int32)
    owner = np.repeat(np.arange(len(parts)), [len(part) for _, _, part in parts])
    slots = (table[owner, positions // 16] * 16 + positions % 16).astype(np.int32)
    starts = np.cumsum([0, *(len(part) for _, _, part in parts)]).astype(np.int32)
    lengths = np.array([a + len(part) for _, a, part in parts], np.int32)
    states = np.array([s for s, _, _ in parts], np.int32)
    rows = np.arange(len(ids), dtype=np.int32)
    return StepBatch(np.array(ids, np.int32), positions, slots, starts, lengths, table, rows, state_slot=states)


def results(model, backends, steps, fallback="warn"):
    """The plan, and the logits of each step."""
    graph, refs, sources = model
    plan = make_plan(graph, refs, sources, backends, Placement.on(next(iter(backends))), LIMITS, fallback=fallback)
    executor = Executor(plan, refs, sources, backends)
    try:
        return plan, [executor.run(s).logits.copy() for s in steps]
    finally:
        executor.close()


def ops_of(plan):
    return {n.op for n in plan.graph.nodes}


class Cpu(CpuBackend):
    """cpu_avx without some ops."""

    lacks = ("concat", "short_conv")

    def supports(self, q):
        return No(f"no {q.op} here") if q.op in self.lacks else super().supports(q)


PAIRS = {
    "ref": lambda: ({"ref": RefBackend()}, {"own": Own(("concat", "short_conv"))}),
    "cpu_avx": lambda: ({"cpu": CpuBackend(threads=2, act="f32")}, {"cpu": Cpu(threads=2, act="f32")}),
}
STEPS = [
    [(0, 0, [3, 1]), (1, 0, [9] * 7), (2, 0, [4])],  # of two: shorter than the kernel
    [(1, 7, [5, 6, 2, 11, 8, 9, 10, 12, 13, 14]), (0, 2, [7])],  # over the end of a block
    [(2, 1, [1, 2]), (0, 3, [21]), (1, 17, [2])],
    [(0, 0, [30, 29, 28, 27, 26])],  # another sequence where one was
]


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize(("channels", "taps", "gap"), [(12, 4, False), (7, 2, True), (256, 3, False), (150, 7, True), (131, 4, False)])
def test_a_short_convolution_without_the_op_has_its_bits_in_every_sequence_and_chunk(kind, channels, taps, gap):
    with_op, without = PAIRS[kind]()
    model = conv_model(channels, taps, gap)
    steps = [step(parts) for parts in STEPS]
    whole, wanted = results(model, with_op, steps)
    plan, found = results(model, without, steps, "error")
    assert "short_conv" in ops_of(whole)
    assert ops_of(plan) <= {"embed", "mul", "add", "kv_write", "attention", "act_mul", "sample"}
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    states = {n: v.spec for n, v in plan.graph.values.items() if any(n in node.inputs for node in plan.graph.nodes) and v.kind == "state"}
    assert [(s.num_kv_heads * s.key_dim, s.value_dim, s.dtype) for s in states.values()] == [(channels, 0, "f32")]


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize(("heads", "left", "right"), [(0, 5, 3), (1, 32, 8), (4, 16, 1), (3, 33, 17)])
def test_values_side_by_side_without_the_op_have_their_bits(kind, heads, left, right):
    with_op, without = PAIRS[kind]()
    model = concat_model(heads, left, right)
    ids = [step([(0, 0, [3, 1, 4, 15])]), step([(0, 4, [9])])]
    _, wanted = results(model, with_op, ids)
    plan, found = results(model, without, ids, "error")
    assert "concat" not in ops_of(plan)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    matrices = [p for (_, n), p in plan.places.items() if n.startswith("columns.")]
    assert sum(p.nbytes for p in matrices) == 4 * (left + right) ** 2  # one matrix for all heads


def test_what_is_not_finite_spreads_over_its_row_and_no_further():
    model = concat_model(2, 4, 4)
    values = model[2]["x"].data.view(np.float32)
    values.reshape(32, 2, 4)[5, 1, 2] = np.nan
    values.reshape(32, 2, 4)[6, 0, 0] = np.inf
    _, (found,) = results(model, {"own": Own(("concat",))}, [step([(0, 0, [4, 5, 6, 7])])])
    found = found.reshape(4, 2, 8)
    assert np.isnan(found[1, 1]).all()
    assert np.isposinf(found[2, 0, 0])
    assert np.isnan(found[2, 0, 1:]).all()
    assert (~np.isfinite(found)).sum() == 2 * 8


def test_a_zero_loses_its_sign_and_nothing_else_does():
    model = concat_model(0, 4, 4)
    model[2]["x"].data.view(np.float32).reshape(32, 4)[5] = [-0.0, 0.0, -1e-45, -1.0]
    ids = [step([(0, 0, [5])])]
    _, (whole,) = results(model, {"ref": RefBackend()}, ids)
    _, (found,) = results(model, {"own": Own(("concat",))}, ids)
    assert np.signbit(whole[0, :4]).tolist() == [True, False, True, True]
    assert np.signbit(found[0, :4]).tolist() == [False, False, True, True]
    np.testing.assert_array_equal(found, whole)


def test_a_device_that_rounds_copies_nothing_by_products():
    class Rounds(Own):
        def __init__(self, **declared):
            super().__init__(("concat",))
            self.declared = declared

        def supports(self, q):
            answer = super().supports(q)
            return replace(answer, **self.declared) if isinstance(answer, Yes) and q.op in ("linear", "matmul") else answer

    model, ids = concat_model(0, 5, 3), [step([(0, 0, [3, 1])])]
    for own in (Rounds(act="q8_g32"), Rounds(acc="f16"), Rounds(weight="f16")):
        plan, _ = results(model, {"own": own, "ref": RefBackend()}, ids)
        assert [d.device for d in plan.decisions if plan.graph.nodes[d.node].op == "concat"] == ["ref"]
        with pytest.raises(UnsupportedError, match="would leave device 'own'"):
            results(model, {"own": own, "ref": RefBackend()}, ids, "error")
        with pytest.raises(UnsupportedError, match="no backend runs op 'concat'"):
            results(model, {"own": own}, ids)
    plan, _ = results(model, {"own": Rounds(act="f32", acc="f64"), "ref": RefBackend()}, ids, "error")
    assert plan.left == []


def test_a_convolution_goes_to_a_device_that_has_it_before_a_cache_takes_the_place_of_its_state():
    model, ids = conv_model(12, 4), [step([(0, 0, [3, 1, 4])])]

    def runs_on(own, other, fallback="warn"):
        plan, _ = results(model, {"own": own, "other": other, "ref": RefBackend()}, ids, fallback)
        return [d.device for d in plan.decisions if plan.graph.nodes[d.node].op == "short_conv"]

    assert runs_on(Own(("short_conv",)), Other()) == ["other"]
    assert runs_on(Own(("short_conv",)), Other(), "error") == []
    assert runs_on(Own(("short_conv",)), Other(("short_conv",))) == []  # only numpy has it elsewhere
    assert runs_on(Own(("short_conv", "attention")), Other(("short_conv", "attention"))) == ["ref"]
    own = Own(("short_conv",))
    own.kv_dtypes = ("f16",)  # would round the inputs
    assert runs_on(own, Other(("short_conv",))) == ["ref"]


def test_values_side_by_side_stay_on_their_device():
    model, ids = concat_model(2, 8, 4), [step([(0, 0, [3, 1, 4])])]
    plan, _ = results(model, {"own": Own(("concat",)), "other": Other(), "ref": RefBackend()}, ids)
    assert plan.left == []
    plan, _ = results(model, {"own": Own(("concat", "matmul")), "other": Other(), "ref": RefBackend()}, ids)
    assert [d.device for d in plan.decisions if plan.graph.nodes[d.node].op == "concat"] == ["other"]


def test_the_bytes_of_the_cache_that_takes_the_place_of_a_state_are_planned():
    plan, _ = results(conv_model(12, 4), {"own": Own(("short_conv",))}, [step([(0, 0, [3])])])
    (place,) = [p for (_, n), p in plan.places.items() if isinstance(plan.graph.values[n].spec, KVSpec)]
    assert place.block_bytes == 4 * 12 * LIMITS.block_size
    assert not any(isinstance(plan.graph.values[n].spec, SlotSpec) for _, n in plan.places)


def test_only_a_constant_repeats_and_only_a_weight_in_f32_has_columns():
    g = GraphBuilder("t")
    matrix, weight = g.const("m", np.eye(3)), g.weight("w", (4, 2), "f32")
    assert (g.repeat(matrix, 5).shape, g.repeat(matrix, 5).strides) == ((5, 3, 3), (0, 3, 1))
    assert g.column(weight, 1).shape == (4,)
    for wrong in (weight, g.repeat(matrix, 2), g.const("v", np.ones(3))):
        with pytest.raises(ShapeError, match="no constant matrix"):
            g.repeat(wrong, 2)
    for value, index in ((weight, 2), (weight, -1), (g.weight("any", (4, 2)), 0), (matrix, 0)):
        with pytest.raises(ShapeError, match="no column"):
            g.column(value, index)


def test_every_op_has_a_decomposition_or_a_reason_or_is_core():
    for name, spec in CATALOGUE.items():
        assert spec.core + (spec.decompose is not None) + bool(spec.indivisible) == 1, name
        assert spec.decompose is None or spec.decompose.__doc__
