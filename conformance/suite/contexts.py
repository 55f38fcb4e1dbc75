"""attention and kv_write at the sizes of real serving: contexts and slots that need more than 16 bits, hundreds of sequences, long pieces of a prompt.

Each is a size at which a count, an index or a buffer of a kernel may end. Blocks are placed so that two numbers that are one in 16 bits are
both in use: a kernel that writes and reads by the same cut number is seen, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from fastllm.api import KV_DTYPES

from .. import bounds
from ..bench import Bench
from ..bounds import Expected
from ..case import Case, Outcome
from ..numbers import Numbers
from ..operands import In
from ..session import Session
from .attention import Paged, Setup
from .caches import declared, offered
from .common import bind, expect, size_bin

__all__ = ["cases"]

BLOCKS = 65541
FAR = (65540, 4, 32768, 65539, 0, 3, 32767, 65536, 5)
"""Blocks of one sequence, and one of nobody: 65,540 and 4, 65,539 and 3, 65,536 and 0 differ in their 17th bit only."""


class _Placed(Paged):
    """All keys and values of all sequences in one kv_write, in the blocks of `places`, of `total`."""

    def __init__(self, bench: Bench, setup: Setup, numbers: Numbers, places: Sequence[int] = (), total: int = 0):
        self._places, self._total = places, total
        super().__init__(bench, setup, numbers)

    def place(self, needed: Sequence[int], shuffle: int) -> tuple[np.ndarray, int]:
        """The places that were asked for; without some, as ever."""
        return (np.array(self._places, np.int64), self._total) if self._total else super().place(needed, shuffle)

    def fill(self) -> None:
        """One op for all."""
        block = self.setup.block
        slots = [self.table[s, np.arange(n) // block].astype(np.int64) * block + np.arange(n) % block for s, n in enumerate(self.setup.lengths)]
        self.kv_write(np.concatenate(self.keys), In(np.concatenate(self.values), "f32", "T"), np.concatenate(slots).astype(np.int32))


def _attention(case_id: str, session: Session, numbers: Numbers, setup: Setup, places: Sequence[int], total: int) -> Outcome:
    if setup.cache is not None:
        offered(session, setup.cache)
    kit = _Placed(session.bench, setup, numbers, places, total)
    try:
        where = [setup.positions(s) for s in range(len(setup.lengths))]
        queries = [numbers.normal(len(p), setup.heads, setup.dk) for p in where]
        ran = kit.attend(queries, where)
        if setup.cache is not None:
            declared(setup.cache, ran.yes.weight)
        return expect(session, case_id, ran, [kit.expected(queries, where, ran)])
    finally:
        kit.close()


def _read_back(case_id: str, session: Session, numbers: Numbers, setup: Setup, places: Sequence[int], total: int) -> Outcome:
    """Every value alone (window 1 sees one key): the stored value, to the bit."""
    kit = _Placed(session.bench, setup, numbers, places, total)
    try:
        where = [np.arange(n, dtype=np.int32) for n in setup.lengths]
        ran = kit.attend([numbers.normal(n, setup.heads, setup.dk) for n in setup.lengths], where, window=1)
        group = setup.heads // setup.kv_heads
        values = np.concatenate([bounds.round_to(v, ran.yes.weight).repeat(group, axis=1) for v in kit.values])
        return expect(session, case_id, ran, [Expected(values, np.zeros(values.shape), exact=True)])
    finally:
        kit.close()


_NEEDLES = (0, 4095, 8191, 16383, 32767, 65535, 65999)
_KEYS = Setup((66001,), (4,), 2, 1, 16, 64, 64, at=((66000,) * 4,))


class _Counted(_Placed):
    """Keys are zero, and key j is 1 in element j mod Dv of its value and 0 in the others. needles f32 [7, Dk]: keys of pairs of neighbours."""

    def fill(self) -> None:
        """With those."""
        found = Numbers(7).normal(len(_NEEDLES), self.setup.dk)
        self.needles = found * (8 / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)
        keys, values = self.keys[0], self.values[0]
        keys[:] = 0
        for at in (0, 1):
            keys[np.array(_NEEDLES) + at] = self.needles[:, None]
        values[:] = (np.arange(values.shape[2]) == np.arange(len(values))[:, None] % values.shape[2])[:, None]
        super().fill()


def _every_key(case_id: str, session: Session, numbers: Numbers, setup: Setup) -> Outcome:
    """Each key counts once. A query of zeros gives all the same weight, so that one that is left out or read twice changes a sum of few ones,
    wherever it lies; the other queries find two neighbours, which share the softmax. All rows in one sequence; then each in one of its own, over
    the same blocks."""
    if setup.cache is not None:
        offered(session, setup.cache)
    kit = _Counted(session.bench, setup, numbers)
    try:
        where = [setup.positions(0)]
        queries = [np.concatenate([np.zeros((1, setup.dk), np.float32), 4 * kit.needles]).reshape(-1, setup.heads, setup.dk)]
        together = kit.attend(queries, where)
        if setup.cache is not None:
            declared(setup.cache, together.yes.weight)
        wanted = kit.expected(queries, where, together)
        first = expect(session, case_id, together, [wanted])
        count = len(where[0])
        kit.table = kit.table.repeat(count, axis=0)
        kit.setup = replace(setup, lengths=setup.lengths * count, rows=(1,) * count)
        alone = kit.attend(np.split(queries[0], count), np.split(where[0], count))
        if alone.numerics != together.numerics:
            wanted = kit.expected(queries, where, alone)
        return max(first, expect(session, case_id, alone, [wanted]), key=lambda outcome: outcome.margin or 0.0)
    finally:
        kit.close()


_LONG = Setup((66001,), (2,), 2, 1, 16, 16, 64, at=((66000, 40000),))
_CASES: tuple[tuple[str, str, Setup, Sequence[int], int, bool], ...] = (
    # op, name, setup, blocks of sequence 0, blocks in all (0: as many as are needed, in any order), quick
    ("attention", "context", _LONG, (), 0, True),
    ("attention", "window", Setup((66001,), (2,), 2, 1, 16, 16, 64, at=((66000, 65530),), attrs={"window": 4096}), (), 0, False),
    ("attention", "chunk", Setup((66001,), (2,), 2, 1, 16, 16, 64, at=((66000, 65530),), attrs={"mask": "chunk", "chunk": 8192}), (), 0, False),
    ("attention", "rows", Setup((1150,), (1100,), 1, 1, 16, 16, 16), (), 0, True),
    ("attention", "many", Setup(tuple(1 + i % 40 for i in range(700)), (1,) * 700, 1, 1, 16, 16, 16), (), 0, True),
    ("attention", "blocks", Setup((125,), (3,), 2, 1, 8, 8, 16), FAR, BLOCKS, True),
    ("kv_write", "blocks", Setup((125,), (125,), 2, 1, 8, 8, 16), FAR, BLOCKS, False),
    ("kv_write", "rows", Setup((1100,), (1100,), 1, 1, 8, 8, 16), (), 0, True),
)  # fmt: skip


def cases() -> Iterator[Case]:
    """Long contexts, many rows, many sequences, many blocks, every key of a long context; those of attention in caches of every type, too."""
    for op, name, setup, places, total, quick in _CASES:
        size = f"l{max(setup.lengths)}-s{len(setup.lengths)}-q{sum(setup.rows)}-d{setup.dk}-b{setup.block}"
        rule, check = ("exact", _read_back) if op == "kv_write" else ("bound", _attention)
        case_id = f"{op}/f32/row/{size}/{name}.real#{rule}"
        bin = f"attention|f32|normal|{size_bin(max(setup.lengths))}" if op == "attention" else ""
        yield Case(case_id, op, "contexts", bind(check, case_id, setup, places, total), required=True, quick=quick, bin=bin)
        for dtype in KV_DTYPES if op == "attention" else ():
            case_id = f"attention/{dtype}/row/{size}/{name}.cache#bound"
            yield Case(case_id, op, "contexts", bind(_attention, case_id, replace(setup, cache=dtype), places, total), bin=f"attention|{dtype}|normal|any")
    for cache in (None, *KV_DTYPES):
        case_id = f"attention/{cache or 'f32'}/row/l{_KEYS.lengths[0]}-q{_KEYS.rows[0]}-d{_KEYS.dk}_{_KEYS.dv}-b{_KEYS.block}/{'keys.cache' if cache else 'keys.real'}#bound"
        yield Case(case_id, "attention", "contexts", bind(_every_key, case_id, replace(_KEYS, cache=cache)), required=cache is None, bin=f"attention|{cache or 'f32'}|needle|any")
