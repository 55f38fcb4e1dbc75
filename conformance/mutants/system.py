"""Faults of a backend as a whole: what it promises, its memory, its order, and what it does to its process."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fastllm.api import Backend, Buffer, MemoryInfo, No, OpFn, OpQuery, OutOfMemory, RefBackend, Stream, Yes

from ..case import NotApplicable
from .base import Breaker, LateBase, Mutant, MutantBase, changed, post, pre
from .numeric import make

__all__ = ["mutants"]

Op = Callable[..., None]
F32 = np.float32


class ClaimsAll(MutantBase):
    """Yes to everything."""

    def supports(self, q: OpQuery) -> Yes | No:
        return Yes(f"mutant.{q.op}")


class ClaimsNothing(MutantBase):
    """No to everything."""

    def supports(self, q: OpQuery) -> Yes | No:
        return No("not today")


class NoReason(MutantBase):
    """A No without a reason."""

    def supports(self, q: OpQuery) -> Yes | No:
        answer = super().supports(q)
        return No("") if isinstance(answer, No) else answer


class UnknownAttributes(MutantBase):
    """Attributes that it does not know do not trouble it."""

    def supports(self, q: OpQuery) -> Yes | No:
        known = {k: v for k, v in q.attrs.items() if k != "sharpness"}
        return super().supports(replace(q, attrs=known))


class UnknownValues(MutantBase):
    """Neither do values."""

    def supports(self, q: OpQuery) -> Yes | No:
        known = {k: v for k, v in q.attrs.items() if k != "mask"}
        return super().supports(replace(q, attrs=known))


class WrongName(MutantBase):
    """A Yes leads to an implementation that is not there."""

    def supports(self, q: OpQuery) -> Yes | No:
        return Yes("mutant.turbo_softmax") if q.op == "softmax" else super().supports(q)


class Fickle(MutantBase):
    """The same question, another answer."""

    asked = 0

    def supports(self, q: OpQuery) -> Yes | No:
        self.asked += 1
        return No("busy") if q.op == "rope" and self.asked % 2 else super().supports(q)


class Hole(MutantBase):
    """Yes for a range, No for a part of it."""

    def supports(self, q: OpQuery) -> Yes | No:
        return No("one row is too few") if q.op == "linear" and q.dims.get("T", (0, 9))[1] == 1 else super().supports(q)


class Asks(MutantBase):
    """Allocates while it is asked."""

    def supports(self, q: OpQuery) -> Yes | No:
        self.alloc(8, "scratch").close()
        return super().supports(q)


class Unreachable(MutantBase):
    """Has an implementation that no Yes leads to."""

    def ops(self) -> Mapping[str, OpFn]:
        found = dict(super().ops())
        found["mutant.softmax_fast"] = found["mutant.softmax"]
        return found


class HoldsLie(MutantBase):
    """A No with ranges that do not hold either."""

    def supports(self, q: OpQuery) -> Yes | No:
        if q.op == "attention" and q.dims.get("ctx", (0, 0))[1] > 4096:
            return No("long contexts", {"ctx": (0, 8192)})
        return super().supports(q)


class SkipsEverything(MutantBase):
    """Whatever is asked: an exception that says skip."""

    def supports(self, q: OpQuery) -> Yes | No:
        raise NotApplicable("skipped")


class NoRope(MutantBase):
    """Lacks an op of every decode step."""

    def supports(self, q: OpQuery) -> Yes | No:
        return No("rope is not written yet") if q.op == "rope" else super().supports(q)


class Downloads(MutantBase):
    """An op that calls itself native, and reads its operands by download."""

    def ops(self) -> Mapping[str, OpFn]:
        found = dict(super().ops())
        honest = found["mutant.softmax"]

        def softmax(*inputs: Any, out: Any, stream: Stream, ws: Any, **attrs: Any) -> None:
            stage = bytearray(4)
            self.download(memoryview(stage), inputs[0].buffer, 0, stream)
            honest(*inputs, out=out, stream=stream, ws=ws, **attrs)

        found["mutant.softmax"] = softmax
        return found


class Dirty(MutantBase):
    """Memory is not zeroed."""

    def alloc(self, nbytes: int, kind: str) -> Buffer:
        buffer = super().alloc(nbytes, kind)
        buffer.handle[:] = 7
        return buffer


class OffsetIgnored(MutantBase):
    """Downloads begin at the start of the buffer."""

    def download(self, dst: memoryview, src: Buffer, offset: int, stream: Stream) -> None:
        super().download(dst, src, offset if dst.nbytes > 64 else 0, stream)


class CopyOffset(MutantBase):
    """copy ignores the source's offset."""

    def copy(self, dst: Buffer, dst_offset: int, src: Buffer, src_offset: int, nbytes: int, stream: Stream) -> None:
        super().copy(dst, dst_offset, src, 0, nbytes, stream)


