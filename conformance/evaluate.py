"""A whole graph in f64: the oracle's ops, node by node, for one sequence; and the same with every op moved within its bound.

The largest deviation of an ensemble of such runs says how far rounding may carry a logit of this very model: that times four is the
tolerance (an honest f32 run uses a few percent of it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fastllm.api import Graph, Node

from . import bounds, bounds_extended, oracle
from . import oracle_extended as extended
from .bounds import Expected, Numerics
from .numbers import Numbers

__all__ = ["ensemble", "evaluate"]

Array = np.ndarray


def evaluate(graph: Graph, weights: Mapping[str, Array], ids: Array, numerics: Callable[[Node], Numerics], noise: Numbers | None = None) -> Array:
    """Logits f64 [n, V] after each of `ids`. weights: name -> f64 values. noise: moves each result uniformly within its bound."""
    run = _Run(graph, weights, ids, numerics, noise)
    for node in graph.nodes:
        if node.op != "sample":
            run.step(node)
    return run.value(graph.outputs[0])


def ensemble(graph: Graph, weights: Mapping[str, Array], ids: Array, numerics: Callable[[Node], Numerics], runs: int = 8) -> tuple[Array, Array]:
    """(logits [n, V], tolerance of each row [n, 1])."""
    plain = evaluate(graph, weights, ids, numerics)
    worst = np.zeros((len(plain), 1))
    for seed in range(runs):
        moved = evaluate(graph, weights, ids, numerics, Numbers(1000 + seed))
        worst = np.maximum(worst, np.abs(moved - plain).max(1, keepdims=True))
    return plain, 4 * worst


class _Run:
    def __init__(self, graph: Graph, weights: Mapping[str, Array], ids: Array, numerics: Callable[[Node], Numerics], noise: Numbers | None):
        self.graph, self.weights, self.numerics, self.noise = graph, weights, numerics, noise
        n = len(ids)
        self.inputs = {"ids": ids, "positions": np.arange(n), "slots": np.arange(n), "sample_rows": np.arange(n)}
        self.temps: dict[str, Array] = {}
        self.caches: dict[str, tuple[Array, Array | None]] = {}

    def value(self, name: str | None) -> Array:
        """An operand: step input, weight, constant, temporary, or a window on one."""
        assert name is not None
        value = self.graph.values[name]
        if value.view is not None:
            base = np.ascontiguousarray(self.value(self.graph.base(name).name))
            rows = len(base) if value.shape and isinstance(value.shape[0], str) else value.shape[0] if value.shape else 1
            shape = (int(rows), *(int(d) for d in value.shape[1:]))
            flat = base.reshape(-1)[value.view.offset :]
            return np.lib.stride_tricks.as_strided(flat, shape, [s * base.itemsize for s in value.view.strides]).copy()
        if value.kind == "input":
            return self.inputs[name]
        if value.kind == "weight":
            return self.weights[name]
        if value.kind == "const":
            return np.asarray(value.data)
        return self.temps[name]

    def step(self, node: Node) -> None:
        """One node."""
        if node.op == "kv_write":
            key = self.value(node.inputs[1])
            self.caches[str(node.inputs[0])] = (key, None if node.inputs[2] is None else self.value(node.inputs[2]))
            return
        if node.op == "route_topk":
            ids, weights = _route(self.value(node.inputs[0]), None if node.inputs[1] is None else self.value(node.inputs[1]), node.attrs)
            self.temps[node.outputs[0]], self.temps[node.outputs[1]] = ids, weights
            return
        result = self._moe(node) if node.op == "moe" else self._compute(node)
        y = result.y
        if self.noise is not None:
            y = y + (2 * self.noise.uniform(*y.shape) - 1) * result.reach
        self.temps[node.outputs[0]] = y

    def _compute(self, node: Node) -> Expected:
        a, numerics = node.attrs, self.numerics(node)
        if node.op == "attention":
            keys, values = self.caches[str(node.inputs[1])]
            values = keys[..., : a["value_dim"]] if values is None else values
            sinks, slopes = (None if node.inputs[i] is None else self.value(node.inputs[i]) for i in (6, 7))
            sequence = bounds.Sequence(self.value(node.inputs[0]), self.inputs["positions"], keys, values)
            return bounds.attention(sequence, numerics, sinks=sinks, slopes=slopes, **a)
        if node.op == "short_conv":
            x, weight = self.value(node.inputs[1]), self.value(node.inputs[2])
            history = np.concatenate([np.zeros((weight.shape[1] - 1, x.shape[1])), x])
            return bounds_extended.short_conv(history, weight, a["kind"], len(x))
        if node.op == "delta_rule":
            query, key, value, rate, share, a_log, dt_bias = (self.value(name) for name in node.inputs[1:8])
            return bounds_extended.delta_rule(query, key, value, rate, share, a_log, dt_bias, a["eps"])
        operands = [None if name is None else self.value(name) for name in node.inputs]
        known: dict[str, Callable[[], Expected]] = {
            "embed": lambda: bounds.copies(oracle.embed(operands[0].astype(np.int64), operands[1])),  # type: ignore[union-attr, arg-type]
            "linear": lambda: bounds.linear(operands[0], operands[1], operands[2], numerics),  # type: ignore[arg-type]
            "matmul": lambda: bounds.matmul(operands[0], operands[1], numerics),  # type: ignore[arg-type]
            "rms_norm": lambda: bounds.rms_norm(operands[0], operands[1], a["eps"]),  # type: ignore[arg-type]
            "layer_norm": lambda: bounds.layer_norm(operands[0], operands[1], operands[2], a["eps"]),  # type: ignore[arg-type]
            "rope": lambda: bounds.rope(operands[0], operands[1], operands[2], a["style"], a["factor"], numerics),  # type: ignore[arg-type]
            "act_mul": lambda: bounds.act_mul(operands[0], operands[1], a["kind"]),  # type: ignore[arg-type]
            "softmax": lambda: bounds.softmax(operands[0]),  # type: ignore[arg-type]
            "softcap": lambda: bounds.softcap(operands[0], a["cap"]),  # type: ignore[arg-type]
            "concat": lambda: bounds.copies(extended.concat(operands[0], operands[1])),  # type: ignore[arg-type]
        }
        if node.op in ("add", "mul"):
            exact = bounds.binary(node.op, operands[0], operands[1])  # type: ignore[arg-type]
            return Expected(exact.y, bounds.U["f32"] * np.abs(exact.y))
        return known[node.op]()

    def _moe(self, node: Node) -> Expected:
        x, ids, weights, gate, up, down, *biases = (None if n is None else self.value(n) for n in node.inputs)
        biases += [None] * (3 - len(biases))
        assert x is not None
        assert ids is not None
        assert weights is not None
        return bounds_extended.moe(x, ids, weights, (gate, up, down), biases, node.attrs["kind"], self.numerics(node))


def _route(logits: Array, bias: Array | None, a: Mapping[str, Any]) -> tuple[Array, Array]:
    """Experts of each row and their weights: scores, groups, the k largest, ties to the lower id."""
    x = np.asarray(logits, np.float64)
    _, chosen = extended.route_scores(x, bias, a["score"])
    if a["groups"] > 1:
        parts = chosen.reshape(len(x), a["groups"], -1)
        rank = np.sort(parts, -1)[..., -2:].sum(-1) if a["group_score"] == "top2sum" else parts.max(-1)
        kept = np.argsort(-rank, axis=-1, kind="stable")[:, : a["keep_groups"]]
        mask = np.zeros(rank.shape, bool)
        np.put_along_axis(mask, kept, True, axis=1)
        chosen = np.where(np.repeat(mask, parts.shape[2], axis=1), chosen, -np.inf)
    ids = np.argsort(-chosen, axis=-1, kind="stable")[:, : a["k"]]
    return ids, bounds_extended.route_weights(x, bias, ids, a).y
