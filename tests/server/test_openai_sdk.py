"""The server through OpenAI's own client, which validates every answer against its models."""

from __future__ import annotations

import asyncio

import openai
import pytest

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True) as client:
        yield client


def test_a_chat_is_answered(client):
    answer = client.chat.completions.create(model="tiny", messages=HI, max_tokens=12, seed=1)
    choice = answer.choices[0]
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    again = client.chat.completions.create(model="tiny", messages=HI, max_tokens=12, seed=1)
    assert again.choices[0].message.content == choice.message.content


def test_a_streamed_chat_is_the_same_as_one_that_is_not(client):
    asked = {"model": "tiny", "messages": HI, "max_tokens": 40, "seed": 3, "n": 3, "temperature": 1.2, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked)
    texts, reasons, entries = ["", "", ""], [[], [], []], [[], [], []]
    heads = set()
    for chunk in client.chat.completions.create(**asked, stream=True):
        heads.add((chunk.id, chunk.created, chunk.model, chunk.system_fingerprint))
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        if choice.logprobs:
            entries[choice.index] += choice.logprobs.content
        if choice.finish_reason:
            reasons[choice.index].append(choice.finish_reason)
    assert len(heads) == 1
    assert texts == [c.message.content for c in whole.choices]
    assert reasons == [[c.finish_reason] for c in whole.choices]
    assert entries == [c.logprobs.content for c in whole.choices]


def test_usage_of_a_stream_comes_only_when_it_is_asked(client):
    chunks = list(client.chat.completions.create(model="x", messages=HI, max_tokens=4, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens >= 1
    assert all(c.usage is None for c in chunks[:-1])
    assert all(c.choices for c in client.chat.completions.create(model="x", messages=HI, max_tokens=4, stream=True))


@pytest.mark.parametrize("prompt", ["Once", ["Once", "Twice"], [70, 71, 72], [[70, 71], [72]]])
def test_completions_take_all_forms_of_prompts(client, prompt):
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=5, n=2, best_of=2)
    count = 2 if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    assert [c.index for c in answer.choices] == list(range(2 * count))
    assert answer.id.startswith("cmpl-")


def test_streamed_completions_are_the_same(server):
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)  # not strict: its models know no null for the first token
    asked = {"model": "tiny", "prompt": ["One", "Two"], "max_tokens": 30, "seed": 5, "logprobs": 2, "echo": True, "n": 2}
    whole = client.completions.create(**asked)
    texts, tokens = [""] * 4, [[] for _ in range(4)]
    for chunk in client.completions.create(**asked, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        tokens[choice.index] += choice.logprobs.token_logprobs if choice.logprobs else []
    assert texts == [c.text for c in whole.choices]
    assert tokens == [c.logprobs.token_logprobs for c in whole.choices]
    assert all(t[0] is None and None not in t[1:] for t in tokens)
    client.close()


def test_models_are_listed_and_found(client):
    assert [m.id for m in client.models.list()] == ["tiny", "org/tiny"]
    assert client.models.retrieve("org/tiny").id == "org/tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_a_prompt_that_does_not_fit_is_a_bad_request(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=[70] * 1024)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.body["n_ctx"] == 1024
    assert caught.value.response.headers["x-should-retry"] == "false"


def test_the_async_client_streams_too(server):
    async def many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0, _strict_response_validation=True) as client:

            async def one(seed: int) -> str:
                stream = await client.chat.completions.create(model="tiny", messages=HI, max_tokens=20, seed=seed, stream=True)
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            return await asyncio.gather(*(one(seed % 3) for seed in range(12)))

    texts = asyncio.run(many())
    assert texts[:3] * 4 == texts
