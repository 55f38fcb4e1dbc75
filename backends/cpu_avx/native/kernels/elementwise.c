/* Ops that work element by element: add, mul, act_mul, softcap, quantize, dequantize, embed and rope.
 *
 * What limits them is reading and writing; a row of a decode step stays in L1. Nothing here sums over elements, so order is no
 * question, and all variants give the same bits (vec.h).
 */
#include "ops.h"
#include "vec.h"

FL_INLINE float *row_of(const fl_view *v, int64_t i, int32_t j) { return (float *)v->p + i * v->s0 + j * v->s1; }

void FL_NAME(fl_embed)(const int32_t *ids, const fl_view *table, const fl_view *out, int64_t i0, int64_t i1) {
    int32_t C = out->d2;
    for (int64_t i = i0; i < i1; i++) {
        float *y = row_of(out, i, 0);
        int64_t from = ids[i] * table->s0;
        if (table->dtype == FL_DT_F32) {
            memmove(y, (const float *)table->p + from, (size_t)C * sizeof *y);
            continue;
        }
        const uint16_t *x = (const uint16_t *)table->p + from;
        int32_t c = 0;
        if (table->dtype == FL_DT_F16) {
            for (; c + 8 <= C; c += 8) store8(y + c, half8(x + c));
            for (; c < C; c++) y[c] = half1(x[c]);
        } else {
            for (; c < C; c++) y[c] = bfloat1(x[c]);
        }
    }
}

/* y = op(x, other) over columns [c0, c1) of rows, where `other` is a row of the same width, or one value. */
#define BINARY(name, OP)                                                                                                       \
    FL_INLINE void name##_row(const float *x, const float *y, float one, float *out, int32_t n) {                              \
        int32_t c = 0;                                                                                                         \
        for (; c + 8 <= n; c += 8) store8(out + c, load8(x + c) OP(y ? load8(y + c) : set8(one)));                             \
        for (; c < n; c++) out[c] = x[c] OP(y ? y[c] : one);                                                                   \
    }                                                                                                                          \
    void FL_NAME(fl_##name)(const fl_view *x, const fl_view *y, int32_t shape, const fl_view *out, int64_t i0, int64_t i1) {   \
        for (int64_t i = i0; i < i1; i++)                                                                                      \
            for (int32_t j = 0; j < x->d1; j++) {                                                                              \
                const float *px = row_of(x, i, j);                                                                             \
                float *po = row_of(out, i, j);                                                                                 \
                if (shape == FL_Y_FULL) name##_row(px, row_of(y, i, j), 0.0f, po, x->d2);                                      \
                else if (shape == FL_Y_COLUMNS)                                                                                \
                    name##_row(px, (const float *)y->p, 0.0f, po, x->d2);                                                      \
                else                                                                                                           \
                    name##_row(px, NULL, ((const float *)y->p)[shape == FL_Y_ROWS ? i * y->s0 : 0], po, x->d2);                \
            }                                                                                                                  \
    }
BINARY(add, +)
BINARY(mul, *)

FL_INLINE f32x8 activate(int32_t kind, f32x8 z) {
    switch (kind) {
    case FL_ACT_SILU:
        return z * sigmoid8(z);
    case FL_ACT_GELU: { /* z·Φ(z) = z·½erfc(−z/√2), in f64: the tail is a difference of nearly equal numbers otherwise */
        f32x8 y;
        for (int i = 0; i < 8; i++) y[i] = (float)(0.5 * (double)z[i] * erfc(-(double)z[i] * 0.70710678118654752440));
        return y;
    }
    case FL_ACT_GELU_TANH: { /* ½z(1 + tanh t) = z·σ(2t): no cancellation for negative z */
        f32x8 t = z * (0.7978845608028654f + 0.7978845608028654f * 0.044715f * (z * z));
        return z * sigmoid8(t + t);
    }
    case FL_ACT_SIGMOID:
        return sigmoid8(z);
    case FL_ACT_TANH:
        return tanh8(z);
    case FL_ACT_RELU:
        return select8(z <= 0.0f, set8(0.0f), z);
    default:
        return z;
    }
}

FL_INLINE f32x8 gated(int32_t kind, f32x8 g, f32x8 u, int with_up) {
    if (kind == FL_ACT_SWIGLU_OAI) {
        g = select8(g > 7.0f, set8(7.0f), g);
        f32x8 y = g * sigmoid8(1.702f * g);
        if (!with_up) return y;
        u = select8(u > 7.0f, set8(7.0f), u);
        u = select8(u < -7.0f, set8(-7.0f), u);
        return y * (u + 1.0f);
    }
    f32x8 y = activate(kind, g);
    return with_up ? y * u : y;
}

#if FL_WIDE == 16
/* silu and gelu_tanh of 16 elements: the operations of `activate`. */
FL_INLINE f32xw gated_wide(int32_t kind, f32xw g, const float *u) {
    f32xw t = g;
    if (kind == FL_ACT_GELU_TANH) {
        t = g * (0.7978845608028654f + 0.7978845608028654f * 0.044715f * (g * g));
        t = t + t;
    }
    f32xw y = g * sigmoidw(t);
    return u ? y * loadw(u) : y;
}
#endif

