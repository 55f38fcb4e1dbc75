"""How much one key may ask for: answers that run or wait at the same time, and answers a minute.

A request counts as one until its body has been read, and then as its prompts times the answers to each, so that one client cannot fill
the queue for all with few requests. What is above is a 429 that says when to come again. Used by `gate`, on the event loop; keys are
known here by their hashes only, and there are no more entries than keys.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from ..core.errors import RateLimited

__all__ = ["KeyLimits"]


class KeyLimits:
    """concurrent: answers of a key at the same time; per_minute: answers of a key in a minute, refilled evenly. None: no limit."""

    def __init__(self, concurrent: int | None, per_minute: int | None, clock: Callable[[], float] = time.monotonic):
        self._concurrent, self._per_minute, self._clock = concurrent, per_minute, clock
        self._running: dict[bytes, int] = {}
        self._left: dict[bytes, tuple[float, float]] = {}  # key -> (answers left, at this time)

    def enter(self, key: bytes, count: int = 1, *, held: int = 0) -> None:
        """So many answers of this key begin; `leave` must follow. held: answers of the same request that have entered before. Raises
        RateLimited, and then nothing must follow; one that no retry cures has the field `never`."""
        for limit, what in ((self._concurrent, "at the same time"), (self._per_minute, "in a minute")):
            if limit is not None and held + count > limit:
                said = f"the request asks for {held + count} answers; this key may have {limit} {what}"
                raise RateLimited(said, fix="send fewer prompts, or ask for fewer answers to each", never=True)
        running = self._running.get(key, 0)
        if self._concurrent is not None and running + count > self._concurrent:
            said = f"this key has {running} answers at work and asks for {count} more; its limit is {self._concurrent}"
            raise RateLimited(said, fix="wait for one of them", retry_after_s=1)
        if self._per_minute is not None:
            now, rate = self._clock(), self._per_minute / 60
            left, since = self._left.get(key, (float(self._per_minute), now))
            left = min(float(self._per_minute), left + (now - since) * rate)
            if left < count:
                self._left[key] = (left, now)
                wait_s = max(1, math.ceil((count - left) / rate))
                raise RateLimited(f"this key may ask for {self._per_minute} answers a minute", fix=f"wait {wait_s} s", retry_after_s=wait_s)
            self._left[key] = (left - count, now)
        self._running[key] = running + count

    def leave(self, key: bytes, count: int = 1) -> None:
        """So many answers that have entered have ended."""
        left = self._running[key] - count
        if left:
            self._running[key] = left
        else:
            del self._running[key]

    def keep(self, keys: Iterable[bytes]) -> None:
        """Forgets the rates of keys that are no longer accepted."""
        known = set(keys)
        self._left = {key: value for key, value in self._left.items() if key in known}
