"""Host kernels that every backend shares: block codecs, half-precision conversions, random numbers, sampling.

The arithmetic is C (`_codecs.h`, `_select.h`): plain loops in a fixed order, bit-identical on every machine, run without the
GIL. This file is the wall in front of it: dtype, contiguity, length and range of every argument are checked here before a
pointer is taken, whatever the Python layers above have checked already. Called by formats (decoding tensors), backends/ref (the
reference ops), core/sampling and the prefix cache.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

cimport numpy as cnp

import numpy as np

from .errors import EngineError, InvalidRequest, OutOfMemory, ShapeError, UnsupportedError
from .quant import FORMATS

cnp.import_array()

__all__ = [
    "UNDECIDED",
    "Sampler",
    "bf16_to_f32",
    "decode",
    "decode_into",
    "encode",
    "encode_groups",
    "f16_to_f32",
    "f32_to_bf16",
    "f32_to_f16",
    "hash_blocks",
    "logprobs",
    "philox4x32",
    "sample",
    "trim",
    "uniform",
]

cdef extern from "_codecs.h" nogil:
    enum:
        FL_U8
        FL_E4M3
        FL_FP8G128
    int fl_decode(int type, const uint8_t *data, float *out, int64_t blocks)
    int fl_encode(int type, const float *data, uint8_t *out, int64_t blocks)
    void fl_halves_to_floats(const uint8_t *data, float *out, int64_t n)
    void fl_bf16s_to_floats(const uint8_t *data, float *out, int64_t n)
    void fl_floats_to_halves(const float *data, uint16_t *out, int64_t n)
    void fl_floats_to_bf16s(const float *data, uint16_t *out, int64_t n)

cdef extern from "_groups.h" nogil:
    void fl_decode_groups(int bits, int zero_point, int group, const uint8_t *data, float *out, int64_t groups)
    int fl_encode_groups(
        int bits, int zero_point, int group, int search, const float *data, uint8_t *out, double *errors, int64_t groups
    )

cdef extern from *:
    """
    #if defined(__GLIBC__)
    #include <malloc.h>
    static void fl_trim(void) { malloc_trim(0); }
    #else
    static void fl_trim(void) {}
    #endif
    """
    void fl_trim() nogil

cdef extern from "_select.h" nogil:
    ctypedef struct fl_sampler:
        const double *u
        const float *temperature
        const int32_t *top_k
        const float *top_p
        const float *min_p
        const int32_t *adjust_start
        const int32_t *adjust_ids
        const float *adjust_bias
        const float *adjust_repeat
        const float *adjust_sub
        const uint32_t *mask
        int wide

    int fl_runs_512()
    void fl_philox(const uint32_t *counter, const uint32_t *key, uint32_t *out)
    void fl_uniform(uint64_t seed, uint64_t sequence, const uint64_t *position, double *out, int64_t n)
    int fl_sample(const float *logits, int64_t rows, int64_t n, const fl_sampler *sampler, int32_t *ids)
    int fl_logprobs(const float *logits, int64_t rows, int64_t n, int64_t count, float *largest, double *sums, int32_t *ids)

cdef extern from "_held.h" nogil:
    enum:
        FL_UNDECIDED
        FL_ASK
    ctypedef struct fl_held:
        int free, likeliest
        int64_t only
        int64_t count

    int fl_sample_held(const float *logits, int64_t rows, int64_t n, const fl_sampler *sampler, fl_held *held, int32_t *ids)
    int fl_held_more(const float *logits, int64_t n, const fl_sampler *sampler, int64_t r, fl_held *held)
    int32_t fl_held_asked(const fl_held *held, int64_t further)
    void fl_held_answer(fl_held *held, int allowed)
    void fl_held_mask(fl_held *held, const uint32_t *mask)
    void fl_held_few(fl_held *held, const float *row, int64_t n, const uint32_t *mask)
    int32_t fl_held_next(const fl_held *held)
    int64_t fl_held_questions(const fl_held *held)


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


cdef inline bint _fits(value, int number, int ndim):
    """What `_array` would let pass, found without making a dtype object: `number` is numpy's of the type."""
    if not isinstance(value, cnp.ndarray):
        return False
    array = <cnp.ndarray>value
    return cnp.PyArray_TYPE(array) == number and cnp.PyArray_NDIM(array) == ndim and cnp.PyArray_ISCARRAY_RO(array)


def _output(value, str name, dtype):
    array = _array(value, name, dtype)
    if not array.flags.writeable:
        raise ShapeError(f"{name} is read-only", who=name)
    return array


