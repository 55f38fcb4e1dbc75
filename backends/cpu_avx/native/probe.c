/* The read probe of probe.h: every thread adds up one contiguous share, a cache line at a time in four independent sums, and asks for the
 * lines 2 KB ahead. Both matter: without prefetch, or with sums that do not fit in registers, a core reads a quarter less than it can.
 */
#define _GNU_SOURCE
#include "probe.h"

#include <stdint.h>
#include <time.h>

#include "isa.h"

typedef uint64_t u64x4 __attribute__((vector_size(32), aligned(32)));

typedef struct {
    const char *memory;
    size_t nbytes;
    int wide;
    volatile uint64_t sink; /* keeps the compiler from dropping the sums */
} read_job;

static inline __attribute__((always_inline)) uint64_t sum_lines(const u64x4 *p, const u64x4 *end) {
    u64x4 a = {0}, b = {0}, c = {0}, d = {0};
    for (; p < end; p += 4) {
        __builtin_prefetch(p + 64);
        __builtin_prefetch(p + 66);
        a += p[0], b += p[1], c += p[2], d += p[3];
    }
    a += b + c + d;
    return a[0] + a[1] + a[2] + a[3];
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static uint64_t sum_wide(const u64x4 *p, const u64x4 *end) { return sum_lines(p, end); }
#else
static uint64_t sum_wide(const u64x4 *p, const u64x4 *end) { return sum_lines(p, end); }
#endif
static uint64_t sum_narrow(const u64x4 *p, const u64x4 *end) { return sum_lines(p, end); }

static void read_share(void *arg, int thread, int threads, fl_pool *pool) {
    (void)pool;
    read_job *job = arg;
    size_t pairs = job->nbytes / 128, a = pairs * (size_t)thread / (size_t)threads,
           b = pairs * (size_t)(thread + 1) / (size_t)threads; /* 128 bytes: two lines */
    const u64x4 *p = (const u64x4 *)job->memory;
    uint64_t total = (job->wide ? sum_wide : sum_narrow)(p + a * 4, p + b * 4);
    if (total == 1) job->sink = total;
}

double fl_probe_read(fl_pool *pool, const void *memory, size_t nbytes, int rounds) {
    read_job job = {memory, nbytes, fl_isa_missing(FL_ISA_AVX2) == NULL, 0};
    double best = -1.0;
    for (int i = 0; i < rounds; i++) {
        struct timespec a, b;
        clock_gettime(CLOCK_MONOTONIC, &a);
        if (fl_pool_run(pool, read_share, &job) != FL_POOL_OK) return -1.0;
        clock_gettime(CLOCK_MONOTONIC, &b);
        double s = (double)(b.tv_sec - a.tv_sec) + 1e-9 * (double)(b.tv_nsec - a.tv_nsec);
        if (best < 0.0 || s < best) best = s;
    }
    return best;
}
