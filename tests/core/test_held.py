"""Rows that are held to a constraint get the token of its mask, to the bit, whatever is asked instead of the mask."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import numpy as np
import pytest

from fastllm.core import _kernels
from fastllm.core._kernels import UNDECIDED, Sampler
from fastllm.core.engine import Engine
from fastllm.core.errors import EngineError, ShapeError
from fastllm.core.request import Request
from fastllm.core.sampling import SamplingParams

from .fake_runner import VOCAB, FakeRunner
from .test_sampling import reference_exp, reference_sample

WORDS = (VOCAB + 31) // 32


def packed(allowed):
    """Bools [n] as u32 [ceil(n / 32)]."""
    bits = np.zeros((len(allowed) + 31) // 32 * 32, bool)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view(np.uint32)


def drawn_rows(rng, n, rows):
    """Logits [rows, n] of many kinds: peaked, flat, with ties, with tokens of no weight."""
    scale = rng.choice([0.0, 0.3, 2.0, 8.0, 60.0], (rows, 1))
    logits = (rng.normal(size=(rows, n)) * scale).astype(np.float32)
    return np.where(rng.random((rows, 1)) < 0.3, np.round(logits), logits).astype(np.float32)


def drawn_params(rng, rows):
    """Parameters of the rows of a sampler, none of them rare."""
    return {
        "u": np.where(rng.random(rows) < 0.1, rng.choice([0.0, 1 - 2.0**-53], rows), rng.random(rows)),
        "temperature": rng.choice([0.0, 0.1, 0.7, 1.0, 2.5], rows).astype(np.float32),
        "top_k": rng.choice([0, 1, 2, 5, 40, 72, 73, 1000], rows).astype(np.int32),
        "top_p": rng.choice([0.0, 0.3, 0.95, 0.99, 1.0], rows).astype(np.float32),
        "min_p": rng.choice([0.0, 0.0, 0.02, 0.5, 1.0], rows).astype(np.float32),
    }


def drawn_adjustments(rng, n, rows):
    """Biases, bans and penalties of some tokens of some rows."""
    counts = np.where(rng.random(rows) < 0.5, 0, rng.integers(1, min(n, 12), rows))
    start = np.zeros(rows + 1, np.int32)
    np.cumsum(counts, out=start[1:])
    total = int(start[-1])
    ids = [rng.choice(n, count, replace=False) for count in counts]
    return {
        "adjust_start": start,
        "adjust_ids": np.concatenate([*ids, np.zeros(0)]).astype(np.int32),
        "adjust_bias": rng.choice([0.0, 3.0, -5.0, -np.inf], total).astype(np.float32),
        "adjust_repeat": rng.choice([1.0, 1.3, 0.8], total).astype(np.float32),
        "adjust_sub": rng.choice([0.0, 0.7, -1.0], total).astype(np.float32),
    }


def drawn_case(rng, n, rows):
    """(logits f32 [rows, n], arguments of `Sampler`, which tokens may come: bool [rows, n], at least one of each row)."""
    logits, params = drawn_rows(rng, n, rows), drawn_params(rng, rows)
    if rng.random() < 0.5:
        params |= drawn_adjustments(rng, n, rows)
    allowed = rng.random((rows, n)) < rng.choice([0.003, 0.05, 0.5, 0.9, 1.0], (rows, 1))
    allowed[np.arange(rows), rng.integers(0, n, rows)] = True
    return logits, params, allowed


@pytest.mark.parametrize("n", [7, 40, 300, 4096])
def test_what_is_decided_without_a_mask_is_what_the_mask_decides(n):
    rng, rows = np.random.default_rng(n), 64
    decided, asked, ranks = 0, 0, []
    for _ in range(40):
        logits, params, allowed = drawn_case(rng, n, rows)
        free, alone = rng.random(rows) < 0.1, rng.random(rows) < 0.1
        allowed[free] = True
        only = rng.integers(0, n, rows)
        allowed[alone] = np.arange(n) == only[alone, None]
        masks = np.stack([packed(row) for row in allowed])
        questions: list[list[int]] = [[] for _ in range(rows)]

        def ask(row, questions=questions, allowed=allowed):
            def allows(tokens):
                questions[row] += tokens
                return allowed[row, tokens]

            return allows

        got = Sampler(**params).choose(logits, [int(only[row]) if alone[row] else None if free[row] else ask(row) for row in range(rows)])
        want = _kernels.sample(logits, mask=masks, **params)
        for row in range(rows):
            assert got[row] in (UNDECIDED, want[row]), (n, row, {name: value[row] for name, value in params.items() if len(value) == rows})
            assert len(set(questions[row])) == len(questions[row]), "a token is asked for twice"
            decided += got[row] != UNDECIDED
            if got[row] != UNDECIDED and not (free[row] or alone[row]):
                asked += 1
                ranks.append(len(questions[row]))
    assert decided > 0.5 * 40 * rows, "lists decide most rows"
    assert np.mean(ranks) < 14, "and few questions do"


@pytest.mark.parametrize("n", [7, 40, 300, 4096])
def test_a_mask_decides_by_its_bits_of_the_likeliest_tokens_what_it_decides_by_the_whole_row(n):
    rng, rows = np.random.default_rng(n + 1), 64
    listed = decided = 0
    for _ in range(40):
        logits, params, allowed = drawn_case(rng, n, rows)
        masks = [None if row.all() else packed(row) for row in allowed]
        batches, asked = rng.integers(0, 3, rows).tolist(), list[int]()

        def ask(row, batches=batches, allowed=allowed):
            def allows(tokens):
                batches[row] -= 1
                return allowed[row, tokens] if batches[row] >= 0 else None

            return allows

        held = [ask(row) for row in range(rows)]
        got = Sampler(**params).choose(logits, held, lambda row, asked=asked, masks=masks: (asked.append(row), masks[row])[1])
        want = _kernels.sample(logits, mask=np.stack([packed(row) for row in allowed]), **params)
        assert len(set(asked)) == len(asked), "a mask is asked for twice"
        for row in range(rows):
            assert got[row] in (UNDECIDED, want[row]), (n, row, {name: value[row] for name, value in params.items() if len(value) == rows})
            if row in asked:
                assert held[row][0] is masks[row]
                listed, decided = listed + 1, decided + (got[row] != UNDECIDED)
    assert listed > 200
    assert decided > 0.7 * listed, "mostly the row is not read again"


def test_what_is_no_mask_is_told_and_nobody_elses_matter():
    logits, ones = np.arange(120, dtype=np.float32).reshape(3, 40), np.ones(3, np.float32)
    kernel = Sampler(u=np.zeros(3), temperature=ones, top_k=np.full(3, 5, np.int32), top_p=ones, min_p=0 * ones)
    wrong = {0: np.zeros(3, np.uint32), 1: np.zeros(2, np.int32), 2: packed(np.arange(40) == 30)}
    held = [lambda _: None] * 3
    assert kernel.choose(logits, held, wrong.__getitem__).tolist()[:2] == [UNDECIDED, UNDECIDED]
    assert [type(answer) for answer in held] == [ShapeError, ShapeError, tuple]
    held = [lambda _: None] * 3
    assert kernel.choose(logits, held, lambda row: packed(np.arange(40) == 38 + row % 2)).tolist() == [38, 39, 38]
    assert kernel.choose(logits, [lambda _: None] * 3, {}.__getitem__).tolist() == [UNDECIDED] * 3


def descending(first, count):
    """Floats below 0, neighbours, from -first on: logits f32 [count], and their weights where the largest logit is 0, i64 [count]."""
    z = -(np.float32(first).view(np.int32) + np.arange(count, dtype=np.int32)).view(np.float32)
    return z, np.rint(reference_exp(z).astype(np.float64) * 2.0**40).astype(np.int64)


def inversions():
    """Neighbours of which the lower one weighs more: logits [n, 2], weights [n, 2]."""
    z, weights = descending(0.24, 1 << 18)
    at = np.flatnonzero(weights[1:] > weights[:-1])[:, None] + [0, 1]
    return z[at], weights[at]


def both(logits, allowed, *, u, top_k, min_p=0.0, top_p=1.0):
    """Tokens of one row [n]: asked for singly, by the mask, and by the rule."""
    f = np.float32
    params = {"u": np.array([u]), "temperature": np.ones(1, f), "top_k": np.array([top_k], np.int32), "top_p": np.array([top_p], f), "min_p": np.array([min_p], f)}
    held = Sampler(**params).choose(logits[None], [lambda tokens: allowed[tokens]])[0]
    return held, _kernels.sample(logits[None], mask=packed(allowed)[None], **params)[0], reference_sample(logits, u, 1.0, top_k, top_p, min_p, allowed=allowed)


def test_what_min_p_leaves_is_no_prefix_of_the_order():
    logits = np.array([0, -0.118441217, -0.118441224, *[-50] * 5], np.float32)
    for u, token in ((0.3, 0), (0.6, 2), (0.9, 2)):  # the lower one of two neighbours weighs more, and alone is left
        assert both(logits, np.ones(8, bool), u=u, top_k=5, min_p=0.888304055) == (token,) * 3


def test_a_token_further_behind_may_weigh_more_than_one_that_is_refused():
    pairs, weights = inversions()
    assert len(pairs) > 100
    for pair, (refused, left) in zip(pairs[::10], weights[::10].tolist(), strict=True):
        logits = np.array([0, *pair, *[-50] * 60], np.float32)
        u = 2.0**40 / (2.0**40 + (refused + left) / 2)  # with the one that is left the draw falls behind the first token, with the refused one it would not
        held, masked, right = both(logits, np.isin(np.arange(63), [0, 2]), u=u, top_k=2)
        assert masked == right == 2
        assert held in (UNDECIDED, 2)


def test_neighbours_whose_weights_are_out_of_order_are_drawn_as_by_their_mask():
    rng, (pairs, weights) = np.random.default_rng(5), inversions()
    decided = 0
    for _ in range(2000):
        n = int(rng.integers(2, 90))
        logits = np.where(rng.random(n) < 0.9, pairs[rng.integers(0, len(pairs), n), rng.integers(0, 2, n)], -60).astype(np.float32)
        logits[rng.integers(0, n)] = 0
        allowed = rng.random(n) < rng.choice([0.3, 0.9, 1.0])
        allowed[rng.integers(0, n)] = True
        min_p = rng.choice([0.0, weights[rng.integers(0, len(weights)), 1] / 2.0**40])
        held, masked, right = both(logits, allowed, u=rng.random(), top_k=int(rng.integers(2, 73)), min_p=min_p, top_p=rng.choice([1.0, 0.9, 0.5]))
        assert masked == right
        assert held in (UNDECIDED, right)
        decided += held != UNDECIDED
    assert decided > 500


@pytest.mark.parametrize("first", [1e-6, 0.003, 0.0156, 0.03, 0.06, 0.118, 0.17, 0.2, 0.249, 0.3465, 0.5, 0.69, 1.03, 2.5, 7.0, 18.0, 27.0])
def test_no_token_behind_another_weighs_more_than_the_bound(first):
    """As `fl_held_most` has it; farther apart the order of weights is that of logits."""
    _, weights = descending(first, 1 << 17)
    behind = np.maximum.accumulate(weights[::-1])[::-1]
    assert (behind <= weights + (weights >> 22) + 1).all()


def test_the_only_token_that_may_come_is_asked_of_nobody():
    logits = np.stack([np.arange(40.0)] * 6).astype(np.float32)
    logits[1, 30], logits[2, 7] = np.nan, -np.inf
    adjustments = {"adjust_start": np.array([0, 0, 0, 0, 0, 1, 1], np.int32), "adjust_ids": np.array([7], np.int32)}
    adjustments |= {"adjust_bias": np.array([-np.inf], np.float32), "adjust_repeat": np.ones(1, np.float32), "adjust_sub": np.zeros(1, np.float32)}
    for temperature, top_k in ((0.0, 0), (1.0, 0), (1.0, 3), (1.0, 90)):
        kernel = Sampler(u=np.full(6, 0.9), temperature=np.full(6, temperature, np.float32), top_k=np.full(6, top_k, np.int32), top_p=np.full(6, 0.9, np.float32), min_p=np.full(6, 0.5, np.float32), **adjustments)
        # one that is banned, or whose logit is none, is left to the mask, and so is what is no token
        assert kernel.choose(logits, [7, 7, 7, 0, 7, 40]).tolist() == [7, UNDECIDED, UNDECIDED, 0, UNDECIDED, UNDECIDED]
        assert kernel.choose(logits, [-1, 2**70, 39, None, 6, 7])[[0, 1, 2, 4, 5]].tolist() == [UNDECIDED, UNDECIDED, 39, 6, 7]


@pytest.mark.parametrize("refused", [0, 1, 2, 47])
def test_the_likeliest_that_may_come_is_found_behind_many_that_may_not(refused):
    rng = np.random.default_rng(refused)
    logits = rng.permutation(500).astype(np.float32)[None]
    order, asked = np.argsort(-logits[0]), list[int]()
    ones = np.ones(1, np.float32)
    kernel = Sampler(u=np.zeros(1), temperature=0 * ones, top_k=np.array([40], np.int32), top_p=ones, min_p=0 * ones)
    assert kernel.choose(logits, [lambda tokens: (asked.extend(tokens), [token == order[refused] for token in tokens])[1]])[0] == order[refused]
    assert asked == order[: refused + 1].tolist()
    assert kernel.choose(logits, [lambda tokens: [False] * len(tokens)])[0] == UNDECIDED


def test_what_no_list_decides_is_left_to_the_mask():
    logits = np.stack([np.full(40, np.nan), np.full(40, -np.inf), np.arange(40), np.arange(40), np.arange(40)]).astype(np.float32)
    ones = np.ones(5, np.float32)
    kernel = Sampler(u=np.full(5, 0.5), temperature=ones, top_k=np.array([3, 3, 3, 0, 90], np.int32), top_p=ones, min_p=0 * ones)
    assert kernel.choose(logits, [lambda tokens: [True] * len(tokens)] * 5).tolist() == [UNDECIDED, UNDECIDED, 39, UNDECIDED, UNDECIDED]
    assert kernel.choose(logits, [lambda _: None] * 5).tolist() == [UNDECIDED] * 5
    assert kernel.choose(logits, [lambda tokens: [False] * len(tokens)] * 5).tolist() == [UNDECIDED] * 5
    assert kernel.choose(logits, [None, None, *[lambda tokens: [t < 20 for t in tokens]] * 3])[2] == 19

    def fails(_):
        raise SystemExit("the library is gone")

    held = [None, None, fails, None, lambda tokens: [True] * len(tokens)]
    assert kernel.choose(logits, held)[2] == UNDECIDED
    assert isinstance(held[2], SystemExit)
    with pytest.raises(ShapeError, match="held"):
        kernel.choose(logits, [None])
    with pytest.raises(ShapeError, match="held"):
        Sampler(u=np.zeros(1), temperature=ones[:1], top_k=np.ones(1, np.int32), top_p=ones[:1], min_p=ones[:1], mask=np.ones((1, 2), np.uint32)).choose(logits[:1], [None])


class Every:
    """Allows at position i the tokens t with (t * 7 + i * salt) % of != 0. Counts the masks and the questions."""

    def __init__(self, of, salt=5):
        self.of, self.salt, self.at, self.masks, self.questions = of, salt, 0, 0, 0

    def allows(self, token):
        return (token * 7 + self.at * self.salt) % self.of != 0

    def mask(self):
        self.masks += 1
        return packed(np.array([self.allows(t) for t in range(VOCAB)]))

    def accept(self, token):
        assert self.allows(token)
        self.at += 1
        return False


class Asked(Every):
    """The same, which may be asked for one token."""

    def check(self):
        return self.ask

    def ask(self, tokens):
        self.questions += len(tokens)
        return [self.allows(token) for token in tokens]


class Forcing(Every):
    """The same, but every third position is for one token."""

    def allows(self, token):
        return token == self.forced() if self.at % 3 == 1 else super().allows(token)

    def forced(self):
        return (self.at * 11 + self.salt) % VOCAB


class Forced(Forcing):
    """Which is told without a mask."""

    def check(self):
        return self.forced() if self.at % 3 == 1 else lambda tokens: [self.allows(token) for token in tokens]


SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3, "repetition_penalty": 1.4, "presence_penalty": 0.5},
    {"temperature": 0.0, "min_tokens": 6, "logit_bias": {3: 4.0, 4: -100.0}},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.8, "min_p": 0.05, "frequency_penalty": 1.0},
    {"temperature": 2.0, "top_k": 30, "top_p": 1.0, "logprobs": 2},
    {"temperature": 1.0, "top_k": 0, "top_p": 0.9},
    {"temperature": 0.9, "n": 4, "top_k": 20},
]


@pytest.mark.parametrize("number", range(len(SETTINGS)))
@pytest.mark.parametrize(("masked", "told", "of"), [(Every, Asked, 2), (Every, Asked, 3), (Every, Asked, 11), (Forcing, Forced, 3)])
def test_answers_are_those_of_masks_alone_to_the_last_bit(number, masked, told, of):
    params = SamplingParams(**{"max_tokens": 14, "seed": 11, **SETTINGS[number]})
    made: dict[type, list[Every]] = {masked: [], told: []}

    def constraint(kind):
        def make():
            made[kind].append(kind(of))
            return made[kind][-1]

        return make

    with Engine(FakeRunner(num_blocks=64)) as engine:
        answers = {kind: [] for kind in made}
        for prompt in ([1, 2, 3], [9], [4, 4, 8, 30]):
            handles = {kind: engine.submit(Request(prompt, params, end_ids=[7], constraint=constraint(kind))) for kind in made}
            for kind, handle in handles.items():
                answers[kind].append([(c.token_ids, c.finish_reason, c.logprobs) for c in handle.result().choices])
    assert answers[told] == answers[masked]
    fewer, all_ = (sum(c.masks for c in made[kind]) for kind in (told, masked))
    if params.top_k == 0 and params.temperature and told is Asked:
        assert fewer == all_
    else:
        assert fewer < all_ * (0.8 if params.top_k == 0 else 0.5)
    assert all(c.questions == 0 for c in made[masked])


def test_an_idle_engine_keeps_nothing_of_what_held_the_last_answers():
    gone = []

    def make():
        made = Asked(3)
        gone.append(weakref.ref(made))
        return made

    with Engine(FakeRunner()) as engine:
        for _ in range(2):
            engine.submit(Request([1, 2], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), constraint=make)).result()
        limit = time.monotonic() + 30
        while any(one() is not None for one in gone) and time.monotonic() < limit:
            gc.collect()
            threading.Event().wait(0.01)
        assert [one() for one in gone] == [None, None]


def test_a_question_that_raises_fails_its_own_request():
    class Fails(Asked):
        def ask(self, tokens):
            if self.at == 2:
                raise KeyError("lost")
            return super().ask(tokens)

    class Miscounts(Asked):
        def __init__(self, of, change):
            super().__init__(of)
            self.change = change

        def ask(self, tokens):
            return self.change(super().ask(tokens))

    class Never(Every):
        def check(self):
            raise ValueError("never")

    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with Engine(FakeRunner()) as engine:
        good = engine.submit(Request([5, 6], params, constraint=lambda: Asked(3)))
        kinds = [lambda: Fails(3), lambda: Never(3)]
        kinds += [lambda change=change: Miscounts(3, change) for change in (lambda found: [], lambda found: found[:-1], lambda found: [*found, True])]
        bad = [engine.submit(Request([1, 2], params, constraint=kind)) for kind in kinds]
        for handle, why in zip(bad, ("lost", "never", *["a constraint was asked for"] * 3), strict=True):
            with pytest.raises(EngineError, match=why):
                handle.result()
        assert good.result().choices == engine.submit(Request([5, 6], params, constraint=lambda: Every(3))).result().choices
        assert engine.healthy
