"""The preparation processes as the event loop sees them: started when needed, one body each at a time, killed when one is late.

A wedged thread cannot be ended, a process can: that is why templates and large bodies are worked on there. A killed process is
replaced by the next request. Used by `app`; the other end is `preparer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from typing import Any, Final

from ..core import errors
from ..core.errors import EngineError, FastLLMError, TemplateError, Unavailable
from .preparer import HEAD, unpack_prepared

__all__ = ["PreparerPool"]

DEADLINE_S: Final = 10.0  # for one body; the template's own budget is 2 s
START_S: Final = 60.0
JOINED: Final = 64 << 10  # bytes of a body that goes in one piece with its head: one call of the system
MAX_WAITING: Final = 256
_THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


class _Process:
    """One preparation process and its socket."""

    def __init__(self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.process, self.reader, self.writer = process, reader, writer

    @classmethod
    async def start(cls, settings: dict[str, Any]) -> _Process:
        """Starts it and waits until it has opened the model's text side."""
        ours, theirs = socket.socketpair()
        environment = {**os.environ, **dict.fromkeys(_THREADS, "1"), "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-P", "-m", "fastllm.server.preparer", str(theirs.fileno())]
        with theirs:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment, start_new_session=True
            )
        ours.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        started = cls(process, reader, writer)
        try:
            raw = json.dumps(settings).encode()
            writer.write(HEAD.pack(len(raw), 0) + raw)
            await asyncio.wait_for(started.read(), START_S)
        except BaseException:
            started.kill()
            raise
        return started

    async def read(self) -> tuple[dict[str, Any], bytes]:
        """One frame: header and bytes."""
        size, length = HEAD.unpack(await self.reader.readexactly(HEAD.size))
        header = json.loads(await self.reader.readexactly(size))
        return header, await self.reader.readexactly(length) if length else b""

    async def ask(self, kind: str, body: bytes) -> tuple[dict[str, Any], bytes]:
        """Hands over a body and waits for the answer."""
        head = json.dumps({"kind": kind}).encode()
        head = HEAD.pack(len(head), len(body)) + head
        if len(body) <= JOINED:
            self.writer.write(head + body)
        else:
            self.writer.write(head)
            self.writer.write(body)
        await self.writer.drain()
        return await self.read()

    def kill(self) -> None:
        """Ends it at once."""
        with contextlib.suppress(Exception):
            self.writer.close()
        self.process.kill()
        self.process.wait()


class PreparerPool:
    """settings: of `Kitchen`, with the model's path. size: processes at most. deadline_s: of one body."""

    def __init__(self, settings: dict[str, Any], size: int = 2, deadline_s: float = DEADLINE_S):
        self._settings, self._size, self._deadline_s = settings, size, deadline_s
        self._idle: list[_Process] = []
        self._waiting = 0
        self._free = asyncio.Semaphore(size)
        self._closed = False

    async def start(self) -> None:
        """Starts the first process. Raises Unavailable if it does not come up."""
        self._idle.append(await self._new())

    async def _new(self) -> _Process:
        try:
            return await _Process.start(self._settings)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            raise Unavailable("no preparation process can be started", why=getattr(error, "strerror", None) or type(error).__name__, fix="raise the limits of open files, processes and memory (ulimit -n, -u, -v); the log may say more") from error

    async def prepare(self, kind: str, body: bytes) -> Any:
        """What `kinds.prepare` makes of a body. Raises its errors, TemplateError if it takes too
        long, Unavailable."""
        if self._waiting >= MAX_WAITING:
            raise Unavailable("too many requests are being read", fix="try again later", retry_after_s=1)
        self._waiting += 1
        try:
            async with self._free:
                return await self._prepare(kind, body)
        finally:
            self._waiting -= 1

    async def _prepare(self, kind: str, body: bytes) -> Any:
        while self._idle and self._idle[-1].process.poll() is not None:  # it died while it had nothing to do
            self._idle.pop().kill()
        process = self._idle.pop() if self._idle else await self._new()
        done = False
        try:
            header, data = await asyncio.wait_for(process.ask(kind, body), self._deadline_s)
            done = not header["last"]
        except TimeoutError:
            raise TemplateError(
                f"the request took more than {self._deadline_s:g} s to render and encode", fix="send fewer or shorter messages"
            ) from None
        except (asyncio.IncompleteReadError, OSError) as error:
            raise EngineError("the preparation process ended by a defect") from error
        finally:
            if done and not self._closed:
                self._idle.append(process)
            else:  # late, dead, at its end, or left in the middle of an answer by a cancelled caller
                process.kill()
        if "error" in header:
            raise _rebuilt(header["error"])
        return unpack_prepared(header["ok"], data)

    @property
    def pids(self) -> list[int]:
        """Of the processes that have nothing to do now."""
        return [p.process.pid for p in self._idle]

    def close(self) -> None:
        """Ends all processes."""
        self._closed = True
        while self._idle:
            self._idle.pop().kill()


def _rebuilt(told: dict[str, Any]) -> FastLLMError:
    kind = getattr(errors, told["kind"])
    error: FastLLMError = kind(told["message"], who=told["who"], why=told["why"], fix=told["fix"], **told["fields"])
    return error
