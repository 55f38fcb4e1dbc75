"""The self-test of the first opening: wrong numbers quarantine a backend, what passed is remembered."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fastllm.api import RefBackend, open_backend
from fastllm.conformance import evaluate, tiny
from fastllm.conformance.loaded import Loaded
from fastllm.conformance.selfcheck import GREEDY, MODEL, PROMPT, NotChecked, self_check

WRONG = """
from fastllm.api import API_VERSION, OPSET, BackendSpec, DeviceInfo, Ready, RefBackend, Yes, hookimpl

class Wrong(RefBackend):
    name = "wrong"

    def supports(self, q):
        answer = super().supports(q)
        return Yes(f"wrong.{q.op}") if q.op == "OP" and isinstance(answer, Yes) else answer

    def ops(self):
        return {**super().ops(), "wrong.OP": self.one}

    def one(self, *inputs, out, stream, ws, **attrs):
        self._op_OP(*inputs, out=out, stream=stream, ws=ws, **attrs)
        self.write(out, self.read(out, stream) * FACTOR, stream)

@hookimpl
def fastllm_backends():
    return [BackendSpec("wrong", API_VERSION, OPSET, priority=95)]

@hookimpl
def fastllm_probe(name):
    return Ready((DeviceInfo("0", "wrong"),))

@hookimpl
def fastllm_open_backend(name, device, options):
    return Wrong()
