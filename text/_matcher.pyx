"""One answer's place in a grammar: which tokens may come next, said of single ones or as a mask over the vocabulary.

Mostly the model's likeliest token is one that the grammar allows. The library says so of one token in a microsecond or three;
a mask takes it six to several hundred. So the engine asks for single tokens first (`Matcher.check`), and for the mask where
that does not decide, or where more tokens would have to be asked for than a mask takes time. Where that happens again and
again and masks are slow, they are computed beside the step, by a thread of their own. Whether a token is forced is looked up
as soon as the one before is taken: what the library reads of this answer is in the processor's caches then, and is not after
the next step of the model.

Which of these is taken depends on how long the library took, and never changes which tokens may come. One thing does depend
on it: only masks are held to the library's limits. A grammar that goes beyond them at some token may fail an answer there on
a slow machine, and be followed on a quick one.

All rows of a step come here between two steps, when nothing of the interpreter is in the caches any more (`core/_steps.pyx`
has figures): so what is done for every token is native.

Matchers are made by `grammar.Grammar`, and used by the engine's thread.
"""

from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

import threading

import numpy as np

from fastllm.core.errors import EngineError, InvalidSchema

__all__ = ["CANNOT", "Matcher", "Sort", "first_lines", "told"]

CANNOT = "the grammar of this answer cannot be followed"
QUESTION_S = 1.5e-6  # for one token, with the way there and back
MIN_QUESTIONS, MAX_QUESTIONS = 10, 64  # a mask has a price besides its computation: the row is read again
UNMASKED = 64  # tokens after which a mask is computed in any case: the library's limits are for the time between two masks
SLOW_S, SLOW_FOR = 1e-3, 16  # a single token that takes as long; so many then have masks, whose limits end what is too much
AHEAD_S = 200e-6  # a mask that takes as long is computed beside the step
AHEAD_AFTER = 2  # tokens in a row that single ones did not decide


cdef double _now() noexcept nogil:
    """Seconds of a clock that only goes on."""
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return <double>now.tv_sec + 1e-9 * <double>now.tv_nsec


cdef class Sort:
    """What the matchers of one grammar have in common.

    words: u32 of a mask, of the model's rows; known: ids that the tokenizer has. ends: ids that end an answer; ends_are_plain:
    they may come where the grammar is complete, and nowhere else. odd: ids that are no text, False: they never come; None: only
    a mask says whether they may. mask_s: how long a mask takes, a running mean.
    """

    cdef public int words, known
    cdef public frozenset ends
    cdef public bint ends_are_plain
    cdef public dict odd
    cdef public object worker
    cdef public double mask_s

    def __init__(self, int words, int known, frozenset ends, bint ends_are_plain, dict odd, worker):
        self.words, self.known, self.ends, self.ends_are_plain = words, known, ends, ends_are_plain
        self.odd, self.worker, self.mask_s = odd, worker, 0.0


