"""Connections rather than requests: too many, too slow, forged headers, no descriptors left; and what the log makes of what clients send."""

from __future__ import annotations

import contextlib
import json
import resource
import socket

import pytest

from fastllm.server import gate, protocol

GET = b"GET %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n%b\r\n"


def ask(server, path=b"/v1/models", more=b""):
    """The status line and the headers of one request on a connection of its own."""
    with server.connect() as raw:
        raw.sendall(GET % (path, more))
        return raw.makefile("rb").read()


def test_idle_connections_above_the_limit_are_refused_but_health_answers(start, monkeypatch, wait_until):
    monkeypatch.setattr(gate, "MAX_CONNECTIONS", 20)
    server = start()
    idle = []
    try:
        for _ in range(30):
            idle.append(server.connect())
        wait_until(lambda: server.call(server.runtime.connections) >= 30)
        refused = ask(server)
        assert refused.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1" in refused.lower()
        assert ask(server, b"/health").startswith(b"HTTP/1.1 200")
        for one in idle:
            one.close()
        wait_until(lambda: ask(server).startswith(b"HTTP/1.1 200"))
    finally:
        for one in idle:
            one.close()
        server.close()


def test_headers_that_do_not_end_cost_a_connection_only_for_a_while(start, monkeypatch, wait_until):
    monkeypatch.setattr(protocol, "HEADER_S", 0.1)
    server = start()
    try:
        with server.connect() as silent, server.connect() as slow:
            slow.sendall(b"GET /health HTTP/1.1\r\nHost: ")
            for one in (silent, slow):
                with contextlib.suppress(ConnectionResetError):
                    assert one.recv(100) == b""
        wait_until(lambda: server.call(server.runtime.connections) == 0)
    finally:
        server.close()


def test_without_descriptors_the_server_refuses_and_recovers(served):
    server = served()
    soft, hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    port = int(server.url.rpartition(":")[2])
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (40, hard))
    held = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(60)]
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (40, hard))
    for one in held:
        one.close()
    assert server.http.get("/health").status_code == 200
    assert server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
    assert server.end() == 0


@pytest.mark.parametrize(
    "header",
    [b"X-Forwarded-For: 127.0.0.1\r\nX-Forwarded-Host: localhost\r\nX-Forwarded-Proto: https\r\n", b"Forwarded: for=127.0.0.1;host=localhost\r\n"],
)
def test_forwarded_headers_change_nothing(server, header):
    with server.connect() as raw:
        raw.sendall(b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n" + header + b"\r\n")
        assert raw.makefile("rb").read(12) == b"HTTP/1.1 403"


@pytest.mark.parametrize("given", ["a" * 129, "with blank", "\x7f", "é"])
def test_a_request_id_that_is_no_plain_word_is_replaced(server, given):
    answer = ask(server, more=b"X-Request-Id: " + given.encode("latin-1") + b"\r\n")
    if answer.startswith(b"HTTP/1.1 200"):  # what is no header at all is a 400
        assert b"x-request-id: req_" in answer
    else:
        assert answer.startswith(b"HTTP/1.1 400")


def test_log_lines_cannot_be_forged_and_terminals_get_no_sequences(served):
    server = served()
    assert server.http.get("/v1/models/%0a2026-01-01T00:00:00Z request id=forged%1b[2J%e2%80%ae").status_code in (400, 404)
    assert server.http.post("/v1/completions", json={"prompt": "\x1b[31m\nforged", "max_tokens": 1}).status_code == 200
    assert server.end() == 0
    log = server.said()
    assert not any(line.startswith("2026-01-01") for line in log.splitlines())
    assert "\x1b[2J" not in log
    assert "\u202e" not in log
    assert "[31m" not in log


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_sending_side_counts_as_gone(start, brake, wait_until, stream):
    """As for nginx: who waits for an answer keeps it open, and nobody can tell the two apart in a second."""
    server = start({"max_batch_size": 1})
    try:
        held = brake(server)
        with server.connect() as connection:
            body = json.dumps({"prompt": "Hi", "max_tokens": 400, "ignore_eos": True, "stream": stream}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            held.wait()
            connection.shutdown(socket.SHUT_WR)
            wait_until(lambda: not server.call(lambda: server.runtime.active))
            held.release()
        assert server.client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2}).status_code == 200
    finally:
        server.close()
