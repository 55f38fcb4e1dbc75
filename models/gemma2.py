"""Gemma 2: norms before and after each branch, a window on every other layer, soft caps on scores and logits.

Norm weights are stored minus one in Hugging Face files, as they are in GGUF. The embedding is multiplied by √hidden and is the
head. q·k is scaled by `query_pre_attn_scalar`^-½, which GGUF files leave out: it is the head dimension, except in the 27B
model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.errors import UnsupportedError
from ..core.weights import TensorSource
from .config import DecoderConfig, decoder_from_gguf, decoder_from_hf, layer_types_from_hf, sliding_window_from_hf
from .family import Family
from .keys import MAX_CONTEXT, Keys
from .names import gguf_name, plus_one

__all__ = ["FAMILY", "common_from_hf", "from_gguf", "from_hf", "layer_types_from_gguf"]

DEFAULTS = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
}
LAYERS_27B = 46


def common_from_hf(keys: Keys) -> dict[str, Any]:
    """What Gemma 2 and 3 share."""
    if keys.raw("use_bidirectional_attention", False):
        raise UnsupportedError(
            "'use_bidirectional_attention' is true: this is an embedding model, not a text generator",
            who=keys.who,
            key="use_bidirectional_attention",
        )
    bias = keys.flag("attention_bias")
    return {
        "act_key": "hidden_activation",
        "norms": "sandwich",
        "embed_multiplier": float(keys.integer("hidden_size")) ** 0.5,
        "query_scale": keys.number("query_pre_attn_scalar", low=1e-6, high=1e9) ** -0.5,
        "qkv_bias": bias,
        "output_bias": bias,
        "sliding_window": sliding_window_from_hf(keys, 4096),
    }


def from_hf(keys: Keys) -> DecoderConfig:
    """config.json: a null soft cap is none, an absent one the family's."""
    keys.defaults.update(DEFAULTS)
    return decoder_from_hf(
        keys,
        **common_from_hf(keys),
        layer_types=layer_types_from_hf(keys, lambda i: i % 2 == 0),
        attn_softcap=keys.optional("attn_logit_softcapping", 50.0),
        final_softcap=keys.optional("final_logit_softcapping", 30.0),
    )


def layer_types_from_gguf(keys: Keys, period: int) -> tuple[str, ...]:
    """Every period-th layer is full, from `attention.sliding_window_pattern` if it is there (a period or a flag per layer)."""
    count, listed = keys.integer("block_count"), keys.raw("attention.sliding_window_pattern")
    if listed is not None and not isinstance(listed, int):
        flags = keys.layer_flags("attention.sliding_window_pattern", count) or []
        if any(flag not in (0, 1) for flag in flags):
            raise keys.wrong("attention.sliding_window_pattern", "a period, or true and false for every layer")
        return tuple("sliding" if flag else "full" for flag in flags)
    period = keys.integer("attention.sliding_window_pattern", period)
    return tuple("full" if (i + 1) % period == 0 else "sliding" for i in range(count))


def from_gguf(keys: Keys, tensors: Mapping[str, TensorSource], vocab_size: int) -> DecoderConfig:
    """`gemma2.*` keys."""
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    own: dict[str, Any] = {"query_scale": (hidden // heads) ** -0.5} if keys.integer("block_count") == LAYERS_27B else {}
    return decoder_from_gguf(
        keys,
        tensors,
        vocab_size,
        style="half",
        norms="sandwich",
        hidden_act="gelu_tanh",
        embed_multiplier=float(hidden) ** 0.5,
        sliding_window=keys.integer("attention.sliding_window", 4096, high=MAX_CONTEXT),
        layer_types=layer_types_from_gguf(keys, 2),
        attn_softcap=keys.number("attn_logit_softcapping", 50.0),
        final_softcap=keys.number("final_logit_softcapping", 30.0),
        **own,
    )


FAMILY = Family(
    name="gemma2",
    models="Gemma 2",
    model_types=("gemma2",),
    architectures=("gemma2",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_refs=plus_one,
    gguf_refs=gguf_name,
)
