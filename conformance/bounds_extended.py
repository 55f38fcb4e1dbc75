"""Bounds of the extended ops, in the manner of `bounds.py`: experts, routing, recurrences.

moe: the bounds of its products and of its activation, each carried through what follows: |down| for a hidden element. Slack is only what a
rounding may choose: where activations are rounded, one step of a value that lies within that error of an edge. delta_rule: a worst case that is carried
through a recurrence grows without limit, though the recurrence itself forgets; so its tolerance is four times the largest deviation of
eight runs in which every operation is moved at random within its own bound. route_topk has no bound: see `choice_fault`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import bounds, oracle
from . import oracle_extended as extended
from .bounds import TINY, Expected, L, Numerics, U
from .numbers import Numbers

__all__ = ["choice_fault", "delta_rule", "moe", "route_weights", "short_conv"]

Array = np.ndarray
RUNS = 8
STEEPEST = 1.15
"""No activation of the catalogue is steeper."""


def _scores(logits: Array, bias: Array | None, score: str) -> tuple[Array, Array, Array, Array]:
    """(s, how far it may be off, c, how far that may be off): [T, E] each."""
    s, c = extended.route_scores(logits, bias, score)
    if score == "softmax":
        off = bounds.softmax(np.asarray(logits)).bound
    elif score == "sigmoid":
        z = np.where(np.isfinite(logits), np.abs(logits), 0.0)
        off = s * U["f32"] * (4 + 2 * z * (1 - s)) + TINY
    else:
        off = np.zeros(s.shape)
    return s, off, c, off if bias is None else off + U["f32"] * (np.abs(np.where(np.isfinite(c), c, 0.0)) + off)


def choice_fault(logits: Array, bias: Array | None, ids: Array, a: Mapping[str, Any]) -> str:
    """Why `ids` [T, k] is no choice that `route_topk` allows; "" if it is one.

    Where two scores (or two groups) are nearer to each other than rounding can tell, either may come first; equal ones never:
    there the lower id does.
    """
    _, _, c, off = _scores(logits, bias, a["score"])
    experts, groups = c.shape[1], a["groups"]
    size = experts // groups
    if not ((ids >= 0) & (ids < experts)).all():
        return f"an id outside of 0…{experts - 1}: {ids[(ids < 0) | (ids >= experts)][0]}"
    for t in range(len(c)):
        row = ids[t].tolist()
        if len(set(row)) < len(row):
            return f"row {t} names an expert twice: {row}"
        allowed, certain = _groups(c[t], off[t], a)
        ahead = _ahead(c[t], off[t])  # [E, E]: i is certainly before j
        for place, e in enumerate(row):
            if e // size not in allowed:
                return f"row {t}: expert {e} is in a group that is not among the {a['keep_groups']} best"
            later = [f for f in row[place + 1 :] if ahead[f, e]]
            if later:
                return f"row {t}: expert {e} comes before {later[0]}, which is better: {c[t, e]:.9g} and {c[t, later[0]]:.9g}"
        missed = [f for f in range(experts) if f not in row and f // size in certain and any(ahead[f, e] for e in row)]
        if missed:
            return f"row {t}: expert {missed[0]} is left out, though {c[t, missed[0]]:.9g} is better than that of one of {row}"
    return ""


def _ahead(c: Array, off: Array) -> Array:
    """[n, n]: i is before j whatever rounding does: larger by more than that, or equal and first."""
    index = np.arange(len(c))
    with np.errstate(invalid="ignore"):
        larger = c[:, None] > c[None] + off[:, None] + off[None]
    return larger | ((c[:, None] == c[None]) & (index[:, None] < index[None]))


def _groups(c: Array, off: Array, a: Mapping[str, Any]) -> tuple[set[int], set[int]]:
    """(groups that may be kept, groups that must be)."""
    groups, keep = a["groups"], a["keep_groups"]
    if groups == 1 or keep == groups:
        return set(range(groups)), set(range(groups))
    parts, most = c.reshape(groups, -1), off.reshape(groups, -1).max(-1)
    best = np.sort(parts, -1)[:, ::-1]
    worth = best[:, 0] if a["group_score"] == "max" else best[:, 0] + best[:, 1]
    slack = most if a["group_score"] == "max" else 2 * most + U["f32"] * np.abs(np.where(np.isfinite(worth), worth, 0.0))
    ahead = _ahead(worth, slack)
    may = {g for g in range(groups) if ahead[:, g].sum() < keep}
    return may, {g for g in may if groups - 1 - ahead[g].sum() < keep}


def route_weights(logits: Array, bias: Array | None, ids: Array, a: Mapping[str, Any]) -> Expected:
    """Weights [T, k] of the experts `ids`."""
    s, off, _, _ = _scores(logits, bias, a["score"])
    w, e, u = np.take_along_axis(s, ids, 1), np.take_along_axis(off, ids, 1), U["f32"]
    if a["score"] == "softmax_of_chosen":
        chosen = bounds.softmax(w)
        w, e = chosen.y, chosen.bound
    if a["renorm"]:
        total = w.sum(1, keepdims=True) + 1e-20
        e = e / total + w / total**2 * e.sum(1, keepdims=True) + w / total * u * (L * math.sqrt(ids.shape[1]) + 2)
        w = w / total
    scale = abs(float(np.float32(a["scale"])))
    return Expected(w * float(np.float32(a["scale"])), scale * (e + 2 * u * np.abs(w)) + TINY)


def moe(
    x: Array, ids: Array, weights: Array, stacks: Sequence[Array | None], biases: Sequence[Array | None], kind: str, numerics: Numerics,
    minima: Sequence[Array | None] = (None, None, None),
) -> Expected:  # fmt: skip
    """x [T, C], ids and weights [T, k]; stacks: gate, up, down; biases: of each; minima: as in `bounds.linear`, of each."""
    gate, up, down = stacks
    assert gate is not None
    assert down is not None
    y, bound, slack = np.zeros(x.shape), np.full(x.shape, TINY), np.zeros(x.shape)
    for e in range(len(gate)):
        rows, place = np.nonzero(np.equal(ids, e))
        if not len(rows):
            continue
        b = [None if v is None else v[e] for v in biases]
        m = [None if v is None else v[e] for v in minima]
        g = bounds.linear(x[rows], gate[e], b[0], numerics, m[0])
        v = None if up is None else bounds.linear(x[rows], up[e], b[1], numerics, m[1])
        with np.errstate(all="ignore"):
            hidden = bounds.act_mul(g.y, None if v is None else v.y, kind)
            size = 1.0 if v is None else _factor(v.y, kind)
            moved, edged = hidden.bound + STEEPEST * g.bound * size, STEEPEST * g.slack * size
            if v is not None:
                active = np.abs(oracle.act_mul(g.y, None, kind))
                moved, edged = moved + v.bound * active, edged + v.slack * (active + STEEPEST * g.slack)
            d = bounds.linear(hidden.y, down[e], b[2], numerics, m[2], moved, np.asarray(edged))
            w = np.asarray(weights, np.float64)[rows, place][:, None]
            y[rows] += w * d.y
            bound[rows] += np.abs(w) * d.bound + 4 * U["f32"] * np.abs(w * d.y)
            slack[rows] += np.abs(w) * d.slack
    return Expected(y, bound + U["f32"] * np.abs(y), slack=slack)


def _factor(up: Array, kind: str) -> Array:
    """|what the activated gate is multiplied with|."""
    return np.abs(np.clip(up, -7, 7) + 1 if kind == "swiglu_oai" else up)


def short_conv(history: Array, weight: Array, kind: str, count: int) -> Expected:
    """As the oracle's; a sum of L products, then the activation."""
    y = extended.short_conv(history, weight, kind, count)
    taps, u = weight.shape[1], U["f32"]
    size = np.stack([np.abs(history[len(history) - count + t + 1 - taps : len(history) - count + t + 1]).T * np.abs(weight) for t in range(count)]).sum(-1) if count else y
    sums = np.stack([(history[len(history) - count + t + 1 - taps : len(history) - count + t + 1].T * weight).sum(-1) for t in range(count)]) if count else y
    own = bounds.act_mul(sums, None, kind).bound
    return Expected(y, STEEPEST * (L * math.sqrt(taps) * u * size + TINY) + own)


def delta_rule(query: Array, key: Array, value: Array, a: Array, b: Array, a_log: Array, dt_bias: Array, eps: float) -> Expected:
    """As the oracle's, with the tolerance of an ensemble; one for each row and head."""
    y = extended.delta_rule(query, key, value, a, b, a_log, dt_bias, eps)
    worst = np.zeros((*y.shape[:2], 1))
    for seed in range(RUNS):
        numbers = Numbers(2000 + seed)

        def moved(x: Array, bound: Array, numbers: Numbers = numbers) -> Array:
            return x + (2 * numbers.uniform(*x.shape) - 1) * bound

        worst = np.maximum(worst, np.abs(extended.delta_rule(query, key, value, a, b, a_log, dt_bias, eps, moved) - y).max(-1, keepdims=True))
    return Expected(y, np.broadcast_to(4 * worst, y.shape) + U["f32"] * np.abs(y) + TINY)
