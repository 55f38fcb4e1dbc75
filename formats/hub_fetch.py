"""Fetching from the hub: which files, into which folder, several at the same time, and errors that say what to do.

The hub's own library moves the bytes: it resumes, locks and knows tokens and mirrors. All files come from one commit, and their sizes are
checked. Called by `hub_source.resolve_repo` when a model is not in the cache.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..core.errors import DownloadError, FastLLMError, ModelNotFound, UsageError
from .cache import Hooks, check_space, disk_errors
from .hub_source import COMMIT, FetchOptions, Repo, hub_cache, needed_files
from .reader import shown

__all__ = ["fetch_repo"]


def fetch_repo(repo: Repo, cache_dir: str | os.PathLike[str] | None, hooks: Hooks, how: FetchOptions) -> Path:
    """Fetches what is missing of a repository; returns its folder, or the GGUF file. Raises as `hub_source.resolve_repo`."""
    import huggingface_hub

    cache, folder, token = hub_cache(cache_dir), repo.folder(cache_dir), _checked_token(how.token)
    with _hub_errors(repo, cache, token=token):
        info = huggingface_hub.HfApi(token=token).model_info(repo.id, revision=repo.revision, files_metadata=True)
    sizes: dict[str, int] = {s.rfilename: int(s.size or 0) for s in info.siblings or []}
    commit = str(info.sha)
    _check_answer(repo, commit, sizes)
    names = _chosen_files(repo, sizes, how)
    local = how.local_dir
    snapshot = folder / "snapshots" / commit if local is None else local
    place, parts = (cache, folder / "blobs") if local is None else (local, local / ".cache" / "huggingface" / "download")
    missing = [n for n in names if local is not None or not (snapshot / n).exists()]
    with disk_errors("the folder for the files", place):
        place.mkdir(parents=True, exist_ok=True)
    check_space(place, sum(sizes[n] for n in missing if not (snapshot / n).exists()), repo.label)
    total = sum(sizes[n] for n in missing)
    where: dict[str, Any] = {"cache_dir": str(cache)} if local is None else {"local_dir": str(local)}

    def fetch(name: str) -> int:
        with _hub_errors(repo, place, sizes[name], token):
            path = Path(huggingface_hub.hf_hub_download(repo.id, name, revision=commit, token=token, **where))
        if sizes[name] and path.stat().st_size != sizes[name]:
            got = path.stat().st_size
            os.unlink(path.resolve())
            raise DownloadError(
                f"{name} has {got} bytes, the hub says {sizes[name]}", who=repo.label, fix="try again: what came was removed"
            )
        return sizes[name]

    done = [0]  # bytes of whole files
    with _quiet(), _watched(parts, done, total, repo.file or repo.id, hooks):
        for name, size in _at_once(fetch, missing, how.jobs):
            done[0] += size
            hooks.progress(done[0], total, name)
    for name in names:
        if name.upper().startswith(("LICEN", "NOTICE", "USE_")):
            with contextlib.suppress(OSError):
                hooks.licence(f"{repo.id}: {name}", (snapshot / name).read_text("utf-8", "replace"))
    if local is None and not COMMIT.fullmatch(repo.revision):
        _write_ref(folder / "refs" / repo.revision, commit)
    gguf = names[0].endswith(".gguf") and (not how.include or len(names) == 1)
    return snapshot / names[0] if gguf else snapshot


def _checked_token(given: str | None) -> str | None:
    """The token without blanks around it; None for none, and the hub's library then takes its own. Raises UsageError, which does not
    show it, for what no HTTP header can hold: the error of the HTTP library does."""
    token = (given or "").strip()
    if token and not re.fullmatch(r"[!-~]+", token):
        raise UsageError("the token of the hub holds a blank, a control character or one that is not ASCII", who="--token, HF_TOKEN", fix="copy it again")
    return token or None


def _check_answer(repo: Repo, commit: str, names: Iterable[str]) -> None:
    """Raises DownloadError where what a hub says would be a path out of the folder of the model."""
    bad = [n for n in names if n.startswith("/") or "\\" in n or "\0" in n or ".." in n.split("/")]
    bad += [] if COMMIT.fullmatch(commit) else [commit]
    if bad:
        raise DownloadError(
            f"{_endpoint().split('//')[-1]} names {shown(bad[0])}, which is no file or commit of a repository",
            who=repo.label,
            fix="check HF_ENDPOINT: nothing was fetched",
        )


def _write_ref(path: Path, commit: str) -> None:
    """Notes which commit a branch or tag was, as the hub's library does when it is asked by branch."""
    with disk_errors(path.name, path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part-{os.getpid()}")
        part.write_text(commit, "ascii")
        part.replace(path)


def _at_once(fetch: Callable[[str], int], names: list[str], jobs: int) -> Iterator[tuple[str, int]]:
    """(name, fetch(name)) of each, so many at the same time, as they end; raises the first error. In daemon threads: whoever is
    interrupted, or has seen an error, does not wait for the rest, and no further file is begun."""
    if jobs == 1 or len(names) < 2:
        yield from ((name, fetch(name)) for name in names)
        return
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    ended: queue.SimpleQueue[tuple[str, int | BaseException]] = queue.SimpleQueue()
    stopped = threading.Event()
    for name in names:
        waiting.put(name)

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while not stopped.is_set():
                name = waiting.get_nowait()
                try:
                    ended.put((name, fetch(name)))
                except BaseException as error:
                    ended.put((name, error))
                    return

    for _ in range(min(jobs, len(names))):
        threading.Thread(target=work, name="fastllm-download", daemon=True).start()
    try:
        for _ in names:
            name, result = ended.get()
            if isinstance(result, BaseException):
                raise result
            yield name, result
    finally:
        stopped.set()


@contextlib.contextmanager
def _watched(blobs: Path, done: list[int], total: int, label: str, hooks: Hooks) -> Iterator[None]:
    """Calls progress five times a second from a thread, by the sizes of the files that grow below a folder. done: [bytes of whole files]."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.2):
            with contextlib.suppress(OSError):
                growing = sum(p.stat().st_size for p in blobs.rglob("*.incomplete"))
                hooks.progress(min(done[0] + growing, total), total, label)

    thread = threading.Thread(target=watch, name="fastllm-download-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Switches the hub library's own progress bars off: ours is shown instead."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextlib.contextmanager
def _hub_errors(repo: Repo, cache: Path, needed: int | None = None, token: str | None = None) -> Iterator[None]:
    from huggingface_hub import errors

    try:
        yield
    except FastLLMError:
        raise
    except errors.GatedRepoError:
        raise DownloadError(
            f"{repo.id} is gated: its owner wants you to accept terms first",
            who=repo.label,
            fix=f"accept them on the model's page, then run `hf auth login`, or set HF_TOKEN; page: {_endpoint()}/{repo.id}",
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelNotFound(
            f"{repo.id} has no revision {shown(repo.revision)}", who=repo.label, fix="check the branch, tag or commit"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelNotFound(
            f"the hub has no model {shown(repo.id)}, or it is private",
            who=repo.label,
            fix="check the name; for a private one run `hf auth login`",
        ) from None
    except Exception as exc:  # the library raises errors of several HTTP packages, which change with its version
        if isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            with disk_errors(repo.label, cache, needed):  # of the disk, not of the network, whose errors are OSErrors too
                raise
        reason: Any = exc
        while isinstance(reason, Exception) and reason.__cause__ is not None:
            reason = reason.__cause__
        text = re.sub(r"(?is)\bbearer .*", "Bearer …", str(reason))  # the library may have read a token of its own
        text = text.replace(token, "…") if token else text
        raise DownloadError(
            f"{repo.label} could not be downloaded from {_endpoint().split('//')[-1]}",
            who=repo.label,
            why=f"{type(reason).__name__}: {shown(text, 200)}",
            fix="check the network and the proxy, then run it again: it goes on where it stopped",
        ) from None


def _endpoint() -> str:
    return re.sub(r"//[^/@]*@", "//", os.environ.get("HF_ENDPOINT", "https://huggingface.co")).rstrip("/")


def _chosen_files(repo: Repo, names: Iterable[str], how: FetchOptions) -> list[str]:
    """The files to fetch, under the patterns. Raises as `needed_files`, and UsageError for patterns that leave nothing."""
    kept = [n for n in names if not any(fnmatchcase(n, p) for p in how.exclude)]
    if not how.include:
        return needed_files(repo, kept)
    found = [n for n in kept if any(fnmatchcase(n, p) for p in how.include)]
    if not found:
        raise UsageError(f"no file of {repo.id} matches {', '.join(how.include)}", who=repo.label, why=f"it has {', '.join(kept[:12])}", fix="name other patterns")
    return found
