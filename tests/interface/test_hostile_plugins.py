"""Plug-ins that fail in one hook, and every command: one that does not need the hook goes on, one that asked for it names it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from fastllm.convert import convert_model
from fastllm.core import plugins
from fastllm.core.errors import BackendBroken, BackendUnavailable, UsageError
from fastllm.formats import open_model
from fastllm.formats.quant_rules import QuantRules
from fastllm.llm import LLM
from fastllm.loading import LoadOptions
from fastllm.opening import open_helper
from fastllm.verify import verify_model

PLUGIN = """
import os, sys
from fastllm.api import API_VERSION, OPSET, BackendSpec, DeviceInfo, Ready, RefBackend, Yes, hookimpl

class Odd(RefBackend):
    name = "odd"

@hookimpl
def fastllm_backends():
    return [BackendSpec("odd", API_VERSION, OPSET, priority=95)]

@hookimpl
def fastllm_probe(name):
    PROBE
    return Ready((DeviceInfo("0", "odd"),))

@hookimpl
def fastllm_open_backend(name, device, options):
    OPEN
    return Odd()

@hookimpl
def fastllm_environment(name):
    ENVIRONMENT
    return {"driver": "12"}

@hookimpl
def fastllm_transform_graph(graph, target):
    TRANSFORM
    return None

@hookimpl
def fastllm_requirements(name):
    REQUIREMENTS
    return None

@hookimpl
def fastllm_conformance_cases(name):
    CASES
    return []
