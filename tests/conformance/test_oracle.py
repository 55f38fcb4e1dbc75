"""The oracle against closed forms, slow loops and an independent decoder; what it imports; and that the judge can say no."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import numpy as np
import pytest

import fastllm.conformance
from fastllm.conformance import blocks, bounds, oracle
from fastllm.conformance.bounds import Expected, Numerics
from fastllm.conformance.judge import judge
from fastllm.conformance.numbers import CLASSES, Numbers, seed_of
from fastllm.core import _kernels
from fastllm.core.quant import FORMATS

FOLDER = Path(fastllm.conformance.__file__).parent
F32 = Numerics()


@pytest.mark.parametrize("name", ["oracle", "oracle_extended", "numbers", "bounds", "bounds_extended", "blocks", "judge"])
def test_the_oracle_imports_numpy_and_itself_only(name):
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    names = {n for node in ast.walk(tree) if isinstance(node, ast.Import) for n in (a.name for a in node.names)}
    names |= {node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    assert names <= {"__future__", "math", "numpy", "hashlib", "dataclasses", "collections.abc", "typing"}


@pytest.mark.parametrize("format", list(blocks.BLOCK_BYTES))
def test_both_decoders_agree_to_the_last_bit(format):
    data = blocks.random_blocks(Numbers(3), format, 2560)
    assert len(data) == FORMATS[format].nbytes(2560)
    mine = blocks.decode(format, data, 2560)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(mine.astype(np.float32), _kernels.decode(format, data, 2560))


@pytest.mark.parametrize("format", ["f16", "bf16"])
def test_plain_encoding_rounds_to_even(format):
    values = np.concatenate([Numbers(1).array("spread", 500), np.float32([0, -0.0, 1 + 2**-9, 1 + 2**-12, 65504])])
    np.testing.assert_array_equal(blocks.encode_plain(format, values), _kernels.encode(format, values).view(np.uint8))


def test_linear_is_the_sum_of_exact_fractions():
    x, w = np.float32([[1, 2, 3], [0.5, 0, -1]]), np.float32([[1, 1, 1], [4, -2, 0.25]])
    np.testing.assert_array_equal(oracle.linear(x, w, np.float32([10, 20])), [[16, 20.75], [9.5, 21.75]])


def test_norms_softmax_and_rope_have_their_closed_forms():
    np.testing.assert_allclose(oracle.rms_norm(np.float32([[3, 4]]), None, 0.0), [[3 / math.sqrt(12.5), 4 / math.sqrt(12.5)]], rtol=1e-15)
    np.testing.assert_allclose(oracle.layer_norm(np.float32([[1, 3]]), np.float32([2, 2]), np.float32([1, 1]), 0.0), [[-1, 3]], rtol=1e-15)
    np.testing.assert_allclose(oracle.softmax(np.log([[1.0, 2.0, 5.0]])), [[0.125, 0.25, 0.625]], rtol=1e-15)
    quarter = oracle.rope(np.float32([[[1, 2, 3, 4]]]), np.array([1]), np.float32([math.pi / 2, 0]), "half", 1.0)
    np.testing.assert_allclose(quarter, [[[-3, 2, 1, 4]]], atol=1e-7)
    pairs = oracle.rope(np.float32([[[1, 2, 3, 4]]]), np.array([1]), np.float32([math.pi / 2]), "pairs", 1.0)
    np.testing.assert_allclose(pairs, [[[-2, 1, 3, 4]]], atol=1e-7)


def test_attention_is_the_weighted_mean_of_what_a_row_sees():
    keys, values = np.zeros((4, 1, 2), np.float32), np.arange(4, dtype=np.float32).reshape(4, 1, 1) + 1
    q = np.ones((1, 2, 2), np.float32)

    def one(position, **attrs):
        return oracle.attention(q, keys, values, np.array([position]), scale=1.0, **attrs)[0, :, 0].tolist()

    assert one(2) == [2, 2]
    assert one(3, window=2) == [3.5, 3.5]
    assert one(3, mask="chunk", chunk=3) == [4, 4]
    assert one(0, mask="full") == [2.5, 2.5]
    assert one(0, mask="prefix", prefix_len=3) == [2, 2]
    assert one(9, window=2) == [0, 0]
    assert one(1, sinks=np.float32([0, -math.inf])) == [1, 1.5]
    slope = one(1, slopes=np.float32([math.log(3), 0]))
    assert slope == pytest.approx([1.75, 1.5])


def test_the_sampling_rule_agrees_with_the_kernel_on_random_rows():
    numbers = Numbers(8)
    for r in range(60):
        z = numbers.normal(1, 50) * np.float32(3)
        p = [float(np.float32(v)) for v in (numbers.uniform(1)[0] * 2, numbers.uniform(1)[0], numbers.uniform(1)[0] * 0.3)]
        k, u = int(numbers.integers(1, 0, 60)[0]), float(numbers.uniform(1)[0])
        found = _kernels.sample(z, u=np.array([u]), temperature=np.float32([p[0]]), top_k=np.int32([k]), top_p=np.float32([p[1]]), min_p=np.float32([p[2]]))
        assert int(found[0]) == oracle.sample(z[0], u, p[0], k, p[1], p[2], []), r


def test_numbers_do_not_change_from_version_to_version():
    assert Numbers(1).words(3).tolist() == [10451216379200822465, 13757245211066428519, 17911839290282890590]
    assert seed_of(1, "linear/x#bound") != seed_of(2, "linear/x#bound")
    first = Numbers(7).normal(100)
    whole = Numbers(7)
    np.testing.assert_array_equal(np.concatenate([whole.normal(30), whole.normal(70)]), first)
    assert abs(float(Numbers(2).normal(100000).std()) - 1) < 0.01


@pytest.mark.parametrize("kind", CLASSES)
def test_a_data_class_is_what_it_says(kind):
    x = Numbers(5).array(kind, 4, 4096)
    holds = {
        "normal": abs(x.mean()) < 0.1,
        "positive": (x > 0).all(),
        "cancelling": np.abs(x.sum(1)).max() < 5,
        "spread": np.abs(x).max() > 500 * np.median(np.abs(x)),
        "sparse": ((x != 0).sum(1) <= 17).all() and (x[:, [0, -1]] != 0).all(),
        "integer": (x == np.rint(x)).all() and np.abs(x).sum(1).max() < 2**24 and (np.abs(x[x != 0]) > 2048).all(),
        "outlier": np.abs(x).max() > 1000,
        "offset": abs(x.mean() - 100) < 1,
    }
    assert holds[kind]


def test_the_judge_sees_shape_value_and_nan():
    right = Expected(np.array([1.0, np.nan, np.inf]), np.array([1e-3, 1e-3, 1e-3]))
    assert judge(np.float32([1.0005, np.nan, np.inf]), right).margin == pytest.approx(0.5, rel=1e-3)
    assert judge(np.float32([1.002, np.nan, np.inf]), right).message
    assert judge(np.float32([1, 0, np.inf]), right).message
    assert judge(np.float32([1, np.nan, -np.inf]), right).message
    assert judge(np.float32([np.nan, np.nan, np.inf]), right).message
    assert judge(np.float32([[1, 2, 3]]), right).rule == "contract"
    assert judge(np.float32([1 + 2**-23]), Expected(np.array([1.0]), np.zeros(1), exact=True)).rule == "exact"


@pytest.mark.parametrize("k", [32, 512, 4096, 11008])
def test_secret_rounding_of_an_operand_is_seen_at_every_size(k):
    numbers = Numbers(k)
    x, w = numbers.array("sparse", 4, k), numbers.normal(16, k)
    expected = bounds.linear(x, w, None, F32)
    honest = np.stack([(x[i].astype(np.float64) * w).sum(1) for i in range(4)]).astype(np.float32)
    secret = (x.astype(np.float16).astype(np.float64) @ w.T).astype(np.float32)
    assert judge(honest, expected).margin <= 0.75
    assert judge(secret, expected).margin >= 2


@pytest.mark.parametrize("act", [None, "bf16", "f16", "q8_g32"])
def test_no_rows_are_no_rows(act):
    expected = bounds.linear(np.zeros((0, 64), np.float32), np.ones((7, 64)), None, bounds.Numerics(act=act))
    assert expected.y.shape == expected.bound.shape == np.shape(expected.slack) == (0, 7)
