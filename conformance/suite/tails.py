"""Sums that end within a super-block of 256, as those of many models do (1,152 products in Gemma 3 1B, 2,880 in gpt-oss), and groups of more than 64.

Sums of other cases are short, or of a length that 256 divides: a kernel that takes 256 products at a time may compute its tail by other code. Which format
it is does not matter to that, so each has it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .. import bounds, oracle
from ..case import Case, Outcome
from ..numbers import Numbers
from ..operands import In, Operand
from ..session import Session
from .common import bind, expect
from .elementwise import quantized
from .linear import FORMATS, block_of, kept_as_it_is, minimum_of, weight_of

__all__ = ["cases"]

LENGTHS = (1152, 2880)
GROUPS = (128, 256)


def _linear(case_id: str, session: Session, numbers: Numbers, format: str, k: int, rows: int) -> Outcome:
    """Activations that are large at the end of the sum, where the tail is, and small before it."""
    x, weight, bias = numbers.normal(rows, k), weight_of(numbers, format, (40, k)), numbers.normal(40)
    x[:, : k // 256 * 256] *= np.float32(0.125)
    inputs: list[Operand] = [In(x, "f32", "T"), weight, In(bias)]
    kept_as_it_is(session, "linear", inputs, 1)
    ran = session.bench.run("linear", inputs, [((rows, 40), "f32")])
    return expect(session, case_id, ran, [bounds.linear(x, weight.decode(), bias, ran.numerics, minimum_of(weight))])


def _quantize(case_id: str, session: Session, numbers: Numbers, group: int) -> Outcome:
    return quantized(case_id, session, numbers.normal(5, 3 * group), group)


def _dequantize(case_id: str, session: Session, numbers: Numbers, group: int) -> Outcome:
    codes, scales = numbers.integers(15 * group, -127, 128).astype(np.int8).reshape(5, 3 * group), np.abs(numbers.normal(5, 3)) + np.float32(0.01)
    ran = session.bench.run("dequantize", [In(codes, "i8", "T"), In(scales, "f32", "T")], [(codes.shape, "f32")], {"group": group})
    return expect(session, case_id, ran, [bounds.copies(oracle.dequantize(codes, scales, group), 1.0)])


def cases() -> Iterator[Case]:
    """linear of every format whose blocks may end there; quantize and dequantize."""
    for format in FORMATS:
        for length in LENGTHS:
            k = block_of(format, length)
            for rows in (1, 35) if k % 256 else ():
                case_id = f"linear/f32*{format}/row/m{rows}-n40-k{k}/tail#bound"
                yield Case(case_id, "linear", "linear.tails", bind(_linear, case_id, format, k, rows), required=format == "f32", quick=format == "q4_0" and length == LENGTHS[0])
    for group in GROUPS:
        case_id = f"quantize/f32/row/m5-n{3 * group}/wide.g{group}#bound"
        yield Case(case_id, "quantize", "elementwise", bind(_quantize, case_id, group), required=True)
        case_id = f"dequantize/i8/row/m5-n{3 * group}/wide.g{group}#bound"
        yield Case(case_id, "dequantize", "elementwise", bind(_dequantize, case_id, group), required=True)