"""
CRASH = "import ctypes; ctypes.string_at(0)"
HANG = "import time; time.sleep(1000)"
HOOKS = ("PROBE", "OPEN", "ENVIRONMENT", "TRANSFORM", "REQUIREMENTS", "CASES")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTLLM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FASTLLM_DISABLE_PLUGINS", "opencl_generic")


@pytest.fixture
def odd(tmp_path):
    """odd(HOOK=code): the path of a plug-in file whose hook runs that."""

    def write(**deeds):
        text = PLUGIN
        for hook in HOOKS:
            text = text.replace(f"    {hook}\n", f"    {deeds.get(hook, 'pass')}\n")
        path = tmp_path / "odd.py"
        path.write_text(text)
        return path

    return write


FAULTS = {
    "crashes": (CRASH, "the process died of SIGSEGV   ("),
    "exits": ("os._exit(7)", "the process ended with status 7 before it answered"),
    "hangs": (HANG, "no answer within 2 s"),
    "raises": ("raise type('Odd', (BaseException,), {})('odd')", "Odd: odd"),
    "garbage": ("return [5]", "[5] is not a dict of strings"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_backend_whose_environment_fails_is_ready_everywhere_and_every_report_says_what_failed(run, odd, tiny_model, monkeypatch, fault):
    deed, why = FAULTS[fault]
    path = odd(ENVIRONMENT=deed)
    if fault == "hangs":
        monkeypatch.setattr("fastllm.core.plugins.child.ASK_S", 2.0)
        monkeypatch.setattr("fastllm.core.plugins.contained.NAMED_S", 60.0)
        monkeypatch.setattr("fastllm.core.plugins.asking.NAMED_S", 60.0)
        monkeypatch.setattr("fastllm.core.plugins.registry.NAMED_S", 60.0)
    listed = {s["name"]: s for s in json.loads(run("backends", "list", "--json", "--plugin", path).out)}
    assert (listed["odd"]["state"], listed["odd"]["exit_code"]) == ("ready", 0)
    shown = run("backends", "show", "odd", "--json", "--plugin", path)
    facts = json.loads(shown.out)
    assert (shown.code, facts["state"], facts["environment"]) == (0, "ready", {})
    assert why in facts["environment_error"]
    assert "failed to answer fastllm_environment" in facts["environment_error"]
    assert why in run("backends", "show", "odd", "--plugin", path).out
    checked = run("doctor", "odd", "--json", "--no-smoke", "--plugin", path)
    found = json.loads(checked.out)["backends"]["odd"]
    assert (checked.code, found["state"]) == (0, "ready")
    assert why in found["environment_error"]
    command = ("run", tiny_model, "--prompt", "x", "-n", 1, "--plugin", path, "--backend", "odd", "--fallback", "allow")
    first, again = run(*command), run(*command)
    assert (first.code, again.code) == (0, 0), first.err
    assert again.err.count("waiting for") == 0, "it is asked again, though it is known to fail"


@pytest.mark.parametrize(("deed", "why"), [(CRASH, "the process died of SIGSEGV   ("), ("raise type('Odd', (BaseException,), {})('odd')", "Odd: odd"), ("return 5", "returned int, not a Graph")])
def test_a_plug_in_that_cannot_rewrite_a_graph_is_named_or_set_aside(run, odd, tiny_model, deed, why):
    command = ("run", tiny_model, "--prompt", "x", "-n", 1, "--plugin", odd(TRANSFORM=deed))
    named = run(*command, "--backend", "odd")
    assert named.code == 3
    assert why in named.err
    chosen = run(*command, "--json")
    assert (chosen.code, json.loads(chosen.out)["backend"]) == (0, "cpu_avx")
    assert "so 'cpu_avx' is used" in chosen.err
    assert run(*command, "--backend", "cpu_avx").code == 0
    assert json.loads(run("backends", "show", "odd", "--json", "--plugin", odd(TRANSFORM=deed)).out)["state"] == "ready"


def test_a_backend_that_cannot_be_closed_is_named_before_it_computes(run, odd, tiny_model):
    path = odd(OPEN="odd = Odd(); odd.close = lambda: 1 / 0; return odd")
    done = run("run", tiny_model, "--prompt", "x", "-n", 1, "--plugin", path, "--backend", "odd")
    assert done.code == 3
    assert "backend 'odd' failed to close" in done.err
    assert "ZeroDivisionError" in done.err


@pytest.mark.parametrize("hook", ["REQUIREMENTS", "CASES"])
@pytest.mark.parametrize(("deed", "why"), [(CRASH, "the process died of SIGSEGV   ("), ("return 5", "int is "), ("return [5]", " is no fastllm.conformance.")])
def test_hooks_of_the_suite_are_named_by_the_suite_and_by_nobody_else(run, odd, tiny_model, hook, deed, why):
    path = odd(**{hook: deed})
    done = run("conformance", "run", "--backend", "odd", "--plugin", path, "--op", "add", "--quick")
    name = {"REQUIREMENTS": "fastllm_requirements", "CASES": "fastllm_conformance_cases"}[hook]
    assert done.code == 3
    assert f"backend 'odd' failed to answer {name}" in done.err
    assert why in done.err
    assert run("run", tiny_model, "--prompt", "x", "-n", 1, "--plugin", path, "--backend", "odd", "--fallback", "allow").code == 0


def test_check_has_a_line_for_a_hook_that_fails_and_goes_on(run, odd):
    checked = run("backend", "check", "odd", "--json", "--plugin", odd(ENVIRONMENT=CRASH, CASES="return 5"))
    steps = {s["step"]: s for s in json.loads(checked.out)["steps"]}
    assert checked.code == 1
    assert {n: s["ok"] for n, s in steps.items()} == {"imports": True, "probe": True, "environment": False, "self-test": True, "quick cases": False}
    assert "SIGSEGV" in steps["environment"]["text"]
    assert "int is not a list" in steps["quick cases"]["text"]


def test_the_suite_asks_for_an_environment_in_a_process_of_its_own_alone(fastllm, odd):
    """In processes of their own: a crash in the command's would end this one."""
    path = odd(ENVIRONMENT=CRASH)
    done = fastllm("conformance", "run", "--backend", "odd", "--plugin", path, "--op", "add", "--quick", "--json", timeout=300)
    assert done.returncode == 0, done.stderr
    assert "failed to answer fastllm_environment: the process died of SIGSEGV" in json.loads(done.stdout)["environment"]["fastllm_environment"]
    done = fastllm("backend", "check", "odd", "--json", "--plugin", path, timeout=300)
    steps = {s["step"]: s for s in json.loads(done.stdout)["steps"]}
    assert {n: s["ok"] for n, s in steps.items()} == {"imports": True, "probe": True, "environment": False, "self-test": True, "quick cases": True}
    assert " passed, " in steps["quick cases"]["text"]


def test_the_automatic_choice_waits_for_a_backend_that_hangs_once_and_whoever_names_it_tries_again(run, odd, tiny_model, monkeypatch):
    monkeypatch.setattr("fastllm.opening.TRIAL_S", 5.0)
    monkeypatch.setattr("fastllm.core.plugins.child.WAIT_S", 0.0)
    path = odd(OPEN=f"if not os.path.exists(os.environ['FASTLLM_HOME'] + '/mended'): {HANG}")
    command = ("run", tiny_model, "--prompt", "x", "-n", 1, "--plugin", path, "--fallback", "allow")
    first, second = run(*command), run(*command)
    assert (first.code, second.code) == (0, 0)
    assert "backend 'odd' failed to open, so 'cpu_avx' is used: no answer within 5 s" in first.err
    assert "so 'cpu_avx' is used: it did not answer within 5 s when it was tried last; `fastllm run --backend odd` tries it again" in second.err
    assert ("for up to 5 s; drivers" in first.err, "for up to 5 s; drivers" in second.err) == (True, False)
    (Path(os.environ["FASTLLM_HOME"]) / "mended").touch()
    monkeypatch.setattr("fastllm.opening.TRIAL_S", 120.0)
    assert run(*command, "--backend", "odd").code == 0
    assert "tries it again" not in run(*command).err


