"""`fastllm dump-config`, and `--dump-config` of other commands: what options come to, and where each value is from.

What is printed is a TOML file for `--config`, or for the place of MODEL: values that were chosen, and what the model and the machine
decide, are set in it; built-in defaults are comments. Keys of a server are not in it, as secrets have no place there; with a key of
`config_file.CONFIG_ONLY` it is for `--config` only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from .command import OWN_KEYS, Command, config_origin, long_name, model_argument
from .files import check_new, write_text
from .options import load_options, model_options, sampling_options
from .server import server_options

if TYPE_CHECKING:
    from ..loading import ModelPlan

__all__ = ["dump_config_command", "print_config"]

OWN = (*OWN_KEYS, "model_flag", "as_json", "output", "overwrite", "debug", "device", "quant_bit", "prompt", "interactive")
"""Options that are no part of a configuration, or are written as another one."""
SECRET = ("api_keys", "token")
SIZES = ("max_batch_size", "kv_cache_size")
"""A server and a chat have different ones: they are told, and not set."""
SAMPLING = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repeat_penalty": "repetition_penalty"}
"""Option -> field, of what a model may have defaults for."""


@dataclass
class Row:
    """One value. decided: chosen by somebody, or by the model or the machine: it is set in the file, and not a comment."""

    key: str
    value: Any
    origin: str
    decided: bool


@click.command("dump-config", cls=Command)
@model_argument()
@click.option("--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file, which is then a MODEL for every command.")
@click.option("--overwrite", is_flag=True, help="Replace the output if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@server_options
@sampling_options(without=("max_tokens", "seed", "ignore_eos"))
@model_options
def dump_config_command(model: str | None, output: Path | None, overwrite: bool, as_json: bool, **values: Any) -> None:
    """Print the effective configuration of MODEL with the origin of each value: option, variable, file, model or machine.

    It takes the options of `fastllm server`. The output is a file for --config, or in the place of MODEL. No weight is loaded.

    \b
    fastllm dump-config ./model.gguf --ctx 4096 -o mine.toml
    fastllm server mine.toml --port 8080
    """
    if output is not None:
        check_new("-o", output, overwrite)
    print_config(click.get_current_context())


def print_config(ctx: click.Context) -> None:
    """Prints, or writes, the configuration of the command that a context belongs to."""
    from ..loading import DEFAULT_MODEL, plan_model
    from .terminal import Reporter

    values = ctx.params
    model = values.get("model") or DEFAULT_MODEL
    with Reporter.of(values, silent=bool(values.get("as_json"))) as reporter:
        callbacks = {"progress": reporter.progress, "message": reporter.message, "licence": reporter.licence}
        size = values.get("max_batch_size") or (8 if "hosts" in values else 1)
        planned = plan_model(model, load_options({**values, "max_batch_size": size}, **callbacks))
    try:
        rows = list(_rows(ctx, planned))
    finally:
        planned.close()
    shown = os.path.abspath(model) if os.path.exists(model) else model
    if values.get("as_json"):
        found = {row.key: {"value": row.value, "origin": row.origin} for row in rows}
        text = json.dumps({"model": shown, "values": found}, indent=1, default=str) + "\n"
    else:
        text = "".join(f"{line}\n" for line in _lines(shown, ctx, rows))
    output = values.get("output")
    if output is None:
        click.echo(text, nl=False)
        return
    write_text("-o", output, text)
    click.echo(str(output))


def _rows(ctx: click.Context, planned: ModelPlan) -> Iterator[Row]:
    """Every option of the command with its effective value."""
    settled = _settled(ctx, planned)
    for option in ctx.command.params:
        name = option.name or ""
        if not isinstance(option, click.Option) or not option.expose_value or name in OWN:
            continue
        key, value, source = long_name(option).lstrip("-"), ctx.params.get(name), ctx.get_parameter_source(name)
        if name in SECRET:
            if value:
                yield Row(key, None, f"{_origin(ctx, option)}; secrets are not written", decided=False)
            continue
        chosen = source not in (None, ParameterSource.DEFAULT)
        if name in settled and (not chosen or name in ("backend", "dtype")):
            value, origin = settled[name]
            yield Row(key, value, origin, decided=value is not None and name not in SIZES)
        else:
            yield Row(key, _plain(value), _origin(ctx, option), decided=chosen and value is not None and value is not False and value != ())


def _settled(ctx: click.Context, planned: ModelPlan) -> dict[str, tuple[Any, str]]:
    """Option -> (value, origin) of what is decided elsewhere than on the command line."""
    from ..loading import _generation_defaults

    selection, options, limits = planned.selection, planned.options, planned.plan.limits
    whole = planned.context == planned.definition.max_position
    name, device = str(selection) if selection.device else selection.name, ctx.params.get("device")
    chosen = "the best that is ready" if selection.origin == "auto" else selection.origin
    if device is not None:
        chosen = _given(ctx, "device", f"--device {device}")
    elif ctx.params.get("backend") is not None:
        chosen = _given(ctx, "backend")
    found: dict[str, tuple[Any, str]] = {
        "backend": (name, chosen),
        "ctx": (planned.context, "the model's own" if whole else "as far as memory allows"),
        "max_batch_size": (limits.max_sequences, "8 for a server, else 1"),
        "kv_cache_size": (f"{limits.num_blocks * limits.block_size}tok", "the contexts of all sequences, as far as memory allows"),
    }
    if "threads" in selection.spec.options:
        found["threads"] = (planned.backends[selection.name].threads, "the cores that this process may use")
    if options.dtype is not None:
        bits = ctx.params.get("quant_bit")
        found["dtype"] = (options.dtype, _given(ctx, "quant_bit", f"--quant-bit {bits}") if bits else _given(ctx, "dtype"))
    if "temperature" in ctx.params:
        said, defaults = planned.files.generation_config, _generation_defaults(planned.files)
        for name, field in SAMPLING.items():
            own = said.get(field) is not None or (field == "temperature" and said.get("do_sample") is False)
            found[name] = (getattr(defaults, field), "generation_config.json" if own else "built in")
    return found


def _given(ctx: click.Context, name: str, shown: str = "") -> str:
    """Where the value of the option that has this name is from, and how it was given if it is written as another one."""
    where = _origin(ctx, next(p for p in ctx.command.params if isinstance(p, click.Option) and p.name == name))
    return f"{where}: {shown}" if shown else where


def _origin(ctx: click.Context, option: click.Option) -> str:
    """Where the value of an option is from."""
    source = ctx.get_parameter_source(option.name or "")
    if source == ParameterSource.COMMANDLINE:
        return "command line"
    if source == ParameterSource.ENVIRONMENT:
        return f"variable {option.envvar}"
    return config_origin(ctx, option.name) if source == ParameterSource.DEFAULT_MAP else "default"


def _plain(value: Any) -> Any:
    """The value as TOML and JSON have it."""
    if isinstance(value, tuple) and len(value) == 2 and value[0] in ("bytes", "tokens"):
        return value[1] if value[0] == "bytes" else f"{value[1]}tok"
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return os.path.abspath(value) if isinstance(value, Path) else value


def _lines(model: str, ctx: click.Context, rows: list[Row]) -> Iterator[str]:
    """The TOML file."""
    yield f"# what `{ctx.command_path}` runs with, and who says so; a line that begins with # is a default, or says nothing"
    yield f"model = {_toml(model)}"
    for row in rows:
        shown = f"{row.key} = {_toml(row.value)}" if row.value not in (None, []) else f"{row.key}: not set"
        yield f"{'' if row.decided else '# '}{shown}  # {row.origin}" if row.decided or row.origin != "default" else f"# {shown}"


def _toml(value: Any) -> str:
    """A value in TOML; its strings are JSON's."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") if isinstance(value, str | bool | list) else str(value)
