"""Sampling: ids against a restatement of the rule in numpy, parameters, and the bookkeeping of sequences.

`reference_sample` is written from the text of `core/sampling.py`, one numbered step after the other, with a full sort and
Python integers: slow, short, and without any of the shortcuts that the kernel takes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastllm.core import _kernels as kernels
from fastllm.core.errors import InvalidRequest, ShapeError
from fastllm.core.sampling import BUILT_IN, SamplerState, SamplingParams, build_rows, effective_seed, move_rows, stream_id

F = np.float32
Adjustment = tuple[int, float, float, float]  # token, bias, repeat, sub


# ---- the rule, literally -----------------------------------------------------------------------------------------------


def reference_exp(t: np.ndarray) -> np.ndarray:
    """Step 5's exp, f32 [n] -> f32 [n]."""
    t = np.maximum(t, F(-60))
    k = np.rint(t * F(float.fromhex("0x1.715476p0")))
    r = (t - k * F(float.fromhex("0x1.62e4p-1"))) - k * F(float.fromhex("0x1.7f7d1cp-20"))
    p = np.full_like(t, F(1) / F(5040))
    for factorial in (720, 120, 24, 6, 2, 1, 1):
        p = p * r + F(1) / F(factorial)
    return np.ldexp(p, k.astype(np.int32))


def reference_weights(z: np.ndarray, temperature: np.floating[Any]) -> list[int]:
    """Step 5's weights of logits f32 [n] in descending order."""
    with np.errstate(over="ignore", under="ignore"):
        t = (z - z[0]) * (F(1) / temperature)
        return [int(x) for x in np.rint(reference_exp(t).astype(np.float64) * 2.0**40)]


def reference_sample(
    logits: np.ndarray, u: float, temperature: float, top_k: int, top_p: float, min_p: float,
    adjustments: list[Adjustment] | None = None, allowed: np.ndarray | None = None,
) -> int:  # fmt: skip
    """The id of one row, by the steps of `core/sampling.py`."""
    temperature, top_p, min_p = F(temperature), float(F(top_p)), float(F(min_p))
    if np.isnan(logits).any() or np.isposinf(logits).any():  # 0
        return -1
    banned = any(bias == -math.inf for _, bias, _, _ in adjustments or [])
    for obey_bans in (True, False):
        z = logits.copy()
        if allowed is not None:
            z[~allowed] = -np.inf  # 1
        for token, bias, repeat, sub in adjustments or []:  # 2
            if bias != -math.inf or obey_bans:
                z[token] = z[token] + F(bias)
            if repeat != 1:
                z[token] = z[token] / F(repeat) if z[token] > 0 else z[token] * F(repeat)
            z[token] = z[token] - F(sub)
        if z.max() > -np.inf or not banned:
            break  # 3
    if z.max() == -np.inf or np.isposinf(z).any():
        return -1
    order = np.lexsort((np.arange(len(z)), -z))  # 4
    if temperature <= F(1e-5):
        return int(order[0])
    w = reference_weights(z[order], temperature)  # 5
    if 0 < top_k < len(z):  # 6
        w = w[:top_k]
    if top_p < 1:  # 7
        needed, reached, length = math.ceil(top_p * float(sum(w))), 0, 0
        while length == 0 or (reached < needed and length < len(w)):
            reached += w[length]
            length += 1
        w = w[:length]
    left = [(int(token), x) for token, x in zip(order, w, strict=False) if x >= min_p * 2.0**40]  # 8
    total = sum(x for _, x in left)
    target, reached = min(math.floor(u * float(total)), total - 1), 0
    for token, x in left:  # 9
        reached += x
        if reached > target:
            return token
    raise AssertionError("the draw left the row")


def test_the_reference_exponential_is_one() -> None:
    t = -np.linspace(0, 40, 100_001, dtype=np.float32)
    found = reference_exp(t).astype(np.float64)
    assert (np.abs(found / np.exp(t.astype(np.float64)) - 1) < 2.5e-7).all()
    assert reference_exp(np.zeros(1, np.float32))[0] == 1


# ---- batches -----------------------------------------------------------------------------------------------------------


