"""How extended ops are made of core ops: one rule for each op of the catalogue that has one. `decompose.py` applies them.

A rule gets a builder, the op's operands and its complete attributes, and gives the op's results, each made by a node of its own. The first
paragraph of its text stands in the table of docs/operator-interface.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .errors import ShapeError

if TYPE_CHECKING:
    from .graph import GraphBuilder, Value

__all__ = ["COPYING", "DEARER", "concat", "moe", "short_conv", "softcap"]

DEARER: Final = ("moe", "concat", "short_conv")
"""Ops whose rule does more work than the op. `RefBackend` defines these as well, and the planner weighs the rule against other devices."""
COPYING: Final = ("concat", "short_conv")
"""Ops whose rule moves numbers with products by 1 and 0: they stay what they are only where nothing is rounded on the way."""

STEP: Final = 256.0
"""How far apart the scores of neighbouring tokens are: exp(-STEP / 2) is 0 in f32."""
WIDEST: Final = 128
"""Channels of a head of a cache of inputs, at most: every kernel of attention takes such heads."""


def softcap(g: GraphBuilder, inputs: Sequence[Value | None], attrs: Mapping[str, Any]) -> Sequence[Value]:
    """cap · tanh(x / cap)."""
    small = g.mul(_given("softcap", "x", inputs[0]), g.scalar(1.0 / attrs["cap"]))
    return (g.mul(g.act_mul(small, kind="tanh"), g.scalar(attrs["cap"])),)


def moe(g: GraphBuilder, inputs: Sequence[Value | None], attrs: Mapping[str, Any]) -> Sequence[Value]:
    """Every expert for every row, times its weight there, which is 0 where the row did not choose it.

    Rows of the identity, chosen by the ids and scaled by the weights, add up to these factors [T, E]. The experts are summed in ascending
    order, as the op does it, and a finite 0 · y changes no sum; of an expert that overflows in a row which did not choose it, the row sees NaN.
    """
    names = ("x", "ids", "weights", "gate", None, "down")
    x, ids, weights, gate, _, down = (None if n is None else _given("moe", n, v) for n, v in zip(names, inputs[:6], strict=True))
    assert x is not None and ids is not None and weights is not None and gate is not None and down is not None  # noqa: PT018
    up, biases = inputs[4], [*inputs[6:], None, None, None]
    count, chosen = int(gate.shape[0]), int(ids.shape[1])
    identity = g.const(f"identity.{count}", np.eye(count, dtype=np.float32))
    factors: Value | None = None  # [T, E]
    for j in range(chosen):
        row = g.mul(g.embed(g.window(ids, j, ()), identity), g.slice(weights, j, j + 1))
        factors = row if factors is None else g.add(factors, row)
    assert factors is not None
    total: Value | None = None
    for e in range(count):

        def product(operand: Value, stack: Value, bias: Value | None, e: int = e) -> Value:
            return g.linear(operand, g.matrix(stack, e), None if bias is None else g.matrix(bias, e))

        hidden = g.act_mul(product(x, gate, biases[0]), None if up is None else product(x, up, biases[1]), kind=attrs["kind"])
        part = g.mul(product(hidden, down, biases[2]), g.slice(factors, e, e + 1))
        total = part if total is None else g.add(total, part)
    assert total is not None
    return (total,)


def concat(g: GraphBuilder, inputs: Sequence[Value | None], attrs: Mapping[str, Any]) -> Sequence[Value]:
    """Two products with parts of the identity, which put x and y to their columns with zeros beside them, and their sum. For each head the
    same matrix: one for all of them, with a stride of 0.

    Each number is multiplied by 1 and added to zeros, so finite ones keep their bits (−0 becomes 0). A NaN or an infinity makes all else of its
    row (of a head) NaN, as 0 · ∞ is NaN.
    """
    x, y = (_given("concat", n, v) for n, v in zip(("x", "y"), inputs, strict=True))
    left, right = int(x.shape[-1]), int(y.shape[-1])
    identity = np.eye(left + right, dtype=np.float32)

    def placed(value: Value, side: str, columns: np.ndarray) -> Value:
        matrix = g.const(f"columns.{side}.{left}.{right}", columns)  # [A + B, A] or [A + B, B]
        if len(value.shape) == 2:
            return g.linear(value, matrix)
        return g.matmul(value, g.repeat(matrix, int(value.shape[1])))

    return (g.add(placed(x, "left", identity[:, :left]), placed(y, "right", identity[:, left:])),)


def short_conv(g: GraphBuilder, inputs: Sequence[Value | None], attrs: Mapping[str, Any]) -> Sequence[Value]:
    """The inputs go to a cache in f32, whose rows are keys and values in one; an attention for each tap gives every row the input of so many
    tokens before it; times the tap's column of the weight, in ascending order. The cache takes the place of the state, and grows with
    the context: 4 · C bytes a token instead of 4 · C · (L − 1) a sequence.

    All scores are equal (the query is 0) but for slopes: of a window of d + 1 tokens the oldest has the largest score, by so much that its
    weight is 1 and that of all others 0. A sink half a step below d · STEP takes the weight where the sequence has not so many tokens yet,
    so that the row gets zeros. A NaN or an infinity in a channel makes its head's channels NaN, in its row and the L − 1 behind it.
    """
    state, x, weight = (_given("short_conv", n, v) for n, v in zip(("state", "x", "weight"), inputs[:3], strict=True))
    channels, taps = (int(d) for d in weight.shape)
    width = max(w for w in range(1, min(channels, WIDEST) + 1) if channels % w == 0)
    heads = channels // width
    cache = g.kv_cache(f"{state.name}.inputs", heads, width, 0, dtype="f32")
    if x.strides is not None:
        x = g.mul(x, g.scalar(1.0))  # a copy without gaps, whose rows can be seen as heads
    rows = g.view(x, (x.shape[0], heads, width))
    g.kv_write(cache, rows, None)
    query = g.mul(rows, g.scalar(0.0))
    slopes = g.const(f"slopes.{heads}", np.full(heads, -STEP, np.float32))
    total: Value | None = None
    for tap in range(taps):
        distance, past = taps - 1 - tap, x
        if distance:
            sinks = g.const(f"sinks.{heads}.{distance}", np.full(heads, (distance - 0.5) * STEP, np.float32))
            seen = g.attention(query, cache, sinks=sinks, alibi_slopes=slopes, scale=1.0, window=distance + 1, value_dim=width)
            past = g.view(seen, x.shape)
        product = g.mul(past, g.column(weight, tap))
        total = product if total is None else g.add(total, product)
    assert total is not None
    return (g.act_mul(total, kind=attrs["kind"]),)


def _given(op: str, name: str, value: Value | None) -> Value:
    if value is None:
        raise ShapeError(f"op '{op}' needs the operand '{name}'")
    return value
