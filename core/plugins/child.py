"""Asks plug-ins in child processes: a driver that crashes, hangs or ends its process becomes an answer with an owner.

A child is `python -m fastllm.core.plugins`, started afresh (a fork would take over locks of threads and devices that are open). It finds
plug-ins again by itself, and answers with one line of JSON. Called by the registry, for `doctor`, lists and the choice of a backend.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import math
import os
import re
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from ..errors import one_line

__all__ = ["ASK_S", "CONTAIN", "Answer", "ChildProbe", "ask_children", "located", "probe_in_child", "probe_in_children"]

ASK_S: Final = 5.0
"""Seconds for start, import and probe together; then the child's process group is killed."""

CONTAIN: Final = "FASTLLM_CONTAIN_PLUGINS"
"""0: plug-ins are asked in the process itself, as in a child, which starts none of its own."""

NOISE_BYTES: Final = 1 << 16  # that are kept of what a plug-in prints, the last ones
ANSWER_BYTES: Final = 1 << 22  # an answer has some thousand
SO_FAR: Final = "so far: "  # before the answer that stands if what follows ends the child
WAIT_S: Final = 2.0
"""Seconds after which somebody is told that a child has not answered."""
TICK_S: Final = 0.05  # between looks at children that ended while something they started holds their pipes
PR_SET_PDEATHSIG: Final = 1
DEATH_S: Final = 1.0  # that a killed child may take to end; one that a driver keeps in the kernel is left behind


@dataclass(frozen=True)
class ChildProbe:
    """What became of a question. outcome: answered | crashed | hung. state: the answer, BackendState.as_dict() with `environment` and
    `messages`, else {}. stage: what it was at (load, probe, open …). detail: the signal or exit status and, where known, the place in the code;
    noise: what the plug-in printed."""

    name: str
    outcome: str
    state: dict[str, Any] = field(default_factory=dict)
    detail: str = ""
    noise: str = ""
    stage: str = "probe"


def probe_in_child(
    name: str,
    timeout_s: float = ASK_S,
    plugins_file: str | os.PathLike[str] | None = None,
    plugin_paths: Sequence[str | os.PathLike[str]] = (),
    env: Mapping[str, str] = os.environ,
) -> ChildProbe:
    """Loads and probes one backend in a child process with this process's import path. Never raises for what the plug-in does."""
    return probe_in_children({name: located(plugins_file, plugin_paths)}, timeout_s, env)[0]


def probe_in_children(
    backends: Mapping[str, Sequence[str]],
    timeout_s: float = ASK_S,
    env: Mapping[str, str] = os.environ,
    told: Callable[[str, str, float], None] | None = None,
) -> list[ChildProbe]:
    """The same for several, at the same time. backends: name -> the arguments that make a child find it (`located`). told: as of `ask_children`."""
    return ask_children([(name, ("--environment", *where, "--", name)) for name, where in backends.items()], timeout_s, env, told=told)


