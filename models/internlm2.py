"""InternLM2 and 2.5: Llama's layers under other names, with q, k and v fused per kv group.

Rows of `wqkv`: for each kv head its query heads, then k, then v. Gathering them gives Llama's three matrices exactly. GGUF
files hold them apart, with q and k permuted as Llama's.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..core.weights import TensorSource, WeightRef
from .config import DecoderConfig, decoder_from_gguf, decoder_from_hf
from .family import Family
from .keys import Keys
from .names import gguf_name, split_layer

__all__ = ["FAMILY", "from_gguf", "from_hf"]

_TOP = {"model.embed_tokens": "model.tok_embeddings", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}


def from_hf(keys: Keys) -> DecoderConfig:
    """config.json: `bias` puts biases on wqkv and wo; true is the default of the model's own class."""
    bias = keys.flag("bias", True)
    return decoder_from_hf(keys, qkv_bias=bias, output_bias=bias)


def from_gguf(keys: Keys, tensors: Mapping[str, TensorSource], vocab_size: int) -> DecoderConfig:
    """`internlm2.*` keys."""
    return decoder_from_gguf(keys, tensors, vocab_size, style="pairs")


def hf_refs(name: str, c: DecoderConfig) -> WeightRef:
    """Names of the original files."""
    layer, stem, kind = split_layer(name)
    if layer < 0:
        return WeightRef(f"{_TOP.get(stem, stem)}.{kind}")
    p = f"model.layers.{layer}"
    part = {"self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v"}.get(stem)
    if part is not None:
        return WeightRef(f"{p}.attention.wqkv.{kind}", row_index=_rows(c, part))
    return WeightRef(f"{p}.{_LAYER[stem]}.{kind}")


def _rows(c: DecoderConfig, part: str) -> tuple[int, ...]:
    """Rows of wqkv that hold all heads of one part, in order."""
    share = c.num_heads // c.num_kv_heads  # query heads of a group
    first, count = {"q": (0, share), "k": (share, 1), "v": (share + 1, 1)}[part]
    groups = ((g * (share + 2) + first) * c.head_dim for g in range(c.num_kv_heads))
    return tuple(start + i for start in groups for i in range(count * c.head_dim))


FAMILY = Family(
    name="internlm2",
    models="InternLM2, InternLM2.5",
    model_types=("internlm2",),
    architectures=("internlm2",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_refs=hf_refs,
    gguf_refs=gguf_name,
    embedding="model.tok_embeddings.weight",
)
