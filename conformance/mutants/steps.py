"""Faults that a case of one op on new operands cannot see: of what is kept between calls, of blocks that sequences share, of
the order of ops, of numbers that are not finite, of heads that are windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fastllm.api import Backend, Buffer, RefBackend, Stream, Tensor

from .base import Breaker, LateStream, Mutant, MutantBase, changed, pre
from .counts import coarse
from .numeric import make

__all__ = ["mutants"]

Array = np.ndarray
Op = Callable[..., None]
F16, F32 = np.float16, np.float32


def _kept(index: int) -> Breaker:
    """The contents of an operand are read when its buffer is seen for the first time."""

    def breaker(backend: MutantBase, honest: Op) -> Op:
        known: dict[tuple[int, int, tuple[int, ...]], tuple[Buffer, Array]] = {}

        def call(*inputs: Any, **more: Any) -> None:
            operands, t = list(inputs), inputs[index]
            _, values = known.setdefault((id(t.buffer), t.offset, t.shape), (t.buffer, backend.array(t).copy()))
            operands[index] = backend.temporary(values, t)
            honest(*operands, **more)

        return call

    return breaker


def _owners(backend: MutantBase, inputs: list[Any], attrs: Mapping[str, Any]) -> None:
    """A block belongs to the first sequence that names it; another one that does reads the block before."""
    cache, lengths, table = inputs[1], backend.array(inputs[4]), backend.array(inputs[5]).copy()
    owner: dict[int, int] = {}
    for s, length in enumerate(lengths.tolist()):
        for j in range(-(-length // cache.block_size)):
            if owner.setdefault(int(table[s, j]), s) != s and j:
                table[s, j] = table[s, j - 1]
    inputs[5] = backend.temporary(table, inputs[5])


def _cleared(backend: MutantBase, honest: Op) -> Op:
    """A call that begins in the middle of a block clears it first."""

    def call(cache: Tensor, key: Tensor, value: Tensor, slots: Tensor, **more: Any) -> None:
        for slot in backend.array(slots)[:1].tolist():
            block, offset = divmod(slot, cache.block_size)
            if slot >= 0 and offset:
                backend._raw_block(cache, block, Stream())[0][:] = 0
        honest(cache, key, value, slots, **more)

    return call


def _late(backend: MutantBase, honest: Op) -> Op:
    """The op goes into a queue of its own, which nothing but a wait empties."""

    def call(*inputs: Any, stream: Any, **more: Any) -> None:
        if isinstance(stream, LateStream):
            stream.queue.append(lambda: honest(*inputs, stream=Stream(), **more))
        else:
            honest(*inputs, stream=stream, **more)

    return call


class Queued(MutantBase):
    """Streams with a queue, which honest ops do not use."""

    def new_stream(self) -> Stream:
        return LateStream()


class LateUpload(Queued):
    """Uploads go into a queue of their own."""

    def upload(self, dst: Buffer, offset: int, src: memoryview, stream: Stream) -> None:
        if isinstance(stream, LateStream):
            stream.queue.append(lambda: RefBackend.upload(self, dst, offset, src, stream))
        else:
            super().upload(dst, offset, src, stream)

    def download(self, dst: memoryview, src: Buffer, offset: int, stream: Stream) -> None:
        stream.synchronize()
        super().download(dst, src, offset, stream)


def _finite(index: int) -> Breaker:
    """NaN in an operand counts as 0."""
    return changed(index, lambda x: np.where(np.isnan(x), F32(0), x))


def _dense_heads(backend: MutantBase, inputs: list[Any], attrs: Mapping[str, Any]) -> None:
    """The step from head to head is taken to be a head's width."""
    for i, t in enumerate(inputs):
        if t is not None and t.strides is not None and len(t.shape) == 3:
            inputs[i] = replace(t, strides=(t.strides[0], t.shape[2], 1))


