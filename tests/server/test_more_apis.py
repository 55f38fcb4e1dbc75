"""Messages and Responses through the clients of their owners, which validate what they get; and the routes that only prepare."""

from __future__ import annotations

import asyncio

import anthropic
import openai
import pytest

HI = [{"role": "user", "content": "Hi"}]


# Messages -----------------------------------------------------------------------------------------------------------------


def test_a_message_is_answered(claude):
    answer = claude.messages.create(model="tiny", max_tokens=10, messages=HI, system="Be short.")
    assert answer.type == "message"
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.usage.input_tokens >= 1
    assert answer.id.startswith("msg_")


def test_a_stream_of_events_makes_the_same_message(claude):
    with claude.messages.stream(model="tiny", max_tokens=30, messages=HI, extra_body={"temperature": 0}) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    whole = claude.messages.create(model="tiny", max_tokens=30, messages=HI, extra_body={"temperature": 0})
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_events_of_a_message_come_in_order(claude):
    kinds = [event.type for event in claude.messages.create(model="tiny", max_tokens=5, messages=HI, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_a_stop_sequence_is_named(claude):
    whole = claude.messages.create(model="tiny", max_tokens=30, messages=HI, extra_body={"temperature": 0}).content[0].text
    cut = claude.messages.create(model="tiny", max_tokens=30, messages=HI, extra_body={"temperature": 0}, stop_sequences=[whole[6:8]])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", whole[6:8])
    assert cut.content[0].text == whole[: whole.index(whole[6:8])]


def test_a_last_message_of_the_assistant_is_continued(claude, http):
    messages = [*HI, {"role": "assistant", "content": "Hel"}]
    count = claude.messages.count_tokens(model="tiny", messages=messages).input_tokens
    prompt = http.post("/apply-template", json={"messages": messages, "continue_final_message": True}).json()["prompt"]
    assert prompt.endswith("assistant\nHel")
    assert http.post("/tokenize", json={"prompt": prompt}).json()["count"] == count
    assert claude.messages.create(model="tiny", max_tokens=3, messages=messages).usage.input_tokens <= count


def test_errors_have_anthropics_shape(claude):
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(model="tiny", max_tokens=5, messages=HI, tools=[{"type": "bash_20250124", "name": "bash"}])
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert "tools[0].type" in caught.value.body["error"]["message"]
    assert caught.value.body["request_id"] == caught.value.response.headers["request-id"]


def test_both_clients_list_models(claude, client):
    assert [m.id for m in claude.models.list()] == [m.id for m in client.models.list()] == ["tiny", "org/tiny"]
    assert claude.models.retrieve("tiny").display_name == "tiny"


def test_the_async_client_of_messages(server):
    async def ask() -> tuple[str, str]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", _strict_response_validation=True) as client:
            asked = {"model": "tiny", "max_tokens": 10, "messages": HI, "extra_body": {"temperature": 0}}
            whole = await client.messages.create(**asked)
            async with client.messages.stream(**asked) as stream:
                return whole.content[0].text, await stream.get_final_text()

    whole, streamed = asyncio.run(ask())
    assert whole == streamed


# Responses ----------------------------------------------------------------------------------------------------------------


def test_a_response_is_made(client):
    answer = client.responses.create(model="tiny", input="Hi", instructions="Be short.", max_output_tokens=8, metadata={"a": "b"})
    assert answer.status in ("completed", "incomplete")
    assert answer.id.startswith("resp_")
    assert (answer.metadata, answer.store if hasattr(answer, "store") else False) == ({"a": "b"}, False)
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_events_of_a_response_are_numbered_and_end_as_the_whole(client):
    asked = {"model": "tiny", "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}], "max_output_tokens": 20}
    whole = client.responses.create(**asked, temperature=0)
    events = list(client.responses.create(**asked, temperature=0, stream=True))
    kinds = [e.type.removeprefix("response.") for e in events]
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", whole.status]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text == events[-1].response.output_text
    assert whole.incomplete_details.reason == "max_output_tokens"


def test_log_probabilities_of_a_response(client):
    answer = client.responses.create(model="tiny", input="Hi", max_output_tokens=5, top_logprobs=2)
    entries = answer.output[0].content[0].logprobs
    assert b"".join(bytes(e.bytes) for e in entries).decode("utf-8", "replace") == answer.output_text


def test_nothing_is_stored(client):
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")
    with pytest.raises(openai.NotFoundError):
        client.responses.delete("resp_1")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="tiny", input="Hi", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


# routes that only prepare -------------------------------------------------------------------------------------------------


def test_text_and_ids_go_both_ways(http):
    made = http.post("/tokenize", json={"content": "Grüße", "with_pieces": True}).json()
    assert made["count"] == 7
    assert [t["piece"] for t in made["tokens"]][:2] == ["G", "r"]
    ids = [t["id"] for t in made["tokens"]]
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "Grüße", "content": "Grüße"}
    assert http.post("/v1/tokenize/", json={"content": "<|im_end|>"}).json()["tokens"] == [2]
    assert http.get("/tokenizer_info").json()["eos_token"] == "<|im_end|>"


def test_markers_of_a_client_stay_text(http):
    chat = {"messages": [{"role": "user", "content": "<|im_end|>"}]}
    ids = http.post("/tokenize", json=chat).json()["tokens"]
    assert ids.count(2) == 1  # the template's own
    assert http.post("/v1/chat/completions/input_tokens", json=chat).json()["input_tokens"] == len(ids)


def test_properties_tell_the_origin_of_each_default(http):
    props = http.get("/props").json()
    assert props["model_path"] == "tiny"
    assert props["total_slots"] == 8
    assert props["fastllm"]["defaults"]["temperature"] == {"value": 0.5, "origin": "generation_config.json"}
    assert props["fastllm"]["defaults"]["min_p"]["origin"] == "built in"
