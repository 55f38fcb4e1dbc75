"""safetensors: u64 header length, a JSON header, raw tensors; and the index that spreads a model over shards.

Parsed here, through `reader.py`, because the library reads whole tensors into arrays of dtypes numpy lacks, while we need
views of the map, our own messages with byte offsets, and the same limits as everywhere. It accepts what the library accepts
except duplicate keys; tests compare the two.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..core.errors import ModelFileError, UnsupportedError
from ..core.weights import TensorSource
from .gguf import TensorInfo
from .json_text import parse_json, read_json
from .reader import Cursor, MappedFile, shown

__all__ = ["SafetensorsFile", "file_in_folder", "read_safetensors", "read_sharded"]

MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 262_144
MAX_RANK = 16

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F4": 4,
    "F6_E2M3": 6, "F6_E3M2": 6, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""dtype -> bits per value, every dtype of the format."""

FORMAT_OF = {"F64": "f64", "F32": "f32", "F16": "f16", "BF16": "bf16", "I64": "i64", "I32": "i32", "I16": "i16", "I8": "i8", "U8": "u8", "F8_E4M3": "f8_e4m3"}
"""dtype -> key of `core.quant.FORMATS`, for the dtypes that can be read today."""


@dataclass
class SafetensorsFile:
    """One open file, or the shards of one model. metadata: the `__metadata__` of the (first) file; tensors: empty if only the
    header was asked for."""

    path: str
    metadata: dict[str, str]
    infos: tuple[TensorInfo, ...]
    tensors: dict[str, TensorSource]
    files: list[MappedFile] = field(default_factory=list, repr=False)

    def check_unchanged(self) -> None:
        """Raises ModelFileError if one of the mapped files changed since it was opened."""
        for file in self.files:
            file.check_unchanged()

    def close(self) -> None:
        """Releases the maps. Views that are still in use keep theirs."""
        self.tensors = {}
        for file in self.files:
            file.close()


def read_safetensors(path: str | os.PathLike[str], *, header_only: bool = False) -> SafetensorsFile:
    """Opens one file: sizes, shapes and offsets agree and cover the data without gap or overlap; no tensor byte is read.

    Raises ModelFileError for a damaged file, UnsupportedError (not with header_only) for dtypes that cannot be read.
    """
    file = MappedFile(path)
    try:
        metadata, infos = _header(file)
        return SafetensorsFile(file.path, metadata, infos, {} if header_only else _sources(file, infos), [file])
    except BaseException:
        file.close()
        raise


def read_sharded(
    folder: Path, index_name: str = "model.safetensors.index.json", *, header_only: bool = False
) -> SafetensorsFile:
    """Opens every shard that the index names; the index and the shards must list the same tensors, each once.

    Raises ModelFileError naming all missing shards at once, shards nobody refers to, and names that leave the folder.
    """
    path = file_in_folder(folder, index_name)
    index = read_json(path, MAX_HEADER_BYTES)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise ModelFileError(
            f"{index_name}: 'weight_map' must be an object of tensor name to file name",
            who=str(path),
            fix="download the index again",
            key="weight_map",
        )
    shards = sorted(set(weight_map.values()))
    paths = {name: file_in_folder(folder, name, key="weight_map", missing_ok=True) for name in shards}
    missing = [name for name in shards if not os.path.lexists(folder / name)]
    if missing:
        listed = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise ModelFileError(
            f"{len(missing)} of {len(shards)} shards named by {index_name} are missing: {listed}",
            who=str(folder),
            fix="download the missing files into that folder",
        )
    extra = sorted(p.name for p in folder.glob("*.safetensors") if p.name not in paths)
    if extra:
        raise ModelFileError(
            f"{index_name} does not refer to {', '.join(extra[:8])}",
            who=str(folder),
            why="the folder mixes two models, or the index is old",
            fix="remove the files that do not belong to the model, or download its index again",
        )
    parts: list[SafetensorsFile] = []
    try:
        for name in shards:
            parts.append(read_safetensors(paths[name], header_only=header_only))
        _check_against_index(parts, shards, weight_map, path)
    except BaseException:
        for part in parts:
            part.close()
        raise
    return SafetensorsFile(
        str(folder),
        parts[0].metadata,
        tuple(info for part in parts for info in part.infos),
        {name: source for part in parts for name, source in part.tensors.items()},
        [file for part in parts for file in part.files],
    )


