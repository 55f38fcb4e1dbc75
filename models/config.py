"""What a decoder looks like: one frozen description that every family fills in from its file's own keys.

A `config.json` and the `ARCH.*` keys of a GGUF file say the same things under different names; both are read here through `Keys`,
which checks type, range and finiteness before a number is believed. Families give their defaults and add what is theirs;
`blocks.py` turns the result into a graph. Nothing here looks at weights, except that a GGUF file says which biases exist only
by having them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.errors import ModelFileError, UnsupportedError

__all__ = [
    "ACTIVATION_NAMES",
    "MAX_CONTEXT",
    "MIN_THETA",
    "DecoderConfig",
    "Keys",
    "RopeConfig",
    "decoder_from_gguf",
    "decoder_from_hf",
    "layer_types_from_hf",
    "rope_from_gguf",
    "rope_from_hf",
    "sliding_window_from_hf",
]

ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Names used by configurations -> `act_mul` kinds."""

MAX_HIDDEN = 1 << 20
MAX_LAYERS = 4096
MAX_HEADS = 65_536
MAX_VOCAB = 1 << 24
MAX_CONTEXT = (1 << 31) - 1
MIN_THETA = 2.0


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


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer with grouped-query attention and a gated MLP.

    norms: "pre" (before each branch) or "sandwich" (before and after). layer_types: "full" or "sliding" per layer; a sliding
    layer sees sliding_window keys, itself included, and uses local_rope where there is one. no_rope_layers: layers without
    positions. query_scale multiplies q·k. Multipliers and softcaps of 1.0 and 0.0 mean none.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    query_scale: float
    local_rope: RopeConfig | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norms: str = "pre"
    sliding_window: int = 0
    layer_types: tuple[str, ...] = ()
    no_rope_layers: frozenset[int] = frozenset()
    attn_softcap: float = 0.0
    final_softcap: float = 0.0
    embed_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    hidden_act: str = "silu"

    def window_of(self, layer: int) -> int:
        """Keys that `layer` sees (0: all before it)."""
        return self.sliding_window if self.layer_types and self.layer_types[layer] == "sliding" else 0

    def rope_of(self, layer: int) -> RopeConfig | None:
        """The rotary embedding of `layer`, None for a layer without one."""
        if layer in self.no_rope_layers:
            return None
        return self.local_rope if self.local_rope is not None and self.window_of(layer) else self.rope


