/* Eight f32 lanes, for every variant from one source: GCC vector types, which the compiler maps to the registers it has.
 *
 * Everything but `acc8` and the half conversions is plain vector arithmetic, so its bits are the same in all variants. `acc8`, sums of
 * products for attention, fuses in all of them. Sums over lanes have one fixed order.
 */
#ifndef FL_VEC_H
#define FL_VEC_H
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "scalar_fma.h"
#include "variant.h"
#if defined(__SSE4_1__)
#include <immintrin.h>
#endif

#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are passed between inlined functions only */

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));

FL_INLINE f32x8 set8(float x) { return (f32x8){x, x, x, x, x, x, x, x}; }
FL_INLINE f32x8 load8(const float *p) {
    f32x8 v;
    memcpy(&v, p, sizeof v);
    return v;
}
FL_INLINE void store8(float *p, f32x8 v) { memcpy(p, &v, sizeof v); }
FL_INLINE f32x8 load8_part(const float *p, int n) { /* n < 8 values, the rest zero */
    f32x8 v = set8(0.0f);
    memcpy(&v, p, (size_t)n * sizeof(float));
    return v;
}
FL_INLINE void store8_part(float *p, f32x8 v, int n) { memcpy(p, &v, (size_t)n * sizeof(float)); }
FL_INLINE f32x8 select8(i32x8 mask, f32x8 yes, f32x8 no) { /* lanes of mask are 0 or −1 */
    return (f32x8)(((i32x8)yes & mask) | ((i32x8)no & ~mask));
}
FL_INLINE f32x8 max8(f32x8 a, f32x8 b) { return select8(a > b, a, b); } /* NaN in either gives b */
FL_INLINE f32x8 min8(f32x8 a, f32x8 b) { return select8(a < b, a, b); } /* the same */
FL_INLINE f32x8 abs8(f32x8 a) { return (f32x8)((i32x8)a & 0x7fffffff); }

/* Sums acc = fma(x, u, acc), rounded once in every variant. Without the instruction they are kept as f64, where the product is exact:
 * rounding to f64 and then to f32 differs from rounding once only where the f64 is half way between two f32 (its low 29 bits are 2^28;
 * those are done again in full), and below 2^-126, which is left as it is. */
#if defined(__FMA__)
typedef f32x8 acc8;
FL_INLINE acc8 acc8_of(f32x8 a) { return a; }
FL_INLINE f32x8 acc8_value(acc8 a) { return a; }
FL_INLINE acc8 acc8_fma(acc8 c, float x, f32x8 u) { return (f32x8)_mm256_fmadd_ps((__m256)set8(x), (__m256)u, (__m256)c); }
#elif defined(__SSE4_1__)
typedef struct {
    __m128d v[4];
} acc8;
typedef union {
    f32x8 all;
    __m128 half[2];
} halves8;
FL_INLINE acc8 acc8_of(f32x8 a) {
    halves8 h = {a};
    return (acc8){{_mm_cvtps_pd(h.half[0]), _mm_cvtps_pd(_mm_movehl_ps(h.half[0], h.half[0])), _mm_cvtps_pd(h.half[1]),
                   _mm_cvtps_pd(_mm_movehl_ps(h.half[1], h.half[1]))}};
}
FL_INLINE f32x8 acc8_value(acc8 a) {
    halves8 h;
    for (int i = 0; i < 2; i++) h.half[i] = _mm_movelh_ps(_mm_cvtpd_ps(a.v[2 * i]), _mm_cvtpd_ps(a.v[2 * i + 1]));
    return h.all;
}
static __attribute__((noinline, cold)) acc8 acc8_fma_to_odd(acc8 c, float x, f32x8 u) {
    f32x8 a = acc8_value(c);
    for (int i = 0; i < 8; i++) a[i] = fl_fma(x, u[i], a[i]);
    return acc8_of(a);
}
FL_INLINE acc8 acc8_fma(acc8 c, float x, f32x8 u) {
    const __m128d factor = _mm_set1_pd((double)x);
    const acc8 wide = acc8_of(u);
    acc8 s;
    for (int i = 0; i < 4; i++) s.v[i] = _mm_add_pd(_mm_mul_pd(wide.v[i], factor), c.v[i]);
    const __m128i half = _mm_set1_epi32(INT32_MIN);
    const __m128 t = _mm_shuffle_ps(_mm_castpd_ps(s.v[0]), _mm_castpd_ps(s.v[1]), 0x88);
    const __m128 w = _mm_shuffle_ps(_mm_castpd_ps(s.v[2]), _mm_castpd_ps(s.v[3]), 0x88);
    const __m128i tie = _mm_or_si128(_mm_cmpeq_epi32(_mm_slli_epi32(_mm_castps_si128(t), 3), half),
                                     _mm_cmpeq_epi32(_mm_slli_epi32(_mm_castps_si128(w), 3), half));
    if (__builtin_expect(_mm_movemask_epi8(tie), 0)) return acc8_fma_to_odd(c, x, u);
    for (int i = 0; i < 4; i++) s.v[i] = _mm_cvtps_pd(_mm_cvtpd_ps(s.v[i]));
    return s;
}
#else
typedef f32x8 acc8;
FL_INLINE acc8 acc8_of(f32x8 a) { return a; }
FL_INLINE f32x8 acc8_value(acc8 a) { return a; }
FL_INLINE acc8 acc8_fma(acc8 c, float x, f32x8 u) {
    for (int i = 0; i < 8; i++) c[i] = fl_fma(x, u[i], c[i]);
    return c;
}
#endif

