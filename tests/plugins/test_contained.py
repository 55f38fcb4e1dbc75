"""Plug-ins that would take the process with them: every command but the one that opens them asks in a child, and goes on."""

from __future__ import annotations

import os
import sys

import pytest

from fastllm.core.errors import BackendBroken, BackendUnavailable
from fastllm.core.plugins import BackendRegistry, child
from fastllm.host import plugin_folder

from .conftest import ended

PATIENT_S = 120.0  # for a loaded machine

FATAL = {
    "crash_at_import": ({"head": "import ctypes\nctypes.string_at(0)"}, "load", "the process died of SIGSEGV   ("),
    "crash_in_probe": ({"probe": "import ctypes; ctypes.string_at(0)"}, "probe", "the process died of SIGSEGV   ("),
    "aborts": ({"probe": "import os; os.abort()"}, "probe", "the process died of SIGABRT   ("),
    "exits_well": ({"probe": "import os; os._exit(0)"}, "probe", "the process ended with status 0 before it answered"),
    "exits_at_import": ({"head": "import os\nos._exit(0)"}, "load", "the process ended with status 0 before it answered"),
    "says_nonsense": ({"probe": "import os; os.write(3, b'{}\\n{[\\n'); os._exit(0)"}, "probe", "the process ended with status 0 before it answered"),
}
HANGS = {
    "loops": {"probe": "while True: pass"},
    "loops_at_import": {"head": "while True: pass"},
    # PyDLL keeps the interpreter's lock: no Python runs, no signal handler either
    "deaf": {"probe": "import ctypes, signal; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n    ctypes.PyDLL(None).sleep(1000)"},
    "talks": {"probe": "import os\n    while True: os.write(1, b'x' * 65536)"},
}


def installed(site, plugin, name, parts):
    parts = {k: f"@hookimpl\ndef fastllm_probe(name):\n    {v}" if k == "probe" else v for k, v in parts.items()}
    site.install(plugin(name, **parts), name, f"dist-{name}", module=f"mod_{name}")


@pytest.fixture
def patient(monkeypatch):
    monkeypatch.setattr("fastllm.core.plugins.registry.ASK_S", PATIENT_S)
    monkeypatch.setattr("fastllm.core.plugins.registry.NAMED_S", PATIENT_S)
    monkeypatch.setattr("fastllm.core.plugins.contained.NAMED_S", PATIENT_S)
    monkeypatch.setattr("fastllm.core.plugins.asking.NAMED_S", PATIENT_S)


@pytest.mark.usefixtures("patient")
def test_what_ends_a_process_is_a_state_a_line_of_auto_and_an_error_by_name(site, contained, plugin):
    for name, (parts, _, _) in FATAL.items():
        installed(site, plugin, name, parts)
    installed(site, plugin, "good", {})
    registry = BackendRegistry(env=contained)
    states = {s.name: s for s in registry.states()}
    for name, (_, stage, why) in FATAL.items():
        assert (states[name].state, states[name].exit_code) == ("broken", 3), states[name]
        with pytest.raises(BackendBroken, match=f"backend '{name}' failed to {stage}") as caught:
            registry.select(name)
        assert caught.value.why.startswith(why)
        assert caught.value.why.endswith(", in a process of its own")
        assert f"dist-{name} 0.3.1" in caught.value.who
        assert f"FASTLLM_DISABLE_PLUGINS={name}" in caught.value.fix
    assert (states["good"].state, states["ref"].state) == ("ready", "ready")
    assert registry.select("auto").name == "good"
    assert {n for n in FATAL if any(f"'{n}'" in line for line in registry.messages)} == set(FATAL)
    with pytest.raises(BackendBroken):
        BackendRegistry(env=contained, strict=True).select("auto")


