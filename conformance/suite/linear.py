"""linear and matmul: every weight format, sizes at and around the edges of blocks, all data classes, special values."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .. import blocks, bounds
from ..bench import In, Operand, Weight
from ..bounds import TINY, Expected
from ..case import Case, NotApplicable, Outcome
from ..numbers import Numbers
from ..session import Session
from .common import bind, expect, size_bin

__all__ = ["SHAPES", "cases", "minimum_of", "weight_of"]

SHAPES = (  # (rows, N, K, quick): pairwise; a large K goes with few outputs
    (1, 33, 1, False), (2, 1, 31, False), (3, 32, 32, False), (5, 33, 257, True), (8, 127, 128, False), (17, 31, 256, True),
    (1, 128, 256, True), (64, 33, 127, False), (2, 256, 4096, False), (1, 16, 11008, True), (512, 8, 33, False), (0, 7, 64, True),
    (3, 4096, 33, False), (2, 11008, 32, False), (80, 33, 4096, False), (2, 5, 28672, True),
)  # fmt: skip
REAL: dict[tuple[int, int, int], tuple[str, ...]] = {  # sizes of real models, where a count of 16 bits or a buffer for the usual ones ends -> formats
    (1, 262144, 32): ("f32", "f16", "bf16", "q8_0", "q4_0"), (2, 65569, 64): ("f32", "f16", "bf16", "q8_0", "q4_0", "int4g64", "int8g64"),
    (1, 65569, 256): ("q4_k", "q6_k"), (1100, 9, 32): ("f32", "f16", "bf16", "q8_0", "q4_0"), (2, 7, 53248): ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_k", "q6_k"),
    (66000, 3, 32): ("f32", "q8_0"), (2, 3, 66048): ("f32", "q8_0"),
}  # fmt: skip
BEYOND = 65536
"""More rows or products than this are no model's; a backend may answer No."""
MATMULS = (  # (rows, heads, N, K)
    (1, 1, 1, 1), (5, 3, 7, 33), (2, 4, 64, 128), (17, 2, 31, 257), (0, 2, 4, 8), (3, 2, 32, 31), (8, 1, 33, 32), (64, 2, 127, 127), (512, 1, 8, 256),
    (1, 2, 16, 4096), (2, 1, 4, 11008), (1, 1, 4096, 33), (3, 1, 11008, 16), (1100, 2, 5, 16), (1, 1, 65569, 16), (2, 1, 3, 28672),
)  # fmt: skip
CLASSES = ("normal", "positive", "cancelling", "spread", "sparse", "outlier", "offset")


def weight_of(numbers: Numbers, format: str, shape: tuple[int, ...], kind: str = "normal") -> Weight:
    """A weight of a format: plain ones of a data class, block formats of random bytes."""
    if format in blocks.PLAIN_BYTES:
        values = numbers.array(kind, *shape)
        return Weight(shape, format, blocks.encode_plain(format, values))
    return Weight(shape, format, blocks.random_blocks(numbers, format, int(np.prod(shape))))


def minimum_of(weight: Weight) -> np.ndarray | None:
    """|offset| that a format adds to each code; None where it adds none."""
    if weight.format not in ("q4_1", "q5_1", "q2_k", "q4_k", "q5_k", *blocks.ZERO_POINT):
        return None
    zeros = weight.data.copy().reshape(-1, blocks.BLOCK_BYTES[weight.format][1])
    head = {"q4_1": 4, "q5_1": 4, "q4_k": 16, "q5_k": 16, **dict.fromkeys(blocks.ZERO_POINT, 3)}.get(weight.format)
    if head is None:  # q2_k: scales come first
        zeros[:, 16:80] = 0
    else:
        zeros[:, head:] = 0
    return np.abs(blocks.decode(weight.format, zeros, int(np.prod(weight.shape))).reshape(weight.shape))


