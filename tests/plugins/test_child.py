"""Probes in a child process: what would end or stop this one is a line of the report."""

from __future__ import annotations

import pytest

from fastllm.core.plugins import probe_in_child


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


def test_a_hang_ends_at_the_limit_with_everything_it_started(site, env, plugin):
    hang = "import subprocess, threading; subprocess.Popen(['cat', '/dev/zero'], stdout=-3)\n    threading.Event().wait()"
    site.install(plugin(probe=probing(hang)))
    report = probe_in_child("acme_npu", 3, env=env)
    assert report.outcome == "hung"
    assert report.detail.startswith("no answer within 3 s")


def test_an_unknown_name_and_a_wrong_file_are_answers_too(site, env, tmp_path):
    assert "no backend is called 'nobody'" in probe_in_child("nobody", 120, env=env).detail
    file = tmp_path / "wrong.toml"
    file.write_text("[ran]\n")
    assert "unknown table [ran]" in probe_in_child("ref", 120, plugins_file=file, env=env).detail
