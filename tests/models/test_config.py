"""Configurations: what is missing, wrong, contradictory or unknown is one clear error, whatever the family."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest

from fastllm.core.errors import ModelFileError, UnsupportedError
from fastllm.models import FAMILIES, build
from fastllm.models.keys import Keys

FIXTURES = Path(__file__).parent / "fixtures"
ONE_PER_FAMILY = [
    "llama",
    "mistral",
    "smollm3",
    "qwen2",
    "qwen3",
    "phi3",
    "internlm2",
    "internlm3",
    "gemma2",
    "gemma3",
    "gemma3_nested",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "granite_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "qwen3_next",
]
SCALED = ["llama_linear", "llama_dynamic", "llama_llama3", "llama_yarn", "llama_yarn_options", "phi3"]
TWINS = ["llama", "llama_llama3", "llama_yarn", "smollm3", "qwen2", "qwen3", "phi3", "internlm2", "gemma2", "gemma3"]
TWINS += ["mixtral", "qwen2_moe_all", "qwen3_moe", "olmoe", "granite_moe", "deepseek_v2", "deepseek_v3", "gpt_oss"]
NASTY = [
    None, True, False, 0, -1, 1, 3, 2**70, 0.5, -0.5, math.nan, math.inf, -math.inf, 1e308, 1e-308, "", "x", [], [0], [None],
    [math.nan],
    {}, {"x": 1}, [[]] * 3,
]  # fmt: skip
REQUIRED = [
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
]


def rebuilt(case, config, **more):
    files = case.files
    return build(files.kind, files.architecture, config, files.tensors, **more)


def changed(case, **changes):
    """The model built from the fixture's configuration with changes (in the text model's part); ... drops a key."""
    config = copy.deepcopy(case.files.config)
    inner = config.get("text_config", config)
    for key, value in changes.items():
        if value is ...:
            inner.pop(key, None)
        else:
            inner[key] = value
    return rebuilt(case, config)


def outcome(case, config):
    """ "built", or the message of the error; any other exception passes through and fails the test."""
    try:
        rebuilt(case, config)
    except (ModelFileError, UnsupportedError) as error:
        return str(error)
    return "built"


@pytest.mark.parametrize("name", ONE_PER_FAMILY)
def test_a_missing_key_is_named(name, tiny):
    published_without = ("num_attention_heads", "vocab_size", "max_position_embeddings") if name.startswith("gemma3") else ()
    for key in REQUIRED:
        if key not in published_without:
            with pytest.raises(ModelFileError, match=f"no '{key}'"):
                changed(tiny(name), **{key: ...})


@pytest.mark.parametrize("name", [*ONE_PER_FAMILY, *SCALED[:-1]])
def test_no_value_of_any_key_is_more_than_an_error(name, tiny):
    case = tiny(name)
    top = case.files.config
    paths = []

    def walk(table, path):
        for key, value in table.items():
            paths.append((*path, key))
            if isinstance(value, dict):
                walk(value, (*path, key))

    walk(top, ())
    for path in paths:
        for value in NASTY:
            config = copy.deepcopy(top)
            table = config
            for key in path[:-1]:
                table = table[key]
            table[path[-1]] = value
            assert 0 < len(outcome(case, config)) < 400, (path, value)


@pytest.mark.parametrize("name", TWINS)
def test_no_value_of_any_gguf_key_is_more_than_an_error(name, tiny):
    case = tiny(name, "gguf")
    extra = ["rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.freq_base_swa",
             "vocab_size",
             "attention.sliding_window", "attention.sliding_window_pattern", "rope.dimension_count", "rope.scale_linear",
             "attention.key_length", "attention.value_length", "rope.scaling.attn_factor", "expert_count"]  # fmt: skip
    keys = {k for k in case.files.config if k.startswith(case.files.architecture)} | {
        f"{case.files.architecture}.{k}" for k in extra
    }
    for key in sorted(keys):
        for value in [*NASTY, "yarn", "longrope", "linear"]:
            assert 0 < len(outcome(case, {**case.files.config, key: value})) < 400, (key, value)


@pytest.mark.parametrize(
    "key", ["llama.block_count", "llama.embedding_length", "llama.context_length", "llama.attention.head_count"]
)
def test_a_missing_gguf_key_is_named_in_full(key, tiny):
    case = tiny("llama", "gguf")
    with pytest.raises(ModelFileError, match=f"no '{key}'"):
        rebuilt(case, {k: v for k, v in case.files.config.items() if k != key})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "'num_key_value_heads' is 3; it must be a divisor of the 4 query heads"),
        ({"head_dim": ..., "num_attention_heads": 5, "num_key_value_heads": 5}, "a divisor of the hidden size 32"),
        ({"rms_norm_eps": math.nan}, "'rms_norm_eps' is nan"),
        ({"rms_norm_eps": "1e-5"}, "'rms_norm_eps' is '1e-5'"),
        ({"hidden_size": 32.0}, "'hidden_size' is 32.0; it must be an integer from 1 to"),
        ({"attention_bias": 1}, "'attention_bias' is 1; it must be true or false"),
        ({"num_hidden_layers": True}, "'num_hidden_layers' is True"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "'rope_parameters.factor' is 0.5"),
        (
            {"rope_parameters": {"rope_type": "yarn", "beta_fast": 1, "beta_slow": 2}},
            "'rope_parameters.beta_fast' is 1.0; it must be more",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "no 'rope_parameters.low_freq_factor'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.05}}, "'partial_rotary_factor' is 0.05"),
        ({"rope_parameters": {"rope_theta": 0}}, "'rope_parameters.rope_theta' is 0"),
    ],
)
def test_contradictions_and_wrong_values_say_key_value_and_limit(changes, message, tiny):
    with pytest.raises(ModelFileError) as error:
        changed(tiny("llama"), **changes)
    assert message in str(error.value)
    assert error.value.fix


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("llama", {"hidden_act": "mish"}, "hidden_act"),
        ("llama", {"rope_parameters": {"rope_type": "spiral"}}, "rope_parameters.rope_type"),
        ("llama", {"rope_parameters": None, "rope_scaling": {"type": "mrope"}}, "rope_scaling.type"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method"),
        ("gemma2", {"hidden_activation": "tanhshrink"}, "hidden_activation"),
        ("gemma2", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_an_unknown_value_of_a_known_key_names_the_key(name, changes, key, tiny):
    with pytest.raises(UnsupportedError) as error:
        changed(tiny(name), **changes)
    assert error.value.fields["key"] == key


def test_a_configuration_with_far_too_many_layers_is_refused_at_once(tiny):
    with pytest.raises(ModelFileError, match=r"'model\.layers\.4095\.input_layernorm\.weight' is missing"):
        changed(tiny("llama"), num_hidden_layers=4096)


def test_experts_that_the_file_does_not_have_are_missing(tiny):
    case = tiny("llama", "gguf")
    more = {"llama.expert_count": 8, "llama.expert_used_count": 2}
    with pytest.raises(ModelFileError, match=r"'blk\.0\.ffn_gate_inp\.weight' is missing"):
        rebuilt(case, {**case.files.config, **more})
    with pytest.raises(ModelFileError, match=r"'model\.layers\.0\.mlp\.experts\.6\.gate_proj\.weight' is missing|has shape"):
        changed(tiny("qwen3_moe"), num_local_experts=4096)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 7}, "'num_experts_per_tok' is 7; it must be at most the 6 experts"),
        ("qwen2_moe", {"mlp_only_layers": [0.5]}, "'mlp_only_layers' is"),
        ("qwen2_moe", {"moe_intermediate_size": 17}, "asks for [17, 32]"),
        ("granite_moe", {"num_local_experts": 5}, "asks for [5, 32]"),
    ],
)
def test_experts_that_cannot_be_are_an_error(name, changes, message, tiny):
    with pytest.raises(ModelFileError) as error:
        changed(tiny(name), **changes)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("deepseek_v2", {"topk_method": "random"}, "topk_method"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("qwen3_next", {"layer_types": ["linear_attention", "sliding_attention"] * 4}, "layer_types"),
        ("gpt_oss", {"swiglu_limit": 8.0}, "swiglu_limit"),
    ],
)
def test_routers_that_are_not_known_are_refused(name, changes, key, tiny):
    with pytest.raises(UnsupportedError) as error:
        changed(tiny(name), **changes)
    assert error.value.fields["key"] == key


def test_layers_that_predict_further_tokens_are_left_out_with_a_note(tiny):
    case = tiny("kimi_k2")
    assert any("predict further tokens: model.layers.2." in note for note in case.model.notes)
    with pytest.raises(ModelFileError, match="in layer 2, but the configuration has 2 layers"):
        changed(case, num_nextn_predict_layers=0)


def test_models_that_clip_q_k_and_v_are_refused(tiny):
    with pytest.raises(UnsupportedError, match="clip_qkv"):
        changed(tiny("olmoe"), clip_qkv=8.0)


@pytest.mark.parametrize("name", [*SCALED, "llama", "qwen2", "gemma3"])
def test_rope_keys_of_transformers_4_mean_the_same(name, tiny):
    """Files from before transformers 5 have `rope_theta` and `rope_scaling` with `type` or `rope_type`."""
    case = tiny(name)
    old = copy.deepcopy(case.files.config)
    rope = old.pop("rope_parameters")
    if name == "gemma3":
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    old["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    for key in ("type", "rope_type"):
        old["rope_scaling"] = None if kind == "default" else {key: kind, **rope}
        assert rebuilt(case, old).details["config"] == case.model.details["config"]
    if kind == "longrope":
        old["rope_scaling"] = {"type": "su", **rope}
        assert rebuilt(case, old).details["config"] == case.model.details["config"]


def test_windows_by_configuration(tiny):
    mistral, qwen, smollm, phi = tiny("mistral"), tiny("qwen2_window"), tiny("smollm3"), tiny("phi3")

    def windows(model):
        c = model.details["config"]
        return [c.window_of(i) for i in range(c.num_layers)]

    assert windows(changed(mistral, sliding_window=None)) == [0, 0]
    assert windows(changed(mistral, sliding_window=...)) == [4096, 4096]
    assert windows(changed(qwen, layer_types=...)) == [0, 8]
    assert windows(changed(qwen, layer_types=..., max_window_layers=0)) == [8, 8]
    assert windows(changed(qwen, use_sliding_window=False)) == [0, 0]
    assert windows(changed(smollm, sliding_window=8)) == [0, 0, 0, 0]
    assert windows(changed(smollm, sliding_window=8, use_sliding_window=True, layer_types=...)) == [0, 0, 0, 8]
    assert windows(changed(phi, sliding_window=None)) == [0, 0]


def test_no_rope_layers_come_from_the_interval_where_there_is_no_list(tiny):
    changed_interval = changed(tiny("smollm3"), no_rope_layers=..., no_rope_layer_interval=2).details["config"]
    assert changed_interval.no_rope_layers == {1, 3}


def test_soft_caps_null_is_none_and_absent_is_the_familys(tiny):
    caps = changed(tiny("gemma2"), attn_logit_softcapping=None, final_logit_softcapping=...).details["config"]
    assert (caps.attn_softcap, caps.final_softcap) == (0.0, 30.0)


def test_gemma3_defaults_are_those_of_the_published_files():
    """The 4B model's text_config holds these six keys and nothing else."""
    family = next(f for f in FAMILIES if f.name == "gemma3")
    published = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    c = family.from_hf(Keys(published))
    assert (c.num_heads, c.num_kv_heads, c.head_dim, c.vocab_size, c.max_position) == (8, 4, 256, 262_208, 131_072)
    assert (c.rope.theta, c.rope.factor, c.rope.scaling) == (1_000_000.0, 8.0, "linear")
    assert c.local_rope is not None
    assert (c.local_rope.theta, c.local_rope.scaling) == (10_000.0, "default")
    assert [c.window_of(i) for i in range(7)] == [1024] * 5 + [0, 1024]
    assert c.tie_word_embeddings
    assert c.query_scale == 1 / 16


def test_committed_configurations_hold_no_defaults_that_hide_a_missing_reader():
    for name in ONE_PER_FAMILY:
        config = json.loads((FIXTURES / name / "config.json").read_text())
        assert config["model_type"] in {t for f in FAMILIES for t in f.model_types}
