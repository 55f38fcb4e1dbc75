"""attention over some hundred keys with every option: what kernels do once per key range must be done once per row.

A kernel for long contexts divides the keys of a row into ranges and merges what it finds in them; a kernel for prompts takes rows in tiles and skips
blocks that no row of a tile sees. Either may be right over the few keys of the cases of `attention`, where there is one range and one tile. Here are more
keys than a range has, rows in a prompt and the same rows each in a sequence of its own, and windows and chunks whose edges lie on, before and behind those of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from fastllm.api import KV_DTYPES

from ..case import Case, Failure, Outcome
from ..numbers import Numbers
from ..session import Session
from .attention import Paged, Setup, paged
from .caches import declared, offered
from .common import bind, expect, same_bits

__all__ = ["cases"]

LENGTH = 703
PROMPT = 67
"""Rows of a prompt, at the end of the context."""
REPEATS = 10


def _edges(width: int) -> tuple[int, ...]:
    """Positions from which a window of `width` begins at the first, second or last key of a block of 16, 32 and 64; and chunks' ends."""
    starts = [s for s in (63, 64, 65, 127, 128, 129, 192, 320) if s + width <= LENGTH]
    return tuple(sorted({s + width - 1 for s in starts} | {width - 1, width, LENGTH - 1}))


def _of(setup: Setup, *places: int) -> Setup:
    """With rows at those positions, the last ones of a prompt, of one sequence."""
    where = places or (0, 255, 256, 257, 511, 512, 513, 640)
    return replace(setup, lengths=(LENGTH,), rows=(len(where),), at=(where,))


_PLAIN = Setup(block=64)
_CASES: tuple[tuple[str, Setup], ...] = (
    ("plain", _of(_PLAIN)),
    ("sinks", _of(replace(_PLAIN, sinks=True))),
    ("alibi", _of(replace(_PLAIN, slopes=True))),
    ("softcap", _of(replace(_PLAIN, attrs={"softcap": 2.0, "scale": 1.0}))),
    ("window64", _of(replace(_PLAIN, attrs={"window": 64}), *_edges(64))),
    ("window256", _of(replace(_PLAIN, block=32, attrs={"window": 256}), *_edges(256))),
    ("window512", _of(replace(_PLAIN, block=16, attrs={"window": 512}), *_edges(512))),
    ("window100_sinks", _of(replace(_PLAIN, sinks=True, attrs={"window": 100}), *_edges(100))),
    ("window256_softcap", _of(replace(_PLAIN, attrs={"window": 256, "softcap": 2.0, "scale": 1.0}), *_edges(256))),
    ("chunk128", _of(replace(_PLAIN, attrs={"mask": "chunk", "chunk": 128}), 127, 128, 129, 255, 256, 257, 383, 384, 640)),
    ("chunk300", _of(replace(_PLAIN, attrs={"mask": "chunk", "chunk": 300}), 299, 300, 301, 599, 600, 640)),
    ("prefix", _of(replace(_PLAIN, attrs={"mask": "prefix"}, prefix=(333,)))),
    ("full", _of(replace(_PLAIN, attrs={"mask": "full"}))),
    ("latent", _of(replace(_PLAIN, heads=4, kv_heads=1, dk=80, dv=0, attrs={"value_dim": 64}))),
    ("group3", _of(replace(_PLAIN, heads=6, dk=64, dv=64))),
    ("d80", _of(replace(_PLAIN, dk=80, dv=80))),
    ("d96", _of(replace(_PLAIN, dk=96, dv=96))),
    ("d128", _of(replace(_PLAIN, dk=128, dv=128))),
    ("d256_window", _of(replace(_PLAIN, heads=4, kv_heads=1, dk=256, dv=256, attrs={"window": 512}), *_edges(512))),
)
_CACHED = ("sinks", "window256", "latent", "group3", "d96", "d128", "d256_window")
"""Those that are asked of a cache of every type, too."""


def _rows(kit: Paged, numbers: Numbers) -> tuple[np.ndarray, np.ndarray]:
    """(queries f32 [n, H, Dk], positions i32 [n]) of the rows that a setup names and of a prompt."""
    setup = kit.setup
    where = np.concatenate([setup.positions(0), np.arange(LENGTH - PROMPT, LENGTH, dtype=np.int32)])
    return numbers.normal(len(where), setup.heads, setup.dk), where


