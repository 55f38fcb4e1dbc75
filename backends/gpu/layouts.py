"""Packed weights: which layout a format of a file gets, how large it is, and the macros that make kernels for it.

The picture of the layout is the comment of `kernels/packed.h`. Nothing is rounded by packing. Formats with codes of two and three bits
are kept with four, and those whose codes are an index into a table as the bytes of the table: their memory grows, their values do not
change. Plain formats (f32, f16, bf16) are strips too, k by k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fastllm.api import FORMATS, PackedLayout

__all__ = ["BLOCK_LAYOUTS", "PLAIN_KINDS", "STRIP", "VERSION", "BlockLayout", "layout_for", "packed_bytes"]

VERSION: Final = 1
"""Of all layouts: raised when the meaning of a packed byte changes."""
STRIP: Final = 32
TILE_K: Final = 32
LINE: Final = 128
PLAIN_KINDS: Final = {"f32": 0, "f16": 1, "bf16": 2}
HALF, F32, BYTES, PAIR, ZERO = range(5)


@dataclass(frozen=True)
class BlockLayout:
    """How a block format is packed. number: FORMAT of pack.fl; low, high: bits of the planes; zero: subtracted from a code; top:
    largest magnitude of a stored code; group: k per scale; scale: one of HALF, F32, BYTES, PAIR, ZERO; minimum: it has an offset."""

    format: str
    number: int
    low: int
    high: int
    zero: int
    top: int
    group: int
    scale: int
    minimum: bool

    @property
    def block(self) -> int:
        """k per block."""
        return FORMATS[self.format].block

    @property
    def chunk(self) -> int:
        """Steps of four k whose products, two in each lane, fit in 16 bits: 1 product a step and lane."""
        steps = 8 * self.group // TILE_K
        while steps * self.top * 127 > 32767:
            steps //= 2
        return steps

    @property
    def block_bytes(self) -> int:
        """Bytes of a packed block of 32 rows."""
        head = STRIP * (3 if self.scale == ZERO else (4 if self.scale == F32 else 2) * (1 + self.minimum))
        lines = {BYTES: 1, PAIR: 2}.get(self.scale, 0) * TILE_K // self.group
        return head + self.block // TILE_K * (STRIP * lines + LINE * (self.low + self.high))

    def defines(self) -> dict[str, int]:
        """Macros of packed.h."""
        return {
            "BLOCK": self.block, "GROUP_K": self.group, "LOW": self.low, "HIGH": self.high, "ZERO": self.zero,
            "SCALE": self.scale, "MINIMUM": int(self.minimum), "CHUNK": self.chunk,
        }  # fmt: skip


BLOCK_LAYOUTS: Final = {
    layout.format: layout
    for layout in (
        BlockLayout("q4_0", 0, 4, 0, 8, 15, 32, HALF, False),
        BlockLayout("q4_1", 1, 4, 0, 0, 15, 32, HALF, True),
        BlockLayout("q5_0", 2, 4, 1, 16, 31, 32, HALF, False),
        BlockLayout("q5_1", 3, 4, 1, 0, 31, 32, HALF, True),
        BlockLayout("q8_0", 4, 8, 0, 0, 128, 32, HALF, False),
        BlockLayout("q2_k", 5, 4, 0, 0, 15, 16, PAIR, True),
        BlockLayout("q3_k", 6, 4, 0, 4, 15, 16, BYTES, False),
        BlockLayout("q4_k", 7, 4, 0, 0, 15, 32, PAIR, True),
        BlockLayout("q5_k", 8, 4, 1, 0, 31, 32, PAIR, True),
        BlockLayout("q6_k", 9, 4, 2, 32, 63, 16, BYTES, False),
        BlockLayout("iq4_nl", 10, 8, 0, 0, 128, 32, HALF, False),
        BlockLayout("iq4_xs", 11, 8, 0, 0, 128, 32, BYTES, False),
        BlockLayout("mxfp4", 12, 8, 0, 0, 128, 32, F32, False),
        *(BlockLayout(f"int4g{n}", 13, 4, 0, 0, 15, 32, ZERO, True) for n in (32, 64, 128, 256)),
        *(BlockLayout(f"int4g{n}s", 14, 4, 0, 8, 15, 32, HALF, False) for n in (64, 128, 256)),
        *(BlockLayout(f"int8g{n}", 15, 8, 0, 0, 128, 32, HALF, False) for n in (64, 128)),
    )
}
"""File format -> its layout."""

_OPS: Final = frozenset({"linear", "embed"})


def packed_bytes(shape: Sequence[int], format: str) -> int:
    """Bytes of a packed weight [N, K]; 0 if it cannot be packed (rows that are not whole groups of 32)."""
    n, k = int(shape[0]), int(shape[1])
    strips = -(-n // STRIP)
    if format in PLAIN_KINDS:
        return strips * STRIP * k * FORMATS[format].block_bytes
    layout = BLOCK_LAYOUTS[format]
    return 0 if k % layout.block else strips * (k // layout.block) * layout.block_bytes


def layout_for(shape: Sequence[int], format: str, uses: frozenset[str]) -> PackedLayout | None:
    """The layout of a weight of `shape` [N, K] stored as `format`, or None if it is not to be packed.

    uses: names of the ops that read it. Only linear layers and tables shared with them are packed: a table that is only looked
    up stays as it is if it has a plain format, since its rows are contiguous there.
    """
    if len(shape) != 2 or (format not in BLOCK_LAYOUTS and format not in PLAIN_KINDS) or not uses or not uses <= _OPS:
        return None
    if uses == {"embed"} and format in PLAIN_KINDS:
        return None
    nbytes = packed_bytes(shape, format)
    return PackedLayout(f"{format}.w32", VERSION, format, (int(shape[0]), int(shape[1])), nbytes) if nbytes else None
