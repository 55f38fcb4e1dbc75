"""Files that a run writes: under another name, which they take when all of them are there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(texts: Mapping[Path, str]) -> None:
    """Writes texts in UTF-8; a disk that fills up leaves the files as they were. Raises OSError."""
    parts = {path: path.with_name(f"{path.name}.part-{os.getpid()}") for path in texts}
    try:
        for path, part in parts.items():
            part.write_text(texts[path], encoding="utf-8")
        for path, part in parts.items():
            part.replace(path)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
