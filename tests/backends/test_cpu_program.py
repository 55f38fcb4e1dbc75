"""Compiled programs of cpu_avx: a small model against `ref`, against the same ops run one by one, and under every way to cut a step."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from fastllm.api import EngineError, RefBackend, StepDims
from fastllm.backends.cpu_avx.backend import CpuBackend
from fastllm.core import _kernels
from fastllm.core.executor import Executor
from fastllm.core.graph import GraphBuilder
from fastllm.core.placement import Placement
from fastllm.core.planner import StepLimits, make_plan
from fastllm.core.step import StepBatch
from fastllm.core.weights import TensorSource, WeightRef

LIMITS = StepLimits(max_tokens=48, max_sequences=4, max_rows=48, context=1024, block_size=64, num_blocks=40)
V, C, H, K, D, F = 96, 64, 6, 2, 32, 96


def model(layers=2, format="f32"):
    """format: of matrices. Fused and separate projections, qk-norm, sliced gate and up, biases, a router-like f32 weight, tied table, soft-cap."""
    rng = np.random.default_rng(3)
    g, sources, refs = GraphBuilder("small"), {}, {}

    def weight(name, shape, dtype="any", scale=None):
        values = (rng.standard_normal(shape) * (scale or shape[-1] ** -0.5)).astype(np.float32)
        raw = values.reshape(-1).view(np.uint8)
        if format != "f32" and len(shape) == 2 and shape[0] > 1:
            sources[name] = TensorSource(name, shape, format, _kernels.encode(format, values))
        else:
            sources[name] = TensorSource(name, shape, "f32", raw)
        refs[name] = WeightRef(name)
        return g.weight(name, shape, dtype)

    table = weight("embed", (V, C), scale=1.0)
    x = g.mul(g.embed(g.input("ids"), table), g.scalar(1.5))
    freq = g.const("freq", (10000.0 ** (-np.arange(D // 2) / (D // 2))).astype(np.float32))
    for i in range(layers):
        with g.tag(layer=i):
            h = g.rms_norm(x, weight(f"n{i}", (C,), "f32", 1.0), eps=1e-5)
            if i % 2:
                qkv = g.linear(h, weight(f"qkv{i}", ((H + 2 * K) * D, C)))
                q, k, v = (g.slice(qkv, a * D, b * D) for a, b in ((0, H), (H, H + K), (H + K, H + 2 * K)))
                q = g.mul(q, g.scalar(1.0))  # slices cannot be reshaped: copies
                k, v = g.mul(k, g.scalar(1.0)), g.mul(v, g.scalar(1.0))
            else:
                q, k = (
                    g.linear(h, weight(f"q{i}", (H * D, C)), weight(f"bq{i}", (H * D,), "f32")),
                    g.linear(h, weight(f"k{i}", (K * D, C))),
                )
                v = g.linear(h, weight(f"v{i}", (K * D, C)))
            q, k, v = g.view(q, ("T", H, D)), g.view(k, ("T", K, D)), g.view(v, ("T", K, D))
            q, k = g.rms_norm(q, weight(f"qn{i}", (D,), "f32", 1.0), eps=1e-6), g.rms_norm(k, None, eps=1e-6)
            q, k = g.rope(q, freq), g.rope(k, freq)
            cache = g.kv_cache(f"kv{i}", K, D, D)
            g.kv_write(cache, k, v)
            a = g.attention(q, cache, scale=D**-0.5, window=300 if i % 2 else 0)
            x = g.add(x, g.linear(g.view(a, ("T", H * D)), weight(f"o{i}", (C, H * D))))
            h = g.rms_norm(x, weight(f"m{i}", (C,), "f32", 1.0), eps=1e-5)
            if i % 2:
                both = g.linear(h, weight(f"gu{i}", (2 * F, C)))
                h = g.act_mul(g.slice(both, 0, F), g.slice(both, F, 2 * F))
            else:
                h = g.act_mul(g.linear(h, weight(f"g{i}", (F, C))), g.linear(h, weight(f"u{i}", (F, C))), kind="gelu_tanh")
            x = g.add(x, g.linear(h, weight(f"d{i}", (C, F))))
            x = g.mul(x, g.softmax(g.linear(x, weight(f"r{i}", (1, C), "f32"))))
    x = g.layer_norm(g.embed(g.input("sample_rows"), x), weight("last", (C,), "f32", 1.0), eps=1e-5)
    logits = g.softcap(g.linear(x, table), 20.0)
    return g.build(logits, g.sample(logits)), refs, sources


class OneByOne(CpuBackend):
    """cpu_avx without programs: the executor calls each op alone."""

    def compile(self, sub, env):
        return None


def loaded(backend, format="f32"):
    graph, refs, sources = model(format=format)
    plan = make_plan(graph, refs, sources, {"cpu": backend}, Placement.on("cpu"), LIMITS, fallback="error")
    return Executor(plan, refs, sources, {"cpu": backend})


class Sequence:
    """Tokens of one sequence and the blocks that it owns."""

    def __init__(self, length, first_block, seed):
        self.ids = np.random.default_rng(seed).integers(0, V, length).astype(np.int32)
        self.blocks = np.arange(first_block, first_block + -(-length // 64), dtype=np.int32)[::-1].copy()


def step(parts):
    """parts: (sequence, start, stop). Logits of every token are asked for."""
    ids, positions, slots, starts, contexts = [], [], [], [0], []
    table = np.zeros((len(parts), max(len(s.blocks) for s, _, _ in parts)), np.int32)
    for i, (s, a, b) in enumerate(parts):
        where = np.arange(a, b, dtype=np.int32)
        ids.append(s.ids[a:b])
        positions.append(where)
        slots.append(s.blocks[where // 64] * 64 + where % 64)
        starts.append(starts[-1] + b - a)
        contexts.append(b)
        table[i, : len(s.blocks)] = s.blocks
    join = np.concatenate
    rows = np.arange(starts[-1], dtype=np.int32)
    i32 = np.int32
    return StepBatch(
        join(ids), join(positions), join(slots).astype(i32), np.array(starts, i32), np.array(contexts, i32), table, rows
    )


def feed(executor, sequence, cuts):
    """Runs a sequence in pieces; returns the logits of all its tokens."""
    return np.concatenate([executor.run(step([(sequence, a, b)])).logits.copy() for a, b in pairwise(cuts)])


def test_fused_instructions_give_the_bits_of_the_single_ops():
    sequence = Sequence(40, 5, seed=1)
    cuts = [0, 33, 34, 35, 38, 40]
    with CpuBackend(threads=2) as cpu, OneByOne(threads=2) as single:
        for format in ("q8_0", "f32"):
            fused, alone = loaded(cpu, format), loaded(single, format)
            assert fused._programs[0] is not None
            assert alone._programs[0] is None
            np.testing.assert_array_equal(feed(fused, sequence, cuts), feed(alone, sequence, cuts))
            fused.close()
            alone.close()


def test_rows_that_were_fused_away_stay_until_their_last_reader():
    """A norm read before and after another layer of its width, and two gated branches that are both read later."""
    rng = np.random.default_rng(5)
    g, sources, refs = GraphBuilder("parallel"), {}, {}

    def weight(name, shape):
        values = (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)
        sources[name] = TensorSource(
            name,
            shape,
            "q8_0" if len(shape) == 2 else "f32",
            _kernels.encode("q8_0", values) if len(shape) == 2 else values.view(np.uint8),
        )
        refs[name] = WeightRef(name)
        return g.weight(name, shape, "any" if len(shape) == 2 else "f32")

    x = g.embed(g.input("ids"), weight("embed", (V, C)))
    h = g.rms_norm(x, weight("n", (C,)), eps=1e-5)
    y = g.linear(g.linear(h, weight("a", (C, C))), weight("b", (C, C)))
    left = g.act_mul(g.linear(h, weight("lg", (C, C))), g.linear(h, weight("lu", (C, C))))
    right = g.act_mul(g.linear(h, weight("rg", (C, C))), g.linear(h, weight("ru", (C, C))))
    y = g.add(y, g.linear(left, weight("ld", (C, C))))
    y = g.add(y, g.linear(right, weight("rd", (C, C))))
    logits = g.linear(g.embed(g.input("sample_rows"), y), weight("head", (V, C)))
    graph, results = g.build(logits, g.sample(logits)), []
    for backend in (CpuBackend(threads=2), OneByOne(threads=2)):
        with backend:
            plan = make_plan(graph, refs, sources, {"cpu": backend}, Placement.on("cpu"), LIMITS, fallback="error")
            executor = Executor(plan, refs, sources, {"cpu": backend})
            results.append(feed(executor, Sequence(9, 1, seed=2), [0, 7, 8, 9]))
            executor.close()
    np.testing.assert_array_equal(*results)


def test_a_model_agrees_with_ref_and_with_its_ops_run_one_by_one():
    sequence = Sequence(40, 5, seed=1)
    with CpuBackend(threads=2, kv_dtype="f32", act="f32") as cpu, OneByOne(threads=2, kv_dtype="f32", act="f32") as single:
        executor, plain, ref = loaded(cpu), loaded(single), loaded(RefBackend())
        found, alone, wanted = (feed(e, sequence, [0, 33, 40]) for e in (executor, plain, ref))
        assert np.abs(found - wanted).max() < 2e-4
        np.testing.assert_array_equal(found, alone)
        for e in (executor, plain, ref):
            e.close()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_chunks_batch_mates_or_threads(threads):
    long, mate, other = Sequence(700, 3, seed=1), Sequence(100, 20, seed=2), Sequence(40, 30, seed=3)
    with CpuBackend(threads=1) as one, CpuBackend(threads=threads, pin=False) as cpu:
        base, executor = loaded(one), loaded(cpu)
        cuts = [*range(0, 661, 44), 690, 700]
        wanted = feed(base, long, cuts)
        np.testing.assert_array_equal(feed(executor, long, cuts), wanted)
        np.testing.assert_array_equal(feed(executor, long, [*range(0, 600, 24), 600, *range(601, 640), 680, 700]), wanted)
        for start in range(0, 100, 20):
            executor.run(step([(mate, start, start + 20)]))
        for t in (650, 698):  # a decode among a prompt and another decode; the others' place in the batch changes
            together = executor.run(step([(mate, 99, 100), (long, t, t + 1), (other, 0, 40)])).logits
            np.testing.assert_array_equal(together[1], wanted[t])
            together = executor.run(step([(long, t, t + 2), (mate, 90, 100)])).logits
            np.testing.assert_array_equal(together[:2], wanted[t : t + 2])
        base.close()
        executor.close()


def test_a_step_with_a_bad_id_is_an_error_and_the_next_one_works():
    sequence = Sequence(10, 2, seed=5)
    with CpuBackend(threads=2) as cpu:
        executor = loaded(cpu)
        good = executor.run(step([(sequence, 0, 10)])).logits.copy()
        batch = step([(sequence, 0, 10)])
        for name, value, word in (
            ("ids", V, "embed"),
            ("ids", -1, "embed"),
            ("slots", 40 * 64, "slot"),
            ("block_table", 40, "block"),
            ("sample_rows", 10, "index"),
        ):
            bad = step([(sequence, 0, 10)])
            getattr(bad, name).reshape(-1)[0] = value
            with pytest.raises(EngineError, match=word):
                executor.run(bad)
        np.testing.assert_array_equal(executor.run(batch).logits, good)
        empty = StepBatch(
            *(np.zeros(0, np.int32) for _ in range(3)),
            np.zeros(1, np.int32),
            np.zeros(0, np.int32),
            np.zeros((0, 1), np.int32),
            np.zeros(0, np.int32),
        )
        assert executor.run(empty).logits.shape == (0, V)
        executor.close()


def test_a_decoder_layer_needs_few_barriers_and_a_closed_program_says_so():
    with CpuBackend(threads=2) as cpu:
        executor = loaded(cpu)
        program = executor._programs[0]
        assert program.barriers <= 2 * 11 + 6
        assert program.barriers_of_one_row <= 2 * 8 + 5
        executor.close()
        with pytest.raises(ValueError, match="closed"):
            program.run(StepDims(0, 0, 0))
        program.close()


def test_a_program_whose_backend_is_closed_raises():
    cpu = CpuBackend(threads=2)
    executor = loaded(cpu)
    cpu.close()
    cpu.close()
    with pytest.raises(ValueError, match="closed"):
        executor.run(step([(Sequence(3, 1, seed=1), 0, 3)]))
    with pytest.raises(ValueError, match="closed"):
        cpu.alloc(64, "scratch")
    executor.close()
