"""Fields in combination and at their edges, where another server would take one thing for another."""

from __future__ import annotations

import pytest

HI = [{"role": "user", "content": "Hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(("prompts", "n", "status"), [(128, None, 200), (8, 16, 200), (129, None, 400), (65, 2, 400), (128, 16, 400)])
def test_prompts_times_n_is_what_one_request_may_have(http, prompts, n, status):
    body = {"prompt": ["a"] * prompts, "max_tokens": 1, **({} if n is None else {"n": n})}
    answer = http.post(TEXT, json=body)
    assert answer.status_code == status
    if status == 200:
        assert [choice["index"] for choice in answer.json()["choices"]] == list(range(128))
    else:
        assert answer.json()["error"]["param"] == ("prompt" if n is None else "n")
        assert "128" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", ["<tool_call>{}</tool_call>", "so <tool_call> it", "a<tool_<tool_call>"])
def test_no_marker_is_written_where_no_tool_may_be_called(http, script, said, stream):
    """Here the marker is eleven tokens, none of which is one."""
    script.say(said)
    body = {"messages": HI, "tools": [CLOCK], "tool_choice": "none", "max_tokens": 40, "stream": stream}
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 200
    begun, _, _ = said.partition("<tool_call>")
    assert script.refused[:1] == [script._tokenizer.encode(">", add_special=False, parse_special=False)[0]]
    assert "<tool_call>" not in answer.text
    if not stream:
        [choice] = answer.json()["choices"]
        assert choice["message"]["content"].startswith(f"{begun}<tool_call")
        assert "tool_calls" not in choice["message"]


def test_a_marker_may_be_written_inside_of_a_form(http):
    body = {"messages": HI, "tools": [CLOCK], "tool_choice": "none", "max_tokens": 60, "structured_outputs": {"choice": ["<tool_call>x"]}}
    assert http.post(CHAT, json=body).json()["choices"][0]["message"]["content"] == "<tool_call>x"


def test_and_with_a_budget_of_reasoning_no_marker_comes_either(http, script):
    script.say("<tool_call>")
    body = {"messages": HI, "tools": [CLOCK], "tool_choice": "none", "max_tokens": 20, "logit_bias": {"5": 1}, "thinking_budget": 4}
    assert "<tool_call>" not in http.post(CHAT, json=body).text
    assert len(script.refused) >= 1


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (CHAT, "functions", []),
        (TEXT, "suffix", ""),
        ("/v1/responses", "background", False),
        ("/v1/responses", "conversation", None),
        ("/v1/messages", "mcp_servers", []),
    ],
)
def test_a_field_that_asks_for_nothing_is_not_refused(http, path, field, value):
    bodies = {CHAT: {"messages": HI, "max_tokens": 1}, TEXT: {"prompt": "a", "max_tokens": 1}, "/v1/responses": {"input": "a", "max_output_tokens": 1}}
    answer = http.post(path, json={**bodies.get(path, {"messages": HI, "max_tokens": 1}), field: value})
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-fastllm-ignored") == (None if value is None else field)


def test_no_reasoning_is_what_a_model_without_it_does(http):
    assert http.post(CHAT, json={"messages": HI, "max_tokens": 1, "reasoning_effort": "none"}).status_code == 200
    assert http.post("/v1/responses", json={"input": "a", "max_output_tokens": 1, "reasoning": {"effort": "none"}}).status_code == 200


@pytest.mark.parametrize("key", ["05", "+5", "-0", "5 ", "٥", "5.0", "0x5"])
def test_a_key_of_logit_bias_has_one_spelling(http, key):
    error = http.post(CHAT, json={"messages": HI, "logit_bias": {key: 1, "5": 2}}).json()["error"]
    assert error["param"] == "logit_bias"


@pytest.mark.parametrize("arguments", ['{"a": NaN}', '{"a": 1e999}', '{"a": -Infinity}', "[1]", "{", "[" * 9000, '{"a": ' + "9" * 9000 + "}"])
@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
def test_arguments_of_an_earlier_call_are_json(http, path, arguments):
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": arguments}}
    said = {
        CHAT: {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]},
        "/v1/responses": {"input": [{"type": "function_call", "call_id": "c1", "name": "clock", "arguments": arguments}]},
    }
    answer = http.post(path, json=said[path])
    assert answer.status_code == 400
    assert "arguments" in answer.json()["error"]["message"]
