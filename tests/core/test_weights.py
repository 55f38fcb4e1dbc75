"""What a WeightRef takes from a file's tensor: experts, rows, gathers, added constants, of plain and of block formats."""

from __future__ import annotations

import numpy as np
import pytest

from fastllm.core import _kernels
from fastllm.core.errors import ModelFileError
from fastllm.core.weights import TensorSource, WeightRef

SHAPE = (3, 4, 32)


def stacked(format):
    """A stacked tensor [3, 4, 32] and its values."""
    values = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    data = values.reshape(-1).view(np.uint8) if format == "f32" else _kernels.encode(format, values.reshape(-1))
    return {"w": TensorSource("w", SHAPE, format, data.view(np.uint8))}, _kernels.decode(format, data.view(np.uint8), values.size).reshape(SHAPE)


@pytest.mark.parametrize("format", ["f32", "q8_0"])
def test_an_expert_its_rows_and_a_gather_of_them_are_parts_of_the_stack(format):
    sources, values = stacked(format)
    whole = WeightRef("w").resolve(sources, "g", SHAPE)
    assert np.array_equal(whole.decode(), values)
    for ref, expected in (
        (WeightRef("w", expert=1), values[1]),
        (WeightRef("w", expert=2, rows=(1, 3)), values[2, 1:3]),
        (WeightRef("w", expert=0, row_index=(3, 0, 3)), values[0][[3, 0, 3]]),
        (WeightRef("w", rows=(1, 3)), values[1:3]),
    ):
        tensor = ref.resolve(sources, "g", expected.shape)
        assert tensor.format == format
        assert np.array_equal(tensor.decode(), expected)
    added = WeightRef("w", expert=1, add=1.0).resolve(sources, "g", SHAPE[1:])
    assert added.format == "f32"
    assert np.array_equal(added.decode(), values[1] + np.float32(1))


def test_parts_that_the_file_does_not_have_are_named():
    sources, _ = stacked("f32")
    for ref, message in (
        (WeightRef("w", expert=3), "has no expert 3"),
        (WeightRef("w", rows=(2, 4)), "has 3 rows, but rows 2…4"),
        (WeightRef("w", row_index=(0, 3)), "has 3 rows, but row 3"),
        (WeightRef("v"), "tensor 'v' is missing"),
        (WeightRef("w", expert=0), r"gives shape \[4, 32\].*asks for \[3, 4, 32\]"),
    ):
        with pytest.raises(ModelFileError, match=message):
            ref.resolve(sources, "g", SHAPE)
