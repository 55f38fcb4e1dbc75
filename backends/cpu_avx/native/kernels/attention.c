/* Paged attention, and the cache it reads.
 *
 * One *unit* is up to FL_TILE (row, head) pairs of one sequence that share one kv head, or, with few rows, several of them. Keys are
 * taken in steps of FL_SUB tokens at fixed places of the context; scores and weights of a step stay in L1:
 *
 *     scores s[q][64] = q · K      sixteen tokens a vector, since a block holds keys transposed: K [Dk][tokens]
 *     weights p = 2^(s − max)      scores times log2 e; running maximum and sums per (row, head), old sums scaled by 2^(old max − new max)
 *     acc[q][Dv] += p · V          over the tokens which this row sees and no others: an unused slot may hold NaN
 *
 * Both products are `product_n`: a register block of FL_Q pairs × FL_V vectors, one fused multiply-add per term, terms in ascending
 * order. Cached elements become f32 on the way (exactly), either in that loop or, where a unit has many pairs, once before it in scratch
 * (`stage`). For int8 a key's element is code · scale, rounded; of values the codes are multiplied, with weights that took the scale of
 * their group of channels before.
 *
 * Steps are summed within ranges of FL_RANGE keys, and the ranges' results are merged in ascending order. A unit may cover one range
 * (several threads then share a long context, and `attention_merge` adds up what they left, some ranges at a time) or all of them: the
 * arithmetic is the same, so bits depend neither on the threads, nor on the batch, nor on how a prompt was cut.
 */
#include "ops.h"
#include "vec.h"

/* Register block of a product: FL_Q * FL_V sums, FL_V operands and one factor fit the registers (32, or 16). */
#if FL_WIDE == 16
enum { FL_Q = 6, FL_V = 4 };
#elif defined(__FMA__)
enum { FL_Q = 6, FL_V = 2 };
#else
enum { FL_Q = 4, FL_V = 2 };
#endif
enum { SROW = FL_SUB + 16, STAGED = 16, MAX_WIDTH = 1024 }; /* STAGED: pairs from which on a step is brought to f32 first */

enum { SCALED = 16 }; /* type of int8 keys: codes times the scales of their token and group */

#define LOG2_E 1.44269504f

typedef struct {
    int64_t lo, hi; /* keys [lo, hi) that a row sees */
} span;

FL_INLINE span visible(const fl_attention *a, int64_t s, int64_t row) {
    int64_t p = a->positions[row], context = a->context_len[s];
    span v = {0, context};
    int64_t end = p + 1;
    if (a->mask == FL_MASK_PREFIX && p < a->prefix_len[s] && end < a->prefix_len[s]) end = a->prefix_len[s];
    if (a->mask != FL_MASK_FULL && end < v.hi) v.hi = end;
    if (a->mask == FL_MASK_CHUNK && p > 0) v.lo = p / a->chunk * a->chunk;
    if (a->window > 0 && p - a->window + 1 > v.lo) v.lo = p - a->window + 1;
    if (v.hi < v.lo) v.hi = v.lo;
    return v;
}

FL_INLINE int64_t bytes_of(int dtype) { return fl_element_bytes(dtype == SCALED ? FL_DT_I8 : dtype); }
FL_INLINE const char *at(const char *p, int64_t i, int dtype) { return p + i * bytes_of(dtype); }

FL_INLINE wide load_wide(const char *p, int64_t i, int dtype) {
    const char *e = at(p, i, dtype);
    if (dtype == FL_DT_F16) return wide_f16((const uint16_t *)e);
    if (dtype == FL_DT_BF16) return wide_bf16((const uint16_t *)e);
    if (dtype == FL_DT_I8 || dtype == SCALED) return wide_i8((const int8_t *)e);
    return wide_f32((const float *)e);
}

/* A matrix of a product: rows of `ldb` elements; ahead: while row k is used, row k of the matrix there is fetched, which is needed
 * next; scale: for SCALED, [group of rows][SROW], of every column. */
typedef struct {
    const char *p, *ahead;
    int64_t ld;
    const float *scale;
} factor;

