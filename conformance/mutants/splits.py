"""Faults of attention that only show over some hundred keys: what is done once per range of keys, or per tile of rows, instead of once per row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastllm.api import Tensor

from .base import Breaker, Mutant, MutantBase
from .numeric import make

__all__ = ["mutants"]

Array = np.ndarray
RANGE, TILE = 256, 64


@dataclass
class _Row:
    """One head of one row, before the softmax. score: with cap, without distances; seen, distance: [n]; sinks: how often the sink counts; width: channels of
    a head; place: of the row among those of its sequence; sequences: of the step; prefix: length."""

    query: Array
    keys: Array
    score: Array
    seen: Array
    distance: Array
    position: int
    attrs: dict[str, Any]
    block: int
    width: int
    place: int
    sequences: int
    prefix: int
    sinks: int = 1

    @property
    def index(self) -> Array:
        """Of the keys."""
        return np.arange(len(self.score))


def _visible(p: int, n: int, attrs: dict[str, Any], prefix: int) -> Array:
    """As the catalogue says it. bool [n]."""
    j = np.arange(n)
    seen = {
        "causal": j <= p, "full": j >= 0, "prefix": (j <= p) | ((j < prefix) & (p < prefix)), "chunk": (j <= p) & (j // max(attrs["chunk"], 1) == p // max(attrs["chunk"], 1)),
    }[attrs["mask"]]  # fmt: skip
    return seen & (p - j < attrs["window"]) if attrs["window"] else seen


def _own(change: Callable[[_Row], None]) -> Breaker:
    """Attention over more keys than one range has, row by row, in f64, with a fault; over fewer it is honest."""

    def breaker(backend: MutantBase, honest: Callable[..., None]) -> Callable[..., None]:
        def call(query: Tensor, cache: Tensor, *step: Tensor | None, out: Tensor, stream: Any, ws: Any, **attrs: Any) -> None:
            honest(query, cache, *step, out=out, stream=stream, ws=ws, **attrs)
            where, starts, lengths, table = (backend.array(step[i]) for i in range(4))
            if not len(lengths) or lengths.max() <= RANGE or lengths.max() > 1024:
                return
            sinks, slopes, prefix = (None if len(step) <= i or step[i] is None else backend.array(step[i]) for i in (4, 5, 6))
            q, result = backend.array(query), backend.array(out)
            for s, length in enumerate(lengths.tolist()):
                keys, values = backend._gather(cache, table[s], length, attrs["value_dim"], stream)
                group, first = q.shape[1] // keys.shape[1], 0 if prefix is None else int(prefix[s])
                for t in range(int(starts[s]), int(starts[s + 1])):
                    for h in range(q.shape[1]):
                        k = keys[:, h // group].astype(np.float64)
                        score, p = attrs["scale"] * (k @ q[t, h].astype(np.float64)), int(where[t])
                        score = attrs["softcap"] * np.tanh(score / attrs["softcap"]) if attrs["softcap"] else score
                        distance = np.zeros(length) if slopes is None else slopes[h] * (np.arange(length) - p)
                        row = _Row(q[t, h], k, score, _visible(p, length, attrs, first), distance, p, attrs, cache.block_size, q.shape[2], t - int(starts[s]), len(lengths), first)
                        change(row)
                        z = np.where(row.seen, row.score + row.distance, -np.inf)
                        top = max(z.max(), -np.inf if sinks is None else float(sinks[h]))
                        e = np.exp(z - top) if np.isfinite(top) else np.zeros(length)
                        total = e.sum() + (0 if sinks is None else row.sinks * np.exp(float(sinks[h]) - top))
                        result[t, h] = np.where(row.seen[:, None], e[:, None] * values[:, h // group], 0).sum(0) / total if total else 0

        return call

    return breaker


def _sink_in_each_range(row: _Row) -> None:
    row.sinks = -(-(row.position + 1) // RANGE)


def _distance_within_a_range(row: _Row) -> None:
    row.distance = np.where(row.index >= RANGE, row.distance * 0.5, row.distance)


def _cap_of_the_first_range(row: _Row) -> None:
    if row.attrs["softcap"]:
        row.score = np.where(row.index < RANGE, row.score, row.attrs["scale"] * (row.keys @ row.query.astype(np.float64)))


def _window_at_a_block(row: _Row) -> None:
    first = row.position - row.attrs["window"] + 1
    if row.attrs["window"] and first > 0 and first % row.block == 0:
        row.seen[first] = False


def _window_less(row: _Row) -> None:
    if row.attrs["window"] >= TILE:
        row.seen &= row.position - row.index < row.attrs["window"] - 1


def _last_block_of_many(row: _Row) -> None:
    if row.sequences >= 8:
        row.seen[(len(row.seen) - 1) // row.block * row.block :] = False


def _channels(width: int) -> Callable[[_Row], None]:
    """The last sixteen channels of such heads do not count behind the first range."""

    def change(row: _Row) -> None:
        if row.width == width:
            short = row.attrs["scale"] * (row.keys[:, :-16] @ row.query[:-16].astype(np.float64))
            row.score = np.where(row.index < RANGE, row.score, short)

    return change


def _chunk_of_the_tile(row: _Row) -> None:
    if row.attrs["mask"] == "chunk":
        first = max(row.position - row.place % TILE, 0)
        row.seen = (row.index <= row.position) & (row.index // row.attrs["chunk"] >= first // row.attrs["chunk"])


def _prefix_of_whole_tiles(row: _Row) -> None:
    if row.prefix:
        row.seen = (row.index <= row.position) | ((row.index < row.prefix // TILE * TILE) & (row.position < row.prefix))


def _after(change: Callable[[Array, list[int]], None]) -> Breaker:
    """Changes results over more than two ranges of keys. change(out, calls so far)."""

    def breaker(backend: MutantBase, honest: Callable[..., None]) -> Callable[..., None]:
        calls: list[int] = []

        def call(query: Tensor, cache: Tensor, *step: Tensor, out: Tensor, **more: Any) -> None:
            honest(query, cache, *step, out=out, **more)
            lengths = backend.array(step[2])
            if len(lengths) and lengths.max() > 2 * RANGE:
                calls.append(len(lengths))
                change(backend.array(out), calls)

        return call

    return breaker


def _another_order(out: Array, calls: list[int]) -> None:
    if len(calls) % 2:
        out *= np.float32(1 + 2.0**-23)


def _another_kernel(out: Array, calls: list[int]) -> None:
    if calls[-1] > 1:
        out *= np.float32(1 + 2.0**-23)


def mutants() -> Iterator[Mutant]:
    """All of this file."""
    plain = lambda options: MutantBase(None, options)  # noqa: E731
    table: list[tuple[str, str, str, Callable[[_Row], None]]] = [
        ("sink_in_each_range", f"a sink counts once for each range of {RANGE} keys", "sinks", _sink_in_each_range),
        ("distance_behind_a_range", f"distances of keys from the {RANGE + 1}th on count half", "alibi", _distance_within_a_range),
        ("cap_of_the_first_range", f"scores of keys from the {RANGE + 1}th on are not capped", "softcap", _cap_of_the_first_range),
        ("window_at_a_block", "a window that begins where a block does begins one key later", "window256", _window_at_a_block),
        ("window_of_64_at_a_block", "a window that begins where a block does begins one key later", "window64", _window_at_a_block),
        ("long_window_less_1", f"windows of {TILE} keys and more have one less", "window512", _window_less),
        ("last_block_of_many", "with eight sequences or more the last block is not read", "plain", _last_block_of_many),
        ("chunk_of_the_tile", f"rows see the chunk of the first row of their tile of {TILE}", "chunk300", _chunk_of_the_tile),
        ("prefix_of_whole_tiles", f"of a prefix whole tiles of {TILE} keys count", "prefix", _prefix_of_whole_tiles),
    ]
    table += [(f"channels_of_{width}", f"heads of width {width}: the last 16 channels do not count behind {RANGE} keys", f"d{width}{'_window' if width == 256 else ''}", _channels(width)) for width in (80, 96, 128, 256)]
    for name, what, case, change in table:
        yield Mutant(f"attention.{name}", "attention", what, f"attention/f32/row/*/{case}.splits#bound", "bound", make("attention", _own(change)), plain)
    for name, what, rule, after in (
        ("another_order", f"over more than {2 * RANGE} keys every second call has other bits", "d0", _another_order),
        ("another_kernel", f"over more than {2 * RANGE} keys one sequence alone and several have other bits", "d2", _another_kernel),
    ):
        yield Mutant(f"attention.{name}_of_ranges", "determinism", what, f"attention/-/-/attention/splits#{rule}", rule, make("attention", _after(after)), plain)
