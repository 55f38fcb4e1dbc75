/* Packed weights as operands of the linear kernels: codes and scales of a tile, and a chunk of a strip unpacked to L1.
 *
 *     chunk.codes: [tile of 32 k][step of 4 k][32 rows][4 k]   8 KB          chunk.sw, msw, mw: [group][32 rows]
 */
#ifndef FL_WEIGHTS_H
#define FL_WEIGHTS_H
#include "layouts.h"
#include "simd.h"

enum {
    VECTORS = FL_STRIP / FL_LANES,
    MOST_VECTORS = VECTORS < 4 ? VECTORS : 4, /* in registers at once */
    VB = 4 * FL_LANES,
    CHUNK = 256,
    CHUNK_TILES = CHUNK / FL_TILE_K,
    CHUNK_GROUPS = CHUNK / 16
};
enum { TILE = FL_STRIP * FL_TILE_K };

/* Vector variants: one copy of every kernel per layout and row count, unrolled, so that sums stay in registers. Plain C: one copy of
 * each for everything, told at run time what to do (a hundred unrolled copies without vector types take a compiler minutes). */
#ifdef FL_PLAIN_C
#define UNROLL
#define UNROLL_COLUMNS
#define KERNEL static __attribute__((noinline))
#define PART static
#else
#define UNROLL _Pragma("GCC unroll 8")
#if FL_LANES == 4
#define UNROLL_COLUMNS _Pragma("GCC unroll 1") /* up to four times: compile time for nothing */
#else
#define UNROLL_COLUMNS UNROLL
#endif
#define KERNEL FL_INLINE
#define PART FL_INLINE
#endif

typedef struct {
    _Alignas(64) uint8_t codes[CHUNK_TILES][TILE];
    _Alignas(64) float sw[CHUNK_GROUPS][FL_STRIP], msw[CHUNK_GROUPS][FL_STRIP], mw[CHUNK_GROUPS][FL_STRIP];
} chunk;

/* What unsigned codes count from, as these kernels see them. */
FL_INLINE int zero_of(const fl_layout *L) { return L->is_signed ? (FL_WIDEN ? 0 : 128) : L->zero; }

/* Codes of step j (k 4j..4j+3 of the tile) for rows FL_LANES*v...: unsigned, or, with FL_WIDEN, signed for signed layouts. */
PART vb codes_of(const fl_layout *L, const uint8_t *tile, int j, int v) {
    const uint8_t *low = tile + fl_low_at(L) + VB * v, *high = tile + fl_high_at(L) + VB * v;
    vb q;
    if (L->low == 8) q = vb_load(low + FL_LINE * j);
    else if (L->low == 4) {
        q = vb_load(low + FL_LINE * (j / 2));
        q = vb_and(j % 2 ? vb_shr(q, 4) : q, vb_set1(15));
    } else {
        q = vb_load(low + FL_LINE * (j / 4));
        q = vb_and(j % 4 ? vb_shr(q, 2 * (j % 4)) : q, vb_set1(3));
    }
    if (L->high) {
        const int from = L->high == 1 ? j : 2 * (j % 4), to = L->low;
        vb h = vb_load(high + (L->high == 1 ? 0 : FL_LINE * (j / 4)));
        h = from > to ? vb_shr(h, from - to) : from < to ? vb_shl(h, to - from) : h;
        q = vb_or(q, vb_and(h, vb_set1((uint8_t)(((1 << L->high) - 1) << to))));
    }
    if (L->table) q = vb_lookup(L->table == FL_TABLE_E2M1 ? FL_E2M1 : FL_NONLINEAR, q);
    return L->is_signed && !FL_WIDEN ? vb_xor(q, vb_set1(0x80)) : q;
}

/* Half-precision scales of a block of 256, converted once. */
FL_INLINE void convert_head(const fl_layout *L, const uint8_t *head, float *dm) {
    if (L->block == 256 && L->group <= FL_TILE_K)
        for (int i = 0; i < (L->minimum ? 2 : 1) * FL_STRIP; i += FL_LANES) vf_store(dm + i, vf_halves(head + 2 * i));
}

