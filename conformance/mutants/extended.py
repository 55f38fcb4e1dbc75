"""Faults of the extended ops (experts, routing, recurrent state), of our own group formats, and of caches that round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fastllm.api import Backend, HostTensor, No, OpQuery, Yes

from .. import bounds, oracle_extended
from .base import Breaker, Mutant, MutantBase, PackedBase, changed, post, pre
from .numeric import make

__all__ = ["mutants"]

Array = np.ndarray
F32 = np.float32
REF_GROUP = 32  # channels of a head that share a scale of int8 in `ref`


def _attrs(**values: Any) -> Breaker:
    """Other attributes than those that were given."""
    return pre(lambda backend, inputs, attrs: attrs.update(values))


def _swapped_halves(out: Array, arrays: list[Any], attrs: Any) -> None:
    width = arrays[0].shape[-1]
    out[..., :width], out[..., out.shape[-1] - width :] = out[..., :width].copy(), arrays[0]


def _concat() -> Iterator[tuple[str, str, str, str, Breaker]]:
    a = "concat/f32/"
    yield "second_at_0", "the second operand begins at element 0", a + "*/normal#exact", "exact", post(lambda out, x, t: out.__setitem__((..., slice(0, x[1].shape[-1])), x[1]))
    yield "first_repeated", "the end holds the first operand again", a + "*/normal#exact", "exact", post(_swapped_halves)
    yield "strides_ignored", "strided windows are read as if they were dense", a + "gap/*#exact", "exact", pre(_dense(0, 1))
    yield "denormals_lost", "denormals become 0", a + "row/*/special#exact", "exact", post(lambda out, x, t: out.__setitem__(np.abs(out) < 2.0**-126, 0.0))


def _dense(*which: int) -> Callable[..., None]:
    def change(backend: MutantBase, inputs: list[Any], attrs: Any) -> None:
        for i in which:
            if inputs[i] is not None:
                inputs[i] = replace(inputs[i], strides=None)

    return change


def _tie_high(backend: MutantBase, honest: Callable[..., None]) -> Callable[..., None]:
    """Ties go to the higher id: experts are chosen from the last to the first."""

    def call(logits: Any, bias: Any, *, out: Any, **more: Any) -> None:
        turned = [None if t is None else backend.temporary(backend.array(t)[..., ::-1], t) for t in (logits, bias)]
        honest(*turned, out=out, **more)
        ids = backend.array(out[0])
        ids[...] = logits.shape[1] - 1 - ids

    return call


def _biased_weights(out: tuple[Array, Array], arrays: list[Any], attrs: Any) -> None:
    if arrays[1] is not None:
        out[1][...] += arrays[1][out[0]]


def _by_id(out: tuple[Array, Array], arrays: list[Any], attrs: Any) -> None:
    order = np.argsort(out[0], axis=1)
    out[0][...], out[1][...] = np.take_along_axis(out[0], order, 1), np.take_along_axis(out[1], order, 1)


def _softmax_of_all(out: tuple[Array, Array], arrays: list[Any], attrs: Mapping[str, Any]) -> None:
    if attrs["score"] == "softmax_of_chosen" and len(arrays[0]):
        e = np.exp(arrays[0] - arrays[0].max(1, keepdims=True))
        out[1][...] = np.take_along_axis(e / e.sum(1, keepdims=True), out[0].astype(np.int64), 1) * F32(attrs["scale"])


def _route() -> Iterator[tuple[str, str, str, str, Breaker]]:
    a = "route_topk/f32/"
    yield "renorm_ignored", "chosen weights are not normalised", a + "gap/*/softmax_renorm#bound", "bound", _attrs(renorm=0)
    yield "renorm_always", "weights are normalised although nobody asked", a + "row/*/sigmoid_bias#bound", "bound", _attrs(renorm=1)
    yield "scale_ignored", "weights are not scaled", a + "row/*/sigmoid_bias#bound", "bound", _attrs(scale=1.0)
    yield "bias_in_weights", "the bias of the choice is in the weights, too", a + "row/*/sigmoid_bias#bound", "bound", post(_biased_weights)
    yield "bias_ignored", "the bias does not count in the choice", a + "row/*/sigmoid_bias#bound", "exact", changed(1, np.zeros_like)
    yield "groups_ignored", "experts of every group are chosen", a + "row/*/groups_top2#bound", "exact", _attrs(groups=1, keep_groups=1)
    yield "one_group_more", "one group too many is kept", a + "row/*/groups_max#bound", "exact", pre(lambda b, i, t: t.update(keep_groups=min(t["keep_groups"] + 1, t["groups"])))
    yield "group_score_max", "a group counts with its best expert instead of its two best", a + "row/*/groups_ties#bound", "exact", _attrs(group_score="max")
    yield "group_score_top2", "a group counts with its two best experts instead of its best", a + "row/*/groups_max#bound", "exact", _attrs(group_score="top2sum")
    yield "tie_to_the_higher_id", "of equal scores the last one wins", a + "row/*/equal#bound", "exact", _tie_high
    yield "by_id", "experts are given in the order of their ids", a + "row/*/softmax#bound", "exact", post(_by_id)
    yield "softmax_of_all", "softmax over all experts instead of those that are chosen", a + "row/*/of_chosen#bound", "bound", post(_softmax_of_all)
    yield "sigmoid_for_softmax", "scores by sigmoid instead of softmax", a + "row/*/softmax#bound", "bound", pre(lambda b, i, t: t.update(score="sigmoid") if t["score"] == "softmax" else None)
    yield "last_expert_never", "the last expert is never chosen", a + "row/*/softmax#bound", "exact", changed(0, lambda x: np.concatenate([x[:, :-1], np.full_like(x[:, -1:], -np.inf)], 1))
    yield "infinity_is_nan", "an expert that is shut out makes its row NaN", a + "row/*/extreme#bound", "bound", post(lambda out, x, t: out[1].__setitem__(np.isinf(x[0]).any(1), np.nan))


def _next_expert(ids: Array) -> Array:
    return (ids + 1) % max(int(ids.max(initial=0)) + 1, 1)


def _moe() -> Iterator[tuple[str, str, str, str, Breaker]]:
    a = "moe/f32*f32/"
    yield "weights_ignored", "experts are summed without their weights", a + "row/*/oai#bound", "bound", changed(2, np.ones_like)
    yield "gate_and_up_exchanged", "gate and up change places", a + "gap/*/batch#bound", "bound", pre(lambda b, i, t: i.__setitem__(slice(3, 5), i[4:2:-1]) if i[4] is not None else None)
    yield "up_ignored", "the second product is not multiplied", a + "row/*/one#bound", "bound", pre(lambda b, i, t: i.__setitem__(4, None))
    yield "next_expert", "a row takes the expert behind the one it named", a + "gap/*/batch#bound", "bound", changed(1, _next_expert)
    yield "last_choice_dropped", "the last expert of a row is left out", a + "row/*/oai#bound", "bound", changed(2, lambda w: np.concatenate([w[:, :-1], np.zeros_like(w[:, -1:])], 1) if w.shape[1] > 1 else w)
    yield "gate_bias_of_expert_0", "every expert takes the gate's bias of expert 0", a + "row/*/oai#bound", "bound", changed(6, lambda b: np.broadcast_to(b[:1], b.shape).copy())
    yield "down_bias_ignored", "the last bias is not added", a + "row/*/oai#bound", "bound", changed(8, np.zeros_like)
    yield "down_bias_unweighted", "the last bias is added once a row, without the weight", a + "row/*/ungated#bound", "bound", post(lambda out, x, t: out.__setitem__(..., out + (1 - x[2]) * x[8][x[1][:, 0]]) if x[8] is not None and x[1].shape[1] == 1 else None)
    yield "biases_dense", "strided biases are read as if they were dense", a + "gap/*/strided_bias#bound", "bound", pre(_dense(6, 7, 8))
    yield "silu_for_oai", "swiglu_oai is computed as silu", a + "row/*/oai#bound", "bound", pre(lambda b, i, t: t.update(kind="silu"))
    yield "f16_hidden", "what lies between the products is rounded to f16, undeclared", a + "row/*/odd#bound", "bound", changed(5, lambda w: w.astype(np.float16).astype(F32))
    yield "scale_off", "every result × (1 + 2⁻⁸)", a + "row/*/special#bound", "bound", post(lambda out, x, t: np.multiply(out, F32(1 + 2**-8), out=out))
    yield "gate_scale_off", "every gate × (1 + 2⁻⁸)", a + "row/*/one#bound", "bound", changed(3, lambda w: w * F32(1 + 2**-8))
    yield "down_scale_off", "the last matrix × (1 + 2⁻⁸)", "moe/f32*bf16/*/batch#bound", "bound", post(lambda out, x, t: np.multiply(out, F32(1 + 2**-8), out=out) if x[8] is None else np.add(out, F32(2**-8) * (out - (x[2][..., None] * x[8][x[1]]).sum(1)), out=out))
    yield "ids_clamped", "an id that is no expert's takes the nearest", "moe/*/expert*#error", "error", changed(1, lambda i: np.clip(i, 0, 3))


def _reversed_rows(op_rows: int) -> Breaker:
    """The rows of a step in the wrong order."""

    def breaker(backend: MutantBase, honest: Callable[..., None]) -> Callable[..., None]:
        def call(state: Any, *inputs: Any, out: Any, **more: Any) -> None:
            turned = [backend.temporary(backend.array(t)[::-1], t) if i < op_rows else t for i, t in enumerate(inputs)]
            honest(state, *turned, out=out, **more)
            result = backend.array(out)
            result[...] = result[::-1].copy()

        return call

    return breaker


def _overrun(backend: MutantBase, honest: Callable[..., None]) -> Callable[..., None]:
    """The slot behind is written, too."""

    def call(state: Any, *inputs: Any, out: Any, **more: Any) -> None:
        honest(state, *inputs, out=out, **more)
        for slot in backend.array(inputs[-1]).tolist():
            if slot + 1 < state.num_blocks:
                at = state.offset + (slot + 1) * state.block_bytes
                state.buffer.handle[at : at + 4] = 0

    return call


def _stale_state(*rows_at: int) -> Breaker:
    """The last row of a step does not get into the state. rows_at: places of the inputs that have a row for each token."""

    def breaker(backend: MutantBase, honest: Callable[..., None]) -> Callable[..., None]:
        def call(state: Any, *inputs: Any, out: Any, **more: Any) -> None:
            before = state.buffer.handle.copy()
            honest(state, *inputs, out=out, **more)
            starts = backend.array(inputs[-2]).copy()
            if starts[-1] - starts[-2] < 2:
                return
            starts[-1] -= 1
            state.buffer.handle[...] = before
            cut = [backend.temporary(backend.array(t)[:-1], t) if i in rows_at else t for i, t in enumerate(inputs)]
            cut[-2] = backend.temporary(starts, inputs[-2])
            honest(state, *cut, out=backend.temporary(backend.array(out)[:-1], out), **more)

        return call

    return breaker


def _zero_when_new(positions: Array) -> Array:
    return np.where(positions == 0, 1, positions)


def _short_conv() -> Iterator[tuple[str, str, str, str, Breaker]]:
    a = "short_conv/f32/row/"
    yield "taps_reversed", "the newest input meets the first tap", a + "*/ragged#bound", "bound", changed(2, lambda w: w[:, ::-1])
    yield "oldest_tap_dropped", "the oldest input does not count", a + "*/ragged#bound", "bound", changed(2, lambda w: np.concatenate([np.zeros_like(w[:, :1]), w[:, 1:]], 1))
    yield "activation_ignored", "the activation is always silu", a + "*/spread#bound", "bound", _attrs(kind="silu")
    yield "state_forgotten", "every step begins with zeros", a + "*/pieces#d2", "d2", changed(3, lambda p: p * 0)
    yield "old_state_seen", "a sequence that begins sees what its slot held", a + "*/ragged#bound", "bound", changed(3, _zero_when_new)
    yield "last_row_not_kept", "the last row of a step does not get into the state", a + "*/pieces#d2", "d2", _stale_state(0, 2)
    yield "next_slot_written", "the slot behind is written, too", a + "*/ragged#bound", "guard", _overrun
    yield "slots_exchanged", "sequences take each other's slots", a + "*/pieces#d2", "guard", changed(5, lambda s: np.roll(s, 1))
    yield "rows_reversed", "the rows of a step are taken from the last to the first", a + "*/long#bound", "bound", _reversed_rows(1)


def _delta_rule() -> Iterator[tuple[str, str, str, str, Breaker]]:
    a = "delta_rule/f32/row/"
    yield "no_decay", "the state does not fade", a + "*/forgets#bound", "bound", changed(6, lambda v: v * 0 - 100)
    yield "decay_sign", "a_log with the other sign", a + "*/ragged#bound", "bound", changed(6, lambda v: -v)
    yield "dt_bias_ignored", "dt_bias is not added", a + "*/ragged#bound", "bound", changed(7, np.zeros_like)
    yield "b_ignored", "the whole of every change is taken", a + "*/ragged#bound", "bound", changed(5, lambda b: b * 0 + 100)
    yield "query_not_scaled", "queries are not divided by √Dk", a + "*/ragged#bound", "bound", post(lambda out, x, t: out.__setitem__(..., out * F32(np.sqrt(x[1].shape[2]))))
    yield "eps_ignored", "eps does not count", a + "*/tiny#bound", "bound", _attrs(eps=0.0)
    yield "eps_large", "eps is 10⁻⁵ for 10⁻⁶", a + "*/tiny#bound", "bound", _attrs(eps=1e-5)
    yield "groups_modulo", "value head h takes query head h % J", a + "*/ragged#bound", "bound", _modulo
    yield "state_forgotten", "every step begins with zeros", a + "*/pieces#d2", "d2", changed(8, lambda p: p * 0)
    yield "old_state_seen", "a sequence that begins sees what its slot held", a + "*/ragged#bound", "bound", changed(8, _zero_when_new)
    yield "last_row_not_kept", "the last row of a step does not get into the state", a + "*/pieces#d2", "d2", _stale_state(0, 1, 2, 3, 4, 7)
    yield "next_slot_written", "the slot behind is written, too", a + "*/ragged#bound", "guard", _overrun
    yield "slots_exchanged", "sequences take each other's slots", a + "*/pieces#d2", "guard", changed(10, lambda s: np.roll(s, 1))
    yield "key_in_f16", "keys rounded to f16, undeclared", a + "*/long#bound", "bound", changed(2, lambda k: k.astype(np.float16).astype(F32))


def _modulo(backend: MutantBase, honest: Callable[..., None]) -> Callable[..., None]:
    def call(state: Any, query: Any, key: Any, value: Any, *inputs: Any, **more: Any) -> None:
        heads = value.shape[1]
        turned = [backend.temporary(np.take(backend.array(t), np.arange(heads) % t.shape[1], axis=1), t) for t in (query, key)]
        honest(state, *turned, value, *inputs, **more)

    return call


# formats of our own ------------------------------------------------------------------------------------------------------


class _OwnBase(PackedBase):
    """Keeps our group formats decoded to f32."""

    formats = ("int4g64", "int4g128s", "int8g64")


def _broken(format: str, change: Callable[[Array], None]) -> Callable[[HostTensor], Array]:
    def decode(weight: HostTensor) -> Array:
        if weight.format != format:
            return weight.decode()
        blocks = weight.data.reshape(-1, {"int4g64": 35, "int4g128s": 66, "int8g64": 66}[format]).copy()
        change(blocks)
        return HostTensor(weight.name, weight.shape, weight.format, blocks.reshape(-1)).decode()

    return decode


def _exchange(b: Array) -> None:
    b[:, 3:] = (b[:, 3:] >> 4) | (b[:, 3:] << 4)


def _formats() -> Iterator[tuple[str, str, str, Callable[[HostTensor], Array]]]:
    def signless(b: Array) -> None:
        b[:, 2:] = np.abs(b[:, 2:].view(np.int8)).view(np.uint8)

    yield "group_zero_dropped", "int4gN: codes count from 0", "linear/f32*int4g64/row/*#bound", _broken("int4g64", lambda b: b.__setitem__((slice(None), 2), 0))
    yield "group_zero_of_4_bits", "int4gN: of the zero point only 4 bits are read", "linear/f32*int4g64/row/*#bound", _broken("int4g64", lambda b: b.__setitem__((slice(None), 2), b[:, 2] & 15))
    yield "group_nibbles_swapped", "int4gN: low and high codes are exchanged", "linear/f32*int4g64/row/*#bound", _broken("int4g64", _exchange)
    yield "group_second_half_repeated", "int4gNs: the second 32 codes are the first ones", "linear/f32*int4g128s/row/*#bound", _broken("int4g128s", lambda b: b.__setitem__((slice(None), slice(18, 34)), b[:, 2:18]))
    yield "group_signs_lost", "int8gN: codes lose their sign", "linear/f32*int8g64/row/*#bound", _broken("int8g64", signless)


# caches that round -------------------------------------------------------------------------------------------------------


class _Undeclared(MutantBase):
    """Says of a rounding cache that it keeps keys and values as they are."""

    def supports(self, q: OpQuery) -> Any:
        """Without the declaration."""
        answer = super().supports(q)
        return Yes(answer.impl, angle=answer.angle) if isinstance(answer, Yes) and q.op == "attention" else answer


def _rounded(function: Callable[[Array], Array]) -> Breaker:
    """Keys and values first rounded in another way."""

    def breaker(backend: MutantBase, honest: Callable[..., None]) -> Callable[..., None]:
        def call(cache: Any, key: Any, value: Any, slots: Any, **more: Any) -> None:
            kept = cache.spec.dtype in ("int8", "bf16")
            with np.errstate(invalid="ignore", over="ignore"):
                given = [t if t is None or not kept else backend.temporary(function(backend.array(t)).astype(F32), t) for t in (key, value)]
            honest(cache, *given, slots, **more)

        return call

    return breaker


def _truncated(x: Array) -> Array:
    """bf16 by cutting."""
    return (np.ascontiguousarray(x, F32).view(np.uint32) & np.uint32(0xFFFF0000)).view(F32)


def _toward_zero(x: Array) -> Array:
    step = np.abs(x).max(-1, keepdims=True) / F32(127)
    return np.trunc(x / np.where(step > 0, step, F32(1))) * step


def _seven_bits(x: Array) -> Array:
    step = np.abs(x).max(-1, keepdims=True) / F32(63)
    return np.rint(x / np.where(step > 0, step, F32(1))) * step


def _one_scale(x: Array) -> Array:
    """One scale for all heads of a token."""
    step = np.abs(x).max((-2, -1), keepdims=True) / F32(127)
    return np.rint(x / np.where(step > 0, step, F32(1))) * step


class _InWeights(MutantBase):
    """Weights of attention take the scale of an int8 value and are rounded to bf16, declared: as if the scale were."""

    def __init__(self, breakers: Mapping[str, Breaker] | None = None, options: Mapping[str, str] | None = None):
        """As the base."""
        super().__init__({"kv_write": _scaled(_to_bf16), **(breakers or {})}, options)

    def supports(self, q: OpQuery) -> Yes | No:
        """Declares the rounding."""
        answer = super().supports(q)
        return replace(answer, prob="bf16") if isinstance(answer, Yes) and q.op == "attention" and str(answer.weight).startswith("int8") else answer


def _to_bf16(x: Array) -> Array:
    return bounds.round_to(x, "bf16").astype(F32)


def _cut_to_7_bits(x: Array) -> Array:
    return (np.ascontiguousarray(x, F32).view(np.uint32) & np.uint32(0xFFFE0000)).view(F32)


def _scaled(round_scale: Callable[[Array], Array]) -> Breaker:
    """Values of an int8 cache keep their codes and get a rounded scale. Keys are as they are."""

    def breaker(backend: MutantBase, honest: Callable[..., None]) -> Callable[..., None]:
        def call(cache: Any, key: Any, value: Any, slots: Any, **more: Any) -> None:
            if value is not None and cache.spec.dtype == "int8":
                codes, scales = oracle_extended.int8_vectors(backend.array(value), REF_GROUP)
                value = backend.temporary((np.rint(codes) * round_scale(scales)).astype(F32), value)
            honest(cache, key, value, slots, **more)

        return call

    return breaker


def _caches() -> Iterator[tuple[str, str, str, Breaker]]:
    yield "bf16_truncated", "bf16 by cutting instead of rounding", "kv_write/bf16/*#bound", _rounded(_truncated)
    yield "int8_toward_zero", "int8 codes are cut, not rounded", "kv_write/int8/*#bound", _rounded(_toward_zero)
    yield "int8_of_7_bits", "int8 codes use half of their range", "kv_write/int8/*#bound", _rounded(_seven_bits)
    yield "int8_one_scale", "one scale for all heads", "kv_write/int8/*#bound", _rounded(_one_scale)


class _NoExperts(MutantBase):
    """Has no `moe`: core ops take its place."""

    def supports(self, q: OpQuery) -> Yes | No:
        """A No for it."""
        return No("there is no moe here") if q.op == "moe" else super().supports(q)


def _first_column(backend: MutantBase, inputs: list[Any], attrs: Any) -> None:
    """Ids that are a column of a matrix are read as if they were a vector."""
    t = inputs[0]
    if t.strides is not None and len(t.shape) == 1:
        inputs[0] = replace(t, strides=None)
        ids = backend.array(inputs[0])
        inputs[0] = backend.temporary(np.clip(ids, 0, inputs[1].shape[0] - 1), t)


def _as_vector(at: int, low: int) -> Callable[..., None]:
    """An index vector with a gap behind each entry is read as if there were none; what lies in the gaps counts as `low`."""

    def change(backend: MutantBase, inputs: list[Any], attrs: Any) -> None:
        t = inputs[at]
        if t is not None and t.strides is not None:
            inputs[at] = backend.temporary(np.maximum(backend.array(replace(t, strides=None)), low), t)

    return change


_STEPPED = (
    # op, operand, its place, what, cases, rule, what lies in the gaps
    ("embed", "vectors_of_ids", 0, "ids with a gap behind each are read as if they were dense", "embed/i32*f32/gap/*/ids_step*#exact", "exact", 0),
    ("rope", "positions", 1, "positions with a gap behind each are read as if they were dense", "rope/f32/gap/*/positions_step2#bound", "bound", 0),
    ("kv_write", "slots", 3, "slots with a gap behind each are read as if they were dense", "kv_write/f32/gap/*/slots_step3#exact", "exact", -1),
    ("attention", "positions", 2, "positions with a gap behind each are read as if they were dense", "attention/f32/gap/*/positions_stepped#bound", "bound", 0),
    ("attention", "lengths", 4, "lengths with a gap behind each are read as if they were dense", "attention/f32/gap/*/context_len_stepped#bound", "bound", 0),
    ("attention", "tables", 5, "rows of the block table with a gap behind each are read as if they were dense", "attention/f32/gap/*/block_table_stepped#bound", "bound", 0),
    ("attention", "prefixes", 8, "lengths of prefixes with a gap behind each are read as if they were dense", "attention/f32/gap/*/prefix_len_stepped#bound", "bound", 0),
    ("moe", "ids", 1, "rows of ids with a gap behind each are read as if they were dense", "moe/f32*f32/gap/*/ids_stepped#bound", "bound", 0),
    ("short_conv", "slots", 5, "slots with a gap behind each are read as if they were dense", "short_conv/f32/gap/*/state_slot_stepped#bound", "bound", 0),
    ("delta_rule", "slots", 10, "slots with a gap behind each are read as if they were dense", "delta_rule/f32/gap/*/state_slot_stepped#bound", "bound", 0),
)


def mutants() -> Iterator[Mutant]:
    """All of this file."""
    plain: Callable[[Mapping[str, str]], Backend] = lambda options: MutantBase(None, options)  # noqa: E731
    own: Callable[[Mapping[str, str]], Backend] = lambda options: _OwnBase(None, options)  # noqa: E731
    for op, family, table in (("concat", "experts", _concat()), ("route_topk", "experts", _route()), ("moe", "experts", _moe()), ("short_conv", "recurrent", _short_conv()), ("delta_rule", "recurrent", _delta_rule())):
        for name, what, cases, rule, breaker in table:
            yield Mutant(f"{op}.{name}", family, what, cases, rule, make(op, breaker), plain)
    for name, what, cases, decode in _formats():
        yield Mutant(f"weights.{name}", "quant", what, cases, "bound", lambda options, d=decode: _OwnBase(None, options, d), own)  # type: ignore[misc]
    for name, what, cases, breaker in _caches():
        yield Mutant(f"kv_write.{name}", "memory", what, cases, "bound", make("kv_write", breaker), plain)
    for op, name, at, what, cases, rule, low in _STEPPED:
        yield Mutant(f"{op}.step_of_{name}_ignored", "memory", what, cases, rule, make(op, pre(_as_vector(at, low))), plain)
    lacking: Callable[[Mapping[str, str]], Backend] = lambda options: _NoExperts(None, options)  # noqa: E731
    yield Mutant("embed.step_of_ids_ignored", "experts", "ids that are a column are read as a vector", "moe/f32*f32/row/any/decomposed#bound", "bound", make("embed", pre(_first_column), _NoExperts), lacking)
    in_weights: Callable[[Mapping[str, str]], Backend] = lambda options: _InWeights(None, options)  # noqa: E731
    yield Mutant("kv_write.int8_scale_of_7_bits", "memory", "a weight that takes the scale of an int8 value keeps 7 bits of it, not 8 as declared", "kv_write/int8/*#bound", "bound", make("kv_write", _scaled(_cut_to_7_bits), _InWeights), in_weights)
    yield Mutant("attention.cache_undeclared", "attention", "an int8 cache that is not declared", "kv_write/int8/*#bound", "honest", lambda options: _Undeclared(None, options), plain)
