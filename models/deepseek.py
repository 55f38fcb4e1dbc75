"""DeepSeek V2, V3 and R1, and Kimi K2: latent attention, a shared expert beside many small ones, the first layers dense.

V2 scores experts by a softmax and may keep the groups with the best expert; V3 scores by sigmoid, chooses with a bias of its own, keeps
the groups whose two best are best, and renormalises. GGUF calls all of them `deepseek2`, and has `kv_b` split and turned per head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..core.weights import TensorSource, WeightRef
from .config import DecoderConfig, MlaConfig, MoeConfig, decoder_from_gguf, decoder_from_hf
from .experts import MAX_EXPERTS, expert_stack, moe_from_gguf, moe_from_hf
from .family import Family
from .keys import MAX_CONTEXT, MAX_LAYERS, Keys
from .names import gguf_name, split_layer
from .rope import rope_from_gguf, rope_from_hf

__all__ = ["FAMILIES", "from_gguf", "v2_from_hf", "v3_from_hf"]

_PARTS = tuple((name, name) for name in ("gate_proj", "up_proj", "down_proj"))


def v2_from_hf(keys: Keys) -> DecoderConfig:
    """config.json of V2: `topk_method` says whether groups compete; chosen weights are never renormalised."""
    if keys.flag("norm_topk_prob"):
        raise keys.unsupported("norm_topk_prob", "false")
    methods = {"greedy": "greedy", "group_limited_greedy": "groups"}
    grouped = keys.choice("topk_method", methods, "greedy") == "groups"
    return _from_hf(keys, "softmax", **(_groups(keys) if grouped else {}))


def v3_from_hf(keys: Keys) -> DecoderConfig:
    """config.json of V3 and of Kimi K2."""
    keys.choice("topk_method", {"noaux_tc": ""}, "noaux_tc")
    keys.choice("scoring_func", {"sigmoid": ""}, "sigmoid")
    renorm = keys.flag("norm_topk_prob", True)
    return _from_hf(keys, "sigmoid", group_score="top2sum", choose_bias=True, renorm=renorm, **_groups(keys))


def _groups(keys: Keys) -> dict[str, Any]:
    return {
        "groups": keys.integer("n_group", 1, high=MAX_EXPERTS),
        "keep_groups": keys.integer("topk_group", 1, high=MAX_EXPERTS),
    }


def _from_hf(keys: Keys, score: str, **router: Any) -> DecoderConfig:
    if keys.integer("moe_layer_freq", 1) != 1:
        raise keys.unsupported("moe_layer_freq", "1")
    layers = keys.integer("num_hidden_layers", high=MAX_LAYERS)
    dense = frozenset(range(keys.integer("first_k_dense_replace", 0, low=0, high=layers)))
    shared = keys.integer("moe_intermediate_size") * keys.integer("n_shared_experts", 0, low=0, high=64)
    scale = keys.number("routed_scaling_factor", 1.0)
    moe = moe_from_hf(keys, score=score, scale=scale, shared_size=shared, dense_layers=dense, **router)
    mla = MlaConfig(
        q_lora_rank=keys.integer("q_lora_rank", 0, low=0),
        kv_lora_rank=keys.integer("kv_lora_rank"),
        nope_dim=keys.integer("qk_nope_head_dim"),
        rope_dim=keys.integer("qk_rope_head_dim"),
        value_dim=keys.integer("v_head_dim"),
    )
    table = keys.table("rope_parameters") or keys.table("rope_scaling")
    style = "pairs" if keys.flag("rope_interleave", True) else "half"
    rope = replace(rope_from_hf(keys, table, mla.rope_dim, keys.integer("max_position_embeddings", high=MAX_CONTEXT)), style=style)
    all_dim = table.number("mscale_all_dim", 0.0, high=1e3) if table is not None and rope.scaling == "yarn" else 0.0
    bias = keys.flag("attention_bias")
    return decoder_from_hf(
        keys,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=keys.flag("mlp_bias"),
        rope=rope,
        query_scale=_query_scale(mla, 0.1 * all_dim, rope.factor),
        moe=moe,
        mla=mla,
        extra_layers=keys.integer("num_nextn_predict_layers", keys.integer("num_mtp_layers", 1, low=0, high=64), low=0, high=64),
    )


def _query_scale(mla: MlaConfig, log_multiplier: float, factor: float) -> float:
    """(nope + rope)^−½, times (1 + log_multiplier · ln factor)² where yarn stretches the context."""
    return float((mla.nope_dim + mla.rope_dim) ** -0.5 * (1.0 + log_multiplier * math.log(factor)) ** 2)


def from_gguf(keys: Keys, tensors: Mapping[str, TensorSource], vocab_size: int) -> DecoderConfig:
    """`deepseek2.*` keys. Key and value lengths are those of the latent cache; a head's own have `_mla` behind them."""
    layers = keys.integer("block_count", high=MAX_LAYERS)
    dense = keys.integer("leading_dense_block_count", 0, low=0, high=layers)
    biased = f"blk.{layers - 1}.exp_probs_b.bias" in tensors
    moe: MoeConfig | None = None
    if dense < layers:
        moe = moe_from_gguf(
            keys,
            shared_size=keys.integer("expert_feed_forward_length") * keys.integer("expert_shared_count", 0, low=0, high=64),
            dense_layers=frozenset(range(dense)),
            renorm=keys.flag("expert_weights_norm"),
            choose_bias=biased,
            groups=keys.integer("expert_group_count", 1, high=MAX_EXPERTS),
            keep_groups=keys.integer("expert_group_used_count", 1, high=MAX_EXPERTS),
            group_score="top2sum" if biased else "max",
        )
    rope_dim, latent = keys.integer("rope.dimension_count"), keys.integer("attention.kv_lora_rank")
    split = "blk.0.attn_k_b.weight" in tensors
    if not split:  # files from before the split give a head's lengths under the plain names
        keys.defaults["attention.key_length_mla"] = keys.raw("attention.key_length")
        keys.defaults["attention.value_length_mla"] = keys.raw("attention.value_length")
    width = keys.integer("attention.key_length_mla", low=rope_dim + 1)
    mla = MlaConfig(
        q_lora_rank=keys.integer("attention.q_lora_rank", 0, low=0),
        kv_lora_rank=latent,
        nope_dim=width - rope_dim,
        rope_dim=rope_dim,
        value_dim=keys.integer("attention.value_length_mla"),
        split=split,
    )
    rope = rope_from_gguf(keys, rope_dim, keys.integer("context_length", high=MAX_CONTEXT), "pairs")
    return decoder_from_gguf(
        Keys({**keys.values, keys.prefix + "attention.value_length": None}, who=keys.who, prefix=keys.prefix),
        tensors,
        vocab_size,
        style="pairs",
        rope=replace(rope, attention_factor=1.0),
        query_scale=_query_scale(mla, keys.number("rope.scaling.yarn_log_multiplier", 0.0, high=1e3), rope.factor),
        moe=moe,
        mla=mla,
    )


