"""The oracle: every op of the catalogue in f64, one short function each, written for reading. Imports only numpy.

Inputs are what the backend was given, already rounded to their storage type; results are what exact arithmetic would give (to
f64's precision). Nothing here is shared with `backends/ref`, so a mistake must be made twice to go unnoticed. `bounds.py` says how
far a result may be from these.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

__all__ = [
    "act_mul",
    "attention",
    "attention_row",
    "dequantize",
    "embed",
    "layer_norm",
    "linear",
    "matmul",
    "quantize",
    "rms_norm",
    "rope",
    "sample",
    "softcap",
    "softmax",
    "visible",
]

Array = np.ndarray


def _f64(*arrays: Array | None) -> list[Array]:
    return [None if a is None else np.asarray(a, np.float64) for a in arrays]  # type: ignore[misc]


def embed(ids: Array, table: Array) -> Array:
    """ids [n], table [V, C] -> [n, C]."""
    return np.asarray(table, np.float64)[ids]


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x [n, K], weight [N, K], bias [N] -> [n, N]: Σ_k x[i, k] · weight[j, k] + bias[j]."""
    x, weight, bias = _f64(x, weight, bias)
    y = x @ weight.T
    return y if bias is None else y + bias


def matmul(a: Array, b: Array) -> Array:
    """a [T, H, K], b [H, N, K] -> [T, H, N]."""
    a, b = _f64(a, b)
    return np.stack([a[:, h] @ b[h].T for h in range(a.shape[1])], axis=1) if a.shape[1] else np.zeros((len(a), 0, b.shape[1]))


def rms_norm(x: Array, weight: Array | None, eps: float) -> Array:
    """x / sqrt(mean(x²) + eps) · weight over the last axis (Zhang & Sennrich 2019, eq. 4)."""
    x, weight = _f64(x, weight)
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float64(np.float32(eps)))
    return y if weight is None else y * weight


def layer_norm(x: Array, weight: Array | None, bias: Array | None, eps: float) -> Array:
    """(x − mean) / sqrt(var + eps) · weight + bias over the last axis (Ba et al. 2016)."""
    x, weight, bias = _f64(x, weight, bias)
    centred = x - x.mean(-1, keepdims=True)
    y = centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + np.float64(np.float32(eps)))
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def rope(x: Array, positions: Array, inv_freq: Array, style: str = "half", factor: float = 1.0) -> Array:
    """x [T, H, D]: pair i of the first 2r elements turns by positions[t] · inv_freq[i] (Su et al. 2021)."""
    x, inv_freq = _f64(x, inv_freq)
    r = len(inv_freq)
    first = np.arange(r) if style == "half" else 2 * np.arange(r)
    second = first + (r if style == "half" else 1)
    angle = positions.astype(np.float64)[:, None, None] * inv_freq  # [T, 1, r]
    cos, sin = np.cos(angle) * np.float64(np.float32(factor)), np.sin(angle) * np.float64(np.float32(factor))
    y = x.copy()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., first] * sin + x[..., second] * cos
    return y


