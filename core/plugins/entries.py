"""The table of backend names: who claims each, and which names are switched off or claimed twice. Nothing is imported here.

Called by the registry, which keeps what it learns about a backend in its entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from ..backend import BackendSpec, Ready
from ..errors import BackendBroken, BackendDisabled, FastLLMError
from .config import NAME_PATTERN, PluginsConfig, close_matches
from .discovery import Candidate
from .loader import Plugin
from .report import broken

__all__ = ["BASE", "Entry", "collect"]

BASE: Final = "ref"
"""The backend that no filter hides and nobody may shadow: everything falls back to it."""


class Entry:
    """One backend name. blocked: why it is never imported (disabled, claimed twice, not a name). loaded, probed: the answer or the
    failure, once asked for, in a child or here; asking again gives the same. plugin: None until it is loaded here. environment: what a
    child said of the driver, or how that failed; untold: nobody asks again. import_s, probe_s: seconds."""

    def __init__(self, name: str, candidates: list[Candidate]):
        self.name, self.candidates = name, candidates
        self.blocked: FastLLMError | None = None
        self.plugin: Plugin | None = None
        self.loaded: BackendSpec | FastLLMError | None = None
        self.probed: Ready | FastLLMError | None = None
        self.environment: dict[str, str] | FastLLMError | None = None
        self.untold = False
        self.api: tuple[int, int] | None = None
        self.import_s = self.probe_s = 0.0

    @property
    def candidate(self) -> Candidate:
        """Who claims the name; the first of several."""
        return self.candidates[0]

    @property
    def files(self) -> tuple[str, ...]:
        """The files of `--plugin` that claim it, as they were given."""
        return tuple(c.source.distribution for c in self.candidates if c.source.file)

    @property
    def disabled(self) -> bool:
        """Whether the user switched it off."""
        return isinstance(self.blocked, BackendDisabled)


def collect(
    candidates: list[Candidate], config: PluginsConfig, env: Mapping[str, str], say: Callable[[str], None], remark: Callable[[str], None]
) -> dict[str, Entry]:
    """Backend name -> entry, with filters and overrides applied. say: gets lines about settings that cannot be followed;
    remark: lines about what another package does wrong."""
    claims: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        claims.setdefault(candidate.name, []).append(candidate)
    entries = {name: Entry(name, claimed) for name, claimed in claims.items()}
    for entry in entries.values():
        if not NAME_PATTERN.fullmatch(entry.name):
            entry.blocked = broken(entry.candidate, "load", f"'{entry.name}' is not a backend name ([a-z][a-z0-9_]{{1,31}})")
        elif len(entry.candidates) > 1:
            _settle(entry, config, remark)
    _filter(entries, config, env, say)
    trusted = config.get("plugins", "in_process")
    if trusted and trusted.layer != "packaged":
        for name in sorted(set(trusted.value) - set(entries)):
            say(f"{trusted.where} [plugins] in_process names '{name}', which is not installed; {close_matches(name, sorted(entries))}")
    return entries


def _settle(entry: Entry, config: PluginsConfig, remark: Callable[[str], None]) -> None:
    """A name that several claim: the override's choice, or nobody's. `ref` stays the built-in one."""
    override = config.get("override", entry.name)
    if entry.name == BASE:
        kept = [c for c in entry.candidates if c.source.builtin]
        others = ", ".join(c.source.label for c in entry.candidates if not c.source.builtin)
        remark(f"'{BASE}' is the built-in fallback and cannot be replaced; ignored: {others}")
    else:
        kept = [c for c in entry.candidates if override and c.source.distribution == override.value]
    if len(kept) == 1:
        entry.candidates = kept
        return
    labels = [c.source.label for c in entry.candidates]
    why = f"claimed by {' and '.join(labels)}"
    if override:
        why += f"; {override.where} names '{override.value}', which is not one of them"
    choices = "  |  ".join(f'{entry.name} = "{c.source.distribution}"' for c in entry.candidates)
    entry.blocked = BackendBroken(
        f"backend '{entry.name}' is installed {len(labels)} times; none is used",
        who="; ".join(c.who for c in entry.candidates),
        why=why,
        fix=f"in plugins.toml under [override]: {choices}  |  pip uninstall one of them",
        backend=entry.name,
    )


def _filter(entries: dict[str, Entry], config: PluginsConfig, env: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Applies allow-lists and disable-lists. Allow-lists spare built-ins and `--plugin` files; nothing hides `ref`."""
    for allow, key, variable in ((True, "enable", "FASTLLM_PLUGINS"), (False, "disable", "FASTLLM_DISABLE_PLUGINS")):
        setting = config.get("plugins", key)
        lists: list[tuple[list[str], str]] = [(setting.value, f"{setting.where} [plugins] {key}")] if setting else []
        if variable in env:
            given = [name.strip() for name in env[variable].split(",") if name.strip()]
            lists.append((given, f"{variable}={env[variable]}"))
            for name in sorted(set(given) - set(entries)):
                say(f"{variable} names '{name}', which is not installed; {close_matches(name, sorted(entries))}")
        for listed, origin in lists:
            for entry in entries.values():
                source = entry.candidate.source
                if allow and (entry.name in listed or source.builtin or source.file is not None):
                    continue
                if allow or entry.name in listed:
                    _disable(entry, origin, f"{'add' if allow else 'remove'} '{entry.name}' {'to' if allow else 'from'} it", say)


def _disable(entry: Entry, origin: str, fix: str, say: Callable[[str], None]) -> None:
    if entry.name == BASE:
        say(f"{origin}: '{BASE}' cannot be disabled; every other backend falls back to it")
        return
    entry.blocked = BackendDisabled(f"backend '{entry.name}' is disabled by {origin}", who=entry.candidate.who, fix=fix, backend=entry.name)
