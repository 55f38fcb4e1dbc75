/* The linear op as layouts.h specifies it, one scalar operation after the other: what every kernel's bits are compared with.
 */
#include <math.h>
#include <stdlib.h>

#include "layouts.h"
#include "scalar_fma.h"

static float dot_f32(const fl_weight *w, int n, const float *x, float *decoded) {
    const fl_layout *L = &FL_LAYOUT[w->layout];
    const uint8_t *strip = w->data + (size_t)(n / FL_STRIP) * fl_strip_bytes(L, w->K);
    const int r = n % FL_STRIP;
    float acc = 0.0f;
    for (int k = 0; k < w->K; k++) {
        const uint8_t *plain = strip + ((size_t)k * FL_STRIP + (size_t)r) * (size_t)L->block_bytes;
        if (w->layout == FL_F32) memcpy(&decoded[k], plain, 4);
        else if (w->layout == FL_F16)
            decoded[k] = fl_half(fl_u16(plain));
        else if (w->layout == FL_BF16)
            decoded[k] = fl_bits_float((uint32_t)fl_u16(plain) << 16);
        else {
            const uint8_t *head = strip + (size_t)(k / L->block) * fl_block_packed(L);
            const uint8_t *tile = head + L->head + k % L->block / FL_TILE_K * fl_tile_bytes(L);
            float sw, mw;
            fl_scales(L, head, tile, r, k % FL_TILE_K * fl_halves(L) / FL_TILE_K, &sw, &mw);
            decoded[k] = sw * (float)(fl_code(L, tile, r, k % FL_TILE_K) - L->zero);
            if (L->minimum) decoded[k] += mw;
        }
    }
    for (int k0 = 0; k0 < w->K; k0 += 64) {
        float b = 0.0f;
        for (int k = k0; k < w->K && k < k0 + 64; k++) b = fl_fma(x[k], decoded[k], b);
        acc += b;
    }
    return acc;
}

static float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

/* To nearest even; denormals to zero, NaN stays NaN. */
static float to_bf16(float x) {
    const uint32_t bits = fl_float_bits(x);
    if (isnan(x)) return fl_bits_float((bits | 0x400000) & 0xffff0000);
    return flushed(fl_bits_float((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000));
}

static float dot_bf16(const fl_weight *w, int n, const float *x) {
    const uint8_t *strip = w->data + (size_t)(n / FL_STRIP) * fl_strip_bytes(&FL_LAYOUT[w->layout], w->K);
    float acc = 0.0f;
    for (int k0 = 0; k0 < w->K; k0 += 256) {
        float b = 0.0f;
        for (int k = k0; k < w->K && k < k0 + 256; k += 2)
            for (int i = k + 1; i >= k; i--) {
                if (i >= w->K) continue;
                const uint8_t *p = strip + ((size_t)i * FL_STRIP + (size_t)(n % FL_STRIP)) * 2;
                b = flushed(fl_fma(to_bf16(x[i]), flushed(fl_bits_float((uint32_t)fl_u16(p) << 16)), b));
            }
        acc += b;
    }
    return acc;
}

static float dot_int8(const fl_weight *w, int n, const int8_t *codes, const float *sx) {
    const fl_layout *L = &FL_LAYOUT[w->layout];
    const uint8_t *strip = w->data + (size_t)(n / FL_STRIP) * fl_strip_bytes(L, w->K);
    const int r = n % FL_STRIP;
    float acc = 0.0f;
    for (int k0 = 0; k0 < w->K; k0 += L->group) {
        const uint8_t *head = strip + (size_t)(k0 / L->block) * fl_block_packed(L);
        const uint8_t *tile = head + L->head + k0 % L->block / FL_TILE_K * fl_tile_bytes(L);
        float sw, mw;
        float b = 0.0f, M = 0.0f;
        fl_scales(L, head, tile, r, k0 % FL_TILE_K * fl_halves(L) / FL_TILE_K, &sw, &mw);
        for (int part = k0; part < k0 + L->group; part += FL_KIND_INT8, tile += fl_tile_bytes(L)) {
            const float scale = sx[part / FL_KIND_INT8];
            int32_t I = 0, S = 0;
            for (int k = part; k < part + FL_KIND_INT8 && k < k0 + L->group; k++) {
                I += (fl_code(L, tile, r, k % FL_TILE_K) - L->zero) * codes[k];
                S += codes[k];
            }
            if (L->group > FL_KIND_INT8) b = fl_fma((float)I, scale, b);
            else
                acc = fl_fma((float)I * sw, scale, acc);
            M = part == k0 ? scale * (float)S : M + scale * (float)S;
        }
        if (L->group > FL_KIND_INT8) acc = fl_fma(b, sw, acc);
        if (L->minimum) acc = fl_fma(mw, M, acc);
    }
    return acc;
}

static void quantise(const float *x, int K, int8_t *codes, float *sx) {
    enum { group = FL_KIND_INT8 };
    for (int k0 = 0; k0 < K; k0 += group) {
        float amax = 0.0f;
        int finite = 1;
        for (int k = k0; k < k0 + group; k++) {
            finite &= isfinite(x[k]) != 0;
            if (fabsf(x[k]) > amax) amax = fabsf(x[k]);
        }
        const float inverse = !finite || amax < 0x1p-60f ? 0.0f : 127.0f / amax;
        sx[k0 / group] = finite ? amax / 127.0f : NAN;
        for (int k = k0; k < k0 + group; k++) codes[k] = finite ? (int8_t)rintf(x[k] * inverse) : 0;
    }
}

void fl_linear_reference(const fl_weight *w, const float *x, int T, const float *bias, float *y, int kind, int accumulate) {
    float *floats = malloc((size_t)w->K * 4 + 4);
    int8_t *codes = malloc((size_t)w->K + 4);
    for (int t = 0; t < T && floats && codes; t++) {
        const float *row = x + (size_t)t * (size_t)w->K;
        if (kind >= FL_KIND_INT8) quantise(row, w->K, codes, floats);
        for (int n = 0; n < w->N; n++) {
            float v = kind == FL_KIND_F32    ? dot_f32(w, n, row, floats)
                      : kind == FL_KIND_BF16 ? dot_bf16(w, n, row)
                                             : dot_int8(w, n, codes, floats);
            float *out = y + (size_t)t * (size_t)w->N + n;
            if (bias) v += bias[n];
            *out = accumulate ? *out + v : v;
        }
    }
    free(floats), free(codes);
}
