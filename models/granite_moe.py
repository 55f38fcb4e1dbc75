"""Granite 3 MoE: Llama's layers with multipliers on embedding, branches, scores and logits; a softmax over the chosen experts.

Gate and up of all experts are one tensor [E, 2F, C].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.weights import TensorSource, WeightRef
from .config import DecoderConfig, decoder_from_gguf, decoder_from_hf
from .experts import moe_from_gguf, moe_from_hf
from .family import Family
from .keys import Keys
from .names import gguf_name, split_layer

__all__ = ["FAMILY", "from_gguf", "from_hf"]


def _multipliers(keys: Keys, embed: str, residual: str, attention: str, logits: str) -> dict[str, Any]:
    """Under these names; logits are divided."""
    return {
        "embed_multiplier": keys.number(embed, 1.0, low=1e-6),
        "residual_multiplier": keys.number(residual, 1.0, low=1e-6),
        "query_scale": keys.number(attention, low=1e-6),
        "logit_multiplier": 1.0 / keys.number(logits, 1.0, low=1e-6),
    }


def from_hf(keys: Keys) -> DecoderConfig:
    """config.json: `intermediate_size` is an expert's; `attention_multiplier` is the scale of q·k."""
    factors = _multipliers(keys, "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    moe = moe_from_hf(keys, "intermediate_size", score="softmax_of_chosen")
    bias = keys.flag("attention_bias")
    return decoder_from_hf(keys, qkv_bias=bias, output_bias=bias, moe=moe, **factors)


def from_gguf(keys: Keys, tensors: Mapping[str, TensorSource], vocab_size: int) -> DecoderConfig:
    """`granitemoe.*` keys."""
    factors = _multipliers(keys, "embedding_scale", "residual_scale", "attention.scale", "logit_scale")
    moe = moe_from_gguf(keys, "feed_forward_length", score="softmax_of_chosen")
    return decoder_from_gguf(keys, tensors, vocab_size, style="pairs", moe=moe, **factors)


def hf_refs(name: str, c: DecoderConfig) -> WeightRef:
    """Hugging Face names."""
    layer, stem, kind = split_layer(name)
    p = f"model.layers.{layer}.block_sparse_moe"
    if c.moe is None or not stem.startswith("mlp."):
        return WeightRef(name)
    if stem == "mlp.gate":
        return WeightRef(f"{p}.router.layer.{kind}")
    if stem == "mlp.experts.down_proj":
        return WeightRef(f"{p}.output_linear.{kind}")
    f = c.moe.intermediate_size
    rows = (0, f) if stem == "mlp.experts.gate_proj" else (f, 2 * f)
    source = f"{p}.input_linear.{kind}"
    return WeightRef("", parts=tuple(WeightRef(source, expert=e, rows=rows) for e in range(c.moe.num_experts)))


FAMILY = Family(
    name="granite_moe",
    models="Granite 3 MoE",
    model_types=("granitemoe",),
    architectures=("granitemoe",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_refs=hf_refs,
    gguf_refs=gguf_name,
)
