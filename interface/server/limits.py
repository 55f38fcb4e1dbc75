"""How much one key may ask for: requests that run or wait at the same time, and requests a minute.

Without it one client could fill the queue for all. What is above is a 429 that says when to come again. Used by `gate`, on the event
loop; keys are known here by their hashes only, and there are no more entries than keys.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from ..core.errors import RateLimited

__all__ = ["KeyLimits"]


class KeyLimits:
    """concurrent: requests of a key at the same time; per_minute: requests of a key in a minute, refilled evenly. None: no limit."""

    def __init__(self, concurrent: int | None, per_minute: int | None, clock: Callable[[], float] = time.monotonic):
        self._concurrent, self._per_minute, self._clock = concurrent, per_minute, clock
        self._running: dict[bytes, int] = {}
        self._left: dict[bytes, tuple[float, float]] = {}  # key -> (requests left, at this time)

    def enter(self, key: bytes) -> None:
        """A request of this key begins; `leave` must follow. Raises RateLimited, and then nothing must follow."""
        if self._concurrent is not None and self._running.get(key, 0) >= self._concurrent:
            raise RateLimited(
                f"this key has {self._concurrent} requests at work, which is its limit", fix="wait for one of them", retry_after_s=1
            )
        if self._per_minute is not None:
            now, rate = self._clock(), self._per_minute / 60
            left, since = self._left.get(key, (float(self._per_minute), now))
            left = min(float(self._per_minute), left + (now - since) * rate)
            if left < 1:
                self._left[key] = (left, now)
                wait_s = max(1, math.ceil((1 - left) / rate))
                raise RateLimited(f"this key may send {self._per_minute} requests a minute", fix=f"wait {wait_s} s", retry_after_s=wait_s)
            self._left[key] = (left - 1, now)
        self._running[key] = self._running.get(key, 0) + 1

    def leave(self, key: bytes) -> None:
        """A request that has entered has ended."""
        left = self._running[key] - 1
        if left:
            self._running[key] = left
        else:
            del self._running[key]

    def keep(self, keys: Iterable[bytes]) -> None:
        """Forgets the rates of keys that are no longer accepted."""
        known = set(keys)
        self._left = {key: value for key, value in self._left.items() if key in known}
