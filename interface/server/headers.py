"""Headers of answers, as /openapi.json publishes them; the tests hold every answer to them. Used by `openapi`."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["HEADERS"]


def _text(said: str, **more: Any) -> dict[str, Any]:
    return {"description": said, "schema": {"type": "string", **more}}


HEADERS: Final[dict[str, dict[str, Any]]] = {
    "x-request-id": _text("The request's own id, or one that was made; it is in the log.", pattern="^[!-~]{1,128}$"),
    "request-id": _text("The same."),
    "x-content-type-options": _text("Always the same.", const="nosniff"),
    "retry-after": {"description": "Seconds to wait; not where a retry cures nothing.", "schema": {"type": "integer", "minimum": 1}},
    "x-should-retry": _text("The same request would fail again.", const="false"),
    "www-authenticate": _text("How a key is sent.", const="Bearer"),
    "allow": _text("Methods."),
    "x-fastllm-ignored": _text("Fields without effect."),
    "x-fastllm-warning": _text("What was done otherwise than asked."),
    "x-fastllm-seed": {"description": "The seed that was used.", "schema": {"type": "integer"}},
    "cache-control": _text("Whether the answer may be kept."),
    "x-accel-buffering": _text("Of a stream: a proxy must not collect it.", const="no"),
    "access-control-allow-origin": _text("The page's origin, where an option allows it."),
    "access-control-expose-headers": _text("What such a page may read."),
    "access-control-allow-methods": _text("What such a page may ask."),
    "access-control-allow-headers": _text("What such a page may send."),
    "access-control-max-age": {"description": "Seconds for which that holds.", "schema": {"type": "integer"}},
    "vary": _text("Headers of the request on which the answer depends."),
    "etag": _text("The content, for If-None-Match."),
    "content-encoding": _text("Where the request accepts it.", const="gzip"),
    "content-security-policy": _text("What the page may load."),
    "x-frame-options": _text("The page is in no frame.", const="DENY"),
    "referrer-policy": _text("The page names no address.", const="no-referrer"),
    "cross-origin-opener-policy": _text("The page's window is its own.", const="same-origin"),
    "cross-origin-resource-policy": _text("The page's files are its own.", const="same-origin"),
    "permissions-policy": _text("Devices that the page may not use."),
}
