"""Verifying a model: every check that needs no reference, from the container to the last value.

    structure (opening) → hashes (FLM) → the family's graph and shapes → tokenizer against embedding → every value finite

Opening a model checks structure only, because the rest reads every byte. `fastllm verify` runs all of it and says what was checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from .core.errors import ModelFileError, TokenizerError
from .core.quant import FORMATS
from .loading import close_all, open_text
from .packed import Unpacker

if TYPE_CHECKING:
    from .core.weights import TensorSource, WeightRef
    from .formats import ModelFiles
    from .load_options import LoadOptions

__all__ = ["verify_model"]

BLOCK_VALUES = 1 << 21
"""Values that are decoded at a time."""


def verify_model(files: ModelFiles, options: LoadOptions) -> list[str]:
    """What was checked, a line each. options: callbacks, and where backends are looked for that undo packed weights. Raises ModelFileError (or
    another FastLLMError) at the first thing that is wrong."""
    from . import models
    from .core.plugins import BackendRegistry
    from .formats.flm import FlmFile, check_hashes

    progress = options.progress
    done = [f"structure: {len(files.stored)} tensors, {files.size_bytes:,} bytes"]
    if isinstance(files.source, FlmFile):
        check_hashes(files.source, lambda at, total, name: progress("hashes", at, total))
        done.append(f"hashes: {len(files.source.weights)} weights, {len(files.source.manifest['files'])} files")
    definition = models.build(files.kind, files.architecture, files.config, files.tensors, ready=files.ready)
    done.append(f"configuration: {definition.architecture}, {definition.num_layers} layers, every weight is there and has its shape")
    if files.tokenizer is None:
        done.append("tokenizer: the file has none")
    else:
        tokenizer, template = open_text(files, definition.max_position)
        if tokenizer.vocab_size > definition.vocab_size:
            raise TokenizerError(
                f"the tokenizer has {tokenizer.vocab_size:,} entries, the model's embedding {definition.vocab_size:,} rows", who=str(files.path)
            )
        done.append(f"tokenizer: {tokenizer.vocab_size:,} entries for {definition.vocab_size:,} rows{'' if template is None else ', with a chat template'}")
    registry = BackendRegistry(options.plugins_file, options.plugin_paths, strict=options.strict, waiting=options.message)
    unpacker = Unpacker(files, {}, registry, options)
    try:
        total, at = sum(math.prod(int(d) for d in v.shape) for v in definition.graph.of_kind("weight") if v.view is None), 0
        for value in definition.graph.of_kind("weight"):
            if value.view is None:
                shape = tuple(int(d) for d in value.shape)
                _check_finite(definition.weights[value.name], files, value.name, shape)
                at += math.prod(shape)
                progress("values", at, total)
    finally:
        close_all(unpacker.close)
    done.append(f"values: {total:,}, all finite")
    return done


def _check_finite(ref: WeightRef, files: ModelFiles, name: str, shape: tuple[int, ...]) -> None:
    """Raises ModelFileError naming the tensor and the bytes of the first block that holds NaN or infinity."""
    stacked = len(shape) > 2 or bool(ref.parts)  # biases of experts are a stack of vectors
    for part in ref.split(shape[0]) if stacked else (ref,):
        source = files.stored[part.source]
        tensor = part.resolve(files.stored, name, shape[1:] if stacked else shape)
        spec = FORMATS[tensor.format]
        step = BLOCK_VALUES // spec.block
        for start, values in _blocks(tensor.format, tensor.data, step):
            bad = np.flatnonzero(~np.isfinite(values))
            if bad.size:
                block = start + int(bad[0]) // spec.block
                raise ModelFileError(
                    f"tensor '{source.name}' holds {'NaN' if np.isnan(values[bad[0]]) else 'infinity'} in its {spec.name} block {block}"
                    f" (bytes {block * spec.block_bytes} to {(block + 1) * spec.block_bytes}{_of(source)})",
                    who=source.file,
                    why=f"graph weight '{name}' takes it",
                    fix="download or convert the model again",
                )


def _blocks(format: str, data: np.ndarray, step: int) -> Iterator[tuple[int, np.ndarray]]:
    """(first block, f32 values) of every `step` blocks."""
    from .core._kernels import decode

    spec = FORMATS[format]
    for start in range(0, data.nbytes // spec.block_bytes, step):
        part = data[start * spec.block_bytes : (start + step) * spec.block_bytes]
        yield start, decode(format, part, part.nbytes // spec.block_bytes * spec.block)


def _of(source: TensorSource) -> str:
    return " of its unpacked form" if source.packed is not None else " of what the weight takes"
