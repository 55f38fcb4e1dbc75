# The linear op by itself, for tests and tools: the same functions that programs call, with every length checked here.
# Included by _native.pyx, which declares the types of linear.h.

cdef extern from *:
    """
    #include "kernels.h"
    static const fl_linear_ops *fl_linear_of(const char *isa) {
        const fl_kernels *kernels = fl_kernels_for(isa);
        return kernels ? kernels->linear : NULL;
    }
    """
    ctypedef struct fl_linear_ops:
        void (*prepare)(fl_acts *a, const float *x, size_t ldx, int row0, int row1) noexcept nogil
        void (*linear)(const fl_weight *w, const fl_weight *up, const fl_acts *a, const fl_target *to, int strip0, int strip1,
                       void *scratch) noexcept nogil
        void (*unpack_row)(const fl_weight *w, int64_t n, float *out) noexcept nogil
        int32_t bf16
    const fl_linear_ops *fl_linear_of(const char *isa) nogil

cdef extern from "linear.h" nogil:
    int fl_unpack(int layout, int64_t N, int64_t K, const uint8_t *src, uint8_t *dst)
    ctypedef struct fl_target:
        const float *bias
        const float *up_bias
        const float *add
        float *y
        size_t ldadd, ldy
        fl_acts *codes
        int32_t act
    int FL_ACT_NONE
    void fl_linear_reference(const fl_weight *w, const float *x, int T, const float *bias, float *y, int kind, int accumulate)


def packed_bytes(str layout, int64_t N, int64_t K) -> int:
    """Bytes of a weight [N, K] in this layout; 0 if the shape cannot be packed so."""
    return fl_packed_bytes(layout_number(layout), N, K)


def source_bytes(str layout, int64_t N, int64_t K) -> int:
    """Bytes of the same weight in its file format."""
    return fl_source_bytes(layout_number(layout), N, K)


def linear_pack(str layout, int64_t N, int64_t K, const uint8_t[::1] src, uint8_t[::1] dst, int64_t strip0=0, int64_t strip1=-1) -> None:
    """Packs strips [strip0, strip1) (all by default). src: file bytes of their rows; dst: packed bytes of these strips.
    Raises ValueError where shape and lengths disagree."""
    cdef int number = layout_number(layout)
    cdef int64_t strips = (N + FL_STRIP - 1) // FL_STRIP, rows
    cdef size_t packed = fl_packed_bytes(number, N, K)
    if packed == 0:
        raise ValueError(f"a weight of {N} x {K} cannot be packed as {layout}")
    if strip1 < 0:
        strip1 = strips
    if not 0 <= strip0 < strip1 <= strips:
        raise ValueError(f"there are no strips [{strip0}, {strip1}) in a weight of {N} rows")
    rows = min(strip1 * FL_STRIP, N) - strip0 * FL_STRIP
    if <size_t>src.shape[0] != fl_source_bytes(number, rows, K):
        raise ValueError(f"{rows} x {K} values of {layout} are {fl_source_bytes(number, rows, K)} bytes; src has {src.shape[0]}")
    if <size_t>dst.shape[0] != packed // strips * (strip1 - strip0):
        raise ValueError(f"{strip1 - strip0} strips are {packed // strips * (strip1 - strip0)} bytes; dst has {dst.shape[0]}")
    with nogil:
        fl_pack_strips(number, N, K, strip0, strip1, &src[0], &dst[0])


def linear_unpack(str layout, int64_t N, int64_t K, const uint8_t[::1] src, uint8_t[::1] dst) -> None:
    """The file bytes that linear_pack packed. Raises ValueError where shape and lengths disagree."""
    cdef int number = layout_number(layout)
    cdef size_t packed = fl_packed_bytes(number, N, K), plain = fl_source_bytes(number, N, K)
    if packed == 0 or <size_t>src.shape[0] != packed or <size_t>dst.shape[0] != plain:
        raise ValueError(f"{N} x {K} values of {layout} are {packed} bytes packed and {plain} in the file; got {src.shape[0]} and {dst.shape[0]}")
    with nogil:
        fl_unpack(number, N, K, &src[0], &dst[0])


cdef const fl_linear_ops *_linear_ops(str isa) except NULL:
    cdef bytes raw = isa.encode()
    cdef const fl_linear_ops *ops = fl_linear_of(raw)
    if ops == NULL:
        raise ValueError(f"the variant {isa} cannot run here")
    return ops


