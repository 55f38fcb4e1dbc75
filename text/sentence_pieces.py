"""Merging with a SentencePiece vocabulary by our own loop (`_pieces.pyx`), which needs the pieces and their scores alone. The `tokenizers` library
wants every merge spelt out and keeps three tables of them: for the 262,144 pieces of Gemma 70 MB and half a second, where this takes 7 MB and
30 ms. All other vocabularies are merged by the library. Used by `vocabulary.py` and `tokenizer.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np

from fastllm.core.errors import InvalidRequest

from ._pieces import PieceTable
from .pieces import Pieces

__all__ = ["Encoded", "SentencePieces"]


class Encoded:
    """What a text became. ids: its tokens; offsets: (first character, one behind the last) of each."""

    def __init__(self, text: str, ids: bytes, starts: bytes, sizes: bytes):
        self._text, self._starts, self._sizes = text, starts, sizes
        self.ids: list[int] = np.frombuffer(ids, np.int32).tolist()

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """In characters; a token that is a part of one has all of it."""
        raw = np.frombuffer(self._text.encode(), np.uint8)
        begun = np.cumsum((raw & 0xC0) != 0x80)  # [bytes]: characters that have begun there
        starts, sizes = np.frombuffer(self._starts, np.int32), np.frombuffer(self._sizes, np.int32)
        return list(zip((begun[starts] - 1).tolist(), begun[starts + sizes - 1].tolist(), strict=True))


class SentencePieces:
    """Text → ids. places: int32 [pieces], the place by score of each piece that takes part in merging, -1 for others. byte_pieces: int32 [256], the
    piece that stands for each byte, with which characters without a piece are written, or -1 throughout. unknown: the token for what has none.
    normalize: what becomes of a text first. doubled: two numbers that have the same piece, or None: such a vocabulary cannot be used.
    """

    def __init__(self, pieces: Sequence[str], places: np.ndarray, byte_pieces: np.ndarray, unknown: int | None):
        self.pieces = Pieces(pieces)
        self._table = PieceTable(self.pieces.block, self.pieces.ends, places, byte_pieces, -1 if unknown is None else unknown, os.urandom(16))
        self.doubled = self._table.doubled
        self.normalize: Callable[[str], str] = escape_blanks

    def normalized_by(self, normalize: Callable[[str], str]) -> SentencePieces:
        """The same pieces behind another preparation of text."""
        other = object.__new__(SentencePieces)
        other.__dict__.update(self.__dict__, normalize=normalize)
        return other

    def __contains__(self, piece: str) -> bool:
        return self._table.find(piece) >= 0

    def __getitem__(self, piece: str) -> int:
        found = self._table.find(piece)
        if found < 0:
            raise KeyError(piece)
        return found

    def encode(self, text: str, *, add_special_tokens: bool = False) -> Encoded:
        """Ids of a text that is normalized; nothing is added. Raises InvalidRequest for more than a GiB."""
        try:
            return Encoded(text, *self._table.encode(text))
        except ValueError as error:
            raise InvalidRequest(f"the text cannot be encoded: {error}", who="prompt", fix="send less") from None


def escape_blanks(text: str) -> str:
    """As SentencePiece writes blanks."""
    return text.replace(" ", "▁")
