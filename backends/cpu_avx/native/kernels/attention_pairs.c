/* One step of attention in products of bf16, on AVX-512 BF16: twice as many a cycle as of f32.
 *
 * The instruction adds two products at a time, so the cache holds pairs (kernels.h): of channels in keys, of tokens in values. Queries
 * are rounded to bf16; keys and values are bf16 as they are cached, or codes of int8, which bf16 holds exactly:
 *
 *     s[q][16 tokens] += q[2 channels] · K[2 channels][16 tokens]     int8: the sum over a group of channels times the group's scale
 *     p = bf16(2^(s − max))                                           and the sum of weights is that of the rounded ones
 *     acc[q][16 channels] += p[2 tokens] · V[2 tokens][16 channels]   int8: of each group of channels with bf16(2^(s − max) · scale)
 *
 * Pairs are summed in ascending order: those of channels from 0 on, those of tokens at even places of the context. Where a row sees one
 * token of a pair only, the other one's value counts as 0; it may be NaN. So the order is the same for every number of rows.
 */
#include "attention.h"

#if FL_WIDE == 16

enum {
    QUERIES = 6,
    STAGED = 16,
    ALL = -1,
    SCALES_AHEAD = 4096
}; /* STAGED: rows from which on codes are brought to bf16 once for all of them */

typedef struct {
    const char *p;
    int64_t ld;        /* bytes from one row of pairs to the next */
    const char *ahead; /* what is fetched meanwhile; NULL: nothing */
} matrix;

