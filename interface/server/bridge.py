"""From the engine's thread to the event loop: events are queued, and the loop is woken once for all that came meanwhile.

A step of eight sequences gives eight events in a row; waking the loop for each would cost more than writing them out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["Bridge"]


class Bridge:
    """One for a server. `put` may be called from any thread; receivers are called on the loop, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._queue: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._woken = False

    def put(self, receiver: Callable[..., None], *args: Any) -> None:
        """Calls receiver(*args) on the loop, soon. Raises RuntimeError if the loop is closed."""
        self._queue.append((receiver, args))
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        self._woken = False  # before the queue is read: whoever comes now wakes the loop again
        while self._queue:
            receiver, args = self._queue.popleft()
            receiver(*args)
