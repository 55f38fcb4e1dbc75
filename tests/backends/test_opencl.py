"""opencl_generic: every op against numpy, linear layers against the bits of cpu_avx, rows alone and among others, wrong indices."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import numpy as np
import pytest

from fastllm.api import FORMATS, EngineError, HostTensor, KVSpec, No, OpQuery, OutOfMemory, ShapeError, SlotSpec, Tensor, Yes
from fastllm.backends.gpu.layouts import BLOCK_LAYOUTS
from fastllm.backends.ref import ops as ref
from fastllm.core import _kernels

pytest.importorskip("pyopencl", reason="pyopencl is not installed (pip install 'fastllm-engine[opencl]')")


def _load():
    spec = importlib.util.spec_from_file_location("opencl_bench", Path(__file__).parent / "opencl_bench.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kit = _load()
WHY = kit.missing()
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY)

GGML = [name for name in BLOCK_LAYOUTS if FORMATS[name].ggml is not None]
DISTINCT = ["q4_1", "q5_0", "q8_0", "q2_k", "q4_k", "q6_k", "mxfp4"]
"""One of each way to keep codes and scales: building kernels for all formats twice would take most of the time of these tests."""
GROUPS = ["int4g32", "int4g128", "int4g256s", "int8g64"]
RNG = np.random.default_rng(5)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.fixture(scope="module", params=["vector", "lanes"])
def bench(request):
    """Kernels for CPUs and those for GPUs, both on whatever device is there."""
    opened = kit.Bench(kernels=request.param)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def vector():
    opened = kit.Bench(kernels="vector")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def lanes():
    opened = kit.Bench(kernels="lanes")
    yield opened
    opened.close()


def near(found, wanted, ulps=8.0):
    """Within `ulps` units in the last place of the largest of a row."""
    size = np.abs(wanted).max(axis=-1, keepdims=True)
    assert found.shape == wanted.shape
    assert (np.abs(found - wanted) <= ulps * 2.0**-23 * size + 1e-37).all(), np.abs(found - wanted).max()


# linear -----------------------------------------------------------------------------------------------------------------


def cpu_linear(format, raw, shape, x, bias):
    """The same layer on cpu_avx, whose arithmetic is the same."""
    from fastllm.backends.cpu_avx.backend import CpuBackend

    with CpuBackend(threads=1) as cpu:
        layout = cpu.pack_layout(shape, format, frozenset({"linear"}))
        buffer = cpu.alloc(layout.nbytes, "weights")
        cpu.pack_weight(HostTensor("w", shape, format, raw.reshape(-1)), layout, buffer, 0)
        out = np.empty((len(x), shape[0]), np.float32)
        tensors = [Tensor(cpu.wrap_host(a.reshape(-1).view(np.uint8), False), 0, a.shape, "f32") for a in (x, bias, out)]
        weight = Tensor(buffer, 0, shape, format, packed=layout)
        cpu.ops()["linear"](tensors[0], weight, tensors[1], out=tensors[2], stream=cpu.new_stream(), ws=None)
        buffer.close()
    return out


@pytest.mark.parametrize(("kernels", "format"), [*(("vector", f) for f in GGML), *(("lanes", f) for f in DISTINCT)])
def test_linear_has_the_bits_of_cpu_avx_for_one_row_and_for_many(kernels, format, request):
    bench = request.getfixturevalue(kernels)
    shape = (67, 512)
    raw, x, bias = kit.random_blocks(format, shape), normal(5, 512), normal(67)
    x[3, 40:80] = 0.0
    weight = bench.packed(format, raw, shape)
    found = bench.run("linear", x, weight, bias, shape=(5, 67))
    np.testing.assert_array_equal(found, cpu_linear(format, raw, shape, x, bias))
    for t in range(5):
        np.testing.assert_array_equal(bench.run("linear", x[t : t + 1], weight, bias, shape=(1, 67))[0], found[t])


@pytest.mark.parametrize("format", GROUPS)
def test_linear_of_group_formats_rounds_activations_in_groups_of_32(vector, format):
    shape = (35, 512)
    raw, x = kit.random_blocks(format, shape), normal(3, 512)
    codes, scales = ref.quantize(x, 32)
    weight = _kernels.decode(format, raw.reshape(-1), 35 * 512).reshape(shape).astype(np.float64)
    wanted = ref.dequantize(codes, scales, 32).astype(np.float64) @ weight.T
    near(vector.run("linear", x, vector.packed(format, raw, shape), None, shape=(3, 35)), wanted, 32)


@pytest.mark.parametrize("format", ["f32", "f16", "bf16"])
def test_linear_of_plain_formats_packed_or_not(bench, format):
    x, w, bias = normal(6, 70), normal(35, 70), normal(35)
    stored = w if format == "f32" else _kernels.encode(format, w)
    decoded = _kernels.decode(format, np.ascontiguousarray(stored).reshape(-1).view(np.uint8), w.size).reshape(w.shape)
    weight = bench.packed(format, np.ascontiguousarray(stored), w.shape)
    wanted = x.astype(np.float64) @ decoded.T + bias
    found = bench.run("linear", x, weight, bias, shape=(6, 35))
    near(found, wanted)
    np.testing.assert_array_equal(bench.run("linear", x[2:3], weight, bias, shape=(1, 35))[0], found[2])
    raw = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
    buffer = bench.backend.alloc(raw.nbytes, "weights")
    bench.backend.upload(buffer, 0, memoryview(raw), bench.stream)
    plain = bench.run("linear", x, Tensor(buffer, 0, w.shape, format), bias, shape=(6, 35))
    near(plain, wanted)
    ids = np.array([34, 0, 7], np.int32)
    np.testing.assert_array_equal(bench.run("embed", ids, weight, shape=(3, 70)), decoded[ids])
    np.testing.assert_array_equal(bench.run("embed", ids, Tensor(buffer, 0, w.shape, format), shape=(3, 70)), decoded[ids])


@pytest.mark.parametrize("format", BLOCK_LAYOUTS)
def test_embed_gives_the_bits_of_the_hosts_decoder(vector, format):
    shape = (40, 256)
    raw = kit.random_blocks(format, shape)
    decoded = _kernels.decode(format, raw.reshape(-1), 40 * 256).reshape(shape)
    ids = np.array([0, 39, 31, 32, 39], np.int32)
    np.testing.assert_array_equal(vector.run("embed", ids, vector.packed(format, raw, shape), shape=(5, 256)), decoded[ids])


def test_a_group_with_nan_makes_its_row_nan_and_no_other(bench):
    x = normal(3, 64)
    x[1, 40] = np.nan
    weight = bench.packed("q4_0", kit.random_blocks("q4_0", (33, 64)), (33, 64))
    found = bench.run("linear", x, weight, None, shape=(3, 33))
    assert np.isnan(found[1]).all()
    assert np.isfinite(found[[0, 2]]).all()


@pytest.mark.parametrize("format", [*GGML, *GROUPS])
def test_sums_of_16_bits_cannot_overflow(vector, format):
    """The largest codes against the largest activations: where a lane of 16 bits would wrap around."""
    layout = BLOCK_LAYOUTS[format]
    shape = (32, 256)
    raw = kit.random_blocks(format, shape)
    raw = np.where(np.isin(np.arange(raw.shape[1]) % FORMATS[format].block_bytes, scale_bytes(format)), raw, 0xFF).astype(np.uint8)
    if layout.low == 8 and layout.format in ("q8_0", "int8g64", "int8g128"):
        raw = np.where(raw == 0xFF, 0x80, raw).astype(np.uint8)  # −128
    x = np.full((1, 256), 127.0, np.float32)
    weight = _kernels.decode(format, raw.reshape(-1), 32 * 256).reshape(shape).astype(np.float64)
    found = vector.run("linear", x, vector.packed(format, raw, shape), None, shape=(1, 32))
    np.testing.assert_allclose(found, x.astype(np.float64) @ weight.T, rtol=1e-5)


def scale_bytes(format):
    """Bytes of a block that are not codes of weights."""
    return {
        "q2_k": [*range(16), *range(80, 84)], "q3_k": list(range(96, 110)), "q4_k": list(range(16)), "q5_k": list(range(16)),
        "q6_k": list(range(192, 210)), "iq4_xs": list(range(8)), "mxfp4": [0], "q4_1": [0, 1, 2, 3], "q5_1": [0, 1, 2, 3],
    }.get(format, [0, 1, 2] if BLOCK_LAYOUTS[format].scale == 4 else [0, 1])  # fmt: skip


# other ops --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 37, 576])
def test_rows(bench, width):
    x, w, b = normal(3, 2, width), normal(width), normal(width)
    wide = x.astype(np.float64)
    near(bench.run("rms_norm", x, w, eps=1e-5), ref.rms_norm(wide, w, 1e-5))
    near(bench.run("rms_norm", x, None, eps=1e-5), ref.rms_norm(wide, None, 1e-5))
    near(bench.run("layer_norm", x, w, b, eps=1e-5), ref.layer_norm(wide, w, b, 1e-5), 16)
    near(bench.run("softmax", x), ref.softmax(wide))
    near(bench.run("softcap", x, cap=2.5), 2.5 * np.tanh(wide / 2.5))


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "sigmoid", "tanh", "relu", "swiglu_oai"])
def test_act_mul(bench, kind):
    gate, up = 4 * normal(3, 37), 4 * normal(3, 37)
    gate[0, :4] = [0.0, 90.0, -90.0, np.nan]
    for other in (up, None):
        found, wanted = bench.run("act_mul", gate, other, kind=kind), ref.act_mul(gate, other, kind)
        np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-6)


def test_add_and_mul_broadcast(bench):
    x, same, column, one, rows = normal(3, 2, 37), normal(3, 2, 37), normal(37), normal(1), normal(3, 1)
    for y in (same, column, one):
        np.testing.assert_array_equal(bench.run("add", x, y), x + y)
        np.testing.assert_array_equal(bench.run("mul", x, y), x * y)
    np.testing.assert_array_equal(bench.run("mul", x, rows), x * rows[:, :, None])


@pytest.mark.parametrize("style", ["half", "pairs"])
@pytest.mark.parametrize("r", [3, 18, 20])
def test_rope_turns_far_positions_precisely(bench, style, r):
    x, positions = normal(3, 2, 40), np.array([0, 17, 100_003], np.int32)
    freq = (10000.0 ** (-np.arange(r) / r)).astype(np.float32)
    near(bench.run("rope", x, positions, freq, style=style, factor=1.25), ref.rope(x.astype(np.float64), positions, freq, style, 1.25), 4)


def test_matmul_quantize_dequantize(bench):
    a, b = normal(3, 4, 37), normal(4, 19, 37)
    near(bench.run("matmul", a, b, shape=(3, 4, 19)), np.einsum("thk,hnk->thn", a.astype(np.float64), b))
    x = normal(3, 96)
    x[1, :32] = 0.0
    wanted = ref.quantize(x, 32)
    codes, scales = bench.run("quantize", x, shape=[(3, 96), (3, 3)], dtypes=("i1", "f4"), group=32)
    np.testing.assert_array_equal(codes, wanted[0])
    np.testing.assert_array_equal(scales, wanted[1])
    np.testing.assert_array_equal(bench.run("dequantize", codes, scales, shape=(3, 96), group=32), ref.dequantize(codes, scales, 32))


# attention --------------------------------------------------------------------------------------------------------------

CASES = [
    {}, {"window": 9}, {"softcap": 3.0}, {"mask": "full"}, {"mask": "chunk", "chunk": 24}, {"mask": "prefix"}, {"sinks": True},
    {"slopes": True}, {"sinks": True, "slopes": True, "window": 30, "softcap": 2.0},
]  # fmt: skip


def attend(bench, spec, q, keys, values, tokens, block_size, case):
    """Writes two sequences of `tokens` tokens into scattered blocks of a poisoned cache and attends with the rows q[s] at their end."""
    cache = bench.cache(spec, 12, block_size)
    columns = -(-max(tokens) // block_size)
    table = np.array([[5, 2, 9, 7], [1, 8, 0, 3]], np.int32)[:, :columns]
    for s, n in enumerate(tokens):
        slots = np.array([table[s][j // block_size] * block_size + j % block_size for j in range(n)], np.int32)
        bench.run("kv_write", cache, keys[s], values[s] if spec.value_dim else None, slots, shape=[])
    rows = [len(x) for x in q]
    positions = np.concatenate([np.arange(n - r, n) for n, r in zip(tokens, rows, strict=True)]).astype(np.int32)
    starts, lengths = np.array([0, rows[0], sum(rows)], np.int32), np.array(tokens, np.int32)
    heads, width = q[0].shape[1], spec.value_dim or case["value_dim"]
    rng = np.random.default_rng(3)
    sinks, slopes = (rng.standard_normal(heads).astype(np.float32) if case.get(k) else None for k in ("sinks", "slopes"))
    prefix = np.array([tokens[0], 3], np.int32) if case.get("mask") == "prefix" else None
    attrs = {"scale": 0.3, "mask": "causal", "chunk": 0, "window": 0, "softcap": 0.0, "value_dim": 0}
    attrs |= {k: v for k, v in case.items() if k in attrs}
    operands = (np.concatenate(q), cache, positions, starts, lengths, table, sinks, slopes, prefix)
    found = bench.run("attention", *operands, shape=(sum(rows), heads, width), **attrs)
    kept, wanted, value_dim = spec.dtype or bench.backend.kv_dtype, [], attrs.pop("value_dim")
    for s in range(2):
        for t, row in enumerate(q[s]):
            k = keys[s].astype(np.float16).astype(np.float32) if kept == "f16" else keys[s]
            v = k[..., :value_dim] if value_dim else values[s].astype(np.float16).astype(np.float32) if kept == "f16" else values[s]
            seen = 0 if prefix is None else int(prefix[s])
            position = tokens[s] - len(q[s]) + t
            wanted.append(ref.attention(row, k, v, position, sinks=sinks, slopes=slopes, prefix_len=seen, **attrs))
    return found, np.array(wanted)


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(c) or "causal")
def test_attention_sees_what_it_should_in_a_poisoned_cache(bench, case):
    spec, tokens = KVSpec(2, 24, 40), (50, 7)
    keys, values = [normal(n, 2, 24) for n in tokens], [normal(n, 2, 40) for n in tokens]
    q = [normal(3, 6, 24), normal(1, 6, 24)]
    found, wanted = attend(bench, spec, q, keys, values, tokens, 16, case)
    np.testing.assert_allclose(found, wanted, atol=5e-6)
    alone, _ = attend(bench, spec, [q[0][2:], q[1]], keys, values, tokens, 16, case)
    np.testing.assert_array_equal(alone[0], found[2])


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_the_graph_may_say_how_keys_and_values_are_kept(vector, dtype):
    spec, tokens = KVSpec(2, 16, 16, dtype), (20, 5)
    assert vector.backend.kv_block_bytes(spec, 16) == 16 * 2 * 32 * (2 if dtype == "f16" else 4)
    keys, values = [normal(n, 2, 16) for n in tokens], [normal(n, 2, 16) for n in tokens]
    found, wanted = attend(vector, spec, [normal(2, 4, 16), normal(1, 4, 16)], keys, values, tokens, 16, {})
    np.testing.assert_allclose(found, wanted, atol=5e-6)
    query = OpQuery("kv_write", ("kv", "f32", "f32", "i32"), specs=(KVSpec(2, 16, 16, "int8"), None, None, None))
    assert isinstance(vector.backend.supports(query), No)


def test_values_can_be_a_prefix_of_the_keys(bench):
    spec, tokens = KVSpec(1, 48, 0), (33, 5)
    keys = [normal(n, 1, 48) for n in tokens]
    q = [normal(2, 4, 48), normal(1, 4, 48)]
    found, wanted = attend(bench, spec, q, keys, keys, tokens, 64, {"value_dim": 32})
    np.testing.assert_allclose(found, wanted, atol=5e-6)


def test_a_row_that_sees_nothing_is_zeros(bench):
    cache = bench.cache(KVSpec(1, 16, 16), 2, 16)
    attrs = {"scale": 1.0, "mask": "causal", "chunk": 0, "window": 0, "softcap": 0.0, "value_dim": 0}
    zero, one = np.zeros(1, np.int32), np.array([0, 1], np.int32)
    found = bench.run("attention", normal(1, 2, 16), cache, zero, one, zero, np.zeros((1, 1), np.int32), None, None, None, **attrs)
    np.testing.assert_array_equal(found, np.zeros((1, 2, 16), np.float32))


# what must not work -----------------------------------------------------------------------------------------------------


def test_wrong_indices_touch_nothing_and_are_named(bench):
    table = bench.tensor(normal(5, 16))
    with pytest.raises(EngineError, match=r"op 'embed': id 5 of row 1"):
        bench.run("embed", np.array([0, 5], np.int32), table, shape=(2, 16))
    with pytest.raises(EngineError, match=r"op 'embed': id -1"):
        bench.run("embed", np.array([-1], np.int32), table, shape=(1, 16))
    cache = bench.cache(KVSpec(1, 16, 16), 2, 16)
    rows = normal(1, 1, 16)

    def write(slots):
        bench.run("kv_write", cache, *[np.repeat(rows, len(slots), 0)] * 2, np.array(slots, np.int32), shape=[])
        bench.stream.synchronize()

    with pytest.raises(EngineError, match=r"op 'kv_write': slot 32 of token 0"):
        write([32])
    attrs = {"scale": 1.0, "mask": "causal", "chunk": 0, "window": 0, "softcap": 0.0, "value_dim": 0}

    def attention(starts=(0, 1), length=3, page=0):
        steps = [np.array(a, np.int32) for a in ([2], starts, [length], [[page]])]
        return bench.run("attention", rows, cache, *steps, None, None, None, **attrs)

    for arguments, message in (({"page": 2}, "names block 2"), ({"length": 99}, r"context_len\[0\] = 99"), ({"starts": (1, 1)}, "belongs to no")):
        with pytest.raises(EngineError, match=message):
            attention(**arguments)
    write([0, 1, 2])
    assert np.isfinite(attention()).all()  # the backend goes on


def test_bad_operands_are_refused_before_the_device(vector):
    x = vector.tensor(normal(4, 32))
    with pytest.raises(ShapeError, match="leaves its buffer"):
        vector.run("softmax", Tensor(x.buffer, x.offset, (5, 32), "f32"))
    with pytest.raises(ShapeError, match="negative"):
        vector.run("softmax", Tensor(x.buffer, x.offset, (4, 32), "f32", (-32, 1)), shape=(4, 32))
    w = vector.packed("q8_0", kit.random_blocks("q8_0", (32, 32)), (32, 32))
    out = vector.tensor(np.zeros((4, 32), np.float32))
    with pytest.raises(ShapeError, match="workspace"):
        vector.ops["linear"](x, w, None, out=out, stream=vector.stream, ws=None)
    with pytest.raises(ShapeError, match="outside of a"):
        vector.backend.upload(x.buffer, x.buffer.nbytes - 4, memoryview(b"12345678"), vector.stream)
    layout = vector.backend.pack_layout((32, 32), "q8_0", frozenset({"linear"}))
    with pytest.raises(ShapeError, match="bytes, which is not q8_0"):
        vector.backend.pack_weight(HostTensor("w", (32, 32), "q8_0", np.zeros(7, np.uint8)), layout, w.buffer, 0)


def test_memory_is_counted_and_ends_with_an_error(vector):
    before = vector.backend.memory().used
    buffer = vector.backend.alloc(1000, "kv")
    assert vector.backend.memory().used == before + 1000
    with pytest.raises(OutOfMemory):
        vector.backend.alloc(1 << 50, "weights")
    buffer.close()
    buffer.close()
    assert vector.backend.memory().used == before
    with pytest.raises(ValueError, match="after it was closed"):
        vector.backend.upload(buffer, 0, memoryview(b"1"), vector.stream)


def test_support_is_declared_truthfully(vector):
    linear = OpQuery("linear", ("f32", "q4_k", None), (("T", 256), (8, 256), None), {"T": (0, 512)})
    answer = vector.backend.supports(linear)
    assert isinstance(answer, Yes)
    assert answer.act == "q8_g32"
    assert answer.workspace >= 512 * 256
    assert isinstance(vector.backend.supports(OpQuery("linear", ("f32", "q4_k", None), (("T", 40), (8, 40), None), {"T": (0, 1)})), No)
    assert isinstance(vector.backend.supports(OpQuery("sample", ("f32",))), No)
    assert isinstance(vector.backend.supports(OpQuery("invented", ("f32",))), No)
    assert isinstance(vector.backend.supports(OpQuery("add", ("f32", "f16"), (("T", 4), (4,)))), No)
    assert set(vector.ops) == {op for op in vector.ops if not op.startswith("ref.")}


def test_the_device_tells_how_fast_it_reads_and_multiplies_and_keeps_no_memory(bench):
    used = bench.backend.memory().used
    assert bench.backend.read_bandwidth(1 << 20) > 1e6
    assert bench.backend.peak_ops("f32") > 1e6
    assert bench.backend.peak_ops("int8") is None
    assert bench.backend.memory().used == used


# recurrent state ----------------------------------------------------------------------------------------------------------

LENGTHS = (9, 0, 5)
STEP = (
    np.concatenate([np.arange(n) for n in LENGTHS]).astype(np.int32),
    np.cumsum([0, *LENGTHS]).astype(np.int32),
    np.array([2, 1, 0], np.int32),
)
CONV = (normal(14, 150), normal(150, 5))
DELTA = (normal(14, 3, 24), normal(14, 3, 24), normal(14, 6, 70), normal(14, 6), normal(14, 6), normal(6), normal(6))


def test_recurrences_are_those_of_ref_however_often_and_in_pieces(bench):
    conv, delta = SlotSpec((4, 150)), SlotSpec((6, 24, 70))
    wanted_conv, wanted_delta = np.zeros((14, 150), np.float32), np.zeros((14, 6, 70), np.float32)
    for a, b in itertools.pairwise(STEP[1]):
        wanted_conv[a:b] = ref.short_conv(np.zeros((4, 150), np.float32), CONV[0][a:b], CONV[1], "silu")
        wanted_delta[a:b] = ref.delta_rule(np.zeros((6, 24, 70), np.float32), *(x[a:b] for x in DELTA[:5]), *DELTA[5:], 1e-6)
    for op, spec, operands, rowed, wanted, attrs in (
        ("short_conv", conv, CONV, 1, wanted_conv, {"kind": "silu"}), ("delta_rule", delta, DELTA, 5, wanted_delta, {"eps": 1e-6}),
    ):  # fmt: skip
        state = bench.state(spec, 3)
        first = bench.run(op, state, *operands, *STEP, shape=wanted.shape, **attrs)
        np.testing.assert_allclose(first, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
        for _ in range(20):  # groups run side by side: what they share would show
            np.testing.assert_array_equal(bench.run(op, state, *operands, *STEP, shape=wanted.shape, **attrs), first)
        pieces, other = [], bench.state(spec, 3)
        for a, b in ((0, 1), (1, 4), (4, 9)):
            step = (np.arange(a, b, dtype=np.int32), np.array([0, b - a], np.int32), np.array([1], np.int32))
            cut = [x[a:b] if i < rowed else x for i, x in enumerate(operands)]
            pieces.append(bench.run(op, other, *cut, *step, shape=(b - a, *wanted.shape[1:]), **attrs))
        np.testing.assert_array_equal(np.concatenate(pieces), first[:9])


def test_slots_and_shares_of_recurrences_that_do_not_exist_are_errors(bench):
    state, delta = bench.state(SlotSpec((4, 150)), 3), bench.state(SlotSpec((6, 24, 70)), 3)
    for starts, slots, message in (
        (STEP[1], np.array([2, 1, 3], np.int32), "slot 3 of sequence 2 does not exist"),
        (np.array([0, 9, 9, 15], np.int32), STEP[2], r"query_start\[3\] = 15 does not divide"),
        (np.array([0, 9, 8, 14], np.int32), STEP[2], r"query_start\[2\] = 8 does not divide"),
        (np.array([1, 9, 9, 14], np.int32), STEP[2], r"query_start\[0\] = 1 does not divide"),
        (np.array([0, 9, 9, 13], np.int32), STEP[2], r"query_start\[3\] = 13 does not divide"),
    ):
        with pytest.raises(EngineError, match=message):
            bench.run("short_conv", state, *CONV, STEP[0], starts, slots, shape=(14, 150), kind="silu")
        with pytest.raises(EngineError, match=message):
            bench.run("delta_rule", delta, *DELTA, STEP[0], starts, slots, shape=(14, 6, 70), eps=1e-6)
    with pytest.raises(ShapeError, match="state_slot"):
        bench.run("short_conv", state, *CONV, *STEP[:2], STEP[2][:2], shape=(14, 150), kind="silu")
    assert np.isfinite(bench.run("short_conv", state, *CONV, *STEP, shape=(14, 150), kind="silu")).all()


def test_keys_of_the_delta_rule_may_be_of_any_length_and_taps_may_not(vector):
    operands = (normal(3, 1, 1100), normal(3, 1, 1100), normal(3, 2, 9), normal(3, 2), normal(3, 2), normal(2), normal(2))
    step = (np.arange(3, dtype=np.int32), np.array([0, 3], np.int32), np.array([0], np.int32))
    found = vector.run("delta_rule", vector.state(SlotSpec((2, 1100, 9)), 1), *operands, *step, shape=(3, 2, 9), eps=1e-6)
    wanted = ref.delta_rule(np.zeros((2, 1100, 9), np.float32), *operands, 1e-6)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
    assert isinstance(vector.backend.supports(OpQuery("delta_rule", ("slot", "f32"), ((), ("T", 1, 1100)))), Yes)
    assert vector.backend.supports(OpQuery("short_conv", ("slot", "f32", "f32"), ((), ("T", 8), (8, 65)))) == No("65 taps; the kernel takes 64 at most")


def test_concat_copies(bench):
    x, y = normal(3, 2, 37), normal(3, 2, 300)
    x[0, 0, :3] = np.nan, np.inf, -0.0
    np.testing.assert_array_equal(bench.run("concat", x, y, shape=(3, 2, 337)), np.concatenate([x, y], -1))
