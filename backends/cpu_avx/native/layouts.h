/* Packed weight layouts, and the arithmetic of the linear op: the specification.
 *
 * LAYOUT. A weight [N][K] is cut in strips of 32 output rows, stored one after the other (the last one padded with zero rows).
 * A strip of a block format is a row of blocks; a block covers as many k as a block of the file format (32, 64, 128 or 256):
 *
 *     strip 0: | block 0 | block 1 | ...   strip 1: | block 0 | ...
 *     block:   | head | tile 0 | tile 1 | ... |        one tile for each 32 k
 *     head:    | 32 x f16 d |, for formats with a minimum | 32 x f16 m | after it, for int4gN | 32 x u8 zero |;
 *              mxfp4: | 32 x u8 exponent |
 *     tile:    | 32 scale bytes | (none, one or two times) | low plane | high plane |
 *
 * A plane holds `bits` bits of every code. One line of 128 bytes is 32 rows x 4 consecutive k, one byte each, so that 16 or 32
 * or 64 bytes of it are an operand of a multiply-add of bytes for 4, 8 or 16 rows. With less than 8 bits per code a line holds
 * several such steps, side by side in each byte:
 *
 *     byte     0    1    2    3  |  4    5    6    7  | ...    8 bits: line j      = step j (k 4j..4j+3)
 *     row      0    0    0    0  |  1    1    1    1  | ...    4 bits: line j      = step 2j in bits 0-3, 2j+1 in bits 4-7
 *     k       +0   +1   +2   +3  | +0   +1   +2   +3  | ...    2 bits: line j      = steps 4j .. 4j+3 in bits 0-1 .. 6-7
 *                                                              1 bit:  one line    = step j in bit j
 *
 * f32, f16 and bf16: | k = 0: 32 values | k = 1: 32 values | ... for each strip. Nothing is rounded by packing.
 *
 * ARITHMETIC of block formats. The activations of a row are cut in groups of 32 k (prepare):
 *     amax = max |x|;  sx = amax / 127;  code = round_half_even(x * (127 / amax)), 0 if amax < 2^-60; a group that holds NaN or
 *     infinity has sx = NaN and codes 0.
 * A weight of group g (16 k or more) is (q - zero) * sw (+ mw), with sw and mw exact f32 products of what the file holds: for int4gN,
 * d * (q - z) is d * q + mw with mw = -(d * z), where every operation is exact. One output, of weights in groups of 16 or 32:
 *     acc = 0
 *     for g ascending:
 *         I   = sum over the group of (q - zero) * code                                  an exact integer, |I| < 2^22
 *         acc = fma(round(I * sw), sx, acc)
 *         acc = fma(mw, round(sx * S), acc)   formats with a minimum only;  S = sum of the group's codes
 * and of weights in groups of 64, 128 or 256, which hold several groups of activations:
 *     acc = 0
 *     for g ascending:
 *         b   = 0;  for each 32 k of the group, ascending:  b = fma(I, sx, b)            I, sx, S: of these 32 k
 *         acc = fma(b, sw, acc)
 *         acc = fma(mw, M, acc)               formats with a minimum only;  M = sum of round(sx * S), ascending, from the first one on
 *     y = acc (+ bias);  with a residual: y = add + (acc + bias);  with an activation, see fl_target in linear.h
 * What the file holds as halves is a multiple of 2^-24, and a group with codes has sx > 2^-67: all terms are multiples of 2^-149, the
 * least f32 (b and M of 2^-91), so that sums below 2^-126 are exact. Baseline's replacement of fma relies on this, and checks it for mxfp4.
 * Every variant gives these bits, for any number of rows, split of strips or split of rows (scales below 2^100 in magnitude).
 * round(I * sw) is computed without a conversion: the bits MAGIC_BITS + I are the float 1.5 * 2^23 + I, and
 * fma(1.5 * 2^23 + I, sw, -1.5 * 2^23 * sw) rounds once, because the last product is exact for scales of up to 21 bits. I itself is
 * (1.5 * 2^23 + I) - 1.5 * 2^23: many processors add in other units than those that multiply, so b costs one product for 32 k, not two.
 *
 * ARITHMETIC of f32, f16, bf16, and of all formats in exact mode (f32 activations, weights decoded to f32 as the file says):
 *     acc = 0
 *     for each block of 64 k, ascending:  b = 0;  for k ascending: b = fma(x, w, b);  acc = acc + b
 * With bf16 weights and activations rounded to bf16 (variants with an instruction for it; to nearest even):
 *     acc = 0;  for each block of 256 k, ascending:  b = 0;  for each pair of k, ascending: b = dot2(b);  acc = acc + b
 * dot2 of avx512: b = fma(x, w, b) of the odd k, then of the even one. amx: see tiles.h; blocks are not used there. Both take
 * denormals for zeros.
 * Baseline has no fused multiply-add and rounds the product in f32 sums, and only here: for block formats and for attention it finds the
 * same bits through f64 (simd.h, vec.h), which for these sums would cost more than the rest of them.
 */
