"""Stop texts: where the first one is in a text that arrives in pieces.

`StopFinder` looks at plain text. `AnswerStops` looks at the answer only: a stop text inside of reasoning or of a tool call is none, for
JSON that is cut helps no one. Both hold back what may become a stop text, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from .output import Delta, OutputParser

__all__ = ["AnswerStops", "StopFinder"]


class StopFinder:
    """stopped: the stop text that was found first, or None. behind: characters from its beginning to the end of what was pushed."""

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(dict.fromkeys(stops))
        self._first = frozenset(text[0] for text in self._stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.stopped: str | None = None
        self.behind = 0

    @property
    def num_held(self) -> int:
        """Characters that may be the beginning of a stop text."""
        return len(self._held)

    def push(self, new: str, *, final: bool = False) -> str:
        """More text; returns what is certain, up to the stop text. final: nothing can follow that belongs to it."""
        if not self._stops:
            return new
        text = self._held + new
        found = self._find(text, len(self._held))
        if found is not None:
            start, self.stopped = found
            self._held, self.behind = "", len(text) - start
            return text[:start]
        keep = len(text) if final else self._hold_from(text)
        self._held = text[keep:]
        return text[:keep]

    def _find(self, text: str, old: int) -> tuple[int, str] | None:
        """The stop that is complete first, and of those the one that begins first: (where it begins, stop)."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _hold_from(self, text: str) -> int:
        """Where the text begins to be a possible beginning of a stop; its length if nowhere."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first:
                tail = text[start:]
                if any(stop.startswith(tail) for stop in self._stops):
                    return start
        return len(text)


class AnswerStops:
    """Stop texts of an answer with parts. Its parser only says what is content; the text itself leaves as it came, with its markers, so that
    whoever reads it next sees what a model without stop texts would have written up to there.

    parser: one of its own, which has seen nothing yet. stopped: the stop text that was found, or None.
    """

    def __init__(self, parser: OutputParser, stops: Sequence[str]):
        self._parser, self._finder = parser, StopFinder(stops)
        self._text = ""  # not handed out yet

    @property
    def stopped(self) -> str | None:
        """The stop text that was found."""
        return self._finder.stopped

    @property
    def in_answer(self) -> bool:
        """What comes next is neither reasoning nor part of a call."""
        return not self._parser.in_reasoning and not self._parser.in_call

    def push(self, text: str) -> str:
        """More text; returns what is certain: neither a part of a marker, nor of a call that may be none, nor of a stop text."""
        for character in text:  # one by one: where a stop text begins is counted from the end of what the parser gave
            self._text += character
            if self._look(self._parser.feed(character)):
                return self._release(self._finder.behind)
        return self._release(self._finder.num_held)

    def finish(self) -> str:
        """The answer has ended: the rest, up to a stop text that is certain only now."""
        self._look(self._parser.finish())
        return self._release(self._finder.behind)

    def _look(self, deltas: list[Delta]) -> bool:
        """Looks for stop texts in what became certain."""
        for number, delta in enumerate(deltas):
            self._finder.push(delta.content, final=not delta.content)
            if self.stopped is not None:
                self._finder.behind += sum(len(later.content) for later in deltas[number + 1 :])
                return True
        return False

    def _release(self, keep: int) -> str:
        """All but these characters, and those that the parser itself waits with."""
        end = len(self._text) - keep - self._parser.num_pending
        ready, self._text = self._text[:end], self._text[end:]
        return ready
