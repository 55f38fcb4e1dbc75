"""Number and block formats: the one table that every reader, packer and kernel refers to.

A tensor's `format` is a key of `FORMATS`. Plain formats have blocks of one value. Block formats group `block` consecutive
values of a row (the innermost dimension) in `block_bytes` bytes; a row must hold whole blocks. The decode rule of each is
in `core/_kernels.pyx` (`decode(format, data, count) -> f32`), which is the reference for every backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .errors import ShapeError

__all__ = ["FORMATS", "GGML_TYPES", "PLAIN", "QuantFormat"]


@dataclass(frozen=True)
class QuantFormat:
    """How values are stored. block: values per block; block_bytes: bytes per block; lossless: the smallest plain format that
    holds every decoded value exactly, or "f32" where only f32 does; ggml: GGML type id, if it has one; code_bits: 4 or 8 for the
    group formats of our own (0: another format); zero_point: each of their groups has one."""

    name: str
    block: int
    block_bytes: int
    lossless: str = "f32"
    ggml: int | None = None
    code_bits: int = 0
    zero_point: bool = False

    @property
    def bits(self) -> float:
        """Bits per value, scales included."""
        return 8 * self.block_bytes / self.block

    @property
    def plain(self) -> bool:
        """True for formats without blocks."""
        return self.block == 1

    def nbytes(self, count: int) -> int:
        """Bytes of `count` consecutive values. Raises ShapeError if they are not whole blocks."""
        blocks, rest = divmod(count, self.block)
        if rest:
            raise ShapeError(f"{count} values are not a whole number of {self.name} blocks of {self.block}")
        return blocks * self.block_bytes


def _table(*rows: QuantFormat) -> dict[str, QuantFormat]:
    return {row.name: row for row in rows}


FORMATS: Final = _table(
    QuantFormat("f32", 1, 4, "f32", 0),
    QuantFormat("f16", 1, 2, "f16", 1),
    QuantFormat("bf16", 1, 2, "bf16", 30),
    QuantFormat("f64", 1, 8, "f64", 28),
    QuantFormat("i8", 1, 1, "f16", 24),
    QuantFormat("i16", 1, 2, "f32", 25),
    QuantFormat("i32", 1, 4, "f64", 26),
    QuantFormat("i64", 1, 8, "f64", 27),
    QuantFormat("u8", 1, 1, "f16"),
    QuantFormat("f8_e4m3", 1, 1, "f16"),  # 4 bits of exponent, bias 7, no infinity (OCP 8-bit floats, section 5.3)
    QuantFormat("fp8g128", 128, 132, "f32"),  # f32 s, then 128 values of f8_e4m3; w = s * value
    QuantFormat("q4_0", 32, 18, "f32", 2),
    QuantFormat("q4_1", 32, 20, "f32", 3),
    QuantFormat("q5_0", 32, 22, "f32", 6),
    QuantFormat("q5_1", 32, 24, "f32", 7),
    QuantFormat("q8_0", 32, 34, "f32", 8),
    QuantFormat("q2_k", 256, 84, "f32", 10),
    QuantFormat("q3_k", 256, 110, "f32", 11),
    QuantFormat("q4_k", 256, 144, "f32", 12),
    QuantFormat("q5_k", 256, 176, "f32", 13),
    QuantFormat("q6_k", 256, 210, "f32", 14),
    QuantFormat("iq4_nl", 32, 18, "f32", 20),
    QuantFormat("iq4_xs", 256, 136, "f32", 23),
    QuantFormat("mxfp4", 32, 17, "bf16", 39),
    # ours, one group a block: f16 scale s, for int4gN a byte z, then the codes; w = s * (q - z). Without z: int4gNs counts from 8,
    # int8gN is signed. Groups of 32 without z are q4_0 and q8_0.
    QuantFormat("int4g32", 32, 19, code_bits=4, zero_point=True),
    QuantFormat("int4g64", 64, 35, code_bits=4, zero_point=True),
    QuantFormat("int4g128", 128, 67, code_bits=4, zero_point=True),
    QuantFormat("int4g256", 256, 131, code_bits=4, zero_point=True),
    QuantFormat("int4g64s", 64, 34, code_bits=4),
    QuantFormat("int4g128s", 128, 66, code_bits=4),
    QuantFormat("int4g256s", 256, 130, code_bits=4),
    QuantFormat("int8g64", 64, 66, code_bits=8),
    QuantFormat("int8g128", 128, 130, code_bits=8),
)
"""name -> QuantFormat, every format that `core/_kernels` decodes."""

GGML_TYPES: Final = {f.ggml: f.name for f in FORMATS.values() if f.ggml is not None}
"""GGML type id -> format name."""

PLAIN: Final = frozenset(f.name for f in FORMATS.values() if f.plain)
"""Formats that a numpy dtype (or u16 bits, for bf16) holds as they are."""
