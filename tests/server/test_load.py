"""Many clients at once: streams that start while others run, clients that go or do not read, queues that are full, an engine that
fails, and a server that ends while it works."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from fastllm.core.errors import EngineError

LONG = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module")
def busy(start):
    """A server of two places and a queue of two."""
    server = start({"max_batch_size": 2, "max_queue": 2}, ping_s=0.05, slow_reader_s=0.3)
    yield server
    server.close()


def ask(server, body, path="/v1/completions"):
    """A request in a thread: .answer once it is joined."""

    def run():
        with httpx2.Client(base_url=server.url, timeout=60) as http:
            thread.answer = http.post(path, json=body)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def send(server, body, path="/v1/completions"):
    """A raw connection with a request on its way."""
    raw = server.connect()
    data = httpx2.Request("POST", server.url, json=body).read()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    raw.sendall(head.encode() + data)
    return raw


def idle(server):
    """Nothing runs, waits or holds blocks."""
    stats = server.engine.stats()
    return (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0) and not server.runtime.active and not server.engine._jobs


def alone(server, body):
    """The text of a request that runs alone."""
    return server.client.post("/v1/completions", json=body).json()["choices"][0]["text"]


def test_answers_do_not_depend_on_what_else_runs(server, wait_until):
    bodies = [{"prompt": f"{i % 4}" * (1 + 40 * (i % 3)), "max_tokens": 20 + i % 3, "seed": i % 5, "temperature": 1} for i in range(24)]
    wanted = [alone(server, body) for body in bodies]
    threads = [ask(server, body) for body in bodies]
    for thread in threads:
        thread.join()
    assert [t.answer.json()["choices"][0]["text"] for t in threads] == wanted
    wait_until(lambda: idle(server))


def test_a_stream_starts_while_another_runs(busy, brake, parse):
    held = brake(busy)
    first, second = send(busy, {**LONG, "stream": True}), None
    held.wait()
    held.step(4)
    second = send(busy, {"prompt": "Two", "max_tokens": 3, "stream": True, "ignore_eos": True})
    held.release()
    raw = b""
    while not raw.endswith(b"0\r\n\r\n"):
        raw += second.recv(65536)
    assert b"[DONE]" in raw
    first.close()
    second.close()


def test_a_full_queue_is_503_with_the_time_to_come_again(busy, brake, wait_until):
    held = brake(busy)
    running = [ask(busy, {**LONG, "max_tokens": 100}) for _ in range(2)]
    wait_until(lambda: len(busy.runtime.active) == 2)
    held.wait()
    while busy.engine.num_queued:
        held.step()
        held.wait()
    waiting = [ask(busy, {**LONG, "max_tokens": 4}) for _ in range(2)]
    wait_until(lambda: busy.engine.num_queued == 2)
    assert busy.client.get("/ready").status_code == 503
    assert busy.client.get("/health").status_code == 200
    answer = busy.client.post("/v1/completions", json=LONG)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "queue_full"
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert "x-should-retry" not in answer.headers
    too_many = busy.client.post("/v1/completions", json={**LONG, "prompt": ["a"] * 3})
    assert too_many.status_code == 400  # this can never fit
    held.release()
    for thread in running + waiting:
        thread.join()
        assert thread.answer.status_code == 200
    assert busy.client.get("/ready").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["queued", "prefill", "decode"])
def test_a_client_that_goes_frees_everything(busy, brake, wait_until, stream, when):
    cancelled = busy.engine.stats().requests_cancelled
    held = brake(busy)
    others = []
    if when == "queued":
        others = [send(busy, {**LONG, "n": 2})]
        held.wait()
    gone = send(busy, {**LONG, "prompt": "a" * 900 if when == "prefill" else "a", "max_tokens": 100, "stream": stream})
    wait_until(lambda: len(busy.runtime.active) == len(others) + 1)
    if when != "queued":
        held.wait()
    if when == "decode":
        held.step(3)
        for _ in range(3):
            held.wait()
    gone.close()
    wait_until(lambda: len(busy.runtime.active) == len(others))
    held.step()  # by the end of the step that runs
    for other in others:
        other.close()
    wait_until(lambda: not busy.runtime.active)
    held.release()
    wait_until(lambda: idle(busy))
    assert busy.engine.stats().requests_cancelled == cancelled + 1 + len(others)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_stream_that_somebody_else_cancels_says_so_at_its_end(start, brake, wait_until, path):
    server = start({"max_batch_size": 1}, dev=True)
    try:
        held = brake(server)
        said = {"/v1/completions": {"prompt": "Hi"}, "/v1/responses": {"input": "Hi"}}.get(path, {"messages": [{"role": "user", "content": "Hi"}]})
        words = {**said, "max_tokens": 400, "stream": True}
        stream = server.client.build_request("POST", path, json=words, headers={"x-request-id": "mine"})
        answer = server.client.send(stream, stream=True)
        assert answer.status_code == 200
        held.wait()  # the first step: nothing has been said
        cancelled = server.client.post("/v1/cancel", json={"id": "mine", "why": "enough"})
        assert (cancelled.json(), cancelled.headers["x-fastllm-ignored"]) == ({"id": "mine", "cancelled": True}, "why")
        held.release()
        said = answer.read().decode()
        assert '"error"' in said.rstrip().rpartition("\n\n")[2]
        assert "/v1/cancel" in said
        assert "[DONE]" not in said
        wait_until(lambda: idle(server))
        assert 'fastllm_requests_finished_total{reason="cancelled"} 1.0' in server.client.get("/metrics").text
    finally:
        server.close()


def test_a_client_that_does_not_read_is_paused_and_then_cut(start, wait_until):
    server = start({"max_batch_size": 1}, slow_reader_s=0.4, ping_s=5)
    body = {"prompt": "x", "n": 16, "max_tokens": 1000, "ignore_eos": True, "stream": True, "logprobs": 20}
    wanted = {"prompt": "y", "max_tokens": 5, "seed": 1}
    text = alone(server, wanted)
    try:
        slow = send(server, body)
        wait_until(lambda: any(o is not None and o.paused_at is not None for _, o in server.runtime.active))
        unsent = max(o.unsent for _, o in server.runtime.active if o is not None)
        assert unsent < (256 << 10) + (64 << 10)
        assert alone(server, wanted) == text  # its place is free
        wait_until(lambda: idle(server))
        slow.close()
    finally:
        server.close()


def test_a_client_that_reads_late_gets_the_very_same(start, wait_until):
    body = {"prompt": "x", "n": 8, "max_tokens": 700, "ignore_eos": True, "stream": True, "logprobs": 20, "seed": 4}
    server = start({"max_batch_size": 4}, slow_reader_s=60)
    try:
        fast = server.client.post("/v1/completions", json=body).text
        slow = send(server, body)
        wait_until(lambda: any(o is not None and o.paused_at is not None for _, o in server.runtime.active))
        raw = b""
        while not raw.endswith(b"0\r\n\r\n"):
            raw += slow.recv(1 << 20)
        slow.close()
        assert raw.count(b'"finish_reason":"length"') == 8
        def texts(content):
            found = [json.loads(x) for x in re.findall(r"data: (\{.*\})", content)]
            return ["".join(e["choices"][0]["text"] for e in found if e["choices"][0]["index"] == i) for i in range(8)]

        parts, rest = [], raw.partition(b"\r\n\r\n")[2]
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            parts.append(rest[: int(size, 16)])
            rest = rest[int(size, 16) + 2 :]
        late = b"".join(parts).decode()
        assert late.count("data: ") == fast.count("data: ")
        assert texts(late) == texts(fast)
    finally:
        server.close()


def test_silence_is_broken_by_a_comment_or_an_event(busy, brake, wait_until):
    held = brake(busy)
    for path, body, ping in (
        ("/v1/completions", {**LONG, "stream": True}, b": ping\n\n"),
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}], "stream": True}, b"event: ping\n"),
    ):
        raw = send(busy, body, path)
        got = b""
        while ping not in got:
            got += raw.recv(65536)
        assert b"finish_reason" not in got
        raw.close()
    held.release()
    wait_until(lambda: idle(busy))


def test_a_request_that_waits_for_too_long_is_given_up(start, brake, wait_until):
    server = start({"max_batch_size": 1}, queue_timeout_s=0.05, ping_s=0.1)
    try:
        held = brake(server)
        first = ask(server, {**LONG, "max_tokens": 3})
        held.wait()
        late = ask(server, {**LONG, "max_tokens": 3})
        late.join()
        assert late.answer.status_code == 503
        assert "retry-after" in late.answer.headers
        held.release()
        first.join()
        assert first.answer.status_code == 200
    finally:
        server.close()


def test_the_requests_of_a_failed_step_fail_and_the_next_are_answered(start, brake, capsys):
    server = start()
    try:
        held = brake(server)
        broken = ask(server, LONG)
        held.wait()
        held.error = OSError("/dev/secret is gone")
        held.step()
        broken.join()
        assert broken.answer.status_code == 500
        assert "secret" not in broken.answer.text
        held.error = None
        held.release()
        assert alone(server, {**LONG, "max_tokens": 2})
        assert server.client.get("/health").status_code == 200
    finally:
        server.close()
    assert server.code == 0
    assert "/dev/secret is gone" in capsys.readouterr().err


def test_a_failed_stream_ends_with_an_error_and_without_done(start, brake, parse):
    server = start()
    try:
        held = brake(server)
        raw = send(server, {**LONG, "stream": True})
        held.wait()
        held.step(2)
        held.wait()
        held.wait()
        held.error = EngineError("broken")
        held.step()
        got = b""
        while not got.endswith(b"0\r\n\r\n"):
            got += raw.recv(65536)
        assert b'data: {"error":{"message":"the server failed' in got
        assert b"[DONE]" not in got
        raw.close()
    finally:
        server.close()


def test_an_engine_that_fails_three_times_ends_the_server(start, brake):
    server = start(ping_s=0.1)
    held = brake(server)
    held.error = RuntimeError("broken for good")
    held.step(1000)
    codes = [server.client.post("/v1/completions", json={"prompt": "a"}).status_code for _ in range(3)]
    assert codes == [500, 500, 500]
    assert server.client.get("/health").json() == {"status": "failed"}
    assert server.client.post("/v1/completions", json={"prompt": "a"}).status_code in (500, 503)
    server.thread.join(30)
    assert server.code == 1
    held.release()
    server.close()


def test_a_drain_lets_streams_end_and_takes_no_more(start, brake, wait_until):
    server = start(drain_s=60)
    held = brake(server)
    raw = send(server, {**LONG, "max_tokens": 5, "stream": True})
    held.wait()
    kept = server.client.get("/live")  # a connection from before
    assert kept.status_code == 200
    draining = asyncio.run_coroutine_threadsafe(server.runtime.drain(), server.loop)
    wait_until(lambda: server.runtime.draining)
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/ready").status_code == 503
    refused = server.client.post("/v1/completions", json=LONG)
    assert (refused.status_code, refused.headers["connection"]) == (503, "close")
    held.release()
    got = b""
    while chunk := raw.recv(65536):
        got += chunk
    assert b"[DONE]" in got
    raw.close()
    draining.result(30)
    server.thread.join(30)
    assert server.code == 0
    server.close()


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", {"prompt": "a", "max_tokens": 2}), ("/tokenize", {"content": "a"})])
@pytest.mark.parametrize("in_time", [True, False])
def test_a_drain_waits_for_what_is_being_prepared(start, wait_until, path, body, in_time):
    server = start(drain_s=60 if in_time else 0.05)
    begun, go = threading.Event(), threading.Event()
    prepare = server.runtime.pool.prepare

    async def slowly(kind, raw):
        begun.set()
        while not go.is_set():
            await asyncio.sleep(0.01)
        return await prepare(kind, raw)

    server.runtime.pool.prepare = slowly
    with ThreadPoolExecutor(1) as other:
        answer = other.submit(server.client.post, path, json=body)
        assert begun.wait(30)
        draining = asyncio.run_coroutine_threadsafe(server.runtime.drain(), server.loop)
        if in_time:
            wait_until(lambda: server.runtime.draining)
            assert not draining.done()
        else:
            wait_until(lambda: server.runtime.exit_code == 1)
        go.set()
        if in_time or path == "/tokenize":
            assert answer.result(30).status_code == 200
        else:
            assert answer.result(30).status_code == 503
    server.thread.join(30)
    assert server.code == (0 if in_time else 1)
    server.close()


def test_what_a_drain_has_to_cut_gets_an_error_and_the_code_says_so(start, brake):
    server = start(drain_s=0.05)
    held = brake(server)
    raw = send(server, {**LONG, "stream": True})
    held.wait()
    asyncio.run_coroutine_threadsafe(server.runtime.drain(), server.loop)
    got = b""
    while chunk := raw.recv(65536):
        got += chunk
    assert b'"type":"unavailable_error"' in got
    assert b"[DONE]" not in got
    held.release()
    server.thread.join(30)
    assert server.code == 1
    raw.close()
    server.close()


def test_while_the_model_loads_the_server_says_so(start):
    go = threading.Event()
    late = start(wait=False, before=lambda: go.wait(30))
    try:
        assert late.client.get("/live").status_code == 200
        health = late.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        answer = late.client.post("/v1/completions", json={"prompt": "a"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        go.set()
        late.wait()
        assert late.client.get("/health").status_code == 200
    finally:
        go.set()
        late.close()
