"""`stop` counts in the answer: not in reasoning, not in the arguments of tools. In each interface that has it, streamed or not."""

from __future__ import annotations

import anthropic
import openai
import pytest

from .conftest import Script
from .test_structured import CALL, HI, WEATHER, joined
from .test_tool_apis import TOOL, blocks, thinker  # noqa: F401 a fixture

THOUGHT = "so END it is\n</think>\n\n"


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "content", "calls", "reason"),
    [
        (f"See.\n{CALL}", "See.", 1, "tool_calls"),
        (f"See. END\n{CALL}", "See. ", 0, "stop"),
        (f"{CALL} and END of it", "and ", 1, "tool_calls"),
        ("not the EN", "not the EN", 0, "stop"),
    ],
)
def test_not_in_arguments(client, script, said, content, calls, reason, stream):
    script.say(said)
    asked = {"model": "tiny", "messages": HI, "tools": [WEATHER], "max_tokens": 300, "stop": ["END", '"k"', "\n"]}
    answer = client.chat.completions.create(**asked, stream=stream)
    if stream:
        _, text, found, why = joined(answer)
    else:
        [choice] = answer.choices
        text, found, why = choice.message.content or "", choice.message.tool_calls or [], choice.finish_reason
    assert (text, len(found), why) == (content, calls, reason)


@pytest.mark.parametrize("stream", [False, True])
def test_not_in_reasoning(thinker, stream):  # noqa: F811
    made = Script(thinker)
    body = {"messages": HI, "max_tokens": 100, "stop": "END", "chat_template_kwargs": {"enable_thinking": True}, "logprobs": True}
    made.say(f"{THOUGHT}the answer END here")
    try:
        with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0) as client:
            extra = {"chat_template_kwargs": body.pop("chat_template_kwargs")}
            answer = client.chat.completions.create(model="tiny", **body, extra_body=extra, stream=stream)
            if stream:
                chunks = list(answer)
                assert joined(iter(chunks)) == ("so END it is\n", "the answer ", [], "stop")
                entries = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
            else:
                [choice] = answer.choices
                assert (choice.message.reasoning_content, choice.message.content, choice.finish_reason) == ("so END it is\n", "the answer ", "stop")
                entries = choice.logprobs.content
        assert b"".join(bytes(e.bytes) for e in entries).decode() == "the answer "
    finally:
        made._engine._runner = made._runner


@pytest.mark.parametrize("stream", [False, True])
def test_in_messages(server, script, stream):
    asked = {"model": "tiny", "max_tokens": 300, "messages": HI, "tools": [TOOL], "stop_sequences": ["END", '"k"']}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, _strict_response_validation=True) as claude:
        for said, wanted, reason in ((f"See. {CALL}", ("tool_use", None), "tool_use"), ("See. END", ("text", "See. "), "stop_sequence")):
            script.say(said)
            if stream:
                with claude.messages.stream(**asked) as events:
                    answer = events.get_final_message()
            else:
                answer = claude.messages.create(**asked)
            last = answer.content[-1]
            assert (answer.stop_reason, last.type) == (reason, wanted[0])
            assert blocks(answer)[-1] == (wanted if wanted[1] else ("tool_use", ("weather", {"n": 3, "k": "a"})))
            assert answer.stop_sequence == ("END" if reason == "stop_sequence" else None)


def test_the_stop_text_may_stay(http, script):
    script.say("See. END of it")
    body = {"messages": HI, "tools": [WEATHER], "max_tokens": 100, "stop": ["END"], "include_stop_str_in_output": True}
    [choice] = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("See. END", "stop")


def test_a_special_token_as_stop(http, script):
    script.say(f"{CALL}<|im_start|>more")
    body = {"messages": HI, "tools": [WEATHER], "max_tokens": 300, "stop": ["<|im_start|>"]}
    [choice] = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"], len(choice["message"]["tool_calls"])) == (None, "tool_calls", 1)
