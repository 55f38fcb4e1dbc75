"""The spellings of all tokens in one block of UTF-8: a list of texts takes eight times as much (17 MB for 262,144 pieces). A text is made when it is
asked for. Used by `Tokenizer`, which asks for few.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

__all__ = ["Pieces"]


class Pieces(Sequence[str]):
    """Texts by their number, read-only."""

    def __init__(self, texts: Sequence[str]):
        parts = [text.encode("utf-8", "surrogatepass") for text in texts]
        self._block = b"".join(parts)
        self._ends = np.zeros(len(parts) + 1, np.int64 if len(self._block) >> 31 else np.int32)
        np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts)), out=self._ends[1:])

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        return self._block[self._ends[number] : self._ends[number + 1]].decode("utf-8", "surrogatepass")

    def number(self, text: str) -> int | None:
        """Of the last piece that is this text, or None. Of the pieces that are as long, those with each byte are left: with 262,144 of them up to
        1.4 ms, too much for what is asked for often."""
        part = text.encode("utf-8", "surrogatepass")
        starts, block = self._ends[:-1], np.frombuffer(self._block, np.uint8)
        numbers = np.flatnonzero(np.diff(self._ends) == len(part))
        for place, byte in enumerate(part):
            numbers = numbers[block[starts[numbers] + place] == byte]
        return int(numbers[-1]) if len(numbers) else None
