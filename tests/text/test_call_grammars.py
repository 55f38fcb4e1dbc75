"""Grammars of tool calls: whatever is drawn from one is read as calls that fit the tools' schemas, and the families' own texts are in it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fastllm.text import Tokenizer
from fastllm.text.grammar import GrammarCompiler
from fastllm.text.output import FORMATS, OutputParser
from fastllm.text.output.call_grammars import Lexicon, Unheld, lazy, required
from fastllm.text.output.json_values import JsonEnd
from tests.interface.conftest import byte_tokenizer
from tests.text.test_output import DS, OTHER, TEXTS, J, joined

END = 2
SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "deep": {"type": "object"},
            "unit": {"enum": ["c", "f"]},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "clock": {"type": "object", "properties": {}, "additionalProperties": False},
}


# Texts of two families mix forms that a model does not mix.
OWN = {
    **TEXTS,
    "deepseek-v3": f"{DS[0]}{DS[1]}function{DS[2]}weather\n```json\n{J}\n```{DS[3]}\n{DS[1]}function{DS[2]}clock\n```json\n{{}}\n```{DS[3]}{DS[4]}",
    "deepseek-v3.1": f"{DS[0]}{DS[1]}weather{DS[2]}{J}{DS[3]}{DS[1]}clock{DS[2]}{{}}{DS[3]}{DS[4]}",
    "llama-pythonic": """<|python_start|>[weather(city='S\u00e3o "Paulo"', days=3, deep={"a": [1, {"b": "}]"}]}), clock()]<|python_end|>""",
}
MORE = {**OTHER, "llama-pythonic": """[weather(city="S\u00e3o 'Paulo'", days=3), clock()]"""}


def fits(name, arguments):
    if name == "clock":
        return arguments == {}
    right = isinstance(arguments["city"], str) and type(arguments["days"]) is int and 1 <= arguments["days"] <= 9
    return right and isinstance(arguments.get("deep", {}), dict) and arguments.get("unit", "c") in ("c", "f") and set(arguments) <= set(SCHEMAS["weather"]["properties"])


def make(specials=()):
    """(tokenizer, words) with these texts as special tokens."""
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
    data = json.loads(byte_tokenizer().to_str())
    first = max(data["model"]["vocab"].values()) + 1
    for number, text in enumerate(specials):
        data["model"]["vocab"][text] = first + number
        data["added_tokens"].append({"id": first + number, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False})
    tokenizer = Tokenizer.from_tokenizer_json(json.dumps(data).encode(), settings)
    return tokenizer, Lexicon({tokenizer.id_to_piece(i): i for i in tokenizer.special_ids}, tokenizer.end_ids)


SPECIALS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "deepseek-v3": (FORMATS["deepseek-v3"].markers[0], *FORMATS["deepseek-v3"].inner),
    "deepseek-v3.1": (FORMATS["deepseek-v3"].markers[0], *FORMATS["deepseek-v3"].inner),
    "kimi-k2": (FORMATS["kimi-k2"].markers[0], *FORMATS["kimi-k2"].inner),
    "glm4.5": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "gpt-oss": ("<|channel|>", "<|message|>", "<|constrain|>", "<|call|>"),
    "granite": ("<|tool_call|>",),
    "llama-pythonic": ("<|python_start|>", "<|python_end|>"),
}


@pytest.fixture(scope="module", params=[False, True], ids=["text", "tokens"])
def models(request):
    """Of a format: (tokenizer, words, compiler), its markers being text or special tokens."""
    made = {}

    def of(name):
        specials = SPECIALS.get(name, ()) if request.param else ()
        if specials not in made:
            tokenizer, words = make(specials)
            made[specials] = tokenizer, words, GrammarCompiler(tokenizer, tokenizer.vocab_size)
        return made[specials]

    return of


def draw(tokenizer, grammar, seed, limit=3000):
    """A random text of the grammar, which hurries to its end."""
    rng, matcher, ids = np.random.default_rng(seed), grammar(), []
    prefer = [tokenizer.encode(c, add_special=False, parse_special=False)[-1] for c in '"}])']
    closers = [tokenizer.encode(c, add_special=False, parse_special=True) for c in ("</parameter>", "</arg_value>")]
    for step in range(limit):
        matcher.mask()  # waits for the thread that computes it
        for closer in closers if rng.random() < 0.2 else ():
            if matcher._matcher.validate_tokens(closer) == len(closer):
                ids += closer
                for token in closer:
                    matcher.accept(token)
                    matcher.mask()
        allowed = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
        if END in allowed and rng.random() < 0.5:
            break
        quick = [t for t in prefer if t in allowed]
        plain = [t for t in allowed if t != END and (t > 128 or 32 <= tokenizer.decode_bytes(int(t), skip_special=False)[0] < 127)]
        token = int(rng.choice(quick if quick and rng.random() < 0.4 + step / 200 else plain or allowed))
        if token == END:
            break
        ids.append(token)
        if matcher.accept(token):
            break
    else:
        pytest.fail(f"no end: {tokenizer.decode(ids, skip_special=False)!r}")
    return b"".join(tokenizer.decode_bytes(i, skip_special=False) for i in ids).decode("utf-8", "replace")


def read(name, text, sizes=()):
    parser = OutputParser(None, FORMATS[name], tools=SCHEMAS, stream=True)
    deltas, at = [], 0
    for size in sizes:
        deltas += parser.feed(text[at : at + size])
        at += size
    deltas += parser.feed(text[at:]) + parser.finish()
    assert "".join(d.content + d.reasoning for d in deltas) == ""
    return joined([d.call for d in deltas if d.call])


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_drawn_is_read_as_calls_that_fit(models, name, one):
    tokenizer, words, compiler = models(name)
    grammar = compiler.bundle(required(name, SCHEMAS, words, one, ""), "tools")
    for seed in range(6):
        text = draw(tokenizer, grammar, seed)
        calls = read(name, text, [3] * (len(text) // 3))
        assert calls, text
        assert len(calls) == 1 or not one
        for called, arguments, complete in calls:
            assert complete
            assert fits(called, json.loads(arguments)), text


@pytest.mark.parametrize(("name", "text"), [*OWN.items(), *MORE.items()])
def test_a_call_that_is_opened_is_held_to_its_end(models, name, text):
    """Token by token: the families' own texts pass, and what is behind their end is free again."""
    tokenizer, words, compiler = models(name)
    held = compiler.calls([t.as_dict() for t in lazy(name, SCHEMAS, words, False)])()
    ids = tokenizer.encode("" if FORMATS[name].at_start and text[0] in "{[" else "Well. ", add_special=False, parse_special=True)
    ids += tokenizer.encode(text, add_special=False, parse_special=True)
    masked = 0
    for token in ids:
        mask = held.mask()
        if mask is not None:
            masked += 1
            assert mask[token // 32] >> (token % 32) & 1, (text, tokenizer.decode_bytes(token, skip_special=False))
        assert not held.accept(token)
    assert masked > len(ids) // 4  # gpt-oss: a long head that may be prose


@pytest.mark.parametrize("name", FORMATS)
def test_lazy_text_stays_free(models, name):
    tokenizer, words, compiler = models(name)
    held = compiler.calls([t.as_dict() for t in lazy(name, SCHEMAS, words, False)])()
    for token in tokenizer.encode("Some <tool text, [TOOL, {brackets} and <|names|> {'name'}. " * 5, add_special=False, parse_special=False):
        assert held.mask() is None
        assert not held.accept(token)


def test_markers_in_reasoning_mean_nothing_and_one_call_can_be_the_end():
    tokenizer, words = make()
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    triggers = [t.as_dict() for t in lazy("hermes", SCHEMAS, words, True)]
    held = compiler.calls(triggers, reasoning=("<think>", "</think>"), in_reasoning=True, one=True)()
    call = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    text = f"{call} <tool_call>hm</think>a <tool_cal> b<think>{call}</think>{call}"
    ends = [held.accept(t) for t in tokenizer.encode(text, add_special=False, parse_special=False)]
    assert ends == [False] * (len(ends) - 1) + [True]


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"https?:\/\/[a-z]+", "http://ab", "http:ab"),
        ("a/b", "a/b", "ab"),
        (r"a\\/", "a\\/", "a/"),
        ("[/]", "/", "x"),
        ("", "", "x"),
        ("a\nb", "a\nb", "ab"),
    ],
)
def test_a_text_of_a_pattern(pattern, good, bad):
    tokenizer, words = make()
    grammar = GrammarCompiler(tokenizer, tokenizer.vocab_size).bundle(
        required("hermes", {"move": {"type": "object"}}, words, True, "", raw={"move": ("regex", pattern)}), "tools"
    )
    for text, right in ((good, True), (bad, False)):
        said = f'<tool_call><custom name="move">{text}</custom></tool_call>'
        assert grammar().feed(tokenizer.encode(said, add_special=False, parse_special=False)) is right


