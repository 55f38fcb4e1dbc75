/* Sampling: one id of each row of logits, log-probabilities, and the counter-based random numbers that decide.
 *
 * The rule is written in `core/sampling.py`. It needs the tokens in descending order, but a vocabulary has 262,144 of them, so
 * nothing here sorts a row. Three ideas make that possible without changing a single result:
 *
 *   weights are integers    w = round(exp(t) * 2^40), so a sum of weights is exact in any order, and a cumulative sum can be
 *                           found by counting mass per bucket instead of walking a sorted list
 *   a key orders tokens     the upper half is the logit as an ordered integer, the lower half the inverted id: keys are unique,
 *                           and descending keys are descending logits with ties to the lower id
 *   chunk maxima            the maximum of every 128 logits is kept from the first pass. The k-th largest of them bounds the
 *                           k-th largest logit from below, so few chunks are read again
 *
 *   row --chunk maxima--> greedy
 *                    \--> k candidates ---------> weights --> top_p cut --> min_p --> draw
 *                    \--> mass per bucket of t ------------^ (only the bucket of the cut and that of the draw are read again)
 *
 * exp is a polynomial in a fixed order of f32 operations (no contraction, no library), so all machines give the same ids. What
 * limits the speed is the first pass (memory) for greedy and top_k, exp for the rest.
 */
#ifndef FASTLLM_SELECT_H
#define FASTLLM_SELECT_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "_codecs.h"
#include "_select_512.h"

#define FL_CHUNK 128
#define FL_GROUP 16     /* of a chunk, that are looked at together */
#define FL_BUCKETS 1024 /* of width 1/32 in t; the last one holds everything below: weights of zero */
#define FL_HEAD 256     /* buckets that are counted singly at first: t above -8 */
#define FL_FEW 32
#define FL_ONE_WEIGHT 1099511627776.0 /* 2^40, the weight of the largest logit */
#define FL_MIN_TEMPERATURE 1e-5f
#define FL_PLUS_INF 0x7f800000
#define FL_MINUS_INF (-0x7f800001)

/* ---- random numbers ------------------------------------------------------------------------------------------------------ */

/* Philox4x32-10 (Salmon et al. 2011): 128 random bits from a counter and a key. */
static void fl_philox(const uint32_t *counter, const uint32_t *key, uint32_t *out) {
    uint32_t a = counter[0], b = counter[1], c = counter[2], d = counter[3], k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        const uint64_t left = 0xD2511F53ULL * a, right = 0xCD9E8D57ULL * c;
        a = (uint32_t)(right >> 32) ^ b ^ k0;
        b = (uint32_t)right;
        c = (uint32_t)(left >> 32) ^ d ^ k1;
        d = (uint32_t)left;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = a, out[1] = b, out[2] = c, out[3] = d;
}

/* out[i] in [0, 1): 53 bits of Philox at counter (position, sequence), key seed. */
static void fl_uniform(uint64_t seed, uint64_t sequence, const uint64_t *position, double *out, int64_t n) {
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    for (int64_t i = 0; i < n; i++) {
        const uint32_t counter[4] = {(uint32_t)position[i], (uint32_t)(position[i] >> 32), (uint32_t)sequence,
                                     (uint32_t)(sequence >> 32)};
        uint32_t bits[4];
        fl_philox(counter, key, bits);
        out[i] = (double)(((uint64_t)bits[0] << 32 | bits[1]) >> 11) * 0x1p-53;
    }
}

/* ---- keys ---------------------------------------------------------------------------------------------------------------- */

/* A logit as an integer of the same order; minus zero equals zero; NaN lies outside FL_MINUS_INF .. FL_PLUS_INF. */
FL_INLINE int32_t fl_order(float value) {
    const int32_t bits = (int32_t)fl_as_bits(value + 0.0f);
    return bits ^ (bits >> 31 & 0x7fffffff);
}

FL_INLINE float fl_unorder(int32_t order) { return fl_as_float((uint32_t)(order ^ (order >> 31 & 0x7fffffff))); }

FL_INLINE uint64_t fl_key(int32_t order, int64_t id) {
    return (uint64_t)((uint32_t)order ^ 0x80000000u) << 32 | (0xffffffffu - (uint32_t)id);
}

