"""What users see of a plug-in: errors with an owner and a fix, states, and the parsing of a backend's options.

Called by the loader and the registry; the command line prints what is made here and adds nothing.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from ..backend import BackendSpec, DeviceInfo, Option
from ..errors import (
    BackendBroken,
    BackendDisabled,
    BackendIncompatible,
    BackendUnavailable,
    ConfigError,
    FastLLMError,
    UsageError,
)
from .config import NAME_PATTERN, PluginsConfig, close_matches
from .discovery import DISTRIBUTION, Candidate, Source

__all__ = ["BackendState", "blamed", "broken", "config_options", "describe", "given_options", "one_line", "state_name", "upgrade"]


@dataclass(frozen=True)
class BackendState:
    """One line of `backends list`. state: ready | unavailable | broken | disabled | incompatible, or `unprobed` where nobody
    asked. priority: None if the plug-in could not say; priority_from names who set it. import_s, probe_s: seconds, 0 if not done.
    spec: None unless it was loaded and is valid. error: what naming this backend would raise."""

    name: str
    state: str
    reason: str = ""
    hint: str = ""
    distribution: str = ""
    version: str = ""
    module: str = ""
    entry_point: str = ""
    api: tuple[int, int] | None = None
    opset: int | None = None
    priority: int | None = None
    priority_from: str = ""
    devices: tuple[DeviceInfo, ...] = ()
    import_s: float = 0.0
    probe_s: float = 0.0
    spec: BackendSpec | None = None
    error: FastLLMError | None = None

    @property
    def exit_code(self) -> int:
        """What `doctor NAME` exits with."""
        return self.error.exit_code if self.error else 0

    def as_dict(self) -> dict[str, Any]:
        """The same for `--json`: api as "MAJOR.MINOR", the spec's texts and options, the exit code, and the error as its code,
        message, who, why, fix and exit code."""
        body = {k: getattr(self, k) for k in self.__dataclass_fields__ if k != "spec"}
        body |= {key: getattr(self.spec, key, "") for key in ("vendor", "summary", "homepage")}
        body["options"] = {
            key: {"type": o.type.__name__, "default": o.default, "choices": list(o.choices), "help": o.help}
            for key, o in (self.spec.options.items() if self.spec else ())
        }
        body["exit_code"] = self.exit_code
        body["api"] = ".".join(map(str, self.api)) if self.api else None
        body["devices"] = [asdict(device) for device in self.devices]
        body["error"] = self.error.as_dict()["error"] if self.error else None
        return body


def state_name(error: FastLLMError) -> str:
    """The state that an error stands for."""
    kinds = ((BackendIncompatible, "incompatible"), (BackendDisabled, "disabled"), (BackendUnavailable, "unavailable"))
    return next((name for kind, name in kinds if isinstance(error, kind)), "broken")


def one_line(error: BaseException) -> str:
    """`Type: message` on one line, at most 300 characters; survives an exception whose text cannot be made."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "(its message cannot be read)"
    text = text if len(text) <= 300 else text[:297] + "…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def broken(candidate: Candidate, doing: str, why: str | BaseException) -> BackendBroken:
    """The error of a plug-in that fails. doing: load, probe, open …; why: an exception (its innermost frame in the vendor's
    package is named) or a sentence."""
    cause = why if isinstance(why, BaseException) else None
    if cause is None:
        text = str(why)
    else:
        frame = _place(cause, candidate.source)
        text = f"{one_line(cause)}   ({frame})" if frame else one_line(cause)
    return BackendBroken(
        f"{describe(candidate)} failed to {doing}",
        who=candidate.who,
        why=text,
        fix=_fixes(candidate, cause),
        backend=candidate.name,
    )


def blamed(candidate: Candidate, error: BaseException) -> BackendBroken | None:
    """An exception of any kind that ended a command, if code of this plug-in is on its way here."""
    return broken(candidate, "do its work", error) if _vendor_frame(error, candidate.source) else None


def describe(candidate: Candidate) -> str:
    """`backend 'NAME'`, or `plug-in FILE` while a file has not said which backends it has."""
    return f"backend '{candidate.name}'" if candidate.name else f"plug-in {candidate.source.distribution}"


def upgrade(source: Source, reinstall: bool = False) -> str:
    """The command that replaces a plug-in's distribution."""
    if source.file:
        return f"correct {source.distribution}"
    if source.builtin:
        return f"pip install --force-reinstall {DISTRIBUTION}"
    return f'pip install {"--force-reinstall" if reinstall else "--upgrade"} "{source.distribution}"'


