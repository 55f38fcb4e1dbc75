"""Caches that round keys and values: f32, f16, bf16, int8. What is kept must be what the Yes declares, and nothing coarser."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fastllm.api import KV_DTYPES, KVSpec, No

from .. import bounds
from ..bounds import Expected
from ..case import Case, Failure, NotApplicable, Outcome
from ..numbers import Numbers
from ..session import Session
from .attention import Paged, Setup, paged
from .common import bind, expect

__all__ = ["cases", "declared", "offered", "read_back"]


def offered(session: Session, dtype: str) -> None:
    """Raises NotApplicable for a type that the backend does not offer."""
    if dtype not in session.backend.kv_dtypes:
        raise NotApplicable(f"keys and values are kept as {', '.join(session.backend.kv_dtypes) or 'the backend likes'} here")


def declared(dtype: str, found: str | None) -> None:
    """Raises Failure if a cache of a type is declared as another."""
    wanted = (None, "f32") if dtype == "f32" else (dtype,)
    if found not in wanted and not (dtype == "int8" and str(found).startswith("int8_g")):
        raise Failure("honest", f"a cache of {dtype} is declared as weight={found!r}: results would be judged by another rounding")


def _values(numbers: Numbers, kit: Paged, kind: str) -> None:
    """Other keys and values than those of the class `normal`, written again."""
    for s, n in enumerate(kit.setup.lengths):
        if kind == "edges":  # halves of a code; a vector of zeros; very large and very small ones
            kit.values[s][:] = np.round(kit.values[s] * 20) / np.float32(2)
            kit.values[s][..., 0] = 127
            kit.values[s][:1] = 0
            kit.values[s][1:2] *= np.float32(1e-30)
            kit.values[s][2:3] *= np.float32(1e4 if kit.setup.cache != "f16" else 10)
        else:
            kit.values[s][:] = numbers.array(kind, *kit.values[s].shape)
        kit.write(s, np.arange(n))


def _read_back(case_id: str, session: Session, numbers: Numbers, setup: Setup, kind: str) -> Outcome:
    offered(session, str(setup.cache))
    with paged(session, setup, numbers) as kit:
        if kind != "normal":
            _values(numbers, kit, kind)
        return read_back(case_id, session, numbers, kit)


def read_back(case_id: str, session: Session, numbers: Numbers, kit: Paged) -> Outcome:
    """Every value alone (window 1 sees one key): as the declared type rounds it. Then the keys, through full scores. Raises Failure."""
    setup = kit.setup
    where = [np.arange(n, dtype=np.int32) for n in setup.lengths]
    queries = [numbers.normal(n, setup.heads, setup.dk) for n in setup.lengths]
    ran = kit.attend(queries, where, window=1)
    if setup.cache is not None:
        declared(setup.cache, ran.yes.weight)
    group = setup.heads // setup.kv_heads
    rounded = [bounds.cached(v, ran.yes.weight) for v in kit.values]
    y, off = (np.concatenate([pair[i].repeat(group, axis=1) for pair in rounded]) for i in (0, 1))
    own = np.where(off > 0, 4 * bounds.U["f32"] * np.abs(y) + bounds.TINY, 0.0)
    slack = np.maximum(off - own, 0.0)
    if off.any() and ran.yes.prob is not None:  # the weight, which is 1, takes the scale of the codes and is rounded once, as declared
        own = own + 1.5 * bounds.U[ran.yes.prob] * np.abs(y)
    first = expect(session, case_id, ran, [Expected(y, own, not off.any(), slack)], "bound")
    ran = kit.attend(queries, where)
    expect(session, case_id, ran, [kit.expected(queries, where, ran)], "bound")
    return first


def _attention(case_id: str, session: Session, numbers: Numbers, setup: Setup) -> Outcome:
    if setup.cache is not None:
        offered(session, setup.cache)
    with paged(session, setup, numbers) as kit:
        where = [setup.positions(s) for s in range(len(setup.lengths))]
        queries = [numbers.normal(len(p), setup.heads, setup.dk) for p in where]
        ran = kit.attend(queries, where)
        if setup.cache is not None:
            declared(setup.cache, ran.yes.weight)
        return expect(session, case_id, ran, [kit.expected(queries, where, ran)])


def _broken_vector(case_id: str, session: Session, numbers: Numbers, setup: Setup) -> Outcome:
    """NaN or infinity in one value reaches whoever sees it, in every type, and nobody else."""
    offered(session, str(setup.cache))
    with paged(session, setup, numbers) as kit:
        kit.values[0][5, 0, 1], kit.values[0][9, 0, 2] = np.nan, np.inf
        kit.write(0, np.array([5, 9]))
        n = setup.lengths[0]
        ran = kit.attend([numbers.normal(n, setup.heads, setup.dk)], [np.arange(n, dtype=np.int32)], window=1)
        bad = ~np.isfinite(ran.outs[0]).all((1, 2))
        if not np.array_equal(np.flatnonzero(bad), [5, 9]):
            raise Failure("bound", f"NaN in value 5 and infinity in value 9 reach the rows {np.flatnonzero(bad).tolist()}, not 5 and 9", margin=float("inf"))
        return Outcome(0.0, impl=ran.yes.impl, native=ran.native)


def _asked(case_id: str, session: Session, numbers: Numbers) -> Outcome:
    """A type that no backend knows gets a No, and one that is not offered is not taken."""
    from dataclasses import replace

    from .honesty import questions

    base = questions("attention")
    for dtype in ("q3_k", *(d for d in KV_DTYPES if d not in session.backend.kv_dtypes)):
        query = replace(base, specs=(None, KVSpec(2, 32, 32, dtype), *base.specs[2:]))
        answer = session.backend.supports(query)
        if not isinstance(answer, No):
            raise Failure("honest", f"a cache of {dtype}, which is not among kv_dtypes ({', '.join(session.backend.kv_dtypes)}), gets a Yes")
    return Outcome()


_SETUPS: tuple[tuple[str, Setup], ...] = (
    ("gqa", Setup((65, 3), (5, 3), 8, 2, 64, 64, 16)),
    ("wide", Setup((70,), (3,), 4, 2, 128, 96, 32)),
    ("mla", Setup((35,), (4,), 4, 1, 80, 0, 16, attrs={"value_dim": 64})),
    ("heads", Setup((20,), (2,), 128, 16, 128, 128, 16)),
    ("mha", Setup((20,), (2,), 64, 64, 64, 64, 16)),
    ("bloom", Setup((20,), (2,), 112, 112, 128, 128, 16, slopes=True)),
    ("gpt_oss", Setup((40,), (2,), 64, 8, 64, 64, 16, sinks=True, attrs={"window": 16})),
    ("phi3", Setup((40,), (2,), 32, 32, 96, 96, 16, attrs={"window": 262144})),
    ("d256_heads", Setup((20,), (1,), 32, 16, 256, 256, 16)),
    ("deepseek_v3", Setup((35,), (2,), 128, 1, 576, 0, 16, attrs={"value_dim": 512})),
    ("outlier", Setup((65,), (5,), 4, 2, 64, 64, 64, kind="outlier", attrs={"scale": 0.01})),
)  # fmt: skip


_SHAPES: tuple[tuple[str, Setup], ...] = (
    ("smollm2", Setup((37,), (3,), 9, 3, 64, 64)),
    ("qwen2_7b", Setup((20,), (2,), 28, 4, 128, 128)),
    ("group6", Setup((33, 5), (2, 1), 12, 2, 112, 112)),
    ("group10", Setup((19,), (2,), 20, 2, 40, 40)),
    ("group12", Setup((33,), (3,), 12, 1, 160, 160)),
    ("group16", Setup((20,), (2,), 32, 2, 192, 128)),
    ("d72", Setup((18,), (2,), 6, 6, 72, 72)),
    ("d120", Setup((35,), (2,), 4, 2, 120, 120)),
    ("gemma2_window", Setup((65,), (40,), attrs={"window": 16, "softcap": 2.0, "scale": 1.0})),
    ("alibi_window", Setup((65,), (9,), slopes=True, attrs={"window": 16})),
    ("full_window", Setup((40,), (40,), attrs={"mask": "full", "window": 8})),
    ("prefix_window", Setup((40,), (40,), attrs={"mask": "prefix", "window": 8}, prefix=(20,))),
    ("long_prompt", Setup((300,), (200,), 4, 2, 64, 64, 64)),
    ("mixed", Setup((150, 40, 70, 1), (100, 1, 1, 1), 4, 2, 64, 64)),
)
"""Groups of heads and widths that models have between the smallest and the largest, options together, steps of a prompt and single rows."""


def cases() -> Iterator[Case]:
    """Per type: values alone, attention, broken vectors. Then groups, widths and options together, also in the backend's own type."""
    from dataclasses import replace

    for dtype in KV_DTYPES:
        for heads, dk, dv, block in ((2, 32, 32, 16), (1, 80, 48, 32), (2, 128, 256, 16)):
            setup = Setup((block + 1, 5, 0), (block + 1, 5, 0), 2 * heads, heads, dk, dv, block, cache=dtype)
            for kind in ("normal", "edges", "outlier"):
                case_id = f"kv_write/{dtype}/row/k{heads}-d{dk}_{dv}-b{block}/{kind}#bound"
                yield Case(case_id, "kv_write", "caches", bind(_read_back, case_id, setup, kind), quick=dk == 32 and dtype in ("int8", "bf16"), bin=f"kv_write|{dtype}|{kind}|any")
        case_id = f"kv_write/{dtype}/row/k112-d128_128-b16/heads#bound"
        setup = Setup((17,), (17,), 112, 112, 128, 128, 16, cache=dtype)
        yield Case(case_id, "kv_write", "caches", bind(_read_back, case_id, setup, "normal"), bin=f"kv_write|{dtype}|normal|any")
        for name, base in _SETUPS:
            case_id = f"attention/{dtype}/row/l{'_'.join(map(str, base.lengths))}-h{base.heads}_{base.kv_heads}-d{base.dk}_{base.dv}-b{base.block}/{name}#bound"
            yield Case(case_id, "attention", "caches", bind(_attention, case_id, replace(base, cache=dtype)), quick=name == "gqa" and dtype == "int8", bin=f"attention|{dtype}|{base.kind}|any")
        case_id = f"kv_write/{dtype}/row/l20/broken#bound"
        yield Case(case_id, "kv_write", "caches", bind(_broken_vector, case_id, Setup((20,), (20,), 2, 1, 32, 32, 16, cache=dtype)))
    for name, base in _SHAPES:
        size = f"l{'_'.join(map(str, base.lengths))}-q{'_'.join(map(str, base.rows))}-h{base.heads}_{base.kv_heads}-d{base.dk}_{base.dv}-b{base.block}"
        for cache in (None, *KV_DTYPES):
            case_id = f"attention/{cache or 'f32'}/row/{size}/{name}{'.cache' if cache else ''}#bound"
            yield Case(case_id, "attention", "caches", bind(_attention, case_id, replace(base, cache=cache)), required=cache is None, quick=cache is None and name in ("smollm2", "gemma2_window", "mixed"))
    case_id = "attention/-/-/any/cache_types#honest"
    yield Case(case_id, "attention", "honesty", bind(_asked, case_id), quick=True)
