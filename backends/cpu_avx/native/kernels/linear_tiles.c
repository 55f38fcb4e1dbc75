/* Linear layers on AMX tiles: block formats with many rows, and bf16 weights with any number of rows.
 *
 * A chunk of a strip (256 k x 32 outputs) is unpacked to L1 and used for all rows of a block. What it is unpacked to is an operand as
 * it stands: a line of 128 bytes is 32 outputs x 4 codes (or 2 bf16), so 16 lines, 128 bytes apart, are a B tile of 16 outputs x
 * 64 codes; 16 rows of activations are an A tile. 2 x 2 products share four loads:
 *
 *                     outputs 0-15   16-31
 *     rows  0-15      C 0            C 1            A 4: rows 0-15   A 5: rows 16-31
 *     rows 16-31      C 2            C 3            B 6: outputs 0-15   B 7: outputs 16-31
 *
 * Block formats: codes are unpacked signed (code - zero), so an integer sum needs no correction. C begins with FL_SUM_BITS, is stored, and
 * becomes f32 while the tiles work on the next one. Integer sums are exact and the f32 operations are those of layouts.h, so the bits are
 * those of every variant. Activations have a scale for each 32 k, so a tile holds 8 lines, or 4 for weights in groups of 16, and the f32
 * operations are the limit (a quarter of the peak at best).
 *
 * bf16: C tiles are the f32 sums of 16 x 16 outputs and stay in f32 from block to block; acc = TILE_DOT_BF16 over 32 k each, ascending. A
 * row alone takes the same instruction, so its bits are the same.
 *
 * No machine with AMX was at hand: this was run in emulation (tiles.h) only, and never timed. isa.c compares it with avx512 at first use.
 */
#include "linear_rows.h"

#ifdef FL_AMX
#include "tiles.h"

enum { PAIR = 32, PADDED = CHUNK + 64, LINE = 4 * FL_STRIP };

typedef struct {
    int k_bytes;                                   /* of an A tile as configured now, 0: not configured */
    _Alignas(64) int32_t sums[2][4][16][16];       /* C tiles of this step and of the one before */
    _Alignas(64) float part[PAIR][FL_STRIP];       /* b of layouts.h, of the rows of a pair */
    _Alignas(64) uint8_t pairs[CHUNK / 2][LINE];   /* bf16 weights: [pair of k][32 outputs][2 k] */
    _Alignas(64) uint8_t padded[PAIR][2 * PADDED]; /* rows of the last pair of tiles, zeros behind them */
} tile_space;

typedef char tile_space_fits[sizeof(tile_space) <= PANEL_BYTES ? 1 : -1];

static const _Alignas(64) int32_t start_line[16] = {
    FL_SUM_BITS, FL_SUM_BITS, FL_SUM_BITS, FL_SUM_BITS, FL_SUM_BITS, FL_SUM_BITS, FL_SUM_BITS, FL_SUM_BITS,
    FL_SUM_BITS, FL_SUM_BITS, FL_SUM_BITS, FL_SUM_BITS, FL_SUM_BITS, FL_SUM_BITS, FL_SUM_BITS, FL_SUM_BITS};

void FL_NAME(fl_tiles_begin)(void *space) { ((tile_space *)space)->k_bytes = 0; }

void FL_NAME(fl_tiles_end)(void *space) {
    if (((tile_space *)space)->k_bytes) TILE_RELEASE();
}

/* Tiles 0-3: 16 x 16 sums; 4, 5: 16 rows of k_bytes; 6, 7: k_bytes / 4 lines of 16 outputs. */
static void configure(tile_space *s, int k_bytes) {
    if (s->k_bytes == k_bytes) return;
    tile_config c = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        c.bytes[t] = (uint16_t)(t == 4 || t == 5 ? k_bytes : 64);
        c.rows[t] = (uint8_t)(t >= 6 ? k_bytes / 4 : 16);
    }
    TILE_CONFIGURE(&c);
    s->k_bytes = k_bytes;
}

