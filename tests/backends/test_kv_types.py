"""Types of the key/value cache: `ref` defines what each gives back, cpu_avx gives the same, and only what is seen is read."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from fastllm.api import KV_DTYPES, Backend, Buffer, EngineError, KVSpec, No, OpQuery, RefBackend, Stream, Tensor, UsageError
from fastllm.backends.cpu_avx import _native, isa
from fastllm.backends.cpu_avx.backend import CpuBackend
from fastllm.backends.ref import kv
from fastllm.core.graph import GraphBuilder, with_kv_dtype
from fastllm.core.placement import Placement
from fastllm.core.planner import StepLimits, make_plan

USABLE = [name for name, why in isa.variants().items() if not why]
BLOCK, HEADS = 16, 2


def as_codes(x):
    """A group of channels as int8, read back."""
    if not all(math.isfinite(v) for v in x):
        return [math.nan] * len(x)
    scale = float(np.float32(max(map(abs, x))) / np.float32(127))
    codes = [0 if scale == 0 else max(-127, min(127, round(float(np.float32(v) / np.float32(scale))))) for v in x]
    return [float(np.float32(code) * np.float32(scale)) for code in codes]


def exact(x, dtype):
    """x [D] in f64, rounded as the type says, element by element."""
    x = [float(v) for v in x]
    if dtype == "f32":
        return x
    if dtype == "int8":
        return [v for at in range(0, len(x), 32) for v in as_codes(x[at : at + 32])]
    bits = 11 if dtype == "f16" else 8
    rounded = []
    for v in x:
        if v == 0 or not math.isfinite(v):
            rounded.append(v)
            continue
        step = 2.0 ** (max(math.frexp(v)[1], -13 if dtype == "f16" else -125) - bits)
        r = round(v / step) * step
        rounded.append(math.copysign(math.inf, v) if abs(r) > (65504 if dtype == "f16" else 3.4e38) else r)
    return rounded


def vectors(dim):
    """Keys or values [n, HEADS, dim] of many sizes: plain, tiny, large, zero, halves of a step, infinity, NaN."""
    rng = np.random.default_rng(dim)
    x = rng.standard_normal((20, HEADS, dim)).astype(np.float32)
    x[1] *= 1e-7
    x[2] *= 1e4
    x[3] = 0
    x[4] = np.float32(1e-44) * rng.integers(0, 99, (HEADS, dim)).astype(np.float32)
    x[5, 0, 0] = np.inf
    x[6, 1, 1] = np.nan
    x[7] = np.arange(dim, dtype=np.float32) / 2 - 2
    x[8] = 1 + np.arange(dim, dtype=np.float32) * np.float32(2.0**-9)
    x[9, :, 0] = -127
    return x


class Cache:
    """A cache of one backend on host memory, filled with `keys` and `values`."""

    def __init__(self, backend: Backend, dtype, keys, values, fill=0xFF):
        self.backend, self.ops = backend, backend.ops()
        self.prefix = "ref." if "ref.attention" in self.ops else ""
        spec = KVSpec(HEADS, keys.shape[2], values.shape[2], dtype)
        block_bytes, blocks = backend.kv_block_bytes(spec, BLOCK), -(-len(keys) // BLOCK)
        self.memory = np.full(block_bytes * blocks, fill, np.uint8)
        buffer = backend.wrap_host(self.memory, readonly=False)
        assert isinstance(buffer, Buffer)
        self.cache = Tensor(buffer, 0, (), "kv", spec=spec, block_size=BLOCK, num_blocks=blocks, block_bytes=block_bytes)
        slots = np.arange(len(keys), dtype=np.int32)
        self.ops[self.prefix + "kv_write"](self.cache, *map(self.tensor, (keys, values, slots)), out=(), stream=Stream(), ws=None)

    def tensor(self, array):
        array = np.ascontiguousarray(array)
        kind = "i32" if array.dtype == np.int32 else "f32"
        return Tensor(self.backend.wrap_host(array.reshape(-1).view(np.uint8), readonly=False), 0, array.shape, kind)

    def attend(self, queries, positions, starts=None, length=None, out=None, **attrs):
        """queries [n, H, Dk] of one sequence at `positions` -> [n, H, Dv]. starts, length: query_start and context_len, if other than true."""
        out = np.full((*queries.shape[:2], self.cache.spec.value_dim), np.nan, np.float32) if out is None else out
        starts, length = starts or [0, len(queries)], max(positions) + 1 if length is None else length
        ints = [np.array(a, np.int32) for a in (positions, starts, [length], [range(self.cache.num_blocks)])]
        full = {"scale": 0.25, "mask": "causal", "chunk": 0, "window": 0, "softcap": 0.0, "value_dim": 0, **attrs}
        operands = [self.tensor(queries), self.cache, *map(self.tensor, ints), None, None, None]
        self.ops[self.prefix + "attention"](*operands, out=self.tensor(out), stream=Stream(), ws=None, **full)
        return out


@pytest.mark.parametrize("variant", ["ref", *USABLE])
@pytest.mark.parametrize("dim", [24, 160])
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_row_that_sees_one_token_gives_back_its_value_as_the_type_rounds_it(dtype, dim, variant):
    values = vectors(dim)
    keys = np.ones_like(values[..., :16])
    with RefBackend() if variant == "ref" else CpuBackend(threads=1, isa=variant, act="f32") as backend:
        found = Cache(backend, dtype, keys, values).attend(np.ones((20, HEADS, 16), np.float32), list(range(20)), window=1)
    wanted = np.array([[exact(head, dtype) for head in token] for token in values])
    np.testing.assert_array_equal(found, wanted.astype(np.float32))


@pytest.mark.parametrize("variant", ["ref", *USABLE])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"starts": [0, 2]}, r"query_start\[1\] = 2 does not divide the 3 tokens of the step in ascending order"),
        ({"starts": [0, 4]}, r"query_start\[1\] = 4 does not divide the 3 tokens"),
        ({"starts": [1, 3]}, r"query_start\[0\] = 1 does not divide"),
        ({"starts": [-3, 3]}, r"query_start\[0\] = -3 does not divide"),
        ({"length": 33}, r"context_len\[0\] = 33, but a row of the block table holds 32 tokens at most"),
        ({"length": -1}, r"context_len\[0\] = -1, but"),
    ],
)
def test_a_step_that_contradicts_itself_is_an_error_and_writes_nothing(variant, wrong, message):
    values, out = vectors(24), np.full((3, HEADS, 24), np.nan, np.float32)
    with RefBackend() if variant == "ref" else CpuBackend(threads=1, isa=variant) as backend, pytest.raises(EngineError, match=message):
        Cache(backend, "f32", values, values).attend(np.ones((3, HEADS, 24), np.float32), [0, 1, 2], out=out, **wrong)
    assert np.isnan(out).all()


@pytest.mark.parametrize("variant", USABLE)
@pytest.mark.parametrize("scale", [0.25, 0.0, 1e-45, -0.5])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "int8"])
def test_a_row_whose_steps_are_whole_alone_has_the_same_bits_beside_one_that_sees_less(variant, dtype, scale):
    """The kernel takes a shorter way through steps that all of its rows see: also where every score is −inf, or becomes NaN when scaled."""
    rng = np.random.default_rng(3)
    keys, values = (rng.standard_normal((300, HEADS, 32)).astype(np.float32) for _ in range(2))
    keys[:64, 0, 0], keys[64:, 0, 0] = 60000, 0  # with −3e38 below: 64 scores of −inf; times a scale of 0, NaN
    queries = rng.standard_normal((40, 2 * HEADS, 32)).astype(np.float32)
    queries[::3, 0, 0] = -3e38
    positions = [*range(20), *range(120, 130), *range(290, 300)]
    with CpuBackend(threads=1, isa=variant) as backend:
        cache = Cache(backend, dtype, keys, values)
        together = cache.attend(queries, positions, scale=scale)
        alone = np.concatenate([cache.attend(queries[i : i + 1], [p], scale=scale) for i, p in enumerate(positions)])
    assert np.isfinite(together).any()
    np.testing.assert_array_equal(together.view(np.uint32), alone.view(np.uint32))


@pytest.mark.parametrize("variant", USABLE)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(40, 24), (136, 200)])
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_cpu_avx_agrees_with_ref_over_what_it_stores(dtype, key_dim, value_dim, variant):
    rng = np.random.default_rng(5)
    shapes = ((HEADS, key_dim), (HEADS, value_dim), (6, key_dim))
    keys, values, queries = (rng.standard_normal((70, *shape)).astype(np.float32) for shape in shapes)
    keys[..., :32] *= 30  # groups of different size
    queries /= 30
    positions = list(range(70))
    with RefBackend() as ref, CpuBackend(threads=2, isa=variant, act="f32") as cpu:
        wanted = Cache(ref, dtype, keys, values).attend(queries, positions)
        found = Cache(cpu, dtype, keys, values).attend(queries, positions)
    assert np.abs(found - wanted).max() < 5e-6


PAIRED = [name for name in USABLE if _native.attends_in_pairs(name)]


@pytest.mark.parametrize("variant", PAIRED)
@pytest.mark.parametrize("dim", [24, 161])
def test_products_of_bf16_give_back_a_bf16_value_and_take_denormals_for_zeros(dim, variant):
    values = vectors(dim)
    keys = np.ones_like(values[..., :15])
    with CpuBackend(threads=1, isa=variant) as backend:
        found = Cache(backend, "bf16", keys, values).attend(np.ones((20, HEADS, 15), np.float32), list(range(20)), window=1)
    wanted = np.array([[exact(head, "bf16") for head in token] for token in values])
    wanted[np.abs(wanted) < 2.0**-126] = 0
    np.testing.assert_array_equal(found, wanted.astype(np.float32))


@pytest.mark.parametrize("variant", PAIRED)
def test_a_cache_is_of_bf16_where_attention_multiplies_that_and_of_f16_elsewhere(variant):
    spec, latent = KVSpec(2, 64, 64), KVSpec(1, 80, 0)
    query = [OpQuery("attention", ("f32", "kv"), (("T", 4, s.key_dim), ()), attrs={"scale": 1.0}, specs=(None, s)) for s in (spec, latent)]
    with CpuBackend(threads=1, isa=variant) as rounded, CpuBackend(threads=1, isa=variant, act="f32") as exact_products:
        yes = rounded.supports(query[0])
        assert (yes.act, yes.weight, yes.prob) == ("bf16", "bf16", "bf16")
        for yes in (rounded.supports(query[1]), exact_products.supports(query[0])):
            assert (yes.act, yes.weight, yes.prob) == (None, "f16", None)


def test_int8_takes_half_the_bytes_and_all_backends_know_every_type():
    spec = {d: KVSpec(8, 64, 64, d) for d in KV_DTYPES}
    with RefBackend() as ref, CpuBackend(threads=1) as cpu:
        assert tuple(ref.kv_dtypes) == tuple(KV_DTYPES)
        assert set(cpu.kv_dtypes) == set(KV_DTYPES)
        for backend in (ref, cpu):
            size = {d: backend.kv_block_bytes(s, 64) for d, s in spec.items()}
            assert size["int8"] < 0.57 * size["f16"]
            assert size["f16"] == size["bf16"] < 0.51 * size["f32"]
        assert cpu.kv_block_bytes(KVSpec(8, 64, 64), 64) == cpu.kv_block_bytes(spec["f16"], 64)
        assert ref.kv_block_bytes(KVSpec(8, 64, 64), 64) == ref.kv_block_bytes(spec["f32"], 64)


def test_codes_of_int8_are_within_half_a_step():
    x = np.random.default_rng(1).standard_normal((50, 64)).astype(np.float32)
    codes, scales = kv.quantise(x)
    assert scales.shape == (50, 2)
    for at in (0, 32):
        group, scale = codes[:, at : at + 32], scales[:, at // 32, None]
        assert np.abs(group).max(axis=1).tolist() == [127] * 50
        assert np.all(np.abs(group * scale - x[:, at : at + 32]) <= scale * 0.5001)


def test_channels_of_another_group_do_not_coarsen_int8():
    x = np.random.default_rng(2).standard_normal((5, 150)).astype(np.float32)
    x[:, 32:64] *= 1e4
    codes, scales = kv.quantise(x)
    assert scales.shape == (5, 5)
    for at in (0, 32, 64, 96, 128):
        alone, scale = kv.quantise(x[:, at : at + 32])
        np.testing.assert_array_equal(codes[:, at : at + 32], alone)
        np.testing.assert_array_equal(scales[:, at // 32], scale[:, 0])


class Old(RefBackend):
    """A backend with a cache of its own, from before caches had types."""

    name = "old"
    kv_dtypes = ()

    def supports(self, q: OpQuery):
        return super().supports(q)


def test_a_backend_that_does_not_know_the_type_does_not_get_the_cache():
    g = GraphBuilder("attention")
    cache = g.kv_cache("cache", 1, 8, 8)
    x = g.view(g.linear(g.embed(g.input("ids"), g.weight("table", (4, 8), "f32")), g.weight("w", (8, 8), "f32")), ("T", 1, 8))
    g.kv_write(cache, x, x)
    graph = g.build(g.attention(x, cache, scale=1.0))
    limits = StepLimits(4, 1, 4, 16, 16, 1)
    with Old() as old, RefBackend() as ref:
        backends = {"old": old, "ref": ref}
        assert not make_plan(graph, {}, {}, backends, Placement.on("old"), limits).fallbacks
        left = make_plan(with_kv_dtype(graph, "int8"), {}, {}, backends, Placement.on("old"), limits).fallbacks
    assert [d.device for d in left] == ["ref", "ref"]
    assert "keys and values as int8" in left[0].reason
    with pytest.raises(UsageError, match="int7"):
        with_kv_dtype(graph, "int7")
    assert isinstance(No("x"), No)


UNREADABLE = """
import ctypes, mmap, sys
import numpy as np
from fastllm.api import KVSpec, Stream, Tensor
from fastllm.backends.cpu_avx.backend import CpuBackend

