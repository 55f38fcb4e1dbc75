/* Paged attention, and the cache it reads.
 *
 * One *unit* is up to FL_TILE (row, head) pairs of one sequence that share one kv head. Keys are taken in steps of FL_SUB tokens at fixed
 * places of the context; scores and weights of a step stay in L1:
 *
 *     scores s[q][64] = q · K      eight tokens a vector, since a block holds keys transposed: K [Dk][tokens]
 *     weights p = e^(s − max)      running maximum and sum per (row, head), old sums scaled by e^(old max − new max)
 *     acc[q][Dv] += p · V          over the tokens which this row sees and no others: an unused slot may hold NaN
 *
 * Steps are summed within ranges of FL_RANGE keys, and the ranges' results are merged in ascending order. A unit may cover one range
 * (several threads then share a long context, and `attention_merge` adds up what they left) or all of them: the arithmetic is the
 * same, so bits depend neither on the threads, nor on the batch, nor on how a prompt was cut. Where a unit has many pairs, or values
 * are a prefix of the keys, a step's keys and values are first brought to f32 in scratch, which does not change a value.
 */
#include "ops.h"
#include "vec.h"

enum { SROW = FL_SUB + 8, MAX_WIDTH = 1024 };

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

FL_INLINE f32x8 load_any(const void *p, int64_t i, int half) {
    return half ? half8((const uint16_t *)p + i) : load8((const float *)p + i);
}
FL_INLINE const void *at(const void *p, int64_t i, int half) { return (const char *)p + i * (half ? 2 : 4); }

/* s[i][0…count) = q[i] · k for n queries; k [D] rows of `stride` tokens. Writes whole vectors. */
FL_INLINE void scores_n(int n, const float *const *q, int32_t D, const void *k, int64_t stride, int half, float *s,
                        int32_t count) {
    for (int32_t o = 0; o < count; o += 16) {
        acc8 a[4], b[4];
        for (int i = 0; i < n; i++) a[i] = b[i] = acc8_of(set8(0.0f));
        if (o + 8 < count) {
            for (int32_t d = 0; d < D; d++) {
                f32x8 u = load_any(k, d * stride + o, half), v = load_any(k, d * stride + o + 8, half);
                for (int i = 0; i < n; i++) {
                    a[i] = acc8_fma(a[i], q[i][d], u);
                    b[i] = acc8_fma(b[i], q[i][d], v);
                }
            }
            for (int i = 0; i < n; i++)
                store8(s + i * SROW + o, acc8_value(a[i])), store8(s + i * SROW + o + 8, acc8_value(b[i]));
        } else {
            for (int32_t d = 0; d < D; d++) {
                f32x8 u = load_any(k, d * stride + o, half);
                for (int i = 0; i < n; i++) a[i] = acc8_fma(a[i], q[i][d], u);
            }
            for (int i = 0; i < n; i++) store8(s + i * SROW + o, acc8_value(a[i]));
        }
    }
}

/* acc[i] += Σ_j p[i][j] · v[j] for tokens [j0, j1), ascending; rows of v and acc are read and written in whole vectors. */
FL_INLINE void values_n(int n, const float *const *p, int32_t j0, int32_t j1, const void *v, int64_t ldv, int half,
                        float *const *acc, int32_t width) {
    for (int32_t c = 0; c < width; c += 16) {
        acc8 a[4], b[4];
        if (c + 8 < width) {
            for (int i = 0; i < n; i++) a[i] = acc8_of(load8(acc[i] + c)), b[i] = acc8_of(load8(acc[i] + c + 8));
            for (int32_t j = j0; j < j1; j++) {
                f32x8 x = load_any(v, j * ldv + c, half), y = load_any(v, j * ldv + c + 8, half);
                for (int i = 0; i < n; i++) {
                    a[i] = acc8_fma(a[i], p[i][j], x);
                    b[i] = acc8_fma(b[i], p[i][j], y);
                }
            }
            for (int i = 0; i < n; i++) store8(acc[i] + c, acc8_value(a[i])), store8(acc[i] + c + 8, acc8_value(b[i]));
        } else {
            for (int i = 0; i < n; i++) a[i] = acc8_of(load8(acc[i] + c));
            for (int32_t j = j0; j < j1; j++) {
                f32x8 x = load_any(v, j * ldv + c, half);
                for (int i = 0; i < n; i++) a[i] = acc8_fma(a[i], p[i][j], x);
            }
            for (int i = 0; i < n; i++) store8(acc[i] + c, acc8_value(a[i]));
        }
    }
}

