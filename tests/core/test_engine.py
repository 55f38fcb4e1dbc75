"""The engine: tokens of a model alone, stops, log-probabilities, cancels, events and refusals. How it fails and ends is in
`test_engine_ends.py`."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastllm.core import _kernels
from fastllm.core.engine import Engine
from fastllm.core.errors import Cancelled, ContextOverflow, EngineError, InvalidRequest, QueueFull, UsageError
from fastllm.core.request import Request, RequestHandle, TokenEvent
from fastllm.core.sampling import SamplingParams, stream_id

from .fake_runner import GREEDY, VOCAB, FakeRunner, Gate, all_free, alone, ask, next_logits

# results -----------------------------------------------------------------------------------------------------------------


def test_a_request_gets_the_tokens_of_the_model_alone():
    with Engine(FakeRunner()) as engine:
        handle = engine.submit(ask([1, 2, 3], max_tokens=9))
        events = list(handle)
    want, reason = alone([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=9))
    assert [e.token_id for e in events] == want
    assert [e.finish_reason for e in events] == [None] * 8 + [reason]
    assert handle.result().choices[0].token_ids == want
    assert engine._runner.closed
    all_free(engine)


def test_seeded_choices_are_streams_of_their_own():
    params = SamplingParams(temperature=1.0, seed=-5, n=4, max_tokens=8)
    with Engine(FakeRunner(num_blocks=32, max_sequences=2)) as engine:
        result = engine.submit(Request([4, 5, 6, 7, 8], params)).result()
        other = engine.submit(Request([4, 5, 6, 7, 8], params, stream=stream_id(1, 0))).result()
    want = [alone([4, 5, 6, 7, 8], params, (-5) % 2**64, i)[0] for i in range(4)]
    assert [c.token_ids for c in result.choices] == want
    assert len({tuple(c.token_ids) for c in result.choices + other.choices}) == 8


def test_a_drawn_seed_is_told_and_repeats_the_answer():
    with Engine(FakeRunner()) as engine:
        first = engine.submit(Request([1, 2], SamplingParams(temperature=1.0, max_tokens=8)))
        tokens = first.result().choices[0].token_ids
        again = engine.submit(Request([1, 2], SamplingParams(temperature=1.0, max_tokens=8, seed=first.seed)))
        assert again.result().choices[0].token_ids == tokens
        other = engine.submit(Request([1, 2], SamplingParams(temperature=1.0, max_tokens=8)))
        assert other.seed != first.seed


def test_penalties_and_biases_see_the_prompt_and_the_output():
    params = SamplingParams(
        temperature=0.9, seed=1, max_tokens=12, repetition_penalty=1.5, frequency_penalty=1.0, presence_penalty=0.5,
        logit_bias={3: 4.0, 7: -100}, repeat_last_n=4,
    )  # fmt: skip
    with Engine(FakeRunner()) as engine:
        result = engine.submit(Request([3, 3, 9], params)).result()
    assert result.choices[0].token_ids == alone([3, 3, 9], params, 1)[0]


def test_end_ids_stop_ids_and_the_limit_end_an_answer():
    long = alone([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=20))[0]
    end = long[3]
    at = long.index(end)
    with Engine(FakeRunner()) as engine:
        result = engine.submit(ask([1, 2, 3], end_ids=[end], max_tokens=20)).result().choices[0]
        assert (result.token_ids, result.finish_reason) == (long[: at + 1], "stop")
        result = engine.submit(ask([1, 2, 3], stop_token_ids=[end], ignore_eos=True, max_tokens=20)).result().choices[0]
        assert (result.token_ids, result.finish_reason) == (long[: at + 1], "stop")
        result = engine.submit(ask([1, 2, 3], end_ids=[end], ignore_eos=True, max_tokens=20)).result().choices[0]
        assert (result.token_ids, result.finish_reason) == (long, "length")


def test_min_tokens_keeps_every_end_away():
    free = alone([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=2))[0]
    params = SamplingParams(temperature=0.0, max_tokens=10, min_tokens=4, stop_token_ids=(free[1],))
    with Engine(FakeRunner()) as engine:
        result = engine.submit(Request([1, 2, 3], params, end_ids=[free[0]])).result().choices[0]
    want = alone([1, 2, 3], params, end_ids=[free[0]])
    assert (result.token_ids, result.finish_reason) == want
    assert len(result.token_ids) >= 4


def test_the_context_limit_ends_an_answer_and_a_full_prompt_is_refused():
    with Engine(FakeRunner(block_size=4, max_blocks=3)) as engine:
        result = engine.submit(ask(list(range(11)), max_tokens=None)).result().choices[0]
        assert (len(result.token_ids), result.finish_reason) == (1, "length")
        result = engine.submit(ask([1], max_tokens=100)).result().choices[0]
        assert (len(result.token_ids), result.finish_reason) == (11, "length")
        with pytest.raises(ContextOverflow) as caught:
            engine.submit(ask(list(range(12))))
        assert caught.value.fields == {"n_prompt_tokens": 12, "n_ctx": 12}
    with Engine(FakeRunner(), max_context=5) as engine, pytest.raises(ContextOverflow, match="limit is 5"):
        engine.submit(ask([1, 2, 3, 4, 5]))


def test_log_probabilities_are_those_of_the_raw_row():
    params = SamplingParams(temperature=2.0, seed=3, max_tokens=4, logprobs=3, logit_bias={5: 50.0})
    with Engine(FakeRunner()) as engine:
        choice = engine.submit(Request([1, 2], params)).result().choices[0]
    assert choice.token_ids == [5] * 4, "the bias decides the token, and not its log-probability"
    context = [1, 2]
    for entry in choice.logprobs:
        row = next_logits(np.array(context))[None]
        chosen, ids, values = _kernels.logprobs(row, np.array([entry.token_id], np.int32), 3)
        assert entry.logprob == chosen[0]
        assert entry.top == tuple(zip(ids[0].tolist(), values[0].tolist(), strict=True))
        context.append(entry.token_id)


@pytest.mark.parametrize("n", [1, 3])
def test_prompt_log_probabilities_cover_the_prompt_whatever_the_cache_holds(n):
    prompt = list(range(1, 24))
    with Engine(FakeRunner(num_blocks=32, max_tokens=8)) as engine:
        engine.submit(ask(prompt)).result()
        handle = engine.submit(ask(prompt, prompt_logprobs=True, logprobs=2, n=n))
        events = list(handle)
        result = handle.result()
    assert result.timings.cached_tokens == 0
    assert [e.prompt_logprobs is not None for e in events].count(True) == 1
    assert len(result.prompt_logprobs) == 23
    assert result.prompt_logprobs[0] is None
    for p in range(1, 23):
        chosen, ids, _ = _kernels.logprobs(next_logits(np.array(prompt[:p]))[None], np.array([prompt[p]], np.int32), 2)
        entry = result.prompt_logprobs[p]
        assert (entry.token_id, entry.logprob) == (prompt[p], chosen[0])
        assert [token for token, _ in entry.top] == ids[0].tolist()
    assert all(c.token_ids == alone(prompt, GREEDY)[0] for c in result.choices)


def test_an_echo_of_the_prompt_generates_nothing_and_may_fill_the_context():
    with Engine(FakeRunner(), max_context=6) as engine:
        handle = engine.submit(ask([1, 2, 3, 4, 5, 6], max_tokens=0, prompt_logprobs=True))
        (event,) = list(handle)
    assert (event.token_id, event.finish_reason, len(event.prompt_logprobs)) == (None, "length", 6)
    assert handle.result().choices[0].token_ids == []


def test_timings_and_counts():
    prompt = list(range(9))
    with Engine(FakeRunner()) as engine:
        engine.submit(ask(prompt)).result()
        timings = engine.submit(ask(prompt)).result().timings
        stats = engine.stats()
    assert (timings.prompt_tokens, timings.cached_tokens, timings.decode_tokens) == (9, 8, 6)
    assert 0 <= timings.queue_s <= timings.ttft_s
    assert timings.ttft_s == pytest.approx(timings.queue_s + timings.prompt_s)
    assert timings.decode_s > 0
    assert (stats.tokens_generated, stats.tokens_computed, stats.requests_finished, stats.steps) == (12, 20, 2, 12)
    assert (stats.prefix_hit_tokens, stats.prefix_looked_up_tokens) == (8, 18)
    assert stats.healthy


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_same_request_gives_the_same_tokens_whatever_happens_around_it(data):
    """Random limits, neighbours, chunks, cache and cancels: equality with the model alone, not closeness."""
    draw = data.draw
    stateful = draw(st.booleans())
    runner = FakeRunner(
        block_size=draw(st.integers(1, 5)),
        num_blocks=draw(st.integers(8, 20)),
        max_blocks=8,
        max_tokens=draw(st.integers(1, 12)),
        max_sequences=draw(st.integers(1, 5)),
        max_rows=draw(st.integers(1, 6)),
        stateful=stateful,
        num_snapshots=draw(st.integers(0, 4)) if stateful else 0,
    )
    policy = draw(st.sampled_from(["fcfs", "shortest-remaining"]))
    ends = [0, 1]
    with Engine(runner, policy=policy, prefix_cache=draw(st.booleans()), stateful=stateful) as engine:
        pending = []
        for number in range(draw(st.integers(1, 8))):
            length = draw(st.integers(1, engine.max_context - 1))
            prompt = [p % 5 for p in range(length - 1)] + [draw(st.integers(0, VOCAB - 1))]
            params = SamplingParams(
                temperature=draw(st.sampled_from([0.0, 1.0])),
                seed=number,
                n=draw(st.sampled_from([1, 1, 2, 3])),
                max_tokens=draw(st.one_of(st.none(), st.integers(1, 12))),
                repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
                prompt_logprobs=draw(st.booleans()),
            )
            handle = engine.submit(Request(prompt, params, ends, str(number)))
            if draw(st.integers(0, 4)) == 0:
                handle.cancel(draw(st.sampled_from([None, 0, params.n - 1])))
            else:
                pending.append((handle, prompt, params))
        for handle, prompt, params in pending:
            for index, choice in enumerate(handle.result(60).choices):
                assert (choice.token_ids, choice.finish_reason) == alone(prompt, params, params.seed, index, ends, engine.max_context)
            if params.prompt_logprobs:
                assert len(handle.result().prompt_logprobs) == len(prompt)
    all_free(engine)


# cancelling --------------------------------------------------------------------------------------------------------------


def test_a_cancel_during_a_step_frees_the_blocks_with_that_step():
    runner = FakeRunner()
    gate = Gate(runner)
    with Engine(runner) as engine:
        handle = engine.submit(ask([1, 2, 3]))
        other = engine.submit(ask([7], max_tokens=3))
        gate.wait()
        handle.cancel()
        assert not handle.done
        gate.step()
        gate.wait()
        assert handle.done
        assert engine.stats().requests_cancelled == 1
        assert engine.stats().blocks_used == len(engine._jobs) == 1
        gate.open()
        with pytest.raises(Cancelled, match="'r' was cancelled"):
            list(handle)
        with pytest.raises(Cancelled):
            handle.result()
        assert other.result().choices[0].token_ids == alone([7], SamplingParams(temperature=0.0, max_tokens=3))[0]


def test_a_queued_request_can_be_cancelled():
    runner = FakeRunner(max_sequences=1)
    gate = Gate(runner)
    with Engine(runner, max_queue=1) as engine:
        first = engine.submit(ask([1]))
        gate.wait()
        second = engine.submit(ask([2]))
        with pytest.raises(QueueFull):
            engine.submit(ask([3]))
        second.cancel()
        gate.step()
        gate.wait()
        assert second.done
        third = engine.submit(ask([3]))
        gate.open()
        assert first.result().choices[0].token_ids == alone([1], GREEDY)[0]
        assert third.result().choices[0].token_ids == alone([3], GREEDY)[0]


def test_one_choice_can_be_cancelled_and_the_others_go_on():
    runner = FakeRunner(num_blocks=32)
    gate = Gate(runner)
    with Engine(runner) as engine:
        handle = engine.submit(ask([1, 2, 3], n=3, temperature=1.0, seed=9, max_tokens=8))
        gate.wait()
        handle.cancel(0)  # its prompt is being computed: another choice goes on with it
        gate.step()
        gate.wait()
        handle.cancel(7)  # no such choice
        gate.open()
        result = handle.result()
    params = SamplingParams(temperature=1.0, max_tokens=8)
    assert [c.finish_reason for c in result.choices] == ["cancelled", "length", "length"]
    assert [c.token_ids for c in result.choices] == [[], *(alone([1, 2, 3], params, 9, i)[0] for i in (1, 2))]


def test_a_choice_that_is_cancelled_before_it_starts_takes_no_place():
    runner = FakeRunner(num_blocks=32)
    gate = Gate(runner)
    with Engine(runner) as engine:
        handle = engine.submit(ask([1, 2, 3], n=3))
        gate.wait()
        handle.cancel(1)
        gate.step()
        gate.wait()
        assert engine.stats().running == 2
        gate.open()
        assert [c.finish_reason for c in handle.result().choices] == ["length", "cancelled", "length"]


def test_cancelling_what_has_ended_or_leaving_the_context_twice_is_harmless():
    runner = FakeRunner()
    gate = Gate(runner)
    with Engine(runner) as engine:
        gate.step(len(alone([1], GREEDY)[0]))
        with engine.submit(ask([1])) as handle:
            handle.result()
        handle.cancel()
        gate.step()
        with engine.submit(ask([2], max_tokens=None)) as left:
            next(iter(left))  # and no second token while the gate is shut
        gate.open()
        with pytest.raises(Cancelled):
            left.result()
    handle.cancel()
    assert handle.result().choices[0].token_ids == alone([1], GREEDY)[0]


# events --------------------------------------------------------------------------------------------------------------------


def test_on_event_hears_every_token_and_the_end():
    heard: list[tuple[int | None, str | None]] = []
    ended = threading.Event()

    def hear(handle: RequestHandle, event: TokenEvent | None) -> None:
        if event is None:
            ended.set()
        else:
            heard.append((event.token_id, event.finish_reason))

    with Engine(FakeRunner()) as engine:
        handle = engine.submit(ask([1, 2], max_tokens=2), hear)
        assert ended.wait(30)
    assert heard == [(t, r) for t, r in zip(alone([1, 2], GREEDY)[0][:2], (None, "length"), strict=True)]
    assert handle.done


def test_what_on_event_raises_fails_that_request_only():
    def broken(handle: RequestHandle, event: TokenEvent | None) -> None:
        raise ValueError("a parser that fell over")

    with Engine(FakeRunner()) as engine:
        bad = engine.submit(ask([1, 2], request_id="bad"), broken)
        good = engine.submit(ask([1, 2]))
        with pytest.raises(EngineError, match="'bad' failed: ValueError: a parser that fell over"):
            bad.result()
        assert good.result().choices[0].token_ids == alone([1, 2], GREEDY)[0]
        assert engine.healthy
        assert engine.stats().requests_failed == 1


def test_what_on_event_raises_at_a_cancelled_choice_fails_that_request_only():
    runner = FakeRunner()
    gate = Gate(runner)

    def broken(handle: RequestHandle, event: TokenEvent | None) -> None:
        if event is not None and event.finish_reason == "cancelled":
            raise ValueError("fell over")

    with Engine(runner) as engine:
        bad = engine.submit(ask([1, 2], n=2), broken)
        gate.wait()
        bad.cancel(1)
        gate.open()
        with pytest.raises(EngineError, match="fell over"):
            bad.result()
        assert engine.healthy
        assert engine.submit(ask([1, 2])).result().choices[0].token_ids == alone([1, 2], GREEDY)[0]


def test_on_event_may_submit_and_close():
    handles: list[RequestHandle] = []
    done = threading.Event()

    def resubmit(handle: RequestHandle, event: TokenEvent | None) -> None:
        if event is None and len(handles) == 1:
            handles.append(engine.submit(ask([5]), resubmit))
        elif event is None:
            engine.close()
            done.set()

    engine = Engine(FakeRunner())
    handles.append(engine.submit(ask([4]), resubmit))
    assert done.wait(30)
    engine.close()
    assert [h.result().choices[0].token_ids for h in handles] == [alone([t], GREEDY)[0] for t in (4, 5)]
    assert engine._runner.closed


def test_iterating_again_ends_at_once_and_a_result_may_time_out():
    runner = FakeRunner()
    gate = Gate(runner)
    with Engine(runner) as engine:
        handle = engine.submit(ask([1]))
        with pytest.raises(TimeoutError, match="'r' has not ended"):
            handle.result(0.001)
        gate.open()
        assert len(list(handle)) == 6
        assert list(handle) == []


# refusals ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt_ids": []}, "prompt_ids"),
        ({"prompt_ids": [1, VOCAB]}, "prompt_ids"),
        ({"prompt_ids": [-1]}, "prompt_ids"),
        ({"prompt_ids": [True]}, "prompt_ids"),
        ({"prompt_ids": [1.0]}, "prompt_ids"),
        ({"prompt_ids": [10**6000]}, "prompt_ids"),
        ({"prompt_ids": "text"}, "prompt_ids"),
        ({"prompt_ids": np.array([1.5])}, "prompt_ids"),
        ({"prompt_ids": np.array([[1]])}, "prompt_ids"),
        ({"prompt_ids": np.array([2**40])}, "prompt_ids"),
        ({"prompt_ids": np.array([-1])}, "prompt_ids"),
        ({"end_ids": [VOCAB]}, "end_ids"),
        ({"salt": "a b"}, "salt"),
        ({"salt": "é"}, "salt"),
        ({"salt": "x" * 129}, "salt"),
        ({"salt": 5}, "salt"),
        ({"priority": 1.5}, "priority"),
        ({"priority": 2**31}, "priority"),
        ({"stream": -1}, "stream"),
        ({"stream": 2**70}, "stream"),
        ({"params": SamplingParams(temperature=float("nan"))}, "temperature"),
        ({"params": SamplingParams(n=0)}, "n"),
        ({"params": SamplingParams(stop_token_ids=[VOCAB])}, "stop_token_ids"),
    ],
)
def test_a_bad_request_is_refused_by_the_name_of_its_field(change, field):
    with Engine(FakeRunner()) as engine:
        with pytest.raises(InvalidRequest) as caught:
            engine.submit(Request(**{"prompt_ids": [1], "params": GREEDY, **change}))
        assert caught.value.who == field
        assert len(caught.value.message) < 200
        assert engine._num_queued == 0
        assert engine.submit(ask([1])).result().choices[0].token_ids == alone([1], GREEDY)[0]


def test_a_full_queue_refuses_and_says_when_to_come_back():
    runner = FakeRunner(max_sequences=1)
    gate = Gate(runner)
    with Engine(runner, max_queue=2) as engine:
        handles = [engine.submit(ask([1]))]
        gate.wait()
        handles += [engine.submit(ask([t])) for t in (2, 3)]
        assert engine.stats().waiting == 2
        with pytest.raises(QueueFull, match="2 requests wait") as caught:
            engine.submit(ask([4]))
        assert 1 <= caught.value.fields["retry_after_s"] <= 60
        gate.open()
        for handle in handles:
            handle.result()
        engine.submit(ask([4])).result()


@pytest.mark.parametrize("options", [{"max_context": 0}, {"max_context": 65}, {"max_queue": 0}, {"policy": "random"}])
def test_options_that_do_not_fit_are_refused(options):
    with pytest.raises(UsageError):
        Engine(FakeRunner(), **options)


def test_a_choice_of_a_paused_request_does_not_start_because_another_is_cancelled():
    got, release = [], threading.Event()
    with Engine(FakeRunner(before=lambda batch: release.wait(30))) as engine:
        first = engine.submit(Request([9, 9], SamplingParams(temperature=0.0, max_tokens=2)))  # keeps the engine busy
        paused = engine.submit(Request([1, 2, 3], SamplingParams(temperature=1.0, max_tokens=3, n=2)), lambda handle, event: got.append(event))
        paused.pause()
        paused.cancel(0)
        release.set()
        first.result()
        engine.submit(Request([5, 5], SamplingParams(temperature=0.0, max_tokens=4))).result()
        assert [e.finish_reason for e in got] == ["cancelled"]
        paused.resume()
        while not paused.done:
            engine.submit(Request([5, 5], SamplingParams(temperature=0.0, max_tokens=1))).result()
    assert [e.index for e in got if e is not None and e.token_id is not None] == [1, 1, 1]


@pytest.mark.parametrize(("prompt", "steps"), [([1], [(0, 1), (1, 0)]), (list(range(1, 18)), [(0, 16), (0, 1), (1, 0), (1, 0)])])
def test_the_pace_is_told_of_decodes_only_where_the_prompt_is_done(prompt, steps):
    """A slice of one token may be a prompt's last. Of steps that repeat the one before, the fourth of all is told and the third is not."""
    with Engine(FakeRunner()) as engine:
        told: list[tuple[int, int]] = []
        engine._pace.observe = lambda decodes, tokens, seconds: told.append((decodes, tokens))
        engine.submit(ask(prompt, max_tokens=3)).result(30)
    assert told == steps


