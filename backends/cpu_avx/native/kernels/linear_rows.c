/* Many rows of a block format on AVX-512 VNNI: limited by multiply-adds, two of 64 products a cycle.
 *
 * A chunk of 256 k x 32 outputs is unpacked to L1 (weights.h) and multiplied with all rows of a block, six at a time: twelve sums hide the
 * latency of the multiply-add, and with the twelve f32 sums of the outputs they fill the registers. Where six do not divide the rows, some
 * panels have one row less. The first panel of a chunk is multiplied while the chunk is unpacked. Before, the rows of the block
 * were copied to panels, in the order in which they are read here, so that the processor fetches them ahead out of L2:
 *
 *     chunk of k: | rows 0-5 | rows 6-11 | ...     rows: | group | group | ...
 *     group:      | tile of 32 k: [6 rows][32 codes] | tile | ... | f32 scale [6] | start or scaled [6], for groups of 16 twice |
 *
 * start: FL_SUM_BITS - zero * (sum of the codes), what an integer sum begins with; scaled: round(sx * S), for formats with a minimum.
 * Per group a sum takes two f32 operations beside its multiply-adds, in the same two units: 4 of 20 for groups of 32. The bits are
 * those of layouts.h.
 */
#include "linear_rows.h"

#if FL_LANES == 16 && !defined(FL_AMX)

enum { PANEL_TILE = PANEL_ROWS * FL_TILE_K };

FL_INLINE int group_bytes(const fl_layout *L) { return fl_group_tiles(L) * PANEL_TILE + 4 * PANEL_ROWS * (1 + fl_halves(L)); }
FL_INLINE int group_size(const fl_layout *L) { return fl_act_group(L); }

int FL_NAME(fl_block_rows)(const fl_layout *L, int rows, int K) {
    const int panels = PANEL_BYTES / (K / group_size(L) * group_bytes(L)); /* that fit */
    const int most = panels * PANEL_ROWS < MOST_ROWS ? panels * PANEL_ROWS : MOST_ROWS;
    if (!most) return 0;
    const int blocks = (rows + most - 1) / most;
    return (rows + blocks - 1) / blocks;
}

int FL_NAME(fl_same_panels)(const fl_layout *one, const fl_layout *other) {
    return group_size(one) == group_size(other) && fl_halves(one) == fl_halves(other) && one->minimum == other->minimum &&
           zero_of(one) == zero_of(other);
}

/* Groups of a chunk of row r of a panel. codes, g: of the row, at the chunk's first k. */
KERNEL void copy_row(const int halves, const int minimum, const int tiles, int zero, int groups, int r, const int8_t *codes,
                     const fl_group *g, uint8_t *panel) {
    for (int i = 0; i < groups; i++, g++, codes += tiles * FL_TILE_K) {
        uint8_t *to = panel + r * FL_TILE_K;
        for (int t = 0; t < tiles; t++) memcpy(to + t * PANEL_TILE, codes + t * FL_TILE_K, FL_TILE_K);
        to = panel + tiles * PANEL_TILE + 4 * r;
        memcpy(to, &g->scale, 4);
        for (int half = 0; half < halves; half++) {
            const int32_t sum = halves == 2 ? g->sum[half] : g->sum[0] + g->sum[1], start = FL_SUM_BITS - zero * sum;
            const float scaled = halves == 2 ? g->scale * (float)sum : g->scaled;
            memcpy(to + 4 * PANEL_ROWS * (1 + half), minimum ? (const void *)&scaled : (const void *)&start, 4);
        }
        panel += tiles * PANEL_TILE + 4 * PANEL_ROWS * (1 + halves);
    }
}

/* Sums of the R rows of one panel, from acc, and the groups of one chunk; to acc, or, with the last chunk, to where they go. tiles: of a
 * group. With `packed`, weights of the layout L come from there and are unpacked to the chunk on the way: stores cost little beside
 * multiply-adds, and a tenth of the time of 24 rows in a loop of their own. Else they are in the chunk. */
