"""The runner of other projects' suites: what it skips, and what it must not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXTERNAL = Path(__file__).parents[1] / "external"


@pytest.fixture(scope="module")
def runner():
    sys.path.insert(0, str(EXTERNAL))
    try:
        import run
        import suites

        yield run, suites
    finally:
        sys.path.remove(str(EXTERNAL))
        for name in ("run", "suites", "model"):
            sys.modules.pop(name, None)


REFUSED = (
    "WARNING: Retrying (Retry(total=0, connect=None, read=None, redirect=None, status=None)) after connection broken by 'NewConnectionError(…)': /simple/x/\n"
    "ERROR: Could not find a version that satisfies the requirement x==1 (from versions: none)\nERROR: No matching distribution found for x==1\n"
)
LOST = "ERROR: Could not find a version that satisfies the requirement x==1 (from versions: 0.9, 1.1)\nERROR: No matching distribution found for x==1\n"


@pytest.mark.parametrize(
    ("stderr", "network"),
    [
        (REFUSED, True),
        ("ERROR: HTTP error 503 while getting https://index/x.tar.gz\n", True),
        (LOST, False),
        ("ERROR: HTTP error 404 while getting https://index/x.tar.gz\n", False),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n", False),
        ("", False),
    ],
)
def test_a_lost_suite_is_red_in_ci_and_a_network_that_is_down_is_not(runner, monkeypatch, capsys, stderr, network):
    run, suites = runner
    fails = [sys.executable, "-c", "import sys; sys.stderr.write(sys.argv[1]); sys.exit(1)", stderr]
    with pytest.raises(suites.NotFetched) as caught:
        suites._run(fails, "x 1", 60)
    assert caught.value.network is network
    monkeypatch.setattr(run, "environment", lambda: (_ for _ in ()).throw(caught.value))
    monkeypatch.setattr(sys, "argv", ["run.py"])
    for ci, code in (("true", 0 if network else 1), ("", 0)):
        monkeypatch.setenv("CI", ci)
        assert run.main() == code
        said = capsys.readouterr().out
        assert said.startswith("SKIPPED all suites: x 1: " if code == 0 else "FAILED all suites: x 1: ")


def test_a_suite_whose_files_have_moved_is_lost(runner, monkeypatch, tmp_path):
    _, suites = runner
    monkeypatch.setattr(suites, "CACHE", tmp_path)
    (tmp_path / "x-1").mkdir()
    (tmp_path / "x-1" / ".complete").touch()
    with pytest.raises(suites.NotFetched, match=r"x 1 has no tests/a\.py") as caught:
        suites.fetch(suites.Suite("x", "x", "1", ("tests",), "", ("tests/a.py",)))
    assert not caught.value.network


def test_an_answer_of_500_is_a_fault_whatever_the_cases_make_of_it(runner, monkeypatch, tmp_path):
    """The server here says so in its log, as ours does; what a case expects plays no part."""
    run, _ = runner
    started = subprocess.Popen
    script = (
        "import signal, sys\n"
        "signal.signal(15, lambda *a: sys.exit(0))\n"
        "print('request id=a path=/x status=500 total_s=1', file=sys.stderr)\n"
        "print('request id=b path=/y status=400 said=500', file=sys.stderr)\n"
        "print('request id=c path=/z status=501 total_s=1', file=sys.stderr, flush=True)\n"
        "print('http://x', flush=True)\n"
        "while True: signal.pause()\n"
    )
    monkeypatch.setattr(run.subprocess, "Popen", lambda command, **more: started([sys.executable, "-c", script], **more))
    faults: list[str] = []
    with run.served(tmp_path, (), faults) as url:
        assert url == "http://x"
    assert faults == ["request id=a path=/x status=500 total_s=1"]
