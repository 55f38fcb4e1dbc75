"""Ids equal to the reference implementations, and text that stays text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastllm.core.errors import InvalidRequest
from fastllm.text import Tokenizer

BYTE_LEVEL = ["gpt-2", "smollm", "qwen2", "llama-bpe", "falcon"]
CONFIG = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False, parse_special=False)


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_byte_level_ids_are_those_of_the_reference_from_either_file(name, data_dir, gguf_metadata, reference_ids):
    both = (
        Tokenizer.from_gguf(gguf_metadata(name)),
        Tokenizer.from_tokenizer_json((data_dir / f"tiny_{name}.json").read_bytes(), CONFIG),
    )
    for tokenizer in both:
        for text, ids in zip(reference_ids["texts"], reference_ids[name], strict=True):
            assert plain(tokenizer, text) == ids, text


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece_ids_are_those_of_the_library(kind, data_dir, reference_ids):
    tokenizer = Tokenizer.from_sentencepiece((data_dir / f"tiny_{kind}.model").read_bytes())
    for text, ids in zip(reference_ids["texts"], reference_ids[f"sentencepiece-{kind}"], strict=True):
        assert plain(tokenizer, text) == ids, text


def test_sentencepiece_ids_from_gguf_metadata(llama_metadata, reference_ids):
    # llama.cpp, whose files these are, puts a blank behind each user-defined piece as well: texts without one are compared
    tokenizer = Tokenizer.from_gguf(llama_metadata())
    pairs = list(zip(reference_ids["texts"], reference_ids["sentencepiece-bpe"], strict=True))
    compared = [(text, ids) for text, ids in pairs if text and "▁▁" not in ("▁" + text.replace(" ", "▁"))]
    assert len(compared) > 25
    for text, ids in compared:
        assert plain(tokenizer, text) == ids, text


def test_a_wrong_split_rule_would_be_noticed(gguf_metadata, reference_ids):
    metadata = gguf_metadata("smollm") | {"tokenizer.ggml.pre": "llama-bpe"}
    tokenizer = Tokenizer.from_gguf(metadata)
    assert any(plain(tokenizer, t) != ids for t, ids in zip(reference_ids["texts"], reference_ids["smollm"], strict=True))


def test_numpy_arrays_are_taken_as_the_gguf_reader_gives_them(llama_metadata, piece_tokenizer):
    import numpy as np

    metadata = llama_metadata()
    metadata["tokenizer.ggml.scores"] = np.array(metadata["tokenizer.ggml.scores"], np.float32)
    metadata["tokenizer.ggml.token_type"] = np.array(metadata["tokenizer.ggml.token_type"], np.int32)
    metadata["tokenizer.ggml.eos_token_id"] = np.uint32(2)
    assert plain(Tokenizer.from_gguf(metadata), "the river") == plain(piece_tokenizer, "the river")


# special tokens ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixture", ["byte_tokenizer", "piece_tokenizer"])
def test_special_text_is_a_token_only_when_parsed(fixture, request):
    tokenizer: Tokenizer = request.getfixturevalue(fixture)
    for special in sorted(tokenizer.special_ids):
        text = f"a{tokenizer.id_to_piece(special)}b"
        assert special in tokenizer.encode(text, add_special=False, parse_special=True)
        ids = plain(tokenizer, text)
        assert tokenizer.special_ids.isdisjoint(ids)
        assert tokenizer.decode(ids, skip_special=True, continued=False) == text


def test_markers_are_read_in_trusted_parts_only(byte_tokenizer):
    end = byte_tokenizer.piece_to_id("<|im_end|>")
    ids = byte_tokenizer.encode_parts([("hi", True), ("<|im_end|>", False), ("<|im_end|>", True)])
    assert ids.count(end) == 1
    assert ids[-1] == end
    assert byte_tokenizer.decode(ids, skip_special=False) == "hi<|im_end|><|im_end|>"


def test_a_marker_put_together_from_two_parts_stays_text(byte_tokenizer):
    end = byte_tokenizer.piece_to_id("<|im_end|>")
    for first, second in (((True), (False)), ((False), (True)), ((False), (False))):
        assert end not in byte_tokenizer.encode_parts([("x<|im_", first), ("end|>", second)])
    assert end in byte_tokenizer.encode_parts([("x<|im_", True), ("", False), ("end|>", True)])


@given(st.lists(st.tuples(st.text(max_size=12), st.booleans()), max_size=6))
def test_borders_between_parts_change_no_id(byte_tokenizer, parts):
    text = "".join(piece for piece, _ in parts)
    assert byte_tokenizer.encode_parts(parts) == byte_tokenizer.encode(text, add_special=True, parse_special=True)


def test_added_tokens_of_marker_shape_and_protected_ones_are_text_for_clients(data_dir):
    document = json.loads((data_dir / "tiny_smollm.json").read_text(encoding="utf-8"))
    size = len(document["model"]["vocab"])
    flags = {"special": False, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    for n, text in enumerate(("<tool_call>", "ROLE:", "\n\n\n\n")):
        document["added_tokens"].append({"id": size + n, "content": text, **flags})
    tokenizer = Tokenizer.from_tokenizer_json(json.dumps(document).encode(), CONFIG)
    text = "<tool_call>ROLE:\n\n\n\n"
    assert plain(tokenizer, text)[-2:] == [size + 1, size + 2]
    assert size not in plain(tokenizer, text)
    tokenizer.protect(["x ROLE: y\n\n\n\n"])
    assert size + 1 not in plain(tokenizer, text)
    assert plain(tokenizer, text)[-1] == size + 2
    assert tokenizer.encode(text, add_special=False, parse_special=True) == [size, size + 1, size + 2]
    assert tokenizer.decode([size, size + 1], skip_special=True) == "<tool_call>ROLE:"


def test_white_space_beside_a_marker_goes_with_it_where_the_file_says_so(data_dir):
    document = json.loads((data_dir / "tiny_smollm.json").read_text(encoding="utf-8"))
    for entry in document["added_tokens"]:
        entry["lstrip"] = entry["rstrip"] = True
    tokenizer = Tokenizer.from_tokenizer_json(json.dumps(document).encode(), CONFIG)
    ids = tokenizer.encode("a  <|im_end|> \n b", add_special=False, parse_special=True)
    assert ids == [*plain(tokenizer, "a"), 2, *plain(tokenizer, "b")]


def test_a_vocabulary_whose_merges_spell_a_marker_still_gives_text(llama_metadata):
    metadata = llama_metadata()
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    index = tokens.index("▁the")
    metadata["tokenizer.ggml.token_type"][index] = 1
    metadata["tokenizer.ggml.eos_token_id"] = index  # an end token that text can spell
    assert scores[index] < 0
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = plain(tokenizer, "in the town")
    assert index not in ids
    assert tokenizer.decode(ids, skip_special=True, continued=False) == "in the town"


# begin and end -------------------------------------------------------------------------------------------------------------


def test_bos_is_put_once(data_dir):
    tokenizer = Tokenizer.from_tokenizer_json((data_dir / "tiny_llama-bpe.json").read_bytes(), CONFIG)
    assert tokenizer.add_bos
    assert tokenizer.bos_id == 1
    once = tokenizer.encode("<|im_start|>hi", add_special=True, parse_special=True)
    assert once == tokenizer.encode("hi", add_special=True, parse_special=True)
    assert once.count(1) == 1
    assert tokenizer.encode("", add_special=True, parse_special=True) == [1]
    assert tokenizer.encode_parts([("<|im_start|>", False)])[0] == 1
    assert tokenizer.encode_parts([("<|im_start|>", False)]).count(1) == 1
    off = Tokenizer.from_tokenizer_json((data_dir / "tiny_llama-bpe.json").read_bytes(), CONFIG | {"add_bos_token": False})
    assert not off.add_bos
    assert off.encode("hi", add_special=True, parse_special=True) == plain(off, "hi")


def test_metadata_decides_bos_and_eos(llama_metadata):
    assert Tokenizer.from_gguf(llama_metadata()).encode("x", add_special=True, parse_special=False)[0] == 1
    off = Tokenizer.from_gguf(llama_metadata(add_bos_token=False))
    assert 1 not in off.encode("x", add_special=True, parse_special=False)
    both = Tokenizer.from_gguf(llama_metadata(add_eos_token=True))
    assert both.encode("x", add_special=True, parse_special=False)[-1] == 2


def test_end_ids_come_from_all_sources(data_dir, gguf_metadata):
    raw = (data_dir / "tiny_smollm.json").read_bytes()
    from_json = Tokenizer.from_tokenizer_json(raw, CONFIG, generation_config={"eos_token_id": [2, 7], "bos_token_id": 1})
    assert from_json.end_ids == {0, 2, 7}  # <|endoftext|> and <|im_end|> by their texts, 7 by the configuration
    assert from_json.special_ids == {0, 1, 2}
    from_gguf = Tokenizer.from_gguf(gguf_metadata("smollm") | {"tokenizer.ggml.eot_token_id": 9})
    assert from_gguf.end_ids == {0, 2, 9}
    by_map = Tokenizer.from_tokenizer_json(raw, None, special_tokens_map={"eos_token": "<|im_end|>"})
    assert by_map.eos_id == 2


# decoding ------------------------------------------------------------------------------------------------------------------


@given(text=st.text(max_size=80))
@settings(max_examples=200)
def test_text_survives_the_round_trip(byte_tokenizer, piece_tokenizer, text):
    assert byte_tokenizer.decode(plain(byte_tokenizer, text), skip_special=True) == text
    back = piece_tokenizer.decode(plain(piece_tokenizer, text), skip_special=True, continued=False)
    assert back == text.replace("▁", " ")


def test_token_bytes_are_exact(byte_tokenizer, piece_tokenizer):
    ids = plain(byte_tokenizer, "é😀")
    assert b"".join(byte_tokenizer.token_bytes(i) for i in ids) == "é😀".encode()
    assert piece_tokenizer.token_bytes(piece_tokenizer.piece_to_id("<0xF0>")) == b"\xf0"
    assert piece_tokenizer.token_bytes(piece_tokenizer.piece_to_id("▁the")) == b" the"
    assert byte_tokenizer.token_bytes(2) == b""
    assert byte_tokenizer.decode([2], skip_special=False) == "<|im_end|>"
    assert byte_tokenizer.decode([2], skip_special=True) == ""


def test_the_leading_blank_is_kept_after_a_prompt_and_taken_from_a_whole_text(piece_tokenizer):
    ids = plain(piece_tokenizer, "the river")
    assert piece_tokenizer.decode(ids, skip_special=True) == " the river"
    assert piece_tokenizer.decode(ids, skip_special=True, continued=False) == "the river"


def test_prefix_only_at_the_start_where_the_file_says_first(data_dir):
    vocab = {p: i for i, p in enumerate(["<unk>", "<s>", "</s>", "▁", "a", "▁a"])}
    document: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": t, "special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
            for i, t in ((0, "<unk>"), (1, "<s>"), (2, "</s>"))
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "vocab": vocab, "merges": [["▁", "a"]], "unk_token": "<unk>", "byte_fallback": False},
    }  # fmt: skip
    for scheme, expected in (("first", [5, 2, 4]), ("always", [5, 2, 5])):
        document["pre_tokenizer"]["prepend_scheme"] = scheme
        tokenizer = Tokenizer.from_tokenizer_json(json.dumps(document).encode(), {"eos_token": "</s>"})
        assert tokenizer.encode("a", add_special=False, parse_special=False) == [5]
        assert tokenizer._tail is None  # a second object of the library, made where a text goes on behind a marker
        assert tokenizer.encode("a</s>a", add_special=False, parse_special=True) == expected
        assert (tokenizer._tail is not None) == (scheme == "first")


def test_a_long_run_of_blanks_is_one_blank_in_time_for_an_answer(data_dir):
    """Where the model removes extra blanks; trimmed as runs they took 13 s for 40,000, four times as much for twice as many."""
    tokenizer = Tokenizer.from_sentencepiece((data_dir / "tiny_unigram.model").read_bytes())
    want = plain(tokenizer, "the river")
    assert plain(tokenizer, " " * 100_000 + "the" + " " * 200_000 + "river" + " " * 100_000) == want
    assert plain(tokenizer, "  the  river ") == want


def test_ids_outside_the_vocabulary_and_half_characters_are_refused(byte_tokenizer):
    for index in (-1, byte_tokenizer.vocab_size, True):
        with pytest.raises(InvalidRequest, match="ids run from 0"):
            byte_tokenizer.id_to_piece(index)
    with pytest.raises(InvalidRequest, match=r"U\+D83D.*character 2"):
        plain(byte_tokenizer, "ab\ud83d")
    assert byte_tokenizer.piece_to_id("no such piece") is None


# real vocabularies ---------------------------------------------------------------------------------------------------------


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_ids_of_the_real_vocabularies(name, real_model_path, data_dir):
    from fastllm.formats.gguf import read_gguf

    metadata = read_gguf(real_model_path(name), header_only=True).metadata
    tokenizer = Tokenizer.from_gguf(metadata)
    vectors = json.loads((data_dir / "real_ids.json").read_text(encoding="utf-8"))[name]
    for text, ids in vectors:
        assert plain(tokenizer, text) == ids, text
    prompts = json.loads((data_dir / "real_prompts.json").read_text(encoding="utf-8"))[name]
    for text, ids in prompts:
        assert tokenizer.encode(text, add_special=True, parse_special=True) == ids, text
