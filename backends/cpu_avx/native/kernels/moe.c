/* Experts: which of them a row takes, and the weighted sum of what they give. The products are those of linear.c; moe.c beside
 * program.c says in which order they are made.
 *
 * The scores of a row come from the softmax and sigmoid of the other kernels, so all variants choose alike; sums are sequential.
 */
#include <math.h>
#include <string.h>

#include "ops.h"
#include "vec.h"

/* The largest of c[0..n) that is not taken, the first one among equals; NaN counts as less than everything. −1: all are taken. */
static int32_t best_of(const float *c, const uint8_t *taken, int32_t n) {
    int32_t best = -1;
    for (int32_t e = 0; e < n; e++)
        if (!taken[e] && (best < 0 || c[e] > c[best] || (c[best] != c[best] && c[e] == c[e]))) best = e;
    return best;
}

/* Takes all experts that are not in one of the groups which are kept. choice [E]; worth: scratch [groups]. */
static void drop_groups(const fl_route *r, const float *choice, int32_t E, float *worth, uint8_t *kept, uint8_t *taken) {
    const int32_t size = E / r->groups;
    for (int32_t g = 0; g < r->groups; g++) {
        const float *c = choice + g * size;
        const int32_t first = best_of(c, taken + g * size, size);
        worth[g] = c[first];
        if (r->top2sum) { /* taken is all zeros here, and again when this is done */
            taken[g * size + first] = 1;
            worth[g] += c[best_of(c, taken + g * size, size)];
            taken[g * size + first] = 0;
        }
    }
    memset(kept, 0, (size_t)r->groups);
    for (int32_t i = 0; i < r->keep_groups; i++) kept[best_of(worth, kept, r->groups)] = 1;
    for (int32_t e = 0; e < E; e++) taken[e] = !kept[e / size];
}

/* logits [T][E], bias [E] or NULL -> ids [T][k], weights [T][k] for rows [i0, i1). scratch: 16·E bytes. */
void FL_NAME(fl_route_topk)(const fl_route *r, const fl_view *logits, const float *bias, const fl_view *ids,
                            const fl_view *weights, int64_t i0, int64_t i1, void *scratch) {
    const int32_t E = logits->d2, k = r->k;
    float *score = scratch, *choice = score + E, *worth = choice + E;
    uint8_t *taken = (uint8_t *)(worth + E), *kept = taken + E;
    const fl_view row = {(char *)score, 1, E, 0, 1, E, FL_DT_F32};
    for (int64_t t = i0; t < i1; t++) {
        const fl_view in = {logits->p + t * logits->s0 * 4, 1, E, 0, 1, E, FL_DT_F32};
        if (r->score == FL_SCORE_SOFTMAX) FL_NAME(fl_softmax)(&in, &row, 0, 1);
        else if (r->score == FL_SCORE_SIGMOID)
            FL_NAME(fl_act_mul)(FL_ACT_SIGMOID, &in, NULL, &row, 0, 1, 0, E);
        else
            memcpy(score, in.p, (size_t)E * 4);
        for (int32_t e = 0; e < E; e++) choice[e] = bias ? score[e] + bias[e] : score[e];
        memset(taken, 0, (size_t)E);
        if (r->groups > 1) drop_groups(r, choice, E, worth, kept, taken);
        int32_t *id = (int32_t *)ids->p + t * ids->s0;
        float *w = (float *)weights->p + t * weights->s0;
        for (int32_t j = 0; j < k; j++) {
            id[j] = best_of(choice, taken, E); /* there is one: k experts at least are in the groups that are kept */
            taken[id[j]] = 1;
            w[j] = score[id[j]];
        }
        const fl_view chosen = {(char *)w, 1, k, 0, 1, k, FL_DT_F32};
        if (r->score == FL_SCORE_CHOSEN) FL_NAME(fl_softmax)(&chosen, &chosen, 0, 1);
        float sum = 0.0f;
        for (int32_t j = 0; j < k; j++) sum += w[j];
        for (int32_t j = 0; j < k; j++) w[j] = (r->renorm ? w[j] / (sum + 1e-20f) : w[j]) * r->scale;
    }
}

/* out += weight · y over n columns; the product is rounded, so that all variants give the same bits */
void FL_NAME(fl_add_weighted)(float *out, const float *y, float weight, int32_t n) {
    const f32x8 w = set8(weight);
    int32_t c = 0;
    for (; c + 8 <= n; c += 8) store8(out + c, load8(out + c) + w * load8(y + c));
    for (; c < n; c++) out[c] += weight * y[c];
}
