"""Weights between a file and a backend: where a tensor's bytes are, and what a graph input takes from them.

    file --formats/--> TensorSource --WeightRef.resolve--> HostTensor --Backend.pack_weight or decode--> device

Readers make `TensorSource`s (views of the mapped file, already bounds-checked). A model family says with a `WeightRef`
which source, rows and constant each graph input is made of. Everything here stays a view of the file as long as it can.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from . import scaled
from .errors import ModelFileError, UnsupportedError
from .quant import FORMATS, QuantFormat

__all__ = ["HostTensor", "PackedLayout", "TensorSource", "WeightRef", "stored_as", "with_matrices"]

_COLUMN: Final = re.compile(r":, (\d+) of (\d+)")


@dataclass(frozen=True)
class PackedLayout:
    """How a backend stores a weight: id and version (the cache key of packed files), shape and bytes."""

    id: str
    version: int
    format: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class TensorSource:
    """One tensor of a file. shape: outermost dimension first (row-major); data: its bytes as u8 [nbytes], a read-only view
    of the mapped file; format: a key of `quant.FORMATS`; file: path, for messages. packed: `data` is in this layout of a backend
    (an FLM file), a stack matrix after matrix; unpack: then gives the bytes of `format` of one matrix. read: gives bytes [start, start + n) of
    `data` from (start, n), copied with the file's descriptor: without pages that stay resident, and safe if the file is cut meanwhile."""

    name: str
    shape: tuple[int, ...]
    format: str
    data: np.ndarray
    file: str = ""
    packed: PackedLayout | None = None
    unpack: Callable[[np.ndarray, PackedLayout], np.ndarray] | None = None
    read: Callable[[int, int], np.ndarray] | None = field(default=None, compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(self.data.nbytes)

    def copied(self, part: np.ndarray) -> np.ndarray:
        """`part`, a view of `data` without gaps, as memory of our own where the file can be read; else as it is."""
        if self.read is None or not part.size:
            return part
        start = part.__array_interface__["data"][0] - self.data.__array_interface__["data"][0]
        return self.read(start, part.nbytes).reshape(part.shape)


@dataclass(frozen=True)
class HostTensor:
    """A weight ready to be packed: shape [N, K] or any rank, `format` says how `data` (u8, contiguous) encodes it."""

    name: str
    shape: tuple[int, ...]
    format: str
    data: np.ndarray

    @property
    def quant(self) -> QuantFormat:
        """The entry of the format table."""
        return FORMATS[self.format]

    def decode(self) -> np.ndarray:
        """All values as f32 of `shape` (the reference decoder of `core/_kernels`)."""
        from ._kernels import decode

        return decode(self.format, self.data, int(np.prod(self.shape, dtype=np.int64))).reshape(self.shape)


@dataclass(frozen=True)
class WeightRef:
    """What one graph weight is made of, applied in this order.

    source: name in the file. expert: index into axis 0 of a stacked 3-D tensor. rows: [start, stop) of axis 0, a view also
    for quantised formats. transpose: a matrix stored [in, out] (copies; block formats are decoded). row_index: a gather of axis 0
    (rows permuted or interleaved; copies). add: constant added in f32 (norms stored minus one). The result must have the shape that
    the graph declares.

    scales: name of the tensor with the scales of the codes in source, tile: how many rows and columns share one (`core/scaled.py`); they are
    joined after `rows` and before `transpose`.

    convert_to: a key of FORMATS that the result is converted to, by `method` ("search" or "minmax") for group formats.

    column: (index, of how many) of the columns of the matrix that all of this gives; a vector in f32.

    parts: the weight is a stack of these instead, one for each index of axis 0 (experts that are tensors of their own, heads that
    are rows of one tensor); source is "" then.
    """

    source: str
    expert: int | None = None
    rows: tuple[int, int] | None = None
    transpose: bool = False
    row_index: tuple[int, ...] | None = None
    add: float = 0.0
    convert_to: str | None = None
    method: str = "search"
    parts: tuple[WeightRef, ...] = ()
    scales: str = ""
    tile: tuple[int, int] = (1, 32)
    column: tuple[int, int] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors that it takes from the file."""
        own = tuple(name for part in self.parts or (self,) for name in (part.source, part.scales) if name)
        return own or (self.source,)

    def matrix(self, index: int) -> WeightRef:
        """One of the matrices of a stack, by itself."""
        return replace(self.parts[index], convert_to=self.convert_to, method=self.method) if self.parts else replace(self, expert=index)

    def part(self, which: str) -> WeightRef | None:
        """What stands between the brackets of a part's name: "3", a matrix of a stack (`GraphBuilder.matrix`), or ":, 3 of 4", a column of a
        matrix (`GraphBuilder.column`); None for anything else."""
        column = _COLUMN.fullmatch(which)
        if column is not None:
            return replace(self, column=(int(column[1]), int(column[2])))
        return self.matrix(int(which)) if which.isdecimal() else None

    def split(self, count: int) -> tuple[WeightRef, ...]:
        """The `count` matrices of a stack, each by itself: what a loader that must not hold the whole stack asks for."""
        return tuple(self.matrix(i) for i in range(len(self.parts) or count))

    def block(self, start: int, stop: int) -> WeightRef:
        """Rows [start, stop) of this matrix."""
        if self.row_index is not None:
            return replace(self, row_index=self.row_index[start:stop])
        if self.transpose:
            return replace(self, row_index=tuple(range(start, stop)))
        first = 0 if self.rows is None else self.rows[0]
        return replace(self, rows=(first + start, first + stop))

    def renamed(self, rename: Callable[[str], str]) -> WeightRef:
        """The same of other tensors."""
        parts = tuple(p.renamed(rename) for p in self.parts)
        return replace(self, source=rename(self.source) if self.source else "", scales=rename(self.scales) if self.scales else "", parts=parts)

    def format(self, sources: Mapping[str, TensorSource]) -> str:
        """The format of what `resolve` gives; "f32" if a tensor is missing (resolve explains it) or parts differ."""
        if self.column is not None:
            return "f32"
        if self.convert_to is not None:
            return self.convert_to
        if self.parts:
            formats = {part.format(sources) for part in self.parts}
            return formats.pop() if len(formats) == 1 else "f32"
        source = sources.get(self.source)
        if source is None or self.add or (self.transpose and not FORMATS[source.format].plain):
            return "f32"
        if self.scales:
            return "f32" if self.transpose else scaled.merged_format(source.format, source.shape[-1], self.tile)
        return source.format

    def resolve(self, sources: Mapping[str, TensorSource], name: str, shape: tuple[int, ...]) -> HostTensor:
        """The tensor for graph weight `name` of `shape`. Raises ModelFileError if it is missing or has another shape."""
        if self.column is not None:
            index, count = self.column
            values = replace(self, column=None).resolve(sources, name, (*shape, count)).decode()[:, index]
            return HostTensor(name, tuple(shape), "f32", np.ascontiguousarray(values).view(np.uint8))
        if self.convert_to is not None:
            from .quantise import convert

            before = replace(self, convert_to=None).resolve(sources, name, shape)
            return convert(before, self.convert_to, search=self.method == "search")
        if self.parts:
            return self._stack(sources, name, shape)
        if self.source not in sources:
            close = [s for s in sources if s.rsplit(".", 1)[0] == self.source.rsplit(".", 1)[0]][:3]
            raise ModelFileError(
                f"tensor '{self.source}' is missing from the model file",
                why=f"graph weight '{name}' needs it" + (f"; the file has {', '.join(close)}" if close else ""),
                fix="download the model again, or convert it with a current converter",
            )
        src = sources[self.source]
        dims, format, data = src.shape, src.format, src.data
        if self.expert is not None:
            if len(dims) < 2 or not 0 <= self.expert < dims[0]:
                raise ModelFileError(f"tensor '{src.name}' of shape {list(dims)} has no expert {self.expert}", who=src.file)
            dims, data = dims[1:], data.reshape(dims[0], -1)[self.expert]
        if self.scales:
            self.check_scales(sources)
        if src.packed is not None:
            data = _unpacked(src, src.copied(data), 1 if self.expert is not None else int(np.prod(src.shape[:-2], dtype=np.int64)))
        if self.rows is not None:
            dims, data = self._take_rows(src, dims, data)
        if src.packed is None:
            data = src.copied(data)
        if self.scales:
            dims, format, data = self._with_scales(sources, src, dims, data)
        if self.transpose:
            dims, format, data = _transposed(src, dims, format, data)
        if self.row_index is not None:
            dims, data = self._gather_rows(src, dims, format, data)
        if not _fits(dims, shape):
            raise ModelFileError(
                f"tensor '{src.name}' gives shape {list(dims)}, but the model's configuration asks for {list(shape)}",
                who=src.file,
                fix="the configuration and the weights do not belong together; download the model again",
            )
        tensor = HostTensor(name, tuple(shape), format, np.ascontiguousarray(data).reshape(-1))
        if self.add:
            values = tensor.decode() + np.float32(self.add)
            tensor = HostTensor(name, tuple(shape), "f32", values.reshape(-1).view(np.uint8))
        return tensor

    def shape_in(self, src: TensorSource, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape of what it takes from a tensor for a weight of `shape`, from shapes alone; None if that tensor has not enough."""
        dims = src.shape
        if self.expert is not None:
            if len(dims) < 2 or not 0 <= self.expert < dims[0]:
                return None
            dims = dims[1:]
        if self.rows is not None:
            if not dims or not 0 <= self.rows[0] < self.rows[1] <= dims[0]:
                return None
            dims = (self.rows[1] - self.rows[0], *dims[1:])
        if self.scales:
            dims = scaled.merged_shape(src.format, dims)
        if self.transpose:
            if len(dims) != 2:
                return None
            dims = dims[::-1]
        if self.row_index is not None:
            if not dims or max(self.row_index) >= dims[0]:
                return None
            dims = (len(self.row_index), *dims[1:])
        return shape if _fits(dims, shape) else dims

    def check_scales(self, sources: Mapping[str, TensorSource]) -> None:
        """Raises ModelFileError if the scales of the codes in source are missing or have another shape than those codes need."""
        src, tensor = sources[self.source], sources.get(self.scales)
        if tensor is None:
            raise ModelFileError(f"tensor '{self.scales}' is missing from the model file", why=f"it has the scales of '{self.source}'", who=src.file)
        dims, found = src.shape, tensor.shape
        if self.expert is not None:
            if len(found) < 2 or len(dims) < 2 or found[0] != dims[0]:
                raise ModelFileError(f"tensor '{tensor.name}' of shape {list(found)} does not have the experts of {list(dims)}", who=src.file)
            dims, found = dims[1:], found[1:]
        scaled.check_scales(src.name, src.file, src.format, dims, tensor.format, found, self.tile)

    def _with_scales(
        self, sources: Mapping[str, TensorSource], src: TensorSource, dims: tuple[int, ...], data: np.ndarray
    ) -> tuple[tuple[int, ...], str, np.ndarray]:
        """(shape, format, bytes) of the codes that were taken, with their scales, of which no others are read."""
        tensor = sources[self.scales]
        shape, part = tensor.shape, tensor.data
        if self.expert is not None:
            shape, part = shape[1:], part.reshape(shape[0], -1)[self.expert]
        height = 1 if src.format == "u8" else self.tile[0]
        start = 0 if self.rows is None else self.rows[0]
        first, last = start // height, -(-(start + dims[0]) // height)
        raw = tensor.copied(_as_rows(shape, tensor.format, part)[first:last]).reshape(-1)
        shape = (last - first, *shape[1:])
        scales = raw.reshape(shape) if src.format == "u8" else HostTensor(tensor.name, shape, tensor.format, raw).decode()
        return scaled.merged(src.format, dims, data, scales, start - first * height, self.tile)

    def _stack(self, sources: Mapping[str, TensorSource], name: str, shape: tuple[int, ...]) -> HostTensor:
        """All parts in memory at once."""
        if len(shape) < 2 or shape[0] != len(self.parts):
            raise ModelFileError(f"graph weight '{name}' is a stack of {len(self.parts)}, but the configuration asks for {list(shape)}")
        format = self.format(sources)
        tensors = [part.resolve(sources, name, tuple(shape[1:])) for part in self.parts]
        pieces = [t.data if t.format == format else t.decode().reshape(-1).view(np.uint8) for t in tensors]
        return HostTensor(name, tuple(shape), format, np.concatenate(pieces))

    def _take_rows(self, src: TensorSource, dims: tuple[int, ...], data: np.ndarray) -> tuple[tuple[int, ...], np.ndarray]:
        assert self.rows is not None
        start, stop = self.rows
        if not 0 <= start < stop <= dims[0]:
            raise ModelFileError(f"tensor '{src.name}' has {dims[0]} rows, but rows {start}…{stop} are needed", who=src.file)
        return (stop - start, *dims[1:]), _as_rows(dims, src.format, data)[start:stop]

    def _gather_rows(
        self, src: TensorSource, dims: tuple[int, ...], format: str, data: np.ndarray
    ) -> tuple[tuple[int, ...], np.ndarray]:
        assert self.row_index is not None
        if max(self.row_index) >= dims[0]:
            raise ModelFileError(f"tensor '{src.name}' has {dims[0]} rows, but row {max(self.row_index)} is needed", who=src.file)
        return (len(self.row_index), *dims[1:]), _as_rows(dims, format, data)[np.asarray(self.row_index)]


def _fits(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """The shape in the file is the wanted one, or a vector for a matrix of one row, or the kernel [C, L] of a convolution of each channel
    as [C, 1, L] or the other way round."""
    found, wanted = tuple(found), tuple(wanted)
    if found == wanted or (len(found) == 1 and wanted == (1, *found)):
        return True
    flat, deep = sorted((found, wanted), key=len)
    return len(flat) == 2 and deep == (flat[0], 1, flat[1])


def _as_rows(dims: tuple[int, ...], format: str, data: np.ndarray) -> np.ndarray:
    """Bytes [rows, bytes of a row] of a tensor. Raises ModelFileError if a row is not whole blocks of its format."""
    row = int(np.prod(dims[1:], dtype=np.int64))
    if row % FORMATS[format].block:
        raise ModelFileError(f"rows of {row} values cannot be taken from a tensor of shape {list(dims)} in {format}")
    return data.reshape(dims[0], FORMATS[format].nbytes(row))


def _transposed(src: TensorSource, dims: tuple[int, ...], format: str, data: np.ndarray) -> tuple[tuple[int, ...], str, np.ndarray]:
    """(shape, format, bytes) of a matrix turned round."""
    if len(dims) != 2:
        raise ModelFileError(f"tensor '{src.name}' of shape {list(dims)} is no stack of matrices that could be transposed", who=src.file)
    if FORMATS[format].plain:
        size = FORMATS[format].block_bytes
        items = np.ascontiguousarray(data).reshape(-1).view(np.dtype((np.void, size))).reshape(dims)
        return dims[::-1], format, np.ascontiguousarray(items.T).reshape(-1).view(np.uint8)
    values = HostTensor(src.name, dims, format, np.ascontiguousarray(data).reshape(-1)).decode()
    return dims[::-1], "f32", np.ascontiguousarray(values.T).reshape(-1).view(np.uint8)


def stored_as(ref: WeightRef, sources: Mapping[str, TensorSource], layout: PackedLayout | None) -> TensorSource | None:
    """The tensor of the file that holds this weight whole and in this packed layout; None if there is no such."""
    source = sources.get(ref.source)
    return source if source is not None and layout is not None and source.packed == layout and ref == WeightRef(source.name) else None


def with_matrices(weights: Mapping[str, WeightRef], names: Iterable[str]) -> Mapping[str, WeightRef]:
    """`weights`, and what those of `names` take that are parts of others: "stack[3]", "matrix[:, 3 of 4]"."""
    found = {}
    for name in names:
        whole, _, which = name.rpartition("[")
        if name not in weights and whole in weights and (part := weights[whole].part(which[:-1])) is not None:
            found[name] = part
    return {**weights, **found} if found else weights


def _unpacked(src: TensorSource, data: np.ndarray, count: int) -> np.ndarray:
    """Bytes in the tensor's format of `count` matrices that it holds in a packed layout."""
    assert src.packed is not None
    if src.unpack is None:
        raise UnsupportedError(
            f"tensor '{src.name}' is packed as {src.packed.id} version {src.packed.version}, which nothing here can undo",
            who=src.file,
            fix="convert the original model again with this version of fastllm",
        )
    matrices = data.reshape(count, -1)[:, : src.packed.nbytes]  # each begins aligned
    return np.concatenate([src.unpack(matrix, src.packed).reshape(-1) for matrix in matrices])
