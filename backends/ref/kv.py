"""How `ref` keeps keys and values: the definition of every type of `--kv-dtype`.

    f32          as they are
    f16, bf16    rounded to nearest even
    int8         of each token, head and group of GROUP channels (the last one of a head may be shorter): scale = largest |x| / 127
                 (f32), code = round(x / scale), read as code · scale. A group that holds NaN or infinity has the scale NaN, so whoever
                 sees it sees NaN.

A block holds keys [K, block_size, Dk], values [K, block_size, Dv] and, for int8, f32 scales [K, block_size, groups] of keys and of
values.
Called by `backend.py`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from fastllm.api import KVSpec

__all__ = ["GROUP", "block_bytes", "quantise", "read", "write"]

GROUP = 32
"""Channels of a head that share a scale of int8."""

_STORED: dict[str, np.dtype[Any]] = {"f16": np.dtype("f2"), "bf16": np.dtype("u2"), "f32": np.dtype("f4"), "int8": np.dtype("i1")}
F32 = np.float32


def block_bytes(spec: KVSpec, block_size: int) -> int:
    """Bytes of one block of `block_size` tokens."""
    return max(at + math.prod(shape) * dtype.itemsize for at, shape, dtype in _layout(spec, block_size))


def write(raw: np.ndarray, spec: KVSpec, block_size: int, offset: int, key: np.ndarray, value: np.ndarray | None) -> None:
    """Stores tokens in a block. raw: the block's bytes; offset: the first one's place; key [n, K, Dk], value [n, K, Dv] f32."""
    keys, values, key_scales, value_scales = _parts(raw, spec, block_size)
    places = slice(offset, offset + len(key))
    for x, codes, scales in ((key, keys, key_scales), (value, values, value_scales)):
        if x is None:
            continue
        rows = x.swapaxes(0, 1)  # [K, n, D]
        if spec.dtype == "int8":
            codes[:, places], scales[:, places] = quantise(rows)
        elif spec.dtype == "bf16":
            codes[:, places] = _to_bf16(rows)
        else:
            codes[:, places] = rows


def read(raw: np.ndarray, spec: KVSpec, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """A block as f32: keys [K, block_size, Dk] and values [K, block_size, Dv]."""
    keys, values, key_scales, value_scales = _parts(raw, spec, block_size)
    if spec.dtype == "int8":
        return _scaled(keys, key_scales), _scaled(values, value_scales)
    if spec.dtype == "bf16":
        return (keys.astype(np.uint32) << 16).view(F32), (values.astype(np.uint32) << 16).view(F32)
    return keys.astype(F32), values.astype(F32)


def quantise(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x [..., D] -> codes i8 [..., D], scales f32 [..., groups]."""
    starts = np.arange(0, x.shape[-1], GROUP)
    most = np.maximum.reduceat(np.abs(x), starts, axis=-1).astype(F32)
    finite = np.logical_and.reduceat(np.isfinite(x), starts, axis=-1)
    scales = np.where(finite, most / F32(127), F32(np.nan)).astype(F32)
    each = np.repeat(scales, GROUP, axis=-1)[..., : x.shape[-1]]
    codes = np.where(np.isnan(each), F32(0), np.rint(x / np.where(each > 0, each, F32(1))))
    return np.clip(codes, -127, 127).astype(np.int8), scales


def _scaled(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """codes [..., D] · scales [..., groups] -> f32 [..., D]."""
    return codes.astype(F32) * np.repeat(scales, GROUP, axis=-1)[..., : codes.shape[-1]]


def _to_bf16(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, F32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), bits >> 16 | 0x40, rounded).astype(np.uint16)


@lru_cache(maxsize=64)
def _layout(spec: KVSpec, block_size: int) -> tuple[tuple[int, tuple[int, ...], np.dtype[Any]], ...]:
    """(byte offset, shape, dtype) of keys, values, scales of keys and scales of values; shapes of none where the type has none."""
    stored, f32, heads = _STORED[spec.dtype or "f32"], np.dtype("f4"), spec.num_kv_heads
    groups = [-(-dim // GROUP) if spec.dtype == "int8" else 0 for dim in (spec.key_dim, spec.value_dim)]
    shapes: list[tuple[tuple[int, ...], np.dtype[Any]]] = [
        ((heads, block_size, spec.key_dim), stored),
        ((heads, block_size, spec.value_dim), stored),
        ((heads, block_size, groups[0]), f32),
        ((heads, block_size, groups[1]), f32),
    ]
    parts, at = [], 0
    for shape, dtype in shapes:
        at = -(-at // dtype.itemsize) * dtype.itemsize
        parts.append((at, shape, dtype))
        at += math.prod(shape) * dtype.itemsize
    return tuple(parts)


def _parts(raw: np.ndarray, spec: KVSpec, block_size: int) -> list[np.ndarray]:
    """Windows on a block, as `_layout` has them."""
    layout = _layout(spec, block_size)
    return [raw[at : at + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape) for at, shape, dtype in layout]