def file_in_folder(folder: Path, name: str, *, key: str = "", missing_ok: bool = False) -> Path:
    """`folder / name`, refused if it leaves the folder by `..`, an absolute path or a symlink.

    The one exception are the hub cache's own links: folder `…/snapshots/REVISION` may point into `…/blobs`.
    """
    pieces = name.replace("\\", "/").split("/")
    if not name or "\0" in name or pieces[0] == "" or ".." in pieces or ":" in pieces[0]:
        raise ModelFileError(
            f"the file name {shown(name)} leaves the model's folder",
            who=str(folder),
            fix="use plain file names",
            key=key or name,
        )
    path = folder / name
    try:
        target, root = path.resolve(strict=not missing_ok), folder.resolve()
    except FileNotFoundError:
        raise ModelFileError(f"{name}: there is no such file", who=str(path), fix="download it into that folder") from None
    except (OSError, RuntimeError) as exc:
        raise ModelFileError(
            f"{name}: this is a loop of symlinks or cannot be read ({exc})", who=str(path), fix="check it"
        ) from None
    roots = [root, *([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])]
    if not any(target.is_relative_to(r) for r in roots):
        raise ModelFileError(
            f"{name} is a symlink out of the model's folder",
            who=str(path),
            why=f"it points to {target}",
            fix="put the file itself there",
        )
    return path


# Header ----------------------------------------------------------------------------------------------------------------


def _header(file: MappedFile) -> tuple[dict[str, str], tuple[TensorInfo, ...]]:
    cur = Cursor(file)
    if file.size < 8:
        raise file.wrong_magic("a safetensors file (8 bytes of header length)")
    length = cur.u64("the header length")
    if file.size > 8 and bytes(file.data[8:9]) != b"{":
        raise file.wrong_magic("a safetensors file")
    if length > MAX_HEADER_BYTES:
        raise file.error(f"the header length is {length}; the limit is {MAX_HEADER_BYTES}", offset=0, limit=MAX_HEADER_BYTES)
    if length > cur.left:
        raise file.error(f"the header length is {length}, but only {cur.left} bytes follow", offset=0, limit=file.size)
    header = parse_json(cur.bytes(length, "the header"), f"{os.path.basename(file.path)}: the header", file.path, base=8)
    if not isinstance(header, dict):
        raise file.error("the header is no JSON object", offset=8)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise file.error("__metadata__ must be an object of strings", offset=8, key="__metadata__")
    if len(header) > MAX_TENSORS:
        raise file.error(f"the header lists {len(header)} tensors; the limit is {MAX_TENSORS}", offset=8, limit=MAX_TENSORS)
    rows = sorted((_row(file, name, entry) for name, entry in header.items()), key=lambda r: (r[3], r[4]))
    return metadata, _cover(file, rows, cur.pos)


_Row = tuple[str, str, tuple[int, ...], int, int]  # name, dtype, shape, begin, end


