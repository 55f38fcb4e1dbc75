"""Every native op of cpu_avx, run alone, against f64 numpy; and the rule that a row's bits depend on that row only."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from fastllm.api import EngineError, HostTensor, KVSpec, OpQuery, ShapeError, Stream, Tensor
from fastllm.backends.cpu_avx import _native, isa
from fastllm.backends.cpu_avx.backend import CpuBackend

USABLE = [name for name, why in isa.variants().items() if not why]
DTYPES = {np.dtype("f4"): "f32", np.dtype("i4"): "i32", np.dtype("i1"): "i8", np.dtype("f2"): "f16"}
NAN = float("nan")


class Bench:
    """A backend and short calls: numpy arrays in, numpy arrays out."""

    def __init__(self, **options):
        self.cpu = CpuBackend(**options)
        self.ops = self.cpu.ops()

    def tensor(self, array, **fields):
        """A Tensor on an array's own memory, strides included."""
        if isinstance(array, Tensor) or array is None:
            return array
        base = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        buffer = self.cpu.wrap_host(base.reshape(-1).view(np.uint8), readonly=False)
        offset = array.ctypes.data - base.ctypes.data
        strides = tuple(s // array.itemsize for s in array.strides)
        return Tensor(buffer, offset, array.shape, DTYPES[array.dtype], strides, **fields)

    def run(self, op, *inputs, out=None, shape=None, **attrs):
        """Runs an op into `out`, or into a new array of `shape` (default: the first input's) filled with NaN."""
        if out is None:
            out = np.full(inputs[0].shape if shape is None else shape, NAN, np.float32)
        outs = out if isinstance(out, tuple) else (out,)
        operands = [self.tensor(i) for i in inputs]
        results = tuple(self.tensor(o) for o in outs)
        self.ops[op](*operands, out=results[0] if len(results) == 1 else results, stream=Stream(), ws=None, **attrs)
        return out

    def packed(self, format, data, shape):
        """A weight in this backend's layout."""
        layout = self.cpu.pack_layout(shape, format, frozenset({"linear"}))
        buffer = self.cpu.alloc(layout.nbytes, "weights")
        self.cpu.pack_weight(HostTensor("w", shape, format, data.reshape(-1).view(np.uint8)), layout, buffer, 0)
        return Tensor(buffer, 0, shape, format, packed=layout)


@pytest.fixture(scope="module", params=USABLE)
def bench(request):
    """Two threads, each variant that runs here."""
    kit = Bench(threads=2, isa=request.param)
    yield kit
    kit.cpu.close()


@pytest.fixture(scope="module")
def lone():
    """One thread, best variant."""
    kit = Bench(threads=1)
    yield kit
    kit.cpu.close()


def near(found, wanted, ulps=8.0, floor=1e-37):
    """Elementwise: within `ulps` units of 2⁻²⁴ of the f64 value."""
    wanted = np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(found[~finite], wanted[~finite].astype(np.float32))
    error = np.abs(found[finite].astype(np.float64) - wanted[finite])
    limit = ulps * 2.0**-24 * np.abs(wanted[finite]) + floor
    assert np.all(error <= limit), f"worst: {np.max(error / limit)} of the bound"


def rng(seed=0):
    return np.random.default_rng(seed)


def normal(*shape, seed=0):
    return rng(seed).standard_normal(shape).astype(np.float32)


WIDTHS = [1, 3, 7, 8, 15, 16, 17, 33, 64, 576, 1000]


@pytest.mark.parametrize("width", WIDTHS)
def test_norms_and_softmax_agree_with_f64(bench, width):
    x = normal(5, width, seed=width) * 3
    w, b = normal(width, seed=1), normal(width, seed=2)
    d = x.astype(np.float64)
    rms = d / np.sqrt((d * d).mean(-1, keepdims=True) + 1e-5)
    near(bench.run("rms_norm", x, w, eps=1e-5), rms * w, ulps=16)
    near(bench.run("rms_norm", x, None, eps=1e-5), rms, ulps=16)
    c = d - d.mean(-1, keepdims=True)
    layer = c / np.sqrt((c * c).mean(-1, keepdims=True) + 1e-5)
    near(bench.run("layer_norm", x, w, b, eps=1e-5), layer * w + b, ulps=32, floor=2e-5)
    near(bench.run("layer_norm", x, None, None, eps=1e-5), layer, ulps=32, floor=2e-5)
    e = np.exp(d - d.max(-1, keepdims=True))
    near(bench.run("softmax", x), e / e.sum(-1, keepdims=True), ulps=24)


def _activations(z):
    sigma = np.where(z >= 0, 1 / (1 + np.exp(-np.abs(z))), np.exp(-np.abs(z)) / (1 + np.exp(-np.abs(z))))
    erfc = np.vectorize(math.erfc)
    return {
        "silu": z * sigma,
        "gelu": z * 0.5 * erfc(-z / math.sqrt(2)),
        "gelu_tanh": z / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
        "sigmoid": sigma,
        "tanh": np.tanh(z),
        "relu": np.maximum(z, 0),
    }


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "sigmoid", "tanh", "relu"])
def test_activations_agree_with_f64(bench, kind):
    z = np.concatenate([np.linspace(-100, 100, 4001), np.geomspace(1e-30, 1, 300), -np.geomspace(1e-30, 1, 300)]).astype(
        np.float32
    )
    z = z.reshape(1, -1)
    d = z.astype(np.float64)
    with np.errstate(over="ignore"):
        wanted = _activations(d)[kind]
    # the exponent's own rounding: e^t has the relative error of t's absolute one
    arg = {"gelu_tanh": 2 * 0.7979 * np.abs(d + 0.044715 * d**3), "silu": np.abs(d)}.get(kind, np.zeros_like(d))
    error = np.abs(bench.run("act_mul", z, None, kind=kind).astype(np.float64) - wanted)
    assert np.all(error <= np.abs(wanted) * 2.0**-24 * (10 + 6 * arg * (d < 0)) + 1.2e-38)
    up = normal(1, z.shape[1])
    gated = bench.run("act_mul", z, up, kind=kind)
    np.testing.assert_array_equal(gated, bench.run("act_mul", z, None, kind=kind) * up)


