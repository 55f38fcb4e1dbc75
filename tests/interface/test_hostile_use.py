"""Plug-ins that fail while a command uses them, without the trial that would have found it: an error with an owner, and no traceback."""

from __future__ import annotations

import json
import sys

import pytest

PLUGIN = """
from fastllm.api import API_VERSION, OPSET, BackendSpec, DeviceInfo, Ready, RefBackend, Yes, hookimpl

class Odd(BaseException):
    pass

def deed(place):
    if place == PLACE:
        DEED

class Backend(RefBackend):
    name = "odd"

    def ops(self):
        deed("ops")
        table = dict(super().ops())
        inherited = table["ref.linear"]

        def linear(*operands, **more):
            deed("linear")
            return inherited(*operands, **more)

        return table | {"linear": linear}

    def supports(self, q):
        deed("supports")
        answer = super().supports(q)
        return Yes("linear") if q.op == "linear" and isinstance(answer, Yes) else answer

    def close(self):
        deed("close")
        super().close()

@hookimpl
def fastllm_backends():
    return [BackendSpec("odd", API_VERSION, OPSET, priority=95)]

@hookimpl
def fastllm_probe(name):
    return Ready((DeviceInfo("0", "odd"),))

@hookimpl
def fastllm_open_backend(name, device, options):
    return Backend()
"""
DEEDS = {
    "a class of its own": ("raise Odd('gone')", "Odd: gone"),
    "an exit": ("raise SystemExit(0)", "SystemExit: 0"),
    "an error": ("raise RuntimeError('gone')", "RuntimeError: gone"),
    "a pipe to its driver": ("raise BrokenPipeError('gone')", "BrokenPipeError: gone"),
}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTLLM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FASTLLM_DISABLE_PLUGINS", "opencl_generic")
    before = set(sys.modules)
    yield
    loader = sys.modules["fastllm.core.plugins.loader"]
    loader.STRANGERS.clear()  # of the process, and the tests of a file share one
    for name in set(sys.modules) - before:
        if name.startswith("fastllm_plugin_"):
            del sys.modules[name]


@pytest.fixture
def odd(tmp_path):
    def write(place, deed):
        path = tmp_path / "odd.py"
        path.write_text(PLUGIN.replace("PLACE:", f"{place!r}:").replace("DEED", deed))
        return path

    return write


def untried(path, model):
    return "run", model, "--prompt", "x", "-n", 2, "--plugin", path, "--backend", "odd", "--fallback", "allow", "--no-self-test", "--json"


@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize("place", ["ops", "supports", "close"])
def test_whatever_a_backend_raises_ends_the_command_with_an_error_that_names_it(run, odd, tiny_model, place, deed):
    code, why = DEEDS[deed]
    path = odd(place, code)
    done = run(*untried(path, tiny_model))
    assert done.code == 3, done.err
    assert "Traceback" not in done.err
    error = json.loads(done.out.splitlines()[-1])["error"]
    assert (error["message"], error["who"]) == ("backend 'odd' failed to do its work", f"{path}  [--plugin]")
    assert error["why"].startswith(f"{why}   (")
    assert "odd.py:" in error["why"], "the place in the vendor's file"
    assert "FASTLLM_DISABLE_PLUGINS=odd" in error["fix"]


def test_a_plug_in_without_memory_is_named(run, odd, tiny_model):
    path = odd("close", "raise MemoryError()")
    done = run(*untried(path, tiny_model))
    error = json.loads(done.out.splitlines()[-1])["error"]
    assert (done.code, error["code"], error["who"]) == (1, "out_of_memory", f"{path}  [--plugin]")
    assert error["why"].startswith("MemoryError   (")


def test_an_exit_of_a_plug_in_has_a_traceback_and_a_code_with_debug(run, odd, tiny_model):
    done = run(*untried(odd("ops", "raise SystemExit(0)"), tiny_model), "--debug")
    assert done.code == 3
    assert "Traceback" in done.err
    assert "SystemExit: 0" in done.err


@pytest.mark.parametrize("deed", DEEDS)
def test_a_step_that_fails_names_the_op_and_the_device(run, odd, tiny_model, deed):
    code, why = DEEDS[deed]
    done = run(*untried(odd("linear", code), tiny_model))
    assert done.code == 1
    assert f"a step failed: {why} (op 'linear' on odd)" in done.err
    assert "Traceback" not in done.err


def test_a_file_that_does_not_load_is_told_by_every_command_and_ends_none_that_does_not_need_it(run, odd, tiny_model, tmp_path):
    """One that crashes: in the process of a child that asks another backend it would be that one's fault."""
    good, bad = odd("", "pass"), tmp_path / "bad.py"
    bad.write_text("import ctypes; ctypes.string_at(0)")
    both = ("--plugin", good, "--plugin", bad)
    line = f"plug-in {bad} failed to load, and nothing of it is used: the process died of SIGSEGV"
    for command in (
        ("backends", "list", *both),
        ("backends", "show", "odd", *both),
        ("backends", "show", "cpu_avx", *both),
        ("doctor", "--no-smoke", *both),
        ("doctor", "odd", "--no-smoke", *both),
        ("plan", tiny_model, "--no-measure", "--backend", "cpu_avx", *both),
        ("plan", tiny_model, "--no-measure", "--backend", "cpu_avx", "--json", *both),
        ("run", tiny_model, "--prompt", "x", "-n", 1, "--backend", "odd", "--fallback", "allow", *both),
        ("conformance", "run", "--backend", "ref", "--op", "add", "--quick", *both),
    ):
        done = run(*command)
        assert done.code == 0, (command, done.err)
        assert done.err.count(line) == 1, command
    asked = run("doctor", "--no-smoke", *both).out
    assert f"advice: plug-in {bad} failed to load: the process died of SIGSEGV" in asked
    assert "nothing stands in the way" not in asked
    assert "backend odd: ready" in asked
    assert run("plan", tiny_model, "--no-measure", "--backend", "cpu_avx", "--strict", *both).code == 2
    for command in (("run", tiny_model, "--prompt", "x"), ("backends", "show", "bad"), ("doctor", "bad"), ("conformance", "run", "--backend", "bad")):
        done = run(*command, *both)
        assert done.code == 3, (command, done.err)
        assert "SIGSEGV" in done.err


def test_stale_native_code_is_told_with_what_to_do(run, odd, tiny_model, monkeypatch):
    """An older build: a name is missing when the backend is opened, or already when it is asked for its devices."""
    from fastllm.backends.cpu_avx import isa

    monkeypatch.setitem(sys.modules, "fastllm.backends.cpu_avx.backend", None)
    chosen = run("run", tiny_model, "--prompt", "x", "-n", 1, "--json")
    named = run("run", tiny_model, "--prompt", "x", "-n", 1, "--backend", "cpu_avx")
    monkeypatch.delattr(isa, "best")
    probed = run("plan", tiny_model, "--no-measure", "--json")
    assert (chosen.code, named.code, probed.code) == (0, 4, 0)
    for done, words in ((chosen, "so 'ref' is used: the native code does not fit its Python files"), (named, "does not fit its Python files"), (probed, "the native code does not load")):
        assert words in done.err
        assert "build it again: make install in a source tree" in done.err
