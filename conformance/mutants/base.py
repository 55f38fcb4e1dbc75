"""What mutants are made of: honest backends over `ref`, and the ways to break one op of them.

Every base is honest and must pass the cases that its mutants fail: a mutant that dies of its base's fault proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fastllm.api import (
    FORMATS,
    Backend,
    Buffer,
    HostTensor,
    No,
    OpFn,
    OpQuery,
    PackedLayout,
    RefBackend,
    Stream,
    Tensor,
    Yes,
    host_sample,
)

from ..own_kernels import read_decoded
from ..suite.linear import FORMATS as WEIGHT_FORMATS

__all__ = ["CodedBase", "LateBase", "LateStream", "Mutant", "MutantBase", "PackedBase", "SamplerBase", "changed", "of_format", "post", "pre", "whole"]

Array = np.ndarray
Op = Callable[..., None]
Breaker = Callable[["MutantBase", Op], Op]
"""Makes a broken op from the honest one."""


@dataclass(frozen=True)
class Mutant:
    """One fault. cases: pattern of the cases that must see it; rule: what they must say; how: `case` (a case fails), `process` (the
    worker dies or hangs), `native` (the op is not counted as native), `level` (the run earns no level)."""

    name: str
    family: str
    what: str
    cases: str
    rule: str
    make: Callable[[Mapping[str, str]], Backend]
    base: Callable[[Mapping[str, str]], Backend]
    how: str = "case"


class MutantBase(RefBackend):
    """`ref` under another name, so that its ops count as native, with breakers per op."""

    name = "mutant"

    def __init__(self, breakers: Mapping[str, Breaker] | None = None, options: Mapping[str, str] | None = None):
        """breakers: op -> what to do to it; options: of the backend (threads)."""
        super().__init__()
        self.breakers, self.options = dict(breakers or {}), dict(options or {})

    def supports(self, q: OpQuery) -> Yes | No:
        """As ref, under names of its own."""
        answer = super().supports(q)
        if isinstance(answer, No):
            return answer
        return Yes(answer.impl.replace("ref.", "mutant."), answer.acc, answer.act, answer.weight, answer.prob, answer.angle, answer.workspace)

    def ops(self) -> Mapping[str, OpFn]:
        """Every op of ref, some of them broken."""
        found = {}
        for name, honest in super().ops().items():
            op = name.partition(".")[2]
            breaker = self.breakers.get(op)
            found[f"mutant.{op}"] = breaker(self, honest) if breaker else honest
        return found

    def array(self, tensor: Tensor | None) -> Array:
        """An operand or result, as a view of its memory."""
        assert tensor is not None
        return self.read(tensor, Stream())

    def temporary(self, values: Array, like: Tensor) -> Tensor:
        """A tensor of other values in memory of its own; f32 for a packed weight."""
        values = np.ascontiguousarray(values)
        buffer = self.wrap_host(values.reshape(-1).view(np.uint8), readonly=True)
        assert buffer is not None
        return Tensor(buffer, 0, values.shape, like.dtype if like.packed is None else "f32")


class PackedBase(MutantBase):
    """Keeps weights of some formats in a layout of its own: decoded to f32. decode: how."""

    formats: tuple[str, ...] = ("q4_0", "q4_1", "q8_0")

    def __init__(self, breakers: Mapping[str, Breaker] | None = None, options: Mapping[str, str] | None = None,
                 decode: Callable[[HostTensor], Array] = HostTensor.decode):  # fmt: skip
        """decode: bytes of a format -> f32 values."""
        super().__init__(breakers, options)
        self._decode = decode

    def supports(self, q: OpQuery) -> Yes | No:
        """Takes the packed formats where ops with such weights take f32."""
        if q.op in ("linear", "embed", "moe", "matmul"):
            mine = tuple("f32" if d in self.formats else d for d in q.dtypes)
            q = replace(q, dtypes=mine)
        return super().supports(q)

    def pack_layout(self, shape: Sequence[int], format: str, uses: frozenset[str]) -> PackedLayout | None:
        """Plain f32."""
        if len(shape) != 2 or format not in self.formats or int(shape[1]) % FORMATS[format].block:
            return None
        return PackedLayout("mutant.f32", 1, format, (int(shape[0]), int(shape[1])), 4 * int(shape[0]) * int(shape[1]))

    def pack_weight(self, weight: HostTensor, layout: PackedLayout, dst: Buffer, offset: int) -> None:
        """Decodes into the buffer."""
        values = np.ascontiguousarray(self._decode(weight), np.float32)
        self.upload(dst, offset, memoryview(values.reshape(-1).view(np.uint8)), Stream())

    def read(self, t: Tensor, stream: Stream) -> Array:
        """A packed weight reads as f32."""
        return read_decoded(super().read, t, stream, self.limits.alignment)


class CodedBase(PackedBase):
    """Keeps every format decoded to f32."""

    formats = tuple(name for name in WEIGHT_FORMATS if name != "f32")


class SamplerBase(MutantBase):
    """Has an op `sample`."""

    def supports(self, q: OpQuery) -> Yes | No:
        """And says so."""
        return Yes("mutant.sample") if q.op == "sample" else super().supports(q)

    def ops(self) -> Mapping[str, OpFn]:
        """The host's sampler as an op."""
        honest: Op = self._sample
        breaker = self.breakers.get("sample")
        return {**super().ops(), "mutant.sample": breaker(self, honest) if breaker else honest}

    def _sample(self, logits: Tensor, *arrays: Tensor, out: Tensor, stream: Stream, ws: Any) -> None:
        names = ("u", "temperature", "top_k", "top_p", "min_p", "adjust_start", "adjust_ids", "adjust_bias", "adjust_repeat", "adjust_sub")
        given = {n: np.ascontiguousarray(self.array(a)) for n, a in zip(names, arrays, strict=True)}
        if out.shape[0]:
            self.array(out)[...] = host_sample(self.array(logits), **given)


