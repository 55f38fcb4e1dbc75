"""The planner: graph + placement + backends → Plan.

Everything is decided before a byte is loaded: which device runs each node and with which implementation, in what form each
weight is kept, where every buffer lies in its device's arenas, which values are copied between devices, and what all of it
weighs. `loader.py` fills the plan with weights, `executor.py` runs it, `fastllm plan` prints it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from .arena import Lifetime, pack_lifetimes
from .backend import Backend, No, OpQuery, PackedLayout, StepDims, Yes, plain_bytes
from .errors import UnsupportedError
from .graph import Graph, GraphBuilder, KVSpec, Node, SlotSpec, Value
from .ops import CATALOGUE, OPSET
from .placement import Placement
from .quant import FORMATS
from .weights import TensorSource, WeightRef

__all__ = ["Copy", "Decision", "Place", "Plan", "Segment", "StepLimits", "make_plan"]

NARROW = {"f16": ("f16", "f32"), "bf16": ("bf16", "f32")}
"""Plain forms that hold a format without loss, best first; every other format is decoded to f32."""


@dataclass(frozen=True)
class StepLimits:
    """The largest step and the cache: tokens, sequences and sampled rows per step; context: tokens of one sequence; num_blocks
    cache blocks of block_size tokens; num_slots: sequences with fixed-size state."""

    max_tokens: int
    max_sequences: int
    max_rows: int
    context: int
    block_size: int
    num_blocks: int

    @property
    def max_blocks(self) -> int:
        """Columns of the block table."""
        return -(-self.context // self.block_size)

    @property
    def largest(self) -> StepDims:
        """The biggest step."""
        return StepDims(self.max_tokens, self.max_sequences, self.max_rows)

    def resolve(self, dim: int | str) -> int:
        """The largest value of a dimension."""
        return self.max_blocks if dim == "B" else self.largest.resolve(dim)


@dataclass(frozen=True)
class Place:
    """Where a value lives on a device. arena: weights | kv | state | scratch | host (memory shared with the engine: step inputs,
    constants, outputs). offset and nbytes within the arena; shape at its largest; layout: packed form of a weight."""

    arena: str
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None
    layout: PackedLayout | None = None
    block_bytes: int = 0


@dataclass(frozen=True)
class Copy:
    """A value that is carried to another device before a segment runs."""

    value: str
    source: str
    target: str


@dataclass(frozen=True)
class Segment:
    """Consecutive nodes on one device, after these copies."""

    device: str
    nodes: tuple[int, ...]
    copies: tuple[Copy, ...]


@dataclass(frozen=True)
class Decision:
    """Who runs a node, and why not the device that was asked."""

    node: int
    device: str
    impl: str
    reason: str = ""


@dataclass
class Plan:
    """Everything the executor needs. places: (device, value name) -> Place; arenas: (device, arena) -> bytes."""

    graph: Graph
    limits: StepLimits
    devices: tuple[str, ...]
    segments: list[Segment] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    places: dict[tuple[str, str], Place] = field(default_factory=dict)
    arenas: dict[tuple[str, str], int] = field(default_factory=dict)
    sample_on_host: bool = True

    @property
    def fallbacks(self) -> list[Decision]:
        """Nodes that left the device they were placed on."""
        return [d for d in self.decisions if d.reason]

    def total_bytes(self, arena: str) -> int:
        """Bytes of one kind over all devices."""
        return sum(size for (_, name), size in self.arenas.items() if name == arena)

    def bytes_per_token(self) -> int:
        """Weight bytes that one decode step of one sequence reads: every weight that a node other than `embed` uses, once."""
        used = set()
        for decision in self.decisions:
            node = self.graph.nodes[decision.node]
            names = node.inputs[:1] if node.op == "embed" else node.inputs
            used |= {(decision.device, n) for n in names if n is not None and self.graph.values[n].kind == "weight"}
        return sum(self.places[key].nbytes for key in used)

    def copy_bytes_per_token(self) -> int:
        """Bytes that cross devices for one token."""
        total = 0
        for copy in (c for s in self.segments for c in s.copies):
            value = self.graph.values[copy.value]
            row = value.shape[1:] if value.shape and isinstance(value.shape[0], str) else value.shape
            total += plain_bytes([int(d) for d in row], value.dtype)
        return total


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
    op that would leave its device. Also raises UnsupportedError if nobody runs an op.
    """
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

    def run(self) -> Plan:
        wanted = self._decompose(self.placement.assign(self.graph))
        self.plan.graph = self.graph
        for index, (node, device) in enumerate(zip(self.graph.nodes, wanted, strict=True)):
            self._decide(index, node, device)
        self._check_policy(wanted)
        self._cut_segments()
        self._place_weights_and_state()
        self._place_activations()
        return self.plan

    # who runs what --------------------------------------------------------------------------------------------------

    def _decompose(self, wanted: Sequence[str]) -> list[str]:
        """Rewrites extended ops that their device does not have into core ops; returns the devices of the new node list."""
        nodes: list[Node] = []
        devices: list[str] = []
        values = dict(self.graph.values)
        for index, (node, device) in enumerate(zip(self.graph.nodes, wanted, strict=True)):
            spec = CATALOGUE[node.op]
            if spec.decompose is None or isinstance(self._ask(node, device), Yes):
                nodes.append(node)
                devices.append(device)
                continue
            builder = GraphBuilder(f"{self.graph.name}.{index}")
            builder.graph.values = {n: values[n] for n in node.inputs if n is not None}
            result = spec.decompose(builder, [None if n is None else values[n] for n in node.inputs], node.attrs)
            names = {result.name: node.outputs[0]}
            for value in builder.graph.values.values():
                if value.kind == "temp" and value.name not in names and value.name not in values:
                    names[value.name] = f"{node.outputs[0]}/{value.name}"
            for value in builder.graph.values.values():
                values.setdefault(names.get(value.name, value.name), replace(value, name=names.get(value.name, value.name)))
            for made in builder.graph.nodes:
                inputs = tuple(None if n is None else names.get(n, n) for n in made.inputs)
                outputs = tuple(names.get(n, n) for n in made.outputs)
                nodes.append(replace(made, inputs=inputs, outputs=outputs, tags=node.tags))
                devices.append(device)
        self.graph = Graph(self.graph.name, values, nodes, list(self.graph.outputs))
        self.graph.verify()
        return devices

    def _ask(self, node: Node, device: str, assume: Mapping[str, str] | None = None) -> Yes | No:
        """The device's answer for a node; `assume` fixes the dtype of some operands (value name -> dtype)."""
        spec = CATALOGUE[node.op]
        if spec.since > OPSET:
            return No(f"op '{node.op}' is of opset {spec.since}")
        dtypes, shapes = [], []
        for name in node.inputs:
            value = None if name is None else self.graph.values[name]
            known = None if assume is None or name is None else assume.get(name)
            dtypes.append(None if value is None else known or self._dtype(value, device))
            shapes.append(None if value is None else value.shape)
        attrs = {k: v for k, v in node.attrs.items() if v != spec.attrs[k].default}
        limits = self.limits
        dims = {
            "T": (0, limits.max_tokens),
            "S": (0, limits.max_sequences),
            "R": (0, limits.max_rows),
            "ctx": (0, limits.context),
            "block_size": (limits.block_size, limits.block_size),
        }
        return self.backends[device].supports(OpQuery(node.op, tuple(dtypes), tuple(shapes), dims, attrs))

    def _decide(self, index: int, node: Node, wanted: str) -> None:
        reasons: list[str] = []
        for device in dict.fromkeys([wanted, *self.backends]):
            answer = self._ask(node, device)
            if isinstance(answer, Yes):
                reason = "" if device == wanted else "; ".join(reasons)
                if node.op == "sample":
                    self.plan.sample_on_host, reason = device != wanted, ""
                self.plan.decisions.append(Decision(index, device, answer.impl, reason))
                return
            reasons.append(f"{device}: {answer.reason}")
        if node.op == "sample":  # the host samples from downloaded logits
            self.plan.decisions.append(Decision(index, wanted, "host"))
            return
        raise UnsupportedError(f"no backend runs op '{node.op}' of this model", why="; ".join(reasons))

    def _check_policy(self, wanted: Sequence[str]) -> None:
        left = self.plan.fallbacks
        if left and self.fallback == "error":
            lines = sorted({f"{self.graph.nodes[d.node].op}: {d.reason}" for d in left})
            raise UnsupportedError(
                f"{len(left)} nodes would leave device '{wanted[left[0].node]}'",
                why="; ".join(lines),
                fix="--fallback warn runs them elsewhere",
                ops=lines,
            )

    # weights --------------------------------------------------------------------------------------------------------

    def _source_format(self, value: Value) -> str:
        ref = self.weights.get(value.name)
        source = self.sources.get(ref.source) if ref is not None else None
        if ref is None or source is None:
            # resolve() explains what is missing; without a file (shape-only plans of tests) weights count as f32
            return "f32"
        return "f32" if ref.add or value.dtype == "f32" else source.format

    def _uses(self, name: str) -> frozenset[str]:
        return frozenset(n.op for n in self.graph.nodes if name in n.inputs)

    def _layout(self, value: Value, device: str) -> PackedLayout | None:
        if value.dtype == "f32":
            return None
        shape = [int(d) for d in value.shape]
        return self.backends[device].pack_layout(shape, self._source_format(value), self._uses(value.name))

    def _dtype(self, value: Value, device: str) -> str:
        """What an operand looks like on this device: a weight's format where it is packed, else the plain form it takes."""
        if value.kind != "weight" or value.dtype != "any":
            return value.dtype
        format = self._source_format(value)
        if self._layout(value, device) is not None:
            return format
        return self._plain_format(format, value, device)

    def _plain_format(self, format: str, value: Value, device: str) -> str:
        """The narrowest plain form without loss that every node which uses the weight takes on this device."""
        users = [n for n in self.graph.nodes if value.name in n.inputs]
        for choice in NARROW.get(FORMATS[format].lossless, ("f32",)):
            if all(isinstance(self._ask(node, device, {value.name: choice}), Yes) for node in users):
                return choice
        return "f32"

    # memory ---------------------------------------------------------------------------------------------------------

    def _cut_segments(self) -> None:
        runs: list[tuple[str, list[int]]] = []
        for decision in self.plan.decisions:
            if self.graph.nodes[decision.node].op == "sample" and (self.plan.sample_on_host or decision.impl == "host"):
                self.plan.sample_on_host = True
                continue
            if not runs or runs[-1][0] != decision.device:
                runs.append((decision.device, []))
            runs[-1][1].append(decision.node)
        present: dict[str, set[str]] = {}  # value -> devices that hold it
        for device, nodes in runs:
            copies = []
            for name in dict.fromkeys(n for i in nodes for n in self.graph.nodes[i].inputs if n is not None):
                base = self.graph.base(name)
                if base.kind != "temp":
                    continue
                holders = present.setdefault(base.name, set())
                if holders and device not in holders:
                    copies.append(Copy(base.name, sorted(holders)[0], device))
                    holders.add(device)
            for index in nodes:
                for name in self.graph.nodes[index].outputs:
                    present[self.graph.base(name).name] = {device}
            self.plan.segments.append(Segment(device, tuple(nodes), tuple(copies)))

    def _add(self, device: str, value: Value, arena: str, nbytes: int, **fields: object) -> None:
        key = (device, value.name)
        if key in self.plan.places:
            return
        align = self.backends[device].limits.alignment
        offset = self.plan.arenas.get((device, arena), 0)
        shape = tuple(self.limits.resolve(d) for d in value.shape)
        place = Place(arena, offset, nbytes, shape, str(fields.pop("dtype", value.dtype)), **fields)  # type: ignore[arg-type]
        self.plan.places[key] = place
        self.plan.arenas[(device, arena)] = offset + -(-nbytes // align) * align

    def _place_weights_and_state(self) -> None:
        for segment in self.plan.segments:
            backend = self.backends[segment.device]
            for index in segment.nodes:
                for name in self.graph.nodes[index].inputs:
                    if name is None:
                        continue
                    value = self.graph.base(name)
                    if value.kind == "weight":
                        layout = self._layout(value, segment.device)
                        dtype = self._dtype(value, segment.device)
                        size = layout.nbytes if layout else plain_bytes([int(d) for d in value.shape], dtype)
                        self._add(segment.device, value, "weights", size, dtype=dtype, layout=layout)
                    elif isinstance(value.spec, KVSpec):
                        block = backend.kv_block_bytes(value.spec, self.limits.block_size)
                        self._add(segment.device, value, "kv", block * self.limits.num_blocks, block_bytes=block)
                    elif isinstance(value.spec, SlotSpec):
                        block = plain_bytes(value.spec.shape, value.spec.dtype)
                        self._add(segment.device, value, "state", block * self.limits.max_sequences, block_bytes=block)
                    elif value.kind in ("input", "const"):
                        shape = [self.limits.resolve(d) for d in value.shape]
                        self._add(segment.device, value, "host", plain_bytes(shape, value.dtype))

    def _place_activations(self) -> None:
        outputs = {self.graph.base(n).name for n in self.graph.outputs}
        for device in self.plan.devices:
            spans = self._spans(device)
            lifetimes = []
            for name, (first, last) in spans.items():
                value = self.graph.values[name]
                nbytes = plain_bytes([self.limits.resolve(d) for d in value.shape], value.dtype)
                if name in outputs:
                    self._add(device, value, "host", nbytes)
                else:
                    lifetimes.append(Lifetime(name, first, last, nbytes))
            offsets, total = pack_lifetimes(lifetimes, self.backends[device].limits.alignment)
            for life in lifetimes:
                value = self.graph.values[life.name]
                shape = tuple(self.limits.resolve(d) for d in value.shape)
                self.plan.places[(device, life.name)] = Place("scratch", offsets[life.name], life.nbytes, shape, value.dtype)
            if total:
                self.plan.arenas[(device, "scratch")] = total

    def _spans(self, device: str) -> dict[str, tuple[int, int]]:
        """First and last node at which a temporary is in use on a device; a copy counts as a use at the segment it precedes."""
        spans: dict[str, tuple[int, int]] = {}

        def use(name: str, index: int) -> None:
            first, last = spans.get(name, (index, index))
            spans[name] = (min(first, index), max(last, index))

        for segment in self.plan.segments:
            for copy in segment.copies:
                if device in (copy.source, copy.target):
                    use(copy.value, segment.nodes[0])
            if segment.device == device:
                for index in segment.nodes:
                    node = self.graph.nodes[index]
                    for name in (*node.inputs, *node.outputs):
                        if name is not None and self.graph.base(name).kind == "temp":
                            use(self.graph.base(name).name, index)
        return spans
