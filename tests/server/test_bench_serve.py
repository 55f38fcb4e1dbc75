"""`fastllm bench serve` against a server, and its arithmetic."""

from __future__ import annotations

import json
import socket
import threading

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


def test_prompts_are_others_each_time_and_a_seed_makes_them_again(server, command, monkeypatch):
    """With the same prompts a second run would measure the server's prefix cache."""
    from fastllm.cli import bench_serve

    sent, request = [], bench_serve._request

    async def seen(target, body):
        sent.append(tuple(body["prompt"]))
        return await request(target, body)

    monkeypatch.setattr(bench_serve, "_request", seen)
    runs = []
    for seed in ([], [], ["--seed", "7"], ["--seed", "7"]):
        sent.clear()
        code, said = command(server.url, "--requests", "2", "--clients", "1", "--input-tokens", "8", "--output-tokens", "2", *seed, "--json")
        assert code == 0
        runs.append((json.loads(said.out)["seed"], *sorted(sent)))
    assert runs[0] != runs[1]
    assert runs[0][1:] != runs[1][1:]
    assert runs[2] == runs[3]
    assert runs[2][0] == 7


def test_the_table_is_for_people(server, command):
    code, said = command(server.url + "/v1", "--requests", "2", "--output-tokens", "2", "--input-tokens", "5")
    assert code == 0
    assert "tokens/s" in said.out
    assert "first token, ms" in said.out


def test_errors_are_counted_and_a_dead_server_is_a_failure(server, command):
    code, said = command(server.url, "--requests", "2", "--input-tokens", "5000", "--json")
    (error, count), *others = json.loads(said.out)["errors"].items()
    assert (code, count, others) == (1, 2, [])
    assert error.startswith("status 400: the prompt has 5000 tokens"), "what the server says is not hidden"
    code, said = command(server.url, "--requests", "2", "--input-tokens", "5000", "--warmup", "0")
    assert (code, "none of 2 requests was answered" in said.err, "2 × status 400: the prompt has 5000" in said.err) == (1, True, True)
    assert said.out == "", "no table of zeros"


@pytest.mark.parametrize("url", ["ftp://x", "http://[::1", "http://127.0.0.1:99999", "", "http:// a", f"http://{'x' * 64}.org", "http://a\nb"])
def test_what_is_no_address_is_told_as_such(command, url):
    code, said = command(url)
    assert (code, "is no address of a server" in said.err, "fix: write it as http://127.0.0.1:8000" in said.err) == (2, True, True)


def test_a_server_that_is_not_there_or_speaks_something_else_is_told(command):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def answer():
            for reply in (b"+OK ready\r\n", b""):
                client, _ = listening.accept()
                with client:
                    client.recv(4096)
                    client.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        for why in ("speaks no HTTP", "closed without an answer"):
            code, said = command(f"http://127.0.0.1:{port}")
            assert (code, why in said.err, "fix: start it" in said.err) == (1, True, True), said.err
        thread.join()
    code, said = command(f"http://127.0.0.1:{port}")
    assert (code, "cannot be reached" in said.err, "fix: start it" in said.err) == (1, True, True), said.err


def test_percentiles_are_values_that_were_seen():
    assert [percentile([3.0, 1.0, 2.0, 4.0], s) for s in (0.25, 0.5, 0.9, 0.99, 1.0)] == [1.0, 2.0, 4.0, 4.0, 4.0]
    assert percentile([], 0.5) == 0.0
    found = summary([Sample(0.1, [0.01, 0.03], 0.2, 3, 5), Sample(error="cut")], 2.0)
    assert (found["tokens_per_s"], found["errors"], found["itl_ms"]["p50"]) == (1.5, {"cut": 1}, 10.0)
