/* What linear.c asks of other files: many rows of a block format at once (linear_rows.c, and for amx linear_tiles.c), and, in variants of
 * 16 lanes, bf16 weights (linear_bf16.c, linear_tiles.c). */
#ifndef FL_LINEAR_ROWS_H
#define FL_LINEAR_ROWS_H
#include "weights.h"

/* Rows of a panel, and of a block. */
#if FL_LANES == 16
enum { PANEL_ROWS = 6, MOST_ROWS = 192 };
#else
enum { PANEL_ROWS = 4, MOST_ROWS = 128 };
#endif
enum { PANEL_BYTES = 1 << 20, PANEL_CODES = PANEL_ROWS * FL_TILE_K };
#ifdef FL_AMX
enum { ROW_STEP = 32 };
#else
enum { ROW_STEP = PANEL_ROWS };

/* Bytes of 32 k of a panel, and what they hold beside codes: see linear_rows.c. */
FL_INLINE int step_bytes(const int halves) { return PANEL_CODES + 4 * PANEL_ROWS * (1 + halves); }
FL_INLINE const uint8_t *panel_scale(const uint8_t *panel, int r) { return panel + PANEL_CODES + 4 * r; }
FL_INLINE const uint8_t *panel_second(const uint8_t *panel, int half, int r) {
    return panel + PANEL_CODES + 4 * (PANEL_ROWS * (1 + half) + r);
}
FL_INLINE float float_at(const uint8_t *p) {
    float value;
    memcpy(&value, p, 4);
    return value;
}
/* Where panel p of `rows` rows begins: panels differ by one row at most. */
FL_INLINE int first_of(int p, int rows, int count) { return p * rows / count; }
/* Rows of a block, of `rows` in all, whose panels fit, or 0 if not even one panel does. */
int FL_NAME(fl_block_rows)(const fl_layout *L, int rows, int K);
/* Whether panels that were made for one layout serve the other. */
int FL_NAME(fl_same_panels)(const fl_layout *one, const fl_layout *other);
/* Rows [row0, row0 + rows) of a, for weights of this layout, to panels [PANEL_BYTES]. */
void FL_NAME(fl_make_panels)(const fl_layout *L, const fl_acts *a, int row0, int rows, uint8_t *panels);
#if FL_LANES == 16
/* Where the sums of rows go that nothing else is done with: y = sums, or add + sums. ld in floats; add: NULL, or maybe y. */
typedef struct {
    float *y;
    const float *add;
    size_t ldy, ldadd;
} panel_rows;
/* acc[r] = sums of these rows of one strip. target: where row 0 will be written, ldt bytes from one row to the next: asked for while the
 * last sums are made. NULL: nowhere. to: the sums go there instead of to acc; NULL: to acc. */
void FL_NAME(fl_sum_panels)(const fl_weight *w, int rows, int strip, const uint8_t *panels, chunk *c, float (*acc)[FL_STRIP],
                            const char *target, size_t ldt, const panel_rows *to);
#endif
#endif
#ifdef FL_AMX
/* Before the first and after the last of the functions below; space [PANEL_BYTES] is theirs between. */
void FL_NAME(fl_tiles_begin)(void *space);
void FL_NAME(fl_tiles_end)(void *space);
int FL_NAME(fl_tile_rows)(const fl_acts *a); /* rows of a block */
/* acc[r] = sums of these rows of one strip. */
void FL_NAME(fl_tile_sums)(const fl_weight *w, const fl_acts *a, int row0, int rows, int strip, void *space, chunk *c,
                           float (*acc)[FL_STRIP]);
#endif
#if FL_LANES == 16
/* bf16: a row of activations; rows of a block; acc[r] = sums of these rows of one strip, with 16 KB of scratch, amx: the
 * space of its tiles. */
void FL_NAME(fl_to_bf16)(const float *x, int K, uint16_t *out);
int FL_NAME(fl_bf16_rows)(int K);
void FL_NAME(fl_bf16_sums)(const fl_weight *w, const fl_acts *a, int row0, int rows, int strip, void *space,
                           float (*acc)[FL_STRIP]);
#endif

#endif