def located(plugins_file: str | os.PathLike[str] | None, plugin_paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The arguments that make a child find what this process finds."""
    arguments = [] if plugins_file is None else ["--plugins-file", os.fspath(plugins_file)]
    for path in plugin_paths:
        arguments += ["--plugin", os.fspath(path)]
    return arguments


class Answer:
    """The child's side: what it says goes to the parent, and what a plug-in or its driver prints goes to stderr."""

    def __init__(self, timeout_s: float):
        """timeout_s: seconds until the parent gives up; a little before, the stack is printed, so that a hang has a place."""
        _end_with_parent()
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._dumps = json.dumps  # as it is now: a plug-in may put another in its place
        faulthandler.dump_traceback_later(0.8 * timeout_s)

    def stage(self, name: str) -> None:
        """What is done next: where it ends, if it does."""
        self._out.write(f"{name}\n")
        self._out.flush()

    def so_far(self, said: Mapping[str, Any]) -> None:
        """The answer, if nothing better comes: what is asked next may crash or hang, and leaves this as it is."""
        self._out.write(SO_FAR + self._dumps(said, default=str) + "\n")
        self._out.flush()

    def end(self, said: Mapping[str, Any]) -> NoReturn:
        """Answers, and ends the process: exit handlers and threads of a driver have no say any more."""
        faulthandler.cancel_dump_traceback_later()
        self._out.write(self._dumps(said, default=str) + "\n")
        self._out.close()
        sys.stderr.flush()
        os._exit(0)


def _end_with_parent() -> None:
    """Lets the kernel kill this process when its parent dies, whatever it is doing then: in a session of its own, no Ctrl-C and no hang-up of a
    terminal reaches it. The signal comes with the end of the *thread* that started it, which stays in `ask_children` until this one is gone."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    poll = select.poll()
    poll.register(1, 0)
    if any(event & select.POLLERR for _, event in poll.poll(0)):  # nobody can read the answer: the parent died before
        os._exit(1)


def ask_children(
    questions: Sequence[tuple[str, Sequence[str]]], timeout_s: float, env: Mapping[str, str], module: str = __package__,
    told: Callable[[str, str, float], None] | None = None,
) -> list[ChildProbe]:  # fmt: skip
    """Asks each question, a name and the child's arguments, in a child of its own, several at the same time. timeout_s: for each.
    module: what a child runs; it answers with `Answer`. told: gets name and stage of a child that has not answered after WAIT_S, and the seconds
    that it has in all."""
    waiting = list(questions)[::-1]
    running: list[_Child] = []
    answers: dict[str, ChildProbe] = {}
    with selectors.DefaultSelector() as selector:
        try:
            while waiting or running:
                while waiting and len(running) < max(4, os.cpu_count() or 1):
                    name, arguments = waiting.pop()
                    try:
                        running.append(_Child(name, [module, "--timeout", str(timeout_s), *arguments], timeout_s, env, selector))
                    except OSError as error:
                        answers[name] = ChildProbe(name, "crashed", detail=f"no process could be started: {error}", stage="load")
                for key, _ in selector.select(TICK_S if running else 0):
                    key.data()
                if told is not None:
                    for child in [c for c in running if c.is_slow()]:
                        told(child.name, child.stage, child.limit_s)
                for child in [c for c in running if c.ended()]:
                    running.remove(child)
                    answers[child.name] = child.finish()
        finally:
            for child in running:  # Ctrl-C: the children are in sessions of their own and would stay
                child.finish()
    return [answers[name] for name, _ in questions]


class _Child:
    """One child and what it said so far."""

    def __init__(self, name: str, arguments: Sequence[str], timeout_s: float, env: Mapping[str, str], selector: selectors.BaseSelector):
        self.name, self.limit_s, self.selector = name, timeout_s, selector
        self.answer, self.noise = bytearray(), bytearray()
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        self.process = subprocess.Popen(
            # -P: the current folder is on the path only if it is on ours
            [sys.executable, "-P", "-X", "faulthandler", "-m", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**env, "PYTHONPATH": path, CONTAIN: "0"},
            start_new_session=True,
        )
        self.deadline = time.monotonic() + timeout_s
        self._slow_at = time.monotonic() + WAIT_S
        self._floods = False
        for pipe, take in ((self.process.stdout, self._hear_answer), (self.process.stderr, self._hear_noise)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ, take)

    def ended(self) -> bool:
        """Whether it answered, ended, or had its time."""
        if self.limit_s > ASK_S and self.so_far() is not None:  # what matters is answered
            self.limit_s, self.deadline = ASK_S, min(self.deadline, time.monotonic() + ASK_S)
        return self._floods or self.state() is not None or self.process.poll() is not None or time.monotonic() >= self.deadline

    def is_slow(self) -> bool:
        """Once, when it has not answered after WAIT_S."""
        if time.monotonic() < self._slow_at or self.ended():
            return False
        self._slow_at = math.inf
        return True

    @property
    def stage(self) -> str:
        """What it is at."""
        stages = [line for line in self._lines() if line.isidentifier()]
        return stages[-1] if stages else "load"

    def _lines(self) -> list[str]:
        return self.answer.decode("utf-8", "replace").split("\n")[:-1]

    def state(self) -> dict[str, Any] | None:
        """The answer, if it is complete: the line of JSON after lines that name stages."""
        last = bytes(self.answer).rpartition(b"\n")[0].rpartition(b"\n")[2]
        return _object(last.decode("utf-8", "replace")) if last.startswith(b"{") else None

    def so_far(self) -> dict[str, Any] | None:
        """What it said before it was asked for more."""
        said = [line for line in self._lines() if line.startswith(SO_FAR)]
        return _object(said[-1].removeprefix(SO_FAR)) if said else None

    def finish(self) -> ChildProbe:
        """Ends the child and its process group, and says what became of it."""
        exited = self.process.poll() is not None
        _kill(self.process)
        try:
            self.process.wait(DEATH_S)
        except subprocess.TimeoutExpired:
            self.noise += b"\nit cannot be killed"
        self._hear_answer()
        self._hear_noise()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            if pipe in self.selector.get_map():
                self.selector.unregister(pipe)
            pipe.close()
        state, noise = self.state(), self.noise.decode("utf-8", "replace").strip()
        stage = self.stage
        if state is not None:
            return ChildProbe(self.name, "answered", state, str(state.get("reason", "")), noise, stage)
        if self._floods:
            outcome, detail = "crashed", f"it answered with more than {ANSWER_BYTES >> 20} MiB"
        elif not exited:
            outcome, detail = "hung", f"no answer within {self.limit_s:g} s"
        else:
            outcome, detail = "crashed", _ended(self.process.returncode)
            if self.process.returncode > 0 and noise:  # Python's own last word is the error
                detail += f": {one_line(noise.splitlines()[-1][:300])}"
        detail, before = _with_place(detail, noise), self.so_far()
        if before is not None:  # only the question after it has no answer
            before[f"{stage.removeprefix('fastllm_')}_error"] = f"{detail}, in a process of its own"
            return ChildProbe(self.name, "answered", before, str(before.get("reason", "")), noise, stage)
        return ChildProbe(self.name, outcome, {}, detail, noise, stage)

    def _hear_answer(self) -> None:
        self._hear(self.process.stdout, self.answer)
        self._floods = self._floods or len(self.answer) > ANSWER_BYTES
        del self.answer[ANSWER_BYTES:]

    def _hear_noise(self) -> None:
        self._hear(self.process.stderr, self.noise)
        del self.noise[:-NOISE_BYTES]

    def _hear(self, pipe: Any, heard: bytearray) -> None:
        """Takes what is there: at most one read, so that a child that prints without an end stops nobody."""
        if pipe.closed or pipe not in self.selector.get_map():
            return
        try:
            data = os.read(pipe.fileno(), NOISE_BYTES)
        except BlockingIOError:
            return
        heard += data
        if not data:
            self.selector.unregister(pipe)


def _object(text: str) -> dict[str, Any] | None:
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kills the child's group, also where the child itself ended: what it started may be left. Its number is still ours, as the group lives
    as long as one of its members, and else there is nothing to kill. What it started in a session of its own is not in the group."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        child.kill()


def _ended(returncode: int) -> str:
    if returncode < 0:
        try:
            return f"the process died of {signal.Signals(-returncode).name}"
        except ValueError:
            return f"the process died of signal {-returncode}"
    return f"the process ended with status {returncode} before it answered"


def _with_place(what: str, noise: str) -> str:
    """Adds the innermost frame of the first stack that faulthandler printed, of code that is neither Python's own nor this loader's if there is one."""
    stack = re.search(r'most recent call first\):\n((?:  File .*\n?)+)', noise)
    if stack is None:
        return what
    frames = re.findall(r'File "([^"]+)", line (\d+)', stack[1])
    python, loader = os.path.dirname(os.__file__) + os.sep, os.path.dirname(__file__) + os.sep
    vendors = [f for f in frames if not f[0].startswith(loader) and (not f[0].startswith(python) or "-packages" in f[0]) and not f[0].startswith("<")]
    file, line = (vendors or frames)[0]
    return f"{what}   ({file}:{line})"
