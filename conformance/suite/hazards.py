"""One buffer that is filled again while what reads it waits in the stream: uploads and copies come after the ops before them, not only before those behind.

A backend that uploads at once, and enqueues its ops, gives an op the numbers of the upload behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from fastllm.api import No, Tensor

from ..case import Case, Failure, NotApplicable, Outcome
from ..numbers import Numbers
from ..operands import In
from ..session import Session
from .common import same_bits

__all__ = ["cases"]

SHAPE = (7, 33)


def _filled_again(session: Session, numbers: Numbers) -> Outcome:
    """upload, add, copy, upload, add, copy into other places, and one wait at the end."""
    bench, backend, stream = session.bench, session.backend, session.bench.stream
    arrays = [np.ascontiguousarray(numbers.normal(*SHAPE)) for _ in range(2)]
    answer, _ = bench.ask("add", [In(arrays[0], "f32", "T"), In(arrays[0], "f32", "T")], {}, {})
    if isinstance(answer, No):
        raise NotApplicable(f"{backend.name} answers No: {answer.reason}")
    nbytes, found = arrays[0].nbytes, [np.empty(SHAPE, np.float32) for _ in range(4)]
    with ExitStack() as stack:

        def place(size: int) -> Tensor:
            region = bench.region(np.full(size, 0xFF, np.uint8), "scratch")
            stack.callback(region.buffer.close)
            return Tensor(region.buffer, region.base, SHAPE, "f32")

        source, *places = (place(nbytes) for _ in range(5))
        workspace = replace(place(answer.workspace), shape=(answer.workspace,), dtype="i8") if answer.workspace else None
        stream.synchronize()
        for turn, array in enumerate(arrays):
            sums, copied = places[2 * turn : 2 * turn + 2]
            backend.upload(source.buffer, source.offset, memoryview(array.reshape(-1).view(np.uint8)), stream)
            bench.functions[answer.impl](source, source, out=sums, stream=stream, ws=workspace)
            backend.copy(copied.buffer, copied.offset, source.buffer, source.offset, nbytes, stream)
        for tensor, target in zip(places, found, strict=True):
            backend.download(memoryview(target.reshape(-1).view(np.uint8)), tensor.buffer, tensor.offset, stream)
        stream.synchronize()
    for turn, array in enumerate(arrays):
        for what, right, got in (("an op reads", array + array, found[2 * turn]), ("a copy takes", array, found[2 * turn + 1])):
            if not same_bits(np.asarray(right, np.float32), got):
                raise Failure("contract", f"{what} other numbers than those of the upload before it, number {turn + 1} of 2 to one buffer: uploads, ops and copies of a stream are not in order")
    return Outcome(impl=answer.impl)


def cases() -> Iterator[Case]:
    """One."""
    yield Case("backend/-/-/any/filled_again#contract", "backend", "contract", _filled_again, required=True, quick=True)
