"""What all tests share: the two real models, and an environment that is the same on every machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from fastllm.core.errors import FastLLMError

# Settings of whoever runs the tests must not change what they see.
for _name in ("FASTLLM_BACKEND", "FASTLLM_PLUGINS", "FASTLLM_DISABLE_PLUGINS", "FASTLLM_CONFIG", "FASTLLM_ISA", "FASTLLM_SELF_TEST", "FASTLLM_STRICT_PLUGINS"):
    os.environ.pop(_name, None)


@cache
def _resolve(name: str) -> Path | str:
    """The path of a real model, or why it cannot be had."""
    from fastllm.formats.sources import resolve

    try:
        return resolve(name)
    except FastLLMError as error:
        return f"{error.message} {error.why}".strip()


@pytest.fixture(scope="session")
def real_model_path() -> Callable[[str], Path]:
    """name (`smollm2`, `gemma3-270m`) -> path of its GGUF file; skips with the reason where it cannot be fetched."""

    def path(name: str) -> Path:
        found = _resolve(name)
        if isinstance(found, str):
            pytest.skip(f"the real model {name} is not at hand: {found}")
        return found

    return path
