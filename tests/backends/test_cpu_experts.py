"""Experts on cpu_avx: the choice of route_topk and the sums of moe against f64 numpy, in every format and variant, and the rule that
a row's bits depend on that row only."""

from __future__ import annotations

import numpy as np
import pytest

from fastllm.api import FORMATS, EngineError, HostTensor, Stream, Tensor, UnsupportedError
from fastllm.backends.cpu_avx import isa, pack
from fastllm.backends.cpu_avx.backend import CpuBackend
from fastllm.backends.ref import ops
from fastllm.core import _kernels
from fastllm.core.ops import CATALOGUE

USABLE = [name for name, why in isa.variants().items() if not why]
ROUTES = {name: attr.default for name, attr in CATALOGUE["route_topk"].attrs.items()}
E, C, F, K = 6, 256, 160, 3


def encoded(format, values, rng):
    """Bytes of values in a format; formats that are read and never written: random blocks with small scales."""
    block = FORMATS[format]
    try:
        return _kernels.encode(format, values.reshape(-1)).view(np.uint8)
    except UnsupportedError:
        raw = rng.integers(0, 256, (values.size // block.block, block.block_bytes), np.uint8)
        halves = {"q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "mxfp4": ()}.get(
            format, (0,)
        )
        for at in halves:  # where the f16 scales are
            raw[:, at : at + 2] = np.array([0.002], np.float16).view(np.uint8)
        if format == "mxfp4":
            raw[:, 0] = rng.integers(120, 124, len(raw))
        return raw.reshape(-1)


class Experts:
    """One layer of experts on one backend. formats: of gate, up and down; up "" for none."""

    def __init__(self, formats=("q4_0", "q4_0", "q8_0"), bias=False, shape=(E, C, F), **options):
        self.cpu = CpuBackend(**options)
        rng = np.random.default_rng(0)
        experts, hidden, width = shape
        shapes = ((experts, width, hidden), (experts, width, hidden), (experts, hidden, width))
        self.values, self.stacks, self.biases = [], [], []
        for format, dims in zip(formats, shapes, strict=True):
            self._add(format, dims, rng)
            self.biases.append(rng.standard_normal(dims[:2]).astype(np.float32) if bias and format else None)

    def _add(self, format, dims, rng):
        if not format:
            self.values.append(None)
            self.stacks.append(None)
            return
        data = encoded(format, (rng.standard_normal(dims) * 1.5 / np.sqrt(dims[2])).astype(np.float32), rng)
        self.values.append(_kernels.decode(format, data, int(np.prod(dims))).reshape(dims))
        layout = self.cpu.pack_layout(dims[1:], format, frozenset({"moe"}))
        stride = -(-layout.nbytes // 64) * 64
        buffer = self.cpu.alloc(stride * dims[0], "weights")
        for e, piece in enumerate(data.reshape(dims[0], -1)):
            self.cpu.pack_weight(HostTensor("w", dims[1:], format, piece), layout, buffer, e * stride)
        self.stacks.append(Tensor(buffer, 0, dims, format, packed=layout))

    def tensor(self, array):
        if array is None or isinstance(array, Tensor):
            return array
        dtype = {"f": "f32", "i": "i32"}[array.dtype.kind]
        return Tensor(self.cpu.wrap_host(array.reshape(-1).view(np.uint8), readonly=False), 0, array.shape, dtype)

    def run(self, x, ids, weights, kind="silu"):
        out = np.full(x.shape, np.nan, np.float32)
        operands = [self.tensor(np.ascontiguousarray(a)) for a in (x, ids, weights)]
        operands += [*self.stacks, *map(self.tensor, self.biases)]
        self.cpu.ops()["moe"](*operands, out=self.tensor(out), stream=Stream(), ws=None, kind=kind)
        return out

    def expected(self, x, ids, weights, kind="silu"):
        """f64, expert by expert."""
        gate, up, down = (None if v is None else v.astype(np.float64) for v in self.values)
        b = [np.zeros(1) if v is None else v for v in self.biases]
        out = np.zeros(x.shape)
        for t, row in enumerate(x.astype(np.float64)):
            for e, w in zip(ids[t], weights[t], strict=True):
                g = gate[e] @ row + b[0][e % len(b[0])]
                u = None if up is None else (up[e] @ row + b[1][e % len(b[1])]).astype(np.float32)[None]
                hidden = ops.act_mul(g.astype(np.float32)[None], u, kind)[0].astype(np.float64)
                out[t] += w * (down[e] @ hidden + b[2][e % len(b[2])])
        return out


def rows(count, seed=1, shape=(E, C, K)):
    """x [T, C], ids [T, K], weights [T, K]."""
    rng = np.random.default_rng(seed)
    ids = np.array([rng.permutation(shape[0])[: shape[2]] for _ in range(count)], np.int32).reshape(count, shape[2])
    return rng.standard_normal((count, shape[1])).astype(np.float32), ids, rng.random((count, shape[2]), np.float32)


def error(found, wanted):
    return float(np.abs(found - wanted).max() / wanted.std())


@pytest.mark.parametrize("variant", USABLE)
@pytest.mark.parametrize("format", sorted(pack.LAYOUTS))
def test_every_format_and_variant_agrees_with_f64(format, variant):
    down = format if F % FORMATS[format].block == 0 else "q8_0"
    layer = Experts((format, format, down), isa=variant, threads=2)
    for count in (1, 7):
        given = rows(count)
        assert error(layer.run(*given), layer.expected(*given)) < 0.1  # activations are rounded to 8 bits
    exact = Experts((format, format, down), isa=variant, threads=2, act="f32")
    assert error(exact.run(*given), exact.expected(*given)) < 1e-5


@pytest.mark.parametrize("variant", USABLE)
@pytest.mark.parametrize("formats", [("q4_0", "q4_0", "q4_0"), ("q4_0", "bf16", "f16"), ("f32", "", "q8_0")])
def test_a_row_has_the_same_bits_alone_batched_in_any_split_and_on_any_number_of_threads(formats, variant):
    given = rows(300)
    results = []
    for threads in (1, 2, 3):
        layer = Experts(formats, bias=True, isa=variant, threads=threads)
        results.append(layer.run(*given))
        if threads == 2:
            for start, stop in ((0, 1), (7, 8), (0, 5), (5, 39), (39, 300)):
                part = layer.run(*(a[start:stop] for a in given))
                assert np.array_equal(part, results[0][start:stop])
            turned = layer.run(given[0], given[1][:, ::-1], given[2][:, ::-1])
            assert np.array_equal(turned, results[0])
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


def test_all_variants_give_the_same_bits():
    given = rows(40)
    first, *others = (Experts(bias=True, isa=variant, threads=2).run(*given, kind="swiglu_oai") for variant in USABLE)
    for other in others:
        assert np.array_equal(first, other)


@pytest.mark.parametrize("kind", ["silu", "swiglu_oai", "gelu_tanh"])
def test_biases_activations_and_widths_that_are_no_whole_strips(kind):
    layer = Experts(("f32", "f32", "f32"), bias=True, shape=(3, 40, 50), threads=2)
    given = rows(9, shape=(3, 40, 2))
    assert error(layer.run(*given, kind=kind), layer.expected(*given, kind=kind)) < 1e-5
    ungated = Experts(("f32", "", "f32"), bias=True, shape=(3, 40, 50), threads=2)
    assert error(ungated.run(*given), ungated.expected(*given)) < 1e-5
    assert ungated.run(*(a[:0] for a in given)).shape == (0, 40)


def test_every_row_to_one_expert_and_experts_that_nobody_takes():
    layer = Experts(threads=2)
    x, ids, weights = rows(50)
    ids[:, 0], ids[:, 1:] = 4, [1, 5]
    assert error(layer.run(x, ids, weights), layer.expected(x, ids, weights)) < 0.1


def test_an_id_that_is_no_experts_is_a_fault():
    layer = Experts(threads=2)
    for bad in (-1, E):
        x, ids, weights = rows(4)
        ids[3, 2] = bad
        with pytest.raises(EngineError, match=f"index {bad} at place 11"):
            layer.run(x, ids, weights)


@pytest.mark.parametrize("variant", USABLE)
@pytest.mark.parametrize(
    "attrs",
    [
        {"k": 3},
        {"k": 4, "renorm": 1, "scale": 2.5},
        {"k": 2, "score": "softmax_of_chosen"},
        {"k": 5, "score": "sigmoid", "groups": 4, "keep_groups": 2, "group_score": "top2sum", "renorm": 1, "scale": 1.5},
        {"k": 3, "score": "softmax", "groups": 6, "keep_groups": 1},
    ],
)
def test_route_topk_chooses_and_weighs_as_ref_does(attrs, variant):
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((33, 24)).astype(np.float32)
    logits[5] = np.round(logits[5])  # ties
    logits[6] = 1.0
    bias = rng.standard_normal(24).astype(np.float32) if attrs.get("score") == "sigmoid" else None
    full = {**ROUTES, **attrs}
    ids, weights = np.full((33, full["k"]), -1, np.int32), np.full((33, full["k"]), np.nan, np.float32)
    layer = Experts(isa=variant, threads=2)

    def run(rows):
        operands = [layer.tensor(logits[rows]), layer.tensor(bias)]
        layer.cpu.ops()["route_topk"](
            *operands, out=(layer.tensor(ids[rows]), layer.tensor(weights[rows])), stream=Stream(), ws=None, **full
        )

    run(slice(0, 33))
    wanted_ids, wanted = ops.route_topk(logits, bias, **full)
    assert np.array_equal(ids, wanted_ids)
    np.testing.assert_allclose(weights, wanted, rtol=2e-6)
    whole = weights.copy()
    weights[:] = 0
    for t in range(33):
        run(slice(t, t + 1))
    assert np.array_equal(weights, whole)


def test_route_topk_gives_experts_whatever_the_logits_hold():
    layer = Experts(threads=1)
    nan, inf = np.nan, np.inf
    logits = np.array([[nan] * 4, [inf, -inf, nan, 0], [-inf] * 4, [inf] * 4], np.float32)
    for score in ("softmax", "sigmoid", "softmax_of_chosen"):
        ids, weights = np.full((4, 3), -1, np.int32), np.zeros((4, 3), np.float32)
        full = {**ROUTES, "k": 3, "score": score}
        layer.cpu.ops()["route_topk"](
            layer.tensor(logits), None, out=(layer.tensor(ids), layer.tensor(weights)), stream=Stream(), ws=None, **full
        )
        assert all(len(set(row)) == 3 and set(row) <= set(range(4)) for row in ids.tolist())


def test_concat_puts_strided_heads_side_by_side():
    layer = Experts(threads=2)
    whole = np.arange(5 * 2 * 12, dtype=np.float32).reshape(5, 2, 12)
    base = layer.tensor(whole.reshape(5, 24))
    x, y = (Tensor(base.buffer, 4 * at, (5, 2, width), "f32", (24, 12, 1)) for at, width in ((7, 5), (0, 7)))
    out = np.full((5, 2, 12), np.nan, np.float32)
    layer.cpu.ops()["concat"](x, y, out=layer.tensor(out), stream=Stream(), ws=None)
    assert np.array_equal(out, np.concatenate([whole[..., 7:], whole[..., :7]], axis=-1))


def test_an_expert_that_a_row_names_twice_counts_once_and_nothing_is_overwritten():
    layer = Experts(("q8_0", "q8_0", "q8_0"), shape=(4, 64, 64), threads=2)
    rng = np.random.default_rng(0)
    rows = 1100  # more than a block of results holds
    x = rng.standard_normal((rows, 64)).astype(np.float32)
    ids, weights = np.full((rows, 4), 1, np.int32), np.full((rows, 4), 0.25, np.float32)
    once = layer.run(x, ids[:, :1].copy(), weights[:, :1].copy())
    assert np.array_equal(layer.run(x, ids, weights), once)
    assert np.array_equal(layer.run(x[:1], ids[:1], weights[:1]), once[:1])
