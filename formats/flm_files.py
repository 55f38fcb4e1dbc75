"""The small files inside an FLM file: tokenizer, template, generation settings, as bytes and back.

A tokenizer that came from GGUF metadata is kept as such pairs (`gguf_pairs.py`), because the pieces, scores and types there are what the text
room builds from; others are kept as the files they were. Older files have one JSON object instead of the pairs, with arrays of numbers typed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import ModelFileError
from .gguf_pairs import pairs_from, pairs_to_bytes
from .json_text import parse_json
from .reader import shown

if TYPE_CHECKING:
    from .model_files import ModelFiles

__all__ = ["files_of", "object_in", "text_in", "tokenizer_fields"]

GGUF_TOKENIZER = "tokenizer.gguf"
OLDER_TOKENIZER = "tokenizer_gguf.json"
ARRAYS = ("|i1", "|u1", "|b1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f4", "<f8")


def files_of(files: ModelFiles) -> dict[str, bytes]:
    """The files of an open model that an FLM file carries: name -> bytes."""
    found: dict[str, bytes] = {}
    tokenizer = files.tokenizer
    if tokenizer is not None and tokenizer.kind == "gguf":
        found[GGUF_TOKENIZER] = pairs_to_bytes(tokenizer.gguf)
    elif tokenizer is not None:
        found["tokenizer.json" if tokenizer.kind == "tokenizer.json" else "tokenizer.model"] = tokenizer.read()
        parts = {"tokenizer_config": tokenizer.config, "special_tokens_map": tokenizer.special_tokens, "added_tokens": tokenizer.added_tokens}
        found |= {f"{name}.json": _json(value) for name, value in parts.items() if value}
    if files.chat_template is not None:
        found["chat_template.jinja"] = files.chat_template.encode()
    if files.generation_config:
        found["generation_config.json"] = _json(files.generation_config)
    return found


def tokenizer_fields(files: Mapping[str, bytes], path: Path) -> dict[str, Any] | None:
    """Arguments of `TokenizerFiles` for the files of an FLM file; None if there is no tokenizer. Raises ModelFileError."""
    if GGUF_TOKENIZER in files:
        return {"kind": "gguf", "path": path, "gguf": pairs_from(files[GGUF_TOKENIZER], path)}
    if OLDER_TOKENIZER in files:
        stored = object_in(files, OLDER_TOKENIZER, path)
        return {"kind": "gguf", "path": path, "gguf": {key: _array(key, value, path) for key, value in stored.items()}}
    for name, kind in (("tokenizer.json", "tokenizer.json"), ("tokenizer.model", "sentencepiece")):
        if name in files:
            config = object_in(files, "tokenizer_config.json", path)
            special, added = object_in(files, "special_tokens_map.json", path), object_in(files, "added_tokens.json", path)
            return {"kind": kind, "path": path, "data": files[name], "config": config, "special_tokens": special, "added_tokens": added}
    return None


def object_in(files: Mapping[str, bytes], name: str, path: Path) -> dict[str, Any]:
    """The JSON object of a file; {} if it is not there. Raises ModelFileError for anything else."""
    if name not in files:
        return {}
    value = parse_json(files[name], f"{path.name}: {name}", str(path))
    if not isinstance(value, dict):
        raise ModelFileError(f"{path.name}: {name} is no JSON object", who=str(path), fix="convert the model again")
    return value


def text_in(files: Mapping[str, bytes], name: str, path: Path) -> str | None:
    """The text of a file; None if it is not there. Raises ModelFileError if it is not UTF-8."""
    try:
        return files[name].decode("utf-8") if name in files else None
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path.name}: {name} is not UTF-8: {error.reason}", who=str(path), fix="convert the model again") from None


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _array(key: str, value: Any, path: Path) -> Any:
    if not isinstance(value, dict):
        return value
    dtype, values = value.get("dtype"), value.get("values")
    if dtype not in ARRAYS or not isinstance(values, list) or not all(isinstance(v, int | float) for v in values):
        raise ModelFileError(f"{path.name}: {shown(key)} is no array of numbers", who=str(path), fix="convert the model again")
    try:
        return np.array(values, dtype)
    except (OverflowError, ValueError):
        raise ModelFileError(f"{path.name}: {shown(key)} holds numbers beyond {dtype}", who=str(path), fix="convert the model again") from None
