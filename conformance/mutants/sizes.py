"""Faults that only show at the sizes of real models: an index or a count kept in 16 bits, a buffer made for the usual number of rows or columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fastllm.api import Backend, Buffer, Stream, Tensor

from .base import Breaker, CodedBase, Mutant, MutantBase, SamplerBase, changed, of_format, post, pre
from .numeric import make

__all__ = ["mutants"]

Array = np.ndarray
ROWS = 512
USUAL = 11008
"""Inner width of Llama 2 7B, which many a kernel was tuned for."""


def _unwritten(part: Callable[[Sequence[Any]], slice | tuple[Any, ...]]) -> Breaker:
    """A part of the result is not written. part(arrays of the inputs): which."""

    def breaker(backend: MutantBase, honest: Callable[..., None]) -> Callable[..., None]:
        def call(*inputs: Tensor | None, out: Any, **more: Any) -> None:
            results = [backend.array(t) for t in (out if isinstance(out, tuple) else (out,))]
            before = [r.copy() for r in results]
            honest(*inputs, out=out, **more)
            which = part([None if t is None or t.dtype in ("kv", "slot") else backend.array(t) for t in inputs])
            for result, old in zip(results, before, strict=True):
                result[which] = old[which]

        return call

    return breaker


def _rows_from(first: int) -> Breaker:
    return _unwritten(lambda arrays: slice(first, None))


def _sequences_from(first: int, starts: int) -> Breaker:
    """starts: which input holds the first row of each sequence."""
    return _unwritten(lambda arrays: slice(int(arrays[starts][first]) if len(arrays[starts]) > first else 1 << 62, None))


def _wrapped(out: Any, arrays: Any, attrs: Any) -> None:
    """Column j of a result is column j mod 2^16."""
    for result in out if isinstance(out, tuple) else (out,):
        if result.shape[-1] > 1 << 16:
            result[...] = result[..., np.arange(result.shape[-1]) & 0xFFFF]


def _cut(first: int) -> Callable[[Array], Array]:
    """Elements of the last axis from there on count as 0."""

    def cut(x: Array) -> Array:
        x[..., first:] = 0
        return x

    return cut


def _wrapped_stacks(backend: MutantBase, inputs: list[Any], attrs: Any) -> None:
    """Row e · N + n of a stack is the one that its last 16 bits name."""
    for at in (3, 4, 5):
        if inputs[at] is not None:
            stack = backend.array(inputs[at])
            rows = stack.reshape(-1, stack.shape[-1])
            inputs[at] = backend.temporary(rows[np.arange(len(rows)) & 0xFFFF].reshape(stack.shape), inputs[at])


def _low_bits(values: Array) -> Array:
    return np.where(values >= 0, values & 0xFFFF, values)


def _few_rows_of_wide(x: Array) -> Array:
    """A buffer of 64 rows for wide sums: the others take the last of them."""
    if x.shape[1] >= 4096:
        x[64:] = x[63:64]
    return x


def _few_adjustments(backend: MutantBase, inputs: list[Any], attrs: Any) -> None:
    """Starts, ids, biases and penalties end where 16 bits do."""
    inputs[6] = backend.temporary(np.minimum(backend.array(inputs[6]), 0xFFFF), inputs[6])
    for at in range(7, len(inputs)):
        inputs[at] = backend.temporary(backend.array(inputs[at])[:0xFFFF], inputs[at])


_ROWS: tuple[tuple[str, str, str], ...] = (
    # op, cases with so many rows, rule
    ("linear", "linear/f32*f32/row/m{rows}-*/sparse#bound", "bound"),
    *((op, f"{op}/f32/row/m{{rows}}-*#bound", "bound") for op in ("rms_norm", "layer_norm", "softmax")),
    ("quantize", "quantize/f32/row/m{rows}-*/normal.*#bound", "bound"),
    ("dequantize", "dequantize/i8/row/m{rows}-*#bound", "bound"),
    ("act_mul", "act_mul/f32/row/m{rows}-*/silu.*#bound", "bound"),
    ("rope", "rope/f32/row/t{rows}-*#bound", "bound"),
    *((op, f"{op}/f32/row/m{{rows}}-*/same#exact", "exact") for op in ("add", "mul")),
    ("embed", "embed/i32*f32/row/*-n{rows}/real#exact", "exact"),
    ("concat", "concat/f32/row/t{rows}-*#exact", "exact"),
)
_FEWER_ROWS: tuple[tuple[str, str, str], ...] = (
    # ops that have no case of more than 65,536 rows
    ("matmul", "matmul/f32*f32/*/t{rows}-*/sparse#bound", "bound"),
    ("route_topk", "route_topk/f32/row/t{rows}-*#bound", "exact"),
    ("moe", "moe/f32*f32/row/t{rows}-*#bound", "bound"),
    *((op, f"{op}/f32/row/*/rows.real#bound", "bound") for op in ("short_conv", "delta_rule", "attention")),
    ("sample", "sample/f32/row/r{rows}-*/greedy.*#exact", "exact"),
)


def _columns() -> Iterator[tuple[str, str, str]]:
    """(op, cases with more than 65,536 columns, rule)."""
    yield "linear", "linear/f32*f32/row/m1-n262211-*/sparse#bound", "bound"
    yield "matmul", "matmul/f32*f32/row/t1-h1-n65569-*/sparse#bound", "bound"
    for op in ("softmax", "act_mul"):
        yield op, f"{op}/f32/row/m2-n70000/{'silu.*' if op == 'act_mul' else '*'}#bound", "bound"
    for op in ("add", "mul"):
        yield op, f"{op}/f32/row/m2-n70000/same#exact", "exact"
    yield "quantize", "quantize/f32/row/m2-n70016/normal.*#bound", "bound"
    yield "dequantize", "dequantize/i8/row/m2-n70016/*#bound", "bound"
    yield "concat", "concat/f32/row/t2-n40000_30001/normal#exact", "exact"


def _others() -> Iterator[tuple[str, str, str, str, str, Breaker]]:
    vocabulary, wide = "linear/f32*f32/row/m1-n262211-*/sparse#bound", "linear/f32*f32/row/m2-n65569-*/sparse#bound"
    yield "linear", "columns_of_15_bits", "outputs 32,768 to 65,535, negative in 16 bits, are not written", vocabulary, "bound", _unwritten(lambda a: (slice(None), slice(1 << 15, 1 << 16)))
    yield "linear", "columns_beyond_65536", "outputs from the 65,537th on are not written", wide, "bound", _unwritten(lambda a: (slice(None), slice(1 << 16, None)))
    yield "linear", "k_beyond_11008", "products from the 11,009th on are left out", "linear/f32*f32/row/m2-n5-k28672/sparse*#bound", "bound", changed(0, _cut(USUAL))
    yield "linear", "k_of_15_bits", "products from the 32,769th on are left out", "linear/f32*f32/row/m2-n7-k53248/sparse#bound", "bound", changed(0, _cut(1 << 15))
    yield "linear", "k_of_16_bits", "products from the 65,537th on are left out", "linear/f32*f32/row/m2-n3-k66048/sparse#bound", "bound", changed(0, _cut(1 << 16))
    yield "linear", "rows_beyond_64_of_wide", "for K ≥ 4096, rows from the 65th on are those before them", "linear/f32*f32/row/m80-n33-k4096/sparse*#bound", "bound", changed(0, _few_rows_of_wide)
    yield "matmul", "k_beyond_11008", "products from the 11,009th on are left out", "matmul/f32*f32/*-k28672/sparse#bound", "bound", changed(0, _cut(USUAL))
    for op in ("rms_norm", "layer_norm"):
        yield op, "columns_beyond_11008", "elements from the 11,009th on count as 0", f"{op}/f32/row/m2-n18432/*#bound", "bound", changed(0, _cut(USUAL))
    yield "embed", "ids_of_16_bits", "ids are kept in 16 bits", "embed/i32*f32/row/v262211-c32-n16/real#exact", "exact", changed(0, _low_bits)
    yield "embed", "ids_of_15_bits", "ids from 32,768 on are 32,767", "embed/i32*f32/row/v262211-c32-n16/real#exact", "exact", changed(0, lambda i: np.minimum(i, 0x7FFF))
    yield "rope", "positions_of_17_bits", "positions are kept in 17 bits", "rope/f32/row/t1100-*/half.real#bound", "bound", changed(1, lambda p: p & 0x1FFFF)
    blocks, context = "attention/f32/row/*/blocks.real#bound", "attention/f32/row/*/context.real#bound"
    yield "attention", "blocks_of_16_bits", "numbers of blocks are kept in 16 bits", blocks, "bound", changed(5, _low_bits)
    yield "attention", "blocks_beyond_512", "blocks of a sequence from the 513th on are the one before them", context, "bound", changed(5, lambda t: t[:, np.minimum(np.arange(t.shape[1]), ROWS - 1)])
    yield "attention", "context_of_16_bits", "lengths are kept in 16 bits", context, "bound", changed(4, _low_bits)
    yield "attention", "context_beyond_65535", "keys from the 65,536th on are not read", context, "bound", changed(4, lambda n: np.minimum(n, 0xFFFF))
    yield "attention", "positions_of_16_bits", "positions are kept in 16 bits", "attention/f32/row/*/window.real#bound", "bound", changed(2, _low_bits)
    yield "attention", "sequences_beyond_512", "rows of sequences from the 513th on are not written", "attention/f32/row/*/many.real#bound", "bound", _sequences_from(ROWS, 3)
    for dtype in ("f16", "bf16", "int8"):
        of = f"attention/{dtype}/row/*/{{}}.cache#bound"
        yield "attention", f"blocks_of_16_bits_{dtype}", f"numbers of blocks are kept in 16 bits ({dtype})", of.format("blocks"), "bound", changed(5, _low_bits)
        yield "attention", f"context_of_16_bits_{dtype}", f"lengths are kept in 16 bits ({dtype})", of.format("context"), "bound", changed(4, _low_bits)
        yield "attention", f"rows_beyond_512_{dtype}", f"rows from the 513th on are not written ({dtype})", of.format("rows"), "bound", _rows_from(ROWS)
    slots = "kv_write/f32/row/*/blocks.real#exact"
    yield "kv_write", "slots_of_16_bits", "slots are kept in 16 bits", slots, "exact", changed(3, _low_bits)
    yield "kv_write", "slots_of_15_bits", "slots from 32,768 on, negative in 16 bits, store nothing", slots, "exact", changed(3, lambda s: np.where(s >= 1 << 15, -1, s))
    yield "kv_write", "rows_beyond_512", "rows from the 513th on store nothing", "kv_write/f32/row/*/rows.real#exact", "exact", changed(3, lambda s: np.where(np.arange(len(s)) < ROWS, s, -1))
    yield "route_topk", "ids_of_8_bits", "ids are kept in 8 bits", "route_topk/f32/row/t2-e512-*/wide#bound", "exact", post(lambda out, a, t: np.bitwise_and(out[0], 0xFF, out=out[0]))
    yield "moe", "ids_of_8_bits", "ids are kept in 8 bits", "moe/f32*f32/row/t7-e513-*/many#bound", "bound", changed(1, lambda i: np.where(i >= 0, i & 0xFF, i))
    yield "moe", "choices_beyond_8", "the experts that a row names from the 9th on are left out", "moe/f32*f32/row/t7-e513-*/many#bound", "bound", changed(2, _cut(8))
    yield "moe", "stack_rows_of_16_bits", "e · F + n is kept in 16 bits", "moe/f32*f32/row/*/stack#bound", "bound", pre(_wrapped_stacks)
    yield "moe", "hidden_beyond_4096", "elements of a row from the 4,097th on count as 0", "moe/f32*f32/row/*-c7168-*/wide#bound", "bound", changed(0, _cut(4096))
    yield "moe", "inner_beyond_11008", "inner elements from the 11,009th on are left out", "moe/f32*f32/row/*-f16384/deep#bound", "bound", changed(5, _cut(USUAL))
    yield "route_topk", "choices_beyond_8", "experts from the 9th on are the 8th again", "route_topk/f32/row/t2-e512-*/wide#bound", "exact", post(lambda out, a, t: out[0].__setitem__((slice(None), slice(8, None)), out[0][:, 7:8]))
    yield "route_topk", "groups_beyond_2", "two groups at most are kept", "route_topk/f32/row/*/deepseek_v3#bound", "exact", pre(lambda b, i, t: t.update(keep_groups=min(t["keep_groups"], 2)))
    yield "embed", "columns_beyond_8192", "columns from the 8,193rd on are not written", "embed/i32*f32/row/v9-c16384-*/real#exact", "exact", _unwritten(lambda a: (slice(None), slice(8192, None)))
    for op, slot, starts in (("short_conv", 5, 4), ("delta_rule", 10, 9)):
        yield op, "slots_of_16_bits", "slots are kept in 16 bits", f"{op}/f32/row/*/slots.real#bound", "bound", changed(slot, _low_bits)
        yield op, "sequences_beyond_512", "rows of sequences from the 513th on are not written", f"{op}/f32/row/*/many.real#bound", "bound", _sequences_from(ROWS, starts)


class _NearUpload(MutantBase):
    """Offsets of uploads in 16 bits."""

    def upload(self, dst: Buffer, offset: int, src: memoryview, stream: Stream) -> None:
        super().upload(dst, offset & 0xFFFF, src, stream)


class _NearDownload(MutantBase):
    """Offsets of downloads in 16 bits."""

    def download(self, dst: memoryview, src: Buffer, offset: int, stream: Stream) -> None:
        super().download(dst, src, offset & 0xFFFF, stream)


class _NearCopy(MutantBase):
    """Offsets of copies in 16 bits."""

    def copy(self, dst: Buffer, dst_offset: int, src: Buffer, src_offset: int, nbytes: int, stream: Stream) -> None:
        super().copy(dst, dst_offset & 0xFFFF, src, src_offset & 0xFFFF, nbytes, stream)


class _ShortCopy(MutantBase):
    """Copies 64 KiB at most."""

    def copy(self, dst: Buffer, dst_offset: int, src: Buffer, src_offset: int, nbytes: int, stream: Stream) -> None:
        super().copy(dst, dst_offset, src, src_offset, min(nbytes, 1 << 16), stream)


def mutants() -> Iterator[Mutant]:
    """All of this file."""
    plain: Callable[[Mapping[str, str]], Backend] = lambda options: MutantBase(None, options)  # noqa: E731
    sampler: Callable[[Mapping[str, str]], Backend] = lambda options: SamplerBase(None, options)  # noqa: E731
    for last, rows, table in ((ROWS, 1100, _ROWS), (ROWS, 1100, _FEWER_ROWS), (1 << 16, 66000, _ROWS)):
        for op, cases, rule in table:
            base = (make(op, _rows_from(last), SamplerBase), sampler) if op == "sample" else (make(op, _rows_from(last)), plain)
            yield Mutant(f"{op}.rows_beyond_{last}", "sizes", f"rows from the {last + 1:,}th on are not written", cases.format(rows=rows), rule, *base)
    for op, cases, rule in _columns():
        yield Mutant(f"{op}.columns_of_16_bits", "sizes", "the number of a column is kept in 16 bits", cases, rule, make(op, post(_wrapped)), plain)
    for op, name, what, cases, rule, breaker in _others():
        yield Mutant(f"{op}.{name}", "sizes", what, cases, rule, make(op, breaker), plain)
    coded: Callable[[Mapping[str, str]], Backend] = lambda options: CodedBase(None, options)  # noqa: E731
    for format in CodedBase.formats:
        copied = "exact" if format in ("f16", "bf16") else "bound"
        for op, name, what, cases, rule, at, breaker in (
            ("linear", "columns_of_16_bits", "the number of a column", f"linear/f32*{format}/row/m1-n262211-*/sparse#bound", "bound", 1, post(_wrapped)),
            ("embed", "ids_of_16_bits", "an id", f"embed/i32*{format}/row/v262211-*-n16/real#{copied}", copied, 1, changed(0, _low_bits)),
            ("moe", "stack_rows_of_16_bits", "e · F + n", f"moe/f32*{format}/row/*/stack#bound", "bound", 3, pre(_wrapped_stacks)),
        ):
            yield Mutant(f"{op}.{name}_{format}", "sizes", f"{what} is kept in 16 bits for weights in {format}", cases, rule, make(op, of_format(format, at, breaker), CodedBase), coded)
    both: Mapping[str, Breaker] = {"kv_write": changed(3, lambda s: np.where(s >= 0, s & 0xFFFFF, s)), "attention": changed(5, _low_bits)}
    yield Mutant("kv_write.blocks_of_16_bits_everywhere", "sizes", "what writes and what reads a cache keep numbers of blocks in 16 bits", "kv_write/f32/row/*/blocks.real#exact", "exact",
                 lambda options: MutantBase(both, options), plain)  # fmt: skip
    for name, what, breaker in (
        ("adjusted_ids_of_16_bits", "ids of biases and penalties are kept in 16 bits", changed(7, _low_bits)),
        ("adjustments_beyond_65535", "entries of biases and penalties from the 65,536th on are not read", pre(_few_adjustments)),
    ):
        cases = f"sample/f32/row/*/greedy.{'far' if 'ids' in name else 'many'}#exact"
        yield Mutant(f"sample.{name}", "sizes", what, cases, "exact", make("sample", breaker, SamplerBase), sampler)
    kinds: tuple[tuple[str, str, type[MutantBase]], ...] = (
        ("upload_offset_of_16_bits", "offsets of uploads are kept in 16 bits", _NearUpload), ("download_offset_of_16_bits", "offsets of downloads are kept in 16 bits", _NearDownload),
        ("copy_offset_of_16_bits", "offsets of copies are kept in 16 bits", _NearCopy), ("copy_of_64_kib", "copies move 64 KiB at most", _ShortCopy),
    )  # fmt: skip
    for name, what, kind in kinds:
        yield Mutant(f"backend.{name}", "sizes", what, "backend/*/far#contract", "contract", lambda options, k=kind: k(None, options), plain)  # type: ignore[misc]
