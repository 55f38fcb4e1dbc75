"""One answer's place in a grammar: which tokens may come next, said of single ones or as a mask over the vocabulary.

Mostly the model's likeliest token is one that the grammar allows. The library says so of one token in a microsecond or three; a mask takes it six to several
hundred. So the engine asks for single tokens first (`Matcher.check`), and for the mask where that does not decide, or where more tokens would have to be asked
for than a mask takes time. Where that happens again and again and masks are slow, they are computed beside the step, by a thread of their own. Whether a token is forced is looked up as soon as the one before is taken:
what the library reads of this answer is in the processor's caches then, and is not after the next step of the model.

Which of these is taken depends on how long the library took, and never changes which tokens may come. One thing does depend on it: only masks are held to the
library's limits. A grammar that goes beyond them at some token may fail an answer there on a slow machine, and be followed on a quick one.

Matchers are made by `grammar.Grammar`, and used by the engine's thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import llguidance
import numpy as np

from fastllm.core.errors import EngineError, FastLLMError, InvalidSchema

from .worker import Worker

__all__ = ["CANNOT", "Matcher", "Sort", "first_lines", "told"]

CANNOT: Final = "the grammar of this answer cannot be followed"
QUESTION_S: Final = 1.5e-6  # for one token, with the way there and back
MIN_QUESTIONS, MAX_QUESTIONS = 10, 64  # a mask has a price besides its computation: the row is read again
UNMASKED: Final = 64  # tokens after which a mask is computed in any case: the library's limits are for the time between two masks
SLOW_S, SLOW_FOR = 1e-3, 16  # a single token that takes as long; so many tokens then have masks, whose limits end what is too much
AHEAD_S: Final = 200e-6  # a mask that takes as long is computed beside the step
AHEAD_AFTER: Final = 2  # tokens in a row that single ones did not decide


@dataclass
class Sort:
    """What the matchers of one grammar have in common.

    words: u32 of a mask, of the model's rows; known: ids that the tokenizer has. ends: ids that end an answer; ends_are_plain: they may come where the
    grammar is complete, and nowhere else. odd: ids that are no text, False: they never come; None: only a mask says whether they may. mask_s: how long
    a mask takes, a running mean.
    """

    words: int
    known: int
    ends: frozenset[int]
    ends_are_plain: bool
    odd: dict[int, bool | None]
    worker: Worker
    mask_s: float = 0.0


class Matcher:
    """See the module (`fastllm.core.request.TokenConstraint`). first: another one, which stands where this one starts, and has its mask."""

    def __init__(self, matcher: llguidance.LLMatcher, sort: Sort, first: Matcher | None = None):
        self._matcher, self._sort = matcher, sort
        self._ready: np.ndarray | None = None
        self._own: np.ndarray | None = None  # u32 [≥ words]: this matcher's masks, one after the other
        self._must = deque[int]()  # tokens that must come next, where that has been looked up. Once for all of a text: one of 1 MB takes long
        self._looked = False
        self._coming = False
        self._done = threading.Lock()  # held from `ahead` until the mask is there
        self._error: FastLLMError | None = None
        self._questions = 0  # that may still be asked for the next token
        self._agreed = set[int]()  # that may come, by what was asked
        self._needed = False  # single tokens did not decide the next one
        self._undecided = 0  # tokens in a row of which that is true
        self._unmasked = 0  # tokens since the last mask
        self._slow = 0  # tokens that have masks because the library was slow for a single one
        if first is not None:
            self._ready, self._must, self._looked = first._mask(), first._must.copy(), first._looked

    def mask(self) -> np.ndarray:
        """u32 [words]: bit id % 32 of word id // 32 is 1 where the token may come next; valid until `accept`. Raises InvalidSchema if the grammar grew
        beyond the library's limits."""
        self._needed = True
        return self._mask()

    def check(self) -> Callable[[Sequence[int]], list[bool] | None] | int:
        """The one token that must come; else what says of each of some tokens whether the mask has it, None: the mask is quicker, or alone knows. Valid until
        `accept`; raises as `mask`."""
        if self._ready is None:
            if not (self._looked or self._coming or self._slow):
                self._forced()
            if self._coming or (not self._must and (self._slow or self._unmasked >= UNMASKED)):
                self._mask()
            else:
                self._questions = MIN_QUESTIONS + min(int(self._sort.mask_s / QUESTION_S), MAX_QUESTIONS)
        if self._must:
            return self._must[0]
        self._agreed.clear()
        return self._allows

    def accept(self, token_id: int) -> bool:
        """Takes the next token of the answer. True: the grammar is complete, and nothing may follow. Raises EngineError for a token that
        the grammar does not allow, InvalidSchema as `mask`."""
        if self._coming:
            self._wait()  # the library's matcher is not for two threads
        given, self._ready = self._ready, None
        forced = self._looked = False
        if self._must:
            forced = self._must.popleft() == token_id
            if not forced:
                self._must.clear()
            self._looked = bool(self._must)
        self._unmasked += 1
        self._undecided, self._needed = (self._undecided + 1 if self._needed else 0), False
        started = time.perf_counter()
        if not self._matcher.consume_token(token_id):
            allowed = forced or token_id in self._agreed or (given is not None and _has(given, token_id))
            self._error = self._failed() if allowed else EngineError(CANNOT, why=first_lines(str(self._matcher.get_error())))
            raise self._error
        if self._matcher.is_stopped():
            return True
        self._slow = SLOW_FOR if time.perf_counter() - started > SLOW_S else max(self._slow - 1, 0)
        if not self._must and (self._slow or (self._undecided >= AHEAD_AFTER and self._sort.mask_s > AHEAD_S)):
            self.ahead()
        elif not self._looked:
            self._forced()
            if time.perf_counter() - started > SLOW_S:
                self._slow = SLOW_FOR
        return False

    def ahead(self) -> None:
        """Begins to compute the next mask."""
        if self._ready is None and not self._coming:
            self._coming, taken = True, False
            self._done.acquire()
            try:
                taken = self._sort.worker.put(self)
            finally:
                if not taken:  # `mask` computes it
                    self._coming = False
                    self._done.release()

    def work(self) -> None:
        """Computes the mask that was asked for; in the worker's thread."""
        try:
            self._compute()
        except BaseException as error:  # the thread is everybody's, and a panic of the library is no Exception
            self._error = EngineError(CANNOT, why=told(error))
        finally:
            self._done.release()

    def feed(self, token_ids: list[int]) -> bool:
        """Takes a text that somebody has written already. False: the grammar does not go on so, and nothing more can be done with this matcher."""
        if self._coming:
            self._wait()
        self._ready, self._looked = None, False
        return self._matcher.try_consume_tokens(token_ids) == len(token_ids) and not self._matcher.is_error()

    @property
    def held(self) -> bool:
        """As of `lazy.Held`: from its first token on."""
        return True

    @property
    def complete(self) -> bool:
        """Nothing may follow."""
        if self._coming:
            self._wait()
        return bool(self._matcher.is_stopped())

    def forced(self) -> list[int]:
        """Tokens that must come next, whatever the model says."""
        if self._coming:
            self._wait()
        return list(self._forced())

    def _allows(self, token_ids: Sequence[int]) -> list[bool] | None:
        ready, sort, answers = self._ready, self._sort, list[bool]()
        if ready is not None:
            return [_has(ready, token_id) for token_id in token_ids]
        self._questions -= len(token_ids)
        if self._questions < 0:
            return None
        for left, token_id in zip(range(len(token_ids) - 1, -1, -1), token_ids, strict=True):
            answer: bool | None
            if token_id in sort.ends:
                answer = self._matcher.is_accepting() or (False if sort.ends_are_plain else None)
            elif token_id in sort.odd:
                answer = sort.odd[token_id]
            elif token_id >= sort.known:
                answer = False
            else:
                started = time.perf_counter()
                answer = self._matcher.validate_tokens([token_id]) == 1
                if time.perf_counter() - started > SLOW_S:
                    self._slow, self._questions = SLOW_FOR, 0
                    if left:
                        return None
                if answer:
                    self._agreed.add(token_id)
            if answer is None:
                return None
            answers.append(answer)
        return answers

    def _mask(self) -> np.ndarray:
        if self._ready is None:
            if self._coming:
                self._wait()
            else:
                self._compute()
            if self._error is not None:
                raise self._error
            assert self._own is not None
            self._ready = self._own[: self._sort.words]
        return self._ready

    def _wait(self) -> None:
        with self._done:
            self._coming = False

    def _room(self) -> np.ndarray:
        """Where masks are written. Rows of the model that the tokenizer does not know are never allowed."""
        if self._own is None:
            self._own = np.zeros(max(self._sort.words, (self._sort.known + 31) // 32), np.uint32)
        return self._own

    def _forced(self) -> deque[int]:
        if not self._looked:
            self._must, self._looked = deque(self._matcher.compute_ff_tokens()), True
        return self._must

    def _compute(self) -> None:
        """Writes the next mask. Where a token must come, it alone is in it, though others may write the beginning of its text."""
        room = self._room()
        if self._forced():
            room[:] = 0
            room[self._must[0] >> 5] = np.uint32(1 << (self._must[0] & 31))
            return
        started = time.perf_counter()
        self._matcher.unsafe_compute_mask_ptr(room.ctypes.data, 4 * ((self._sort.known + 31) // 32))
        self._sort.mask_s += 0.25 * (time.perf_counter() - started - self._sort.mask_s)
        self._unmasked = 0
        if self._error is None and self._matcher.is_error():
            self._error = self._failed()

    def _failed(self) -> InvalidSchema:
        """The grammar leads to a point where the library's limits end, or where no token goes on: the request asked for it, so this is no fault here."""
        return InvalidSchema(CANNOT, why=first_lines(str(self._matcher.get_error())), fix="simplify the schema or grammar")


def _has(mask: np.ndarray, token_id: int) -> bool:
    return bool(int(mask[token_id >> 5]) >> (token_id & 31) & 1)


def told(error: BaseException) -> str:
    """An exception that is not ours, in a message."""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:400]


def first_lines(text: str) -> str:
    """What the library says of a grammar, in a message."""
    said = text.replace("<non-verbose/>", "").replace("NoExtensionBias", "no text of it can be written: it is endless, or has characters that this model has no tokens for")
    return " ".join(line.strip() for line in said.splitlines()[:4])[:400]
