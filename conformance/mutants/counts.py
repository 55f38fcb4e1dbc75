"""Faults of one number of rows, tokens or sequences, and of whole tiles: of each op, and of one format of weights or one type of cache alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fastllm.api import KV_DTYPES, Backend, No, OpFn, OpQuery, Stream, Tensor, Yes

from ..blocks import PLAIN_BYTES
from .base import Breaker, CodedBase, Mutant, MutantBase, SamplerBase, of_format, post
from .numeric import make

__all__ = ["coarse", "mutants"]

Array = np.ndarray
Op = Callable[..., None]
F16, F32 = np.float16, np.float32
SAME = "the last row is the one before it in a step of {} rows"
LARGE = "where rows, outputs and products are more than 64 each"
WIDE = "of wide rows, elements from the 1,025th on are zero from the 65th row on"


def _rows(count: int) -> Breaker:
    """In a step of so many rows the last one is the one before it; of one row it is zero."""

    def change(out: Array | tuple[Array, ...], arrays: Any, attrs: Any) -> None:
        for part in out if isinstance(out, tuple) else (out,):
            if len(part) == count:
                part[-1] = part[-2] if count > 1 else 0

    return post(change)


def _rows_over(dtype: str, count: int) -> Breaker:
    """The same, only over a cache of a type."""

    def breaker(backend: MutantBase, honest: Op) -> Op:
        broken = _rows(count)(backend, honest)

        def call(query: Tensor, cache: Any, *inputs: Any, **more: Any) -> None:
            (broken if cache.spec.dtype == dtype else honest)(query, cache, *inputs, **more)

        return call

    return breaker


def _dropped(dtype: str | None, count: int) -> Breaker:
    """Of so many tokens the last one is not written; of a cache of one type only."""

    def breaker(backend: MutantBase, honest: Op) -> Op:
        def call(cache: Tensor, key: Tensor, value: Tensor, slots: Tensor, **more: Any) -> None:
            if key.shape[0] == count and cache.spec is not None and getattr(cache.spec, "dtype", None) == dtype:
                kept = backend.array(slots).copy()
                kept[-1] = -1
                slots = backend.temporary(kept, slots)
            honest(cache, key, value, slots, **more)

        return call

    return breaker


def _tiles(change: Callable[[MutantBase, list[Any]], None], last: bool = False) -> Breaker:
    """Only where there are more rows than 64, and as many outputs and products."""

    def breaker(backend: MutantBase, honest: Op) -> Op:
        def call(*inputs: Any, out: Any, **more: Any) -> None:
            operands, large = list(inputs), out.shape[0] > 64 and min(out.shape[-1], inputs[0].shape[-1]) > 64
            if large and not last:
                change(backend, operands)
            honest(*operands, out=out, **more)
            if large and last:
                backend.array(out)[..., -1] = 0

        return call

    return breaker


def coarse(backend: MutantBase, operands: list[Any]) -> None:
    operands[0] = backend.temporary(backend.array(operands[0]).astype(F16).astype(F32), operands[0])


def _wide() -> Breaker:
    """Of wide rows, elements from the 1,025th on are zero from the 65th row on."""
    return post(lambda out, arrays, attrs: out.__setitem__((slice(64, None), slice(1024, None)), 0))


def _lone(batch: int, index: int = 4) -> Breaker:
    """In a step of so many sequences the last one is zero. index: of an operand with an entry for each sequence."""

    def breaker(backend: MutantBase, honest: Op) -> Op:
        def call(*inputs: Any, out: Tensor, **more: Any) -> None:
            honest(*inputs, out=out, **more)
            if inputs[index].shape[0] == batch:
                backend.array(out)[-1] = 0

        return call

    return breaker


class Capped(MutantBase):
    """Has an op `softcap`, which `ref` leaves to its parts."""

    def supports(self, q: OpQuery) -> Yes | No:
        return Yes("mutant.softcap") if q.op == "softcap" else super().supports(q)

    def ops(self) -> Mapping[str, OpFn]:
        honest: Op = self._softcap
        breaker = self.breakers.get("softcap")
        return {**super().ops(), "mutant.softcap": breaker(self, honest) if breaker else honest}

    def _softcap(self, x: Tensor, *, out: Tensor, stream: Stream, ws: Any, cap: float) -> None:
        self.array(out)[...] = np.tanh(self.array(x) / F32(cap)) * F32(cap)


def _table() -> Iterator[tuple[str, str, str, str, str, Breaker]]:
    """(op, name, what, cases, rule, breaker)."""
    weights = {"matmul": "f32*f32", "moe": "f32*f32", "embed": "i32*f32", "dequantize": "i8"}
    for count in (4, 6, 16, 32, 128):
        yield "linear", f"of_{count}_rows", SAME.format(count), "linear/f32*f32/row/*/counts#bound", "bound", _rows(count)
    for op in ("matmul", "rms_norm", "layer_norm", "softmax", "act_mul", "rope", "add", "mul", "embed", "moe"):
        rule = "exact" if op in ("add", "mul", "embed") else "bound"
        yield op, "of_16_rows", SAME.format(16), f"{op}/{weights.get(op, 'f32')}/row/*/counts#{rule}", rule, _rows(16)
    for op in ("quantize", "dequantize", "concat", "route_topk", "short_conv", "delta_rule"):
        rule = "exact" if op in ("concat", "route_topk") else "bound"
        yield op, "of_32_rows", SAME.format(32), f"{op}/{weights.get(op, 'f32')}/row/*/counts#*", rule, _rows(32)
    for op, index in (("short_conv", 5), ("delta_rule", 10)):
        yield op, "of_8_sequences", "the last of 8 sequences is not written", f"{op}/f32/row/*/sequences#bound", "bound", _lone(8, index)
    for cache in (None, *KV_DTYPES):
        kept, end = cache or "f32", ".cache" if cache else ""
        name, over = (f"_{cache}", f" to a cache of {cache}") if cache else ("", "")
        yield "kv_write", f"of_32_tokens{name}", f"the last of 32 tokens is not written{over}", f"kv_write/{kept}/row/*/counts{end}#bound", "bound", _dropped(cache, 32)
    for cache in KV_DTYPES:
        yield "attention", f"of_32_rows_{cache}", f"{SAME.format(32)} over a cache of {cache}", f"attention/{cache}/row/*/counts.cache#bound", "bound", _rows_over(cache, 32)
    yield "attention", "of_32_rows", SAME.format(32), "attention/f32/row/*/counts#bound", "bound", _rows(32)
    yield "attention", "of_8_sequences", "the last of 8 sequences is not written", "attention/f32/row/*/sequences#bound", "bound", _lone(8)
    for op in ("linear", "matmul"):
        yield op, "f16_operand_of_tiles", f"activations rounded to f16 {LARGE}", f"{op}/f32*f32/row/*tiles#bound", "bound", _tiles(coarse)
        yield op, "last_column_of_tiles", f"the last output is zero {LARGE}", f"{op}/f32*f32/row/*tiles#bound", "bound", _tiles(coarse, last=True)
    for op in ("rms_norm", "layer_norm", "softmax", "act_mul"):
        yield op, "wide_rows_beyond_64", WIDE, f"{op}/f32/row/*/tiles#bound", "bound", _wide()


def _of_formats() -> Iterator[tuple[str, str, str, str, str, Breaker]]:
    """The same for weights of one format alone; all others, and f32, are right."""
    for format in CodedBase.formats:
        plain, of = format in PLAIN_BYTES, f" for weights in {format}"
        ops = [("linear", "f32", 1), ("embed", "i32", 1), ("moe", "f32", 3), *([("matmul", "f32", 1)] if plain else [])]
        for op, operands, at in ops:
            rule = "exact" if op == "embed" and plain else "bound"
            yield op, f"of_32_rows_{format}", SAME.format(32) + of, f"{op}/{operands}*{format}/row/*/counts#{rule}", rule, of_format(format, at, _rows(32))
            if op in ("linear", "matmul"):
                yield op, f"last_column_of_tiles_{format}", f"the last output is zero {LARGE},{of}", f"{op}/f32*{format}/row/*tiles#bound", "bound", of_format(format, at, _tiles(coarse, last=True))
            if op == "embed":
                yield op, f"wide_rows_beyond_64_{format}", WIDE + of, f"embed/i32*{format}/row/*/tiles#{rule}", rule, of_format(format, at, _wide())
    for format in ("q4_0", "q8_0"):
        yield "linear", f"of_4_rows_{format}", SAME.format(4), f"linear/f32*{format}/row/*/counts#bound", "bound", _rows(4)


def mutants() -> Iterator[Mutant]:
    """All of this file."""
    for base, table in ((MutantBase, _table()), (CodedBase, _of_formats())):
        honest: Callable[[Mapping[str, str]], Backend] = lambda options, kind=base: kind(None, options)  # type: ignore[misc]  # noqa: E731
        for op, name, what, cases, rule, breaker in table:
            yield Mutant(f"{op}.{name}", "counts", what, cases, rule, make(op, breaker, base), honest)
    yield Mutant("softcap.of_32_rows", "counts", SAME.format(32), "softcap/f32/row/*/counts#bound", "bound", make("softcap", _rows(32), Capped), lambda options: Capped(None, options))
    for count in (16, 32, 64):
        yield Mutant(f"sample.of_{count}_rows", "counts", SAME.format(count), "sample/f32/row/*counts#exact", "exact", make("sample", _rows(count), SamplerBase), lambda options: SamplerBase(None, options))
