"""`build`: unknown architectures, tensors that are missing, misshapen or left over, and what is said about them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastllm.core.errors import ModelFileError, UnsupportedError
from fastllm.core.weights import TensorSource
from fastllm.models import build


def source(name, shape, format="f32"):
    size = {"f32": 4, "bf16": 2}[format]
    return TensorSource(name, shape, format, np.zeros(int(np.prod(shape)) * size, np.uint8), "model.safetensors")


def with_tensors(case, *, drop=(), config=None, **more):
    tensors = {n: t for n, t in case.files.tensors.items() if n not in drop}
    tensors.update({n.replace("__", "."): t for n, t in more.items()})
    return build(case.files.kind, case.files.architecture, config or case.files.config, tensors)


def test_an_unknown_architecture_lists_what_is_known_and_what_is_close():
    with pytest.raises(UnsupportedError) as error:
        build("huggingface", "qwen", {}, {})
    assert "'qwen' is not supported" in str(error.value)
    assert "llama" in error.value.why
    assert "qwen2" in error.value.fix
    with pytest.raises(UnsupportedError) as error:
        build("gguf", "mistral", {}, {})
    assert error.value.fields["key"] == "general.architecture"


def test_a_missing_tensor_is_named_with_the_weight_that_needs_it(tiny):
    with pytest.raises(ModelFileError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' is missing"):
        with_tensors(tiny("llama"), drop=["model.layers.1.mlp.up_proj.weight"])
    with pytest.raises(ModelFileError, match=r"'blk\.1\.ffn_up\.weight' is missing"):
        with_tensors(tiny("llama", "gguf"), drop=["blk.1.ffn_up.weight"])


def test_a_configuration_that_does_not_fit_the_tensors_is_an_error(tiny):
    case = tiny("llama")
    for key, value in (
        ("vocab_size", 255),
        ("vocab_size", 257),
        ("intermediate_size", 64),
        ("head_dim", 8),
        ("hidden_size", 36),
    ):
        with pytest.raises(ModelFileError, match=r"has shape \[\d+.*asks for"):
            with_tensors(case, config={**case.files.config, key: value})


def test_fused_tensors_are_checked_too(tiny):
    for name, key in (("phi3", "num_key_value_heads"), ("internlm2", "num_key_value_heads"), ("phi3", "intermediate_size")):
        case = tiny(name)
        value = {"num_key_value_heads": case.files.config["num_attention_heads"], "intermediate_size": 96}[key]
        with pytest.raises(ModelFileError, match="has shape"):
            with_tensors(case, config={**case.files.config, key: value})


def test_fused_tensors_must_be_used_up(tiny):
    """A fused tensor with more rows than its parts means that the configuration is not its own."""
    for name, key, value in (("phi3", "intermediate_size", 32), ("internlm2", "num_key_value_heads", 1)):
        case = tiny(name)
        with pytest.raises(ModelFileError):
            with_tensors(case, config={**case.files.config, key: value})


def test_a_bias_that_no_key_announces_is_an_error_not_left_out(tiny):
    case = tiny("llama")
    with pytest.raises(
        ModelFileError, match=r"'model\.layers\.0\.self_attn\.\w+\.bias' is in the file, but this llama model has no place"
    ):
        with_tensors(case, config={**case.files.config, "attention_bias": False})
    bias = source("blk.1.attn_norm.bias", (32,))
    with pytest.raises(ModelFileError, match=r"'blk\.1\.attn_norm\.bias' is in the file"):
        with_tensors(tiny("llama", "gguf"), blk__1__attn_norm__bias=bias)


def test_layers_beyond_the_configuration_are_an_error(tiny):
    case = tiny("llama")
    with pytest.raises(ModelFileError, match="is in layer 1, but the configuration has 1 layers"):
        with_tensors(case, config={**case.files.config, "num_hidden_layers": 1})


def test_what_may_be_left_out_is_said_in_one_line(tiny):
    case = tiny("llama_linear")
    model = with_tensors(case, lm_head__weight=source("lm_head.weight", (256, 32)))
    assert model.notes == ("1 tensor left out, tied to the embedding: lm_head.weight",)
    tables = {f"model__layers__{i}__self_attn__rotary_emb__inv_freq": source("inv_freq", (8,)) for i in range(2)}
    assert with_tensors(case, **tables).notes == ()
    assert tiny("gemma3_nested").model.notes == (
        "1 tensor left out, not part of the text model: vision_tower.embeddings.weight",
    )


def test_a_gguf_tokenizer_of_another_size_is_an_error(tiny):
    case = tiny("llama", "gguf")
    tokens = {"tokenizer.ggml.tokens": ["a"] * 255}
    with pytest.raises(ModelFileError, match=r"the tokenizer has 255 tokens, but 'token_embd\.weight' has 256 rows"):
        with_tensors(case, config={**case.files.config, **tokens})


def test_a_gguf_file_without_an_embedding_is_an_error(tiny):
    with pytest.raises(ModelFileError, match=r"'token_embd\.weight'"):
        with_tensors(tiny("llama", "gguf"), drop=["token_embd.weight"])


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_rope_factors_must_be_positive_and_finite(bad, tiny):
    case = tiny("llama_llama3", "gguf")
    values = np.ones(8, np.float32)
    values[3] = bad
    tensor = replace(case.files.tensors["rope_freqs.weight"], data=values.view(np.uint8), read=None)
    with pytest.raises(ModelFileError, match="positive finite"):
        with_tensors(case, rope_freqs__weight=tensor)
    with pytest.raises(ModelFileError, match="gives shape"):
        with_tensors(case, rope_freqs__weight=source("rope_freqs.weight", (7,)))


def test_longrope_without_its_factors_is_an_error(tiny):
    case = tiny("phi3", "gguf")
    names = ["rope_factors_long.weight", "rope_factors_short.weight"]
    config = {**case.files.config, "phi3.rope.scaling.type": "longrope"}
    with pytest.raises(ModelFileError, match="longrope"):
        with_tensors(case, drop=names, config=config)


def test_model_says_its_size_and_context(tiny):
    model = tiny("llama").model
    assert (model.vocab_size, model.hidden_size, model.num_layers, model.max_position) == (256, 32, 2, 64)
    assert tiny("llama_dynamic").model.max_position == 40
    assert tiny("llama_dynamic", limit=16).model.max_position == 16
    case = tiny("llama_dynamic")
    far = build("huggingface", "llama", case.files.config, case.files.tensors, context_limit=1000)
    assert far.max_position == 48  # factor 3 times 16
