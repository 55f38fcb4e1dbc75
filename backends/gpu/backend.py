"""GpuBackend: a device behind a runtime, with the shared kernels.

Device memory is not the host's: weights are packed on the device, step arrays are uploaded, ids or logits come back. A segment is
compiled (`lower.py`) to a list of launches that one step enqueues without waiting; every op can also run alone, which is how the
conformance suite sees it. A kernel that meets a wrong index (an id outside of the table, a page outside of the cache) touches
nothing and writes the fault record, which `Stream.synchronize` reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from fastllm.api import (
    CATALOGUE,
    FORMATS,
    Backend,
    Buffer,
    CompileEnv,
    EngineError,
    Event,
    HostTensor,
    KVSpec,
    Limits,
    MemoryInfo,
    No,
    Node,
    OpFn,
    OpQuery,
    OutOfMemory,
    PackedLayout,
    Program,
    ShapeError,
    StepDims,
    Stream,
    Tensor,
    Yes,
    available_memory,
    check_alloc,
)

from . import probes
from .layouts import BLOCK_LAYOUTS, PLAIN_KINDS, STRIP, VERSION, layout_for
from .lower import CACHE_BYTES, Extent, Launch, Lowering
from .operands import I32, Operand, Pointer
from .program import DeviceProgram
from .runtime import KernelKey, Runtime
from .support import NATIVE_OPS, answer
from .tuning import choose

__all__ = ["GpuBackend"]

PACK_BYTES: Final = 32 << 20
"""Bytes of a file that are on the device at a time while a weight is packed."""
PACK_ITEMS: Final = 64
FAULTS: Final = {
    1: "op 'embed': id {value} of row {where} is outside of the table",
    2: "op 'kv_write': slot {value} of token {where} is behind the cache",
    3: "op 'attention': the block table of sequence {where} names block {value}, which the cache does not have",
    4: "op 'attention': context_len[{where}] = {value}, or a position of that sequence, is outside of its block table",
    5: "op 'attention': token {where} belongs to no sequence: query_start does not divide the step in ascending order",
    6: "op with recurrent state: query_start[{where}] = {value} does not divide the tokens of the step in ascending order",
    7: "op with recurrent state: slot {value} of sequence {where} does not exist",
}
"""Codes that kernels write."""


class _Stream(Stream):
    """The one queue of the device."""

    def __init__(self, backend: GpuBackend):
        self._backend = backend

    def synchronize(self) -> None:
        """Waits for everything. Raises EngineError if an op met a wrong index since the last call, DeviceLost."""
        self._backend.finish()


class _Event(Event):
    """A point in the queue; waiting for it waits for the queue."""

    def __init__(self, backend: GpuBackend):
        self._backend = backend

    def synchronize(self) -> None:
        """Waits."""
        self._backend.finish()


class GpuBackend(Backend):
    """One open device. kernels: "auto", "vector" or "lanes" (tuning.py); kv_dtype: how keys and values are cached where the graph
    does not say."""

    kv_dtypes = tuple(CACHE_BYTES)

    def __init__(self, name: str, runtime: Runtime, kernels: str = "auto", kv_dtype: str = "f16"):
        """Takes the runtime over: `close` closes it. Raises OutOfMemory."""
        self.name, self.runtime = name, runtime
        caps = runtime.caps
        self.tuning = choose(kernels, caps)
        self.kv_dtype, self.threads = kv_dtype, caps.units if caps.is_cpu else 1
        self.limits = Limits(alignment=max(64, caps.alignment), max_alloc=caps.max_alloc_bytes)
        self._used, self._pending, self._closed = 0, False, False
        self._fault = runtime.alloc(64, True)
        self._fault_host = np.zeros(16, np.int32)
        self._stream = _Stream(self)

    # memory ---------------------------------------------------------------------------------------------------------

    def alloc(self, nbytes: int, kind: str) -> Buffer:
        """Device memory; `state` is zeroed."""
        self._check_open()
        if nbytes < 0:
            raise ShapeError(f"a {kind} buffer of {nbytes} bytes")
        check_alloc(nbytes, kind, self.limits, self.memory().free)
        handle = self.runtime.alloc(max(nbytes, 1), kind == "state")
        self._used += nbytes

        def release() -> None:
            self._used -= nbytes
            self.runtime.free(handle)

        return Buffer(nbytes, kind, handle, release)

    def upload(self, dst: Buffer, offset: int, src: memoryview, stream: Stream) -> None:
        """Host to device."""
        self._check_open()
        _check_range(dst, offset, src.nbytes)
        if src.nbytes:
            self.runtime.write(dst.handle, offset, src)

    def download(self, dst: memoryview, src: Buffer, offset: int, stream: Stream) -> None:
        """Device to host."""
        self._check_open()
        _check_range(src, offset, dst.nbytes)
        if dst.nbytes:
            self.runtime.read(dst, src.handle, offset)

    def copy(self, dst: Buffer, dst_offset: int, src: Buffer, src_offset: int, nbytes: int, stream: Stream) -> None:
        """Within the device."""
        self._check_open()
        _check_range(dst, dst_offset, nbytes)
        _check_range(src, src_offset, nbytes)
        if nbytes:
            self.runtime.copy(dst.handle, dst_offset, src.handle, src_offset, nbytes)

    def memory(self) -> MemoryInfo:
        """What the device says it has; used: what buffers hold. On a CPU no more is free than the host has."""
        total = self.runtime.caps.memory_bytes
        free = max(0, total - self._used)
        host = available_memory() if self.runtime.caps.is_cpu else None
        return MemoryInfo(total, free if host is None else min(free, host), self._used)

    def new_stream(self) -> Stream:
        """The one queue."""
        return self._stream

    def new_event(self) -> Event:
        """A point in the one queue."""
        return _Event(self)

    def finish(self) -> None:
        """Waits for the queue, then reports what kernels met. Raises EngineError, DeviceLost."""
        self._check_open()
        if not self._pending:
            self.runtime.finish()
            return
        self._pending = False
        self.runtime.read(memoryview(self._fault_host).cast("B"), self._fault, 0)
        self.runtime.finish()
        code, where, value = self._fault_host[:3].tolist()
        if code:
            self.runtime.write(self._fault, 0, memoryview(bytes(64)))
            self.runtime.finish()
            raise EngineError(FAULTS[code].format(where=where, value=value), who=self.name)

    def kv_block_bytes(self, spec: KVSpec, block_size: int) -> int:
        """Bytes of a block, in the layout of kernels/cache.h."""
        return block_size * spec.num_kv_heads * (spec.key_dim + spec.value_dim) * CACHE_BYTES[spec.dtype or self.kv_dtype]

    # weights --------------------------------------------------------------------------------------------------------

    def pack_layout(self, shape: Sequence[int], format: str, uses: frozenset[str]) -> PackedLayout | None:
        """Strips of 32 rows for linear layers and tied embedding tables (layouts.py)."""
        return layout_for(shape, format, uses)

    def pack_weight(self, weight: HostTensor, layout: PackedLayout, dst: Buffer, offset: int) -> None:
        """Packs on the device, some rows at a time. Raises ShapeError if the weight is not what the layout was made for."""
        self._check_open()
        _check_range(dst, offset, layout.nbytes)
        known = layout_for(layout.shape, layout.format, frozenset({"linear"}))
        if known != layout or tuple(weight.shape) != layout.shape or weight.format != layout.format:
            raise ShapeError(f"weight '{weight.name}' is {weight.format}{list(weight.shape)}; the layout is {layout} of version {VERSION}")
        count, width = layout.shape
        row_bytes = FORMATS[layout.format].nbytes(width)
        data = np.ascontiguousarray(weight.data).reshape(-1).view(np.uint8)
        if data.nbytes != count * row_bytes:
            raise ShapeError(f"weight '{weight.name}' has {data.nbytes:,} bytes, which is not {weight.format}{list(weight.shape)}")
        strip_bytes = layout.nbytes // -(-count // STRIP)
        step = max(1, PACK_BYTES // (row_bytes * STRIP)) * STRIP
        raw = self.runtime.alloc(min(step, count) * row_bytes, False) if count else None
        try:
            for start in range(0, count, step):
                rows = min(step, count - start)
                self.runtime.write(raw, 0, memoryview(data[start * row_bytes : (start + rows) * row_bytes]))
                to = Pointer(dst.handle, offset + start // STRIP * strip_bytes)
                self._launch(self._pack_launch(layout, Pointer(raw, 0), to, rows))
                self.runtime.finish()
        finally:
            if raw is not None:
                self.runtime.free(raw)

    def _pack_launch(self, layout: PackedLayout, raw: Pointer, to: Pointer, rows: int) -> Launch:
        lanes = 1 if self.runtime.caps.is_cpu else PACK_ITEMS
        width = layout.shape[1]
        defines, source = {"LANES": lanes, "VEC": 1, "PLAIN": PLAIN_KINDS.get(layout.format, 0)}, "plain.fl"
        if layout.format in BLOCK_LAYOUTS:
            block = BLOCK_LAYOUTS[layout.format]
            file_bytes = FORMATS[layout.format].block_bytes
            defines = {"LANES": lanes, "VEC": 1, **block.defines(), "FORMAT": block.number, "FILE_BYTES": file_bytes}
            source, width = "pack.fl", width // block.block
        key = KernelKey.of(source, "pack", defines)
        return Launch(0, key, (raw, to, I32(rows), I32(width)), (Extent(-(-rows // STRIP)), Extent(width, per=lanes)), lanes)

    # ops --------------------------------------------------------------------------------------------------------------

    def supports(self, q: OpQuery) -> Yes | No:
        """Every op of opset 1 but `sample`, on f32 activations."""
        return answer(q, pairs=self.tuning.pairs, fp64=self.runtime.caps.fp64, kv_dtype=self.kv_dtype)

    def ops(self) -> Mapping[str, OpFn]:
        """Every op alone, by its catalogue name."""
        return {name: self._single(name) for name in NATIVE_OPS}

    def _single(self, name: str) -> OpFn:
        def run(*inputs: Tensor | None, out: Any, stream: Stream, ws: Tensor | None, **attrs: Any) -> None:
            outputs = () if out is None or out == () else out if isinstance(out, tuple) else (out,)
            self._run_single(name, inputs, outputs, ws, attrs)

        return run

    def _run_single(
        self, name: str, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor], ws: Tensor | None, attrs: Mapping[str, Any]
    ) -> None:
        """The launches of one node on these operands, whose shapes are checked by the catalogue's rule."""
        self._check_open()
        spec = CATALOGUE[name]
        operands = [*inputs, *[None] * (len(spec.inputs) - len(inputs))]
        full = spec.complete_attrs(attrs)
        shapes = [None if t is None else (tuple(t.shape), t.dtype) for t in operands]
        results = spec.infer(shapes, [None if t is None else t.spec for t in operands], full)
        found = [tuple(t.shape) for t in outputs]
        if found != [shape for shape, _ in results]:
            raise ShapeError(f"op '{name}' gives {[list(s) for s, _ in results]}, but out is {[list(s) for s in found]}")
        _check_step_shapes(name, operands)
        tensors = {f"in{i}": t for i, t in enumerate(operands) if t is not None} | {f"out{i}": t for i, t in enumerate(outputs)}
        names = tuple(None if t is None else f"in{i}" for i, t in enumerate(operands))
        node = Node(name, names, tuple(f"out{i}" for i in range(len(outputs))), full)

        def source(value: str) -> Operand:
            return Operand(tensors[value], tuple(tensors[value].shape))

        def scratch(nbytes: int, keep: bool) -> Tensor:
            if ws is None or ws.shape[0] < nbytes or ws.offset % 64:
                raise ShapeError(f"op '{name}' needs a workspace of {nbytes} bytes, aligned to 64; there is {ws and ws.shape[0]}")
            return ws

        lowering = self._lowering(source, scratch, int)
        lowering.add(0, node)
        for launch in lowering.launches:
            rows = 0 if launch.only is None else int(launch.only[0])
            if launch.only is None or launch.only[1] <= rows <= launch.only[2]:
                self._launch(launch)

    def _lowering(self, source: Any, scratch: Any, rows: Any) -> Lowering:
        fp64 = self.runtime.caps.fp64
        return Lowering(source, scratch, rows, self._fault, self.tuning, fp64=fp64, kv_dtype=self.kv_dtype)

    def _launch(self, launch: Launch) -> None:
        """Enqueues one launch without symbols."""
        program = DeviceProgram(self.runtime, [launch], StepDims(0, 0, 0), self._fault, (), (), self._mark)
        program.run(StepDims(0, 0, 0))

    def _mark(self) -> None:
        self._pending = True

    def compile(self, sub: Sequence[Node], env: CompileEnv) -> Program | None:
        """A list of launches for these nodes; None if one of them has no kernel here."""
        self._check_open()
        if any(node.op not in NATIVE_OPS for node in sub):
            return None
        owned: list[Buffer] = []

        def source(value: str) -> Operand:
            return Operand(env.tensors[value], env.graph.values[value].shape)

        def scratch(nbytes: int, keep: bool) -> Tensor:
            if not keep and env.workspace is not None and env.workspace.shape[0] >= nbytes:
                return env.workspace
            owned.append(self.alloc(nbytes, "scratch"))
            return Tensor(owned[-1], 0, (nbytes,), "i8")

        lowering = self._lowering(source, scratch, env.largest.resolve)
        try:
            for index, node in enumerate(sub):
                lowering.add(index, node)
            return DeviceProgram(self.runtime, lowering.launches, env.largest, self._fault, owned, sub, self._mark)
        except BaseException:
            for buffer in owned:
                buffer.close()
            raise

    # limits ---------------------------------------------------------------------------------------------------------

    def read_bandwidth(self, nbytes: int) -> float | None:
        """Bytes per second of reading so much of the device's memory, measured now; None if it has not the room."""
        self._check_open()
        try:
            check_alloc(min(nbytes, probes.MOST_BYTES), "scratch", self.limits, self.memory().free)
            return probes.read_rate(self.runtime, self.tuning, nbytes)
        except OutOfMemory:
            return None

    def peak_ops(self, dtype: str) -> float | None:
        """f32: multiply-adds per second of all units, two operations each, measured now; None for other types: no kernel here multiplies
        them by an instruction of their own."""
        self._check_open()
        return probes.multiply_adds(self.runtime, self.tuning) if dtype == "f32" else None

    # closing ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Gives the device back. Buffers can still be closed, and nothing else be done."""
        if not self._closed:
            self._closed = True
            self.runtime.free(self._fault)
            self.runtime.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"the {self.name} backend is used after it was closed")


