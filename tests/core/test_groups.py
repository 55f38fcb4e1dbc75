"""Group formats of our own (int4gN, int4gNs, int8gN): decoding against a formula in numpy, encoding against min-max and brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fastllm.core import _kernels as kernels
from fastllm.core.errors import ShapeError, UnsupportedError
from fastllm.core.quant import FORMATS

GROUPS = [name for name, spec in FORMATS.items() if spec.code_bits]


def parts(name: str, data: NDArray[np.uint8]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Scale [B, 1], zero [B, 1] and codes [B, N] of the bytes of blocks, by the picture in core/_groups.h."""
    spec = FORMATS[name]
    blocks = data.reshape(-1, spec.block_bytes)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float64)
    head = 3 if spec.zero_point else 2
    zero = blocks[:, 2:3].astype(np.float64) if spec.zero_point else np.full_like(scale, 8.0 if spec.code_bits == 4 else 0.0)
    body = blocks[:, head:]
    if spec.code_bits == 8:
        return scale, zero, body.view(np.int8).astype(np.float64)
    bytes_ = body.reshape(len(blocks), -1, 16)
    codes = np.concatenate([bytes_ & 15, bytes_ >> 4], axis=2).reshape(len(blocks), -1)
    return scale, zero, codes.astype(np.float64)


def squared_error(name: str, data: NDArray[np.uint8], values: NDArray[np.float32]) -> NDArray[np.float64]:
    """Of each group, in f64 from decoded values."""
    decoded = kernels.decode(name, data, values.size).astype(np.float64)
    return ((values.reshape(-1).astype(np.float64) - decoded) ** 2).reshape(-1, FORMATS[name].block).sum(axis=1)


def weights(seed: int, groups: int, group: int) -> NDArray[np.float32]:
    """Groups as weights have them: normal, shifted, with outliers, of very different sizes, constant, zero."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((groups, group)).astype(np.float32) * np.exp(rng.standard_normal((groups, 1)) * 2).astype(np.float32)
    values[1] += 3
    values[2, 5] = 10 * np.abs(values[2]).max()
    values[3] = np.abs(values[3])
    values[4] = 0
    values[5] = -0.25
    values[6, 1:] = 0
    return values


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_decodes_as_scale_times_code_minus_zero(name: str) -> None:
    spec = FORMATS[name]
    data = np.random.default_rng(1).integers(0, 256, (50, spec.block_bytes), dtype=np.uint8)
    data[:, 1] &= 0xBF  # no NaN, no infinity
    scale, zero, codes = parts(name, data.reshape(-1))
    want = (scale * (codes - zero)).astype(np.float32).reshape(-1)
    found = kernels.decode(name, data.reshape(-1), want.size)
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("name", GROUPS)
def test_the_search_is_never_worse_than_min_max_and_says_its_error(name: str) -> None:
    values = weights(2, 300, FORMATS[name].block)
    plain, plain_errors = kernels.encode_groups(name, values, search=False)
    found, errors = kernels.encode_groups(name, values)
    np.testing.assert_allclose(errors, squared_error(name, found, values), rtol=1e-5, atol=1e-30)
    np.testing.assert_allclose(plain_errors, squared_error(name, plain, values), rtol=1e-5, atol=1e-30)
    assert np.all(errors <= plain_errors)
    if FORMATS[name].code_bits == 4:  # on normal values about a tenth less squared error
        assert errors[7:].sum() < 0.96 * plain_errors[7:].sum()
    np.testing.assert_array_equal(kernels.encode(name, values), plain)


@pytest.mark.parametrize("name", GROUPS)
def test_min_max_is_within_half_a_step_and_the_half_of_the_scale(name: str) -> None:
    spec = FORMATS[name]
    values = weights(3, 100, spec.block)
    decoded = kernels.decode(name, kernels.encode(name, values), values.size).reshape(values.shape)
    low, high = np.minimum(values.min(1), 0), np.maximum(values.max(1), 0)
    steps = 15 if spec.zero_point else 8 if spec.code_bits == 4 else 127
    span = high - low if spec.zero_point else np.maximum(high, -low)
    step = span / steps
    # half a step for rounding, a whole one where range ends do not meet codes, 2^-11 of the range for the half-precision scale
    assert np.all(np.abs(decoded - values).max(1) <= step * (1.01 if spec.code_bits == 4 else 0.51) + span * 2.0**-10)


def test_the_search_comes_close_to_the_best_of_all_scales_and_zeros() -> None:
    values = weights(4, 40, 32)[7:]
    _, errors = kernels.encode_groups("int4g32", values)
    best = np.full(len(values), np.inf)
    span = np.maximum(values.max(1), 0) - np.minimum(values.min(1), 0)
    for f, z in itertools.product(np.linspace(0.4, 1.2, 161), range(16)):
        s = (span * f / 15)[:, None]
        q = np.clip(np.rint(values / s) + z, 0, 15)
        best = np.minimum(best, ((values - s * (q - z)) ** 2).sum(1))
    assert errors.sum() <= 1.06 * best.sum()


@pytest.mark.parametrize("name", GROUPS)
def test_what_can_be_stored_comes_back(name: str) -> None:
    spec = FORMATS[name]
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 16, (20, spec.block)) if spec.code_bits == 4 else rng.integers(-127, 128, (20, spec.block))
    codes[:, 0], codes[:, 1] = (0, 15) if spec.code_bits == 4 else (-127, 127)
    zero = rng.integers(0, 16, (20, 1)) if spec.zero_point else 8 if spec.code_bits == 4 else 0
    scale = (np.abs(rng.standard_normal((20, 1))) + 0.1).astype(np.float16).astype(np.float32)
    values = np.ascontiguousarray(scale * (codes - zero).astype(np.float32))
    data, errors = kernels.encode_groups(name, values)
    np.testing.assert_array_equal(errors, 0)
    np.testing.assert_array_equal(kernels.decode(name, data, values.size).reshape(values.shape), values)


@pytest.mark.parametrize("name", GROUPS)
def test_groups_are_encoded_alone_as_together(name: str) -> None:
    values = weights(6, 16, FORMATS[name].block)
    whole, _ = kernels.encode_groups(name, values.reshape(4, -1))
    apart = [kernels.encode_groups(name, row)[0] for row in values]
    np.testing.assert_array_equal(whole, np.concatenate(apart))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e5, 1e5, width=32), min_size=64, max_size=64), st.sampled_from(["int4g64", "int4g64s", "int8g64"]))
def test_any_finite_values_are_encoded_no_worse_than_by_min_max(values: list[float], name: str) -> None:
    array = np.array(values, np.float32)
    data, errors = kernels.encode_groups(name, array)
    assert np.isfinite(kernels.decode(name, data, 64)).all()
    assert errors[0] <= kernels.encode_groups(name, array, search=False)[1][0]


def test_what_cannot_be_encoded_is_refused() -> None:
    ok = np.zeros((2, 128), np.float32)
    with pytest.raises(UnsupportedError, match="not a group format"):
        kernels.encode_groups("q4_0", ok)
    with pytest.raises(ShapeError, match="whole int4g128 groups"):
        kernels.encode_groups("int4g128", np.zeros((2, 64), np.float32))
    for bad in (np.nan, np.inf):
        with pytest.raises(UnsupportedError, match="NaN or infinity"):
            kernels.encode_groups("int4g128", np.full((1, 128), bad, np.float32))
    for name in ("int4g128", "int4g128s", "int8g128"):
        with pytest.raises(UnsupportedError, match="beyond 65504"):
            kernels.encode_groups(name, np.full((1, 128), 1e30, np.float32))
