"""How kernels are cut for a device: work-items of a group, elements of a work-item. Answers may differ in their last bits between two
shapes of kernels, so the choice depends on the device and the options, never on a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from .runtime import Caps

__all__ = ["Tuning", "choose"]


@dataclass(frozen=True)
class Tuning:
    """lanes: work-items of a group; vec: elements of a vector; linear_*: those of the linear kernels, whose product with vecs is 32;
    tile: rows of activations that share a weight; pairs: integer products of 16 bits; span: elements of a row for a group."""

    name: str
    lanes: int
    vec: int
    linear_lanes: int
    linear_vec: int
    tile: int
    pairs: bool
    span: int

    @property
    def row(self) -> dict[str, int]:
        """Macros of the kernels that work along a row."""
        return {"LANES": self.lanes, "VEC": self.vec}

    @property
    def acts(self) -> dict[str, int]:
        """Macros of acts.h."""
        return {"PAIRS": int(self.pairs)}

    @property
    def linear(self) -> dict[str, int]:
        """Macros of the linear kernels."""
        vecs = 32 // (self.linear_lanes * self.linear_vec)
        return {"LANES": self.linear_lanes, "VEC": self.linear_vec, "VECS": vecs, "PAIR_WIDTH": 2 * self.linear_vec, **self.acts}


VECTOR = Tuning("vector", lanes=1, vec=16, linear_lanes=1, linear_vec=8, tile=4, pairs=True, span=4096)
LANES = Tuning("lanes", lanes=64, vec=1, linear_lanes=32, linear_vec=1, tile=4, pairs=False, span=256)


def choose(kernels: str, caps: Caps) -> Tuning:
    """kernels: "vector" (a work-item is a thread with vector registers), "lanes" (many work-items side by side), or "auto"."""
    if kernels == "auto":
        return VECTOR if caps.is_cpu else LANES
    return {"vector": VECTOR, "lanes": LANES}[kernels]
