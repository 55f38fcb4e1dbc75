"""What can be said about a JSON schema without compiling it: that it is one, how deep it is, and that it refers to nothing outside of itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from fastllm.core.errors import InvalidSchema

__all__ = ["check_schema", "refused"]

MAX_DEPTH: Final = 64
_TYPES: Final = frozenset("string number integer boolean object array null".split())
_SCHEMA: Final = (
    *("items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties", "contentSchema"),
)
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(value: Any) -> bool:
    return _number(value) and value >= 0 and (isinstance(value, int) or value.is_integer())  # 2.0 is an integer in JSON Schema


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_Check = tuple[Callable[[Any], bool], str]
_NUMBER: Final[_Check] = (_number, "a number")
_BOUND: Final[_Check] = (lambda value: isinstance(value, bool) or _number(value), "a number")  # a boolean is draft 4's
_COUNT: Final[_Check] = (_count, "an integer of at least 0")
_TEXT: Final[_Check] = (lambda value: isinstance(value, str), "a string")
_FLAG: Final[_Check] = (lambda value: isinstance(value, bool), "a boolean")
_ANY: Final[_Check] = (lambda value: True, "anything")
_KEYWORDS: Final[dict[str, _Check]] = {
    "enum": (lambda value: isinstance(value, list), "a list"),
    "required": (_names, "a list of names"),
    "dependentRequired": (lambda value: isinstance(value, dict) and all(map(_names, value.values())), "an object of lists of names"),
    "multipleOf": (lambda value: _number(value) and value > 0, "a number above 0"),
    **dict.fromkeys(("minimum", "maximum"), _NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _BOUND),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains"), _COUNT),
    **dict.fromkeys(("pattern", "format", "contentEncoding", "contentMediaType", "$ref", "$dynamicRef", "$anchor", "$id", "$schema"), _TEXT),
    "uniqueItems": _FLAG,
}
"""Keyword -> what its value must be, as the meta-schema has it (JSON Schema 2020-12). Annotations (title, default, examples, …) hold nobody
to anything, so theirs is not looked at."""


def refused(what: str, why: str, param: str, fix: str = "") -> InvalidSchema:
    """A schema, pattern or grammar that is not taken."""
    return InvalidSchema(f"{param}: {what}{': ' if why else ''}{why}", who=param, why=why, fix=fix or f"correct {param}, or leave it out", param=param)


def check_schema(schema: Any, param: str) -> None:
    """Raises InvalidSchema for what is no JSON schema, is too deep, or refers to another document. Unknown keywords mean nothing, as JSON
    Schema has it."""
    if not isinstance(schema, dict | bool):
        raise refused(f"the schema is a {type(schema).__name__}", "a JSON schema is an object or a boolean", param)
    _check_depth(schema, param)
    waiting = [(schema, "the schema")]
    while waiting:
        part, where = waiting.pop()
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            raise refused(f"{where} is no schema", "a JSON schema is an object or a boolean", param)
        kinds = part.get("type", [])
        named = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(named, list) or ("type" in part and not named) or not all(isinstance(k, str) and k in _TYPES for k in named):
            raise refused(f"{where} has the type {kinds!r:.60}", f"types are {', '.join(sorted(_TYPES))}", param)
        for key, value in part.items():
            right, what = _KEYWORDS.get(key, _ANY)
            if not right(value):
                raise refused(f"{key} of {where} is {value!r:.60}", f"it must be {what}", param)
        waiting += _below(part, where, param)


def _below(part: dict[str, Any], where: str, param: str) -> Iterator[tuple[Any, str]]:
    for key in _SCHEMA:
        if key == "items" and isinstance(part.get(key), list):  # until 2020-12, what is now prefixItems
            yield from ((item, f"{key} of {where}") for item in part[key])
        elif key in part:
            yield part[key], f"{key} of {where}"
    for key in _LISTS:
        if key in part and (not isinstance(part[key], list) or not part[key]):
            raise refused(f"{key} of {where} is no list of schemas", "", param)
        yield from ((item, f"{key} of {where}") for item in part.get(key, []))
    for key in _MAPS:
        if not isinstance(part.get(key, {}), dict):
            raise refused(f"{key} of {where} is no object", "", param)
        yield from ((item, f"'{name[:60]}' of {where}") for name, item in part.get(key, {}).items())
    either = part.get("dependencies", {})
    if not isinstance(either, dict):
        raise refused(f"dependencies of {where} is no object", "", param)
    yield from ((item, f"the dependency '{name[:60]}' of {where}") for name, item in either.items() if not _names(item))


def _check_depth(schema: Any, param: str) -> None:
    """Not recursive: the depth is a stranger's."""
    layer, depth = [schema], 0
    while layer:
        depth += 1
        if depth > MAX_DEPTH:
            raise refused(f"the schema is deeper than {MAX_DEPTH} levels", "", param)
        below: list[Any] = []
        for part in layer:
            if isinstance(part, dict):
                reference = part.get("$ref")
                if isinstance(reference, str) and not reference.startswith("#"):
                    raise refused(f"the reference {reference[:80]!r} leaves the schema", "only local references (#/…) are followed", param)
                below += part.values()
            elif isinstance(part, list):
                below += part
        layer = below
