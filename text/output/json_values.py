"""Where a JSON value ends in text that may go on, and XML-like argument texts as JSON values."""

from __future__ import annotations

import json
import re
from typing import Any, Final

__all__ = ["JsonEnd", "PythonEnd", "json_end", "typed_value"]

MAX_DEPTH: Final = 200


class JsonEnd:
    """Looks for the end of a JSON object or array, in pieces. Strings are skipped; whether the value is valid inside is not looked at. inside:
    brackets that are open already, by what closes them."""

    quotes, opening, closing = '"', "{[", "}]"

    def __init__(self, inside: str = ""):
        self._stack = list(inside)
        self._quote, self._escaped = "", False
        self._outside = re.compile(f"[{re.escape(self.opening + self.closing + self.quotes)}]")
        self._inside = {quote: re.compile(rf"[{quote}\\]") for quote in self.quotes}
        self._begun = bool(inside)

    def feed(self, text: str, at: int) -> int | None:
        """The index after the value, which starts or goes on at text[at]; None: it does not end here. Raises ValueError if none can start
        there, or brackets do not match."""
        if not self._begun and at < len(text):
            if text[at] not in self.opening:
                raise ValueError(f"no JSON object or array at character {at}")
            self._begun = True
        if self._escaped and at < len(text):
            at, self._escaped = at + 1, False
        while at < len(text):
            if self._quote:
                found = self._inside[self._quote].search(text, at)
                if found is None:
                    return None
                at = found.end()
                if found[0] == self._quote:
                    self._quote = ""
                elif at == len(text):
                    self._escaped = True
                else:
                    at += 1
                continue
            found = self._outside.search(text, at)
            if found is None:
                return None
            c, at = found[0], found.end()
            if c in self.quotes:
                self._quote = c
            elif c in self.opening:
                self._stack.append(self.closing[self.opening.index(c)])
                if len(self._stack) > MAX_DEPTH:
                    raise ValueError(f"brackets deeper than {MAX_DEPTH} levels")
            elif self._stack.pop() != c:
                raise ValueError(f"'{c}' at character {at - 1} closes nothing")
            if not self._stack:
                return at
        return None


class PythonEnd(JsonEnd):
    """The same for brackets and strings of Python."""

    quotes, opening, closing = "\"'", "{[(", "}])"


def json_end(text: str, start: int) -> int | None:
    """The index after the JSON object or array that starts at text[start]; None: it does not end here. Raises ValueError as `JsonEnd.feed`."""
    return JsonEnd().feed(text, start)


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
