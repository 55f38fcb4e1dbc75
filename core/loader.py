"""Loader: fills a plan's weight arenas, tensor by tensor, from the mapped file.

Sizes are known from the plan, so memory is allocated first and each tensor goes straight to its place: packed by the backend,
decoded to a plain form, or uploaded as it is. Only one tensor is read and decoded at a time, the largest first, and large ones are
decoded by blocks of rows, so that the peak stays near the packed size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from . import _kernels
from .backend import Backend, Buffer, Stream
from .errors import EngineError, ModelFileError
from .planner import Place, Plan
from .quant import FORMATS
from .weights import HostTensor, PackedLayout, TensorSource, WeightRef, stored_as

__all__ = ["load_weights"]

COPY_BYTES = 8 << 20
"""Bytes of a packed tensor that are copied at a time."""
DECODE_BYTES = 8 << 20
"""Bytes of f32 that are decoded at a time."""
PACK_BYTES = 2 << 20
"""Bytes of the source that are packed at a time."""

Progress = Callable[[int, int, str], None]
"""(bytes done, bytes in all, tensor name)."""


def load_weights(
    plan: Plan,
    weights: Mapping[str, WeightRef],
    sources: Mapping[str, TensorSource],
    backends: Mapping[str, Backend],
    arenas: Mapping[tuple[str, str, int], Buffer],
    streams: Mapping[str, Stream],
    progress: Progress | None = None,
) -> None:
    """Loads every weight of the plan into the arenas: (device, arena, chunk) -> buffer. weights: the matrices of stacks that the plan names
    among them (`with_matrices`). Raises ModelFileError for a missing, misshapen or undecodable tensor."""
    wanted = [(device, name, place) for (device, name), place in plan.places.items() if place.arena == "weights"]
    wanted.sort(key=lambda entry: -entry[2].nbytes)  # the copy of a large tensor while little else is there yet: the peak stays low
    total, done = sum(place.nbytes for _, _, place in wanted), 0
    for device, name, place in wanted:
        if name not in weights:
            raise ModelFileError(f"the model's family names no source for the graph weight '{name}'")
        arena = arenas[(device, "weights", place.chunk)]
        packed = stored_as(weights[name], sources, place.layout)
        if packed is not None and packed.nbytes == place.nbytes:
            for start in range(0, packed.nbytes, COPY_BYTES):
                block = packed.copied(packed.data[start : start + COPY_BYTES])
                backends[device].upload(arena, place.offset + start, memoryview(block), streams[device])
                streams[device].synchronize()
        else:
            _load(weights[name], name, place, sources, backends[device], arena, streams[device])
        done += place.nbytes
        if progress is not None:
            progress(done, total, name)
    _kernels.trim()  # the last copies of what was read


def _load(
    whole: WeightRef, name: str, place: Place, sources: Mapping[str, TensorSource], backend: Backend, arena: Buffer, stream: Stream
) -> None:
    """One weight, packed or in a plain form; of a stack, matrix by matrix: a stack of experts need not fit in memory twice."""
    stacked = len(place.shape) > 2
    refs = whole.split(place.shape[0]) if stacked else (whole,)
    step = place.nbytes // len(refs)
    for index, ref in enumerate(refs):
        shape, offset = place.shape[1:] if stacked else place.shape, place.offset + index * step
        if place.layout is not None:
            for part, layout in _blocks(ref, place.layout, sources, backend):
                tensor = part.resolve(sources, name, layout.shape)
                backend.pack_weight(_in_format(tensor, layout.format), layout, arena, offset)
                offset += layout.nbytes
        else:
            _upload_plain(ref.resolve(sources, name, shape), place.dtype, backend, arena, offset, stream)


def _blocks(
    ref: WeightRef, layout: PackedLayout, sources: Mapping[str, TensorSource], backend: Backend
) -> Iterator[tuple[WeightRef, PackedLayout]]:
    """A matrix to pack, in blocks of rows where the backend takes them: neither the copy of a table of words nor what is left of the caches
    is larger than it must be. What lies one after another is then what the whole would be."""
    rows, width = layout.shape
    unit, source = backend.pack_rows, sources.get(ref.source)
    whole = unit == 0 or bool(ref.add) or bool(ref.parts) or ref.transpose or source is None or source.packed is not None
    step = rows if whole else max(unit, PACK_BYTES // FORMATS[ref.format(sources)].nbytes(width) // unit * unit)
    if step >= rows:
        yield ref, layout
        return
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        part = backend.pack_layout((stop - start, width), layout.format, frozenset({"linear"}))
        if part is None or part.id != layout.id:
            raise EngineError(f"backend '{backend.name}' packs {layout.id} in blocks of {unit} rows, but has no layout for {stop - start}", fix="report this")
        yield ref.block(start, stop), part


def _in_format(tensor: HostTensor, format: str) -> HostTensor:
    """The tensor as a packed layout takes it: the planner may have chosen a plain form of a format that the backend does not pack."""
    if tensor.format == format:
        return tensor
    values = tensor.decode().reshape(-1)
    data = values if format == "f32" else _kernels.encode(format, values)
    return HostTensor(tensor.name, tensor.shape, format, np.ascontiguousarray(data).reshape(-1).view(np.uint8))


def _upload_plain(tensor: HostTensor, dtype: str, backend: Backend, arena: Buffer, offset: int, stream: Stream) -> None:
    """A weight in a plain form: as it is if the file has that form, else decoded by blocks of rows."""
    if tensor.format == dtype:
        backend.upload(arena, offset, memoryview(np.ascontiguousarray(tensor.data)), stream)
        stream.synchronize()  # gathered rows are gone after this
        return
    rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    row = int(np.prod(tensor.shape, dtype=np.int64)) // max(rows, 1)
    row_bytes = tensor.quant.nbytes(row)
    step = max(1, DECODE_BYTES // (4 * max(row, 1)))
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        values = _kernels.decode(tensor.format, tensor.data[start * row_bytes : stop * row_bytes], (stop - start) * row)
        block = values if dtype == "f32" else _kernels.encode(dtype, values)
        raw = np.ascontiguousarray(block).view(np.uint8)
        backend.upload(arena, offset, memoryview(raw), stream)
        stream.synchronize()  # so is a decoded block
        offset += raw.nbytes
