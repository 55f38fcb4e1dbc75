"""The bridge to the C code: memory, the thread pool, weight packing and compiled programs. Thin on purpose; `backend.py` and
`lower.py` decide, the files of `native/` compute. Every call that can take long drops the GIL."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, int64_t, intptr_t, uint8_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memmove, memset

import os


cdef extern from "linear.h" nogil:
    ctypedef struct fl_weight:
        int32_t layout, N, K
        const uint8_t *data
    ctypedef struct fl_acts:
        int32_t kind, rows, K
        uint8_t *data
    int FL_STRIP
    int fl_layout_id(const char *name)
    const char *fl_layout_name(int layout)
    size_t fl_packed_bytes(int layout, int64_t N, int64_t K)
    size_t fl_source_bytes(int layout, int64_t N, int64_t K)
    int fl_pack_strips(int layout, int64_t N, int64_t K, int64_t strip0, int64_t strip1, const uint8_t *src, uint8_t *dst)
    int fl_prepare_kind(int layout, int exact, int bf16)
    size_t fl_prepared_bytes(int kind, int64_t rows, int64_t K)
    size_t fl_linear_scratch()

cdef extern from "kernels.h" nogil:
    ctypedef struct fl_view:
        char *p
        int64_t rows, s0, s1
        int32_t d1, d2, dtype
    ctypedef struct fl_cache:
        char *p
        int64_t block_bytes, num_blocks
        int32_t block_size, heads, key_dim, value_dim, dtype
    ctypedef struct fl_kernels:
        const char *name
        int32_t pairs
    int64_t fl_cache_block_bytes(const fl_cache *cache)
    int FL_KV_GROUP
    int64_t fl_attention_scratch(int32_t key_dim, int32_t value_dim)
    const fl_kernels *fl_kernels_for(const char *isa)

cdef extern from "isa.h" nogil:
    int FL_ISA_COUNT
    const char *fl_isa_name(int isa)
    const char *fl_isa_missing(int isa)

cdef extern from "pool.h" nogil:
    ctypedef struct fl_pool:
        pass
    ctypedef void (*fl_pool_fn)(void *arg, int thread, int threads, fl_pool *pool) noexcept nogil
    fl_pool *fl_pool_new(int threads, const int32_t *cores, const int32_t *start, double idle_us, double barrier_us, int *error)
    int fl_pool_threads(const fl_pool *pool)
    int fl_pool_run(fl_pool *pool, fl_pool_fn fn, void *arg)
    void fl_pool_free(fl_pool *pool)

cdef extern from "program.h" nogil:
    int FL_OPERANDS, FL_INTS, FL_FLOATS
    ctypedef struct fl_instruction:
        int32_t op, barrier, node
        int32_t symbol[9]
        fl_view v[9]
        fl_weight weight, up
        fl_acts acts, codes
        fl_cache cache
        int64_t i[8]
        float f[2]
        double seconds, waited
    ctypedef struct fl_check:
        int32_t kind, node, symbol, limit_symbol
        int64_t rows, limit
        const int32_t *p
        const int32_t *context_len
        const int32_t *block_table
        int64_t table_stride, table_width, block_size
    ctypedef struct fl_fault:
        int32_t node
        int64_t where, value, limit
    ctypedef struct fl_program:
        const fl_kernels *kernels
        fl_pool *pool
        fl_instruction *code
        fl_check *checks
        int32_t n_code, n_checks, max_T, max_S, max_R, profile
        char *scratch
        int64_t scratch_bytes
    int fl_program_run(fl_program *program, int64_t T, int64_t S, int64_t R, fl_fault *fault)

cdef extern from "moe.h" nogil:
    int64_t fl_moe_prepared(int kind, int64_t pairs, int64_t experts, int64_t K)
    int64_t fl_moe_scratch(int64_t T, int64_t top_k, int64_t experts)

cdef extern from "recurrent.h" nogil:
    int FL_CONV_TAPS
    int64_t fl_delta_scratch(int32_t key_dim)

cdef extern from "pages.h" nogil:
    void *fl_memory_map(size_t nbytes, int huge)
    void fl_memory_unmap(void *address, size_t nbytes)

cdef extern from "probe.h" nogil:
    double fl_probe_read(fl_pool *pool, const void *memory, size_t nbytes, int rounds)

cdef extern from "peaks.h" nogil:
    int FL_PEAK_COUNT
    const char *fl_peak_name(int peak)
    const char *fl_peak_dtype(int peak)
    int fl_peak_isa(int peak)
    int fl_peak_missing(int peak)
    double fl_probe_peak(fl_pool *pool, int peak, int rounds)


# what this machine has ------------------------------------------------------------------------------------------------


def isa_names() -> tuple[str, ...]:
    """Names of the variants, the oldest first."""
    return tuple((<bytes>fl_isa_name(i)).decode() for i in range(FL_ISA_COUNT))


def isa_missing(int isa) -> str | None:
    """Why variant number `isa` cannot run here; None if it can."""
    cdef const char *why = fl_isa_missing(isa)
    return None if why == NULL else (<bytes>why).decode()


def attends_in_pairs(str isa) -> bool:
    """Whether attention of a variant multiplies bf16, in caches of pairs. Raises ValueError for one that cannot run here."""
    cdef bytes raw = isa.encode()
    cdef const fl_kernels *kernels = fl_kernels_for(raw)
    if kernels == NULL:
        raise ValueError(f"the variant {isa} cannot run here")
    return kernels.pairs != 0


def peaks() -> list[tuple[str, str, int, str]]:
    """(instruction, type it multiplies, first variant with it, why it cannot be measured or "") of each probe, by number."""
    cdef const char *why
    found = []
    for i in range(FL_PEAK_COUNT):
        why = fl_isa_missing(fl_peak_isa(i))
        reason = (<bytes>why).decode() if why != NULL else ("this build has no such probe" if fl_peak_missing(i) else "")
        found.append(((<bytes>fl_peak_name(i)).decode(), (<bytes>fl_peak_dtype(i)).decode(), fl_peak_isa(i), reason))
    return found


# sizes ----------------------------------------------------------------------------------------------------------------


def layout_number(str name) -> int:
    """The C number of a packed layout; −1 if unknown."""
    cdef bytes raw = name.encode()
    return fl_layout_id(raw)


STRIP = FL_STRIP
"""Output rows of a strip."""
KV_GROUP = FL_KV_GROUP
"""Channels of a head that share a scale of an int8 cache."""
CONV_TAPS = FL_CONV_TAPS
"""Most taps of a short convolution."""


def layout_name(int layout) -> str:
    """The name of a packed layout number."""
    cdef const char *name = fl_layout_name(layout)
    if name == NULL:
        raise ValueError(f"there is no layout {layout}")
    return (<bytes>name).decode()


def prepare_kind(int layout, bint exact, bint bf16=False) -> int:
    """How activations are prepared for a weight in this layout."""
    return fl_prepare_kind(layout, exact, bf16)


def prepared_bytes(int kind, int64_t rows, int64_t width) -> int:
    """Bytes of prepared activations."""
    return fl_prepared_bytes(kind, rows, width)


def linear_scratch() -> int:
    """Bytes per thread."""
    return fl_linear_scratch()


def attention_scratch(int key_dim, int value_dim) -> int:
    """Bytes per thread."""
    return fl_attention_scratch(key_dim, value_dim)


def moe_prepared(int kind, int64_t pairs, int64_t experts, int64_t width) -> int:
    """Bytes of prepared activations of (row, expert) pairs."""
    return fl_moe_prepared(kind, pairs, experts, width)


def moe_scratch(int64_t tokens, int64_t top_k, int64_t experts) -> int:
    """Bytes per thread."""
    return fl_moe_scratch(tokens, top_k, experts)


def delta_scratch(int key_dim) -> int:
    """Bytes that one thread needs for the delta rule."""
    return fl_delta_scratch(key_dim)


def cache_block_bytes(int block_size, int heads, int key_dim, int value_dim, int dtype) -> int:
    """Bytes of one cache block of one layer."""
    cdef fl_cache cache
    memset(&cache, 0, sizeof(cache))
    cache.block_size, cache.heads, cache.key_dim, cache.value_dim, cache.dtype = block_size, heads, key_dim, value_dim, dtype
    return fl_cache_block_bytes(&cache)


# memory ---------------------------------------------------------------------------------------------------------------


cdef class Memory:
    """Zeroed pages of the process. Raises MemoryError if there are none. `close` gives them back; it may be called twice."""

    cdef void *p
    cdef readonly size_t nbytes

    def __cinit__(self, size_t nbytes, bint huge=False):
        self.nbytes = max(nbytes, <size_t>64)
        with nogil:
            self.p = fl_memory_map(self.nbytes, huge)
        if self.p == NULL:
            raise MemoryError

    @property
    def address(self) -> int:
        """Where it starts: a multiple of 4,096 at least; 0 after close."""
        return <intptr_t>self.p

    def close(self) -> None:
        """Returns the pages."""
        if self.p != NULL:
            fl_memory_unmap(self.p, self.nbytes)
            self.p = NULL

    def __dealloc__(self):
        self.close()


def copy_in(intptr_t address, src) -> None:
    """Bytes of a buffer object to an address."""
    cdef Py_buffer view
    PyObject_GetBuffer(src, &view, PyBUF_SIMPLE)
    try:
        with nogil:
            memcpy(<void *>address, view.buf, view.len)
    finally:
        PyBuffer_Release(&view)


def copy_out(dst, intptr_t address) -> None:
    """Bytes at an address to a writable buffer object, as many as it holds."""
    cdef Py_buffer view
    PyObject_GetBuffer(dst, &view, PyBUF_SIMPLE | PyBUF_WRITABLE)
    try:
        with nogil:
            memcpy(view.buf, <void *>address, view.len)
    finally:
        PyBuffer_Release(&view)


def copy_bytes(intptr_t dst, intptr_t src, size_t nbytes) -> None:
    """Memory to memory; the ranges may overlap."""
    with nogil:
        memmove(<void *>dst, <void *>src, nbytes)


# threads --------------------------------------------------------------------------------------------------------------


cdef struct pack_job:
    int layout, status
    int64_t N, K
    const uint8_t *src
    uint8_t *dst
    size_t source_strip, packed_strip


cdef void pack_share(void *arg, int thread, int threads, fl_pool *pool) noexcept nogil:
    cdef pack_job *job = <pack_job *>arg
    cdef int64_t strips = (job.N + FL_STRIP - 1) // FL_STRIP
    cdef int64_t a = strips * thread // threads, b = strips * (thread + 1) // threads
    if a < b and fl_pack_strips(job.layout, job.N, job.K, a, b, job.src + a * job.source_strip, job.dst + a * job.packed_strip):
        job.status = 1


cdef class Pool:
    """The threads of one backend. cores: for each thread the cores it may use, or None to let the system choose. Raises OSError
    if the threads cannot be made."""

    cdef fl_pool *pool

    def __cinit__(self, int threads, cores, double idle_us, double barrier_us):
        cdef int32_t *flat = NULL
        cdef int32_t *start = NULL
        cdef int error = 0, i
        try:
            if cores is not None:
                if len(cores) != threads:
                    raise ValueError(f"{len(cores)} sets of cores for {threads} threads")
                flat = <int32_t *>calloc(sum(len(c) for c in cores) + 1, sizeof(int32_t))
                start = <int32_t *>calloc(threads + 1, sizeof(int32_t))
                if flat == NULL or start == NULL:
                    raise MemoryError
                for i in range(threads):
                    start[i + 1] = start[i]
                    for core in cores[i]:
                        flat[start[i + 1]] = core
                        start[i + 1] += 1
            self.pool = fl_pool_new(threads, flat, start, idle_us, barrier_us, &error)
        finally:
            free(flat)
            free(start)
        if self.pool == NULL:
            raise OSError(error, os.strerror(error))

    @property
    def threads(self) -> int:
        """How many, the caller included; 0 after close."""
        return 0 if self.pool == NULL else fl_pool_threads(self.pool)

    def pack(self, int layout, int64_t rows, int64_t width, src, intptr_t dst) -> int:
        """Packs a weight [rows, width] from its file bytes. 0: done; −1: wrong source size; else why the pool failed."""
        cdef pack_job job
        cdef Py_buffer view
        cdef int status
        if self.pool == NULL:
            raise ValueError("the pool is closed")
        job.layout, job.status, job.N, job.K = layout, 0, rows, width
        job.source_strip = fl_source_bytes(layout, FL_STRIP, width)
        job.packed_strip = fl_packed_bytes(layout, FL_STRIP, width)
        PyObject_GetBuffer(src, &view, PyBUF_SIMPLE)
        try:
            if <size_t>view.len != fl_source_bytes(layout, rows, width) or view.len == 0:
                return -1
            job.src, job.dst = <const uint8_t *>view.buf, <uint8_t *>dst
            with nogil:
                status = fl_pool_run(self.pool, pack_share, &job)
        finally:
            PyBuffer_Release(&view)
        return status if status else -job.status

    def read_seconds(self, Memory memory, int rounds) -> float:
        """Seconds to read a block of memory once with all threads, the best of some rounds; below 0 if the pool failed."""
        cdef double seconds
        if self.pool == NULL or memory.p == NULL:
            raise ValueError("the pool or the memory is closed")
        with nogil:
            seconds = fl_probe_read(self.pool, memory.p, memory.nbytes, rounds)
        return seconds

    def peak_ops(self, int peak, int rounds) -> float:
        """Operations per second of probe number `peak` with all threads, the best of some rounds; below 0 if it failed."""
        cdef double result
        if self.pool == NULL:
            raise ValueError("the pool is closed")
        with nogil:
            result = fl_probe_peak(self.pool, peak, rounds)
        return result

    def touch(self, Memory memory) -> None:
        """Writes every page once, so that it exists."""
        with nogil:
            memset(memory.p, 1, memory.nbytes)

    def close(self) -> None:
        """Ends the threads; may be called twice."""
        cdef fl_pool *pool = self.pool
        self.pool = NULL
        with nogil:
            fl_pool_free(pool)

    def __dealloc__(self):
        fl_pool_free(self.pool)


# programs -------------------------------------------------------------------------------------------------------------


cdef class Program:
    """A flat array of instructions on fixed addresses. code: tuples (op, barrier, node, operands, weights, acts, cache, ints,
    floats) of `lower.py`; checks: its tuples too; owned: objects that must live as long."""

    cdef fl_program program
    cdef Pool pool
    cdef object owned, scratch

    def __cinit__(self, str isa, Pool pool, list code, list checks, tuple largest, int64_t scratch_bytes, owned):
        cdef bytes name = isa.encode()
        cdef int n
        memset(&self.program, 0, sizeof(self.program))
        self.pool, self.owned = pool, owned
        self.program.kernels = fl_kernels_for(name)
        if self.program.kernels == NULL or pool.pool == NULL:
            raise ValueError(f"variant {isa!r} or its pool of threads cannot be used")
        self.program.pool = pool.pool
        self.program.max_T, self.program.max_S, self.program.max_R = largest
        self.program.scratch_bytes = (scratch_bytes + 4095) // 4096 * 4096
        self.scratch = Memory(self.program.scratch_bytes * pool.threads)
        self.program.scratch = <char *><intptr_t>self.scratch.address
        self.program.n_code, self.program.n_checks = <int>len(code), <int>len(checks)
        # instructions hold a counter that must not share its cache line: whole pages give them that alignment
        memory = Memory(sizeof(fl_instruction) * (len(code) + 1))
        self.owned = (owned, memory)
        self.program.code = <fl_instruction *><intptr_t>memory.address
        self.program.checks = <fl_check *>calloc(len(checks) + 1, sizeof(fl_check))
        if self.program.checks == NULL:
            raise MemoryError
        for n in range(len(code)):
            self._fill(&self.program.code[n], code[n])
        for n in range(len(checks)):
            self._fill_check(&self.program.checks[n], checks[n])

    cdef _fill(self, fl_instruction *to, tuple entry):
        cdef int n
        op, barrier, node, operands, weights, acts, cache, ints, floats = entry
        to.op, to.barrier, to.node = op, barrier, node
        if len(operands) > FL_OPERANDS or len(ints) > FL_INTS or len(floats) > FL_FLOATS:
            raise ValueError("an instruction has too many operands")
        for n in range(len(operands)):
            if operands[n] is not None:
                address, symbol, rows, s0, s1, d1, d2, dtype = operands[n]
                to.v[n].p, to.symbol[n] = <char *><intptr_t>address, symbol
                to.v[n].rows, to.v[n].s0, to.v[n].s1, to.v[n].d1, to.v[n].d2, to.v[n].dtype = rows, s0, s1, d1, d2, dtype
        if len(weights) > 0:
            to.weight.layout, to.weight.N, to.weight.K, address = weights[0]
            to.weight.data = <const uint8_t *><intptr_t>address
        if len(weights) > 1:
            to.up.layout, to.up.N, to.up.K, address = weights[1]
            to.up.data = <const uint8_t *><intptr_t>address
        if len(acts) > 0:
            to.acts.kind, to.acts.K, address = acts[0]
            to.acts.data = <uint8_t *><intptr_t>address
        if len(acts) > 1:
            to.codes.kind, to.codes.K, address = acts[1]
            to.codes.data = <uint8_t *><intptr_t>address
        if cache is not None:
            (address, to.cache.block_bytes, to.cache.num_blocks, to.cache.block_size, to.cache.heads, to.cache.key_dim,
             to.cache.value_dim, to.cache.dtype) = cache
            to.cache.p = <char *><intptr_t>address
        for n in range(len(ints)):
            to.i[n] = ints[n]
        for n in range(len(floats)):
            to.f[n] = floats[n]

    cdef _fill_check(self, fl_check *to, tuple entry):
        (to.kind, to.node, address, to.symbol, to.rows, to.limit_symbol, to.limit, context, table, to.table_stride,
         to.table_width, to.block_size) = entry
        to.p = <const int32_t *><intptr_t>address
        to.context_len = <const int32_t *><intptr_t>context
        to.block_table = <const int32_t *><intptr_t>table

    def run(self, int64_t tokens, int64_t sequences, int64_t rows):
        """One step. None, or (status, node, where, value, limit) of the fault that ended it."""
        cdef fl_fault fault
        cdef int status
        if self.program.pool == NULL or self.pool.pool == NULL:
            raise ValueError("a program is run after it, or its backend, was closed")
        with nogil:
            status = fl_program_run(&self.program, tokens, sequences, rows, &fault)
        return None if status == 0 else (status, fault.node, fault.where, fault.value, fault.limit)

    def profile(self, bint on) -> list:
        """Starts or stops timing; returns (op, node, seconds of the calling thread, those at its barrier) of each
        instruction since the last call."""
        cdef int n
        code = self.program.code
        times = [(code[n].op, code[n].node, code[n].seconds, code[n].waited) for n in range(self.program.n_code)]
        for n in range(self.program.n_code):
            self.program.code[n].seconds = self.program.code[n].waited = 0.0
        self.program.profile = on
        return times

    def close(self) -> None:
        """Frees what the program owns; may be called twice."""
        self.program.pool = NULL
        self.program.code = NULL
        self.program.n_code = 0
        free(self.program.checks)
        self.program.checks = NULL
        self.owned = self.scratch = None

    def __dealloc__(self):
        free(self.program.checks)


include "_native_linear.pxi"
