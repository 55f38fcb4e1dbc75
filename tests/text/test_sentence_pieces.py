"""Our own merging of SentencePiece vocabularies against the `tokenizers` library, which is given every merge that the pieces and scores make."""

from __future__ import annotations

import copy
import json
import pickle
import random
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from fastllm.core.errors import InvalidRequest, TokenizerError
from fastllm.text import Tokenizer
from fastllm.text._pieces import PieceTable, siphash
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
    words = {"".join(draw.choices(letters, k=draw.randrange(1, 7))) for _ in range(150)} | set(letters[:-1])
    found = sorted(words - set(pieces))
    return (
        pieces + found,
        types + [draw.choice((1, 1, 1, 1, UNUSED, 4, CONTROL if len(word) > 4 else 1)) for word in found],
        [0.0] * len(pieces) + [-float(draw.randrange(12)) for _ in found],
    )


@pytest.mark.parametrize("fallback", ["bytes", "unknown", "nothing"])
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
    return PieceTable(block, np.array(ends, np.int32), np.array(places, np.int32), np.full(256, -1, np.int32), unknown, bytes(16))


def test_arrays_that_do_not_fit_are_refused_before_they_are_read():
    assert table_of().find("b") == 1
    for wrong in ({"ends": (0, 1)}, {"ends": (0, 2, 1)}, {"ends": (1, 1, 2)}, {"ends": (0, 1, 3)}, {"ends": (0, -1, 2)}, {"unknown": 2}, {"unknown": -2}, {"places": (0,)}):
        with pytest.raises(ValueError, match="piece"):
            table_of(**wrong)


def test_the_first_doubled_piece_is_told_and_an_empty_vocabulary_finds_nothing():
    assert table_of(b"aba", (0, 1, 2, 3), (0, 1, 2)).doubled == (0, 2)
    assert table_of(b"", (0, 0, 0), (0, 1)).doubled == (0, 1)
    empty = table_of(b"", (0,), ())
    assert (empty.doubled, empty.find(""), empty.find("a"), empty.encode("abc"), empty.encode("")) == (None, -1, -1, (b"",) * 3, (b"",) * 3)


def test_byte_pieces_and_a_key_that_do_not_fit_are_refused():
    arrays = b"ab", np.array((0, 1, 2), np.int32), np.array((0, 1), np.int32)
    half = np.where(np.arange(256) < 128, 0, -1).astype(np.int32)
    for wrong in (half, np.full(256, 2, np.int32), np.full(256, -2, np.int32), np.zeros(255, np.int32)):
        with pytest.raises(ValueError, match="piece"):
            PieceTable(*arrays, wrong, -1, bytes(16))
    with pytest.raises(ValueError, match="key of 8 bytes"):
        PieceTable(*arrays, np.zeros(256, np.int32), -1, bytes(8))


def test_the_hash_is_that_of_python():
    """Python's own hash of bytes is SipHash-1-3, with a key of zeros where PYTHONHASHSEED is 0 (64-bit builds; -1 becomes -2)."""
    texts = [bytes((7 * i + size) & 255 for i in range(size)) for size in range(1, 300)]
    code = "import sys; assert sys.hash_info.algorithm == 'siphash13', sys.hash_info; print([hash(bytes.fromhex(x)) % 2**64 for x in sys.stdin.read().split()])"
    if sys.hash_info.algorithm != "siphash13":
        pytest.skip(f"this Python hashes with {sys.hash_info.algorithm}")
    shown = subprocess.run(
        [sys.executable, "-c", code], input=" ".join(text.hex() for text in texts), env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True
    ).stdout
    wanted = json.loads(shown)
    for cut in (0, 1, 7, 8, 9, 20, 300):
        assert [siphash(bytes(16), text[:cut], text[cut:]) for text in texts] == wanted
    assert siphash(bytes(16), b"ab", b"") != siphash(b"\1" + bytes(15), b"ab", b"")


def test_some_byte_pieces_of_256_are_refused_and_all_are_found_by_their_type():
    """SentencePiece loads no vocabulary that falls back to bytes and lacks some."""
    some = metadata(["<unk>", "</s>", "<0xC3>", "<0xA9>", "x"], [UNKNOWN, CONTROL, BYTE, BYTE, 1], [0.0] * 5)
    with pytest.raises(TokenizerError, match=r"byte tokens in tokenizer.ggml.tokens is 2.*256 bytes; missing: <0x00>, <0x01>"):
        Tokenizer.from_gguf(some)
    lower = ["<unk>", "</s>", *(f"<0x{b:02x}>" for b in range(256))]
    doubled = metadata([*lower, "<0xAB>"], [UNKNOWN, CONTROL] + [BYTE] * 257, [0.0] * 259)
    with pytest.raises(TokenizerError, match="doubled"):
        Tokenizer.from_gguf(doubled)
    tokenizer = Tokenizer.from_gguf(metadata([*lower, "<0xC3>"], [UNKNOWN, CONTROL] + [BYTE] * 256 + [1], [0.0] * 259))
    ids = tokenizer.encode("é\n", add_special=False, parse_special=False)
    assert ids == [2 + 0xC3, 2 + 0xA9, 2 + 0x0A]  # never the text that is spelt as a byte
    assert tokenizer.decode(ids, skip_special=True) == "é\n"


MARKER = "<|im_end|>"


def spelling_vocabulary(unknown: str) -> tuple[Tokenizer, int]:
    """A tokenizer whose merges spell an end marker, and the marker's id. unknown: what is left of other characters."""
    steps = [*sorted(set(MARKER)), *(MARKER[:size] for size in range(2, len(MARKER) + 1))]
    pieces = ["<unk>" if unknown == "unknown" else "<nothing>", "</s>", *steps]
    types = [UNKNOWN if unknown == "unknown" else CONTROL, CONTROL, *[1] * len(steps)]
    tokenizer = Tokenizer.from_gguf(metadata(pieces, types, [0.0, 0.0, *map(float, range(len(steps)))]))
    return tokenizer, pieces.index(MARKER)


@pytest.mark.parametrize("text", [MARKER * 5000, "é" * 5000 + MARKER, ("é" * 50 + MARKER) * 100, "<" + "é" * 5000 + MARKER[1:]], ids=["markers", "left out", "both", "inside"])
def test_many_markers_that_merges_spell_stay_text_at_a_cost_of_a_few_encodings(text, monkeypatch):
    tokenizer, marker = spelling_vocabulary("nothing")
    encoded = 0
    encode = SentencePieces.encode

    def counted(self, part, **options):
        nonlocal encoded
        encoded += len(part)
        return encode(self, part, **options)

    monkeypatch.setattr(SentencePieces, "encode", counted)
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    assert marker not in ids
    assert tokenizer.decode(ids, skip_special=False) == text.replace("é", "")
    assert encoded <= 4 * len(text)


def test_offsets_are_those_of_the_characters_where_some_are_left_out():
    tokenizer, _ = spelling_vocabulary("nothing")
    table = tokenizer._library
    found = table.encode("éé<日|éixé_m")
    assert [table.pieces[i] for i in found.ids] == ["<|i", "_", "m"]
    assert found.offsets == [(2, 7), (9, 10), (10, 11)]
    unknown, _ = spelling_vocabulary("unknown")
    assert unknown._library.encode("éé<日日").offsets == [(0, 2), (2, 3), (3, 5)]


def test_a_tokenizer_can_be_copied_and_sent_to_another_process():
    tokenizer, _ = spelling_vocabulary("unknown")
    text = f"é {MARKER} im"
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    for other in (copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert other.encode(text, add_special=False, parse_special=False) == ids
