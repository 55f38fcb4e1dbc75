/* The linear kernels of one variant: y = x * W^T for packed weights (layouts.h has the layouts and the exact arithmetic).
 *
 * Few rows, "decode": limited by reading the weights once. Codes go from packed planes to registers and are used for DIRECT rows; a tile
 * is 0.3-1.1 KB of consecutive memory, and the lines PREFETCH bytes ahead are asked for while it is computed, one at a time between the
 * multiply-adds: in a burst they fill the queue of misses, and what is computed next waits for a place in it. More rows take the same
 * strip again, out of L2, up to the number of rows where unpacking once is quicker (DIRECT_ROWS).
 *
 * Many rows, "prefill": limited by multiply-adds. A chunk of 256 k x 32 outputs is unpacked once to one byte per code, in L1
 *     chunk.codes: [tile of 32 k][step of 4 k][32 rows][4 k]   8 KB          chunk.sw, msw, mw: [group][32 rows]
 * and multiplied with all rows of a row block, 4 rows x 2 vectors of outputs at a time, so that one load of weights serves 4 rows
 * and one load of activations 2 vectors. The f32 sums of the row block wait in L1/L2 between chunks.
 *
 * On AVX2 pairs of products are added in 16 bits for as long as the largest code allows (8, 4 or 2 steps), which leaves two
 * instructions for 32 multiply-adds; signed 8-bit codes need four. AVX-512 VNNI: one for 64.
 *
 * Variants of 16 lanes take many rows of block formats elsewhere: in linear_rows.c, with AMX in linear_tiles.c; and bf16 weights, of any
 * number of rows, in linear_bf16.c and linear_tiles.c.
 */
#include "linear_rows.h"
#include "ops.h"
#include "weights.h"

enum { DEPTH = 64, DIRECT_ROWS = FL_WIDEN ? 4 : 16, PREFETCH = 7168 };

enum { ROW_BLOCK = MOST_ROWS, DIRECT = PANEL_ROWS };

typedef struct {
    chunk weights;
    _Alignas(64) float acc[ROW_BLOCK][FL_STRIP], up[ROW_BLOCK][FL_STRIP]; /* sums of a strip, of w and of `up` */
    _Alignas(64) float values[DEPTH][FL_STRIP]; /* a block of 64 k as f32: plain formats and exact mode */
    _Alignas(64) uint8_t panels[PANEL_BYTES];
    int made_for; /* the layout that the panels were made for, -1: none */
    int plain;    /* sums of panels go to y as they are, or to add + sums */
    const fl_target *to;
} scratch_space;

typedef char scratch_is_large_enough[sizeof(scratch_space) <= FL_LINEAR_SCRATCH ? 1 : -1];

/* ---- activations ------------------------------------------------------------------------------------------------------ */

/* One group of 32 values: codes and record. The largest magnitude is found in integers, so that NaN and infinity come out on top. */
FL_INLINE void quantise_group(const float *x, int8_t *codes, fl_group *g) {
    enum { size = FL_KIND_INT8 };
    int32_t sum[2] = {0, 0};
    uint32_t top = 0;
#if FL_LANES > 4 && !defined(FL_PLAIN_C)
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i m = _mm256_setzero_si256();
    for (int i = 0; i < size; i += 8)
        m = _mm256_max_epi32(m, _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x + i)), magnitude));
    __m128i m4 = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    m4 = _mm_max_epi32(m4, _mm_shuffle_epi32(m4, 0x4e));
    m4 = _mm_max_epi32(m4, _mm_shuffle_epi32(m4, 0xb1));
    top = (uint32_t)_mm_cvtsi128_si32(m4);
#else
    for (int i = 0; i < size; i++) {
        const uint32_t bits = fl_float_bits(x[i]) & 0x7fffffff;
        top = bits > top ? bits : top;
    }
#endif
    const float amax = fl_bits_float(top);
    if (top >= 0x7f800000) {
        memset(codes, 0, (size_t)size);
        g->scale = g->scaled = fl_bits_float(0x7fc00000), g->sum[0] = g->sum[1] = 0;
        return;
    }
    const float inverse = amax < 0x1p-60f ? 0.0f : 127.0f / amax;
#if FL_LANES > 4 && !defined(FL_PLAIN_C)
    __m256i c[4];
    UNROLL for (int i = 0; i < 4; i++) c[i] =
        _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), _mm256_set1_ps(inverse)));
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(c[0], c[1]), _mm256_packs_epi32(c[2], c[3]));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((__m256i *)codes, _mm256_permutevar8x32_epi32(bytes, order));
    const __m256i sums = _mm256_hadd_epi32(_mm256_add_epi32(c[0], c[1]), _mm256_add_epi32(c[2], c[3]));
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1)); /* a a b b */
    s = _mm_hadd_epi32(s, s);
    sum[0] = _mm_cvtsi128_si32(s), sum[1] = _mm_extract_epi32(s, 1);
