"""The one bounds-checked reader: maps a file read-only and hands out numbers, strings and extents of it.

Model files come from strangers, so every length and offset is compared with the bytes that are left *before* anything is
allocated or looped over, always as `length > left` (never `position + length > size`, the form that overflows when this is
ported to C). Every loader of this room goes through `MappedFile` and `Cursor`; none slices a file itself.

Why a map: weights stay in the page cache, are shared between processes and are read only when touched. What happens when
somebody changes the file meanwhile: *replacing* it (rename, or delete and create) is harmless, the map keeps the old file
alive; *writing into it* shows through, and *truncating* it makes the next touch of a lost page a SIGBUS. `check_unchanged`
(one `fstat`, under a microsecond) detects both; it is no lock. So weights that are packed do not go through the map: `read`
copies them with the descriptor, where a cut file is an error. What is left is weights that a device uses in the file (an FLM file,
plain tables): cutting that file while a step runs ends the process.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..core.errors import FastLLMError, ModelFileError, OutOfMemory, UsageError
from ._strings import read_strings

__all__ = ["Cursor", "HeldFile", "MappedFile", "describe_content", "file_of", "shown"]

MANY_STRINGS = 1024
AGAIN = "download the file again: it is cut or damaged"

_KINDS = (
    (stat.S_ISDIR, "a directory", "name a model file, or a folder that holds config.json"),
    (stat.S_ISFIFO, "a FIFO (named pipe)", "save the data to a regular file first"),
    (stat.S_ISSOCK, "a socket", "name a regular file"),
    (stat.S_ISCHR, "a character device", "name a regular file"),
    (stat.S_ISBLK, "a block device", "name a regular file"),
)


def shown(text: object, limit: int = 80) -> str:
    """`text` for a message: quoted, control characters and lone surrogates escaped, cut after `limit` characters."""
    raw = str(text)
    if len(raw) <= limit and raw.isprintable():
        return f"'{raw}'"
    cut = raw if len(raw) <= limit else raw[:limit] + "…"
    return "'" + "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode("ascii") for c in cut) + "'"


def describe_content(head: bytes) -> tuple[str, str] | None:
    """(what it is, fix) of a file that is no model although its name says so, from its first bytes; None if not known."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if head.startswith(b"version https://git-lfs"):
        return "a Git-LFS pointer, not the file itself", "run `git lfs pull` in that folder, or download the file directly"
    if text.startswith((b"<!doctype html", b"<html", b"<?xml", b"<!--")):
        return "a web page (HTML or XML)", "download the file itself: the page was a login or an error"
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return (
            "a zip archive (a wheel, or weights saved by torch as pickle)",
            "unpack it, or convert pickled weights to safetensors",
        )
    if len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5:
        return "a Python pickle, which can run code when opened", "convert it to safetensors"
    if head.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf")):
        return "a compressed archive", "unpack it first"
    if head[257:262] == b"ustar":
        return "a tar archive", "unpack it first"
    if head.startswith(b"GGUF"):
        return "a GGUF file", "give it the suffix .gguf"
    if head[:4] in (b"lmgg", b"ggml", b"tjgg", b"ggjt", b"fmgg", b"ggmf"):
        return "a GGML file from before GGUF", "convert the original model again with a current converter"
    if head[8:10] == b'{"' and head[6:8] == b"\0\0":
        return "a safetensors file", "give it the suffix .safetensors"
    if text.startswith((b"{", b"[")):
        return "a JSON text", "name the model file itself"
    if head and not head.strip(b"\0"):
        return "filled with zero bytes", "download the file again"
    return None


@contextlib.contextmanager
def file_of(option: str) -> Iterator[None]:
    """A file that an option names and that is wrong is a wrong option, not a damaged model. Raises UsageError in place of ModelFileError."""
    try:
        yield
    except ModelFileError as error:
        fix = f"name another file: {option}" if error.fix.startswith("download") else error.fix
        raise UsageError(f"{option}: {error.message}", who=error.who, why=error.why, fix=fix) from None


