"""Lists of strings as GGUF files hold them, in one loop of native code: a vocabulary has up to 262,144 pieces and twice as
many merges.

Called by `reader.Cursor.strings`, which says what is wrong with a list that does not end.
"""

from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport uint64_t
from libc.string cimport memcpy

__all__ = ["read_strings"]


def read_strings(const unsigned char[::1] data, Py_ssize_t pos, Py_ssize_t end, Py_ssize_t count) -> tuple[list[str], int]:
    """`count` strings (u64 length, UTF-8) of data[pos:end], and the position behind them.

    The list is shorter where a string reaches past `end` or is no UTF-8; the position is then that string's. Raises ValueError
    for a part that is not in the data.
    """
    cdef uint64_t length
    cdef list out = []
    cdef Py_ssize_t _i
    if not 0 <= pos <= end <= data.shape[0]:
        raise ValueError(f"bytes {pos} to {end} of {data.shape[0]}")
    for _i in range(count):
        if end - pos < 8:
            break
        memcpy(&length, &data[pos], 8)
        if length > <uint64_t>(end - pos - 8):
            break
        try:
            out.append(PyUnicode_DecodeUTF8(<const char *>&data[0] + pos + 8, <Py_ssize_t>length, NULL))
        except UnicodeDecodeError:
            break
        pos += 8 + <Py_ssize_t>length
    return out, pos