def test_a_crash_whose_last_words_are_those_of_a_hang_is_tried_again(run, odd, tiny_model):
    path = odd(OPEN="print('no answer within 3 s', file=sys.stderr); os._exit(7)")
    for _ in range(2):
        done = run("run", tiny_model, "--prompt", "x", "-n", 1, "--plugin", path, "--fallback", "allow")
        assert done.code == 0
        assert "so 'cpu_avx' is used: the process ended with status 7 before it answered: no answer within 3 s" in done.err


def test_who_waits_for_a_backend_is_told_for_whom_for_how_long_and_how_to_go_without(run, odd, tiny_model, monkeypatch):
    monkeypatch.setattr("fastllm.opening.TRIAL_S", 6.0)
    monkeypatch.setattr("fastllm.core.plugins.child.WAIT_S", 0.0)
    done = run("run", tiny_model, "--prompt", "x", "-n", 1, "--plugin", odd(OPEN=HANG), "--backend", "odd")
    assert done.code == 3
    assert "backend 'odd' failed to open" in done.err
    (line,) = [line for line in done.err.splitlines() if "for up to 6 s" in line]
    assert line.startswith("fastllm: waiting for 'odd' to ")
    assert line.endswith("  |  without this trial: FASTLLM_SELF_TEST=0  |  skip it: FASTLLM_DISABLE_PLUGINS=odd")


