"""Reasoning, content and tool calls out of a model's text, however it arrives."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastllm.text.output import FORMATS, REASONING, OutputParser, detect_format, detect_reasoning, json_end, starts_in_reasoning
from fastllm.text.output.region import Region

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "deep": {"type": "object"}}}
TOOLS = {"weather": WEATHER, "clock": {"type": "object", "properties": {}}}
ONE = {"city": 'São "Paulo"', "days": 3, "deep": {"a": [1, {"b": "}]"}]}}
J = json.dumps(ONE, ensure_ascii=False)
# name -> (text with two calls around content, expected content before, after)
DS = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
XML = '<parameter=city>\nSão "Paulo"\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=deep>\n' + json.dumps(ONE["deep"]) + "\n</parameter>\n"
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
GLM = f'<arg_key>city</arg_key>\n<arg_value>São "Paulo"</arg_value>\n<arg_key>days</arg_key><arg_value>3</arg_value><arg_key>deep</arg_key><arg_value>{json.dumps(ONE["deep"])}</arg_value>'
MM = f'<parameter name="city">São "Paulo"</parameter><parameter name="days">3</parameter><parameter name="deep">{json.dumps(ONE["deep"])}</parameter>'
TEXTS = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {J}}}\n</tool_call>\n<tool_call>{{"name": "clock", "arguments": {{}}}}</tool_call>',
    "qwen3-coder": f"<tool_call>\n<function=weather>\n{XML}</function>\n</tool_call>\n<tool_call><function=clock></function></tool_call>",
    "llama3-json": f'<|python_tag|>{{"name": "weather", "parameters": {J}}}; {{"name": "clock", "parameters": {{}}}}',
    "llama-pythonic": f"<|python_start|>[weather(city='São \"Paulo\"', days=3, deep={ONE['deep']!r}), clock()]<|python_end|>",
    "mistral": f'[TOOL_CALLS][{{"name": "weather", "arguments": {J}}}, {{"name": "clock", "arguments": {{}}}}]',
    "deepseek-v3": f"{DS[0]}{DS[1]}function{DS[2]}weather\n```json\n{J}\n```{DS[3]}\n{DS[1]}clock{DS[2]}{{}}{DS[3]}{DS[4]}",
    "glm4.5": f"<tool_call>weather\n{GLM}\n</tool_call>\n<tool_call>clock</tool_call>",
    "kimi-k2": f"{KIMI}{J}<|tool_call_end|><|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>{{}}<|tool_call_end|><|tool_calls_section_end|>",
    "minimax": f'<minimax:tool_call>\n<invoke name="weather">{MM}</invoke>\n<invoke name="clock"></invoke>\n</minimax:tool_call>',
    "phi": f'functools[{{"name": "weather", "arguments": {J}}}, {{"name": "clock", "arguments": {{}}}}]',
    "granite": f'<|tool_call|>[{{"name": "weather", "arguments": {J}}}, {{"name": "clock", "arguments": {{}}}}]',
    "gpt-oss": f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{J}<|call|>"
    "<|start|>assistant<|channel|>commentary to=functions.clock<|message|>{}<|call|>",
}
OTHER = {
    "minimax": f'<tool_calls>\n{{"name": "weather", "arguments": {J}}}\n{{"name": "clock", "arguments": {{}}}}\n</tool_calls>',
    "mistral": f"[TOOL_CALLS]weather[ARGS]{J}[TOOL_CALLS]clock[ARGS]{{}}",
    "phi": f'<|tool_call|>[{{"name": "weather", "arguments": {J}}}, {{"name": "clock", "arguments": {{}}}}]<|/tool_call|>',
    "llama3-json": f'{{"name": "weather", "parameters": {J}}}\n; {{"name": "clock", "parameters": {{}}}}',
    "llama-pythonic": f"[weather(city='São \"Paulo\"', days=3, deep={ONE['deep']!r}), clock()]",
}
ALL = [*TEXTS.items(), *OTHER.items()]


def parse(text, name=None, sizes=None, reasoning=None, **options):
    """(reasoning, content, calls) of a text that arrives in pieces of these sizes, then whole."""
    parser = OutputParser(REASONING.get(reasoning), FORMATS.get(name), tools=TOOLS, **options)
    deltas, at = [], 0
    for size in sizes or []:
        deltas += parser.feed(text[at : at + size])
        at += size
    deltas += parser.feed(text[at:]) + parser.finish()
    for delta in deltas:
        assert bool(delta.reasoning) + bool(delta.content) + (delta.call is not None) == 1
        assert "".join(text[first:end] for first, end in delta.spans) == delta.content
    calls = joined([d.call for d in deltas if d.call])
    assert parser.num_calls == len(calls)
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas), [(name, json.loads(args)) for name, args, _ in calls]


def joined(pieces):
    """[name, arguments, complete] of each call, out of its pieces, which come in order."""
    calls = []
    for piece in pieces:
        if piece.name:
            assert piece.index == len(calls)
            calls.append([piece.name, "", False])
        assert piece.index == len(calls) - 1
        assert not calls[-1][2]
        calls[-1][1] += piece.arguments
        calls[-1][2] |= piece.complete
    return calls


CALLS = [("weather", ONE), ("clock", {})]


@pytest.mark.parametrize(("name", "text"), ALL)
def test_calls_of_every_family(name, text):
    assert parse(text, name) == ("", "", CALLS)
    assert parse(text, name, [1] * len(text)) == ("", "", CALLS)


@pytest.mark.parametrize(("name", "text"), [(n, t) for n, t in ALL if not (FORMATS[n].at_start and t[0] in "[{")])
def test_content_before_a_call_is_content_without_the_blank(name, text):
    assert parse("I will look.\n\n" + text, name, [3] * 20) == ("", "I will look.", CALLS)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.sampled_from(ALL), st.lists(st.integers(1, 9), max_size=60), st.sampled_from(["", "Well: ", "  "]), st.sampled_from(["", "<", " done", "\n"]))
def test_pieces_change_nothing(case, sizes, before, after):
    name, text = case
    whole = parse(before + text + after, name)
    assert parse(before + text + after, name, sizes) == whole


@settings(max_examples=400, derandomize=True, deadline=None)
@given(
    st.sampled_from([*FORMATS, None]),
    st.sampled_from([None, "think", "mistral", "gpt-oss"]),
    st.lists(st.sampled_from(["<tool_call>", "{", '"name"', "}", "[", "]", "<think>", "</think>", "a", " ", "\n", "[TOOL_CALLS]", "functools[", "<", "t", "<|", "weather("]), max_size=14),
    st.lists(st.integers(1, 5), max_size=30),
)
def test_text_that_holds_no_call_is_conserved(name, reasoning, parts, sizes):
    text = "".join(parts)
    thought, content, calls = parse(text, name, sizes, reasoning, strip=False)
    assert calls == []
    markers = [] if reasoning is None else [REASONING[reasoning].opening, REASONING[reasoning].closing]
    rest = thought + content
    if not any(m in text for m in markers):
        assert (content if reasoning is None else rest) == text
    else:
        assert sorted(rest) == sorted(_without_markers(text, REASONING[reasoning]))


def _without_markers(text, form):
    """The text without the markers that open and close reasoning, found one after the other."""
    out, inside = "", False
    while text:
        marker = form.closing if inside else form.opening
        at = text.find(marker)
        if at < 0:
            return out + text
        out, text, inside = out + text[:at], text[at + len(marker) :], not inside
    return out


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": '),
        ("hermes", "<tool_call>{bad json}</tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a"}} </tool_call>'),
        ("qwen3-coder", "<tool_call><function=weather><parameter=city>x"),
        ("qwen3-coder", "<tool_call>weather</tool_call>"),
        ("llama3-json", '{"no": "call"}'),
        ("llama3-json", "{ this is a set }"),
        ("llama-pythonic", "[1, 2, 3]"),
        ("llama-pythonic", "[weather('positional')]"),
        ("llama-pythonic", "[see(1) the note]"),
        ("mistral", "[TOOL_CALLS]{}"),
        ("deepseek-v3", DS[0] + "nothing"),
        ("glm4.5", "<tool_call>not a name!</tool_call>"),
        ("kimi-k2", "<|tool_calls_section_begin|>x"),
        ("minimax", "<tool_calls>\nx\n</tool_calls>"),
        ("phi", "functools[]"),
        ("granite", "<|tool_call|>[1]"),
    ],
)
def test_what_is_no_call_comes_back_as_content(name, text):
    assert parse("See: " + text if text[0] not in "[{" else text, name, [2] * len(text), strip=False) == ("", ("See: " if text[0] not in "[{" else "") + text, [])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3-json", '{"name": "Bob", "age": 3}'),
        ("llama3-json", '{"name": "Bob", "parameters": {}}'),
        ("llama3-json", '{"name": "weather", "wind": {"city": "x"}}'),
        ("llama-pythonic", "[print(a=1)]"),
        ("hermes", '<tool_call>{"name": "Bob", "arguments": {}}</tool_call>'),
    ],
)
def test_what_calls_no_known_tool_is_content(name, text, stream):
    assert parse(text, name, [3] * 20, stream=stream, strip=False) == ("", text, [])


def test_what_is_no_call_is_not_held_back():
    parser = OutputParser(None, FORMATS["llama3-json"], tools=TOOLS, stream=True)
    assert "".join(d.content for d in parser.feed('{"city": "x')) == '{"city": "x'


def test_markers_in_a_form_are_its_own():
    text = json.dumps({"a": "<think>b</think>", "c": "<tool_call><function=clock></function></tool_call>"})
    assert parse(f"<think>hm</think>{text}", "qwen3-coder", [2] * 9, reasoning="think", form=True) == ("hm", text, [])
    assert parse(TEXTS["qwen3-coder"], "qwen3-coder", [2] * 9, reasoning="think", form=True)[2] == CALLS


def test_deep_nesting_is_content_and_quick():
    text = "<tool_call>" + "[" * 100_000
    assert parse(text, "hermes", [5000] * 20, strip=False) == ("", text, [])
    text = "[" + "(" * 5000
    assert parse(text, "llama-pythonic", [500] * 10, strip=False)[1] == text


def test_reasoning():
    assert parse("<think>hm\n</think>\n\nYes.", reasoning="think") == ("hm\n", "Yes.", [])
    assert parse("hm</think>Yes.", reasoning="think", in_reasoning=True) == ("hm", "Yes.", [])
    assert parse("only thinking", reasoning="think", in_reasoning=True) == ("only thinking", "", [])
    assert parse("a </thin", reasoning="think", in_reasoning=True) == ("a </thin", "", [])
    assert parse("no <thin ice", reasoning="think") == ("", "no <thin ice", [])
    text = "<think>call it</think>\n" + TEXTS["hermes"]
    assert parse(text, "hermes", [4] * 100, reasoning="think") == ("call it", "", CALLS)
    inside = "<think>" + TEXTS["hermes"] + "</think>ok"
    assert parse(inside, "hermes", reasoning="think") == (TEXTS["hermes"], "ok", [])  # thoughts call nothing
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant" + TEXTS["gpt-oss"]
    assert parse(text, "gpt-oss", [3] * 90, reasoning="gpt-oss") == ("hm", "", CALLS)
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    assert parse(text, "gpt-oss", [3] * 90, reasoning="gpt-oss") == ("hm", "Yes.", [])


def test_reasoning_that_stays_in_the_content_calls_nothing():
    options = {"reasoning": "think", "plain": True, "stream": True}
    for sizes in ([], [3] * 200):
        thought = f"<think>{TEXTS['hermes']}</think>\n"
        assert parse(thought + TEXTS["hermes"], "hermes", sizes, **options) == ("", thought.rstrip(), CALLS)
        assert parse(thought.removeprefix("<think>"), "hermes", sizes, in_reasoning=True, **options)[1:] == (thought.removeprefix("<think>"), [])
        bare = OTHER["llama3-json"]
        assert parse("<think>hm</think>" + bare, "llama3-json", sizes, **options) == ("", "<think>hm</think>", CALLS)
        assert parse("<think>hm", "hermes", sizes, **options) == ("", "<think>hm", [])


def test_a_prompt_tells_where_the_answer_starts():
    think = REASONING["think"]
    assert starts_in_reasoning("<|assistant|><think>\n", think)
    assert not starts_in_reasoning("<think>old</think>answer<|user|>next<|assistant|>", think)
    assert not starts_in_reasoning("<|assistant|><think>\n\n</think>\n\n", think)


def test_templates_tell_the_format():
    assert detect_format("{{ '<tool_call>' }}") == "hermes"
    assert detect_format("<tool_call><function=example>") == "qwen3-coder"
    assert detect_format("<tool_call>{{ x }}<arg_key>") == "glm4.5"
    assert detect_format("[TOOL_CALLS]") == "mistral"
    assert detect_format("{{ messages }}") is None
    assert detect_format(None) is None
    assert detect_reasoning("…<think>…") == "think"
    assert detect_reasoning("[THINK]") == "mistral"
    assert detect_reasoning("plain") is None
    assert detect_reasoning(None) is None


def test_json_ends():
    assert json_end('{"a": "}\\"]"} x', 0) == 13
    assert json_end("[1, [2", 0) is None
    assert json_end("", 0) is None
    for bad in ("x", "[}", '{"a": ]'):
        with pytest.raises(ValueError, match="character"):
            json_end(bad, 0)


def test_arguments_are_json():
    for bad in ("NaN", "Infinity", "1e999"):
        assert parse(f'<tool_call>{{"name": "clock", "arguments": {{"a": {bad}}}}}</tool_call>', "hermes")[2] == []
    text = "<tool_call>clock<arg_key>a</arg_key><arg_value>NaN</arg_value></tool_call>"
    assert parse(text, "glm4.5")[2] == [("clock", {"a": "NaN"})]


def test_a_call_of_gpt_oss_ends_with_the_answer():
    text = "<|channel|>commentary to=functions.clock json<|message|>{}"
    assert parse(text, "gpt-oss", [5] * 20) == ("", "", [("clock", {})])


UNITS = [
    ("hermes", '<tool_call><custom name="a">', "</custom>x"),
    ("hermes", '<tool_call>{"name":"', "}"),
    ("qwen3-coder", "<tool_call><function=weather><parameter=k>", "</parameter>x"),
    ("mistral", "[TOOL_CALLS]weather[ARGS]{", "x"),
]


@pytest.mark.parametrize("end", [False, True], ids=["cut", "no call"])
@pytest.mark.parametrize(("name", "unit", "wrong"), UNITS)
def test_calls_that_are_none_are_not_read_again_and_again(monkeypatch, name, unit, wrong, end):
    looked, feed = [0], Region.feed

    def counted(self, text, **more):
        looked[0] += len(text)
        return feed(self, text, **more)

    monkeypatch.setattr(Region, "feed", counted)
    parser, text = OutputParser(None, FORMATS[name], strip=False), unit * 4000 + wrong * end
    deltas = [d for at in range(0, len(text), 9) for d in parser.feed(text[at : at + 9])] + parser.finish()
    assert "".join(d.content for d in deltas) == text
    assert looked[0] < 30 * len(text)


def test_blanks_cost_no_time():
    text = "<|tool_calls_section_begin|><|tool_call_begin|>functions.clock:0<|tool_call_argument_begin|>" + " " * 100_000
    assert parse(text, "kimi-k2", [25_000] * 4, strip=False)[2] == []


def test_every_marker_of_a_call_is_known_as_markup():
    """Special tokens are skipped unless a marker names them, so each must be named."""
    for name, text in ALL:
        form = FORMATS[name]
        named = [*form.markers, *form.inner, *form.dropped]
        for token in re.findall(r"<[|｜]\w[^<>]*?[|｜]>|\[[A-Z_]{4,}\]", text):
            assert any(token in marker for marker in named), (name, token)
