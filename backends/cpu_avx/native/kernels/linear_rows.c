/* Many rows of a block format: limited by multiply-adds, on AVX-512 VNNI two of 64 products a cycle.
 *
 * The rows of a block are copied to panels, in the order in which they are read, so that the processor fetches them ahead out of L2. A
 * panel has P rows, 6 with 16 lanes and 4 with less (multiply_chunk in linear.c); where P does not divide the rows, some have one less:
 *
 *     chunk of k: | rows 0..P-1 | rows P..2P-1 | ...     rows: | 32 k | 32 k | ...
 *     32 k:       | codes [P rows][32] | f32 scale [P] | start or scaled [P], for groups of 16 twice |
 *
 * With 16 lanes a chunk of 256 k x 32 outputs is unpacked to L1 (weights.h) and multiplied with all rows of a block, six at a time: twelve
 * sums hide the latency of the multiply-add, and with the twelve f32 sums of the outputs they fill the registers. The first panel of a
 * chunk is multiplied while the chunk is unpacked.
 *
 * start: FL_SUM_BITS - zero * (sum of the codes), what an integer sum begins with; scaled: for formats with a minimum, round(sx * S), in
 * wide groups (of 64 weights and more) the sum of these from the group's first on, so that the last one is M. The bits are those of
 * layouts.h.
 *
 * Of the two units that multiply, sixteen multiply-adds of a group of 32 leave four steps to f32 operations: 80 % of the peak is the end.
 * In wide groups one product for 32 k is enough, another one for the whole group: 86 % for groups of 128. The sums
 * of the group take the registers there, those of the outputs wait in L1.
 */
#include "linear_rows.h"

#ifndef FL_AMX

/* k of a group that has one scale of weights and whole groups of activations. */
FL_INLINE int group_size(const fl_layout *L) { return fl_group_tiles(L) * FL_TILE_K; }

int FL_NAME(fl_block_rows)(const fl_layout *L, int rows, int K) {
    const int panels = PANEL_BYTES / (K / FL_TILE_K * step_bytes(fl_halves(L))); /* that fit */
    const int most = panels * PANEL_ROWS < MOST_ROWS ? panels * PANEL_ROWS : MOST_ROWS;
    if (!most) return 0;
    const int blocks = (rows + most - 1) / most;
    return (rows + blocks - 1) / blocks;
}

int FL_NAME(fl_same_panels)(const fl_layout *one, const fl_layout *other) {
    return fl_halves(one) == fl_halves(other) && one->minimum == other->minimum && zero_of(one) == zero_of(other) &&
           (!one->minimum || group_size(one) == group_size(other));
}

/* Tiles of a chunk of row r of a panel. codes, g: of the row, at the chunk's first k. */
static void copy_row(const fl_layout *L, int tiles, int r, const int8_t *codes, const fl_group *g, uint8_t *panel) {
    const int halves = fl_halves(L), group = fl_group_tiles(L), zero = zero_of(L);
    float before = 0.0f;
    for (int t = 0; t < tiles; t++, g++, codes += FL_TILE_K, panel += step_bytes(halves)) {
        uint8_t *to = panel + PANEL_CODES + 4 * r;
        memcpy(panel + r * FL_TILE_K, codes, FL_TILE_K);
        memcpy(to, &g->scale, 4);
        for (int half = 0; half < halves; half++) {
            const int32_t sum = halves == 2 ? g->sum[half] : g->sum[0] + g->sum[1], start = FL_SUM_BITS - zero * sum;
            const float own = halves == 2 ? g->scale * (float)sum : g->scaled, scaled = t % group ? before + own : own;
            before = scaled;
            memcpy(to + 4 * PANEL_ROWS * (1 + half), L->minimum ? (const void *)&scaled : (const void *)&start, 4);
        }
    }
}