FL_INLINE int32_t fl_key_order(uint64_t key) { return (int32_t)((uint32_t)(key >> 32) ^ 0x80000000u); }

FL_INLINE int32_t fl_key_id(uint64_t key) { return (int32_t)(0xffffffffu - (uint32_t)key); }

FL_INLINE int64_t fl_chunks(int64_t n) { return (n + FL_CHUNK - 1) / FL_CHUNK; }

/* maxima[c] = largest order in chunk c; highest and lowest of the row. */
FL_CLONES static void fl_chunk_maxima(const float *row, int64_t n, int32_t *maxima, int32_t *highest, int32_t *lowest) {
    int32_t top = INT32_MIN, bottom = INT32_MAX;
    for (int64_t c = 0; c < n / FL_CHUNK; c++) {
        const float *x = row + c * FL_CHUNK;
        int32_t high = INT32_MIN, low = INT32_MAX;
        for (int i = 0; i < FL_CHUNK; i++) {
            const int32_t order = fl_order(x[i]);
            high = order > high ? order : high;
            low = order < low ? order : low;
        }
        maxima[c] = high;
        top = high > top ? high : top;
        bottom = low < bottom ? low : bottom;
    }
    if (n % FL_CHUNK != 0) {
        int32_t high = INT32_MIN;
        for (int64_t i = n - n % FL_CHUNK; i < n; i++) {
            const int32_t order = fl_order(row[i]);
            high = order > high ? order : high;
            bottom = order < bottom ? order : bottom;
        }
        maxima[n / FL_CHUNK] = high;
        top = high > top ? high : top;
    }
    *highest = top;
    *lowest = bottom;
}

/* A distribution exists: no NaN, no +inf, not everything -inf. */
FL_INLINE int fl_usable(int32_t highest, int32_t lowest) {
    return highest > FL_MINUS_INF && highest < FL_PLUS_INF && lowest >= FL_MINUS_INF;
}

/* The first index of the largest logit. */
static int32_t fl_argmax(const float *row, int64_t n, const int32_t *maxima, int32_t highest) {
    int64_t i = 0;
    while (maxima[i / FL_CHUNK] != highest) i += FL_CHUNK;
    while (i < n - 1 && fl_order(row[i]) != highest) i++;
    return (int32_t)i;
}

/* The largest key such that the weights of all keys not below it exceed target (weights NULL: each is 1). Every round takes the
 * eight highest bits in which the keys differ and keeps the keys of that digit in which the sum passes the target: at most eight
 * rounds, however the keys lie. Permutes both arrays. n >= 1; target < sum of the weights. */
static uint64_t fl_select(uint64_t *keys, uint64_t *weights, int64_t n, uint64_t target) {
    while (n > FL_FEW) {
        uint64_t mass[256] = {0}, differing = 0;
        int shift = 0;
        for (int64_t i = 1; i < n; i++) differing |= keys[i] ^ keys[0];
        while (differing >> shift > 255) shift++;
        for (int64_t i = 0; i < n; i++) mass[keys[i] >> shift & 255] += weights ? weights[i] : 1;
        int digit = 255;
        while (digit > 0 && mass[digit] <= target) target -= mass[digit--];
        int64_t kept = 0;
        for (int64_t i = 0; i < n; i++) {
            if ((int)(keys[i] >> shift & 255) != digit) continue;
            const uint64_t key = keys[i];
            keys[i] = keys[kept];
            keys[kept] = key;
            if (weights) {
                const uint64_t weight = weights[i];
                weights[i] = weights[kept];
                weights[kept] = weight;
            }
            kept++;
        }
        n = kept;
    }
    for (int64_t done = 0;; done++) { /* few: take the largest, again and again */
        int64_t best = done;
        for (int64_t i = done + 1; i < n; i++)
            if (keys[i] > keys[best]) best = i;
        const uint64_t key = keys[best], weight = weights ? weights[best] : 1;
        if (weight > target || done == n - 1) return key;
        target -= weight;
        keys[best] = keys[done];
        keys[done] = key;
        if (weights) {
            weights[best] = weights[done];
            weights[done] = weight;
        }
    }
}

