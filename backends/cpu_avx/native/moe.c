/* The phases of moe.h. */
#include "moe.h"

#include <string.h>

enum {
    ALIGN = 64,
    STRIP_FLOATS = 32768, /* of a block of results between two products: 128 KB stay in L2 */
    TOGETHER = 5
};
/* Rows of an expert from which on gate and up take turns strip by strip: fewer rows are bound by reading, and two places read in turns
 * are slower than one after the other. */

static int64_t aligned(int64_t nbytes) { return (nbytes + ALIGN - 1) / ALIGN * ALIGN; }

int64_t fl_moe_prepared(int kind, int64_t pairs, int64_t experts, int64_t K) {
    const int64_t active = experts < pairs ? experts : pairs;
    /* one more row for each expert: rows may be rounded up to a block of rows */
    return (int64_t)fl_prepared_bytes(kind, pairs, K) + active * ((int64_t)fl_prepared_bytes(kind, 1, K) + ALIGN);
}

static int64_t block_floats(int64_t T) { return T * FL_STRIP > STRIP_FLOATS ? T * FL_STRIP : STRIP_FLOATS; }

int64_t fl_moe_scratch(int64_t T, int64_t top_k, int64_t experts) {
    return aligned((int64_t)fl_linear_scratch()) + 2 * aligned(block_floats(T) * 4) + aligned(T * top_k * 4) +
           aligned((experts + 1) * 4);
}

/* Pairs sorted by expert: pair order[i] = row · k + choice, of expert e for start[e] <= i < start[e + 1], rows ascending. Every thread
 * sorts for itself, which is quicker than waiting for one that does. An id that is no expert's is left out, and
 * so is one that its row has named before: the buffers hold each row once for an expert. */
static int named_before(const int32_t *row, int64_t c) {
    for (int64_t i = 0; i < c; i++)
        if (row[i] == row[c]) return 1;
    return 0;
}

typedef struct {
    const fl_moe *m;
    int64_t T, k;
    const int32_t *ids;
    int64_t ids_stride;
    int32_t *order, *start;
    float *first, *second; /* blocks of results */
    void *linear;
    int one; /* a single row: all experts share its prepared form */
} job;

static void sort_pairs(job *j) {
    const int64_t E = j->m->experts;
    memset(j->start, 0, (size_t)(E + 1) * 4);
    for (int64_t t = 0; t < j->T; t++)
        for (int64_t c = 0; c < j->k; c++) {
            const int32_t e = j->ids[t * j->ids_stride + c];
            if (e >= 0 && e < E && !named_before(j->ids + t * j->ids_stride, c)) j->start[e + 1]++;
        }
    for (int64_t e = 0; e < E; e++) j->start[e + 1] += j->start[e];
    for (int64_t t = 0; t < j->T; t++)
        for (int64_t c = 0; c < j->k; c++) {
            const int32_t e = j->ids[t * j->ids_stride + c];
            if (e >= 0 && e < E && !named_before(j->ids + t * j->ids_stride, c))
                j->order[j->start[e]++] = (int32_t)(t * j->k + c);
        }
    for (int64_t e = E; e > 0; e--) j->start[e] = j->start[e - 1]; /* moved on by their counts above */
    j->start[0] = 0;
}

/* Prepared rows of the next expert: `at` walks through the buffer, expert after expert. */
static fl_acts acts_of(const fl_moe_part *part, int32_t rows, int64_t K, int64_t *at) {
    const fl_acts a = {(int32_t)part->kind, rows, (int32_t)K, (uint8_t *)(intptr_t)(part->acts + *at)};
    *at += aligned((int64_t)fl_prepared_bytes(a.kind, rows, K));
    return a;
}

static fl_weight weight_of(const fl_moe_part *part, int64_t e, int64_t N, int64_t K) {
    return (fl_weight){(int32_t)part->layout, (int32_t)N, (int32_t)K,
                       (const uint8_t *)(intptr_t)(part->data + e * part->stride)};
}

static const float *bias_of(const fl_moe_part *part, int64_t e) {
    return part->bias ? (const float *)(intptr_t)part->bias + e * part->bias_stride : NULL;
}

