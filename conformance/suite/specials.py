"""Numbers that are not finite, where no other case has them: in both operands of products, in rotated heads, queries, biases and tables. And heads that are
windows on wider ones, as models with a gate or a latent beside each head have them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fastllm.api import CORE_OPS

from .. import blocks, bounds, oracle
from .. import oracle_extended as extended
from ..bounds import Expected
from ..case import Case, Failure, Outcome
from ..numbers import Numbers
from ..operands import In, Operand, Weight
from ..session import Session
from .attention import Setup, paged
from .common import bind, expect, or_refused
from .linear import kept_as_it_is, weight_of

__all__ = ["cases"]

VALUES = (np.nan, np.inf, -np.inf, -0.0, 65504.0, 1e-40)


def _matmul(case_id: str, session: Session, numbers: Numbers, which: str) -> Outcome:
    """One head of a row, or one row of a head's matrix."""
    a, b = numbers.normal(7, 3, 33), numbers.normal(3, 9, 33)
    for row, value in enumerate(VALUES):
        if which == "rows":
            a[row, row % 3, 16] = value
        elif row < 4:
            b[row % 3, row, 16] = value
    weight = Weight(b.shape, "f32", blocks.encode_plain("f32", b))
    ran = session.bench.run("matmul", [In(a, "f32", "T"), weight], [((7, 3, 9), "f32")])
    with np.errstate(all="ignore"):
        return expect(session, case_id, ran, [bounds.matmul(a.astype(np.float64), b.astype(np.float64), ran.numerics)])


def _weights(case_id: str, session: Session, numbers: Numbers, format: str) -> Outcome:
    """Rows of a weight, and a bias: each reaches its own output and no other."""
    x, w, bias = numbers.normal(6, 70), numbers.normal(40, 70), numbers.normal(40)
    w[3, 35], w[17, 0], w[32, 69], bias[5], bias[33] = np.nan, np.inf, -np.inf, np.nan, np.inf
    weight = Weight(w.shape, format, blocks.encode_plain(format, w))
    inputs: list[Operand] = [In(x, "f32", "T"), weight, In(bias)]
    kept_as_it_is(session, "linear", inputs, 1)
    ran = session.bench.run("linear", inputs, [((6, 40), "f32")])
    with np.errstate(all="ignore"):
        return expect(session, case_id, ran, [bounds.linear(x, weight.decode(), bias, ran.numerics)])


def _rope(case_id: str, session: Session, numbers: Numbers, style: str) -> Outcome:
    """Each reaches its pair and nothing else; what is behind the pairs is copied."""
    x, where = numbers.normal(6, 3, 24), np.array([1, 2, 7, 70, 3, 5], np.int32)
    for row, value in enumerate(VALUES):
        x[row, row % 3, row] = value
    x[0, 0, 20], x[1, 2, 23] = np.nan, np.inf
    freq = (10000.0 ** (-np.arange(8) / 8)).astype(np.float32)
    ran = session.bench.run("rope", [In(x, "f32", "T"), In(where, "i32", "T"), In(freq)], [(x.shape, "f32")], {"style": style})
    with np.errstate(all="ignore"):
        return expect(session, case_id, ran, [bounds.rope(x, where, freq, style, 1.0, ran.numerics)])


def _embed(case_id: str, session: Session, numbers: Numbers, format: str) -> Outcome:
    """Rows of a table are copied, whatever they hold."""
    table = numbers.normal(9, 40)
    table[2, :5] = (np.nan, np.inf, -np.inf, -0.0, 6e-8 if format == "f16" else 1e-40)
    ids = np.array([2, 0, 2, 8], np.int32)
    weight = Weight(table.shape, format, blocks.encode_plain(format, table))
    inputs: list[Operand] = [In(ids, "i32", "T"), weight]
    kept_as_it_is(session, "embed", inputs, 1)
    ran = session.bench.run("embed", inputs, [((4, 40), "f32")])
    return expect(session, case_id, ran, [bounds.copies(oracle.embed(ids, weight.decode()))])


