"""StepBatch: the plain arrays that describe one step of a ragged batch, from the scheduler to the kernels.

T tokens of S sequences run this step; R rows are sampled. The arrays are the graph's step inputs (`ops.STEP_INPUTS`), so
the executor copies them by name and knows nothing else about scheduling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .backend import StepDims

__all__ = ["SamplerRows", "StepBatch"]

I32 = np.int32


@dataclass
class SamplerRows:
    """Sampler parameters of R rows; the adjustments of row r are entries adjust_start[r]…adjust_start[r+1]."""

    u: np.ndarray  # f64 [R]
    temperature: np.ndarray  # f32 [R]
    top_k: np.ndarray  # i32 [R]
    top_p: np.ndarray  # f32 [R]
    min_p: np.ndarray  # f32 [R]
    adjust_start: np.ndarray  # i32 [R+1]
    adjust_ids: np.ndarray  # i32 [A]
    adjust_bias: np.ndarray  # f32 [A]
    adjust_repeat: np.ndarray  # f32 [A]
    adjust_sub: np.ndarray  # f32 [A]
    mask: np.ndarray | None = None  # u32 [R, ceil(V/32)], bit 0 = banned


@dataclass
class StepBatch:
    """One step. block_table is [S, B] with B the most blocks any of its sequences has; unused entries are 0."""

    ids: np.ndarray  # i32 [T]
    positions: np.ndarray  # i32 [T]
    slots: np.ndarray  # i32 [T]
    query_start: np.ndarray  # i32 [S+1]
    context_len: np.ndarray  # i32 [S]
    block_table: np.ndarray  # i32 [S, B]
    sample_rows: np.ndarray  # i32 [R]
    sampler: SamplerRows | Callable[[], SamplerRows] | None = None  # called when the logits are there; None: the caller wants logits only
    state_slot: np.ndarray = field(default_factory=lambda: np.zeros(0, I32))  # i32 [S]
    prefix_len: np.ndarray = field(default_factory=lambda: np.zeros(0, I32))  # i32 [S]

    @property
    def dims(self) -> StepDims:
        """T, S and R of this step."""
        return StepDims(len(self.ids), len(self.context_len), len(self.sample_rows))
