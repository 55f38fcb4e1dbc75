"""Types of `_matcher.pyx`, for the type checker; the docstrings are there."""

from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from .worker import Worker

__all__ = ["CANNOT", "Matcher", "Sort", "first_lines", "told"]

CANNOT: str
QUESTION_S: float
MIN_QUESTIONS: int
MAX_QUESTIONS: int
UNMASKED: int
SLOW_S: float
SLOW_FOR: int
AHEAD_S: float
AHEAD_AFTER: int

class Sort:
    words: int
    known: int
    ends: frozenset[int]
    ends_are_plain: bool
    odd: dict[int, bool | None]
    worker: Worker
    mask_s: float
    def __init__(self, words: int, known: int, ends: frozenset[int], ends_are_plain: bool, odd: dict[int, bool | None], worker: Worker) -> None: ...

class Matcher:
    def __init__(self, matcher: LLMatcher, sort: Sort, first: Matcher | None = None) -> None: ...
    @property
    def held(self) -> bool: ...
    @property
    def complete(self) -> bool: ...
    def mask(self) -> NDArray[np.uint32]: ...
    def check(self) -> Callable[[Sequence[int]], list[bool] | None] | int: ...
    def accept(self, token_id: int) -> bool: ...
    def ahead(self) -> None: ...
    def work(self) -> None: ...
    def feed(self, token_ids: list[int]) -> bool: ...
    def forced(self) -> list[int]: ...

def told(error: BaseException) -> str: ...
def first_lines(text: str) -> str: ...
