"""Structured output, tools and reasoning over HTTP, with OpenAI's client. The model is random: what holds is what is enforced."""

from __future__ import annotations

import json
import re
import shutil

import openai
import pytest

from fastllm.core.errors import InvalidSchema
from fastllm.loading import LoadOptions, load_model
from fastllm.server.settings import ServerSettings
from fastllm.text._matcher import CANNOT, Matcher

from .conftest import Script, Server

HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "k": {"enum": ["a", "b"]}},
    "required": ["n", "k"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": SCHEMA}}
NOT = {"type": "object", "properties": {"n": {"type": "integer"}, "k": {"not": {"type": "integer"}}}}
LOOSE = {"type": "function", "function": {"name": "weather", "parameters": NOT}}  # which no grammar holds
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = f'<tool_call>\n{json.dumps({"name": "weather", "arguments": {"n": 3, "k": "a"}})}\n</tool_call>'
THINKS = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.n }}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% else %}<think></think>{% endif %}{% endif %}"
)


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True) as client:
        yield client


@pytest.fixture(scope="module")
def thinker(model_folder, tmp_path_factory):
    """A server whose template knows tools and opens reasoning."""
    folder = shutil.copytree(model_folder, tmp_path_factory.mktemp("thinker") / "tiny")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": THINKS}))
    options = LoadOptions(backend="ref", max_batch_size=4)
    server = Server(ServerSettings(names=("thinker",)), lambda: load_model(folder, options))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True) as client:
        yield client
    server.close()


def ask(client, **more):
    full = {"model": "tiny", "messages": HI, "max_tokens": 120, "seed": 1, "temperature": 1.0, **more}
    return client.chat.completions.create(**full)


def joined(stream):
    """(reasoning, content, calls, finish reason) of a stream, checked against the wire rules of tool deltas."""
    reasoning, content, calls, reasons = "", "", [], []
    for chunk in stream:
        [choice] = chunk.choices
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        content += choice.delta.content or ""
        for delta in choice.delta.tool_calls or []:
            if delta.id is not None:
                assert delta.index == len(calls)
                assert delta.type == "function"
                calls.append([delta.id, delta.function.name, ""])
            else:
                assert delta.function.name is None
            calls[delta.index][2] += delta.function.arguments or ""
        if choice.finish_reason:
            reasons.append(choice.finish_reason)
    assert len(reasons) == 1
    assert len({call[0] for call in calls}) == len(calls)
    return reasoning, content, [(name, json.loads(arguments)) for _, name, arguments in calls], reasons[0]


def fits(value):
    return set(value) == {"n", "k"} and type(value["n"]) is int and 0 <= value["n"] <= 99 and value["k"] in ("a", "b")


@pytest.mark.parametrize("seed", range(3))
def test_json_schema_is_kept(client, seed):
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    [choice] = ask(client, response_format=format, seed=seed).choices
    assert fits(json.loads(choice.message.content))
    assert choice.finish_reason == "stop"
    _, content, _, reason = joined(ask(client, response_format=format, seed=seed, stream=True))
    assert (content, reason) == (choice.message.content, "stop")


def test_each_other_way_to_say_it(client, http):
    assert ask(client, response_format={"type": "json_object"}).choices[0].message.content.lstrip().startswith("{")
    for extra, pattern in (
        ({"structured_outputs": {"regex": "[ab]{4}"}}, "[ab]{4}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'root ::= "x" [0-9]\n'}, "x[0-9]"),
        ({"guided_regex": "a+b"}, "a+b"),
    ):
        text = ask(client, extra_body=extra).choices[0].message.content
        assert re.fullmatch(pattern, text), extra
        done = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 60, "temperature": 1.0, **extra}).json()
        assert re.fullmatch(pattern, done["choices"][0]["text"]), extra
    wrapped = {"structured_outputs": {"json": SCHEMA}, "n": 3}
    assert all(fits(json.loads(c.message.content)) for c in ask(client, extra_body=wrapped).choices)


