/* The dialect of the kernels: what differs between device languages is here, so that a kernel file has none of it.
 *
 * RULES for kernel files: no address space, id or barrier of a language by name, only these macros; local arrays at kernel scope
 * with sizes from -D; no C++; a barrier only where all work-items of a group meet it; the group has exactly LANES work-items.
 * Halves are storage: arithmetic is f32. No product is contracted into a fused multiply-add unless a kernel writes fma, so that
 * devices agree in bits. This file is for OpenCL C 1.2 and newer.
 *
 * WIDTH. A work-item handles VEC neighbouring elements at a time (fvec, ivec, uvec). A CPU takes LANES = 1 and VEC = 8 or 16:
 * a work-item is a thread with vector registers. A GPU takes VEC = 1 and LANES = 32 or more: neighbours read neighbours.
 *
 * OPERANDS. BUF(T, x) in a parameter list is a buffer and an offset in elements; AT(x) at the top of the body applies it. A matrix
 * of rows x heads x width is MAT(T, x): element (t, h, i) is x[t * x_row + h * x_head + i]. */
#ifndef FASTLLM_PRELUDE_H
#define FASTLLM_PRELUDE_H

#pragma OPENCL FP_CONTRACT OFF
#ifdef FP64
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#endif

#define KERNEL(name) __kernel __attribute__((reqd_work_group_size(LANES, 1, 1))) void name
#define GLOBAL __global
#define LOCAL __local
#define TABLE __constant
#define FN static inline
#define LANE ((int)get_local_id(0))
#define GROUP(d) ((long)get_group_id(d))
#define BARRIER() barrier(CLK_LOCAL_MEM_FENCE)
#define UNROLL __attribute__((opencl_unroll_hint))
#define FAULT(p, code, where, value)                                                                                           \
    do {                                                                                                                       \
        if (atomic_cmpxchg((p), 0, (code)) == 0) (p)[1] = (int)(where), (p)[2] = (int)(value);                                 \
    } while (0)

#define BUF(T, name) GLOBAL T *name, const ulong name##_at
#define AT(name) name += name##_at
#define MAT(T, name) BUF(T, name), const long name##_row, const long name##_head
#define HEAD(name, t, h) (name + (long)(t) * name##_row + (long)(h) * name##_head)

#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)
#if VEC == 1
typedef float fvec;
typedef int ivec;
typedef uint uvec;
#define LOADV(p) (*(p))
#define STOREV(v, p) (*(p) = (v))
#define LOAD_HALFV(p) vload_half(0, (p))
#define STORE_HALFV(v, p) vstore_half_rte((v), 0, (p))
#define TO_FVEC(v) ((float)(v))
#define TO_UVEC(v) ((uint)(v))
#define AS_FVEC(v) as_float(v)
#define AS_IVEC(v) as_int(v)
#define SUM_LANES(v) (v)
#define MAX_LANES(v) (v)
#define INDICES 0
#else
typedef CAT(float, VEC) fvec;
typedef CAT(int, VEC) ivec;
typedef CAT(uint, VEC) uvec;
#define LOADV(p) CAT(vload, VEC)(0, (p))
#define STOREV(v, p) CAT(vstore, VEC)((v), 0, (p))
#define LOAD_HALFV(p) CAT(vload_half, VEC)(0, (p))
#define STORE_HALFV(v, p) CAT(CAT(vstore_half, VEC), _rte)((v), 0, (p))
#define TO_FVEC(v) CAT(convert_float, VEC)(v)
#define TO_UVEC(v) CAT(convert_uint, VEC)(v)
#define AS_FVEC(v) CAT(as_float, VEC)(v)
#define AS_IVEC(v) CAT(as_int, VEC)(v)
#define SUM_LANES(v) CAT(sum_lanes, VEC)(v)
#define MAX_LANES(v) CAT(max_lanes, VEC)(v)
#if VEC == 2
#define INDICES ((int2)(0, 1))
#elif VEC == 4
#define INDICES ((int4)(0, 1, 2, 3))
#elif VEC == 8
#define INDICES ((int8)(0, 1, 2, 3, 4, 5, 6, 7))
#else
#define INDICES ((int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15))
#endif
FN float sum_lanes2(float2 v) { return v.s0 + v.s1; }
FN float sum_lanes4(float4 v) { return sum_lanes2(v.lo + v.hi); }
FN float sum_lanes8(float8 v) { return sum_lanes4(v.lo + v.hi); }
FN float sum_lanes16(float16 v) { return sum_lanes8(v.lo + v.hi); }
FN float max_lanes2(float2 v) { return fmax(v.s0, v.s1); }
FN float max_lanes4(float4 v) { return max_lanes2(fmax(v.lo, v.hi)); }
FN float max_lanes8(float8 v) { return max_lanes4(fmax(v.lo, v.hi)); }
FN float max_lanes16(float16 v) { return max_lanes8(fmax(v.lo, v.hi)); }
#endif

/* Sum and maximum over the work-items of a group, in one fixed order. part: LOCAL float [LANES]. */
FN float group_sum(float v, LOCAL float *part) {
#if LANES > 1
    BARRIER();
    part[LANE] = v;
    BARRIER();
    for (int n = LANES / 2; n > 0; n /= 2) {
        if (LANE < n) part[LANE] += part[LANE + n];
        BARRIER();
    }
    v = part[0];
#endif
    return v;
}

FN float group_max(float v, LOCAL float *part) {
#if LANES > 1
    BARRIER();
    part[LANE] = v;
    BARRIER();
    for (int n = LANES / 2; n > 0; n /= 2) {
        if (LANE < n) part[LANE] = fmax(part[LANE], part[LANE + n]);
        BARRIER();
    }
    v = part[0];
#endif
    return v;
}

/* Plain storage types: value i of a row. KIND 0: f32, 1: f16, 2: bf16. */
FN float load_plain(GLOBAL const uchar *p, const int kind, const long i) {
    if (kind == 0) return ((GLOBAL const float *)p)[i];
    if (kind == 1) return vload_half(i, (GLOBAL const half *)p);
    return as_float((uint)((GLOBAL const ushort *)p)[i] << 16);
}
FN fvec load_plainv(GLOBAL const uchar *p, const int kind, const long i) {
    if (kind == 0) return LOADV((GLOBAL const float *)p + i);
    if (kind == 1) return LOAD_HALFV((GLOBAL const half *)p + i);
    return AS_FVEC(TO_UVEC(LOADV((GLOBAL const ushort *)p + i)) << 16);
}

#endif
