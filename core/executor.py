"""The executor: runs a plan one step at a time.

It owns the arenas of every device, copies the step's arrays to where the plan says, runs each segment (one `Program.run` where the
backend compiled it, op by op where not), carries values between devices, and samples on the host. Nothing is allocated inside a step.

A backend may return before its work is done. Work is waited for where the host reads (a value that leaves a device, logits) and at
the end of a step, failed or not: from then on, host memory that was being uploaded may be written again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any
from weakref import ReferenceType, ref

import numpy as np

from . import _steps
from ._steps import StepResult
from .backend import Backend, Buffer, CompileEnv, Program, StepDims, Stream, Tensor, plain_bytes
from .errors import EngineError
from .graph import KVSpec, SlotSpec, Value
from .loader import load_weights
from .plan import Place, Plan, Segment
from .step import MOVED, StepBatch
from .weights import TensorSource, WeightRef, with_matrices

__all__ = ["Executor", "StepResult"]

NUMPY = {"f32": np.float32, "f64": np.float64, "i32": np.int32, "i8": np.int8, "f16": np.float16}
STEP_FIELDS = {
    "ids": "T", "positions": "T", "slots": "T", "query_start": "S+1", "context_len": "S", "block_table": "S", "state_slot": "S", "prefix_len": "S",
    "sample_rows": "R",
}  # fmt: skip
"""Arrays of a StepBatch and what counts their rows."""
MAY_LACK = ("state_slot", "prefix_len")


class Executor:
    """A loaded model. Called by one thread at a time; `close` returns all memory."""

    def __init__(
        self,
        plan: Plan,
        weights: Mapping[str, WeightRef],
        sources: Mapping[str, TensorSource],
        backends: Mapping[str, Backend],
        progress: Callable[[int, int, str], None] | None = None,
        observe: Callable[[int], AbstractContextManager[object]] | None = None,
    ):
        """Allocates, loads and compiles. backends: device name -> open backend (not closed by the executor).

        observe: for measurements. Every node is then run alone and waited for, inside of `observe(index of the node)`."""
        self.plan, self.backends = plan, dict(backends)
        weights = with_matrices(weights, (name for _, name in plan.places))
        limits = plan.limits
        self.block_size, self.num_blocks, self.max_blocks = limits.block_size, limits.num_blocks, limits.max_blocks
        self.max_tokens, self.max_sequences, self.max_rows = limits.max_tokens, limits.max_sequences, limits.max_rows
        self.num_snapshots = limits.num_snapshots
        self._arenas: dict[tuple[str, str, int], Buffer] = {}  # (device, arena, chunk)
        self._logits, self._logits_of = np.zeros((0, 0), np.float32), list[np.ndarray]()  # f32 [most rows, V]
        self._host: dict[tuple[str, str], np.ndarray] = {}  # (device, value) -> array that the device reads or writes
        self._hosted: dict[tuple[str, str], Buffer] = {}
        self._programs: list[Program | None] = []
        self._single: list[Program] = []  # programs of one node, only while somebody observes
        self._batch: ReferenceType[StepBatch] | None = None  # whose arrays are there; weak: a batch leads to its requests
        self._copies: _steps.Copies | None = None  # of what changes when it is moved on
        self._closed = False
        used = tuple(dict.fromkeys(s.device for s in plan.segments))
        self._streams: dict[str, Stream] = {d: self.backends[d].new_stream() for d in used}
        try:
            for (device, arena), sizes in plan.arenas.items():
                if arena not in ("host", "mapped"):
                    kind = "scratch" if arena == "workspace" else arena
                    for chunk, nbytes in enumerate(sizes):
                        self._arenas[(device, arena, chunk)] = self.backends[device].alloc(nbytes, kind)
            self._share_host_values()
            self._host_devices = {device for device, _ in self._hosted}
            self._map_weights(weights, sources)
            self._zeros = memoryview(bytes(max((p.block_bytes for p in plan.places.values()), default=0)))
            self._stage = np.zeros(max((self._largest(c.value) for s in plan.segments for c in s.copies), default=0), np.uint8)
            load_weights(plan, weights, sources, self.backends, self._arenas, self._streams, progress)
            self._logits_device = self._find_logits()
            self._logits = self._host[self._logits_device]
            self._logits_of = [self._logits[:rows] for rows in range(len(self._logits) + 1)]  # f32 [R, V] for each R
            self._fields: list[tuple[str, str, bool, np.ndarray | None]] = [(n, rows, n in MAY_LACK, None) for n, rows in STEP_FIELDS.items()]
            self._fields += [(n, STEP_FIELDS[n], n in MAY_LACK, array) for (_, n), array in self._host.items() if n in STEP_FIELDS]
            self._uploads = [(d, n, array) for (d, n), array in self._host.items() if n in STEP_FIELDS and (d, n) not in self._hosted]
            self._carried = [segment.copies for segment in plan.segments]
            # the default stream is done when a call returns; other streams are waited for
            self._waits = [s for s in self._streams.values() if type(s).synchronize is not Stream.synchronize]
            self._logits_here = self._logits_device in self._hosted and not self._waits
            envs = {
                d: CompileEnv(
                    plan.graph, self._tensors(d), limits.largest, limits.block_size, limits.max_blocks, self._workspace(d)
                )
                for d in used
            }
            for segment in plan.segments:
                nodes = [plan.graph.nodes[i] for i in segment.nodes]
                backend = self.backends[segment.device]
                self._programs.append(None if observe is not None else backend.compile(nodes, envs[segment.device]))
            self._interpreted = [
                self._resolve_ops(s, envs[s.device]) if p is None else [] for s, p in zip(plan.segments, self._programs, strict=True)
            ]
            if observe is not None:
                self._interpreted = [self._observed(s, envs[s.device], c, observe) for s, c in zip(plan.segments, self._interpreted, strict=True)]
        except BaseException:
            self.close()
            raise

    # set-up ---------------------------------------------------------------------------------------------------------

    def _share_host_values(self) -> None:
        """Step inputs, constants and outputs: in host memory that the device reads itself if it can, else in its arena."""
        for (device, name), place in self.plan.places.items():
            if place.arena != "host":
                continue
            value = self.plan.graph.values[name]
            array = np.zeros(place.shape, NUMPY[value.dtype])
            if value.data is not None:
                array[...] = value.data
            self._host[(device, name)] = array
            buffer = self.backends[device].wrap_host(array.reshape(-1).view(np.uint8), readonly=False)
            if buffer is not None:
                self._hosted[(device, name)] = buffer
                continue
            if (device, "host", place.chunk) not in self._arenas:
                size = self.plan.arenas[(device, "host")][place.chunk]
                self._arenas[(device, "host", place.chunk)] = self.backends[device].alloc(size, "staging")
            if value.data is not None:
                self._upload(device, name, array)

    def _map_weights(self, weights: Mapping[str, WeightRef], sources: Mapping[str, TensorSource]) -> None:
        """Weights that the device reads from the mapped file, read-only."""
        for (device, name), place in self.plan.places.items():
            if place.arena == "mapped":
                buffer = self.backends[device].wrap_host(sources[weights[name].source].data, readonly=True)
                if buffer is None:
                    raise EngineError(f"backend '{device}' maps weights but does not take '{name}' from the file")
                self._hosted[(device, name)] = buffer

    def _upload(self, device: str, name: str, array: np.ndarray) -> None:
        """The array (contiguous rows of `_host`) to its place."""
        if array.size:
            place = self.plan.places[(device, name)]
            raw = memoryview(array.reshape(-1).view(np.uint8))
            self.backends[device].upload(self._buffer(device, place), place.offset, raw, self._streams[device])

    def _buffer(self, device: str, place: Place) -> Buffer:
        return self._arenas[(device, place.arena, place.chunk)]

    def _largest(self, name: str) -> int:
        """Bytes of a value in the biggest step."""
        value = self.plan.graph.values[name]
        return plain_bytes([self.plan.limits.resolve(d) for d in value.shape], value.dtype)

    def _find_logits(self) -> tuple[str, str]:
        name = self.plan.graph.base(self.plan.graph.outputs[0]).name
        for (device, value), place in self.plan.places.items():
            if value == name and place.arena == "host":
                return device, value
        raise EngineError("the plan places the graph's first output (logits) nowhere")

    def _tensors(self, device: str) -> dict[str, Tensor]:
        """Every value that exists on a device, at its largest shape."""
        tensors = {name: self._tensor(device, name) for d, name in self.plan.places if d == device}
        for value in self.plan.graph.values.values():
            base = self.plan.graph.base(value.name).name
            if value.view is not None and base in tensors:
                shape = tuple(self.plan.limits.resolve(d) for d in value.shape)
                whole = tensors[base]
                shift = value.view.offset * np.dtype(NUMPY[value.dtype]).itemsize
                tensors[value.name] = replace(whole, shape=shape, strides=value.view.strides, offset=whole.offset + shift)
        return tensors

    def _tensor(self, device: str, name: str) -> Tensor:
        place = self.plan.places[(device, name)]
        value: Value = self.plan.graph.values[name]
        buffer = self._hosted.get((device, name))
        offset = 0 if buffer is not None else place.offset
        if buffer is None:
            buffer = self._buffer(device, place)
        state: dict[str, Any] = {}
        if isinstance(value.spec, KVSpec | SlotSpec):
            count = self.num_blocks if isinstance(value.spec, KVSpec) else self.plan.limits.num_slots
            state = {"spec": value.spec, "block_size": self.block_size, "num_blocks": count, "block_bytes": place.block_bytes}
        return Tensor(buffer, offset, place.shape, place.dtype, place.strides, place.layout, **state)

    def _workspace(self, device: str) -> Tensor | None:
        sizes = self.plan.arenas.get((device, "workspace"))
        return None if sizes is None else Tensor(self._arenas[(device, "workspace", 0)], 0, (sizes[0],), "i8")

    def _resolve_ops(self, segment: Segment, env: CompileEnv) -> list[Callable[[StepDims], None]]:
        """One bound call per node, for a backend without a compiled program."""
        functions = self.backends[segment.device].ops()
        tensors, stream, ws = env.tensors, self._streams[segment.device], env.workspace
        impl = {d.node: d.impl for d in self.plan.decisions}
        calls: list[Callable[[StepDims], None]] = []
        for index in segment.nodes:
            node = self.plan.graph.nodes[index]
            fn = functions[impl[index]]
            inputs = [None if n is None else (tensors[n], self.plan.graph.values[n].shape) for n in node.inputs]
            outputs = [(tensors[n], self.plan.graph.values[n].shape) for n in node.outputs]

            def call(dims: StepDims, fn: Any = fn, inputs: Any = inputs, outputs: Any = outputs, attrs: Any = node.attrs) -> None:
                operands = [None if p is None else _at(p[0], p[1], dims) for p in inputs]
                results = tuple(_at(t, s, dims) for t, s in outputs)
                fn(*operands, out=results[0] if len(results) == 1 else results, stream=stream, ws=ws, **attrs)

            calls.append(call)
        return calls

    def _observed(
        self,
        segment: Segment,
        env: CompileEnv,
        calls: list[Callable[[StepDims], None]],
        observe: Callable[[int], AbstractContextManager[object]],
    ) -> list[Callable[[StepDims], None]]:
        """The calls of a segment, each waited for inside of `observe`; a node that the backend compiles alone runs as that program."""
        backend, stream = self.backends[segment.device], self._streams[segment.device]
        result: list[Callable[[StepDims], None]] = []
        for index, call in zip(segment.nodes, calls, strict=True):
            program = backend.compile([self.plan.graph.nodes[index]], env)
            if program is not None:
                self._single.append(program)

            def run(dims: StepDims, index: int = index, inner: Callable[[StepDims], None] = program.run if program else call) -> None:
                with observe(index):
                    inner(dims)
                    stream.synchronize()

            result.append(run)
        return result

    # a step ---------------------------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """Entries of a row of logits."""
        return self._host[self._logits_device].shape[1]

    def run(self, batch: StepBatch) -> StepResult:
        """Runs one step. Raises EngineError if the batch exceeds the plan's limits, contradicts itself, or a backend fails."""
        dims = batch.dims
        try:
            if batch.moved and self._batch is not None and batch is self._batch():
                if self._copies is None:
                    self._copies = _steps.Copies([(getattr(batch, n), array) for (_, n), array in self._host.items() if n in MOVED])
                self._copies.run()
            else:
                self._fill(batch)
            for device, name, array in self._uploads:
                self._upload(device, name, array[: len(getattr(batch, name))])
            for index, program in enumerate(self._programs):
                for copy in self._carried[index]:
                    self._carry(copy.value, copy.source, copy.target, dims)
                if program is None:
                    self._interpret(index, dims)
                    continue
                try:
                    program.run(dims)
                except BaseException as error:
                    self._say_where(error, index, -1)
                    raise
            logits = self._logits_of[dims.R]
            if not self._logits_here:
                self._read_logits(logits)
        finally:
            for stream in self._waits:
                stream.synchronize()
        return StepResult(self._sample(logits, batch), logits)

    def _interpret(self, index: int, dims: StepDims) -> None:
        """A segment that its backend did not compile, op by op."""
        at = -1
        try:
            for call in self._interpreted[index]:
                at += 1
                call(dims)
        except BaseException as error:
            self._say_where(error, index, at)
            raise

    def _say_where(self, error: BaseException, index: int, at: int) -> None:
        """What goes wrong says where: no message of a driver does. at: number of the op within its segment; −1: somewhere in its program."""
        segment = self.plan.segments[index]
        what = f"op '{self.plan.graph.nodes[segment.nodes[at]].op}'" if at >= 0 else f"the program of {len(segment.nodes)} ops"
        note = f"{what} on {segment.device}"
        if note not in getattr(error, "__notes__", ()):  # a backend may raise one object again and again
            error.add_note(note)

    def _fill(self, batch: StepBatch) -> None:
        """The arrays of a step to where the devices read them."""
        dims = batch.dims
        if dims.T > self.max_tokens or dims.S > self.max_sequences or dims.R > self.max_rows:
            raise EngineError(f"step of {dims} exceeds the plan: {self.plan.limits.largest}")
        if batch.block_table.shape[1] > self.max_blocks:
            raise EngineError(f"a block table of {batch.block_table.shape[1]} columns exceeds the plan: {self.max_blocks}")
        self._batch = self._copies = None
        _steps.fill(self._fields, batch, dims.T, dims.S, dims.R)
        self._batch = ref(batch)

    def _carry(self, name: str, source: str, target: str, dims: StepDims) -> None:
        value = self.plan.graph.values[name]
        nbytes = plain_bytes([dims.resolve(d) for d in value.shape], value.dtype)
        if not nbytes:
            return
        view = memoryview(self._stage)[:nbytes]
        there, here = self._tensor(source, name), self._tensor(target, name)
        self.backends[source].download(view, there.buffer, there.offset, self._streams[source])
        self._streams[source].synchronize()
        self.backends[target].upload(here.buffer, here.offset, view, self._streams[target])
        self._streams[target].synchronize()  # the next copy takes the same staging

    def _read_logits(self, logits: np.ndarray) -> None:
        """Logits of a device that does not write to the host's memory, or is not done when a call returns."""
        if self._logits_device not in self._hosted and len(logits):
            device, name = self._logits_device
            place = self.plan.places[(device, name)]
            view = memoryview(logits.reshape(-1).view(np.uint8))
            self.backends[device].download(view, self._buffer(device, place), place.offset, self._streams[device])
        for stream in self._waits:
            stream.synchronize()

    def _sample(self, logits: np.ndarray, batch: StepBatch) -> np.ndarray | None:
        if batch.sampler is None:
            return None
        if not len(logits):
            return np.zeros(0, np.int32)
        rows = batch.sampler() if callable(batch.sampler) else batch.sampler
        return rows.choose(logits)

    def copy_block(self, src: int, dst: int) -> None:
        """Copies one cache block in every layer (copy-on-write of a shared block)."""
        self._copy_unit("kv", src, dst)

    def touch_block(self, block: int) -> None:
        """Writes zeros to a cache block that nobody uses, in every layer, where a device has its memory from the host's system: that gives out pages when they are
        first written to, which takes longer than a step of a small model if many sequences begin a block together."""
        for (device, _), place in self.plan.places.items():
            if place.arena == "kv" and device in self._host_devices:
                where = place.offset + block * place.block_bytes
                self.backends[device].upload(self._buffer(device, place), where, self._zeros[: place.block_bytes], self._streams[device])

    def keep_state(self, slot: int, snapshot: int) -> None:
        """Copies the recurrent state of a slot, in every layer, to a snapshot."""
        self._copy_unit("state", slot, self.max_sequences + snapshot)

    def restore_state(self, snapshot: int, slot: int) -> None:
        """Copies a snapshot to a slot, in every layer."""
        self._copy_unit("state", self.max_sequences + snapshot, slot)

    def _copy_unit(self, kind: str, src: int, dst: int) -> None:
        """Copies a block of the cache, or a slot of state, in every layer."""
        for (device, _), place in self.plan.places.items():
            if place.arena == kind:
                arena, size = self._buffer(device, place), place.block_bytes
                stream = self._streams[device]
                self.backends[device].copy(arena, place.offset + dst * size, arena, place.offset + src * size, size, stream)

    def close(self) -> None:
        """Frees programs, then memory, the rest also if one fails; may be called twice."""
        if self._closed:
            return
        self._closed = True
        self._logits, self._logits_of = np.zeros((0, 0), np.float32), []
        self._batch = self._copies = None
        with ExitStack() as stack:  # calls the last one first
            stack.callback(self._host.clear)
            for buffer in (*self._hosted.values(), *self._arenas.values()):
                stack.callback(buffer.close)
            for program in (*self._programs, *self._single):
                if program is not None:
                    stack.callback(program.close)


def _at(tensor: Tensor, shape: tuple[int | str, ...], dims: StepDims) -> Tensor:
    """The tensor of this step: its leading symbol resolved."""
    if shape and isinstance(shape[0], str):
        return tensor.with_rows(dims.resolve(shape[0]))
    return tensor
