/* Packed weights: the layout, and access to one element of it.
 *
 * A weight [N][K] is cut in strips of 32 output rows, one after the other; the last one is padded with zero rows. A strip of a
 * block format is a row of blocks that cover as many k as a block of the file (BLOCK = 32, 64, 128 or 256):
 *
 *     strip 0: | block 0 | block 1 | ...    strip 1: | block 0 | ...
 *     block:   | head | tile 0 | tile 1 | ...         one tile for each 32 k
 *     head:    | 32 x d |, f16 (SCALE_F32: f32); after it for formats with a minimum | 32 x f16 m |, SCALE_ZERO: | 32 x u8 z |
 *     tile:    | scale lines, 32 bytes each | low plane | high plane |
 *
 * A line of a plane is 128 bytes: 32 rows x one 32-bit word, byte i of the word belongs to k = 4 * step + i. So a line is what a
 * strip multiplies with four consecutive activations, and neighbours read neighbouring words:
 *
 *     LOW 8:  line j = step j                         HIGH 1: one line, step j in bit j of each byte
 *     LOW 4:  line j = step 2j in the low nibbles,    HIGH 2: line j = steps 4j .. 4j+3 in bits 0-1, 2-3, 4-5, 6-7
 *             step 2j + 1 in the high ones
 *
 * A weight is (q - ZERO) * sw + mw, where sw and mw belong to a group of GROUP = 16 or 32 k:
 *     SCALE_HALF   sw = d,                  mw = m if MINIMUM
 *     SCALE_F32    sw = d
 *     SCALE_ZERO   sw = d,                  mw = -(d * z)
 *     SCALE_BYTES  sw = d * s,              s a signed byte of the group's line
 *     SCALE_PAIR   sw = d * s,              mw = -(m * t): unsigned bytes, the line of s, then that of t
 * q is unsigned for LOW 4, signed for LOW 8. Plain weights (f32, f16, bf16) are | k = 0: 32 values | k = 1: ... of each strip. */
#ifndef FASTLLM_PACKED_H
#define FASTLLM_PACKED_H

#define STRIP 32
#define LINE 128
#define SCALE_HALF 0
#define SCALE_F32 1
#define SCALE_BYTES 2
#define SCALE_PAIR 3
#define SCALE_ZERO 4

#ifdef BLOCK
#define HALVES (32 / GROUP_K)
#define D_BYTES (SCALE == SCALE_F32 ? 4 : 2)
#define HEAD_BYTES (STRIP * (SCALE == SCALE_ZERO ? 3 : D_BYTES * (1 + MINIMUM)))
#define SCALE_LINES (SCALE == SCALE_BYTES ? HALVES : SCALE == SCALE_PAIR ? 2 * HALVES : 0)
#define LOW_AT (STRIP * SCALE_LINES)
#define HIGH_AT (LOW_AT + LINE * LOW)
#define TILE_BYTES (HIGH_AT + LINE * HIGH)
#define TILES (BLOCK / 32)
#define BLOCK_PACKED (HEAD_BYTES + TILES * TILE_BYTES)

/* d of row r of a block. */
FN float packed_scale(GLOBAL const uchar *block, const int r) {
    return SCALE == SCALE_F32 ? ((GLOBAL const float *)block)[r] : vload_half(r, (GLOBAL const half *)block);
}
FN fvec packed_scales(GLOBAL const uchar *block, const int r) {
    return SCALE == SCALE_F32 ? LOADV((GLOBAL const float *)block + r) : LOAD_HALFV((GLOBAL const half *)block + r);
}

/* m of row r of a block, -(d * z) with SCALE_ZERO; 0 without a minimum. */
FN float packed_minimum(GLOBAL const uchar *block, const int r, const float d) {
    if (SCALE == SCALE_ZERO) return -(d * (float)block[2 * STRIP + r]);
    return MINIMUM ? vload_half(STRIP + r, (GLOBAL const half *)block) : 0.0f;
}
FN fvec packed_minima(GLOBAL const uchar *block, const int r, const fvec d) {
    if (SCALE == SCALE_ZERO) return -(d * TO_FVEC(LOADV(block + 2 * STRIP + r)));
    return MINIMUM ? LOAD_HALFV((GLOBAL const half *)block + STRIP + r) : (fvec)(0.0f);
}

/* Value k (0..31) of row r of a tile, as it is stored. */
FN int packed_code(GLOBAL const uchar *tile, const int r, const int k) {
    GLOBAL const uchar *low = tile + LOW_AT + 4 * r + k % 4, *high = tile + HIGH_AT + 4 * r + k % 4;
    const int step = k / 4;
    if (LOW == 8) return (char)low[LINE * step];
    int q = low[LINE * (step / 2)] >> 4 * (step % 2) & 15;
    if (HIGH == 1) q |= (high[0] >> step & 1) << 4;
    if (HIGH == 2) q |= (high[LINE * (step / 4)] >> 2 * (step % 4) & 3) << 4;
    return q;
}
#endif
#endif
