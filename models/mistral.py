"""Mistral 7B, NeMo and Small: Llama's layers, with a sliding window where the configuration sets one.

GGUF files of these models say `llama`; their q and k rows are permuted as Llama's.
"""

from __future__ import annotations

from .config import DecoderConfig, decoder_from_hf, sliding_window_from_hf
from .family import Family
from .keys import Keys
from .llama import from_gguf
from .names import gguf_name, hf_ref

__all__ = ["FAMILY", "from_hf"]


def from_hf(keys: Keys) -> DecoderConfig:
    """config.json: an absent `sliding_window` means 4096 (as in the first release), null means none. No biases."""
    window = sliding_window_from_hf(keys, 4096)
    types = ("sliding",) * keys.integer("num_hidden_layers") if window else ()
    return decoder_from_hf(keys, sliding_window=window, layer_types=types)


FAMILY = Family(
    name="mistral",
    models="Mistral 7B, NeMo, Small",
    model_types=("mistral",),
    architectures=(),
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_refs=hf_ref,
    gguf_refs=gguf_name,
)
