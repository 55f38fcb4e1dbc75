"""attention and kv_write: paged caches whose unused slots and free blocks are NaN, ragged rows, every mask and option.

The layout of a cache block is the vendor's, so keys get in by kv_write and out by attention only. With one visible key the result of
attention is that key's value: that is how kv_write is read back to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from fastllm.api import KVSpec

from .. import bounds
from ..bench import Bench, Ran
from ..bounds import Expected, round_to
from ..case import Case, Failure, Outcome
from ..numbers import Numbers
from ..operands import Cache, In, Operand
from ..session import Session
from .common import bind, expect, or_refused, same_bits, size_bin

__all__ = ["Paged", "Setup", "cases", "paged"]


@dataclass(frozen=True)
class Setup:
    """One attention case. lengths: tokens of each sequence in the cache; rows: query rows of each, at its last positions (or those
    of `at`); heads, kv_heads, dk, dv: sizes (dv 0: values are the first value_dim of the keys); cache: type in which keys and values are
    kept, None for the backend's own."""

    lengths: tuple[int, ...] = (33,)
    rows: tuple[int, ...] = (1,)
    heads: int = 4
    kv_heads: int = 2
    dk: int = 32
    dv: int = 32
    block: int = 16
    kind: str = "normal"
    attrs: dict[str, Any] = field(default_factory=dict)
    sinks: bool = False
    slopes: bool = False
    prefix: tuple[int, ...] = ()
    at: tuple[tuple[int, ...], ...] = ()
    cache: str | None = None

    def positions(self, s: int) -> np.ndarray:
        """i32 [rows of sequence s]."""
        if self.at:
            return np.array(self.at[s], np.int32)
        return np.arange(self.lengths[s] - self.rows[s], self.lengths[s], dtype=np.int32)


