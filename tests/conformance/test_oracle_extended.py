"""The oracle of the extended ops against other forms of the same formulas; the rule of choices; bounds that are neither loose nor tight."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from fastllm.api import CATALOGUE, No, RefBackend
from fastllm.conformance import bounds, bounds_extended, oracle
from fastllm.conformance import oracle_extended as extended
from fastllm.conformance.bounds import Numerics
from fastllm.conformance.judge import judge
from fastllm.conformance.loaded import loaded
from fastllm.conformance.numbers import Numbers
from fastllm.conformance.suite import all_cases


def attrs(**given):
    return CATALOGUE["route_topk"].complete_attrs({"k": 2, **given})


def test_a_convolution_is_that_of_numpy_with_its_taps_turned_round():
    numbers = Numbers(1)
    x, weight = numbers.normal(20, 3).astype(np.float64), numbers.normal(3, 4).astype(np.float64)
    found = extended.short_conv(np.concatenate([np.zeros((3, 3)), x]), weight, "tanh", 20)
    wanted = np.stack([np.tanh(np.convolve(x[:, c], weight[c, ::-1])[:20]) for c in range(3)], 1)
    np.testing.assert_allclose(found, wanted, rtol=1e-13)


def test_the_delta_rule_is_a_product_of_matrices():
    """S_t = g_t (I − β k kᵀ) S_{t−1} + β k vᵀ, the form of the paper's equation 10."""
    numbers = Numbers(2)
    q, k, v = numbers.normal(9, 1, 5), numbers.normal(9, 1, 5), numbers.normal(9, 2, 3)
    a, b, a_log, dt = numbers.normal(9, 2), numbers.normal(9, 2), numbers.normal(2), numbers.normal(2)
    found = extended.delta_rule(q, k, v, a, b, a_log, dt, 0.0)
    for h in range(2):
        state = np.zeros((5, 3))
        for t in range(9):
            g = math.exp(-math.exp(float(a_log[h])) * math.log1p(math.exp(float(a[t, h]) + float(dt[h]))))
            beta = 1 / (1 + math.exp(-float(b[t, h])))
            unit = k[t, 0].astype(np.float64) / np.linalg.norm(k[t, 0].astype(np.float64))
            state = g * (np.eye(5) - beta * np.outer(unit, unit)) @ state + beta * np.outer(unit, v[t, h].astype(np.float64))
            turned = q[t, 0].astype(np.float64)
            np.testing.assert_allclose(found[t, h], state.T @ turned / np.linalg.norm(turned) / math.sqrt(5), rtol=1e-10, atol=1e-13)


def test_int8_vectors_have_a_scale_for_each_run_and_nan_spreads_no_further():
    x = np.float64([[1, -2, 127, 63.5, 10, 0, np.inf, 1]])
    codes, scale = extended.int8_vectors(x, 4)
    np.testing.assert_array_equal(codes[0, :4], [1, -2, 127, 63.5])
    assert np.isnan(scale[0, 4:]).all()
    assert (scale[0, :4] == 1).all()
    whole, _ = extended.int8_vectors(x[:, :4])
    np.testing.assert_array_equal(whole, codes[:, :4])
    rounded, off = bounds.cached(x[:, :4], "int8")
    assert rounded[0, 3] == 64
    assert off[0, 3] >= 1 > off[0, 2]  # a half may become either code


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "softmax_of_chosen"])
def test_of_all_ordered_choices_the_rule_allows_the_one_of_a_slow_sort(score):
    logits = np.float32([[0.5, 2, 2, -1, 1], [3, -np.inf, 0, 0, 0]])
    bias = np.float32([1.5, 0, 0, 0, 0.25]) if score == "sigmoid" else None
    _, c = extended.route_scores(logits, bias, score)
    for t in range(2):
        right = sorted(range(5), key=lambda e: (-c[t, e], e))[:3]
        for choice in itertools.permutations(range(5), 3):
            fault = bounds_extended.choice_fault(logits[t : t + 1], bias, np.array([choice]), attrs(k=3, score=score))
            assert (not fault) == (list(choice) == right), (t, choice, fault)


