"""What leaves on the wire, rule by rule: bytes of the stream, ids, order, text that can no longer change, numbers."""

from __future__ import annotations

import json

import pytest

from fastllm.server import bridge as bridges
from fastllm.server import generation

HI = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "tiny", "messages": HI, "max_tokens": 24, "seed": 11, "temperature": 1.5}


@pytest.fixture
def stream(http, parse):
    """stream(path, body) -> the answer's headers, and its events."""

    def call(path, body):
        answer = http.post(path, json={**body, "stream": True})
        assert answer.status_code == 200, answer.text
        return answer.headers, parse(answer.content)

    return call


def test_a_stream_is_framed_as_clients_and_proxies_expect(http):
    answer = http.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    blocks = answer.content.split(b"\n\n")
    assert blocks[-2:] == [b"data: [DONE]", b""]
    assert all(b.startswith(b"data: {") and b"\n" not in b and b"\r" not in b for b in blocks[:-2])


def test_all_chunks_carry_one_identity_and_one_choice(stream):
    _, events = stream("/v1/chat/completions", {**CHAT, "n": 2})
    heads = {tuple(e[k] for k in ("id", "created", "model", "system_fingerprint", "object")) for e in events[:-1]}
    assert len(heads) == 1
    [head] = heads
    assert head[0].startswith("chatcmpl-")
    assert head[2] == "tiny"
    assert head[3].startswith("b-fastllm-")
    assert all(len(e["choices"]) == 1 for e in events[:-1])


def test_the_role_comes_once_and_first_and_no_delta_is_empty_but_the_last(stream):
    _, events = stream("/v1/chat/completions", {**CHAT, "n": 3})
    for index in range(3):
        deltas = [c["delta"] for e in events[:-1] for c in e["choices"] if c["index"] == index]
        reasons = [c["finish_reason"] for e in events[:-1] for c in e["choices"] if c["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": None}
        assert all(list(d) == ["content"] and d["content"] for d in deltas[1:-1])
        assert deltas[-1] == {}
        assert [r for r in reasons if r] == [reasons[-1]]


def _pieces(events):
    """Texts of each choice, one a chunk."""
    found = {}
    for event in events:
        for choice in event["choices"] if event != "[DONE]" else ():
            if text := choice.get("text") or choice.get("delta", {}).get("content"):
                found.setdefault(choice["index"], []).append(text)
    return found


@pytest.mark.parametrize(("path", "asked"), [("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": ["a", "b"]})])
def test_chunks_are_the_same_however_many_tokens_come_at_once(stream, http, monkeypatch, path, asked):
    """Gathered tokens are turned into chunks together; with a stop text, each by itself."""
    feed_all, runs = generation.Answer.feed_all, []
    monkeypatch.setattr(generation.Answer, "feed_all", lambda self, ids: (runs.append(len(ids)), feed_all(self, ids))[1])
    body = {"model": "tiny", "max_tokens": 90, "seed": 5, "temperature": 1.5, "ignore_eos": True, "n": 2, **asked}
    monkeypatch.setattr(bridges, "LATE_S", 10.0)
    ways = []
    for every_s, more in ((10.0, {}), (0.0, {}), (0.0, {"stop": ["\0\1"]})):
        monkeypatch.setattr(bridges, "EVERY_S", every_s)
        runs.append(0)
        ways.append(_pieces(stream(path, {**body, **more})[1]))
    assert runs[-1] == 0, "tokens of an answer with a stop text are looked at one by one"
    assert max(runs) > 1, "none came together"
    assert ways[0] == ways[1] == ways[2]
    whole = http.post(path, json=body).json()["choices"]
    assert {c["index"]: c.get("text") or c["message"]["content"] for c in whole} == {index: "".join(texts) for index, texts in ways[0].items()}
    assert any("\ufffd" in text for texts in ways[0].values() for text in texts), "no token ends inside of a character"