KERNEL void multiply_panel(const int R, const int halves, const int minimum, const int tiles, const fl_layout *L, int groups,
                           chunk *c, const uint8_t *packed, const uint8_t *panel, float (*acc)[FL_STRIP],
                           const panel_rows *to) {
    const int steps = FL_TILE_K / 4 / halves;
    vf sums[PANEL_ROWS][VECTORS];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < VECTORS; v++) sums[r][v] = vf_load(acc[r] + FL_LANES * v);
    uint8_t *codes = c->codes[0];
    const uint8_t *head = packed, *tile = packed;
    float dm[2 * FL_STRIP];
    if (L) convert_head(L, head, dm), tile += L->head;
    for (int g = 0; g < groups; g++) {
        const uint8_t *record = panel + tiles * PANEL_TILE;
        UNROLL for (int half = 0; half < halves; half++) {
            const uint8_t *second = record + 4 * PANEL_ROWS * (1 + half);
            const int at = g * halves + half;
            vi sum[PANEL_ROWS][VECTORS];
            UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] =
                vi_set1(minimum ? FL_SUM_BITS : load_i32(second + 4 * r));
            for (int t = 0; t < tiles; t++) UNROLL for (int j = half * steps; j < (half + 1) * steps; j++) {
                    vb w[VECTORS];
                    UNROLL for (int v = 0; v < VECTORS; v++) {
                        uint8_t *place = codes + TILE * t + FL_LINE * j + VB * v;
                        w[v] = L ? codes_of(L, tile + t * fl_tile_bytes(L), j, v) : vb_load(place);
                        if (L) vb_store(place, w[v]);
                    }
                    UNROLL for (int r = 0; r < R; r++) {
                        const vb xs = vb_bcast4((const int8_t *)panel + PANEL_TILE * t + FL_TILE_K * r + 4 * j);
                        UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] = dot4_u8i8(sum[r][v], w[v], xs);
                    }
                }
            UNROLL for (int v = 0; v < VECTORS; v++) {
                const int n = FL_LANES * v;
                if (L) unpack_scales(L, head, dm, tile, half, v, at, c);
                const vf sw = vf_load(c->sw[at] + n), msw = vf_load(c->msw[at] + n), mw = vf_load(c->mw[at] + n);
                UNROLL for (int r = 0; r < R; r++) {
                    float sx, scaled;
                    memcpy(&sx, record + 4 * r, 4), memcpy(&scaled, second + 4 * r, 4);
                    sums[r][v] = vf_fma(vf_scaled(sum[r][v], sw, msw), vf_set1(sx), sums[r][v]);
                    if (minimum) sums[r][v] = vf_fma(mw, vf_set1(scaled), sums[r][v]);
                }
            }
        }
        codes += TILE * tiles, panel = record + 4 * PANEL_ROWS * (1 + halves);
        if (L) {
            tile += tiles * fl_tile_bytes(L);
            if ((g + 1) * tiles % (L->block / FL_TILE_K) == 0) head = tile, tile += L->head;
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < VECTORS; v++) {
        const int n = FL_LANES * v;
        if (!to) vf_store(acc[r] + n, sums[r][v]);
        else
            vf_store(to->y + r * to->ldy + n, to->add ? vf_add(vf_load(to->add + r * to->ldadd + n), sums[r][v]) : sums[r][v]);
    }
}

/* Functions per kind of group: what layouts differ in is gone after unpacking. */
typedef struct {
    void (*copy)(int tiles, int zero, int groups, int r, const int8_t *codes, const fl_group *g, uint8_t *panel);
    void (*multiply)(int rows, int tiles, int groups, chunk *c, const uint8_t *panel, float (*acc)[FL_STRIP],
                     const panel_rows *to);
} panel_kind;
#define PANEL(R, halves, minimum, tiles, layout)                                                                               \
    case R:                                                                                                                    \
        multiply_panel(R, halves, minimum, tiles, layout, groups, c, packed, panel, acc, to);                                  \
        break;
