"""From the engine's thread to the event loop: events are queued, and the loop is woken once for all that came meanwhile.

A step of eight sequences gives eight events in a row. Waking the loop for each would cost more than writing them out, and the two threads would
fight for Python's lock: the engine wakes the loop when it is about to compute the next step, without the lock, and does not wait for it. Most of what
a wake-up costs is fetching the server's own code and data, which the step has driven out of the processor's caches: so a small model, whose steps take
a few milliseconds, does not wake the loop for each. First and last tokens do not wait. Where a step takes longer than the engine thought, the loop looks
for itself.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from .bell import Bell

__all__ = ["Bridge", "Line"]


EVERY_S: Final = 0.033  # steps that are quicker bring their tokens together: at least that often, text leaves
MANY: Final = 64  # events are not gathered beyond so many: log-probabilities make them large
LATE_S: Final = 0.040  # after so long without a wake-up the loop takes what waits


class Bridge:
    """One for a server. `put` and `wake` are the engine's thread's; receivers are called on the loop, in order. What comes often has a `line`."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._bell = Bell(loop, self._answer)
        self._queue: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._woken = self._urgent = False
        self._gathered = 0  # events since the last wake-up
        self._woken_at = 0.0
        self._late: asyncio.TimerHandle | None = None
        self._after: list[Callable[[], None]] | None = None  # what is to be called when all that waits has been; None: nothing is being called

    def open(self) -> None:
        """On the loop, before an engine calls `wake`; it works before, too, and holds the engine up."""
        self._bell.open()

    def close(self) -> None:
        """On the loop: gives back what `open` took."""
        self._bell.close()

    def put(self, receiver: Callable[..., None], *args: Any, urgent: bool = True) -> None:
        """Queues receiver(*args) for the loop, which is told by `wake`; urgent: by the next one."""
        self._queue.append((receiver, args))
        self.count(urgent)

    def line(self, receiver: Callable[[deque[Any]], None]) -> Line:
        """For the events of one prompt: receiver(events) is called on the loop once for all that wait, and takes them from the left."""
        return Line(self, receiver)

    def count(self, urgent: bool) -> None:
        """One event more has come; urgent: what is queued is not put off."""
        self._gathered += 1
        self._urgent |= urgent

    def wake(self, next_s: float | None = None) -> None:
        """What is queued is called on the loop, soon. next_s: so long will it take until the next call; None: nobody knows. Where that is soon
        enough and nothing is urgent, the loop sleeps until then. A loop that is closed has nobody who waits."""
        if self._queue and not self._woken:
            now = time.monotonic()
            if next_s is not None and not self._urgent and self._gathered < MANY and now - self._woken_at + next_s < EVERY_S:
                return
            self._woken, self._urgent, self._gathered, self._woken_at = True, False, 0, now
            self._bell.ring()

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


class Line:
    """Events of one receiver. A token costs no call of its own on the loop, where the calls of eight streams took a third of a wake-up's time."""

    def __init__(self, bridge: Bridge, receiver: Callable[[deque[Any]], None]):
        self._bridge, self._receiver = bridge, receiver
        self._events: deque[Any] = deque()
        self._queued = False

    def put(self, event: Any, urgent: bool = True) -> None:
        """Queues an event, in the engine's thread, as `Bridge.put` does."""
        self._events.append(event)
        if not self._queued:
            self._queued = True
            self._bridge.put(self._deliver, urgent=urgent)
        else:
            self._bridge.count(urgent)

    def _deliver(self) -> None:
        self._queued = False  # before the events are read: whoever comes now queues again
        if self._events:
            self._receiver(self._events)


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