/* Keys of the tokens from `first` to before `end` whose order is not below bound; returns how many. Most groups have none, which is found in vectors. */
FL_CLONES static int64_t fl_collect(const float *row, int64_t first, int64_t end, int32_t bound, uint64_t *keys) {
    int64_t found = 0;
    for (; first < end; first += FL_GROUP) {
        const int64_t count = end - first < FL_GROUP ? end - first : FL_GROUP;
        const float *x = row + first;
        int32_t high = count < FL_GROUP ? bound : INT32_MIN;
        for (int i = 0; i < FL_GROUP && count == FL_GROUP; i++) {
            const int32_t order = fl_order(x[i]);
            high = order > high ? order : high;
        }
        for (int64_t i = 0; i < count && high >= bound; i++) {
            const int32_t order = fl_order(x[i]);
            keys[found] = fl_key(order, first + i); /* overwritten if it is below: nobody could foresee a branch */
            found += order >= bound;
        }
    }
    return found;
}

/* Keys of the k largest logits of a row of n, of those whose order is not below `least`, in no order; returns how many (k, or all if
 * they are less). keys: room for n. */
static int64_t fl_largest(const float *row, int64_t n, int64_t k, const int32_t *maxima, int32_t least, uint64_t *keys) {
    const int64_t chunks = fl_chunks(n);
    int32_t bound = least;
    if (k < chunks) {
        for (int64_t c = 0; c < chunks; c++) keys[c] = fl_key(maxima[c], c);
        const int32_t kth = fl_key_order(fl_select(keys, NULL, chunks, (uint64_t)k - 1));
        bound = kth > least ? kth : least;
    }
    int64_t found = 0;
    for (int64_t c = 0; c < chunks; c++) {
        const int64_t end = (c + 1) * FL_CHUNK < n ? (c + 1) * FL_CHUNK : n;
        if (maxima[c] >= bound) found += fl_collect(row, c * FL_CHUNK, end, bound, keys + found);
    }
    if (found <= k) return found;
    const uint64_t cut = fl_select(keys, NULL, found, (uint64_t)k - 1);
    int64_t kept = 0;
    for (int64_t i = 0; i < found; i++)
        if (keys[i] >= cut) keys[kept++] = keys[i];
    return kept;
}

/* ---- weights ------------------------------------------------------------------------------------------------------------- */

/* The larger of two numbers, without a branch: with one, the loops around exp do not vectorise. */
FL_INLINE float fl_larger(float a, float b) { return fl_as_float(fl_pick(a > b, fl_as_bits(a), fl_as_bits(b))); }

/* exp(t) for t <= 0 in f32: k = round(t*log2(e)), r = t - k*ln(2) in two steps, Taylor polynomial of degree 7, scaled by 2^k.
 * Relative error below 1e-7 down to t = -60, below which it stays. exp(0) is 1. */
FL_INLINE float fl_exp(float t) {
    t = fl_larger(t, -60.0f);
    const float shifted = t * 0x1.715476p+0f + 0x1.8p+23f; /* the low bits of the sum are k */
    const float k = shifted - 0x1.8p+23f;
    const float r = (t - k * 0x1.62e4p-1f) - k * 0x1.7f7d1cp-20f;
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * fl_as_float((fl_as_bits(shifted) << 23) + (127u << 23));
}

/* weights[i] = round(exp(t_i) * 2^40), t_i = (x_i - top) * inverse in f32; buckets[i] grows as t_i falls. */
FL_CLONES static void fl_weigh(const float *x, float top, float inverse, uint64_t *weights, int32_t *buckets) {
    float e[FL_CHUNK];
    for (int i = 0; i < FL_CHUNK; i++) {
        const float t = (x[i] - top) * inverse;
        e[i] = fl_exp(t);
        buckets[i] = (int32_t)(fl_larger(t, (1.0f - FL_BUCKETS) / 32.0f) * -32.0f);
    }
    for (int i = 0; i < FL_CHUNK; i++) {
        const double shifted = (double)e[i] * FL_ONE_WEIGHT + 0x1p+52; /* the addition rounds to an integer, in the low bits */
        weights[i] = fl_as_bits64(shifted) - 0x4330000000000000ULL;
    }
}