FL_INLINE __m512i bf16_of_codes(const char *p) { /* 32 codes, exactly */
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(p + 16))));
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}
FL_INLINE __m512i load_pairs(const char *p, int codes) { return codes ? bf16_of_codes(p) : _mm512_loadu_si512(p); }
FL_INLINE __m512 dot(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
FL_INLINE __m512i both(const uint16_t *p) { /* one pair in all lanes */
    int32_t pair;
    memcpy(&pair, p, sizeof pair);
    return _mm512_set1_epi32(pair);
}

/* y[i][16 V tokens] = Σ q[i] · keys over `rows` pairs of channels. scale: of the keys' groups, [groups][SROW]. */
FL_INLINE void scores_n(int Q, int V, int codes, int scaled, const uint16_t *const *q, int32_t rows, const matrix *keys,
                        const float *scale, float *const *y, int32_t column) {
    const int64_t line = codes ? 32 : 64;
    const char *ahead = keys->ahead;
    for (int32_t r = 0, group = 0, end; r < rows; group++) {
        __m512 sum[QUERIES][4];
        for (int i = 0; i < Q; i++)
            for (int v = 0; v < V; v++) sum[i][v] = _mm512_setzero_ps();
        end = scaled && rows - r > FL_KV_GROUP / 2 ? r + FL_KV_GROUP / 2 : rows;
        for (; r < end; r++) {
            const char *p = keys->p + r * keys->ld + column / 16 * line;
            __m512i u[4];
            for (int v = 0; v < V; v++) u[v] = load_pairs(p + v * line, codes);
            if (ahead) {
                for (int v = 0; v < V; v += codes ? 2 : 1) __builtin_prefetch(ahead + v * line);
                ahead += V * line;
            }
            for (int i = 0; i < Q; i++) {
                const __m512i x = both(q[i] + 2 * r);
                for (int v = 0; v < V; v++) sum[i][v] = dot(sum[i][v], u[v], x);
            }
        }
        for (int i = 0; i < Q; i++)
            for (int v = 0; v < V; v++) {
                float *to = y[i] + column + 16 * v;
                if (scaled) sum[i][v] = _mm512_mul_ps(sum[i][v], _mm512_loadu_ps(scale + group * SROW + column + 16 * v));
                if (group) sum[i][v] = _mm512_add_ps(sum[i][v], _mm512_loadu_ps(to));
                _mm512_storeu_ps(to, sum[i][v]);
            }
    }
}

/* acc[i][16 V channels] += Σ p[i] · values over the pairs of tokens [r0, r1); keep: what acc is multiplied with before, NULL: 1; of the
 * values only the bits in `mask` count. */
FL_INLINE void values_n(int Q, int V, int codes, const uint16_t *const *p, int32_t r0, int32_t r1, const matrix *values,
                        float *const *acc, int32_t column, const float *keep, int32_t mask) {
    const int64_t line = codes ? 32 : 64;
    const char *ahead = values->ahead;
    if (ahead) ahead += column / 16 * line * (FL_SUB / 2);
    __m512 sum[QUERIES][4];
    for (int i = 0; i < Q; i++)
        for (int v = 0; v < V; v++) {
            sum[i][v] = _mm512_loadu_ps(acc[i] + column + 16 * v);
            if (keep) sum[i][v] = _mm512_mul_ps(sum[i][v], _mm512_set1_ps(keep[i]));
        }
    for (int32_t r = r0; r < r1; r++) {
        const char *from = values->p + r * values->ld + column / 16 * line;
        __m512i u[4];
        for (int v = 0; v < V; v++) {
            u[v] = load_pairs(from + v * line, codes);
            if (mask != ALL) u[v] = _mm512_and_si512(u[v], _mm512_set1_epi32(mask));
        }
        if (ahead) {
            for (int v = 0; v < V; v += codes ? 2 : 1) __builtin_prefetch(ahead + v * line);
            ahead += V * line;
        }
        for (int i = 0; i < Q; i++) {
            const __m512i x = both(p[i] + 2 * r);
            for (int v = 0; v < V; v++) sum[i][v] = dot(sum[i][v], u[v], x);
        }
    }
    for (int i = 0; i < Q; i++)
        for (int v = 0; v < V; v++) _mm512_storeu_ps(acc[i] + column + 16 * v, sum[i][v]);
}

FL_INLINE void scores_rows(int Q, int codes, int scaled, const uint16_t *const *q, int32_t rows, const matrix *keys,
                           const float *scale, float *const *y, int32_t lo, int32_t hi) {
    int32_t j = lo;
    for (; j + 48 < hi; j += 64) scores_n(Q, 4, codes, scaled, q, rows, keys, scale, y, j);
    for (; j + 16 < hi; j += 32) scores_n(Q, 2, codes, scaled, q, rows, keys, scale, y, j);
    for (; j < hi; j += 16) scores_n(Q, 1, codes, scaled, q, rows, keys, scale, y, j);
}

FL_INLINE void values_rows(int Q, int codes, const uint16_t *const *p, int32_t r0, int32_t r1, const matrix *values,
                           float *const *acc, int32_t c0, int32_t c1, const float *keep, int32_t mask) {
    int32_t c = c0;
    for (; c + 48 < c1; c += 64) values_n(Q, 4, codes, p, r0, r1, values, acc, c, keep, mask);
    for (; c + 16 < c1; c += 32) values_n(Q, 2, codes, p, r0, r1, values, acc, c, keep, mask);
    for (; c < c1; c += 16) values_n(Q, 1, codes, p, r0, r1, values, acc, c, keep, mask);
}

/* f(1, …) to f(6, …): the number of rows is known when the loops are compiled. */
#define FL_EACH_COUNT(n, f, ...)                                                                                               \
    switch (n) {                                                                                                               \
    case 1:                                                                                                                    \
        f(1, __VA_ARGS__);                                                                                                     \
        break;                                                                                                                 \
    case 2:                                                                                                                    \
        f(2, __VA_ARGS__);                                                                                                     \
        break;                                                                                                                 \
    case 3:                                                                                                                    \
        f(3, __VA_ARGS__);                                                                                                     \
        break;                                                                                                                 \
    case 4:                                                                                                                    \
        f(4, __VA_ARGS__);                                                                                                     \
        break;                                                                                                                 \
    case 5:                                                                                                                    \
        f(5, __VA_ARGS__);                                                                                                     \
        break;                                                                                                                 \
    default:                                                                                                                   \
        f(6, __VA_ARGS__);                                                                                                     \
    }

static void scores(int n, int codes, const uint16_t *const *q, int32_t rows, const matrix *keys, const float *scale,
                   float *const *y, int32_t lo, int32_t hi) {
    if (codes) FL_EACH_COUNT(n, scores_rows, 1, 1, q, rows, keys, scale, y, lo, hi)
    else if (scale)
        FL_EACH_COUNT(n, scores_rows, 0, 1, q, rows, keys, scale, y, lo, hi)
    else
        FL_EACH_COUNT(n, scores_rows, 0, 0, q, rows, keys, NULL, y, lo, hi)
}

static void common_values(int n, int codes, const uint16_t *const *p, int32_t r0, int32_t r1, const matrix *values,
                          float *const *acc, int32_t c0, int32_t c1, const float *keep) {
    if (codes) FL_EACH_COUNT(n, values_rows, 1, p, r0, r1, values, acc, c0, c1, keep, ALL)
    else
        FL_EACH_COUNT(n, values_rows, 0, p, r0, r1, values, acc, c0, c1, keep, ALL)
}

/* The tokens [from, to) of one row. */
static void own_values(int codes, const uint16_t *p, int32_t from, int32_t to, const matrix *values, float *acc, int32_t c0,
                       int32_t c1) {
    for (int32_t j = from, end; j < to; j = end) {
        const int32_t odd = j % 2, alone = odd || j + 1 == to;
        end = alone ? j + 1 : to / 2 * 2;
        const int32_t mask = !alone ? ALL : odd ? (int32_t)0xffff0000 : 0xffff;
        if (codes) values_rows(1, 1, &p, j / 2, (end + 1) / 2, values, &acc, c0, c1, NULL, mask);
        else
            values_rows(1, 0, &p, j / 2, (end + 1) / 2, values, &acc, c0, c1, NULL, mask);
    }
}

/* acc[i] = acc[i] · keep[i] + Σ p[i] · values, channels [c0, c1), tokens [from[i], to[i]), ascending: those before the pairs that all n
 * rows see, these, and those behind. */
static void step_values(int n, int codes, const uint16_t *const *p, const int32_t *from, const int32_t *to,
                        const matrix *values, float *const *acc, int32_t c0, int32_t c1, const float *keep) {
    const matrix rest = {values->p, values->ld, NULL};
    int32_t lo = 0, hi = FL_SUB / 2, same = 1;
    for (int i = 0; i < n; i++) {
        if ((from[i] + 1) / 2 > lo) lo = (from[i] + 1) / 2;
        if (to[i] / 2 < hi) hi = to[i] / 2;
        same &= from[i] == from[0] && to[i] == to[0];
    }
    if (hi < lo) hi = lo;
    if (!same || from[0] != 2 * lo) { /* the common pairs are not the first */
        for (int i = 0; i < n; i++)
            for (int32_t c = c0; c < c1; c += 16)
                _mm512_storeu_ps(acc[i] + c, _mm512_mul_ps(_mm512_loadu_ps(acc[i] + c), _mm512_set1_ps(keep[i])));
        keep = NULL;
        for (int i = 0; i < n; i++) own_values(codes, p[i], from[i], to[i] < 2 * lo ? to[i] : 2 * lo, &rest, acc[i], c0, c1);
    }
    common_values(n, codes, p, lo, hi, values, acc, c0, c1, keep);
    for (int i = 0; i < n; i++) own_values(codes, p[i], from[i] > 2 * hi ? from[i] : 2 * hi, to[i], &rest, acc[i], c0, c1);
}

/* 2^x within 2^-18, and exactly 1 for 0: the minimax polynomial of degree 4 of x − floor(x) with p(0) = 1. −inf gives 0. */
FL_INLINE __m512 power(__m512 x) {
    const __m512 f = _mm512_reduce_ps(x, 0x09);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.013426684774f), f, _mm512_set1_ps(0.0522424727678f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.241280198097f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.69304484129f));
    return _mm512_scalef_ps(_mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f)), x);
}