void FL_NAME(fl_make_panels)(const fl_layout *L, const fl_acts *a, int row0, int rows, uint8_t *panels) {
    const int count = (rows + PANEL_ROWS - 1) / PANEL_ROWS, bytes = step_bytes(fl_halves(L));
    for (int p = 0; p < count; p++)
        for (int row = first_of(p, rows, count); row < first_of(p + 1, rows, count);
             row++) { /* whole rows are read in order, too */
            uint8_t *chunk_start = panels;
            for (int k0 = 0; k0 < a->K; k0 += CHUNK) {
                const int tiles = (a->K - k0 < CHUNK ? a->K - k0 : CHUNK) / FL_TILE_K;
                uint8_t *panel = chunk_start + (size_t)(p * tiles * bytes);
                copy_row(L, tiles, row - first_of(p, rows, count), fl_codes(a, row0 + row) + k0,
                         fl_groups(a, row0 + row) + k0 / FL_TILE_K, panel);
                chunk_start += (size_t)(count * tiles * bytes);
            }
        }
}

#if FL_LANES == 16
/* Sums of the R rows of one panel, from acc, and the groups of one chunk; to acc, or, with the last chunk, to where they go. tiles: of a
 * group; wide: more than one. With `packed`, weights of the layout L come from there and are unpacked to the chunk on the way: stores cost little
 * beside multiply-adds, and a tenth of the time of 24 rows in a loop of their own. Else they are in the chunk. */
KERNEL void multiply_panel(const int R, const int halves, const int minimum, const int wide, const int tiles,
                           const fl_layout *L, int groups, chunk *c, const uint8_t *packed, const uint8_t *panel,
                           float (*acc)[FL_STRIP], const panel_rows *to) {
    const int steps = FL_TILE_K / 4 / halves, step = step_bytes(halves);
    vf sums[PANEL_ROWS][VECTORS], part[PANEL_ROWS][VECTORS]; /* of outputs; b of layouts.h */
    if (!wide)
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < VECTORS; v++) sums[r][v] = vf_load(acc[r] + FL_LANES * v);
    uint8_t *codes = c->codes[0];
    const uint8_t *head = packed, *tile = packed;
    float dm[2 * FL_STRIP];
    if (L) convert_head(L, head, dm), tile += L->head;
    for (int g = 0; g < groups; g++) {
        const uint8_t *last = panel + (tiles - 1) * step + PANEL_CODES; /* scales and sums of the last tile */
        UNROLL for (int half = 0; half < halves; half++) {
            const int at = g * halves + half, second = 4 * PANEL_ROWS * (1 + half);
            vi sum[PANEL_ROWS][VECTORS];
            if (wide) UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < VECTORS; v++) part[r][v] = vf_zero();
            for (int t = 0; t < tiles; t++) {
                const uint8_t *x = panel + step * t, *record = x + PANEL_CODES;
                UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] =
                    vi_set1(minimum ? FL_SUM_BITS : load_i32(record + second + 4 * r));
                UNROLL for (int j = half * steps; j < (half + 1) * steps; j++) {
                    vb w[VECTORS];
                    UNROLL for (int v = 0; v < VECTORS; v++) {
                        uint8_t *place = codes + TILE * t + FL_LINE * j + VB * v;
                        w[v] = L ? codes_of(L, tile + t * fl_tile_bytes(L), j, v) : vb_load(place);
                        if (L) vb_store(place, w[v]);
                    }
                    UNROLL for (int r = 0; r < R; r++) {
                        const vb xs = vb_bcast4((const int8_t *)x + FL_TILE_K * r + 4 * j);
                        UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] = dot4_u8i8(sum[r][v], w[v], xs);
                    }
                }
                if (L && !wide)
                    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] = vi_ready(sum[r][v]);
                /* The empty asm keeps loads in order: brought forward over it, as GCC does, they push half of the sums to memory. */
                if (wide) __asm__ volatile("" ::: "memory");
                if (wide)
                    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < VECTORS; v++) part[r][v] =
                        vf_fma(vf_exact(sum[r][v]), vf_set1(float_at(record + 4 * r)), part[r][v]);
            }
            UNROLL for (int v = 0; v < VECTORS; v++) {
                const int n = FL_LANES * v;
                if (L) unpack_scales(L, head, dm, tile, half, v, at, c);
                const vf sw = vf_load(c->sw[at] + n), msw = vf_load(c->msw[at] + n), mw = vf_load(c->mw[at] + n);
                UNROLL for (int r = 0; r < R; r++) {
                    vf y = wide ? vf_fma(part[r][v], sw, vf_load(acc[r] + n))
                                : vf_fma(vf_scaled(sum[r][v], sw, msw), vf_set1(float_at(last + 4 * r)), sums[r][v]);
                    if (minimum) y = vf_fma(mw, vf_set1(float_at(last + second + 4 * r)), y);
                    if (wide) vf_store(acc[r] + n, y);
                    else
                        sums[r][v] = y;
                }
            }
        }
        codes += TILE * tiles, panel += step * tiles;
        if (L) {
            tile += tiles * fl_tile_bytes(L);
            if ((g + 1) * tiles % (L->block / FL_TILE_K) == 0) head = tile, tile += L->head;
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < VECTORS; v++) {
        const int n = FL_LANES * v;
        if (wide && !to) continue;
        const vf y = wide ? vf_load(acc[r] + n) : sums[r][v];
        if (!to) vf_store(acc[r] + n, y);
        else
            vf_store(to->y + r * to->ldy + n, to->add ? vf_add(vf_load(to->add + r * to->ldadd + n), y) : y);
    }
}