cdef class Matcher:
    """See the module (`fastllm.core.request.TokenConstraint`). first: another one, which stands where this one starts, and has
    its mask."""

    cdef public object _matcher  # llguidance.LLMatcher
    cdef public Sort _sort
    cdef public object _ready  # u32 [words] or None: the next mask
    cdef object _own  # u32 [≥ words] or None: this matcher's masks, one after the other
    cdef list _must  # tokens that must come, the next one at `_next`, where it is looked up: once for a text, 1 MB takes long
    cdef Py_ssize_t _next, _end
    cdef bint _looked
    cdef readonly bint _coming  # a mask is being computed
    cdef readonly object _done  # lock: held from `ahead` until the mask is there
    cdef object _error
    cdef int _questions  # that may still be asked for the next token
    cdef set _agreed  # that may come, by what was asked
    cdef bint _agreed_any
    cdef bint _needed  # single tokens did not decide the next one
    cdef int _undecided  # tokens in a row of which that is true
    cdef readonly int _unmasked  # tokens since the last mask
    cdef public int _slow  # tokens that have masks because the library was slow for a single one

    def __init__(self, matcher, Sort sort, Matcher first=None):
        self._matcher, self._sort = matcher, sort
        self._must, self._agreed, self._done = [], set(), threading.Lock()
        if first is not None:
            self._ready, self._looked = first._mask(), first._looked
            self._must, self._next, self._end = first._must, first._next, first._end

    def mask(self):
        """u32 [words]: bit id % 32 of word id // 32 is 1 where the token may come next; valid until `accept`. Raises
        InvalidSchema if the grammar grew beyond the library's limits."""
        self._needed = True
        return self._mask()

    def check(self):
        """The one token that must come; else what says of each of some tokens whether the mask has it, None: the mask is
        quicker, or alone knows. Valid until `accept`; raises as `mask`."""
        cdef double question_s = QUESTION_S, most = MAX_QUESTIONS
        cdef int least = MIN_QUESTIONS
        if self._ready is None:
            if not (self._looked or self._coming or self._slow):
                self._look()
            if self._coming or (self._next == self._end and (self._slow or self._unmasked >= UNMASKED)):
                self._mask()
            else:
                self._questions = least + <int>min(self._sort.mask_s / question_s, most)
        if self._next < self._end:
            return self._must[self._next]
        if self._agreed_any:
            self._agreed.clear()
            self._agreed_any = False
        if self._ready is not None:
            return self._in_ready
        return self._allows

    def accept(self, token_id) -> bool:
        """Takes the next token of the answer. True: the grammar is complete, and nothing may follow. Raises EngineError for a
        token that the grammar does not allow, InvalidSchema as `mask`."""
        cdef bint forced = False
        cdef double started, slow_s = SLOW_S
        if self._coming:
            self._wait()  # the library's matcher is not for two threads
        given, self._ready = self._ready, None
        self._looked = False
        if self._next < self._end:
            forced = self._must[self._next] == token_id
            self._next = self._next + 1 if forced else self._end
            self._looked = self._next < self._end
        self._unmasked += 1
        self._undecided = self._undecided + 1 if self._needed else 0
        self._needed = False
        started = _now()
        if not self._matcher.consume_token(token_id):
            allowed = forced or token_id in self._agreed or (given is not None and _has(given, token_id))
            self._error = self._failed() if allowed else EngineError(CANNOT, why=first_lines(str(self._matcher.get_error())))
            raise self._error
        if self._matcher.is_stopped():
            return True
        self._slow = SLOW_FOR if _now() - started > slow_s else max(self._slow - 1, 0)
        if self._next == self._end and (self._slow or (self._undecided >= AHEAD_AFTER and self._sort.mask_s > AHEAD_S)):
            self.ahead()
        elif not self._looked:
            self._look()
            if _now() - started > slow_s:
                self._slow = SLOW_FOR
        return False

    def ahead(self):
        """Begins to compute the next mask."""
        if self._ready is None and not self._coming:
            taken = False
            self._coming = True
            self._done.acquire()
            try:
                taken = self._sort.worker.put(self)
            finally:
                if not taken:  # `mask` computes it
                    self._coming = False
                    self._done.release()

    def work(self):
        """Computes the mask that was asked for; in the worker's thread."""
        try:
            self._compute()
        except BaseException as error:  # the thread is everybody's, and a panic of the library is no Exception
            self._error = EngineError(CANNOT, why=told(error))
        finally:
            self._done.release()

    def feed(self, list token_ids) -> bool:
        """Takes a text that somebody has written already. False: the grammar does not go on so, and nothing more can be done
        with this matcher."""
        if self._coming:
            self._wait()
        self._ready, self._looked, self._next = None, False, self._end
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

    def forced(self) -> list:
        """Tokens that must come next, whatever the model says."""
        if self._coming:
            self._wait()
        self._look()
        return self._must[self._next : self._end]

    def _in_ready(self, token_ids):
        """As `_allows`, by the mask."""
        return [_has(self._ready, token_id) for token_id in token_ids]

    def _allows(self, token_ids):
        """What `check` gives: list of bool, or None."""
        cdef Sort sort = self._sort
        cdef Py_ssize_t left = len(token_ids)
        cdef double before, now, slow_s = SLOW_S
        cdef list answers = []
        self._questions -= <int>left
        if self._questions < 0:
            return None
        before = _now()
        for token_id in token_ids:
            left -= 1
            if token_id in sort.ends:
                answer = self._matcher.is_accepting() or (False if sort.ends_are_plain else None)
            elif token_id in sort.odd:
                answer = sort.odd[token_id]
            elif token_id >= sort.known:
                answer = False
            else:
                answer = self._matcher.validate_tokens([token_id]) == 1
                now = _now()
                if now - before > slow_s:
                    self._slow, self._questions = SLOW_FOR, 0
                    if left:
                        return None
                before = now
                if answer:
                    self._agreed.add(token_id)
                    self._agreed_any = True
            if answer is None:
                return None
            answers.append(answer)
        return answers

    cdef _mask(self):
        if self._ready is None:
            if self._coming:
                self._wait()
            else:
                self._compute()
            if self._error is not None:
                raise self._error
            self._ready = self._own[: self._sort.words]
        return self._ready

    cdef _wait(self):
        with self._done:
            self._coming = False

    cdef _look(self):
        """Looks up what must come next."""
        if not self._looked:
            self._must = self._matcher.compute_ff_tokens()
            self._next, self._end, self._looked = 0, len(self._must), True

    cdef _compute(self):
        """Writes the next mask. Where a token must come, it alone is in it, though others may write the beginning of its text.
        Rows of the model that the tokenizer does not know are never allowed."""
        cdef double started
        cdef int words = (self._sort.known + 31) // 32
        if self._own is None:
            self._own = np.zeros(max(self._sort.words, words), np.uint32)
        self._look()
        if self._next < self._end:
            token_id = self._must[self._next]
            self._own[:] = 0
            self._own[token_id >> 5] = np.uint32(1 << (token_id & 31))
            return
        started = _now()
        self._matcher.unsafe_compute_mask_ptr(self._own.ctypes.data, 4 * words)
        self._sort.mask_s += 0.25 * (_now() - started - self._sort.mask_s)
        self._unmasked = 0
        if self._error is None and self._matcher.is_error():
            self._error = self._failed()

    cdef _failed(self):
        """The grammar leads to a point where the library's limits end, or where no token goes on: the request asked for it, so
        this is no fault here."""
        return InvalidSchema(CANNOT, why=first_lines(str(self._matcher.get_error())), fix="simplify the schema or grammar")


cdef bint _has(mask, token_id):
    return bool(int(mask[token_id >> 5]) >> (token_id & 31) & 1)


def told(error) -> str:
    """An exception that is not ours, in a message."""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:400]


def first_lines(str text) -> str:
    """What the library says of a grammar, in a message."""
    endless = "no text of it can be written: it is endless, or has characters that this model has no tokens for"
    said = text.replace("<non-verbose/>", "").replace("NoExtensionBias", endless)
    return " ".join(line.strip() for line in said.splitlines()[:4])[:400]
