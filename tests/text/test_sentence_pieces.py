"""Our own merging of SentencePiece vocabularies against the `tokenizers` library, which is given every merge that the pieces and scores make."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from fastllm.core.errors import InvalidRequest
from fastllm.text import Tokenizer
from fastllm.text._pieces import PieceTable
from fastllm.text.sentence_pieces import SentencePieces

UNKNOWN, CONTROL, UNUSED, BYTE = 2, 3, 5, 6


def library_of(pieces: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> tokenizers.Tokenizer:
    """The library with all merges spelt out: of every piece, best score first, each cut into two pieces, the shorter left part first."""
    ids = {piece: index for index, piece in enumerate(pieces)}
    parts = {piece for piece, kind in zip(pieces, types, strict=True) if kind in (0, 1, UNUSED)}
    merges = [
        (pieces[i][:cut], pieces[i][cut:])
        for i in sorted(range(len(pieces)), key=lambda i: -scores[i])
        if pieces[i] in parts
        for cut in range(1, len(pieces[i]))
        if pieces[i][:cut] in parts and pieces[i][cut:] in parts
    ]
    unknown = next((piece for piece, kind in zip(pieces, types, strict=True) if kind == UNKNOWN), None)
    library = tokenizers.Tokenizer(tokenizers.models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=BYTE in types))
    library.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    return library


def metadata(pieces: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> dict[str, object]:
    values = {"model": "llama", "tokens": list(pieces), "token_type": list(types), "scores": list(scores), "eos_token_id": 1, "add_space_prefix": False, "add_bos_token": False}
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def vocabulary(draw: random.Random, letters: str, fallback: str) -> tuple[list[str], list[int], list[float]]:
    """Random pieces with many equal scores, so that the order among equals counts. fallback: what a character without a piece becomes."""
    pieces = ["<unk>", "</s>"] if fallback != "nothing" else ["<nothing>", "</s>"]
    types = [UNKNOWN if fallback != "nothing" else CONTROL, CONTROL]
    if fallback == "bytes":
        pieces += [f"<0x{b:02X}>" for b in range(256)]
        types += [BYTE] * 256
    if fallback == "some bytes":
        pieces += [f"<0x{b:02X}>" for b in (0xC3, 0xA9, 0xE6)]  # of é all, of 日 the first
        types += [BYTE] * 3
    words = {"".join(draw.choices(letters, k=draw.randrange(1, 7))) for _ in range(150)} | set(letters[:-1])
    found = sorted(words - set(pieces))
    return (
        pieces + found,
        types + [draw.choice((1, 1, 1, 1, UNUSED, 4, CONTROL if len(word) > 4 else 1)) for word in found],
        [0.0] * len(pieces) + [-float(draw.randrange(12)) for _ in found],
    )


@pytest.mark.parametrize("fallback", ["bytes", "some bytes", "unknown", "nothing"])
@pytest.mark.parametrize("letters", ["ab", "abc▁", "aé日x", "<0xC3>é"])
def test_ids_are_those_of_the_library_with_every_merge(letters, fallback):
    draw = random.Random(f"{letters} {fallback}")
    for _ in range(4):
        pieces, types, scores = vocabulary(draw, letters, fallback)
        types = [1 if kind == 4 else kind for kind in types]  # a user-defined piece is found before any merging
        tokenizer, library = Tokenizer.from_gguf(metadata(pieces, types, scores)), library_of(pieces, types, scores)
        table = tokenizer._library
        assert isinstance(table, SentencePieces)
        for length in (0, 1, 2, 3, 5, 9, 17, 60, 400):
            for _ in range(6):
                text = "".join(draw.choices(letters + " é日🙂\n"[: draw.randrange(6)], k=length))
                assert table.encode(table.normalize(text)).ids == library.encode(text).ids, text


def test_a_long_text_of_one_letter():
    pieces, types, scores = ["<unk>", "</s>", *("a" * n for n in range(1, 9))], [UNKNOWN, CONTROL] + [1] * 8, [0.0, 0.0, *(-float(n % 3) for n in range(8))]
    tokenizer, library = Tokenizer.from_gguf(metadata(pieces, types, scores)), library_of(pieces, types, scores)
    text = "a" * 20_001
    assert tokenizer.encode(text, add_special=False, parse_special=False) == library.encode(text).ids


@given(st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_text_has_the_ids_of_the_library_and_offsets_that_cover_it(text):
    draw = random.Random(5)
    pieces, types, scores = vocabulary(draw, "abé▁", "bytes")
    types = [1 if kind == 4 else kind for kind in types]
    table, library = Tokenizer.from_gguf(metadata(pieces, types, scores))._library, library_of(pieces, types, scores)
    found, wanted = table.encode(table.normalize(text)), library.encode(text)
    assert found.ids == wanted.ids
    if "".join(pieces[i] for i in found.ids).find("<0x") < 0:
        assert found.offsets == wanted.offsets
    ends = [end for _, end in found.offsets]
    assert ends == sorted(ends)
    assert not ends or ends[-1] == len(text)


@pytest.mark.real_model
def test_ids_of_the_vocabulary_of_gemma_are_those_of_the_library(real_model_path):
    from fastllm.formats.gguf import read_gguf

    found = read_gguf(real_model_path("gemma3-270m"), header_only=True).metadata
    pieces, types, scores = (list(found[f"tokenizer.ggml.{key}"]) for key in ("tokens", "token_type", "scores"))
    table, library = Tokenizer.from_gguf(found)._library, library_of(pieces, types, scores)
    draw = random.Random(7)
    texts = ["".join(draw.choices(pieces[1000:], k=draw.randrange(1, 60))) for _ in range(300)]
    texts += ["".join(chr(draw.choice((draw.randrange(32, 127), draw.randrange(0x100, 0xD800), draw.randrange(0x10000, 0x1F700)))) for _ in range(50)) for _ in range(50)]
    for text in texts:
        assert table.encode(table.normalize(text)).ids == library.encode(text).ids, text


def test_a_lone_surrogate_is_refused():
    pieces, types, scores = vocabulary(random.Random(1), "ab", "bytes")
    tokenizer = Tokenizer.from_gguf(metadata(pieces, types, scores))
    with pytest.raises(InvalidRequest, match=r"Unicode|surrogate"):
        tokenizer.encode("a\ud800", add_special=False, parse_special=False)
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer._library.encode("a\ud800")


def table_of(block: bytes = b"ab", ends: Sequence[int] = (0, 1, 2), places: Sequence[int] = (0, 1), unknown: int = -1) -> PieceTable:
    return PieceTable(block, np.array(ends, np.int32), np.array(places, np.int32), False, unknown, 1)


def test_arrays_that_do_not_fit_are_refused_before_they_are_read():
    assert table_of().find("b") == 1
    for wrong in ({"ends": (0, 1)}, {"ends": (0, 2, 1)}, {"ends": (1, 1, 2)}, {"ends": (0, 1, 3)}, {"ends": (0, -1, 2)}, {"unknown": 2}, {"unknown": -2}, {"places": (0,)}):
        with pytest.raises(ValueError, match="piece"):
            table_of(**wrong)


def test_the_first_doubled_piece_is_told_and_an_empty_vocabulary_finds_nothing():
    assert table_of(b"aba", (0, 1, 2, 3), (0, 1, 2)).doubled == (0, 2)
    assert table_of(b"", (0, 0, 0), (0, 1)).doubled == (0, 1)
    empty = table_of(b"", (0,), ())
    assert (empty.doubled, empty.find(""), empty.find("a"), empty.encode("abc"), empty.encode("")) == (None, -1, -1, ([], []), ([], []))
