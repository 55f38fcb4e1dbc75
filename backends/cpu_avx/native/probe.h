/* How fast this machine reads memory with the threads of a pool: the limit that decode is measured against. */
#ifndef FL_PROBE_H
#define FL_PROBE_H
#include <stddef.h>

#include "pool.h"

/* Seconds to read `nbytes` (a multiple of 64 per thread is best) once with all threads; the best of `rounds`. Below 0: the pool failed. */
double fl_probe_read(fl_pool *pool, const void *memory, size_t nbytes, int rounds);

#endif
