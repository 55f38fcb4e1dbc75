"""The events of Messages and Responses are described one by one: a field that is missing, wrong or too much is seen in any of them."""

from __future__ import annotations

import copy
import json
import shutil

import pytest

from fastllm.server.event_schemas import MessageEvent, ResponseEvent
from fastllm.server.messages import PING

from .conftest import Brake, Script
from .test_structured import CALL, SCHEMA, THINKS

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
THOUGHTS = f"hm, yes</think>See.\n{CALL}"
NOTE = '<tool_call>\n{"name": "note", "arguments": {"input": "a"}}\n</tool_call>'
FUNCTION = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
ASKED = {
    RESPONSES: {"input": "Hi", "tools": [FUNCTION, {"type": "custom", "name": "note"}], "max_output_tokens": 300, "top_logprobs": 1},
    MESSAGES: {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "max_tokens": 300,
        "thinking": {"type": "enabled", "budget_tokens": 200},
    },
}
FREE = {"tools", "tool_choice", "metadata", "format", "input"}  # of a response and of a call: what the client or the model says


@pytest.fixture(scope="module")
def streamed(start, model_folder, tmp_path_factory, parse):
    """Path -> events of real streams, one of each form: with reasoning, text, log-probabilities, calls, an end by length, an error."""
    folder = shutil.copytree(model_folder, tmp_path_factory.mktemp("events") / "tiny")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": THINKS}))
    server, found = start(model=folder), {}
    script = Script(server)
    for path, asked in ASKED.items():
        events = parse(PING) if path == MESSAGES else []
        for said, more in ((THOUGHTS, {}), (NOTE, {}), ("hm", {"max_output_tokens" if path == RESPONSES else "max_tokens": 3})):
            script.say(f"<think>{said}" if path == RESPONSES and said != NOTE else said)
            answer = server.client.post(path, json={**asked, **more, "stream": True})
            assert answer.status_code == 200, answer.text
            events += parse(answer.content)
        found[path] = events
    for path, asked in ASKED.items():
        held = Brake(server.engine)
        held.error = RuntimeError("no step")
        held.step()
        found[path] += parse(server.client.post(path, json={**asked, "stream": True}).content)
        held.error = None
        held.release()
    yield server.description, {path: list({shape(event): event for event in events}.values()) for path, events in found.items()}
    server.close()


def shape(value):
    """What an event has, without what it says; types are said."""
    if isinstance(value, dict):
        return tuple((key, inner if key == "type" else shape(inner)) for key, inner in value.items())
    return tuple(sorted({shape(inner) for inner in value}, key=str)) if isinstance(value, list) else type(value).__name__


def objects(value, place=()):
    """Each object inside of an event that is described, by the way to it."""
    if isinstance(value, dict):
        yield place
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if key not in FREE or isinstance(inner, str):
            yield from objects(inner, (*place, key))


def spoilt(event):
    """The event with one thing wrong, and what."""
    for place in objects(event):
        for key in at(event, place):
            for what in ("missing",) if key in FREE else ("missing", "wrong"):
                made = copy.deepcopy(event)
                at(made, place)[key] = {"no": "value"}
                if what == "missing":
                    del at(made, place)[key]
                yield made, (*place, key, what)
        made = copy.deepcopy(event)
        at(made, place)["other"] = 1
        yield made, (*place, "too much")


def at(value, place):
    for key in place:
        value = value[key]
    return value


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_what_is_missing_wrong_or_too_much_in_an_event_is_seen(streamed, path):
    description, events = streamed
    description.events(path, events[path])
    unseen = []
    for event in events[path]:
        for made, what in spoilt(event):
            try:
                description.events(path, [made])
            except AssertionError:
                continue
            unseen.append((event["type"], what))
    assert not unseen


def test_each_event_that_is_described_has_been_streamed(streamed):
    _, events = streamed
    for path, model in ((RESPONSES, ResponseEvent), (MESSAGES, MessageEvent)):
        described = set(model.model_json_schema()["discriminator"]["mapping"])
        assert {event["type"] for event in events[path]} == described
    kinds = {event["delta"]["type"] for event in events[MESSAGES] if event["type"] == "content_block_delta"}
    assert kinds == {"text_delta", "thinking_delta", "input_json_delta"}