cdef inline const void *_in(array):
    return cnp.PyArray_DATA(<cnp.ndarray>array)


cdef inline void *_out(array):
    return cnp.PyArray_DATA(<cnp.ndarray>array)


def _format(str name):
    try:
        return FORMATS[name]
    except KeyError:
        raise UnsupportedError(f"unknown format {name!r}", fix=f"one of {', '.join(FORMATS)}") from None


_OWN_TYPES = {"u8": FL_U8, "f8_e4m3": FL_E4M3, "fp8g128": FL_FP8G128}
"""Formats that have no number of ggml's."""

# ---- codecs ------------------------------------------------------------------------------------------------------------


def decode_into(str format, data, out):
    """Decodes consecutive values of a row (or of many whole rows) into `out`.

    format: key of FORMATS; data: uint8 [nbytes], contiguous, exactly the bytes of out.size values; out: f32, contiguous, any
    shape. Raises ShapeError where lengths disagree, UnsupportedError for an unknown format.
    """
    cdef int type, bits, zero_point, block, status = 0
    cdef int64_t blocks
    cdef const uint8_t *source
    cdef float *target
    spec = _format(format)
    bytes_ = _array(data, "data", np.uint8, 1)
    values = _output(out, "out", np.float32)
    needed = spec.nbytes(values.size)
    if bytes_.size != needed:
        raise ShapeError(f"{values.size} values of {format} are {needed} bytes; data has {bytes_.size}", who="data")
    type, blocks = _OWN_TYPES.get(format, -1) if spec.ggml is None else spec.ggml, values.size // spec.block
    bits, zero_point, block = spec.code_bits, spec.zero_point, spec.block
    source, target = <const uint8_t *>_in(bytes_), <float *>_out(values)
    with nogil:
        if bits:
            fl_decode_groups(bits, zero_point, block, source, target, blocks)
        else:
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

    format: f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0 or a group format (by min-max; encode_groups is better); values: f32,
    contiguous, any shape, rows of whole blocks.
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
        row = source_.shape[source_.ndim - 1]
        raise ShapeError(f"rows of {row} values are not whole {format} blocks of {spec.block}", who="values")
    if not np.isfinite(source_).all():
        raise UnsupportedError(f"{format} cannot hold NaN or infinity", who="values")
    if spec.code_bits:
        return encode_groups(format, source_, search=False)[0]
    out = np.empty(spec.nbytes(source_.size), np.uint8)
    type, blocks = -1 if spec.ggml is None else spec.ggml, source_.size // spec.block
    if type not in (2, 3, 6, 7, 8):
        fix = "f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, int4gN and int8gN can be written"
        raise UnsupportedError(f"no encoder for {format}", fix=fix)
    source, target = <const float *>_in(source_), <uint8_t *>_out(out)
    with nogil:
        status = fl_encode(type, source, target, blocks)
    if status != 0:
        raise UnsupportedError(f"no encoder for {format}")
    return out


def encode_groups(str format, values, *, bint search=True):
    """Values in a group format of our own, each group with the least squared error that the search of `_groups.h` finds.

    format: int4gN, int4gNs or int8gN; values: f32, contiguous, any shape, rows of whole groups, finite. search: False takes
    each group's range as it is (min-max), about 20 times as fast. Returns (uint8 [nbytes], f64 [groups]: squared error of each
    group). Same values, same bytes, on any machine. Raises UnsupportedError for other formats and for values that the format
    cannot hold.
    """
    cdef int status, bits, zero_point, block, flag = search
    cdef int64_t groups
    cdef const float *source
    cdef uint8_t *target
    cdef double *sums
    spec, source_ = _format(format), _array(values, "values", np.float32)
    if not spec.code_bits:
        raise UnsupportedError(f"{format} is not a group format", fix="int4gN, int4gNs or int8gN")
    if source_.ndim and source_.shape[source_.ndim - 1] % spec.block:
        row = source_.shape[source_.ndim - 1]
        raise ShapeError(f"rows of {row} values are not whole {format} groups of {spec.block}", who="values")
    if not np.isfinite(source_).all():
        raise UnsupportedError(f"{format} cannot hold NaN or infinity", who="values")
    bits, zero_point, block, groups = spec.code_bits, spec.zero_point, spec.block, source_.size // spec.block
    out, errors = np.empty(spec.nbytes(source_.size), np.uint8), np.empty(groups, np.float64)
    source, target, sums = <const float *>_in(source_), <uint8_t *>_out(out), <double *>_out(errors)
    with nogil:
        status = fl_encode_groups(bits, zero_point, block, flag, source, target, sums, groups)
    if status != 0:
        raise UnsupportedError(f"{format} cannot hold values this large: a scale would be beyond 65504", who="values")
    return out, errors


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


