"""embed: rows of a table, in every format; ids at both ends, and outside."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .. import blocks, bounds, oracle
from ..bench import In, Weight
from ..case import Case, Failure, NotApplicable, Outcome
from ..numbers import Numbers
from ..session import Session
from .common import bind, expect, or_refused
from .linear import weight_of

__all__ = ["cases"]

EDGES = (32767, 65535, 131071)
"""Where ids of 15, 16 and 17 bits end."""
REAL = {32: ("f32", "f16", "bf16", "q8_0", "q4_0"), 64: ("int4g64", "int8g64"), 256: ("q4_k", "q6_k")}
"""Width -> formats in which tables of real vocabularies are kept."""


def _embed(case_id: str, session: Session, numbers: Numbers, format: str, rows: int, width: int, count: int, gap: int = 0) -> Outcome:
    table = weight_of(numbers, format, (rows, width))
    edges = [i for edge in EDGES if edge + 1 < rows for i in (edge - 1, edge, edge + 1)]
    ids = np.array([0, rows - 1, *edges, *numbers.integers(max(count - 2 - len(edges), 0), 0, rows)][:count], np.int32)
    ran = session.bench.run("embed", [In(ids, "i32", "T", gap), table], [((count, width), "f32")])
    if ran.kept[1] != format:
        raise NotApplicable(f"{format} tables are decoded to {ran.kept[1]} before this backend sees them")
    plain = format in blocks.PLAIN_BYTES
    asked = table.data.reshape(rows, -1)[ids]  # a whole table in f64 takes gigabytes
    values = Weight((count, width), format, asked.reshape(-1)).decode()
    return expect(session, case_id, ran, [bounds.copies(oracle.embed(np.arange(count), values), 0.0 if plain else 1.0)])


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
    for format in (*blocks.PLAIN_BYTES, *blocks.BLOCK_BYTES):
        block = 32 if format in blocks.PLAIN_BYTES else blocks.BLOCK_BYTES[format][0]
        for rows, width, count in ((1, block, 1), (33, block, 5), (9, 2 * block, 70), (5, block, 0)):
            case_id = f"embed/i32*{format}/row/v{rows}-c{width}-n{count}/ends#exact"
            yield Case(case_id, "embed", "memory", bind(_embed, case_id, format, rows, width, count), required=format == "f32", quick=rows == 33)
        for width, held in REAL.items():
            rows = 262144 if width < 256 else 131075
            for count in (16, *((1100, 66000) if format == "f32" else ())) if format in held else ():
                case_id = f"embed/i32*{format}/row/v{rows}-c{width}-n{count}/real#exact"
                must = format == "f32" and count <= 1100
                yield Case(case_id, "embed", "memory", bind(_embed, case_id, format, rows, width, count), required=must, quick=must)
    for gap, count in ((1, 9), (7, 70), (3, 1)):
        case_id = f"embed/i32*f32/gap/v33-c32-n{count}/ids_step{gap + 1}#exact"
        yield Case(case_id, "embed", "memory", or_refused(bind(_embed, case_id, "f32", 33, 32, count, gap), bind(_embed, case_id, "f32", 33, 32, count)), required=True, quick=gap == 1)
    for bad in (9, -1, 2**31 - 1):
        case_id = f"embed/i32*f32/row/v9-c8-n3/id{bad}#error"
        yield Case(case_id, "embed", "memory", bind(_outside, case_id, bad), required=True, quick=bad == 9)