class Batch:
    """Random rows with parameters, and both ways to sample them."""

    def __init__(self, logits: np.ndarray) -> None:
        self.logits = logits
        self.rows, self.vocabulary = logits.shape
        self.u = np.full(self.rows, 0.5)
        self.temperature, self.top_p = np.ones(self.rows, np.float32), np.ones(self.rows, np.float32)
        self.min_p, self.top_k = np.zeros(self.rows, np.float32), np.zeros(self.rows, np.int32)
        self.adjustments: list[list[Adjustment]] = [[] for _ in range(self.rows)]
        self.allowed: np.ndarray | None = None

    def sample(self, rows: slice = slice(None), portable: bool = False) -> list[int]:
        """The kernel's ids of some of the rows, sampled as one batch."""
        entries = [entry for row in self.adjustments[rows] for entry in row]
        start = np.cumsum([0, *(len(row) for row in self.adjustments[rows])]).astype(np.int32)
        columns = np.array([entry[1:] for entry in entries], np.float32).reshape(-1, 3)
        mask = None
        if self.allowed is not None:
            padded = np.zeros((self.rows, (self.vocabulary + 31) // 32 * 32), bool)
            padded[:, : self.vocabulary] = self.allowed
            mask = np.packbits(padded, axis=1, bitorder="little").view(np.uint32)[rows]
        before = self.logits.copy()
        ids = kernels.sample(
            self.logits[rows], u=self.u[rows], temperature=self.temperature[rows], top_k=self.top_k[rows],
            top_p=self.top_p[rows], min_p=self.min_p[rows], adjust_start=start,
            adjust_ids=np.array([entry[0] for entry in entries], np.int32), adjust_bias=columns[:, 0].copy(),
            adjust_repeat=columns[:, 1].copy(), adjust_sub=columns[:, 2].copy(), mask=mask, portable=portable,
        )  # fmt: skip
        np.testing.assert_array_equal(before.view(np.uint32), self.logits.view(np.uint32))
        return [int(token) for token in ids]

    def expected(self) -> list[int]:
        """The reference's ids."""
        return [
            reference_sample(
                self.logits[r], self.u[r], self.temperature[r], int(self.top_k[r]), self.top_p[r], self.min_p[r],
                self.adjustments[r], None if self.allowed is None else self.allowed[r],
            )
            for r in range(self.rows)
        ]  # fmt: skip


def random_logits(rng: np.random.Generator, rows: int, vocabulary: int) -> np.ndarray:
    """Rows of several kinds: normal, wide, many ties, all equal, a few peaks, holes of -inf, signed zeros, a huge range."""
    kinds = []
    for _ in range(rows):
        row = rng.standard_normal(vocabulary) * rng.choice([0.01, 1.0, 4.0, 20.0])
        kind = rng.integers(0, 8)
        if kind == 1:
            row = np.round(row)
        elif kind == 2:
            row = np.full(vocabulary, rng.choice([0.0, -3.5, 77.0]))
        elif kind == 3:
            row[rng.integers(0, vocabulary, 5)] += 12.0
        elif kind == 4:
            row[rng.random(vocabulary) < 0.5] = -np.inf
        elif kind == 5:
            row = rng.choice([0.0, -0.0], vocabulary)
        elif kind == 6:
            row *= 1e30
        elif kind == 7:
            row = -np.abs(np.round(row * 2) / 2)
        kinds.append(row.astype(np.float32))
    return np.stack(kinds)


def random_batch(seed: int, rows: int, vocabulary: int) -> Batch:
    """Every parameter alone and combined; each is off in half of the rows."""
    rng = np.random.default_rng(seed)
    batch = Batch(random_logits(rng, rows, vocabulary))
    edges = [0.0, np.nextafter(1.0, 0.0), 0.5]
    batch.u = np.where(rng.random(rows) < 0.2, rng.choice(edges, rows), rng.random(rows))
    for r in range(rows):
        batch.temperature[r] = rng.choice([0.0, 1e-5, 1.1e-5, 0.1, 0.7, 1.0, 1.3, 5.0])
        if rng.random() < 0.5:
            batch.top_k[r] = rng.choice([-1, 1, 2, 3, 40, 200, 300, vocabulary - 1, vocabulary, vocabulary + 1, 2**31 - 1])
        if rng.random() < 0.5:
            batch.top_p[r] = rng.choice([0.0, 1e-6, 0.1, 0.5, 0.9, 0.95, 0.999999, 1.0])
        if rng.random() < 0.4:
            batch.min_p[r] = rng.choice([1e-9, 0.02, 0.1, 0.5, 1.0])
        if rng.random() < 0.5:
            for token in rng.integers(0, vocabulary, rng.integers(1, 20)):
                bias = rng.choice([0.0, 1.5, -2.0, 30.0, -np.inf])
                repeat, sub = rng.choice([1.0, 1.3, 0.5]), rng.choice([0.0, 0.7, -0.4])
                batch.adjustments[r].append((int(token), float(bias), float(repeat), float(sub)))
    if rng.random() < 0.5:
        batch.allowed = rng.random((rows, vocabulary)) < rng.choice([0.02, 0.5, 0.99])
    return batch


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 3, 31, 32, 33, 127, 128, 129, 257, 1000]))
@example(0, 1)
@example(0, 2)
@example(0, 257)
def test_ids_are_those_of_the_rule(seed: int, vocabulary: int) -> None:
    batch = random_batch(seed, 9, vocabulary)
    assert batch.sample() == batch.sample(portable=True) == batch.expected()


