"""plugins.toml: which backends are used, with what priority and options.

Layers are packaged < user folder < `--plugins-file`, merged key by key; every value keeps the file and line it came from, so
that an error or `backends list` can name it. `./plugins.toml` is not read by itself: a downloaded model folder must not choose
what code is loaded. Called by the registry only.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import ConfigError

__all__ = ["FALLBACK_POLICIES", "NAME_PATTERN", "PACKAGED_FILE", "PluginsConfig", "Setting", "close_matches", "load_config", "user_file"]

NAME_PATTERN: Final = re.compile(r"[a-z][a-z0-9_]{1,31}")
FALLBACK_POLICIES: Final = ("error", "warn", "allow")
PACKAGED_FILE: Final = Path(__file__).resolve().parents[2] / "plugins.toml"
"""`fastllm/plugins.toml` in a wheel; the root of the repository in an editable install, whose `core/` is two levels below."""

_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "run": ("backend", "fallback"),
    "plugins": ("disable", "enable", "in_process"),
    "override": (),
    "priority": (),
    "backend": (),
}
"""Tables and their keys; the last three are keyed by backend name."""


@dataclass(frozen=True)
class Setting:
    """One value and where it was written. layer: packaged | user | --plugins-file."""

    value: Any
    layer: str
    path: Path
    line: int

    @property
    def where(self) -> str:
        """`FILE:LINE`, to be pasted into an editor."""
        return f"{self.path}:{self.line}"


@dataclass(frozen=True)
class PluginsConfig:
    """All layers merged. settings: ("run", "backend") -> Setting; options of a backend are ("backend", NAME, key)."""

    settings: Mapping[tuple[str, ...], Setting]

    def get(self, *key: str) -> Setting | None:
        """The value of a key in the highest layer that has it."""
        return self.settings.get(key)

    def below(self, *prefix: str) -> dict[str, Setting]:
        """Last part of the key -> Setting, for every key directly below a table."""
        return {k[-1]: s for k, s in self.settings.items() if k[:-1] == prefix}


def close_matches(name: str, known: list[str] | tuple[str, ...]) -> str:
    """"did you mean 'x'? known: …", the same wording for every unknown name."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(repr(n) for n in near)}? " if near else ""
    return f"{hint}known: {', '.join(known) if known else 'none'}"


def user_file(env: Mapping[str, str]) -> Path:
    """The user's plugins.toml, which need not exist: in the folder `$FASTLLM_CONFIG`, else in the platform's configuration
    folder. Raises ConfigError if `FASTLLM_CONFIG` is set to something that is not a folder."""
    if given := env.get("FASTLLM_CONFIG"):
        folder = Path(os.path.expanduser(given))
        if not folder.is_dir():
            raise ConfigError(
                f"FASTLLM_CONFIG={given} is not a folder",
                who="environment variable FASTLLM_CONFIG",
                fix=f'mkdir -p "{folder}"  |  unset FASTLLM_CONFIG',
            )
        return folder / "plugins.toml"
    base = env.get("APPDATA") if sys.platform == "win32" else env.get("XDG_CONFIG_HOME")
    root = Path(base) if base else Path(env.get("HOME") or os.path.expanduser("~")) / ".config"
    return root / "fastllm" / "plugins.toml"


def load_config(env: Mapping[str, str], plugins_file: str | os.PathLike[str] | None = None) -> PluginsConfig:
    """Reads and checks every layer. Raises ConfigError with file, line and close matches."""
    layers = [("packaged", PACKAGED_FILE)]
    if (user := user_file(env)).is_file():
        layers.append(("user", user))
    if plugins_file is not None:
        layers.append(("--plugins-file", Path(os.path.expanduser(plugins_file))))
    merged: dict[tuple[str, ...], Setting] = {}
    for layer, path in layers:
        settings = _read_layer(layer, path)
        for mine, other in (("enable", "disable"), ("disable", "enable")):
            if ("plugins", mine) in settings:  # one filter per file: the higher layer's replaces the other kind too
                merged.pop(("plugins", other), None)
        merged.update(settings)
    return PluginsConfig(merged)