#define PANEL_KIND(name, halves, minimum, constant_tiles)                                                                      \
    static void name##_copy(int tiles, int zero, int groups, int r, const int8_t *codes, const fl_group *g, uint8_t *panel) {  \
        copy_row(halves, minimum, constant_tiles ? constant_tiles : tiles, zero, groups, r, codes, g, panel);                  \
    }                                                                                                                          \
    static void name##_multiply(int rows, int tiles, int groups, chunk *c, const uint8_t *panel, float (*acc)[FL_STRIP],       \
                                const panel_rows *to) {                                                                        \
        const int t = constant_tiles ? constant_tiles : tiles;                                                                 \
        const uint8_t *packed = NULL;                                                                                          \
        switch (rows) {                                                                                                        \
            PANEL(1, halves, minimum, t, NULL)                                                                                 \
            PANEL(2, halves, minimum, t, NULL)                                                                                 \
            PANEL(3, halves, minimum, t, NULL)                                                                                 \
            PANEL(4, halves, minimum, t, NULL)                                                                                 \
            PANEL(5, halves, minimum, t, NULL)                                                                                 \
            PANEL(6, halves, minimum, t, NULL)                                                                                 \
        }                                                                                                                      \
    }                                                                                                                          \
    static const panel_kind name = {name##_copy, name##_multiply};
PANEL_KIND(groups_of_16, 2, 0, 1)
PANEL_KIND(groups_of_16_minimum, 2, 1, 1)
PANEL_KIND(groups_of_32, 1, 0, 1)
PANEL_KIND(groups_of_32_minimum, 1, 1, 1)
PANEL_KIND(large_groups, 1, 0, 0)
PANEL_KIND(large_groups_minimum, 1, 1, 0)

static const panel_kind *kind_of(const fl_layout *L) {
    if (L->group == 16) return L->minimum ? &groups_of_16_minimum : &groups_of_16;
    if (L->group == 32) return L->minimum ? &groups_of_32_minimum : &groups_of_32;
    return L->minimum ? &large_groups_minimum : &large_groups;
}

/* Where panel p of `rows` rows begins: panels differ by one row at most. */
FL_INLINE int first_of(int p, int rows, int count) { return p * rows / count; }

void FL_NAME(fl_make_panels)(const fl_layout *L, const fl_acts *a, int row0, int rows, uint8_t *panels) {
    const panel_kind *kind = kind_of(L);
    const int size = group_size(L), count = (rows + PANEL_ROWS - 1) / PANEL_ROWS, bytes = group_bytes(L);
    for (int p = 0; p < count; p++)
        for (int row = first_of(p, rows, count); row < first_of(p + 1, rows, count);
             row++) { /* whole rows are read in order, too */
            uint8_t *chunk_start = panels;
            for (int k0 = 0; k0 < a->K; k0 += CHUNK) {
                const int groups = (a->K - k0 < CHUNK ? a->K - k0 : CHUNK) / size;
                uint8_t *panel = chunk_start + (size_t)(p * groups * bytes);
                kind->copy(fl_group_tiles(L), zero_of(L), groups, row - first_of(p, rows, count), fl_codes(a, row0 + row) + k0,
                           fl_groups(a, row0 + row) + k0 / size, panel);
                chunk_start += (size_t)(count * groups * bytes);
            }
        }
}

/* The first panel of a chunk: multiplied while the chunk is unpacked. */
#define FIRST(layout)                                                                                                          \
    static void first_##layout(int rows, int groups, chunk *c, const uint8_t *packed, const uint8_t *panel,                    \
                               float (*acc)[FL_STRIP], const panel_rows *to) {                                                 \
        const fl_layout *L = &FL_LAYOUT[layout];                                                                               \
        switch (rows) {                                                                                                        \
            PANEL(4, fl_halves(L), L->minimum, fl_group_tiles(L), L)                                                           \
            PANEL(5, fl_halves(L), L->minimum, fl_group_tiles(L), L)                                                           \
            PANEL(6, fl_halves(L), L->minimum, fl_group_tiles(L), L)                                                           \
        default: /* a remainder */                                                                                             \
            unpack_chunk(L, 0, packed, groups * fl_act_group(L) / FL_TILE_K, c);                                               \
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
        for (int p = 0; p < count; p++, panels += groups * group_bytes(L)) {
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

#else
typedef int fl_no_panels; /* an empty file is no C */
#endif
