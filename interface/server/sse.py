"""Sending: server-sent events byte for byte, and one object; both while the client is watched.

A frame is `data: {json}` and an empty line. What the client has not taken waits in an `Outbox`; above its limit the sequence pauses, and
a client that reads nothing for long is cut. Silence is broken by a comment (`: ping`), never by data, which clients would parse.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final

from .settings import UNSENT_BYTES

__all__ = ["DONE", "SLOT", "STREAM_HEADERS", "Chunks", "Frames", "Outbox", "Receive", "Scope", "Send", "encode", "event_frame", "frame", "wait_for_disconnect"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

STREAM_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would collect the chunks
}
DONE: Final = b"data: [DONE]\n\n"
PING: Final = b": ping\n\n"
CHUNK: Final = 64 << 10

Frames = Callable[[Iterable[str]], bytes]  # of each text its frame, one after the other

SLOT: Final = "\0"
_SLOT: Final = json.dumps(SLOT)
_encode_text: Final = json.encoder.encode_basestring
encode: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def frame(data: dict[str, Any]) -> bytes:
    """One event without a name. Line ends inside of the JSON are escapes, so the frame is one line."""
    return b"data: " + encode(data).encode() + b"\n\n"


class Chunks:
    """Frames of one stream, each around one choice. All that they repeat is encoded once: a frame is written for every token."""

    def __init__(self, head: dict[str, Any], extra: dict[str, Any]):
        before, _, after = encode({**head, "choices": [0], **extra}).partition('"choices":[0]')
        self._before, self._after = f'data: {before}"choices":['.encode(), f"]{after}\n\n".encode()
        self._more = self._after[1:]

    def around(self, choice: dict[str, Any]) -> Frames:
        """A shorter way to frames of a choice that differ in one text only, which is SLOT in the one given: makes one for each text."""
        before, _, after = encode(choice).partition(_SLOT)
        head, tail = self._before.decode() + before, after + self._after.decode()
        between = tail + head
        return lambda texts: (head + between.join(map(_encode_text, texts)) + tail).encode()

    def frame(self, choice: dict[str, Any], timings: dict[str, Any] | None = None) -> bytes:
        """`frame({**head, "choices": [choice], **extra})`, with `timings` where there are some."""
        after = self._after if timings is None else b'],"timings":' + encode(timings).encode() + self._more
        return self._before + encode(choice).encode() + after


def event_frame(name: str, data: dict[str, Any]) -> bytes:
    """One event with a name, which is also its `type`."""
    return b"event: " + name.encode() + b"\n" + frame({"type": name, **data})


class Outbox:
    """Bytes on their way to one client.

    soon: calls a function when this turn's bytes have been written. pause, resume: called when more than `limit` bytes wait, and when half of them have gone. ping: what
    breaks a silence.

    A client that keeps up gets its bytes straight from here (`connect`): one call of the transport for all that a wake-up brings. The way
    through ASGI and h11, which waits for a slow client, costs several times as much for each token.
    """

    def __init__(self, soon: Callable[[Callable[[], None]], object], limit: int = UNSENT_BYTES, ping: bytes = PING):
        self._buffer = bytearray()
        self._wake = asyncio.Event()
        self._soon, self._limit, self._ping = soon, limit, ping
        self.pause: Callable[[], None] = lambda: None
        self.resume: Callable[[], None] = lambda: None
        self.abort: Callable[[], None] = lambda: None  # drops the connection
        self._transport: asyncio.Transport | None = None
        self._flushing = self._sending = False  # a flush is due; bytes are between here and the transport
        self.ended = False
        self.paused_at: float | None = None
        self.sent_at = time.monotonic()

    def connect(self, transport: asyncio.Transport) -> None:
        """The head of the answer is with the transport, and its body is chunked (RFC 9112, 7.1)."""
        self._transport = transport

    def write(self, data: bytes) -> None:
        """Queues bytes."""
        self._buffer += data
        if self._transport is None:
            self._wake.set()
        elif not self._flushing:
            self._flushing = True
            self._soon(self._flush)
        if self.paused_at is None and len(self._buffer) > self._limit:
            self.paused_at = time.monotonic()
            self.pause()

    def _flush(self) -> None:
        self._flushing = False
        transport, size = self._transport, len(self._buffer)
        if not size:
            return
        if transport is None or self._sending or size > CHUNK or transport.is_closing() or transport.get_write_buffer_size():
            self._wake.set()
            return
        transport.write(b"%x\r\n%b\r\n" % (size, bytes(self._buffer)))
        self._buffer.clear()
        self.sent_at = time.monotonic()

    def end(self) -> None:
        """Nothing comes any more."""
        self.ended = True
        self._wake.set()

    def cut(self) -> None:
        """Drops what is unsent, and the connection: its client reads nothing."""
        self._buffer.clear()
        self.end()
        self.abort()

    @property
    def unsent(self) -> int:
        """Bytes that wait here."""
        return len(self._buffer)

    def tick(self, now: float, ping_s: float) -> None:
        """Breaks a silence of ping_s seconds."""
        if not self._buffer and not self.ended and now - self.sent_at >= ping_s:
            self.write(self._ping)

    async def drain_into(self, send: Send) -> None:
        """Sends until the end. Returns when everything is with the transport, or the client is gone."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._buffer:
                data = bytes(self._buffer[:CHUNK])
                del self._buffer[:CHUNK]
                self._sending = True  # what comes meanwhile must not overtake it
                await send({"type": "http.response.body", "body": data, "more_body": True})
                self._sending = False
                self.sent_at = time.monotonic()
                if self.paused_at is not None and len(self._buffer) <= self._limit // 2:
                    self.paused_at = None
                    self.resume()
            if self.ended and not self._buffer:
                return


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has closed the connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
