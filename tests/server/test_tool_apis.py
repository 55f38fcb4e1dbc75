"""Tools, forms and reasoning in Responses and Messages, with the clients of their owners, which validate what they get."""

from __future__ import annotations

import json
import re
import shutil
from types import SimpleNamespace

import anthropic
import openai
import pytest

from fastllm.core.request import TokenLogprobs
from fastllm.server.answer import Due
from fastllm.server.kinds import MESSAGES_NAMES, RESPONSES_NAMES
from fastllm.server.messages import arguments_of
from fastllm.server.reading import read_with_logprobs
from fastllm.text.output import OutputParser
from fastllm.text.output.reasoning import ReasoningFormat

from .conftest import Script
from .test_structured import CALL, SCHEMA, THINKS, fits

HI = [{"role": "user", "content": "Hi"}]
FUNCTION = {"type": "function", "name": "weather", "description": "Now.", "parameters": SCHEMA, "strict": False}
TOOL = {"name": "weather", "description": "Now.", "input_schema": SCHEMA}
TWO = f"Let me see.\n{CALL}\n{CALL}"


@pytest.fixture(scope="module")
def thinker(start, model_folder, tmp_path_factory):
    """A server whose template knows tools and may open reasoning."""
    folder = shutil.copytree(model_folder, tmp_path_factory.mktemp("thinker") / "tiny")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": THINKS}))
    server = start(model=folder)
    yield server
    server.close()


# Responses ----------------------------------------------------------------------------------------------------------------


def respond(client, **more):
    return client.responses.create(**{"model": "tiny", "input": "Hi", "max_output_tokens": 400, **more})


def shown(output):
    """What items say, without their ids."""
    return [(i.type, i.content[0].text if i.type == "message" else json.loads(i.arguments)) for i in output]


def test_calls_are_items_of_a_response_and_events_tell_of_each(client, script):
    script.say(TWO)
    whole = respond(client, tools=[FUNCTION])
    wanted = [("message", "Let me see."), ("function_call", {"n": 3, "k": "a"}), ("function_call", {"n": 3, "k": "a"})]
    assert shown(whole.output) == wanted
    assert whole.status == "completed"
    assert whole.output[1].call_id != whole.output[2].call_id
    script.say(TWO)
    events = list(respond(client, tools=[FUNCTION], stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert shown(events[-1].response.output) == wanted
    kinds = [e.type.removeprefix("response.") for e in events]
    order = [k for i, k in enumerate(kinds) if k != kinds[i - 1]]
    text = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert order == ["created", "in_progress", *text, *call, *call, "completed"]
    for index in (1, 2):
        mine = [e for e in events if getattr(e, "output_index", None) == index]
        pieces = [e.delta for e in mine if e.type == "response.function_call_arguments.delta"]
        assert len(pieces) > 5
        assert "".join(pieces) == mine[-1].item.arguments == mine[-2].arguments
        assert {getattr(e, "item_id", mine[-1].item.id) for e in mine} == {mine[-1].item.id}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}, {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}])
def test_calls_that_must_happen(client, choice):
    other = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}, "strict": False}
    answer = respond(client, tools=[FUNCTION, other] if choice != "required" else [FUNCTION], tool_choice=choice, parallel_tool_calls=False, temperature=1)
    [item] = answer.output
    assert (item.type, item.name) == ("function_call", "weather")
    assert fits(json.loads(item.arguments))


@pytest.mark.parametrize(("syntax", "definition", "text"), [("lark", 'start: "go " /[a-z"]+/', 'go "west"'), ("regex", "[0-9]+/[a-z]{2}", "17/ab")])
def test_custom_tools_take_text_of_a_grammar(client, script, syntax, definition, text):
    tool = {"type": "custom", "name": "move", "description": "Moves.", "format": {"type": "grammar", "syntax": syntax, "definition": definition}}
    said = f'<tool_call>\n<custom name="move">{text}</custom>\n</tool_call>'
    script.say(said)
    [item] = respond(client, tools=[tool]).output
    assert (item.type, item.name, item.input, script.refused) == ("custom_tool_call", "move", text, [])
    script.say(said.replace(text, "!" + text))
    [item] = respond(client, tools=[tool], tool_choice={"type": "custom", "name": "move"}, temperature=1).output
    assert script.refused
    script.say(said)
    events = list(respond(client, tools=[tool], stream=True))
    assert "".join(e.delta for e in events if e.type == "response.custom_tool_call_input.delta") == text
    assert [e.input for e in events if e.type == "response.custom_tool_call_input.done"] == [text]
    assert events[-1].response.output[0].input == text


