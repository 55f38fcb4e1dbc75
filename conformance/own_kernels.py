"""What the kernels of calibration are built on: memory of `ref`, and weights of every format, decoded to f32 when they are packed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fastllm.api import FORMATS, Buffer, HostTensor, No, OpFn, OpQuery, PackedLayout, RefBackend, Stream, Tensor, Yes

from . import blocks

__all__ = ["OwnKernels", "check_experts", "read_decoded"]

Array = np.ndarray
F32 = np.float32
WITH_WEIGHTS = ("linear", "matmul", "moe", "embed")


def check_experts(ids: Array, count: int) -> None:
    """Raises IndexError if one of the ids is no expert's."""
    if ids.size and (ids.min() < 0 or ids.max() >= count):
        raise IndexError(f"moe: an id outside of 0…{count - 1}")


def read_decoded(read: Callable[[Tensor, Stream], Array], t: Tensor, stream: Stream, alignment: int) -> Array:
    """A tensor by `read`; a packed weight, which is kept in f32, as such. The matrices of a stack begin at multiples of the alignment."""
    if t.packed is None:
        return read(t, stream)
    if len(t.shape) == 2:
        return read(Tensor(t.buffer, t.offset, t.shape, "f32"), stream)
    step = -(-t.packed.nbytes // alignment) * alignment
    parts = [read(Tensor(t.buffer, t.offset + i * step, t.shape[1:], "f32"), stream) for i in range(t.shape[0])]
    return np.stack(parts) if parts else np.zeros(t.shape, F32)


class OwnKernels(RefBackend):
    """A backend whose ops are its methods `_own_OP`, on arrays; others are those of `ref`."""

    act: str | None = None

    def decode(self, weight: HostTensor) -> Array:
        """f32 values of a weight, by the suite's own decoder."""
        return blocks.decode(weight.format, np.asarray(weight.data), math.prod(weight.shape)).astype(F32)

    def supports(self, q: OpQuery) -> Yes | No:
        """As `ref`, and weights of every format."""
        if q.op in WITH_WEIGHTS:
            q = replace(q, dtypes=tuple("f32" if d in FORMATS else d for d in q.dtypes))
        answer = super().supports(q)
        if isinstance(answer, No):
            return answer
        own = f"{self.name}.{q.op}"
        act = self.act if q.op in ("linear", "moe") else None
        return replace(answer, impl=own if own in self.ops() else answer.impl, act=act)

    def ops(self) -> Mapping[str, OpFn]:
        """`NAME.op` for what is computed here; embed, add and mul, which leave no choice, are inherited."""
        own = {name.removeprefix("_own_"): getattr(self, name) for name in dir(self) if name.startswith("_own_")}
        return {**super().ops(), **{f"{self.name}.{op}": self._wrapped(fn) for op, fn in own.items()}}

    def _wrapped(self, fn: Callable[..., Any]) -> OpFn:
        def run(*operands: Tensor | None, out: Any, stream: Stream, ws: Any, **attrs: Any) -> None:
            with np.errstate(all="ignore"):
                arrays = [t if t is None or t.dtype in ("kv", "slot") else self.read(t, stream) for t in operands]
                results = fn(*arrays, **attrs)
                if results is None:  # kv_write
                    return
                for t, values in zip(out if isinstance(out, tuple) else (out,), results if isinstance(results, tuple) else (results,), strict=True):
                    self.write(t, values, stream)

        return run

    # weights --------------------------------------------------------------------------------------------------------

    def pack_layout(self, shape: Sequence[int], format: str, uses: frozenset[str]) -> PackedLayout | None:
        """f32, whatever the format."""
        if format == "f32" or not (format in blocks.PLAIN_BYTES or format in blocks.BLOCK_BYTES):
            return None
        return PackedLayout("own.f32", 1, format, (int(shape[0]), int(shape[1])), 4 * int(shape[0]) * int(shape[1]))

    def pack_weight(self, weight: HostTensor, layout: PackedLayout, dst: Buffer, offset: int) -> None:
        """Decodes into the buffer."""
        values = np.ascontiguousarray(self.decode(weight), F32).reshape(-1)
        self.upload(dst, offset, memoryview(values.view(np.uint8)), Stream())

    def read(self, t: Tensor, stream: Stream) -> Array:
        """A packed weight reads as f32."""
        return read_decoded(super().read, t, stream, self.limits.alignment)
