"""The sizes of real models, dimension by dimension: what the cases of each op have to reach at Bronze, and why some stop before.

A test runs the cases' way to the op, looks at the operands that are given to it, and compares: the table cannot say what is not so, and an op or a format
that has no case of a size is named. `docs/conformance.md` shows the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .operands import Cache, In, Operand, State, Weight

__all__ = ["SIZES", "Size", "format_of"]

Inputs = Sequence[Operand]
Measure = Callable[[Inputs, Mapping[str, Any]], int]


@dataclass(frozen=True)
class Size:
    """One dimension of an op. real: its size in `model`; of: what the operands of a case have; at_least: what the cases reach in every format of
    weights or caches (0: the real size), and if that is less, why."""

    op: str
    name: str
    real: int
    model: str
    of: Measure
    at_least: int = 0
    why: str = ""

    @property
    def asked(self) -> int:
        """What the largest case of each format has at least."""
        return self.at_least or self.real


def format_of(inputs: Inputs) -> str:
    """Format of an op's weights, type of its cache, or f32."""
    for operand in inputs:
        if isinstance(operand, Weight):
            return operand.format
        if isinstance(operand, Cache):
            return operand.spec.dtype or "f32"
    return "f32"


def _dim(at: int, axis: int) -> Measure:
    """Size of an operand along an axis: 0 where it is missing or has no such axis."""

    def measure(inputs: Inputs, attrs: Mapping[str, Any]) -> int:
        operand = inputs[at] if at < len(inputs) else None
        shape = operand.array.shape if isinstance(operand, In) else operand.shape if isinstance(operand, Weight) else ()
        return int(shape[axis]) if -len(shape) <= axis < len(shape) else 0

    return measure


def _heads(at: int, axis: int) -> Measure:
    """The same, of operands [T, H, D] alone."""
    inner = _dim(at, axis)
    return lambda inputs, attrs: inner(inputs, attrs) if _dim(at, 2)(inputs, attrs) else 0


def _largest(at: int) -> Measure:
    """The largest number in an operand."""

    def measure(inputs: Inputs, attrs: Mapping[str, Any]) -> int:
        operand = inputs[at] if at < len(inputs) else None
        return int(operand.array.max(initial=0)) if isinstance(operand, In) else 0

    return measure


def _product(*parts: Measure) -> Measure:
    return lambda inputs, attrs: int(np.prod([part(inputs, attrs) for part in parts]))


def _spec(name: str) -> Measure:
    """Of a cache."""
    return lambda inputs, attrs: next((int(getattr(i.spec, name)) for i in inputs if isinstance(i, Cache)), 0)


def _slots(inputs: Inputs, attrs: Mapping[str, Any]) -> int:
    return next((i.slots for i in inputs if isinstance(i, State)), 0)


def _attr(name: str) -> Measure:
    return lambda inputs, attrs: int(attrs.get(name, 0))


def _hiding(inputs: Inputs, attrs: Mapping[str, Any]) -> int:
    """The window, if it is narrower than a context of the case."""
    return _attr("window")(inputs, attrs) if _attr("window")(inputs, attrs) < _largest(4)(inputs, attrs) else 0


def _by_kv_head(inputs: Inputs, attrs: Mapping[str, Any]) -> int:
    return _dim(0, 1)(inputs, attrs) // max(_spec("num_kv_heads")(inputs, attrs), 1)


_LLAMA, _GEMMA, _DEEPSEEK, _QWEN, _OSS, _NEXT, _BLOOM = "Llama 3.1 405B", "Gemma 3 27B", "DeepSeek-V3", "Qwen3-235B-A22B", "gpt-oss-120b", "Qwen3-Next-80B-A3B", "BLOOM 176B"
_STEP = "a step of 512 rows, the engine's own choice"
_SAME_BITS = "the bits of a count that are in use are those that 16 bits lack; more of the same costs memory and time"