def test_a_custom_tool_without_a_grammar_takes_any_text(client, script):
    script.say('<tool_call>\n{"name": "note", "arguments": {"input": "a \\"b\\"\\n"}}\n</tool_call>')
    [item] = respond(client, tools=[{"type": "custom", "name": "note"}]).output
    assert (item.type, item.input) == ("custom_tool_call", 'a "b"\n')


def test_json_of_a_response(client):
    format = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    answer = respond(client, text={"format": format}, temperature=1)
    assert fits(json.loads(answer.output_text))
    assert answer.text.format.type == "json_schema"
    assert respond(client, text={"format": {"type": "json_object"}}, temperature=1).output_text.lstrip().startswith("{")


def test_calls_and_results_go_back_into_the_prompt(client, http):
    items = [
        *HI,
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"n": 3, "k": "a"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "note", "input": "go"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "gone"}]},
    ]
    usage = respond(client, input=items, tools=[FUNCTION], max_output_tokens=2).usage
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"n": 3, "k": "a"}'}}
    note = {"id": "c2", "type": "function", "function": {"name": "note", "arguments": '{"input": "go"}'}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "assistant", "content": None, "tool_calls": [note]},
        {"role": "tool", "tool_call_id": "c2", "content": "gone"},
    ]
    chat = {"messages": messages, "tools": [{"type": "function", "function": {k: v for k, v in FUNCTION.items() if k != "type"}}]}
    assert http.post("/v1/chat/completions/input_tokens", json=chat).json()["input_tokens"] == usage.input_tokens


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar", "syntax": "yacc", "definition": "x"}}]}, "tools[0].format"),
        ({"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar", "syntax": "regex", "definition": "(?=a)"}}]}, "tools"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format.schema"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        *(
            ({"input": [*HI, {"type": "function_call", "call_id": "c", "name": "f", "arguments": bad}]}, "input[1].arguments")
            for bad in ({"n": 3}, None, "[1]", "{", 5, "[" * 100000)
        ),
        ({"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "x", "tools": [FUNCTION]}}, "tool_choice.mode"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "tools": [{}]}}, "tool_choice.tools[0].name"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_responses_refuse_is_named_as_they_name_it(http, change, param):
    answer = http.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 4, **change})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