def test_what_hangs_is_ended_at_the_limit_all_at_the_same_time(site, contained, plugin, monkeypatch):
    for name, parts in HANGS.items():
        installed(site, plugin, name, parts)
    monkeypatch.setattr("fastllm.core.plugins.registry.ASK_S", 4.0)
    registry = BackendRegistry(env=contained)
    assert registry.select("auto").name == "ref"
    for name in HANGS:
        assert "no answer within 4 s" in registry.state(name).reason
        assert any(f"backend '{name}' failed to" in line for line in registry.messages)


def test_a_command_that_names_another_backend_asks_no_stranger(site, contained, plugin, tmp_path):
    touched = tmp_path / "touched"
    site.install(plugin(head=f"open({str(touched)!r}, 'w').close()"))
    (site.folder / "fastllm_backend_acme" / "__init__.py").write_text(f"open({str(touched)!r}, 'w').close()\n")
    registry = BackendRegistry(env=contained)
    assert registry.select("ref").name == "ref"
    assert registry.open("ref") is not None
    assert plugin_folder("fastllm_backend_acme.plugin") == site.folder / "fastllm_backend_acme"
    assert plugin_folder("fastllm_backend_acme.plugin.os") is None, "a module holds no module, and os is another's"
    assert not touched.exists()


@pytest.mark.usefixtures("patient")
def test_a_contained_answer_is_what_loading_here_says(site, env, contained, plugin):
    options = "Option(int, 0, help='n'), 'mode': Option(str, 'a', ('a', 'b')), 'x': Option(float, 0.5), 'on': Option(bool, True)"
    described = f"@hookimpl\ndef fastllm_backends():\n    return [BackendSpec(NAME, API_VERSION, 1, 'Acme', 'an NPU', 7, {{'t': {options}}}, 'https://a.example')]"
    installed(site, plugin, "good", {"backends": described, "tail": "@hookimpl\ndef fastllm_environment(name):\n    return {'driver': '12'}"})
    installed(site, plugin, "absent", {"probe": "return Unavailable('no NPU', 'plug it in')"})
    installed(site, plugin, "silent", {"probe": "raise BackendUnavailable('no NPU in this machine')"})
    installed(site, plugin, "raises", {"probe": "raise RuntimeError('driver 12 is too old')"})
    installed(site, plugin, "fails", {"head": "import nothing_of_this_name"})
    installed(site, plugin, "older", {"backends": "@hookimpl\ndef fastllm_backends():\n    return [BackendSpec(NAME, (0, 0), 1)]"})
    installed(site, plugin, "numbers", {"probe": "import numpy; return Ready((DeviceInfo('0', 'x', numpy.int64(7)),))"})
    installed(site, plugin, "odd", {"probe": "return True"})
    here, there = BackendRegistry(env=env), BackendRegistry(env=contained)
    untimed = [{s.name: {k: v for k, v in s.as_dict().items() if k not in ("import_s", "probe_s")} for s in r.states()} for r in (here, there)]
    assert untimed[1] == untimed[0]
    assert {n: untimed[0][n]["state"] for n in ("good", "absent", "raises", "fails", "older", "odd")} == {
        "good": "ready", "absent": "unavailable", "raises": "broken", "fails": "broken", "older": "incompatible", "odd": "broken"}  # fmt: skip
    with pytest.raises(BackendUnavailable) as caught:
        there.select("absent")
    assert (caught.value.exit_code, caught.value.why, caught.value.fix) == (4, "no NPU", "plug it in")
    with pytest.raises(BackendUnavailable) as caught:
        there.select("silent")
    assert (caught.value.fix, "fix: fastllm doctor shows what is missing" in caught.value.render()) == ("", True)
    assert there.select("auto").name == here.select("auto").name
    assert there.messages == here.messages
    assert there.state("numbers").devices[0].memory_bytes == 7
    assert there.environment("good") == here.environment("good") == {"driver": "12"}
    assert str(there.select("good:1")) == "good:1"