def test_usage_is_the_last_chunk_if_asked_and_null_before(stream):
    _, events = stream("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}})
    *chunks, last, done = events
    assert done == "[DONE]"
    assert all(c["usage"] is None for c in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == last["timings"]["predicted_n"] <= 24
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    _, events = stream("/v1/chat/completions", CHAT)
    assert all("usage" not in e for e in events[:-1])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
def test_what_is_wrong_is_known_before_the_stream_begins(http, path):
    words = {"messages": [{"role": "user", "content": "x" * 3000}], "prompt": "x" * 3000, "input": "x" * 3000, "max_tokens": 4}
    fields = {"/v1/messages": ("messages", "max_tokens"), "/v1/responses": ("input",), "/v1/completions": ("prompt",)}.get(path, ("messages",))
    answer = http.post(path, json={k: words[k] for k in fields} | {"stream": True})
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    assert "1024" in answer.json()["error"]["message"]


def test_special_text_of_a_stop_is_never_shown_and_ends_the_answer(http, stream):
    whole = http.post("/v1/chat/completions", json={**CHAT, "logprobs": True}).json()["choices"][0]
    text = whole["message"]["content"]
    stop = text[5:8]
    asked = {**CHAT, "stop": ["\u2603", stop], "logprobs": True}
    cut = http.post("/v1/chat/completions", json=asked).json()["choices"][0]
    assert cut["finish_reason"] == "stop"
    assert cut["message"]["content"] == text[: text.index(stop)]
    raw = b"".join(bytes(e["bytes"]) for e in cut["logprobs"]["content"])
    assert raw.decode("utf-8", "replace") == cut["message"]["content"]
    kept = http.post("/v1/chat/completions", json={**asked, "include_stop_str_in_output": True}).json()["choices"][0]
    assert kept["message"]["content"] == text[: text.index(stop)] + stop
    _, events = stream("/v1/chat/completions", asked)
    assert "".join(c["delta"].get("content") or "" for e in events[:-1] for c in e["choices"]) == cut["message"]["content"]


def test_half_characters_are_held_until_they_are_whole(http, stream):
    """Random bytes: many tokens are parts of characters."""
    body = {"prompt": "Gr", "max_tokens": 200, "seed": 2, "temperature": 5, "top_k": -1, "top_p": 1, "ignore_eos": True}
    whole = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    _, events = stream("/v1/completions", body)
    pieces = [c["text"] for e in events[:-1] for c in e["choices"]]
    assert "".join(pieces) == whole
    assert "\ufffd" in whole


def test_log_probabilities_are_finite_and_spell_the_answer(http):
    answer = http.post("/v1/chat/completions", json={**CHAT, "logprobs": True, "top_logprobs": 20, "logit_bias": {"40": -100}}).json()
    choice = answer["choices"][0]
    entries = choice["logprobs"]["content"]
    assert b"".join(bytes(e["bytes"]) for e in entries).decode("utf-8", "replace") == choice["message"]["content"]
    assert all(-9999 <= t["logprob"] <= 0 for e in entries for t in [e, *e["top_logprobs"]])
    assert all(len(e["top_logprobs"]) == 20 for e in entries)
    assert "F" not in [e["token"] for e in entries]  # id 40 of this tokenizer; without the bias it is drawn


def test_echo_gives_the_prompt_and_its_log_probabilities_and_no_answer_if_none_is_asked(http):
    answer = http.post("/v1/completions", json={"prompt": "Grüße", "max_tokens": 0, "echo": True, "logprobs": 1}).json()
    [choice] = answer["choices"]
    assert choice["text"] == "Grüße"
    logprobs = choice["logprobs"]
    assert logprobs["text_offset"] == [0, 1, 2, 2, 3, 3, 4]
    assert logprobs["tokens"][:2] == ["G", "r"]
    assert logprobs["tokens"][2] == "bytes:\\xc3"
    assert logprobs["token_logprobs"][0] is None
    assert all(v <= 0 for v in logprobs["token_logprobs"][1:])
    assert answer["usage"]["completion_tokens"] == 0


def test_ids_of_requests_are_echoed_or_replaced(http):
    given = http.get("/health", headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == given.headers["request-id"] == "abc-1"
    for bad in ("a b", "x" * 129, ""):
        assert http.get("/health", headers={"x-request-id": bad}).headers["x-request-id"].startswith("req_")


def test_a_drawn_seed_is_told_and_gives_the_answer_again(http):
    body = {**CHAT, "seed": None}
    first = http.post("/v1/chat/completions", json=body)
    again = http.post("/v1/chat/completions", json={**body, "seed": int(first.headers["x-fastllm-seed"])})
    assert first.json()["choices"] == again.json()["choices"]


def test_each_choice_and_each_prompt_has_its_own_stream_of_chance(http):
    texts = [c["text"] for c in http.post("/v1/completions", json={"prompt": ["a", "a"], "n": 2, "seed": 1, "temperature": 2}).json()["choices"]]
    assert len(set(texts)) == 4
    alone = http.post("/v1/completions", json={"prompt": "a", "seed": 1, "temperature": 2}).json()["choices"][0]["text"]
    assert alone == texts[0]


def test_more_tokens_than_fit_are_cut_with_a_warning(http):
    answer = http.post("/v1/completions", json={"prompt": [70] * 1020, "max_tokens": 100})
    assert answer.json()["usage"]["completion_tokens"] <= 4
    assert "is cut to 4" in answer.headers["x-fastllm-warning"]


def test_fields_without_effect_are_listed(http):
    answer = http.post("/v1/chat/completions", json={**CHAT, "user": "u", "prediction": {}, "metadata": None})
    assert answer.headers["x-fastllm-ignored"] == "user, prediction"
    odd = http.post("/v1/chat/completions", json={**CHAT, "": 1, " \r\nX: y ": 1, "\u00fc": 1})
    assert odd.headers["x-fastllm-ignored"] == "?, ??X: y, ?"


@pytest.mark.parametrize("path", ["/v1/models", "/models", "/v1/models/", "/v1/health", "/health/"])
def test_routes_are_there_with_and_without_version(http, path):
    assert http.get(path).status_code == 200


def test_the_cache_is_reported_and_can_be_refused(http):
    body = {"prompt": "c" * 300, "max_tokens": 1}
    counts = [http.post("/v1/completions", json=b).json()["usage"]["prompt_tokens_details"]["cached_tokens"] for b in (body, body)]
    assert counts[1] == 256
    salted = [http.post("/v1/completions", json={**body, **more}).json()["usage"] for more in ({"cache_prompt": False}, {"cache_salt": "me"})]
    assert [u["prompt_tokens_details"]["cached_tokens"] for u in salted] == [0, 0]


def test_a_final_message_is_continued(http):
    messages = [*HI, {"role": "assistant", "content": "Once upon "}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 5, "temperature": 0}
    prompt = http.post("/apply-template", json=body).json()["prompt"]
    assert prompt.endswith("assistant\nOnce upon")
    chat = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    text = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 5, "temperature": 0}).json()["choices"][0]["text"]
    assert chat == text


@pytest.mark.parametrize("text", ["<", "|>", "end", "<|im_end|>", "\n{"])
def test_a_final_message_is_continued_where_it_ends_and_not_in_a_marker_like_it(http, text):
    prompt = http.post("/apply-template", json={"messages": HI, "add_generation_prompt": True}).json()["prompt"]
    messages = [*HI, {"role": "assistant", "content": text}]
    continued = http.post("/apply-template", json={"messages": messages, "continue_final_message": True}).json()["prompt"]
    assert continued == prompt + text
    counted = http.post("/v1/messages/count_tokens", json={"messages": messages}).json()["input_tokens"]
    alone = http.post("/tokenize", json={"content": text, "parse_special": False}).json()["count"]
    assert counted == http.post("/tokenize", json={"prompt": prompt}).json()["count"] + alone


def test_a_final_message_with_calls_has_no_text_to_go_on_in(http):
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [*HI, {"role": "assistant", "content": "a", "tool_calls": [call]}]
    refused = http.post("/v1/chat/completions", json={"messages": messages, "continue_final_message": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")


def test_the_body_of_an_error_is_json_whatever_was_sent(http):
    answer = http.post("/v1/completions", content=b'{"prompt": "\\ud800"}', headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert json.loads(answer.content)["error"]["type"] == "invalid_request_error"


def test_a_frame_around_a_choice_is_the_same_as_one_encoded_at_once():
    from fastllm.server.sse import Chunks, frame

    head = {"id": 'a"choices":[0]', "model": 'x "choices":[0] é'}
    for extra in ({}, {"usage": None}):
        for choice in ({"index": 1, "text": 'line\nend" é \x00', "logprobs": None}, {"delta": {"choices": [0]}}):
            assert Chunks(head, extra).frame(choice) == frame({**head, "choices": [choice], **extra})
