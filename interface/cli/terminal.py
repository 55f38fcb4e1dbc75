"""What the command line writes: answers on stdout, everything else on stderr.

Progress is a bar on a terminal and plain lines elsewhere; with `--progress json` all of stderr is one JSON object a line. Control characters of a model are shown escaped on a terminal, so that
an answer cannot move the cursor or set a title.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import click

__all__ = ["Reporter", "escape_controls", "event", "note", "say", "stats_line", "write_answer"]

SILENT_S = 2.0  # after the start, before lines say how far something else than a download is
LOG = logging.getLogger("fastllm")  # parent of what backends log

_CONTROLS = {i: f"\\x{i:02x}" for i in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(i) not in "\n\t"}
_REORDERING = {i: f"\\u{i:04x}" for i in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}  # text that reads unlike what it is
_SHOWN = _CONTROLS | _REORDERING


def escape_controls(text: str) -> str:
    """Control characters (but newline and tab) and marks that reorder text, as visible escapes."""
    return text.translate(_SHOWN)


def say(text: str) -> None:
    """A text for the user to stderr: escaped, or as an event where the command was called with `--progress json`. Where it cannot be written (a full disk, a
    reader that left), the command goes on without it: what it does and answers is elsewhere."""
    context = click.get_current_context(silent=True)
    if context is not None and context.params.get("progress") == "json":
        event("message", text=text.removeprefix("fastllm: "))
    else:
        _tell(escape_controls(text))


def _tell(line: str) -> None:
    with contextlib.suppress(OSError):
        click.echo(line, err=True)


def note(line: str, values: Mapping[str, Any], fix: str = "run without --strict to accept this") -> None:
    """Tells that something is done differently from what was asked, as the options of a command say: nothing with `--quiet`; with `--strict`
    it is refused. Raises UsageError. `say_note` is the same for who has `LoadOptions`."""
    if values.get("strict"):
        from ..core.errors import UsageError

        raise UsageError(f"--strict: {line}", fix=fix)
    if not values.get("quiet"):
        from .variables import origins

        context = click.get_current_context(silent=True)
        told = "" if context is None else origins(context, line)
        say(f"fastllm: {line}" + (f" ({told})" if told and told not in line else ""))


def event(kind: str, /, **fields: Any) -> None:
    """One line of `--progress json`: {"event": kind, …}, in ASCII. fields: of any names, "kind" among them."""
    _tell(json.dumps({"event": kind, **fields} | {"event": kind}, default=str))


def write_answer(text: str) -> None:
    """A piece of an answer to stdout, at once; escaped on a terminal, byte for byte elsewhere."""
    stream = sys.stdout
    stream.write(escape_controls(text) if stream.isatty() else text)
    stream.flush()


def stats_line(timings: Any, context: int, seed: int | None = None) -> str:
    """`prompt 53 tok @ 210/s · 118 tok @ 14.2/s · ttft 0.25 s · ctx 171/4096`."""
    computed = timings.prompt_tokens - timings.cached_tokens
    cached = f" (+{timings.cached_tokens} cached)" if timings.cached_tokens else ""
    parts = [f"prompt {computed} tok{cached}{_rate(computed, timings.prompt_s)}"]
    parts.append(f"{timings.decode_tokens} tok{_rate(timings.decode_tokens - 1, timings.decode_s)}")
    parts.append(f"ttft {timings.ttft_s:.2f} s")
    parts.append(f"ctx {timings.prompt_tokens + timings.decode_tokens}/{context}")
    if seed is not None:
        parts.append(f"seed {seed}")
    return " · ".join(parts)


def _rate(tokens: int, seconds: float) -> str:
    if tokens <= 0 or seconds <= 0:
        return ""
    rate = tokens / seconds
    return f" @ {rate:.0f}/s" if rate >= 100 else f" @ {rate:.1f}/s"


class _Events(logging.Handler):
    """What backends log, as events of `--progress json`."""

    def emit(self, record: logging.LogRecord) -> None:
        event("message", text=record.getMessage().removeprefix("fastllm: "))


class Reporter:
    """Progress and messages on stderr. A context manager; quiet: nothing but errors; style: auto (bars on a terminal, lines elsewhere),
    plain (lines) or json (events); still: no progress."""

    def __init__(self, quiet: bool = False, style: str = "auto", still: bool = False):
        self.quiet, self.style, self.still = quiet, style, still
        self._started = time.monotonic()
        self._bar: Any = None
        self._tasks: dict[str, Any] = {}
        self._printed: dict[str, int] = {}
        self._level = LOG.level
        self._events = _Events()

    @classmethod
    def of(cls, values: Mapping[str, Any], silent: bool = False) -> Reporter:
        """As the options of a command say. silent: no progress, unless events were asked for; what is done differently from what was asked is told all the same."""
        return cls(values["quiet"], values["progress"], silent and values["progress"] != "json")

    def __enter__(self) -> Reporter:
        self._level = LOG.level
        if self.quiet:  # lines of backends, which know no reporter
            LOG.setLevel(logging.ERROR)
        if self.style == "json":
            LOG.addHandler(self._events)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        LOG.setLevel(self._level)
        LOG.removeHandler(self._events)
        self.stop()

    def stop(self) -> None:
        """Takes bars off the screen."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            self._tasks.clear()

    def message(self, line: str) -> None:
        """One line on stderr."""
        if self.style == "json" and not self.quiet:
            event("message", text=line)
        elif not self.quiet:
            say(f"fastllm: {line}")

    def licence(self, title: str, text: str) -> None:
        """The terms of a model, before it is fetched the first time."""
        if self.style == "json" and not self.quiet:
            event("licence", title=title, text=text)
        elif not self.quiet:
            self.stop()
            lines = text.strip().splitlines()
            shown = "\n".join(lines[:8] + (["…"] if len(lines) > 8 else []))
            say(f"fastllm: licence of this model: {title}\n{shown}")

    def progress(self, what: str, done: int, total: int | None) -> None:
        """Bytes done of a transfer or a load."""
        if self.quiet or self.still:
            return
        if self.style == "json":
            self._event(what, done, total)
        elif sys.stderr.isatty() and self.style != "plain":
            self._draw(what, done, total)
        else:
            self._line(what, done, total)

    def _draw(self, what: str, done: int, total: int | None) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=total)
        self._bar.update(self._tasks[what], completed=done, total=total)
        if total is not None and done >= total and all(t.finished for t in self._bar.tasks):
            self.stop()

    def _line(self, what: str, done: int, total: int | None) -> None:
        """Without a terminal: one line at each tenth; what is done in a moment, as loading mostly is, is silent."""
        if not what.startswith("download") and time.monotonic() - self._started < SILENT_S:
            return
        if self._next(what, done, total, 10):
            size = f"{done / 1e6:.1f} of {total / 1e6:.1f} MB" if total else f"{done / 1e6:.1f} MB"
            say(f"fastllm: {what}: {size}")

    def _event(self, what: str, done: int, total: int | None) -> None:
        """At each hundredth, and at the end."""
        if self._next(what, done, total, 100):
            kind, _, name = what.partition(" ")
            event("progress", what=kind, **({"name": name} if name else {}), done=done, total=total)

    def _next(self, what: str, done: int, total: int | None, parts: int) -> bool:
        """Whether one more of so many parts is done."""
        part = done * parts // total if total else 0
        if part <= self._printed.get(what, -1):
            return False
        self._printed[what] = part
        return True
