"""What all commands have in common: flags of ftllm, variables, a configuration file, and ways to name the model.

A value comes from the command line, else from the variable FASTLLM_FLAG, else from the file of `--config`, else from the default. MODEL
is an argument or `-p`; a `.toml` in its place, or ftllm's `.json`, is a configuration that names the model, and wins over the file of
`--config`.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from ..core.errors import FastLLMError, UnsupportedError, UsageError
from .old_flags import OldFlag, old_flag

__all__ = ["OWN_KEYS", "Command", "Group", "ModelArgument", "config_origin", "long_name", "model_argument", "refusal", "same_dashes"]

F = TypeVar("F", bound=Callable[..., Any])
OPTION = re.compile(r"-[^\d.]")  # as `-p` and `--port`; `-1` is a value
WORD = re.compile(r"true|false|on|off|yes|no|auto|none|-?[\d.]+", re.IGNORECASE)
"""Values that a flag takes of which it is not known whether it takes one."""
OWN_VARIABLES = {"--backend": None, "--config": "FASTLLM_CONFIG_FILE"}
"""Options whose variable is not made of their name: FASTLLM_BACKEND is read where backends are chosen, FASTLLM_CONFIG is a folder."""


MAY_BE_EMPTY = ("model_flag", "prompt", "system", "root_path")
"""Options that an empty text is a value of; of the model's, `_model` tells."""
OWN_KEYS = ("config_file", "dump_config")
"""Options that have no place in a configuration file."""


def same_dashes(name: str) -> str:
    """`_` counts as `-` in the names of options, commands and choices."""
    return name.replace("_", "-")


def long_name(option: click.Parameter) -> str:
    """The name of an option as it is typed: its first long one."""
    return next((o for o in (*option.opts, *option.secondary_opts) if o.startswith("--")), option.opts[0])


def config_origin(ctx: click.Context, name: str | None) -> str:
    """The file that the value of an option (by the name of its value) is from."""
    return str(ctx.meta.get("config_paths", {}).get(name, "a file"))


class ModelArgument(click.Argument):
    """MODEL, which may also come from an option or a file: click must not ask for it. needed: somebody must."""

    def __init__(self, param_decls: Sequence[str], needed: bool = False, **kwargs: Any):
        super().__init__(param_decls, required=False, **kwargs)
        self.needed = needed


    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        """Names of models that are here or can be fetched; the shell adds files."""
        from click.shell_completion import CompletionItem

        from ..core.errors import FastLLMError
        from ..formats.sources import ALIASES, list_cached

        try:
            names = sorted({*ALIASES, *(model.name for model in list_cached())})
        except (FastLLMError, OSError):
            names = sorted(ALIASES)
        return [*(CompletionItem(name) for name in names if name.startswith(incomplete)), CompletionItem(incomplete, type="file")]


def model_argument(needed: bool = False) -> Callable[[F], F]:
    """MODEL as argument, or as `-p`, `--path`, `--model`."""

    def decorate(command: F) -> F:
        command = click.option("--model", "-p", "--path", "model_flag", metavar="MODEL", help="The model, in place of the argument.")(command)
        return click.argument("model", cls=ModelArgument, metavar="MODEL" if needed else "[MODEL]", needed=needed)(command)

    return decorate


