/* The probes of peaks.h. Each is one loop over independent accumulators that never leave the registers: nothing is loaded, so what is
 * measured is the multiply unit alone. Sixteen accumulators (ten for 256-bit int8, which needs two instructions more) hide the
 * latency of every core so far; AMX has eight tiles, 2 × 2 sums of two operands each.
 *
 * The functions carry their instruction set themselves (`target`), so this file is compiled once, for every processor.
 */
#include "peaks.h"

#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "isa.h"

#define UNROLL _Pragma("GCC unroll 16")

#if defined(__x86_64__)
#include <immintrin.h>

/* Keeps the compiler from seeing what a register holds. Without it equal accumulators become one (which then shows the latency), constant
 * operands fold, and sums that nobody reads go. */
#define HIDE(x) __asm__ volatile("" : "+x"(x))
#define HIDE512(x) __asm__ volatile("" : "+v"(x))

__attribute__((target("avx2,fma"))) static void fma256(int64_t n) {
    __m256 acc[12], a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(0.25f);
    HIDE(a);
    HIDE(b);
    UNROLL for (int i = 0; i < 12; i++) {
        acc[i] = _mm256_setzero_ps();
        HIDE(acc[i]);
    }
    for (int64_t k = 0; k < n; k++) UNROLL
    for (int i = 0; i < 12; i++) acc[i] = _mm256_fmadd_ps(acc[i], a, b);
    UNROLL for (int i = 0; i < 12; i++) HIDE(acc[i]);
}

__attribute__((target("avx2"))) static void maddubs(int64_t n) {
    __m256i acc[10], a = _mm256_set1_epi8(1), b = _mm256_set1_epi8(1), ones = _mm256_set1_epi16(1);
    HIDE(b);
    HIDE(ones);
    UNROLL for (int i = 0; i < 10; i++) {
        acc[i] = _mm256_setzero_si256();
        HIDE(acc[i]);
    }
    for (int64_t k = 0; k < n; k++) {
        UNROLL for (int i = 0; i < 10; i++) {
            HIDE(a); /* or the product would be computed once */
            __m256i product = _mm256_maddubs_epi16(a, b);
            HIDE(product);
            acc[i] = _mm256_add_epi32(acc[i], _mm256_madd_epi16(product, ones));
        }
    }
    UNROLL for (int i = 0; i < 10; i++) HIDE(acc[i]);
}

__attribute__((target("avx512f"))) static void fma512(int64_t n) {
    __m512 acc[16], a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(0.25f);
    HIDE512(a);
    HIDE512(b);
    UNROLL for (int i = 0; i < 16; i++) {
        acc[i] = _mm512_setzero_ps();
        HIDE512(acc[i]);
    }
    for (int64_t k = 0; k < n; k++) UNROLL
    for (int i = 0; i < 16; i++) acc[i] = _mm512_fmadd_ps(acc[i], a, b);
    UNROLL for (int i = 0; i < 16; i++) HIDE512(acc[i]);
}

__attribute__((target("avx512f,avx512vnni"))) static void vnni(int64_t n) {
    __m512i acc[16], a = _mm512_set1_epi8(1), b = _mm512_set1_epi8(1);
    HIDE512(a);
    HIDE512(b);
    UNROLL for (int i = 0; i < 16; i++) {
        acc[i] = _mm512_setzero_si512();
        HIDE512(acc[i]);
    }
    for (int64_t k = 0; k < n; k++) UNROLL
    for (int i = 0; i < 16; i++) acc[i] = _mm512_dpbusd_epi32(acc[i], a, b);
    UNROLL for (int i = 0; i < 16; i++) HIDE512(acc[i]);
}

#ifdef FL_HAVE_AVX512
__attribute__((target("avx512f,avx512bf16"))) static void bf16(int64_t n) {
    __m512 acc[16];
    __m512i a = _mm512_set1_epi16(0x3f00), b = _mm512_set1_epi16(0x3e80); /* 0.5 and 0.25 */
    HIDE512(a);
    HIDE512(b);
    UNROLL for (int i = 0; i < 16; i++) {
        acc[i] = _mm512_setzero_ps();
        HIDE512(acc[i]);
    }
    for (int64_t k = 0; k < n; k++) UNROLL
    for (int i = 0; i < 16; i++) acc[i] = _mm512_dpbf16_ps(acc[i], (__m512bh)a, (__m512bh)b);
    UNROLL for (int i = 0; i < 16; i++) HIDE512(acc[i]);
}
#endif

#ifdef FL_HAVE_AMX
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_config;

/* Eight tiles of 16 rows × 64 bytes. The whole configuration is an operand of the instruction: GCC 12's own intrinsic says that it
 * reads 8 bytes, and the compiler drops the rest. */
static void configure_tiles(void) {
    tile_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
    __asm__ volatile("tilezero %tmm0\n\ttilezero %tmm1\n\ttilezero %tmm2\n\ttilezero %tmm3\n\t"
                     "tilezero %tmm4\n\ttilezero %tmm5\n\ttilezero %tmm6\n\ttilezero %tmm7");
}

