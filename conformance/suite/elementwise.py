"""act_mul, add, mul, quantize, dequantize."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fastllm.api import ACTIVATIONS

from .. import bounds, oracle
from ..bounds import TINY, Expected, U
from ..case import Case, Failure, Outcome
from ..numbers import Numbers
from ..operands import In
from ..session import Session
from .common import bind, expect

__all__ = ["cases", "quantized"]


def _act(case_id: str, session: Session, numbers: Numbers, kind: str, rows: int, width: int, gated: bool, special: bool, gap: int) -> Outcome:
    gate = numbers.normal(rows, width) * np.float32(4)
    if width > 100:
        gate[0] = np.linspace(-30, 30, width)
    if special:
        gate[0, :9] = (np.nan, np.inf, -np.inf, -0.0, 1e-42, 3e38, -3e38, 88.8, -88.8)
        if kind in ("silu", "gelu", "gelu_tanh", "swiglu_oai"):
            gate[0, 2] = -20.0  # −inf · 0 is a matter of how the formula is written
    up = numbers.normal(rows, width) if gated else None
    if special and up is not None:
        up[0, 0], up[0, 5:7] = 1.0, 0.5
    inputs = [In(gate, "f32", "T", gap), None if up is None else In(up, "f32", "T", gap)]
    ran = session.bench.run("act_mul", inputs, [((rows, width), "f32")], {"kind": kind})
    with np.errstate(all="ignore"):
        expected = bounds.act_mul(gate, up, kind)
    return expect(session, case_id, ran, [expected])


def _binary(case_id: str, session: Session, numbers: Numbers, op: str, form: str, rows: int, width: int, special: bool, gap: int, heads: int = 3) -> Outcome:
    shape = (rows, heads, width) if form == "heads" else (rows, width)
    x = numbers.normal(*shape)
    y = {"same": lambda: numbers.normal(*shape), "heads": lambda: numbers.normal(*shape), "last": lambda: numbers.normal(width),
         "one": lambda: numbers.normal(1), "rows": lambda: numbers.normal(rows, 1)}[form]()  # fmt: skip
    if special:
        x[0, :6] = (np.nan, np.inf, -np.inf, -0.0, 3e38, 65504)
        y[0, :6] = (1, 1, 2, 0.0, 3e38, 65504)
    lead = "T" if form in ("same", "heads", "rows") else ""
    ran = session.bench.run(op, [In(x, "f32", "T", gap), In(y, "f32", lead, gap if form in ("same", "heads") else 0)], [(shape, "f32")])
    return expect(session, case_id, ran, [bounds.binary(op, x, y)])


def _quantize(case_id: str, session: Session, numbers: Numbers, rows: int, width: int, group: int, kind: str) -> Outcome:
    x = numbers.array(kind, rows, width)
    if rows > 1:
        x[1, :group] = 0
    return quantized(case_id, session, x, group)


def quantized(case_id: str, session: Session, x: np.ndarray, group: int) -> Outcome:
    """Runs quantize on x f32 [rows, width] and judges codes and scales. Raises Failure."""
    rows, width = x.shape
    ran = session.bench.run("quantize", [In(x, "f32", "T")], [((rows, width), "i8"), ((rows, width // group), "f32")], {"group": group})
    codes, scales = oracle.quantize(x, group)
    found, found_scales = ran.outs[0].astype(np.float64), ran.outs[1]
    near = 4 * U["f32"] * np.maximum(np.abs(codes), 1)  # so far from an edge, either of its codes is right
    over = np.abs(found - codes) - 0.5
    if (over > near).any():
        at = tuple(int(i) for i in np.argwhere(over > near)[0])
        raise Failure("bound", f"{ran.yes.impl}: code {list(at)} is {found[at]:g}; x / scale is {codes[at]:.6f}, where {np.rint(codes[at]):g} is right", margin=float((over / near).max()), index=at)
    used = float((over / near).max(initial=0.0))
    ran.outs = [found_scales]
    outcome = expect(session, case_id, ran, [Expected(scales, 2 * U["f32"] * scales + TINY)])
    outcome.margin = max(outcome.margin or 0.0, used)
    return outcome


def _dequantize(case_id: str, session: Session, numbers: Numbers, rows: int, width: int, group: int) -> Outcome:
    codes = (numbers.integers(rows * width, -127, 128)).astype(np.int8).reshape(rows, width)
    scales = np.abs(numbers.normal(rows, width // group)) + np.float32(0.01)
    ran = session.bench.run("dequantize", [In(codes, "i8", "T"), In(scales, "f32", "T")], [((rows, width), "f32")], {"group": group})
    return expect(session, case_id, ran, [bounds.copies(oracle.dequantize(codes, scales, group), 1.0)])


def _twice(case_id: str, session: Session, numbers: Numbers) -> Outcome:
    """Quantising what was dequantised gives the same codes, to the bit: twice is once."""
    x, bench = numbers.normal(3, 64), session.bench
    outs = [((3, 64), "i8"), ((3, 2), "f32")]
    once = bench.run("quantize", [In(x, "f32", "T")], outs, {"group": 32})
    back = bench.run("dequantize", [In(once.outs[0], "i8", "T"), In(once.outs[1], "f32", "T")], [((3, 64), "f32")], {"group": 32})
    again = bench.run("quantize", [In(back.outs[0], "f32", "T")], outs, {"group": 32})
    again.outs = again.outs[:1]
    return expect(session, case_id, again, [Expected(once.outs[0].astype(np.float64), np.zeros((3, 64)), exact=True)], "prop")


def cases() -> Iterator[Case]:
    """Every activation, gated and alone; every form of y; groups of quantize."""
    for kind in ACTIVATIONS:
        for index, (rows, width, gated) in enumerate(((1, 1, True), (3, 33, False), (2, 1000, True), (5, 4097, False), (1, 8192, True), (0, 8, True))):
            case_id = f"act_mul/f32/{'gap' if index == 1 else 'row'}/m{rows}-n{width}/{kind}{'.gated' if gated else ''}#bound"
            yield Case(case_id, "act_mul", "elementwise", bind(_act, case_id, kind, rows, width, gated, False, 4 * (index == 1)), required=True, quick=index == 2, bin=f"act_mul|f32|{kind}|any")
        for rows, width, must in ((1100, 33, True), (2, 70000, True), (66000, 3, False)):
            case_id = f"act_mul/f32/row/m{rows}-n{width}/{kind}.gated.real#bound"
            quick = must and kind in ("silu", "tanh")
            yield Case(case_id, "act_mul", "elementwise", bind(_act, case_id, kind, rows, width, True, False, 0), required=must, quick=quick, bin=f"act_mul|f32|{kind}|any")
        case_id = f"act_mul/f32/row/m2-n17/{kind}.special#bound"
        yield Case(case_id, "act_mul", "elementwise", bind(_act, case_id, kind, 2, 17, kind == 'silu', True, 0), required=True, quick=kind in ("silu", "tanh"))
    for op in ("add", "mul"):
        for form in ("same", "heads", "last", "one", *(["rows"] if op == "mul" else [])):
            for rows, width in ((1, 1), (4, 33), (7, 1000), (0, 5), (1100, 17), (2, 70000), (66000, 3)):
                gap = 3 if width == 33 and form != "rows" else 0
                case_id = f"{op}/f32/{'gap' if gap else 'row'}/m{rows}-n{width}/{form}#exact"
                yield Case(case_id, op, "elementwise", bind(_binary, case_id, op, form, rows, width, False, gap), required=rows <= 1100, quick=width in (17, 33, 70000))
        case_id = f"{op}/f32/row/m2-h128-n128/heads#exact"
        yield Case(case_id, op, "elementwise", bind(_binary, case_id, op, "heads", 2, 128, False, 0, 128), required=True, quick=True)
        case_id = f"{op}/f32/row/m2-n9/special#exact"
        yield Case(case_id, op, "elementwise", bind(_binary, case_id, op, "same", 2, 9, True, 0), required=True, quick=True)
    for rows, width, group in ((1, 32, 32), (5, 128, 16), (3, 96, 32), (2, 256, 64), (0, 32, 32), (1100, 64, 32), (2, 70016, 32), (66000, 32, 32)):
        for kind in ("normal", "outlier", "spread"):
            case_id = f"quantize/f32/row/m{rows}-n{width}/{kind}.g{group}#bound"
            yield Case(case_id, "quantize", "elementwise", bind(_quantize, case_id, rows, width, group, kind), required=rows <= 1100, quick=width == 96 or (rows <= 1100 and max(rows, width) >= 1100 and kind == "normal"), bin=f"quantize|f32|{kind}|any")
        case_id = f"dequantize/i8/row/m{rows}-n{width}/g{group}#bound"
        yield Case(case_id, "dequantize", "elementwise", bind(_dequantize, case_id, rows, width, group), required=rows <= 1100, quick=width == 96 or max(rows, width) >= 1100, bin="dequantize|i8|normal|any")
    yield Case("quantize/f32/row/m3-n64/twice#prop", "quantize", "elementwise", bind(_twice, "quantize/twice"), required=True)
