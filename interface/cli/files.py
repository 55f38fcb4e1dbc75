"""Files that a command reads or writes because an option names them.

What cannot be read is a wrong option. What is written is checked before the work, and is there whole or not at all: what cannot be written
is an error with the folder and the way out, before minutes of work go into it.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from ..core.errors import FastLLMError, UsageError

__all__ = ["MAX_BYTES", "check_new", "check_place", "made_folder", "read_json", "read_text", "unwritable", "write_text"]

MAX_BYTES = 16 << 20  # of a text that an option names


def read_text(option: str, path: Path, limit: int = MAX_BYTES) -> str:
    """The text of the file or pipe that an option names. Raises UsageError for one that is not there, a folder, a device, too large, or not
    in UTF-8, and for a pipe that nothing comes out of."""
    again = f"name another file with {option}"
    try:
        data = _bytes(option, path, limit, again)
        if len(data) > limit:
            raise UsageError(f"{option} {path} has more than {limit:,} bytes", who=option, fix=again)
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{option} {path} is not text in UTF-8: byte {error.start}", who=option, fix=f"save it as UTF-8, or {again}") from None
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be read: {error.strerror or error}", who=option, fix=f"check the path, or {again}") from None


def _bytes(option: str, path: Path, limit: int, again: str) -> bytes:
    """At most limit + 1 bytes. A pipe is opened without waiting: one that nobody has opened for writing ends at once instead of never."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        kind = "a folder" if stat.S_ISDIR(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
        raise UsageError(f"{option} {path} is {kind}, no file", who=option, fix=again)
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:
        os.set_blocking(stream.fileno(), True)
        data = stream.read(limit + 1)
    if not data and stat.S_ISFIFO(mode):
        raise UsageError(f"{option} {path} is a pipe, and nothing came out of it", who=option, fix=f"start first what writes to it, or {again}")
    return data


def read_json(option: str, path: Path) -> Any:
    """The JSON in the file that an option names. Raises UsageError as `read_text`, and for what is no JSON."""
    text = read_text(option, path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{option} {path} is not JSON: {error}", who=option, fix=f"correct it, or name another file with {option}") from None


def unwritable(option: str, path: Path, error: OSError) -> FastLLMError:
    """The error for a file or folder of an option that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = f"free some space, or name a place on another disk with {option}"
    elif error.errno == errno.ENOENT and not path.parent.exists():
        fix = f"make the folder first (mkdir -p {path.parent}), or name another place with {option}"
    else:
        fix = f"name a place that you may write to with {option}"
    return FastLLMError(f"{option} {path} cannot be written: {error.strerror or error}", who=str(path), fix=fix)


def check_new(option: str, path: Path, overwrite: bool) -> None:
    """Raises UsageError for an output that is there already (unless it may be replaced), FastLLMError for a place that cannot be written."""
    if path.is_dir():
        raise UsageError(f"{option} {path} is a folder", who=option, fix=f"name a file in it: {option} {path / 'NAME'}")
    if os.path.lexists(path) and not overwrite:
        raise UsageError(f"{path} exists", who=option, fix="--overwrite replaces it; or name another file")
    check_place(option, path)


def check_place(option: str, path: Path) -> None:
    """Raises FastLLMError if the folder of a file that will be written is not there or may not be written to."""
    folder = path.parent
    try:
        os.stat(folder)
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    except OSError as error:
        raise unwritable(option, path, error) from None


def made_folder(option: str, folder: Path) -> Path:
    """The folder of an option, made if need be. Raises FastLLMError for one that cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(option, folder, error) from None
    check_place(option, folder / "NAME")
    return folder


def write_text(option: str, path: Path, text: str) -> None:
    """Writes a file under another name, which it then takes. Raises FastLLMError; nothing half-written is left."""
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(option, path, error) from None
