"""Every number of rows, tokens or sequences that a step may have, and sizes that are large in every direction at once.

Kernels are written for 1, 2, 4, 8, 16, 32 … rows, and for whole tiles of a prompt: each may have a fault of its own, which no other number of rows
shows. So every number up to 33 is asked for, and those around the ends of larger tiles; and once as many rows, outputs and products as tiles have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fastllm.api import CORE_OPS, KV_DTYPES

from .. import blocks, bounds, oracle, oracle_extended
from ..bench import Ran
from ..bounds import Expected, Numerics
from ..case import Case, Failure, Outcome
from ..numbers import Numbers
from ..operands import In, Operand, Weight
from ..session import Session
from .attention import Setup, paged
from .caches import declared, offered, read_back
from .common import bind, expect, same_bits, size_bin
from .elementwise import quantized
from .experts import moe_data, routed
from .linear import FORMATS, block_of, calibrated, kept_as_it_is, minimum_of, weight_of
from .memory import embedded
from .recurrent import on_device
from .sampling import draws

__all__ = ["COUNTS", "cases"]

COUNTS = (*range(1, 34), 48, 63, 64, 65, 96, 127, 128, 129, 192, 255, 256, 257)
SEQUENCES = (*range(1, 34), 48, 64, 65)


@dataclass
class _Op:
    """An op on the first rows of fixed data. inputs: number of rows -> operands; out: shape of a row; expected: of all rows."""

    name: str
    inputs: Callable[[int], list[Operand]]
    out: tuple[int, ...]
    expected: Callable[[Numerics], Expected]
    attrs: dict[str, Any] = field(default_factory=dict)


def _each(session: Session, counts: Sequence[int], check: Callable[[int], Outcome]) -> Outcome:
    """The worst outcome of a check with 1, 2, 3 … rows; weights stay where they are. Raises Failure, with the number of rows."""
    worst = Outcome()
    with session.bench.holding():
        for count in counts:
            try:
                outcome = check(count)
            except Failure as failure:
                raise Failure(failure.rule, f"with {count}: {failure.message}", **failure.facts) from None
            worst = max(worst, outcome, key=lambda o: (o.margin or 0.0, bool(o.impl)))
    return worst


def _over(case_id: str, session: Session, counts: Sequence[int], run: Callable[[int], Ran], expected: Callable[[Numerics], Expected]) -> Outcome:
    """Runs an op on 1, 2, 3 … rows and judges each; what it declares may be another thing for another number."""
    known: dict[Numerics, Expected] = {}

    def check(count: int) -> Outcome:
        ran = run(count)
        if ran.numerics not in known:
            known[ran.numerics] = expected(ran.numerics)
        whole = known[ran.numerics]
        rows = slice(0, len(ran.outs[0]))
        bound, slack = (np.broadcast_to(part, whole.y.shape)[rows] for part in (whole.bound, whole.slack))
        return expect(session, case_id, ran, [Expected(whole.y[rows], bound, whole.exact, slack)])

    return _each(session, counts, check)


def _rows(case_id: str, session: Session, numbers: Numbers, make: Callable[[Numbers, int], _Op], counts: Sequence[int]) -> Outcome:
    op = make(numbers, max(counts))
    inputs = op.inputs(1)
    kept_as_it_is(session, op.name, inputs, *(i for i, operand in enumerate(inputs) if isinstance(operand, Weight)), attrs=op.attrs)
    return _over(case_id, session, counts, lambda n: session.bench.run(op.name, op.inputs(n), [((n, *op.out), "f32")], op.attrs), op.expected)


def _linear(case_id: str, session: Session, numbers: Numbers, format: str, rows: int, out: int, k: int, kind: str, counts: Sequence[int]) -> Outcome:
    x, weight, bias = numbers.array(kind, rows, k), weight_of(numbers, format, (out, k)), numbers.normal(out)
    kept_as_it_is(session, "linear", [In(x, "f32", "T"), weight, In(bias)], 1)
    return _over(
        case_id, session, counts, lambda n: session.bench.run("linear", [In(x[:n], "f32", "T"), weight, In(bias)], [((n, out), "f32")]),
        lambda numerics: bounds.linear(x, weight.decode(), bias, numerics, minimum_of(weight)),
    )  # fmt: skip


def _same_alone(name: str, run: Callable[[slice], Ran], rows: int) -> Outcome:
    """Rows alone, in pairs and in parts of a tile: the bits of the whole prompt."""
    whole = run(slice(0, rows))
    if "rows" in whole.yes.varies:
        raise Failure("d2", f"'{name}' declares varies=('rows',): batch mates change results, D2 is not claimed")
    for part in (slice(0, 1), slice(63, 65), slice(64, 128), slice(100, rows), slice(rows - 1, rows)):
        if not same_bits(run(part).outs[0], whole.outs[0][part]):
            raise Failure("d2", f"rows {part.start}…{part.stop - 1} of '{name}' have other bits alone than in a prompt of {rows}")
    return Outcome(impl=whole.yes.impl, native=whole.native)


def _linear_alone(case_id: str, session: Session, numbers: Numbers, format: str) -> Outcome:
    x, weight = numbers.normal(200, block_of(format, 300)), weight_of(numbers, format, (130, block_of(format, 300)))
    kept_as_it_is(session, "linear", [In(x, "f32", "T"), weight, None], 1)
    return _same_alone("linear", lambda part: session.bench.run("linear", [In(x[part], "f32", "T"), weight, None], [((len(x[part]), 130), "f32")]), 200)


def _matmul_alone(case_id: str, session: Session, numbers: Numbers) -> Outcome:
    a, b = numbers.normal(200, 2, 200), weight_of(numbers, "f32", (2, 130, 200))
    return _same_alone("matmul", lambda part: session.bench.run("matmul", [In(a[part], "f32", "T"), b], [((len(a[part]), 2, 130), "f32")]), 200)


def _attention_alone(case_id: str, session: Session, numbers: Numbers) -> Outcome:
    setup = Setup((300,), (200,), 4, 2, 64, 64, 64)
    with paged(session, setup, numbers) as kit:
        query, where = numbers.normal(200, 4, 64), setup.positions(0)
        return _same_alone("attention", lambda part: kit.attend([query[part]], [where[part]]), 200)


def _matmul(format: str, heads: int, out: int, k: int) -> Callable[[Numbers, int], _Op]:
    def make(numbers: Numbers, rows: int) -> _Op:
        a, b = numbers.normal(rows, heads, k), weight_of(numbers, format, (heads, out, k))
        return _Op("matmul", lambda n: [In(a[:n], "f32", "T"), b], (heads, out), lambda numerics: bounds.matmul(a.astype(np.float64), b.decode(), numerics))

    return make


def _embed(format: str, width: int) -> Callable[[Numbers, int], _Op]:
    def make(numbers: Numbers, rows: int) -> _Op:
        ids, table = numbers.integers(rows, 0, 50).astype(np.int32), weight_of(numbers, format, (50, width))
        return _Op("embed", lambda n: [In(ids[:n], "i32", "T"), table], (width,), lambda _: embedded(ids, table))

    return make


def _of_rows(name: str, width: int) -> Callable[[Numbers, int], _Op]:
    """An op that works row by row on [n, width]."""

    def make(numbers: Numbers, rows: int) -> _Op:
        x, y, w, b = numbers.normal(rows, width), numbers.normal(rows, width), numbers.normal(width), numbers.normal(width)
        if name in ("rms_norm", "layer_norm"):
            shared = [In(w)] if name == "rms_norm" else [In(w), In(b)]
            judge = bounds.rms_norm(x, w, 1e-5) if name == "rms_norm" else bounds.layer_norm(x, w, b, 1e-5)
            return _Op(name, lambda n: [In(x[:n], "f32", "T"), *shared], (width,), lambda _: judge, {"eps": 1e-5})
        if name == "softcap":
            large = x * np.float32(20)
            return _Op(name, lambda n: [In(large[:n], "f32", "T")], (width,), lambda _: bounds.softcap(large, 30.0), {"cap": 30.0})
        if name == "softmax":
            return _Op(name, lambda n: [In(x[:n], "f32", "T")], (width,), lambda _: bounds.softmax(x))
        judge = bounds.act_mul(x, y, "silu") if name == "act_mul" else bounds.binary(name, x, y)
        return _Op(name, lambda n: [In(x[:n], "f32", "T"), In(y[:n], "f32", "T")], (width,), lambda _: judge)

    return make


def _rope(numbers: Numbers, rows: int) -> _Op:
    x, where, freq = numbers.normal(rows, 2, 64), numbers.integers(rows, 0, 5000).astype(np.int32), (10000.0 ** (-np.arange(32) / 32)).astype(np.float32)
    return _Op("rope", lambda n: [In(x[:n], "f32", "T"), In(where[:n], "i32", "T"), In(freq)], (2, 64), lambda numerics: bounds.rope(x, where, freq, "half", 1.0, numerics))


def _concat(numbers: Numbers, rows: int) -> _Op:
    x, y = numbers.normal(rows, 2, 64), numbers.normal(rows, 2, 16)
    return _Op("concat", lambda n: [In(x[:n], "f32", "T"), In(y[:n], "f32", "T")], (2, 80), lambda _: bounds.copies(oracle_extended.concat(x, y)))


def _dequantize(numbers: Numbers, rows: int) -> _Op:
    codes, scales = numbers.integers(rows * 96, -127, 128).astype(np.int8).reshape(rows, 96), np.abs(numbers.normal(rows, 3)) + np.float32(0.01)
    return _Op(
        "dequantize", lambda n: [In(codes[:n], "i8", "T"), In(scales[:n], "f32", "T")], (96,),
        lambda _: bounds.copies(oracle.dequantize(codes, scales, 32), 1.0), {"group": 32},
    )  # fmt: skip


def _quantize(case_id: str, session: Session, numbers: Numbers) -> Outcome:
    x = numbers.normal(max(COUNTS), 96)
    return _each(session, COUNTS, lambda n: quantized(case_id, session, x[:n], 32))


def _route(case_id: str, session: Session, numbers: Numbers) -> Outcome:
    logits, bias = numbers.normal(max(COUNTS), 33) * np.float32(2), numbers.normal(33)
    return _each(session, COUNTS, lambda n: routed(case_id, session, logits[:n], bias, {"k": 3, "score": "sigmoid", "renorm": 1}))


def _moe(format: str, hidden: int, inner: int) -> Callable[[Numbers, int], _Op]:
    def make(numbers: Numbers, rows: int) -> _Op:
        data = moe_data(numbers, format, rows, 4, 2, hidden, inner)
        return _Op(
            "moe", lambda n: [In(data.x[:n], "f32", "T"), In(data.ids[:n], "i32", "T"), In(data.weights[:n], "f32", "T"), *data.stacks], (hidden,),
            lambda numerics: data.expected("silu", numerics), {"kind": "silu"},
        )  # fmt: skip

    return make


def _sample(case_id: str, session: Session, numbers: Numbers, name: str) -> Outcome:
    drawn = draws(numbers, 257, max(COUNTS), name, "adjusted")
    return _each(session, COUNTS, lambda n: drawn.judge(session, n))


def _written(case_id: str, session: Session, numbers: Numbers, cache: str | None) -> Outcome:
    """So many tokens in one call of kv_write, each in a cache of its own; values and keys are read back."""
    if cache is not None:
        offered(session, cache)

    def check(n: int) -> Outcome:
        with paged(session, Setup((n,), (n,), 2, 2, 32, 32, 16, cache=cache), numbers) as kit:
            return read_back(case_id, session, numbers, kit)

    return _each(session, COUNTS, check)


def _recurrent_rows(case_id: str, session: Session, numbers: Numbers, op: str) -> Outcome:
    """The first rows of one sequence."""
    with on_device(session, numbers, op, (max(COUNTS),)) as (kit, device):

        def run(n: int) -> Ran:
            device.run([(0, 0, n)])
            assert device.ran is not None
            return device.ran

        return _over(case_id, session, COUNTS, run, lambda _: kit.judge(0))


def _recurrent_sequences(case_id: str, session: Session, numbers: Numbers, op: str) -> Outcome:
    """The first row of each of 1, 2, 3 … sequences; then the second ones, which are judged: they read what the first have left."""
    with on_device(session, numbers, op, (2,) * max(SEQUENCES)) as (kit, device):

        def run(n: int) -> Ran:
            for t in (0, 1):
                device.run([(s, t, t + 1) for s in range(n)])
            assert device.ran is not None
            return device.ran

        def expected(_: Numerics) -> Expected:
            parts = [kit.judge(s) for s in range(len(kit.rows))]
            return Expected(np.concatenate([p.y[1:] for p in parts]), np.concatenate([p.bound[1:] for p in parts]))

        return _over(case_id, session, SEQUENCES, run, expected)


def _attention(case_id: str, session: Session, numbers: Numbers, cache: str | None) -> Outcome:
    """Rows of one sequence, each in a prompt of every length."""
    if cache is not None:
        offered(session, cache)
    setup = Setup((300,), (257,), 4, 2, 64, 64, 16, cache=cache)
    with paged(session, setup, numbers) as kit:
        query, where = numbers.normal(257, 4, 64), setup.positions(0)
        return _over(case_id, session, COUNTS, lambda n: kit.attend([query[:n]], [where[:n]]), _judge(kit, [query], [where]))


def _sequences(case_id: str, session: Session, numbers: Numbers, cache: str | None) -> Outcome:
    """One row of each of 1, 2, 3 … sequences."""
    if cache is not None:
        offered(session, cache)
    setup = Setup(tuple(1 + 7 * i % 40 for i in range(max(SEQUENCES))), (1,) * max(SEQUENCES), 4, 2, 32, 32, 16, cache=cache)
    with paged(session, setup, numbers) as kit:
        where = [setup.positions(s) for s in range(len(setup.lengths))]
        queries, table = [numbers.normal(1, 4, 32) for _ in where], kit.table
        whole = _judge(kit, queries, where)

        def run(n: int) -> Ran:
            kit.setup, kit.table = replace(setup, lengths=setup.lengths[:n]), table[:n].copy()
            return kit.attend(queries[:n], where[:n])

        def judged(numerics: Numerics) -> Expected:
            kit.setup = setup
            return whole(numerics)

        return _over(case_id, session, SEQUENCES, run, judged)


def _judge(kit: Any, queries: Sequence[np.ndarray], where: Sequence[np.ndarray]) -> Callable[[Numerics], Expected]:
    """What the oracle says of all rows, for declared numerics."""

    def expected(numerics: Numerics) -> Expected:
        if kit.setup.cache is not None:
            declared(kit.setup.cache, numerics.weight)
        scale = 1 / np.sqrt(kit.setup.dk)
        parts = [bounds.attention(bounds.Sequence(q, w, kit.keys[s], kit.values[s]), numerics, scale=scale) for s, (q, w) in enumerate(zip(queries, where, strict=True))]
        y, bound, slack = (np.concatenate([getattr(p, name) for p in parts]) for name in ("y", "bound", "slack"))
        return Expected(y, bound, slack=slack)

    return expected


ROWS = ("rms_norm", "layer_norm", "softmax", "softcap", "act_mul", "add", "mul")


def _group(format: str) -> str:
    return "counts.plain" if format in blocks.PLAIN_BYTES else "counts.blocks"


def _of_format(format: str) -> Iterator[tuple[str, str, str, Callable[[Numbers, int], _Op], Sequence[int], str]]:
    """(op, operands, size and name, what makes the operands, counts, length of the sum) of ops with a weight; not linear."""
    most, block = max(COUNTS), max(block_of(format), 64)
    width, wide = (100, 1500) if format in blocks.PLAIN_BYTES else (block, block_of(format, 1500))
    yield "embed", "i32", f"m1_{most}-n{width}/counts", _embed(format, width), COUNTS, "any"
    yield "embed", "i32", f"m96-n{wide}/tiles", _embed(format, wide), (96,), "any"
    inner = 32 if format == "f32" else block
    yield "moe", "f32", f"t1_{most}-e4-k2-c{block}-f{inner}/counts", _moe(format, block, inner), COUNTS, "any"
    if format in blocks.PLAIN_BYTES:
        yield "matmul", "f32", f"t1_{most}-h3-n33-k64/counts", _matmul(format, 3, 33, 64), COUNTS, size_bin(64)
        yield "matmul", "f32", "t130-h2-n130-k200/tiles", _matmul(format, 2, 130, 200), (130,), size_bin(200)


def _products() -> Iterator[Case]:
    """linear in every format."""
    most = max(COUNTS)
    for format in FORMATS:
        k, deep, must, quick = block_of(format, 64), block_of(format, 300), format == "f32", format in ("f32", "q8_0")
        case_id = f"linear/f32*{format}/row/m1_{most}-n40-k{k}/counts#bound"
        bin = calibrated(format, f"linear|{format}|counts|{size_bin(k)}")
        yield Case(case_id, "linear", _group(format), bind(_linear, case_id, format, most, 40, k, "normal", COUNTS), required=must, quick=quick, bin=bin)
        case_id = f"linear/-/-/linear*{format}/tiles#d2"
        yield Case(case_id, "linear", "determinism", bind(_linear_alone, case_id, format), "silver", must, quick)
        for kind in ("sparse", "normal"):
            case_id = f"linear/f32*{format}/row/m130-n200-k{deep}/{kind}.tiles#bound"
            bin = calibrated(format, f"linear|{format}|{kind}.tiles|{size_bin(deep)}")
            yield Case(case_id, "linear", _group(format), bind(_linear, case_id, format, 130, 200, deep, kind, (130,)), required=must, quick=quick and kind == "sparse", bin=bin)


def cases() -> Iterator[Case]:
    """Every number of rows, of each op and weight format; then tiles."""
    yield from _products()
    most = max(COUNTS)
    for format in FORMATS:
        for op, operands, size, make, counts, length in _of_format(format):
            exact = op == "embed" and format in blocks.PLAIN_BYTES
            case_id = f"{op}/{operands}*{format}/row/{size}#{'exact' if exact else 'bound'}"
            bin = "" if exact else calibrated(format, f"{op}|{format}|{size.rpartition('/')[2]}|{length}")
            yield Case(case_id, op, _group(format), bind(_rows, case_id, make, counts), required=op in CORE_OPS and format == "f32", quick=op == "embed" and format == "q8_0", bin=bin)
    makes: list[tuple[str, str, Callable[[Numbers, int], _Op], Sequence[int]]] = [(op, f"m1_{most}-n100/counts", _of_rows(op, 100), COUNTS) for op in ROWS]
    makes += [(op, "m96-n1500/tiles", _of_rows(op, 1500), (96,)) for op in ROWS]
    makes += [
        ("rope", f"t1_{most}-h2-d64-r32/counts", _rope, COUNTS), ("concat", f"t1_{most}-h2-n64_16/counts", _concat, COUNTS), ("dequantize", f"m1_{most}-n96/counts", _dequantize, COUNTS),
    ]  # fmt: skip
    for op, size, make, counts in makes:
        types, exact = "i8" if op == "dequantize" else "f32", op in ("add", "mul", "concat")
        case_id = f"{op}/{types}/row/{size}#{'exact' if exact else 'bound'}"
        bin = "" if exact else f"{op}|{types}|{size.rpartition('/')[2]}|any"
        yield Case(case_id, op, "counts.rows", bind(_rows, case_id, make, counts), required=op in CORE_OPS, quick=op in ("rms_norm", "rope"), bin=bin)
    for op, alone in (("matmul", _matmul_alone), ("attention", _attention_alone)):
        case_id = f"{op}/-/-/{op}/tiles#d2"
        yield Case(case_id, op, "determinism", bind(alone, case_id), "silver", True)
    case_id = f"quantize/f32/row/m1_{most}-n96/counts#bound"
    yield Case(case_id, "quantize", "counts.rows", bind(_quantize, case_id), required=True, bin="quantize|f32|counts|any")
    case_id = f"route_topk/f32/row/t1_{most}-e33-k3/counts#bound"
    yield Case(case_id, "route_topk", "counts.rows", bind(_route, case_id), bin="route_topk|f32|counts|any")
    for name in ("greedy", "all"):
        case_id = f"sample/f32/row/r1_{most}-v257/{name}.counts#exact"
        yield Case(case_id, "sample", "counts.rows", bind(_sample, case_id, name), required=True, quick=name == "greedy")
    sequences = f"s1_{max(SEQUENCES)}"
    for op, size in (("short_conv", "c24-k4"), ("delta_rule", "j1-h2-d8_8")):
        for name, count, check in (("counts", f"l1_{most}", _recurrent_rows), ("sequences", sequences, _recurrent_sequences)):
            case_id = f"{op}/f32/row/{count}-{size}/{name}#bound"
            yield Case(case_id, op, "counts.rows", bind(check, case_id, op), bin=f"{op}|f32|{name}|any")
    for cache in (None, *KV_DTYPES):
        for op, name, size, judged in (
            ("attention", "counts", f"l300-q1_{most}-h4_2-d64", _attention), ("attention", "sequences", f"{sequences}-h4_2-d32", _sequences),
            ("kv_write", "counts", f"t1_{most}-k2-d32", _written),
        ):  # fmt: skip
            kind = f"{name}.cache" if cache else name
            case_id = f"{op}/{cache or 'f32'}/row/{size}/{kind}#bound"
            group, bin = "counts.caches" if cache else "counts.rows", f"{op}|{cache or 'f32'}|{kind}|any"
            yield Case(case_id, op, group, bind(judged, case_id, cache), required=cache is None, quick=cache is None and name == "sequences", bin=bin)
