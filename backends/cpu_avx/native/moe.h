/* The op `moe` of the interpreter: gated MLPs of which each row takes a few.
 *
 * Tokens are grouped by expert, so that a strip of weights is unpacked once for all rows that want it, and experts that nobody wants
 * are not read. Four phases, a barrier between them:
 *
 *   1. every (row, expert) pair's row of x in the form that gate and up want, expert after expert
 *   2. act(gate · x) · up · x: each thread its strips of the hidden width, of every active expert
 *   3. the hidden rows in the form that down wants
 *   4. down, and the weighted sum: each thread its strips of the output, expert after expert in ascending order
 *
 * A row of the result is a sum over its experts in ascending order of their ids, whatever other rows there are; so its bits depend on
 * that row only.
 */
#ifndef FL_MOE_H
#define FL_MOE_H
#include "program.h"

/* What an instruction needs, at the address i0: all 64 bits wide, so that lower.py can write it as an array. */
typedef struct {
    int64_t layout, data, stride; /* data: address, 0 if absent; stride: bytes from one expert to the next */
    int64_t bias, bias_stride;    /* address, 0 if absent; floats from one expert to the next */
    int64_t kind, acts;           /* prepared input: its kind and address */
} fl_moe_part;
typedef struct {
    int64_t rows, experts, top_k, width, act; /* largest T; E, k, F, FL_ACT_… */
    int64_t hidden;                           /* address of f32 [pairs][F] */
    fl_moe_part gate, up, down;
} fl_moe;

/* Bytes of the prepared rows of `pairs` (row, expert) pairs, each expert's for itself. */
int64_t fl_moe_prepared(int kind, int64_t pairs, int64_t experts, int64_t K);
/* Bytes for one thread, of steps of up to T tokens. */
int64_t fl_moe_scratch(int64_t T, int64_t top_k, int64_t experts);
void fl_moe_run(const fl_program *p, const fl_instruction *ins, int thread, int threads, char *scratch);

#endif
