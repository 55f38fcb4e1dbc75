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


cdef class Strings:
    """Texts by their number, read-only, in one block of UTF-8: texts are made when they are asked for. As Python's own objects
    those of a large vocabulary would take eight times as much, scattered among what stays."""

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
        return iter([self._text(i) for i in range(len(self))])


Sequence.register(Strings)


def read_strings(const unsigned char[::1] data, Py_ssize_t pos, Py_ssize_t end, Py_ssize_t count) -> tuple[Strings, int]:
    """`count` strings (u64 length, UTF-8) of data[pos:end], and the position behind them.

    There are fewer where one reaches past `end` or is no UTF-8; the position is then that string's. Raises ValueError
    for a part that is not in the data.
    """
    cdef uint64_t length
    cdef Strings out = Strings()
    cdef Py_ssize_t i, found = 0, start = pos, total = 0
    cdef int64_t *ends
    cdef char *block
    if not 0 <= pos <= end <= data.shape[0]:
        raise ValueError(f"bytes {pos} to {end} of {data.shape[0]}")
    while found < count and end - pos >= 8:
        memcpy(&length, &data[pos], 8)
        if length > <uint64_t>(end - pos - 8):
            break
        if not _is_utf8(&data[0] + pos + 8, <Py_ssize_t>length):
            break
        total += <Py_ssize_t>length
        pos += 8 + <Py_ssize_t>length
        found += 1
    out._block = PyBytes_FromStringAndSize(NULL, total)
    out._ends = PyBytes_FromStringAndSize(NULL, 8 * (found + 1))
    block, ends, total = PyBytes_AS_STRING(out._block), <int64_t *>PyBytes_AS_STRING(out._ends), 0
    for i in range(found):
        ends[i] = total
        memcpy(&length, &data[start], 8)
        if length:
            memcpy(block + total, &data[start + 8], length)
        total += <Py_ssize_t>length
        start += 8 + <Py_ssize_t>length
    ends[found] = total
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
