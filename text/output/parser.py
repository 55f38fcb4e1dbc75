"""OutputParser: a model's text, as it is generated, in parts.

    reasoning  ── closing marker ──▶  content  ── call marker ──▶  call region  ── complete ──▶  content
        ▲                                │
        └──────── opening marker ────────┘

Text leaves only when it can no longer change: what may be the start of a marker is held back. Conservation: every character fed comes
out in exactly one of reasoning, content and calls, or is markup; a start of a marker that is none is content, and so is a call region that
turns out to hold no call. Where a grammar holds the calls (`stream`), their arguments leave while they are written, and a call that the
answer's end cuts stays one, without its end; else a call leaves when it is complete, and is content where it is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from .formats import CallFormat
from .reasoning import ReasoningFormat
from .region import CallPiece, Region, Tools

__all__ = ["Delta", "OutputParser"]

MAX_IN_VAIN: Final = 65536  # characters that are read as calls and are none, before no more calls are looked for;
MORE_IN_VAIN: Final = 16  # and so many more for each character of the answer


@dataclass(frozen=True)
class Delta:
    """A piece: exactly one of reasoning, content and call is set. spans: where the content is in the answer's text: (first, end) of characters."""

    reasoning: str = ""
    content: str = ""
    call: CallPiece | None = None
    spans: tuple[tuple[int, int], ...] = field(default=(), compare=False, repr=False)


