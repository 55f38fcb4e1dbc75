"""Log-probabilities that are kept until an answer leaves as a whole have a limit, which is known before the first token."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from fastllm.core.errors import InvalidRequest
from fastllm.core.request import TokenLogprobs
from fastllm.server.answer import Due
from fastllm.server.kinds import prepare
from fastllm.server.logprobs import MAX_KEPT, chat_entry
from fastllm.server.prepare import Kitchen
from fastllm.server.sse import encode

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI = [{"role": "user", "content": "Hi"}]
ROOM = 32768


@pytest.fixture
def kitchen(server):
    model = server.runtime.model
    return Kitchen(model.tokenizer, model.template, ROOM, model.tokenizer.vocab_size)


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        ("chat", {"messages": HI, "logprobs": True, "top_logprobs": 20, "n": 16}, "top_logprobs"),  # 8192 tokens are the server's own limit
        ("chat", {"messages": HI, "logprobs": True, "top_logprobs": 20, "max_tokens": 30000}, "top_logprobs"),
        ("chat", {"messages": HI, "logprobs": True, "n": 16, "max_completion_tokens": 2**31 - 1}, None),
        ("chat", {"messages": HI, "logprobs": True, "top_logprobs": 1, "n": 16, "max_tokens": 20000}, "top_logprobs"),
        ("chat", {"messages": HI, "logprobs": True, "top_logprobs": 20, "n": 16, "stream": True}, None),  # leaves as it comes
        ("chat", {"messages": HI, "logprobs": True, "top_logprobs": 20, "n": 16, "max_tokens": 1000}, None),
        ("chat", {"messages": HI, "n": 16}, None),
        ("completion", {"prompt": ["a"] * 128, "logprobs": 0, "max_tokens": 5000}, "logprobs"),
        ("completion", {"prompt": ["a"] * 128, "logprobs": 0, "max_tokens": 4000}, None),
        ("completion", {"prompt": [[70] * 30000] * 9, "logprobs": 1, "max_tokens": 1, "echo": True}, "logprobs"),
        ("completion", {"prompt": [[70] * 30000] * 9, "logprobs": 1, "max_tokens": 1, "echo": True, "stream": True}, "logprobs"),
        ("completion", {"prompt": [[70] * 30000] * 8, "logprobs": 1, "max_tokens": 1, "echo": True, "stream": True}, None),
        ("completion", {"prompt": [[70] * 30000], "n": 9, "logprobs": 1, "max_tokens": 1, "echo": True}, "logprobs"),
        ("completion", {"prompt": [[70] * 30000] * 9, "logprobs": 1, "max_tokens": 1}, None),
        ("responses", {"input": "Hi", "top_logprobs": 20, "max_output_tokens": 30000}, "top_logprobs"),
        ("responses", {"input": "Hi", "top_logprobs": 20, "max_output_tokens": 30000, "stream": True}, "top_logprobs"),  # it ends with all of it
        ("responses", {"input": "Hi", "top_logprobs": 20, "max_output_tokens": 20000}, None),
    ],
)
def test_what_an_answer_may_keep_is_counted_before(kitchen, kind, body, field):
    raw = json.dumps(body).encode()
    if field is None:
        assert prepare(kitchen, kind, raw).params.max_tokens
        return
    with pytest.raises(InvalidRequest, match=f"{field} asks for .* one answer has at most {MAX_KEPT:,}") as refused:
        prepare(kitchen, kind, raw)
    assert refused.value.fields["param"] == field
    fix = refused.value.fix
    assert ("max_output_tokens" in fix, " n" in fix, "fewer prompts" in fix) == (kind == "responses", "n" in body, kind == "completion" and len(body["prompt"]) > 1)
    assert ("max_tokens" in fix) == (kind != "responses" and not body.get("stream"))


def test_the_limit_is_exact(kitchen):
    most = MAX_KEPT // 16 // 2
    body = {"prompt": ["a"] * 16, "logprobs": 1}
    assert prepare(kitchen, "completion", json.dumps({**body, "max_tokens": most}).encode()).params.logprobs == 1
    with pytest.raises(InvalidRequest, match=f"{2 * 16 * (most + 1):,}"):
        prepare(kitchen, "completion", json.dumps({**body, "max_tokens": most + 1}).encode())


def test_it_is_a_bad_request(http):
    answer = http.post(TEXT, json={"prompt": ["a"] * 128, "logprobs": 20, "max_tokens": 1000})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprobs")
    assert f"at most {MAX_KEPT:,}" in answer.json()["error"]["message"]
    assert http.post(TEXT, json={"prompt": ["a"] * 128, "logprobs": 20, "max_tokens": 1}).status_code == 200


def test_so_many_take_less_than_half_a_gibibyte_while_they_are_written(server):
    tokenizer, tokens, top = server.runtime.model.tokenizer, 500, 20
    dues = [Due(TokenLogprobs(70, -1.0 - n, tuple((70 + i, -n - i / 7) for i in range(top))), b"a", slice(0, 1), n, n + 1) for n in range(tokens)]
    tracemalloc.start()
    try:
        entries = [chat_entry(tokenizer, due) for due in dues]
        kept, _ = tracemalloc.get_traced_memory()
        raw = encode(entries).encode()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    count = tokens * (1 + top)
    assert len(raw) > 50 * count
    assert kept / count < 450
    assert most / count * MAX_KEPT < 512 << 20
