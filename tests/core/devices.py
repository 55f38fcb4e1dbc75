"""What tests of planner and executor share: devices that are made of host memory, and a tiny model with its steps.

`Accelerator` has memory that the engine cannot reach; `LateAccelerator` also does nothing before it is waited for, so that a result
that is read too early, or host memory that is written too early, changes the logits.
"""

from __future__ import annotations

import numpy as np

from fastllm.api import Buffer, No, RefBackend, Stream, Yes, check_alloc
from fastllm.core.executor import Executor
from fastllm.core.graph import GraphBuilder
from fastllm.core.planner import StepLimits, make_plan
from fastllm.core.step import StepBatch
from fastllm.core.weights import TensorSource, WeightRef

LIMITS = StepLimits(max_tokens=8, max_sequences=4, max_rows=8, context=64, block_size=16, num_blocks=8)


class Handle:
    """Memory that is not a numpy array, so that inherited ops must download and upload."""

    def __init__(self, nbytes):
        self.bytes = np.zeros(nbytes, np.uint8)


class Accelerator(RefBackend):
    """An accelerator made of host memory that the engine cannot reach, which lacks some ops."""

    name = "accelerator"

    def __init__(self, lacks=()):
        super().__init__()
        self.lacks, self.live = set(lacks), 0

    def supports(self, q):
        return No(f"no {q.op} here") if q.op in self.lacks else super().supports(q)

    def alloc(self, nbytes, kind):
        check_alloc(nbytes, kind, self.limits, None)
        self.live += 1

        def release():
            self.live -= 1

        return Buffer(nbytes, kind, Handle(nbytes), release)

    def wrap_host(self, view, readonly):
        return None

    def upload(self, dst, offset, src, stream):
        dst.handle.bytes[offset : offset + src.nbytes] = np.frombuffer(src, np.uint8)

    def download(self, dst, src, offset, stream):
        dst.cast("B")[:] = src.handle.bytes[offset : offset + dst.nbytes].data


def random_weights(g, seed, spread=0.3):
    """weight(name, shape, dtype="any") puts random f32 values into graph g; returns it with the refs and sources that it fills."""
    rng, refs, sources = np.random.default_rng(seed), {}, {}

    def weight(name, shape, dtype="any"):
        values = (rng.standard_normal(shape) * spread).astype(np.float32)
        sources[name] = TensorSource(name, shape, "f32", values.reshape(-1).view(np.uint8))
        refs[name] = WeightRef(name)
        return g.weight(name, shape, dtype)

    return weight, refs, sources


def tiny(softcap=True):
    """One layer with attention; returns graph, weight refs and sources."""
    g = GraphBuilder("tiny")
    weight, refs, sources = random_weights(g, 7)

    x = g.embed(g.input("ids"), weight("embed", (32, 16)))
    with g.tag(layer=0, role="attn"):
        h = g.rms_norm(x, weight("norm", (16,), "f32"), eps=1e-5)
        q = g.view(g.linear(h, weight("q", (16, 16))), ("T", 4, 4))
        k = g.view(g.linear(h, weight("k", (8, 16))), ("T", 2, 4))
        v = g.view(g.linear(h, weight("v", (8, 16))), ("T", 2, 4))
        freq = g.const("freq", np.array([1.0, 0.1], np.float32))
        q, k = g.rope(q, freq), g.rope(k, freq)
        cache = g.kv_cache("kv.0", 2, 4, 4)
        g.kv_write(cache, k, v)
        x = g.add(x, g.view(g.attention(q, cache, scale=0.5), ("T", 16)))
    rows = g.embed(g.input("sample_rows"), x)
    logits = g.linear(rows, weight("embed", (32, 16)))
    if softcap:
        logits = g.softcap(logits, 2.0)
    return g.build(logits, g.sample(logits)), refs, sources


def batch(ids, start=0, rows=None, table=(3, 5, 1, 0)):
    n = len(ids)
    positions = np.arange(start, start + n, dtype=np.int32)
    slots = np.array([table[p // 16] * 16 + p % 16 for p in positions], np.int32)
    rows = np.arange(n, dtype=np.int32) if rows is None else np.asarray(rows, np.int32)
    one = np.array([[*table]], np.int32)
    start_len = np.array([0, n], np.int32), np.array([start + n], np.int32)
    return StepBatch(np.asarray(ids, np.int32), positions, slots, *start_len, one, rows)


class LateStream(Stream):
    """Work that waits for `synchronize`."""

    def __init__(self):
        self.work = []

    def synchronize(self):
        while self.work:
            self.work.pop(0)()


class LateAccelerator(Accelerator):
    """Its own `add` and `linear` and every transfer happen when the stream is synchronised; the other ops are inherited."""

    name = "late"
    late_ops = ("add", "linear")

    def new_stream(self):
        return LateStream()

    def upload(self, dst, offset, src, stream):
        stream.work.append(lambda: super(LateAccelerator, self).upload(dst, offset, src, stream))

    def download(self, dst, src, offset, stream):
        stream.work.append(lambda: super(LateAccelerator, self).download(dst, src, offset, stream))

    def supports(self, q):
        answer = super().supports(q)
        return Yes(f"late.{q.op}") if isinstance(answer, Yes) and q.op in self.late_ops else answer

    def ops(self):
        def late(name):
            inner = getattr(RefBackend, f"_op_{name}")

            def run(*operands, out, stream, ws):
                stream.work.append(lambda: inner(Now(), *operands, out=out, stream=Stream(), ws=ws))

            return run

        return {**super().ops(), **{f"late.{name}": late(name) for name in self.late_ops}}


class Now(Accelerator):
    """The same memory without delay: what the late device computes with."""

    def new_stream(self):
        return Stream()


def logits_of(backends, placement, ids=(3, 1, 4), **kwargs):
    graph, refs, sources = tiny()
    plan = make_plan(graph, refs, sources, backends, placement, LIMITS, **kwargs)
    executor = Executor(plan, refs, sources, backends)
    result = executor.run(batch(ids)).logits.copy()
    executor.close()
    return result, plan
