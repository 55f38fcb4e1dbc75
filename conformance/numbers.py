"""Seeded test data: our own generator (numpy promises no stable stream) and the data classes of the suite. Imports only numpy.

SplitMix64 (Steele, Lea & Flood 2014) over a counter, so that an array is one vector operation. A case's seed is a hash of the suite's seed
and the case's id: an id alone reproduces its data.
"""

from __future__ import annotations

import hashlib

import numpy as np

__all__ = ["CLASSES", "Numbers", "seed_of"]

Array = np.ndarray
CLASSES = ("normal", "positive", "cancelling", "spread", "sparse", "integer", "outlier", "offset")
"""normal; positive; cancelling (sums near zero); spread (2^±12); sparse (16 non-zeros: index 0, the last and block edges);
integer (partial sums below 2²⁴: one right answer, to the bit); outlier (one × 3000); offset (mean 100)."""
_M1, _M2, _STEP = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(0x9E3779B97F4A7C15)


def seed_of(suite_seed: int, case_id: str) -> int:
    """64 bits from the suite's seed and a case's id."""
    return int.from_bytes(hashlib.sha256(f"{suite_seed}:{case_id}".encode()).digest()[:8], "little")


class Numbers:
    """A stream of numbers. Every method takes the next ones; shapes as in numpy."""

    def __init__(self, seed: int):
        """seed: 64 bits."""
        self._seed, self._at = np.uint64(seed & (2**64 - 1)), 0

    def words(self, count: int) -> Array:
        """u64 [count]."""
        with np.errstate(over="ignore"):
            z = self._seed + np.arange(self._at + 1, self._at + count + 1, dtype=np.uint64) * _STEP
            z = (z ^ (z >> np.uint64(30))) * _M1
            z = (z ^ (z >> np.uint64(27))) * _M2
        self._at += count
        return z ^ (z >> np.uint64(31))

    def bytes(self, count: int) -> Array:
        """u8 [count]."""
        return self.words(-(-count // 8)).view(np.uint8)[:count].copy()

    def uniform(self, *shape: int) -> Array:
        """f64 in [0, 1)."""
        return ((self.words(int(np.prod(shape, dtype=np.int64))) >> np.uint64(11)) * 2.0**-53).reshape(shape)

    def integers(self, count: int, low: int, high: int) -> Array:
        """i64 [count] in low…high − 1."""
        return low + np.floor(self.uniform(count) * (high - low)).astype(np.int64)

    def normal(self, *shape: int) -> Array:
        """f32, nearly normal: four 16-bit parts of a word, summed; the same bits on every machine."""
        words = self.words(int(np.prod(shape, dtype=np.int64))).view(np.uint16).reshape(-1, 4).astype(np.float64)
        return ((words.sum(1) / 65536.0 - 2.0) * np.sqrt(3.0)).astype(np.float32).reshape(shape)

    def permutation(self, count: int) -> Array:
        """i64 [count]."""
        return np.argsort(self.words(count), kind="stable").astype(np.int64)

    def array(self, kind: str, *shape: int, block: int = 32) -> Array:
        """f32 data of a class; sums are taken over the last axis. block: where kernels may cut that axis."""
        x, width = self.normal(*shape), shape[-1] if shape else 1
        if kind == "normal" or not width:
            return x
        if kind == "positive":
            return np.abs(x) + np.float32(0.01)
        if kind == "cancelling":
            half = width // 2
            x[..., half : 2 * half] = -x[..., :half] * np.float32(1 + 2.0**-10)
            return x
        if kind == "spread":
            return (x * np.exp2(np.round((self.uniform(*shape) - 0.5) * 24))).astype(np.float32)
        if kind == "outlier":
            x[..., int(self.integers(1, 0, width)[0])] *= np.float32(3000)
            return x
        if kind == "offset":
            return (x + 100).astype(np.float32)
        if kind == "sparse":
            keep = {0, width - 1, *self.integers(8, 0, width).tolist()}
            for edge in self.integers(3, 1, max(2, -(-width // block))).tolist():
                keep |= {edge * block - 1, edge * block}
            mask = np.zeros(width, bool)
            mask[[k for k in keep if 0 <= k < width]] = True
            return np.where(mask, x + np.copysign(np.float32(0.25), x), np.float32(0)).astype(np.float32)
        if kind == "integer":  # odd numbers above 2¹¹: neither f16 nor TF32 holds them
            odd = 2049 + 2 * self.integers(int(np.prod(shape, dtype=np.int64)), 0, 1000)
            sign = np.where(self.uniform(*shape) < 0.5, -1, 1)
            kept = self.uniform(*shape) < min(1.0, 3000 / width)
            return (odd.reshape(shape) * sign * kept).astype(np.float32)
        raise ValueError(f"there is no data class '{kind}'")

    def units(self, *shape: int) -> Array:
        """f32 of −1, 0 and 1, the other operand of `integer`."""
        return (np.floor(self.uniform(*shape) * 3) - 1).astype(np.float32)
