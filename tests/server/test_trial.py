"""A grammar that takes too long to read is refused in time, and holds nobody else."""

from __future__ import annotations

import os
import threading
import time

import pytest

from fastllm.core.errors import InvalidSchema
from fastllm.server.constraints import READ_S, Trial
from fastllm.server.prepare import Prepared
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

    def calls(self, source, param, **_):
        self.json_schema(source, param)


@pytest.fixture
def stuck():
    made = Stuck()
    yield made
    made.end.set()


def test_what_takes_too_long_is_refused_and_the_process_is_spent(stuck):
    trial = Trial(lambda: stuck, 0.1)
    trial(Prepared())
    assert not trial.spent
    with pytest.raises(InvalidSchema, match=r"text\.format: it takes more than 0\.1 s to read") as refused:
        trial(Prepared(constraint={"kind": "json_schema", "source": {}, "param": "text.format"}))
    assert refused.value.fields["param"] == "text.format"
    assert trial.spent


def test_calls_that_need_not_be_held_are_free_then(stuck):
    trial = Trial(lambda: stuck, 0.1)
    ready = Prepared(constraint={"kind": "calls", "source": [], "param": "tools", "optional": True}, output={"one": False, "held": True})
    trial(ready)
    assert trial.spent
    assert ready.constraint is None
    assert ready.output == {"one": False, "held": False}
    assert "takes more than 0.1 s" in ready.warnings[0]


def test_only_the_time_of_the_processor_counts(stuck):
    stuck.json_schema = lambda source, param: stuck.end.wait(30)
    trial = Trial(lambda: stuck, 0.2)
    threading.Timer(0.5, stuck.end.set).start()
    trial(Prepared(constraint={"kind": "json_schema", "source": {}, "param": "p"}))
    assert not trial.spent


def test_other_faults_are_left_to_whoever_compiles_it():
    trial = Trial(lambda: GrammarCompiler(tokenizer(), 300, trial=True))
    for wanted in ({"kind": "json_schema", "source": {"not": {}}}, {"kind": "regex", "source": "("}, {"kind": "json_schema", "source": SCHEMA}):
        ready = Prepared(constraint={**wanted, "param": "p"})
        trial(ready)
        assert ready.constraint is not None
        assert not ready.warnings
    assert not trial.spent


@pytest.mark.parametrize("source", ['start: "a" <|im_start|> /[a-zé]+/ | <[1-3]>', 'start: %json {"const": {"long name": "é"}}'])
def test_a_vocabulary_of_bytes_reads_what_the_models_reads(source):
    trial, real = (GrammarCompiler(tokenizer(), 300, trial=trial) for trial in (True, False))
    assert trial.grammar(source).kind == real.grammar(source).kind
    assert trial.regex("[ab]{3}é")().mask().any()


def test_a_schema_that_is_read_for_seconds_is_a_bad_request_in_time(start):
    server = start()
    try:
        http, before = server.client, server.call(lambda: server.runtime.pool.pids)
        body = {**HI, "response_format": {"type": "json_schema", "json_schema": {"name": "slow", "schema": SLOW}}}
        started = time.process_time()
        answer = http.post("/v1/chat/completions", json=body, timeout=60)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_schema", "response_format.json_schema.schema")
        assert f"more than {READ_S:g} s" in error["message"]
        assert time.process_time() - started < READ_S, "and not by this process"
        assert not set(before) & set(server.call(lambda: server.runtime.pool.pids))
        for pid in before:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        quick = {**HI, "response_format": {"type": "json_schema", "json_schema": {"name": "quick", "schema": SCHEMA}}}
        assert http.post("/v1/chat/completions", json=quick).status_code == 200
    finally:
        server.close()
