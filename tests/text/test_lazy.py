"""What begins in the middle of an answer: the end of reasoning that takes too long, and calls, which prose that names their markers is not."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fastllm.text.grammar import GrammarCompiler
from fastllm.text.output import FORMATS, OutputParser
from fastllm.text.output.call_grammars import lazy
from tests.text.test_call_grammars import OWN, SCHEMAS, make

THINK = ("<think>", "</think>")


@pytest.fixture(scope="module")
def model():
    """(tokenizer, words, compiler): markers are text."""
    tokenizer, words = make()
    return tokenizer, words, GrammarCompiler(tokenizer, tokenizer.vocab_size)


def said(tokenizer, held, text):
    """What comes out if a model wants to say this: where the mask does not let it, the first token that it lets."""
    ids = []
    for token in tokenizer.encode(text, add_special=False, parse_special=False):
        mask = held.mask()
        for _ in range(40):  # what is forced comes between
            if mask is None or mask[token // 32] >> (token % 32) & 1:
                break
            ids.append(int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0]))
            held.accept(ids[-1])
            mask = held.mask()
        ids.append(token)
        held.accept(token)
    return b"".join(tokenizer.decode_bytes(i, skip_special=False) for i in ids).decode()


@pytest.mark.parametrize(
    ("thinks", "text", "wanted"),
    [
        (True, "a b c d<think>e f g h", "a b</think> c d<think>e f g h"),
        (True, "</think>b<think>c d e f g h i j</think>k", "</think>b<think>c d e f g h i j</think>k"),
        (False, "\n <think>a b c</think>d<think>e f g", "\n <think>a b</think> c</think>d<think>e f g"),
        (False, "See <think> and more of it", "See <think> and more of it"),
        (False, "<thin ice, and <think> and more of it", "<thin ice, and <think> and more of it"),
    ],
)
def test_a_budget_is_for_the_first_reasoning_only(model, thinks, text, wanted):
    tokenizer, _, compiler = model
    limit = 8 if text.startswith(THINK[1]) else 3  # the marker counts, too
    assert said(tokenizer, compiler.budget(None, limit, THINK, thinks)(), text) == wanted


def test_a_budget_leaves_forms_and_calls_alone(model):
    tokenizer, words, compiler = model
    text = "<think> b c d e f"
    form = compiler.choice([text])
    assert said(tokenizer, compiler.budget(form, 2, THINK, False)(), text) == text
    quoted = json.dumps({"a": f"{text}</think>"})
    form = compiler.after(compiler.json_object(), "</think>")
    assert said(tokenizer, compiler.budget(form, 2, THINK, True)(), f"ab</think>{quoted}") == f"ab</think>{quoted}"
    triggers = [t.as_dict() for t in lazy("hermes", SCHEMAS, words, False)]
    call = '<tool_call>{"name": "weather", "arguments": {"city": "<think> b c d", "days": 1}}</tool_call> <think> more'
    held = compiler.calls(triggers, reasoning=THINK)
    assert said(tokenizer, compiler.budget(held, 2, THINK, False)(), call) == call


PROSE = ("In docs: `{}` opens it.", "{}", "See {}{{this: 1}}", "{}{}{}", '{}{{"name": "nobody", "arguments": {{}}}}', "{}weather is fine", "{}" + " " * 12 + '{{"name": "weather"')


@pytest.mark.parametrize("name", FORMATS)
def test_a_marker_in_prose_opens_no_call_and_a_call_after_it_does(model, name):
    tokenizer, words, compiler = model
    triggers = [t.as_dict() for t in lazy(name, SCHEMAS, words, False)]
    texts = [prose.format(*[marker] * 3) for marker in FORMATS[name].markers for prose in PROSE]
    texts += ['{"name": "weather", "wind": 3}', '{"name": "Bob", "parameters": {}}', "[1, 2]", "[see(a)]"]
    for text in texts:
        held = compiler.calls(triggers)()
        for token in tokenizer.encode(text, add_special=False, parse_special=False):
            assert held.mask() is None, text
            held.accept(token)
        parser = OutputParser(None, FORMATS[name], tools=SCHEMAS, stream=True, strip=False)
        deltas = parser.feed(text) + parser.finish()
        assert all(d.call is None for d in deltas), text
        if name != "gpt-oss":  # which has markers that are nobody's text
            assert "".join(d.content for d in deltas) == text
    if not FORMATS[name].at_start:
        held, masked = compiler.calls(triggers)(), 0
        for token in tokenizer.encode(f"{texts[0]} {OWN[name]}", add_special=False, parse_special=False):
            masked += held.mask() is not None
            held.accept(token)
        assert masked > 40


def pieces(tokenizer):
    """A text as tokens of at most three characters, cut anywhere: as no tokenizer would, but a model may."""
    by_text = {tokenizer.decode_bytes(i, skip_special=False).decode("utf-8", "replace"): i for i in range(tokenizer.vocab_size)}

    def cut(rng, text):
        ids = []
        while text:
            size = next(n for n in rng.permutation([1, 2, 3]) if text[:n] in by_text or n == 1)
            ids.append(by_text[text[:size]])
            text = text[size:]
        return ids

    return cut


@pytest.mark.parametrize("seed", range(20))
def test_a_banned_text_cannot_be_written_in_any_tokens(seed):
    """Before each token, exactly those are banned that would complete a text: told by looking for it in what would stand there then."""
    tokenizer, _ = make(("ool", "_ca", "l>", "<t", "|a", "l>x", "a|>", ">b<", "<tool_call>", "x<<"))
    rng = np.random.default_rng(seed)
    texts = ["<tool_call>", "<|a|>b", "<<"]
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size + 9)
    said, held = b"", compiler.banned(None, texts)()
    spelt = [tokenizer.decode_bytes(i, skip_special=False) for i in range(tokenizer.vocab_size)]
    for token in pieces(tokenizer)(rng, "a <tool_<tool_call <|a|<tool_call>x<|a|>b<"[: int(rng.integers(8, 42))]):
        mask = held.mask()
        allowed = np.ones(tokenizer.vocab_size + 9, bool) if mask is None else np.unpackbits(mask.view(np.uint8), bitorder="little").astype(bool)
        wanted = [not any(text.encode() in said[-20:] + raw and text.encode() not in said[-20:] for text in texts) for raw in spelt] + [True] * 9
        wanted += [False] * (len(allowed) - len(wanted))
        assert [i for i, (a, b) in enumerate(zip(allowed, wanted, strict=True)) if bool(a) != b] == []
        if not allowed[token]:
            break
        said += spelt[token]
        assert not held.accept(token)
    assert not any(text.encode() in said for text in texts)


def test_what_a_form_writes_is_not_banned(model):
    tokenizer, _, compiler = model
    made = compiler.banned(compiler.choice(["<tool_call>"]), ["<tool_call>"])()
    assert made.held
    text = said(tokenizer, made, "<tool_call>")
    assert text == "<tool_call>"