/* Rows of 32 from `first` on, `bytes` of each: where they are, or copied with zeros behind the last one. */
static const uint8_t *rows_of_pair(tile_space *s, const uint8_t *x, size_t ldx, int left, int bytes, size_t *ld) {
    *ld = ldx;
    if (left >= PAIR) return x;
    for (int r = 0; r < PAIR; r++) {
        if (r < left) memcpy(s->padded[r], x + (size_t)r * ldx, (size_t)bytes);
        else
            memset(s->padded[r], 0, (size_t)bytes);
    }
    *ld = sizeof s->padded[0];
    return s->padded[0];
}

/* ---- block formats ------------------------------------------------------------------------------------------------------------ */

/* The f32 part of a tile for 32 rows at most: C tiles, and what they are scaled with and added to. tile: of a wide group. */
typedef struct {
    int rows, half, tile;
    int32_t (*sums)[16][16];
    const float *sw, *msw, *mw; /* [32 outputs] */
    const fl_group *record;     /* of the first row and the first tile of the group; rows are ldr apart */
    size_t ldr;
    float (*acc)[FL_STRIP], (*part)[FL_STRIP];
} pending;

KERNEL void finish_rows(const fl_layout *L, const pending *p) {
    const int wide = fl_group_tiles(L) > 1, last = p->tile + 1 == fl_group_tiles(L);
    for (int v = 0; v < VECTORS; v++) {
        const int n = FL_LANES * v;
        const vf sw = vf_load(p->sw + n), msw = vf_load(p->msw + n), mw = vf_load(p->mw + n);
        for (int r = 0; r < p->rows; r++) {
            float *acc = p->acc[r] + n, *part = p->part[r] + n;
            const fl_group *record = p->record + (size_t)r * p->ldr;
            const vi sum = vi_load(p->sums[2 * (r / 16) + v][r % 16]);
            if (!wide) {
                vf_store(acc, add_group(L, sum, sw, msw, mw, record->scale, scaled_sum(L, record, p->half), vf_load(acc)));
                continue;
            }
            const vf b = add_part(sum, record[p->tile].scale, p->tile ? vf_load(part) : vf_zero());
            if (last) vf_store(acc, add_wide(L, b, sw, mw, scaled_sum(L, record, 0), vf_load(acc)));
            else
                vf_store(part, b);
        }
    }
}

