"""What a plug-in's code may change of the process that it is called in, and must not: put back when it returns.

The current folder, the three standard streams, the handlers, the mask and the timer of signals, the locale, and modules and folders of imports that were there:
the program's, and no backend's. What it prints meanwhile goes to stderr, as stdout is for answers and JSON. A fork that comes back is ended. What it adds to the
search path, environment variables, threads and memory stay: drivers need them. Called by the loader around every call of a plug-in that did not come with fastllm.

All of that is the process's, so one thread at a time is in such a block: of two that overlap, the second would keep the first one's changes and put back those. In
another thread than the first nothing is known of handlers, and none is set: who handles signals and loads there sets his own again (`server/serve.py`).
"""

from __future__ import annotations

import contextlib
import locale
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Final

__all__ = ["put_back"]

STOPPING: Final = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGPIPE")
"""Signals by which people and shells stop a program."""

SLACK_S: Final = 0.01
"""By how much the rest of a timer may differ from what is expected of one that ran on."""

_one_at_a_time = threading.RLock()  # a hook may come to another plug-in's, in its own thread


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """Puts back what a block changed of the process, also where it raises. Waits while another thread is in such a block."""
    with _one_at_a_time, _put_back():
        yield


@contextlib.contextmanager
def _put_back() -> Iterator[None]:
    process, folder, spoken = os.getpid(), _folder(), locale.setlocale(locale.LC_ALL)
    streams, handlers = (sys.stdin, sys.stdout, sys.stderr), _handlers()
    path, modules = list(sys.path), dict(sys.modules)
    timer, since = signal.getitimer(signal.ITIMER_REAL) if hasattr(signal, "setitimer") else None, time.monotonic()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ()) if hasattr(signal, "pthread_sigmask") else set()
    kept: dict[int, int] = {}
    try:  # what follows changes the process, and Ctrl-C may come in the middle of it
        for stream in streams[1:]:
            _flush(stream)
        for fd in (0, 1, 2):
            if (copy := _copy(fd)) is not None:
                kept[fd] = copy
        if 1 in kept and 2 in kept:
            os.dup2(2, 1)
        sys.stdout = sys.stderr
        yield
    finally:
        if os.getpid() != process:  # a fork came back here, and would do all that follows a second time
            os._exit(0)
        for stream in (sys.stdout, sys.stderr):
            _flush(stream)
        sys.stdin, sys.stdout, sys.stderr = streams
        for fd, copy in kept.items():
            with contextlib.suppress(OSError):  # it may have closed the copy as well
                os.dup2(copy, fd)
                os.close(copy)
        if folder is not None and _folder() != folder:
            with contextlib.suppress(OSError):
                os.chdir(folder)
        if [entry for entry in sys.path if entry in path] != path:  # some are gone, or in another order
            sys.path[:] = path + [entry for entry in sys.path if entry not in path]
        for name, module in modules.items():
            if sys.modules.get(name) is not module:
                sys.modules[name] = module
        if timer is not None:
            _restart(timer, time.monotonic() - since)
        if locale.setlocale(locale.LC_ALL) != spoken:
            locale.setlocale(locale.LC_ALL, spoken)
        for number, handler in handlers.items():
            signal.signal(number, handler)  # also where it looks the same: native code changes it behind Python's back
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _restart(timer: tuple[float, float], elapsed_s: float) -> None:
    """Sets the alarm clock to where it would be by now, if something else was done to it than to run on. timer: what it was: seconds left, interval. One that was
    due meanwhile is left alone: it went off, and whoever heard it may have set another. So is one that is about to go off: the command line's own for a Ctrl-C
    that was lost."""
    (left, interval), (now, again) = timer, signal.getitimer(signal.ITIMER_REAL)
    expected = max(0.0, left - elapsed_s)
    if left and not expected:
        if again != interval:
            signal.setitimer(signal.ITIMER_REAL, interval, interval)
    elif again != interval or abs(now - expected) > SLACK_S:
        signal.setitimer(signal.ITIMER_REAL, expected, interval)


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


def _handlers() -> dict[int, signal.Handlers]:
    """Those that Python knows; none in another thread than the first, which may not set them."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    numbers = [getattr(signal, name) for name in STOPPING if hasattr(signal, name)]
    return {number: handler for number in numbers if (handler := signal.getsignal(number)) is not None}  # type: ignore[misc]


def _copy(fd: int) -> int | None:
    try:
        return os.dup(fd)
    except OSError:  # it is closed
        return None


def _flush(stream: object) -> None:
    with contextlib.suppress(Exception):
        stream.flush()  # type: ignore[attr-defined]
