"""A request's answer is the same to the last bit, whatever shares its steps.

One request is run alone and in one step, and then among seven others, with its prompt cut in chunks of 1, 7 and 64, with and without a
hit in the prefix cache, on one and two threads. Tokens and log-probabilities must be equal, not close. Weights are kept as bf16, and
as blocks of 4 and 8 bits, so that every kind of linear kernel is in the test.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastllm import models
from fastllm.core import _kernels
from fastllm.core.engine import Engine
from fastllm.core.errors import BackendUnavailable
from fastllm.core.executor import Executor
from fastllm.core.graph import SlotSpec, with_kv_dtype
from fastllm.core.placement import Placement
from fastllm.core.planner import StepLimits, make_plan
from fastllm.core.plugins import BackendRegistry
from fastllm.core.request import Request
from fastllm.core.sampling import SamplingParams
from fastllm.core.weights import TensorSource
from fastllm.formats import open_model

FIXTURES = Path(__file__).parents[1] / "models" / "fixtures"
PROMPT = [int(i) for i in np.random.default_rng(3).integers(3, 250, 37)]
PARAMS = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=77, max_tokens=14, logprobs=5, ignore_eos=True)


def requantised(source: TensorSource, format: str) -> TensorSource:
    """A matrix in another format; norms, biases, and rows that are no whole blocks, stay as they are."""
    if len(source.shape) != 2 or source.shape[1] % 32 or source.name.endswith("bias"):
        return source
    values = _kernels.decode(source.format, source.data, int(np.prod(source.shape)))
    return TensorSource(source.name, source.shape, format, _kernels.encode(format, values))


class House:
    """A tiny model on one backend; `answer` runs the request under given circumstances in an engine of its own."""

    def __init__(self, name, format, backend, options, kv_dtype=None):
        registry = BackendRegistry()
        self.files = open_model(FIXTURES / name)
        tensors = self.files.tensors
        self.tensors = tensors if format == "bf16" else {k: requantised(t, format) for k, t in tensors.items()}
        self.model = models.build("huggingface", self.files.architecture, json.loads((FIXTURES / name / "config.json").read_text()), self.tensors)
        if kv_dtype is not None:
            self.model = replace(self.model, graph=with_kv_dtype(self.model.graph, kv_dtype))
        self.stateful = any(isinstance(v.spec, SlotSpec) for v in self.model.graph.of_kind("state"))
        try:
            self.name, self.backends = backend, {backend: registry.open(registry.select(backend), options)}
        except BackendUnavailable as error:
            pytest.skip(f"{error.message} {error.fix}")

    def engine(self, *, chunk, others=0, prefix_cache=False, blocks=32):
        """chunk: tokens of a step that are left for the prompt when the others decode."""
        limits = StepLimits(chunk + others, 8, 64, 64, 16, blocks, 3 if self.stateful else 0)
        plan = make_plan(self.model.graph, self.model.weights, self.tensors, self.backends, Placement.on(self.name), limits, fallback="error")
        return Engine(Executor(plan, self.model.weights, self.tensors, self.backends), prefix_cache=prefix_cache, stateful=self.stateful)

    def answer(self, *, chunk=64, others=0, hit=False):
        with self.engine(chunk=chunk, others=others, prefix_cache=hit) as engine:
            if hit:
                engine.submit(Request(PROMPT, SamplingParams(max_tokens=1, seed=1))).result(60)
            crowd = [
                engine.submit(Request(PROMPT[i : i + 5 * i + 1], SamplingParams(temperature=1.0, seed=i, max_tokens=9 + i, ignore_eos=True)))
                for i in range(others)
            ]
            result = engine.submit(Request(PROMPT, PARAMS)).result(60)
            for handle in crowd:
                handle.result(60)
            if hit:
                assert result.timings.cached_tokens >= 32
        choice = result.choices[0]
        return [(t.token_id, t.logprob, t.top) for t in choice.logprobs]

    def preempted(self, prefix_cache=False):
        """The answer beside two older requests in a cache of 7 blocks of 16 tokens, and how often it lost its place.

        All three are computed in one step, 14 + 15 + 37 tokens in 1 + 1 + 3 blocks. A few steps later the older two have 2 blocks each,
        and when the request needs its fourth, after 11 tokens, there is none: it is the youngest, and is computed again.
        """
        pushed_out = []
        with self.engine(chunk=64, others=2, blocks=7, prefix_cache=prefix_cache) as engine:
            preempt = engine._scheduler._preempt
            engine._scheduler._preempt = lambda sequence: (pushed_out.append(sequence.owner.job.handle), preempt(sequence))
            crowd = [Request(PROMPT[:n], SamplingParams(temperature=1.0, seed=n, max_tokens=33, ignore_eos=True)) for n in (14, 15)]
            with engine._wake:  # the engine finds all three at once
                *others, handle = [engine.submit(request) for request in (*crowd, Request(PROMPT, PARAMS))]
            result = handle.result(120)
            for other in others:
                other.result(120)
        return [(t.token_id, t.logprob, t.top) for t in result.choices[0].logprobs], pushed_out.count(handle)

    def close(self):
        for backend in self.backends.values():
            backend.close()
        self.files.close()


CASES = [
    ("llama_llama3", "bf16", "ref", {}),
    ("llama_llama3", "bf16", "cpu_avx", {}),
    ("gemma3", "bf16", "cpu_avx", {}),
    ("gemma2", "q8_0", "cpu_avx", {}),
    ("qwen3", "q4_0", "cpu_avx", {}),
    ("llama", "q4_1", "cpu_avx", {}),
    ("llama", "q5_0", "cpu_avx", {"act": "f32"}),
    ("phi3", "q5_1", "cpu_avx", {"isa": "baseline"}),
    ("qwen2_moe", "q4_0", "cpu_avx", {}),
    ("mixtral", "bf16", "cpu_avx", {}),
    ("deepseek_v3", "q8_0", "cpu_avx", {}),
    ("gpt_oss", "q8_0", "cpu_avx", {}),
    ("qwen3_next", "bf16", "ref", {}),
    ("qwen3_next", "bf16", "cpu_avx", {}),
    ("qwen3_next", "q8_0", "cpu_avx", {"isa": "avx2"}),
    ("qwen3_next", "bf16", "cpu_avx", {"isa": "baseline", "act": "f32"}),
    ("llama_llama3", "bf16", "opencl_generic", {}),
    ("gemma3", "q8_0", "opencl_generic", {}),
    ("qwen3", "q4_0", "opencl_generic", {"kernels": "lanes"}),
]


@pytest.mark.parametrize(("name", "format", "backend", "options"), CASES)
def test_the_answer_depends_on_the_request_only(name, format, backend, options):
    same_under_all_circumstances(name, format, backend, options)


@pytest.mark.parametrize(("backend", "options"), [("ref", {}), ("cpu_avx", {}), ("cpu_avx", {"isa": "avx2"}), ("cpu_avx", {"isa": "baseline"})], ids=str)
@pytest.mark.parametrize("kv_dtype", ["f16", "bf16", "f32", "int8"])
def test_the_answer_depends_on_the_request_only_in_every_type_of_cache(kv_dtype, backend, options):
    same_under_all_circumstances("llama", "q8_0" if backend == "cpu_avx" else "bf16", backend, options, kv_dtype, few=True)


def same_under_all_circumstances(name, format, backend, options, kv_dtype=None, few=False):
    """few: those in which a step's cache is read in pieces of other sizes than when it was written."""
    houses = []
    try:
        alone = []
        for threads in (1, 2) if backend == "cpu_avx" else (None,):
            houses.append(House(name, format, backend, options | ({"threads": str(threads)} if threads else {}), kv_dtype))
            house = houses[-1]
            alone.append(house.answer())
            for circumstances in (
                {"chunk": 1},
                {"chunk": 7},
                {"chunk": 16, "others": 7},
                {"others": 7},
                {"hit": True},
                {"hit": True, "chunk": 7, "others": 7},
            )[1 if few else 0 :: 5 if few else 1]:
                assert house.answer(**circumstances) == alone[0], f"threads {threads}, {circumstances}"
        assert all(a == alone[0] for a in alone)
    finally:
        for house in houses:
            house.close()


