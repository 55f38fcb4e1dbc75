"""Models to measure with: random weights in real shapes, larger than any cache, quantised by the peer's own tools.

A model's name is SHAPE-TYPE, for example `llama1b-q4_0` or `moe64-q4_k_m`; `llama1b-hf` is a Hugging Face folder in bf16. Models are made on
request, once, in the scratch folder (`cache_folder`), by `workers/make_model.py` in llama.cpp's environment; types that only we have (`FLM_TYPES`) by
`fastllm convert`, so that a measurement loads them packed. Anything else is taken as a path, or as a name that `fastllm` knows (`smollm2`, `gemma3-270m`).
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

from .environments import WORKERS, cache_folder, environment

__all__ = ["FLM_TYPES", "SHAPES", "TYPES", "model_path"]

SHAPES: dict[str, dict[str, int]] = {
    "llama1b": {  # Llama-3.2-1B
        "num_layers": 16,
        "hidden_size": 2048,
        "ffn_size": 8192,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "context": 131072,
    },
    "llama3b": {  # Llama-3.2-3B
        "num_layers": 28,
        "hidden_size": 3072,
        "ffn_size": 8192,
        "num_heads": 24,
        "num_kv_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "context": 131072,
    },
    "llama360m": {  # SmolLM2-360M
        "num_layers": 32,
        "hidden_size": 960,
        "ffn_size": 2560,
        "num_heads": 15,
        "num_kv_heads": 5,
        "head_dim": 64,
        "vocab_size": 49152,
        "context": 8192,
    },
    "llama135m": {  # SmolLM2-135M
        "num_layers": 30,
        "hidden_size": 576,
        "ffn_size": 1536,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "context": 8192,
    },
    "moe64": {  # 64 experts, 8 active: 1.7 G weights, 0.28 G of them active
        "num_layers": 16,
        "hidden_size": 1024,
        "ffn_size": 512,
        "num_heads": 16,
        "num_kv_heads": 4,
        "head_dim": 64,
        "vocab_size": 32768,
        "context": 32768,
        "num_experts": 64,
        "experts_per_token": 8,
    },
}
"""Shapes, named after the model they are taken from."""

TYPES = ("q4_0", "q4_1", "q8_0", "q4_k_m", "q5_k_m", "q6_k", "bf16", "hf")
FLM_TYPES = ("int4g128", "int8")


def model_path(name: str) -> Path:
    """Where the model is, made now if it is one of ours and missing. Raises what fastllm raises for an unknown name, RuntimeError if
    the tool that makes it fails."""
    shape, _, kind = name.partition("-")
    if shape not in SHAPES or kind not in (*TYPES, *FLM_TYPES):
        from fastllm.formats.sources import resolve

        return resolve(name)
    folder = cache_folder() / "models"
    path = folder / (name if kind == "hf" else f"{name}.{'flm' if kind in FLM_TYPES else 'gguf'}")
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        if kind not in ("bf16", "hf"):
            model_path(f"{shape}-bf16")
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _make(shape, kind, path)
    return path


def _make(shape: str, kind: str, path: Path) -> None:
    if kind in FLM_TYPES:  # minmax: the weights are random, a search for their best scales would take minutes for nothing
        source, part = path.with_name(f"{shape}-bf16.gguf"), path.with_suffix(".part.flm")
        command = [sys.executable, "-m", "fastllm", "convert", source, "-o", part, "--dtype", kind, "--method", "minmax", "--offline", "--overwrite", "-q"]
    else:
        description, part = path.parent / f"{path.stem}.shape.json", path
        description.write_text(json.dumps({"name": shape, "type": kind, **SHAPES[shape]}))
        command = [environment("llama.cpp").python, WORKERS / "make_model.py", description, path]
    done = subprocess.run([os.fspath(c) for c in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{path.name} could not be made: {done.stderr.strip()[-500:] or f'exit code {done.returncode}'}")
    if part != path:
        part.rename(path)
