/* The loops of sampling that the vocabulary makes long, in AVX-512: the weights of all tokens of a row, summed by bucket; the tokens of
 * one bucket; a row under a mask, with its maxima.
 *
 * The same operations in the same order as the scalar forms in `_select.h`, which are the specification. Of the weights: 16 tokens at
 * a time, a logit becomes t, exp(t) in f32, and the integer round(exp(t) * 2^40). The product by a power of two is exact, so the
 * conversion of the f32 rounds as that of the f64 does there (to nearest, ties to even). Sums of integers are exact in any order.
 *
 *   16 logits --t--> exp (f32) --2^40--> 2 x 8 integers --+--> one sum of all
 *                \--> t above the head's end? (few) ------+--> taken out of it, and added to their buckets one by one
 */
#ifndef FASTLLM_SELECT_512_H
#define FASTLLM_SELECT_512_H

#include <stdint.h>

#include "_codecs.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#define FL_HAVE_512 1
#define FL_512 __attribute__((target("avx512f,avx512dq")))

/* Whether this processor and its system run FL_512. */
static int fl_runs_512(void) { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq"); }

/* exp(t) of 16 numbers t <= 0, as fl_exp. */
FL_512 static inline __m512 fl_exp_512(__m512 t) {
    const __m512 magic = _mm512_set1_ps(0x1.8p+23f);
    t = _mm512_max_ps(t, _mm512_set1_ps(-60.0f));
    const __m512 shifted = _mm512_add_ps(_mm512_mul_ps(t, _mm512_set1_ps(0x1.715476p+0f)), magic);
    const __m512 k = _mm512_sub_ps(shifted, magic);
    const __m512 high = _mm512_sub_ps(t, _mm512_mul_ps(k, _mm512_set1_ps(0x1.62e4p-1f)));
    const __m512 r = _mm512_sub_ps(high, _mm512_mul_ps(k, _mm512_set1_ps(0x1.7f7d1cp-20f)));
    __m512 p = _mm512_set1_ps(1.0f / 5040.0f);
    p = _mm512_add_ps(_mm512_mul_ps(p, r), _mm512_set1_ps(1.0f / 720.0f));
    p = _mm512_add_ps(_mm512_mul_ps(p, r), _mm512_set1_ps(1.0f / 120.0f));
    p = _mm512_add_ps(_mm512_mul_ps(p, r), _mm512_set1_ps(1.0f / 24.0f));
    p = _mm512_add_ps(_mm512_mul_ps(p, r), _mm512_set1_ps(1.0f / 6.0f));
    p = _mm512_add_ps(_mm512_mul_ps(p, r), _mm512_set1_ps(0.5f));
    p = _mm512_add_ps(_mm512_mul_ps(p, r), _mm512_set1_ps(1.0f));
    p = _mm512_add_ps(_mm512_mul_ps(p, r), _mm512_set1_ps(1.0f));
    const __m512i scale = _mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(shifted), 23), _mm512_set1_epi32(127 << 23));
    return _mm512_mul_ps(p, _mm512_castsi512_ps(scale));
}

/* Tokens whose buckets are counted singly, collected without branches that nobody could foresee. */
#define FL_PART_512 1024
typedef struct {
    int32_t buckets[FL_PART_512 + 16];
    uint64_t weights[FL_PART_512 + 16];
    int count;
} fl_singles;

/* Adds the tokens of `near` (a bit each); y: -32 t; low, high: their weights. */
FL_512 static inline void fl_collect_512(fl_singles *singles, __mmask16 near, __m512 y, __m512i low, __m512i high) {
    uint64_t *weights = singles->weights + singles->count;
    _mm512_storeu_si512(singles->buckets + singles->count, _mm512_maskz_compress_epi32(near, _mm512_cvttps_epi32(y)));
    _mm512_storeu_si512(weights, _mm512_maskz_compress_epi64((__mmask8)near, low));
    _mm512_storeu_si512(weights + __builtin_popcount(near & 255), _mm512_maskz_compress_epi64((__mmask8)(near >> 8), high));
    singles->count += __builtin_popcount(near);
}

/* fl_masses_512 of at most FL_PART_512 tokens, without what goes singly: `filter`: some weights may be below least; `close`: some tokens
 * may be in buckets before `head`. Returns the sum of the others in eight lanes. */
FL_512 FL_INLINE __m512i fl_part_512(const float *x, int64_t n, float top, float inverse, uint64_t least, int head, int filter,
                                     int close, fl_singles *singles) {
    const __m512i smallest = _mm512_set1_epi64((int64_t)least);
    const __m512 ends = _mm512_set1_ps((float)head), one = _mm512_set1_ps(0x1p+40f);
    __m512i rest = _mm512_setzero_si512();
    for (int64_t i = 0; i < n; i += 16) {
        const __m512 t = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(top)), _mm512_set1_ps(inverse));
        const __m512 weight = _mm512_mul_ps(fl_exp_512(t), one);
        __m512i low = _mm512_cvtps_epi64(_mm512_castps512_ps256(weight));
        __m512i high = _mm512_cvtps_epi64(_mm512_extractf32x8_ps(weight, 1));
        if (filter) {
            low = _mm512_maskz_mov_epi64(_mm512_cmpge_epu64_mask(low, smallest), low);
            high = _mm512_maskz_mov_epi64(_mm512_cmpge_epu64_mask(high, smallest), high);
        }
        if (close) {
            const __m512 y = _mm512_mul_ps(t, _mm512_set1_ps(-32.0f));
            const __mmask16 near = _mm512_cmp_ps_mask(y, ends, _CMP_LT_OQ);
            fl_collect_512(singles, near, y, low, high);
            low = _mm512_maskz_mov_epi64((__mmask8)~near, low);
            high = _mm512_maskz_mov_epi64((__mmask8)(~near >> 8), high);
        }
        rest = _mm512_add_epi64(rest, _mm512_add_epi64(low, high));
    }
    return rest;
}

