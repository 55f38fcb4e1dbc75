"""CpuBackend: this computer's CPU as a device.

Device memory is the host's: buffers are pages of the process, `handle` is an address, and files or step arrays are used in place.
A segment is compiled (`lower.py`) to one native program; every op can also run alone, through a program of one node, which is how
the conformance suite sees it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fastllm.api import (
    CATALOGUE,
    Backend,
    BackendUnavailable,
    Buffer,
    CompileEnv,
    EngineError,
    HostTensor,
    KVSpec,
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
    UsageError,
    Yes,
    available_memory,
    check_alloc,
    memory_limit,
    refuse_operands,
    refuse_query,
)

from . import _native, isa, pack
from .kept import CACHE_TYPES, MAX_HEAD, Kept
from .lower import lower
from .operands import Source
from .program import NativeProgram
from .recurrent import MAX_KEY, MAX_TAPS
from .threads import choose_threads

__all__ = ["CpuBackend"]

IDLE_SPIN_US = 350.0
"""How long idle threads watch for the next step before they sleep: longer than the host needs between two steps (eight answers that are held to
grammars: 200 to 290 us). One that sleeps costs the next step some 100 us."""
BARRIER_SPIN_US = 200.0
"""How long a thread spins at a barrier before it sleeps."""
HUGE_BYTES = {"weights": 4 << 20, "scratch": 32 << 20}
"""Buffers of these kinds ask for 2 MB pages from that size on. Of a small model's scratch a step touches some rows here and there, and would have all
of it that way. Not caches: a first step touches one block of every layer, and to
find and clear 2 MB for each of them took ten times as long as the step itself (measured: 280 instead of 37 ms)."""
BF16_ROWS = 1
"""The kind of prepared rows that are bf16 (FL_KIND_BF16)."""
PROBE_BYTES = 1 << 30
PROBE_ROUNDS = 5

NATIVE_OPS = tuple(name for name in CATALOGUE if name != "sample")
RECURRENT = {"short_conv": (3, 4, 5), "delta_rule": (8, 9, 10)}
"""Ops with a slot for each sequence -> the places of positions, query_start and state_slot among their operands."""


class _HostBuffer(Buffer):
    """Memory that somebody else owns; kept alive by the reference in `release`."""

    readonly = False


class CpuBackend(Backend):
    """One open CPU. isa: variant that runs; threads: how many compute; reason: why so many; warning: what is wrong with the number
    that was asked for, "" if nothing."""

    name = "cpu_avx"
    pack_rows = 32
    maps_weights = True
    kv_dtypes = tuple(CACHE_TYPES)

    def __init__(self, threads: int = 0, isa: str = "auto", act: str = "int8", kv_dtype: str = "auto", pin: bool = True):
        """Starts the threads. Raises UsageError for options that cannot be, BackendUnavailable if threads cannot be made."""
        if threads < 0 or threads > 1024:
            raise UsageError(f"threads={threads} is outside of 0…1024", who="cpu_avx")
        if act not in ("int8", "f32") or kv_dtype not in ("auto", *CACHE_TYPES):
            fix = f"act: int8, f32; kv_dtype: auto, {', '.join(CACHE_TYPES)}"
            raise UsageError(f"act={act!r} or kv_dtype={kv_dtype!r} is not known", who="cpu_avx", fix=fix)
        self.isa = _choose(isa)
        choice = choose_threads(threads, pin)
        self.threads, self.reason = choice.count, choice.reason
        self.warning = "; ".join(line for line in (choice.warning, _distrusted(isa)) if line)
        self._exact, self._bf16 = act == "f32", _native.multiplies_bf16(self.isa)
        self._kept = Kept(kv_dtype, not self._exact and _native.attends_in_pairs(self.isa))
        self._used, self._closed = 0, False
        try:
            # more threads than cores: whoever spins keeps the core from whom it waits for (256 threads on 2 cores: 30 times slower)
            spins = (0.0, 0.0) if choice.warning else (IDLE_SPIN_US, BARRIER_SPIN_US)
            self._pool = _native.Pool(choice.count, choice.cores, *spins)
        except (OSError, MemoryError) as error:
            fix = "lower --backend-opt threads=N, or raise the limit on processes (ulimit -u)"
            raise BackendUnavailable(f"cpu_avx cannot start {choice.count} threads: {error}", who="cpu_avx", fix=fix) from None

    # memory ---------------------------------------------------------------------------------------------------------

    def alloc(self, nbytes: int, kind: str) -> Buffer:
        """Zeroed pages, 2 MB ones for weights. Raises OutOfMemory if the machine or its control group has not enough."""
        self._check_open()
        if nbytes < 0:
            raise ShapeError(f"a {kind} buffer of {nbytes} bytes")
        check_alloc(nbytes, kind, self.limits, self._free())
        try:
            memory = _native.Memory(nbytes, nbytes >= HUGE_BYTES.get(kind, nbytes + 1))
        except (MemoryError, OverflowError):
            raise OutOfMemory(
                f"{kind} buffer of {nbytes:,} bytes: the system refuses it", requested=nbytes, kind=kind
            ) from None
        self._used += nbytes

        def release() -> None:
            self._used -= nbytes
            memory.close()

        return Buffer(nbytes, kind, memory.address, release)

    def _free(self) -> int | None:
        """Bytes that can still be allocated. Pages count once they are touched, so what buffers hold but nobody touched yet is not
        seen here; plans are checked against the whole before anything is allocated."""
        return available_memory()

    def wrap_host(self, view: np.ndarray, readonly: bool) -> Buffer | None:
        """The array's own memory; None if it is not contiguous. A read-only one refuses uploads."""
        if not view.flags.c_contiguous or (not readonly and not view.flags.writeable):
            return None
        keep = [view]  # the reference that keeps the memory alive until close
        buffer = _HostBuffer(view.nbytes, "staging", view.ctypes.data, keep.clear)
        buffer.readonly = readonly
        return buffer

    def upload(self, dst: Buffer, offset: int, src: memoryview, stream: Stream) -> None:
        """Copies bytes in."""
        _check_range(dst, offset, src.nbytes)
        if isinstance(dst, _HostBuffer) and dst.readonly:
            raise ShapeError("upload into read-only host memory")
        if src.nbytes:
            _native.copy_in(dst.handle + offset, src)

    def download(self, dst: memoryview, src: Buffer, offset: int, stream: Stream) -> None:
        """Copies bytes out."""
        _check_range(src, offset, dst.nbytes)
        if dst.nbytes:
            _native.copy_out(dst, src.handle + offset)

    def copy(self, dst: Buffer, dst_offset: int, src: Buffer, src_offset: int, nbytes: int, stream: Stream) -> None:
        """Memory to memory."""
        _check_range(dst, dst_offset, nbytes)
        _check_range(src, src_offset, nbytes)
        if isinstance(dst, _HostBuffer) and dst.readonly:
            raise ShapeError("copy into read-only host memory")
        _native.copy_bytes(dst.handle + dst_offset, src.handle + src_offset, nbytes)

    def memory(self) -> MemoryInfo:
        """total: the control group's limit or the machine's memory; free: what can still be used."""
        free = available_memory() or 0
        return MemoryInfo(memory_limit() or _machine_bytes(), free, self._used)

    def kv_block_bytes(self, spec: KVSpec, block_size: int) -> int:
        """Bytes of a block, in the layout of native/kernels.h."""
        shape = (spec.num_kv_heads, spec.key_dim, spec.value_dim)
        return int(_native.cache_block_bytes(block_size, *shape, self._kept.number(spec)))

    # weights --------------------------------------------------------------------------------------------------------

    def pack_layout(self, shape: Sequence[int], format: str, uses: frozenset[str]) -> PackedLayout | None:
        """Strips of 32 rows for linear layers and tied embedding tables (pack.py)."""
        return pack.layout_for(shape, format, uses)

    def pack_weight(self, weight: HostTensor, layout: PackedLayout, dst: Buffer, offset: int) -> None:
        """Packs with all threads. Raises ShapeError if the weight is not what the layout was made for."""
        _check_range(dst, offset, layout.nbytes)
        number = _native.layout_number(layout.id)
        if number < 0 or tuple(weight.shape) != tuple(layout.shape) or weight.format != layout.format:
            raise ShapeError(f"weight '{weight.name}' is {weight.format}{list(weight.shape)}; the layout is {layout}")
        data = np.ascontiguousarray(weight.data)
        status = self._pool.pack(number, *layout.shape, data, dst.handle + offset)
        if status < 0:
            raise ShapeError(
                f"weight '{weight.name}' has {data.nbytes:,} bytes, which is not {weight.format}{list(weight.shape)}"
            )
        if status > 0:
            raise EngineError(
                "the threads of this backend cannot be used: it was opened in another process, or is busy", who="cpu_avx"
            )

    def unpack_weight(self, data: np.ndarray, layout: PackedLayout) -> np.ndarray:
        """The file's bytes. Raises UnsupportedError for a layout of another backend or version, or of another size."""
        known = pack.LAYOUTS.get(layout.format)
        if known != layout.id or layout.version != pack.VERSION or data.nbytes != layout.nbytes:
            return super().unpack_weight(data, layout)
        rows, width = layout.shape
        out = np.empty(_native.source_bytes(layout.id, rows, width), np.uint8)
        try:
            _native.linear_unpack(layout.id, rows, width, np.ascontiguousarray(data), out)
        except ValueError as error:
            raise ShapeError(f"packed weight: {error}") from None
        return out

    # ops --------------------------------------------------------------------------------------------------------------

    def supports(self, q: OpQuery) -> Yes | No:
        """Every op of opset 1 but `sample`, on f32 activations."""
        reason = refuse_query(q, NATIVE_OPS, tuple(CACHE_TYPES)) or refuse_operands(q, pack.layout_for) or _refuse_sizes(q)
        return No(reason) if reason else self._answer(q)

    def _answer(self, q: OpQuery) -> Yes:
        if q.op in ("linear", "moe"):
            layout = pack.LAYOUTS.get(q.dtypes[1 if q.op == "linear" else 3] or "")
            kind = 0 if layout is None else _native.prepare_kind(_native.layout_number(layout), self._exact, self._bf16)
            return Yes(q.op, act={0: None, BF16_ROWS: "bf16"}.get(kind, f"q8_g{kind}"))
        if q.op == "attention":
            spec = next((s for s in q.specs if isinstance(s, KVSpec)), KVSpec(1, 1, 1))
            kept, rounded = self._kept.name(spec), "bf16" if self._kept.pairs(spec) else None
            return Yes("attention", act=rounded, prob=rounded, weight={"f32": None, "int8": f"int8_g{_native.KV_GROUP}"}.get(kept, kept))
        return Yes(q.op, angle="f64" if q.op == "rope" else None)

    def ops(self) -> Mapping[str, OpFn]:
        """Every op alone, by its catalogue name."""
        return {name: self._single(name) for name in NATIVE_OPS}

    def _single(self, name: str) -> OpFn:
        def run(*inputs: Tensor | None, out: Any, stream: Stream, ws: Tensor | None, **attrs: Any) -> None:
            outputs = () if out is None or out == () else out if isinstance(out, tuple) else (out,)
            self._run_single(name, inputs, outputs, attrs)

        return run

    def _run_single(
        self, name: str, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor], attrs: Mapping[str, Any]
    ) -> None:
        """A program of one node on these operands, whose shapes are checked by the catalogue's rule."""
        self._check_open()
        spec = CATALOGUE[name]
        operands = [*inputs, *[None] * (len(spec.inputs) - len(inputs))]
        full = spec.complete_attrs(attrs)
        shapes = [None if t is None else (tuple(t.shape), t.dtype) for t in operands]
        results = spec.infer(shapes, [None if t is None else t.spec for t in operands], full)
        found = [tuple(t.shape) for t in outputs]
        if found != [shape for shape, _ in results]:
            raise ShapeError(f"op '{name}' gives {[list(s) for s, _ in results]}, but out is {[list(s) for s in found]}")
        tensors = {f"in{i}": t for i, t in enumerate(operands) if t is not None} | {f"out{i}": t for i, t in enumerate(outputs)}
        node = Node(
            name,
            tuple(None if t is None else f"in{i}" for i, t in enumerate(operands)),
            tuple(f"out{i}" for i in range(len(outputs))),
            full,
        )
        dims = StepDims(0, 0, 0)
        if name == "attention":
            dims = StepDims(_rows(operands[0]), _rows(operands[4]), 0)
            _check_step_shapes(operands, dims)
        elif name in RECURRENT:
            dims = StepDims(_rows(outputs[0]), _rows(operands[RECURRENT[name][2]]), 0)
            _check_recurrent_shapes(name, operands, dims)
        elif name == "kv_write" and _rows(operands[3]) != _rows(operands[1]):
            raise ShapeError(f"op 'kv_write' has {_rows(operands[1])} keys but {_rows(operands[3])} slots")

        def source(value: str) -> Source:
            tensor = tensors[value]
            return Source(tensor, tuple(tensor.shape), int(tensor.buffer.handle) + tensor.offset)

        program = self._compile([node], source, _Fixed(dims.T, dims.S, dims.R))
        try:
            program.run(dims)
        finally:
            program.close()

    def compile(self, sub: Sequence[Node], env: CompileEnv) -> Program | None:
        """A native program for these nodes; None if one of them has no kernel here."""
        self._check_open()
        if any(node.op not in NATIVE_OPS for node in sub):
            return None
        graph, tensors = env.graph, env.tensors

        def source(value: str) -> Source:
            root = tensors[graph.base(value).name]
            return Source(tensors[value], graph.values[value].shape, int(root.buffer.handle) + root.offset)

        uses: dict[str, int] = {}
        for name in (*graph.outputs, *(n for node in graph.nodes for n in node.inputs if n is not None)):
            uses[graph.base(name).name] = uses.get(graph.base(name).name, 0) + 1
        return self._compile(sub, source, env.largest, uses)

    def _compile(
        self, nodes: Sequence[Node], source: Any, largest: StepDims, uses: Mapping[str, int] | None = None
    ) -> NativeProgram:
        try:
            lowered = lower(nodes, source, largest, exact=self._exact, bf16=self._bf16, kept=self._kept, threads=self.threads, uses=uses)
            return NativeProgram(self.isa, self._pool, lowered, largest, nodes)
        except MemoryError:
            what = f"a program of {len(nodes)} ops for steps of {largest.T} tokens: the system refuses its memory"
            raise OutOfMemory(
                what, who="cpu_avx", fix="lower --prefill-chunk, or raise the memory limit", kind="scratch"
            ) from None

    # measuring, closing -----------------------------------------------------------------------------------------------

    def read_bandwidth(self, nbytes: int) -> float | None:
        """Bytes per second that all threads together read from a buffer of that size (1 GiB at most); None if it cannot be
        measured."""
        self._check_open()
        size = min(max(nbytes, 1 << 20), PROBE_BYTES)
        free = available_memory()
        if free is not None and size > free // 2:
            return None
        try:
            memory = _native.Memory(size, True)
        except MemoryError:
            return None
        try:
            self._pool.touch(memory)
            seconds = self._pool.read_seconds(memory, 3)
        finally:
            memory.close()
        return size / seconds if seconds > 0 else None

    def peaks(self) -> dict[str, tuple[str, float | str]]:
        """Instruction -> (type it multiplies, operations per second with all threads or why it cannot be measured)."""
        self._check_open()
        found: dict[str, tuple[str, float | str]] = {}
        for number, (name, dtype, _, missing) in enumerate(_native.peaks()):
            ops = -1.0 if missing else self._pool.peak_ops(number, PROBE_ROUNDS)
            found[name] = (dtype, ops if ops > 0 else missing or "the threads did not run")
        return found

    def peak_ops(self, dtype: str) -> float | None:
        """Of the fastest multiply-add instruction for that type which the variant in use has."""
        self._check_open()
        mine = _native.isa_names().index(self.isa)
        usable = [
            i for i, (_, of, variant, missing) in enumerate(_native.peaks()) if of == dtype and variant <= mine and not missing
        ]
        return max((rate for i in usable if (rate := self._pool.peak_ops(i, PROBE_ROUNDS)) > 0), default=None)

    def close(self) -> None:
        """Ends the threads. Buffers stay valid until they are closed, programs cannot run any more."""
        if not self._closed:
            self._closed = True
            self._pool.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the cpu_avx backend is used after it was closed")


