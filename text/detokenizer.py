"""Streaming text out of token ids: only what can no longer change leaves.

A token may end in the middle of a character, and text may be the beginning of a stop string; both are held back. The pieces
together equal `Tokenizer.decode` of all ids up to the stop, however the ids arrive. Token bytes are used as they are: what
follows a prompt keeps its leading blank, as the reference does when it continues a text. One object per sequence, used by
the engine's front ends.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence

from fastllm.core.errors import InvalidRequest

from .stops import StopFinder
from .tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "special_stops"]


class IncrementalDetokenizer:
    """Decoder of one sequence. stopped: the stop string that ended it, or None while none has.

    stop: strings that end the text and are not part of it; one that is exactly a special token also stops at its id, which
    would else decode to nothing. skip_special: special tokens give no text; keep: ids of those that do all the same (markers that
    somebody reads).
    """

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), skip_special: bool = True, keep: Collection[int] = ()):
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise InvalidRequest("stop must be a list of non-empty texts.", who="stop")
        self._tokenizer = tokenizer
        hidden = tokenizer.special_ids if skip_special else frozenset()
        self._hidden = hidden.difference(keep) if keep else hidden  # ids without text
        self._finder = StopFinder(stop)
        self._stop_ids = special_stops(tokenizer, stop)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.stopped: str | None = None

    def push(self, token_id: int) -> str:
        """Take one more token and return the text that is now certain; empty once stopped."""
        if self.stopped is not None:
            return ""
        if token_id in self._stop_ids:
            text = self.finish()
            self.stopped = self.stopped or self._stop_ids[token_id]
            return text
        data = self._tokenizer.decode_bytes(token_id, skip_special=token_id in self._hidden)
        return self._release(self._utf8.decode(data), final=False)

    def push_all(self, token_ids: Iterable[int]) -> list[str]:
        """`push` of each, without the empty ones. For an answer without stop texts: none of its tokens ends it."""
        spell, decode, hidden = self._tokenizer.decode_bytes, self._utf8.decode, self._hidden
        return [text for i in token_ids if i not in hidden and (text := decode(spell(i, skip_special=False)))]

    def finish(self) -> str:
        """The sequence has ended: return what was held back; bytes of an unfinished character become one U+FFFD."""
        if self.stopped is not None:
            return ""
        return self._release(self._utf8.decode(b"", final=True), final=True)

    def _release(self, new: str, final: bool) -> str:
        text = self._finder.push(new, final=final)
        self.stopped = self._finder.stopped
        return text


def special_stops(tokenizer: Tokenizer, stops: Sequence[str]) -> dict[int, str]:
    """Ids of the stop texts that are exactly one special token."""
    return {tokenizer.special_texts[text]: text for text in stops if text in tokenizer.special_texts}
