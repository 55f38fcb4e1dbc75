/* The shares of recurrent.h. */
#include "recurrent.h"

int64_t fl_delta_scratch(int32_t key_dim) { return ((int64_t)FL_DELTA_COLUMNS + 2) * key_dim * (int64_t)sizeof(float); }

static const void *address(int64_t at) { return (const void *)(intptr_t)at; }

/* A thread owns blocks of channels of all sequences; the activation follows on the same ones. */
void fl_short_conv_run(const fl_program *p, const fl_instruction *ins, int thread, int threads) {
    const fl_conv a = {.x = ins->v[0],
                       .weight = ins->v[1],
                       .out = ins->v[2],
                       .state = (char *)(intptr_t)ins->i[0],
                       .slot_bytes = ins->i[1],
                       .positions = address(ins->i[2]),
                       .query_start = address(ins->i[3]),
                       .state_slot = address(ins->i[4]),
                       .sequences = p->S};
    const int64_t C = a.x.d2, blocks = (C + FL_CONV_CHANNELS - 1) / FL_CONV_CHANNELS;
    for (int64_t block = blocks * thread / threads; block < blocks * (thread + 1) / threads; block++) {
        const int32_t c0 = (int32_t)(block * FL_CONV_CHANNELS),
                      c1 = c0 + FL_CONV_CHANNELS < C ? c0 + FL_CONV_CHANNELS : (int32_t)C;
        p->kernels->short_conv(&a, c0, c1);
        p->kernels->act_mul((int32_t)ins->i[5], &a.out, NULL, &a.out, 0, a.out.rows, c0, c1);
    }
}

/* Units are taken one by one: sequences differ in length. A unit is a head, all its columns, so that no two threads work on neighbouring
 * memory; or some columns, where there are few heads. */
void fl_delta_rule_run(const fl_program *p, fl_instruction *ins, int threads, void *scratch) {
    const fl_delta d = {.query = ins->v[0],
                        .key = ins->v[1],
                        .value = ins->v[2],
                        .a = ins->v[3],
                        .b = ins->v[4],
                        .out = ins->v[5],
                        .state = (char *)(intptr_t)ins->i[0],
                        .slot_bytes = ins->i[1],
                        .positions = address(ins->i[2]),
                        .query_start = address(ins->i[3]),
                        .state_slot = address(ins->i[4]),
                        .a_log = address(ins->i[5]),
                        .dt_bias = address(ins->i[6]),
                        .eps = ins->f[0]};
    const int64_t heads = d.value.d1, parts = (d.value.d2 + FL_DELTA_COLUMNS - 1) / FL_DELTA_COLUMNS;
    const int64_t together = p->S * heads >= 4 * threads ? parts : 1, count = p->S * heads * parts / together;
    for (int64_t unit; (unit = atomic_fetch_add_explicit(&ins->next, 1, memory_order_relaxed)) < count;) {
        const int64_t first = unit * together, head = first / parts % heads, sequence = first / parts / heads;
        for (int64_t part = first % parts; part < first % parts + together; part++)
            p->kernels->delta_rule(&d, sequence, (int32_t)head, (int32_t)(part * FL_DELTA_COLUMNS), scratch);
    }
}
