"""Two hundred random schedules give one answer: the same tokens and the same bits of their log-probabilities.

A schedule is everything that is not the request: what else runs and when it is cancelled, how the prompt is cut, whether it was found
in the cache, how many blocks there are (few: sequences are preempted and computed again), on how many threads. Each weight format has
kernels of its own.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from fastllm import models
from fastllm.backends.cpu_avx.backend import CpuBackend
from fastllm.core import _kernels
from fastllm.core.engine import Engine
from fastllm.core.errors import Cancelled
from fastllm.core.executor import Executor
from fastllm.core.placement import Placement
from fastllm.core.planner import StepLimits, make_plan
from fastllm.core.request import Request
from fastllm.core.sampling import SamplingParams
from fastllm.core.weights import TensorSource
from fastllm.formats import open_model

FIXTURES = Path(__file__).parents[1] / "models" / "fixtures"
PROMPTS = [[int(i) for i in np.random.default_rng(seed).integers(3, 250, length)] for seed, length in ((1, 29), (2, 8), (3, 1), (4, 17))]
ASKED = [
    SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=77, max_tokens=14, logprobs=3, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=20, logprobs=0, repetition_penalty=1.1, ignore_eos=True),
    SamplingParams(temperature=1.3, min_p=0.02, seed=5, max_tokens=12, logprobs=1, n=2, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.8, seed=9, max_tokens=16, logprobs=2, prompt_logprobs=True, ignore_eos=True),
]
SCHEDULES, LIMIT_S = 100, 60


def requantised(source: TensorSource, format: str) -> TensorSource:
    """A matrix in blocks; norms, and rows that are no whole blocks, stay as they are."""
    if len(source.shape) != 2 or source.shape[1] % 32:
        return source
    values = _kernels.decode(source.format, source.data, int(np.prod(source.shape)))
    return TensorSource(source.name, source.shape, format, _kernels.encode(format, values))


def bits(result):
    """Everything that a request gets, comparable to the last bit."""
    return [(choice.token_ids, [(t.token_id, t.logprob, t.top) for t in choice.logprobs]) for choice in result.choices], result.prompt_logprobs


@pytest.mark.parametrize("format", ["q8_0", "q4_0"])
def test_answers_do_not_depend_on_the_schedule(format):
    files = open_model(FIXTURES / "qwen3")
    sources = {name: requantised(source, format) for name, source in files.tensors.items()}
    model = models.build("huggingface", files.architecture, json.loads((FIXTURES / "qwen3" / "config.json").read_text()), sources)
    preempted = found = cancelled = 0
    with CpuBackend(threads=1) as one, CpuBackend(threads=2) as two:

        def engine(cpu, chunk, sequences, blocks, prefix_cache):
            limits = StepLimits(max(chunk, sequences), sequences, 64, 64, 8, blocks)
            plan = make_plan(model.graph, model.weights, sources, {"cpu_avx": cpu}, Placement.on("cpu_avx"), limits, fallback="error")
            return Engine(Executor(plan, model.weights, sources, {"cpu_avx": cpu}), prefix_cache=prefix_cache)

        with engine(one, 64, 1, 64, False) as alone:
            wanted = [bits(alone.submit(Request(p, a)).result(LIMIT_S)) for p, a in zip(PROMPTS, ASKED, strict=True)]
        for seed in range(SCHEDULES):
            rng = random.Random(seed)
            shape = {"chunk": rng.choice((1, 3, 7, 16, 64)), "sequences": rng.randint(1, 8), "blocks": rng.choice((8, 8, 9, 12, 64))}
            shape["prefix_cache"] = rng.random() < 0.5
            with engine(rng.choice((one, two)), **shape) as busy:
                crowd, probes = [], []
                order = [*range(4), *(rng.randrange(4) for _ in range(rng.randrange(3)))]
                rng.shuffle(order)
                for index in order:
                    for _ in range(rng.randrange(3)):
                        prompt = (PROMPTS[rng.randrange(4)] * 2)[: rng.randint(1, 40)]
                        params = SamplingParams(temperature=1.0, seed=rng.randrange(9), max_tokens=rng.randint(1, 12), ignore_eos=True)
                        crowd.append(busy.submit(Request(prompt, params)))
                        if rng.random() < 0.3:
                            rng.choice(crowd).cancel()
                    probes.append((index, busy.submit(Request(PROMPTS[index], ASKED[index]))))
                    if rng.random() < 0.3:
                        probes[-1][1].result(LIMIT_S)
                for index, handle in probes:
                    assert bits(handle.result(LIMIT_S)) == wanted[index], (seed, index, shape)
                for handle in crowd:
                    try:
                        handle.result(LIMIT_S)
                    except Cancelled:
                        cancelled += 1
                stats = busy.stats()
                preempted += stats.preemptions
                found += stats.prefix_hit_tokens
                assert (stats.running, stats.waiting, stats.blocks_used, stats.requests_failed) == (0, 0, 0, 0)
    files.close()
    assert preempted > 4
    assert found > 500
    assert cancelled > 20