SIZES: tuple[Size, ...] = (
    Size("embed", "rows of the table", 262_208, _GEMMA, _dim(1, 0)), Size("embed", "width", 16_384, _LLAMA, _dim(1, 1)), Size("embed", "rows", 512, _STEP, _dim(0, 0)),
    Size("linear", "outputs", 262_208, _GEMMA, _dim(1, 0)), Size("linear", "products of a sum", 53_248, _LLAMA, _dim(1, 1)), Size("linear", "rows", 512, _STEP, _dim(0, 0)),
    Size("matmul", "heads", 128, _DEEPSEEK, _dim(1, 0)), Size("matmul", "outputs of a head", 512, _DEEPSEEK, _dim(1, 1)), Size("matmul", "products of a sum", 512, _DEEPSEEK, _dim(1, 2)),
    Size("matmul", "rows of all heads' matrices", 65_536, _DEEPSEEK, _product(_dim(1, 0), _dim(1, 1))), Size("matmul", "rows", 512, _STEP, _dim(0, 0)),
    Size("rms_norm", "width", 16_384, _LLAMA, _dim(0, -1)), Size("rms_norm", "heads", 64, _QWEN, _heads(0, 1)), Size("rms_norm", "width of a head", 256, "Gemma 3 4B", _heads(0, 2)),
    Size("rms_norm", "rows", 512, _STEP, _dim(0, 0)), Size("layer_norm", "width", 14_336, _BLOOM, _dim(0, -1)), Size("layer_norm", "rows", 512, _STEP, _dim(0, 0)),
    Size("rope", "heads", 128, _LLAMA, _dim(0, 1)), Size("rope", "width of a head", 256, "Gemma 3 4B", _dim(0, 2)), Size("rope", "pairs", 128, "Gemma 3 4B", _dim(2, 0)),
    Size("rope", "position", 262_143, f"{_QWEN} (2507)", _largest(1)), Size("rope", "rows", 512, _STEP, _dim(0, 0)),
    Size("kv_write", "heads", 112, _BLOOM, _spec("num_kv_heads")), Size("kv_write", "width of a key", 576, _DEEPSEEK, _spec("key_dim")), Size("kv_write", "width of a value", 256, "Gemma 3 4B", _spec("value_dim")),
    Size("kv_write", "slot", 1_048_575, "eight contexts of 131,072 tokens", _largest(3)), Size("kv_write", "rows", 512, _STEP, _dim(1, 0)),
    Size("attention", "heads", 128, _LLAMA, _dim(0, 1)), Size("attention", "kv heads", 112, _BLOOM, _spec("num_kv_heads")), Size("attention", "heads of one kv head", 128, _DEEPSEEK, _by_kv_head),
    Size("attention", "width of a key", 576, _DEEPSEEK, _spec("key_dim")), Size("attention", "width of a value", 512, _DEEPSEEK, lambda i, a: _spec("value_dim")(i, a) or _attr("value_dim")(i, a)),
    Size("attention", "tokens of a context", 262_144, f"{_QWEN} (2507)", _largest(4), 66_001, _SAME_BITS), Size("attention", "window", 262_144, "Phi-3-mini-128k, wider than its context", _attr("window")),
    Size("attention", "window that hides keys", 4_096, "Gemma 2", _hiding), Size("attention", "heads with a sink", 64, _OSS, _dim(6, 0)), Size("attention", "heads with a slope", 112, _BLOOM, _dim(7, 0)),
    Size("attention", "chunk", 8_192, "Llama 4", _attr("chunk")), Size("attention", "rows", 512, _STEP, _dim(0, 0)), Size("attention", "sequences", 256, "a server with --max-batch-size 256", _dim(4, 0)),
    Size("attention", "number of a block", 65_536, "a million tokens in blocks of 16", _largest(5)),
    Size("act_mul", "width", 53_248, _LLAMA, _dim(0, -1)), Size("act_mul", "rows", 512, _STEP, _dim(0, 0)),
    *(size for op in ("add", "mul") for size in (Size(op, "width", 16_384, _LLAMA, _dim(0, -1)), Size(op, "heads", 128, _LLAMA, _heads(0, 1)), Size(op, "rows", 512, _STEP, _dim(0, 0)))),
    Size("softmax", "width", 65_536, "more than any list of experts: no graph has it over a vocabulary", _dim(0, -1)), Size("softmax", "rows", 512, _STEP, _dim(0, 0)),
    *(size for op in ("quantize", "dequantize") for size in (Size(op, "width", 53_248, _LLAMA, _dim(0, -1)), Size(op, "rows", 512, _STEP, _dim(0, 0)))),
    Size("sample", "vocabulary", 262_208, _GEMMA, _dim(0, 1)), Size("sample", "rows", 256, "a server with --max-batch-size 256", _dim(0, 0)),
    Size("sample", "adjustments", 262_208, f"every id of {_GEMMA}", _dim(7, 0), 98_298, _SAME_BITS),
    Size("softcap", "width", 256_000, "Gemma 2", _dim(0, -1)), Size("softcap", "rows", 512, _STEP, _dim(0, 0)),
    Size("route_topk", "experts", 512, _NEXT, _dim(0, 1)), Size("route_topk", "experts of a row", 10, _NEXT, _attr("k")), Size("route_topk", "groups", 8, _DEEPSEEK, _attr("groups")),
    Size("route_topk", "groups that are kept", 4, _DEEPSEEK, _attr("keep_groups")), Size("route_topk", "rows", 512, _STEP, _dim(0, 0)),
    Size("moe", "experts", 512, _NEXT, _dim(3, 0), 257, "513 in f32, f16 and bf16; of other formats a stack of as many takes twice the memory, and 257 are more than 8 bits count"),
    Size("moe", "experts of a row", 10, _NEXT, _dim(1, 1), 2, "10 in f32; which experts a row takes has nothing to do with their format"),
    Size("moe", "width", 7_168, _DEEPSEEK, _dim(3, 2)), Size("moe", "hidden elements of an expert", 16_384, "Mixtral 8x22B", _dim(3, 1)),
    Size("moe", "rows of a stack of gates", 524_288, _DEEPSEEK, _product(_dim(3, 0), _dim(3, 1)), 65_792, f"a stack of {_DEEPSEEK} has 3.8 billion weights: {_SAME_BITS}"),
    Size("moe", "rows of a stack of last matrices", 1_835_008, _DEEPSEEK, _product(_dim(5, 0), _dim(5, 1)), 65_792, "see gates"), Size("moe", "rows", 512, _STEP, _dim(0, 0)),
    Size("concat", "heads", 128, _DEEPSEEK, _heads(0, 1)), Size("concat", "width of both", 576, _DEEPSEEK, lambda i, a: _dim(0, -1)(i, a) + _dim(1, -1)(i, a)), Size("concat", "rows", 512, _STEP, _dim(0, 0)),
    Size("short_conv", "channels", 8_192, _NEXT, _dim(1, 1)), Size("short_conv", "taps", 4, _NEXT, _dim(2, 1)), Size("short_conv", "slots", 256, "a server with --max-batch-size 256", _slots),
    Size("short_conv", "rows", 512, _STEP, _dim(1, 0)), Size("delta_rule", "heads", 32, _NEXT, _dim(3, 1)), Size("delta_rule", "key heads", 16, _NEXT, _dim(1, 1)),
    Size("delta_rule", "width of a key", 128, _NEXT, _dim(1, 2)), Size("delta_rule", "width of a value", 128, _NEXT, _dim(3, 2)), Size("delta_rule", "slots", 256, "a server with --max-batch-size 256", _slots),
    Size("delta_rule", "rows", 512, _STEP, _dim(1, 0)),
)  # fmt: skip
"""Every op of the catalogue, with what a model gives it. Not here, and in no case: a weight of more than 2 GiB. It would ask for many gigabytes on both sides."""