#else
    for (int i = 0; i < size; i++) { /* adding 1.5 * 2^23 rounds to an integer, half to even */
        const int32_t code = (int32_t)(fl_float_bits(x[i] * inverse + FL_MAGIC) - FL_MAGIC_BITS);
        codes[i] = (int8_t)code;
        sum[i / 16] += code;
    }
#endif
    g->scale = amax / 127.0f;
    g->sum[0] = sum[0], g->sum[1] = sum[1];
    g->scaled = g->scale * (float)(sum[0] + sum[1]);
}

static void prepare(fl_acts *a, const float *x, size_t ldx, int row0, int row1) {
    for (int row = row0; row < row1; row++) {
        const float *in = x + (size_t)row * ldx;
        int8_t *codes = fl_codes(a, row);
        fl_group *record = fl_groups(a, row);
        if (a->kind == FL_KIND_F32) memcpy(fl_floats(a, row), in, (size_t)a->K * 4);
#if FL_LANES == 16
        else if (a->kind == FL_KIND_BF16)
            FL_NAME(fl_to_bf16)(in, a->K, fl_bf16s(a, row));
#endif
        else
            for (int k = 0; k < a->K; k += FL_KIND_INT8) quantise_group(in + k, codes + k, record++);
    }
}

/* ---- results ------------------------------------------------------------------------------------------------------------ */

/* acc[r] of rows row0.. of a strip, bias and activation included, to where they go. */
static void store_strip(const fl_target *to, int row0, int rows, int strip, int N, float (*acc)[FL_STRIP]) {
    const int n0 = strip * FL_STRIP, count = N - n0 < FL_STRIP ? N - n0 : FL_STRIP;
    if (to->codes) {
        for (int r = 0; r < rows; r++)
            quantise_group(acc[r], fl_codes(to->codes, row0 + r) + n0, fl_groups(to->codes, row0 + r) + strip);
        return;
    }
    for (int r = 0; r < rows; r++) {
        float *y = to->y + (size_t)(row0 + r) * to->ldy + n0;
        const float *add = to->add ? to->add + (size_t)(row0 + r) * to->ldadd + n0 : NULL;
        if (count == FL_STRIP)
            for (int v = 0; v < FL_STRIP; v += FL_LANES) {
                const vf a = vf_load(acc[r] + v);
                vf_store(y + v, add ? vf_add(vf_load(add + v), a) : a);
            }
        else
            for (int n = 0; n < count; n++) y[n] = add ? add[n] + acc[r][n] : acc[r][n];
    }
}

FL_INLINE int is_full(const fl_weight *w, int strip) { return (strip + 1) * FL_STRIP <= w->N; }

static void add_bias(const float *bias, int rows, int strip, int N, float (*acc)[FL_STRIP]) {
    const int n0 = strip * FL_STRIP, count = N - n0 < FL_STRIP ? N - n0 : FL_STRIP;
    if (bias)
        for (int r = 0; r < rows; r++)
            for (int n = 0; n < count; n++) acc[r][n] += bias[n0 + n];
}

/* ---- integer sums of one tile -------------------------------------------------------------------------------------------- */

/* sum[r][v] = FL_SUM_BITS - zero * (sum of x over the tile, or over one half of it for groups of 16), for R rows and NV vectors: what
 * tile_sums adds the products to. */
PART void start_sums(const fl_layout *L, const int R, const int NV, const int half, const fl_group *record, size_t ldr,
                     vi sum[DIRECT][4]) {
    const int zero = zero_of(L);
    UNROLL for (int r = 0; r < R; r++) {
        const int32_t *s = record[r * ldr].sum;
        const int32_t start = FL_SUM_BITS - zero * (L->group == 16 ? s[half] : s[0] + s[1]);
        UNROLL for (int v = 0; v < NV; v++) sum[r][v] = vi_set1(start);
    }
}

/* ---- few rows ------------------------------------------------------------------------------------------------------------ */

/* Where the results of a strip go, and the bytes from one row to the next: what is asked for while the sums are made. */
typedef struct {
    char *p; /* NULL: nothing is asked for */
    size_t ld;
} places;

static places places_of(const scratch_space *c, float (*acc)[FL_STRIP], int row0, int strip) {
    const fl_target *to = c->to;
    if (acc != c->acc) return (places){NULL, 0}; /* those of `up` go where those of w do */
    if (to->codes) return (places){(char *)(fl_codes(to->codes, row0) + strip * FL_STRIP), fl_code_stride(to->codes->K)};
    return (places){(char *)(to->y + (size_t)row0 * to->ldy + strip * FL_STRIP), to->ldy * sizeof(float)};
}

/* out[r] = sums of R rows from row0 on, of one strip. alone: they are all rows, and each tile asks for the one PREFETCH ahead of it.
 * Else the strip is read again out of L2, and each tile asks for `lines` of the next strip, from `ahead` on; the first blocks ask for the
 * places of the results. */
