"""The fake accelerator: right results through the real engine, and each fault it exists for is found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastllm.api import CATALOGUE, EngineError, No, OutOfMemory, RefBackend, UnsupportedError, UsageError, Yes
from fastllm.backends.fake.backend import FakeBackend, LateStream
from fastllm.conformance.suite.honesty import questions
from fastllm.core.executor import Executor
from fastllm.core.placement import Placement
from fastllm.core.planner import make_plan
from fastllm.core.plugins import BackendRegistry
from fastllm.formats import open_model
from fastllm.models import build
from tests.core.devices import LIMITS, batch, tiny

FIXTURES = Path(__file__).parent.parent / "models" / "fixtures"
STEPS = (((3, 1, 4), 0), ((15, 9), 3), ((2, 6, 5, 3), 5))  # ids, position of the first


def executor(backends, device):
    graph, refs, sources = tiny()
    return Executor(make_plan(graph, refs, sources, backends, Placement.on(device), LIMITS), refs, sources, backends)


@pytest.mark.parametrize(
    "options", [{}, {"without": "rms_norm,rope"}, {"without": "attention"}, {"inherit": "all"}, {"inherit": "linear"}]
)
def test_same_bits_as_ref(options):
    with RefBackend() as ref, FakeBackend(**options) as fake:
        here, there = executor({"ref": ref}, "ref"), executor({"fake": fake, "ref": ref}, "fake")
        for ids, start in STEPS:
            expected = here.run(batch(ids, start)).logits
            assert np.array_equal(there.run(batch(ids, start)).logits, expected)
        assert fake.memory().used > 0
        there.close()
        assert fake.memory().used == 0
        here.close()


def logits_of(name, backends, fallback):
    """(plan, logits of 11 tokens, in a prompt of 8 and 3 steps) of a small model file on the first of `backends`."""
    folder = FIXTURES / name
    ids = np.array(json.loads((folder / "fixture.json").read_text())["ids"][:11], np.int32)
    with open_model(folder) as files:
        model = build(files.kind, files.architecture, files.config, files.tensors, context_limit=40)
        device = next(iter(backends))
        plan = make_plan(model.graph, model.weights, files.tensors, backends, Placement.on(device), LIMITS, fallback=fallback)
        executor = Executor(plan, model.weights, files.tensors, backends)
        try:
            steps = [(0, 8), (8, 9), (9, 10), (10, 11)]
            return plan, np.concatenate([executor.run(replace(batch(ids[a:b], a), state_slot=np.zeros(1, np.int32))).logits.copy() for a, b in steps])
        finally:
            executor.close()


@pytest.mark.parametrize(
    ("name", "without", "leaves"),
    [
        ("mixtral", "moe", set()),
        ("mixtral", "route_topk", {"route_topk"}),
        ("deepseek_v3", "concat,moe", set()),
        ("qwen3_next", "short_conv,moe", set()),
        ("qwen3_next", "delta_rule", {"delta_rule"}),
    ],
)
def test_a_device_without_extended_ops_runs_their_core_ops_or_leaves_them_to_another(name, without, leaves):
    _, wanted = logits_of(name, {"ref": RefBackend()}, "error")
    with FakeBackend(without=without) as fake:
        plan, found = logits_of(name, {"fake": fake, "ref": RefBackend()}, "warn")
        assert {left.op for left in plan.left} == leaves
        assert not {n.op for n in plan.graph.nodes} & (set(without.split(",")) - leaves)
        assert found.tobytes() == wanted.tobytes()
    with FakeBackend(without=without) as fake:
        if leaves:
            with pytest.raises(UnsupportedError, match="would leave device 'fake'") as caught:
                logits_of(name, {"fake": fake, "ref": RefBackend()}, "error")
            assert f"opened without '{without}'" in caught.value.why
        else:
            assert logits_of(name, {"fake": fake}, "error")[1].tobytes() == wanted.tobytes()


def test_every_op_can_be_left_out_or_inherited():
    ops = [op for op in CATALOGUE if op != "sample"]  # which is the host's
    with FakeBackend(inherit="all") as device:
        answers = [device.supports(questions(op)) for op in ops]
    assert {a.impl.partition(".")[0] for a in answers if isinstance(a, Yes)} == {"ref"}
    assert [op for op, a in zip(ops, answers, strict=True) if isinstance(a, No)] == ["softcap"]  # core ops take its place everywhere
    with FakeBackend(without=",".join(CATALOGUE)) as device:
        assert {type(device.supports(questions(op))) for op in ops} == {No}


def test_a_result_that_is_not_waited_for_is_poison(monkeypatch):
    late = executor({"fake": FakeBackend()}, "fake")
    monkeypatch.setattr(LateStream, "synchronize", lambda self: None)
    assert np.isnan(late.run(batch((3, 1, 4))).logits).all()


def test_a_copy_that_is_missing_is_poison():
    backends = {"fake": FakeBackend(without="rms_norm"), "ref": RefBackend()}
    graph, refs, sources = tiny()
    plan = make_plan(graph, refs, sources, backends, Placement.on("fake"), LIMITS)
    assert any(s.copies for s in plan.segments)
    plan.segments = [replace(s, copies=()) if s.device == "fake" else s for s in plan.segments]
    assert np.isnan(Executor(plan, refs, sources, backends).run(batch((3, 1, 4))).logits).all()


def test_host_memory_that_is_written_too_early_changes_the_result():
    device = FakeBackend()
    stream, memory, source = device.new_stream(), device.alloc(4, "staging"), bytearray(b"abcd")
    device.upload(memory, 0, memoryview(source), stream)
    source[:] = b"wxyz"
    stream.synchronize()
    got = bytearray(4)
    device.download(memoryview(got), memory, 0, stream)
    assert got == b"\xff" * 4
    stream.synchronize()
    assert got == b"wxyz"


def test_new_and_returned_memory():
    device = FakeBackend(memory=1000)
    assert device.alloc(8, "state").handle.bytes.tolist() == [0] * 8
    buffer = device.alloc(8, "kv")
    bytes_of = buffer.handle.bytes
    assert np.isnan(bytes_of.view(np.float32)).all()
    bytes_of[:] = 1
    assert device.memory().used == 16
    buffer.close()
    buffer.close()
    assert device.memory() == replace(device.memory(), total=1000, free=992, used=8)
    assert (bytes_of == 0xFF).all()
    with pytest.raises(ValueError, match="after it was closed"):
        buffer.handle  # noqa: B018
    with pytest.raises(OutOfMemory, match="993 bytes does not fit: 992"):
        device.alloc(993, "scratch")
    device.alloc(992, "scratch")
    with pytest.raises(OutOfMemory, match="the host has no memory left"):
        FakeBackend().alloc(1 << 60, "weights")


@pytest.mark.parametrize(("offset", "size"), [(-1, 4), (0, 9), (8, 1), (6, 3)])
def test_what_leaves_a_buffer_is_refused_at_once(offset, size):
    device = FakeBackend()
    buffer, other = device.alloc(8, "kv"), device.alloc(64, "kv")
    stream = device.new_stream()
    for call in (
        lambda: device.upload(buffer, offset, memoryview(bytes(size)), stream),
        lambda: device.download(memoryview(bytearray(size)), buffer, offset, stream),
        lambda: device.copy(buffer, offset, other, 0, size, stream),
        lambda: device.copy(other, 0, buffer, offset, size, stream),
    ):
        with pytest.raises(EngineError, match="kv buffer of 8 bytes"):
            call()
    assert not stream.work


def test_an_event_waits_for_what_came_before_it():
    device = FakeBackend()
    stream, event, memory = device.new_stream(), device.new_event(), device.alloc(2, "staging")
    event.synchronize()
    device.upload(memory, 0, memoryview(b"a"), stream)
    event.record(stream)
    device.upload(memory, 1, memoryview(b"b"), stream)
    event.synchronize()
    assert bytes(memory.handle.bytes) == b"a\xff"
    stream.synchronize()
    assert bytes(memory.handle.bytes) == b"ab"


def test_a_late_error_names_the_op_and_the_device_stays_usable():
    late = executor({"fake": FakeBackend()}, "fake")
    good = late.run(batch((3, 1, 4))).logits.copy()
    with pytest.raises(EngineError, match="embed failed on the fake device") as caught:
        late.run(batch((99, 1, 4)))
    assert "id 99" in caught.value.why
    assert np.array_equal(late.run(batch((3, 1, 4))).logits, good)


@pytest.mark.parametrize(
    ("options", "match"),
    [({"without": "atention"}, "'atention', which is no op"), ({"inherit": "x"}, "no op"), ({"memory": -1}, "at least 0")],
)
def test_wrong_options_are_refused(options, match):
    with pytest.raises(UsageError, match=match):
        FakeBackend(**options)


def test_it_registers_like_a_stranger_and_is_never_chosen_by_itself():
    registry = BackendRegistry(env={"FASTLLM_PLUGINS": "fake", "FASTLLM_DISABLE_PLUGINS": "cpu_avx,opencl_generic"})
    assert registry.state("fake").state == "ready"
    assert registry.select("auto").name == "ref"
    with registry.open(registry.select("fake"), {"without": "softmax"}) as device:
        assert isinstance(device, FakeBackend)