def _fixes(candidate: Candidate, cause: BaseException | None) -> str:
    source = candidate.source
    if isinstance(cause, (ImportError, OSError)) and "runtime" in source.extras:
        fixes = [f'pip install "{source.distribution}[runtime]"']
    else:
        fixes = [upgrade(source)]
    if candidate.name and not NAME_PATTERN.fullmatch(candidate.name):  # may hold anything: no command with it can be pasted
        return "  |  ".join([*fixes, f'pip uninstall "{source.distribution}"'])
    if candidate.name and candidate.name != "ref":
        fixes.append(f"skip it: FASTLLM_DISABLE_PLUGINS={candidate.name}")
    if candidate.name:
        fixes.append(f"fastllm doctor {candidate.name}")
    return "  |  ".join(fixes)


def _place(error: BaseException, source: Source) -> str:
    """Where in the vendor's package an error comes from; a syntax error has a place of its own, and perhaps no frame there."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    return _vendor_frame(error, source)


def _vendor_frame(error: BaseException, source: Source) -> str:
    """`package/module.py:LINE` of the innermost frame in the vendor's package, or ""."""
    found = ""
    for frame, line in _frames(error.__traceback__):
        name = frame.f_globals.get("__name__", "")
        if name == source.module or name.startswith(source.package + ".") or name == source.package:
            file = Path(frame.f_code.co_filename)
            folder = name if file.name == "__init__.py" else name.rpartition(".")[0]
            found = "/".join([*filter(None, folder.split(".")), file.name]) + f":{line}"
    return found


def _frames(tb: TracebackType | None) -> list[tuple[FrameType, int]]:
    return list(traceback.walk_tb(tb))


# options ----------------------------------------------------------------------------------------------------------------


def config_options(spec: BackendSpec, config: PluginsConfig) -> dict[str, Any]:
    """Defaults of every option, overlaid with `[backend.NAME]`. Raises ConfigError with file and line."""
    values: dict[str, Any] = {key: option.default for key, option in spec.options.items()}
    for key, setting in config.below("backend", spec.name).items():
        try:
            values[key] = _checked(spec, key, setting.value, f"[backend.{spec.name}] {key}")
        except UsageError as exc:
            raise ConfigError(
                f"{setting.path.name}: {exc.message}", who=setting.where, fix=exc.fix, file=str(setting.path), line=setting.line
            ) from None
    return values


def given_options(spec: BackendSpec, given: Mapping[str, Any], origin: str = "--backend-opt") -> dict[str, Any]:
    """Options as typed by a user (strings are parsed by the option's type). Raises UsageError with close matches."""
    values = {}
    for key, text in given.items():
        value = text
        if isinstance(text, str) and key in spec.options:
            value = _parsed(spec.options[key], text, f"{origin} {key}={text}", spec.name)
        values[key] = _checked(spec, key, value, f"{origin} {key}")
    return values


def _checked(spec: BackendSpec, key: str, value: Any, where: str) -> Any:
    option = spec.options.get(key)
    if option is None:
        raise UsageError(
            f"{where}: backend '{spec.name}' has no option '{key}'", who=f"backend '{spec.name}'", fix=close_matches(key, sorted(spec.options))
        )
    if option.type is float and type(value) is int:
        value = float(value)
    if type(value) is not option.type:
        raise UsageError(f"{where} = {value!r}: must be {option.type.__name__}", who=f"backend '{spec.name}'", fix=_usage(key, option))
    if option.choices and value not in option.choices:
        raise UsageError(f"{where} = {value!r} is not offered", who=f"backend '{spec.name}'", fix=_usage(key, option))
    return value


def _parsed(option: Option, text: str, where: str, backend: str) -> Any:
    try:
        if option.type is bool:
            return {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}[text.lower()]
        value = option.type(text)
        if option.type is float and not math.isfinite(value):
            raise ValueError(text)
        return value
    except (KeyError, ValueError):
        raise UsageError(f"{where}: must be {option.type.__name__}", who=f"backend '{backend}'", fix=_usage("KEY", option)) from None


def _usage(key: str, option: Option) -> str:
    if option.choices:
        return f"one of {', '.join(map(str, option.choices))}; default {option.default}"
    return f"{key} is {option.help or option.type.__name__}; default {option.default}"
