"""uvicorn's HTTP/1.1 protocol, with what it leaves out: a time limit for headers, a way to cut a client that does not read, an answer of ours, in
our log, to what is no HTTP, and a close that lets a client read why its body is not wanted."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import sys
import termios
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .gate import broken
from .sse import Receive, Scope, Send

if TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["HEADER_S", "Protocol", "protocol_for"]

HEADER_S: Final = 30.0  # from the first byte of a connection or of a further request to the end of its headers
LINGER_S: Final = 2.0  # in which what a client still sends of a body that was refused is thrown away
LINGER_BYTES: Final = 64 << 20  # of it, at most


class _Closing:
    """A transport whose `close` lingers where the client is still sending: closed at once, the kernel would reset the connection, and a client that
    writes first and reads then would never see the answer (RFC 9112, 9.6)."""

    def __init__(self, transport: asyncio.Transport, protocol: Protocol):
        self._transport, self._protocol = transport, protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Nothing is answered any more."""
        return self._protocol.lingering or self._transport.is_closing()

    def close(self) -> None:
        """At once, or when the client has stopped sending."""
        if not self._protocol.linger():
            self._transport.close()
            self._protocol.watch_unsent()


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
        self.transport = cast("asyncio.Transport", _Closing(transport, self))
        self._under = transport
        self.lingering, self._thrown = False, 0
        self._unsent: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None  # of headers
        self._limit: asyncio.TimerHandle | None = None  # of lingering
        self._arm()

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        if self.lingering:
            self._thrown += len(data)
            if self._thrown > LINGER_BYTES:
                self._under.abort()
            return
        if self._between():
            self._arm()
        super().data_received(data)
        if not self._between():
            self._disarm()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self.lingering = True  # or what is closed now would wait for more of it
        self._disarm()
        if self._limit is not None:
            self._limit.cancel()
        super().connection_lost(exc)
        self._watched()

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

    def linger(self) -> bool:
        """Says that nothing follows, and throws away what comes; whether the client was still sending, and this is the first time."""
        if self.lingering or self._under.is_closing() or self.conn.their_state not in (h11.SEND_BODY, h11.ERROR):
            return False
        self.lingering = True
        self._disarm()
        self._limit = asyncio.get_running_loop().call_later(LINGER_S, self._lingered)
        if self._under.can_write_eof():
            self._under.write_eof()
        self.flow.resume_reading()
        return True

    def _lingered(self) -> None:
        """It had its time to stop; what it has not read of the answer yet may still go out."""
        self._under.close()
        self.watch_unsent()

    def pause_writing(self) -> None:
        """The client takes less than it gets; nothing more is written until it has taken most."""
        super().pause_writing()
        self.watch_unsent()

    def resume_writing(self) -> None:
        """It has."""
        super().resume_writing()
        self._watched()
        if self.transport.is_closing():  # the rest must go, too
            self.watch_unsent()

    def eof_received(self) -> None:
        """The client sends no more: the transport closes itself now, when all is sent."""
        super().eof_received()
        self.watch_unsent()

    def watch_unsent(self, before: int | None = None) -> None:
        """Cuts a client that takes nothing for as long as a stream's may: of a whole answer, or of a connection that is to be closed. before: bytes
        that waited at the last look."""
        waiting = self._under.get_write_buffer_size()
        if waiting:
            waiting += _unacknowledged(self._under.get_extra_info("socket"))  # the kernel takes from us in large pieces only
        if before is None:
            self._watched()
        elif before == waiting > 0:
            self._under.abort()
            return
        if waiting:
            later = asyncio.get_running_loop().call_later
            self._unsent = later(self.runtime.settings.slow_reader_s, self.watch_unsent, waiting)

    def _watched(self) -> None:
        if self._unsent is not None:
            self._unsent.cancel()
            self._unsent = None

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


def _unacknowledged(connection: socket.socket) -> int:
    """Bytes that the kernel has, and the other side has not."""
    try:
        return int.from_bytes(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except (OSError, ValueError):  # it has been closed
        return 0


def protocol_for(runtime: Runtime) -> type[Protocol]:
    """The protocol of one server's connections."""
    return type("Protocol", (Protocol,), {"runtime": runtime})
