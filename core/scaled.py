"""Weights whose scales are a tensor of their own, as quantised safetensors have them: both tensors become blocks of one format.

    fp8     codes f8_e4m3 [N, K], scales [⌈N/a⌉, ⌈K/b⌉] of tiles of a × b values (DeepSeek-V3, arXiv 2412.19437, section 3.3.2):
            fp8g128 where no group of 128 crosses a tile, else f32
    mxfp4   codes u8 [N, K/32, 16], two values a byte, the first in the low half, exponents u8 [N, K/32] (OCP microscaling formats 1.0):
            mxfp4, whose blocks have the first 16 values in the low halves

Called by `WeightRef`, which has taken one expert and some rows of the codes.
"""

from __future__ import annotations

import numpy as np

from .errors import ModelFileError

__all__ = ["GROUP", "check_scales", "merged", "merged_format", "merged_shape"]

GROUP = 128
"""Values of a block of fp8g128."""


def merged_format(format: str, width: int, tile: tuple[int, int]) -> str:
    """What codes of `format` and their scales become. width: values of a row."""
    if format == "u8":
        return "mxfp4"
    return "fp8g128" if not width % GROUP and not tile[1] % GROUP else "f32"


def merged_shape(format: str, dims: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the weight whose codes have this one."""
    return (*dims[:-2], dims[-2] * 32) if format == "u8" and len(dims) > 2 else dims


def check_scales(name: str, file: str, format: str, dims: tuple[int, ...], scales: str, found: tuple[int, ...], tile: tuple[int, int]) -> None:
    """Raises ModelFileError unless codes of `format` and shape `dims`, the whole matrix, and its scales, of format `scales` and shape `found`,
    belong together."""
    wanted: tuple[int, ...] | None = None
    if format == "u8" and len(dims) == 3 and dims[2] == 16 and scales == "u8":
        wanted = dims[:2]
    elif format == "f8_e4m3" and len(dims) == 2 and scales in ("f32", "f16", "bf16"):
        wanted = -(-dims[0] // tile[0]), -(-dims[1] // tile[1])
    if tuple(found) == wanted:
        return
    what = f"{format}{list(dims)} with scales {scales}{list(found)}"
    if format == "f8_e4m3":
        what += f" for tiles of {tile[0]} x {tile[1]}"
    raise ModelFileError(
        f"tensor '{name}' and its scales do not fit: {what}",
        who=file,
        why="" if wanted is None else f"the scales of such a matrix are {list(wanted)}",
        fix="the configuration and the weights do not belong together; download the model again",
    )


def merged(
    format: str, dims: tuple[int, ...], data: np.ndarray, scales: np.ndarray, first: int, tile: tuple[int, int]
) -> tuple[tuple[int, ...], str, np.ndarray]:
    """(shape, format, bytes) of some rows of a weight, checked before (`check_scales`). dims, data: shape and bytes of their codes; scales:
    those of the tiles that the rows touch, f32 [tiles, ⌈K/b⌉] or, for u8 codes, u8 [rows, K/32]; first: the first row's place in its tile."""
    if format == "u8":
        return _mxfp4(dims, data, scales)
    rows, width = dims
    own = np.ascontiguousarray(scales[(first + np.arange(rows)) // tile[0]], np.float32)  # [rows, tiles]
    codes = np.ascontiguousarray(data).reshape(rows, width)
    if merged_format(format, width, tile) == "f32":
        from ._kernels import decode

        spread = np.repeat(own, tile[1], axis=1)[:, :width]
        values = decode("f8_e4m3", codes.reshape(-1), codes.size).reshape(rows, width) * spread
        return dims, "f32", values.reshape(-1).view(np.uint8)
    blocks = np.empty((rows, width // GROUP, 4 + GROUP), np.uint8)
    blocks[..., :4] = np.repeat(own, tile[1] // GROUP, axis=1)[:, : width // GROUP, None].view(np.uint8)
    blocks[..., 4:] = codes.reshape(rows, -1, GROUP)
    return dims, "fp8g128", blocks.reshape(-1)


def _mxfp4(dims: tuple[int, ...], data: np.ndarray, exponents: np.ndarray) -> tuple[tuple[int, ...], str, np.ndarray]:
    codes = np.ascontiguousarray(data).reshape(dims)
    values = np.empty((*dims[:2], 32), np.uint8)
    values[..., 0::2], values[..., 1::2] = codes & 15, codes >> 4
    blocks = np.empty((*dims[:2], 17), np.uint8)
    blocks[..., 0] = exponents
    blocks[..., 1:] = values[..., :16] | values[..., 16:] << 4
    return (dims[0], dims[1] * 32), "mxfp4", blocks.reshape(-1)
