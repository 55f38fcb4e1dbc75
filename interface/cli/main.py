"""The command `fastllm`: a lazy group of commands, and the one place where errors become exit codes.

Commands are imported when they are called, so that `fastllm --help` answers at once. `-` and `_` are the same in option names.
Exit codes: 0, 1 failure, 2 usage, 3 broken plug-in, 4 backend unavailable, 5 unsupported, 130 Ctrl-C, 141 closed pipe.
"""

from __future__ import annotations

import contextlib
import os
import sys
from importlib import import_module

import click

__all__ = ["cli", "main"]

COMMANDS = {
    "run": ("fastllm.cli.run", "Answer a prompt, or chat, with a model."),
    "download": ("fastllm.cli.download", "Fetch a model into the cache."),
    "list": ("fastllm.cli.download", "Show the models that are on this machine."),
    "inspect": ("fastllm.cli.inspect", "Show what is inside a model file, from its header."),
    "plan": ("fastllm.cli.plan", "Show memory, placement and expected speed before loading."),
    "doctor": ("fastllm.cli.doctor", "Check this machine: CPU, memory, limits, backends."),
    "backends": ("fastllm.cli.backends", "List backends and say why one is not ready."),
}
"""name -> (module, one line of help): the help of the group is shown without importing any command."""

ALIASES = {"chat": "run", "backend": "backends"}


def same_dashes(name: str) -> str:
    """`_` counts as `-` in option and command names."""
    return name.replace("_", "-")


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
        command = getattr(import_module(COMMANDS[name][0]), f"{name}_command")
        return command if isinstance(command, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table, without imports."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Unknown commands list close ones."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            import difflib

            near = difflib.get_close_matches(name, [*COMMANDS, *ALIASES], n=2, cutoff=0.5)
            hint = f"did you mean '{near[0]}'?" if near else f"commands: {', '.join(COMMANDS)}"
            raise click.UsageError(f"no command '{name}'; {hint}", ctx)
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


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(args: list[str]) -> int:
    """Runs a command line; returns its exit code. Errors are one line and a fix on stderr, or JSON on stdout with `--json`."""
    debug = "--debug" in args
    try:
        result = cli.main(args, prog_name="fastllm", standalone_mode=False)
        _flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 2
    except click.ClickException as error:
        hint = f"\n  fix: {error.ctx.command_path} --help" if isinstance(error, click.UsageError) and error.ctx else ""
        _complain(f"fastllm: error: {error.format_message()}{hint}")
        return 2 if isinstance(error, click.UsageError) else 1
    except click.Abort:
        return 130
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _drop_stdout()
        return 141
    except Exception as error:
        from ..core.errors import FastLLMError

        if debug:
            raise
        if isinstance(error, FastLLMError):
            if "--json" in args:
                import json

                click.echo(json.dumps(error.as_dict(), default=str))
            _complain(error.render())
            return error.exit_code
        if isinstance(error, OSError):
            where = f" '{error.filename}'" if error.filename else ""
            _complain(f"fastllm: error: {error.strerror or error}{where}")
            return 1
        _complain(
            f"fastllm: error: internal error: {type(error).__name__}: {error}\n  fix: this is a bug of fastllm; run again with --debug and report it"
        )
        return 1


def _complain(text: str) -> None:
    try:
        click.echo(text, err=True)
    except (BrokenPipeError, OSError):
        _drop_stdout()


def _flush() -> None:
    sys.stdout.flush()


def _drop_stdout() -> None:
    """Nobody reads any more: keeps the interpreter from complaining when it flushes at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(null, stream.fileno())
    os.close(null)


if __name__ == "__main__":
    main()
