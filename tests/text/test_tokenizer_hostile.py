"""Damaged and inconsistent vocabularies: one typed error naming key and value, never another tokenizer."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastllm.core.errors import TokenizerError, UnsupportedError
from fastllm.text import Tokenizer

CONFIG = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def without(metadata: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in metadata.items() if k != f"tokenizer.ggml.{key}"}


@pytest.mark.parametrize("key", ["model", "tokens", "merges"])
def test_a_missing_key_is_named(key, gguf_metadata):
    with pytest.raises(TokenizerError, match=f"tokenizer.ggml.{key} is None"):
        Tokenizer.from_gguf(without(gguf_metadata("gpt-2"), key))


def test_scores_are_required_and_complete(llama_metadata):
    with pytest.raises(TokenizerError, match="scores"):
        Tokenizer.from_gguf(llama_metadata(scores=None))
    scores = llama_metadata()["tokenizer.ggml.scores"]
    with pytest.raises(TokenizerError, match="one entry for each"):
        Tokenizer.from_gguf(llama_metadata(scores=scores[:-1]))
    with pytest.raises(TokenizerError, match=r"scores\[5\].*finite"):
        Tokenizer.from_gguf(llama_metadata(scores=[*scores[:5], float("nan"), *scores[6:]]))


@pytest.mark.parametrize("name", [None, "no-such-rule", 3, "GPT-2"])
def test_an_unknown_split_rule_is_never_the_default(name, gguf_metadata):
    with pytest.raises(UnsupportedError, match=r"tokenizer.ggml.pre is .*known: .*smollm"):
        Tokenizer.from_gguf(gguf_metadata("gpt-2") | {"tokenizer.ggml.pre": name})


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", 7])
def test_other_kinds_are_unsupported(kind, gguf_metadata):
    with pytest.raises(UnsupportedError, match="known: llama"):
        Tokenizer.from_gguf(gguf_metadata("gpt-2") | {"tokenizer.ggml.model": kind})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokens", "abc"), ("tokens", []), ("tokens", 3), ("tokens", ["a", 3]), ("tokens", [b"a"]), ("tokens", ["x" * 70_000]),
        ("tokens", ["a", "a"]), ("token_type", [1]), ("token_type", "x"), ("token_type", [[1]]), ("merges", ["ab"]),
        ("merges", ["a \x00missing"]), ("merges", [" "]), ("merges", [""]), ("merges", 5), ("bos_token_id", -1),
        ("eos_token_id", 10**9), ("eos_token_id", 2**64), ("eos_token_id", "2"), ("eos_token_id", True), ("eos_token_id", 1.5),
        ("eot_token_id", 10**9), ("add_bos_token", 1), ("add_bos_token", "yes"),
    ],
)  # fmt: skip
def test_a_value_of_another_type_or_range_is_named(key, value, gguf_metadata):
    with pytest.raises(TokenizerError, match=key):
        Tokenizer.from_gguf(gguf_metadata("gpt-2") | {f"tokenizer.ggml.{key}": value})


def test_types_out_of_range_and_bad_byte_tokens(llama_metadata):
    types = llama_metadata()["tokenizer.ggml.token_type"]
    with pytest.raises(TokenizerError, match=r"token_type\[9\] is 7"):
        Tokenizer.from_gguf(llama_metadata(token_type=np.array([*types[:9], 7, *types[10:]])))
    normal = types.index(1)
    with pytest.raises(TokenizerError, match="byte token"):
        Tokenizer.from_gguf(llama_metadata(token_type=[*types[:normal], 6, *types[normal + 1 :]]))


def test_an_answer_must_be_able_to_end(gguf_metadata):
    metadata = without(gguf_metadata("gpt-2"), "eos_token_id")
    metadata["tokenizer.ggml.tokens"] = [t.replace("<|", "<[") for t in metadata["tokenizer.ggml.tokens"]]
    with pytest.raises(TokenizerError, match="no end token"):
        Tokenizer.from_gguf(metadata)


# tokenizer.json --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b"version https://git-lfs.github.com/spec/v1\n", b'{"model": {"type": "BPE"}}',
     b'{"model": {"type": "BPE", "vocab": {"a": 1e400}}}', b'{"model":{"type":"Unigram","vocab":[["a"]]}}', b"1" * 5000],
)  # fmt: skip
def test_a_damaged_json_file_is_one_error(data):
    with pytest.raises((TokenizerError, UnsupportedError)):
        Tokenizer.from_tokenizer_json(data, CONFIG)


def edited(data_dir, **model: Any) -> bytes:
    document = json.loads((data_dir / "tiny_gpt-2.json").read_text(encoding="utf-8"))
    document["model"].update(model)
    return json.dumps(document).encode()


def test_gaps_doubled_ids_and_inconsistent_merges(data_dir):
    vocab = json.loads((data_dir / "tiny_gpt-2.json").read_text(encoding="utf-8"))["model"]["vocab"]
    first = next(iter(vocab))
    with pytest.raises(TokenizerError, match="no token has this id"):
        Tokenizer.from_tokenizer_json(edited(data_dir, vocab=vocab | {"zzzz": len(vocab) + 5}, merges=[]), CONFIG)
    with pytest.raises(TokenizerError, match="is that of"):
        Tokenizer.from_tokenizer_json(edited(data_dir, vocab=vocab | {"zzzz": vocab[first]}, merges=[]), CONFIG)
    with pytest.raises(TokenizerError):
        Tokenizer.from_tokenizer_json(edited(data_dir, merges=[["q", "nothing"]]), CONFIG)
    with pytest.raises(UnsupportedError, match="WordPiece"):
        Tokenizer.from_tokenizer_json(edited(data_dir, type="WordPiece"), CONFIG)
    with pytest.raises(TokenizerError, match="not in the vocabulary"):
        Tokenizer.from_tokenizer_json(edited(data_dir), {"eos_token": "nope"})
    with pytest.raises(TokenizerError, match="eos_token_id"):
        Tokenizer.from_tokenizer_json(edited(data_dir), CONFIG, generation_config={"eos_token_id": [10**9]})


# tokenizer.model -------------------------------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=150)
def test_a_cut_or_changed_sentencepiece_file_never_crashes(data_dir, data):
    raw = bytearray((data_dir / "tiny_bpe.model").read_bytes())
    cut = data.draw(st.integers(0, len(raw)))
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        tokenizer = Tokenizer.from_sentencepiece(bytes(raw[:cut]))
    except (TokenizerError, UnsupportedError):
        return
    ids = tokenizer.encode("the river 😀", add_special=True, parse_special=True)
    assert all(0 <= index < tokenizer.vocab_size for index in ids)


def test_a_length_beyond_the_file_is_refused_before_anything_is_read():
    with pytest.raises(TokenizerError, match="asks for"):
        Tokenizer.from_sentencepiece(b"\x0a\xff\xff\xff\xff\x7f")
    with pytest.raises(TokenizerError, match="64 bits"):
        Tokenizer.from_sentencepiece(b"\xff" * 12)