def multiplies_bf16(str isa) -> bool:
    """Whether a variant takes bf16 activations for bf16 weights. Raises ValueError for one that cannot run here."""
    return _linear_ops(isa).bf16 != 0


cdef int _weight(str layout, int64_t N, int64_t K, const uint8_t[::1] packed, fl_weight *w) except -1:
    w.layout, w.N, w.K = layout_number(layout), <int32_t>N, <int32_t>K
    if packed.shape[0] == 0 or <size_t>packed.shape[0] != fl_packed_bytes(w.layout, N, K):
        raise ValueError(f"a weight of {N} x {K} in {layout} is {fl_packed_bytes(w.layout, N, K)} bytes; got {packed.shape[0]}")
    w.data = &packed[0]
    return 0


def linear_run(str isa, str layout, int64_t N, const uint8_t[::1] packed, const float[:, ::1] x, float[:, ::1] y, const float[::1] bias=None,
               bint exact=False, bint accumulate=False, strip_cuts=(), row_cuts=()) -> None:
    """y[T, N] (+)= x[T, K] times the packed weight, by one variant. strip_cuts, row_cuts: ascending places where the ranges of
    strips (of rows in prepare) are cut into separate calls. Raises ValueError where sizes disagree."""
    cdef const fl_linear_ops *ops = _linear_ops(isa)
    cdef fl_weight w
    cdef fl_acts a
    cdef fl_target to
    cdef int T = <int>x.shape[0], a0, a1
    cdef const float *b = NULL
    _weight(layout, N, x.shape[1], packed, &w)
    if T == 0 or y.shape[0] != T or y.shape[1] != N or (bias is not None and bias.shape[0] != N):
        raise ValueError("x, y and bias do not belong together")
    if bias is not None:
        b = &bias[0]
    memset(&to, 0, sizeof(to))
    to.bias, to.y, to.ldy, to.ldadd, to.act = b, &y[0, 0], N, N, FL_ACT_NONE
    if accumulate:
        to.add = to.y
    cdef int strips = <int>((N + FL_STRIP - 1) // FL_STRIP)
    a.kind, a.rows, a.K = fl_prepare_kind(w.layout, exact, ops.bf16), T, w.K
    cdef size_t prepared = (fl_prepared_bytes(a.kind, T, w.K) + 63) // 64 * 64
    cdef char *memory = <char *>calloc(prepared + fl_linear_scratch() + 64, 1)
    if memory == NULL:
        raise MemoryError
    cdef char *start = memory + (64 - <intptr_t>memory % 64) % 64
    a.data = <uint8_t *>start
    try:
        for a0, a1 in zip((0, *row_cuts), (*row_cuts, T), strict=True):
            ops.prepare(&a, &x[0, 0], w.K, a0, a1)
        for a0, a1 in zip((0, *strip_cuts), (*strip_cuts, strips), strict=True):
            ops.linear(&w, NULL, &a, &to, a0, a1, start + prepared)
    finally:
        free(memory)


def linear_reference(str layout, int64_t N, const uint8_t[::1] packed, const float[:, ::1] x, float[:, ::1] y, const float[::1] bias=None,
                     bint exact=False, bint accumulate=False, bint bf16=False) -> None:
    """The scalar specification of linear_run. bf16: of a variant that multiplies bf16, as avx512 does."""
    cdef fl_weight w
    cdef const float *b = NULL
    _weight(layout, N, x.shape[1], packed, &w)
    if x.shape[0] == 0 or y.shape[0] != x.shape[0] or y.shape[1] != N or (bias is not None and bias.shape[0] != N):
        raise ValueError("x, y and bias do not belong together")
    if bias is not None:
        b = &bias[0]
    fl_linear_reference(&w, &x[0, 0], <int>x.shape[0], b, &y[0, 0], fl_prepare_kind(w.layout, exact, bf16), accumulate)


def linear_unpack_row(str isa, str layout, int64_t N, const uint8_t[::1] packed, int64_t n, float[::1] out) -> None:
    """Row n of a packed weight as f32, out[K]."""
    cdef const fl_linear_ops *ops = _linear_ops(isa)
    cdef fl_weight w
    _weight(layout, N, out.shape[0], packed, &w)
    if not 0 <= n < N:
        raise ValueError(f"there is no row {n} in a weight of {N} rows")
    ops.unpack_row(&w, n, &out[0])
