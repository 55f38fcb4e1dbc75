"""The log: one line for each request, without keys, and without prompts and answers unless asked; and the cause of each inner fault.

Lines go to stderr, as text or as JSON. What comes from clients is escaped, so that a line cannot be forged.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from typing import Any

from ..core.errors import FastLLMError, one_line
from .answers import describe
from .gate import Visit

__all__ = ["Log"]

QUIET = frozenset({"/live", "/health", "/ready", "/metrics"})  # polled many times a minute; logged when they fail


class Log:
    """as_json: one JSON object a line. prompts: with what clients asked and got. stream: where to, stderr by default."""

    def __init__(self, as_json: bool = False, stream: Any = None, prompts: bool = False):
        self._as_json, self._stream, self._prompts = as_json, stream, prompts

    def _write(self, entry: dict[str, Any]) -> None:
        stream = sys.stderr if self._stream is None else self._stream
        entry = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **entry}
        if self._as_json:
            line = json.dumps(entry)
        else:
            head = [str(entry.pop(name)) for name in ("time", "event")]
            line = " ".join([*head, *(f"{key}={one_line(str(value))}" for key, value in entry.items())])
        try:
            stream.write(line + "\n")
            stream.flush()
        except (OSError, ValueError):
            pass  # nobody reads the log; the requests go on

    def event(self, event: str, **fields: Any) -> None:
        """Something of the server's own life."""
        self._write({"event": event, **fields})

    def access(self, visit: Visit) -> None:
        """A request has been answered, or its client has gone."""
        if visit.path in QUIET and visit.status < 400:
            return
        entry: dict[str, Any] = {"event": "request", "id": visit.request_id, "method": visit.method, "path": visit.path[:200]}
        entry["status"] = visit.status or 499
        if visit.code:
            entry["code"] = visit.code
        generation = visit.generation
        if generation is not None:
            usage = generation.usage()
            entry |= {"prompt_tokens": usage.prompt_tokens, "cached": usage.cached_tokens, "tokens": usage.completion_tokens}
            entry |= {"queue_s": round(usage.timings.queue_s, 4), "ttft_s": round(usage.timings.ttft_s, 4)}
            if self._prompts:
                entry["prompts"] = [generation.tokenizer.decode(p.tolist(), skip_special=False) for p in generation.ready.prompts]
                entry["answers"] = [answer.text for answer in generation.answers]
            entry["end"] = "cancelled" if generation.cancelled else "error" if generation.error else "done"
        entry["total_s"] = round(time.monotonic() - visit.started_at, 4)
        self._write(entry)

    def fault(self, visit: Visit, error: BaseException) -> None:
        """An inner fault, with all that a client is not told."""
        told, shown = "".join(traceback.format_exception(error)).rstrip(), set[BaseException]()
        cause: BaseException | None = error
        while cause is not None and cause not in shown:
            shown.add(cause)
            told = told.replace(f"{type(cause).__name__}: {cause}", describe(cause))
            cause = cause.__cause__ or cause.__context__
        entry = {"event": "fault", "id": visit.request_id, "path": visit.path[:200], "error": told}
        why = error.why if isinstance(error, FastLLMError) else ""
        self._write({**entry, "why": why} if why else entry)
