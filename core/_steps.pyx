"""What happens between two steps of the same sequences, in one piece of native code each.

A step streams the weights through the caches, and nothing of Python is left in them afterwards: between two steps it is not
the number of instructions that counts (all of it takes 9 µs while it is cached) but how much cold code and data they touch
(the same took 120 µs after a step of a 1B model). So the loops of a step that only decodes are here, on plain pointers,
without numpy's machinery. Called by `scheduler.Scheduler` and `executor.Executor`.
"""

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

cimport numpy as cnp

import numpy as np

from .errors import EngineError, ShapeError

cnp.import_array()

__all__ = ["Copies", "Moves", "StepResult", "fill", "listed", "put"]


cdef inline int32_t *_numbers(array, int ndim, bint written) except NULL:
    """The memory of an i32 array without gaps, writable if it is written to. Raises ShapeError for another."""
    if not isinstance(array, cnp.ndarray):
        raise ShapeError(f"{type(array).__name__} where an array of i32 belongs")
    found = <cnp.ndarray>array
    fits = cnp.PyArray_TYPE(found) == cnp.NPY_INT32 and cnp.PyArray_NDIM(found) == ndim and cnp.PyArray_ISCARRAY_RO(found)
    if not fits:
        raise ShapeError(f"an array of {found.dtype}{list(np.shape(found))} where i32 of {ndim} dimensions without gaps belong")
    if written and not cnp.PyArray_ISWRITEABLE(found):
        raise ShapeError(f"a read-only array {list(np.shape(found))} where one belongs that is written to")
    return <int32_t *>cnp.PyArray_DATA(found)


cdef inline int64_t _length(array):
    return cnp.PyArray_DIM(<cnp.ndarray>array, 0)


cdef class Moves:
    """Moves a step of decodes on by one token of each sequence, again and again: `scheduler.Slice`s and the arrays [S] that
    change, which are kept. Raises ShapeError for arrays that are no i32 or of another length."""

    cdef list slices
    cdef tuple arrays
    cdef int64_t block_size
    cdef int32_t *ids
    cdef int32_t *positions
    cdef int32_t *slots
    cdef int32_t *lengths

    def __init__(self, list slices, int64_t block_size, ids, positions, slots, context_len):
        self.slices, self.block_size, self.arrays = slices, block_size, (ids, positions, slots, context_len)
        self.ids, self.positions = _numbers(ids, 1, True), _numbers(positions, 1, True)
        self.slots, self.lengths = _numbers(slots, 1, True), _numbers(context_len, 1, True)
        if not _length(ids) == _length(positions) == _length(slots) == _length(context_len) == len(slices):
            raise ShapeError(f"arrays of {len(slices)} sequences have other lengths", who="Moves")

    def run(self) -> bool:
        """False, with nothing of use in the arrays, where a sequence has not just one token to compute after the last one, or
        begins a block of the cache. Raises ShapeError for a sequence with fewer tokens than it says."""
        cdef int64_t s, start
        cdef const int32_t *tokens
        for s in range(len(self.slices)):
            part = self.slices[s]
            sequence = part.sequence
            start = <int64_t>part.start + 1
            if <int64_t>sequence.num_computed != start or <int64_t>sequence.num_tokens != start + 1:
                return False
            if start % self.block_size == 0:
                return False
            known = sequence.tokens
            tokens = _numbers(known, 1, False)
            if start >= _length(known):
                raise ShapeError(f"a sequence of {start + 1} tokens in memory of {_length(known)}", who="Moves")
            part.start = start
            self.ids[s] = tokens[start]
            self.positions[s] += 1
            self.slots[s] += 1
            self.lengths[s] += 1
        return True


def put(array, int64_t place, int32_t number) -> None:
    """array[place] = number, of i32 [n]. Raises ShapeError for an array that is no i32 or is shorter."""
    cdef int32_t *to = _numbers(array, 1, True)
    if not 0 <= place < _length(array):
        raise ShapeError(f"place {place} of an array of {_length(array)}", who="put")
    to[place] = number


