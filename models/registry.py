"""The table of families, and `build`: from a file's configuration and tensors to a `ModelDef`.

Every weight that the graph asks for is looked up and its shape compared here, before a byte of it is read, and every tensor
that the graph does not ask for is accounted for: a note where leaving it out is right, an error where the model needs it.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from ..core.errors import ModelFileError, UnsupportedError
from ..core.graph import Graph
from ..core.model import ModelDef
from ..core.weights import TensorSource, WeightRef
from . import (
    deepseek,
    gemma2,
    gemma3,
    gpt_oss,
    granite_moe,
    internlm2,
    internlm3,
    llama,
    mistral,
    mixtral,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    qwen3_next,
    smollm3,
)
from .blocks import decoder_graph
from .config import DecoderConfig
from .family import Family
from .keys import Keys
from .rope import RopeConfig, gguf_factors, inv_freq

__all__ = ["FAMILIES", "build", "supported"]

FAMILIES: tuple[Family, ...] = tuple(
    module.FAMILY
    for module in (
        llama, mistral, smollm3, qwen2, qwen3, phi3, internlm2, internlm3, gemma2, gemma3,
        mixtral, qwen2_moe, qwen3_moe, olmoe, granite_moe, gpt_oss, qwen3_next,
    )
) + deepseek.FAMILIES  # fmt: skip
"""Every family, in the order of the documentation."""


def supported() -> list[dict[str, str]]:
    """Rows for the documentation: family, models, model_type and general.architecture names."""
    return [
        {
            "family": f.name,
            "models": f.models,
            "model_type": ", ".join(f.model_types),
            "general.architecture": ", ".join(f.architectures),
        }
        for f in FAMILIES
    ]


def build(
    files_kind: Literal["gguf", "huggingface"],
    architecture: str,
    config: Mapping[str, Any],
    sources: Mapping[str, TensorSource],
    *,
    context_limit: int | None = None,
    ready: Mapping[str, TensorSource] | None = None,
    embedding: bool = False,
) -> ModelDef:
    """The model of a file, ready to be planned.

    files_kind: where config and names come from. architecture: `model_type` or `general.architecture`. config: config.json, or
    the GGUF metadata. sources: the tensors by name. context_limit: longest sequence in tokens that will be run (default: what
    the model was made for); only length-dependent rope scaling looks at it.
    embedding: without head: the graph's one output is the hidden state [R, C].
    ready: the weights of the graph by name, if a file holds them as they are used; `sources` then only says what there was.

    Raises UnsupportedError for an unknown architecture or an unknown value of a known key, ModelFileError for a configuration
    that is damaged, contradicts itself, or does not belong to the tensors.
    """
    family = _family(files_kind, architecture)
    gguf = files_kind == "gguf"
    who = next((s.file for s in sources.values() if s.file), "")
    if gguf:
        keys = Keys(config, who=who, prefix=f"{architecture}.")
        c = family.from_gguf(keys, sources, _gguf_vocab(config, sources, who))
    else:
        c = family.from_hf(Keys(_text_config(config, who), who=who))
    limit = context_limit if context_limit is not None else c.max_position
    freqs, used, notes = _frequencies(c, sources, limit, gguf=gguf)
    prefix, head_prefix = ("", "") if gguf else _prefixes(family, sources)

    def ref_of(name: str) -> WeightRef:
        ref = _renamed((family.gguf_refs if gguf else family.hf_refs)(name, c), prefix, head_prefix)
        return _with_scales(ref, sources, c.scale_tile) if c.quantised == "fp8" else ref

    last = f"model.layers.{c.num_layers - 1}.input_layernorm.weight"
    if ref_of(last).source not in sources:  # before thousands of layers are built that the file does not have
        ref_of(last).resolve(sources, last, (c.hidden_size,))
    graph = decoder_graph(architecture, c, freqs, embedding=embedding)
    refs = _checked(graph, ref_of, sources)
    used |= {name for ref in refs.values() for name in ref.names}
    notes += _unused(family, c, sources, used, gguf=gguf)
    if ready is not None:
        refs = _checked(graph, WeightRef, ready)
    return ModelDef(
        architecture=architecture,
        graph=graph,
        weights=refs,
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        num_layers=c.num_layers,
        max_position=_max_position(c, limit),
        notes=tuple(notes),
        details={"family": family.name, "config": c},
    )


def _family(files_kind: str, architecture: str) -> Family:
    table: dict[str, Family] = {}
    for family in FAMILIES:
        table.update(dict.fromkeys(family.architectures if files_kind == "gguf" else family.model_types, family))
    if architecture in table:
        return table[architecture]
    close = difflib.get_close_matches(architecture, table, 3)
    key = "general.architecture" if files_kind == "gguf" else "model_type"
    raise UnsupportedError(
        f"the architecture '{architecture[:80]}' is not supported",
        who=key,
        why=f"known: {', '.join(sorted(table))}",
        fix=f"close matches: {', '.join(close)}" if close else "",
        key=key,
    )


def _text_config(config: Mapping[str, Any], who: str) -> Mapping[str, Any]:
    """The text model's part of a configuration that nests it; keys outside stand in for missing ones inside."""
    nested = config.get("text_config")
    if nested is None:
        return config
    if not isinstance(nested, Mapping):
        raise ModelFileError("'text_config' must be an object", who=who, fix="download the model again", key="text_config")
    outer = {k: v for k, v in config.items() if k in ("quantization_config", "tie_word_embeddings")}
    return {**outer, **nested}


