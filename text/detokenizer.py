"""Streaming text out of token ids: only what can no longer change leaves.

A token may end in the middle of a character, and text may be the beginning of a stop string; both are held back. The pieces
together equal `Tokenizer.decode` of all ids up to the stop, however the ids arrive. Token bytes are used as they are: what
follows a prompt keeps its leading blank, as the reference does when it continues a text. One object per sequence, used by
the engine's front ends.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from fastllm.core.errors import InvalidRequest

from .tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer"]


class IncrementalDetokenizer:
    """Decoder of one sequence. stopped: the stop string that ended it, or None while none has.

    stop: strings that end the text and are not part of it; one that is exactly a special token also stops at its id, which
    would else decode to nothing. skip_special: special tokens give no text; keep: ids of those that do all the same (markers that
    somebody reads).
    """

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), skip_special: bool = True, keep: Collection[int] = ()):
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise InvalidRequest("stop must be a list of non-empty texts.", who="stop")
        self._tokenizer, self._skip_special, self._keep = tokenizer, skip_special, frozenset(keep)
        self._stops = tuple(dict.fromkeys(stop))
        self._first = frozenset(text[0] for text in self._stops)
        self._longest = max(map(len, self._stops), default=0)
        ids = ((tokenizer.piece_to_id(text), text) for text in self._stops)
        self._stop_ids = {index: text for index, text in ids if index is not None and index in tokenizer.special_ids}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped: str | None = None

    def push(self, token_id: int) -> str:
        """Take one more token and return the text that is now certain; empty once stopped."""
        if self.stopped is not None:
            return ""
        if token_id in self._stop_ids:
            text = self.finish()
            self.stopped = self.stopped or self._stop_ids[token_id]
            return text
        data = self._tokenizer.decode_bytes(token_id, skip_special=self._skip_special and token_id not in self._keep)
        return self._release(self._utf8.decode(data), final=False)

    def finish(self) -> str:
        """The sequence has ended: return what was held back; bytes of an unfinished character become one U+FFFD."""
        if self.stopped is not None:
            return ""
        return self._release(self._utf8.decode(b"", final=True), final=True)

    def _release(self, new: str, final: bool) -> str:
        if not self._stops:
            return new
        text = self._held + new
        found = self._find(text, len(self._held))
        if found is not None:
            start, self.stopped = found
            self._held = ""
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
