/* Vectors of one variant behind plain names, so that one kernel source serves all instruction sets.
 *
 *     vf   FL_LANES f32      vi   FL_LANES i32      vb   FL_LANES x 4 bytes
 *
 * A lane is an output row everywhere in the linear kernels: vf holds one value for each of 8 or 16 rows, vb four consecutive k of
 * each. Four sets of definitions: AVX-512 with VNNI (16 lanes), AVX2 (8 lanes), SSE4.1 (4 lanes; the baseline of x86-64), and plain C
 * (8 lanes) for other processors and for -DFL_EMULATE, with which the kernels of avx512 and amx run, and are compared bit for bit, on
 * machines without these instructions.
 */
#ifndef FL_SIMD_H
#define FL_SIMD_H
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "scalar_fma.h"
#include "variant.h"

#if defined(FL_AMX) && !defined(FL_AVX512)
#define FL_AVX512 1
#endif
#if defined(FL_AVX512) || defined(FL_AMX)
#define FL_LANES 16
#elif defined(FL_AVX2) || !defined(__SSE4_1__) || defined(FL_EMULATE)
#define FL_LANES 8
#else
#define FL_LANES 4
#endif
#if defined(__SSE4_1__) && !defined(FL_EMULATE)
#include <immintrin.h>
#endif

/* 1.5 * 2^23 and its bits: MAGIC_BITS + I are the bits of MAGIC + I for |I| < 2^22 */
#define FL_MAGIC 12582912.0f
#define FL_MAGIC_BITS 0x4B400000

FL_INLINE int32_t load_i32(const void *p) {
    int32_t v;
    memcpy(&v, p, 4);
    return v;
}

