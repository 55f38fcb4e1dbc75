"""Qwen 1.5-MoE and Qwen 2-MoE: Qwen 2's attention; experts beside a shared one that each token weighs by a sigmoid of its own.

The router's weights are a softmax over all experts, of which the chosen keep theirs as they are.
"""

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
    """config.json: `norm_topk_prob` renormalises the chosen weights; `qkv_bias` is true where it is absent."""
    dense = sparse_step_layers(keys, keys.integer("num_hidden_layers", high=MAX_LAYERS))
    renorm, width = keys.flag("norm_topk_prob"), keys.integer("shared_expert_intermediate_size")
    moe = moe_from_hf(keys, renorm=renorm, shared_size=width, shared_gate=True, dense_layers=dense)
    return decoder_from_hf(keys, qkv_bias=keys.flag("qkv_bias", True), moe=moe, **windows_from_hf(keys))


def from_gguf(keys: Keys, tensors: Mapping[str, TensorSource], vocab_size: int) -> DecoderConfig:
    """`qwen2moe.*` keys. Files that lack the widths of the experts have them in their tensors."""
    for key, name in (("expert_feed_forward_length", "gate_exps"), ("expert_shared_feed_forward_length", "gate_shexp")):
        source = tensors.get(f"blk.0.ffn_{name}.weight")
        if source is not None and len(source.shape) >= 2:
            keys.defaults[key] = source.shape[-2]
    width = keys.integer("expert_shared_feed_forward_length")
    moe = moe_from_gguf(keys, shared_size=width, shared_gate=True)
    return decoder_from_gguf(keys, tensors, vocab_size, style="half", qkv_bias=True, moe=moe)


FAMILY = Family(
    name="qwen2_moe",
    models="Qwen 1.5-MoE, Qwen 2-MoE",
    model_types=("qwen2_moe",),
    architectures=("qwen2moe",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_refs=with_experts("mlp"),
    gguf_refs=gguf_name,
)
