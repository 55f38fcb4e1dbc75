"""The description, fuzzed by schemathesis: bodies that fit it and bodies that do not. Nothing may be a fault of the server."""

from __future__ import annotations

import os

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "16"))  # a release runs 500
PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize"]
PATHS += ["/detokenize", "/apply-template", "/v1/chat/completions/input_tokens", "/v1/models/{model_id}", "/v1/cancel"]
PATHS += ["/v1/responses/input_tokens", "/v1/models"]
THEIRS = {"anthropic-version": "2023-06-01"}  # the parameters of the list are Anthropic's


@pytest.fixture(scope="module")
def schema(server):
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]


@pytest.fixture(scope="module")
def embedder(start):
    running = start({"embedding": True}, embedding="last")
    yield running
    running.close()


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore")
def test_no_body_breaks_a_server_that_embeds(embedder, path, mode):
    test_no_body_breaks_the_server(embedder, schemathesis.openapi.from_url(f"{embedder.url}/openapi.json"), path, mode)


@pytest.mark.parametrize(("path", "mode"), [(p, m) for p in PATHS for m in MODES if "{" not in p or m is GenerationMode.POSITIVE])
@pytest.mark.filterwarnings("ignore")
def test_no_body_breaks_the_server(server, schema, path, mode):
    method = "GET" if path.startswith("/v1/models") else "POST"
    operation = schema[path][method]
    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES < 100, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck), database=None)
    def run(case):
        response = case.call(base_url=server.url, headers=THEIRS if path == "/v1/models" else None)
        assert response.status_code < 500, (case.as_curl_command(), response.text)
        told = operation.definition.raw["responses"][str(response.status_code)]["content"]  # no answer is one that the description does not have
        assert response.headers["content-type"][0].partition(";")[0] in told

    run()
    assert server.client.get("/health").status_code == 200
