"""Byte-pair merging over a SentencePiece vocabulary, from the pieces alone.

Of all neighbouring pairs whose union is a piece the one of best score is merged first (Kudo & Richardson 2018); among equals
the one whose left part is shorter, then the one further left. That is the order of the list of merges that such a vocabulary
has in a tokenizer.json, which is never made here: 262,144 pieces give 513,511 merges, and a library that keeps them and its
own copies of the pieces takes 70 MB and half a second.

Called by `sentence_pieces.SentencePieces`, which says what is wrong with a vocabulary.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy

import numpy as np

__all__ = ["PieceTable", "siphash"]

cdef enum:
    LONGEST_TEXT = 1 << 30  # bytes: positions are int32


cdef struct Symbol:
    int32_t id
    int32_t start  # byte of the text
    int32_t size  # bytes of text; 0: merged into the one before
    int32_t prev  # -1: none
    int32_t next


cdef struct Merge:
    uint64_t rank  # the piece's place by score, then the bytes of the left part
    int32_t pos
    int32_t id


cdef uint64_t _rotated(uint64_t x, int bits) noexcept nogil:
    return (x << bits) | (x >> (64 - bits))


cdef void _round(uint64_t *v) noexcept nogil:
    """One round of SipHash over its state v [4]."""
    v[0] += v[1]
    v[2] += v[3]
    v[1] = _rotated(v[1], 13) ^ v[0]
    v[3] = _rotated(v[3], 16) ^ v[2]
    v[0] = _rotated(v[0], 32)
    v[2] += v[1]
    v[0] += v[3]
    v[1] = _rotated(v[1], 17) ^ v[2]
    v[3] = _rotated(v[3], 21) ^ v[0]
    v[2] = _rotated(v[2], 32)


cdef void _absorb(uint64_t *v, uint64_t word) noexcept nogil:
    v[3] ^= word
    _round(v)
    v[0] ^= word


cdef uint64_t _hash(
    const uint64_t *key, const unsigned char *a, int64_t na, const unsigned char *b, int64_t nb
) noexcept nogil:
    """SipHash-1-3 (Aumasson & Bernstein 2012) of a followed by b. key [2]."""
    cdef uint64_t v[4]
    cdef uint64_t word = 0
    cdef int64_t i = 0
    cdef int bits = 0  # of `word`
    v[0] = key[0] ^ <uint64_t>0x736F6D6570736575
    v[1] = key[1] ^ <uint64_t>0x646F72616E646F6D
    v[2] = key[0] ^ <uint64_t>0x6C7967656E657261
    v[3] = key[1] ^ <uint64_t>0x7465646279746573
    while na - i >= 8:
        memcpy(&word, a + i, 8)
        _absorb(v, word)
        i += 8
    word = 0
    while i < na:
        word |= <uint64_t>a[i] << bits
        i, bits = i + 1, bits + 8
    i = 0
    while i < nb:
        word |= <uint64_t>b[i] << bits
        i, bits = i + 1, bits + 8
        if bits == 64:
            _absorb(v, word)
            word, bits = 0, 0
            while nb - i >= 8:
                memcpy(&word, b + i, 8)
                _absorb(v, word)
                i, word = i + 8, 0
    _absorb(v, word | <uint64_t>(na + nb) << 56)
    v[2] ^= 0xFF
    _round(v)
    _round(v)
    _round(v)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def siphash(bytes key, bytes left, bytes right) -> int:
    """The hash of left followed by right under a key of 16 bytes, as the table has it: to compare with others."""
    cdef uint64_t words[2]
    if len(key) != 16:
        raise ValueError(f"a key of {len(key)} bytes")
    memcpy(words, PyBytes_AS_STRING(key), 16)
    return _hash(words, left, len(left), right, len(right))


cdef bint _before(const Merge *a, const Merge *b) noexcept nogil:
    return a.rank < b.rank or (a.rank == b.rank and a.pos < b.pos)


cdef void _push(Merge *heap, Py_ssize_t count, Merge item) noexcept nogil:
    """heap [count] → [count + 1], the first entry the least."""
    cdef Py_ssize_t at = count, up
    while at > 0:
        up = (at - 1) >> 1
        if not _before(&item, &heap[up]):
            break
        heap[at] = heap[up]
        at = up
    heap[at] = item


cdef Merge _pop(Merge *heap, Py_ssize_t count) noexcept nogil:
    """The least of heap [count], which becomes [count - 1]."""
    cdef Merge least = heap[0]
    cdef Merge last = heap[count - 1]
    cdef Py_ssize_t at = 0, down = 1
    count -= 1
    while down < count:
        if down + 1 < count and _before(&heap[down + 1], &heap[down]):
            down += 1
        if not _before(&heap[down], &last):
            break
        heap[at] = heap[down]
        at = down
        down = 2 * at + 1
    heap[at] = last
    return least


cdef class PieceTable:
    """Pieces, found by their spelling, and what merging needs of them. Immutable, so that threads may share it.

    block: the pieces in UTF-8, one behind the other; ends: int32 [pieces + 1], where each begins and the last one ends.
    places: int32 [pieces], the place by score of a piece that takes part in merging, -1 for others.
    byte_pieces: int32 [256], the pieces that write the bytes of a character without a piece, or -1 throughout.
    unknown: the token for such a character where there are none, or -1: it is left out then.
    key: 16 random bytes; who does not know them can make no file whose pieces collide.
    Raises ValueError for arrays that do not fit.
    doubled: the first two numbers that have the same piece, or None.
    """

    cdef const unsigned char[::1] _block
    cdef const int32_t[::1] _ends
    cdef const int32_t[::1] _places
    cdef const int32_t[::1] _byte_pieces
    cdef int32_t *_slots
    cdef uint64_t _mask
    cdef uint64_t _key[2]
    cdef int64_t _longest
    cdef int32_t _unknown
    cdef readonly object doubled

    def __cinit__(
        self,
        const unsigned char[::1] block,
        const int32_t[::1] ends,
        const int32_t[::1] places,
        const int32_t[::1] byte_pieces,
        int32_t unknown,
        bytes key,
    ):
        cdef Py_ssize_t count = places.shape[0], i
        cdef uint64_t size = 4, at
        cdef int32_t found
        cdef bint spells_bytes = byte_pieces.shape[0] == 256 and byte_pieces[0] >= 0
        self._slots = NULL
        if len(key) != 16:
            raise ValueError(f"a key of {len(key)} bytes for pieces")
        if byte_pieces.shape[0] != 256:
            raise ValueError(f"{byte_pieces.shape[0]} byte pieces")
        for i in range(256):
            if not -1 <= byte_pieces[i] < count or (byte_pieces[i] >= 0) != spells_bytes:
                raise ValueError(f"byte {i} has piece {byte_pieces[i]}")
        if ends.shape[0] != count + 1 or count >= 1 << 30 or not -1 <= unknown < count:
            raise ValueError(f"{count} pieces with {ends.shape[0]} ends, unknown {unknown}")
        if ends[0] != 0 or ends[count] != block.shape[0]:
            raise ValueError("the pieces do not fill their block")
        self._longest = 0
        for i in range(count):
            if ends[i + 1] < ends[i]:
                raise ValueError(f"piece {i} ends before it begins")
            self._longest = max(self._longest, <int64_t>ends[i + 1] - ends[i])
        self._block, self._ends, self._places = block, ends, places
        self._byte_pieces, self._unknown = byte_pieces, unknown
        memcpy(self._key, PyBytes_AS_STRING(key), 16)
        while size < 2 * <uint64_t>count:
            size *= 2
        self._mask = size - 1
        self._slots = <int32_t *>calloc(size, sizeof(int32_t))  # number of a piece + 1; 0: free
        if self._slots is NULL:
            raise MemoryError()
        self.doubled = None
        for i in range(count):
            found = self._find(self._spelling(i), ends[i + 1] - ends[i], NULL, 0, &at)
            if found < 0:
                self._slots[at] = <int32_t>i + 1
            elif self.doubled is None:
                self.doubled = (found, i)

    def __reduce__(self):
        key = PyBytes_FromStringAndSize(<const char *>self._key, 16)
        arrays = [np.asarray(self._ends), np.asarray(self._places), np.asarray(self._byte_pieces)]
        return PieceTable, (bytes(self._block), *arrays, self._unknown, key)

    def __dealloc__(self):
        free(self._slots)

    cdef const unsigned char *_spelling(self, Py_ssize_t piece) noexcept nogil:
        if self._block.shape[0] == 0:
            return NULL
        return &self._block[0] + self._ends[piece]

    cdef int32_t _find(
        self, const unsigned char *a, int64_t na, const unsigned char *b, int64_t nb, uint64_t *where
    ) noexcept nogil:
        """The piece that is a followed by b, or -1; where: its place in the table, or the free one (may be NULL)."""
        cdef uint64_t at = _hash(self._key, a, na, b, nb) & self._mask
        cdef int32_t piece
        cdef const unsigned char *s
        while self._slots[at]:
            piece = self._slots[at] - 1
            if self._ends[piece + 1] - self._ends[piece] == na + nb:
                s = self._spelling(piece)
                if (na == 0 or memcmp(s, a, na) == 0) and (nb == 0 or memcmp(s + na, b, nb) == 0):
                    if where is not NULL:
                        where[0] = at
                    return piece
            at = (at + 1) & self._mask
        if where is not NULL:
            where[0] = at
        return -1

    def find(self, str text):
        """The number of the piece with this spelling, or -1."""
        cdef Py_ssize_t size
        cdef const char *data = PyUnicode_AsUTF8AndSize(text, &size)
        return self._find(<const unsigned char *>data, size, NULL, 0, NULL)

    cdef bint _pair(self, const Symbol *symbols, int32_t left, int32_t right, Merge *out) noexcept nogil:
        """Whether two neighbours may become one, and what they become."""
        cdef int32_t a = symbols[left].id, b = symbols[right].id, piece
        cdef int64_t na, nb  # bytes
        if self._places[a] < 0 or self._places[b] < 0:
            return False
        na, nb = self._ends[a + 1] - self._ends[a], self._ends[b + 1] - self._ends[b]
        if na + nb > self._longest:
            return False
        piece = self._find(self._spelling(a), na, self._spelling(b), nb, NULL)
        if piece < 0 or self._places[piece] < 0:
            return False
        out.rank = (<uint64_t>self._places[piece] << 32) | <uint64_t>na
        out.pos, out.id = left, piece
        return True

    cdef Py_ssize_t _split(self, const unsigned char *text, Py_ssize_t size, Symbol *symbols) noexcept nogil:
        """Characters → symbols [at most size], as they are before any merge; their number."""
        cdef Py_ssize_t i = 0, k, n, count = 0
        cdef int32_t piece
        cdef int32_t pending = 0  # bytes of characters without a token, which become one unknown token
        cdef bint spells_bytes = self._byte_pieces[0] >= 0
        while i < size:
            n = 1 if text[i] < 0x80 else 2 if text[i] < 0xE0 else 3 if text[i] < 0xF0 else 4
            if n > size - i:
                n = size - i
            piece = self._find(&text[i], n, NULL, 0, NULL)
            if piece >= 0:
                if pending:
                    symbols[count] = Symbol(self._unknown, <int32_t>i - pending, pending, -1, -1)
                    count, pending = count + 1, 0
                symbols[count] = Symbol(piece, <int32_t>i, <int32_t>n, -1, -1)
                count += 1
            elif spells_bytes:
                for k in range(i, i + n):
                    symbols[count] = Symbol(self._byte_pieces[text[k]], <int32_t>k, 1, -1, -1)
                    count += 1
            elif self._unknown >= 0:
                pending += <int32_t>n
            i += n
        if pending:
            symbols[count] = Symbol(self._unknown, <int32_t>size - pending, pending, -1, -1)
            count += 1
        for k in range(count):
            symbols[k].prev, symbols[k].next = <int32_t>k - 1, <int32_t>k + 1 if k + 1 < count else -1
        return count

    cdef void _merge(self, Symbol *symbols, Py_ssize_t count, Merge *heap) noexcept nogil:
        """Merges until no pair is a piece. heap: room for 2 × count."""
        cdef Py_ssize_t k, waiting = 0
        cdef int32_t pos, right
        cdef Merge best, now
        for k in range(count - 1):
            if self._pair(symbols, <int32_t>k, <int32_t>k + 1, &now):
                _push(heap, waiting, now)
                waiting += 1
        while waiting:
            best = _pop(heap, waiting)
            waiting -= 1
            pos = best.pos
            if symbols[pos].size == 0 or symbols[pos].next < 0:
                continue
            right = symbols[pos].next
            if not self._pair(symbols, pos, right, &now) or now.id != best.id:
                continue  # one of the two is another one by now
            symbols[pos].id = best.id
            # with what was left out between
            symbols[pos].size = symbols[right].start + symbols[right].size - symbols[pos].start
            symbols[right].size = 0
            symbols[pos].next = symbols[right].next
            if symbols[pos].next >= 0:
                symbols[symbols[pos].next].prev = pos
            if symbols[pos].prev >= 0 and self._pair(symbols, symbols[pos].prev, pos, &now):
                _push(heap, waiting, now)
                waiting += 1
            if symbols[pos].next >= 0 and self._pair(symbols, pos, symbols[pos].next, &now):
                _push(heap, waiting, now)
                waiting += 1

    def encode(self, str text):
        """(ids, first byte of each, bytes of each), int32 [tokens] as bytes, of a text whose blanks are written as
        the pieces have them. Raises UnicodeEncodeError for a lone surrogate, ValueError for more than a GiB, MemoryError."""
        cdef Py_ssize_t size, count = 0, kept = 0, k
        cdef const unsigned char *data = <const unsigned char *>PyUnicode_AsUTF8AndSize(text, &size)
        cdef Symbol *symbols
        cdef Merge *heap = NULL
        cdef int32_t *ids
        cdef int32_t *starts
        cdef int32_t *sizes
        if size > LONGEST_TEXT:
            raise ValueError(f"a text of {size:,} bytes")
        symbols = <Symbol *>malloc((size + 1) * sizeof(Symbol))
        try:
            with nogil:
                if symbols is not NULL:
                    count = self._split(data, size, symbols)
                    heap = <Merge *>malloc((2 * count + 2) * sizeof(Merge))
                if heap is not NULL:
                    self._merge(symbols, count, heap)
                    for k in range(count):
                        if symbols[k].size:
                            symbols[kept] = symbols[k]
                            kept += 1
            if heap is NULL:
                raise MemoryError()
            found = [PyBytes_FromStringAndSize(NULL, kept * sizeof(int32_t)) for _ in range(3)]
            ids = <int32_t *>PyBytes_AS_STRING(found[0])
            starts = <int32_t *>PyBytes_AS_STRING(found[1])
            sizes = <int32_t *>PyBytes_AS_STRING(found[2])
            with nogil:
                for k in range(kept):
                    ids[k], starts[k], sizes[k] = symbols[k].id, symbols[k].start, symbols[k].size
        finally:
            free(symbols)
            free(heap)
        return tuple(found)
