"""A fixture must notice: each special of each family is changed in turn, and the logits must move well beyond the tolerance.

Changing means what a wrong reading of the file would do: a window one too long, a forgotten bias, norms without their 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from fastllm.core.weights import WeightRef
from fastllm.models.blocks import decoder_graph
from fastllm.models.config import DecoderConfig
from fastllm.models.names import fused_qkv, gguf_name, plus_one, split_layer
from fastllm.models.rope import RopeConfig, inv_freq

TOLERANCE = 1e-4
NOTICED = 2 * TOLERANCE


def fields(**changes: object) -> Callable[[DecoderConfig], DecoderConfig]:
    """A change of plain fields; a callable value gets the old value."""

    def change(c: DecoderConfig) -> DecoderConfig:
        return replace(c, **{k: v(getattr(c, k)) if callable(v) else v for k, v in changes.items()})

    return change


def rope(**changes: object) -> Callable[[DecoderConfig], DecoderConfig]:
    """A change of the rotary embedding (both kinds where there are two)."""

    def turned(r: RopeConfig | None) -> RopeConfig | None:
        return r and replace(r, **{k: v(getattr(r, k)) if callable(v) else v for k, v in changes.items()})

    return lambda c: replace(c, rope=turned(c.rope), local_rope=turned(c.local_rope))


def moe(**changes: object) -> Callable[[DecoderConfig], DecoderConfig]:
    """A change of the experts."""
    return lambda c: replace(c, moe=replace(c.moe, **changes))


def mla(**changes: object) -> Callable[[DecoderConfig], DecoderConfig]:
    """A change of the latent attention."""
    return lambda c: replace(c, mla=replace(c.mla, **changes))


def longer(n: float) -> float:
    return n + 1


def shorter(n: float) -> float:
    return n - 1


WINDOW = {
    "window+1": fields(sliding_window=longer),
    "window-1": fields(sliding_window=shorter),
    "no window": fields(sliding_window=0),
}
NO_SCALING = {"scaling ignored": rope(scaling="default", attention_factor=1.0)}
TYPES = {"layer types turned round": fields(layer_types=lambda t: t[1:] + t[:1]), "all layers full": fields(layer_types=())}
GEMMA = {
    "norms before the branch only": fields(norms="pre"),
    "embedding not multiplied": fields(embed_multiplier=1.0),
    "plain silu": fields(hidden_act="silu"),
    "exact gelu": fields(hidden_act="gelu"),
    **WINDOW,
    **TYPES,
}

CHANGES: dict[str, dict[str, Callable[[DecoderConfig], DecoderConfig]]] = {
    "llama": {
        "no q, k, v bias": fields(qkv_bias=False),
        "no output bias": fields(output_bias=False),
        "no mlp bias": fields(mlp_bias=False),
        "pairs instead of halves": rope(style="pairs"),
        "another base": rope(theta=10_000.0),
        "other eps": fields(rms_norm_eps=1e-3),
        "gelu": fields(hidden_act="gelu_tanh"),
        "scale of another head dimension": fields(query_scale=8**-0.5),
        "head tied": fields(tie_word_embeddings=True),
        "no rope": fields(no_rope_layers=frozenset({0, 1})),
    },
    "llama_linear": {**NO_SCALING, "other factor": rope(factor=8.0)},
    "llama_dynamic": {**NO_SCALING, "other factor": rope(factor=2.0), "other length": rope(original_length=20)},
    "llama_llama3": {
        **NO_SCALING,
        "linear": rope(scaling="linear"),
        "other length": rope(original_length=64),
        "other low": rope(low_freq_factor=2.0),
        "other high": rope(high_freq_factor=8.0),
    },
    "llama_yarn": {
        **NO_SCALING,
        "linear": rope(scaling="linear"),
        "no attention factor": rope(attention_factor=1.0),
        "other length": rope(original_length=64),
        "other slow": rope(beta_slow=0.25),
    },
    "llama_yarn_options": {
        **NO_SCALING,
        "rounded range": rope(truncate=True),
        "default fast": rope(beta_fast=32.0),
        "default slow": rope(beta_slow=1.0),
        "mscale ignored": rope(attention_factor=0.1 * np.log(4.0) + 1.0),
    },
    "mistral": WINDOW,
    "smollm3": {
        "rope everywhere": fields(no_rope_layers=frozenset()),
        "another layer without": fields(no_rope_layers=frozenset({2})),
    },
    "qwen2": {**NO_SCALING, "no bias": fields(qkv_bias=False)},
    "qwen2_window": {**WINDOW, **TYPES},
    "qwen3": {"no q, k norm": fields(qk_norm=False)},
    "phi3": {
        **WINDOW,
        **NO_SCALING,
        "no attention factor": rope(attention_factor=1.0),
        "short factors": rope(long_factor=(1.0, 1.1, 1.2, 1.3, 1.4, 1.5)),
        "less of the head turns": rope(rotary_dim=10, long_factor=(1.0, 1.6, 2.2, 2.8, 3.4)),
    },
    "internlm2": {"no qkv bias": fields(qkv_bias=False), "no output bias": fields(output_bias=False)},
    "internlm3": {
        "no q, k, v bias": fields(qkv_bias=False),
        "no output bias": fields(output_bias=False),
        "no mlp bias": fields(mlp_bias=False),
    },
    "gemma2": {**GEMMA, "no cap on scores": fields(attn_softcap=0.0), "no cap on logits": fields(final_softcap=0.0)},
    "gemma2_scale": {
        "scale of the head dimension": fields(query_scale=16**-0.5),
        "no q, k, v bias": fields(qkv_bias=False),
        "no output bias": fields(output_bias=False),
    },
    "gemma3": {
        **GEMMA,
        "no q, k norm": fields(qk_norm=False),
        "linear scaling ignored": lambda c: replace(c, rope=replace(c.rope, scaling="default")),
        "one base for all layers": fields(local_rope=None),
        "local layers scaled too": lambda c: replace(c, local_rope=replace(c.local_rope, scaling="linear", factor=8.0)),
    },
    "qwen2_moe": {
        "weights renormalised": moe(renorm=True),
        "sigmoid scores": moe(score="sigmoid"),
        "softmax of the chosen": moe(score="softmax_of_chosen"),
        "one expert fewer": moe(top_k=2),
        "no shared expert": moe(shared_size=0),
        "shared expert without its gate": moe(shared_gate=False),
        "no bias": fields(qkv_bias=False),
    },
    "qwen3_moe": {"weights not renormalised": moe(renorm=False), "one expert more": moe(top_k=3), "no q, k norm": fields(qk_norm=False)},
    "mixtral": {"weights not renormalised": moe(renorm=False), "one expert more": moe(top_k=3)},
    "olmoe": {"weights renormalised": moe(renorm=True), "one expert fewer": moe(top_k=2), "no q, k norm": fields(qk_norm=False)},
    "deepseek_v2": {
        "groups do not compete": moe(groups=1, keep_groups=1),
        "groups compete by their two best": moe(group_score="top2sum"),
        "one group fewer": moe(keep_groups=1, top_k=2),
        "weights renormalised": moe(renorm=True),
        "weights not scaled": moe(scale=1.0),
        "no shared experts": moe(shared_size=0),
        "halves instead of pairs": rope(style="half"),
        "scale of the latent": fields(query_scale=24**-0.5),
    },
    "deepseek_v3": {
        "groups do not compete": moe(groups=1, keep_groups=1),
        "groups compete by their best": moe(group_score="max"),
        "no bias chooses": moe(choose_bias=False),
        "softmax scores": moe(score="softmax"),
        "weights not renormalised": moe(renorm=False),
        "weights not scaled": moe(scale=1.0),
        "no shared expert": moe(shared_size=0),
        "halves instead of pairs": rope(style="half"),
        "mscale ignored": fields(query_scale=16**-0.5),
        "scaling ignored": rope(scaling="default"),
    },
    "gpt_oss": {
        **WINDOW,
        **TYPES,
        "no sinks": fields(attn_sinks=False),
        "softmax over all experts": moe(score="softmax"),
        "no router bias": moe(router_bias=False),
        "no expert biases": moe(expert_bias=False),
        "no q, k, v bias": fields(qkv_bias=False),
        "no output bias": fields(output_bias=False),
        "plain silu": fields(hidden_act="silu"),
        "rounded range of yarn": rope(truncate=True),
        "no attention factor": rope(attention_factor=1.0),
    },
    "qwen3_next": {
        "weights not renormalised": moe(renorm=False),
        "shared expert without its gate": moe(shared_gate=False),
        "no q, k norm": fields(qk_norm=False),
        "the whole head turns": rope(rotary_dim=8),
    },
    "kimi_k2": {"no bias chooses": moe(choose_bias=False)},
    "granite_moe": {
        "softmax over all": moe(score="softmax"),
        "embedding not multiplied": fields(embed_multiplier=1.0),
        "branches not multiplied": fields(residual_multiplier=1.0),
        "logits not divided": fields(logit_multiplier=1.0),
        "scale of the head dimension": fields(query_scale=8**-0.5),
    },
    "gemma3_nested": {"scale of the head dimension": fields(query_scale=16**-0.5)},
}


CASES = [pytest.param(name, what, id=f"{name}: {what}") for name, changes in CHANGES.items() for what in changes]


@pytest.mark.parametrize(("name", "what"), CASES)
def test_fixture_notices(name, what, tiny, oracle):
    case = tiny(name)
    config = CHANGES[name][what](case.model.details["config"])
    freqs = {}
    for layer in range(config.num_layers):
        r = config.rope_of(layer)
        if r is not None and r not in freqs:
            freqs[r] = inv_freq(r, 40)[0]
    weights = oracle.load_weights(case.model, case.files.tensors)
    assert case.error(oracle.evaluate(decoder_graph(name, config, freqs), weights, case.ids)) > NOTICED


def renamed(case, oracle, rule: Callable[[str], WeightRef]) -> float:
    """The error if graph weights come from where `rule` says."""
    refs = {name: rule(name) for name in case.model.weights}
    weights = oracle.load_weights(replace(case.model, weights=refs), case.files.tensors)
    return case.error(oracle.evaluate(case.model.graph, weights, case.ids))


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_fixture_notices_norms_without_their_one(name, tiny, oracle):
    case = tiny(name)
    assert renamed(case, oracle, lambda n: case.model.weights[n]) <= TOLERANCE
    assert renamed(case, oracle, lambda n: WeightRef(n)) > NOTICED


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_twin_notices_a_one_added_twice(name, tiny, oracle):
    case = tiny(name, "gguf")
    config = case.model.details["config"]
    doubled = renamed(case, oracle, lambda n: replace(gguf_name(n, config), add=plus_one(n, config).add))
    assert doubled > NOTICED


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_fixture_notices_single_norms_left_without_their_one(name, tiny, oracle):
    case = tiny(name)
    stems = {split_layer(n)[1] for n in case.model.weights if n.endswith("norm.weight")}
    for stem in stems:
        plain = renamed(case, oracle, lambda n, s=stem: WeightRef(n) if split_layer(n)[1] == s else case.model.weights[n])
        assert plain > NOTICED, stem


@pytest.mark.parametrize("name", ["llama", "llama_llama3", "llama_yarn", "smollm3", "internlm2", "mixtral", "granite_moe"])
def test_twin_notices_halves_instead_of_pairs(name, tiny, oracle):
    case = tiny(name, "gguf")
    weights = oracle.load_weights(case.model, case.files.tensors)
    nodes = [replace(n, attrs={**n.attrs, "style": "half"}) if n.op == "rope" else n for n in case.model.graph.nodes]
    assert case.error(oracle.evaluate(replace(case.model.graph, nodes=nodes), weights, case.ids)) > NOTICED


def test_twin_notices_rope_factors_left_out(tiny, oracle):
    for name in ("llama_llama3", "phi3"):
        case = tiny(name, "gguf")
        config = case.model.details["config"]
        graph = decoder_graph(name, config, {config.rope: inv_freq(config.rope, 40)[0]})
        weights = oracle.load_weights(case.model, case.files.tensors)
        assert case.error(oracle.evaluate(graph, weights, case.ids)) > NOTICED


def test_fixture_notices_qkv_rows_read_straight_instead_of_by_group(tiny, oracle):
    case = tiny("internlm2")
    config = case.model.details["config"]

    def straight(name):
        layer = split_layer(name)[0]
        return fused_qkv(name, config, f"model.layers.{layer}.attention.wqkv") or case.model.weights[name]

    assert renamed(case, oracle, straight) > NOTICED


@pytest.mark.parametrize(("a", "b"), [("self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")])
@pytest.mark.parametrize("source", ["huggingface", "gguf"])
def test_fixture_notices_fused_parts_in_the_wrong_order(a, b, source, tiny, oracle):
    case = tiny("phi3", source)

    def swapped(name):
        other = name.replace(a, b) if a in name else name.replace(b, a)
        return case.model.weights[other]

    assert renamed(case, oracle, swapped) > NOTICED


@pytest.mark.parametrize("source", ["huggingface", "gguf"])
@pytest.mark.parametrize("name", ["qwen2_moe_all", "qwen3_moe", "mixtral", "olmoe", "granite_moe"])
def test_fixture_notices_gate_and_up_of_the_experts_exchanged(name, source, tiny, oracle):
    case = tiny(name, source)
    a, b = "experts.gate_proj", "experts.up_proj"
    assert renamed(case, oracle, lambda n: case.model.weights[n.replace(a, b) if a in n else n.replace(b, a)]) > NOTICED


@pytest.mark.parametrize("source", ["huggingface", "gguf"])
@pytest.mark.parametrize("what", ["q_a_layernorm", "kv_a_layernorm"])
def test_fixture_notices_norms_of_the_latents(what, source, tiny, oracle):
    case = tiny("deepseek_v3", source)
    weights = oracle.load_weights(case.model, case.files.tensors)
    left_out = {n: np.ones_like(w) if what in n else w for n, w in weights.items()}
    assert case.error(oracle.evaluate(case.model.graph, left_out, case.ids)) > NOTICED
    nodes = [replace(n, attrs={"eps": 1e-2}) if n.op == "rms_norm" and what in str(n.inputs[1]) else n for n in case.model.graph.nodes]
    assert case.error(oracle.evaluate(replace(case.model.graph, nodes=nodes), weights, case.ids)) > NOTICED


def test_fixture_notices_an_activation_that_is_not_clamped(tiny, oracle, monkeypatch):
    case = tiny("gpt_oss")
    weights = oracle.load_weights(case.model, case.files.tensors)

    def unclamped(gate, up, kind):
        return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)

    monkeypatch.setattr(oracle, "_gated", unclamped)
    assert case.error(oracle.evaluate(case.model.graph, weights, case.ids)) > NOTICED


def test_fixture_notices_gate_and_up_as_halves_instead_of_alternating(tiny, oracle):
    case = tiny("gpt_oss")
    width = case.model.details["config"].moe.intermediate_size

    def halves(name):
        ref = case.model.weights[name]
        if "experts.gate_proj" not in name and "experts.up_proj" not in name:
            return ref
        rows = tuple(range(width)) if "gate_proj" in name else tuple(range(width, 2 * width))
        return replace(ref, parts=tuple(replace(p, row_index=rows) for p in ref.parts))

    assert renamed(case, oracle, halves) > NOTICED


@pytest.mark.parametrize("what", ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"])
def test_fixture_notices_projections_that_are_read_straight(what, tiny, oracle):
    case = tiny("qwen3_next")

    def straight(name):
        ref = case.model.weights[name]
        return replace(ref, row_index=tuple(sorted(ref.row_index))) if what in name else ref

    def exchanged(name):
        ref = case.model.weights[name]
        return replace(ref, row_index=ref.row_index[::-1]) if what in name else ref

    moved = [renamed(case, oracle, rule) for rule in (straight, exchanged)]
    assert moved[1] > NOTICED
    assert what != "in_proj_qkv" or moved[0] > NOTICED


def test_fixture_notices_norms_without_their_one_and_one_that_has_it(tiny, oracle):
    case = tiny("qwen3_next")
    for stem in sorted({split_layer(n)[1] for n in case.model.weights if n.endswith("norm.weight")}):
        one = 1.0 if stem == "linear_attn.norm" else 0.0
        assert renamed(case, oracle, lambda n, s=stem, o=one: WeightRef(n, add=o) if split_layer(n)[1] == s else case.model.weights[n]) > NOTICED


def test_keys_and_values_of_a_joint_kv_b_are_those_of_the_split_one(tiny, oracle):
    joint, split = tiny("deepseek_v3"), tiny("deepseek_v3", "gguf")
    assert joint.model.details["config"].mla.split is False
    assert split.model.details["config"].mla.split is True
    for name in ("model.layers.1.self_attn.k_b.weight", "model.layers.1.self_attn.v_b.weight"):
        a, b = (oracle.load_weights(c.model, c.files.tensors)[name] for c in (joint, split))
        assert np.array_equal(a, b)


@pytest.mark.parametrize("name", ["qwen2_moe", "mixtral"])
def test_fixture_notices_experts_in_another_order(name, tiny, oracle):
    case = tiny(name)

    def turned(name):
        ref = case.model.weights[name]
        return replace(ref, parts=ref.parts[1:] + ref.parts[:1])

    assert renamed(case, oracle, turned) > NOTICED


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "qwen3"])
def test_fixture_notices_two_norms_exchanged(name, tiny, oracle):
    case = tiny(name)
    for a, b in (("input_layernorm", "post_attention_layernorm"), ("self_attn.q_norm", "self_attn.k_norm")):
        if not any(a in n for n in case.model.weights):
            continue
        exchanged = renamed(
            case, oracle, lambda n, a=a, b=b: case.model.weights[n.replace(a, b) if a in n else n.replace(b, a)]
        )
        assert exchanged > NOTICED
