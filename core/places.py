"""Where everything of a plan lies: segments and copies between devices, weights and state, activations by their lifetimes.

The last part of planning: who runs each node, and in what form each weight is kept, is decided (`planner.py`, which calls `place_all`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .arena import Lifetime, pack_lifetimes
from .backend import Backend, PackedLayout, plain_bytes
from .graph import KVSpec, SlotSpec, Value
from .plan import HOST, Copy, Place, Plan, Segment
from .weights import TensorSource

__all__ = ["Form", "place_all"]


@dataclass(frozen=True)
class Form:
    """How a weight is kept on a device. layout: packed, or None; dtype: what an op sees; stored: the file's own bytes in this form, if it has them."""

    layout: PackedLayout | None
    dtype: str
    stored: TensorSource | None


def place_all(plan: Plan, backends: Mapping[str, Backend], kept: Callable[[Value, str], Form]) -> None:
    """Fills segments, places and arenas of a plan whose decisions are made. kept: the form of a weight on a device."""
    places = _Places(plan, backends, kept)
    places.cut_segments()
    places.place_weights_and_state()
    places.place_activations()


class _Places:
    def __init__(self, plan: Plan, backends: Mapping[str, Backend], kept: Callable[[Value, str], Form]):
        self.plan, self.backends, self.kept = plan, backends, kept

    def cut_segments(self) -> None:
        """Runs of nodes on one device, and what is copied before each."""
        runs: list[tuple[str, list[int]]] = []
        for decision in self.plan.decisions:
            if decision.impl == HOST:
                continue
            if not runs or runs[-1][0] != decision.device:
                runs.append((decision.device, []))
            runs[-1][1].append(decision.node)
        present: dict[str, set[str]] = {}  # value -> devices that hold it
        for device, nodes in runs:
            copies = []
            for name in dict.fromkeys(n for i in nodes for n in self.plan.graph.nodes[i].inputs if n is not None):
                base = self.plan.graph.base(name)
                if base.kind != "temp":
                    continue
                holders = present.setdefault(base.name, set())
                if holders and device not in holders:
                    copies.append(Copy(base.name, sorted(holders)[0], device))
                    holders.add(device)
            for index in nodes:
                for name in self.plan.graph.nodes[index].outputs:
                    present[self.plan.graph.base(name).name] = {device}
            self.plan.segments.append(Segment(device, tuple(nodes), tuple(copies)))

    def _add(self, device: str, value: Value, arena: str, nbytes: int, **fields: object) -> None:
        key = (device, value.name)
        if key in self.plan.places:
            return
        limits = self.backends[device].limits
        size = -(-nbytes // limits.alignment) * limits.alignment
        sizes = self.plan.arenas.setdefault((device, arena), [0])
        if limits.max_alloc is not None and sizes[-1] and sizes[-1] + size > limits.max_alloc:
            sizes.append(0)
        shape = tuple(self.plan.limits.resolve(d) for d in value.shape)
        dtype, chunk = str(fields.pop("dtype", value.dtype)), len(sizes) - 1
        self.plan.places[key] = Place(arena, sizes[-1], nbytes, shape, dtype, chunk=chunk, **fields)  # type: ignore[arg-type]
        sizes[-1] += size

    def place_weights_and_state(self) -> None:
        """Weights, caches, states, inputs and constants, on every device that reads them."""
        for segment in self.plan.segments:
            backend = self.backends[segment.device]
            for index in segment.nodes:
                for name in self.plan.graph.nodes[index].inputs:
                    if name is None:
                        continue
                    value = self.plan.graph.base(name)
                    if value.kind == "weight":
                        form = self.kept(value, segment.device)
                        shape = [int(d) for d in value.shape]
                        size = _packed_bytes(form.layout, shape, backend) if form.layout else plain_bytes(shape, form.dtype)
                        arena = "mapped" if _is_mapped(form, size, backend) else "weights"
                        self._add(segment.device, value, arena, size, dtype=form.dtype, layout=form.layout)
                    elif isinstance(value.spec, KVSpec):
                        block = backend.kv_block_bytes(value.spec, self.plan.limits.block_size)
                        self._add(segment.device, value, "kv", block * self.plan.limits.num_blocks, block_bytes=block)
                    elif isinstance(value.spec, SlotSpec):
                        block = plain_bytes(value.spec.shape, value.spec.dtype)
                        self._add(segment.device, value, "state", block * self.plan.limits.num_slots, block_bytes=block)
                    elif value.kind in ("input", "const"):
                        shape = [self.plan.limits.resolve(d) for d in value.shape]
                        self._add(segment.device, value, "host", plain_bytes(shape, value.dtype))

    def place_activations(self) -> None:
        """Temporaries share an arena where their lifetimes allow; outputs and the workspace."""
        outputs = {self.plan.graph.base(n).name for n in self.plan.graph.outputs}
        for device in self.plan.devices:
            spans = self._spans(device)
            lifetimes = []
            for name, (first, last) in spans.items():
                value = self.plan.graph.values[name]
                nbytes = plain_bytes([self.plan.limits.resolve(d) for d in value.shape], value.dtype)
                if name in outputs:
                    self._add(device, value, "host", nbytes)
                else:
                    lifetimes.append(Lifetime(name, first, last, nbytes))
            offsets, total = pack_lifetimes(lifetimes, self.backends[device].limits.alignment)
            for life in lifetimes:
                value = self.plan.graph.values[life.name]
                shape = tuple(self.plan.limits.resolve(d) for d in value.shape)
                self.plan.places[(device, life.name)] = Place("scratch", offsets[life.name], life.nbytes, shape, value.dtype)
            if total:
                self.plan.arenas[(device, "scratch")] = [total]
            workspace = max((d.workspace for d in self.plan.decisions if d.device == device), default=0)
            if workspace:
                self.plan.arenas[(device, "workspace")] = [workspace]

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
                    node = self.plan.graph.nodes[index]
                    for name in (*node.inputs, *node.outputs):
                        if name is not None and self.plan.graph.base(name).kind == "temp":
                            use(self.plan.graph.base(name).name, index)
        return spans


def _packed_bytes(layout: PackedLayout, shape: Sequence[int], backend: Backend) -> int:
    """Bytes of a packed weight; each matrix of a stack begins aligned."""
    if len(shape) < 3:
        return layout.nbytes
    return shape[0] * (-(-layout.nbytes // backend.limits.alignment) * backend.limits.alignment)


def _is_mapped(form: Form, size: int, backend: Backend) -> bool:
    """Whether the file holds the weight as the device wants it, so that it is used from there."""
    if form.stored is None or not backend.maps_weights:
        return False
    return form.stored.nbytes == size and form.stored.data.ctypes.data % backend.limits.alignment == 0