FL_INLINE uint64_t tokens_seen(const step *w, int32_t i) {
    const uint64_t below = w->to[i] < 64 ? (1ull << w->to[i]) - 1 : ~0ull;
    return w->from[i] < 64 ? below & (~0ull << w->from[i]) : 0;
}

/* Scores of a row, times factor, become weights: p bf16 [FL_SUB], zeros where a token is not seen; exact: keeps them unrounded, too, in
 * place of the scores. Where nothing is above −inf weights are zeros, or NaN where a score is. */
FL_INLINE void row_weights(float *s, uint16_t *p, float *l, uint64_t seen, float factor, float m, float keep, int exact) {
    const __m512i ones = _mm512_set1_epi32(0x3f803f80);
    const int nothing = m == -INFINITY;
    __m512 sum = _mm512_mul_ps(_mm512_loadu_ps(l), _mm512_set1_ps(keep));
    for (int32_t j = 0; j < FL_SUB; j += 32) {
        __m512 x[2];
        for (int v = 0; v < 2; v++) {
            const __mmask16 mask = (__mmask16)(seen >> (j + 16 * v));
            const __m512 score = _mm512_maskz_loadu_ps(mask, s + j + 16 * v);
            if (__builtin_expect(nothing, 0)) {
                x[v] = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(score, score, _CMP_UNORD_Q), score);
            } else {
                x[v] = power(_mm512_fmsub_ps(score, _mm512_set1_ps(factor), _mm512_set1_ps(m)));
                x[v] = _mm512_maskz_mov_ps(mask, x[v]);
            }
            if (exact) _mm512_storeu_ps(s + j + 16 * v, x[v]);
        }
        const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]);
        sum = dot(sum, rounded, ones);
        _mm512_storeu_si512(p + j, rounded);
    }
    _mm512_storeu_ps(l, sum);
}