/* y[i][c] (+)= Σ_k x[i][k] · b[k][c] for Q pairs i, V vectors of columns c and k in [k0, k1), ascending. */
FL_INLINE void product_n(int Q, int V, int dtype, const float *const *x, int32_t k0, int32_t k1, const factor *b,
                         float *const *y, int32_t column, int add) {
    const char *p = b->p, *ahead = dtype == FL_DT_F32 ? NULL : b->ahead;
    const int64_t ldb = b->ld;
    wide_sum sum[6][4];
    for (int i = 0; i < Q; i++)
        for (int v = 0; v < V; v++) {
            const wide none = {0};
            sum[i][v] = wide_sum_of(add ? wide_f32(y[i] + column + v * FL_WIDE) : none);
        }
    for (int32_t k = k0, part; k < k1; k = part) {
        wide scale[4];
        part = k1;
        if (dtype == SCALED) {
            if (k1 - k > FL_KV_GROUP) part = k + FL_KV_GROUP; /* k0 is the begin of a group */
            for (int v = 0; v < V; v++) scale[v] = wide_f32(b->scale + k / FL_KV_GROUP * SROW + column + v * FL_WIDE);
        }
        for (; k < part; k++) {
            wide u[4];
            for (int v = 0; v < V; v++) {
                u[v] = load_wide(p, k * ldb + column + v * FL_WIDE, dtype);
                if (dtype == SCALED) u[v] = u[v] * scale[v];
            }
            if (ahead)
                for (int64_t line = 0; line < V * FL_WIDE * bytes_of(dtype); line += 64)
                    __builtin_prefetch(at(ahead, k * ldb + column, dtype) + line);
            for (int i = 0; i < Q; i++)
                for (int v = 0; v < V; v++) sum[i][v] = wide_fma(sum[i][v], x[i][k], u[v]);
        }
    }
    for (int i = 0; i < Q; i++)
        for (int v = 0; v < V; v++) wide_store(y[i] + column + v * FL_WIDE, wide_value(sum[i][v]));
}

/* All columns [0, width) for Q pairs. Writes whole vectors. */
FL_INLINE void product_rows(int Q, int dtype, const float *const *x, int32_t k0, int32_t k1, const factor *b, float *const *y,
                            int32_t width, int add) {
    int32_t c = 0;
    for (; c + FL_V * FL_WIDE <= width; c += FL_V * FL_WIDE) product_n(Q, FL_V, dtype, x, k0, k1, b, y, c, add);
    for (; FL_V == 4 && c + FL_WIDE < width; c += 2 * FL_WIDE) product_n(Q, 2, dtype, x, k0, k1, b, y, c, add);
    for (; c < width; c += FL_WIDE) product_n(Q, 1, dtype, x, k0, k1, b, y, c, add);
}

/* Any number of pairs up to FL_Q, for one type of b. */
FL_INLINE void product_typed(int n, int dtype, const float *const *x, int32_t k0, int32_t k1, const factor *b, float *const *y,
                             int32_t width, int add) {
    if (n == 1) product_rows(1, dtype, x, k0, k1, b, y, width, add);
    else if (n == 2)
        product_rows(2, dtype, x, k0, k1, b, y, width, add);
    else if (n == 3)
        product_rows(3, dtype, x, k0, k1, b, y, width, add);
    else if (n == 4)
        product_rows(4, dtype, x, k0, k1, b, y, width, add);
    else if (n == 5)
        product_rows(5, dtype, x, k0, k1, b, y, width, add);
    else
        product_rows(6, dtype, x, k0, k1, b, y, width, add);
}

static void product(int n, int dtype, const float *const *x, int32_t k0, int32_t k1, const factor *b, float *const *y,
                    int32_t width, int add) {
    if (k0 >= k1 && add) return;
    if (dtype == FL_DT_F16) product_typed(n, FL_DT_F16, x, k0, k1, b, y, width, add);
    else if (dtype == FL_DT_BF16)
        product_typed(n, FL_DT_BF16, x, k0, k1, b, y, width, add);
    else if (dtype == FL_DT_I8)
        product_typed(n, FL_DT_I8, x, k0, k1, b, y, width, add);
    else if (dtype == SCALED)
        product_typed(n, SCALED, x, k0, k1, b, y, width, add);
    else
        product_typed(n, FL_DT_F32, x, k0, k1, b, y, width, add);
}

/* Pairs of the next product, of those left: parts of equal size rather than one small rest. */
FL_INLINE int share(int left) {
    int parts = (left + FL_Q - 1) / FL_Q;
    return (left + parts - 1) / parts;
}

/* acc[i] += Σ_j p[i][j] · v[j] over the tokens [from[i], to[i]) of [j0, j1), for up to FL_Q pairs: the tokens that all of them see
 * together, the rest one by one, each in ascending order. */
static void values_spans(int n, int dtype, const float *const *p, const int32_t *from, const int32_t *to, int32_t j0,
                         int32_t j1, const factor *v, float *const *acc, int32_t width) {
    const factor rest = {v->p, NULL, v->ld, NULL};
    int32_t lo = j0, hi = j1;
    for (int i = 0; i < n; i++) {
        if (from[i] > lo) lo = from[i];
        if (to[i] < hi) hi = to[i];
    }
    if (lo > j1) lo = j1;
    if (hi < lo) hi = lo;
    for (int i = 0; i < n; i++) {
        int32_t a = from[i] > j0 ? from[i] : j0, b = to[i] < lo ? to[i] : lo;
        product(1, dtype, p + i, a, b, &rest, acc + i, width, 1);
    }
    product(n, dtype, p, lo, hi, v, acc, width, 1);
    for (int i = 0; i < n; i++) {
        int32_t a = from[i] > hi ? from[i] : hi, b = to[i] < j1 ? to[i] : j1;
        product(1, dtype, p + i, a, b, &rest, acc + i, width, 1);
    }
}

