"""The engine holds answers to a constraint, whatever else runs; what a constraint does wrong is its own request's matter."""

from __future__ import annotations

import numpy as np
import pytest

from fastllm.core.engine import Engine
from fastllm.core.errors import EngineError, InvalidRequest
from fastllm.core.request import Request
from fastllm.core.sampling import SamplerState, SamplingParams, build_rows, move_rows

from .fake_runner import VOCAB, FakeRunner, alone

WORDS = (VOCAB + 31) // 32


class Only:
    """Allows the tokens of step i in `steps[i]`; complete after the last. Counts what it is asked."""

    def __init__(self, *steps):
        self.steps, self.at, self.asked = steps, 0, 0

    def mask(self):
        self.asked += 1
        mask = np.zeros(WORDS, np.uint32)
        for token in self.steps[self.at]:
            mask[token // 32] |= np.uint32(1 << (token % 32))
        return mask

    def accept(self, token_id):
        assert token_id in self.steps[self.at]
        self.at += 1
        return self.at == len(self.steps)


def events(engine, constraint, prompt=(1, 2, 3), **params):
    full = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 3, **params}
    return list(engine.submit(Request(list(prompt), SamplingParams(**full), end_ids=[7], constraint=constraint)))


@pytest.fixture
def engine():
    with Engine(FakeRunner()) as made:
        yield made


def test_tokens_are_among_the_allowed_and_a_complete_answer_ends(engine):
    got = events(engine, lambda: Only({5, 33}, {9}, range(VOCAB), {4, 39}), max_tokens=20)
    ids = [e.token_id for e in got]
    assert ids[0] in (5, 33)
    assert ids[1] == 9
    assert ids[3] in (4, 39)
    assert [(e.token_id, e.finish_reason) for e in got[4:]] == [(None, "stop")]
    assert all(e.finish_reason is None for e in got[:4])


def test_a_complete_answer_at_the_token_limit_has_stopped(engine):
    got = events(engine, lambda: Only({5}, {6}), max_tokens=2)
    assert [(e.token_id, e.finish_reason) for e in got] == [(5, None), (6, None), (None, "stop")]
    got = events(engine, lambda: Only({5}, {6}, {8}), max_tokens=2)
    assert [(e.token_id, e.finish_reason) for e in got] == [(5, None), (6, "length")]
    got = events(engine, lambda: Only({5}, {7}, {8}), max_tokens=9)
    assert [(e.token_id, e.finish_reason) for e in got] == [(5, None), (7, "stop")]  # the model's own end


def test_the_draw_is_the_one_of_the_same_distribution_without_the_banned(engine):
    free = [e.token_id for e in events(engine, None, max_tokens=6)]
    assert free == alone([1, 2, 3], SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_tokens=6), 3, end_ids=[7])[0]
    assert [e.token_id for e in events(engine, lambda: Only(*[range(VOCAB)] * 9), max_tokens=6)] == free
    banned = {t: -100.0 for t in range(VOCAB) if t not in (4, 11)}
    biased = [e.token_id for e in events(engine, None, max_tokens=6, logit_bias=banned)]
    assert [e.token_id for e in events(engine, lambda: Only(*[{4, 11}] * 9), max_tokens=6)] == biased


def test_each_choice_has_its_own(engine):
    made = []

    def make():
        made.append(Only({1, 2, 3}, {4}, {5, 6}))
        return made[-1]

    got = events(engine, make, n=3, max_tokens=9)
    assert len(made) == 3
    for index in range(3):
        ids = [e.token_id for e in got if e.index == index]
        assert ids[0] in (1, 2, 3)
        assert ids[1] == 4
        assert ids[2] in (5, 6)
        assert ids[3] is None


def test_neighbours_change_nothing_and_are_not_changed():
    with Engine(FakeRunner()) as engine:
        steps = [set(range(i % 5, VOCAB, 5)) for i in range(12)]
        alone_held = [e.token_id for e in events(engine, lambda: Only(*steps), max_tokens=20)]
        alone_free = [e.token_id for e in events(engine, None, prompt=(4, 4), max_tokens=12, ignore_eos=True)]
        params = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, seed=3, max_tokens=20)
        free = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, seed=3, max_tokens=12, ignore_eos=True)
        handles = []
        for _ in range(4):
            handles.append((engine.submit(Request([1, 2, 3], params, end_ids=[7], constraint=lambda: Only(*steps))), alone_held))
            handles.append((engine.submit(Request([4, 4], free, end_ids=[7])), alone_free))
        for handle, expected in handles:
            assert [e.token_id for e in handle] == expected


