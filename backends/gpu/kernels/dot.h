/* Exact integer products of four weight codes with four activation codes, for VEC rows at a time. Two ways, one meaning:
 *
 * PAIRS (vector units without a dot product of bytes): products are 16 bits wide, two in each 32-bit lane. A word of four codes is
 * split in its even and its odd bytes; activations come as pairs of 16-bit numbers (acts.h). CHUNK steps fit in 16 bits: with
 * unsigned codes up to 15, 31, 63 and signed bytes, 4 * CHUNK / 4 products of at most code * 127 (layouts.py checks it).
 * Without PAIRS a word of four codes meets a word of four signed bytes: what `dp4a` does in one instruction. */
#ifndef FASTLLM_DOT_H
#define FASTLLM_DOT_H

#if PAIRS
#define SHORTS CAT(short, PAIR_WIDTH)
#define AS_SHORTS(v) CAT(as_short, PAIR_WIDTH)(v)
typedef SHORTS pvec;
typedef struct {
    pvec even, odd;
} dot_acc, dot_codes;

FN dot_acc dot_zero(void) {
    dot_acc a;
    a.even = (pvec)(0), a.odd = (pvec)(0);
    return a;
}
FN dot_codes dot_unpack(const uvec w) {
    dot_codes c;
    c.even = LOW == 8 ? AS_SHORTS(w << 8) >> (short)8 : AS_SHORTS(w & 0x00ff00ffu);
    c.odd = LOW == 8 ? AS_SHORTS(w) >> (short)8 : AS_SHORTS(w >> 8 & 0x00ff00ffu);
    return c;
}
FN dot_acc dot_step(dot_acc a, const dot_codes c, GLOBAL const uint *x, const int step) {
    a.even += c.even * AS_SHORTS((uvec)(x[step]));
    a.odd += c.odd * AS_SHORTS((uvec)(x[8 + step]));
    return a;
}
FN ivec dot_sum(const dot_acc a) {
    const ivec even = AS_IVEC(a.even), odd = AS_IVEC(a.odd);
    return ((even << 16) >> 16) + (even >> 16) + ((odd << 16) >> 16) + (odd >> 16);
}
#else
typedef ivec dot_acc;
typedef uvec dot_codes;

FN dot_acc dot_zero(void) { return (ivec)(0); }
FN dot_codes dot_unpack(const uvec w) { return w; }
FN dot_acc dot_step(dot_acc a, const dot_codes w, GLOBAL const uint *x, const int step) {
    UNROLL for (int i = 0; i < 4; i++) {
        const ivec code = LOW == 8 ? AS_IVEC(w << (uint)(24 - 8 * i)) >> 24 : AS_IVEC(w >> (uint)(8 * i) & 255u);
        a += code * (as_int(x[step] << (24 - 8 * i)) >> 24);
    }
    return a;
}
FN ivec dot_sum(const dot_acc a) { return a; }
#endif
#endif
