"""One vector for a text: the model's normed hidden states, pooled; and the runner that gives hidden states instead of logits.

A model that is built for embedding has no head: its first output is the hidden state [R, C] of the rows that are asked for. Requests with
`pooling` come through the same engine, scheduler and cache as those that generate, so texts of different lengths share a step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np

from .step import StepBatch

__all__ = ["POOLINGS", "EmbeddingRunner", "EmbeddingStep", "Pool"]

POOLINGS: Final = ("last", "mean", "cls")


class Pool:
    """Takes the rows of a text in order of position, and makes one vector of them.

    kind: `last` (the last token's row, for decoders), `cls` (the first token's), `mean` (of all, summed in f64 in order of position, so
    that the bits do not depend on how the text was cut).
    """

    def __init__(self, kind: str):
        self.kind, self._count = kind, 0
        self._sum: np.ndarray | None = None

    def add(self, rows: np.ndarray) -> None:
        """rows: f32 [k, C], of the next k positions; with `last` only those that were computed."""
        for row in rows:
            self._count += 1
            if self._sum is None or self.kind == "last":
                self._sum = row.astype(np.float64)
            elif self.kind == "mean":
                self._sum += row

    def vector(self) -> np.ndarray:
        """f32 [C]; not of unit length."""
        assert self._sum is not None
        return (self._sum / (self._count if self.kind == "mean" else 1)).astype(np.float32)


class EmbeddingStep:
    """A StepOutput whose `logits` are hidden states f32 [R, C]; the ids mean nothing."""

    def __init__(self, logits: np.ndarray):
        self.ids, self.logits = np.zeros(len(logits), np.int32), logits


class EmbeddingRunner:
    """A StepRunner around an executor of a model without head. vocab_size: of the model, whose ids prompts consist of."""

    def __init__(self, executor: Any, vocab_size: int):
        self._executor, self.vocab_size = executor, vocab_size
        self.block_size, self.num_blocks, self.max_blocks = executor.block_size, executor.num_blocks, executor.max_blocks
        self.max_tokens, self.max_sequences, self.max_rows = executor.max_tokens, executor.max_sequences, executor.max_rows
        self.num_snapshots = executor.num_snapshots

    def run(self, batch: StepBatch) -> EmbeddingStep:
        """Computes the batch's hidden states; nothing is sampled."""
        return EmbeddingStep(self._executor.run(replace(batch, sampler=None)).logits)

    def copy_block(self, src: int, dst: int) -> None:
        """As the executor."""
        self._executor.copy_block(src, dst)

    def touch_block(self, block: int) -> None:
        """As the executor."""
        self._executor.touch_block(block)

    def keep_state(self, slot: int, snapshot: int) -> None:
        """As the executor."""
        self._executor.keep_state(slot, snapshot)

    def restore_state(self, snapshot: int, slot: int) -> None:
        """As the executor."""
        self._executor.restore_state(snapshot, slot)

    def close(self) -> None:
        """Returns all memory."""
        self._executor.close()
