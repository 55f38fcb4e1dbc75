"""Qwen 3, dense: q and k are normed per head before the rotation, no biases, a head dimension of its own."""

from __future__ import annotations

from collections.abc import Mapping

from ..core.weights import TensorSource
from .config import DecoderConfig, decoder_from_gguf, decoder_from_hf
from .family import Family
from .keys import Keys
from .names import gguf_name, hf_ref
from .qwen2 import windows_from_hf

__all__ = ["FAMILY", "from_gguf", "from_hf"]


def from_hf(keys: Keys) -> DecoderConfig:
    """config.json: `head_dim` is 128 where it is absent, whatever the hidden size."""
    keys.defaults["head_dim"] = 128
    bias = keys.flag("attention_bias")
    return decoder_from_hf(keys, qk_norm=True, qkv_bias=bias, output_bias=bias, **windows_from_hf(keys))


def from_gguf(keys: Keys, tensors: Mapping[str, TensorSource], vocab_size: int) -> DecoderConfig:
    """`qwen3.*` keys."""
    return decoder_from_gguf(keys, tensors, vocab_size, style="half", qk_norm=True)


FAMILY = Family(
    name="qwen3",
    models="Qwen 3 (dense)",
    model_types=("qwen3",),
    architectures=("qwen3",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_refs=hf_ref,
    gguf_refs=gguf_name,
)
