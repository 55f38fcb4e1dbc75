"""Pairs of GGUF metadata as the bytes of a GGUF file without tensors, and back: how an FLM file carries a tokenizer that came from one.

Pieces and merges are read in native code then, as from the original file; as JSON they took seven times as long. Called by `flm_files.py`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from .gguf import read_pairs
from .reader import HeldFile

__all__ = ["pairs_from", "pairs_to_bytes"]

_NUMBERS: Final = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": 7, "u8": 10, "i8": 11, "f8": 12}
"""numpy's kind and size -> type of a value in a GGUF file."""


def pairs_from(data: bytes, path: str | os.PathLike[str]) -> dict[str, Any]:
    """The pairs, as `gguf.read_gguf` gives them. path: for messages. Raises ModelFileError."""
    return read_pairs(HeldFile(path, data))


def pairs_to_bytes(pairs: Mapping[str, Any]) -> bytes:
    """A GGUF file of version 3 with these pairs and no tensor. Values: text, bool, int, float, arrays of numbers, lists of one kind."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, 0, len(pairs))]
    for key, value in pairs.items():
        kind, body = _value(value)
        parts += [_text(key), struct.pack("<I", kind), body]
    return b"".join(parts)


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> tuple[int, bytes]:
    """(type, bytes) of a value."""
    if isinstance(value, str):
        return 8, _text(value)
    if isinstance(value, bool):
        return 7, bytes([value])
    if isinstance(value, int):
        return (11, struct.pack("<q", value)) if value < 0 else (10, struct.pack("<Q", value))
    if isinstance(value, float):
        return 12, struct.pack("<d", value)
    if isinstance(value, np.ndarray):
        return 9, struct.pack("<IQ", _NUMBERS[value.dtype.str[1:]], value.size) + np.ascontiguousarray(value).tobytes()
    if all(isinstance(item, str) for item in value):
        return 9, struct.pack("<IQ", 8, len(value)) + b"".join(map(_text, value))
    return 9, struct.pack("<IQ", 9, len(value)) + b"".join(_value(item)[1] for item in value)