def _linear(
    case_id: str, session: Session, numbers: Numbers, format: str, n: int, out: int, k: int, kind: str, *, bias: bool = False, gap: int = 0,
    start: int = 0, special: bool = False,
) -> Outcome:  # fmt: skip
    x = numbers.array(kind, n, k)
    weight = weight_of(numbers, format, (out, k), "normal" if kind in ("sparse", "integer") else kind)
    if format == "f32" and kind == "integer":
        weight = Weight((out, k), format, blocks.encode_plain("f32", numbers.units(out, k)))
    elif kind == "integer":
        weight = Weight((out, k), format, blocks.encode_plain(format, numbers.units(out, k)))
    b = numbers.normal(out) if bias else None
    if kind == "integer" and b is not None:
        b = np.round(b * 100)
    if special:
        x = _specials(x)
    inputs: list[Operand] = [In(x, "f32", "T", gap, start), weight, None if b is None else In(b)]
    ran = session.bench.run("linear", inputs, [((n, out), "f32")])
    kept = ran.kept[1]
    if kept != format:
        raise NotApplicable(f"{format} weights are decoded to {kept} before this backend sees them")
    with np.errstate(all="ignore"):
        expected = _expected(x, weight, b, ran.numerics)
    if kind == "integer" and ran.numerics.act is None:
        expected = Expected(expected.y, np.zeros_like(expected.bound), exact=True)
    return expect(session, case_id, ran, [expected])


