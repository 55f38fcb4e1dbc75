"""Which backends are installed, found without importing any of them.

One entry point of the group `fastllm.backends` per backend; the built-in ones are found through the same door. Each
distribution is read on its own, so one with damaged metadata hides nothing but itself. Called by the registry.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

__all__ = ["DISTRIBUTION", "GROUP", "Candidate", "Source", "discover"]

GROUP: Final = "fastllm.backends"
DISTRIBUTION: Final = "fastllm-engine"


@dataclass(frozen=True)
class Source:
    """A plug-in module and who ships it. module: dotted name; file: set for a module loaded by `--plugin`, whose distribution is
    then the path as the user wrote it."""

    module: str
    distribution: str
    version: str = ""
    builtin: bool = False
    extras: tuple[str, ...] = ()
    file: Path | None = None

    @property
    def package(self) -> str:
        """The vendor's package: frames of a traceback below it are the vendor's."""
        if self.builtin:
            return self.module.rpartition(".")[0]  # one backend's package, not all of fastllm
        return self.module.partition(".")[0]

    @property
    def label(self) -> str:
        """Distribution and version, or the file."""
        return f"{self.distribution} {self.version}".strip()


@dataclass(frozen=True)
class Candidate:
    """A backend name that a source claims."""

    name: str
    source: Source

    @property
    def entry_point(self) -> str:
        """`GROUP: NAME = MODULE`, as it stands in the distribution; `--plugin` for a file."""
        return "--plugin" if self.source.file else f"{GROUP}: {self.name} = {self.source.module}"

    @property
    def who(self) -> str:
        """The owner, as error messages show it."""
        return f"{self.source.label}  [{self.entry_point}]"


def discover(report: Callable[[str], None]) -> list[Candidate]:
    """Every entry point of the group, first distribution on the path first. report: gets a line for a distribution whose metadata
    cannot be read."""
    found: dict[tuple[str, str, str], Candidate] = {}
    seen: set[str] = set()
    for distribution in metadata.distributions():
        try:
            if GROUP not in (distribution.read_text("entry_points.txt") or ""):
                continue
            name = distribution.metadata["Name"]
            key = re.sub(r"[-_.]+", "-", name).lower()
            if key in seen:  # an older copy further down the path is not what `import` would find
                continue
            seen.add(key)
            extras = tuple(distribution.metadata.get_all("Provides-Extra") or ())
            for point in distribution.entry_points:
                if point.group == GROUP:
                    source = Source(point.value.strip(), name, distribution.version, key == DISTRIBUTION, extras)
                    found[point.name, key, source.module] = Candidate(point.name, source)
        except Exception as exc:  # damaged metadata takes many shapes: a missing name, wrong bytes, a bad section
            where = getattr(distribution, "_path", "an installed distribution")
            report(f"the metadata in {where} cannot be read ({type(exc).__name__}: {exc}); its backends are not known")
    return list(found.values())