static void prepare_inputs(const job *j, const fl_linear_ops *ops, const fl_moe_part *part, const fl_view *x, int64_t i0,
                           int64_t i1) {
    int64_t at = 0;
    if (j->one) {
        fl_acts a = acts_of(part, 1, x->d2, &at);
        if (i0 == 0 && i1 > 0) ops->prepare(&a, (const float *)x->p, (size_t)x->s0, 0, 1);
        return;
    }
    for (int64_t e = 0; e < j->m->experts; e++) {
        const int32_t first = j->start[e], rows = j->start[e + 1] - first;
        if (!rows) continue;
        fl_acts a = acts_of(part, rows, x->d2, &at);
        for (int32_t r = 0; r < rows; r++)
            if (first + r >= i0 && first + r < i1)
                ops->prepare(&a, (const float *)x->p + j->order[first + r] / j->k * x->s0, 0, r,
                             r + 1); /* stride 0: this row */
    }
}

static void prepare_hidden(const job *j, const fl_linear_ops *ops, int64_t i0, int64_t i1) {
    int64_t at = 0;
    for (int64_t e = 0; e < j->m->experts; e++) {
        const int64_t first = j->start[e], rows = j->start[e + 1] - first, F = j->m->width;
        if (!rows) continue;
        fl_acts a = acts_of(&j->m->down, (int32_t)rows, F, &at);
        const int64_t a0 = i0 > first ? i0 - first : 0, a1 = i1 - first < rows ? i1 - first : rows;
        if (a0 < a1) ops->prepare(&a, (const float *)(intptr_t)j->m->hidden + first * F, (size_t)F, (int)a0, (int)a1);
    }
}

/* Columns [32 · strip, …) of x · Wᵀ, `count` strips, to y [rows][32 · count]. */
static void product(const job *j, const fl_linear_ops *ops, const fl_weight *w, const fl_acts *a, const float *bias, float *y,
                    int64_t strip, int64_t count) {
    float *base = (float *)((intptr_t)y - (intptr_t)(strip * FL_STRIP * 4)); /* the kernel adds the strip's column */
    const fl_target to = {.bias = bias, .y = base, .ldy = (size_t)(count * FL_STRIP), .act = FL_ACT_NONE};
    ops->linear(w, NULL, a, &to, (int)strip, (int)(strip + count), j->linear);
}

/* Strips at a time, of which `rows` rows fit in a block. */
static int64_t strips_of_block(int64_t rows, int64_t left) {
    const int64_t fits = STRIP_FLOATS / FL_STRIP / rows;
    return fits < 1 ? 1 : fits < left ? fits : left;
}

static void gate_and_up(const job *j, const fl_kernels *k, int64_t C, int64_t strip0, int64_t strip1) {
    const fl_moe *m = j->m;
    const int64_t F = m->width;
    const int same_input = m->up.data && m->up.acts == m->gate.acts && F % FL_STRIP == 0;
    int64_t gate_at = 0, up_at = 0;
    for (int64_t e = 0; e < m->experts; e++) {
        const int64_t first = j->start[e], rows = j->start[e + 1] - first;
        if (!rows) continue;
        if (j->one) gate_at = up_at = 0;
        const fl_acts xg = acts_of(&m->gate, (int32_t)rows, C, &gate_at), xu = acts_of(&m->up, (int32_t)rows, C, &up_at);
        const fl_weight gate = weight_of(&m->gate, e, F, C), up = weight_of(&m->up, e, F, C);
        if (same_input && rows >= TOGETHER) {
            const fl_target to = {.bias = bias_of(&m->gate, e),
                                  .up_bias = bias_of(&m->up, e),
                                  .y = (float *)(intptr_t)m->hidden + first * F,
                                  .ldy = (size_t)F,
                                  .act = (int32_t)m->act};
            if (strip0 < strip1) k->linear->linear(&gate, &up, &xg, &to, (int)strip0, (int)strip1, j->linear);
            continue;
        }
        for (int64_t s = strip0, n; s < strip1; s += n) {
            n = strips_of_block(rows, strip1 - s);
            const int64_t c0 = s * FL_STRIP, columns = F - c0 < n * FL_STRIP ? F - c0 : n * FL_STRIP;
            product(j, k->linear, &gate, &xg, bias_of(&m->gate, e), j->first, s, n);
            if (m->up.data) product(j, k->linear, &up, &xu, bias_of(&m->up, e), j->second, s, n);
            const fl_view g = {(char *)j->first, rows, n * FL_STRIP, 0, 1, (int32_t)columns, FL_DT_F32};
            const fl_view u = {(char *)j->second, rows, n * FL_STRIP, 0, 1, (int32_t)columns, FL_DT_F32};
            const fl_view h = {
                (char *)(intptr_t)(m->hidden + (first * F + c0) * 4), rows, F, 0, 1, (int32_t)columns, FL_DT_F32};
            k->act_mul((int32_t)m->act, &g, m->up.data ? &u : NULL, &h, 0, rows, 0, (int32_t)columns);
        }
    }
}

