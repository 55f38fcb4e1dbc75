"""The graph of a model: values, nodes and the builder that families (and users) write models with.

A graph describes **one step** of a ragged batch. Shapes may hold the symbols `T` (tokens of the step), `S` (sequences), `S+1`,
`R` (rows that are sampled) and `B` (blocks in a row of the block table); everything else is an integer. Nodes run in list order,
which is also what orders the effects on state (key/value caches, recurrent state).

    g = GraphBuilder("tiny")
    x = g.embed(g.input("ids"), g.weight("embed.weight", (256, 64)))     # [T, 64]
    x = g.rms_norm(x, g.weight("norm.weight", (64,), "f32"), eps=1e-5)   # [T, 64]

`Graph` is plain data; `planner.py` places it on devices and `executor.py` runs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from .errors import ShapeError, UsageError
from .ops import CATALOGUE, STEP_INPUTS, Dim, Shape

__all__ = ["KV_DTYPES", "Graph", "GraphBuilder", "KVSpec", "Node", "SlotSpec", "Value", "View", "with_kv_dtype"]

KV_DTYPES: Final = ("f16", "bf16", "f32", "int8")
"""How keys and values may be kept. int8: of each token and head, codes round(x / scale) and scale = largest |x| / 127 in f32."""


@dataclass(frozen=True)
class KVSpec:
    """The key/value cache of one attention layer: K heads, key and value widths in elements.

    value_dim 0 means that values are a prefix of the keys (latent attention), so no values are stored. dtype: one of KV_DTYPES, or
    None: what the backend takes by itself.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str | None = None


@dataclass(frozen=True)
class SlotSpec:
    """State of fixed size per sequence (short convolutions, delta rule): shape and dtype of one slot."""

    shape: tuple[int, ...]
    dtype: str = "f32"


@dataclass(frozen=True)
class View:
    """A value that is a window on another: base name, offset and strides in elements of the base (strides[0] per row)."""

    base: str
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Value:
    """One tensor of the graph.

    kind: `input` (a step array), `weight` (dtype "any": whatever format the file has; "f32": decoded at load), `const` (data is
    in the graph), `state` (spec says which), `temp` (made by a node). view: set if it aliases another value.
    """

    name: str
    shape: Shape
    dtype: str
    kind: str = "temp"
    view: View | None = None
    spec: KVSpec | SlotSpec | None = None
    data: np.ndarray | None = field(default=None, compare=False)

    @property
    def strides(self) -> tuple[int, ...] | None:
        """In elements, of a view that is not contiguous; None of any other value."""
        return None if self.view is None or self.view.strides == _strides(self.shape) else self.view.strides


@dataclass(frozen=True)
class Node:
    """One op: names of its input values in catalogue order (None where an optional one is absent), outputs, attributes
    (complete: defaults filled in) and tags (`layer`, `role`) that placement and quantisation rules select by."""

    op: str
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, Any] = field(default_factory=dict)


