"""An independent interpreter of graphs for tests: one sequence, computed whole in float64, without cache blocks or planner.

It shares no code with backends or executor, so the two agreeing with it (and it with the fixtures) means something. Only the
ops that the families use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fastllm.core.graph import Graph, Node, Value
from fastllm.core.model import ModelDef
from fastllm.core.weights import TensorSource

__all__ = ["evaluate", "load_weights"]


def load_weights(model: ModelDef, sources: Mapping[str, TensorSource], dtype: Any = np.float64) -> dict[str, np.ndarray]:
    """Every graph weight, decoded."""
    weights = {}
    for value in model.graph.of_kind("weight"):
        shape = tuple(int(d) for d in value.shape)
        weights[value.name] = model.weights[value.name].resolve(sources, value.name, shape).decode().astype(dtype)
    return weights


def evaluate(
    graph: Graph,
    weights: Mapping[str, np.ndarray],
    ids: Sequence[int],
    rows: Sequence[int] | None = None,
    dtype: Any = np.float64,
) -> np.ndarray:
    """Logits [R, V] of the given rows (all by default) of one sequence of token ids."""
    tokens = np.asarray(ids)
    chosen = np.arange(len(tokens)) if rows is None else np.asarray(rows)
    store: dict[str, Any] = {"ids": tokens, "positions": np.arange(len(tokens)), "query_start": None, "state_slot": None, "sample_rows": chosen, **weights}
    for value in graph.of_kind("const"):
        store[value.name] = value.data if value.dtype == "i32" else value.data.astype(dtype)
    sizes = {"T": len(tokens), "R": len(chosen)}
    for node in graph.nodes:
        if node.op == "sample":
            continue
        args = [None if name is None else _get(graph, store, name, sizes) for name in node.inputs]
        result = _run(node, args, graph, store)
        if len(node.outputs) == 1:
            store[node.outputs[0]] = np.ascontiguousarray(result, dtype)
        for name, part in zip(node.outputs, result, strict=True) if len(node.outputs) > 1 else ():
            store[name] = np.ascontiguousarray(part, int if graph.values[name].dtype == "i32" else dtype)
    return store[graph.outputs[0]]


def _get(graph: Graph, store: dict[str, Any], name: str, sizes: Mapping[str, int]) -> Any:
    value: Value = graph.values[name]
    if value.view is None:
        return store.get(name)
    base = store[value.view.base].reshape(-1)
    shape = tuple(sizes[d] if isinstance(d, str) else d for d in value.shape)
    strides = tuple(s * base.itemsize for s in value.view.strides)
    return np.lib.stride_tricks.as_strided(base[value.view.offset :], shape, strides)


def _run(node: Node, x: list[Any], graph: Graph, store: dict[str, Any]) -> Any:
    a = node.attrs
    if node.op == "embed":
        return x[1][x[0]]
    if node.op == "linear":
        return x[0] @ x[1].T + (0 if x[2] is None else x[2])
    if node.op == "rms_norm":
        scaled = x[0] / np.sqrt(np.mean(x[0] ** 2, axis=-1, keepdims=True) + a["eps"])
        return scaled * (1 if x[1] is None else x[1])
    if node.op == "rope":
        return _rope(x[0], x[1], x[2], a["style"], a["factor"])
    if node.op == "matmul":
        return np.einsum("thk,hnk->thn", x[0], x[1])
    if node.op == "concat":
        return np.concatenate(x, axis=-1)
    if node.op == "kv_write":
        store[node.inputs[0]] = (np.array(x[1]), None if x[2] is None else np.array(x[2]))
        return None
    if node.op == "attention":
        keys, values = store[node.inputs[1]]
        return _attention(x[0], keys, keys[..., : a["value_dim"]] if values is None else values, a, x[6])
    if node.op == "act_mul":
        return _activation(x[0], a["kind"]) if x[1] is None else _gated(x[0], x[1], a["kind"])
    if node.op == "add":
        return x[0] + x[1]
    if node.op == "mul":
        return x[0] * x[1]
    if node.op == "short_conv":
        padded = np.concatenate([np.zeros((x[2].shape[1] - 1, x[1].shape[1])), x[1]])
        taps = [padded[i : i + len(x[1])] * x[2][:, i] for i in range(x[2].shape[1])]
        return _activation(sum(taps), a["kind"])
    if node.op == "delta_rule":
        return _delta_rule(*x[1:8], a["eps"])
    if node.op == "route_topk":
        return _route(x[0], x[1], a)
    if node.op == "moe":
        return _experts(x, a["kind"])
    if node.op == "softcap":
        return a["cap"] * np.tanh(x[0] / a["cap"])
    raise NotImplementedError(node.op)


def _rope(x: np.ndarray, positions: np.ndarray, inv_freq: np.ndarray, style: str, factor: float) -> np.ndarray:
    angle = positions[:, None, None] * inv_freq  # [T, 1, r]
    cos, sin = np.cos(angle) * factor, np.sin(angle) * factor
    r = len(inv_freq)
    first = slice(0, r) if style == "half" else slice(0, 2 * r, 2)
    second = slice(r, 2 * r) if style == "half" else slice(1, 2 * r, 2)
    out = np.array(x)
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def _attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, a: Mapping[str, Any], sinks: Any) -> np.ndarray:
    tokens, heads = q.shape[:2]
    group = heads // k.shape[1]
    distance = np.arange(tokens)[:, None] - np.arange(tokens)
    visible = distance >= 0
    if a["window"]:
        visible &= distance < a["window"]
    out = np.zeros((tokens, heads, v.shape[2]), q.dtype)
    for h in range(heads):
        scores = a["scale"] * (q[:, h] @ k[:, h // group].T)
        if a["softcap"]:
            scores = a["softcap"] * np.tanh(scores / a["softcap"])
        scores = np.where(visible, scores, -np.inf)
        top = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True) + (0 if sinks is None else np.exp(sinks[h] - top))
        out[:, h] = weights / total @ v[:, h // group]
    return out


def _delta_rule(q: Any, k: Any, v: Any, a: Any, b: Any, a_log: Any, dt_bias: Any, eps: float) -> np.ndarray:
    out = np.zeros(v.shape)
    for h in range(v.shape[1]):
        state, j = np.zeros((q.shape[2], v.shape[2])), h // (v.shape[1] // q.shape[1])
        for t in range(len(v)):
            query, key = (x[t, j] / math.sqrt(float(x[t, j] @ x[t, j]) + eps) for x in (q, k))
            state = state * math.exp(-math.exp(a_log[h]) * math.log1p(math.exp(a[t, h] + dt_bias[h])))
            state = state + np.outer(key, (v[t, h] - state.T @ key) / (1 + math.exp(-b[t, h])))
            out[t, h] = state.T @ query / math.sqrt(q.shape[2])
    return out


def _route(logits: np.ndarray, bias: Any, a: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """One row and one expert at a time, in plain Python."""
    all_ids, all_weights = [], []
    for row in logits.tolist():
        exp = [math.exp(v - max(row)) for v in row]
        scores = {
            "softmax": [e / sum(exp) for e in exp],
            "sigmoid": [1 / (1 + math.exp(-v)) for v in row],
            "softmax_of_chosen": row,
        }[a["score"]]
        choice = [s + (0.0 if bias is None else float(bias[e])) for e, s in enumerate(scores)]
        size = len(row) // a["groups"]
        groups = [sorted(choice[g * size : (g + 1) * size], reverse=True) for g in range(a["groups"])]
        worth = [g[0] if a["group_score"] == "max" or len(groups) == 1 else g[0] + g[1] for g in groups]
        kept = sorted(range(len(groups)), key=lambda g: -worth[g])[: a["keep_groups"]]
        ids = sorted((e for e in range(len(row)) if e // size in kept), key=lambda e: -choice[e])[: a["k"]]
        weights = np.array([scores[e] for e in ids])
        if a["score"] == "softmax_of_chosen":
            weights = np.exp(weights - weights.max()) / np.exp(weights - weights.max()).sum()
        all_ids.append(ids)
        all_weights.append((weights / weights.sum() if a["renorm"] else weights) * a["scale"])
    return np.array(all_ids), np.array(all_weights)


def _experts(x: list[Any], kind: str) -> np.ndarray:
    """Every expert on every row, of which the chosen count."""
    rows, ids, weights, gate, up, down, *biases = x
    gate_bias, up_bias, down_bias = [0 if b is None else b[:, None] for b in biases]
    hidden = np.einsum("tc,efc->etf", rows, gate) + gate_bias
    other = np.einsum("tc,efc->etf", rows, up) + up_bias
    y = np.einsum("etf,ecf->etc", _gated(hidden, other, kind), down) + down_bias
    share = np.zeros((len(rows), len(gate)))
    np.put_along_axis(share, ids, weights, axis=1)
    return np.einsum("te,etc->tc", share, y)


def _gated(gate: np.ndarray, up: np.ndarray, kind: str) -> np.ndarray:
    if kind == "swiglu_oai":
        gate = np.minimum(gate, 7)
        return gate / (1 + np.exp(-1.702 * gate)) * (np.clip(up, -7, 7) + 1)
    return _activation(gate, kind) * up


def _activation(x: np.ndarray, kind: str) -> np.ndarray:
    if kind == "silu":
        return x / (1 + np.exp(-x))
    if kind == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if kind == "gelu":
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    if kind == "sigmoid":
        return 1 / (1 + np.exp(-x))
    if kind == "relu":
        return np.maximum(x, 0)
    raise NotImplementedError(kind)
