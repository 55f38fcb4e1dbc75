"""A request inside the engine: its choices, when it stops, and what its rows of a step become.

Called by the engine: a `Job` is made in the thread that submits, everything after happens in the engine's thread.
"""

from __future__ import annotations

import time

import numpy as np

from . import _kernels
from .embedding import Pool
from .errors import EngineError
from .request import RequestHandle, Timings, TokenConstraint, TokenEvent, TokenLogprobs
from .runner import StepOutput
from .sampling import SamplerState
from .scheduler import Sequence, Slice
from .step import SamplerRows

__all__ = ["Job", "JobChoice", "NotFinite"]


class NotFinite(EngineError):
    """The model gave a row without finite logits: an error of the one request, whose cached blocks are not to be trusted."""


class JobChoice:
    """One choice: its sequence, its sampler, what it is held to, and whether it has ended."""

    __slots__ = ("alone", "complete", "constraint", "finished", "index", "job", "num_generated", "sampler", "sequence")

    def __init__(self, job: Job, index: int, sequence: Sequence, sampler: SamplerState, constraint: TokenConstraint | None = None):
        self.job, self.index, self.sequence, self.sampler, self.constraint = job, index, sequence, sampler, constraint
        self.num_generated, self.finished = 0, False
        self.complete = False  # the constraint has been met: nothing may follow
        self.alone: SamplerRows | None = None  # its row of a step by itself, under a mask
        sequence.owner = self


class Job:
    """A request with its handle.

    prompt: i32 [n]. max_new: tokens a choice may generate, within the context. stop_ids: ids that end a choice. num_top: alternatives
    to report with log-probabilities, None: none asked. prompt_logprobs: those known so far, None: not asked, or handed out.
    """

    def __init__(self, handle: RequestHandle, prompt: np.ndarray, room: int, vocab_size: int, number: int = 0):
        """room: tokens that still fit the context; number: of the request, in order of submission."""
        request, params = handle.request, handle.params
        ends = () if params.ignore_eos else tuple(request.end_ids)
        self.handle, self.prompt, self.vocab_size = handle, prompt, vocab_size
        self.max_new = room if params.max_tokens is None else min(params.max_tokens, room)
        self.stop_ids = frozenset({*ends, *(params.stop_token_ids or ())})
        self.num_top = None if params.logprobs is None else min(params.logprobs, vocab_size)
        self.prompt_logprobs: list[TokenLogprobs | None] | None = [None] if params.prompt_logprobs else None
        self.pool = None if request.pooling is None else Pool(request.pooling)
        all_rows = self.prompt_logprobs is not None or request.pooling in ("mean", "cls")
        self.choices: list[JobChoice] = []
        for index in range(params.n or 1):
            rank = (request.priority, number, index)
            rows = all_rows and index == 0
            sequence = Sequence(None, prompt, rank=rank, max_new=self.max_new, salt=request.salt, prompt_rows=rows)
            sampler = SamplerState(params, prompt, handle.seed, request.stream + index, ends)
            constraint = None if request.constraint is None else request.constraint()
            self.choices.append(JobChoice(self, index, sequence, sampler, constraint))
        self.submitted_at = time.monotonic()
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at = self.submitted_at

    @property
    def finished(self) -> bool:
        """Every choice has ended."""
        return all(choice.finished for choice in self.choices)

    def timings(self) -> Timings:
        """Times and counts so far."""
        first, started = self.first_token_at, self.started_at
        return Timings(
            queue_s=0.0 if started is None else started - self.submitted_at,
            ttft_s=0.0 if first is None else first - self.submitted_at,
            prompt_s=0.0 if first is None or started is None else first - started,
            decode_s=0.0 if first is None else self.last_token_at - first,
            prompt_tokens=len(self.prompt),
            cached_tokens=max(self.choices[0].sequence.num_cached, 0),
            decode_tokens=sum(choice.num_generated for choice in self.choices),
        )

    def take(self, choice: JobChoice, part: Slice, ids: list[int], result: StepOutput, now: float) -> TokenEvent | None:
        """Takes a slice's rows: log-probabilities of the prompt, and the choice's next token, for which it returns the event.

        ids: of all rows of the step; now: when the step ended. Raises NotFinite.
        """
        num_prompt_rows = part.num_rows - part.samples
        if self.pool is not None and result.logits is not None:
            rows = result.logits[part.first_row : part.first_row + part.num_rows]  # [k, C]
            if not np.isfinite(rows).all():
                raise self._not_finite(part.start)
            self.pool.add(rows)
        if num_prompt_rows and self.prompt_logprobs is not None:
            first = part.start + part.num_tokens - part.num_rows  # position of the first row, which tells the token after it
            after = self.prompt[first + 1 : first + 1 + num_prompt_rows]
            self.prompt_logprobs += self._logprobs(result, part.first_row, after, first + 1)
        if not part.samples:
            return None
        sequence, row = part.sequence, part.first_row + num_prompt_rows
        token = ids[row]
        if not 0 <= token < self.vocab_size:
            raise self._not_finite(sequence.num_tokens)
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        event = TokenEvent(token, choice.index)
        if self.max_new == 0:
            event.token_id, event.finish_reason = None, "length"
            event.embedding = None if self.pool is None else self.pool.vector()
        else:
            sequence.append(token)
            if choice.sampler.counts:
                choice.sampler.append(token)
            else:
                choice.sampler.position += 1
            choice.num_generated += 1
            if token in self.stop_ids:
                event.finish_reason = "stop"
            elif choice.constraint is not None and choice.constraint.accept(token):
                choice.complete = True
            elif choice.num_generated == self.max_new:
                event.finish_reason = "length"
            if self.num_top is not None:
                entry = self._logprobs(result, row, np.array([token], np.int32), sequence.num_tokens - 1)[0]
                event.logprob, event.top_logprobs = entry.logprob, entry.top
        if self.prompt_logprobs is not None and len(self.prompt_logprobs) == len(self.prompt):
            event.prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        return event

    def _logprobs(self, result: StepOutput, row: int, ids: np.ndarray, position: int) -> list[TokenLogprobs]:
        """Of ids (i32 [k]) by the k rows of logits from `row` on; position: of the first id, for the error."""
        if result.logits is None:
            raise EngineError("the executor gave no logits, but log-probabilities were asked for")
        chosen, top_ids, top = _kernels.logprobs(result.logits[row : row + len(ids)], ids, self.num_top or 0)
        bad = np.isnan(chosen)  # [k]
        if bad.any():
            raise self._not_finite(position + int(bad.argmax()))
        return [
            TokenLogprobs(token, value, tuple(zip(others, values, strict=True)))
            for token, value, others, values in zip(ids.tolist(), chosen.tolist(), top_ids.tolist(), top.tolist(), strict=True)
        ]

    def _not_finite(self, position: int) -> NotFinite:
        return NotFinite(
            f"request '{self.handle.request_id}': the model gave no finite logit at position {position}",
            why="NaN or infinity in the weights or in the arithmetic",
            fix="the weights hold NaN or infinity, or an activation overflowed: download the model again",
        )
