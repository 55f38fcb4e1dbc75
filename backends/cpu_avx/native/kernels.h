/* The table of kernels of one variant, and the choice of a variant.
 *
 * Arrays are row-major f32 unless said; `ld*` are strides in elements. Each function handles the rows or heads [i0, i1) it is given;
 * the result of a row never depends on how rows are shared between calls or threads. Kernels trust their arguments: shapes are
 * checked when a program is built, indices at the start of every run (program.c).
 */
#ifndef FL_KERNELS_H
#define FL_KERNELS_H
#include "linear.h"

enum { FL_DT_F32, FL_DT_F16, FL_DT_BF16, FL_DT_I32, FL_DT_I8, FL_DT_BF16_PAIRS, FL_DT_I8_PAIRS }; /* PAIRS: of caches */
enum { FL_ACT_SILU, FL_ACT_GELU, FL_ACT_GELU_TANH, FL_ACT_SIGMOID, FL_ACT_TANH, FL_ACT_RELU, FL_ACT_SWIGLU_OAI };
enum { FL_MASK_CAUSAL, FL_MASK_FULL, FL_MASK_PREFIX, FL_MASK_CHUNK };
enum { FL_Y_FULL, FL_Y_COLUMNS, FL_Y_ONE, FL_Y_ROWS }; /* shape of the second operand of add and mul */

/* An operand as kernels see it: [rows][d1][d2] with strides s0, s1 in elements and 1; d1 is 1 for matrices. */
typedef struct {
    char *p;
    int64_t rows, s0, s1;
    int32_t d1, d2, dtype;
} fl_view;

/* The cache of one attention layer. A block holds, head after head, keys, values and, for int8, their scales:
 *
 *   values stored:    K [Dk][pad(block_size)]   V [block_size][Dv]   f32 [groups of Dk][block_size]   f32 [groups of Dv][block_size]
 *   values = prefix:  K [block_size][Dk]                             f32 [groups of Dk][block_size]
 *   pairs:            K [Dk / 2][pad(block_size)][2 channels]   V [block_size / 2][Dv][2 tokens]   scales as above; halves rounded up
 *
 * Keys are transposed, so that sixteen tokens are one vector. int8: element = code · scale, one scale for each token, head and group of
 * FL_KV_GROUP channels (the last group may be shorter). Pairs are what the products of attention_pairs.c read.
 */
enum { FL_KV_GROUP = 32 };
typedef struct {
    char *p;
    int64_t block_bytes, num_blocks;
    int32_t block_size, heads, key_dim, value_dim,
        dtype; /* dtype: FL_DT_F32, F16, BF16, I8 or, where values are stored, PAIRS */
} fl_cache;

static inline int fl_is_pairs(int32_t dtype) { return dtype == FL_DT_BF16_PAIRS || dtype == FL_DT_I8_PAIRS; }
static inline int fl_is_codes(int32_t dtype) { return dtype == FL_DT_I8 || dtype == FL_DT_I8_PAIRS; }
static inline int64_t fl_element_bytes(int32_t dtype) { return dtype == FL_DT_F32 ? 4 : fl_is_codes(dtype) ? 1 : 2; }
static inline int32_t fl_kv_groups(int32_t channels) { return (channels + FL_KV_GROUP - 1) / FL_KV_GROUP; }
static inline int64_t fl_even(int64_t n) { return (n + 1) / 2 * 2; }
/* tokens from one row of transposed keys to the next */
static inline int64_t fl_key_stride(const fl_cache *c) { return ((int64_t)c->block_size + 15) / 16 * 16; }
/* bytes from a head's begin to its values, to its scales and to the next head */
static inline int64_t fl_values_at(const fl_cache *c) {
    const int64_t channels = fl_is_pairs(c->dtype) ? fl_even(c->key_dim) : c->key_dim;
    return (c->value_dim ? fl_key_stride(c) : c->block_size) * channels * fl_element_bytes(c->dtype);
}
static inline int64_t fl_scales_at(const fl_cache *c) {
    const int64_t tokens = fl_is_pairs(c->dtype) ? fl_even(c->block_size) : c->block_size;
    int64_t end = fl_values_at(c) + tokens * c->value_dim * fl_element_bytes(c->dtype);
    return fl_is_codes(c->dtype) ? (end + 3) / 4 * 4 : end;
}
static inline int64_t fl_head_bytes(const fl_cache *c) {
    int64_t groups = fl_is_codes(c->dtype) ? fl_kv_groups(c->key_dim) + fl_kv_groups(c->value_dim) : 0;
    return fl_scales_at(c) + groups * c->block_size * 4;
}

int64_t fl_cache_block_bytes(const fl_cache *cache); /* from everything but block_bytes */

typedef struct {
    fl_view q, out;
    fl_cache cache;
    const int32_t *positions, *query_start, *context_len, *block_table, *prefix_len;
    const float *sinks, *slopes;
    int64_t table_stride, sequences;
    int32_t heads, value_dim, mask, chunk, window;
    float scale, softcap;
    /* for units of one key range: results of the ranges [first, first + slots) of every (row, head), and one more, of what is merged so
     * far: [T][heads][slots + 1][8 + padded value_dim]. NULL: each unit does all ranges. */
    float *partials;
    int64_t first, slots;
    int32_t together; /* kv heads of a unit at most: what they read lies in one piece */
} fl_attention;

