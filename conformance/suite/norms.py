"""rms_norm, layer_norm, softmax, rope, softcap: rows of many widths, all data classes, special values."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .. import bounds
from ..bounds import TINY, Expected
from ..case import Case, Failure, Outcome
from ..numbers import Numbers
from ..operands import In
from ..session import Session
from .common import bind, expect, or_refused, size_bin
from .linear import VOCABULARY

__all__ = ["cases"]

WIDTHS = (1, 2, 7, 33, 64, 255, 576, 1000, 4096, 8192)
KINDS = ("normal", "offset", "outlier", "spread", "positive")


def _norm(case_id: str, session: Session, numbers: Numbers, op: str, rows: int, width: int, kind: str, variant: str, heads: int = 0) -> Outcome:
    shape = (rows, heads, width) if heads else (rows, width)
    x = numbers.array(kind, *shape)
    if variant == "special":
        flat = x.reshape(-1, width)
        for row, value in enumerate((np.nan, -0.0, 1e18)[: len(flat)]):
            flat[row, width // 2] = value
    if variant == "zeros":
        x[...] = 0
    if variant == "huge":
        x *= np.float32(1e17)
    if variant == "far":  # a mean that one-pass variance drowns in
        x += np.float32(2000)
    if variant == "tiny":
        x *= np.float32(1e-12)
    weight, bias = (numbers.normal(width) + 1, numbers.normal(width)) if variant != "bare" else (None, None)
    eps = 1e-6 if variant != "eps" else 0.5
    gap = 5 if variant == "gap" else 0
    inputs = [In(x, "f32", "T", gap), None if weight is None else In(weight)]
    if op == "layer_norm":
        inputs.append(None if bias is None else In(bias))
    ran = session.bench.run(op, inputs, [(shape, "f32")], {"eps": eps})
    with np.errstate(all="ignore"):
        expected = bounds.rms_norm(x, weight, eps) if op == "rms_norm" else bounds.layer_norm(x, weight, bias, eps)
    return expect(session, case_id, ran, [expected])


def _softmax(case_id: str, session: Session, numbers: Numbers, rows: int, width: int, kind: str, variant: str) -> Outcome:
    x = numbers.array(kind, rows, width) * np.float32(4)
    for row, place in enumerate((-1, 0, width // 2)[:rows]):  # the ends matter
        x[row, place] = x[row].max()
    if variant == "special":
        for row, value in enumerate((np.nan, -np.inf, 1e30, -1e30)[:rows]):
            x[row, width // 2] = value
    ran = session.bench.run("softmax", [In(x, "f32", "T", 5 if variant == "gap" else 0)], [((rows, width), "f32")])
    with np.errstate(all="ignore"):
        expected = bounds.softmax(x)
    return expect(session, case_id, ran, [expected])


def _shifted(case_id: str, session: Session, numbers: Numbers) -> Outcome:
    """softmax(x + c) = softmax(x), to the bit where the shift is exact."""
    x = np.round(numbers.normal(3, 65) * 64) / 64
    outs = [session.bench.run("softmax", [In((x + np.float32(c)).astype(np.float32), "f32", "T")], [((3, 65), "f32")]) for c in (0, 256)]
    expected = Expected(outs[0].outs[0].astype(np.float64), np.zeros(1))
    return expect(session, case_id, outs[1], [Expected(expected.y, np.full(expected.y.shape, TINY))], "prop")


def _rope(
    case_id: str, session: Session, numbers: Numbers, shape: tuple[int, int, int], r: int, style: str, factor: float, positions: tuple[int, ...], gap: int, index_gap: int = 0,
) -> Outcome:  # fmt: skip
    x = numbers.normal(*shape)
    where = np.array([positions[i % len(positions)] for i in range(shape[0])], np.int32)
    inv_freq = (10000.0 ** (-np.arange(r) / max(r, 1))).astype(np.float32)
    ran = session.bench.run("rope", [In(x, "f32", "T", gap), In(where, "i32", "T", index_gap), In(inv_freq)], [(shape, "f32")], {"style": style, "factor": factor})
    return expect(session, case_id, ran, [bounds.rope(x, where, inv_freq, style, factor, ran.numerics)])


def _turning(case_id: str, session: Session, numbers: Numbers) -> Outcome:
    """rope keeps the length of every pair, and scores of a query and a key depend on the distance of their positions only."""
    inv_freq = (10000.0 ** (-np.arange(16) / 16)).astype(np.float32)
    q, k = numbers.normal(1, 1, 32), numbers.normal(1, 1, 32)

    def turned(x: np.ndarray, position: int) -> np.ndarray:
        ran = session.bench.run("rope", [In(x, "f32", "T"), In(np.array([position], np.int32), "i32", "T"), In(inv_freq)], [(x.shape, "f32")])
        return ran.outs[0].astype(np.float64)

    scores = [float((turned(q, p + 7) * turned(k, p)).sum()) for p in (0, 100, 5000)]
    allowed = 40 * bounds.U["f32"] * float(np.abs(q).sum() * np.abs(k).max())
    spread = max(scores) - min(scores)
    if spread > allowed:
        raise Failure("prop", f"scores at one distance differ by {spread:.3g} (allowed {allowed:.3g}) between positions 0, 100 and 5,000", margin=spread / allowed)
    length = abs(float(np.linalg.norm(turned(q, 5000)) - np.linalg.norm(q.astype(np.float64))))
    if length > allowed:
        raise Failure("prop", f"rope changes the length of a head by {length:.3g} (allowed {allowed:.3g})", margin=length / allowed)
    return Outcome(max(spread, length) / allowed)


def _softcap(case_id: str, session: Session, numbers: Numbers, rows: int, width: int, cap: float) -> Outcome:
    x = numbers.normal(rows, width) * np.float32(2 * cap)
    if rows > 2:
        x[0, 0], x[1, 0], x[2, 0] = np.nan, np.inf, -np.inf
    ran = session.bench.run("softcap", [In(x, "f32", "T")], [((rows, width), "f32")], {"cap": cap})
    return expect(session, case_id, ran, [bounds.softcap(x, cap)])


def cases() -> Iterator[Case]:
    """Norms and softmax over widths and classes, rope over styles and positions, softcap."""
    for op in ("rms_norm", "layer_norm"):
        for index, width in enumerate(WIDTHS):
            for variant in ("plain", "bare") if index % 2 else ("plain", "gap"):
                kind = KINDS[(index + (variant != "plain")) % len(KINDS)]
                yield _norm_case(op, 3 + index % 3, width, kind, variant, quick=width in (33, 4096) and variant == "plain")
            if width in (64, 1000):
                for kind in KINDS:
                    yield _norm_case(op, 2, width, kind, "class", quick=kind == "offset")
        for variant in ("special", "zeros", "huge", "tiny", "eps", "far"):
            yield _norm_case(op, 4, 40, "normal", variant, quick=variant in ("special", "eps", "far"))
        for rows, heads, width in ((6, 3, 64), (2, 128, 128), (2, 32, 256)):
            yield _norm_case(op, rows, width, "normal", "heads", heads=heads, quick=True)
        yield _norm_case(op, 0, 16, "normal", "empty", quick=False)
        yield _norm_case(op, 1100, 33, "normal", "real", quick=True)
        yield _norm_case(op, 2, 18432, "normal", "real", quick=True)
        yield _norm_case(op, 66000, 8, "normal", "real", quick=False, required=False)
    for index, width in enumerate((1, 2, 7, 33, 64, 1000, 4097, 32000)):
        for variant in ("plain", "gap"):
            kind = KINDS[(index + (variant == "gap")) % len(KINDS)]
            case_id = f"softmax/f32/{'gap' if variant == 'gap' else 'row'}/m3-n{width}/{kind}#bound"
            yield Case(case_id, "softmax", "rows", bind(_softmax, case_id, 3, width, kind, variant), required=True, quick=width in (33, 4097) and variant == "plain", bin=f"softmax|f32|{kind}|{size_bin(width)}")
    for rows, width, must in ((1100, 33, True), (2, 70000, True), (66000, 8, False)):
        case_id = f"softmax/f32/row/m{rows}-n{width}/normal.real#bound"
        yield Case(case_id, "softmax", "rows", bind(_softmax, case_id, rows, width, "normal", "plain"), required=must, quick=must, bin=f"softmax|f32|normal|{size_bin(width)}")
    case_id = "softmax/f32/row/m4-n40/special#bound"
    yield Case(case_id, "softmax", "rows", bind(_softmax, "softmax/special", 4, 40, "normal", "special"), required=True, quick=True)
    yield Case("softmax/f32/row/m0-n8/empty#bound", "softmax", "rows", bind(_softmax, "softmax/empty", 0, 8, "normal", "plain"), required=True)
    yield Case("softmax/f32/row/m3-n65/shift#prop", "softmax", "rows", bind(_shifted, "softmax/shift"), required=True)
    positions = ((0, 1, 4095), (131071, 65536, 131072), (17,))  # of powers of two alone, f32 angles are exact
    for index, (shape, r) in enumerate((((3, 2, 64), 32), ((5, 1, 80), 40), ((2, 4, 128), 32), ((4, 3, 10), 3), ((1, 1, 2), 1), ((0, 2, 8), 4), ((2, 128, 64), 32), ((3, 64, 128), 64), ((2, 32, 256), 128))):
        for style in ("half", "pairs"):
            for where, factor in zip(positions, (1.0, 1.25, 0.5), strict=True):
                gap = 6 * (index % 2)
                case_id = f"rope/f32/{'gap' if gap else 'row'}/t{shape[0]}-h{shape[1]}-d{shape[2]}-r{r}/{style}.p{where[-1]}.f{factor:g}#bound"
                yield Case(case_id, "rope", "rope", bind(_rope, case_id, shape, r, style, factor, where, gap), required=True, quick=index in (0, 2, 6, 8), bin=f"rope|f32|{style}|p{where[-1]}")
    for t, style, must in ((1100, "half", True), (1100, "pairs", True), (66000, "half", False)):  # positions of 18 bits, in no order
        case_id = f"rope/f32/row/t{t}-h2-d8-r4/{style}.real#bound"
        where = tuple((i * 104729 + 262143) % 262144 for i in range(t))
        yield Case(case_id, "rope", "rope", bind(_rope, case_id, (t, 2, 8), 4, style, 1.0, where, 0), required=must, quick=style == "half" and must, bin=f"rope|f32|{style}|p131072")
    case_id = "rope/f32/gap/t5-h2-d8-r4/positions_step2#bound"
    stepped, dense = (bind(_rope, case_id, (5, 2, 8), 4, "half", 1.0, (3, 70, 1, 9, 4000), 0, step) for step in (1, 0))
    yield Case(case_id, "rope", "rope", or_refused(stepped, dense), required=True, quick=True)
    yield Case("rope/f32/row/t1-h1-d32-r16/distance#prop", "rope", "rope", bind(_turning, "rope/distance"), required=True, quick=True)
    for rows, width, cap in ((3, 33, 30.0), (1, 1000, 50.0), (0, 8, 1.0), (1100, 33, 30.0), (2, VOCABULARY, 30.0)):
        case_id = f"softcap/f32/row/m{rows}-n{width}/cap{cap:g}#bound"
        yield Case(case_id, "softcap", "rows", bind(_softcap, case_id, rows, width, cap), quick=rows == 3 or width > 65536, bin="softcap|f32|normal|any")


def _norm_case(op: str, rows: int, width: int, kind: str, variant: str, quick: bool, heads: int = 0, required: bool = True) -> Case:
    layout = "gap" if variant == "gap" else "row"
    case_id = f"{op}/f32/{layout}/m{rows}{f'-h{heads}' if heads else ''}-n{width}/{kind}.{variant}#bound"

    def check(s: Session, g: Numbers) -> Outcome:
        return _norm(case_id, s, g, op, rows, width, kind, variant, heads)

    return Case(case_id, op, "rows", check, required=required, quick=quick, bin=f"{op}|f32|{kind}|{size_bin(width)}")
