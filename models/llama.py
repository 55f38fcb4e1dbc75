"""Llama 1 to 3.3 and the models that share its architecture: Yi, CodeLlama, SmolLM2, DeepSeek-LLM, Vicuna.

Pre-norm, gated SiLU, grouped-query attention, every rope scaling; biases and a tied head by configuration. Llama 3's scaling
is a tensor (`rope_freqs.weight`) in GGUF files, whose q and k rows are permuted so that a pair is (2i, 2i + 1).
"""

from __future__ import annotations

from collections.abc import Mapping

from ..core.weights import TensorSource
from .config import DecoderConfig, decoder_from_gguf, decoder_from_hf
from .experts import moe_from_gguf
from .family import Family
from .keys import MAX_CONTEXT, Keys
from .names import gguf_name, hf_ref

__all__ = ["FAMILY", "from_gguf", "from_hf"]


def from_hf(keys: Keys) -> DecoderConfig:
    """config.json: `attention_bias` puts biases on all four projections, `mlp_bias` on the three of the MLP."""
    bias = keys.flag("attention_bias")
    return decoder_from_hf(keys, qkv_bias=bias, output_bias=bias, mlp_bias=keys.flag("mlp_bias"))


def from_gguf(keys: Keys, tensors: Mapping[str, TensorSource], vocab_size: int) -> DecoderConfig:
    """`llama.*` keys. Mixtral files carry the same architecture name and count experts."""
    moe = None
    if keys.integer("expert_count", 0, low=0):
        moe = moe_from_gguf(keys, "feed_forward_length", renorm=True)
    window = keys.integer("attention.sliding_window", 0, low=0, high=MAX_CONTEXT)
    types = ("sliding",) * keys.integer("block_count") if window else ()
    return decoder_from_gguf(keys, tensors, vocab_size, style="pairs", sliding_window=window, layer_types=types, moe=moe)


FAMILY = Family(
    name="llama",
    models="Llama 1–3.3, Yi, CodeLlama, SmolLM2, DeepSeek-LLM",
    model_types=("llama",),
    architectures=("llama",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_refs=hf_ref,
    gguf_refs=gguf_name,
)
