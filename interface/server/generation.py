"""One HTTP request that generates: its prompts in the engine, its answers as text, its writer that words them.

    engine's thread ─ bridge → take(event) → Answer.feed: text that is certain → writer.piece → bytes → Outbox → client

Everything here runs on the event loop; only `Generation._on_event` is called in the engine's thread, and puts into the bridge. A stage
between text and writer (tool calls, reasoning) belongs into `Answer.feed`; constraints on tokens into `Prepared` and `submit`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ..core.errors import Cancelled, EngineError, FastLLMError, InvalidRequest, InvalidSchema, QueueFull, Unavailable
from ..core.request import Request, RequestHandle, Timings, TokenConstraint, TokenEvent
from ..core.sampling import effective_seed, stream_id
from ..text import Tokenizer
from ..text.output import OutputParser
from .answer import Answer, Due
from .answers import describe
from .prepare import Prepared
from .tools import OutputSpec, kept_ids, make_parser

if TYPE_CHECKING:
    from .runtime import Runtime
    from .sse import Frames, Outbox

__all__ = ["Generation", "Usage", "Writer"]


@dataclass(frozen=True)
class Usage:
    """Tokens and times of a whole request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timings: Timings
    reasoning_tokens: int = 0

    def openai(self) -> dict[str, Any]:
        """`usage` of chat and completions."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }

    def llama(self) -> dict[str, Any]:
        """`timings` under llama.cpp's names."""
        t, computed = self.timings, self.prompt_tokens - self.cached_tokens
        decoded = max(self.completion_tokens - 1, 0)  # the first token comes with the prompt
        return {
            "cache_n": self.cached_tokens,
            "prompt_n": computed,
            "prompt_ms": round(t.prompt_s * 1e3, 3),
            "prompt_per_second": round(computed / t.prompt_s, 3) if t.prompt_s > 0 else 0.0,
            "predicted_n": self.completion_tokens,
            "predicted_ms": round(t.decode_s * 1e3, 3),
            "predicted_per_second": round(decoded / t.decode_s, 3) if t.decode_s > 0 else 0.0,
        }


class Writer(Protocol):
    """Words answers for one interface. A stream sends the bytes that the methods return; else `body` is sent at the end."""

    def start(self) -> bytes:
        """Sent at admission."""

    plain: dict[int, Frames]
    """Answers (by index) that have begun and whose frames differ in their text only: `piece` of each text, in one go."""

    def piece(self, answer: Answer, text: str, logprobs: list[Due]) -> bytes:
        """Text of an answer that is certain now (may be "" with the first token), and the log-probabilities of its tokens."""

    def progress(self, told: dict[str, Any]) -> bytes:
        """How much of a prompt has been read; only of a stream that asked."""

    def finish(self, answer: Answer) -> bytes:
        """An answer has ended; `answer.finish_reason` says why."""

    def end(self, usage: Usage) -> bytes:
        """All answers have ended."""

    def error(self, error: FastLLMError) -> bytes:
        """The last frame of a stream that failed."""

    def body(self, usage: Usage) -> dict[str, Any]:
        """The whole answer."""