@pytest.mark.parametrize(("name", "backend"), [("llama", "cpu_avx"), ("deepseek_v3", "cpu_avx"), ("gpt_oss", "cpu_avx"), ("qwen3_next", "ref"), ("qwen3_next", "cpu_avx")])
def test_a_request_that_was_preempted_gives_the_same_answer_with_cache_and_with_recurrent_state(name, backend):
    house = House(name, "bf16", backend, {})
    try:
        alone = house.answer()
        for prefix_cache in (False, True):
            found, times = house.preempted(prefix_cache)
            assert found == alone
            assert times == 1
    finally:
        house.close()


@pytest.mark.parametrize("backend", ["ref", "cpu_avx"])
def test_a_soak_of_random_requests_with_random_cancels_leaves_nothing_behind(backend):
    house = House("llama", "q8_0" if backend == "cpu_avx" else "bf16", backend, {})
    rng = np.random.default_rng(11)
    used_before = house.backends[backend].memory().used
    try:
        with house.engine(chunk=24, prefix_cache=True) as engine:
            probe = engine.submit(Request(PROMPT, PARAMS)).result(120).choices[0].token_ids
            count, live = 500 if backend == "cpu_avx" else 60, []
            for _ in range(count):
                length = int(rng.integers(1, 50))
                start = int(rng.integers(0, 3))
                ids = (PROMPT * 3)[start : start + length]
                seed, new = int(rng.integers(0, 9)), int(rng.integers(1, 12))
                live.append(engine.submit(Request(ids, SamplingParams(temperature=1.0, seed=seed, max_tokens=new))))
                if rng.random() < 0.3:
                    live[int(rng.integers(0, len(live)))].cancel()
                if len(live) > 30:
                    finish(live.pop(0))
            for handle in live:
                finish(handle)
            assert engine.submit(Request(PROMPT, PARAMS)).result(120).choices[0].token_ids == probe
            stats = engine.stats()
            assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
            assert stats.requests_failed == 0
            assert stats.requests_finished + stats.requests_cancelled == count + 2
            assert stats.requests_cancelled > count // 20
        assert house.backends[backend].memory().used == used_before
    finally:
        house.close()


def finish(handle):
    """Waits for a request, cancelled or not."""
    from fastllm.core.errors import Cancelled

    try:
        handle.result(120)
    except Cancelled:
        assert handle.done
