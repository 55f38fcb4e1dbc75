"""Rotary embedding: what a configuration says about it, and the `inv_freq` constant that the graph gets, made once at opening.

Everything is computed in f64 and rounded once to f32. Two kinds of scaling depend on the length of the text (dynamic,
longrope); keys already in the cache cannot be turned again, so the variant is chosen here from the context limit and said in a
note.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.errors import ModelFileError
from ..core.weights import TensorSource, WeightRef
from .keys import MAX_CONTEXT, MIN_THETA, Keys

__all__ = ["RopeConfig", "gguf_factors", "inv_freq", "rope_from_gguf", "rope_from_hf"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one kind of layer.

    rotary_dim: elements of a head that turn (even). style: which elements form a pair in the *source's* q and k rows.
    scaling: default, linear, dynamic, llama3, yarn or longrope; the fields below it are those of that kind. original_length:
    context before scaling. attention_factor: multiplies cos and sin. short_factor, long_factor: rotary_dim / 2 divisors.
    """

    theta: float
    rotary_dim: int
    style: str = "half"
    scaling: str = "default"
    factor: float = 1.0
    original_length: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


# Configurations -------------------------------------------------------------------------------------------------------

_ROPE_TYPES = {
    "default": "default",
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
}


def rope_from_hf(keys: Keys, table: Keys | None, head_dim: int, max_position: int, *, theta: float | None = None) -> RopeConfig:
    """Rotary embedding from `rope_parameters` or `rope_scaling` (table) and the older top-level `rope_theta`."""
    table = table if table is not None else Keys({}, who=keys.who)
    if theta is None:
        theta = keys.number("rope_theta", 10_000.0, low=MIN_THETA)
    theta = table.number("rope_theta", theta, low=MIN_THETA)
    part = table.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0, high=1.0), high=1.0)
    rotary_dim = int(head_dim * part)
    if rotary_dim < 2 or rotary_dim % 2:
        raise keys.wrong("partial_rotary_factor", f"a share of the head dimension {head_dim} that gives an even number", part)
    kind_key = "rope_type" if "rope_type" in table else "type"
    scaling = table.choice(kind_key, _ROPE_TYPES, "default")
    original = keys.integer("original_max_position_embeddings", max_position, high=MAX_CONTEXT)
    original = table.integer("original_max_position_embeddings", original, high=MAX_CONTEXT)
    base: dict[str, Any] = {"theta": theta, "rotary_dim": rotary_dim, "scaling": scaling, "original_length": original}
    if scaling in ("linear", "dynamic", "llama3"):
        base["factor"] = table.number("factor", low=1.0, high=1e6)
    if scaling == "dynamic":
        base["original_length"] = max_position
    if scaling == "llama3":
        low = table.number("low_freq_factor", low=1e-6, high=1e6)
        high = table.number("high_freq_factor", low=1e-6, high=1e6)
        if low >= high:
            raise table.wrong("high_freq_factor", f"more than low_freq_factor {low:g}", high)
        base |= {"low_freq_factor": low, "high_freq_factor": high}
    if scaling in ("yarn", "longrope"):
        factor = table.number("factor", max(1.0, max_position / original), low=1.0, high=1e6)
        base["factor"] = factor
        default = _yarn_attention(table, factor) if scaling == "yarn" else _longrope_attention(factor, original)
        base["attention_factor"] = table.number("attention_factor", default, low=1e-6, high=1e6)
    if scaling == "yarn":
        base |= _yarn_ramp(table, "beta_fast", "beta_slow")
        base["truncate"] = table.flag("truncate", True)
    if scaling == "longrope":
        base |= {name: table.numbers(name, rotary_dim // 2) for name in ("short_factor", "long_factor")}
    return RopeConfig(**base)


def _yarn_ramp(table: Keys, fast_key: str, slow_key: str) -> dict[str, float]:
    fast, slow = table.number(fast_key, 32.0, low=1e-6), table.number(slow_key, 1.0, low=1e-6)
    if fast <= slow:
        raise table.wrong(fast_key, f"more than {slow_key} {slow:g}", fast)
    return {"beta_fast": fast, "beta_slow": slow}


def _yarn_attention(table: Keys, factor: float) -> float:
    """cos/sin multiplier of YaRN (Peng et al. 2023, eq. 22), with DeepSeek's two scales where both are given."""

    def scale(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1.0

    mscale, all_dim = table.number("mscale", 0.0), table.number("mscale_all_dim", 0.0)
    return scale(mscale) / scale(all_dim) if mscale and all_dim else scale(1.0)


def _longrope_attention(factor: float, original: int) -> float:
    """cos/sin multiplier of LongRoPE (Ding et al. 2024): √(1 + ln s / ln L0)."""
    return math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 and original > 1 else 1.0


def rope_from_gguf(keys: Keys, head_dim: int, max_position: int, style: str) -> RopeConfig:
    """Rotary embedding from `ARCH.rope.*`. Factors stored as tensors (`rope_freqs`, `rope_factors_*`) are added by
    `rope.py`."""
    rotary_dim = keys.integer("rope.dimension_count", head_dim, low=2, high=head_dim)
    if rotary_dim % 2:
        raise keys.wrong("rope.dimension_count", "even", rotary_dim)
    kinds = {"none": "default", "linear": "linear", "yarn": "yarn", "longrope": "longrope"}
    scaling = keys.choice("rope.scaling.type", kinds, "none")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0, low=1e-6), high=1e6)
    if "rope.scale_linear" in keys and "rope.scaling.type" not in keys:
        scaling = "linear"
    original = keys.integer("rope.scaling.original_context_length", max_position, high=MAX_CONTEXT)
    base: dict[str, Any] = {
        "theta": keys.number("rope.freq_base", 10_000.0, low=MIN_THETA),
        "rotary_dim": rotary_dim,
        "style": style,
        "scaling": scaling,
        "original_length": original,
    }
    attention = base["attention_factor"] = keys.number("rope.scaling.attn_factor", 1.0, low=1e-6, high=1e6)
    if scaling in ("linear", "yarn") and factor != 0.0:
        if factor < 1.0:
            raise keys.wrong("rope.scaling.factor", "1 or more", factor)
        base["factor"] = factor
    if scaling == "yarn":
        if keys.number("rope.scaling.yarn_ext_factor", 1.0, low=-1e6) != 1.0:
            raise keys.unsupported("rope.scaling.yarn_ext_factor", "1")
        base |= _yarn_ramp(keys, "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow")
        attention *= keys.number("rope.scaling.yarn_attn_factor", 1.0, low=1e-6, high=1e6)
        base["attention_factor"] = attention * (0.1 * math.log(base.get("factor", 1.0)) + 1.0)
    if scaling == "longrope" and "rope.scaling.attn_factor" not in keys:
        base["attention_factor"] = _longrope_attention(max_position / original, original)
    return RopeConfig(**base)


# Frequencies ----------------------------------------------------------------------------------------------------------


def inv_freq(rope: RopeConfig, context_limit: int, factors: np.ndarray | None = None) -> tuple[np.ndarray, str]:
    """Angle per position of each pair, f32 [rotary_dim / 2], and a note ("" if nothing was decided).

    context_limit: longest sequence in tokens that will be run. factors: f64 [rotary_dim / 2], divisors that the file holds
    as a tensor.
    """
    dim = rope.rotary_dim
    theta, note = rope.theta, ""
    if rope.scaling == "dynamic":
        theta, note = _dynamic_theta(rope, context_limit)
    freq = theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)  # [dim/2]
    if rope.scaling == "linear":
        freq = freq / rope.factor
    elif rope.scaling == "llama3":
        freq = _llama3(rope, freq)
    elif rope.scaling == "yarn":
        freq = _yarn(rope, freq)
    elif rope.scaling == "longrope":
        use_long = context_limit > rope.original_length
        chosen = rope.long_factor if use_long else rope.short_factor
        freq = freq / (np.asarray(chosen, np.float64) if len(chosen) else 1.0)
        note = (
            f"rope: the {'long' if use_long else 'short'} factors are used for the whole session, because the context limit "
            f"{context_limit} is {'above' if use_long else 'within'} the original {rope.original_length}"
        )
    if factors is not None:
        freq = freq / factors
    return freq.astype(np.float32), note


