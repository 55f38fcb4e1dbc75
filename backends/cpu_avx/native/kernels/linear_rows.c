/* Many rows of a block format on AVX-512 VNNI: limited by multiply-adds, two of 64 products a cycle.
 *
 * A chunk of 256 k x 32 outputs is unpacked to L1 (weights.h) and multiplied with all rows of a block, six at a time: twelve sums hide the
 * latency of the multiply-add, and with the twelve f32 sums of the outputs they fill the registers. Before, the rows of the block
 * were copied to panels, in the order in which they are read here, so that the processor fetches them ahead out of L2:
 *
 *     chunk of k: | rows 0-5 | rows 6-11 | ...     rows: | group | group | ...     (rows behind the last one are zeros)
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
    const int blocks = (rows + most - 1) / most, each = (rows + blocks - 1) / blocks;
    return (each + PANEL_ROWS - 1) / PANEL_ROWS * PANEL_ROWS;
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

/* acc[r] += the groups of one chunk, for the rows of one panel. tiles: of a group. */
KERNEL void multiply_panel(const int halves, const int minimum, const int tiles, int groups, const chunk *c,
                           const uint8_t *panel, float (*acc)[FL_STRIP]) {
    const int steps = FL_TILE_K / 4 / halves;
    vf sums[PANEL_ROWS][VECTORS];
    UNROLL for (int r = 0; r < PANEL_ROWS; r++) UNROLL for (int v = 0; v < VECTORS; v++) sums[r][v] =
        vf_load(acc[r] + FL_LANES * v);
    const uint8_t *codes = c->codes[0];
    for (int g = 0; g < groups; g++) {
        const uint8_t *record = panel + tiles * PANEL_TILE;
        UNROLL for (int half = 0; half < halves; half++) {
            const uint8_t *second = record + 4 * PANEL_ROWS * (1 + half);
            vi sum[PANEL_ROWS][VECTORS];
            UNROLL for (int r = 0; r < PANEL_ROWS; r++) UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] =
                vi_set1(minimum ? FL_SUM_BITS : load_i32(second + 4 * r));
            for (int t = 0; t < tiles; t++) UNROLL for (int j = half * steps; j < (half + 1) * steps; j++) {
                    vb w[VECTORS];
                    UNROLL for (int v = 0; v < VECTORS; v++) w[v] = vb_load(codes + TILE * t + FL_LINE * j + VB * v);
                    UNROLL for (int r = 0; r < PANEL_ROWS; r++) {
                        const vb xs = vb_bcast4((const int8_t *)panel + PANEL_TILE * t + FL_TILE_K * r + 4 * j);
                        UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] = dot4_u8i8(sum[r][v], w[v], xs);
                    }
                }
            UNROLL for (int v = 0; v < VECTORS; v++) {
                const int at = g * halves + half, n = FL_LANES * v;
                const vf sw = vf_load(c->sw[at] + n), msw = vf_load(c->msw[at] + n), mw = vf_load(c->mw[at] + n);
                UNROLL for (int r = 0; r < PANEL_ROWS; r++) {
                    float sx, scaled;
                    memcpy(&sx, record + 4 * r, 4), memcpy(&scaled, second + 4 * r, 4);
                    sums[r][v] = vf_fma(vf_scaled(sum[r][v], sw, msw), vf_set1(sx), sums[r][v]);
                    if (minimum) sums[r][v] = vf_fma(mw, vf_set1(scaled), sums[r][v]);
                }
            }
        }
        codes += TILE * tiles, panel = record + 4 * PANEL_ROWS * (1 + halves);
    }
    UNROLL for (int r = 0; r < PANEL_ROWS; r++) UNROLL for (int v = 0; v < VECTORS; v++)
        vf_store(acc[r] + FL_LANES * v, sums[r][v]);
}

