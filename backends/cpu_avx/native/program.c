/* The interpreter of program.h. */
#define _GNU_SOURCE
#include "program.h"

#include <math.h>
#include <string.h>
#include <time.h>

#include "moe.h"
#include "recurrent.h"

static int64_t resolve(const fl_program *p, int32_t symbol, int64_t fixed) {
    switch (symbol) {
    case FL_SYM_T:
        return p->T;
    case FL_SYM_S:
        return p->S;
    case FL_SYM_R:
        return p->R;
    case FL_SYM_S1:
        return p->S + 1;
    case FL_SYM_R1:
        return p->R + 1;
    default:
        return fixed;
    }
}

/* indices of the step ------------------------------------------------------------------------------------------------ */

static int check_pages(const fl_program *p, const fl_check *c, fl_fault *fault) {
    for (int64_t s = 0; s <= p->S; s++) {
        int64_t start = c->p[s], before = s ? c->p[s - 1] : 0;
        if (start < before || start > p->T || (s == 0 && start != 0) || (s == p->S && start != p->T)) {
            *fault = (fl_fault){c->node, s, start, p->T};
            return FL_RUN_QUERY;
        }
    }
    for (int64_t s = 0; c->context_len && s < p->S; s++) {
        int64_t length = c->context_len[s];
        if (length < 0 || length > c->table_width * c->block_size) {
            *fault = (fl_fault){c->node, s, length, c->table_width * c->block_size};
            return FL_RUN_CONTEXT;
        }
        const int32_t *row = c->block_table + s * c->table_stride;
        for (int64_t b = 0; b * c->block_size < length; b++)
            if (row[b] < 0 || row[b] >= c->limit) {
                *fault = (fl_fault){c->node, s, row[b], c->limit};
                return FL_RUN_BLOCK;
            }
    }
    return FL_RUN_OK;
}

static int check(const fl_program *p, fl_fault *fault) {
    for (const fl_check *c = p->checks; c < p->checks + p->n_checks; c++) {
        if (c->kind == FL_CHECK_PAGES) {
            int status = check_pages(p, c, fault);
            if (status) return status;
            continue;
        }
        int64_t rows = resolve(p, c->symbol, c->rows), limit = resolve(p, c->limit_symbol, c->limit);
        int64_t least = c->kind == FL_CHECK_INDEX ? 0 : INT32_MIN;
        for (int64_t i = 0; i < rows; i++)
            if (c->p[i] < least || c->p[i] >= limit) {
                *fault = (fl_fault){c->node, i, c->p[i], limit};
                return c->kind == FL_CHECK_INDEX ? FL_RUN_INDEX : FL_RUN_SLOT;
            }
    }
    return FL_RUN_OK;
}

/* attention ------------------------------------------------------------------------------------------------------------ */

static int64_t tile_rows(const fl_attention *a) {
    int64_t group = a->heads / a->cache.heads;
    return group >= FL_TILE ? 1 : FL_TILE / group;
}

static int64_t head_tiles(const fl_attention *a) { return (a->heads / a->cache.heads + FL_TILE - 1) / FL_TILE; }

static int64_t ranges_of(int64_t keys) { return (keys + FL_RANGE - 1) / FL_RANGE; }

/* Key ranges of a sequence that are units of their own now. */
static int64_t parts_of(const fl_attention *a, int64_t s) {
    if (!a->partials) return 1;
    int64_t left = ranges_of(a->context_len[s]) - a->first;
    return left < 0 ? 0 : left < a->slots ? left : a->slots;
}

/* The first key that a row may see. */
static int64_t first_key(const fl_attention *a, int64_t position) {
    int64_t lo = a->mask == FL_MASK_CHUNK && position > 0 ? position / a->chunk * a->chunk : 0;
    return a->window > 0 && position - a->window + 1 > lo ? position - a->window + 1 : lo;
}

/* Units of this run, and whether they are cut into key ranges: only if there are few to share otherwise. Partial results of i4 (row, range)
 * pairs have room; a longer context is done some ranges at a time. */