KERNEL void decode(const int layout, const int R, const int alone, const fl_weight *w, const fl_acts *a, int row0, int strip,
                   float (*out)[FL_STRIP], const uint8_t *ahead, int lines, places to) {
    const fl_layout *L = &FL_LAYOUT[layout];
    const int NV = R == 1 ? MOST_VECTORS : 2, tile_bytes = fl_tile_bytes(L);
    const int tiles = L->block / FL_TILE_K, group = fl_group_tiles(L);
    const size_t ldx = fl_code_stride(a->K), ldr = fl_group_stride(a->K);
    const int blocks = w->K / L->block;
    const uint8_t *p = w->data + (size_t)strip * fl_strip_bytes(L, w->K);
    const int8_t *x = fl_codes(a, row0);
    const fl_group *record = fl_groups(a, row0);
    vsum acc[DIRECT][VECTORS];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < VECTORS; v++) acc[r][v] = vsum_of(vf_zero());
    for (int b = 0; b < blocks; b++) {
        if (!alone && b < R && to.p)
            __builtin_prefetch(to.p + b * to.ld, 1, 2), __builtin_prefetch(to.p + b * to.ld + 64, 1, 2);
        const uint8_t *head = p;
        float dm[2 * FL_STRIP];
        convert_head(L, head, dm);
        if (alone) UNROLL for (int at = 0; at < L->head; at += 64) __builtin_prefetch(head + PREFETCH + at, 0, 3);
        p += L->head;
        for (int t = 0; t < tiles; t += group, p += group * tile_bytes, x += group * FL_TILE_K, record += group) {
            UNROLL for (int half = 0; half < fl_halves(L); half++) UNROLL_COLUMNS for (int v0 = 0; v0 < VECTORS; v0 += NV) {
                vi sum[DIRECT][4];
                vsum part[DIRECT][4]; /* b of layouts.h */
                if (group > 1)
                    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < NV; v++) part[r][v] = vsum_of(vf_zero());
                for (int i = 0; i < group; i++) {
                    const uint8_t *tile = p + i * tile_bytes;
                    start_sums(L, R, NV, half, record + i, ldr, sum);
                    if (!alone && half == 0 && v0 == 0)
                        for (int at = 0; at < lines; at++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
                    tile_sums(L, 1, R, NV, tile, half, v0, x + i * FL_TILE_K, ldx, sum,
                              alone && v0 == 0 ? tile + PREFETCH : NULL);
                    if (group > 1)
                        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < NV; v++) part[r][v] =
                            add_part(sum[r][v], record[r * ldr + (size_t)i].scale, part[r][v]);
                }
                UNROLL for (int v = 0; v < NV; v++) {
                    vf sw, mw;
                    scales_of(L, head, dm, p, half, v0 + v, &sw, &mw);
                    const vf msw = vf_mul(sw, vf_set1(-FL_MAGIC));
                    UNROLL for (int r = 0; r < R; r++) {
                        vsum *to_acc = &acc[r][v0 + v];
                        const fl_group *first = record + r * ldr;
                        const float scaled = L->minimum ? scaled_sum(L, first, half) : 0.0f;
                        *to_acc = group > 1 ? add_wide(L, part[r][v], sw, mw, scaled, *to_acc)
                                            : add_group(L, sum[r][v], sw, msw, mw, first->scale, scaled, *to_acc);
                    }
                }
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < VECTORS; v++)
        vf_store(out[r] + FL_LANES * v, vsum_float(acc[r][v]));
}

/* Sums of up to ROW_BLOCK rows straight from packed memory, DIRECT at a time or, so that all passes are nearly equal, less. */
KERNEL void decode_rows(const int layout, const fl_weight *w, const fl_acts *a, int row0, int rows, int strip,
                        float (*out)[FL_STRIP], places to) {
    const fl_layout *L = &FL_LAYOUT[layout];
    const int passes = (rows + DIRECT - 1) / DIRECT, tiles = w->K / FL_TILE_K;
    const size_t bytes = fl_strip_bytes(L, w->K);
    const int lines = (int)((bytes / 64 + (size_t)(passes * tiles) - 1) / (size_t)(passes * tiles));
    const uint8_t *ahead = w->data + (size_t)(strip + 1) * bytes;
    const int alone = FL_WIDEN || passes == 1; /* FL_WIDEN: rows <= DIRECT_ROWS = DIRECT */
    for (int p = 0, r = 0, end; p < passes; p++, r = end, ahead += 64 * lines * tiles) {
        end = (p + 1) * rows / passes;
#define PASS(R)                                                                                                                \
    if (end - r == R) {                                                                                                        \
        if (alone) decode(layout, R, 1, w, a, row0 + r, strip, out + r, NULL, 0, to);                                          \
        else                                                                                                                   \
            decode(layout, R, 0, w, a, row0 + r, strip, out + r, ahead, lines, to);                                            \
    }
        PASS(1)
        PASS(2)
        PASS(3)
        PASS(4)
#if FL_LANES == 16
        PASS(5)
        PASS(6)
#endif
#undef PASS
        if (to.p) to.p += (size_t)(end - r) * to.ld;
    }
}

#if FL_LANES != 16 /* linear_rows.c has those of 16 lanes */
/* ---- many rows ------------------------------------------------------------------------------------------------------------- */

