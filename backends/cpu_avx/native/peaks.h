/* How many operations a second this machine's multiply-add instructions do with the threads of a pool: the limit that prefill is
 * measured against. One multiply-add counts as two operations. */
#ifndef FL_PEAKS_H
#define FL_PEAKS_H
#include "pool.h"

enum { FL_PEAK_COUNT = 7 };

const char *fl_peak_name(int peak);                        /* `vnni`, `amx_int8`, …; NULL outside of 0 … FL_PEAK_COUNT − 1 */
const char *fl_peak_dtype(int peak);                       /* what is multiplied: int8 | bf16 | f32 */
int fl_peak_isa(int peak);                                 /* the first variant (isa.h) that has the instruction */
int fl_peak_missing(int peak);                             /* not 0: this build has no such probe */
double fl_probe_peak(fl_pool *pool, int peak, int rounds); /* operations per second, the best of `rounds`; below 0: it failed */

#endif
