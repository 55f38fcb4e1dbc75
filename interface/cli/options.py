"""Options that several commands share, and how they become `LoadOptions`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from ..core.errors import UsageError
from .command import config_origin, same_dashes
from .sizes import CacheSize
from .terminal import note

__all__ = ["backend_origin", "cache_options", "dtype_of", "file_options", "load_options", "model_options", "output_options", "parse_pairs", "sampling_options", "thinking_option", "weight_options"]

KINDS = {"cpu": "cpu_avx", "cuda": "cuda_cupy", "rocm": "rocm_hip", "hip": "rocm_hip", "opencl": "opencl_generic"}
"""What people call a device -> the backend that runs on it."""

F = TypeVar("F", bound=Callable[..., Any])


def _together(*options: Callable[[F], F]) -> Callable[[F], F]:
    """One decorator made of several, applied in reading order."""

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _path(dir_okay: bool = False) -> click.Path:
    return click.Path(dir_okay=dir_okay, path_type=Path)


_GROUP_SIZES = click.Choice(["32", "64", "128", "256"])

_weights = (
    click.option("--dtype", metavar="NAME", help="Convert weights while loading: int4, int4g64, int8, bf16, f16, …  [default: as stored]"),
    click.option("--quant-bit", type=click.Choice(["4", "8"]), help="Convert weights to int4 or int8, as --dtype does."),
    click.option("--group-size", type=_GROUP_SIZES, default="128", show_default=True, help="Weights that share a scale, for int4 and int8."),
    click.option("--moe-dtype", metavar="NAME", help="The type of routed experts.  [default: that of the rest]"),
    click.option("--no-quant-layer", metavar="REGEX", help="Weights whose name matches keep their type."),
    click.option("--dtype-config", type=_path(), help='JSON list of {"key": REGEX, "dtype": NAME}; the last match wins.'),
    click.option("--lora", metavar="FOLDER", type=_path(dir_okay=True), multiple=True, help="Folder of a LoRA adapter (PEFT) to merge into the weights of a Hugging Face folder; may be repeated."),
    click.option("--allow-requantize", is_flag=True, help="Quantise weights again that are quantised already."),
)

_cache = (
    click.option("--cache-dir", metavar="FOLDER", type=_path(dir_okay=True), help="Folder for fetched models.  [default: FASTLLM_HOME, and the hub's own]"),
    click.option("--offline", is_flag=True, default=None, help="Use no network; only models that are here."),
)

_files = (
    click.option("--chat-template", type=_path(), help="Chat template (Jinja) in place of the model's."),
    click.option("--tokenizer-from", metavar="MODEL", help="Folder or hub id whose tokenizer, template and sampling defaults are used in place of the model's."),
    *_cache,
)

_output = (
    click.option("--strict", is_flag=True, help="Turn every note about something done differently into an error."),
    click.option("--quiet", "-q", is_flag=True, help="No progress, notes or statistics on stderr."),
    click.option("--progress", type=click.Choice(["auto", "plain", "json"]), default="auto", help="How stderr tells progress: bars on a terminal, lines, or a JSON object a line.  [default: auto]"),
    click.option("--debug", is_flag=True, help="Show the traceback of an error."),
)

_model = (
    click.option("--backend", metavar="NAME[:DEVICE]", help="Backend to run on; `fastllm backends list` shows them.  [default: the best that is ready]"),
    click.option("--device", metavar="DEVICE", help="A device of the backend; or cpu, cuda, rocm, opencl for the backend itself, as cuda:1."),
    click.option("--backend-opt", metavar="KEY=VALUE", multiple=True, help="Option of the backend; may be repeated."),
    click.option("--threads", "-t", type=click.IntRange(0), default=0, help="CPU threads.  [default: cores this process may use]"),
    click.option("--ctx", type=click.IntRange(8), help="Longest conversation in tokens.  [default: the model's own, as far as memory allows]"),
    *_weights,
    click.option("--compute-dtype", type=click.Choice(["auto", "f32"]), help="Activations of linear layers: rounded as the backend is fastest, or exact f32, which is slower.  [default: auto]"),
    click.option("--kv-dtype", type=click.Choice(["f16", "bf16", "f32", "int8"]), help="How keys and values are cached.  [default: the backend's, bf16 or f16 on cpu_avx]"),
    click.option("--kv-cache-size", type=CacheSize(), help="Size of the cache, as 2GiB or 65536tok.  [default: a full context for each sequence, as far as memory allows]"),
    click.option("--block-size", type=click.IntRange(8, 1024), default=64, help="Tokens of a cache block.  [default: 64]"),
    click.option("--prefix-cache", type=click.Choice(["on", "off"]), default="on", help="Find prompts again.  [default: on]"),
    click.option("--max-batch-size", type=click.IntRange(1, 4096), help="Sequences that run at the same time.  [default: 8 for a server, else 1]"),
    click.option("--prefill-chunk", type=click.IntRange(1, 65536), default=512, help="Tokens of a step.  [default: 512]"),
    click.option("--fallback", type=click.Choice(["error", "warn", "allow"]), help="When an op leaves its device: refuse, name it in a line, or only count it.  [default: warn]"),
    click.option("--plugins-file", type=_path(), help="A plugins.toml with defaults for backends."),
    click.option("--plugin", "plugin_paths", type=_path(), multiple=True, envvar="FASTLLM_PLUGIN", help="A backend in a Python file."),
    *_files,
    click.option("--verify-model", is_flag=True, help="Check every byte of the model that can be checked before it is loaded, as `fastllm verify`."),
    click.option("--no-self-test", is_flag=True, help="Open the backend without the test of its first opening, as FASTLLM_SELF_TEST=0."),
    click.option("--verbose", "-v", is_flag=True, help="A line with the reason for each op that leaves its device, instead of one for all."),
    *_output,
    click.option("--dump-config", is_flag=True, help="Print what these options come to, as a file for --config, and exit."),
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
    """--backend … --dump-config, for every command that opens a model."""
    return _together(*_model)(command)


def file_options(command: F) -> F:
    """--chat-template … --offline and --strict … --debug, for commands that read a model's files and run nothing."""
    return _together(*_files, *_output)(command)