@settings(max_examples=12, derandomize=True, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_ids_are_those_of_the_rule_with_a_large_vocabulary(seed: int) -> None:
    batch = random_batch(seed, 6, 32_000)
    assert batch.sample() == batch.sample(portable=True) == batch.expected()


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 257, 3000]))
def test_a_row_gives_the_same_id_in_any_company(seed: int, vocabulary: int) -> None:
    batch = random_batch(seed, 5, vocabulary)
    together = batch.sample()
    assert [batch.sample(slice(r, r + 1))[0] for r in range(5)] == together
    assert batch.sample(slice(None, None)) == batch.sample(slice(0, 2)) + batch.sample(slice(2, 5))


def test_the_largest_vocabulary_of_real_models_agrees_with_the_rule() -> None:
    rng = np.random.default_rng(3)
    batch = Batch((rng.standard_normal((6, 262_144)) * 2).astype(np.float32))
    batch.logits[:, 131_071] = batch.logits.max() + 3
    batch.u = rng.random(6)
    batch.temperature[:] = [0.0, 0.7, 0.7, 1.0, 1.5, 0.7]
    batch.top_k[:] = [0, 40, 0, 0, 100_000, 2048]
    batch.top_p[:] = [1, 0.95, 0.95, 1, 0.9, 0.5]
    batch.min_p[:] = [0, 0, 0, 0, 0.001, 0]
    assert batch.sample() == batch.sample(portable=True) == batch.expected()
    batch.allowed = rng.random((6, 262_144)) < 0.0001  # as a grammar does: fewer tokens than top_k asks for
    assert batch.sample() == batch.sample(portable=True) == batch.expected()


def test_no_rows_give_no_ids() -> None:
    assert Batch(np.zeros((0, 7), np.float32)).sample() == []


# ---- single facts ------------------------------------------------------------------------------------------------------


def one(logits: list[float], **changes: Any) -> int:
    """The id of a single row; changes: arrays of a Batch by name, as scalars."""
    batch = Batch(np.array([logits], np.float32))
    for name, value in changes.items():
        if name == "adjustments":
            batch.adjustments = [value]
        elif name == "allowed":
            batch.allowed = np.array([value])
        else:
            getattr(batch, name)[0] = value
    return batch.sample()[0]


def test_ties_go_to_the_lower_id() -> None:
    assert one([1, 3, 3, 2], temperature=0) == 1
    assert one([-0.0, 0.0], temperature=0) == 0
    assert one([0.0, 5, 5, 5], top_k=2, u=0.999) == 2
    assert one([2, 2, 2, 2], top_p=0.0, u=0.999) == 0
    assert one([2, 2, 2, 2], top_p=0.5, u=0.999) == 1


def test_the_draw_walks_down_the_probabilities() -> None:
    logits = [math.log(0.2), math.log(0.5), math.log(0.3)]
    assert [one(logits, u=u) for u in (0.0, 0.49, 0.51, 0.79, 0.81, 0.999999)] == [1, 1, 2, 2, 0, 0]
    assert [one(logits, u=u, top_k=2) for u in (0.62, 0.63, 0.99)] == [1, 2, 2]
    assert [one(logits, u=u, top_p=0.75) for u in (0.62, 0.63, 0.99)] == [1, 2, 2]
    assert [one(logits, u=u, min_p=0.5) for u in (0.62, 0.63, 0.99)] == [1, 2, 2]


@pytest.mark.parametrize("top_k", [0, 3])
def test_shares_round_up_to_whole_weights(top_k: int) -> None:
    unit = math.log(2.0**-40)  # the logit of a token of weight 1
    # half of 2^40 + 2^40 + 1 is not reached by the first token
    assert one([0, 0, unit, -math.inf], top_p=0.5, top_k=top_k, u=0.999) == 1
    assert one([0, 0, -math.inf, -math.inf], top_p=0.5, top_k=top_k, u=0.999) == 0
    # 1e-9 * 2^40 = 1099.5
    last = float(np.nextafter(1.0, 0.0))
    for weight, expected in ((1099, 0), (1100, 1)):
        logits = [0, math.log(weight) + unit, -math.inf, -math.inf]
        assert one(logits, min_p=1e-9, top_k=top_k, u=last) == expected
        assert one(logits, top_k=top_k, u=last) == 1


