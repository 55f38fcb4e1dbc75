"""Qwen 3-Next: three layers of four are gated delta nets, the fourth has gated attention; experts beside a gated shared one.

Norms are stored minus one, but for that of the delta net. `in_proj_qkvz` and `in_proj_ba` are interleaved by key head.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..core.weights import TensorSource, WeightRef
from .config import DecoderConfig, DeltaConfig, decoder_from_hf
from .experts import moe_from_hf, sparse_step_layers, with_experts
from .family import Family
from .keys import MAX_HEADS, MAX_LAYERS, Keys
from .names import gguf_name, split_layer

__all__ = ["FAMILY", "from_hf"]

_EXPERTS = with_experts("mlp")


def from_hf(keys: Keys) -> DecoderConfig:
    """config.json: `layer_types`, or every `full_attention_interval`-th layer has attention."""
    keys.defaults |= {"head_dim": 256, "partial_rotary_factor": 0.25}
    count = keys.integer("num_hidden_layers", high=MAX_LAYERS)
    interval = keys.integer("full_attention_interval", 4)
    listed = keys.layer_flags("layer_types", count)
    types = listed if listed is not None else ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)]
    if any(t not in ("linear_attention", "full_attention") for t in types):
        raise keys.unsupported("layer_types", "linear_attention, full_attention")
    delta = DeltaConfig(
        num_key_heads=keys.integer("linear_num_key_heads", high=MAX_HEADS),
        num_value_heads=keys.integer("linear_num_value_heads", high=MAX_HEADS),
        key_dim=keys.integer("linear_key_head_dim", high=65_536),
        value_dim=keys.integer("linear_value_head_dim", high=65_536),
        taps=keys.integer("linear_conv_kernel_dim", low=2, high=64),
        layers=frozenset(i for i, t in enumerate(types) if t == "linear_attention"),
    )
    if delta.num_value_heads % delta.num_key_heads:
        raise keys.wrong("linear_num_value_heads", f"a multiple of the {delta.num_key_heads} key heads")
    moe = moe_from_hf(
        keys,
        renorm=keys.flag("norm_topk_prob", True),
        shared_size=keys.integer("shared_expert_intermediate_size"),
        shared_gate=True,
        dense_layers=sparse_step_layers(keys, count),
    )
    bias = keys.flag("attention_bias")
    return decoder_from_hf(keys, qk_norm=True, qkv_bias=bias, output_bias=bias, attn_gate=True, delta=delta, moe=moe)


def from_gguf(keys: Keys, tensors: Mapping[str, TensorSource], vocab_size: int) -> DecoderConfig:
    """GGUF files of this family are not read."""
    raise keys.unsupported("block_count", "safetensors files of this model")


def hf_refs(name: str, c: DecoderConfig) -> WeightRef:
    """Hugging Face names."""
    layer, stem, kind = split_layer(name)
    p, part = f"model.layers.{layer}.linear_attn", stem.removeprefix("linear_attn.")
    if c.delta is not None and part in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"):
        source = "in_proj_qkvz" if part in ("in_proj_qkv", "in_proj_z") else "in_proj_ba"
        return WeightRef(f"{p}.{source}.{kind}", row_index=_rows(c.delta, part))
    if name.endswith("norm.weight") and part != "norm":
        return WeightRef(name, add=1.0)
    return _EXPERTS(name, c)


def _rows(d: DeltaConfig, part: str) -> tuple[int, ...]:
    """Rows of a projection that holds, for each key head, its [query, key, values, gates] or its [b, a]."""
    share = d.num_value_heads // d.num_key_heads
    sizes = (d.key_dim, d.key_dim, share * d.value_dim, share * d.value_dim) if part in ("in_proj_qkv", "in_proj_z") else (share, share)
    chosen = {"in_proj_qkv": (0, 1, 2), "in_proj_z": (3,), "in_proj_b": (0,), "in_proj_a": (1,)}[part]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    heads = range(0, d.num_key_heads * sum(sizes), sum(sizes))
    return tuple(row for i in chosen for h in heads for row in range(h + starts[i], h + starts[i] + sizes[i]))


FAMILY = Family(
    name="qwen3_next",
    models="Qwen 3-Next (safetensors)",
    model_types=("qwen3_next",),
    architectures=(),
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_refs=hf_refs,
    gguf_refs=gguf_name,
    unused=("mtp.",),
)
