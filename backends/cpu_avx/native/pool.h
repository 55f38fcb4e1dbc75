/* A persistent pool of threads; the caller is thread 0.
 *
 * Waiting is a bounded spin (a barrier inside a step costs well under a microsecond) and then sleep on a futex, so an idle pool uses no
 * CPU. Threads may be pinned; the caller is pinned only while it is inside fl_pool_run and gets its own set of cores back, so that
 * threads and processes which it starts later are not confined to one core. One run at a time: a second caller gets FL_POOL_BUSY.
 * A pool does not survive fork(): in the child it can only be freed, and a run gives FL_POOL_FORKED instead of waiting for ever.
 */
#ifndef FL_POOL_H
#define FL_POOL_H
#include <stdint.h>

typedef struct fl_pool fl_pool;
typedef void (*fl_pool_fn)(void *arg, int thread, int threads, fl_pool *pool);

enum { FL_POOL_OK = 0, FL_POOL_FORKED = 1, FL_POOL_BUSY = 2 };

/* threads: 1 or more. cores, start: thread i may run on cores[start[i]] … cores[start[i+1]-1]; NULL: no pinning. spin_us: how long a
 * thread spins before it sleeps, between runs and at a barrier. NULL on failure, with *error an errno. */
fl_pool *fl_pool_new(int threads, const int32_t *cores, const int32_t *start, double idle_spin_us, double barrier_spin_us,
                     int *error);
int fl_pool_threads(const fl_pool *pool);
int fl_pool_run(fl_pool *pool, fl_pool_fn fn, void *arg); /* returns when every thread has returned from fn */
void fl_pool_barrier(fl_pool *pool);                      /* inside fn, by all threads */
void fl_pool_free(fl_pool *pool);

#endif