def test_memory_for_the_next_blocks_is_asked_for_ahead_and_one_block_a_step():
    """Four sequences that start together begin their blocks together."""
    begun, ready, num_touched = [], [], [0]

    def before(batch):
        first = (batch.positions % 8 == 0) & (batch.context_len > 8)  # decodes that begin a block
        begun.extend((batch.slots[first] // 8).tolist())
        ready.extend(block in runner.touched for block in (batch.slots[first] // 8).tolist())
        assert len(runner.touched) - num_touched[0] <= 1
        num_touched[0] = len(runner.touched)

    runner = FakeRunner(block_size=8, num_blocks=40, before=before)
    with Engine(runner, prefix_cache=False) as engine:
        with engine._wake:
            handles = [engine.submit(ask([i], max_tokens=18)) for i in range(4)]
        for handle, start in zip(handles, range(4), strict=True):
            assert handle.result(60).choices[0].token_ids == alone([start], SamplingParams(temperature=0.0, max_tokens=18))[0]
    assert len(begun) == 8
    assert all(ready)
    assert not set(begun[:4]) & set(begun[4:])


def test_a_step_with_a_prompt_beside_decodes_is_thought_to_take_as_long_as_the_last():
    """So that its tokens leave together with others; where nobody decodes, nothing is known."""
    told, steps = [], []

    def before(batch):
        steps.append((batch.dims.T, told[-1]))
        if len(steps) == 3:
            engine.submit(ask([7] * 5, max_tokens=1))

    with Engine(FakeRunner(before=before)) as engine:
        engine.on_handed_out = told.append
        engine.submit(ask([1, 2, 3], max_tokens=8)).result(60)
    assert steps[0] == (3, None)
    mixed = [next_s for tokens, next_s in steps[1:] if tokens > 1]
    assert mixed
    assert None not in [next_s for _, next_s in steps[1:]]


@pytest.mark.parametrize("step", [1, 4, 7])  # of the eight that read the long prompt
def test_a_short_request_is_answered_by_the_step_after_it_came_and_that_is_a_short_one(step):
    """While a prompt of 4,000 tokens is read in chunks of 512, from whose beginning it waits for fewer tokens than two chunks have."""
    sizes, first, handles = [], [], []

    def before(batch):
        sizes.append(batch.dims.T)
        if len(sizes) == step:
            handles.append(engine.submit(ask([7] * 16), lambda _, event: first.append(len(sizes))))

    with Engine(FakeRunner(block_size=64, num_blocks=80, max_blocks=80, max_tokens=512, before=before)) as engine:
        engine.submit(Request([5] * 4000, GREEDY)).result(60)
        handles[0].result(60)
    assert first[0] == step + 1
    assert sizes[step - 1] + sizes[step] == 512 + 256 + 16 < 2 * 512


def test_whoever_collects_events_is_told_once_a_step_and_before_the_thread_sleeps():
    told, events, runner = [], [], FakeRunner()
    gate = Gate(runner)
    with Engine(runner) as engine:
        engine.on_handed_out = lambda next_s: told.append((len(events), next_s))
        handles = [engine.submit(ask([1 + i, 2], max_tokens=5), lambda _, event: events.append(event)) for i in range(2)]
        gate.open()
        for handle in handles:
            handle.result(60)
    counts = [count for count, _ in told]
    assert counts == sorted(counts)
    assert told[-1] == (12, None), "5 tokens and the end of each; what comes next is not known"
    assert len(set(counts)) <= 1 + runner.steps, "not once for each event"
    known = [next_s for _, next_s in told if next_s is not None]
    assert known, "steps of the same sequences take as long as the last"
    assert all(0 < next_s < 60 for next_s in known)
