"""Tiny seeded models of twelve architectures, saved as real files: loader, packing and planner are in the test with the backend.

2 layers, hidden size 64, vocabulary 257, weights of standard deviation 1.5/√fan-in, norms 1 ± 0.3, no zero biases: with the
usual 0.02 wrong models pass. Files are safetensors folders in f32, f16 or bf16, and GGUF in Q8_0 and Q4_0.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from . import blocks
from .numbers import Numbers

__all__ = ["MODELS", "TinyModel", "save"]

Array = np.ndarray
VOCABULARY, HIDDEN, INNER, LAYERS = 257, 64, 96, 2
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
GEMMA: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, **WINDOWS,
}  # fmt: skip
MLA: dict[str, Any] = {
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "first_k_dense_replace": 1,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "moe_intermediate_size": 32,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True,
}  # fmt: skip
NEXT: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.5, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "norm_topk_prob": True,
}  # fmt: skip


@dataclass(frozen=True)
class TinyModel:
    """config: config.json beside `BASE`, with `model_type`; format: of the matrices; parts: which tensors a layer has."""

    config: dict[str, Any]
    format: str = "f32"
    parts: tuple[str, ...] = ("split", "gated")
    gguf: bool = False
    sets: dict[str, Any] = field(default_factory=dict)


MODELS: dict[str, TinyModel] = {
    "llama-f32": TinyModel({"model_type": "llama"}),
    "llama-q8_0": TinyModel({"model_type": "llama"}, "q8_0", gguf=True),
    "llama-q4_0": TinyModel({"model_type": "llama"}, "q4_0", gguf=True),
    "mistral-f16": TinyModel({"model_type": "mistral", "sliding_window": 8}, "f16"),
    "qwen2-bf16": TinyModel({"model_type": "qwen2"}, "bf16", ("split", "gated", "qkv_bias")),
    "qwen3-f32": TinyModel({"model_type": "qwen3", "tie_word_embeddings": True}, "f32", ("split", "gated", "qk_norm")),
    "phi3-f16": TinyModel({"model_type": "phi3", "sliding_window": None, "pad_token_id": 0}, "f16", ("fused",)),
    "smollm3-f32": TinyModel({"model_type": "smollm3", "no_rope_layers": [1, 0], "pad_token_id": 0}),
    "gemma2-bf16": TinyModel({"model_type": "gemma2", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **GEMMA}, "bf16", ("split", "gated", "sandwich")),
    "gemma3-f32": TinyModel({"model_type": "gemma3_text", "rope_local_base_freq": 1000.0, **GEMMA}, "f32", ("split", "gated", "sandwich", "qk_norm")),
    "gpt_oss-bf16": TinyModel({"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, **WINDOWS}, "bf16", ("split", "qkv_bias", "o_bias", "sinks", "fused_experts")),
    "deepseek_v3-f32": TinyModel({**MLA, "model_type": "deepseek_v3", "num_key_value_heads": 4}, "f32", ("latent", "gated", "routed")),
    "qwen3_next-f32": TinyModel({**NEXT, "model_type": "qwen3_next"}, "f32", ("split", "qk_norm", "attn_gate", "delta", "shared")),
    "mixtral-f32": TinyModel({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}, "f32", ("split", "experts")),
}  # fmt: skip


def _matrix(numbers: Numbers, rows: int, columns: int) -> Array:
    return numbers.normal(rows, columns) * np.float32(1.5 / np.sqrt(columns))


def _norm(numbers: Numbers, width: int, gemma: bool) -> Array:
    """Norm weights 1 ± 0.3; Gemma and Qwen3-Next store them minus one."""
    return (numbers.normal(width) * np.float32(0.3) + np.float32(0 if gemma else 1)).astype(np.float32)


def tensors(model: TinyModel, seed: int) -> dict[str, Array]:
    """name -> f32 values, under the names of Hugging Face."""
    n, c = Numbers(seed), {**BASE, **model.config}
    hidden, dim, heads, kv = HIDDEN, c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]
    gemma = c["model_type"].startswith("gemma") or "delta" in model.parts
    out = {"model.embed_tokens.weight": n.normal(VOCABULARY, hidden), "model.norm.weight": _norm(n, hidden, gemma)}
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = _matrix(n, VOCABULARY, hidden)
    else:
        out["model.embed_tokens.weight"] *= np.float32(1.5 / np.sqrt(hidden))
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if "sandwich" in model.parts else []
        for name in norms:
            out[f"{at}{name}.weight"] = _norm(n, hidden, gemma)
        sizes = {"q_proj": heads * dim * (2 if "attn_gate" in model.parts else 1), "k_proj": kv * dim, "v_proj": kv * dim}
        if "shared" in model.parts:
            out |= _shared(n, c, f"{at}mlp.")
        if "delta" in model.parts and c["layer_types"][i] == "linear_attention":
            out |= _delta_net(n, c, f"{at}linear_attn.")
            continue
        if "latent" in model.parts:
            out |= _latent(n, c, f"{at}self_attn.")
            if i >= c["first_k_dense_replace"]:
                out |= _routed(n, c, f"{at}mlp.")
                continue
        elif "fused" in model.parts:
            out[f"{at}self_attn.qkv_proj.weight"] = _matrix(n, sum(sizes.values()), hidden)
            out[f"{at}mlp.gate_up_proj.weight"] = _matrix(n, 2 * INNER, hidden)
            out[f"{at}mlp.down_proj.weight"] = _matrix(n, hidden, INNER)
        else:
            for name, rows in sizes.items():
                out[f"{at}self_attn.{name}.weight"] = _matrix(n, rows, hidden)
                if "qkv_bias" in model.parts:
                    out[f"{at}self_attn.{name}.bias"] = n.normal(rows) * np.float32(0.3)
        if "latent" not in model.parts:
            out[f"{at}self_attn.o_proj.weight"] = _matrix(n, hidden, heads * dim)
        if "o_bias" in model.parts:
            out[f"{at}self_attn.o_proj.bias"] = n.normal(hidden) * np.float32(0.3)
        if "sinks" in model.parts:
            out[f"{at}self_attn.sinks"] = n.normal(heads)
        if "fused_experts" in model.parts:
            out |= _fused_experts(n, c, f"{at}mlp.")
        if "qk_norm" in model.parts:
            for name in ("q_norm", "k_norm"):
                out[f"{at}self_attn.{name}.weight"] = _norm(n, dim, gemma)
        if "gated" in model.parts:
            for name, shape in (("gate_proj", (INNER, hidden)), ("up_proj", (INNER, hidden)), ("down_proj", (hidden, INNER))):
                out[f"{at}mlp.{name}.weight"] = _matrix(n, *shape)
        if "experts" in model.parts:
            out[f"{at}block_sparse_moe.gate.weight"] = _matrix(n, c["num_local_experts"], hidden)
            for e in range(c["num_local_experts"]):
                for name, shape in (("w1", (INNER, hidden)), ("w3", (INNER, hidden)), ("w2", (hidden, INNER))):
                    out[f"{at}block_sparse_moe.experts.{e}.{name}.weight"] = _matrix(n, *shape)
    return out


def _latent(n: Numbers, c: dict[str, Any], at: str) -> dict[str, Array]:
    """Latent attention: queries and keys through small matrices, one rotated key for all heads."""
    hidden, heads, nope, rope, latent = HIDDEN, c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["kv_lora_rank"]
    return {
        f"{at}q_a_proj.weight": _matrix(n, c["q_lora_rank"], hidden),
        f"{at}q_a_layernorm.weight": _norm(n, c["q_lora_rank"], False),
        f"{at}q_b_proj.weight": _matrix(n, heads * (nope + rope), c["q_lora_rank"]),
        f"{at}kv_a_proj_with_mqa.weight": _matrix(n, latent + rope, hidden),
        f"{at}kv_a_layernorm.weight": _norm(n, latent, False),
        f"{at}kv_b_proj.weight": _matrix(n, heads * (nope + c["v_head_dim"]), latent),
        f"{at}o_proj.weight": _matrix(n, hidden, heads * c["v_head_dim"]),
    }


def _routed(n: Numbers, c: dict[str, Any], at: str) -> dict[str, Array]:
    """Experts in groups, chosen with a bias, beside one that is always taken."""
    width = c["moe_intermediate_size"]
    out = {f"{at}gate.weight": _matrix(n, c["n_routed_experts"], HIDDEN), f"{at}gate.e_score_correction_bias": n.normal(c["n_routed_experts"]) * np.float32(0.1)}
    for name in (*(f"experts.{e}" for e in range(c["n_routed_experts"])), "shared_experts"):
        for part, shape in (("gate_proj", (width, HIDDEN)), ("up_proj", (width, HIDDEN)), ("down_proj", (HIDDEN, width))):
            out[f"{at}{name}.{part}.weight"] = _matrix(n, *shape)
    return out


def _shared(n: Numbers, c: dict[str, Any], at: str) -> dict[str, Array]:
    """Experts beside one that is always taken, behind a gate."""
    out = {f"{at}gate.weight": _matrix(n, c["num_experts"], HIDDEN), f"{at}shared_expert_gate.weight": _matrix(n, 1, HIDDEN)}
    sizes = {**{f"experts.{e}": c["moe_intermediate_size"] for e in range(c["num_experts"])}, "shared_expert": c["shared_expert_intermediate_size"]}
    for name, width in sizes.items():
        for part, shape in (("gate_proj", (width, HIDDEN)), ("up_proj", (width, HIDDEN)), ("down_proj", (HIDDEN, width))):
            out[f"{at}{name}.{part}.weight"] = _matrix(n, *shape)
    return out


def _delta_net(n: Numbers, c: dict[str, Any], at: str) -> dict[str, Array]:
    """A gated delta net: one projection for queries, keys, values and gates, one for both rates, a short convolution."""
    heads, wide = c["linear_num_value_heads"], c["linear_value_head_dim"]
    keys, values = c["linear_num_key_heads"] * c["linear_key_head_dim"], heads * wide
    return {
        f"{at}in_proj_qkvz.weight": _matrix(n, 2 * keys + 2 * values, HIDDEN),
        f"{at}in_proj_ba.weight": _matrix(n, 2 * heads, HIDDEN),
        f"{at}conv1d.weight": _matrix(n, 2 * keys + values, c["linear_conv_kernel_dim"])[:, None],
        f"{at}A_log": n.normal(heads) * np.float32(0.3),
        f"{at}dt_bias": n.normal(heads) * np.float32(0.3),
        f"{at}norm.weight": _norm(n, wide, False),
        f"{at}out_proj.weight": _matrix(n, HIDDEN, values),
    }


def _fused_experts(n: Numbers, c: dict[str, Any], at: str) -> dict[str, Array]:
    """gpt-oss: gate and up alternate, matrices are [in, out], everything has a bias."""
    experts, inner = c["num_local_experts"], c["intermediate_size"]
    return {
        f"{at}router.weight": _matrix(n, experts, HIDDEN),
        f"{at}router.bias": n.normal(experts) * np.float32(0.3),
        f"{at}experts.gate_up_proj": n.normal(experts, HIDDEN, 2 * inner) * np.float32(1.5 / np.sqrt(HIDDEN)),
        f"{at}experts.gate_up_proj_bias": n.normal(experts, 2 * inner) * np.float32(0.3),
        f"{at}experts.down_proj": n.normal(experts, inner, HIDDEN) * np.float32(1.5 / np.sqrt(inner)),
        f"{at}experts.down_proj_bias": n.normal(experts, HIDDEN) * np.float32(0.3),
    }


def save(name: str, folder: Path, seed: int = 7) -> Path:
    """Writes a model; returns what `read_model` takes: the folder, or the .gguf file."""
    model = MODELS[name]
    folder.mkdir(parents=True, exist_ok=True)
    values = tensors(model, seed)
    if model.gguf:
        return _gguf(model, values, folder / f"{name}.gguf", Numbers(seed + 1))
    (folder / "config.json").write_text(json.dumps({**BASE, **model.config, "torch_dtype": "float32"}))
    header: dict[str, Any] = {}
    at, parts = 0, []
    for key, array in values.items():
        format = model.format if array.ndim >= 2 else "f32"
        data = blocks.encode_plain(format, array).tobytes()
        header[key] = {"dtype": {"f32": "F32", "f16": "F16", "bf16": "BF16"}[format], "shape": list(array.shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
        parts.append(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
    return folder


# GGUF: version 3, little-endian ------------------------------------------------------------------------------------------

TYPES = {"f32": 0, "q4_0": 2, "q8_0": 8}
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def _gguf_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _blocks_like(numbers: Numbers, format: str, array: Array) -> bytes:
    """Random blocks whose values have the deviation of `array`: quantised weights need no encoder here."""
    data = blocks.random_blocks(numbers, format, array.size).reshape(-1, blocks.BLOCK_BYTES[format][1])
    spread = {"q8_0": 74.0, "q4_0": 4.6}[format]
    scale = (float(array.std()) / spread * (0.7 + 0.6 * numbers.uniform(len(data)))).astype("<f2")
    data[:, :2] = scale.view(np.uint8).reshape(-1, 2)
    return data.tobytes()


def _gguf(model: TinyModel, values: dict[str, Array], path: Path, numbers: Numbers) -> Path:
    c = {**BASE, **model.config}
    metadata: list[tuple[str, int, bytes]] = [
        ("general.architecture", 8, _text("llama")),
        ("llama.rope.freq_base", 6, struct.pack("<f", c["rope_theta"])),
        ("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", c["rms_norm_eps"])),
    ]
    sizes = {"block_count": LAYERS, "context_length": 256, "embedding_length": HIDDEN, "feed_forward_length": INNER, "attention.head_count": 4,
             "attention.head_count_kv": 2, "rope.dimension_count": 16, "vocab_size": VOCABULARY}  # fmt: skip
    metadata += [(f"llama.{k}", 4, struct.pack("<I", v)) for k, v in sizes.items()]
    infos, parts, at = b"", [], 0
    for key, array in values.items():
        quantised = array.ndim == 2 and "norm" not in key
        data = _blocks_like(numbers, model.format, array) if quantised else array.tobytes()
        infos += _text(_gguf_name(key)) + struct.pack("<I", array.ndim) + struct.pack(f"<{array.ndim}Q", *array.shape[::-1])
        infos += struct.pack("<IQ", TYPES[model.format if quantised else "f32"], at)
        padded = data + b"\0" * (-len(data) % 32)
        parts.append(padded)
        at += len(padded)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(values), len(metadata))
    head += b"".join(_text(k) + struct.pack("<I", kind) + data for k, kind, data in metadata) + infos
    path.write_bytes(head + b"\0" * (-len(head) % 32) + b"".join(parts))
    return path
