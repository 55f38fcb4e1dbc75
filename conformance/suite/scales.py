"""Weights whose block scales are small, large and zero: what real files have, and other cases, whose scales are all near 0.02, have not.

A row that hardly matters has scales below 2^-14, where f16 has fewer bits (subnormal numbers); a converter, a kernel or a device that takes those for
zero is right in every other case. So is one that keeps a power of two of mxfp4, or the f32 scale of fp8, as f16. Each row has scales of one size, so
that no large product hides a small one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .. import blocks, bounds, oracle
from ..case import Case, Outcome
from ..numbers import Numbers
from ..operands import In, Operand, Weight
from ..session import Session
from .common import bind, expect
from .linear import block_of, kept_as_it_is, minimum_of

__all__ = ["cases", "scaled"]

ROWS = 41
"""Of the weight: scales of 2^-24 (the least of f16) to 2^15, and 0."""


def scaled(numbers: Numbers, format: str, k: int) -> Weight:
    """A weight [ROWS, k] of random codes: the scales of row r are near 2^(r - 25), those of row 0 are zero; of mxfp4 and fp8g128 near 2^(3r - 63)."""
    weight = Weight((ROWS, k), format, blocks.random_blocks(numbers, format, ROWS * k))
    parts = weight.data.reshape(ROWS, -1, blocks.BLOCK_BYTES[format][1])
    size = np.arange(ROWS)[:, None]
    if format == "mxfp4":
        parts[..., 0] = 127 + 3 * size - 63
        return weight
    if format == "fp8g128":
        factors = np.ldexp(1 + numbers.uniform(*parts.shape[:2]), 3 * size - 63).astype("<f4")
        parts[..., :4] = factors[..., None].view(np.uint8)
        return weight
    for at in blocks.SCALES.get(format, (0,)):
        factors = np.ldexp(1 + 0.9 * numbers.uniform(*parts.shape[:2]), size - 25) * np.where(numbers.uniform(*parts.shape[:2]) < 0.5, -1, 1)
        factors[0] = 0
        parts[..., at : at + 2] = factors.astype("<f2")[..., None].view(np.uint8)
    return weight


def _linear(case_id: str, session: Session, numbers: Numbers, format: str, rows: int) -> Outcome:
    k = block_of(format, 128)
    weight, x = scaled(numbers, format, k), numbers.normal(rows, k)
    inputs: list[Operand] = [In(x, "f32", "T"), weight, None]
    kept_as_it_is(session, "linear", inputs, 1)
    ran = session.bench.run("linear", inputs, [((rows, ROWS), "f32")])
    return expect(session, case_id, ran, [bounds.linear(x, weight.decode(), None, ran.numerics, minimum_of(weight))])


def _embed(case_id: str, session: Session, numbers: Numbers, format: str) -> Outcome:
    table, ids = scaled(numbers, format, block_of(format, 32)), numbers.permutation(ROWS).astype(np.int32)
    inputs: list[Operand] = [In(ids, "i32", "T"), table]
    kept_as_it_is(session, "embed", inputs, 1)
    ran = session.bench.run("embed", inputs, [((ROWS, table.shape[1]), "f32")])
    return expect(session, case_id, ran, [bounds.copies(oracle.embed(ids, table.decode()), 1.0)])


def cases() -> Iterator[Case]:
    """One row and more than a tile of them, and a table, in every block format."""
    for format in blocks.BLOCK_BYTES:
        block = block_of(format, 32)
        for rows in (1, 35):
            case_id = f"linear/f32*{format}/row/m{rows}-n{ROWS}-k{block_of(format, 128)}/scales#bound"
            yield Case(case_id, "linear", "linear.scales", bind(_linear, case_id, format, rows), quick=rows == 1 and format in ("q4_0", "mxfp4"))
        case_id = f"embed/i32*{format}/row/v{ROWS}-c{block}-n{ROWS}/scales#bound"
        yield Case(case_id, "embed", "memory", bind(_embed, case_id, format), quick=format == "q4_0")
