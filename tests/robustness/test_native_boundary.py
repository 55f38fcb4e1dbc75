"""What reaches native code of cpu_avx is checked before it runs: steps, attributes, sizes and memory that do not fit are typed errors.

Steps are changed at random, one or more numbers at boundary values, and given to a compiled program: whatever is not refused must be
harmless, and after it the program gives the same bits as before. The suite is worth most in a build with sanitizers (CFLAGS
`-fsanitize=address,undefined`); without one, a crash or a changed answer is what it sees.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fastllm import models
from fastllm.api import CATALOGUE, EngineError, FastLLMError, KVSpec, ShapeError, StepDims, Stream, Tensor
from fastllm.backends.cpu_avx.backend import CpuBackend
from fastllm.core.executor import Executor
from fastllm.core.placement import Placement
from fastllm.core.planner import StepLimits, make_plan
from fastllm.core.step import StepBatch
from fastllm.formats import open_model

FIXTURES = Path(__file__).parents[1] / "models" / "fixtures"
EDGES = [-(2**31), -65, -1, 0, 1, 7, 8, 15, 16, 63, 64, 255, 256, 2**24, 2**31 - 1]
BLOCK, BLOCKS, I32 = 8, 16, np.int32


@pytest.fixture(scope="module")
def executor():
    files = open_model(FIXTURES / "llama")
    config = json.loads((FIXTURES / "llama" / "config.json").read_text())
    model = models.build("huggingface", files.architecture, config, files.tensors)
    with CpuBackend(threads=2) as cpu:
        backends = {"cpu_avx": cpu}
        plan = make_plan(model.graph, model.weights, files.tensors, backends, Placement.on("cpu_avx"), StepLimits(24, 3, 24, 64, BLOCK, BLOCKS))
        executor = Executor(plan, model.weights, files.tensors, backends)
        yield executor
        executor.close()
    files.close()


def step() -> StepBatch:
    """Three prompts of 9, 1 and 5 tokens: a step that needs nothing of the cache but what it writes itself."""
    parts = [(0, 9, [3, 5]), (0, 1, [7, 1]), (0, 5, [2, 9])]
    ids = np.arange(15, dtype=I32) + 20
    positions = np.concatenate([np.arange(a, b, dtype=I32) for a, b, _ in parts])
    slots = np.concatenate([[blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(a, b)] for a, b, blocks in parts]).astype(I32)
    starts = np.array([0, 9, 10, 15], I32)
    contexts = np.array([b for _, b, _ in parts], I32)
    return StepBatch(ids, positions, slots, starts, contexts, np.array([b for _, _, b in parts], I32), np.array([8, 9, 14], I32))


def test_two_thousand_steps_with_numbers_that_do_not_belong(executor):
    rng = np.random.default_rng(7)
    good = executor.run(step()).logits.copy()
    refused = []
    for _ in range(2000):
        bad = step()
        for _ in range(rng.integers(1, 4)):
            name = ("ids", "positions", "slots", "query_start", "context_len", "block_table", "sample_rows")[rng.integers(7)]
            array = getattr(bad, name).reshape(-1)
            array[rng.integers(array.size)] = EDGES[rng.integers(len(EDGES))]
        try:
            executor.run(bad)
        except EngineError as error:
            refused.append(error.who)
    assert len(refused) > 1000
    assert set(refused) == {"cpu_avx"}
    np.testing.assert_array_equal(executor.run(step()).logits, good)


def test_steps_above_the_plan_and_arrays_that_contradict_each_other(executor):
    good = executor.run(step()).logits.copy()
    for name, array in (
        ("ids", np.zeros(25, I32)),
        ("context_len", np.ones(4, I32)),
        ("sample_rows", np.zeros(25, I32)),
        ("query_start", np.array([0, 15], I32)),
        ("block_table", np.zeros((3, 9), I32)),
        ("block_table", np.zeros((2, 2), I32)),
        ("prefix_len", np.zeros(2, I32)),
        ("positions", np.zeros(14, I32)),
        ("slots", np.zeros(0, I32)),
        ("ids", np.zeros(14, I32)),
    ):
        bad = step()
        setattr(bad, name, array)
        with pytest.raises(EngineError):
            executor.run(bad)
    np.testing.assert_array_equal(executor.run(step()).logits, good)


@pytest.mark.parametrize("dims", [(-1, 0, 0), (25, 1, 1), (1, 4, 1), (1, 1, 25), (2**31, 0, 0), (2**63 - 1, 0, 0), (2**64, 0, 0), (0, -(2**70), 0)])
def test_dims_of_any_size_are_refused(executor, dims):
    with pytest.raises(EngineError):
        executor._programs[0].run(StepDims(*dims))


NOT_INTEGERS = [-1, 2**31, 2**32, 2**64, 1.5, math.nan, "x", True]
NOT_NUMBERS = [math.nan, math.inf, -math.inf, "x", True, 10**400]
ATTRIBUTES = [(op, name) for op, spec in CATALOGUE.items() for name, attr in spec.attrs.items() if not attr.choices]


@pytest.mark.parametrize(("op", "name"), ATTRIBUTES)
def test_attributes_that_no_backend_can_use(op, name):
    """A chunk of 2^32 was a division by zero in native code, which keeps 32 bits."""
    spec = CATALOGUE[op]
    usable = {n: (1 if a.low is not None else 1.0) for n, a in spec.attrs.items() if not a.choices}
    assert spec.complete_attrs(usable)[name] == 1
    for value in NOT_INTEGERS if spec.attrs[name].low is not None else NOT_NUMBERS:
        with pytest.raises(ShapeError, match=name):
            spec.complete_attrs({**usable, name: value})
    assert spec.complete_attrs({**usable, name: np.int64(3)})[name] == 3


@pytest.mark.parametrize("spec", [KVSpec(0, 8, 8), KVSpec(2, 0, 8), KVSpec(-1, 8, 8), KVSpec(2, 8, -1)], ids=str)
def test_a_cache_without_heads_or_keys(spec):
    operands = [((3, 4, 8), "f32"), ((), "kv"), *[((3,), "i32")] * 7]
    with pytest.raises(ShapeError):
        CATALOGUE["attention"].infer(operands, [None, spec, *[None] * 7], CATALOGUE["attention"].complete_attrs({"scale": 1.0}))
    with pytest.raises(ShapeError):
        CATALOGUE["kv_write"].infer([((), "kv"), ((3, 2, 8), "f32"), ((3, 2, 8), "f32"), ((3,), "i32")], [spec, None, None, None], {})


def test_operands_misplaced_by_bytes_rows_or_strides_are_refused():
    """Every op, every operand: shifted off its alignment, behind its buffer, before it, too long, with strides that leave it."""
    memory = np.zeros(1 << 14, np.uint8)
    stream = Stream()
    with CpuBackend(threads=2) as cpu:
        buffer = cpu.wrap_host(memory, readonly=False)

        def at(offset, shape, dtype="f32", strides=None):
            return Tensor(buffer, offset, shape, dtype, strides)

        calls = {
            "add": ([at(0, (4, 16)), at(1024, (4, 16))], at(2048, (4, 16)), {}),
            "rms_norm": ([at(0, (4, 16)), at(1024, (16,))], at(2048, (4, 16)), {"eps": 1e-5}),
            "rope": ([at(0, (4, 2, 8)), at(1024, (4,), "i32"), at(1536, (4,))], at(2048, (4, 2, 8)), {}),
            "act_mul": ([at(0, (4, 16)), at(1024, (4, 16))], at(2048, (4, 16)), {}),
            "softmax": ([at(0, (4, 16))], at(2048, (4, 16)), {}),
            "linear": ([at(0, (4, 16)), at(1024, (8, 16)), at(1536, (8,))], at(2048, (4, 8)), {}),
            "matmul": ([at(0, (4, 2, 8)), at(1024, (2, 4, 8))], at(2048, (4, 2, 4)), {}),
            "embed": ([at(0, (4,), "i32"), at(1024, (9, 16))], at(2048, (4, 16)), {}),
        }
        for op, (inputs, out, attrs) in calls.items():
            run = cpu.ops()[op]
            run(*inputs, out=out, stream=stream, ws=None, **attrs)
            for position, tensor in enumerate([*inputs, out]):
                for wrong in (
                    at(tensor.offset + 1, tensor.shape, tensor.dtype),
                    at(len(memory) - 8, tensor.shape, tensor.dtype),
                    at(-64, tensor.shape, tensor.dtype),
                    at(1 << 62, tensor.shape, tensor.dtype),
                    at(tensor.offset, (tensor.shape[0] + 1, *tensor.shape[1:]), tensor.dtype),
                    at(tensor.offset, (1 << 40, *tensor.shape[1:]), tensor.dtype),
                    at(tensor.offset, tensor.shape, tensor.dtype, (1 << 30, *[1] * (len(tensor.shape) - 1))),
                    at(tensor.offset, tensor.shape, tensor.dtype, (-1, *[1] * (len(tensor.shape) - 1))),
                    at(tensor.offset, (*tensor.shape, 1), tensor.dtype),
                    at(tensor.offset, tensor.shape, "i8"),
                ):
                    operands = [*inputs, out]
                    operands[position] = wrong
                    if op == "embed" and position == 1 and wrong.shape == (10, 16):
                        continue  # a longer table is a table
                    with pytest.raises(ShapeError):
                        run(*operands[:-1], out=operands[-1], stream=stream, ws=None, **attrs)
        buffer.close()


def test_uploads_and_copies_at_any_offset_stay_inside():
    with CpuBackend(threads=1) as cpu:
        buffer = cpu.alloc(256, "scratch")
        for offset, size in ((-1, 1), (256, 1), (255, 2), (2**63, 1), (2**64, 1), (-(2**63), 8), (0, 257)):
            with pytest.raises(ShapeError):
                cpu.upload(buffer, offset, memoryview(bytes(size)), Stream())
            with pytest.raises(ShapeError):
                cpu.download(memoryview(bytearray(size)), buffer, offset, Stream())
            for call in ((buffer, offset, buffer, 0, size), (buffer, 0, buffer, offset, size)):
                with pytest.raises(ShapeError):
                    cpu.copy(*call, Stream())
        with pytest.raises(FastLLMError):
            cpu.alloc(2**64, "kv")
        with pytest.raises(ShapeError):
            cpu.alloc(-1, "kv")
        buffer.close()


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space")
def test_under_a_limit_of_address_space_loading_ends_by_one_error_or_works(tiny_folder):
    """At every limit the process says one of: it works, or one typed error. Modules are loaded before, numbers of threads are small."""
    code = """
import os, resource, sys
import fastllm.core.engine, fastllm.core.executor, fastllm.core.plugins, fastllm.formats, fastllm.models, fastllm.text
import fastllm.backends.cpu_avx.backend, fastllm.backends.ref.backend, fastllm.core._kernels
from fastllm import LLM, SamplingParams
from fastllm.core.errors import FastLLMError
LLM(sys.argv[1], backend="cpu_avx", threads=1).close()
for pages in range(512, 49152, 2048):  # 128 MiB are kept free
    child = os.fork()
    if child == 0:
        now = int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, ((now + pages) * 4096,) * 2)
        try:
            llm = LLM(sys.argv[1], backend="cpu_avx", threads=1, prefill_chunk=4096)
            llm.generate([5, 6], SamplingParams(max_tokens=2))
            os._exit(0)
        except FastLLMError:
            os._exit(1)
        except BaseException as error:
            sys.stderr.write(repr(error)[:300])
            os._exit(2)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(tiny_folder)], capture_output=True, text=True, timeout=60, check=True)
    found = done.stdout.split()
    assert set(found) <= {"0", "1"}, done.stderr
    assert {"0", "1"} <= set(found)