/* (M, L, O) += (m, l, acc): two parts of a softmax, the second covering later keys. */
FL_INLINE void merge(float *M, float *L, float *O, float m, float l, const float *acc, int32_t width) {
    if (m == -INFINITY) { /* every score was −inf or NaN: l and acc are zeros or NaN */
        *L += l;
        for (int32_t c = 0; c < width; c += FL_WIDE) storew(O + c, loadw(O + c) + loadw(acc + c));
        return;
    }
    float top = *M > m ? *M : m;
    const f32xw powers = exp2w((f32xw){*M - top, m - top});
    const float a = powers[0], b = powers[1];
    *M = top;
    *L = *L * a + l * b;
    for (int32_t c = 0; c < width; c += FL_WIDE) storew(O + c, loadw(O + c) * a + loadw(acc + c) * b);
}

FL_INLINE void finish(const fl_attention *a, int64_t row, int32_t head, float M, float L, const float *O) {
    float *y = (float *)a->out.p + row * a->out.s0 + head * a->out.s1;
    float factor = 1.0f;
    if (a->sinks) {
        float sink = a->sinks[head] * LOG2_E, top = M > sink ? M : sink;
        factor = exp2_1(M - top);
        L = L * factor + exp2_1(sink - top);
    }
    for (int32_t c = 0; c < a->value_dim; c++) y[c] = O[c] * factor / L;
}

/* Slot `slot` of a (row, head): maximum, sum, six unused, then the values. */
FL_INLINE float *partial(const fl_attention *a, int64_t row, int32_t head, int64_t slot) {
    int64_t width = (a->value_dim + 15) / 16 * 16;
    return a->partials + ((row * a->heads + head) * (a->slots + 1) + slot) * (width + 8);
}

static void zero_row(const fl_attention *a, int64_t row, int32_t head) {
    memset((float *)a->out.p + row * a->out.s0 + head * a->out.s1, 0, (size_t)a->value_dim * sizeof(float));
}

void FL_NAME(fl_attention_merge)(const fl_attention *a, int64_t s, int64_t row, int32_t head) {
    span v = visible(a, s, row);
    if (v.lo >= v.hi) {
        zero_row(a, row, head);
        return;
    }
    const int64_t begin = v.lo / FL_RANGE, end = (v.hi + FL_RANGE - 1) / FL_RANGE, last = a->first + a->slots;
    if (begin >= last || end <= a->first) return;
    int32_t width = (a->value_dim + 15) / 16 * 16;
    float *so_far = partial(a, row, head, a->slots), *O = so_far + 8;
    if (begin >= a->first) {
        so_far[0] = -INFINITY, so_far[1] = 0.0f;
        memset(O, 0, sizeof(float) * (size_t)width);
    }
    for (int64_t r = begin > a->first ? begin : a->first; r < end && r < last; r++) {
        const float *part = partial(a, row, head, r - a->first);
        merge(&so_far[0], &so_far[1], O, part[0], part[1], part + 8, width);
    }
    if (end <= last) finish(a, row, head, so_far[0], so_far[1], O);
}

/* Scores and weights of one step of a unit. */
typedef struct {
    int32_t n, lo, hi, whole;           /* pairs; the tokens that any of them sees; whether each sees all FL_SUB */
    int32_t from[FL_TILE], to[FL_TILE]; /* the tokens that each sees */
    float *score[FL_TILE], *acc[FL_TILE];
    float m[FL_TILE + FL_WIDE], l[FL_TILE][16]; /* running maximum, and sum of weights in sixteen parts */
    float slope[FL_TILE], distance[FL_TILE];
} step;

/* Final scores of a pair: scaled, capped and biased, in units of log 2; −inf where it does not see a token. Returns the largest. */
FL_INLINE float largest_score(const fl_attention *a, const step *w, int32_t i) {
    const f32xw iota = FL_LANE_NUMBERS;
    int32_t from = w->from[i], to = w->to[i];
    float *s = w->score[i];
    f32xw top = setw(-INFINITY);
    for (int32_t j = from / 16 * 16; j < (to + 15) / 16 * 16; j += FL_WIDE) {
        f32xw x = loadw(s + j);
        if (a->softcap > 0.0f) {
            storew(s + j, x * a->scale);
            for (int32_t k = j; k < j + FL_WIDE; k += 8) store8(s + k, a->softcap * tanh8(load8(s + k) / a->softcap));
            x = loadw(s + j) * LOG2_E;
        } else {
            x = x * (a->scale * LOG2_E);
        }
        if (a->slopes) x = x + (w->slope[i] * LOG2_E) * (iota + (float)j + w->distance[i]);
        if (j < from || j + FL_WIDE > to) {
            i32xw seen = (iota + (float)j >= (float)from) & (iota + (float)j < (float)to);
            x = selectw(seen, x, setw(-INFINITY));
        }
        storew(s + j, x);
        top = maxw(x, top);
    }
    return topw(top);
}