/* The weights of a list of keys. */
static void fl_weigh_keys(const uint64_t *keys, int64_t n, float top, float inverse, uint64_t *weights) {
    float x[FL_CHUNK] = {0};
    uint64_t w[FL_CHUNK];
    int32_t buckets[FL_CHUNK];
    for (int64_t first = 0; first < n; first += FL_CHUNK) {
        const int64_t count = n - first < FL_CHUNK ? n - first : FL_CHUNK;
        for (int64_t i = 0; i < FL_CHUNK; i++) x[i] = i < count ? fl_unorder(fl_key_order(keys[first + i])) : top;
        fl_weigh(x, top, inverse, w, buckets);
        memcpy(weights + first, w, (size_t)count * sizeof(uint64_t));
    }
}

/* Of integers: the first position whose cumulative weight reaches the share p of the total is where it exceeds this. */
FL_INLINE uint64_t fl_share(double p, uint64_t total) {
    const double exact = p * (double)total;
    if (exact >= (double)total) return total - 1;
    const uint64_t floor = (uint64_t)exact, needed = (double)floor < exact ? floor + 1 : floor;
    return needed < 1 ? 0 : (needed > total ? total : needed) - 1;
}

/* Of integers: the draw takes the first position whose cumulative weight exceeds this. */
FL_INLINE uint64_t fl_target(double u, uint64_t total) {
    const double exact = u * (double)total;
    const uint64_t floor = exact >= (double)total ? total : (uint64_t)exact;
    return floor < total ? floor : total - 1;
}

typedef struct {
    float top, inverse; /* t = (x - top) * inverse */
    double u, top_p;    /* top_p >= 1: off */
    uint64_t least;     /* of a weight: min_p */
    int wide;           /* AVX-512 may be used */
} fl_draw;

static uint64_t fl_least(float min_p) {
    const double exact = (double)min_p * FL_ONE_WEIGHT;
    const uint64_t floor = (uint64_t)exact;
    return (double)floor < exact ? floor + 1 : floor;
}

/* Keeps the keys not below cut whose weight is not below least; returns how many; *total: their weights. */
static int64_t fl_keep(uint64_t *keys, uint64_t *weights, int64_t n, uint64_t cut, uint64_t least, uint64_t *total) {
    int64_t kept = 0;
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; i++) {
        if (keys[i] < cut || weights[i] < least) continue;
        sum += weights[i];
        keys[kept] = keys[i];
        weights[kept++] = weights[i];
    }
    *total = sum;
    return kept;
}

/* top_p, min_p and the draw on a list of keys, the row's largest logit among them. */
static int32_t fl_draw_listed(uint64_t *keys, uint64_t *weights, int64_t n, const fl_draw *draw) {
    uint64_t total, cut = 0;
    fl_weigh_keys(keys, n, draw->top, draw->inverse, weights);
    n = fl_keep(keys, weights, n, 0, 0, &total);
    if (draw->top_p < 1.0) cut = fl_select(keys, weights, n, fl_share(draw->top_p, total));
    n = fl_keep(keys, weights, n, cut, draw->least, &total);
    return fl_key_id(fl_select(keys, weights, n, fl_target(draw->u, total)));
}

/* ---- whole rows ---------------------------------------------------------------------------------------------------------- */

/* A chunk of the row, padded with -inf where the row ends. */
FL_INLINE const float *fl_padded(const float *row, int64_t n, int64_t chunk, float *room) {
    const int64_t first = chunk * FL_CHUNK;
    if (first + FL_CHUNK <= n) return row + first;
    for (int64_t i = 0; i < FL_CHUNK; i++) room[i] = first + i < n ? row[first + i] : fl_as_float(0xff800000u);
    return room;
}

/* The smallest order whose weight may differ from zero (2^-41 = exp(-28.4)). */
FL_INLINE int32_t fl_weightless(const fl_draw *draw) { return fl_order(draw->top - 30.0f / draw->inverse); }

/* Adds the weights of a chunk that are not below least: singly to the buckets before `head`, together to mass[head]. The sum of all is
 * vectors; single tokens, whose buckets are scattered in memory, are few. */
