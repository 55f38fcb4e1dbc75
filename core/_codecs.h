/* Block codecs and half-precision conversions of the host: the reference that every backend's own kernels are compared with.
 *
 * Layouts are GGML's (little endian, see the table in the documentation of model files). A block is read as its fields lie in
 * the file and written as `block` consecutive f32 values. Each product and sum below is one f32 operation in exactly this order
 * (the extension is built with -ffp-contract=off), so that a decoded value is the same bits on every machine.
 *
 * Callers (`_kernels.pyx`) have already checked that `in` holds `blocks` whole blocks and `out` as many values. The loops are
 * plain C that a compiler vectorises; FL_CLONES adds an AVX2 copy of the entry points where the loader can choose one.
 */
#ifndef FASTLLM_CODECS_H
#define FASTLLM_CODECS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#error "fastllm reads little-endian files in place: big-endian machines are not supported"
#endif

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#define FL_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FL_CLONES
#endif

#if defined(__GNUC__)
#define FL_INLINE static inline __attribute__((always_inline))
#else
#define FL_INLINE static inline
#endif

/* ---- bits ------------------------------------------------------------------------------------------------------------- */

/* Types without a number of ggml's. */
enum { FL_U8 = 1000, FL_E4M3, FL_FP8G128 };

FL_INLINE float fl_as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

FL_INLINE uint32_t fl_as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

FL_INLINE double fl_as_double(uint64_t bits) {
    double value;
    memcpy(&value, &bits, 8);
    return value;
}

FL_INLINE uint64_t fl_as_bits64(double value) {
    uint64_t bits;
    memcpy(&bits, &value, 8);
    return bits;
}

FL_INLINE uint16_t fl_load16(const uint8_t *p) {
    uint16_t v;
    memcpy(&v, p, 2);
    return v;
}

