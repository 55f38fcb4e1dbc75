"""What one key may ask for, and HTTPS."""

from __future__ import annotations

import contextlib
import signal
import ssl
import subprocess
import threading

import httpx2
import pytest

from fastllm.core.errors import RateLimited, UsageError
from fastllm.server import tls
from fastllm.server.limits import KeyLimits
from fastllm.server.tls import Tls

KEYS = ("first-key-123", "second-key-123")
BODY = {"prompt": "a", "max_tokens": 1}


def headers(number):
    return {"x-api-key": KEYS[number]}


def test_a_key_has_so_many_requests_at_the_same_time_and_others_are_not_touched(start, brake, wait_until):
    server = start({"max_batch_size": 4}, keys=KEYS, key_concurrent=2)
    try:
        held = brake(server)
        bodies = [{**BODY, "stream": stream} for stream in (True, False)]
        post = lambda body: httpx2.post(f"{server.url}/v1/completions", json=body, headers=headers(0), timeout=60)  # noqa: E731
        threads = [threading.Thread(target=post, args=(body,)) for body in bodies]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(server.runtime.active) == 2)
        refused = server.client.post("/v1/completions", json=BODY, headers=headers(0))
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert refused.headers["retry-after"] == "1"
        assert "x-should-retry" not in refused.headers
        assert server.client.post("/v1/messages", json={}, headers=headers(0)).json()["error"]["type"] == "rate_limit_error"
        assert server.client.get("/v1/models", headers=headers(0)).status_code == 200  # what costs nothing is not counted
        assert server.client.post("/tokenize", json={"prompt": "a"}, headers=headers(1)).status_code == 200
        held.release()
        for thread in threads:
            thread.join()
        wait_until(lambda: server.client.post("/v1/completions", json=BODY, headers=headers(0)).status_code == 200)
    finally:
        server.close()


def test_a_refused_or_broken_request_gives_its_place_back(start):
    server = start(keys=KEYS, key_concurrent=1)
    try:
        for _ in range(3):
            assert server.client.post("/v1/completions", json={"prompt": 1}, headers=headers(0)).status_code == 400
            assert server.client.post("/v1/completions", json=BODY, headers=headers(0)).status_code == 200
    finally:
        server.close()


def test_prompts_and_answers_are_counted_not_requests(start, brake, wait_until):
    server = start({"max_batch_size": 4}, keys=KEYS, key_concurrent=4)
    post = lambda body, number=0: server.client.post("/v1/completions", json={**BODY, **body}, headers=headers(number))  # noqa: E731
    try:
        held = brake(server)
        for body in ({"prompt": ["a"] * 128}, {"prompt": ["a", "b", "c"], "n": 2}, {"n": 5}):
            alone = post(body)
            assert (alone.status_code, alone.json()["error"]["type"], alone.headers["x-should-retry"]) == (429, "rate_limit_error", "false"), body
            assert "retry-after" not in alone.headers
            assert "this key may have 4" in alone.json()["error"]["message"]
        thread = threading.Thread(target=lambda: httpx2.post(f"{server.url}/v1/completions", json={**BODY, "prompt": ["a", "b", "c"]}, headers=headers(0), timeout=60))
        thread.start()
        wait_until(lambda: len(server.runtime.active) == 1)
        refused = post({"prompt": ["a", "b"]})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert len(server.runtime.active) == 1  # nothing of it has entered the engine
        assert server.client.post("/tokenize", json={"prompt": "a"}, headers=headers(0)).status_code == 200  # there is one place
        held.release()
        thread.join()
        wait_until(lambda: post({"prompt": ["a", "b"], "n": 2}).status_code == 200)  # all of it has been given back
        assert post({"prompt": ["a"] * 4}, 1).status_code == 200
    finally:
        server.close()


def test_answers_a_minute_are_charged_whole_or_not_at_all():
    limits = KeyLimits(None, 10, clock=lambda: 0.0)
    limits.enter(b"a")
    limits.enter(b"a", 5, held=1)
    with pytest.raises(RateLimited) as caught:
        limits.enter(b"a", 5)
    assert caught.value.fields["retry_after_s"] == 6
    limits.enter(b"a", 4)
    limits.leave(b"a", 4)
    limits.leave(b"a", 6)
    with pytest.raises(RateLimited) as caught:
        limits.enter(b"b", 10, held=1)
    assert caught.value.fields == {"never": True}
    limits.enter(b"b", 9, held=1)


