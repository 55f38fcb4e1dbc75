"""Options of the server, and fields of requests that clients of other servers know: each works, or is refused by name."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fastllm.cli.server import PARSERS
from fastllm.server.log import Log
from fastllm.text.output import FORMATS

from .conftest import Script

HI = [{"role": "user", "content": "Hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}}
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[bot]{% endif %}"


@pytest.fixture(scope="module")
def special(start):
    """A server with options that the others have not."""
    server = start({"prefill_chunk": 64}, tool_parser="glm4.5", reasoning_format="none", request_template=True, log_prompts=True, metrics=True)
    yield server
    server.close()


def test_the_option_lists_every_parser():
    assert tuple(FORMATS) == PARSERS


def test_the_parser_may_be_named(special):
    assert special.client.get("/props").json()["fastllm"]["tool_parser"] == "glm4.5"
    script = Script(special)
    script.say("<tool_call>clock\n</tool_call>")
    choice = special.client.post(CHAT, json={"messages": HI, "tools": [CLOCK], "max_tokens": 60}).json()["choices"][0]
    special.engine._runner = script._runner
    assert script.refused == []
    assert (choice["finish_reason"], choice["message"]["tool_calls"][0]["function"]) == ("tool_calls", {"name": "clock", "arguments": "{}"})


def test_a_request_may_bring_its_template_where_that_is_allowed(special, http):
    body = {"messages": HI, "chat_template": TEMPLATE, "max_tokens": 2}
    assert special.client.post("/apply-template", json=body).json()["prompt"] == "<|im_start|>[user]Hi[bot]"
    assert special.client.post(CHAT, json=body).status_code == 200
    wrong = special.client.post(CHAT, json={**body, "chat_template": "{% for x in"})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "template_error")
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
    assert special.client.post(CHAT, json={**body, "chat_template": endless}).status_code == 400
    inside = {"messages": HI, "chat_template_kwargs": {"chat_template": TEMPLATE}}
    assert special.client.post(CHAT, json=inside).json()["error"]["param"] == "chat_template_kwargs"
    for path, more in (("/v1/responses", {"input": "Hi"}), ("/v1/messages", {"messages": HI, "max_tokens": 2}), ("/v1/messages/count_tokens", {"messages": HI}), ("/tokenize", {"messages": HI}), (TEXT, {"prompt": "a"})):
        for client in (http, special.client):  # their prompts are made otherwise: nothing would read it
            refused = client.post(path, json={**more, "chat_template": TEMPLATE})
            assert refused.status_code == 400, (path, refused.text)
            assert "chat_template is not supported" in refused.json()["error"]["message"]
            assert refused.json()["error"].get("param", "chat_template") == "chat_template"
    refused = http.post(CHAT, json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template")


SWITCH = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"


def test_another_template_and_its_switch_hold_for_all_requests(start, model_folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("other " + SWITCH)
    (tmp_path / "t.jinja").write_text(SWITCH)
    for options, text in (({"tokenizer_from": str(tmp_path), "chat_template": tmp_path / "t.jinja"}, ""), ({"tokenizer_from": str(tmp_path)}, "other ")):
        server = start(options, thinking=False)
        try:
            for more, said in (({}, "False"), ({"chat_template_kwargs": {"enable_thinking": True}}, "True")):
                assert server.client.post("/apply-template", json={"messages": HI, **more}).json()["prompt"] == f"{text}Hi{said}"
        finally:
            server.close()


def test_prompts_are_logged_only_if_asked(special, http, capsys):
    for client, shown in ((special.client, True), (http, False)):
        capsys.readouterr()
        client.post(TEXT, json={"prompt": "a secret word\n", "max_tokens": 2})
        client.get("/v1/models")
        text = capsys.readouterr().err
        assert ("a secret word\\\\n" in text or "a secret word\\n" in text) is shown


def test_a_prompt_in_the_log_is_one_line(capsys):
    Log(as_json=True).event("x", text="a\nb")
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": HI}), (TEXT, {"prompt": "Hi"})])
def test_times_of_each_token(http, parse, path, body):
    full = {**body, "max_tokens": 6, "seed": 7, "ignore_eos": True, "stream": True, "timings_per_token": True}
    events = [e for e in parse(http.post(path, json=full).content) if isinstance(e, dict)]
    if path == CHAT:
        assert "timings" not in events.pop(0)  # the role, which is no token
    counts = [e["timings"]["predicted_n"] for e in events]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert all(e["timings"]["prompt_n"] + e["timings"]["cache_n"] > 0 for e in events)
    times = {n: {e["timings"]["predicted_ms"] for e in events if e["timings"]["predicted_n"] == n} for n in counts}
    told = [t for n in sorted(times) for t in sorted(times[n])]
    assert told == sorted(set(told)), "each token has a time of its own, also of those that leave together"
    assert len(told) == len(times) > 2
    assert "timings" not in parse(http.post(path, json={**full, "timings_per_token": False}).content)[0]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_progress_of_a_long_prompt(special, parse, path):
    text = "a long text " * 30
    body = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    events = parse(special.client.post(path, json={**body, "max_tokens": 2, "stream": True, "return_progress": True, "cache_prompt": False}).content)
    told = [e["prompt_progress"] for e in events if isinstance(e, dict) and "prompt_progress" in e]
    done = [t["processed"] for t in told]
    assert done == sorted(set(done))
    assert len(done) > 4
    assert done[-1] == told[-1]["total"]
    assert done[0] == told[0]["cache"] == 0
    first = next(i for i, e in enumerate(events) if e["choices"])
    assert all("prompt_progress" in e for e in events[:first])
    refused = special.client.post(path, json={**body, "return_progress": True})
    assert refused.json()["error"]["param"] == "return_progress"


def test_waits_for_masks_are_measured(http):
    def count():
        return float(re.search(r"^fastllm_grammar_mask_seconds_count (\S+)", http.get("/metrics").text, re.M)[1])

    before = count()
    http.post(TEXT, json={"prompt": "Hi", "max_tokens": 9, "guided_regex": "[a-z]{9}"})
    assert count() - before >= 9


def test_allowed_tools_and_banned_markers(http):
    tools = [CLOCK, {"type": "function", "function": {"name": "other"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "clock"}}]}}
    body = {"messages": HI, "tools": tools, "tool_choice": choice, "max_tokens": 100, "temperature": 1, "parallel_tool_calls": False}
    call = http.post(CHAT, json=body).json()["choices"][0]["message"]["tool_calls"][0]
    assert call["function"]["name"] == "clock"
    choice["allowed_tools"]["tools"][0]["function"]["name"] = "nobody"
    assert http.post(CHAT, json=body).json()["error"]["param"] == "tool_choice"
    assert json.loads(call["function"]["arguments"]) == {}


@pytest.fixture(scope="module")
def counting(start):
    """A server whose backend leaves an op to another, with all its metrics."""
    server = start({"backend": "fake", "backend_options": {"without": "rms_norm"}, "fallback": "allow"}, metrics_aliases=True)
    yield server
    server.close()


def families(text):
    """Families of an exposition by name, as Prometheus reads them."""
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_ops_that_leave_their_device_are_counted(counting):
    def count():
        return families(counting.client.get("/metrics").text)["fastllm_fallback_ops"].samples[0]

    before = count()
    plan = counting.client.get("/props").json()["fastllm"]["plan"]
    assert plan["fallback_ops"] > 0
    counting.client.post(TEXT, json={"prompt": "Hi", "max_tokens": 3, "ignore_eos": True})
    after = count()
    assert after.name == "fastllm_fallback_ops_total"
    assert after.value - before.value == 3 * plan["fallback_ops"]


def test_periods_that_a_quota_stopped_are_told(counting, monkeypatch):
    monkeypatch.setattr("fastllm.server.metrics.throttled_periods", lambda: 7)
    family = families(counting.client.get("/metrics").text)["fastllm_throttled_periods"]
    assert (family.type, family.samples[0].name, family.samples[0].value) == ("counter", "fastllm_throttled_periods_total", 7)


def test_counters_are_there_before_their_first_event(start):
    """A rate needs the value before it."""
    server = start(metrics_aliases=True)
    try:
        found = families(server.client.get("/metrics").text)
        for name, label, values in (
            ("fastllm_requests_finished", "reason", {"stop", "length", "tool_calls", "cancelled", "error"}),
            ("fastllm_requests_rejected", "why", {"queue_full", "unavailable", "out_of_memory"}),
            ("fastllm_errors", "code", {"400", "401", "429", "500", "503"}),
            ("vllm:request_success", "finished_reason", {"stop", "length", "tool_calls"}),
        ):
            samples = [s for s in found[name].samples if s.name.endswith("_total")]
            assert {s.labels[label] for s in samples} == values
            assert {s.value for s in samples} == {0}
    finally:
        server.close()


def test_the_metrics_are_those_that_are_documented(counting):
    counting.client.post(TEXT, json={"prompt": "Hi", "max_tokens": 1})
    part = (Path(__file__).parents[2] / "docs/server.md").read_text().partition("<!-- generated: metrics -->")[2].partition("<!-- end -->")[0]
    rows = [re.findall(r"`([\w:]+)`", line) for line in part.splitlines() if line.startswith("| `")]
    documented = {f"fastllm_{row[0]}" for row in rows} | {f"vllm:{row[1]}" for row in rows if len(row) > 1}
    there = {f.name + ("_total" if f.type == "counter" else "") for f in families(counting.client.get("/metrics").text).values()}
    assert {name for name in there if not name.endswith("_created")} == documented
