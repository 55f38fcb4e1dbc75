"""Types of `_strings.pyx`, for the type checker; the docstrings are there."""

from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

__all__ = ["Strings", "read_strings"]

class Strings(Sequence[str]):
    def utf8(self) -> tuple[bytes, bytes]: ...
    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

def read_strings(data: NDArray[np.uint8], pos: int, end: int, count: int) -> tuple[Strings, int]: ...
