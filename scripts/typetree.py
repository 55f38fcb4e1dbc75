"""Makes `build/typing/fastllm`, a tree of links that looks like the installed package, for tools that do not follow the mapping of
folders to packages (mypy)."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "typing" / "fastllm"


def main() -> None:
    """Rebuilds the tree from scratch."""
    shutil.rmtree(TREE, ignore_errors=True)
    TREE.mkdir(parents=True)
    for entry in (ROOT / "interface").iterdir():
        (TREE / entry.name).symlink_to(entry)
    for room in ("core", "models", "formats", "text", "backends", "conformance"):
        (TREE / room).symlink_to(ROOT / room)


if __name__ == "__main__":
    main()
