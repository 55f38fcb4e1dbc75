"""Qwen 2, Qwen 2.5 and QwQ: Llama's layers with biases on q, k and v; yarn where configured.

GGUF keeps the rows of q and k as they are (half), unlike Llama's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.weights import TensorSource
from .config import DecoderConfig, decoder_from_gguf, decoder_from_hf, layer_types_from_hf, sliding_window_from_hf
from .family import Family
from .keys import Keys
from .names import gguf_name, hf_ref

__all__ = ["FAMILY", "from_gguf", "from_hf", "windows_from_hf"]


def windows_from_hf(keys: Keys) -> dict[str, Any]:
    """sliding_window and layer_types: with `use_sliding_window`, the layers from `max_window_layers` on."""
    window = sliding_window_from_hf(keys, 4096) if keys.flag("use_sliding_window") else 0
    if not window:
        return {}
    first = keys.integer("max_window_layers", 28, low=0)
    return {"sliding_window": window, "layer_types": layer_types_from_hf(keys, lambda i: i >= first)}


def from_hf(keys: Keys) -> DecoderConfig:
    """config.json: the biases are not configurable."""
    return decoder_from_hf(keys, qkv_bias=True, **windows_from_hf(keys))


def from_gguf(keys: Keys, tensors: Mapping[str, TensorSource], vocab_size: int) -> DecoderConfig:
    """`qwen2.*` keys."""
    return decoder_from_gguf(keys, tensors, vocab_size, style="half", qkv_bias=True)


FAMILY = Family(
    name="qwen2",
    models="Qwen 2, Qwen 2.5, QwQ (dense)",
    model_types=("qwen2",),
    architectures=("qwen2",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_refs=hf_ref,
    gguf_refs=gguf_name,
)