# ---- random numbers ------------------------------------------------------------------------------------------------


def philox4x32(counter, key):
    """Four random words of Philox4x32-10 (Salmon et al. 2011): counter uint32 [4], key uint32 [2] -> uint32 [4]."""
    words, keys, out = _array(counter, "counter", np.uint32, 1), _array(key, "key", np.uint32, 1), np.empty(4, np.uint32)
    if words.size != 4 or keys.size != 2:
        raise ShapeError(f"counter has {words.size} words and key {keys.size}; they must have 4 and 2", who="philox4x32")
    fl_philox(<const uint32_t *>_in(words), <const uint32_t *>_in(keys), <uint32_t *>_out(out))
    return out


def uniform(uint64_t seed, uint64_t sequence, position):
    """Uniform numbers in [0, 1) that depend on (seed, sequence, position) and on nothing else.

    position: uint64, any shape. Returns f64 of the same shape: the upper 53 of the 64 bits w0·2^32 + w1, w = Philox4x32-10
    with counter (position low, high, sequence low, high) and key (seed low, high).
    """
    positions = _array(position, "position", np.uint64)
    out = np.empty(positions.shape, np.float64)
    fl_uniform(seed, sequence, <const uint64_t *>_in(positions), <double *>_out(out), positions.size)
    return out


def trim() -> None:
    """Gives memory that was freed back to the system, where the C library keeps it (glibc); nothing elsewhere."""
    with nogil:
        fl_trim()


# ---- sampling ----------------------------------------------------------------------------------------------------------


cdef int64_t MOST_TOKENS = 1 << 22  # a sum of weights of 2^40 stays below 2^63


cdef _logits(value):
    logits = value if _fits(value, cnp.NPY_FLOAT32, 2) else _array(value, "logits", np.float32, 2)
    if not 1 <= logits.shape[1] <= MOST_TOKENS:
        raise ShapeError(f"logits have {logits.shape[1]} columns; the limit is 1 to {MOST_TOKENS}", who="logits")
    return logits


cdef _rows(value, str name, int number, int64_t count):
    """`value` as an array [count] of numpy's type `number`."""
    array = value if _fits(value, number, 1) else _array(value, name, cnp.PyArray_DescrFromType(number), 1)
    if cnp.PyArray_SIZE(<cnp.ndarray>array) != count:
        raise ShapeError(f"{name} has {array.shape[0]} entries; it must have {count}", who=name)
    return array


cdef _check_ids(const int32_t *ids, int64_t count, int64_t vocabulary, str name):
    cdef int64_t i
    for i in range(count):
        if ids[i] < 0 or ids[i] >= vocabulary:
            raise InvalidRequest(f"{name}[{i}] is {ids[i]}; ids are 0 to {vocabulary - 1}", who=name)


cdef _refuse(str name, int64_t row, value, str limits):
    raise InvalidRequest(f"{name}[{row}] is {value}; the range is {limits}", who=name)


cdef _check_sampler(const fl_sampler *s, int64_t rows, int64_t adjusted, int64_t vocabulary):
    """Ranges of everything the C code relies on; written so that NaN fails each comparison."""
    cdef int64_t i
    for i in range(rows):
        if not 0.0 <= s.u[i] < 1.0:
            _refuse("u", i, s.u[i], "0 <= u < 1")
        if not 0.0 <= s.temperature[i] <= 3e38:
            _refuse("temperature", i, s.temperature[i], "0 or more, finite")
        if not 0.0 <= s.top_p[i] <= 1.0:
            _refuse("top_p", i, s.top_p[i], "0 to 1")
        if not 0.0 <= s.min_p[i] <= 1.0:
            _refuse("min_p", i, s.min_p[i], "0 to 1")
        if s.adjust_start[i] > s.adjust_start[i + 1]:
            _refuse("adjust_start", i, s.adjust_start[i], "ascending")
    if s.adjust_start[0] != 0 or s.adjust_start[rows] != adjusted:
        raise ShapeError(f"adjust_start runs from {s.adjust_start[0]} to {s.adjust_start[rows]}, not from 0 to {adjusted}")
    _check_ids(s.adjust_ids, adjusted, vocabulary, "adjust_ids")
    for i in range(adjusted):
        if not s.adjust_bias[i] <= 3e38:
            _refuse("adjust_bias", i, s.adjust_bias[i], "a number or -inf")
        if not 0.0 < s.adjust_repeat[i] <= 3e38:
            _refuse("adjust_repeat", i, s.adjust_repeat[i], "above 0, finite")
        if not -3e38 <= s.adjust_sub[i] <= 3e38:
            _refuse("adjust_sub", i, s.adjust_sub[i], "finite")


