"""The step that is moved on, and the arrays that are copied, in native code: only what fits is touched."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

from fastllm.core import _steps
from fastllm.core.errors import EngineError, ShapeError
from fastllm.core.kv_cache import BlockManager
from fastllm.core.scheduler import Scheduler, Sequence
from fastllm.core.step import MOVED

I32 = np.int32


def decoding(start, tokens):
    sequence = SimpleNamespace(num_computed=start + 1, num_tokens=start + 2, tokens=np.array(tokens, I32))
    return SimpleNamespace(sequence=sequence, start=start)


def moved(*args):
    return _steps.Moves(*args).run()


def arrays(count):
    return [np.zeros(count, I32) for _ in range(4)]


def test_a_step_moves_on_by_one_token_of_each_sequence():
    slices = [decoding(1, [5, 6, 7]), decoding(0, [8, 9])]
    ids, positions, slots, context_len = np.array([6, 8], I32), np.array([1, 0], I32), np.array([65, 0], I32), np.array([2, 1], I32)
    assert moved(slices, 64, ids, positions, slots, context_len)
    assert (ids.tolist(), positions.tolist(), slots.tolist(), context_len.tolist()) == ([7, 9], [2, 1], [66, 1], [3, 2])
    assert [part.start for part in slices] == [2, 1]


@pytest.mark.parametrize("change", [{"num_computed": 5}, {"num_tokens": 5}])
def test_a_sequence_with_more_to_compute_is_not_moved(change):
    part = decoding(0, range(8))
    vars(part.sequence).update(change)
    assert not moved([part], 64, *arrays(1))
    assert part.start == 0


def test_the_first_token_of_a_block_is_not_moved_to():
    assert not moved([decoding(3, range(8))], 4, *arrays(1))


def test_arrays_of_another_type_or_length_are_refused():
    part = decoding(0, [1, 2])
    with pytest.raises(ShapeError, match="other lengths"):
        moved([part], 64, *arrays(2))
    with pytest.raises(ShapeError, match="int64"):
        moved([part], 64, np.zeros(1, np.int64), *arrays(1)[:3])
    with pytest.raises(ShapeError, match="in memory of 1"):
        moved([decoding(0, [1])], 64, *arrays(1))


def test_a_table_goes_to_the_front_of_the_wider_one():
    target = np.full((3, 4), -1, I32)
    batch = SimpleNamespace(block_table=np.arange(4, dtype=I32).reshape(2, 2))
    _steps.fill([("block_table", "S", False, target)], batch, 2, 2, 2)
    assert target.tolist() == [[0, 1, -1, -1], [2, 3, -1, -1], [-1] * 4]


@pytest.mark.parametrize(
    ("rows", "target", "message"),
    [(2, None, "2 rows of 'ids' instead of 3"), (3, np.zeros(2, I32), "room for 2")],
)
def test_arrays_that_do_not_fit_are_refused(rows, target, message):
    with pytest.raises(EngineError, match=message):
        _steps.fill([("ids", "T", False, target)], SimpleNamespace(ids=np.zeros(rows, I32)), 3, 1, 1)


def test_a_table_that_is_too_wide_is_refused():
    batch = SimpleNamespace(block_table=np.zeros((1, 5), I32))
    with pytest.raises(EngineError, match="a block table of 5 columns"):
        _steps.fill([("block_table", "S", False, np.zeros((1, 4), I32))], batch, 1, 1, 1)


def test_arrays_that_are_only_read_may_be_read_only_and_views_with_gaps():
    frozen, gaps = np.arange(3, dtype=I32), np.arange(6, dtype=I32)[::2]
    frozen.flags.writeable = False
    part = decoding(0, [1, 2])
    part.sequence.tokens.flags.writeable = False
    ids, target, table = arrays(1)[0], np.zeros(3, I32), np.zeros((2, 2), I32)
    assert moved([part], 64, ids, *arrays(1)[:3])
    assert ids.tolist() == [2]
    for source in (frozen, gaps):
        _steps.fill([("ids", "T", False, target)], SimpleNamespace(ids=source), 3, 1, 1)
        assert target.tolist() == source.tolist()
    batch = SimpleNamespace(block_table=np.arange(8, dtype=I32).reshape(2, 4)[:, ::2])
    _steps.fill([("block_table", "S", False, table)], batch, 2, 2, 2)
    assert table.tolist() == [[0, 2], [4, 6]]


def test_arrays_that_are_written_to_must_not_be_read_only():
    frozen = np.zeros(1, I32)
    frozen.flags.writeable = False
    with pytest.raises(ShapeError, match="read-only"):
        moved([decoding(0, [1, 2])], 64, frozen, *arrays(1)[:3])
    with pytest.raises(ShapeError, match="read-only"):
        _steps.fill([("ids", "T", False, frozen)], SimpleNamespace(ids=np.zeros(1, I32)), 1, 1, 1)
    with pytest.raises(ShapeError, match="int64"):
        _steps.fill([("ids", "T", False, np.zeros(4, I32))], SimpleNamespace(ids=np.zeros(8, np.int64)[::2]), 4, 1, 1)


def test_numbers_are_put_and_listed_within_their_array():
    numbers = np.arange(4, dtype=I32)
    _steps.put(numbers, 3, -(2**31))
    assert _steps.listed(numbers) == [0, 1, 2, -(2**31)]
    assert all(type(n) is int for n in _steps.listed(numbers))
    assert _steps.listed(np.zeros(0, I32)) == []
    for place in (4, -1):
        with pytest.raises(ShapeError, match="place"):
            _steps.put(numbers, place, 0)
    with pytest.raises(ShapeError, match="int64"):
        _steps.listed(np.zeros(2, np.int64))
    with pytest.raises(OverflowError):
        _steps.put(numbers, 0, 2**31)


def test_copies_are_made_again_with_the_numbers_of_the_day():
    source, target = np.array([1, 2], I32), np.zeros(3, I32)
    copies = _steps.Copies([(source, target)])
    copies.run()
    source += 5
    copies.run()
    assert target.tolist() == [6, 7, 0]


def test_copies_that_do_not_fit_are_refused():
    with pytest.raises(EngineError, match="room for 1"):
        _steps.Copies([(np.zeros(2, I32), np.zeros(1, I32))])
    with pytest.raises(ShapeError, match="int64"):
        _steps.Copies([(np.zeros(2, np.int64), np.zeros(2, I32))])
    with pytest.raises(ShapeError, match="list"):
        _steps.Copies([([1], np.zeros(2, I32))])


class Building(Scheduler):
    """Knows of no step before, so it builds each anew."""

    _last = property(lambda self: None, lambda self, step: None)


class Pair:
    """Two schedulers with one history: the first moves steps on where it can, the second builds each anew. Their steps must be equal."""

    ARRAYS = ("ids", "positions", "slots", "query_start", "context_len", "block_table", "state_slot", "prefix_len", "sample_rows")

    def __init__(self, rng):
        self.rng, self.num_blocks, sequences = rng, rng.randint(6, 24), rng.randint(1, 5)
        cache, self.budget = rng.random() < 0.6, None
        limits = {"max_tokens": rng.choice([4, 8, 16]), "max_sequences": sequences, "max_rows": sequences + rng.choice([0, 2])}
        self.schedulers = [
            kind(BlockManager(self.num_blocks, 4, prefix_cache=cache), max_blocks=self.num_blocks, **limits) for kind in (Scheduler, Building)
        ]
        for scheduler in self.schedulers:
            scheduler.prompt_budget = lambda num_decodes: self.budget
        self.before = {}  # array -> values in the step before
        self.live = {}  # number -> (the sequence of each scheduler, tokens it generates)
        self.count = self.moved = self.copied = 0

    def submit(self):
        rng, choices = self.rng, 1 + self.rng.choice([0, 0, 0, 1, 2])
        prompt = np.array([rng.randint(0, 1) for _ in range(rng.randint(1, 9))], I32)
        new, rows = rng.randint(1, min(20, max((self.num_blocks - 1) * 4 - len(prompt), 1))), rng.random() < 0.15
        groups = []
        for scheduler in self.schedulers:
            numbers = range(self.count, self.count + choices)
            group = [Sequence(n, prompt, rank=(0, self.count, n), max_new=new, prompt_rows=rows and n == self.count) for n in numbers]
            group[0].siblings = group[1:]
            scheduler.add(group[0])
            groups.append(group)
        self.live |= {pair[0].owner: (pair, new) for pair in zip(*groups, strict=True)}
        self.count += choices

    def each(self, do):
        """do(scheduler, sequence) for one sequence that lives, in both."""
        for scheduler, sequence in zip(self.schedulers, self.live[self.rng.choice(list(self.live))][0], strict=True):
            do(scheduler, sequence)

    def cancel(self, scheduler, sequence):
        for pair, _ in self.live.values():
            for other in pair:
                if sequence in other.siblings:
                    other.siblings.remove(sequence)
        scheduler.remove(sequence)
        self.live.pop(sequence.owner, None)

    def step(self):
        self.budget = self.rng.choice([None, 0, 0, 1, 3])
        steps = [scheduler.schedule() for scheduler in self.schedulers]
        if steps[0] is None or steps[1] is None:
            assert steps == [None, None]
            return
        moved, built = steps
        assert seen(moved) == seen(built)
        assert built.fresh
        for name in self.ARRAYS:
            values = getattr(moved.batch, name).tolist()
            assert values == getattr(built.batch, name).tolist(), name
            assert name in MOVED or not moved.batch.moved or values == self.before[name], name
            self.before[name] = values
        assert moved.batch.moved == (not moved.fresh)
        self.moved += not moved.fresh
        self.copied += bool(moved.copies)
        if self.live and self.rng.random() < 0.05:  # while the step runs
            self.each(Scheduler.park)
        for scheduler, step in zip(self.schedulers, steps, strict=True):
            scheduler.advance(step)
        for part in moved.slices:
            number, draw = part.sequence.owner, self.rng.randint(0, 1)
            if not part.samples or part.sequence.blocks is None or number not in self.live:
                continue
            pair, new = self.live[number]
            for scheduler, sequence in zip(self.schedulers, pair, strict=True):
                sequence.append(draw)
                if sequence.num_tokens - sequence.num_prompt >= new:
                    scheduler.remove(sequence)
                    self.live.pop(number, None)


def seen(step):
    """What the engine reads of a step, besides its arrays."""
    return step.copies, [(p.sequence.owner, p.start, p.num_tokens, p.first_row, p.num_rows, p.samples) for p in step.slices]


def test_steps_that_are_moved_on_are_those_that_would_be_built():
    """Random histories: prompts that share their beginnings, choices, cancels, sequences set aside, too few blocks, steps without prompts."""
    moved = copied = preempted = found = 0
    for seed in range(100):
        rng = random.Random(seed)
        pair = Pair(rng)
        for _ in range(60):
            event = rng.random()
            if event < 0.15 and len(pair.live) < 7:
                pair.submit()
            elif 0.15 <= event < 0.30 and pair.live:
                pair.each(pair.cancel if event < 0.20 else Scheduler.park if event < 0.24 else Scheduler.unpark)
            pair.step()
        moved, copied = moved + pair.moved, copied + pair.copied
        preempted += pair.schedulers[0].num_preemptions
        found += pair.schedulers[0].blocks.hit_tokens
    assert min(moved, copied, preempted, found) > 20, "the histories lack what they are to test"