static void amx_int8(int64_t n) {
    configure_tiles();
    for (int64_t k = 0; k < n; k++)
        __asm__ volatile("tdpbssd %tmm6, %tmm4, %tmm0\n\ttdpbssd %tmm7, %tmm4, %tmm1\n\t"
                         "tdpbssd %tmm6, %tmm5, %tmm2\n\ttdpbssd %tmm7, %tmm5, %tmm3");
    __asm__ volatile("tilerelease");
}

static void amx_bf16(int64_t n) {
    configure_tiles();
    for (int64_t k = 0; k < n; k++)
        __asm__ volatile("tdpbf16ps %tmm6, %tmm4, %tmm0\n\ttdpbf16ps %tmm7, %tmm4, %tmm1\n\t"
                         "tdpbf16ps %tmm6, %tmm5, %tmm2\n\ttdpbf16ps %tmm7, %tmm5, %tmm3");
    __asm__ volatile("tilerelease");
}
#endif
#endif

typedef struct {
    const char *name, *dtype;
    int isa;
    void (*loop)(int64_t n); /* NULL: not in this build */
    double operations;       /* of one turn of the loop */
} peak;

static const peak PEAKS[FL_PEAK_COUNT] = {
#if defined(__x86_64__)
    {"fma256", "f32", FL_ISA_AVX2, fma256, 12 * 8 * 2},
    {"maddubs", "int8", FL_ISA_AVX2, maddubs, 10 * 32 * 2},
    {"fma512", "f32", FL_ISA_AVX512, fma512, 16 * 16 * 2},
    {"vnni", "int8", FL_ISA_AVX512, vnni, 16 * 64 * 2},
#ifdef FL_HAVE_AVX512
    {"avx512_bf16", "bf16", FL_ISA_AVX512, bf16, 16 * 32 * 2},
#else
    {"avx512_bf16", "bf16", FL_ISA_AVX512, NULL, 1},
#endif
#ifdef FL_HAVE_AMX
    {"amx_int8", "int8", FL_ISA_AMX, amx_int8, 4 * 16 * 16 * 64 * 2},
    {"amx_bf16", "bf16", FL_ISA_AMX, amx_bf16, 4 * 16 * 16 * 32 * 2},
#else
    {"amx_int8", "int8", FL_ISA_AMX, NULL, 1},
    {"amx_bf16", "bf16", FL_ISA_AMX, NULL, 1},
#endif
#else
    {"fma256", "f32", FL_ISA_AVX2, NULL, 1},         {"maddubs", "int8", FL_ISA_AVX2, NULL, 1},
    {"fma512", "f32", FL_ISA_AVX512, NULL, 1},       {"vnni", "int8", FL_ISA_AVX512, NULL, 1},
    {"avx512_bf16", "bf16", FL_ISA_AVX512, NULL, 1}, {"amx_int8", "int8", FL_ISA_AMX, NULL, 1},
    {"amx_bf16", "bf16", FL_ISA_AMX, NULL, 1},
#endif
};

static const peak *of(int number) { return number >= 0 && number < FL_PEAK_COUNT ? &PEAKS[number] : NULL; }

const char *fl_peak_name(int number) { return of(number) ? of(number)->name : NULL; }
const char *fl_peak_dtype(int number) { return of(number) ? of(number)->dtype : NULL; }
int fl_peak_isa(int number) { return of(number) ? of(number)->isa : -1; }
int fl_peak_missing(int number) { return !of(number) || !of(number)->loop; }

typedef struct {
    void (*loop)(int64_t n);
    int64_t turns;
} peak_job;

static void run_share(void *arg, int thread, int threads, fl_pool *pool) {
    (void)thread, (void)threads, (void)pool;
    const peak_job *job = arg;
    job->loop(job->turns);
}

static double seconds_of(fl_pool *pool, peak_job *job) {
    struct timespec a, b;
    clock_gettime(CLOCK_MONOTONIC, &a);
    if (fl_pool_run(pool, run_share, job) != FL_POOL_OK) return -1.0;
    clock_gettime(CLOCK_MONOTONIC, &b);
    return (double)(b.tv_sec - a.tv_sec) + 1e-9 * (double)(b.tv_nsec - a.tv_nsec);
}

double fl_probe_peak(fl_pool *pool, int number, int rounds) {
    if (fl_peak_missing(number) || fl_isa_missing(fl_peak_isa(number)) != NULL) return -1.0;
    peak_job job = {of(number)->loop, 1 << 14};
    double seconds = seconds_of(pool, &job), best = -1.0;
    while (seconds >= 0.0 && seconds < 0.02) { /* long enough that waking the threads does not count */
        job.turns *= 2;
        seconds = seconds_of(pool, &job);
    }
    for (int i = 0; i < rounds && seconds >= 0.0; i++) {
        seconds = seconds_of(pool, &job);
        if (seconds > 0.0 && (best < 0.0 || seconds < best)) best = seconds;
    }
    if (seconds < 0.0 || best <= 0.0) return -1.0;
    return of(number)->operations * (double)job.turns * fl_pool_threads(pool) / best;
}
