"""GGUF, versions 2 and 3: one self-contained file (or a numbered set) with metadata, tokenizer and quantised tensors.

    "GGUF" | u32 version | u64 tensors | u64 pairs | pairs | tensor infos | padding | tensor data
    pair:  string key, u32 value type, value        string: u64 length, UTF-8 bytes
    info:  string name, u32 n, u64 dims[n] (fastest first), u32 type, u64 offset from the data start

Shapes are turned round on reading: everything after this file has the outermost dimension first. `open_model` calls
`read_gguf`; `fastllm inspect` calls it with `header_only`, which also lists files whose types cannot be run.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..core.errors import ModelFileError, UnsupportedError
from ..core.quant import GGML_TYPES
from ..core.weights import TensorSource
from ._strings import Strings
from .reader import Cursor, MappedFile, shown

__all__ = ["GGML_LAYOUTS", "GGUFFile", "TensorInfo", "metadata_value", "read_gguf", "read_pairs"]

_LAYOUT_ROWS = """
0 F32 1 4; 1 F16 1 2; 2 Q4_0 32 18; 3 Q4_1 32 20; 6 Q5_0 32 22; 7 Q5_1 32 24; 8 Q8_0 32 34; 9 Q8_1 32 36; 10 Q2_K 256 84;
11 Q3_K 256 110; 12 Q4_K 256 144; 13 Q5_K 256 176; 14 Q6_K 256 210; 15 Q8_K 256 292; 16 IQ2_XXS 256 66; 17 IQ2_XS 256 74;
18 IQ3_XXS 256 98; 19 IQ1_S 256 50; 20 IQ4_NL 32 18; 21 IQ3_S 256 110; 22 IQ2_S 256 82; 23 IQ4_XS 256 136; 24 I8 1 1;
25 I16 1 2; 26 I32 1 4; 27 I64 1 8; 28 F64 1 8; 29 IQ1_M 256 56; 30 BF16 1 2; 34 TQ1_0 256 54; 35 TQ2_0 256 66;
39 MXFP4 32 17; 40 NVFP4 64 36; 41 Q1_0 128 18; 42 Q2_0 64 18
"""
GGML_LAYOUTS: dict[int, tuple[str, int, int]] = {
    int(i): (name, int(block), int(nbytes)) for i, name, block, nbytes in (row.split() for row in _LAYOUT_ROWS.split(";"))
}
"""GGML type id -> (name, values per block, bytes per block): every type of the format, also those that cannot be run yet."""

REMOVED = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}

# Value types: u8 i8 u16 i16 u32 i32 f32 (0-6), bool 7, string 8, array 9, u64 i64 f64 (10-12), as struct codes.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_DTYPES = {kind: np.dtype("<" + code) for kind, code in _SCALARS.items()}

MAX_KEYS = 65_536
MAX_TENSORS = 262_144
MAX_ITEMS = 4_194_304  # strings and inner arrays, each a Python object; the largest vocabularies have some 10^6 with merges
MAX_NAME_BYTES = 65_535
MAX_TENSOR_NAME_BYTES = 1_024
MAX_ALIGNMENT = 1 << 20
_SPLIT_NAME = re.compile(r"^(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as the header declares it. shape: outermost first; dtype: the file's own name for the type; offset: in `file`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int
    file: str


@dataclass
class GGUFFile:
    """An open GGUF file or set of split files.

    metadata: key -> int, float, bool, str, list of str, or numpy view of numbers; of the first file. tensors: empty if only
    the header was asked for. data_offset, alignment: of the first file. trailing_bytes: unused bytes behind the last tensor.
    """

    path: str
    version: int
    alignment: int
    data_offset: int
    metadata: dict[str, Any]
    infos: tuple[TensorInfo, ...]
    tensors: dict[str, TensorSource]
    trailing_bytes: int = 0
    files: list[MappedFile] = field(default_factory=list, repr=False)

    def check_unchanged(self) -> None:
        """Raises ModelFileError if one of the mapped files changed since it was opened."""
        for file in self.files:
            file.check_unchanged()

    def drop_pages(self) -> None:
        """What was read through the maps leaves this process's memory, and stays in the page cache."""
        for file in self.files:
            file.drop_pages()

    def close(self) -> None:
        """Releases the maps. Views that are still in use keep theirs."""
        self.tensors, self.metadata = {}, {}
        for file in self.files:
            file.close()


