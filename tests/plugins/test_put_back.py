"""What a plug-in does to the process that it is called in: put back, whatever it was, and whatever it raises."""

from __future__ import annotations

import locale
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from fastllm.core.errors import BackendBroken
from fastllm.core.plugins import BackendRegistry
from fastllm.core.plugins.put_back import put_back

DEEDS = {
    "chdir": "os.chdir('/')",
    "removed_folder": "import tempfile; d = tempfile.mkdtemp(); os.chdir(d); os.rmdir(d)",
    "signals": "import signal; [signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM)]",
    "mask": "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])",
    "timer": "import signal; signal.setitimer(signal.ITIMER_REAL, 0.5)",
    "streams": "sys.stdout = sys.stderr = sys.stdin = None",
    "closed": "os.close(0); os.close(1); os.close(2)",
    "path": "sys.path.clear()",
    "first_of_path": "sys.path.pop(0); sys.path.append('/of/a/driver')",
    "modules": "sys.modules.pop('numpy'); sys.modules['json'] = None",
    "locale": "import locale; locale.setlocale(locale.LC_ALL, 'C')",
    "fork": "os.fork()",
    "prints": "print('noise'); os.write(1, b'raw\\n'); os.system('echo child')",
}
LOOK = """
import json, locale, os, signal, sys
from importlib import metadata
locale.setlocale(locale.LC_ALL, "C.UTF-8")
def seen():
    return [
        os.getcwd(), [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)], sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
        signal.getitimer(signal.ITIMER_REAL), [id(s) for s in (sys.stdin, sys.stdout, sys.stderr)], [os.fstat(n).st_ino for n in (0, 1, 2)],
        [p for p in sys.path if p in path], [id(sys.modules["numpy"]), id(sys.modules["json"])], locale.setlocale(locale.LC_ALL),
    ]
import numpy
from fastllm.core.plugins import BackendRegistry
registry = BackendRegistry(env=dict(os.environ))
path, before = list(sys.path), None
before = seen()
{call}
print(json.dumps([before == seen(), [(a, b) for a, b in zip(before, seen()) if a != b]]))
"""
CALLS = {
    "head": "registry.state('acme_npu')",
    "probe": "registry.state('acme_npu')",
    "open_": "registry.open('acme_npu')",
}


