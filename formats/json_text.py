"""Strict JSON for files that come from strangers: bounded size, depth and parts, finite numbers, no key twice.

Python's parser takes NaN, keeps the last of two equal keys and turns a kilobyte of `[` into an exception of its own; a model
configuration read that way means something else to every tool. Used for configurations, indices and safetensors headers.
"""

from __future__ import annotations

import json
import math
import os
from typing import Any

from ..core.errors import ModelFileError
from .reader import MappedFile, shown

__all__ = ["parse_json", "read_json"]

MAX_DEPTH = 64
MAX_PARTS = 4_000_000  # brackets and commas: what parsing costs memory for, whatever the text's length
MAX_DIGITS = 40  # tokenizer_config.json files hold 10^30 for "no limit"


class _Refused(ValueError):
    pass


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise _Refused(f"the key {shown(twice)} appears twice")
    return out


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Refused(f"the number {shown(text, 40)} is too large")
    return value


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise _Refused(f"an integer has {len(text)} digits; the limit is {MAX_DIGITS}")
    return int(text)


def _constant(text: str) -> float:
    raise _Refused(f"{text} is no JSON number")


def _check_depth(value: Any, surrogates: bool) -> None:
    """Refuses what is nested too deep, and half surrogate pairs; surrogates: the text has escapes that could be some."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item)
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            elif surrogates and isinstance(item, str) and not item.isascii() and any("\ud800" <= c <= "\udfff" for c in item):
                raise _Refused(f"the string {shown(item)} holds half a surrogate pair")
        if not below:
            return
        level = below
    raise _Refused(f"it is nested more than {MAX_DEPTH} levels deep")


def parse_json(raw: bytes, what: str, path: str, *, base: int = 0) -> Any:
    """The value of the JSON text `raw`. what, path: for messages; base: byte offset of `raw` in the file.

    Raises ModelFileError for anything that is not strict JSON in UTF-8, nested deeper than 64, with numbers that are not
    finite, with integers of more than 40 digits, or with a key twice in one object.
    """
    fix = "download the file again, or correct it in an editor"
    parts = raw.count(b",") + raw.count(b"[") + raw.count(b"{")
    try:
        if parts > MAX_PARTS:
            raise _Refused(f"it has {parts} brackets and commas; the limit is {MAX_PARTS}")
        value = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_pairs, parse_float=_number, parse_int=_integer, parse_constant=_constant
        )
        _check_depth(value, b"\\ud" in raw or b"\\uD" in raw)
    except RecursionError:
        reason, offset = f"it is nested more than {MAX_DEPTH} levels deep", base
    except UnicodeDecodeError as exc:
        reason, offset = f"it is not valid UTF-8: {exc.reason}", base + exc.start
    except json.JSONDecodeError as exc:
        reason, offset = f"it is not valid JSON: {exc.msg}", base + len(exc.doc[: exc.pos].encode("utf-8", "replace"))
    except _Refused as exc:
        reason, offset = str(exc), base
    else:
        return value
    raise ModelFileError(f"{what} at byte {offset}: {reason}", who=path, fix=fix, offset=offset)


def read_json(path: str | os.PathLike[str], limit: int = 16 << 20) -> dict[str, Any]:
    """The JSON object in the file `path`, which may have up to `limit` bytes. Raises ModelFileError."""
    file = MappedFile(path)
    try:
        name = os.path.basename(file.path)
        if file.size > limit:
            raise file.error(f"the file has {file.size} bytes; the limit for this kind is {limit}", limit=limit)
        value = parse_json(bytes(file.data), name, file.path)
        if not isinstance(value, dict):
            raise file.error(f"it holds a JSON {type(value).__name__}, not an object", offset=0)
        return value
    finally:
        file.close()
