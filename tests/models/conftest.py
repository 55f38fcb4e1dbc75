"""Tiny reference models and the f64 interpreter, for the tests of this folder."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from fastllm.core.model import ModelDef
from fastllm.formats import ModelFiles, open_model
from fastllm.models import build

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Tiny:
    """A fixture that has been opened: its files, the built model, token ids, transformers' logits [40, 256]."""

    files: ModelFiles
    model: ModelDef
    ids: list[int]
    logits: np.ndarray

    def error(self, logits: np.ndarray) -> float:
        """Largest difference in units of the logits' standard deviation."""
        return float(np.abs(logits - self.logits[: len(logits)]).max() / self.logits.std())


@cache
def _open(name: str, source: str, limit: int) -> Tiny:
    folder = HERE / "fixtures" / name
    about = json.loads((folder / "fixture.json").read_text())
    files = open_model(folder / "model.gguf" if source == "gguf" else folder)
    model = build(files.kind, files.architecture, files.config, files.tensors, context_limit=limit)
    short = limit < len(about["ids"])
    logits = np.load(folder / ("short_logits.npy" if short else "logits.npy"))
    return Tiny(files, model, about["ids"][: len(logits)], logits)


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Tiny]:
    """tiny(name, source="huggingface", limit=40)."""

    def open_fixture(name: str, source: str = "huggingface", limit: int = 40) -> Tiny:
        return _open(name, source, limit)

    return open_fixture


@pytest.fixture(scope="session")
def oracle() -> ModuleType:
    """The module numpy_eval."""
    spec = importlib.util.spec_from_file_location("numpy_eval", HERE / "numpy_eval.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
