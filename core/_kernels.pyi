"""Types of `_kernels.pyx`, for the type checker; the docstrings are there."""

from collections.abc import Callable
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "UNDECIDED",
    "Sampler",
    "bf16_to_f32",
    "decode",
    "decode_into",
    "encode",
    "encode_groups",
    "f16_to_f32",
    "f32_to_bf16",
    "f32_to_f16",
    "logprobs",
    "philox4x32",
    "sample",
    "trim",
    "uniform",
]

UNDECIDED: int

def decode(format: str, data: NDArray[np.uint8], count: int) -> NDArray[np.float32]: ...
def decode_into(format: str, data: NDArray[np.uint8], out: NDArray[np.float32]) -> None: ...
def encode(format: str, values: NDArray[np.float32]) -> NDArray[np.uint8]: ...
def encode_groups(
    format: str, values: NDArray[np.float32], *, search: bool = True
) -> tuple[NDArray[np.uint8], NDArray[np.float64]]: ...
def f32_to_f16(values: NDArray[np.float32]) -> NDArray[np.float16]: ...
def f16_to_f32(values: NDArray[np.float16] | NDArray[np.uint16]) -> NDArray[np.float32]: ...
def f32_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]: ...
def bf16_to_f32(values: NDArray[np.uint16]) -> NDArray[np.float32]: ...
def philox4x32(counter: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]: ...
def trim() -> None: ...
def uniform(seed: int, sequence: int, position: NDArray[np.uint64]) -> NDArray[np.float64]: ...

class Sampler:
    def __init__(
        self,
        *,
        u: NDArray[np.float64],
        temperature: NDArray[np.float32],
        top_k: NDArray[np.int32],
        top_p: NDArray[np.float32],
        min_p: NDArray[np.float32],
        adjust_start: NDArray[np.int32] | None = None,
        adjust_ids: NDArray[np.int32] | None = None,
        adjust_bias: NDArray[np.float32] | None = None,
        adjust_repeat: NDArray[np.float32] | None = None,
        adjust_sub: NDArray[np.float32] | None = None,
        mask: NDArray[np.uint32] | None = None,
        portable: bool = False,
    ) -> None: ...
    def choose(
        self,
        logits: NDArray[np.float32],
        held: list[Any] | None = None,
        masks: Callable[[int], NDArray[np.uint32] | None] | None = None,
    ) -> NDArray[np.int32]: ...

@overload
def sample(
    logits: NDArray[np.float32],
    *,
    u: NDArray[np.float64],
    temperature: NDArray[np.float32],
    top_k: NDArray[np.int32],
    top_p: NDArray[np.float32],
    min_p: NDArray[np.float32],
    adjust_start: NDArray[np.int32] | None = None,
    adjust_ids: NDArray[np.int32] | None = None,
    adjust_bias: NDArray[np.float32] | None = None,
    adjust_repeat: NDArray[np.float32] | None = None,
    adjust_sub: NDArray[np.float32] | None = None,
    mask: NDArray[np.uint32] | None = None,
    portable: bool = False,
    with_logprobs: Literal[False] = False,
) -> NDArray[np.int32]: ...
@overload
def sample(logits: NDArray[np.float32], *, with_logprobs: Literal[True], **arrays: Any) -> tuple[
    NDArray[np.int32], NDArray[np.float32]
]: ...
def logprobs(
    logits: NDArray[np.float32], ids: NDArray[np.int32], top_n: int = 0
) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]: ...