/* As start_sums, of a panel; minima have codes that count from zero. */
PART void panel_starts(const fl_layout *L, const int R, const int NV, const int half, const uint8_t *panel, vi sum[DIRECT][4]) {
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < NV; v++) sum[r][v] =
        vi_set1(L->minimum ? FL_SUM_BITS : load_i32(panel_second(panel, half, r)));
}

/* R rows of one chunk: acc[r] += its groups. panel: of these rows (linear_rows.c), at the chunk's first k. next, lines: the packed chunk
 * behind this one, of which each tile asks for some lines, so that reading it takes as long as computing. */
KERNEL void multiply_chunk(const fl_layout *L, const int R, int tiles, const chunk *c, const uint8_t *first,
                           float (*acc)[FL_STRIP], const uint8_t *next, int lines) {
    enum { NV = 2 };
    for (int v0 = 0; v0 < VECTORS; v0 += NV) {
        const uint8_t *panel = first;
        vsum sums[PANEL_ROWS][NV];
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < NV; v++) sums[r][v] =
            vsum_of(vf_load(acc[r] + FL_LANES * (v0 + v)));
        for (int t = 0; t < tiles; t++, panel += step_bytes(fl_halves(L))) {
            if (v0 == 0)
                for (int i = 0; i < lines; i++, next += 64) __builtin_prefetch(next, 0, 3);
            UNROLL for (int half = 0; half < fl_halves(L); half++) {
                const int g = t * fl_halves(L) + half;
                vi sum[DIRECT][4];
                panel_starts(L, R, NV, half, panel, sum);
                tile_sums(L, 0, R, NV, c->codes[t], half, v0, (const int8_t *)panel, FL_TILE_K, sum, NULL);
                UNROLL for (int v = 0; v < NV; v++) {
                    const int n = FL_LANES * (v0 + v);
                    const vf sw = vf_load(c->sw[g] + n), msw = vf_load(c->msw[g] + n), mw = vf_load(c->mw[g] + n);
                    UNROLL for (int r = 0; r < R; r++) sums[r][v] =
                        add_group(L, sum[r][v], sw, msw, mw, float_at(panel_scale(panel, r)),
                                  float_at(panel_second(panel, half, r)), sums[r][v]);
                }
            }
        }
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < NV; v++)
            vf_store(acc[r] + FL_LANES * (v0 + v), vsum_float(sums[r][v]));
    }
}

/* The same for weights in wide groups. All f32 sums wait in memory: those of a tile leave them no registers. One flat loop: inside of two,
 * compilers spread the sums of a tile. */
KERNEL void multiply_wide(const fl_layout *L, const int R, int tiles, const chunk *c, const uint8_t *first,
                          float (*acc)[FL_STRIP], const uint8_t *next, int lines) {
    enum { NV = 2 };
    const int group = fl_group_tiles(L);
    for (int v0 = 0; v0 < VECTORS; v0 += NV) {
        const uint8_t *panel = first;
        _Alignas(64) float part[PANEL_ROWS][NV][FL_LANES] = {{{0}}}; /* b of layouts.h */
        for (int t = 0; t < tiles; t++, panel += step_bytes(1)) {
            vi sum[DIRECT][4];
            if (v0 == 0)
                for (int line = 0; line < lines; line++, next += 64) __builtin_prefetch(next, 0, 3);
            panel_starts(L, R, NV, 0, panel, sum);
            tile_sums(L, 0, R, NV, c->codes[t], 0, v0, (const int8_t *)panel, FL_TILE_K, sum, NULL);
            UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < NV; v++) {
                const vsum before = vsum_of(vf_load(part[r][v]));
                vf_store(part[r][v], vsum_float(add_part(sum[r][v], float_at(panel_scale(panel, r)), before)));
            }
            if ((t + 1) % group) continue;
            UNROLL for (int v = 0; v < NV; v++) {
                const int n = FL_LANES * (v0 + v), g = t / group;
                const vf sw = vf_load(c->sw[g] + n), mw = vf_load(c->mw[g] + n);
                UNROLL for (int r = 0; r < R; r++) {
                    const vsum b = vsum_of(vf_load(part[r][v])), before = vsum_of(vf_load(acc[r] + n));
                    vf_store(acc[r] + n, vsum_float(add_wide(L, b, sw, mw, float_at(panel_second(panel, 0, r)), before)));
                    vf_store(part[r][v], vf_zero());
                }
            }
        }
    }
}

