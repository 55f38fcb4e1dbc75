"""Which folders a backend's code lies in, and a hash over its sources: if they change, a report is of another backend.

That is the plug-in's own package, and what its `conformance.toml` names beside it, in our backends as in those of others:

    sources = ["acme_kernels"]            # modules or packages; their folders count
"""

from __future__ import annotations

import hashlib
import tomllib
from importlib.util import find_spec
from pathlib import Path

from fastllm.api import UsageError

__all__ = ["kernel_hash", "source_folders"]

FILE = "conformance.toml"
SUFFIXES = (".py", ".pyx", ".pxi", ".pxd", ".c", ".h", ".cc", ".cpp", ".hpp", ".cl", ".cu", ".cuh", ".fl")


def source_folders(folder: Path) -> list[Path]:
    """The package's folder, then those that its conformance.toml names. Raises UsageError for a name that is no module."""
    path, found = folder / FILE, [folder]
    if not path.is_file():
        return found
    try:
        names = tomllib.loads(path.read_text(encoding="utf-8")).get("sources", [])
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}", who=str(path), fix="see https://toml.io") from None
    if not isinstance(names, list) or not all(isinstance(n, str) and n for n in names):
        raise UsageError(f"{path}: sources is {names!r}; it must be a list of modules", who=str(path), fix='sources = ["acme_kernels"]')
    for name in names:
        try:
            spec = find_spec(name)
        except (ImportError, ValueError):
            spec = None
        if spec is None or not (spec.submodule_search_locations or spec.origin):
            raise UsageError(f"{path}: there is no module '{name}'", who=str(path), fix="sources names modules or packages that hold the backend's code")
        place = Path(next(iter(spec.submodule_search_locations))) if spec.submodule_search_locations else Path(str(spec.origin)).parent
        if place not in found:
            found.append(place)
    return found


def kernel_hash(folder: Path | None) -> str:
    """SHA-256 over the sources in a backend's folders. "" without a folder."""
    if folder is None:
        return ""
    total = hashlib.sha256()
    for place in source_folders(folder):
        for path in sorted(p for p in place.rglob("*") if p.suffix in SUFFIXES and "__pycache__" not in p.parts):
            total.update(path.relative_to(place).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()