def test_swiglu_oai_clips_gate_and_up(bench):
    g, u = normal(3, 37, seed=1) * 6, normal(3, 37, seed=2) * 6
    a, b = np.minimum(g.astype(np.float64), 7), np.clip(u.astype(np.float64), -7, 7)
    sigma = 1 / (1 + np.exp(-1.702 * a))
    near(bench.run("act_mul", g, u, kind="swiglu_oai"), a * sigma * (b + 1), ulps=60, floor=1e-7)


def test_special_values_pass_through_activations(bench):
    z = np.array([[NAN, math.inf, -math.inf, -0.0, 1e-42, 3e38, -3e38, 88.8, -88.8]], np.float32)
    for kind in ("silu", "gelu_tanh", "sigmoid", "tanh", "relu", "gelu"):
        y = bench.run("act_mul", z, None, kind=kind)[0]
        assert np.isnan(y[0]), kind
        assert not np.isnan(y[3:]).any(), kind
    assert bench.run("act_mul", z, None, kind="tanh")[0].tolist()[1:3] == [1.0, -1.0]
    assert bench.run("act_mul", z, None, kind="sigmoid")[0].tolist()[1:3] == [1.0, 0.0]
    assert math.isnan(bench.run("softcap", z, cap=30.0)[0, 0])


def test_softcap(bench):
    x = normal(3, 100) * 60
    near(bench.run("softcap", x, cap=30.0), 30 * np.tanh(x.astype(np.float64) / 30), ulps=8)


def test_add_and_mul_take_every_shape_of_y(bench):
    x = normal(4, 3, 17)
    for op, f in (("add", np.add), ("mul", np.multiply)):
        for y in (normal(4, 3, 17, seed=1), normal(17, seed=2), normal(1, seed=3)):
            np.testing.assert_array_equal(bench.run(op, x, y), f(x, y))
    rows = normal(4, 1, seed=4)
    np.testing.assert_array_equal(bench.run("mul", x[:, 0], rows, shape=(4, 17)), x[:, 0] * rows)


