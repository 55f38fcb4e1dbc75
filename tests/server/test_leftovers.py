"""Small promises: what pages of other origins may send and read, which fields are told to be without effect, how many grammars wait."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from pydantic import TypeAdapter, ValidationError

from fastllm.core.errors import EngineError, Unavailable
from fastllm.server.constraints import MAX_WAITING, Compilation
from fastllm.server.gate import Visit
from fastllm.server.log import Log
from fastllm.server.prepare import Prepared

HI = [{"role": "user", "content": "Hi"}]
PAGE = "https://chat.example"
SDK = "authorization,content-type,x-stainless-os,x-stainless-retry-count,anthropic-dangerous-direct-browser-access,openai-organization"


@pytest.fixture(scope="module")
def page(start):
    server = start(keys=("correct-horse-1",), origins=(PAGE,))
    yield server.client
    server.close()


def test_a_page_may_send_the_headers_of_its_library(page):
    asked = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": SDK + ",bad header\x7f"}
    answer = page.request("OPTIONS", "/v1/chat/completions", headers=asked)
    allowed = answer.headers["access-control-allow-headers"].split(", ")
    assert set(SDK.split(",")) < set(allowed)
    assert not any(" " in name for name in allowed)
    other = page.request("OPTIONS", "/v1/chat/completions", headers={**asked, "origin": "https://evil.example"})
    assert other.status_code == 403
    assert "access-control-allow-headers" not in other.headers


@pytest.mark.parametrize(("headers", "path", "status"), [({}, "/v1/models", 401), ({"x-api-key": "correct-horse-1"}, "/nothing", 404)])
def test_a_page_can_read_why_it_was_refused(page, headers, path, status):
    answer = page.get(path, headers={**headers, "origin": PAGE})
    assert answer.status_code == status
    assert answer.headers["access-control-allow-origin"] == PAGE


def test_fields_without_effect_are_listed_at_every_depth(http):
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {}}], "mood": "good"}],
        "tools": [{"type": "function", "function": {"name": "f", "strict": True, "color": 3}, "price": 1}],
        "max_tokens": 2,
        "user": "me",
        "store": None,
    }
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    told = set(answer.headers["x-fastllm-ignored"].split(", "))
    assert told == {"user", "messages[].mood", "messages[].content[].cache_control", "tools[].price", "tools[].function.color"}


def test_a_key_of_a_message_that_the_template_reads_is_not_ignored(http):
    message = {"role": "user", "content": "Hi", "name": "ann", "tool_call_id": "x", "reasoning_content": "hm"}
    answer = http.post("/v1/chat/completions", json={"messages": [message], "max_tokens": 2})
    assert "x-fastllm-ignored" not in answer.headers


@pytest.mark.parametrize("form", ["enum", "variants", "choice", "lark"])
def test_thousands_of_choices_are_held(http, form):
    texts = [f"item {i * 7919 % 10007}" for i in range(2500)]
    extra = {
        "enum": {"guided_json": {"type": "object", "properties": {"a": {"enum": texts}}, "required": ["a"]}},
        "variants": {"guided_json": {"anyOf": [{"type": "object", "properties": {"k": {"const": t}}, "required": ["k"], "additionalProperties": False} for t in texts[:2100]]}},
        "choice": {"guided_choice": texts},
        "lark": {"grammar": "start: " + " | ".join(json.dumps(t) for t in texts)},
    }[form]
    answer = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 100, "temperature": 1.0, "seed": 2, **extra})
    assert answer.status_code == 200, answer.text[:400]
    text = answer.json()["choices"][0]["text"]
    if form in ("choice", "lark"):
        assert text in texts
    else:
        assert next(iter(json.loads(text).values())) in texts


def test_grammars_that_wait_are_counted():
    held, entered = threading.Event(), threading.Semaphore(0)

    class Slow:
        def regex(self, source, param):
            entered.release()
            assert held.wait(60)
            return source

    async def ask():
        room = Compilation(Slow)
        wanted = Prepared(constraint={"kind": "regex", "source": "a", "param": "regex"})
        tasks = [asyncio.create_task(room(wanted)) for _ in range(MAX_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            await room(wanted)
        held.set()
        assert await asyncio.gather(*tasks) == ["a"] * MAX_WAITING
        assert await room(wanted) == "a"
        room.close()

    asyncio.run(ask())


def test_the_log_of_a_fault_has_its_cause(capsys):
    Log().fault(Visit("id-1", "POST", "/v1/completions"), EngineError("a step failed", why="row 3 is not finite"))
    assert "row 3 is not finite" in capsys.readouterr().err


def test_the_log_of_a_fault_has_no_text_of_a_client_or_a_model(capsys):
    text = json.dumps({"n": "sec" + "ret"})
    try:
        try:
            TypeAdapter(dict[str, int]).validate_json(text)
        except ValidationError as error:
            raise RuntimeError("no call") from error
    except RuntimeError as error:
        Log().fault(Visit("id-1", "POST", "/v1/messages"), error)
    told = capsys.readouterr().err
    assert "int_parsing" in told
    assert "no call" in told
    assert "secret" not in told


def test_a_special_token_that_is_skipped_has_no_bytes_in_the_content(http):
    body = {"messages": HI, "max_tokens": 2, "logprobs": True, "logit_bias": {"0": 100}, "temperature": 0}  # <unk>
    entries = http.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    assert [(e["token"], e["bytes"]) for e in entries] == [("<unk>", [])] * 2
