"""The tiny vocabularies of `tests/text/data`, as the files and metadata the tokenizer is given."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastllm.text import Tokenizer

DATA = Path(__file__).parent / "data"
CONFIG = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}


@pytest.fixture(scope="session")
def data_dir() -> Path:
    return DATA


@pytest.fixture(scope="session")
def reference_ids() -> dict[str, Any]:
    """{"texts": […], vocabulary name: ids per text} of sentencepiece and tokenizers."""
    return json.loads((DATA / "tokenizer_ids.json").read_text(encoding="utf-8"))


@pytest.fixture
def gguf_metadata() -> Callable[[str], dict[str, Any]]:
    """pre-tokenizer name -> GGUF metadata of the tiny byte-level vocabulary of that name, fresh for each call."""

    def metadata(name: str) -> dict[str, Any]:
        model = json.loads((DATA / f"tiny_{name}.json").read_text(encoding="utf-8"))["model"]
        pieces = sorted(model["vocab"], key=model["vocab"].get)
        return {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": name,
            "tokenizer.ggml.tokens": pieces,
            "tokenizer.ggml.token_type": [3 if p.startswith("<|") and p.endswith("|>") else 1 for p in pieces],
            "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        }

    return metadata


@pytest.fixture
def llama_metadata() -> Callable[..., dict[str, Any]]:
    """GGUF metadata of the tiny SentencePiece BPE vocabulary, as a converter writes it; keyword values replace keys."""
    from fastllm.text.sentencepiece import parse_sentencepiece

    model = parse_sentencepiece((DATA / "tiny_bpe.model").read_bytes())

    def metadata(**values: Any) -> dict[str, Any]:
        result = {
            "model": "llama",
            "tokens": [p.replace("▁", " ") if kind == 4 else p for p, kind in zip(model.pieces, model.types, strict=True)],
            "scores": list(model.scores),
            "token_type": list(model.types),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "unknown_token_id": 0,
        } | values
        return {f"tokenizer.ggml.{key}": value for key, value in result.items() if value is not None}

    return metadata


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    return Tokenizer.from_tokenizer_json((DATA / "tiny_smollm.json").read_bytes(), CONFIG)


@pytest.fixture(scope="session")
def piece_tokenizer() -> Tokenizer:
    return Tokenizer.from_sentencepiece((DATA / "tiny_bpe.model").read_bytes())