UNDECIDED = FL_UNDECIDED


cdef class Sampler:
    """The parameters of R rows, their arrays checked once; `sample` says what they are. Values of numpy arrays may change
    between calls; of what is no array, a copy is kept. portable: only the code that every machine runs, for comparison."""

    cdef fl_sampler s
    cdef int64_t rows, adjusted, words
    cdef tuple kept

    def __init__(
        self, *, u, temperature, top_k, top_p, min_p, adjust_start=None, adjust_ids=None, adjust_bias=None, adjust_repeat=None,
        adjust_sub=None, mask=None, portable=False,
    ):
        """Raises ShapeError for an array of another type or length."""
        cdef int64_t rows, adjusted
        if not _fits(u, cnp.NPY_FLOAT64, 1):
            u = _array(u, "u", np.float64, 1)
        rows = cnp.PyArray_SIZE(<cnp.ndarray>u)
        if adjust_start is None:
            if not (adjust_ids is None and adjust_bias is None and adjust_repeat is None and adjust_sub is None):
                raise ShapeError("adjustments need adjust_start", who="adjust_start")
            adjust_start, adjust_ids = np.zeros(rows + 1, np.int32), np.empty(0, np.int32)
            adjust_bias = adjust_repeat = adjust_sub = np.empty(0, np.float32)
        if not _fits(adjust_ids, cnp.NPY_INT32, 1):
            adjust_ids = _array(adjust_ids, "adjust_ids", np.int32, 1)
        adjusted = cnp.PyArray_SIZE(<cnp.ndarray>adjust_ids)
        temperature = _rows(temperature, "temperature", cnp.NPY_FLOAT32, rows)
        top_k, top_p = _rows(top_k, "top_k", cnp.NPY_INT32, rows), _rows(top_p, "top_p", cnp.NPY_FLOAT32, rows)
        min_p = _rows(min_p, "min_p", cnp.NPY_FLOAT32, rows)
        adjust_start = _rows(adjust_start, "adjust_start", cnp.NPY_INT32, rows + 1)
        adjust_bias = _rows(adjust_bias, "adjust_bias", cnp.NPY_FLOAT32, adjusted)
        adjust_repeat = _rows(adjust_repeat, "adjust_repeat", cnp.NPY_FLOAT32, adjusted)
        adjust_sub = _rows(adjust_sub, "adjust_sub", cnp.NPY_FLOAT32, adjusted)
        self.rows, self.adjusted, self.words, self.s.mask = rows, adjusted, 0, NULL
        self.s.wide = 0 if portable else fl_runs_512()
        if mask is not None:
            mask = _array(mask, "mask", np.uint32, 2)
            self.words = mask.shape[1]
            if mask.shape[0] != rows or self.words == 0:
                raise ShapeError(f"mask has shape {mask.shape}; it must have {rows} rows", who="mask")
            self.s.mask = <uint32_t *>_in(mask)
        adjustments = (adjust_start, adjust_ids, adjust_bias, adjust_repeat, adjust_sub)
        self.kept = (u, temperature, top_k, top_p, min_p, adjustments, mask)
        self.s.u, self.s.temperature, self.s.top_k = <double *>_in(u), <float *>_in(temperature), <int32_t *>_in(top_k)
        self.s.top_p, self.s.min_p = <float *>_in(top_p), <float *>_in(min_p)
        self.s.adjust_start = <int32_t *>_in(adjust_start)
        self.s.adjust_ids, self.s.adjust_bias = <int32_t *>_in(adjust_ids), <float *>_in(adjust_bias)
        self.s.adjust_repeat, self.s.adjust_sub = <float *>_in(adjust_repeat), <float *>_in(adjust_sub)

    def choose(self, logits, list held=None, masks=None):
        """ids i32 [R] of logits f32 [R, V], as `sample`.

        held: of R entries, for a sampler without masks: None where a row is free, the id of the only token that may come, or a
        callable that says of each of some tokens' ids whether it may come (None: it cannot say, or takes longer than the mask).
        masks: a callable, called once at most with the number of each row that answers do not decide: its mask, u32
        [ceil(V / 32)], or None where every token may come. The id of such a row is the one that the mask of all that may come
        would give, or UNDECIDED where answers and the mask's bits of the likeliest tokens do not decide. Then the mask, if it
        was asked for, is in the callable's place in `held`, in a tuple; what one of the callables raised takes that place, too,
        and the row is UNDECIDED.
        """
        cdef int64_t n, row
        cdef cnp.npy_intp size = self.rows
        cdef int status
        cdef const float *source
        cdef int32_t *target
        cdef fl_held *lists
        array = _logits(logits)
        n = cnp.PyArray_DIM(<cnp.ndarray>array, 1)
        if cnp.PyArray_DIM(<cnp.ndarray>array, 0) != self.rows:
            raise ShapeError(f"u has {self.rows} entries; it must have {array.shape[0]}", who="u")
        if self.s.mask != NULL and self.words != (n + 31) // 32:
            wanted = (self.rows, (n + 31) // 32)
            raise ShapeError(f"mask has shape {(self.rows, self.words)}; it must be {wanted}", who="mask")
        _check_sampler(&self.s, self.rows, self.adjusted, n)
        out = cnp.PyArray_EMPTY(1, &size, cnp.NPY_INT32, 0)  # without np.empty's search for names and types
        source, target = <const float *>_in(array), <int32_t *>_out(out)
        if held is None:
            with nogil:
                status = fl_sample(source, self.rows, n, &self.s, target)
        else:
            if self.s.mask != NULL or len(held) != self.rows:
                wanted = f"{self.rows}, and there must be no mask"
                raise ShapeError(f"held has {len(held)} entries; it must have {wanted}", who="held")
            lists = <fl_held *>malloc(max(self.rows, 1) * sizeof(fl_held))
            if lists == NULL:
                raise OutOfMemory(f"sampling {self.rows} rows needs {self.rows * sizeof(fl_held)} bytes of memory")
            try:
                for row in range(self.rows):
                    entry = held[row]
                    lists[row].free = entry is None
                    lists[row].only = -1 if not isinstance(entry, int) else entry if 0 <= entry < n else n
                with nogil:
                    status = fl_sample_held(source, self.rows, n, &self.s, lists, target)
                if status == 0:
                    for row in range(self.rows):
                        if not lists[row].free:
                            target[row] = _ask(source, n, &self.s, &lists[row], held, row, masks)
            finally:
                free(lists)
        if status != 0:
            raise OutOfMemory(f"sampling {n} logits needs {20 * n + n // 32} bytes of scratch memory")
        return out


cdef int32_t _ask(
    const float *logits, int64_t n, fl_sampler *sampler, fl_held *asked, list held, Py_ssize_t row, masks
) except? -3:
    """The id of a row, by what its callable says of the tokens of its list, or by its mask."""
    cdef int32_t found = fl_held_next(asked)
    cdef int64_t i, count
    allows = held[row]
    try:
        while found == FL_ASK:
            count = fl_held_questions(asked)
            answers = allows([fl_held_asked(asked, i) for i in range(count)]) if count > 0 else None
            if answers is None:
                if masks is None:
                    return FL_UNDECIDED
                return _under_mask(logits, n, sampler, asked, held, row, masks(row))
            if len(answers) != count:
                raise EngineError(f"a constraint was asked for {count} tokens and answers for {len(answers)}")
            for i in range(count):
                fl_held_answer(asked, 1 if answers[i] else 0)
            if asked.likeliest and asked.count == 0:
                _list_more(logits, n, sampler, asked, row)
            found = fl_held_next(asked)
    except BaseException as error:  # a panic of the library of grammars is no Exception
        held[row] = error
        return FL_UNDECIDED
    return found


cdef int32_t _under_mask(
    const float *logits, int64_t n, fl_sampler *sampler, fl_held *asked, list held, Py_ssize_t row, mask
) except? -3:
    """The id of a row by the bits of its list in a mask; None: every token may come."""
    cdef const uint32_t *bits = NULL
    if mask is not None:
        mask = mask if _fits(mask, cnp.NPY_UINT32, 1) else _array(mask, "mask", np.uint32, 1)
        if cnp.PyArray_SIZE(<cnp.ndarray>mask) != (n + 31) // 32:
            raise ShapeError(f"mask has shape {mask.shape}; it must be {((n + 31) // 32,)}", who="mask")
        bits = <const uint32_t *>_in(mask)
    held[row] = (mask,)
    fl_held_mask(asked, bits)
    if bits != NULL and fl_held_next(asked) == FL_UNDECIDED and sampler.adjust_start[row] == sampler.adjust_start[row + 1]:
        fl_held_few(asked, logits + row * n, n, bits)
    if asked.likeliest and asked.count == 0:
        _list_more(logits, n, sampler, asked, row)
        fl_held_mask(asked, bits)
    return fl_held_next(asked)


cdef _list_more(const float *logits, int64_t n, fl_sampler *sampler, fl_held *asked, Py_ssize_t row):
    """Lists what is behind the likeliest token of a row, which has been refused."""
    cdef int status
    with nogil:
        status = fl_held_more(logits, n, sampler, row, asked)
    if status != 0:
        raise OutOfMemory(f"sampling {n} logits needs {20 * n + n // 32} bytes of scratch memory")


def sample(logits, *, bint with_logprobs=False, **arrays):
    """One id per row by the rule of `core/sampling.py`; a pure function of the row and its parameters.

    logits: f32 [R, V], never modified; u: f64 [R] in [0, 1); temperature (<= 1e-5: the largest logit), top_p (1: off), min_p
    (0: off): f32 [R]; top_k: i32 [R] (<= 0 or >= V: off). Adjustments of row r are entries adjust_start[r] to adjust_start[r+1]
    of adjust_ids (i32 [A]), adjust_bias, adjust_repeat, adjust_sub (f32 [A]); adjust_start: i32 [R+1], None: no adjustments.
    mask: u32 [R, ceil(V/32)], bit id % 32 of word id // 32, 0 = banned; None: all allowed.
    Returns i32 [R], -1 where a row holds NaN or +inf or where nothing is left to choose; with_logprobs: also f32 [R], the
    log-probabilities of the ids in the raw distribution (NaN for -1). Raises ShapeError, InvalidRequest, OutOfMemory.
    """
    logits = _logits(logits)
    _rows(arrays.get("u"), "u", cnp.NPY_FLOAT64, logits.shape[0])
    out = Sampler(**arrays).choose(logits)
    if not with_logprobs:
        return out
    chosen, _, _ = logprobs(logits, np.maximum(out, 0), 0)
    chosen[out < 0] = np.nan
    return out, chosen


def logprobs(logits, ids, int64_t top_n=0):
    """Log-probabilities of the raw distribution, before masks, biases and temperature.

    logits: f32 [R, V]; ids: i32 [R], the chosen tokens; top_n: 0 to V. Returns (chosen f32 [R], top_ids i32 [R, top_n] best
    first with ties to the lower id, top_logprobs f32 [R, top_n]); values below -9999 are -9999, so all are finite. The
    normaliser is summed in f64. A row with NaN, +inf or only -inf gives NaN and ids of -1. Raises ShapeError, InvalidRequest.
    """
    cdef int64_t rows, n
    cdef int status
    cdef const float *source
    cdef float *largest
    cdef double *sums
    cdef int32_t *tops
    array = _logits(logits)
    rows, n = array.shape[0], array.shape[1]
    chosen_ids = _rows(ids, "ids", cnp.NPY_INT32, rows)
    _check_ids(<const int32_t *>_in(chosen_ids), rows, n, "ids")
    if not 0 <= top_n <= n:
        raise InvalidRequest(f"top_n is {top_n}; the range is 0 to {n}", who="top_n")
    largest_, sums_ = np.empty(rows, np.float32), np.empty(rows, np.float64)
    top_ids = np.empty((rows, top_n), np.int32)
    source, largest = <const float *>_in(array), <float *>_out(largest_)
    sums, tops = <double *>_out(sums_), <int32_t *>_out(top_ids)
    with nogil:
        status = fl_logprobs(source, rows, n, top_n, largest, sums, tops)
    if status != 0:
        raise OutOfMemory(f"log-probabilities of {n} logits need {20 * n + n // 32} bytes of scratch memory")
    normaliser = largest_.astype(np.float64) + np.log(sums_)  # [R]
    picked = np.take_along_axis(array, chosen_ids.reshape(rows, 1), 1).reshape(rows).astype(np.float64)
    likeliest = np.take_along_axis(array, np.maximum(top_ids, 0), 1).astype(np.float64)  # [R, top_n]
    return (
        np.maximum(picked - normaliser, -9999.0).astype(np.float32),
        top_ids,
        np.maximum(likeliest - normaliser.reshape(rows, 1), -9999.0).astype(np.float32),
    )