FL_INLINE float sum8(f32x8 v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }
/* Half precision (IEEE binary16), exact to f32 and rounded to nearest even from f32. */
FL_INLINE f32x8 half8(const uint16_t *p) {
#if defined(__F16C__)
    __m128i h;
    memcpy(&h, p, sizeof h);
    return (f32x8)_mm256_cvtph_ps(h);
#else
    u32x8 h = {p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7]};
    u32x8 sign = (h & 0x8000u) << 16, rest = (h & 0x7fffu) << 13;
    f32x8 scaled = (f32x8)rest * set8(0x1p112f); /* moves the exponent's bias; denormals become normal */
    u32x8 special = (u32x8)((h & 0x7c00u) == 0x7c00u);
    u32x8 bits = (((u32x8)scaled) & ~special) | ((rest | 0x7f800000u) & special);
    return (f32x8)(bits | sign);
#endif
}
FL_INLINE float half1(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = (uint32_t)(h & 0x7fffu) << 13, bits;
    float scaled, out;
    if ((h & 0x7c00u) == 0x7c00u) {
        bits = rest | 0x7f800000u;
    } else {
        memcpy(&scaled, &rest, 4);
        scaled *= 0x1p112f;
        memcpy(&bits, &scaled, 4);
    }
    bits |= sign;
    memcpy(&out, &bits, 4);
    return out;
}
FL_INLINE uint16_t to_half1(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t sign = (bits >> 16) & 0x8000u, a = bits & 0x7fffffffu;
    if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((a >> 13) & 0x1ffu)); /* NaN stays NaN */
    if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);                       /* rounds to infinity */
    if (a < 0x38800000u) {                                                         /* denormal: let f32 addition round */
        float y;
        memcpy(&y, &a, 4);
        y += 0.5f; /* one unit of the sum is 2^-24, the step of half denormals */
        memcpy(&a, &y, 4);
        return (uint16_t)(sign | (a - 0x3f000000u));
    }
    a += 0xfffu + ((a >> 13) & 1u);
    return (uint16_t)(sign | ((a - 0x38000000u) >> 13));
}
FL_INLINE float bfloat1(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

FL_INLINE uint16_t to_bfloat1(float x) { /* to nearest even; NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
FL_INLINE f32x8 bfloat8(const uint16_t *p) {
    u32x8 h = {p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7]};
    return (f32x8)(h << 16);
}
FL_INLINE f32x8 ints8(const int8_t *p) {
    i32x8 v = {p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7]};
    return __builtin_convertvector(v, f32x8);
}

/* Sums of products as wide as the variant's registers: FL_WIDE lanes. `wide` is an operand, `wide_sum` a running sum of one fused
 * multiply-add per term; a lane's bits do not depend on the number of lanes. */
#if defined(__AVX512F__) && !defined(FL_EMULATE)
#define FL_WIDE 16
typedef __m512 wide;
typedef __m512 wide_sum;
FL_INLINE wide wide_f32(const float *p) { return _mm512_loadu_ps(p); }
FL_INLINE wide wide_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
FL_INLINE wide wide_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
FL_INLINE wide wide_i8(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
FL_INLINE void wide_store(float *p, wide v) { _mm512_storeu_ps(p, v); }
FL_INLINE wide_sum wide_sum_of(wide v) { return v; }
FL_INLINE wide wide_value(wide_sum s) { return s; }
FL_INLINE wide_sum wide_fma(wide_sum c, float x, wide u) { return _mm512_fmadd_ps(_mm512_set1_ps(x), u, c); }
#else
#define FL_WIDE 8
typedef f32x8 wide;
typedef acc8 wide_sum;
FL_INLINE wide wide_f32(const float *p) { return load8(p); }
FL_INLINE wide wide_f16(const uint16_t *p) { return half8(p); }
FL_INLINE wide wide_bf16(const uint16_t *p) { return bfloat8(p); }
FL_INLINE wide wide_i8(const int8_t *p) { return ints8(p); }
FL_INLINE void wide_store(float *p, wide v) { store8(p, v); }
FL_INLINE wide_sum wide_sum_of(wide v) { return acc8_of(v); }
FL_INLINE wide wide_value(wide_sum s) { return acc8_value(s); }
FL_INLINE wide_sum wide_fma(wide_sum c, float x, wide u) { return acc8_fma(c, x, u); }
#endif

/* e^x, about 1 ulp, denormal results included: x = n·ln 2 + r with |r| ≤ ½ ln 2, a polynomial of degree 7 in r (Cephes), and 2^n in two
 * factors so that both stay normal. −inf gives 0, above 88.73 gives +inf, NaN stays NaN. */
#define FL_EXP(name, F, I, set, select, most, least)                                                                           \
    FL_INLINE F name(F x) {                                                                                                    \
        F c = least(set(89.0f), most(set(-104.0f), x)); /* NaN stays */                                                        \
        F t = c * 1.44269504088896341f + 12582912.0f;   /* 1.5·2^23: the sum's low bits are the rounded integer */             \
        I n = (I)t - 0x4b400000;                                                                                               \
        F nf = t - 12582912.0f;                                                                                                \
        F r = (c - nf * 0.693359375f) - nf * -2.12194440e-4f;                                                                  \
        F p = set(1.9875691500e-4f);                                                                                           \
        p = p * r + 1.3981999507e-3f;                                                                                          \
        p = p * r + 8.3334519073e-3f;                                                                                          \
        p = p * r + 4.1665795894e-2f;                                                                                          \
        p = p * r + 1.6666665459e-1f;                                                                                          \
        p = p * r + 5.0000001201e-1f;                                                                                          \
        p = p * (r * r) + r + 1.0f;                                                                                            \
        I half = n >> 1; /* 2^n in two factors, as bits */                                                                     \
        F y = p * (F)((half + 127) << 23) * (F)((n - half + 127) << 23);                                                       \
        return select(x != x, x, y);                                                                                           \
    }
FL_EXP(exp8, f32x8, i32x8, set8, select8, max8, min8)

/* FL_WIDE lanes for the softmax of attention. Longer vectors than the registers are no way to write it: compilers take their
 * comparisons apart, lane by lane. */
#if FL_WIDE == 16
typedef f32x16 f32xw;
typedef i32x16 i32xw;
#define FL_LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#else
typedef f32x8 f32xw;
typedef i32x8 i32xw;
#define FL_LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7}
#endif
FL_INLINE f32xw loadw(const float *p) {
    f32xw v;
    memcpy(&v, p, sizeof v);
    return v;
}
FL_INLINE void storew(float *p, f32xw v) { memcpy(p, &v, sizeof v); }
FL_INLINE f32xw setw(float x) { return x - (f32xw){0}; }
FL_INLINE f32xw selectw(i32xw mask, f32xw yes, f32xw no) {
#if FL_WIDE == 16 /* compilers take two instructions for the form below */
    return (f32xw)_mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)mask), (__m512)no, (__m512)yes);
#else
    return (f32xw)(((i32xw)yes & mask) | ((i32xw)no & ~mask));
#endif
}
FL_INLINE f32xw maxw(f32xw a, f32xw b) { /* NaN in either gives b */
#if FL_WIDE == 16
    return (f32xw)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (f32xw)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return selectw(a > b, a, b);
#endif
}
#if FL_WIDE == 16
FL_INLINE f32xw minw(f32xw a, f32xw b) { return (f32xw)_mm512_min_ps((__m512)a, (__m512)b); } /* the same */
#endif
/* The largest lane of those that are no NaN. */
FL_INLINE float topw(f32xw v) {
#if FL_WIDE == 16
    __m512 a = (__m512)v;
    a = _mm512_max_ps(a, _mm512_shuffle_f32x4(a, a, 0x4e));
    a = _mm512_max_ps(a, _mm512_shuffle_f32x4(a, a, 0xb1));
    a = _mm512_max_ps(a, _mm512_permute_ps(a, 0x4e));
    return _mm512_cvtss_f32(_mm512_max_ps(a, _mm512_permute_ps(a, 0xb1)));
#else
    f32x4 a, b;
    memcpy(&a, &v, sizeof a);
    memcpy(&b, (const char *)&v + sizeof a, sizeof b);
    i32x4 more = a > b;
    a = (f32x4)(((i32x4)a & more) | ((i32x4)b & ~more));
    float first = a[0] > a[1] ? a[0] : a[1], second = a[2] > a[3] ? a[2] : a[3];
    return first > second ? first : second;
#endif
}