@dataclass
class Graph:
    """values by name, nodes in running order, names of the outputs."""

    name: str
    values: dict[str, Value] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)

    def of_kind(self, kind: str) -> list[Value]:
        """All values of one kind, in the order they were declared."""
        return [v for v in self.values.values() if v.kind == kind]

    def base(self, name: str) -> Value:
        """The value that owns the memory of `name` (itself unless it is a view)."""
        value = self.values[name]
        while value.view is not None:
            value = self.values[value.view.base]
        return value

    def verify(self) -> None:
        """Checks every node against the catalogue: known op and attributes, operands that exist before use, and the shapes
        and dtypes that its rule gives; that each value is made once; and that the outputs are made by nodes. Raises ShapeError
        naming the node or the output."""
        ready = {v.name for v in self.values.values() if v.kind != "temp"}
        for index, node in enumerate(self.nodes):
            where = f"node {index} ({node.op})"
            if node.op not in CATALOGUE:
                raise ShapeError(f"{where}: the catalogue has no op '{node.op}'")
            for name in node.inputs:
                if name is not None and (name not in self.values or self.base(name).name not in ready):
                    raise ShapeError(f"{where}: input '{name}' is used before it is made")
            spec = CATALOGUE[node.op]
            if len(node.inputs) != len(spec.inputs):
                raise ShapeError(f"{where}: {len(node.inputs)} inputs; the op has {', '.join(spec.inputs)}")
            operands = [None if n is None else (self.values[n].shape, self.values[n].dtype) for n in node.inputs]
            specs = [None if n is None else self.values[n].spec for n in node.inputs]
            results = spec.infer(operands, specs, spec.complete_attrs(node.attrs))
            if len(node.outputs) != len(results) or not all(name in self.values for name in node.outputs):
                raise ShapeError(f"{where}: outputs {', '.join(node.outputs)}; the op gives {len(results)} of the graph's values")
            for name, (shape, dtype) in zip(node.outputs, results, strict=True):
                value = self.values[name]
                if value.shape != shape or value.dtype != dtype:
                    raise ShapeError(f"{where}: '{name}' is {value.dtype}{list(value.shape)}, the rule gives {dtype}{list(shape)}")
                if value.view is not None or name in ready:
                    raise ShapeError(f"{where}: '{name}' is a view, or something that exists already; a node makes a new value")
                ready.add(name)
        for name in self.outputs:
            if name not in ready or self.values[name].kind != "temp":
                raise ShapeError(f"output '{name}' is not made by a node (views, inputs and weights cannot be outputs)")


def with_kv_dtype(graph: Graph, dtype: str) -> Graph:
    """The graph with every key/value cache kept as `dtype`. Raises UsageError for one that is not in KV_DTYPES."""
    if dtype not in KV_DTYPES:
        raise UsageError(f"keys and values cannot be kept as {dtype!r}", fix=f"kv_dtype: {', '.join(KV_DTYPES)}")
    values = {n: replace(v, spec=replace(v.spec, dtype=dtype)) if isinstance(v.spec, KVSpec) else v for n, v in graph.values.items()}
    return replace(graph, values=values)


