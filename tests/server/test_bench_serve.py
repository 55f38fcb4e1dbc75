"""`fastllm bench serve` against a server, and its arithmetic."""

from __future__ import annotations

import asyncio
import json
import socket
import threading

import pytest

from fastllm.cli import bench_serve
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


FRAME = b'data: {"choices":[{"text":"hello","index":0}]}\n\n'
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
REFUSED = b"HTTP/1.1 429 Too Many Requests\r\n"


@pytest.mark.parametrize(
    ("pieces", "error", "gaps"),
    [
        ([OK, FRAME + b"data: [DONE]\n\n"], "", 0),
        ([OK[:9], OK[9:] + FRAME[:25], FRAME[25:] + b"data: [DO", b"NE]\n\n"], "", 0),
        ([OK + FRAME, FRAME + FRAME, b"data: [DONE]\n\n"], "", 2),
        ([OK + FRAME, None], "cut", 0),
        ([OK[:20], None], "ConnectionError: the connection was closed without an answer", 0),
        ([None], "ConnectionError: the connection was closed without an answer", 0),
        ([b"SSH-2.0-OpenSSH_9.6\r\n"], "ConnectionError: what answers speaks no HTTP", 0),
        ([REFUSED + b"\r\n", b'{"error":{"message":"too', b' many"}}'], "status 429: too many", 0),
        ([REFUSED + b"Content-Length: 0\r\n\r\n"], "status 429", 0),
        ([REFUSED + b"content-length: 4\r\n\r\n", b"wait"], "status 429", 0),
        ([OK + b'data: {"usage": {"a": 1}}\n\n'], "KeyError: 'completion_tokens'", 0),
        ([OK + b'data: {"error": {"type": "full", "message": "later"}}\n\n'], "full: later", 0),
    ],
)
def test_a_stream_is_read_in_whatever_pieces_it_comes(pieces, error, gaps):
    """None closes; without it the server keeps its end open, as one does that takes no notice of `Connection: close`."""

    async def main():
        gone, over = asyncio.Event(), asyncio.Event()

        async def answer(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                if piece is not None:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.02)  # they may come as one all the same, which changes nothing but gaps
            if None not in pieces:
                await gone.wait()
            writer.close()
            over.set()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        target = bench_serve._Target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None)
        sample = await asyncio.wait_for(bench_serve._request(target, {}), 30)
        gone.set()
        await over.wait()
        server.close()
        await server.wait_closed()
        return sample

    sample = asyncio.run(main())
    assert sample.error == error
    assert len(sample.gaps_s) == gaps
    assert sample.total_s > 0
