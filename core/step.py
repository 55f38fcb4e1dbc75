"""StepBatch: the plain arrays that describe one step of a ragged batch, from the scheduler to the kernels.

T tokens of S sequences run this step; R rows are sampled. The arrays are the graph's step inputs (`ops.STEP_INPUTS`), so
the executor copies them by name and knows nothing else about scheduling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Protocol

import numpy as np

from . import _kernels
from .backend import StepDims

__all__ = ["MOVED", "Holds", "SamplerRows", "StepBatch"]

I32 = np.int32
MOVED: Final = ("ids", "positions", "slots", "context_len")


class Holds(Protocol):
    """What some rows of a step are held to."""

    def choose(self, kernel: _kernels.Sampler, logits: np.ndarray) -> np.ndarray:
        """i32 [R] of logits f32 [R, V]; kernel: of the rows without masks."""


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
    holds: Holds | None = None  # of rows without masks

    def choose(self, logits: np.ndarray) -> np.ndarray:
        """One id a row, i32 [R], of logits f32 [R, V]; −1 where a row has no finite one."""
        return self.kernel.choose(logits) if self.holds is None else self.holds.choose(self.kernel, logits)

    @cached_property
    def kernel(self) -> _kernels.Sampler:
        """The host's sampler of these arrays, whose values may change, but which are not replaced."""
        return _kernels.Sampler(
            u=self.u, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p, adjust_start=self.adjust_start,
            adjust_ids=self.adjust_ids, adjust_bias=self.adjust_bias, adjust_repeat=self.adjust_repeat, adjust_sub=self.adjust_sub, mask=self.mask,
        )  # fmt: skip


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
    moved: bool = False  # the batch of the step before: of its arrays only those of `MOVED` have other values now

    @cached_property
    def dims(self) -> StepDims:
        """T, S and R of this step. Arrays are not replaced by others of another length."""
        return StepDims(len(self.ids), len(self.context_len), len(self.sample_rows))
