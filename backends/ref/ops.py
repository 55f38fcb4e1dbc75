"""The ops of the catalogue in numpy: short, readable, and the same bits for a row whatever else is in the batch.

Arrays in, arrays out; f32. Products of vectors with matrices go through `dot_rows`, one row at a time, because numpy's matmul picks
another algorithm (and other bits) for one row than for sixty-four.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

__all__ = [
    "act_mul",
    "attention",
    "delta_rule",
    "dequantize",
    "dot_rows",
    "embed",
    "layer_norm",
    "linear",
    "matmul",
    "moe",
    "quantize",
    "rms_norm",
    "rope",
    "route_topk",
    "short_conv",
    "softmax",
]

F32 = np.float32


def dot_rows(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """x [n, K] · w [N, K]ᵀ -> [n, N], each row of x alone."""
    out = np.empty((len(x), len(w)), F32)
    for row, result in zip(x, out, strict=True):
        np.einsum("nk,k->n", w, np.ascontiguousarray(row), out=result)
    return out


def embed(ids: np.ndarray, table: np.ndarray) -> np.ndarray:
    """ids [n], table [V, C] -> [n, C]. Raises IndexError for an id outside of the table."""
    if len(ids) and (ids.min() < 0 or ids.max() >= len(table)):
        raise IndexError(f"embed: id {int(ids.min()) if ids.min() < 0 else int(ids.max())} is outside of 0…{len(table) - 1}")
    return table[ids]


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """x [n, K], weight [N, K], bias [N] -> [n, N]."""
    out = dot_rows(x, weight)
    return out if bias is None else out + bias


def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a [T, H, K], b [H, N, K] -> [T, H, N]."""
    out = np.empty((a.shape[0], a.shape[1], b.shape[1]), F32)
    for h in range(a.shape[1]):
        out[:, h] = dot_rows(a[:, h], b[h])
    return out