def _gguf_vocab(config: Mapping[str, Any], sources: Mapping[str, TensorSource], who: str) -> int:
    """Rows of the embedding, which must be the number of tokens in the tokenizer."""
    table = sources.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ModelFileError("tensor 'token_embd.weight' is missing or has no rows", who=who, fix="download the model again")
    tokens = config.get("tokenizer.ggml.tokens")
    if tokens is not None and len(tokens) != table.shape[0]:
        raise ModelFileError(
            f"the tokenizer has {len(tokens)} tokens, but 'token_embd.weight' has {table.shape[0]} rows",
            who=who,
            fix="the tokenizer and the weights do not belong together; download the model again",
            key="tokenizer.ggml.tokens",
        )
    return int(table.shape[0])


def _frequencies(
    c: DecoderConfig, sources: Mapping[str, TensorSource], limit: int, *, gguf: bool
) -> tuple[dict[RopeConfig, Any], set[str], list[str]]:
    """inv_freq of every rotary embedding that a layer uses, names of the tensors it came from, notes."""
    freqs: dict[RopeConfig, Any] = {}
    used: set[str] = set()
    notes: list[str] = []
    for layer in range(c.num_layers):
        rope = c.rope_of(layer)
        if rope is None or rope in freqs:
            continue
        factors, said = None, ""
        if gguf:
            name, factors, said = gguf_factors(rope, sources, limit)
            used |= {name, "rope_factors_long.weight", "rope_factors_short.weight"}
        freqs[rope], note = inv_freq(rope, limit, factors)
        notes += [n for n in (said or note,) if n and n not in notes]
    return freqs, used, notes


def _max_position(c: DecoderConfig, limit: int) -> int:
    """Tokens the model can be run for: dynamic scaling reaches factor times the trained length, if it was asked to."""
    if c.rope.scaling == "dynamic":
        return max(c.max_position, min(limit, int(c.rope.factor * c.rope.original_length)))
    return c.max_position


def _prefixes(family: Family, sources: Mapping[str, TensorSource]) -> tuple[str, str]:
    """What stands for `model.` before the text model's names, and before the head's."""
    tail = family.embedding.removeprefix("model.")
    for prefix in family.text_prefixes:
        if prefix + tail in sources:
            return prefix, "language_model." if prefix == "language_model.model." else ""
    return "model.", ""


def _renamed(ref: WeightRef, prefix: str, head_prefix: str) -> WeightRef:
    if prefix and prefix != "model.":
        return ref.renamed(lambda name: prefix + name[6:] if name.startswith("model.") else head_prefix + name)
    return ref


def _with_scales(ref: WeightRef, sources: Mapping[str, TensorSource], tile: tuple[int, int]) -> WeightRef:
    """The same with the scales of fp8 codes: tensor X has them in X_scale_inv, one for each tile."""

    def scaled(part: WeightRef) -> WeightRef:
        src = sources.get(part.source)
        return replace(part, scales=f"{part.source}_scale_inv", tile=tile) if src is not None and src.format == "f8_e4m3" else part

    return replace(scaled(ref), parts=tuple(scaled(p) for p in ref.parts))


