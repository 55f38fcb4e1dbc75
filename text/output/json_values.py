"""Where a JSON value ends in text that may go on, and XML-like argument texts as JSON values."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["json_end", "typed_value"]

MAX_DEPTH = 200


def json_end(text: str, start: int) -> int | None:
    """The index after the JSON object or array that starts at text[start]; None: it does not end here. Raises ValueError if no object or
    array can start there or brackets do not match. Strings are skipped; whether the value is valid inside is not looked at."""
    if start >= len(text):
        return None
    if text[start] not in "{[":
        raise ValueError(f"no JSON object or array at character {start}")
    stack: list[str] = []
    inside, escaped = False, False
    for at in range(start, len(text)):
        c = text[at]
        if inside:
            if escaped:
                escaped = False
            elif c == "\\":
                escaped = True
            elif c == '"':
                inside = False
        elif c == '"':
            inside = True
        elif c in "{[":
            stack.append("}" if c == "{" else "]")
            if len(stack) > MAX_DEPTH:
                raise ValueError(f"JSON deeper than {MAX_DEPTH} levels")
        elif c in "}]":
            if stack.pop() != c:
                raise ValueError(f"'{c}' at character {at} closes nothing")
            if not stack:
                return at + 1
    return None


def typed_value(text: str, schema: Any) -> Any:
    """An argument that was written as plain text (XML forms), as the schema's type: a string stays text; numbers, booleans, null, objects
    and arrays are read as JSON where that fits the type. Without a type: JSON if it is JSON, else text."""
    kinds = schema.get("type") if isinstance(schema, dict) else None
    allowed = {kinds} if isinstance(kinds, str) else set(kinds) if isinstance(kinds, list) else set()
    if allowed == {"string"}:
        return text
    try:
        value = json.loads(text.strip(), parse_constant=_refuse)
        json.dumps(value, allow_nan=False)  # 1e999
    except (ValueError, RecursionError):
        return text
    if not allowed or _kind(value) & allowed:
        return value
    return text


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _kind(value: Any) -> set[str]:
    """The names of JSON schema types that a value has."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number"} | ({"integer"} if value.is_integer() else set())
    return {{str: "string", list: "array", dict: "object", type(None): "null"}[type(value)]}