def test_the_draw_changes_exactly_where_the_cumulative_weight_does() -> None:
    assert one([0, 0], u=np.nextafter(0.5, 0)) == 0
    assert one([0, 0], u=0.5) == 1
    logits = np.sort(np.random.default_rng(5).standard_normal(60).astype(np.float32))[::-1]
    cumulative = np.cumsum(reference_weights(logits, F(0.9)))
    edges = [edge + shift for edge in cumulative[:-1] for shift in (-0.5, 0.5)]
    for top_k in (0, 59):
        batch = Batch(np.repeat(logits[None, :], len(edges), axis=0))
        batch.u, batch.temperature[:], batch.top_k[:] = np.array(edges) / cumulative[-1 - (top_k > 0)], 0.9, top_k
        batch.u = np.minimum(batch.u, np.nextafter(1.0, 0.0))
        expected = [min(i // 2 + i % 2, 59 - (top_k > 0)) for i in range(len(edges))]
        assert batch.sample() == batch.expected() == expected


def test_tokens_far_below_the_best_still_have_their_chance() -> None:
    logits = [0.0] + [-math.inf] * 127 + [-25.0] * 128  # weights of 15 in a chunk of their own
    assert one(logits, u=np.nextafter(1.0, 0.0)) == 255
    assert one(logits, u=0.999) == 0


@pytest.mark.parametrize(("top_p", "min_p"), [(1.0, 0.0), (0.9, 0.0), (1.0, 2e-4), (0.7, 2e-4)])
def test_most_of_the_weight_may_lie_far_below_the_best(top_p: float, min_p: float) -> None:
    """Tokens below exp(-8) are counted together at first; here cut and draw fall among them, on both sides of that border."""
    rng = np.random.default_rng(8)
    row = rng.uniform(-9.5, -7.9, 12_000).astype(np.float32)
    row[[5, 700, 701]] = [0, -7.99, -8.01]
    batch = Batch(np.repeat(row[None], 12, axis=0))
    batch.u[:] = [*np.linspace(0, 0.3, 4), *np.linspace(0.35, 1 - 2**-53, 8)]
    batch.top_p[:], batch.min_p[:] = top_p, min_p
    assert batch.sample() == batch.expected()
    assert len(set(batch.sample())) > 6


def test_temperature_sharpens_and_flattens() -> None:
    logits = [0.0, 1.0]
    cold, warm = 1 / (1 + math.exp(-1 / 0.5)), 1 / (1 + math.exp(-1 / 2))
    assert [one(logits, temperature=0.5, u=cold + e) for e in (-1e-5, 1e-5)] == [1, 0]
    assert [one(logits, temperature=2, u=warm + e) for e in (-1e-5, 1e-5)] == [1, 0]


def test_adjustments_apply_bias_then_repetition_then_subtraction() -> None:
    # token 0: ((1 + 2) / 1.5) - 0.25 = 1.75; in any other order of the three it is not between 1.7 and 1.8
    for rival, expected in ((1.7, 0), (1.8, 1)):
        assert one([1.0, rival], temperature=0, adjustments=[(0, 2.0, 1.5, 0.25)]) == expected
    for rival, expected in ((-3.1, 0), (-2.9, 1)):  # negative logits are multiplied
        assert one([-2.0, rival], temperature=0, adjustments=[(0, 0.0, 1.5, 0.0)]) == expected


def test_a_grammar_wins_over_bans() -> None:
    ban = [(1, -math.inf, 1.0, 0.0)]
    assert one([5, 9, 5], temperature=0, adjustments=ban) == 0
    assert one([5, 9, 5], temperature=0, adjustments=ban, allowed=[False, True, False]) == 1
    assert one([5, 9, 5], temperature=0, adjustments=ban, allowed=[False, False, False]) == -1


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_row_without_a_distribution_gives_minus_one_and_no_other_does(temperature: float) -> None:
    logits = np.zeros((6, 300), np.float32)
    logits[0, 299] = np.nan
    logits[1, 5] = -np.float32(np.nan)
    logits[2] = -np.inf
    logits[3, 7] = np.inf
    logits[4, :299] = -np.inf
    batch = Batch(logits)
    batch.temperature[:] = temperature
    batch.u[:] = 0
    assert batch.sample() == [-1, -1, -1, -1, 299, 0]


def test_a_nan_under_the_mask_is_still_a_broken_row() -> None:
    assert one([1.0, math.nan], allowed=[True, False]) == -1


def test_frequencies_follow_the_softmax() -> None:
    rng, draws, vocabulary = np.random.default_rng(11), 40_000, 60
    logits = rng.standard_normal(vocabulary).astype(np.float32) * 1.5
    batch = Batch(np.repeat(logits[None, :], draws, axis=0))
    batch.u = kernels.uniform(2024, 7, np.arange(draws, dtype=np.uint64))
    batch.temperature[:] = 1.25
    counts = np.bincount(batch.sample(), minlength=vocabulary)
    weights = np.exp((logits - logits.max()).astype(np.float64) / 1.25)
    expected = draws * weights / weights.sum()
    assert expected.min() > 20
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert 25 < statistic < 113  # 59 degrees of freedom: both tails hold less than 1e-4


def test_logprobs_come_with_the_ids_on_demand() -> None:
    logits = np.array([[0, 1, 2], [np.nan, 0, 0]], np.float32)
    ids, chosen = kernels.sample(
        logits, u=np.zeros(2), temperature=np.zeros(2, np.float32), top_k=np.zeros(2, np.int32), top_p=np.ones(2, np.float32),
        min_p=np.zeros(2, np.float32), with_logprobs=True,
    )  # fmt: skip
    assert ids.tolist() == [2, -1]
    assert chosen[0] == pytest.approx(2 - math.log(1 + math.e + math.e**2), abs=1e-6)
    assert np.isnan(chosen[1])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("u", 1.0, r"u\[0\] is 1.0; the range is 0 <= u < 1"),
        ("u", math.nan, "u"),
        ("temperature", -0.1, "temperature"),
        ("temperature", math.inf, "temperature"),
        ("top_p", 1.5, "top_p"),
        ("top_p", math.nan, "top_p"),
        ("min_p", -0.5, "min_p"),
        ("adjustments", [(4, 0.0, 1.0, 0.0)], r"adjust_ids\[0\] is 4; ids are 0 to 3"),
        ("adjustments", [(-1, 0.0, 1.0, 0.0)], "adjust_ids"),
        ("adjustments", [(0, math.nan, 1.0, 0.0)], "adjust_bias"),
        ("adjustments", [(0, math.inf, 1.0, 0.0)], "adjust_bias"),
        ("adjustments", [(0, 0.0, 0.0, 0.0)], "adjust_repeat"),
        ("adjustments", [(0, 0.0, 1.0, math.inf)], "adjust_sub"),
    ],
)
def test_native_code_refuses_what_is_out_of_range(name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        one([0, 1, 2, 3], **{name: value})


def test_native_code_refuses_arrays_that_do_not_fit() -> None:
    good: dict[str, Any] = {
        "u": np.zeros(2), "temperature": np.ones(2, np.float32), "top_k": np.zeros(2, np.int32),
        "top_p": np.ones(2, np.float32), "min_p": np.zeros(2, np.float32),
    }  # fmt: skip
    logits, empty = np.zeros((2, 40), np.float32), np.empty(0, np.float32)
    no_entries = {"adjust_ids": np.empty(0, np.int32), "adjust_bias": empty, "adjust_repeat": empty, "adjust_sub": empty}
    assert kernels.sample(logits, **good).tolist() == [0, 0]
    bad: list[tuple[dict[str, Any], str]] = [
        ({"u": np.zeros(3)}, "u has 3 entries; it must have 2"),
        ({"u": np.zeros(2, np.float32)}, "u has dtype float32"),
        ({"mask": np.zeros((2, 1), np.uint32)}, r"mask has shape \(2, 1\); it must be \(2, 2\)"),
        ({"mask": np.zeros((1, 2), np.uint32)}, "mask has shape"),
        ({"adjust_ids": np.zeros(1, np.int32)}, "adjust_start"),
        ({"adjust_start": np.array([0, 0, 1], np.int32), **no_entries}, "from 0 to 1, not from 0 to 0"),
        ({"adjust_start": np.array([-1, 0, 0], np.int32), **no_entries}, "adjust_start"),
        ({"adjust_start": np.zeros(2, np.int32), **no_entries}, "adjust_start has 2 entries"),
    ]
    for change, message in bad:
        with pytest.raises(ShapeError, match=message):
            kernels.sample(logits, **{**good, **change})
    with pytest.raises(InvalidRequest, match="ascending"):
        kernels.sample(logits, **good, adjust_start=np.array([0, 5, 0], np.int32), **no_entries)
    wide = np.zeros((2, 80), np.float32)
    for wrong in (np.zeros((2, 0), np.float32), wide[0], wide[:, ::2], np.zeros((2, 40))):
        with pytest.raises(ShapeError, match="logits"):
            kernels.sample(wrong, **good)
    for name in good:
        for wrong in (None, 0.5, "text"):
            with pytest.raises(ShapeError, match=name):
                kernels.Sampler(**{**good, name: wrong})


def test_a_sampler_sees_values_of_arrays_change_and_keeps_a_copy_of_lists() -> None:
    rest: dict[str, Any] = {
        "temperature": np.ones(1, np.float32), "top_k": np.zeros(1, np.int32), "top_p": np.ones(1, np.float32), "min_p": np.zeros(1, np.float32),
    }  # fmt: skip
    logits = np.zeros((1, 4), np.float32)
    for draws, later in ((np.zeros(1), 3), ([0.0], 0)):
        sampler = kernels.Sampler(u=draws, **rest)
        assert sampler.choose(logits).tolist() == [0]
        draws[0] = 0.9
        assert sampler.choose(logits).tolist() == [later]


# ---- log-probabilities -------------------------------------------------------------------------------------------------


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """f64, with -9999 for everything below."""
    z = logits.astype(np.float64)
    z = z - z.max(axis=1, keepdims=True)
    return np.maximum(z - np.log(np.exp(z).sum(axis=1, keepdims=True)), -9999.0)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 127, 128, 257, 5000]))
