"""The command `fastllm`: signals, streams, and the one place where errors become exit codes.

Exit codes: 0, 1 failure, 2 usage, 3 broken plug-in, 4 backend unavailable, 5 unsupported, 130 Ctrl-C, 141 closed pipe; SIGTERM and
SIGHUP end the process as signals. `start`, which comes before, has Ctrl-C under control.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

from . import signals

if TYPE_CHECKING:
    from collections.abc import Callable

    import click

    from ..core.errors import FastLLMError
    from ..core.plugins.discovery import Candidate, Source

__all__ = ["main", "run_command"]

CLOSED_PIPE = 141
THREADS_S = 1.0
"""That threads of plug-ins have to end when a command is over."""
SYSTEM_FIXES = {
    errno.ENOENT: "check the path: a file or folder of it is not there",
    errno.ENOTDIR: "check the path: a part of it is no folder",
    errno.EISDIR: "name a file, not a folder",
    errno.EACCES: "name another path, or change its permissions",
    errno.EPERM: "name another path, or change its permissions",
    errno.EROFS: "name a path on a disk that can be written",
    errno.ENOSPC: "free some space, or name a path on another disk",
    errno.EDQUOT: "free some space, or name a path on another disk",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "the system has no file descriptor left: close other programs",
    errno.EAGAIN: "the system starts no more threads or processes: raise ulimit -u, or close other programs",
    errno.ENOMEM: "free memory, or raise the limit (ulimit -v)",
    errno.ENAMETOOLONG: "name a shorter path",
    errno.ELOOP: "check the path: its links lead in a circle",
    errno.EIO: "check the disk that the file is on",
    errno.EADDRINUSE: "choose another --port, or 0 for a free one",
}
"""What can be done about what the system refuses, where nothing nearer to it knew better."""
WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def main() -> None:
    """What `start` calls: a command line from its streams to its exit."""
    signals.leave_at_once()
    _open_streams()
    try:
        code = run_command(sys.argv[1:], ready=signals.unwind)
        signals.leave_at_once()
    except signals.Terminated as end:
        _drop_streams()
        signals.die_of(end.number)
        code = 128 + end.number
    except KeyboardInterrupt:  # it came when the command had ended, or again
        code = signals.INTERRUPTED
    if code == signals.INTERRUPTED:  # not sys.exit: CPython may remember the exception from an `exec` and die of SIGINT instead
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    _leave_threads(code)
    sys.exit(code)


def _strangers() -> dict[Source, Candidate]:
    """Plug-ins of others that were imported in this process, and a backend of each."""
    loader = sys.modules.get("fastllm.core.plugins.loader")
    return {} if loader is None else loader.STRANGERS


def _leave_threads(code: int) -> None:
    """Ends the process where a plug-in left threads that do not end: Python would wait for them for ever."""
    if not _strangers():
        return
    import atexit
    import threading
    import time

    deadline = time.monotonic() + THREADS_S
    left = [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    for thread in left:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in left):
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)


def run_command(args: list[str], ready: Callable[[], None] = lambda: None) -> int:
    """Runs a command line; returns its exit code. An error is one line and a fix on stderr, and an object on stdout with `--json`.

    ready: called when what every command needs has been imported.
    """
    import click

    from .group import cli

    try:
        ready()
        return _run(cli, args)
    except signals.Terminated:
        raise
    except (KeyboardInterrupt, click.Abort):
        with contextlib.suppress(OSError):
            print(file=sys.stderr)  # below the ^C of the terminal
        return signals.INTERRUPTED


def _run(cli: click.Group, args: list[str]) -> int:
    """Runs and flushes; errors become messages and codes."""
    import click

    try:
        code = _invoke(cli, args)
        sys.stdout.flush()
        return code
    except click.Abort:
        raise
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, signals.Terminated)) or (isinstance(error, SystemExit) and not _strangers()):
            raise
        if isinstance(error, BrokenPipeError) and _theirs(error) is None:  # a plug-in's own may be that of a driver's daemon
            _drop_streams()
            return CLOSED_PIPE
        signals.raise_seen()
        if _asked(args, "debug") and not isinstance(error, click.ClickException):
            if not isinstance(error, SystemExit):
                raise
            traceback.print_exc()  # Python would end with its code, and without a word
        return _report(_as_fastllm_error(error), as_json=_asked(args, "json"), events=_events(args))


def _invoke(cli: click.Group, args: list[str]) -> int:
    """The exit code of a command; not `cli.main`, which turns a closed pipe into exit code 1."""
    import click

    if "_FASTLLM_COMPLETE" in os.environ:
        cli.main(args, prog_name="fastllm")
    try:
        with cli.make_context("fastllm", list(args)) as context:
            result = cli.invoke(context)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 2


def _as_fastllm_error(error: BaseException) -> FastLLMError:
    """What the user is told about an exception that ended a command."""
    import click

    from ..core import errors

    if isinstance(error, errors.FastLLMError):
        return error
    if isinstance(error, click.UsageError):
        return errors.UsageError(error.format_message(), fix=f"{error.ctx.command_path} --help" if error.ctx else "")
    if isinstance(error, click.ClickException):
        return errors.FastLLMError(error.format_message())
    theirs = _theirs(error)
    if isinstance(error, MemoryError):
        about = {"who": theirs.who, "why": theirs.why} if theirs else {}
        return errors.OutOfMemory("there is not enough memory", fix="close other programs, or use a smaller --ctx or model", **about)
    if theirs:
        return theirs
    beside = _strangers()
    if isinstance(error, OSError) and error.filename is None and error.errno in WRITE_ERRORS:
        return errors.FastLLMError(f"the output cannot be written: {error.strerror}", fix="check where stdout goes")
    if isinstance(error, OSError):
        name = f"{error.filename}: " if error.filename else ""
        return errors.FastLLMError(f"{name}{error.strerror or error}", who=str(error.filename or ""), fix=SYSTEM_FIXES.get(error.errno or 0, "run again with --debug to see where it failed"))
    if isinstance(error, ImportError):
        return _import_error(error)
    text, fix = f"internal error: {type(error).__name__}: {error}", "this is a bug of fastllm; run again with --debug and report it"
    if beside:
        without = ",".join(sorted({c.name for c in beside.values() if c.name})) or "NAME"
        fix = f"first without what ran in this process: FASTLLM_DISABLE_PLUGINS={without}  |  if it fails all the same, {fix}"
    return errors.FastLLMError(text, who=f"beside {', '.join(dict.fromkeys(s.label for s in beside))}" if beside else "", fix=fix)


def _theirs(error: BaseException) -> FastLLMError | None:
    """The error of the plug-in whose code is on the way of an exception that nobody understood."""
    beside = _strangers()
    if not beside:
        return None
    from ..core.plugins.report import blamed

    return next(filter(None, (blamed(candidate, error) for candidate in beside.values())), None)


def _import_error(error: ImportError) -> FastLLMError:
    """A library that does not load: for want of memory, or because the installation is not whole."""
    from ..core import errors

    text = str(error)
    if any(words in text for words in ("failed to map segment", "annot allocate memory", "cannot create")):
        return errors.OutOfMemory("there is not enough memory to load a library", why=text, fix="raise the limit of address space (ulimit -v), or free memory")
    return errors.FastLLMError("a library of fastllm does not load", who=error.name or "", why=text, fix="install it again: pip install --force-reinstall fastllm-engine, or make install in a source tree")


def _asked(args: list[str], flag: str) -> bool:
    """Whether a flag that any command may have was given, also where the line could not be parsed: on it, or as its variable."""
    return f"--{flag}" in args or os.environ.get(f"FASTLLM_{flag.upper()}", "").lower() in ("1", "true", "yes", "on")


def _events(args: list[str]) -> bool:
    """Whether stderr is a JSON object a line."""
    given = [arg.replace("=", " ") for arg in args]
    return "--progress json" in " ".join(given) or ("--progress" not in " ".join(given) and os.environ.get("FASTLLM_PROGRESS") == "json")


def _report(error: FastLLMError, *, as_json: bool, events: bool) -> int:
    from .terminal import event, say

    try:
        if events:
            event("error", **error.as_dict()["error"])
        else:
            say(error.render())
        if as_json:
            import json

            print(json.dumps(error.as_dict(), default=str))
        sys.stdout.flush()
    except OSError:
        _drop_streams()
    return error.exit_code


def _open_streams() -> None:
    """Makes 0, 1 and 2 usable: a closed one is opened on nothing (a model's file must not become stdout), and no character is unprintable."""
    for number, name, flags in ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_RDONLY), (2, "stderr", os.O_WRONLY)):
        stream: Any = getattr(sys, name)
        if stream is None:  # stdout is opened for reading: a write fails, and is reported
            number_now = os.open(os.devnull, flags)
            if number_now != number:
                os.dup2(number_now, number)
                os.close(number_now)
            setattr(sys, name, io.TextIOWrapper(io.FileIO(number, "r" if number == 0 else "w", closefd=False), encoding="utf-8"))
        elif number:
            stream.reconfigure(errors="backslashreplace")


def _drop_streams() -> None:
    """Nobody reads any more: keeps the interpreter from complaining when it flushes at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(null, stream.fileno())
    os.close(null)
