"""Properties: what must hold whatever the numbers and the sizes are. Each is a function of its sizes.

The cases here are fixed examples, so that a level asks everybody the same. `tests/conformance/test_properties.py` has hypothesis look for
sizes that break one (derandomised); what it finds becomes a line of EXAMPLES.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fastllm.api import Backend

from .. import blocks, bounds
from ..bench import Bench, Ran
from ..bounds import U
from ..case import Case, Failure, NotApplicable, Outcome
from ..numbers import Numbers
from ..operands import In, Weight
from ..session import Session
from .attention import Paged, Setup
from .common import same_bits
from .linear import weight_of

__all__ = ["EXAMPLES", "PROPERTIES", "cases"]

Array = np.ndarray


def _linear(bench: Bench, x: Array, w: Weight) -> tuple[Array, Array]:
    """(results in f64, how far each may be off)."""
    ran = bench.run("linear", [In(x, "f32", "T"), w, None], [((len(x), w.shape[0]), "f32")])
    return ran.outs[0].astype(np.float64), bounds.linear(x, w.decode(), None, ran.numerics).reach


def _within(what: str, found: Array, wanted: Array, allowed: Array) -> Outcome:
    margin = float((np.abs(found - wanted) / allowed).max(initial=0.0))
    if not margin <= 1:
        raise Failure("prop", f"{what} does not hold: {margin:.3g} times what rounding may do", margin=margin)
    return Outcome(margin)


def linearity(bench: Bench, numbers: Numbers, rows: int, n: int, k: int) -> Outcome:
    """W(2x + y/2) = 2Wx + Wy/2."""
    x, y, w = numbers.normal(rows, k), numbers.normal(rows, k), weight_of(numbers, "f32", (n, k))
    both = (2 * x + y / 2).astype(np.float32)
    rounding = (U["f32"] * (np.abs(2 * x) + np.abs(y))).astype(np.float64) @ np.abs(w.decode()).T
    (a, da), (b, db), (c, dc) = (_linear(bench, v, w) for v in (x, y, both))
    return _within("linearity of 'linear'", c, 2 * a + b / 2, 2 * da + db / 2 + dc + rounding)


def split_k(bench: Bench, numbers: Numbers, rows: int, n: int, k: int, at: int) -> Outcome:
    """A product is the sum of the products of two parts of K."""
    cut = 1 + at % (k - 1)
    x, w = numbers.normal(rows, k), numbers.normal(n, k)
    parts = [(x[:, :cut], w[:, :cut]), (x[:, cut:], w[:, cut:]), (x, w)]
    (a, da), (b, db), (c, dc) = (_linear(bench, np.ascontiguousarray(v), Weight(m.shape, "f32", blocks.encode_plain("f32", m))) for v, m in parts)
    return _within("additivity of 'linear' over K", a + b, c, da + db + dc)


def rows_permuted(bench: Bench, numbers: Numbers, rows: int, width: int, format: str = "f32") -> Outcome:
    """Rows in another order give their results in that order, to the bit."""
    block = blocks.BLOCK_BYTES.get(format, (1, 0))[0]
    width = -(-width // block) * block
    x, order = numbers.normal(rows, width), numbers.permutation(rows)
    w, norm = weight_of(numbers, format, (7, width)), numbers.normal(width)
    calls: dict[str, Callable[[Array], Ran]] = {
        "linear": lambda v: bench.run("linear", [In(v, "f32", "T"), w, None], [((rows, 7), "f32")]),
        "rms_norm": lambda v: bench.run("rms_norm", [In(v, "f32", "T"), In(norm)], [((rows, width), "f32")], {"eps": 1e-5}),
        "layer_norm": lambda v: bench.run("layer_norm", [In(v, "f32", "T"), In(norm), None], [((rows, width), "f32")], {"eps": 1e-5}),
        "softmax": lambda v: bench.run("softmax", [In(v, "f32", "T")], [((rows, width), "f32")]),
        "act_mul": lambda v: bench.run("act_mul", [In(v, "f32", "T"), None], [((rows, width), "f32")]),
    }
    for op, call in calls.items():
        if not same_bits(call(x[order].copy()).outs[0], call(x).outs[0][order]):
            raise Failure("prop", f"'{op}' of {rows} rows of {width} depends on their order")
    return Outcome()


def softmax_shift(bench: Bench, numbers: Numbers, rows: int, width: int, shift: int) -> Outcome:
    """A number added to all elements of a row changes nothing but what the addition rounds."""
    x = np.round(numbers.normal(rows, width) * 64).astype(np.float32) / np.float32(64)  # the addition is exact
    moved = x + np.float32(shift)
    a, b = (bench.run("softmax", [In(v, "f32", "T")], [((rows, width), "f32")]).outs[0].astype(np.float64) for v in (x, moved))
    return _within("that a shift changes no softmax", a, b, bounds.softmax(x).bound + bounds.softmax(moved).bound)


def rope_turns(bench: Bench, numbers: Numbers, half: int, position: int, distance: int) -> Outcome:
    """rope keeps the length of every head, and products of a query and a key depend on the distance of their positions."""
    inv_freq = (10000.0 ** (-np.arange(half) / half)).astype(np.float32)
    q, k = numbers.normal(1, 1, 2 * half), numbers.normal(1, 1, 2 * half)

    def turned(x: Array, p: int) -> Array:
        ran = bench.run("rope", [In(x, "f32", "T"), In(np.array([p], np.int32), "i32", "T"), In(inv_freq)], [(x.shape, "f32")])
        declared = 3 * p * float(inv_freq.max()) if ran.numerics.angle == "f32" else 0.0
        slack[0] = max(slack[0], 8 + declared)
        return ran.outs[0].astype(np.float64)

    slack = [0.0]
    near, far = (float((turned(q, p + distance) * turned(k, p)).sum()) for p in (0, position))
    size = float(np.abs(q).sum() * np.abs(k).max())
    _within("that rope depends on distances", np.array([near]), np.array([far]), np.array([8 * slack[0] * U["f32"] * size]))
    length, before = float(np.linalg.norm(turned(q, position))), float(np.linalg.norm(q.astype(np.float64)))
    return _within("that rope keeps lengths", np.array([length]), np.array([before]), np.array([4 * slack[0] * U["f32"] * float(np.abs(q).sum())]))


def paged_is_contiguous(bench: Bench, numbers: Numbers, length: int, rows: int, heads: int, block: int) -> Outcome:
    """Blocks one after the other, and blocks anywhere: the same bits."""
    setup = Setup((length,), (min(rows, length),), 2 * heads, heads, 32, 32, block)
    queries, where = [numbers.normal(setup.rows[0], 2 * heads, 32)], [setup.positions(0)]
    seed, results = int(numbers.integers(1, 0, 1 << 30)[0]), []
    for shuffle in (0, 3):
        kit = Paged(bench, setup, Numbers(seed), shuffle)
        try:
            if not shuffle:  # write it again, one block after the other
                count = -(-length // block)
                kit.table[0, :count] = np.arange(count)
                kit.table[0, count:] = count
                kit.write(0, np.arange(length))
            results.append(kit.attend(queries, where).outs[0])
        finally:
            kit.close()
    if not same_bits(*results):
        raise Failure("prop", f"attention over {length} keys gives other bits from scattered blocks of {block} than from neighbours")
    return Outcome()


def heads_permuted(bench: Bench, numbers: Numbers, length: int, rows: int, groups: int, size: int) -> Outcome:
    """Query heads of one kv head may change places: results do, to the bit."""
    setup = Setup((length,), (min(rows, length),), groups * size, groups, 32, 32, 16)
    query, where = numbers.normal(setup.rows[0], groups * size, 32), [setup.positions(0)]
    order = np.concatenate([g * size + numbers.permutation(size) for g in range(groups)])
    kit = Paged(bench, setup, numbers)
    try:
        straight, turned = kit.attend([query], where).outs[0], kit.attend([query[:, order].copy()], where).outs[0]
    finally:
        kit.close()
    if not same_bits(straight[:, order].copy(), turned):
        raise Failure("prop", f"attention of {size} query heads for each of {groups} kv heads depends on their order")
    return Outcome()


def quantised_twice(bench: Bench, numbers: Numbers, rows: int, groups: int, group: int) -> Outcome:
    """Quantising what was dequantised gives the same codes."""
    width = groups * group
    x, outs = numbers.normal(rows, width), [((rows, width), "i8"), ((rows, groups), "f32")]
    once = bench.run("quantize", [In(x, "f32", "T")], outs, {"group": group}).outs
    back = bench.run("dequantize", [In(once[0], "i8", "T"), In(once[1], "f32", "T")], [((rows, width), "f32")], {"group": group}).outs[0]
    again = bench.run("quantize", [In(back, "f32", "T")], outs, {"group": group}).outs
    if not same_bits(once[0], again[0]):
        raise Failure("prop", f"quantising twice in groups of {group} changes {int((once[0] != again[0]).sum())} codes")
    return Outcome()


PROPERTIES: dict[str, tuple[str, Callable[..., Outcome]]] = {
    "linearity": ("linear", linearity),
    "split_k": ("linear", split_k),
    "rows_permuted": ("linear", rows_permuted),
    "softmax_shift": ("softmax", softmax_shift),
    "rope_turns": ("rope", rope_turns),
    "paged_is_contiguous": ("attention", paged_is_contiguous),
    "heads_permuted": ("attention", heads_permuted),
    "quantised_twice": ("quantize", quantised_twice),
}
"""name -> (op, property)."""
EXAMPLES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("linearity", {"rows": 3, "n": 33, "k": 257}),
    ("linearity", {"rows": 1, "n": 1, "k": 1}),
    ("split_k", {"rows": 5, "n": 17, "k": 300, "at": 31}),
    ("split_k", {"rows": 1, "n": 40, "k": 64, "at": 32}),
    ("rows_permuted", {"rows": 37, "width": 100}),
    ("rows_permuted", {"rows": 9, "width": 64, "format": "q8_0"}),
    ("rows_permuted", {"rows": 18, "width": 256, "format": "q4_k"}),
    ("softmax_shift", {"rows": 2, "width": 65, "shift": 700}),
    ("softmax_shift", {"rows": 1, "width": 1, "shift": -3}),
    ("rope_turns", {"half": 16, "position": 5000, "distance": 7}),
    ("rope_turns", {"half": 1, "position": 131000, "distance": 1}),
    ("paged_is_contiguous", {"length": 100, "rows": 3, "heads": 2, "block": 16}),
    ("paged_is_contiguous", {"length": 1, "rows": 1, "heads": 1, "block": 64}),
    ("heads_permuted", {"length": 40, "rows": 2, "groups": 2, "size": 5}),
    ("quantised_twice", {"rows": 3, "groups": 4, "group": 32}),
)  # fmt: skip


def _check(name: str, sizes: Mapping[str, Any]) -> Callable[[Session, Numbers], Outcome]:
    def run(session: Session, numbers: Numbers) -> Outcome:
        if sizes.get("format", "f32") != "f32" and not _claimed(session.backend, sizes["format"]):
            raise NotApplicable(f"{sizes['format']} weights are decoded before this backend sees them")
        return replace(PROPERTIES[name][1](session.bench, numbers, **sizes), margin=None)

    return run


def _claimed(backend: Backend, format: str) -> bool:
    return backend.pack_layout((7, 256), format, frozenset({"linear"})) is not None


def cases() -> Iterator[Case]:
    """The examples."""
    for name, sizes in EXAMPLES:
        op = PROPERTIES[name][0]
        case_id = f"{op}/f32/-/{'-'.join(f'{key}{value}' for key, value in sizes.items())}/{name}#prop"
        yield Case(case_id, op, "properties", _check(name, sizes), required="format" not in sizes, quick=name in ("linearity", "split_k", "paged_is_contiguous"))
