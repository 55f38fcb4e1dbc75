"""`moe` as core ops, on a device that lacks it: the same bits, no stack in memory twice, and only where it is worth it."""

from __future__ import annotations

import numpy as np
import pytest

from fastllm.api import No, PackedLayout, RefBackend, Yes
from fastllm.backends.cpu_avx.backend import CpuBackend
from fastllm.core.errors import ShapeError, UnsupportedError
from fastllm.core.executor import Executor
from fastllm.core.graph import GraphBuilder
from fastllm.core.placement import Placement
from fastllm.core.planner import make_plan
from fastllm.core.weights import TensorSource, WeightRef

from .devices import LIMITS, batch, random_weights


def experts_model(count, chosen, biases=True):
    """A graph with one `moe`; refs and sources of its weights."""
    g = GraphBuilder("experts")
    weight, refs, sources = random_weights(g, 3)

    x = g.embed(g.input("ids"), weight("embed", (32, 16)))
    ids, weights = g.route_topk(g.linear(x, weight("router", (count, 16))), k=chosen)
    stacks = [weight(name, shape) for name, shape in (("gate", (count, 24, 16)), ("up", (count, 24, 16)), ("down", (count, 16, 24)))]
    tables = [weight(f"{name}.bias", (count, width), "f32") for name, width in (("gate", 24), ("up", 24), ("down", 16))] if biases else []
    x = g.add(x, g.moe(x, ids, weights, *stacks, *tables))
    rows = g.embed(g.input("sample_rows"), x)
    logits = g.linear(rows, weight("embed", (32, 16)))
    return g.build(logits, g.sample(logits)), refs, sources


class Own(RefBackend):
    """Ops of its own in numpy, but for some that it lacks and some that it only inherits."""

    name = "own"

    def __init__(self, lacks=(), inherits=()):
        super().__init__()
        self.lacks, self.inherits = lacks, inherits

    def supports(self, q):
        answer = super().supports(q)
        if q.op in self.lacks:
            return No(f"no {q.op} here")
        return Yes(f"own.{q.op}") if isinstance(answer, Yes) and q.op not in self.inherits else answer

    def ops(self):
        return {**super().ops(), **{name.replace("ref.", "own."): op for name, op in super().ops().items()}}


class Other(Own):
    """Another device with ops of its own."""

    name = "other"


def planned(backends, count, chosen, fallback="warn", biases=True):
    graph, refs, sources = experts_model(count, chosen, biases)
    plan = make_plan(graph, refs, sources, backends, Placement.on(next(iter(backends))), LIMITS, fallback=fallback)
    executor = Executor(plan, refs, sources, backends)
    try:
        return plan, np.concatenate([executor.run(batch(ids, start=a)).logits.copy() for a, ids in ((0, (3, 1, 4)), (3, (1, 5)))])
    finally:
        executor.close()


@pytest.mark.parametrize("biases", [True, False])
def test_experts_of_a_device_without_moe_are_core_ops_there_and_give_the_same_bits(biases):
    whole, wanted = planned({"ref": RefBackend()}, 5, 2, biases=biases)
    for backends, fallback in (({"own": Own(("moe",))}, "error"), ({"own": Own(("moe",)), "ref": RefBackend()}, "warn")):
        plan, found = planned(backends, 5, 2, fallback, biases)
        assert "moe" not in {n.op for n in plan.graph.nodes}
        assert plan.left == []
        assert ("own", "gate") not in plan.places  # the stack itself is not loaded
        assert plan.places[("own", "gate[4]")].shape == (24, 16)
        np.testing.assert_array_equal(found, wanted)
    assert whole.places[("ref", "gate")].nbytes == sum(plan.places[("own", f"gate[{e}]")].nbytes for e in range(5))


def test_experts_leave_a_device_where_that_is_much_less_work_or_where_it_lacks_a_part():
    def moe_runs_on(own, other, fallback="warn"):
        plan, found = planned({"own": own, "other": other, "ref": RefBackend()}, 9, 2, fallback)
        np.testing.assert_array_equal(found, wanted)
        return [(d.device, d.impl) for d in plan.decisions if plan.graph.nodes[d.node].op == "moe"]

    _, wanted = planned({"ref": RefBackend()}, 9, 2)
    assert moe_runs_on(Own(("moe",)), Other()) == [("other", "own.moe")]
    assert moe_runs_on(Own(inherits=("moe",)), Other()) == [("other", "own.moe")]
    assert moe_runs_on(Own(("moe",)), Other(), "error") == []
    for numpy_only in (Other(("moe",)), Other(inherits=("moe",))):  # numpy is as slow, and takes experts decoded to f32
        assert moe_runs_on(Own(("moe",)), numpy_only) == []
    assert moe_runs_on(Own(("moe", "embed")), Other(("moe",))) == [("ref", "ref.moe")]
    for lacking in (Own(("moe", "embed")), Own(("moe",), inherits=("embed",))):
        plan, _ = planned({"own": lacking, "ref": RefBackend()}, 5, 2)
        assert [d.device for d in plan.decisions if plan.graph.nodes[d.node].op == "moe"] == ["ref"]
    alone, _ = planned({"own": Own(("moe",))}, 9, 2)  # nobody else is there
    assert "moe" not in {n.op for n in alone.graph.nodes}


