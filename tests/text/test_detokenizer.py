"""Streamed text equals decoded text, whatever the tokens and however stops lie across them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastllm.core.errors import InvalidRequest
from fastllm.text import IncrementalDetokenizer, Tokenizer
from fastllm.text.detokenizer import special_stops

TEXT = st.text(alphabet=st.sampled_from(list("ab \n<|>é你好😀👩\u200d🇩▁")) | st.characters(exclude_categories=["Cs"]), max_size=40)


def run(tokenizer: Tokenizer, ids: list[int], **options: object) -> tuple[list[str], IncrementalDetokenizer]:
    stream = IncrementalDetokenizer(tokenizer, **options)  # type: ignore[arg-type]
    return [*(stream.push(index) for index in ids), stream.finish()], stream


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule, character by character: the first stop that is complete wins, the longest of those that are at once."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(data=st.data())
@settings(max_examples=100)
def test_many_at_once_are_the_same_pieces(byte_tokenizer, piece_tokenizer, data):
    for tokenizer in (byte_tokenizer, piece_tokenizer):
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
        options = {"skip_special": data.draw(st.booleans()), "keep": data.draw(st.sets(st.sampled_from(sorted(tokenizer.special_ids))))}
        cut = data.draw(st.integers(0, len(ids)))
        pieces, _ = run(tokenizer, ids, **options)
        stream = IncrementalDetokenizer(tokenizer, **options)
        assert [*stream.push_all(ids[:cut]), *stream.push_all(ids[cut:]), stream.finish()] == [*filter(None, pieces[:-1]), pieces[-1]]


@given(text=TEXT)
@settings(max_examples=200)
def test_pieces_join_to_the_text_and_no_piece_is_half_a_character(byte_tokenizer, piece_tokenizer, text):
    for tokenizer in (byte_tokenizer, piece_tokenizer):
        ids = tokenizer.encode(text, add_special=False, parse_special=False)
        pieces, _ = run(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special=True)
        if "\ufffd" not in text:
            assert all("\ufffd" not in piece for piece in pieces)


@given(data=st.data(), skip=st.booleans())
@settings(max_examples=300)
def test_any_ids_stream_to_what_they_decode_to(byte_tokenizer, piece_tokenizer, data, skip):
    for tokenizer in (byte_tokenizer, piece_tokenizer):
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
        whole = tokenizer.decode(ids, skip_special=skip)
        pieces, stream = run(tokenizer, ids, skip_special=skip)
        assert "".join(pieces) == whole
        assert stream.stopped is None


@given(data=st.data())
@settings(max_examples=300)
def test_bytes_split_anywhere_and_stops_found_across_tokens(piece_tokenizer, data):
    # one byte token per byte: the finest split of any text, invalid bytes included
    text = data.draw(st.text(alphabet="abc é😀", max_size=20))
    raw = data.draw(st.sampled_from([text.encode(), text.encode()[1:], text.encode()[:-1] if text else b""]))
    stops = data.draw(st.lists(st.text(alphabet="abc é😀\ufffd", min_size=1, max_size=4), max_size=4))
    ids = [piece_tokenizer.piece_to_id(f"<0x{byte:02X}>") for byte in raw]
    pieces, stream = run(piece_tokenizer, ids, stop=stops)
    assert ("".join(pieces), stream.stopped) == expected(piece_tokenizer.decode(ids, skip_special=True), stops)


@given(data=st.data())
@settings(max_examples=200)
def test_stops_do_not_depend_on_the_tokens(byte_tokenizer, data):
    text = data.draw(st.text(alphabet="ab <|>", max_size=30))
    stops = data.draw(st.lists(st.text(alphabet="ab <|>", min_size=1, max_size=5), max_size=4))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    ids = [i for part in parts for i in byte_tokenizer.encode(part, add_special=False, parse_special=False)]
    pieces, stream = run(byte_tokenizer, ids, stop=stops)
    assert ("".join(pieces), stream.stopped) == expected(text, stops)


def test_a_possible_stop_is_held_and_released_in_order(byte_tokenizer):
    stream = IncrementalDetokenizer(byte_tokenizer, stop=["abcd"])
    ids = {c: byte_tokenizer.piece_to_id(c) for c in "abcdx"}
    assert [stream.push(ids[c]) for c in "xabcabx"] == ["x", "", "", "", "abc", "", "abx"]
    assert [stream.push(ids[c]) for c in "abc"] == ["", "", ""]
    assert stream.finish() == "abc"
    again = IncrementalDetokenizer(byte_tokenizer, stop=["abcd"])
    assert "".join(again.push(ids[c]) for c in "xabcdx") == "x"
    assert again.stopped == "abcd"
    assert again.push(ids["a"]) == again.finish() == ""


def test_an_invalid_tail_is_one_replacement_character(piece_tokenizer):
    stream = IncrementalDetokenizer(piece_tokenizer)
    ids = [piece_tokenizer.piece_to_id(f"<0x{byte:02X}>") for byte in "😀".encode()[:3]]
    assert [stream.push(index) for index in ids] == ["", "", ""]
    assert stream.finish() == "\ufffd"


def test_a_stop_that_is_a_special_token_stops_at_its_id(byte_tokenizer):
    stream = IncrementalDetokenizer(byte_tokenizer, stop=["<|im_end|>", "ab"])
    a = byte_tokenizer.piece_to_id("a")
    assert stream.push(a) == ""
    assert stream.push(2) == "a"
    assert stream.stopped == "<|im_end|>"
    for text in ("<|im_end|>",):
        spelt = byte_tokenizer.encode(text, add_special=False, parse_special=False)
        assert "".join(run(byte_tokenizer, spelt, stop=[text])[0]) == ""


def test_stops_are_looked_for_among_special_tokens_alone(byte_tokenizer, piece_tokenizer, monkeypatch):
    """Each answer of a request asks, in the loop of the server: no search through the vocabulary."""

    def search(tokenizer, piece):
        raise AssertionError(f"{piece!r} is searched for among all tokens")

    monkeypatch.setattr(Tokenizer, "piece_to_id", search)
    for tokenizer in (byte_tokenizer, piece_tokenizer):
        special = {tokenizer.id_to_piece(i): i for i in tokenizer.special_ids}
        plain = next(tokenizer.id_to_piece(i) for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids)
        assert special_stops(tokenizer, [*special, plain, "no such piece"]) == {i: text for text, i in special.items()}
        assert special_stops(tokenizer, [plain]) == {}
        stream = IncrementalDetokenizer(tokenizer, stop=[*special, plain])
        stream.push(next(iter(special.values())))
        assert stream.stopped == next(iter(special))


def test_a_continuation_keeps_its_leading_blank(piece_tokenizer):
    stream = IncrementalDetokenizer(piece_tokenizer)
    assert stream.push(piece_tokenizer.piece_to_id("▁the")) == " the"


@pytest.mark.parametrize("stop", ["text", [""], [3]])
def test_stops_of_another_shape_are_refused(byte_tokenizer, stop):
    with pytest.raises(InvalidRequest, match="stop must be"):
        IncrementalDetokenizer(byte_tokenizer, stop=stop)