/* Functions per kind of group: what layouts differ in is gone after unpacking. */
typedef struct {
    void (*multiply)(int rows, int tiles, int groups, chunk *c, const uint8_t *panel, float (*acc)[FL_STRIP],
                     const panel_rows *to);
} panel_kind;
#define PANEL(R, halves, minimum, wide, tiles, layout)                                                                         \
    case R:                                                                                                                    \
        multiply_panel(R, halves, minimum, wide, tiles, layout, groups, c, packed, panel, acc, to);                            \
        break;
#define PANEL_KIND(name, halves, minimum, wide)                                                                                \
    static void name##_multiply(int rows, int tiles, int groups, chunk *c, const uint8_t *panel, float (*acc)[FL_STRIP],       \
                                const panel_rows *to) {                                                                        \
        const int t = wide ? tiles : 1;                                                                                        \
        const uint8_t *packed = NULL;                                                                                          \
        switch (rows) {                                                                                                        \
            PANEL(1, halves, minimum, wide, t, NULL)                                                                           \
            PANEL(2, halves, minimum, wide, t, NULL)                                                                           \
            PANEL(3, halves, minimum, wide, t, NULL)                                                                           \
            PANEL(4, halves, minimum, wide, t, NULL)                                                                           \
            PANEL(5, halves, minimum, wide, t, NULL)                                                                           \
            PANEL(6, halves, minimum, wide, t, NULL)                                                                           \
        }                                                                                                                      \
    }                                                                                                                          \
    static const panel_kind name = {name##_multiply};
PANEL_KIND(groups_of_16, 2, 0, 0)
PANEL_KIND(groups_of_16_minimum, 2, 1, 0)
PANEL_KIND(groups_of_32, 1, 0, 0)
PANEL_KIND(groups_of_32_minimum, 1, 1, 0)
PANEL_KIND(wide_groups, 1, 0, 1)
PANEL_KIND(wide_groups_minimum, 1, 1, 1)

static const panel_kind *kind_of(const fl_layout *L) {
    if (L->group == 16) return L->minimum ? &groups_of_16_minimum : &groups_of_16;
    if (L->group == 32) return L->minimum ? &groups_of_32_minimum : &groups_of_32;
    return L->minimum ? &wide_groups_minimum : &wide_groups;
}

/* The first panel of a chunk: multiplied while the chunk is unpacked. */
#define FIRST(layout)                                                                                                          \
    static void first_##layout(int rows, int groups, chunk *c, const uint8_t *packed, const uint8_t *panel,                    \
                               float (*acc)[FL_STRIP], const panel_rows *to) {                                                 \
        const fl_layout *L = &FL_LAYOUT[layout];                                                                               \
        switch (rows) {                                                                                                        \
            PANEL(4, fl_halves(L), L->minimum, L->group > FL_TILE_K, fl_group_tiles(L), L)                                     \
            PANEL(5, fl_halves(L), L->minimum, L->group > FL_TILE_K, fl_group_tiles(L), L)                                     \
            PANEL(6, fl_halves(L), L->minimum, L->group > FL_TILE_K, fl_group_tiles(L), L)                                     \
        default: /* a remainder */                                                                                             \
            unpack_chunk(L, 0, packed, groups * fl_group_tiles(L), c);                                                         \
            kind_of(L)->multiply(rows, fl_group_tiles(L), groups, c, panel, acc, to);                                          \
        }                                                                                                                      \
    }