/* The same where a pair sees all tokens and scores are scaled only. They stay as they are: `weights` scales them again. */
FL_INLINE float largest_of_whole(const float *s, float factor) {
    f32xw top = setw(-INFINITY);
    for (int32_t j = 0; j < FL_SUB; j += FL_WIDE) top = maxw(loadw(s + j) * factor, top);
    return topw(top);
}

/* Scores of the tokens [from, to) of a pair, times factor, become weights: where nothing is above −inf zeros, or NaN where a score is. */
FL_INLINE void weights(float *s, float *l, int32_t from, int32_t to, float factor, float m, float keep) {
    if (m == -INFINITY) {
        for (int32_t j = from; j < to; j++) {
            const float x = s[j] * factor;
            s[j] = x != x ? x : 0.0f;
            l[0] += s[j];
        }
        return;
    }
    for (int32_t part = 0; part < 16; part += FL_WIDE) { /* the sum of token j is l[j mod 16], in every variant */
        f32xw sum = loadw(l + part) * keep;
        for (int32_t j = from / 16 * 16 + part; j < (to + 15) / 16 * 16; j += 16) {
            f32xw p = exp2w(loadw(s + j) * factor - m);
            sum += p;
            storew(s + j, p);
        }
        storew(l + part, sum);
    }
}

/* Scores of a step become weights; the running m, l and acc of the pairs [i0, i1) are brought along. No branch depends on a maximum: it
 * could not be predicted. */
static void step_softmax(const fl_attention *a, step *w, int32_t i0, int32_t i1, int32_t width) {
    const int whole = w->whole && !a->slopes && !(a->softcap > 0.0f);
    const float factor = a->scale * LOG2_E;
    float top[FL_TILE + FL_WIDE], keep[FL_TILE + FL_WIDE];
    for (int32_t i = i0; i < i1 + FL_WIDE; i++) top[i] = -INFINITY;
    if (whole)
        for (int32_t i = i0; i < i1; i++) top[i] = largest_of_whole(w->score[i], factor);
    else
        for (int32_t i = i0; i < i1; i++)
            if (w->from[i] < w->to[i]) top[i] = largest_score(a, w, i);
    for (int32_t i = i0; i < i1; i += FL_WIDE) { /* lanes from i1 on stay as they are: their `top` is −inf */
        const f32xw m = loadw(w->m + i), now = maxw(loadw(top + i), m);
        storew(keep + i, exp2w(selectw(now > m, m - now, setw(0.0f))));
        storew(w->m + i, now);
    }
    if (whole)
        for (int32_t i = i0; i < i1; i++) weights(w->score[i], w->l[i], 0, FL_SUB, factor, w->m[i], keep[i]);
    else
        for (int32_t i = i0; i < i1; i++)
            if (w->from[i] < w->to[i]) weights(w->score[i], w->l[i], w->from[i], w->to[i], 1.0f, w->m[i], keep[i]);
    for (int32_t i = i0; i < i1; i++) {
        float *acc = w->acc[i];
        for (int32_t c = 0; c < width; c += FL_WIDE) storew(acc + c, loadw(acc + c) * keep[i]);
    }
}

/* The part of a block that a step reads: tokens j … j + count − 1 of the step. */
typedef struct {
    const char *head; /* of the block */
    int64_t offset;   /* tokens from the block's begin */
    int32_t count;
} piece;

FL_INLINE piece piece_at(const fl_cache *c, const int32_t *blocks, int32_t head, int64_t first, int32_t j, int32_t end) {
    int64_t block = (first + j) / c->block_size, offset = (first + j) % c->block_size, left = c->block_size - offset;
    return (piece){c->p + blocks[block] * c->block_bytes + head * fl_head_bytes(c), offset,
                   (int32_t)(left < end - j ? left : end - j)};
}

/* Scales of the keys [from, to) of a step, [groups][SROW], and of their values. */
static void stage_scales(const fl_cache *c, const int32_t *blocks, int32_t head, int64_t first, int32_t from, int32_t to,
                         float *kscale, float *vscale) {
    const int32_t groups = fl_kv_groups(c->key_dim) + fl_kv_groups(c->value_dim);
    for (int32_t j = from; j < to;) {
        piece part = piece_at(c, blocks, head, first, j, to);
        const float *scales = (const float *)(part.head + fl_scales_at(c)) + part.offset;
        for (int32_t g = 0; g < groups; g++, scales += c->block_size) {
            int32_t v = g - fl_kv_groups(c->key_dim);
            memcpy((v < 0 ? kscale + g * SROW : vscale + v * SROW) + j, scales, (size_t)part.count * sizeof(float));
        }
        j += part.count;
    }
}

