"""Plans over several devices: state, copies, waiting, limits of a device, and what a backend is told."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastllm.api import KVSpec, Limits, OutOfMemory, RefBackend, Yes
from fastllm.core.errors import EngineError, ShapeError, UnsupportedError, UsageError
from fastllm.core.executor import Executor
from fastllm.core.graph import GraphBuilder
from fastllm.core.ops import CATALOGUE
from fastllm.core.placement import DeviceShare, Placement, PlacementRule
from fastllm.core.planner import make_plan
from fastllm.core.weights import TensorSource, WeightRef

from .devices import LIMITS, Accelerator, LateAccelerator, batch, logits_of, tiny


def run(graph, weights=None, device=None, ids=(3, 1, 4)):
    """Logits of a graph on one device. weights: name -> f32 array."""
    backend = device or RefBackend()
    sources = {n: TensorSource(n, a.shape, "f32", a.reshape(-1).view(np.uint8)) for n, a in (weights or {}).items()}
    refs, backends = {n: WeightRef(n) for n in sources}, {"d": backend}
    executor = Executor(make_plan(graph, refs, sources, backends, Placement.on("d"), LIMITS), refs, sources, backends)
    result = executor.run(batch(ids)).logits.copy()
    executor.close()
    return result


@pytest.mark.parametrize("lacks", ["attention", "kv_write"])
def test_ops_that_share_a_state_stay_together(lacks):
    whole, _ = logits_of({"ref": RefBackend()}, Placement.on("ref"))
    split, plan = logits_of({"acc": Accelerator(lacks=(lacks,)), "ref": RefBackend()}, Placement.on("acc"))
    assert np.array_equal(whole, split)
    left = {plan.graph.nodes[d.node].op: d.reason for d in plan.fallbacks}
    other = {"attention": "kv_write", "kv_write": "attention"}[lacks]
    assert left == {lacks: f"acc: no {lacks} here", other: f"acc: its state is also that of {lacks}: no {lacks} here"}
    assert [d for d, name in plan.places if name == "kv.0"] == ["ref"]


def test_a_rule_for_the_reader_of_a_state_moves_its_writer_too():
    whole, _ = logits_of({"ref": RefBackend()}, Placement.on("ref"))
    placement = Placement((DeviceShare("ref"),), (PlacementRule("acc", op="attention"),))
    split, plan = logits_of({"ref": RefBackend(), "acc": Accelerator()}, placement)
    assert np.array_equal(whole, split)
    assert not plan.fallbacks
    assert {plan.graph.nodes[d.node].op for d in plan.decisions if d.device == "acc"} == {"kv_write", "attention"}


def test_work_that_is_done_late_is_waited_for():
    graph, refs, sources = tiny()
    reference = {"ref": RefBackend()}
    now = Executor(make_plan(graph, refs, sources, reference, Placement.on("ref"), LIMITS), refs, sources, reference)
    for lacks in ((), ("rms_norm", "rope"), ("attention", "embed")):
        backends = {"late": LateAccelerator(lacks=lacks), "ref": RefBackend()}
        late = Executor(make_plan(graph, refs, sources, backends, Placement.on("late"), LIMITS), refs, sources, backends)
        for ids, start in (((3, 1, 4), 0), ((15, 9), 3), ((2, 6, 5, 3), 5)):
            for executor in (now, late):
                executor.copy_block(3, 2)
            table = (2, 5, 1, 0)
            expected = now.run(batch(ids, start, table=table)).logits
            assert np.array_equal(late.run(batch(ids, start, table=table)).logits, expected)
            assert not late._streams["late"].work
        late.close()
    now.close()


def test_a_copy_inside_a_device_leaves_nothing_to_do():
    device = LateAccelerator()
    stream, memory = device.new_stream(), device.alloc(8, "kv")
    device.upload(memory, 0, memoryview(np.arange(4, dtype=np.uint8)), stream)
    device.copy(memory, 4, memory, 0, 4, stream)
    assert not stream.work
    assert memory.handle.bytes.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_failed_step_is_waited_for_and_the_next_one_is_right():
    graph, refs, sources = tiny()
    backends = {"late": LateAccelerator(lacks=("embed",)), "ref": RefBackend()}
    executor = Executor(make_plan(graph, refs, sources, backends, Placement.on("late"), LIMITS), refs, sources, backends)
    good = executor.run(batch((3, 1, 4))).logits.copy()
    with pytest.raises(IndexError, match="id 99"):  # on the host, while the step's arrays are on their way to the device
        executor.run(batch((99, 1, 4)))
    assert not executor._streams["late"].work
    assert np.array_equal(executor.run(batch((3, 1, 4))).logits, good)


@pytest.mark.parametrize("format", ["f32", "f16"])
def test_a_weight_has_arrived_before_its_host_memory_goes(format):
    graph, refs, sources = tiny()
    for name, source in sources.items():
        values = source.data.view(np.float32).astype({"f32": np.float32, "f16": np.float16}[format])
        sources[name] = TensorSource(name, source.shape, format, values.view(np.uint8))
    device, left = LateAccelerator(), []
    stream = device.new_stream()
    device.new_stream = lambda: stream
    plan = make_plan(graph, refs, sources, {"late": device}, Placement.on("late"), LIMITS)
    Executor(plan, refs, sources, {"late": device}, lambda *_: left.append(len(stream.work))).close()
    assert left == [0] * 5


def test_a_step_that_samples_nothing_crosses_devices():
    graph, refs, sources = tiny()
    backends = {"acc": Accelerator(lacks=("linear", "embed")), "ref": RefBackend()}
    plan = make_plan(graph, refs, sources, backends, Placement.on("acc"), LIMITS)
    executor = Executor(plan, refs, sources, backends)
    assert any(plan.graph.values[c.value].shape[0] == "R" for s in plan.segments for c in s.copies)
    assert executor.run(batch((3, 1, 4), rows=())).logits.shape == (0, 32)


def test_a_block_table_wider_than_planned_is_refused():
    graph, refs, sources = tiny()
    backends = {"ref": RefBackend()}
    executor = Executor(make_plan(graph, refs, sources, backends, Placement.on("ref"), LIMITS), refs, sources, backends)
    with pytest.raises(EngineError, match="5 columns exceeds the plan: 4"):
        executor.run(batch((1,), table=(3, 5, 1, 0, 2)))


def test_a_device_with_small_buffers_gets_several():
    device = Accelerator()
    device.limits = Limits(max_alloc=8 * 1024)  # less than the three weights below
    largest = []
    alloc = device.alloc
    device.alloc = lambda nbytes, kind: largest.append(nbytes) or alloc(nbytes, kind)
    g = GraphBuilder("wide")
    x = g.embed(g.input("ids"), g.weight("a", (32, 40)))
    x = g.embed(g.input("sample_rows"), g.linear(g.linear(x, g.weight("b", (40, 40))), g.weight("c", (40, 40))))
    graph = g.build(x)
    rng = np.random.default_rng(1)
    weights = {n: rng.standard_normal(s).astype(np.float32) for n, s in (("a", (32, 40)), ("b", (40, 40)), ("c", (40, 40)))}
    assert np.array_equal(run(graph, weights, device), run(graph, weights))
    assert max(largest) <= 8 * 1024
    assert device.live == 0
    device.limits = Limits(max_alloc=1024)
    with pytest.raises(OutOfMemory, match="one buffer may hold 1,024"):
        run(graph, weights, device)
    assert device.live == 0


def test_a_backend_is_told_of_caches_and_ranges():
    asked = []

    class Curious(RefBackend):
        def supports(self, q):
            asked.append(q)
            return super().supports(q)

    logits_of({"ref": Curious()}, Placement.on("ref"))
    attention = next(q for q in asked if q.op == "attention")
    assert attention.specs[:3] == (None, KVSpec(2, 4, 4), None)
    assert attention.shapes[5] == ("S", "B")
    assert attention.dims["B"] == (0, 4)
    assert "sample" not in {q.op for q in asked}  # the executor samples


def test_a_backend_gets_the_workspace_it_asked_for():
    seen = []

    class Needy(Accelerator):
        def supports(self, q):
            answer = super().supports(q)
            sizes = {"linear": 96, "add": 640}
            return Yes(answer.impl, workspace=sizes[q.op]) if isinstance(answer, Yes) and q.op in sizes else answer

        def compile(self, sub, env):
            seen.append(env.workspace)

        def _op_add(self, *inputs, ws, **rest):
            seen.append(ws)
            super()._op_add(*inputs, ws=ws, **rest)

    device = Needy()
    _, plan = logits_of({"acc": device}, Placement.on("acc"))
    assert plan.arenas[("acc", "workspace")] == [640]
    assert {(ws.shape, ws.dtype, ws.buffer.kind) for ws in seen} == {((640,), "i8", "scratch")}
    assert len(seen) == 2
    assert device.live == 0


def test_two_weights_of_one_node_in_the_form_of_the_file():
    g = GraphBuilder("t")
    x = g.embed(g.input("ids"), g.weight("e", (32, 8)))
    graph = g.build(g.embed(g.input("sample_rows"), g.linear(x, g.weight("w", (4, 8)), g.weight("b", (4,)))))
    rng = np.random.default_rng(0)
    weights = {n: rng.standard_normal(s).astype(np.float32) for n, s in (("e", (32, 8)), ("w", (4, 8)), ("b", (4,)))}
    expected = weights["e"][[3, 1, 4]] @ weights["w"].T + weights["b"]
    assert np.allclose(run(graph, weights), expected, atol=1e-5)


def test_a_table_is_not_widened_for_a_lookup_that_runs_elsewhere():
    class Half(Accelerator):
        def supports(self, q):
            q = replace(q, dtypes=tuple("f32" if d == "f16" and q.op == "linear" else d for d in q.dtypes))
            answer = super().supports(q)
            return Yes("half.linear") if q.op == "linear" and isinstance(answer, Yes) else answer

    graph, refs, sources = tiny()
    for name, source in sources.items():
        sources[name] = TensorSource(name, source.shape, "f16", source.data.view(np.float32).astype(np.float16).view(np.uint8))
    backends = {"half": Half(lacks=("embed",)), "ref": RefBackend()}
    plan = make_plan(graph, refs, sources, backends, Placement.on("half"), LIMITS)
    forms = {key: plan.places[key].dtype for key in (("half", "embed"), ("ref", "embed"), ("half", "q"))}
    assert forms == {("half", "embed"): "f16", ("ref", "embed"): "f32", ("half", "q"): "f16"}


def test_a_decomposition_never_touches_values_of_the_same_name():
    g = GraphBuilder("t")
    x = g.embed(g.input("ids"), g.weight("e", (32, 8)))
    kept = g.act_mul(x, kind="relu")  # the second node, as the activation inside of a soft cap
    graph = g.build(g.embed(g.input("sample_rows"), g.add(g.softcap(kept, 2.0), kept)))
    table = np.random.default_rng(0).standard_normal((32, 8)).astype(np.float32)
    relu = np.maximum(table[[3, 1, 4]], 0)
    assert np.allclose(run(graph, {"e": table}), 2 * np.tanh(relu / 2) + relu, atol=1e-6)


def test_a_decomposition_may_use_views_and_must_make_its_result(monkeypatch):
    def halves(g, inputs, attrs):
        parts = g.view(inputs[0], ("T", 2, 4))
        low, high = (g.slice(g.view(g.mul(parts, g.scalar(3.0)), ("T", 8)), a, a + 4) for a in (0, 4))
        scaled = g.add(low, high)
        return (g.view(scaled, ("T", 2, 2)),) if attrs["cap"] == 1.0 else (g.act_mul(scaled, kind="relu"),)

    spec = CATALOGUE["softcap"]
    shape = lambda o, specs, a: [((o[0][0][0], 4), "f32")]  # noqa: E731
    monkeypatch.setitem(CATALOGUE, "softcap", type(spec)("softcap", ("x",), shape, spec.attrs, halves, doc=spec.doc))
    table = np.random.default_rng(0).standard_normal((32, 8)).astype(np.float32)

    def graph(cap):
        g = GraphBuilder("t")
        x = g.embed(g.input("ids"), g.weight("e", (32, 8)))
        return g.build(g.embed(g.input("sample_rows"), g.softcap(x, cap)))

    rows = 3 * table[[3, 1, 4]]
    assert np.allclose(run(graph(2.0), {"e": table}), np.maximum(rows[:, :4] + rows[:, 4:], 0), atol=1e-6)
    with pytest.raises(ShapeError, match="decomposition of 'softcap'"):
        run(graph(1.0), {"e": table})


def test_a_placement_on_a_device_that_is_not_open_is_refused():
    with pytest.raises(UsageError, match="names device 'gpu', which is not open"):
        logits_of({"ref": RefBackend()}, Placement.on("gpu"))


def test_nobody_runs_a_group_when_no_device_runs_all_of_it():
    backends = {"a": Accelerator(lacks=("attention",)), "b": Accelerator(lacks=("kv_write",))}
    with pytest.raises(UnsupportedError, match="'kv_write', 'attention'") as error:
        logits_of(backends, Placement.on("a"))
    assert "a: no attention here" in error.value.why
    assert "b: no kv_write here" in error.value.why


def test_memory_is_returned_if_closing_a_program_fails():
    class Broken:
        def run(self, dims):
            """Nothing."""

        def close(self):
            raise RuntimeError("driver")

    class Device(Accelerator):
        def compile(self, sub, env):
            return Broken()

    graph, refs, sources = tiny()
    device = Device()
    executor = Executor(make_plan(graph, refs, sources, {"d": device}, Placement.on("d"), LIMITS), refs, sources, {"d": device})
    with pytest.raises(RuntimeError, match="driver"):
        executor.close()
    assert device.live == 0


def test_a_value_on_three_devices_is_right_on_each():
    g = GraphBuilder("t")
    x = g.embed(g.input("ids"), g.weight("e", (32, 8)))
    a = g.act_mul(x, kind="relu")
    b = g.softmax(x)
    c = g.rms_norm(x, None, eps=1e-5)
    y = g.add(g.add(g.add(a, b), c), x)
    graph = g.build(g.embed(g.input("sample_rows"), y))
    table = np.random.default_rng(0).standard_normal((32, 8)).astype(np.float32)
    sources = {"e": TensorSource("e", (32, 8), "f32", table.reshape(-1).view(np.uint8))}
    backends = {"ref": RefBackend(), "p": Accelerator(), "q": LateAccelerator()}
    rules = (PlacementRule("p", op="softmax"), PlacementRule("q", op="rms_norm"), PlacementRule("p", op="add"))
    plan = make_plan(graph, {"e": WeightRef("e")}, sources, backends, Placement((DeviceShare("ref"),), rules), LIMITS)
    executor = Executor(plan, {"e": WeightRef("e")}, sources, backends)
    assert np.array_equal(executor.run(batch((3, 1, 4))).logits, run(graph, {"e": table}))
    assert len(plan.segments) == 5
    again = make_plan(graph, {"e": WeightRef("e")}, sources, backends, Placement((DeviceShare("ref"),), rules), LIMITS)
    assert (again.places, again.segments, again.decisions) == (plan.places, plan.segments, plan.decisions)


@pytest.mark.parametrize("device", [RefBackend, LateAccelerator])
def test_latent_attention_equals_attention_with_stored_values(device):
    def graph(stored):
        g = GraphBuilder("latent")
        x = g.embed(g.input("ids"), g.weight("e", (32, 12)))  # [latent 8 | rope 4]
        key = g.view(x, ("T", 1, 12))
        cache = g.kv_cache("kv.0", 1, 12, 8 if stored else 0)
        g.kv_write(cache, key, g.slice(key, 0, 8) if stored else None)
        query = g.view(g.linear(x, g.weight("q", (36, 12))), ("T", 3, 12))
        out = g.attention(query, cache, scale=0.3, **({} if stored else {"value_dim": 8}))  # [T, 3, 8]
        up = g.matmul(out, g.weight("up", (3, 5, 8)))  # [T, 3, 5]: one matrix per head
        return g.build(g.embed(g.input("sample_rows"), g.view(up, ("T", 15))))

    rng = np.random.default_rng(2)
    shapes = {"e": (32, 12), "q": (36, 12), "up": (3, 5, 8)}
    weights = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    latent = run(graph(stored=False), weights, device(), ids=(3, 1, 4, 1, 5))
    assert np.array_equal(latent, run(graph(stored=True), weights, ids=(3, 1, 4, 1, 5)))
    assert np.std(latent) > 0.1