def _sequences(kit: Paged, count: int) -> None:
    """So many sequences of one row each, over the blocks of the first."""
    kit.table = kit.table.repeat(count, axis=0)
    kit.setup = replace(kit.setup, lengths=kit.setup.lengths * count, rows=(1,) * count, prefix=kit.setup.prefix * count)
    kit.keys, kit.values = kit.keys * count, kit.values * count


def _split(case_id: str, session: Session, numbers: Numbers, setup: Setup) -> Outcome:
    """All rows in one sequence, and those that the setup names each in a sequence of its own."""
    if setup.cache is not None:
        offered(session, setup.cache)
    with paged(session, setup, numbers) as kit:
        query, where = _rows(kit, numbers)
        together = kit.attend([query], [where])
        if setup.cache is not None:
            declared(setup.cache, together.yes.weight)
        first = expect(session, case_id, together, [kit.expected([query], [where], together)])
        count = setup.rows[0]
        _sequences(kit, count)
        queries, places = np.split(query[:count], count), np.split(where[:count], count)
        alone = kit.attend(queries, places)
        return max(first, expect(session, case_id, alone, [kit.expected(queries, places, alone)]), key=lambda outcome: outcome.margin or 0.0)


def _same(case_id: str, session: Session, numbers: Numbers, rule: str) -> Outcome:
    """d0: ten times the same; d2: the bits of a row are those that it has in a sequence of its own, and in parts of the prompt."""
    with paged(session, _CASES[0][1], numbers) as kit:
        query, where = _rows(kit, numbers)
        whole = kit.attend([query], [where])
        if rule == "d0":
            for repeat in range(1, REPEATS):
                if not same_bits(kit.attend([query], [where]).outs[0], whole.outs[0]):
                    raise Failure("d0", f"attention over {LENGTH} keys gave other bits in repeat {repeat + 1} of {REPEATS}")
            return Outcome(impl=whole.yes.impl, native=whole.native)
        if "rows" in whole.yes.varies:
            raise Failure("d2", "attention declares varies=('rows',): batch mates change results, D2 is not claimed")
        first = kit.setup.rows[0]
        for part in (slice(first, first + 1), slice(first, first + 33), slice(len(where) - 2, len(where))):
            if not same_bits(kit.attend([query[part]], [where[part]]).outs[0], whole.outs[0][part]):
                raise Failure("d2", f"rows {part.start}…{part.stop - 1} of attention over {LENGTH} keys have other bits than in the step with all")
        _sequences(kit, len(where))
        alone = kit.attend(np.split(query, len(where)), np.split(where, len(where))).outs[0]
        if not same_bits(alone, whole.outs[0]):
            row = int(np.flatnonzero((alone.view(np.uint32) != whole.outs[0].view(np.uint32)).reshape(len(alone), -1).any(1))[0])
            raise Failure("d2", f"row {row} of attention over {LENGTH} keys has other bits in a sequence of its own, among others, than in a prompt")
        return Outcome(impl=whole.yes.impl, native=whole.native)


def cases() -> Iterator[Case]:
    """Every option; some in caches of every type; the same bits."""
    for name, setup in _CASES:
        size = f"l{LENGTH}-h{setup.heads}_{setup.kv_heads}-d{setup.dk}_{setup.dv}-b{setup.block}"
        case_id = f"attention/f32/row/{size}/{name}.splits#bound"
        yield Case(case_id, "attention", "splits", bind(_split, case_id, setup), required=True, quick=name in ("sinks", "window256"))
        for dtype in KV_DTYPES if name in _CACHED else ():
            case_id = f"attention/{dtype}/row/{size}/{name}.splits.cache#bound"
            yield Case(case_id, "attention", "splits", bind(_split, case_id, replace(setup, cache=dtype)))
    for rule, level in (("d0", "bronze"), ("d2", "silver")):
        case_id = f"attention/-/-/attention/splits#{rule}"
        yield Case(case_id, "attention", "splits", bind(_same, case_id, rule), level, True, rule == "d0")