def test_logprobs_are_those_of_the_raw_distribution(seed: int, vocabulary: int) -> None:
    rng = np.random.default_rng(seed)
    logits = random_logits(rng, 4, vocabulary)
    logits[:, 0] = np.maximum(logits[:, 0], -1000)  # never all -inf
    ids, count = rng.integers(0, vocabulary, 4).astype(np.int32), min(20, vocabulary)
    chosen, top_ids, tops = kernels.logprobs(logits, ids, count)
    expected = log_softmax(logits)
    order = np.stack([np.lexsort((np.arange(vocabulary), -row))[:count] for row in logits])
    np.testing.assert_array_equal(top_ids, order)
    np.testing.assert_allclose(chosen, expected[np.arange(4), ids], rtol=3e-7, atol=3e-7)
    np.testing.assert_allclose(tops, np.take_along_axis(expected, order, 1), rtol=3e-7, atol=3e-7)
    assert np.isfinite(chosen).all()
    assert np.isfinite(tops).all()


def test_logprobs_of_broken_rows_are_nan_and_wrong_ids_are_refused() -> None:
    logits = np.array([[0, np.nan], [-np.inf, -np.inf], [0, -np.inf]], np.float32)
    chosen, ids, tops = kernels.logprobs(logits, np.array([0, 0, 1], np.int32), 2)
    assert np.isnan(chosen).tolist() == [True, True, False]
    assert chosen[2] == -9999
    assert ids.tolist() == [[-1, -1], [-1, -1], [0, 1]]
    assert np.isnan(tops[:2]).all()
    assert tops[2].tolist() == [0, -9999]
    with pytest.raises(InvalidRequest, match=r"ids\[1\] is 2"):
        kernels.logprobs(logits, np.array([0, 2, 0], np.int32), 1)
    for count in (-1, 3):
        with pytest.raises(InvalidRequest, match="top_n"):
            kernels.logprobs(logits, np.zeros(3, np.int32), count)


