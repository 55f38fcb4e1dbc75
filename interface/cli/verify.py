"""`fastllm verify`: every byte of a model that can be checked."""

from __future__ import annotations

import json
from typing import Any

import click

from .command import Command, model_argument
from .options import file_options, load_options

__all__ = ["verify_command"]


@click.command("verify", cls=Command)
@model_argument(needed=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@file_options
def verify_command(model: str, as_json: bool, **values: Any) -> None:
    """Check MODEL: structure, hashes, shapes, tokenizer against embedding, and that every value is finite.

    Hashes are in FLM files only. The first thing that is wrong ends it, with exit code 1, and is named with its place in the file.
    """
    from ..loading import open_files
    from ..verify import verify_model
    from .terminal import Reporter, escape_controls

    with Reporter.of(values, silent=as_json) as reporter:
        options = load_options(values, progress=reporter.progress, message=reporter.message, licence=reporter.licence)
        with open_files(model, options) as files:
            checked = verify_model(files, options)
            path = str(files.path)
    if as_json:
        click.echo(json.dumps({"model": model, "path": path, "ok": True, "checked": checked}, indent=1))
    else:
        click.echo(escape_controls("\n".join([*checked, f"ok: {path}"])))
