"""Loads one plug-in module behind a guard, and calls its hooks.

Every plug-in has a pluggy manager to itself. In a shared one, an exception ends the call for all, a wrapper rewrites another
vendor's answer, and what stays behind after a failed registration depends on pluggy's version; here, a plug-in that fails is
dropped with its manager. What it raises becomes a BackendBroken with an owner; only `KeyboardInterrupt` passes. A crash
cannot be contained here: see `contained`. Called by the registry.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import operator
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pluggy

from ..backend import API_VERSION, BackendSpec, DeviceInfo, Option, Ready, Unavailable
from ..errors import BackendIncompatible, BackendUnavailable, FastLLMError
from ..graph import Graph
from .config import NAME_PATTERN
from .discovery import DISTRIBUTION, Candidate, Source
from .hookspecs import MANDATORY, PREFIX, PROJECT, BackendHooks, FrozenHooks, check_api, hook_names, is_version
from .put_back import put_back
from .report import broken, describe, upgrade

__all__ = ["STRANGERS", "Guard", "Plugin", "check_environment", "check_graph", "check_probe", "check_spec", "file_source", "load_plugin"]

DEVICE_KINDS = ("device", "cpu", "emulated")

_OPTION_TYPES: Final = (int, float, bool, str)

STRANGERS: Final[dict[Source, Candidate]] = {}
"""Plug-ins that did not come with fastllm and were imported in this process: module and who ships it -> a backend of theirs. A fact of the process, as `sys.modules`
is: an error that nobody understands is theirs if it comes from their code, else names them, and the end of a command does not wait for their threads."""


@dataclass(frozen=True)
class Guard:
    """How failures of vendors' code are handled. reraise: as they are, with traceback, for plug-in authors
    (`FASTLLM_STRICT_PLUGINS=1`); trace: every hook call is printed to stderr (`FASTLLM_TRACE_HOOKS=1`)."""

    reraise: bool = False
    trace: bool = False

    @contextmanager
    def __call__(self, candidate: Candidate, doing: str, passes: type[FastLLMError] | None = None) -> Iterator[None]:
        """Turns what goes wrong inside into BackendBroken, and puts back what a stranger changes of the process. passes: errors that the hook may raise on
        purpose."""
        try:
            with nullcontext() if candidate.source.builtin else put_back():
                yield
        except KeyboardInterrupt:
            raise
        except BaseException as exc:
            if passes is not None and isinstance(exc, passes):
                exc.who = exc.who or candidate.who
                raise
            if not self.reraise:
                raise broken(candidate, doing, exc) from exc
            if not isinstance(exc, Exception):  # would pass every other guard, and end the program
                what = f"called sys.exit({exc.code!r})" if isinstance(exc, SystemExit) else f"raised {type(exc).__name__}"
                raise RuntimeError(f"{describe(candidate)} {what} in {doing}") from exc
            raise


class Plugin:
    """A loaded module. specs: backend name -> BackendSpec, unchecked beyond its type. compatible: whether its hooks may be called."""

    def __init__(self, source: Source, module: ModuleType, manager: pluggy.PluginManager, guard: Guard):
        self.source, self.module, self.compatible, self.import_s = source, module, False, 0.0
        self.specs: dict[str, BackendSpec] = {}
        self._manager, self._guard = manager, guard

    def has(self, hook: str) -> bool:
        """Whether the plug-in implements an optional hook."""
        return bool(getattr(self._manager.hook, hook).get_hookimpls())

    def call(self, candidate: Candidate, hook: str, passes: type[FastLLMError] | None = None, **arguments: Any) -> Any:
        """The plug-in's answer. Raises BackendBroken, or `passes` as the plug-in raised it."""
        doing = hook.removeprefix(PREFIX).removesuffix("_backend").replace("_", " ")
        with self._guard(candidate, doing if doing in ("probe", "open") else f"answer {hook}", passes):
            return getattr(self._manager.hook, hook)(**arguments)


def load_plugin(candidate: Candidate, guard: Guard) -> Plugin:
    """Imports and registers a candidate's module. Raises BackendBroken or, if every backend in it speaks another version of the
    interface, leaves `compatible` False."""
    source = candidate.source
    started = time.perf_counter()
    if not source.builtin:
        STRANGERS[source] = candidate
    with guard(candidate, "load"):
        module = _import(source)
    manager = pluggy.PluginManager(PROJECT)
    if guard.trace:
        manager.trace.root.setwriter(sys.stderr.write)
        manager.enable_tracing()
    manager.add_hookspecs(FrozenHooks)
    plugin = Plugin(source, module, manager, guard)
    _check_unmarked(candidate, manager, module)
    with guard(candidate, "load"):
        manager.register(module, name=source.module)
    _check_signatures(candidate, manager, module)
    if not plugin.has("fastllm_backends"):
        raise broken(candidate, "load", f"{source.module} has no hook fastllm_backends marked with fastllm.api.hookimpl")
    plugin.specs = _specs(candidate, plugin)
    if any(_speaks_ours(spec) for spec in plugin.specs.values()):
        _add_hooks(candidate, manager, guard)
        plugin.compatible = True
    plugin.import_s = time.perf_counter() - started
    return plugin