#define DISPATCH(n, half, CALL)                                                                                                \
    switch (n * 2 + half) {                                                                                                    \
    case 2:                                                                                                                    \
        CALL(1, 0);                                                                                                            \
        break;                                                                                                                 \
    case 3:                                                                                                                    \
        CALL(1, 1);                                                                                                            \
        break;                                                                                                                 \
    case 4:                                                                                                                    \
        CALL(2, 0);                                                                                                            \
        break;                                                                                                                 \
    case 5:                                                                                                                    \
        CALL(2, 1);                                                                                                            \
        break;                                                                                                                 \
    case 6:                                                                                                                    \
        CALL(3, 0);                                                                                                            \
        break;                                                                                                                 \
    case 7:                                                                                                                    \
        CALL(3, 1);                                                                                                            \
        break;                                                                                                                 \
    case 8:                                                                                                                    \
        CALL(4, 0);                                                                                                            \
        break;                                                                                                                 \
    default:                                                                                                                   \
        CALL(4, 1);                                                                                                            \
        break;                                                                                                                 \
    }

static void scores(int n, const float *const *q, int32_t D, const void *k, int64_t stride, int half, float *s, int32_t count) {
#define CALL(N, H) scores_n(N, q, D, k, stride, H, s, count)
    DISPATCH(n, half, CALL)
#undef CALL
}

static void values(int n, const float *const *p, int32_t j0, int32_t j1, const void *v, int64_t ldv, int half,
                   float *const *acc, int32_t width) {
#define CALL(N, H) values_n(N, p, j0, j1, v, ldv, H, acc, width)
    if (j0 < j1) DISPATCH(n, half, CALL)
#undef CALL
}

/* One value for up to four queries: the tokens that all of them see together, the rest one by one, each in ascending order. */
static void values_spans(int n, const float *const *p, const int32_t *from, const int32_t *to, int32_t j0, int32_t j1,
                         const void *v, int64_t ldv, int half, float *const *acc, int32_t width) {
    int32_t lo = j0, hi = j1;
    for (int i = 0; i < n; i++) {
        if (from[i] > lo) lo = from[i];
        if (to[i] < hi) hi = to[i];
    }
    if (hi < lo) hi = lo;
    for (int i = 0; i < n; i++) {
        int32_t a = from[i] > j0 ? from[i] : j0, b = to[i] < lo ? to[i] : lo;
        values(1, p + i, a, b, v, ldv, half, acc + i, width);
    }
    values(n, p, lo, hi, v, ldv, half, acc, width);
    for (int i = 0; i < n; i++) {
        int32_t a = from[i] > hi ? from[i] : hi, b = to[i] < j1 ? to[i] : j1;
        values(1, p + i, a, b, v, ldv, half, acc + i, width);
    }
}

/* (M, L, O) += (m, l, acc): two parts of a softmax, the second covering later keys. */
FL_INLINE void merge(float *M, float *L, float *O, float m, float l, const float *acc, int32_t width) {
    if (m == -INFINITY) { /* every score was −inf or NaN: l and acc are zeros or NaN */
        *L += l;
        for (int32_t c = 0; c < width; c += 8) store8(O + c, load8(O + c) + load8(acc + c));
        return;
    }
    float top = *M > m ? *M : m;
    float a = exp1(*M - top), b = exp1(m - top);
    *M = top;
    *L = *L * a + l * b;
    for (int32_t c = 0; c < width; c += 8) store8(O + c, load8(O + c) * a + load8(acc + c) * b);
}

FL_INLINE void finish(const fl_attention *a, int64_t row, int32_t head, float M, float L, const float *O) {
    float *y = (float *)a->out.p + row * a->out.s0 + head * a->out.s1;
    float factor = 1.0f;
    if (a->sinks) {
        float sink = a->sinks[head], top = M > sink ? M : sink;
        factor = exp1(M - top);
        L = L * factor + exp1(sink - top);
    }
    for (int32_t c = 0; c < a->value_dim; c++) y[c] = O[c] * factor / L;
}

FL_INLINE float *partial(const fl_attention *a, int64_t row, int32_t head, int64_t range) {
    int64_t width = (a->value_dim + 15) / 16 * 16;
    return a->partials + ((row * a->heads + head) * a->ranges + range) * (width + 8);
}

