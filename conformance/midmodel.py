"""A model of a hundred million weights, as a GGUF file in Q4_0 with llama's names: large enough that a decode step reads memory and not
caches, small enough to be made in seconds. For the perf report; its numbers mean nothing."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from . import blocks
from .numbers import Numbers

__all__ = ["save_mid"]

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, VOCABULARY = 1024, 2816, 8, 16, 4, 8192
TEXT, U32, F32 = 8, 4, 6
Q4_0, PLAIN = 2, 0


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _shapes() -> dict[str, tuple[int, ...]]:
    """name -> shape, rows first."""
    kv = HIDDEN // HEADS * KV_HEADS
    layer = {
        "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCABULARY, HIDDEN), "output_norm": (HIDDEN,), "output": (VOCABULARY, HIDDEN)}
    return shapes | {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}


def _blocks(numbers: Numbers, shape: tuple[int, ...]) -> bytes:
    """Q4_0 blocks with scales that keep a row's products near the size of its inputs."""
    values, nbytes = blocks.BLOCK_BYTES["q4_0"]
    some = blocks.random_blocks(numbers, "q4_0", 1024 * values).reshape(-1, nbytes)
    some[:, :2] = np.full(len(some), 1 / (4.6 * np.sqrt(shape[-1])), "<f2").view(np.uint8).reshape(-1, 2)
    return np.resize(some, (int(np.prod(shape)) // values, nbytes)).tobytes()


def save_mid(folder: Path) -> Path:
    """Writes the file into a folder; returns its path."""
    numbers = Numbers(11)
    texts = [("general.architecture", TEXT, _text("llama"))]
    floats = {"rope.freq_base": 10000.0, "attention.layer_norm_rms_epsilon": 1e-5}
    whole = {
        "block_count": LAYERS, "context_length": 2048, "embedding_length": HIDDEN, "feed_forward_length": INNER, "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS, "rope.dimension_count": HIDDEN // HEADS, "vocab_size": VOCABULARY,
    }  # fmt: skip
    keys = texts + [(f"llama.{k}", F32, struct.pack("<f", v)) for k, v in floats.items()]
    keys += [(f"llama.{k}", U32, struct.pack("<I", v)) for k, v in whole.items()]
    infos, parts, at = b"", [], 0
    for name, shape in _shapes().items():
        plain = len(shape) == 1
        data = np.ones(shape, "<f4").tobytes() if plain else _blocks(numbers, shape)
        infos += _text(f"{name}.weight") + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1])
        infos += struct.pack("<IQ", PLAIN if plain else Q4_0, at)
        parts.append(data + b"\0" * (-len(data) % 32))
        at += len(parts[-1])
    head = b"GGUF" + struct.pack("<IQQ", 3, len(parts), len(keys))
    head += b"".join(_text(k) + struct.pack("<I", kind) + data for k, kind, data in keys) + infos
    path = folder / "mid-q4_0.gguf"
    with open(path, "wb") as file:
        file.write(head + b"\0" * (-len(head) % 32))
        file.writelines(parts)
    return path