def test_what_a_form_cannot_hold_is_said():
    _, words = make()
    pattern = {"f": {"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}}}
    either = {"f": {"type": "object", "anyOf": [{"required": ["a"]}]}}
    for name in ("qwen3-coder", "glm4.5", "minimax"):
        for schemas in (pattern, either):
            with pytest.raises(Unheld):
                required(name, schemas, words, True, "")
    required("llama-pythonic", pattern, words, True, "")
    with pytest.raises(Unheld):
        lazy("llama-pythonic", either, words, True)


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_leave_while_they_are_written(name):
    text = OWN[name]
    parser = OutputParser(None, FORMATS[name], tools=SCHEMAS, stream=True)
    pieces = [d.call for c in text for d in parser.feed(c) if d.call] + [d.call for d in parser.finish() if d.call]
    calls = joined(pieces)
    assert [(n, json.loads(a), c) for n, a, c in calls] == [(n, a, True) for n, a in [("weather", json.loads(calls[0][1])), ("clock", {})]]
    first = [p for p in pieces if p.index == 0 and p.arguments]
    streams = {"qwen3-coder": 3, "glm4.5": 3, "minimax": 3, "llama-pythonic": 1}
    assert len(first) >= streams.get(name, 40)


@pytest.mark.parametrize("name", [n for n in FORMATS if n != "llama-pythonic"])
def test_a_call_that_is_cut_keeps_what_has_left(name):
    text = OWN[name]
    cut = text.index('"days": 3' if '"days": 3' in text else "days") + (8 if '"days": 3' in text else 0)
    parser = OutputParser(None, FORMATS[name], tools=SCHEMAS, stream=True)
    deltas = parser.feed(text[:cut])
    assert parser.in_call
    deltas += parser.finish()
    [(called, arguments, complete)] = joined([d.call for d in deltas if d.call])
    assert (called, complete, parser.num_calls) == ("weather", False, 0)
    assert arguments.startswith('{"city": "S')
    assert "".join(d.content for d in deltas) == ""


def test_a_long_call_is_read_once(monkeypatch):
    """Characters looked at grow with the text, not with its square."""
    looked, feed = [0], JsonEnd.feed

    def counted(self, text, at):
        end = feed(self, text, at)
        looked[0] += (len(text) if end is None else end) - at
        return end

    monkeypatch.setattr(JsonEnd, "feed", counted)
    text = '<tool_call>{"name": "weather", "arguments": {"city": "' + "x\\n" * 20_000 + '", "days": 1}}</tool_call>'
    for stream in (False, True):
        looked[0] = 0
        parser = OutputParser(None, FORMATS["hermes"], tools=SCHEMAS, stream=stream)
        for at in range(0, len(text), 3):
            parser.feed(text[at : at + 3])
        assert parser.num_calls == 1
        assert looked[0] < 2 * len(text)
