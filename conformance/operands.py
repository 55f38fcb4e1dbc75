"""Operands of a case: plain arrays with their windows, weights as a file has them, caches and states that live on the device; and the planner's
question about them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastllm.api import CATALOGUE, OPSET, Buffer, KVSpec, OpQuery, SlotSpec, Tensor

from . import blocks

__all__ = ["NUMPY", "Cache", "In", "Operand", "Region", "State", "Weight", "dtype_of", "query_for"]

NUMPY: dict[str, Any] = {"f32": np.float32, "f64": np.float64, "i32": np.int32, "i8": np.int8, "f16": np.float16, "bf16": np.uint16}


@dataclass
class In:
    """A plain operand. lead: symbol of its leading dimension ("" if fixed); gap: elements between rows (a strided window);
    start: elements before the first (a window that is not aligned);
    inner: elements behind each head of [T, H, D] (a part of a wider head)."""

    array: np.ndarray
    dtype: str = "f32"
    lead: str = ""
    gap: int = 0
    start: int = 0
    inner: int = 0

    @property
    def strides(self) -> tuple[int, ...] | None:
        """In elements, of a strided window; None where rows follow each other."""
        if not self.gap and not self.inner:
            return None
        inner = [*self.array.shape[1:]]
        if self.inner:
            inner[-1] += self.inner
        return (math.prod(inner) + self.gap, *(math.prod(inner[i + 1 :]) for i in range(len(inner))))


@dataclass
class Weight:
    """A weight as a file has it: shape [N, K], or a stack [E, N, K]; format, bytes u8. kept: the form it must have on the device ("" :
    as the planner would)."""

    shape: tuple[int, ...]
    format: str
    data: np.ndarray
    kept: str = ""

    def decode(self) -> np.ndarray:
        """f64 values of `shape`, by the suite's own decoder."""
        return blocks.decode(self.format, self.data, int(np.prod(self.shape))).reshape(self.shape)


@dataclass
class Cache:
    """A paged key/value cache that lives on the device over several ops; made by `Bench.cache`."""

    spec: KVSpec
    block_size: int
    num_blocks: int
    tensor: Tensor | None = None
    region: Region | None = None


@dataclass
class State:
    """State of fixed size in slots, on the device over several ops; made by `Bench.state`."""

    spec: SlotSpec
    slots: int
    tensor: Tensor | None = None
    region: Region | None = None


Operand = In | Weight | Cache | State | None


@dataclass
class Region:
    """A buffer with its zones: data at `base`, `nbytes` long."""

    buffer: Buffer
    base: int
    nbytes: int
    before: np.ndarray  # u8, the whole buffer as it was uploaded


def dtype_of(operand: Operand) -> str:
    """The format of a weight, the dtype of an array, `kv` of a cache, `slot` of a state, "" of an operand that is not there."""
    if operand is None:
        return ""
    if isinstance(operand, State):
        return "slot"
    return "kv" if isinstance(operand, Cache) else operand.format if isinstance(operand, Weight) else operand.dtype


def query_for(op: str, inputs: Sequence[Operand], kept: Sequence[str], attrs: Mapping[str, Any], sizes: Mapping[str, int]) -> OpQuery:
    """The planner's question about these operands: leading dimensions are symbols with a range from 0 to the case's size."""
    spec = CATALOGUE[op]
    dims: dict[str, tuple[int, int]] = {"T": (0, 0), "S": (0, 1), "R": (0, 1), "B": (0, 1), "ctx": (0, 1), "block_size": (64, 64)}
    shapes: list[tuple[int | str, ...] | None] = []
    specs: list[Any] = []
    strides: list[tuple[int, ...] | None] = []
    for operand in inputs:
        strides.append(operand.strides if isinstance(operand, In) else None)
        specs.append(operand.spec if isinstance(operand, Cache | State) else None)
        if operand is None:
            shapes.append(None)
        elif isinstance(operand, Cache | State):
            shapes.append(())
            if isinstance(operand, Cache):
                dims["block_size"] = (operand.block_size, operand.block_size)
        elif isinstance(operand, Weight):
            shapes.append(operand.shape)
        else:
            lead = operand.lead
            shape = operand.array.shape
            shapes.append((lead, *shape[1:]) if lead else shape)
            if lead in dims:
                dims[lead] = (0, max(dims[lead][1], shape[0]))
    if op == "attention":
        shapes[5] = ("S", "B")
    for symbol, largest in sizes.items():
        dims[symbol] = (0, largest)
    changed = {k: v for k, v in attrs.items() if v != spec.attrs[k].default}
    assert spec.since <= OPSET
    return OpQuery(op, tuple(k or None for k in kept), tuple(shapes), dims, changed, tuple(specs), tuple(strides))