#ifndef FL_LAYOUTS_H
#define FL_LAYOUTS_H
#include <stdint.h>
#include <string.h>

#include "linear.h"

enum {
    FL_Q4_0,
    FL_Q4_1,
    FL_Q5_0,
    FL_Q5_1,
    FL_Q8_0,
    FL_Q2_K,
    FL_Q3_K,
    FL_Q4_K,
    FL_Q5_K,
    FL_Q6_K,
    FL_IQ4_NL,
    FL_IQ4_XS,
    FL_MXFP4,
    FL_INT4G32,
    FL_INT4G64,
    FL_INT4G128,
    FL_INT4G256,
    FL_INT4G64S,
    FL_INT4G128S,
    FL_INT4G256S,
    FL_INT8G64,
    FL_INT8G128,
    FL_F32,
    FL_F16,
    FL_BF16,
    FL_LAYOUTS
};
enum { FL_BLOCK_LAYOUTS = FL_F32 };

/* How sw and mw of a group come from head and scale bytes. */
enum {
    FL_SCALE_HALF,  /* sw = d, mw = m */
    FL_SCALE_BYTES, /* sw = d * s, s signed, one scale byte line per group */
    FL_SCALE_PAIR,  /* sw = d * s, mw = -(m * t), s and t two lines of unsigned bytes */
    FL_SCALE_NIBS,  /* sw = d * (byte & 15), mw = -(m * (byte >> 4)), one line per group */
    FL_SCALE_EXP,   /* sw = 2^(e - 128) */
    FL_SCALE_ZERO,  /* sw = d, mw = -(d * z), z an unsigned byte of the head */
    FL_SCALE_NONE   /* plain values */
};
enum { FL_TABLE_NONE, FL_TABLE_NONLINEAR, FL_TABLE_E2M1 };

typedef struct {
    const char *name;
    int16_t block, block_bytes; /* of the file format */
    int8_t low, high;           /* bits of the two planes */
    int8_t top;                 /* largest code */
    int8_t zero;                /* what is subtracted from a code */
    int8_t is_signed;           /* codes are signed bytes (zero counts as 128 for unsigned kernels) */
    int16_t group;              /* k per scale: 16, 32, or a whole block of 64, 128 or 256 */
    int8_t lines;               /* scale byte lines per tile */
    int8_t minimum;             /* formats with mw */
    int8_t scale, table;
    int16_t head; /* bytes */
} fl_layout;

