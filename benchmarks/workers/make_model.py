"""Writes a model with random weights in a real shape: run by the Python of a peer's environment, which has `gguf` and llama.cpp.

    python make_model.py SHAPE.json OUT

OUT ends with .gguf, and the shape says its type: BF16 is written here, every other type by llama.cpp's own quantiser, from the BF16 file
beside it. Without .gguf, OUT becomes a Hugging Face folder with the same weights in bf16. Values are normal with a deviation of 0.02; each
tensor has its own seed. The vocabulary is synthetic and valid: 256 bytes, and byte pairs and triples made by merges.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

FILE_TYPES = {"q4_0": 2, "q4_1": 3, "q8_0": 7, "q4_k_m": 15, "q5_k_m": 17, "q6_k": 18}
"""Numbers of llama.cpp's `enum llama_ftype`."""
SPECIALS = ("<|begin|>", "<|end|>")


def tensors(shape: dict[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(GGUF name, Hugging Face name, shape) of every tensor; experts are stacked in GGUF and have `{e}` in their other name."""
    C, D = shape["hidden_size"], shape["head_dim"]
    H, K, F, E = shape["num_heads"], shape["num_kv_heads"], shape["ffn_size"], shape.get("num_experts", 0)
    yield "token_embd.weight", "model.embed_tokens.weight", (shape["vocab_size"], C)
    yield "output_norm.weight", "model.norm.weight", (C,)
    for i in range(shape["num_layers"]):
        ours, theirs = f"blk.{i}.", f"model.layers.{i}."
        yield ours + "attn_norm.weight", theirs + "input_layernorm.weight", (C,)
        yield ours + "attn_q.weight", theirs + "self_attn.q_proj.weight", (H * D, C)
        yield ours + "attn_k.weight", theirs + "self_attn.k_proj.weight", (K * D, C)
        yield ours + "attn_v.weight", theirs + "self_attn.v_proj.weight", (K * D, C)
        yield ours + "attn_output.weight", theirs + "self_attn.o_proj.weight", (C, H * D)
        yield ours + "ffn_norm.weight", theirs + "post_attention_layernorm.weight", (C,)
        if E:
            yield ours + "attn_q_norm.weight", theirs + "self_attn.q_norm.weight", (D,)
            yield ours + "attn_k_norm.weight", theirs + "self_attn.k_norm.weight", (D,)
            yield ours + "ffn_gate_inp.weight", theirs + "mlp.gate.weight", (E, C)
            for name in ("gate", "up", "down"):
                size = (E, C, F) if name == "down" else (E, F, C)
                yield f"{ours}ffn_{name}_exps.weight", theirs + f"mlp.experts.{{e}}.{name}_proj.weight", size
        else:
            for name in ("gate", "up", "down"):
                yield f"{ours}ffn_{name}.weight", f"{theirs}mlp.{name}_proj.weight", (C, F) if name == "down" else (F, C)


def values(name: str, size: tuple[int, ...]) -> np.ndarray:
    """f32 of that shape: ones for norms, else random. Large tensors repeat a drawn million, rolled differently in every row block."""
    count = int(np.prod(size))
    if "norm" in name:
        return np.ones(size, np.float32)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    drawn = min(count, 1_000_003)  # a prime, so that no two rows are the same
    block = rng.standard_normal(drawn, np.float32) * np.float32(0.02)
    return np.resize(block, size)


def bf16(array: np.ndarray) -> np.ndarray:
    """The upper halves of f32, u16 of the same shape."""
    return (array.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def byte_letters() -> list[str]:
    """The printable letter of each of the 256 bytes, as byte-level BPE has them (GPT-2's encoder.py, bytes_to_unicode)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(spare)) for b in range(256)]


def vocabulary(size: int) -> tuple[list[str], list[str]]:
    """(`size` tokens, merges): bytes, pairs, triples, then the special tokens."""
    letters = byte_letters()
    pieces, merges = list(letters), []
    parents = iter(letters[33:127] + letters[:33] + letters[127:])
    queue: list[str] = []
    while len(pieces) < size - len(SPECIALS):
        parent = next(parents, None)
        if parent is None:
            parent = queue.pop(0)
        for letter in letters:
            if len(pieces) == size - len(SPECIALS):
                break
            pieces.append(parent + letter)
            merges.append(f"{parent} {letter}")
            if len(parent) == 1:
                queue.append(parent + letter)
    return [*pieces, *SPECIALS], merges


def write_gguf(shape: dict[str, Any], path: Path) -> None:
    """The BF16 file (norms in F32, as converters do)."""
    import gguf

    arch = "qwen3moe" if shape.get("num_experts") else "llama"
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_name(shape["name"])
    writer.add_context_length(shape["context"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_layers"])
    writer.add_feed_forward_length(shape["ffn_size"])
    writer.add_head_count(shape["num_heads"])
    writer.add_head_count_kv(shape["num_kv_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_rope_dimension_count(shape["head_dim"])
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape["vocab_size"])
    if arch == "qwen3moe":
        writer.add_expert_count(shape["num_experts"])
        writer.add_expert_used_count(shape["experts_per_token"])
        writer.add_expert_feed_forward_length(shape["ffn_size"])
    pieces, merges = vocabulary(shape["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if arch == "qwen3moe" else "llama-bpe")
    writer.add_token_list(pieces)
    writer.add_token_types([gguf.TokenType.CONTROL if p in SPECIALS else gguf.TokenType.NORMAL for p in pieces])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(len(pieces) - 2)
    writer.add_eos_token_id(len(pieces) - 1)
    sizes = [(name, size) for name, _, size in tensors(shape)]
    for name, size in sizes:
        plain = len(size) == 1 or "gate_inp" in name
        kind = gguf.GGMLQuantizationType.F32 if plain else gguf.GGMLQuantizationType.BF16
        count = int(np.prod(size))
        if plain:
            writer.add_tensor_info(name, size, np.dtype(np.float32), count * 4, kind)
        else:  # the writer takes the shape in bytes for types that numpy has not
            writer.add_tensor_info(name, (*size[:-1], size[-1] * 2), np.dtype(np.uint8), count * 2, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, size in sizes:
        plain = len(size) == 1 or "gate_inp" in name
        writer.write_tensor_data(values(name, size) if plain else bf16(values(name, size)).view(np.uint8))
    writer.close()


def quantise(source: Path, target: Path, kind: str, threads: int) -> None:
    """By llama.cpp. Raises RuntimeError if it refuses."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread, params.ftype = threads, FILE_TYPES[kind]
    code = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
    if code:
        raise RuntimeError(f"llama_model_quantize returned {code}")


def write_folder(shape: dict[str, Any], folder: Path) -> None:
    """A Hugging Face folder: config.json, model.safetensors in bf16, tokenizer.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    arrays: list[tuple[str, np.ndarray]] = []
    for ours, theirs, size in tensors(shape):
        if "{e}" in theirs:
            arrays += [(theirs.format(e=e), bf16(part)) for e, part in enumerate(values(ours, size))]
        else:
            arrays.append((theirs, bf16(values(ours, size))))
    arrays.append(("lm_head.weight", arrays[0][1]))  # the embedding, tied; some engines look for it in the file
    header: dict[str, Any] = {}
    offset = 0
    for name, array in arrays:
        header[name] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, array in arrays:
            out.write(memoryview(array.reshape(-1)).cast("B"))
    pieces, merges = vocabulary(shape["vocab_size"])
    bpe = models.BPE({p: i for i, p in enumerate(pieces)}, [tuple(m.split(" ")) for m in merges])
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    moe = bool(shape.get("num_experts"))
    config = {
        "architectures": ["Qwen3MoeForCausalLM" if moe else "LlamaForCausalLM"],
        "model_type": "qwen3_moe" if moe else "llama",
        "hidden_size": shape["hidden_size"],
        "intermediate_size": shape["ffn_size"],
        "num_hidden_layers": shape["num_layers"],
        "num_attention_heads": shape["num_heads"],
        "num_key_value_heads": shape["num_kv_heads"],
        "head_dim": shape["head_dim"],
        "vocab_size": shape["vocab_size"],
        "max_position_embeddings": shape["context"],
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": len(pieces) - 2,
        "eos_token_id": len(pieces) - 1,
    }
    if moe:
        config |= {"num_experts": shape["num_experts"], "num_experts_per_tok": shape["experts_per_token"]}
        config |= {"moe_intermediate_size": shape["ffn_size"], "norm_topk_prob": True, "decoder_sparse_step": 1}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    special = {"bos_token": SPECIALS[0], "eos_token": SPECIALS[1], "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))


def main() -> None:
    """Makes one model under a temporary name, and renames it when it is whole."""
    shape, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    part = out.with_name(f"{out.name}.part{os.getpid()}")
    if out.suffix != ".gguf":
        part.mkdir()
        write_folder(shape, part)
    elif shape["type"] == "bf16":
        write_gguf(shape, part)
    else:
        source = out.with_name(f"{shape['name']}-bf16.gguf")
        quantise(source, part, shape["type"], len(os.sched_getaffinity(0)))
    part.rename(out)


if __name__ == "__main__":
    main()
