"""Connections rather than requests: too many, too slow, forged headers, no descriptors left; and what the log makes of what clients send."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import resource
import socket
import time

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


@pytest.fixture
def loaded(start, monkeypatch):
    """(a server that soon cuts who reads nothing, the server's sides of its connections)."""
    sides = []
    made = protocol.Protocol.connection_made
    monkeypatch.setattr(protocol.Protocol, "connection_made", lambda self, transport: (sides.append(self), made(self, transport))[1])
    server = start(slow_reader_s=0.5)
    yield server, sides
    server.close()


def large(server, wait_until, sides, more=b"", window=4096, n=16):
    """A connection to which an answer of megabytes is on its way, whole, and which has a small window."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    raw.settimeout(60)
    raw.connect(("127.0.0.1", server.port))
    body = json.dumps({"prompt": [70] * 1000, "max_tokens": 2, "ignore_eos": True, "echo": True, "logprobs": 20, "n": n}).encode()
    raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n%b" % (more, len(body), body))
    wait_until(lambda: waiting(server, sides) > 1 << 20)
    return raw


def waiting(server, sides):
    """Bytes that the kernel has not taken."""
    return server.call(lambda: sides[-1]._under.get_write_buffer_size()) if sides else 0


@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"])
def test_who_does_not_read_a_whole_answer_is_cut(loaded, wait_until, more):
    server, sides = loaded
    with large(server, wait_until, sides, more):
        wait_until(lambda: server.call(server.runtime.connections) == 0, "it waits for ever")


def test_who_reads_slowly_gets_a_whole_answer_to_its_end(loaded, wait_until, monkeypatch):
    server, sides = loaded
    monkeypatch.setattr(server.runtime, "settings", dataclasses.replace(server.runtime.settings, slow_reader_s=10.0))  # the client is a thread beside it
    with large(server, wait_until, sides, b"Connection: close\r\n", window=64 << 10, n=4) as raw:
        answer = b""
        while more := raw.recv(32 << 10):
            answer += more
            time.sleep(0.02)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}" in head.decode().lower()


@pytest.mark.parametrize("left", [64 << 10, 14 << 10])  # less than what keeps a writer waiting, and than what lets it go on
@pytest.mark.parametrize("more", [b"Connection: close\r\n", b""])
def test_who_stops_before_the_end_of_a_connection_that_is_to_be_closed_is_cut(loaded, wait_until, left, more):
    """It was to be closed anyhow, or is since the client sends no more."""
    server, sides = loaded
    with large(server, wait_until, sides, more) as raw:
        while waiting(server, sides) > left:
            raw.recv(1 << 10)
        if not more:
            raw.shutdown(socket.SHUT_WR)
        wait_until(lambda: server.call(server.runtime.connections) == 0, "it waits for ever")


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