static const fl_layout FL_LAYOUT[FL_LAYOUTS] = {
    /*             name         block bytes low high top zero sign group lines min scale           table            head */
    [FL_Q4_0] = {"q4_0.s32", 32, 18, 4, 0, 15, 8, 0, 32, 0, 0, FL_SCALE_HALF, FL_TABLE_NONE, 64},
    [FL_Q4_1] = {"q4_1.s32", 32, 20, 4, 0, 15, 0, 0, 32, 0, 1, FL_SCALE_HALF, FL_TABLE_NONE, 128},
    [FL_Q5_0] = {"q5_0.s32", 32, 22, 4, 1, 31, 16, 0, 32, 0, 0, FL_SCALE_HALF, FL_TABLE_NONE, 64},
    [FL_Q5_1] = {"q5_1.s32", 32, 24, 4, 1, 31, 0, 0, 32, 0, 1, FL_SCALE_HALF, FL_TABLE_NONE, 128},
    [FL_Q8_0] = {"q8_0.s32", 32, 34, 8, 0, 127, 0, 1, 32, 0, 0, FL_SCALE_HALF, FL_TABLE_NONE, 64},
    [FL_Q2_K] = {"q2_k.s32", 256, 84, 2, 0, 3, 0, 0, 16, 2, 1, FL_SCALE_NIBS, FL_TABLE_NONE, 128},
    [FL_Q3_K] = {"q3_k.s32", 256, 110, 2, 1, 7, 4, 0, 16, 2, 0, FL_SCALE_BYTES, FL_TABLE_NONE, 64},
    [FL_Q4_K] = {"q4_k.s32", 256, 144, 4, 0, 15, 0, 0, 32, 2, 1, FL_SCALE_PAIR, FL_TABLE_NONE, 128},
    [FL_Q5_K] = {"q5_k.s32", 256, 176, 4, 1, 31, 0, 0, 32, 2, 1, FL_SCALE_PAIR, FL_TABLE_NONE, 128},
    [FL_Q6_K] = {"q6_k.s32", 256, 210, 4, 2, 63, 32, 0, 16, 2, 0, FL_SCALE_BYTES, FL_TABLE_NONE, 64},
    [FL_IQ4_NL] = {"iq4_nl.s32", 32, 18, 4, 0, 127, 0, 1, 32, 0, 0, FL_SCALE_HALF, FL_TABLE_NONLINEAR, 64},
    [FL_IQ4_XS] = {"iq4_xs.s32", 256, 136, 4, 0, 127, 0, 1, 32, 1, 0, FL_SCALE_BYTES, FL_TABLE_NONLINEAR, 64},
    [FL_MXFP4] = {"mxfp4.s32", 32, 17, 4, 0, 24, 12, 0, 32, 0, 0, FL_SCALE_EXP, FL_TABLE_E2M1, 32},
    [FL_INT4G32] = {"int4g32.s32", 32, 19, 4, 0, 15, 0, 0, 32, 0, 1, FL_SCALE_ZERO, FL_TABLE_NONE, 96},
    [FL_INT4G64] = {"int4g64.s32", 64, 35, 4, 0, 15, 0, 0, 64, 0, 1, FL_SCALE_ZERO, FL_TABLE_NONE, 96},
    [FL_INT4G128] = {"int4g128.s32", 128, 67, 4, 0, 15, 0, 0, 128, 0, 1, FL_SCALE_ZERO, FL_TABLE_NONE, 96},
    [FL_INT4G256] = {"int4g256.s32", 256, 131, 4, 0, 15, 0, 0, 256, 0, 1, FL_SCALE_ZERO, FL_TABLE_NONE, 96},
    [FL_INT4G64S] = {"int4g64s.s32", 64, 34, 4, 0, 15, 8, 0, 64, 0, 0, FL_SCALE_HALF, FL_TABLE_NONE, 64},
    [FL_INT4G128S] = {"int4g128s.s32", 128, 66, 4, 0, 15, 8, 0, 128, 0, 0, FL_SCALE_HALF, FL_TABLE_NONE, 64},
    [FL_INT4G256S] = {"int4g256s.s32", 256, 130, 4, 0, 15, 8, 0, 256, 0, 0, FL_SCALE_HALF, FL_TABLE_NONE, 64},
    [FL_INT8G64] = {"int8g64.s32", 64, 66, 8, 0, 127, 0, 1, 64, 0, 0, FL_SCALE_HALF, FL_TABLE_NONE, 64},
    [FL_INT8G128] = {"int8g128.s32", 128, 130, 8, 0, 127, 0, 1, 128, 0, 0, FL_SCALE_HALF, FL_TABLE_NONE, 64},
    [FL_F32] = {"f32.s32", 1, 4, 0, 0, 0, 0, 0, 0, 0, 0, FL_SCALE_NONE, FL_TABLE_NONE, 0},
    [FL_F16] = {"f16.s32", 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, FL_SCALE_NONE, FL_TABLE_NONE, 0},
    [FL_BF16] = {"bf16.s32", 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, FL_SCALE_NONE, FL_TABLE_NONE, 0},
};

enum { FL_TILE_K = 32, FL_LINE = 4 * FL_STRIP, FL_LINEAR_SCRATCH = 1152 << 10 /* bytes per thread, all variants */ };

