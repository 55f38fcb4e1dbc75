"""Multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1.2 and appendix C).

Keys and values of all heads are linear in one latent vector, k_h = [W_kb_h · latent | rotated part] and v_h = W_vb_h · latent. So the cache
holds one row [latent | rotated part] per token, a query is brought to that space (q · k_h = (W_kb_hᵀ q_nope) · latent + …), and W_vb_h
is applied to the sum of latents. For `attention` that is one kv head whose values are a prefix of its keys.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..core.graph import GraphBuilder, Value
from .config import DecoderConfig
from .pieces import linear, norm
from .rope import RopeConfig

__all__ = ["LATENT_EPS", "latent_attention"]

LATENT_EPS = 1e-6
"""Of the norms of both latents, whatever the model's own."""


def latent_attention(g: GraphBuilder, c: DecoderConfig, x: Value, layer: int, freqs: Mapping[RopeConfig, Value]) -> Value:
    """Latent attention of one layer: x [T, C] -> [T, C]. freqs: inv_freq constant of each rotary embedding."""
    assert c.mla is not None
    p, m, heads = f"model.layers.{layer}.self_attn", c.mla, c.num_heads
    nope, turned, latent = m.nope_dim, m.rope_dim, m.kv_lora_rank
    if m.q_lora_rank:
        q = norm(g, c, linear(g, x, f"{p}.q_a_proj", m.q_lora_rank, bias=c.qkv_bias), f"{p}.q_a_layernorm", eps=LATENT_EPS)
        q = linear(g, q, f"{p}.q_b_proj", heads * (nope + turned))
    else:
        q = linear(g, x, f"{p}.q_proj", heads * (nope + turned))
    q = g.view(q, ("T", heads, nope + turned))
    kv = linear(g, x, f"{p}.kv_a_proj_with_mqa", latent + turned, bias=c.qkv_bias)
    kv = g.view(kv, ("T", 1, latent + turned))
    rope, freq = c.rope, freqs[c.rope]
    q_turned = g.rope(g.slice(q, nope, nope + turned), freq, style=rope.style, factor=rope.attention_factor)  # [T, H, rope]
    k_turned = g.rope(g.slice(kv, latent, latent + turned), freq, style=rope.style, factor=rope.attention_factor)  # [T, 1, rope]
    compressed = norm(g, c, g.slice(kv, 0, latent), f"{p}.kv_a_layernorm", eps=LATENT_EPS)  # [T, 1, latent]
    cache = g.kv_cache(f"kv.{layer}", 1, latent + turned, 0)
    g.kv_write(cache, g.concat(compressed, k_turned), None)
    absorbed = g.matmul(g.slice(q, 0, nope), g.weight(f"{p}.k_b.weight", (heads, latent, nope)))  # [T, H, latent]
    out = g.attention(g.concat(absorbed, q_turned), cache, scale=c.query_scale, value_dim=latent)  # [T, H, latent]
    out = g.matmul(out, g.weight(f"{p}.v_b.weight", (heads, m.value_dim, latent)))  # [T, H, v]
    return linear(g, g.view(out, ("T", heads * m.value_dim)), f"{p}.o_proj", c.hidden_size, bias=c.output_bias)
