"""Constraints that begin in the middle of an answer: behind a text (`After`), where it opens a tool call (`Lazy`), where it has reasoned for
long enough (`Budget`), or where it is about to write what it may not (`Banned`).

They are `fastllm.core.request.TokenConstraint`s, used by the engine's thread alone. Outside of their grammar they give no mask, and cost a look at
the last bytes. Made by `GrammarCompiler`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

if TYPE_CHECKING:
    from ._matcher import Matcher

Check = Callable[[Sequence[int]], Sequence[bool] | None] | int

__all__ = ["After", "Banned", "BannedTexts", "Budget", "CallGrammar", "Held", "Lazy"]


@dataclass(frozen=True)
class CallGrammar:
    """What opens a call (`output.call_grammars.Trigger`), compiled. make: a matcher of what follows."""

    marker: bytes
    keep: int
    head: re.Pattern[bytes] | None
    at_start: bool
    make: Callable[[], Matcher]


class Held(Protocol):
    """What one answer is held to (`fastllm.core.request.TokenConstraint`). held: it is inside of a grammar."""

    @property
    def held(self) -> bool:
        """It is inside of a grammar: what is said there is no markup."""

    def mask(self) -> np.ndarray | None:
        """u32 [words], or None: everything may be said."""

    def check(self) -> Check | None:
        """What says of each of some tokens whether it may come (None: ask `mask`), or the only one that may; None: everything may be said."""

    def accept(self, token_id: int) -> bool:
        """Takes a token. True: the answer is complete."""


class After:
    """A matcher that begins behind a text, for example the end of reasoning; before it, everything may be said. opening: the token that opens
    reasoning, if the answer may choose to begin with it, or else begins with the matcher."""

    def __init__(self, inner: Matcher, text: bytes, bytes_of: Callable[[int], bytes], opening: int | None = None):
        self._inner, self._text, self._bytes_of, self._opening = inner, text, bytes_of, opening
        self._tail, self._begun = b"", False

    @property
    def held(self) -> bool:
        """As of `Held`."""
        return self._begun

    def mask(self) -> np.ndarray | None:
        """As `Matcher.mask`; None: everything may be said."""
        if self._opening is not None:
            mask = self._inner.mask().copy()
            mask[self._opening // 32] |= np.uint32(1 << self._opening % 32)
            return mask
        return self._inner.mask() if self._begun else None

    def check(self) -> Check | None:
        """As of `Held`."""
        if self._opening is not None:
            return _by_mask
        return self._inner.check() if self._begun else None

    def accept(self, token_id: int) -> bool:
        """As `Matcher.accept`."""
        if self._opening is not None:
            self._begun, self._opening = token_id != self._opening, None
            return self._begun and self._inner.accept(token_id)
        if self._begun:
            return self._inner.accept(token_id)
        self._tail += self._bytes_of(token_id)
        self._begun = self._text in self._tail
        self._tail = self._tail[-len(self._text) :]
        return False


class Budget:
    """The reasoning that an answer starts with, of at most so many tokens: then its closing marker must come. What reasons later is text, and so
    are markers inside of what `inner` holds. inner: what else holds the answer. closing_ids: the tokens that write the marker. thinks: the
    answer starts in reasoning; else it may open it, with nothing but blanks before.
    """

    def __init__(
        self,
        inner: Held | None,
        limit: int,
        reasoning: tuple[bytes, bytes],
        closing_ids: Sequence[int],
        thinks: bool,
        bytes_of: Callable[[int], bytes],
        words: int,
    ):
        self._inner, self._left, self._opening, self._closing = inner, limit, *reasoning
        self._ids, self._bytes_of, self._words = list(closing_ids), bytes_of, words
        self._state: Literal["start", "reasoning", "over"] = "reasoning" if thinks else "start"
        self._tail = b""
        self._forced = 0  # tokens of the marker that are out

    @property
    def held(self) -> bool:
        """As of `Held`."""
        return self._forces or (self._inner is not None and self._inner.held)

    @property
    def _forces(self) -> bool:
        return self._state == "reasoning" and self._left <= 0

    def mask(self) -> np.ndarray | None:
        """As `Matcher.mask`; None: everything may be said."""
        if self._forces:
            mask, token = np.zeros(self._words, np.uint32), self._ids[self._forced]
            mask[token // 32] = np.uint32(1 << token % 32)
            return mask
        return None if self._inner is None else self._inner.mask()

    def check(self) -> Check | None:
        """As of `Held`."""
        if self._forces:
            return self._ids[self._forced]
        return None if self._inner is None else self._inner.check()

    def accept(self, token_id: int) -> bool:
        """As `Matcher.accept`."""
        done = self._inner is not None and self._inner.accept(token_id)
        if self._forces:
            self._forced += 1
            if self._forced == len(self._ids):
                self._state = "over"
        elif self._state != "over":
            self._look(token_id)
        return done

    def _look(self, token_id: int) -> None:
        if self._inner is not None and self._inner.held:
            self._state = "over"
            return
        self._tail += self._bytes_of(token_id)
        if self._state == "start":
            self._tail = self._tail.lstrip()
            if self._tail.startswith(self._opening):
                self._tail, self._state = self._tail[len(self._opening) :], "reasoning"
            elif not self._opening.startswith(self._tail):
                self._state = "over"
        else:
            self._left -= 1
        if self._state == "reasoning":
            if self._closing in self._tail:
                self._state = "over"
            self._tail = self._tail[-len(self._closing) :]


class BannedTexts:
    """Texts that an answer may not write, for one vocabulary: which tokens would complete one, whatever tokens its beginning is made of.

    tokens: bytes of each token; vocab_size: rows of the logits. `keep[rest]`: u32 [words], without the tokens that begin with this rest of a text; `whole`: without those that have a
    text in them, None: there are none.
    """

    def __init__(self, texts: Sequence[bytes], tokens: Sequence[bytes], vocab_size: int):
        self.texts = tuple(texts)
        self.longest = max(map(len, texts), default=1)
        by_first: dict[int, list[int]] = {}
        for token, raw in enumerate(tokens):
            if raw:
                by_first.setdefault(raw[0], []).append(token)
        rests = {text[at:] for text in texts for at in range(1, len(text))}
        self.keep = {rest: _without([t for t in by_first.get(rest[0], ()) if tokens[t].startswith(rest)], vocab_size) for rest in rests}
        inside = [t for t, raw in enumerate(tokens) if any(text in raw for text in texts)]
        self.whole = _without(inside, vocab_size) if inside else None


def _without(tokens: Sequence[int], vocab_size: int) -> np.ndarray:
    kept = np.zeros((vocab_size + 31) // 32 * 32, bool)
    kept[:vocab_size] = True
    kept[list(tokens)] = False
    return np.packbits(kept, bitorder="little").view(np.uint32)


class Banned:
    """Free text that never has one of some texts in it; where `inner` holds the answer, such a text is none of markup, and may be."""

    def __init__(self, texts: BannedTexts, inner: Held | None, bytes_of: Callable[[int], bytes]):
        self._texts, self._inner, self._bytes_of = texts, inner, bytes_of
        self._tail = b""

    @property
    def held(self) -> bool:
        """As of `Held`."""
        return self._inner is not None and self._inner.held

    def mask(self) -> np.ndarray | None:
        """As `Matcher.mask`; None: everything may be said."""
        inner = None if self._inner is None else self._inner.mask()
        return self._left() if inner is None else inner

    def check(self) -> Check | None:
        """As of `Held`."""
        inner = None if self._inner is None else self._inner.check()
        if inner is not None:
            return inner
        left = self._left()
        return None if left is None else lambda token_ids: [bool(int(left[t >> 5]) >> (t & 31) & 1) for t in token_ids]

    def _left(self) -> np.ndarray | None:
        mask = self._texts.whole
        for text in self._texts.texts:
            for size in range(1, min(len(text) - 1, len(self._tail)) + 1):
                if self._tail.endswith(text[:size]):
                    keep = self._texts.keep[text[size:]]
                    mask = keep if mask is None else mask & keep
        return mask

    def accept(self, token_id: int) -> bool:
        """As `Matcher.accept`."""
        self._tail = (self._tail + self._bytes_of(token_id))[-self._texts.longest :]
        return self._inner is not None and self._inner.accept(token_id)


class Lazy:
    """Free text; but a call that the answer opens is held to its grammar, from its marker to its end. Where a marker is plain text, it may be
    prose: then the answer is on trial until it has written what only a call has, and only then is it held.

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
        self._calls = [call for call in calls if not call.at_start]
        self._at_start = [call for call in calls if call.at_start]
        self._reasoning, self._thinks, self._one = reasoning, in_reasoning, one
        self._bytes_of, self._encode = bytes_of, encode
        self._text = b""  # not looked at yet, or what may be the beginning of a marker
        self._matcher: Matcher | None = None
        self._trial: _Trial | None = None
        markers = [call.marker for call in self._calls] + ([] if reasoning is None else list(reasoning))
        self._longest = max(map(len, markers), default=1)

    @property
    def held(self) -> bool:
        """As of `Held`."""
        return self._matcher is not None

    def mask(self) -> np.ndarray | None:
        """As `Matcher.mask`; None: everything may be said."""
        return None if self._matcher is None else self._matcher.mask()

    def check(self) -> Check | None:
        """As of `Held`."""
        return None if self._matcher is None else self._matcher.check()

    def accept(self, token_id: int) -> bool:
        """As `Matcher.accept`."""
        if self._matcher is not None:
            return self._matcher.accept(token_id) and self._leave()
        said = self._bytes_of(token_id)
        self._text += said
        if self._trial is not None:
            self._try([token_id], said)
        while self._matcher is None and self._trial is None and self._look():
            pass
        return self._matcher is not None and self._matcher.complete and self._leave()

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
                if text.startswith(call.marker):
                    self._at_start, self._text = [], text[1:]
                    return self._open(call, text)
            if not text:
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
        """Tries the call that the answer may have begun; if that is none of this grammar, it is text."""
        self._trial = _Trial(call.make(), call.head)
        self._try(self._encode(begun), begun)
        return True

    def _try(self, ids: list[int], said: bytes) -> None:
        trial = self._trial
        assert trial is not None
        trial.said += said
        if ids and not trial.matcher.feed(ids):
            self._trial = None
        elif trial.head is None or trial.matcher.complete or trial.head.search(trial.said):
            self._matcher, self._trial = trial.matcher, None


@dataclass
class _Trial:
    """What may be a call: what follows its marker has the grammar's form. head: the call must have said this to be one; None: it is one."""

    matcher: Matcher
    head: re.Pattern[bytes] | None
    said: bytes = b""


def _by_mask(_token_ids: Sequence[int]) -> None:
    """Of a constraint whose mask is made already."""
