"""FakeBackend: numpy in the clothes of an accelerator, as unkind as the operator interface allows.

separate   memory is no numpy array and cannot be reached from the host but by upload and download
poisoned   new memory (but `state`, which is zeroed) and memory that was given back hold 0xFF bytes: NaN as floats, −1 as integers
late       uploads, downloads, copies and ops happen when something waits for their stream, and not before

So a copy that is missing gives NaN, a result that is read too early is poison, and host memory that is written again too early
changes the results. What an op raises late names the op.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fastllm.api import (
    CATALOGUE,
    Buffer,
    EngineError,
    Event,
    FastLLMError,
    Limits,
    MemoryInfo,
    No,
    OpFn,
    OpQuery,
    OutOfMemory,
    RefBackend,
    Stream,
    Tensor,
    UsageError,
    Yes,
    check_alloc,
)

__all__ = ["FakeBackend", "LateStream"]

POISON = 0xFF
ALIGNMENT = 256  # not the default, so that somebody who forgets to ask is found


class DeviceMemory:
    """What a buffer's handle is. `bytes`: u8 [nbytes], for this file only."""

    __slots__ = ("bytes",)

    def __init__(self, nbytes: int, zeroed: bool):
        self.bytes = np.full(nbytes, 0 if zeroed else POISON, np.uint8)


class LateStream(Stream):
    """Work in order, done when it is waited for."""

    def __init__(self) -> None:
        self.work: deque[tuple[str, Callable[[], None]]] = deque()

    def enqueue(self, name: str, call: Callable[[], None]) -> None:
        """Adds a piece of work; name: what an error will call it."""
        self.work.append((name, call))

    def synchronize(self) -> None:
        """Does everything. After an error the rest of the work is dropped, as on a device whose queue has failed."""
        try:
            while self.work:
                self.step()
        finally:
            self.work.clear()

    def step(self) -> None:
        """Does the first piece of work."""
        name, call = self.work.popleft()
        try:
            call()
        except FastLLMError:
            raise
        except Exception as error:
            raise EngineError(
                f"{name} failed on the fake device", who="fake", why=f"{type(error).__name__}: {error}"
            ) from error


class LateEvent(Event):
    """A point in a stream: waiting for it does all the work before it, and none after."""

    def __init__(self) -> None:
        self._stream: LateStream | None = None
        self._reached = True

    def record(self, stream: Stream) -> None:
        """Marks the point."""
        assert isinstance(stream, LateStream)
        self._stream, self._reached = stream, False
        stream.enqueue("event", self._reach)

    def _reach(self) -> None:
        self._reached = True

    def synchronize(self) -> None:
        """Waits for the point."""
        while not self._reached and self._stream is not None and self._stream.work:
            self._stream.step()


