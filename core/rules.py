"""How extended ops are made of core ops: one rule for each op of the catalogue that has one. `decompose.py` applies them.

A rule gets a builder, the op's operands and its complete attributes, and gives the op's results, each made by a node of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import ShapeError

if TYPE_CHECKING:
    from .graph import GraphBuilder, Value

__all__ = ["moe", "softcap"]


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


def _given(op: str, name: str, value: Value | None) -> Value:
    if value is None:
        raise ShapeError(f"op '{op}' needs the operand '{name}'")
    return value