class Command(click.Command):
    """A command that takes ftllm's flags, variables and a configuration file."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if all(p.name != "config_file" for p in self.params):
            path = click.Path(exists=True, dir_okay=False, path_type=Path)
            text = "A TOML file with options: ctx = 4096."
            self.params.append(click.Option(["--config", "config_file"], type=path, is_eager=True, callback=_read_config, expose_value=False, help=text))
        for option in self.params:
            if isinstance(option, click.Option) and option.envvar is None:
                name = long_name(option)
                option.envvar = OWN_VARIABLES.get(name, f"FASTLLM_{name.lstrip('-').replace('-', '_').upper()}")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses, after flags of ftllm are written as ours; a model that is a configuration is read, and the line parsed again."""
        if ctx.resilient_parsing:  # a line that is being typed
            return super().parse_args(ctx, args)
        with _origins_said(ctx):
            return self._settled(ctx, args)

    def _settled(self, ctx: click.Context, args: list[str]) -> list[str]:
        """What click leaves of the line after all values are there; and what is to be told about them."""
        from .terminal import note
        from .variables import unknown_variables

        notes: list[str] = []
        args = self._written(args, notes, ctx.meta.setdefault("typed_as", {}))
        rest = self._parsed(ctx, args)
        if "model_flag" in ctx.params:
            given = self._model(ctx)
            if given is not None and given.lower().endswith((".toml", ".json")):
                rest = self._configured(ctx, args, rest, given, notes)
        for line in (*ctx.meta.pop("notes", ()), *notes):
            note(line, ctx.params)
        if unknown := unknown_variables(self, bool(ctx.params.get("plugin_paths"))):
            note("; ".join(unknown), ctx.params, "unset it; `docs/cli.md` lists those that there are")
        return rest

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command, or prints its configuration where `--dump-config` asks for that."""
        with _origins_said(ctx):
            if ctx.params.pop("dump_config", False):
                from .dump import print_config

                return print_config(ctx)
            return super().invoke(ctx)

    def _parsed(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click parses; the error for a value says where it is from, if not from the line."""
        if any("\0" in arg for arg in args):
            raise UsageError("an argument holds a NUL character, which no name and no text here has", fix="leave it out")
        try:
            rest = super().parse_args(ctx, list(args))
            self._check_empty(ctx, args)
            self._check_finite(ctx)
            return rest
        except click.NoSuchOption as error:
            raise foreign(error.option_name, error.option_name, error) from None
        except click.BadParameter as error:
            option = error.param
            if isinstance(option, click.Option) and (old := ctx.meta["typed_as"].get(long_name(option))):
                raise click.BadParameter(f"{error.message} ({old} is this option)", ctx, option) from None
            source = ctx.get_parameter_source(option.name or "") if option is not None else None
            if option is None or isinstance(error, click.MissingParameter) or source not in (ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP):
                raise
            where = f"the variable {option.envvar}" if source == ParameterSource.ENVIRONMENT else config_origin(ctx, option.name)
            raise click.BadParameter(f"{error.message} (it is from {where})", ctx, option) from None

    def _check_empty(self, ctx: click.Context, args: list[str]) -> None:
        """A script's variable that is not set must not mean the default. Raises click.BadParameter for an option whose value is ""."""
        typed: dict[str, Any] = {**(ctx.default_map or {}), **self.make_parser(ctx).parse_args(list(args))[0]}
        for option in self.params:
            value = typed.get(option.name or "") if option.name not in MAY_BE_EMPTY and isinstance(option, click.Option) else None
            if value == "" or (isinstance(value, list | tuple) and "" in value):
                raise click.BadParameter("it is empty: give it a value, or leave it out", ctx, option)

    def _check_finite(self, ctx: click.Context) -> None:
        """Every comparison with NaN is false, so a range lets it through. Raises click.BadParameter for a number that is none, or has no end."""
        for option in self.params:
            value = ctx.params.get(option.name or "")
            if isinstance(value, float) and not math.isfinite(value):
                raise click.BadParameter(f"{value} is no finite number", ctx, option)

    def _configured(self, ctx: click.Context, args: list[str], rest: list[str], given: str, notes: list[str]) -> list[str]:
        """Parses again with the values of the configuration that stands in the place of the model, if it is one."""
        from .config_file import apply_config, is_config

        if is_config(given):
            apply_config(ctx, Path(given), notes, as_model=True)
            ctx.params.clear()
            rest = self._parsed(ctx, args)
            if self._model(ctx) == given:
                ctx.params["model"] = self._own_model(ctx)
                ctx.meta.pop("other_model", None)  # the word in the place of MODEL was this file, and no prompt
        return rest

    def _model(self, ctx: click.Context) -> str | None:
        """Settles `model` (and PROMPT of `run`) from argument and option; returns the model."""
        params = ctx.params
        flag, typed = params.pop("model_flag", None), params.get("model")
        source = ctx.get_parameter_source("model_flag")
        ctx.meta["model_flag"] = flag
        if flag is not None and (typed is None or source == ParameterSource.COMMANDLINE):
            if typed is not None and not ("prompt_argument" in params and params["prompt_argument"] is None):
                raise UsageError(f"two models: {typed} and {flag}", fix="give one of them")
            if typed is not None:  # the one argument of `run` is then the prompt
                params["prompt_argument"] = typed
            params["model"] = flag
        elif flag is not None:
            ctx.meta["other_model"] = (flag, config_origin(ctx, "model_flag") if source == ParameterSource.DEFAULT_MAP else "the variable FASTLLM_MODEL")
        for parameter in self.params:
            if isinstance(parameter, ModelArgument) and parameter.needed and params["model"] is None:
                raise click.MissingParameter(ctx=ctx, param=parameter)
        if params["model"] is not None and not params["model"].strip():  # a script's variable that is not set must not mean the default
            raise UsageError("MODEL is empty", fix="name a model, or leave it out")
        return params["model"]

    def _own_model(self, ctx: click.Context) -> str:
        """The model that a configuration names; it was typed, so it wins over the variable. Raises UsageError if there is none."""
        named = (ctx.default_map or {}).get("model_flag", ctx.meta["model_flag"])
        if named is None or named == ctx.params["model"]:
            raise UsageError(f"{ctx.params['model']} names no model", fix='add a line to it: model = "NAME"')
        return str(named)

    # flags of ftllm ---------------------------------------------------------------------------------------------------

    def _options(self) -> dict[str, click.Option]:
        """Every spelling of every option -> the option."""
        return {o: p for p in self.params if isinstance(p, click.Option) for o in (*p.opts, *p.secondary_opts)}

    def _written(self, args: list[str], notes: list[str], typed_as: dict[str, str]) -> list[str]:
        """The command line with flags of ftllm as ours. notes: lines about those without effect. typed_as: our option -> the flag that was
        typed for it. Raises for those that cannot be."""
        known, out, rest = self._options(), list[str](), deque(args)
        while rest:
            arg = rest.popleft()
            if arg == "--":
                return [*out, arg, *rest]
            name, equals, value = arg.partition("=")
            name = same_dashes(name) if arg.startswith("--") else arg[:2] if arg[:1] == "-" else ""
            row = old_flag(name) if name else None
            if row is None or row.kind == "same" or (row.kind != "new" and name in known):
                out.append(arg)
                if name in known and not equals:
                    if _stands_alone(known[name], rest):
                        out[-1] += f"={known[name].flag_value}"
                    out += _values(arg, known[name], rest)
            elif row.kind == "no":
                raise refusal(name, row)
            elif row.kind == "note":
                notes.append(f"{name} has no effect: {row.text}")
                if not equals and rest and ((row.takes > 0 and not OPTION.match(rest[0])) or (row.takes < 0 and WORD.fullmatch(rest[0]))):
                    rest.popleft()
            elif row.text not in known:
                raise foreign(row.text, f"{name} is {row.text} here, which")
            else:
                words = [row.text]
                if row.takes and (equals or rest):  # else click says that a value is missing
                    words.append(row.written(value if equals else rest.popleft()))
                out += words if words[-1] else []
                typed_as[row.text] = name
        return out