class FakeBackend(RefBackend):
    """The device. `without`, `inherit`: names of ops, core or extended, with commas; max_alloc, memory: bytes, 0 for no limit.

    Ops are native (`fake.NAME`): they compute on the device's memory and download nothing. Those of `inherit` are `ref.NAME`.
    Raises UsageError for an op that does not exist or a negative size.
    """

    name = "fake"

    def __init__(self, without: str = "", inherit: str = "", max_alloc: int = 0, memory: int = 0):
        super().__init__()
        self._without = _op_names("without", without)
        self._inherited = set(CATALOGUE) if inherit == "all" else _op_names("inherit", inherit)
        for key, value in (("max_alloc", max_alloc), ("memory", memory)):
            if value < 0:
                raise UsageError(f"option {key} of backend 'fake' is {value}; it must be at least 0")
        self.limits = Limits(alignment=ALIGNMENT, max_alloc=max_alloc or None)
        self._total = memory
        self._inner = RefBackend()  # computes, on the bytes of this device

    # memory ---------------------------------------------------------------------------------------------------------

    def alloc(self, nbytes: int, kind: str) -> Buffer:
        """Poisoned memory, `state` zeroed. Raises OutOfMemory past the limits."""
        check_alloc(nbytes, kind, self.limits, self._total - self._used if self._total else None)
        try:
            memory = DeviceMemory(nbytes, zeroed=kind == "state")
        except MemoryError:
            raise OutOfMemory(f"{kind} buffer of {nbytes:,} bytes: the host has no memory left", requested=nbytes, kind=kind) from None
        self._used += nbytes

        def release() -> None:
            self._used -= nbytes
            memory.bytes.fill(POISON)

        return Buffer(nbytes, kind, memory, release)

    def wrap_host(self, view: np.ndarray, readonly: bool) -> Buffer | None:
        """None: this device cannot reach host memory."""
        return None

    def memory(self) -> MemoryInfo:
        """Bytes in use, and of the option `memory`."""
        return MemoryInfo(self._total, max(0, self._total - self._used), self._used)

    def new_stream(self) -> LateStream:
        """A stream that does nothing before it is waited for."""
        return LateStream()

    def new_event(self) -> LateEvent:
        """A point in such a stream."""
        return LateEvent()

    def upload(self, dst: Buffer, offset: int, src: memoryview, stream: Stream) -> None:
        """Host to device, late: src is read when the stream is waited for."""
        source = np.frombuffer(src, np.uint8)
        _check_range("upload", dst, offset, source.size)

        def run() -> None:
            dst.handle.bytes[offset : offset + source.size] = source

        _late(stream).enqueue("upload", run)

    def download(self, dst: memoryview, src: Buffer, offset: int, stream: Stream) -> None:
        """Device to host, late: dst is poison until the stream is waited for."""
        target = np.frombuffer(dst, np.uint8)
        _check_range("download", src, offset, target.size)
        target.fill(POISON)

        def run() -> None:
            target[:] = src.handle.bytes[offset : offset + target.size]

        _late(stream).enqueue("download", run)

    def copy(self, dst: Buffer, dst_offset: int, src: Buffer, src_offset: int, nbytes: int, stream: Stream) -> None:
        """Within the device, late."""
        _check_range("copy", src, src_offset, nbytes)
        _check_range("copy", dst, dst_offset, nbytes)

        def run() -> None:
            dst.handle.bytes[dst_offset : dst_offset + nbytes] = src.handle.bytes[src_offset : src_offset + nbytes].copy()

        _late(stream).enqueue("copy", run)

    # ops ------------------------------------------------------------------------------------------------------------

    def supports(self, q: OpQuery) -> Yes | No:
        """What `ref` supports, less `without`."""
        if q.op in self._without:
            return No(f"the fake device was opened without '{q.op}'")
        answer = super().supports(q)
        if isinstance(answer, No) or q.op in self._inherited:
            return answer
        return replace(answer, impl=f"fake.{q.op}")

    def ops(self) -> Mapping[str, OpFn]:
        """`fake.NAME` for every op, and the inherited `ref.NAME`."""
        inherited = super().ops()
        native = {name.replace("ref.", "fake.", 1): self._native(name, op) for name, op in self._inner.ops().items()}
        return {**inherited, **native}

    def _native(self, name: str, op: OpFn) -> OpFn:
        """The op of `ref` on the device's bytes, late."""
        label = name.partition(".")[2]

        def run(*inputs: Tensor | None, out: Any, stream: Stream, ws: Tensor | None, **attrs: Any) -> None:
            def call() -> None:
                operands = [None if t is None else _inside(t) for t in inputs]
                results = None if out is None else tuple(map(_inside, out)) if isinstance(out, tuple) else _inside(out)
                op(*operands, out=results, stream=Stream(), ws=None, **attrs)

            _late(stream).enqueue(label, call)

        return run


def _inside(t: Tensor) -> Tensor:
    """The same operand as `ref` sees it: its buffer is the device's bytes as an array."""
    return replace(t, buffer=Buffer(t.buffer.nbytes, t.buffer.kind, t.buffer.handle.bytes))


def _late(stream: Stream) -> LateStream:
    if not isinstance(stream, LateStream):
        raise EngineError("a stream of another backend was given to the fake device", who="fake")
    return stream


def _check_range(what: str, buffer: Buffer, offset: int, nbytes: int) -> None:
    """A late error would not say who asked."""
    if offset < 0 or nbytes < 0 or offset + nbytes > buffer.nbytes:
        raise EngineError(
            f"{what} of bytes {offset:,}…{offset + nbytes:,} of a {buffer.kind} buffer of {buffer.nbytes:,} bytes", who="fake"
        )


def _op_names(option: str, text: str) -> set[str]:
    names = {n.strip() for n in text.split(",") if n.strip()}
    unknown = sorted(names - set(CATALOGUE))
    if unknown:
        raise UsageError(
            f"option {option} of backend 'fake' names '{unknown[0]}', which is no op", fix=f"one of {', '.join(CATALOGUE)}"
        )
    return names
