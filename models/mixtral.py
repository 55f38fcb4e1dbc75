"""Mixtral 8x7B and 8x22B: Mistral's attention; two of eight experts a token, their softmax renormalised.

GGUF files of these models say `llama` and count their experts.
"""

from __future__ import annotations

from .config import DecoderConfig, decoder_from_hf, sliding_window_from_hf
from .experts import moe_from_hf, with_experts
from .family import Family
from .keys import Keys
from .llama import from_gguf
from .names import gguf_name

__all__ = ["FAMILY", "from_hf"]


def from_hf(keys: Keys) -> DecoderConfig:
    """config.json: `intermediate_size` is an expert's; a window only where it is set."""
    window = sliding_window_from_hf(keys)
    types = ("sliding",) * keys.integer("num_hidden_layers") if window else ()
    moe = moe_from_hf(keys, "intermediate_size", renorm=True)
    return decoder_from_hf(keys, sliding_window=window, layer_types=types, moe=moe)


FAMILY = Family(
    name="mixtral",
    models="Mixtral 8x7B, 8x22B",
    model_types=("mixtral",),
    architectures=(),
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_refs=with_experts("block_sparse_moe", ("w1", "w3", "w2")),
    gguf_refs=gguf_name,
)
