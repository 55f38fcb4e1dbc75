"""Signals of the command line: Ctrl-C at any moment, termination, a terminal that closes.

Until a command runs, Ctrl-C leaves at once: nothing is open and an exception could be lost inside an import. While one runs, Ctrl-C
is KeyboardInterrupt in the main thread, and SIGTERM and SIGHUP unwind it, so that what is half-written is removed; the process then
dies of that signal, as its parent expects. What was ignored at the start (nohup, a background job) stays ignored.
Imports nothing heavy: `main` calls this before anything else; `start`, before that, has Ctrl-C leave in the same way.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any

__all__ = ["INTERRUPTED", "Terminated", "die_of", "forget", "leave_at_once", "raise_seen", "unwind"]

INTERRUPTED = 128 + signal.SIGINT
AGAIN = 1e-3  # seconds until a signal whose exception was lost in a destructor is raised again
_seen: list[int] = []  # signals since the start or since `forget`; a signal handler can only speak through its module


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP. A KeyboardInterrupt, because event loops and the guards of plug-ins pass that on and nothing else."""

    def __init__(self, number: int):
        super().__init__(f"signal {number}")
        self.number = number


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _seen.append(number)
    raise KeyboardInterrupt


def _terminate(number: int, frame: FrameType | None) -> None:
    _seen.append(number)
    raise Terminated(number)


def _set(number: int, handler: Any) -> None:
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, handler)


def leave_at_once() -> None:
    """Ctrl-C ends the process with 130, without an exception, and termination as that signal."""
    _set(signal.SIGINT, _leave)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is _terminate:
            signal.signal(number, signal.SIG_DFL)


def unwind() -> None:
    """Signals become exceptions in the main thread. One that is lost in a destructor comes again a moment later, by the alarm clock:
    raised inside of the hook it would be lost in the hook. What a destructor says of an object that a signal left half made is not told."""
    _set(signal.SIGINT, _interrupt)
    _set(signal.SIGTERM, _terminate)
    _set(signal.SIGHUP, _terminate)
    earlier = sys.unraisablehook

    def unraisable(lost: Any) -> None:
        if isinstance(lost.exc_value, KeyboardInterrupt):
            signal.signal(signal.SIGALRM, lambda number, frame: raise_seen())
            signal.setitimer(signal.ITIMER_REAL, AGAIN)
        elif not _seen:
            earlier(lost)

    sys.unraisablehook = unraisable


def raise_seen() -> None:
    """Raises what came since the start or since `forget`: an error after a signal is its consequence (an import may turn it into one)."""
    if signal.SIGINT in _seen:
        raise KeyboardInterrupt
    if _seen:
        raise Terminated(_seen[-1])


def forget() -> None:
    """Ctrl-C was obeyed (the chat stopped its answer); what fails later has other causes."""
    _seen.clear()


def die_of(number: int) -> None:
    """Ends the process by a signal's default action. Returns only if that action does not end it."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
