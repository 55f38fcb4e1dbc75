"""Rules in rules: the library follows them by recursion, and neither a request nor a thread's stack may end the process."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from fastllm.core.errors import InvalidRequest
from fastllm.text.depth import MAX_LEVELS, PLAIN_LEVELS, levels, with_room
from fastllm.text.grammar import MAX_GBNF
from tests.text.test_matcher import compiler  # noqa: F401


def chain(body, count):
    """A JSON schema whose definitions refer to one another."""
    return {"$defs": {**{f"d{i}": body({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}, f"d{count}": {"type": "object"}}, "$ref": "#/$defs/d0"}


def lark(body, count):
    """Rules that refer to one another."""
    return "\n".join(["start: r0", *(f"r{i}: {body.replace('NEXT', f'r{i + 1}')}" for i in range(count)), f'r{count}: "z"'])


CHAINS = {
    "rules": ("grammar", lark('"a" NEXT', 4000)),
    "brackets": ("grammar", lark("(" * 20 + "NEXT" + ")" * 20, 900)),
    "repeated": ("grammar", lark('(("x" NEXT+ | "b")* "c")?', 4000)),
    "lexemes": ("grammar", lark('"a" NEXT', 5000).replace("r", "R").replace("staRt", "start")),
    "references": ("json_schema", chain(lambda x: x, 9000)),
    "arrays": ("json_schema", chain(lambda x: {"type": "array", "items": x}, 4000)),
    "objects": ("json_schema", chain(lambda x: {"type": "object", "properties": {"a": x}, "required": ["a"]}, 4000)),
    "optional": ("json_schema", chain(lambda x: {"type": "object", "properties": {"a": x}}, 4000)),
    "all of": ("json_schema", chain(lambda x: {"allOf": [x, {"type": "object"}]}, 4000)),
    "any of": ("json_schema", chain(lambda x: {"anyOf": [x, {"type": "string"}]}, 4000)),
    "inside of Lark": ("grammar", "start: %json " + json.dumps(chain(lambda x: {"type": "array", "items": x}, 2000)).replace("$ref", "\\u0024ref")),
    "tools": ("bundle", json.dumps({"grammars": [{"lark_grammar": lark('"a" NEXT', 4000)}]})),
}

COMPILE = """
import sys
import numpy as np
from tests.text.test_depth import CHAINS
from tests.text.test_matcher import VOCAB, byte_tokenizer
from fastllm.core.errors import InvalidRequest
from fastllm.text import Tokenizer
from fastllm.text.grammar import GrammarCompiler

settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
compiler = GrammarCompiler(Tokenizer.from_tokenizer_json(byte_tokenizer().to_str().encode(), settings), VOCAB)
for name in sys.argv[1:]:
    kind, source = CHAINS[name]
    print(name, end=": ", flush=True)
    try:
        matcher = getattr(compiler, kind)(source)()
    except InvalidRequest:
        print("refused", flush=True)
        continue
    for _ in range(40):
        allowed = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
        if matcher.accept(int(allowed[-1])):
            break
    del matcher
    print("held", flush=True)
"""


def test_long_chains_of_rules_and_references_do_not_end_the_process():
    """Each of them did."""
    said = subprocess.run([sys.executable, "-c", COMPILE, *CHAINS], capture_output=True, text=True, timeout=120, check=False)
    assert said.returncode == 0, (said.stdout, said.stderr[-500:])
    assert said.stdout.splitlines() == [f"{name}: held" for name in CHAINS]


@pytest.mark.parametrize("name", CHAINS)
def test_levels_are_never_counted_too_low(name):
    kind, source = CHAINS[name]
    text = source if isinstance(source, str) else json.dumps(source)
    steps = max(text.count("$ref"), text.count("\\u0024ref"), text.count("\\nr"), text.count("\nr"), text.count("\nR"))
    assert levels(kind, text) >= steps > PLAIN_LEVELS


def test_what_cannot_be_deep_is_not_counted():
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(MAX_LEVELS)}}
    assert levels("json_schema", json.dumps(wide)) == 0
    assert levels("grammar", "start: %json " + json.dumps(wide)) < PLAIN_LEVELS
    assert levels("regex", "(a:[b])" * MAX_LEVELS) == levels("choice", "start: CHOICE" + ":" * MAX_LEVELS) == 0


def test_more_levels_than_there_is_room_for_are_refused(compiler):  # noqa: F811
    with pytest.raises(InvalidRequest, match=r"may have 40,0\d\d rules, references and brackets in one another: the limit is 20,000"):
        compiler.grammar(lark('"a" NEXT', 2 * MAX_LEVELS))
    with pytest.raises(InvalidRequest, match="the limit is 20,000"):
        compiler.json_schema(chain(lambda x: x, MAX_LEVELS))


def test_gbnf_that_would_be_read_for_minutes_is_refused(compiler):  # noqa: F811
    rules = [*(f'r{i} ::= "a" r{i + 1}' for i in range(3000)), 'r3000 ::= "z"']
    text = "\n".join(["root ::= r0", *rules])
    assert len(text) * len(rules) > MAX_GBNF
    with pytest.raises(InvalidRequest, match=r"3,002 rules in 57,\d\d\d characters"):
        compiler.grammar(text)
    assert compiler.grammar("\n".join(["root ::= r2700", *rules[2700:]]))().mask().any()


def test_room_gives_back_what_was_returned_or_raised_and_leaves_other_threads_as_they_were():
    def deep(count):
        if count == 7:
            raise KeyError("seven")
        return threading.current_thread().name

    before = threading.stack_size()
    assert with_room(PLAIN_LEVELS, lambda: deep(1)) == threading.current_thread().name
    assert with_room(PLAIN_LEVELS + 1, lambda: deep(1)) == "fastllm-grammar-deep"
    with pytest.raises(KeyError, match="seven"):
        with_room(MAX_LEVELS, lambda: deep(7))
    assert threading.stack_size() == before