def cache_options(command: F) -> F:
    """--cache-dir, --offline."""
    return _together(*_cache)(command)


def output_options(command: F) -> F:
    """--strict … --debug."""
    return _together(*_output)(command)


def weight_options(command: F) -> F:
    """--dtype … --lora, --allow-requantize."""
    return _together(*_weights)(command)


thinking_option = click.option("--thinking", type=click.Choice(["on", "off"]), help="Have the model think first or not, where its template has that switch.  [default: the template's]")


def sampling_options(command: F | None = None, *, without: tuple[str, ...] = ()) -> Any:
    """--max-tokens … --ignore-eos; without: those whose value has one of these names."""
    chosen = [o for name, o in zip(_SAMPLING_NAMES, _sampling, strict=True) if name not in without]
    return _together(*chosen) if command is None else _together(*chosen)(command)


def parse_pairs(pairs: tuple[str, ...]) -> dict[str, str]:
    """`key=value` strings as a dict. Raises UsageError for one without `=`."""
    result = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"--backend-opt {pair!r} is not KEY=VALUE", fix="`fastllm backends show NAME` lists the keys; write --backend-opt threads=2")
        result[key] = value
    return result


def load_options(values: Mapping[str, Any], **extra: Any) -> Any:
    """`LoadOptions` from the values of `model_options`. extra: fields that a command sets itself, and they win."""
    from ..loading import LoadOptions

    names: tuple[str, ...] = ("threads", "ctx", "kv_dtype", "fallback", "plugins_file", "plugin_paths", "offline", "strict", "lora", "cache_dir")
    names += ("no_quant_layer", "dtype_config", "moe_dtype", "allow_requantize", "verbose", "block_size", "prefill_chunk", "chat_template", "tokenizer_from")
    chosen = {name: values[name] for name in names if name in values}
    chosen |= {"backend": _backend(values), "backend_origin": backend_origin(values), "dtype": dtype_of(values), "prefix_cache": values.get("prefix_cache") != "off", "verify": values.get("verify_model", False)}
    if values.get("compute_dtype") not in (None, "auto"):
        chosen["compute_dtype"] = values["compute_dtype"]
    if values.get("no_self_test"):
        chosen["self_test"] = False
    if values.get("max_batch_size"):
        chosen["max_batch_size"] = values["max_batch_size"]
    if values.get("kv_cache_size"):
        kind, amount = values["kv_cache_size"]
        chosen[f"kv_cache_{kind}"] = amount
    if "group_size" in values:
        chosen["group_size"] = int(values["group_size"])
        _check_group_size(values)
    return LoadOptions(backend_options=parse_pairs(values.get("backend_opt", ())), **(chosen | extra))