class Paged:
    """Sequences in a cache on the device, with their keys and values on the host. order: which block comes when."""

    def __init__(self, bench: Bench, setup: Setup, numbers: Numbers, shuffle: int = 0):
        """Writes all keys and values by kv_write."""
        self.bench, self.setup = bench, setup
        self.keys = [numbers.array(setup.kind, n, setup.kv_heads, setup.dk) for n in setup.lengths]
        self.values = [numbers.normal(n, setup.kv_heads, setup.dv) for n in setup.lengths]
        needed = [-(-n // setup.block) for n in setup.lengths]
        self.width = max([*needed, 1]) + 1
        order, total = self.place(needed, shuffle)
        self.table = np.full((len(setup.lengths), self.width), total - 1, np.int32)  # unused entries name a block that exists
        at = 0
        for s, count in enumerate(needed):
            self.table[s, :count] = order[at : at + count]
            self.table[s, count:] = order[-1]  # of nobody: full of NaN
            at += count
        self.cache: Cache = bench.cache(KVSpec(setup.kv_heads, setup.dk, setup.dv, setup.cache), setup.block, total)
        self.fill()

    def place(self, needed: Sequence[int], shuffle: int) -> tuple[np.ndarray, int]:
        """(blocks in the order in which sequences take them, and at the end one that is nobody's; how many there are)."""
        total = sum(needed) + 3
        return Numbers(99 + shuffle).permutation(total), total

    def fill(self) -> None:
        """Writes all keys and values."""
        for s, n in enumerate(self.setup.lengths):
            self.write(s, np.arange(n))

    def close(self) -> None:
        """Frees the cache."""
        if self.cache.region is not None:
            self.cache.region.buffer.close()

    def write(self, s: int, tokens: np.ndarray) -> Ran | None:
        """kv_write of these tokens of one sequence."""
        if not len(tokens):
            return None
        block = self.setup.block
        slots = (self.table[s, tokens // block] * block + tokens % block).astype(np.int32)
        values = In(self.values[s][tokens], "f32", "T") if self.setup.dv else None
        return self.kv_write(self.keys[s][tokens], values, slots)

    def kv_write(self, keys: np.ndarray, values: In | None, slots: np.ndarray, index_gap: int = 0) -> Ran:
        """The op, with the cache's zones checked."""
        ran = self.bench.run("kv_write", [self.cache, In(keys, "f32", "T"), values, In(slots, "i32", "T", index_gap)], [], {}, self.sizes())
        assert self.cache.region is not None
        self.bench.check_zones(self.cache.region, "the cache", "kv_write")
        return ran

    def sizes(self) -> dict[str, int]:
        """Largest values of the symbols."""
        return {"ctx": max([*self.setup.lengths, 1]), "S": len(self.setup.lengths), "B": self.width}

    def attend(self, queries: Sequence[np.ndarray], positions: Sequence[np.ndarray], gap: int = 0, stepped: int | None = None, **changed: Any) -> Ran:
        """attention of queries per sequence [n, H, Dk] at positions per sequence. stepped: which input has a gap behind each entry."""
        setup = self.setup
        attrs = {"scale": 1 / np.sqrt(setup.dk), **setup.attrs, **changed}
        rows = [len(q) for q in queries]
        starts = np.cumsum([0, *rows]).astype(np.int32)
        lengths = np.array(setup.lengths, np.int32)
        dv = setup.dv or attrs["value_dim"]
        inputs: list[Operand] = [
            In(np.concatenate(queries), "f32", "T", gap), self.cache, In(np.concatenate(positions).astype(np.int32), "i32", "T"),
            In(starts, "i32", "S+1"), In(lengths, "i32", "S"), In(self.table, "i32", "S"), In(self.sinks()) if setup.sinks else None,
            In(self.slopes()) if setup.slopes else None, In(np.array(setup.prefix, np.int32), "i32", "S") if setup.prefix else None,
        ]  # fmt: skip
        if stepped is not None:
            inputs[stepped] = replace(cast(In, inputs[stepped]), gap=3)
        assert self.cache.region is not None
        before = self.bench.fetch(self.cache.region)
        ran = self.bench.run("attention", inputs, [((int(starts[-1]), setup.heads, dv), "f32")], attrs, self.sizes())
        if not same_bits(before, self.bench.fetch(self.cache.region)):
            raise Failure("guard", "op 'attention' changed the cache")
        return ran

    def sinks(self) -> np.ndarray:
        """f32 [H]."""
        return np.linspace(-1, 3, self.setup.heads).astype(np.float32)

    def slopes(self) -> np.ndarray:
        """f32 [H]: 2^(-8 h / H) for h = 1…H (Press et al. 2022). The smallest is 2^-8, which shows over 20 keys."""
        return (2.0 ** (-8 * np.arange(1, self.setup.heads + 1) / self.setup.heads)).astype(np.float32)

    def expected(self, queries: Sequence[np.ndarray], positions: Sequence[np.ndarray], ran: Ran, **changed: Any) -> Expected:
        """The oracle's result for all rows."""
        setup = self.setup
        attrs = {"scale": 1 / np.sqrt(setup.dk), **setup.attrs, **changed}
        parts = []
        for s, query in enumerate(queries):
            values = self.values[s] if setup.dv else self.keys[s][..., : attrs["value_dim"]]
            one = bounds.Sequence(query, positions[s], self.keys[s], values, setup.prefix[s] if setup.prefix else 0)
            sinks, slopes = (self.sinks() if setup.sinks else None), (self.slopes() if setup.slopes else None)
            parts.append(bounds.attention(one, ran.numerics, sinks=sinks, slopes=slopes, **attrs))
        y, bound, slack = (np.concatenate([getattr(p, name) for p in parts]) for name in ("y", "bound", "slack"))
        return Expected(y, bound, slack=slack)


@contextmanager
def paged(session: Session, setup: Setup, numbers: Numbers, shuffle: int = 0) -> Iterator[Paged]:
    """A Paged that is closed at the end."""
    kit = Paged(session.bench, setup, numbers, shuffle)
    try:
        yield kit
    finally:
        kit.close()


def _queries(setup: Setup, numbers: Numbers) -> tuple[list[np.ndarray], list[np.ndarray]]:
    where = [setup.positions(s) for s in range(len(setup.lengths))]
    return [numbers.normal(len(p), setup.heads, setup.dk) for p in where], where


def _attention(case_id: str, session: Session, numbers: Numbers, setup: Setup, gap: int = 0) -> Outcome:
    with paged(session, setup, numbers) as kit:
        queries, where = _queries(setup, numbers)
        ran = kit.attend(queries, where, gap)
        return expect(session, case_id, ran, [kit.expected(queries, where, ran)])


def _stepped(case_id: str, session: Session, numbers: Numbers, which: int | None) -> Outcome:
    """An index vector with a gap behind each entry, as a column of a matrix has one."""
    setup = Setup((40, 17, 65), (3, 1, 2), at=((37, 38, 39), (16,), (10, 64)), attrs={"mask": "prefix"}, prefix=(11, 0, 64))
    with paged(session, setup, numbers) as kit:
        queries, where = _queries(setup, numbers)
        ran = kit.attend(queries, where, stepped=which)
        return expect(session, case_id, ran, [kit.expected(queries, where, ran)])


def _slots_stepped(case_id: str, session: Session, numbers: Numbers, index_gap: int) -> Outcome:
    """Values that were written by slots with a gap behind each, read alone: to the bit."""
    setup = Setup((33,), (33,))
    with paged(session, setup, numbers) as kit:
        kit.keys[0], kit.values[0] = numbers.normal(*kit.keys[0].shape), numbers.normal(*kit.values[0].shape)
        order = numbers.permutation(33)
        slots = (kit.table[0, order // setup.block] * setup.block + order % setup.block).astype(np.int32)
        kit.kv_write(kit.keys[0][order], In(kit.values[0][order], "f32", "T"), slots, index_gap)
        ran = kit.attend([numbers.normal(33, setup.heads, setup.dk)], [np.arange(33, dtype=np.int32)], window=1)
        values = round_to(kit.values[0], ran.yes.weight).repeat(setup.heads // setup.kv_heads, axis=1)
        return expect(session, case_id, ran, [Expected(values, np.zeros(values.shape), exact=True)])


def _needle(case_id: str, session: Session, numbers: Numbers, length: int, block: int) -> Outcome:
    """One key at a time wins the softmax: each key position in turn, so that a key that is left out is missed with certainty."""
    setup = Setup((length,), (1,), 2, 1, 32, 32, block)
    with paged(session, setup, numbers) as kit:
        places = sorted({0, 1, block - 1, block, length // 2, length - 2, length - 1} & set(range(length)))
        queries = [np.stack([40 * kit.keys[0][p] for p in places]).repeat(2, axis=1).astype(np.float32)]
        where = [np.full(len(places), length - 1, np.int32)]
        ran = kit.attend(queries, where)
        return expect(session, case_id, ran, [kit.expected(queries, where, ran)])


def _read_back(case_id: str, session: Session, numbers: Numbers, setup: Setup, order: str) -> Outcome:
    """kv_write, then every value read alone (window 1 sees one key): the stored value, to the bit."""
    with paged(session, setup, numbers) as kit:
        if order == "overwrite":
            for s, n in enumerate(setup.lengths):
                kit.keys[s], kit.values[s] = numbers.normal(*kit.keys[s].shape), numbers.normal(*kit.values[s].shape)
                kit.write(s, np.arange(n)[::-1].copy())
        if order == "skipped":  # a negative slot stores nothing
            ones = np.ones((2, setup.kv_heads, setup.dk), np.float32)
            assert kit.cache.region is not None
            before = kit.bench.fetch(kit.cache.region)
            kit.kv_write(ones, In(np.ones((2, setup.kv_heads, setup.dv), np.float32), "f32", "T"), np.array([-1, -7], np.int32))
            if not same_bits(before, kit.bench.fetch(kit.cache.region)):
                raise Failure("exact", "a negative slot changed the cache; it stores nothing")
        where = [np.arange(n, dtype=np.int32) for n in setup.lengths]
        queries = [numbers.normal(n, setup.heads, setup.dk) for n in setup.lengths]
        ran = kit.attend(queries, where, window=1)
        group = setup.heads // setup.kv_heads
        values = np.concatenate([round_to(v, ran.yes.weight).repeat(group, axis=1) for v in kit.values])
        first = expect(session, case_id, ran, [Expected(values, np.zeros(values.shape), exact=True)])
        ran = kit.attend(queries, where)  # and the keys, through full scores
        expect(session, case_id, ran, [kit.expected(queries, where, ran)], "bound")
        return first


def _blocks_permuted(case_id: str, session: Session, numbers: Numbers) -> Outcome:
    """Where a block lies changes no bit."""
    setup = Setup((100, 37), (3, 2), 4, 2, 64, 64, 16)
    queries = [numbers.normal(n, 4, 64) for n in setup.rows]
    where = [setup.positions(s) for s in (0, 1)]
    results = []
    for shuffle in (0, 1, 2):
        with paged(session, setup, Numbers(5), shuffle) as kit:
            results.append(kit.attend(queries, where))
    for other in results[1:]:
        if not same_bits(other.outs[0], results[0].outs[0]):
            raise Failure("prop", "attention gives other bits when the blocks of the cache lie elsewhere")
    return Outcome(impl=results[0].yes.impl, native=results[0].native)


def _heads_permuted(case_id: str, session: Session, numbers: Numbers) -> Outcome:
    """Query heads of one kv head may be exchanged: results are exchanged, to the bit."""
    setup = Setup((40,), (2,), 6, 2, 32, 32, 16)
    with paged(session, setup, numbers) as kit:
        queries, where = _queries(setup, numbers)
        order = [2, 0, 1, 5, 4, 3]
        straight = kit.attend(queries, where)
        turned = kit.attend([queries[0][:, order]], where)
        if not same_bits(straight.outs[0][:, order], turned.outs[0]):
            raise Failure("prop", "attention depends on the order of the query heads of one kv head")
        return Outcome(impl=straight.yes.impl, native=straight.native)


def _nan_key(case_id: str, session: Session, numbers: Numbers) -> Outcome:
    """NaN in one key reaches the rows that see it and no others."""
    setup = Setup((50,), (50,), 2, 1, 32, 32, 16)
    with paged(session, setup, numbers) as kit:
        kit.keys[0][30] = np.nan
        kit.write(0, np.array([30]))
        queries, where = _queries(setup, numbers)
        ran = kit.attend(queries, where)
        found = np.isnan(ran.outs[0]).all((1, 2))
        wanted = np.arange(50) >= 30
        if not np.array_equal(np.isnan(ran.outs[0]).any((1, 2)), wanted) or not np.array_equal(found, wanted):
            at = int(np.flatnonzero(found != wanted)[0]) if (found != wanted).any() else 0
            raise Failure("bound", f"a NaN in key 30 should reach rows 30…49; row {at} differs", margin=float("inf"))
        return Outcome(0.0, impl=ran.yes.impl, native=ran.native)


_BASE: tuple[tuple[str, Setup, bool], ...] = (
    ("one", Setup((1,), (1,), 1, 1, 32, 32), False),
    ("mha", Setup((15,), (15,), 4, 4, 64, 64), False),
    ("gqa8", Setup((65, 3), (5, 3), 8, 1, 64, 64), True),
    ("gqa5", Setup((16, 17), (1, 1), 5, 1, 80, 80, 16), False),
    ("d96", Setup((63,), (2,), 4, 2, 96, 96, 32), False),
    ("d128", Setup((64, 1), (1, 1), 4, 2, 128, 128, 64), True),
    ("d256", Setup((33,), (3,), 2, 1, 256, 256), False),
    ("wide", Setup((70,), (3,), 4, 2, 64, 32), True),
    ("narrow", Setup((70,), (3,), 4, 2, 32, 96), False),
    ("ragged", Setup((40, 0, 17, 129), (3, 0, 0, 129), 2, 1, 32, 32), True),
    ("long", Setup((1023, 1025), (1, 2), 2, 1, 64, 64, 64), False),
    ("even", Setup((1024,), (2,), 2, 1, 64, 64, 64), False),
    ("longer", Setup((4097,), (1,), 2, 1, 64, 64, 64), False),
    ("prefill", Setup((64,), (64,), 4, 2, 32, 32), False),
    ("mla", Setup((75,), (3,), 4, 1, 576, 0, 64, attrs={"value_dim": 512}), False),
    ("mla_small", Setup((35,), (4,), 4, 1, 48, 0, 16, attrs={"value_dim": 32}), True),
    ("window1", Setup((40,), (9,), attrs={"window": 1}), False),
    ("window16", Setup((65,), (40,), attrs={"window": 16}), True),
    ("window_wide", Setup((40,), (9,), attrs={"window": 262144}), False),
    ("softcap", Setup((65,), (5,), attrs={"softcap": 2.0, "scale": 1.0}), True),
    ("sinks", Setup((33, 5), (4, 5), sinks=True), True),
    ("sinks_window", Setup((65,), (9,), sinks=True, attrs={"window": 4}), False),
    ("alibi", Setup((65,), (9,), slopes=True), True),
    ("full", Setup((40,), (40,), attrs={"mask": "full"}), True),
    ("prefix", Setup((40, 30), (40, 30), attrs={"mask": "prefix"}, prefix=(11, 0)), True),
    ("chunk", Setup((65,), (65,), attrs={"mask": "chunk", "chunk": 16}), True),
    ("scale", Setup((33,), (3,), attrs={"scale": 0.7}), True),
    ("outlier", Setup((65,), (5,), kind="outlier", attrs={"scale": 0.01}), False),
    ("cancelling", Setup((65,), (5,), kind="cancelling"), False),
    ("sparse", Setup((65,), (5,), kind="sparse"), False),
    ("behind", Setup((40,), (3,), at=((0, 5, 39),)), False),
    ("llama_405b", Setup((37,), (2,), 128, 8, 128, 128), True),  # heads as those models have them, from here on
    ("gemma3_27b", Setup((35, 20), (1, 2), 32, 16, 128, 128, attrs={"window": 16}), False),
    ("gemma3_1b", Setup((19,), (2,), 4, 1, 256, 256), False),
    ("gemma2_27b", Setup((19,), (2,), 32, 16, 128, 128, attrs={"softcap": 50.0}), False),
    ("gpt_oss", Setup((40,), (2,), 64, 8, 64, 64, sinks=True, attrs={"window": 16}), True),
    ("llama_7b", Setup((20,), (2,), 32, 32, 128, 128), False),
    ("qwen_72b", Setup((20,), (2,), 64, 64, 128, 128), True),
    ("d256_heads", Setup((19,), (2,), 32, 16, 256, 256), True),
    ("alibi_heads", Setup((20,), (2,), 112, 112, 128, 128, slopes=True), False),
    ("deepseek_v3", Setup((37,), (2,), 128, 1, 576, 0, 64, attrs={"value_dim": 512}), True),
    ("heads_prefill", Setup((40,), (33,), 64, 16, 128, 128), False),
    ("unseen", Setup((40,), (2,), attrs={"window": 4}, at=((60, 41),)), True),
)  # fmt: skip


def cases() -> Iterator[Case]:
    """Sizes, masks and options; needles; read-back; properties."""
    for name, setup, quick in _BASE:
        for gap in (0, 7) if name in ("gqa8", "ragged") else (0,):
            size = f"l{'_'.join(map(str, setup.lengths))}-q{'_'.join(map(str, setup.rows))}-h{setup.heads}_{setup.kv_heads}-d{setup.dk}_{setup.dv}-b{setup.block}"
            case_id = f"attention/f32/{'gap' if gap else 'row'}/{size}/{name}#bound"
            yield Case(case_id, "attention", "attention", bind(_attention, case_id, setup, gap), required=True, quick=quick and not gap, bin=f"attention|f32|{setup.kind}|{size_bin(max(setup.lengths))}")
    for length, block in ((16, 16), (17, 16), (65, 64), (130, 32), (1025, 64)):
        case_id = f"attention/f32/row/l{length}-b{block}/needle#bound"
        yield Case(case_id, "attention", "attention", bind(_needle, case_id, length, block), required=True, quick=length in (17, 130), bin="attention|f32|needle|any")
    for order in ("once", "overwrite", "skipped"):
        for heads, dk, dv, block in ((1, 32, 32, 16), (2, 80, 48, 32), (4, 64, 64, 64)):
            setup = Setup((block + 1, 5, 0), (block + 1, 5, 0), 2 * heads, heads, dk, dv, block)
            case_id = f"kv_write/f32/row/k{heads}-d{dk}_{dv}-b{block}/{order}#exact"
            yield Case(case_id, "kv_write", "attention", bind(_read_back, case_id, setup, order), required=True, quick=heads == 2)
    for heads, width in ((16, 128), (112, 128), (16, 256)):
        case_id = f"kv_write/f32/row/k{heads}-d{width}_{width}-b16/heads#exact"
        setup = Setup((17,), (17,), heads, heads, width, width)
        yield Case(case_id, "kv_write", "attention", bind(_read_back, case_id, setup, "once"), required=True, quick=heads == 112)
    for name, which in (("positions", 2), ("query_start", 3), ("context_len", 4), ("block_table", 5), ("prefix_len", 8)):
        case_id = f"attention/f32/gap/l40_17_65/{name}_stepped#bound"
        yield Case(case_id, "attention", "attention", or_refused(bind(_stepped, case_id, which), bind(_stepped, case_id, None)), required=True, quick=True)
    case_id = "kv_write/f32/gap/l33/slots_step3#exact"
    yield Case(case_id, "kv_write", "attention", or_refused(bind(_slots_stepped, case_id, 2), bind(_slots_stepped, case_id, 0)), required=True, quick=True)
    for name, property_check, quick in (("blocks_permuted", _blocks_permuted, True), ("heads_permuted", _heads_permuted, False)):
        case_id = f"attention/f32/row/any/{name}#prop"
        yield Case(case_id, "attention", "attention", bind(property_check, case_id), required=True, quick=quick)
    case_id = "attention/f32/row/l50/nan_key#bound"
    yield Case(case_id, "attention", "attention", bind(_nan_key, case_id), required=True, quick=True)
