"""What kernels ask of an operand before they take its address, for every backend with kernels of its own: strides, windows, caches, and
the types that an op takes. Exported by `fastllm.api`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from .backend import OpQuery, Tensor
from .errors import ShapeError
from .graph import KVSpec
from .ops import CATALOGUE, OPSET
from .quant import FORMATS

__all__ = ["OPERAND_TYPES", "check_cache", "checked_strides", "contiguous", "refuse_operands", "refuse_query"]

_FLOAT = ("f32",)
_INT = ("i32",)
_PLAIN = ("f32", "f16", "bf16")

OPERAND_TYPES: Final[dict[str, tuple[tuple[str, ...], ...]]] = {
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
    "route_topk": (_FLOAT, _FLOAT),
    "concat": (_FLOAT, _FLOAT),
    "moe": (_FLOAT, _INT, _FLOAT, ("packed",), ("packed",), ("packed",), _FLOAT, _FLOAT, _FLOAT),
    "short_conv": (("slot",), _FLOAT, _FLOAT, _INT, _INT, _INT),
    "delta_rule": (("slot",), *[_FLOAT] * 7, _INT, _INT, _INT),
}
"""op -> types of its operands that kernels on f32 activations take, in catalogue order; "packed": any that the backend packs."""


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides, step = [], 1
    for dim in reversed(shape):
        strides.append(step)
        step *= dim
    return tuple(reversed(strides))


def checked_strides(t: Tensor, dtypes: Sequence[str]) -> tuple[int, ...]:
    """Strides in elements of a plain operand whose last axis is contiguous. Raises ShapeError for another type, strides that no kernel
    takes, and a window that leaves its buffer or is not aligned to its elements."""
    if t.dtype not in dtypes or t.packed is not None:
        raise ShapeError(f"an operand of {' or '.join(dtypes)} is needed, not {'packed ' if t.packed else ''}{t.dtype}")
    strides = t.strides if t.strides is not None else contiguous(t.shape)
    if 0 in t.shape:
        return contiguous(t.shape)  # nothing is read or written, whatever the strides say
    if len(strides) != len(t.shape) or min(strides, default=0) < 0:
        raise ShapeError(f"strides {list(strides)} of shape {list(t.shape)} are negative or of another rank")
    if len(t.shape) > 1 and t.shape[-1] > 1 and strides[-1] != 1:
        raise ShapeError(f"the last axis must be contiguous; strides are {list(strides)}")
    size = FORMATS[t.dtype].block_bytes
    span = 1 + sum((n - 1) * k for n, k in zip(t.shape, strides, strict=True))
    if t.offset < 0 or t.offset + span * size > t.buffer.nbytes or t.offset % size:
        raise ShapeError(f"a window of {span * size} bytes at {t.offset} leaves its buffer of {t.buffer.nbytes}, or is not aligned")
    return strides


def check_cache(t: Tensor, needed: int, align: int) -> None:
    """Raises ShapeError if a key/value cache does not lie in its buffer, or its blocks do not hold `needed` bytes each at multiples of
    `align`."""
    blocks = t.block_size >= 1 and t.num_blocks >= 0 and t.block_bytes >= needed and t.block_bytes % align == 0
    if not blocks or t.offset < 0 or t.offset % align or t.offset + t.num_blocks * t.block_bytes > t.buffer.nbytes:
        raise ShapeError(
            f"a cache of {t.num_blocks} blocks of {t.block_bytes} bytes at {t.offset} does not hold {t.block_size} tokens of {t.spec} each"
            f" in its buffer of {t.buffer.nbytes} bytes"
        )


def refuse_query(q: OpQuery, native: Sequence[str], caches: Sequence[str]) -> str:
    """Why no kernel of a backend answers this question, whatever the sizes: an op that is not of the opset or not among `native`, an
    attribute that the catalogue does not know, a cache in a type that is not among `caches`; "" if one may."""
    spec = CATALOGUE.get(q.op)
    if spec is None or spec.since > OPSET:
        return f"'{q.op}' is not an op of opset {OPSET}"
    unknown = set(q.attrs) - set(spec.attrs)
    if unknown:
        return f"'{q.op}' has no attribute {', '.join(sorted(unknown))}"
    for key, value in q.attrs.items():
        if spec.attrs[key].choices and value not in spec.attrs[key].choices:
            return f"'{q.op}': {key}={value!r} is not known"
    if q.op not in native:
        return "sampled on the host" if q.op == "sample" else f"there is no kernel for '{q.op}'"
    other = [s.dtype for s in q.specs if isinstance(s, KVSpec) and s.dtype and s.dtype not in caches]
    return f"keys and values as {other[0]}; they are kept as {', '.join(caches)}" if other else ""


def refuse_operands(q: OpQuery, packs: Callable[[Sequence[int], str, frozenset[str]], object], types: Mapping[str, Sequence[Sequence[str]]] = OPERAND_TYPES) -> str:
    """Why the types or ranks of these operands do not work; "" if they do. packs: (shape [N, K], format, ops) -> the packed layout, None
    if there is none; types: as OPERAND_TYPES."""
    for index, shape in enumerate(q.shapes):
        if shape is None:
            continue
        if len(shape) > 3:
            return f"operand {index} has {len(shape)} dimensions; kernels take three at most"
        if any(isinstance(d, str) for d in shape[1:]) and not (q.op == "attention" and index == 5):
            return f"operand {index} of shape {list(shape)}: only the leading dimension may vary"
    wanted = types[q.op]
    for index, dtype in enumerate(q.dtypes):
        known = wanted[index] if index < len(wanted) else ()
        if dtype is None or dtype in known:
            continue
        if "packed" in known and len(q.shapes) > index and q.shapes[index] is not None:
            numbers = [int(d) for d in q.shapes[index] or () if isinstance(d, int)]
            matrix = numbers[-2:] if q.op == "moe" else numbers  # a stack is packed matrix by matrix
            if packs(matrix, dtype, frozenset({q.op})) is not None:
                continue
        return f"operand {index} of '{q.op}' in {dtype}"
    return ""