class GraphBuilder:
    """Appends nodes to a graph. Every op method infers shapes through the catalogue and raises ShapeError at the line that
    builds a wrong node."""

    def __init__(self, name: str, count: int = 0):
        """count: nodes and views are numbered from there on, where their names must not meet those of another graph."""
        self.graph = Graph(name)
        self._tags: dict[str, Any] = {}
        self._count = count

    # values ---------------------------------------------------------------------------------------------------------

    def input(self, name: str) -> Value:
        """A step array by its name in `ops.STEP_INPUTS` (`ids`, `positions`, `slots`, …)."""
        shape, dtype = STEP_INPUTS[name]
        return self._declare(Value(name, shape, dtype, "input"))

    def weight(self, name: str, shape: tuple[int, ...], dtype: str = "any") -> Value:
        """A weight of the model. dtype "any" keeps the file's format, "f32" has it decoded at load (norms, biases, router)."""
        return self._declare(Value(name, shape, dtype, "weight"))

    def matrix(self, stack: Value, index: int) -> Value:
        """One of the matrices of a stack that is a weight: [E, N, K] -> [N, K]; or of a table of biases: [E, N] -> [N]."""
        if stack.kind != "weight" or len(stack.shape) < 2 or not 0 <= index < int(stack.shape[0]):
            raise ShapeError(f"'{stack.name}' ({stack.kind}) of shape {list(stack.shape)} has no matrix {index} to take")
        return self._declare(Value(f"{stack.name}[{index}]", stack.shape[1:], stack.dtype, "weight"))

    def column(self, matrix: Value, index: int) -> Value:
        """One of the columns of a matrix that is a weight in f32: [N, K] -> [N]."""
        if matrix.kind != "weight" or matrix.dtype != "f32" or len(matrix.shape) != 2 or not 0 <= index < int(matrix.shape[1]):
            raise ShapeError(f"'{matrix.name}' ({matrix.kind}, {matrix.dtype}) of shape {list(matrix.shape)} has no column {index} to take")
        return self._declare(Value(f"{matrix.name}[:, {index} of {matrix.shape[1]}]", matrix.shape[:1], "f32", "weight"))

    def const(self, name: str, data: np.ndarray) -> Value:
        """A small constant kept in the graph (rope frequencies, slopes, scalars), stored as f32 or i32."""
        data = np.ascontiguousarray(data, np.int32 if np.issubdtype(data.dtype, np.integer) else np.float32)
        dtype = "i32" if data.dtype == np.int32 else "f32"
        known = self.graph.values.get(name)
        if known is not None and (known.data is None or not np.array_equal(known.data, data)):
            raise ShapeError(f"constant '{name}' is declared twice with different contents")
        return known or self._declare(Value(name, tuple(data.shape), dtype, "const", data=data))

    def scalar(self, value: float) -> Value:
        """A constant of shape [1], for scaling by `mul`."""
        return self.const(f"const.{value!r}", np.array([value], np.float32))

    def kv_cache(self, name: str, num_kv_heads: int, key_dim: int, value_dim: int, dtype: str | None = None) -> Value:
        """The paged cache of one attention layer. dtype: as in KVSpec."""
        return self._declare(Value(name, (), "kv", "state", spec=KVSpec(num_kv_heads, key_dim, value_dim, dtype)))

    def slot_state(self, name: str, shape: tuple[int, ...], dtype: str = "f32") -> Value:
        """State of fixed size per sequence, found through `state_slot`."""
        return self._declare(Value(name, (), "slot", "state", spec=SlotSpec(shape, dtype)))

    def _declare(self, value: Value) -> Value:
        known = self.graph.values.setdefault(value.name, value)
        if known != value:
            raise ShapeError(f"value '{value.name}' is declared twice: as {known.shape} and as {value.shape}")
        return known

    def view(self, x: Value, shape: Shape) -> Value:
        """x with another shape, without a copy; x must be contiguous, and its leading symbol must stay."""
        flat = [_count(s) for s in (x.shape, shape)]
        if flat[0] != flat[1] or x.shape[0] != shape[0]:
            raise ShapeError(f"a value of shape {list(x.shape)} cannot be viewed as {list(shape)}")
        if x.view is not None and x.view.strides != _strides(x.shape):
            raise ShapeError(f"'{x.name}' is a strided slice; only contiguous values can be reshaped")
        return self._alias(x, shape, 0, _strides(shape))

    def slice(self, x: Value, start: int, stop: int) -> Value:
        """Elements start…stop of the last axis, without a copy (a strided value)."""
        width = x.shape[-1]
        if not isinstance(width, int) or not 0 <= start < stop <= width:
            raise ShapeError(f"slice {start}:{stop} of a last axis of {width}")
        strides = x.view.strides if x.view is not None else _strides(x.shape)
        return self._alias(x, (*x.shape[:-1], stop - start), start, strides)

    def window(self, x: Value, start: int, shape: tuple[int, ...]) -> Value:
        """Consecutive elements of each row of a contiguous x, from `start` on, as rows of another shape, without a copy."""
        flat, (size, _) = _strides(x.shape), _count(x.shape)
        if (x.view is not None and x.view.strides != flat) or not 0 <= start <= size - _count(shape)[0]:
            raise ShapeError(f"a row of {size} elements has no window of {list(shape)} at {start}")
        return self._alias(x, (x.shape[0], *shape), start, (flat[0], *_strides(shape)))

    def repeat(self, x: Value, count: int) -> Value:
        """A constant matrix [N, K] as `count` equal ones [count, N, K], without a copy."""
        if x.kind != "const" or x.view is not None or len(x.shape) != 2 or count < 1:
            raise ShapeError(f"'{x.name}' ({x.kind}) of shape {list(x.shape)} is no constant matrix to repeat {count} times")
        return self._alias(x, (count, *x.shape), 0, (0, *_strides(x.shape)))

    def _alias(self, x: Value, shape: Shape, offset: int, strides: tuple[int, ...]) -> Value:
        if x.kind not in ("temp", "const"):
            raise ShapeError(f"'{x.name}' ({x.kind}) has no views; parts of a weight are chosen by its WeightRef")
        base, shift = (x.view.base, x.view.offset) if x.view is not None else (x.name, 0)
        self._count += 1
        name = f"{base}.view{self._count}"
        return self._declare(Value(name, shape, x.dtype, x.kind, View(base, shift + offset, strides)))

    # structure ------------------------------------------------------------------------------------------------------

    @contextmanager
    def tag(self, **tags: Any) -> Iterator[None]:
        """Nodes built inside carry these tags (`layer=3, role="attn"`)."""
        before, self._tags = self._tags, {**self._tags, **tags}
        try:
            yield
        finally:
            self._tags = before

    def op(self, name: str, *inputs: Value | None, **attrs: Any) -> tuple[Value, ...]:
        """Appends a node for any op of the catalogue and returns its outputs. Attributes that are not given take their
        defaults. Raises ShapeError for an unknown op or attribute, or operands that do not fit."""
        spec = CATALOGUE.get(name)
        if spec is None:
            raise ShapeError(f"the catalogue has no op '{name}'")
        full = spec.complete_attrs(attrs)
        operands = [*inputs, *[None] * (len(spec.inputs) - len(inputs))]
        shapes = [None if v is None else (v.shape, v.dtype) for v in operands]
        results = spec.infer(shapes, [None if v is None else v.spec for v in operands], full)
        self._count += 1
        outputs = tuple(Value(f"{name}.{self._count}" + (f".{i}" if i else ""), s, d) for i, (s, d) in enumerate(results))
        for value in outputs:
            self._declare(value)
        names = tuple(None if v is None else v.name for v in operands)
        self.graph.nodes.append(Node(name, names, tuple(v.name for v in outputs), full, dict(self._tags)))
        return outputs

    def build(self, *outputs: Value) -> Graph:
        """The finished, verified graph."""
        self.graph.outputs = [v.name for v in outputs]
        self.graph.verify()
        return self.graph

    # ops: one line each; the formulas are in the catalogue ------------------------------------------------------------

    def embed(self, ids: Value, table: Value) -> Value:
        """Rows of a table. ids [n] i32, table [V, C] -> [n, C] f32. The table may be an activation (row selection)."""
        return self.op("embed", ids, table)[0]

    def linear(self, x: Value, weight: Value, bias: Value | None = None) -> Value:
        """x [n, K] · weight [N, K]ᵀ + bias [N] -> [n, N] f32."""
        return self.op("linear", x, weight, bias)[0]

    def matmul(self, a: Value, b: Value) -> Value:
        """Per head: a [T, H, K] · b [H, N, K]ᵀ -> [T, H, N] f32."""
        return self.op("matmul", a, b)[0]

    def rms_norm(self, x: Value, weight: Value | None, *, eps: float) -> Value:
        """Root-mean-square norm over the last axis; weight [C] or none."""
        return self.op("rms_norm", x, weight, eps=eps)[0]

    def layer_norm(self, x: Value, weight: Value | None, bias: Value | None = None, *, eps: float) -> Value:
        """Mean and variance norm over the last axis."""
        return self.op("layer_norm", x, weight, bias, eps=eps)[0]

    def rope(self, x: Value, inv_freq: Value, *, style: str = "half", factor: float = 1.0) -> Value:
        """Rotary embedding of x [T, H, D] at the step's positions; inv_freq [r]: the first 2r elements of a head turn."""
        return self.op("rope", x, self.input("positions"), inv_freq, style=style, factor=factor)[0]

    def kv_write(self, cache: Value, key: Value, value: Value | None) -> None:
        """Stores this step's keys [T, K, Dk] and values [T, K, Dv] in the cache at the step's slots."""
        self.op("kv_write", cache, key, value, self.input("slots"))

    def attention(
        self, query: Value, cache: Value, *, sinks: Value | None = None, alibi_slopes: Value | None = None, **attrs: Any
    ) -> Value:
        """Paged attention of query [T, H, Dk] over each row's own sequence -> [T, H, Dv]. attrs: scale, mask, chunk, window,
        softcap, value_dim (only where values are a prefix of the keys)."""
        step = (self.input(n) for n in ("positions", "query_start", "context_len", "block_table"))
        prefix_len = self.input("prefix_len") if attrs.get("mask") == "prefix" else None
        return self.op("attention", query, cache, *step, sinks, alibi_slopes, prefix_len, **attrs)[0]

    def act_mul(self, gate: Value, up: Value | None = None, *, kind: str = "silu") -> Value:
        """act(gate) · up, or act(gate) alone."""
        return self.op("act_mul", gate, up, kind=kind)[0]

    def add(self, x: Value, y: Value) -> Value:
        """x + y; y has x's shape, or [C] of its last axis, or [1]."""
        return self.op("add", x, y)[0]

    def mul(self, x: Value, y: Value) -> Value:
        """x · y; y has x's shape, or [C], or [1], or [T, 1] (one factor a row)."""
        return self.op("mul", x, y)[0]

    def softmax(self, x: Value) -> Value:
        """Softmax over the last axis."""
        return self.op("softmax", x)[0]

    def route_topk(self, logits: Value, choose_bias: Value | None = None, **attrs: Any) -> tuple[Value, Value]:
        """The experts of each row of logits [T, E]: ids [T, k] i32 and weights [T, k] f32. attrs: k, score, groups, keep_groups,
        group_score, renorm, scale."""
        ids, weights = self.op("route_topk", logits, choose_bias, **attrs)
        return ids, weights

    def moe(
        self, x: Value, ids: Value, weights: Value, gate: Value, up: Value | None, down: Value, *biases: Value | None, kind: str = "silu"
    ) -> Value:
        """Σ weight · expert(x) over each row's experts: x [T, C], gate and up [E, F, C], down [E, C, F] -> [T, C]. biases: of gate
        [E, F], up [E, F] and down [E, C]."""
        return self.op("moe", x, ids, weights, gate, up, down, *biases, kind=kind)[0]

    def concat(self, x: Value, y: Value) -> Value:
        """x and y side by side on the last axis; the others are equal."""
        return self.op("concat", x, y)[0]

    def short_conv(self, state: Value, x: Value, weight: Value, *, kind: str = "silu") -> Value:
        """act(causal convolution per channel) of x [T, C] with weight [C, L]; state: a slot of [L − 1, C]."""
        step = (self.input(n) for n in ("positions", "query_start", "state_slot"))
        return self.op("short_conv", state, x, weight, *step, kind=kind)[0]

    def delta_rule(self, state: Value, *operands: Value, eps: float = 1e-6) -> Value:
        """Gated delta rule -> [T, H, Dv]. operands: query and key [T, J, Dk], value [T, H, Dv], a and b [T, H], a_log and dt_bias [H];
        state: a slot of [H, Dk, Dv]."""
        step = (self.input(n) for n in ("positions", "query_start", "state_slot"))
        return self.op("delta_rule", state, *operands, *step, eps=eps)[0]

    def softcap(self, x: Value, cap: float) -> Value:
        """cap · tanh(x / cap)."""
        return self.op("softcap", x, cap=cap)[0]

    def sample(self, logits: Value) -> Value:
        """One id per row of logits [R, V], by the step's sampler arrays."""
        names = ("u", "temperature", "top_k", "top_p", "min_p")
        adjust = ("adjust_start", "adjust_ids", "adjust_bias", "adjust_repeat", "adjust_sub")
        return self.op("sample", logits, *(self.input(n) for n in names + adjust))[0]


def _strides(shape: Shape) -> tuple[int, ...]:
    """Row-major strides in elements; only the leading dimension may be a symbol."""
    strides, step = [], 1
    for dim in reversed(shape):
        strides.append(step)
        step *= dim if isinstance(dim, int) else 1
    return tuple(reversed(strides))


def _count(shape: Shape) -> tuple[int, tuple[Dim, ...]]:
    """Product of the integer dimensions, and the symbols."""
    size = 1
    for dim in shape:
        size *= dim if isinstance(dim, int) else 1
    return size, tuple(d for d in shape if isinstance(d, str))