/* 2^x for x ≤ 0 within 1.5 ulp, and exactly 1 for 0; 0 below −126: beside a weight of 1, what a denormal adds is lost. x = n + f with
 * |f| ≤ ½; the polynomial is the minimax one of degree 5 with p(0) = 1. NaN stays NaN. */
FL_INLINE f32xw exp2w(f32xw x) {
    f32xw t = x + 12582912.0f; /* 1.5·2^23: the sum's low bits are n */
    f32xw f = x - (t - 12582912.0f);
    f32xw p = 1.32647273e-3f * f + 9.67151299e-3f;
    p = p * f + 5.55073358e-2f;
    p = p * f + 0.240222424f;
    p = p * f + 0.693147004f;
    p = p * f + 1.0f;
    i32xw power = ((i32xw)t - (0x4b400000 - 127)) << 23, tiny = x < -126.0f;
    return (f32xw)((i32xw)(p * (f32xw)power) & ~tiny);
}
FL_INLINE float exp2_1(float x) { return exp2w(setw(x))[0]; }

/* tanh x (Cephes): an odd polynomial below 0.625, 1 − 2/(e^{2x} + 1) above. */
FL_INLINE f32x8 tanh8(f32x8 x) {
    f32x8 a = abs8(x), z = x * x;
    f32x8 p = set8(-5.70498872745e-3f);
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    f32x8 small = p * z * x + x;
    f32x8 big = 1.0f - 2.0f / (exp8(a + a) + 1.0f);
    big = (f32x8)((i32x8)big | ((i32x8)x & (i32x8)set8(-0.0f)));
    return select8(x != x, x, select8(a < 0.625f, small, big));
}

/* 1 / (1 + e^−x), with full relative precision on both sides. */
#define FL_SIGMOID(name, exp, F, I, set, select)                                                                               \
    FL_INLINE F name(F x) {                                                                                                    \
        F e = exp((F)((I)x | (int32_t)0x80000000)); /* of −|x| */                                                              \
        F y = select(x < 0.0f, e, set(1.0f)) / (1.0f + e);                                                                     \
        return select(x != x, x, y);                                                                                           \
    }
FL_SIGMOID(sigmoid8, exp8, f32x8, i32x8, set8, select8)
#if FL_WIDE == 16 /* what most models use between the layers of an MLP, with all lanes */
FL_EXP(expw, f32xw, i32xw, setw, selectw, maxw, minw)
FL_SIGMOID(sigmoidw, expw, f32xw, i32xw, setw, selectw)
#endif

FL_INLINE float exp1(float x) { return exp8(set8(x))[0]; }

#endif
