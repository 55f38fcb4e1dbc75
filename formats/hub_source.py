"""Models of the Hugging Face hub: `hf:ORG/NAME[@REV][:FILE]`, or plain `ORG/NAME`.

The hub's own library downloads into the hub's own cache (HF_HOME and HF_ENDPOINT are honoured), so files are shared with
other programs, resumed and locked there. This module says which files are needed, pins all of them to one commit, checks
their sizes, and finds a cached model again without loading that library (which takes half a second) and without network.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import DownloadError, FastLLMError, ModelNotFound, UnsupportedError, UsageError
from .cache import CachedModel, Hooks
from .json_text import read_json
from .reader import shown

__all__ = ["FetchOptions", "Repo", "cached_repos", "hub_cache", "needed_files", "parse_repo", "resolve_repo"]

INDEX = "model.safetensors.index.json"
SMALL_FILES = frozenset(
    "config.json generation_config.json tokenizer.json tokenizer.model tokenizer_config.json special_tokens_map.json "
    "added_tokens.json chat_template.jinja LICENSE LICENSE.md LICENSE.txt LICENCE NOTICE USE_POLICY.md".split()
)
SPLIT = re.compile(r"(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.(?P<kind>gguf|safetensors)", re.DOTALL)
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Repo:
    """What was asked for. id: ORG/NAME; revision: branch, tag or commit; file: "" for the whole model."""

    id: str
    revision: str = "main"
    file: str = ""

    @property
    def label(self) -> str:
        """As the user would type it."""
        return (
            f"hf:{self.id}" + (f"@{self.revision}" if self.revision != "main" else "") + (f":{self.file}" if self.file else "")
        )

    def folder(self, cache_dir: str | os.PathLike[str] | None) -> Path:
        """The repository's folder in the hub cache."""
        return hub_cache(cache_dir) / f"models--{self.id.replace('/', '--')}"


