"""Checks of operands that all native backends share: windows, strides, caches, questions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastllm.api import (
    CATALOGUE,
    OPERAND_TYPES,
    Buffer,
    KVSpec,
    OpQuery,
    ShapeError,
    Tensor,
    check_cache,
    checked_strides,
    refuse_operands,
    refuse_query,
)

BUFFER = Buffer(1024, "kv", 0)
CACHE = Tensor(BUFFER, 0, (), "kv", spec=KVSpec(1, 8, 8), block_size=4, num_blocks=2, block_bytes=256)


def test_a_cache_lies_in_its_buffer_or_is_refused():
    check_cache(CACHE, 256, 2)
    check_cache(replace(CACHE, offset=512), 256, 2)
    for wrong in ({"offset": -64}, {"offset": -256, "num_blocks": 1}, {"offset": 1}, {"offset": 514}, {"num_blocks": 5}, {"num_blocks": -1}, {"block_bytes": 254}, {"block_bytes": 257}, {"block_size": 0}):
        with pytest.raises(ShapeError, match="a cache of"):
            check_cache(replace(CACHE, **wrong), 256, 2)


def test_a_window_has_whole_rows_in_its_buffer_or_is_refused():
    t = Tensor(BUFFER, 0, (4, 8), "f32")
    assert checked_strides(t, ("f32",)) == (8, 1)
    assert checked_strides(replace(t, strides=(16, 1)), ("f32",)) == (16, 1)
    assert checked_strides(replace(t, shape=(0, 8), strides=(-1, 5)), ("f32",)) == (8, 1)
    for wrong in ({"offset": -4}, {"offset": 2}, {"offset": 1000}, {"strides": (-8, 1)}, {"strides": (8,)}, {"strides": (1, 4)}, {"dtype": "f16"}, {"shape": (64, 8)}):
        with pytest.raises(ShapeError):
            checked_strides(replace(t, **wrong), ("f32",))


def test_every_op_but_sample_has_a_type_for_each_of_its_operands():
    assert set(OPERAND_TYPES) == set(CATALOGUE) - {"sample"}
    for op, types in OPERAND_TYPES.items():
        assert len(types) == len(CATALOGUE[op].inputs), op


def test_questions_are_refused_with_the_reason():
    q = OpQuery("linear", ("f32", "q4_0", None), (("T", 64), (8, 64), None), {"T": (0, 4)}, {}, (None, None, None))
    native = ("linear", "attention")
    assert refuse_query(q, native, ("f16",)) == ""
    assert "not an op" in refuse_query(replace(q, op="frob"), native, ("f16",))
    assert "no kernel" in refuse_query(replace(q, op="rope"), native, ("f16",))
    assert "host" in refuse_query(replace(q, op="sample"), native, ("f16",))
    assert "no attribute" in refuse_query(replace(q, attrs={"sharp": 1}), native, ("f16",))
    cache = replace(q, op="attention", specs=(None, KVSpec(1, 8, 8, "q3_k")))
    assert "q3_k" in refuse_query(cache, native, ("f16",))
    assert "not known" in refuse_query(replace(cache, attrs={"mask": "spiral"}), native, ("f16",))
    asked = []
    assert refuse_operands(q, lambda *a: asked.append(a) or 1) == ""
    assert asked == [([8, 64], "q4_0", frozenset({"linear"}))]
    assert "q4_0" in refuse_operands(q, lambda *a: None)
    assert "leading" in refuse_operands(replace(q, shapes=(("T", "S"), (8, 64), None)), lambda *a: 1)
    assert "dimensions" in refuse_operands(replace(q, shapes=((1, 2, 3, 4), (8, 64), None)), lambda *a: 1)
    stack = OpQuery("moe", ("f32", "i32", "f32", "q8_0", None, "q8_0"), (("T", 64), ("T", 2), ("T", 2), (4, 32, 64), None, (4, 64, 32)), {"T": (0, 4)}, {}, ())
    assert refuse_operands(stack, lambda shape, *a: 1 if len(shape) == 2 else None) == ""
