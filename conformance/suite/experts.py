"""concat, route_topk, moe: what models with latent attention and with experts ask of a backend. Extended ops: a No is not held against it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastllm.api import CATALOGUE

from .. import blocks, bounds, bounds_extended
from .. import oracle_extended as extended
from ..case import Case, Failure, NotApplicable, Outcome
from ..numbers import Numbers
from ..operands import In, Operand, Weight
from ..session import Session
from .common import bind, expect, or_refused
from .linear import BEYOND, REPEAT, calibrated, kept_as_it_is, minimum_of, repeated, weight_of

__all__ = ["ALONE", "MoeData", "cases", "moe_data", "routed"]

ALONE = 8
"""Rows of a case of single rows."""


def _concat(case_id: str, session: Session, numbers: Numbers, lead: tuple[int, ...], widths: tuple[int, int], gap: int, special: bool) -> Outcome:
    x, y = (numbers.normal(*lead, width) for width in widths)
    if special:
        x.reshape(-1)[:4], y.reshape(-1)[:3] = (np.nan, np.inf, -0.0, 1e-42), (-np.inf, np.nan, 65504)
    ran = session.bench.run("concat", [In(x, "f32", "T", gap), In(y, "f32", "T", gap)], [((*lead, sum(widths)), "f32")])
    return expect(session, case_id, ran, [bounds.copies(extended.concat(x, y))])


# route_topk -------------------------------------------------------------------------------------------------------------


def _logits(numbers: Numbers, kind: str, rows: int, experts: int) -> np.ndarray:
    x = numbers.normal(rows, experts) * np.float32(2)
    if kind == "ties":  # five values only: nearly every choice is one among equals
        return np.round(x)
    if kind == "equal":
        return np.full((rows, experts), 0.5, np.float32)
    if kind == "near":  # neighbours that differ by one step of f32
        return (np.float32(1) + np.arange(experts, dtype=np.float32)[::-1] * np.float32(2.0**-23)).repeat(rows).reshape(experts, rows).T.copy()
    if kind == "extreme":
        x[:, ::3] = -np.inf
        x[:, 1::5] *= 40
    return x


def _route(case_id: str, session: Session, numbers: Numbers, rows: int, experts: int, kind: str, bias: bool, gap: int, attrs: dict[str, Any]) -> Outcome:
    logits = _logits(numbers, kind, rows, experts)
    return routed(case_id, session, logits, numbers.normal(experts) if bias else None, attrs, gap)


def routed(case_id: str, session: Session, logits: np.ndarray, b: np.ndarray | None, attrs: dict[str, Any], gap: int = 0) -> Outcome:
    """Runs route_topk on logits f32 [rows, experts], with the bias b f32 [experts], and judges what was chosen and its weights. Raises Failure."""
    full = CATALOGUE["route_topk"].complete_attrs(attrs)
    rows, k = len(logits), full["k"]
    ran = session.bench.run("route_topk", [In(logits, "f32", "T", gap), None if b is None else In(b)], [((rows, k), "i32"), ((rows, k), "f32")], attrs)
    ids = ran.outs[0].astype(np.int64)
    if fault := bounds_extended.choice_fault(logits, b, ids, full):
        raise Failure("exact", f"{ran.yes.impl}: {fault}", impl=ran.yes.impl, native=ran.native)
    ran.outs = ran.outs[1:]
    return expect(session, case_id, ran, [bounds_extended.route_weights(logits, b, ids, full)], "bound")


_DEEPSEEK = {"k": 4, "score": "sigmoid", "groups": 4, "keep_groups": 2, "group_score": "top2sum", "renorm": 1, "scale": 2.5}
_ROUTES: tuple[tuple[str, int, int, str, bool, int, dict[str, Any], bool], ...] = (
    ("softmax", 5, 8, "normal", False, 0, {"k": 2}, False),
    ("softmax_renorm", 17, 60, "normal", False, 3, {"k": 8, "renorm": 1}, True),
    ("of_chosen", 5, 32, "normal", False, 0, {"k": 4, "score": "softmax_of_chosen"}, True),
    ("sigmoid_bias", 7, 33, "normal", True, 0, {"k": 3, "score": "sigmoid", "scale": 1.7}, True),
    ("groups_max", 6, 24, "normal", False, 0, {"k": 3, "groups": 6, "keep_groups": 2}, True),
    ("groups_top2", 9, 32, "normal", True, 0, _DEEPSEEK, True),
    ("groups_ties", 9, 32, "ties", False, 0, {**_DEEPSEEK, "score": "softmax"}, True),
    ("ties", 9, 16, "ties", False, 0, {"k": 4, "renorm": 1}, True),
    ("equal", 3, 16, "equal", False, 0, {"k": 5, "score": "softmax_of_chosen"}, False),
    ("near", 3, 16, "near", False, 0, {"k": 4}, False),
    ("extreme", 5, 20, "extreme", False, 0, {"k": 6, "renorm": 1}, True),
    ("extreme_sigmoid", 5, 20, "extreme", True, 0, {"k": 6, "score": "sigmoid"}, False),
    ("all", 3, 8, "normal", False, 0, {"k": 8}, False),
    ("one", 2, 1, "normal", False, 0, {"k": 1, "renorm": 1}, False),
    ("wide", 2, 512, "normal", True, 0, {"k": 10, "score": "sigmoid", "renorm": 1, "scale": 2.8}, True),
    ("deepseek_v3", 3, 256, "normal", True, 0, {**_DEEPSEEK, "k": 8, "groups": 8, "keep_groups": 4}, True),
    ("empty", 0, 8, "normal", False, 0, {"k": 2}, False),
    ("real", 1100, 12, "normal", False, 0, {"k": 3}, True),
    ("empty_groups", 0, 32, "normal", False, 0, _DEEPSEEK, False),
)  # fmt: skip


# moe --------------------------------------------------------------------------------------------------------------------


def _choice(numbers: Numbers, rows: int, experts: int, k: int) -> np.ndarray:
    """i32 [rows, k], distinct in a row, in no order; expert 1 is nobody's, the last one everybody's (where there are so many)."""
    ids = np.zeros((rows, k), np.int32)
    others = [e for e in range(experts - 1) if e != 1 or experts - 2 < k]
    for t in range(rows):
        row = [experts - 1, *np.array(others)[numbers.permutation(len(others))][: k - 1]]
        ids[t] = np.array(row)[numbers.permutation(k)]
    return ids


@dataclass
class MoeData:
    """Operands of one `moe`: x [T, C], ids and weights [T, k]; stacks and biases of gate, up and down."""

    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    stacks: list[Weight | None]
    biases: list[np.ndarray | None]

    def expected(self, kind: str, numerics: bounds.Numerics) -> bounds.Expected:
        """What the oracle expects of a kernel of such numerics."""
        used = np.unique(self.ids)
        stacks = [None if s is None else Weight((len(used), *s.shape[1:]), s.format, s.data.reshape(s.shape[0], -1)[used].reshape(-1)) for s in self.stacks]
        values, minima = [None if s is None else s.decode() for s in stacks], [None if s is None else minimum_of(s) for s in stacks]
        biases = [None if b is None else b[used] for b in self.biases]
        with np.errstate(all="ignore"):
            return bounds_extended.moe(self.x, np.searchsorted(used, self.ids), self.weights, values, biases, kind, numerics, minima)


def _stack(numbers: Numbers, format: str, shape: tuple[int, int, int]) -> Weight:
    """A stack of experts' matrices; of a large one the rows are the same over and over."""
    rows = shape[0] * shape[1]
    weight = weight_of(numbers, format, (REPEAT if rows > BEYOND else rows, shape[2]))
    if format in blocks.PLAIN_BYTES:  # values of the size that models have: the activation is neither linear nor zero
        weight.data = blocks.encode_plain(format, (weight.decode() * 2 / np.sqrt(shape[2])).astype(np.float32))
    return Weight(shape, format, repeated(weight, rows).data)