#if defined(FL_AVX512) && !defined(FL_EMULATE)
/* ---- AVX-512 ---------------------------------------------------------------------------------------------------------- */
#define FL_WIDEN 0 /* dot4 adds to 32 bits itself */
typedef __m512 vf;
typedef __m512i vi;
typedef __m512i vb;
FL_INLINE vf vf_zero(void) { return _mm512_setzero_ps(); }
FL_INLINE vf vf_set1(float x) { return _mm512_set1_ps(x); }
FL_INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
FL_INLINE void vf_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
FL_INLINE vf vf_neg(vf a) {
    return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(a), _mm512_set1_epi32(INT32_MIN)));
}
FL_INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
FL_INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
FL_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
FL_INLINE vf vf_mac(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
FL_INLINE vf vf_halves(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
FL_INLINE vf vf_bf16s(const uint8_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
FL_INLINE vf vf_ints(vi a) { return _mm512_cvtepi32_ps(a); }
FL_INLINE vf vf_bits(vi a) { return _mm512_castsi512_ps(a); }
FL_INLINE vi vi_u8s(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
FL_INLINE vi vi_i8s(const uint8_t *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
FL_INLINE vi vi_load(const int32_t *p) { return _mm512_loadu_si512(p); }
FL_INLINE vi vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
FL_INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
FL_INLINE vi vi_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
FL_INLINE vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
FL_INLINE vi vi_shr(vi a, int n) { return _mm512_srli_epi32(a, n); }
FL_INLINE vi vi_shl(vi a, int n) { return _mm512_slli_epi32(a, n); }
FL_INLINE vb vb_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
FL_INLINE void vb_store(uint8_t *p, vb a) { _mm512_storeu_si512(p, a); }
FL_INLINE vb vb_set1(uint8_t x) { return _mm512_set1_epi8((char)x); }
FL_INLINE vb vb_and(vb a, vb b) { return _mm512_and_si512(a, b); }
FL_INLINE vb vb_or(vb a, vb b) { return _mm512_or_si512(a, b); }
FL_INLINE vb vb_xor(vb a, vb b) { return _mm512_xor_si512(a, b); }
FL_INLINE vb vb_shr(vb a, int n) { return _mm512_srli_epi16(a, n); }
FL_INLINE vb vb_shl(vb a, int n) { return _mm512_slli_epi16(a, n); }
FL_INLINE vb vb_lookup(const int8_t *table16, vb index) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table16)), index);
}
FL_INLINE vb vb_bcast4(const int8_t *p) { return _mm512_set1_epi32(load_i32(p)); }
FL_INLINE vi vi_of_bytes(vb a) { return a; }
FL_INLINE vi dot4_u8i8(vi acc, vb u, vb s) { return _mm512_dpbusd_epi32(acc, u, s); }
/* sum, which is ready here: compilers move a chain of products behind stores and branches to where its end is used, and what it reads
 * goes through memory until then. */
FL_INLINE vi vi_ready(vi sum) {
    __asm__ volatile("" : "+v"(sum));
    return sum;
}
FL_INLINE vb vb_sub8(vb a, vb b) { return _mm512_sub_epi8(a, b); }
/* Lane i: acc + odd * odd, then + even * even, of two bf16 each; denormals are zeros. */
FL_INLINE vf dot2_bf16(vf acc, vb a, vb b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
/* Of 32 bf16 of one k and 32 of the next: both of rows 16v.. of each, side by side. */
FL_INLINE vb vb_pairs(const uint8_t *even, const uint8_t *odd, int v) {
    const __m512i first = _mm512_set_epi32(0x2f000f, 0x2e000e, 0x2d000d, 0x2c000c, 0x2b000b, 0x2a000a, 0x290009, 0x280008,
                                           0x270007, 0x260006, 0x250005, 0x240004, 0x230003, 0x220002, 0x210001, 0x200000);
    const __m512i index = v ? _mm512_add_epi32(first, _mm512_set1_epi32(0x100010)) : first;
    return _mm512_permutex2var_epi16(_mm512_loadu_si512(even), index, _mm512_loadu_si512(odd));
}

#elif defined(FL_AVX2) && !defined(FL_EMULATE)
/* ---- AVX2 + FMA + F16C ------------------------------------------------------------------------------------------------ */
#define FL_WIDEN 1 /* dot4_pairs adds in 16 bits; how often that must be widened depends on the largest code */
typedef __m256 vf;
typedef __m256i vi;
typedef __m256i vb;
FL_INLINE vf vf_zero(void) { return _mm256_setzero_ps(); }
FL_INLINE vf vf_set1(float x) { return _mm256_set1_ps(x); }
FL_INLINE vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
FL_INLINE void vf_store(float *p, vf a) { _mm256_storeu_ps(p, a); }
FL_INLINE vf vf_neg(vf a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }
FL_INLINE vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
FL_INLINE vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
FL_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
FL_INLINE vf vf_mac(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
FL_INLINE vf vf_halves(const uint8_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
FL_INLINE vf vf_bf16s(const uint8_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
FL_INLINE vf vf_ints(vi a) { return _mm256_cvtepi32_ps(a); }
FL_INLINE vf vf_bits(vi a) { return _mm256_castsi256_ps(a); }
FL_INLINE vi vi_u8s(const uint8_t *p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
FL_INLINE vi vi_i8s(const uint8_t *p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
FL_INLINE vi vi_load(const int32_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
FL_INLINE vi vi_set1(int32_t x) { return _mm256_set1_epi32(x); }
/* The empty asm keeps a chain of additions a chain: compilers rebalance it to a tree, which needs twice the registers there are. */
FL_INLINE vi vi_chained(vi sum) {
    __asm__("" : "+x"(sum));
    return sum;
}
FL_INLINE vi vi_add(vi a, vi b) { return vi_chained(_mm256_add_epi32(a, b)); }
FL_INLINE vi vi_sub(vi a, vi b) { return _mm256_sub_epi32(a, b); }
FL_INLINE vi vi_and(vi a, vi b) { return _mm256_and_si256(a, b); }
FL_INLINE vi vi_shr(vi a, int n) { return _mm256_srli_epi32(a, n); }
FL_INLINE vi vi_shl(vi a, int n) { return _mm256_slli_epi32(a, n); }
FL_INLINE vb vb_load(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
FL_INLINE void vb_store(uint8_t *p, vb a) { _mm256_storeu_si256((__m256i *)p, a); }
FL_INLINE vb vb_set1(uint8_t x) { return _mm256_set1_epi8((char)x); }
FL_INLINE vb vb_and(vb a, vb b) { return _mm256_and_si256(a, b); }
FL_INLINE vb vb_or(vb a, vb b) { return _mm256_or_si256(a, b); }
FL_INLINE vb vb_xor(vb a, vb b) { return _mm256_xor_si256(a, b); }
FL_INLINE vb vb_shr(vb a, int n) { return _mm256_srli_epi16(a, n); }
FL_INLINE vb vb_shl(vb a, int n) { return _mm256_slli_epi16(a, n); }
FL_INLINE vb vb_lookup(const int8_t *table16, vb index) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table16)), index);
}
FL_INLINE vb vb_bcast4(const int8_t *p) { return _mm256_set1_epi32(load_i32(p)); }
FL_INLINE vi vi_of_bytes(vb a) { return a; }
/* pairs of u8 * i8 products in 16 bits: 2 * 127 * (largest u) must fit */
FL_INLINE vi dot2_u8i8(vb u, vb s) { return _mm256_maddubs_epi16(u, s); }
FL_INLINE vi vi_add16(vi a, vi b) { return vi_chained(_mm256_add_epi16(a, b)); }
FL_INLINE vi vi_pairs16(vi a) { return _mm256_madd_epi16(a, _mm256_set1_epi16(1)); }
/* signed codes: |w| as the unsigned factor (-128 becomes 128: 2 * 128 * 127 fits), its sign moved to x */
FL_INLINE vb vb_abs(vb a) { return _mm256_abs_epi8(a); }
FL_INLINE vb vb_sign(vb x, vb w) { return _mm256_sign_epi8(x, w); }

#elif defined(__SSSE3__) && defined(__SSE4_1__) && !defined(FL_EMULATE)
/* ---- SSE4.1: the baseline of x86-64; 4 lanes, no fused multiply-add ---------------------------------------------------- */
#define FL_WIDEN 1
typedef __m128 vf;
typedef __m128i vi;
typedef __m128i vb;
FL_INLINE vf vf_zero(void) { return _mm_setzero_ps(); }
FL_INLINE vf vf_set1(float x) { return _mm_set1_ps(x); }
FL_INLINE vf vf_load(const float *p) { return _mm_loadu_ps(p); }
FL_INLINE void vf_store(float *p, vf a) { _mm_storeu_ps(p, a); }
FL_INLINE vf vf_neg(vf a) { return _mm_xor_ps(a, _mm_set1_ps(-0.0f)); }
FL_INLINE vf vf_add(vf a, vf b) { return _mm_add_ps(a, b); }
FL_INLINE vf vf_mul(vf a, vf b) { return _mm_mul_ps(a, b); }
FL_INLINE vf vf_mac(vf a, vf b, vf c) { return _mm_add_ps(_mm_mul_ps(a, b), c); }
FL_INLINE vf vf_ints(vi a) { return _mm_cvtepi32_ps(a); }
/* Sums that are f32 values but kept as f64, since acc = fma(a, b, acc) takes that way here. The product is exact in f64, and rounding the
 * sum twice, to f64 and to f32, differs from rounding it once only where the f64 is half way between two f32, that is, where its
 * low 29 bits are 2^28 (and not even then if the f64 is exact): rare, so those go the long way. Below 2^-126 an f32 has fewer bits;
 * layouts.h says why sums are exact there, but for mxfp4: `tiny` checks. */
typedef struct {
    __m128d low, high;
} vsum;
FL_INLINE vsum vsum_of(vf a) { return (vsum){_mm_cvtps_pd(a), _mm_cvtps_pd(_mm_movehl_ps(a, a))}; }
FL_INLINE vf vsum_float(vsum s) { return _mm_movelh_ps(_mm_cvtpd_ps(s.low), _mm_cvtpd_ps(s.high)); }
static __attribute__((noinline, cold)) vsum vsum_fma_to_odd(vsum a, vsum b, vsum c) {
    float w[4], x[4], y[4];
    vf_store(w, vsum_float(a)), vf_store(x, vsum_float(b)), vf_store(y, vsum_float(c));
    for (int i = 0; i < 4; i++) y[i] = fl_fma(w[i], x[i], y[i]);
    return vsum_of(vf_load(y));
}
FL_INLINE vsum vsum_fma_f64(vsum a, vsum b, vsum c, int tiny) {
    const __m128d low = _mm_add_pd(_mm_mul_pd(a.low, b.low), c.low), high = _mm_add_pd(_mm_mul_pd(a.high, b.high), c.high);
    const __m128 tail = _mm_shuffle_ps(_mm_castpd_ps(low), _mm_castpd_ps(high), 0x88);
    __m128i odd = _mm_cmpeq_epi32(_mm_slli_epi32(_mm_castps_si128(tail), 3), _mm_set1_epi32(INT32_MIN));
    const __m128 f = _mm_cvtpd_ps(low), g = _mm_cvtpd_ps(high);
    if (tiny) {
        const __m128 magnitude = _mm_andnot_ps(_mm_set1_ps(-0.0f), _mm_movelh_ps(f, g));
        odd = _mm_or_si128(odd, _mm_castps_si128(_mm_cmple_ps(magnitude, _mm_set1_ps(0x1p-126f))));
    }
    if (__builtin_expect(_mm_movemask_epi8(odd), 0)) return vsum_fma_to_odd(a, b, c);
    return (vsum){_mm_cvtps_pd(f), _mm_cvtps_pd(g)};
}
FL_INLINE vsum vsum_fma(vf a, float b, vsum c, int tiny) {
    const __m128d factor = _mm_set1_pd((double)b);
    return vsum_fma_f64(vsum_of(a), (vsum){factor, factor}, c, tiny);
}
FL_INLINE vsum vsum_scaled(vsum a, vf b, vsum c) { return vsum_fma_f64(a, vsum_of(b), c, 0); }
FL_INLINE vf vf_bf16s(const uint8_t *p) {
    return _mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i *)p)));
}
/* The exponent's bias is moved by a multiplication, which makes denormal halves normal; infinity and NaN are put back. */
FL_INLINE vf vf_halves(const uint8_t *p) {
    const __m128i h = _mm_cvtepi16_epi32(_mm_loadl_epi64((const __m128i *)p));
    const __m128i rest = _mm_slli_epi32(_mm_and_si128(h, _mm_set1_epi32(0x7fff)), 13);
    const __m128i special = _mm_cmpgt_epi32(rest, _mm_set1_epi32(0x0f7fffff));
    const __m128 value = _mm_mul_ps(_mm_castsi128_ps(rest), _mm_set1_ps(0x1p112f));
    const __m128i sign = _mm_and_si128(h, _mm_set1_epi32(INT32_MIN));
    return _mm_or_ps(_mm_or_ps(value, _mm_castsi128_ps(sign)),
                     _mm_castsi128_ps(_mm_and_si128(special, _mm_set1_epi32(0x7f800000))));
}
FL_INLINE vf vf_bits(vi a) { return _mm_castsi128_ps(a); }
FL_INLINE vi vi_u8s(const uint8_t *p) { return _mm_cvtepu8_epi32(_mm_cvtsi32_si128(load_i32(p))); }
FL_INLINE vi vi_i8s(const uint8_t *p) { return _mm_cvtepi8_epi32(_mm_cvtsi32_si128(load_i32(p))); }
FL_INLINE vi vi_load(const int32_t *p) { return _mm_loadu_si128((const __m128i *)p); }
FL_INLINE vi vi_set1(int32_t x) { return _mm_set1_epi32(x); }
/* See the same function above. */
FL_INLINE vi vi_chained(vi sum) {
    __asm__("" : "+x"(sum));
    return sum;
}
FL_INLINE vi vi_add(vi a, vi b) { return vi_chained(_mm_add_epi32(a, b)); }
FL_INLINE vi vi_sub(vi a, vi b) { return _mm_sub_epi32(a, b); }
FL_INLINE vi vi_and(vi a, vi b) { return _mm_and_si128(a, b); }
FL_INLINE vi vi_shr(vi a, int n) { return _mm_srli_epi32(a, n); }
FL_INLINE vi vi_shl(vi a, int n) { return _mm_slli_epi32(a, n); }
FL_INLINE vb vb_load(const uint8_t *p) { return _mm_loadu_si128((const __m128i *)p); }
FL_INLINE void vb_store(uint8_t *p, vb a) { _mm_storeu_si128((__m128i *)p, a); }
FL_INLINE vb vb_set1(uint8_t x) { return _mm_set1_epi8((char)x); }
FL_INLINE vb vb_and(vb a, vb b) { return _mm_and_si128(a, b); }
FL_INLINE vb vb_or(vb a, vb b) { return _mm_or_si128(a, b); }
FL_INLINE vb vb_xor(vb a, vb b) { return _mm_xor_si128(a, b); }
FL_INLINE vb vb_shr(vb a, int n) { return _mm_srli_epi16(a, n); }
FL_INLINE vb vb_shl(vb a, int n) { return _mm_slli_epi16(a, n); }
FL_INLINE vb vb_lookup(const int8_t *table16, vb index) {
    return _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)table16), index);
}
FL_INLINE vb vb_bcast4(const int8_t *p) { return _mm_set1_epi32(load_i32(p)); }
FL_INLINE vi vi_of_bytes(vb a) { return a; }
FL_INLINE vi dot2_u8i8(vb u, vb s) { return _mm_maddubs_epi16(u, s); }
FL_INLINE vi vi_add16(vi a, vi b) { return vi_chained(_mm_add_epi16(a, b)); }
FL_INLINE vi vi_pairs16(vi a) { return _mm_madd_epi16(a, _mm_set1_epi16(1)); }
FL_INLINE vb vb_abs(vb a) { return _mm_abs_epi8(a); }
FL_INLINE vb vb_sign(vb x, vb w) { return _mm_sign_epi8(x, w); }
/* I < 2^22 is exact in f32. A zero may be negative here, which no sum shows: they start at +0, and +0 + -0 = +0. */
#define FL_SUM_BITS 0
FL_INLINE vf vf_scaled(vi sum, vf sw, vf msw) {
    (void)msw;
    return vf_mul(vf_ints(sum), sw);
}
FL_INLINE vf vf_exact(vi sum) { return vf_ints(sum); }

