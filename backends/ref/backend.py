"""RefBackend: memory of numpy arrays, and every op of the catalogue that has no decomposition as `ref.NAME`.

A vendor's backend inherits this class and replaces one op at a time. The inherited ops reach operands through `read` and `write`: on
memory that is a numpy array they work in place; on a device's own memory they download, compute here and upload, so that
everything is right from the first minute and only slow.

Cache layout (of this backend's own memory): block = keys [K, block_size, Dk], then values [K, block_size, Dv]; with int8 their codes,
then the scales of the keys f32 [K, block_size, groups] and those of the values. f32, unless the cache's spec says otherwise (`kv.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from fastllm.api import (
    CATALOGUE,
    KV_DTYPES,
    OPSET,
    PRIMITIVE_OPS,
    Backend,
    Buffer,
    EngineError,
    KVSpec,
    MemoryInfo,
    No,
    OpFn,
    OpQuery,
    OutOfMemory,
    SlotSpec,
    Stream,
    Tensor,
    Yes,
)

from . import kv, ops

__all__ = ["RefBackend"]

NUMPY: dict[str, np.dtype[Any]] = {"f32": np.dtype("f4"), "f64": np.dtype("f8"), "i32": np.dtype("i4"), "i8": np.dtype("i1")}


class RefBackend(Backend):
    """The host's memory and numpy. Also the base class of backends that are being written."""

    name = "ref"
    kv_dtypes = KV_DTYPES

    def __init__(self) -> None:
        """Opens the backend; nothing is allocated."""
        self._used = 0

    # memory ---------------------------------------------------------------------------------------------------------

    def alloc(self, nbytes: int, kind: str) -> Buffer:
        """Zeroed host memory."""
        try:
            array = np.zeros(nbytes, np.uint8)
        except MemoryError:
            raise OutOfMemory(
                f"{kind} buffer of {nbytes:,} bytes: the host has no memory left", requested=nbytes, kind=kind
            ) from None
        self._used += nbytes

        def release() -> None:
            self._used -= nbytes

        return Buffer(nbytes, kind, array, release)

    def wrap_host(self, view: np.ndarray, readonly: bool) -> Buffer | None:
        """The array itself."""
        return Buffer(view.nbytes, "staging", view)

    def upload(self, dst: Buffer, offset: int, src: memoryview, stream: Stream) -> None:
        """Copies bytes in."""
        dst.handle[offset : offset + src.nbytes] = np.frombuffer(src, np.uint8)

    def download(self, dst: memoryview, src: Buffer, offset: int, stream: Stream) -> None:
        """Copies bytes out."""
        dst.cast("B")[:] = src.handle[offset : offset + dst.nbytes].data

    def memory(self) -> MemoryInfo:
        """Bytes that buffers hold; the host's own numbers are not asked for."""
        return MemoryInfo(0, 0, self._used)

    def kv_block_bytes(self, spec: KVSpec, block_size: int) -> int:
        """Bytes of a block in the layout that the top of this file shows."""
        return kv.block_bytes(spec, block_size)

    # support --------------------------------------------------------------------------------------------------------

    def supports(self, q: OpQuery) -> Yes | No:
        """Every op of `PRIMITIVE_OPS`, in f32; weights in f32 (the engine decodes every format to it without loss)."""
        spec = CATALOGUE.get(q.op)
        if spec is None or q.op not in PRIMITIVE_OPS or spec.since > OPSET:
            return No(f"'{q.op}' is not an op of opset {OPSET} that is defined in numpy")
        unknown = set(q.attrs) - set(spec.attrs)
        if unknown:
            return No(f"'{q.op}' has no attribute {', '.join(sorted(unknown))}")
        for key, value in q.attrs.items():
            if spec.attrs[key].choices and value not in spec.attrs[key].choices:
                return No(f"'{q.op}': {key}={value!r} is not known")
        if q.op == "sample":
            return No("sampled on the host")
        bad = [d for d in q.dtypes if d not in (None, "f32", "i32", "i8", "kv", "slot")]
        if bad:
            return No(f"numpy computes in f32, not {', '.join(map(str, bad))}")
        kept = next((s.dtype for s in q.specs if isinstance(s, KVSpec) and s.dtype != "f32"), None)
        if kept is not None and kept not in self.kv_dtypes:
            return No(f"keys and values as {kept}; they are kept as {', '.join(self.kv_dtypes)}")
        kept = f"int8_g{kv.GROUP}" if kept == "int8" else kept
        return Yes(f"ref.{q.op}", weight=kept if q.op == "attention" else None, angle="f64")

    def ops(self) -> Mapping[str, OpFn]:
        """`ref.NAME` for every op of `PRIMITIVE_OPS` but `sample`."""
        return {f"ref.{name}": _quiet(getattr(self, f"_op_{name}")) for name in PRIMITIVE_OPS if name != "sample"}

    # operands -------------------------------------------------------------------------------------------------------

    def read(self, t: Tensor, stream: Stream) -> np.ndarray:
        """An operand as an array of its shape: a view of this backend's memory, else a copy that is downloaded after all that the
        stream was given before."""
        dtype = NUMPY[t.dtype]
        strides = t.strides or _contiguous(t.shape)
        if 0 in t.shape:
            return np.zeros(t.shape, dtype)
        span = (1 + sum((n - 1) * s for n, s in zip(t.shape, strides, strict=True))) * dtype.itemsize
        raw = self._bytes(t.buffer, t.offset, span, stream)
        return np.lib.stride_tricks.as_strided(raw.view(dtype), t.shape, [s * dtype.itemsize for s in strides])

    def write(self, t: Tensor, values: np.ndarray, stream: Stream) -> None:
        """Stores a result. Contiguous tensors of a device are uploaded; strided ones are read, changed and uploaded."""
        if 0 in t.shape:
            return
        if isinstance(t.buffer.handle, np.ndarray):
            self.read(t, stream)[...] = values
            return
        dtype = NUMPY[t.dtype]
        strides = t.strides or _contiguous(t.shape)
        span = (1 + sum((n - 1) * s for n, s in zip(t.shape, strides, strict=True))) * dtype.itemsize
        raw = self._bytes(t.buffer, t.offset, span, stream) if t.strides else np.empty(span, np.uint8)
        np.lib.stride_tricks.as_strided(raw.view(dtype), t.shape, [s * dtype.itemsize for s in strides])[...] = values
        self._put(t.buffer, t.offset, raw, stream)

    def _read_all(self, stream: Stream, *operands: Tensor | None) -> list[Any]:
        """Each operand as an array, None where it is absent."""
        return [None if t is None else self.read(t, stream) for t in operands]

    def _bytes(self, buffer: Buffer, offset: int, nbytes: int, stream: Stream) -> np.ndarray:
        if isinstance(buffer.handle, np.ndarray):
            return buffer.handle[offset : offset + nbytes]
        raw = np.empty(nbytes, np.uint8)
        self.download(memoryview(raw), buffer, offset, stream)
        stream.synchronize()
        return raw

    def _put(self, buffer: Buffer, offset: int, raw: np.ndarray, stream: Stream) -> None:
        self.upload(buffer, offset, memoryview(raw), stream)
        stream.synchronize()  # raw ends here

    def _block(self, cache: Tensor, block: int, stream: Stream) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One cache block: its bytes, and what they hold as f32: keys [K, block_size, Dk] and values [K, block_size, Dv]."""
        raw, spec = self._raw_block(cache, block, stream)
        return raw, *kv.read(raw, spec, cache.block_size)

    def _raw_block(self, cache: Tensor, block: int, stream: Stream) -> tuple[np.ndarray, KVSpec]:
        """The bytes of one cache block, and what it holds."""
        if not isinstance(cache.spec, KVSpec):
            raise TypeError("attention and kv_write need a key/value cache")
        if not 0 <= block < cache.num_blocks:
            raise IndexError(f"cache block {block} is outside of 0…{cache.num_blocks - 1}")
        return self._bytes(cache.buffer, cache.offset + block * cache.block_bytes, cache.block_bytes, stream), cache.spec

    # ops ------------------------------------------------------------------------------------------------------------

    def _op_embed(self, ids: Tensor, table: Tensor, *, out: Tensor, stream: Stream, ws: Any) -> None:
        self.write(out, ops.embed(*self._read_all(stream, ids, table)), stream)

    def _op_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor, stream: Stream, ws: Any) -> None:
        self.write(out, ops.linear(*self._read_all(stream, x, weight, bias)), stream)

    def _op_matmul(self, a: Tensor, b: Tensor, *, out: Tensor, stream: Stream, ws: Any) -> None:
        self.write(out, ops.matmul(*self._read_all(stream, a, b)), stream)

    def _op_rms_norm(self, x: Tensor, weight: Tensor | None, *, out: Tensor, stream: Stream, ws: Any, eps: float) -> None:
        rows, w = self._read_all(stream, x, weight)
        self.write(out, ops.rms_norm(rows, w, eps), stream)

    def _op_layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *, out: Tensor, stream: Stream, ws: Any, eps: float
    ) -> None:
        rows, w, b = self._read_all(stream, x, weight, bias)
        self.write(out, ops.layer_norm(rows, w, b, eps), stream)

    def _op_rope(
        self, x: Tensor, positions: Tensor, inv_freq: Tensor, *, out: Tensor, stream: Stream, ws: Any, style: str, factor: float
    ) -> None:
        heads, where, freq = self._read_all(stream, x, positions, inv_freq)
        self.write(out, ops.rope(heads, where, freq, style, factor), stream)

    def _op_kv_write(
        self, cache: Tensor, key: Tensor, value: Tensor | None, slots: Tensor, *, out: Any, stream: Stream, ws: Any
    ) -> None:
        keys, values, where = self._read_all(stream, key, value, slots)
        for first, last in _runs(where, cache.block_size):
            block, offset = divmod(int(where[first]), cache.block_size)
            raw, spec = self._raw_block(cache, block, stream)
            kv.write(raw, spec, cache.block_size, offset, keys[first:last], values[first:last] if values is not None else None)
            if not isinstance(cache.buffer.handle, np.ndarray):
                self._put(cache.buffer, cache.offset + block * cache.block_bytes, raw, stream)

    def _op_attention(
        self,
        query: Tensor,
        cache: Tensor,
        positions: Tensor,
        query_start: Tensor,
        context_len: Tensor,
        block_table: Tensor,
        sinks: Tensor | None,
        alibi_slopes: Tensor | None,
        prefix_len: Tensor | None,
        *,
        out: Tensor,
        stream: Stream,
        ws: Any,
        value_dim: int,
        **attrs: Any,
    ) -> None:
        q, where, starts, lengths, table = self._read_all(stream, query, positions, query_start, context_len, block_table)
        attrs["sinks"], attrs["slopes"], prefix = self._read_all(stream, sinks, alibi_slopes, prefix_len)
        _check_shares("attention", starts, len(q))
        _check_lengths(lengths, table.shape[1] * cache.block_size)
        result = np.zeros(out.shape, np.float32)
        for s, length in enumerate(lengths.tolist()):
            rows = range(int(starts[s]), int(starts[s + 1]))
            if not rows or not length:
                continue
            keys, values = self._gather(cache, table[s], length, value_dim, stream)
            for t in rows:
                seen = 0 if prefix is None else int(prefix[s])
                result[t] = ops.attention(q[t], keys, values, int(where[t]), prefix_len=seen, **attrs)
        self.write(out, result, stream)

    def _gather(
        self, cache: Tensor, table: np.ndarray, length: int, value_dim: int, stream: Stream
    ) -> tuple[np.ndarray, np.ndarray]:
        """Keys [n, K, Dk] and values [n, K, Dv] of one sequence, in order."""
        found = table[: -(-length // cache.block_size)].tolist()
        blocks = [self._block(cache, b, stream) for b in found]
        keys = np.concatenate([k for _, k, _ in blocks], axis=1)[:, :length].transpose(1, 0, 2)
        if value_dim:
            return keys, keys[..., :value_dim]
        return keys, np.concatenate([v for _, _, v in blocks], axis=1)[:, :length].transpose(1, 0, 2)

    def _op_act_mul(self, gate: Tensor, up: Tensor | None, *, out: Tensor, stream: Stream, ws: Any, kind: str) -> None:
        g, u = self._read_all(stream, gate, up)
        self.write(out, ops.act_mul(g, u, kind), stream)

    def _op_add(self, x: Tensor, y: Tensor, *, out: Tensor, stream: Stream, ws: Any) -> None:
        self.write(out, self.read(x, stream) + self.read(y, stream), stream)

    def _op_mul(self, x: Tensor, y: Tensor, *, out: Tensor, stream: Stream, ws: Any) -> None:
        a, b = self._read_all(stream, x, y)
        per_row = b.ndim == 2 and b.shape != a.shape  # [T, 1]
        self.write(out, a * (b.reshape(-1, *[1] * (a.ndim - 1)) if per_row else b), stream)

    def _op_softmax(self, x: Tensor, *, out: Tensor, stream: Stream, ws: Any) -> None:
        self.write(out, ops.softmax(self.read(x, stream)), stream)

    def _op_concat(self, x: Tensor, y: Tensor, *, out: Tensor, stream: Stream, ws: Any) -> None:
        self.write(out, np.concatenate(self._read_all(stream, x, y), axis=-1), stream)

    def _op_route_topk(
        self, logits: Tensor, bias: Tensor | None, *, out: tuple[Tensor, Tensor], stream: Stream, ws: Any, **attrs: Any
    ) -> None:
        ids, weights = ops.route_topk(*self._read_all(stream, logits, bias), **attrs)
        self.write(out[0], ids, stream)
        self.write(out[1], weights, stream)

    def _op_moe(self, *operands: Tensor | None, out: Tensor, stream: Stream, ws: Any, kind: str) -> None:
        present = self._read_all(stream, *operands)
        self.write(out, ops.moe(*present, *[None] * (9 - len(present)), kind=kind), stream)  # type: ignore[misc]

    def _op_short_conv(
        self,
        state: Tensor,
        x: Tensor,
        weight: Tensor,
        positions: Tensor,
        query_start: Tensor,
        state_slot: Tensor,
        *,
        out: Tensor,
        stream: Stream,
        ws: Any,
        kind: str,
    ) -> None:
        inputs, w = self._read_all(stream, x, weight)
        result = np.zeros(out.shape, np.float32)
        for rows, slot in self._sequences("short_conv", state, positions, query_start, state_slot, stream):
            result[rows] = ops.short_conv(slot, inputs[rows], w, kind)
        self.write(out, result, stream)

    def _op_delta_rule(self, state: Tensor, *operands: Tensor, out: Tensor, stream: Stream, ws: Any, eps: float) -> None:
        query, key, value, a, b, a_log, dt_bias = self._read_all(stream, *operands[:7])
        positions, query_start, state_slot = operands[7:]
        result = np.zeros(out.shape, np.float32)
        for r, slot in self._sequences("delta_rule", state, positions, query_start, state_slot, stream):
            result[r] = ops.delta_rule(slot, query[r], key[r], value[r], a[r], b[r], a_log, dt_bias, eps)
        self.write(out, result, stream)

    def _sequences(
        self, op: str, state: Tensor, positions: Tensor, query_start: Tensor, state_slot: Tensor, stream: Stream
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """(its rows, its state) of every sequence that has rows; the state is zeros at position 0, and is put back when the caller goes on."""
        where, starts, slots = self._read_all(stream, positions, query_start, state_slot)
        _check_shares(op, starts, len(where))
        spec = state.spec
        if not isinstance(spec, SlotSpec):
            raise TypeError("short_conv and delta_rule need a state of fixed size")
        for s, slot in enumerate(slots.tolist()):
            first, last = int(starts[s]), int(starts[s + 1])
            if first == last:
                continue
            if not 0 <= slot < state.num_blocks:
                raise IndexError(f"state slot {slot} is outside of 0…{state.num_blocks - 1}")
            at = state.offset + slot * state.block_bytes
            raw = self._bytes(state.buffer, at, state.block_bytes, stream)
            values = raw.view(np.float32).reshape(spec.shape)
            if where[first] == 0:
                values[...] = 0
            yield slice(first, last), values
            if not isinstance(state.buffer.handle, np.ndarray):
                self._put(state.buffer, at, raw, stream)

    def _op_quantize(self, x: Tensor, *, out: tuple[Tensor, Tensor], stream: Stream, ws: Any, group: int) -> None:
        codes, scales = ops.quantize(self.read(x, stream), group)
        self.write(out[0], codes, stream)
        self.write(out[1], scales, stream)

    def _op_dequantize(self, codes: Tensor, scales: Tensor, *, out: Tensor, stream: Stream, ws: Any, group: int) -> None:
        q, s = self._read_all(stream, codes, scales)
        self.write(out, ops.dequantize(q, s, group), stream)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for dim in reversed(shape):
        strides.append(step)
        step *= dim
    return tuple(reversed(strides))


def _runs(slots: np.ndarray, block_size: int) -> list[tuple[int, int]]:
    """(first, last + 1) of rows whose slots follow each other in one block. slots: [T]; rows of those below 0 are in no run."""
    ends = np.flatnonzero((np.diff(slots) != 1) | (slots[1:] % block_size == 0)) + 1
    return [(a, b) for a, b in pairwise([0, *ends.tolist(), len(slots)]) if a < b and slots[a] >= 0]


def _check_shares(op: str, starts: np.ndarray, tokens: int) -> None:
    """query_start [S + 1] divides the step's tokens: from 0, never back, to the last. Raises EngineError before anything is computed."""
    for s, start in enumerate(starts.tolist()):
        before = int(starts[s - 1]) if s else 0
        if start < before or start > tokens or (s == 0 and start) or (s == len(starts) - 1 and start != tokens):
            raise EngineError(f"op '{op}': query_start[{s}] = {start} does not divide the {tokens} tokens of the step in ascending order")


def _check_lengths(lengths: np.ndarray, most: int) -> None:
    """context_len [S] fits the rows of the block table, which hold `most` tokens."""
    for s, length in enumerate(lengths.tolist()):
        if not 0 <= length <= most:
            raise EngineError(f"op 'attention': context_len[{s}] = {length}, but a row of the block table holds {most} tokens at most")


def _quiet(op: OpFn) -> OpFn:
    """The op without numpy's warnings: weights of a stranger may overflow or hold NaN, and then the values say so. A warning would be
    noise for some callers and, where warnings are errors, end the step for every request in it."""

    def run(*operands: Any, **attrs: Any) -> None:
        with np.errstate(all="ignore"):
            op(*operands, **attrs)

    return run