class _Fixed(StepDims):
    """Dims of an op that runs alone: its shapes are numbers already."""

    def resolve(self, dim: int | str) -> int:
        """The number itself."""
        return int(dim)


def _refuse_sizes(q: OpQuery) -> str:
    """Why ids with a stride, or heads of this size, do not work; "" if they do."""
    for dtype, shape, strides in zip(q.dtypes, q.shapes, q.strides, strict=False):
        if dtype == "i32" and strides is not None and shape is not None and len(shape) == 1:
            return f"'{q.op}' takes a contiguous vector of i32, not one with a stride of {strides[0]}"
        if q.op == "moe" and dtype == "i32" and strides is not None:
            return f"'moe' takes contiguous ids, not rows with a stride of {strides[0]}"
    if q.op == "attention" and q.shapes and q.shapes[0] is not None:
        spec = q.specs[1] if len(q.specs) > 1 else None
        width = max(int(q.shapes[0][2]), int(q.attrs.get("value_dim", 0)), spec.value_dim if isinstance(spec, KVSpec) else 0)
        if width > MAX_HEAD:
            return f"heads of {width} elements; kernels take {MAX_HEAD} at most"
    if q.op == "short_conv" and len(q.shapes) > 2 and q.shapes[2] is not None and int(q.shapes[2][1]) > MAX_TAPS:
        return f"{q.shapes[2][1]} taps; the kernel takes {MAX_TAPS} at most"
    if q.op == "delta_rule" and len(q.shapes) > 1 and q.shapes[1] is not None and int(q.shapes[1][2]) > MAX_KEY:
        return f"keys of {q.shapes[1][2]} elements; the kernel takes {MAX_KEY} at most"
    return ""