FL_CLONES static void fl_add_masses(const uint64_t *weights, const int32_t *buckets, uint64_t least, int head, uint64_t *mass) {
    uint64_t kept[FL_CHUNK], rest = 0;
    for (int i = 0; i < FL_CHUNK; i++) {
        kept[i] = (int64_t)weights[i] >= (int64_t)least ? weights[i] : 0; /* both at most 2^40 */
        rest += kept[i];
    }
    for (int first = 0; first < FL_CHUNK; first += 8) {
        int32_t best = INT32_MAX;
        for (int i = first; i < first + 8; i++) best = buckets[i] < best ? buckets[i] : best;
        if (best >= head) continue;
        for (int i = first; i < first + 8; i++) { /* without branches, which nobody could foresee */
            mass[buckets[i] < head ? buckets[i] : head] += kept[i];
            rest -= kept[i];
        }
    }
    mass[head] += rest;
}

/* Whether a token of this order is in a bucket before head. */
FL_INLINE int fl_is_close(int32_t order, const fl_draw *draw, int head) {
    return (fl_unorder(order) - draw->top) * draw->inverse * -32.0f < (float)head;
}

/* mass[b] = weights (those not below least) of the tokens in bucket b < head; mass[head] = of all others. */
static void fl_masses(const float *row, int64_t n, const int32_t *maxima, const fl_draw *draw, uint64_t least, int head,
                      uint64_t *mass) {
    float room[FL_CHUNK];
    uint64_t weights[FL_CHUNK];
    int32_t buckets[FL_CHUNK];
    const int32_t weightless = fl_weightless(draw);
    memset(mass, 0, FL_BUCKETS * sizeof(uint64_t));
    for (int64_t c = 0; c < fl_chunks(n); c++) {
        if (maxima[c] < weightless) continue;
#ifdef FL_HAVE_512
        int64_t end = c; /* of a run of whole chunks, all with tokens in buckets before head or all without */
        const int close = fl_is_close(maxima[c], draw, head);
        while (draw->wide && end < n / FL_CHUNK && maxima[end] >= weightless && fl_is_close(maxima[end], draw, head) == close)
            end++;
        if (end > c) {
            fl_masses_512(row + c * FL_CHUNK, (end - c) * FL_CHUNK, draw->top, draw->inverse, least, head, close, mass);
            c = end - 1;
            continue;
        }
#endif
        fl_weigh(fl_padded(row, n, c, room), draw->top, draw->inverse, weights, buckets);
        fl_add_masses(weights, buckets, least, head, mass);
    }
}

/* The buckets of a chunk, as of fl_weigh. */
FL_CLONES static void fl_buckets(const float *x, float top, float inverse, int32_t *buckets) {
    for (int i = 0; i < FL_CHUNK; i++)
        buckets[i] = (int32_t)(fl_larger((x[i] - top) * inverse, (1.0f - FL_BUCKETS) / 32.0f) * -32.0f);
}

/* Keys and weights of the tokens of one bucket. */
static int64_t fl_members(const float *row, int64_t n, const int32_t *maxima, const fl_draw *draw, int bucket, uint64_t *keys,
                          uint64_t *weights) {
    float room[FL_CHUNK];
    int32_t buckets[FL_CHUNK];
    int64_t found = 0;
    for (int64_t c = 0; c < fl_chunks(n); c++) {
        const float best = (fl_unorder(maxima[c]) - draw->top) * draw->inverse * -32.0f;
        if (best >= (float)bucket + 1.0f && bucket < FL_BUCKETS - 1) continue; /* its best token is already below the bucket */
        const float *x = fl_padded(row, n, c, room);
        int32_t members[FL_CHUNK];
        int count = 0;
#ifdef FL_HAVE_512
        if (draw->wide) count = fl_bucket_512(x, draw->top, draw->inverse, bucket, bucket == FL_BUCKETS - 1, members);
#endif
        if (!draw->wide) {
            fl_buckets(x, draw->top, draw->inverse, buckets);
            for (int i = 0; i < FL_CHUNK; i++)
                if (buckets[i] == bucket) members[count++] = i;
        }
        for (int i = 0; i < count && c * FL_CHUNK + members[i] < n; i++)
            keys[found++] = fl_key(fl_order(x[members[i]]), c * FL_CHUNK + members[i]);
    }
    fl_weigh_keys(keys, found, draw->top, draw->inverse, weights);
    return found;
}