def moe_data(
    numbers: Numbers, format: str, rows: int, experts: int, k: int, hidden: int, inner: int, gated: bool = True, bias: bool = False, special: bool = False,
) -> MoeData:  # fmt: skip
    """Random ones; every row asks for the last expert, none for the second."""
    x, ids = numbers.normal(rows, hidden), _choice(numbers, rows, experts, k)
    weights = (numbers.uniform(rows, k) * 1.5).astype(np.float32)
    if special:
        x[1, 3], x[2, 0], weights[3, 0] = np.nan, 1e-40, 0.0
    shapes = ((experts, inner, hidden), (experts, inner, hidden), (experts, hidden, inner))
    stacks = [_stack(numbers, format, shape) if gated or i != 1 else None for i, shape in enumerate(shapes)]
    biases = [numbers.normal(*shape[:2]) if bias and (gated or i != 1) else None for i, shape in enumerate(shapes)]
    return MoeData(x, ids, weights, stacks, biases)


def _moe(
    case_id: str, session: Session, numbers: Numbers, format: str, rows: int, experts: int, k: int, hidden: int, inner: int, kind: str,
    gated: bool = True, bias: bool = False, gap: int = 0, special: bool = False, alone: int = 0,
    index_gap: int = 0,
) -> Outcome:  # fmt: skip
    """alone: so many rows instead, each in a call of its own. Where activations are rounded, values of the hidden row may lie at the edge of two codes, and
    with them the whole of a row may say little; one of several says enough (tests/conformance/test_power.py)."""
    data = moe_data(numbers, format, alone or rows, experts, k, hidden, inner, gated, bias, special)
    results = []
    for at in range(0, len(data.x), rows) if alone else (0,):
        part = slice(at, at + rows)
        inputs: list[Operand] = [In(data.x[part], "f32", "T", gap), In(data.ids[part], "i32", "T", index_gap), In(data.weights[part], "f32", "T", gap), *data.stacks]
        inputs += [None if b is None else In(b, gap=gap) for b in data.biases]
        if format in blocks.BLOCK_BYTES:
            kept_as_it_is(session, "moe", inputs, 3, attrs={"kind": kind})
        ran = session.bench.run("moe", inputs, [((rows, hidden), "f32")], {"kind": kind})
        results.append(ran.outs[0])
    ran.outs = [np.concatenate(results)]
    return expect(session, case_id, ran, [data.expected(kind, ran.numerics)])