class MappedFile:
    """A regular file, mapped read-only. path: as given; size: bytes; data: all of it as u8 [size], a read-only view.

    Raises ModelFileError naming what `path` is when it is missing, no regular file, empty, a Git-LFS pointer or a web page,
    OutOfMemory if the system refuses the map.
    Close it, or drop it: views handed out keep the map alive until the last one is gone.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        self._fd, self.size = -1, 0
        try:
            self._check_kind(os.stat(self.path))  # before opening: opening a FIFO or a device has effects
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            info = os.fstat(self._fd)
            self._check_kind(info)
            if not info.st_size:
                raise self.error("the file is empty (0 bytes)", fix="download the file again")
            self.size = info.st_size
            self._stamp = (info.st_size, info.st_mtime_ns)
            self._map = mmap.mmap(self._fd, self.size, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as exc:
            self._close_fd()
            raise self._open_error(exc) from None
        except ModelFileError:
            self._close_fd()
            raise
        self.data: np.ndarray = np.frombuffer(self._map, np.uint8)  # [size]
        found = describe_content(self.head())
        if found and found[0].startswith(("a Git-LFS", "a web page")):
            self.close()
            raise self.error(f"the file is {found[0]}", fix=found[1])

    @property
    def content(self) -> mmap.mmap | bytes:
        """All of it, for slices that are copies."""
        return self._map

    def drop_pages(self) -> None:
        """What was read leaves this process's memory; it comes back from the page cache when it is read again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def in_large_pages(self) -> None:
        """Asks that what is read into the page cache from now on lies in pages of 2 MB, for parts that are read again and again where they are mapped: translating
        addresses in 4 KB pages takes about 7 % of such a read. File systems with large folios do it (Linux: xfs, ext4 from 6.16 on), for
        every process that maps the file; what the cache holds already stays as it is."""
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a system without them
                self._map.madvise(mmap.MADV_HUGEPAGE)

    def head(self, count: int = 512) -> bytes:
        """The first bytes, for `describe_content`."""
        return bytes(self.content[:count])

    def error(
        self, message: str, *, offset: int | None = None, why: str = "", fix: str = AGAIN, **fields: Any
    ) -> ModelFileError:
        """A ModelFileError about this file; `offset` is the byte where the bad value is."""
        where = "" if offset is None else f" at byte {offset}"
        if offset is not None:
            fields["offset"] = offset
        return ModelFileError(f"{os.path.basename(self.path)}{where}: {message}", who=self.path, why=why, fix=fix, **fields)

    def wrong_magic(self, expected: str, fix: str = AGAIN) -> ModelFileError:
        """The error for a file that does not start as a file of kind `expected` must: says what it is, if that is known; if not, `fix`."""
        found = describe_content(self.head())
        if found:
            return self.error(f"this is {found[0]}, not {expected}", fix=found[1])
        return self.error(f"this is not {expected}: it starts with {self.head(8).hex(' ')}", offset=0, fix=fix)

    def extent(self, name: str, offset: int, nbytes: int) -> np.ndarray:
        """Bytes [offset, offset + nbytes) as a u8 view. Raises ModelFileError naming `name` if the file does not hold them."""
        if offset < 0 or nbytes < 0 or offset > self.size or nbytes > self.size - offset:
            raise self.error(
                f"{name} needs {nbytes} bytes at offset {offset}, but the file has {self.size} bytes",
                why="the file is shorter than its header says",
                offset=offset,
                limit=self.size,
            )
        return self.data[offset : offset + nbytes]

    def read(self, origin: int, start: int, nbytes: int) -> np.ndarray:
        """Bytes [start, start + nbytes) of what begins at `origin`, u8, read into memory of our own: for whoever goes through much of the
        file once. Nothing of it stays resident, and a file that is cut meanwhile is a ModelFileError and not the end of the process."""
        offset = origin + start
        self.extent("a read", offset, nbytes)
        if self._fd < 0:
            raise self.error("the file is closed", fix="open the model again")
        out = np.empty(nbytes, np.uint8)
        left, done = memoryview(out), 0
        while done < nbytes:
            try:
                count = os.preadv(self._fd, [left[done:]], offset + done)
            except OSError as exc:
                raise self.error(f"reading failed: {exc.strerror}", offset=offset + done, fix="check the disk the file is on") from None
            if not count:
                raise self.error(
                    f"the file was cut while it was in use: {self.size} bytes when opened, {os.fstat(self._fd).st_size} now",
                    fix="start again, and replace model files by renaming a new file into place",
                )
            done += count
        return out

    def check_unchanged(self) -> None:
        """Raises ModelFileError if the mapped file was written to or cut since it was opened (size or time differ)."""
        if self._fd < 0:
            raise self.error("the file is closed", fix="open the model again")
        info = os.fstat(self._fd)
        if (info.st_size, info.st_mtime_ns) != self._stamp:
            raise self.error(
                f"the file changed while it was in use: {self.size} bytes when opened, {info.st_size} now",
                why="the weights in memory are a view of the file, so results can no longer be trusted",
                fix="start again, and replace model files by renaming a new file into place",
            )

    def close(self) -> None:
        """Lets go of the map and the descriptor; the memory returns when the last view of it is gone."""
        self._close_fd()
        self.data = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):  # views are in use: the map goes with the last of them
            self._map.close()

    def _close_fd(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _check_kind(self, info: os.stat_result) -> None:
        for test, kind, fix in _KINDS:
            if test(info.st_mode):
                raise self.error(f"this is {kind}, not a regular file", fix=fix)

    def _open_error(self, exc: Exception) -> FastLLMError:
        code = getattr(exc, "errno", None)
        if code == errno.ENOMEM:
            return OutOfMemory(
                f"{os.path.basename(self.path)}: the system refuses to map the file's {self.size:,} bytes",
                who=self.path,
                fix="raise the limit of address space (ulimit -v)",
                requested=self.size,
                kind="map",
            )
        if code == errno.ENOENT:
            if os.path.islink(self.path):
                target = os.readlink(self.path)
                return self.error(
                    f"this is a symlink to {shown(target)}, which does not exist", fix="restore the file it points to"
                )
            return self.error("there is no such file", fix="check the path")
        if code == errno.ELOOP:
            return self.error("this is a loop of symlinks", fix="name the file itself")
        if code in (errno.EACCES, errno.EPERM):
            return self.error("no permission to read the file", fix=f"chmod a+r {self.path}, or run as its owner")
        reason = getattr(exc, "strerror", None) or str(exc)
        return self.error(f"the file cannot be opened: {reason}", fix="check the path and the disk it is on")


class HeldFile(MappedFile):
    """The content of a file that is part of another one: data in memory, path: of the whole."""

    def __init__(self, path: str | os.PathLike[str], data: bytes):
        self.path, self._fd, self.size = os.fspath(path), -1, len(data)
        self._held = data
        self.data = np.frombuffer(data, np.uint8)

    @property
    def content(self) -> bytes:
        """As of `MappedFile`."""
        return self._held

    def close(self) -> None:
        """Nothing is open."""


class Cursor:
    """Reads little-endian values one after another. what: the part of the file for messages; pos, end: byte positions.

    Every getter raises ModelFileError with the byte position if fewer bytes are left than the value needs.
    """

    def __init__(self, file: MappedFile, pos: int = 0, end: int | None = None):
        self.file, self.pos = file, pos
        self.end = file.size if end is None else end
        self._buffer = file.content

    @property
    def left(self) -> int:
        """Bytes between the position and the end."""
        return self.end - self.pos

    def need(self, nbytes: int, what: str) -> int:
        """Checks that `nbytes` are left, returns the position and moves past them."""
        pos = self.pos
        if nbytes > self.end - pos:
            raise self.file.error(
                f"{what} needs {nbytes} bytes, but only {self.end - pos} are left", offset=pos, limit=self.end
            )
        self.pos = pos + nbytes
        return pos

    def unpack(self, code: str, what: str) -> Any:
        """One value of the struct code `code` (B b H h I i Q q f d)."""
        return struct.unpack_from("<" + code, self._buffer, self.need(struct.calcsize("<" + code), what))[0]

    def u8(self, what: str) -> int:
        """An unsigned byte."""
        return self.unpack("B", what)

    def u16(self, what: str) -> int:
        """An unsigned 16-bit number."""
        return self.unpack("H", what)

    def u32(self, what: str) -> int:
        """An unsigned 32-bit number."""
        return self.unpack("I", what)

    def u64(self, what: str) -> int:
        """An unsigned 64-bit number."""
        return self.unpack("Q", what)

    def f32(self, what: str) -> float:
        """A single-precision number."""
        return self.unpack("f", what)

    def f64(self, what: str) -> float:
        """A double-precision number."""
        return self.unpack("d", what)

    def bytes(self, nbytes: int, what: str) -> bytes:
        """`nbytes` bytes, copied."""
        pos = self.need(nbytes, what)
        return self._buffer[pos : pos + nbytes]

    def count(self, what: str, item_bytes: int, limit: int | None = None) -> int:
        """A u64 count of items that take at least `item_bytes` each; more than the bytes left can hold is an error."""
        pos = self.pos
        count = self.u64(what)
        if count > self.left // item_bytes:
            raise self.file.error(
                f"{what} is {count}, but the {self.left} bytes left hold at most {self.left // item_bytes}",
                offset=pos,
                limit=self.end,
            )
        if limit is not None and count > limit:
            raise self.file.error(f"{what} is {count}; the limit is {limit}", offset=pos, limit=limit)
        return count

    def string(self, what: str, limit: int | None = None) -> str:
        """A u64 length and that many bytes of UTF-8."""
        pos = self.pos
        length = self.count(f"the length of {what}", 1, limit)
        raw = self.bytes(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as exc:
            raise self.file.error(f"{what} is not valid UTF-8: {exc.reason}", offset=pos + 8 + exc.start) from None

    def strings(self, count: int, what: str) -> Sequence[str]:
        """`count` strings (u64 length, UTF-8): a list, or where they are many, a sequence that makes them when they are asked for."""
        out, pos = read_strings(self.file.data, self.pos, self.end, count)
        if len(out) == count:
            self.pos = pos
            return list(out) if count < MANY_STRINGS else out
        left = self.end - pos - 8  # of the first that cannot be read
        length = int.from_bytes(self._buffer[pos : pos + 8], "little") if left >= 0 else 0
        if 0 <= length <= left:
            try:
                self._buffer[pos + 8 : pos + 8 + length].decode("utf-8")
            except UnicodeDecodeError as exc:
                raise self.file.error(
                    f"{what}[{len(out)}] is not valid UTF-8: {exc.reason}", offset=pos + 8 + exc.start
                ) from None
        raise self.file.error(
            f"{what}[{len(out)}] of {count} strings reaches past the end of the file", offset=pos, limit=self.end
        )

    def array(self, dtype: np.dtype, count: int, what: str) -> np.ndarray:
        """`count` numbers as a read-only view of the file ([count], perhaps unaligned)."""
        if count > self.left // dtype.itemsize:
            raise self.file.error(
                f"{what} has {count} values of {dtype.itemsize} bytes, but only {self.left} bytes are left",
                offset=self.pos,
                limit=self.end,
            )
        pos = self.need(count * dtype.itemsize, what)
        return self.file.data[pos : pos + count * dtype.itemsize].view(dtype)
