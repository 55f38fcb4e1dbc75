"""linear and matmul: every weight format, sizes at and around the edges of blocks, all data classes, special values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from fastllm.api import CATALOGUE, Yes

from .. import blocks, bounds
from ..bounds import TINY, Expected
from ..case import Case, NotApplicable, Outcome
from ..numbers import Numbers
from ..operands import In, Operand, Weight
from ..session import Session
from .common import bind, expect, size_bin

__all__ = ["BEYOND", "FORMATS", "REPEAT", "SHAPES", "VOCABULARY", "block_of", "calibrated", "cases", "kept_as_it_is", "minimum_of", "repeated", "weight_of"]

FORMATS = (*blocks.PLAIN_BYTES, *blocks.BLOCK_BYTES)
"""In which a weight may stay on a device."""
VOCABULARY = 262_211
"""A few more than Gemma 3 has: numbers of 19 bits, and an odd one."""

SHAPES = (  # (rows, N, K, quick): pairwise; a large K goes with few outputs
    (1, 33, 1, False), (2, 1, 31, False), (3, 32, 32, False), (5, 33, 257, True), (8, 127, 128, False), (17, 31, 256, True),
    (1, 128, 256, True), (64, 33, 127, False), (2, 256, 4096, False), (1, 16, 11008, True), (512, 8, 33, False), (0, 7, 64, True),
    (3, 4096, 33, False), (2, 11008, 32, False), (80, 33, 4096, False), (2, 5, 28672, True),
)  # fmt: skip
REAL: tuple[tuple[int, int, int, tuple[str, ...]], ...] = (  # (rows, N, K or more to have whole blocks, formats): where a count of 16 bits or a buffer ends
    (1, VOCABULARY, 32, FORMATS), (2, 65569, 64, ("f32", "f16", "bf16", "q8_0", "q4_0")), (1100, 9, 32, FORMATS), (2, 7, 53248, FORMATS),
    (66000, 3, 32, ("f32", "q8_0")), (2, 3, 66048, ("f32", "q8_0")),
)  # fmt: skip
REPEAT = 1021
"""Rows of a large weight after which they come again: a prime, so that rows which differ in one bit of their number differ."""
BEYOND = 65536
"""More rows or products than this are no model's; a backend may answer No."""
MATMULS = (  # (rows, heads, N, K)
    (1, 1, 1, 1), (5, 3, 7, 33), (2, 4, 64, 128), (17, 2, 31, 257), (0, 2, 4, 8), (3, 2, 32, 31), (8, 1, 33, 32), (64, 2, 127, 127), (512, 1, 8, 256),
    (1, 2, 16, 4096), (2, 1, 4, 11008), (1, 1, 4096, 33), (3, 1, 11008, 16), (1100, 2, 5, 16), (1, 1, 65569, 16), (2, 1, 3, 28672),
    (2, 128, 520, 16), (1, 128, 128, 512), (2, 128, 512, 128),
)  # fmt: skip
CLASSES = ("normal", "positive", "cancelling", "spread", "sparse", "outlier", "offset")


def weight_of(numbers: Numbers, format: str, shape: tuple[int, ...], kind: str = "normal") -> Weight:
    """A weight of a format: plain ones of a data class, block formats of random bytes."""
    if format in blocks.PLAIN_BYTES:
        values = numbers.array(kind, *shape)
        return Weight(shape, format, blocks.encode_plain(format, values))
    return Weight(shape, format, blocks.random_blocks(numbers, format, int(np.prod(shape))))


def repeated(weight: Weight, rows: int) -> Weight:
    """So many rows of it, over and over: of a large weight little has to be made, and little decoded to know what is right."""
    if rows == weight.shape[0]:
        return weight
    row = weight.data.reshape(weight.shape[0], -1)
    return Weight((rows, weight.shape[1]), weight.format, np.resize(row, (rows, row.shape[1])).reshape(-1))


