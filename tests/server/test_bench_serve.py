"""`fastllm bench serve` against a server, and its arithmetic."""

from __future__ import annotations

import json

import pytest

from fastllm.cli.bench_serve import Sample, percentile, summary


@pytest.fixture
def command(capsys):
    from fastllm.cli.main import run_command

    def call(*options):
        code = run_command(["bench", "serve", *options])
        return code, capsys.readouterr()

    return call


@pytest.mark.parametrize("load", [("--clients", "3"), ("--rate", "200")])
def test_a_load_is_measured(server, command, load):
    sizes = ("--requests", "6", "--input-tokens", "20", "--output-tokens", "9", "--warmup", "1")
    code, said = command(server.url, *load, *sizes, "--json")
    found = json.loads(said.out)
    assert code == 0
    assert (found["requests"], found["tokens"], found["prompt_tokens"], found["errors"]) == (6, 54, 120, {})
    assert 0 < found["ttft_ms"]["p50"] <= found["ttft_ms"]["p99"] <= found["request_ms"]["p99"]
    assert found["tokens_per_s"] > 0


def test_the_table_is_for_people(server, command):
    code, said = command(server.url + "/v1", "--requests", "2", "--output-tokens", "2", "--input-tokens", "5")
    assert code == 0
    assert "tokens/s" in said.out
    assert "first token, ms" in said.out


def test_errors_are_counted_and_a_dead_server_is_a_failure(server, command):
    code, said = command(server.url, "--requests", "2", "--input-tokens", "5000", "--json")
    assert (code, json.loads(said.out)["errors"]) == (1, {"status 400": 2})
    code, said = command("ftp://x")
    assert code == 2


def test_percentiles_are_values_that_were_seen():
    assert [percentile([3.0, 1.0, 2.0, 4.0], s) for s in (0.25, 0.5, 0.9, 0.99, 1.0)] == [1.0, 2.0, 4.0, 4.0, 4.0]
    assert percentile([], 0.5) == 0.0
    found = summary([Sample(0.1, [0.01, 0.03], 0.2, 3, 5), Sample(error="cut")], 2.0)
    assert (found["tokens_per_s"], found["errors"], found["itl_ms"]["p50"]) == (1.5, {"cut": 1}, 10.0)
