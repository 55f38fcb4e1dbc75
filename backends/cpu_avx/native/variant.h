/* Instruction-set variants: how one source becomes four kernels.
 *
 * Every file in kernels/ is compiled once per variant (setup.py) with FL_VARIANT set to baseline, avx2, avx512 or amx and
 * FL_AVX2 … defined accordingly. FL_NAME(f) gives each variant its own symbol, f_avx2 for example; the table of a variant
 * (kernels.h) is chosen once, by CPUID, XGETBV and, for amx, the kernel's permission (isa.c). Files outside kernels/ are compiled
 * once, for the oldest machine, and call kernels only through the table.
 */
#ifndef FL_VARIANT_H
#define FL_VARIANT_H

#define FL_CAT2(a, b) a##_##b
#define FL_CAT(a, b) FL_CAT2(a, b)
#define FL_NAME(f) FL_CAT(f, FL_VARIANT)
#define FL_INLINE static inline __attribute__((always_inline))

#endif
