"""The linear op of cpu_avx: every variant's bits equal the scalar specification, and the specification equals mathematics.

Variants that this machine cannot run are compiled with plain definitions of their vector primitives (-DFL_EMULATE) and compared too.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fastllm.api import FORMATS
from fastllm.backends.cpu_avx import _native, pack
from fastllm.core import _kernels

NATIVE = Path(_native.__file__).parent / "native"
RUNNABLE = [name for i, name in enumerate(_native.isa_names()) if _native.isa_missing(i) is None]
BLOCK_FORMATS = [name for name in pack.LAYOUTS if not FORMATS[name].plain]
PLAIN_FORMATS = [name for name in pack.LAYOUTS if FORMATS[name].plain]
HALVES = {
    "q4_1": (0, 2),
    "q5_1": (0, 2),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "mxfp4": (),
}


def file_bytes(rng: np.random.Generator, format: str, count: int) -> np.ndarray:
    """Random bytes of `count` values, u8: any codes, scales of either sign around 0.01."""
    spec = FORMATS[format]
    if spec.plain:
        return np.asarray(_kernels.encode(format, rng.standard_normal(count, np.float32)))
    blocks = rng.integers(0, 256, (count // spec.block, spec.block_bytes), dtype=np.uint8)
    for at in HALVES.get(format, (0,)):
        scales = (rng.standard_normal(len(blocks)) * 0.01).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    if format == "mxfp4":
        blocks[:, 0] = rng.integers(115, 128, len(blocks))
    if spec.zero_point:
        blocks[:, 2] = rng.integers(0, 16, len(blocks))
    return blocks.reshape(-1)


class Case:
    """A weight in its file format and packed, and activations with outliers."""

    def __init__(self, seed: int, format: str, T: int, N: int, K: int) -> None:
        rng = np.random.default_rng(seed)
        self.format, self.layout, self.T, self.N, self.K = format, pack.LAYOUTS[format], T, N, K
        self.source = file_bytes(rng, format, N * K)
        self.packed = np.zeros(_native.packed_bytes(self.layout, N, K), np.uint8)
        _native.linear_pack(self.layout, N, K, self.source, self.packed)
        self.x = rng.standard_normal((T, K), np.float32) * np.exp(rng.standard_normal((T, K), np.float32))
        self.bias = rng.standard_normal(N, np.float32)
        self.before = rng.standard_normal((T, N), np.float32)

    def decoded(self) -> np.ndarray:
        """[N, K] f32."""
        return np.asarray(_kernels.decode(self.format, self.source, self.N * self.K)).reshape(self.N, self.K)

    def reference(
        self, exact: bool = False, bias: bool = False, accumulate: bool = False, isa: str = "baseline"
    ) -> np.ndarray:
        """y [T, N] by the scalar specification; isa: whose, since what bf16 weights are multiplied with depends on it."""
        y, b = self.before.copy(), self.bias if bias else None
        if isa == "amx" and self.format == "bf16" and not exact:
            sums = self.tile_sums() + self.bias if bias else self.tile_sums()
            return y + sums if accumulate else sums
        bf16 = isa in ("avx512", "amx")
        _native.linear_reference(self.layout, self.N, self.packed, self.x, y, b, exact, accumulate, bf16)
        return y

    def tile_sums(self) -> np.ndarray:
        """y [T, N] of bf16 weights by TDPBF16PS: of 32 k each, products of even and of odd k are summed apart, from zero."""
        x, w = rounded(self.x), self.decoded()
        y = np.zeros((self.T, self.N), np.float32)
        for k0 in range(0, self.K, 32):
            parts = np.zeros((2, self.T, self.N), np.float32)
            for k in range(k0, min(k0 + 32, self.K)):
                parts[k % 2] += np.outer(x[:, k], w[:, k])  # a product of two bf16 is an f32: the sum is a fused multiply-add
            y += parts[0] + parts[1]
        return y

    def run(
        self,
        isa: str,
        exact: bool = False,
        bias: bool = False,
        accumulate: bool = False,
        strips: tuple[int, ...] = (),
        rows: tuple[int, ...] = (),
    ) -> np.ndarray:
        """y [T, N] by a variant."""
        y = self.before.copy()
        _native.linear_run(
            isa, self.layout, self.N, self.packed, self.x, y, self.bias if bias else None, exact, accumulate, strips, rows
        )
        return y


def rounded(x: np.ndarray) -> np.ndarray:
    """To bf16, to nearest even."""
    return np.asarray(_kernels.decode("bf16", _kernels.encode("bf16", x.reshape(-1)), x.size)).reshape(x.shape)


def sizes(seed: int, format: str) -> tuple[int, int, int]:
    """T, N, K of a random case."""
    rng = np.random.default_rng(seed)
    block = max(FORMATS[format].block, 1)
    T = int(rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 33, 70, 150, 230]))
    N = int(rng.integers(1, 201))
    K = block * int(rng.integers(1, 2048 // block + 1)) if block > 1 else int(rng.integers(1, 600))
    return T, N, K


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes()


# packing ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", RUNNABLE)
@pytest.mark.parametrize("format", pack.LAYOUTS)
def test_packing_loses_nothing(format: str, isa: str) -> None:
    case = Case(1, format, 1, 45, 512)
    want, out = case.decoded(), np.empty(case.K, np.float32)
    for n in range(case.N):
        _native.linear_unpack_row(isa, case.layout, case.N, case.packed, n, out)
        assert same_bits(out, want[n]), f"row {n}"


@pytest.mark.parametrize("format", pack.LAYOUTS)
def test_strips_can_be_packed_apart(format: str) -> None:
    case = Case(2, format, 1, 100, 512)
    row, strip = len(case.source) // 100, len(case.packed) // 4
    apart = np.full_like(case.packed, 255)
    for first, last in ((2, 4), (0, 2)):
        rows = case.source[row * 32 * first : row * min(32 * last, 100)]
        _native.linear_pack(case.layout, 100, case.K, rows, apart[strip * first : strip * last], first, last)
    assert same_bits(apart, case.packed)


@pytest.mark.parametrize("rows", [1, 45, 64])
@pytest.mark.parametrize("format", pack.LAYOUTS)
def test_unpacking_gives_the_bytes_of_the_file(format: str, rows: int) -> None:
    rng = np.random.default_rng(8)
    source = rng.integers(0, 256, FORMATS[format].nbytes(rows * 512), dtype=np.uint8)  # any bytes: nothing is read as a number
    packed = np.zeros(_native.packed_bytes(pack.LAYOUTS[format], rows, 512), np.uint8)
    _native.linear_pack(pack.LAYOUTS[format], rows, 512, source, packed)
    back = np.full_like(source, 85)
    _native.linear_unpack(pack.LAYOUTS[format], rows, 512, packed, back)
    assert same_bits(back, source)
    with pytest.raises(ValueError, match="bytes packed"):
        _native.linear_unpack(pack.LAYOUTS[format], rows, 512, packed[:-1], back)


def test_packed_size_stays_close_to_the_file() -> None:
    for format, layout in pack.LAYOUTS.items():
        ratio = _native.packed_bytes(layout, 64, 1024) / FORMATS[format].nbytes(64 * 1024)
        assert 1.0 <= ratio < 1.04, format


def test_what_cannot_be_packed_is_refused() -> None:
    layout = pack.LAYOUTS["q4_k"]
    assert _native.packed_bytes(layout, 8, 255) == 0
    assert _native.packed_bytes(layout, 0, 256) == 0
    assert _native.packed_bytes(layout, 2**31, 256) == 0
    assert _native.packed_bytes("q9_9.s32", 8, 256) == 0
    assert pack.layout_for((8, 300), "q4_k", frozenset({"linear"})) is None
    assert pack.layout_for((8, 256), "i64", frozenset({"linear"})) is None
    assert pack.layout_for((2, 8, 256), "q4_k", frozenset({"linear"})) is None
    assert pack.layout_for((8, 256), "q4_k", frozenset({"linear", "mul"})) is None
    assert pack.layout_for((8, 256), "f16", frozenset({"embed"})) is None
    good, packed = np.zeros(8 * 144, np.uint8), np.zeros(_native.packed_bytes(layout, 8, 256), np.uint8)
    _native.linear_pack(layout, 8, 256, good, packed)
    for src, dst in ((good[:-1], packed), (good, packed[:-1])):
        with pytest.raises(ValueError, match="bytes"):
            _native.linear_pack(layout, 8, 256, src, dst)
    with pytest.raises(ValueError, match="cannot be packed"):
        _native.linear_pack(layout, 8, 128, good, packed)
    with pytest.raises(ValueError, match="no strips"):
        _native.linear_pack(layout, 8, 256, good, packed, 0, 2)


def test_a_layout_is_named_after_its_format() -> None:
    got = pack.layout_for((100, 512), "q5_k", frozenset({"linear", "embed"}))
    assert got is not None
    assert (got.id, got.version, got.format, got.shape) == ("q5_k.s32", pack.VERSION, "q5_k", (100, 512))
    assert got.nbytes == _native.packed_bytes(got.id, 100, 512)


# arithmetic ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_integer_sums_are_the_product_of_decoded_weight_and_quantised_activation(format: str) -> None:
    """Activations have a scale for each 32 of a row, whatever the groups of the weights."""
    case = Case(3, format, 6, 40, 768)
    assert _native.prepare_kind(_native.layout_number(case.layout), False) == 32
    groups = case.x.reshape(case.T, -1, 32)
    top = np.abs(groups).max(-1, keepdims=True)
    codes = np.rint(groups * (np.float32(127) / top))
    quantised = (codes.astype(np.float64) * (top / np.float32(127))).reshape(case.T, case.K)
    weight = case.decoded().astype(np.float64)
    want = quantised @ weight.T
    terms = (
        np.abs(quantised) @ np.abs(weight).T
    )  # a format with a minimum adds and subtracts more than its decoded weights show
    slack = 8.0 if format in ("q4_1", "q5_1", "q2_k", "q4_k", "q5_k") or FORMATS[format].zero_point else 1.0
    assert np.all(np.abs(case.reference() - want) <= slack * terms * 2.0**-23 * 6)


@pytest.mark.parametrize("format", pack.LAYOUTS)
def test_exact_mode_is_the_product_of_decoded_weight_and_activation(format: str) -> None:
    case = Case(4, format, 5, 40, 768)
    weight, x = case.decoded().astype(np.float64), case.x.astype(np.float64)
    want, terms = x @ weight.T, np.abs(x) @ np.abs(weight).T
    assert np.all(np.abs(case.reference(exact=True) - want) <= terms * 2.0**-23 * 8)


@pytest.mark.parametrize("isa", RUNNABLE)
@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_block_formats_give_the_bits_of_the_specification(format: str, isa: str) -> None:
    for seed in range(6):
        T, N, K = sizes(seed, format)
        case = Case(seed, format, T, N, K)
        options = {"bias": bool(seed & 1), "accumulate": bool(seed & 2)}
        assert same_bits(case.run(isa, **options), case.reference(**options)), (T, N, K)


@pytest.mark.parametrize("isa", RUNNABLE)
@pytest.mark.parametrize("format", ["q4_0", "q4_1", "q6_k", "q2_k", "mxfp4", "int4g64s", "int4g128", "int8g128"])
def test_any_number_of_rows_gives_the_bits_of_the_specification(format: str, isa: str) -> None:
    """Kernels take up to six rows at a time, and how they share the rows depends on their number; N: full strips and one that is not."""
    case = Case(8, format, 193, 70, 512)
    x, before = case.x, case.before
    want = case.reference(accumulate=True)
    for rows in (*range(4, 8), *range(11, 26), 31, 32, 36, 193):
        case.x, case.before = x[:rows], before[:rows]
        assert same_bits(case.run(isa, accumulate=True), want[:rows]), rows


@pytest.mark.parametrize("isa", RUNNABLE)
def test_rows_too_long_to_be_laid_out_together_give_the_bits_of_the_specification(isa: str) -> None:
    case = Case(9, "q4_0", 21, 32, 98304)  # six rows of them fit in the scratch of avx512: the last block has three
    assert same_bits(case.run(isa), case.reference())


@pytest.mark.parametrize("isa", RUNNABLE)
@pytest.mark.parametrize("format", pack.LAYOUTS)
def test_f32_sums_give_the_bits_of_the_specification(format: str, isa: str) -> None:
    for seed in range(4):
        T, N, K = sizes(seed, format)
        case = Case(seed, format, T, N, K)
        got, want = case.run(isa, exact=True, bias=True), case.reference(exact=True, bias=True)
        if isa == "baseline":  # rounds the products of f32 sums, as its instruction set does
            scale = np.abs(case.x) @ np.abs(case.decoded()).T + 4
            assert np.all(np.abs(got - want) <= scale * 2.0**-20), (T, N, K)
        else:
            assert same_bits(got, want), (T, N, K)


@pytest.mark.parametrize("isa", [name for name in RUNNABLE if _native.multiplies_bf16(name)])
def test_bf16_weights_take_bf16_activations_and_give_the_bits_of_the_specification(isa: str) -> None:
    for seed in range(12):
        T, N, K = sizes(seed, "bf16")
        case = Case(seed, "bf16", T, N, K + seed % 3 * 256)
        options = {"bias": bool(seed & 1), "accumulate": bool(seed & 2)}
        assert same_bits(case.run(isa, **options), case.reference(isa=isa, **options)), (T, N, K)
        x, w = rounded(case.x).astype(np.float64), case.decoded().astype(np.float64)
        assert np.all(np.abs(case.run(isa) - x @ w.T) <= 2.0**-23 * 16 * (np.abs(x) @ np.abs(w).T)), (T, N, K)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("isa", RUNNABLE)
@pytest.mark.parametrize("format", pack.LAYOUTS)
def test_a_row_does_not_depend_on_its_company_nor_on_how_work_is_cut(format: str, isa: str, exact: bool) -> None:
    case = Case(5, format, 37, 150, 512)
    whole = case.run(isa, exact=exact, bias=True)
    assert same_bits(case.run(isa, exact=exact, bias=True, strips=(1, 2, 4), rows=(5, 6, 20)), whole)
    x = case.x
    for rows in ([0], [36], [3, 4], [7, 1, 30], [9, 8, 7, 6], [11, 12, 13, 14, 15], list(range(20, 37))):
        case.x, case.T, case.before = np.ascontiguousarray(x[rows]), len(rows), np.zeros((len(rows), case.N), np.float32)
        assert same_bits(case.run(isa, exact=exact, bias=True), np.ascontiguousarray(whole[rows])), rows


@pytest.mark.parametrize("isa", RUNNABLE)
@pytest.mark.parametrize("format", ["q4_0", "q8_0", "q6_k", "q4_k", "int4g256", "int4g256s", "int8g128"])
def test_largest_codes_do_not_overflow(format: str, isa: str) -> None:
    case = Case(6, format, 5, 33, 512)
    case.x[:] = np.where(np.arange(case.K) % 3 == 0, -1.0, 1.0)
    for fill in (0x00, 0x80, 0xFF, 0x7F):
        blocks = case.source.reshape(-1, FORMATS[format].block_bytes)
        blocks[:] = fill
        for at in HALVES.get(format, (0,)):
            blocks[:, at : at + 2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
        _native.linear_pack(case.layout, case.N, case.K, case.source, case.packed)
        assert same_bits(case.run(isa), case.reference())


@pytest.mark.parametrize("isa", RUNNABLE)
@pytest.mark.parametrize("format", ["q4_1", "int4g64", "int8g128"])
def test_rows_of_zeros_and_of_tiny_and_non_finite_values(format: str, isa: str) -> None:
    case = Case(7, format, 6, 64, 128)
    case.x[0] = 0
    case.x[1] *= 1e-38
    case.x[2, 5], case.x[3, 70], case.x[4, 127] = np.nan, np.inf, -np.inf
    got, want = case.run(isa), case.reference()
    assert np.all(got[0] == 0)
    assert np.all(np.isnan(got[2:5]))
    assert same_bits(got[[0, 1, 5]], want[[0, 1, 5]])


# variants of other machines -------------------------------------------------------------------------------------------------


class _Weight(ctypes.Structure):
    _fields_ = [("layout", ctypes.c_int32), ("N", ctypes.c_int32), ("K", ctypes.c_int32), ("data", ctypes.c_void_p)]


class _Acts(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("rows", ctypes.c_int32), ("K", ctypes.c_int32), ("data", ctypes.c_void_p)]


class _Target(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("bias", "up_bias", "add", "y")] + [
        ("ldadd", ctypes.c_size_t), ("ldy", ctypes.c_size_t), ("codes", ctypes.c_void_p), ("act", ctypes.c_int32),
    ]  # fmt: skip


class _Ops(ctypes.Structure):
    _fields_ = [
        ("prepare", ctypes.CFUNCTYPE(None, ctypes.POINTER(_Acts), ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int)),
        (
            "linear",
            ctypes.CFUNCTYPE(
                None, ctypes.POINTER(_Weight), ctypes.POINTER(_Weight), ctypes.POINTER(_Acts), ctypes.POINTER(_Target),
                ctypes.c_int, ctypes.c_int, ctypes.c_void_p,
            ),
        ),
        ("unpack_row", ctypes.CFUNCTYPE(None, ctypes.POINTER(_Weight), ctypes.c_int64, ctypes.c_void_p)),
        ("bf16", ctypes.c_int32),
    ]  # fmt: skip


@pytest.fixture(scope="module", params=["avx512", "amx"])
def emulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> _Ops:
    """The kernels of a variant with plain definitions of its vector primitives."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build emulated kernels with")
    if not (NATIVE / "kernels" / "linear.c").exists():
        pytest.skip("the sources of the kernels are not installed here")
    library = tmp_path_factory.mktemp("emulated") / f"{request.param}.so"
    flags = ["-O2", "-std=gnu11", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-Werror"]
    flags += [
        "-Wno-unused-function",
        "-Wno-psabi",
        "-DFL_EMULATE",
        f"-DFL_VARIANT={request.param}",
        f"-DFL_{request.param.upper()}=1",
        f"-I{NATIVE}",
    ]
    sources = [str(p) for p in sorted(NATIVE.glob("kernels/linear*.c"))] + [str(NATIVE / "kernels" / "elementwise.c")]
    subprocess.run([compiler, *flags, *sources, "-o", str(library), "-lm"], check=True)
    ops = _Ops.in_dll(ctypes.CDLL(str(library)), f"fl_linear_table_{request.param}")
    ops.isa = request.param
    return ops


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("format", pack.LAYOUTS)
def test_emulated_variants_give_the_bits_of_the_specification(format: str, exact: bool, emulated: _Ops) -> None:
    for seed in range(4):
        T, N, K = sizes(seed, format)
        case = Case(seed, format, T, N, K)
        number = _native.layout_number(case.layout)
        kind = _native.prepare_kind(number, exact, bool(emulated.bf16))
        prepared = np.zeros(_native.prepared_bytes(kind, T, K), np.uint8)
        scratch = np.zeros(_native.linear_scratch() + 64, np.uint8)
        weight = _Weight(number, N, K, case.packed.ctypes.data)
        acts, y = _Acts(kind, T, K, prepared.ctypes.data), np.zeros((T, N), np.float32)
        emulated.prepare(acts, case.x.ctypes.data, K, 0, T)
        start = scratch.ctypes.data + -scratch.ctypes.data % 64
        target = _Target(None, None, None, y.ctypes.data, N, N, None, -1)
        emulated.linear(weight, None, acts, target, 0, (N + 31) // 32, start)
        assert same_bits(y, case.reference(exact=exact, isa=emulated.isa)), (T, N, K)
        row = np.empty(K, np.float32)
        emulated.unpack_row(weight, N - 1, row.ctypes.data)
        assert same_bits(row, case.decoded()[-1])
