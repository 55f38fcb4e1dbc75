"""Bytes that are no HTTP, or HTTP that is not meant well: each gets one clear answer in our words, and the next client is served."""

from __future__ import annotations

import contextlib
import http.client
import json
from email.utils import parsedate_to_datetime

import pytest

from fastllm.server import protocol
from fastllm.server.gate import MAX_HEADER, _hostname

from .conftest import Server

JSON = b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}'
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def talk(server: Server, sent: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the one answer to these bytes, after which the connection must be closed."""
    with server.connect() as connection:
        raw = b""
        with contextlib.suppress(ConnectionError):  # it is closed while bytes of ours are unsent; the answer is there all the same
            connection.sendall(sent)
        with contextlib.suppress(ConnectionError):  # or unread
            while more := connection.recv(1 << 16):
                raw += more
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    return int(first.split()[1]), {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}, body


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost : localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\0b\r\n\r\n",
        b"GET /h\xc3\xa9alth HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/3.0\r\nHost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        CHAT + b"Content-Length: -1\r\n\r\n",
        CHAT + b"Content-Length: abc\r\n\r\n",
        CHAT + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
        CHAT + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        CHAT + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        CHAT + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(JSON), JSON),
        CHAT + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        bytes(range(256)) * 10,
        b"\r\n" * 10_000,
        b"GET /" + b"a" * MAX_HEADER + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health?" + b"a" * MAX_HEADER + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * MAX_HEADER + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X%d: %020d\r\n" % (i, i) for i in range(40_000)) + b"\r\n",
    ],
)
def test_what_is_no_http_is_a_bad_request_in_our_words(server, http, capsys, sent):
    capsys.readouterr()
    status, headers, body = talk(server, sent)
    error = json.loads(body)["error"]
    assert (status, error["type"], headers["connection"]) == (400, "invalid_request_error", "close")
    assert headers["x-should-retry"] == "false"
    assert parsedate_to_datetime(headers["date"]).tzinfo is not None  # RFC 9110, 6.6.1
    assert http.get("/live").status_code == 200
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if headers["x-request-id"] in line and "status=400" in line]
    assert not [line for line in lines if " request id=" not in line]  # no line of a library, and no traceback


@pytest.fixture(scope="module")
def guarded(start):
    """A server with a key, and a small limit for bodies."""
    running = start(keys=("a-good-key",), max_body=1 << 20)
    yield running
    running.close()


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 413), ({"content-type": "text/plain"}, 415), ({"x-api-key": "a-wrong-key"}, 401), ({"origin": "https://evil.example"}, 403)],
)
def test_a_client_that_writes_first_and_reads_then_is_told_why_its_body_is_not_wanted(guarded, wait_until, monkeypatch, headers, status):
    """As most libraries do; closed at once, the connection would be reset under its hands, and the answer lost."""
    monkeypatch.setattr(protocol, "LINGER_S", 60.0)  # it may take as long as this machine makes it
    connection = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=60)
    connection.request("POST", "/v1/completions", b"x" * (24 << 20), {"content-type": "application/json", "x-api-key": "a-good-key", **headers})
    answer = connection.getresponse()
    assert answer.status == status
    assert json.loads(answer.read())["error"]["message"]
    connection.close()
    wait_until(lambda: guarded.call(guarded.runtime.connections) == 0)


@pytest.mark.parametrize("limit", ["LINGER_BYTES", "LINGER_S"])
def test_what_is_thrown_away_has_a_limit_of_bytes_and_of_time(guarded, wait_until, monkeypatch, limit):
    monkeypatch.setattr(protocol, "LINGER_S", 0.05 if limit == "LINGER_S" else 60.0)
    if limit == "LINGER_BYTES":
        monkeypatch.setattr(protocol, limit, 1 << 20)
    with guarded.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: a-good-key\r\nContent-Length: 999999999\r\n\r\n")
        answer = b""
        while more := connection.recv(1 << 16):  # to its end: nothing else will be said
            answer += more
        assert answer.startswith(b"HTTP/1.1 415 ")
        if limit == "LINGER_BYTES":
            with pytest.raises(ConnectionError):
                connection.sendall(b"x" * (64 << 20))
        wait_until(lambda: guarded.call(guarded.runtime.connections) == 0)


@pytest.mark.parametrize("late", [False, True])  # with the headers, or behind them
def test_a_body_in_bad_chunks_does_not_hold_a_connection(guarded, wait_until, monkeypatch, late):
    """The client keeps its end open, and says nothing more."""
    monkeypatch.setattr(protocol, "LINGER_S", 0.05)
    head = CHAT + b"X-Api-Key: a-good-key\r\nTransfer-Encoding: chunked\r\n\r\n"
    with guarded.connect() as connection:
        connection.sendall(head if late else head + b"ZZ\r\n")
        if late:
            wait_until(lambda: guarded.call(guarded.runtime.connections) == 1)
            connection.sendall(b"ZZ\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 400 ")
        wait_until(lambda: guarded.call(guarded.runtime.connections) == 0)


@pytest.mark.parametrize(("line", "status"), [(b"POST /v1/completions", 401), (b"POST /nope", 401), (b"DELETE /live", 405), (b"GET /live", 200)])
def test_a_body_that_nobody_reads_ends_its_connection(guarded, wait_until, monkeypatch, line, status):
    """Whoever keeps it out: its bytes are thrown away within the same limits."""
    monkeypatch.setattr(protocol, "LINGER_S", 60.0)
    monkeypatch.setattr(protocol, "LINGER_BYTES", 1 << 20)
    with guarded.connect() as connection:
        connection.sendall(line + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n")
        answer = b""
        while more := connection.recv(1 << 16):
            answer += more
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b"\r\nconnection: close\r\n" in answer.lower()
        with pytest.raises(ConnectionError):
            connection.sendall(b"x" * (64 << 20))
        wait_until(lambda: guarded.call(guarded.runtime.connections) == 0)


def test_what_follows_an_answer_that_has_begun_gets_no_second_one(server, capsys):
    """Bytes that are no HTTP behind a body that was refused unread: the answer is whole, the connection is cut, nothing is a fault."""
    capsys.readouterr()
    with server.connect() as connection:
        connection.sendall(CHAT.replace(b"application/json", b"text/plain") + b"Transfer-Encoding: chunked\r\n\r\n")
        got = connection.recv(1 << 16)
        try:
            connection.sendall(b"ZZ\r\n" * 10)
            while more := connection.recv(1 << 16):
                got += more
        except ConnectionError:
            pass
    assert got.count(b"HTTP/1.1 ") == 1
    assert got.startswith(b"HTTP/1.1 415 ")
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("host", [b"localhost", b"evil.example"])  # the second is refused by the gate, the first by a route or not at all
@pytest.mark.parametrize("line", [b"GET /live", b"HEAD /live", b"GET /v1/models", b"HEAD /v1/models", b"OPTIONS /v1/models", b"POST /nope", b"DELETE /live", b"POST /v1/chat/completions"])
def test_a_body_that_is_no_http_is_no_fault_of_a_route_that_does_not_wait_for_it(server, http, capsys, caplog, line, host):
    """The bytes come together with the headers: the answer to them is sent before the route has begun."""
    capsys.readouterr()
    status, headers, body = talk(server, line + b" HTTP/1.1\r\nHost: " + host + b"\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n")
    assert (status, headers["connection"], int(headers["content-length"]) > 0) == (400, "close", True)
    if line.startswith(b"HEAD"):
        assert body == b""
    else:
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert http.get("/live").status_code == 200  # the route has run by now
    assert not [line for line in capsys.readouterr().err.splitlines() if " request id=" not in line]
    assert caplog.records == []  # nor has asyncio anything to say


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"Content-Encoding: gzip\r\n", 415),
        (b"Content-Encoding: identity\r\nContent-Encoding: gzip\r\n", 415),
        (b"Content-Encoding: identity, gzip\r\n", 415),
        (b"Content-Encoding: identity\r\n", 200),
        (b"Content-Type: text/plain\r\n", 415),
        (b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n", 200),
        (b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: x\r\n", 200),
        (b"Expect: 200-maybe\r\n", 200),
    ],
)
def test_each_header_counts_also_a_second_one_of_its_name(server, headers, status):
    sent = CHAT + headers + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(JSON) + JSON
    assert talk(server, sent)[0] == status


def test_http_1_0_and_single_bytes_and_many_at_once_are_served(server):
    assert talk(server, CHAT.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Content-Length: %d\r\n\r\n" % len(JSON) + JSON)[0] == 200
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in JSON) + b"0\r\n\r\n"
    assert talk(server, CHAT + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + chunks)[0] == 200
    one = CHAT + b"Content-Length: %d\r\n\r\n" % len(JSON) + JSON
    with server.connect() as connection:
        connection.sendall(one * 3 + b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        raw = b""
        while more := connection.recv(1 << 16):
            raw += more
    assert raw.count(b"HTTP/1.1 200 OK") == 4
    assert raw.count(b'"object":"chat.completion"') == 3
    assert raw.endswith(b'{"status":"ok"}')


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("localhost", "localhost"),
        ("LOCALHOST:80", "localhost"),
        ("127.0.0.1:8000", "127.0.0.1"),
        ("[::1]", "::1"),
        ("[::1]:8000", "::1"),
        ("[::1].example.com", ""),
        ("[::1]example.com:80", ""),
        ("[::1]:80.example.com", ""),
        ("[[::1]]", ""),
        ("::1", ""),
        ("localhost:80:80", ""),
        ("localhost:evil", ""),
        ("", ""),
    ],
)
def test_a_host_is_a_name_and_a_port_and_nothing_else(server, host, name):
    assert _hostname(host) == name
    status = talk(server, b"GET /v1/models HTTP/1.1\r\nHost: " + host.encode() + b"\r\nConnection: close\r\n\r\n")[0]
    assert status == (200 if name else 403)
