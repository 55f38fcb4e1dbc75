"""Options that several commands share, and how they become `LoadOptions`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

__all__ = ["load_options", "model_options", "parse_pairs", "sampling_options", "verbose_option"]

F = TypeVar("F", bound=Callable[..., Any])


def _together(*options: Callable[[F], F]) -> Callable[[F], F]:
    """One decorator made of several, applied in reading order."""

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_model = (
    click.option("--backend", metavar="NAME[:DEVICE]", help="Backend to run on; `fastllm backends list` shows them.  [default: the best that is ready]"),
    click.option("--backend-opt", metavar="KEY=VALUE", multiple=True, help="Option of the backend; may be repeated."),
    click.option("--threads", "-t", type=click.IntRange(0), default=0, help="CPU threads.  [default: cores this process may use]"),
    click.option("--ctx", "--max-context-length", type=click.IntRange(8), help="Longest conversation in tokens.  [default: the model's own, as far as memory allows]"),
    click.option("--dtype", metavar="NAME", help="Convert weights while loading: int4, int4g64, int8, bf16, f16, …  [default: as stored]"),
    click.option("--group-size", type=click.Choice(["32", "64", "128", "256"]), default="128", show_default=True, help="Weights that share a scale, for int4 and int8."),
    click.option("--no-quant-layer", metavar="REGEX", help="Weights whose name matches keep their type."),
    click.option("--dtype-config", type=click.Path(dir_okay=False, path_type=Path), help='JSON list of {"key": REGEX, "dtype": NAME}; the last match wins.'),
    click.option("--allow-requantize", is_flag=True, help="Quantise weights again that are quantised already."),
    click.option("--kv-dtype", "--kv-cache-dtype", type=click.Choice(["f16", "bf16", "f32", "int8"]), help="How keys and values are cached.  [default: the backend's, f16 on cpu_avx]"),
    click.option("--fallback", type=click.Choice(["error", "warn", "allow"]), help="When an op leaves its device: refuse, name it in a line, or only count it.  [default: warn]"),
    click.option("--plugins-file", type=click.Path(dir_okay=False, path_type=Path), help="A plugins.toml with defaults for backends."),
    click.option("--plugin", "plugin_paths", type=click.Path(dir_okay=False, path_type=Path), multiple=True, envvar="FASTLLM_PLUGIN", help="A backend in a Python file."),
    click.option("--offline", is_flag=True, default=None, help="Use no network; only models that are here."),
    click.option("--strict", is_flag=True, help="Turn every note about something done differently into an error."),
    click.option("--no-self-test", is_flag=True, help="Open the backend without the test of its first opening, as FASTLLM_SELF_TEST=0."),
    click.option("--quiet", "-q", is_flag=True, help="No progress, notes or statistics on stderr."),
    click.option("--debug", is_flag=True, help="Show the traceback of an error."),
)

_sampling = (
    click.option("--max-tokens", "-n", type=click.IntRange(1), help="Most new tokens.  [default: until the answer or the context ends]"),
    click.option("--temperature", type=click.FloatRange(0, 5), help="0 always takes the likeliest token.  [default: the model's, else 0.7]"),
    click.option("--top-k", type=click.IntRange(-1), help="Sample among the k likeliest; 0 or -1: all.  [default: the model's, else 40]"),
    click.option("--top-p", type=click.FloatRange(0, 1), help="Sample among the likeliest that sum to p.  [default: the model's, else 0.95]"),
    click.option("--min-p", type=click.FloatRange(0, 1), help="Leave out what is less likely than this fraction of the likeliest."),
    click.option("--repeat-penalty", type=click.FloatRange(0.01, 10), help="Above 1: less repetition."),
    click.option("--presence-penalty", type=click.FloatRange(-2, 2), help="Above 0: fewer tokens that were there already."),
    click.option("--frequency-penalty", type=click.FloatRange(-2, 2), help="Above 0: fewer tokens that were there often."),
    click.option("--seed", type=int, help="Same seed, same answer.  [default: drawn, shown in the statistics]"),
    click.option("--ignore-eos", is_flag=True, help="Go on after the model has ended its answer."),
)


_SAMPLING_NAMES = (
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty", "seed", "ignore_eos"
)  # fmt: skip


def model_options(command: F) -> F:
    """--backend … --debug, for every command that opens a model."""
    return _together(*_model)(command)


def verbose_option(command: F) -> F:
    """--verbose, for every command that loads a model."""
    return click.option("--verbose", "-v", is_flag=True, help="A line with the reason for each op that leaves its device, instead of one for all.")(command)


def sampling_options(command: F | None = None, *, without: tuple[str, ...] = ()) -> Any:
    """--max-tokens … --ignore-eos; without: those whose value has one of these names."""
    chosen = [o for name, o in zip(_SAMPLING_NAMES, _sampling, strict=True) if name not in without]
    return _together(*chosen) if command is None else _together(*chosen)(command)


def parse_pairs(pairs: tuple[str, ...]) -> dict[str, str]:
    """`key=value` strings as a dict. Raises click.UsageError for one without `=`."""
    result = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise click.UsageError(f"--backend-opt {pair!r} is not KEY=VALUE")
        result[key] = value
    return result


def load_options(values: Mapping[str, Any], **extra: Any) -> Any:
    """`LoadOptions` from the values of `model_options`."""
    from ..loading import LoadOptions

    names: tuple[str, ...] = ("backend", "threads", "ctx", "kv_dtype", "fallback", "plugins_file", "plugin_paths", "offline", "strict")
    names += ("dtype", "no_quant_layer", "dtype_config", "allow_requantize", "verbose")
    chosen = {name: values[name] for name in names if name in values}
    if values.get("no_self_test"):
        chosen["self_test"] = False
    if "group_size" in values:
        chosen["group_size"] = int(values["group_size"])
        _check_group_size(values, extra.get("message"))
    return LoadOptions(backend_options=parse_pairs(values.get("backend_opt", ())), **chosen, **extra)


def _check_group_size(values: Mapping[str, Any], message: Callable[[str], None] | None) -> None:
    """--group-size is about weights that are converted; without a conversion it says nothing, and that is said."""
    source = click.get_current_context().get_parameter_source("group_size")
    if source in (None, ParameterSource.DEFAULT) or values.get("dtype") or values.get("dtype_config"):
        return
    text = "--group-size has no effect: weights stay as they are stored without --dtype"
    if values.get("strict"):
        raise click.UsageError(f"{text}; give --dtype int4, or leave it out")
    if message is not None:
        message(text)
    elif not values.get("quiet"):
        click.echo(f"fastllm: {text}", err=True)
