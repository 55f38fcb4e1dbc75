"""A grammar that takes too long to read is refused in time, and holds nobody else."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastllm.core.errors import InvalidSchema, OutOfMemory
from fastllm.server.constraints import refuse
from fastllm.server.prepare import Prepared
from fastllm.server.preparer import GRAMMAR, HEAD
from fastllm.server.read_limit import ReadLimit
from fastllm.text import Tokenizer
from fastllm.text.grammar import GrammarCompiler
from tests.interface.conftest import byte_tokenizer

SLOW = {"allOf": [{"type": "string", "pattern": f"{chr(97 + i % 26)}.*{i}"} for i in range(300)]}  # eleven kilobytes; the library reads it for 13 s
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
HI = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


def tokenizer():
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
    return Tokenizer.from_tokenizer_json(byte_tokenizer().to_str().encode(), settings)


class Stuck:
    """A compiler that computes until it is told to end."""

    def __init__(self):
        self.end = threading.Event()

    def json_schema(self, source, param):
        while not self.end.is_set():
            pass

    def bundle(self, source, param):
        self.json_schema(source, param)


@pytest.fixture
def stuck():
    made = Stuck()
    yield made
    made.end.set()


SLOWLY = "it takes more than 0.1 s to read"
WANTED = {"kind": "json_schema", "source": {}, "param": "text.format"}


def test_what_takes_too_long_is_told_and_the_process_is_spent(stuck):
    limit = ReadLimit(lambda: stuck)
    assert limit(WANTED, 0.1) == SLOWLY
    assert limit.spent


def test_calls_are_read_too(stuck):
    limit = ReadLimit(lambda: stuck)
    assert limit({"kind": "calls", "source": [{"source": "{}"}], "param": "tools", "optional": True}, 0.1) == SLOWLY


def test_it_is_refused_by_name_and_calls_that_need_not_be_held_are_free():
    with pytest.raises(InvalidSchema, match=r"text\.format: it takes more than 0\.1 s to read") as refused:
        refuse(Prepared(constraint=WANTED), SLOWLY)
    assert refused.value.fields["param"] == "text.format"
    ready = Prepared(constraint={"kind": "calls", "source": [], "param": "tools", "optional": True}, output={"one": False, "held": True})
    refuse(ready, SLOWLY)
    assert ready.constraint is None
    assert ready.output == {"one": False, "held": False}
    assert "takes more than 0.1 s" in ready.warnings[0]


def test_only_the_time_of_the_processor_counts(stuck):
    stuck.json_schema = lambda source, param: stuck.end.wait(30)
    limit = ReadLimit(lambda: stuck)
    threading.Timer(0.5, stuck.end.set).start()
    assert limit(WANTED, 0.2) == ""
    assert not limit.spent


def test_where_no_thread_can_be_started_there_is_too_little_memory(stuck, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    limit = ReadLimit(lambda: stuck)
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(OutOfMemory, match="no room to read a grammar"):
        limit(WANTED, 0.1)
    assert not limit.spent


def test_other_faults_are_left_to_whoever_compiles_it():
    limit = ReadLimit(lambda: GrammarCompiler(tokenizer(), 300, timing_only=True))
    for wanted in ({"kind": "json_schema", "source": {"not": {}}}, {"kind": "regex", "source": "("}, {"kind": "json_schema", "source": SCHEMA}):
        assert limit({**wanted, "param": "p"}, 60.0) == ""
    assert not limit.spent


GROWS = "((a{1,100}){1,100}){1,100}"  # whose hundredth letter may be in a hundred thousand places
GROWING = {
    "at once": ("regex", GROWS),
    "later": ("regex", f"x[0-9]{{20}}{GROWS}!"),
    "of two letters": ("regex", "(((ab){1,100}){1,100}){1,100}"),
    "of no letters": ("regex", "(((é){1,100}){1,100}){1,100}"),
    "with blanks": ("regex", r"(([a-z]{1,40} ?){1,40}\n?){1,40}"),
    "in a schema": ("json_schema", {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}, "p": {"pattern": f"^{GROWS}$", "type": "string"}}, "required": ["n", "s", "p"]}),
    "in Lark": ("grammar", f"start: A\nA: /{GROWS}/"),
}


@pytest.mark.parametrize("name", GROWING)
def test_what_grows_beyond_the_librarys_limits_is_found_before_an_answer(name):
    kind, source = GROWING[name]
    limit = ReadLimit(lambda: GrammarCompiler(tokenizer(), 300, timing_only=True))
    why = limit({"kind": kind, "source": source, "param": "p"}, 60.0)
    assert why.startswith("a text of it needs more work than one token may take (")
    assert not limit.spent
    call = json.dumps({"grammars": [{"lark_grammar": f"start: /call {GROWS}/"}]})
    assert limit({"kind": "calls", "source": [{"source": call}], "param": "tools", "optional": True}, 60.0) == why


@pytest.mark.parametrize("pattern", ["(a{1,100}){1,100}", r"((([a-z]{1,20} ){1,20}\. ){1,20}\n){1,20}", "a{1,100000}", "(.*a){60}", "(a|aa){1,400}", "é+", "[^a-zA-Z0-9]+", "x"])
def test_counted_repetitions_that_can_be_followed_are_taken(pattern):
    limit = ReadLimit(lambda: GrammarCompiler(tokenizer(), 300, timing_only=True))
    assert limit({"kind": "regex", "source": pattern, "param": "p"}, 60.0) == ""


def test_it_is_a_bad_request_that_names_the_field_and_calls_that_need_not_be_held_are_free(http):
    chat = "/v1/chat/completions"
    for _ in range(2):
        for stream in (False, True):
            error = http.post(chat, json={**HI, "stream": stream, "structured_outputs": {"regex": GROWS}})
            assert (error.status_code, error.json()["error"]["code"], error.json()["error"]["param"]) == (400, "invalid_schema", "structured_outputs.regex")
            assert "one token" in error.json()["error"]["message"]
            assert "Fix: simplify it" in error.json()["error"]["message"]
    parameters = {"type": "object", "properties": {"p": {"type": "string", "pattern": f"^{GROWS}$"}}, "required": ["p"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    free = http.post(chat, json={**HI, "tools": [tool]})
    assert (free.status_code, "not held to their schemas" in free.headers["x-fastllm-warning"]) == (200, True)
    must = http.post(chat, json={**HI, "tools": [tool], "tool_choice": "required"})
    assert (must.status_code, must.json()["error"]["code"]) == (400, "invalid_schema")


@pytest.mark.parametrize("source", ['start: "a" <|im_start|> /[a-zé]+/ | <[1-3]>', 'start: %json {"const": {"long name": "é"}}'])
def test_a_vocabulary_of_bytes_reads_what_the_models_reads_and_keeps_nothing(source):
    timing, real = (GrammarCompiler(tokenizer(), 300, timing_only=timing) for timing in (True, False))
    assert timing.grammar(source).kind == real.grammar(source).kind
    assert timing.regex("[ab]{3}é")().mask().any()
    assert (len(timing._kept), len(real._kept)) == (0, 1)


STUCK = """
    import sys
    from fastllm.server import preparer
    from fastllm.text.depth import with_room

    def work():
        while True:
            pass

    class Stuck:
        def json_schema(self, source, param):
            with_room(0, work)

    preparer._open = lambda settings: None
    preparer._timing_compiler = lambda kitchen: Stuck()
    preparer.main()
