/* Ops that reduce over a row: norms, softmax, and the small per-head matmul.
 *
 * A sum is taken in 16 lanes (element k in lane k mod 16), the lanes are then added in one fixed order: a row's bits depend on the
 * row alone, and 16 lanes are also more exact than one running sum.
 */
#include "ops.h"
#include "vec.h"

FL_INLINE float *row_of(const fl_view *v, int64_t i, int32_t j) { return (float *)v->p + i * v->s0 + j * v->s1; }

FL_INLINE float sum_lanes(const float *x, int32_t n, float shift, int squares) {
    f32x8 a = set8(0.0f), b = a, s = set8(shift);
    int32_t k = 0;
    for (; k + 16 <= n; k += 16) {
        f32x8 u = load8(x + k) - s, v = load8(x + k + 8) - s;
        a += squares ? u * u : u;
        b += squares ? v * v : v;
    }
    if (k + 8 <= n) {
        f32x8 u = load8(x + k) - s;
        a += squares ? u * u : u;
        k += 8;
    }
    float tail = 0.0f;
    for (; k < n; k++) {
        float u = x[k] - shift;
        tail += squares ? u * u : u;
    }
    return sum8(a + b) + tail;
}

void FL_NAME(fl_rms_norm)(const fl_view *x, const float *weight, float eps, const fl_view *out, int64_t i0, int64_t i1) {
    int32_t C = x->d2;
    for (int64_t i = i0; i < i1; i++)
        for (int32_t j = 0; j < x->d1; j++) {
            const float *p = row_of(x, i, j);
            float *y = row_of(out, i, j);
            float scale = 1.0f / sqrtf(sum_lanes(p, C, 0.0f, 1) / (float)C + eps);
            int32_t k = 0;
            for (; k + 8 <= C; k += 8) {
                f32x8 v = load8(p + k) * scale;
                store8(y + k, weight ? v * load8(weight + k) : v);
            }
            for (; k < C; k++) {
                float v = p[k] * scale;
                y[k] = weight ? v * weight[k] : v;
            }
        }
}

void FL_NAME(fl_layer_norm)(const fl_view *x, const float *weight, const float *bias, float eps, const fl_view *out, int64_t i0,
                            int64_t i1) {
    int32_t C = x->d2;
    for (int64_t i = i0; i < i1; i++)
        for (int32_t j = 0; j < x->d1; j++) {
            const float *p = row_of(x, i, j);
            float *y = row_of(out, i, j);
            float mean = sum_lanes(p, C, 0.0f, 0) / (float)C;
            float scale = 1.0f / sqrtf(sum_lanes(p, C, mean, 1) / (float)C + eps);
            int32_t k = 0;
            for (; k + 8 <= C; k += 8) {
                f32x8 v = (load8(p + k) - mean) * scale;
                if (weight) v = v * load8(weight + k);
                store8(y + k, bias ? v + load8(bias + k) : v);
            }
            for (; k < C; k++) {
                float v = (p[k] - mean) * scale;
                if (weight) v = v * weight[k];
                y[k] = bias ? v + bias[k] : v;
            }
        }
}

void FL_NAME(fl_softmax)(const fl_view *x, const fl_view *out, int64_t i0, int64_t i1) {
    int32_t C = x->d2;
    for (int64_t i = i0; i < i1; i++)
        for (int32_t j = 0; j < x->d1; j++) {
            const float *p = row_of(x, i, j);
            float *y = row_of(out, i, j);
            float top = -INFINITY;
            for (int32_t k = 0; k < C; k++) top = p[k] > top ? p[k] : top;
            f32x8 a = set8(0.0f), b = a;
            int32_t k = 0;
            for (; k + 16 <= C; k += 16) {
                f32x8 u = exp8(load8(p + k) - top), v = exp8(load8(p + k + 8) - top);
                store8(y + k, u);
                store8(y + k + 8, v);
                a += u;
                b += v;
            }
            for (; k < C; k += 8) { /* at most two steps, the last one partly filled with e^−inf = 0 */
                int n = C - k < 8 ? C - k : 8;
                f32x8 v = set8(-INFINITY);
                memcpy(&v, p + k, (size_t)n * sizeof *p);
                v = exp8(v - top);
                store8_part(y + k, v, n);
                for (int l = n; l < 8; l++) v[l] = 0.0f;
                a += v;
            }
            float total = sum8(a + b);
            for (k = 0; k + 8 <= C; k += 8) store8(y + k, load8(y + k) / total);
            for (; k < C; k++) y[k] = y[k] / total;
        }
}

/* out[t][h][n] = Σ_k a[t][h][k] · b[h][n][k]: b is small and stays in cache over the rows. */
void FL_NAME(fl_matmul)(const fl_view *a, const fl_view *b, const fl_view *out, int64_t i0, int64_t i1) {
    int32_t K = a->d2, N = out->d2;
    for (int32_t h = 0; h < a->d1; h++)
        for (int64_t i = i0; i < i1; i++) {
            const float *x = row_of(a, i, h);
            float *y = row_of(out, i, h);
            for (int32_t n = 0; n < N; n++) {
                int64_t from = h * b->s0 + n * b->s1;
                const float *w = (const float *)b->p + from;
                const uint16_t *w16 = (const uint16_t *)b->p + from;
                f32x8 p = set8(0.0f), q = p;
                int32_t k = 0;
                float tail = 0.0f;
                if (b->dtype == FL_DT_F32) {
                    for (; k + 16 <= K; k += 16) p += load8(x + k) * load8(w + k), q += load8(x + k + 8) * load8(w + k + 8);
                    for (; k < K; k++) tail += x[k] * w[k];
                } else if (b->dtype == FL_DT_F16) {
                    for (; k + 16 <= K; k += 16) p += load8(x + k) * half8(w16 + k), q += load8(x + k + 8) * half8(w16 + k + 8);
                    for (; k < K; k++) tail += x[k] * half1(w16[k]);
                } else {
                    float row[16];
                    for (; k + 16 <= K; k += 16) {
                        for (int l = 0; l < 16; l++) row[l] = bfloat1(w16[k + l]);
                        p += load8(x + k) * load8(row), q += load8(x + k + 8) * load8(row + 8);
                    }
                    for (; k < K; k++) tail += x[k] * bfloat1(w16[k]);
                }
                y[n] = sum8(p + q) + tail;
            }
        }
}
