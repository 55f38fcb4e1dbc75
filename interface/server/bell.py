"""Waking the event loop from the engine's thread without letting Python's lock go.

`loop.call_soon_threadsafe` writes to a socket and gives the lock away for that time. The loop, which wakes meanwhile, takes it, and the engine's
thread, which had only a step to begin, waits until the loop has turned tokens into text and written them: 100 to 350 µs of a step of 4 ms, in which no
core computes. A write that keeps the lock takes 1 µs, and the loop gets the lock when the step runs natively.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import threading
from collections.abc import Callable

__all__ = ["Bell"]


class Bell:
    """`answer()` is called on the loop after `ring()`, which any thread may call; also after several. `close` it on the loop.

    Where there is no pipe to be had (no descriptor is left, or the loop is none that reads pipes), it rings by `call_soon_threadsafe`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, answer: Callable[[], None]):
        self._loop, self._answer = loop, answer
        self._lock = threading.Lock()  # the number of a closed pipe may be somebody else's soon
        self._ends: tuple[int, int] | None = None
        self._write: Callable[[int, bytes, int], int] | None = None

    def open(self) -> None:
        """On the loop: listens to a pipe from here on, if there is one to be had."""
        if self._ends is not None:
            return
        ends: tuple[int, ...] = ()
        try:
            ends = reading, writing = os.pipe()
            write = ctypes.PyDLL(None).write  # functions of a PyDLL keep the lock
            write.argtypes, write.restype = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t), ctypes.c_ssize_t
            for end in ends:
                os.set_blocking(end, False)
            self._loop.add_reader(reading, self._heard)
        except (NotImplementedError, AttributeError, OSError, TypeError):
            for end in ends:
                os.close(end)
            return
        with self._lock:
            self._ends, self._write = (reading, writing), write

    def ring(self) -> None:
        """Has `answer` called soon. A loop that is closed has nobody who waits."""
        with self._lock:
            if self._ends is not None and self._write is not None:
                self._write(self._ends[1], b"\0", 1)  # a pipe that is full has rung already
                return
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._answer)

    def _heard(self) -> None:
        if self._ends is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._ends[0], 512)
            self._answer()

    def close(self) -> None:
        """Listens no more; answers what was rung and not heard, and rings as if it had never been opened."""
        with self._lock:
            ends, self._ends = self._ends, None
        if ends is not None:
            self._loop.remove_reader(ends[0])
            for end in ends:
                os.close(end)
            self._answer()
