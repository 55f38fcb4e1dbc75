"""Weights between a file and a backend: where a tensor's bytes are, and what a graph input takes from them.

    file --formats/--> TensorSource --WeightRef.resolve--> HostTensor --Backend.pack_weight or decode--> device

Readers make `TensorSource`s (views of the mapped file, already bounds-checked). A model family says with a `WeightRef`
which source, rows and constant each graph input is made of. Everything here stays a view of the file as long as it can.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .errors import ModelFileError
from .quant import FORMATS, QuantFormat

__all__ = ["HostTensor", "TensorSource", "WeightRef"]


@dataclass(frozen=True)
class TensorSource:
    """One tensor of a file. shape: outermost dimension first (row-major); data: its bytes as u8 [nbytes], a read-only view
    of the mapped file; format: a key of `quant.FORMATS`; file: path, for messages."""

    name: str
    shape: tuple[int, ...]
    format: str
    data: np.ndarray
    file: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(self.data.nbytes)


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
    for quantised formats. row_index: a gather of axis 0 (rows permuted or interleaved; copies). add: constant added in f32
    (norms stored minus one). The result must have the shape that the graph declares.
    """

    source: str
    expert: int | None = None
    rows: tuple[int, int] | None = None
    row_index: tuple[int, ...] | None = None
    add: float = 0.0

    def resolve(self, sources: Mapping[str, TensorSource], name: str, shape: tuple[int, ...]) -> HostTensor:
        """The tensor for graph weight `name` of `shape`. Raises ModelFileError if it is missing or has another shape."""
        if self.source not in sources:
            close = [s for s in sources if s.rsplit(".", 1)[0] == self.source.rsplit(".", 1)[0]][:3]
            raise ModelFileError(
                f"tensor '{self.source}' is missing from the model file",
                why=f"graph weight '{name}' needs it" + (f"; the file has {', '.join(close)}" if close else ""),
                fix="download the model again, or convert it with a current converter",
            )
        src = sources[self.source]
        dims, data = src.shape, src.data
        if self.expert is not None:
            if len(dims) < 2 or not 0 <= self.expert < dims[0]:
                raise ModelFileError(f"tensor '{src.name}' of shape {list(dims)} has no expert {self.expert}", who=src.file)
            dims, data = dims[1:], data.reshape(dims[0], -1)[self.expert]
        if self.rows is not None or self.row_index is not None:
            dims, data = self._take_rows(src, dims, data)
        if tuple(dims) != tuple(shape):
            raise ModelFileError(
                f"tensor '{src.name}' gives shape {list(dims)}, but the model's configuration asks for {list(shape)}",
                who=src.file,
                fix="the configuration and the weights do not belong together; download the model again",
            )
        tensor = HostTensor(name, tuple(shape), src.format, np.ascontiguousarray(data).reshape(-1))
        if self.add:
            values = tensor.decode() + np.float32(self.add)
            tensor = HostTensor(name, tuple(shape), "f32", values.reshape(-1).view(np.uint8))
        return tensor

    def _take_rows(self, src: TensorSource, dims: tuple[int, ...], data: np.ndarray) -> tuple[tuple[int, ...], np.ndarray]:
        row_bytes = FORMATS[src.format].nbytes(int(np.prod(dims[1:], dtype=np.int64)))
        table = data.reshape(dims[0], row_bytes)
        if self.rows is not None:
            start, stop = self.rows
            if not 0 <= start < stop <= dims[0]:
                raise ModelFileError(f"tensor '{src.name}' has {dims[0]} rows, but rows {start}…{stop} are needed", who=src.file)
            table, dims = table[start:stop], (stop - start, *dims[1:])
        if self.row_index is not None:
            if max(self.row_index) >= table.shape[0]:
                raise ModelFileError(
                    f"tensor '{src.name}' has {table.shape[0]} rows, but row {max(self.row_index)} is needed", who=src.file
                )
            table, dims = table[np.asarray(self.row_index)], (len(self.row_index), *dims[1:])
        return dims, table