static void zero_row(const fl_attention *a, int64_t row, int32_t head) {
    memset((float *)a->out.p + row * a->out.s0 + head * a->out.s1, 0, (size_t)a->value_dim * sizeof(float));
}

void FL_NAME(fl_attention_merge)(const fl_attention *a, int64_t s, int64_t row, int32_t head) {
    float O[MAX_WIDTH], M = -INFINITY, L = 0.0f;
    span v = visible(a, s, row);
    if (v.lo >= v.hi) {
        zero_row(a, row, head);
        return;
    }
    int32_t width = (a->value_dim + 15) / 16 * 16;
    memset(O, 0, sizeof(float) * (size_t)width);
    for (int64_t r = v.lo / FL_RANGE; r * FL_RANGE < v.hi; r++) {
        const float *part = partial(a, row, head, r);
        merge(&M, &L, O, part[0], part[1], part + 8, width);
    }
    finish(a, row, head, M, L, O);
}

/* Softmax step of one query over its tokens [from, to) of a step: s becomes weights; the running m, l and acc are brought along. */
static void softmax_step(const fl_attention *a, float *s, int32_t from, int32_t to, float slope, float distance, float *m,
                         float *l, float *acc, int32_t width) {
    int32_t v0 = from / 8, v1 = (to + 7) / 8;
    const f32x8 iota = {0, 1, 2, 3, 4, 5, 6, 7};
    f32x8 top = set8(-INFINITY);
    for (int32_t i = v0; i < v1; i++) {
        f32x8 x = load8(s + 8 * i) * a->scale;
        if (a->softcap > 0.0f) x = a->softcap * tanh8(x / a->softcap);
        if (a->slopes) x = x + slope * (iota + (float)(8 * i) + distance);
        store8(s + 8 * i, x);
    }
    for (int32_t j = 8 * v0; j < from; j++) s[j] = -INFINITY;
    for (int32_t j = to; j < 8 * v1; j++) s[j] = -INFINITY;
    for (int32_t i = v0; i < v1; i++) top = max8(load8(s + 8 * i), top);
    float now = top8(top);
    now = now > *m ? now : *m;
    if (now == -INFINITY) { /* nothing above −inf so far: weights are zero, or NaN where a score is */
        for (int32_t j = from; j < to; j++) {
            s[j] = s[j] != s[j] ? s[j] : 0.0f;
            *l += s[j];
        }
        return;
    }
    float keep = exp1(*m - now);
    f32x8 sum = set8(0.0f);
    for (int32_t i = v0; i < v1; i++) {
        f32x8 w = exp8(load8(s + 8 * i) - now);
        store8(s + 8 * i, w);
        sum += w;
    }
    *m = now;
    *l = *l * keep + sum8(sum);
    if (keep != 1.0f)
        for (int32_t c = 0; c < width; c += 8) store8(acc + c, load8(acc + c) * keep);
}

/* Keys [from, to) of a step (from its first token) to f32: kt [Dk][SROW], v [64][width]. */
static void stage(const fl_cache *c, const int32_t *blocks, int32_t head, int64_t first, int32_t from, int32_t to, float *kt,
                  float *v, int32_t value_dim, int32_t width) {
    int half = c->dtype == FL_DT_F16;
    int64_t padded = c->value_dim ? (c->block_size + 7) / 8 * 8 : c->block_size;
    int64_t head_size = c->key_dim * padded + (int64_t)c->value_dim * c->block_size;
    for (int32_t j = from; j < to;) {
        int64_t block = (first + j) / c->block_size, offset = (first + j) % c->block_size;
        int32_t count = (int32_t)(c->block_size - offset < to - j ? c->block_size - offset : to - j);
        const void *k = at(c->p + blocks[block] * c->block_bytes, head * head_size, half);
        if (c->value_dim) {
            for (int32_t d = 0; d < c->key_dim; d++)
                for (int32_t o = 0; o < count; o += 8)
                    store8(kt + d * SROW + j + o, load_any(k, d * padded + offset + o, half));
            const void *values = at(k, c->key_dim * padded, half);
            for (int32_t o = 0; o < count; o++)
                for (int32_t e = 0; e < width; e += 8)
                    if (e < value_dim) store8(v + (j + o) * width + e, load_any(values, (offset + o) * c->value_dim + e, half));
        } else {
            for (int32_t o = 0; o < count; o++) {
                const void *row = at(k, (offset + o) * c->key_dim, half);
                for (int32_t d = 0; d < c->key_dim; d += 8) {
                    f32x8 x = load_any(row, d, half);
                    if (d < value_dim) store8(v + (j + o) * width + d, x);
                    for (int32_t i = 0; i < 8 && d + i < c->key_dim; i++) kt[(d + i) * SROW + j + o] = x[i];
                }
            }
        }
        j += count;
    }
}

