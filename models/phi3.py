"""Phi-3, Phi-3.5, Phi-4 and their minis: q, k, v in one tensor, gate and up in another, longrope, a partial rotation on some.

The fused tensors stay one piece of the file: each weight takes its rows. GGUF files keep both fused, with gate and up under the
name `ffn_up`, and the two lists of rope factors as tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..core.weights import TensorSource, WeightRef
from .config import DecoderConfig, decoder_from_gguf, decoder_from_hf, sliding_window_from_hf
from .family import Family
from .keys import MAX_CONTEXT, Keys
from .names import fused_gate_up, fused_qkv, gguf_name, split_layer

__all__ = ["FAMILY", "from_gguf", "from_hf"]


def from_hf(keys: Keys) -> DecoderConfig:
    """config.json: `original_max_position_embeddings` beside `rope_scaling`, not in it; a window applies to every layer."""
    window = sliding_window_from_hf(keys)
    return decoder_from_hf(keys, sliding_window=window, layer_types=_all(keys.integer("num_hidden_layers"), window))


def from_gguf(keys: Keys, tensors: Mapping[str, TensorSource], vocab_size: int) -> DecoderConfig:
    """`phi3.*` keys: a window of 0 means none."""
    window = keys.integer("attention.sliding_window", 0, low=0, high=MAX_CONTEXT)
    types = _all(keys.integer("block_count"), window)
    return decoder_from_gguf(keys, tensors, vocab_size, style="half", sliding_window=window, layer_types=types)


def _all(layers: int, window: int) -> tuple[str, ...]:
    return ("sliding",) * layers if window else ()


def hf_refs(name: str, c: DecoderConfig) -> WeightRef:
    """Hugging Face names."""
    p = f"model.layers.{split_layer(name)[0]}"
    return fused_qkv(name, c, f"{p}.self_attn.qkv_proj") or fused_gate_up(name, c, f"{p}.mlp.gate_up_proj") or WeightRef(name)


def gguf_refs(name: str, c: DecoderConfig) -> WeightRef:
    """GGUF names."""
    p = f"blk.{split_layer(name)[0]}"
    return fused_qkv(name, c, f"{p}.attn_qkv") or fused_gate_up(name, c, f"{p}.ffn_up") or gguf_name(name, c)


FAMILY = Family(
    name="phi3",
    models="Phi-3, Phi-3.5, Phi-4, mini and medium",
    model_types=("phi3",),
    architectures=("phi3",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_refs=hf_refs,
    gguf_refs=gguf_refs,
)
