"""The web page at `/`: a few static files of the package, under a policy that lets nothing else run, load or connect.

The files are built from `interface/web/src` when the page is changed (`make web`), and are data here. They need no key: what is secret
is behind the routes that the page calls. (`nosniff` is sent with every answer, by the gate.) Each file is a route of its own, so no path is ever looked up.
"""

from __future__ import annotations

import gzip
import hashlib
import html
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Final

from fastapi import FastAPI
from fastapi.requests import Request
from fastapi.responses import Response

from ..core.errors import SwitchedOff
from .settings import ServerSettings

__all__ = ["PATHS", "Page", "register"]

FILES: Final[dict[str, tuple[str, str, str]]] = {
    "/": ("index.html", "text/html; charset=utf-8", "The web page: chats with the model."),
    "/assets/app.js": ("app.js", "text/javascript; charset=utf-8", "The page's program."),
    "/assets/app.css": ("app.css", "text/css; charset=utf-8", "The page's style."),
    "/assets/icon.svg": ("icon.svg", "image/svg+xml", "The page's icon."),
}
"""Route -> file, content type, what it is."""

PATHS: Final = frozenset(FILES)
HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=(), payment=(), usb=()",
}
SAME: Final = "no-cache"  # ask each time whether it is the same: the answer is 304 and some bytes
FOR_EVER: Final = "public, max-age=31536000, immutable"  # under an address that names the content


class Page:
    """The files in memory, plain and compressed.

    root_path: the prefix under which browsers find the page. Without one, addresses in the page are relative, so that a proxy may
    take any prefix away.
    """

    def __init__(self, root_path: str = ""):
        folder = files("fastllm") / "web" / "static"
        self._plain = {path: (folder / name).read_bytes() for path, (name, _, _) in FILES.items()}
        self._tags = {path: hashlib.sha256(body).hexdigest()[:20] for path, body in self._plain.items()}
        text = self._plain["/"].decode()
        prefix = html.escape(root_path) + "/" if root_path else ""
        for path in PATHS - {"/"}:
            text = text.replace(f'"{path[1:]}"', f'"{prefix}{path[1:]}?v={self._tags[path]}"')
        self._plain["/"] = text.encode()
        self._tags["/"] = hashlib.sha256(self._plain["/"]).hexdigest()[:20]
        self._packed = {path: gzip.compress(body, 9, mtime=0) for path, body in self._plain.items()}

    def answer(self, path: str, headers: Mapping[str, str], version: str = "") -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a file. headers: of the request, by names in lower case; version: the `v` of the query."""
        packs = any(_accepts_gzip(part) for part in headers.get("accept-encoding", "").split(","))
        tag = f'"{self._tags[path]}{"-gz" if packs else ""}"'
        more = {
            **HEADERS,
            "etag": tag,
            "cache-control": FOR_EVER if version == self._tags[path] else SAME,
            "vary": "accept-encoding",
        }
        known = [part.strip().removeprefix("W/") for part in headers.get("if-none-match", "").split(",")]
        if tag in known or "*" in known:
            return 304, more, b""
        more["content-type"] = FILES[path][1]
        if packs:
            more["content-encoding"] = "gzip"
        return 200, more, (self._packed if packs else self._plain)[path]


def _accepts_gzip(part: str) -> bool:
    """Whether one entry of Accept-Encoding allows gzip."""
    coding, _, weight = part.replace(" ", "").lower().partition(";")
    return coding == "gzip" and weight not in ("q=0", "q=0.0", "q=0.00", "q=0.000")


def register(app: FastAPI, settings: ServerSettings) -> None:
    """Adds the routes of the page. With --no-web they answer 501."""
    page = Page(settings.root_path) if settings.web else None

    async def serve(request: Request) -> Response:
        if page is None:
            raise SwitchedOff("the web page is switched off", fix="start the server without --no-web")
        path: str = request.scope["path"]
        status, headers, body = page.answer(path, request.headers, request.query_params.get("v", ""))
        return Response(body, status, headers)

    for path, (_, media, summary) in FILES.items():
        extra: dict[str, Any] = {"media": media.partition(";")[0]}
        app.add_api_route(path, serve, methods=["GET", "HEAD"], summary=summary, response_model=None, openapi_extra=extra)