/* sw and mw of group `half` of a tile, for rows FL_LANES*v...; as fl_scales. dm: from convert_head. */
PART void scales_of(const fl_layout *L, const uint8_t *head, const float *dm, const uint8_t *tile, int half, int v, vf *sw,
                    vf *mw) {
    const int r = FL_LANES * v;
    const uint8_t *bytes = tile + FL_STRIP * half + r;
    *mw = vf_zero();
    if (L->scale == FL_SCALE_HALF) {
        *sw = vf_halves(head + 2 * r);
        if (L->minimum) *mw = vf_halves(head + 64 + 2 * r);
    } else if (L->scale == FL_SCALE_ZERO) {
        *sw = vf_halves(head + 2 * r);
        *mw = vf_neg(vf_mul(*sw, vf_ints(vi_u8s(head + 64 + r))));
    } else if (L->scale == FL_SCALE_BYTES)
        *sw = vf_mul(vf_load(dm + r), vf_ints(vi_i8s(bytes)));
    else if (L->scale == FL_SCALE_PAIR) {
        *sw = vf_mul(vf_load(dm + r), vf_ints(vi_u8s(bytes)));
        *mw = vf_neg(vf_mul(vf_load(dm + FL_STRIP + r), vf_ints(vi_u8s(bytes + FL_STRIP))));
    } else if (L->scale == FL_SCALE_NIBS) {
        const vi both = vi_u8s(bytes);
        *sw = vf_mul(vf_load(dm + r), vf_ints(vi_and(both, vi_set1(15))));
        *mw = vf_neg(vf_mul(vf_load(dm + FL_STRIP + r), vf_ints(vi_shr(both, 4))));
    } else { /* 2^(e - 128) in two factors, both of them normal */
        const vi e = vi_u8s(head + r), half = vi_shr(e, 1), rest = vi_sub(e, half), bias = vi_set1(127 - 64);
        *sw = vf_mul(vf_bits(vi_shl(vi_add(half, bias), 23)), vf_bits(vi_shl(vi_add(rest, bias), 23)));
    }
}

/* sx * S of one group of weights, or M of a wide one, whose first group of activations is g. */
FL_INLINE float scaled_sum(const fl_layout *L, const fl_group *g, int half) {
    if (L->group == 16) return g->scale * (float)g->sum[half];
    float sum = g->scaled;
    for (int i = 1; i < fl_group_tiles(L); i++) sum += g[i].scaled;
    return sum;
}

/* acc after one group of 16 or 32: the two fma of layouts.h. scaled: round(sx * S), of formats with a minimum. */
FL_INLINE vsum add_group(const fl_layout *L, vi sum, vf sw, vf msw, vf mw, float sx, float scaled, vsum acc) {
    acc = vsum_fma(vf_scaled(sum, sw, msw), sx, acc, L->scale == FL_SCALE_EXP);
    return L->minimum ? vsum_fma(mw, scaled, acc, 0) : acc;
}

/* sum[r][v] += sum of q * x over a tile, or over one half of it for groups of 16, for R rows and NV vectors from v0.
 * packed: tile is a packed tile; else the bytes of one unpacked tile. x: the tile's codes of row 0. ahead: asked for meanwhile, as many
 * bytes as a packed tile has; NULL: nothing. */
