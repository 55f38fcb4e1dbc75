"""From the engine's thread to the event loop: events are queued, and the loop is woken once for all that came meanwhile.

A step of eight sequences gives eight events in a row. Waking the loop for each would cost more than writing them out, and the two threads would
fight for Python's lock: the engine wakes the loop when it is about to compute the next step, without the lock, and does not wait for it. Most of what
a wake-up costs is fetching the server's own code and data, which the step has driven out of the processor's caches: so a small model, whose steps take
a few milliseconds, does not wake the loop for each. First and last tokens do not wait. Where a step takes longer than the engine thought, the loop looks
for itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

__all__ = ["Bridge"]


EVERY_S: Final = 0.033  # steps that are quicker bring their tokens together: at least that often, text leaves
MANY: Final = 64  # events are not gathered beyond so many: log-probabilities make them large
LATE_S: Final = 0.040  # after so long without a wake-up the loop takes what waits


class Bridge:
    """One for a server. `put` and `wake` are the engine's thread's; receivers are called on the loop, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._queue: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._woken = self._urgent = False
        self._woken_at = 0.0
        self._late: asyncio.TimerHandle | None = None
        self._after: list[Callable[[], None]] | None = None  # what is to be called when all that waits has been; None: nothing is being called

    def put(self, receiver: Callable[..., None], *args: Any, urgent: bool = True) -> None:
        """Queues receiver(*args) for the loop, which is told by `wake`; urgent: by the next one."""
        self._queue.append((receiver, args))
        self._urgent |= urgent

    def wake(self, next_s: float | None = None) -> None:
        """What is queued is called on the loop, soon. next_s: so long will it take until the next call; None: nobody knows. Where that is soon
        enough and nothing is urgent, the loop sleeps until then. A loop that is closed has nobody who waits."""
        if self._queue and not self._woken:
            now = time.monotonic()
            if next_s is not None and not self._urgent and len(self._queue) < MANY and now - self._woken_at + next_s < EVERY_S:
                return
            self._woken, self._urgent, self._woken_at = True, False, now
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._answer)

    def soon(self, call: Callable[[], None]) -> None:
        """On the loop: `call()` when all that waits now has been called; where nothing is being called, with the loop's next turn. Cheaper than that where many
        streams are written to at once. One that fails keeps no other from being called."""
        if self._after is None:
            self._loop.call_soon(call)
        else:
            self._after.append(call)

    def _answer(self) -> None:
        """To a wake-up. The look follows it even where nothing waits, because the turn before took it: events are put off from the wake-up on."""
        self._woken = False  # before the queue is read: whoever comes now wakes the loop again
        self._look_later()
        self._flush()

    def _look(self) -> None:
        """Long after the last wake-up: what was put off, and what a receiver that failed has left, is called."""
        if self._queue:
            self._look_later()
            self._flush()

    def _look_later(self) -> None:
        if self._late is not None:
            self._late.cancel()
        self._late = self._loop.call_later(LATE_S, self._look)

    def _flush(self) -> None:
        after: list[Callable[[], None]] = []
        self._after = after
        try:
            while self._queue:
                receiver, args = self._queue.popleft()
                receiver(*args)
        finally:
            self._after = None
            _call_all(after)


def _call_all(calls: Iterable[Callable[[], None]]) -> None:
    """Calls each; then raises the first error that there was."""
    errors = list[Exception]()
    for call in calls:
        try:
            call()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
