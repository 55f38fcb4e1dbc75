"""A matcher says of single tokens what its masks say, and takes masks where single tokens would be slower or without a limit."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from fastllm.text import Tokenizer
from fastllm.text import _matcher as matcher
from fastllm.text.grammar import GrammarCompiler
from fastllm.text.worker import Worker
from tests.interface.conftest import byte_tokenizer

VOCAB = 300  # more rows than the tokenizer has pieces


@pytest.fixture(scope="module")
def compiler():
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
    return GrammarCompiler(Tokenizer.from_tokenizer_json(byte_tokenizer().to_str().encode(), settings), VOCAB)


def bits(mask):
    found = np.zeros(VOCAB, bool)
    given = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]
    found[: len(given)] = given
    return found


SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}, "n": {"type": "integer"}}, "required": ["name", "n"], "additionalProperties": False}
GRAMMARS = {
    "schema": lambda c: c.json_schema(SCHEMA),
    "constant": lambda c: c.json_schema({"const": {"long name": "and a long text"}}),
    "object": lambda c: c.json_object(),
    "regex": lambda c: c.regex(r"([a-z]{1,3} ){2,9}"),
    "bytes": lambda c: c.regex(r".{1,9}é*"),
    "choice": lambda c: c.choice(["abc", "abd", "x", "Grüße"]),
    "lark": lambda c: c.grammar('start: A B*\nA: /[ab]+/\nB: /c[0-9]/ | "<" A ">"'),
    "few tokens": lambda c: c.grammar("start: a /!/\na[max_tokens=3]: /[a-z]*/"),
    "special": lambda c: c.grammar('start: "a" <|im_start|> "b" | <[1-3]> "c"'),
    "stop": lambda c: c.grammar('start: a "z"\na[stop=""]: /[a-y]+/'),
    "gbnf": lambda c: c.grammar('root ::= [a-c]+ ("," [0-9])*'),
    "bundle": lambda c: c.bundle(json.dumps({"grammars": [{"lark_grammar": 'start: "{" /[a-z]+/ "}"'}]})),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_single_tokens_are_what_the_mask_says(compiler, monkeypatch, name):
    monkeypatch.setattr(matcher, "MIN_QUESTIONS", 10**6)
    monkeypatch.setattr(matcher, "SLOW_S", 60.0)
    grammar, rng = GRAMMARS[name](compiler), np.random.default_rng(3)
    told = 0
    for _ in range(12):
        one, other = grammar(), grammar()
        one._ready = None  # the mask of the first token, too
        for _ in range(30):
            allowed = bits(np.frombuffer(other._matcher.compute_bitmask(), np.uint32))
            allows = one.check()
            if isinstance(allows, int):
                assert allowed[allows], "the library says so, too"
                allowed[:] = np.arange(VOCAB) == allows  # what is written by one token alone, though others may write its beginning
                assert (bits(one.mask()) == allowed).all()
            answers = [token == allows if isinstance(allows, int) else (allows([token]) or [None])[0] for token in range(VOCAB)]
            for token, answer in enumerate(answers):
                assert answer in (None, allowed[token]), (token, answer)
            told += sum(answer is not None for answer in answers)
            token = int(rng.choice(np.flatnonzero(allowed)))
            if one.accept(token) | other.accept(token) or token in compiler._tokenizer.end_ids:
                break
    assert told > 1000, "and mostly it can say so"


def test_whether_a_token_is_forced_is_looked_up_when_the_one_before_is_taken(compiler, monkeypatch):
    monkeypatch.setattr(matcher, "SLOW_S", 60.0)  # else a busy machine leaves it to the thread of masks
    monkeypatch.setattr(matcher, "AHEAD_S", 60.0)
    one = compiler.regex("[ab]cde[ab]")()
    tokens = {text: compiler._tokenizer.encode(text, add_special=False, parse_special=False)[0] for text in "abcde"}
    library, asked = one._matcher, list[str]()

    class Told:
        def __getattr__(self, name):
            asked.append(name)
            return getattr(library, name)

    one._matcher = Told()
    answers = []
    for text in "acdeb":
        asked.clear()
        given = one.check()
        answers.append(given if isinstance(given, int) else given([tokens[text]]) == [True])
        assert "compute_ff_tokens" not in asked
        asked.clear()
        done = one.accept(tokens[text])
        assert asked.count("compute_ff_tokens") == (not done and text in "ae"), "and once for all of a text that must come"
    assert answers == [True, tokens["c"], tokens["d"], tokens["e"], True]
    assert done


def test_a_text_that_must_come_needs_no_thread_where_the_library_is_slow(compiler, monkeypatch):
    monkeypatch.setattr(matcher, "SLOW_S", -1.0)
    one = compiler.regex("[ab]cde[ab]")()
    tokens = {text: compiler._tokenizer.encode(text, add_special=False, parse_special=False)[0] for text in "acde"}
    seen = []
    for text in "acde":
        one.check()
        one.accept(tokens[text])
        seen.append(one._coming)
    assert seen == [True, False, False, True]


def test_slow_looks_at_what_is_forced_are_left_to_the_thread_of_masks(compiler, monkeypatch):
    monkeypatch.setattr(matcher, "SLOW_S", 0.1)  # what a busy machine does not make of a quick call
    one = compiler.regex("[ab]*c")()
    token = compiler._tokenizer.encode("a", add_special=False, parse_special=False)[0]
    library = one._matcher

    class Slow:
        def compute_ff_tokens(self):
            time.sleep(1.5 * matcher.SLOW_S)
            return library.compute_ff_tokens()

        def __getattr__(self, name):
            return getattr(library, name)

    one._matcher = Slow()
    one.accept(token)
    assert not one._coming
    one.check()
    assert one._ready is not None, "the library's limits are for masks"
    one.accept(token)
    assert one._coming


def test_a_long_answer_has_a_mask_now_and_then_for_the_librarys_limits(compiler, monkeypatch):
    monkeypatch.setattr(matcher, "SLOW_S", 60.0)
    one = compiler.regex("[ab]*c")()
    token, computed = compiler._tokenizer.encode("a", add_special=False, parse_special=False)[0], []
    library = one._matcher

    class Told:
        def __getattr__(self, name):
            computed.extend([1] * (name == "unsafe_compute_mask_ptr"))
            return getattr(library, name)

    one._matcher = Told()
    one._ready = None
    for _ in range(5 * matcher.UNMASKED + 1):
        assert one.check()([token]) == [True]
        one.accept(token)
    assert len(computed) == 5


def test_where_single_tokens_are_slow_masks_are_used(compiler, monkeypatch):
    one = compiler.regex("[ab]*c")()
    token = compiler._tokenizer.encode("a", add_special=False, parse_special=False)[0]
    one._ready = None
    monkeypatch.setattr(matcher, "SLOW_S", -1.0)
    assert one.check()([token, token]) is None  # the second would be as slow
    one._slow = 0
    assert one.check()([token]) == [True]
    assert one._ready is None
    assert not one.accept(token)
    assert one._coming, "from then on the next mask is computed beside the step"
    assert one.check()([token]) == [True]
    assert one._ready is not None


def test_where_single_tokens_keep_deciding_nothing_slow_masks_are_computed_beside_the_step(compiler, monkeypatch):
    one = compiler.regex("[ab]*c")()
    right = compiler._tokenizer.encode("a", add_special=False, parse_special=False)[0]
    monkeypatch.setattr(matcher, "AHEAD_S", -1.0)
    monkeypatch.setattr(matcher, "SLOW_S", 60.0)
    seen = []
    for decides in (False, False, True, False, True):
        assert one.check()([right]) == [True]
        if not decides:
            one.mask()
        one.accept(right)
        seen.append(one._coming)
    assert seen == [False, True, False, False, False]


def test_a_mask_is_the_cheaper_way_after_some_questions(compiler, monkeypatch):
    monkeypatch.setattr(matcher, "SLOW_S", 60.0)
    one = compiler.regex("[ab]*c")()
    one._ready = None
    one._sort.mask_s = 30.1e-6
    allows = one.check()
    answers = [allows([5]) for _ in range(100)]
    assert answers.index(None) == matcher.MIN_QUESTIONS + 20
    assert set(answers[matcher.MIN_QUESTIONS + 20 :]) == {None}
    one._sort.mask_s = 1.0
    allows = one.check()
    assert [allows([5]) for _ in range(100)].index(None) == matcher.MIN_QUESTIONS + matcher.MAX_QUESTIONS


def test_where_no_thread_can_be_started_the_next_mask_is_computed_when_it_is_asked_for(compiler, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    one, other = (compiler.regex("[ab]*c")() for _ in range(2))
    monkeypatch.setattr(one._sort, "worker", Worker())
    one._ready = None
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        one.ahead()
        assert not one._coming
        assert (one.mask() == other.mask()).all()
    one._ready = None
    one.ahead()
    assert one._coming, "a thread that can be started later is"
    assert (one.mask() == other.mask()).all()


def test_a_mask_that_nobody_took_is_not_waited_for(compiler, monkeypatch):
    def put(work):
        raise MemoryError

    one = compiler.regex("[ab]*c")()
    one._ready = None
    monkeypatch.setattr(one._sort, "worker", SimpleNamespace(put=put))
    with pytest.raises(MemoryError):
        one.ahead()
    assert not one._done.locked()
    assert one.mask().any()