static void attention_resolve(const fl_program *p, fl_instruction *ins) {
    fl_attention *a = &ins->attention;
    *a = (fl_attention){.q = ins->v[0],
                        .out = ins->v[8],
                        .cache = ins->cache,
                        .positions = (const int32_t *)ins->v[1].p,
                        .query_start = (const int32_t *)ins->v[2].p,
                        .context_len = (const int32_t *)ins->v[3].p,
                        .block_table = (const int32_t *)ins->v[4].p,
                        .prefix_len = (const int32_t *)ins->v[7].p,
                        .sinks = (const float *)ins->v[5].p,
                        .slopes = (const float *)ins->v[6].p,
                        .table_stride = ins->v[4].s0,
                        .sequences = p->S,
                        .heads = ins->v[0].d1,
                        .value_dim = (int32_t)ins->i[3],
                        .mask = (int32_t)ins->i[0],
                        .chunk = (int32_t)ins->i[1],
                        .window = (int32_t)ins->i[2],
                        .scale = ins->f[0],
                        .softcap = ins->f[1]};
    int64_t units = 0, longest = 0, most = 1, threads = fl_pool_threads(p->pool);
    for (int64_t s = 0; s < p->S; s++) {
        const int64_t rows = a->query_start[s + 1] - a->query_start[s];
        if (rows > most) most = rows < tile_rows(a) ? rows : tile_rows(a);
        units += (a->query_start[s + 1] - a->query_start[s] + tile_rows(a) - 1) / tile_rows(a) * a->cache.heads * head_tiles(a);
        if (a->context_len[s] > longest) longest = a->context_len[s];
    }
    int64_t fits = FL_TILE / (most * (a->heads / a->cache.heads)), together = units / (16 * threads);
    a->together = (int32_t)(together > fits ? fits : together);
    if (threads == 1 || units >= 16 * threads || p->T == 0 || p->T > FL_PARTIAL_ROWS || longest <= FL_RANGE) {
        if (a->together < 1) a->together = 1;
        return;
    }
    int64_t from = longest, slots = ins->i[4] / p->T - 1;
    for (int64_t t = 0; t < p->T; t++)
        if (first_key(a, a->positions[t]) < from) from = first_key(a, a->positions[t]);
    a->first = from / FL_RANGE;
    a->slots = ranges_of(longest) - a->first < slots ? ranges_of(longest) - a->first : slots;
    if (a->slots > 1) a->partials = (float *)(intptr_t)ins->i[5], a->together = (int32_t)fits;
    if (a->together < 1) a->together = 1;
}

static int64_t next_unit(fl_instruction *ins) { return atomic_fetch_add_explicit(&ins->next, 1, memory_order_relaxed); }

static void attention_run(const fl_program *p, fl_instruction *ins, int thread, int threads, void *scratch) {
    fl_attention a = ins->attention; /* its ranges move on */
    const int64_t tile = tile_rows(&a), tiles = head_tiles(&a), together = a.together,
                  groups = (a.cache.heads + together - 1) / together;
    int64_t unit = next_unit(ins), base = 0, end = 0;
    for (int64_t s = 0; s < p->S; s++)
        if (a.context_len[s] > end) end = a.context_len[s];
    for (end = ranges_of(end);;) {
        for (int64_t s = 0; s < p->S; s++) { /* units come in ascending order */
            const int64_t rows = a.query_start[s + 1] - a.query_start[s], parts = parts_of(&a, s),
                          blocks = (rows + tile - 1) / tile;
            const int64_t count = blocks * groups * tiles * parts;
            for (; unit < base + count; unit = next_unit(ins)) {
                int64_t index = unit - base, part = index % parts, tail = index / parts, head0 = tail % tiles * FL_TILE,
                        head = tail / tiles % groups * together, left = a.cache.heads - head, at = tail / tiles / groups;
                at = blocks - 1 - at; /* the last rows of a prompt see most keys: begin with them */
                int64_t row0 = a.query_start[s] + at * tile, row1 = row0 + tile;
                if (row1 > a.query_start[s + 1]) row1 = a.query_start[s + 1];
                int64_t range0 = a.partials ? a.first + part : 0, range1 = a.partials ? range0 + 1 : end;
                p->kernels->attention(&a, s, (int32_t)head, (int32_t)(left < together ? left : together), (int32_t)head0, row0,
                                      row1, range0, range1, scratch);
            }
            base += count;
        }
        if (!a.partials) return;
        fl_pool_barrier(p->pool);
        for (int64_t s = 0; s < p->S; s++)
            for (int64_t t = a.query_start[s]; t < a.query_start[s + 1]; t++)
                for (int32_t h = 0; h < a.heads; h++)
                    if ((t * a.heads + h) % threads == thread) p->kernels->attention_merge(&a, s, t, h);
        a.first += a.slots;
        if (a.first >= end) return;
        fl_pool_barrier(p->pool);
    }
}

/* the rest ------------------------------------------------------------------------------------------------------------- */

static void rope_table(const fl_view *positions, const fl_view *inv_freq, float factor, const fl_view *table, int64_t i0,
                       int64_t i1) {
    int64_t r = inv_freq->d2;
    for (int64_t t = i0; t < i1; t++) {
        double position = ((const int32_t *)positions->p)[t];
        float *row = (float *)table->p + t * 2 * r;
        for (int64_t i = 0; i < r; i++) {
            double angle = position * (double)((const float *)inv_freq->p)[i];
            row[i] = (float)(cos(angle) * (double)factor);
            row[r + i] = (float)(sin(angle) * (double)factor);
        }
    }
}