def _import(source: Source) -> ModuleType:
    if source.file is None:
        return importlib.import_module(source.module)
    spec = importlib.util.spec_from_file_location(source.module, source.file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{source.file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[source.module] = module  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[source.module]
        raise
    return module


def file_source(path: Path) -> Source:
    """The source of `--plugin PATH`. Its module name holds a hash, so that two files of one name do not collide."""
    file = Path(os.path.expanduser(path)).resolve()
    digest = sha256(os.fsencode(file)).hexdigest()[:8]
    stem = re.sub(r"\W", "_", file.stem)
    return Source(f"fastllm_plugin_{stem}_{digest}", str(path), file=file)


def _implementations(manager: pluggy.PluginManager, module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Hook name and function of everything the module registered."""
    for caller in manager.get_hookcallers(module) or ():
        for implementation in caller.get_hookimpls():
            yield caller.name, implementation.function


def _check_unmarked(candidate: Candidate, manager: pluggy.PluginManager, module: ModuleType) -> None:
    """A hook without its mark would be ignored in silence."""
    for name, value in vars(module).items():
        unmarked = name in hook_names() and inspect.isfunction(value) and manager.parse_hookimpl_opts(module, name) is None
        if unmarked:
            raise broken(candidate, "load", f"{candidate.source.module}.{name} is not marked with fastllm.api.hookimpl")


def _check_signatures(candidate: Candidate, manager: pluggy.PluginManager, module: ModuleType) -> None:
    for name, function in _implementations(manager, module):
        for parameter in inspect.signature(function).parameters.values():
            if parameter.default is not parameter.empty:
                why = f"{name}: argument '{parameter.name}' has a default; hook arguments have none (leave it out if unused)"
                raise broken(candidate, "load", why)
            if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
                why = f"{name}: argument '{parameter.name}' is {parameter.kind.description}; hook arguments are plain names"
                raise broken(candidate, "load", why)


def _add_hooks(candidate: Candidate, manager: pluggy.PluginManager, guard: Guard) -> None:
    """Adds the remaining hooks to a manager whose plug-in is registered, which checks their arguments, then finds misspelt ones."""
    try:
        manager.add_hookspecs(BackendHooks)
        manager.check_pending()
    except pluggy.PluginValidationError as exc:
        if guard.reraise:
            raise
        raise broken(candidate, "load", _validation(candidate, manager, exc)) from exc
    missing = [hook for hook in MANDATORY if not getattr(manager.hook, hook).get_hookimpls()]
    if missing:
        raise broken(candidate, "load", f"{candidate.source.module} lacks the hook {', '.join(missing)}")


def _validation(candidate: Candidate, manager: pluggy.PluginManager, error: Exception) -> str:
    """pluggy's complaint in one sentence, without the representation of a module."""
    known = hook_names()
    for name in vars(manager.hook):
        if not name.startswith("_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"hooks: {', '.join(known)}"
            return f"{candidate.source.module} has a hook '{name}' that does not exist; {hint}"
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{candidate.source.module}: {' '.join(lines[1:] or lines)}"


def _specs(candidate: Candidate, plugin: Plugin) -> dict[str, BackendSpec]:
    answer = plugin.call(candidate, "fastllm_backends")
    if not isinstance(answer, (list, tuple)) or not answer or not all(isinstance(spec, BackendSpec) for spec in answer):
        kinds = ", ".join(sorted({type(spec).__name__ for spec in answer})) if isinstance(answer, (list, tuple)) else ""
        found = f"{type(answer).__name__} of {kinds or 'nothing'}" if isinstance(answer, (list, tuple)) else type(answer).__name__
        raise broken(candidate, "load", f"fastllm_backends() returned {found}; it must return a list of BackendSpec")
    names = [spec.name for spec in answer]
    for name in names:
        if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name) or names.count(name) > 1:
            raise broken(candidate, "load", f"fastllm_backends() names {name!r}; names are unique and match [a-z][a-z0-9_]{{1,31}}")
    return {spec.name: spec for spec in answer}


def _speaks_ours(spec: BackendSpec) -> bool:
    return is_version(spec.api_version) and not check_api(spec.api_version)


def check_spec(candidate: Candidate, spec: BackendSpec) -> None:
    """Checks one backend of a loaded module: the version first, as the meaning of all else depends on it. Raises
    BackendIncompatible or BackendBroken."""
    if not is_version(spec.api_version):
        raise broken(candidate, "load", f"BackendSpec.api_version is {spec.api_version!r}; it must be (major, minor)")
    if side := check_api(spec.api_version):
        raise _incompatible(candidate, spec, side)
    problems = [
        (type(spec.opset) is not int or spec.opset < 1, f"opset is {spec.opset!r}; it must be an integer from 1"),
        (type(spec.priority) is not int or spec.priority > 100, f"priority is {spec.priority!r}; it must be an integer up to 100"),
        (not hasattr(spec.options, "items"), f"options is {type(spec.options).__name__}; it must map keys to Option"),
    ]
    for wrong, why in problems:
        if wrong:
            raise broken(candidate, "load", f"BackendSpec.{why}")
    try:
        options = list(spec.options.items())
    except Exception as exc:
        raise broken(candidate, "load", exc) from exc
    for key, option in options:
        valid = isinstance(key, str) and isinstance(option, Option) and option.type in _OPTION_TYPES and isinstance(option.choices, (tuple, list))
        if not valid:
            raise broken(candidate, "load", f"BackendSpec.options[{key!r:.80}] must be an Option of type int, float, bool or str, with a tuple of choices")
        for what, value in (("default", option.default), *(("choice", c) for c in option.choices)):
            if not _is_of(option, value) and not (what == "default" and value is None):
                why = f"BackendSpec.options[{key!r:.80}] is an Option of type {option.type.__name__}, and its {what} {value!r:.80} is {type(value).__name__}"
                raise broken(candidate, "load", why)


def _is_of(option: Option, value: Any) -> bool:
    """Whether a value is of the option's type, as a value in plugins.toml must be: an integer will do for float, and True is no integer."""
    return type(value) is option.type or (option.type is float and type(value) is int)


def _incompatible(candidate: Candidate, spec: BackendSpec, side: str) -> BackendIncompatible:
    theirs, ours = (".".join(map(str, version)) for version in (spec.api_version, API_VERSION))
    command = f"pip install --upgrade {DISTRIBUTION}" if side == "host" else upgrade(candidate.source)
    return BackendIncompatible(
        f"{describe(candidate)} is written for operator interface {theirs}; this fastllm has {ours}",
        who=candidate.who,
        why=f"{'fastllm' if side == 'host' else candidate.source.distribution} is the older side: interface {theirs} against {ours}",
        fix=command,
        backend=candidate.name,
        api=theirs,
        host_api=ours,
    )


def check_probe(candidate: Candidate, answer: Any) -> Ready:
    """The devices of a probe. Raises BackendUnavailable for Unavailable, BackendBroken for anything else that is not Ready with
    at least one device."""
    if isinstance(answer, Unavailable):
        if not isinstance(answer.reason, str) or not isinstance(answer.hint, str):
            raise broken(candidate, "probe", f"Unavailable.reason and .hint must be strings, not {type(answer.reason).__name__} and {type(answer.hint).__name__}")
        raise BackendUnavailable(
            f"{describe(candidate)} cannot be used on this machine",
            who=candidate.who,
            why=answer.reason,
            fix=answer.hint or f"fastllm doctor {candidate.name}",
            backend=candidate.name,
        )
    if not isinstance(answer, Ready):
        raise broken(candidate, "probe", f"fastllm_probe() returned {type(answer).__name__}; it must return Ready or Unavailable")
    devices = answer.devices
    if not isinstance(devices, (tuple, list)) or not devices or not all(isinstance(d, DeviceInfo) for d in devices):
        raise broken(candidate, "probe", "Ready.devices must be a tuple of at least one DeviceInfo")
    ids = [device.id for device in devices]
    if not all(isinstance(i, str) and i for i in ids) or len(set(ids)) < len(ids):
        raise broken(candidate, "probe", f"device ids are {ids!r}; they must be different non-empty strings")
    for device in devices:
        if device.kind not in DEVICE_KINDS:
            raise broken(candidate, "probe", f"device '{device.id}' is of kind {device.kind!r}; it must be one of {', '.join(DEVICE_KINDS)}")
        if not isinstance(device.name, str) or not isinstance(device.detail, str):
            raise broken(candidate, "probe", f"name and detail of device '{device.id}' must be strings")
        if not hasattr(device.memory_bytes, "__index__"):
            raise broken(candidate, "probe", f"memory_bytes of device '{device.id}' is {device.memory_bytes!r:.80}; it must be an integer")
    return Ready(tuple(replace(device, memory_bytes=operator.index(device.memory_bytes)) for device in devices))  # numpy's integers are no JSON


def check_environment(candidate: Candidate, answer: Any) -> dict[str, str]:
    """The versions that a plug-in gave; {} for None. Raises BackendBroken."""
    if answer is not None and not (isinstance(answer, dict) and all(isinstance(t, str) for kv in answer.items() for t in kv)):
        raise broken(candidate, "answer fastllm_environment", f"{answer!r:.80} is not a dict of strings")
    return answer or {}


def check_graph(candidate: Candidate, graph: Graph, answer: Any) -> Graph:
    """The graph that a plug-in made of `graph`, verified again. Raises BackendBroken."""
    if not isinstance(answer, Graph):
        raise broken(candidate, "rewrite the graph", f"fastllm_transform_graph() returned {type(answer).__name__}, not a Graph")
    try:
        answer.verify()
    except Exception as exc:  # a graph that refers to nothing fails in more ways than a wrong shape
        raise broken(candidate, "rewrite the graph", exc) from exc
    if answer.outputs != graph.outputs:
        raise broken(candidate, "rewrite the graph", f"it gives {', '.join(answer.outputs) or 'nothing'} instead of {', '.join(graph.outputs)}")
    return answer
