"""The plan as data: what the planner decides, the loader fills, the executor runs and `fastllm plan` prints."""

from __future__ import annotations

from dataclasses import dataclass, field

from .backend import PackedLayout, StepDims, plain_bytes
from .graph import Graph, Value
from .model import experts_of_row

__all__ = ["HOST", "INHERITED", "Copy", "Decision", "LeftOp", "Place", "Plan", "Segment", "StepLimits"]

HOST = "host"
"""Who runs `sample`: the executor itself, from downloaded logits. Its adjustments and masks have no bound that a device could
reserve memory for, and two implementations of the draw would have to agree bit for bit."""
INHERITED = "it only inherits this op (from RefBackend: numpy on the host)"


@dataclass(frozen=True)
class StepLimits:
    """The largest step and the cache: tokens, sequences and sampled rows per step; context: tokens of one sequence; num_blocks
    cache blocks of block_size tokens. State of fixed size has a slot for each sequence of a step, and `num_snapshots` more that keep what it was."""

    max_tokens: int
    max_sequences: int
    max_rows: int
    context: int
    block_size: int
    num_blocks: int
    num_snapshots: int = 0

    @property
    def num_slots(self) -> int:
        """Slots of state of fixed size: those of sequences, then those of snapshots."""
        return self.max_sequences + self.num_snapshots

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
    """Where a value lives on a device. arena: weights | mapped (weights that are used where the file is mapped) | kv | state |
    scratch | host (memory shared with the engine: step inputs, constants, outputs). chunk: which of the arena's buffers; offset and nbytes within it; shape at its largest; layout: packed
    form of a weight."""

    arena: str
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None
    layout: PackedLayout | None = None
    block_bytes: int = 0
    chunk: int = 0


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
    """Who runs a node (impl: its name in `Backend.ops()`, or HOST), why not the device that was asked, and the bytes of workspace
    that it needs there. varies: the backend admits that batch mates change the result's bits. inherited: the device that was asked has this op from `RefBackend` only, so that numpy computes it wherever
    the node stays there."""

    node: int
    device: str
    impl: str
    reason: str = ""
    workspace: int = 0
    inherited: bool = False
    varies: bool = False


@dataclass(frozen=True)
class LeftOp:
    """An op of a model that its device does not compute itself: where it runs and why, how many nodes, and the bytes that they
    carry between devices (or download and upload) for one token of one sequence. A value that serves two such nodes counts for both."""

    op: str
    device: str
    reason: str
    count: int
    bytes_per_token: int


@dataclass
class Plan:
    """Everything the executor needs. places: (device, value name) -> Place; arenas: (device, arena) -> bytes of its buffers, more
    than one where the device limits a buffer's size. The arena "workspace" is shared by all nodes of its device."""

    graph: Graph
    limits: StepLimits
    devices: tuple[str, ...]
    segments: list[Segment] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    places: dict[tuple[str, str], Place] = field(default_factory=dict)
    arenas: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    @property
    def fallbacks(self) -> list[Decision]:
        """Nodes that left the device they were placed on."""
        return [d for d in self.decisions if d.reason]

    @property
    def inherited(self) -> list[Decision]:
        """Nodes that stay on their device and are computed there by what it inherits: on the host, in numpy."""
        return [d for d in self.decisions if d.inherited and not d.reason]

    @property
    def left(self) -> list[LeftOp]:
        """`fallbacks` and `inherited`, one entry per op, device and reason, with the bytes that they move per token."""
        found: dict[tuple[str, str, str], list[int]] = {}
        for d in self.decisions:
            if d.reason or d.inherited:
                node = self.graph.nodes[d.node]
                sums = found.setdefault((node.op, d.device, d.reason or f"{d.device}: {INHERITED}"), [0, 0])
                sums[0] += 1
                sums[1] += self._operand_bytes(d)
        return [LeftOp(*key, count, nbytes) for key, (count, nbytes) in found.items()]

    def _operand_bytes(self, decision: Decision) -> int:
        """Bytes that a node of another device, or one that is inherited, carries for one token: of a node that left, the values that
        come from another device or are taken back to one; of an inherited one, all it reads and makes but cache and step arrays."""
        node = self.graph.nodes[decision.node]
        if not decision.reason:
            names = {self.graph.base(n).name for n in (*node.inputs, *node.outputs) if n is not None}
            return sum(self._row_bytes(self.graph.values[n]) for n in names if self.graph.values[n].kind in ("temp", "weight"))
        mine = [c for s in self.segments for c in s.copies]
        inputs = {self.graph.base(n).name for n in node.inputs if n is not None}
        outputs = {self.graph.base(n).name for n in node.outputs}
        moved = [c for c in mine if (c.target == decision.device and c.value in inputs) or (c.source == decision.device and c.value in outputs)]
        return sum(self._row_bytes(self.graph.values[c.value]) for c in moved)

    @staticmethod
    def _row_bytes(value: Value) -> int:
        """Bytes of one token's part of a value; of a weight, all of it."""
        row = value.shape[1:] if value.shape and isinstance(value.shape[0], str) else value.shape
        return plain_bytes([int(d) for d in row], "f32" if value.dtype == "any" else value.dtype)

    def total_bytes(self, arena: str) -> int:
        """Bytes of one kind over all devices."""
        return sum(sum(sizes) for (_, name), sizes in self.arenas.items() if name == arena)

    def bytes_per_token(self) -> int:
        """Weight bytes that one decode step of one sequence reads: every weight that a node other than `embed` uses, once; of the
        experts those that a row takes."""
        used: dict[tuple[str, str], int] = {}
        for decision in self.decisions:
            node = self.graph.nodes[decision.node]
            names = node.inputs[:1] if node.op == "embed" else node.inputs
            active, total = experts_of_row(self.graph, node)
            for name in names:
                if name is not None and self.graph.values[name].kind == "weight":
                    nbytes = self.places[(decision.device, name)].nbytes
                    used[(decision.device, name)] = nbytes * active // total
        return sum(used.values())

    def copy_bytes_per_token(self) -> int:
        """Bytes that cross devices for one token."""
        return sum(self._row_bytes(self.graph.values[c.value]) for s in self.segments for c in s.copies)
