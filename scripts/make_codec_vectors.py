"""Makes `tests/core/data/codec_vectors.npz`: blocks of every format with the values that ggml's own Python package gives.

Run in a development environment that has `gguf` and numpy (`pip install gguf`); neither the project nor its tests import
gguf. The random blocks are seeded; a few blocks have a scale of every special kind (zero, minus zero, subnormal, largest,
infinite, NaN). The encoder's input holds the cases where rounding rules differ: ties, zeros, equal magnitudes of both signs.

    python scripts/make_codec_vectors.py
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize

OUT = Path(__file__).resolve().parent.parent / "tests" / "core" / "data" / "codec_vectors.npz"
HALVES = {  # byte offsets of the f16 scales within a block
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [],
}  # fmt: skip
SPECIAL = np.array([0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0x7C00, 0x7E00], np.uint16)
EXPONENTS = np.array([0, 1, 2, 127, 253, 254, 255], np.uint8)
ENCODED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


def blocks_of(name: str, rng: np.random.Generator) -> np.ndarray:
    """Random blocks [n, block bytes] of a type with scales of the sizes that weights have, and some special ones."""
    values, size = GGML_QUANT_SIZES[Type[name]]
    count = 5 if values == 256 else 24
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    for place, offset in enumerate(HALVES[name]):
        scales = (rng.standard_normal(count) * 0.05).astype(np.float16).view(np.uint16)
        special = rng.permutation(SPECIAL)[: 2 if values == 256 else len(SPECIAL)]
        scales[2 * place : 2 * place + len(special)] = special
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(count, 2)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(110, 130, count)
        blocks[: len(EXPONENTS), 0] = EXPONENTS
    return blocks


def encoder_input(rng: np.random.Generator) -> np.ndarray:
    """f32 [blocks, 32]: normal values, zeros, constants, exact ties, equal magnitudes of both signs, wide ranges."""
    rows = [rng.standard_normal((12, 32)) * scale for scale in (1.0, 0.02, 300.0)]
    ties = np.arange(32)[None, :] / 2.0 - 8.0
    signs = np.where(np.arange(32) % 2, 4.0, -4.0)[None, :]
    rows += [np.zeros((1, 32)), np.full((1, 32), 0.7), np.full((1, 32), -0.7), ties, -ties, signs, -signs, ties * 1e-6]
    rows.append(np.linspace(-127.0, 127.0, 32)[None, :] * 0.5)
    return np.concatenate(rows).astype(np.float32)


def main() -> None:
    """Writes the vectors."""
    rng = np.random.default_rng(20240607)
    arrays: dict[str, np.ndarray] = {"gguf_version": np.array(version("gguf"))}
    with np.errstate(all="ignore"):
        for name in HALVES:
            blocks = blocks_of(name, rng)
            arrays[f"{name.lower()}.data"] = blocks.reshape(-1)
            arrays[f"{name.lower()}.values"] = dequantize(blocks, Type[name]).reshape(-1)
        values = encoder_input(rng)
        arrays["encode.values"] = values
        for name in ENCODED:
            arrays[f"encode.{name.lower()}"] = quantize(values, Type[name]).reshape(-1)
        halves = rng.integers(0, 2**32, 500, dtype=np.uint32).view(np.float32)
        arrays["bf16.input"] = halves
        arrays["bf16.data"] = quantize(halves, Type.BF16).reshape(-1)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(OUT, **arrays)
    print(f"{OUT}: {OUT.stat().st_size} bytes, gguf {version('gguf')}")


if __name__ == "__main__":
    main()