/* The largest score of a row, times factor > 0. */
FL_INLINE float row_top(const float *s, uint64_t seen, float factor) {
    __m512 top = _mm512_set1_ps(-INFINITY);
    for (int32_t j = 0; j < FL_SUB; j += 16)
        top = _mm512_mask_max_ps(top, (__mmask16)(seen >> j), _mm512_loadu_ps(s + j), top); /* NaN gives top */
    return topw((f32xw)top) * factor;
}

/* Scores of a step become weights [FL_TILE][FL_SUB]; the running m and l of the pairs [i0, i1) are brought along; keep: by what their
 * acc is to be multiplied. */
static void step_weights(const fl_attention *a, step *w, int32_t i0, int32_t i1, uint16_t *p, float *keep, int exact) {
    const int plain = !a->slopes && !(a->softcap > 0.0f) && a->scale > 0.0f;
    const float factor = plain ? a->scale * LOG2_E : 1.0f;
    float top[FL_TILE + FL_WIDE];
    for (int32_t i = i0; i < i1 + FL_WIDE; i++) top[i] = -INFINITY;
    for (int32_t i = i0; i < i1; i++) {
        if (plain) top[i] = row_top(w->score[i], tokens_seen(w, i), factor);
        else if (w->from[i] < w->to[i])
            top[i] = largest_score(a, w, i);
    }
    for (int32_t i = i0; i < i1; i += FL_WIDE) { /* lanes from i1 on stay as they are: their `top` is −inf */
        const f32xw m = loadw(w->m + i), now = maxw(loadw(top + i), m);
        storew(keep + i, exp2w(selectw(now > m, m - now, setw(0.0f))));
        storew(w->m + i, now);
    }
    for (int32_t i = i0; i < i1; i++)
        row_weights(w->score[i], p + i * FL_SUB, w->l[i], tokens_seen(w, i), factor, w->m[i], keep[i], exact);
}

/* Keys and values of the tokens [from, to) of a step as bf16: keys [Dk / 2][SROW][2], values [FL_SUB / 2][width][2]. */
static void stage(const fl_cache *c, const int32_t *blocks, int32_t head, int64_t first, int32_t from, int32_t to, int codes,
                  char *keys, char *values, int32_t width) {
    const int64_t pair = 2 * fl_element_bytes(c->dtype), stride = fl_key_stride(c) * pair;
    const int32_t rows = (int32_t)fl_even(c->key_dim) / 2, dv = c->value_dim;
    for (int32_t j = from; j < to;) {
        const piece part = piece_at(c, blocks, head, first, j, to);
        const char *k = part.head + part.offset * pair, *v = part.head + fl_values_at(c);
        for (int32_t r = 0; r < rows; r++, k += stride) {
            char *out = keys + ((int64_t)r * SROW + j) * 4;
            if (!codes) memcpy(out, k, (size_t)part.count * 4);
            for (int32_t o = 0; codes && o < part.count; o += 16) _mm512_storeu_si512(out + 4 * o, bf16_of_codes(k + 2 * o));
        }
        if (c->block_size % 2 == 0)
            for (int32_t o = 0; o < part.count; o += 2) {
                const char *row = v + (part.offset + o) / 2 * dv * pair;
                char *out = values + (int64_t)(j + o) / 2 * width * 4;
                if (!codes) memcpy(out, row, (size_t)dv * 4);
                for (int32_t e = 0; codes && e < dv; e += 16) _mm512_storeu_si512(out + 4 * e, bf16_of_codes(row + 2 * e));
            }
        else /* a pair of the step may lie in two blocks */
            for (int32_t o = 0; o < part.count; o++) {
                const int64_t t = part.offset + o;
                uint16_t *out = (uint16_t *)(void *)values + (int64_t)(j + o) / 2 * width * 2 + (j + o) % 2;
                for (int32_t e = 0; e < dv; e++) {
                    const int64_t at = (t / 2 * dv + e) * 2 + t % 2;
                    if (codes) out[2 * e] = to_bfloat1((float)((const int8_t *)v)[at]);
                    else
                        memcpy(out + 2 * e, v + 2 * at, 2);
                }
            }
        j += part.count;
    }
}

