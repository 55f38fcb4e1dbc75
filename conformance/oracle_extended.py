"""The oracle of the extended ops, in f64, written for reading: concat, route_topk, short_conv, delta_rule; and of int8 caches.

As in `oracle.py`: nothing is shared with `backends/ref`. Imports only numpy and the oracle.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from . import oracle

__all__ = ["concat", "delta_rule", "int8_vectors", "route_scores", "short_conv", "sigmoid"]

Array = np.ndarray
Moved = Callable[[Array, Array], Array]
"""(values, how far rounding may move each) -> the values, or moved ones."""


def concat(x: Array, y: Array) -> Array:
    """x [..., A], y [..., B] -> [..., A + B]."""
    out = np.empty((*x.shape[:-1], x.shape[-1] + y.shape[-1]))
    out[..., : x.shape[-1]], out[..., x.shape[-1] :] = x, y
    return out


def sigmoid(z: Array) -> Array:
    """1 / (1 + exp(−z))."""
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-np.asarray(z, np.float64)))


def route_scores(logits: Array, bias: Array | None, score: str) -> tuple[Array, Array]:
    """logits [T, E], bias [E] -> (s [T, E] that weighs, c [T, E] that chooses) of `route_topk`."""
    x = np.asarray(logits, np.float64)
    s = oracle.softmax(x) if score == "softmax" else sigmoid(x) if score == "sigmoid" else x
    return s, s if bias is None else s + np.asarray(bias, np.float64)


def short_conv(history: Array, weight: Array, kind: str, count: int) -> Array:
    """The last `count` results of one sequence: history [L − 1 + n, C] of all its inputs, L − 1 zeros first; weight [C, L] -> [count, C]."""
    history, weight = np.asarray(history, np.float64), np.asarray(weight, np.float64)
    taps = weight.shape[1]
    sums = np.zeros((count, history.shape[1]))
    for t in range(count):
        end = len(history) - count + t + 1
        for tap in range(taps):
            sums[t] += weight[:, tap] * history[end - taps + tap]
    return oracle.act_mul(sums, None, kind)


def delta_rule(
    query: Array, key: Array, value: Array, a: Array, b: Array, a_log: Array, dt_bias: Array, eps: float, moved: Moved = lambda x, bound: x,
) -> Array:  # fmt: skip
    """One sequence from its first row on: query, key [n, J, Dk], value [n, H, Dv], a, b [n, H] -> [n, H, Dv] (arXiv 2412.06464, eq. 10).

    moved: called with everything that f32 would round and how far one operation of it may be off, for an ensemble of runs.
    """
    query, key, value, a, b, a_log, dt_bias = (np.asarray(x, np.float64) for x in (query, key, value, a, b, a_log, dt_bias))
    u, heads, width = 2.0**-24, value.shape[1], query.shape[2]
    state, out = np.zeros((heads, width, value.shape[2])), np.empty(value.shape)
    norm = (2 * math.sqrt(width) + 4) * u
    for t in range(len(value)):
        rate = np.exp(a_log) * np.logaddexp(0.0, a[t] + dt_bias)
        decay = np.exp(-rate)
        decay = moved(decay, decay * u * (8 * rate + 4))
        share = sigmoid(b[t])
        share = moved(share, share * u * (2 * np.abs(b[t]) + 4))
        for h in range(heads):
            j = h // (heads // query.shape[1])
            q = query[t, j] / math.sqrt((query[t, j] ** 2).sum() + float(np.float32(eps))) / math.sqrt(width)
            k = key[t, j] / math.sqrt((key[t, j] ** 2).sum() + float(np.float32(eps)))
            q, k = moved(q, np.abs(q) * norm), moved(k, np.abs(k) * norm)
            s = decay[h] * state[h]
            s = moved(s, u * np.abs(s))
            seen = moved(s.T @ k, 4 * math.sqrt(width) * u * (np.abs(s).T @ np.abs(k)))
            change = share[h] * (value[t, h] - seen)
            change = moved(change, 3 * u * (np.abs(change) + share[h] * np.abs(seen)))
            s = s + np.outer(k, change)
            state[h] = moved(s, u * (np.abs(s) + np.abs(np.outer(k, change))))
            y = state[h].T @ q
            out[t, h] = moved(y, 4 * math.sqrt(width) * u * (np.abs(state[h]).T @ np.abs(q)))
    return out


def int8_vectors(x: Array, group: int = 0) -> tuple[Array, Array]:
    """x [..., D] -> (x / scale, scale), both [..., D]: scale = largest |x| of each run of `group` elements (0: all) / 127. A run that
    holds NaN or infinity has the scale NaN."""
    x = np.asarray(x, np.float64)
    width = x.shape[-1]
    size = min(group, width) if group else width
    exact, scale = np.empty(x.shape), np.empty(x.shape)
    for at in range(0, width, max(size, 1)):
        part = x[..., at : at + size]
        most = np.abs(part).max(-1, keepdims=True)
        step = np.where(np.isfinite(part).all(-1, keepdims=True), most / 127, np.nan)
        scale[..., at : at + size] = step
        exact[..., at : at + size] = part / np.where(step == 0, 1.0, step)
    return exact, scale
