/* The ops short_conv and delta_rule of the interpreter: what a thread takes of them. The arithmetic is in kernels/recurrent.c. */
#ifndef FL_RECURRENT_H
#define FL_RECURRENT_H
#include "program.h"

/* Bytes that one thread needs for a delta_rule of keys of that width. */
int64_t fl_delta_scratch(int32_t key_dim);
void fl_short_conv_run(const fl_program *p, const fl_instruction *ins, int thread, int threads);
void fl_delta_rule_run(const fl_program *p, fl_instruction *ins, int threads, void *scratch);

#endif
