"""Honest kernels for calibration, the third of products, experts and tables: no arithmetic in common with those of `kernels.py` and of the backends.

One row, or one token, at a time; sums in 16 lanes that are added as a tree; weights by the engine's decoder; activations by tanh and erfc; a token's
experts as one product over the hidden elements of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from fastllm.api import FORMATS, HostTensor, No, OpQuery, Yes

from .own_kernels import OwnKernels, check_experts

__all__ = ["Lanes"]

Array = np.ndarray
F32 = np.float32
LANES = 16


class Lanes(OwnKernels):
    """Products and experts; rows of a table, by the engine's decoder."""

    name = "lanes"

    def supports(self, q: OpQuery) -> Yes | No:
        """Only ops with a weight; embed only of coded ones, where the decoder is all there is."""
        coded = any(d in FORMATS and not FORMATS[d].plain for d in q.dtypes if d)
        return super().supports(q) if q.op in ("linear", "moe") or (q.op == "embed" and coded) else No("only products and coded tables are computed in lanes")

    def decode(self, weight: HostTensor) -> Array:
        """By the engine's decoder."""
        return weight.decode()

    def _own_linear(self, x: Array, weight: Array, bias: Array | None) -> Array:
        y = np.stack([_in_lanes(weight, row) for row in x]) if len(x) else np.zeros((0, len(weight)), F32)
        return y if bias is None else bias + y

    def _own_moe(
        self, x: Array, ids: Array, weights: Array, gate: Array, up: Array | None, down: Array, gate_bias: Array | None = None,
        up_bias: Array | None = None, down_bias: Array | None = None, *, kind: str,
    ) -> Array:  # fmt: skip
        """Weights go to the hidden elements, and a token's experts are one product over all of their hidden elements."""
        check_experts(ids, len(gate))
        out = np.zeros((len(x), down.shape[1]), F32)
        for t, chosen in enumerate(ids.tolist()):
            hidden, total = [], np.zeros(down.shape[1], F32)
            for e, weight in zip(chosen, weights[t], strict=True):
                z = _in_lanes(gate[e], x[t]) if gate_bias is None else gate_bias[e] + _in_lanes(gate[e], x[t])
                v = None if up is None else _in_lanes(up[e], x[t]) if up_bias is None else up_bias[e] + _in_lanes(up[e], x[t])
                hidden.append(_halves(z, v, kind) * weight)
                total = total if down_bias is None else total + weight * down_bias[e]
            out[t] = _in_lanes(np.concatenate([down[e] for e in chosen], 1), np.concatenate(hidden)) + total
        return out


def _in_lanes(w: Array, x: Array) -> Array:
    """w [N, K], x [K] -> [N]: lane i has the products i, i + 16, …; lanes are added in pairs."""
    whole = len(x) // LANES * LANES
    lanes = np.zeros((len(w), LANES), F32)
    for at in range(0, whole, LANES):
        lanes += w[:, at : at + LANES] * x[at : at + LANES]
    if whole < len(x):
        lanes[:, : len(x) - whole] += w[:, whole:] * x[whole:]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def _halves(z: Array, up: Array | None, kind: str) -> Array:
    """act(z) · up with σ(z) = (1 + tanh(z / 2)) / 2, where that loses nothing, else by e^z."""

    def sigmoid(a: Array) -> Array:
        return np.where(a > -1, F32(0.5) + F32(0.5) * np.tanh(a / 2), np.exp(a) / (1 + np.exp(a))).astype(F32)

    if kind == "swiglu_oai":
        g = np.clip(z, None, F32(7))
        y = sigmoid(F32(1.702) * g) * g
        return y if up is None else (np.clip(up, F32(-7), F32(7)) + 1) * y
    forms: dict[str, Callable[[Array], Array]] = {
        "silu": lambda a: sigmoid(a) * a,
        "gelu": lambda a: (a.astype(np.float64) * [0.5 * math.erfc(-b / math.sqrt(2)) for b in a.tolist()]).astype(F32),
        "gelu_tanh": lambda a: sigmoid(F32(2 * math.sqrt(2 / math.pi)) * (a + F32(0.044715) * a**3)) * a,
        "sigmoid": sigmoid,
        "tanh": np.tanh,
        "relu": lambda a: np.maximum(a, F32(0)),
    }
    return forms[kind](z) if up is None else forms[kind](z) * up
