"""opencl_generic as a part of the whole: drivers that are missing or fail, and tiny models on a device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fastllm import models
from fastllm.api import BackendUnavailable, DeviceLost, EngineError, OutOfMemory, Tensor, Unavailable
from fastllm.backends.opencl_generic import plugin
from fastllm.backends.opencl_generic import runtime as opencl
from fastllm.core.executor import Executor
from fastllm.core.placement import Placement
from fastllm.core.planner import StepLimits, make_plan
from fastllm.core.plugins import BackendRegistry
from fastllm.core.step import StepBatch
from fastllm.formats import open_model

FIXTURES = Path(__file__).parents[1] / "models" / "fixtures"
LIMITS = StepLimits(max_tokens=40, max_sequences=2, max_rows=40, context=64, block_size=16, num_blocks=8)


@pytest.fixture(scope="module")
def cl():
    return pytest.importorskip("pyopencl", reason="pyopencl is not installed (pip install 'fastllm-engine[opencl]')")


@pytest.fixture
def device(cl):
    """The first device."""
    try:
        return next(iter(opencl.devices().values()))
    except opencl.Missing as missing:
        pytest.skip(f"{missing.reason}: {missing.hint}")


# drivers that are missing or fail -----------------------------------------------------------------------------------------


def test_without_pyopencl_the_probe_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    answer = plugin.fastllm_probe("opencl_generic")
    assert isinstance(answer, Unavailable)
    assert "pyopencl" in answer.reason
    assert "fastllm-engine[opencl]" in answer.hint
    with pytest.raises(BackendUnavailable, match="pyopencl"):
        plugin.fastllm_open_backend("opencl_generic", "0.0", {})


def test_a_platform_without_devices_is_named(cl, monkeypatch):
    class Platform:
        name = "Empty Platform"

        def get_devices(self):
            return []

    monkeypatch.setattr(cl, "get_platforms", lambda: [Platform()])
    answer = plugin.fastllm_probe("opencl_generic")
    assert isinstance(answer, Unavailable)
    assert "Empty Platform" in answer.reason


def run_cli(*arguments, vendors):
    env = os.environ | {"OCL_ICD_VENDORS": str(vendors)}
    command = [sys.executable, "-m", "fastllm", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_without_a_driver_the_name_is_an_error_and_nothing_else_is(cl, tmp_path):
    listed = run_cli("backends", "list", vendors=tmp_path)
    assert listed.returncode == 0
    line = next(row for row in listed.stdout.splitlines() if row.startswith("opencl_generic"))
    assert "unavailable" in line
    assert "no OpenCL driver (ICD)" in line
    named = run_cli("plan", str(FIXTURES / "llama"), "--backend", "opencl_generic", "--no-measure", vendors=tmp_path)
    assert named.returncode == 4
    assert "pocl-opencl-icd" in named.stderr
    other = run_cli("plan", str(FIXTURES / "llama"), "--no-measure", vendors=tmp_path)
    assert other.returncode == 0, other.stderr


def test_a_kernel_that_does_not_build_shows_the_compilers_log(device, monkeypatch):
    monkeypatch.setattr(opencl, "kernel_source", lambda name: "__kernel void rms_norm() { no_such_thing(); }")
    with plugin.fastllm_open_backend("opencl_generic", "0.0", {}) as backend:
        buffer = backend.alloc(64, "scratch")
        x = Tensor(buffer, 0, (1, 16), "f32")
        with pytest.raises(BackendUnavailable, match="refuses kernel 'rms_norm'") as caught:
            backend.ops()["rms_norm"](x, None, out=x, stream=backend.new_stream(), ws=None, eps=1e-5)
    assert "no_such_thing" in caught.value.why
    assert "driver" in caught.value.fix


@pytest.mark.parametrize(("least", "lines"), [(-1.0, 1), (1e9, 0)])
def test_compiling_that_takes_long_is_said_once(device, monkeypatch, tmp_path, caplog, least, lines):
    """And not at all by the next run, which only loads what is kept, slowly or not."""
    monkeypatch.setattr(opencl, "TELL_S", least)
    monkeypatch.setenv("FASTLLM_HOME", str(tmp_path))
    for told in (lines, 0):
        with plugin.fastllm_open_backend("opencl_generic", "0.0", {}) as backend:
            buffer = backend.alloc(64, "scratch")
            for width in (8, 16):  # two programs
                x = Tensor(buffer, 0, (1, width), "f32")
                backend.ops()["rms_norm"](x, None, out=x, stream=backend.new_stream(), ws=None, eps=1e-5)
        assert [r.getMessage() for r in caplog.records].count("fastllm: opencl_generic compiles its kernels; the next start finds them compiled") == told
        caplog.clear()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("MEM_OBJECT_ALLOCATION_FAILURE", OutOfMemory), ("OUT_OF_HOST_MEMORY", OutOfMemory), ("DEVICE_NOT_AVAILABLE", DeviceLost),
        ("INVALID_COMMAND_QUEUE", DeviceLost), ("INVALID_WORK_GROUP_SIZE", EngineError),
    ],
)  # fmt: skip
def test_errors_of_the_driver_have_a_class_of_ours(cl, device, monkeypatch, code, kind):
    runtime = opencl.ClRuntime(device, "opencl_generic")

    def fail(*_, **__):
        raise cl.Error(f"clEnqueueFillBuffer failed: {code}")

    monkeypatch.setattr(cl, "enqueue_fill_buffer", fail)
    with pytest.raises(kind, match=code) as caught:
        runtime.alloc(64, True)
    assert type(caught.value) is kind
    monkeypatch.undo()
    runtime.free(runtime.alloc(64, True))


def test_after_close_everything_raises_and_nothing_crashes(device):
    backend = plugin.fastllm_open_backend("opencl_generic", "0.0", {})
    buffer = backend.alloc(64, "scratch")
    stream = backend.new_stream()
    backend.close()
    backend.close()
    for call in (
        lambda: backend.alloc(64, "scratch"),
        lambda: backend.upload(buffer, 0, memoryview(b"1"), stream),
        lambda: backend.download(memoryview(bytearray(1)), buffer, 0, stream),
        stream.synchronize,
    ):
        with pytest.raises(ValueError, match="after it was closed"):
            call()
    buffer.close()


# models -----------------------------------------------------------------------------------------------------------------


class Model:
    """A tiny model on one backend, every op of it there: logits of any ragged batch."""

    def __init__(self, path, backend, **options):
        registry = BackendRegistry()
        self.files = open_model(path)
        model = models.build(self.files.kind, self.files.architecture, self.files.config, self.files.tensors)
        self.backend = registry.open(registry.select(backend), options)
        opened = {backend: self.backend}
        self.plan = make_plan(model.graph, model.weights, self.files.tensors, opened, Placement.on(backend), LIMITS, fallback="error")
        self.executor = Executor(self.plan, model.weights, self.files.tensors, opened)

    def logits(self, *sequences):
        """sequences: (ids, tokens that are in the cache already, cache blocks)."""
        ids = np.concatenate([s[0] for s in sequences]).astype(np.int32)
        positions = np.concatenate([np.arange(s[1], s[1] + len(s[0])) for s in sequences]).astype(np.int32)
        slots = np.concatenate([[s[2][p // 16] * 16 + p % 16 for p in range(s[1], s[1] + len(s[0]))] for s in sequences])
        starts = np.cumsum([0, *(len(s[0]) for s in sequences)]).astype(np.int32)
        lengths = np.array([s[1] + len(s[0]) for s in sequences], np.int32)
        table = np.array([[*s[2], 0, 0, 0][:4] for s in sequences], np.int32)
        rows = np.arange(len(ids), dtype=np.int32)
        return self.executor.run(StepBatch(ids, positions, slots.astype(np.int32), starts, lengths, table, rows)).logits.copy()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.executor.close()
        self.backend.close()
        self.files.close()


IDS = [int(i) for i in np.random.default_rng(4).integers(3, 250, 40)]


@pytest.mark.parametrize("kernels", ["vector", "lanes"])
@pytest.mark.parametrize("name", ["gemma3", "smollm3"])
def test_a_model_gives_the_logits_of_ref(device, name, kernels):
    with Model(FIXTURES / name, "ref") as model:
        wanted = model.logits((IDS, 0, [3, 1, 6]))
    with Model(FIXTURES / name, "opencl_generic", kernels=kernels, kv_dtype="f32") as model:
        assert not model.plan.fallbacks
        assert len(model.plan.segments) == 1
        assert not any(s.copies for s in model.plan.segments)
        assert np.abs(model.logits((IDS, 0, [3, 1, 6])) - wanted).max() < 1e-4 * wanted.std()


def test_chunks_and_neighbours_change_no_bit(device):
    with Model(FIXTURES / "gemma3", "opencl_generic") as model:
        whole = model.logits((IDS, 0, [3, 1, 6]))
        parts = [model.logits((IDS[a:b], a, [7, 2, 5])) for a, b in ((0, 1), (1, 18), (18, 39), (39, 40))]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
        model.logits((IDS[:10], 0, [4]))
        crowd = model.logits((IDS[10:11], 10, [4]), (IDS[:39], 0, [0, 2, 1]))
        np.testing.assert_array_equal(crowd[1:], whole[:39])


def test_a_program_keeps_nothing_after_close(device):
    with Model(FIXTURES / "gemma3", "opencl_generic") as model:
        model.logits((IDS, 0, [3, 1, 6]))
        model.executor.close()
        assert model.backend.memory().used == 0


def test_a_wrong_id_fails_the_step_and_not_the_next(device):
    with Model(FIXTURES / "gemma3", "opencl_generic") as model:
        wanted = model.logits((IDS, 0, [3, 1, 6]))
        with pytest.raises(EngineError, match="op 'embed': id 9999 of row 1"):
            model.logits(([5, 9999], 0, [3]))
        with pytest.raises(EngineError, match="op 'kv_write': slot"):
            model.logits((IDS, 0, [3, 99, 6]))
        np.testing.assert_array_equal(model.logits((IDS, 0, [3, 1, 6])), wanted)


def test_built_kernels_are_kept_across_runs(device, tmp_path, monkeypatch):
    """Where the driver keeps none itself, as PoCL and NVIDIA's do."""
    monkeypatch.setattr("pyopencl.characterize.has_src_build_cache", lambda device: False)
    monkeypatch.setattr("pyopencl._PYOPENCL_NO_CACHE", False)
    monkeypatch.setenv("FASTLLM_HOME", str(tmp_path))
    for _ in range(2):
        with plugin.fastllm_open_backend("opencl_generic", "0.0", {}) as backend:
            buffer = backend.alloc(64, "scratch")
            x = Tensor(buffer, 0, (1, 16), "f32")
            backend.ops()["softmax"](x, out=x, stream=backend.new_stream(), ws=None)
            backend.new_stream().synchronize()
    files = [f for f in (tmp_path / "opencl-kernels").rglob("*") if f.is_file() and not f.name.startswith("built-")]
    assert files
    assert len({f.parent for f in files}) == 1  # the second run took what the first had built