/* The bucket in which the cumulative mass exceeds *target; *target becomes relative to its begin. */
static int fl_bucket_of(const uint64_t *mass, uint64_t *target) {
    int bucket = 0;
    while (bucket < FL_BUCKETS - 1 && mass[bucket] <= *target) *target -= mass[bucket++];
    return bucket;
}

static uint64_t fl_sum(const uint64_t *mass) {
    uint64_t total = 0;
    for (int i = 0; i < FL_BUCKETS; i++) total += mass[i];
    return total;
}

/* top_p, min_p and the draw over a whole row. -1 if a decision falls in what lies together behind `head` (never with FL_BUCKETS - 1). */
static int32_t fl_draw_among(const float *row, int64_t n, const int32_t *maxima, const fl_draw *draw, int head, uint64_t *keys,
                             uint64_t *weights) {
    uint64_t mass[FL_BUCKETS], cut = 0, kept;
    const int end = head < FL_BUCKETS - 1 ? head : FL_BUCKETS;
    fl_masses(row, n, maxima, draw, 0, head, mass);
    if (draw->top_p < 1.0) {
        uint64_t target = fl_share(draw->top_p, fl_sum(mass));
        const int last = fl_bucket_of(mass, &target);
        if (last >= end) return -1;
        int64_t found = fl_members(row, n, maxima, draw, last, keys, weights);
        cut = fl_select(keys, weights, found, target);
        if (draw->least > 0) fl_masses(row, n, maxima, draw, draw->least, head, mass);
        fl_keep(keys, weights, found, cut, draw->least, &kept);
        mass[last] = kept;
        memset(mass + last + 1, 0, (size_t)(FL_BUCKETS - 1 - last) * sizeof(uint64_t));
    } else if (draw->least > 0) {
        fl_masses(row, n, maxima, draw, draw->least, head, mass);
    }
    uint64_t target = fl_target(draw->u, fl_sum(mass));
    const int bucket = fl_bucket_of(mass, &target);
    if (bucket >= end) return -1;
    int64_t found = fl_members(row, n, maxima, draw, bucket, keys, weights);
    found = fl_keep(keys, weights, found, cut, draw->least, &kept);
    return fl_key_id(fl_select(keys, weights, found, target));
}

/* The same with any head: the weight of most rows is in few tokens, so the rest is told apart only if the draw is there. */
static int32_t fl_draw_row(const float *row, int64_t n, const int32_t *maxima, const fl_draw *draw, uint64_t *keys,
                           uint64_t *weights) {
    const int32_t id = fl_draw_among(row, n, maxima, draw, FL_HEAD, keys, weights);
    return id >= 0 ? id : fl_draw_among(row, n, maxima, draw, FL_BUCKETS - 1, keys, weights);
}

/* ---- masks and adjustments ----------------------------------------------------------------------------------------------- */

/* out = row where the mask's bit is 1, else -inf. */
static void fl_masked(const float *row, int64_t n, const uint32_t *mask, float *out) {
    for (int64_t first = 0; first < n; first += 32) {
        const uint32_t word = mask[first / 32];
        const int64_t end = first + 32 < n ? first + 32 : n;
        for (int64_t i = first; i < end; i++) out[i] = word >> (i - first) & 1 ? row[i] : fl_as_float(0xff800000u);
    }
}

typedef struct { /* all arrays are inputs, R rows */
    const double *u;
    const float *temperature;
    const int32_t *top_k;
    const float *top_p, *min_p;
    const int32_t *adjust_start, *adjust_ids; /* R+1; A */
    const float *adjust_bias, *adjust_repeat, *adjust_sub;
    const uint32_t *mask; /* [R, ceil(n/32)] or NULL */
    int wide;             /* AVX-512 may be used */
} fl_sampler;

/* Applies row r's adjustments in list order; `bans` 0 leaves out the biases of -inf. Returns whether there was one. */
static int fl_adjust(const fl_sampler *s, int64_t r, int bans, float *row) {
    int banned = 0;
    for (int32_t a = s->adjust_start[r]; a < s->adjust_start[r + 1]; a++) {
        float z = row[s->adjust_ids[a]];
        const int ban = s->adjust_bias[a] == fl_as_float(0xff800000u);
        banned |= ban;
        if (!ban || bans) z = z + s->adjust_bias[a];
        if (s->adjust_repeat[a] != 1.0f) z = z > 0.0f ? z / s->adjust_repeat[a] : z * s->adjust_repeat[a];
        row[s->adjust_ids[a]] = z - s->adjust_sub[a];
    }
    return banned;
}

