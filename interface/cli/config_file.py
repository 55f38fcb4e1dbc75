"""Files with options: TOML (`--config FILE`, or FILE.toml in the place of MODEL), and the JSON that ftllm writes.

Keys are the names of options; `model` names the model. A key of another command's option is told and has no effect; one of no command's is
an error. Keys of ftllm are read by the table of its flags, and what it writes for "not set" is left out. A model may be somebody else's: a
file in its place runs no code, opens no server and says of no file where it is written.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import click

from ..core.errors import UsageError
from .command import OWN_KEYS, long_name, same_dashes
from .files import read_text
from .old_flags import old_flag

__all__ = ["all_commands", "apply_config", "commands_with", "is_config"]

MAX_BYTES = 1 << 20
UNSET = (-1, "", "auto", None)
"""Values with which a configuration of ftllm says that nothing is set."""
OFF = (0, "off", "OFF", False)
"""Those that say it for what has no effect here or is refused; other options have them as values."""
DEFAULTS = {"cuda_shared_expert": "true", "gpu_mem_ratio": 0.9, "enable_amx": "false", "think": "false"}
"""Values that its `config` command writes for what nobody chose."""
NUMA, NUMA_THREADS = "FASTLLM_ACTIVATE_NUMA", "FASTLLM_NUMA_THREADS"
"""Keys of ftllm's configuration that are no flags."""
CONFIG_ONLY = ("plugin", "plugins-file", "host", "insecure", "allowed-host", "cors-origin", "output", "overwrite", "local-dir")
"""Keys of a file of `--config` that one in the place of MODEL may not have."""


def is_config(model: str) -> bool:
    """Whether a MODEL is a file with options: any `.toml`, and a `.json` that names a model but describes none."""
    path = Path(model)
    if path.suffix.lower() not in (".toml", ".json") or not path.is_file():
        return False
    if path.suffix.lower() == ".toml":
        return True
    if path.stat().st_size > MAX_BYTES:
        return False
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and "model_type" not in data and bool({"model", "path"} & set(data))


def apply_config(ctx: click.Context, path: Path, notes: list[str], as_model: bool = False) -> None:
    """Makes the file's values the defaults of a command: variables and flags win over them. notes: lines about keys without effect.
    as_model: the file stands in the place of MODEL.

    Raises UsageError for what is no such file, for unknown keys, and for those that such a model may not have.
    """
    old = path.suffix.lower() == ".json"
    data = _read(path, old)
    names = {o.lstrip("-"): p for p in ctx.command.params for o in (*p.opts, *p.secondary_opts) if p.name not in OWN_KEYS}
    found, others = dict[str, Any](), list[str]()
    for key, value in data.items():
        if old and _is_unset(key, value):
            continue
        if old and key == NUMA:
            notes.append(f"{path.name}: '{key}' has no effect: backends place their threads themselves")
            continue
        name, value = _modern(same_dashes(key), value, notes, f"{path.name}: ")
        if name is None:
            continue
        option = names.get(name)
        full = name if option is None else long_name(option).lstrip("-")
        if as_model and full in CONFIG_ONLY:
            raise UsageError(f"{path}: '{key}' is not taken from a file in the place of MODEL", who=str(path), fix=f"where you trust the file: --config {path}")
        if option is not None:
            found[str(option.name)] = _fitting(option, value, key, path)
        elif option is None and commands_with(name):
            others.append(key)
        else:
            if isinstance(value, dict):
                raise UsageError(f"{path}: '{key}' is a table", who=str(path), fix=f"write its lines at the top of the file, without [{key}]")
            raise _unknown(key, path, [n for n in names if len(n) > 1 and not n.startswith("no-")], ctx)
    if others:
        many = len(others) > 1
        listed = ", ".join(f"'{key}'" for key in others)
        notes.append(f"{path.name}: {listed} {'have' if many else 'has'} no effect: {'they are no options' if many else 'it is no option'} of `{ctx.command_path}`")
    ctx.default_map = {**(ctx.default_map or {}), **found}
    ctx.meta.setdefault("config_paths", {}).update(dict.fromkeys(found, str(path)))


def _unknown(key: str, path: Path, names: list[str], ctx: click.Context) -> UsageError:
    """The error for a key that is no option of any command, with those that are spelt like it."""
    import difflib

    close = difflib.get_close_matches(same_dashes(key), names, 3, 0.6)
    fix = f"did you mean {' or '.join(close)}?" if close else f"`{ctx.command_path} --help` shows the options; a key is an option's name without --"
    return UsageError(f"{path}: there is no option '{key}'", who=str(path), fix=fix)


