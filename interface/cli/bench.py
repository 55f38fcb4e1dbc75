"""`fastllm bench`: how fast a model runs here, or a server answers. `bench MODEL` is short for `bench model MODEL`."""

from __future__ import annotations

import click

from .bench_model import model_command
from .bench_serve import serve_command

__all__ = ["bench_command"]


class BenchGroup(click.Group):
    """What is no command of the group is a model."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Without a name, or with options only, it is the default model."""
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["model", *args]
        return super().parse_args(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A command, or that for models."""
        return super().get_command(ctx, cmd_name) or model_command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """A model's name stays an argument."""
        if args[0] in self.commands:
            return args[0], self.commands[args[0]], args[1:]
        return "model", model_command, args


@click.group("bench", cls=BenchGroup)
def bench_command() -> None:
    """Measure speed: of a model on this machine (`fastllm bench MODEL`), or of a server that runs (`fastllm bench serve URL`).

    Without a command it is `fastllm bench model`; `fastllm bench model --help` shows its options.

    \b
    fastllm bench ./model.gguf --input-tokens 2048 --output-tokens 64 --batch 8 --repeat 3
    fastllm bench serve http://127.0.0.1:8000 --clients 8
    """


bench_command.add_command(model_command)
bench_command.add_command(serve_command)
