"""The group of all commands: a table of names, and one import when a command is called.

`-` and `_` are the same in the names of commands, options and choices. Called by `main`, and by the script that writes the
reference of the command line.
"""

from __future__ import annotations

import os
from importlib import import_module

import click

from .command import same_dashes
from .old_flags import OLD_COMMANDS

__all__ = ["ALIASES", "COMMANDS", "cli"]

COMMANDS = {
    "run": ("fastllm.cli.run", "Answer a prompt, or chat, with a model."),
    "server": ("fastllm.cli.server", "Serve a model to clients of the OpenAI and Anthropic interfaces."),
    "webui": ("fastllm.cli.webui", "Chat with a model in the browser."),
    "bench": ("fastllm.cli.bench", "Measure how fast a model runs here, or a server answers."),
    "convert": ("fastllm.cli.convert", "Write a model as one FLM file, quantised and packed."),
    "verify": ("fastllm.cli.verify", "Check every byte of a model file that can be checked."),
    "download": ("fastllm.cli.download", "Fetch a model into the cache."),
    "list": ("fastllm.cli.download", "Show the models that are on this machine."),
    "show": ("fastllm.cli.show", "Show what one model is told and tells: defaults, template, parsers, end ids."),
    "inspect": ("fastllm.cli.inspect", "Show what is inside a model file, from its header."),
    "dump-config": ("fastllm.cli.dump", "Print the effective configuration, with the origin of each value."),
    "plan": ("fastllm.cli.plan", "Show memory, placement and expected speed before loading."),
    "doctor": ("fastllm.cli.doctor", "Check this machine: CPU, memory, limits, backends."),
    "backends": ("fastllm.cli.backends", "List backends and say why one is not ready."),
    "conformance": ("fastllm.cli.conformance", "Test a backend: is it right, and which level does it reach?"),
}
"""name -> (module, one line of help): the help of the group is shown without importing any command."""

ALIASES = {"chat": "run", "serve": "server", "backend": "backends", "export": "convert", "benchmark": "bench"}


def without_command(args: list[str]) -> list[str]:
    """A command line that begins with an option and has `--model F` (or `-p`, `--path`), with its command; others as they are."""
    names = [same_dashes(arg.partition("=")[0]) for arg in args]
    if not args or not args[0].startswith("-") or not {"--model", "--path", "-p", "--http-mode"} & set(names):
        return args
    rest = [arg for arg, name in zip(args, names, strict=True) if name != "--http-mode"]
    return ["server" if "--http-mode" in names else "run", *rest]


class LazyGroup(click.Group):
    """Lists commands from the table above and imports one when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported now."""
        name = ALIASES.get(same_dashes(cmd_name), same_dashes(cmd_name))
        if name not in COMMANDS:
            return None
        command = getattr(import_module(COMMANDS[name][0]), f"{name.replace('-', '_')}_command")
        return command if isinstance(command, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table, without imports."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """`fastllm --model F …` is `fastllm run F …`, and with `--http-mode` `fastllm server F …`."""
        return super().parse_args(ctx, without_command(args))

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Unknown commands list close ones."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            import difflib

            from ..core.errors import UsageError

            near = difflib.get_close_matches(name, [*COMMANDS, *ALIASES], n=2, cutoff=0.5)
            fix = OLD_COMMANDS.get(same_dashes(name)) or (f"did you mean {' or '.join(repr(n) for n in near)}? `fastllm --help` lists all" if near else f"commands: {', '.join(COMMANDS)}; `fastllm --help` says what they do")
            if os.path.exists(name):
                fix = f"for a model: fastllm run {name}"
            raise UsageError(f"there is no command '{name}'", fix=fix)
        return super().resolve_command(ctx, args)


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib.metadata import version

        click.echo(f"fastllm {version('fastllm-engine')}")
        ctx.exit()


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": same_dashes})
@click.option("--version", is_flag=True, callback=_print_version, expose_value=False, is_eager=True, help="Show the version.")
def cli() -> None:
    """fastllm runs large language models on the hardware you have.

    \b
    fastllm run                          chat with a small model (fetched on the first run)
    fastllm run model.gguf --prompt Hi   answer one prompt
    fastllm COMMAND --help               what a command can do
    """
