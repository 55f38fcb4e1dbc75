/* Recurrences: short_conv and delta_rule. Both read and write a slot of state for each sequence.
 *
 *   short_conv   slot [L − 1][C]: the last inputs, oldest first. Threads share channels, FL_CONV_CHANNELS at a time:
 *                y[c] = Σ_l w[c][l] · x[t − L + 1 + l][c], l ascending. The weights of a block are turned round once for all
 *                rows of all sequences. A decode step is bound by reading the weights [C][L].
 *   delta_rule   slot [H][Dk][Dv]. A column of a head's state depends on that column only, once q, k and the two gates of a
 *                row are known; so a unit of work is (sequence, head, FL_DELTA_COLUMNS columns). It copies its columns to
 *                scratch, [Dk][FL_DELTA_COLUMNS], where they stay in L1 for all rows of the step:
 *
 *                    pass 1   seen = Σ_i k[i] · S[i]                           change = σ(b) · (v − decay · seen)
 *                    pass 2   S[i] = decay · S[i] + k[i] · change              y = Σ_i q[i] · S[i]
 *
 *                A decode step is bound by reading and writing the state, a prompt by the two passes over L1.
 *
 * Sums are lane by lane in ascending order of i, those of even and of odd i apart, one fused multiply-add a term; so neither the number
 * of lanes nor the share of a thread changes a bit, and all variants give the same ones. A row of position 0 does not read the slot.
 */
#include "ops.h"
#include "vec.h"

enum { VECTORS = FL_CONV_CHANNELS / 8, COLUMNS = FL_DELTA_COLUMNS / FL_WIDE };

FL_INLINE f32x8 some8(const float *p, int n) { return n >= 8 ? load8(p) : load8_part(p, n); }
FL_INLINE void put8(float *p, f32x8 v, int n) {
    if (n >= 8) store8(p, v);
    else
        store8_part(p, v, n);
}

void FL_NAME(fl_short_conv)(const fl_conv *a, int32_t c0, int32_t c1) {
    const int32_t C = a->x.d2, L = a->weight.d2, n = c1 - c0;
    float turned[FL_CONV_TAPS][FL_CONV_CHANNELS]; /* [L][channels of this block] */
    memset(turned, 0, sizeof *turned * (size_t)L);
    for (int32_t c = 0; c < n; c++)
        for (int32_t l = 0; l < L; l++) turned[l][c] = ((const float *)a->weight.p)[(c0 + c) * a->weight.s0 + l];
    for (int64_t s = 0; s < a->sequences; s++) {
        const int64_t first = a->query_start[s], rows = a->query_start[s + 1] - first;
        if (rows <= 0) continue;
        float *history = (float *)(a->state + a->state_slot[s] * a->slot_bytes) + c0; /* [L - 1][C] */
        const int fresh = a->positions[first] == 0;
        for (int64_t t = 0; t < rows; t++) {
            float *y = (float *)a->out.p + (first + t) * a->out.s0 + c0;
            if (t >= L - 1 && n == FL_CONV_CHANNELS) { /* most rows of a prompt: all inputs are rows of this step */
                const float *x = (const float *)a->x.p + (first + t - (L - 1)) * a->x.s0 + c0;
                for (int v = 0; v < VECTORS; v++) {
                    f32x8 sum = set8(0.0f);
                    for (int32_t l = 0; l < L; l++) sum = sum + load8(turned[l] + 8 * v) * load8(x + l * a->x.s0 + 8 * v);
                    store8(y + 8 * v, sum);
                }
                continue;
            }
            for (int v = 0; v < VECTORS && 8 * v < n; v++) {
                const int some = n - 8 * v;
                f32x8 sum = set8(0.0f);
                for (int32_t l = 0; l < L; l++) {
                    const int64_t at = t - (L - 1) + l;
                    f32x8 x = set8(0.0f);
                    if (at >= 0) x = some8((const float *)a->x.p + (first + at) * a->x.s0 + c0 + 8 * v, some);
                    else if (!fresh)
                        x = some8(history + (L - 1 + at) * C + 8 * v, some);
                    sum = sum + load8(turned[l] + 8 * v) * x;
                }
                put8(y + 8 * v, sum, some);
            }
        }
        for (int32_t l = 0; l < L - 1; l++) { /* the last L - 1 inputs; row l + rows of the old ones is not yet overwritten */
            const int64_t at = rows - (L - 1) + l;
            if (at >= 0) memcpy(history + l * C, (const float *)a->x.p + (first + at) * a->x.s0 + c0, (size_t)n * 4);
            else if (fresh)
                memset(history + l * C, 0, (size_t)n * 4);
            else
                memcpy(history + l * C, history + (l + rows) * C, (size_t)n * 4);
        }
    }
}

/* y = x · factor / sqrt(Σ x² + eps), [n]; the sum in 8 lanes. */
static void normalise(const float *x, int32_t n, float eps, double factor, float *y) {
    f32x8 sum = set8(0.0f);
    int32_t i = 0;
    for (; i + 8 <= n; i += 8) sum = sum + load8(x + i) * load8(x + i);
    if (i < n) sum = sum + load8_part(x + i, n - i) * load8_part(x + i, n - i);
    const float scale = (float)(factor / sqrt((double)sum8(sum) + (double)eps));
    for (i = 0; i < n; i++) y[i] = x[i] * scale;
}

