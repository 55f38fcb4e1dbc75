"""What becomes of each backend when it is asked: loaded, probed, its hooks called, in a child process or here. Each answer, also a failure,
is kept in the backend's entry and given again. Called by the registry, which chooses and opens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ..backend import BackendSpec, Ready
from ..errors import BackendBroken, BackendUnavailable, FastLLMError
from .contained import NAMED_S, Contained
from .discovery import GROUP, Candidate
from .entries import Entry
from .loader import Guard, Plugin, check_probe, check_spec, load_plugin
from .report import broken

__all__ = ["Asker"]


class Asker:
    """entries: backend name -> entry, of a registry. contained: who is asked in a child. guard: what becomes of exceptions of plug-ins that are
    asked here. remark: gets lines about faults that are for the plug-in's author to mend."""

    def __init__(self, entries: Mapping[str, Entry], contained: Contained, guard: Guard, remark: Callable[[str], None]):
        self.entries, self.contained, self.guard, self._remark = entries, contained, guard, remark
        self._plugins: dict[tuple[str, str], Plugin | FastLLMError] = {}

    def load_here(self, entry: Entry) -> BackendSpec:
        """Imports a backend into this process, as it is to be opened. Raises its error."""
        if entry.plugin is None and isinstance(entry.loaded, BackendSpec):
            entry.loaded = None  # what a child said of it ends here
        return self.load(entry, here=True)

    def load(self, entry: Entry, here: bool = False) -> BackendSpec:
        """Loads and checks one backend, once. Raises its error."""
        if entry.blocked is not None:
            raise entry.blocked.with_traceback(None)
        if entry.loaded is None and not here and self.contained.holds(entry):
            self.contained.ask([entry], NAMED_S, "--load")
        if entry.loaded is None:
            try:
                entry.loaded = self._load_now(entry)
            except FastLLMError as exc:
                if self.guard.reraise:
                    raise
                entry.loaded = exc
        if isinstance(entry.loaded, FastLLMError):
            raise entry.loaded.with_traceback(None)
        return entry.loaded

    def _load_now(self, entry: Entry) -> BackendSpec:
        candidate = entry.candidate
        plugin = entry.plugin = self.plugin(candidate)
        spec = plugin.specs.get(entry.name)
        if spec is None:
            names = ", ".join(sorted(plugin.specs))
            raise broken(candidate, "load", f"fastllm_backends() does not list '{entry.name}'; it lists {names}")
        check_spec(candidate, spec)
        for other in sorted(set(plugin.specs) - {c.name for e in self.entries.values() for c in e.candidates}):
            self._remark(f"{candidate.source.label} has a backend '{other}' without an entry point in {GROUP}; it is not used")
        return spec

    def plugin(self, candidate: Candidate) -> Plugin:
        """The plug-in of a candidate: one load per module, also if it serves several names or fails."""
        key = candidate.source.distribution, candidate.source.module
        if key not in self._plugins:
            try:
                self._plugins[key] = load_plugin(candidate, self.guard)
            except FastLLMError as exc:
                self._plugins[key] = exc
        found = self._plugins[key]
        if isinstance(found, FastLLMError):
            raise found.with_traceback(None)
        return found

    def probe(self, entry: Entry) -> Ready:
        """The devices of one backend, asked once. Raises its error."""
        if entry.probed is None and not isinstance(entry.loaded, FastLLMError) and self.contained.holds(entry):
            self.contained.ask([entry], NAMED_S)
        self.load(entry)
        if entry.probed is None:
            started = time.perf_counter()
            try:
                entry.probed = check_probe(entry.candidate, self.call(entry, "fastllm_probe", BackendUnavailable, name=entry.name))
            except FastLLMError as exc:
                if self.guard.reraise and isinstance(exc, BackendBroken):
                    raise
                entry.probed = exc
            except Exception as exc:  # an answer that is not what it says it is
                if self.guard.reraise:
                    raise
                entry.probed = broken(entry.candidate, "probe", exc)
            entry.probe_s = time.perf_counter() - started
        if isinstance(entry.probed, FastLLMError):
            raise entry.probed.with_traceback(None)
        return entry.probed

    def call(self, entry: Entry, hook: str, passes: type[FastLLMError] | None = None, **arguments: Any) -> Any:
        """The answer of a hook of a backend that is loaded here. passes: errors that it may raise on purpose. Raises BackendBroken for all else."""
        if entry.plugin is None:
            raise BackendBroken(f"backend '{entry.name}' is not loaded", who=entry.candidate.who)
        return entry.plugin.call(entry.candidate, hook, passes, **arguments)

    def optional(self, entry: Entry, hook: str, **arguments: Any) -> Any:
        """The answer of a hook that a plug-in need not have, called here; None if it has none. Raises as loading does, or BackendBroken."""
        self.load_here(entry)
        return self.call(entry, hook, **arguments) if entry.plugin and entry.plugin.has(hook) else None