/* Adds the weights (those not below least) of the n tokens x (n a multiple of 16): singly to buckets before `head`, the others to
 * mass[head]. close: some may be in buckets before `head`. */
FL_512 static void fl_masses_512(const float *x, int64_t n, float top, float inverse, uint64_t least, int head, int close,
                                 uint64_t *mass) {
    __m512i rest = _mm512_setzero_si512();
    fl_singles singles;
    for (int64_t first = 0; first < n; first += FL_PART_512) {
        const int64_t count = n - first < FL_PART_512 ? n - first : FL_PART_512;
        singles.count = 0;
        if (least > 0) {
            rest = _mm512_add_epi64(rest, fl_part_512(x + first, count, top, inverse, least, head, 1, 1, &singles));
        } else if (close) {
            rest = _mm512_add_epi64(rest, fl_part_512(x + first, count, top, inverse, 0, head, 0, 1, &singles));
        } else {
            rest = _mm512_add_epi64(rest, fl_part_512(x + first, count, top, inverse, 0, head, 0, 0, &singles));
        }
        for (int i = 0; i < singles.count; i++) mass[singles.buckets[i]] += singles.weights[i];
    }
    mass[head] += (uint64_t)_mm512_reduce_add_epi64(rest);
}

/* The tokens of a chunk of 128 in one bucket (last: all behind it, too): their numbers in the chunk, ascending; returns how many. */
FL_512 static inline int fl_bucket_512(const float *x, float top, float inverse, int bucket, int last, int32_t *members) {
    const __m512 begin = _mm512_set1_ps((float)bucket), end = _mm512_set1_ps(last ? __builtin_inff() : (float)(bucket + 1));
    int found = 0;
    for (int i = 0; i < 128; i += 16) {
        const __m512 t = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(top)), _mm512_set1_ps(inverse));
        const __m512 y = _mm512_mul_ps(t, _mm512_set1_ps(-32.0f));
        const __mmask16 behind = last ? _mm512_cmp_ps_mask(y, end, _CMP_LE_OQ) : _mm512_cmp_ps_mask(y, end, _CMP_LT_OQ);
        uint32_t inside = _mm512_mask_cmp_ps_mask(behind, y, begin, _CMP_GE_OQ);
        for (; inside != 0; inside &= inside - 1) members[found++] = i + __builtin_ctz(inside);
    }
    return found;
}

/* The order of 16 logits, as fl_order. */
FL_512 static inline __m512i fl_order_512(__m512 x) {
    const __m512i bits = _mm512_castps_si512(_mm512_add_ps(x, _mm512_setzero_ps()));
    return _mm512_xor_si512(bits, _mm512_and_si512(_mm512_srai_epi32(bits, 31), _mm512_set1_epi32(0x7fffffff)));
}

/* out = row where the mask's bit is 1, else -inf, with the maxima of its chunks of 128 and the highest and lowest order of out (*highest,
 * *lowest) and of row (*top, *bottom), all in one pass; n: a multiple of 128. */
FL_512 static void fl_masked_512(const float *row, int64_t n, const uint32_t *mask, float *out, int32_t *maxima,
                                 int32_t *highest, int32_t *lowest, int32_t *top, int32_t *bottom) {
    const __m512i least = _mm512_set1_epi32(INT32_MIN), most = _mm512_set1_epi32(INT32_MAX),
                  none = _mm512_set1_epi32(-0x7f800001);
    const __m512 minus = _mm512_castsi512_ps(_mm512_set1_epi32((int32_t)0xff800000u));
    __m512i high = least, low = most, raw_high = least, raw_low = most;
    for (int64_t first = 0; first < n; first += 128) {
        __m512i best = least;
        for (int64_t i = first; i < first + 128; i += 16) {
            const __mmask16 allowed = (__mmask16)(mask[i / 32] >> (i % 32));
            const __m512 x = _mm512_loadu_ps(row + i);
            const __m512i order = fl_order_512(x), kept = _mm512_mask_mov_epi32(none, allowed, order);
            raw_high = _mm512_max_epi32(raw_high, order);
            raw_low = _mm512_min_epi32(raw_low, order);
            best = _mm512_max_epi32(best, kept);
            low = _mm512_min_epi32(low, kept);
            _mm512_storeu_ps(out + i, _mm512_mask_mov_ps(minus, allowed, x));
        }
        maxima[first / 128] = _mm512_reduce_max_epi32(best);
        high = _mm512_max_epi32(high, best);
    }
    *highest = _mm512_reduce_max_epi32(high);
    *lowest = _mm512_reduce_min_epi32(low);
    *top = _mm512_reduce_max_epi32(raw_high);
    *bottom = _mm512_reduce_min_epi32(raw_low);
}

#else

static int fl_runs_512(void) { return 0; }

#endif
#endif