def _check_step_shapes(name: str, operands: Sequence[Tensor | None]) -> None:
    """Step arrays of an op that runs alone; in a compiled program the graph has fixed them."""
    found = [None if t is None else tuple(t.shape) for t in operands]
    if name == "kv_write" and found[3] != (found[1] or (0,))[:1]:
        raise ShapeError(f"op 'kv_write' has {(found[1] or (0,))[0]} keys but slots {found[3]}")
    if name in ("short_conv", "delta_rule"):
        positions, starts, slots = (f or (0,) for f in found[-3:])
        if positions != (found[1] or (0,))[:1] or starts != (slots[0] + 1,):
            raise ShapeError(f"op '{name}' has positions {positions}, query_start {starts} and state_slot {slots} for {(found[1] or (0,))[0]} tokens")
    if name != "attention":
        return
    tokens, sequences = (found[0] or (0,))[0], (found[4] or (0,))[0]
    for index, shape in {2: (tokens,), 3: (sequences + 1,), 4: (sequences,), 8: (sequences,)}.items():
        if (found[index] is not None or index < 5) and found[index] != shape:
            raise ShapeError(f"operand '{CATALOGUE['attention'].inputs[index]}' has shape {found[index]}, not {list(shape)}")
    if found[5] is None or len(found[5]) != 2 or found[5][0] != sequences:
        raise ShapeError(f"operand 'block_table' has shape {found[5]}, not [{sequences}, B]")


def _check_range(buffer: Buffer, offset: int, nbytes: int) -> None:
    if offset < 0 or nbytes < 0 or offset + nbytes > buffer.nbytes:
        raise ShapeError(f"bytes {offset}…{offset + nbytes} are outside of a {buffer.kind} buffer of {buffer.nbytes} bytes")
