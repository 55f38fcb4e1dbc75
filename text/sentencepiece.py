"""Reader of SentencePiece `tokenizer.model` files: just enough protobuf, with every length checked.

Llama 2, Mistral and Gemma folders may carry only this file. The message has a dozen fields we need, so a small reader of
the wire format replaces two dependencies (protobuf and sentencepiece). Field numbers are those of the public
`sentencepiece_model.proto`. Called by `vocabulary.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from fastllm.core.errors import TokenizerError, UnsupportedError

__all__ = ["SentencePieceModel", "parse_sentencepiece"]

MAX_PIECES = 4_000_000


@dataclass
class SentencePieceModel:
    """The fields of a ModelProto that decide ids. types: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte."""

    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    unigram: bool = True
    byte_fallback: bool = False
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True


def _fail(what: str, offset: int) -> TokenizerError:
    return TokenizerError(
        f"tokenizer.model is damaged at byte {offset:,}: {what}.",
        who="tokenizer.model",
        why="it is not a readable SentencePiece model",
        fix="download the file again; if it is a Git-LFS pointer, run `git lfs pull`",
    )


def _varint(data: memoryview, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= end:
            raise _fail("a number runs past the end", at)
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
        if shift > 63:
            raise _fail("a number is longer than 64 bits", at)


def _fields(data: memoryview, start: int, end: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (field number, wire type, value or start, end, offset) of one message; lengths never pass `end`."""
    at = start
    while at < end:
        offset = at
        key, at = _varint(data, at, end)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at, end)
            yield number, wire, value, at, offset
            continue
        if wire == 2:
            length, at = _varint(data, at, end)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise _fail(f"wire type {wire} of field {number} is not known", offset)
        if number == 0 or length > end - at:
            raise _fail(f"field {number} asks for {length:,} bytes, {end - at:,} are left", offset)
        yield number, wire, at, at + length, offset
        at += length


def _signed(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def parse_sentencepiece(data: bytes) -> SentencePieceModel:
    """Parse a `tokenizer.model`. Raises TokenizerError naming the byte offset, UnsupportedError for word and char models."""
    view, model = memoryview(data), SentencePieceModel()
    for number, wire, start, end, offset in _fields(view, 0, len(data)):
        if wire != 2:
            continue
        if number == 1:
            _read_piece(view, start, end, offset, model)
        elif number == 2:
            _read_trainer(view, start, end, model)
        elif number == 3:
            _read_normalizer(view, start, end, model)
    if not model.pieces:
        raise _fail("it holds no pieces", 0)
    return model


def _read_piece(view: memoryview, start: int, end: int, offset: int, model: SentencePieceModel) -> None:
    piece, score, kind = "", 0.0, 1
    for number, wire, a, b, _ in _fields(view, start, end):
        if number == 1 and wire == 2:
            try:
                piece = bytes(view[a:b]).decode("utf-8")
            except UnicodeDecodeError:
                raise _fail(f"piece {len(model.pieces)} is not UTF-8", a) from None
        elif number == 2 and wire == 5:
            (score,) = struct.unpack("<f", view[a:b])
        elif number == 3 and wire == 0:
            kind = a
    if not 1 <= kind <= 6 or score != score:
        raise _fail(f"piece {len(model.pieces)} has type {kind} and score {score}", offset)
    if len(model.pieces) >= MAX_PIECES:
        raise _fail(f"it holds more than {MAX_PIECES:,} pieces", offset)
    model.pieces.append(piece)
    model.scores.append(score)
    model.types.append(kind)


def _read_trainer(view: memoryview, start: int, end: int, model: SentencePieceModel) -> None:
    for number, wire, value, _, _ in _fields(view, start, end):
        if wire != 0:
            continue
        if number == 3:
            if value not in (1, 2):
                kind = {3: "word", 4: "char"}.get(value, str(value))
                raise UnsupportedError(
                    f"tokenizer.model has model type {kind}; known: unigram, bpe.",
                    who="tokenizer.model",
                    fix="use the model's tokenizer.json",
                )
            model.unigram = value == 1
        elif number == 24 and value:
            raise UnsupportedError("tokenizer.model treats white space as a suffix, which is not supported.", who="tokenizer.model")
        elif number == 35:
            model.byte_fallback = bool(value)
        elif number in (40, 41, 42):
            setattr(model, {40: "unk_id", 41: "bos_id", 42: "eos_id"}[number], _signed(value))


def _read_normalizer(view: memoryview, start: int, end: int, model: SentencePieceModel) -> None:
    names = {3: "add_dummy_prefix", 4: "remove_extra_whitespaces", 5: "escape_whitespaces"}
    for number, wire, a, b, _ in _fields(view, start, end):
        if number == 2 and wire == 2:
            model.charsmap = bytes(view[a:b])
        elif number in names and wire == 0:
            setattr(model, names[number], bool(a))