#else
/* ---- plain C ------------------------------------------------------------------------------------------------------------ */
#define FL_WIDEN 0
#define FL_PLAIN_C 1
typedef struct {
    float v[FL_LANES];
} vf;
typedef struct {
    int32_t v[FL_LANES];
} vi;
typedef struct {
    uint8_t v[4 * FL_LANES];
} vb;
#define FL_EACH(type, n, expression)                                                                                           \
    do {                                                                                                                       \
        type r_;                                                                                                               \
        for (int i = 0; i < (n); i++) r_.v[i] = (expression);                                                                  \
        return r_;                                                                                                             \
    } while (0)
FL_INLINE float plain_half(uint16_t h) {
    const uint32_t magnitude = (uint32_t)(h & 0x7fff) << 13;
    float f;
    uint32_t bits = magnitude + (magnitude >= 31u << 23 ? 224u << 23 : 112u << 23);
    if (magnitude < 1u << 23) {
        f = (float)(magnitude >> 13) * 0x1p-24f;
        memcpy(&bits, &f, 4);
    }
    bits |= (uint32_t)(h & 0x8000) << 16;
    memcpy(&f, &bits, 4);
    return f;
}
FL_INLINE uint16_t plain_u16(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }
FL_INLINE float plain_float(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
FL_INLINE vf vf_zero(void) { FL_EACH(vf, FL_LANES, 0.0f); }
FL_INLINE vf vf_set1(float x) { FL_EACH(vf, FL_LANES, x); }
FL_INLINE vf vf_load(const float *p) {
    vf a;
    memcpy(&a, p, sizeof a);
    return a;
}
FL_INLINE void vf_store(float *p, vf a) { memcpy(p, &a, sizeof a); }
FL_INLINE vf vf_neg(vf a) { FL_EACH(vf, FL_LANES, -a.v[i]); }
FL_INLINE vf vf_add(vf a, vf b) { FL_EACH(vf, FL_LANES, a.v[i] + b.v[i]); }
FL_INLINE vf vf_mul(vf a, vf b) { FL_EACH(vf, FL_LANES, a.v[i] * b.v[i]); }
FL_INLINE vf vf_fma(vf a, vf b, vf c) { FL_EACH(vf, FL_LANES, fl_fma(a.v[i], b.v[i], c.v[i])); }
#ifdef FL_EMULATE
FL_INLINE vf vf_mac(vf a, vf b, vf c) { return vf_fma(a, b, c); }
#else
FL_INLINE vf vf_mac(vf a, vf b, vf c) { FL_EACH(vf, FL_LANES, a.v[i] * b.v[i] + c.v[i]); }
#endif
FL_INLINE vf vf_halves(const uint8_t *p) { FL_EACH(vf, FL_LANES, plain_half(plain_u16(p + 2 * i))); }
FL_INLINE vf vf_bf16s(const uint8_t *p) { FL_EACH(vf, FL_LANES, plain_float((uint32_t)plain_u16(p + 2 * i) << 16)); }
FL_INLINE vf vf_ints(vi a) { FL_EACH(vf, FL_LANES, (float)a.v[i]); }
FL_INLINE vf vf_bits(vi a) {
    vf r;
    memcpy(&r, &a, sizeof r);
    return r;
}
FL_INLINE vi vi_u8s(const uint8_t *p) { FL_EACH(vi, FL_LANES, p[i]); }
FL_INLINE vi vi_i8s(const uint8_t *p) { FL_EACH(vi, FL_LANES, (int8_t)p[i]); }
FL_INLINE vi vi_load(const int32_t *p) {
    vi a;
    memcpy(&a, p, sizeof a);
    return a;
}
FL_INLINE vi vi_set1(int32_t x) { FL_EACH(vi, FL_LANES, x); }
FL_INLINE vi vi_add(vi a, vi b) { FL_EACH(vi, FL_LANES, a.v[i] + b.v[i]); }
FL_INLINE vi vi_sub(vi a, vi b) { FL_EACH(vi, FL_LANES, a.v[i] - b.v[i]); }
FL_INLINE vi vi_and(vi a, vi b) { FL_EACH(vi, FL_LANES, a.v[i] & b.v[i]); }
FL_INLINE vi vi_shr(vi a, int n) { FL_EACH(vi, FL_LANES, (int32_t)((uint32_t)a.v[i] >> n)); }
FL_INLINE vi vi_shl(vi a, int n) { FL_EACH(vi, FL_LANES, (int32_t)((uint32_t)a.v[i] << n)); }
FL_INLINE vb vb_load(const uint8_t *p) {
    vb a;
    memcpy(&a, p, sizeof a);
    return a;
}
FL_INLINE void vb_store(uint8_t *p, vb a) { memcpy(p, &a, sizeof a); }
FL_INLINE vb vb_set1(uint8_t x) { FL_EACH(vb, 4 * FL_LANES, x); }
FL_INLINE vb vb_and(vb a, vb b) { FL_EACH(vb, 4 * FL_LANES, a.v[i] & b.v[i]); }
FL_INLINE vb vb_or(vb a, vb b) { FL_EACH(vb, 4 * FL_LANES, a.v[i] | b.v[i]); }
FL_INLINE vb vb_xor(vb a, vb b) { FL_EACH(vb, 4 * FL_LANES, a.v[i] ^ b.v[i]); }
/* 16-bit shifts in the other sets: callers mask what comes from the neighbouring byte, here nothing does */
FL_INLINE vb vb_shr(vb a, int n) { FL_EACH(vb, 4 * FL_LANES, (uint8_t)(a.v[i] >> n)); }
FL_INLINE vb vb_shl(vb a, int n) { FL_EACH(vb, 4 * FL_LANES, (uint8_t)(a.v[i] << n)); }
FL_INLINE vb vb_lookup(const int8_t *table16, vb index) { FL_EACH(vb, 4 * FL_LANES, (uint8_t)table16[index.v[i] & 15]); }
FL_INLINE vb vb_bcast4(const int8_t *p) { FL_EACH(vb, 4 * FL_LANES, (uint8_t)p[i % 4]); }
FL_INLINE vi vi_of_bytes(vb a) {
    vi r;
    memcpy(&r, &a, sizeof r);
    return r;
}
FL_INLINE vi dot4_u8i8(vi acc, vb u, vb s) {
    for (int i = 0; i < FL_LANES; i++)
        for (int k = 0; k < 4; k++) acc.v[i] += u.v[4 * i + k] * (int8_t)s.v[4 * i + k];
    return acc;
}
FL_INLINE vi vi_ready(vi sum) { return sum; }
FL_INLINE vb vb_sub8(vb a, vb b) { FL_EACH(vb, 4 * FL_LANES, (uint8_t)(a.v[i] - b.v[i])); }
FL_INLINE vb vb_pairs(const uint8_t *even, const uint8_t *odd, int v) {
    FL_EACH(vb, 4 * FL_LANES, (i % 4 < 2 ? even : odd)[2 * (FL_LANES * v + i / 4) + i % 2]);
}
#undef FL_EACH
/* One step of a product of bf16, as the instructions of x86 take it: denormals are zeros, before and after. */
FL_INLINE float plain_flushed(float x) { return x < 0x1p-126f && x > -0x1p-126f ? x * 0.0f : x; }
FL_INLINE float plain_bf16_fma(const uint8_t *a, const uint8_t *b, float c) {
    const float x = plain_flushed(plain_float((uint32_t)plain_u16(a) << 16)),
                y = plain_flushed(plain_float((uint32_t)plain_u16(b) << 16));
    return plain_flushed(fl_fma(x, y, plain_flushed(c)));
}
FL_INLINE vf dot2_bf16(vf acc, vb a, vb b) {
    for (int i = 0; i < FL_LANES; i++)
        for (int odd = 1; odd >= 0; odd--) acc.v[i] = plain_bf16_fma(a.v + 4 * i + 2 * odd, b.v + 4 * i + 2 * odd, acc.v[i]);
    return acc;
}
#endif

#ifndef FL_SUM_BITS
/* round(I * sw) of sums I that are kept as FL_SUM_BITS + I; msw = -FL_MAGIC * sw */
#define FL_SUM_BITS FL_MAGIC_BITS
FL_INLINE vf vf_scaled(vi magic_sum, vf sw, vf msw) { return vf_fma(vf_bits(magic_sum), sw, msw); }
/* I */
FL_INLINE vf vf_exact(vi magic_sum) { return vf_add(vf_bits(magic_sum), vf_set1(-FL_MAGIC)); }

/* c = fma(a, b, c), with one b for all lanes or one for each */
typedef vf vsum;
FL_INLINE vsum vsum_of(vf a) { return a; }
FL_INLINE vf vsum_float(vsum s) { return s; }
FL_INLINE vsum vsum_fma(vf a, float b, vsum c, int tiny) {
    (void)tiny;
    return vf_fma(a, vf_set1(b), c);
}
FL_INLINE vsum vsum_scaled(vsum a, vf b, vsum c) { return vf_fma(a, b, c); }
#endif

#endif
