"""Every error a user can meet: one hierarchy, mapped once to exit codes and once to HTTP statuses.

An error says *who* (the file, plug-in, request or option), *why* (what was found and what the limit is) and *fix* (what to
type or change). The command line prints the layout of `render()`; `--json` prints `as_dict()`; the server sends
`http_status`. Nothing in fastllm raises a bare `Exception` for something a user can cause.
"""

from __future__ import annotations

from typing import Any, Final

__all__ = [
    "AuthenticationError",
    "BackendBroken",
    "BackendDisabled",
    "BackendIncompatible",
    "BackendNotFound",
    "BackendUnavailable",
    "BodyTooLarge",
    "Cancelled",
    "ConfigError",
    "ContextOverflow",
    "DeviceLost",
    "DownloadError",
    "EngineError",
    "FastLLMError",
    "InvalidRequest",
    "InvalidSchema",
    "MethodNotAllowed",
    "ModelFileError",
    "ModelNotFound",
    "NotFound",
    "OutOfMemory",
    "PermissionDenied",
    "QueueFull",
    "RateLimited",
    "RequestTimeout",
    "ShapeError",
    "SwitchedOff",
    "TemplateError",
    "TokenizerError",
    "Unavailable",
    "UnsupportedContent",
    "UnsupportedError",
    "UnsupportedMedia",
    "UsageError",
    "http_types",
    "one_line",
    "told",
]

_HTTP_TYPES: Final = {
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    501: ("not_supported_error", "api_error"),
    503: ("unavailable_error", "overloaded_error"),
}
"""HTTP status -> `type` in an error of the OpenAI routes, and in one of the Anthropic routes. Every other 4xx is an invalid request."""


def http_types(status: int) -> tuple[str, str]:
    """The `type` of an answer with this status: (OpenAI's name, Anthropic's name)."""
    return _HTTP_TYPES.get(status, ("invalid_request_error",) * 2 if status < 500 else _HTTP_TYPES[500])