void FL_NAME(fl_attention_unit)(const fl_attention *a, int64_t s, int32_t kv_head, int64_t row0, int64_t row1, int32_t range0,
                                int32_t range1, void *scratch) {
    const fl_cache *c = &a->cache;
    const int32_t *blocks = a->block_table + s * a->table_stride;
    int half = c->dtype == FL_DT_F16;
    int32_t group = a->heads / c->heads, width = (a->value_dim + 15) / 16 * 16;
    int64_t padded = c->value_dim ? (c->block_size + 7) / 8 * 8 : c->block_size;
    int64_t head_size = c->key_dim * padded + (int64_t)c->value_dim * c->block_size;
    float *sc = scratch, *acc = sc + FL_TILE * SROW, *total = acc + FL_TILE * width, *kt = total + FL_TILE * width,
          *vt = kt + (int64_t)c->key_dim * SROW;

    for (int32_t h0 = 0; h0 < group; h0 += FL_TILE) {
        int32_t heads = group - h0 < FL_TILE ? group - h0 : FL_TILE, n = heads * (int32_t)(row1 - row0);
        span see[FL_TILE], all = {INT64_MAX, 0};
        const float *q[FL_TILE];
        float M[FL_TILE], L[FL_TILE], m[FL_TILE], l[FL_TILE];
        for (int32_t i = 0; i < n; i++) {
            int64_t row = row0 + i / heads;
            see[i] = visible(a, s, row);
            q[i] = (const float *)a->q.p + row * a->q.s0 + (kv_head * group + h0 + i % heads) * a->q.s1;
            M[i] = -INFINITY, L[i] = 0.0f;
            if (see[i].lo >= see[i].hi) continue;
            if (see[i].lo < all.lo) all.lo = see[i].lo;
            if (see[i].hi > all.hi) all.hi = see[i].hi;
        }
        if (!a->partials) memset(total, 0, (size_t)(n * width) * sizeof(float));
        int staged = c->value_dim == 0 || (half && n >= 8);

        for (int64_t r = range0 > all.lo / FL_RANGE ? range0 : all.lo / FL_RANGE; r < range1 && r * FL_RANGE < all.hi; r++) {
            int64_t begin = r * FL_RANGE, end = begin + FL_RANGE < all.hi ? begin + FL_RANGE : all.hi;
            memset(acc, 0, (size_t)(n * width) * sizeof(float));
            for (int32_t i = 0; i < n; i++) m[i] = -INFINITY, l[i] = 0.0f;

            for (int64_t sub = begin; sub < end; sub += FL_SUB) {
                int32_t from[FL_TILE], to[FL_TILE], lo = FL_SUB, hi = 0;
                for (int32_t i = 0; i < n; i++) {
                    int64_t f = see[i].lo > sub ? see[i].lo - sub : 0, t = see[i].hi - sub < FL_SUB ? see[i].hi - sub : FL_SUB;
                    from[i] = (int32_t)(f < FL_SUB ? f : FL_SUB), to[i] = (int32_t)(t > 0 ? t : 0);
                    if (from[i] >= to[i]) from[i] = to[i] = 0;
                    else
                        lo = from[i] < lo ? from[i] : lo, hi = to[i] > hi ? to[i] : hi;
                }
                if (lo >= hi) continue;
                if (staged) {
                    stage(c, blocks, kv_head, sub, lo, hi, kt, vt, a->value_dim, width);
                    for (int32_t i = 0; i < n; i += 4)
                        scores(n - i < 4 ? n - i : 4, q + i, c->key_dim, kt + lo / 8 * 8, SROW, 0, sc + i * SROW + lo / 8 * 8,
                               hi - lo / 8 * 8);
                } else {
                    for (int32_t j = lo; j < hi;) {
                        int64_t block = (sub + j) / c->block_size, offset = (sub + j) % c->block_size;
                        int32_t count = (int32_t)(c->block_size - offset < hi - j ? c->block_size - offset : hi - j);
                        const void *k = at(c->p + blocks[block] * c->block_bytes, kv_head * head_size + offset, half);
                        for (int32_t i = 0; i < n; i += 4)
                            scores(n - i < 4 ? n - i : 4, q + i, c->key_dim, k, padded, half, sc + i * SROW + j, count);
                        j += count;
                    }
                }
                for (int32_t i = 0; i < n; i++)
                    if (from[i] < to[i]) {
                        int32_t head = kv_head * group + h0 + i % heads;
                        float distance = (float)(sub - a->positions[row0 + i / heads]);
                        softmax_step(a, sc + i * SROW, from[i], to[i], a->slopes ? a->slopes[head] : 0.0f, distance, &m[i],
                                     &l[i], acc + i * width, width);
                    }
                for (int32_t j = lo; j < hi;) {
                    int64_t block = (sub + j) / c->block_size, offset = (sub + j) % c->block_size;
                    int32_t count = hi - j, first = 0;
                    const void *v = vt;
                    int64_t ldv = width;
                    if (!staged) {
                        if (c->block_size - offset < count) count = (int32_t)(c->block_size - offset);
                        v = at(c->p + blocks[block] * c->block_bytes,
                               kv_head * head_size + c->key_dim * padded + offset * c->value_dim, half);
                        ldv = c->value_dim, first = j;
                    }
                    int32_t real = (a->value_dim + 7) / 8 * 8;
                    for (int32_t i = 0; i < n; i += 4) {
                        int32_t k = n - i < 4 ? n - i : 4, f[4], t[4];
                        const float *p[4];
                        float *sum[4];
                        for (int32_t x = 0; x < k; x++) {
                            p[x] = sc + (i + x) * SROW + first, sum[x] = acc + (i + x) * width;
                            f[x] = from[i + x] - first, t[x] = to[i + x] - first;
                        }
                        values_spans(k, p, f, t, j - first, j - first + count, v, ldv, staged ? 0 : half, sum, real);
                    }
                    j += count;
                }
            }
            for (int32_t i = 0; i < n; i++) {
                if (see[i].lo >= end || see[i].hi <= begin || see[i].lo >= see[i].hi) continue;
                if (a->partials) {
                    float *part = partial(a, row0 + i / heads, kv_head * group + h0 + i % heads, r);
                    part[0] = m[i], part[1] = l[i];
                    memcpy(part + 8, acc + i * width, (size_t)width * sizeof(float));
                } else {
                    merge(&M[i], &L[i], total + i * width, m[i], l[i], acc + i * width, width);
                }
            }
        }
        if (a->partials) continue;
        for (int32_t i = 0; i < n; i++) {
            int64_t row = row0 + i / heads;
            int32_t head = kv_head * group + h0 + i % heads;
            if (see[i].lo >= see[i].hi) zero_row(a, row, head);
            else
                finish(a, row, head, M[i], L[i], total + i * width);
        }
    }
}