def _checked(graph: Graph, ref_of: Callable[[str], WeightRef], sources: Mapping[str, TensorSource]) -> dict[str, WeightRef]:
    """Where each weight comes from. It exists and has the shape that the graph declares, and fused tensors are used whole; no data is
    touched. One weight after the other, so that a configuration which counts millions of experts ends at the first that is missing."""
    refs: dict[str, WeightRef] = {}
    taken: dict[str, int] = {}  # fused tensor -> elements that weights take of it
    for value in graph.of_kind("weight"):
        ref, shape = ref_of(value.name), tuple(int(d) for d in value.shape)
        refs[value.name] = ref
        if ref.parts and len(ref.parts) != shape[0]:
            ref.resolve(sources, value.name, shape)  # raises
        for part in ref.parts or (ref,):
            _check_part(part, value.name, shape[1:] if ref.parts else shape, sources, taken)
    for name, count in taken.items():
        src = sources[name]
        if count != math.prod(src.shape):
            rows = count * src.shape[0] // math.prod(src.shape)
            raise ModelFileError(
                f"tensor '{name}' has shape {list(src.shape)}, but the configuration accounts for {rows} of its rows",
                who=src.file,
                fix="the configuration and the weights do not belong together; download the model again",
            )
    return refs


def _check_part(ref: WeightRef, name: str, shape: tuple[int, ...], sources: Mapping[str, TensorSource], taken: dict[str, int]) -> None:
    """One tensor of a graph weight: it is there, has the shape, and what is taken of it is counted."""
    src = sources.get(ref.source)
    if src is None:
        ref.resolve(sources, name, shape)  # raises, naming what is close
        return
    if ref.shape_in(src, shape) != shape:
        raise ModelFileError(
            f"tensor '{src.name}' has shape {list(src.shape)}, but the configuration asks for {list(shape)} of it",
            who=src.file,
            why=f"graph weight '{name}' takes it",
            fix="the configuration and the weights do not belong together; download the model again",
        )
    if ref.scales:
        ref.check_scales(sources)
    if ref.rows is not None or ref.row_index is not None:
        values = 2 if src.format == "u8" else 1  # of an element of the file
        taken[src.name] = taken.get(src.name, 0) + math.prod(shape) // values


def _unused(family: Family, c: DecoderConfig, sources: Mapping[str, TensorSource], used: set[str], *, gguf: bool) -> list[str]:
    """Notes about tensors that no graph input takes; ModelFileError where the model would need them."""
    rest = [name for name in sources if name not in used]
    towers = [n for n in rest if n.startswith(family.unused)] if family.unused else []
    later = [n for n in rest if c.num_layers <= _layer_of(n) < c.num_layers + c.extra_layers]
    tables = [n for n in rest if n.endswith(("rotary_emb.inv_freq", "attention.masked_bias", "attn_rot_embd.weight"))]
    head = [n for n in rest if n.endswith("lm_head.weight") and c.tie_word_embeddings and not gguf]
    left = [n for n in rest if n not in {*towers, *later, *tables, *head}]
    for name in left:
        layer = _layer_of(name)
        if layer >= c.num_layers:
            raise ModelFileError(
                f"tensor '{name}' is in layer {layer}, but the configuration has {c.num_layers} layers",
                who=sources[name].file,
                fix="the configuration and the weights do not belong together; download the model again",
            )
        if layer >= 0 or name.endswith(".bias"):
            raise ModelFileError(
                f"tensor '{name}' is in the file, but this {family.name} model has no place for it",
                who=sources[name].file,
                why="leaving it out would change the results",
                fix="the configuration may lack a key (biases), or the model is a variant that is not supported",
            )
    groups = (("not part of the text model", towers), ("layers that predict further tokens", later), ("tied to the embedding", head), ("not used", left))
    return [_left_out(why, names) for why, names in groups if names]


def _layer_of(name: str) -> int:
    """The number of the layer that a tensor is in, −1 for none."""
    match = re.search(r"(?:^|\.)(?:layers|blk)\.(\d+)\.", name)
    return int(match[1]) if match is not None and len(match[1]) < 9 else -1


def _left_out(why: str, names: list[str]) -> str:
    count = f"{len(names)} tensor{'s' * (len(names) > 1)}"
    return f"{count} left out, {why}: {', '.join(names[:3])}{' …' * (len(names) > 3)}"