def test_a_completion_has_the_form_of_a_chat_and_other_routes_name_their_own(http):
    for format, check in (({"type": "json_schema", "json_schema": {"schema": SCHEMA}}, fits), ({"type": "json_object"}, lambda value: isinstance(value, dict))):
        done = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 400, "temperature": 0.6, "seed": 2, "response_format": format})
        assert "x-fastllm-ignored" not in done.headers
        if (choice := done.json()["choices"][0])["finish_reason"] == "stop":
            assert check(json.loads(choice["text"]))
        else:
            assert choice["text"].lstrip().startswith("{")
    format = {"type": "json_object"}
    for path, body, instead in (
        ("/v1/responses", {"input": "Hi"}, "text.format"),
        ("/v1/responses/input_tokens", {"input": "Hi"}, "text.format"),
        ("/v1/messages", {"messages": HI, "max_tokens": 2}, "output_config.format"),
    ):
        refused = http.post(path, json={**body, "response_format": format})
        assert (refused.status_code, instead in refused.text) == (400, True)
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert http.post("/v1/completions", json={"prompt": "Hi", "tools": tools}).json()["error"]["param"] == "tools"


def test_a_grammar_that_cannot_be_followed_any_more_is_named(http, parse, monkeypatch):
    body = {"prompt": "Hi", "max_tokens": 9, "guided_regex": "[ab]{9,40}"}
    assert http.post("/v1/completions", json=body).status_code == 200

    class Grown(Matcher):
        def accept(self, token_id):
            raise InvalidSchema(CANNOT)

    monkeypatch.setattr("fastllm.text.grammar.Matcher", Grown)
    whole = http.post("/v1/completions", json=body)
    last = parse(http.post("/v1/completions", json={**body, "stream": True}).content)[-1]
    assert whole.status_code == 400
    for error in (whole.json()["error"], last["error"]):
        assert (error["param"], error["code"]) == ("guided_regex", "invalid_schema")
        assert error["message"].startswith("guided_regex: the grammar of this answer cannot be followed")


def test_what_cannot_be_enforced_is_400_before_a_stream_starts(http):
    body = {"messages": HI, "stream": True, "response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": {"a": "bar"}}}}}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "response_format.json_schema.schema"
    assert error["code"] == "invalid_schema"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_must_happen(client, choice, stream):
    asked = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 400}
    if stream:
        _, content, calls, reason = joined(ask(client, stream=True, **asked))
    else:
        [answer] = ask(client, **asked).choices
        calls = [(c.function.name, json.loads(c.function.arguments)) for c in answer.message.tool_calls]
        content, reason = answer.message.content or "", answer.finish_reason
    assert (content, reason, len(calls)) == ("", "tool_calls", 1)
    assert calls[0][0] == "weather"
    assert fits(calls[0][1])


def test_auto_reads_calls_and_leaves_text(client, script):
    said = f"Let me see.\n{CALL}"
    script.say(said)
    [choice] = ask(client, tools=[LOOSE, CLOCK], max_tokens=200).choices
    assert choice.message.content == "Let me see."
    assert [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls] == [("weather", {"n": 3, "k": "a"})]
    assert choice.finish_reason == "tool_calls"
    script.say(said)
    assert joined(ask(client, tools=[LOOSE], max_tokens=200, stream=True)) == (
        "",
        "Let me see.",
        [("weather", {"n": 3, "k": "a"})],
        "tool_calls",
    )
    script.say(said)
    [choice] = ask(client, tools=[WEATHER], tool_choice="none", max_tokens=200).choices
    assert choice.message.content.startswith("Let me see.\n<tool_call")
    assert "<tool_call>" not in choice.message.content
    assert choice.message.tool_calls is None


def test_a_call_that_is_cut_is_no_call(client, script):
    script.say(CALL)
    [choice] = ask(client, tools=[LOOSE], max_tokens=30).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert CALL.startswith(choice.message.content)
    both = CALL + CALL
    script.say(both)
    [choice] = ask(client, tools=[LOOSE], max_tokens=400).choices
    assert len(choice.message.tool_calls) == 2
    script.say(both)
    [choice] = ask(client, tools=[LOOSE], max_tokens=400, parallel_tool_calls=False).choices
    assert len(choice.message.tool_calls) == 1
    assert choice.finish_reason == "tool_calls"
    script.say(both)
    assert joined(ask(client, tools=[LOOSE], max_tokens=400, parallel_tool_calls=False, stream=True))[2:] == (
        [("weather", {"n": 3, "k": "a"})],
        "tool_calls",
    )


def test_a_form_leaves_no_place_for_calls_which_is_said(client, http, script):
    body = {"messages": HI, "tools": [WEATHER], "guided_choice": [CALL], "max_tokens": 200}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.headers["x-fastllm-warning"] == "the tools cannot be called: guided_choice says what the answer looks like"
    [choice] = answer.json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
    assert "tool_calls" not in choice["message"]


PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name", "age"], "additionalProperties": False}
BOB = '{"name": "Bob", "age": 3}'


@pytest.mark.parametrize("tool", [LOOSE, WEATHER], ids=["free", "held"])
def test_json_with_a_name_is_no_call(start, tool):
    """Of a family whose calls are bare JSON."""
    server = start(tool_parser="llama3-json")
    script = Script(server)
    try:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            format = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
            for more in ({}, {"extra_body": {"guided_json": PERSON}}, {"response_format": format} if tool is WEATHER else {}):
                for stream in (False, True):
                    script.say(BOB)
                    answer = ask(client, tools=[tool], stream=stream, **more)
                    if stream:
                        assert joined(answer) == ("", BOB, [], "stop")
                    else:
                        [choice] = answer.choices
                        assert (choice.message.content, choice.message.tool_calls, script.refused) == (BOB, None, [])
            call = '{"name": "weather", "parameters": {"n": 3, "k": "a"}}'
            script.say(call)
            assert joined(ask(client, tools=[tool], stream=True)) == ("", "", [("weather", {"n": 3, "k": "a"})], "tool_calls")
    finally:
        server.close()


def test_markers_in_the_strings_of_a_form_are_text(client, thinker, script):
    text = json.dumps({"a": f"<think>no</think> <tool_call>{BOB}</tool_call>"})
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    format = {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}}
    script.say(text)
    [choice] = ask(client, response_format=format, tools=[WEATHER]).choices
    assert (choice.message.content, choice.message.tool_calls, script.refused) == (text, None, [])
    form = {"guided_choice": [text], "thinking_budget": 4}
    [choice] = ask(thinker, extra_body=form).choices
    assert choice.message.content == text


def test_results_go_back(client, http):
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"n": 3, "k": "a"}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    prompt = http.post("/apply-template", json={"messages": messages, "tools": [WEATHER]}).json()["prompt"]
    assert '{"name": "weather", "arguments": {"n": 3, "k": "a"}}' in prompt
    assert "<tool_response>\nsunny\n</tool_response>" in prompt
    assert '"description": "Now."' in prompt
    assert ask(client, messages=messages, tools=[WEATHER], max_tokens=4).choices[0].finish_reason in ("length", "stop")


def test_reasoning_is_apart(thinker):
    thinking = {"chat_template_kwargs": {"enable_thinking": True}, "ignore_eos": True}
    said = {**thinking, "guided_choice": ["Yes."]}
    # the grammar begins behind the reasoning, so a random model thinks until it is cut
    [choice] = ask(thinker, extra_body=said, max_tokens=20).choices
    assert choice.message.content == ""
    assert choice.message.reasoning_content
    assert choice.finish_reason == "length"
    usage = ask(thinker, extra_body=thinking, max_tokens=20).usage
    assert usage.completion_tokens_details.reasoning_tokens == usage.completion_tokens
    said = {"guided_choice": ["<think>hm\n</think>\n\nYes."]}
    [choice] = ask(thinker, extra_body=said).choices
    assert (choice.message.reasoning_content, choice.message.content) == ("hm\n", "Yes.")
    assert joined(ask(thinker, extra_body=said, stream=True)) == ("hm\n", "Yes.", [], "stop")
    [choice] = ask(thinker, extra_body={**said, "reasoning_format": "none"}).choices
    assert choice.message.content == "<think>hm\n</think>\n\nYes."


def test_a_template_that_knows_tools_is_told_of_them(thinker):
    [choice] = ask(thinker, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_tokens=400).choices
    assert fits(json.loads(choice.message.tool_calls[0].function.arguments))
    url = f"{thinker.base_url}".removesuffix("v1/")
    prompt = thinker._client.post(f"{url}apply-template", json={"messages": HI, "tools": [WEATHER]}).json()["prompt"]
    assert prompt.startswith('<tool_call>[{')
    assert "You may call functions" not in prompt