static double softplus(double x) { return x > 30.0 ? x : log1p(exp(x)); } /* what is left out is below 1e-13 */

/* S[i] = decay · S[i] + k · change; adds q · S[i] to a sum. */
FL_INLINE wide_sum delta_step(wide_sum sum, float *at, float k, float q, float decay, wide change) {
    const wide s = wide_value(wide_fma(wide_sum_of(wide_f32(at) * decay), k, change));
    wide_store(at, s);
    return wide_fma(sum, q, s);
}

/* One row on the columns in S [Dk][FL_DELTA_COLUMNS]; value, out: [FL_DELTA_COLUMNS]. */
FL_INLINE void delta_row(float *S, int32_t Dk, const float *q, const float *k, float decay, float share, const float *value,
                         float *out) {
    wide_sum even[COLUMNS], odd[COLUMNS];
    wide change[COLUMNS];
    for (int j = 0; j < COLUMNS; j++) even[j] = odd[j] = wide_sum_of((wide){0});
    int32_t i = 0;
    for (; i + 2 <= Dk; i += 2)
        for (int j = 0; j < COLUMNS; j++) {
            const float *at = S + (int64_t)i * FL_DELTA_COLUMNS + j * FL_WIDE;
            even[j] = wide_fma(even[j], k[i], wide_f32(at));
            odd[j] = wide_fma(odd[j], k[i + 1], wide_f32(at + FL_DELTA_COLUMNS));
        }
    for (int j = 0; i < Dk && j < COLUMNS; j++)
        even[j] = wide_fma(even[j], k[i], wide_f32(S + (int64_t)i * FL_DELTA_COLUMNS + j * FL_WIDE));
    for (int j = 0; j < COLUMNS; j++) {
        change[j] = (wide_f32(value + j * FL_WIDE) - (wide_value(even[j]) + wide_value(odd[j])) * decay) * share;
        even[j] = odd[j] = wide_sum_of((wide){0});
    }
    for (i = 0; i + 2 <= Dk; i += 2)
        for (int j = 0; j < COLUMNS; j++) {
            float *at = S + (int64_t)i * FL_DELTA_COLUMNS + j * FL_WIDE;
            even[j] = delta_step(even[j], at, k[i], q[i], decay, change[j]);
            odd[j] = delta_step(odd[j], at + FL_DELTA_COLUMNS, k[i + 1], q[i + 1], decay, change[j]);
        }
    for (int j = 0; i < Dk && j < COLUMNS; j++)
        even[j] = delta_step(even[j], S + (int64_t)i * FL_DELTA_COLUMNS + j * FL_WIDE, k[i], q[i], decay, change[j]);
    for (int j = 0; j < COLUMNS; j++) wide_store(out + j * FL_WIDE, wide_value(even[j]) + wide_value(odd[j]));
}

void FL_NAME(fl_delta_rule)(const fl_delta *d, int64_t sequence, int32_t head, int32_t column, void *scratch) {
    const int64_t first = d->query_start[sequence], end = d->query_start[sequence + 1];
    const int32_t Dk = d->query.d2, Dv = d->value.d2, H = d->value.d1, n = Dv - column, j = head / (H / d->query.d1);
    const size_t some = (size_t)(n < FL_DELTA_COLUMNS ? n : FL_DELTA_COLUMNS) * sizeof(float);
    if (first >= end) return;
    float *S = scratch, *q = S + (int64_t)Dk * FL_DELTA_COLUMNS, *k = q + Dk, value[FL_DELTA_COLUMNS], out[FL_DELTA_COLUMNS];
    float *slot =
        (float *)(d->state + d->state_slot[sequence] * d->slot_bytes) + (int64_t)head * Dk * Dv + column; /* [Dk][Dv] */
    memset(S, 0, (size_t)Dk * FL_DELTA_COLUMNS * sizeof *S);
    memset(value, 0, sizeof value);
    if (d->positions[first] != 0)
        for (int32_t i = 0; i < Dk; i++) memcpy(S + (int64_t)i * FL_DELTA_COLUMNS, slot + (int64_t)i * Dv, some);
    const double rate = exp((double)d->a_log[head]);
    for (int64_t t = first; t < end; t++) {
        const float a = ((const float *)d->a.p)[t * d->a.s0 + head], b = ((const float *)d->b.p)[t * d->b.s0 + head];
        const float decay = (float)exp(-rate * softplus((double)a + (double)d->dt_bias[head]));
        const float share = (float)(1.0 / (1.0 + exp(-(double)b)));
        normalise((const float *)d->query.p + t * d->query.s0 + j * d->query.s1, Dk, d->eps, 1.0 / sqrt((double)Dk), q);
        normalise((const float *)d->key.p + t * d->key.s0 + j * d->key.s1, Dk, d->eps, 1.0, k);
        memcpy(value, (const float *)d->value.p + t * d->value.s0 + head * d->value.s1 + column, some);
        delta_row(S, Dk, q, k, decay, share, value, out);
        memcpy((float *)d->out.p + t * d->out.s0 + head * d->out.s1 + column, out, some);
    }
    for (int32_t i = 0; i < Dk; i++) memcpy(slot + (int64_t)i * Dv, S + (int64_t)i * FL_DELTA_COLUMNS, some);
}
