"""The scheduler against a model that sees through its block tables: chunks, decodes, preemption, forks, cancels, by example and at random."""

from __future__ import annotations

import time

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fastllm.core.errors import UsageError
from fastllm.core.kv_cache import BlockManager
from fastllm.core.scheduler import ScheduledStep, Scheduler, Sequence

from .fake_runner import FakeRunner, next_logits


class Bench:
    """A scheduler, its cache and a runner; drives steps greedily and checks what must hold after each."""

    def __init__(self, policy: str = "fcfs", prefix_cache: bool = True, **limits: int):
        self.runner = FakeRunner(**limits)
        r = self.runner
        self.blocks = BlockManager(r.num_blocks, r.block_size, prefix_cache=prefix_cache, num_snapshots=r.num_snapshots if r.stateful else None)
        self.scheduler = Scheduler(
            self.blocks, max_tokens=r.max_tokens, max_sequences=r.max_sequences, max_rows=r.max_rows, max_blocks=r.max_blocks, policy=policy
        )
        self.live: dict[Sequence, int] = {}  # sequence -> tokens it may generate
        self.ended: list[Sequence] = []
        self.prompt_rows: dict[Sequence, list[int]] = {}
        self.count = 0

    def submit(self, prompt: list[int], max_new: int = 4, n: int = 1, priority: int = 0, **options) -> list[Sequence]:
        self.count += 1
        group = [
            Sequence(None, np.array(prompt, np.int32), rank=(priority, self.count, i), max_new=max_new, **(options if i == 0 else {}))
            for i in range(n)
        ]
        group[0].siblings = group[1:]
        self.live.update(dict.fromkeys(group, max_new))
        self.scheduler.add(group[0])
        return group

    def cancel(self, sequence: Sequence) -> None:
        for other in self.live:
            if sequence in other.siblings:
                other.siblings.remove(sequence)
        self.scheduler.remove(sequence)
        del self.live[sequence]

    def step(self) -> ScheduledStep | None:
        step = self.scheduler.schedule()
        if step is None:
            return None
        for source, target in step.copies:
            self.runner.copy_block(source, target)
        for part in step.slices:
            table = part.sequence.blocks.ids
            for p in range(part.start, part.start + part.num_tokens):
                block = table[p // self.runner.block_size]
                assert self.blocks._refs[block] == 1, "a block is written by one of several owners"
                assert self.blocks._nodes[block] == 0, "a block that others may find is written"
        for snapshot, sequence in step.restores:
            self.runner.restore_state(snapshot, sequence.slot)
        result = self.runner.run(step.batch)
        for slot, snapshot in self.scheduler.advance(step):
            self.runner.keep_state(slot, snapshot)
        for part in step.slices:
            rows = range(part.first_row, part.first_row + part.num_rows)
            if part.sequence.prompt_rows:
                first = part.start + part.num_tokens - part.num_rows
                for p, row in enumerate(rows[: part.num_rows - part.samples], first):
                    want = next_logits(part.sequence.tokens[: p + 1])
                    assert np.array_equal(result.logits[row], want), f"row of prompt position {p}"
                    self.prompt_rows.setdefault(part.sequence, []).append(p)
            if part.samples:
                part.sequence.append(int(result.logits[rows[-1]].argmax()))
                if part.sequence.num_tokens - part.sequence.num_prompt == self.live[part.sequence]:
                    self.scheduler.remove(part.sequence)
                    del self.live[part.sequence]
                    self.ended.append(part.sequence)
        return step

    def finish(self, most_steps: int = 2000) -> None:
        for _ in range(most_steps):
            if self.step() is None:
                break
        assert not self.live, "an admitted sequence did not end"
        assert self.blocks.num_used == 0
        for sequence in self.ended:
            self.check(sequence)
            if sequence.prompt_rows:
                assert self.prompt_rows.get(sequence, []) == list(range(sequence.num_prompt - 1)), "each prompt row exactly once"

    def check(self, sequence: Sequence) -> None:
        """Every generated token is the one that the text before it asks for."""
        for p in range(sequence.num_prompt, sequence.num_tokens):
            assert sequence.tokens[p] == next_logits(sequence.tokens[:p]).argmax(), f"token {p} differs from a run alone"


def test_a_budget_bounds_prompts_beside_decodes_and_nothing_else():
    bench = Bench(prefix_cache=False, max_tokens=64)
    bench.scheduler.prompt_budget = lambda num_decodes: 5
    (stream,) = bench.submit([1, 2, 3, 4, 5, 6, 7, 8, 9], max_new=20)
    assert [p.num_tokens for p in bench.step().slices] == [9]
    (late,) = bench.submit(list(range(1, 13)), max_new=2)
    chunks = []
    while late.num_computed < late.num_prompt:
        counts = {p.sequence: p.num_tokens for p in bench.step().slices}
        assert counts[stream] == 1
        chunks.append(counts[late])
    assert chunks == [5, 5, 2]


def test_the_budget_is_asked_for_the_sequences_that_decode_and_may_leave_prompts_out_of_a_step():
    """The last token of a prompt is no decode, also where it is a sequence's only one."""
    bench, asked, budgets = Bench(prefix_cache=False, max_tokens=64), [], [0, 11, 0, 5]

    def budget(num_decodes):
        asked.append(num_decodes)
        return budgets[len(asked) - 1]

    bench.scheduler.prompt_budget = budget
    bench.submit([1, 2, 3], max_new=20)
    bench.step()
    bench.submit(list(range(1, 13)), max_new=2)
    assert [[p.num_tokens for p in bench.step().slices] for _ in range(2)] == [[1], [1, 11]]
    bench.submit(list(range(1, 4)), max_new=2)
    assert [[p.num_tokens for p in bench.step().slices] for _ in range(2)] == [[1, 1], [1, 1, 3]]
    assert asked == [1, 1, 1, 2]


def test_a_prompt_is_cut_to_the_budget_and_sampled_once():
    bench = Bench(max_tokens=4)
    (sequence,) = bench.submit(list(range(10)), max_new=2)
    sizes, samples = [], []
    while (step := bench.step()) is not None:
        sizes.append(step.slices[0].num_tokens)
        samples.append(len(step.batch.sample_rows))
    assert sizes == [4, 4, 2, 1]
    assert samples == [0, 0, 1, 1]
    bench.finish()
    assert sequence.num_tokens == 12


def test_decodes_go_on_in_every_step_of_a_long_prefill():
    bench = Bench(max_tokens=4, num_blocks=32)
    (stream,) = bench.submit([1], max_new=12)
    bench.step()
    bench.submit(list(range(30)), max_new=1)
    for generated in range(2, 12):
        bench.step()
        assert stream.num_tokens - stream.num_prompt == generated
    bench.finish()


def test_a_short_prompt_does_not_wait_for_a_long_one():
    bench = Bench(max_tokens=8, num_blocks=64)
    bench.submit(list(range(38)), max_new=1)
    bench.step()
    (short,) = bench.submit([1, 2, 3], max_new=2)
    counts = [part.num_tokens for part in bench.step().slices]
    assert short.num_tokens == 4, "the first token comes with the next step"
    assert counts == [4, 3], "and that step computes half of a step's tokens of the long one, not all that there is room for"
    assert [part.num_tokens for part in bench.step().slices] == [7, 1], "the next step has the room of before, less a decode"
    bench.finish()


def test_several_short_prompts_take_half_of_a_step_and_the_rest_of_it_goes_to_the_long_ones():
    bench = Bench(max_tokens=16, num_blocks=64, max_sequences=8, max_rows=8)
    (old,), (second,) = bench.submit(list(range(38)), max_new=1), bench.submit(list(range(36)), max_new=1)
    bench.step()
    for _ in range(3):
        bench.submit([1, 2, 3], max_new=1)
    assert [part.num_tokens for part in bench.step().slices] == [8, 3, 3, 2], "the third has to wait for its last token"
    assert (old.num_computed, second.num_computed) == (16, 8)
    bench.finish()


def test_the_oldest_prompt_gets_at_least_half_of_the_budget():
    bench = Bench(max_tokens=8, num_blocks=64)
    (old,) = bench.submit(list(range(30)), max_new=1)
    for _ in range(3):
        bench.submit([1, 2, 3, 4], max_new=1)
    bench.step()
    assert old.num_computed == 4
    bench.finish()


def test_shortest_remaining_first():
    bench = Bench(policy="shortest-remaining", max_sequences=1, num_blocks=64)
    long, short = bench.submit(list(range(20)), max_new=4)[0], bench.submit([1], max_new=1)[0]
    bench.finish()
    assert bench.ended == [short, long]


def test_first_come_first_served_and_a_smaller_priority_before():
    bench = Bench(max_sequences=1)
    first, second = bench.submit([1])[0], bench.submit([2])[0]
    urgent = bench.submit([3], priority=-1)[0]
    bench.finish()
    assert bench.ended == [urgent, first, second]


def test_pressure_preempts_the_youngest_and_changes_no_token():
    bench = Bench(num_blocks=6, max_blocks=6)
    old, young = bench.submit([1, 2, 3], max_new=16)[0], bench.submit([4, 5, 6], max_new=16)[0]
    bench.finish()
    assert bench.scheduler.num_preemptions > 0
    assert bench.ended == [old, young]


def test_a_prompt_waits_for_room_instead_of_being_preempted_at_once():
    bench = Bench(num_blocks=5, max_blocks=5)
    old, young = bench.submit(list(range(9)), max_new=3)[0], bench.submit(list(range(20, 29)), max_new=2)[0]
    bench.step()
    assert (old.running, young.running) == (True, False)
    bench.finish()
    assert bench.ended == [old, young]
    assert bench.scheduler.num_preemptions == 0


def test_a_sequence_that_fills_the_whole_cache_runs():
    bench = Bench(num_blocks=4, max_blocks=4)
    bench.submit(list(range(13)), max_new=3)
    bench.submit(list(range(13)), max_new=3)
    bench.finish()


def test_a_repeated_prompt_is_found_but_its_last_token_is_computed():
    bench = Bench(num_blocks=32)
    prompt = list(range(8))
    bench.submit(prompt)
    bench.finish()
    (again,) = bench.submit(prompt)
    step = bench.step()
    assert again.num_cached == 4
    assert step.slices[0].num_tokens == 4
    bench.finish()


def test_tokens_of_its_own_that_a_preempted_prompt_finds_again_do_not_count_as_cached():
    bench = Bench(num_blocks=8, max_blocks=8, max_tokens=8)
    bench.submit([1, 2, 3], max_new=26)
    bench.step()
    (late,) = bench.submit(list(range(12)), max_new=10)
    bench.finish()
    assert bench.scheduler.num_preemptions > 0
    assert late.num_cached == 0


def test_choices_share_the_blocks_of_their_prompt():
    bench = Bench(num_blocks=32, max_tokens=32)
    bench.submit(list(range(10)), max_new=3, n=3)
    bench.step()
    assert bench.blocks.num_used == 3, "three blocks for three sequences of ten tokens"
    bench.step()
    assert bench.blocks.num_used == 5, "the two full ones are shared still"
    assert bench.runner.copies == 2
    bench.finish()


def test_choices_that_find_no_place_wait_and_are_right():
    bench = Bench(max_sequences=2)
    bench.submit(list(range(9)), n=4)
    bench.finish()
    assert len(bench.ended) == 4


def test_when_the_first_choice_goes_the_next_computes_the_prompt():
    bench = Bench(max_tokens=4)
    first, *_ = bench.submit(list(range(10)), n=3, prompt_rows=True)
    bench.step()
    bench.prompt_rows[bench.scheduler.running[0].siblings[0]] = bench.prompt_rows[first]
    bench.cancel(first)
    bench.finish()
    assert len(bench.ended) == 2


def test_prompt_rows_respect_the_row_limit_and_read_no_cache():
    bench = Bench(max_rows=3, max_tokens=16, max_sequences=2, num_blocks=32)
    prompt = list(range(12))
    bench.submit(prompt, max_new=1)
    bench.finish()
    (sequence,) = bench.submit(prompt, max_new=2, prompt_rows=True)
    bench.submit(prompt, max_new=2, prompt_rows=True)
    bench.step()
    assert sequence.num_cached == 0
    bench.finish()


@pytest.mark.parametrize("limits", [{"max_tokens": 0}, {"max_sequences": 0}, {"max_rows": 0}, {"policy": "lifo"}])
def test_impossible_options_are_refused(limits: dict):
    with pytest.raises(UsageError):
        Bench(**limits)


def test_removing_twice_or_before_the_start_does_nothing_bad():
    bench = Bench()
    sequence, other = bench.submit([1, 2])[0], bench.submit([3])[0]
    bench.cancel(sequence)
    bench.scheduler.remove(sequence)
    bench.finish()
    assert bench.ended == [other]


# recurrent state ---------------------------------------------------------------------------------------------------------


def test_a_prompt_with_recurrent_state_goes_on_from_the_last_snapshot():
    bench = Bench(num_blocks=32, stateful=True, num_snapshots=2, max_tokens=16)
    prompt = list(range(10))
    bench.submit(prompt, max_new=1)
    assert [p.num_tokens for p in bench.step().slices] == [8], "cut where a block ends"
    bench.finish()
    (again,) = bench.submit(prompt, max_new=3)
    step = bench.step()
    assert (again.num_cached, step.slices[0].start, step.slices[0].num_tokens) == (8, 8, 2)
    assert bench.runner.restored == 1
    (longer,) = bench.submit([*prompt[:7], 99], max_new=1)
    bench.step()
    assert longer.num_cached == 0, "the block that ends at 4 is known, but not the state there"
    bench.finish()


def test_snapshots_are_bounded_and_the_one_used_least_recently_goes():
    bench = Bench(num_blocks=64, stateful=True, num_snapshots=2, max_tokens=16)
    for first in (10, 20, 10, 30):
        bench.submit([first, 1, 2, 3, 4], max_new=1)
        bench.finish()
    kept = {first: len(bench.blocks.find(np.array([first, 1, 2, 3, 4], np.int32))) for first in (10, 20, 30)}
    assert kept == {10: 1, 20: 0, 30: 1}


def test_a_generated_text_is_found_again_at_the_end_of_its_last_block():
    bench = Bench(num_blocks=32, stateful=True, num_snapshots=8)
    (first,) = bench.submit([1, 2, 3], max_new=8)
    bench.finish()
    text = [*first.tokens[: first.num_tokens].tolist(), 5, 6]
    (again,) = bench.submit(text, max_new=2)
    bench.step()
    assert again.num_cached == 8
    bench.finish()


def test_a_long_answer_drives_no_prompt_out_and_its_own_end_is_found():
    bench = Bench(num_blocks=128, max_blocks=64, stateful=True, num_snapshots=4, max_tokens=16)
    prompt, other = list(range(9)), [30, 1, 2, 3, 4]
    bench.submit(other, max_new=1)
    bench.finish()
    (long,) = bench.submit(prompt, max_new=80)  # 20 blocks
    bench.finish()
    text = long.tokens[: long.num_tokens]
    assert [len(bench.blocks.find(np.array(p, np.int32))) for p in (prompt, other)] == [2, 1]
    assert len(bench.blocks.find(text)) == 22
    assert len(bench.blocks._snapshots) == 3


def test_where_a_prompt_went_on_from_an_answer_the_snapshot_stays():
    bench = Bench(num_blocks=128, max_blocks=64, stateful=True, num_snapshots=4, max_tokens=16)
    (long,) = bench.submit([1, 2, 3], max_new=40)
    while long.num_computed < 20:
        bench.step()
    half = [*long.tokens[:20].tolist(), 5]
    (second,) = bench.submit(half, max_new=1)
    bench.finish()
    assert second.num_cached == 20
    assert len(bench.blocks.find(np.array(half, np.int32))) == 5


def test_choices_of_a_prompt_with_recurrent_state_share_it():
    bench = Bench(num_blocks=32, stateful=True, num_snapshots=2, max_tokens=32)
    _, *others = bench.submit(list(range(10)), max_new=3, n=3)
    bench.finish()
    assert [s.num_cached for s in others] == [8, 8]


def test_a_preempted_sequence_with_recurrent_state_goes_on_from_its_last_block():
    bench = Bench(num_blocks=8, max_blocks=8, max_tokens=12, stateful=True, num_snapshots=16)
    bench.submit([1, 2, 3], max_new=18)
    bench.submit(list(range(20, 29)), max_new=10)
    bench.finish()
    assert bench.scheduler.num_preemptions > 0
    assert bench.runner.restored > 0


class Scheduling(RuleBasedStateMachine):
    """Random requests, steps and cancels under random limits; everything admitted ends with the tokens of a run alone."""

    @initialize(
        policy=st.sampled_from(["fcfs", "shortest-remaining"]),
        prefix_cache=st.booleans(),
        max_tokens=st.integers(1, 12),
        max_sequences=st.integers(1, 5),
        max_rows=st.integers(1, 6),
        num_blocks=st.integers(3, 14),
        block_size=st.integers(1, 5),
        num_snapshots=st.integers(0, 4),
        stateful=st.booleans(),
    )
    def start(self, policy, prefix_cache, max_blocks=6, **limits):
        self.bench = Bench(policy, prefix_cache, max_blocks=max_blocks, **limits)
        self.n_ctx = min(limits["num_blocks"], max_blocks) * limits["block_size"]

    @rule(data=st.data(), n=st.sampled_from([1, 1, 1, 2, 3]), rows=st.booleans(), priority=st.sampled_from([0, 0, 0, -1]))
    def submit(self, data, n, rows, priority):
        if len(self.bench.live) > 12:
            return
        length = data.draw(st.integers(1, self.n_ctx - 1))
        shared = data.draw(st.integers(0, length))  # prompts that begin alike, so that they find each other's blocks
        prompt = [p % 3 for p in range(shared)] + data.draw(st.lists(st.integers(0, 2), min_size=length - shared, max_size=length - shared))
        self.bench.submit(prompt, data.draw(st.integers(1, self.n_ctx - length)), n, priority, prompt_rows=rows and n == 1)

    @rule()
    def step(self):
        self.bench.step()

    @rule(times=st.integers(2, 9))
    def steps(self, times):
        for _ in range(times):
            self.bench.step()

    @precondition(lambda self: self.bench.live)
    @rule(data=st.data())
    def cancel(self, data):
        self.bench.cancel(data.draw(st.sampled_from(list(self.bench.live))))

    @invariant()
    def references_are_exact(self):
        if not hasattr(self, "bench"):
            return
        bench, blocks = self.bench, self.bench.blocks
        held = [s.blocks.ids for s in bench.live if s.blocks is not None]
        assert blocks._refs == [sum(ids.count(b) for ids in held) for b in range(blocks.num_blocks)]
        assert blocks.num_free + blocks.num_used + blocks.num_cached == blocks.num_blocks
        assert all(blocks._nodes[b] for b in blocks._snapshots)
        assert blocks._passing <= blocks._snapshots.keys()
        if bench.runner.stateful:
            assert sorted([*blocks._snapshots.values(), *blocks._free_snapshots]) == list(range(bench.runner.num_snapshots))
        slots = [s.slot for s in bench.scheduler.running]
        assert len(set(slots)) == len(slots) <= bench.scheduler.max_running
        assert sorted(slots + bench.scheduler._slots) == list(range(bench.scheduler.max_running))
        assert all(s.blocks is None and s.num_computed == 0 and not s.running for s in bench.scheduler.waiting)
        assert [s.rank for s in bench.scheduler.running] == sorted(s.rank for s in bench.scheduler.running)

    def teardown(self):
        if hasattr(self, "bench"):
            self.bench.finish()


Scheduling.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestScheduling = Scheduling.TestCase


def test_overhead_of_a_decode_step_is_reported(record_property):
    """Not a bar (no timed assertions): the figure is in the report of the run."""
    bench = Bench(block_size=64, num_blocks=16, max_blocks=16)
    bench.submit(list(range(20)), max_new=900)
    step = bench.scheduler.schedule()
    bench.scheduler.advance(step)
    steps = 500
    began = time.perf_counter()
    for _ in range(steps):
        bench.scheduler.running[0].append(1)
        step = bench.scheduler.schedule()
        bench.scheduler.advance(step)
    record_property("decode_step_us", (time.perf_counter() - began) / steps * 1e6)
    print(f"{(time.perf_counter() - began) / steps * 1e6:.1f} µs per decode step")
