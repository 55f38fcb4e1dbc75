"""How the harness talks to an engine: one JSON object a line, in on stdin, out on stdout. Runs in the peer's own environment, so it is plain
Python and imports nothing of fastllm.

    {"do": "load", "path": …, "threads": 2, "context": 4096, "streams": 8, "options": {}}  ->  {"result": {"version": …}}
    {"do": "prefill", "tokens": 512}                       ->  {"result": seconds until the first new token is known}
    {"do": "decode", "context": 0, "tokens": 32}           ->  {"result": seconds a token}
    {"do": "batch", "streams": 8, "tokens": 32}            ->  {"result": tokens per second of all streams}
    {"do": "memory"}                                       ->  {"result": peak resident bytes of the process}

A method that a worker does not have, or that raises, answers {"error": text}. Whatever the engine prints goes to stderr. Between two questions
the worker's process group is stopped.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
from pathlib import Path
from typing import Any

__all__ = ["Worker", "serve"]


class Worker:
    """An engine under measurement. Subclasses have `load`, `prefill`, `decode` and, if they can, `batch`."""

    def memory(self) -> int:
        """Peak resident bytes (VmHWM: of this program only, unlike getrusage after an exec)."""
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise OSError("/proc/self/status has no VmHWM")


PR_SET_PDEATHSIG = 1


def serve(worker: Worker) -> None:
    """Answers until stdin ends. Killed when the harness dies: a stopped process would not see its stdin end."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    questions, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # an engine that asks "press any key" gets none
    os.dup2(2, 1)
    for line in questions:
        message: dict[str, Any] = json.loads(line)
        method = getattr(worker, message.pop("do"), None)
        try:
            if method is None:
                raise NotImplementedError("this engine's worker cannot measure that")
            answer = {"result": method(**message)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