def _expected(x: np.ndarray, weight: Weight, bias: np.ndarray | None, numerics: bounds.Numerics) -> Expected:
    """The oracle's, some columns at a time: temporaries in f64 of a whole vocabulary take gigabytes."""
    n, k = weight.shape
    columns, data = max(1, (1 << 22) // max(k, 1)), weight.data.reshape(n, -1)
    parts = []
    for at in range(0, max(n, 1), columns):
        part = Weight((len(data[at : at + columns]), k), weight.format, data[at : at + columns].reshape(-1))
        parts.append(bounds.linear(x, part.decode(), None if bias is None else bias[at : at + columns], numerics, minimum_of(part)))
    if len(parts) == 1:
        return parts[0]
    y, bound, slack = (np.concatenate([np.broadcast_to(getattr(p, name), p.y.shape) for p in parts], 1) for name in ("y", "bound", "slack"))
    return Expected(y, bound, slack=slack)


def _specials(x: np.ndarray) -> np.ndarray:
    """NaN, ±inf, −0, the largest f16 and denormals in rows of their own."""
    for row, value in enumerate((np.nan, np.inf, -np.inf, -0.0, 65504.0, 1e-40)[: len(x)]):
        x[row, x.shape[1] // 2] = value
    return x


def _transposed_integer(case_id: str, session: Session, numbers: Numbers) -> Outcome:
    """The large odd numbers in the weight: a weight that is silently rounded to f16 is seen."""
    x, w = numbers.units(3, 300), numbers.array("integer", 17, 300)
    ran = session.bench.run("linear", [In(x, "f32", "T"), Weight((17, 300), "f32", blocks.encode_plain("f32", w)), None], [((3, 17), "f32")])
    y = bounds.linear(x, w, None, ran.numerics)
    exact = ran.numerics.act is None and ran.numerics.weight is None
    return expect(session, case_id, ran, [Expected(y.y, np.zeros_like(y.bound), exact=True) if exact else y])


def _matmul(case_id: str, session: Session, numbers: Numbers, format: str, t: int, heads: int, out: int, k: int, kind: str, gap: int) -> Outcome:
    a = numbers.array(kind, t, heads, k)
    b = weight_of(numbers, format, (heads, out, k))
    if kind == "integer":
        b = Weight((heads, out, k), format, blocks.encode_plain(format, numbers.units(heads, out, k)))
    ran = session.bench.run("matmul", [In(a, "f32", "T", gap), b], [((t, heads, out), "f32")])
    if ran.kept[1] != format:
        raise NotApplicable(f"{format} operands are decoded to {ran.kept[1]} before this backend sees them")
    expected = bounds.matmul(a.astype(np.float64), b.decode(), ran.numerics)
    if kind == "integer" and ran.numerics.act is None:
        expected = Expected(expected.y, np.zeros_like(expected.bound), exact=True)
    return expect(session, case_id, ran, [expected])


def _denormal(case_id: str, session: Session, numbers: Numbers) -> Outcome:
    """Denormal activations may be flushed to zero, but no more than that may be lost, and large ones beside them not at all."""
    x = numbers.normal(4, 64)
    x[:, ::2] *= np.float32(1e-39)
    w = weight_of(numbers, "f32", (9, 64))
    ran = session.bench.run("linear", [In(x, "f32", "T"), w, None], [((4, 9), "f32")])
    expected = bounds.linear(x, w.decode(), None, ran.numerics)
    expected.bound = expected.bound + 64 * TINY
    return expect(session, case_id, ran, [expected])


def _group(format: str) -> str:
    if format in blocks.PLAIN_BYTES:
        return "linear.plain"
    if format in blocks.OWN:
        return "linear.groups"
    return "linear.blocks32" if blocks.BLOCK_BYTES[format][0] == 32 else "linear.blocks256"


def cases() -> Iterator[Case]:
    """linear in every format and class, then matmul."""
    formats = [*blocks.PLAIN_BYTES, *blocks.BLOCK_BYTES]
    for format in formats:
        plain = format in blocks.PLAIN_BYTES
        block = 1 if plain else blocks.BLOCK_BYTES[format][0]
        seen = set()
        for index, (n, out, k, quick) in enumerate(SHAPES):
            if not plain:
                k = -(-k // block) * block
            if (n, out, k) in seen:
                continue
            seen.add((n, out, k))
            names: tuple[str, ...] = CLASSES if format == "f32" and index in (3, 9) else (CLASSES[index % 7], "sparse")
            names = tuple(dict.fromkeys([*names, *(["integer"] if plain else [])]))
            if not plain and index % 2 and format not in ("q4_0", "q8_0", "q4_k"):
                names = ("sparse",)
            for kind in names:
                bias = (index + len(kind)) % 2 == 0
                tags = kind + (".bias" if bias else "")
                rule = "exact" if kind == "integer" else "bound"
                case_id = f"linear/f32*{format}/row/m{n}-n{out}-k{k}/{tags}#{rule}"
                yield Case(case_id, "linear", _group(format), bind(_linear, case_id, format, n, out, k, kind, bias=bias), required=format == "f32", quick=quick and (kind == "sparse" or format == "f32"),
                           bin=f"linear|{format}|{kind}|{size_bin(k)}")  # fmt: skip
        for name, extra in (("gap", {"gap": 3}), ("start1", {"gap": 5, "start": 1})):
            k = 64 if plain else block
            case_id = f"linear/f32*{format}/{name}/m5-n33-k{k}/normal#bound"
            yield Case(case_id, "linear", _group(format), bind(_linear, case_id, format, 5, 33, k, 'normal', **extra), required=format == "f32", quick=format in ("f32", "q4_0"))
        for (n, out, k), held in REAL.items():
            for kind in ("sparse", "integer", "normal") if format in held else ():
                if (kind == "integer" and not plain) or (kind == "normal" and (out > 65536 or format not in ("f32", "q8_0"))):
                    continue
                case_id = f"linear/f32*{format}/row/m{n}-n{out}-k{k}/{kind}#{'exact' if kind == 'integer' else 'bound'}"
                must = format == "f32" and max(n, k) <= BEYOND
                yield Case(case_id, "linear", _group(format), bind(_linear, case_id, format, n, out, k, kind), required=must, quick=must and kind == "sparse", bin=f"linear|{format}|{kind}|{size_bin(k)}")
        case_id = f"linear/f32*{format}/row/m7-n33-k{64 if plain else block}/special#bound"
        yield Case(case_id, "linear", _group(format), bind(_linear, case_id, format, 7, 33, 64 if plain else block, 'normal', special=True), required=format == "f32", quick=format in ("f32", "q8_0"))
    case_id = "linear/f32*f32/row/m3-n17-k300/integer_weight#exact"
    yield Case(case_id, "linear", _group("f32"), bind(_transposed_integer, case_id), required=True, quick=True)
    case_id = "linear/f32*f32/row/m4-n9-k64/denormal#bound"
    yield Case(case_id, "linear", _group("f32"), bind(_denormal, case_id), required=True)
    for format in blocks.PLAIN_BYTES:
        for index, (t, heads, out, k) in enumerate(MATMULS):
            for kind in ("normal", "sparse", "integer") if k > 8 else ("normal",):
                gap = 3 * (index % 2)
                rule = "exact" if kind == "integer" else "bound"
                case_id = f"matmul/f32*{format}/{'gap' if gap else 'row'}/t{t}-h{heads}-n{out}-k{k}/{kind}#{rule}"
                yield Case(case_id, "matmul", "matmul", bind(_matmul, case_id, format, t, heads, out, k, kind, gap), required=format == "f32", quick=index in (1, 3) and format == "f32",
                           bin=f"matmul|{format}|{kind}|{size_bin(k)}")  # fmt: skip