static void concat(const fl_view *x, const fl_view *y, const fl_view *out, int64_t i0, int64_t i1) {
    for (int64_t i = i0; i < i1; i++)
        for (int32_t j = 0; j < out->d1; j++) {
            float *to = (float *)out->p + i * out->s0 + j * out->s1;
            memcpy(to, (const float *)x->p + i * x->s0 + j * x->s1, (size_t)x->d2 * sizeof *to);
            memcpy(to + x->d2, (const float *)y->p + i * y->s0 + j * y->s1, (size_t)y->d2 * sizeof *to);
        }
}

/* The prepared rows that this thread reads or makes: in steps of one row its own copy, if the instruction has one. */
static int private_acts(const fl_program *p, const fl_instruction *ins, int thread, fl_acts *acts) {
    *acts = ins->acts;
    if (!p->one_row || !ins->i[1]) return 0;
    acts->data = (uint8_t *)(intptr_t)ins->i[1] + thread * ins->i[2];
    return 1;
}

/* Rows [i0, i1), normalised in scratch and prepared. */
static void norm_prepare(const fl_program *p, const fl_instruction *ins, fl_acts *acts, int64_t i0, int64_t i1, void *scratch) {
    const fl_view row = {scratch, 1, 0, 0, 1, ins->v[0].d2, FL_DT_F32};
    for (int64_t i = i0; i < i1; i++) {
        fl_view x = ins->v[0];
        x.p += i * x.s0 * (int64_t)sizeof(float);
        p->kernels->rms_norm(&x, (const float *)ins->v[1].p, ins->f[0], &row, 0, 1);
        p->kernels->linear->prepare(acts, scratch, 0, (int)i, (int)i + 1);
    }
}

