"""Requests as the engine sees them: token ids in, token events out.

`Request` is what a caller hands to `Engine.submit`; `RequestHandle` is what comes back: an iterator of `TokenEvent`s, or a call of
`on_event` for callers that must not block (the server). Text, templates and stop strings live above, in `text/`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Final, NamedTuple, Protocol

import numpy as np

from .errors import Cancelled, ContextOverflow, EngineError, FastLLMError, InvalidRequest
from .sampling import SamplingParams

__all__ = ["Choice", "Request", "RequestHandle", "Result", "Timings", "TokenConstraint", "TokenEvent", "TokenLogprobs", "check_request"]

MAX_SALT: Final = 128


class TokenConstraint(Protocol):
    """What one answer may look like: a mask for every token. Called by the engine's thread alone; what it raises fails the request.

    It may also have `check() -> Callable[[Sequence[int]], Sequence[bool] | None] | int | None`, called once a step before any mask. None: every token may come; a
    number: only the token of this id. Else the callable is asked for some tokens, the likeliest first and as many as must be known at least, perhaps several
    times, and must say of each what the mask says, one answer for each; None: it cannot, or would take longer for these than for all, and the mask is asked for.
    """

    def mask(self) -> np.ndarray | None:
        """u32 [ceil(vocab_size / 32)]: bit id % 32 of word id // 32 is 1 where the token may come next; at least one is. None: every token
        may. Called at most once a step, when its logits are there, and not at all where `check` has decided."""

    def accept(self, token_id: int) -> bool:
        """Takes a token of the answer. True: the answer is complete and ends here."""


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it.

    prompt_ids: token ids, at least one. end_ids: every id that ends an answer of this model (`ignore_eos` disregards them;
    `params.stop_token_ids` always stop). request_id: shown in errors. salt: prompts share cached blocks only under an equal salt.
    priority: smaller runs earlier. stream: the random stream of the first choice, choice i has stream + i; a call with several
    prompts under one seed gives prompt j `sampling.stream_id(j, 0)`, so that no two answers share one. constraint: makes the
    `TokenConstraint` of each choice, for example a `text.Grammar`; None: anything may be said. pooling: `last`, `mean` or `cls`: one vector is wanted and no token, of
    an engine that embeds; `params.max_tokens` is 0 then. live_timings: the handle's timings are up to date with each event, not only with the last.
    on_progress: told how many tokens of the prompt are done, and how many of them came from the cache, first and after each step that read some; in the
    engine's thread.
    """

    prompt_ids: Sequence[int] | np.ndarray
    params: SamplingParams = field(default_factory=SamplingParams)
    end_ids: Sequence[int] = ()
    request_id: str = ""
    salt: str = ""
    priority: int = 0
    stream: int = 0
    constraint: Callable[[], TokenConstraint] | None = None
    pooling: str | None = None
    live_timings: bool = False
    on_progress: Callable[[int, int], None] | None = None


def check_request(request: Request, vocab_size: int, n_ctx: int) -> np.ndarray:
    """The prompt as i32 [n], after everything of the request has been checked.

    vocab_size: ids are 0 to vocab_size − 1; n_ctx: tokens of the longest sequence. Raises InvalidRequest naming the field, or
    ContextOverflow (n_prompt_tokens, n_ctx) for a prompt that leaves no room for one token.
    """
    request.params.validate(vocab_size)
    prompt = _token_ids("prompt_ids", request.prompt_ids, vocab_size)
    _token_ids("end_ids", request.end_ids, vocab_size)
    if not len(prompt):
        raise InvalidRequest("prompt_ids is empty", who="prompt_ids", fix="send at least one token", param="prompt_ids")
    salt = request.salt
    if not isinstance(salt, str) or len(salt) > MAX_SALT or not all("!" <= c <= "~" for c in salt):
        raise InvalidRequest(f"the salt must be at most {MAX_SALT} visible ASCII characters", who="salt", param="salt")
    for name, low, high in (("priority", -(2**31), 2**31 - 1), ("stream", 0, 2**63)):
        value = getattr(request, name)
        if type(value) is not int or not low <= value <= high:
            raise InvalidRequest(f"{name} must be an integer from {low} to {high}", who=name, param=name)
    if len(prompt) + (request.params.max_tokens != 0) > n_ctx:
        raise ContextOverflow(
            f"the prompt has {len(prompt)} tokens and leaves no room for a new one: the limit is {n_ctx}",
            who=request.request_id,
            fix="shorten the prompt, or start with a larger --ctx",
            n_prompt_tokens=len(prompt),
            n_ctx=n_ctx,
        )
    return prompt


