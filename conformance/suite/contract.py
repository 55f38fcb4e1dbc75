"""contract: memory, errors and life cycle of a backend, whatever it computes."""

from __future__ import annotations

import contextlib
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from fastllm.api import Backend, Limits, MemoryInfo, No, OpFn, OutOfMemory, Stream, Tensor, Yes

from .. import bounds
from ..bench import Bench
from ..case import Case, Failure, NotApplicable, Outcome
from ..numbers import Numbers
from ..operands import In, Weight
from ..session import Session
from .common import expect, same_bits

__all__ = ["cases"]

KINDS = ("weights", "kv", "state", "scratch", "staging")


def _small(session: Session, numbers: Numbers) -> Outcome:
    """One linear op that must still be right: the proof that a backend is usable."""
    x, w = numbers.normal(3, 32), numbers.normal(5, 32)
    data = w.reshape(-1).view(np.uint8)
    ran = session.bench.run("linear", [In(x, "f32", "T"), Weight((5, 32), "f32", data), None], [((3, 5), "f32")])
    return expect(session, "linear/after", ran, [bounds.linear(x, w, None, ran.numerics)])


def _alloc(session: Session, numbers: Numbers) -> Outcome:
    """Buffers of every kind hold what is uploaded at any offset, and give their memory back; `state` is zeroed."""
    backend, stream = session.backend, session.bench.stream
    used = backend.memory().used
    for kind in KINDS:
        buffer = backend.alloc(4096, kind)
        data = np.empty(4096, np.uint8)
        backend.download(memoryview(data), buffer, 0, stream)
        stream.synchronize()
        if kind == "state" and data.any():
            raise Failure("contract", f"a new {kind} buffer is not zeroed")
        before, sent = data.copy(), numbers.bytes(100)
        backend.upload(buffer, 64, memoryview(sent), stream)
        stream.synchronize()
        backend.download(memoryview(data), buffer, 0, stream)
        stream.synchronize()
        around = same_bits(data[:64], before[:64]) and same_bits(data[164:], before[164:])
        if not around or not same_bits(data[64:164], sent):
            raise Failure("contract", f"100 bytes uploaded at offset 64 of a {kind} buffer do not come back from there")
        part = np.empty(10, np.uint8)
        backend.download(memoryview(part), buffer, 70, stream)
        stream.synchronize()
        if not same_bits(part, sent[6:16]):
            raise Failure("contract", f"a download from the middle of a {kind} buffer brings other bytes")
        if (buffer.nbytes, buffer.kind) != (4096, kind):
            raise Failure("contract", f"alloc(4096, '{kind}') gave a buffer of {buffer.nbytes} bytes, kind '{buffer.kind}'")
        buffer.close()
        buffer.close()  # may be called twice
    if backend.memory().used != used:
        raise Failure("leak", f"{backend.memory().used - used:,} bytes stay in use after every buffer was closed")
    return Outcome()


def _counted(session: Session, numbers: Numbers) -> Outcome:
    """memory() counts what is allocated."""
    backend = session.backend
    before = backend.memory()
    if not isinstance(before, MemoryInfo) or not isinstance(backend.limits, Limits):
        raise Failure("contract", "memory() must give a MemoryInfo, and limits must be Limits")
    buffer = backend.alloc(1 << 20, "scratch")
    during = backend.memory().used - before.used
    buffer.close()
    if during < 1 << 20:
        raise Failure("contract", f"memory().used grew by {during:,} bytes for a buffer of {1 << 20:,}")
    return Outcome()


def _closed_buffer(session: Session, numbers: Numbers) -> Outcome:
    """A buffer that was closed cannot be used: an error, not a crash."""
    backend, stream = session.backend, session.bench.stream
    buffer = backend.alloc(256, "scratch")
    buffer.close()
    data = np.zeros(256, np.uint8)
    for what, call in (
        ("upload into", lambda: backend.upload(buffer, 0, memoryview(data), stream)),
        ("download from", lambda: backend.download(memoryview(data), buffer, 0, stream)),
    ):
        _must_raise(call, f"{what} a closed buffer", stream)
    return _small(session, numbers)


def _closed_backend(session: Session, numbers: Numbers) -> Outcome:
    """close() may be called twice; afterwards an allocation or an op raises, or works, but never crashes."""
    backend = session.fresh()
    backend.close()
    backend.close()
    with contextlib.suppress(Exception):
        backend.alloc(64, "scratch").close()
    return _small(session, numbers)


def _out_of_memory(session: Session, numbers: Numbers) -> Outcome:
    """An allocation that cannot be is OutOfMemory, and the backend stays usable."""
    for size in (1 << 62, 1 << 48):
        try:
            session.backend.alloc(size, "scratch").close()
        except OutOfMemory:
            continue
        except Exception as error:
            raise Failure("contract", f"alloc of {size:,} bytes raises {type(error).__name__}, not OutOfMemory: {error}") from None
        raise Failure("contract", f"alloc of {size:,} bytes succeeds")
    return _small(session, numbers)


