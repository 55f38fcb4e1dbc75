"""The oracle's own decoder of every block format, straight from the format's definition, in f64. Imports only numpy.

`decode(format, bytes, count)` gives exact values: every scale is an f16 (or a power of two) and every code a small integer, so f64
holds the products. `random_blocks` makes bytes with any codes and sane scales, which is what kernels are tested with.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .numbers import Numbers

__all__ = ["BLOCK_BYTES", "OWN", "PLAIN_BYTES", "SCALES", "ZERO_POINT", "decode", "encode_plain", "random_blocks"]

Array = np.ndarray
PLAIN_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
BLOCK_BYTES = {
    "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q8_0": (32, 34), "q2_k": (256, 84), "q3_k": (256, 110),
    "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210), "iq4_nl": (32, 18), "iq4_xs": (256, 136), "mxfp4": (32, 17),
    "int4g32": (32, 19), "int4g64": (64, 35), "int4g128": (128, 67), "int4g256": (256, 131), "int4g64s": (64, 34), "int4g128s": (128, 66),
    "int4g256s": (256, 130), "int8g64": (64, 66), "int8g128": (128, 130), "fp8g128": (128, 132),
}  # fmt: skip
"""format -> (values of a block, bytes of a block)."""
OWN = tuple(name for name in BLOCK_BYTES if name.startswith("int"))
"""Our own group formats: int4gN w = s · (q − z), int4gNs w = s · (q − 8), int8gN w = s · q, with s f16 at byte 0 and z at byte 2."""
ZERO_POINT = tuple(name for name in OWN if name.startswith("int4") and not name.endswith("s"))
SCALES = {"q4_1": (0, 2), "q5_1": (0, 2), "q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "mxfp4": (), "fp8g128": ()}
"""format -> bytes of a block at which an f16 scale or minimum begins, where it is not byte 0 alone."""
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float64)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float64)


def random_blocks(numbers: Numbers, format: str, count: int) -> Array:
    """u8 bytes of `count` values: every code occurs, scales of either sign around 0.02."""
    values, nbytes = BLOCK_BYTES[format]
    blocks = numbers.bytes(count // values * nbytes).reshape(-1, nbytes)
    for at in SCALES.get(format, (0,)):
        scale = (0.01 + 0.02 * np.abs(numbers.normal(len(blocks)))) * np.where(numbers.uniform(len(blocks)) < 0.5, -1, 1)
        blocks[:, at : at + 2] = scale.astype("<f2").view(np.uint8).reshape(-1, 2)
    if format in ZERO_POINT:  # one in eight is any byte
        blocks[:, 2] = np.where(numbers.uniform(len(blocks)) < 0.125, blocks[:, 2], blocks[:, 2] & 15)
    if format == "mxfp4":
        blocks[:, 0] = 118 + numbers.integers(len(blocks), 0, 9)
    if format == "fp8g128":  # codes without NaN; scales of 24 bits
        blocks[:, 4:] = np.where(blocks[:, 4:] & 127 == 127, blocks[:, 4:] & 128, blocks[:, 4:])
        blocks[:, :4] = (0.0005 * numbers.normal(len(blocks))).astype("<f4").view(np.uint8).reshape(-1, 4)
    return blocks.reshape(-1)


def encode_plain(format: str, values: Array) -> Array:
    """f32 values as u8 bytes in f32, f16 or bf16 (to nearest, ties to even)."""
    f32 = np.ascontiguousarray(values, np.float32)
    if format == "f32":
        return f32.reshape(-1).view(np.uint8)
    if format == "f16":
        return f32.astype(np.float16).reshape(-1).view(np.uint8)
    bits = f32.reshape(-1).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16).view(np.uint8)


def decode(format: str, data: Array, count: int) -> Array:
    """f64 [count]."""
    data = np.ascontiguousarray(data, np.uint8).reshape(-1)
    if format == "f32":
        return data.view(np.float32).astype(np.float64)
    if format == "f16":
        return data.view(np.float16).astype(np.float64)
    if format == "bf16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    values, nbytes = BLOCK_BYTES[format]
    return _DECODERS[format](data.reshape(count // values, nbytes)).reshape(-1)


def _half(b: Array, at: int) -> Array:
    """f16 at byte `at` of every block -> f64 [n, 1]."""
    return np.ascontiguousarray(b[:, at : at + 2]).view("<f2").astype(np.float64)


def _nibbles(b: Array) -> Array:
    """[n, 16] bytes -> [n, 32] codes: all low nibbles, then all high ones."""
    return np.concatenate([b & 15, b >> 4], axis=1).astype(np.int64)


def _bits(b: Array) -> Array:
    """[n, 4] bytes -> [n, 32] bits, lowest first."""
    return np.unpackbits(b, axis=1, bitorder="little").astype(np.int64)


def _q2_k(b: Array) -> Array:
    d, dmin = _half(b, 80), _half(b, 82)
    out = np.empty((len(b), 256))
    for i in range(256):
        half, quarter, column = i // 128, i % 128 // 32, i % 32
        group = i // 16
        code = b[:, 16 + 32 * half + column] >> (2 * quarter) & 3
        out[:, i] = (d[:, 0] * (b[:, group] & 15)) * code - dmin[:, 0] * (b[:, group] >> 4)
    return out


def _q3_k(b: Array) -> Array:
    d, s = _half(b, 108)[:, 0], b[:, 96:108].astype(np.int64)
    out = np.empty((len(b), 256))
    for i in range(256):
        half, quarter, column, group = i // 128, i % 128 // 32, i % 32, i // 16
        low = s[:, group % 8] >> (4 * (group // 8)) & 15
        scale = (low | (s[:, 8 + group % 4] >> (2 * (group // 4)) & 3) << 4) - 32
        high = b[:, column].astype(np.int64) >> (i // 32) & 1
        code = (b[:, 32 + 32 * half + column].astype(np.int64) >> (2 * quarter) & 3) - 4 * (1 - high)
        out[:, i] = d * scale * code
    return out


def _k4_scales(p: Array) -> tuple[Array, Array]:
    """12 bytes -> eight 6-bit scales and minima: [n, 8] each."""
    p = p.astype(np.int64)
    scale, minimum = p[:, 0:4] & 63, p[:, 4:8] & 63
    more = p[:, 8:12]
    return (
        np.concatenate([scale, more & 15 | p[:, 0:4] >> 6 << 4], axis=1),
        np.concatenate([minimum, more >> 4 | p[:, 4:8] >> 6 << 4], axis=1),
    )


def _q45_k(b: Array, fifth: bool) -> Array:
    d, dmin = _half(b, 0), _half(b, 2)
    scale, minimum = _k4_scales(b[:, 4:16])
    quants = b[:, 48 if fifth else 16 :]
    out = np.empty((len(b), 8, 32))
    for group in range(8):
        codes = (quants[:, 32 * (group // 2) : 32 * (group // 2) + 32] >> (4 * (group % 2)) & 15).astype(np.int64)
        if fifth:
            codes = codes | (b[:, 16:48].astype(np.int64) >> group & 1) << 4
        out[:, group] = d * scale[:, group : group + 1] * codes - dmin * minimum[:, group : group + 1]
    return out


def _q6_k(b: Array) -> Array:
    d, scales = _half(b, 208)[:, 0], b[:, 192:208].view(np.int8).astype(np.int64)
    out = np.empty((len(b), 256))
    for i in range(256):
        half, quarter, column = i // 128, i % 128 // 32, i % 32
        low = b[:, 64 * half + 32 * (quarter % 2) + column].astype(np.int64) >> (4 * (quarter // 2)) & 15
        top = b[:, 128 + 32 * half + column].astype(np.int64) >> (2 * quarter) & 3
        out[:, i] = d * scales[:, i // 16] * ((low | top << 4) - 32)
    return out


def _iq4_xs(b: Array) -> Array:
    d, top = _half(b, 0), np.ascontiguousarray(b[:, 2:4]).view("<u2").astype(np.int64)
    out = np.empty((len(b), 8, 32))
    for group in range(8):
        low = b[:, 4 + group // 2].astype(np.int64) >> (4 * (group % 2)) & 15
        scale = (low | (top[:, 0] >> (2 * group) & 3) << 4) - 32
        out[:, group] = d * scale[:, None] * _IQ4[_nibbles(b[:, 8 + 16 * group : 24 + 16 * group])]
    return out


def _fp8(b: Array) -> Array:
    """f32 s, then codes of 4 bits of exponent and 3 of mantissa, bias 7 (OCP 8-bit floats, section 5.3)."""
    codes = b[:, 4:].astype(np.int64)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.ldexp(np.where(exponent > 0, 8 + mantissa, mantissa).astype(np.float64), np.maximum(exponent, 1) - 10)
    values[codes & 127 == 127] = np.nan
    return np.ascontiguousarray(b[:, :4]).view("<f4").astype(np.float64) * np.where(codes & 128, -values, values)


def _own(format: str) -> Callable[[Array], Array]:
    """Each 32 codes of 4 bits take 16 bytes, as in q4_0."""

    def decoded(b: Array) -> Array:
        if format.startswith("int8"):
            return _half(b, 0) * np.ascontiguousarray(b[:, 2:]).view(np.int8).astype(np.float64)
        head = 3 if format in ZERO_POINT else 2
        codes = np.concatenate([_nibbles(b[:, at : at + 16]) for at in range(head, b.shape[1], 16)], axis=1)
        return _half(b, 0) * (codes - (b[:, 2:3].astype(np.int64) if head == 3 else 8))

    return decoded


_DECODERS: dict[str, Callable[[Array], Array]] = {
    **{name: _own(name) for name in OWN},
    "q4_0": lambda b: _half(b, 0) * (_nibbles(b[:, 2:18]) - 8),
    "q4_1": lambda b: _half(b, 0) * _nibbles(b[:, 4:20]) + _half(b, 2),
    "q5_0": lambda b: _half(b, 0) * ((_nibbles(b[:, 6:22]) | _bits(b[:, 2:6]) << 4) - 16),
    "q5_1": lambda b: _half(b, 0) * (_nibbles(b[:, 8:24]) | _bits(b[:, 4:8]) << 4) + _half(b, 2),
    "q8_0": lambda b: _half(b, 0) * b[:, 2:34].view(np.int8).astype(np.float64),
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": lambda b: _q45_k(b, False),
    "q5_k": lambda b: _q45_k(b, True),
    "q6_k": _q6_k,
    "iq4_nl": lambda b: _half(b, 0) * _IQ4[_nibbles(b[:, 2:18])],
    "iq4_xs": _iq4_xs,
    "fp8g128": _fp8,
    "mxfp4": lambda b: np.ldexp(1.0, b[:, :1].astype(np.int64) - 127) * _E2M1[_nibbles(b[:, 1:17])],
}