def test_each_way_to_go_without_a_trial_is_one_that_the_command_has(run, odd, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr("fastllm.opening.TRIAL_S", 0.5)
    monkeypatch.setattr("fastllm.core.plugins.child.WAIT_S", 0.0)
    path, lines = odd(OPEN="import time; time.sleep(1)"), []
    options = LoadOptions(plugin_paths=(path,), message=lines.append)

    def convert():
        with open_model(tiny_model) as files:
            convert_model(files, tmp_path / "out.flm", QuantRules(), options, backend="odd")

    with pytest.raises(BackendBroken, match="'odd' failed to"):
        convert()
    lines += run("doctor", "odd", "--plugin", path).err.splitlines()
    ways = [line.partition("  |  without this trial: ")[2].partition("  |  ")[0] for line in lines if " for up to 0.5 s" in line]
    assert ways == ["FASTLLM_SELF_TEST=0", "--no-smoke"]
    lines.clear()
    monkeypatch.setenv("FASTLLM_SELF_TEST", "0")
    with pytest.raises(UsageError, match="packs nothing that a file could hold"):  # it was opened
        convert()
    lines += run("doctor", "odd", "--no-smoke", "--plugin", path).err.splitlines()
    assert not [line for line in lines if "without this trial" in line]


@pytest.mark.parametrize(("deed", "why"), [(CRASH, "the process died of SIGSEGV   ("), ("raise type('Odd', (BaseException,), {})('odd')", "Odd: odd")])
def test_convert_opens_as_a_run_does(odd, tiny_model, tmp_path, deed, why):
    lines = []
    options = LoadOptions(plugin_paths=(odd(OPEN=deed),), message=lines.append)
    with open_model(tiny_model) as files:
        with pytest.raises(BackendBroken) as caught:
            convert_model(files, tmp_path / "named.flm", QuantRules(), options, backend="odd")
        assert why in caught.value.why
        report = convert_model(files, tmp_path / "chosen.flm", QuantRules(), options, backend="")
    assert report.packed_for == "cpu_avx"
    assert [line for line in lines if "backend 'odd' failed to open, so 'cpu_avx' is used" in line and why in line]


def test_convert_tells_whom_the_automatic_choice_skipped(odd, tiny_model, tmp_path):
    lines = []
    options = LoadOptions(plugin_paths=(odd(PROBE="raise RuntimeError('no driver')"),), message=lines.append)
    with open_model(tiny_model) as files:
        assert convert_model(files, tmp_path / "out.flm", QuantRules(), options, backend="").packed_for == "cpu_avx"
    assert any("backend 'odd' failed to probe, so 'cpu_avx' is used" in line for line in lines)


def test_a_program_that_gives_no_message_learns_which_backend_was_passed_over(odd, tiny_model, caplog, capfd):
    with caplog.at_level("WARNING", "fastllm"), LLM(tiny_model, ctx=64, plugin_paths=(odd(OPEN="raise RuntimeError('no driver')"),)):
        pass
    said = [r.getMessage() for r in caplog.records if r.name == "fastllm"]
    assert any("backend 'odd' failed to open, so 'cpu_avx' is used: RuntimeError: no driver" in line for line in said)
    assert capfd.readouterr().out == ""


def test_a_helper_that_does_not_open_is_told(run, odd, tiny_model, monkeypatch):
    def missing(*_):
        raise BackendUnavailable("backend 'cpu_avx' cannot be used on this machine", why="planted")

    monkeypatch.setattr("fastllm.loading.open_helper", missing)
    done = run("run", tiny_model, "--prompt", "x", "-n", 1, "--plugin", odd(), "--backend", "odd", "--fallback", "allow")
    assert done.code == 0
    assert "backend 'cpu_avx' cannot be used on this machine, so what 'odd' does not run goes to 'ref', which is slow: planted" in done.err


def test_weights_that_are_packed_for_a_backend_are_undone_by_the_same_door(odd, tiny_model, tmp_path, monkeypatch):
    out = tmp_path / "out.flm"
    with open_model(tiny_model) as files:
        convert_model(files, out, QuantRules(), LoadOptions(), backend="cpu_avx")
    opened = []
    monkeypatch.setattr("fastllm.packed.open_helper", lambda registry, name, *rest, **more: opened.append(name) or open_helper(registry, name, *rest, **more))
    with open_model(out) as files:
        verify_model(files, LoadOptions())
    assert opened == ["cpu_avx"]


def test_the_last_line_of_doctor_is_true(run, odd, monkeypatch):
    asked = []
    ask = plugins.probe_in_children
    monkeypatch.setattr(plugins, "probe_in_children", lambda names, **more: asked.append(names) or ask(names, **more))
    well = run("doctor", "--no-smoke", "--plugin", odd()).out.splitlines()
    broken = run("doctor", "--no-smoke", "--plugin", odd(PROBE=CRASH)).out.splitlines()
    silent = run("doctor", "--no-smoke", "--plugin", odd(ENVIRONMENT=CRASH)).out.splitlines()
    assert len(asked) == 3, "all are asked at the same time"
    assert all({"odd", "ref", "cpu_avx", "fake"} <= set(names) for names in asked)
    assert "advice: nothing stands in the way: fastllm run" in well
    assert not [line for line in broken + silent if "nothing stands in the way" in line]
    assert "advice: backend 'odd' is broken and not used: fastllm doctor odd  |  skip it: FASTLLM_DISABLE_PLUGINS=odd" in broken
    assert "advice: backend 'odd' is ready, but does not say its environment: fastllm doctor odd  |  skip it: FASTLLM_DISABLE_PLUGINS=odd" in silent
    assert broken[-1] == "advice: what is ready can be used: fastllm run"


def test_a_command_ends_though_a_plug_in_leaves_a_thread_that_does_not(fastllm, odd, tiny_model):
    path = odd(OPEN="import threading, time; threading.Thread(target=time.sleep, args=(1000,)).start()")
    done = fastllm("run", tiny_model, "--prompt", "x", "-n", 1, "--json", "--plugin", path, "--backend", "odd", "--fallback", "allow", timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["backend"] == "odd"


def test_what_a_plug_in_prints_while_it_is_opened_is_not_in_the_answer(fastllm, odd, tiny_model):
    path = odd(OPEN="print('a banner'); os.write(1, b'raw')")
    done = fastllm("run", tiny_model, "--prompt", "x", "-n", 1, "--json", "--plugin", path, "--backend", "odd", "--fallback", "allow", timeout=120)
    assert json.loads(done.stdout)["backend"] == "odd"
    assert "a banner" in done.stderr


def test_an_error_that_nobody_understands_names_whose_code_ran_beside_it(fastllm, odd, tiny_model):
    path = odd(OPEN="import numpy; numpy.zeros = None")
    done = fastllm("run", tiny_model, "--prompt", "x", "-n", 1, "--plugin", path, "--backend", "odd", "--no-self-test", timeout=120)
    assert done.returncode == 1
    assert f"who: beside {path}" in done.stderr
    assert "first without what ran in this process" in done.stderr


@pytest.mark.parametrize(("name", "shown"), [("a" * 400, "a" * 31 + "…"), ("../../etc/x", "../../etc/x"), ("a\x1b[31mred", "a\\x1b[31mred")])
def test_a_name_that_no_backend_may_have_keeps_the_list_in_its_columns_and_its_fix_can_be_pasted(run, tmp_path, monkeypatch, name, shown):
    info = tmp_path / "odd_name-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-name\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[fastllm.backends]\n{name} = odd.plugin\n")
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    listed = run("backends", "list")
    assert listed.code == 0, listed.err
    assert max(line.index("STATE") for line in listed.out.splitlines()[:1]) <= 34
    line = next(line for line in listed.out.splitlines() if line.startswith(shown))
    assert " broken " in line
    assert line.endswith('pip install --upgrade "odd-name"  |  pip uninstall "odd-name"')
