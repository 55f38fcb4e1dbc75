/* Keys and values into the cache (kernels.h: fl_cache), rounded to its type. */
#include "ops.h"
#include "vec.h"

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

/* n values as bf16. */
FL_INLINE void halves(const float *x, int32_t n, uint16_t *out) {
    for (int32_t i = 0; i < n; i++) out[i] = to_bfloat1(x[i]);
}

enum { CHANNELS = 1024 }; /* of a head at most (lower.py: MAX_HEAD) */

/* Keys and values of n <= 16 tokens of a head that stand side by side in a block, from its token `offset` on, as pairs. key, value: rows
 * of the first one, ldk and ldv apart. */
static void store_pairs(const fl_cache *c, char *head, int64_t offset, int32_t n, const float *key, int64_t ldk,
                        const float *value, int64_t ldv) {
    const int32_t dk = c->key_dim, dv = c->value_dim, rows = (dk + 1) / 2;
    const int64_t stride = fl_key_stride(c);
    char *values = head + fl_values_at(c);
    if (c->dtype == FL_DT_BF16_PAIRS) {
        uint16_t *to_k = (uint16_t *)(void *)head + 2 * offset, *to_v = (uint16_t *)(void *)values, x[16][CHANNELS + 1];
        for (int32_t t = 0; t < n; t++) {
            halves(key + t * ldk, dk, x[t]);
            x[t][dk] = 0; /* behind an odd number of channels */
        }
        for (int32_t r = 0; r < rows; r++)
            for (int32_t t = 0; t < n; t++) memcpy(to_k + 2 * (r * stride + t), x[t] + 2 * r, 2 * sizeof(uint16_t));
        for (int32_t t = 0; t < n; t++) {
            uint16_t *to = to_v + (offset + t) / 2 * 2 * dv + (offset + t) % 2;
            halves(value + t * ldv, dv, x[0]);
            for (int32_t e = 0; e < dv; e++) to[2 * e] = x[0][e];
        }
        return;
    }
    float *scales = (float *)(void *)(head + fl_scales_at(c)) + offset;
    for (int32_t t = 0; t < n; t++, scales++) {
        int8_t x[CHANNELS + 1], *to_k = (int8_t *)head + 2 * (offset + t);
        int8_t *to_v = (int8_t *)values + (offset + t) / 2 * 2 * dv + (offset + t) % 2;
        store_row(key + t * ldk, dk, FL_DT_I8, (char *)x, 1, scales, c->block_size);
        x[dk] = 0;
        for (int32_t r = 0; r < rows; r++) memcpy(to_k + 2 * r * stride, x + 2 * r, 2);
        store_row(value + t * ldv, dv, FL_DT_I8, (char *)x, 1, scales + fl_kv_groups(dk) * c->block_size, c->block_size);
        for (int32_t e = 0; e < dv; e++) to_v[2 * e] = x[e];
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
    const int pairs = fl_is_pairs(c->dtype);
    const int apart = c->dtype != FL_DT_I8 && c->value_dim; /* keys are written apart, several tokens at once */
    for (int64_t t = i0, n; t < i1; t += n) {
        n = 1;
        if (slots[t] < 0) continue;
        if (apart) n = neighbours(c, slots, t, i1);
        int64_t offset = slots[t] % c->block_size;
        char *head = c->p + slots[t] / c->block_size * c->block_bytes;
        for (int32_t h = 0; h < c->heads; h++, head += fl_head_bytes(c)) {
            if (pairs) {
                store_pairs(c, head, offset, (int32_t)n, (const float *)key->p + t * key->s0 + h * key->s1, key->s0,
                            (const float *)value->p + t * value->s0 + h * value->s1, value->s0);
                continue;
            }
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
