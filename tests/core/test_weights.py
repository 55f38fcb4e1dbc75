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


@pytest.mark.parametrize("format", ["f32", "bf16", "q8_0"])
def test_a_stack_of_tensors_is_its_parts_one_after_the_other(format):
    sources, values = stacked(format)
    parts = tuple(WeightRef("w", expert=e, rows=(1, 3)) for e in (2, 0))
    stack = WeightRef("", parts=parts)
    whole = stack.resolve(sources, "g", (2, 2, 32))
    assert whole.format == stack.format(sources) == format
    assert np.array_equal(whole.decode(), values[[2, 0], 1:3])
    assert stack.names == ("w", "w")
    assert stack.split(2) == parts
    with pytest.raises(ModelFileError, match="a stack of 2"):
        stack.resolve(sources, "g", (3, 2, 32))


def test_parts_in_different_formats_are_decoded():
    sources, values = stacked("f32")
    other, rounded = stacked("q8_0")
    sources["v"] = other["w"]
    stack = WeightRef("", parts=(WeightRef("w", expert=0), WeightRef("v", expert=1)))
    whole = stack.resolve(sources, "g", (2, 4, 32))
    assert whole.format == stack.format(sources) == "f32"
    assert np.array_equal(whole.decode(), np.stack([values[0], rounded[1]]))


@pytest.mark.parametrize(("format", "result"), [("f32", "f32"), ("bf16", "bf16"), ("q8_0", "f32")])
def test_a_matrix_stored_the_other_way_round_is_turned(format, result):
    sources, values = stacked(format)
    ref = WeightRef("w", expert=1, transpose=True, row_index=(0, 2, 4))
    tensor = ref.resolve(sources, "g", (3, 4))
    assert tensor.format == ref.format(sources) == result
    assert np.array_equal(tensor.decode(), values[1].T[[0, 2, 4]])
    assert ref.shape_in(sources["w"], (3, 4)) == (3, 4)
    with pytest.raises(ModelFileError, match="no stack of matrices"):
        WeightRef("w", transpose=True).resolve(sources, "g", (32, 4))


def test_shapes_are_known_without_data():
    src = stacked("f32")[0]["w"]
    for ref, shape in (
        (WeightRef("w"), SHAPE),
        (WeightRef("w", expert=0), (4, 32)),
        (WeightRef("w", expert=0, rows=(1, 3)), (2, 32)),
        (WeightRef("w", expert=0, rows=(1, 3), transpose=True), (32, 2)),
        (WeightRef("w", expert=3), None),
        (WeightRef("w", rows=(0, 4)), None),
        (WeightRef("w", row_index=(3,)), None),
        (WeightRef("w", transpose=True), None),
    ):
        assert ref.shape_in(src, ()) == shape


def test_a_vector_is_a_matrix_of_one_row():
    values = np.arange(8, dtype=np.float32)
    sources = {"w": TensorSource("w", (8,), "f32", values.view(np.uint8))}
    assert WeightRef("w").resolve(sources, "g", (1, 8)).shape == (1, 8)
    assert WeightRef("w").shape_in(sources["w"], (1, 8)) == (1, 8)


def test_values_of_a_block_cannot_be_taken_apart():
    sources, _ = stacked("q8_0")
    sources["v"] = TensorSource("v", (32,), "q8_0", sources["w"].data[:34])
    with pytest.raises(ModelFileError, match=r"rows of 1 values cannot be taken from a tensor of shape \[32\] in q8_0"):
        WeightRef("v", row_index=(0, 2)).resolve(sources, "g", (2,))
