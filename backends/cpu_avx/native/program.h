/* A compiled step: a flat array of instructions that every thread of the pool walks.
 *
 * Inside an instruction each thread takes its share of rows, strips or attention units; `barrier` says that it must first wait for the
 * others (lower.py decides where). In a step of one row every thread prepares the input of a linear layer for itself, in memory of its
 * own (address i1, i2 bytes for each thread): that is cheaper than to wait for the one that does it. So such steps need fewer barriers.
 * Sizes and addresses are fixed when the program is built; only T, S and R change, and are resolved once per run. Nothing is allocated
 * in a run. Every index that a step brings (ids, slots, blocks, context lengths) is checked before the first instruction; a bad one
 * ends the run with a fault and touches no memory.
 */
#ifndef FL_PROGRAM_H
#define FL_PROGRAM_H
#include <stdatomic.h>

#include "kernels.h"
#include "pool.h"

enum {
    FL_OP_EMBED,        /* ids, table, out */
    FL_OP_EMBED_PACKED, /* ids, -, out; weight */
    FL_OP_RMS_NORM,     /* x, weight?, out; f0 = eps */
    FL_OP_LAYER_NORM,   /* x, weight?, bias?, out; f0 = eps */
    FL_OP_ROPE_TABLE,   /* positions, inv_freq, table; f0 = factor */
    FL_OP_ROPE,         /* x, table, out; i0 = r, i1 = pairs */
    FL_OP_KV_WRITE,     /* key, value?, slots; cache */
    FL_OP_ATTENTION, /* q, positions, query_start, context_len, block_table, sinks?, slopes?, prefix_len?, out; cache; i0 mask, i1 chunk,
                           i2 window, i3 value_dim, i4 (row, range) pairs that partials hold, i5 address of partials; f0 scale, f1 softcap */
    FL_OP_PREPARE, /* x, norm weight?; acts; i0 = 1: rms_norm first, f0 = its eps; i1, i2: private acts */
    FL_OP_LINEAR,  /* bias?, out, up_bias?, add?; weight, up?, acts, codes?; i0 = activation; i1, i2: private acts */
    FL_OP_ACT_MUL, /* gate, up?, out; i0 = kind, i1 = split columns instead of rows */
    FL_OP_ADD,     /* x, y, out; i0 = shape of y */
    FL_OP_MUL,
    FL_OP_SOFTMAX,    /* x, out */
    FL_OP_SOFTCAP,    /* x, out; f0 = cap */
    FL_OP_MATMUL,     /* a, b, out */
    FL_OP_QUANTIZE,   /* x, codes, scales; i0 = group */
    FL_OP_DEQUANTIZE, /* codes, scales, out; i0 = group */
    FL_OP_ROUTE_TOPK, /* logits, choose_bias?, ids, weights; i0 k, i1 score, i2 groups, i3 keep_groups, i4 top2sum, i5 renorm; f0 scale */
    FL_OP_MOE,    /* x, ids, weights, out; i0 = address of an fl_moe (moe.h) */
    FL_OP_CONCAT, /* x, y, out */
    FL_OP_SHORT_CONV, /* x, weight, out; i0 address of the slots, i1 bytes of one; i2 positions, i3 query_start, i4 state_slot; i5 act */
    FL_OP_DELTA_RULE, /* query, key, value, a, b, out; i0 … i4 as above, i5 a_log, i6 dt_bias; f0 = eps */
    FL_OP_COUNT
};

enum { FL_SYM_NONE, FL_SYM_T, FL_SYM_S, FL_SYM_R, FL_SYM_S1, FL_SYM_R1 };
enum { FL_OPERANDS = 9, FL_INTS = 8, FL_FLOATS = 2 };
enum { FL_BARRIER_ROWS = 1, FL_BARRIER_ROW = 2 }; /* bits of `barrier`: in steps of several rows, in steps of one */

typedef struct {
    int32_t op, barrier, node;
    int32_t symbol[FL_OPERANDS]; /* of the leading dimension */
    fl_view v[FL_OPERANDS];      /* p NULL: absent; rows are resolved per run */
    fl_weight weight, up;        /* data NULL: absent */
    fl_acts acts, codes;
    fl_cache cache;
    int64_t i[FL_INTS];
    float f[FL_FLOATS];
    fl_attention attention; /* filled in per run */
    double seconds, waited; /* of thread 0, while `profile` is set: all, and at the barrier before it */
    _Alignas(64) atomic_llong next;
} fl_instruction;

enum { FL_CHECK_INDEX, FL_CHECK_SLOT, FL_CHECK_PAGES };

typedef struct {
    int32_t kind, node, symbol, limit_symbol;
    int64_t rows, limit; /* INDEX: 0 <= p[i] < limit; SLOT: p[i] < limit */
    const int32_t *p;    /* PAGES: query_start, alone if context_len is NULL */
    const int32_t *context_len, *block_table;
    int64_t table_stride, table_width, block_size; /* PAGES: limit is the number of blocks */
} fl_check;

enum {
    FL_RUN_OK = 0,
    FL_RUN_FORKED = 1,
    FL_RUN_BUSY = 2,
    FL_RUN_INDEX = 3,   /* an id or row index outside its table */
    FL_RUN_SLOT = 4,    /* a slot behind the cache */
    FL_RUN_QUERY = 5,   /* query_start does not divide the T tokens */
    FL_RUN_CONTEXT = 6, /* a context length that the block table cannot hold */
    FL_RUN_BLOCK = 7,   /* a block number outside the cache */
    FL_RUN_DIMS = 8     /* T, S or R above what the program was built for */
};

typedef struct {
    int32_t node;
    int64_t where, value, limit;
} fl_fault;

typedef struct {
    const fl_kernels *kernels;
    fl_pool *pool;
    fl_instruction *code;
    fl_check *checks;
    int32_t n_code, n_checks, max_T, max_S, max_R, profile;
    char *scratch; /* per thread, scratch_bytes each, 64-byte aligned */
    int64_t scratch_bytes;
    int64_t T, S, R; /* of the current run */
    int32_t one_row; /* T and R are at most 1 */
} fl_program;

int fl_program_run(fl_program *program, int64_t T, int64_t S, int64_t R, fl_fault *fault);

#endif
