/* The choice of a row that is held to a grammar, made by asking the grammar for single tokens instead of for all of its mask.
 *
 * A mask walks the whole vocabulary; a question about one token is hundreds of times as quick, and the tokens that decide are few: the
 * likeliest of a row is the likeliest of what its mask leaves as soon as the grammar allows it. So the row's best tokens are listed in
 * order without a mask, and are asked for one after the other:
 *
 *   listed   a1 a2 a3 | x1 x2 x3 x4 ...     refused ones are taken out, those behind them move up
 *            allowed  | nobody has asked yet
 *
 * Whatever the grammar says of the x, the row under its mask begins with the a. Their weights, and what the x weigh at most and at
 * least, bound every sum of the rule in `core/sampling.py`; where both bounds draw the same a, that is the token. Sums of weights are
 * integers, and each function of them here grows with its argument, so the token is bit for bit the one that the mask gives.
 *
 * The more evenly a row is spread, the more of its tokens decide. How many it takes at least is known before the first is asked for
 * (fl_held_questions), so where the mask is quicker it is taken at once. Its bits then answer for the whole list (fl_held_mask), without
 * a look at the row. Where the list ends before the token is known, all tokens of a mask that has few are listed (fl_held_few); only under
 * one with more is the row read again.
 *
 * Weights do not quite fall with the logit: exp is rounded, so of two tokens side by side the lower one may weigh more. So min_p leaves
 * no prefix of the order, and no token bounds the weight of those behind it by its own (fl_held_most).
 */
#ifndef FASTLLM_HELD_H
#define FASTLLM_HELD_H

#include "_select.h"

#define FL_LISTED 96     /* tokens of a list, at most */
#define FL_LISTED_ONE 48 /* of a row of which the likeliest is wanted, once the first is refused */
#define FL_SPARE 24      /* more than top_k: some are refused */

enum { FL_UNDECIDED = -2, FL_ASK = -3 };

typedef struct {
    uint64_t keys[FL_LISTED], weights[FL_LISTED]; /* descending; weights: relative to the first, if most > 1 */
    uint64_t end_key, end_weight;                 /* of the last that was listed at first: all others are behind it */
    int64_t count, known;                         /* listed; of them, from the first on: allowed */
    int64_t most;                                 /* tokens that are chosen among: top_k; 1: the likeliest is wanted */
    int whole;                                    /* the row has no other tokens */
    int likeliest;                                /* only the likeliest is listed */
    int free;                                     /* the row is held to nothing */
    int64_t only;                                 /* the one token that may come, n: a wrong one; -1: there are more */
    fl_draw draw;
} fl_held;

/* to [n] = keys [n] in descending order; no two are equal. Each goes behind those that are larger: no branch that nobody could foresee. */
FL_CLONES static void fl_in_order(const uint64_t *keys, int64_t n, uint64_t *to) {
    for (int64_t i = 0; i < n; i++) {
        uint64_t larger = 0;
        for (int64_t j = 0; j < n; j++) larger += keys[j] > keys[i];
        to[larger] = keys[i];
    }
}

/* Weights of the list, relative to its first token. */
static void fl_held_weigh(fl_held *h) {
    if (h->most <= 1 || h->count == 0) return;
    h->draw.top = fl_unorder(fl_key_order(h->keys[0]));
    fl_weigh_keys(h->keys, h->count, h->draw.top, h->draw.inverse, h->weights);
    if (!h->whole) fl_weigh_keys(&h->end_key, 1, h->draw.top, h->draw.inverse, &h->end_weight);
}

/* Lists the best tokens of row r of the sampler, which has no masks; where the likeliest is wanted, that alone, or with `more` those behind it.
 * None are, where no list can decide: of a row that is not finite or of which nothing is left, and of one that is drawn from more tokens than a
 * list has. Where one token alone may come it is the list, if the row's adjustments leave it a weight. */
