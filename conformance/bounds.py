"""How far a result may be from the oracle: one bound per element, from the op, its operands and the numerics that were declared.

Declared rounding of *operands* (`act`, `weight`) is applied by the oracle, not added to the bound, so that coarse kernels are judged
sharply. u: unit roundoff of a type; K: terms of a sum that are not zero. L = 4 covers any sensible order of a sum (lanes, pairs,
blocks; measured on honest kernels: at most 1.1 needed), and refuses one f32 accumulator over thousands of terms. `calibration/`
has the margins of honest kernels. Imports only numpy and the oracles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from . import oracle
from . import oracle_extended as extended

__all__ = ["TINY", "Expected", "L", "Numerics", "U", "cached", "round_to"]

Array = np.ndarray
L = 4.0
U = {"f32": 2.0**-24, "f64": 2.0**-53, "f16": 2.0**-11, "tf32": 2.0**-11, "bf16": 2.0**-8, "i32": 0.0}
TINY = 2.0**-126
"""The smallest normal f32: below it, results may be flushed to zero."""


@dataclass(frozen=True)
class Numerics:
    """What a Yes declares. act, weight: rounding of operands first; acc: of sums; prob: attention weights; angle: of rope."""

    acc: str = "f32"
    act: str | None = None
    weight: str | None = None
    prob: str | None = None
    angle: str | None = None


@dataclass
class Expected:
    """y: f64 results of the oracle; bound: how far each may be off; exact: only these bits (as f32) are right; slack: what a code at the
    edge of two moves it by, where either is right. An error counts as far as it is beyond the slack."""

    y: Array
    bound: Array
    exact: bool = False
    slack: Array | float = 0.0

    @property
    def reach(self) -> Array:
        """How far each may be off in all."""
        return self.bound + self.slack


def round_to(x: Array, kind: str | None) -> Array:
    """Values as they are after rounding to a type (f64 in, f64 out)."""
    with np.errstate(over="ignore"):
        if kind in (None, "f32"):
            return np.asarray(x, np.float64)
        if kind == "f16":
            return np.asarray(x, np.float32).astype(np.float16).astype(np.float64)
        if kind == "bf16":
            bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
            kept = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16) << np.uint64(16)
            return kept.astype(np.uint32).view(np.float32).astype(np.float64)
    raise ValueError(f"'{kind}' is not a declared rounding that the suite knows: f32, f16, bf16, q8_gN of activations, int8 or int8_gN of a cache")


def round_activations(x: Array, kind: str | None, moved: Array | None = None, edged: Array | None = None) -> tuple[Array, Array, Array]:
    """(x after the declared rounding, by how much a code at an edge may move it, how far it may be off beside that): f64 of x's shape
    [n, K]. moved: how far x itself may be off [n, K], where it is a result of the same op; edged: how far codes at edges before may
    have moved it. Rounding swallows what x is off by, but for values at an edge and the scale of a group."""
    x = np.asarray(x, np.float64)
    given = moved is not None or edged is not None
    moved = np.zeros_like(x) if moved is None else moved
    edged = np.zeros_like(x) if edged is None else edged
    if kind in (None, "f32"):
        return x, edged, moved
    if not str(kind).startswith("q8_g"):
        rounded, most = round_to(x, kind), moved + edged
        if not given:
            return rounded, edged, moved
        return rounded, np.maximum(round_to(x + most, kind) - rounded, rounded - round_to(x - most, kind)), np.zeros_like(x)
    group = int(str(kind)[4:])
    codes, scale = oracle.quantize(x, group)
    step = np.repeat(scale, group, axis=1)
    rounded = np.rint(codes)

    def widest(off: Array) -> Array:
        """In steps, of each group."""
        return np.repeat(off.reshape(len(x), x.shape[1] // group, group).max(-1), group, axis=1) / np.where(step > 0, step, 1.0)

    carried, flipped = (widest(moved), widest(edged)) if given else (moved, edged)
    near = 4 * U["f32"] * np.maximum(np.abs(codes), 1) + (carried + flipped) * (1 + np.abs(codes) / 127)
    edge = np.abs(np.abs(codes - np.floor(codes)) - 0.5) <= near
    by_scale = np.abs(rounded) / 127 * step if given else np.zeros_like(x)
    return rounded * step, np.where(edge, step, 0.0) + by_scale * flipped, by_scale * carried


def cached(x: Array, kind: str | None) -> tuple[Array, Array]:
    """(keys or values as a cache gives them back, how far they may be from that): [..., D]. kind: as a Yes declares it: None, f16, bf16,
    int8 (one scale for each vector) or int8_gN (one for N elements)."""
    if kind is None or not kind.startswith("int8"):
        return round_to(x, kind), np.zeros(np.shape(x))
    codes, step = extended.int8_vectors(x, int(kind.removeprefix("int8").removeprefix("_g") or 0))
    rounded = np.rint(codes) * step
    edge = np.abs(np.abs(codes - np.floor(codes)) - 0.5) <= 4 * U["f32"] * np.maximum(np.abs(codes), 1)
    return rounded, np.where(edge, step, 0.0) + 4 * U["f32"] * np.abs(rounded) + TINY


def _matrix(x: Array, w: Array) -> tuple[Array, Array, Array]:
    """(Σ x·w, Σ |x·w|, terms that are not zero), [n, N] each."""
    return x @ w.T, np.abs(x) @ np.abs(w).T, (x != 0).astype(np.float64) @ (w != 0).astype(np.float64).T


def linear(
    x: Array, w: Array, bias: Array | None, numerics: Numerics, minimum: Array | None = None, moved: Array | None = None, edged: Array | None = None
) -> Expected:
    """x [n, K], w [N, K]. minimum: |offset| that a format adds to every code of w [N, K], whose sum kernels keep apart. moved, edged: how
    far x itself may be off [n, K], as of `round_activations`; the first adds to the bound, the second to the slack."""
    x, slack, carried = round_activations(x, numerics.act, moved, edged)
    w = round_to(w, numerics.weight)
    y, size, terms = _matrix(x, w)
    if minimum is not None:
        size = np.maximum(size, np.abs(x) @ np.abs(minimum).T)
    if bias is not None:
        b = np.asarray(bias, np.float64)
        y, size = y + b, size + np.abs(b)
    bound = L * np.sqrt(np.maximum(terms, 1)) * U[numerics.acc] * size + U["f32"] * np.abs(y) + TINY
    return Expected(y, bound + carried @ np.abs(w).T, slack=slack @ np.abs(w).T)


def matmul(a: Array, b: Array, numerics: Numerics) -> Expected:
    """a [T, H, K], b [H, N, K]."""
    parts = [linear(a[:, h], b[h], None, numerics) for h in range(a.shape[1])]
    y, bound, slack = (np.stack([getattr(p, name) for p in parts], 1) for name in ("y", "bound", "slack"))
    return Expected(y, bound, slack=slack)


def rms_norm(x: Array, weight: Array | None, eps: float) -> Expected:
    """Margin of pairwise or lane sums; one f32 accumulator over thousands of terms is refused."""
    y = oracle.rms_norm(x, weight, eps)
    return Expected(y, np.abs(y) * ((0.5 * L * math.sqrt(x.shape[-1]) + 4) * U["f32"] + U["f32"]) + TINY)


def layer_norm(x: Array, weight: Array | None, bias: Array | None, eps: float) -> Expected:
    """The bound of two passes; one-pass variance fails where the mean is far from zero."""
    u, d = U["f32"], x.shape[-1]
    y = oracle.layer_norm(x, weight, bias, eps)
    x64 = np.asarray(x, np.float64)
    w = 1.0 if weight is None else np.abs(np.asarray(weight, np.float64))
    b = 0.0 if bias is None else np.asarray(bias, np.float64)
    mean = x64.mean(-1, keepdims=True)
    centred = np.abs(x64 - mean)
    var = (centred**2).mean(-1, keepdims=True)
    sigma = np.sqrt(var + np.float64(np.float32(eps)))
    delta = u * (np.abs(x64) + 3 * np.abs(mean)) + L * math.sqrt(d) * u * np.abs(x64).mean(-1, keepdims=True)
    rms_delta = np.sqrt((delta**2).mean(-1, keepdims=True))
    spread = centred * ((0.5 * L * math.sqrt(d) + 6) * u + np.sqrt(var) * rms_delta / sigma**2)
    return Expected(y, w / sigma * (delta + spread) + u * (np.abs(y) + np.abs(b) + np.abs(y - b)) + TINY)


def softmax(x: Array) -> Expected:
    """x [..., n]."""
    u, n = U["f32"], x.shape[-1]
    p = oracle.softmax(x)
    x64 = np.asarray(x, np.float64)
    top = x64.max(-1, keepdims=True)
    r = u * (2 * np.abs(np.where(np.isneginf(x64), top, x64) - top) + 4)
    return Expected(p, p * (r + np.nansum(p * r, -1, keepdims=True) + L * math.sqrt(n) * u) + u * p + TINY)


def rope(x: Array, positions: Array, inv_freq: Array, style: str, factor: float, numerics: Numerics) -> Expected:
    """x [T, H, D]. Elements behind 2r are copies."""
    y, u = oracle.rope(x, positions, inv_freq, style, factor), U["f32"]
    r = len(inv_freq)
    first = np.arange(r) if style == "half" else 2 * np.arange(r)
    second = first + (r if style == "half" else 1)
    x64 = np.abs(np.asarray(x, np.float64))
    size = (x64[..., first] + x64[..., second]) * abs(factor)
    pair = 3 * u * size + TINY
    if numerics.angle == "f32":
        pair = pair + 3 * u * np.abs(positions.astype(np.float64)[:, None, None] * np.asarray(inv_freq, np.float64)) * size
    bound = np.zeros(y.shape)
    bound[..., first] = bound[..., second] = pair
    return Expected(y, np.where(bound > 0, bound + u * np.abs(y), 0.0))


def act_mul(gate: Array, up: Array | None, kind: str) -> Expected:
    """Relative errors of the exponential's argument are errors of the result: e^t has the relative error of t's absolute one."""
    u = U["f32"]
    y = oracle.act_mul(gate, up, kind)
    g = np.asarray(gate, np.float64)
    size = np.abs(y)
    with np.errstate(over="ignore", invalid="ignore"):
        sigma = oracle.act_mul(g, None, "sigmoid")
        if kind == "silu" or kind == "sigmoid":
            bound = size * u * (4 + 2 * np.abs(g) * (1 - sigma))
        elif kind == "tanh":
            bound = size * u * 10
        elif kind == "relu":
            bound = size * u  # one product, correctly rounded, needs half of this
        elif kind == "gelu":
            bound = size * u * (6 + 2 * np.minimum(g * g, 400) * (g < 0))
        elif kind == "gelu_tanh":
            z = math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
            up_size = 1.0 if up is None else np.abs(np.asarray(up, np.float64))
            slope = np.nan_to_num(np.abs(z) * (1 - np.tanh(z) ** 2), nan=0.0)
            bound = 0.5 * np.abs(g) * up_size * u * (4 + 8 * slope) + 2 * u * size
        else:  # swiglu_oai
            low = np.minimum(g, 7.0)
            bound = size * u * (6 + 2 * 1.702 * np.abs(low) * (1 - oracle.act_mul(1.702 * low, None, "sigmoid")))
            if up is not None:
                bound = bound + np.abs(oracle.act_mul(g, None, kind)) * u * (np.abs(np.clip(np.asarray(up, np.float64), -7, 7)) + 1)
    return Expected(y, bound + u * size + TINY)


def softcap(x: Array, cap: float) -> Expected:
    """As tanh, with the division's rounding."""
    y = oracle.softcap(x, cap)
    return Expected(y, 12 * U["f32"] * np.abs(y) + TINY)