def listed(array) -> list:
    """The numbers of an i32 array [n]. Raises ShapeError for another."""
    cdef int64_t n
    cdef const int32_t *source = _numbers(array, 1, False)
    return [source[n] for n in range(_length(array))]


cdef class StepResult:
    """What a step gives. ids: i32 [R], or None if the batch asked for no sampling; −1 where a row had no finite logit. logits:
    f32 [R, V], a view that is valid until the next run."""

    cdef readonly object ids, logits

    def __init__(self, ids, logits):
        self.ids, self.logits = ids, logits


cdef struct copy:
    const int32_t *source
    int32_t *to
    size_t size_bytes


cdef class Copies:
    """The same copies again and again. pairs: of each (array, where its numbers go: i32 with as many rows at least), which
    are kept. Raises ShapeError for arrays that are not i32 of one dimension without gaps, EngineError for too little room."""

    cdef list pairs
    cdef copy *copies
    cdef int count

    def __init__(self, list pairs):
        self.pairs = pairs
        free(self.copies)
        self.count, self.copies = 0, <copy *>calloc(len(pairs) + 1, sizeof(copy))
        if self.copies == NULL:
            raise MemoryError
        for source, target in pairs:
            self.copies[self.count].source, self.copies[self.count].to = _numbers(source, 1, False), _numbers(target, 1, True)
            if _length(source) > _length(target):
                raise EngineError(f"a step has {len(source)} rows; there is room for {len(target)}")
            self.copies[self.count].size_bytes = _length(source) * sizeof(int32_t)
            self.count += 1

    def run(self) -> None:
        """Makes the copies."""
        cdef int n
        for n in range(self.count):
            memcpy(self.copies[n].to, self.copies[n].source, self.copies[n].size_bytes)

    def __dealloc__(self):
        free(self.copies)


def fill(list fields, batch, int64_t T, int64_t S, int64_t R) -> None:
    """Copies a batch's arrays to where the backends read them.

    fields: of each (name, symbol of its rows, it may be left out, where: i32 [≥ rows] or [≥ rows, ≥ columns], or None if only
    its length matters). The batch's arrays may be read-only, and views with gaps. Raises EngineError for an array of another
    length: it would leave numbers of the step before in place; ShapeError for one that is no i32.
    """
    cdef int64_t rows, wanted, width, room, r
    cdef const int32_t *source
    cdef int32_t *to
    for name, symbol, optional, target in fields:
        array = getattr(batch, name)
        rows = len(array)
        wanted = T if symbol == "T" else S if symbol == "S" else R if symbol == "R" else S + 1
        if rows != wanted and (rows > 0 or not optional):
            sizes = f"{T} tokens, {S} sequences and {R} rows"
            raise EngineError(f"a step of {sizes} has {rows} rows of '{name}' instead of {wanted}")
        if target is None or rows == 0:
            continue
        if isinstance(array, cnp.ndarray) and not cnp.PyArray_ISCONTIGUOUS(<cnp.ndarray>array):
            array = np.ascontiguousarray(array)
        if rows > _length(target):
            raise EngineError(f"a step has {rows} rows of '{name}'; there is room for {_length(target)}")
        if name == "block_table":
            to, source = _numbers(target, 2, True), _numbers(array, 2, False)
            width, room = cnp.PyArray_DIM(<cnp.ndarray>array, 1), cnp.PyArray_DIM(<cnp.ndarray>target, 1)
            if width > room:
                raise EngineError(f"a block table of {width} columns; there is room for {room}")
            for r in range(rows):
                memcpy(to + r * room, source + r * width, width * sizeof(int32_t))
        else:
            to, source = _numbers(target, 1, True), _numbers(array, 1, False)
            memcpy(to, source, rows * sizeof(int32_t))
