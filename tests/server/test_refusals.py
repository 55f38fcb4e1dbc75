"""What is refused, with which status, naming which field; and what must never be in an answer."""

from __future__ import annotations

import json

import pytest

from fastllm.server.app import ROUTES

HI = [{"role": "user", "content": "Hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def refused(http, path, body, status=400):
    """The error of a request that must be refused."""
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert "/tmp" not in answer.text
    assert "Traceback" not in answer.text
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 5.1),
        ("temperature", "1"),
        ("top_p", -0.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2),
        ("presence_penalty", 2.1),
        ("repetition_penalty", 0),
        ("n", 0),
        ("n", 17),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**31),
        ("max_tokens", True),
        ("stop", ["x"] * 17),
        ("stop", ["x" * 257]),
        ("stop", [""]),
        ("stop", 3),
        ("top_logprobs", 21),
        ("logit_bias", {"70": 101}),
        ("logit_bias", {"256": 1}),
        ("logit_bias", {"cat": 1}),
        ("stop_token_ids", [256]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.0]),
        ("min_tokens", -1),
        ("cache_salt", "a b"),
        ("cache_salt", "x" * 129),
        ("messages", []),
        ("messages", "Hi"),
        ("response_format", {"type": "yaml"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}),
        ("tools", [{"type": "function", "function": {"name": "no blanks"}}]),
        ("tools", [{"type": "web_search"}]),
        ("tools", [{"type": "function", "function": {"name": "f"}}] * 2),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("structured_outputs", {"json": {}, "regex": "a"}),
        ("guided_regex", "a("),
        ("guided_choice", []),
        ("grammar", "start: missing"),
        ("functions", [{}]),
        ("audio", {}),
        ("chat_template", "x"),
        ("guided_json", {"$ref": "https://example.com/schema"}),
        ("modalities", ["audio"]),
        ("reasoning_effort", "low"),
        ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", {"chat_template": "x"}),
        ("chat_template_kwargs", {"unknown": 1}),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_each_field_out_of_range_is_a_bad_request_that_names_it(http, field, value):
    error = refused(http, CHAT, {"messages": HI, "logprobs": True, field: value})
    assert error["type"] == "invalid_request_error"
    assert field in (error["param"] or "") + error["message"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "robot", "content": "Hi"}], "messages[0].role"),
        ([{"content": "Hi"}], "messages[0].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([*HI, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}], "messages[1].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls[0]"),
    ],
)
def test_wrong_messages_are_named(http, messages, param):
    assert refused(http, CHAT, {"messages": messages})["param"] == param


@pytest.mark.parametrize("content", [None, "", "a", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]])
@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_every_role_takes_every_form_of_text(http, role, content):
    answer = http.post(CHAT, json={"messages": [{"role": role, "content": content}], "max_tokens": 1})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [256]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3, "n": 2}, "best_of"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ],
)
def test_wrong_completions_are_named(http, body, field):
    error = refused(http, TEXT, body)
    assert field in (error["param"] or "") + error["message"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"3",
        b"[]",
        b"null",
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e400}',
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "a"',
        b'\xef\xbb\xbf{"prompt": "a"}',
        '{"prompt": "a"}'.encode("utf-16"),
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"seed": ' + b"9" * 400 + b"}",
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a": ' * 70 + b"1" + b"}" * 70,
    ],
)
def test_what_is_not_strict_json_is_a_bad_request(http, raw):
    answer = http.post(TEXT, content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.headers["x-should-retry"] == "false"
    json.loads(answer.content, parse_constant=lambda name: pytest.fail(f"{name} in the error"))


def test_a_nul_inside_of_a_string_is_text(http):
    assert http.post(TEXT, json={"prompt": "a\0b", "max_tokens": 1}).status_code == 200


def test_lengths_around_the_context(http):
    for length, status in ((1022, 200), (1023, 200), (1024, 400), (1025, 400)):
        answer = http.post(TEXT, json={"prompt": [70] * length, "max_tokens": 2})
        assert answer.status_code == status
    error = refused(http, TEXT, {"prompt": "x" * 2_000_000})
    assert (error["code"], error["n_ctx"]) == ("context_length_exceeded", 1024)
    assert error["n_prompt_tokens"] > 1024


def test_routes_methods_and_media_types(http):
    assert http.get("/v1/nothing").status_code == 404
    assert "embeddings" in http.post("/v1/embed", json={}).json()["error"]["message"]
    wrong = http.get(CHAT)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "OPTIONS, POST")
    wrong = http.post("/health", json={})
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, HEAD, OPTIONS")
    wrong = http.head(CHAT)
    assert (wrong.status_code, wrong.headers["allow"], wrong.content) == (405, "OPTIONS, POST", b"")
    raw = json.dumps({"messages": HI}).encode()
    assert http.post(CHAT, content=raw, headers={"content-type": "text/plain"}).status_code == 415
    assert http.post(CHAT, content=raw, headers={"content-type": "application/json", "content-encoding": "gzip"}).status_code == 415