def binary(op: str, x: Array, y: Array) -> Expected:
    """add, mul: one correctly rounded operation in f32."""
    a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
    per_row = b.ndim == 2 and b.shape != a.shape
    b = b.reshape(-1, *[1] * (a.ndim - 1)) if per_row else b
    with np.errstate(all="ignore"):
        result = a + b if op == "add" else a * b
    return Expected(result, np.where(np.abs(result) < TINY, TINY, 0.0), exact=True)


def copies(values: Array, ulps: float = 0.0) -> Expected:
    """Values that are only moved (bitwise), or decoded from blocks (one unit in the last place)."""
    y = np.asarray(values, np.float64)
    bound = np.full(y.shape, TINY) + ulps * 2 * U["f32"] * np.abs(y) if ulps else np.zeros(y.shape)
    return Expected(y, bound, exact=ulps == 0)


@dataclass(frozen=True)
class Sequence:
    """One sequence of an attention case: queries [n, H, Dk] at positions [n], keys [L, K, Dk], values [L, K, Dv], prefix_len."""

    query: Array
    positions: Array
    keys: Array
    values: Array
    prefix_len: int = 0


def attention(
    sequence: Sequence, numerics: Numerics, *, scale: float, mask: str = "causal", chunk: int = 0, window: int = 0, softcap: float = 0.0,
    sinks: Array | None = None, slopes: Array | None = None, value_dim: int = 0, **_: object,
) -> Expected:  # fmt: skip
    """Bound of a row: errors of the scores weighted by the softmax, plus the sum over the values. Slack: codes of keys and values
    at an edge."""
    u, acc = U["f32"], U[numerics.acc]
    q = round_to(sequence.query, numerics.act)
    (keys, key_slack), (values, value_slack) = cached(sequence.keys, numerics.weight), cached(sequence.values, numerics.weight)
    if value_dim:  # values are the first elements of keys, as these are stored
        values, value_slack = keys[..., :value_dim], key_slack[..., :value_dim]
    key_own, own = (np.minimum(s, 4 * u * np.abs(x) + TINY) for s, x in ((key_slack, keys), (value_slack, values)))  # of the scale
    key_edge, edge = key_slack - key_own, value_slack - own  # what a code at an edge may choose
    heads, group, d = q.shape[1], q.shape[1] // max(keys.shape[1], 1), q.shape[2]
    y, bound, slack = (np.full((*q.shape[:2], values.shape[2]), least) for least in (0.0, TINY, 0.0))
    for t, position in enumerate(sequence.positions.tolist()):
        seen = oracle.visible(position, len(keys), mask, chunk, window, sequence.prefix_len)
        if not seen.any():
            bound[t] = 0.0
            continue
        for h in range(heads):
            k, v = keys[:, h // group], values[:, h // group]
            sink, slope = (None if a is None else float(a[h]) for a in (sinks, slopes))
            y[t, h], s = oracle.attention_row(q[t, h], k, v, position, seen, scale=scale, softcap=softcap, sink=sink, slope=slope)
            size = np.abs(k[seen]) @ np.abs(q[t, h])
            stored, chosen = (part[seen, h // group] @ np.abs(q[t, h]) for part in (key_own, key_edge))
            top = s.max() if sink is None else max(s.max(), sink)
            r = abs(scale) * (L * math.sqrt(d) * acc * size + stored) + 2 * u * np.abs(s) + u * (2 * np.abs(s - top) + 4)
            if softcap:
                r = r + 8 * u * np.abs(s)
            if slope is not None:
                r = r + 2 * u * np.abs(slope * (np.flatnonzero(seen) - position)) + u * np.abs(s)
            p = np.exp(s - top)
            total = p.sum() + (0.0 if sink is None else math.exp(sink - top))
            p, rest = p / total, 0.0 if sink is None else math.exp(sink - top) / total * u * (2 * abs(sink - top) + 4)
            a = np.abs(v[seen]) + edge[seen, h // group]
            shared = (p * r).sum() + rest
            b = (p * (r + shared)) @ a + p @ own[seen, h // group] + L * math.sqrt(len(s)) * acc * (p @ a) + u * np.abs(y[t, h]) + TINY
            if numerics.prob is not None:
                b = b + 4 * U[numerics.prob] * np.sqrt(((p[:, None] * a) ** 2).sum(0))
                if numerics.prob == "f16":
                    b = b + 4 * math.sqrt(len(s)) * 2.0**-25 * p.max() * a.max()
            chosen = abs(scale) * chosen
            bound[t, h], slack[t, h] = b, (p * (chosen + (p * chosen).sum())) @ a + p @ edge[seen, h // group]
    return Expected(y, bound, slack=slack)
