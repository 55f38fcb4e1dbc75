"""A server as a machine of states: whatever clients begin, leave and cancel in whatever order, requests that are asked afterwards get the same answer,
none is lost, and at the end everything has been given back."""

from __future__ import annotations

import os

import httpx2
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROBE = {"prompt": "A question whose answer is known", "max_tokens": 6, "seed": 4, "temperature": 1, "logprobs": 1, "ignore_eos": True}
BROKEN = [b"", b"{", b"[]", b'{"prompt": 5}', b'{"prompt": "a", "n": 99}', b'{"prompt": "\\ud800"}', b'{"prompt": "a", "grammar": "start: ("}']
EXAMPLES = int(os.environ.get("STATEFUL_EXAMPLES", "25"))  # a release runs 200


@pytest.fixture(scope="module")
def small(start):
    """Room for three sequences, a queue for four more, and a cache that is too small for all."""
    server = start({"ctx": 256, "max_batch_size": 3, "kv_cache_tokens": 320, "block_size": 16, "max_queue": 4}, dev=True)
    yield server
    server.close()


def test_whatever_clients_do_the_server_goes_on(small, wait_until):
    wanted = small.client.post(TEXT, json=PROBE).json()["choices"]

    class Clients(RuleBasedStateMachine):
        streams = Bundle("streams")

        def __init__(self):
            super().__init__()
            self.http = httpx2.Client(base_url=small.url, timeout=60)
            self.names = 0

        @rule(target=streams, tokens=st.integers(1, 200), n=st.integers(1, 3), kind=st.sampled_from(["free", "json", "stop"]))
        def begin(self, tokens, n, kind):
            """A stream, or a refusal because there is no room."""
            self.names += 1
            body = {"prompt": "x" * (tokens % 40 + 1), "max_tokens": tokens, "n": n, "stream": True, "seed": tokens, "temperature": 1}
            body |= {"json": {"guided_json": {"type": "array", "items": {"type": "boolean"}}}, "stop": {"stop": ["a", "e"]}}.get(kind, {"ignore_eos": True})
            request = self.http.build_request("POST", TEXT, json=body, headers={"x-request-id": f"one-{self.names}"})
            answer = self.http.send(request, stream=True)
            if answer.status_code == 503:
                assert answer.headers["retry-after"]
                answer.read()
                return f"one-{self.names}", answer, iter([b"data: [DONE]\n\n"]), []  # a stream in name only: which rules can run must not depend on time
            assert answer.status_code == 200
            return f"one-{self.names}", answer, answer.iter_bytes(), []

        @rule(stream=streams)
        def read(self, stream):
            """A part of it."""
            stream[3].append(next(stream[2], b""))

        @rule(stream=consumes(streams))
        def read_all(self, stream):
            """To its end, which is one of the two that there are."""
            last = b"".join([*stream[3], *stream[2]])[-400:]
            assert last.endswith(b"data: [DONE]\n\n") or b'"error"' in last, last
            stream[1].close()

        @rule(stream=consumes(streams))
        def leave(self, stream):
            """The client goes."""
            stream[1].close()

        @rule(stream=streams)
        def cancel(self, stream):
            """Somebody else ends it, if it has not ended."""
            assert self.http.post("/v1/cancel", json={"id": stream[0]}).status_code in (200, 404)

        @rule(raw=st.sampled_from(BROKEN), path=st.sampled_from([CHAT, TEXT, "/v1/responses", "/v1/messages"]))
        def send_nonsense(self, raw, path):
            """What is wrong is told."""
            answer = self.http.post(path, content=raw, headers={"content-type": "application/json"})
            assert answer.status_code == 400

        @rule()
        def ask_the_known(self):
            """The answer is as ever, or there is no room now."""
            answer = self.http.post(TEXT, json=PROBE)
            assert answer.status_code in (200, 503)
            assert answer.status_code == 503 or answer.json()["choices"] == wanted

        @rule()
        def look(self):
            """What is told of requests that run."""
            found = self.http.get("/v1/requests").json()["data"]
            assert all(one["state"] in ("queued", "running", "paused", "done") for one in found)
            assert self.http.get("/metrics").status_code == 200

        @invariant()
        def lives(self):
            """It says that it is well."""
            assert self.http.get("/health").status_code == 200

        def teardown(self):
            """All clients go, and everything comes back."""
            self.http.close()

            def idle():  # also of one that waited: its cancel is with the engine before it leaves the queue
                stats = small.engine.stats()
                return not small.runtime.active and (stats.blocks_used, stats.running, stats.waiting) == (0, 0, 0)

            wait_until(idle)
            assert small.engine.stats().requests_failed == 0
            assert small.client.post(TEXT, json=PROBE).json()["choices"] == wanted

    run_state_machine_as_test(
        Clients,
        settings=settings(max_examples=EXAMPLES, stateful_step_count=20, deadline=None, derandomize=EXAMPLES < 100, database=None, suppress_health_check=list(HealthCheck)),
    )