"""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTLLM_HOME", str(tmp_path / "home"))


@pytest.fixture
def wrong(tmp_path):
    def write(op, factor):
        path = tmp_path / "wrong.py"
        path.write_text(WRONG.replace("OP\"", f"{op}\"").replace("_OP", f"_{op}").replace("wrong.OP", f"wrong.{op}").replace("FACTOR", str(factor)))
        return path

    return write


@pytest.mark.parametrize(("op", "shows"), [("linear", "worst at ["), ("rope", f"instead of {list(GREEDY)}")])
def test_a_wrong_backend_that_was_named_is_an_error_with_numbers(run, tiny_model, wrong, op, shows):
    done = run("run", tiny_model, "--prompt", "x", "-n", 1, "--plugin", wrong(op, 1.5), "--backend", "wrong")
    assert done.code == 3
    assert "backend 'wrong' gives wrong answers" in done.err
    assert shows in done.err
    assert "fastllm conformance run --backend wrong:0 --quick" in done.err


def test_a_wrong_backend_that_auto_chose_is_set_aside(run, tiny_model, wrong):
    plugin = wrong("linear", 1.001)
    done = run("run", tiny_model, "--prompt", "x", "-n", 1, "--plugin", plugin, "--json")
    assert done.code == 0
    assert json.loads(done.out)["backend"] == "cpu_avx"
    assert "backend 'wrong' gives wrong answers, so 'cpu_avx' is used" in done.err
    assert run("run", tiny_model, "--prompt", "x", "-n", 1, "--plugin", plugin, "--strict").code == 3


def test_a_right_backend_is_tested_once_and_again_after_a_change(run, tiny_model, wrong, monkeypatch):
    tested = []
    monkeypatch.setattr("fastllm.conformance.selfcheck.self_check", lambda backend: tested.append(backend.name) or self_check(backend))
    plugin = wrong("linear", 1.0)
    command = ("run", tiny_model, "--prompt", "x", "-n", 1, "--backend", "cpu_avx")
    assert [run(*command).code for _ in range(3)] == [0, 0, 0]
    assert tested == ["cpu_avx"]
    assert run(*command, "--backend-opt", "act=f32").code == 0
    assert tested == ["cpu_avx"] * 2
    assert run("run", tiny_model, "--prompt", "x", "-n", 1, "--plugin", plugin, "--backend", "wrong").code == 0
    assert run("run", tiny_model, "--prompt", "x", "-n", 1, "--plugin", wrong("linear", 1.5), "--backend", "wrong").code == 3
    assert tested[2:] == ["wrong", "wrong"]  # the same name, other files


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("def fastllm_open_backend(name, device, options):", "failed to open"),
        ("def one(self, *inputs, out, stream, ws, **attrs):", "failed to compute"),
        ("def close(self):", "failed to close"),
    ],
)
def test_a_crash_of_a_backend_that_is_opened_for_the_first_time_is_an_error_with_its_place(run, tiny_model, wrong, where, says):
    path = wrong("linear", 1.0)
    text = path.read_text().replace("    def one(", "    def close(self):\n        pass\n\n    def one(")
    indent = " " * (8 if "self" in where else 4)
    path.write_text(text.replace(where, f"{where}\n{indent}import ctypes; ctypes.string_at(0)"))
    command = ("run", tiny_model, "--prompt", "x", "-n", 1, "--plugin", path)
    named = run(*command, "--backend", "wrong")
    assert named.code == 3
    assert f"backend 'wrong' {says}" in named.err
    assert "the process died of SIGSEGV   (" in named.err
    assert "wrong.py:" in named.err
    auto = run(*command, "--json")
    assert (auto.code, json.loads(auto.out)["backend"]) == (0, "cpu_avx")
    assert f"backend 'wrong' {says}, so 'cpu_avx' is used: the process died of SIGSEGV" in auto.err


def test_a_backend_that_auto_chose_and_that_cannot_be_opened_is_set_aside(run, tiny_model, wrong):
    path = wrong("linear", 1.0)
    path.write_text(path.read_text().replace("    return Wrong()", "    raise RuntimeError('no firmware')"))
    command = ("run", tiny_model, "--prompt", "x", "-n", 1, "--plugin", path)
    auto = run(*command, "--json")
    assert (auto.code, json.loads(auto.out)["backend"]) == (0, "cpu_avx")
    assert "backend 'wrong' failed to open, so 'cpu_avx' is used: RuntimeError: no firmware" in auto.err
    assert run(*command, "--strict").code == run(*command, "--backend", "wrong").code == 3


@pytest.mark.parametrize("fault", ["    raise RuntimeError('no firmware')", "    return Wrong()", None])
def test_only_a_trial_that_passed_is_remembered(run, tiny_model, wrong, tmp_path, fault):
    path = wrong("linear", 1.0 if fault is None else 1.5)
    path.write_text(path.read_text().replace("    return Wrong()", fault or "    return Wrong()"))
    done = run("run", tiny_model, "--prompt", "x", "-n", 1, "--plugin", path, "--backend", "wrong")
    place = tmp_path / "home" / "self-tests.json"
    known = list(json.loads(place.read_text()).values()) if place.exists() else []
    assert (done.code, "wrong:0 in a child" in known) == ((0, True) if fault is None else (3, False)), done.err


@pytest.mark.parametrize("value", ["-cl-mad-enable", "--", "a=b"])
def test_a_trial_gets_the_options_as_they_were_given(run, tiny_model, wrong, value):
    path = wrong("linear", 1.0)
    text = path.read_text().replace("Ready, RefBackend", "Option, Ready, RefBackend").replace("priority=95", "priority=95, options={'flags': Option(str, '', help='x')}")
    path.write_text(text.replace("    return Wrong()", f"    assert options['flags'] == {value!r}\n    return Wrong()"))
    done = run("run", tiny_model, "--prompt", "x", "-n", 1, "--plugin", path, "--backend", "wrong", "--backend-opt", f"flags={value}")
    assert done.code == 0, done.err


def test_what_cannot_be_judged_is_not_held_against_a_backend():
    for options in ({"memory": "4096"}, {"without": "linear"}):
        backend, _ = open_backend("fake", options)
        with backend:
            assert self_check(backend) == ""


@pytest.mark.parametrize("named", [True, False])
def test_a_host_without_a_place_for_files_is_no_wrong_answer(run, tiny_model, monkeypatch, named):
    def full(name, folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fastllm.conformance.tiny.save", full)
    done = run("run", tiny_model, "--prompt", "x", "-n", 1, "--json", *(("--backend", "cpu_avx") if named else ()))
    assert done.code == 0
    assert json.loads(done.out)["backend"] == "cpu_avx"
    assert "backend 'cpu_avx' was not tested before its first use: the tiny model cannot be written: [Errno 28] No space left" in done.err
    with RefBackend() as backend, pytest.raises(NotChecked):
        self_check(backend)
    monkeypatch.setattr("fastllm.conformance.selfcheck.Loaded", lambda *_: no_memory())
    monkeypatch.setattr("fastllm.conformance.tiny.save", lambda name, folder: folder)
    with RefBackend() as backend, pytest.raises(NotChecked, match="MemoryError"):
        self_check(backend)


def no_memory():
    raise MemoryError


def test_a_crash_inside_of_the_backend_is_held_against_it(monkeypatch):
    monkeypatch.setattr(RefBackend, "_op_rope", lambda self, *a, **k: {}["driver"])
    with RefBackend() as backend:
        assert self_check(backend) == "KeyError: 'driver'"


def test_the_self_test_can_be_skipped(run, tiny_model, wrong, monkeypatch):
    command = ("run", tiny_model, "--prompt", "x", "-n", 1, "--plugin", wrong("linear", 1.5), "--backend", "wrong")
    assert "run it untested: FASTLLM_SELF_TEST=0" in run(*command).err
    assert run(*command, "--no-self-test").code == 0
    monkeypatch.setenv("FASTLLM_SELF_TEST", "0")
    assert run(*command).code == 0
    monkeypatch.setenv("FASTLLM_SELF_TEST", "1")
    assert run(*command).code == 3
    monkeypatch.setenv("FASTLLM_SELF_TEST", "perhaps")
    assert "FASTLLM_SELF_TEST is 'perhaps'" in run(*command).err


def test_the_eight_tokens_are_the_oracles_and_far_from_any_other(tmp_path):
    kit = Loaded(RefBackend(), tiny.save(MODEL, tmp_path))
    try:
        ids = [*PROMPT, *GREEDY]
        logits, tolerance = evaluate.ensemble(kit.plan.graph, kit.weights(), np.array(ids[:-1]), kit.numerics)
    finally:
        kit.close()
    rows = logits[len(PROMPT) - 1 :]
    assert rows.argmax(1).tolist() == list(GREEDY)
    order = sorted_last_two(rows)
    assert (order > 0.5).all()
    assert (order > 100 * tolerance[len(PROMPT) - 1 :, 0]).all()


def sorted_last_two(rows):
    ordered = rows.copy()
    ordered.sort(axis=1)
    return ordered[:, -1] - ordered[:, -2]