def test_an_inherited_moe_gives_way_to_its_parts_where_these_are_native_and_stays_where_they_are_inherited_too():
    for fallback, others in (("warn", {}), ("error", {}), ("warn", {"ref": RefBackend()})):
        plan, _ = planned({"own": Own(inherits=("moe",)), **others}, 5, 2, fallback)
        assert "moe" not in {n.op for n in plan.graph.nodes}
        assert plan.left == []
    for others in ({}, {"ref": RefBackend()}):
        plan, _ = planned({"own": Own(inherits=("moe", "linear")), **others}, 5, 2)
        assert [d.impl for d in plan.decisions if plan.graph.nodes[d.node].op == "moe"] == ["ref.moe"]


def test_experts_that_a_file_has_as_the_device_packs_them_are_read_from_there():
    class Maps(Own):
        maps_weights = True

        def pack_layout(self, shape, format, uses):
            return PackedLayout("own.f32", 1, format, tuple(shape), 4 * shape[0] * shape[1]) if tuple(shape) == (24, 16) else None

    own = Maps(("moe",))
    graph, refs, sources = experts_model(5, 2)
    stack = sources.pop("gate").data.view(np.float32).reshape(5, 24, 16)
    for e in range(5):
        room = np.zeros(stack[e].nbytes + 64, np.uint8)
        data = room[-room.ctypes.data % 64 :][: stack[e].nbytes]
        data[:] = stack[e].reshape(-1).view(np.uint8)
        sources[f"gate.{e}"] = TensorSource(f"gate.{e}", (24, 16), "f32", data, packed=own.pack_layout((24, 16), "f32", frozenset()))
    refs["gate"] = refs["up"] = WeightRef("", parts=tuple(WeightRef(f"gate.{e}") for e in range(5)))
    plan = make_plan(graph, refs, sources, {"own": own}, Placement.on("own"), LIMITS)
    assert plan.places[("own", "gate[4]")].arena == "mapped"
    executor = Executor(plan, refs, sources, {"own": own})
    ids = batch((3, 1, 4))
    found = executor.run(ids).logits.copy()
    executor.close()
    graph, refs, sources = experts_model(5, 2)
    refs["up"] = refs["gate"]
    wanted = Executor(make_plan(graph, refs, sources, {"ref": RefBackend()}, Placement.on("ref"), LIMITS), refs, sources, {"ref": RefBackend()})
    np.testing.assert_array_equal(found, wanted.run(ids).logits)
    wanted.close()


@pytest.mark.parametrize("chosen", [1, 2])
def test_a_cpu_without_moe_says_in_time_that_it_takes_no_ids_with_a_stride(chosen):
    class Cpu(CpuBackend):
        def supports(self, q):
            return No("no moe here") if q.op == "moe" else super().supports(q)

    _, wanted = planned({"ref": RefBackend()}, 5, chosen)
    cpu = Cpu(threads=1, act="f32")
    try:
        plan, found = planned({"cpu": cpu, "ref": RefBackend()}, 5, chosen)
        moe = [d for d in plan.decisions if plan.graph.nodes[d.node].op == "moe"]
        assert [d.device for d in moe] == ["ref"] * (chosen - 1)  # the column of one that every row chooses is contiguous
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
        if chosen > 1:
            with pytest.raises(UnsupportedError) as refused:
                planned({"cpu": cpu}, 5, chosen)
            assert refused.value.why == "cpu: 'embed' takes a contiguous vector of i32, not one with a stride of 2"
    finally:
        cpu.close()


def test_only_a_weight_has_matrices_and_only_those_that_it_has():
    g = GraphBuilder("t")
    stack = g.weight("w", (3, 4, 5))
    assert g.matrix(stack, 2).shape == (4, 5)
    for value, index in ((stack, 3), (stack, -1), (g.matrix(g.matrix(stack, 0), 0), 0), (g.input("ids"), 0)):
        with pytest.raises(ShapeError, match="no matrix"):
            g.matrix(value, index)
