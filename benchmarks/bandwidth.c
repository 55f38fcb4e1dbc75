/* A second opinion on read bandwidth: its own threads, started for each measurement and released together; plain loads of 64 bytes that the
 * compiler turns into what the machine has, with a software prefetch 2 KB ahead. Compiled by benchmarks/limits.py with -march=native. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

typedef int64_t line __attribute__((vector_size(64)));

typedef struct {
    const line *first, *last;
    pthread_barrier_t *barrier;
    int rounds, number;
    int64_t sum;
    double begin[8], end[8]; /* of each round */
} share;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* To the number-th CPU that the process may use, counted round: or two threads may share a core. */
static void pin(int number) {
    cpu_set_t allowed, one;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    int count = CPU_COUNT(&allowed), wanted = count ? number % count : 0;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &allowed) || wanted-- > 0) continue;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        pthread_setaffinity_np(pthread_self(), sizeof one, &one);
        return;
    }
}

static void *read_share(void *argument) {
    share *s = argument;
    pin(s->number);
    for (int round = 0; round < s->rounds; round++) {
        pthread_barrier_wait(s->barrier);
        s->begin[round] = now();
        line a = {0}, b = {0}, c = {0}, d = {0};
        for (const line *p = s->first; p < s->last; p += 4) {
            for (int i = 0; i < 4; i++) __builtin_prefetch(p + 32 + i, 0, 3);
            a ^= p[0], b ^= p[1], c ^= p[2], d ^= p[3];
        }
        a ^= b ^ c ^ d;
        s->sum += a[0] ^ a[1] ^ a[2] ^ a[3] ^ a[4] ^ a[5] ^ a[6] ^ a[7];
        s->end[round] = now();
    }
    return NULL;
}

/* Bytes per second, the best of three rounds; 0 if memory or threads cannot be had. */
double read_bandwidth(size_t nbytes, int threads) {
    enum { ROUNDS = 3, MOST = 256 };
    if (threads < 1 || threads > MOST) return 0.0;
    size_t lines = nbytes / (256 * (size_t)threads) * 4; /* of one thread */
    size_t total = lines * 64 * (size_t)threads + 4096;
    char *memory = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 0.0;
    madvise(memory, total, MADV_HUGEPAGE);
    memset(memory, 1, total);
    pthread_barrier_t barrier;
    pthread_barrier_init(&barrier, NULL, (unsigned)threads);
    pthread_t ids[MOST];
    share shares[MOST];
    for (int i = 0; i < threads; i++) {
        const line *first = (const line *)memory + lines * (size_t)i;
        shares[i] = (share){.first = first, .last = first + lines, .barrier = &barrier, .rounds = ROUNDS, .number = i};
        if (pthread_create(&ids[i], NULL, read_share, &shares[i]) != 0) abort(); /* the others would wait for ever */
    }
    for (int i = 0; i < threads; i++) pthread_join(ids[i], NULL);
    double best = 0.0;
    for (int round = 0; round < ROUNDS; round++) { /* from the first that began to the last that ended */
        double begin = shares[0].begin[round], end = shares[0].end[round];
        for (int i = 1; i < threads; i++) {
            if (shares[i].begin[round] < begin) begin = shares[i].begin[round];
            if (shares[i].end[round] > end) end = shares[i].end[round];
        }
        double rate = (double)(lines * 64 * (size_t)threads) / (end - begin);
        if (rate > best) best = rate;
    }
    munmap(memory, total);
    return best;
}