def metadata_value(metadata: dict[str, Any], key: str, kind: type, default: Any = None, *, path: str = "") -> Any:
    """`metadata[key]` if it is of `kind` (bool is no int, an int is a float), `default` if absent, else ModelFileError."""
    if key not in metadata:
        return default
    value = metadata[key]
    if kind is float and type(value) is int:
        return float(value)
    if (type(value) is bool) != (kind is bool) or not isinstance(value, kind):
        raise ModelFileError(
            f"the value of '{key}' is a {type(value).__name__}, not a {kind.__name__}",
            who=path,
            fix="convert the model again",
            key=key,
        )
    return value


def read_gguf(path: str | os.PathLike[str], *, header_only: bool = False) -> GGUFFile:
    """Opens a GGUF file, or the set whose first file `path` is; every size and extent is checked, no tensor byte is read.

    header_only: only list (`infos`), also tensors of types that cannot be run; the extents are checked all the same.
    Raises ModelFileError for a damaged file, UnsupportedError for a version, byte order or tensor type that is not read.
    """
    parts = [_read_one(os.fspath(path))]
    try:
        first = parts[0]
        count = _split_count(first)
        if count > 1:
            _check_first(first, count)
            for sibling in _siblings(first, count):
                parts.append(_read_one(sibling))
            _check_set(parts, count)
            first.infos = tuple(info for part in parts for info in part.infos)
            first.trailing_bytes = sum(part.trailing_bytes for part in parts)
            first.files = [file for part in parts for file in part.files]
        if not header_only:
            first.tensors = _sources(first)
        return first
    except BaseException:
        for part in parts:
            part.close()
        raise


# One file --------------------------------------------------------------------------------------------------------------


def _read_one(path: str) -> GGUFFile:
    file = MappedFile(path)
    try:
        return _parse(file)
    except BaseException:
        file.close()
        raise


def read_pairs(file: MappedFile) -> dict[str, Any]:
    """The metadata pairs alone. Raises as `read_gguf`."""
    return _head(Cursor(file))[2]


def _head(cur: Cursor) -> tuple[int, int, dict[str, Any]]:
    """(version, number of tensors, pairs); the position is then behind the pairs."""
    if cur.left < 4 or cur.bytes(4, "the magic") != b"GGUF":
        raise cur.file.wrong_magic("a GGUF file")
    version = _version(cur)
    num_tensors = cur.count("the number of tensors", 24, MAX_TENSORS)
    return version, num_tensors, _metadata(cur, cur.count("the number of metadata pairs", 13, MAX_KEYS))


