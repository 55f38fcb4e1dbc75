/* bf16 weights times bf16 activations on AVX-512 BF16: two of 32 products a cycle, twice as many as of f32.
 *
 * A weight is stored k after k (layouts.h); the instruction wants the values of two k side by side. One permutation of two lines makes a
 * vector of 16 outputs x 2 k: in registers for few rows, which are limited by reading, and once for all rows of a block in L1:
 *
 *     pairs: [pair of k][32 outputs][2 k]   16 KB for a block of 256 k
 *
 * The order of the sums (layouts.h) is the same in both. linear_tiles.c has the kernels of amx.
 */
#include "linear_rows.h"

#if FL_LANES == 16

void FL_NAME(fl_to_bf16)(const float *x, int K, uint16_t *out) {
    for (int k = 0; k < K; k++) {
        const uint32_t bits = fl_float_bits(x[k]), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        out[k] = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);
    }
    memset(out + K, 0, (fl_bf16_stride(K) - (size_t)K) * 2);
}

int FL_NAME(fl_bf16_rows)(int K) {
    const int fits = PANEL_BYTES / 2 / (int)(fl_bf16_stride(K) * 2) / ROW_STEP * ROW_STEP, least = 32 / ROW_STEP * ROW_STEP;
    return fits < least ? least : fits > MOST_ROWS ? MOST_ROWS : fits;
}

#ifndef FL_AMX

enum { BLOCK = 256, LINE = 2 * FL_STRIP, STREAMED = 4, AHEAD = 3072 };
static const uint8_t no_line[LINE]; /* behind an odd K */

/* acc[r] = sums of R rows of a strip, weights straight from memory. */
KERNEL void stream_pairs(const int R, const fl_weight *w, const fl_acts *a, int row0, int strip, float (*acc)[FL_STRIP]) {
    const size_t ldx = fl_bf16_stride(a->K) * 2;
    const int8_t *x = (const int8_t *)fl_bf16s(a, row0);
    const uint8_t *p = w->data + (size_t)strip * (size_t)w->K * LINE;
    vf sums[STREAMED][VECTORS];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < VECTORS; v++) sums[r][v] = vf_zero();
    for (int k0 = 0; k0 < w->K; k0 += BLOCK) {
        const int end = w->K - k0 < BLOCK ? w->K : k0 + BLOCK;
        vf b[STREAMED][VECTORS];
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < VECTORS; v++) b[r][v] = vf_zero();
        for (int k = k0; k < end; k += 2, p += 2 * LINE, x += 4) {
            const uint8_t *odd = k + 1 < end ? p + LINE : no_line;
            __builtin_prefetch(p + AHEAD, 0, 3), __builtin_prefetch(p + AHEAD + LINE, 0, 3);
            UNROLL for (int v = 0; v < VECTORS; v++) {
                const vb pairs = vb_pairs(p, odd, v);
                UNROLL for (int r = 0; r < R; r++) b[r][v] = dot2_bf16(b[r][v], pairs, vb_bcast4(x + r * ldx));
            }
        }
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < VECTORS; v++) sums[r][v] = vf_add(sums[r][v], b[r][v]);
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < VECTORS; v++) vf_store(acc[r] + FL_LANES * v, sums[r][v]);
}

/* Six rows: acc[r] += one block. x: their values at its first k. */
KERNEL void multiply_pairs(int count, const uint8_t *pairs, const int8_t *const *x, float (*acc)[FL_STRIP]) {
    vf b[PANEL_ROWS][VECTORS];
    UNROLL for (int r = 0; r < PANEL_ROWS; r++) UNROLL for (int v = 0; v < VECTORS; v++) b[r][v] = vf_zero();
    for (int i = 0; i < count; i++, pairs += 2 * LINE) {
        vb w[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) w[v] = vb_load(pairs + VB * v);
        UNROLL for (int r = 0; r < PANEL_ROWS; r++) {
            const vb xs = vb_bcast4(x[r] + 4 * i);
            UNROLL for (int v = 0; v < VECTORS; v++) b[r][v] = dot2_bf16(b[r][v], w[v], xs);
        }
    }
    UNROLL for (int r = 0; r < PANEL_ROWS; r++) UNROLL for (int v = 0; v < VECTORS; v++) {
        float *sum = acc[r] + FL_LANES * v;
        vf_store(sum, vf_add(vf_load(sum), b[r][v]));
    }
}

void FL_NAME(fl_bf16_sums)(const fl_weight *w, const fl_acts *a, int row0, int rows, int strip, void *space,
                           float (*acc)[FL_STRIP]) {
    uint8_t *pairs = space;
    if (rows == 1) stream_pairs(1, w, a, row0, strip, acc);
    if (rows == 2) stream_pairs(2, w, a, row0, strip, acc);
    if (rows == 3) stream_pairs(3, w, a, row0, strip, acc);
    if (rows == 4) stream_pairs(4, w, a, row0, strip, acc);
    if (rows <= STREAMED) return;
    const uint8_t *p = w->data + (size_t)strip * (size_t)w->K * LINE;
    memset(acc, 0, (size_t)((rows + PANEL_ROWS - 1) / PANEL_ROWS * PANEL_ROWS) * sizeof acc[0]);
    for (int k0 = 0; k0 < w->K; k0 += BLOCK) {
        const int depth = w->K - k0 < BLOCK ? w->K - k0 : BLOCK, count = (depth + 1) / 2;
        for (int i = 0; i < count; i++, p += 2 * LINE)
            for (int v = 0; v < VECTORS; v++)
                vb_store(pairs + 2 * LINE * i + VB * v, vb_pairs(p, 2 * i + 1 < depth ? p + LINE : no_line, v));
        const int steps = (rows + PANEL_ROWS - 1) / PANEL_ROWS, lines = (2 * count + steps - 1) / steps;
        const uint8_t *next = p; /* the next block is asked for while this one is used */
        for (int first = 0; first < rows; first += PANEL_ROWS) {
            const int8_t *x[PANEL_ROWS];
            for (int r = 0; r < PANEL_ROWS; r++) /* rows behind the last one are that one again */
                x[r] = (const int8_t *)(fl_bf16s(a, row0 + (first + r < rows ? first + r : rows - 1)) + k0);
            for (int i = 0; i < lines; i++, next += LINE) __builtin_prefetch(next, 0, 3);
            multiply_pairs(count, pairs, x, acc + first);
        }
        p -= depth % 2 ? LINE : 0;
    }
}
#endif

#else
typedef int fl_no_bf16; /* an empty file is no C */
#endif