def _kv_b(name: str, c: DecoderConfig, source: str) -> WeightRef | None:
    """One matrix per head of a joint `kv_b` [H·(nope + v), latent]: the rows of keys turned round, those of values as they are."""
    _, stem, kind = split_layer(name)
    if c.mla is None or stem not in ("self_attn.k_b", "self_attn.v_b"):
        return None
    nope, both, keys = c.mla.nope_dim, c.mla.nope_dim + c.mla.value_dim, stem.endswith("k_b")
    starts = [h * both + (0 if keys else nope) for h in range(c.num_heads)]
    length = nope if keys else c.mla.value_dim
    return WeightRef("", parts=tuple(WeightRef(f"{source}.{kind}", rows=(s, s + length), transpose=keys) for s in starts))


def hf_refs(name: str, c: DecoderConfig) -> WeightRef:
    """Hugging Face names."""
    p = f"model.layers.{split_layer(name)[0]}"
    stack = expert_stack(name, c, "model.layers.{layer}.mlp.experts.{expert}.{part}", _PARTS)
    plain = WeightRef(name.replace(".mlp.shared_expert.", ".mlp.shared_experts."))
    return stack or _kv_b(name, c, f"{p}.self_attn.kv_b_proj") or plain


def gguf_refs(name: str, c: DecoderConfig) -> WeightRef:
    """GGUF names."""
    joint = None if c.mla is None or c.mla.split else _kv_b(name, c, f"blk.{split_layer(name)[0]}.attn_kv_b")
    return joint or gguf_name(name, c)


FAMILIES = (
    Family(
        name="deepseek_v2",
        models="DeepSeek V2, V2-Lite, V2.5",
        model_types=("deepseek_v2",),
        architectures=("deepseek2",),
        from_hf=v2_from_hf,
        from_gguf=from_gguf,
        hf_refs=hf_refs,
        gguf_refs=gguf_refs,
    ),
    Family(
        name="deepseek_v3",
        models="DeepSeek V3, R1, Kimi K2",
        model_types=("deepseek_v3", "kimi_k2"),
        architectures=(),
        from_hf=v3_from_hf,
        from_gguf=from_gguf,
        hf_refs=hf_refs,
        gguf_refs=gguf_refs,
    ),
)
