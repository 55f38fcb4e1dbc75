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
FL_INLINE float top8(f32x8 v) {
    float m = v[0];
    for (int i = 1; i < 8; i++) m = v[i] > m ? v[i] : m;
    return m;
}

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

/* 2^n for −126 ≤ n ≤ 127, as bits. */
FL_INLINE f32x8 pow2_8(i32x8 n) { return (f32x8)((n + 127) << 23); }

/* e^x, about 1 ulp, denormal results included: x = n·ln 2 + r with |r| ≤ ½ ln 2, a polynomial of degree 7 in r (Cephes), and 2^n in two
 * factors so that both stay normal. −inf gives 0, above 88.73 gives +inf, NaN stays NaN. */
FL_INLINE f32x8 exp8(f32x8 x) {
    f32x8 c = select8(x < -104.0f, set8(-104.0f), x);
    c = select8(c > 89.0f, set8(89.0f), c);
    f32x8 t = c * 1.44269504088896341f + 12582912.0f; /* 1.5·2^23: the sum's low bits are the rounded integer */
    i32x8 n = (i32x8)t - 0x4b400000;
    f32x8 nf = t - 12582912.0f;
    f32x8 r = (c - nf * 0.693359375f) - nf * -2.12194440e-4f;
    f32x8 p = set8(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    i32x8 half = n >> 1;
    f32x8 y = p * pow2_8(half) * pow2_8(n - half);
    return select8(x != x, x, y);
}

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
FL_INLINE f32x8 sigmoid8(f32x8 x) {
    f32x8 e = exp8(-abs8(x));
    f32x8 y = select8(x < 0.0f, e, set8(1.0f)) / (1.0f + e);
    return select8(x != x, x, y);
}

FL_INLINE float exp1(float x) { return exp8(set8(x))[0]; }

#endif
