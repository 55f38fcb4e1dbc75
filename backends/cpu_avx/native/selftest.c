/* The comparison of selftest.h: some 20 milliseconds, less than one megabyte of weights. */
#define _GNU_SOURCE
#include "selftest.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#if defined(__unix__) || defined(__APPLE__)
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

#include "kernels.h"
#include "layouts.h"

enum {
    N = 72,
    PAIR_N = 64,
    MOST_K = 768,
    ROWS = 53,
    SECONDS = 20
}; /* three strips, the last one not full; two for layers in pairs; a block of rows that tiles do not divide */

/* The inputs of a weight: whole chunks of 256, and then one that ends in the middle of a chunk, or an odd number of them where blocks
 * have 256. */
static int width_of(const fl_layout *L, int second) {
    return !second ? 512 : L->block == 1 ? 300 : L->block == 256 ? MOST_K : 256 + L->block;
}

static uint32_t next_random(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

/* A packed weight of random codes; scales are halves between 2^-8 and 2^-6, of either sign. */
static void make_weight(int layout, int K, uint8_t *data, uint64_t *state) {
    const fl_layout *L = &FL_LAYOUT[layout];
    const size_t bytes = fl_packed_bytes(layout, N, K), block = fl_block_packed(L);
    for (size_t i = 0; i < bytes; i++) data[i] = (uint8_t)next_random(state);
    if (layout >= FL_BLOCK_LAYOUTS) { /* values between 2^-8 and 2^-6 in every plain type */
        const int size = L->block_bytes;
        for (size_t i = 0; i < bytes; i += (size_t)size) {
            const float value =
                (1.0f + (float)(next_random(state) % 256) / 64.0f) * (next_random(state) % 2 ? 0x1p-8f : -0x1p-8f);
            const uint32_t bits = fl_float_bits(value);
            const uint16_t brain = (uint16_t)(bits >> 16),
                           half = (uint16_t)((bits >> 16 & 0x8000) | 0x1c00 | (bits >> 13 & 0x3ff));
            memcpy(data + i,
                   size == 4           ? (const void *)&bits
                   : layout == FL_BF16 ? (const void *)&brain
                                       : (const void *)&half,
                   (size_t)size);
        }
        return;
    }
    for (size_t at = 0; at < bytes; at += block)
        for (int r = 0; r < FL_STRIP; r++) {
            uint8_t *head = data + at;
            const uint16_t d = (uint16_t)((next_random(state) & 0x87ff) + 0x1c00),
                           m = (uint16_t)((next_random(state) & 0x87ff) + 0x1c00);
            if (L->scale == FL_SCALE_EXP) head[r] = (uint8_t)(118 + next_random(state) % 8);
            else
                memcpy(head + 2 * r, &d, 2);
            if (L->scale == FL_SCALE_ZERO) head[64 + r] = (uint8_t)(next_random(state) % 16);
            else if (L->minimum)
                memcpy(head + 64 + 2 * r, &m, 2);
        }
}

/* The rows of w to y [rows][N]; with `up`, those of silu(w) * up: for block formats as codes, in y [ROWS * N]. */
static void multiply(const fl_linear_ops *ops, const fl_weight *w, const fl_weight *up, int kind, const float *x, int rows,
                     uint8_t *space, float *y) {
    const size_t prepared = (fl_prepared_bytes(kind, rows, w->K) + 63) / 64 * 64;
    fl_acts a = {kind, rows, w->K, space}, codes = {FL_KIND_INT8, rows, w->N, (uint8_t *)y};
    const fl_target to = {
        .y = y, .ldy = N, .codes = up && kind >= FL_KIND_INT8 ? &codes : NULL, .act = up ? FL_ACT_SILU : FL_ACT_NONE};
    memset(space, 0, prepared), memset(y, 0, ROWS * N * sizeof *y);
    ops->prepare(&a, x, (size_t)w->K, 0, rows);
    ops->linear(w, up, &a, &to, 0, (w->N + FL_STRIP - 1) / FL_STRIP, space + prepared);
}

/* Sums of bf16, or products of two, differ as sums in another order do: weights are smaller than 2^-5. */
static int close_enough(const float *a, const float *b, const float *x, int rows, int K, int pair) {
    for (int r = 0; r < rows; r++) {
        double size = 0.0;
        for (int k = 0; k < K; k++) size += fabs((double)x[r * K + k]) * 0x1p-5;
        const double bound = pair ? size * size * 0x1p-15 : size * 0x1p-17;
        for (int n = 0; n < N; n++)
            if (!(fabs((double)a[r * N + n] - (double)b[r * N + n]) <= bound)) return 0;
    }
    return 1;
}

int fl_compare_kernels(const fl_linear_ops *tested, const fl_linear_ops *trusted) {
    static const int counts[] = {ROWS, 32, 17, 1};
    uint64_t state = 1;
    int result = FL_AGREE;
    const size_t weight_bytes = (fl_packed_bytes(FL_F32, N, MOST_K) + 63) / 64 * 64,
                 space_bytes = fl_prepared_bytes(FL_KIND_F32, ROWS, MOST_K) + fl_linear_scratch();
    float *x = malloc(ROWS * MOST_K * sizeof *x), *y = malloc(2 * ROWS * N * sizeof *y);
    uint8_t *memory = malloc(2 * weight_bytes + space_bytes + 4096);
    if (!x || !y || !memory) result = FL_UNTESTED;
    uint8_t *data = memory + (64 - (uintptr_t)memory % 64) % 64, *more = data + weight_bytes, *space = more + weight_bytes;
    for (int i = 0; i < ROWS * MOST_K && result == FL_AGREE; i++)
        x[i] = ((float)next_random(&state) * 0x1p-30f - 1.0f) * (i % 7 ? 1.0f : 9.0f);
    for (int test = 0; test < 4 * FL_LAYOUTS && result == FL_AGREE; test++) {
        const int layout = test / 4, pair = test / 2 % 2, K = width_of(&FL_LAYOUT[layout], test % 2);
        const fl_weight w = {layout, pair ? PAIR_N : N, K, data}, up = {layout, PAIR_N, K, more};
        const int kind = fl_prepare_kind(layout, 0, tested->bf16);
        make_weight(layout, K, data, &state);
        make_weight(layout, K, more, &state);
        for (size_t i = 0; i < sizeof counts / sizeof counts[0] && result == FL_AGREE; i++) {
            float *other = y + ROWS * N;
            multiply(tested, &w, pair ? &up : NULL, kind, x, counts[i], space, y);
            multiply(trusted, &w, pair ? &up : NULL, kind, x, counts[i], space, other);
            const int same =
                kind == FL_KIND_BF16 ? close_enough(y, other, x, counts[i], K, pair) : !memcmp(y, other, ROWS * N * sizeof *y);
            if (!same) result = FL_DIFFER;
        }
    }
    free(x), free(y), free(memory);
    return result;
}

int fl_compare_in_child(const fl_linear_ops *tested, const fl_linear_ops *trusted) {
#if defined(__unix__) || defined(__APPLE__)
    /* The result comes through memory that both have: of whoever ignores SIGCHLD, or waits for any child, waitpid tells no status. */
    int *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) return FL_UNTESTED;
    *shared = FL_CRASHED; /* until it says otherwise */
    const pid_t child = fork();
    if (child == 0) {
        static const int faults[] = {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGABRT, SIGALRM};
        const struct rlimit no_core = {0, 0};
        for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) signal(faults[i], SIG_DFL);
        setrlimit(RLIMIT_CORE, &no_core);
        alarm(SECONDS);
        *shared = fl_compare_kernels(tested, trusted);
        _exit(0);
    }
    while (child > 0 && waitpid(child, NULL, 0) < 0 && errno == EINTR) {}
    const int result = child > 0 ? *shared : FL_UNTESTED;
    munmap(shared, sizeof *shared);
    return result;
#else
    return fl_compare_kernels(tested, trusted);
#endif
}