def test_strided_windows_are_read_and_written_in_place(bench):
    base, target = normal(6, 40), np.full((6, 50), NAN, np.float32)
    x, out = base[:, 8:24], target[:, 20:36]
    bench.run("add", x, x, out=out)
    np.testing.assert_array_equal(out, x + x)
    assert np.isnan(target[:, :20]).all()
    assert np.isnan(target[:, 36:]).all()
    heads = base.reshape(6, 4, 10)[:, :, 2:9]
    near(
        bench.run("rms_norm", heads, None, eps=1e-6),
        heads / np.sqrt((heads.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6),
        ulps=16,
    )


def test_transposed_and_negative_strides_are_refused_and_the_backend_stays_usable(bench):
    x = normal(6, 6)
    for bad in (x.T, x[::-1], x[:, ::-1]):
        with pytest.raises(ShapeError):
            bench.run("add", bad, bad, shape=(6, 6))
    np.testing.assert_array_equal(bench.run("add", x, x), x + x)


def test_a_window_that_leaves_its_buffer_is_refused(bench):
    x = normal(4, 8)
    t = bench.tensor(x)
    with pytest.raises(ShapeError, match="leaves its buffer"):
        bench.run("softmax", Tensor(t.buffer, 0, (5, 8), "f32"), shape=(5, 8))


@pytest.mark.parametrize("style", ["half", "pairs"])
@pytest.mark.parametrize(("dim", "r"), [(64, 32), (64, 16), (80, 40), (10, 3), (128, 64)])
def test_rope_turns_pairs_by_angles_in_f64(bench, style, dim, r):
    x = normal(5, 3, dim)
    positions = np.array([0, 1, 4095, 65536, 131072], np.int32)
    inv = (10000.0 ** (-np.arange(r) / r)).astype(np.float32)
    angle = positions[:, None].astype(np.float64) * inv
    cos, sin = (np.cos(angle) * 1.25)[:, None], (np.sin(angle) * 1.25)[:, None]
    first, second = (slice(0, r), slice(r, 2 * r)) if style == "half" else (slice(0, 2 * r, 2), slice(1, 2 * r, 2))
    wanted = x.astype(np.float64)
    a, b = wanted[..., first].copy(), wanted[..., second].copy()
    wanted[..., first], wanted[..., second] = a * cos - b * sin, a * sin + b * cos
    found = bench.run("rope", x, positions, inv, style=style, factor=1.25)
    assert np.all(np.abs(found - wanted) <= 4 * 2.0**-24 * 1.25 * 2 * np.abs(x).max())
    np.testing.assert_array_equal(found[..., 2 * r :], x[..., 2 * r :])
    in_place = x.copy()
    bench.run("rope", in_place, positions, inv, out=in_place, style=style, factor=1.25)
    np.testing.assert_array_equal(in_place, found)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_embed_and_its_limits(bench, dtype):
    table = normal(9, 21).astype(dtype)
    ids = np.array([0, 8, 3, 3], np.int32)
    np.testing.assert_array_equal(bench.run("embed", ids, table, shape=(4, 21)), table[ids].astype(np.float32))
    for bad in (9, -1, 2**31 - 1):
        out = np.full((4, 21), NAN, np.float32)
        with pytest.raises(EngineError, match=f"{bad}.*9 rows"):
            bench.run("embed", np.array([0, bad, 1, 2], np.int32), table, out=out)
        assert np.isnan(out).all()


def test_half_conversion_is_exact_for_every_number(bench):
    table = np.arange(65536, dtype=np.uint16).view(np.float16).reshape(256, 256)
    found = bench.run("embed", np.arange(256, dtype=np.int32), table, shape=(256, 256))
    with np.errstate(invalid="ignore"):
        wanted = table.astype(np.float32)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    np.testing.assert_array_equal(found[~np.isnan(wanted)], wanted[~np.isnan(wanted)])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("k", [1, 16, 31, 128, 257])
def test_matmul_and_plain_linear(bench, dtype, k):
    a, b = normal(5, 3, k, seed=1), normal(3, 7, k, seed=2).astype(dtype)
    wanted = np.einsum("thk,hnk->thn", a.astype(np.float64), b.astype(np.float64))
    scale = np.einsum("thk,hnk->thn", np.abs(a), np.abs(b.astype(np.float32)))
    found = bench.run("matmul", a, b, shape=(5, 3, 7))
    assert np.all(np.abs(found - wanted) <= 4 * math.sqrt(k) * 2.0**-24 * scale)
    x, w, bias = a[:, 0].copy(), b[0], normal(7, seed=3)
    found = bench.run("linear", x, w, bias, shape=(5, 7))
    limit = 4 * math.sqrt(k) * 2.0**-24 * (scale[:, 0] + np.abs(bias))
    assert np.all(np.abs(found - (wanted[:, 0] + bias)) <= limit)


def test_packed_linear_and_embedding_of_a_tied_table(bench):
    table, x = normal(70, 64, seed=1), normal(5, 64, seed=2)
    w = bench.packed("f32", table, (70, 64))
    found = bench.run("linear", x, w, None, shape=(5, 70))
    wanted = x.astype(np.float64) @ table.T.astype(np.float64)
    assert np.all(np.abs(found - wanted) <= 4 * 8 * 2.0**-24 * (np.abs(x) @ np.abs(table.T)))
    ids = np.array([69, 0, 33], np.int32)
    np.testing.assert_array_equal(bench.run("embed", ids, w, shape=(3, 64)), table[ids])
    with pytest.raises(EngineError, match="70 rows"):
        bench.run("embed", np.array([70], np.int32), w, shape=(1, 64))


@pytest.mark.parametrize("group", [16, 32, 64])
def test_quantize_and_back(bench, group):
    x = normal(4, 128) * 10
    x[1, :group] = 0
    codes, scales = np.full((4, 128), 99, np.int8), np.full((4, 128 // group), NAN, np.float32)
    bench.run("quantize", x, out=(codes, scales), group=group)
    parts = x.reshape(4, -1, group)
    wanted = np.abs(parts).max(-1) / np.float32(127)
    np.testing.assert_array_equal(scales, wanted)
    exact = parts.astype(np.float64) / np.where(wanted > 0, wanted, 1)[..., None]
    assert np.all(np.abs(codes.reshape(parts.shape) - exact) <= 0.5 + 1e-4)
    back = bench.run("dequantize", codes, scales, shape=(4, 128), group=group)
    np.testing.assert_array_equal(back, codes.astype(np.float32) * np.repeat(scales, group, axis=1))


# attention --------------------------------------------------------------------------------------------------------------


class Sequences:
    """Sequences in a paged cache whose other slots, and whose blocks' padding, are NaN."""

    def __init__(self, kit, lengths, heads, key_dim, value_dim, block_size, seed=0, kv="f16"):
        self.kit, self.block_size, self.kv = kit, block_size, kv
        self.spec = KVSpec(heads, key_dim, value_dim)
        self.lengths = lengths
        self.width = max(-(-max(lengths) // block_size), 1) + 1
        used = sum(-(-n // block_size) for n in lengths)
        self.num_blocks = used + 3
        order = rng(seed + 1).permutation(self.num_blocks)
        self.table = np.full((len(lengths), self.width), 2**30, np.int32)  # unused entries are never looked at
        at = 0
        for s, n in enumerate(lengths):
            count = -(-n // block_size)
            self.table[s, :count] = order[at : at + count]
            at += count
        self.block_bytes = kit.cpu.kv_block_bytes(self.spec, block_size)
        self.memory = np.full(self.num_blocks * self.block_bytes, 0xFF, np.uint8)  # NaN in f16 and f32
        buffer = kit.cpu.wrap_host(self.memory, readonly=False)
        self.cache = Tensor(
            buffer, 0, (), "kv", spec=self.spec, block_size=block_size, num_blocks=self.num_blocks, block_bytes=self.block_bytes
        )
        self.keys = [normal(n, heads, key_dim, seed=seed + 10 * s + 2) for s, n in enumerate(lengths)]
        self.values = [normal(n, heads, value_dim, seed=seed + 10 * s + 3) for s, n in enumerate(lengths)]
        for s, n in enumerate(lengths):
            self.write(s, np.arange(n))

    def write(self, s, tokens):
        slots = (self.table[s, tokens // self.block_size] * self.block_size + tokens % self.block_size).astype(np.int32)
        v = np.ascontiguousarray(self.values[s][tokens]) if self.spec.value_dim else None
        self.kit.ops["kv_write"](
            *(self.kit.tensor(t) for t in (self.cache, np.ascontiguousarray(self.keys[s][tokens]), v, slots)),
            out=(),
            stream=Stream(),
            ws=None,
        )

    def attend(self, queries, positions, lengths=None, sinks=None, slopes=None, prefix=None, kit=None, **attrs):
        """queries: per sequence [n, H, Dk]; positions: per sequence [n]. Returns per sequence [n, H, Dv]."""
        kit = kit or self.kit
        starts = np.cumsum([0, *(len(q) for q in queries)]).astype(np.int32)
        q = np.concatenate(queries)
        p = np.concatenate(positions).astype(np.int32)
        ctx = np.array(self.lengths if lengths is None else lengths, np.int32)
        value_dim = self.spec.value_dim or attrs["value_dim"]
        attrs = {"scale": 0.125, **attrs}
        out = kit.run(
            "attention",
            q,
            self.cache,
            p,
            starts,
            ctx,
            self.table,
            sinks,
            slopes,
            prefix,
            shape=(*q.shape[:2], value_dim),
            **attrs,
        )
        return [out[a:b] for a, b in pairwise(starts)]


def reference(q, position, keys, values, see, *, scale=0.125, softcap=0.0, sinks=None, slopes=None):
    """One row in f64: (result, √Σ p² v²), [H, Dv] each; the second is how far the result moves if every weight p is off by a random
    share of 1. see: indices of visible keys."""
    heads, kv = q.shape[0], keys.shape[1]
    out, spread = np.zeros((2, heads, values.shape[2]))
    for h in range(heads):
        if not len(see):
            continue
        score = keys[see, h * kv // heads].astype(np.float64) @ q[h].astype(np.float64) * scale
        if softcap:
            score = softcap * np.tanh(score / softcap)
        if slopes is not None:
            score = score + slopes[h] * (np.asarray(see) - position)
        top = max(score.max(), -math.inf if sinks is None else sinks[h])
        weight = np.exp(score - top)
        total = weight.sum() + (0 if sinks is None else math.exp(sinks[h] - top))
        weight /= total
        seen = values[see, h * kv // heads].astype(np.float64)
        out[h], spread[h] = weight @ seen, np.sqrt(weight**2 @ seen**2)
    return out, spread


def near_of_pairs(spread):
    """How far products of bf16 may be from f64: they round each weight by up to 2⁻⁸ of it, which adds up as chance has it."""
    return 5e-6 + 4 * 2.0**-8 * spread


def stored(x, kv):
    """What a cache of this type gives back for x [..., D]."""
    if kv == "f16":
        return x.astype(np.float16).astype(np.float32)
    if kv == "bf16":
        bits = x.view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    if kv == "int8":
        groups = [x[..., at : at + 32] for at in range(0, x.shape[-1], 32)]
        scales = [(np.abs(g).max(axis=-1, keepdims=True) / np.float32(127)).astype(np.float32) for g in groups]
        return np.concatenate([np.rint(g / scale).astype(np.float32) * scale for g, scale in zip(groups, scales, strict=True)], axis=-1)
    return x


@pytest.fixture(scope="module", params=["f16", "bf16", "f32", "int8", "bf16 pairs", "int8 pairs"])
def cached(request):
    """A backend per cache type, with products of f32, and of bf16 (`pairs`) where the machine has them. near: how far results may be from
    f64 over the operands as they are rounded, for a spread of `reference`."""
    kv, _, pairs = request.param.partition(" ")
    kit = Bench(threads=2, kv_dtype=kv, act="int8" if pairs else "f32")
    if pairs and not _native.attends_in_pairs(kit.cpu.isa):
        pytest.skip(f"{kit.cpu.isa} has no products of bf16")
    kit.kv, kit.act, kit.pairs = kv, "int8" if pairs else "f32", bool(pairs)
    kit.near = near_of_pairs if pairs else lambda spread: 5e-6
    yield kit
    kit.cpu.close()


def asked(kit, query):
    """A query as the products take it; those of latent attention stay f32."""
    return stored(query, "bf16") if kit.pairs else query


CASES = [
    # heads, kv heads, Dk, Dv, block, lengths, rows of the step
    (4, 4, 32, 32, 64, [65], [1]),
    (9, 3, 64, 64, 64, [1, 64, 130], [1, 3, 40]),
    (8, 1, 16, 24, 16, [17, 100], [17, 5]),
    (5, 5, 80, 80, 32, [63], [63]),
    (6, 2, 10, 7, 5, [23, 4], [9, 4]),
    (40, 1, 8, 8, 100, [205], [2]),
    (4, 2, 64, 64, 64, [1025], [1]),
    (4, 2, 64, 64, 64, [1200, 7], [33, 7]),
    (2, 1, 64, 64, 128, [700], [12]),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_causal_attention_agrees_with_f64_and_never_reads_an_unused_slot(cached, case):
    heads, kv, dk, dv, block, lengths, rows = case
    seqs = Sequences(cached, lengths, kv, dk, dv, block)
    queries = [normal(n, heads, dk, seed=77 + s) for s, n in enumerate(rows)]
    positions = [np.arange(length - n, length) for length, n in zip(lengths, rows, strict=True)]
    found = seqs.attend(queries, positions)
    for s in range(len(lengths)):
        k, v = stored(seqs.keys[s], cached.kv), stored(seqs.values[s], cached.kv)
        for i, p in enumerate(positions[s]):
            wanted, spread = reference(asked(cached, queries[s][i]), p, k, v, np.arange(p + 1))
            assert np.all(np.abs(found[s][i] - wanted) < cached.near(spread))


def test_the_bound_of_products_of_bf16_sees_a_token_that_is_left_out():
    for n in (65, 700, 1200):
        q, keys, values = normal(4, 64, seed=77), normal(n, 2, 64, seed=2), normal(n, 2, 64, seed=3)
        wanted, spread = reference(q, n - 1, keys, values, np.arange(n))
        for lost in (0, n // 2, n - 1):
            found, _ = reference(q, n - 1, keys, values, np.delete(np.arange(n), lost))
            assert not np.all(np.abs(found - wanted) < near_of_pairs(spread)), (n, lost)


MASKS = [
    {"mask": "full"},
    {"mask": "causal", "window": 1},
    {"mask": "causal", "window": 70},
    {"mask": "causal", "window": 10000},
    {"mask": "full", "window": 9},
    {"mask": "chunk", "chunk": 50},
    {"mask": "chunk", "chunk": 64, "window": 30},
    {"mask": "prefix"},
    {"mask": "causal", "softcap": 2.0},
]


@pytest.mark.parametrize("attrs", MASKS, ids=str)
def test_masks_windows_and_softcap(cached, attrs):
    lengths, rows = [150, 600], [40, 30]
    seqs = Sequences(cached, lengths, 2, 32, 48, 64)
    queries = [normal(n, 6, 32, seed=5 + s) for s, n in enumerate(rows)]
    positions = [np.arange(110, 150), np.arange(0, 600, 20)]
    prefix = np.array([120, 300], np.int32)
    found = seqs.attend(queries, positions, prefix=prefix if attrs["mask"] == "prefix" else None, **attrs)
    for s, length in enumerate(lengths):
        k, v = stored(seqs.keys[s], cached.kv), stored(seqs.values[s], cached.kv)
        for i, p in enumerate(positions[s]):
            see = [
                j
                for j in range(length)
                if {
                    "causal": j <= p,
                    "full": True,
                    "prefix": j <= p or (j < prefix[s] and p < prefix[s]),
                    "chunk": j <= p and j // attrs.get("chunk", 1) == p // attrs.get("chunk", 1),
                }[attrs["mask"]]
                and (not attrs.get("window") or p - j < attrs["window"])
            ]
            wanted, spread = reference(asked(cached, queries[s][i]), p, k, v, see, softcap=attrs.get("softcap", 0.0))
            assert np.all(np.abs(found[s][i] - wanted) < cached.near(spread))


def test_sinks_and_alibi(cached):
    seqs = Sequences(cached, [90, 300], 2, 64, 64, 64)
    queries, positions = [normal(3, 4, 64, seed=9), normal(1, 4, 64, seed=8)], [np.array([0, 50, 89]), np.array([299])]
    sinks, slopes = np.array([0.5, -2, 4, 80], np.float32), np.array([0.5, 0.25, 0.1, 0.01], np.float32)
    found = seqs.attend(queries, positions, sinks=sinks, slopes=slopes)
    for s in range(2):
        k, v = stored(seqs.keys[s], cached.kv), stored(seqs.values[s], cached.kv)
        for i, p in enumerate(positions[s]):
            wanted, spread = reference(asked(cached, queries[s][i]), p, k, v, np.arange(p + 1), sinks=sinks, slopes=slopes)
            assert np.all(np.abs(found[s][i] - wanted) < cached.near(spread) + 5e-6)


@pytest.mark.parametrize("variant", USABLE)
def test_sinks_and_alibi_in_every_variant(variant):
    kit = Bench(threads=2, isa=variant, kv_dtype="f16")
    seqs = Sequences(kit, [90, 700], 2, 64, 64, 64)
    queries = [normal(3, 4, 64, seed=9), normal(1, 4, 64, seed=8)]
    positions = [np.array([0, 50, 89]), np.array([699])]
    sinks, slopes = np.array([0.5, -2, 4, 80], np.float32), np.array([0.5, 0.25, 0.1, 0.01], np.float32)
    found = seqs.attend(queries, positions, sinks=sinks, slopes=slopes)
    for s in range(2):
        k, v = stored(seqs.keys[s], "f16"), stored(seqs.values[s], "f16")
        for i, p in enumerate(positions[s]):
            wanted, _ = reference(queries[s][i], p, k, v, np.arange(p + 1), sinks=sinks, slopes=slopes)
            assert np.abs(found[s][i] - wanted).max() < 1e-5
    kit.cpu.close()


@pytest.mark.parametrize(("heads", "value_dim", "block"), [(16, 40, 64), (3, 64, 16), (40, 9, 7), (130, 72, 32)])
def test_values_may_be_a_prefix_of_the_keys(cached, heads, value_dim, block):
    key_dim = max(64, value_dim + 16)
    seqs = Sequences(cached, [200], 1, key_dim, 0, block)
    queries, positions = [normal(5, heads, key_dim, seed=4)], [np.array([0, 7, 100, 198, 199])]
    found = seqs.attend(queries, positions, value_dim=value_dim)
    k = stored(seqs.keys[0], cached.kv)
    for i, p in enumerate(positions[0]):
        wanted, _ = reference(queries[0][i], p, k, k[..., :value_dim], np.arange(p + 1))
        assert np.abs(found[0][i] - wanted).max() < 5e-6


def test_a_row_that_sees_no_key_is_zeros_even_with_a_sink(cached):
    seqs = Sequences(cached, [70, 3], 1, 16, 16, 64)
    found = seqs.attend(
        [normal(2, 2, 16), normal(1, 2, 16)], [np.array([5, -1]), np.array([2])], lengths=[70, 0], sinks=np.ones(2, np.float32)
    )
    assert not found[0][1].any()
    assert not found[1].any()
    assert found[0][0].any()


def test_nan_reaches_exactly_the_rows_that_see_it(cached):
    seqs = Sequences(cached, [100], 1, 16, 16, 64)
    queries, positions = [normal(20, 4, 16)], [np.arange(80, 100)]
    clean = seqs.attend(queries, positions)[0]
    seqs.values[0][90] = NAN
    seqs.write(0, np.array([90]))
    dirty = seqs.attend(queries, positions)[0]
    np.testing.assert_array_equal(dirty[:10], clean[:10])
    assert np.isnan(dirty[10:]).all()
    seqs.values[0][90], seqs.keys[0][90] = 1.0, NAN
    seqs.write(0, np.array([90]))
    dirty = seqs.attend(queries, positions)[0]
    np.testing.assert_array_equal(dirty[:10], clean[:10])
    assert np.isnan(dirty[10:]).all()


@pytest.mark.parametrize(("dk", "dv", "block", "heads"), [(64, 64, 64, 9), (64, 0, 64, 12), (24, 40, 16, 3), (33, 80, 7, 30)])
def test_attention_bits_do_not_depend_on_batch_chunks_blocks_or_threads(cached, dk, dv, block, heads):
    lengths = [1300, 40]
    seqs = Sequences(cached, lengths, 3 if dv else 1, dk, dv, block)
    attrs = {} if dv else {"value_dim": 48}
    queries = [normal(70, heads, dk, seed=1), normal(2, heads, dk, seed=2)]
    positions = [np.arange(1230, 1300), np.array([38, 39])]
    together = seqs.attend(queries, positions, **attrs)
    none = [normal(0, heads, dk), np.zeros(0, np.int32)]
    alone = Bench(threads=1, kv_dtype=cached.kv, act=cached.act)
    three = Bench(threads=3, kv_dtype=cached.kv, act=cached.act, pin=False)
    for kit in (cached, alone, three):
        for i in (0, 1, 33, 69):
            one = seqs.attend([queries[0][i : i + 1], none[0]], [positions[0][i : i + 1], none[1]], kit=kit, **attrs)[0]
            np.testing.assert_array_equal(one[0], together[0][i])
        pieces = [
            seqs.attend([queries[0][a:b], queries[1][:1]], [positions[0][a:b], positions[1][:1]], kit=kit, **attrs)[0]
            for a, b in ((0, 3), (3, 50), (50, 70))
        ]
        np.testing.assert_array_equal(np.concatenate(pieces), together[0])
        np.testing.assert_array_equal(seqs.attend(queries, positions, kit=kit, **attrs)[1], together[1])
    other = Sequences(cached, lengths, 3 if dv else 1, dk, dv, 48, seed=0)
    np.testing.assert_array_equal(other.attend(queries, positions, **attrs)[0], together[0])
    alone.cpu.close()
    three.cpu.close()


@pytest.mark.parametrize("attrs", [{}, {"window": 700}, {"mask": "chunk", "chunk": 500}], ids=str)
def test_ranges_of_a_long_context_are_merged_in_rounds_where_memory_is_short(cached, attrs, monkeypatch):
    """Heads and widths as in latent attention: partial results of all ranges at once may take too much memory."""
    attrs = {"value_dim": 48, **attrs}
    seqs = Sequences(cached, [2900, 300], 1, 80, 0, 64)
    queries = [normal(7, 70, 80, seed=1), normal(1, 70, 80, seed=2)]
    positions = [np.array([2899, 2898, 5, 1400, 2897, 2500, 2000]), np.array([299])]
    alone, three = (Bench(threads=n, kv_dtype=cached.kv, act=cached.act, pin=False) for n in (1, 3))
    wanted = seqs.attend(queries, positions, kit=alone, **attrs)
    whole = seqs.attend(queries, positions, kit=three, **attrs)
    monkeypatch.setattr("fastllm.backends.cpu_avx.lower.PARTIAL_BYTES", 0)  # as little as there is: three ranges of eight rows
    rounds = seqs.attend(queries, positions, kit=three, **attrs)
    for s in range(2):
        np.testing.assert_array_equal(whole[s], wanted[s])
        np.testing.assert_array_equal(rounds[s], wanted[s])
    alone.cpu.close()
    three.cpu.close()


def test_wrong_step_arrays_are_errors_and_touch_nothing(cached):
    seqs = Sequences(cached, [100, 20], 1, 16, 16, 64)
    q, p = [normal(1, 2, 16), normal(1, 2, 16)], [np.array([99]), np.array([19])]
    for lengths in ([-1, 20], [100, 10_000]):
        with pytest.raises(EngineError, match="context_len"):
            seqs.attend(q, p, lengths=lengths)
    table = seqs.table.copy()
    for bad in (-1, seqs.num_blocks, 2**31 - 1):
        seqs.table[0, 1] = bad
        with pytest.raises(EngineError, match="block"):
            seqs.attend(q, p)
        seqs.table[:] = table
    out = np.full((2, 2, 16), NAN, np.float32)
    for starts in ([0, 2, 1], [1, 1, 2], [0, 1, 3], [-1, 0, 2]):
        with pytest.raises(EngineError, match="query_start"):
            cached.run("attention", np.concatenate(q), seqs.cache, np.array([99, 19], np.int32), np.array(starts, np.int32), np.array([100, 20], np.int32),
                       seqs.table, None, None, None, out=out, scale=0.1)  # fmt: skip
    assert np.isnan(out).all()
    before = seqs.memory.copy()
    for slot in (seqs.num_blocks * 64, 2**31 - 1):
        with pytest.raises(EngineError, match="slot"):
            cached.run("kv_write", seqs.cache, normal(2, 1, 16), normal(2, 1, 16), np.array([0, slot], np.int32), out=())
    np.testing.assert_array_equal(seqs.memory, before)
    cached.run("kv_write", seqs.cache, normal(1, 1, 16), normal(1, 1, 16), np.array([-1], np.int32), out=())
    np.testing.assert_array_equal(seqs.memory, before)


def test_row_ops_give_the_same_bits_alone_and_among_others(bench, lone):
    x, w = normal(37, 3, 50, seed=3), normal(50, seed=4)
    positions = np.arange(37, dtype=np.int32) * 11
    inv = (10000.0 ** (-np.arange(25) / 25)).astype(np.float32)
    calls = {
        "rms_norm": lambda kit, r: kit.run("rms_norm", x[r], w, eps=1e-6),
        "layer_norm": lambda kit, r: kit.run("layer_norm", x[r], w, w, eps=1e-6),
        "softmax": lambda kit, r: kit.run("softmax", x[r]),
        "act_mul": lambda kit, r: kit.run("act_mul", x[r], x[r], kind="silu"),
        "rope": lambda kit, r: kit.run("rope", x[r], positions[r], inv, style="half", factor=1.0),
        "matmul": lambda kit, r: kit.run("matmul", x[r], x[:3].copy(), shape=(len(x[r]), 3, 3)),
    }
    for name, call in calls.items():
        whole = call(bench, slice(0, 37))
        for r in (slice(0, 1), slice(17, 19), slice(36, 37), slice(5, 36)):
            np.testing.assert_array_equal(call(bench, r), whole[r], err_msg=name)
            if name != "matmul":  # no fused multiply-add in any of these: the bits are those of every variant
                np.testing.assert_array_equal(call(lone, r), whole[r], err_msg=name)


def test_no_rows_is_no_work(bench):
    empty = np.zeros((0, 8), np.float32)
    assert bench.run("rms_norm", empty, None, eps=1e-6).shape == (0, 8)
    assert bench.run("linear", empty, normal(3, 8), None, shape=(0, 3)).shape == (0, 3)
    assert bench.run("linear", empty, bench.packed("f32", normal(3, 8), (3, 8)), None, shape=(0, 3)).shape == (0, 3)
    assert bench.run("embed", np.zeros(0, np.int32), normal(3, 8), shape=(0, 8)).shape == (0, 8)
    seqs = Sequences(bench, [5], 1, 16, 16, 64)
    assert seqs.attend([normal(0, 2, 16)], [np.zeros(0)])[0].shape == (0, 2, 16)


def test_values_wider_than_the_kernels_stack_are_refused():
    kit = Bench(threads=2)
    spec = KVSpec(1, 16, 4096)
    shapes = (("T", 1, 16), (), ("T",), ("S+1",), ("S",), ("S", "B"), None, None, None)
    dtypes = ("f32", "kv", "i32", "i32", "i32", "i32", None, None, None)
    specs = (None, spec, *[None] * 7)
    answer = kit.cpu.supports(OpQuery("attention", dtypes, shapes, attrs={"scale": 0.1}, specs=specs))
    assert "4096 elements" in answer.reason
    sequences = Sequences(kit, [600], 1, 16, 4096, 16)
    with pytest.raises(ShapeError, match="4096 elements"):
        sequences.attend([normal(1, 1, 16)], [np.array([599])])
