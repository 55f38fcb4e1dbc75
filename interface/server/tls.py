"""HTTPS: a certificate and its key, read at the start and again at SIGHUP, so that a renewed one needs no restart; and handshakes.

A connection is counted from its first moment, and must have shaken hands soon: asyncio's own server would give it a minute, and nobody
would know of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from typing import Any, Final

from ..core.errors import UsageError

__all__ = ["HANDSHAKE_S", "MAX_HANDSHAKES", "Handshake", "Tls"]

HANDSHAKE_S: Final = 10.0  # from the connection to the end of its handshake; and for the end of TLS, when it is closed
MAX_HANDSHAKES: Final = 256  # at the same time; when one more comes, the oldest goes: honest ones take milliseconds


class Tls:
    """cert: PEM file with the certificate and its chain; key: PEM file, None: in the same file.

    Raises UsageError for files that cannot be read, do not belong together, or hold a key with a password.
    """

    def __init__(self, cert: str, key: str | None):
        self._cert, self._key = cert, key or cert
        self.context = _context()
        self.waiting: dict[Handshake, None] = {}  # the oldest first
        self.read()

    def shake(self, make: Callable[..., asyncio.Protocol]) -> Callable[..., asyncio.Protocol]:
        """A factory of protocols like `make`, whose clients must shake hands first."""
        return lambda **given: Handshake(self, lambda: make(**given))

    def abort(self) -> None:
        """Drops the connections that shake hands."""
        for one in list(self.waiting):
            one.abort()

    def read(self) -> None:
        """The files anew, for connections from now on. On an error the old ones stay."""
        for context in (_context(), self.context):  # a context keeps what it has read before it fails: try on another first
            try:
                context.load_cert_chain(self._cert, self._key, password=_no_password)
            except ssl.SSLError as error:
                self._fail(error.reason or "there is no certificate with its key in PEM")
            except OSError as error:
                self._fail(error.strerror or str(error))

    def _fail(self, why: str) -> None:
        files = f"--tls-cert {self._cert}" + (f" --tls-key {self._key}" if self._key != self._cert else "")
        raise UsageError(f"{files}: {why}", fix="name a certificate and its key, both in PEM") from None


class Handshake(asyncio.Protocol):
    """A connection until it speaks TLS; then what `make` makes takes its place."""

    def __init__(self, tls: Tls, make: Callable[[], asyncio.Protocol]):
        self._tls, self._make = tls, make
        self._early: list[bytes] = []
        self._ended = False

    def connection_made(self, transport: Any) -> None:
        """A client has come. Nothing is read before TLS listens."""
        self._transport = transport
        transport.pause_reading()
        while len(self._tls.waiting) >= MAX_HANDSHAKES:
            next(iter(self._tls.waiting)).abort()
        self._tls.waiting[self] = None
        self._task = asyncio.get_running_loop().create_task(self._shake())

    def abort(self) -> None:
        """Drops the connection."""
        self._tls.waiting.pop(self, None)
        self._transport.abort()

    async def _shake(self) -> None:
        made = None
        try:
            if not self._transport.is_closing():
                loop = asyncio.get_running_loop()
                with contextlib.suppress(OSError):  # no TLS, the wrong one, too late, or gone
                    made = await loop.start_tls(
                        self._transport,
                        self,
                        self._tls.context,
                        server_side=True,
                        ssl_handshake_timeout=HANDSHAKE_S,
                        ssl_shutdown_timeout=HANDSHAKE_S,
                    )
        finally:
            self._tls.waiting.pop(self, None)
            if made is None:
                self._transport.abort()
        if made is None or self._ended:
            return
        inner = self._make()
        made.set_protocol(inner)
        inner.connection_made(made)
        for data in self._early:
            inner.data_received(data)

    def data_received(self, data: bytes) -> None:
        """What came with the end of the handshake."""
        self._early.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._ended = True


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _no_password() -> str:
    raise UsageError("--tls-key: the key has a password, which nobody is asked for", fix="store it without, readable by the server only")