BAD = {"type": "object", "properties": {"a": {"type": "strin"}}}
FREE = {"type": "object", "properties": {"a": {"not": {}}}}
FORM = {"type": "json_schema", "name": "x", "schema": {"not": {}}}
OF_RESPONSES = {  # a chat's name -> bodies in which a fault, or a warning, would name it
    "response_format.json_schema.schema": [{"text": {"format": FORM}}],
    "response_format": [{"text": {"format": {"type": "json_object"}}, "tools": [{**FUNCTION, "parameters": FREE}]}],
    "tools[*].function": [{"tools": [FUNCTION, {**FUNCTION, "name": "b", **bad}]} for bad in ({"parameters": BAD}, {"parameters": 5}, {"name": "a b"}, {"description": 5})],
    "reasoning_effort": [{"reasoning": {"effort": "low"}}],
    "max_tokens": [{"max_output_tokens": 9999}],
    "messages": [{"input": "Hi" * 2000}],
}
OF_MESSAGES = {
    "response_format.json_schema.schema": [{"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}],
    "tools[*].function.parameters": [{"tools": [TOOL, {"name": "b", "input_schema": BAD}]}],
    "reasoning_effort": [{"output_config": {"effort": "low"}}],
    "thinking_budget": [{"thinking": {"type": "enabled", "budget_tokens": 5}}],
}


def test_every_renaming_is_met_and_no_fault_names_a_field_of_chat(http):
    assert OF_RESPONSES.keys() == RESPONSES_NAMES.keys()
    assert OF_MESSAGES.keys() == MESSAGES_NAMES.keys()
    least = {"/v1/responses": {"input": "Hi", "max_output_tokens": 4}, "/v1/messages": {"messages": HI, "max_tokens": 4}, "/v1/messages/count_tokens": {"messages": HI}}
    counted = ("tools[*].function.parameters", "reasoning_effort")
    for path, names, bodies in (
        ("/v1/responses", RESPONSES_NAMES, OF_RESPONSES),
        ("/v1/messages", MESSAGES_NAMES, OF_MESSAGES),
        ("/v1/messages/count_tokens", MESSAGES_NAMES, {name: OF_MESSAGES[name] for name in counted}),
    ):
        for ours, changes in bodies.items():
            for change in changes:
                answer = http.post(path, json={**least[path], **change})
                warning = answer.headers.get("x-fastllm-warning", "")
                assert answer.status_code == 400 or warning, (path, change)
                error = {} if warning else answer.json()["error"]
                said, old, new = warning or error["message"], ours.replace("*", "1"), names[ours].replace("*", "1")
                if ours != "messages":  # whose message is about tokens
                    assert new in said, (path, said)
                    assert not re.search(rf"(?<![\w.]){re.escape(old)}(?!\w)", said), (path, said)
                assert error.get("param", new).startswith(new), (path, error)
                assert "function" not in str(error.get("param")), (path, error)


# Messages -----------------------------------------------------------------------------------------------------------------


def message(claude, **more):
    return claude.messages.create(**{"model": "tiny", "max_tokens": 400, "messages": HI, **more})


def blocks(answer):
    return [(b.type, b.text if b.type == "text" else b.thinking if b.type == "thinking" else (b.name, b.input)) for b in answer.content]


def test_calls_are_blocks_of_a_message_and_events_tell_of_each(claude, script):
    script.say(TWO)
    whole = message(claude, tools=[TOOL])
    call = ("tool_use", ("weather", {"n": 3, "k": "a"}))
    assert blocks(whole) == [("text", "Let me see."), call, call]
    assert whole.stop_reason == "tool_use"
    script.say(TWO)
    with claude.messages.stream(model="tiny", max_tokens=400, messages=HI, tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert blocks(final) == blocks(whole)
    raw = [e for e in events if e.type in ("content_block_start", "content_block_delta", "content_block_stop")]
    assert [e.index for e in raw] == sorted(e.index for e in raw)
    for index in range(3):
        kinds = [e.type for e in raw if e.index == index]
        assert (kinds[0], kinds[-1], set(kinds[1:-1])) == ("content_block_start", "content_block_stop", {"content_block_delta"})
    assert len([e for e in raw if e.index == 1 and e.type == "content_block_delta" and e.delta.type == "input_json_delta"]) > 5


@pytest.mark.parametrize("choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}])
def test_calls_of_messages_that_must_happen(claude, choice):
    [block] = message(claude, tools=[TOOL], tool_choice=choice, extra_body={"temperature": 1}).content
    assert (block.type, block.name) == ("tool_use", "weather")
    assert fits(block.input)


def test_one_call_and_none(claude, script):
    script.say(TWO)
    answer = message(claude, tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [b.type for b in answer.content] == ["text", "tool_use"]
    script.say(CALL)
    assert [b.type for b in message(claude, tools=[TOOL], tool_choice={"type": "none"}).content] == ["text"]


def test_a_call_that_is_cut_is_the_same_streamed_or_not(claude, script):
    script.say(CALL)
    whole = message(claude, tools=[TOOL], max_tokens=62)
    script.say(CALL)
    with claude.messages.stream(model="tiny", max_tokens=62, messages=HI, tools=[TOOL]) as stream:
        final = stream.get_final_message()
    assert whole.stop_reason == final.stop_reason == "max_tokens"
    assert whole.content[0].input == final.content[0].input


def test_uses_and_results_go_back_into_the_prompt(claude, http):
    messages = [
        *HI,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "See."}, {"type": "tool_use", "id": "t1", "name": "weather", "input": {"n": 3}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]}, {"type": "text", "text": "And?"}]},
    ]
    count = claude.messages.count_tokens(model="tiny", messages=messages, tools=[TOOL]).input_tokens
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"n": 3}'}}
    chat = [
        *HI,
        {"role": "assistant", "content": "See.", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "sunny"},
        {"role": "user", "content": "And?"},
    ]
    tools = [{"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": SCHEMA}}]
    assert http.post("/v1/chat/completions/input_tokens", json={"messages": chat, "tools": tools}).json()["input_tokens"] == count
    assert message(claude, messages=messages, tools=[TOOL], max_tokens=2).usage.output_tokens <= 2


