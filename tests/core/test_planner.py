"""Placement, arena, planner and executor, on small graphs and on backends that lack things."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastllm.api import No, RefBackend, Yes
from fastllm.core.arena import Lifetime, pack_lifetimes
from fastllm.core.errors import ModelFileError, UnsupportedError, UsageError
from fastllm.core.executor import Executor
from fastllm.core.graph import GraphBuilder
from fastllm.core.placement import DeviceShare, Placement, PlacementRule
from fastllm.core.planner import make_plan
from fastllm.core.step import StepBatch
from fastllm.core.weights import TensorSource

from .devices import LIMITS, Accelerator, batch, logits_of, tiny


def test_arena_never_overlaps_buffers_that_live_together():
    rng = np.random.default_rng(0)
    lives = []
    for i in range(200):
        first = int(rng.integers(0, 50))
        lives.append(Lifetime(str(i), first, first + int(rng.integers(0, 10)), int(rng.integers(1, 5000))))
    offsets, total = pack_lifetimes(lives, 64)
    for a in lives:
        assert offsets[a.name] % 64 == 0
        assert offsets[a.name] + a.nbytes <= total
        for b in lives:
            if a is not b and a.first <= b.last and b.first <= a.last:
                assert offsets[a.name] + a.nbytes <= offsets[b.name] or offsets[b.name] + b.nbytes <= offsets[a.name]
    peak = max(sum(b.nbytes for b in lives if b.first <= t <= b.last) for t in range(60))
    assert total < 1.3 * (peak + 64 * 40)


def test_placement_splits_layers_by_share_and_rules_win():
    g = GraphBuilder("t")
    x = g.embed(g.input("ids"), g.weight("e", (4, 4)))
    for layer in range(10):
        with g.tag(layer=layer, role="mlp" if layer % 2 else "attn"):
            x = g.add(x, x)
    x = g.mul(x, x)
    graph = g.build(x)
    split = Placement((DeviceShare("a", 4), DeviceShare("b", 1))).assign(graph)
    assert split == ["a"] * 9 + ["b"] * 3
    assert Placement((DeviceShare("x", 0), DeviceShare("a", 4), DeviceShare("b", 1), DeviceShare("y", 0))).assign(graph) == split
    rules = (PlacementRule("c", role="mlp", layers=(0, 4)), PlacementRule("d", op="mul"))
    assert Placement((DeviceShare("a"),), rules).assign(graph) == ["a", "a", "c", "a", "c", *["a"] * 6, "d"]
    with pytest.raises(UsageError):
        Placement(()).assign(graph)


def test_a_device_that_lacks_ops_gives_the_same_logits_through_copies():
    whole, plan = logits_of({"ref": RefBackend()}, Placement.on("ref"))
    assert len(plan.segments) == 1
    assert not plan.fallbacks
    device = Accelerator(lacks=("rope", "attention", "kv_write"))
    split, plan = logits_of({"acc": device, "ref": RefBackend()}, Placement.on("acc"))
    assert np.array_equal(whole, split)
    assert {plan.graph.nodes[d.node].op for d in plan.fallbacks} == {"rope", "attention", "kv_write"}
    assert all("no " in d.reason for d in plan.fallbacks)
    assert plan.copy_bytes_per_token() == (16 + 8 + 8 + 16) * 4  # q, k, v there, attention's result back
    assert device.live == 0


class Host(RefBackend):
    """As fast as a host gets: every op under its own name."""

    name = "host"

    def supports(self, q):
        answer = super().supports(q)
        return replace(answer, impl=answer.impl.replace("ref.", "host.")) if isinstance(answer, Yes) else answer

    def ops(self):
        return {name.replace("ref.", "host."): op for name, op in super().ops().items()}


def test_what_a_device_only_inherits_is_run_by_the_fastest_host_backend():
    class Partly(Accelerator):  # its own attention, so that its own cache stays there
        def supports(self, q):
            return Yes("acc.attention") if q.op == "attention" else super().supports(q)

        def ops(self):
            return {**super().ops(), "acc.attention": self._op_attention}

    whole, _ = logits_of({"ref": RefBackend()}, Placement.on("ref"))
    for backends, where in (({"host": Host()}, "host"), ({}, "acc")):
        logits, plan = logits_of({"acc": Partly(), **backends, "ref": RefBackend()}, Placement.on("acc"), fallback="warn")
        assert np.array_equal(logits, whole)
        devices = {plan.graph.nodes[d.node].op: d.device for d in plan.decisions}
        assert devices == {op: "acc" if op in ("attention", "kv_write", "sample") else where for op in devices}
        left = {op.op: op for op in plan.left}
        assert set(left) == set(devices) - {"attention", "sample"}  # kv_write is inherited, and stays with the cache
        assert "only inherits" in left["rms_norm"].reason
        assert left["rope"].bytes_per_token == (2 * (16 + 8) * 4 if where == "acc" else (16 + 8) * 4)  # there and back, or there only
    with pytest.raises(UnsupportedError, match="numpy on the host") as error:
        logits_of({"acc": Partly(), "ref": RefBackend()}, Placement.on("acc"), fallback="error")
    assert "rms_norm: acc: it only inherits this op" in error.value.why
    assert "attention" not in error.value.why


def test_extended_ops_are_decomposed_on_their_device():
    _, plan = logits_of({"acc": Accelerator()}, Placement.on("acc"))
    ops = [n.op for n in plan.graph.nodes]
    assert "softcap" not in ops
    assert ops[-4:] == ["mul", "act_mul", "mul", "sample"]
    graph, refs, sources = tiny(softcap=False)
    backends = {"ref": RefBackend()}
    plain = Executor(make_plan(graph, refs, sources, backends, Placement.on("ref"), LIMITS), refs, sources, backends)
    capped, _ = logits_of(backends, Placement.on("ref"))
    assert np.allclose(2 * np.tanh(plain.run(batch((3, 1, 4))).logits / 2), capped, atol=1e-6)


def test_fallback_error_lists_every_op_and_an_op_nobody_has_is_named():
    backends = {"acc": Accelerator(lacks=("rope", "attention")), "ref": RefBackend()}
    with pytest.raises(UnsupportedError) as error:
        logits_of(backends, Placement.on("acc"), fallback="error")
    assert error.value.exit_code == 5
    assert "attention: acc: no attention here" in error.value.why
    assert "rope: acc: no rope here" in error.value.why
    with pytest.raises(UnsupportedError, match="no backend runs op 'rope'"):
        logits_of({"acc": Accelerator(lacks=("rope",))}, Placement.on("acc"))


def test_chunks_and_neighbours_do_not_change_a_bit():
    graph, refs, sources = tiny()
    backends = {"ref": RefBackend()}
    executor = Executor(make_plan(graph, refs, sources, backends, Placement.on("ref"), LIMITS), refs, sources, backends)
    ids = [5, 9, 2, 30, 7, 1, 1, 8]
    whole = executor.run(batch(ids)).logits.copy()
    for cut in range(1, 8):
        first = executor.run(batch(ids[:cut])).logits.copy()
        second = executor.run(batch(ids[cut:], start=cut)).logits.copy()
        assert np.array_equal(np.concatenate([first, second]), whole)
    other = batch([4, 4, 4], table=(6, 7, 0, 0))
    mine = batch(ids[:4])
    both = StepBatch(
        *(np.concatenate([getattr(other, f), getattr(mine, f)]) for f in ("ids", "positions", "slots")),
        np.array([0, 3, 7], np.int32),
        np.array([3, 4], np.int32),
        np.concatenate([other.block_table, mine.block_table]),
        np.arange(3, 7, dtype=np.int32),
    )
    assert np.array_equal(executor.run(both).logits[:4], whole[:4])


def test_weights_that_are_missing_or_misshapen_are_named():
    graph, refs, sources = tiny()
    backends = {"ref": RefBackend()}

    def load(changed):
        plan = make_plan(graph, refs, changed, backends, Placement.on("ref"), LIMITS)
        return Executor(plan, refs, changed, backends)

    with pytest.raises(ModelFileError, match="tensor 'q' is missing"):
        load({k: v for k, v in sources.items() if k != "q"})
    wrong = TensorSource("q", (16, 8), "f32", sources["q"].data[: 16 * 8 * 4])
    with pytest.raises(ModelFileError, match=r"gives shape \[16, 8\].*asks for \[16, 16\]"):
        load({**sources, "q": wrong})
    assert backends["ref"].memory().used == 0


def test_a_step_larger_than_the_plan_is_refused():
    graph, refs, sources = tiny()
    backends = {"ref": RefBackend()}
    executor = Executor(make_plan(graph, refs, sources, backends, Placement.on("ref"), LIMITS), refs, sources, backends)
    with pytest.raises(Exception, match="exceeds the plan"):
        executor.run(batch([1] * 9))


def test_a_no_with_ranges_says_what_would_keep_the_op_on_its_device():
    class Short(Accelerator):
        def supports(self, q):
            if q.op == "attention" and q.dims["ctx"][1] > 8:
                return No("keys in registers", {"ctx": (0, 8)})
            return super().supports(q)

    _, plan = logits_of({"acc": Short(), "ref": RefBackend()}, Placement.on("acc"))
    (reason,) = {d.reason for d in plan.fallbacks if plan.graph.nodes[d.node].op == "attention"}
    assert reason == f"acc: keys in registers: it holds for ctx ≤ 8 of {LIMITS.context:,}; --ctx 8 keeps it there"
