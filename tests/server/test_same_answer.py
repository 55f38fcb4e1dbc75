"""Same request, same answer: whole answers of the server, with everything that a request may ask for, whatever else it does meanwhile.

Each request is answered alone first. Then servers of other shapes (chunks, blocks, room, cache, policy, threads: each is a restart) answer the
same requests many times, in random order, among neighbours that come, stream, leave in the middle and share prefixes. Ids, texts, calls and the
bits of log-probabilities must be equal, streamed or not. `tests/core/test_thousand_schedules.py` does the same for the engine's ids, a thousand times.
"""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = "The same beginning of many prompts, which is found in the cache by some and computed by others. " * 3
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "k": {"enum": ["a", "bb", None]}, "s": {"type": "string", "maxLength": 6}},
    "required": ["n", "k", "s"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


def chat(text, **more):
    return CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 40, "seed": 5, **more}


ASKED = [
    chat("Hi", temperature=1, logprobs=True, top_logprobs=3),
    chat(LONG, temperature=0, logprobs=True, max_tokens=24, ignore_eos=True),
    chat(LONG + "json", temperature=1.2, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, logprobs=True, max_tokens=90),
    chat("call", temperature=1, tools=[TOOL], tool_choice="required", max_tokens=120, parallel_tool_calls=False),
    chat("call or not", temperature=1, tools=[TOOL], max_tokens=30),
    chat("none", temperature=1, tools=[TOOL], tool_choice="none", max_tokens=30),
    chat("pick", temperature=2, structured_outputs={"regex": "(ab|cd){3,9}x"}, n=3, logprobs=True),
    (TEXT, {"prompt": LONG + "a", "n": 4, "temperature": 0.9, "seed": 9, "max_tokens": 20, "logprobs": 2, "presence_penalty": 0.7, "frequency_penalty": 0.3}),
    (TEXT, {"prompt": ["a", LONG, "b"], "temperature": 0.8, "seed": -3, "max_tokens": 12, "repetition_penalty": 1.3, "repeat_last_n": 16, "min_tokens": 4}),
    (TEXT, {"prompt": LONG, "echo": True, "logprobs": 1, "max_tokens": 8, "temperature": 1.1, "seed": 2, "logit_bias": {"70": 4, "71": -100}}),
    (TEXT, {"prompt": "stop", "stop": ["a", "\n", "q"], "temperature": 1.5, "top_k": 90, "top_p": 0.99, "min_p": 0.001, "seed": 2**63, "max_tokens": 60}),
]
NEIGHBOUR = {"temperature": 1, "ignore_eos": True, "stream": True}


def whole(path, body):
    """What must be the same each time: everything but ids and times."""
    choices = []
    for choice in body["choices"]:
        choice = json.loads(json.dumps(choice))
        for call in choice.get("message", {}).get("tool_calls", ()):
            call.pop("id")
        choices.append(choice)
    return json.dumps([choices, {k: v for k, v in body["usage"].items() if k != "prompt_tokens_details"}], sort_keys=True)


def joined(path, parse, raw):
    """A stream, put together: the text and the reason of each choice."""
    found: dict[int, list] = {}
    for event in parse(raw)[:-1]:
        for choice in event["choices"]:
            one = found.setdefault(choice["index"], ["", "", None])
            delta = choice.get("delta", {"content": choice.get("text")})
            one[0] += delta.get("content") or ""
            one[1] += "".join(call["function"].get("arguments", "") for call in delta.get("tool_calls") or ())
            one[2] = choice["finish_reason"] or one[2]
    return found


def texts(path, body):
    """The same of an answer that was not streamed."""
    found = {}
    for choice in body["choices"]:
        message = choice.get("message", {"content": choice.get("text")})
        calls = "".join(call["function"]["arguments"] for call in message.get("tool_calls") or ())
        found[choice["index"]] = [message["content"] or "", calls, choice["finish_reason"]]
    return found


@pytest.fixture(scope="module")
def alone(start):
    """Each answer of a server that does nothing else, on one thread, without a cache."""
    server = start({"prefix_cache": False, "max_batch_size": 4})
    found = [server.client.post(path, json=body) for path, body in ASKED]
    server.close()
    assert [answer.status_code for answer in found] == [200] * len(ASKED), [answer.text for answer in found if answer.status_code != 200]
    return [answer.json() for answer in found]


SHAPES = [
    {"max_batch_size": 8, "prefill_chunk": 16},
    {"max_batch_size": 3, "prefill_chunk": 7, "block_size": 16, "ctx": 640, "kv_cache_tokens": 640, "threads": 2},
    {"max_batch_size": 6, "block_size": 32, "ctx": 640, "kv_cache_tokens": 640, "prefix_cache": False, "schedule": "shortest-remaining"},
]


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_answers_are_the_same_in_every_schedule_and_after_every_restart(start, alone, parse, brake, wait_until, number):
    rng, server = random.Random(number), start(SHAPES[number])
    wanted = [whole(path, body) for (path, _), body in zip(ASKED, alone, strict=True)]

    def ask(index, stream):
        path, body = ASKED[index]
        answer = http.post(path, json={**body, "stream": True} if stream else body)
        assert answer.status_code == 200, answer.text
        if stream:
            assert joined(path, parse, answer.content) == texts(path, alone[index]), index
        else:
            assert whole(path, answer.json()) == wanted[index], index

    def disturb(seed):
        chance = random.Random(seed)
        body = {"prompt": LONG[: chance.randrange(1, 300)], "max_tokens": chance.randrange(1, 60), "seed": seed, **NEIGHBOUR}
        with http.stream("POST", TEXT, json=body) as answer:
            lines = answer.iter_lines()
            for _ in range(chance.choice((0, 1, 9, 400))):  # then it leaves
                if next(lines, None) is None:
                    break

    with httpx2.Client(base_url=server.url, timeout=60, limits=httpx2.Limits(max_connections=64)) as http, ThreadPoolExecutor(12) as threads:
        try:
            held = brake(server)  # so that it is certain that one is cancelled, and two do not fit in the small caches
            long = {"prompt": LONG, "max_tokens": 300, "seed": 1, **NEIGHBOUR}
            crowd = [threads.submit(http.post, TEXT, json=long) for _ in range(2)]
            wait_until(lambda: len(server.runtime.active) == 2)
            with http.stream("POST", TEXT, json=long):
                pass
            wait_until(lambda: len(server.runtime.active) == 2)
            held.release()
            one, two = (joined(TEXT, parse, job.result(60).content) for job in crowd)
            assert one == two
            for _ in range(6):
                order = [*range(len(ASKED)), *rng.choices(range(len(ASKED)), k=4)]
                rng.shuffle(order)
                jobs = []
                for index in order:
                    jobs.append(threads.submit(ask, index, rng.random() < 0.3))
                    jobs += [threads.submit(disturb, rng.randrange(1000)) for _ in range(rng.choice((0, 0, 1, 2)))]
                for job in jobs:
                    job.result(60)
            stats = server.engine.stats()
            assert (stats.requests_failed, stats.requests_cancelled > 0) == (0, True)
            assert (stats.preemptions > 0) == (number > 0)
            assert (stats.prefix_hit_tokens > 0) == (number != 2)
        finally:
            server.close()
