"""Makes the reference models with scaled weights of tests/models/fixtures: DeepSeek-V3 in fp8, gpt-oss with MXFP4 experts.

    DEVELOPMENT_PYTHON scripts/make_scaled_fixtures.py [NAME …]        # needs torch, transformers, accelerate, safetensors, gguf

As `make_fixtures.py`, whose random weights these are; but the file holds codes and scales, and the logits are those of the model that transformers
makes of it with its own decoders (`dequantize=True`), in fp32. So decoding, the order of nibbles and the place of scales have a judge that is not ours.

fp8: each matrix but the embedding and the router is cast to float8_e4m3fn over the scale of its tile, max |w| / 448, in `NAME_scale_inv`. transformers takes
the size of a tile from the grid of scales, so rows and columns are multiples of the tile, or one tile. MXFP4: blocks of 32 along the inputs, sixteen bytes
each with the first of two values in the low half, and an exponent biased by 127 such that the largest value is at most 6 · 2^e.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from make_fixtures import DECODE, FIXTURES, FIXTURES_BY_NAME, KEEP, PROMPT, SMALL, _check_decode, _published, _random
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

Tensors = dict[str, torch.Tensor]
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@dataclass(frozen=True)
class Scaled:
    """base: of make_fixtures; config: what is different; code: tensors -> codes and scales; about: quantization_config of the file; loader: how
    transformers is asked to decode it."""

    base: str
    config: dict[str, Any]
    code: Callable[[Tensors], Tensors]
    about: dict[str, Any]
    loader: Callable[[], Any]


def _fp8(tile: tuple[int, int]) -> Callable[[Tensors], Tensors]:
    def code(tensors: Tensors) -> Tensors:
        out = {}
        for name, w in tensors.items():
            if w.ndim != 2 or "embed" in name or name.endswith("mlp.gate.weight"):
                out[name] = w.to(torch.bfloat16)
                continue
            grid = [math.ceil(n / t) for n, t in zip(w.shape, tile, strict=True)]
            blocks = w.reshape(grid[0], w.shape[0] // grid[0], grid[1], w.shape[1] // grid[1])
            scales = blocks.abs().amax((1, 3)) / 448  # [tiles down, tiles across]
            out[name] = (blocks / scales[:, None, :, None]).reshape(w.shape).to(torch.float8_e4m3fn)
            out[name + "_scale_inv"] = scales
        return out

    return code


def _mxfp4(tensors: Tensors) -> Tensors:
    out = {}
    for name, w in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            out[name] = w.to(torch.bfloat16)
            continue
        rows = w.transpose(1, 2)  # [E, in, out] -> [E, out, in]
        blocks = rows.reshape(*rows.shape[:2], -1, 32)
        exponents = torch.ceil(torch.log2(blocks.abs().amax(-1) / 6))  # [E, out, blocks]
        values = blocks / 2.0 ** exponents[..., None]
        codes = (values.abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (values < 0)
        out[name + "_blocks"] = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8).contiguous()
        out[name + "_scales"] = (exponents + 127).to(torch.uint8)
    return out


def _about_fp8(*tile: int) -> dict[str, Any]:
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(tile)}


FIXTURES_OF_CODES = {
    "deepseek_v3_fp8": Scaled("deepseek_v3", {}, _fp8((8, 16)), _about_fp8(8, 16), lambda: FineGrainedFP8Config(weight_block_size=(8, 16), dequantize=True)),
    "deepseek_v3_fp8_128": Scaled(
        "deepseek_v3",
        {
            "vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "q_lora_rank": 16, "kv_lora_rank": 56, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
            "num_experts_per_tok": 2,
        },
        _fp8((128, 128)), _about_fp8(128, 128), lambda: FineGrainedFP8Config(weight_block_size=(128, 128), dequantize=True),
    ),
    "gpt_oss_mxfp4": Scaled(
        "gpt_oss", {"num_hidden_layers": 3, "vocab_size": 160, "hidden_size": 64, "intermediate_size": 64}, _mxfp4,
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]},
        lambda: Mxfp4Config(dequantize=True),
    ),
}  # fmt: skip


def make(name: str, scaled: Scaled, seed: int) -> None:
    """Writes one fixture folder."""
    folder, base = FIXTURES / name, FIXTURES_BY_NAME[scaled.base]
    folder.mkdir(parents=True, exist_ok=True)
    asked = {**SMALL, **base.config, **scaled.config}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(base.kind, **asked), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            weight.copy_(_random(key, weight.shape, generator, base.kind).to(torch.bfloat16))
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_((0.3 * torch.randn(buffer.shape, generator=generator)).to(torch.bfloat16))
    saved = json.loads(model.config.to_json_string(use_diff=False))
    saved = {k: v for k, v in saved.items() if k in asked or k in KEEP} | {k: v for k, v in asked.items() if k not in saved and v is not None}
    saved["quantization_config"] = scaled.about
    coded = scaled.code(_published(model))
    save_file({k: v.contiguous() for k, v in coded.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(saved, indent=1) + "\n")

    decoded = AutoModelForCausalLM.from_pretrained(folder, quantization_config=scaled.loader(), dtype=torch.float32, attn_implementation="eager").eval()
    if {p.dtype for p in decoded.parameters()} != {torch.float32}:
        raise SystemExit(f"{name}: transformers did not decode everything: {sorted({str(p.dtype) for p in decoded.parameters()})}")
    ids = torch.randint(3, asked["vocab_size"], (1, PROMPT + DECODE), generator=generator)
    with torch.no_grad():
        logits = decoded(ids, use_cache=False).logits[0]
        away = (model.eval()(ids, use_cache=False).logits[0] - logits).abs().max() / logits.std()
        _check_decode(decoded, ids, logits)
    np.save(folder / "logits.npy", logits.numpy().astype(np.float32))
    about = {
        "ids": ids[0].tolist(), "prompt": PROMPT, "short": 0, "seed": seed, "class": type(decoded).__name__, "transformers": transformers.__version__,
        "torch": torch.__version__, "gguf": "", "decoded_by": type(scaled.loader()).__name__,
    }  # fmt: skip
    (folder / "fixture.json").write_text(json.dumps(about) + "\n")
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{name}: std(logits) {logits.std():.3f}, {away:.3f} of it away from the weights that were coded, {size} bytes")


def main() -> None:
    """Makes the named fixtures, or all."""
    for seed, (name, scaled) in enumerate(FIXTURES_OF_CODES.items(), start=101):
        if len(sys.argv) == 1 or name in sys.argv[1:]:
            make(name, scaled, seed)


if __name__ == "__main__":
    main()
