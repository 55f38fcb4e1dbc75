"""`route_topk` and `moe` on ref: values against plain formulas, ties, groups, and rows that do not depend on their neighbours."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fastllm.backends.ref import ops
from fastllm.core.errors import ShapeError
from fastllm.core.graph import GraphBuilder
from fastllm.core.ops import CATALOGUE

DEFAULTS = {name: attr.default for name, attr in CATALOGUE["route_topk"].attrs.items()}


def route(logits, bias=None, **attrs):
    return ops.route_topk(np.asarray(logits, np.float32), None if bias is None else np.asarray(bias, np.float32), **{**DEFAULTS, **attrs})


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_softmax_scores_are_kept_or_renormalised_or_of_the_chosen_alone():
    row = [0.5, 2.0, -1.0, 1.0]
    exp = [math.exp(v) for v in row]
    ids, weights = route([row], k=2)
    assert ids.tolist() == [[1, 3]]
    assert ids.dtype == np.int32
    np.testing.assert_allclose(weights, [[exp[1] / sum(exp), exp[3] / sum(exp)]], rtol=1e-6)
    for attrs in ({"renorm": 1}, {"score": "softmax_of_chosen"}):
        _, weights = route([row], k=2, scale=2.5, **attrs)
        np.testing.assert_allclose(weights, [[2.5 * exp[1] / (exp[1] + exp[3]), 2.5 * exp[3] / (exp[1] + exp[3])]], rtol=1e-6)


def test_a_bias_chooses_but_does_not_weigh():
    ids, weights = route([[0.0, 1.0, 2.0]], bias=[3.0, 0.0, 0.0], k=2, score="sigmoid")
    assert ids.tolist() == [[0, 2]]
    np.testing.assert_allclose(weights, [[0.5, sigmoid(2.0)]], rtol=1e-6)


def test_ties_go_to_the_lower_id_among_experts_and_groups():
    assert route([[1.0, 1.0, 1.0, 1.0]], k=3)[0].tolist() == [[0, 1, 2]]
    assert route([[1.0, 0.0, 1.0, 0.0]], k=2, groups=2, keep_groups=1)[0].tolist() == [[0, 1]]


def test_groups_compete_by_their_best_or_by_their_two_best():
    logits = [[9.0, -9.0, 2.0, 1.9, -3.0, -3.0]]
    assert route(logits, k=2, groups=3, keep_groups=1, score="sigmoid")[0].tolist() == [[0, 1]]
    assert route(logits, k=2, groups=3, keep_groups=1, score="sigmoid", group_score="top2sum")[0].tolist() == [[2, 3]]


def test_masked_groups_stay_out_even_where_every_choice_is_negative():
    ids, _ = route([[0.0] * 4], bias=[-5.0, -5.0, -6.0, -6.0], k=2, groups=2, keep_groups=1, score="sigmoid")
    assert ids.tolist() == [[0, 1]]


def test_ids_are_experts_whatever_the_logits_hold():
    nan = float("nan")
    with np.errstate(all="ignore"):  # as the backend calls it
        ids, _ = route([[nan, nan, nan], [math.inf, -math.inf, nan], [-math.inf] * 3], k=2)
    assert all(len(set(row)) == 2 and set(row) <= {0, 1, 2} for row in ids.tolist())


def operands(tokens, rng):
    """x [T, 8], ids and weights [T, 3], gate and up [5, 6, 8], down [5, 8, 6] and biases."""
    ids = np.array([rng.permutation(5)[:3] for _ in range(tokens)], np.int32).reshape(tokens, 3)
    shapes = ((tokens, 8), None, (tokens, 3), (5, 6, 8), (5, 6, 8), (5, 8, 6), (5, 6), (5, 6), (5, 8))
    return [ids if s is None else rng.standard_normal(s).astype(np.float32) for s in shapes]


@pytest.mark.parametrize("kind", ["silu", "swiglu_oai"])
def test_moe_is_the_weighted_sum_of_its_experts(kind):
    x, ids, weights, gate, up, down, gate_bias, up_bias, down_bias = given = operands(4, np.random.default_rng(0))
    expected = np.zeros((4, 8))
    for t in range(4):
        for j, e in enumerate(ids[t]):
            a, b = gate[e] @ x[t].astype(float) + gate_bias[e], up[e] @ x[t].astype(float) + up_bias[e]
            if kind == "silu":
                hidden = a / (1 + np.exp(-a)) * b
            else:
                a = np.minimum(a, 7)
                hidden = a / (1 + np.exp(-1.702 * a)) * (np.clip(b, -7, 7) + 1)
            expected[t] += weights[t, j] * (down[e] @ hidden + down_bias[e])
    np.testing.assert_allclose(ops.moe(*given, kind=kind), expected, rtol=1e-4, atol=1e-5)


def test_a_row_of_moe_has_the_same_bits_alone_and_with_its_experts_in_any_order():
    given = operands(6, np.random.default_rng(1))
    whole = ops.moe(*given, kind="silu")
    for t in range(6):
        x, ids, weights, *rest = [given[0][t : t + 1], given[1][t : t + 1, ::-1], given[2][t : t + 1, ::-1], *given[3:]]
        assert np.array_equal(ops.moe(x, ids, weights, *rest, kind="silu")[0], whole[t])
    assert ops.moe(*operands(0, np.random.default_rng(2)), kind="silu").shape == (0, 8)


def test_an_id_that_is_no_experts_is_an_error():
    given = operands(2, np.random.default_rng(3))
    for bad in (-1, 5):
        given[1][1, 0] = bad
        with pytest.raises(IndexError, match=f"id {bad} is outside of 0…4"):
            ops.moe(*given, kind="silu")


def test_shapes_that_do_not_fit_are_refused_where_they_are_written():
    g = GraphBuilder("t")
    x = g.embed(g.input("ids"), g.weight("embed", (32, 8)))
    logits = g.linear(x, g.weight("router", (6, 8)))
    for attrs in ({"k": 7}, {"k": 2, "groups": 4}, {"k": 3, "groups": 3, "keep_groups": 1}, {"k": 1, "groups": 3, "keep_groups": 4}):
        with pytest.raises(ShapeError, match="route_topk"):
            g.route_topk(logits, **attrs)
    with pytest.raises(ShapeError, match="route_topk"):
        g.route_topk(logits, k=1, groups=6, keep_groups=2, group_score="top2sum")
    ids, weights = g.route_topk(logits, k=2)
    assert (ids.shape, ids.dtype, weights.shape, weights.dtype) == (("T", 2), "i32", ("T", 2), "f32")
    gate, up, down = (g.weight(n, s) for n, s in (("gate", (6, 4, 8)), ("up", (6, 4, 8)), ("down", (6, 8, 4))))
    assert g.moe(x, ids, weights, gate, up, down).shape == ("T", 8)
    for wrong in ((gate, up, up), (gate, down, down), (g.weight("other", (6, 4, 9)), None, down)):
        with pytest.raises(ShapeError, match="'moe' needs gate and up"):
            g.moe(x, ids, weights, *wrong)
    with pytest.raises(ShapeError, match="no up_bias without up"):
        g.moe(x, ids, weights, gate, None, down, None, g.weight("b", (6, 4), "f32"))