def dtype_of(values: Mapping[str, Any]) -> str | None:
    """`--dtype`, where auto is as stored, or what `--quant-bit` means. Raises UsageError if they differ."""
    dtype, bits = values.get("dtype"), values.get("quant_bit")
    dtype = None if dtype == "auto" else dtype
    if bits is None:
        return dtype
    if dtype is not None and not dtype.lower().startswith(f"int{bits}"):
        raise UsageError(f"--quant-bit {bits} and --dtype {dtype} differ", fix="give one of them")
    return dtype or f"int{bits}"


def _backend(values: Mapping[str, Any]) -> str | None:
    """NAME[:DEVICE] of `--backend` and `--device`. Raises for a device beside another one, and for several devices."""
    variable, device = _variable(values), values.get("device")
    backend = values.get("backend") or variable
    if device is None:
        return backend
    if re.search(r"[,{=]|multi|numa", device) or device.count(":") > 1:
        from ..core.errors import UnsupportedError

        raise UnsupportedError(f"--device {device} names several devices; a model runs on one", fix="--backend NAME[:DEVICE]; `fastllm backends list` shows them")
    name, _, number = device.partition(":")
    kind = KINDS.get(same_dashes(name).lower())
    if backend is None and kind is None and name.isdigit():
        raise UsageError(f"--device {device} is a device of a backend, and none is named", fix=f"--backend NAME --device {device}")
    own = kind or (name if backend is None else backend.partition(":")[0])
    if backend is not None and (":" in backend or (kind is not None and kind != backend)):
        named = f"FASTLLM_BACKEND={variable}" if variable else f"--backend {backend}"
        raise UsageError(f"{named} and --device {device} differ", fix="give one of them")
    chosen = number if kind is not None or backend is None else device
    return f"{own}:{chosen}" if chosen else own


def _variable(values: Mapping[str, Any]) -> str | None:
    """The value of FASTLLM_BACKEND where `--device` is a number and so a device of that backend. Without one, whoever chooses backends reads it."""
    beside = values.get("backend") is None and (values.get("device") or "").isdigit()
    return (os.environ.get("FASTLLM_BACKEND") or None) if beside else None


def backend_origin(values: Mapping[str, Any]) -> str:
    """Who names the backend: an option as it was given, or the variable or the file that it is from."""
    context = click.get_current_context()
    named = [f"FASTLLM_BACKEND={beside}"] if (beside := _variable(values)) else []
    for name in ("backend", "device"):
        if (value := values.get(name)) is None:
            continue
        source = context.get_parameter_source(name)
        if source == ParameterSource.ENVIRONMENT:
            variable = next(p.envvar for p in context.command.params if p.name == name)
            named.append(f"{variable}={value}")
        else:
            named.append(f"{config_origin(context, name)}: {name}" if source == ParameterSource.DEFAULT_MAP else f"--{name} {value}")
    kind = KINDS.get(same_dashes((values.get("device") or "").partition(":")[0]).lower())
    return " and ".join(named) + (f", that is --backend {kind}" if kind else "") or "--backend"


def _check_group_size(values: Mapping[str, Any]) -> None:
    """--group-size is about weights that are converted; without a conversion it says nothing, and that is said."""
    source = click.get_current_context().get_parameter_source("group_size")
    if source in (None, ParameterSource.DEFAULT) or any(values.get(name) for name in ("dtype", "dtype_config", "quant_bit", "moe_dtype")):
        return
    note("--group-size has no effect: weights stay as they are stored without --dtype", values, "leave it out, or give --dtype int4")
