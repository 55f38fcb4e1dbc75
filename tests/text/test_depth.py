"""Rules in rules: the library follows them by recursion, and neither a request nor a thread's stack may end the process."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from fastllm.core.errors import InvalidRequest, InvalidSchema, OutOfMemory
from fastllm.text.depth import MAX_LEVELS, MAX_NAMES, levels, names, with_room
from fastllm.text.grammar import MAX_GBNF
from tests.text.test_matcher import compiler  # noqa: F401


def chain(body, count):
    """A JSON schema whose definitions refer to one another."""
    return {"$defs": {**{f"d{i}": body({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}, f"d{count}": {"type": "object"}}, "$ref": "#/$defs/d0"}


def lark(body, count):
    """Rules that refer to one another."""
    return "\n".join(["start: r0", *(f"r{i}: {body.replace('NEXT', f'r{i + 1}')}" for i in range(count)), f'r{count}: "z"'])


def nested(body, count):
    """A JSON schema in itself."""
    schema = {"type": "null"}
    for _ in range(count):
        schema = body(schema)
    return schema


def properties(count, name="p"):
    return {f"{name}{i}": {"type": "string"} for i in range(count)}


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

SHORT = {  # with which a small stack ends
    "short rules": ("grammar", lark('"a" NEXT', 240)),
    "short references": ("json_schema", chain(lambda x: {"type": "object", "properties": {"a": x}}, 80)),
    "arrays in one another": ("json_schema", nested(lambda x: {"type": "array", "items": x}, 60)),
    "objects in one another": ("json_schema", nested(lambda x: {"type": "object", "properties": {"a": x}, "required": ["a"]}, 30)),
    "properties": ("json_schema", {"type": "object", "properties": properties(2000)}),
    "required": ("json_schema", {"type": "object", "required": [f"p{i}" for i in range(MAX_NAMES)]}),
    "properties inside of Lark": ("grammar", "start: %json " + json.dumps({"type": "object", "properties": properties(1500), "additionalProperties": False})),
}

COMPILE = """
import sys
import threading
import numpy as np
from tests.text.test_depth import CHAINS, SHORT
from tests.text.test_matcher import VOCAB, byte_tokenizer
from fastllm.core.errors import InvalidRequest
from fastllm.text import Tokenizer
from fastllm.text.grammar import GrammarCompiler

settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
compiler = GrammarCompiler(Tokenizer.from_tokenizer_json(byte_tokenizer().to_str().encode(), settings), VOCAB)
def compile_all():
    for name in sys.argv[2:]:
        kind, source = {**CHAINS, **SHORT}[name]
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

