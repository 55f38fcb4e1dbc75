"""Honest kernels for calibration only: each op of the catalogue once more, in f32, from another formula and in another order of sums
than `backends/ref`. A bound is right if kernels that share nothing need little of it; those of a tree may have more in common than one thinks.

`Blas` multiplies by BLAS, whose order of sums is the library's; takes exponentials to base 2; runs attention online, block by block; and sums
experts one after the other over all rows. `Groups` rounds activations to int8 in groups of 32 and sums group by group, as kernels with integer
products do; all else of it is `Blas`, so the two count as one. `Lanes` (lanes.py) has products and experts once more. None promises what an engine needs (a row's
bits may depend on the number of rows): nothing but `calibrate` opens them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from fastllm.api import Backend, KVSpec, No, OpQuery, SlotSpec, Stream, Tensor, Yes

from . import blocks
from .lanes import Lanes
from .own_kernels import OwnKernels, check_experts

__all__ = ["KERNELS"]

Array = np.ndarray
F32 = np.float32
GROUP = 32
LOG2E = F32(1 / math.log(2))


class Blas(OwnKernels):
    """Every op of the catalogue; products by BLAS."""

    name = "blas"

    def supports(self, q: OpQuery) -> Yes | No:
        """As `ref`, weights of every format, and softcap, which `ref` leaves to its parts."""
        return Yes("blas.softcap") if q.op == "softcap" else super().supports(q)

    # products ---------------------------------------------------------------------------------------------------------

    def product(self, x: Array, w: Array) -> Array:
        """x [n, K] · w [N, K]ᵀ -> [n, N]."""
        return np.ascontiguousarray(x) @ np.ascontiguousarray(w).T

    def _own_linear(self, x: Array, weight: Array, bias: Array | None) -> Array:
        y = self.product(x, weight)
        return y if bias is None else y + bias

    def _own_matmul(self, a: Array, b: Array) -> Array:
        return np.matmul(np.ascontiguousarray(a.transpose(1, 0, 2)), np.ascontiguousarray(b.transpose(0, 2, 1))).transpose(1, 0, 2)

    def _own_moe(
        self, x: Array, ids: Array, weights: Array, gate: Array, up: Array | None, down: Array, gate_bias: Array | None = None,
        up_bias: Array | None = None, down_bias: Array | None = None, *, kind: str,
    ) -> Array:  # fmt: skip
        """Expert by expert over the rows that ask for it."""
        check_experts(ids, len(gate))
        out = np.zeros((len(x), down.shape[1]), F32)
        for e in range(len(gate)):
            rows, place = np.nonzero(ids == e)
            if not len(rows):
                continue
            biases = [None if b is None else b[e] for b in (gate_bias, up_bias, down_bias)]
            hidden = self._own_act_mul(self._own_linear(x[rows], gate[e], biases[0]), None if up is None else self._own_linear(x[rows], up[e], biases[1]), kind=kind)
            out[rows] += self._own_linear(hidden, down[e], biases[2]) * weights[rows, place][:, None]
        return out

    # rows -----------------------------------------------------------------------------------------------------------

    def _own_rms_norm(self, x: Array, weight: Array | None, *, eps: float) -> Array:
        y = x * (F32(1) / np.sqrt(_squares(x) / F32(x.shape[-1]) + F32(eps)))
        return y if weight is None else weight * y

    def _own_layer_norm(self, x: Array, weight: Array | None, bias: Array | None, *, eps: float) -> Array:
        ones = np.ones(x.shape[-1], F32)
        centred = x - (_dots(x, ones) / F32(x.shape[-1]))
        y = centred / np.sqrt(_squares(centred) / F32(x.shape[-1]) + F32(eps))
        y = y if weight is None else y * weight
        return y if bias is None else y + bias

    def _own_softmax(self, x: Array) -> Array:
        e = np.exp2((x - x.max(-1, keepdims=True)) * LOG2E)
        return e * (F32(1) / _dots(e, np.ones(x.shape[-1], F32)))

    def _own_rope(self, x: Array, positions: Array, inv_freq: Array, *, style: str, factor: float) -> Array:
        """A complex product for each pair."""
        r, out = len(inv_freq), x.copy()
        first, second = (slice(0, r), slice(r, 2 * r)) if style == "half" else (slice(0, 2 * r, 2), slice(1, 2 * r, 2))
        turn = factor * np.exp(1j * positions.astype(np.float64)[:, None] * inv_freq.astype(np.float64))
        pairs = (x[..., first].astype(np.complex64) + np.complex64(1j) * x[..., second]) * turn.astype(np.complex64)[:, None]
        out[..., first], out[..., second] = pairs.real, pairs.imag
        return out

    def _own_act_mul(self, gate: Array, up: Array | None, *, kind: str) -> Array:
        if kind == "swiglu_oai":
            g = np.minimum(gate, F32(7))
            y = g / (1 + np.exp2(g * F32(-1.702 / math.log(2))))
            return y if up is None else y * (1 + np.minimum(np.maximum(up, F32(-7)), F32(7)))
        y = _ACTIVATIONS[kind](gate)
        return y if up is None else up * y

    def _own_softcap(self, x: Array, *, cap: float) -> Array:
        return F32(cap) * _tanh(x * (F32(1) / F32(cap)))

    def _own_concat(self, x: Array, y: Array) -> Array:
        return np.dstack([x, y]) if x.ndim == 3 else np.hstack([x, y])

    def _own_quantize(self, x: Array, *, group: int) -> tuple[Array, Array]:
        """By the reciprocal of the scale."""
        parts = x.reshape(len(x), x.shape[1] // group, group)
        scales = np.maximum(parts.max(-1), -parts.min(-1)) / F32(127)
        inverse = np.where(scales > 0, F32(1) / np.where(scales > 0, scales, F32(1)), F32(0))
        return np.rint(parts * inverse[..., None]).astype(np.int8).reshape(x.shape), scales

    def _own_dequantize(self, codes: Array, scales: Array, *, group: int) -> Array:
        return np.repeat(scales, group, axis=1) * codes

    def _own_route_topk(
        self, logits: Array, bias: Array | None, *, k: int, score: str, groups: int, keep_groups: int, group_score: str, renorm: int, scale: float,
    ) -> tuple[Array, Array]:  # fmt: skip
        """Row by row, by Python's sort."""
        s = self._own_softmax(logits) if score == "softmax" else _sigmoid(logits) if score == "sigmoid" else logits
        c = s if bias is None else s + bias
        ids, weights = np.zeros((len(c), k), np.int32), np.zeros((len(c), k), F32)
        size = c.shape[1] // groups
        for t, row in enumerate(c):
            parts = [sorted(row[g * size : (g + 1) * size].tolist(), reverse=True)[:2] for g in range(groups)]
            worth = [p[0] if group_score == "max" else float(F32(p[0]) + F32(sum(p[1:]))) for p in parts]
            kept = sorted(range(groups), key=lambda g: -worth[g])[:keep_groups]
            ids[t] = sorted((e for e in range(c.shape[1]) if groups == 1 or e // size in kept), key=lambda e: -row[e])[:k]
            chosen = s[t, ids[t]]
            if score == "softmax_of_chosen":
                chosen = self._own_softmax(chosen[None])[0]
            weights[t] = chosen / (np.dot(chosen, np.ones(k, F32)) + F32(1e-20)) if renorm else chosen
        return ids, F32(scale) * weights

    # caches and states ----------------------------------------------------------------------------------------------

    def kv_block_bytes(self, spec: KVSpec, block_size: int) -> int:
        """Rows of f32, keys and values of a token beside each other, rounded as the spec asks."""
        return 4 * block_size * spec.num_kv_heads * (spec.key_dim + spec.value_dim)

    def _block_rows(self, cache: Tensor, block: int) -> Array:
        """[block_size, K, Dk + Dv] of one block, a view."""
        assert isinstance(cache.spec, KVSpec)
        if not 0 <= block < cache.num_blocks:
            raise IndexError(f"cache block {block} is outside of 0…{cache.num_blocks - 1}")
        raw = self._bytes(cache.buffer, cache.offset + block * cache.block_bytes, cache.block_bytes, Stream())
        return raw.view(F32).reshape(cache.block_size, cache.spec.num_kv_heads, cache.spec.key_dim + cache.spec.value_dim)

    def _own_kv_write(self, cache: Tensor, key: Array, value: Array | None, slots: Array) -> None:
        assert isinstance(cache.spec, KVSpec)
        for t, slot in enumerate(slots.tolist()):
            if slot >= 0:
                block, at = divmod(slot, cache.block_size)
                parts = [_stored(x[t], cache.spec.dtype) for x in (key, value) if x is not None]
                self._block_rows(cache, block)[at] = np.concatenate(parts, axis=-1)

    def _own_attention(
        self, query: Array, cache: Tensor, positions: Array, query_start: Array, context_len: Array, block_table: Array, sinks: Array | None,
        alibi_slopes: Array | None, prefix_len: Array | None, *, value_dim: int, mask: str, chunk: int, window: int, scale: float, softcap: float,
    ) -> Array:  # fmt: skip
        """Online over blocks (Milakov & Gimelshein 2018): a running maximum, a running sum, both corrected with every block."""
        spec = cache.spec
        assert isinstance(spec, KVSpec)
        width = spec.value_dim or value_dim
        out = np.zeros((len(query), query.shape[1], width), F32)
        share = query.shape[1] // spec.num_kv_heads
        for s, length in enumerate(context_len.tolist()):
            prefix = 0 if prefix_len is None else int(prefix_len[s])
            for t in range(int(query_start[s]), int(query_start[s + 1])):
                p = int(positions[t])
                top = np.full(query.shape[1], -np.inf, F32) if sinks is None else sinks.astype(F32)
                total = np.zeros(query.shape[1], F32) if sinks is None else np.ones(query.shape[1], F32)
                mixed = np.zeros((query.shape[1], width), F32)
                for b in range(-(-length // cache.block_size)):
                    keys = np.arange(b * cache.block_size, min((b + 1) * cache.block_size, length))
                    seen = keys[_seen(keys, p, mask, chunk, window, prefix)]
                    if not len(seen):
                        continue
                    rows = self._block_rows(cache, int(block_table[s, b]))[seen - b * cache.block_size]  # [n, K, Dk + Dv]
                    for h in range(query.shape[1]):
                        k = rows[:, h // share, : spec.key_dim]
                        v = k[:, :width] if value_dim else rows[:, h // share, spec.key_dim :]
                        score = np.ascontiguousarray(k) @ (query[t, h] * F32(scale))
                        score = F32(softcap) * np.tanh(score / F32(softcap)) if softcap else score
                        score = score if alibi_slopes is None else score + alibi_slopes[h] * (seen - p).astype(F32)
                        highest = np.maximum(top[h], score.max())
                        old, e = np.exp2((top[h] - highest) * LOG2E), np.exp2((score - highest) * LOG2E)
                        total[h] = total[h] * old + e.sum(dtype=F32)
                        mixed[h] = mixed[h] * old + e @ np.ascontiguousarray(v)
                        top[h] = highest
                out[t] = np.where((total > 0)[:, None] & ~np.isneginf(top)[:, None], mixed / np.where(total == 0, F32(1), total)[:, None], F32(0))
        return out

    def _states(self, state: Tensor, positions: Array, query_start: Array, state_slot: Array) -> list[tuple[slice, Array]]:
        """(rows, state as a view) of every sequence with rows; zeros where the first row has position 0."""
        assert isinstance(state.spec, SlotSpec)
        found = []
        for s, slot in enumerate(state_slot.tolist()):
            first, last = int(query_start[s]), int(query_start[s + 1])
            if first < last:
                values = self._bytes(state.buffer, state.offset + slot * state.block_bytes, state.block_bytes, Stream()).view(F32).reshape(state.spec.shape)
                if positions[first] == 0:
                    values[...] = 0
                found.append((slice(first, last), values))
        return found

    def _own_short_conv(self, state: Tensor, x: Array, weight: Array, positions: Array, query_start: Array, state_slot: Array, *, kind: str) -> Array:
        out = np.zeros_like(x)
        for rows, values in self._states(state, positions, query_start, state_slot):
            history = np.concatenate([values, x[rows]])  # [L − 1 + n, C]
            for c in range(x.shape[1]):
                out[rows, c] = np.correlate(history[:, c], weight[c], "valid")
            values[...] = history[len(history) - len(values) :]
        return self._own_act_mul(out, None, kind=kind)

    def _own_delta_rule(
        self, state: Tensor, query: Array, key: Array, value: Array, a: Array, b: Array, a_log: Array, dt_bias: Array, positions: Array, query_start: Array,
        state_slot: Array, *, eps: float,
    ) -> Array:  # fmt: skip
        """Head by head: the rank-one change as a product of matrices."""
        out, width, share = np.zeros_like(value), query.shape[2], value.shape[1] // query.shape[1]
        q = query / (np.sqrt(_squares(query) + F32(eps)) * F32(math.sqrt(width)))
        k = key / np.sqrt(_squares(key) + F32(eps))
        z = a + dt_bias
        decay = np.exp2(-np.exp(a_log) * (np.maximum(z, F32(0)) + np.log1p(np.exp(-np.abs(z)))) * LOG2E)
        beta = _sigmoid(b)
        for rows, values in self._states(state, positions, query_start, state_slot):
            for t in range(rows.start, rows.stop):
                for h in range(value.shape[1]):
                    s, one = decay[t, h] * values[h], k[t, h // share]
                    values[h] = s + one[:, None] @ (beta[t, h] * (value[t, h] - one @ s))[None]
                    out[t, h] = q[t, h // share] @ values[h]
        return out


class Groups(Blas):
    """Activations of products rounded to int8 in groups of 32, sums by groups, in f32; what is around the products is Blas's."""

    name = "groups"
    act = f"q8_g{GROUP}"

    def supports(self, q: OpQuery) -> Yes | No:
        """Only products with weights of a coded format, whose blocks, and so whose rows, are whole groups."""
        coded = any(d in blocks.BLOCK_BYTES for d in q.dtypes)
        if q.op not in ("linear", "moe") or not coded:
            return No("only products with coded weights are computed in groups")
        return super().supports(q)

    def product(self, x: Array, w: Array) -> Array:
        """As kernels with integer products do it, but for the integers."""
        parts = x.reshape(len(x), x.shape[1] // GROUP, GROUP)
        scales = np.abs(parts).max(-1) / F32(127)  # [n, groups]
        codes = np.where(scales[..., None] > 0, np.rint(parts / np.where(scales > 0, scales, F32(1))[..., None]), parts)
        y = np.zeros((len(x), len(w)), F32)
        for g in range(parts.shape[1]):
            y += scales[:, g, None] * (codes[:, g] @ np.ascontiguousarray(w[:, g * GROUP : (g + 1) * GROUP]).T)
        return y


def _squares(x: Array) -> Array:
    """Σ x² over the last axis, by BLAS: [..., 1]."""
    flat = np.ascontiguousarray(x).reshape(-1, x.shape[-1])
    return np.array([np.dot(row, row) for row in flat], F32).reshape(*x.shape[:-1], 1)


def _dots(x: Array, y: Array) -> Array:
    """x · y over the last axis, by BLAS: [..., 1]."""
    flat = np.ascontiguousarray(x).reshape(-1, x.shape[-1])
    return np.array([np.dot(row, y) for row in flat], F32).reshape(*x.shape[:-1], 1)


def _sigmoid(z: Array) -> Array:
    return (1 / (1 + np.exp2(-z * LOG2E))).astype(F32)


def _tanh(z: Array) -> Array:
    e = np.expm1(2 * np.clip(z, F32(-20), F32(20)))  # tanh is 1 beyond, in f32
    return (e / (e + 2)).astype(F32)


def _gelu(z: Array) -> Array:
    """½ z · erfc(−z / √2) by a rational fit, relative error below 1.2e-7 (Press et al., Numerical Recipes in C, § 6.2)."""
    x = -z.astype(np.float64) / math.sqrt(2)
    t = 1 / (1 + 0.5 * np.abs(x))
    fit = np.zeros(t.shape)
    for c in (0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196, 1.00002368, -1.26551223):
        fit = fit * t + c
    tail = t * np.exp(-x * x + fit)
    return (0.5 * z * np.where(x >= 0, tail, 2 - tail)).astype(F32)


def _gelu_tanh(z: Array) -> Array:
    return z / (1 + np.exp2(F32(-2 * math.sqrt(2 / math.pi)) * (z + F32(0.044715) * z * z * z) * LOG2E))


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": lambda z: z / (1 + np.exp2(-z * LOG2E)),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "sigmoid": _sigmoid,
    "tanh": _tanh,
    "relu": lambda z: np.where(z > 0, z, np.where(np.isnan(z), z, F32(0))),
}


def _stored(x: Array, dtype: str | None) -> Array:
    """Keys or values [K, D] as a cache of this type gives them back."""
    if dtype == "f16":
        return x.astype(np.float16).astype(F32)
    if dtype == "bf16":
        return blocks.decode("bf16", blocks.encode_plain("bf16", x), x.size).astype(F32).reshape(x.shape)
    if dtype != "int8":
        return x
    out = np.empty_like(x)
    for at in range(0, x.shape[-1], GROUP):
        part = x[:, at : at + GROUP]
        scale = np.where(np.isfinite(part).all(-1), np.abs(part).max(-1) / F32(127), F32(np.nan))[:, None]
        out[:, at : at + GROUP] = scale * np.rint(part * np.where(scale > 0, 1 / scale, F32(0)))
    return out


def _seen(keys: Array, position: int, mask: str, chunk: int, window: int, prefix: int) -> Array:
    """Which keys a row sees."""
    seen = keys <= position
    if mask == "full":
        seen = keys >= 0
    elif mask == "prefix" and position < prefix:
        seen = seen | (keys < prefix)
    elif mask == "chunk":
        seen = seen & (keys // chunk == position // chunk)
    return seen & (position - keys < window) if window else seen


KERNELS: dict[str, Callable[[], Backend]] = {"blas": Blas, "groups": Groups, "lanes": Lanes}
"""Name -> what opens it."""
