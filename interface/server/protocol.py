"""uvicorn's HTTP/1.1 protocol, with what it leaves out: a time limit for headers, and a way to cut a client that does not read."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

from .sse import Receive, Scope, Send

__all__ = ["HEADER_S", "Protocol"]

HEADER_S: Final = 30.0  # from the first byte of a connection or of a further request to the end of its headers


class Protocol(H11Protocol):
    """Routes find the connection as scope["transport"]: `abort()` drops it with what is unsent."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        inner = self.app

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                scope["transport"] = transport
            await inner(scope, receive, send)

        self.app = app
        self._timer: asyncio.TimerHandle | None = None
        self._arm()

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        if self._between():
            self._arm()
        super().data_received(data)
        if not self._between():
            self._disarm()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._disarm()
        super().connection_lost(exc)

    def _between(self) -> bool:
        """No request is known: its headers are still to come."""
        cycle: Any = self.cycle
        return cycle is None or cycle.response_complete

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(HEADER_S, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self._between():
            self.transport.abort()
