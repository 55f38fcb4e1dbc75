"""Host kernels that every backend shares: block codecs, half-precision conversions, block hashes, random numbers, sampling.

The arithmetic is C (`_codecs.h`, `_select.h`): plain loops in a fixed order, bit-identical on every machine, run without the
GIL. This file is the wall in front of it: dtype, contiguity, length and range of every argument are checked here before a
pointer is taken, whatever the Python layers above have checked already. Called by formats (decoding tensors), backends/ref (the
reference ops), core/sampling and the prefix cache.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

import numpy as np

from .errors import ShapeError, UnsupportedError
from .quant import FORMATS

__all__ = [
    "bf16_to_f32",
    "decode",
    "decode_into",
    "encode",
    "f16_to_f32",
    "f32_to_bf16",
    "f32_to_f16",
]

cdef extern from "_codecs.h" nogil:
    int fl_decode(int type, const uint8_t *data, float *out, int64_t blocks)
    int fl_encode(int type, const float *data, uint8_t *out, int64_t blocks)
    void fl_halves_to_floats(const uint8_t *data, float *out, int64_t n)
    void fl_bf16s_to_floats(const uint8_t *data, float *out, int64_t n)
    void fl_floats_to_halves(const float *data, uint16_t *out, int64_t n)
    void fl_floats_to_bf16s(const float *data, uint16_t *out, int64_t n)


# ---- arguments ---------------------------------------------------------------------------------------------------------


def _array(value, str name, dtype, ndim=None):
    """`value` as a C-contiguous array of exactly this dtype, without a copy; ShapeError says what it is instead."""
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    if array.dtype != dtype:
        raise ShapeError(f"{name} has dtype {array.dtype}; it must be {np.dtype(dtype)}", who=name)
    if ndim is not None and array.ndim != ndim:
        raise ShapeError(f"{name} has {array.ndim} dimensions; it must have {ndim}", who=name)
    if not array.flags.c_contiguous or not array.flags.aligned:
        raise ShapeError(f"{name} must be contiguous and aligned", who=name, fix="pass numpy.ascontiguousarray(...)")
    return array


def _output(value, str name, dtype):
    array = _array(value, name, dtype)
    if not array.flags.writeable:
        raise ShapeError(f"{name} is read-only", who=name)
    return array


cdef inline const void *_in(array) except? NULL:
    return <const void *><size_t>array.ctypes.data


cdef inline void *_out(array) except? NULL:
    return <void *><size_t>array.ctypes.data


def _format(str name):
    try:
        return FORMATS[name]
    except KeyError:
        raise UnsupportedError(f"unknown format {name!r}", fix=f"one of {', '.join(FORMATS)}") from None


# ---- codecs ------------------------------------------------------------------------------------------------------------


def decode_into(str format, data, out):
    """Decodes consecutive values of a row (or of many whole rows) into `out`.

    format: key of FORMATS; data: uint8 [nbytes], contiguous, exactly the bytes of out.size values; out: f32, contiguous, any
    shape. Raises ShapeError where lengths disagree, UnsupportedError for an unknown format.
    """
    cdef int type, status = 0
    cdef int64_t blocks
    cdef const uint8_t *source
    cdef float *target
    spec = _format(format)
    bytes_ = _array(data, "data", np.uint8, 1)
    values = _output(out, "out", np.float32)
    needed = spec.nbytes(values.size)
    if bytes_.size != needed:
        raise ShapeError(f"{values.size} values of {format} are {needed} bytes; data has {bytes_.size}", who="data")
    type, blocks = -1 if spec.ggml is None else spec.ggml, values.size // spec.block
    source, target = <const uint8_t *>_in(bytes_), <float *>_out(values)
    with nogil:
        status = fl_decode(type, source, target, blocks)
    if status != 0:
        raise UnsupportedError(f"no decoder for {format}")


def decode(str format, data, int64_t count):
    """The f32 values of `count` values stored as `format`.

    data: uint8 [FORMATS[format].nbytes(count)], contiguous. Returns f32 [count]; exact for all formats but f64, i32 and i64,
    which are rounded to nearest. Raises ShapeError where lengths disagree, UnsupportedError for an unknown format.
    """
    if count < 0:
        raise ShapeError(f"count is {count}; it must not be negative", who="count")
    spec, bytes_ = _format(format), _array(data, "data", np.uint8, 1)
    needed = spec.nbytes(count)
    if bytes_.size != needed:  # before the allocation: count may come from a file
        raise ShapeError(f"{count} values of {format} are {needed} bytes; data has {bytes_.size}", who="data")
    out = np.empty(count, np.float32)
    decode_into(format, bytes_, out)
    return out


def encode(str format, values):
    """The bytes of f32 values in a format, with ggml's reference rounding: for tests and tools, not for good quality.

    format: f32, f16, bf16, q4_0, q4_1, q5_0, q5_1 or q8_0; values: f32, contiguous, any shape, rows of whole blocks.
    Returns uint8 [nbytes]. Raises UnsupportedError for other formats, and for NaN or infinity in a block format.
    """
    cdef int type, status = 0
    cdef int64_t blocks
    cdef const float *source
    cdef uint8_t *target
    spec, source_ = _format(format), _array(values, "values", np.float32)
    if format == "f32":
        return source_.reshape(-1).view(np.uint8).copy()
    if format == "f16":
        return f32_to_f16(source_).reshape(-1).view(np.uint8)
    if format == "bf16":
        return f32_to_bf16(source_).reshape(-1).view(np.uint8)
    if source_.ndim and source_.shape[source_.ndim - 1] % spec.block:
        raise ShapeError(f"rows of {source_.shape[source_.ndim - 1]} values are not whole {format} blocks of {spec.block}", who="values")
    if not np.isfinite(source_).all():
        raise UnsupportedError(f"{format} cannot hold NaN or infinity", who="values")
    out = np.empty(spec.nbytes(source_.size), np.uint8)
    type, blocks = -1 if spec.ggml is None else spec.ggml, source_.size // spec.block
    if type not in (2, 3, 6, 7, 8):
        raise UnsupportedError(f"no encoder for {format}", fix="f32, f16, bf16, q4_0, q4_1, q5_0, q5_1 and q8_0 can be written")
    source, target = <const float *>_in(source_), <uint8_t *>_out(out)
    with nogil:
        status = fl_encode(type, source, target, blocks)
    if status != 0:
        raise UnsupportedError(f"no encoder for {format}")
    return out


# ---- conversions -------------------------------------------------------------------------------------------------------


def f32_to_f16(values):
    """Nearest f16 (ties to even) of f32 values of any shape; too large becomes infinity, NaN stays NaN. Returns float16."""
    array = _array(values, "values", np.float32)
    out = np.empty(array.shape, np.float16)
    cdef const float *source = <const float *>_in(array)
    cdef uint16_t *target = <uint16_t *>_out(out)
    cdef int64_t n = array.size
    with nogil:
        fl_floats_to_halves(source, target, n)
    return out


def f16_to_f32(values):
    """Exact f32 of f16 values (float16, or their uint16 bits) of any shape."""
    array = _array(values, "values", np.uint16 if getattr(values, "dtype", None) == np.uint16 else np.float16)
    out = np.empty(array.shape, np.float32)
    cdef const uint8_t *source = <const uint8_t *>_in(array)
    cdef float *target = <float *>_out(out)
    cdef int64_t n = array.size
    with nogil:
        fl_halves_to_floats(source, target, n)
    return out


def f32_to_bf16(values):
    """Nearest bf16 (ties to even) of f32 values of any shape, NaN stays NaN. Returns the bits as uint16: numpy has no bf16."""
    array = _array(values, "values", np.float32)
    out = np.empty(array.shape, np.uint16)
    cdef const float *source = <const float *>_in(array)
    cdef uint16_t *target = <uint16_t *>_out(out)
    cdef int64_t n = array.size
    with nogil:
        fl_floats_to_bf16s(source, target, n)
    return out


def bf16_to_f32(values):
    """Exact f32 of bf16 bits (uint16) of any shape."""
    array = _array(values, "values", np.uint16)
    out = np.empty(array.shape, np.float32)
    cdef const uint8_t *source = <const uint8_t *>_in(array)
    cdef float *target = <float *>_out(out)
    cdef int64_t n = array.size
    with nogil:
        fl_bf16s_to_floats(source, target, n)
    return out
