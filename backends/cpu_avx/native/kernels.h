/* The table of kernels of one variant, and the choice of a variant.
 *
 * Arrays are row-major f32 unless said; `ld*` are strides in elements. Each function handles the rows or heads [i0, i1) it is given;
 * the result of a row never depends on how rows are shared between calls or threads.
 */
#ifndef FL_KERNELS_H
#define FL_KERNELS_H
#include "linear.h"

typedef struct {
    const char *name; /* baseline, avx2, avx512, amx */
    fl_linear_ops linear;
    /* further families (norms, rope, attention, …) are added here by the files of kernels/ that hold them */
} fl_kernels;

/* The best variant this machine can run, or the one named by `isa` (NULL: best). NULL if it is unknown or not runnable here. */
const fl_kernels *fl_kernels_for(const char *isa);

#endif
