"""SmolLM3: Llama's layers, every fourth without positions ("NoPE"), a tied head.

`no_rope_layers` holds 1 for a layer *with* rope. GGUF files do not say which layers turn: always all but every fourth.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..core.weights import TensorSource
from .config import DecoderConfig, decoder_from_gguf, decoder_from_hf, layer_types_from_hf, sliding_window_from_hf
from .family import Family
from .keys import Keys
from .names import gguf_name, hf_ref

__all__ = ["FAMILY", "from_gguf", "from_hf"]

INTERVAL = 4
DEFAULTS = {"rope_theta": 2_000_000.0, "tie_word_embeddings": True}


def from_hf(keys: Keys) -> DecoderConfig:
    """config.json. A window applies only with `use_sliding_window`, to the layers that `layer_types` names or, without it, to
    those without rope."""
    keys.defaults.update(DEFAULTS)
    count = keys.integer("num_hidden_layers")
    interval = keys.integer("no_rope_layer_interval", INTERVAL)
    flags = keys.layer_flags("no_rope_layers", count) or [int((i + 1) % interval != 0) for i in range(count)]
    if any(flag not in (0, 1) for flag in flags):
        raise keys.wrong("no_rope_layers", "a list of 0 and 1")
    nope = frozenset(i for i, flag in enumerate(flags) if not flag)
    window = sliding_window_from_hf(keys) if keys.flag("use_sliding_window") else 0
    types = layer_types_from_hf(keys, lambda i: bool(window) and i in nope) if window else ()
    bias = keys.flag("attention_bias")
    return decoder_from_hf(
        keys,
        no_rope_layers=nope,
        sliding_window=window,
        layer_types=types,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=keys.flag("mlp_bias"),
    )


def from_gguf(keys: Keys, tensors: Mapping[str, TensorSource], vocab_size: int) -> DecoderConfig:
    """`smollm3.*` keys."""
    nope = frozenset(i for i in range(keys.integer("block_count")) if (i + 1) % INTERVAL == 0)
    return decoder_from_gguf(keys, tensors, vocab_size, style="pairs", no_rope_layers=nope)


FAMILY = Family(
    name="smollm3",
    models="SmolLM3",
    model_types=("smollm3",),
    architectures=("smollm3",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_refs=hf_ref,
    gguf_refs=gguf_name,
)