# ---- parameters --------------------------------------------------------------------------------------------------------


def test_later_layers_of_defaults_win_and_unset_fields_fall_through() -> None:
    model = SamplingParams(temperature=0.6, top_k=20)
    merged = SamplingParams(temperature=0.0, stop="END").merged_with(model).merged_with(BUILT_IN)
    assert (merged.temperature, merged.top_k, merged.top_p, merged.stop) == (0.0, 20, 0.95, ("END",))
    assert merged.max_tokens is None
    assert merged.seed is None
    assert SamplingParams(stop=()).merged_with(SamplingParams(stop=("x",))).stop == ()


def test_valid_parameters_pass() -> None:
    SamplingParams().validate(10)
    BUILT_IN.validate(10)
    SamplingParams(
        max_tokens=5, temperature=5, top_k=-1, top_p=0, min_p=1, presence_penalty=-2, frequency_penalty=2.0,
        repetition_penalty=0.01, repeat_last_n=-1, seed=-1, stop=["a" * 256] * 16, stop_token_ids=[0, 9],
        ignore_eos=True, min_tokens=5, logit_bias={0: -100, 9: 100.0}, logprobs=20, prompt_logprobs=True, n=16,
    ).validate(10)  # fmt: skip


BAD = [
    ("max_tokens", -1, "an integer from 0"), ("max_tokens", 1.5, "an integer"), ("max_tokens", True, "an integer"),
    ("temperature", -0.1, "a number from 0 to 5"), ("temperature", 5.1, "a number from 0 to 5"),
    ("temperature", math.nan, "nan"), ("temperature", math.inf, "inf"),
    ("temperature", "1", "a number"), ("temperature", False, "a number"),
    ("top_k", -2, "an integer from -1"), ("top_k", 2**31, "an integer from -1 to 2147483647"), ("top_p", 1.01, "from 0 to 1"),
    ("top_p", math.nan, "from 0 to 1"), ("min_p", -0.01, "from 0 to 1"), ("presence_penalty", 2.1, "from -2 to 2"),
    ("frequency_penalty", -2.1, "from -2 to 2"), ("repetition_penalty", 0, "from 0.01 to 10"),
    ("repetition_penalty", 11, "from 0.01 to 10"), ("repeat_last_n", -2, "from -1"), ("seed", 2**64, "an integer"),
    ("seed", "7", "an integer"), ("stop", ["x"] * 17, "at most 16 strings"), ("stop", [""], "1 to 256 characters"),
    ("stop", ["a" * 257], "1 to 256 characters"), ("stop", [3], "1 to 256 characters"), ("stop", 3, "at most 16 strings"),
    ("stop_token_ids", [10], "from 0 to 9"), ("stop_token_ids", [-1], "from 0 to 9"), ("stop_token_ids", 3, "a list"),
    ("ignore_eos", 1, "true or false"), ("prompt_logprobs", 0, "true or false"), ("min_tokens", -1, "from 0"),
    ("logit_bias", {10: 1}, "from 0 to 9"), ("logit_bias", {"1": 1}, "from 0 to 9"),
    ("logit_bias", {1: 101}, "from -100 to 100"), ("logit_bias", {1: math.nan}, "from -100 to 100"),
    ("logit_bias", [1], "an object"), ("logprobs", 21, "from 0 to 20"),
    ("n", 0, "from 1 to 16"), ("n", 17, "from 1 to 16"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "limits"), BAD)
