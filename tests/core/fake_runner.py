"""A model without arithmetic, for the tests of scheduler and engine: logits are a hash of the context *as the cache holds it*.

The fake stores every token at the slot it was given, and reads a row's context back through the block table it was given. A wrong
slot, a stale or foreign block, a missing copy or a wrong position therefore changes the logits. `next_logits` is the same model
without a cache: what a request must get when it runs alone. Below it, what the engine's tests share.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from fastllm.core import _kernels
from fastllm.core.engine import Engine
from fastllm.core.request import Request
from fastllm.core.sampling import BUILT_IN, SamplerState, SamplingParams, stream_id
from fastllm.core.step import StepBatch

VOCAB = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def next_logits(context: np.ndarray) -> np.ndarray:
    """Logits [VOCAB] after these tokens; context: i64 [n], token ids."""
    keyed = np.asarray(context, np.int64) * 100_003 + np.arange(len(context))
    seed = zlib.crc32(keyed.tobytes())
    mixed = (np.arange(1, VOCAB + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)) ** np.uint64(3)
    return ((mixed >> np.uint64(40)).astype(np.float32) / 2**24 * 6).astype(np.float32)


def alone(
    prompt: Sequence[int], params: SamplingParams, seed: int = 0, index: int = 0, end_ids: Sequence[int] = (), n_ctx: int = 10**9
) -> tuple[list[int], str]:
    """The tokens and finish reason of a request that runs alone, without engine, scheduler or cache."""
    full = params.merged_with(BUILT_IN)
    ends = () if full.ignore_eos else tuple(end_ids)
    state = SamplerState(full, list(prompt), seed, stream_id(0, index), ends)
    room = n_ctx - len(prompt)
    limit = room if full.max_tokens is None else min(full.max_tokens, room)
    context = list(prompt)
    while len(context) - len(prompt) < limit:
        ids, numbers = state.adjustments
        token = int(
            _kernels.sample(
                next_logits(np.array(context))[None],
                u=np.array([state.draw()]),
                temperature=np.array([full.temperature], np.float32),
                top_k=np.array([full.top_k], np.int32),
                top_p=np.array([full.top_p], np.float32),
                min_p=np.array([full.min_p], np.float32),
                adjust_start=np.array([0, len(ids)], np.int32),
                adjust_ids=ids,
                adjust_bias=np.ascontiguousarray(numbers[0]),
                adjust_repeat=np.ascontiguousarray(numbers[1]),
                adjust_sub=np.ascontiguousarray(numbers[2]),
            )[0]
        )
        context.append(token)
        state.append(token)
        if token in {*ends, *(full.stop_token_ids or ())}:
            return context[len(prompt) :], "stop"
    return context[len(prompt) :], "length"


class Output:
    """What `run` returns."""

    def __init__(self, ids: np.ndarray | None, logits: np.ndarray):
        self.ids, self.logits = ids, logits


class FakeRunner:
    """See the module. before: called with each batch before it runs (to fail, wait or count). poison: token ids after which a row's
    logits are NaN. stateful: logits come of a recurrent state in `state_slot` instead of the cache."""

    vocab_size = VOCAB

    def __init__(
        self,
        *,
        block_size: int = 4,
        num_blocks: int = 16,
        max_blocks: int = 16,
        max_tokens: int = 16,
        max_sequences: int = 4,
        max_rows: int = 6,
        before: Callable[[StepBatch], None] | None = None,
        poison: Sequence[int] = (),
        stateful: bool = False,
        num_snapshots: int = 0,
    ):
        self.block_size, self.num_blocks, self.max_blocks = block_size, num_blocks, max_blocks
        self.max_tokens, self.max_sequences, self.max_rows = max_tokens, max_sequences, max_rows
        self.before, self.poison, self.stateful = before, set(poison), stateful
        self.memory = np.full(num_blocks * block_size, -1, np.int64)  # token · 100,003 + position at every slot
        self.num_snapshots = num_snapshots
        self.states: dict[int, list[int]] = {}
        self.snapshots: dict[int, list[int]] = {}
        self.restored = 0
        self.steps = self.copies = 0
        self.touched: list[int] = []
        self.closed = False

    def run(self, batch: StepBatch) -> Output:
        """Checks the batch's shape, stores its tokens, and reads every row's context back."""
        if self.before is not None:
            self.before(batch)
        assert not self.closed
        self.steps += 1
        tokens, count, rows = batch.dims.T, batch.dims.S, batch.dims.R
        assert 1 <= tokens <= self.max_tokens
        assert 1 <= count <= min(self.max_sequences, tokens)
        assert rows <= self.max_rows
        assert batch.block_table.shape[1] <= self.max_blocks
        assert batch.block_table.flags.c_contiguous
        assert batch.query_start[0] == 0
        assert batch.query_start[-1] == tokens
        assert len(set(batch.slots.tolist())) == tokens, "two tokens of a step in one slot"
        assert len(set(batch.state_slot.tolist())) == count
        assert all(0 <= s < self.max_sequences for s in batch.state_slot)
        owner = np.repeat(np.arange(count), np.diff(batch.query_start))
        assert (np.diff(batch.query_start) > 0).all()
        last = batch.query_start[1:] - 1
        assert (batch.context_len == batch.positions[last] + 1).all()
        assert all(1 <= n <= c for n, c in zip(np.diff(batch.query_start), batch.context_len, strict=True))
        for table, length in zip(batch.block_table, batch.context_len, strict=True):
            assert not table[-(-int(length) // self.block_size) :].any(), "unused entries of the block table are 0"
        self.memory[batch.slots] = batch.ids.astype(np.int64) * 100_003 + batch.positions
        if self.stateful:
            self._move_states(batch)
        logits = np.zeros((rows, VOCAB), np.float32)
        for r, t in enumerate(batch.sample_rows):
            logits[r] = self._row(batch, int(owner[t]), int(t))
        sampler = batch.sampler() if callable(batch.sampler) else batch.sampler
        if sampler is None:
            return Output(None, logits)
        ids = sampler.choose(logits)
        return Output(ids, logits)

    def _row(self, batch: StepBatch, s: int, t: int) -> np.ndarray:
        where = np.arange(batch.positions[t] + 1)
        slots = batch.block_table[s][where // self.block_size] * self.block_size + where % self.block_size
        held = self.memory[slots]
        context = (held - where) // 100_003
        if self.stateful:
            context = np.array(self.states[int(batch.state_slot[s])], np.int64)[: len(where)]
        elif not ((held - where) % 100_003 == 0).all():
            context = np.array([-1])  # a token that was stored for another position
        if self.poison & set(context.tolist()):
            return np.full(VOCAB, np.nan, np.float32)
        return next_logits(context)

    def _move_states(self, batch: StepBatch) -> None:
        for s, slot in enumerate(batch.state_slot.tolist()):
            start, stop = batch.query_start[s], batch.query_start[s + 1]
            state = [] if batch.positions[start] == 0 else self.states[slot]
            assert len(state) == batch.positions[start], "a recurrent state that lacks tokens, or belongs to another sequence"
            self.states[slot] = state + batch.ids[start:stop].tolist()

    def copy_block(self, src: int, dst: int) -> None:
        """Copies the slots of a block."""
        self.copies += 1
        size = self.block_size
        self.memory[dst * size : (dst + 1) * size] = self.memory[src * size : (src + 1) * size]

    def touch_block(self, block: int) -> None:
        """Destroys what the block holds, and notes its number."""
        size = self.block_size
        self.memory[block * size : (block + 1) * size] = -1
        self.touched.append(block)

    def keep_state(self, slot: int, snapshot: int) -> None:
        """Copies a state to its snapshot."""
        assert 0 <= snapshot < self.num_snapshots
        assert len(self.states[slot]) % self.block_size == 0
        self.snapshots[snapshot] = self.states[slot]

    def restore_state(self, snapshot: int, slot: int) -> None:
        """Copies a snapshot to a slot."""
        self.restored += 1
        self.states[slot] = self.snapshots[snapshot]

    def close(self) -> None:
        """Marks it closed."""
        self.closed = True


def ask(prompt: list[int], *, end_ids=(), request_id="r", salt="", priority=0, **params) -> Request:
    """A greedy request of six tokens, unless asked otherwise."""
    return Request(prompt, SamplingParams(**{"temperature": 0.0, "max_tokens": 6, **params}), end_ids, request_id, salt, priority)


class Gate:
    """Holds the engine's thread before a step until it is opened, so that tests decide what happens meanwhile."""

    def __init__(self, runner: FakeRunner):
        self.entered, self.go = threading.Semaphore(0), threading.Semaphore(0)
        runner.before = self

    def __call__(self, batch) -> None:
        self.entered.release()
        assert self.go.acquire(timeout=30)

    def wait(self) -> None:
        """Until the thread stands before a step."""
        assert self.entered.acquire(timeout=30)

    def step(self, times: int = 1) -> None:
        """Lets steps run, each from its gate."""
        self.go.release(times)

    def open(self) -> None:
        self.go.release(1_000_000)


def all_free(engine: Engine) -> None:
    """After close: nobody holds a block or a place."""
    assert engine.stats().blocks_used == 0
    assert engine.stats().running == engine.stats().waiting == 0
    assert sorted(engine._scheduler._slots) == list(range(engine._scheduler.max_running))
    assert not engine._jobs
    assert engine._num_queued == 0