/* Scratch of one call, shared by its rows. */
typedef struct {
    int32_t *maxima;
    uint64_t *keys, *weights;
    float *copy;
} fl_scratch;

/* scratch->copy = raw under a mask, with its maxima, highest and lowest; *usable: of raw. */
static void fl_mask_row(const float *raw, int64_t n, const uint32_t *mask, int wide, fl_scratch *scratch, int32_t *highest,
                        int32_t *lowest, int *usable) {
#ifdef FL_HAVE_512
    if (wide && n % FL_CHUNK == 0) {
        int32_t top, bottom;
        fl_masked_512(raw, n, mask, scratch->copy, scratch->maxima, highest, lowest, &top, &bottom);
        *usable = fl_usable(top, bottom);
        return;
    }
#endif
    fl_chunk_maxima(raw, n, scratch->maxima, highest, lowest);
    *usable = fl_usable(*highest, *lowest);
    fl_masked(raw, n, mask, scratch->copy);
    fl_chunk_maxima(scratch->copy, n, scratch->maxima, highest, lowest);
}

/* The row that is chosen from: raw itself, or a copy under its mask and with its adjustments, which differ by `bans`. Its maxima,
 * highest and lowest are found. *usable: of raw; *banned: there is an adjustment that bans. */
static const float *fl_adjusted_row(const float *raw, int64_t n, const fl_sampler *s, int64_t r, int bans, fl_scratch *scratch,
                                    int32_t *highest, int32_t *lowest, int *usable, int *banned) {
    const int adjusted = s->adjust_start[r] != s->adjust_start[r + 1];
    *banned = 0;
    if (s->mask != NULL) {
        const uint32_t *mask = s->mask + r * ((n + 31) / 32);
        fl_mask_row(raw, n, mask, s->wide, scratch, highest, lowest, usable);
    } else {
        fl_chunk_maxima(raw, n, scratch->maxima, highest, lowest);
        *usable = fl_usable(*highest, *lowest);
        if (!adjusted) return raw;
        memcpy(scratch->copy, raw, (size_t)n * sizeof(float));
    }
    if (adjusted) {
        *banned = fl_adjust(s, r, bans, scratch->copy);
        fl_chunk_maxima(scratch->copy, n, scratch->maxima, highest, lowest);
    }
    return scratch->copy;
}

static int32_t fl_sample_row(const float *raw, int64_t n, const fl_sampler *s, int64_t r, fl_scratch *scratch) {
    int32_t highest, lowest;
    int usable, banned;
    const float *row = fl_adjusted_row(raw, n, s, r, 1, scratch, &highest, &lowest, &usable, &banned);
    if (!usable) return -1;
    if (highest == FL_MINUS_INF && banned) /* nothing survived: the grammar wins over bans */
        row = fl_adjusted_row(raw, n, s, r, 0, scratch, &highest, &lowest, &usable, &banned);
    if (!fl_usable(highest, lowest)) return -1;
    if (s->temperature[r] <= FL_MIN_TEMPERATURE || s->top_k[r] == 1) return fl_argmax(row, n, scratch->maxima, highest);
    const fl_draw draw = {fl_unorder(highest), 1.0f / s->temperature[r], s->u[r], s->top_p[r], fl_least(s->min_p[r]), s->wide};
    if (s->top_k[r] <= 0 || s->top_k[r] >= n)
        return fl_draw_row(row, n, scratch->maxima, &draw, scratch->keys, scratch->weights);
    /* tokens without weight are never drawn, and under the mask of a grammar they are most */
    const int64_t found = fl_largest(row, n, s->top_k[r], scratch->maxima, fl_weightless(&draw), scratch->keys);
    return fl_draw_listed(scratch->keys, scratch->weights, found, &draw);
}