/* acc[r] = sums of rows of one strip, whose panels were made before. */
KERNEL void prefill(const int layout, const fl_weight *w, int rows, int strip, scratch_space *c, float (*acc)[FL_STRIP]) {
    const fl_layout *L = &FL_LAYOUT[layout];
    const uint8_t *packed = w->data + (size_t)strip * fl_strip_bytes(L, w->K), *panel = c->panels;
    const int count = (rows + PANEL_ROWS - 1) / PANEL_ROWS;
    memset(acc, 0, (size_t)rows * sizeof acc[0]);
    for (int k0 = 0; k0 < w->K; k0 += CHUNK) {
        const int tiles = (w->K - k0 < CHUNK ? w->K - k0 : CHUNK) / FL_TILE_K, calls = count * tiles;
        const int size = tiles * FL_TILE_K / L->block * (int)fl_block_packed(L), lines = (size / 64 + calls - 1) / calls;
        const uint8_t *next = packed + size, *end = next + size;
        unpack_chunk(L, 0, packed, tiles, &c->weights);
        packed = next;
        for (int p = 0; p < count; p++, panel += tiles * step_bytes(fl_halves(L)), next += 64 * lines * tiles) {
            const int r = first_of(p, rows, count), own = first_of(p + 1, rows, count) - r, n = next < end ? lines : 0;
#define MULTIPLY(R)                                                                                                            \
    if (own == R) {                                                                                                            \
        if (fl_group_tiles(L) > 1) multiply_wide(L, R, tiles, &c->weights, panel, acc + r, next, n);                           \
        else                                                                                                                   \
            multiply_chunk(L, R, tiles, &c->weights, panel, acc + r, next, n);                                                 \
    }
            MULTIPLY(1)
            MULTIPLY(2)
            MULTIPLY(3)
            MULTIPLY(4)
#undef MULTIPLY
        }
    }
}

#endif

/* ---- f32 sums: plain formats, and every format in exact mode --------------------------------------------------------------- */

FL_INLINE vf plain_of(const int layout, const uint8_t *p) {
    return layout == FL_F32 ? vf_load((const float *)(const void *)p) : layout == FL_F16 ? vf_halves(p) : vf_bf16s(p);
}

/* acc[r] = sums of R <= 4 rows of a strip: blocks of 64 k straight from memory. */
KERNEL void stream_plain(const int layout, const int R, const fl_weight *w, const fl_acts *a, int row0, int strip,
                         float (*acc)[FL_STRIP]) {
    enum { MOST = 4 };
    const int size = layout == FL_F32 ? 4 : 2, NV = R <= 2 ? MOST_VECTORS : 2;
    const size_t ldx = fl_float_stride(a->K);
    const float *x = fl_floats(a, row0);
    memset(acc, 0, (size_t)R * sizeof acc[0]);
    for (int k0 = 0; k0 < w->K; k0 += DEPTH) {
        const int depth = w->K - k0 < DEPTH ? w->K - k0 : DEPTH;
        UNROLL_COLUMNS for (int v0 = 0; v0 < VECTORS; v0 += NV) {
            const uint8_t *p =
                w->data + ((size_t)strip * (size_t)w->K + (size_t)k0) * (size_t)(size * FL_STRIP) + size * FL_LANES * v0;
            vf b[MOST][4];
            UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < NV; v++) b[r][v] = vf_zero();
            for (int k = 0; k < depth; k++, p += size * FL_STRIP) {
                if (v0 == 0) {
                    __builtin_prefetch(p + PREFETCH, 0, 3);
                    if (size == 4) __builtin_prefetch(p + PREFETCH + 64, 0, 3);
                }
                UNROLL for (int v = 0; v < NV; v++) {
                    const vf values = plain_of(layout, p + size * FL_LANES * v);
                    UNROLL for (int r = 0; r < R; r++) b[r][v] = vf_mac(vf_set1(x[r * ldx + k0 + k]), values, b[r][v]);
                }
            }
            UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < NV; v++) {
                float *sum = acc[r] + FL_LANES * (v0 + v);
                vf_store(sum, vf_add(vf_load(sum), b[r][v]));
            }
        }
    }
}

/* c->values = k0 .. k0+depth of a strip, decoded. */
KERNEL void decode_values(const int layout, const uint8_t *strip, int k0, int depth, scratch_space *c) {
    const fl_layout *L = &FL_LAYOUT[layout];
    if (layout >= FL_BLOCK_LAYOUTS) {
        const int size = layout == FL_F32 ? 4 : 2;
        const uint8_t *p = strip + (size_t)k0 * (size_t)(size * FL_STRIP);
        for (int k = 0; k < depth; k++, p += size * FL_STRIP)
            for (int v = 0; v < VECTORS; v++) vf_store(c->values[k] + FL_LANES * v, plain_of(layout, p + size * FL_LANES * v));
        return;
    }
    const int halves = fl_halves(L), steps = FL_TILE_K / 4 / halves;
    for (int t = 0; t < depth / FL_TILE_K; t++) {
        const uint8_t *head = strip + (size_t)((k0 + FL_TILE_K * t) / L->block) * fl_block_packed(L);
        const uint8_t *tile = head + L->head + (k0 + FL_TILE_K * t) % L->block / FL_TILE_K * fl_tile_bytes(L);
        float dm[2 * FL_STRIP];
        convert_head(L, head, dm);
        UNROLL for (int half = 0; half < halves; half++) UNROLL for (int v = 0; v < VECTORS; v++) {
            vf sw, mw;
            scales_of(L, head, dm, tile, half, v, &sw, &mw);
            UNROLL for (int j = half * steps; j < (half + 1) * steps; j++) {
                vb q = codes_of(L, tile, j, v); /* unsigned from here, signed layouts too */
                if (L->is_signed && FL_WIDEN) q = vb_xor(q, vb_set1(0x80));
                UNROLL for (int i = 0; i < 4; i++) {
                    const vi byte = vi_and(vi_shr(vi_of_bytes(q), 8 * i), vi_set1(255));
                    vf value = vf_mul(sw, vf_ints(vi_sub(byte, vi_set1(L->is_signed ? 128 : L->zero))));
                    if (L->minimum) value = vf_add(value, mw);
                    vf_store(c->values[FL_TILE_K * t + 4 * j + i] + FL_LANES * v, value);
                }
            }
        }
    }
}

