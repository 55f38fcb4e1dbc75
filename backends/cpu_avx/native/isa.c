/* The choice of a variant: CPUID says what the processor has, XGETBV what the operating system saves on a context switch, and for
 * AMX the kernel must grant the tile state to this process (arch_prctl). All three have to agree, or the first instruction of
 * a variant would kill the process. AMX must pass a self-test, too (selftest.h).
 */
#define _GNU_SOURCE
#include "isa.h"

#include <stdatomic.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#include "selftest.h"

extern const fl_kernels fl_kernels_baseline;
#ifdef FL_HAVE_AVX2
extern const fl_kernels fl_kernels_avx2;
#endif
#ifdef FL_HAVE_AVX512
extern const fl_kernels fl_kernels_avx512;
#endif
#ifdef FL_HAVE_AMX
extern const fl_kernels fl_kernels_amx;
#endif

static const char *const NAMES[FL_ISA_COUNT] = {"baseline", "avx2", "avx512", "amx"};

static const fl_kernels *table_of(int isa) {
    switch (isa) {
    case FL_ISA_BASELINE:
        return &fl_kernels_baseline;
#ifdef FL_HAVE_AVX2
    case FL_ISA_AVX2:
        return &fl_kernels_avx2;
#endif
#ifdef FL_HAVE_AVX512
    case FL_ISA_AVX512:
        return &fl_kernels_avx512;
#endif
#ifdef FL_HAVE_AMX
    case FL_ISA_AMX:
        return &fl_kernels_amx;
#endif
    default:
        return NULL;
    }
}

const char *fl_isa_name(int isa) { return isa >= 0 && isa < FL_ISA_COUNT ? NAMES[isa] : NULL; }

#if defined(__x86_64__)
typedef struct {
    unsigned a, b, c, d;
} regs;

static regs cpuid(unsigned leaf, unsigned sub) {
    regs r = {0, 0, 0, 0};
    if (leaf <= __get_cpuid_max(0, NULL)) __cpuid_count(leaf, sub, r.a, r.b, r.c, r.d);
    return r;
}

static unsigned long long saved_state(void) {
    unsigned low, high;
    if (!(cpuid(1, 0).c & bit_OSXSAVE)) return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return ((unsigned long long)high << 32) | low;
}

#if defined(FL_HAVE_AMX) && defined(FL_HAVE_AVX512) && defined(__linux__)
/* AMX was written without a machine that has it: its kernels are compared with those of avx512, once in a process, before they are used. */
static const char *failed_selftest(void) {
    static const char *const reasons[] = {
        [FL_AGREE] = NULL,
        [FL_DIFFER] = "its kernels gave other results than those of avx512 in the self-test at first use",
        [FL_CRASHED] = "its kernels crashed in the self-test at first use",
        [FL_UNTESTED] = "there was no memory or process for its self-test at first use",
    };
    static atomic_int known; /* 1 + the result; two threads that ask at once both test */
    if (!atomic_load(&known)) atomic_store(&known, 1 + fl_compare_in_child(fl_kernels_amx.linear, fl_kernels_avx512.linear));
    const int result = atomic_load(&known) - 1;
    return result >= FL_AGREE && result <= FL_UNTESTED ? reasons[result] : reasons[FL_CRASHED];
}
#else
static const char *failed_selftest(void) { return "this build cannot test it"; }
#endif

#define HAS(word, bit) (((word) >> (bit)) & 1u)

static const char *missing_cpu(int isa) {
    regs one = cpuid(1, 0), seven = cpuid(7, 0), seven1 = cpuid(7, 1);
    unsigned long long os = saved_state();
    if (isa == FL_ISA_BASELINE) return HAS(one.c, 20) && HAS(one.c, 9) ? NULL : "the processor has no SSE4.2";
    if (!HAS(one.c, 28) || !HAS(seven.b, 5)) return "the processor has no AVX2";
    if (!HAS(one.c, 12) || !HAS(one.c, 29) || !HAS(seven.b, 8)) return "the processor has no FMA, F16C or BMI2";
    if ((os & 0x6) != 0x6) return "the operating system does not save AVX registers";
    if (isa == FL_ISA_AVX2) return NULL;
    if (!HAS(seven.b, 16) || !HAS(seven.b, 17) || !HAS(seven.b, 30) || !HAS(seven.b, 31))
        return "the processor has no AVX-512 (F, DQ, BW, VL)";
    if (!HAS(seven.c, 11)) return "the processor has no AVX-512 VNNI";
    if (!HAS(seven1.a, 5)) return "the processor has no AVX-512 BF16";
    if ((os & 0xe6) != 0xe6) return "the operating system does not save AVX-512 registers";
    if (isa == FL_ISA_AVX512) return NULL;
    if (!HAS(seven.d, 24) || !HAS(seven.d, 25) || !HAS(seven.d, 22)) return "the processor has no AMX (tile, int8, bf16)";
    if ((os & 0x60000) != 0x60000) return "the operating system does not save AMX tiles";
#if defined(__linux__)
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) != 0) return "the kernel refuses AMX tiles to this process";
    return failed_selftest();
#else
    return "AMX is used on Linux only";
#endif
}
#else
static const char *missing_cpu(int isa) { return isa == FL_ISA_BASELINE ? NULL : "this is not an x86-64 processor"; }
#endif

const char *fl_isa_missing(int isa) {
    if (isa < 0 || isa >= FL_ISA_COUNT) return "there is no such variant";
    if (table_of(isa) == NULL) return "this build has no such kernels: the compiler did not know the instructions";
    return missing_cpu(isa);
}

const fl_kernels *fl_kernels_for(const char *isa) {
    for (int i = FL_ISA_COUNT - 1; i >= 0; i--)
        if ((isa == NULL || strcmp(isa, NAMES[i]) == 0) && fl_isa_missing(i) == NULL) return table_of(i);
    return NULL;
}