static void down(const job *j, const fl_kernels *k, const fl_view *weights, const fl_view *out, int64_t strip0,
                 int64_t strip1) {
    const fl_moe *m = j->m;
    const int64_t C = out->d2, c0 = strip0 * FL_STRIP, c1 = strip1 * FL_STRIP < C ? strip1 * FL_STRIP : C;
    float *y = (float *)out->p;
    for (int64_t t = 0; t < j->T && c0 < c1; t++) memset(y + t * out->s0 + c0, 0, (size_t)(c1 - c0) * 4);
    int64_t at = 0;
    for (int64_t e = 0; e < m->experts; e++) {
        const int64_t first = j->start[e], rows = j->start[e + 1] - first;
        if (!rows) continue;
        const fl_acts a = acts_of(&m->down, (int32_t)rows, m->width, &at);
        const fl_weight w = weight_of(&m->down, e, C, m->width);
        for (int64_t s = strip0, n; s < strip1; s += n) {
            n = strips_of_block(rows, strip1 - s);
            const int64_t from = s * FL_STRIP, columns = C - from < n * FL_STRIP ? C - from : n * FL_STRIP;
            product(j, k->linear, &w, &a, bias_of(&m->down, e), j->first, s, n);
            for (int64_t r = 0; r < rows; r++) {
                const int64_t pair = j->order[first + r], t = pair / j->k;
                const float weight = ((const float *)weights->p)[t * weights->s0 + pair % j->k];
                k->add_weighted(y + t * out->s0 + from, j->first + r * n * FL_STRIP, weight, (int32_t)columns);
            }
        }
    }
}

void fl_moe_run(const fl_program *p, const fl_instruction *ins, int thread, int threads, char *scratch) {
    const fl_moe *m = (const fl_moe *)(intptr_t)ins->i[0];
    const fl_view *x = &ins->v[0], *ids = &ins->v[1], *weights = &ins->v[2], *out = &ins->v[3];
    const fl_kernels *k = p->kernels;
    job j = {m, x->rows, m->top_k, (const int32_t *)ids->p, ids->s0, NULL, NULL, NULL, NULL, scratch, x->rows == 1};
    const int64_t block = aligned(block_floats(m->rows) * 4);
    j.first = (float *)(scratch + aligned((int64_t)fl_linear_scratch())), j.second = (float *)((char *)j.first + block);
    j.start = (int32_t *)((char *)j.second + block), j.order = (int32_t *)((char *)j.start + aligned((m->experts + 1) * 4));
    if (!j.T) return;
    sort_pairs(&j);
    const int64_t pairs = j.start[m->experts], i0 = pairs * thread / threads, i1 = pairs * (thread + 1) / threads;
    prepare_inputs(&j, k->linear, &m->gate, x, i0, i1);
    if (m->up.data && m->up.acts != m->gate.acts) prepare_inputs(&j, k->linear, &m->up, x, i0, i1);
    fl_pool_barrier(p->pool);
    const int64_t wide = (m->width + FL_STRIP - 1) / FL_STRIP, high = (out->d2 + FL_STRIP - 1) / FL_STRIP;
    gate_and_up(&j, k, x->d2, wide * thread / threads, wide * (thread + 1) / threads);
    fl_pool_barrier(p->pool);
    prepare_hidden(&j, k->linear, i0, i1);
    fl_pool_barrier(p->pool);
    down(&j, k, weights, out, high * thread / threads, high * (thread + 1) / threads);
}