dtype, first = sys.argv[1], int(sys.argv[2])
cpu = CpuBackend(threads=2)
ops, spec, size, blocks = cpu.ops(), KVSpec(1, 64, 64, dtype), 64, 20
need = cpu.kv_block_bytes(spec, size)
block_bytes = -(-need // mmap.PAGESIZE) * mmap.PAGESIZE
room = mmap.mmap(-1, blocks * block_bytes)
memory = np.frombuffer(room, np.uint8)
tensor = lambda a: Tensor(cpu.wrap_host(a.reshape(-1).view(np.uint8), readonly=False), 0, a.shape, "i32" if a.dtype == np.int32 else "f32")
cache = Tensor(cpu.wrap_host(memory, readonly=False), 0, (), "kv", spec=spec, block_size=size, num_blocks=blocks, block_bytes=block_bytes)
n = size * blocks
x = np.random.default_rng(0).standard_normal((n, 1, 64)).astype(np.float32)
ops["kv_write"](cache, tensor(x), tensor(x), tensor(np.arange(n, dtype=np.int32)), out=(), stream=Stream(), ws=None)
if first:
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(first * block_bytes), 0) == 0
for rows in (1, 40):
    q, out = x[n - rows :].copy(), np.zeros((rows, 1, 64), np.float32)
    ints = [np.array(a, np.int32) for a in (range(n - rows, n), [0, rows], [n], [range(blocks)])]
    ops["attention"](tensor(q), cache, *map(tensor, ints), None, None, None, out=tensor(out), stream=Stream(), ws=None,
                     scale=0.125, mask="causal", chunk=0, window=128, softcap=0.0, value_dim=0)
    assert out.any()
"""


@pytest.mark.parametrize("dtype", ["f16", "int8"])
def test_blocks_outside_of_a_sliding_window_are_not_read(dtype):
    """They cannot be: whoever reads them gets a SIGSEGV. A window of 128 ends in block 17 for the last 40 rows."""
    done = subprocess.run([sys.executable, "-c", UNREADABLE, dtype, "17"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seen = subprocess.run([sys.executable, "-c", UNREADABLE, dtype, "19"], capture_output=True, text=True, timeout=120)
    assert seen.returncode < 0