/* One strip: acc[r] = sums of rows row0 ... of it. */
KERNEL void sum_tiles(const int layout, const fl_weight *w, const fl_acts *a, int row0, int rows, int strip, tile_space *s,
                      chunk *c, float (*acc)[FL_STRIP]) {
    const fl_layout *L = &FL_LAYOUT[layout];
    const int halves = fl_halves(L), k_bytes = FL_TILE_K / halves, tiles = fl_group_tiles(L);
    const size_t ldx = fl_code_stride(a->K), ldr = fl_group_stride(a->K);
    const uint8_t *packed = w->data + (size_t)strip * fl_strip_bytes(L, w->K);
    configure(s, k_bytes);
    memset(acc, 0, (size_t)rows * sizeof acc[0]);
    for (int k0 = 0; k0 < w->K; k0 += CHUNK) {
        const int depth = w->K - k0 < CHUNK ? w->K - k0 : CHUNK;
        unpack_chunk(L, 1, packed, depth / FL_TILE_K, c);
        packed += (size_t)(depth / L->block) * fl_block_packed(L);
        const uint8_t *next = packed; /* the next chunk is asked for while this one is used */
        const int last = rows / PAIR * PAIR;
        size_t ld_last = 0;
        const uint8_t *x_last = (const uint8_t *)fl_codes(a, row0 + (last < rows ? last : 0)) + k0;
        if (last < rows) x_last = rows_of_pair(s, x_last, ldx, rows - last, depth, &ld_last);
        pending before = {0};
        int turn = 0;
        for (int g = 0; g < depth / k_bytes / tiles; g++)
            for (int m = 0; m < rows; m += PAIR)
                for (int t = 0; t < tiles; t++, turn ^= 1) {
                    const int k = (g * tiles + t) * k_bytes;
                    const uint8_t *b = c->codes[0] + (size_t)(k / 4 * LINE);
                    const uint8_t *x = (m < last ? (const uint8_t *)fl_codes(a, row0 + m) + k0 : x_last) + k;
                    const size_t ld = m < last ? ldx : ld_last;
                    for (int i = 0; i < 4; i++, next += 64) __builtin_prefetch(next, 0, 2);
                    TILE_LOAD(0, start_line, 0);
                    TILE_LOAD(1, start_line, 0);
                    TILE_LOAD(2, start_line, 0);
                    TILE_LOAD(3, start_line, 0);
                    TILE_LOAD(4, x, ld);
                    TILE_LOAD(6, b, LINE);
                    TILE_DOT_S8(0, 4, 6);
                    TILE_LOAD(7, b + 64, LINE);
                    TILE_DOT_S8(1, 4, 7);
                    TILE_LOAD(5, x + 16 * ld, ld);
                    TILE_DOT_S8(2, 5, 6);
                    TILE_DOT_S8(3, 5, 7);
                    if (before.rows) finish_rows(L, &before);
                    TILE_STORE(0, s->sums[turn][0], 64);
                    TILE_STORE(1, s->sums[turn][1], 64);
                    TILE_STORE(2, s->sums[turn][2], 64);
                    TILE_STORE(3, s->sums[turn][3], 64);
                    before = (pending){
                        .rows = rows - m < PAIR ? rows - m : PAIR,
                        .half = halves == 2 ? g % 2 : 0,
                        .tile = t,
                        .sums = s->sums[turn],
                        .sw = c->sw[g],
                        .msw = c->msw[g],
                        .mw = c->mw[g],
                        .record = fl_groups(a, row0 + m) + (k0 + g * tiles * k_bytes) / FL_TILE_K,
                        .ldr = ldr,
                        .acc = acc + m,
                        .part = s->part,
                    };
                }
        if (before.rows) finish_rows(L, &before);
    }
}

#define TILES(layout)                                                                                                          \
    static __attribute__((noinline)) void tiles_##layout(const fl_weight *w, const fl_acts *a, int row0, int rows, int strip,  \
                                                         tile_space *s, chunk *c, float (*acc)[FL_STRIP]) {                    \
        sum_tiles(layout, w, a, row0, rows, strip, s, c, acc);                                                                 \
    }
TILES(FL_Q4_0)
TILES(FL_Q4_1)
TILES(FL_Q5_0)
TILES(FL_Q5_1)
TILES(FL_Q8_0)
TILES(FL_Q2_K)
TILES(FL_Q3_K)
TILES(FL_Q4_K)
TILES(FL_Q5_K)
TILES(FL_Q6_K)
TILES(FL_IQ4_NL)
TILES(FL_IQ4_XS)
TILES(FL_MXFP4)
TILES(FL_INT4G32)
TILES(FL_INT4G64)
TILES(FL_INT4G128)
TILES(FL_INT4G256)
TILES(FL_INT4G64S)
TILES(FL_INT4G128S)
TILES(FL_INT4G256S)
TILES(FL_INT8G64)
TILES(FL_INT8G128)

static void (*const strips[FL_BLOCK_LAYOUTS])(const fl_weight *, const fl_acts *, int, int, int, tile_space *, chunk *,
                                              float (*)[FL_STRIP]) = {
    tiles_FL_Q4_0,      tiles_FL_Q4_1,      tiles_FL_Q5_0,    tiles_FL_Q5_1,     tiles_FL_Q8_0,     tiles_FL_Q2_K,
    tiles_FL_Q3_K,      tiles_FL_Q4_K,      tiles_FL_Q5_K,    tiles_FL_Q6_K,     tiles_FL_IQ4_NL,   tiles_FL_IQ4_XS,
    tiles_FL_MXFP4,     tiles_FL_INT4G32,   tiles_FL_INT4G64, tiles_FL_INT4G128, tiles_FL_INT4G256, tiles_FL_INT4G64S,
    tiles_FL_INT4G128S, tiles_FL_INT4G256S, tiles_FL_INT8G64, tiles_FL_INT8G128};