@dataclass(frozen=True)
class FetchOptions:
    """How files are fetched. include, exclude: patterns (`*.gguf`) of the repository's files, in place of those that the model needs, and
    not those; local_dir: a folder to put them in, in place of the cache; token: of the hub; jobs: files at the same time."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    local_dir: Path | None = None
    token: str | None = None
    jobs: int = 4

    @property
    def chooses(self) -> bool:
        """Whether it is not simply the model."""
        return bool(self.include or self.exclude)


def parse_repo(text: str, revision: str | None = None) -> Repo:
    """`ORG/NAME[@REV][:FILE]`; `revision` is the same as @REV. Raises UsageError."""
    match = re.fullmatch(r"(?P<id>[\w.-]{1,96}/[\w.-]{1,96})(@(?P<rev>[\w./-]{1,128}))?(:(?P<file>[\w ./+-]{1,255}))?", text)
    if not match or ".." in text or "//" in text or (match["file"] or "").startswith("/"):
        raise UsageError(
            f"{shown('hf:' + text)} is no repository of the hub",
            fix="write hf:ORG/NAME, hf:ORG/NAME@REVISION or hf:ORG/NAME:FILE",
        )
    if (revision is not None and not re.fullmatch(r"[\w./-]{1,128}", revision)) or ".." in (revision or ""):
        raise UsageError(f"{shown(revision)} is no revision", fix="give a branch, a tag or a commit")
    if match["rev"] and revision and match["rev"] != revision:
        raise UsageError(f"two revisions: {match['rev']} in the name, {revision} as option", fix="give one of them")
    return Repo(match["id"], match["rev"] or revision or "main", match["file"] or "")


def resolve_repo(
    repo: Repo,
    *,
    offline: bool,
    cache_dir: str | os.PathLike[str] | None = None,
    refresh: bool = False,
    hooks: Hooks | None = None,
    how: FetchOptions | None = None,
) -> Path:
    """The folder (or GGUF file) of the repository in the hub cache, or in `how.local_dir`; fetched if it is not there.

    Raises ModelNotFound (no such repository, revision or file), UsageError (several GGUF files and none named),
    UnsupportedError (only pickled weights), DownloadError.
    """
    hooks, how = hooks or Hooks(), how or FetchOptions()
    found = None if (refresh and not offline) or how.chooses or how.local_dir is not None else _cached(repo, cache_dir, hooks)
    if found is not None:
        return found
    if offline or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        raise DownloadError(
            f"{repo.label} is not complete in the cache, and downloads are off",
            who=str(repo.folder(cache_dir)),
            why="FASTLLM_OFFLINE or HF_HUB_OFFLINE is set, or --offline was given",
            fix=f"once with network: fastllm download {repo.label}",
        )
    from .hub_fetch import fetch_repo  # which most starts do without

    return fetch_repo(repo, cache_dir, hooks, how)


def needed_files(repo: Repo, names: Iterable[str]) -> list[str]:
    """Those of the repository's files that running the model needs; the first one names the model.

    Raises as `resolve_repo`.
    """
    names = list(names)
    ggufs = [n for n in names if n.endswith(".gguf")]
    extra = [n for n in names if n in SMALL_FILES and n.upper().startswith(("LICEN", "NOTICE", "USE_"))]
    if repo.file:
        if repo.file not in names:
            close = difflib.get_close_matches(repo.file, names, 4, 0.4)
            raise ModelNotFound(
                f"{repo.id} has no file {shown(repo.file)}",
                who=repo.label,
                why="it has " + ", ".join(close or ggufs[:8] or names[:8]),
                fix=f"name one of them: hf:{repo.id}:{(close or ggufs or ['FILE'])[0]}",
            )
        if not repo.file.endswith(".gguf"):
            raise UsageError(f"{shown(repo.file)} is no GGUF file", who=repo.label, fix=f"name the whole model: hf:{repo.id}")
        return _whole_set(repo.file, names) + extra
    if "config.json" in names and (INDEX in names or "model.safetensors" in names):
        weights = [INDEX, *(n for n in names if _is_shard(n))] if INDEX in names else ["model.safetensors"]
        return ["config.json", *(n for n in names if n in SMALL_FILES and n != "config.json"), *weights]
    models = [n for n in ggufs if not (m := SPLIT.fullmatch(n)) or m["no"] == "00001"]
    if len(models) == 1:
        return _whole_set(models[0], names) + extra
    if models:
        listed = ", ".join(models[:12]) + (f" and {len(models) - 12} more" if len(models) > 12 else "")
        raise UsageError(
            f"{repo.id} has {len(models)} GGUF files; say which",
            who=repo.label,
            why=f"it has {listed}",
            fix=f"hf:{repo.id}:{models[0]}",
        )
    if any(n.endswith((".bin", ".pt", ".pth")) for n in names):
        raise UnsupportedError(
            f"{repo.id} has only pickled weights, which are never opened",
            who=repo.label,
            why="a pickle can run any code when it is loaded",
            fix="look for a safetensors or GGUF version of the model",
        )
    raise ModelNotFound(
        f"{repo.id} holds no model: neither safetensors with config.json nor GGUF", who=repo.label, fix="check the name"
    )


def cached_repos(cache_dir: str | os.PathLike[str] | None = None) -> list[CachedModel]:
    """The complete models in the hub cache: one per GGUF file or folder, of the branches and tags that were fetched."""
    out = []
    for folder in sorted(hub_cache(cache_dir).glob("models--*--*")):
        repo_id = folder.name.removeprefix("models--").replace("--", "/", 1)
        for ref in sorted(p for p in (folder / "refs").rglob("*") if p.is_file()):
            revision = str(ref.relative_to(folder / "refs"))
            snapshot = _snapshot(Repo(repo_id, revision), cache_dir)
            if snapshot is None:
                continue
            if _folder_complete(snapshot):
                size = sum(p.stat().st_size for p in snapshot.glob("*.safetensors"))
                out.append(CachedModel(Repo(repo_id, revision).label, snapshot, size, f"hf:{repo_id}", "see the model's page"))
            for path in sorted(snapshot.rglob("*.gguf")):
                name = str(path.relative_to(snapshot))
                split = SPLIT.fullmatch(name)
                if path.exists() and (not split or split["no"] == "00001") and not _absent(snapshot, name):
                    size = sum((snapshot / n).stat().st_size for n in _set_names(name))
                    out.append(
                        CachedModel(Repo(repo_id, revision, name).label, path, size, f"hf:{repo_id}", "see the model's page")
                    )
    return out


# The hub's cache -------------------------------------------------------------------------------------------------------


def hub_cache(cache_dir: str | os.PathLike[str] | None) -> Path:
    """The folder in which the hub's library keeps repositories."""
    if cache_dir:
        return Path(cache_dir) / "hub"
    for variable, below in (("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")):
        if os.environ.get(variable):
            return Path(os.path.expanduser(os.environ[variable])) / below
    return Path(os.path.expanduser("~")) / ".cache" / "huggingface" / "hub"