def _row(file: MappedFile, name: str, entry: Any) -> _Row:
    where = f"tensor {shown(name)}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise file.error(f"{where} must have exactly dtype, shape and data_offsets", offset=8, key=name)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise file.error(f"{where} has a dtype that is no string", offset=8, key=name)
    if not _naturals(shape) or len(shape) > MAX_RANK:
        raise file.error(
            f"{where} has the shape {shown(shape)}; up to {MAX_RANK} numbers from 0 are allowed", offset=8, key=name
        )
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise file.error(f"{where} has the data_offsets {shown(offsets)}; [begin, end] is expected", offset=8, key=name)
    begin, end = offsets
    if dtype not in BITS:
        if dtype == "fastllm":
            raise UnsupportedError(
                f"{where} has the dtype 'fastllm' of another program's export", who=file.path, fix="use the original checkpoint"
            )
        raise UnsupportedError(
            f"{where} has the unknown dtype {shown(dtype)}",
            who=file.path,
            why="known are " + ", ".join(BITS),
            fix="update fastllm",
        )
    bits = BITS[dtype]
    for dim in shape:
        bits *= dim
    if bits % 8 or bits // 8 != end - begin:
        raise file.error(
            f"{where} {shape} {dtype} takes {-(-bits // 8)} bytes, but its data_offsets hold {end - begin}", offset=8, key=name
        )
    return name, dtype, tuple(shape), begin, end


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _cover(file: MappedFile, rows: list[_Row], start: int) -> tuple[TensorInfo, ...]:
    at, before, size = 0, "the header", file.size - start
    infos = []
    for name, dtype, shape, begin, end in rows:
        if begin != at:
            kind = "overlaps" if begin < at else "leaves a gap after"
            raise file.error(
                f"tensor {shown(name)} at data offset {begin} {kind} {before}, which ends at {at}", offset=8, key=name
            )
        if end > size:
            raise file.error(
                f"tensor {shown(name)} ends at data offset {end}, but the file has {size} bytes of data",
                why="the file is cut, or its header is wrong",
                offset=8,
                limit=size,
                key=name,
            )
        infos.append(TensorInfo(name, shape, dtype, start + begin, end - begin, file.path))
        at, before = end, f"tensor {shown(name)}"
    if at != size:
        raise file.error(f"{size - at} bytes follow the last tensor", offset=start + at, fix="download the file again")
    return tuple(infos)


def _sources(file: MappedFile, infos: tuple[TensorInfo, ...]) -> dict[str, TensorSource]:
    missing = Counter(info.dtype for info in infos if info.dtype not in FORMAT_OF)
    if missing:
        listed = ", ".join(f"{count} of dtype {dtype}" for dtype, count in sorted(missing.items()))
        raise UnsupportedError(
            f"{os.path.basename(file.path)} has tensors that cannot be read yet: {listed}",
            who=file.path,
            why="read are " + ", ".join(FORMAT_OF),
            fix="use the unquantised checkpoint, or a GGUF file of this model",
        )
    return {
        info.name: TensorSource(
            info.name,
            info.shape,
            FORMAT_OF[info.dtype],
            file.extent(f"tensor {shown(info.name)}", info.offset, info.nbytes),
            file.path,
            read=partial(file.read, info.offset),
        )
        for info in infos
    }


def _check_against_index(parts: list[SafetensorsFile], shards: list[str], weight_map: dict[str, str], index: Path) -> None:
    held: dict[str, str] = {}
    for part, shard in zip(parts, shards, strict=True):
        for info in part.infos:
            if info.name in held:
                raise ModelFileError(
                    f"tensor {shown(info.name)} is in {held[info.name]} and in {shard}",
                    who=str(index),
                    fix="download the shards again",
                    key=info.name,
                )
            held[info.name] = shard
    for kind, names in (
        ("the shards lack {} tensors that the index names", [n for n in weight_map if held.get(n) != weight_map[n]]),
        ("the index lacks {} tensors that the shards hold", [n for n in held if n not in weight_map]),
    ):
        if names:
            listed = ", ".join(shown(n) for n in names[:4]) + (" …" if len(names) > 4 else "")
            raise ModelFileError(
                f"{index.name}: {kind.format(len(names))}: {listed}",
                who=str(index),
                why="index and shards do not belong together, or a shard was renamed",
                fix="download the index and the shards again",
            )
