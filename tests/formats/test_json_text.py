"""Strict JSON: what Python's parser would let through, and what would exhaust it."""

from __future__ import annotations

import pytest

from fastllm.core.errors import ModelFileError
from fastllm.formats.json_text import parse_json, read_json


def parse(raw: bytes):
    return parse_json(raw, "config.json", "/m/config.json")


def test_ordinary_json_is_read():
    assert parse('{"a": [1, -2.5, true, null, "größe"], "max": 1000000000000000019884624838656}'.encode()) == {
        "a": [1, -2.5, True, None, "größe"],
        "max": 1000000000000000019884624838656,
    }


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b'{"a": 1, "b": 2, "a": 3}', "'a' appears twice"),
        (b'{"x": {"a": 1, "a": 1}}', "appears twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": Infinity}', "Infinity"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1e400}', "too large"),
        (b'{"a": ' + b"9" * 41 + b"}", "41 digits"),
        (b'{"a": ' + b"9" * 100_000 + b"}", "digits"),
        (b"[" * 65 + b"]" * 65, "nested more than 64"),
        (b"[" * 1_000_000, "nested"),
        (b'{"a":' * 100_000, "nested"),
        (b'{"a": "\\ud800"}', "half a surrogate"),
        (b'{"\\udc00": 1}', "half a surrogate"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'\xef\xbb\xbf{"a": 1}', "JSON"),
        ('{"a": 1}'.encode("utf-16"), "UTF-8"),
        (b'{"a": 1', "not valid JSON"),
        (b"", "not valid JSON"),
        (b'{"a": 1} x', "Extra data"),
        (b"{'a': 1}", "not valid JSON"),
    ],
)
def test_anything_else_is_refused(raw, text):
    with pytest.raises(ModelFileError, match=text) as caught:
        parse(raw)
    assert caught.value.message.isprintable()
    assert caught.value.fix


def test_the_error_names_the_byte():
    with pytest.raises(ModelFileError, match="at byte 17") as caught:
        parse_json('{"größe": 1, ]'.encode(), "x", "p", base=2)
    assert caught.value.fields["offset"] == 17


def test_too_many_parts_are_refused_before_parsing(monkeypatch):
    monkeypatch.setattr("fastllm.formats.json_text.MAX_PARTS", 10)
    with pytest.raises(ModelFileError, match="11 brackets and commas"):
        parse(b"[" + b"1," * 10 + b"1]")


def test_a_file_must_hold_an_object_of_limited_size(write):
    assert read_json(write("a.json", b'{"a": 1}')) == {"a": 1}
    with pytest.raises(ModelFileError, match="list, not an object"):
        read_json(write("b.json", b"[1]"))
    with pytest.raises(ModelFileError, match="9 bytes; the limit for this kind is 8"):
        read_json(write("c.json", b'{"a": 10}'), 8)
