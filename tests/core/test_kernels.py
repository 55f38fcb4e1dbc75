"""Block codecs, conversions and the random generator of `core/_kernels`, against independent references.

Decoded values are compared with those of ggml's own Python package (`scripts/make_codec_vectors.py` wrote them), conversions
with numpy's, the generator with the vectors that its authors published.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastllm.core import _kernels as kernels
from fastllm.core.errors import ShapeError, UnsupportedError
from fastllm.core.quant import FORMATS

VECTORS = np.load(Path(__file__).parent / "data" / "codec_vectors.npz")
BLOCK_FORMATS = [name for name, spec in FORMATS.items() if spec.ggml is not None and spec.block > 1]
ENCODED = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"]


def assert_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal bit for bit, minus zero included; NaN only has to be NaN."""
    assert found.dtype == expected.dtype == np.float32
    assert found.shape == expected.shape
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_decoded_blocks_have_the_bits_that_ggml_gives(name: str) -> None:
    data, values = VECTORS[f"{name}.data"], VECTORS[f"{name}.values"]
    assert np.isfinite(values).sum() > 300
    assert_same_bits(kernels.decode(name, data, values.size), values)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_blocks_decode_alone_as_in_a_row(name: str) -> None:
    spec, data = FORMATS[name], VECTORS[f"{name}.data"]
    whole = kernels.decode(name, data, data.size // spec.block_bytes * spec.block)
    for b in range(data.size // spec.block_bytes):
        one = kernels.decode(name, data[b * spec.block_bytes : (b + 1) * spec.block_bytes], spec.block)
        assert_same_bits(one, whole[b * spec.block : (b + 1) * spec.block])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("f32", "<f4"), ("f16", "<f2"), ("f64", "<f8"), ("i8", "i1"), ("i16", "<i2"), ("i32", "<i4"), ("i64", "<i8")],
)
def test_plain_formats_decode_as_numpy_converts_them(name: str, dtype: str) -> None:
    rng = np.random.default_rng(7)
    if dtype[-2] == "i":
        info = np.iinfo(dtype)
        values = np.concatenate([rng.integers(info.min, info.max, 101, dtype), [info.min, info.max, 0, 1]]).astype(dtype)
    else:
        values = np.concatenate([rng.standard_normal(101) * 100, [0.0, -0.0, np.inf, -np.inf, np.nan]]).astype(dtype)
    assert_same_bits(kernels.decode(name, values.view(np.uint8), values.size), values.astype(np.float32))


def test_every_format_of_the_table_has_a_decoder() -> None:
    for name, spec in FORMATS.items():
        assert kernels.decode(name, np.zeros(3 * spec.block_bytes, np.uint8), 3 * spec.block).shape == (3 * spec.block,)
        assert kernels.decode(name, np.zeros(0, np.uint8), 0).shape == (0,)


@pytest.mark.parametrize("name", list(FORMATS))
def test_a_wrong_number_of_bytes_is_refused(name: str) -> None:
    spec = FORMATS[name]
    for size in (spec.block_bytes * 2 - 1, spec.block_bytes * 2 + 1, 0):
        with pytest.raises(ShapeError, match=f"{spec.block_bytes * 2} bytes"):
            kernels.decode(name, np.zeros(size, np.uint8), spec.block * 2)
        with pytest.raises(ShapeError, match=f"{spec.block_bytes * 2} bytes"):
            kernels.decode_into(name, np.zeros(size, np.uint8), np.zeros(spec.block * 2, np.float32))
    if spec.block > 1:
        with pytest.raises(ShapeError, match="whole number"):
            kernels.decode(name, np.zeros(spec.block_bytes, np.uint8), spec.block - 1)


def test_a_huge_count_is_refused_before_memory_is_taken() -> None:
    with pytest.raises(ShapeError):
        kernels.decode("q4_0", np.zeros(18, np.uint8), 2**60)
    with pytest.raises(ShapeError):
        kernels.decode("f32", np.zeros(0, np.uint8), -1)


