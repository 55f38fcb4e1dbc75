"""Gemma 3, text: as Gemma 2 without soft caps, with normed q and k, and five windowed layers to one full.

Windowed layers turn with a local base of their own (10 000) and no scaling; full ones with base 1 000 000 and, from 4B on,
linear scaling by 8. Configurations leave most keys out, GGUF files the pattern and the local base: the family's values stand
in. In the larger models the text model is nested beside a vision tower, which is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.weights import TensorSource
from .config import DecoderConfig, decoder_from_gguf, decoder_from_hf, layer_types_from_hf
from .family import Family
from .gemma2 import DEFAULTS as GEMMA2_DEFAULTS
from .gemma2 import common_from_hf, layer_types_from_gguf
from .keys import MAX_CONTEXT, MIN_THETA, Keys
from .names import gguf_name, plus_one
from .rope import RopeConfig, rope_from_hf

__all__ = ["FAMILY", "from_gguf", "from_hf"]

PERIOD = 6
LOCAL_THETA = 10_000.0
LAYERS_27B = 62
DEFAULTS = GEMMA2_DEFAULTS | {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
}


def from_hf(keys: Keys) -> DecoderConfig:
    """config.json (its `text_config` where it is nested), with the rope keys of both generations of transformers."""
    keys.defaults.update(DEFAULTS)
    head_dim, max_position = keys.integer("head_dim"), keys.integer("max_position_embeddings", high=MAX_CONTEXT)
    both = keys.table("rope_parameters")
    full = both.table("full_attention") if both is not None else keys.table("rope_scaling")
    local = both.table("sliding_attention") if both is not None else None
    local_theta = keys.number("rope_local_base_freq", LOCAL_THETA, low=MIN_THETA)
    period = keys.integer("sliding_window_pattern", PERIOD)
    return decoder_from_hf(
        keys,
        **common_from_hf(keys),
        qk_norm=True,
        rope=rope_from_hf(keys, full, head_dim, max_position),
        local_rope=rope_from_hf(keys, local, head_dim, max_position, theta=local_theta),
        layer_types=layer_types_from_hf(keys, lambda i: (i + 1) % period != 0),
        attn_softcap=keys.optional("attn_logit_softcapping", 0.0),
        final_softcap=keys.optional("final_logit_softcapping", 0.0),
    )


def from_gguf(keys: Keys, tensors: Mapping[str, TensorSource], vocab_size: int) -> DecoderConfig:
    """`gemma3.*` keys."""
    keys.defaults["rope.freq_base"] = 1_000_000.0
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", 256)
    own: dict[str, Any] = {"query_scale": (hidden // heads) ** -0.5} if keys.integer("block_count") == LAYERS_27B else {}
    window = keys.integer("attention.sliding_window", 0, low=0, high=MAX_CONTEXT)
    return decoder_from_gguf(
        keys,
        tensors,
        vocab_size,
        style="half",
        norms="sandwich",
        qk_norm=True,
        hidden_act="gelu_tanh",
        embed_multiplier=float(hidden) ** 0.5,
        sliding_window=window,
        layer_types=layer_types_from_gguf(keys, PERIOD) if window else (),
        local_rope=RopeConfig(keys.number("rope.freq_base_swa", LOCAL_THETA, low=MIN_THETA), head_dim),
        final_softcap=keys.number("final_logit_softcapping", 0.0),
        **own,
    )


FAMILY = Family(
    name="gemma3",
    models="Gemma 3 (text)",
    model_types=("gemma3_text", "gemma3"),
    architectures=("gemma3",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_refs=plus_one,
    gguf_refs=gguf_name,
    text_prefixes=("model.", "language_model.model.", "model.language_model."),
    unused=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)
