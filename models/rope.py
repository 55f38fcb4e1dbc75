"""Rotary frequencies: from a `RopeConfig` to the `inv_freq` constant of the graph, once, when the model is opened.

Everything is computed in f64 and rounded once to f32. Two kinds of scaling depend on the length of the text (dynamic, longrope);
keys already in the cache cannot be turned again, so the variant is chosen here from the context limit and said in a note.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ..core.errors import ModelFileError
from ..core.weights import TensorSource, WeightRef
from .config import RopeConfig

__all__ = ["gguf_factors", "inv_freq"]


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
    note = f"rope: dynamic scaling is fixed for {length} tokens (base {theta:.6g}); the model was trained on {rope.original_length}"
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


def gguf_factors(rope: RopeConfig, sources: Mapping[str, TensorSource], context_limit: int) -> tuple[str, np.ndarray | None, str]:
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