enum {
    FL_RANGE = 256,
    FL_SUB = 64,
    FL_TILE = 64,
    FL_PARTIAL_ROWS = 8
}; /* keys of a range and of a softmax step; (row, head) pairs of a unit at most; most rows of a step that is cut into key ranges */

/* How the experts of a row are chosen: the attributes of route_topk. */
enum { FL_SCORE_SOFTMAX, FL_SCORE_SIGMOID, FL_SCORE_CHOSEN };
typedef struct {
    int32_t k, score, groups, keep_groups, top2sum, renorm;
    float scale;
} fl_route;

/* Recurrent state: slots of one op, that of sequence s at state + state_slot[s] · slot_bytes (kernels/recurrent.c). */
enum { FL_CONV_CHANNELS = 64, FL_CONV_TAPS = 64, FL_DELTA_COLUMNS = 32 };
typedef struct {
    fl_view x, weight, out; /* [T][C], [C][L], [T][C] */
    char *state;            /* slots of [L - 1][C] */
    int64_t slot_bytes, sequences;
    const int32_t *positions, *query_start, *state_slot;
} fl_conv;
typedef struct {
    fl_view query, key, value, a, b, out; /* [T][J][Dk] twice, [T][H][Dv], [T][H] twice, [T][H][Dv] */
    char *state;                          /* slots of [H][Dk][Dv] */
    int64_t slot_bytes;
    const int32_t *positions, *query_start, *state_slot;
    const float *a_log, *dt_bias; /* [H] */
    float eps;
} fl_delta;

typedef struct {
    const char *name; /* baseline, avx2, avx512, amx */
    const fl_linear_ops *linear;
    int32_t pairs; /* 1: attention multiplies bf16, in caches of pairs */
    void (*embed)(const int32_t *ids, const fl_view *table, const fl_view *out, int64_t i0, int64_t i1);
    void (*rms_norm)(const fl_view *x, const float *weight, float eps, const fl_view *out, int64_t i0, int64_t i1);
    void (*layer_norm)(const fl_view *x, const float *weight, const float *bias, float eps, const fl_view *out, int64_t i0,
                       int64_t i1);
    void (*rope)(const fl_view *x, const float *table, int32_t r, int32_t pairs, const fl_view *out, int64_t i0, int64_t i1);
    void (*kv_write)(const fl_cache *cache, const fl_view *key, const fl_view *value, const int32_t *slots, int64_t i0,
                     int64_t i1);
    /* one unit: rows [row0, row1) of one sequence; kv heads [head, head + count), of each the query heads from its head0-th on (up to
     * FL_TILE pairs of row and query head in all); key ranges [range0, range1); scratch: fl_attention_scratch */
    void (*attention)(const fl_attention *a, int64_t sequence, int32_t head, int32_t count, int32_t head0, int64_t row0,
                      int64_t row1, int64_t range0, int64_t range1, void *scratch);
    void (*attention_merge)(const fl_attention *a, int64_t sequence, int64_t row, int32_t query_head);
    void (*act_mul)(int32_t kind, const fl_view *gate, const fl_view *up, const fl_view *out, int64_t i0, int64_t i1,
                    int32_t c0, int32_t c1);
    void (*add)(const fl_view *x, const fl_view *y, int32_t shape, const fl_view *out, int64_t i0, int64_t i1);
    void (*mul)(const fl_view *x, const fl_view *y, int32_t shape, const fl_view *out, int64_t i0, int64_t i1);
    void (*softmax)(const fl_view *x, const fl_view *out, int64_t i0, int64_t i1);
    void (*softcap)(const fl_view *x, float cap, const fl_view *out, int64_t i0, int64_t i1);
    void (*matmul)(const fl_view *a, const fl_view *b, const fl_view *out, int64_t i0, int64_t i1);
    void (*quantize)(const fl_view *x, int32_t group, const fl_view *codes, const fl_view *scales, int64_t i0, int64_t i1);
    void (*dequantize)(const fl_view *codes, const fl_view *scales, int32_t group, const fl_view *out, int64_t i0, int64_t i1);
    void (*route_topk)(const fl_route *r, const fl_view *logits, const float *bias, const fl_view *ids, const fl_view *weights,
                       int64_t i0, int64_t i1, void *scratch); /* scratch: 16 bytes for each expert */
    void (*add_weighted)(float *out, const float *y, float weight, int32_t n);
    void (*short_conv)(const fl_conv *a, int32_t c0, int32_t c1); /* channels of all rows; without the activation */
    /* one unit: FL_DELTA_COLUMNS columns of a head, all rows of a sequence; scratch: fl_delta_scratch */
    void (*delta_rule)(const fl_delta *d, int64_t sequence, int32_t head, int32_t column, void *scratch);
} fl_kernels;

int64_t fl_attention_scratch(int32_t key_dim, int32_t value_dim); /* bytes for one thread */

/* The best variant this machine can run, or the one named by `isa` (NULL: best). NULL if it is unknown or not runnable here. */
const fl_kernels *fl_kernels_for(const char *isa);

#endif