def one_line(text: str) -> str:
    """The text with every character that is not printable as its escape (`\\n`, `\\x1b`, `\\u202e`)."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class FastLLMError(Exception):
    """Base of all errors with a user-facing meaning.

    message: one sentence with real numbers. who: what it is about. why: the cause, when the message does not hold it. fix:
    what can be typed or changed. fields: machine-readable details for `--json` and HTTP bodies. Names, keys and values in the texts
    may come from a hostile file or request: line ends, terminal escapes, bidirectional marks and lone surrogates are escaped here,
    once for every message there is.
    """

    exit_code = 1
    http_status = 500
    code = "server_error"
    usual_fix = ""
    """What helps against most errors of a class: shown where an error knows nothing nearer. {backend}: of the fields, else NAME."""

    def __init__(self, message: str, *, who: str = "", why: str = "", fix: str = "", **fields: Any):
        self.message, self.who, self.why, self.fix = (one_line(text) for text in (message, who, why, fix))
        super().__init__(self.message)
        self.fields = fields

    @property
    def way_out(self) -> str:
        """The fix that is shown: its own, else the usual one of its class. What hands an error on sends `fix`, which stays empty."""
        return self.fix or self.usual_fix.replace("{backend}", one_line(str(self.fields.get("backend") or "NAME")))

    def render(self) -> str:
        """The text of the command line: `fastllm: error: …` and indented who/why/fix lines, no traceback."""
        head = f"fastllm: error: {self.message}"
        why = "" if self.why in self.message else self.why
        return "\n".join([head, *(f"  {k}: {v}" for k, v in (("who", self.who), ("why", why), ("fix", self.way_out)) if v)])

    def as_dict(self) -> dict[str, Any]:
        """The same fields for `--json`: {"error": {code, message, who, why, fix, exit_code, …fields}}."""
        body = {"code": self.code, "message": self.message, "who": self.who, "why": self.why, "fix": self.way_out}
        return {"error": {**body, "exit_code": self.exit_code, **self.fields}}


def told(error: FastLLMError, then: str) -> str:
    """An error that ends nothing, as one line. then: what is done all the same, or instead."""
    return f"{error.message}, {then}: {error.why}" + (f"; {error.fix}" if error.fix else "")


# 1: the thing itself failed -------------------------------------------------------------------------------------------


class ModelFileError(FastLLMError):
    """A model file is damaged, cut, inconsistent or not what its name says. Names file, offset or key, value and limit."""

    code = "model_file_error"
    usual_fix = "download the model again, or convert it with a current converter"


class TokenizerError(ModelFileError):
    """A vocabulary that is missing, inconsistent or of an unknown kind; never replaced by another one."""

    code = "tokenizer_error"


class TemplateError(FastLLMError):
    """A chat template that does not parse, refuses the messages, or exceeds its budget of time, steps or output."""

    http_status, code = 400, "template_error"


class DownloadError(FastLLMError):
    """A download that failed: no space, no network, a wrong length or hash. Nothing half-written keeps the final name."""

    code = "download_error"


class ContextOverflow(FastLLMError):
    """A prompt that leaves no room for one new token."""

    http_status, code = 400, "context_length_exceeded"


class OutOfMemory(FastLLMError):
    """An allocation or a plan does not fit. Fields: requested, free (bytes), kind. The backend stays usable."""

    http_status, code = 503, "out_of_memory"
    usual_fix = "close other programs or raise the limit of memory, or use a smaller --ctx, --kv-cache-size, --max-batch-size or model"


class EngineError(FastLLMError):
    """The engine could not run a step; the requests of that step fail, others go on."""

    code = "engine_error"


class DeviceLost(EngineError):
    """The device is gone (reset, unplugged, driver failure); running requests fail."""

    code = "device_lost"


class Cancelled(FastLLMError):
    """The request was cancelled, by its owner or because the engine closed."""

    http_status, code = 499, "cancelled"


class QueueFull(FastLLMError):
    """More requests wait than the limit allows; try again later."""

    http_status, code = 503, "queue_full"


class Unavailable(FastLLMError):
    """The server loads its model, drains, or has no process free: try again later (retry_after_s)."""

    http_status, code = 503, "unavailable"


class RateLimited(FastLLMError):
    """One key asks for more than its limit: try again later (retry_after_s)."""

    http_status, code = 429, "rate_limited"


# 2: the question was wrong --------------------------------------------------------------------------------------------


class UsageError(FastLLMError):
    """An option or argument that cannot be used as given."""

    exit_code, http_status, code = 2, 400, "usage_error"


class InvalidRequest(UsageError):
    """A request field of the wrong type or out of range; names the field and the range."""

    code = "invalid_request_error"


class InvalidSchema(InvalidRequest):
    """A schema, pattern or grammar that is not valid, too large, or cannot be enforced; a looser one is never taken instead."""

    code = "invalid_schema"


class UnsupportedContent(InvalidRequest):
    """Content that this model or server cannot take: images, audio, files, tools of the provider."""

    code = "unsupported_content"


class AuthenticationError(UsageError):
    """No key, a wrong one, two different ones, or one in the URL."""

    http_status, code = 401, "invalid_api_key"


class PermissionDenied(UsageError):
    """A foreign `Host` or `Origin` header."""

    http_status, code = 403, "permission_denied"


class NotFound(UsageError):
    """No such route, or no such thing under an id."""

    http_status, code = 404, "not_found"


class MethodNotAllowed(UsageError):
    """The route is there, for other methods (allow)."""

    http_status, code = 405, "method_not_allowed"


class RequestTimeout(UsageError):
    """A request body that stopped coming."""

    http_status, code = 408, "request_timeout"


class BodyTooLarge(UsageError):
    """A request body above the limit."""

    http_status, code = 413, "body_too_large"


class UnsupportedMedia(UsageError):
    """A request body that is not JSON by its headers, or is compressed."""

    http_status, code = 415, "unsupported_media_type"


class SwitchedOff(UsageError):
    """A route that an option has switched off."""

    http_status, code = 501, "not_supported"


class ConfigError(UsageError):
    """A configuration file (`plugins.toml`) with an unknown key or a wrong value; names file and line."""

    code = "config_error"


class ModelNotFound(UsageError):
    """No model of that name; lists close matches. Never a substitute."""

    http_status, code = 404, "model_not_found"


class BackendNotFound(UsageError):
    """No backend of that name; lists close matches."""

    code = "backend_not_found"


class BackendDisabled(UsageError):
    """The named backend is switched off by a variable or file, which is named."""

    code = "backend_disabled"


# 3, 4, 5: backends and support ----------------------------------------------------------------------------------------


class BackendBroken(FastLLMError):
    """A plug-in that fails to import, register, probe or open, or that collides with another of the same name."""

    exit_code, code = 3, "backend_broken"
    usual_fix = "fastllm doctor {backend} shows more; FASTLLM_DISABLE_PLUGINS={backend} runs without it"


class BackendIncompatible(BackendBroken):
    """A plug-in written for another major version of the operator interface; says which side to upgrade."""

    code = "backend_incompatible"


class BackendUnavailable(FastLLMError):
    """The plug-in is fine but its device or driver is not there."""

    exit_code, http_status, code = 4, 503, "backend_unavailable"
    usual_fix = "fastllm doctor shows what is missing; without --backend the best that is ready is taken"


class UnsupportedError(FastLLMError):
    """A model, op, dtype, format or range that cannot be run as asked; names the key and what is known."""

    exit_code, http_status, code = 5, 400, "unsupported"
    usual_fix = "use a model, file or option that is supported: docs/models.md"


class ShapeError(UnsupportedError):
    """Operands whose shapes or dtypes do not fit the op's rule in the catalogue."""

    code = "shape_error"