def visible(position: int, length: int, mask: str, chunk: int, window: int, prefix_len: int) -> Array:
    """Which of `length` keys a row at `position` sees: bool [length], key by key as the catalogue says it."""
    j, p = np.arange(length), position
    causal = j <= p
    seen = {
        "causal": causal,
        "full": np.ones(length, bool),
        "prefix": causal | ((j < prefix_len) & (p < prefix_len)),
        "chunk": causal & (j // max(chunk, 1) == p // max(chunk, 1)),
    }[mask]
    return seen & (p - j < window) if window > 0 else seen


def attention_row(
    q: Array, keys: Array, values: Array, position: int, seen: Array, *, scale: float, softcap: float = 0.0,
    sink: float | None = None, slope: float | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """One head of one row: q [Dk], keys [n, Dk], values [n, Dv] -> (out [Dv], score [n] of the keys that are seen)."""
    k, v = np.asarray(keys, np.float64)[seen], np.asarray(values, np.float64)[seen]
    score = (k @ np.asarray(q, np.float64)) * np.float64(np.float32(scale))
    if softcap:
        score = np.float64(np.float32(softcap)) * np.tanh(score / np.float64(np.float32(softcap)))
    if slope is not None:
        score = score + np.float64(slope) * (np.flatnonzero(seen) - position)
    if not len(score):
        return np.zeros(values.shape[1]), score
    top = score.max() if sink is None else max(score.max(), float(sink))
    p = np.exp(score - top)
    total = p.sum() + (0.0 if sink is None else math.exp(float(sink) - top))
    return (p[:, None] * v).sum(0) / total, score


def attention(
    query: Array, keys: Array, values: Array, positions: Array, *, scale: float, mask: str = "causal", chunk: int = 0, window: int = 0,
    softcap: float = 0.0, sinks: Array | None = None, slopes: Array | None = None, prefix_len: int = 0,
) -> Array:  # fmt: skip
    """Rows of one sequence: query [n, H, Dk], keys [L, K, Dk], values [L, K, Dv], positions [n] -> [n, H, Dv]."""
    group = query.shape[1] // max(keys.shape[1], 1)
    out = np.zeros((*query.shape[:2], values.shape[2]))
    for t, position in enumerate(positions.tolist()):
        seen = visible(position, len(keys), mask, chunk, window, prefix_len)
        for h in range(query.shape[1]):
            sink, slope = (None if a is None else float(a[h]) for a in (sinks, slopes))
            k, v = keys[:, h // group], values[:, h // group]
            out[t, h], _ = attention_row(query[t, h], k, v, position, seen, scale=scale, softcap=softcap, sink=sink, slope=slope)
    return out


def _sigmoid(z: Array) -> Array:
    e = np.exp(-np.abs(z))
    return np.where(z >= 0, 1 / (1 + e), e / (1 + e))


def act_mul(gate: Array, up: Array | None, kind: str) -> Array:
    """act(gate) · up, or act(gate) alone."""
    gate, up = _f64(gate, up)
    if kind == "swiglu_oai":
        g = np.minimum(gate, 7.0)
        y = g * _sigmoid(np.float64(np.float32(1.702)) * g)
        return y if up is None else y * (np.clip(up, -7.0, 7.0) + 1.0)
    if kind == "gelu":
        y = gate * 0.5 * np.vectorize(math.erfc, otypes=[np.float64])(-gate / math.sqrt(2.0))
    elif kind == "gelu_tanh":
        y = gate * _sigmoid(2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))  # ½(1 + tanh a) = σ(2a)
    elif kind == "silu":
        y = gate * _sigmoid(gate)
    else:
        plain: dict[str, Callable[[Array], Array]] = {"sigmoid": _sigmoid, "tanh": np.tanh, "relu": lambda z: np.maximum(z, 0.0)}
        y = plain[kind](gate)
    return y if up is None else y * up


def softmax(x: Array) -> Array:
    """exp(x − max) / Σ exp(x − max) over the last axis."""
    (x,) = _f64(x)
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def softcap(x: Array, cap: float) -> Array:
    """cap · tanh(x / cap)."""
    c = np.float64(np.float32(cap))
    return c * np.tanh(np.asarray(x, np.float64) / c)


def quantize(x: Array, group: int) -> tuple[Array, Array]:
    """x [n, K] -> unrounded codes f64 [n, K] and scales f64 [n, K/group]: scale = max|x| / 127, code = x / scale, zeros for zeros."""
    (x,) = _f64(x)
    parts = x.reshape(len(x), x.shape[1] // group, group)
    scale = np.abs(parts).max(-1) / 127.0
    codes = parts / np.where(scale > 0, scale, 1.0)[..., None]
    return codes.reshape(x.shape), scale


def dequantize(codes: Array, scales: Array, group: int) -> Array:
    """codes i8 [n, K], scales [n, K/group] -> [n, K]."""
    return np.asarray(codes, np.float64) * np.repeat(np.asarray(scales, np.float64), group, axis=1)


def sample(
    logits: Array, u: float, temperature: float, top_k: int, top_p: float, min_p: float, adjust: list[tuple[int, float, float, float]],
) -> int:  # fmt: skip
    """One row: the id that the rule of sampling gives; −1 without a finite logit.

    adjust: (id, bias, repeat, sub). All arithmetic in f32 but for the two products in f64; weights are integers, so the sums are
    exact and the answer is one id, not a range.
    """
    f = np.float32
    z = np.asarray(logits, f).copy()
    if np.isnan(z).any() or np.isposinf(z).any():
        return -1

    def adjusted(bans: bool) -> Array:
        y = z.copy()
        for token, bias, repeat, sub in adjust:
            if bias != -math.inf or bans:
                y[token] = y[token] + f(bias)
            if f(repeat) != 1:
                y[token] = y[token] / f(repeat) if y[token] > 0 else y[token] * f(repeat)
            y[token] = y[token] - f(sub)
        return y

    y = adjusted(True)
    if np.isneginf(y).all() and any(bias == -math.inf for _, bias, _, _ in adjust):
        y = adjusted(False)
    if np.isneginf(y).all() or np.isnan(y).any() or np.isposinf(y).any():
        return -1
    y = y + f(0)  # minus zero equals zero
    order = np.lexsort((np.arange(len(y)), -y.astype(np.float64)))
    if f(temperature) <= f(1e-5):
        return int(order[0])
    weights = _weights((y[order] - y[order[0]]) * (f(1) / f(temperature)))
    if 0 < top_k < len(y):
        order, weights = order[:top_k], weights[:top_k]
    if f(top_p) < 1:
        need = math.ceil(float(f(top_p)) * float(sum(weights)))
        count, total = 0, 0
        while count < len(weights) and (count == 0 or total < need):
            total += weights[count]
            count += 1
        order, weights = order[:count], weights[:count]
    if f(min_p) > 0:
        kept = [w for w in weights if w >= float(f(min_p)) * 2.0**40]
        weights = kept or weights[:1]
    at, total = min(math.floor(u * float(sum(weights))), sum(weights) - 1), 0
    for token, weight in zip(order.tolist(), weights, strict=False):
        total += weight
        if total > at:
            return int(token)
    return int(order[len(weights) - 1])


def _weights(t: Array) -> list[int]:
    """round(exp(t) · 2⁴⁰) with exp as the rule defines it, operation by operation in f32."""
    f = np.float32
    t = np.maximum(t.astype(f), f(-60))
    k = np.rint(t * f(float.fromhex("0x1.715476p0")))
    r = (t - k * f(float.fromhex("0x1.62e4p-1"))) - k * f(float.fromhex("0x1.7f7d1cp-20"))
    p: Array = np.full(t.shape, f(1 / 5040))
    for c in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        p = p * r + f(c)
    return [round(math.ldexp(float(a), int(b) + 40)) for a, b in zip(p, k, strict=True)]
