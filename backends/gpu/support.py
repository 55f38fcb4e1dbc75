"""What the GPU backends answer to `supports`: every op of opset 1 but `sample`, on f32 activations. Pure; asked while a model is planned."""

from __future__ import annotations

from typing import Final

from fastllm.api import CATALOGUE, OPSET, KVSpec, No, OpQuery, Yes

from .layouts import PLAIN_KINDS, layout_for
from .lower import CACHE_BYTES, prepared_bytes, rope_table_bytes

__all__ = ["NATIVE_OPS", "answer"]

MAX_HEAD: Final = 1024
"""Widest attention head."""
MAX_BLOCK: Final = 1024
"""Most tokens of a cache block: their scores lie in local memory."""

_FLOAT = ("f32",)
_INT = ("i32",)
_PLAIN = tuple(PLAIN_KINDS)
_DTYPES: Final[dict[str, tuple[tuple[str, ...], ...]]] = {
    "embed": (_INT, (*_PLAIN, "packed")),
    "linear": (_FLOAT, (*_PLAIN, "packed"), _FLOAT),
    "matmul": (_FLOAT, _PLAIN),
    "rms_norm": (_FLOAT, _FLOAT),
    "layer_norm": (_FLOAT, _FLOAT, _FLOAT),
    "rope": (_FLOAT, _INT, _FLOAT),
    "kv_write": (("kv",), _FLOAT, _FLOAT, _INT),
    "attention": (_FLOAT, ("kv",), _INT, _INT, _INT, _INT, _FLOAT, _FLOAT, _INT),
    "act_mul": (_FLOAT, _FLOAT),
    "add": (_FLOAT, _FLOAT),
    "mul": (_FLOAT, _FLOAT),
    "softmax": (_FLOAT,),
    "quantize": (_FLOAT,),
    "dequantize": (("i8",), _FLOAT),
    "softcap": (_FLOAT,),
}
"""Types of the operands, in catalogue order; "packed": any format that layouts.py has a layout for."""
NATIVE_OPS: Final = tuple(_DTYPES)


def answer(q: OpQuery, *, pairs: bool, fp64: bool, kv_dtype: str) -> Yes | No:
    """The answer for kernels of this tuning on a device with or without f64."""
    spec = CATALOGUE.get(q.op)
    if spec is None or spec.since > OPSET:
        return No(f"'{q.op}' is not an op of opset {OPSET}")
    unknown = set(q.attrs) - set(spec.attrs)
    if unknown:
        return No(f"'{q.op}' has no attribute {', '.join(sorted(unknown))}")
    for key, value in q.attrs.items():
        if spec.attrs[key].choices and value not in spec.attrs[key].choices:
            return No(f"'{q.op}': {key}={value!r} is not known")
    if q.op not in NATIVE_OPS:
        return No("sampled on the host" if q.op == "sample" else f"there is no kernel for '{q.op}'")
    reason = _refuse_dtypes(q) or _refuse_shapes(q)
    if reason:
        return No(reason)
    if q.op == "linear" and q.dtypes[1] not in PLAIN_KINDS:
        width = int(q.shapes[0][1]) if q.shapes and q.shapes[0] else 0
        return Yes("linear", act="q8_g32", workspace=prepared_bytes(max(1, _most(q, 0)), width, pairs))
    if q.op == "rope":
        r = int(q.shapes[2][0]) if len(q.shapes) > 2 and q.shapes[2] else 0
        return Yes("rope", angle="f64" if fp64 else "f32", workspace=rope_table_bytes(max(1, _most(q, 0)), r))
    kept = next((s.dtype for s in q.specs if isinstance(s, KVSpec) and s.dtype), kv_dtype)
    if kept not in CACHE_BYTES:
        return No(f"keys and values as {kept}; they are kept as {' or '.join(CACHE_BYTES)}")
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


def _refuse_dtypes(q: OpQuery) -> str:
    """Why these operand types do not work; "" if they do."""
    wanted = _DTYPES[q.op]
    for index, dtype in enumerate(q.dtypes):
        if dtype is None:
            continue
        known = wanted[index] if index < len(wanted) else ()
        if dtype in known:
            continue
        if "packed" in known and len(q.shapes) > index and q.shapes[index] is not None:
            shape = [int(d) for d in q.shapes[index] or () if isinstance(d, int)]
            if layout_for(shape, dtype, frozenset({q.op})) is not None:
                continue
        return f"operand {index} of '{q.op}' in {dtype}"
    return ""


def _refuse_shapes(q: OpQuery) -> str:
    """Why these shapes do not work; "" if they do."""
    for index, shape in enumerate(q.shapes):
        if shape is None:
            continue
        if len(shape) > 3:
            return f"operand {index} has {len(shape)} dimensions; kernels take three at most"
        if any(isinstance(d, str) for d in shape[1:]) and not (q.op == "attention" and index == 5):
            return f"operand {index} of shape {list(shape)}: only the leading dimension may vary"
    if q.op == "attention" and q.shapes and q.shapes[0] is not None:
        width = max(int(q.shapes[0][2]), int(q.attrs.get("value_dim", 0)))
        if width > MAX_HEAD:
            return f"heads of {width} elements; kernels take {MAX_HEAD} at most"
        if q.dims.get("block_size", (0, 0))[1] > MAX_BLOCK:
            return f"cache blocks of {q.dims['block_size'][1]} tokens; kernels take {MAX_BLOCK} at most"
    return ""