def _is_unset(key: str, value: Any) -> bool:
    """Whether a key of ftllm's configuration says nothing."""
    if key == NUMA_THREADS or value in UNSET or DEFAULTS.get(key) == value:
        return True
    row = old_flag(f"--{same_dashes(key)}")
    return value in OFF and (key == NUMA or (row is not None and row.kind in ("note", "no")))


def _modern(name: str, value: Any, notes: list[str], where: str) -> tuple[str | None, Any]:
    """Name and value of a key as ours; no name for one without effect. Raises for those that cannot be."""
    row = old_flag(f"--{name}")
    if row is None or row.kind == "same" or isinstance(value, dict | list):
        return name, value
    if row.kind == "no":
        from .command import refusal

        raise refusal(f"{where}{name}", row)
    if row.kind == "note":
        notes.append(f"{where}'{name}' has no effect: {row.text}")
        return None, value
    text = str(value).lower() if isinstance(value, bool) else str(value)
    written = row.written(text) if row.takes else value
    return (row.text.lstrip("-") if written != "" else None), written


def _read(path: Path, as_json: bool) -> dict[str, Any]:
    """The table in a file. Raises UsageError for what is none."""
    text = read_text("--config", path, MAX_BYTES)
    try:
        data = json.loads(text, object_pairs_hook=_once) if as_json else tomllib.loads(text)
    except (tomllib.TOMLDecodeError, ValueError, RecursionError) as error:
        fix = 'write {"model": "NAME", "ctx": 4096}' if as_json else 'write lines as `ctx = 4096` or `model = "NAME"`; texts stand in quotes'
        raise UsageError(f"{path} is not {'JSON' if as_json else 'TOML'}: {error}", who=str(path), fix=fix) from None
    if not isinstance(data, dict):
        raise UsageError(f"{path} is no object with options", who=str(path), fix='write {"model": "NAME", "ctx": 4096}')
    return data


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a key that is there twice must not lose its first value in silence."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"the key '{twice}' is there twice")
    return found


def _fitting(option: click.Parameter, value: Any, key: str, path: Path) -> Any:
    """The value as click takes it: a list where there may be several, text for a choice. Raises UsageError for one of another type, which
    click would cut (3.5 to 3), read as another one or pass on."""
    many = isinstance(option, click.Option) and option.multiple
    values = value if isinstance(value, list) and many else [value]
    if isinstance(option, click.Option) and option.is_flag and not many and isinstance(option.type, click.types.BoolParamType):
        needed, good = "true or false", isinstance(value, bool | str) or value in (0, 1)
    elif isinstance(option.type, click.types.IntParamType):
        needed, good = "a whole number", all(isinstance(v, str) or (isinstance(v, int) and not isinstance(v, bool)) or (isinstance(v, float) and v.is_integer()) for v in values)
    elif isinstance(option.type, click.types.FloatParamType):
        needed, good = "a number", all(isinstance(v, str | int | float) and not isinstance(v, bool) for v in values)
    elif isinstance(option.type, click.Choice):
        needed, good = f"one of {', '.join(map(str, option.type.choices))}", all(isinstance(v, str | int | float) for v in values)
    elif isinstance(option.type, click.Path | click.types.StringParamType):
        needed, good = "a text", all(isinstance(v, str) for v in values)
    else:
        needed, good = "a text or a number", all(isinstance(v, str | int) and not isinstance(v, bool) for v in values)
    if any(isinstance(v, str) and "\0" in v for v in values):
        raise UsageError(f"{path}: '{key}' holds a NUL character", who=str(path), fix="leave it out")
    if not good:
        kinds = {bool: str(value).lower(), list: "a list", dict: "a table"}
        found = kinds.get(type(value), repr(value))
        what = f"a list of which each is {needed}" if many and isinstance(value, list) else needed
        example = {"a text": '"…"', "true or false": "true"}.get(needed, "…")
        raise UsageError(f"{path}: '{key}' is {found}; it must be {what}", who=str(path), fix=f"write {key} = {example}")
    if many:
        return values
    if isinstance(option.type, click.Choice):
        return {"True": "on", "False": "off"}.get(str(value), str(value))
    return value


def commands_with(name: str) -> list[str]:
    """The commands (`run`, `bench serve`) that have an option."""
    return [full for full, command in all_commands().items() if any(name == long_name(p).lstrip("-") for p in command.params if isinstance(p, click.Option))]


def all_commands() -> dict[str, click.Command]:
    """Every command by what is typed. They are imported for it, which happens only where a name is not of the command's own."""
    from .group import COMMANDS, cli

    context, found = click.Context(cli), dict[str, click.Command]()
    for title in COMMANDS:
        command = cli.get_command(context, title)
        if isinstance(command, click.Group):
            found |= {f"{title} {sub}": c for sub, c in command.commands.items()}
        elif command is not None:
            found[title] = command
    return found