/* What a 4-bit code stands for. E2M1 values are doubled and moved up by 12, so that they are unsigned. */
static const int8_t FL_NONLINEAR[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t FL_E2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

/* Bytes of a tile, of a packed block (32 rows), and where its planes start. */
FL_INLINE int fl_low_at(const fl_layout *L) { return L->lines * FL_STRIP; }
FL_INLINE int fl_high_at(const fl_layout *L) { return fl_low_at(L) + FL_STRIP * FL_TILE_K * L->low / 8; }
FL_INLINE int fl_tile_bytes(const fl_layout *L) { return fl_high_at(L) + FL_STRIP * FL_TILE_K * L->high / 8; }
FL_INLINE size_t fl_block_packed(const fl_layout *L) {
    return L->block == 1 ? (size_t)L->block_bytes * FL_STRIP : (size_t)(L->head + L->block / FL_TILE_K * fl_tile_bytes(L));
}
FL_INLINE size_t fl_strip_bytes(const fl_layout *L, int64_t K) { return (size_t)(K / L->block) * fl_block_packed(L); }

/* Scales of a weight per tile, and tiles per scale: one of both is 1. A tile has one group of activations. */
FL_INLINE int fl_halves(const fl_layout *L) { return L->group == 16 ? 2 : 1; }
FL_INLINE int fl_group_tiles(const fl_layout *L) { return L->group <= FL_TILE_K ? 1 : L->group / FL_TILE_K; }

/* Prepared activations, integer kinds: | codes: rows x code stride | group records: rows x group stride |. Strides are not powers of
 * two, so that the rows of a block do not fall in the same cache sets. The number of the integer kind is the k of its groups. Rows of bf16
 * are followed by zeros: kernels take whole steps of 32 k. */
enum { FL_KIND_F32 = 0, FL_KIND_BF16 = 1, FL_KIND_INT8 = 32 };
typedef struct {
    float scale;    /* sx */
    int32_t sum[2]; /* sums of the codes: of the first 16 k, of the other 16 */
    float scaled;   /* round(sx * (sum[0] + sum[1])) */
} fl_group;
FL_INLINE size_t fl_code_stride(int64_t K) { return (size_t)((K + 63) / 64 * 64 + 64); }
FL_INLINE size_t fl_group_stride(int64_t K) { return (size_t)((K + 31) / 32 + 4) / 4 * 4; }
FL_INLINE size_t fl_float_stride(int64_t K) { return (size_t)((K + 15) / 16 * 16 + 16); }
FL_INLINE int8_t *fl_codes(const fl_acts *a, int row) { return (int8_t *)a->data + (size_t)row * fl_code_stride(a->K); }
FL_INLINE fl_group *fl_groups(const fl_acts *a, int row) {
    return (fl_group *)(a->data + (size_t)a->rows * fl_code_stride(a->K)) + (size_t)row * fl_group_stride(a->K);
}
FL_INLINE size_t fl_bf16_stride(int64_t K) { return (size_t)((K + 31) / 32 * 32 + 32); }
FL_INLINE uint16_t *fl_bf16s(const fl_acts *a, int row) { return (uint16_t *)a->data + (size_t)row * fl_bf16_stride(a->K); }
FL_INLINE float *fl_floats(const fl_acts *a, int row) { return (float *)a->data + (size_t)row * fl_float_stride(a->K); }

/* ---- scalar access to a packed weight: the meaning of the layout, used by unpack_row and the reference ---- */

FL_INLINE float fl_bits_float(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
FL_INLINE uint32_t fl_float_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}

/* f16 -> f32, exact, whatever the denormal mode of the thread. */
FL_INLINE float fl_half(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 0x3ff;
    if (exponent == 31) return fl_bits_float(sign | 0x7f800000 | fraction << 13);
    if (exponent) return fl_bits_float(sign | (exponent + 112) << 23 | fraction << 13);
    return fl_bits_float(sign | fl_float_bits((float)fraction * 0x1p-24f));
}
FL_INLINE uint16_t fl_u16(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

FL_INLINE float fl_exponent_scale(uint8_t e) { return fl_bits_float(e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23); }

/* The value of a stored code: unsigned, or signed for signed layouts. */
FL_INLINE int fl_code(const fl_layout *L, const uint8_t *tile, int r, int k) {
    const uint8_t *low = tile + fl_low_at(L) + 4 * r + k % 4, *high = tile + fl_high_at(L) + 4 * r + k % 4;
    const int step = k / 4;
    int q = L->low == 8   ? low[FL_LINE * step]
            : L->low == 4 ? low[FL_LINE * (step / 2)] >> 4 * (step % 2) & 15
                          : low[FL_LINE * (step / 4)] >> 2 * (step % 4) & 3;
    if (L->high == 1) q |= (high[0] >> step & 1) << L->low;
    if (L->high == 2) q |= (high[FL_LINE * (step / 4)] >> 2 * (step % 4) & 3) << L->low;
    if (L->table == FL_TABLE_NONLINEAR) return FL_NONLINEAR[q];
    if (L->table == FL_TABLE_E2M1) return FL_E2M1[q];
    return L->is_signed ? (int8_t)q : q;
}

/* sw and mw of row r, for group `half` (0 or 1, 0 only where groups are 32) of a tile. */
FL_INLINE void fl_scales(const fl_layout *L, const uint8_t *head, const uint8_t *tile, int r, int half, float *sw, float *mw) {
    *mw = 0.0f;
    if (L->scale == FL_SCALE_EXP) {
        *sw = fl_exponent_scale(head[r]);
        return;
    }
    const int halves = L->minimum && L->scale != FL_SCALE_ZERO;
    const float d = fl_half(fl_u16(head + 2 * r)), m = halves ? fl_half(fl_u16(head + 64 + 2 * r)) : 0.0f;
    switch (L->scale) {
    case FL_SCALE_HALF:
        *sw = d, *mw = m;
        break;
    case FL_SCALE_ZERO:
        *sw = d, *mw = -(d * (float)head[64 + r]);
        break;
    case FL_SCALE_BYTES:
        *sw = d * (float)(int8_t)tile[FL_STRIP * half + r];
        break;
    case FL_SCALE_PAIR:
        *sw = d * (float)tile[r], *mw = -(m * (float)tile[FL_STRIP + r]);
        break;
    default:
        *sw = d * (float)(tile[FL_STRIP * half + r] & 15), *mw = -(m * (float)(tile[FL_STRIP * half + r] >> 4));
        break;
    }
}

#endif
