"""Which packed layout a weight gets: strips of 32 output rows, one layout per file format (native/layouts.h has the pictures).

Packing loses nothing, so every format keeps its bits, and the kernels for integers and the exact mode read the same memory.
`backend.py` asks `layout_for` while memory is planned; the bytes are written by `fl_pack_strips` (native/pack.c).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fastllm.api import FORMATS, PackedLayout

from . import _native

__all__ = ["LAYOUTS", "VERSION", "layout_for"]

VERSION: Final = 1
"""Of all layouts: raised when the meaning of any packed byte changes, because packed files are only read with an equal version."""

LAYOUTS: Final = {name: f"{name}.s32" for name in FORMATS if _native.layout_number(f"{name}.s32") >= 0}
"""File format -> name of its packed layout."""

_OPS: Final = frozenset({"linear", "embed", "moe"})


def layout_for(shape: Sequence[int], format: str, uses: frozenset[str]) -> PackedLayout | None:
    """The layout of a weight of `shape` [N, K] stored as `format` (a key of FORMATS), or None if it is not to be packed.

    uses: names of the ops that read it. Only linear layers, experts (matrix by matrix) and tables shared with linear layers are packed: a table that is only looked
    up stays as it is if it has a plain format, since its rows are contiguous there.
    """
    if len(shape) != 2 or format not in LAYOUTS or not uses or not uses <= _OPS:
        return None
    if uses == {"embed"} and FORMATS[format].plain:
        return None
    nbytes = _native.packed_bytes(LAYOUTS[format], *shape)
    return PackedLayout(LAYOUTS[format], VERSION, format, (int(shape[0]), int(shape[1])), nbytes) if nbytes else None