threading.stack_size(int(sys.argv[1]) << 10)
thread = threading.Thread(target=compile_all)
thread.start()
thread.join()
"""


@pytest.mark.parametrize(("stack_kib", "sources"), [(8192, CHAINS), (256, SHORT)])
def test_no_source_ends_the_process(stack_kib, sources):
    """Each of them did. stack_kib: of the thread that asks."""
    said = subprocess.run([sys.executable, "-c", COMPILE, str(stack_kib), *sources], capture_output=True, text=True, timeout=120, check=False)
    assert said.returncode == 0, (said.stdout, said.stderr[-500:])
    assert said.stdout.splitlines() == [f"{name}: held" for name in sources]


@pytest.mark.parametrize("name", CHAINS)
def test_levels_are_never_counted_too_low(name):
    kind, source = CHAINS[name]
    text = source if isinstance(source, str) else json.dumps(source)
    steps = max(text.count("$ref"), text.count("\\u0024ref"), text.count("\\nr"), text.count("\nr"), text.count("\nR"))
    assert levels(kind, text) >= steps >= 900


def test_what_cannot_be_deep_is_not_counted():
    wide = {"type": "object", "properties": properties(MAX_LEVELS)}
    assert levels("json_schema", json.dumps(wide)) == 0
    assert levels("grammar", "start: %json " + json.dumps(wide)) < 250
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


def call(schema):
    return json.dumps({"grammars": [{"lark_grammar": f"start: args\nargs: %json {json.dumps(schema)}"}] * 2})


HALF = {"type": "object", "properties": properties(MAX_NAMES // 2 + 1)}
WIDE = {
    "one object": ("json_schema", {"type": "object", "properties": properties(MAX_NAMES + 1)}),
    "merged": ("json_schema", {"allOf": [HALF, {"type": "object", "properties": properties(MAX_NAMES // 2 + 1, "q")}]}),
    "many objects": ("json_schema", {"anyOf": [{"type": "object", "properties": properties(10, f"n{i}")} for i in range(MAX_NAMES // 10 + 1)]}),
    "required": ("json_schema", {"type": "object", "required": [f"p{i}" for i in range(MAX_NAMES + 1)]}),
    "patterns": ("json_schema", {"type": "object", "patternProperties": {f"^p{i}$": {"type": "string"} for i in range(MAX_NAMES // 50 + 1)}}),
    "in Lark": ("grammar", f"start: a b\na: %json {json.dumps(HALF)}\nb: %json {json.dumps(HALF)}"),
    "tools": ("bundle", call(HALF)),
}


@pytest.mark.parametrize("name", WIDE)
def test_more_properties_than_are_read_in_time_are_refused(compiler, name):  # noqa: F811
    kind, source = WIDE[name]
    with pytest.raises(InvalidSchema, match=r"^here: its objects have [\d,]+ properties together: the limit is 5,000; a pattern counts as 50$"):
        getattr(compiler, kind)(source, "here")


def test_names_are_counted_once_and_wherever_there_is_a_schema():
    schema = {"properties": {"a": {"items": [{"required": ["b", "c"]}]}, "d": True}, "required": ["a", "e"], "x": {"properties": [], "required": "no", "patternProperties": 3}}
    assert names("json_schema", json.dumps(schema)) == 5
    assert names("grammar", f"start: %json{json.dumps(schema)} x\nx: %json\n{json.dumps(schema)}") == 10
    assert names("json_schema", json.dumps({"properties": {"a": {}}, "patternProperties": {"^b": {}, "^c": {}}})) == 101
    assert names("grammar", 'start: "properties"') == names("regex", json.dumps(schema)) == 0
    assert names("grammar", f'// %json {{"x": "\nstart: "%json [" %json {json.dumps(schema)} "]"') == 105, "also behind what cannot be read"
    assert names("grammar", "//" + "%json" * 150_000) > MAX_NAMES, "and soon"
    assert names("grammar", 'start: %json {"required": [["a"], 3, null]}') == 3


def test_room_gives_back_what_was_returned_or_raised_and_leaves_other_threads_as_they_were():
    def deep(count):
        if count == 7:
            raise KeyError("seven")
        return threading.current_thread().name

    before = threading.stack_size()
    assert with_room(0, lambda: deep(1)) == with_room(MAX_LEVELS, lambda: deep(1)) == "fastllm-grammar"
    with pytest.raises(KeyError, match="seven"):
        with_room(MAX_LEVELS, lambda: deep(7))
    assert threading.stack_size() == before


def test_where_no_thread_can_be_started_the_grammar_is_not_to_blame(compiler, monkeypatch):  # noqa: F811
    def start(thread):
        raise RuntimeError("can't start new thread")

    before = threading.stack_size()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(OutOfMemory, match="no room to read a grammar") as caught:
            compiler.regex("[a-f]{3}")
    assert (caught.value.http_status, caught.value.why) == (503, "a stack of 2 MiB: can't start new thread")
    assert threading.stack_size() == before
    assert compiler.regex("[a-f]{3}")().mask().any()


INTERRUPTED = """
import signal
import threading
import time
from fastllm.text.depth import with_room

def read():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    time.sleep(0.5)
    print("read", flush=True)

try:
    with_room(0, read)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_an_interrupted_reader_ends_before_the_interpreter():
    said = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60, check=False)
    assert (said.returncode, said.stdout.split(), said.stderr) == (0, ["interrupted", "read"], "")
