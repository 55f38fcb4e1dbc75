"""Which backends there are, what state they are in, and which one a run gets.

Named (flag, variable, file) means loud: what cannot be had raises, and no other backend takes its place (but which names a file of
`--plugin` has is not known if it does not load: a backend that is here under such a name runs, with a line about the file). `auto` means quarantine:
what fails is skipped, and said if it would have been chosen. One registry per engine or command; nothing is global. Plug-ins are
imported when their name is asked for, so that a child process, or a command that needs no backend, pays for nothing.

A plug-in is asked in a child process, with a limit of time: its module is imported here when it is opened, not before. Exempt are those
of `[plugins] in_process`: the file that comes with fastllm names the built-in ones whose module and probe load no driver.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..backend import Backend, BackendSpec
from ..errors import BackendBroken, BackendNotFound, BackendUnavailable, FastLLMError, UsageError, told
from ..graph import Graph
from .asking import Asker
from .child import ASK_S
from .config import PluginsConfig, close_matches, load_config
from .contained import NAMED_S, Contained
from .discovery import DISTRIBUTION, Candidate, discover
from .entries import BASE, Entry, collect
from .hookspecs import is_version
from .loader import Guard, check_environment, check_graph, file_source
from .report import BackendState, broken, config_options, given_options, state_name

__all__ = ["BackendRegistry", "Selection"]

PROBE_S: Final = 1.0  # what a probe may take


@dataclass(frozen=True)
class Selection:
    """The backend and device a run gets. origin: who chose it (--backend, FASTLLM_BACKEND, FILE:LINE or auto)."""

    name: str
    device: str
    spec: BackendSpec
    origin: str

    def __str__(self) -> str:
        return f"{self.name}:{self.device}"


class BackendRegistry:
    """Finds, chooses and opens backends.

    plugins_file: the highest layer of plugins.toml (`--plugins-file`). plugin_paths: files of `--plugin`, asked for their names at once. env: the
    environment variables to obey. strict: `auto` may skip nothing. messages: lines for stderr, without a prefix, which the caller prints.
    remarks: those of them by which nothing is done differently from what was asked: how long somebody took, and faults that are for another
    package's author to mend. failed: the errors of files of `--plugin` that do not load: who names a backend that is here goes on without them,
    with a line. waiting: gets a line at once while somebody in a child process takes long to answer.

    Raises ConfigError for a wrong plugins.toml, and UsageError for a `--plugin` that is no file.
    """

    def __init__(
        self,
        plugins_file: str | os.PathLike[str] | None = None,
        plugin_paths: Sequence[str | os.PathLike[str]] = (),
        env: Mapping[str, str] = os.environ,
        strict: bool = False,
        waiting: Callable[[str], None] | None = None,
    ):
        self.messages, self.remarks = list[str](), set[str]()
        self.config: PluginsConfig = load_config(env, plugins_file)
        self._env, self._strict = env, strict
        guard = Guard(reraise=_flag(env, "FASTLLM_STRICT_PLUGINS"), trace=_flag(env, "FASTLLM_TRACE_HOOKS"))
        children = None if guard.reraise or guard.trace else self._in_process  # authors want to see their own traceback, and the calls
        self._contained = Contained(children, plugins_file, env, self._remark, waiting)
        self._entries, self.failed = dict[str, Entry](), list[BackendBroken]()
        self._ask = Asker(self._entries, self._contained, guard, self._remark)
        candidates = discover(self._remark)
        for path in plugin_paths:
            try:
                candidates += self._load_file(Path(path))
            except BackendBroken as error:
                if guard.reraise:
                    raise
                self.failed.append(error)
                self._say(told(error, "and nothing of it is used"))
        self._entries |= collect(candidates, self.config, env, self._say, self._remark)
        if not any(c.source.builtin for c in candidates):
            self._say(
                f"the built-in backends are not known: {DISTRIBUTION} is not installed, only its source tree is "
                f'on the path; run "pip install -e ." in it (entry points are read from installed metadata)'
            )

    # what there is ------------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Every known backend name, sorted; also disabled and broken ones. Imports nothing."""
        return sorted(self._entries)

    def check_name(self, name: str) -> None:
        """Raises BackendNotFound with close matches. Imports nothing."""
        self._entry(name)

    def states(self, probe: bool = True) -> list[BackendState]:
        """The state of every backend, by priority, then name; unknown priorities last. Loads every enabled plug-in; with probe,
        asks each for its devices."""
        self._contained.ask(self._contained.open_questions(self._entries.values()), ASK_S, *([] if probe else ["--load"]))
        states = [self.state(name, probe) for name in self._entries]
        return sorted(states, key=lambda s: (s.priority is None, -(s.priority or 0), s.name))

    def state(self, name: str, probe: bool = True) -> BackendState:
        """The state of one backend. Raises BackendNotFound."""
        entry = self._entry(name)
        error: FastLLMError | None = None
        devices: tuple[Any, ...] = ()
        try:
            if probe:
                devices = self._ask.probe(entry).devices
            else:
                self._ask.load(entry)
        except FastLLMError as exc:
            error = exc
        spec = entry.loaded if isinstance(entry.loaded, BackendSpec) else None
        known = spec or (entry.plugin.specs.get(name) if entry.plugin else None)
        api = known.api_version if known and is_version(known.api_version) else entry.api
        source, (priority, priority_from) = entry.candidate.source, self._priority(entry)
        return BackendState(
            name=name,
            state=state_name(error) if error else "ready" if probe else "unprobed",
            reason=(error.why or error.message) if error else "",
            hint=error.fix if error else "",
            distribution=source.distribution,
            version=source.version,
            module=source.module,
            entry_point=entry.candidate.entry_point,
            api=api,
            opset=spec.opset if spec else None,
            priority=priority,
            priority_from=priority_from,
            devices=devices,
            import_s=entry.plugin.import_s if entry.plugin else entry.import_s,
            probe_s=entry.probe_s,
            spec=spec,
            error=error,
        )

    @property
    def fallback(self) -> str:
        """What happens when an op leaves its device: error | warn | allow (`[run] fallback`; strict means error)."""
        setting = self.config.get("run", "fallback")
        return "error" if self._strict else setting.value if setting else "warn"

    # which one a run gets -----------------------------------------------------------------------------------------------

    def select(self, name: str | None = None, origin: str = "--backend") -> Selection:
        """Chooses a backend: `name` (NAME, NAME:DEVICE or auto; the flag) > FASTLLM_BACKEND > plugins.toml > auto. origin: who gave the name.

        Raises BackendNotFound, BackendDisabled, BackendBroken, BackendIncompatible or BackendUnavailable for a named one, and
        UsageError for a device that the backend does not have. `auto` raises the error of a file of `--plugin` that does not load:
        who gave it asked for what is in it.
        """
        if name is not None and not name.strip():  # a script's variable that is not set must not mean the default
            raise UsageError("the name of the backend is empty", who=origin, fix="leave it out, or name one: " + ", ".join(self.names()))
        requested, origin = self._requested(name, origin)
        backend, separator, device = requested.partition(":")
        if backend == "auto":
            if separator:
                raise UsageError(f"auto takes no device: '{requested}'", who=origin, fix="name the backend: NAME:DEVICE")
            if self.failed:
                raise self.failed[0].with_traceback(None)
            return self._auto()
        entry = self._entry(backend, origin)
        ids = [d.id for d in self._ask.probe(entry).devices]
        spec = self._ask.load(entry)
        if separator and device not in ids:
            raise UsageError(f"backend '{backend}' has no device '{device}'", who=origin, fix=close_matches(device, ids))
        return Selection(backend, device or ids[0], spec, origin)

    def open(self, selection: Selection | str | None = None, options: Mapping[str, Any] | None = None) -> Backend:
        """Opens a device. selection: of `select`, or what `select` takes. options: `--backend-opt` pairs, over `[backend.NAME]`.

        Raises UsageError or ConfigError for an option, BackendBroken if the plug-in fails, and what the plug-in raises on purpose
        (BackendUnavailable, OutOfMemory, UnsupportedError).
        """
        chosen = selection if isinstance(selection, Selection) else self.select(selection)
        entry = self._entry(chosen.name)
        spec = self._ask.load_here(entry)
        values = {**config_options(spec, self.config), **given_options(spec, options or {})}
        backend = self._ask.call(entry, "fastllm_open_backend", FastLLMError, name=chosen.name, device=chosen.device, options=values)
        if not isinstance(backend, Backend):
            raise broken(entry.candidate, "open", f"fastllm_open_backend() returned {type(backend).__name__}; it must return a Backend")
        return backend

    def in_child(self, name: str) -> bool:
        """Whether this backend is asked in child processes so far: it is not opened, and not on the list of those that are asked here."""
        return self._contained.holds(self._entry(name))

    def attempt(self, name: str, module: str, arguments: list[str], timeout_s: float, without: str = "") -> dict[str, Any]:
        """Runs `python -m MODULE` with the arguments that find the same plug-ins, and these; its answer. without: what a user writes who does not want that,
        for the line about a child that takes long. Raises BackendBroken, whose field `outcome` is `crashed` or `hung`."""
        return self._contained.attempt(self._entry(name), module, arguments, timeout_s, without)

    def set_aside(self, name: str, error: FastLLMError) -> None:
        """From now on this backend is what `error` says: it gave wrong answers when it was opened."""
        self._entry(name).loaded = error

    # other hooks --------------------------------------------------------------------------------------------------------

    def environment(self, name: str) -> dict[str, str]:
        """Driver, firmware and library versions; {} if the plug-in does not say. Raises as `select` does for a name, and BackendBroken where only this
        question fails: the backend is what it is all the same."""
        entry = self._entry(name)
        if self._contained.holds(entry) and entry.environment is None:
            self._contained.ask([entry], NAMED_S, "--environment")
            self._ask.probe(entry)
        if isinstance(entry.environment, FastLLMError):
            raise entry.environment.with_traceback(None)
        if entry.environment is not None and (entry.plugin is None or entry.untold):
            return entry.environment
        return check_environment(entry.candidate, self._ask.optional(entry, "fastllm_environment", name=name))

    def environment_or_fault(self, name: str) -> tuple[dict[str, str], str]:
        """The same of a backend that is ready, for those who do not depend on it: ({}, what is wrong) where only this question fails."""
        try:
            return self.environment(name), ""
        except BackendBroken as error:
            return {}, f"{error.message}: {error.why}"

    def leave_environment(self, name: str) -> None:
        """Never asks this backend for its environment here: it failed in a child."""
        entry = self._entry(name)
        entry.environment, entry.untold = {}, True

    def rehearse(self, name: str, *hooks: str) -> None:
        """Calls optional hooks in a child process first, where the backend is not trusted: what crashes or hangs there is not called here. Raises BackendBroken."""
        entry = self._entry(name)
        if self._contained.holds(entry):
            self._ask.load(entry)
            self._contained.rehearse(entry, hooks)

    def transforms(self, name: str) -> bool:
        """Whether the plug-in, which is loaded here, rewrites graphs."""
        entry = self._entry(name)
        return entry.plugin is not None and entry.plugin.has("fastllm_transform_graph")

    def transform_graph(self, graph: Graph, target: Selection) -> Graph:
        """The graph as the target's plug-in rewrites it, verified again; the same graph if it does not."""
        answer = self._ask.optional(self._entry(target.name), "fastllm_transform_graph", graph=graph, target=target)
        return graph if answer is None else check_graph(self._entry(target.name).candidate, graph, answer)

    def requirements(self, name: str) -> Any:
        """What the plug-in tells the conformance suite, or None."""
        return self.call_optional(name, "fastllm_requirements")

    def conformance_cases(self, name: str) -> list[Any]:
        """The vendor's own conformance cases."""
        answer = self.call_optional(name, "fastllm_conformance_cases")
        if answer is not None and not isinstance(answer, (list, tuple)):
            raise broken(self._entry(name).candidate, "answer fastllm_conformance_cases", f"{type(answer).__name__} is not a list")
        return list(answer or ())

    def fault(self, name: str, doing: str, why: str) -> BackendBroken:
        """The error of a plug-in whose answer a caller cannot use. doing: "answer fastllm_…"."""
        return broken(self._entry(name).candidate, doing, why)

    def call_optional(self, name: str, hook: str) -> Any:
        """The answer of a hook that takes the name alone, as it is; None if the plug-in has none. Raises BackendBroken."""
        return self._ask.optional(self._entry(name), hook, name=name)

    # files, loading and probing -----------------------------------------------------------------------------------------

    def files_of(self, name: str) -> tuple[str, ...]:
        """The files of `--plugin` that this backend comes from, as they were given. Raises BackendNotFound."""
        return self._entry(name).files

    def _load_file(self, path: Path) -> list[Candidate]:
        source = file_source(path)
        if source.file is None or not source.file.is_file():
            raise UsageError(f"--plugin {path}: there is no such file", who="--plugin", fix="name a Python file")
        if self._contained.on:
            return [Candidate(name, source) for name in self._contained.names_in(path, source)]
        return [Candidate(name, source) for name in self._ask.plugin(Candidate("", source)).specs]

    def from_files(self) -> list[str]:
        """The backends that files of `--plugin` have."""
        return [c.name for e in self._entries.values() for c in e.candidates if c.source.file]

    def _entry(self, name: str, origin: str = "") -> Entry:
        entry = self._entries.get(name)
        if entry is not None:
            return entry
        if self.failed:
            error = self.failed[0]
            raise BackendBroken(f"no backend is called '{name}', and {error.message}", who=error.who, why=error.why, fix=error.fix, **error.fields)
        raise BackendNotFound(
            f"no backend is called '{name}'",
            who=origin,
            why="" if BASE in self._entries else f"{DISTRIBUTION} is not installed, only its source tree is on the path",
            fix=close_matches(name, self.names()) if BASE in self._entries else 'run "pip install -e ." in the source tree',
            backend=name,
        )

    def _in_process(self, entry: Entry) -> bool:
        """Whether `[plugins] in_process` lists it. The list that comes with fastllm vouches for what comes with fastllm, not for another of its name."""
        setting = self.config.get("plugins", "in_process")
        return setting is not None and entry.name in setting.value and (entry.candidate.source.builtin or setting.layer != "packaged")

    # choice -------------------------------------------------------------------------------------------------------------

    def _requested(self, name: str | None, origin: str) -> tuple[str, str]:
        setting = self.config.get("run", "backend")
        if name is not None:
            return name, origin
        if variable := self._env.get("FASTLLM_BACKEND"):
            return variable, "FASTLLM_BACKEND"
        return (setting.value, f"{setting.where} [run] backend") if setting else ("auto", "auto")

    def _priority(self, entry: Entry) -> tuple[int | None, str]:
        """A backend's priority and who set it; None if only the plug-in could say and it did not."""
        if setting := self.config.get("priority", entry.name):
            return setting.value, setting.where
        if isinstance(entry.loaded, BackendSpec):
            return entry.loaded.priority, entry.candidate.source.distribution
        return None, ""

    def _auto(self) -> Selection:
        """The first backend, by priority, then name, that probes Ready; probing stops there. Those that a child is asked for come last, and
        only those that would be chosen before what is ready here."""
        enabled = [e for e in self._entries.values() if not e.disabled]
        here, there = [e for e in enabled if not self._contained.holds(e)], [e for e in enabled if self._contained.holds(e)]
        skipped: list[tuple[int | None, FastLLMError]] = []
        order = sorted(self._loadable(here, skipped))
        least, before = 0, (1, "")
        for negative, name in order:
            with contextlib.suppress(FastLLMError):
                self._ask.probe(self._entries[name])
                least, before = -negative, (negative, name)
                break
        there = [e for e in there if (known := self._priority(e)[0]) is None or (known >= 0 and (-known, e.name) < before)]
        self._contained.ask(self._contained.open_questions(there), ASK_S, "--least", str(least))
        order = sorted([*order, *self._loadable(there, skipped)])
        for negative, name in order:
            entry = self._entries[name]
            try:
                ready = self._ask.probe(entry)
            except FastLLMError as exc:
                if self._ask.guard.reraise and isinstance(exc, BackendBroken):
                    raise
                skipped.append((-negative, exc))
                continue
            self._tell(skipped, -negative, name)
            for slow in (e for e in there if e.import_s + e.probe_s > PROBE_S):
                took = f"backend '{slow.name}' took {slow.import_s + slow.probe_s:.1f} s to answer, and every automatic choice waits for it"
                self._remark(f"{took}; skip it: FASTLLM_DISABLE_PLUGINS={slow.name}")
            return Selection(name, ready.devices[0].id, self._ask.load(entry), "auto")
        raise BackendUnavailable(
            "no backend can be used",
            why="; ".join(f"{e.message}: {e.why}" for _, e in skipped) or "none is installed and enabled",
            fix="fastllm doctor" if BASE in self._entries else 'run "pip install -e ." in the source tree of fastllm',
        )

    def _loadable(self, entries: list[Entry], skipped: list[tuple[int | None, FastLLMError]]) -> list[tuple[int, str]]:
        """(minus priority, name) of those that `auto` may take; adds the others' errors to `skipped`."""
        loaded = []
        for entry in entries:
            try:
                self._ask.load(entry)
            except FastLLMError as exc:
                if self._ask.guard.reraise:
                    raise
                skipped.append((self._priority(entry)[0], exc))
                continue
            if (priority := self._priority(entry)[0] or 0) >= 0:
                loaded.append((-priority, entry.name))
        return loaded

    def _tell(self, skipped: list[tuple[int | None, FastLLMError]], chosen: int, name: str) -> None:
        """One line per backend that would have been chosen before `name`; an unknown priority counts as higher. Strict: an error."""
        for priority, error in skipped:
            if priority is not None and priority <= chosen:
                continue
            if self._strict:
                raise error
            self._say(told(error, f"so '{name}' is used"))

    def _say(self, line: str) -> None:
        if line not in self.messages:
            self.messages.append(line)

    def _remark(self, line: str) -> None:
        """A line that `strict` has nothing to refuse in."""
        if line not in self.messages:
            self.messages.append(line)
            self.remarks.add(line)


def _flag(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "") not in ("", "0")
