"""Types of `_strings.pyx`, for the type checker; the docstrings are there."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["read_strings"]

def read_strings(data: NDArray[np.uint8], pos: int, end: int, count: int) -> tuple[list[str], int]: ...