/* Keys [from, to) of a step to f32: kt [Dk][SROW], v [64][width]; int8 keys with their scales, values without. next: the head of a block
 * that is read after this one, fetched to L2 on the way. */
FL_INLINE void stage_typed(int dtype, const fl_cache *c, const int32_t *blocks, int32_t head, int64_t first, int32_t from,
                           int32_t to, const float *kscale, float *kt, float *v, int32_t width, const char *next) {
    const int32_t key_dim = c->key_dim;
    const int64_t stride = fl_key_stride(c) * bytes_of(dtype), row_bytes = c->value_dim * bytes_of(dtype);
    for (int32_t j = from; j < to;) {
        piece part = piece_at(c, blocks, head, first, j, to);
        if (c->value_dim) {
            const char *keys = at(part.head, part.offset, dtype), *row = part.head + fl_values_at(c);
            const float *scale = kscale ? kscale + j : NULL;
            float *to_k = kt + j, *to_v = v + j * width;
            for (int32_t d = 0; d < key_dim; d++, keys += stride, to_k += SROW) {
                for (int32_t o = 0; o < part.count; o += FL_WIDE) {
                    wide x = load_wide(keys, o, dtype);
                    if (dtype == FL_DT_I8) x = x * wide_f32(scale + d / FL_KV_GROUP * SROW + o);
                    wide_store(to_k + o, x);
                }
                for (int32_t line = 0; next && line < stride; line += 64, next += 64) __builtin_prefetch(next, 0, 2);
            }
            row += part.offset * row_bytes;
            for (int32_t o = 0; o < part.count; o++, row += row_bytes, to_v += width) {
                for (int32_t e = 0; e < width; e += FL_WIDE) wide_store(to_v + e, load_wide(row, e, dtype));
                for (int32_t line = 0; next && line < row_bytes; line += 64, next += 64) __builtin_prefetch(next, 0, 2);
            }
        } else {
            for (int32_t o = 0; o < part.count; o++)
                for (int32_t d = 0; d < c->key_dim; d += FL_WIDE) {
                    const float scale = kscale ? kscale[d / FL_KV_GROUP * SROW + j + o] : 1.0f;
                    float x[FL_WIDE];
                    wide_store(x, load_wide(part.head, (part.offset + o) * c->key_dim + d, dtype));
                    if (d < width) memcpy(v + (j + o) * width + d, x, sizeof x);
                    for (int32_t i = 0; i < FL_WIDE && d + i < c->key_dim; i++) kt[(d + i) * SROW + j + o] = x[i] * scale;
                }
        }
        j += part.count;
    }
}

static void stage(const fl_cache *c, const int32_t *blocks, int32_t head, int64_t first, int32_t from, int32_t to,
                  const float *kscale, float *kt, float *v, int32_t width, const char *next) {
    if (c->dtype == FL_DT_F16) stage_typed(FL_DT_F16, c, blocks, head, first, from, to, NULL, kt, v, width, next);
    else if (c->dtype == FL_DT_BF16)
        stage_typed(FL_DT_BF16, c, blocks, head, first, from, to, NULL, kt, v, width, next);
    else if (c->dtype == FL_DT_I8)
        stage_typed(FL_DT_I8, c, blocks, head, first, from, to, kscale, kt, v, width, next);
    else
        stage_typed(FL_DT_F32, c, blocks, head, first, from, to, NULL, kt, v, width, next);
}

/* score[i][j] = q[i] · key j for the pairs [i0, i1), for all tokens of the step. */
static void step_scores(const fl_cache *c, const int32_t *blocks, int32_t head, int64_t first, const step *w, int32_t i0,
                        int32_t i1, const float *const *q, const float *staged, const float *kscale) {
    const int dtype = staged ? FL_DT_F32 : kscale ? SCALED : c->dtype;
    for (int32_t j = staged ? w->lo / FL_WIDE * FL_WIDE : w->lo; j < w->hi;) {
        piece part = {(const char *)(staged + j), 0, w->hi - j};
        factor keys = {part.head, NULL, SROW, kscale ? kscale + j : NULL};
        if (!staged) {
            part = piece_at(c, blocks, head, first, j, w->hi);
            keys.p = at(part.head, part.offset, c->dtype), keys.ld = fl_key_stride(c);
            keys.ahead = part.head + fl_values_at(c);
        }
        for (int32_t i = i0; i < i1;) {
            int k = share(i1 - i);
            float *y[6];
            for (int x = 0; x < k; x++) y[x] = w->score[i + x] + j;
            product(k, dtype, q + i, 0, c->key_dim, &keys, y, part.count, 0);
            keys.ahead = NULL;
            i += k;
        }
        j += part.count;
    }
}

