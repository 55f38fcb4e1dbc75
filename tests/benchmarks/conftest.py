"""`benchmarks` is a folder of the repository, in no package: it is imported from the root, as `python -m benchmarks` does."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A folder with a model of two layers, a byte tokenizer and a context of 1,024."""
    spec = importlib.util.spec_from_file_location("interface_conftest", ROOT / "tests" / "interface" / "conftest.py")
    shared = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shared)
    folder = tmp_path_factory.mktemp("bench") / "tiny"
    folder.mkdir()
    shutil.copy(shared.FIXTURES / "llama" / "model.safetensors", folder)
    config = json.loads((shared.FIXTURES / "llama" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    (folder / "tokenizer.json").write_text(shared.byte_tokenizer().to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}))
    return folder


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch) -> Path:
    """A scratch folder of its own for every test."""
    monkeypatch.setenv("FASTLLM_BENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