@contextlib.contextmanager
def _origins_said(ctx: click.Context) -> Iterator[None]:
    """Errors from inside say where the options that they name are from, if not from the line."""
    try:
        yield
    except FastLLMError as error:
        from .variables import say_origins

        say_origins(ctx, error)
        raise


class Group(click.Group):
    """A group of such commands."""

    command_class = Command


def _values(arg: str, option: click.Option, rest: deque[str]) -> list[str]:
    """The values that belong to an option of ours, which must not be read as flags."""
    if option.is_flag or option.count or _may_stand_alone(option) or (not arg.startswith("--") and len(arg) > 2):
        return []
    return [rest.popleft() for _ in range(min(option.nargs, len(rest)))]


def _may_stand_alone(option: click.Option) -> bool:
    """Whether the value of an option may be left out. Such a value is never one that looks like a flag."""
    return not option.is_flag and isinstance(option.flag_value, str | float)


def _stands_alone(option: click.Option, rest: deque[str]) -> bool:
    """Whether the value of an option is left out: what follows is none of its words, and no number."""
    if not _may_stand_alone(option) or not rest:
        return _may_stand_alone(option)
    if isinstance(option.type, click.Choice):
        return rest[0] not in option.type.choices
    try:
        float(rest[0])
    except ValueError:
        return True
    return False


def foreign(name: str, shown: str, error: Exception | None = None) -> Exception:
    """The error for an option that this command has not; names those that have it. error: what it is where none has."""
    from .config_file import commands_with

    owners = commands_with(name.lstrip("-")) if name.startswith("--") else []
    if error is not None and not owners:
        return error
    listed = ", ".join(f"`fastllm {owner}`" for owner in owners[:3])
    here = click.get_current_context().command_path
    return UsageError(f"{shown} `{here}` does not take" if error is None else f"{shown} is no option of `{here}`", fix=f"leave it out; it belongs to {listed}")


def refusal(name: str, row: OldFlag) -> Exception:
    """The error for a flag that is refused, which names the way."""
    kind = UnsupportedError if row.exit_code == 5 else UsageError
    what, _, way = row.text.partition(": ")
    return kind(f"{name}: {what}", fix=way)


def _read_config(ctx: click.Context, param: click.Parameter, value: Path | None) -> None:
    if value is not None and "config_paths" not in ctx.meta:  # else the line is parsed again, and the file is read already
        from .config_file import apply_config

        notes: list[str] = []
        apply_config(ctx, value, notes)
        ctx.meta.setdefault("notes", []).extend(notes)
