"""What a decoder looks like: one frozen description that every family fills in from its file's own keys.

A `config.json` and the `ARCH.*` keys of a GGUF file say the same things under different names; the common part of both is read
here. Families give their defaults and add what is theirs; `blocks.py` turns the result into a graph. Nothing here looks at
weights, except that a GGUF file says which biases exist only by having them.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

from ..core.errors import UnsupportedError
from .keys import MAX_CONTEXT, MAX_HEADS, MAX_HIDDEN, MAX_LAYERS, MAX_VOCAB, Keys, shown
from .rope import RopeConfig, rope_from_gguf, rope_from_hf

__all__ = [
    "ACTIVATION_NAMES",
    "DecoderConfig",
    "DeltaConfig",
    "MlaConfig",
    "MoeConfig",
    "decoder_from_gguf",
    "decoder_from_hf",
    "layer_types_from_hf",
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


@dataclass(frozen=True)
class MoeConfig:
    """The experts of a decoder's sparse layers.

    Each row takes `top_k` of `num_experts` gated MLPs of width intermediate_size; score, groups, keep_groups, group_score, renorm and
    scale as in the op `route_topk`. choose_bias: a bias that only chooses; router_bias: one that is part of the logits; expert_bias:
    biases of all three products. shared_size: width of the MLP that every row takes besides (0: none), shared_gate: it is multiplied
    by sigmoid(gate · x). dense_layers: layers that have a plain MLP instead.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    score: str = "softmax"
    groups: int = 1
    keep_groups: int = 1
    group_score: str = "max"
    renorm: bool = False
    scale: float = 1.0
    choose_bias: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    shared_size: int = 0
    shared_gate: bool = False
    dense_layers: frozenset[int] = frozenset()


@dataclass(frozen=True)
class MlaConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    q_lora_rank: width of the query's latent (0: none); kv_lora_rank: of the latent that keys and values are made of. nope_dim, rope_dim:
    parts of a head's query without and with rotation; value_dim: of a head's values. split: the file has `kv_b` in two parts.
    """

    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    split: bool = False


@dataclass(frozen=True)
class DeltaConfig:
    """Layers with a gated delta rule in place of attention: heads and their widths, taps of the convolution, and which layers."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    layers: frozenset[int]


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer with grouped-query attention and a gated MLP.

    norms: "pre" (before each branch) or "sandwich" (before and after). layer_types: "full" or "sliding" per layer; a sliding
    layer sees sliding_window keys, itself included, and uses local_rope where there is one. no_rope_layers: layers without
    positions. query_scale multiplies q·k. qk_norm: q and k are normed, each head alone or (qk_norm_all) all heads as one vector.
    Multipliers and softcaps of 1.0 and 0.0 mean none. attn_sinks: a logit per head that takes part in the softmax alone. moe: experts in place of the MLP, in all layers but its dense ones. mla: latent
    attention in place of the grouped one. delta: recurrent layers in place of attention. attn_gate: q_proj gives a gate beside each
    head's query, whose sigmoid multiplies what attention gives. quantised: how the file's weights are ("", fp8, mxfp4); scale_tile: rows and columns that
    share a scale of fp8. extra_layers: layers behind the last that predict further tokens, which are left out.
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
    quantised: str = ""
    scale_tile: tuple[int, int] = (1, 1)
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_all: bool = False
    norms: str = "pre"
    sliding_window: int = 0
    layer_types: tuple[str, ...] = ()
    no_rope_layers: frozenset[int] = frozenset()
    attn_softcap: float = 0.0
    attn_sinks: bool = False
    final_softcap: float = 0.0
    embed_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    hidden_act: str = "silu"
    moe: MoeConfig | None = None
    mla: MlaConfig | None = None
    delta: DeltaConfig | None = None
    attn_gate: bool = False
    extra_layers: int = 0

    def experts_of(self, layer: int) -> MoeConfig | None:
        """The experts of `layer`, None where it has a plain MLP."""
        return None if self.moe is None or layer in self.moe.dense_layers else self.moe

    def window_of(self, layer: int) -> int:
        """Keys that `layer` sees (0: all before it)."""
        return self.sliding_window if self.layer_types and self.layer_types[layer] == "sliding" else 0

    def rope_of(self, layer: int) -> RopeConfig | None:
        """The rotary embedding of `layer`, None for a layer without one."""
        if layer in self.no_rope_layers:
            return None
        return self.local_rope if self.local_rope is not None and self.window_of(layer) else self.rope


def _quantisation(keys: Keys, known: tuple[str, ...]) -> dict[str, Any]:
    """How the weights of the file are quantised: `quant_method` fp8 (codes with a scale for each tile of `weight_block_size`) or mxfp4.
    Activations are rounded as the backend does it, whatever `activation_scheme` says."""
    quantized = keys.table("quantization_config")
    if quantized is None:
        return {}
    method = quantized.raw("quant_method", "unnamed")
    if method not in known:
        raise UnsupportedError(
            f"the weights are quantised with {shown(method)}, which is not read yet",
            who=keys.who,
            why="config.json has 'quantization_config'; read are " + ", ".join(known),
            fix="use the unquantised model or a GGUF file of it",
            key="quantization_config.quant_method",
        )
    if method != "fp8":
        return {"quantised": method}
    quantized.choice("fmt", {"e4m3": ""}, "e4m3")
    if quantized.raw("weight_block_size") is None:
        raise quantized.unsupported("weight_block_size", "two numbers (one scale for a whole tensor is not read)")
    tile = quantized.numbers("weight_block_size", 2)
    if any(n != int(n) or n > 1 << 20 for n in tile):
        raise quantized.wrong("weight_block_size", "two whole numbers")
    return {"quantised": "fp8", "scale_tile": (int(tile[0]), int(tile[1]))}


def decoder_from_hf(keys: Keys, *, act_key: str = "hidden_act", quantised: tuple[str, ...] = ("fp8",), **own: Any) -> DecoderConfig:
    """The common part of a `config.json`. keys.defaults: the family's defaults. quantised: values of `quant_method` that the family reads.
    own: fields that the family decides itself.

    Raises ModelFileError for missing, wrong or contradicting keys, UnsupportedError for unknown values.
    """
    hidden, heads, kv_heads, head_dim = _heads(keys, ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    num_layers = keys.integer("num_hidden_layers", high=MAX_LAYERS)
    max_position = keys.integer("max_position_embeddings", high=MAX_CONTEXT)
    common: dict[str, Any] = {
        **_quantisation(keys, quantised),
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
    """ "full" or "sliding" for each layer from `layer_types`; where it is absent, default(layer) says whether it slides."""
    count = keys.integer("num_hidden_layers", high=MAX_LAYERS)
    listed = keys.layer_flags("layer_types", count)
    if listed is None:
        return tuple("sliding" if default(i) else "full" for i in range(count))
    names = {"full_attention": "full", "sliding_attention": "sliding"}
    for item in listed:
        if not isinstance(item, str) or item not in names:
            raise UnsupportedError(
                f"'layer_types' holds {shown(item)}, which this family does not know",
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