FL_INLINE void act_rows(int32_t kind, const fl_view *gate, const fl_view *up, const fl_view *out, int64_t i0, int64_t i1,
                        int32_t c0, int32_t c1) {
    f32x8 none = set8(1.0f);
    for (int64_t i = i0; i < i1; i++)
        for (int32_t j = 0; j < gate->d1; j++) {
            const float *g = row_of(gate, i, j), *u = up ? row_of(up, i, j) : NULL;
            float *y = row_of(out, i, j);
            int32_t c = c0;
#if FL_WIDE == 16
            if (kind == FL_ACT_SILU || kind == FL_ACT_GELU_TANH)
                for (; c + 16 <= c1; c += 16) storew(y + c, gated_wide(kind, loadw(g + c), u ? u + c : NULL));
#endif
            for (; c + 8 <= c1; c += 8) store8(y + c, gated(kind, load8(g + c), u ? load8(u + c) : none, u != NULL));
            if (c < c1) {
                int rest = c1 - c;
                store8_part(y + c, gated(kind, load8_part(g + c, rest), u ? load8_part(u + c, rest) : none, u != NULL), rest);
            }
        }
}

void FL_NAME(fl_act_mul)(int32_t kind, const fl_view *gate, const fl_view *up, const fl_view *out, int64_t i0, int64_t i1,
                         int32_t c0, int32_t c1) {
    switch (kind) { /* a constant kind in each call, so that the choice is made outside the loop */
    case FL_ACT_SILU:
        act_rows(FL_ACT_SILU, gate, up, out, i0, i1, c0, c1);
        break;
    case FL_ACT_GELU:
        act_rows(FL_ACT_GELU, gate, up, out, i0, i1, c0, c1);
        break;
    case FL_ACT_GELU_TANH:
        act_rows(FL_ACT_GELU_TANH, gate, up, out, i0, i1, c0, c1);
        break;
    case FL_ACT_SIGMOID:
        act_rows(FL_ACT_SIGMOID, gate, up, out, i0, i1, c0, c1);
        break;
    case FL_ACT_TANH:
        act_rows(FL_ACT_TANH, gate, up, out, i0, i1, c0, c1);
        break;
    case FL_ACT_RELU:
        act_rows(FL_ACT_RELU, gate, up, out, i0, i1, c0, c1);
        break;
    default:
        act_rows(FL_ACT_SWIGLU_OAI, gate, up, out, i0, i1, c0, c1);
        break;
    }
}

void FL_NAME(fl_softcap)(const fl_view *x, float cap, const fl_view *out, int64_t i0, int64_t i1) {
    f32x8 c = set8(cap);
    for (int64_t i = i0; i < i1; i++)
        for (int32_t j = 0; j < x->d1; j++) {
            const float *p = row_of(x, i, j);
            float *y = row_of(out, i, j);
            int32_t k = 0;
            for (; k + 8 <= x->d2; k += 8) store8(y + k, c * tanh8(load8(p + k) / c));
            if (k < x->d2) store8_part(y + k, c * tanh8(load8_part(p + k, x->d2 - k) / c), x->d2 - k);
        }
}

void FL_NAME(fl_quantize)(const fl_view *x, int32_t group, const fl_view *codes, const fl_view *scales, int64_t i0,
                          int64_t i1) {
    for (int64_t i = i0; i < i1; i++) {
        const float *p = row_of(x, i, 0);
        int8_t *q = (int8_t *)codes->p + i * codes->s0;
        float *s = row_of(scales, i, 0);
        for (int32_t g = 0; g < x->d2 / group; g++, p += group, q += group) {
            float top = 0.0f;
            for (int32_t k = 0; k < group; k++) {
                float a = fabsf(p[k]);
                top = a > top || a != a ? a : top;
            }
            float scale = top / 127.0f;
            s[g] = scale;
            for (int32_t k = 0; k < group; k++) {
                float code = scale > 0.0f && scale <= 3.402823466e38f ? rintf(p[k] / scale) : 0.0f; /* rounds half to even */
                code = code > 127.0f ? 127.0f : code < -127.0f ? -127.0f : code;
                q[k] = code == code ? (int8_t)code : 0;
            }
        }
    }
}

void FL_NAME(fl_dequantize)(const fl_view *codes, const fl_view *scales, int32_t group, const fl_view *out, int64_t i0,
                            int64_t i1) {
    for (int64_t i = i0; i < i1; i++) {
        const int8_t *q = (const int8_t *)codes->p + i * codes->s0;
        const float *s = row_of(scales, i, 0);
        float *y = row_of(out, i, 0);
        for (int32_t k = 0; k < out->d2; k++) y[k] = (float)q[k] * s[k / group];
    }
}

/* table: per row, r cosines then r sines. style half: pairs (i, i + r); pairs: (2i, 2i + 1). x and out may be the same. */
void FL_NAME(fl_rope)(const fl_view *x, const float *table, int32_t r, int32_t pairs, const fl_view *out, int64_t i0,
                      int64_t i1) {
    for (int64_t i = i0; i < i1; i++) {
        const float *cosine = table + i * 2 * r, *sine = cosine + r;
        for (int32_t h = 0; h < x->d1; h++) {
            const float *p = row_of(x, i, h);
            float *y = row_of(out, i, h);
            int32_t k = 0;
            if (pairs) {
                for (; k < r; k++) {
                    float a = p[2 * k], b = p[2 * k + 1];
                    y[2 * k] = a * cosine[k] - b * sine[k];
                    y[2 * k + 1] = a * sine[k] + b * cosine[k];
                }
            } else {
                for (; k + 8 <= r; k += 8) {
                    f32x8 a = load8(p + k), b = load8(p + r + k), c = load8(cosine + k), s = load8(sine + k);
                    store8(y + k, a * c - b * s);
                    store8(y + r + k, a * s + b * c);
                }
                for (; k < r; k++) {
                    float a = p[k], b = p[r + k];
                    y[k] = a * cosine[k] - b * sine[k];
                    y[r + k] = a * sine[k] + b * cosine[k];
                }
            }
            if (y != p) memmove(y + 2 * r, p + 2 * r, (size_t)(x->d2 - 2 * r) * sizeof *y);
        }
    }
}