/* acc[i] += Σ_j p[i][j] · value j for the pairs [i0, i1); vscale: of the values' groups of channels, [groups][SROW], NULL where the cache
 * holds none; next: what is read after this step */
static void step_values(const fl_cache *c, const int32_t *blocks, int32_t head, int64_t first, const step *w, int32_t i0,
                        int32_t i1, const float *staged, const float *vscale, int32_t value_dim, int32_t width,
                        const char *next) {
    const int dtype = staged ? FL_DT_F32 : c->dtype;
    const int32_t channels = vscale ? FL_KV_GROUP : value_dim;
    for (int32_t j = w->lo; j < w->hi;) {
        piece part = {(const char *)staged, 0, w->hi - j};
        factor values = {part.head, NULL, width, NULL};
        int32_t base = 0; /* the token of the step that is row 0 of `values` */
        if (!staged) {
            part = piece_at(c, blocks, head, first, j, w->hi);
            values.p = at(part.head + fl_values_at(c), part.offset * c->value_dim, c->dtype), values.ld = c->value_dim,
            base = j;
            values.ahead = j + part.count < w->hi ? piece_at(c, blocks, head, first, j + part.count, SROW).head : next;
        }
        for (int32_t i = i0; i < i1;) {
            int32_t f[6], t[6];
            const float *p[6];
            int k = share(i1 - i);
            for (int x = 0; x < k; x++) f[x] = w->from[i + x] - base, t[x] = w->to[i + x] - base;
            for (int32_t column = 0; column < value_dim; column += channels) {
                float weight[6][SROW], *acc[6];
                factor group = values;
                group.p = at(values.p, column, dtype);
                if (values.ahead) group.ahead = at(values.ahead, column, dtype);
                for (int x = 0; x < k; x++) {
                    p[x] = w->score[i + x] + base, acc[x] = w->acc[i + x] + column;
                    if (!vscale) continue;
                    const float *s = w->score[i + x], *scale = vscale + column / FL_KV_GROUP * SROW;
                    for (int32_t o = w->from[i + x] / 16 * 16; o < w->to[i + x]; o += FL_WIDE)
                        storew(weight[x] + o, loadw(s + o) * loadw(scale + o));
                    p[x] = weight[x] + base;
                }
                int32_t left = value_dim - column;
                values_spans(k, dtype, p, f, t, j - base, j - base + part.count, &group, acc,
                             left < channels ? left : channels);
            }
            values.ahead = NULL;
            i += k;
        }
        j += part.count;
    }
}

