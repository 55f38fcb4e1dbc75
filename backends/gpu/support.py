"""What the GPU backends answer to `supports`: every op of opset 1 but `sample`, on f32 activations. Pure; asked while a model is planned."""

from __future__ import annotations

from typing import Final

from fastllm.api import OPERAND_TYPES, KVSpec, No, OpQuery, Yes, refuse_operands, refuse_query

from .layouts import PLAIN_KINDS, layout_for
from .lower import CACHE_BYTES, prepared_bytes, rope_table_bytes
from .recurrent import MAX_TAPS

__all__ = ["NATIVE_OPS", "answer"]

MAX_HEAD: Final = 1024
"""Widest attention head."""
MAX_BLOCK: Final = 1024
"""Most tokens of a cache block: their scores lie in local memory."""

NATIVE_OPS: Final = tuple(op for op in OPERAND_TYPES if op not in ("route_topk", "moe"))


def answer(q: OpQuery, *, pairs: bool, fp64: bool, kv_dtype: str) -> Yes | No:
    """The answer for kernels of this tuning on a device with or without f64."""
    reason = refuse_query(q, NATIVE_OPS, tuple(CACHE_BYTES)) or refuse_operands(q, layout_for) or _refuse_sizes(q)
    if reason:
        return No(reason)
    if q.op == "linear" and q.dtypes[1] not in PLAIN_KINDS:
        width = int(q.shapes[0][1]) if q.shapes and q.shapes[0] else 0
        return Yes("linear", act="q8_g32", workspace=prepared_bytes(max(1, _most(q, 0)), width, pairs))
    if q.op == "rope":
        r = int(q.shapes[2][0]) if len(q.shapes) > 2 and q.shapes[2] else 0
        return Yes("rope", angle="f64" if fp64 else "f32", workspace=rope_table_bytes(max(1, _most(q, 0)), r))
    kept = next((s.dtype for s in q.specs if isinstance(s, KVSpec) and s.dtype), kv_dtype)
    if q.op == "attention":
        return Yes("attention", weight=None if kept == "f32" else kept)
    return Yes(q.op)


def _most(q: OpQuery, index: int) -> int:
    """The most rows of an operand."""
    shape = q.shapes[index] if len(q.shapes) > index else None
    if not shape:
        return 0
    lead = shape[0]
    return lead if isinstance(lead, int) else q.dims[lead][1]


def _refuse_sizes(q: OpQuery) -> str:
    """Why ids with a stride, or heads or cache blocks of this size, do not work; "" if they do."""
    for dtype, shape, strides in zip(q.dtypes, q.shapes, q.strides, strict=False):
        if q.op != "embed" and dtype == "i32" and strides is not None and shape is not None and len(shape) == 1:
            return f"'{q.op}' takes a contiguous vector of i32, not one with a stride of {strides[0]}"
    if q.op == "attention" and q.shapes and q.shapes[0] is not None:
        width = max(int(q.shapes[0][2]), int(q.attrs.get("value_dim", 0)))
        if width > MAX_HEAD:
            return f"heads of {width} elements; kernels take {MAX_HEAD} at most"
        if q.dims.get("block_size", (0, 0))[1] > MAX_BLOCK:
            return f"cache blocks of {q.dims['block_size'][1]} tokens; kernels take {MAX_BLOCK} at most"
    if q.op == "short_conv" and len(q.shapes) > 2 and q.shapes[2] is not None and int(q.shapes[2][1]) > MAX_TAPS:
        return f"{q.shapes[2][1]} taps; the kernel takes {MAX_TAPS} at most"
    return ""
