"""What a family must say about itself; `registry.py` holds the table of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..core.weights import TensorSource, WeightRef
from .config import DecoderConfig
from .keys import Keys

__all__ = ["Family", "GGUFReader", "HFReader", "Refs"]

HFReader = Callable[[Keys], DecoderConfig]
"""config.json -> DecoderConfig."""

GGUFReader = Callable[[Keys, Mapping[str, TensorSource], int], DecoderConfig]
"""(`ARCH.*` keys, tensors, vocabulary size) -> DecoderConfig."""

Refs = Callable[[str, DecoderConfig], WeightRef]
"""Graph weight name -> where the file has it."""


@dataclass(frozen=True)
class Family:
    """One architecture family.

    name: as in the documentation. models: what it runs, for people. model_types: values of `model_type` in config.json;
    architectures: values of `general.architecture` in GGUF. from_hf, from_gguf: readers of the configuration; hf_refs,
    gguf_refs: names. text_prefixes: what precedes `layers.` where the text model is nested in a larger one. unused: prefixes
    of tensors that a text model leaves out (towers), said in a note. embedding: the table's name in Hugging Face files.
    """

    name: str
    models: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    from_hf: HFReader
    from_gguf: GGUFReader
    hf_refs: Refs
    gguf_refs: Refs
    embedding: str = "model.embed_tokens.weight"
    text_prefixes: tuple[str, ...] = ("model.",)
    unused: tuple[str, ...] = ()