def _snapshot(repo: Repo, cache_dir: str | os.PathLike[str] | None) -> Path | None:
    folder, commit = repo.folder(cache_dir), repo.revision
    if not COMMIT.fullmatch(commit):
        try:
            commit = (folder / "refs" / repo.revision).read_text("ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None
    snapshot = folder / "snapshots" / commit
    return snapshot if COMMIT.fullmatch(commit) and snapshot.is_dir() else None


def _cached(repo: Repo, cache_dir: str | os.PathLike[str] | None, hooks: Hooks) -> Path | None:
    snapshot = _snapshot(repo, cache_dir)
    if snapshot is None:
        return None
    if repo.file:
        return snapshot / repo.file if not _absent(snapshot, repo.file) else None
    if _folder_complete(snapshot):
        return snapshot
    names = [str(p.relative_to(snapshot)) for p in snapshot.rglob("*.gguf")]
    models = [n for n in names if not (m := SPLIT.fullmatch(n)) or m["no"] == "00001"]
    if (snapshot / "config.json").exists() or len(models) != 1 or _absent(snapshot, models[0]):
        return None
    hooks.notice(f"{repo.label}: using the one GGUF file in the cache, {models[0]}; name it as hf:{repo.id}:FILE to be exact")
    return snapshot / models[0]


def _folder_complete(snapshot: Path) -> bool:
    def has(name: str) -> bool:
        return (snapshot / name).exists()

    if not has("config.json") or not (has("tokenizer.json") or has("tokenizer.model")):
        return False
    if not has(INDEX):
        return has("model.safetensors")
    try:
        weight_map = read_json(snapshot / INDEX, 100_000_000).get("weight_map")
    except FastLLMError:
        return False
    return isinstance(weight_map, dict) and all(
        isinstance(n, str) and ".." not in n and has(n) for n in set(weight_map.values())
    )


def _set_names(name: str) -> list[str]:
    match = SPLIT.fullmatch(name)
    if not match:
        return [name]
    return [f"{match['stem']}-{i:05d}-of-{match['count']}.{match['kind']}" for i in range(1, int(match["count"]) + 1)]


def _absent(snapshot: Path, name: str) -> list[str]:
    return [n for n in _set_names(name) if not (snapshot / n).exists()]


def _whole_set(name: str, names: list[str]) -> list[str]:
    wanted = _set_names(name)
    missing = [n for n in wanted if n not in names]
    if missing:
        raise DownloadError(
            f"the repository lacks {len(missing)} of {len(wanted)} files of the set: {', '.join(missing[:8])}",
            who=name,
            fix="tell the repository's owner, or choose another file",
        )
    return wanted


def _is_shard(name: str) -> bool:
    return "/" not in name and name.startswith("model") and name.endswith(".safetensors") and name != "model.safetensors"
