/* The read probe of probe.h: every thread adds up one contiguous share, eight independent vector sums wide. */
#define _GNU_SOURCE
#include "probe.h"

#include <stdint.h>
#include <time.h>

typedef uint64_t u64x4 __attribute__((vector_size(32), aligned(32)));

typedef struct {
    const char *memory;
    size_t nbytes;
    volatile uint64_t sink; /* keeps the compiler from dropping the sums */
} read_job;

static void read_share(void *arg, int thread, int threads, fl_pool *pool) {
    (void)pool;
    read_job *job = arg;
    size_t lines = job->nbytes / 256, a = lines * (size_t)thread / (size_t)threads,
           b = lines * (size_t)(thread + 1) / (size_t)threads;
    const u64x4 *p = (const u64x4 *)job->memory + a * 8, *end = (const u64x4 *)job->memory + b * 8;
    u64x4 s[8] = {{0}};
    for (; p < end; p += 8)
        for (int i = 0; i < 8; i++) s[i] += p[i];
    uint64_t total = 0;
    for (int i = 0; i < 8; i++) total += s[i][0] + s[i][1] + s[i][2] + s[i][3];
    if (total == 1) job->sink = total;
}

double fl_probe_read(fl_pool *pool, const void *memory, size_t nbytes, int rounds) {
    read_job job = {memory, nbytes, 0};
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
