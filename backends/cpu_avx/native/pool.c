/* The thread pool of pool.h.
 *
 * Both the start of a run and a barrier are a *gate*: a generation number that waiting threads watch. Opening it is one store, plus
 * a wake-up only when somebody sleeps. The last thread to arrive at a barrier opens it for the others.
 */
#define _GNU_SOURCE
#include "pool.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#endif

#if defined(__x86_64__) || defined(__i386__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("yield")
#else
#define RELAX() ((void)0)
#endif

typedef struct {
    _Alignas(64) atomic_int generation;
    atomic_int sleepers;
#if !defined(__linux__)
    pthread_mutex_t lock;
    pthread_cond_t changed;
#endif
} gate;

struct fl_pool {
    gate start, meet;
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_int busy;
    int threads, started, idle_spins, barrier_spins, quit, pinned;
    pid_t owner;
    fl_pool_fn fn;
    void *arg;
    pthread_t *ids;
#if defined(__linux__)
    cpu_set_t *sets; /* [threads] */
#endif
};

typedef struct {
    fl_pool *pool;
    int thread;
} worker_arg;

#if defined(__linux__)
static void gate_init(gate *g) { (void)g; }
static void gate_sleep(gate *g, int seen) {
    while (atomic_load(&g->generation) == seen) syscall(SYS_futex, &g->generation, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}
static void gate_wake(gate *g) { syscall(SYS_futex, &g->generation, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0); }
#else
static void gate_init(gate *g) {
    pthread_mutex_init(&g->lock, NULL);
    pthread_cond_init(&g->changed, NULL);
}
static void gate_sleep(gate *g, int seen) {
    pthread_mutex_lock(&g->lock);
    while (atomic_load(&g->generation) == seen) pthread_cond_wait(&g->changed, &g->lock);
    pthread_mutex_unlock(&g->lock);
}
static void gate_wake(gate *g) {
    pthread_mutex_lock(&g->lock);
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
}
#endif

static void gate_open(gate *g, int next) {
    atomic_store(&g->generation, next); /* sequentially consistent: ordered before the read of sleepers, see gate_wait */
    if (atomic_load(&g->sleepers)) gate_wake(g);
}

static void gate_wait(gate *g, int seen, int spins) {
    for (int i = 0; i < spins; i++) {
        if (atomic_load_explicit(&g->generation, memory_order_acquire) != seen) return;
        RELAX();
    }
    atomic_fetch_add(&g->sleepers, 1);
    gate_sleep(g, seen);
    atomic_fetch_sub(&g->sleepers, 1);
}

void fl_pool_barrier(fl_pool *p) {
    if (p->threads == 1) return;
    int seen = atomic_load_explicit(&p->meet.generation, memory_order_relaxed);
    if (atomic_fetch_add(&p->arrived, 1) + 1 == p->threads) {
        atomic_store_explicit(&p->arrived, 0, memory_order_relaxed);
        gate_open(&p->meet, (int)((unsigned)seen + 1u));
    } else {
        gate_wait(&p->meet, seen, p->barrier_spins);
    }
}

static void *worker(void *v) {
    worker_arg w = *(worker_arg *)v;
    fl_pool *p = w.pool;
    free(v);
#if defined(__linux__)
    if (p->pinned) sched_setaffinity(0, sizeof p->sets[0], &p->sets[w.thread]);
#endif
    for (unsigned seen = 0;; seen++) {
        gate_wait(&p->start, (int)seen, p->idle_spins);
        if (p->quit) return NULL;
        p->fn(p->arg, w.thread, p->threads, p);
        fl_pool_barrier(p);
    }
}

/* Pauses per microsecond: the instruction takes 10 to 150 cycles, depending on the machine. */
static double pauses_per_us(void) {
    double best = 1e9;
    for (int round = 0; round < 3; round++) {
        struct timespec a, b;
        clock_gettime(CLOCK_MONOTONIC, &a);
        for (int i = 0; i < 1000; i++) RELAX();
        clock_gettime(CLOCK_MONOTONIC, &b);
        double us = (double)(b.tv_sec - a.tv_sec) * 1e6 + (double)(b.tv_nsec - a.tv_nsec) * 1e-3;
        if (us < best) best = us;
    }
    return best > 1.0 ? 1000.0 / best : 1000.0;
}

fl_pool *fl_pool_new(int threads, const int32_t *cores, const int32_t *start, double idle_spin_us, double barrier_spin_us,
                     int *error) {
    *error = EINVAL;
    if (threads < 1 || threads > 4096) return NULL;
    *error = ENOMEM;
    fl_pool *p = aligned_alloc(64, (sizeof *p + 63) / 64 * 64);
    if (p == NULL) return NULL;
    memset(p, 0, sizeof *p);
    p->threads = threads;
    p->owner = getpid();
    gate_init(&p->start);
    gate_init(&p->meet);
    double rate = pauses_per_us();
    p->idle_spins = (int)(rate * idle_spin_us);
    p->barrier_spins = (int)(rate * barrier_spin_us);
    p->ids = calloc((size_t)threads, sizeof *p->ids);
    if (p->ids == NULL) goto failed;
#if defined(__linux__)
    p->sets = calloc((size_t)threads, sizeof *p->sets);
    if (p->sets == NULL) goto failed;
    if (cores != NULL) {
        p->pinned = 1;
        for (int i = 0; i < threads; i++) {
            CPU_ZERO(&p->sets[i]);
            for (int32_t c = start[i]; c < start[i + 1]; c++)
                if (cores[c] >= 0 && cores[c] < CPU_SETSIZE) CPU_SET(cores[c], &p->sets[i]);
        }
    }
#else
    (void)cores, (void)start;
#endif
    /* workers take no signals: those belong to the threads of the program */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int status = 0;
    p->started = 1;
    for (int i = 1; i < threads && status == 0; i++) {
        worker_arg *w = malloc(sizeof *w);
        status = ENOMEM;
        if (w == NULL) break;
        *w = (worker_arg){p, i};
        status = pthread_create(&p->ids[i], NULL, worker, w);
        if (status == 0) p->started++;
        else
            free(w);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (status == 0) {
        *error = 0;
        return p;
    }
    *error = status;
failed:
    fl_pool_free(p);
    return NULL;
}

int fl_pool_threads(const fl_pool *p) { return p->threads; }

int fl_pool_run(fl_pool *p, fl_pool_fn fn, void *arg) {
    if (p->owner != getpid()) return FL_POOL_FORKED;
    if (atomic_exchange(&p->busy, 1)) return FL_POOL_BUSY;
    if (p->threads == 1) {
        fn(arg, 0, 1, p);
    } else {
#if defined(__linux__)
        cpu_set_t before;
        int restore = p->pinned && sched_getaffinity(0, sizeof before, &before) == 0 &&
                      sched_setaffinity(0, sizeof p->sets[0], &p->sets[0]) == 0;
#endif
        p->fn = fn;
        p->arg = arg;
        gate_open(&p->start, (int)((unsigned)atomic_load_explicit(&p->start.generation, memory_order_relaxed) + 1u));
        fn(arg, 0, p->threads, p);
        fl_pool_barrier(p);
#if defined(__linux__)
        if (restore) sched_setaffinity(0, sizeof before, &before);
#endif
    }
    atomic_store(&p->busy, 0);
    return FL_POOL_OK;
}

void fl_pool_free(fl_pool *p) {
    if (p == NULL) return;
    if (p->owner == getpid() && p->started > 1) {
        p->quit = 1;
        gate_open(&p->start, (int)((unsigned)atomic_load(&p->start.generation) + 1u));
        for (int i = 1; i < p->started; i++) pthread_join(p->ids[i], NULL);
    }
#if defined(__linux__)
    free(p->sets);
#endif
    free(p->ids);
    free(p);
}