def test_head_is_get_without_a_body(http):
    """On one connection: a body that came all the same would be read as the next answer."""
    for method, path, _, _ in ROUTES:
        if method != "GET" or path in ("/metrics", "/v1/requests"):
            continue
        path = path.replace("{response_id}", "resp_1").replace("{model_id:path}", "tiny")
        whole, head = http.get(path), http.head(path)
        assert (head.status_code, head.content) == (whole.status_code, b""), path
        assert head.headers["content-type"] == whole.headers["content-type"]
        if path not in ("/props", "/openapi.json"):
            assert head.headers["content-length"] == str(len(whole.content)), path
    for path in ("/", "/assets/app.js"):
        whole, head = (http.request(m, path, headers={"accept-encoding": "identity"}) for m in ("GET", "HEAD"))
        assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", whole.headers["etag"])
        assert head.headers["content-length"] == str(len(whole.content))
    assert http.head("/v1/nothing").status_code == 404
    described = http.get("/openapi.json").json()["paths"]
    assert {path for path, told in described.items() if "head" in told} == {path for path, told in described.items() if "get" in told}


@pytest.mark.parametrize("path", ["//v1/models", "/v1//models", "/v1/../v1/models", "/../etc/passwd", "/v1/models%0d%0aX: 1"])
def test_odd_paths_are_no_routes(server, path):
    with server.connect() as raw:
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert raw.makefile("rb").read(12) in (b"HTTP/1.1 404", b"HTTP/1.1 400")


def test_a_body_above_the_limit_is_refused_without_being_read(start, http):
    server = start(max_body=1000)
    try:
        with server.connect() as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1001\r\n\r\n{")
            answer = raw.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"connection: close" in answer.lower()
        with server.connect() as raw:  # without a length
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
            raw.sendall(b"400\r\n" + b"x" * 0x400 + b"\r\n")
            assert raw.makefile("rb").read().startswith(b"HTTP/1.1 413")
    finally:
        server.close()


def test_a_body_that_stops_coming_is_a_timeout(start):
    server = start(body_pause_s=0.05)
    try:
        with server.connect() as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n{")
            assert raw.makefile("rb").read().startswith(b"HTTP/1.1 408")
    finally:
        server.close()


def test_headers_that_are_too_long_are_refused(server):
    with server.connect() as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 40_000)
        assert raw.makefile("rb").read(12) == b"HTTP/1.1 400"


def test_strict_refuses_what_would_be_ignored_and_other_models(start):
    server = start(strict=True, strict_model=True, dev=True)
    try:
        http = server.client
        assert refused(http, TEXT, {"prompt": "a", "user": "u"})["param"] == "user"
        assert refused(http, "/v1/cancel", {"id": "x", "why": "enough"})["param"] == "why"
        assert refused(http, "/v1/cancel", {"id": "x", "why": None}, 404)["code"] == "not_found"
        assert refused(http, TEXT, {"prompt": "a", "model": "gpt"}, 404)["code"] == "model_not_found"
        assert http.post(TEXT, json={"prompt": "a", "model": "org/tiny", "max_tokens": 1}).json()["model"] == "tiny"
    finally:
        server.close()


def test_the_description_is_true_of_routes_and_bodies(http):
    document = http.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            answer = http.request(method.upper(), path.replace("{model_id}", "tiny").replace("{response_id}", "x"), json={})
            assert str(answer.status_code) in operation["responses"], (path, answer.text)
    assert document["components"]["schemas"]["ChatBody"]["properties"]["temperature"]["anyOf"][0]["maximum"] == 5


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        (CHAT, {"messages": HI, "stop": ["x"] * 17}, "stop", "at most 16"),
        (CHAT, {"messages": HI, "stop": "x" * 257}, "stop", "at most 256"),
        (CHAT, {"messages": HI, "stop": ["x", ""]}, "stop[1]", "at least 1"),
        (CHAT, {"messages": HI, "stop": 3}, "stop", "valid string"),
        (CHAT, {"messages": HI, "stop": ["x", 3]}, "stop[1]", "valid string"),
        (CHAT, {"messages": HI, "tool_choice": {"type": "function"}}, "tool_choice.function", "is missing"),
        (CHAT, {"messages": HI, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", "is missing"),
        (CHAT, {"messages": HI, "tool_choice": "any"}, "tool_choice", "'none', 'auto' or 'required'"),
        (CHAT, {"messages": [*HI, {"role": "user", "content": [{}, 1]}]}, "messages[1].content[1]", "valid dictionary"),
        (CHAT, {"messages": HI, "functions": [{}]}, "functions", "send tools"),
        (TEXT, {"prompt": ["a"] * 129}, "prompt", "at most 128"),
        (TEXT, {"prompt": []}, "prompt", "at least 1"),
        (TEXT, {"prompt": [1, "a"]}, "prompt[1]", "valid integer"),
        (TEXT, {"prompt": ["a", 1]}, "prompt[1]", "valid string"),
        (TEXT, {"prompt": [[1], ["a"]]}, "prompt[1][0]", "valid integer"),
        (TEXT, {"prompt": [[1], []]}, "prompt[1]", "at least 1"),
        (TEXT, {"prompt": ["a", ""]}, "prompt[1]", "is empty"),
        (TEXT, {"prompt": ["a", "b" * 5000]}, "prompt[1]", "5000"),
        (TEXT, {"prompt": "a" * 5000}, "prompt", "5000"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 1500}]}, "messages", "1024"),
    ],
)
def test_the_fault_that_is_told_is_the_one_of_the_form_that_was_meant(http, path, body, param, said):
    error = refused(http, path, body)
    assert error["param"] == param
    assert said in error["message"]
    assert "constrained" not in json.dumps(error)


def test_a_model_that_is_not_there_is_told_as_such(http):
    answer = http.get("/v1/models/none/here")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
