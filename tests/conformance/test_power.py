"""Cases of experts in every format must be able to see a scale that is off by 2^-8, the mildest fault that mutants plant, also where activations are
rounded to int8, so that a code at an edge may go either way: what that may change is not counted as an error, and must not hide one."""

from __future__ import annotations

import numpy as np
import pytest

from fastllm.conformance import blocks
from fastllm.conformance.bounds import Numerics
from fastllm.conformance.numbers import Numbers, seed_of
from fastllm.conformance.suite.experts import ALONE, moe_data

FAULT = 1 + 2.0**-8


@pytest.mark.parametrize("act", ["q8_g32", "q8_g64"])
@pytest.mark.parametrize(("name", "rows", "count", "bias"), [("one", 1, ALONE, False), ("batch", 9, 9, True)])
@pytest.mark.parametrize("format", blocks.BLOCK_BYTES)
def test_a_scale_that_is_off_by_a_256th_is_beyond_the_bound_of_experts_in_every_format(format, name, rows, count, bias, act):
    block = max(blocks.BLOCK_BYTES[format][0], 64)
    case_id = f"moe/f32*{format}/row/t{rows}-e4-k2-c{block}-f{block}/{name}#bound"
    data = moe_data(Numbers(seed_of(1, case_id)), format, count, 4, 2, block, block, bias=bias)
    expected = data.expected("silu", Numerics(act=act))
    error = np.abs(expected.y * FAULT - expected.y) - expected.slack
    assert (error / expected.bound).max() >= 2
