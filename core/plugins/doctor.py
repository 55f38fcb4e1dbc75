"""A probe in a child process, for `fastllm doctor`: a driver that crashes or hangs becomes a line of the report.

The child is `python -m fastllm.core.plugins NAME`; it finds plug-ins again by itself, and answers with one line of JSON.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ChildProbe", "probe_in_child"]


@dataclass(frozen=True)
class ChildProbe:
    """What became of a probe. outcome: answered | crashed | hung. state: BackendState.as_dict() if answered, with
    `environment` if ready, else {}. detail: the
    signal or exit status and, where known, the place in the code; noise: what the plug-in printed."""

    name: str
    outcome: str
    state: dict[str, Any] = field(default_factory=dict)
    detail: str = ""
    noise: str = ""


def probe_in_child(
    name: str,
    timeout_s: float = 5.0,
    plugins_file: str | os.PathLike[str] | None = None,
    plugin_paths: Sequence[str | os.PathLike[str]] = (),
    env: Mapping[str, str] = os.environ,
) -> ChildProbe:
    """Loads and probes one backend in a child process with this process's import path. Never raises for what the plug-in does.

    timeout_s: seconds for start, import and probe together; then the child and what it started are killed.
    """
    arguments = ["--timeout", str(timeout_s)]
    if plugins_file is not None:
        arguments += ["--plugins-file", os.fspath(plugins_file)]
    for path in plugin_paths:
        arguments += ["--plugin", os.fspath(path)]
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    child = subprocess.Popen(
        # -P: the current folder is on the path only if it is on ours
        [sys.executable, "-P", "-X", "faulthandler", "-m", __package__, *arguments, "--", name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**env, "PYTHONPATH": path},
        start_new_session=True,
    )
    try:
        stdout, stderr = child.communicate(timeout=timeout_s)
        hung = False
    except subprocess.TimeoutExpired:
        _kill(child)
        stdout, stderr = child.communicate()
        hung = True
    except BaseException:  # Ctrl-C: the child is in a session of its own and would stay
        _kill(child)
        child.communicate()
        raise
    noise = stderr.decode("utf-8", "replace").strip()
    if hung:
        return ChildProbe(name, "hung", detail=_with_place(f"no answer within {timeout_s:g} s", noise), noise=noise)
    try:
        state = json.loads(stdout.decode("utf-8").splitlines()[-1])
    except (IndexError, ValueError):
        return ChildProbe(name, "crashed", detail=_with_place(_ended(child.returncode), noise), noise=noise)
    return ChildProbe(name, "answered", state, state.get("reason", ""), noise)


def _kill(child: subprocess.Popen[bytes]) -> None:
    if sys.platform == "win32":
        child.kill()
        return
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        child.kill()


def _ended(returncode: int) -> str:
    if returncode < 0:
        try:
            return f"the process died of {signal.Signals(-returncode).name}"
        except ValueError:
            return f"the process died of signal {-returncode}"
    return f"the process ended with status {returncode} before it answered"


def _with_place(what: str, noise: str) -> str:
    """Adds the innermost frame of the first stack that faulthandler printed, of code that is neither Python's own nor this loader's if there is one."""
    stack = re.search(r'most recent call first\):\n((?:  File .*\n?)+)', noise)
    if stack is None:
        return what
    frames = re.findall(r'File "([^"]+)", line (\d+)', stack[1])
    python, loader = os.path.dirname(os.__file__) + os.sep, os.path.dirname(__file__) + os.sep
    vendors = [f for f in frames if not f[0].startswith(loader) and (not f[0].startswith(python) or "-packages" in f[0]) and not f[0].startswith("<")]
    file, line = (vendors or frames)[0]
    return f"{what}   ({file}:{line})"
