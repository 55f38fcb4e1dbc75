"""What families with experts share: how a configuration describes them, and where their tensors are.

Hugging Face files hold every expert's matrices as tensors of their own, which become the parts of a stack; GGUF files hold the
stacks. Routers differ by family: each says its own `score` and what it renormalises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..core.weights import WeightRef
from .config import DecoderConfig, MoeConfig
from .keys import Keys
from .names import split_layer

__all__ = ["GATING", "MAX_EXPERTS", "expert_stack", "moe_from_gguf", "moe_from_hf", "sparse_step_layers", "with_experts"]

MAX_EXPERTS = 4096

GATING = {1: "softmax", 2: "sigmoid", 3: "softmax_of_chosen"}
"""llama.cpp's `expert_gating_func` -> score of `route_topk`."""


def moe_from_hf(keys: Keys, width: str = "moe_intermediate_size", **own: Any) -> MoeConfig:
    """The common part of a `config.json`: how many experts, how many of them a token takes, and under the name `width` their width.
    own: what the family decides itself. transformers 5 writes `num_local_experts` where files of version 4 say `num_experts`, and the
    other way round."""
    known = [key for key in ("num_local_experts", "num_experts", "n_routed_experts") if key in keys]
    return _moe(keys, known[0] if known else "num_experts", "num_experts_per_tok", keys.integer(width), own)


def moe_from_gguf(keys: Keys, width: str = "expert_feed_forward_length", **own: Any) -> MoeConfig:
    """The common part of `ARCH.expert_*`. own: the family's defaults; keys of the file overrule `score` and `scale`."""
    gating = keys.integer("expert_gating_func", 0, low=0, high=255)
    if gating and gating not in GATING:
        raise keys.unsupported("expert_gating_func", ", ".join(f"{n} {name}" for n, name in GATING.items()))
    scale = keys.number("expert_weights_scale", 0.0)
    own = {**own, **({"score": GATING[gating]} if gating else {}), **({"scale": scale} if scale else {})}
    return _moe(keys, "expert_count", "expert_used_count", keys.integer(width), own)


def _moe(keys: Keys, experts: str, chosen: str, width: int, own: dict[str, Any]) -> MoeConfig:
    count = keys.integer(experts, high=MAX_EXPERTS)
    top_k = keys.integer(chosen, high=MAX_EXPERTS)
    config = MoeConfig(count, top_k, width, **own)
    if count % config.groups or config.keep_groups > config.groups:
        raise keys.wrong(experts, f"a multiple of the {config.groups} groups, of which {config.keep_groups} are kept", count)
    if top_k > config.keep_groups * (count // config.groups):
        raise keys.wrong(chosen, f"at most the {config.keep_groups * (count // config.groups)} experts that can be chosen", top_k)
    return config


def sparse_step_layers(keys: Keys, num_layers: int) -> frozenset[int]:
    """Dense layers of Qwen's configurations: those of `mlp_only_layers`, and all but every `decoder_sparse_step`-th."""
    listed = keys.raw("mlp_only_layers", [])
    if not isinstance(listed, list) or any(type(i) is not int for i in listed):
        raise keys.wrong("mlp_only_layers", "a list of layer numbers")
    step = keys.integer("decoder_sparse_step", 1)
    return frozenset(i for i in range(num_layers) if i in listed or (i + 1) % step)


def expert_stack(name: str, config: DecoderConfig, pattern: str, parts: Iterable[tuple[str, str]]) -> WeightRef | None:
    """The stack of tensors `pattern` (with {layer}, {expert}, {part}) for the graph's `mlp.experts.PART`; None for other names.

    parts: the graph's parts (gate_proj, up_proj, down_proj) and what the file calls them.
    """
    layer, stem, kind = split_layer(name)
    part = dict(parts).get(stem.removeprefix("mlp.experts."))
    if config.moe is None or part is None or not stem.startswith("mlp.experts."):
        return None
    tensors = (pattern.format(layer=layer, expert=e, part=part) + f".{kind}" for e in range(config.moe.num_experts))
    return WeightRef("", parts=tuple(WeightRef(t) for t in tensors))


def with_experts(
    prefix: str, parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Callable[[str, DecoderConfig], WeightRef]:
    """Names of a family that keeps experts as `model.layers.N.PREFIX.experts.E.PART` and the router as `PREFIX.gate`."""
    table = tuple(zip(("gate_proj", "up_proj", "down_proj"), parts, strict=True))

    def refs(name: str, config: DecoderConfig) -> WeightRef:
        stack = expert_stack(name, config, "model.layers.{layer}." + prefix + ".experts.{expert}.{part}", table)
        return stack or WeightRef(name.replace(".mlp.", f".{prefix}."))

    return refs

