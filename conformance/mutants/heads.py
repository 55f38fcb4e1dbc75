"""Faults that only show with as many heads, and heads as wide, as real models have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fastllm.api import KVSpec

from .base import Breaker, Mutant, MutantBase, changed, post, pre
from .numeric import make

__all__ = ["mutants"]

Array = np.ndarray


def _lost(first: int) -> Breaker:
    """Results of heads from `first` on are zero."""
    return post(lambda out, arrays, attrs: out.__setitem__((slice(None), slice(first, None)), 0))


def _without(first: int, axis: int = -1) -> Callable[[Array], Array]:
    """Elements of an axis from `first` on count as 0."""

    def cut(x: Array) -> Array:
        np.moveaxis(x, axis, 0)[first:] = 0
        return x

    return cut


def _few_stored(backend: MutantBase, inputs: list[Any], attrs: Any) -> None:
    """Keys and values of heads from the 17th on are stored as zeros."""
    for at in (1, 2):
        if inputs[at] is not None:
            inputs[at] = backend.temporary(_without(16, 1)(backend.array(inputs[at]).copy()), inputs[at])


def _few_read(backend: MutantBase, honest: Callable[..., None]) -> Callable[..., None]:
    """Query heads of kv heads from the 17th on take the results of those of the first."""

    def call(query: Any, cache: Any, *inputs: Any, out: Any, **more: Any) -> None:
        honest(query, cache, *inputs, out=out, **more)
        assert isinstance(cache.spec, KVSpec)
        result, group = backend.array(out), query.shape[1] // cache.spec.num_kv_heads
        late = np.arange(16 * group, query.shape[1])
        result[:, late] = result[:, late % (16 * group)]

    return call


def _wrapped_rows(matrices: Array) -> Array:
    """Row h · N + n of all heads' matrices is the one that its last 16 bits name."""
    rows = matrices.reshape(-1, matrices.shape[-1])
    return rows[np.arange(len(rows)) & 0xFFFF].reshape(matrices.shape)


def _table() -> Iterator[tuple[str, str, str, str, str, Breaker]]:
    a, late = "attention/f32/row/*/", "heads from the 65th on are zero"
    yield "attention", "heads_beyond_64", late, a + "llama_405b#bound", "bound", _lost(64)
    yield "attention", "heads_beyond_32", "heads from the 33rd on are zero", a + "gpt_oss#bound", "bound", _lost(32)
    yield "attention", "heads_beyond_16_of_a_prompt", "heads from the 17th on are zero in steps of more than 16 rows", a + "heads_prefill#bound", "bound", post(lambda out, x, t: out.__setitem__((slice(16 if len(out) > 16 else 1 << 30, None), slice(16, None)), 0))
    yield "attention", "latent_heads_beyond_64", late, a + "deepseek_v3#bound", "bound", _lost(64)
    yield "attention", "kv_heads_beyond_16", "kv heads from the 17th on are counted in 4 bits", a + "qwen_72b#bound", "bound", _few_read
    yield "attention", "channels_beyond_128", "channels of keys from the 129th on do not count", a + "d256_heads#bound", "bound", changed(0, _without(128))
    yield "attention", "channels_beyond_512", "channels of keys from the 513th on do not count", a + "deepseek_v3#bound", "bound", changed(0, _without(512))
    yield "attention", "values_beyond_256", "channels of values from the 257th on are zero", a + "deepseek_v3#bound", "bound", post(lambda out, x, t: out.__setitem__((..., slice(256, None)), 0))
    yield "attention", "sinks_beyond_32", "sinks of heads from the 33rd on are 0", a + "gpt_oss#bound", "bound", changed(6, _without(32))
    yield "attention", "slopes_beyond_64", "slopes of heads from the 65th on are 0", a.replace("*", "*h112_112*") + "alibi_heads#bound", "bound", changed(7, _without(64))
    for dtype in ("f16", "bf16", "int8"):
        yield "attention", f"heads_beyond_64_{dtype}", late, f"attention/{dtype}/row/*/heads#bound", "bound", _lost(64)
        yield "attention", f"sinks_beyond_32_{dtype}", "sinks of heads from the 33rd on are 0", f"attention/{dtype}/row/*/gpt_oss#bound", "bound", changed(6, _without(32))
        yield "attention", f"slopes_beyond_64_{dtype}", "slopes of heads from the 65th on are 0", f"attention/{dtype}/row/*/bloom#bound", "bound", changed(7, _without(64))
        yield "attention", f"kv_heads_beyond_16_{dtype}", "kv heads from the 17th on are counted in 4 bits", f"attention/{dtype}/row/*/mha#bound", "bound", _few_read
        yield "kv_write", f"heads_beyond_16_{dtype}", "heads from the 17th on are stored as zeros", f"kv_write/{dtype}/row/*/heads#bound", "bound", pre(_few_stored)
    yield "kv_write", "heads_beyond_16", "heads from the 17th on are stored as zeros", "kv_write/f32/row/*/heads#exact", "exact", pre(_few_stored)
    yield "rope", "heads_beyond_64", late, "rope/f32/row/t2-h128-*#bound", "bound", _lost(64)
    yield "rope", "pairs_beyond_64", "pairs from the 65th on are not turned", "rope/f32/row/t2-h32-d256-r128/*#bound", "bound", changed(2, _without(64))
    for op in ("rms_norm", "layer_norm"):
        yield op, "heads_beyond_64", late, f"{op}/f32/row/m2-h128-*/*#bound", "bound", _lost(64)
    for op in ("add", "mul"):
        yield op, "heads_beyond_64", late, f"{op}/f32/row/m2-h128-*/heads#exact", "exact", _lost(64)
    yield "matmul", "heads_beyond_64", late, "matmul/f32*f32/row/t2-h128-n520-k16/sparse#bound", "bound", _lost(64)
    yield "matmul", "rows_of_all_heads_of_16_bits", "h · N + n is kept in 16 bits", "matmul/f32*f32/row/t2-h128-n520-k16/sparse#bound", "bound", changed(1, _wrapped_rows)
    yield "concat", "heads_beyond_64", late, "concat/f32/row/t2-h128-*/normal#exact", "exact", _lost(64)
    yield "delta_rule", "heads_beyond_32", "heads from the 33rd on are zero", "delta_rule/f32/row/*/heads#bound", "bound", _lost(32)
    yield "short_conv", "channels_beyond_4096", "channels from the 4,097th on are zero", "short_conv/f32/row/*/wide#bound", "bound", _lost(4096)


def mutants() -> Iterator[Mutant]:
    """All of this file."""
    for op, name, what, cases, rule, breaker in _table():
        yield Mutant(f"{op}.{name}", "sizes", what, cases, rule, make(op, breaker), lambda options: MutantBase(None, options))