def test_json_of_a_message(claude):
    answer = message(claude, output_config={"format": {"type": "json_schema", "schema": SCHEMA}}, extra_body={"temperature": 1})
    assert fits(json.loads(answer.content[0].text))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": {"properties": 3}}]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, "tool_use_id"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
    ],
)
def test_what_messages_refuse_is_named(http, change, name):
    answer = http.post("/v1/messages", json={"max_tokens": 4, "messages": HI, **change})
    assert answer.status_code == 400, answer.text
    assert name in answer.json()["error"]["message"]


# reasoning ----------------------------------------------------------------------------------------------------------------


def test_reasoning_is_an_item_and_a_block_of_its_own(thinker):
    script = Script(thinker)
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", _strict_response_validation=True) as client:
        said = f"<think>hm, yes</think>\n\nLet me see.\n{CALL}"
        script.say(said)
        output = respond(client, tools=[FUNCTION]).output
        assert [i.type for i in output] == ["reasoning", "message", "function_call"]
        assert output[0].content[0].text == "hm, yes"
        script.say(said)
        events = list(respond(client, tools=[FUNCTION], stream=True))
        assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "hm, yes"
        final = events[-1].response
        assert [i.type for i in final.output] == ["reasoning", "message", "function_call"]
        assert final.usage.output_tokens_details.reasoning_tokens > 5
    with anthropic.Anthropic(base_url=thinker.url, api_key="none", _strict_response_validation=True) as claude:
        script.say("hm, yes</think>Yes.")
        thinking = {"type": "enabled", "budget_tokens": 1024}
        assert blocks(message(claude, max_tokens=2000, thinking=thinking)) == [("thinking", "hm, yes"), ("text", "Yes.")]
        script.say("hm, yes</think>Yes.")
        with claude.messages.stream(model="tiny", max_tokens=100, messages=HI, thinking=thinking) as stream:
            assert blocks(stream.get_final_message()) == [("thinking", "hm, yes"), ("text", "Yes.")]
    thinker.engine._runner = script._runner


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_budget_forces_the_end_of_reasoning(thinker, budget):
    body = {"messages": HI, "max_tokens": 60, "ignore_eos": True, "seed": 3, "temperature": 1, "chat_template_kwargs": {"enable_thinking": True}}
    done = thinker.client.post("/v1/chat/completions", json={**body, "thinking_budget": budget}).json()
    free = thinker.client.post("/v1/chat/completions", json=body).json()
    assert free["usage"]["completion_tokens_details"]["reasoning_tokens"] == 60
    assert done["choices"][0]["message"]["content"], done
    assert done["usage"]["completion_tokens_details"]["reasoning_tokens"] == budget + len("</think>")
    form = {"guided_choice": ["Yes."], "thinking_budget": budget}
    held = thinker.client.post("/v1/chat/completions", json={**body, **form}).json()["choices"][0]["message"]
    assert held["content"] == "Yes."


def test_effort_is_a_budget_where_the_template_has_no_such_variable(thinker):
    body = {"messages": HI, "max_tokens": 40, "ignore_eos": True, "temperature": 1, "reasoning_effort": "none"}
    message = thinker.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert not message.get("reasoning_content")
    body["reasoning_effort"] = "extreme"
    assert thinker.client.post("/v1/chat/completions", json=body).json()["error"]["param"] == "reasoning_effort"


