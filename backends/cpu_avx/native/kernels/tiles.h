/* AMX tiles behind a handful of macros: eight registers of 16 rows x 64 bytes, and products of two of them.
 *
 *     TILE_CONFIGURE(c)       the shapes of all tiles, from a tile_config         TILE_RELEASE()        no tiles any more
 *     TILE_LOAD(t, p, ld)     rows from p, ld bytes apart                         TILE_STORE(t, p, ld)  back
 *     TILE_ZERO(t)
 *     TILE_DOT_S8(c, a, b)    c[m][n] += sum of a[m][4k..4k+3] * b[k][4n..4n+3], signed bytes, i32 sums that wrap
 *     TILE_DOT_BF16(c, a, b)  c[m][n] += (sum over k of a[m][2k] * b[k][2n]) + (sum over k of a[m][2k+1] * b[k][2n+1]), fused multiply-adds
 *                             from zero in ascending k, each rounded to f32; denormals are zeros, before and after
 *
 * Tile numbers are literals. With -DFL_EMULATE the same macros are plain C, which does what Intel's manual (SDM volume 2, TDPBSSD,
 * TDPBF16PS, TILELOADD, LDTILECFG) says, and aborts where the processor would raise a fault: so everything around the
 * instructions is tested on machines without them. FL_TILE_FAULT plants a fault into the emulation, for the test of the self-test.
 */
#ifndef FL_TILES_H
#define FL_TILES_H
#include <stdint.h>

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16]; /* of a row of each tile */
    uint8_t rows[16];
} tile_config;

#ifdef FL_EMULATE
#include <stdlib.h>

#include "scalar_fma.h"

static _Thread_local struct {
    int configured, rows[8], bytes[8];
    uint8_t data[8][16][64];
} tiles;

static inline void tile_must(int condition) {
    if (!condition) abort();
}

static inline void TILE_CONFIGURE(const tile_config *c) {
    tile_must(c->palette == 1 && c->start_row == 0);
    for (int i = 0; i < 14; i++) tile_must(c->reserved[i] == 0);
    memset(&tiles, 0, sizeof tiles);
    for (int t = 0; t < 16; t++) {
        tile_must(t < 8 ? c->bytes[t] <= 64 && c->rows[t] <= 16 : !c->bytes[t] && !c->rows[t]);
        tile_must(!c->bytes[t] == !c->rows[t]);
        if (t < 8) tiles.rows[t] = c->rows[t], tiles.bytes[t] = c->bytes[t];
    }
    tiles.configured = 1;
}
static inline void TILE_RELEASE(void) { memset(&tiles, 0, sizeof tiles); }
static inline void TILE_ZERO(int t) {
    tile_must(tiles.configured && tiles.rows[t]);
    memset(tiles.data[t], 0, sizeof tiles.data[t]);
}
static inline void TILE_LOAD(int t, const void *p, size_t ld) {
    TILE_ZERO(t);
    for (int r = 0; r < tiles.rows[t]; r++) memcpy(tiles.data[t][r], (const char *)p + (size_t)r * ld, (size_t)tiles.bytes[t]);
}
static inline void TILE_STORE(int t, void *p, size_t ld) {
    tile_must(tiles.configured && tiles.rows[t]);
    for (int r = 0; r < tiles.rows[t]; r++) memcpy((char *)p + (size_t)r * ld, tiles.data[t][r], (size_t)tiles.bytes[t]);
}
/* Faults of every product: no configuration, one tile twice, shapes that do not belong together. */
static inline void tile_check(int c, int a, int b) {
    tile_must(tiles.configured && c != a && a != b && c != b && tiles.rows[c] && tiles.rows[a] && tiles.rows[b]);
    tile_must(tiles.rows[c] == tiles.rows[a] && tiles.bytes[c] == tiles.bytes[b] && tiles.bytes[a] == 4 * tiles.rows[b]);
    tile_must(tiles.bytes[a] % 4 == 0 && tiles.bytes[c] % 4 == 0);
#if defined(FL_TILE_FAULT) && FL_TILE_FAULT == 2
    abort();
#endif
}
static inline void TILE_DOT_S8(int c, int a, int b) {
    tile_check(c, a, b);
    for (int m = 0; m < tiles.rows[c]; m++)
        for (int k = 0; k < tiles.rows[b]; k++)
            for (int n = 0; n < tiles.bytes[c] / 4; n++) {
                int32_t sum;
                memcpy(&sum, &tiles.data[c][m][4 * n], 4);
                for (int i = 0; i < 4; i++) {
                    const int x = (int8_t)tiles.data[a][m][4 * k + i];
#if defined(FL_TILE_FAULT) && FL_TILE_FAULT == 1
                    sum += (k == 7 && x < 0 ? x + 1 : x) * (int8_t)tiles.data[b][k][4 * n + i];
#else
                    sum = (int32_t)((uint32_t)sum + (uint32_t)(x * (int8_t)tiles.data[b][k][4 * n + i]));
#endif
                }
                memcpy(&tiles.data[c][m][4 * n], &sum, 4);
            }
}
static inline float tile_flushed(float x) { return x < 0x1p-126f && x > -0x1p-126f ? x * 0.0f : x; }
static inline float tile_bf16(const uint8_t *p) {
    const uint32_t bits = (uint32_t)p[0] << 16 | (uint32_t)p[1] << 24;
    float f;
    memcpy(&f, &bits, 4);
    return tile_flushed(f);
}
static inline void TILE_DOT_BF16(int c, int a, int b) {
    tile_check(c, a, b);
    for (int m = 0; m < tiles.rows[c]; m++)
        for (int n = 0; n < tiles.bytes[c] / 4; n++) {
            float part[2] = {0.0f, 0.0f}, sum;
            for (int k = 0; k < tiles.rows[b]; k++)
                for (int i = 0; i < 2; i++)
                    part[i] = tile_flushed(fl_fma(tile_bf16(&tiles.data[a][m][4 * k + 2 * i]),
                                                  tile_bf16(&tiles.data[b][k][4 * n + 2 * i]), part[i]));
            memcpy(&sum, &tiles.data[c][m][4 * n], 4);
            sum = tile_flushed(tile_flushed(sum) + tile_flushed(part[0] + part[1]));
            memcpy(&tiles.data[c][m][4 * n], &sum, 4);
        }
}

#else

/* In asm, because GCC 12's own _tile_loadconfig says that it reads 8 of the 64 bytes, and the compiler drops the rest; here all of the
 * configuration is an operand. It also keeps the order of tile and vector instructions as it is written. */
#define TILE_CONFIGURE(c) __asm__ volatile("ldtilecfg %0" ::"m"(*(const tile_config *)(c)))
#define TILE_RELEASE() __asm__ volatile("tilerelease")
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t:::)
#define TILE_LOAD(t, p, ld) __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t::"r"(p), "r"((size_t)(ld)) : "memory")
#define TILE_STORE(t, p, ld) __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(p), "r"((size_t)(ld)) : "memory")
#define TILE_DOT_S8(c, a, b) __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #c:::)
#define TILE_DOT_BF16(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c:::)
#endif

#endif