class StateNotCopied(MutantBase):
    """copy does not work inside of buffers of state."""

    def copy(self, dst: Buffer, dst_offset: int, src: Buffer, src_offset: int, nbytes: int, stream: Stream) -> None:
        if dst.kind != "state":
            super().copy(dst, dst_offset, src, src_offset, nbytes, stream)


class FreesTwice(MutantBase):
    """Closing a buffer twice gives its memory back twice."""

    def alloc(self, nbytes: int, kind: str) -> Buffer:
        backend = self
        buffer = super().alloc(nbytes, kind)

        class Twice(Buffer):
            def close(self) -> None:
                backend._used -= self.nbytes
                self.closed = True

        return Twice(nbytes, kind, buffer.handle)


class NeverFrees(MutantBase):
    """Closing a buffer gives nothing back."""

    def alloc(self, nbytes: int, kind: str) -> Buffer:
        return Buffer(nbytes, kind, super().alloc(nbytes, kind).handle)


class ClosedWorks(MutantBase):
    """A closed buffer can still be used."""

    def alloc(self, nbytes: int, kind: str) -> Buffer:
        class Open(Buffer):
            @property
            def handle(self) -> Any:
                return self._handle

            def close(self) -> None:
                if not self.closed:
                    self.closed = True
                    if self._release is not None:
                        self._release()

        inner = super().alloc(nbytes, kind)
        return Open(nbytes, kind, inner.handle, inner.close)


class BlindMemory(MutantBase):
    """memory() knows of nothing."""

    def memory(self) -> MemoryInfo:
        return MemoryInfo(0, 0, 0)


class WrongError(MutantBase):
    """Memory that is not there is a RuntimeError."""

    def alloc(self, nbytes: int, kind: str) -> Buffer:
        try:
            return super().alloc(nbytes, kind)
        except OutOfMemory as error:
            raise RuntimeError(str(error)) from None


class CloseOnce(MutantBase):
    """The second close raises."""

    closed = False

    def close(self) -> None:
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True


class Defaults(MutantBase):
    """A method that does not take what the interface gives."""

    def new_event(self, priority: int) -> Any:  # type: ignore[override]
        return None


class MissingWait(LateBase):
    """A download does not wait for the ops before it."""

    def download(self, dst: memoryview, src: Buffer, offset: int, stream: Stream) -> None:
        RefBackend.download(self, dst, src, offset, stream)


class StagingEarly(LateBase):
    """An upload still reads the host's memory after synchronize."""

    pending: list[Callable[[], None]]

    def upload(self, dst: Buffer, offset: int, src: memoryview, stream: Stream) -> None:
        waiting = getattr(self, "waiting", [])
        self.waiting = [*waiting, lambda: RefBackend.upload(self, dst, offset, src, stream)]

    def download(self, dst: memoryview, src: Buffer, offset: int, stream: Stream) -> None:
        waiting, self.waiting = getattr(self, "waiting", []), []
        for call in waiting:
            call()
        super().download(dst, src, offset, stream)


def _batch(backend: MutantBase, honest: Op) -> Op:
    """From 8 rows on, sums go in another order."""

    def call(x: Any, w: Any, bias: Any, *, out: Any, stream: Any, ws: Any) -> None:
        honest(x, w, bias, out=out, stream=stream, ws=ws)
        if x.shape[0] >= 8:
            rows, matrix = backend.array(x), backend.array(w)
            half = matrix.shape[1] // 3
            y = (rows[:, :half, None] * matrix.T[None, :half]).sum(1) + (rows[:, half:, None] * matrix.T[None, half:]).sum(1)
            backend.array(out)[...] = y if bias is None else y + backend.array(bias)

    return call


