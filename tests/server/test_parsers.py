"""Each form of tool calls behind a server: a call that must happen is made in that form, and is the same whole and in pieces."""

from __future__ import annotations

import json

import pytest

from fastllm.cli.server import PARSERS

HI = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["city", "days"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]


@pytest.mark.parametrize("parser", PARSERS)
def test_a_call_that_must_happen_is_the_same_whole_and_in_pieces(start, parse, parser):
    server = start(tool_parser=parser)
    try:
        body = {"messages": HI, "tools": TOOLS, "max_tokens": 400, "seed": 5, "temperature": 1, "parallel_tool_calls": False}
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            answer = server.client.post(CHAT, json={**body, "tool_choice": choice}).json()["choices"][0]
            [call] = answer["message"]["tool_calls"]
            given = json.loads(call["function"]["arguments"])
            assert (answer["finish_reason"], answer["message"]["content"], call["function"]["name"]) == ("tool_calls", None, "weather")
            assert given["city"] in ("Paris", "Rome")
            assert given["days"] in range(10)
            events = [e for e in parse(server.client.post(CHAT, json={**body, "tool_choice": choice, "stream": True}).content) if isinstance(e, dict)]
            deltas = [e["choices"][0]["delta"] for e in events]
            pieces = [piece for delta in deltas for piece in delta.get("tool_calls", [])]
            assert [piece["function"]["name"] for piece in pieces if "id" in piece] == ["weather"]
            assert "".join(piece["function"]["arguments"] for piece in pieces) == call["function"]["arguments"]
            assert not [delta for delta in deltas if delta.get("content")]
            assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
        free = server.client.post(CHAT, json={**body, "tool_choice": "none", "max_tokens": 20}).json()["choices"][0]
        assert "tool_calls" not in free["message"]
    finally:
        server.close()
