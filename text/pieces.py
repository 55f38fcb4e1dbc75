"""The spellings of all tokens in one block of UTF-8: a list of texts takes eight times as much (17 MB for 262,144 pieces). A text is made when it is
asked for. Used by `Tokenizer`, which asks for few, and by `SentencePieces`, whose loop reads the block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import overload

import numpy as np

__all__ = ["Pieces"]


class Pieces(Sequence[str]):
    """Texts by their number, read-only. block: all of them in UTF-8; ends: int32 [texts + 1] (int64 from 2 GiB on), where each begins and the last one
    ends. texts: any sequence; one with `utf8()`, which gives such a block and ends (int64, as bytes), is taken over without making its texts."""

    def __init__(self, texts: Sequence[str]):
        self.block: bytes
        self.ends: np.ndarray
        if isinstance(texts, Pieces):
            self.block, self.ends = texts.block, texts.ends
        elif (utf8 := getattr(texts, "utf8", None)) is not None:
            self.block, ends = utf8()
            self.ends = np.frombuffer(ends, np.int64)
        else:
            parts = [text.encode("utf-8", "surrogatepass") for text in texts]
            self.block = b"".join(parts)
            self.ends = np.zeros(len(parts) + 1, np.int64)
            np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts)), out=self.ends[1:])
        if len(self.block) < 1 << 31:
            self.ends = self.ends.astype(np.int32, copy=False)

    def __iter__(self) -> Iterator[str]:
        block, ends = self.block, self.ends.tolist()
        return (block[start:end].decode("utf-8", "surrogatepass") for start, end in pairwise(ends))

    def __len__(self) -> int:
        return len(self.ends) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        return self.block[self.ends[number] : self.ends[number + 1]].decode("utf-8", "surrogatepass")

    def number(self, text: str) -> int | None:
        """Of the last piece that is this text, or None. Of the pieces that are as long, those with each byte are left: with 262,144 of them up to
        1.4 ms, too much for what is asked for often."""
        part = text.encode("utf-8", "surrogatepass")
        starts, block = self.ends[:-1], np.frombuffer(self.block, np.uint8)
        numbers = np.flatnonzero(np.diff(self.ends) == len(part))
        for place, byte in enumerate(part):
            numbers = numbers[block[starts[numbers] + place] == byte]
        return int(numbers[-1]) if len(numbers) else None