static void fl_held_open(const float *raw, int64_t n, const fl_sampler *s, int64_t r, int more, fl_scratch *scratch,
                         fl_held *held) {
    int32_t highest, lowest;
    int usable, banned;
    const float *row = fl_adjusted_row(raw, n, s, r, 1, scratch, &highest, &lowest, &usable, &banned);
    const int one = s->temperature[r] <= FL_MIN_TEMPERATURE || s->top_k[r] == 1;
    const int64_t wanted = one ? FL_LISTED_ONE : (int64_t)s->top_k[r] + FL_SPARE;
    held->count = held->known = held->whole = held->likeliest = 0;
    held->most = one ? 1 : s->top_k[r];
    if (!usable || !fl_usable(highest, lowest)) return;
    if (held->only >= 0) {
        const int32_t order = held->only < n ? fl_order(row[held->only]) : FL_MINUS_INF;
        held->most = held->count = held->known = order > FL_MINUS_INF;
        held->keys[0] = fl_key(order, held->only);
        return;
    }
    if (held->most <= 0 || wanted > FL_LISTED) return;
    if (one && !more) {
        held->keys[0] = fl_key(highest, fl_argmax(row, n, scratch->maxima, highest));
        held->count = held->likeliest = 1;
        return;
    }
    held->draw = (fl_draw){0.0f, one ? 0.0f : 1.0f / s->temperature[r], s->u[r], s->top_p[r], fl_least(s->min_p[r]), s->wide};
    held->count = fl_largest(row, n, wanted, scratch->maxima, FL_MINUS_INF + 1, scratch->keys);
    held->whole = held->count < wanted;
    fl_in_order(scratch->keys, held->count, held->keys);
    if (held->count > 0) held->end_key = held->keys[held->count - 1];
    fl_held_weigh(held);
}

/* ids[r] of rows [R, n], held[r] of those that are not free. Returns 0, or -1 without memory. */
static int fl_sample_held(const float *logits, int64_t rows, int64_t n, const fl_sampler *sampler, fl_held *held,
                          int32_t *ids) {
    fl_scratch scratch;
    const int status = fl_scratch_open(&scratch, n);
    for (int64_t r = 0; status == 0 && r < rows; r++) {
        if (held[r].free) {
            ids[r] = fl_sample_row(logits + r * n, n, sampler, r, &scratch);
        } else {
            fl_held_open(logits + r * n, n, sampler, r, 0, &scratch, held + r);
        }
    }
    free(scratch.keys);
    return status;
}

/* Lists what is behind the likeliest token of row r of rows [R, n], which has been refused. Returns as fl_sample_held. */
static int fl_held_more(const float *logits, int64_t n, const fl_sampler *sampler, int64_t r, fl_held *held) {
    fl_scratch scratch;
    const int status = fl_scratch_open(&scratch, n);
    if (status == 0) {
        fl_held_open(logits + r * n, n, sampler, r, 1, &scratch, held);
        held->count--;
        memmove(held->keys, held->keys + 1, (size_t)held->count * sizeof(uint64_t));
    }
    free(scratch.keys);
    return status;
}

/* The tokens up to which the list may be asked for: those that are chosen among. */
FL_INLINE int64_t fl_held_end(const fl_held *h) { return h->count < h->most ? h->count : h->most; }

/* The token that is to be asked for after `further` others, where fl_held_next says FL_ASK. */
FL_INLINE int32_t fl_held_asked(const fl_held *h, int64_t further) { return fl_key_id(h->keys[h->known + further]); }

/* Takes what the grammar says of the first token that nobody has asked for. */
static void fl_held_answer(fl_held *h, int allowed) {
    if (allowed) {
        h->known++;
        return;
    }
    const size_t behind = (size_t)(h->count - h->known - 1) * sizeof(uint64_t);
    memmove(h->keys + h->known, h->keys + h->known + 1, behind);
    memmove(h->weights + h->known, h->weights + h->known + 1, behind);
    h->count--;
    if (h->known == 0) fl_held_weigh(h); /* relative to the largest logit of what is left */
}

/* Takes the answers for the whole list from a mask; NULL: everything is allowed. Tokens that were asked for are in it. */
static void fl_held_mask(fl_held *h, const uint32_t *mask) {
    const uint64_t first = h->keys[0];
    int64_t kept = h->known;
    for (int64_t i = h->known; i < h->count; i++) {
        const int32_t id = fl_key_id(h->keys[i]);
        if (mask != NULL && !(mask[id / 32] >> (id % 32) & 1)) continue;
        if (h->most > 1) h->weights[kept] = h->weights[i];
        h->keys[kept++] = h->keys[i];
    }
    h->count = kept;
    h->known = fl_held_end(h);
    if (kept > 0 && h->keys[0] != first) fl_held_weigh(h);
}

