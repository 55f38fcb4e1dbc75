"""Compares a wheel with the tree: every module and data file is in it, and nothing else is."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {"interface": "fastllm", **{room: f"fastllm/{room}" for room in ("core", "models", "formats", "text", "backends", "conformance")}}
NATIVE = {"fastllm/core/_kernels", "fastllm/core/_steps", "fastllm/formats/_strings", "fastllm/text/_matcher", "fastllm/text/_pieces", "fastllm/backends/cpu_avx/_native"}
PAGE = ROOT / "interface" / "web"  # of the web page only what is built
SHIPPED = (".py", ".in", ".pyi", ".typed", ".json", ".toml", ".fl")


def expected() -> set[str]:
    """Names in the wheel that the tree asks for."""
    names = {"fastllm/plugins.toml"}
    for folder, package in ROOMS.items():
        for path in (ROOT / folder).rglob("*"):
            if path.is_relative_to(PAGE):
                shipped = path.parent == PAGE / "static"
            else:
                shipped = path.suffix in SHIPPED or path.match("gpu/kernels/*.h") or path.name == "py.typed"
            if shipped:
                names.add(f"{package}/{path.relative_to(ROOT / folder).as_posix()}")
    return names


def main() -> int:
    """Argument: the wheel. Prints what is missing or too much; exit 1 if anything is."""
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        names = {n for n in wheel.namelist() if not n.endswith("/")}
    found = {n for n in names if ".dist-info/" not in n}
    native = {n for n in found if n.endswith((".so", ".pyd"))}
    complaints = [f"missing: {n}" for n in sorted(expected() - found)]
    complaints += [f"too much: {n}" for n in sorted(found - native - expected())]
    complaints += [f"native module missing: {n}" for n in sorted(NATIVE - {n.partition(".")[0] for n in native})]
    print("\n".join(complaints) or f"{Path(sys.argv[1]).name}: {len(names)} files, as in the tree")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
