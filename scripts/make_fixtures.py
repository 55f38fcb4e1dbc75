"""Makes the tiny reference models of tests/models/fixtures with transformers' own classes, and GGUF twins of them.

    DEVELOPMENT_PYTHON scripts/make_fixtures.py [NAME …]        # all by default; needs torch, transformers, safetensors, gguf

Neither the project nor its tests import any of these; the fixtures are committed. Each is a folder with `config.json` and
`model.safetensors` (as the class saves them, weights rounded to bf16), `logits.npy` (f32 [40, 256]: the logits after each of 40
tokens, a prompt of 24 and 16 decode steps, computed in fp32), `fixture.json` (tokens, seed, versions), and for most a
`model.gguf` whose tensors are changed as llama.cpp's converter changes them: q and k rows permuted for the architectures that
rotate pairs, 1 added to Gemma's norms, rope factors as tensors. The permutation is written here from its definition ([2, d/2]
-> [d/2, 2] in each head); where the optional package accelerate is there, transformers' own GGUF loader (which undoes the
changes) must find the same weights in the twin.

Weights have standard deviation 1.5/√fan-in, norm weights 1 ± 0.3, biases 0.3: with the usual 0.02 wrong models pass. InternLM2
has no class in transformers: it is a Llama whose q, k, v are fused per kv head here, so its logits are Llama's.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

FIXTURES = Path(__file__).parent.parent / "tests" / "models" / "fixtures"
PROMPT, DECODE, VOCAB = 24, 16, 256
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
HEADS16 = {"head_dim": 16}
LONG = [1.0 + 0.6 * i for i in range(6)]
SHORT = [1.0 + 0.1 * i for i in range(6)]


@dataclass(frozen=True)
class Fixture:
    """kind: the transformers model type; config: beside SMALL; gguf: architecture of the twin ("" for none); short: also
    logits of so many tokens alone (scalings whose variant depends on the length); own: applied to (config, tensors) last."""

    kind: str
    config: dict[str, Any] = field(default_factory=dict)
    gguf: str = ""
    short: int = 0
    own: Callable[[dict[str, Any], dict[str, torch.Tensor]], tuple[dict[str, Any], dict[str, torch.Tensor]]] | None = None


def _rope(kind: str, theta: float = 10_000.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


def _as_internlm2(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A Llama model under InternLM2's names: rows of wqkv are, for each kv head, its query heads, then k, then v."""
    heads, kv, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    names = {
        "model.embed_tokens": "model.tok_embeddings", "lm_head": "output", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
    }  # fmt: skip
    out = {}
    for name, data in tensors.items():
        if ".self_attn.q_proj." in name:
            q, k, v = (tensors[name.replace("q_proj", p)] for p in ("q_proj", "k_proj", "v_proj"))
            groups = []
            for g in range(kv):
                share = heads // kv
                groups += [q[g * share * dim : (g + 1) * share * dim], k[g * dim : (g + 1) * dim], v[g * dim : (g + 1) * dim]]
            out[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat(groups).contiguous()
        elif ".self_attn.k_proj." not in name and ".self_attn.v_proj." not in name:
            for old, new in names.items():
                name = name.replace(old, new)
            out[name] = data
    theta = config.pop("rope_parameters")["rope_theta"]
    keep = {k: v for k, v in config.items() if k not in ("attention_bias", "mlp_bias", "head_dim", "architectures")}
    return {**keep, "model_type": "internlm2", "bias": True, "rope_theta": theta, "rope_scaling": None}, out


def _nested(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Gemma 3 as the larger models are published: the text model inside, a vision tower beside it, keys of transformers 4."""
    rope = config.pop("rope_parameters")
    full = dict(rope["full_attention"])
    text = {**config, "rope_theta": full.pop("rope_theta"), "rope_local_base_freq": rope["sliding_attention"]["rope_theta"]}
    text["rope_scaling"] = full
    text.pop("layer_types")
    text["sliding_window_pattern"] = 3
    out = {"language_model." + name: data for name, data in tensors.items()}
    out["vision_tower.embeddings.weight"] = torch.zeros(2, 2, dtype=torch.bfloat16)
    return {"model_type": "gemma3", "text_config": text}, out


def _by_interval(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Qwen3-Next as published: which layers have attention follows from the interval, and is not listed."""
    return {k: v for k, v in config.items() if k != "layer_types"}, tensors


def _published(model: Any) -> dict[str, torch.Tensor]:
    """The tensors under the names of published files: the class may hold all experts of a layer as one."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def _as_kimi(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """DeepSeek-V3 under another name, with a layer behind the last one that predicts a further token."""
    more = {n.replace("layers.1.", "layers.2."): t.clone() for n, t in tensors.items() if ".layers.1.input" in n}
    return {**config, "model_type": "kimi_k2", "num_nextn_predict_layers": 1}, {**tensors, **more}


MLA = {
    "moe_intermediate_size": 16, "num_experts_per_tok": 3, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "first_k_dense_replace": 1, "tie_word_embeddings": True,
}  # fmt: skip
MOE = {"moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 2}
BIASED = {"attention_bias": True, "mlp_bias": True}
GEMMA = {**HEADS16, "query_pre_attn_scalar": 16, "sliding_window": 8, "rms_norm_eps": 1e-6}
GEMMA3_ROPE = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
}
GEMMA3 = {**GEMMA, **GEMMA3_ROPE, "num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}

FIXTURES_BY_NAME = {
    "llama": Fixture("llama", {**HEADS16, **BIASED, **_rope("default", 500.0)}, gguf="llama"),
    "llama_linear": Fixture("llama", {**HEADS16, "tie_word_embeddings": True, **_rope("linear", factor=4.0)}, gguf="llama"),
    "llama_dynamic": Fixture("llama", {**HEADS16, "max_position_embeddings": 16, **_rope("dynamic", factor=3.0)}, short=12),
    "llama_llama3": Fixture(
        "llama",
        {
            **HEADS16,
            **_rope(
                "llama3", 500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
            ),
        },
        gguf="llama",
    ),
    "llama_yarn": Fixture("llama", {**HEADS16, **_rope("yarn", factor=4.0, original_max_position_embeddings=16)}, gguf="llama"),
    "llama_yarn_options": Fixture(
        "llama",
        {
            **HEADS16,
            **_rope(
                "yarn",
                500.0,
                factor=4.0,
                original_max_position_embeddings=16,
                beta_fast=1.2,
                beta_slow=0.3,
                truncate=False,
                mscale=1.4,
                mscale_all_dim=0.6,
            ),
        },
    ),
    "mistral": Fixture("mistral", {**HEADS16, "sliding_window": 8, **_rope("default")}),
    "smollm3": Fixture(
        "smollm3", {"num_hidden_layers": 4, "tie_word_embeddings": True, **_rope("default", 500.0)}, gguf="smollm3"
    ),
    "qwen2": Fixture(
        "qwen2",
        {"tie_word_embeddings": True, **_rope("yarn", 500.0, factor=4.0, original_max_position_embeddings=16)},
        gguf="qwen2",
    ),
    "qwen2_window": Fixture(
        "qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, **_rope("default")}
    ),
    "qwen3": Fixture("qwen3", {**HEADS16, **_rope("default", 500.0)}, gguf="qwen3"),
    "phi3": Fixture(
        "phi3",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "sliding_window": 12,
            "original_max_position_embeddings": 16,
            **_rope(
                "longrope",
                short_factor=SHORT,
                long_factor=LONG,
                partial_rotary_factor=0.75,
                original_max_position_embeddings=16,
            ),
        },
        gguf="phi3",
        short=12,
    ),
    "internlm2": Fixture(
        "llama", {"head_dim": 8, "attention_bias": True, **_rope("default", 500.0)}, gguf="internlm2", own=_as_internlm2
    ),
    "internlm3": Fixture("internlm3", {**HEADS16, **BIASED, **_rope("dynamic", 500.0, factor=6.0)}),
    "gemma2": Fixture(
        "gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, **_rope("default")}, gguf="gemma2"
    ),
    "gemma2_scale": Fixture(
        "gemma2",
        {
            **GEMMA,
            "query_pre_attn_scalar": 24,
            "attention_bias": True,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            **_rope("default"),
        },
    ),
    "gemma3": Fixture("gemma3_text", GEMMA3, gguf="gemma3"),
    "gemma3_nested": Fixture("gemma3_text", {**GEMMA3, "query_pre_attn_scalar": 24, "hidden_size": 48}, own=_nested),
    "qwen2_moe": Fixture(
        "qwen2_moe",
        {
            **MOE,
            "num_hidden_layers": 3,
            "num_experts_per_tok": 3,
            "shared_expert_intermediate_size": 24,
            "mlp_only_layers": [1],
            "tie_word_embeddings": True,
            **_rope("default", 500.0),
        },
    ),
    "qwen2_moe_all": Fixture(
        "qwen2_moe",
        {**MOE, "shared_expert_intermediate_size": 24, "tie_word_embeddings": True, **_rope("default", 500.0)},
        gguf="qwen2moe",
    ),
    "qwen3_moe": Fixture(
        "qwen3_moe", {**MOE, "head_dim": 8, "norm_topk_prob": True, "tie_word_embeddings": True, **_rope("default", 500.0)},
        gguf="qwen3moe",
    ),
    "mixtral": Fixture(
        "mixtral",
        {"intermediate_size": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None, **_rope("default", 500.0)},
        gguf="llama",
    ),
    "olmoe": Fixture(
        "olmoe",
        {**MOE, "intermediate_size": 16, "num_experts_per_tok": 3, "tie_word_embeddings": True, **_rope("default", 500.0)},
        gguf="olmoe",
    ),
    "granite_moe": Fixture(
        "granitemoe",
        {
            "intermediate_size": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.5,
            "logits_scaling": 2.5,
            "tie_word_embeddings": True,
            **_rope("default", 500.0),
        },
        gguf="granitemoe",
    ),
    "deepseek_v2": Fixture(
        "deepseek_v2",
        {
            **MLA,
            "q_lora_rank": None,
            "n_routed_experts": 6,
            "n_group": 3,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.7,
            "num_key_value_heads": 4,
            **_rope("default", 500.0),
        },
        gguf="deepseek2",
    ),
    "deepseek_v3": Fixture(
        "deepseek_v3",
        {
            **MLA,
            "q_lora_rank": 16,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "num_key_value_heads": 4,
            **_rope("yarn", 500.0, factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0),
        },
        gguf="deepseek2",
    ),
    "kimi_k2": Fixture(
        "deepseek_v3",
        {
            **MLA,
            "num_hidden_layers": 2,
            "q_lora_rank": 16,
            "n_routed_experts": 6,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.8,
            "norm_topk_prob": True,
            "num_key_value_heads": 4,
            **_rope("default", 500.0),
        },
        own=_as_kimi,
    ),
    "gpt_oss": Fixture(
        "gpt_oss",
        {
            **HEADS16,
            "intermediate_size": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "tie_word_embeddings": True,
            **_rope("yarn", 500.0, factor=4.0, original_max_position_embeddings=16, truncate=False),
        },
        gguf="gpt-oss",
    ),
    "qwen3_next": Fixture(
        "qwen3_next",
        {
            **MOE,
            "moe_intermediate_size": 8,
            "num_experts": 4,
            "head_dim": 8,
            "num_hidden_layers": 8,
            "full_attention_interval": 4,
            "norm_topk_prob": True,
            "shared_expert_intermediate_size": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 6,
            "linear_conv_kernel_dim": 4,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            **_rope("default", 500.0, partial_rotary_factor=0.5),
        },
        own=_by_interval,
    ),
}
"""Folder name -> how it is made."""


def make(name: str, fixture: Fixture, seed: int) -> None:
    """Writes one fixture folder."""
    folder = FIXTURES / name
    folder.mkdir(parents=True, exist_ok=True)
    config = transformers.AutoConfig.for_model(fixture.kind, **{**SMALL, **fixture.config})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            weight.copy_(_random(key, weight.shape, generator, fixture.kind).to(torch.bfloat16).float())
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_((0.3 * torch.randn(buffer.shape, generator=generator)).to(torch.bfloat16))
    ids = torch.randint(3, VOCAB, (1, PROMPT + DECODE), generator=generator)
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0]
        if not fixture.short:
            _check_decode(model, ids, logits)
        short = model(ids[:, : fixture.short], use_cache=False).logits[0] if fixture.short else None
    np.save(folder / "logits.npy", logits.numpy().astype(np.float32))
    if short is not None:
        np.save(folder / "short_logits.npy", short.numpy().astype(np.float32))
    saved = json.loads(model.config.to_json_string(use_diff=False))
    saved = {k: v for k, v in saved.items() if k in fixture.config or k in SMALL or k in KEEP}
    saved |= {k: v for k, v in fixture.config.items() if k not in saved and v is not None}  # under the name of published files
    tensors = {k: v.to(torch.bfloat16).contiguous() for k, v in _published(model).items()}
    if fixture.gguf:
        write_gguf(folder / "model.gguf", fixture.gguf, saved, {k: v.float().numpy() for k, v in tensors.items()})
    if fixture.own is not None:
        saved, tensors = fixture.own(saved, tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(saved, indent=1) + "\n")
    about = {
        "ids": ids[0].tolist(), "prompt": PROMPT, "short": fixture.short, "seed": seed, "class": type(model).__name__,
        "transformers": transformers.__version__, "torch": torch.__version__, "gguf": fixture.gguf,
    }  # fmt: skip
    (folder / "fixture.json").write_text(json.dumps(about) + "\n")
    if fixture.gguf in LOADABLE and importlib.util.find_spec("accelerate"):
        _check_twin(folder, ids, logits)
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{name}: {type(model).__name__}, std(logits) {logits.std():.3f}, {size} bytes")


KEEP = (
    "model_type", "architectures", "head_dim", "hidden_act", "hidden_activation", "tie_word_embeddings", "rope_parameters",
    "sliding_window", "layer_types", "attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval",
    "use_sliding_window", "num_local_experts", "num_experts",
)  # fmt: skip


def _random(key: str, shape: torch.Size, generator: torch.Generator, kind: str) -> torch.Tensor:
    x = torch.randn(shape, generator=generator)
    if "norm" in key:
        if key.endswith("linear_attn.norm.weight"):
            return 1.0 + 0.3 * x
        return 0.3 * x if kind == "qwen3_next" or kind.startswith("gemma") else 1.0 + 0.3 * x
    if key.endswith(("bias", "A_log")):
        return 0.3 * x
    if key.endswith("experts.gate_up_proj"):
        return x  # so large that the activation is clamped
    spread = 1.0 if kind == "qwen3_next" else 1.5  # over eight layers, 1.5 carries f32's own rounding too far
    return x if "embed" in key else x * (spread / math.sqrt(shape[-1]))


def _check_decode(model: Any, ids: torch.Tensor, logits: torch.Tensor) -> None:
    """The class itself agrees between one pass and a prefill followed by decode steps."""
    out = model(ids[:, :PROMPT], use_cache=True)
    for step in range(PROMPT, ids.shape[1]):
        out = model(ids[:, step : step + 1], cache=out.cache, use_cache=True)
        worst = (out.logits[0, -1] - logits[step]).abs().max().item()
        if worst > 1e-4 * logits.std().item():
            raise SystemExit(f"step {step}: prefill and decode differ by {worst}")


def _check_twin(folder: Path, ids: torch.Tensor, logits: torch.Tensor) -> None:
    """transformers reads the same model from the twin."""
    config = transformers.AutoConfig.from_pretrained(folder)
    twin = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file="model.gguf", config=config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        worst = (twin.eval()(ids, use_cache=False).logits[0] - logits).abs().max().item()
    if worst > 1e-5 * logits.std().item():
        raise SystemExit(f"{folder.name}: transformers reads another model from the twin (logits differ by {worst})")


# GGUF -----------------------------------------------------------------------------------------------------------------

LOADABLE = ("llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3")
"""Architectures that transformers loads from GGUF."""
PAIRS = ("llama", "smollm3", "internlm2", "granitemoe")
LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.router": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp", "block_sparse_moe.router.layer": "ffn_gate_inp",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}  # fmt: skip
EXPERT_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


def _stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts as the converter writes them: one tensor [E, out, in] for each of gate, up and down of a layer."""
    out: dict[str, Any] = {}
    for name, data in tensors.items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight", name)
        alternate = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)(_bias)?", name)
        fused = re.fullmatch(r"model\.layers\.(\d+)\.block_sparse_moe\.(input|output)_linear\.weight", name)
        if match:
            out.setdefault(f"blk.{match[1]}.ffn_{EXPERT_PARTS[match[3]]}_exps.weight", {})[int(match[2])] = data
        elif alternate and alternate[2] == "gate_up_proj":
            for part, start in (("gate", 0), ("up", 1)):
                rows = data[..., start::2]
                out[f"blk.{alternate[1]}.ffn_{part}_exps.{'bias' if alternate[3] else 'weight'}"] = rows if alternate[3] else rows.swapaxes(1, 2)
        elif alternate:
            name = f"blk.{alternate[1]}.ffn_down_exps.{'bias' if alternate[3] else 'weight'}"
            out[name] = data if alternate[3] else data.swapaxes(1, 2)
        elif fused and fused[2] == "input":
            half = data.shape[1] // 2
            out[f"blk.{fused[1]}.ffn_gate_exps.weight"] = data[:, :half]
            out[f"blk.{fused[1]}.ffn_up_exps.weight"] = data[:, half:]
        elif fused:
            out[f"blk.{fused[1]}.ffn_down_exps.weight"] = data
        else:
            out[name] = data
    return {n: np.stack([d[i] for i in range(len(d))]) if isinstance(d, dict) else d for n, d in out.items()}


def _gguf_latent(w: gguf.GGUFWriter, c: dict[str, Any]) -> None:
    """Keys of latent attention and of DeepSeek's router."""
    w.add_kv_lora_rank(c["kv_lora_rank"])
    if c["q_lora_rank"]:
        w.add_q_lora_rank(c["q_lora_rank"])
    w.add_key_length(c["kv_lora_rank"] + c["qk_rope_head_dim"])
    w.add_value_length(c["kv_lora_rank"])
    w.add_key_length_mla(c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    w.add_value_length_mla(c["v_head_dim"])
    w.add_rope_dimension_count(c["qk_rope_head_dim"])
    w.add_leading_dense_block_count(c["first_k_dense_replace"])
    w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    w.add_expert_shared_count(c["n_shared_experts"])
    w.add_expert_weights_scale(c["routed_scaling_factor"])
    w.add_expert_weights_norm(bool(c.get("norm_topk_prob")))
    v3 = c["model_type"] == "deepseek_v3"
    w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if v3 else gguf.ExpertGatingFuncType.SOFTMAX)
    w.add_expert_group_count(c["n_group"])
    w.add_expert_group_used_count(c["topk_group"])
    rope = c["rope_parameters"]
    if rope["rope_type"] == "yarn":
        w.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _split_kv_b(tensors: dict[str, np.ndarray], c: dict[str, Any]) -> dict[str, np.ndarray]:
    """kv_b_proj [H (nope + v), latent] as k_b [H, latent, nope] and v_b [H, v, latent]."""
    out = {}
    for name, data in tensors.items():
        if "kv_b_proj" not in name:
            out[name] = data
            continue
        both = data.reshape(c["num_attention_heads"], c["qk_nope_head_dim"] + c["v_head_dim"], -1)
        layer = name.split(".")[2]
        out[f"blk.{layer}.attn_k_b.weight"] = both[:, : c["qk_nope_head_dim"]].swapaxes(1, 2)
        out[f"blk.{layer}.attn_v_b.weight"] = both[:, c["qk_nope_head_dim"] :]
    return out


def _gguf_experts(w: gguf.GGUFWriter, arch: str, c: dict[str, Any]) -> None:
    """Keys of a mixture of experts, as far as the converter writes them for this architecture."""
    count = c.get("num_experts") or c.get("num_local_experts") or c.get("n_routed_experts")
    if not count:
        return
    w.add_expert_count(count)
    w.add_expert_used_count(c["num_experts_per_tok"])
    if arch in ("qwen2moe", "qwen3moe"):
        w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    if arch == "gpt-oss":
        w.add_expert_feed_forward_length(c["intermediate_size"])
    if arch == "qwen2moe":
        w.add_expert_shared_feed_forward_length(c["shared_expert_intermediate_size"])
    if arch == "granitemoe":
        w.add_embedding_scale(c["embedding_multiplier"])
        w.add_residual_scale(c["residual_multiplier"])
        w.add_attention_scale(c["attention_multiplier"])
        w.add_logit_scale(c["logits_scaling"])


def write_gguf(path: Path, arch: str, c: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """The twin: matrices in BF16 (exact), everything else in F32."""
    w = gguf.GGUFWriter(path, arch)
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_block_count(c["num_hidden_layers"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(1 if arch == "deepseek2" else c["num_key_value_heads"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    if c.get("head_dim") and arch != "deepseek2":
        w.add_key_length(head_dim)
        w.add_value_length(head_dim)
    if arch == "deepseek2":
        _gguf_latent(w, c)
    if arch == "llama":
        w.add_vocab_size(c["vocab_size"])
    extra = _gguf_rope(w, arch, c, head_dim)
    _gguf_experts(w, arch, c)
    if arch.startswith("gemma") or arch in ("phi3", "gpt-oss"):
        w.add_sliding_window(c["sliding_window"])
    if arch == "gemma2":
        w.add_attn_logit_softcapping(c["attn_logit_softcapping"])
        w.add_final_logit_softcapping(c["final_logit_softcapping"])
    if arch == "gemma3":
        w.add_sliding_window_pattern(3)
        w.add_rope_freq_base_swa(c["rope_parameters"]["sliding_attention"]["rope_theta"])
    heads = {"q_proj": c["num_attention_heads"], "k_proj": c["num_key_value_heads"]}
    for name, data in _stacked(_split_kv_b(tensors, c)).items():
        for part, count in heads.items():
            if f".{part}." in name and arch in PAIRS:
                rest = data.shape[1:]
                data = data.reshape(count, 2, head_dim // 2, *rest).swapaxes(1, 2).reshape(data.shape)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            data = data + 1.0
        _add(w, _gguf_name(name, arch), data)
    for name, data in extra.items():
        _add(w, name, data)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def _add(w: gguf.GGUFWriter, name: str, data: np.ndarray) -> None:
    kind = gguf.GGMLQuantizationType.BF16
    if data.ndim >= 2 and not name.endswith(".bias"):
        w.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(data, np.float32), kind), raw_dtype=kind)
    else:
        w.add_tensor(name, np.ascontiguousarray(data, np.float32))


def _gguf_rope(w: gguf.GGUFWriter, arch: str, c: dict[str, Any], head_dim: int) -> dict[str, np.ndarray]:
    """Writes the rope keys; returns the factors that are tensors."""
    rope = c["rope_parameters"].get("full_attention", c["rope_parameters"])
    w.add_rope_freq_base(rope["rope_theta"])
    kind, original = rope["rope_type"], rope.get("original_max_position_embeddings", 0)
    if arch == "llama":
        w.add_rope_dimension_count(head_dim)
    if kind in ("linear", "yarn"):
        w.add_rope_scaling_type(gguf.RopeScalingType(kind))
        w.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        w.add_rope_scaling_orig_ctx_len(original)
    if kind == "llama3":
        freq = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
        wavelength = 2 * math.pi / freq
        smooth = (original / wavelength - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        between = 1 / ((1 - smooth) / rope["factor"] + smooth)
        long = np.where(wavelength > original / rope["low_freq_factor"], rope["factor"], between)
        return {"rope_freqs.weight": np.where(wavelength < original / rope["high_freq_factor"], 1.0, long)}
    if kind == "longrope":
        stretch = c["max_position_embeddings"] / original
        w.add_rope_dimension_count(int(rope["partial_rotary_factor"] * head_dim))
        w.add_rope_scaling_orig_ctx_len(original)
        w.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))
        return {f"rope_factors_{n}.weight": np.array(rope[f"{n}_factor"]) for n in ("long", "short")}
    return {}


def _gguf_name(name: str, arch: str) -> str:
    stem, _, kind = name.rpartition(".")
    if name.startswith("blk."):
        return name
    if kind == "sinks":
        return f"blk.{name.split('.')[2]}.attn_sinks.weight"
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if stem in top:
        return f"{top[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    if kind == "e_score_correction_bias":
        return f"blk.{layer}.exp_probs_b.bias"
    if arch == "gpt-oss" and rest == "post_attention_layernorm":
        return f"blk.{layer}.post_attention_norm.{kind}"
    if arch.startswith("gemma"):
        sandwich = {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
                    "post_feedforward_layernorm": "post_ffw_norm"}  # fmt: skip
        return f"blk.{layer}.{sandwich.get(rest) or LAYER[rest]}.{kind}"
    return f"blk.{layer}.{'ffn_norm' if rest == 'post_attention_layernorm' else LAYER[rest]}.{kind}"


def main() -> None:
    """Makes the named fixtures, or all."""
    for seed, (name, fixture) in enumerate(FIXTURES_BY_NAME.items(), start=1):
        if len(sys.argv) == 1 or name in sys.argv[1:]:
            make(name, fixture, seed)


if __name__ == "__main__":
    main()
