"""The scheduler: which sequences run in the next step, how many tokens of each, and where their keys and values go.

A sequence is waiting → running → finished, and back to waiting if it is preempted. One rule makes all of it simple: a sequence is
`num_tokens` known tokens of which `num_computed` are in the cache. A decode is a sequence with one token left to compute, a prompt
is one with many, a preempted sequence is one whose `num_computed` fell to 0: it is computed again like a prompt, and since a row's
result depends on that row only, it goes on with the very tokens it would have had.

    admit      the head of the queue, while a place is free and the cache has room for all its known tokens
    share      one token to every sequence that decodes (streams never stall), the rest of the budget to prompts, in chunks
    reserve    blocks in order of rank (priority, then age); without room, the youngest running sequence is preempted
    build      the arrays of the StepBatch, in memory that is allocated once

A model with recurrent state goes on after a prefix from a snapshot of its state (`kv_cache`): so a prompt is cut where a block ends,
that a snapshot can be kept there, and the step says which states it begins with and, when it is done, which are to be kept.

Most steps are the one before with every sequence a token further. Such a step is not built but moved on (`schedule`).

The oldest sequence is never preempted for another, so somebody always makes progress; a sequence that could not run alone is
never admitted (`Engine.submit` refuses it). Called by the engine's thread only.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from . import _steps
from .errors import UsageError
from .kv_cache import BlockManager, SequenceBlocks
from .step import StepBatch

__all__ = ["POLICIES", "ScheduledStep", "Scheduler", "Sequence", "Slice"]

POLICIES: Final = ("fcfs", "shortest-remaining")

I32 = np.int32


class Sequence:
    """One choice of a request: its known tokens and how far they are computed.

    owner: whatever the caller wants to find again (the engine's request). rank: (priority, request number, choice); smaller runs
    first. max_new: tokens it may generate, for the policy `shortest-remaining`. prompt_rows: the logits of every prompt position are
    wanted, so the prompt must be computed, not found. siblings: choices that start from this one's blocks when its prompt is done.
    """

    __slots__ = (
        "blocks",
        "max_new",
        "num_cached",
        "num_computed",
        "num_prompt",
        "num_prompt_rows",
        "num_tokens",
        "owner",
        "prompt_rows",
        "rank",
        "salt",
        "siblings",
        "slot",
        "tokens",
    )

    def __init__(
        self,
        owner: Any,
        prompt_ids: np.ndarray,
        *,
        rank: tuple[int, int, int] = (0, 0, 0),
        max_new: int = 1,
        salt: str = "",
        prompt_rows: bool = False,
        siblings: Iterable[Sequence] = (),
    ):
        """prompt_ids: i32 [n], n ≥ 1; copied."""
        self.owner, self.rank, self.max_new, self.salt, self.prompt_rows = owner, rank, max_new, salt, prompt_rows
        self.siblings = list(siblings)
        self.num_prompt = self.num_tokens = len(prompt_ids)
        self.tokens = np.empty(len(prompt_ids) + min(max_new, 256), I32)  # [capacity], num_tokens of them known
        self.tokens[: len(prompt_ids)] = prompt_ids
        self.num_computed = 0  # tokens whose keys and values are in the cache
        self.num_cached = -1  # prompt tokens that were found in the cache when it first started; −1: it has not
        self.num_prompt_rows = 0  # prompt positions, but the last, whose logits have been given
        self.slot = -1  # place among the running, and slot of recurrent state; −1: waiting
        self.blocks: SequenceBlocks | None = None

    @property
    def running(self) -> bool:
        """It has a place and may hold blocks."""
        return self.slot >= 0

    @property
    def decodes(self) -> bool:
        """Its prompt is computed."""
        return self.num_computed >= self.num_prompt

    def append(self, token_id: int) -> None:
        """Adds a generated token."""
        if self.num_tokens == len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.empty(len(self.tokens), I32)])
        _steps.put(self.tokens, self.num_tokens, token_id)  # numpy's own way touches much more memory
        self.num_tokens += 1

    def num_remaining(self) -> int:
        """Tokens to compute until it ends at the latest."""
        return self.num_prompt + self.max_new - self.num_computed


@dataclass(slots=True)
class Slice:
    """What one sequence does in a step: computes num_tokens tokens from position `start`; its rows of logits are first_row … first_row
    + num_rows − 1, of consecutive positions that end with the slice. samples: the last row's id is its next token."""

    sequence: Sequence
    start: int
    num_tokens: int
    first_row: int = 0
    num_rows: int = 0
    samples: bool = False


@dataclass(slots=True)
class ScheduledStep:
    """One step: make the copies (from block, to block) in this order, then run the batch. The next step reuses the arrays. fresh: False
    where it is the very object of the step before, whose sequences all decode once more; then only its numbers have moved on.
    restores: of models with recurrent state, what is to be put back before the batch runs: (snapshot, sequence whose slot takes it). moves: what turns it
    into the next, once that was tried."""

    slices: list[Slice]
    copies: list[tuple[int, int]]
    batch: StepBatch
    fresh: bool = True
    restores: list[tuple[int, Sequence]] = field(default_factory=list)
    moves: _steps.Moves | None = None


class Scheduler:
    """Keeps the waiting and the running sequences and builds one step at a time.

    blocks: the cache's book-keeping. max_tokens, max_sequences, max_rows: the largest step. max_blocks: columns of the block table.
    policy: `fcfs`, or `shortest-remaining` (the least work left first; long requests may wait as long as short ones come).
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_tokens: int,
        max_sequences: int,
        max_rows: int,
        max_blocks: int,
        policy: str = "fcfs",
    ):
        if policy not in POLICIES:
            raise UsageError(f"no schedule '{policy}'; there are {', '.join(POLICIES)}", fix=f"policy={POLICIES[0]!r}")
        if min(max_tokens, max_sequences, max_rows, max_blocks) < 1:
            raise UsageError(f"a step of {max_tokens} tokens, {max_sequences} sequences, {max_rows} rows; each must be at least 1")
        self.blocks, self.policy = blocks, policy
        self.max_tokens, self.max_rows = max_tokens, max_rows
        self.max_running = min(max_tokens, max_sequences, max_rows)  # so that each may decode in every step
        self.running: list[Sequence] = []  # by rank
        self.waiting: list[Sequence] = []  # by policy
        self.parked: list[Sequence] = []  # set aside until their owner wants them again
        self.num_preemptions = 0
        self.prompt_budget: Callable[[int], int | None] = lambda num_decodes: None  # tokens of prompts in a step of so many decodes; None: all there is room for
        self._slots = list(range(self.max_running - 1, -1, -1))
        self._tables = np.zeros((self.max_running, max_blocks), I32)  # row: slot; columns: the sequence's blocks
        self._steps = np.arange(max_tokens, dtype=I32)
        self._ids = np.zeros(max_tokens, I32)
        self._positions = np.zeros(max_tokens, I32)
        self._token_slots = np.zeros(max_tokens, I32)
        self._query_start = np.zeros(self.max_running + 1, I32)
        self._context_len = np.zeros(self.max_running, I32)
        self._state_slot = np.zeros(self.max_running, I32)
        self._prefix_len = np.zeros(self.max_running, I32)
        self._sample_rows = np.zeros(max_rows, I32)
        self._table = np.zeros(self.max_running * max_blocks, I32)
        self._last: ScheduledStep | None = None  # the step before, while all that runs decodes in it
        self._restores: list[tuple[int, Sequence]] = []  # of sequences that started since the step before

    # the queue --------------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Puts a sequence in the queue."""
        insort(self.waiting, sequence, key=self._order)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is, and gives its blocks back; does nothing if it is out already."""
        parked = sequence in self.parked
        if sequence.running:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        elif parked:
            self.parked.remove(sequence)
        if sequence.siblings:  # its prompt is not done: the next choice computes it instead
            heir, *others = sequence.siblings
            sequence.siblings = []
            heir.siblings, heir.prompt_rows, heir.num_prompt_rows = others, sequence.prompt_rows, sequence.num_prompt_rows
            if parked:
                self.parked.append(heir)
            else:
                self.add(heir)

    def park(self, sequence: Sequence) -> None:
        """Sets a sequence aside: place and blocks go to others, and it is computed again (or found in the cache) after `unpark`."""
        if sequence.running:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            return  # a choice that has ended, or waits for the prompt of the first one
        self.parked.append(sequence)

    def unpark(self, sequence: Sequence) -> None:
        """Puts a parked sequence in the queue again; does nothing for others."""
        if sequence in self.parked:
            self.parked.remove(sequence)
            self.add(sequence)

    def _order(self, sequence: Sequence) -> tuple[int, ...]:
        priority, *age = sequence.rank
        return (priority, sequence.num_remaining(), *age) if self.policy == "shortest-remaining" else sequence.rank

    # a step -----------------------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None if nothing waits or runs: the step before with every sequence a token further, where that is all there is to do, else
        a new one. There is more to do where somebody came or went, a token is not known or a sequence begins a block."""
        step, self._last = self._last, None
        if step is not None and not (self.waiting and len(self.running) < self.max_running):
            if step.moves is None:
                batch = step.batch
                step.moves = _steps.Moves(step.slices, self.blocks.block_size, batch.ids, batch.positions, batch.slots, batch.context_len)
            if step.moves.run():  # what is moved before a sequence turns out to need more, `_build` overwrites
                if step.fresh:
                    step.fresh, step.copies, step.restores, step.batch.moved = False, [], [], True
                self._last = step
                return step
        if self.waiting:
            self._admit()
        if not self.running:
            return None
        counts = self._share()
        slices: list[Slice] = []
        copies: list[tuple[int, int]] = []
        for sequence in tuple(self.running):  # by rank: whoever is preempted below comes later
            count = counts.get(sequence.slot, 0) if sequence.running else 0
            if count and self._reserve(sequence, count, copies):
                slices.append(Slice(sequence, sequence.num_computed, count))
        if not slices:  # only the last one left can fail, by a copy it lacks the block for; it starts again with the whole cache
            return self.schedule() if self.waiting else None
        step = ScheduledStep(slices, copies, self._build(slices))
        step.restores, self._restores = [(place, s) for place, s in self._restores if s.running and s.num_computed], []
        if len(slices) == len(self.running) and all(p.num_tokens == p.num_rows == 1 and p.sequence.decodes for p in slices):
            self._last = step
        return step

    def advance(self, step: ScheduledStep) -> list[tuple[int, int]]:
        """After the step has run: its tokens are computed. Full blocks become findable, and choices start whose prompt is done.

        Returns the states that are to be kept now, before another step: (slot, snapshot)."""
        size = self.blocks.block_size
        kept: list[tuple[int, int]] = []
        for part in step.slices:
            sequence = part.sequence
            if sequence.blocks is None:
                continue  # removed while the step ran
            sequence.num_computed = part.start + part.num_tokens
            if sequence.prompt_rows:
                sequence.num_prompt_rows = max(sequence.num_prompt_rows, min(sequence.num_computed, sequence.num_prompt - 1))
            if sequence.num_computed // size > sequence.blocks.num_known:
                self.blocks.commit(sequence.blocks, sequence.tokens, sequence.num_computed)
                self._write_table(sequence)
                if self.blocks.keeps_snapshots:
                    place = self.blocks.keep_snapshot(sequence.blocks, sequence.num_computed, decodes=part.start >= sequence.num_prompt)
                    if place is not None:
                        kept.append((sequence.slot, place))
            if sequence.siblings and sequence.num_computed >= sequence.num_prompt:
                self._fork(sequence)
        return kept

    def _admit(self) -> None:
        """Starts waiting sequences in order; the first that does not fit holds the others back, so that it is not passed for ever."""
        while self.waiting and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            tokens = sequence.tokens[: sequence.num_tokens]
            if self.running:
                found = [] if sequence.prompt_rows else self.blocks.find(tokens, sequence.salt)
                need = self.blocks.blocks_for(sequence.num_tokens) - len(found) + self.blocks.num_unowned(found)
                for other in self.running:  # one spare block each, besides what its known tokens still need
                    held = len(other.blocks.ids) if other.blocks else 0
                    need += 1 + max(self.blocks.blocks_for(other.num_tokens) - held, 0)
                if need > self.blocks.num_available:
                    return
            del self.waiting[0]
            sequence.blocks, cached = self.blocks.open(tokens, sequence.salt, read_cache=not sequence.prompt_rows)
            if sequence.num_cached < 0:
                sequence.num_cached = cached
            self._start(sequence, cached)
            if cached and self.blocks.keeps_snapshots:
                self._restores.append((self.blocks.snapshot(sequence.blocks), sequence))

    def _start(self, sequence: Sequence, num_computed: int) -> None:
        self._last = None
        sequence.slot, sequence.num_computed = self._slots.pop(), num_computed
        self._tables[sequence.slot] = 0
        self._write_table(sequence)
        insort(self.running, sequence, key=lambda s: s.rank)

    def _fork(self, parent: Sequence) -> None:
        """Starts the other choices of a prompt. Each computes the last prompt token again, for logits of its own; with recurrent state,
        what follows the last snapshot, or all."""
        siblings, parent.siblings = parent.siblings, []
        for sequence in siblings:
            if not self.blocks.recurrent and parent.blocks is not None and len(self.running) < self.max_running and self.blocks.num_available:
                sequence.blocks = self.blocks.fork(parent.blocks, parent.num_prompt - 1)
                self._start(sequence, parent.num_prompt - 1)
            else:
                self.add(sequence)

    def _share(self) -> dict[int, int]:
        """Tokens of this step for each running sequence, by its slot.

        Decodes take one each. Of what is left, or of `prompt_budget` if that is less, prompts in order of age (or of remaining work) get all they can use; but under
        `fcfs` half is first offered to the shortest of the younger ones, so that a short prompt does not wait for a long one. Where one of them ends by that, the
        others get no more than the other half, so that its first token does not wait for their tokens either.
        """
        counts: dict[int, int] = {}
        prompts: list[Sequence] = []
        for sequence in self.running:
            if sequence.num_tokens - sequence.num_computed == 1:
                counts[sequence.slot] = 1
            else:
                prompts.append(sequence)
        if not prompts:
            return counts
        budget = self.max_tokens - len(counts)
        decodes = sum(sequence.decodes for sequence in self.running if sequence.slot in counts)
        if decodes and (most := self.prompt_budget(decodes)) is not None:
            budget = min(budget, most)
        wanted = self._wanted(prompts)
        if self.policy == "shortest-remaining":
            prompts.sort(key=self._order)
        elif len(prompts) > 1:
            side = budget // 2
            half, ends = budget - side, False
            for sequence in sorted(prompts[1:], key=lambda s: (wanted[s.slot], s.rank)):
                count = min(wanted[sequence.slot], side)
                counts[sequence.slot] = count
                side -= count
                budget -= count
                ends |= count == wanted[sequence.slot] == sequence.num_tokens - sequence.num_computed
            if ends:
                budget = min(budget, half)
        for sequence in prompts:
            have = counts.get(sequence.slot, 0)
            count = min(wanted[sequence.slot] - have, budget)
            counts[sequence.slot] = have + count
            budget -= count
        if self.blocks.keeps_snapshots:
            for sequence in prompts:
                counts[sequence.slot] = self._to_a_block(sequence, counts[sequence.slot])
        return counts

    def _to_a_block(self, sequence: Sequence, count: int) -> int:
        """So many tokens that they end with a block, if that is not before the first; of the known tokens the last one begins no prefix
        that is looked up, so the block must end before it."""
        size, start = self.blocks.block_size, sequence.num_computed
        end = min(start + count, sequence.num_tokens - 1) // size * size
        return end - start if end > start else count

    def _wanted(self, prompts: list[Sequence]) -> dict[int, int]:
        """The most tokens each may compute in one step: what it lacks, and no more rows of logits than there are."""
        wanted: dict[int, int] = {}
        spare = self.max_rows - len(self.running)  # besides one for each
        for sequence in prompts:
            count = sequence.num_tokens - sequence.num_computed
            if sequence.prompt_rows:
                given = max(sequence.num_prompt_rows - sequence.num_computed, 0)  # computed again, after a preemption
                count = min(count, given + 1 + spare)
                spare -= max(count - given - 1, 0)
            wanted[sequence.slot] = count
        return wanted

    def _reserve(self, sequence: Sequence, count: int, copies: list[tuple[int, int]]) -> bool:
        """Blocks for the next `count` tokens; preempts from the youngest on. False if the sequence itself had to go."""
        if sequence.blocks is None:
            return False
        start, held = sequence.num_computed, len(sequence.blocks.ids)
        while (made := self.blocks.reserve(sequence.blocks, start, start + count)) is None:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        if made or len(sequence.blocks.ids) != held:
            copies += made
            self._write_table(sequence)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        self.num_preemptions += 1
        self.add(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._last = None
        if sequence.blocks is not None:
            self.blocks.close(sequence.blocks)
        self._slots.append(sequence.slot)
        sequence.blocks, sequence.slot, sequence.num_computed = None, -1, 0

    def _write_table(self, sequence: Sequence) -> None:
        if sequence.blocks is not None:
            self._tables[sequence.slot, : len(sequence.blocks.ids)] = sequence.blocks.ids

    def _build(self, slices: list[Slice]) -> StepBatch:
        """The step's arrays (without the sampler's), as views of memory that the next step overwrites."""
        size = self.blocks.block_size
        ids, positions, slots = self._ids, self._positions, self._token_slots
        t = rows = width = 0
        for s, part in enumerate(slices):
            sequence, start, count = part.sequence, part.start, part.num_tokens
            end = start + count
            table = self._tables[sequence.slot]
            if count == 1:
                ids[t] = sequence.tokens[start]
                positions[t] = start
                slots[t] = table[start // size] * size + start % size
            else:
                where = self._steps[:count] + start  # [count]
                ids[t : t + count] = sequence.tokens[start:end]
                positions[t : t + count] = where
                slots[t : t + count] = table[where // size] * size + where % size
            t += count
            self._query_start[s + 1] = t
            self._context_len[s] = end
            self._state_slot[s] = sequence.slot
            self._prefix_len[s] = sequence.num_prompt
            width = max(width, -(-end // size))
            part.samples = end == sequence.num_tokens
            part.num_rows = 1 if part.samples else 0
            if sequence.prompt_rows:  # position p tells token p + 1, so the last position of the prompt belongs to the answer
                part.num_rows += max(min(end, sequence.num_prompt - 1) - max(start, sequence.num_prompt_rows), 0)
            part.first_row = rows
            if part.num_rows == 1:
                self._sample_rows[rows] = t - 1
            elif part.num_rows:
                self._sample_rows[rows : rows + part.num_rows] = self._steps[t - part.num_rows : t]
            rows += part.num_rows
        n = len(slices)
        table = self._table[: n * width].reshape(n, width)  # [S, B]
        for s, part in enumerate(slices):
            table[s] = self._tables[part.sequence.slot, :width]
        return StepBatch(
            ids[:t],
            positions[:t],
            slots[:t],
            self._query_start[: n + 1],
            self._context_len[:n],
            table,
            self._sample_rows[:rows],
            None,
            self._state_slot[:n],
            self._prefix_len[:n],
        )
