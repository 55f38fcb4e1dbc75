"""The list of models in both shapes, and the routes that count tokens."""

from __future__ import annotations

import anthropic
import openai
import pytest

HI = [{"role": "user", "content": "Hi"}]
NAMES = tuple(f"m{number}" for number in range(25))
THEIRS = {"anthropic-version": "2023-06-01"}
ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
SHELL = {"type": "custom", "name": "sh", "description": "Runs.", "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}}


@pytest.fixture(scope="module")
def many(start):
    running = start(names=NAMES)
    yield running
    running.close()


def page(server, **query):
    answer = server.client.get("/v1/models", params=query, headers=THEIRS)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    ids = [m["id"] for m in told["data"]]
    assert (told["first_id"], told["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
    return ids, told["has_more"]


def test_a_page_has_twenty_entries_unless_it_is_said(many):
    assert page(many) == (list(NAMES[:20]), True)
    assert page(many, limit=25) == (list(NAMES), False)
    assert page(many, limit=24) == (list(NAMES[:24]), True)
    assert page(many, limit=1000) == (list(NAMES), False)


def test_a_page_begins_behind_an_id_or_ends_before_it(many):
    assert page(many, after_id="m19") == (list(NAMES[20:]), False)
    assert page(many, after_id="m3", limit=2) == (["m4", "m5"], True)
    assert page(many, after_id="m24") == ([], False)
    assert page(many, before_id="m3", limit=2) == (["m1", "m2"], True)
    assert page(many, before_id="m2", limit=2) == (["m0", "m1"], False)
    assert page(many, before_id="m0") == ([], False)


def test_every_model_here_is_active(many):
    assert page(many, **{"lifecycle[]": ["active", "retired"], "limit": 2}) == (["m0", "m1"], True)
    assert page(many, **{"lifecycle[]": "deprecated"}) == ([], False)


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 1001}, "limit"),
        ({"limit": "1e2"}, "limit"),
        ({"limit": ["1", "2"]}, "limit"),
        ({"after_id": "gone"}, "after_id"),
        ({"before_id": ""}, "before_id"),
        ({"after_id": "m1", "before_id": "m3"}, "before_id"),
        ({"lifecycle[]": "new"}, "lifecycle"),
    ],
)
def test_a_page_that_cannot_be_is_refused(many, query, named):
    answer = many.client.get("/v1/models", params=query, headers=THEIRS)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert named in answer.json()["error"]["message"]


def test_anthropics_client_walks_through_all_pages(many):
    with anthropic.Anthropic(base_url=many.url, api_key="none", max_retries=0, _strict_response_validation=True) as client:
        assert [m.id for m in client.models.list(limit=4)] == list(NAMES)
        assert {m.id for m in client.models.list(limit=4, before_id="m24")} == set(NAMES[:24])


def test_openais_list_is_whole_and_knows_no_pages(many):
    with openai.OpenAI(base_url=f"{many.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True) as client:
        assert [m.id for m in client.models.list()] == list(NAMES)


def test_what_a_list_does_not_know_is_told(many):
    answer = many.client.get("/v1/models", params={"beta": "true", "limit": 1}, headers=THEIRS)
    assert answer.headers["x-fastllm-ignored"] == "beta"
    whole = many.client.get("/v1/models", params={"beta": "true", "limit": 1})
    assert (len(whole.json()["data"]), whole.headers["x-fastllm-ignored"]) == (len(NAMES), "beta, limit")
    assert "x-fastllm-ignored" not in many.client.get("/v1/models").headers


def test_the_description_has_the_parameters_of_the_list(many):
    told = many.client.get("/openapi.json").json()["paths"]["/v1/models"]["get"]
    assert [(p["name"], p["in"]) for p in told["parameters"]] == [(name, "query") for name in ("limit", "after_id", "before_id", "lifecycle[]")]
    assert "400" in told["responses"]


@pytest.mark.parametrize(
    "asked",
    [
        {"input": "Hi"},
        {"input": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}, {"role": "user", "content": "He"}], "instructions": "Be short."},
        {"input": "Hi", "tools": [{"type": "function", **ADD}], "tool_choice": "required"},
        {"input": "Hi", "tools": [{"type": "function", **ADD}], "tool_choice": "none"},
        {"input": "Hi", "tools": [SHELL]},
    ],
)
def test_what_a_response_would_take_is_counted(client, asked):
    told = client.responses.input_tokens.count(model="tiny", **asked)
    assert told.input_tokens == client.responses.create(model="tiny", max_output_tokens=1, **asked).usage.input_tokens


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": ADD}]])
def test_what_a_chat_would_take_is_counted(http, tools):
    body = {"messages": HI, "tools": tools}
    told = http.post("/v1/chat/completions/input_tokens", json=body).json()
    assert told == {"object": "response.input_tokens", "input_tokens": told["input_tokens"]}
    assert told["input_tokens"] == http.post("/v1/chat/completions", json={**body, "max_tokens": 1}).json()["usage"]["prompt_tokens"]


def test_what_a_message_would_take_is_counted(claude):
    asked = {"model": "tiny", "messages": HI, "system": "Be short.", "tools": [{"name": "add", "input_schema": ADD["parameters"]}]}
    usage = claude.messages.create(max_tokens=1, **asked).usage
    assert claude.messages.count_tokens(**asked).input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": None}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": [{"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": "Hi " * 100_000}, "input"),
    ],
)
def test_what_a_response_refuses_is_not_counted(http, more, param):
    answer = http.post("/v1/responses/input_tokens", json={"input": "Hi", **more})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "count", "body"),
    [
        *(("/v1/responses", "input_tokens", {"input": "Hi", name: value}) for name, value in (("background", True), ("max_tool_calls", 1), ("prompt", {"id": "p"}))),
        *(("/v1/messages", "count_tokens", {"messages": HI, name: value}) for name, value in (("container", "c"), ("mcp_servers", [{}]), ("output_format", {"type": "x"}))),
        *(
            ("/v1/chat/completions", "input_tokens", {"messages": HI, **more})
            for more in (
                {"guided_json": {}, "guided_regex": "a"},
                {"max_tokens": 0},
                {"top_logprobs": 1},
                {"stream_options": {"include_usage": True}},
                {"response_format": {"type": "xml"}},
            )
        ),
    ],
)
def test_a_count_refuses_what_the_route_beside_it_refuses(http, path, count, body):
    answer, beside = (http.post(where, json={"max_tokens": 4, **body} if where == "/v1/messages" else body) for where in (f"{path}/{count}", path))
    assert (answer.status_code, answer.json()["error"]) == (400, beside.json()["error"])


def test_a_prompt_that_fills_the_context_is_counted(http):
    n_ctx = http.get("/props").json()["default_generation_settings"]["n_ctx"]
    answer = http.post("/v1/chat/completions/input_tokens", json={"messages": [{"role": "user", "content": "a b " * n_ctx}]})
    assert answer.json()["input_tokens"] > n_ctx


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses/input_tokens", {"input": "Hi", "user": "me"}),
        ("/v1/chat/completions/input_tokens", {"messages": HI, "user": "me"}),
        ("/v1/messages/count_tokens", {"messages": HI, "user": "me"}),
        ("/apply-template", {"messages": HI, "user": "me"}),
        ("/tokenize", {"prompt": "Hi", "user": "me"}),
        ("/detokenize", {"tokens": [40], "user": "me"}),
    ],
)
def test_routes_that_only_prepare_tell_what_they_ignore(http, path, body):
    answer = http.post(path, json=body)
    assert (answer.status_code, answer.headers["x-fastllm-ignored"]) == (200, "user")
