/* What both ways to compute attention share: attention.c (products in f32) and attention_pairs.c (in bf16). */
#ifndef FL_ATTENTION_H
#define FL_ATTENTION_H
#include "ops.h"
#include "vec.h"

enum { SROW = FL_SUB + 16 }; /* floats from one row of scores to the next */

#define LOG2_E 1.44269504f

/* Scores and weights of one step of a unit. */
typedef struct {
    int32_t n, lo, hi, whole;           /* pairs; the tokens that any of them sees; whether each sees all FL_SUB */
    int32_t from[FL_TILE], to[FL_TILE]; /* the tokens that each sees */
    float *score[FL_TILE], *acc[FL_TILE];
    float m[FL_TILE + FL_WIDE], l[FL_TILE][16]; /* running maximum, and sum of weights in sixteen parts */
    float slope[FL_TILE], distance[FL_TILE];
} step;

/* Final scores of a pair: scaled, capped and biased, in units of log 2; −inf where it does not see a token. Returns the largest. */
FL_INLINE float largest_score(const fl_attention *a, const step *w, int32_t i) {
    const f32xw iota = FL_LANE_NUMBERS;
    int32_t from = w->from[i], to = w->to[i];
    float *s = w->score[i];
    f32xw top = setw(-INFINITY);
    for (int32_t j = from / 16 * 16; j < (to + 15) / 16 * 16; j += FL_WIDE) {
        f32xw x = loadw(s + j);
        if (a->softcap > 0.0f) {
            storew(s + j, x * a->scale);
            for (int32_t k = j; k < j + FL_WIDE; k += 8) store8(s + k, a->softcap * tanh8(load8(s + k) / a->softcap));
            x = loadw(s + j) * LOG2_E;
        } else {
            x = x * (a->scale * LOG2_E);
        }
        if (a->slopes) x = x + (w->slope[i] * LOG2_E) * (iota + (float)j + w->distance[i]);
        if (j < from || j + FL_WIDE > to) {
            i32xw seen = (iota + (float)j >= (float)from) & (iota + (float)j < (float)to);
            x = selectw(seen, x, setw(-INFINITY));
        }
        storew(s + j, x);
        top = maxw(x, top);
    }
    return topw(top);
}

/* The part of a block that a step reads: tokens j … j + count − 1 of the step. */
typedef struct {
    const char *head; /* of the block */
    int64_t offset;   /* tokens from the block's begin */
    int32_t count;
} piece;

FL_INLINE piece piece_at(const fl_cache *c, const int32_t *blocks, int32_t head, int64_t first, int32_t j, int32_t end) {
    int64_t block = (first + j) / c->block_size, offset = (first + j) % c->block_size, left = c->block_size - offset;
    return (piece){c->p + blocks[block] * c->block_bytes + head * fl_head_bytes(c), offset,
                   (int32_t)(left < end - j ? left : end - j)};
}

/* Scales of the keys [from, to) of a step, [groups][SROW], and of their values. */
FL_INLINE void stage_scales(const fl_cache *c, const int32_t *blocks, int32_t head, int64_t first, int32_t from, int32_t to,
                            float *kscale, float *vscale) {
    const int32_t groups = fl_kv_groups(c->key_dim) + fl_kv_groups(c->value_dim);
    for (int32_t j = from; j < to;) {
        piece part = piece_at(c, blocks, head, first, j, to);
        const float *scales = (const float *)(part.head + fl_scales_at(c)) + part.offset;
        for (int32_t g = 0; g < groups; g++, scales += c->block_size) {
            int32_t v = g - fl_kv_groups(c->key_dim);
            memcpy((v < 0 ? kscale + g * SROW : vscale + v * SROW) + j, scales, (size_t)part.count * sizeof(float));
        }
        j += part.count;
    }
}

#if FL_WIDE == 16
/* What attention_pairs.c needs of a unit: queries as bf16 [pairs][Dk, even]; weights as bf16 [FL_TILE][FL_SUB]; room for one step of
 * keys [Dk / 2][SROW][2] and of values [FL_SUB / 2][width][2]; for int8 the scales of the step, as stage_scales writes them. */
typedef struct {
    uint16_t *q, *weights;
    char *keys, *values;
    const float *kscale, *vscale;
} pairs_scratch;

/* A query [n] as bf16, and a zero behind it where n is odd. */
void FL_NAME(fl_attention_query)(const float *x, int32_t n, uint16_t *out);
/* One step of a kv head: the pairs [i0, i1) of w get its scores, and their maxima, sums and acc are brought along. next: what is read
 * after it. */
void FL_NAME(fl_attention_pairs)(const fl_attention *a, const int32_t *blocks, int32_t head, int64_t first, step *w, int32_t i0,
                                 int32_t i1, const pairs_scratch *scratch, int32_t width, const char *next);
#endif

#endif