/* One block, so that the allocator keeps its pages from call to call. The caller frees keys. */
static int fl_scratch_open(fl_scratch *scratch, int64_t n) {
    const int64_t padded = fl_chunks(n) * FL_CHUNK;
    scratch->keys = (uint64_t *)malloc((size_t)padded * 20 + (size_t)fl_chunks(n) * sizeof(int32_t));
    if (scratch->keys == NULL) return -1;
    scratch->weights = scratch->keys + padded;
    scratch->copy = (float *)(scratch->weights + padded);
    scratch->maxima = (int32_t *)(scratch->copy + padded);
    return 0;
}

/* ids[r] of rows [R, n]. Returns 0, or -1 without memory. */
static int fl_sample(const float *logits, int64_t rows, int64_t n, const fl_sampler *sampler, int32_t *ids) {
    fl_scratch scratch;
    const int status = fl_scratch_open(&scratch, n);
    for (int64_t r = 0; status == 0 && r < rows; r++) ids[r] = fl_sample_row(logits + r * n, n, sampler, r, &scratch);
    free(scratch.keys);
    return status;
}

/* ---- log-probabilities --------------------------------------------------------------------------------------------------- */

/* exp(t) for t <= 0 in f64, as fl_exp with a Taylor polynomial of degree 13; 0 below -700. */
FL_INLINE double fl_exp64(double t) {
    static const double inverse_factorials[14] = {
        1.0,        1.0,         1.0 / 2,      1.0 / 6,       1.0 / 24,       1.0 / 120,       1.0 / 720,
        1.0 / 5040, 1.0 / 40320, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800.0};
    const uint64_t keep = 0 - (uint64_t)(t > -700.0);
    const double inside = fl_as_double(fl_as_bits64(t) & keep); /* 0 where the result is dropped */
    const double shifted = inside * 0x1.71547652b82fep+0 + 0x1.8p+52, k = shifted - 0x1.8p+52;
    const double r = (inside - k * 0x1.62e42fefa3800p-1) - k * 0x1.ef35793c76730p-45;
    double p = inverse_factorials[13];
    for (int i = 12; i >= 0; i--) p = p * r + inverse_factorials[i];
    const double scale = fl_as_double((fl_as_bits64(shifted) << 52) + (1023ULL << 52));
    return fl_as_double(fl_as_bits64(p * scale) & keep);
}

/* Sum of exp(x - top), in f64, in eight lanes of every chunk and then over the lanes: one order on every machine. */
FL_CLONES static double fl_partition(const float *row, int64_t n, float top) {
    double lanes[8] = {0}, e[FL_CHUNK];
    float room[FL_CHUNK];
    for (int64_t c = 0; c < fl_chunks(n); c++) {
        const float *x = fl_padded(row, n, c, room);
        for (int i = 0; i < FL_CHUNK; i++) e[i] = fl_exp64((double)x[i] - (double)top);
        for (int i = 0; i < FL_CHUNK; i += 8)
            for (int lane = 0; lane < 8; lane++) lanes[lane] += e[i + lane];
    }
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

static int fl_descending(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

/* Of each row of logits [R, n]: largest logit (NaN for a row without a distribution), sum of exp(x - largest), and the ids of
 * the `count` likeliest tokens [R, count], best first (-1 where the row has none). Returns 0, or -1 without memory. */
static int fl_logprobs(const float *logits, int64_t rows, int64_t n, int64_t count, float *largest, double *sums,
                       int32_t *ids) {
    fl_scratch scratch;
    const int status = fl_scratch_open(&scratch, n);
    for (int64_t r = 0; status == 0 && r < rows; r++) {
        const float *row = logits + r * n;
        int32_t highest, lowest;
        int64_t found = 0;
        fl_chunk_maxima(row, n, scratch.maxima, &highest, &lowest);
        if (fl_usable(highest, lowest)) {
            largest[r] = fl_unorder(highest);
            sums[r] = fl_partition(row, n, largest[r]);
            if (count > 0) found = fl_largest(row, n, count, scratch.maxima, INT32_MIN, scratch.keys);
            qsort(scratch.keys, (size_t)found, sizeof(uint64_t), fl_descending);
        } else {
            largest[r] = fl_as_float(0x7fc00000u);
            sums[r] = 1.0;
        }
        for (int64_t i = 0; i < count; i++) ids[r * count + i] = i < found ? fl_key_id(scratch.keys[i]) : -1;
    }
    free(scratch.keys);
    return status;
}

#endif