def _dynamic_theta(rope: RopeConfig, context_limit: int) -> tuple[float, str]:
    """The base for sequences of n tokens (bloc97's dynamic NTK): θ·(s·n/L0 − s + 1)^(d/(d−2)), n at most s·L0."""
    dim = rope.rotary_dim
    length = max(rope.original_length, min(context_limit, int(rope.factor * rope.original_length)))
    stretch = rope.factor * length / rope.original_length - rope.factor + 1.0
    theta = rope.theta * stretch ** (dim / (dim - 2)) if dim > 2 else rope.theta
    note = f"rope: dynamic scaling is fixed for {length} tokens (base {theta:.6g}); trained on {rope.original_length}"
    return theta, note


def _llama3(rope: RopeConfig, freq: np.ndarray) -> np.ndarray:
    """Llama 3.1: short wavelengths stay, long ones are divided by the factor, a smooth passage between."""
    wavelength = 2.0 * math.pi / freq
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = np.clip((rope.original_length / wavelength - low) / (high - low), 0.0, 1.0)
    return freq * ((1.0 - smooth) / rope.factor + smooth)


def _yarn(rope: RopeConfig, freq: np.ndarray) -> np.ndarray:
    """YaRN (Peng et al. 2023, section 3.2): pairs that turn often keep their frequency, rare ones are interpolated."""
    dim = rope.rotary_dim

    def pair_of(rotations: float) -> float:
        return dim * math.log(rope.original_length / (rotations * 2.0 * math.pi)) / (2.0 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
    return freq * (1.0 - ramp) + freq / rope.factor * ramp


def gguf_factors(
    rope: RopeConfig, sources: Mapping[str, TensorSource], context_limit: int
) -> tuple[str, np.ndarray | None, str]:
    """The divisors that a GGUF file stores as a tensor: (its name, f64 [rotary_dim / 2], a note), ("", None, "") without one.

    Raises ModelFileError if the tensor has another length or holds anything but positive finite numbers.
    """
    name, note = "rope_freqs.weight", ""
    if "rope_factors_long.weight" in sources or "rope_factors_short.weight" in sources:
        use_long = context_limit > rope.original_length
        name = f"rope_factors_{'long' if use_long else 'short'}.weight"
        note = (
            f"rope: '{name}' is used for the whole session, because the context limit {context_limit} is "
            f"{'above' if use_long else 'within'} the original {rope.original_length}"
        )
    elif name not in sources:
        if rope.scaling == "longrope":
            raise ModelFileError("the file says longrope but has no 'rope_factors_long.weight'", fix="convert the model again")
        return "", None, ""
    tensor = WeightRef(name).resolve(sources, "inv_freq", (rope.rotary_dim // 2,))
    factors = tensor.decode().astype(np.float64)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelFileError(f"tensor '{name}' must hold positive finite numbers", who=sources[name].file, fix="download again")
    return name, factors, note
