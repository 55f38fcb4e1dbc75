/* The linear op: packed weights, quantised activations, and the kernels' interface.
 *
 *     y[t][n] = sum_k x[t][k] * w[n][k] (+ bias[n])
 *
 * A weight [N][K] is packed once (pack.c) in strips of FL_STRIP output rows, each strip contiguous and group after group, so that a
 * thread that owns strips [a, b) streams one range of memory. Activations are first brought to the form that the weight's
 * format wants (fl_prepare): int8 codes with an f32 scale and a sum for each 32 of a row for block formats, bf16 rows for bf16 weights
 * where the variant has an instruction for them, plain f32 rows for the other 16- and 32-bit weights and for the exact mode. Inner sums
 * over a group are exact integers; the outer sum is f32, ascending groups, one fixed order for any number of rows, threads and for
 * every variant.
 */
#ifndef FL_LINEAR_H
#define FL_LINEAR_H
#include <stddef.h>
#include <stdint.h>

#include "variant.h"

enum { FL_STRIP = 32 };

/* A packed weight. `layout` numbers a row of the layout table in pack.c (one per storage form, named there and in pack.py). */
typedef struct {
    int32_t layout;
    int32_t N, K;
    const uint8_t *data; /* fl_packed_bytes(layout, N, K) bytes, 64-byte aligned */
} fl_weight;

/* Prepared activations of up to `rows` rows, in memory that the caller provides (fl_prepared_bytes). */
typedef struct {
    int32_t kind; /* how they are prepared; equal kinds (fl_prepare_kind) can be shared by several linears of the same input */
    int32_t rows, K;
    uint8_t *data;
} fl_acts;

/* Where the rows of a linear go: acc is the sum, act an activation of kernels.h (FL_ACT_NONE: none).
 *
 *     without up:  y[t][n] = add[t][n] + act(acc + bias[n])          with up:  y[t][n] = act(acc + bias[n]) * (acc_up + up_bias[n])
 *
 * With `codes`, a row is not written to y but quantised at once, as `prepare` would do it, for the layer that reads it next: a strip of
 * outputs is a group of its activations, so N must be a multiple of FL_STRIP. */
typedef struct {
    const float *bias, *up_bias; /* [N], NULL: none */
    const float *add;            /* [rows][ldadd], NULL: none; may be y. Not with up or codes */
    float *y;                    /* [rows][ldy] */
    size_t ldadd, ldy;
    fl_acts *codes; /* NULL: to y */
    int32_t act;
} fl_target;

enum { FL_ACT_NONE = -1 };

/* not per variant (pack.c) */
int fl_layout_id(const char *name);                       /* -1: unknown */
const char *fl_layout_name(int layout);                   /* NULL: no such layout */
size_t fl_packed_bytes(int layout, int64_t N, int64_t K); /* 0: this shape cannot be packed so */
size_t fl_source_bytes(int layout, int64_t N, int64_t K); /* bytes of the same weight in its file format; 0 as above */
int fl_pack(int layout, int64_t N, int64_t K, const uint8_t *src,
            uint8_t *dst); /* src: file bytes of the layout's source format; 0 ok */
/* Only strips [strip0, strip1) of it: src and dst point at the first of them. */
int fl_pack_strips(int layout, int64_t N, int64_t K, int64_t strip0, int64_t strip1, const uint8_t *src, uint8_t *dst);
/* The file bytes again. src: fl_packed_bytes; dst: fl_source_bytes; 0 ok. */
int fl_unpack(int layout, int64_t N, int64_t K, const uint8_t *src, uint8_t *dst);
/* exact: f32 activations; bf16: the variant multiplies bf16 (fl_linear_ops) */
int fl_prepare_kind(int layout, int exact, int bf16);
size_t fl_prepared_bytes(int kind, int64_t rows, int64_t K); /* scratch for fl_acts.data */

/* per variant, in the table of kernels.h */
typedef struct {
    /* rows [row0, row1) of x (stride ldx floats) into a; any split of rows between threads gives the same bytes */
    void (*prepare)(fl_acts *a, const float *x, size_t ldx, int row0, int row1);
    /* all rows of a, strips [strip0, strip1) of w, and of `up` if it is not NULL: a second weight of the same N and K.
     * scratch: fl_linear_scratch() bytes of this thread, 64-byte aligned. */
    void (*linear)(const fl_weight *w, const fl_weight *up, const fl_acts *a, const fl_target *to, int strip0, int strip1,
                   void *scratch);
    /* row `n` of a packed weight, decoded to f32 (embedding rows of a tied table); out[K] */
    void (*unpack_row)(const fl_weight *w, int64_t n, float *out);
    int32_t bf16; /* 1: it has kernels for bf16 activations */
} fl_linear_ops;

size_t fl_linear_scratch(void);

/* The specification (layouts.h), scalar and slow: y[T][N] of x[T][K], for tests. kind: of fl_acts; for bf16
 * activations what avx512 does. */
void fl_linear_reference(const fl_weight *w, const float *x, int T, const float *bias, float *y, int kind, int accumulate);

#endif
