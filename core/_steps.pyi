"""Types of `_steps.pyx`, for the type checker; the docstrings are there."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Copies", "Moves", "StepResult", "fill", "listed", "put"]

class StepResult:
    ids: NDArray[np.int32] | None
    logits: NDArray[np.float32]
    def __init__(self, ids: NDArray[np.int32] | None, logits: NDArray[np.float32]) -> None: ...

class Copies:
    def __init__(self, pairs: list[tuple[NDArray[np.int32], NDArray[np.int32]]]) -> None: ...
    def run(self) -> None: ...

class Moves:
    def __init__(
        self,
        slices: list[Any],
        block_size: int,
        ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        slots: NDArray[np.int32],
        context_len: NDArray[np.int32],
    ) -> None: ...
    def run(self) -> bool: ...

def fill(fields: list[tuple[str, str, bool, NDArray[np.int32] | None]], batch: Any, T: int, S: int, R: int) -> None: ...
def put(array: NDArray[np.int32], place: int, number: int) -> None: ...
def listed(array: NDArray[np.int32]) -> list[int]: ...