FIRST(FL_Q4_0)
FIRST(FL_Q4_1)
FIRST(FL_Q5_0)
FIRST(FL_Q5_1)
FIRST(FL_Q8_0)
FIRST(FL_Q2_K)
FIRST(FL_Q3_K)
FIRST(FL_Q4_K)
FIRST(FL_Q5_K)
FIRST(FL_Q6_K)
FIRST(FL_IQ4_NL)
FIRST(FL_IQ4_XS)
FIRST(FL_MXFP4)
FIRST(FL_INT4G32)
FIRST(FL_INT4G64)
FIRST(FL_INT4G128)
FIRST(FL_INT4G256)
FIRST(FL_INT4G64S)
FIRST(FL_INT4G128S)
FIRST(FL_INT4G256S)
FIRST(FL_INT8G64)
FIRST(FL_INT8G128)

static void (*const first[FL_BLOCK_LAYOUTS])(int, int, chunk *, const uint8_t *, const uint8_t *, float (*)[FL_STRIP],
                                             const panel_rows *) = {
    first_FL_Q4_0,      first_FL_Q4_1,      first_FL_Q5_0,    first_FL_Q5_1,     first_FL_Q8_0,     first_FL_Q2_K,
    first_FL_Q3_K,      first_FL_Q4_K,      first_FL_Q5_K,    first_FL_Q6_K,     first_FL_IQ4_NL,   first_FL_IQ4_XS,
    first_FL_MXFP4,     first_FL_INT4G32,   first_FL_INT4G64, first_FL_INT4G128, first_FL_INT4G256, first_FL_INT4G64S,
    first_FL_INT4G128S, first_FL_INT4G256S, first_FL_INT8G64, first_FL_INT8G128};

void FL_NAME(fl_sum_panels)(const fl_weight *w, int rows, int strip, const uint8_t *panels, chunk *c, float (*acc)[FL_STRIP],
                            const char *target, size_t ldt, const panel_rows *to) {
    const fl_layout *L = &FL_LAYOUT[w->layout];
    const panel_kind *kind = kind_of(L);
    const int count = (rows + PANEL_ROWS - 1) / PANEL_ROWS;
    const uint8_t *packed = w->data + (size_t)strip * fl_strip_bytes(L, w->K);
    memset(acc, 0, (size_t)rows * sizeof acc[0]);
    for (int k0 = 0; k0 < w->K; k0 += CHUNK) {
        const int depth = w->K - k0 < CHUNK ? w->K - k0 : CHUNK, groups = depth / group_size(L), last = k0 + CHUNK >= w->K;
        const size_t size = (size_t)(depth / L->block) * fl_block_packed(L);
        const uint8_t *next = packed + size, *end = next + size; /* the next chunk is asked for while this one is used */
        const size_t step = (size / 64 + (size_t)count) / (size_t)count * 64;
        for (int p = 0; p < count; p++, panels += depth / FL_TILE_K * step_bytes(fl_halves(L))) {
            const int row = first_of(p, rows, count), own = first_of(p + 1, rows, count) - row;
            panel_rows place;
            for (size_t line = 0; line < step && next < end; line += 64, next += 64) __builtin_prefetch(next, 0, 3);
            if (target && last)
                for (int r = 0; r < own; r++, target += ldt)
                    __builtin_prefetch(target, 1, 2), __builtin_prefetch(target + 64, 1, 2);
            if (to) {
                place = *to, place.y += (size_t)row * to->ldy;
                if (to->add) place.add += (size_t)row * to->ldadd;
            }
            if (p) kind->multiply(own, fl_group_tiles(L), groups, c, panels, acc + row, to && last ? &place : NULL);
            else
                first[w->layout](own, groups, c, packed, panels, acc + row, to && last ? &place : NULL);
        }
        packed += size;
    }
}

#endif

#else
typedef int fl_no_panels; /* an empty file is no C */
#endif
