"""Opening models: what a folder and a GGUF file give, and what is refused with which hint."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from fastllm.core.errors import ModelFileError, UnsupportedError
from fastllm.formats import open_model

CONFIG = {"model_type": "llama", "hidden_size": 4}


@pytest.fixture
def folder(tmp_path, data):
    """A complete small model folder."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes((data / "tiny.safetensors").read_bytes())
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    return tmp_path


def put(folder: Path, name: str, value: object) -> None:
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def test_a_gguf_file_is_a_whole_model(data):
    with open_model(data / "tiny.gguf") as model:
        assert (model.kind, model.architecture, model.tokenizer.kind) == ("gguf", "llama", "gguf")
        assert model.config["t.array.i32"] == [1, -2, 3]
        assert not any(k.startswith("tokenizer.") for k in model.config)
        assert isinstance(model.tokenizer.gguf["tokenizer.ggml.scores"], np.ndarray)
        assert model.tokenizer.gguf["tokenizer.ggml.tokens"][39] == "piece39"
        assert model.chat_template == "{{ messages[0].content }}"
        assert model.size_bytes == sum(t.nbytes for t in model.tensors.values())
        json.dumps(model.config)
        model.check_unchanged()
    assert model.tensors == {}


def test_a_gguf_file_without_architecture_is_refused(write, builder, refusal):
    with refusal("'general.architecture' is missing"):
        open_model(write("a.gguf", builder().tensor("w", (8,)).build()))
    with refusal("'general.architecture' is a int"):
        open_model(write("a.gguf", builder().pair("general.architecture", 4, bytes(4)).build()))
    with refusal("'tokenizer.chat_template' is a bool"):
        open_model(write("a.gguf", builder().text("general.architecture", "x").pair("tokenizer.chat_template", 7, b"\1").build()))


def test_long_arrays_in_the_configuration_stay_views(write, builder):
    raw = builder().text("general.architecture", "x").pair("x.list", 9, struct.pack("<IQ", 0, 70_000) + bytes(70_000)).build()
    assert isinstance(open_model(write("a.gguf", raw)).config["x.list"], np.ndarray)


def test_a_folder_is_a_whole_model(folder):
    put(folder, "generation_config.json", {"eos_token_id": [1, 2]})
    put(folder, "tokenizer_config.json", {"chat_template": "T", "bos_token": "<s>"})
    put(folder, "special_tokens_map.json", {"eos_token": "</s>"})
    with open_model(folder) as model:
        assert (model.kind, model.architecture, model.config) == ("huggingface", "llama", CONFIG)
        assert model.generation_config == {"eos_token_id": [1, 2]}
        assert (model.tokenizer.kind, model.tokenizer.read()) == ("tokenizer.json", b'{"version": "1.0"}')
        assert model.tokenizer.config["bos_token"] == "<s>"
        assert model.tokenizer.special_tokens == {"eos_token": "</s>"}
        assert model.chat_template == "T"
        assert "f32" in model.tensors
        assert model.notes == []


def test_the_jinja_file_comes_before_the_configuration(folder):
    put(folder, "tokenizer_config.json", {"chat_template": "old"})
    put(folder, "chat_template.jinja", "néw")
    assert open_model(folder).chat_template == "néw"


def test_of_named_templates_the_default_is_taken(folder):
    put(folder, "tokenizer_config.json", {"chat_template": [{"name": "tool_use", "template": "A"}, {"name": "default", "template": "B"}]})
    assert open_model(folder).chat_template == "B"


@pytest.mark.parametrize("template", [3, {"a": 1}, [{"name": "x", "template": "A"}], [{"name": "default", "template": 3}], ["x"]])
def test_a_template_of_another_kind_is_refused(folder, template, refusal):
    put(folder, "tokenizer_config.json", {"chat_template": template})
    with refusal("chat_template"):
        open_model(folder)


def test_sentencepiece_is_used_only_without_tokenizer_json(folder):
    (folder / "tokenizer.model").write_bytes(b"\n\x0e")
    assert open_model(folder).tokenizer.kind == "tokenizer.json"
    (folder / "tokenizer.json").unlink()
    model = open_model(folder)
    assert (model.tokenizer.kind, model.tokenizer.read()) == ("sentencepiece", b"\n\x0e")
    (folder / "tokenizer.model").unlink()
    assert open_model(folder).tokenizer is None