def _parse(file: MappedFile) -> GGUFFile:
    cur = Cursor(file)
    version, num_tensors, metadata = _head(cur)
    alignment = _alignment(file, metadata)
    declared = [_tensor(cur) for _ in range(num_tensors)]
    _check_names(file, declared)

    data_offset = -(-cur.pos // alignment) * alignment
    if data_offset > file.size:
        if declared:
            raise file.error(
                f"the tensor data should start at byte {data_offset}, but the file has {file.size} bytes", offset=file.size
            )
        data_offset = file.size  # a vocabulary without tensors may end without padding
    infos = tuple(_place(file, row, data_offset, alignment) for row in declared)
    end = _check_overlaps(file, infos, data_offset)
    return GGUFFile(file.path, version, alignment, data_offset, metadata, infos, {}, file.size - end, [file])


def _version(cur: Cursor) -> int:
    version = cur.u32("the version")
    name = os.path.basename(cur.file.path)
    if version in (2, 3):
        return version
    if version and not version & 0xFFFF:
        raise UnsupportedError(
            f"{name} is a big-endian GGUF file", who=cur.file.path, fix="use the little-endian file of this model"
        )
    if version == 0:
        raise cur.file.error("the GGUF version is 0; versions 2 and 3 are read", offset=4)
    raise UnsupportedError(
        f"{name} is GGUF version {version}; versions 2 and 3 are read",
        who=cur.file.path,
        fix="convert the model again with a current converter"
        if version == 1
        else "update fastllm, or convert the model to version 3",
    )


def _metadata(cur: Cursor, num_pairs: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    budget = [MAX_ITEMS]
    for index in range(num_pairs):
        start = cur.pos
        key = cur.string(f"the key of metadata pair {index}", MAX_NAME_BYTES)
        if key in metadata:
            raise cur.file.error(f"the metadata key {shown(key)} appears twice", offset=start, key=key)
        value = _value(cur, f"the value of {shown(key)}", cur.u32(f"the type of {shown(key)}"), 0, budget)
        # of a vocabulary only: what else there is becomes the configuration, which is written as JSON
        metadata[key] = list(value) if isinstance(value, Strings) and not key.startswith("tokenizer.") else value
    return metadata


def _value(cur: Cursor, what: str, kind: int, depth: int, budget: list[int]) -> Any:
    if kind in _SCALARS:
        return cur.unpack(_SCALARS[kind], what)
    if kind == _BOOL:
        value = cur.u8(what)
        if value > 1:
            raise cur.file.error(f"{what} is a bool of value {value}; 0 and 1 are allowed", offset=cur.pos - 1)
        return bool(value)
    if kind == _STRING:
        return cur.string(what)
    if kind == _ARRAY:
        return _array(cur, what, depth + 1, budget)
    raise cur.file.error(f"{what} has the unknown type {kind}; known are 0 to 12", offset=cur.pos - 4)


def _array(cur: Cursor, what: str, depth: int, budget: list[int]) -> Any:
    start = cur.pos
    if depth > 4:
        raise cur.file.error(f"{what} is an array nested more than 4 deep", offset=start, limit=4)
    kind = cur.u32(f"the element type of {what}")
    if kind in _DTYPES:
        return cur.array(_DTYPES[kind], cur.count(f"the length of {what}", _DTYPES[kind].itemsize), what)
    if kind == _BOOL:
        flags = cur.array(np.dtype(np.uint8), cur.count(f"the length of {what}", 1), what)
        if flags.size and flags.max() > 1:
            raise cur.file.error(f"{what} is an array of bools with the value {flags.max()}; 0 and 1 are allowed", offset=start)
        return flags.view(np.bool_)
    if kind not in (_STRING, _ARRAY):
        raise cur.file.error(f"{what} is an array of the unknown type {kind}; known are 0 to 12", offset=start)
    count = cur.count(f"the length of {what}", 8 if kind == _STRING else 12, budget[0])
    budget[0] -= count
    if kind == _STRING:
        strings = cur.strings(count, what)
        return strings if depth == 1 else list(strings)
    return [_array(cur, what, depth + 1, budget) for _ in range(count)]


def _alignment(file: MappedFile, metadata: dict[str, Any]) -> int:
    alignment = metadata_value(metadata, "general.alignment", int, 32, path=file.path)
    if alignment < 8 or alignment > MAX_ALIGNMENT or alignment & (alignment - 1):
        raise file.error(
            f"general.alignment is {alignment}; it must be a power of two from 8 to {MAX_ALIGNMENT}", key="general.alignment"
        )
    return alignment


# Tensors ---------------------------------------------------------------------------------------------------------------

_Declared = tuple[str, tuple[int, ...], int, int, int]  # name, shape, type id, offset in the data, byte position of the info


def _tensor(cur: Cursor) -> _Declared:
    start = cur.pos
    name = cur.string("the name of a tensor", MAX_TENSOR_NAME_BYTES)
    rank = cur.u32(f"the rank of tensor {shown(name)}")
    if not 1 <= rank <= 4:
        raise cur.file.error(f"tensor {shown(name)} has {rank} dimensions; 1 to 4 are allowed", offset=start)
    dims = tuple(cur.u64(f"a dimension of tensor {shown(name)}") for _ in range(rank))
    kind = cur.u32(f"the type of tensor {shown(name)}")
    offset = cur.u64(f"the offset of tensor {shown(name)}")
    return name, dims[::-1], kind, offset, start


def _check_names(file: MappedFile, declared: list[_Declared]) -> None:
    if len({row[0] for row in declared}) != len(declared):
        name, times = Counter(row[0] for row in declared).most_common(1)[0]
        raise file.error(f"the tensor name {shown(name)} appears {times} times", key=name)
    unknown = [row for row in declared if row[2] not in GGML_LAYOUTS]
    if unknown:
        ids = sorted({row[2] for row in unknown})
        named = ", ".join(f"{i} ({REMOVED[i]}, removed from the format)" if i in REMOVED else f"{i} (unknown)" for i in ids)
        raise UnsupportedError(
            f"{os.path.basename(file.path)} has {len(unknown)} tensors of type {named}; the first is {shown(unknown[0][0])}",
            who=file.path,
            why="known are " + ", ".join(f"{i} {row[0]}" for i, row in GGML_LAYOUTS.items()),
            fix="quantise the original model again to a current type such as Q4_K_M",
        )


def _place(file: MappedFile, row: _Declared, data_offset: int, alignment: int) -> TensorInfo:
    name, shape, kind, offset, start = row
    layout, block, block_bytes = GGML_LAYOUTS[kind]
    if 0 in shape:
        raise file.error(f"tensor {shown(name)} of shape {list(shape)} has a dimension of 0", offset=start)
    if shape[-1] % block:
        raise file.error(
            f"tensor {shown(name)} has rows of {shape[-1]} values, which are no whole blocks of {block} ({layout})",
            offset=start,
        )
    count = 1
    for dim in shape:
        count *= dim  # Python integers do not overflow; four u64 dimensions stay small
    nbytes = count // block * block_bytes
    if offset % alignment:
        raise file.error(
            f"tensor {shown(name)} starts at offset {offset}, no multiple of the alignment {alignment}", offset=start
        )
    if offset > file.size - data_offset or nbytes > file.size - data_offset - offset:
        raise file.error(
            f"tensor {shown(name)} {list(shape)} {layout} needs {nbytes} bytes at offset {offset}, "
            f"but the data section has {file.size - data_offset} bytes",
            why="the file is cut, or its header is wrong",
            offset=start,
            limit=file.size,
        )
    return TensorInfo(name, shape, layout, data_offset + offset, nbytes, file.path)


def _check_overlaps(file: MappedFile, infos: Iterable[TensorInfo], data_offset: int) -> int:
    end, before = data_offset, ""
    for info in sorted(infos, key=lambda i: i.offset):
        if info.offset < end:
            raise file.error(
                f"tensor {shown(info.name)} at byte {info.offset} overlaps tensor {shown(before)}, which ends at {end}"
            )
        end, before = info.offset + info.nbytes, info.name
    return end


def _sources(gguf: GGUFFile) -> dict[str, TensorSource]:
    """The tensors as views; raises UnsupportedError listing all types that `core.quant` cannot decode."""
    formats = {GGML_LAYOUTS[i][0]: name for i, name in GGML_TYPES.items() if i in GGML_LAYOUTS}
    missing = Counter(info.dtype for info in gguf.infos if info.dtype not in formats)
    if missing:
        listed = ", ".join(f"{count} of type {name}" for name, count in sorted(missing.items()))
        raise UnsupportedError(
            f"{os.path.basename(gguf.path)} has tensors that cannot be decoded yet: {listed}",
            who=gguf.path,
            why="decoded are " + ", ".join(sorted(formats)),
            fix="use a file of this model in one of those types, for example Q4_K_M or Q8_0",
        )
    maps = {file.path: file for file in gguf.files}
    return {
        info.name: TensorSource(
            info.name,
            info.shape,
            formats[info.dtype],
            maps[info.file].extent(f"tensor {shown(info.name)}", info.offset, info.nbytes),
            info.file,
            read=partial(maps[info.file].read, info.offset),
        )
        for info in gguf.infos
    }


# Split sets ------------------------------------------------------------------------------------------------------------


def _split_count(first: GGUFFile) -> int:
    count = metadata_value(first.metadata, "split.count", int, 1, path=first.path)
    named = _SPLIT_NAME.match(os.path.basename(first.path))
    if not 0 <= count <= 99_999:
        raise first.files[0].error(f"split.count is {count}; 1 to 99999 are allowed", key="split.count")
    if named and int(named["count"]) > 1 and int(named["count"]) != max(count, 1):
        raise first.files[0].error(
            f"the name says {int(named['count'])} files, split.count says {max(count, 1)}",
            fix="give the files of the set their original names",
            key="split.count",
        )
    return count


def _check_first(first: GGUFFile, count: int) -> None:
    number = metadata_value(first.metadata, "split.no", int, 0, path=first.path)
    named = _SPLIT_NAME.match(os.path.basename(first.path))
    if not named:
        raise first.files[0].error(
            f"this is file {number + 1} of a set of {count}, but its name does not end in -00001-of-{count:05d}.gguf",
            fix="give the files of the set their original names",
        )
    if number != 0 or int(named["no"]) != 1:
        start = f"{named['stem']}-00001-of-{count:05d}.gguf"
        raise first.files[0].error(
            f"this is file {int(named['no'])} of a set of {count} (split.no {number})",
            fix=f"name the first file: {start}",
            key="split.no",
        )


def _siblings(first: GGUFFile, count: int) -> list[str]:
    folder, name = os.path.split(first.path)
    match = _SPLIT_NAME.match(name)
    stem = match["stem"] if match else name
    names = [f"{stem}-{i:05d}-of-{count:05d}.gguf" for i in range(2, count + 1)]
    present = set(os.listdir(folder or "."))
    missing = [n for n in names if n not in present]
    if missing:
        listed = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise first.files[0].error(
            f"{len(missing)} of {count} files of the set are missing: {listed}", fix="download the missing files"
        )
    return [os.path.join(folder, n) for n in names]


def _check_set(parts: list[GGUFFile], count: int) -> None:
    seen: dict[str, str] = {}
    for index, part in enumerate(parts):
        file = part.files[0]
        for key, want in (("split.no", index), ("split.count", count)):
            found = metadata_value(part.metadata, key, int, None, path=part.path)
            if found != want:
                raise file.error(f"{key} is {found}, expected {want}: the file belongs to another set or was renamed", key=key)
        family, first_family = part.metadata.get("general.architecture"), parts[0].metadata.get("general.architecture")
        if family is not None and family != first_family:
            raise file.error(f"general.architecture is {shown(family)}, but {shown(first_family)} in the first file of the set")
        for info in part.infos:
            if info.name in seen:
                raise file.error(f"tensor {shown(info.name)} is also in {os.path.basename(seen[info.name])}", key=info.name)
            seen[info.name] = part.path
    declared = metadata_value(parts[0].metadata, "split.tensors.count", int, len(seen), path=parts[0].path)
    if declared != len(seen):
        raise (
            parts[0]
            .files[0]
            .error(
                f"split.tensors.count is {declared}, but the {count} files hold {len(seen)} tensors", key="split.tensors.count"
            )
        )