def _no_expert(case_id: str, session: Session, numbers: Numbers, bad: int) -> Outcome:
    """An id that is no expert's is an error of an op that runs alone, and the backend works on."""
    stacks = [weight_of(numbers, "f32", shape) for shape in ((4, 32, 32), (4, 32, 32), (4, 32, 32))]
    x, weights = numbers.normal(2, 32), np.full((2, 2), 0.5, np.float32)

    def run(ids: list[list[int]]) -> Any:
        return session.bench.run("moe", [In(x, "f32", "T"), In(np.array(ids, np.int32), "i32", "T"), In(weights, "f32", "T"), *stacks], [((2, 32), "f32")])

    try:
        run([[0, 1], [bad, 2]])
    except (NotApplicable, Failure):
        raise
    except Exception:
        pass
    else:
        raise Failure("error", f"moe took expert {bad} of 4 without an error")
    good = [[0, 3], [2, 1]]
    ran = run(good)
    return expect(session, case_id, ran, [bounds_extended.moe(x, np.array(good), weights, [s.decode() for s in stacks], [None] * 3, "silu", ran.numerics)])


_EXPERTS: tuple[tuple[str, tuple[int, int, int, int, int], str, dict[str, Any], bool], ...] = (
    # name, (rows, experts, k, hidden, inner), kind, more, quick
    ("one", (1, 4, 2, 64, 96), "silu", {}, True),
    ("batch", (17, 8, 3, 96, 64), "silu", {"gap": 5}, True),
    ("oai", (5, 4, 2, 64, 64), "swiglu_oai", {"bias": True}, True),
    ("strided_bias", (5, 4, 2, 64, 96), "silu", {"bias": True, "gap": 3}, True),
    ("ungated", (3, 4, 1, 64, 32), "gelu_tanh", {"gated": False, "bias": True}, False),
    ("odd", (4, 5, 2, 33, 47), "silu", {}, False),
    ("special", (5, 4, 2, 64, 64), "silu", {"special": True}, False),
    ("empty", (0, 4, 2, 64, 64), "silu", {}, False),
    ("rows", (1100, 4, 2, 32, 32), "silu", {}, True),
    ("many", (7, 513, 10, 32, 32), "silu", {}, True),
    ("stack", (2, 513, 3, 130, 130), "silu", {}, True),
    ("deep", (3, 3, 1, 32, 16384), "silu", {}, False),
    ("wide", (3, 3, 1, 7168, 32), "silu", {}, False),
)  # fmt: skip