class Keys:
    """Typed access to a configuration: a missing key, a wrong type, a non-finite number or one out of range is a
    ModelFileError that names key, value and limit. JSON null counts as missing. `defaults` stand in for missing keys;
    `prefix` is put before every name (GGUF's `ARCH.`)."""

    def __init__(self, values: Mapping[str, Any], *, who: str = "", prefix: str = "", defaults: Mapping[str, Any] | None = None):
        self.values, self.who, self.prefix, self.defaults = values, who, prefix, dict(defaults or {})

    def __contains__(self, key: str) -> bool:
        return self.values.get(self.prefix + key) is not None

    def raw(self, key: str, default: Any = None) -> Any:
        """The value as it is, else the family's default, else `default`."""
        value = self.values.get(self.prefix + key)
        return self.defaults.get(key, default) if value is None else value

    def wrong(self, key: str, rule: str, value: Any = None) -> ModelFileError:
        """The error for a key that breaks `rule`."""
        found = self.raw(key) if value is None else value
        return ModelFileError(
            f"'{self.prefix}{key}' is {_shown(found)}; it must be {rule}",
            who=self.who,
            fix="the configuration is damaged or was edited; download the model again",
            key=self.prefix + key,
        )

    def missing(self, key: str) -> ModelFileError:
        """The error for a key that must be there."""
        return ModelFileError(
            f"the configuration has no '{self.prefix}{key}'", who=self.who, fix="download the model again", key=self.prefix + key
        )

    def unsupported(self, key: str, known: str) -> UnsupportedError:
        """The error for a value that is legal somewhere but not understood here."""
        return UnsupportedError(
            f"'{self.prefix}{key}' is {_shown(self.raw(key))}, which fastllm does not know",
            who=self.who,
            why=f"known: {known}",
            key=self.prefix + key,
        )

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_HIDDEN) -> int:
        """An integer in low…high. A list of equal integers (GGUF writes some keys per layer) counts as that integer."""
        value = self.raw(key, default)
        if value is None:
            raise self.missing(key)
        if isinstance(value, (list, np.ndarray)):
            items = value.tolist() if isinstance(value, np.ndarray) else value
            if not items or any(type(item) is not int for item in items):
                raise self.wrong(key, "an integer, or one for every layer")
            if any(item != items[0] for item in items):
                raise self.unsupported(key, "the same value for every layer")
            value = items[0]
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(key, f"an integer from {low} to {high}", value)
        return value

    def number(self, key: str, default: float | None = None, *, low: float = 0.0, high: float = 1e30) -> float:
        """A finite number in low…high; integers count."""
        value = self.raw(key, default)
        if value is None:
            raise self.missing(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:  # NaN fails, too
            raise self.wrong(key, f"a number from {low:g} to {high:g}", value)
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """true or false."""
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return value

    def choice(self, key: str, table: Mapping[str, str], default: str | None = None) -> str:
        """table[value]; UnsupportedError for a value that the table does not have."""
        value = self.raw(key, default)
        if value is None:
            raise self.missing(key)
        if not isinstance(value, str):
            raise self.wrong(key, "a string", value)
        if value not in table:
            raise self.unsupported(key, ", ".join(table))
        return table[value]

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of `length` positive finite numbers."""
        value = self.raw(key)
        if value is None:
            raise self.missing(key)
        if not isinstance(value, list) or len(value) != length:
            raise self.wrong(key, f"a list of {length} numbers")
        for item in value:
            if isinstance(item, bool) or not isinstance(item, (int, float)) or not 0 < item <= 1e30:
                raise self.wrong(key, "a list of positive finite numbers", item)
        return tuple(float(v) for v in value)

    def optional(self, key: str, absent: float, *, low: float = 0.0, high: float = 1e30) -> float:
        """A number where null switches the feature off (0.0) and an absent key means the family's value `absent`."""
        if self.prefix + key in self.values and self.values[self.prefix + key] is None:
            return 0.0
        return self.number(key, absent, low=low, high=high)

    def table(self, key: str) -> Keys | None:
        """A nested object as Keys (its names are shown as `key.name`), None if absent."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(key, "an object", value)
        return Keys({f"{self.prefix}{key}.{k}": v for k, v in value.items()}, who=self.who, prefix=f"{self.prefix}{key}.")

    def layer_flags(self, key: str, count: int) -> list[Any] | None:
        """A per-layer list of `count` items, None if absent."""
        value = self.raw(key)
        if value is None:
            return None
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if not isinstance(value, list) or len(value) != count:
            raise self.wrong(key, f"a list with one entry for each of the {count} layers")
        return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _heads(keys: Keys, names: tuple[str, str, str, str]) -> tuple[int, int, int, int]:
    """hidden_size, num_heads, num_kv_heads, head_dim under the given four names, checked against each other."""
    hidden = keys.integer(names[0])
    heads = keys.integer(names[1], high=MAX_HEADS)
    kv_heads = keys.integer(names[2], heads, high=MAX_HEADS)
    if heads % kv_heads:
        raise keys.wrong(names[2], f"a divisor of the {heads} query heads", kv_heads)
    if keys.raw(names[3]) is None and hidden % heads:
        raise keys.wrong(names[1], f"a divisor of the hidden size {hidden}, as '{names[3]}' is absent", heads)
    head_dim = keys.integer(names[3], max(1, hidden // heads), high=65_536)
    if heads * head_dim > MAX_HIDDEN:
        raise keys.wrong(names[1], f"at most {MAX_HIDDEN} / the head dimension {head_dim}", heads)
    return hidden, heads, kv_heads, head_dim


# Hugging Face ---------------------------------------------------------------------------------------------------------


def decoder_from_hf(keys: Keys, *, act_key: str = "hidden_act", **own: Any) -> DecoderConfig:
    """The common part of a `config.json`. keys.defaults: the family's defaults. own: fields that the family decides itself.

    Raises ModelFileError for missing, wrong or contradicting keys, UnsupportedError for unknown values.
    """
    quantized = keys.table("quantization_config")
    if quantized is not None:
        method = quantized.raw("quant_method", "unnamed")
        raise UnsupportedError(
            f"the weights are quantised with '{_shown(method)}', which is not read yet",
            who=keys.who,
            why="config.json has 'quantization_config'",
            fix="use the unquantised model or a GGUF file of it",
            key="quantization_config.quant_method",
        )
    hidden, heads, kv_heads, head_dim = _heads(keys, ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    num_layers = keys.integer("num_hidden_layers", high=MAX_LAYERS)
    max_position = keys.integer("max_position_embeddings", high=MAX_CONTEXT)
    common: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": keys.integer("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": keys.integer("vocab_size", high=MAX_VOCAB),
        "rms_norm_eps": keys.number("rms_norm_eps", 1e-6, low=1e-12, high=1.0),
        "max_position": max_position,
        "query_scale": head_dim**-0.5,
        "tie_word_embeddings": keys.flag("tie_word_embeddings"),
        "hidden_act": keys.choice(act_key, ACTIVATION_NAMES, "silu"),
    }
    if "rope" not in own:
        table = keys.table("rope_parameters") or keys.table("rope_scaling")
        common["rope"] = rope_from_hf(keys, table, head_dim, max_position)
    return DecoderConfig(**{**common, **own})


def layer_types_from_hf(keys: Keys, default: Callable[[int], bool]) -> tuple[str, ...]:
    """"full" or "sliding" for each layer from `layer_types`; where it is absent, default(layer) says whether it slides."""
    count = keys.integer("num_hidden_layers", high=MAX_LAYERS)
    listed = keys.layer_flags("layer_types", count)
    if listed is None:
        return tuple("sliding" if default(i) else "full" for i in range(count))
    names = {"full_attention": "full", "sliding_attention": "sliding"}
    for item in listed:
        if not isinstance(item, str) or item not in names:
            raise UnsupportedError(
                f"'layer_types' holds {_shown(item)}, which this family does not know",
                who=keys.who,
                why=f"known: {', '.join(names)}",
                key="layer_types",
            )
    return tuple(names[item] for item in listed)


def sliding_window_from_hf(keys: Keys, absent: int = 0) -> int:
    """`sliding_window` in tokens; null means none, an absent key `absent`."""
    if "sliding_window" not in keys:
        return 0 if "sliding_window" in keys.values else absent
    return keys.integer("sliding_window", high=MAX_CONTEXT)


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
        default = _yarn_attention(table, factor) if scaling == "yarn" else longrope_attention(factor, original)
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


def longrope_attention(factor: float, original: int) -> float:
    """cos/sin multiplier of LongRoPE (Ding et al. 2024): √(1 + ln s / ln L0)."""
    return math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 and original > 1 else 1.0


# GGUF -----------------------------------------------------------------------------------------------------------------


def decoder_from_gguf(keys: Keys, tensors: Container[str], vocab_size: int, *, style: str, **own: Any) -> DecoderConfig:
    """The common part of a GGUF file's `ARCH.*` keys. tensors: names in the file (biases and a separate head exist if they are
    there). vocab_size: rows of the embedding. style: rope pairing that llama.cpp's converter leaves for this architecture."""
    names = ("embedding_length", "attention.head_count", "attention.head_count_kv", "attention.key_length")
    hidden, heads, kv_heads, head_dim = _heads(keys, names)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise keys.unsupported("attention.value_length", f"the key length {head_dim}")
    num_layers = keys.integer("block_count", high=MAX_LAYERS)
    max_position = keys.integer("context_length", high=MAX_CONTEXT)
    common: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_layers": num_layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", low=1e-12, high=1.0),
        "max_position": max_position,
        "query_scale": head_dim**-0.5,
        "tie_word_embeddings": "output.weight" not in tensors,
        "qkv_bias": "blk.0.attn_q.bias" in tensors,
        "output_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "rope": rope_from_gguf(keys, head_dim, max_position, style),
    }
    if keys.integer("vocab_size", vocab_size, high=MAX_VOCAB) != vocab_size:
        raise keys.wrong("vocab_size", f"the {vocab_size} rows of 'token_embd.weight'")
    return DecoderConfig(**{**common, **own})


def rope_from_gguf(keys: Keys, head_dim: int, max_position: int, style: str) -> RopeConfig:
    """Rotary embedding from `ARCH.rope.*`. Factors stored as tensors (`rope_freqs`, `rope_factors_*`) are added by `rope.py`."""
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
        base["attention_factor"] = longrope_attention(max_position / original, original)
    return RopeConfig(**base)