def test_a_bad_field_is_refused_with_its_name_and_range(name: str, value: Any, limits: str) -> None:
    with pytest.raises(InvalidRequest, match=limits) as caught:
        SamplingParams(**{name: value}).validate(10)
    assert caught.value.message.startswith(f"{name} is ")
    assert caught.value.fields["param"] == name


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    with pytest.raises(InvalidRequest, match=r"min_tokens is 6; it must be 0 to max_tokens \(5\)"):
        SamplingParams(min_tokens=6, max_tokens=5).validate(10)


def test_parameters_do_not_change_with_the_objects_they_came_from() -> None:
    bias, stop = {1: 2.0}, ["x"]
    params = SamplingParams(logit_bias=bias, stop=stop)  # type: ignore[arg-type]
    bias[3] = 1.0
    stop.append("y")
    assert params.logit_bias == {1: 2.0}
    assert params.stop == ("x",)


def test_seeds_count_modulo_two_to_the_64_and_are_drawn_when_unset() -> None:
    assert effective_seed(SamplingParams(seed=-1)) == 2**64 - 1
    assert effective_seed(SamplingParams(seed=7)) == 7
    drawn = {effective_seed(SamplingParams()) for _ in range(8)}
    assert len(drawn) == 8
    assert all(0 <= seed < 2**53 for seed in drawn)
    assert stream_id(1, 2) != stream_id(2, 1)
    with pytest.raises(InvalidRequest):
        stream_id(0, 2**32)


# ---- sequences ---------------------------------------------------------------------------------------------------------


Entries = dict[int, tuple[float, ...]]  # token -> (bias, repeat, sub)


def counted(params: SamplingParams, prompt: list[int], output: list[int], ends: list[int]) -> Entries:
    """(bias, repeat, sub) per token, counted from the whole history; neutral entries left out."""
    p = params.merged_with(BUILT_IN)
    window = p.repeat_last_n
    history = prompt + output
    seen = set(history if window < 0 else history[-window:] if window else [])
    wanted = {}
    for token in {*history, *ends, *p.stop_token_ids, *p.logit_bias}:
        bias = p.logit_bias.get(token, 0.0)
        bias = -math.inf if bias <= -100 else bias
        if len(output) < p.min_tokens and token in {*ends, *p.stop_token_ids}:
            bias = -math.inf
        count = output.count(token)
        sub = p.presence_penalty * (count > 0) + p.frequency_penalty * count
        entry = (bias, p.repetition_penalty if token in seen else 1.0, sub)
        if entry != (0.0, 1.0, 0.0):
            wanted[token] = entry
    return wanted


def found(state: SamplerState) -> Entries:
    """The state's entries without the neutral ones; each token at most once."""
    ids, numbers = state.adjustments
    assert len(set(ids.tolist())) == len(ids)
    entries = {int(t): tuple(float(x) for x in column) for t, column in zip(ids, numbers.T, strict=True)}
    return {t: entry for t, entry in entries.items() if entry != (0.0, 1.0, 0.0)}


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    st.lists(st.integers(0, 9), max_size=12), st.lists(st.integers(0, 9), max_size=30),
    st.builds(
        SamplingParams, presence_penalty=st.sampled_from([None, 0.0, 0.5]),
        frequency_penalty=st.sampled_from([None, 0.25, -1.0]), repetition_penalty=st.sampled_from([None, 1.0, 1.5]),
        repeat_last_n=st.sampled_from([None, -1, 0, 1, 3, 64]), min_tokens=st.sampled_from([None, 0, 1, 5]),
        stop_token_ids=st.sampled_from([None, (7,)]), logit_bias=st.sampled_from([None, {2: 1.5, 7: 2.0}, {3: -100}]),
    ),
)  # fmt: skip
def test_counts_kept_step_by_step_equal_counts_of_the_whole_history(
    prompt: list[int], output: list[int], params: SamplingParams
) -> None:
    state = SamplerState(params, prompt, 1, end_ids=[2, 3])
    assert found(state) == counted(params, prompt, [], [2, 3])
    for i, token in enumerate(output):
        state.append(token)
        assert found(state) == counted(params, prompt, output[: i + 1], [2, 3])


