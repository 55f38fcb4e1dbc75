"""A call region while it arrives: how the readers of `forms` look at text that is not all there, and how calls leave.

A reader is a generator: it takes text through the methods here, which wait (yield) until there is enough, and tells of a call by
`begin`, `arguments` and `end`. So a region is read once, whatever pieces it comes in. `ValueError` means: this is no call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from .json_values import JsonEnd

__all__ = ["CallPiece", "Reader", "Region", "Tools", "loads"]

Tools = Mapping[str, Any]
"""Name of a tool -> JSON schema of its parameters."""

MAX_NAME: Final = 200
_BLANK: Final = re.compile(r"\s*")
_NAME: Final = re.compile(r"[\w.:/-]+")
MAX_BLANK: Final = 8  # characters between two parts of a call that a grammar holds: what the grammar allows


@dataclass(frozen=True)
class CallPiece:
    """A piece of a call. index: 0, 1, … in order of the answer; name: of the function, with the first piece, else ""; arguments: JSON text, of
    which all pieces together are one object; complete: the last piece."""

    index: int
    name: str = ""
    arguments: str = ""
    complete: bool = False


Wait = Generator[None, None, None]
Reader = Callable[["Region"], Wait]


class Region:
    """One region. tools: those that may be called; none: any. first: index of its first call. stream: a grammar holds the call, so that pieces may
    leave as they come, and a text that the grammar does not allow is no call; else calls leave when the region is read and valid.

    done: it has been read; `rest` is not part of it. unread: text that is no part of what has left.
    """

    def __init__(self, read: Reader, tools: Tools, *, first: int = 0, stream: bool = False):
        self.tools, self.stream, self.index = tools, stream, first
        self.num_ended = 0
        self.final = self.done = self.open = False
        self._text, self._at = "", 0
        self._seen: list[str] = []  # since something has left
        self._held: list[CallPiece] = []
        self._out: list[CallPiece] = []
        self._begun: str | None = None
        self._pairs = 0
        self._steps = read(self)

    # the parser's side ------------------------------------------------------------------------------------------------

    def feed(self, text: str, *, final: bool = False) -> list[CallPiece]:
        """More text; gives pieces that are certain. final: it is the last. Raises ValueError if there is no call, or none that goes on; what
        has left before stays."""
        self._text, self._at = self._text[self._at :] + text, 0
        self._seen.append(text)
        self.final = final
        try:
            next(self._steps)
            if final:
                raise ValueError("the region is cut")
        except StopIteration:
            self.done = True
            self._release(self._held)
        return self.take()

    def take(self) -> list[CallPiece]:
        """Pieces that have left and were not taken yet."""
        out, self._out = self._out, []
        return out

    @property
    def rest(self) -> str:
        """Text behind the region."""
        return self._text[self._at :]

    @property
    def unread(self) -> str:
        """All text since a piece has left."""
        return "".join(self._seen)

    @property
    def pending(self) -> bool:
        """Something of a call is there, and its end is not."""
        return self.open or bool(self.unread.strip())

    # calls ------------------------------------------------------------------------------------------------------------

    def begin(self, name: str) -> None:
        """A call of this function; it leaves with the first of its arguments."""
        if not name or (self.tools and name not in self.tools):
            raise ValueError("no tool has this name")
        self._begun, self._pairs = name, 0

    def arguments(self, text: str) -> None:
        """Text of the arguments."""
        name, self._begun = self._begun or "", None
        self._leave(CallPiece(self.index, name, text))
        self.open = True

    def pair(self, key: str, value: Any) -> None:
        """One argument, where they are written one by one."""
        opening = ", " if self._pairs else "{"
        self._pairs += 1
        self.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}")

    def end_pairs(self) -> None:
        """The last argument was there."""
        self.arguments("}" if self._pairs else "{}")
        self.end()

    def end(self) -> None:
        """The call is complete."""
        self.open = False
        self._leave(CallPiece(self.index, complete=True))
        self.index += 1
        self.num_ended += 1

    def whole(self, name: str, arguments: str) -> None:
        """A whole call."""
        self.begin(name)
        self.arguments(arguments)
        self.end()

    def _leave(self, piece: CallPiece) -> None:
        if self.stream:
            self._release([piece])
        else:
            self._held.append(piece)

    def _release(self, pieces: list[CallPiece]) -> None:
        self._out += pieces
        self._held = []
        if pieces:
            self._seen = [self._text[self._at :]]

    # the reader's side ------------------------------------------------------------------------------------------------

    def more(self) -> Generator[None, None, bool]:
        """Waits for text. False: there is none any more."""
        size = len(self._text) - self._at
        while len(self._text) - self._at == size:
            if self.final:
                return False
            yield
        return True

    def peek(self) -> Generator[None, None, str]:
        """The next character, "" at the end."""
        if self._at == len(self._text):
            yield from self.more()
        return self._text[self._at : self._at + 1]

    def blank(self) -> Wait:
        """Skips white space."""
        size = 0
        while True:
            found = _BLANK.match(self._text, self._at)
            end = found.end() if found else self._at
            size, self._at = size + end - self._at, end
            if self.stream and size > MAX_BLANK:
                raise ValueError("too many blanks")
            if self._at < len(self._text) or not (yield from self.more()):
                return

    def maybe(self, literal: str) -> Generator[None, None, bool]:
        """Takes this text if it comes next."""
        while True:
            piece = self._text[self._at : self._at + len(literal)]
            if piece == literal:
                self._at += len(literal)
                return True
            if not literal.startswith(piece) or not (yield from self.more()):
                return False

    def literal(self, literal: str) -> Wait:
        """Takes this text, which must come next."""
        if not (yield from self.maybe(literal)):
            raise ValueError(f"{literal!r} is missing")

    def name(self) -> Generator[None, None, str]:
        """Letters, digits and signs of a name."""
        taken = ""
        while True:
            found = _NAME.match(self._text, self._at)
            if found is not None:
                taken += found[0]
                self._at = found.end()
            if len(taken) > MAX_NAME:
                raise ValueError("no name of a tool")
            if self._at < len(self._text) or not (yield from self.more()):
                if not taken:
                    raise ValueError("no name of a tool")
                return taken

    def until(self, stop: str, limit: int | None = None) -> Generator[None, None, str]:
        """Text up to this one, which is taken, too. limit: of characters."""
        parts: list[str] = []
        size = 0
        while True:
            at = self._text.find(stop, self._at)
            keep = at if at >= 0 else max(len(self._text) - len(stop) + 1, self._at)
            parts.append(self._text[self._at : keep])
            size += keep - self._at
            self._at = keep
            if limit is not None and size > limit:
                raise ValueError(f"{stop!r} is missing")
            if at >= 0:
                self._at += len(stop)
                return "".join(parts)
            if not (yield from self.more()):
                raise ValueError(f"{stop!r} is missing")

    def value(self, scan: Any = None) -> Generator[None, None, str]:
        """The JSON object or array that comes next, as text; `scan` may be another kind of brackets."""
        scan = scan or JsonEnd()
        parts: list[str] = []
        while True:
            end = scan.feed(self._text, self._at)
            parts.append(self._text[self._at : end])
            self._at = len(self._text) if end is None else end
            if end is not None:
                return "".join(parts)
            if not (yield from self.more()):
                raise ValueError("a value is cut")

    def object(self) -> Wait:
        """The JSON object of a call's arguments."""
        if (yield from self.peek()) != "{":
            raise ValueError("arguments are no object")
        if not self.stream:
            self.arguments(_arguments(loads((yield from self.value()))))
            return
        scan = JsonEnd()
        while True:
            end = scan.feed(self._text, self._at)
            start, self._at = self._at, len(self._text) if end is None else end
            if self._at > start:
                self.arguments(self._text[start : self._at])
            if end is not None:
                return
            if not (yield from self.more()):
                raise ValueError("arguments are cut")

    def string(self) -> Generator[None, None, str]:
        """A JSON string, as short as a name."""
        yield from self.literal('"')
        text = ""
        while True:
            text += yield from self.until('"', MAX_NAME)
            if (len(text) - len(text.rstrip("\\"))) % 2 == 0:
                return str(loads(f'"{text}"'))
            text += '"'

    def named(self, keys: tuple[str, ...] = ("arguments", "parameters"), *, bare: bool = False) -> Wait:
        """A call as an object with its name and its arguments. One that a grammar holds has them in this order, and the arguments leave as they
        come; else it is read as a whole. bare: no marker says that it is a call, so it must have arguments."""
        if (yield from self.peek()) != "{":
            raise ValueError("no object")
        if self.stream:
            yield from self._head(keys)
            yield from self.object()
            yield from self.value(JsonEnd("}"))  # what else the object has
            self.end()
            return
        value = loads((yield from self.value()))
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            raise ValueError("a call without a name")
        if bare and not any(key in value for key in keys):
            raise ValueError("a call without arguments")
        self.whole(value["name"], _arguments(next((value[k] for k in keys if k in value), {})))

    def _head(self, keys: tuple[str, ...]) -> Wait:
        """Up to the arguments. What is none fails at its first character that differs, so a JSON answer is not held back."""
        for literal in ("{", '"name"', ":"):
            yield from self.literal(literal)
            yield from self.blank()
        name = yield from self.string()
        yield from self.blank()
        yield from self.literal(",")
        yield from self.blank()
        if (yield from self.string()) not in keys:
            raise ValueError("a call without arguments")
        yield from self.blank()
        yield from self.literal(":")
        yield from self.blank()
        self.begin(name)

    def list(self) -> Wait:
        """A JSON list of such calls."""
        yield from self.literal("[")
        while True:
            yield from self.blank()
            yield from self.named()
            yield from self.blank()
            if (yield from self.maybe("]")):
                return
            yield from self.literal(",")


def loads(text: str) -> Any:
    """JSON without NaN and infinities, which are no JSON. Raises ValueError."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no JSON")

    value = json.loads(text, parse_constant=refuse)
    json.dumps(value, allow_nan=False)  # 1e999
    return value


def _arguments(value: Any) -> str:
    """Arguments as JSON text; some models write them as a string that holds JSON."""
    if isinstance(value, str):
        value = loads(value) if value.strip() else {}
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise ValueError("arguments are no object")
    return json.dumps(value, ensure_ascii=False)
