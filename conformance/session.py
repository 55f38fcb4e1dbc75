"""A session: the backend under test, opened when a case first needs it, and reopened after a failure.

`Target` says what is tested, in plain data, so that a worker process opens the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from fastllm.api import Backend, BackendSpec, open_backend

from .bench import Bench
from .case import Requirements

__all__ = ["Session", "Target"]


@dataclass(frozen=True)
class Target:
    """name: NAME[:DEVICE]; options: `key=value` pairs; plugins_file, plugin_paths: as on the command line; mutant: a broken variant
    of `ref` from `mutants`, instead of a backend."""

    name: str
    options: Mapping[str, str] = field(default_factory=dict)
    plugins_file: str | None = None
    plugin_paths: tuple[str, ...] = ()
    mutant: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "options": dict(self.options), "plugin_paths": list(self.plugin_paths)}

    @staticmethod
    def from_dict(body: Mapping[str, Any]) -> Target:
        """The reverse."""
        return Target(**{**body, "plugin_paths": tuple(body.get("plugin_paths", ()))})

    def open(self, **more: str) -> tuple[Backend, BackendSpec]:
        """An open backend; `more` overrides options."""
        if self.mutant:
            from .mutants import open_mutant

            return open_mutant(self.mutant, more)
        return open_backend(self.name, {**self.options, **more}, plugins_file=self.plugins_file, plugin_paths=self.plugin_paths)


class Session:
    """Opens `target` when asked. A context manager."""

    def __init__(self, target: Target, requirements: Requirements | None = None, opener: Callable[..., tuple[Backend, BackendSpec]] | None = None):
        """opener: opens the backend instead of `target.open` (tests)."""
        self.target, self.requirements = target, requirements or Requirements()
        self._open = opener or target.open
        self._backend: Backend | None = None
        self._spec: BackendSpec | None = None
        self._bench: Bench | None = None
        self._last: dict[str, Any] = {}

    @property
    def backend(self) -> Backend:
        """The backend, open."""
        if self._backend is None:
            self._backend, self._spec = self._open()
        return self._backend

    @property
    def spec(self) -> BackendSpec:
        """What its plug-in says about it."""
        _ = self.backend
        assert self._spec is not None
        return self._spec

    @property
    def bench(self) -> Bench:
        """A bench on it."""
        if self._bench is None:
            self._bench = Bench(self.backend)
        return self._bench

    @property
    def last(self) -> dict[str, Any]:
        """Operands and results of the last op, by name, for `--dump`."""
        return self._bench.last if self._bench is not None else self._last

    def fresh(self, **options: str) -> Backend:
        """Another instance; the caller closes it."""
        return self._open(**options)[0]

    def reset(self) -> None:
        """Closes the backend; the next case opens a new one, so that one fault does not become many."""
        self._last = self.last
        backend, self._backend, self._bench = self._backend, None, None
        if backend is not None:
            with contextlib.suppress(Exception):
                backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.reset()
