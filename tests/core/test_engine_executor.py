"""The engine on the real executor: a tiny model on the numpy backend gives every request the tokens it gets alone."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from fastllm.api import RefBackend
from fastllm.core.engine import Engine
from fastllm.core.errors import EngineError
from fastllm.core.executor import Executor
from fastllm.core.graph import GraphBuilder
from fastllm.core.placement import Placement
from fastllm.core.planner import StepLimits, make_plan
from fastllm.core.request import Request
from fastllm.core.sampling import SamplingParams
from fastllm.core.step import StepBatch

from .devices import random_weights

WIDE = {"max_tokens": 64, "max_sequences": 8, "max_rows": 16, "context": 64, "block_size": 8, "num_blocks": 64}


def executor(**limits: int) -> Executor:
    """One attention layer of random weights, 32 tokens of vocabulary."""
    g = GraphBuilder("tiny")
    weight, refs, sources = random_weights(g, 7, 0.5)

    x = g.embed(g.input("ids"), weight("embed", (32, 16)))
    h = g.rms_norm(x, weight("norm", (16,), "f32"), eps=1e-5)
    q = g.view(g.linear(h, weight("q", (16, 16))), ("T", 4, 4))
    k = g.view(g.linear(h, weight("k", (8, 16))), ("T", 2, 4))
    v = g.view(g.linear(h, weight("v", (8, 16))), ("T", 2, 4))
    freq = g.const("freq", np.array([1.0, 0.1], np.float32))
    q, k = g.rope(q, freq), g.rope(k, freq)
    cache = g.kv_cache("kv.0", 2, 4, 4)
    g.kv_write(cache, k, v)
    x = g.add(x, g.linear(g.view(g.attention(q, cache, scale=0.5), ("T", 16)), weight("o", (16, 16))))
    logits = g.linear(g.embed(g.input("sample_rows"), x), weight("head", (32, 16)))
    graph = g.build(logits, g.sample(logits))
    backends = {"ref": RefBackend()}
    plan = make_plan(graph, refs, sources, backends, Placement.on("ref"), StepLimits(**{**WIDE, **limits}))
    return Executor(plan, refs, sources, backends)


def requests() -> list[Request]:
    drawn = np.random.default_rng(3)
    made = []
    for number in range(8):
        prompt = [*range(number % 3 * 9), *drawn.integers(0, 32, 1 + number).tolist()]
        params = SamplingParams(
            temperature=[0.0, 1.2][number % 2], top_p=1.0, seed=number, max_tokens=12, n=1 + number % 3, logprobs=2,
            prompt_logprobs=number % 2 == 0,
        )  # fmt: skip
        made.append(Request(prompt, params, request_id=str(number)))
    return made


@pytest.fixture(scope="module")
def alone() -> list:
    """Every request by itself, in an engine of its own, in steps as wide as it likes and without prefix cache."""
    results = []
    for request in requests():
        with Engine(executor(), prefix_cache=False) as engine:
            results.append(engine.submit(request).result(60))
    return results


@pytest.mark.parametrize(
    ("limits", "options"),
    [
        ({}, {}),
        ({"max_tokens": 5, "max_sequences": 3, "max_rows": 3}, {}),
        ({"max_tokens": 7, "num_blocks": 9}, {"policy": "shortest-remaining"}),
        ({"max_sequences": 1, "max_tokens": 1, "max_rows": 1}, {}),
        ({"block_size": 1, "num_blocks": 64, "max_tokens": 9}, {}),
    ],
)
def test_neighbours_chunks_blocks_and_preemption_change_no_bit(alone, limits, options):
    with Engine(executor(**limits), **options) as engine:
        handles = [engine.submit(request) for request in requests()]
        for handle, want in zip(handles, alone, strict=True):
            got = handle.result(60)
            assert got.choices == want.choices
            assert got.prompt_logprobs == want.prompt_logprobs
        assert engine.stats().blocks_used == 0
        assert engine.stats().preemptions > 0 or limits.get("num_blocks") != 9


def test_touching_a_block_writes_all_of_it_and_nothing_else():
    runs = executor()
    ref = runs.backends["ref"]
    places = [place for place in runs.plan.places.values() if place.arena == "kv"]
    for place in places:
        ref.upload(runs._buffer("ref", place), place.offset, memoryview(b"\xff" * (place.block_bytes * runs.num_blocks)), runs._streams["ref"])
    runs.touch_block(3)
    assert places
    for place in places:
        found = bytearray(place.block_bytes * runs.num_blocks)
        ref.download(memoryview(found), runs._buffer("ref", place), place.offset, runs._streams["ref"])
        blocks = [bytes(found[i : i + place.block_bytes]) for i in range(0, len(found), place.block_bytes)]
        assert [set(block) for block in blocks] == [{0} if i == 3 else {255} for i in range(runs.num_blocks)]
    runs.close()


def test_memory_of_a_device_that_is_not_the_hosts_is_not_touched(monkeypatch):
    monkeypatch.setattr(RefBackend, "wrap_host", lambda *_, **__: None)
    runs = executor()
    monkeypatch.setattr(RefBackend, "upload", lambda *_: pytest.fail("bytes were sent to a device that has its memory"))
    runs.touch_block(3)
    runs.close()


def test_arithmetic_that_is_not_finite_fails_the_request_with_a_reason():
    broken = executor()
    next(array for (_, name), array in broken._host.items() if name == "freq")[...] = np.nan
    with Engine(broken) as engine, pytest.raises(EngineError, match="no finite logit at position 3"):
        engine.submit(Request([1, 2, 3], SamplingParams(max_tokens=2))).result(60)


def test_an_executor_keeps_nothing_of_requests_that_have_ended():
    class Told:
        def __call__(self, done, cached):
            pass

    told, runs = Told(), executor()
    left = weakref.ref(told)
    with Engine(runs) as engine:
        engine.submit(Request([1, 2, 3], SamplingParams(max_tokens=3), on_progress=told)).result(60)
    del told
    gc.collect()
    assert left() is None
    assert runs._batch is None


def test_an_executor_keeps_no_batch():
    runs = executor()
    batch = StepBatch(*(np.zeros(n, np.int32) for n in (1, 1, 1)), np.array([0, 1], np.int32), np.ones(1, np.int32), np.zeros((1, 1), np.int32), np.zeros(1, np.int32))
    runs.run(batch)
    batch.moved = True
    runs.run(batch)
    left = weakref.ref(batch)
    del batch
    gc.collect()
    assert left() is None
    runs.close()
    assert runs._copies is None  # nor its arrays