def _group(size: int) -> Breaker:
    """Where so many query heads share a kv head, the last of them is the one before it."""

    def breaker(backend: MutantBase, honest: Op) -> Op:
        def call(query: Tensor, cache: Any, *inputs: Any, out: Tensor, **more: Any) -> None:
            honest(query, cache, *inputs, out=out, **more)
            if query.shape[1] == size * cache.spec.num_kv_heads:
                result = backend.array(out)
                result[:, size - 1 :: size] = result[:, size - 2 :: size]

        return call

    return breaker


def _width(width: int) -> Breaker:
    """The last channel of values is zero where keys are so wide."""

    def breaker(backend: MutantBase, honest: Op) -> Op:
        def call(query: Tensor, *inputs: Any, out: Tensor, **more: Any) -> None:
            honest(query, *inputs, out=out, **more)
            if query.shape[2] == width:
                backend.array(out)[..., -1] = 0

        return call

    return breaker


def _long_prompt(backend: MutantBase, inputs: list[Any], attrs: Mapping[str, Any]) -> None:
    """Queries of 64 rows and more are rounded to f16."""
    if inputs[0].shape[0] >= 64 and inputs[0].shape[2] >= 64:
        coarse(backend, inputs)


def _long_coarse(backend: MutantBase, inputs: list[Any], attrs: Mapping[str, Any]) -> None:
    if inputs[0].shape[0] > 128:
        coarse(backend, inputs)


def _mixed(backend: MutantBase, honest: Op) -> Op:
    """Single rows beside a prompt are not written."""

    def call(*inputs: Any, out: Tensor, **more: Any) -> None:
        honest(*inputs, out=out, **more)
        starts = backend.array(inputs[3])
        rows = np.diff(starts)
        if (rows > 16).any():
            backend.array(out)[starts[:-1][rows == 1]] = 0

    return call


def _unwindowed(when: Callable[[list[Any], Mapping[str, Any]], bool]) -> Breaker:
    return pre(lambda b, inputs, attrs: attrs.update(window=0) if when(inputs, attrs) else None)


def _other_order(backend: MutantBase, honest: Op) -> Op:
    """From 64 rows on, sums go in another order."""

    def call(x: Tensor, w: Tensor, *bias: Any, out: Tensor, **more: Any) -> None:
        honest(x, w, *bias, out=out, **more)
        if out.shape[0] >= 64:
            k = np.arange(x.shape[-1]) % 3 == 0
            parts = [_part(backend.array(x), backend.array(w), part) for part in (k, ~k)]
            backend.array(out)[...] = parts[0] + parts[1]

    return call


def _part(x: Array, w: Array, part: Array) -> Array:
    """Products of some of the columns: x [T, K] and w [N, K], or x [T, H, K] and w [H, N, K]."""
    return np.einsum("tk,nk->tn" if x.ndim == 2 else "thk,hnk->thn", x[..., part], w[..., part]).astype(F32)


