"""Vectors of texts: against numpy, whatever shares the step and however a text is cut; and ranking by them."""

from __future__ import annotations

import base64
import importlib.util
import json
from pathlib import Path

import numpy as np
import openai
import pytest

from fastllm import models
from fastllm.core.embedding import Pool
from fastllm.formats import open_model

TEXTS = ["One", "Two texts", "x" * 300, "a longer text of some words"]


@pytest.fixture(scope="module", params=["last", "mean"])
def embedder(request, start):
    # activations stay f32: the reference rounds nothing
    options = {"embedding": True, "max_batch_size": 3, "prefill_chunk": 64, "backend_options": {"act": "f32"}}
    server = start(options, embedding=request.param)
    yield server
    server.close()


@pytest.fixture(scope="module")
def hidden(model_folder):
    """hidden(ids) -> the normed hidden state of every position, f64 [n, C], by the interpreter of the models' tests."""
    spec = importlib.util.spec_from_file_location("numpy_eval", Path(__file__).parents[1] / "models" / "numpy_eval.py")
    numpy_eval = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(numpy_eval)
    files = open_model(model_folder)
    config = json.loads((model_folder / "config.json").read_text())
    definition = models.build(files.kind, files.architecture, config, files.tensors, embedding=True)
    weights = numpy_eval.load_weights(definition, files.tensors)
    files.close()
    return lambda ids: numpy_eval.evaluate(definition.graph, weights, ids)


def vectors(server, texts, **more):
    answer = server.client.post("/v1/embeddings", json={"input": texts, **more})
    assert answer.status_code == 200, answer.text
    return [np.array(d["embedding"], np.float32) for d in answer.json()["data"]]


def test_vectors_are_those_of_an_independent_interpreter(embedder, hidden):
    for text in TEXTS:
        ids = embedder.client.post("/tokenize", json={"prompt": text}).json()["tokens"]
        rows = hidden(ids)  # [n, C]
        wanted = rows[-1] if embedder.settings.embedding == "last" else rows.mean(axis=0)
        assert np.allclose(vectors(embedder, text)[0], wanted / np.linalg.norm(wanted), atol=2e-3), text


def test_vectors_have_unit_length_and_do_not_depend_on_the_batch(embedder):
    alone = [vectors(embedder, text)[0] for text in TEXTS]
    together = vectors(embedder, TEXTS)
    for one, other in zip(alone, together, strict=True):
        assert one.tobytes() == other.tobytes()
        assert np.linalg.norm(one) == pytest.approx(1, abs=1e-6)
    assert not np.allclose(alone[0], alone[1])


def test_openais_client_gets_vectors_in_both_encodings(embedder):
    with openai.OpenAI(base_url=embedder.url, api_key="none", max_retries=0) as client:
        found = client.embeddings.create(model="tiny", input=TEXTS)  # asks for base64
    with openai.OpenAI(base_url=embedder.url, api_key="none", max_retries=0, _strict_response_validation=True) as client:
        plain = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
    assert [d.index for d in found.data] == [0, 1, 2, 3]
    assert all(np.array_equal(np.float32(a.embedding), np.float32(b.embedding)) for a, b in zip(found.data, plain.data, strict=True))
    assert found.usage.prompt_tokens == sum(len(t) for t in TEXTS)


def test_fewer_dimensions_are_the_first_ones_of_unit_length(embedder):
    full, [few] = vectors(embedder, "Hi")[0], vectors(embedder, "Hi", dimensions=5)
    assert np.allclose(few, full[:5] / np.linalg.norm(full[:5]), atol=1e-6)
    raw = embedder.client.post("/v1/embeddings", json={"input": [40, 41], "encoding_format": "base64"}).json()["data"][0]["embedding"]
    assert len(base64.b64decode(raw)) == 4 * 32


def test_ranking_is_by_cosine_in_both_shapes(embedder):
    query, *documents = vectors(embedder, ["One", *TEXTS])
    scores = [float(query @ d) for d in documents]
    order = sorted(range(4), key=lambda i: -scores[i])
    jina = embedder.client.post("/v1/rerank", json={"query": "One", "documents": [TEXTS[0], {"text": TEXTS[1]}, *TEXTS[2:]], "return_documents": True}).json()
    assert [r["index"] for r in jina["results"]] == order
    assert jina["results"][0]["document"] == {"text": "One"}
    assert jina["results"][0]["relevance_score"] == pytest.approx(1, abs=1e-5)
    tei = embedder.client.post("/rerank", json={"query": "One", "texts": TEXTS, "top_n": 2}).json()
    assert [r["index"] for r in tei] == order[:2]


def test_a_text_is_no_more_like_a_query_than_itself(embedder):
    texts = [f"{word} {number}" for word in TEXTS for number in range(16)]
    for query in texts[::8]:
        ranked = embedder.client.post("/v1/rerank", json={"query": query, "documents": texts}).json()["results"]
        assert all(-1 <= one["relevance_score"] <= 1 for one in ranked)
        assert ranked[0]["relevance_score"] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": ["a", ""]}, "input[1]"),
        ("/v1/embeddings", {"input": [""]}, "input"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
        ("/v1/embeddings", {"input": [[70], [70] * 1025]}, "input[1]"),
        ("/v1/rerank", {"query": "a", "documents": ["a", {"image": "x"}]}, "documents[1].text"),
        ("/v1/rerank", {"query": "a", "documents": ["a", "b", ""]}, "documents[2]"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
    ],
)
def test_the_text_that_is_refused_is_named(embedder, path, body, param):
    refused = embedder.client.post(path, json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_the_other_routes_are_refused_each_way(embedder, server):
    refused = embedder.client.post("/v1/completions", json={"prompt": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_content")
    refused = server.client.post("/v1/embeddings", json={"input": "a"})
    assert (refused.status_code, "--embedding" in refused.text) == (400, True)
    for body, field in (({"input": []}, "input"), ({"input": "a", "dimensions": 33}, "dimensions"), ({"input": [[70] * 1025]}, "1024")):
        answer = embedder.client.post("/v1/embeddings", json=body)
        assert answer.status_code == 400
        assert field in answer.text


@pytest.mark.parametrize("kind", ["last", "mean", "cls"])
def test_pooling_does_not_depend_on_how_the_rows_come(kind):
    rows = np.random.default_rng(1).standard_normal((7, 5)).astype(np.float32)
    whole, cut = Pool(kind), Pool(kind)
    whole.add(rows)
    for size, at in ((1, 0), (4, 1), (2, 5)):
        cut.add(rows[at : at + size])
    assert whole.vector().tobytes() == cut.vector().tobytes()
    wanted = {"last": rows[-1], "cls": rows[0], "mean": rows.astype(np.float64).mean(axis=0)}[kind]
    assert np.allclose(whole.vector(), wanted, atol=1e-6)


def test_more_texts_than_the_queue_holds(start):
    server = start({"embedding": True, "max_queue": 4, "max_batch_size": 2}, embedding="last")
    try:
        texts = [f"text {i}" for i in range(40)]
        together = vectors(server, texts)
        assert len(together) == 40
        assert together[31].tobytes() == vectors(server, texts[31])[0].tobytes()
    finally:
        server.close()