def test_code_of_the_model_is_ignored_and_said(folder):
    put(folder, "config.json", {**CONFIG, "auto_map": {"AutoModel": "evil.Model"}})
    (folder / "evil.py").write_text("raise SystemExit('run')")
    assert "auto_map" in open_model(folder).notes[0]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"model_type": "llama", "x": NaN}', "NaN"),
        ('{"model_type": "llama", "x": 1e999}', "too large"),
        ('{"model_type": "llama", "model_type": "x"}', "twice"),
        ('{"model_type": "llama", "x": ' + "[" * 500 + "]" * 500 + "}", "nested"),
        ('{"model_type": 3}', "'model_type' is '3'"),
        ("{}", "'model_type' is 'None'"),
        ("[]", "not an object"),
        ("", "empty"),
        ("version https://git-lfs.github.com/spec/v1\n", "Git-LFS"),
    ],
)
def test_bad_configurations_are_refused(folder, refusal, text, match):
    put(folder, "config.json", text)
    with refusal(match):
        open_model(folder)


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_other_json_files_are_as_strict(folder, refusal, name):
    put(folder, name, '{"a": Infinity}')
    with refusal(f"{name}.*Infinity"):
        open_model(folder)


def test_a_configuration_that_leaves_the_folder_is_refused(folder, refusal, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("x") / "config.json"
    (folder / "config.json").rename(elsewhere)
    (folder / "config.json").symlink_to(elsewhere)
    with refusal("symlink out of the model's folder"):
        open_model(folder)


def test_a_dangling_or_looping_member_is_refused(folder, refusal):
    (folder / "generation_config.json").symlink_to(folder / "nothing")
    with refusal("no such file"):
        open_model(folder)
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").symlink_to(folder / "generation_config.json")
    with refusal("loop of symlinks"):
        open_model(folder)


def test_pickled_weights_are_never_opened(folder, refusal):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with refusal("pickled weights are never opened: pytorch_model.bin", UnsupportedError):
        open_model(folder)
    with refusal("pickled weights", UnsupportedError):
        open_model(folder / "pytorch_model.bin")


def test_shards_without_index_are_refused(folder, refusal):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    with refusal("neither model.safetensors nor model.safetensors.index.json"):
        open_model(folder)


def test_a_folder_without_weights_or_configuration_is_refused(folder, refusal, data):
    (folder / "model.safetensors").unlink()
    with refusal("no weights"):
        open_model(folder)
    (folder / "config.json").unlink()
    with refusal("no config.json"):
        open_model(folder)
    (folder / "a.gguf").write_bytes((data / "tiny.gguf").read_bytes())
    with refusal("GGUF files: a.gguf"):
        open_model(folder)


def test_parts_of_models_get_a_hint(folder, refusal, write, builder):
    with refusal("not a whole model", ModelFileError):
        open_model(folder / "model.safetensors")
    with refusal("holds no weights", ModelFileError):
        open_model(folder / "config.json")
    with refusal("not a safetensors file", ModelFileError):
        open_model(write("a.flm", b"flm?"))
    with refusal("a GGUF file, not a model", ModelFileError):
        open_model(write("model", builder().build()))
    with refusal("no such file", ModelFileError):
        open_model(folder / "absent")


def test_a_failed_open_leaves_no_descriptor_behind(folder, write, builder):
    path = write("a.gguf", builder().tensor("w", (8, 0)).build())
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        with pytest.raises(ModelFileError):
            open_model(path)
        (folder / "model.safetensors").write_bytes(b"12345678{")
        with pytest.raises(ModelFileError):
            open_model(folder)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_closing_returns_descriptors_and_maps(folder):
    before = len(list(Path("/proc/self/fd").iterdir()))
    model = open_model(folder)
    assert str(folder) in Path("/proc/self/maps").read_text()
    model.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert str(folder) not in Path("/proc/self/maps").read_text()