def _copy(session: Session, numbers: Numbers) -> Outcome:
    """copy moves bytes within the device."""
    backend, stream = session.backend, session.bench.stream
    sent, got = numbers.bytes(1000), np.empty(1000, np.uint8)
    a, b = backend.alloc(2048, "kv"), backend.alloc(2048, "kv")
    try:
        backend.upload(a, 100, memoryview(sent), stream)
        backend.copy(b, 7, a, 100, 1000, stream)
        backend.download(memoryview(got), b, 7, stream)
        stream.synchronize()
    finally:
        a.close()
        b.close()
    if not same_bits(sent, got):
        raise Failure("contract", "copy within the device brings other bytes")
    return Outcome()


def _far(session: Session, numbers: Numbers) -> Outcome:
    """upload, copy and download of more than 64 KiB, at offsets that need more than 16 bits; what lies around stays as it is."""
    backend, stream = session.backend, session.bench.stream
    sent, count = numbers.bytes(70_000), 400_000
    a, b = backend.alloc(count, "kv"), backend.alloc(count, "kv")
    try:
        for buffer in (a, b):
            backend.upload(buffer, 0, memoryview(np.zeros(count, np.uint8)), stream)
        backend.upload(a, 131_072, memoryview(sent), stream)
        backend.copy(b, 262_144, a, 131_072, len(sent), stream)
        for name, buffer, at in (("upload", a, 131_072), ("copy", b, 262_144)):
            whole, part = np.empty(count, np.uint8), np.empty(len(sent), np.uint8)
            backend.download(memoryview(whole), buffer, 0, stream)
            backend.download(memoryview(part), buffer, at, stream)
            stream.synchronize()
            right = np.zeros(count, np.uint8)
            right[at : at + len(sent)] = sent
            if not same_bits(whole, right) or not same_bits(part, sent):
                raise Failure("contract", f"{name} of {len(sent):,} bytes to offset {at:,}: other bytes are there, or come back")
    finally:
        a.close()
        b.close()
    return Outcome()


def _wrapped(session: Session, numbers: Numbers) -> Outcome:
    """wrap_host, where it gives a buffer, works on that very memory; the array stays the caller's."""
    backend, stream = session.backend, session.bench.stream
    array = numbers.bytes(512)
    buffer = backend.wrap_host(array, readonly=False)
    if buffer is None:
        raise NotApplicable("the backend does not use host memory in place")
    got = np.empty(512, np.uint8)
    array[5] ^= 0xFF
    backend.download(memoryview(got), buffer, 0, stream)
    stream.synchronize()
    if not same_bits(got, array):
        raise Failure("contract", "a wrapped array was changed by its owner, and the backend does not see it")
    buffer.close()
    array[:] = 1
    return Outcome()


def _staging(session: Session, numbers: Numbers) -> Outcome:
    """After synchronize, the host's memory of an upload may be written again."""
    backend, stream = session.backend, session.bench.stream
    stage, buffers = np.empty(1 << 16, np.uint8), []
    try:
        for value in range(4):
            stage[:] = value + 1
            buffer = backend.alloc(stage.nbytes, "scratch")
            buffers.append(buffer)
            backend.upload(buffer, 0, memoryview(stage), stream)
            stream.synchronize()
            stage[:] = 0
        for value, buffer in enumerate(buffers):
            got = np.empty(stage.nbytes, np.uint8)
            backend.download(memoryview(got), buffer, 0, stream)
            stream.synchronize()
            if not (got == value + 1).all():
                raise Failure("contract", "an upload took bytes that were written after synchronize: its staging is used too early or too late")
    finally:
        for buffer in buffers:
            buffer.close()
    return Outcome()


def _order(session: Session, numbers: Numbers) -> Outcome:
    """Ops of one stream see each other's results without a wait between them."""
    bench, backend = session.bench, session.backend
    x = numbers.normal(64, 256)
    expected = x.astype(np.float64)
    tensors = [bench.region(x.reshape(-1).view(np.uint8), "scratch") for _ in range(2)]
    try:
        answer, _ = bench.ask("add", [In(x, "f32", "T"), In(x, "f32", "T")], {}, {})
        function = _function(bench, answer)
        source, target = (Tensor(r.buffer, r.base, x.shape, "f32") for r in tensors)
        for _ in range(6):  # doubling: exact
            function(source, source, out=target, stream=bench.stream, ws=None)
            source, target = target, source
            expected = expected * 2
        got = np.empty(x.shape, np.float32)
        backend.download(memoryview(got.reshape(-1).view(np.uint8)), source.buffer, source.offset, bench.stream)
        bench.stream.synchronize()
    finally:
        for region in tensors:
            region.buffer.close()
    if not np.array_equal(got, expected.astype(np.float32)):
        raise Failure("contract", "six ops after each other give another result than one by one: a wait between them is missing")
    return Outcome()


