"""Faults that are usual in kernels for devices, and show only with numbers, sizes or an order of calls that few cases have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fastllm.api import Backend, Buffer, RefBackend, Stream, Tensor

from .base import Breaker, LateBase, Mutant, MutantBase, post, pre, whole
from .numeric import make

__all__ = ["mutants"]

Array = np.ndarray
F32 = np.float32
GRID = 65535
CHUNK = 64


def _no_nan(index: int, kinds: tuple[str, ...]) -> Breaker:
    """fmax and fmin take the number where one of two is NaN."""

    def change(backend: MutantBase, inputs: list[Any], attrs: dict[str, Any]) -> None:
        if attrs["kind"] in kinds and inputs[index] is not None:
            x = backend.array(inputs[index])
            inputs[index] = backend.temporary(np.where(np.isnan(x), F32(7 if attrs["kind"] == "swiglu_oai" else 0), x), inputs[index])

    return pre(change)


def _maximum_from_0(x: Array) -> Array:
    if not x.size:
        return x
    p = np.exp(x - np.maximum(x.max(-1, keepdims=True), 0))
    return p / p.sum(-1, keepdims=True)


def _hidden_below(backend: MutantBase, honest: Callable[..., None]) -> Callable[..., None]:
    """Attention whose running maximum begins with 0: what is below the exponents of f32 is lost."""

    def call(query: Tensor, cache: Tensor, *step: Any, out: Tensor, stream: Any, **attrs: Any) -> None:
        honest(query, cache, *step, out=out, stream=stream, **attrs)
        if len(step) > 4 and any(s is not None for s in step[4:]):
            return
        where, starts, lengths, table = (backend.array(step[i]) for i in range(4))
        q, result = backend.array(query), backend.array(out)
        for s, length in enumerate(lengths.tolist()):
            keys, _ = backend._gather(cache, table[s], length, attrs["value_dim"], stream)
            group = q.shape[1] // keys.shape[1]
            for t in range(int(starts[s]), int(starts[s + 1])):
                for h in range(q.shape[1]):
                    score = attrs["scale"] * (keys[: where[t] + 1, h // group] @ q[t, h])
                    if score.max(initial=0.0) == 0 and np.exp(score.astype(F32)).sum() == 0:
                        result[t, h] = np.nan

    return call


def _alone_without_maximum(backend: MutantBase, honest: Callable[..., None]) -> Callable[..., None]:
    """Of a row that is the only one of its sequence no maximum is taken."""

    def call(query: Tensor, cache: Tensor, *step: Any, out: Tensor, stream: Any, **attrs: Any) -> None:
        honest(query, cache, *step, out=out, stream=stream, **attrs)
        where, starts, lengths, table = (backend.array(step[i]) for i in range(4))
        q, result = backend.array(query), backend.array(out)
        for s, length in enumerate(lengths.tolist()):
            t = int(starts[s])
            if starts[s + 1] - t != 1:
                continue
            keys, _ = backend._gather(cache, table[s], length, attrs["value_dim"], stream)
            for h in range(q.shape[1]):
                score = attrs["scale"] * (keys[: where[t] + 1, h // (q.shape[1] // keys.shape[1])] @ q[t, h])
                if score.max(initial=0.0) > 88.8:  # its exponential is beyond f32
                    result[t, h] = np.nan

    return call


def _positive_only(out: tuple[Array, Array], arrays: list[Any], attrs: Any) -> None:
    """The search for the best begins with id 0 and the score 0: where none is positive, 0 is found."""
    logits, bias = arrays[0], arrays[1] if len(arrays) > 1 else None
    score = 1 / (1 + np.exp(-logits)) if attrs["score"] == "sigmoid" else logits
    if attrs["score"] != "softmax" and len(logits):
        out[0][((score if bias is None else score + bias) <= 0).all(1)] = 0


def _one_table(backend: MutantBase, honest: Callable[..., None]) -> Callable[..., None]:
    """Rope keeps its frequencies by their number."""
    kept: dict[int, Array] = {}

    def call(x: Tensor, positions: Tensor, inv_freq: Tensor, **more: Any) -> None:
        freq = backend.array(inv_freq)
        honest(x, positions, backend.temporary(kept.setdefault(freq.size, freq.copy()), inv_freq), **more)

    return call


def _state_between_chunks(where: int, factor: float) -> Breaker:
    """Of a sequence that goes on, rows behind the first chunk see a state that has not faded."""

    def change(out: Array, arrays: list[Any], attrs: Any) -> None:
        positions, starts = arrays[where], arrays[where + 1]
        for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            if last - first > CHUNK and positions[first] > 0:
                out[first + CHUNK : last] *= F32(factor)

    return post(change)


def _beyond_the_grid(out: Array, arrays: Any, attrs: Any) -> None:
    """Heads of rows from the 65,536th on are not written."""
    if out.ndim == 3 and out.shape[0] * out.shape[1] > GRID:
        out.reshape(-1, out.shape[2])[GRID:] = 0


def _lost_tail(backend: MutantBase, inputs: list[Any], attrs: Any) -> None:
    """Of a long sum what is behind the last whole super-block of 256 is taken from before it."""
    x = backend.array(inputs[0])
    k = x.shape[-1]
    if k > 1024 and k % 256:
        inputs[0] = backend.temporary(np.concatenate([x[..., : k // 256 * 256], np.roll(x[..., k // 256 * 256 :], 1, axis=-1)], axis=-1), inputs[0])


def _wide_groups(out: Any, arrays: Any, attrs: Any) -> None:
    """The last group of a row that has groups of more than 64 is a hundredth too large."""
    if attrs["group"] > 64:
        (out[1] if isinstance(out, tuple) else out)[:, -1] *= F32(1.01)


def _few_stored(backend: MutantBase, inputs: list[Any], attrs: Any) -> None:
    for at in (1, 2):
        if inputs[at] is not None and inputs[at].shape[0] * inputs[at].shape[1] > GRID:
            x = backend.array(inputs[at]).copy()
            x.reshape(-1, x.shape[2])[GRID:] = 0
            inputs[at] = backend.temporary(x, inputs[at])


class _UploadsAtOnce(LateBase):
    """Its ops wait in the stream, its uploads do not."""

    def upload(self, dst: Buffer, offset: int, src: memoryview, stream: Stream) -> None:
        """Now."""
        RefBackend.upload(self, dst, offset, src, stream)


class _CopiesBehindUploads(LateBase):
    """A copy is done behind the next upload, or before the next copy or download if that comes first."""

    _behind: Callable[[], None] | None = None

    def copy(self, dst: Buffer, dst_offset: int, src: Buffer, src_offset: int, nbytes: int, stream: Stream) -> None:
        """Behind the next upload."""
        self._flush()
        self._behind = lambda: LateBase.copy(self, dst, dst_offset, src, src_offset, nbytes, stream)

    def upload(self, dst: Buffer, offset: int, src: memoryview, stream: Stream) -> None:
        """Then the copy that waits."""
        super().upload(dst, offset, src, stream)
        self._flush()

    def download(self, dst: memoryview, src: Buffer, offset: int, stream: Stream) -> None:
        """After the copy that waits."""
        self._flush()
        super().download(dst, src, offset, stream)

    def _flush(self) -> None:
        behind, self._behind = self._behind, None
        if behind is not None:
            behind()


def _table() -> Iterator[tuple[str, str, str, str, str, str, Breaker]]:
    act, grid = "act_mul/f32/row/*/", f"heads of rows from the {GRID + 1:,}th on are zero"
    yield "act_mul", "clip_of_nan", "rows", "swiglu_oai: a NaN in gate counts as 7", act + "swiglu_oai.gated.special#bound", "bound", _no_nan(0, ("swiglu_oai",))
    yield "act_mul", "clip_of_nan_in_up", "rows", "swiglu_oai: a NaN in up counts as 7", act + "swiglu_oai.gated.special#bound", "bound", _no_nan(1, ("swiglu_oai",))
    yield "act_mul", "relu_of_nan", "rows", "relu: a NaN counts as 0", act + "relu.gated.special#bound", "bound", _no_nan(0, ("relu",))
    yield "softmax", "maximum_from_0", "rows", "the maximum is sought from 0 on", "softmax/f32/row/*/below#bound", "bound", whole(_maximum_from_0)
    yield "attention", "maximum_from_0", "attention", "the running maximum begins with 0", "attention/f32/row/l40-*/below#bound", "bound", _hidden_below
    yield "attention", "no_maximum_alone", "attention", "a row alone in its sequence has no maximum taken", "attention/f32/row/l40-*/above#bound", "bound", _alone_without_maximum
    yield "route_topk", "scores_from_0", "experts", "the best score is sought from 0 on", "route_topk/*.below#bound", "exact", post(_positive_only)
    yield "rope", "one_table", "rows", "one table of angles for all frequencies of one number", "rope/f32/row/*/*.tables#bound", "bound", _one_table
    yield "delta_rule", "state_between_chunks", "recurrent", f"of a piece that goes on, rows behind the first {CHUNK} are a hundredth less", "delta_rule/*/continued#bound", "bound", _state_between_chunks(8, 0.99)
    yield "short_conv", "state_between_chunks", "recurrent", f"of a piece that goes on, rows behind the first {CHUNK} are a hundredth less", "short_conv/*/continued#bound", "bound", _state_between_chunks(3, 0.99)
    yield "linear", "lost_tail_of_256", "linear", "the tail of a sum behind its last 256 products is mixed up", "linear/f32*f32/row/*/tail#bound", "bound", pre(_lost_tail)
    for op in ("quantize", "dequantize"):
        yield op, "wide_groups", "quant", "groups of more than 64: the last one of a row is a hundredth too large", f"{op}/*/wide.*#bound", "bound", post(_wide_groups)
    for op, rule in (("rms_norm", "bound"), ("rope", "bound"), ("matmul", "bound"), ("add", "exact"), ("concat", "exact"), ("attention", "exact")):
        yield op, "beyond_the_grid", "sizes", grid, f"{op}/*/grid#{rule}", rule, post(_beyond_the_grid)
    yield "kv_write", "beyond_the_grid", "sizes", f"heads of rows from the {GRID + 1:,}th on are stored as zeros", "kv_write/*/grid#exact", "exact", pre(_few_stored)


def mutants() -> Iterator[Mutant]:
    """All of this file."""
    plain = lambda options: MutantBase(None, options)  # noqa: E731
    for op, name, family, what, cases, rule, breaker in _table():
        yield Mutant(f"{op}.{name}", family, what, cases, rule, make(op, breaker), plain)
    late: Callable[[Mapping[str, str]], Backend] = lambda options: LateBase(None, options)  # noqa: E731
    for name, what, kind in (("uploads_at_once", "uploads do not wait for the ops before them", _UploadsAtOnce), ("copies_behind_uploads", "a copy is done behind the next upload", _CopiesBehindUploads)):
        yield Mutant(f"stream.{name}", "order", what, "backend/*/filled_again#contract", "contract", lambda options, k=kind: k(None, options), late)  # type: ignore[misc]