def _threads(backend: MutantBase, honest: Op) -> Op:
    """The sum is cut into as many parts as there are threads."""

    def call(x: Any, w: Any, bias: Any, *, out: Any, stream: Any, ws: Any) -> None:
        rows, matrix = backend.array(x), backend.array(w)
        parts = np.array_split(np.arange(matrix.shape[1]), int(backend.options.get("threads", "1")))
        y = np.zeros(out.shape, F32)
        for part in parts:
            y += np.stack([(matrix[:, part] * row[part]).sum(1) for row in rows]) if len(rows) else y
        backend.array(out)[...] = y if bias is None else y + backend.array(bias)

    return call


def _noise(salt: Callable[[], int]) -> Breaker:
    """The last bit of a result depends on a number."""

    def breaker(backend: MutantBase, honest: Op) -> Op:
        def call(*inputs: Any, out: Any, **more: Any) -> None:
            honest(*inputs, out=out, **more)
            result = backend.array(out)
            result[...] = (result.view(np.int32) ^ np.int32(salt() & 1)).view(F32)

        return call

    return breaker


_calls = iter(range(1 << 62))


def _dies(how: Callable[[], None]) -> Breaker:
    def breaker(backend: MutantBase, honest: Op) -> Op:
        def call(*inputs: Any, **more: Any) -> None:
            how()

        return call

    return breaker


def _crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _exit() -> None:
    os._exit(0)


def _hang() -> None:
    time.sleep(3600)


def _odd_process() -> int:
    return int("--digests" in sys.argv)  # the child of D1


def _swallows(backend: MutantBase, honest: Op) -> Op:
    def call(*inputs: Any, **more: Any) -> None:
        try:
            honest(*inputs, **more)
        except Exception:
            return

    return call


