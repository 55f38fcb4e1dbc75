"""Faults in how the scales of blocks are read, which only show where scales are very small or very large."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from fastllm.api import Backend, HostTensor

from .. import blocks
from .base import Mutant, PackedBase

__all__ = ["mutants"]

Array = np.ndarray
LEAST = 2.0**-14
"""Of the normal numbers of f16."""


class _Coded(PackedBase):
    """Keeps every block format decoded to f32."""

    formats = tuple(blocks.BLOCK_BYTES)


def _in_blocks(format: str, change: Callable[[Array], None]) -> Callable[[HostTensor], Array]:
    """Changes the bytes u8 [n, bytes of a block] of one format first."""

    def decode(weight: HostTensor) -> Array:
        if weight.format != format:
            return weight.decode()
        parts = weight.data.reshape(-1, blocks.BLOCK_BYTES[format][1]).copy()
        change(parts)
        return HostTensor(weight.name, weight.shape, weight.format, parts.reshape(-1)).decode()

    return decode


def _flushed(format: str) -> Callable[[HostTensor], Array]:
    """Subnormal scales and minima count as zero."""

    def change(parts: Array) -> None:
        for at in blocks.SCALES.get(format, (0,)):
            scale = parts[:, at : at + 2].copy().view("<f2")[:, 0]
            parts[np.abs(scale.astype(np.float64)) < LEAST, at : at + 2] = 0

    return _in_blocks(format, change)


def _power_as_f16(parts: Array) -> None:
    """mxfp4: 2^(e − 127) is no less and no more than f16 has."""
    parts[:, 0] = np.clip(parts[:, 0], 127 - 24, 127 + 15)


def _scale_as_f16(parts: Array) -> None:
    """fp8g128."""
    scales = parts[:, :4].copy().view("<f4")
    parts[:, :4] = np.clip(scales, -65504, 65504).astype(np.float16).astype("<f4").view(np.uint8)


def mutants() -> Iterator[Mutant]:
    """All of this file."""
    honest: Callable[[Mapping[str, str]], Backend] = lambda options: _Coded(None, options)  # noqa: E731
    faults: list[tuple[str, str, str, Callable[[HostTensor], Array]]] = [
        (f"subnormal_scales_{format}", f"{format}: a scale below 2^-14 counts as zero", format, _flushed(format)) for format in blocks.BLOCK_BYTES if format not in ("mxfp4", "fp8g128")
    ]
    faults += [
        ("powers_of_f16", "mxfp4: scales are kept as f16", "mxfp4", _in_blocks("mxfp4", _power_as_f16)),
        ("fp8_scales_of_f16", "fp8g128: scales are kept as f16", "fp8g128", _in_blocks("fp8g128", _scale_as_f16)),
    ]
    for name, what, format, decode in faults:
        yield Mutant(f"weights.{name}", "quant", what, f"linear/f32*{format}/*/scales#bound", "bound", lambda options, d=decode: _Coded(None, options, d), honest)  # type: ignore[misc]
