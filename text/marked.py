"""Strings that remember, character by character, whether the template or a client wrote them, and what they cost.

A chat template mixes its own markers (`<|im_start|>`) with text from clients. Only the former may become special tokens, and
once both are one string nobody can tell them apart: hence `Marked`, a str with one mark per character that survives joining,
slicing, trimming, splitting and replacing. Whatever loses track yields marks of 0, "not from the template", which is the
safe side. `Budget` bounds one rendering: steps, seconds, and memory, counted as strings are made and freed. Used by
`sandbox.py` and `template.py`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

__all__ = ["Budget", "LimitReached", "Marked", "concat", "current_budget", "from_template"]


class LimitReached(Exception):
    """A rendering that exceeds its budget; becomes a TemplateError. Holds what was exceeded and the limit."""


class Budget:
    """Limits of one rendering. Counts steps (loop turns, calls, operations) and the memory of strings alive."""

    def __init__(self, *, steps: int, seconds: float, chars: int, memory_bytes: int):
        self.steps_left, self.max_steps = steps, steps
        self.seconds, self.deadline = seconds, time.monotonic() + seconds
        self.chars, self.memory_bytes, self.used_bytes = chars, memory_bytes, 0
        self.inputs: dict[int, int] = {}  # id of a container the caller passed in → its weight

    def tick(self, steps: int = 1) -> None:
        """Count steps and look at the clock."""
        self.steps_left -= steps
        if self.steps_left < 0:
            raise LimitReached(f"it takes more than {self.max_steps:,} steps")
        if time.monotonic() > self.deadline:
            raise LimitReached(f"it takes longer than {self.seconds:g} s")

    def fits(self, chars: int) -> None:
        """Refuse a string of so many characters before it is made."""
        if chars > self.chars:
            raise LimitReached(f"it makes a text of {chars:,} characters, the limit is {self.chars:,}")

    def charge(self, size_bytes: int) -> None:
        """Add the memory of a new string."""
        self.used_bytes += size_bytes
        if self.used_bytes > self.memory_bytes:
            raise LimitReached(f"it holds more than {self.memory_bytes >> 20} MiB of text")

    @contextmanager
    def running(self) -> Iterator[Budget]:
        """Make this the budget of everything done inside."""
        token = _CURRENT.set(self)
        try:
            yield self
        finally:
            _CURRENT.reset(token)


_CURRENT: ContextVar[Budget | None] = ContextVar("template_budget", default=None)
_UNBOUND = Budget(steps=1 << 60, seconds=1e9, chars=1 << 40, memory_bytes=1 << 60)


def current_budget() -> Budget:
    """The budget of the rendering in progress."""
    return _CURRENT.get() or _UNBOUND


def _marks(text: str) -> bytes:
    return text._marks if isinstance(text, Marked) else bytes(len(text))


class Marked(str):
    """A str with one mark per character: 1 written by the template, 0 by anybody else (the default)."""

    __slots__ = ("_budget", "_cost", "_marks")
    _marks: bytes
    _budget: Budget
    _cost: int

    def __new__(cls, text: str, marks: bytes | None = None) -> Marked:
        budget = current_budget()
        budget.fits(len(text))
        self = super().__new__(cls, text)
        self._marks = bytes(len(text)) if marks is None else marks
        self._budget = budget
        self._cost = 0
        cost = len(text) * (2 if text.isascii() else 5) + 160
        budget.charge(cost)
        self._cost = cost
        return self

    def __del__(self) -> None:
        self._budget.used_bytes -= self._cost

    def __str__(self) -> str:
        return self

    def __getitem__(self, key: Any) -> Marked:
        if isinstance(key, slice):
            return Marked(str.__getitem__(self, key), self._marks[key])
        character = str.__getitem__(self, key)
        return Marked(character, bytes([self._marks[key]]))

    def _cut(self, start: int, end: int) -> Marked:
        return Marked(str.__getitem__(self, slice(start, end)), self._marks[start:end])

    def __add__(self, other: str) -> Marked:
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> Marked:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: Any) -> Marked:
        if not isinstance(times, int):
            return NotImplemented
        current_budget().fits(len(self) * max(times, 0))
        return Marked(str.__mul__(self, times), self._marks * times)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> Marked:
        return self._fill(r"%s", values if isinstance(values, tuple) else (values,))

    def _fill(self, hole: str, values: Sequence[Any]) -> Marked:
        """Put values into holes (`%s` or `{}`), marks kept. Raises ValueError where the text has other directives."""
        pieces, at = [], 0
        holes = [match.span() for match in re.finditer(re.escape(hole), self)]
        for start, end in holes:
            pieces.append(self._cut(at, start))
            at = end
        pieces.append(self._cut(at, len(self)))
        if len(holes) != len(values) or any(character in piece for piece in pieces for character in ("%" if hole == "%s" else "{}")):
            raise ValueError("not only plain holes")
        filled: list[str] = [pieces[0]]
        for value, piece in zip(values, pieces[1:], strict=True):
            filled += [value if isinstance(value, str) else str(value), piece]
        return concat(filled)

    def strip(self, chars: str | None = None) -> Marked:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> Marked:
        return self._cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None) -> Marked:
        return self._cut(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str) -> Marked:
        return self._cut(len(prefix), len(self)) if self.startswith(prefix) else self

    def removesuffix(self, suffix: str) -> Marked:
        return self._cut(0, len(self) - len(suffix)) if suffix and self.endswith(suffix) else self

    def _locate(self, pieces: Sequence[str]) -> list[Marked]:
        """The same pieces with their marks; they occur in the text in this order."""
        current_budget().tick(len(pieces))
        found, at = [], 0
        for piece in pieces:
            at = self.find(piece, at)
            found.append(self._cut(at, at + len(piece)))
            at += len(piece)
        return found

    def _between(self, pieces: Sequence[str], separator: str) -> list[Marked]:
        current_budget().tick(len(pieces))
        found, at = [], 0
        for piece in pieces:
            found.append(self._cut(at, at + len(piece)))
            at += len(piece) + len(separator)
        return found

    def split(self, sep: str | None = None, maxsplit: int = -1) -> list[Marked]:  # type: ignore[override]
        pieces = str.split(self, sep, maxsplit)
        return self._locate(pieces) if sep is None else self._between(pieces, sep)

    def rsplit(self, sep: str | None = None, maxsplit: int = -1) -> list[Marked]:  # type: ignore[override]
        pieces = str.rsplit(self, sep, maxsplit)
        return self._locate(pieces) if sep is None else self._between(pieces, sep)

    def splitlines(self, keepends: bool = False) -> list[Marked]:  # type: ignore[override]
        current_budget().tick(self.count("\n") + 1)
        lines = self._between(str.splitlines(self, True), "")
        return lines if keepends else [line._cut(0, len("".join(str.splitlines(line)))) for line in lines]

    def partition(self, sep: str) -> tuple[Marked, Marked, Marked]:
        first, middle, last = self._between(str.partition(self, sep), "")
        return first, middle, last

    def rpartition(self, sep: str) -> tuple[Marked, Marked, Marked]:
        first, middle, last = self._between(str.rpartition(self, sep), "")
        return first, middle, last

    def replace(self, old: str, new: str, count: int = -1) -> Marked:  # type: ignore[override]
        budget, found = current_budget(), str.count(self, old)
        found = found if count < 0 else min(found, count)
        budget.fits(len(self) + found * (len(new) - len(old)))
        budget.tick(1 + found // 64)
        if not old:
            return Marked(str.replace(self, old, new, count))
        pieces: list[str] = []
        at = 0
        for _ in range(found):
            start = self.find(old, at)
            pieces += [self._cut(at, start), new]
            at = start + len(old)
        return concat([*pieces, self._cut(at, len(self))])

    def _same_place(self, text: str) -> Marked:
        return Marked(text, self._marks if len(text) == len(self) else None)

    def lower(self) -> Marked:
        return self._same_place(str.lower(self))

    def upper(self) -> Marked:
        return self._same_place(str.upper(self))

    def title(self) -> Marked:
        return self._same_place(str.title(self))

    def capitalize(self) -> Marked:
        return self._same_place(str.capitalize(self))

    def casefold(self) -> Marked:
        return self._same_place(str.casefold(self))

    def swapcase(self) -> Marked:
        return self._same_place(str.swapcase(self))

    def join(self, items: Iterable[str]) -> Marked:
        budget = current_budget()
        pieces: list[str] = []
        total = 0
        for item in items:
            if not isinstance(item, str):
                raise TypeError(f"join: expected a text, found {type(item).__name__}")
            pieces += [self, item] if pieces else [item]
            total += len(item) + len(self)
            budget.fits(total - len(self))
        return concat(pieces)

    def center(self, width: int, fill: str = " ") -> Marked:  # type: ignore[override]
        current_budget().fits(width)
        return Marked(str.center(self, width, fill))

    def ljust(self, width: int, fill: str = " ") -> Marked:  # type: ignore[override]
        current_budget().fits(width)
        return Marked(str.ljust(self, width, fill))

    def rjust(self, width: int, fill: str = " ") -> Marked:  # type: ignore[override]
        current_budget().fits(width)
        return Marked(str.rjust(self, width, fill))

    def zfill(self, width: int) -> Marked:  # type: ignore[override]
        current_budget().fits(width)
        return Marked(str.zfill(self, width))

    def expandtabs(self, tabsize: int = 8) -> Marked:  # type: ignore[override]
        current_budget().fits(len(self) + str.count(self, "\t") * max(int(tabsize), 0))
        return Marked(str.expandtabs(self, tabsize))


def concat(items: Iterable[str]) -> Marked:
    """Join texts, marks and all. The length is checked before the text is made."""
    pieces = items if isinstance(items, (list, tuple)) else list(items)
    current_budget().fits(sum(map(len, pieces)))
    return Marked("".join(pieces), b"".join(map(_marks, pieces)))


def from_template(text: str) -> Marked:
    """A text the template (or the model's own configuration) wrote: special tokens in it are meant."""
    return Marked(text, b"\1" * len(text))
