"""Qwen 3-MoE and Qwen 3-Coder: Qwen 3's attention; experts chosen by a softmax whose chosen part is renormalised; none is shared."""

from __future__ import annotations

from collections.abc import Mapping

from ..core.weights import TensorSource
from .config import DecoderConfig, decoder_from_gguf, decoder_from_hf
from .experts import moe_from_gguf, moe_from_hf, sparse_step_layers, with_experts
from .family import Family
from .keys import MAX_LAYERS, Keys
from .names import gguf_name
from .qwen2 import windows_from_hf

__all__ = ["FAMILY", "from_gguf", "from_hf"]


def from_hf(keys: Keys) -> DecoderConfig:
    """config.json: `norm_topk_prob` is true in every published model, and false where it is absent."""
    dense = sparse_step_layers(keys, keys.integer("num_hidden_layers", high=MAX_LAYERS))
    moe = moe_from_hf(keys, renorm=keys.flag("norm_topk_prob"), dense_layers=dense)
    bias = keys.flag("attention_bias")
    return decoder_from_hf(keys, qk_norm=True, qkv_bias=bias, output_bias=bias, moe=moe, **windows_from_hf(keys))


def from_gguf(keys: Keys, tensors: Mapping[str, TensorSource], vocab_size: int) -> DecoderConfig:
    """`qwen3moe.*` keys. Every layer has experts."""
    moe = moe_from_gguf(keys, renorm=True)
    return decoder_from_gguf(keys, tensors, vocab_size, style="half", qk_norm=True, moe=moe)


FAMILY = Family(
    name="qwen3_moe",
    models="Qwen 3-MoE, Qwen 3-Coder",
    model_types=("qwen3_moe",),
    architectures=("qwen3moe",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_refs=with_experts("mlp"),
    gguf_refs=gguf_name,
)
