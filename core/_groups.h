/* Group formats of our own (int4gN, int4gNs, int8gN): decoding, and encoding by search.
 *
 * A group is N consecutive values of a row:
 *
 *     int4gN:  | f16 s | u8 z | 16 bytes for each 32 values |    w = s * (q - z)      z in 0..15 as written here, any byte as read
 *     int4gNs: | f16 s | 16 bytes for each 32 values |           w = s * (q - 8)
 *     int8gN:  | f16 s | N signed bytes |                        w = s * q
 *
 * Byte i of the 16 holds value i in its low and value i + 16 in its high nibble, as in q4_0. Decoding int4gN is s * q - s * z, where
 * every operation is exact in f32, so that a kernel may treat -(s * z) as a minimum.
 *
 * ENCODING minimises sum (w - w')^2 of each group by itself. The range of the values, which includes 0, is shrunk in STEPS steps:
 * outliers are clipped, everybody else gets finer steps. For each: codes by rounding, then the scale and zero point that are best for these
 * codes (linear regression), and codes again. The first candidate is min-max without the fit, so the result is never worse.
 * The sums have one order (8 lanes, then the lanes), and nothing depends on other groups: same values, same bytes, for any number
 * of threads.
 */
#ifndef FASTLLM_GROUPS_H
#define FASTLLM_GROUPS_H

#include "_codecs.h"

enum { FL_SEARCH_STEPS = 24, FL_MOST_GROUP = 256 };

/* Bytes before the codes. */
FL_INLINE int fl_group_head(int zero_point) { return zero_point ? 3 : 2; }

FL_CLONES static void fl_decode_groups(int bits, int zero_point, int group, const uint8_t *in, float *out, int64_t groups) {
    for (int64_t g = 0; g < groups; g++, out += group) {
        const float s = fl_scale(in);
        const float minimum = -(s * (float)in[2]);
        in += fl_group_head(zero_point);
        if (bits == 8) {
            for (int i = 0; i < group; i++) out[i] = s * (float)(int8_t)in[i];
            in += group;
            continue;
        }
        for (int at = 0; at < group; at += 32, in += 16) {
            float *low = out + at, *high = low + 16;
            if (zero_point) {
                for (int i = 0; i < 16; i++) low[i] = s * (float)(in[i] & 15) + minimum;
                for (int i = 0; i < 16; i++) high[i] = s * (float)(in[i] >> 4) + minimum;
            } else {
                for (int i = 0; i < 16; i++) low[i] = s * (float)((in[i] & 15) - 8);
                for (int i = 0; i < 16; i++) high[i] = s * (float)((in[i] >> 4) - 8);
            }
        }
    }
}

/* ---- encoding ------------------------------------------------------------------------------------------------------------ */

typedef float fl_v8f __attribute__((vector_size(32)));
typedef int32_t fl_v8i __attribute__((vector_size(32)));
typedef double fl_v8d __attribute__((vector_size(64)));

FL_INLINE fl_v8f fl_all8(float x) { return (fl_v8f){x, x, x, x, x, x, x, x}; }

FL_INLINE fl_v8f fl_pick8(fl_v8i yes, fl_v8f a, fl_v8f b) { return (fl_v8f)(((fl_v8i)a & yes) | ((fl_v8i)b & ~yes)); }