def test_nothing_is_counted_without_penalties() -> None:
    state = SamplerState(SamplingParams(temperature=1.0), [1, 2, 3], 1, end_ids=[2])
    for token in range(100):
        state.append(token)
    rows = build_rows([state, state], 50)
    assert rows.adjust_start.tolist() == [0, 0, 0]
    assert len(rows.adjust_ids) == len(rows.adjust_bias) == len(rows.adjust_repeat) == len(rows.adjust_sub) == 0
    assert rows.mask is None


def test_rows_hold_what_the_kernel_needs() -> None:
    first = SamplerState(SamplingParams(repetition_penalty=1.5), [4, 5, 4], 1)
    second = SamplerState(SamplingParams(temperature=0.25, top_k=7, top_p=0.5, min_p=0.125), [4], 1)
    third = SamplerState(SamplingParams(min_tokens=1, logit_bias={9: 3.0}), [4], 1, end_ids=(0,))
    mask = np.array([6, 1], np.uint32)
    rows = build_rows([first, second, third], 40, [None, mask, None])
    assert rows.temperature.tolist() == [np.float32(0.7), 0.25, np.float32(0.7)]
    assert (rows.top_k[1], rows.top_p[1], rows.min_p[1]) == (7, 0.5, 0.125)
    assert rows.adjust_start.tolist() == [0, 2, 2, 4]
    assert rows.adjust_ids.tolist() == [4, 5, 9, 0]
    assert rows.adjust_bias.tolist() == [0, 0, 3, -math.inf]
    assert rows.adjust_repeat.tolist() == [1.5, 1.5, 1, 1]
    assert rows.mask is not None
    assert rows.mask.tolist() == [[0xFFFFFFFF] * 2, [6, 1], [0xFFFFFFFF] * 2]
    logits = np.zeros((3, 40), np.float32)
    ids = rows.choose(logits)
    assert ids[1] in (1, 2, 32)
    third.append(5)
    assert rows.adjust_bias.tolist() == [0, 0, 3, -math.inf]  # a copy
    assert build_rows([third], 40).adjust_bias.tolist() == [3, 0]
    with pytest.raises(InvalidRequest, match="mask"):
        build_rows([first], 40, [np.zeros(1, np.uint32)])
    with pytest.raises(InvalidRequest, match="2 masks for 1 rows"):
        build_rows([first], 40, [mask, mask])


def test_masks_of_the_next_step_are_taken_into_the_arrays_of_the_last() -> None:
    states = [SamplerState(SamplingParams(seed=r), [1], r) for r in range(2)]
    first, second = np.array([6, 1], np.uint32), np.array([0, 128], np.uint32)
    rows = build_rows(states, 40, [None, first])
    kernel, logits = rows.kernel, np.zeros((2, 40), np.float32)
    for state in states:
        state.append(3)
    assert move_rows(rows, states, [second, None])
    built = build_rows(states, 40, [second, None])
    assert rows.mask is not None
    assert built.mask is not None
    assert (rows.mask.tolist(), rows.u.tolist()) == (built.mask.tolist(), built.u.tolist())
    assert rows.kernel is kernel
    assert kernel.choose(logits).tolist() == built.kernel.choose(logits).tolist()
    assert kernel.choose(logits)[0] == 39
    assert not move_rows(rows, states)
    assert not move_rows(rows, states, [np.zeros(1, np.uint32), None])
    assert not move_rows(build_rows(states, 40), states, [second, None])


def test_draws_depend_on_seed_stream_and_position_only() -> None:
    state = SamplerState(SamplingParams(), [1, 2, 3], 99, stream_id(0, 1))
    drawn = []
    for token in range(200):
        assert state.draw() == state.draw()
        drawn.append(state.draw())
        state.append(token)
    assert drawn == kernels.uniform(99, 1, np.arange(3, 203, dtype=np.uint64)).tolist()
    later = SamplerState(SamplingParams(), list(range(103)), 99, stream_id(0, 1))
    assert later.draw() == drawn[100]  # as after preemption: the position counts, not how it was reached
