"""Answers that are held to grammars are those of plain masked sampling, bit for bit: whatever is asked, and whatever the settings are.

Plain is: the mask of every token is computed, and the row is read under it by the sampler, alone. The other side asks for single tokens, takes the bits
of a mask for the likeliest ones, or reads the row again, as it does for users, with neighbours in the step.
"""

from __future__ import annotations

import itertools

import pytest

from fastllm import LLM, SamplingParams
from fastllm.core.held import HeldRows
from fastllm.core.request import Request
from fastllm.core.sampling import build_rows
from fastllm.text import _matcher as matcher

GRAMMARS = {
    "schema": lambda g: g.json_schema({"type": "array", "items": {"enum": ["a", 12, None]}, "minItems": 3}),
    "object": lambda g: g.json_object(),
    "digits": lambda g: g.regex(r"([0-9]{3}-[0-9]{2}\n){2,9}"),
    "counted": lambda g: g.regex(r"([a-z]{3,12} ){2,40}"),
    "any": lambda g: g.regex(r"(.|\n){5,90}"),
    "alternatives": lambda g: g.regex("((alpha|alto|beta|gamma|delta) ){2,9}"),
    "choice": lambda g: g.choice([a + b for a in "abcdefgh" for b in "stuvwxyz"]),
    "lark": lambda g: g.grammar('start: (NAME " = " NUMBER "\\n"){2,}\nNAME: /[a-z_]{1,5}/\nNUMBER: /[0-9]+/'),
}
SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 0.7, "logprobs": 3},
    {"temperature": 0.02, "top_k": 40},
    {"temperature": 0.1, "top_k": 72, "top_p": 1.0},
    {"temperature": 1.0, "top_k": 0, "top_p": 0.9, "logprobs": 0},
    {"temperature": 1.3, "top_k": 5, "min_p": 0.2},
    {"temperature": 0.3, "top_k": 30, "top_p": 0.5, "min_p": 0.01, "n": 2},
    {"temperature": 0.2, "repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": 0.4, "logprobs": 1},
    {"temperature": 0.5, "logit_bias": {60: 4.0, 100: -100.0, 51: -3.5}, "min_tokens": 6},
    {"temperature": 0.0, "logit_bias": dict.fromkeys(range(3, 220), -100.0)},  # bans that a grammar wins over
]


@pytest.fixture(scope="module")
def llm(tiny_model):
    with LLM(str(tiny_model), threads=2, max_batch_size=6) as made:
        yield made


def answers(llm, grammar, seeds, together):
    """What each request of every setting and seed is answered: ids, reason, log-probabilities. together: all at once, else one after the other."""
    found, handles = [], []
    for settings, seed in itertools.product(SETTINGS, seeds):
        params = SamplingParams(max_tokens=24, seed=seed, **settings)
        prompt = llm.tokenizer.encode(f"{seed}: ", add_special=False, parse_special=False)
        handles.append(llm.loaded.engine.submit(Request(prompt, params, sorted(llm.tokenizer.end_ids), constraint=grammar)))
        if not together:
            handles[-1].result()
    for handle in handles:
        found.append([(choice.token_ids, choice.finish_reason, choice.logprobs) for choice in handle.result().choices])
    return found


def plain(self, kernel, logits):
    """`HeldRows.choose` by masks alone."""
    ids = kernel.choose(logits)
    for row, choice, constraint, _ in self.rows:
        if not choice.finished:
            ids[row] = build_rows([choice.sampler], logits.shape[1], [constraint.mask()]).kernel.choose(logits[row : row + 1])[0]
    return ids


@pytest.mark.parametrize("name", GRAMMARS)
def test_held_answers_are_those_of_plain_masked_sampling(llm, monkeypatch, name):
    monkeypatch.setattr(matcher, "SLOW_S", 60.0)  # else a busy machine has masks only
    grammar, seeds = GRAMMARS[name](llm.grammars), (1, 2**40 + 3)
    with monkeypatch.context() as patched:
        patched.setattr(HeldRows, "choose", plain)
        wanted = answers(llm, grammar, seeds, False)
    assert len({repr(one) for one in wanted}) > len(wanted) / 3, "answers differ by seed and setting"
    ways = []
    for least, most in ((0, 0), (10**6, 0), (1, 3)):  # masks at once; single tokens only; single tokens where they are few
        seen = {"masks": 0, "read": 0}
        with monkeypatch.context() as patched:
            patched.setattr(matcher, "MIN_QUESTIONS", least)
            patched.setattr(matcher, "MAX_QUESTIONS", most)
            for method, kind in (("_mask", "masks"), ("_masked", "read")):
                patched.setattr(HeldRows, method, counted(getattr(HeldRows, method), seen, kind))
            assert answers(llm, grammar, seeds, True) == wanted, (least, most)
        ways.append(seen)
    assert ways[0]["masks"] > ways[1]["masks"], "masks are taken, and where they are not, tokens are asked for"
    assert ways[0]["read"] < ways[0]["masks"], "the bits of a mask decide most rows without reading them again"


def counted(method, seen, kind):
    """The method, whose calls are counted."""

    def call(self, *given):
        seen[kind] += 1
        return method(self, *given)

    return call
