"""Ctrl-C and termination at any moment of a real process.

No test waits for a time: a hook in the child counts events (calls, imports), and the signal arrives at a chosen one. As one from outside: its
handler runs at the next check of the interpreter and never inside of the hook, where an exception would keep the function that is being
called from running; were that the release of a lock of the import machinery, the next import would wait for ever.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fastllm

INJECT = """
import _signal, _thread, os, sys
class Signal(int):
    arrives = property(_thread.interrupt_main)  # a call would end with a check of the interpreter; an attribute does not
AT, NUMBER, FROM = int(os.environ["SIGNAL_AT"]), Signal(os.environ["SIGNAL_NUMBER"]), os.environ["SIGNAL_FROM"]
count = 0

def profile(frame, event, argument):
    global count
    if count or (frame.f_code.co_name == FROM and frame.f_code.co_filename.endswith(("cli/main.py", "cli/start.py"))):
        count += 1
        if count == AT:
            sys.setprofile(None)
            if _signal.getsignal(NUMBER) == _signal.SIG_DFL:
                os.kill(os.getpid(), NUMBER)
            NUMBER.arrives

sys.setprofile(profile)
import atexit
atexit.register(lambda: print(f"events {count}", file=sys.stderr))
"""


@pytest.fixture
def signalled(tiny_model, tmp_path):
    """signalled(at, number, *args, since="run_command") -> a finished `fastllm run` that got the signal at the at-th event since a function
    of `start` or `main` began; 0: never."""
    (tmp_path / "inject").mkdir()
    (tmp_path / "inject" / "sitecustomize.py").write_text(INJECT)

    def call(at: int, number: int, *args: object, since: str = "run_command") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fastllm", *map(str, args or ("run", tiny_model, "--prompt", "x", "-n", 3, "--backend", "ref"))]
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_STATE_HOME": str(tmp_path / "state")}
        environment |= {"PYTHONPATH": str(tmp_path / "inject"), "SIGNAL_AT": str(at), "SIGNAL_NUMBER": str(int(number)), "SIGNAL_FROM": since}
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


def test_ctrl_c_from_the_first_lines_on_is_130_without_a_word(signalled):
    whole = signalled(0, signal.SIGINT, "--version", since="main")
    assert whole.returncode == 0, whole.stderr
    events = int(re.search(r"events (\d+)", whole.stderr).group(1))
    handler_is_there = 5  # main is called, getsignal, signal
    for at in (*range(handler_is_there, 15), *range(15, events, events // 15)):
        done = signalled(at, signal.SIGINT, "--version", since="main")
        assert (done.returncode, re.sub(r"events \d+", "", done.stderr).strip()) == (130, ""), at


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_as_a_command_begins_and_ends_are_in_order(number):
    """At each of the 120 events after `unwind` begins, and at each since it ended: between the lines that set handlers."""
    script = """
import os, sys, _signal, _thread
from fastllm.cli import main, signals
import fastllm.cli.group
class Signal(int):
    arrives = property(_thread.interrupt_main)
NUMBER, count, at = Signal(sys.argv[1]), 0, 0

def profile(frame, event, argument):
    global count
    count += frame.f_code.co_name != "arm"
    if count == at:
        sys.setprofile(None)
        if _signal.getsignal(NUMBER) == _signal.SIG_DFL:
            os.kill(os.getpid(), NUMBER)
        NUMBER.arrives

def arm(*args):
    sys.setprofile(profile)

unwind = signals.unwind
def armed():
    arm()
    unwind()

for at in range(1, 121):
    for begins in (True, False):
        if (child := os.fork()) == 0:
            sys.argv = ["fastllm"]
            main._run = lambda cli, args: 0 if begins else arm() or 0
            if begins:
                signals.unwind = armed
            main.main()
            os._exit(77)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in ((0, 130) if NUMBER == 2 else (0, -NUMBER)), (at, begins, code)
"""
    done = subprocess.run([sys.executable, "-c", script, str(int(number))], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "")


def test_nothing_is_imported_before_ctrl_c_is_under_control(tmp_path):
    (tmp_path / "fastllm").symlink_to(Path(fastllm.__file__).parent)
    script = """
import sys
sys.path.insert(0, sys.argv[1])
import _signal, os
before = set(sys.modules)
_signal.signal = lambda number, handler: print(sorted(set(sys.modules) - before)) or sys.exit(number)
from fastllm.cli.start import main
main()
"""
    done = subprocess.run([sys.executable, "-S", "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (signal.SIGINT, "")
    assert ast.literal_eval(done.stdout) == ["fastllm", "fastllm.cli", "fastllm.cli.start"]


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


def test_what_is_left_half_made_by_ctrl_c_says_nothing():
    script = """
import os, signal, sys
from fastllm.cli import signals
class Archive:
    def __init__(self, ends):
        if ends:
            os.kill(os.getpid(), signal.SIGINT)
        self.file = None
    def __del__(self):
        self.file.close()
signals.unwind()
Archive(False)
try:
    Archive(True)
except KeyboardInterrupt:
    sys.exit(130)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count("AttributeError")) == (130, 1)  # of the one that was closed twice, and no signal had come


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
