"""What the engine needs of an executor, as protocols: the engine imports no plan, no backend and no device.

`executor.Executor` fits; tests use a model that is a hash of its context.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from .step import StepBatch

__all__ = ["StepOutput", "StepRunner"]


class StepOutput(Protocol):
    """What a step gives."""

    @property
    def ids(self) -> np.ndarray | None:
        """i32 [R], −1 where a row had no finite logit; None if the batch had no sampler."""

    @property
    def logits(self) -> np.ndarray | None:
        """f32 [R, V], valid until the next run; None where the executor keeps them on its device."""


class StepRunner(Protocol):
    """A loaded model that runs steps. Called by one thread at a time."""

    block_size: int  # tokens of a cache block
    num_blocks: int
    max_blocks: int  # columns of the block table
    max_tokens: int  # of a step
    max_sequences: int
    max_rows: int
    num_snapshots: int  # of recurrent state, besides a slot for each sequence

    @property
    def vocab_size(self) -> int:
        """Entries of a row of logits."""

    def run(self, batch: StepBatch) -> StepOutput:
        """Computes the batch's tokens, stores their keys and values, samples its rows. Any exception means: nothing to use."""

    def copy_block(self, src: int, dst: int) -> None:
        """Copies one cache block in every layer, before the next run."""

    def touch_block(self, block: int) -> None:
        """Asks the system for the memory of a cache block that nobody uses, before a run. What it holds afterwards means nothing."""

    def keep_state(self, slot: int, snapshot: int) -> None:
        """Copies the recurrent state of a slot to a snapshot, after a run and before the next."""

    def restore_state(self, snapshot: int, slot: int) -> None:
        """Copies a snapshot to a slot, before the run that goes on from it."""

    def close(self) -> None:
        """Returns all memory."""