def _read_layer(layer: str, path: Path) -> dict[tuple[str, ...], Setting]:
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as exc:
        fix = "reinstall fastllm-engine" if layer == "packaged" else "name an existing file"
        raise ConfigError(f"cannot read {path}: {exc.strerror or exc}", who=f"{layer} plugins.toml", fix=fix) from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path} is not UTF-8: byte {exc.start}", who=str(path), fix="save the file as UTF-8") from exc
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as exc:
        found = re.search(r"at line (\d+)", str(exc))
        where = f"{path}:{found[1]}" if found else str(path)
        raise ConfigError(f"{path.name} is not valid TOML: {exc}", who=where, fix="see https://toml.io for the syntax") from exc
    reader = _Layer(layer, path, text)
    reader.check(document)
    return reader.settings


class _Layer:
    """Checks one file against the known keys and collects its values."""

    def __init__(self, layer: str, path: Path, text: str):
        self.layer, self.path, self.text = layer, path, text
        self.settings: dict[tuple[str, ...], Setting] = {}

    def check(self, document: dict[str, Any]) -> None:
        for table, content in document.items():
            if table not in _KEYS:
                self._fail((table,), f"unknown table [{table}]", close_matches(table, tuple(_KEYS)))
            if not isinstance(content, dict):
                self._fail((table,), f"{table} is {_kind(content)}; it must be a table", f"write it as [{table}]")
            for key, value in content.items():
                self._check_key(table, key, value)
        if {("plugins", "enable"), ("plugins", "disable")} <= self.settings.keys():
            self._fail(("plugins", "enable"), "[plugins] has both enable and disable", "keep one of the two")

    def _check_key(self, table: str, key: str, value: Any) -> None:
        path = (table, key)
        if known := _KEYS[table]:
            if key not in known:
                self._fail(path, f"unknown key '{key}' in [{table}]", close_matches(key, known))
        elif not NAME_PATTERN.fullmatch(key):
            self._fail(path, f"'{key}' in [{table}] is not a backend name", "names match [a-z][a-z0-9_]{1,31}")
        if table == "backend":
            if not isinstance(value, dict):
                self._fail(path, f"backend.{key} is {_kind(value)}; it must be a table", f"write it as [backend.{key}]")
            for option, setting in value.items():
                self._keep((*path, option), setting)
            return
        if table == "plugins":
            if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
                self._fail(path, f"plugins.{key} must be a list of backend names", f'write {key} = ["NAME"]')
        elif table == "priority":
            if type(value) is not int or value > 100:
                self._fail(path, f"priority.{key} = {value!r} is not an integer up to 100", "use 0…100, or -1 for never by auto")
        elif not isinstance(value, str):
            self._fail(path, f"{table}.{key} is {_kind(value)}; it must be a string", f'write {key} = "…"')
        if path == ("run", "fallback") and value not in FALLBACK_POLICIES:
            self._fail(path, f"run.fallback = '{value}' is not a policy", close_matches(value, FALLBACK_POLICIES))
        self._keep(path, value)

    def _keep(self, key: tuple[str, ...], value: Any) -> None:
        self.settings[key] = Setting(value, self.layer, self.path, _line_of(self.text, key))

    def _fail(self, key: tuple[str, ...], message: str, fix: str) -> None:
        line = _line_of(self.text, key)
        raise ConfigError(f"{self.path.name}: {message}", who=f"{self.path}:{line}", fix=fix, file=str(self.path), line=line)


def _kind(value: Any) -> str:
    return {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list", dict: "a table"}.get(
        type(value), "a date or time"
    )


def _line_of(text: str, key: tuple[str, ...]) -> int:
    """The line that sets a key, 1-based; the header of its table if it is set in a way this search does not know (tomllib keeps
    no positions)."""
    table: tuple[str, ...] = ()
    best = 1
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+([^\]]+)\]+", line):
            table = _parts(header[1])
            if key[: len(table)] == table:
                best = number
        elif assignment := re.match(r"\s*([^=#]+?)\s*=", line):
            path = table + _parts(assignment[1])
            if key[: len(path)] == path:
                return number
    return best


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))