/* R rows: acc[r] += block of 64 k. */
KERNEL void multiply_values(const int R, int depth, const scratch_space *c, const float *x, size_t ldx,
                            float (*acc)[FL_STRIP]) {
    enum { NV = 2 };
    for (int v0 = 0; v0 < VECTORS; v0 += NV) {
        vf b[4][NV];
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < NV; v++) b[r][v] = vf_zero();
        for (int k = 0; k < depth; k++) {
            vf values[NV];
            UNROLL for (int v = 0; v < NV; v++) values[v] = vf_load(c->values[k] + FL_LANES * (v0 + v));
            UNROLL for (int r = 0; r < R; r++) {
                const vf xs = vf_set1(x[r * ldx + k]);
                UNROLL for (int v = 0; v < NV; v++) b[r][v] = vf_mac(xs, values[v], b[r][v]);
            }
        }
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < NV; v++) {
            float *sum = acc[r] + FL_LANES * (v0 + v);
            vf_store(sum, vf_add(vf_load(sum), b[r][v]));
        }
    }
}

KERNEL void prefill_values(const int layout, const fl_weight *w, const fl_acts *a, int row0, int rows, int strip,
                           scratch_space *c, float (*acc)[FL_STRIP]) {
    const size_t ldx = fl_float_stride(a->K), strip_bytes = fl_strip_bytes(&FL_LAYOUT[layout], w->K);
    memset(acc, 0, (size_t)rows * sizeof acc[0]);
    for (int k0 = 0; k0 < w->K; k0 += DEPTH) {
        const int depth = w->K - k0 < DEPTH ? w->K - k0 : DEPTH;
        decode_values(layout, w->data + (size_t)strip * strip_bytes, k0, depth, c);
        for (int r = 0; r < rows; r += 4) {
            const float *x = fl_floats(a, row0 + r) + k0;
            if (rows - r >= 4) multiply_values(4, depth, c, x, ldx, acc + r);
            else if (rows - r == 3)
                multiply_values(3, depth, c, x, ldx, acc + r);
            else if (rows - r == 2)
                multiply_values(2, depth, c, x, ldx, acc + r);
            else
                multiply_values(1, depth, c, x, ldx, acc + r);
        }
    }
}

/* ---- one function per layout ------------------------------------------------------------------------------------------------ */

/* Row n decoded as the file says; scalar: a step needs a row per token. */
KERNEL void unpack_values(const int layout, const fl_weight *w, int64_t n, float *out) {
    const fl_layout *L = &FL_LAYOUT[layout];
    const uint8_t *p = w->data + (size_t)(n / FL_STRIP) * fl_strip_bytes(L, w->K);
    const int r = (int)(n % FL_STRIP);
    if (layout >= FL_BLOCK_LAYOUTS) {
        for (int k = 0; k < w->K; k++) {
            const uint8_t *value = p + ((size_t)k * FL_STRIP + (size_t)r) * (size_t)L->block_bytes;
            if (layout == FL_F32) memcpy(out + k, value, 4);
            else
                out[k] = layout == FL_F16 ? fl_half(fl_u16(value)) : fl_bits_float((uint32_t)fl_u16(value) << 16);
        }
        return;
    }
    for (int b = 0; b < w->K / L->block; b++, p += fl_block_packed(L))
        for (int t = 0; t < L->block / FL_TILE_K; t++, out += FL_TILE_K) {
            const uint8_t *tile = p + L->head + t * fl_tile_bytes(L);
            for (int half = 0; half < fl_halves(L); half++) {
                const int count = FL_TILE_K / fl_halves(L);
                float sw, mw;
                fl_scales(L, p, tile, r, half, &sw, &mw);
                for (int k = half * count; k < (half + 1) * count; k++) {
                    out[k] = sw * (float)(fl_code(L, tile, r, k) - L->zero);
                    if (L->minimum) out[k] += mw;
                }
            }
        }
}

/* acc[r] = sums of `rows` <= ROW_BLOCK rows of one strip. */
#if FL_LANES == 16 /* what comes here are few rows, or such long ones that no panel holds them */
#define BLOCK_SUMS(layout) decode_rows(layout, w, a, row0, rows, strip, acc, places_of(c, acc, row0, strip))
#else
#define BLOCK_SUMS(layout)                                                                                                     \
    if (c->made_for >= 0) prefill(layout, w, rows, strip, c, acc);                                                             \
    else                                                                                                                       \
        decode_rows(layout, w, a, row0, rows, strip, acc, places_of(c, acc, row0, strip))
