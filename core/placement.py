"""Placement: which device runs which node, and what happens to nodes that a device cannot run.

`Placement` is the data model for every arrangement that the planner must be able to say: one device, layers split by ratio,
roles on other devices. It is pure data over the graph's tags; `planner.py` asks backends afterwards whether they agree.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import UsageError
from .graph import Graph, Node

__all__ = ["FALLBACK_POLICIES", "DeviceShare", "Placement", "PlacementRule"]

FALLBACK_POLICIES = ("error", "warn", "allow")
"""What to do when an op leaves its device: refuse at load, one line per op and reason, or one summary line."""


@dataclass(frozen=True)
class DeviceShare:
    """A device and its share of the layers (any positive number; shares are relative)."""

    device: str
    share: float = 1.0


@dataclass(frozen=True)
class PlacementRule:
    """Nodes with this role (None: any), layer range [start, stop) (None: any) and op pattern run on `device`. Later rules win."""

    device: str
    role: str | None = None
    layers: tuple[int, int] | None = None
    op: str = "*"

    def matches(self, node: Node) -> bool:
        """True if the rule speaks about this node."""
        layer = node.tags.get("layer")
        in_layers = self.layers is None or (layer is not None and self.layers[0] <= layer < self.layers[1])
        return in_layers and self.role in (None, node.tags.get("role")) and fnmatch.fnmatchcase(node.op, self.op)


@dataclass(frozen=True)
class Placement:
    """Devices with their share of the layers, and rules on top. Nodes outside of layers: embedding on the first device that has a
    share, head on the last one."""

    devices: tuple[DeviceShare, ...]
    rules: tuple[PlacementRule, ...] = ()

    @staticmethod
    def on(device: str) -> Placement:
        """Everything on one device."""
        return Placement((DeviceShare(device),))

    def names(self) -> tuple[str, ...]:
        """Every device that is named, in order, once."""
        return tuple(dict.fromkeys([d.device for d in self.devices] + [r.device for r in self.rules]))

    def assign(self, graph: Graph) -> list[str]:
        """The device of every node. Raises UsageError if no device has a positive share."""
        total = sum(d.share for d in self.devices)
        if not self.devices or total <= 0 or any(d.share < 0 for d in self.devices):
            raise UsageError("a placement needs at least one device with a positive share")
        shares = [d for d in self.devices if d.share > 0]
        num_layers = 1 + max((n.tags.get("layer", -1) for n in graph.nodes), default=0)
        bounds = _cumulative([d.share / total * num_layers for d in shares])
        seen_layer = False
        assigned = []
        for node in graph.nodes:
            layer = node.tags.get("layer")
            seen_layer = seen_layer or layer is not None
            if layer is None:
                device = shares[-1 if seen_layer else 0].device
            else:
                device = shares[next(i for i, b in enumerate(bounds) if layer + 0.5 < b or i == len(bounds) - 1)].device
            for rule in self.rules:
                if rule.matches(node):
                    device = rule.device
            assigned.append(device)
        return assigned


def _cumulative(parts: Sequence[float]) -> list[float]:
    sums, total = [], 0.0
    for part in parts:
        total += part
        sums.append(total)
    return sums