def mutants() -> Iterator[Mutant]:
    """All of this file."""
    plain: Callable[[Mapping[str, str]], Backend] = lambda options: MutantBase(None, options)  # noqa: E731
    late: Callable[[Mapping[str, str]], Backend] = lambda options: LateBase(None, options)  # noqa: E731
    kinds: Sequence[tuple[str, str, str, str, str, type[MutantBase]]] = (
        ("claims_all", "honesty", "Yes to everything", "any/*/invented_*#honest", "honest", ClaimsAll),
        ("claims_nothing", "honesty", "No to everything", "*/any/core#honest", "honest", ClaimsNothing),
        ("no_reason", "honesty", "a No without a reason", "any/*/invented_*#honest", "honest", NoReason),
        ("unknown_attributes", "honesty", "Yes to an attribute that it does not know", "any/*/invented_attribute#honest", "honest", UnknownAttributes),
        ("unknown_values", "honesty", "Yes to a mask that it does not know", "any/*/invented_mask#honest", "honest", UnknownValues),
        ("wrong_name", "honesty", "a Yes leads to nothing", "softmax/*/any/core#honest", "honest", WrongName),
        ("fickle", "honesty", "the same question gets another answer", "rope/*/any/core#honest", "honest", Fickle),
        ("hole_in_a_range", "honesty", "Yes for a range, No for a part of it", "linear/*/any/core#honest", "honest", Hole),
        ("asking_allocates", "honesty", "memory is allocated while it is asked", "any/*/pure#honest", "honest", Asks),
        ("unreachable", "honesty", "an implementation that no Yes leads to", "any/*/reachable#honest", "honest", Unreachable),
        ("holds_lie", "honesty", "ranges that are said to hold do not", "attention/*/holds#honest", "honest", HoldsLie),
        ("dirty_memory", "contract", "new memory is not zeroed", "backend/*/alloc#contract", "contract", Dirty),
        ("offset_ignored", "contract", "a download ignores its offset", "backend/*/alloc#contract", "contract", OffsetIgnored),
        ("copy_offset_ignored", "contract", "copy ignores the source's offset", "backend/*/copy#contract", "contract", CopyOffset),
        ("state_not_copied", "kv", "snapshots of recurrent state are not made", "model/qwen3_next-f32/*/snapshot#d2", "d2", StateNotCopied),
        ("frees_twice", "contract", "a second close frees again", "backend/*/alloc#contract", "leak", FreesTwice),
        ("never_frees", "contract", "close frees nothing", "backend/*/alloc#contract", "leak", NeverFrees),
        ("closed_buffer_works", "contract", "a closed buffer can be used", "backend/*/closed_buffer#contract", "error", ClosedWorks),
        ("blind_memory", "contract", "memory() counts nothing", "backend/*/memory#contract", "contract", BlindMemory),
        ("wrong_error", "contract", "missing memory is no OutOfMemory", "backend/*/out_of_memory#contract", "contract", WrongError),
        ("close_once", "contract", "a second close of the backend raises", "backend/*/closed_backend#contract", "error", CloseOnce),
        ("signature", "contract", "a method takes other arguments", "backend/*/signatures#contract", "contract", Defaults),
    )  # fmt: skip
    for name, family, what, cases, rule, kind in kinds:
        yield Mutant(f"backend.{name}", family, what, cases, rule, lambda options, k=kind: k(None, options), plain)  # type: ignore[misc]
    for name, what, cases, late_kind in (
        ("missing_wait", "a download does not wait for the ops before it", "backend/*/order#contract", MissingWait),
        ("staging_early", "an upload reads the host's memory after synchronize", "backend/*/staging#contract", StagingEarly),
    ):
        yield Mutant(f"stream.{name}", "order", what, cases, "contract", lambda options, k=late_kind: k(None, options), late)  # type: ignore[misc]
    yield Mutant("linear.swallows_errors", "contract", "operands that do not fit raise nothing", "backend/*/after_error#contract", "error", make("linear", _swallows), plain)
    yield Mutant("linear.split_by_batch", "order", "from 8 rows on, sums go in another order", "linear/*/linear/rows#d2", "d2", make("linear", _batch), plain)
    yield Mutant("linear.split_by_threads", "order", "sums are cut by the number of threads", "any/*/threads#d3", "d3", make("linear", _threads), plain)
    yield Mutant("linear.other_in_a_new_process", "order", "the last bit depends on the process", "any/*/process#d1", "d1", make("linear", _noise(_odd_process)), plain)
    yield Mutant("rms_norm.random", "order", "the last bit changes from call to call", "rms_norm/*/repeats#d0", "d0", make("rms_norm", _noise(lambda: next(_calls) % 3)), plain)
    for name, how, what in (("crashes", _crash, "SIGSEGV"), ("exits", _exit, "exit status 0 in the middle"), ("hangs", _hang, "never returns")):
        yield Mutant(f"softmax.{name}", "process", what, "softmax/f32/row/m3-n33/*#bound", "contract", make("softmax", _dies(how)), plain, "process")
    for name, what, cases, rule, breaker, op in (
        ("scale_off", "every linear layer × (1 + 2⁻⁸)", "model/llama-f32/*/logits#model", "model", post(lambda out, a, t: out.__imul__(F32(1 + 2**-8))), "linear"),
        ("f16_activations", "activations of linear layers rounded to f16", "model/llama-f32/*/logits#model", "model", changed(0, lambda x: x.astype(np.float16).astype(F32)), "linear"),
        ("window_ignored", "windows are not applied", "model/mistral-f16/*/logits#model", "model", pre(lambda b, i, a: a.update(window=0)), "attention"),
        ("softcap_ignored", "scores are not capped", "model/gemma2-bf16/*/logits#model", "model", pre(lambda b, i, a: a.update(softcap=0.0)), "attention"),
        ("split_by_batch", "from 8 rows on, sums go in another order", "model/llama-f32/*/chunks#d2", "d2", _batch, "linear"),
        ("neighbours_blocks", "sequence s reads the blocks of s − 1", "engine/*/streams#serve", "serve", changed(5, lambda t: np.roll(t, 1, axis=0)), "attention"),
    ):
        yield Mutant(f"model.{name}", "model", what, cases, rule, make(op, breaker), plain)
    yield Mutant("model.op_leaves", "model", "an op of every step is answered No", "model/llama-f32/*/fallbacks#model", "model", lambda options: NoRope(None, options), plain)
    yield Mutant("model.failed_load_leaks", "model", "memory of a failed load is not given back", "engine/*/failing_allocations#serve", "leak", lambda options: NeverFrees(None, options), plain)
    yield Mutant("softmax.downloads", "honesty", "an op that is called native downloads", "softmax/f32/row/m3-n33/*#bound", "", lambda options: Downloads(None, options), plain, "native")
    yield Mutant("backend.skips_everything", "honesty", "every question raises a skip", "*", "", lambda options: SkipsEverything(None, options), plain, "level")
