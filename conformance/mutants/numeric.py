"""Faults in what is computed: linear, norms, rope, activations, quantisation, sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fastllm.api import Backend, HostTensor

from .base import Breaker, Mutant, MutantBase, PackedBase, SamplerBase, changed, post, pre, whole

__all__ = ["mutants"]

Array = np.ndarray
F32 = np.float32


def make(op: str, breaker: Breaker, base: type[MutantBase] = MutantBase) -> Callable[[Mapping[str, str]], Backend]:
    """A base with one broken op."""
    return lambda options: base({op: breaker}, options)


def _rows(function: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    """linear by a function of (x, w), with the bias."""

    def linear(x: Array, w: Array, bias: Array | None) -> Array:
        y = function(x, w)
        return y if bias is None else y + bias

    return linear


def _f16_sums(x: Array, w: Array) -> Array:
    total = np.zeros((len(x), len(w)), np.float16)
    for k in range(x.shape[1]):
        total = (total + (x[:, k : k + 1] * w[:, k][None])).astype(np.float16)
    return total.astype(F32)


def _coarse(bits: int) -> Callable[[Array], Array]:
    """Rounds to a mantissa of that many bits (TF32: 11, bf16: 8)."""

    def rounded(x: Array) -> Array:
        step = np.uint32(1 << (24 - bits))
        kept = (np.ascontiguousarray(x, F32).view(np.uint32) + step // np.uint32(2)) & ~(step - np.uint32(1))
        return kept.view(F32)

    return rounded


def _half(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(F32)


def _set(index: Any, value: float) -> Callable[..., None]:
    def change(out: Array, arrays: Any, attrs: Any) -> None:
        if out.size:
            out[index] = value

    return change


def _swap(out: Array, arrays: Any, attrs: Any) -> None:
    if out.ndim > 1 and out.shape[1] > 1:
        out[:, [0, 1]] = out[:, [1, 0]]


def _past(out: Array, arrays: Any, attrs: Any) -> None:
    """The last row also takes 0 · (the element behind it)."""
    x = arrays[0]
    if len(x):
        behind = np.lib.stride_tricks.as_strided(x[-1], (x.shape[1] + 1,), (x.strides[1],))[-1]
        out[-1] += F32(0) * behind


def _linear() -> Iterator[tuple[str, str, str, str, Breaker]]:
    f32 = "linear/f32*f32/"
    yield "k_tail_dropped", "K % 32 last products are left out", f32 + "row/m5-n33-k257/*#bound", "bound", whole(_rows(lambda x, w: x[:, : x.shape[1] // 32 * 32] @ w[:, : x.shape[1] // 32 * 32].T if x.shape[1] >= 32 else x @ w.T))
    yield "columns_swapped", "two output columns are exchanged", f32 + "row/m5-n33-k257/*#bound", "bound", post(_swap)
    yield "row_zeroed", "the last row of the result is zero", f32 + "row/m5-n33-k257/*#bound", "bound", post(_set(-1, 0.0))
    yield "column_zeroed", "one column of the result is zero", f32 + "row/m8-n127-k128/*#bound", "bound", post(_set((slice(None), 5), 0.0))
    yield "scale_off", "every result × (1 + 2⁻⁸)", f32 + "row/m17-n31-k256/*#bound", "bound", whole(_rows(lambda x, w: (x @ w.T) * F32(1 + 2**-8)))
    yield "f16_accumulation", "sums in f16, undeclared", f32 + "row/m5-n33-k257/*#bound", "bound", whole(_rows(_f16_sums))
    yield "f16_operand", "activations rounded to f16, undeclared", f32 + "*#exact", "exact", changed(0, _half)
    yield "f16_operand_large_k", "activations rounded to f16 for K > 4096 only", f32 + "row/m1-n16-k11008/sparse*#bound", "bound", changed(0, lambda x: _half(x) if x.shape[1] > 4096 else x)
    yield "tf32_operand", "activations rounded to TF32, undeclared", f32 + "*#exact", "exact", changed(0, _coarse(11))
    yield "bf16_weight", "weights rounded to bf16, undeclared", f32 + "row/m8-n127-k128/*#bound", "bound", changed(1, _coarse(8))
    yield "f16_weight", "weights rounded to f16, undeclared", f32 + "row/m3-n17-k300/integer_weight#exact", "exact", changed(1, _half)
    yield "bias_ignored", "the bias is not added", f32 + "*.bias#bound", "bound", changed(2, lambda b: b * 0)
    yield "bias_twice", "the bias is added twice", f32 + "*.bias#bound", "bound", changed(2, lambda b: b * 2)
    yield "reads_past_k", "0 × the element behind a row is added", f32 + "*/m5-n33-k64/*#bound", "bound", post(_past)
    yield "row_tail", "rows from the 17th on are those before them", f32 + "row/m17-n31-k256/*#bound", "bound", post(lambda out, a, t: out.__setitem__(slice(16, None), out[15:16]) if len(out) > 16 else None)
    yield "nan_swallowed", "NaN in an activation counts as 0", f32 + "row/m7-n33-k64/special#bound", "bound", changed(0, np.nan_to_num)
    yield "denormals_and_more_lost", "activations below 10⁻³ count as 0", f32 + "row/*/spread*#bound", "bound", changed(0, lambda x: np.where(np.abs(x) < 1e-3, F32(0), x))
    yield "columns_of_a_grid", "outputs from the 8,192nd on are those before them", f32 + "row/m2-n11008-k32/*#bound", "bound", post(lambda out, a, t: out.__setitem__((slice(None), slice(8192, None)), out[:, 8191:8192]) if out.shape[1] > 8192 else None)
    yield "first_k_doubled", "the first product counts twice", f32 + "row/m1-n128-k256/*#bound", "bound", whole(_rows(lambda x, w: x @ w.T + x[:, :1] * w[:, :1].T))


def _matmul(a: Array, b: Array) -> Array:
    return np.stack([a[:, h] @ b[(h + 1) % b.shape[0]].T for h in range(a.shape[1])], 1)


def _strides_lost(backend: MutantBase, inputs: list[Any], attrs: Any) -> None:
    t = inputs[0]
    if t is not None and t.strides is not None:
        from dataclasses import replace

        inputs[0] = replace(t, strides=None)


def _rms(x: Array, w: Array | None, eps: float, count: int = 0, missing: bool = False) -> Array:
    mean = (x * x).sum(-1, keepdims=True) / F32(x.shape[-1] - count or 1)
    y = x / np.sqrt(mean + (F32(0) if missing else F32(eps)))
    return y if w is None else y * w


def _one_pass(x: Array, w: Array | None, b: Array | None, eps: float, count: int = 0) -> Array:
    n = F32(x.shape[-1])
    mean = x.sum(-1, keepdims=True) / n
    if count:
        var = ((x - mean) ** 2).sum(-1, keepdims=True) / F32(max(x.shape[-1] - count, 1))
    else:
        var = np.maximum((x * x).sum(-1, keepdims=True) / n - mean * mean, 0)
    y = (x - mean) / np.sqrt(var + F32(eps))
    y = y if w is None else y * w
    return y if b is None else y + b


def _f32_angle(x: Array, positions: Array, inv_freq: Array, style: str, factor: float) -> Array:
    r = len(inv_freq)
    angle = (positions.astype(F32)[:, None] * inv_freq).astype(F32)
    cos, sin = (np.cos(angle) * F32(factor))[:, None], (np.sin(angle) * F32(factor))[:, None]
    first, second = (slice(0, r), slice(r, 2 * r)) if style == "half" else (slice(0, 2 * r, 2), slice(1, 2 * r, 2))
    y = x.copy()
    y[..., first], y[..., second] = x[..., first] * cos - x[..., second] * sin, x[..., second] * cos + x[..., first] * sin
    return y


def _attrs(**values: Any) -> Breaker:
    return pre(lambda backend, inputs, attrs: attrs.update(values))


def _swapped_style(backend: Any, inputs: Any, attrs: dict[str, Any]) -> None:
    attrs["style"] = "pairs" if attrs["style"] == "half" else "half"


def _rows_ops() -> Iterator[tuple[str, str, str, str, str, Breaker]]:
    yield "linear", "depends_on_its_place", "a row counts 2⁻²¹ more than the one before it", "linear/f32/-/rows37-width100/rows_permuted#prop", "prop", post(lambda out, a, t: out.__setitem__(..., out * (1 + np.arange(len(out), dtype=F32)[:, None] * F32(2.0**-21))))
    yield "matmul", "heads_rotated", "head h takes the matrix of head h + 1", "matmul/f32*f32/row/t2-h4*#bound", "bound", whole(_matmul)
    yield "matmul", "f16_operand_large_k", "activations rounded to f16 for K > 4096 only", "matmul/f32*f32/row/t2-h1-n4-k11008/sparse#bound", "bound", changed(0, lambda a: _half(a) if a.shape[-1] > 4096 else a)
    yield "matmul", "strides_ignored", "a strided window is read as if it were dense", "matmul/f32*f32/gap/*#bound", "bound", pre(_strides_lost)
    yield "linear", "strides_ignored", "a strided window is read as if it were dense", "linear/f32*f32/gap/*#bound", "bound", pre(_strides_lost)
    yield "rms_norm", "eps_missing", "eps is not added", "rms_norm/*.eps#bound", "bound", whole(lambda x, w, eps: _rms(x, w, eps, missing=True))
    yield "rms_norm", "mean_of_n_minus_1", "the mean divides by n − 1", "rms_norm/f32/row/m3-n33/*#bound", "bound", whole(lambda x, w, eps: _rms(x, w, eps, 1))
    yield "rms_norm", "weight_ignored", "the weight is not multiplied", "rms_norm/f32/row/m6-h3-n64/*#bound", "bound", changed(1, np.ones_like)
    yield "rms_norm", "heads_as_one", "one mean over all heads of a row", "rms_norm/f32/row/m6-h3-n64/*#bound", "bound", whole(lambda x, w, eps: _rms(x.reshape(len(x), -1), None, eps).reshape(x.shape) * (1 if w is None else w) if x.ndim == 3 else _rms(x, w, eps))
    yield "layer_norm", "one_pass_variance", "variance as E[x²] − E[x]²", "layer_norm/*/*.far#bound", "bound", whole(_one_pass)
    yield "layer_norm", "mean_of_n_minus_1", "variance with 1/(n − 1)", "layer_norm/f32/row/*n33/*#bound", "bound", whole(lambda x, w, b, eps: _one_pass(x, w, b, eps, 1))
    yield "layer_norm", "bias_ignored", "the bias is not added", "layer_norm/f32/row/*n33/*#bound", "bound", changed(2, np.zeros_like)
    yield "softmax", "no_maximum", "the maximum is not subtracted", "softmax/f32/row/m4-n40/special#bound", "bound", whole(lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True))
    yield "softmax", "last_left_out", "the last element is not in the sum", "softmax/f32/row/m3-n1000/*#bound", "bound", whole(lambda x: np.exp(x - x.max(-1, keepdims=True)) / np.exp(x - x.max(-1, keepdims=True))[..., : max(1, x.shape[-1] - 1)].sum(-1, keepdims=True) if x.size else x)
    yield "softmax", "f16_exponentials", "exponentials rounded to f16", "softmax/f32/row/m3-n1000/*#bound", "bound", whole(lambda x: _half(np.exp(x - x.max(-1, keepdims=True))) / _half(np.exp(x - x.max(-1, keepdims=True))).sum(-1, keepdims=True) if x.size else x)
    yield "rope", "double_angle", "angles are twice as large", "rope/f32/row/t3-h2-d64-r32/*#bound", "bound", changed(1, lambda p: p * 2)
    yield "rope", "wrong_pairs", "half and pairs are exchanged", "rope/f32/row/t3-h2-d64-r32/*#bound", "bound", pre(_swapped_style)
    yield "rope", "position_plus_1", "positions are one too large", "rope/f32/row/t3-h2-d64-r32/*#bound", "bound", changed(1, lambda p: p + 1)
    yield "rope", "factor_ignored", "cos and sin are not scaled", "rope/*f1.25#bound", "bound", _attrs(factor=1.0)
    yield "rope", "f32_angle", "the angle is rounded to f32, undeclared", "rope/*p131072*#bound", "bound", whole(_f32_angle)
    yield "rope", "positions_of_16_bits", "positions are kept in 16 bits", "rope/*p131072*#bound", "bound", changed(1, lambda p: p & 0xFFFF)
    yield "rope", "rest_not_copied", "elements behind 2r become 0", "rope/*/t2-h4-d128-r32/*#bound", "bound", post(lambda out, a, t: out.__setitem__((..., slice(2 * len(a[2]), None)), 0.0))
    yield "rope", "first_head_only", "only the first head is turned", "rope/f32/row/t3-h2-d64-r32/*#bound", "bound", post(lambda out, a, t: out.__setitem__((slice(None), slice(1, None)), a[0][:, 1:]))
    yield "act_mul", "up_ignored", "the second operand is not multiplied", "act_mul/*silu.gated#bound", "bound", changed(1, np.ones_like)
    yield "act_mul", "gelu_forms_exchanged", "gelu is computed as gelu_tanh", "act_mul/f32/row/m2-n1000/gelu.gated#bound", "bound", pre(lambda b, i, a: a.update(kind="gelu_tanh") if a["kind"] == "gelu" else None)
    yield "act_mul", "swiglu_unclipped", "swiglu_oai does not clip", "act_mul/*swiglu_oai*#bound", "bound", whole(_unclipped)
    yield "act_mul", "tanh_saturates_early", "tanh is ±1 from |z| = 4", "act_mul/f32/*/tanh*#bound", "bound", post(lambda out, a, t: out.__setitem__(np.abs(a[0]) > 4, np.sign(a[0][np.abs(a[0]) > 4]) * (1 if a[1] is None else a[1][np.abs(a[0]) > 4])) if t["kind"] == "tanh" else None)
    yield "mul", "small_factors_lost", "a factor [1] below 0.1 counts as 0.1", "softcap/f32/row/any/decomposed#bound", "bound", changed(1, lambda y: np.maximum(y, F32(0.1)) if y.shape == (1,) and y[0] > 0 else y)
    yield "add", "broadcast_wrong", "[C] is added to the first row only", "add/*/last#exact", "exact", post(lambda out, a, t: out.__setitem__(slice(1, None), a[0][1:]) if a[1].ndim == 1 and len(out) > 1 else None)
    yield "add", "f16_result", "sums rounded to f16", "add/*#exact", "exact", post(lambda out, a, t: out.__setitem__(..., _half(out)))
    yield "mul", "rows_factor_once", "[T, 1]: every row takes the first factor", "mul/*/rows#exact", "exact", post(lambda out, a, t: out.__setitem__(..., a[0] * a[1][0, 0]) if a[1].shape == (len(out), 1) and out.size and out.shape[1] > 1 else None)
    yield "embed", "row_next", "the row behind is taken", "embed/i32*f32/row/v33*#exact", "exact", changed(0, lambda i: np.where(i == 0, i + 1, i))
    yield "embed", "ids_clamped", "an id outside of the table takes the nearest row", "embed/*/id*#error", "error", _clamped


def _clamped(backend: MutantBase, honest: Callable[..., None]) -> Callable[..., None]:
    def call(ids: Any, table: Any, **more: Any) -> None:
        values = np.clip(backend.array(ids), 0, table.shape[0] - 1)
        honest(backend.temporary(values, ids), table, **more)

    return call


def _unclipped(gate: Array, up: Array | None, kind: str) -> Array:
    from .. import oracle

    if kind != "swiglu_oai":
        return oracle.act_mul(gate, up, kind)
    y = gate / (1 + np.exp(-F32(1.702) * gate))
    return y if up is None else y * (up + 1)


def _quantize(x: Array, group: int, toward_zero: bool = False, top: float = 127) -> tuple[Array, Array]:
    parts = x.reshape(len(x), x.shape[1] // group, group)
    scales = np.abs(parts).max(-1) / F32(top) if x.size else np.zeros(parts.shape[:2], F32)
    exact = parts / np.where(scales > 0, scales, F32(1))[..., None]
    codes = np.clip(np.trunc(exact) if toward_zero else np.rint(exact), -127, 127)
    return codes.reshape(x.shape), scales


def _quant() -> Iterator[tuple[str, str, str, str, str, Breaker]]:
    yield "quantize", "toward_zero", "codes are cut, not rounded", "quantize/*#bound", "bound", whole(lambda x, group: _quantize(x, group, True))
    yield "quantize", "scale_of_128", "scale = max / 128", "quantize/*#bound", "bound", whole(lambda x, group: _quantize(x, group, top=128))
    yield "quantize", "coarse_reciprocal", "multiplies by a reciprocal of 12 bits", "quantize/*#bound", "bound", whole(lambda x, group: (np.rint(np.clip(x.reshape(len(x), -1, group) * _coarse(12)(F32(1) / np.maximum(_quantize(x, group)[1], F32(1e-30)))[..., None], -127, 127)).reshape(x.shape), _quantize(x, group)[1]))
    yield "quantize", "zeros_are_nan", "a group of zeros has the scale NaN", "quantize/*#bound", "bound", post(lambda out, a, t: out[1].__setitem__(out[1] == 0, np.nan))
    yield "dequantize", "stale_scale", "every group takes the scale of the one before", "dequantize/*#bound", "bound", changed(1, lambda s: np.roll(s, 1, axis=1) if s.shape[1] > 1 else s * 2)


def _decoders() -> Iterator[tuple[str, str, str, Callable[[HostTensor], Array]]]:
    def swapped(weight: HostTensor) -> Array:
        values = weight.decode().reshape(-1, 2, 16)
        return values[:, ::-1].reshape(weight.shape) if weight.format.startswith("q4") else weight.decode()

    def zero_dropped(weight: HostTensor) -> Array:
        if weight.format != "q4_0":
            return weight.decode()
        d = weight.data.reshape(-1, 18)[:, :2].copy().view("<f2").astype(F32)
        return (weight.decode().reshape(-1, 32) + 8 * d).reshape(weight.shape)

    def exchanged(weight: HostTensor) -> Array:
        if weight.format != "q4_1":
            return weight.decode()
        blocks = weight.data.reshape(-1, 20).copy()
        blocks[:, :4] = blocks[:, [2, 3, 0, 1]]
        return HostTensor(weight.name, weight.shape, weight.format, blocks.reshape(-1)).decode()

    def stale(weight: HostTensor) -> Array:
        if weight.format != "q8_0":
            return weight.decode()
        blocks = weight.data.reshape(-1, 34).copy()
        blocks[1::2, :2] = blocks[: len(blocks) // 2 * 2 : 2, :2]
        return HostTensor(weight.name, weight.shape, weight.format, blocks.reshape(-1)).decode()

    def last_group(weight: HostTensor) -> Array:
        values = weight.decode().copy()
        values[:, -1] = values[:, -2]
        return values

    yield "nibbles_swapped", "low and high halves of a q4 block are exchanged", "linear/f32*q4_0/row/*#bound", swapped
    yield "zero_point_dropped", "q4_0 codes count from 0, not from 8", "linear/f32*q4_0/row/*#bound", zero_dropped
    yield "scale_and_minimum_exchanged", "q4_1: d and m change places", "linear/f32*q4_1/row/*#bound", exchanged
    yield "stale_scale", "q8_0: every second block has the scale of the one before", "linear/f32*q8_0/row/*#bound", stale
    yield "last_value_repeated", "the last value of a row is the one before it", "linear/f32*q4_0/row/*/sparse*#bound", last_group


def _sampling() -> Iterator[tuple[str, str, str, Breaker]]:
    def tie_high(out: Array, a: list[Any], t: Any) -> None:
        for r, row in enumerate(a[0]):
            if a[2][r] <= 1e-5 and np.isfinite(row).all():
                out[r] = len(row) - 1 - int(np.argmax(row[::-1]))

    def random_greedy(out: Array, a: list[Any], t: Any) -> None:
        for r in range(len(out)):
            if a[2][r] <= 1e-5 and out[r] >= 0:
                out[r] = int(a[1][r] * a[0].shape[1])

    yield "top_p_ignored", "top_p is not applied", "sample/*/top_p.*#exact", changed(4, np.ones_like)
    yield "top_k_ignored", "top_k is not applied", "sample/*/top_k.*#exact", changed(3, np.zeros_like)
    yield "top_k_plus_1", "one token too many stays", "sample/*/top_k.*#exact", changed(3, lambda k: np.where(k > 0, k + 1, k))
    yield "min_p_ignored", "min_p is not applied", "sample/*/min_p.*#exact", changed(5, np.zeros_like)
    yield "u_ignored", "u is always ½", "sample/*/plain.*#exact", changed(1, lambda u: u * 0 + 0.5)
    yield "temperature_ignored", "the temperature is always 1", "sample/*/cold.*#exact", changed(2, lambda t: np.where(t > 1e-5, F32(1), t))
    yield "tie_to_the_higher_id", "of equal logits the last one wins", "sample/*/greedy.ties#exact", post(tie_high)
    yield "greedy_is_random", "temperature 0 draws", "sample/*/greedy.*#exact", post(random_greedy)
    yield "adjustments_ignored", "biases and penalties are not applied", "sample/*/*.adjusted#exact", changed(7, np.zeros_like)
    yield "ids_of_16_bits", "ids are kept in 16 bits", "sample/*/r9-v151936/greedy.last#exact", post(lambda out, a, t: out.__setitem__(..., np.where(out >= 0, out & 0xFFFF, out)))
    yield "vocabulary_cut", "logits from the 262,137th on are not read", "sample/*/r9-v262211/greedy.last#exact", changed(0, lambda x: np.where(np.arange(x.shape[1]) < 262136, x, F32(-np.inf)))
    yield "bad_row_gives_0", "a row without a finite logit gives id 0", "sample/*/*.bad#exact", post(lambda out, a, t: out.__setitem__(out < 0, 0))


def mutants() -> Iterator[Mutant]:
    """All of this file."""
    plain = lambda options: MutantBase(None, options)  # noqa: E731
    for name, what, cases, rule, breaker in _linear():
        yield Mutant(f"linear.{name}", "linear", what, cases, rule, make("linear", breaker), plain)
    for op, name, what, cases, rule, breaker in (*_rows_ops(), *_quant()):
        yield Mutant(f"{op}.{name}", "quant" if "quant" in op else "rows" if op != "linear" else "linear", what, cases, rule, make(op, breaker), plain)
    for name, what, cases, decode in _decoders():
        yield Mutant(f"weights.{name}", "quant", what, cases, "bound", lambda options, d=decode: PackedBase(None, options, d), lambda options: PackedBase(None, options))  # type: ignore[misc]
    for name, what, cases, breaker in _sampling():
        yield Mutant(f"sample.{name}", "sampling", what, cases, "exact", make("sample", breaker, SamplerBase), lambda options: SamplerBase(None, options))


