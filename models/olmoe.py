"""OLMoE: q and k are normed over all heads at once, before the rotation; 64 experts, whose softmax stays as it is."""

from __future__ import annotations

from collections.abc import Mapping

from ..core.weights import TensorSource
from .config import DecoderConfig, decoder_from_gguf, decoder_from_hf
from .experts import moe_from_gguf, moe_from_hf, with_experts
from .family import Family
from .keys import Keys
from .names import gguf_name

__all__ = ["FAMILY", "from_gguf", "from_hf"]


def from_hf(keys: Keys) -> DecoderConfig:
    """config.json: `intermediate_size` is an expert's. Models that clip q, k and v are refused."""
    if keys.raw("clip_qkv") is not None:
        raise keys.unsupported("clip_qkv", "null")
    moe = moe_from_hf(keys, "intermediate_size", renorm=keys.flag("norm_topk_prob"))
    bias = keys.flag("attention_bias")
    return decoder_from_hf(keys, qk_norm=True, qk_norm_all=True, qkv_bias=bias, output_bias=bias, moe=moe)


def from_gguf(keys: Keys, tensors: Mapping[str, TensorSource], vocab_size: int) -> DecoderConfig:
    """`olmoe.*` keys."""
    if keys.number("attention.clamp_kqv", 0.0):
        raise keys.unsupported("attention.clamp_kqv", "0: no clipping")
    moe = moe_from_gguf(keys, "feed_forward_length")
    return decoder_from_gguf(keys, tensors, vocab_size, style="half", qk_norm=True, qk_norm_all=True, moe=moe)


FAMILY = Family(
    name="olmoe",
    models="OLMoE",
    model_types=("olmoe",),
    architectures=("olmoe",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_refs=with_experts("mlp"),
    gguf_refs=gguf_name,
)
