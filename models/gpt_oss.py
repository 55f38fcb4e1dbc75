"""gpt-oss 20b and 120b: a sink per head that takes attention from the keys, windows on every other layer, biases everywhere.

A token's experts are weighed by a softmax over their logits alone; the gated activation is clamped and takes up + 1. In Hugging Face
files gate and up of an expert alternate. Unquantised ones store [in, out]; published ones have MXFP4 blocks, [out, in].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..core.weights import TensorSource, WeightRef
from .config import DecoderConfig, decoder_from_gguf, decoder_from_hf, layer_types_from_hf, sliding_window_from_hf
from .experts import moe_from_gguf, moe_from_hf
from .family import Family
from .keys import MAX_CONTEXT, MAX_LAYERS, Keys
from .names import gguf_name, split_layer
from .rope import rope_from_gguf

__all__ = ["FAMILY", "from_gguf", "from_hf"]

ACT = "swiglu_oai"


def from_hf(keys: Keys) -> DecoderConfig:
    """config.json: `intermediate_size` is an expert's; the constants of the activation are those of the op."""
    for key, value in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        if keys.number(key, value) != value:
            raise keys.unsupported(key, f"{value:g}")
    moe = moe_from_hf(keys, "intermediate_size", score="softmax_of_chosen", router_bias=True, expert_bias=True)
    bias = keys.flag("attention_bias", True)
    keys.choice("hidden_act", {"silu": ACT}, "silu")
    return decoder_from_hf(
        keys,
        quantised=("mxfp4",),
        qkv_bias=bias,
        output_bias=bias,
        attn_sinks=True,
        sliding_window=sliding_window_from_hf(keys, 128),
        layer_types=layer_types_from_hf(keys, lambda i: i % 2 == 0),
        hidden_act=ACT,
        moe=moe,
    )


def from_gguf(keys: Keys, tensors: Mapping[str, TensorSource], vocab_size: int) -> DecoderConfig:
    """`gpt-oss.*` keys. The range of yarn is not rounded, which no key says."""
    keys.defaults["feed_forward_length"] = keys.raw("expert_feed_forward_length")
    layers, context = keys.integer("block_count", high=MAX_LAYERS), keys.integer("context_length", high=MAX_CONTEXT)
    moe = moe_from_gguf(keys, score="softmax_of_chosen", router_bias=True, expert_bias=True)
    rope = rope_from_gguf(keys, keys.integer("attention.key_length"), context, "half")
    return decoder_from_gguf(
        keys,
        tensors,
        vocab_size,
        style="half",
        rope=replace(rope, truncate=False),
        attn_sinks=True,
        sliding_window=keys.integer("attention.sliding_window", 128, high=MAX_CONTEXT),
        layer_types=tuple("full" if i % 2 else "sliding" for i in range(layers)),
        hidden_act=ACT,
        moe=moe,
    )


def hf_refs(name: str, c: DecoderConfig) -> WeightRef:
    """Hugging Face names: rows of gate and up alternate; unquantised matrices are turned round, those in MXFP4 are two tensors."""
    layer, stem, kind = split_layer(name)
    p = f"model.layers.{layer}.mlp"
    if stem == "mlp.gate":
        return WeightRef(f"{p}.router.{kind}")
    part = stem.removeprefix("mlp.experts.")
    if c.moe is None or part == stem:
        return WeightRef(name)
    matrix, suffix = kind == "weight", "" if kind == "weight" else "_bias"
    if part == "down_proj":
        source, rows = f"{p}.experts.down_proj{suffix}", None
    else:
        first = 0 if part == "gate_proj" else 1
        source, rows = f"{p}.experts.gate_up_proj{suffix}", tuple(range(first, 2 * c.moe.intermediate_size, 2))
    experts = range(c.moe.num_experts)
    if matrix and c.quantised == "mxfp4":
        blocks, scales = f"{source}_blocks", f"{source}_scales"
        return WeightRef("", parts=tuple(WeightRef(blocks, scales=scales, expert=e, row_index=rows) for e in experts))
    return WeightRef("", parts=tuple(WeightRef(source, expert=e, transpose=matrix, row_index=rows) for e in experts))


def gguf_refs(name: str, c: DecoderConfig) -> WeightRef:
    """GGUF names: the norm before the experts is called that of the attention's end."""
    layer, stem, _ = split_layer(name)
    if stem == "post_attention_layernorm":
        return WeightRef(f"blk.{layer}.post_attention_norm.weight")
    return gguf_name(name, c)


FAMILY = Family(
    name="gpt_oss",
    models="gpt-oss 20b, 120b",
    model_types=("gpt_oss",),
    architectures=("gpt-oss",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_refs=hf_refs,
    gguf_refs=gguf_refs,
)