/* Functions per kind of group, none per layout: what layouts differ in is gone after unpacking. */
typedef struct {
    void (*copy)(int tiles, int zero, int groups, int r, const int8_t *codes, const fl_group *g, uint8_t *panel);
    void (*multiply)(int tiles, int groups, const chunk *c, const uint8_t *panel, float (*acc)[FL_STRIP]);
} panel_kind;
#define PANEL_KIND(name, halves, minimum, constant_tiles)                                                                      \
    static void name##_copy(int tiles, int zero, int groups, int r, const int8_t *codes, const fl_group *g, uint8_t *panel) {  \
        copy_row(halves, minimum, constant_tiles ? constant_tiles : tiles, zero, groups, r, codes, g, panel);                  \
    }                                                                                                                          \
    static void name##_multiply(int tiles, int groups, const chunk *c, const uint8_t *panel, float (*acc)[FL_STRIP]) {         \
        multiply_panel(halves, minimum, constant_tiles ? constant_tiles : tiles, groups, c, panel, acc);                       \
    }                                                                                                                          \
    static const panel_kind name = {name##_copy, name##_multiply};
PANEL_KIND(groups_of_16, 2, 0, 1)
PANEL_KIND(groups_of_16_minimum, 2, 1, 1)
PANEL_KIND(groups_of_32, 1, 0, 1)
PANEL_KIND(groups_of_32_minimum, 1, 1, 1)
PANEL_KIND(large_groups, 1, 0, 0)
PANEL_KIND(large_groups_minimum, 1, 1, 0)

/* Rows r.. of a group, which do not exist: zeros. */
static void clear_rows(const fl_layout *L, int r, uint8_t *group) {
    const int tiles = fl_group_tiles(L);
    for (int t = 0; t < tiles; t++) memset(group + t * PANEL_TILE + r * FL_TILE_K, 0, (size_t)((PANEL_ROWS - r) * FL_TILE_K));
    for (int i = 0; i <= fl_halves(L); i++)
        memset(group + tiles * PANEL_TILE + 4 * (PANEL_ROWS * i + r), 0, (size_t)(4 * (PANEL_ROWS - r)));
}

static const panel_kind *kind_of(const fl_layout *L) {
    if (L->group == 16) return L->minimum ? &groups_of_16_minimum : &groups_of_16;
    if (L->group == 32) return L->minimum ? &groups_of_32_minimum : &groups_of_32;
    return L->minimum ? &large_groups_minimum : &large_groups;
}

void FL_NAME(fl_make_panels)(const fl_layout *L, const fl_acts *a, int row0, int rows, uint8_t *panels) {
    const panel_kind *kind = kind_of(L);
    const int size = group_size(L), count = (rows + PANEL_ROWS - 1) / PANEL_ROWS, bytes = group_bytes(L);
    for (int p = 0; p < count; p++)
        for (int r = 0; r < PANEL_ROWS; r++) { /* a whole row at a time: rows are read in order, too */
            const int there = p * PANEL_ROWS + r < rows, row = row0 + p * PANEL_ROWS + r;
            uint8_t *chunk_start = panels;
            for (int k0 = 0; k0 < a->K; k0 += CHUNK) {
                const int groups = (a->K - k0 < CHUNK ? a->K - k0 : CHUNK) / size;
                uint8_t *panel = chunk_start + (size_t)(p * groups * bytes);
                if (there)
                    kind->copy(fl_group_tiles(L), zero_of(L), groups, r, fl_codes(a, row) + k0, fl_groups(a, row) + k0 / size,
                               panel);
                else if (r == rows % PANEL_ROWS) /* once: rows before this one are there already */
                    for (int g = 0; g < groups; g++) clear_rows(L, r, panel + g * bytes);
                chunk_start += (size_t)(count * groups * bytes);
            }
        }
}

#define UNPACK(layout)                                                                                                         \
    case layout:                                                                                                               \
        unpack_chunk(&FL_LAYOUT[layout], 0, p, tiles, c);                                                                      \
        break;
static void unpack(int layout, const uint8_t *p, int tiles, chunk *c) {
    switch (layout) {
        UNPACK(FL_Q4_0)
        UNPACK(FL_Q4_1)
        UNPACK(FL_Q5_0)
        UNPACK(FL_Q5_1)
        UNPACK(FL_Q8_0)
        UNPACK(FL_Q2_K)
        UNPACK(FL_Q3_K)
        UNPACK(FL_Q4_K)
        UNPACK(FL_Q5_K)
        UNPACK(FL_Q6_K)
        UNPACK(FL_IQ4_NL)
        UNPACK(FL_IQ4_XS)
        UNPACK(FL_MXFP4)
        UNPACK(FL_INT4G32)
        UNPACK(FL_INT4G64)
        UNPACK(FL_INT4G128)
        UNPACK(FL_INT4G256)
        UNPACK(FL_INT4G64S)
        UNPACK(FL_INT4G128S)
        UNPACK(FL_INT4G256S)
        UNPACK(FL_INT8G64)
        UNPACK(FL_INT8G128)
    default:
        break;
    }
}

void FL_NAME(fl_sum_panels)(const fl_weight *w, int rows, int strip, const uint8_t *panels, chunk *c, float (*acc)[FL_STRIP],
                            const char *target, size_t ldt) {
    const fl_layout *L = &FL_LAYOUT[w->layout];
    const panel_kind *kind = kind_of(L);
    const int count = (rows + PANEL_ROWS - 1) / PANEL_ROWS;
    const uint8_t *packed = w->data + (size_t)strip * fl_strip_bytes(L, w->K);
    memset(acc, 0, (size_t)count * PANEL_ROWS * sizeof acc[0]);
    for (int k0 = 0; k0 < w->K; k0 += CHUNK) {
        const int depth = w->K - k0 < CHUNK ? w->K - k0 : CHUNK, groups = depth / group_size(L);
        const size_t size = (size_t)(depth / L->block) * fl_block_packed(L);
        unpack(w->layout, packed, depth / FL_TILE_K, c);
        packed += size;
        const uint8_t *next = packed, *end = packed + size; /* the next chunk is asked for while this one is used */
        const size_t step = (size / 64 + (size_t)count) / (size_t)count * 64;
        for (int p = 0; p < count; p++, panels += groups * group_bytes(L)) {
            for (size_t line = 0; line < step && next < end; line += 64, next += 64) __builtin_prefetch(next, 0, 3);
            if (target && k0 + CHUNK >= w->K)
                for (int r = 0; r < PANEL_ROWS; r++, target += ldt)
                    __builtin_prefetch(target, 1, 2), __builtin_prefetch(target + 64, 1, 2);
            kind->multiply(fl_group_tiles(L), groups, c, panels, acc + p * PANEL_ROWS);
        }
    }
}

#else
typedef int fl_no_panels; /* an empty file is no C */
#endif
