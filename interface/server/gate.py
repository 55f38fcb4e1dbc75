"""The first thing every request meets: who it is, whether it may come in, and which route will run.

A plain ASGI layer, so that nothing is read or looked up before a key is checked, and so that every answer, also that of a defect, has a request id,
no traceback, and one line in the log. Which route runs is decided here once: authentication looks at that and not at what the client wrote.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
import time
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import parse_qs, urlsplit

from fastapi.requests import Request

from ..core.errors import (
    AuthenticationError,
    EngineError,
    FastLLMError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    PermissionDenied,
    Unavailable,
)
from .answers import describe, error_body, error_headers, is_fault
from .limits import KeyLimits
from .page import PATHS as PAGE
from .sse import Receive, Scope, Send, encode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

    from fastapi import FastAPI
    from fastapi.responses import Response
    from fastapi.routing import APIRoute

    from .runtime import Runtime

    Endpoint = Callable[[Request], Awaitable[Response]]
    Ends = Mapping[str, tuple[Endpoint, dict[str, str]]]

__all__ = ["MAX_CONNECTIONS", "MAX_HEADER", "PUBLIC", "Gate", "Visit", "broken", "send_error", "send_json"]

PUBLIC: Final = frozenset({"/live", "/health", "/ready"}) | PAGE
MAX_CONNECTIONS: Final = 1024
MAX_HEADER: Final = 16 << 10  # bytes of a request's target and headers
ALIASES: Final = {"/response": "/v1/responses"}  # without /v1 -> the route
_REQUEST_ID: Final = re.compile(r"[!-~]{1,128}")
_METHODS: Final = "GET, HEAD, POST, DELETE, OPTIONS"
_HEADERS: Final = ("authorization", "content-type", "x-api-key", "x-request-id", "anthropic-version", "anthropic-beta")
EXPOSED: Final = "x-request-id, request-id, x-should-retry, retry-after, x-fastllm-seed, x-fastllm-ignored, x-fastllm-warning"
"""Headers of an answer that a page of another origin may read; libraries ask two of them whether and when to send again."""
_HEADER_NAME: Final = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,64}")
MAX_ASKED: Final = 64  # headers of one preflight


class Visit:
    """What the log and the answer need to know of one request. generation: set by a route that generates. charge: takes so many answers
    from what the request's key may have, before they begin; raises RateLimited. anthropic: errors are worded as Anthropic's."""

    def __init__(self, request_id: str, method: str, path: str, *, anthropic: bool = False):
        self.anthropic = anthropic
        self.request_id, self.method, self.path = request_id, method, path
        self.started_at = time.monotonic()
        self.status = 0
        self.generation: Any = None
        self.code = ""
        self.close = False
        self.charge: Callable[[int], None] = lambda count: None


async def send_json(send: Send, status: int, body: Any, headers: dict[str, str]) -> None:
    """One JSON object as the whole answer."""
    raw = encode(body).encode("utf-8", "replace")
    head = {"content-type": "application/json", "content-length": str(len(raw)), **headers}
    await send({"type": "http.response.start", "status": status, "headers": [(k.encode(), v.encode("latin-1")) for k, v in head.items()]})
    await send({"type": "http.response.body", "body": raw})


async def send_error(send: Send, visit: Visit, error: FastLLMError, headers: dict[str, str] | None = None) -> None:
    """An error as the whole answer."""
    visit.code = error.code
    body = error_body(error, visit.request_id, anthropic=visit.anthropic)
    await send_json(send, error.http_status, body, {**error_headers(error), **(headers or {})})


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def _announces_body(scope: Scope) -> bool:
    return _values(scope, b"content-length") not in ([], ["0"]) or bool(_values(scope, b"transfer-encoding"))


class Gate:
    """ASGI: checks, then runs the route's endpoint itself: the way through FastAPI's application, which only describes the routes, has twenty frames more,
    and each thing that is waited for goes through all of them.

    app: with the routes, all of which are there.
    """

    def __init__(self, app: FastAPI, runtime: Runtime):
        self.app, self._runtime = app, runtime
        self._exact: dict[str, dict[str, Endpoint]] = {}  # path -> method -> endpoint
        self._patterns: list[tuple[re.Pattern[str], dict[str, Endpoint]]] = []
        for route in cast("list[APIRoute]", app.routes):
            ends = dict.fromkeys(route.methods or (), route.endpoint)
            if "{" in route.path:
                self._patterns.append((route.path_regex, ends))
            else:
                self._exact.setdefault(route.path, {}).update(ends)
        self._settings = runtime.settings
        self._limits = KeyLimits(self._settings.key_concurrent, self._settings.key_per_minute)
        self.set_keys(self._settings.keys)

    def set_keys(self, keys: Iterable[str]) -> None:
        """Replaces the accepted keys (SIGHUP)."""
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._limits.keep(self._keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        path, ends = self._route(scope["path"])
        known = path or scope["path"]
        theirs = known.startswith("/v1/messages") or (known.startswith("/v1/models") and bool(_values(scope, b"anthropic-version")))
        visit = Visit(self._request_id(scope), scope["method"], known, anthropic=theirs)
        scope["visit"] = visit
        if path is not None:
            scope = {**scope, "path": path, "raw_path": path.encode(), "root_path": ""}
        allowed_origin = self._named_origin(scope)  # also of what is refused: the page must be able to read why

        async def send_marked(message: Any) -> None:
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                more = {"x-request-id": visit.request_id, "request-id": visit.request_id, "x-content-type-options": "nosniff"}
                if allowed_origin:
                    more |= {"access-control-allow-origin": allowed_origin, "vary": "origin"}
                    more["access-control-expose-headers"] = EXPOSED
                if visit.close or self._runtime.draining:
                    more["connection"] = "close"
                message = {**message, "headers": [*message["headers"], *((k.encode(), v.encode()) for k, v in more.items())]}
            await send(message)

        entered: bytes | None = None
        held = 0  # of what this key may have at the same time

        def charge(count: int) -> None:
            nonlocal held
            if entered is not None and count > held:
                self._limits.enter(entered, count - held, held=held)
                held = count

        try:
            visit.close = _announces_body(scope)  # until a route has read it: what is left of it must not be taken for the next request
            key = self._check(scope, path, ends)
            if scope["method"] == "OPTIONS":
                await self._preflight(scope, send_marked, allowed_origin)
                return
            if key is not None and scope["method"] == "POST":
                self._limits.enter(key)
                entered, held, visit.charge = key, 1, charge
            endpoint, scope["path_params"] = ends[scope["method"]]
            response = await endpoint(Request(scope, receive))
            await response(scope, receive, send_marked)
        except FastLLMError as error:
            await self._failed(send_marked, visit, error)
        except Exception as error:
            self._runtime.log.fault(visit, error)
            await self._failed(send_marked, visit, EngineError(describe(error)))
        finally:
            if entered is not None:
                self._limits.leave(entered, held)
            self._runtime.metrics.answered(visit)
            self._runtime.log.access(visit)

    async def _failed(self, send: Send, visit: Visit, error: FastLLMError) -> None:
        if is_fault(error):
            self._runtime.log.fault(visit, error)
        if visit.status == 0:
            await send_error(send, visit, error)

    def _route(self, given: str) -> tuple[str | None, Ends]:
        """The path of the route that will run; by method its endpoint, and what the path says to it. All routes are there with and without `/v1`."""
        path = given
        root = self._settings.root_path
        if root and (path == root or path.startswith(root + "/")):
            path = path[len(root) :] or "/"
        if len(path) > 1 and path.endswith("/") and not path.endswith("//"):
            path = path[:-1]
        path = ALIASES.get(path.removeprefix("/v1"), path)
        forms = [path] if path.startswith("/v1/v1/") else [path, path[3:]] if path.startswith("/v1/") else [path, "/v1" + path]
        for form in forms:
            ends: dict[str, tuple[Endpoint, dict[str, str]]] = {}
            for pattern, more in self._patterns:
                if match := pattern.fullmatch(form):  # `$` alone is also before a line end
                    ends = {method: (endpoint, match.groupdict()) for method, endpoint in more.items()} | ends  # the first route with a method has it
            ends |= {method: (endpoint, {}) for method, endpoint in self._exact.get(form, {}).items()}
            if ends:
                return form, ends
        return None, {}

    def _request_id(self, scope: Scope) -> str:
        given = _values(scope, b"x-request-id")
        if len(given) == 1 and _REQUEST_ID.fullmatch(given[0]):
            return given[0]
        return f"req_{secrets.token_hex(12)}"

    def _check(self, scope: Scope, path: str | None, methods: Collection[str]) -> bytes | None:
        """Raises what keeps the request out; returns the hash of its key, if one was asked for."""
        self._check_head(scope)
        if self._settings.local and not self._keys:
            self._check_host(scope)
        self._check_origin(scope)
        if scope["method"] == "OPTIONS":
            return None
        key = self._check_key(scope) if self._keys and path not in PUBLIC else None
        if self._runtime.connections() > MAX_CONNECTIONS and path not in PUBLIC:
            scope["visit"].close = True
            raise Unavailable("too many connections", fix="try again later", retry_after_s=1)
        if path is None:
            raise NotFound(self._hint(scope["path"]), fix="see /openapi.json for the routes")
        if scope["method"] not in methods:
            allow = ", ".join(sorted({*methods, "OPTIONS"}))
            raise MethodNotAllowed(f"{scope['method'][:20]} is not for this route", fix=f"use {allow}", allow=allow)
        return key

    def _check_head(self, scope: Scope) -> None:
        """What comes in one piece is parsed whatever its size; here it is measured."""
        size = len(scope.get("raw_path", b"")) + len(scope.get("query_string", b"")) + sum(len(k) + len(v) + 4 for k, v in scope["headers"])
        said = f"the headers are larger than {MAX_HEADER} bytes" if size > MAX_HEADER else ""
        if scope.get("http_version", "1.1") not in ("1.0", "1.1"):
            said = "this server speaks HTTP/1.0 and HTTP/1.1"
        if _values(scope, b"transfer-encoding"):  # a proxy might end the body elsewhere (RFC 9112, 6.1 and 6.3)
            if _values(scope, b"content-length"):
                said = "a body has a length or comes in chunks, and not both"
            elif scope.get("http_version") == "1.0":
                said = "HTTP/1.0 has no bodies in chunks"
        if said:
            scope["visit"].close = True
            raise InvalidRequest(said)

    def _hint(self, path: str) -> str:
        if path.rstrip("/").endswith("/embed"):
            return "there is no such route: embeddings are at /v1/embeddings"
        return "there is no such route"

    def _check_host(self, scope: Scope) -> None:
        """Without a key, a name that is not local means: a web page has pointed its own name at this machine."""
        for given in _values(scope, b"host") or [""]:
            host = _hostname(given)
            if not (_is_local(host) or host in self._settings.hosts):
                raise PermissionDenied("this Host is not served here", fix="start the server with --allowed-host NAME, or with a key")

    def _named_origin(self, scope: Scope) -> str:
        """The origin of the page that calls, if an option allows it; else ""."""
        origins, allowed = _values(scope, b"origin"), self._settings.origins
        return origins[0] if len(origins) == 1 and ("*" in allowed or origins[0] in allowed) else ""

    def _check_origin(self, scope: Scope) -> None:
        """A page must be our own, or one that an option allows."""
        origins, hosts = _values(scope, b"origin"), _values(scope, b"host")
        if not origins or self._named_origin(scope):
            return
        if len(origins) == 1 and len(hosts) == 1 and urlsplit_netloc(origins[0]) == hosts[0].lower():
            return
        raise PermissionDenied("pages of this origin may not call this server", fix="start the server with --cors-origin ORIGIN")

    def _check_key(self, scope: Scope) -> bytes:
        """Exactly one key, in a header, and one of ours: its hash. Every comparison takes the same time."""
        given = set(_values(scope, b"x-api-key"))
        for value in _values(scope, b"authorization"):
            scheme, _, key = value.partition(" ")
            given.add(key.strip() if scheme.lower() == "bearer" else "")
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        fix = "send the header Authorization: Bearer KEY"
        if {"api_key", "api-key", "key", "token", "access_token"} & query.keys():
            raise AuthenticationError("keys are not read from the URL, where logs would keep them", fix=fix)
        if not given:
            raise AuthenticationError("this server asks for an API key", fix=fix)
        key = given.pop()
        if given or not key or not key.isascii():
            raise AuthenticationError("the API key is empty, not ASCII, or there are two different ones", fix=fix)
        digest = hashlib.sha256(key.encode()).digest()
        right = sum(hmac.compare_digest(digest, own) for own in self._keys)  # all of them, so that time tells nothing
        if not right:
            raise AuthenticationError("the API key is wrong", fix=fix)
        return digest

    async def _preflight(self, scope: Scope, send: Send, origin: str) -> None:
        """What a browser asks before it lets a page call. An allowed page may send every header that it asks for: the libraries of both
        interfaces have a dozen of their own (x-stainless-*, anthropic-*, openai-*)."""
        headers = {"allow": _METHODS}
        if origin:
            asked = [name.strip().lower() for value in _values(scope, b"access-control-request-headers") for name in value.split(",")]
            named = [name for name in asked[:MAX_ASKED] if _HEADER_NAME.fullmatch(name)]
            headers |= {
                "access-control-allow-methods": _METHODS,
                "access-control-allow-headers": ", ".join(dict.fromkeys([*_HEADERS, *named])),
                "access-control-max-age": "600",
            }
        await send({"type": "http.response.start", "status": 204, "headers": [(k.encode(), v.encode()) for k, v in headers.items()]})
        await send({"type": "http.response.body", "body": b""})


def broken(runtime: Runtime) -> tuple[dict[str, str], bytes]:
    """Headers and body of the answer to what is no HTTP. It has no route, and is logged and counted as any request."""
    visit = Visit(f"req_{secrets.token_hex(12)}", "-", "-")
    error = InvalidRequest("the request is not HTTP/1.1 that can be read", fix="send a well-formed request")
    visit.status, visit.code = error.http_status, error.code
    runtime.metrics.answered(visit)
    runtime.log.access(visit)
    body = encode(error_body(error, visit.request_id)).encode()
    head = {"date": formatdate(usegmt=True), "content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    head["x-content-type-options"] = "nosniff"
    return {**head, **error_headers(error), "x-request-id": visit.request_id, "request-id": visit.request_id}, body


def urlsplit_netloc(origin: str) -> str:
    """Host and port of an origin, "" for `null` and for what is no URL."""
    try:
        parts = urlsplit(origin.lower())
    except ValueError:
        return ""
    return parts.netloc if parts.scheme in ("http", "https") else ""


def _hostname(value: str) -> str:
    """Of a Host header, without port and brackets; "" if it is none."""
    found = re.fullmatch(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::[0-9]*)?", value.strip().lower())
    return "" if found is None else found[1] or found[2] or ""


def _is_local(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
