"""The planner: graph + placement + backends → Plan.

Everything is decided before a byte is loaded: which device runs each node and with which implementation, in what form each
weight is kept, where every buffer lies in its device's arenas, which values are copied between devices, and what all of it
weighs. `loader.py` fills the plan with weights, `executor.py` runs it, `fastllm plan` prints it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .backend import Backend, No, OpQuery, PackedLayout, Yes
from .decompose import decompose, expand
from .errors import UnsupportedError, UsageError
from .graph import Graph, KVSpec, Node, Value
from .model import experts_of_row
from .ops import CATALOGUE, OPSET
from .placement import Placement
from .places import Form, place_all
from .plan import HOST, INHERITED, Copy, Decision, Place, Plan, Segment, StepLimits
from .quant import FORMATS
from .rules import COPYING, DEARER
from .weights import TensorSource, WeightRef, stored_as, with_matrices

__all__ = ["Copy", "Decision", "Place", "Plan", "Segment", "StepLimits", "make_plan"]

DENSE = 4
"""So many times the work of the chosen experts are done by computing them all, before they are computed on another device instead."""
NARROW = {"f16": ("f16", "f32"), "bf16": ("bf16", "f32")}
"""Plain forms that hold a format without loss, best first; every other format is decoded to f32."""


def make_plan(
    graph: Graph,
    weights: Mapping[str, WeightRef],
    sources: Mapping[str, TensorSource],
    backends: Mapping[str, Backend],
    placement: Placement,
    limits: StepLimits,
    *,
    fallback: str = "warn",
) -> Plan:
    """Plans a model.

    backends: device name -> open backend; the placement's devices first, then the ones that may take what those cannot run, in
    order (`cpu_avx`, `ref`). fallback: a policy of `placement.FALLBACK_POLICIES`; "error" raises UnsupportedError listing every
    op that would leave its device. Also raises UnsupportedError if nobody runs an op, UsageError for a placement on a device that
    is not open.
    """
    closed = [name for name in placement.names() if name not in backends]
    if closed:
        raise UsageError(f"the placement names device '{closed[0]}', which is not open", fix=f"open: {', '.join(backends)}")
    return _Planner(graph, weights, sources, backends, placement, limits, fallback).run()


class _Planner:
    def __init__(
        self,
        graph: Graph,
        weights: Mapping[str, WeightRef],
        sources: Mapping[str, TensorSource],
        backends: Mapping[str, Backend],
        placement: Placement,
        limits: StepLimits,
        fallback: str,
    ):
        self.weights, self.sources, self.backends = weights, sources, backends
        self.placement, self.limits, self.fallback = placement, limits, fallback
        self.graph = graph
        self.plan = Plan(graph, limits, tuple(backends))
        self._users_of: Graph | None = None  # the graph that the next two are of
        self._users: dict[str, frozenset[str]] = {}
        self._layouts: dict[tuple[str, str], PackedLayout | None] = {}

    def run(self) -> Plan:
        devices = self.placement.assign(self.graph)
        self.graph, wanted = decompose(self.graph, devices, self._stays_whole)
        self.plan.graph = self.graph
        self.weights = with_matrices(self.weights, (v.name for v in self.graph.of_kind("weight")))
        for group in self._groups():
            self.plan.decisions += self._decide(group, wanted[group[-1]])  # of state: where it is read
        self.plan.decisions.sort(key=lambda d: d.node)
        self._check_policy(wanted)
        place_all(self.plan, self.backends, self._kept)
        return self.plan

    def _stays_whole(self, node: Node, device: str) -> bool:
        """Whether a node is not decomposed: its device runs it natively; or the parts are dearer than the op, and the device does not run
        every one of them natively, or another device runs the op natively and the parts are much dearer. What `ref` would do, or a
        device only inherits, is numpy on the host: that counts only where nobody runs the parts. A node that copies and that nobody runs is
        refused rather than rounded."""
        if self._runs(node, device):
            return True
        if node.op not in DEARER:
            return False
        much = self._much_dearer(node) and self.fallback != "error"
        if much and any(self._runs(node, other) for other, backend in self.backends.items() if backend.name != "ref"):
            return True
        known = any(isinstance(self._ask(node, other), Yes) for other in self.backends)
        return (known or node.op in COPYING) and not self._runs_parts(node, device)

    def _much_dearer(self, node: Node) -> bool:
        """Whether the parts cost so much more than the op that a copy to another device is cheaper: many experts that no row chose, or a
        cache that grows with the context instead of a state."""
        chosen, count = experts_of_row(self.graph, node)
        return count > DENSE * chosen or node.op == "short_conv"

    def _runs(self, node: Node, device: str) -> bool:
        """Whether a device runs a node natively."""
        answer = self._ask(node, device)
        return isinstance(answer, Yes) and not self._inherits(answer, device)

    def _runs_parts(self, node: Node, device: str) -> bool:
        """Whether a device runs natively all that a node is made of, and without rounding where that must copy."""
        graph, weights, values = self.graph, self.weights, dict(self.graph.values)
        parts = expand(node, values, len(graph.values) + len(graph.nodes))
        self.graph = Graph(graph.name, values, parts)
        self.weights = with_matrices(weights, (v.name for v in self.graph.of_kind("weight")))
        try:
            return all(self._runs(part, device) and (node.op not in COPYING or _exact(self._ask(part, device))) for part in parts)
        finally:
            self.graph, self.weights = graph, weights

    # who runs what --------------------------------------------------------------------------------------------------

    def _ask(self, node: Node, device: str, assume: Mapping[str, str] | None = None) -> Yes | No:
        """The device's answer for a node; `assume` fixes the dtype of some operands (value name -> dtype)."""
        spec = CATALOGUE[node.op]
        if spec.since > OPSET:
            return No(f"op '{node.op}' is of opset {spec.since}")
        assume = assume or {}
        values = [None if n is None else self.graph.values[n] for n in node.inputs]
        limits, backend = self.limits, self.backends[device]
        for cache in (v.spec for v in values if v is not None):
            if isinstance(cache, KVSpec) and cache.dtype is not None and cache.dtype not in backend.kv_dtypes:
                return No(f"keys and values as {cache.dtype}: it keeps {' or '.join(backend.kv_dtypes) or 'them in a type of its own'}")
        query = OpQuery(
            node.op,
            dtypes=tuple(None if v is None else assume.get(v.name) or self._dtype(v, device, assume) for v in values),
            shapes=tuple(None if v is None else v.shape for v in values),
            dims={
                "T": (0, limits.max_tokens),
                "S": (0, limits.max_sequences),
                "R": (0, limits.max_rows),
                "B": (0, limits.max_blocks),
                "ctx": (0, limits.context),
                "block_size": (limits.block_size, limits.block_size),
            },
            attrs={k: v for k, v in node.attrs.items() if v != spec.attrs[k].default},
            specs=tuple(None if v is None else v.spec for v in values),
            strides=tuple(None if v is None else v.strides for v in values),
        )
        return backend.supports(query)

    def _groups(self) -> list[list[int]]:
        """Nodes that must run on one device: those that use the same state, which exists once; every other node alone."""
        group = list(range(len(self.graph.nodes)))
        first: dict[str, int] = {}  # state -> a node that uses it
        for index, node in enumerate(self.graph.nodes):
            for name in node.inputs:
                if name is not None and self.graph.values[name].kind == "state":
                    target, source = group[first.setdefault(name, index)], group[index]
                    group = [target if g == source else g for g in group]
        members: dict[int, list[int]] = {}
        for index, g in enumerate(group):
            members.setdefault(g, []).append(index)
        return list(members.values())

    def _decide(self, group: Sequence[int], wanted: str) -> list[Decision]:
        """Who runs the nodes of a group: the first device, from the wanted one on, that runs all of them. What the wanted device only
        inherits is asked of the others first: it downloads its operands to compute in numpy, which only `ref` does as slowly."""
        nodes = [self.graph.nodes[i] for i in group]
        if nodes[0].op == "sample":
            return [Decision(group[0], wanted, HOST)]
        refused: dict[int, list[str]] = {i: [] for i in group}
        kept: list[Decision] = []
        inherits = [False] * len(group)
        for device in dict.fromkeys([wanted, *self.backends]):
            if kept and self.backends[device].name == "ref":
                return kept
            answers = [self._ask(node, device) for node in nodes]
            if device == wanted:
                inherits = [self._inherits(a, device) for a in answers]
            if all(isinstance(a, Yes) for a in answers):
                found = [
                    Decision(i, device, a.impl, "" if device == wanted else "; ".join(refused[i]), a.workspace, mine, "rows" in a.varies)
                    for i, a, mine in zip(group, answers, inherits, strict=True)
                    if isinstance(a, Yes)
                ]
                if not all(self._inherits(a, device) for a in answers):
                    return found
                kept = kept or found
                for i in group:
                    refused[i].append(f"{device}: {INHERITED}")
                continue
            op, why = next((node.op, a.reason) for node, a in zip(nodes, answers, strict=True) if isinstance(a, No))
            for i, a in zip(group, answers, strict=True):
                refused[i].append(f"{device}: {self._why(a) if isinstance(a, No) else f'its state is also that of {op}: {why}'}")
        if kept:
            return kept
        ops = ", ".join(f"'{op}'" for op in dict.fromkeys(n.op for n in nodes))
        raise UnsupportedError(
            f"no backend runs op {ops} of this model",
            why="; ".join(dict.fromkeys(reason for node in refused.values() for reason in node)),
        )

    def _inherits(self, answer: Yes | No, device: str) -> bool:
        """True for an op that a backend has from `RefBackend`, and not for `ref` itself."""
        return isinstance(answer, Yes) and answer.impl.startswith("ref.") and self.backends[device].name != "ref"

    def _why(self, answer: No) -> str:
        """The reason of a No, and within which ranges it would have been a Yes."""
        limits = self.limits
        largest = {"T": limits.max_tokens, "S": limits.max_sequences, "R": limits.max_rows, "B": limits.max_blocks, "ctx": limits.context}
        less = {name: high for name, (_, high) in (answer.holds or {}).items() if high < largest.get(name, high)}
        if not less:
            return answer.reason
        ranges = " and ".join(f"{name} ≤ {high:,} of {largest[name]:,}" for name, high in less.items())
        fix = f"; --ctx {less['ctx']} keeps it there" if set(less) == {"ctx"} else ""
        return f"{answer.reason}: it holds for {ranges}{fix}"

    def _check_policy(self, wanted: Sequence[str]) -> None:
        left = sorted([*self.plan.fallbacks, *self.plan.inherited], key=lambda d: d.node)
        if left and self.fallback == "error":
            lines = sorted({f"{self.graph.nodes[d.node].op}: {d.reason or f'{d.device}: {INHERITED}'}" for d in left})
            stay = f", {len(self.plan.inherited)} of them for numpy on the host" if self.plan.inherited else ""
            raise UnsupportedError(
                f"{len(left)} nodes would leave device '{wanted[left[0].node]}'{stay}",
                why="; ".join(lines),
                fix="--fallback warn runs them elsewhere",
                ops=lines,
            )

    # weights --------------------------------------------------------------------------------------------------------

    def _source_format(self, value: Value) -> str:
        ref = self.weights.get(value.name)
        if ref is None:  # without a file (shape-only plans of tests) weights count as f32; the loader explains what is missing
            return "f32"
        return "f32" if value.dtype == "f32" else ref.format(self.sources)

    def _uses(self, name: str) -> frozenset[str]:
        """Ops that read a value. The graph is looked through once, and again after it was changed."""
        if self._users_of is not self.graph:
            users: dict[str, set[str]] = {}
            for node in self.graph.nodes:
                for operand in node.inputs:
                    if operand is not None:
                        users.setdefault(operand, set()).add(node.op)
            self._users_of, self._users, self._layouts = self.graph, {n: frozenset(ops) for n, ops in users.items()}, {}
        return self._users.get(name, frozenset())

    def _layout(self, value: Value, device: str) -> PackedLayout | None:
        """As _new_layout, remembered."""
        uses, key = self._uses(value.name), (value.name, device)
        if key not in self._layouts:
            self._layouts[key] = self._new_layout(value, device, uses)
        return self._layouts[key]

    def _new_layout(self, value: Value, device: str, uses: frozenset[str]) -> PackedLayout | None:
        """The packed form of a weight on a device; of a stack: that of one of its matrices, which are packed one by one. A stack, or a
        weight in blocks, whose format the backend does not pack is asked for in the plain form that holds it: experts have no kernel
        for plain memory, and linear layers a slow one."""
        if value.dtype == "f32":
            return None
        backend, format = self.backends[device], self._source_format(value)
        shape = [int(d) for d in value.shape]
        if len(shape) < 2 or (len(shape) == 2 and FORMATS[format].plain):
            return backend.pack_layout(shape, format, uses)
        forms = dict.fromkeys((format, NARROW.get(FORMATS[format].lossless, ("f32",))[0]))
        layouts = (backend.pack_layout(shape[-2:], form, uses) for form in forms)
        return next((layout for layout in layouts if layout is not None), None)

    def _kept(self, value: Value, device: str) -> Form:
        """The form of a weight on a device."""
        layout, ref = self._layout(value, device), self.weights.get(value.name)
        return Form(layout, self._dtype(value, device, {}), None if ref is None else stored_as(ref, self.sources, layout))

    def _dtype(self, value: Value, device: str, assume: Mapping[str, str]) -> str:
        """What an operand looks like on this device: a weight's format where it is packed, else the plain form it takes."""
        if value.kind != "weight" or value.dtype != "any":
            return value.dtype
        format = self._source_format(value)
        layout = self._layout(value, device)
        if layout is not None:
            return layout.format
        return self._plain_format(format, value, device, assume)

    def _plain_format(self, format: str, value: Value, device: str, assume: Mapping[str, str]) -> str:
        """The narrowest plain form without loss that every node which uses the weight takes on this device; nodes that the device
        does not run with f32, or only inherits, have no say."""

        def takes(node: Node, form: str) -> bool:
            answer = self._ask(node, device, {**assume, value.name: form})
            return isinstance(answer, Yes) and not self._inherits(answer, device)

        choices = NARROW.get(FORMATS[format].lossless, ("f32",))
        users = [n for n in self.graph.nodes if value.name in n.inputs and (len(choices) == 1 or takes(n, "f32"))]
        if not users:
            return "f32"
        return next((choice for choice in choices[:-1] if all(takes(n, choice) for n in users)), "f32")


def _exact(answer: Yes | No) -> bool:
    """Whether an op multiplies its operands as they are and adds in f32 at least: products by 1 and 0 then copy."""
    plain = (None, "f32", "f64")
    return isinstance(answer, Yes) and all(kept in plain for kept in (answer.acc, answer.act, answer.weight, answer.prob))