void FL_NAME(fl_attention_query)(const float *x, int32_t n, uint16_t *out) {
    for (int32_t k = 0; k < n; k++) out[k] = to_bfloat1(x[k]);
    if (n % 2) out[n] = 0;
}

void FL_NAME(fl_attention_pairs)(const fl_attention *a, const int32_t *blocks, int32_t head, int64_t first, step *w, int32_t i0,
                                 int32_t i1, const pairs_scratch *scratch, int32_t width, const char *next) {
    const fl_cache *c = &a->cache;
    const int64_t dk = fl_even(c->key_dim), pair = 2 * fl_element_bytes(c->dtype);
    const int32_t lo = w->lo / 16 * 16;
    int codes = c->dtype == FL_DT_I8_PAIRS;
    if (codes && next) { /* few lines, but nobody else asks for them: as long a wait as for the codes */
        const char *scales = next + fl_scales_at(c);
        const int64_t bytes = (fl_kv_groups(c->key_dim) + fl_kv_groups(c->value_dim)) * c->block_size * (int64_t)sizeof(float);
        for (int64_t line = 0; line < bytes && line < SCALES_AHEAD; line += 64) __builtin_prefetch(scales + line);
    }
    matrix keys = {scratch->keys, SROW * 4, NULL}, values = {scratch->values, (int64_t)width * 4, NULL};
    if (c->block_size % FL_SUB || (codes && i1 - i0 >= STAGED)) {
        stage(c, blocks, head, first, w->lo / 2 * 2, w->hi, codes, scratch->keys, scratch->values, width);
        codes = 0;
    } else {
        const piece part = piece_at(c, blocks, head, first, 0, FL_SUB);
        keys = (matrix){part.head + part.offset * pair, fl_key_stride(c) * pair, part.head + fl_values_at(c)};
        keys.ahead += part.offset / 2 * c->value_dim * pair;
        values = (matrix){keys.ahead, c->value_dim * pair, next};
    }
    for (int32_t i = i0, k; i < i1; i += k, keys.ahead = NULL) {
        const uint16_t *q[QUERIES];
        k = (i1 - i + QUERIES - 1) / QUERIES, k = (i1 - i + k - 1) / k; /* parts of equal size */
        for (int x = 0; x < k; x++) q[x] = scratch->q + (i + x) * dk;
        scores(k, codes, q, (int32_t)dk / 2, &keys, scratch->kscale, w->score + i, lo, w->hi);
    }
    float keep[FL_TILE + FL_WIDE];
    step_weights(a, w, i0, i1, scratch->weights, keep, scratch->vscale != NULL);
    for (int32_t i = i0, k; i < i1; i += k, values.ahead = NULL) {
        const uint16_t *p[QUERIES];
        k = (i1 - i + QUERIES - 1) / QUERIES, k = (i1 - i + k - 1) / k;
        for (int x = 0; x < k; x++) p[x] = scratch->weights + (i + x) * FL_SUB;
        if (!scratch->vscale) {
            step_values(k, codes, p, w->from + i, w->to + i, &values, w->acc + i, 0, a->value_dim, keep + i);
            continue;
        }
        for (int32_t column = 0; column < a->value_dim; column += FL_KV_GROUP) {
            const float *scale = scratch->vscale + column / FL_KV_GROUP * SROW;
            const int32_t end = a->value_dim - column < FL_KV_GROUP ? a->value_dim : column + FL_KV_GROUP;
            for (int x = 0; x < k; x++) {
                const uint64_t seen = tokens_seen(w, i + x); /* the scale of a token that is not seen may be NaN */
                for (int32_t j = 0; j < FL_SUB; j += 32) {
                    __m512 part[2];
                    for (int v = 0; v < 2; v++)
                        part[v] = _mm512_maskz_mul_ps((__mmask16)(seen >> (j + 16 * v)),
                                                      _mm512_loadu_ps(w->score[i + x] + j + 16 * v),
                                                      _mm512_loadu_ps(scale + j + 16 * v));
                    _mm512_storeu_si512(scratch->weights + (i + x) * FL_SUB + j,
                                        (__m512i)_mm512_cvtne2ps_pbh(part[1], part[0]));
                }
            }
            step_values(k, codes, p, w->from + i, w->to + i, &values, w->acc + i, column, end, keep + i);
        }
    }
}

#endif
