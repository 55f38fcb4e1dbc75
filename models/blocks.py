"""The pieces that decoders are made of, written once: norm, attention, gated MLP, experts, the loop over layers, the head.

A family describes itself with a `DecoderConfig`; `decoder_graph` writes the graph in the order of the mathematics. Graph
weights carry the names that Hugging Face's Llama uses (`model.layers.3.self_attn.q_proj.weight`), whatever the file calls
them, so that placement and quantisation rules read the same for every source; `names.py` maps them to what the file has.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..core.graph import Graph, GraphBuilder, Value
from .config import DecoderConfig, MoeConfig
from .delta import delta_net
from .latent import latent_attention
from .pieces import linear, norm
from .rope import RopeConfig

__all__ = ["attention", "decoder_graph", "experts", "gated_mlp", "head", "linear", "norm"]


def attention(g: GraphBuilder, c: DecoderConfig, x: Value, layer: int, freqs: Mapping[RopeConfig, Value]) -> Value:
    """Grouped-query attention of one layer: x [T, C] -> [T, C]. freqs: inv_freq constant of each rotary embedding."""
    p = f"model.layers.{layer}.self_attn"
    heads, kv_heads, dim = c.num_heads, c.num_kv_heads, c.head_dim
    q = linear(g, x, f"{p}.q_proj", heads * dim * (1 + c.attn_gate), bias=c.qkv_bias)  # [T, H*D]
    gate = None
    if c.attn_gate:  # [T, H, query | gate]
        both = g.view(q, ("T", heads, 2 * dim))
        q, gate = g.slice(both, 0, dim), g.slice(both, dim, 2 * dim)
    k = linear(g, x, f"{p}.k_proj", kv_heads * dim, bias=c.qkv_bias)  # [T, K*D]
    if c.qk_norm and c.qk_norm_all:
        q, k = norm(g, c, q, f"{p}.q_norm"), norm(g, c, k, f"{p}.k_norm")
    q, k = q if c.attn_gate else g.view(q, ("T", heads, dim)), g.view(k, ("T", kv_heads, dim))
    v = g.view(linear(g, x, f"{p}.v_proj", kv_heads * dim, bias=c.qkv_bias), ("T", kv_heads, dim))
    if c.qk_norm and not c.qk_norm_all:  # per head, before the rotation
        q, k = norm(g, c, q, f"{p}.q_norm"), norm(g, c, k, f"{p}.k_norm")
    rope = c.rope_of(layer)
    if rope is not None:
        q = g.rope(q, freqs[rope], style=rope.style, factor=rope.attention_factor)
        k = g.rope(k, freqs[rope], style=rope.style, factor=rope.attention_factor)
    cache = g.kv_cache(f"kv.{layer}", kv_heads, dim, dim)
    g.kv_write(cache, k, v)
    sinks = g.weight(f"{p}.sinks", (heads,), "f32") if c.attn_sinks else None
    out = g.attention(q, cache, sinks=sinks, scale=c.query_scale, window=c.window_of(layer), softcap=c.attn_softcap)  # [T, H, D]
    out = out if gate is None else g.act_mul(gate, out, kind="sigmoid")
    return linear(g, g.view(out, ("T", heads * dim)), f"{p}.o_proj", c.hidden_size, bias=c.output_bias)


def gated_mlp(g: GraphBuilder, c: DecoderConfig, x: Value, p: str, width: int) -> Value:
    """down(act(gate(x)) · up(x)) with the weights `p`.gate_proj, .up_proj and .down_proj: x [T, C] -> [T, C]. width: F."""
    gate = linear(g, x, f"{p}.gate_proj", width, bias=c.mlp_bias)  # [T, F]
    up = linear(g, x, f"{p}.up_proj", width, bias=c.mlp_bias)  # [T, F]
    return linear(g, g.act_mul(gate, up, kind=c.hidden_act), f"{p}.down_proj", c.hidden_size, bias=c.mlp_bias)


def experts(g: GraphBuilder, c: DecoderConfig, m: MoeConfig, x: Value, p: str) -> Value:
    """The chosen experts' sum, and the shared expert: x [T, C] -> [T, C]. The router is `p`.gate; the experts' matrices are stacks
    `p`.experts.gate_proj [E, F, C] and so on."""
    count, width, hidden = m.num_experts, m.intermediate_size, c.hidden_size
    with g.tag(role="experts"):
        logits = linear(g, x, f"{p}.gate", count, bias=m.router_bias)  # [T, E]
        choose = g.weight(f"{p}.gate.e_score_correction_bias", (count,), "f32") if m.choose_bias else None
        ids, weights = g.route_topk(
            logits,
            choose,
            k=m.top_k,
            score=m.score,
            groups=m.groups,
            keep_groups=m.keep_groups,
            group_score=m.group_score,
            renorm=int(m.renorm),
            scale=m.scale,
        )
        shapes = {"gate_proj": (count, width, hidden), "up_proj": (count, width, hidden), "down_proj": (count, hidden, width)}
        stacks = [g.weight(f"{p}.experts.{name}.weight", shape) for name, shape in shapes.items()]
        biases = [g.weight(f"{p}.experts.{n}.bias", s[:2], "f32") for n, s in shapes.items()] if m.expert_bias else []
        out = g.moe(x, ids, weights, *stacks, *biases, kind=c.hidden_act)
    if not m.shared_size:
        return out
    with g.tag(role="shared_expert"):
        shared = gated_mlp(g, c, x, f"{p}.shared_expert", m.shared_size)
        if m.shared_gate:
            shared = g.mul(shared, g.act_mul(linear(g, x, f"{p}.shared_expert_gate", 1), kind="sigmoid"))
        return g.add(out, shared)


def head(g: GraphBuilder, c: DecoderConfig, x: Value, table: Value) -> tuple[Value, Value]:
    """Logits [R, V] and sampled ids [R] of the rows that are sampled; x [T, C]. table: the embedding, used if tied."""
    x = g.embed(g.input("sample_rows"), x)  # [R, C]: only these rows are needed from here on
    x = norm(g, c, x, "model.norm")
    w = table if c.tie_word_embeddings else g.weight("lm_head.weight", (c.vocab_size, c.hidden_size))
    logits = _scaled(g, g.linear(x, w), c.logit_multiplier)
    if c.final_softcap:
        logits = g.softcap(logits, c.final_softcap)
    return logits, g.sample(logits)


def decoder_graph(name: str, c: DecoderConfig, inv_freqs: Mapping[RopeConfig, np.ndarray], *, embedding: bool = False) -> Graph:
    """The whole decoder. inv_freqs: f32 [rotary_dim / 2] of every rotary embedding that a layer uses. embedding: without head; the output
    is the normed hidden state [R, C] of the rows that are asked for."""
    g = GraphBuilder(name)
    freqs = {rope: g.const(f"inv_freq.{i}", data) for i, (rope, data) in enumerate(inv_freqs.items())}
    table = g.weight("model.embed_tokens.weight", (c.vocab_size, c.hidden_size))
    with g.tag(role="embed"):
        x = _scaled(g, g.embed(g.input("ids"), table), c.embed_multiplier)  # [T, C]
    sandwich = c.norms == "sandwich"
    for layer in range(c.num_layers):
        p = f"model.layers.{layer}"
        with g.tag(layer=layer, role="attn"):
            recurrent = c.delta is not None and layer in c.delta.layers
            attend = delta_net if recurrent else attention if c.mla is None else latent_attention
            branch = attend(g, c, norm(g, c, x, f"{p}.input_layernorm"), layer, freqs)
            if sandwich:
                branch = norm(g, c, branch, f"{p}.post_attention_layernorm")
            x = g.add(x, _scaled(g, branch, c.residual_multiplier))
        with g.tag(layer=layer, role="mlp"):
            before = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
            normed, sparse = norm(g, c, x, f"{p}.{before}"), c.experts_of(layer)
            if sparse is None:
                branch = gated_mlp(g, c, normed, f"{p}.mlp", c.intermediate_size)
            else:
                branch = experts(g, c, sparse, normed, f"{p}.mlp")
            if sandwich:
                branch = norm(g, c, branch, f"{p}.post_feedforward_layernorm")
            x = g.add(x, _scaled(g, branch, c.residual_multiplier))
    with g.tag(role="head"):
        if embedding:
            return g.build(norm(g, c, g.embed(g.input("sample_rows"), x), "model.norm"))
        logits, ids = head(g, c, x, table)
    return g.build(logits, ids)


def _scaled(g: GraphBuilder, x: Value, factor: float) -> Value:
    return x if factor == 1.0 else g.mul(x, g.scalar(factor))