def test_wrong_arguments_are_named() -> None:
    data, out = np.zeros(18, np.uint8), np.zeros(32, np.float32)
    with pytest.raises(UnsupportedError, match="q9_9"):
        kernels.decode("q9_9", data, 32)
    with pytest.raises(ShapeError, match="data has dtype int8"):
        kernels.decode("q4_0", data.view(np.int8), 32)
    with pytest.raises(ShapeError, match="data must be contiguous"):
        kernels.decode("q4_0", np.zeros(36, np.uint8)[::2], 32)
    with pytest.raises(ShapeError, match="data has 2 dimensions"):
        kernels.decode("q4_0", data.reshape(2, 9), 32)
    with pytest.raises(ShapeError, match="out has dtype float64"):
        kernels.decode_into("q4_0", data, np.zeros(32))
    with pytest.raises(ShapeError, match="out must be contiguous"):
        kernels.decode_into("q4_0", data, np.zeros(64, np.float32)[::2])
    out.flags.writeable = False
    with pytest.raises(ShapeError, match="out is read-only"):
        kernels.decode_into("q4_0", data, out)


def test_decode_into_fills_row_blocks_and_nothing_else() -> None:
    data, values = VECTORS["q4_k.data"], VECTORS["q4_k.values"]
    out = np.full(2 + values.size, 7.5, np.float32)
    for row in range(5):
        kernels.decode_into("q4_k", data[144 * row : 144 * (row + 1)], out[1 + 256 * row : 1 + 256 * (row + 1)])
    assert_same_bits(out[1:-1], values)
    assert out[0] == out[-1] == 7.5
    shaped = np.empty((5, 256), np.float32)
    data.flags.writeable = False
    kernels.decode_into("q4_k", data, shaped)
    assert_same_bits(shaped.reshape(-1), values)


# ---- encoders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENCODED)
def test_encoded_blocks_have_the_bytes_that_ggml_writes(name: str) -> None:
    found = kernels.encode(name, VECTORS["encode.values"])
    np.testing.assert_array_equal(found, VECTORS[f"encode.{name}"])


@pytest.mark.parametrize("name", ENCODED)
def test_encoding_decoded_values_loses_at_most_the_rounding_of_the_scale(name: str) -> None:
    values = VECTORS["encode.values"][:12]
    once = kernels.decode(name, kernels.encode(name, values), values.size).reshape(values.shape)
    step = (values.max(1) - values.min(1)) / (7 if name == "q4_0" else 14 if name == "q4_1" else 15)
    assert (np.abs(once - values) <= step[:, None]).all()


def test_encoding_refuses_what_it_cannot_hold() -> None:
    values = np.zeros(32, np.float32)
    for bad in (np.nan, np.inf, -np.inf):
        values[5] = bad
        with pytest.raises(UnsupportedError, match="NaN or infinity"):
            kernels.encode("q8_0", values)
    with pytest.raises(ShapeError, match="rows of 33"):
        kernels.encode("q8_0", np.zeros(33, np.float32))
    with pytest.raises(ShapeError, match="rows of 16"):
        kernels.encode("q8_0", np.zeros((2, 16), np.float32))
    with pytest.raises(UnsupportedError, match="no encoder for q4_k"):
        kernels.encode("q4_k", np.zeros(256, np.float32))


def test_tiny_blocks_encode_to_zero_scales_without_arithmetic_errors() -> None:
    values = np.full(32, 1e-40, np.float32)
    for name in ENCODED:
        decoded = kernels.decode(name, kernels.encode(name, values), 32)
        assert (np.abs(decoded) < 1e-6).all()


# ---- conversions -------------------------------------------------------------------------------------------------------


def test_all_halves_convert_exactly() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    found = kernels.f16_to_f32(bits)
    assert_same_bits(found, bits.view(np.float16).astype(np.float32))
    assert_same_bits(kernels.f16_to_f32(bits.view(np.float16)), found)
    back = kernels.f32_to_f16(found).view(np.uint16)
    number = ~np.isnan(found)
    np.testing.assert_array_equal(back[number], bits[number])
    assert np.isnan(back[~number].view(np.float16)).all()


def half_edges() -> np.ndarray:
    """f32 values at, just below and just above every midpoint between neighbouring halves, with both signs."""
    halves = np.arange(0x7C01, dtype=np.uint16).view(np.float16).astype(np.float64)
    halves[-1] = 65536.0  # where the next half would be: the midpoint decides about infinity
    middle = ((halves[:-1] + halves[1:]) / 2).astype(np.float32)
    edges = np.concatenate([middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))])
    return np.concatenate([edges, -edges])


