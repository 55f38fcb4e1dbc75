"""How keys and values are cached: types of elements, and which of them are kept in pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fastllm.api import KVSpec

__all__ = ["CACHE_TYPES", "MAX_HEAD", "Kept"]

CACHE_TYPES: Final = {"f16": 1, "bf16": 2, "f32": 0, "int8": 4}
PAIRED_TYPES: Final = {"bf16": 5, "int8": 6}
"""The same elements in pairs, for products of bf16. Numbers as in native/kernels.h."""

MAX_HEAD: Final = 1024
"""Elements of a head: the attention kernel keeps rows of them on its stack (MAX_WIDTH)."""


@dataclass(frozen=True)
class Kept:
    """How caches are kept. dtype: their type where a spec does not say, or "auto"; bf16: whether products of attention may be of bf16, so
    that types which fit are kept in pairs."""

    dtype: str
    bf16: bool

    def name(self, spec: KVSpec) -> str:
        """The type of its elements. auto: what products of bf16 take as it is, else f16."""
        if spec.dtype or self.dtype != "auto":
            return spec.dtype or self.dtype
        return "bf16" if self._fits(spec) else "f16"

    def pairs(self, spec: KVSpec) -> bool:
        """Whether products of this cache are of bf16."""
        return self._fits(spec) and self.name(spec) in PAIRED_TYPES

    def number(self, spec: KVSpec) -> int:
        """As in native/kernels.h."""
        return (PAIRED_TYPES if self.pairs(spec) else CACHE_TYPES)[self.name(spec)]

    def _fits(self, spec: KVSpec) -> bool:
        """Whether there are products of bf16 for heads like these: values of their own, and no longer than the kernel takes."""
        return self.bf16 and spec.value_dim > 0 and max(spec.key_dim, spec.value_dim) <= MAX_HEAD
