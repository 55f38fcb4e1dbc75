"""embed: rows of a table, in every format; ids at both ends, and outside."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .. import blocks, bounds, oracle
from ..case import Case, Failure, NotApplicable, Outcome
from ..numbers import Numbers
from ..operands import In, Operand, Weight
from ..session import Session
from .common import bind, expect, or_refused
from .linear import FORMATS, REPEAT, VOCABULARY, block_of, calibrated, kept_as_it_is, repeated, weight_of

__all__ = ["cases", "embedded"]

EDGES = (32767, 65535, 131071)
"""Where ids of 15, 16 and 17 bits end."""
WIDEST = 16384
"""Of real models (Llama 3.1 405B)."""


def _embed(case_id: str, session: Session, numbers: Numbers, format: str, rows: int, width: int, count: int, gap: int = 0) -> Outcome:
    table = weight_of(numbers, format, (min(rows, REPEAT), width))
    edges = [i for edge in EDGES if edge + 1 < rows for i in (edge - 1, edge, edge + 1)]
    ids = np.array([0, rows - 1, *edges, *numbers.integers(max(count - 2 - len(edges), 0), 0, rows)][:count], np.int32)
    inputs: list[Operand] = [In(ids, "i32", "T", gap), repeated(table, rows)]
    kept_as_it_is(session, "embed", inputs, 1)
    ran = session.bench.run("embed", inputs, [((count, width), "f32")])
    return expect(session, case_id, ran, [embedded(ids % REPEAT, table)])


def embedded(ids: np.ndarray, table: Weight) -> bounds.Expected:
    """Rows of a table: of a plain one to the bit, of a coded one within a unit in the last place."""
    return bounds.copies(oracle.embed(ids, table.decode()), 0.0 if table.format in blocks.PLAIN_BYTES else 1.0)


def _outside(case_id: str, session: Session, numbers: Numbers, bad: int) -> Outcome:
    """An id outside of the table is an error, and the backend works on."""
    table = weight_of(numbers, "f32", (9, 8))
    good = np.array([0, 8, 3], np.int32)
    try:
        session.bench.run("embed", [In(np.array([0, bad, 1], np.int32), "i32", "T"), table], [((3, 8), "f32")])
    except (NotApplicable, Failure):
        raise
    except Exception:
        pass
    else:
        raise Failure("error", f"embed took id {bad} of a table of 9 rows without an error")
    ran = session.bench.run("embed", [In(good, "i32", "T"), table], [((3, 8), "f32")])
    return expect(session, case_id, ran, [bounds.copies(oracle.embed(good, table.decode()))])


def cases() -> Iterator[Case]:
    """Formats and sizes; ids outside."""
    for format in FORMATS:
        block = block_of(format, 32)
        rule, bin = ("exact", "") if format in blocks.PLAIN_BYTES else ("bound", calibrated(format, f"embed|{format}|any|any"))
        for rows, width, count in ((1, block, 1), (33, block, 5), (9, 2 * block, 70), (5, block, 0)):
            case_id = f"embed/i32*{format}/row/v{rows}-c{width}-n{count}/ends#{rule}"
            yield Case(case_id, "embed", "memory", bind(_embed, case_id, format, rows, width, count), required=format == "f32", quick=rows == 33, bin=bin)
        plain = format == "f32"
        for rows, width, count in ((VOCABULARY, block, 16), (VOCABULARY if plain else 33, block, 1100), (9, WIDEST, 5), *(((VOCABULARY, block, 66000),) if plain else ())):
            case_id = f"embed/i32*{format}/row/v{rows}-c{width}-n{count}/real#{rule}"
            must = plain and count <= 1100
            yield Case(case_id, "embed", "memory", bind(_embed, case_id, format, rows, width, count), required=must, quick=must, bin=bin)
    for gap, count in ((1, 9), (7, 70), (3, 1)):
        case_id = f"embed/i32*f32/gap/v33-c32-n{count}/ids_step{gap + 1}#exact"
        yield Case(case_id, "embed", "memory", or_refused(bind(_embed, case_id, "f32", 33, 32, count, gap), bind(_embed, case_id, "f32", 33, 32, count)), required=True, quick=gap == 1)
    for bad in (9, -1, 2**31 - 1):
        case_id = f"embed/i32*f32/row/v9-c8-n3/id{bad}#error"
        yield Case(case_id, "embed", "memory", bind(_outside, case_id, bad), required=True, quick=bad == 9)
