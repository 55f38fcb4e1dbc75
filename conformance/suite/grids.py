"""More rows times heads than 16 bits count, which neither the cases with many rows nor those with many heads have: a long prompt of a large model.

Devices launch one group of work items for each head of each row, in a grid whose second side often ends at 65,535.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .. import bounds
from .. import oracle_extended as extended
from ..bounds import Expected
from ..case import Case, Outcome
from ..numbers import Numbers
from ..operands import In, Operand
from ..session import Session
from .attention import Setup, paged
from .common import bind, expect
from .linear import weight_of

__all__ = ["cases"]

ROWS, HEADS, WIDTH = 1030, 64, 8
"""65,920 heads of rows."""


def _op(case_id: str, session: Session, numbers: Numbers, op: str) -> Outcome:
    x, y, norm = numbers.normal(ROWS, HEADS, WIDTH), numbers.normal(ROWS, HEADS, WIDTH), numbers.normal(WIDTH)
    where, freq = np.arange(ROWS, dtype=np.int32), (10000.0 ** (-np.arange(WIDTH // 2) / (WIDTH // 2))).astype(np.float32)
    matrix = weight_of(numbers, "f32", (HEADS, WIDTH, WIDTH))
    inputs: dict[str, list[Operand]] = {
        "rms_norm": [In(x, "f32", "T"), In(norm)], "rope": [In(x, "f32", "T"), In(where, "i32", "T"), In(freq)], "add": [In(x, "f32", "T"), In(y, "f32", "T")],
        "concat": [In(x, "f32", "T"), In(y, "f32", "T")], "matmul": [In(x, "f32", "T"), matrix],
    }  # fmt: skip
    ran = session.bench.run(op, inputs[op], [((ROWS, HEADS, 2 * WIDTH if op == "concat" else WIDTH), "f32")], {"eps": 1e-5} if op == "rms_norm" else {})
    if op == "rms_norm":
        wanted = bounds.rms_norm(x, norm, 1e-5)
    elif op == "rope":
        wanted = bounds.rope(x, where, freq, "half", 1.0, ran.numerics)
    elif op == "matmul":
        wanted = bounds.matmul(x.astype(np.float64), matrix.decode(), ran.numerics)
    else:
        wanted = bounds.copies(extended.concat(x, y)) if op == "concat" else bounds.binary(op, x, y)
    return expect(session, case_id, ran, [wanted])


def _cached(case_id: str, session: Session, numbers: Numbers, op: str) -> Outcome:
    """A prompt is written in one call, and read with a window of one key, which gives the values to the bit."""
    setup = Setup((ROWS,), (ROWS,), HEADS, HEADS if op == "kv_write" else 1, WIDTH, WIDTH, 64)
    with paged(session, setup, numbers) as kit:
        where = setup.positions(0)
        ran = kit.attend([numbers.normal(ROWS, HEADS, WIDTH)], [where], window=1)
        values = bounds.round_to(kit.values[0], ran.yes.weight).repeat(setup.heads // setup.kv_heads, axis=1)
        return expect(session, case_id, ran, [Expected(values, np.zeros(values.shape), exact=True)])


def cases() -> Iterator[Case]:
    """Ops on heads of rows."""
    for op, group, required in (("rms_norm", "rows", True), ("rope", "rope", True), ("add", "elementwise", True), ("concat", "experts", False), ("matmul", "matmul", True)):
        types, rule = "f32*f32" if op == "matmul" else "f32", "exact" if op in ("add", "concat") else "bound"
        case_id = f"{op}/{types}/row/t{ROWS}-h{HEADS}-n{WIDTH}/grid#{rule}"
        yield Case(case_id, op, group, bind(_op, case_id, op), required=required)
    for op in ("attention", "kv_write"):
        case_id = f"{op}/f32/row/t{ROWS}-h{HEADS}-d{WIDTH}/grid#exact"
        yield Case(case_id, op, "contexts", bind(_cached, case_id, op), required=True)