def _choose(asked: str) -> str:
    return isa.choose(asked)


def _distrusted(asked: str) -> str:
    return isa.distrusted(asked)


def _rows(t: Tensor | None) -> int:
    return 0 if t is None else t.shape[0]


def _check_step_shapes(operands: Sequence[Tensor | None], dims: StepDims) -> None:
    """Step arrays of an attention that runs alone; in a compiled program the graph has fixed them."""
    found = [None if t is None else tuple(t.shape) for t in operands]
    wanted = {2: (dims.T,), 3: (dims.S + 1,), 8: (dims.S,)}
    for index, shape in wanted.items():
        if found[index] is not None and found[index] != shape:
            raise ShapeError(
                f"operand '{CATALOGUE['attention'].inputs[index]}' has shape {list(found[index] or ())}, not {list(shape)}"
            )
    if found[5] is None or len(found[5]) != 2 or found[5][0] != dims.S:
        raise ShapeError(f"operand 'block_table' has shape {found[5]}, not [{dims.S}, B]")


def _check_recurrent_shapes(name: str, operands: Sequence[Tensor | None], dims: StepDims) -> None:
    """Step arrays of an op with recurrent state that runs alone."""
    for index, rows in zip(RECURRENT[name], (dims.T, dims.S + 1, dims.S), strict=True):
        if _rows(operands[index]) != rows:
            raise ShapeError(f"operand '{CATALOGUE[name].inputs[index]}' of '{name}' has {_rows(operands[index])} entries, not {rows}")


def _check_range(buffer: Buffer, offset: int, nbytes: int) -> None:
    if offset < 0 or nbytes < 0 or offset + nbytes > buffer.nbytes:
        raise ShapeError(f"bytes {offset}…{offset + nbytes} are outside of a {buffer.kind} buffer of {buffer.nbytes} bytes")


def _machine_bytes() -> int:
    from .plugin import memory_bytes

    return memory_bytes()