def _function(bench: Bench, answer: Yes | No) -> OpFn:
    if isinstance(answer, No):
        raise Failure("honest", f"a core op is answered No: {answer.reason}")
    return bench.functions[answer.impl]


def _after_error(session: Session, numbers: Numbers) -> Outcome:
    """Operands that do not fit are an error of the op, and the next op is right."""
    bench = session.bench
    x, w = bench.region(numbers.bytes(128), "scratch"), bench.region(numbers.bytes(128), "scratch")
    try:
        answer, _ = bench.ask("linear", [In(numbers.normal(1, 8), "f32", "T"), In(numbers.normal(4, 8)), None], {}, {})
        function = _function(bench, answer)
        bad = Tensor(w.buffer, w.base, (4, 7), "f32")
        _must_raise(
            lambda: function(Tensor(x.buffer, x.base, (1, 8), "f32"), bad, None, out=Tensor(x.buffer, x.base, (1, 4), "f32"), stream=bench.stream, ws=None),
            "linear with x [1, 8] and a weight [4, 7]",
            bench.stream,
        )
    finally:
        x.buffer.close()
        w.buffer.close()
    return _small(session, numbers)


def _two(session: Session, numbers: Numbers) -> Outcome:
    """Two open backends do not know of each other: closing one leaves the other at work."""
    other = session.fresh()
    buffer = other.alloc(1024, "scratch")
    mine = session.backend.memory().used
    buffer.close()
    other.close()
    if session.backend.memory().used != mine:
        raise Failure("contract", "closing another backend of this kind changed memory().used of this one")
    return _small(session, numbers)


def _signatures(session: Session, numbers: Numbers) -> Outcome:
    """Methods take what the interface gives them."""
    backend = session.backend
    for name, member in vars(Backend).items():
        if not inspect.isfunction(member) or name.startswith("_"):
            continue
        wanted = [p for p in inspect.signature(member).parameters if p != "self"]
        method = getattr(backend, name, None)
        if not callable(method):
            raise Failure("contract", f"the backend has no method '{name}'")
        try:
            inspect.signature(method).bind(*wanted)
        except TypeError as error:
            raise Failure("contract", f"'{name}' cannot be called with ({', '.join(wanted)}): {error}") from None
        except ValueError:
            continue  # native code without a signature
    for name, function in backend.ops().items():
        if not callable(function):
            raise Failure("contract", f"ops()['{name}'] cannot be called")
    return Outcome()


_QUIET_IMPORT = """
import sys
from importlib import metadata
point = next(e for e in metadata.entry_points(group="fastllm.backends") if e.name == sys.argv[1])
before = {l.split()[-1] for l in open("/proc/self/maps") if ".so" in l}
point.load()
after = {l.split()[-1] for l in open("/proc/self/maps") if ".so" in l}
print("\\n".join(sorted(after - before)))
"""


def _quiet_import(session: Session, numbers: Numbers) -> Outcome:
    """Importing the plug-in loads no driver: a child compares the libraries that are mapped."""
    if not sys.platform.startswith("linux") or session.target.mutant or session.target.plugin_paths:
        raise NotApplicable("needs /proc and an installed entry point")
    name = session.target.name.partition(":")[0]
    child = subprocess.run([sys.executable, "-c", _QUIET_IMPORT, name], capture_output=True, text=True, timeout=60, check=False)
    if child.returncode:
        raise Failure("contract", f"the plug-in cannot be imported in a new process: {child.stderr.strip().splitlines()[-1:]}")
    drivers = [p for p in child.stdout.split() if any(d in Path(p).name.lower() for d in ("cuda", "opencl", "libhip", "amdhip", "level_zero", "ze_loader", "vulkan", "sycl"))]
    if drivers:
        raise Failure("contract", f"importing the plug-in loads {', '.join(drivers)}: drivers belong into open_backend")
    return Outcome()


def _must_raise(call: Callable[[], object], what: str, stream: Stream) -> None:
    """At once, or where the stream is waited for: a device may be late."""
    try:
        call()
        stream.synchronize()
    except (KeyboardInterrupt, SystemExit):
        raise
    except Exception:
        return
    raise Failure("error", f"{what} raises nothing")


_CHECKS: tuple[tuple[str, Callable[[Session, Numbers], Outcome], bool], ...] = (
    ("alloc", _alloc, True),
    ("memory", _counted, True),
    ("closed_buffer", _closed_buffer, True),
    ("closed_backend", _closed_backend, True),
    ("out_of_memory", _out_of_memory, True),
    ("copy", _copy, True),
    ("far", _far, True),
    ("wrap_host", _wrapped, False),
    ("staging", _staging, True),
    ("order", _order, True),
    ("after_error", _after_error, True),
    ("two", _two, True),
    ("signatures", _signatures, True),
    ("quiet_import", _quiet_import, False),
)


def cases() -> Iterator[Case]:
    """One case per rule of the contract."""
    for name, check, required in _CHECKS:
        yield Case(f"backend/-/-/any/{name}#contract", "backend", "contract", check, required=required, quick=True)
