"""The step that is moved on, and the arrays that are copied, in native code: only what fits is touched."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from fastllm.core import _steps
from fastllm.core.errors import EngineError, ShapeError

I32 = np.int32


def decoding(start, tokens):
    sequence = SimpleNamespace(num_computed=start + 1, num_tokens=start + 2, tokens=np.array(tokens, I32))
    return SimpleNamespace(sequence=sequence, start=start)


def arrays(count):
    return [np.zeros(count, I32) for _ in range(4)]


def test_a_step_moves_on_by_one_token_of_each_sequence():
    slices = [decoding(1, [5, 6, 7]), decoding(0, [8, 9])]
    ids, positions, slots, context_len = np.array([6, 8], I32), np.array([1, 0], I32), np.array([65, 0], I32), np.array([2, 1], I32)
    assert _steps.move(slices, 64, ids, positions, slots, context_len)
    assert (ids.tolist(), positions.tolist(), slots.tolist(), context_len.tolist()) == ([7, 9], [2, 1], [66, 1], [3, 2])
    assert [part.start for part in slices] == [2, 1]


@pytest.mark.parametrize("change", [{"num_computed": 5}, {"num_tokens": 5}])
def test_a_sequence_with_more_to_compute_is_not_moved(change):
    part = decoding(0, range(8))
    vars(part.sequence).update(change)
    assert not _steps.move([part], 64, *arrays(1))
    assert part.start == 0


def test_the_first_token_of_a_block_is_not_moved_to():
    assert not _steps.move([decoding(3, range(8))], 4, *arrays(1))


def test_arrays_of_another_type_or_length_are_refused():
    part = decoding(0, [1, 2])
    with pytest.raises(ShapeError, match="other lengths"):
        _steps.move([part], 64, *arrays(2))
    with pytest.raises(ShapeError, match="int64"):
        _steps.move([part], 64, np.zeros(1, np.int64), *arrays(1)[:3])
    with pytest.raises(ShapeError, match="in memory of 1"):
        _steps.move([decoding(0, [1])], 64, *arrays(1))


def test_a_table_goes_to_the_front_of_the_wider_one():
    target = np.full((3, 4), -1, I32)
    batch = SimpleNamespace(block_table=np.arange(4, dtype=I32).reshape(2, 2))
    _steps.fill([("block_table", "S", False, target)], batch, 2, 2, 2)
    assert target.tolist() == [[0, 1, -1, -1], [2, 3, -1, -1], [-1] * 4]


@pytest.mark.parametrize(
    ("rows", "target", "message"),
    [(2, None, "2 rows of 'ids' instead of 3"), (3, np.zeros(2, I32), "room for 2")],
)
def test_arrays_that_do_not_fit_are_refused(rows, target, message):
    with pytest.raises(EngineError, match=message):
        _steps.fill([("ids", "T", False, target)], SimpleNamespace(ids=np.zeros(rows, I32)), 3, 1, 1)


def test_a_table_that_is_too_wide_is_refused():
    batch = SimpleNamespace(block_table=np.zeros((1, 5), I32))
    with pytest.raises(EngineError, match="a block table of 5 columns"):
        _steps.fill([("block_table", "S", False, np.zeros((1, 4), I32))], batch, 1, 1, 1)