def _query(case_id: str, session: Session, numbers: Numbers) -> Outcome:
    """NaN in a head of a row's query is in that head of that row, and nowhere else."""
    setup = Setup((50, 20), (20, 1), 4, 2, 32, 32, 16)
    bad = [(0, 1), (7, 0), (19, 3), (20, 2)]
    with paged(session, setup, numbers) as kit:
        where = [setup.positions(s) for s in range(2)]
        query = numbers.normal(21, 4, 32)
        for row, head in bad:
            query[row, head, 5] = np.nan
        ran = kit.attend([query[:20], query[20:]], where)
    wanted = np.zeros((21, 4), bool)
    wanted[tuple(zip(*bad, strict=True))] = True
    found = np.isnan(ran.outs[0])
    if not np.array_equal(found.any(-1), wanted) or not np.array_equal(found.all(-1), wanted):
        row, head = (int(i) for i in np.argwhere((found.any(-1) != wanted) | (found.all(-1) != wanted))[0])
        raise Failure("bound", f"NaN in a query should reach its own head of its own row; row {row}, head {head} differs", margin=float("inf"), index=(row, head))
    return Outcome(0.0, impl=ran.yes.impl, native=ran.native)


def _windows(case_id: str, session: Session, numbers: Numbers, op: str, inner: int, gap: int) -> Outcome:
    """Each head is a part of a wider one: the step from head to head is not its width."""
    x, y = numbers.normal(5, 3, 32), numbers.normal(5, 3, 32)
    wide = In(x, "f32", "T", gap, inner=inner)
    where, freq, norm = numbers.integers(5, 0, 900).astype(np.int32), (10000.0 ** (-np.arange(16) / 16)).astype(np.float32), numbers.normal(32)
    inputs: dict[str, list[Operand]] = {
        "rms_norm": [wide, In(norm)], "rope": [wide, In(where, "i32", "T"), In(freq)], "act_mul": [wide, In(y, "f32", "T")],
        "concat": [In(y, "f32", "T"), wide], "matmul": [wide, weight_of(numbers, "f32", (3, 9, 32))],
    }  # fmt: skip
    width = {"concat": 64, "matmul": 9}.get(op, 32)
    ran = session.bench.run(op, inputs[op], [((5, 3, width), "f32")], {"rms_norm": {"eps": 1e-5}}.get(op, {}))
    matrix = inputs["matmul"][1]
    assert isinstance(matrix, Weight)
    expected: Expected = {
        "rms_norm": lambda: bounds.rms_norm(x, norm, 1e-5), "rope": lambda: bounds.rope(x, where, freq, "half", 1.0, ran.numerics),
        "act_mul": lambda: bounds.act_mul(x, y, "silu"), "concat": lambda: bounds.copies(extended.concat(y, x)),
        "matmul": lambda: bounds.matmul(x.astype(np.float64), matrix.decode(), ran.numerics),
    }[op]()  # fmt: skip
    return expect(session, case_id, ran, [expected])


def cases() -> Iterator[Case]:
    """Special values; windows of heads, which a backend may refuse when it is asked."""
    for which in ("rows", "matrix"):
        case_id = f"matmul/f32*f32/row/t7-h3-n9-k33/special.{which}#bound"
        yield Case(case_id, "matmul", "matmul", bind(_matmul, case_id, which), required=True, quick=which == "rows")
    for style in ("half", "pairs"):
        case_id = f"rope/f32/row/t6-h3-d24-r8/{style}.special#bound"
        yield Case(case_id, "rope", "rope", bind(_rope, case_id, style), required=True, quick=style == "half")
    for format in blocks.PLAIN_BYTES:
        case_id = f"linear/f32*{format}/row/m6-n40-k70/special.weight#bound"
        yield Case(case_id, "linear", "linear.plain", bind(_weights, case_id, format), required=format == "f32", quick=format == "f32")
        case_id = f"embed/i32*{format}/row/v9-c40-n4/special#exact"
        yield Case(case_id, "embed", "memory", bind(_embed, case_id, format), required=format == "f32", quick=format == "f32")
    case_id = "attention/f32/row/l50_20/nan_query#bound"
    yield Case(case_id, "attention", "attention", bind(_query, case_id), required=True, quick=True)
    for op in ("rms_norm", "rope", "act_mul", "concat", "matmul"):
        for inner, gap in ((32, 0), (7, 5)):
            types = "f32*f32" if op == "matmul" else "f32"
            case_id = f"{op}/{types}/gap/t5-h3-n32/heads_step{32 + inner}#{'exact' if op == 'concat' else 'bound'}"
            check = or_refused(bind(_windows, case_id, op, inner, gap), bind(_windows, case_id, op, 0, 0))
            yield Case(case_id, op, {"concat": "experts", "act_mul": "elementwise", "matmul": "matmul", "rope": "rope"}.get(op, "rows"), check, required=op in CORE_OPS, quick=inner == 32)