static void execute(const fl_program *p, fl_instruction *ins, int thread, int threads, void *scratch) {
    const fl_kernels *k = p->kernels;
    const fl_view *v = ins->v;
    int64_t rows = v[ins->op == FL_OP_LINEAR ? 1 : 0].rows, i0, i1; /* the rows that threads share */
    i0 = rows * thread / threads, i1 = rows * (thread + 1) / threads;
    fl_acts acts;
    switch (ins->op) {
    case FL_OP_EMBED:
        k->embed((const int32_t *)v[0].p, &v[1], &v[2], i0, i1);
        break;
    case FL_OP_EMBED_PACKED:
        for (int64_t i = i0; i < i1; i++)
            k->linear->unpack_row(&ins->weight, ((const int32_t *)v[0].p)[i], (float *)v[2].p + i * v[2].s0);
        break;
    case FL_OP_RMS_NORM:
        k->rms_norm(&v[0], (const float *)v[1].p, ins->f[0], &v[2], i0, i1);
        break;
    case FL_OP_LAYER_NORM:
        k->layer_norm(&v[0], (const float *)v[1].p, (const float *)v[2].p, ins->f[0], &v[3], i0, i1);
        break;
    case FL_OP_ROPE_TABLE:
        rope_table(&v[0], &v[1], ins->f[0], &v[2], i0, i1);
        break;
    case FL_OP_ROPE:
        k->rope(&v[0], (const float *)v[1].p, (int32_t)ins->i[0], (int32_t)ins->i[1], &v[2], i0, i1);
        break;
    case FL_OP_KV_WRITE:
        k->kv_write(&ins->cache, &v[0], &v[1], (const int32_t *)v[2].p, i0, i1);
        break;
    case FL_OP_ATTENTION:
        attention_run(p, ins, thread, threads, scratch);
        break;
    case FL_OP_PREPARE:
        if (private_acts(p, ins, thread, &acts)) i0 = 0, i1 = rows;
        if (ins->i[0]) norm_prepare(p, ins, &acts, i0, i1, scratch);
        else if (i0 < i1)
            k->linear->prepare(&acts, (const float *)v[0].p, (size_t)v[0].s0, (int)i0, (int)i1);
        break;
    case FL_OP_LINEAR: {
        int64_t strips = (ins->weight.N + FL_STRIP - 1) / FL_STRIP, a = strips * thread / threads,
                b = strips * (thread + 1) / threads;
        const fl_target to = {.bias = (const float *)v[0].p,
                              .up_bias = (const float *)v[2].p,
                              .add = (const float *)v[3].p,
                              .y = (float *)v[1].p,
                              .ldadd = (size_t)v[3].s0,
                              .ldy = (size_t)v[1].s0,
                              .codes = ins->codes.data ? &ins->codes : NULL,
                              .act = (int32_t)ins->i[0]};
        private_acts(p, ins, thread, &acts);
        if (rows > 0 && a < b)
            k->linear->linear(&ins->weight, ins->up.data ? &ins->up : NULL, &acts, &to, (int)a, (int)b, scratch);
        break;
    }
    case FL_OP_ACT_MUL: {
        int32_t c0 = 0, c1 = v[0].d2;
        if (ins->i[1]) { /* the same columns of every row as a linear of this width gives this thread */
            int64_t strips = (c1 + FL_STRIP - 1) / FL_STRIP;
            c0 = (int32_t)(strips * thread / threads * FL_STRIP);
            int64_t end = strips * (thread + 1) / threads * FL_STRIP;
            c1 = end < c1 ? (int32_t)end : c1;
            i0 = 0, i1 = rows;
        }
        if (c0 < c1) k->act_mul((int32_t)ins->i[0], &v[0], v[1].p ? &v[1] : NULL, &v[2], i0, i1, c0, c1);
        break;
    }
    case FL_OP_ADD:
        k->add(&v[0], &v[1], (int32_t)ins->i[0], &v[2], i0, i1);
        break;
    case FL_OP_MUL:
        k->mul(&v[0], &v[1], (int32_t)ins->i[0], &v[2], i0, i1);
        break;
    case FL_OP_SOFTMAX:
        k->softmax(&v[0], &v[1], i0, i1);
        break;
    case FL_OP_SOFTCAP:
        k->softcap(&v[0], ins->f[0], &v[1], i0, i1);
        break;
    case FL_OP_MATMUL:
        k->matmul(&v[0], &v[1], &v[2], i0, i1);
        break;
    case FL_OP_QUANTIZE:
        k->quantize(&v[0], (int32_t)ins->i[0], &v[1], &v[2], i0, i1);
        break;
    case FL_OP_DEQUANTIZE:
        k->dequantize(&v[0], &v[1], (int32_t)ins->i[0], &v[2], i0, i1);
        break;
    case FL_OP_ROUTE_TOPK: {
        const int64_t *a = ins->i;
        const fl_route route = {(int32_t)a[0], (int32_t)a[1], (int32_t)a[2], (int32_t)a[3],
                                (int32_t)a[4], (int32_t)a[5], ins->f[0]};
        k->route_topk(&route, &v[0], (const float *)v[1].p, &v[2], &v[3], i0, i1, scratch);
        break;
    }
    case FL_OP_CONCAT:
        concat(&v[0], &v[1], &v[2], i0, i1);
        break;
    case FL_OP_MOE:
        fl_moe_run(p, ins, thread, threads, scratch);
        break;
    case FL_OP_SHORT_CONV:
        fl_short_conv_run(p, ins, thread, threads);
        break;
    case FL_OP_DELTA_RULE:
        fl_delta_rule_run(p, ins, threads, scratch);
        break;
    default:
        break;
    }
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void walk(void *arg, int thread, int threads, fl_pool *pool) {
    fl_program *p = arg;
    void *scratch = p->scratch + thread * p->scratch_bytes;
    int timed = p->profile && thread == 0, mask = p->one_row ? FL_BARRIER_ROW : FL_BARRIER_ROWS;
    double before = timed ? now() : 0.0;
    for (fl_instruction *ins = p->code; ins < p->code + p->n_code; ins++) {
        if (ins->barrier & mask) fl_pool_barrier(pool);
        double start = timed ? now() : 0.0;
        execute(p, ins, thread, threads, scratch);
        if (timed) {
            double after = now();
            ins->seconds += after - before, ins->waited += start - before;
            before = after;
        }
    }
}

int fl_program_run(fl_program *p, int64_t T, int64_t S, int64_t R, fl_fault *fault) {
    *fault = (fl_fault){-1, 0, 0, 0};
    if (T < 0 || S < 0 || R < 0 || T > p->max_T || S > p->max_S || R > p->max_R) return FL_RUN_DIMS;
    p->T = T, p->S = S, p->R = R, p->one_row = T <= 1 && R <= 1;
    int status = check(p, fault);
    if (status) return status;
    for (fl_instruction *ins = p->code; ins < p->code + p->n_code; ins++) {
        for (int i = 0; i < FL_OPERANDS; i++)
            if (ins->symbol[i]) ins->v[i].rows = resolve(p, ins->symbol[i], 0);
        if (ins->op == FL_OP_PREPARE) ins->acts.rows = (int32_t)ins->v[0].rows;
        if (ins->op == FL_OP_LINEAR) ins->acts.rows = ins->codes.rows = (int32_t)ins->v[1].rows;
        if (ins->op == FL_OP_ATTENTION) attention_resolve(p, ins);
        atomic_store_explicit(&ins->next, 0, memory_order_relaxed);
    }
    return fl_pool_run(p->pool, walk, p); /* FL_POOL_FORKED and FL_POOL_BUSY have the same numbers here */
}