void FL_NAME(fl_attention_unit)(const fl_attention *a, int64_t s, int32_t kv_head, int32_t count, int32_t head0, int64_t row0,
                                int64_t row1, int64_t range0, int64_t range1, void *scratch) {
    const fl_cache *c = &a->cache;
    const int32_t *blocks = a->block_table + s * a->table_stride;
    int32_t group = a->heads / c->heads, width = (a->value_dim + 15) / 16 * 16;
    float *sc = scratch, *acc = sc + FL_TILE * SROW, *total = acc + FL_TILE * width, *kt = total + FL_TILE * width,
          *vt = kt + (int64_t)c->key_dim * SROW, *kscale = NULL, *vscale = NULL;
    if (c->dtype == FL_DT_I8)
        kscale = vt + FL_SUB * width, vscale = c->value_dim ? kscale + fl_kv_groups(c->key_dim) * SROW : kscale;

    /* pairs: kv head after kv head, of each row after row */
    int32_t heads = group - head0 < FL_TILE ? group - head0 : FL_TILE, each = heads * (int32_t)(row1 - row0), query[FL_TILE];
    step w = {.n = each * count};
    span see[FL_TILE], all = {INT64_MAX, 0}, common = {0, INT64_MAX}; /* keys that any, that each of them sees */
    int64_t position[FL_TILE];
    const float *q[FL_TILE];
    float M[FL_TILE], L[FL_TILE];
    for (int32_t i = 0; i < w.n; i++) {
        int64_t row = row0 + i % each / heads;
        query[i] = (kv_head + i / each) * group + head0 + i % heads;
        see[i] = visible(a, s, row), position[i] = a->positions[row];
        if (see[i].lo > common.lo) common.lo = see[i].lo;
        if (see[i].hi < common.hi) common.hi = see[i].hi;
        q[i] = (const float *)a->q.p + row * a->q.s0 + query[i] * a->q.s1;
        w.score[i] = sc + i * SROW, w.acc[i] = acc + i * width;
        w.slope[i] = a->slopes ? a->slopes[query[i]] : 0.0f;
        M[i] = -INFINITY, L[i] = 0.0f;
        if (see[i].lo >= see[i].hi) continue;
        if (see[i].lo < all.lo) all.lo = see[i].lo;
        if (see[i].hi > all.hi) all.hi = see[i].hi;
    }
    if (!a->partials) memset(total, 0, (size_t)(w.n * width) * sizeof(float));
    int staged = c->value_dim == 0 || (c->dtype != FL_DT_F32 && each >= STAGED);

    for (int64_t r = range0 > all.lo / FL_RANGE ? range0 : all.lo / FL_RANGE; r < range1 && r * FL_RANGE < all.hi; r++) {
        int64_t begin = r * FL_RANGE, end = begin + FL_RANGE < all.hi ? begin + FL_RANGE : all.hi;
        memset(acc, 0, (size_t)(w.n * width) * sizeof(float));
        memset(w.l, 0, (size_t)w.n * sizeof w.l[0]);
        for (int32_t i = 0; i < w.n; i++) w.m[i] = -INFINITY;

        for (int64_t sub = begin; sub < end; sub += FL_SUB) {
            w.whole = common.lo <= sub && sub + FL_SUB <= common.hi;
            w.lo = w.whole ? 0 : FL_SUB, w.hi = w.whole ? FL_SUB : 0;
            for (int32_t i = 0; i < w.n && w.whole; i++) w.from[i] = 0, w.to[i] = FL_SUB;
            for (int32_t i = 0; i < w.n && !w.whole; i++) {
                int64_t f = see[i].lo > sub ? see[i].lo - sub : 0, t = see[i].hi - sub < FL_SUB ? see[i].hi - sub : FL_SUB;
                w.from[i] = (int32_t)(f < FL_SUB ? f : FL_SUB), w.to[i] = (int32_t)(t > 0 ? t : 0);
                if (w.from[i] >= w.to[i]) w.from[i] = w.to[i] = 0;
                else
                    w.lo = w.from[i] < w.lo ? w.from[i] : w.lo, w.hi = w.to[i] > w.hi ? w.to[i] : w.hi;
            }
            for (int32_t i = 0; i < w.n && a->slopes; i++) w.distance[i] = (float)(sub - position[i]);
            if (w.lo >= w.hi) continue;
            for (int32_t h = 0, head = kv_head; h < count; h++, head++) {
                const int32_t i0 = h * each, i1 = i0 + each;
                const char *next = NULL;
                if (h + 1 < count) next = piece_at(c, blocks, head + 1, sub, w.lo, SROW).head;
                else if (sub + FL_SUB < end)
                    next = piece_at(c, blocks, kv_head, sub, FL_SUB, 2 * FL_SUB).head;
                if (kscale) stage_scales(c, blocks, head, sub, w.lo, w.hi, kscale, vscale);
                if (staged) stage(c, blocks, head, sub, w.lo, w.hi, kscale, kt, vt, width, next);
                step_scores(c, blocks, head, sub, &w, i0, i1, q, staged ? kt : NULL, kscale);
                step_softmax(a, &w, i0, i1, width);
                step_values(c, blocks, head, sub, &w, i0, i1, staged ? vt : NULL, vscale, a->value_dim, width, next);
            }
        }
        for (int32_t i = 0; i < w.n; i++) {
            if (see[i].lo >= end || see[i].hi <= begin || see[i].lo >= see[i].hi) continue;
            float l = sum8(load8(w.l[i]) + load8(w.l[i] + 8));
            if (a->partials) {
                float *part = partial(a, row0 + i % each / heads, query[i], r - a->first);
                part[0] = w.m[i], part[1] = l;
                memcpy(part + 8, acc + i * width, (size_t)width * sizeof(float));
            } else {
                merge(&M[i], &L[i], total + i * width, w.m[i], l, acc + i * width, width);
            }
        }
    }
    if (a->partials) return;
    for (int32_t i = 0; i < w.n; i++) {
        int64_t row = row0 + i % each / heads;
        if (see[i].lo >= see[i].hi) zero_row(a, row, query[i]);
        else
            finish(a, row, query[i], M[i], L[i], total + i * width);
    }
}

/* A group of channels as int8: code = round(x / scale), scale = largest |x| / 127; infinity and NaN make all of it NaN. */
static float store_codes(const float *x, int32_t n, int8_t *to, int64_t step) {
    float most = 0.0f;
    int32_t odd = 0;
    for (int32_t i = 0; i < n; i++) {
        float size = fabsf(x[i]);
        odd |= !(size < INFINITY);
        most = size > most ? size : most;
    }
    const float scale = odd ? NAN : most / 127.0f, divisor = scale > 0.0f ? scale : 1.0f;
    for (int32_t i = 0; i < n; i++) {
        float code = odd ? 0.0f : rintf(x[i] / divisor);
        to[i * step] = (int8_t)(code > 127.0f ? 127.0f : code < -127.0f ? -127.0f : code);
    }
    return scale;
}

