/* fma(a, b, c) rounded once, without the instruction: the product of two f32 is exact in f64, and a sum rounded to odd in f64
 * gives, rounded again to f32, what one rounding would (Boldo & Melquiond 2008, "Emulation of FMA and correctly rounded sums").
 */
#ifndef FL_SCALAR_FMA_H
#define FL_SCALAR_FMA_H
#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float fl_fma(float a, float b, float c) {
#ifdef __FP_FAST_FMAF
    return fmaf(a, b, c);
#else
    const double product = (double)a * (double)b, addend = (double)c, sum = product + addend;
    const double back = sum - product, error = (product - (sum - back)) + (addend - back); /* exact: Knuth's TwoSum */
    int64_t bits;
    memcpy(&bits, &sum, 8);
    const int64_t toward = bits + ((error < 0) == (bits < 0) ? 1 : -1);
    /* inexact and even: move to the odd neighbour on the error's side */
    const int64_t fixed = (error > 0 || error < 0) && !(bits & 1) ? toward : bits;
    double rounded;
    memcpy(&rounded, &fixed, 8);
    return (float)rounded;
#endif
}

#endif
