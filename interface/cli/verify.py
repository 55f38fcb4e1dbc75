"""`fastllm verify`: every byte of a model that can be checked."""

from __future__ import annotations

import json

import click

__all__ = ["verify_command"]


@click.command("verify")
@click.argument("model")
@click.option("--offline", is_flag=True, default=None, help="Use no network; only models that are here.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--quiet", "-q", is_flag=True, help="No progress.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def verify_command(model: str, offline: bool | None, as_json: bool, quiet: bool, debug: bool) -> None:
    """Check MODEL: structure, hashes, shapes, tokenizer against embedding, and that every value is finite.

    Hashes are in FLM files only. The first thing that is wrong ends it, with exit code 1, and is named with its place in the file.
    """
    from ..loading import LoadOptions, open_files
    from ..verify import verify_model
    from .terminal import Reporter, escape_controls

    with Reporter(quiet=quiet or as_json) as reporter:
        options = LoadOptions(offline=offline, progress=reporter.progress, message=reporter.message, licence=reporter.licence)
        with open_files(model, options) as files:
            checked = verify_model(files, reporter.progress)
            path = str(files.path)
    if as_json:
        click.echo(json.dumps({"model": model, "path": path, "ok": True, "checked": checked}, indent=1))
    else:
        click.echo(escape_controls("\n".join([*checked, f"ok: {path}"])))
