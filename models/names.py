"""From the graph's weight names to the tensors of a file: identity for Hugging Face, a table for GGUF, row views for fused
ones.

The graph's names are those of Hugging Face's Llama. A family whose files differ adds its own rule before these; every rule
answers a `WeightRef`, so a fused tensor stays one piece of the file of which several weights take their rows.
"""

from __future__ import annotations

import re

from ..core.weights import WeightRef
from .config import DecoderConfig

__all__ = ["fused_gate_up", "fused_qkv", "gguf_name", "hf_ref", "plus_one", "split_layer"]

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.k_b": "attn_k_b",
    "self_attn.v_b": "attn_v_b",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def split_layer(name: str) -> tuple[int, str, str]:
    """("model.layers.3.mlp.up_proj.weight") -> (3, "mlp.up_proj", "weight"); layer −1 for names outside the layers."""
    stem, _, kind = name.rpartition(".")
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    return (int(match[1]), match[2], kind) if match else (-1, stem, kind)


def hf_ref(name: str, config: DecoderConfig) -> WeightRef:
    """The tensor of the same name."""
    return WeightRef(name)


def gguf_name(name: str, config: DecoderConfig) -> WeightRef:
    """The GGUF tensor for a graph weight."""
    layer, stem, kind = split_layer(name)
    if layer < 0:
        return WeightRef(f"{_TOP[stem]}.{kind}")
    if kind == "e_score_correction_bias":
        return WeightRef(f"blk.{layer}.exp_probs_b.bias")
    if kind == "sinks":
        return WeightRef(f"blk.{layer}.attn_sinks.weight")
    table = {**_LAYER, **_SANDWICH} if config.norms == "sandwich" else _LAYER
    return WeightRef(f"blk.{layer}.{table[stem]}.{kind}")


def plus_one(name: str, config: DecoderConfig) -> WeightRef:
    """As hf_ref, with 1 added to the weights of norms (stored minus one: Gemma)."""
    return WeightRef(name, add=1.0 if name.endswith("norm.weight") else 0.0)


def fused_qkv(name: str, config: DecoderConfig, source: str) -> WeightRef | None:
    """Rows of the tensor `source` (its kind is added) that hold q, then k, then v; None if `name` is none of them."""
    _, stem, kind = split_layer(name)
    q, k = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = {"self_attn.q_proj": (0, q), "self_attn.k_proj": (q, q + k), "self_attn.v_proj": (q + k, q + 2 * k)}.get(stem)
    return WeightRef(f"{source}.{kind}", rows=rows) if rows else None


def fused_gate_up(name: str, config: DecoderConfig, source: str) -> WeightRef | None:
    """Rows of the tensor `source` that hold gate, then up; None if `name` is neither."""
    _, stem, kind = split_layer(name)
    f = config.intermediate_size
    rows = {"mlp.gate_proj": (0, f), "mlp.up_proj": (f, 2 * f)}.get(stem)
    return WeightRef(f"{source}.{kind}", rows=rows) if rows else None
