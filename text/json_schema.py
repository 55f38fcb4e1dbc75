"""What can be said about a JSON schema without compiling it: that it is one, how deep it is, and that it refers to nothing outside of itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from fastllm.core.errors import InvalidSchema

__all__ = ["check_schema", "refused"]

MAX_DEPTH: Final = 64
_TYPES: Final = frozenset("string number integer boolean object array null".split())
_SCHEMA: Final = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def refused(what: str, why: str, param: str) -> InvalidSchema:
    """A schema, pattern or grammar that is not taken."""
    return InvalidSchema(f"{param}: {what}{': ' if why else ''}{why}", who=param, why=why, fix=f"correct {param}, or leave it out", param=param)


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
        if not isinstance(named, list) or not all(isinstance(k, str) and k in _TYPES for k in named):
            raise refused(f"{where} has the type {kinds!r:.60}", f"types are {', '.join(sorted(_TYPES))}", param)
        if not isinstance(part.get("enum", []), list):
            raise refused(f"the enum of {where} is no list", "", param)
        needed = part.get("required", [])
        if not isinstance(needed, list) or not all(isinstance(name, str) for name in needed):
            raise refused(f"required of {where} is no list of names", "", param)
        waiting += _below(part, where, param)


def _below(part: dict[str, Any], where: str, param: str) -> Iterator[tuple[Any, str]]:
    for key in _SCHEMA:
        if key in part and not (key == "items" and isinstance(part[key], list)):
            yield part[key], f"{key} of {where}"
    for key in _LISTS:
        if not isinstance(part.get(key, []), list):
            raise refused(f"{key} of {where} is no list", "", param)
        yield from ((item, f"{key} of {where}") for item in part.get(key, []))
    for key in _MAPS:
        if not isinstance(part.get(key, {}), dict):
            raise refused(f"{key} of {where} is no object", "", param)
        yield from ((item, f"'{name[:60]}' of {where}") for name, item in part.get(key, {}).items())


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