def block_of(format: str, least: int = 1) -> int:
    """Values of a block, or the next multiple of it from `least` on."""
    block = blocks.BLOCK_BYTES.get(format, (1, 0))[0]
    return -(-least // block) * block


def calibrated(format: str, bin: str) -> str:
    """The bin of a case of a format. fp8g128 has none: no kernel of this tree but those of calibration computes in it (its weights are decoded first), and
    those alone are too few."""
    return "" if format == "fp8g128" else bin


def kept_as_it_is(session: Session, op: str, inputs: Sequence[Operand], *which: int, attrs: Mapping[str, object] | None = None) -> None:
    """Raises NotApplicable if the backend takes weights `which` in another form than that of the case, which is what the planner does then."""
    spec = CATALOGUE[op]
    answer, kept = session.bench.ask(op, [*inputs, *[None] * (len(spec.inputs) - len(inputs))], spec.complete_attrs(attrs or {}), {})
    for at in which:
        weight = inputs[at]
        if isinstance(answer, Yes) and isinstance(weight, Weight) and kept[at] != weight.format:
            raise NotApplicable(f"weights in {weight.format} are decoded to {kept[at]} before this backend sees them")


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
    x, rows = numbers.array(kind, n, k), REPEAT if out > BEYOND else out
    weight = weight_of(numbers, format, (rows, k), "normal" if kind in ("sparse", "integer") else kind)
    if kind == "integer":
        weight = Weight((rows, k), format, blocks.encode_plain(format, numbers.units(rows, k)))
    b = numbers.normal(rows) if bias else None
    if kind == "integer" and b is not None:
        b = np.round(b * 100)
    if special:
        x = _specials(x)
    whole = repeated(weight, out)
    inputs: list[Operand] = [In(x, "f32", "T", gap, start), whole, None if b is None else In(b)]
    kept_as_it_is(session, "linear", inputs, 1)
    ran = session.bench.run("linear", inputs, [((n, out), "f32")])
    with np.errstate(all="ignore"):
        expected = bounds.linear(x, weight.decode(), b, ran.numerics, minimum_of(weight))
    if rows < out:
        columns = np.arange(out) % REPEAT
        expected = Expected(expected.y[:, columns], expected.bound[:, columns], slack=np.asarray(expected.slack)[:, columns])
    if kind == "integer" and ran.numerics.act is None:
        expected = Expected(expected.y, np.zeros_like(expected.bound), exact=True)
    return expect(session, case_id, ran, [expected])


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
    rows = REPEAT if heads * out > BEYOND // 8 else heads * out
    some = weight_of(numbers, format, (rows, k))
    if kind == "integer":
        some.data = blocks.encode_plain(format, numbers.units(rows, k))
    b = Weight((heads, out, k), format, repeated(some, heads * out).data)
    inputs: list[Operand] = [In(a, "f32", "T", gap), b]
    kept_as_it_is(session, "matmul", inputs, 1)
    ran = session.bench.run("matmul", inputs, [((t, heads, out), "f32")])
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
    for format in FORMATS:
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
                           bin=calibrated(format, f"linear|{format}|{kind}|{size_bin(k)}"))  # fmt: skip
        for name, extra in (("gap", {"gap": 3}), ("start1", {"gap": 5, "start": 1})):
            k = 64 if plain else block
            case_id = f"linear/f32*{format}/{name}/m5-n33-k{k}/normal#bound"
            yield Case(case_id, "linear", _group(format), bind(_linear, case_id, format, 5, 33, k, 'normal', **extra), required=format == "f32", quick=format in ("f32", "q4_0"))
        for n, out, least, held in REAL:
            k = block_of(format, least)
            for kind in ("sparse", "integer", "normal") if format in held else ():
                if (kind == "integer" and not plain) or (kind == "normal" and (out > BEYOND or format not in ("f32", "q8_0"))):
                    continue
                case_id = f"linear/f32*{format}/row/m{n}-n{out}-k{k}/{kind}#{'exact' if kind == 'integer' else 'bound'}"
                must = format == "f32" and max(n, k) <= BEYOND
                yield Case(case_id, "linear", _group(format), bind(_linear, case_id, format, n, out, k, kind), required=must, quick=must and kind == "sparse", bin=calibrated(format, f"linear|{format}|{kind}|{size_bin(k)}"))
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
                yield Case(case_id, "matmul", "matmul", bind(_matmul, case_id, format, t, heads, out, k, kind, gap), required=format == "f32", quick=format == "f32" and (index in (1, 3) or (kind == "sparse" and (t > 512 or heads * out > BEYOND))),
                           bin=f"matmul|{format}|{kind}|{size_bin(k)}")  # fmt: skip