PART void tile_sums(const fl_layout *L, const int packed, const int R, const int NV, const uint8_t *tile, const int half,
                    const int v0, const int8_t *x, size_t ldx, vi (*sum)[4], const uint8_t *ahead) {
    const int steps = FL_TILE_K / 4 / fl_halves(L), first = half * steps, all = (fl_tile_bytes(L) + 63) / 64;
#define WEIGHTS(j, v) (packed ? codes_of(L, tile, j, v0 + (v)) : vb_load(tile + FL_LINE * (j) + VB * (v0 + (v))))
#define ASK(j)                                                                                                                 \
    if (ahead) UNROLL for (int i = all * (j) / 8; i < all * ((j) + 1) / 8; i++) __builtin_prefetch(ahead + 64 * i, 0, 3)
#if FL_WIDEN
    if (L->is_signed) {
        UNROLL for (int j = first; j < first + steps; j++) {
            vb w[4], m[4];
            ASK(j);
            UNROLL for (int v = 0; v < NV; v++) w[v] = WEIGHTS(j, v), m[v] = vb_abs(w[v]);
            UNROLL for (int r = 0; r < R; r++) {
                const vb xs = vb_bcast4(x + r * ldx + 4 * j);
                UNROLL for (int v = 0; v < NV; v++) sum[r][v] =
                    vi_add(sum[r][v], vi_pairs16(dot2_u8i8(m[v], vb_sign(xs, w[v]))));
            }
        }
        return;
    }
    const int run = L->top <= 15 ? 8 : L->top <= 31 ? 4 : 2, flush = run < steps ? run : steps; /* 2 * 127 * top * run < 2^15 */
    UNROLL for (int f = first; f < first + steps; f += flush) {
        vi part[6][4];
        UNROLL for (int j = f; j < f + flush; j++) {
            vb w[4];
            ASK(j);
            UNROLL for (int v = 0; v < NV; v++) w[v] = WEIGHTS(j, v);
            UNROLL for (int r = 0; r < R; r++) {
                const vb xs = vb_bcast4(x + r * ldx + 4 * j);
                UNROLL for (int v = 0; v < NV; v++) {
                    const vi products = dot2_u8i8(w[v], xs);
                    part[r][v] = j == f ? products : vi_add16(part[r][v], products);
                }
            }
        }
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < NV; v++) sum[r][v] =
            vi_add(sum[r][v], vi_pairs16(part[r][v]));
    }
#else
    UNROLL for (int j = first; j < first + steps; j++) {
        vb w[4];
        ASK(j);
        UNROLL for (int v = 0; v < NV; v++) w[v] = WEIGHTS(j, v);
        UNROLL for (int r = 0; r < R; r++) {
            const vb xs = vb_bcast4(x + r * ldx + 4 * j);
            UNROLL for (int v = 0; v < NV; v++) sum[r][v] = dot4_u8i8(sum[r][v], w[v], xs);
        }
    }
#endif
#undef WEIGHTS
#undef ASK
}

/* b after 32 k of a wide group, and acc after the whole of it. */
FL_INLINE vsum add_part(vi sum, float sx, vsum b) { return vsum_fma(vf_exact(sum), sx, b, 0); }
FL_INLINE vsum add_wide(const fl_layout *L, vsum b, vf sw, vf mw, float M, vsum acc) {
    acc = vsum_scaled(b, sw, acc);
    return L->minimum ? vsum_fma(mw, M, acc, 0) : acc;
}

/* The scales of a group, its `at`-th, into the chunk. */
PART void unpack_scales(const fl_layout *L, const uint8_t *head, const float *dm, const uint8_t *tile, int half, int v, int at,
                        chunk *c) {
    const int r = FL_LANES * v;
    vf sw, mw;
    scales_of(L, head, dm, tile, half, v, &sw, &mw);
    vf_store(c->sw[at] + r, sw), vf_store(c->msw[at] + r, vf_mul(sw, vf_set1(-FL_MAGIC)));
    if (L->minimum) vf_store(c->mw[at] + r, mw);
}

/* Tiles [0, tiles) from packed memory, where a block begins, into the chunk; scales of a group where it begins. centred: codes minus
 * their zero, signed (16 lanes only). */
KERNEL void unpack_chunk(const fl_layout *L, const int centred, const uint8_t *p, int tiles, chunk *c) {
    const uint8_t *head = p, *tile = p + L->head;
    const int tile_bytes = fl_tile_bytes(L), halves = fl_halves(L), group = fl_group_tiles(L);
    float dm[2 * FL_STRIP];
    (void)centred;
    convert_head(L, head, dm);
    for (int t = 0; t < tiles; t++) {
        UNROLL for (int j = 0; j < FL_TILE_K / 4; j++) UNROLL for (int v = 0; v < VECTORS; v++) {
            vb q = codes_of(L, tile, j, v);
#if FL_LANES == 16
            if (centred) q = vb_sub8(q, vb_set1((uint8_t)zero_of(L)));
#endif
            vb_store(c->codes[t] + FL_LINE * j + VB * v, q);
        }
        if (t % group == 0)
            for (int half = 0; half < halves; half++)
                for (int v = 0; v < VECTORS; v++) unpack_scales(L, head, dm, tile, half, v, t / group * halves + half, c);
        tile += tile_bytes;
        if ((t + 1) % (L->block / FL_TILE_K) == 0) head = tile, tile += L->head;
    }
}

#endif
