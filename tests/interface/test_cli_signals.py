"""Ctrl-C and termination at any moment of a real process.

No test waits for a time: a hook in the child counts events (calls, imports) and sends the signal at a chosen one.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

INJECT = """
import os, signal, sys
AT, NUMBER = int(os.environ["SIGNAL_AT"]), int(os.environ["SIGNAL_NUMBER"])
count = 0

def profile(frame, event, argument):
    global count
    if count or frame.f_code.co_name == "run_command":
        count += 1
        if count == AT:
            sys.setprofile(None)
            os.kill(os.getpid(), NUMBER)

sys.setprofile(profile)
import atexit
atexit.register(lambda: print(f"events {count}", file=sys.stderr))
"""


@pytest.fixture
def signalled(tiny_model, tmp_path):
    """signalled(at, number, *args) -> a finished `fastllm run` that got the signal at its at-th event; 0: never."""
    (tmp_path / "inject").mkdir()
    (tmp_path / "inject" / "sitecustomize.py").write_text(INJECT)

    def call(at: int, number: int, *args: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fastllm", *map(str, args or ("run", tiny_model, "--prompt", "x", "-n", 3, "--backend", "ref"))]
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_STATE_HOME": str(tmp_path / "state")}
        environment |= {"PYTHONPATH": str(tmp_path / "inject"), "SIGNAL_AT": str(at), "SIGNAL_NUMBER": str(int(number))}
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=60, env=environment, check=False
        )

    return call


@pytest.fixture
def total(signalled):
    """The number of events of a whole run. Not of the first, which also tests the backend and remembers that it did."""
    signalled(0, signal.SIGINT)
    done = signalled(0, signal.SIGINT)
    assert done.returncode == 0
    return int(re.search(r"events (\d+)", done.stderr).group(1))


def test_ctrl_c_at_any_moment_is_130_without_a_word(signalled, total, tmp_path):
    for at in (1, 500, *range(total // 16, total * 15 // 16, total // 16)):
        done = signalled(at, signal.SIGINT)
        assert done.returncode == 130, (at, done.stderr)
        assert re.sub(r"events \d+", "", done.stderr).strip() == "", (at, done.stderr)
    assert not [p for p in tmp_path.rglob("*") if ".part" in p.name]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_termination_at_any_moment_is_that_signal_without_a_word(signalled, total, number):
    for at in range(total // 6, total * 5 // 6, total // 6):
        done = signalled(at, number)
        assert (done.returncode, done.stderr) == (-number, ""), at


def test_ctrl_c_while_downloading_leaves_nothing(signalled, package, tmp_path):
    whole = signalled(0, signal.SIGINT, "download", package)
    assert whole.returncode == 0, whole.stderr
    events = int(re.search(r"events (\d+)", whole.stderr).group(1))
    for at in range(events // 6, events, events // 6):
        shutil.rmtree(tmp_path / "home", ignore_errors=True)
        done = signalled(at, signal.SIGINT, "download", package)
        assert done.returncode == 130, (at, done.stderr)
        assert "Traceback" not in done.stderr, at
        assert not [p for p in (tmp_path / "home").rglob("*") if ".part" in p.name], at
    assert signalled(0, signal.SIGINT, "download", package).returncode == 0


def test_ctrl_c_while_answering_ends_the_answer(tiny_model, tmp_path):
    command = [sys.executable, "-m", "fastllm", "run", str(tiny_model), "--prompt", "x", "--ignore-eos", "--backend", "ref", "-q", "--ctx", "64"]
    script = "import fastllm.core.executor as e, time\nrun = e.Executor.run\nseen = []\n"
    script += "def slow(self, batch):\n    seen.append(1)\n    if len(seen) == 9:\n        import os, signal; os.kill(os.getpid(), signal.SIGINT)\n"
    script += "    return run(self, batch)\ne.Executor.run = slow\nimport sys\nfrom fastllm.cli.main import main\nmain()\n"
    done = subprocess.run(
        [sys.executable, "-c", script, *command[3:]], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 130
    assert done.stderr.strip() == b""
    assert b"Traceback" not in done.stdout


def test_a_background_job_keeps_ignoring_ctrl_c(signalled, total, tiny_model):
    earlier = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited, as from `nohup` or `&`
    try:
        done = signalled(total // 2, signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, earlier)
    assert done.returncode == 0


def test_ctrl_c_in_a_destructor_comes_again():
    script = """
import os, signal, sys
from fastllm.cli import signals
class Dying:
    def __del__(self):
        for _ in range(100):
            os.kill(os.getpid(), signal.SIGINT)
signals.unwind()
try:
    for _ in range(3):
        dying = Dying()
        del dying
    while True:
        pass
except KeyboardInterrupt:
    sys.exit(130)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_errors_after_ctrl_c_are_its_consequence(monkeypatch, capsys):
    import fastllm.cli.doctor
    from fastllm.cli import main, signals

    def lose(*args, **kwargs):
        signals._seen.append(signal.SIGINT)
        raise ImportError("numpy was interrupted")

    monkeypatch.setattr(fastllm.cli.doctor, "_machine", lose)
    assert main.run_command(["doctor"]) == 130
    signals.forget()
    assert "internal error" not in capsys.readouterr().err
