"""`fastllm bench` on a tiny model: lines, JSON, and options that reach the measurement."""

from __future__ import annotations

import json

import pytest

SHORT = ("--repeat", "2", "--warmup", "0", "--output-tokens", "8", "--threads", "1")


def test_json_has_a_row_for_each_measurement_with_its_share_of_the_limit(run, tiny_model):
    done = run("bench", tiny_model, *SHORT, "--input-tokens", "20", "--batch", "2", "--batch", "3", "--json")
    assert done.code == 0, done.err
    facts = json.loads(done.out)
    assert [(r["cell"], r["params"].get("context", r["params"].get("streams"))) for r in facts["rows"]] == [
        ("prefill", None),
        ("decode", 0),
        ("decode", 20),
        ("batch", 2),
        ("batch", 3),
    ]
    for row in facts["rows"]:
        assert len(row["value"]["samples"]) == 2
        assert row["ratio"]["median"] > 0
        assert row["limit_of"]


def test_people_get_a_line_for_each(run, tiny_model):
    done = run("bench", tiny_model, *SHORT, "--input-tokens", "20")
    lines = done.out.splitlines()
    assert done.code == 0, done.err
    assert [line.split("  ")[0] for line in lines[1:]] == [
        "prompt of 20 tokens",
        "answer, context 0",
        "answer, context 20",
        "8 answers at once, in all",
    ]
    assert all("tok/s" in line and "%" in line for line in lines[1:])


def test_a_backend_without_limits_says_so(run, tiny_model):
    done = run("bench", tiny_model, "--repeat", "1", "--warmup", "0", "--output-tokens", "2", "--input-tokens", "4", "--backend", "ref", "--batch", "2")
    assert done.code == 0, done.err
    assert done.out.count("no limit known") == 4


@pytest.mark.parametrize(("options", "message"), [(("--ctx", "16"), "--ctx 16 does not hold --input-tokens 512"), (("--input-tokens", "4000"), "more than the")])
def test_what_does_not_fit_is_refused(run, tiny_model, options, message):
    done = run("bench", tiny_model, *SHORT, *options)
    assert done.code == 2
    assert message in done.err


@pytest.mark.parametrize(("free", "fewer"), [(0, False), (250 << 20, True)])
def test_fewer_tokens_are_advised_only_where_they_help(run, tiny_model, monkeypatch, free, fewer):
    from fastllm import loading

    monkeypatch.setattr(loading, "available_memory", lambda: int((loading.RESERVE_BYTES + free) / loading.MEMORY_SHARE))
    done = run("bench", tiny_model, *SHORT, "--input-tokens", "8", "--batch", "4096", "--backend", "ref")
    assert done.code == 1
    assert ("--input-tokens 8" in done.err, "a smaller --batch" in done.err) == (fewer, fewer), done.err
    assert ("use a smaller model" in done.err) is not fewer, done.err
