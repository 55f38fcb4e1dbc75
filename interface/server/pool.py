"""The preparation processes as the event loop sees them: started when needed, one body each at a time, killed when one is late.

A wedged thread cannot be ended, a process can: that is why templates and large bodies are worked on there. A killed process is
replaced by the next request. Grammars are read in another one, so that a slow one holds nobody without. Used by `app`; the other end is `preparer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections import OrderedDict
from typing import Any, Final

from ..core import errors
from ..core.errors import EngineError, FastLLMError, TemplateError, Unavailable
from .constraints import refuse
from .preparer import GRAMMAR, HEAD, unpack_prepared
from .settings import READ_S

__all__ = ["PreparerPool"]

DEADLINE_S: Final = 10.0  # for one body; the template's own budget is 2 s
READ_WALL: Final = 10  # a grammar may be read in so many times the time of a processor that it has
MAX_KNOWN: Final = 4096  # grammars
REFUSED_S: Final = 600.0  # one is, before it is read again
START_S: Final = 60.0
JOINED: Final = 64 << 10  # bytes of a body that goes in one piece with its head: one call of the system
MAX_WAITING: Final = 256
MAX_GRAMMARS: Final = 64  # of them wait for their grammars
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

    def cpu_s(self) -> float:
        """Time of a processor that it has had; 0 of one that has ended."""
        import psutil  # type: ignore[import-untyped]

        try:
            times = psutil.Process(self.process.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)

    def kill(self) -> None:
        """Ends it at once."""
        with contextlib.suppress(Exception):
            self.writer.close()
        self.process.kill()
        self.process.wait()


class _Starved(TimeoutError):
    """A process was late because it did not run."""


class _Lane:
    """Processes for one kind of work, which is named. size: at most so many, each with one body at a time. Whoever asks holds `free`."""

    def __init__(self, work: str, settings: dict[str, Any], size: int):
        self._work, self._settings = work, settings
        self._closed = False
        self.idle: list[_Process] = []
        self.free = asyncio.Semaphore(size)

    async def new(self) -> _Process:
        """Starts a process. Raises Unavailable if it does not come up."""
        try:
            return await _Process.start(self._settings)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            raise Unavailable(f"no process that {self._work} can be started", why=getattr(error, "strerror", None) or type(error).__name__, fix="raise the limits of open files, processes and memory (ulimit -n, -u, -v); the log may say more") from error

    async def ask(self, kind: str, body: bytes, deadline_s: float) -> tuple[dict[str, Any], bytes]:
        """Header and bytes of the answer. Raises its errors, TimeoutError (_Starved of one that had no processor for most of the time), EngineError, Unavailable."""
        while self.idle and self.idle[-1].process.poll() is not None:  # it died while it had nothing to do
            self.idle.pop().kill()
        process = self.idle.pop() if self.idle else await self.new()
        done, late = False, list[float]()
        timer = asyncio.get_running_loop().call_later(deadline_s / 2, lambda: late.append(process.cpu_s()))  # few requests see it
        try:
            async with asyncio.timeout(deadline_s):
                header, data = await process.ask(kind, body)
            done = not header["last"]
        except TimeoutError as error:
            if late and process.cpu_s() - late[0] < deadline_s / 4:
                raise _Starved from error
            raise
        except (asyncio.IncompleteReadError, OSError) as error:
            raise EngineError(f"the process that {self._work} ended by a defect") from error
        finally:
            timer.cancel()
            if done and not self._closed:
                self.idle.append(process)
            else:  # late, dead, at its end, or left in the middle of an answer by a cancelled caller
                process.kill()
        if "error" in header:
            raise _rebuilt(header["error"])
        return header, data

    async def refill(self) -> None:
        """Starts a process, if all are free and none is there: nobody has to wait for it later."""
        with contextlib.suppress(Unavailable):  # whoever asks next is told
            async with self.free:
                if not self.idle and not self._closed:
                    process = await self.new()
                    self.idle.append(process)
                    if self._closed:
                        self.close()

    def close(self) -> None:
        """Ends all processes."""
        self._closed = True
        while self.idle:
            self.idle.pop().kill()


class PreparerPool:
    """settings: of `Kitchen`, with the model's path. size: processes at most, besides one that reads grammars, which starts with the first of them.
    deadline_s: of one body; read_s: of the processor, for reading a grammar.

    What is known of the latest grammars is kept, by content: none is read twice, and one that was refused costs whoever sends it again nothing.
    """

    def __init__(self, settings: dict[str, Any], size: int = 2, deadline_s: float = DEADLINE_S, read_s: float = READ_S):
        self._deadline_s, self._read_s, self._read_deadline_s = deadline_s, read_s, max(deadline_s, READ_WALL * read_s)
        self._preparing, self._reading = _Lane("prepares requests", settings, size), _Lane("reads grammars", settings, 1)
        self._waiting = self._grammars = 0  # requests in each
        self._known: OrderedDict[str, tuple[float, str]] = OrderedDict()  # grammar -> why it is refused ("": it is not), and until when (`time.monotonic`)
        self._refilling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the first process. Raises Unavailable if it does not come up."""
        self._preparing.idle.append(await self._preparing.new())

    async def prepare(self, kind: str, body: bytes) -> Any:
        """What `kinds.prepare` makes of a body, whose grammar can be read in time, and followed. Raises its errors, TemplateError if it takes too
        long, InvalidSchema if the grammar does, or grows beyond limits, Unavailable."""
        if self._waiting >= MAX_WAITING:
            raise Unavailable("too many requests are being read", fix="try again later", retry_after_s=1)
        self._waiting += 1
        try:
            async with self._preparing.free:
                header, data = await self._preparing.ask(kind, body, self._deadline_s)
        except _Starved:
            raise Unavailable(f"the request was not read in {self._deadline_s:g} s: this machine is busy", fix="try again later", retry_after_s=5) from None
        except TimeoutError:
            raise TemplateError(
                f"the request took more than {self._deadline_s:g} s to render and encode", fix="send fewer or shorter messages"
            ) from None
        finally:
            self._waiting -= 1
        ready = unpack_prepared(header["ok"], data)
        if header["grammar"] is not None and (why := await self._fault(header["grammar"], ready.constraint)):
            refuse(ready, why)
        return ready

    async def _fault(self, key: str, constraint: dict[str, Any]) -> str:
        """Why a grammar cannot be read in time, or followed; "" if it can. Raises EngineError, OutOfMemory, Unavailable."""
        known = self._verdict(key)
        if known is not None:
            return known
        if self._grammars >= MAX_GRAMMARS:
            raise Unavailable("too many grammars are being read", fix="try again later", retry_after_s=1)
        self._grammars += 1
        try:
            async with self._reading.free:
                known = self._verdict(key)
                return await self._read(key, constraint) if known is None else known
        finally:
            self._grammars -= 1

    def _verdict(self, key: str) -> str | None:
        """What is known of it, as `_fault` says it."""
        until, why = self._known.get(key, (0.0, None))
        if why and until < time.monotonic():
            del self._known[key]
            return None
        return why

    async def _read(self, key: str, constraint: dict[str, Any]) -> str:
        body = json.dumps({"constraint": constraint, "limit_s": self._read_s}).encode()
        try:
            header, _ = await self._reading.ask(GRAMMAR, body, self._read_deadline_s)
        except TimeoutError:
            raise Unavailable(f"a grammar was not read in {self._read_deadline_s:g} s: this machine is busy", fix="try again later", retry_after_s=5) from None
        finally:
            if not self._reading.idle:  # it was ended, and is there again when the next grammar comes
                self._refilling = asyncio.create_task(self._reading.refill())
        why: str = header["ok"]
        self._known[key] = time.monotonic() + REFUSED_S, why
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return why

    @property
    def pids(self) -> list[int]:
        """Of the processes that have nothing to do now."""
        return [p.process.pid for lane in (self._preparing, self._reading) for p in lane.idle]

    def close(self) -> None:
        """Ends all processes."""
        if self._refilling is not None:
            self._refilling.cancel()
        self._preparing.close()
        self._reading.close()


def _rebuilt(told: dict[str, Any]) -> FastLLMError:
    kind = getattr(errors, told["kind"])
    error: FastLLMError = kind(told["message"], who=told["who"], why=told["why"], fix=told["fix"], **told["fields"])
    return error
