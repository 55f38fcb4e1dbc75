"""The rows of a step whose answers are held to a constraint: their tokens, chosen with as few masks as can be.

A mask is a walk of a grammar through the whole vocabulary, and mostly one token of it is wanted: the likeliest. So where a constraint has
`check`, the sampler asks for single tokens, the likeliest first (`_held.h` says why that gives the token of the mask, bit for bit); a mask is
asked for where that does not decide, and the row is read again under it only where its likeliest tokens do not decide even then. Nothing is
computed beside the step here, where it would take the cores from the model; only a grammar whose slow masks are asked for token after token
begins the next one by itself (`text._matcher`).

Called by the engine, in its thread; the executor calls `choose` when the logits are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ._kernels import UNDECIDED, Sampler
from .errors import EngineError
from .job import Job, JobChoice
from .request import TokenConstraint
from .sampling import build_rows, move_rows
from .scheduler import ScheduledStep

__all__ = ["HeldRows"]


class HeldRows:
    """Of the steps of one engine (`step.Holds`). vocab_size: entries of a row of logits; fail: ends the request of a constraint that raised; tell: told
    how long a step waited for masks, in seconds."""

    def __init__(self, vocab_size: int, fail: Callable[[Job, BaseException], None], tell: Callable[[float], None]):
        self._vocab_size, self._words, self._fail, self._tell = vocab_size, (vocab_size + 31) // 32, fail, tell
        self._waited_s = 0.0
        self.rows: list[tuple[int, JobChoice, TokenConstraint, Any]] = []  # row of the logits, whose it is, what it is held to, its `check`
        self._by_row: dict[int, TokenConstraint] = {}

    def begin(self, step: ScheduledStep) -> None:
        """The steps that follow have the sequences of this one."""
        self.end()
        row = 0
        for part in step.slices:
            row += part.num_rows
            choice: JobChoice = part.sequence.owner
            if part.num_rows and part.samples and choice.constraint is not None:
                self.rows.append((row - 1, choice, choice.constraint, getattr(choice.constraint, "check", _has_masks)))
                self._by_row[row - 1] = choice.constraint

    def end(self) -> None:
        """No step follows for a while: nothing of the last one is kept."""
        self.rows, self._by_row = [], {}

    def choose(self, kernel: Sampler, logits: np.ndarray) -> np.ndarray:
        """i32 [R] of logits f32 [R, V]. A constraint that raises fails its request, whose row is then nobody's."""
        held: list[Any] = [None] * len(logits)
        started = time.monotonic()
        for row, choice, _, check in self.rows:
            if not choice.finished:
                try:
                    held[row] = check()
                except BaseException as error:  # also a panic of its library, which is no Exception
                    self._fail(choice.job, error)
        self._waited_s = time.monotonic() - started
        ids = kernel.choose(logits, held, self._mask)
        given = ids.tolist()
        if UNDECIDED in given:
            for row, choice, _, _ in self.rows:
                if given[row] == UNDECIDED:
                    ids[row] = self._masked(choice, row, held[row], logits[row : row + 1])
        if held.count(None) < len(held):
            self._tell(self._waited_s)
        return ids

    def _mask(self, row: int) -> np.ndarray | None:
        """u32 [words] of a row, or None: every token may come. Raises what its constraint raises."""
        started = time.monotonic()
        mask = self._by_row[row].mask()
        if mask is not None:
            self._require(mask)
        self._waited_s += time.monotonic() - started
        return mask

    def _masked(self, choice: JobChoice, row: int, answer: Any, logits: np.ndarray) -> int:
        """The id of one row, f32 [1, V], read under its mask. answer: (mask,), what was raised when it was asked for, or what was not asked for one."""
        try:
            if isinstance(answer, BaseException):
                raise answer
            mask = answer[0] if isinstance(answer, tuple) else self._mask(row)
            if mask is not None and not mask.any():
                raise EngineError("a constraint allows no token, and says not that the answer is complete")
        except BaseException as error:  # as above; a wrong mask, too, is its own request's matter, not the step's
            self._fail(choice.job, error)
            return 0
        alone = choice.alone
        if alone is None or not move_rows(alone, [choice.sampler], [mask]):
            alone = choice.alone = build_rows([choice.sampler], self._vocab_size, [mask])
        return int(alone.kernel.choose(logits)[0])

    def _require(self, mask: np.ndarray) -> None:
        if not isinstance(mask, np.ndarray) or mask.dtype != np.uint32 or mask.shape != (self._words,):
            raise EngineError(f"a constraint gave {type(mask).__name__} {getattr(mask, 'shape', '')} as its mask; it must be u32 [{self._words}]")


def _has_masks() -> Callable[[Sequence[int]], None]:
    """The `check` of a constraint that has none."""
    return _unknown


def _unknown(_token_ids: Sequence[int]) -> None:
    """Of a constraint that only has masks."""