/* Lists all that a mask leaves of row [n], if these are few and finite ones are among them; the row is usable, and has no adjustments. */
static void fl_held_few(fl_held *h, const float *row, int64_t n, const uint32_t *mask) {
    uint64_t keys[FL_LISTED];
    int64_t count = 0;
    for (int64_t w = 0; w < (n + 31) / 32; w++) {
        for (uint32_t bits = mask[w]; bits != 0; bits &= bits - 1) {
            const int64_t id = 32 * w + __builtin_ctz(bits);
            if (id >= n) break;
            const int32_t order = fl_order(row[id]);
            if (order <= FL_MINUS_INF) continue;
            if (count == FL_LISTED) return;
            keys[count++] = fl_key(order, id);
        }
    }
    if (count == 0) return;
    fl_in_order(keys, count, h->keys);
    h->count = count;
    h->whole = 1;
    h->likeliest = 0;
    h->known = fl_held_end(h);
    fl_held_weigh(h);
}

/* top_p keeps the tokens up to that at which the cumulative weight exceeds this. */
FL_INLINE uint64_t fl_held_share(const fl_draw *draw, uint64_t total) {
    return draw->top_p < 1.0 ? fl_share(draw->top_p, total) : total - 1;
}

/* No token behind one of this weight weighs more than this: exp is right to 1e-7 (fl_exp), so twice that is less than 2^-22, and weights
 * are rounded to integers. */
FL_INLINE uint64_t fl_held_most(uint64_t weight) { return weight + (weight >> 22) + 1; }

/* What of a weight min_p leaves. */
FL_INLINE uint64_t fl_held_kept(const fl_draw *draw, uint64_t weight) { return weight >= draw->least ? weight : 0; }

/* The token of the row, if its first `known` tokens may come and nothing is known of the others; else FL_UNDECIDED. */
static int32_t fl_held_decided(const fl_held *h, int64_t known) {
    const int64_t places = h->most - known, rest = h->count - known, listed = rest < places ? rest : places;
    if (known == 0) return FL_UNDECIDED;
    if (h->most == 1) return fl_key_id(h->keys[0]);
    uint64_t least_total = 0; /* of top_k, if all others are refused */
    for (int64_t i = 0; i < known; i++) least_total += h->weights[i];
    uint64_t most_total = least_total, unknown = 0;    /* if all are allowed; unknown: of the others, what min_p leaves */
    for (int64_t i = known; i < known + listed; i++) { /* or others in their places, from further behind */
        const uint64_t most = fl_held_most(h->weights[i]);
        most_total += most;
        unknown += fl_held_kept(&h->draw, most);
    }
    if (!h->whole && listed < places) { /* behind the list */
        const uint64_t most = fl_held_most(h->end_weight), behind = (uint64_t)(places - listed);
        most_total += behind * most;
        unknown += behind * fl_held_kept(&h->draw, most);
    }
    const uint64_t least_share = fl_held_share(&h->draw, least_total), most_share = fl_held_share(&h->draw, most_total);
    uint64_t sum = 0, kept = 0, least_kept = 0, most_kept = 0; /* kept: by top_p and min_p */
    for (int64_t i = 0; i < known; i++) {
        sum += h->weights[i];
        kept += fl_held_kept(&h->draw, h->weights[i]);
        if (least_kept == 0 && sum > least_share) least_kept = kept;
        if (most_kept == 0 && sum > most_share) most_kept = kept;
    }
    if (most_kept == 0) most_kept = kept + unknown;
    const uint64_t first = fl_target(h->draw.u, least_kept), last = fl_target(h->draw.u, most_kept);
    sum = 0;
    for (int64_t i = 0; i < known; i++) {
        sum += fl_held_kept(&h->draw, h->weights[i]);
        if (sum > first) return sum > last ? fl_key_id(h->keys[i]) : FL_UNDECIDED;
    }
    return FL_UNDECIDED;
}

/* The token of the row, if what is known decides it; else FL_ASK, or FL_UNDECIDED where there is no more to ask for. */
static int32_t fl_held_next(const fl_held *h) {
    const int32_t id = fl_held_decided(h, h->known);
    return id >= 0 ? id : h->known < fl_held_end(h) ? FL_ASK : FL_UNDECIDED;
}

/* How many tokens must be asked for before the one of the row is known, if all of them may come; 0: all of the list do not decide. */
static int64_t fl_held_questions(const fl_held *h) {
    const int64_t end = fl_held_end(h);
    int64_t few = h->known, enough = h->known + 1; /* few do not decide, enough do */
    for (int64_t step = 1; enough <= end && fl_held_decided(h, enough) < 0; step *= 2) {
        few = enough;
        enough = enough < end && enough + step > end ? end : enough + step;
    }
    if (enough > end) return 0;
    while (enough - few > 1) {
        const int64_t middle = (few + enough) / 2;
        if (fl_held_decided(h, middle) < 0) {
            few = middle;
        } else {
            enough = middle;
        }
    }
    return enough - h->known;
}

#endif
