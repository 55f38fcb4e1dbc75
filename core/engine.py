"""The engine: one thread that steps a model for everybody who submits requests.

`submit` may be called from any thread and only puts the request in an inbox; the engine's thread alone touches the scheduler, the
cache and the executor, so none of them has a lock. A step is: take the inbox, schedule, run, take the inbox again (a cancel that
arrived meanwhile frees its blocks now), then hand out tokens. Without work the thread sleeps on a condition.

What fails, fails alone: a bad request at `submit`, non-finite logits or an exception of `on_event` with that request, an exception
of a step, of whatever class, with the requests of that step. The third failed step in a row makes the engine unhealthy: everything fails, and nothing
more is taken, so that a supervisor can start it anew.

A token is a function of the logits and of u = uniform(seed, stream, position): the same request gives the same tokens whatever
shares the batch, however its prompt is cut, found or computed again.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from ._steps import listed
from .embedding import POOLINGS, EmbeddingRunner
from .errors import Cancelled, EngineError, FastLLMError, InvalidRequest, OutOfMemory, QueueFull, UsageError
from .held import HeldRows
from .job import Job, JobChoice, NotFinite
from .kv_cache import BlockManager
from .pace import Pace
from .request import Request, RequestHandle, TokenEvent, check_request
from .runner import StepRunner
from .sampling import BUILT_IN, SamplerState, SamplingParams, build_rows, effective_seed, move_rows
from .scheduler import ScheduledStep, Scheduler, Slice
from .stats import EngineStats
from .step import SamplerRows

__all__ = ["Engine"]

FAILURES_IN_A_ROW: Final = 3
PACED: Final = 4  # of steps that repeat the one before, every fourth tells what decodes cost
EXIT_WAIT_S: Final = 5.0  # at the interpreter's exit: how long a step that runs may still take


class Engine:
    """Runs requests on a StepRunner, which it owns from here on: `close` closes it.

    policy: `fcfs` or `shortest-remaining`. max_queue: requests that may wait. max_context: tokens of the longest sequence, at most
    what runner and cache hold (the default). prefix_cache: find prompts again. stateful: the model keeps recurrent state outside the blocks, so
    a prompt is found again, also by the other choices of its request, as far as the runner has room for snapshots of that state. A context manager.
    """

    def __init__(
        self,
        runner: StepRunner,
        *,
        policy: str = "fcfs",
        max_queue: int = 256,
        max_context: int | None = None,
        prefix_cache: bool = True,
        stateful: bool = False,
    ):
        """Starts the thread. Raises UsageError for options that do not fit, EngineError if no thread can be started."""
        room = min(runner.max_blocks, runner.num_blocks) * runner.block_size
        self.max_context = room if max_context is None else max_context
        if not 1 <= self.max_context <= room:
            raise UsageError(f"a context of {max_context} tokens; the cache was planned for 1 to {room}", fix=f"--ctx {room}")
        if max_queue < 1:
            raise UsageError(f"a queue of {max_queue} requests; it must hold at least 1", fix="max_queue=256")
        self.max_queue, self.stateful, self._runner = max_queue, stateful, runner
        self.embeds = isinstance(runner, EmbeddingRunner)
        self._vocab_size = runner.vocab_size  # `submit` must be able to refuse after the runner is closed
        self._blocks = BlockManager(runner.num_blocks, runner.block_size, prefix_cache=prefix_cache, num_snapshots=runner.num_snapshots if stateful else None)
        limits = {"max_tokens": runner.max_tokens, "max_sequences": runner.max_sequences, "max_rows": runner.max_rows}
        self._scheduler = Scheduler(self._blocks, max_blocks=runner.max_blocks, policy=policy, **limits)
        self._pace = Pace()
        self._scheduler.prompt_budget = self._pace.prompt_budget
        self._numbers = itertools.count()
        self._wake = threading.Condition()  # guards the next four
        self._inbox: list[tuple[Any, ...]] = []  # (job,), (handle, index) to cancel or (handle, None, paused), in order
        self._num_queued = 0  # requests submitted and not yet started
        self._closing = False
        self._broken: EngineError | None = None
        self._jobs: dict[RequestHandle, Job] = {}
        self._failures = 0
        self._steps = self._computed = self._generated = 0
        self._finished = self._failed = self._cancelled = 0
        self._request_s = 1.0  # how long a request takes, a running mean
        self._progress_at = time.monotonic()
        self._close_error: Exception | None = None
        self.on_step: Callable[[int, float], None] | None = None  # told tokens and seconds of each step, in the engine's thread; must not raise
        # Whoever collects events is told once for all of a step, when the thread is about to compute or to sleep, without Python's lock: sooner, it would take
        # the lock away. Told: seconds until about the next time; None: that is not known, for nobody decodes. In the engine's thread; must not raise.
        self.on_handed_out: Callable[[float | None], None] | None = None
        self._step_s = 0.0  # of the last step
        self._held = HeldRows(self._vocab_size, self._fail_job, self._waited)  # the next seven: of the step that runs
        self._decodes = self._num_tokens = self._num_rows = 0
        self._touches = False  # there may be a block of the cache to touch
        self._states: list[SamplerState] = []
        self._sampler_rows = build_rows([], self._vocab_size)
        self.on_masks: Callable[[float], None] | None = None  # seconds that a step waited for the masks of its rows
        self._greedy = SamplerState(SamplingParams(temperature=0.0, top_p=1.0), (), 0)
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._loop, name="fastllm-engine", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise EngineError(f"the engine's thread cannot start: {error}", fix="raise the limits of processes and memory (ulimit -u, -v)") from error
        atexit.register(self._at_exit)

    # any thread -------------------------------------------------------------------------------------------------------

    def submit(
        self, request: Request, on_event: Callable[[RequestHandle, TokenEvent | None], None] | None = None
    ) -> RequestHandle:
        """Queues a request and returns its handle.

        on_event: called in the engine's thread with (handle, event) for every event and with (handle, None) at the end, instead of
        the handle's iterator; it must not block, and what it raises fails the request. Raises InvalidRequest, ContextOverflow,
        QueueFull (retry_after_s), or EngineError if the engine is closed or unhealthy.
        """
        if os.getpid() != self._pid:
            raise EngineError(
                "this engine belongs to another process: its thread does not survive a fork",
                fix="load the model in the process that uses it, or start processes with the method 'spawn'",
            )
        prompt = check_request(request, self._vocab_size, self.max_context)
        if (request.pooling is not None) != self.embeds or request.pooling not in (None, *POOLINGS):
            what = f"embeds texts, and generates none (pooling: {', '.join(POOLINGS)})" if self.embeds else "generates, and embeds no texts"
            raise InvalidRequest(f"this engine {what}", who="pooling", fix="load the model the other way")
        params = request.params.merged_with(BUILT_IN)
        if request.pooling is not None and (params.max_tokens != 0 or params.n != 1):
            raise InvalidRequest("a text that is embedded has no answer: max_tokens must be 0 and n 1", who="pooling", fix="max_tokens=0, n=1")
        handle = RequestHandle(request, params, effective_seed(params), self._ask_cancel, on_event, self._ask_pause)
        job = Job(handle, prompt, self.max_context - len(prompt), self._vocab_size, next(self._numbers))
        with self._wake:
            if self._broken is not None:
                raise _again(self._broken, f"the engine is unhealthy: {self._broken.message}")
            if self._closing:
                raise EngineError("the engine is closed")
            if self._num_queued >= self.max_queue:
                wait_s = self._request_s * self._num_queued / self._scheduler.max_running
                raise QueueFull(
                    f"{self._num_queued} requests wait; the queue holds {self.max_queue}",
                    fix="try again later, or allow a longer max_queue",
                    retry_after_s=min(max(round(wait_s), 1), 60),
                )
            self._num_queued += 1
            self._inbox.append((job,))
            self._wake.notify()
        return handle

    def _ask_cancel(self, handle: RequestHandle, index: int | None) -> None:
        if os.getpid() == self._pid:
            with self._wake:
                if not self._closing:
                    self._inbox.append((handle, index))
                    self._wake.notify()

    def _ask_pause(self, handle: RequestHandle, paused: bool) -> None:
        if os.getpid() == self._pid:
            with self._wake:
                if not self._closing:
                    self._inbox.append((handle, None, paused))
                    self._wake.notify()

    @property
    def num_queued(self) -> int:
        """Requests that wait; `max_queue` may."""
        return self._num_queued

    @property
    def healthy(self) -> bool:
        """False after three failed steps in a row, or if the thread ended by a defect."""
        return self._broken is None

    def stats(self) -> EngineStats:
        """A snapshot of what runs and what has been done. Takes no lock: numbers may be one step apart."""
        scheduler, blocks = self._scheduler, self._blocks
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        return EngineStats(
            running=running,
            waiting=waiting + sum(len(item) == 1 for item in tuple(self._inbox)),
            blocks_used=blocks.num_used,
            blocks_cached=blocks.num_cached,
            blocks_total=blocks.num_blocks,
            prefix_hit_tokens=blocks.hit_tokens,
            prefix_looked_up_tokens=blocks.looked_up_tokens,
            tokens_computed=self._computed,
            tokens_generated=self._generated,
            preemptions=scheduler.num_preemptions,
            steps=self._steps,
            requests_finished=self._finished,
            requests_failed=self._failed,
            requests_cancelled=self._cancelled,
            stalled_s=time.monotonic() - self._progress_at if running or waiting else 0.0,
            healthy=self.healthy,
        )

    def close(self) -> None:
        """Cancels what runs and waits, ends the thread and closes the runner. May be called twice, and from `on_event`. Raises a
        FastLLMError if closing the runner failed."""
        if os.getpid() != self._pid:
            return  # a forked child has neither the thread nor a right to the parent's memory
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is self._thread:
            return  # the thread ends after this step
        self._thread.join()
        atexit.unregister(self._at_exit)
        error, self._close_error = self._close_error, None
        if error is not None:
            raise error

    def _at_exit(self) -> None:
        if os.getpid() == self._pid:
            with self._wake:
                self._closing = True
                self._wake.notify()
            self._thread.join(EXIT_WAIT_S)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # the engine's thread ------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        defect: BaseException | None = None
        try:
            while not self._closing:
                if self._inbox:
                    self._take_inbox()
                step = self._scheduler.schedule()
                if step is None:
                    self._wait()
                else:
                    self._step(step)
        except BaseException as error:  # whatever it is, nobody may wait for ever
            defect = error
        self._end(defect)

    def _wait(self) -> None:
        """Sleeps until there is work, or `close` is called."""
        if self._jobs and not self._scheduler.parked:  # never to happen; an error is better than a thread that spins and callers that wait
            raise EngineError(f"{len(self._jobs)} requests are left, but no sequence of theirs waits or runs")
        self._announce()
        self._held.end()
        with self._wake:
            while not self._inbox and not self._closing:
                self._wake.wait()
        self._progress_at = time.monotonic()

    def _announce(self) -> None:
        """Nothing more is handed out for a while: see `on_handed_out`."""
        if self.on_handed_out is not None:
            self.on_handed_out(None)

    def _take_inbox(self) -> None:
        with self._wake:
            items, self._inbox = self._inbox, []
        for item in items:
            if len(item) == 1:
                self._admit(item[0])
            elif (job := self._jobs.get(item[0])) is None:
                continue
            elif len(item) == 2:
                self._cancel(job, item[1])
            else:
                for choice in job.choices:
                    (self._scheduler.park if item[2] else self._scheduler.unpark)(choice.sequence)

    def _admit(self, job: Job) -> None:
        self._jobs[job.handle] = job
        first, *others = [choice.sequence for choice in job.choices]
        first.siblings = others
        self._scheduler.add(first)

    def _cancel(self, job: Job, index: int | None) -> None:
        if index is None:
            self._cancelled += 1
            self._end_job(job, job.handle.cancelled())
        elif 0 <= index < len(job.choices) and not job.choices[index].finished:
            choice = job.choices[index]
            for other in job.choices:
                if choice.sequence in other.sequence.siblings:
                    other.sequence.siblings.remove(choice.sequence)
            self._emit(choice, TokenEvent(None, index, "cancelled"))

    def _step(self, step: ScheduledStep) -> None:
        now = time.monotonic()
        batch = step.batch
        if step.fresh:
            self._begin(step, now)
        try:
            for source, target in step.copies:
                self._runner.copy_block(source, target)
            for snapshot, sequence in step.restores:
                self._runner.restore_state(snapshot, sequence.slot)
            if self._touches:
                # a block ahead for each sequence, one a step: those that began together begin their next blocks together
                ahead = self._blocks.next_unwritten(len(self._scheduler.running))
                if ahead is not None:
                    self._runner.touch_block(ahead)
                self._touches = ahead is not None
            if self.on_handed_out is not None:
                self.on_handed_out(self._step_s if self._decodes else None)
            result = self._runner.run(batch)
            ids = [] if result.ids is None else listed(result.ids)
            if len(ids) != self._num_rows:
                raise EngineError(f"a step sampled {self._num_rows} rows and the executor returned {len(ids)} ids")
        except BaseException as error:  # no signal is raised in this thread: also an exit is the backend's, and the matter of this step
            self._step_failed(step, error)
            return
        self._steps += 1
        num_tokens = self._num_tokens
        self._computed += num_tokens
        self._progress_at = time.monotonic()
        self._step_s = self._progress_at - now
        if step.fresh or self._steps % PACED == 0:
            self._pace.observe(self._decodes, num_tokens - self._decodes, self._step_s)
        if self.on_step is not None:
            self.on_step(num_tokens, self._step_s)
        if self._inbox:
            self._take_inbox()
        kept = self._scheduler.advance(step)
        if kept and not self._keep_states(step, kept):
            return
        self._failures = 0
        for part in step.slices:
            choice = part.sequence.owner
            if choice.index == 0 and choice.num_generated == 0 and choice.job.handle.request.on_progress is not None:
                self._tell_progress(choice, part)
            if choice.finished or not part.num_rows or part.sequence.blocks is None:
                continue  # without blocks: parked meanwhile; it computes this row again, and draws the same token
            try:
                event = choice.job.take(choice, part, ids, result, self._progress_at)
                if event is not None:
                    self._generated += event.token_id is not None
                    self._emit(choice, event)
                    if choice.complete and not choice.finished:
                        self._emit(choice, TokenEvent(None, choice.index, "stop"))
            except BaseException as error:  # not finite, or too little memory for log-probabilities, a panic of its constraint: this request's matter
                self._fail_job(choice.job, error)

    def _keep_states(self, step: ScheduledStep, kept: list[tuple[int, int]]) -> bool:
        """Copies states to their snapshots. False where that failed, and the step's requests with it: what is kept must be what it is found as."""
        try:
            for slot, snapshot in kept:
                self._runner.keep_state(slot, snapshot)
        except BaseException as error:  # as above
            for part in step.slices:
                if part.sequence.blocks is not None:
                    self._blocks.forget(part.sequence.blocks)
            self._step_failed(step, error)
            return False
        return True

    def _begin(self, step: ScheduledStep, now: float) -> None:
        """What the steps that follow this one with the same sequences have in common."""
        batch = step.batch
        for part in step.slices:
            job = part.sequence.owner.job
            if job.started_at is None:
                job.started_at = now
                job.handle.started = True
                with self._wake:
                    self._num_queued -= 1
                self._tell_start(part.sequence.owner)
        self._decodes = sum(part.num_tokens == 1 and part.sequence.decodes for part in step.slices)  # not the last token of a prompt
        self._num_tokens, self._num_rows, self._touches = batch.dims.T, batch.dims.R, self._decodes > 0
        self._held.begin(step)
        self._states = self._sampler_states(step)
        batch.sampler = lambda: self._rows(step)

    def _rows(self, step: ScheduledStep) -> SamplerRows:
        """The sampler's arrays, asked for when the step's logits are there."""
        if step.fresh or not move_rows(self._sampler_rows, self._states):
            self._sampler_rows = build_rows(self._states, self._vocab_size)
            self._sampler_rows.holds = self._held if self._held.rows else None
        return self._sampler_rows

    def _tell_start(self, choice: JobChoice) -> None:
        """What of a prompt the cache has. An error here would end a request whose step is made already: it is raised again after the step."""
        tell, cached = choice.job.handle.request.on_progress, max(choice.sequence.num_cached, 0)
        if tell is not None:
            with contextlib.suppress(Exception):
                tell(cached, cached)

    def _tell_progress(self, choice: JobChoice, part: Slice) -> None:
        """How far a prompt has been read. What the callback raises fails its request."""
        tell = choice.job.handle.request.on_progress
        assert tell is not None
        try:
            tell(min(part.start + part.num_tokens, len(choice.job.prompt)), max(choice.sequence.num_cached, 0))
        except Exception as error:
            self._fail_job(choice.job, error)

    def _sampler_states(self, step: ScheduledStep) -> list[SamplerState]:
        """One for each row of logits; rows of a prompt whose ids nobody wants are sampled greedily."""
        states = []
        for part in step.slices:
            if part.num_rows:
                states += [self._greedy] * (part.num_rows - part.samples)
                if part.samples:
                    states.append(part.sequence.owner.sampler)
        return states

    def _waited(self, seconds: float) -> None:
        if self.on_masks is not None:
            self.on_masks(seconds)

    def _emit(self, choice: JobChoice, event: TokenEvent) -> None:
        """Passes an event on, and ends the choice with its last. What `on_event` raises fails the request."""
        job = choice.job
        if event.finish_reason is not None or job.handle.request.live_timings:
            job.handle.timings = job.timings()
        try:
            job.handle.deliver(event)
        except BaseException as error:  # also SystemExit and asyncio's CancelledError: the callback's matter, not the engine's
            self._fail_job(job, error)
            return
        if event.finish_reason is not None:
            self._finish_choice(choice)

    def _finish_choice(self, choice: JobChoice) -> None:
        choice.finished = True
        self._scheduler.remove(choice.sequence)
        if choice.job.finished:
            self._finished += 1
            self._end_job(choice.job, None)

    # ends -------------------------------------------------------------------------------------------------------------

    def _end_job(self, job: Job, error: FastLLMError | None) -> None:
        if self._jobs.pop(job.handle, None) is None:
            return
        for choice in job.choices:
            choice.finished, choice.sequence.siblings = True, []
        for choice in job.choices:
            self._scheduler.remove(choice.sequence)
        if job.started_at is None:
            with self._wake:
                self._num_queued -= 1
        else:
            self._request_s += 0.1 * (time.monotonic() - job.started_at - self._request_s)
        job.handle.finish(error, job.timings())

    def _fail_job(self, job: Job, error: BaseException) -> None:
        self._failed += job.handle in self._jobs
        if isinstance(error, NotFinite):
            for choice in job.choices:
                if choice.sequence.blocks is not None:
                    self._blocks.forget(choice.sequence.blocks)
        if not isinstance(error, FastLLMError):
            error = _typed(error, f"request '{job.handle.request_id}' failed: {_told(error)}")
        self._end_job(job, error)

    def _step_failed(self, step: ScheduledStep, error: BaseException) -> None:
        """Fails the step's requests; the third time in a row, all requests."""
        self._failures += 1
        self._progress_at = time.monotonic()
        known = isinstance(error, FastLLMError)
        text = _told(error)
        base = error if isinstance(error, FastLLMError) else _typed(error, text)
        failed = [*(part.sequence for part in step.slices), *(sequence for _, sequence in step.restores)]  # a state that was not put back is lost
        for job in {sequence.owner.job: None for sequence in failed}:
            failure = _again(base, f"request '{job.handle.request_id}': a step failed: {text}")
            failure.__cause__ = error.__cause__ if known else error
            self._fail_job(job, failure)
        if self._failures >= FAILURES_IN_A_ROW:
            broken = EngineError(f"{self._failures} steps in a row failed, the last by: {text}", fix="start the model again")
            with self._wake:
                self._broken = broken
            self._take_inbox()
            for job in tuple(self._jobs.values()):
                self._fail_job(job, _again(broken, f"request '{job.handle.request_id}': {broken.message}"))

    def _end(self, defect: BaseException | None) -> None:
        """The end of the thread: nobody waits for ever, and the runner's memory is returned."""
        with self._wake:
            self._closing = True
            if defect is not None:
                self._broken = EngineError(f"the engine ended by a defect: {_told(defect)}")
                self._broken.__cause__ = defect
            items, self._inbox = self._inbox, []
        for item in items:
            if len(item) == 1:
                self._jobs[item[0].handle] = item[0]
        for job in tuple(self._jobs.values()):
            name = job.handle.request_id
            try:
                if self._broken is not None:
                    self._fail_job(job, _again(self._broken, f"request '{name}': {self._broken.message}"))
                else:
                    self._cancelled += 1
                    self._end_job(job, Cancelled(f"request '{name}' was cancelled: the engine was closed"))
            except BaseException as error:  # a scheduler that a defect left in disorder, no memory for a message: the others go on
                job.handle.finish(_typed(error, f"request '{name}': the engine ended"), job.handle.timings)
        self._announce()
        try:
            self._runner.close()
        except BaseException as error:  # as of a step
            self._close_error = error if isinstance(error, FastLLMError) else _typed(error, f"closing the model failed: {_told(error)}")


def _told(error: BaseException) -> str:
    """An exception in a message: of ours its sentence, else kind and text; and the op and device where a step failed."""
    kind = "" if isinstance(error, FastLLMError) else type(error).__name__
    where = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return ": ".join(filter(None, (kind, str(error)))) + where


def _typed(error: BaseException, message: str) -> FastLLMError:
    """An exception that is not ours, as one of ours: OutOfMemory where Python or numpy found no memory, else EngineError."""
    failure: FastLLMError = EngineError(message)
    if isinstance(error, MemoryError):
        failure = OutOfMemory(message, fix="free memory, or raise the limit (ulimit -v, the control group)", kind="host")
    failure.__cause__ = error
    return failure


def _again(error: FastLLMError, message: str) -> Any:
    """The same kind of error with another message: an exception object is raised in one thread only."""
    copy = type(error)(message, who=error.who, why=error.why, fix=error.fix, **error.fields)
    copy.__cause__ = error.__cause__
    return copy