FL_INLINE double fl_sum8(fl_v8d v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

/* What codes are allowed, and how a group's codes come out: error = sum (w - s (q - z))^2, and what the fit needs. */
typedef struct {
    float low, high; /* codes */
} fl_code_range;

typedef struct {
    double error, q, qw, qq; /* sums: squared error, codes, codes * values, squared codes */
} fl_code_sums;

/* Codes q [group] of values w for scale s and zero z, rounded to nearest, halves to even. */
FL_INLINE fl_code_sums fl_round_codes(const float *w, int group, float s, float z, fl_code_range range, float *q) {
    const fl_v8f inverse = fl_all8(fl_inverse(s)), magic = fl_all8(12582912.0f), zero = fl_all8(z);
    const fl_v8f low = fl_all8(range.low), high = fl_all8(range.high);
    fl_v8d error = {0}, sum = {0}, qw = {0}, qq = {0};
    for (int i = 0; i < group; i += 8) {
        fl_v8f value, code;
        memcpy(&value, w + i, 32);
        code = value * inverse + zero;
        code = fl_pick8(code < low, low, code);
        code = fl_pick8(code > high, high, code);
        code = (code + magic) - magic;
        memcpy(q + i, &code, 32);
        const fl_v8d d = __builtin_convertvector(value - fl_all8(s) * (code - zero), fl_v8d);
        const fl_v8d c = __builtin_convertvector(code, fl_v8d), v = __builtin_convertvector(value, fl_v8d);
        error += d * d, sum += c, qw += c * v, qq += c * c;
    }
    return (fl_code_sums){fl_sum8(error), fl_sum8(sum), fl_sum8(qw), fl_sum8(qq)};
}

FL_INLINE float fl_half_rounded(double value) { return fl_half_to_float(fl_float_to_half((float)value)); }

FL_INLINE double fl_nearest_zero(double z) {
    const double whole = (double)(int)(z < 0.0 ? 0.0 : z > 15.0 ? 15.0 : z + 0.5);
    return whole > 15.0 ? 15.0 : whole;
}

/* Scale and zero point for which the codes behind `sums` are best; 0 if these codes tell nothing. sum_w: sum of the values. */
FL_INLINE float fl_fit(const fl_code_sums *sums, double sum_w, int group, int zero_point, float *z) {
    double zero = (double)*z;
    if (zero_point) {
        const double spread = (double)group * sums->qq - sums->q * sums->q;
        const double slope = spread > 0.0 ? ((double)group * sums->qw - sums->q * sum_w) / spread : 0.0;
        if (!(slope > 0.0)) return 0.0f;
        zero = fl_nearest_zero((slope * sums->q - sum_w) / (double)group / slope);
    }
    const double square = sums->qq - 2.0 * zero * sums->q + (double)group * zero * zero; /* sum (q - z)^2 */
    if (!(square > 0.0)) return 0.0f;
    *z = (float)zero;
    return fl_half_rounded((sums->qw - zero * sum_w) / square);
}

/* One group. Returns its squared error, or -1 if its scale is beyond f16. */
FL_INLINE double fl_encode_group(int bits, int zero_point, int group, int search, const float *w, uint8_t *out) {
    const fl_code_range range = bits == 8 ? (fl_code_range){-127.0f, 127.0f} : (fl_code_range){0.0f, 15.0f};
    const double step = bits == 8 ? 0.005 : 0.02;
    float low = 0.0f, high = 0.0f, best_s = 0.0f, best_z = 0.0f, codes[FL_MOST_GROUP], best[FL_MOST_GROUP];
    double sum_w = 0.0, best_error = -1.0;
    for (int i = 0; i < group; i++) {
        low = w[i] < low ? w[i] : low;
        high = w[i] > high ? w[i] : high;
        sum_w += (double)w[i];
    }
    for (int i = 0; i < (search ? FL_SEARCH_STEPS : 1); i++) {
        const double f = 1.0 - step * (double)i, span = f * ((double)high - (double)low);
        float s, z = bits == 8 ? 0.0f : 8.0f;
        if (zero_point) s = fl_half_rounded(span / 15.0);
        else if (bits == 4) /* the end of larger magnitude becomes code 0 */
            s = fl_half_rounded(f * (double)(high > -low ? high : low) / -8.0);
        else
            s = fl_half_rounded(f * (double)(high > -low ? high : -low) / 127.0);
        if (s - s != 0.0f) return -1.0;
        if (zero_point) z = s > 0.0f ? (float)fl_nearest_zero(-f * (double)low / (double)s) : 0.0f;
        for (int fitted = 0; fitted <= search; fitted++) {
            const fl_code_sums sums = fl_round_codes(w, group, s, z, range, codes);
            if (best_error < 0.0 || sums.error < best_error) {
                best_error = sums.error, best_s = s, best_z = z;
                memcpy(best, codes, (size_t)group * sizeof codes[0]);
            }
            s = fl_fit(&sums, sum_w, group, zero_point, &z);
            if (s == 0.0f || s - s != 0.0f) break;
        }
    }
    fl_store16(out, fl_float_to_half(best_s));
    if (zero_point) out[2] = (uint8_t)(int)best_z;
    out += fl_group_head(zero_point);
    if (bits == 8)
        for (int i = 0; i < group; i++) out[i] = (uint8_t)(int8_t)(int)best[i];
    else
        for (int i = 0; i < group; i++) {
            const int byte = i / 32 * 16 + i % 16, code = (int)best[i];
            out[byte] = (uint8_t)(i % 32 < 16 ? code : out[byte] | code << 4);
        }
    return best_error;
}

/* Encodes `groups` groups of finite values. errors: [groups] squared errors. Returns 0, or -1 if a scale is beyond f16. */
FL_CLONES static int fl_encode_groups(int bits, int zero_point, int group, int search, const float *in, uint8_t *out,
                                      double *errors, int64_t groups) {
    const int bytes = fl_group_head(zero_point) + group * bits / 8;
    for (int64_t g = 0; g < groups; g++) {
        errors[g] = fl_encode_group(bits, zero_point, group, search, in + g * group, out + g * bytes);
        if (errors[g] < 0.0) return -1;
    }
    return 0;
}

#endif