@pytest.mark.usefixtures("patient")
def test_the_module_is_imported_here_when_it_is_opened_and_not_before(site, contained, plugin):
    site.install(plugin())
    registry = BackendRegistry(env=contained)
    registry.states()
    selection = registry.select("auto")
    assert (selection.name, selection.spec.priority, registry.environment("acme_npu")) == ("acme_npu", 90, {})
    assert "fastllm_backend_acme" not in sys.modules
    assert registry.open(selection).device == "0"
    assert "fastllm_backend_acme.plugin" in sys.modules


@pytest.mark.usefixtures("patient")
def test_the_packaged_list_vouches_for_built_in_backends_only_and_a_users_for_names(site, contained, plugin, toml):
    site.install(plugin("cpu_avx", probe="@hookimpl\ndef fastllm_probe(name):\n    import os; os._exit(7)"), "cpu_avx", "acme-dist")
    override = "[override]\ncpu_avx = 'acme-dist'\n"
    with_cpu = {**contained, "FASTLLM_DISABLE_PLUGINS": ""}
    registry = BackendRegistry(toml(override), env=with_cpu)
    assert registry.in_child("cpu_avx")
    assert not registry.in_child("ref")
    assert registry.state("cpu_avx").reason.startswith("the process ended with status 7")
    assert "fastllm_backend_acme.plugin" not in sys.modules
    assert not BackendRegistry(toml(override + "[plugins]\nin_process = ['cpu_avx']\n"), env=with_cpu).in_child("cpu_avx")


def test_a_name_in_a_users_list_that_is_not_installed_is_told(contained, toml):
    file = toml("[plugins]\nin_process = ['rev']\n")
    registry = BackendRegistry(file, env=contained)
    assert any(f"{file}:2 [plugins] in_process names 'rev', which is not installed; did you mean 'ref'?" in line for line in registry.messages)
    assert BackendRegistry(env=contained).messages == []


@pytest.mark.usefixtures("patient")
def test_auto_asks_no_device_that_would_not_be_chosen_and_starts_no_child_for_a_known_lower_priority(site, contained, plugin, toml, tmp_path, monkeypatch):
    probed = tmp_path / "probed"
    probed.mkdir()
    note = f"open({str(probed)!r} + '/' + name, 'w').close()\n    return Ready((DeviceInfo('0', 'x'),))"
    for name, priority in (("low", 10), ("high", 80), ("never", -1)):
        site.install(plugin(name, priority, probe=f"@hookimpl\ndef fastllm_probe(name):\n    {note}"), name, f"dist-{name}", module=f"mod_{name}")
    with_cpu = {**contained, "FASTLLM_DISABLE_PLUGINS": "opencl_generic"}
    file = toml("[priority]\nhigh = 5\n")
    assert BackendRegistry(file, env=with_cpu).select("auto").name == "cpu_avx"
    assert os.listdir(probed) == []
    monkeypatch.setattr("fastllm.core.plugins.contained.ask_children", lambda questions, *rest, **more: [] if not questions else pytest.fail(str(questions)))
    low = toml("[priority]\nhigh = 5\nlow = 59\nnever = -1\n")
    registry = BackendRegistry(low, env={**contained, "FASTLLM_DISABLE_PLUGINS": ""})
    assert (registry.select("auto").name, registry.messages) == ("cpu_avx", [])


@pytest.mark.usefixtures("patient")
def test_what_a_probe_prints_and_leaves_behind_spoils_nothing(site, contained, plugin):
    leaves = "import os, subprocess; print('noise'); os.system('echo more')\n    p = subprocess.Popen(['sleep', '1000'])\n    return Ready((DeviceInfo(str(p.pid), 'x'),))"
    installed(site, plugin, "messy", {"probe": leaves})
    forks = "import os, time\n    p = os.fork()\n    if p == 0: time.sleep(1000)\n    return Ready((DeviceInfo(str(p), 'x'),))"
    installed(site, plugin, "forks", {"probe": forks})
    states = {s.name: s for s in BackendRegistry(env=contained).states()}
    assert (states["messy"].state, states["forks"].state) == ("ready", "ready")
    for name in ("messy", "forks"):
        assert ended(int(states[name].devices[0].id)), f"what the probe of '{name}' started is still there"


