"""For engines that are asked for whole answers: times from when each token is seen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from protocol import Worker

__all__ = ["Generating"]


class Generating(Worker):
    """`generate(ids, new)` yields once for each new token, as soon as it is known. vocab_size: of the random prompts."""

    vocab_size = 0

    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)

    def generate(self, ids: list[int], new: int) -> Iterator[Any]:
        """To be written by the engine's worker."""
        raise NotImplementedError

    def prompt(self, tokens: int) -> list[int]:
        """Random ids, others every time."""
        return [int(i) for i in self.rng.integers(0, self.vocab_size - 8, max(tokens, 1))]

    def prefill(self, tokens: int) -> float:
        """Seconds to the first new token."""
        start = time.perf_counter()
        for _ in self.generate(self.prompt(tokens), 1):
            return time.perf_counter() - start
        raise RuntimeError("the engine made no token")

    def decode(self, context: int, tokens: int) -> float:
        """Seconds a token after the first, which ends the prompt."""
        times = [time.perf_counter() for _ in self.generate(self.prompt(context), tokens + 1)]
        if len(times) < 2:
            raise RuntimeError(f"the engine made {len(times)} tokens instead of {tokens + 1}")
        return (times[-1] - times[0]) / (len(times) - 1)
