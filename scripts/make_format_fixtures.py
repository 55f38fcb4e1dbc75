"""Writes the small GGUF and safetensors files of `tests/formats/data` with the `gguf` and `safetensors` packages.

Run it in a development environment that has both (and torch, for bf16): `python scripts/make_format_fixtures.py`. The files
and `expected.json`, which holds what those packages read back, are committed, so the tests need neither package: our readers
must see the same names, shapes, types, bytes and values.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from pathlib import Path

import gguf
import numpy as np
import safetensors.torch
import torch

OUT = Path(__file__).parent.parent / "tests" / "formats" / "data"
VALUES = gguf.GGUFValueType


def add_metadata(writer: gguf.GGUFWriter) -> None:
    """One value of each of the 13 types, and arrays of numbers, bools and strings."""
    writer.add_uint8("t.u8", 255)
    writer.add_int8("t.i8", -128)
    writer.add_uint16("t.u16", 65_535)
    writer.add_int16("t.i16", -32_768)
    writer.add_uint32("t.u32", 4_294_967_295)
    writer.add_int32("t.i32", -2_147_483_648)
    writer.add_float32("t.f32", 0.1)
    writer.add_bool("t.bool", True)
    writer.add_string("t.string", "größe 词 🙂")
    writer.add_uint64("t.u64", 2**64 - 1)
    writer.add_int64("t.i64", -(2**63))
    writer.add_float64("t.f64", 0.1)
    writer.add_array("t.array.i32", [1, -2, 3])
    writer.add_array("t.array.f32", [0.5, -1.25])
    writer.add_array("t.array.bool", [True, False, True])
    writer.add_array("t.array.string", ["a", "", "größe"])
    writer.add_array("tokenizer.ggml.tokens", [f"piece{i}" for i in range(40)])
    writer.add_array("tokenizer.ggml.scores", [float(-i) for i in range(40)])
    writer.add_string("tokenizer.ggml.model", "llama")
    writer.add_chat_template("{{ messages[0].content }}")


def add_tensors(writer: gguf.GGUFWriter, seed: int) -> None:
    """Tensors of rank 1 to 3, plain and quantised."""
    rng = np.random.default_rng(seed)
    kinds = gguf.GGMLQuantizationType
    for name, kind, shape in (
        ("norm.weight", kinds.F32, (7,)),
        ("half.weight", kinds.F16, (3, 5)),
        ("brain.weight", kinds.BF16, (2, 3, 4)),
        ("q4_0.weight", kinds.Q4_0, (3, 64)),
        ("q8_0.weight", kinds.Q8_0, (2, 2, 32)),
        ("q4_k.weight", kinds.Q4_K, (2, 256)),
        ("ids", kinds.I32, (9,)),
    ):
        if kind in (kinds.F32, kinds.F16):
            data = rng.standard_normal(shape).astype(np.float32 if kind == kinds.F32 else np.float16)
            writer.add_tensor(name, data)
        elif kind == kinds.I32:
            writer.add_tensor(name, rng.integers(-100, 100, shape).astype(np.int32))
        else:
            block, nbytes = gguf.GGML_QUANT_SIZES[kind]
            raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // block * nbytes), dtype=np.uint8)
            writer.add_tensor(name, raw, raw_dtype=kind)


def plain(value: object) -> object:
    """JSON form of what GGUFReader gives."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def describe(paths: list[Path]) -> dict[str, object]:
    """What the gguf package reads from the files: metadata of the first, tensors of all."""
    readers = [gguf.GGUFReader(p) for p in paths]
    fields = {k: plain(f.contents()) for k, f in readers[0].fields.items() if not k.startswith("GGUF.")}
    tensors = {}
    for reader in readers:
        for t in reader.tensors:
            shape = [int(d) for d in reversed(t.shape)]
            digest = hashlib.sha256(t.data.tobytes()).hexdigest()
            tensors[str(t.name)] = {"shape": shape, "type": t.tensor_type.name, "nbytes": int(t.n_bytes), "sha256": digest}
    return {"metadata": fields, "tensors": tensors}


def main() -> None:
    """Writes all files."""
    OUT.mkdir(parents=True, exist_ok=True)
    expected: dict[str, object] = {"versions": {name: importlib.metadata.version(name) for name in ("gguf", "safetensors", "torch")}}
    for name, kwargs in (("tiny.gguf", {}), ("aligned64.gguf", {"alignment": 64})):
        writer = gguf.GGUFWriter(OUT / name, "llama")
        if kwargs:
            writer.add_custom_alignment(kwargs["alignment"])
        add_metadata(writer)
        add_tensors(writer, 1)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        expected[name] = describe([OUT / name])
    split = gguf.GGUFWriter(OUT / "split.gguf", "llama", split_max_tensors=3)
    add_metadata(split)
    add_tensors(split, 2)
    split.write_header_to_file(OUT / "split.gguf")
    split.write_kv_data_to_file()
    split.write_tensors_to_file()
    split.close()
    expected["split-00001-of-00003.gguf"] = describe(sorted(OUT.glob("split-*.gguf")))

    generator = torch.Generator().manual_seed(3)
    tensors = {
        "f32": torch.randn(3, 4, generator=generator),
        "bf16": torch.randn(5, generator=generator).to(torch.bfloat16),
        "f16": torch.randn(2, 2, 2, generator=generator).half(),
        "f64": torch.randn(3, generator=generator).double(),
        "i64": torch.arange(4),
        "i8": torch.arange(-3, 3).to(torch.int8),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
    }
    safetensors.torch.save_file(tensors, OUT / "tiny.safetensors", metadata={"format": "pt"})
    expected["tiny.safetensors"] = {
        name: {
            "shape": list(t.shape),
            "dtype": str(t.dtype).removeprefix("torch."),
            "sha256": hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes() if t.dim() else t.numpy().tobytes()).hexdigest(),
        }
        for name, t in tensors.items()
    }
    (OUT / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
