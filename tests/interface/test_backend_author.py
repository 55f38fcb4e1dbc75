"""`fastllm backend new` and `status`: what is written works at once, and nothing about an op is believed."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import tomllib
from pathlib import Path

import pytest

from fastllm import scaffold
from fastllm.api import Unavailable
from fastllm.core.errors import FastLLMError, UsageError
from fastllm.scaffold import STYLES, write_backend

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("style", STYLES)
def test_every_style_is_whole(style, tmp_path):
    files = write_backend("tested_tpu", style, tmp_path)
    folder = tmp_path / "fastllm-backend-tested-tpu"
    assert files == sorted(p for p in folder.rglob("*") if p.is_file())
    for file in files:
        text = file.read_text()
        assert "$" not in text.replace("${{ matrix.python }}", "")
        assert "VENDOR" not in text
        if file.suffix in (".py", ".pyi"):
            ast.parse(text)
        if file.suffix == ".toml":
            tomllib.loads(text)
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["fastllm.backends"] == {"tested_tpu": "fastllm_backend_tested_tpu.plugin"}
    listed = {p.name for p in (folder / "src/fastllm_backend_tested_tpu").iterdir()}
    assert {"__init__.py", "plugin.py", "backend.py", "ops.py", "device.py", "conformance.toml", "py.typed"} <= listed
    assert ("_memory.pyx" in listed) == (style == "cython")
    imports = {
        node.module for f in folder.rglob("src/**/*.py") for node in ast.walk(ast.parse(f.read_text())) if isinstance(node, ast.ImportFrom)
    }
    assert {m for m in imports if m and m.startswith("fastllm")} == {"fastllm.api"}  # nothing else is promised to stay


@pytest.mark.parametrize("name", ["", "a", "3x", "Acme", "acme-npu", "a" * 33, "class", "sys", "ref", "cpu_avx", "auto", "../x", "a b", "acme_", "acme__x"])
def test_names_that_cannot_be(name, tmp_path):
    with pytest.raises(UsageError):
        write_backend(name, "numpy", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["fastllm", "engine", "core", "api", "conformance", "models", "backends", "server", "scaffold", "gpu"])
def test_a_name_of_fastllm_itself_is_refused(name, tmp_path):
    with pytest.raises(UsageError, match=f"'{name}' is a name of fastllm itself") as caught:
        write_backend(name, "numpy", tmp_path)
    assert "backend new acme_npu" in caught.value.fix
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_and_nothing_half_written_stays(tmp_path, monkeypatch):
    write_backend("tested_npu", "numpy", tmp_path)
    with pytest.raises(UsageError, match="exists"):
        write_backend("tested_npu", "opencl", tmp_path)
    with pytest.raises(UsageError, match="no style 'vulkan'"):
        write_backend("other", "vulkan", tmp_path)
    monkeypatch.setitem(scaffold.FILES, "README.md.in", "README.md/README.md.in/" + "x" * 300)
    with pytest.raises(FastLLMError, match="cannot write"):
        write_backend("other", "numpy", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["fastllm-backend-tested-npu"]


@pytest.fixture
def acme(tmp_path):
    """The numpy style as if it were installed: environment variables for a child process."""
    write_backend("tested_tpu", "numpy", tmp_path)
    source = tmp_path / "fastllm-backend-tested-tpu" / "src"
    info = source / "fastllm_backend_tested_tpu-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fastllm-backend-tested-tpu\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[fastllm.backends]\ntested_tpu = fastllm_backend_tested_tpu.plugin\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(source), os.environ.get("PYTHONPATH"))))}


def test_a_new_backend_answers_as_fast_as_the_host_and_says_that_nothing_is_native(acme, fastllm, tiny_model):
    options = ("run", tiny_model, "--prompt", "x", "--temperature", 0, "-n", 8, "--ignore-eos", "--json")
    here = json.loads(fastllm(*options, "--backend", "cpu_avx").stdout)
    done = fastllm(*options, "--backend", "tested_tpu", env=acme)
    assert done.returncode == 0, done.stderr
    there = json.loads(done.stdout)
    assert (there["output_ids"], there["backend"]) == (here["output_ids"], "tested_tpu")
    done = fastllm("backend", "status", "tested_tpu", tiny_model, "--json", env=acme)
    status = json.loads(done.stdout)
    assert {op["state"] for op in status["ops"]} == {"inherited"}
    assert status["native"] == 0
    assert fastllm("backends", "show", "tested_tpu", env=acme).returncode == 0


def test_status_observes(run, tiny_model):
    options = ("--ctx", 32, "--steps", 2, "--json", "-q")
    whole = json.loads(run("backend", "status", "fake", tiny_model, *options).out)
    assert {op["state"] for op in whole["ops"]} == {"native"}
    assert whole["native"] == whole["total"] == len(whole["ops"])
    assert whole["ranges"]["ctx"] == [0, 32]
    assert abs(sum(op["share"] for op in whole["ops"]) - 1) < 1e-6
    assert [op["seconds"] for op in whole["ops"]] == sorted((op["seconds"] for op in whole["ops"]), reverse=True)
    some = ("--backend-opt", "without=rope", "--backend-opt", "inherit=linear,add")
    parts = json.loads(run("backend", "status", "fake", tiny_model, *options, *some).out)
    assert {op["op"]: op["state"] for op in parts["ops"] if op["state"] != "native"} == {"rope": "fallback", "linear": "inherited", "add": "inherited"}
    assert parts["native"] == parts["total"] - 3
    assert parts["copy_bytes_per_token"] > 0


def test_an_op_that_claims_to_be_native_and_downloads_is_inherited(run, tiny_model, monkeypatch):
    from fastllm.api import Yes
    from fastllm.backends.fake.backend import FakeBackend

    supports, ops = FakeBackend.supports, FakeBackend.ops

    def claims(self, q):
        return Yes("fake.mine") if q.op == "add" and isinstance(supports(self, q), Yes) else supports(self, q)

    monkeypatch.setattr(FakeBackend, "supports", claims)
    monkeypatch.setattr(FakeBackend, "ops", lambda self: {**ops(self), "fake.mine": ops(self)["ref.add"]})
    status = json.loads(run("backend", "status", "fake", tiny_model, "--ctx", 32, "--steps", 1, "--json", "-q").out)
    assert {op["state"] for op in status["ops"] if op["op"] == "add"} == {"inherited"}


def test_status_in_words_and_its_errors(run, tiny_model):
    done = run("backend", "status", "cpu_avx", tiny_model, "--ctx", 32, "--steps", 1, "-q")
    assert done.out.startswith("cpu_avx: native ")
    assert re.search(r"^linear +native +cpu_avx +\d+ .*\d  \S+$", done.out, re.MULTILINE)
    some = run("backend", "status", "fake", tiny_model, "--ctx", 32, "--steps", 1, "-q", "--backend-opt", "inherit=all")
    assert re.search(r"^fake: native 0 of the \d+ kinds of op that ", some.out)
    assert re.search(r"^linear +inherited +cpu_avx ", some.out, re.MULTILINE)  # whose times these are
    assert re.search(r": [\d.]+ ms: 0\.00 native on fake, [\d.]+ inherited on cpu_avx$", some.out, re.MULTILINE)
    unknown = run("backend", "status", "nothing", tiny_model)
    assert (unknown.code, "who: backend status nothing\n" in unknown.err) == (2, True), unknown.err
    for option, value in (("--backend", "ref"), ("--device", "1")):
        twice = run("backend", "status", "fake", tiny_model, option, value)
        assert (twice.code, "the backend is the first argument" in twice.err, f"who: {option} {value}\n" in twice.err) == (2, True, True), twice.err
    assert run("backend", "status", "fake", "/no/such/file.gguf").code == 2


def test_new_on_the_command_line(run, tmp_path):
    for style, extra in (("numpy", "[test]"), ("opencl", "[runtime,test]")):
        last = run("backend", "new", f"npu_{style}", "--dir", tmp_path, "--style", style).out.splitlines()[-1]
        assert f"pip install -e '.{extra}' &&" in last
        assert f'pip install -e ".{extra}"' in (tmp_path / f"fastllm-backend-npu-{style}" / "README.md").read_text()
    done = run("backend", "new", "tested_npu", "--dir", tmp_path, "--style", "cython", "--json")
    facts = json.loads(done.out)
    assert done.code == 0
    assert len(facts["files"]) == len({*facts["files"]}) > 12
    assert run("backend", "new", "tested_npu", "--dir", tmp_path).code == 2


def test_the_opencl_style_says_what_its_device_is(tmp_path):
    """A report of OpenCL on the host's processor must not claim a device."""
    cl = pytest.importorskip("pyopencl", reason="pyopencl is not installed (pip install 'fastllm-engine[opencl]')")
    write_backend("tested_npu", "opencl", tmp_path)
    spec = importlib.util.spec_from_file_location("acme_device", tmp_path / "fastllm-backend-tested-npu" / "src" / "fastllm_backend_tested_npu" / "device.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.find_devices()
    if isinstance(found, Unavailable):
        pytest.skip(f"{found.reason}: {found.hint}")
    types = [d.type for platform in cl.get_platforms() for d in platform.get_devices()]
    assert [d.kind for d in found] == ["cpu" if t & cl.device_type.CPU else "device" for t in types]


def test_a_fault_in_the_first_native_op_is_named_and_the_right_one_counts(acme, fastllm, tmp_path):
    """The walk of `scripts/check_scaffold.py`, on cases of one op: CI does it with the wheels of engine and vendor in a clean environment."""
    spec = importlib.util.spec_from_file_location("check_scaffold", ROOT / "scripts" / "check_scaffold.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    ops = tmp_path / "fastllm-backend-tested-tpu" / "src" / "fastllm_backend_tested_tpu" / "ops.py"
    inherited = ops.read_text()
    command = ("conformance", "run", "--backend", "tested_tpu", "--case", "linear/f32?f32/*", "--quick", "--json")
    before = json.loads(fastllm(*command, env=acme).stdout)["standing"]
    ops.write_text(inherited + script.linear_kernel("tested_tpu", right=False))
    done = fastllm(*command, env=acme)
    assert done.returncode == 1
    failed = [c for c in json.loads(done.stdout)["cases"] if c["status"] == "failed" and c["rule"] == "bound"]
    assert any("/special" not in c["id"] for c in failed)
    for case in failed:  # dtypes and shape stand in the id, op and implementation, index, values and bound in the message
        assert case["id"].startswith("linear/f32*f32/")
        finite = r"\d+ of \d+ elements are wrong; worst at \[\d+, \d+\]: \S+ instead of \S+, bound \S+ \(margin"
        special = r"NaN or infinity in the wrong place: \d+ of \d+ elements; first at \[\d+, \d+\]: \S+ instead of \S+"
        assert re.search(rf"tested_tpu\.linear: ({finite}|{special if '/special' in case['id'] else finite})", case["message"])
        assert len(case["index"]) == 2
    ops.write_text(inherited + script.linear_kernel("tested_tpu", right=True))
    done = fastllm(*command, env=acme)
    after = json.loads(done.stdout)["standing"]
    assert done.returncode == 0, done.stderr
    assert (before["native"], after["native"], after["native_of"]) == (0, 1, 14)