#endif
#define INT8_LAYOUT(layout)                                                                                                    \
    static void sums_##layout(const fl_weight *w, const fl_acts *a, int row0, int rows, int strip, scratch_space *c,           \
                              float (*acc)[FL_STRIP]) {                                                                        \
        if (a->kind == FL_KIND_F32) {                                                                                          \
            prefill_values(layout, w, a, row0, rows, strip, c, acc);                                                           \
            return;                                                                                                            \
        }                                                                                                                      \
        BLOCK_SUMS(layout);                                                                                                    \
    }                                                                                                                          \
    static void unpack_##layout(const fl_weight *w, int64_t n, float *out) { unpack_values(layout, w, n, out); }

#define PLAIN_LAYOUT(layout)                                                                                                   \
    static void sums_##layout(const fl_weight *w, const fl_acts *a, int row0, int rows, int strip, scratch_space *c,           \
                              float (*acc)[FL_STRIP]) {                                                                        \
        if (rows == 1) stream_plain(layout, 1, w, a, row0, strip, acc);                                                        \
        else if (rows == 2)                                                                                                    \
            stream_plain(layout, 2, w, a, row0, strip, acc);                                                                   \
        else if (rows == 3)                                                                                                    \
            stream_plain(layout, 3, w, a, row0, strip, acc);                                                                   \
        else if (rows == 4)                                                                                                    \
            stream_plain(layout, 4, w, a, row0, strip, acc);                                                                   \
        else                                                                                                                   \
            prefill_values(layout, w, a, row0, rows, strip, c, acc);                                                           \
    }                                                                                                                          \
    static void unpack_##layout(const fl_weight *w, int64_t n, float *out) { unpack_values(layout, w, n, out); }

INT8_LAYOUT(FL_Q4_0)
INT8_LAYOUT(FL_Q4_1)
INT8_LAYOUT(FL_Q5_0)
INT8_LAYOUT(FL_Q5_1)
INT8_LAYOUT(FL_Q8_0)
INT8_LAYOUT(FL_Q2_K)
INT8_LAYOUT(FL_Q3_K)
INT8_LAYOUT(FL_Q4_K)
INT8_LAYOUT(FL_Q5_K)
INT8_LAYOUT(FL_Q6_K)
INT8_LAYOUT(FL_IQ4_NL)
INT8_LAYOUT(FL_IQ4_XS)
INT8_LAYOUT(FL_MXFP4)
INT8_LAYOUT(FL_INT4G32)
INT8_LAYOUT(FL_INT4G64)
INT8_LAYOUT(FL_INT4G128)
INT8_LAYOUT(FL_INT4G256)
INT8_LAYOUT(FL_INT4G64S)
INT8_LAYOUT(FL_INT4G128S)
INT8_LAYOUT(FL_INT4G256S)
INT8_LAYOUT(FL_INT8G64)
INT8_LAYOUT(FL_INT8G128)
PLAIN_LAYOUT(FL_F32)
PLAIN_LAYOUT(FL_F16)
PLAIN_LAYOUT(FL_BF16)