class OutputParser:
    """One answer. reasoning, calls: the model's formats, None: it has none (its markers are then text). tools: name -> schema of the
    parameters, of all that may be called; none: any. in_reasoning: the prompt ends inside of reasoning. strip: white space around calls
    and after reasoning is markup, not content. stream: a grammar holds the calls. form: another grammar holds what is not a call from its first
    character on, so that markers inside of it are its own text. plain: reasoning is content, as it was written; calls in it are none."""

    def __init__(
        self,
        reasoning: ReasoningFormat | None = None,
        calls: CallFormat | None = None,
        *,
        tools: Tools | None = None,
        in_reasoning: bool = False,
        strip: bool = True,
        stream: bool = False,
        form: bool = False,
        plain: bool = False,
    ):
        self._reasoning, self._calls, self._tools, self._strip, self._stream = reasoning, calls, tools or {}, strip, stream
        self._form, self._plain = form, plain
        self._region: Region | None = None
        self._next = 0  # index of the next call
        self._state = "reasoning" if in_reasoning and reasoning is not None else "content"
        self._text = ""  # not handed out yet
        self._started = False  # content has left, or a call was read: a format without markers cannot begin any more
        self._skip_blank = False  # after a marker
        self._blank = ""  # white space after content, which is markup if a call follows
        self._blank_spans: tuple[tuple[int, int], ...] = ()
        self.num_calls = 0
        self._fed = self._in_vain = 0  # characters of the answer, and of them those of regions that were no call, as often as they were read
        self._calls_end = False

    @property
    def in_reasoning(self) -> bool:
        """What comes next is reasoning."""
        return self._state == "reasoning"

    @property
    def in_call(self) -> bool:
        """A call has begun and is not complete."""
        return self._region is not None and self._region.pending

    @property
    def num_pending(self) -> int:
        """Characters at the end of what was fed of which nothing has been said yet."""
        return len(self._text) + len(self._blank) + (0 if self._region is None else len(self._region.unread))

    @property
    def num_decided(self) -> int:
        """Characters at the beginning of what was fed of which it is known what they are."""
        decided = self._fed - len(self._text) - (0 if self._region is None else len(self._region.unread))
        return min(decided, self._blank_spans[0][0]) if self._blank_spans else decided

    def feed(self, text: str) -> list[Delta]:
        """The next text; returns what can no longer change."""
        self._text += text
        self._fed += len(text)
        out: list[Delta] = []
        while self._advance(out):
            pass
        return out

    def finish(self) -> list[Delta]:
        """The answer has ended: everything that was held back, in order."""
        out: list[Delta] = []
        while self._text or self._region is not None:
            if self._region is not None:
                self._read_call(out, final=True)
            elif self._state == "reasoning" and not self._plain:
                out.append(Delta(reasoning=self._text))
                self._text = ""
            else:
                self._content(out, self._text, self._fed - len(self._text), last=True)
                self._text = ""
            while self._text and self._advance(out):
                pass
        if self._blank:
            self._blank_out(out)
        return _merged(out)

    # states -----------------------------------------------------------------------------------------------------------

    def _advance(self, out: list[Delta]) -> bool:
        """One move; False: more text is needed."""
        if not self._text:
            return False
        if self._region is not None:
            return self._read_call(out)
        if self._state == "reasoning":
            assert self._reasoning is not None
            return self._until([self._reasoning.closing], out)
        return self._until(self._content_markers(), out)

    def _content_markers(self) -> list[str]:
        if self._form and self._started and not self._next:
            return []
        markers = [] if self._reasoning is None else [self._reasoning.opening]
        if self._calls is not None and not self._calls_end:
            bare = [m for m in self._calls.markers if len(m) == 1]
            markers += [*(m for m in self._calls.markers if m not in bare), *self._calls.dropped]
            if self._calls.at_start and not self._started and self._text.lstrip()[:1] in bare:
                markers.append(self._text.lstrip()[0])
        return markers

    def _until(self, markers: Sequence[str], out: list[Delta]) -> bool:
        """Hands out text up to the first marker, and enters it; or all but what may be a marker's start."""
        found = min(((at, -len(m), m) for m in markers if (at := self._text.find(m)) >= 0), default=None)
        start = self._fed - len(self._text)
        if found is None:
            keep = max((_overlap(self._text, m) for m in markers), default=0)
            ready, self._text = self._text[: len(self._text) - keep], self._text[len(self._text) - keep :]
            self._give(ready, out, start)
            return False
        at, _, marker = found
        self._give(self._text[:at], out, start)
        shown = marker if self._plain else ""
        if self._reasoning is not None and self._state == "reasoning":
            self._give(shown, out, start + at)
            self._text, self._state, self._skip_blank = self._text[at + len(marker) :], "content", self._strip and not self._plain
        elif self._reasoning is not None and marker == self._reasoning.opening:
            self._text, self._state = self._text[at + len(marker) :], "reasoning"
            self._give(shown, out, start + at)
        elif self._calls is not None and marker in self._calls.dropped:
            self._text = self._text[at + len(marker) :]
        else:
            assert self._calls is not None
            self._text = self._text[at:]
            self._region = Region(self._calls.read, self._tools, first=self._next, stream=self._stream)
        return True

    def _read_call(self, out: list[Delta], final: bool = False) -> bool:
        """Gives the region all text there is. True: it has ended."""
        region, text = self._region, self._text
        assert region is not None
        self._text = ""
        try:
            pieces = region.feed(text, final=final)
        except (ValueError, TypeError, KeyError, RecursionError):
            self._calls_out(region.take(), out)
            self._region = None
            self._give_up(region, final, out)
            return True
        self._calls_out(pieces, out)
        if region.done:
            self._region, self._text, self._skip_blank = None, region.rest, self._strip
        return region.done

    def _calls_out(self, pieces: list[CallPiece], out: list[Delta]) -> None:
        for piece in pieces:
            self._blank, self._blank_spans = "", ()  # it stood before a call
            self._started = True
            self._next = piece.index + 1
            self.num_calls += piece.complete
            out.append(Delta(call=piece))

    def _give_up(self, region: Region, final: bool, out: list[Delta]) -> None:
        """The region is no call: its first character is content, and what follows is looked at again; but not what waited for an end that
        never came, and not for ever."""
        self._started = True
        text = "" if final and region.open else region.unread
        self._in_vain += len(text) - len(region.rest)
        if self._in_vain > MAX_IN_VAIN + MORE_IN_VAIN * self._fed:
            self._calls_end = True
        if final:
            self._content(out, text, self._fed - len(text))
        elif text:
            self._text = text[1:]
            self._content(out, text[0], self._fed - len(text))

    def _give(self, text: str, out: list[Delta], at: int) -> None:
        if not text:
            return
        if self._state == "reasoning" and not self._plain:
            out.append(Delta(reasoning=text))
        else:
            self._content(out, text, at)

    def _content(self, out: list[Delta], text: str, at: int, last: bool = False) -> None:
        """at: where the text is in the answer."""
        if self._skip_blank:
            end = at + len(text)
            text = text.lstrip()
            if not text:
                return
            at, self._skip_blank = end - len(text), False
        body = text.rstrip() if self._strip and self._calls is not None and not last else text
        middle, end = at + len(body), at + len(text)
        tail = ((middle, end),) if end > middle else ()
        if not body:
            self._blank, self._blank_spans = self._blank + text, self._blank_spans + tail
            return
        spans, self._blank_spans = (*self._blank_spans, (at, middle)), tail
        text, self._blank = self._blank + body, text[len(body) :]
        if text.strip() and self._state == "content":
            self._started = True
        out.append(Delta(content=text, spans=spans))

    def _blank_out(self, out: list[Delta]) -> None:
        out.append(Delta(content=self._blank, spans=self._blank_spans))
        self._blank, self._blank_spans = "", ()


def _overlap(text: str, marker: str) -> int:
    """How many characters at the text's end may be the start of a marker."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def _merged(out: list[Delta]) -> list[Delta]:
    """Neighbours of one kind as one."""
    merged: list[Delta] = []
    for delta in out:
        last = merged[-1] if merged else None
        if last is not None and last.call is None and delta.call is None and bool(last.content) == bool(delta.content):
            merged[-1] = Delta(last.reasoning + delta.reasoning, last.content + delta.content, spans=last.spans + delta.spans)
        else:
            merged.append(delta)
    return merged