void FL_NAME(fl_kv_write)(const fl_cache *c, const fl_view *key, const fl_view *value, const int32_t *slots, int64_t i0,
                          int64_t i1) {
    int half = c->dtype == FL_DT_F16;
    int64_t padded = c->value_dim ? (c->block_size + 7) / 8 * 8 : c->block_size;
    int64_t head_size = c->key_dim * padded + (int64_t)c->value_dim * c->block_size;
    for (int64_t t = i0; t < i1; t++) {
        if (slots[t] < 0) continue;
        int64_t offset = slots[t] % c->block_size;
        char *block = c->p + slots[t] / c->block_size * c->block_bytes;
        for (int32_t h = 0; h < c->heads; h++) {
            const float *k = (const float *)key->p + t * key->s0 + h * key->s1;
            char *to = (char *)at(block, h * head_size, half);
            int64_t step = c->value_dim ? padded : 1, from = c->value_dim ? offset : offset * c->key_dim;
            if (half) {
                for (int32_t d = 0; d < c->key_dim; d++) ((uint16_t *)to)[from + d * step] = to_half1(k[d]);
            } else {
                for (int32_t d = 0; d < c->key_dim; d++) ((float *)to)[from + d * step] = k[d];
            }
            if (!c->value_dim) continue;
            const float *v = (const float *)value->p + t * value->s0 + h * value->s1;
            to = (char *)at(to, c->key_dim * padded + offset * c->value_dim, half);
            if (half) {
                for (int32_t d = 0; d < c->value_dim; d++) ((uint16_t *)to)[d] = to_half1(v[d]);
            } else {
                memcpy(to, v, (size_t)c->value_dim * sizeof(float));
            }
        }
    }
}
