"""Faults of attention, of the paged cache and of memory around an op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fastllm.api import Backend, Tensor

from .base import Breaker, Mutant, MutantBase, changed, post, pre
from .numeric import make

__all__ = ["mutants"]

Array = np.ndarray
F32 = np.float32
QUERY, POSITIONS, LENGTHS, TABLE, SINKS, SLOPES, PREFIX = 0, 2, 4, 5, 6, 7, 8
Row = Callable[[Array, Array, Array, Array, Array, Mapping[str, Any]], Array]


def _own(row: Row) -> Breaker:
    """Attention head by head by `row(q [Dk], keys [n, Dk], values [n, Dv], score [n], seen [n], facts) -> [Dv]`."""

    def breaker(backend: MutantBase, honest: Callable[..., None]) -> Callable[..., None]:
        def call(query: Tensor, cache: Tensor, *step: Tensor | None, out: Tensor, stream: Any, ws: Any, **attrs: Any) -> None:
            honest(query, cache, *step, out=out, stream=stream, ws=ws, **attrs)
            where, starts, lengths, table = (backend.array(step[i]) for i in range(4))
            if step[4] is not None or step[5] is not None or attrs["mask"] != "causal" or attrs["softcap"]:
                return
            q, result = backend.array(query), backend.array(out)
            for s, length in enumerate(lengths.tolist()):
                rows = range(int(starts[s]), int(starts[s + 1]))
                if not rows or not length:
                    continue
                keys, values = backend._gather(cache, table[s], length, attrs["value_dim"], stream)
                group = q.shape[1] // keys.shape[1]
                for t in rows:
                    j = np.arange(length)
                    seen = (j <= where[t]) & ((where[t] - j < attrs["window"]) if attrs["window"] else True)
                    for h in range(q.shape[1]):
                        k, v = keys[:, h // group], values[:, h // group]
                        score = (k @ q[t, h]) * F32(attrs["scale"])
                        if seen.any():
                            result[t, h] = row(q[t, h], k, v, score, seen, {"position": int(where[t]), "block": cache.block_size})

        return call

    return breaker


def _softmax_sum(score: Array, values: Array) -> Array:
    p = np.exp(score - score.max())
    return (p[:, None] * values).sum(0) / p.sum()


def _no_rescale(q: Array, k: Array, v: Array, score: Array, seen: Array, facts: Mapping[str, Any]) -> Array:
    """Online softmax in steps of 16 that forgets to scale the old sums when the maximum grows."""
    s, values = score[seen], v[seen]
    top, total, acc = F32(-np.inf), F32(0), np.zeros(v.shape[1], F32)
    for at in range(0, len(s), 16):
        top = max(top, s[at : at + 16].max())
        p = np.exp(s[at : at + 16] - top)
        total, acc = total + p.sum(), acc + (p[:, None] * values[at : at + 16]).sum(0)
    return acc / total


def _f16_prob(q: Array, k: Array, v: Array, score: Array, seen: Array, facts: Mapping[str, Any]) -> Array:
    s = score[seen]
    p = np.exp(s - s.max())
    p = (p / p.sum()).astype(np.float16).astype(F32)
    return (p[:, None] * v[seen]).sum(0)


def _dropped(which: Callable[[Array, Mapping[str, Any]], Array]) -> Row:
    def row(q: Array, k: Array, v: Array, score: Array, seen: Array, facts: Mapping[str, Any]) -> Array:
        left = seen & which(np.arange(len(seen)), facts)
        left = left if left.any() else seen
        return _softmax_sum(score[left], v[left])

    return row


def _twice(q: Array, k: Array, v: Array, score: Array, seen: Array, facts: Mapping[str, Any]) -> Array:
    """Key 32,768 twice, where there is one."""
    which = np.flatnonzero(seen)
    which = np.append(which, which[which == 1 << 15])
    return _softmax_sum(score[which], v[which])


def _near_chunks(backend: MutantBase, honest: Callable[..., None]) -> Callable[..., None]:
    """Rows whose chunk starts at 65,536 or later take it to start at what 16 bits leave of that."""

    def call(query: Tensor, cache: Tensor, *step: Any, out: Tensor, **more: Any) -> None:
        honest(query, cache, *step, out=out, **more)
        result = backend.array(out)
        late = backend.array(step[0]) >= 1 << 16
        if more["mask"] == "chunk" and late.any():
            kept = result[~late].copy()
            honest(query, cache, *step, out=out, **{**more, "mask": "causal", "chunk": 0})
            result[~late] = kept

    return call


def _chunk_as_window(backend: MutantBase, honest: Callable[..., None]) -> Callable[..., None]:
    def call(*inputs: Any, **more: Any) -> None:
        honest(*inputs, **({**more, "mask": "causal", "window": more["chunk"], "chunk": 0} if more["mask"] == "chunk" else more))

    return call


def _heads_modulo(backend: MutantBase, honest: Callable[..., None]) -> Callable[..., None]:
    """Query head h takes kv head h % K."""

    def call(query: Tensor, cache: Tensor, *step: Any, out: Tensor, **more: Any) -> None:
        heads, kv = query.shape[1], cache.spec.num_kv_heads  # type: ignore[union-attr]
        order = [h for g in range(kv) for h in range(heads) if h % kv == g]
        honest(backend.temporary(backend.array(query)[:, order], query), cache, *step, out=out, **more)
        result = backend.array(out)
        result[:, order] = result.copy()

    return call


def _attr(name: str, change: Callable[[Any], Any]) -> Breaker:
    return pre(lambda backend, inputs, attrs: attrs.update({name: change(attrs[name])}))


def _absent(index: int) -> Breaker:
    def change(backend: Any, inputs: list[Any], attrs: Any) -> None:
        inputs[index] = None

    return pre(change)


def _neighbour(table: Array) -> Array:
    return np.roll(table, 1, axis=0) if len(table) > 1 else table


def _short(backend: MutantBase, inputs: list[Any], attrs: Any) -> None:
    """Whole blocks only, of sequences that have one."""
    lengths, block = backend.array(inputs[LENGTHS]), inputs[1].block_size
    inputs[LENGTHS] = backend.temporary(np.where(lengths > block, lengths // block * block, lengths).astype(np.int32), inputs[LENGTHS])


def _poisoned(backend: MutantBase, inputs: list[Any], attrs: dict[str, Any]) -> None:
    """One key more than there are."""
    lengths, width = backend.array(inputs[LENGTHS]), inputs[TABLE].shape[1] * inputs[1].block_size
    more = np.where((lengths > 0) & (lengths < width), lengths + 1, lengths).astype(np.int32)
    inputs[LENGTHS] = backend.temporary(more, inputs[LENGTHS])
    attrs["mask"] = "full" if attrs["mask"] == "causal" and not attrs["window"] else attrs["mask"]


def _unwritten(backend: MutantBase, honest: Callable[..., None]) -> Callable[..., None]:
    """Rows that see nothing are not written."""

    def call(*inputs: Any, out: Tensor, **more: Any) -> None:
        before = backend.array(out).copy()
        honest(*inputs, out=out, **more)
        result = backend.array(out)
        if len(result):
            empty = (result == 0).all((1, 2))
            result[empty] = before[empty]

    return call


def _f16_keys(backend: MutantBase, honest: Callable[..., None]) -> Callable[..., None]:
    def call(cache: Any, key: Any, value: Any, slots: Any, **more: Any) -> None:
        rounded = [None if t is None else backend.temporary(backend.array(t).astype(np.float16).astype(F32), t) for t in (key, value)]
        honest(cache, *rounded, slots, **more)

    return call


def _stale(backend: MutantBase, honest: Callable[..., None]) -> Callable[..., None]:
    """A slot that was written once keeps what it has."""

    def call(cache: Any, key: Any, value: Any, slots: Any, **more: Any) -> None:
        fresh = []
        for slot in backend.array(slots).tolist():
            block, offset = divmod(slot, cache.block_size)
            fresh.append(slot if slot >= 0 and np.isnan(backend._block(cache, block, more["stream"])[1][:, offset]).any() else -1)
        honest(cache, key, value, backend.temporary(np.array(fresh, np.int32), slots), **more)

    return call


def _past_out(out: Array, arrays: Any, attrs: Any) -> None:
    if out.size:
        end = np.lib.stride_tricks.as_strided(out.reshape(-1)[-1:], (2,), (out.itemsize,))
        end[1] = 1.0


def _touch_input(out: Array, arrays: list[Any], attrs: Any) -> None:
    if arrays[0].size:
        arrays[0].reshape(-1)[0] += 1


def _half_written(backend: MutantBase, honest: Callable[..., None]) -> Callable[..., None]:
    def call(*inputs: Any, out: Tensor, **more: Any) -> None:
        before = backend.array(out).copy()
        honest(*inputs, out=out, **more)
        result = backend.array(out)
        if result.ndim and result.shape[-1] > 1:
            result[..., -1] = before[..., -1]

    return call


def _leaking(backend: MutantBase, honest: Callable[..., None]) -> Callable[..., None]:
    def call(*inputs: Any, **more: Any) -> None:
        RefAlloc(backend, 64, "scratch")
        honest(*inputs, **more)

    return call


def RefAlloc(backend: MutantBase, nbytes: int, kind: str) -> object:
    """An allocation behind the back of whoever watches `alloc`."""
    return type(backend).alloc(backend, nbytes, kind)


def _allocating(backend: MutantBase, honest: Callable[..., None]) -> Callable[..., None]:
    def call(*inputs: Any, **more: Any) -> None:
        backend.alloc(64, "scratch").close()
        honest(*inputs, **more)

    return call


def _attention() -> Iterator[tuple[str, str, str, Breaker]]:
    a = "attention/f32/row/"
    yield "mask_plus_1", "a row sees one key of its future", a + "*/prefill#bound", changed(POSITIONS, lambda p: p + 1)
    yield "mask_minus_1", "a row does not see its own key", a + "*/prefill#bound", changed(POSITIONS, lambda p: np.maximum(p - 1, 0))
    yield "scale_missing", "scores are not scaled", a + "*/gqa8#bound", _attr("scale", lambda s: 1.0)
    yield "scale_twice", "scores are scaled twice", a + "*/gqa8#bound", _attr("scale", lambda s: s * s)
    yield "last_block_dropped", "a block that is not full is not read", a + "*/needle#bound", pre(_short)
    yield "neighbours_block_table", "sequence s reads the blocks of s − 1", a + "*/ragged#bound", changed(TABLE, _neighbour)
    yield "kv_head_modulo", "query head h takes kv head h % K", a + "*/wide#bound", _heads_modulo
    yield "no_rescale", "old sums are not scaled when the maximum grows", a + "*/needle#bound", _own(_no_rescale)
    yield "f16_weights", "attention weights rounded to f16, undeclared", a + "*#bound", _own(_f16_prob)
    yield "softcap_missing", "scores are not capped", a + "*/softcap#bound", _attr("softcap", lambda c: 0.0)
    yield "window_plus_1", "a window of W shows W + 1 keys", a + "*/window16#bound", _attr("window", lambda w: w + 1 if w else 0)
    yield "window_minus_1", "a window of W shows W − 1 keys", a + "*/window16#bound", _attr("window", lambda w: max(w - 1, 1) if w else 0)
    yield "window_ignored", "windows are not applied", a + "*/window16#bound", _attr("window", lambda w: 0)
    yield "sink_ignored", "sinks are not in the denominator", a + "*/sinks#bound", _absent(SINKS)
    yield "sink_halved", "half of each sink", a + "*/sinks#bound", changed(SINKS, lambda s: s / 2)
    yield "alibi_ignored", "slopes are not applied", a + "*/alibi#bound", _absent(SLOPES)
    yield "alibi_sign", "slopes have the other sign", a + "*/alibi#bound", changed(SLOPES, lambda s: -s)
    yield "full_is_causal", "the mask full is taken as causal", a + "*/full#bound", _attr("mask", lambda m: "causal" if m == "full" else m)
    yield "prefix_is_causal", "the mask prefix is taken as causal", a + "*/prefix#bound", _attr("mask", lambda m: "causal" if m == "prefix" else m)
    yield "chunk_ignored", "chunks are not applied", a + "*/chunk#bound", _attr("mask", lambda m: "causal" if m == "chunk" else m)
    yield "value_is_first_keys", "values are taken one element late where they are a prefix of the keys", a + "*/mla_small#bound", post(lambda out, arrays, t: out.__setitem__(..., np.roll(out, 1, -1)) if t["value_dim"] else None)
    yield "reads_poisoned_slot", "one key behind the last is read", a + "*/gqa8#bound", pre(_poisoned)
    yield "first_key_dropped", "key 0 is not read", a + "*/needle#bound", _own(_dropped(lambda j, f: j > 0))
    yield "last_of_block_dropped", "the last key of every block is not read", a + "*/needle#bound", _own(_dropped(lambda j, f: j % f["block"] != f["block"] - 1))
    yield "empty_row_unwritten", "a row that sees nothing is not written", a + "*/unseen#bound", _unwritten
    lost, dropped = "key {} of a long context is not read", _own(_dropped(lambda j, f: j != 33000))
    yield "key_33000_dropped", lost.format("33,000"), a + "*/keys.real#bound", dropped
    yield "key_65536_dropped", lost.format("65,536"), a + "*/keys.real#bound", _own(_dropped(lambda j, f: j != 65536))
    yield "newest_of_17_bits_dropped", "the newest key is not read where its number needs more than 16 bits", a + "*/keys.real#bound", _own(_dropped(lambda j, f: (j < f["position"]) | (j < 65536)))
    yield "key_32768_twice", "key 32,768 is counted twice", a + "*/keys.real#bound", _own(_twice)
    for dtype in ("f16", "bf16", "int8"):
        yield f"key_33000_dropped_{dtype}", f"{lost.format('33,000')} ({dtype})", f"attention/{dtype}/row/*/keys.cache#bound", dropped
    for name, kind in (("", "f32/row/*/chunk.real"), ("_f16", "f16/row/*/chunk.cache"), ("_bf16", "bf16/row/*/chunk.cache"), ("_int8", "int8/row/*/chunk.cache")):
        yield f"chunk_of_16_bits{name}", f"where a chunk starts is kept in 16 bits{name.replace('_', ' ')}", f"attention/{kind}#bound", _near_chunks
        yield f"chunk_is_a_window{name}", f"a chunk is taken as a window{name.replace('_', ' ')}", f"attention/{kind}#bound", _chunk_as_window
    yield "beyond_1000_dropped", "keys from the 1024th on are not read", a + "*/needle#bound", _own(_dropped(lambda j, f: j < 1024))


def mutants() -> Iterator[Mutant]:
    """All of this file."""
    plain: Callable[[Mapping[str, str]], Backend] = lambda options: MutantBase(None, options)  # noqa: E731
    for name, what, cases, breaker in _attention():
        yield Mutant(f"attention.{name}", "attention", what, cases, "bound", make("attention", breaker), plain)
    table: tuple[tuple[str, str, str, str, str, Breaker], ...] = (
        ("kv_write", "stale_slot", "a slot keeps what was written first", "kv_write/*/overwrite#exact", "exact", _stale),
        ("kv_write", "next_slot", "keys go to the slot behind", "kv_write/*/once#exact", "exact", changed(3, lambda s: np.where(s >= 0, s ^ 1, s))),
        ("kv_write", "f16_cache", "keys and values are stored in f16, undeclared", "kv_write/*#exact", "exact", _f16_keys),
        ("kv_write", "negative_is_zero", "a negative slot writes slot 0", "kv_write/*/skipped#exact", "exact", changed(3, lambda s: np.maximum(s, 0))),
        ("kv_write", "values_rolled", "values are stored rotated by one", "kv_write/*/once#exact", "exact", changed(2, lambda v: np.roll(v, 1, -1))),
        ("softmax", "writes_past_out", "one element behind the result is written", "softmax/*#bound", "guard", post(_past_out)),
        ("rms_norm", "changes_its_input", "the first element of x is changed", "rms_norm/*#bound", "guard", post(_touch_input)),
        ("layer_norm", "last_column_unwritten", "the last column of the result is not written", "layer_norm/*#bound", "bound", _half_written),
        ("add", "allocates", "an op allocates a buffer", "add/*#exact", "guard", _allocating),
        ("mul", "leaks", "every call leaves 64 bytes allocated", "mul/*#exact", "leak", _leaking),
    )
    for op, name, what, cases, rule, breaker in table:
        yield Mutant(f"{op}.{name}", "memory", what, cases, rule, make(op, breaker), plain)