def _token_ids(name: str, ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """i32 [n]. Floats, bools, strings and ids outside the vocabulary are refused, whatever numpy would make of them."""
    fix = f"token ids are integers from 0 to {vocab_size - 1}"
    if isinstance(ids, np.ndarray):
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise InvalidRequest(f"{name} is an array of {ids.dtype}{list(ids.shape)}", who=name, fix=fix, param=name)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            bad = int(ids.max()) if int(ids.max()) >= vocab_size else int(ids.min())
            raise InvalidRequest(f"{name} holds {bad}", who=name, fix=fix, param=name)
        return ids.astype(np.int32)
    if not isinstance(ids, list | tuple):
        raise InvalidRequest(f"{name} is a {type(ids).__name__}, not a list of token ids", who=name, fix=fix, param=name)
    for index, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            shown = f"{token:#x}" if type(token) is int else repr(token)  # decimal digits of a huge integer are refused by Python
            raise InvalidRequest(f"{name}[{index}] is {shown if len(shown) <= 40 else shown[:37] + '...'}", who=name, fix=fix, param=name)
    return np.array(ids, np.int32)


class TokenLogprobs(NamedTuple):
    """Log-probability of one token in the raw distribution of the model, and the likeliest alternatives (id, log-probability)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class TokenEvent:
    """One new token of choice `index`.

    finish_reason: None while the choice goes on; "stop" (this token is an end id or stop id: not part of the text), "length",
    "cancelled" (only that choice was cancelled). token_id: None where a choice ends without a token, also "stop" after the last token of a
    grammar. logprob, top_logprobs: as
    asked. prompt_logprobs: with the first event of a choice that was asked for them; one entry a prompt token, the first None. embedding: f32 [C], of a
    request with `pooling`.
    """

    token_id: int | None
    index: int
    finish_reason: str | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    embedding: np.ndarray | None = None


@dataclass(frozen=True)
class Timings:
    """Seconds on a monotonic clock, and token counts over all choices.

    queue_s: submitted → first step. prompt_s: first step → first token. ttft_s: submitted → first token. decode_s: first token →
    last. Parts that have not happened are 0. cached_tokens: of the prompt, found in the cache.
    """

    queue_s: float = 0.0
    ttft_s: float = 0.0
    prompt_s: float = 0.0
    decode_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    decode_tokens: int = 0


@dataclass
class Choice:
    """One finished answer: its tokens (a stop token, if one ended it, is the last), why it ended, log-probabilities if asked."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """All choices of a finished request."""

    choices: list[Choice]
    prompt_logprobs: list[TokenLogprobs | None] | None
    timings: Timings


class RequestHandle:
    """A submitted request. Iterate over it for events, or call `result()`; use it as a context manager to cancel it on leaving.

    params: with defaults filled in. seed: the one given, or the one drawn. error: why it failed, once it has ended. Methods may be called from any thread.
    """

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        seed: int,
        cancel: Callable[[RequestHandle, int | None], None],
        on_event: Callable[[RequestHandle, TokenEvent | None], None] | None = None,
        pause: Callable[[RequestHandle, bool], None] | None = None,
    ):
        self.request, self.params, self.seed = request, params, seed
        self.started = False  # a step has worked on it
        self._pause = pause
        self.error: FastLLMError | None = None
        self.timings = Timings(prompt_tokens=len(request.prompt_ids))
        self._cancel, self._on_event = cancel, on_event
        self._choices = [Choice() for _ in range(params.n or 1)]
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._events: SimpleQueue[TokenEvent | None] = SimpleQueue()
        self._ended = threading.Event()
        self._pid = os.getpid()

    @property
    def request_id(self) -> str:
        """The caller's name for it."""
        return self.request.request_id

    @property
    def done(self) -> bool:
        """It has ended: finished, failed or cancelled."""
        return self._ended.is_set()

    def cancel(self, index: int | None = None) -> None:
        """Ends the request, or only one choice of it (a stop string was found), by the end of the step that runs. No effect on
        what has ended already."""
        self._cancel(self, index)

    @property
    def waiting(self) -> bool:
        """It is queued: no step has worked on it yet."""
        return not self.started and not self.done

    def pause(self) -> None:
        """Sets the request aside from the next step on, because nobody reads its events: it holds no place and no blocks until
        `resume`, and goes on with the very tokens it would have had."""
        if self._pause is not None:
            self._pause(self, True)

    def resume(self) -> None:
        """Ends a pause."""
        if self._pause is not None:
            self._pause(self, False)

    def __iter__(self) -> Iterator[TokenEvent]:
        """Events in order of generation; choices are mixed. Raises the request's error, or Cancelled, after the events before it.
        Not for a request with `on_event`."""
        while True:
            if os.getpid() != self._pid:
                raise EngineError("this request belongs to another process", fix="submit requests in the process that loaded the model")
            event = self._events.get()
            if event is None:
                self._events.put(None)  # iterating again ends again
                if self.error is not None:
                    raise self.error
                return
            yield event

    def result(self, timeout_s: float | None = None) -> Result:
        """Waits for the end and returns all choices. Raises the request's error, Cancelled, or TimeoutError."""
        if os.getpid() != self._pid:
            raise EngineError("this request belongs to another process", fix="submit requests in the process that loaded the model")
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"request '{self.request_id}' has not ended after {timeout_s} s")
        if self.error is not None:
            raise self.error
        return Result(self._choices, self._prompt_logprobs, self.timings)

    def __enter__(self) -> RequestHandle:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.done:
            self.cancel()

    # the engine's side, in its thread -----------------------------------------------------------------------------------

    def deliver(self, event: TokenEvent) -> None:
        """Records an event and passes it on. Raises what `on_event` raises."""
        choice = self._choices[event.index]
        if event.token_id is not None:
            choice.token_ids.append(event.token_id)
            if event.logprob is not None:
                choice.logprobs.append(TokenLogprobs(event.token_id, event.logprob, event.top_logprobs or ()))
        if event.prompt_logprobs is not None:
            self._prompt_logprobs = event.prompt_logprobs
        choice.finish_reason = event.finish_reason
        if self._on_event is None:
            self._events.put(event)
        else:
            self._on_event(self, event)

    def finish(self, error: FastLLMError | None, timings: Timings) -> None:
        """Marks the end; `on_event` is called with None, and its exceptions are of no more use to anybody."""
        self.error, self.timings = error, timings
        try:
            self._events.put(None)
        finally:
            self._ended.set()
        if self._on_event is not None:
            try:
                self._on_event(self, None)
            except BaseException as failure:
                if self.error is None:
                    self.error = EngineError(f"request '{self.request_id}': on_event raised {type(failure).__name__}: {failure}")

    def cancelled(self) -> Cancelled:
        """The error of a request that its owner cancelled."""
        return Cancelled(f"request '{self.request_id}' was cancelled")