def route_topk(
    logits: np.ndarray,
    bias: np.ndarray | None,
    *,
    k: int,
    score: str,
    groups: int,
    keep_groups: int,
    group_score: str,
    renorm: int,
    scale: float,
) -> tuple[np.ndarray, np.ndarray]:
    """logits [T, E], bias [E] -> ids i32 [T, k], weights [T, k]."""
    s = softmax(logits) if score == "softmax" else _sigmoid(logits) if score == "sigmoid" else logits
    choice = s if bias is None else s + bias
    left_out = np.zeros(choice.shape, bool)
    if groups > 1:
        parts = choice.reshape(len(choice), groups, choice.shape[1] // groups)  # T may be 0
        best = np.sort(parts, axis=-1)[..., ::-1]
        worth = best[..., 0] if group_score == "max" else best[..., 0] + best[..., 1]
        dropped = np.argsort(-worth, axis=-1, kind="stable")[:, keep_groups:]  # [T, groups − keep_groups]
        out = np.zeros(parts.shape, bool)
        np.put_along_axis(out, dropped[..., None], True, axis=1)
        left_out = out.reshape(choice.shape)
    # by whether its group was dropped, then by value, NaN last; ties to the lower id
    order = np.lexsort((-choice, np.isnan(choice), left_out), axis=-1)
    ids = order[:, :k].astype(np.int32)
    weights = np.take_along_axis(s, ids, axis=-1)
    if score == "softmax_of_chosen":
        weights = softmax(weights)
    if renorm:
        weights = weights / (_row_sum(weights) + F32(1e-20))
    return ids, weights * F32(scale)


def moe(
    x: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    gate: np.ndarray,
    up: np.ndarray | None,
    down: np.ndarray,
    gate_bias: np.ndarray | None,
    up_bias: np.ndarray | None,
    down_bias: np.ndarray | None,
    kind: str,
) -> np.ndarray:
    """x [T, C], ids and weights [T, k], gate and up [E, F, C], down [E, C, F] -> [T, C]; each row's experts in ascending order.
    Raises IndexError for an id that is no expert's."""
    if ids.size and (ids.min() < 0 or ids.max() >= len(gate)):
        raise IndexError(f"moe: id {int(ids.min()) if ids.min() < 0 else int(ids.max())} is outside of 0…{len(gate) - 1}")

    def product(row: np.ndarray, matrices: np.ndarray, bias: np.ndarray | None, e: int) -> np.ndarray:
        return linear(row, matrices[e], None if bias is None else bias[e])

    out = np.zeros((len(x), down.shape[1]), F32)
    for t in range(len(x)):
        row = x[t : t + 1]
        for j in np.argsort(ids[t], kind="stable"):
            e = int(ids[t, j])
            hidden = act_mul(product(row, gate, gate_bias, e), None if up is None else product(row, up, up_bias, e), kind)
            out[t] += weights[t, j] * product(hidden, down, down_bias, e)[0]
    return out


def short_conv(state: np.ndarray, x: np.ndarray, weight: np.ndarray, kind: str) -> np.ndarray:
    """The rows of one sequence: x [n, C], weight [C, L] -> [n, C]. state [L − 1, C] is changed in place."""
    inputs = np.concatenate([state, x])  # [L − 1 + n, C]
    total = np.zeros_like(x)
    for tap in range(weight.shape[1]):
        total = total + inputs[tap : tap + len(x)] * weight[:, tap]
    state[...] = inputs[len(x) :]
    return act_mul(total, None, kind)


def delta_rule(
    state: np.ndarray,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    a_log: np.ndarray,
    dt_bias: np.ndarray,
    eps: float,
) -> np.ndarray:
    """The rows of one sequence: query and key [n, J, Dk], value [n, H, Dv], a and b [n, H], a_log and dt_bias [H] -> [n, H, Dv]. state
    [H, Dk, Dv] is changed in place."""
    out = np.empty_like(value)
    group = value.shape[1] // query.shape[1]
    decay = np.exp(-np.exp(a_log) * np.logaddexp(F32(0), a + dt_bias))  # [n, H]
    share = _sigmoid(b)
    for t in range(len(value)):
        q, k = (np.repeat(_unit(x[t], eps), group, axis=0) for x in (query, key))  # [H, Dk]
        q = q / F32(math.sqrt(q.shape[1]))
        state *= decay[t][:, None, None]
        change = share[t][:, None] * (value[t] - np.einsum("hkv,hk->hv", state, k))
        state += k[:, :, None] * change[:, None, :]
        out[t] = np.einsum("hkv,hk->hv", state, q)
    return out


def _unit(x: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(Σ x² + eps) over the last axis."""
    return x / np.sqrt(np.einsum("hk,hk->h", x, x) + F32(eps))[:, None]


def _row_sum(x: np.ndarray) -> np.ndarray:
    """Sum over the last axis, row by row: [T, C] -> [T, 1]."""
    return np.array([np.add.reduce(row) for row in np.ascontiguousarray(x)], F32).reshape(-1, 1)


def _row_mean(x: np.ndarray) -> np.ndarray:
    """Mean over the last axis, row by row: [..., C] -> [..., 1]."""
    flat = np.ascontiguousarray(x).reshape(-1, x.shape[-1])
    means = np.array([np.add.reduce(row) for row in flat], F32) / F32(x.shape[-1])
    return means.reshape(*x.shape[:-1], 1)


def rms_norm(x: np.ndarray, weight: np.ndarray | None, eps: float) -> np.ndarray:
    """x / sqrt(mean(x²) + eps) · weight over the last axis."""
    out = x / np.sqrt(_row_mean(x * x) + F32(eps))
    return out if weight is None else out * weight


def layer_norm(x: np.ndarray, weight: np.ndarray | None, bias: np.ndarray | None, eps: float) -> np.ndarray:
    """(x − mean) / sqrt(var + eps) · weight + bias over the last axis; two passes."""
    centred = x - _row_mean(x)
    out = centred / np.sqrt(_row_mean(centred * centred) + F32(eps))
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def rope(x: np.ndarray, positions: np.ndarray, inv_freq: np.ndarray, style: str, factor: float) -> np.ndarray:
    """x [T, H, D], positions [T], inv_freq [r]: turns the first 2r elements of each head; angles in f64."""
    r = len(inv_freq)
    angle = positions.astype(np.float64)[:, None] * inv_freq.astype(np.float64)  # [T, r]
    cos = (np.cos(angle) * factor).astype(F32)[:, None, :]  # [T, 1, r]
    sin = (np.sin(angle) * factor).astype(F32)[:, None, :]
    first, second = (slice(0, r), slice(r, 2 * r)) if style == "half" else (slice(0, 2 * r, 2), slice(1, 2 * r, 2))
    out = x.copy()
    a, b = x[..., first], x[..., second]
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    return out


def softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / (_row_mean(e) * F32(x.shape[-1]))


def attention(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    position: int,
    *,
    scale: float,
    mask: str,
    chunk: int,
    window: int,
    softcap: float,
    sinks: np.ndarray | None,
    slopes: np.ndarray | None,
    prefix_len: int,
) -> np.ndarray:
    """One row: query [H, Dk] at `position` over its sequence's keys [n, K, Dk] and values [n, K, Dv] -> [H, Dv]."""
    num_heads, num_kv = query.shape[0], keys.shape[1]
    group = num_heads // num_kv
    out = np.zeros((num_heads, values.shape[2]), F32)
    low, high = visible_keys(position, len(keys), mask, chunk, window, prefix_len)
    if low >= high:
        return out
    for h in range(num_heads):
        k = np.ascontiguousarray(keys[low:high, h // group])  # [n, Dk]
        v = np.ascontiguousarray(values[low:high, h // group].T)  # [Dv, n]
        score = np.einsum("nd,d->n", k, query[h]) * F32(scale)
        if softcap:
            score = np.tanh(score / F32(softcap)) * F32(softcap)
        if slopes is not None:
            score = score + slopes[h] * np.arange(low - position, high - position, dtype=F32)
        top = score.max() if sinks is None else max(score.max(), sinks[h])
        p = np.exp(score - top)
        total = np.add.reduce(p) + (0 if sinks is None else np.exp(sinks[h] - top))
        out[h] = np.einsum("dn,n->d", v, p) / total
    return out


def visible_keys(position: int, length: int, mask: str, chunk: int, window: int, prefix_len: int) -> tuple[int, int]:
    """The keys [low, high) that a row at `position` sees in a sequence of `length` cached tokens: one range for every mask."""
    low, high = 0, min(position + 1, length)
    if mask == "full":
        high = length
    elif mask == "prefix" and position < prefix_len:
        high = min(max(position + 1, prefix_len), length)
    elif mask == "chunk":
        low = position // chunk * chunk
    if window:
        low = max(low, position - window + 1)
    return low, high


def act_mul(gate: np.ndarray, up: np.ndarray | None, kind: str) -> np.ndarray:
    """act(gate) · up, or act(gate) alone."""
    if kind == "swiglu_oai":
        g = np.minimum(gate, F32(7))
        out = g * _sigmoid(F32(1.702) * g)
        return out if up is None else out * (np.clip(up, F32(-7), F32(7)) + F32(1))
    out = _ACTIVATIONS[kind](gate)
    return out if up is None else out * up


def _sigmoid(z: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(z))  # never overflows
    return np.where(z >= 0, 1 / (1 + e), e / (1 + e)).astype(F32)


def _gelu(z: np.ndarray) -> np.ndarray:
    flat = z.reshape(-1)
    tail = np.fromiter(
        (math.erfc(-v / math.sqrt(2)) for v in flat.tolist()), np.float64, len(flat)
    )  # 1 + erf would cancel below −5
    return (z * (0.5 * tail.reshape(z.shape))).astype(F32)


def _gelu_tanh(z: np.ndarray) -> np.ndarray:
    return F32(0.5) * z * (1 + np.tanh(F32(math.sqrt(2 / math.pi)) * (z + F32(0.044715) * z * z * z)))


_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": lambda z: z * _sigmoid(z),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "relu": lambda z: np.maximum(z, F32(0)),
}


def quantize(x: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """x [n, K] -> codes i8 [n, K], scales f32 [n, K/group]."""
    parts = x.reshape(len(x), x.shape[1] // group, group)
    scales = np.abs(parts).max(axis=-1) / F32(127)
    safe = np.where(scales > 0, scales, F32(1))
    codes = np.rint(parts / safe[..., None]).astype(np.int8)
    return codes.reshape(x.shape), scales.astype(F32)


def dequantize(codes: np.ndarray, scales: np.ndarray, group: int) -> np.ndarray:
    """codes i8 [n, K], scales [n, K/group] -> f32 [n, K]."""
    return (codes.reshape(len(codes), codes.shape[1] // group, group).astype(F32) * scales[..., None]).reshape(codes.shape)
