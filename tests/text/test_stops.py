"""Stop texts count in the answer only, however the text arrives."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastllm.text.output import FORMATS, REASONING, OutputParser
from fastllm.text.stops import AnswerStops

CALL = f'<tool_call>\n{json.dumps({"name": "f", "arguments": {"a": "x END y"}})}\n</tool_call>'
THOUGHT = "<think>so END is\n\nit</think>"


def parser(stream: bool = False) -> OutputParser:
    return OutputParser(REASONING["think"], FORMATS["hermes"], tools={"f": {}}, stream=stream)


def cut(text: str, stops: list[str], stream: bool = False, ends: tuple[int, ...] = ()) -> tuple[str, str | None]:
    """What AnswerStops lets through of a text that comes in pieces with these ends."""
    finder, out, start = AnswerStops(parser(stream), stops), "", 0
    for end in (*sorted(ends), len(text)):
        out += finder.push(text[start:end])
        start = max(start, end)
        if finder.stopped is not None:
            return out, finder.stopped
    return out + finder.finish(), finder.stopped


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "stops", "left", "stopped"),
    [
        ("one END two", ["END"], "one ", "END"),
        (f"{THOUGHT}one END two", ["END"], f"{THOUGHT}one ", "END"),
        (f"{THOUGHT}\n\none\n\ntwo", ["\n\n"], f"{THOUGHT}\n\none", "\n\n"),
        (THOUGHT, ["END", "</think>"], THOUGHT, None),
        (CALL, ["END", '"name"', "<tool_call>", "}"], CALL, None),
        (f"see {CALL}{CALL} then END.", ["END"], f"see {CALL}{CALL} then ", "END"),
        (f"see\n{CALL}", ["\n"], f"see\n{CALL}", None),
        ("a <tool_cat> b", ["l_c"], "a <too", "l_c"),
        ("a <tool_call> no END call", ["END"], "a <tool_call> no ", "END"),
        ("ends in blanks\n\n", ["\n\n"], "ends in blanks", "\n\n"),
        ("ends in EN", ["END"], "ends in EN", None),
        (f"EN{CALL}D", ["END"], f"EN{CALL}D", None),
    ],
)
def test_only_in_the_answer(text, stops, left, stopped, stream):
    assert cut(text, stops, stream) == (left, stopped)
    assert cut(text, stops, stream, tuple(range(len(text)))) == (left, stopped)


PIECES = st.lists(st.sampled_from([CALL, THOUGHT, "END", "E", "N", "<tool_", "call>", "<think>", "</think>", "\n", " x ", "{"]), max_size=8)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(PIECES, st.lists(st.integers(0, 400), max_size=6), st.booleans())
def test_pieces_do_not_matter_and_nothing_is_lost(pieces, ends, stream):
    text = "".join(pieces)
    whole = cut(text, ["END", "\n\n"], stream)
    assert cut(text, ["END", "\n\n"], stream, tuple(min(e, len(text)) for e in ends)) == whole
    left, stopped = whole
    assert text.startswith(left + (stopped or ""))
    assert stopped or left == text
    one = parser(stream)
    content = "".join(d.content for d in [*one.feed(left), *one.finish()])
    assert "END" not in content