@pytest.mark.usefixtures("patient")
def test_a_slow_answer_is_said_by_the_automatic_choice(site, contained, plugin):
    installed(site, plugin, "slow", {"priority": 1, "probe": "import time; time.sleep(1.1)\n    return Unavailable('no NPU')"})
    registry = BackendRegistry(env=contained)
    assert registry.select("auto").name == "ref"
    assert any("backend 'slow' took 1." in line and "FASTLLM_DISABLE_PLUGINS=slow" in line for line in registry.messages)
    assert registry.remarks == {line for line in registry.messages if "'slow' took" in line}


@pytest.mark.usefixtures("patient")
def test_a_file_of_plugin_is_asked_in_a_child_too(tmp_path, contained, plugin):
    good, crash, probe = tmp_path / "good.py", tmp_path / "crash.py", tmp_path / "probe.py"
    good.write_text(plugin("my_npu", 95))
    crash.write_text("import ctypes\nctypes.string_at(0)\n")
    probe.write_text(plugin("dies", probe="@hookimpl\ndef fastllm_probe(name):\n    import os; os._exit(1)"))
    registry = BackendRegistry(plugin_paths=[good, probe], env=contained)
    assert registry.select("auto").name == "my_npu"
    assert registry.open("my_npu:1").device == "1"
    assert registry.state("dies").reason.startswith("the process ended with status 1")
    with pytest.raises(BackendBroken, match=r"plug-in .*crash\.py failed to load") as caught:
        BackendRegistry(plugin_paths=[crash], env=contained).select()
    assert "the process died of SIGSEGV" in caught.value.why


def test_a_child_that_cannot_be_started_is_an_answer(monkeypatch, contained):
    monkeypatch.setattr(child.subprocess, "Popen", lambda *a, **k: (_ for _ in ()).throw(BlockingIOError(11, "Resource temporarily unavailable")))
    registry = BackendRegistry(env={**contained, "FASTLLM_DISABLE_PLUGINS": ""})
    assert "no process could be started" in registry.state("opencl_generic").reason
    assert registry.select("auto").name == "cpu_avx"


GARBAGE = {
    "long": ("backends", "@hookimpl\ndef fastllm_backends():\n    return [BackendSpec(NAME, API_VERSION, 1, summary='x' * (1 << 25))]", "it answered with more than 4 MiB"),
    "choices": ("backends", "@hookimpl\ndef fastllm_backends():\n    return [BackendSpec(NAME, API_VERSION, 1, options={'a': Option(int, 1, 5)})]", "with a tuple of choices"),
    "items": ("backends", "@hookimpl\ndef fastllm_backends():\n    return [BackendSpec(NAME, API_VERSION, 1, options=type('D', (dict,), {'items': lambda s: 1 / 0})())]", "ZeroDivisionError"),
    "number": ("probe", "@hookimpl\ndef fastllm_probe(name):\n    return Unavailable(5, object())", "Unavailable.reason and .hint must be strings, not int and object"),
    "lies": ("probe", "@hookimpl\ndef fastllm_probe(name):\n    return type('R', (), {'__class__': Ready, 'devices': property(lambda s: 1 / 0)})()", "ZeroDivisionError"),
}


@pytest.mark.usefixtures("patient")
def test_answers_that_are_not_what_they_say_are_broken_plug_ins_in_a_child_and_here(site, env, contained, plugin):
    for name, (part, text, _) in GARBAGE.items():
        site.install(plugin(name, **{part: text}), name, f"dist-{name}", module=f"mod_{name}")
    for where in (contained, env):
        states = {s.name: s for s in BackendRegistry(env=where).states()}
        for name, (_, _, why) in GARBAGE.items():
            if name != "long" or where is contained:  # here it is a text as any other
                assert states[name].state == "broken"
                assert why in states[name].reason, states[name]
        assert states["ref"].state == "ready"
