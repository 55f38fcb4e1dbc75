"""`fastllm backend check` and `fastllm doctor NAME`: what a vendor sees before publishing, whatever is wrong."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path

import pytest

from fastllm import backend_check
from fastllm.backend_check import check_backend_package
from fastllm.core import plugins

PLUGIN = """
from fastllm.api import API_VERSION, OPSET, BackendSpec, DeviceInfo, Ready, RefBackend, Yes, hookimpl

@hookimpl
def fastllm_backends():
    return [BackendSpec("tested_npu", API_VERSION, OPSET)]

@hookimpl
def fastllm_probe(name):
    PROBE
    return Ready((DeviceInfo("0", "thing"),))

@hookimpl
def fastllm_open_backend(name, device, options):
    OPEN
    return Acme()

class Acme(RefBackend):
    name = "tested_npu"

    def _op_linear(self, x, weight, bias, *, out, stream, ws):
        super()._op_linear(x, weight, bias, out=out, stream=stream, ws=ws)
        self.write(out, self.read(out, stream) * FACTOR, stream)
"""


@pytest.fixture
def acme(tmp_path):
    def write(probe="pass", open_="pass", factor=1.0, head=""):
        path = tmp_path / "tested_npu.py"
        path.write_text(head + PLUGIN.replace("PROBE", probe).replace("OPEN", open_).replace("FACTOR", str(factor)))
        return path

    return write


def steps(path: Path):
    return {line.step: (line.ok, line.text) for line in check_backend_package("tested_npu", {}, plugin_paths=[path])}


def test_a_backend_that_comes_with_the_engine_passes_every_step(run):
    done = run("backend", "check", "fake", "--json")
    facts = json.loads(done.out)
    assert (done.code, facts["ok"]) == (0, True), done.out
    assert [s["step"] for s in facts["steps"]] == ["packaging", "imports", "probe", "self-test", "quick cases"]
    assert "native 14/14" in facts["steps"][-1]["text"]
    assert "emulated" in facts["steps"][2]["text"]


def test_each_step_says_what_is_wrong(acme, monkeypatch):
    monkeypatch.setattr(backend_check, "_quick", lambda *_: backend_check.CheckLine("quick cases", True, ""))
    assert all(ok for ok, _ in steps(acme()).values())
    found = steps(acme(head="import fastllm.core.graph\nfrom fastllm.core import ops\n"))
    assert found["imports"] == (False, "tested_npu.py:1 imports fastllm.core.graph; tested_npu.py:2 imports fastllm.core")
    found = steps(acme(factor=1.01))
    assert (found["self-test"][0], "elements are wrong; worst at [" in found["self-test"][1]) == (False, True)
    assert "quick cases" not in found
    found = steps(acme(open_="raise RuntimeError('no firmware')"))
    assert found["open"][0] is False
    assert "no firmware" in found["open"][1]
    found = steps(acme(probe="import os; os.abort()"))
    assert (found["probe"][0], "the probe crashed: the process died of SIGABRT" in found["probe"][1]) == (False, True)
    assert set(found) == {"imports", "probe"}


def test_the_quick_cases_show_the_first_failures(run, acme):
    done = run("backend", "check", "tested_npu", "--plugin", acme(factor="(1 if x.shape[0] < 7 else 2)"))
    assert done.code == 1
    last = done.out.splitlines()[-1]
    assert last.startswith("WRONG  quick cases  linear/")
    assert "more" in last


class Distribution:
    """Metadata as an installed package has it."""

    def __init__(self, requires):
        self.requires, self.version = requires, "0.3"
        self.entry_points = [metadata.EntryPoint("tested_npu", "acme_package.plugin", "fastllm.backends")]


@pytest.mark.parametrize(
    ("requires", "typed", "wrong"),
    [
        (["fastllm-engine>=0.1,<2"], True, ""),
        (["numpy"], True, "does not depend on fastllm-engine"),
        (["fastllm-engine>=0.1"], True, "no upper bound"),
        (["fastllm-engine>=0.1,<2"], False, "py.typed is missing"),
    ],
)
def test_packaging(monkeypatch, tmp_path, requires, typed, wrong):
    (tmp_path / "__init__.py").write_text("")
    if typed:
        (tmp_path / "py.typed").write_text("")
    monkeypatch.setattr(metadata, "distribution", lambda name: Distribution(requires))
    monkeypatch.setattr(backend_check, "plugin_folder", lambda module: tmp_path)
    line = backend_check._packaging("fastllm-backend-acme", "tested_npu")
    assert (line.ok, wrong in line.text) == (not wrong, True)


def test_the_doctor_makes_a_line_of_a_crash_and_of_a_hang(run, acme, monkeypatch):
    done = run("doctor", "tested_npu", "--plugin", acme(probe="import ctypes; ctypes.string_at(0)"))
    assert done.code == 3
    assert "backend tested_npu: broken – the probe crashed: the process died of SIGSEGV" in done.out
    assert re.search(r"tested_npu\w*\.py:\d+\)", done.out), "the vendor's line, not that of ctypes"
    children = plugins.probe_in_children
    monkeypatch.setattr("fastllm.core.plugins.probe_in_children", lambda *a, **k: children(*a, **{**k, "timeout_s": 1.5}))
    done = run("doctor", "tested_npu", "--plugin", acme(probe="import time; time.sleep(60)"), "--json")
    assert done.code == 3
    assert "hung" in json.loads(done.out)["backends"]["tested_npu"]["reason"]
    for wrong, says in (
        ({"factor": 1.01}, "self-test: failed: linear"),
        ({"open_": "raise RuntimeError('no firmware')"}, "self-test: failed: backend 'tested_npu' failed to open: RuntimeError: no firmware"),
        ({"open_": "import ctypes; ctypes.string_at(0)"}, "self-test: failed: backend 'tested_npu' failed to open: the process died of SIGSEGV"),
    ):
        failed = run("doctor", "tested_npu", "--plugin", acme(**wrong))
        assert (failed.code, says in failed.out) == (3, True), failed.out
    fine = run("doctor", "tested_npu", "--plugin", acme())
    assert fine.code == 0
    assert re.search(r"from \S+, imported in \d", fine.out)
    assert "slow" not in fine.out
    monkeypatch.setattr("fastllm.cli.doctor.PROBE_S", 0.0)
    assert "slow: its probe took 0.0 s" in run("doctor", "tested_npu", "--plugin", acme()).out


def test_the_doctor_knows_packages_that_get_in_each_others_way(monkeypatch):
    from fastllm.cli import doctor

    class Named:
        def __init__(self, name):
            self.metadata = {"Name": name}

    monkeypatch.setattr(metadata, "distributions", lambda: [Named("cupy-cuda12x"), Named("cupy-cuda13x"), Named("fastllm"), Named("numpy")])
    first, second = doctor._packages()
    assert "cupy-cuda12x and cupy-cuda13x" in first
    assert "pip uninstall fastllm" in second