"""


def test_a_process_that_still_reads_ends_when_its_parent_does():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen([sys.executable, "-P", "-c", textwrap.dedent(STUCK), str(theirs.fileno())], pass_fds=[theirs.fileno()])
        theirs.close()
        for header, body in (({}, b""), ({"kind": GRAMMAR}, json.dumps({"constraint": WANTED, "limit_s": 0.2}).encode())):
            raw = json.dumps(header).encode()
            ours.sendall(HEAD.pack(len(raw), len(body)) + raw + body)
        ours.recv(HEAD.size, socket.MSG_WAITALL)
    try:
        assert process.wait(60) == 0
    finally:
        process.kill()


def named(name, schema):
    return {**HI, "response_format": {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}}


def test_a_schema_that_is_read_for_seconds_is_a_bad_request_in_time_and_holds_nobody_else(start, wait_until):
    server = start()
    try:
        pool, http = server.runtime.pool, server.client
        before = server.call(lambda: pool.pids)
        with ThreadPoolExecutor(1) as threads:
            slow = threads.submit(http.post, "/v1/chat/completions", json=named("slow", SLOW), timeout=60)
            wait_until(lambda: server.call(lambda: pool._reading.free.locked()))
            assert http.post("/v1/chat/completions", json=HI).status_code == 200
            assert not slow.done(), "a request without a grammar does not wait for it"
            answer = slow.result()
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_schema", "response_format.json_schema.schema")
        assert "more than 2 s" in error["message"]
        assert set(before) <= set(server.call(lambda: pool.pids)), "nor does it end their process"
        wait_until(lambda: server.call(lambda: len(pool.pids)) == 2)  # the one that reads is there again, before anybody asks
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pool._reading, "ask", None)
            again = http.post("/v1/chat/completions", json=named("again", SLOW))
            assert (again.status_code, again.json()["error"]["code"]) == (400, "invalid_schema"), "without reading it again"
        assert http.post("/v1/chat/completions", json=named("quick", SCHEMA)).status_code == 200
        [reader] = server.call(lambda: [process.process.pid for process in pool._reading.idle])
        os.kill(reader, signal.SIGSTOP)
        pool._read_deadline_s = 0.1
        late = http.post("/v1/chat/completions", json=named("late", {**SCHEMA, "title": "x"}))
        assert (late.status_code, "this machine is busy" in late.text) == (503, True)
        pool._read_deadline_s = 20
        assert http.post("/v1/chat/completions", json=named("late", {**SCHEMA, "title": "x"})).status_code == 200, "which says nothing of the grammar"
        assert http.post("/v1/chat/completions", json=named("quick", SCHEMA)).status_code == 200
    finally:
        server.close()


def test_how_long_a_grammar_may_take_is_an_option(start):
    server = start(read_s=0.1)
    try:
        answer = server.client.post("/v1/chat/completions", json=named("slow", SLOW), timeout=60)
        assert "more than 0.1 s" in answer.json()["error"]["message"]
    finally:
        server.close()