def test_f32_rounds_to_the_nearest_half_even_at_every_midpoint() -> None:
    values = half_edges()
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    np.testing.assert_array_equal(kernels.f32_to_f16(values).view(np.uint16), expected.view(np.uint16))


@settings(max_examples=50, derandomize=True, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_f32_to_f16_equals_numpy_on_random_bits(seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 2**32, 999, dtype=np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        expected = values.astype(np.float16)
    found = kernels.f32_to_f16(values)
    nan = np.isnan(values)
    np.testing.assert_array_equal(found.view(np.uint16)[~nan], expected.view(np.uint16)[~nan])
    assert np.isnan(found[nan]).all()


def test_f32_to_bf16_rounds_to_nearest_even_and_keeps_nan() -> None:
    values, expected = VECTORS["bf16.input"], VECTORS["bf16.data"].view(np.uint16)
    np.testing.assert_array_equal(kernels.f32_to_bf16(values), expected)
    cases = {0x3F808000: 0x3F80, 0x3F818000: 0x3F82, 0x3F808001: 0x3F81, 0x7F7FFFFF: 0x7F80, 0x7F800001: 0x7FC0,
             0xFFFFFFFF: 0xFFFF, 0x7F800000: 0x7F80, 0x80000000: 0x8000}  # fmt: skip
    bits = np.array(list(cases), np.uint32).view(np.float32)
    assert kernels.f32_to_bf16(bits).tolist() == list(cases.values())
    np.testing.assert_array_equal(kernels.encode("bf16", values).view(np.uint16), expected)


def test_bf16_bits_are_the_upper_half_of_f32() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    assert_same_bits(kernels.bf16_to_f32(bits), (bits.astype(np.uint32) << 16).view(np.float32))
    assert_same_bits(kernels.decode("bf16", bits.view(np.uint8), bits.size), kernels.bf16_to_f32(bits))


def test_conversions_keep_the_shape_and_refuse_other_dtypes() -> None:
    values = np.ones((2, 3, 4), np.float32)
    assert kernels.f32_to_f16(values).shape == kernels.f32_to_bf16(values).shape == (2, 3, 4)
    assert kernels.f32_to_f16(np.zeros((0, 3), np.float32)).shape == (0, 3)
    for convert in (kernels.f32_to_f16, kernels.f32_to_bf16, kernels.f16_to_f32, kernels.bf16_to_f32):
        with pytest.raises(ShapeError, match="float64"):
            convert(np.zeros(3))


# ---- random numbers ----------------------------------------------------------------------------------------------------

KNOWN_ANSWERS = [  # philox4x32, 10 rounds: kat_vectors of Random123, the library of the paper
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> np.ndarray:
    """Hexadecimal words as uint32."""
    return np.array([int(word, 16) for word in text.split()], np.uint32)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter: str, key: str, expected: str) -> None:
    np.testing.assert_array_equal(kernels.philox4x32(words(counter), words(key)), words(expected))


def test_uniform_numbers_are_the_upper_bits_of_philox_at_their_counter() -> None:
    seed, stream, position = 0x299F31D0A4093822, 0x0370734413198A2E, 0x85A308D3243F6A88
    found = kernels.uniform(seed, stream, np.array([[position]], np.uint64))
    assert found.shape == (1, 1)
    assert found[0, 0] == (0xD16CFE0994FDCCEB >> 11) / 2**53


def test_uniform_numbers_lie_in_the_unit_interval_and_do_not_repeat() -> None:
    found = kernels.uniform(1, 2, np.arange(100_000, dtype=np.uint64))
    assert found.min() >= 0.0
    assert found.max() < 1.0
    assert abs(found.mean() - 0.5) < 0.005
    assert np.abs(np.histogram(found, 16, (0, 1))[0] - 6250).max() < 6 * 77
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.02
    assert len(np.unique(found)) == 100_000
    for other in ((1, 3), (2, 2), (1 << 32, 2), (1, 2 << 32)):
        assert (kernels.uniform(*other, np.arange(1000, dtype=np.uint64)) != found[:1000]).all()


@pytest.mark.parametrize("header", sorted((Path(__file__).parents[2] / "core").glob("*.h")), ids=lambda path: path.name)
def test_every_header_includes_what_it_uses(header: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to read headers with")
    subprocess.run([compiler, "-std=gnu11", "-w", "-fsyntax-only", "-x", "c", "-"], input=f'#include "{header}"\n', text=True, check=True)
