"""Types of options that are sizes: `512MiB`, `2G`, `65536tok`."""

from __future__ import annotations

import re
from typing import Any

import click

__all__ = ["CacheSize", "Size"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_FORM = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([kmgt]?i?)b?", re.IGNORECASE)


class Size(click.ParamType):
    """Bytes, with a unit or without."""

    name = "size"

    def __init__(self, least: int = 0):
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes."""
        found = _FORM.fullmatch(str(value).strip())
        unit = _UNITS.get(found[2].lower()) if found else None
        size = int(float(found[1]) * unit) if found and unit else -1
        if size < 0:
            self.fail(f"{value!r} is no size; write 512MiB, 2G or a number of bytes", param, ctx)
        if size < self.least:
            self.fail(f"{value!r} is too small: {self.least:,} bytes at least", param, ctx)
        return size


class CacheSize(Size):
    """Bytes, or tokens (`65536tok`): ("bytes" or "tokens", number)."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The pair."""
        if isinstance(value, tuple):
            return value
        found = re.fullmatch(r"(\d{1,12})\s*(?:tok|tokens)", str(value).strip(), re.IGNORECASE)
        return ("tokens", int(found[1])) if found else ("bytes", super().convert(value, param, ctx))
