"""What an engine tells about itself: the numbers behind the server's metrics and its health answer. Counters run from its start."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EngineStats"]


@dataclass(frozen=True)
class EngineStats:
    """A snapshot.

    running, waiting: sequences (choices count singly). prefix_hit_tokens: of prefix_looked_up_tokens, found in the cache.
    tokens_computed: prompt and decode, computed again after a preemption included. stalled_s: seconds since a step last ended
    while there is work, 0 when idle.
    """

    running: int
    waiting: int
    blocks_used: int
    blocks_cached: int
    blocks_total: int
    prefix_hit_tokens: int
    prefix_looked_up_tokens: int
    tokens_computed: int
    tokens_generated: int
    preemptions: int
    steps: int
    requests_finished: int
    requests_failed: int
    requests_cancelled: int
    stalled_s: float
    healthy: bool
