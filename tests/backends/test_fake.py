"""The fake accelerator: right results through the real engine, and each fault it exists for is found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastllm.api import EngineError, OutOfMemory, RefBackend, UsageError
from fastllm.backends.fake.backend import FakeBackend, LateStream
from fastllm.core.executor import Executor
from fastllm.core.placement import Placement
from fastllm.core.planner import make_plan
from fastllm.core.plugins import BackendRegistry
from tests.core.devices import LIMITS, batch, tiny

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