/* n <= 16 values to halves or to bf16, at `to`. */
FL_INLINE void store_short(const float *x, int32_t n, int dtype, char *to) {
    uint16_t out[16];
#if defined(__F16C__) && !defined(FL_EMULATE)
    if (dtype == FL_DT_F16 && n == 16) { /* the same bits as to_half1 */
        for (int32_t i = 0; i < 16; i += 8)
            _mm_storeu_si128((__m128i *)(void *)(to + 2 * i),
                             _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
        return;
    }
#endif
    for (int32_t i = 0; i < n; i++) out[i] = dtype == FL_DT_F16 ? to_half1(x[i]) : to_bfloat1(x[i]);
    memcpy(to, out, (size_t)n * sizeof out[0]);
}

/* Keys of n <= 16 tokens that stand side by side in a block, to their transposed rows: sixteen elements of each at a time. x: of the
 * first token, `ld` apart; to: its place; step: elements from one row to the next. */
static void store_keys(const float *x, int64_t ld, int32_t n, int32_t dim, int dtype, char *to, int64_t step) {
    for (int32_t d0 = 0; d0 < dim; d0 += 16) {
        float turned[16][16];
        const int32_t count = dim - d0 < 16 ? dim - d0 : 16;
        for (int32_t t = 0; t < n; t++)
            for (int32_t d = 0; d < count; d++) turned[d][t] = x[t * ld + d0 + d];
        for (int32_t d = 0; d < count; d++) {
            char *row = to + (d0 + d) * step * fl_element_bytes(dtype);
            if (dtype == FL_DT_F32) memcpy(row, turned[d], (size_t)n * sizeof(float));
            else
                store_short(turned[d], n, dtype, row);
        }
    }
}

/* One row of keys or values into the cache: element i at to[i], of int8 at to[i · step]; scale: where that of the first group of int8
 * goes, those of the others `scales` places behind one another. */
static void store_row(const float *x, int32_t n, int dtype, char *to, int64_t step, float *scale, int64_t scales) {
    if (dtype == FL_DT_F32) memcpy(to, x, (size_t)n * sizeof(float));
    else if (dtype == FL_DT_F16 || dtype == FL_DT_BF16) {
        for (int32_t i = 0; i < n; i += 16) store_short(x + i, n - i < 16 ? n - i : 16, dtype, to + 2 * i);
    } else {
        for (int32_t i = 0; i < n; i += FL_KV_GROUP)
            scale[i / FL_KV_GROUP * scales] =
                store_codes(x + i, n - i < FL_KV_GROUP ? n - i : FL_KV_GROUP, (int8_t *)to + i * step, step);
    }
}

/* Tokens from t on, up to 16 and before i1, whose slots follow each other inside of one block. */
static int32_t neighbours(const fl_cache *c, const int32_t *slots, int64_t t, int64_t i1) {
    int32_t n = 1;
    while (n < 16 && t + n < i1 && slots[t + n] == slots[t] + n && slots[t + n] % c->block_size) n++;
    return n;
}

void FL_NAME(fl_kv_write)(const fl_cache *c, const fl_view *key, const fl_view *value, const int32_t *slots, int64_t i0,
                          int64_t i1) {
    const int apart = c->dtype != FL_DT_I8 && c->value_dim; /* keys are written apart, several tokens at once */
    for (int64_t t = i0, n; t < i1; t += n) {
        n = 1;
        if (slots[t] < 0) continue;
        if (apart) n = neighbours(c, slots, t, i1);
        int64_t offset = slots[t] % c->block_size;
        char *head = c->p + slots[t] / c->block_size * c->block_bytes;
        for (int32_t h = 0; h < c->heads; h++, head += fl_head_bytes(c)) {
            float *scales = (float *)(head + fl_scales_at(c)) + offset; /* int8 only */
            int64_t step = c->value_dim ? fl_key_stride(c) : 1, first = c->value_dim ? offset : offset * c->key_dim;
            char *keys = head + first * fl_element_bytes(c->dtype);
            const float *x = (const float *)key->p + t * key->s0 + h * key->s1;
            if (apart) store_keys(x, key->s0, (int32_t)n, c->key_dim, c->dtype, keys, step);
            else
                store_row(x, c->key_dim, c->dtype, keys, step, scales, c->block_size);
            if (!c->value_dim) continue;
            char *values = head + fl_values_at(c) + offset * c->value_dim * fl_element_bytes(c->dtype);
            for (int64_t i = 0; i < n; i++, values += c->value_dim * fl_element_bytes(c->dtype))
                store_row((const float *)value->p + (t + i) * value->s0 + h * value->s1, c->value_dim, c->dtype, values, 1,
                          scales + fl_kv_groups(c->key_dim) * c->block_size, c->block_size);
        }
    }
}