FL_INLINE uint32_t fl_load32(const uint8_t *p) {
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

/* A select without a branch, which is what lets the loops over arrays vectorise. */
FL_INLINE uint32_t fl_pick(int condition, uint32_t yes, uint32_t no) { return no ^ ((no ^ yes) & (0u - (uint32_t)condition)); }

/* f16 -> f32, exact. Subnormals are made by a subtraction of normal numbers, so the result does not depend on the
 * flush-to-zero mode of the thread. NaN keeps sign and payload. */
FL_INLINE float fl_half_to_float(uint16_t half) {
    const uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    const uint32_t small = fl_as_bits(fl_as_float(magnitude + (113u << 23)) - fl_as_float(113u << 23));
    const uint32_t normal = magnitude + (112u << 23), special = magnitude + (224u << 23);
    const uint32_t bits = fl_pick(magnitude < (1u << 23), small, fl_pick(magnitude >= (31u << 23), special, normal));
    return fl_as_float(bits | sign);
}

/* f32 -> f16, to nearest, ties to even; beyond 65520 infinity; NaN stays NaN (made quiet, top payload bits kept). */
FL_INLINE uint16_t fl_float_to_half(float value) {
    const uint32_t bits = fl_as_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    /* 0.5 has an ulp of 2^-24, the smallest f16: the addition itself rounds to a multiple of it */
    const uint32_t small = fl_as_bits(fl_as_float(magnitude) + 0.5f) - fl_as_bits(0.5f);
    const uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    const uint32_t special = fl_pick(magnitude > 0x7f800000, 0x7e00 | (magnitude >> 13 & 0x3ff), 0x7c00);
    const uint32_t half = fl_pick(magnitude < (113u << 23), small, fl_pick(magnitude >= (143u << 23), special, normal));
    return (uint16_t)(half | sign);
}

/* f32 -> bf16, to nearest, ties to even; NaN stays NaN (made quiet). */
FL_INLINE uint16_t fl_float_to_bf16(float value) {
    const uint32_t bits = fl_as_bits(value);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
    return (uint16_t)fl_pick((bits & 0x7fffffff) > 0x7f800000, quiet, rounded);
}

FL_CLONES static void fl_halves_to_floats(const uint8_t *in, float *out, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = fl_half_to_float(fl_load16(in + 2 * i));
}

FL_CLONES static void fl_bf16s_to_floats(const uint8_t *in, float *out, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = fl_as_float((uint32_t)fl_load16(in + 2 * i) << 16);
}

FL_CLONES static void fl_floats_to_halves(const float *in, uint16_t *out, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = fl_float_to_half(in[i]);
}

FL_CLONES static void fl_floats_to_bf16s(const float *in, uint16_t *out, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = fl_float_to_bf16(in[i]);
}

/* ---- decoders: one block of in -> out ------------------------------------------------------------------------------------ */

static const int8_t FL_NONLINEAR4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t FL_E2M1_DOUBLED[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

FL_INLINE float fl_scale(const uint8_t *p) { return fl_half_to_float(fl_load16(p)); }

/* q4_0: d, 16 bytes; value i and i+16 are the low and high nibble of byte i: d*(q-8) */
FL_INLINE void fl_q4_0(const uint8_t *in, float *out) {
    const float d = fl_scale(in);
    for (int i = 0; i < 16; i++) out[i] = d * (float)((in[2 + i] & 15) - 8);
    for (int i = 0; i < 16; i++) out[i + 16] = d * (float)((in[2 + i] >> 4) - 8);
}

/* q4_1: d, m, 16 bytes: d*q+m */
FL_INLINE void fl_q4_1(const uint8_t *in, float *out) {
    const float d = fl_scale(in), m = fl_scale(in + 2);
    for (int i = 0; i < 16; i++) out[i] = d * (float)(in[4 + i] & 15) + m;
    for (int i = 0; i < 16; i++) out[i + 16] = d * (float)(in[4 + i] >> 4) + m;
}

/* q5_0: d, 32 fifth bits, 16 bytes: d*(q-16) */
FL_INLINE void fl_q5_0(const uint8_t *in, float *out) {
    const float d = fl_scale(in);
    const uint32_t high = fl_load32(in + 2);
    for (int i = 0; i < 16; i++) out[i] = d * (float)((int)((in[6 + i] & 15) | (high >> i & 1) << 4) - 16);
    for (int i = 0; i < 16; i++) out[i + 16] = d * (float)((int)(in[6 + i] >> 4 | (high >> (i + 16) & 1) << 4) - 16);
}

/* q5_1: d, m, 32 fifth bits, 16 bytes: d*q+m */
FL_INLINE void fl_q5_1(const uint8_t *in, float *out) {
    const float d = fl_scale(in), m = fl_scale(in + 2);
    const uint32_t high = fl_load32(in + 4);
    for (int i = 0; i < 16; i++) out[i] = d * (float)(int)((in[8 + i] & 15) | (high >> i & 1) << 4) + m;
    for (int i = 0; i < 16; i++) out[i + 16] = d * (float)(int)(in[8 + i] >> 4 | (high >> (i + 16) & 1) << 4) + m;
}

/* q8_0: d, 32 signed bytes: d*q */
FL_INLINE void fl_q8_0(const uint8_t *in, float *out) {
    const float d = fl_scale(in);
    for (int i = 0; i < 32; i++) out[i] = d * (float)(int8_t)in[2 + i];
}

/* q2_k: 16 bytes (4-bit scale | 4-bit minimum << 4), one per 16 values; 64 bytes of crumbs; d, dmin: d*s*q - dmin*m */
FL_INLINE void fl_q2_k(const uint8_t *in, float *out) {
    const uint8_t *scales = in, *crumbs = in + 16;
    const float d = fl_scale(in + 80), dmin = fl_scale(in + 82);
    for (int group = 0; group < 16; group++) { /* 16 values: byte (group & 1)*16.. of half group >> 3, crumb (group >> 1) & 3 */
        const float scale = d * (float)(scales[group] & 15), minimum = dmin * (float)(scales[group] >> 4);
        const uint8_t *bytes = crumbs + 32 * (group >> 3) + 16 * (group & 1);
        const int shift = 2 * (group >> 1 & 3);
        for (int i = 0; i < 16; i++) out[16 * group + i] = scale * (float)(bytes[i] >> shift & 3) - minimum;
    }
}

/* q3_k: 32 bytes of high bits, 64 bytes of crumbs, 16 six-bit scales in 12 bytes, d: d*(s-32)*(q - (high bit ? 0 : 4)) */
FL_INLINE void fl_q3_k(const uint8_t *in, float *out) {
    const uint8_t *high = in, *crumbs = in + 32, *scales = in + 96;
    const float d = fl_scale(in + 108);
    for (int group = 0; group < 16; group++) {
        const int low = scales[group & 7] >> 4 * (group >> 3) & 15, top = scales[8 + (group & 3)] >> 2 * (group >> 2) & 3;
        const float scale = d * (float)((low | top << 4) - 32);
        const uint8_t *bytes = crumbs + 32 * (group >> 3) + 16 * (group & 1), *bits = high + 16 * (group & 1);
        const int shift = 2 * (group >> 1 & 3), bit = group >> 1;
        for (int i = 0; i < 16; i++)
            out[16 * group + i] = scale * (float)((bytes[i] >> shift & 3) - 4 + 4 * (bits[i] >> bit & 1));
    }
}

/* The eight 6-bit scales and minima that q4_k and q5_k pack in 12 bytes: j < 4 in the low 6 bits of bytes j and j+4; the
 * others have their low 4 bits in byte j+4 and their top 2 bits above scale and minimum j-4. */
FL_INLINE void fl_scale_min_k4(const uint8_t *packed, int j, int *scale, int *minimum) {
    if (j < 4) {
        *scale = packed[j] & 63;
        *minimum = packed[j + 4] & 63;
    } else {
        *scale = (packed[j + 4] & 15) | packed[j - 4] >> 6 << 4;
        *minimum = packed[j + 4] >> 4 | packed[j] >> 6 << 4;
    }
}

/* q4_k: d, dmin, 12 bytes of scales and minima, 128 bytes of nibbles: d*s*q - dmin*m, 32 values per scale */
FL_INLINE void fl_q4_k(const uint8_t *in, float *out) {
    const float d = fl_scale(in), dmin = fl_scale(in + 2);
    for (int group = 0; group < 8; group++) {
        int s, m;
        fl_scale_min_k4(in + 4, group, &s, &m);
        const float scale = d * (float)s, minimum = dmin * (float)m;
        const uint8_t *bytes = in + 16 + 32 * (group >> 1);
        const int shift = 4 * (group & 1);
        for (int i = 0; i < 32; i++) out[32 * group + i] = scale * (float)(bytes[i] >> shift & 15) - minimum;
    }
}

/* q5_k: as q4_k with 32 bytes of fifth bits before the nibbles: bit `group` of byte i */
FL_INLINE void fl_q5_k(const uint8_t *in, float *out) {
    const float d = fl_scale(in), dmin = fl_scale(in + 2);
    const uint8_t *high = in + 16;
    for (int group = 0; group < 8; group++) {
        int s, m;
        fl_scale_min_k4(in + 4, group, &s, &m);
        const float scale = d * (float)s, minimum = dmin * (float)m;
        const uint8_t *bytes = in + 48 + 32 * (group >> 1);
        const int shift = 4 * (group & 1);
        for (int i = 0; i < 32; i++)
            out[32 * group + i] = scale * (float)((bytes[i] >> shift & 15) | (high[i] >> group & 1) << 4) - minimum;
    }
}

/* q6_k: 128 bytes of low nibbles, 64 bytes of top crumbs, 16 signed scales, d: d*s*(q-32), 16 values per scale */
FL_INLINE void fl_q6_k(const uint8_t *in, float *out) {
    const uint8_t *low = in, *top = in + 128, *scales = in + 192;
    const float d = fl_scale(in + 208);
    for (int group = 0; group < 16; group++) { /* half = group >> 3, quarter of the half = (group >> 1) & 3 */
        const int half = group >> 3, quarter = group >> 1 & 3, first = 16 * (group & 1);
        const float scale = d * (float)(int8_t)scales[group];
        const uint8_t *nibbles = low + 64 * half + 32 * (quarter & 1) + first, *crumbs = top + 32 * half + first;
        const int shift = 4 * (quarter >> 1);
        for (int i = 0; i < 16; i++)
            out[16 * group + i] = scale * (float)(((nibbles[i] >> shift & 15) | (crumbs[i] >> 2 * quarter & 3) << 4) - 32);
    }
}

/* iq4_nl: d, 16 bytes: d*table[q] */
FL_INLINE void fl_iq4_nl(const uint8_t *in, float *out) {
    const float d = fl_scale(in);
    for (int i = 0; i < 16; i++) out[i] = d * (float)FL_NONLINEAR4[in[2 + i] & 15];
    for (int i = 0; i < 16; i++) out[i + 16] = d * (float)FL_NONLINEAR4[in[2 + i] >> 4];
}

/* iq4_xs: d, u16 of eight top crumbs, 4 bytes of eight low nibbles (6-bit scales), 128 bytes: d*(s-32)*table[q] */
FL_INLINE void fl_iq4_xs(const uint8_t *in, float *out) {
    const float d = fl_scale(in);
    const int top = fl_load16(in + 2);
    for (int group = 0; group < 8; group++) {
        const int s = (in[4 + group / 2] >> 4 * (group & 1) & 15) | (top >> 2 * group & 3) << 4;
        const float scale = d * (float)(s - 32);
        const uint8_t *bytes = in + 8 + 16 * group;
        for (int i = 0; i < 16; i++) out[32 * group + i] = scale * (float)FL_NONLINEAR4[bytes[i] & 15];
        for (int i = 0; i < 16; i++) out[32 * group + i + 16] = scale * (float)FL_NONLINEAR4[bytes[i] >> 4];
    }
}

/* e4m3: bias 7, the largest code of either sign is NaN, no infinity. */
FL_INLINE float fl_e4m3(uint8_t code) {
    const uint32_t e = code >> 3 & 15, m = code & 7, sign = (uint32_t)(code & 0x80) << 24;
    if ((code & 0x7f) == 0x7f) return fl_as_float(sign | 0x7fc00000u);
    return fl_as_float(fl_as_bits((float)(e ? 8 + m : m) * fl_as_float(((e ? e : 1) + 117) << 23)) | sign); /* 2^(e - 10) */
}

FL_INLINE void fl_e4m3_one(const uint8_t *in, float *out) { *out = fl_e4m3(*in); }

/* fp8g128: f32 s, 128 codes: s * e4m3, rounded once. */
FL_INLINE void fl_fp8g128(const uint8_t *in, float *out) {
    float s;
    memcpy(&s, in, 4);
    for (int i = 0; i < 128; i++) out[i] = s * fl_e4m3(in[4 + i]);
}

/* mxfp4: e, 16 bytes: 2^(e-127) * e2m1[q]; the table is doubled, so the scale is 2^(e-128), subnormal for e < 2 */
FL_INLINE void fl_mxfp4(const uint8_t *in, float *out) {
    const float scale = fl_as_float(in[0] < 2 ? 0x00200000u << in[0] : (uint32_t)(in[0] - 1) << 23);
    for (int i = 0; i < 16; i++) out[i] = scale * (float)FL_E2M1_DOUBLED[in[1 + i] & 15];
    for (int i = 0; i < 16; i++) out[i + 16] = scale * (float)FL_E2M1_DOUBLED[in[1 + i] >> 4];
}

#define FL_BLOCKS(decoder, bytes, values)                                                                                      \
    for (int64_t b = 0; b < blocks; b++) decoder(in + (bytes) * b, out + (values) * b);                                        \
    return 0
#define FL_VALUES(type)                                                                                                        \
    for (int64_t i = 0; i < blocks; i++) {                                                                                     \
        type value;                                                                                                            \
        memcpy(&value, in + (int64_t)sizeof(type) * i, sizeof(type));                                                          \
        out[i] = (float)value;                                                                                                 \
    }                                                                                                                          \
    return 0

/* Decodes `blocks` blocks of the GGML type `type`. Returns 0, or -1 for a type without a decoder here. */
FL_CLONES static int fl_decode(int type, const uint8_t *in, float *out, int64_t blocks) {
    switch (type) {
    case 0:
        memcpy(out, in, (size_t)(4 * blocks));
        return 0;
    case 1:
        fl_halves_to_floats(in, out, blocks);
        return 0;
    case 2:
        FL_BLOCKS(fl_q4_0, 18, 32);
    case 3:
        FL_BLOCKS(fl_q4_1, 20, 32);
    case 6:
        FL_BLOCKS(fl_q5_0, 22, 32);
    case 7:
        FL_BLOCKS(fl_q5_1, 24, 32);
    case 8:
        FL_BLOCKS(fl_q8_0, 34, 32);
    case 10:
        FL_BLOCKS(fl_q2_k, 84, 256);
    case 11:
        FL_BLOCKS(fl_q3_k, 110, 256);
    case 12:
        FL_BLOCKS(fl_q4_k, 144, 256);
    case 13:
        FL_BLOCKS(fl_q5_k, 176, 256);
    case 14:
        FL_BLOCKS(fl_q6_k, 210, 256);
    case 20:
        FL_BLOCKS(fl_iq4_nl, 18, 32);
    case 23:
        FL_BLOCKS(fl_iq4_xs, 136, 256);
    case 24:
        FL_VALUES(int8_t);
    case 25:
        FL_VALUES(int16_t);
    case 26:
        FL_VALUES(int32_t);
    case 27:
        FL_VALUES(int64_t);
    case 28:
        FL_VALUES(double);
    case 30:
        fl_bf16s_to_floats(in, out, blocks);
        return 0;
    case 39:
        FL_BLOCKS(fl_mxfp4, 17, 32);
    case FL_U8:
        FL_VALUES(uint8_t);
    case FL_E4M3:
        FL_BLOCKS(fl_e4m3_one, 1, 1);
    case FL_FP8G128:
        FL_BLOCKS(fl_fp8g128, 132, 128);
    default:
        return -1;
    }
}

#undef FL_BLOCKS
#undef FL_VALUES

/* ---- encoders: the reference rounding of ggml, 32 values per block ------------------------------------------------------- */

FL_INLINE void fl_store16(uint8_t *p, uint16_t v) {
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
}

/* 1/d, and 0 where that has no finite value: such a block decodes to zeros (its f16 scale is 0) whatever its codes. */
FL_INLINE float fl_inverse(float d) {
    const float inverse = 1.0f / d;
    return d == 0.0f || inverse - inverse != 0.0f ? 0.0f : inverse;
}

FL_INLINE int fl_clip(float value, int top) { return value < 0.0f ? 0 : value >= (float)top ? top : (int)value; }

/* Codes around zero: the value of largest magnitude (the first of equals) becomes code 0, zero becomes code `half`. */
FL_INLINE float fl_codes_signed(const float *in, int half, uint8_t *codes) {
    float extreme = 0.0f, largest = 0.0f;
    for (int i = 0; i < 32; i++) {
        const float magnitude = in[i] < 0.0f ? -in[i] : in[i];
        if (magnitude > largest) largest = magnitude, extreme = in[i];
    }
    const float d = extreme / (float)-half, inverse = fl_inverse(d);
    for (int i = 0; i < 32; i++) codes[i] = (uint8_t)fl_clip(in[i] * inverse + ((float)half + 0.5f), 2 * half - 1);
    return d;
}

/* Codes from minimum to maximum in `top` steps. */
FL_INLINE float fl_codes_range(const float *in, int top, uint8_t *codes, float *minimum) {
    float low = in[0], high = in[0];
    for (int i = 1; i < 32; i++) {
        if (in[i] < low) low = in[i];
        if (in[i] > high) high = in[i];
    }
    const float d = (high - low) / (float)top, inverse = fl_inverse(d);
    for (int i = 0; i < 32; i++) codes[i] = (uint8_t)fl_clip((in[i] - low) * inverse + 0.5f, top);
    *minimum = low;
    return d;
}

FL_INLINE void fl_store_codes(const uint8_t *codes, uint8_t *fifth, uint8_t *nibbles) {
    for (int i = 0; i < 16; i++) nibbles[i] = (uint8_t)((codes[i] & 15) | (codes[i + 16] & 15) << 4);
    if (fifth == NULL) return;
    memset(fifth, 0, 4);
    for (int i = 0; i < 32; i++) fifth[i / 8] = (uint8_t)(fifth[i / 8] | codes[i] >> 4 << i % 8);
}

/* Encodes `blocks` blocks as the GGML type `type`. Values are finite. Returns 0, or -1 for a type without an encoder here. */
static int fl_encode(int type, const float *in, uint8_t *out, int64_t blocks) {
    uint8_t codes[32];
    float m;
    for (int64_t b = 0; b < blocks; b++, in += 32) {
        switch (type) {
        case 2: /* q4_0 */
            fl_store16(out, fl_float_to_half(fl_codes_signed(in, 8, codes)));
            fl_store_codes(codes, NULL, out + 2);
            out += 18;
            break;
        case 3: /* q4_1 */
            fl_store16(out, fl_float_to_half(fl_codes_range(in, 15, codes, &m)));
            fl_store16(out + 2, fl_float_to_half(m));
            fl_store_codes(codes, NULL, out + 4);
            out += 20;
            break;
        case 6: /* q5_0 */
            fl_store16(out, fl_float_to_half(fl_codes_signed(in, 16, codes)));
            fl_store_codes(codes, out + 2, out + 6);
            out += 22;
            break;
        case 7: /* q5_1 */
            fl_store16(out, fl_float_to_half(fl_codes_range(in, 31, codes, &m)));
            fl_store16(out + 2, fl_float_to_half(m));
            fl_store_codes(codes, out + 4, out + 8);
            out += 24;
            break;
        case 8: { /* q8_0: largest magnitude becomes 127, halves round away from zero */
            float largest = 0.0f;
            for (int i = 0; i < 32; i++) {
                const float magnitude = in[i] < 0.0f ? -in[i] : in[i];
                if (magnitude > largest) largest = magnitude;
            }
            const float d = largest / 127.0f, inverse = fl_inverse(d);
            fl_store16(out, fl_float_to_half(d));
            for (int i = 0; i < 32; i++) {
                const float scaled = in[i] * inverse, magnitude = scaled < 0.0f ? -scaled : scaled;
                const int whole = (int)magnitude, rounded = whole + (magnitude - (float)whole >= 0.5f);
                out[2 + i] = (uint8_t)(scaled < 0.0f ? -rounded : rounded);
            }
            out += 34;
            break;
        }
        default:
            return -1;
        }
    }
    return 0;
}

#endif
