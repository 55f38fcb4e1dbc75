"""Lists of strings as GGUF files hold them, in loops of native code: a vocabulary has up to 262,144 pieces and twice as
many merges.

Called by `reader.Cursor.strings`, which says what is wrong with a list that does not end.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy

from collections.abc import Sequence

__all__ = ["Strings", "read_strings"]


cdef class _Block:

    cdef bytes _block
    cdef bytes _ends  # int64 [texts + 1]

    cdef str _text(self, Py_ssize_t index):
        cdef const int64_t *ends = <const int64_t *>PyBytes_AS_STRING(self._ends)
        return PyUnicode_DecodeUTF8(PyBytes_AS_STRING(self._block) + ends[index], ends[index + 1] - ends[index], NULL)

    def utf8(self):
        """(all texts, one behind the other; where each begins and the last one ends: int64 [texts + 1] as bytes)."""
        return self._block, self._ends

    def __len__(self):
        return len(self._ends) // 8 - 1

    def __getitem__(self, index):
        cdef Py_ssize_t i
        if isinstance(index, slice):
            return [self._text(i) for i in range(*index.indices(len(self)))]
        return self._text(range(len(self))[index])

    def __iter__(self):
        cdef Py_ssize_t i
        for i in range(len(self)):
            yield self._text(i)


class Strings(_Block, Sequence):
    """Texts by their number, read-only, in one block of UTF-8: texts are made when they are asked for. As Python's own objects
    those of a large vocabulary would take eight times as much, scattered among what stays."""

    __slots__ = ()


def read_strings(const unsigned char[::1] data, Py_ssize_t pos, Py_ssize_t end, Py_ssize_t count) -> tuple[Strings, int]:
    """`count` strings (u64 length, UTF-8) of data[pos:end], and the position behind them.

    There are fewer where one reaches past `end` or is no UTF-8; the position is then that string's. Raises ValueError
    for a part that is not in the data. The data may be a file that another program writes to meanwhile: each length is
    read once, and what is looked at is the copy.
    """
    cdef uint64_t length
    cdef _Block out = Strings()
    cdef Py_ssize_t i, found = 0, start = pos
    cdef int64_t *ends
    cdef char *block
    if not 0 <= pos <= end <= data.shape[0]:
        raise ValueError(f"bytes {pos} to {end} of {data.shape[0]}")
    count = max(0, min(count, (end - pos) // 8))
    out._ends = PyBytes_FromStringAndSize(NULL, 8 * (count + 1))
    ends = <int64_t *>PyBytes_AS_STRING(out._ends)
    ends[0] = 0
    while found < count and end - pos >= 8:
        memcpy(&length, &data[pos], 8)
        if length > <uint64_t>(end - pos - 8):
            break
        ends[found + 1] = ends[found] + <int64_t>length
        pos += 8 + <Py_ssize_t>length
        found += 1
    out._block = PyBytes_FromStringAndSize(NULL, ends[found])
    block = PyBytes_AS_STRING(out._block)
    pos = start
    for i in range(found):
        length = <uint64_t>(ends[i + 1] - ends[i])
        if length:
            memcpy(block + ends[i], &data[pos + 8], length)
            if not _is_utf8(<const unsigned char *>block + ends[i], <Py_ssize_t>length):
                found = i
                break
        pos += 8 + <Py_ssize_t>length
    if found < count:
        out._block, out._ends = out._block[: ends[found]], out._ends[: 8 * (found + 1)]
    return out, pos


cdef bint _is_utf8(const unsigned char *text, Py_ssize_t size) except -1:
    cdef uint64_t eight
    cdef Py_ssize_t at = 0
    while size - at >= 8:
        memcpy(&eight, text + at, 8)
        if eight & <uint64_t>0x8080808080808080:
            break
        at += 8
    while at < size and text[at] < 0x80:
        at += 1
    if at == size:
        return True
    try:
        PyUnicode_DecodeUTF8(<const char *>text + at, size - at, NULL)
    except UnicodeDecodeError:
        return False
    return True