#define EVERY_LAYOUT(f)                                                                                                        \
    {f##FL_Q4_0,     f##FL_Q4_1,     f##FL_Q5_0,     f##FL_Q5_1,     f##FL_Q8_0,      f##FL_Q2_K,      f##FL_Q3_K,             \
     f##FL_Q4_K,     f##FL_Q5_K,     f##FL_Q6_K,     f##FL_IQ4_NL,   f##FL_IQ4_XS,    f##FL_MXFP4,     f##FL_INT4G32,          \
     f##FL_INT4G64,  f##FL_INT4G128, f##FL_INT4G256, f##FL_INT4G64S, f##FL_INT4G128S, f##FL_INT4G256S, f##FL_INT8G64,          \
     f##FL_INT8G128, f##FL_F32,      f##FL_F16,      f##FL_BF16}

static void (*const sums[FL_LAYOUTS])(const fl_weight *, const fl_acts *, int, int, int, scratch_space *,
                                      float (*)[FL_STRIP]) = EVERY_LAYOUT(sums_);
static void (*const unpackers[FL_LAYOUTS])(const fl_weight *, int64_t, float *) = EVERY_LAYOUT(unpack_);

/* Rows of a block that stay in half of L2 (256 KB) while the strips pass by. */
static int rows_per_block(const fl_acts *a) {
    const size_t row =
        a->kind == FL_KIND_F32 ? fl_float_stride(a->K) * 4 : fl_code_stride(a->K) + fl_group_stride(a->K) * sizeof(fl_group);
    const size_t fits = 262144 / row / 4 * 4;
    return fits < 32 ? 32 : fits > ROW_BLOCK ? ROW_BLOCK : (int)fits;
}

#ifdef FL_AMX
enum { TILE_ROWS = 16 }; /* from which on tiles are used */
/* Rows of a block if these layers take tiles, else 0. */
static int rows_of_many(const fl_weight *w, const fl_weight *up, const fl_acts *a) {
    (void)w, (void)up;
    return a->kind < FL_KIND_INT8 || a->rows < TILE_ROWS ? 0 : FL_NAME(fl_tile_rows)(a);
}

static void many_sums(const fl_weight *w, const fl_acts *a, int row0, int rows, int strip, scratch_space *c,
                      float (*acc)[FL_STRIP]) {
    FL_NAME(fl_tile_sums)(w, a, row0, rows, strip, c->panels, &c->weights, acc);
}
#else
/* Rows of a block if these layers take panels, else 0. */
static int rows_of_many(const fl_weight *w, const fl_weight *up, const fl_acts *a) {
    if (a->kind < FL_KIND_INT8 || a->rows <= DIRECT_ROWS) return 0;
    const int rows = FL_NAME(fl_block_rows)(&FL_LAYOUT[w->layout], a->rows, a->K);
    const int other = up ? FL_NAME(fl_block_rows)(&FL_LAYOUT[up->layout], a->rows, a->K) : rows;
    return rows < other ? rows : other;
}

static void many_sums(const fl_weight *w, const fl_acts *a, int row0, int rows, int strip, scratch_space *c,
                      float (*acc)[FL_STRIP]) {
    if (c->made_for < 0 || !FL_NAME(fl_same_panels)(&FL_LAYOUT[c->made_for], &FL_LAYOUT[w->layout]))
        FL_NAME(fl_make_panels)(&FL_LAYOUT[w->layout], a, row0, rows, c->panels);
    c->made_for = w->layout;
#if FL_LANES == 16
    const places to = places_of(c, acc, row0, strip);
    const fl_target *t = c->to;
    panel_rows y = {t->y, t->add, t->ldy, t->ldadd};
    if (c->plain) {
        y.y += (size_t)row0 * y.ldy + (size_t)strip * FL_STRIP;
        if (y.add) y.add += (size_t)row0 * y.ldadd + (size_t)strip * FL_STRIP;
    }
    FL_NAME(fl_sum_panels)(w, rows, strip, c->panels, &c->weights, acc, to.p, to.ld, c->plain && is_full(w, strip) ? &y : NULL);
#else
    sums[w->layout](w, a, row0, rows, strip, c, acc);
#endif
}

#endif

#if FL_LANES == 16
static void bf16_sums(const fl_weight *w, const fl_acts *a, int row0, int rows, int strip, scratch_space *c,
                      float (*acc)[FL_STRIP]) {
    FL_NAME(fl_bf16_sums)(w, a, row0, rows, strip, c->panels, acc);
}
#endif

static void linear(const fl_weight *w, const fl_weight *up, const fl_acts *a, const fl_target *to, int strip0, int strip1,
                   void *scratch) {
    scratch_space *c = scratch;
    void (*w_sums)(const fl_weight *, const fl_acts *, int, int, int, scratch_space *, float (*)[FL_STRIP]) = sums[w->layout];
    void (*up_sums)(const fl_weight *, const fl_acts *, int, int, int, scratch_space *, float (*)[FL_STRIP]) =
        up ? sums[up->layout] : NULL;
    int step = rows_per_block(a);
    c->to = to, c->plain = 0;
    const int many = rows_of_many(w, up, a);
    if (many) step = many, w_sums = up_sums = many_sums;
#if FL_LANES == 16
#ifndef FL_AMX
    c->plain = many && !up && !to->bias && !to->codes && to->act == FL_ACT_NONE;
#endif
    if (a->kind == FL_KIND_BF16) step = FL_NAME(fl_bf16_rows)(a->K), w_sums = up_sums = bf16_sums;
#ifdef FL_AMX
    FL_NAME(fl_tiles_begin)(c->panels);
#endif
#endif
    for (int row0 = 0; row0 < a->rows; row0 += step) {
        const int rows = a->rows - row0 < step ? a->rows - row0 : step;
        c->made_for = -1;
        for (int s = strip0; s < strip1; s++) {
            w_sums(w, a, row0, rows, s, c, c->acc);
            if (c->plain && is_full(w, s)) continue;
            add_bias(to->bias, rows, s, w->N, c->acc);
            if (up) {
                up_sums(up, a, row0, rows, s, c, c->up);
                add_bias(to->up_bias, rows, s, w->N, c->up);
            }
            if (to->act != FL_ACT_NONE) {
                /* as one long row: rows of two vectors each would take twice the time */
                const fl_view gate = {(char *)c->acc, 1, 0, 0, 1, rows * FL_STRIP, FL_DT_F32};
                const fl_view other = {(char *)c->up, 1, 0, 0, 1, rows * FL_STRIP, FL_DT_F32};
                FL_NAME(fl_act_mul)(to->act, &gate, up ? &other : NULL, &gate, 0, 1, 0, rows * FL_STRIP);
            }
            store_strip(to, row0, rows, s, w->N, c->acc);
        }
    }
#ifdef FL_AMX
    FL_NAME(fl_tiles_end)(c->panels);
#endif
}

static void unpack_row(const fl_weight *w, int64_t n, float *out) { unpackers[w->layout](w, n, out); }

const fl_linear_ops FL_NAME(fl_linear_table) = {prepare, linear, unpack_row, FL_LANES == 16};