def _table() -> Iterator[tuple[str, str, str, str, str, str, Breaker]]:
    for op in ("linear", "matmul"):
        yield op, "split_from_64_rows", "order", "from 64 rows on, sums go in another order", f"{op}/-/-/{op}{'*f32' if op == 'linear' else ''}/tiles#d2", "d2", _other_order
    a = "attention/f32/row/*/"
    for size, name in ((3, "smollm2"), (7, "qwen2_7b"), (6, "group6")):
        yield "attention", f"groups_of_{size}", "heads", f"of {size} query heads of a kv head the last is the one before it", f"{a}{name}#bound", "bound", _group(size)
    for width in (112, 192):
        yield "attention", f"width_{width}", "heads", f"the last channel is zero where keys have {width}", f"attention/f32/row/*-d{width}_*#bound", "bound", _width(width)
    yield "attention", "window_ignored_with_softcap", "attention", "windows are not applied where scores are capped", f"{a}gemma2_window#bound", "bound", _unwindowed(lambda i, t: t["softcap"] > 0)
    yield "attention", "window_ignored_with_slopes", "attention", "windows are not applied where there are slopes", f"{a}alibi_window#bound", "bound", _unwindowed(lambda i, t: i[7] is not None)
    yield "attention", "window_ignored_with_full", "attention", "windows are not applied with the mask full", f"{a}full_window#bound", "bound", _unwindowed(lambda i, t: t["mask"] == "full")
    yield "attention", "f16_queries_of_long_prompts", "attention", "queries of 64 rows and more are rounded to f16", f"{a}long_prompt#bound", "bound", pre(_long_prompt)
    yield "attention", "single_rows_beside_a_prompt", "attention", "single rows beside a prompt are not written", f"{a}mixed#bound", "bound", _mixed
    yield "attention", "blocks_have_one_owner", "kv", "blocks that sequences share are read by the first one only", f"{a}shared#bound", "bound", pre(_owners)
    yield "kv_write", "clears_a_begun_block", "kv", "a call that begins in the middle of a block clears it first", "kv_write/f32/row/*/appended#exact", "exact", _cleared
    for op, index, name, what in (
        ("linear", 0, "x", "activations"), ("rms_norm", 0, "x", "its rows"), ("rope", 1, "positions", "positions"), ("embed", 0, "ids", "ids"), ("attention", 5, "table", "the block table"),
        ("attention", 4, "lengths", "lengths of contexts"), ("attention", 2, "positions", "positions"),
    ):
        yield op, f"keeps_{name}", "state", f"what the buffer of {what} held when it was seen first is used in every step", f"{op}/-/-/{op}/again#prop", "prop", _kept(index)
    for op, at in (("short_conv", 5), ("delta_rule", 10)):
        yield op, "keeps_slots", "state", "what the buffer of slots held when it was seen first is used in every step", f"{op}/-/-/{op}/again#prop", "guard", _kept(at)
    for op, index, name, cases in (
        ("matmul", 0, "nan_swallowed", "matmul/f32*f32/row/*/special.rows#bound"), ("matmul", 1, "nan_of_matrix_swallowed", "matmul/f32*f32/row/*/special.matrix#bound"), ("rope", 0, "nan_swallowed", "rope/f32/row/*special#bound"),
        ("linear", 1, "nan_of_weight_swallowed", "linear/f32*f32/row/*/special.weight#bound"), ("linear", 2, "nan_of_bias_swallowed", "linear/f32*f32/row/*/special.weight#bound"),
        ("attention", 0, "nan_of_query_swallowed", "attention/f32/row/l50_20/nan_query#bound"),
    ):
        yield op, name, "special", "NaN counts as 0", cases, "bound", _finite(index)
    yield "embed", "nan_swallowed", "special", "NaN counts as 0", "embed/i32*f32/row/*/special#exact", "exact", _finite(1)
    for op, rule in (("rms_norm", "bound"), ("rope", "bound"), ("act_mul", "bound"), ("concat", "exact"), ("matmul", "bound")):
        yield op, "heads_taken_as_dense", "special", "heads that are parts of wider ones are read as if they followed each other", f"{op}/*/gap/t5-h3-n32/heads_step64#{rule}", rule, pre(_dense_heads)


def mutants() -> Iterator[Mutant]:
    """All of this file."""
    plain: Callable[[Mapping[str, str]], Backend] = lambda options: MutantBase(None, options)  # noqa: E731
    for op, name, family, what, cases, rule, breaker in _table():
        yield Mutant(f"{op}.{name}", family, what, cases, rule, make(op, breaker), plain)
    yield Mutant("model.f16_activations_of_long_prompts", "model", "activations of linear layers are rounded to f16 in steps of more than 128 rows", "model/llama-f32/*/prompt#model", "d2", make("linear", pre(_long_coarse)), plain)
    queued: Callable[[Mapping[str, str]], Backend] = lambda options: Queued(None, options)  # noqa: E731
    for op in ("linear", "kv_write", "rope", "attention"):
        yield Mutant(f"stream.late_{op}", "order", f"{op} is not in the order of the stream", "backend/*/chain#contract", "contract", make(op, _late, Queued), queued)
    yield Mutant("stream.late_upload", "order", "uploads are not in the order of the stream", "backend/*/chain#contract", "contract", lambda options: LateUpload(None, options), queued)
