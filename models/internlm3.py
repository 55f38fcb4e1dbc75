"""InternLM3: Llama's layers and names; `qkv_bias` for q, k and v, `bias` for everything else. GGUF files say `llama`."""

from __future__ import annotations

from .config import DecoderConfig, decoder_from_hf
from .family import Family
from .keys import Keys
from .llama import from_gguf
from .names import gguf_name, hf_ref

__all__ = ["FAMILY", "from_hf"]


def from_hf(keys: Keys) -> DecoderConfig:
    """config.json, also with Llama's names for the two bias keys."""
    bias = keys.flag("bias", keys.flag("mlp_bias"))
    qkv_bias = keys.flag("qkv_bias", keys.flag("attention_bias"))
    return decoder_from_hf(keys, qkv_bias=qkv_bias, output_bias=bias, mlp_bias=bias)


FAMILY = Family(
    name="internlm3",
    models="InternLM3",
    model_types=("internlm3",),
    architectures=(),
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_refs=hf_ref,
    gguf_refs=gguf_name,
)
