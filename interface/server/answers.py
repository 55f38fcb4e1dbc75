"""What all answers share: ids, the head of an object, and errors as each interface words them."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from pydantic import ValidationError

from ..core.errors import FastLLMError, http_types

__all__ = ["ERROR_FIELDS", "Identity", "describe", "error_body", "error_headers", "fingerprint", "is_fault", "public_message"]

ERROR_FIELDS: Final = ("n_prompt_tokens", "n_ctx")  # of an error, that clients may read
RETRIED: Final = (408, 409, 429)  # and everything from 500 on: what the clients' libraries send again


@cache
def fingerprint() -> str:
    """`system_fingerprint`: the version that answers."""
    from importlib.metadata import version

    return f"b-fastllm-{version('fastllm-engine')}"


@dataclass
class Identity:
    """What every chunk of an answer repeats."""

    prefix: str
    model: str
    request_id: str
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = ""

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}{secrets.token_hex(12)}"

    def head(self, kind: str) -> dict[str, Any]:
        """The first members of an OpenAI object."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "system_fingerprint": fingerprint()}


def is_fault(error: FastLLMError) -> bool:
    """Something broke inside: the client is told no more than that, the log everything."""
    return error.http_status >= 500 and error.http_status not in (501, 503)


def describe(error: BaseException) -> str:
    """An error without the values that a validation complains about: they are a client's, or the model's."""
    if not isinstance(error, ValidationError):
        return f"{type(error).__name__}: {error}"
    faults = (f"{'.'.join(map(str, fault['loc']))} {fault['type']}".strip() for fault in error.errors(include_url=False, include_context=False, include_input=False))
    return f"{type(error).__name__}: {error.title}: {', '.join(faults)}"


def public_message(error: FastLLMError, request_id: str) -> str:
    """What a client may read. An inner fault may name files and addresses of this machine: it stays in the log."""
    if is_fault(error):
        return f"the server failed on this request; its log has the cause under the request id {request_id}"
    text = (error.message or error.code).rstrip(".")
    return f"{text}. Fix: {error.fix.rstrip('.')}." if error.fix else f"{text}."


def error_body(error: FastLLMError, request_id: str, *, anthropic: bool = False) -> dict[str, Any]:
    """The JSON of an error."""
    message, kinds = public_message(error, request_id), http_types(error.http_status)
    if anthropic:
        return {"type": "error", "error": {"type": kinds[1], "message": message}, "request_id": request_id}
    more = {name: error.fields[name] for name in ERROR_FIELDS if name in error.fields}
    code = None if error.code == kinds[0] else error.code
    return {"error": {"message": message, "type": kinds[0], "param": error.fields.get("param"), "code": code, **more}}


def error_headers(error: FastLLMError) -> dict[str, str]:
    """Headers that go with an error."""
    headers, status = {}, error.http_status
    if not (status in RETRIED or status >= 500) or status == 501 or "never" in error.fields:
        headers["x-should-retry"] = "false"
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if "allow" in error.fields:
        headers["allow"] = error.fields["allow"]
    if status in (429, 503) and "never" not in error.fields:
        headers["retry-after"] = str(error.fields.get("retry_after_s", 1))
    return headers
