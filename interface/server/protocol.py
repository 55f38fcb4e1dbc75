"""uvicorn's HTTP/1.1 protocol, with what it leaves out: a time limit for headers, a way to cut a client that does not read, and an answer of ours, in
our log, to what is no HTTP."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, ClassVar, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .gate import broken
from .sse import Receive, Scope, Send

if TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["HEADER_S", "Protocol", "protocol_for"]

HEADER_S: Final = 30.0  # from the first byte of a connection or of a further request to the end of its headers


class Protocol(H11Protocol):
    """Routes find the connection as scope["transport"]: `abort()` drops it with what is unsent. runtime: of the server."""

    runtime: ClassVar[Runtime]

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        self.logger = logging.Logger("fastllm.http", logging.ERROR)  # its warnings have no id, and are not JSON where the log is

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

    def _should_upgrade(self) -> bool:
        """Never: a request to speak another protocol is answered in this one."""
        return False

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP. If an answer has begun, there is no place for another; a route that is still to answer has nobody to answer to."""
        cycle: Any = self.cycle
        state = self.conn.our_state
        if state in (h11.IDLE, h11.SEND_RESPONSE):
            headers, body = broken(self.runtime)
            head = h11.Response(status_code=400, headers=[(k.encode(), v.encode()) for k, v in headers.items()], reason=b"Bad Request")
            if state is h11.SEND_RESPONSE and cycle.scope["method"] == "HEAD":
                body = b""
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if not self._between():
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()

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


def protocol_for(runtime: Runtime) -> type[Protocol]:
    """The protocol of one server's connections."""
    return type("Protocol", (Protocol,), {"runtime": runtime})
