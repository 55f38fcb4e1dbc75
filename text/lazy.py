"""Constraints that begin in the middle of an answer: behind a text (`After`), or where the answer opens a tool call (`Lazy`).

Both are `fastllm.core.request.TokenConstraint`s, used by the engine's thread alone. Outside of their grammar they give no mask, and cost a look at
the last bytes. Made by `GrammarCompiler`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np

    from .grammar import Matcher

__all__ = ["After", "CallGrammar", "Lazy"]

MAX_START: Final = 256  # bytes in which a call without a marker must begin


@dataclass(frozen=True)
class CallGrammar:
    """What opens a call (`output.call_grammars.Trigger`), compiled. make: a matcher of what follows."""

    marker: bytes
    keep: int
    pattern: re.Pattern[bytes] | None
    make: Callable[[], Matcher]


class After:
    """A matcher that begins behind a text, for example the end of reasoning; before it, everything may be said."""

    def __init__(self, inner: Matcher, text: bytes, bytes_of: Callable[[int], bytes]):
        self._inner, self._text, self._bytes_of = inner, text, bytes_of
        self._tail, self._begun = b"", False

    def mask(self) -> np.ndarray | None:
        """As `Matcher.mask`; None: everything may be said."""
        return self._inner.mask() if self._begun else None

    def accept(self, token_id: int) -> bool:
        """As `Matcher.accept`."""
        if self._begun:
            return self._inner.accept(token_id)
        self._tail += self._bytes_of(token_id)
        self._begun = self._text in self._tail
        self._tail = self._tail[-len(self._text) :]
        return False


class Lazy:
    """Free text; but a call that the answer opens is held to its grammar, from its marker to its end.

    calls: what opens one. reasoning: (opening, closing) of text in which markers mean nothing. in_reasoning: the answer starts there. one: the
    end of the first call ends the answer. encode: bytes -> ids of some tokens with these bytes.
    """

    def __init__(
        self,
        calls: Sequence[CallGrammar],
        reasoning: tuple[bytes, bytes] | None,
        in_reasoning: bool,
        one: bool,
        bytes_of: Callable[[int], bytes],
        encode: Callable[[bytes], list[int]],
    ):
        self._calls = [call for call in calls if call.pattern is None]
        self._at_start = [call for call in calls if call.pattern is not None]
        self._reasoning, self._thinks, self._one = reasoning, in_reasoning, one
        self._bytes_of, self._encode = bytes_of, encode
        self._text = b""  # not looked at yet, or what may be the beginning of a marker
        self._matcher: Matcher | None = None
        markers = [call.marker for call in self._calls] + ([] if reasoning is None else list(reasoning))
        self._longest = max(map(len, markers), default=1)

    def mask(self) -> np.ndarray | None:
        """As `Matcher.mask`; None: everything may be said."""
        return None if self._matcher is None else self._matcher.mask()

    def accept(self, token_id: int) -> bool:
        """As `Matcher.accept`."""
        if self._matcher is not None:
            return self._matcher.accept(token_id) and self._leave()
        self._text += self._bytes_of(token_id)
        while self._look():
            if self._matcher is not None:
                return self._matcher.complete and self._leave()
        return False

    def _leave(self) -> bool:
        self._matcher, self._text = None, b""
        return self._one

    def _look(self) -> bool:
        """One move through the text; False: more of it is needed."""
        if self._thinks and self._reasoning is not None:
            return self._skip_to(self._reasoning[1], False)
        if self._at_start:
            text = self._text.lstrip()
            for call in self._at_start:
                assert call.pattern is not None
                if call.pattern.match(text):
                    self._at_start = []
                    return self._open(call, text)
            if not text or (len(text) < MAX_START and any(text.startswith(call.marker) for call in self._at_start)):
                return False
            if not (self._reasoning and self._reasoning[0].startswith(text[: len(self._reasoning[0])])):
                self._at_start = []
        found = min(((at, -len(call.marker), n) for n, call in enumerate(self._calls) if (at := self._text.find(call.marker)) >= 0), default=None)
        if self._reasoning is not None:
            at = self._text.find(self._reasoning[0])
            if at >= 0 and (found is None or at < found[0]):
                return self._skip_to(self._reasoning[0], True)
        if found is None:
            self._text = self._text[-self._longest :]
            return False
        call, self._at_start = self._calls[found[2]], []
        end = found[0] + len(call.marker)
        rest, self._text = self._text[end - call.keep :], self._text[found[0] + 1 :]
        return self._open(call, rest)

    def _skip_to(self, marker: bytes, thinks: bool) -> bool:
        at = self._text.find(marker)
        if at < 0:
            self._text = self._text[-self._longest :]
            return False
        self._text, self._thinks = self._text[at + len(marker) :], thinks
        return True

    def _open(self, call: CallGrammar, begun: bytes) -> bool:
        """Holds the answer to the call that it has begun; if that is none of this grammar, it is text."""
        matcher = call.make()
        if not begun or matcher.feed(self._encode(begun)):
            self._matcher = matcher
        return True
