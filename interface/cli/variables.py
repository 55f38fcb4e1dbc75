"""Variables: those that begin with FASTLLM_ and are none of ours, and who gave an option that an error names.

A variable is set once and forgotten. A misspelt one would change nothing in silence, and somebody who reads "--device 7 …" and never typed it
looks in vain. `command` uses both for every command.
"""

from __future__ import annotations

import difflib
import os
import re

import click
from click.core import ParameterSource

from ..core.errors import FastLLMError
from .command import config_origin, long_name

__all__ = ["PREFIX", "VARIABLES", "PortOption", "origins", "say_origins", "unknown_variables"]

PREFIX = "FASTLLM_"
VARIABLES = frozenset({
    *("FASTLLM_BACKEND", "FASTLLM_CONFIG", "FASTLLM_CONFIG_FILE", "FASTLLM_HOME", "FASTLLM_ISA", "FASTLLM_SELF_TEST"),
    *("FASTLLM_CONTAIN_PLUGINS", "FASTLLM_DISABLE_PLUGINS", "FASTLLM_PLUGINS", "FASTLLM_STRICT_PLUGINS", "FASTLLM_TRACE_HOOKS"),
    *("FASTLLM_BENCH_CACHE", "FASTLLM_DEBUG_BUILD"),  # of the source tree, as all that begin with FASTLLM_EXTERNAL
})  # fmt: skip
"""Variables that are not made of the name of an option."""
_SERVICE = re.compile(rf"{PREFIX}(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)")
_ADDRESS = re.compile(r"(?:tcp|udp|sctp)://\S+")


class PortOption(click.Option):
    """`--port`. Its variable counts as not set where its value is the address of a Service of Kubernetes: nobody gave it."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """The variable's value, if it is one."""
        value = super().resolve_envvar_value(ctx)
        return None if value is not None and _of_kubernetes(str(self.envvar), value) else value


def _of_kubernetes(name: str, value: str) -> bool:
    """Whether a variable is one of those that every pod has for each Service, here one that is called `fastllm` or `fastllm-…`."""
    return _SERVICE.fullmatch(name) is not None or (name.endswith("_PORT") and _ADDRESS.fullmatch(value) is not None)


def unknown_variables(command: click.Command, with_plugin: bool = False) -> tuple[str, ...]:
    """A phrase about each variable that nothing reads. Those of other commands' options are known; so is one that begins with FASTLLM_ and
    the name of an installed backend, which is its own. An empty one counts as not set, and so do those of Kubernetes. with_plugin: a backend is
    given as a Python file. Its name is not known before the file is run, so none is told then."""
    if with_plugin or os.environ.get(f"{PREFIX}PLUGIN"):
        return ()
    asked = [n for n, value in os.environ.items() if n.startswith(PREFIX) and value and n not in VARIABLES and not n.startswith(f"{PREFIX}EXTERNAL")]
    asked = sorted(n for n in set(asked) - _of(command) if not _of_kubernetes(n, os.environ[n]))
    if not asked:
        return ()
    from .config_file import all_commands

    known = {name for name in VARIABLES.union(*(_of(c) for c in all_commands().values())) if name.startswith(PREFIX)}
    if not (asked := [n for n in asked if n not in known]):
        return ()
    from importlib.metadata import entry_points

    theirs = tuple(f"{PREFIX}{entry.name.upper()}_" for entry in entry_points(group="fastllm.backends"))
    return tuple(f"{n} is no variable of fastllm{_meant(n, known)}" for n in asked if not n.startswith(theirs))


def _of(command: click.Command) -> set[str]:
    """The variables of a command's options."""
    return {option.envvar for option in command.params if isinstance(option, click.Option) and isinstance(option.envvar, str)}


def _meant(name: str, known: set[str]) -> str:
    """What may have been meant; names are compared without what all of them begin with."""
    close = difflib.get_close_matches(name.removeprefix(PREFIX), [n.removeprefix(PREFIX) for n in known], 1, 0.6)
    return f" (did you mean {PREFIX}{close[0]}?)" if close else ""


def origins(ctx: click.Context, text: str) -> str:
    """Which of the options that a text names are from a variable or a file; "" if none is. The model counts as named where its name is."""
    found = []
    for option in ctx.command.params:
        source = ctx.get_parameter_source(option.name or "")
        if not isinstance(option, click.Option) or source not in (ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP):
            continue
        model = str(ctx.params.get("model") or "") if option.name == "model_flag" and "other_model" not in ctx.meta else ""
        named = any(re.search(rf"(?<![\w-]){re.escape(o)}(?![\w-])", text) for o in (*option.opts, *option.secondary_opts) if o.startswith("--"))
        if named or (model and _names(text, model)):
            where = f"the variable {option.envvar}" if source == ParameterSource.ENVIRONMENT else config_origin(ctx, option.name)
            found.append(f"{'the model' if model else long_name(option)} is from {where}")
    return "; ".join(found)


def _names(text: str, model: str) -> bool:
    """Whether a text holds the name or path of a model as a word of its own or as parts of a path."""
    return re.search(rf"(?<![\w.-]){re.escape(model)}(?![\w-]|\.\S)", text) is not None


def say_origins(ctx: click.Context, error: FastLLMError) -> None:
    """Adds to an error where the options that it names are from, if not from the line."""
    told = origins(ctx, f"{error.message} {error.who} {error.why} {error.fix}")
    if told and told not in error.why:
        error.why = f"{error.why}; {told}" if error.why and error.why not in error.message else told
