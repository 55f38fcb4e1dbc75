"""What is no JSON schema is refused before anybody tries to hold an answer to it: each keyword's own type."""

from __future__ import annotations

import pytest

from fastllm.core.errors import InvalidSchema
from fastllm.text.json_schema import _KEYWORDS, _LISTS, _MAPS, _SCHEMA, check_schema

NUMBERS = ("minimum", "maximum", "multipleOf", "exclusiveMinimum", "exclusiveMaximum")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains")
TEXTS = ("pattern", "format", "contentEncoding", "contentMediaType", "$ref", "$dynamicRef", "$anchor", "$id", "$schema")
WRONG = {
    **dict.fromkeys(NUMBERS, ("x", None, [1], {})),
    "multipleOf": ("x", 0, -1, True),
    **dict.fromkeys(COUNTS, ("1", -1, 1.5, True, None, 1e999)),
    **dict.fromkeys(TEXTS, (5, None, ["a"], {}, False)),
    "uniqueItems": ("true", 1, None),
    "enum": ("a", {}, None, 5),
    "required": ("a", True, [1], {}, None),
    "dependentRequired": ([], {"a": "b"}, {"a": [1]}),
    "type": ("strin", 5, ["string", 5], [], None, {}),
    "dependencies": ([], {"a": 5}, {"a": [1]}),
    **dict.fromkeys(_SCHEMA, ("x", 5, None)),
    **dict.fromkeys(_LISTS, ("x", {}, [], [5], None)),
    **dict.fromkeys(_MAPS, ("x", [], {"a": 5}, None)),
}
RIGHT = {
    **dict.fromkeys(NUMBERS, (1, 0.5)),
    **dict.fromkeys(COUNTS, (0, 2, 2.0, 10**400)),
    **dict.fromkeys(TEXTS, ("#a",)),
    "uniqueItems": (True, False),
    "enum": ([], [1, "a", None]),
    "required": ([], ["a"]),
    "dependentRequired": ({}, {"a": ["b"]}),
    "type": ("string", ["string", "null"]),
    "dependencies": ({"a": ["b"], "c": {"type": "object"}},),
    "exclusiveMinimum": (1, True),
    "items": ({}, True, [{"type": "string"}]),
    **{key: ({}, False, {"type": "string"}) for key in _SCHEMA if key != "items"},
    **dict.fromkeys(_LISTS, ([{}], [True, {"type": "null"}])),
    **dict.fromkeys(_MAPS, ({}, {"a": True}, {"a": {"type": "null"}})),
    "title": (5,),  # an annotation
    "x-unknown": ("anything",),
}


def test_every_keyword_has_wrong_values_here():
    assert _KEYWORDS.keys() | {*_SCHEMA, *_LISTS, *_MAPS} <= WRONG.keys() & RIGHT.keys()


@pytest.mark.parametrize("key", WRONG)
def test_a_keyword_of_the_wrong_type_is_no_schema_at_any_depth(key):
    for value in WRONG[key]:
        for schema in ({key: value}, {"properties": {"a": {"items": {"anyOf": [{}, {key: value}]}}}}, {"items": [{key: value}]}):
            with pytest.raises(InvalidSchema, match=r"^here: "):
                check_schema(schema, "here")


@pytest.mark.parametrize("key", RIGHT)
def test_what_the_meta_schema_allows_passes(key):
    for value in RIGHT[key]:
        check_schema({key: value}, "here")