def test_a_call_that_the_model_opens_is_held_and_streamed(client, script):
    """`auto`: the model is made to say a call; what does not fit the tool's schema it cannot say."""
    script.say(f"Let me see.\n{CALL}")
    chunks = list(ask(client, tools=[WEATHER, CLOCK], stream=True, max_tokens=200))
    assert script.refused == []
    assert len([c for k in chunks for c in k.choices[0].delta.tool_calls or [] if c.function.arguments]) > 8
    assert joined(iter(chunks)) == ("", "Let me see.", [("weather", {"n": 3, "k": "a"})], "tool_calls")
    script.say(CALL.replace("3", "300").replace('"a"', '"z"'))
    [choice] = ask(client, tools=[WEATHER, CLOCK], max_tokens=300).choices
    assert script.refused
    assert fits(json.loads(choice.message.tool_calls[0].function.arguments))


def test_text_that_opens_no_call_is_free(client, script):
    script.say("<tool_cat> and {braces}")
    [choice] = ask(client, tools=[WEATHER, CLOCK], max_tokens=60).choices
    assert (choice.message.content, choice.finish_reason, script.refused) == ("<tool_cat> and {braces}", "stop", [])


def test_a_marker_in_prose_is_prose(client, script):
    text = "In docs: `<tool_call>` opens, `</tool_call>` closes; <tool_call>{a} is none."
    for stream in (False, True):
        script.say(text)
        answer = ask(client, tools=[WEATHER], stream=stream)
        if stream:
            assert joined(answer) == ("", text, [], "stop")
        else:
            [choice] = answer.choices
            assert (choice.message.content, choice.message.tool_calls, script.refused) == (text, None, [])
    script.say(f"`<tool_call>` {CALL}")
    assert joined(ask(client, tools=[WEATHER], stream=True)) == ("", "`<tool_call>`", [("weather", {"n": 3, "k": "a"})], "tool_calls")


def test_a_call_or_the_json(client, script):
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    asked = {"tools": [WEATHER], "response_format": format, "max_tokens": 300}
    script.say('{"n": 7, "k": "b"}')
    [choice] = ask(client, **asked).choices
    assert (json.loads(choice.message.content), choice.finish_reason) == ({"n": 7, "k": "b"}, "stop")
    script.say(CALL)
    [choice] = ask(client, **asked).choices
    assert (choice.message.content, choice.finish_reason, len(choice.message.tool_calls)) == (None, "tool_calls", 1)
    script.say("neither")
    [choice] = ask(client, **asked).choices
    assert script.refused
    assert choice.message.tool_calls or fits(json.loads(choice.message.content)) or choice.finish_reason == "length"


def test_a_held_call_that_is_cut_is_the_same_streamed_or_not(client, script):
    script.say(CALL)
    [choice] = ask(client, tools=[WEATHER], max_tokens=60).choices
    script.say(CALL)
    chunks = list(ask(client, tools=[WEATHER], max_tokens=60, stream=True))
    assert choice.finish_reason == chunks[-1].choices[0].finish_reason == "length"
    pieces = "".join(c.function.arguments for k in chunks for c in k.choices[0].delta.tool_calls or [])
    assert choice.message.tool_calls[0].function.arguments == pieces
    assert CALL.count(pieces) == 1


@pytest.mark.parametrize(("kind", "status"), [("object", 200), (["object"], 200), (["object", "null"], 400), ("string", 400)])
def test_arguments_are_an_object(http, kind, status):
    tool = {"type": "function", "function": {"name": "f", "parameters": {**SCHEMA, "type": kind}}}
    answer = http.post("/v1/chat/completions", json={"messages": HI, "tools": [tool], "tool_choice": "required", "max_tokens": 4})
    assert answer.status_code == status, answer.text


def test_a_schema_that_no_grammar_holds_is_refused_or_said(client, http):
    loose = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}}}
    body = {"messages": HI, "tools": [loose], "max_tokens": 4}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert "not held" in answer.headers["x-fastllm-warning"]
    for change in ({"tool_choice": "required"}, {"tools": [{**loose, "function": {**loose["function"], "strict": True}}]}):
        refused = http.post("/v1/chat/completions", json={**body, **change})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_schema")
    for bad in ("bar", {"minimum": "x"}, {"pattern": 5}):  # what is no schema is refused, whether or not calls are held
        wrong = {**loose, "function": {"name": "f", "parameters": {"properties": {"a": bad}}}}
        refused = http.post("/v1/chat/completions", json={**body, "tools": [wrong]})
        assert refused.status_code == 400, bad
        assert refused.json()["error"]["param"] == "tools[0].function.parameters"
