"""Files that a command writes because somebody named them: checked before the work, written whole or not at all.

What cannot be written is an error with the folder and the way out, before minutes of work go into it.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ..core.errors import FastLLMError, UsageError

__all__ = ["check_new", "check_place", "made_folder", "unwritable", "write_text"]


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