class Generation:
    """The prompts of one request in the engine. `submit` first; then events come by themselves until `done`.

    outbox: takes the bytes of a stream; None: not streamed. answers: prompt by prompt, choice by choice. writer: set before `submit`.
    """

    writer: Writer
    window: int | None = None  # prompts that are in the engine at the same time; None: all of them

    def __init__(self, runtime: Runtime, ready: Prepared, request_id: str, outbox: Outbox | None):
        self.ready, self.request_id, self.outbox = ready, request_id, outbox
        self.tokenizer: Tokenizer = runtime.model.tokenizer
        self._runtime = runtime
        self._send = None if outbox is None else outbox.write
        merged = ready.params.merged_with(runtime.defaults)
        self.seed = effective_seed(merged)
        self.params = replace(merged, seed=self.seed)
        self.n = self.params.n or 1
        self._spec = None if ready.output is None else OutputSpec(**ready.output)
        self.kept_ids = frozenset() if self._spec is None else kept_ids(self.tokenizer, self._spec)
        self.constraint: Callable[[], TokenConstraint] | None = None  # set before `submit`
        self.answers = [Answer(self, p, c, p * self.n + c) for p in range(len(ready.prompts)) for c in range(self.n)]
        self._handles: list[RequestHandle] = []
        self._timings: dict[int, Timings] = {}  # prompt -> of the event that is being written
        self._left = len(ready.prompts)
        self._end_ids = sorted(set(self.tokenizer.end_ids))
        self.error: FastLLMError | None = None
        self._gone = False  # nobody reads what is sent
        self.done = asyncio.Event()
        self.submitted_at = time.monotonic()

    @property
    def cancelled(self) -> bool:
        """It ended because the client has gone, or by /v1/cancel."""
        return isinstance(self.error, Cancelled)

    def make_parser(self) -> OutputParser | None:
        """What takes an answer's text apart; None: it is content, all of it."""
        return None if self._spec is None else make_parser(self._spec)

    @property
    def one_call(self) -> bool:
        """The first tool call ends the answer."""
        return self._spec is not None and self._spec.one

    def submit(self) -> None:
        """Hands all prompts to the engine, or none. Raises QueueFull, InvalidRequest, ContextOverflow, EngineError."""
        engine = self._runtime.model.engine
        count = len(self.ready.prompts)
        if self.window is not None:
            count = min(count, self.window, engine.max_queue)
        if count > engine.max_queue:  # at once: prompts that are submitted in vain would keep others out
            raise InvalidRequest(
                f"{count} texts in one request; the queue of this server holds {engine.max_queue}",
                who="prompt",
                fix="send fewer, or start the server with a larger --max-queue",
                param="prompt",
            )
        try:
            for _ in range(count):
                self._submit_next()
        except BaseException:
            self._gone = True
            for handle in self._handles:
                handle.cancel()
            raise
        if self.outbox is not None:
            self.outbox.write(self.writer.start())
            self.outbox.pause, self.outbox.resume = self.pause, self.resume

    def _submit_next(self) -> None:
        """The first prompt that is not in the engine yet."""
        number = len(self._handles)
        request = self.request(number, self.ready.prompts[number], self._end_ids)
        self._handles.append(self._runtime.model.engine.submit(request, self._on_event(number)))

    def _submit_more(self) -> None:
        """What the window has room for; if the queue is full, the next second tries again."""
        try:
            running = sum(not handle.done for handle in self._handles)
            while len(self._handles) < len(self.ready.prompts) and running < (self.window or 0):
                self._submit_next()
                running += 1
        except QueueFull:
            pass

    def request(self, number: int, prompt: Any, end_ids: list[int]) -> Request:
        """What the engine is asked for a prompt (i32 [n])."""
        stream = stream_id(number, 0)
        progress = self._on_progress(number) if self.ready.progress else None
        return Request(
            prompt,
            self.params,
            end_ids,
            self.request_id,
            self.ready.salt,
            stream=stream,
            constraint=self.constraint,
            live_timings=self.ready.per_token,
            on_progress=progress,
        )

    def _on_progress(self, number: int) -> Callable[[int, int], None]:
        """For the engine's thread."""
        put, take = self._runtime.bridge.put, self._take_progress
        return lambda done, cached: put(take, number, done, cached, time.monotonic())

    def _take_progress(self, number: int, done: int, cached: int, at: float) -> None:
        """On the loop: so much of a prompt had been read then."""
        if not self.done.is_set() and self._send is not None:
            time_ms = round((at - self.submitted_at) * 1e3, 3)
            told = {"total": len(self.ready.prompts[number]), "cache": cached, "processed": done, "time_ms": time_ms}
            self._send(self.writer.progress({"index": number, **told} if len(self.ready.prompts) > 1 else told))

    def _on_event(self, number: int) -> Callable[[RequestHandle, TokenEvent | None], None]:
        """For the engine's thread."""
        put, now = self._runtime.bridge.line(partial(self._take, number)).put, time.monotonic
        begun: set[int] = set()

        def on_event(handle: RequestHandle, event: TokenEvent | None) -> None:
            if event is not None and event.finish_reason is None and event.index in begun:
                put((event, now(), handle.timings), urgent=False)
            else:
                if event is not None:
                    begun.add(event.index)
                put((event, now(), handle.timings))

        return on_event

    def _take(self, number: int, events: deque[tuple[TokenEvent | None, float, Timings]]) -> None:
        """On the loop: what has come of a prompt, in order; its end is None. Of each when it happened, and the handle's timings then (by now it may be
        steps ahead). Tokens that are nothing but text are worked on together: there is a handful of them in each wake-up."""
        plain, itl, first = self.writer.plain, self._runtime.metrics.itl, number * self.n
        texts: dict[Answer, list[int]] = {}  # token ids that wait to become text
        try:
            while events and not self.done.is_set():
                event, at, timings = events.popleft()
                answer = self.answers[first if event is None else first + event.index]
                if event is not None and event.finish_reason is None and answer.plain and answer.index in plain and event.token_id is not None:
                    itl(at - answer.last_token_at)
                    answer.last_token_at = at
                    texts.setdefault(answer, []).append(event.token_id)
                    continue
                self._feed_all(texts)
                self._timings[number] = timings
                if event is None:
                    self._end_prompt(self._handles[number])
                elif answer.finish_reason is None:
                    self._feed(answer, self._handles[number], event, at)
            self._feed_all(texts)
        except Exception as error:  # a defect here must not reach the other requests of the same wake-up
            self.fail(EngineError(f"request '{self.request_id}': {describe(error)}"))

    def _feed_all(self, texts: dict[Answer, list[int]]) -> None:
        """Tokens of answers that have a `plain` way; takes them out of the dictionary."""
        for answer, token_ids in texts.items():
            if (certain := answer.feed_all(token_ids)) and self._send is not None:
                self._send(self.writer.plain[answer.index](certain))
        texts.clear()

    def _feed(self, answer: Answer, handle: RequestHandle, event: TokenEvent, at: float) -> None:
        if event.token_id is not None:
            if answer.num_tokens:
                self._runtime.metrics.itl(at - answer.last_token_at)
            answer.last_token_at = at
        first = answer.num_tokens == 0
        if answer.parser is not None and event.token_id is not None:
            answer.reasoning_tokens += answer.parser.in_reasoning
        text, logprobs = answer.feed(event)
        frames = self.writer.piece(answer, text, logprobs) if text or logprobs or first else b""
        if answer.parser is not None and self.one_call and answer.parser.num_calls and answer.finish_reason is None:
            answer.finish_reason = "stop"
        if answer.finish_reason is not None:
            frames += self.writer.finish(answer)
            if event.finish_reason is None:  # a stop text, or the one call: the engine does not know that it is over
                handle.cancel(event.index)
        if frames and self._send is not None:
            self._send(frames)

    def _end_prompt(self, handle: RequestHandle) -> None:
        if handle.error is not None:
            self.fail(self.error or self._named(handle.error))
            return
        self._left -= 1
        if len(self._handles) < len(self.ready.prompts):
            self._submit_more()
        if self._left == 0:
            usage = self.usage()
            if self._send is not None:
                self._send(self.writer.end(usage))
            self._finish()

    def _named(self, error: FastLLMError) -> FastLLMError:
        """With the field of the grammar that could not be followed any more, which the engine does not know."""
        if not isinstance(error, InvalidSchema) or self.ready.constraint is None or "param" in error.fields:
            return error
        param = self.ready.constraint["param"]
        why = f": {error.why}" if error.why else ""  # a client is told the message only
        return InvalidSchema(f"{param}: {error.message}{why}", who=param, fix=error.fix, param=param)

    def fail(self, error: FastLLMError) -> None:
        """Ends the request with an error, which a stream sends as its last frame."""
        if self.done.is_set():
            return
        self.error = error
        self._cancel()
        if self._send is not None and not self._gone:
            self._send(self.writer.error(error))
        self._finish()

    def _finish(self) -> None:
        self.done.set()
        if self.outbox is not None:
            self.outbox.end()

    def cancel(self) -> None:
        """The client has gone: everything of it leaves the engine by the end of the step that runs."""
        if not self.done.is_set():
            self._gone = True
            self.fail(Cancelled(f"request '{self.request_id}' was cancelled"))

    def _cancel(self) -> None:
        for handle in self._handles:
            handle.cancel()

    def pause(self) -> None:
        """The client does not read: its sequences give their places and blocks back until `resume`."""
        for handle in self._handles:
            handle.pause()

    def resume(self) -> None:
        """The client reads again."""
        for handle in self._handles:
            handle.resume()

    def tick(self, now: float) -> None:
        """Once a second: the time that a request may wait in the queue."""
        if self.window is not None and not self.done.is_set():
            self._submit_more()
        limit = self._runtime.settings.queue_timeout_s
        waits = any(handle.waiting for handle in self._handles)
        if limit is not None and waits and now - self.submitted_at > limit:
            self.fail(
                Unavailable(f"the request has waited for {limit:g} s", fix="try again later", retry_after_s=max(1, min(60, round(limit))))
            )

    def state(self) -> str:
        """queued, running, paused or done."""
        if self.done.is_set():
            return "done"
        if self.outbox is not None and self.outbox.paused_at is not None:
            return "paused"
        return "queued" if all(handle.waiting for handle in self._handles) else "running"

    def usage(self) -> Usage:
        """Tokens and times; final once it is done."""
        timings = [handle.timings if self.done.is_set() else self._timings.get(i, handle.timings) for i, handle in enumerate(self._handles)]
        return Usage(
            prompt_tokens=sum(len(p) for p in self.ready.prompts),
            completion_tokens=sum(answer.num_tokens for answer in self.answers),
            cached_tokens=sum(t.cached_tokens for t in timings),
            timings=max(timings, key=lambda t: t.ttft_s + t.decode_s, default=Timings()),
            reasoning_tokens=sum(answer.reasoning_tokens for answer in self.answers),
        )