def cases() -> Iterator[Case]:
    """concat, the ways to choose, experts in every format."""
    for lead, widths in (((1,), (1, 1)), ((5,), (32, 7)), ((3, 4), (64, 16)), ((2, 1), (512, 64)), ((2, 128), (512, 64)), ((0, 2), (8, 8)), ((1100, 2), (9, 5)), ((2,), (40000, 30001)), ((66000,), (3, 2))):
        for gap in (0, 5):
            case_id = f"concat/f32/{'gap' if gap else 'row'}/t{'-h'.join(map(str, lead))}-n{widths[0]}_{widths[1]}/normal#exact"
            yield Case(case_id, "concat", "experts", bind(_concat, case_id, lead, widths, gap, False), quick=lead in ((3, 4), (1100, 2), (2, 128)))
    case_id = "concat/f32/row/t2-h2-n4_4/special#exact"
    yield Case(case_id, "concat", "experts", bind(_concat, case_id, (2, 2), (4, 4), 0, True))
    for name, rows, experts, kind, bias, gap, attrs, quick in _ROUTES:
        case_id = f"route_topk/f32/{'gap' if gap else 'row'}/t{rows}-e{experts}-k{attrs['k']}/{name}#bound"
        yield Case(case_id, "route_topk", "experts", bind(_route, case_id, rows, experts, kind, bias, gap, attrs), quick=quick, bin=f"route_topk|f32|{kind}|any")
    for name, sizes, kind, more, quick in _EXPERTS:
        case_id = f"moe/f32*f32/{'gap' if more.get('gap') else 'row'}/t{sizes[0]}-e{sizes[1]}-k{sizes[2]}-c{sizes[3]}-f{sizes[4]}/{name}#bound"
        yield Case(case_id, "moe", "experts", bind(_moe, case_id, "f32", *sizes, kind, **more), quick=quick, bin=f"moe|f32|{kind}|any")
    for format in ("f16", "bf16", *blocks.BLOCK_BYTES):
        block = max(blocks.BLOCK_BYTES.get(format, (32, 0))[0], 64)
        for name, rows, bias, alone in (("one", 1, False, ALONE), ("batch", 9, True, 0), ("rows", 600, False, 0)):
            case_id = f"moe/f32*{format}/row/t{rows}-e4-k2-c{block}-f{block}/{name}#bound"
            check = bind(_moe, case_id, format, rows, 4, 2, block, block, "silu", bias=bias, alone=alone)
            yield Case(case_id, "moe", "experts", check, quick=format == "q4_0", bin=calibrated(format, f"moe|{format}|silu|any"))
        stack = (2, 513, 3, 130, 130) if format in blocks.PLAIN_BYTES else (2, 257, 2, 256, 256)  # e · F + n and e · C + n beyond 65,536
        for name, sizes in (("stack", stack), ("deep", (2, 3, 1, block, 16384)), ("wide", (2, 3, 1, 7168, block))):
            case_id = f"moe/f32*{format}/row/t{sizes[0]}-e{sizes[1]}-k{sizes[2]}-c{sizes[3]}-f{sizes[4]}/{name}#bound"
            yield Case(case_id, "moe", "experts", bind(_moe, case_id, format, *sizes, "silu"), bin=calibrated(format, f"moe|{format}|silu|any"))
    case_id = "moe/f32*f32/gap/t5-e4-k2-c32-f32/ids_stepped#bound"
    stepped, dense = (bind(_moe, case_id, "f32", 5, 4, 2, 32, 32, "silu", index_gap=step) for step in (3, 0))
    yield Case(case_id, "moe", "experts", or_refused(stepped, dense), quick=True)
    for bad in (4, -1):
        case_id = f"moe/f32*f32/row/t2-e4-k2-c32-f32/expert{bad}#error"
        yield Case(case_id, "moe", "experts", bind(_no_expert, case_id, bad))