@pytest.mark.parametrize(("deed", "where"), [*((deed, "open_") for deed in DEEDS), ("chdir", "head"), ("fork", "head"), ("prints", "probe")])
def test_what_a_plug_in_changes_of_the_process_is_as_it_was_behind_it(site, env, plugin, where, deed):
    marks = {"probe": f"@hookimpl\ndef fastllm_probe(name):\n    import os, sys; {DEEDS[deed]}\n    return Ready((DeviceInfo('0', 'x'),))"}
    marks["open_"] = f"@hookimpl\ndef fastllm_open_backend(name, device, options):\n    import os, sys; {DEEDS[deed]}\n    return Tiny(name, device, options)"
    marks["head"] = f"import os, sys; {DEEDS[deed]}"
    site.install(plugin(**{where: marks[where]}))
    where_it_looks = os.pathsep.join(p or os.getcwd() for p in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", LOOK.replace("{call}", CALLS[where])], env={**env, "PYTHONPATH": where_it_looks}, capture_output=True, text=True,
        timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (done.stdout.strip(), done.returncode) == ("[true, []]", 0), done.stderr[-2000:]
    if deed == "prints":
        assert {"noise", "raw", "child"} <= set(done.stderr.split())


@pytest.mark.parametrize("raised", ["type('Odd', (BaseException,), {})('odd')", "GeneratorExit()", "SystemExit(3)", "StopIteration(1)", "MemoryError()", "RecursionError()"])
@pytest.mark.parametrize("hook", ["probe", "open_"])
def test_whatever_is_raised_has_an_owner(site, env, plugin, hook, raised):
    name = {"probe": "fastllm_probe(name)", "open_": "fastllm_open_backend(name, device, options)"}[hook]
    site.install(plugin(**{hook: f"@hookimpl\ndef {name}:\n    raise {raised}"}))
    with pytest.raises(BackendBroken, match="backend 'acme_npu' failed to") as caught:
        BackendRegistry(env=env).open("acme_npu")
    assert "fastllm-backend-acme 0.3.1" in caught.value.who
    assert raised.partition("(")[0].replace("type", "Odd") in caught.value.why


def test_ctrl_c_stays_ctrl_c(site, env, plugin):
    site.install(plugin(probe="@hookimpl\ndef fastllm_probe(name):\n    raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        BackendRegistry(env=env).select("acme_npu")


def test_another_thread_than_the_first_can_call_a_plug_in(site, env, plugin):
    """It may not set handlers of signals."""
    site.install(plugin())
    found = []
    thread = threading.Thread(target=lambda: found.append(BackendRegistry(env=env).open("acme_npu")))
    thread.start()
    thread.join()
    assert found[0].name == "acme_npu"


def test_an_error_leaves_the_process_as_it_was(tmp_path):
    folder, handler, spoken = os.getcwd(), signal.getsignal(signal.SIGTERM), locale.setlocale(locale.LC_ALL)

    def deeds():
        with put_back():
            os.chdir(tmp_path)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise ValueError("as planned")

    with pytest.raises(ValueError, match="as planned"):
        deeds()
    assert (os.getcwd(), signal.getsignal(signal.SIGTERM), locale.setlocale(locale.LC_ALL)) == (folder, handler, spoken)


def test_ctrl_c_between_the_redirections_leaves_the_process_as_it_was(monkeypatch):
    redirect, out, stream, open_before = os.dup2, os.fstat(1), sys.stdout, set(os.listdir("/proc/self/fd"))

    def interrupted(source, target):
        redirect(source, target)
        if (source, target) == (2, 1):
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "dup2", interrupted)
    with pytest.raises(KeyboardInterrupt), put_back():
        pytest.fail("the block is not entered")
    assert os.path.samestat(os.fstat(1), out)
    assert sys.stdout is stream
    assert set(os.listdir("/proc/self/fd")) == open_before


def test_blocks_of_two_threads_leave_the_process_as_it_was(monkeypatch):
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # also where this fails
    output, folder, file = sys.stdout, os.getcwd(), os.fstat(1).st_ino
    first_in, second_in = threading.Event(), threading.Event()

    def first():
        with put_back():
            os.chdir("/")
            first_in.set()
            second_in.wait(0.5)  # in vain: it is not in before this one is out

    def second():
        first_in.wait(60)
        with put_back(), put_back():
            second_in.set()
            threads[0].join()

    threads = [threading.Thread(target=target) for target in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = sys.stdout is output, os.getcwd(), os.fstat(1).st_ino
    os.chdir(folder)
    assert found == (True, folder, file)


@pytest.fixture
def alarms():
    """An entry for each time that the alarm clock goes off, which is the test's; pytest's own limit rests meanwhile."""
    heard = []
    limit, handler = signal.setitimer(signal.ITIMER_REAL, 0), signal.signal(signal.SIGALRM, lambda *_: heard.append(1))
    yield heard
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, *limit)


def test_a_timer_of_the_program_runs_on(alarms):
    signal.setitimer(signal.ITIMER_REAL, 1000)
    with put_back():
        time.sleep(0.1)
    assert 900 < signal.getitimer(signal.ITIMER_REAL)[0] < 999.91
    for deed in ((5, 0), (0, 0), (2000, 0), (800, 7)):
        with put_back():
            signal.setitimer(signal.ITIMER_REAL, *deed)
        left, interval = signal.getitimer(signal.ITIMER_REAL)
        assert (900 < left < 999.91, interval) == (True, 0.0), deed


def test_a_timer_that_goes_off_meanwhile_does_so_once(alarms):
    signal.setitimer(signal.ITIMER_REAL, 0.03)
    with put_back():
        time.sleep(0.1)
    assert (len(alarms), signal.getitimer(signal.ITIMER_REAL)[0]) == (1, 0.0)


def test_a_timer_that_repeats_and_is_taken_away_repeats_again(alarms):
    signal.setitimer(signal.ITIMER_REAL, 0.03, 500)
    for deed in ((0, 0), (5, 0)):
        with put_back():
            time.sleep(0.1)
            signal.setitimer(signal.ITIMER_REAL, *deed)
        assert signal.getitimer(signal.ITIMER_REAL)[1] == 500, deed
    assert len(alarms) == 1


def test_a_timer_that_is_about_to_go_off_is_not_taken_away(alarms):
    """So the command line raises a Ctrl-C again whose exception was lost in a destructor, wherever that was."""
    with put_back():
        signal.setitimer(signal.ITIMER_REAL, 0.005)
    time.sleep(0.1)
    assert len(alarms) == 1
