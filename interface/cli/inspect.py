"""`fastllm inspect`: what is inside a model, read from its header only."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from .command import Command, model_argument
from .options import file_options, load_options

if TYPE_CHECKING:
    from ..formats import ModelFiles

__all__ = ["inspect_command"]


@click.command("inspect", cls=Command)
@model_argument(needed=True)
@click.option("--tensors", is_flag=True, help="List every tensor with shape, format and size.")
@click.option("--template", is_flag=True, help="Print the chat template.")
@click.option("--dump-config", "own_config", is_flag=True, help="Print the file's own configuration as JSON, and nothing else.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@file_options
def inspect_command(model: str, tensors: bool, template: bool, own_config: bool, as_json: bool, **values: Any) -> None:
    """Show architecture, sizes, quantisation, tokenizer and template of MODEL.

    Reads the header only; no weight is touched. MODEL is a file, a folder or any name that `fastllm run` takes.
    """
    from ..loading import open_files
    from .terminal import Reporter, escape_controls

    with Reporter.of(values, silent=as_json or own_config) as reporter:
        files = open_files(model, load_options(values, progress=reporter.progress, message=reporter.message, licence=reporter.licence))
    with files:
        if own_config:
            click.echo(json.dumps(_finite(files.config), indent=1, default=str, allow_nan=False))
            return
        facts = describe(files)
        if as_json:
            facts["tensors"] = [_tensor_row(t) for t in files.stored.values()]
            facts["chat_template"] = files.chat_template
            facts["config"] = _finite({k: v for k, v in files.config.items() if isinstance(v, str | int | float | bool | list | dict)})
            click.echo(json.dumps(facts, indent=1, default=str, allow_nan=False))
            return
        for key, value in facts.items():
            click.echo(f"{key.replace('_', ' '):18} {escape_controls(_shown(value))}")
        if tensors:
            click.echo()
            for row in map(_tensor_row, files.stored.values()):
                click.echo(f"{escape_controls(row['name']):48} {row['format']:7} {row['shape']!s:20} {row['size_bytes']:>14,}")
        if template:
            click.echo()
            click.echo(escape_controls(files.chat_template or "this model has no chat template"))


def describe(files: ModelFiles) -> dict[str, Any]:
    """The facts of a model's header. Adds what its family makes of it, or why no family takes it."""
    from .. import models
    from ..core.errors import FastLLMError

    values = sum(_count(t.shape) for t in files.stored.values())
    formats: Counter[str] = Counter()
    for t in files.stored.values():
        formats[t.format] += t.nbytes
    facts: dict[str, Any] = {
        "path": str(files.path),
        "kind": files.kind if files.ready is None else f"flm from {files.kind}",
        "architecture": files.architecture,
        "parameters": values,
        "size_bytes": files.size_bytes,
        "bits_per_weight": round(8 * files.size_bytes / max(1, values), 2),
        "formats": {name: f"{100 * size / max(1, files.size_bytes):.1f} %" for name, size in formats.most_common()},
        "tensor_count": len(files.stored),
    }
    try:
        built = models.build(files.kind, files.architecture, files.config, files.tensors, ready=files.ready)
        facts |= {"context": built.max_position, "layers": built.num_layers, "hidden_size": built.hidden_size, "vocabulary": built.vocab_size}
        active, total = built.active_parameters()
        if active < total:
            facts |= {"active_parameters": active, "active_share": f"{100 * active / total:.1f} % of the {total:,} that a token can meet"}
        facts |= {key: value for key, value in built.details.items() if isinstance(value, str | int | float)}
        facts["notes"] = [*files.notes, *built.notes]
    except FastLLMError as error:
        facts["not_runnable"] = f"{error.message}{': ' + error.why if error.why else ''}"
    tokenizer = files.tokenizer
    facts["tokenizer"] = "none" if tokenizer is None else _tokenizer(tokenizer)
    facts["chat_template_chars"] = len(files.chat_template) if files.chat_template else 0
    return facts


def _tokenizer(source: Any) -> str:
    if source.kind != "gguf":
        return str(source.kind)
    pieces = source.gguf.get("tokenizer.ggml.tokens", ())
    pre = source.gguf.get("tokenizer.ggml.pre")
    return f"gguf {source.gguf.get('tokenizer.ggml.model', '?')}{f', pre {pre}' if pre else ''}, {len(pieces):,} pieces"


def _tensor_row(t: Any) -> dict[str, Any]:
    return {"name": t.name, "format": t.format, "shape": list(t.shape), "size_bytes": t.nbytes}


def _finite(value: Any) -> Any:
    """The value with NaN and infinities as strings: JSON has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list) else value


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for dim in shape:
        total *= dim
    return total


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