def test_requests_a_minute_are_refilled_evenly_and_the_wait_is_told():
    now = [0.0]
    limits = KeyLimits(None, 3, clock=lambda: now[0])

    def enter():
        limits.enter(b"a")
        limits.leave(b"a")

    for _ in range(3):
        enter()
    with pytest.raises(RateLimited) as caught:
        enter()
    assert caught.value.fields["retry_after_s"] == 20
    limits.enter(b"b")
    now[0] = 19.0
    with pytest.raises(RateLimited) as caught:
        enter()
    assert caught.value.fields["retry_after_s"] == 1
    now[0] = 20.0
    enter()
    now[0] = 1000.0
    for _ in range(3):
        enter()
    with pytest.raises(RateLimited):
        enter()
    limits.keep([b"a"])
    assert set(limits._left) == {b"a"}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Two certificates for localhost with their keys: (cert, key) each."""
    folder = tmp_path_factory.mktemp("tls")
    made = []
    for name in ("one", "two"):
        cert, key = folder / f"{name}.pem", folder / f"{name}.key"
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
        more = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
        subprocess.run([*command, *more], check=True, capture_output=True)
        made.append((cert, key))
    return made


def test_https_streams_and_a_renewed_certificate_needs_no_restart(served, certificates, tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    for target, source in zip((cert, key), certificates[0], strict=True):
        target.write_bytes(source.read_bytes())
    server = served("--tls-cert", str(cert), "--tls-key", str(key))
    assert server.url.startswith("https://127.0.0.1:")
    port = int(server.url.rpartition(":")[2])

    def trusting(number):
        return httpx2.Client(base_url=server.url, verify=ssl.create_default_context(cafile=certificates[number][0]), timeout=60)

    with trusting(0) as http:
        answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 4, "stream": True})
        assert answer.text.endswith("data: [DONE]\n\n")
    with trusting(1) as http, pytest.raises(httpx2.ConnectError):
        http.get("/health")
    with pytest.raises(httpx2.HTTPError):
        httpx2.get(f"http://127.0.0.1:{port}/health", timeout=60)
    for target, source in zip((cert, key), certificates[1], strict=True):
        target.write_bytes(source.read_bytes())
    server.process.send_signal(signal.SIGHUP)
    while True:
        try:
            with trusting(1) as http:
                assert http.get("/health").status_code == 200
            break
        except httpx2.ConnectError:
            pass
    cert.write_text("nothing")
    server.process.send_signal(signal.SIGHUP)  # the old one stays
    with trusting(1) as http:
        assert http.get("/health").status_code == 200
    assert server.end() == 0


def gone(raw):
    """Waits until the server has ended the connection."""
    with contextlib.suppress(ConnectionResetError):
        assert raw.recv(100) == b""
    return True


def test_connections_that_never_shake_hands_are_counted_and_cut(start, certificates, monkeypatch, wait_until):
    monkeypatch.setattr(tls, "HANDSHAKE_S", 0.2)
    cert, key = map(str, certificates[0])
    server = start(tls=Tls(cert, key))
    try:
        with server.connect() as silent, server.connect() as half, server.connect() as plain:
            half.sendall(b"\x16\x03\x01\x02\x00\x01")
            plain.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            assert gone(silent)
            assert gone(half)
            assert plain.recv(100)[:1] != b"H"  # an alert of TLS
        wait_until(lambda: server.call(server.runtime.connections) == 0)
    finally:
        server.close()


def test_silent_connections_do_not_keep_others_from_shaking_hands(start, certificates, monkeypatch, wait_until):
    monkeypatch.setattr(tls, "MAX_HANDSHAKES", 8)
    cert, key = map(str, certificates[0])
    server = start(tls=Tls(cert, key))
    context = ssl.create_default_context(cafile=cert)
    idle = []
    try:
        for _ in range(20):
            idle.append(server.connect())
        assert all(gone(one) for one in idle[:12])  # the oldest
        wait_until(lambda: server.call(server.runtime.connections) == 8)
        with httpx2.Client(base_url=f"https://127.0.0.1:{server.port}", verify=context, timeout=60) as http:
            answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 4, "stream": True})
            assert answer.text.endswith("data: [DONE]\n\n")
            assert server.call(server.runtime.connections) == 1 + 7
    finally:
        server.close()
        for one in idle[12:]:
            assert gone(one)
        for one in idle:
            one.close()


def test_files_that_are_no_certificate_are_usage_errors(certificates, tmp_path):
    (cert, key), (_, other) = certificates
    together = tmp_path / "both.pem"
    together.write_bytes(cert.read_bytes() + key.read_bytes())
    Tls(str(together), None)
    locked = tmp_path / "locked.key"
    subprocess.run(["openssl", "ec", "-in", str(key), "-aes256", "-passout", "pass:x", "-out", str(locked)], check=True, capture_output=True)
    for files in ((cert, None), (cert, other), (tmp_path / "none.pem", key), (tmp_path, key), (cert, locked)):
        with pytest.raises(UsageError):
            Tls(str(files[0]), files[1] and str(files[1]))