class LateStream(Stream):
    """Does what is in its queue when it is waited for."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []

    def synchronize(self) -> None:
        """Does what was enqueued."""
        queue, self.queue = self.queue, []
        for call in queue:
            call()


class LateBase(MutantBase):
    """Does nothing before it is waited for: the worst that a device may do."""

    def new_stream(self) -> Stream:
        """A stream that queues."""
        return LateStream()

    def upload(self, dst: Buffer, offset: int, src: memoryview, stream: Stream) -> None:
        """Later."""
        _ = dst.handle
        self._later(stream, lambda: RefBackend.upload(self, dst, offset, src, stream))

    def download(self, dst: memoryview, src: Buffer, offset: int, stream: Stream) -> None:
        """Later."""
        _ = src.handle
        self._later(stream, lambda: RefBackend.download(self, dst, src, offset, stream))

    def copy(self, dst: Buffer, dst_offset: int, src: Buffer, src_offset: int, nbytes: int, stream: Stream) -> None:
        """Later."""
        source, target = src.handle, dst.handle

        def move() -> None:
            target[dst_offset : dst_offset + nbytes] = source[src_offset : src_offset + nbytes]

        self._later(stream, move)

    def ops(self) -> Mapping[str, OpFn]:
        """Every op, later."""

        def late(honest: OpFn) -> Op:
            def call(*inputs: Tensor | None, out: Any, stream: Stream, ws: Tensor | None, **attrs: Any) -> None:
                self._later(stream, lambda: honest(*inputs, out=out, stream=Stream(), ws=ws, **attrs))

            return call

        return {name: late(fn) for name, fn in super().ops().items()}

    def _later(self, stream: Stream, call: Callable[[], None]) -> None:
        if isinstance(stream, LateStream):
            stream.queue.append(call)
        else:
            call()


# ways to break an op ----------------------------------------------------------------------------------------------------


def pre(change: Callable[..., None]) -> Breaker:
    """Changes operands and attributes first. change(backend, inputs: list[Tensor | None], attrs: dict)."""

    def breaker(backend: MutantBase, honest: Op) -> Op:
        def call(*inputs: Tensor | None, out: Any, stream: Stream, ws: Any, **attrs: Any) -> None:
            operands = list(inputs)
            change(backend, operands, attrs)
            honest(*operands, out=out, stream=stream, ws=ws, **attrs)

        return call

    return breaker


def post(change: Callable[..., None]) -> Breaker:
    """Changes results afterwards. change(out: array or tuple, inputs: list of arrays, attrs)."""

    def breaker(backend: MutantBase, honest: Op) -> Op:
        def call(*inputs: Tensor | None, out: Any, stream: Stream, ws: Any, **attrs: Any) -> None:
            honest(*inputs, out=out, stream=stream, ws=ws, **attrs)
            arrays = [None if t is None or t.dtype in ("kv", "slot") else backend.array(t) for t in inputs]
            results = tuple(backend.array(t) for t in out) if isinstance(out, tuple) else backend.array(out)
            with np.errstate(all="ignore"):
                change(results, arrays, attrs)

        return call

    return breaker


def whole(function: Callable[..., Any]) -> Breaker:
    """Computes the result anew: out[...] = function(*arrays, **attrs)."""

    def change(out: Any, arrays: Sequence[Any], attrs: Mapping[str, Any]) -> None:
        result = function(*arrays, **attrs)
        for target, values in zip(out if isinstance(out, tuple) else (out,), result if isinstance(result, tuple) else (result,), strict=True):
            target[...] = values

    return post(change)


def changed(index: int, function: Callable[[Array], Array]) -> Breaker:
    """Replaces one operand by a function of its values."""

    def change(backend: MutantBase, inputs: list[Tensor | None], attrs: dict[str, Any]) -> None:
        tensor = inputs[index]
        if tensor is not None:
            values = function(backend.array(tensor).copy())
            inputs[index] = backend.temporary(values.astype(backend.array(tensor).dtype), tensor)

    return pre(change)


def of_format(format: str, at: int, breaker: Breaker) -> Breaker:
    """Broken for weights of one format alone. at: which input the weight is."""

    def narrow(backend: MutantBase, honest: Callable[..., None]) -> Callable[..., None]:
        broken = breaker(backend, honest)

        def call(*inputs: Any, **more: Any) -> None:
            packed = inputs[at].packed
            (broken if packed is not None and packed.format == format else honest)(*inputs, **more)

        return call

    return narrow
