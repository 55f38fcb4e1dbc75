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
#include "attention.h"

/* Register block of a product: FL_Q * FL_V sums, FL_V operands and one factor fit the registers (32, or 16). */
#if FL_WIDE == 16
enum { FL_Q = 6, FL_V = 4 };
#elif defined(__FMA__)
enum { FL_Q = 6, FL_V = 2 };
#else
enum { FL_Q = 4, FL_V = 2 };
#endif
enum { STAGED = 16 }; /* pairs from which on a step is brought to f32 first */

enum { SCALED = 16 }; /* type of int8 keys: codes times the scales of their token and group */

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
          *vt = kt + fl_even(c->key_dim) * SROW, *kscale = NULL, *vscale = NULL;
    if (fl_is_codes(c->dtype))
        kscale = vt + FL_SUB * width, vscale = c->value_dim ? kscale + fl_kv_groups(c->key_dim) * SROW : kscale;
#if FL_WIDE == 16
    const int pairs = fl_is_pairs(c->dtype);
    uint16_t *const weights16 =
        (uint16_t *)(vt + FL_SUB * width + (fl_kv_groups(c->key_dim) + fl_kv_groups(c->value_dim)) * SROW);
    const pairs_scratch halves = {weights16 + FL_TILE * FL_SUB, weights16, (char *)kt, (char *)vt, kscale, vscale};
#endif

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
#if FL_WIDE == 16
        if (pairs) FL_NAME(fl_attention_query)(q[i], c->key_dim, halves.q + i * fl_even(c->key_dim));
#endif
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
#if FL_WIDE == 16
                if (pairs) {
                    FL_NAME(fl_attention_pairs)(a, blocks, head, sub, &w, i0, i1, &halves, width, next);
                    continue;
                }
#endif
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
