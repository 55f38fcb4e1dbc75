"""Prints the requirements of extras of pyproject.toml, one a line, so that they can be added without building the package again."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main() -> None:
    """Arguments: names of extras."""
    project = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text())["project"]
    for name in sys.argv[1:]:
        print("\n".join(project["optional-dependencies"][name]))


if __name__ == "__main__":
    main()