def test_thoughts_that_stay_in_the_content_call_nothing(thinker):
    script = Script(thinker)
    said = '<tool_call>{"name": "weather", "arguments": {n: 1}}</tool_call> no</think>See.\n'
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    body = {"messages": HI, "tools": tools, "max_tokens": 300, "reasoning_format": "none", "chat_template_kwargs": {"enable_thinking": True}}
    script.say(said + CALL)
    [choice] = thinker.client.post("/v1/chat/completions", json=body).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"], script.refused) == (said.rstrip(), "tool_calls", [])
    [call] = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"n": 3, "k": "a"}
    thinker.engine._runner = script._runner


def test_arguments_of_messages_that_are_no_json_are_none():
    assert [arguments_of(text) for text in ("", '{"n": 1, "k', "{n: 1}", "[1]")] == [{}, {"n": 1}, {}, {}]


# log-probabilities --------------------------------------------------------------------------------------------------------


def written(entries):
    return b"".join(bytes(e["bytes"]) for e in entries).decode()


def test_log_probabilities_are_those_of_the_content(thinker, parse):
    """Not of markup, calls and reasoning: their bytes together are the content's."""
    script, said = Script(thinker), f"<think>hm</think>\n\nGrüße, <b. \n{CALL}\nafter"
    texts = ["Grüße, <b.", "after"]
    chat = {"messages": HI, "tools": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}], "logprobs": True, "max_tokens": 300}
    script.say(said)
    [choice] = thinker.client.post("/v1/chat/completions", json=chat).json()["choices"]
    assert (choice["message"]["content"], written(choice["logprobs"]["content"])) == ("".join(texts), "".join(texts))
    script.say(said)
    chunks = [c["choices"][0] for c in parse(thinker.client.post("/v1/chat/completions", json={**chat, "stream": True}).content)[:-1]]
    assert written(e for c in chunks for e in (c["logprobs"] or {"content": []})["content"]) == "".join(texts)
    assert not any(c["logprobs"] and "content" not in c["delta"] for c in chunks if c["delta"])
    script.say(said)
    more = {"tools": [FUNCTION], "top_logprobs": 1, "max_output_tokens": 300, "input": "Hi"}
    parts = [i["content"][0] for i in thinker.client.post("/v1/responses", json=more).json()["output"] if i["type"] == "message"]
    assert [(p["text"], written(p["logprobs"])) for p in parts] == [(t, t) for t in texts]
    script.say("<think>hm</think>See <tool_ca")
    [choice] = thinker.client.post("/v1/chat/completions", json=chat).json()["choices"]
    assert written(choice["logprobs"]["content"]) == choice["message"]["content"] == "See <tool_ca"
    thinker.engine._runner = script._runner


def test_of_a_token_that_is_half_a_marker_the_content_is_told():
    entry = TokenLogprobs(0, -1.0, ())
    parts = [Due(entry, raw, slice(None), start, end) for raw, start, end in ((b"a.<", 0, 3), (b"tool_call>", 3, 13), (b"x\xc3", 13, 15), (b"\xbc<y", 14, 17))]
    parser = OutputParser(ReasoningFormat("t", "<tool_call>", "<y"))
    answer = SimpleNamespace(parser=parser, undecided=[], spans=[], finish_reason=None)
    deltas, entries = read_with_logprobs(SimpleNamespace(one_call=False), answer, "a.<tool_call>xü<y", parts)
    assert [(d.reasoning, d.content) for d in deltas] == [("", "a."), ("xü", "")]
    assert [[due.raw[due.part] for due in some] for some in entries] == [[], [b"a."], []]
    deltas, entries = read_with_logprobs(SimpleNamespace(one_call=False), answer, "ü", [Due(entry, b"\xc3", slice(None), 17, 18), Due(entry, b"\xbc", slice(None), 17, 18)])
    assert [[due.raw[due.part] for due in some] for some in entries] == [[], [b"\xc3", b"\xbc"]]