def test_groups_are_kept_by_their_best_or_by_their_two_best():
    logits = np.float32([[4, -9, 3, 2.9, 1, 1]])
    best, two = attrs(groups=3, keep_groups=1, score="softmax_of_chosen"), attrs(groups=3, keep_groups=1, group_score="top2sum", score="softmax_of_chosen")
    assert bounds_extended.choice_fault(logits, None, np.array([[0, 1]]), best) == ""
    assert "group" in bounds_extended.choice_fault(logits, None, np.array([[2, 3]]), best)
    assert bounds_extended.choice_fault(logits, None, np.array([[2, 3]]), two) == ""
    assert "group" in bounds_extended.choice_fault(logits, None, np.array([[0, 1]]), two)


def test_scores_that_rounding_cannot_tell_apart_may_come_in_either_order_and_equal_ones_not():
    near = np.float32([[20, 20 + 2.0**-18, 0]])  # both are 1 in f32 after a sigmoid
    assert bounds_extended.choice_fault(near, None, np.array([[0, 1]]), attrs(score="sigmoid")) == ""
    assert bounds_extended.choice_fault(near, None, np.array([[1, 0]]), attrs(score="sigmoid")) == ""
    equal = np.float32([[1, 1, 0]])
    assert bounds_extended.choice_fault(equal, None, np.array([[0, 1]]), attrs(score="sigmoid")) == ""
    assert "better" in bounds_extended.choice_fault(equal, None, np.array([[1, 0]]), attrs(score="sigmoid"))
    assert "twice" in bounds_extended.choice_fault(equal, None, np.array([[0, 0]]), attrs())
    assert "outside" in bounds_extended.choice_fault(equal, None, np.array([[0, 3]]), attrs())


@pytest.mark.parametrize("act", [None, "q8_g32", "bf16"])
def test_experts_computed_in_f32_are_within_their_bound_and_a_fault_of_a_thousandth_is_not(act):
    numbers = Numbers(7)
    x, ids, weights = numbers.normal(3, 64), np.array([[1, 0], [0, 2], [2, 1]]), numbers.normal(3, 2)
    stacks = [numbers.normal(3, 64, 64) / np.float32(4) for _ in range(3)]
    expected = bounds_extended.moe(x, ids, weights, stacks, [None] * 3, "silu", Numerics(act=act))

    def rounded(v):
        if act == "bf16":
            return bounds.round_to(v, "bf16").astype(np.float32)
        codes, scale = oracle.quantize(v, 32)
        return (np.rint(codes) * np.repeat(scale, 32, 1)).astype(np.float32) if act else v

    y = np.zeros((3, 64), np.float32)
    for t in range(3):
        for e, w in zip(ids[t], weights[t], strict=True):
            g, u = (rounded(x[t : t + 1]) @ stacks[i][e].T for i in (0, 1))
            hidden = (g / (1 + np.exp(-g)) * u).astype(np.float32)
            y[t] += w * (rounded(hidden) @ stacks[2][e].T)[0]
    assert judge(y, expected).margin < 0.75
    assert judge(y * np.float32(1 + 2.0**-10), expected).margin > 2
    exact = bounds_extended.moe(x, ids, weights, [*stacks[:2], stacks[2].astype(np.float16).astype(np.float32)], [None] * 3, "silu", Numerics(act=act))
    assert judge(exact.y.astype(np.float32), expected).margin > 2


def test_every_op_of_the_catalogue_has_cases_and_every_decomposition_one():
    ops = {case.op for case in all_cases().values()}
    assert set(CATALOGUE) <= ops
    decomposed = {case.op for case in all_cases().values() if "/decomposed#" in case.id}
    assert decomposed == {name for name, spec in CATALOGUE.items() if spec.decompose is not None}
    assert all(bool(spec.indivisible) != spec.core for spec in CATALOGUE.values() if spec.decompose is None)


def test_a_model_whose_convolution_became_core_ops_is_judged_with_the_columns_of_its_kernel():
    class Without(RefBackend):
        def supports(self, q):
            return No("not here") if q.op == "short_conv" else super().supports(q)

    with loaded(Without(), "qwen3_next-f32") as kit:
        weights = kit.weights()
        columns = {name: w for name, w in weights.items() if ".conv1d.weight[:, " in name}
        assert len(columns) == 4 * sum(n.op == "delta_rule" for n in kit.plan.graph.nodes)
        whole = kit._reference("model.layers.0.linear_attn.conv1d.weight").resolve(kit.tensors, "w", (len(columns["model.layers.0.linear_attn.conv1d.weight[:, 1 of 4]"]), 4))
    assert np.array_equal(columns["model.layers.0.linear_attn.conv1d.weight[:, 1 of 4]"], whole.decode()[:, 1])