class PanicError(BaseException):
    """As a library's of another language: no Exception."""


class Breaks(Only):
    """Raises on the n-th question."""

    def __init__(self, when, what, panics):
        super().__init__(*[range(VOCAB)] * 50)
        self.when, self.what, self.panics = when, what, panics

    def mask(self):
        if self.what == "mask" and self.at == self.when:
            raise (PanicError if self.panics else ValueError)("the grammar is lost")
        return super().mask()

    def accept(self, token_id):
        if self.what == "accept" and self.at == self.when:
            raise (PanicError if self.panics else EngineError)("the grammar is lost")
        return super().accept(token_id)


@pytest.mark.parametrize("what", ["mask", "accept"])
@pytest.mark.parametrize("when", [0, 3])
@pytest.mark.parametrize("panics", [False, True])
def test_a_constraint_that_fails_fails_alone(engine, what, when, panics):
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    good = [engine.submit(Request([i, 2], params, end_ids=[7])) for i in range(3)]
    bad = engine.submit(Request([1, 2, 3], params, constraint=lambda: Breaks(when, what, panics)))
    with pytest.raises(EngineError, match="the grammar is lost"):
        list(bad)
    for i, handle in enumerate(good):
        assert [e.token_id for e in handle] == alone([i, 2], params)[0]
    assert engine.healthy
    assert engine.stats().running == 0
    assert engine.stats().blocks_used == 0


def test_a_constraint_that_cannot_be_made_is_refused_at_submit(engine):
    def make():
        raise InvalidRequest("no such grammar")

    with pytest.raises(InvalidRequest, match="no such grammar"):
        engine.submit(Request([1], SamplingParams(), constraint=make))


def test_the_grammar_wins_over_bans(engine):
    got = events(engine, lambda: Only({5}, {7}), max_tokens=9, min_tokens=4, logit_bias={5: -100.0})
    assert [(e.token_id, e.finish_reason) for e in got] == [(5, None), (7, "stop")]
    got = events(engine, lambda: Only({5, 6}, {8}), max_tokens=9, logit_bias={5: -100.0})
    assert got[0].token_id == 6  # one is left, so the ban holds


def test_rows_without_a_mask_are_free():
    states = [SamplerState(SamplingParams(), [1], 0) for _ in range(3)]
    mask = np.zeros(WORDS, np.uint32)
    rows = build_rows(states, VOCAB, [None, mask, None])
    assert rows.mask[0].tolist() == rows.mask[2].tolist() == [0xFFFFFFFF] * WORDS
    assert not rows.mask[1].any()
    assert build_rows(states, VOCAB, [None] * 3).mask is None


@pytest.mark.parametrize("mask", [np.zeros(7, np.uint32), [1, 2], np.ones(WORDS), np.zeros(WORDS, np.uint32)])
def test_a_wrong_mask_fails_its_own_request(engine, mask):
    class Wrong(Only):
        def mask(self):
            return mask

    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    for _ in range(4):
        good = engine.submit(Request([3, 2], params, end_ids=[7]))
        with pytest.raises(EngineError, match="constraint"):
            list(engine.submit(Request([1, 2, 3], params, constraint=lambda: Wrong({1}))))
        assert [e.token_id for e in good] == alone([3, 2], params)[0]
    assert engine.healthy


def test_rows_with_masks_that_are_moved_on_are_those_that_would_be_built():
    """The native sampler keeps pointers into the arrays: they are written in place, and what it chooses is what new arrays give."""
    rng, logits = np.random.default_rng(0), np.random.default_rng(1).normal(size=(3, VOCAB)).astype(np.float32)
    states = [SamplerState(SamplingParams(temperature=1.0, seed=s), [1, 2], s) for s in range(3)]

    def masks():
        drawn = [rng.integers(1, 2**32, WORDS, dtype=np.uint64).astype(np.uint32) for _ in states]
        return [None if rng.random() < 0.3 else mask for mask in drawn[:2]] + drawn[2:]

    rows = build_rows(states, VOCAB, masks())
    kernel = rows.kernel
    for _ in range(60):
        for state in states:
            state.append(5)
        wanted = masks()
        assert move_rows(rows, states, wanted)
        assert rows.kernel is kernel
        built = build_rows(states, VOCAB, wanted)
        assert (rows.mask == built.mask).all()
        assert kernel.choose(logits).tolist() == built.kernel.choose(logits).tolist()
    assert not move_rows(rows, states), "a step without masks has no use for arrays with some"
    assert not move_rows(build_rows(states, VOCAB), states, masks())
