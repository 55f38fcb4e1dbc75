"""Typed access to a configuration: nothing of a file is believed before its type, range and finiteness are checked.

One class for both kinds of file: a `config.json` (names as they are) and GGUF metadata (`ARCH.` before every name). The
families and `config.py` read through it; every failure names the key, the value found and the limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..core.errors import ModelFileError, UnsupportedError

__all__ = ["MAX_CONTEXT", "MAX_HEADS", "MAX_HIDDEN", "MAX_LAYERS", "MAX_VOCAB", "MIN_THETA", "Keys", "shown"]

MAX_HIDDEN = 1 << 20
MAX_LAYERS = 4096
MAX_HEADS = 65_536
MAX_VOCAB = 1 << 24
MAX_CONTEXT = (1 << 31) - 1
MIN_THETA = 2.0


class Keys:
    """Typed access to a configuration: a missing key, a wrong type, a non-finite number or one out of range is a
    ModelFileError that names key, value and limit. JSON null counts as missing. `defaults` stand in for missing keys;
    `prefix` is put before every name (GGUF's `ARCH.`)."""

    def __init__(
        self, values: Mapping[str, Any], *, who: str = "", prefix: str = "", defaults: Mapping[str, Any] | None = None
    ):
        self.values, self.who, self.prefix, self.defaults = values, who, prefix, dict(defaults or {})

    def __contains__(self, key: str) -> bool:
        return self.values.get(self.prefix + key) is not None

    def raw(self, key: str, default: Any = None) -> Any:
        """The value as it is, else the family's default, else `default`."""
        value = self.values.get(self.prefix + key)
        return self.defaults.get(key, default) if value is None else value

    def wrong(self, key: str, rule: str, value: Any = None) -> ModelFileError:
        """The error for a key that breaks `rule`."""
        found = self.raw(key) if value is None else value
        return ModelFileError(
            f"'{self.prefix}{key}' is {shown(found)}; it must be {rule}",
            who=self.who,
            fix="the configuration is damaged or was edited; download the model again",
            key=self.prefix + key,
        )

    def missing(self, key: str) -> ModelFileError:
        """The error for a key that must be there."""
        return ModelFileError(
            f"the configuration has no '{self.prefix}{key}'",
            who=self.who,
            fix="download the model again",
            key=self.prefix + key,
        )

    def unsupported(self, key: str, known: str) -> UnsupportedError:
        """The error for a value that is legal somewhere but not understood here."""
        return UnsupportedError(
            f"'{self.prefix}{key}' is {shown(self.raw(key))}, which fastllm does not know",
            who=self.who,
            why=f"known: {known}",
            key=self.prefix + key,
        )

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_HIDDEN) -> int:
        """An integer in low…high. A list of equal integers (GGUF writes some keys per layer) counts as that integer."""
        value = self.raw(key, default)
        if value is None:
            raise self.missing(key)
        if isinstance(value, (list, np.ndarray)):
            items = value.tolist() if isinstance(value, np.ndarray) else value
            if not items or any(type(item) is not int for item in items):
                raise self.wrong(key, "an integer, or one for every layer")
            if any(item != items[0] for item in items):
                raise self.unsupported(key, "the same value for every layer")
            value = items[0]
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(key, f"an integer from {low} to {high}", value)
        return value

    def number(self, key: str, default: float | None = None, *, low: float = 0.0, high: float = 1e30) -> float:
        """A finite number in low…high; integers count."""
        value = self.raw(key, default)
        if value is None:
            raise self.missing(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:  # NaN fails, too
            raise self.wrong(key, f"a number from {low:g} to {high:g}", value)
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """true or false."""
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return value

    def choice(self, key: str, table: Mapping[str, str], default: str | None = None) -> str:
        """table[value]; UnsupportedError for a value that the table does not have."""
        value = self.raw(key, default)
        if value is None:
            raise self.missing(key)
        if not isinstance(value, str):
            raise self.wrong(key, "a string", value)
        if value not in table:
            raise self.unsupported(key, ", ".join(table))
        return table[value]

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of `length` positive finite numbers."""
        value = self.raw(key)
        if value is None:
            raise self.missing(key)
        if not isinstance(value, list) or len(value) != length:
            raise self.wrong(key, f"a list of {length} numbers")
        for item in value:
            if isinstance(item, bool) or not isinstance(item, (int, float)) or not 0 < item <= 1e30:
                raise self.wrong(key, "a list of positive finite numbers", item)
        return tuple(float(v) for v in value)

    def optional(self, key: str, absent: float, *, low: float = 0.0, high: float = 1e30) -> float:
        """A number where null switches the feature off (0.0) and an absent key means the family's value `absent`."""
        if self.prefix + key in self.values and self.values[self.prefix + key] is None:
            return 0.0
        return self.number(key, absent, low=low, high=high)

    def table(self, key: str) -> Keys | None:
        """A nested object as Keys (its names are shown as `key.name`), None if absent."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(key, "an object", value)
        return Keys({f"{self.prefix}{key}.{k}": v for k, v in value.items()}, who=self.who, prefix=f"{self.prefix}{key}.")

    def layer_flags(self, key: str, count: int) -> list[Any] | None:
        """A per-layer list of `count` items, None if absent."""
        value = self.raw(key)
        if value is None:
            return None
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if not isinstance(value, list) or len(value) != count:
            raise self.wrong(key, f"a list with one entry for each of the {count} layers")
        return value


def shown(value: Any) -> str:
    """repr, cut to 80 characters, for messages."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
