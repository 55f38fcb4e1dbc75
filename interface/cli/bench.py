"""`fastllm bench`: how fast it is."""

from __future__ import annotations

import click

from .bench_serve import serve_command

__all__ = ["bench_command"]


@click.group("bench")
def bench_command() -> None:
    """Measure speed: of a server that runs."""


bench_command.add_command(serve_command)
