"""/openapi.json: what it says of bodies, answers, streams and errors is so. Every JSON answer that a test of this folder gets through
`Server.client` is held to it as well (`conftest.Server`)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from fastllm.server import answer_schemas, chat_schemas, event_schemas, schemas
from fastllm.server.bodies import REFUSED
from fastllm.server.openapi import describe
from fastllm.server.settings import ServerSettings

HI = [{"role": "user", "content": "Hi"}]
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
LOUD = {"type": "custom", "name": "loud", "format": {"type": "grammar", "syntax": "regex", "definition": "[A-Z]{3}"}}


def names(document):
    """{path: {method: statuses}}."""
    return {path: {method: set(told["responses"]) for method, told in methods.items()} for path, methods in document["paths"].items()}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HI, "max_tokens": 6, "n": 2, "logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}}),
        (CHAT, {"messages": HI, "max_tokens": 6, "timings_per_token": True, "return_progress": True, "cache_prompt": False}),
        (CHAT, {"messages": HI, "max_tokens": 90, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}),
        (TEXT, {"prompt": ["a", "b"], "max_tokens": 4, "logprobs": 2, "echo": True, "stream_options": {"include_usage": True}}),
        (TEXT, {"prompt": [70, 71], "max_tokens": 4, "timings_per_token": True, "return_progress": True, "cache_prompt": False}),
        (RESPONSES, {"input": "Hi", "max_output_tokens": 6, "top_logprobs": 2}),
        (RESPONSES, {"input": "Hi", "max_output_tokens": 90, "tools": [{"type": "function", **TOOLS[0]["function"]}], "tool_choice": "required"}),
        (RESPONSES, {"input": "Hi", "max_output_tokens": 90, "tools": [LOUD], "tool_choice": "required", "parallel_tool_calls": False}),
        (MESSAGES, {"messages": HI, "max_tokens": 6}),
        (MESSAGES, {"messages": HI, "max_tokens": 90, "tools": [{"name": "weather", "input_schema": CITY}], "tool_choice": {"type": "any"}}),
    ],
)
def test_streams_and_whole_answers_are_those_that_are_described(server, http, parse, path, body):
    body = {"seed": 3, **body} if path in (CHAT, TEXT) else body
    whole = {k: v for k, v in body.items() if k not in ("stream_options", "return_progress")}
    assert http.post(path, json=whole).status_code == 200  # held to the description by the client
    events = parse(http.post(path, json={**body, "stream": True}).content)
    assert len(events) > 3
    server.description.events(path, events)


def test_a_stream_that_fails_is_described_too(start, parse, brake):
    server = start()
    try:
        for path, body in ((CHAT, {"messages": HI}), (TEXT, {"prompt": "a"}), (RESPONSES, {"input": "a"}), (MESSAGES, {"messages": HI, "max_tokens": 9})):
            held = brake(server)
            held.error = RuntimeError("no step")
            held.step()
            events = parse(server.client.post(path, json={**body, "stream": True}).content)
            held.error = None
            held.release()
            assert "error" in str(events[-1])
            server.description.events(path, events)
            server.client.post(path, json={**body, **({"max_output_tokens": 1} if path == RESPONSES else {"max_tokens": 1})}).raise_for_status()
    finally:
        server.close()


EVERY = {"x-request-id": "r", "request-id": "r", "x-content-type-options": "nosniff"}
JSON = {**EVERY, "content-type": "application/json"}
REFUSED_HEAD = {**JSON, "x-should-retry": "false"}


@pytest.mark.parametrize(
    ("method", "path", "status", "headers", "raw"),
    [
        ("GET", "/live", 200, JSON, b'{"status": "ok", "more": 1}'),
        ("GET", "/live", 418, JSON, b"{}"),
        ("GET", "/live", 200, {**JSON, "content-type": "text/plain"}, b"ok"),
        ("GET", "/live", 200, {**JSON, "x-other": "1"}, b'{"status": "ok"}'),
        ("GET", "/live", 200, {**JSON, "x-content-type-options": "sniff"}, b'{"status": "ok"}'),
        ("GET", "/live", 200, {"content-type": "application/json"}, b'{"status": "ok"}'),
        ("HEAD", "/live", 200, JSON, b'{"status": "ok"}'),
        ("POST", MESSAGES, 400, REFUSED_HEAD, b'{"error": {"message": "", "type": "", "param": null, "code": null}}'),
        ("POST", MESSAGES, 400, JSON, b'{"type": "error", "error": {"message": "", "type": ""}, "request_id": "r"}'),
        ("POST", CHAT, 503, {**JSON, "retry-after": "soon"}, b'{"error": {"message": "", "type": "", "param": null, "code": null}}'),
        ("PUT", CHAT, 405, REFUSED_HEAD, b'{"error": {"message": "", "type": "", "param": null, "code": null}}'),
        ("GET", "/nope", 404, JSON, b'{"error": {"message": "", "type": "", "param": null, "code": null}}'),
        ("OPTIONS", CHAT, 204, EVERY, b""),
    ],
)
def test_a_wrong_answer_would_be_seen(server, method, path, status, headers, raw):
    """The check that stands behind every test."""
    with pytest.raises((AssertionError, ValueError)):
        server.description.answer(method, path, status, headers, raw)


def test_a_wrong_event_would_be_seen(server):
    with pytest.raises(AssertionError):
        server.description.events(CHAT, [{"id": "x"}])


def test_errors_are_described_as_each_interface_words_them(server):
    schema = {}
    for path, methods in server.description.document["paths"].items():
        for told in (told for method, told in methods.items() if method != "head"):
            schema[path] = told["responses"]["400"]["content"]["application/json"]["schema"]
    assert schema[CHAT] == {"$ref": "#/components/schemas/Error"}
    assert schema[MESSAGES] == schema["/v1/messages/count_tokens"] == {"$ref": "#/components/schemas/AnthropicError"}
    assert len(schema["/v1/models"]["anyOf"]) == 2


def test_the_description_follows_the_options(server):
    app = server.runtime.gate.app
    plain = describe(app, ServerSettings())
    assert "security" not in plain
    assert "servers" not in plain
    assert "401" not in str(names(plain))
    assert "429" not in str(names(plain))
    other = ServerSettings(keys=("k" * 8,), root_path="/llm", max_n=3, strict_model=True, dev=True, metrics=False, web=False, embedding="last", key_concurrent=2)
    full = describe(app, other)
    assert full["security"] == [{"bearer": []}, {"key": []}]
    assert full["paths"]["/health"]["get"]["security"] == full["paths"]["/"]["get"]["security"] == []
    assert "security" not in full["paths"][CHAT]["post"]
    assert full["servers"] == [{"url": "/llm"}]
    assert full["components"]["schemas"]["ChatBody"]["properties"]["n"]["anyOf"][0]["maximum"] == 3
    before, after = names(plain), names(full)
    assert (before[CHAT]["post"] ^ after[CHAT]["post"]) == {"200", "401", "408", "413", "415", "429"}  # a server that embeds refuses a chat unread
    assert (before["/v1/embeddings"]["post"] ^ after["/v1/embeddings"]["post"]) == {"200", "401", "404", "408", "413", "415", "429", "499"}
    assert (before["/v1/cancel"]["post"] ^ after["/v1/cancel"]["post"]) == {"200", "401", "408", "413", "415", "429"}
    assert "200" in after["/v1/embeddings"]["post"] - before["/v1/embeddings"]["post"]
    for path in ("/metrics", "/", "/assets/app.js"):
        assert ("200" in before[path]["get"], "501" in before[path]["get"]) == (True, False)
        assert ("200" in after[path]["get"], "501" in after[path]["get"]) == (False, True)
    for path, method in (("/v1/requests", "get"), ("/v1/cancel", "post")):
        assert ("200" in before[path][method], "200" in after[path][method]) == (False, True)
    assert before["/v1/responses/{response_id}"]["get"] >= {"404"}
    assert "200" not in after["/v1/responses/{response_id}"]["get"]


def test_every_get_has_a_head_and_headers_follow_the_options(server):
    app = server.runtime.gate.app
    plain = describe(app, ServerSettings())
    for path, methods in plain["paths"].items():
        assert ("get" in methods) == ("head" in methods), path
        for status, told in methods.get("head", {"responses": {}})["responses"].items():
            assert "content" not in told
            assert told["headers"] == methods["get"]["responses"][status]["headers"]
    asked = describe(app, ServerSettings(origins=("https://page.example",)))
    for name in ("access-control-allow-origin", "access-control-expose-headers", "vary"):
        assert name in asked["paths"][CHAT]["post"]["responses"]["200"]["headers"]
        assert name not in plain["paths"][CHAT]["post"]["responses"]["200"]["headers"]
    assert "access-control-allow-headers" in asked["components"]["responses"]["Options"]["headers"]


@pytest.fixture(scope="module")
def limited(start):
    """A server with a key and its limits, for pages of another origin, that can cancel; `client` holds each answer to the description."""
    running = start(keys=("a-good-key",), key_per_minute=30, key_concurrent=3, origins=("https://page.example",), dev=True, max_body=1 << 16, strict_model=True)
    yield running
    running.close()


def test_headers_of_real_answers_are_described(limited, http, brake, wait_until):
    """`Server.client` compares each: what comes is described, and what is always there comes."""
    client, key = limited.client, {"authorization": "Bearer a-good-key"}
    chat = {"messages": HI, "max_tokens": 1}
    page = {"origin": "https://page.example"}
    seen = {
        "401": client.post(CHAT, json=chat),
        "403": client.get("/v1/models", headers={**key, "origin": "https://other.example"}),
        "404": client.post(CHAT, json={**chat, "model": "other"}, headers=key),
        "405": client.put(CHAT, headers=key),
        "413": client.post(CHAT, json={**chat, "user": "x" * (1 << 16)}, headers=key),
        "415": client.post(CHAT, content=b"x", headers={**key, "content-type": "text/plain"}),
        "429": client.post(CHAT, json={**chat, "n": 4}, headers=key),
        "400": client.post(CHAT, json={**chat, "temperature": 9}, headers={**key, **page}),
        "200": client.post(CHAT, json={**chat, "max_tokens": 5000, "other": 1}, headers={**key, **page}),
        "204": client.options(CHAT, headers={**page, "access-control-request-headers": "x-own"}),
    }
    assert {code: str(answer.status_code) for code, answer in seen.items()} == {code: code for code in seen}
    assert seen["405"].headers["allow"] == "OPTIONS, POST"
    assert seen["429"].headers["x-should-retry"] == "false"
    assert {"x-fastllm-ignored", "x-fastllm-warning", "x-fastllm-seed", "access-control-allow-origin"} <= set(seen["200"].headers)
    assert "x-should-retry" in seen["400"].headers["access-control-expose-headers"]
    assert client.get("/nope", headers=key).status_code == 404
    assert client.head("/v1/models", headers=key).status_code == http.head("/").status_code == 200
    assert http.get("/v1/models?other=1").headers["x-fastllm-ignored"] == "other"
    while (late := client.post("/tokenize", json={"prompt": "a"}, headers=key)).status_code == 200:
        pass
    assert int(late.headers["retry-after"]) >= 1


def test_who_is_cancelled_sees_it(start, brake, wait_until):
    server = start(dev=True)
    try:
        held = brake(server)
        with ThreadPoolExecutor(1) as threads:
            slow = threads.submit(server.client.post, CHAT, json={"messages": HI, "max_tokens": 5, "other": 1}, headers={"x-request-id": "mine"})
            wait_until(lambda: len(server.runtime.active) == 1)
            assert server.client.post("/v1/cancel", json={"id": "mine"}).json() == {"id": "mine", "cancelled": True}
            answer = slow.result()
        assert (answer.status_code, answer.json()["error"]["code"], answer.headers["x-fastllm-ignored"]) == (499, "cancelled", "other")
        assert answer.headers["x-should-retry"] == "false"
        held.release()
    finally:
        server.close()


def test_what_is_refused_is_described_and_asks_for_nothing_at_most(server, http):
    described = server.description.document["components"]["schemas"]
    assert described["ChatBody"]["properties"]["functions"]["enum"] == [None, False, [], ""]
    assert "send tools" in described["ChatBody"]["properties"]["functions"]["description"]
    for name in REFUSED["chat"]:
        for value in (None, False, [], ""):
            answer = http.post(CHAT, json={"messages": HI, "max_tokens": 1, name: value})
            assert answer.status_code == 200, (name, value, answer.text)
            assert answer.headers.get("x-fastllm-ignored") == (None if value is None else name)
        for value in (0, 0.0, {}, True, "x", [1]):
            answer = http.post(CHAT, json={"messages": HI, "max_tokens": 1, name: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), value


def test_an_own_template_of_nothing_is_the_models(start, model_folder):
    server = start(request_template=True)
    try:
        asked = {"messages": HI}
        own, none = (server.client.post("/apply-template", json={**asked, **more}).json()["prompt"] for more in ({"chat_template": ""}, {}))
        assert own == none
        empty = server.client.post(CHAT, json={**asked, "chat_template": "{% if x is defined %}{{ messages[0].content }}{% endif %}"}).json()["error"]
        assert empty["param"] == "messages"
        assert "empty prompt" in empty["message"]
    finally:
        server.close()


def test_names_of_bodies_and_answers_differ():
    modules = (schemas, answer_schemas, chat_schemas, event_schemas)
    names = [name for module in modules for name, value in vars(module).items() if isinstance(value, type) and value.__module__ == module.__name__]
    assert len(set(names)) == len(names) > 100


@pytest.mark.parametrize("field", ["guided_json", "json_schema"])
def test_a_schema_that_is_true_is_any_json_and_false_is_refused(http, field):
    assert http.post(CHAT, json={"messages": HI, "max_tokens": 1, field: True}).status_code == 200
    refused = http.post(CHAT, json={"messages": HI, "max_tokens": 1, field: False}).json()["error"]
    assert (refused["param"], refused["code"]) == (field, "invalid_schema")


@pytest.mark.parametrize(
    ("field", "value"),
    [("response_format", {}), ("tool_choice", "required"), ("stream_options", {"include_usage": True}), ("temperature", 6), ("thinking_budget", -1), ("max_tokens", 0)],
)
def test_a_template_is_applied_to_what_a_chat_would_take(http, field, value):
    for path in (CHAT, "/apply-template", "/v1/chat/completions/input_tokens"):
        answer = http.post(path, json={"messages": HI, field: value})
        assert answer.status_code == 400, path
        assert field in answer.json()["error"]["param"]