int FL_NAME(fl_tile_rows)(const fl_acts *a) {
    const int fits = PANEL_BYTES / 2 / (int)(fl_code_stride(a->K) + fl_group_stride(a->K) * sizeof(fl_group)) / PAIR * PAIR;
    return fits < PAIR ? PAIR : fits > MOST_ROWS ? MOST_ROWS : fits;
}

void FL_NAME(fl_tile_sums)(const fl_weight *w, const fl_acts *a, int row0, int rows, int strip, void *space, chunk *c,
                           float (*acc)[FL_STRIP]) {
    strips[w->layout](w, a, row0, rows, strip, space, c, acc);
}

/* ---- bf16 --------------------------------------------------------------------------------------------------------------------- */

void FL_NAME(fl_bf16_sums)(const fl_weight *w, const fl_acts *a, int row0, int rows, int strip, void *space,
                           float (*acc)[FL_STRIP]) {
    static const uint8_t none[64]; /* a line behind the last k */
    tile_space *s = space;
    const size_t ldx = fl_bf16_stride(a->K) * 2;
    const uint8_t *p = w->data + (size_t)strip * (size_t)w->K * 64;
    configure(s, 64);
    memset(acc, 0, (size_t)((rows + PAIR - 1) / PAIR * PAIR) * sizeof acc[0]);
    for (int k0 = 0; k0 < w->K; k0 += CHUNK, p += CHUNK * 64) {
        const int depth = w->K - k0 < CHUNK ? w->K - k0 : CHUNK, steps = (depth + 31) / 32;
        for (int i = 0; i < 16 * steps; i++)
            for (int v = 0; v < VECTORS; v++)
                vb_store(s->pairs[i] + 64 * v,
                         vb_pairs(2 * i < depth ? p + 128 * i : none, 2 * i + 1 < depth ? p + 128 * i + 64 : none, v));
        for (int m = 0; m < rows; m += PAIR) {
            size_t ld;
            const int two = rows - m > 16;
            const uint8_t *x = (const uint8_t *)(fl_bf16s(a, row0 + m) + k0);
            x = rows_of_pair(s, x, ldx, rows - m, 64 * steps, &ld);
            for (int i = 0; i < 8; i++) __builtin_prefetch(p + CHUNK * 64 + (m / PAIR * 8 + i) * 64, 0, 2);
            float *sums = acc[m];
            TILE_LOAD(0, sums, sizeof acc[0]);
            TILE_LOAD(1, sums + 16, sizeof acc[0]);
            if (two) TILE_LOAD(2, sums + 16 * FL_STRIP, sizeof acc[0]);
            if (two) TILE_LOAD(3, sums + 16 * FL_STRIP + 16, sizeof acc[0]);
            for (int i = 0; i < steps; i++) {
                TILE_LOAD(4, x + 64 * i, ld);
                TILE_LOAD(6, s->pairs[16 * i], LINE);
                TILE_DOT_BF16(0, 4, 6);
                TILE_LOAD(7, s->pairs[16 * i] + 64, LINE);
                TILE_DOT_BF16(1, 4, 7);
                if (!two) continue;
                TILE_LOAD(5, x + 16 * ld + 64 * i, ld);
                TILE_DOT_BF16(2, 5, 6);
                TILE_DOT_BF16(3, 5, 7);
            }
            TILE_STORE(0, sums, sizeof acc[0]);
            TILE_STORE(1, sums + 16, sizeof acc[0]);
            if (two) TILE_STORE(2, sums + 16 * FL_STRIP, sizeof acc[0]);
            if (two) TILE_STORE(3, sums + 16 * FL_STRIP + 16, sizeof acc[0]);
        }
    }
}

#else
typedef int fl_no_tiles; /* an empty file is no C */
#endif
