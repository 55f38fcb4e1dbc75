"""The gated delta net: a layer whose memory is one matrix per head, however long the text (Yang et al. 2024, arXiv 2412.06464).

Query, key and value pass a short convolution; the matrix forgets a little, then learns value at key; the result is normed per head and
gated. Memory is in slots of the sequence; a prefix is found again where a snapshot of the slot was kept with the cache's blocks.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..core.graph import GraphBuilder, Value
from .config import DecoderConfig
from .pieces import linear, norm
from .rope import RopeConfig

__all__ = ["delta_net"]


def delta_net(g: GraphBuilder, c: DecoderConfig, x: Value, layer: int, freqs: Mapping[RopeConfig, Value]) -> Value:
    """One layer: x [T, C] -> [T, C]. freqs: of attention's rotation, not used here."""
    assert c.delta is not None
    p, d = f"model.layers.{layer}.linear_attn", c.delta
    keys, values = d.num_key_heads * d.key_dim, d.num_value_heads * d.value_dim
    qkv = linear(g, x, f"{p}.in_proj_qkv", 2 * keys + values)  # [T, q | k | v]
    kernel = g.weight(f"{p}.conv1d.weight", (2 * keys + values, d.taps), "f32")
    qkv = g.short_conv(g.slot_state(f"conv.{layer}", (d.taps - 1, 2 * keys + values)), qkv, kernel, kind=c.hidden_act)
    out = g.delta_rule(
        g.slot_state(f"delta.{layer}", (d.num_value_heads, d.key_dim, d.value_dim)),
        _heads(g, qkv, 0, d.num_key_heads, d.key_dim),
        _heads(g, qkv, keys, d.num_key_heads, d.key_dim),
        _heads(g, qkv, 2 * keys, d.num_value_heads, d.value_dim),
        linear(g, x, f"{p}.in_proj_a", d.num_value_heads),
        linear(g, x, f"{p}.in_proj_b", d.num_value_heads),
        g.weight(f"{p}.A_log", (d.num_value_heads,), "f32"),
        g.weight(f"{p}.dt_bias", (d.num_value_heads,), "f32"),
    )  # [T, H, Dv]
    z = g.view(linear(g, x, f"{p}.in_proj_z", values), ("T", d.num_value_heads, d.value_dim))
    gated = g.act_mul(z, norm(g, c, out, f"{p}.norm"), kind=c.hidden_act)
    return linear(g, g.view(gated, ("T", values)), f"{p}.out_proj", c.hidden_size)


def _heads(g: GraphBuilder, x: Value, start: int, heads: int, dim: int) -> Value:
    """Columns of x [T, C] as heads [T, heads, dim], without a copy."""
    return g.window(x, start, (heads, dim))
