"""Probes in a child process: what would end or stop this one is a line of the report."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from fastllm.core.plugins import probe_in_child

from .conftest import ended


def probing(body):
    return f"@hookimpl\ndef fastllm_probe(name):\n    {body}"


def test_a_child_answers_with_the_state_and_what_it_prints_does_not_spoil_it(site, env, plugin):
    site.install(plugin(probe=probing("import os; print('noise'); os.system('echo more')\n    return Unavailable('no NPU', 'plug it in')")))
    report = probe_in_child("acme_npu", 120, env=env)
    assert report.outcome == "answered", report
    assert (report.state["state"], report.state["hint"], report.detail) == ("unavailable", "plug it in", "no NPU")
    assert "more" in report.noise
    ready = probe_in_child("ref", 120, env=env).state
    assert (ready["state"], list(ready["environment"])) == ("ready", ["numpy"])


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ("import ctypes; ctypes.string_at(0)", "the process died of SIGSEGV"),
        ("import os; os.abort()", "the process died of SIGABRT"),
        ("import os; os._exit(9)", "the process ended with status 9 before it answered"),
        ("import os; os.write(2, b'more\\nno firmware\\x1b[2J\\n'); os._exit(1)", "the process ended with status 1 before it answered: no firmware\\x1b[2J"),
    ],
)
def test_a_crash_is_a_line_with_its_place(site, env, plugin, body, detail):
    site.install(plugin(probe=probing(body)))
    report = probe_in_child("acme_npu", 120, env=env)
    assert report.outcome == "crashed", report
    assert report.detail.startswith(detail)
    if "SIG" in detail:
        assert ".py:" in report.detail


def test_a_plug_in_that_replaces_what_the_child_answers_with_changes_neither_answer_nor_stage(site, env, plugin):
    site.install(plugin(head="import json\njson.dumps = lambda *given, **more: 'BAD'", probe=probing("raise OSError('no firmware')")))
    report = probe_in_child("acme_npu", 120, env=env)
    assert (report.outcome, report.stage) == ("answered", "probe"), report
    assert report.state["state"] == "broken"
    assert "OSError: no firmware" in report.state["reason"]


def test_a_hang_ends_at_the_limit_with_what_it_started(site, env, plugin):
    hang = "import subprocess, threading; print('started', subprocess.Popen(['cat', '/dev/zero'], stdout=-3).pid, flush=True)\n    threading.Event().wait()"
    site.install(plugin(probe=probing(hang)))
    report = probe_in_child("acme_npu", 3, env=env)
    assert report.outcome == "hung"
    assert report.detail.startswith("no answer within 3 s")
    assert ended(int(report.noise.partition("started ")[2].split()[0]))


PARENT = """
import sys
from fastllm.core.plugins import probe_in_child
probe_in_child("acme_npu", 1000, env={"HOME": sys.argv[1], "FASTLLM_DISABLE_PLUGINS": "cpu_avx,opencl_generic"})
"""


def test_a_child_that_hangs_ends_with_a_parent_that_is_killed(site, tmp_path, plugin):
    """The child keeps Python's lock and blocks every signal: nothing but the kernel ends it."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    deaf = "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n    ctypes.PyDLL(None).sleep(1000)"
    hang = f"import ctypes, os, pathlib, signal; pathlib.Path({str(fifo)!r}).write_text(f'{{os.getpid()}}\\n'); {deaf}"
    site.install(plugin(probe=probing(hang)))
    told = os.open(fifo, os.O_RDWR)  # not at its end before the child writes
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], env={"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)})
    try:
        assert select.select([told], [], [], 120)[0], "the child does not probe"
        child = int(os.read(told, 100))
    finally:
        os.close(told)
        parent.kill()
        parent.wait()
    if not ended(child):
        os.kill(child, signal.SIGKILL)
        pytest.fail("the child is still there")


def test_an_unknown_name_and_a_wrong_file_are_answers_too(site, env, tmp_path):
    assert "no backend is called 'nobody'" in probe_in_child("nobody", 120, env=env).detail
    file = tmp_path / "wrong.toml"
    file.write_text("[ran]\n")
    assert "unknown table [ran]" in probe_in_child("ref", 120, plugins_file=file, env=env).detail
