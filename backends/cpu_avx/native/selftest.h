/* Whether the linear kernels of one variant do what those of another do: asked before AMX is used on a machine for the first time. */
#ifndef FL_SELFTEST_H
#define FL_SELFTEST_H
#include "linear.h"

enum { FL_AGREE, FL_DIFFER, FL_CRASHED, FL_UNTESTED };

/* Compares the two on made-up weights of every layout, alone and in pairs (gate and up, quantised at once): equal bits for block formats,
 * close results for bf16. FL_AGREE, FL_DIFFER, or FL_UNTESTED where there is no memory. */
int fl_compare_kernels(const fl_linear_ops *tested, const fl_linear_ops *trusted);
/* The same in a child process, so that a fault ends the child only: FL_CRASHED. FL_UNTESTED also where there is no process. */
int fl_compare_in_child(const fl_linear_ops *tested, const fl_linear_ops *trusted);

#endif
