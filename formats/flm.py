"""FLM, our container: one file with weights, tokenizer, template and configuration that is also a valid safetensors file.

    | u64 header length | JSON header, padded with blanks to 4096 | tensors, each at a multiple of 64 | files | manifest |

Quantised and packed weights are U8 tensors in the order in which a step reads them, padded to a multiple of 64 bytes; plain ones keep
dtype and shape. `__flm__/manifest.json` says what the bytes mean: format, shape, packed layout, true length and sha256 of each weight,
the configuration, and where it all came from. A weight that is packed as the running backend wants it is used where it is mapped.

The names are those of the graph: fused tensors are split and constants added before. So that a family builds the same graph again,
the manifest also lists names and shapes of the tensors that were in the source (`tensors` of `ModelFiles`, without data).

`write_flm` is called by `fastllm convert`, `read_flm` by `open_model`, `check_hashes` by `fastllm verify`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from ..core.errors import ModelFileError, UnsupportedError
from ..core.quant import FORMATS
from ..core.weights import PackedLayout, TensorSource
from .gguf import TensorInfo
from .json_text import parse_json
from .reader import shown
from .safetensors_file import MAX_RANK, MAX_TENSORS, SafetensorsFile, read_safetensors

__all__ = ["FILE_NAMES", "FlmFile", "FlmWeight", "check_hashes", "read_flm", "write_flm"]

VERSION = "1"
ALIGNMENT = 64
PAGE = 4096
MANIFEST = "__flm__/manifest.json"
FILES = "__flm__/files/"
SOURCE = "__flm__/source/"
MAX_MANIFEST_BYTES = 64 << 20
MAX_LAYOUT_NAME = 64
FILE_NAMES = (
    "tokenizer.json", "tokenizer.model", "tokenizer.gguf", "tokenizer_gguf.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "generation_config.json",
)  # fmt: skip
"""What `files` may hold."""

PLAIN_DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}


@dataclass(frozen=True)
class FlmWeight:
    """One weight of the file. name: of the graph; layout: packed form of it (of one matrix of a stack), or None; nbytes: without
    padding; sha256: of these bytes; report: what a conversion lost, for people."""

    name: str
    shape: tuple[int, ...]
    format: str
    layout: PackedLayout | None
    nbytes: int
    sha256: str = ""
    report: Mapping[str, float] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        """Its safetensors dtype."""
        return "U8" if self.layout is not None else PLAIN_DTYPES.get(self.format, "U8")

    @property
    def stored_shape(self) -> list[int]:
        """Its shape in the header: bytes, padded, unless it is plain."""
        return [_aligned(self.nbytes)] if self.dtype == "U8" else list(self.shape)

    @property
    def stored_bytes(self) -> int:
        """Bytes in the file."""
        return _aligned(self.nbytes) if self.dtype == "U8" else self.nbytes


@dataclass
class FlmFile:
    """An open FLM file. manifest: its facts; weights by graph name; ready: the same as sources; tensors: the source's tensors, without
    data unless they are kept in the file; files: name -> bytes."""

    source: SafetensorsFile
    manifest: dict[str, Any]
    weights: dict[str, FlmWeight]
    ready: dict[str, TensorSource]
    tensors: dict[str, TensorSource]
    files: dict[str, bytes]

    def check_unchanged(self) -> None:
        """Raises ModelFileError if the file changed since it was opened."""
        self.source.check_unchanged()

    def close(self) -> None:
        """Releases the map; views that are in use keep theirs."""
        self.ready, self.tensors = {}, {}
        self.source.close()


# writing ------------------------------------------------------------------------------------------------------------------


def write_flm(
    path: Path,
    weights: Sequence[FlmWeight],
    extras: Sequence[TensorSource],
    files: Mapping[str, bytes],
    facts: Mapping[str, Any],
    produce: Callable[[FlmWeight], Iterator[np.ndarray]],
    report: Callable[[FlmWeight], Mapping[str, float]],
) -> int:
    """Writes a file; nothing half-written ever has its name. Returns its size in bytes.

    weights: in running order, without sha256. produce(weight): its bytes (u8) in pieces, in all exactly `nbytes`; report(weight): what
    was lost, asked after it was produced. extras: tensors of the source that are kept as they are. facts: what the manifest says
    besides. Raises ModelFileError if there is no space or the folder cannot be written.
    """
    order = sorted(weights, key=lambda w: (w.dtype != "U8", w.stored_bytes % ALIGNMENT != 0))
    rows: list[tuple[str, str, list[int], int]] = [(w.name, w.dtype, w.stored_shape, w.stored_bytes) for w in order]
    rows += [(SOURCE + t.name, "U8", [t.nbytes], t.nbytes) for t in extras]
    rows += [(FILES + name, "U8", [len(data)], len(data)) for name, data in files.items()]
    data_bytes = sum(size for *_, size in rows)
    start = _header_bytes(rows, data_bytes)
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        folder = path.parent
        free = shutil.disk_usage(folder).free
        if free < start + data_bytes:
            raise _cannot_write(path, f"{start + data_bytes:,} bytes are needed and {free:,} are free", "free space, or write elsewhere")
        with part.open("xb") as out:
            out.seek(start)
            done = [_write_weight(out, weight, produce, report) for weight in order]
            for tensor in extras:
                out.write(memoryview(np.ascontiguousarray(tensor.data)))
            for data in files.values():
                out.write(data)
            manifest = json.dumps(_manifest(done, extras, files, facts), ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode()
            out.write(manifest)
            total = out.tell()
            out.seek(0)
            out.write(_header(rows, data_bytes, len(manifest), hashlib.sha256(manifest).hexdigest(), start))
            out.flush()
            os.fsync(out.fileno())
            if hasattr(os, "posix_fadvise"):  # written pages are small ones: whoever reads it first brings large ones in (in_large_pages)
                with contextlib.suppress(OSError):  # advice: the file is whole without it
                    os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        part.replace(path)
        _sync_folder(folder)
        return total
    except OSError as error:
        raise _cannot_write(path, error.strerror or str(error), "choose a folder that can be written, with enough space") from None
    finally:
        part.unlink(missing_ok=True)


def _write_weight(
    out: Any, weight: FlmWeight, produce: Callable[[FlmWeight], Iterator[np.ndarray]], report: Callable[[FlmWeight], Mapping[str, float]]
) -> FlmWeight:
    digest, size = hashlib.sha256(), 0
    for piece in produce(weight):
        view = memoryview(np.ascontiguousarray(piece).reshape(-1))
        digest.update(view)
        out.write(view)
        size += view.nbytes
    if size != weight.nbytes:
        raise ModelFileError(f"weight '{weight.name}' came to {size} bytes instead of {weight.nbytes}", fix="report this")
    out.write(bytes(weight.stored_bytes - size))
    return FlmWeight(weight.name, weight.shape, weight.format, weight.layout, size, digest.hexdigest(), report(weight))


def _manifest(
    weights: Sequence[FlmWeight], extras: Sequence[TensorSource], files: Mapping[str, bytes], facts: Mapping[str, Any]
) -> dict[str, Any]:
    def layout(packed: PackedLayout | None) -> dict[str, Any] | None:
        return None if packed is None else {"id": packed.id, "version": packed.version, "bytes": packed.nbytes}

    def digest(data: Any) -> str:
        return hashlib.sha256(data).hexdigest()

    return {
        **facts,
        "weights": {
            w.name: {
                "shape": list(w.shape),
                "format": w.format,
                "layout": layout(w.layout),
                "bytes": w.nbytes,
                "sha256": w.sha256,
                **({"report": dict(w.report)} if w.report else {}),
            }
            for w in weights
        },
        "kept": {
            t.name: {"shape": list(t.shape), "format": t.format, "sha256": digest(np.ascontiguousarray(t.data))} for t in extras
        },
        "files": {name: {"bytes": len(data), "sha256": digest(data)} for name, data in files.items()},
    }


def _header(rows: Sequence[tuple[str, str, list[int], int]], data_bytes: int, manifest_bytes: int, sha256: str, start: int) -> bytes:
    """u64 length and JSON, `start` bytes in all."""
    header: dict[str, Any] = {"__metadata__": {"format": "flm", "flm": VERSION, "manifest_sha256": sha256}}
    at = 0
    for name, dtype, shape, size in (*rows, (MANIFEST, "U8", [manifest_bytes], manifest_bytes)):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, ensure_ascii=True, separators=(",", ":")).encode()
    return (start - 8).to_bytes(8, "little") + text + b" " * (start - 8 - len(text))


def _header_bytes(rows: Sequence[tuple[str, str, list[int], int]], data_bytes: int) -> int:
    """Where the data begins: room for the header, whatever the length of the manifest turns out to be."""
    room = len(_header(rows, data_bytes, MAX_MANIFEST_BYTES, "0" * 64, 8))
    return -(-room // PAGE) * PAGE


def _cannot_write(path: Path, why: str, fix: str) -> ModelFileError:
    return ModelFileError(f"{path.name} cannot be written: {why}", who=str(path), fix=fix)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


# reading ------------------------------------------------------------------------------------------------------------------


def read_flm(path: str | os.PathLike[str]) -> FlmFile:
    """Opens a file: header, manifest and its hash, and that each says the same about every tensor. No weight is read.

    Raises ModelFileError for a damaged file, UnsupportedError for one of another version.
    """
    source = read_safetensors(path, header_only=True)
    try:
        if source.metadata.get("format") != "flm":
            raise _wrong(source, "the header does not say that this is an FLM file", fix="give a safetensors file its folder and suffix")
        if source.metadata.get("flm") != VERSION:
            found = shown(source.metadata.get("flm", ""))
            raise UnsupportedError(f"FLM version {found}; this program reads {VERSION}", who=source.path, fix="update fastllm, or convert again")
        source.files[0].in_large_pages()
        return _Reader(source).open()
    except BaseException:
        source.close()
        raise


def check_hashes(file: FlmFile, progress: Callable[[int, int, str], None] | None = None) -> None:
    """Compares every sha256 of the manifest. Raises ModelFileError naming the first part that differs and its bytes in the file."""
    infos = {info.name: info for info in file.source.infos}
    for name, entry in file.manifest["kept"].items():
        if SOURCE + name not in infos or not isinstance(entry, dict) or not isinstance(entry.get("sha256"), str):
            raise _wrong(file.source, f"the manifest keeps {shown(name)}, which is not in the file", fix="download or convert the file again")
    wanted = [(w.name, w.name, w.nbytes, w.sha256) for w in file.weights.values()]
    wanted += [(name, SOURCE + name, infos[SOURCE + name].nbytes, entry["sha256"]) for name, entry in file.manifest["kept"].items()]
    wanted += [(name, FILES + name, entry["bytes"], entry["sha256"]) for name, entry in file.manifest["files"].items()]
    total, done = sum(size for _, _, size, _ in wanted), 0
    for name, stored, size, sha256 in wanted:
        info = infos[stored]
        data = file.source.files[0].extent(f"tensor {shown(name)}", info.offset, info.nbytes)
        if hashlib.sha256(memoryview(data[:size])).hexdigest() != sha256 or data[size:].any():
            raise _wrong(
                file.source,
                f"{shown(name)} is damaged: bytes {info.offset} to {info.offset + info.nbytes} are not those that were written",
                fix="download or convert the file again",
            )
        done += size
        if progress is not None:
            progress(done, total, name)


class _Reader:
    """The manifest of one file, checked against its header."""

    def __init__(self, source: SafetensorsFile):
        self.source = source
        self.infos: dict[str, TensorInfo] = {info.name: info for info in source.infos}
        self.left = set(self.infos)

    def open(self) -> FlmFile:
        info = self.infos.get(MANIFEST)
        if info is None or info.dtype != "U8" or info.nbytes > MAX_MANIFEST_BYTES:
            raise _wrong(self.source, f"there is no manifest of at most {MAX_MANIFEST_BYTES} bytes")
        raw = bytes(self._bytes(MANIFEST))
        if hashlib.sha256(raw).hexdigest() != self.source.metadata.get("manifest_sha256"):
            raise _wrong(self.source, "the manifest is damaged: its sha256 is not the one in the header")
        manifest = parse_json(raw, "the manifest", self.source.path, base=info.offset)
        if not isinstance(manifest, dict):
            raise _wrong(self.source, "the manifest is no JSON object")
        weights = {name: self._weight(name, entry) for name, entry in self._table(manifest, "weights").items()}
        ready = {name: self._ready(weight) for name, weight in weights.items()}
        tensors = self._tensors(manifest)
        files = {name: self._file(name, entry) for name, entry in self._table(manifest, "files").items()}
        if self.left:
            raise _wrong(self.source, f"the manifest does not know the tensor {shown(min(self.left))}")
        return FlmFile(self.source, manifest, weights, ready, tensors, files)

    def _bytes(self, name: str) -> np.ndarray:
        info = self.infos[name]
        self.left.discard(name)
        return self.source.files[0].extent(f"tensor {shown(name)}", info.offset, info.nbytes)

    def _table(self, manifest: dict[str, Any], key: str) -> dict[str, dict[str, Any]]:
        table = manifest.get(key)
        if not isinstance(table, dict) or len(table) > MAX_TENSORS or not all(isinstance(entry, dict) for entry in table.values()):
            raise _wrong(self.source, f"'{key}' of the manifest must be an object of at most {MAX_TENSORS} objects", key=key)
        return table

    def _weight(self, name: str, entry: dict[str, Any]) -> FlmWeight:
        shape, format = self._shape(name, entry.get("shape")), self._format(name, entry.get("format"))
        nbytes, sha256 = entry.get("bytes"), entry.get("sha256")
        layout = self._layout(name, entry.get("layout"), format, shape)
        if shape[-1] % FORMATS[format].block:
            raise _wrong(self.source, f"weight {shown(name)} of shape {list(shape)} has no whole {format} blocks", key=name)
        want = FORMATS[format].nbytes(math.prod(shape))
        if layout is not None:
            count = math.prod(shape[:-2])
            if layout.nbytes * count < want:
                raise _wrong(self.source, f"weight {shown(name)} of shape {list(shape)} cannot be packed in {layout.nbytes} bytes", key=name)
            want = layout.nbytes if count == 1 else count * _aligned(layout.nbytes)
        if type(nbytes) is not int or nbytes != want or not isinstance(sha256, str):
            raise _wrong(self.source, f"weight {shown(name)}, {format} {list(shape)}, takes {want} bytes; the manifest says {shown(nbytes)}", key=name)
        weight, info = FlmWeight(name, shape, format, layout, nbytes, sha256), self.infos.get(name)
        if info is None or info.dtype != weight.dtype or list(info.shape) != weight.stored_shape:
            found = "no such tensor" if info is None else f"{info.dtype} {list(info.shape)}"
            raise _wrong(self.source, f"weight {shown(name)} must be {weight.dtype} {weight.stored_shape}; the header has {found}", key=name)
        return weight

    def _ready(self, weight: FlmWeight) -> TensorSource:
        data = self._bytes(weight.name)[: weight.nbytes]
        read = partial(self.source.files[0].read, self.infos[weight.name].offset)
        return TensorSource(weight.name, weight.shape, weight.format, data, self.source.path, packed=weight.layout, read=read)

    def _layout(self, name: str, entry: Any, format: str, shape: tuple[int, ...]) -> PackedLayout | None:
        if entry is None:
            return None
        fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
        id, version, nbytes = (fields.get(key) for key in ("id", "version", "bytes"))
        if not isinstance(id, str) or len(id) > MAX_LAYOUT_NAME or not _natural(version) or not _natural(nbytes) or len(shape) < 2:
            raise _wrong(self.source, f"weight {shown(name)} has the packed layout {shown(entry)}; id, version and bytes are expected", key=name)
        return PackedLayout(id, version, format, (shape[-2], shape[-1]), nbytes)

    def _shape(self, name: str, shape: Any) -> tuple[int, ...]:
        if not isinstance(shape, list) or not 0 < len(shape) <= MAX_RANK or not all(_natural(d) and 0 < d < 1 << 40 for d in shape):
            raise _wrong(self.source, f"{shown(name)} has the shape {shown(shape)}; 1 to {MAX_RANK} positive numbers are allowed", key=name)
        return tuple(shape)

    def _format(self, name: str, format: Any) -> str:
        if not isinstance(format, str) or format not in FORMATS:
            raise UnsupportedError(f"{shown(name)} has the unknown format {shown(format)}", who=self.source.path, fix="update fastllm")
        return format

    def _tensors(self, manifest: dict[str, Any]) -> dict[str, TensorSource]:
        """Names and shapes of the source's tensors; data only of those that are kept."""
        listed, kept = manifest.get("source_tensors"), self._table(manifest, "kept")
        if not isinstance(listed, list) or len(listed) > MAX_TENSORS or not all(isinstance(row, list) and len(row) == 3 for row in listed):
            raise _wrong(self.source, "'source_tensors' of the manifest must be a list of [name, format, shape]", key="source_tensors")
        tensors: dict[str, TensorSource] = {}
        for name, format, shape in listed:
            if not isinstance(name, str) or name in tensors:
                raise _wrong(self.source, f"the source's tensor {shown(name)} is no name, or listed twice", key="source_tensors")
            format, dims = self._format(name, format), self._shape(name, shape)
            data = np.empty(0, np.uint8)
            if name in kept:
                if SOURCE + name not in self.infos:
                    raise _wrong(self.source, f"the kept tensor {shown(name)} is not in the file", key=name)
                data = self._bytes(SOURCE + name)
                if data.nbytes * FORMATS[format].block != math.prod(dims) * FORMATS[format].block_bytes:
                    raise _wrong(self.source, f"the kept tensor {shown(name)} has {data.nbytes} bytes, which is not {format} {list(dims)}", key=name)
            tensors[name] = TensorSource(name, dims, format, data, self.source.path)
        return tensors

    def _file(self, name: str, entry: dict[str, Any]) -> bytes:
        info = self.infos.get(FILES + name)
        if name not in FILE_NAMES or info is None or info.dtype != "U8" or entry.get("bytes") != info.nbytes:
            raise _wrong(self.source, f"the file {shown(name)} of the manifest is unknown, missing, or of another size", key=name)
        if not isinstance(entry.get("sha256"), str):
            raise _wrong(self.source, f"the file {shown(name)} has no sha256", key=name)
        return bytes(self._bytes(FILES + name))


def _natural(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 62


def _wrong(source: SafetensorsFile, message: str, *, fix: str = "download or convert the file again", key: str = "") -> ModelFileError:
    return ModelFileError(f"{os.path.basename(source.path)}: {message}", who=source.path, fix=fix, key=key)
