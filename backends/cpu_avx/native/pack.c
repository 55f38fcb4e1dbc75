/* Packing: file bytes of a weight -> strips (layouts.h), losslessly; and back, for packed files that another backend runs.
 *
 * Strips are independent, so a caller may pack any range of them, in any order and on any thread, with only the file rows of that
 * range in memory. Callers (_native_linear.pxi) check the lengths of both buffers against fl_source_bytes and fl_packed_bytes.
 */
#include "layouts.h"

int fl_layout_id(const char *name) {
    for (int i = 0; i < FL_LAYOUTS; i++)
        if (strcmp(name, FL_LAYOUT[i].name) == 0) return i;
    return -1;
}

const char *fl_layout_name(int layout) { return layout < 0 || layout >= FL_LAYOUTS ? NULL : FL_LAYOUT[layout].name; }

/* Shapes that can be packed: whole blocks, and sizes whose bytes stay far from overflow. */
static const fl_layout *checked(int layout, int64_t N, int64_t K) {
    if (layout < 0 || layout >= FL_LAYOUTS || N <= 0 || K <= 0 || N > INT32_MAX - FL_STRIP || K > 1 << 24) return NULL;
    return K % FL_LAYOUT[layout].block ? NULL : &FL_LAYOUT[layout];
}

size_t fl_packed_bytes(int layout, int64_t N, int64_t K) {
    const fl_layout *L = checked(layout, N, K);
    return L ? (size_t)((N + FL_STRIP - 1) / FL_STRIP) * fl_strip_bytes(L, K) : 0;
}

size_t fl_source_bytes(int layout, int64_t N, int64_t K) {
    const fl_layout *L = checked(layout, N, K);
    return L ? (size_t)N * (size_t)(K / L->block) * (size_t)L->block_bytes : 0;
}

int fl_prepare_kind(int layout, int exact, int bf16) {
    if (layout == FL_BF16 && bf16 && !exact) return FL_KIND_BF16;
    return exact || layout >= FL_BLOCK_LAYOUTS ? FL_KIND_F32 : FL_KIND_INT8;
}

size_t fl_linear_scratch(void) { return FL_LINEAR_SCRATCH; }

size_t fl_prepared_bytes(int kind, int64_t rows, int64_t K) {
    if (rows <= 0 || K <= 0) return 0;
    if (kind == FL_KIND_F32) return (size_t)rows * fl_float_stride(K) * 4;
    if (kind == FL_KIND_BF16) return (size_t)rows * fl_bf16_stride(K) * 2;
    return (size_t)rows * (fl_code_stride(K) + fl_group_stride(K) * sizeof(fl_group));
}

/* One block of one row, taken apart: codes one byte each, scale bytes by tile as the layout stores them. */
typedef struct {
    uint8_t d[2], m[2];
    uint8_t scales[8][2]; /* [tile][line] */
    uint8_t q[256];
} block_parts;

static void nibbles(const uint8_t *in, uint8_t *q) {
    for (int i = 0; i < 16; i++) q[i] = in[i] & 15, q[i + 16] = in[i] >> 4;
}

static void fifth_bits(const uint8_t *bits, uint8_t *q) {
    for (int i = 0; i < 32; i++) q[i] |= (bits[i / 8] >> i % 8 & 1) << 4;
}

/* The eight 6-bit scales and minima of q4_k and q5_k: j < 4 in the low 6 bits of bytes j and j + 4, the others spread. */
static void scales_k(const uint8_t *in, block_parts *out) {
    for (int j = 0; j < 4; j++) out->scales[j][0] = in[j] & 63, out->scales[j][1] = in[j + 4] & 63;
    for (int j = 4; j < 8; j++) {
        out->scales[j][0] = (in[j + 4] & 15) | in[j - 4] >> 6 << 4;
        out->scales[j][1] = in[j + 4] >> 4 | in[j] >> 6 << 4;
    }
}

static void read_block(int layout, const uint8_t *in, block_parts *out) {
    uint8_t *q = out->q;
    const uint8_t *d = in, *m = in + 2;
    switch (layout) {
    case FL_Q4_0:
    case FL_IQ4_NL:
        nibbles(in + 2, q);
        break;
    case FL_Q4_1:
        nibbles(in + 4, q);
        break;
    case FL_Q5_0:
        nibbles(in + 6, q), fifth_bits(in + 2, q);
        break;
    case FL_Q5_1:
        nibbles(in + 8, q), fifth_bits(in + 4, q);
        break;
    case FL_Q8_0:
        memcpy(q, in + 2, 32);
        break;
    case FL_MXFP4:
        nibbles(in + 1, q);
        break;
    case FL_INT4G32: /* d, zero, 16 nibble bytes for each 32 */
    case FL_INT4G64:
    case FL_INT4G128:
    case FL_INT4G256:
        for (int i = 0; i < FL_LAYOUT[layout].block / 32; i++) nibbles(in + 3 + 16 * i, q + 32 * i);
        break;
    case FL_INT4G64S: /* d, 16 nibble bytes for each 32 */
    case FL_INT4G128S:
    case FL_INT4G256S:
        for (int i = 0; i < FL_LAYOUT[layout].block / 32; i++) nibbles(in + 2 + 16 * i, q + 32 * i);
        break;
    case FL_INT8G64:
    case FL_INT8G128:
        memcpy(q, in + 2, (size_t)FL_LAYOUT[layout].block);
        break;
    case FL_Q2_K: /* 16 (scale | minimum << 4), 64 crumbs, d, m */
        for (int i = 0; i < 16; i++) out->scales[i / 2][i % 2] = in[i];
        for (int i = 0; i < 256; i++) q[i] = in[16 + 32 * (i / 128) + i % 32] >> 2 * (i % 128 / 32) & 3;
        d = in + 80, m = in + 82;
        break;
    case FL_Q3_K: /* 32 high bits, 64 crumbs, 12 bytes of 6-bit scales, d */
        for (int i = 0; i < 16; i++) {
            const int low = in[96 + i % 8] >> 4 * (i / 8) & 15, top = in[104 + i % 4] >> 2 * (i / 4) & 3;
            out->scales[i / 2][i % 2] = (uint8_t)((low | top << 4) - 32);
        }
        for (int i = 0; i < 256; i++)
            q[i] = (in[32 + 32 * (i / 128) + i % 32] >> 2 * (i % 128 / 32) & 3) | (in[i % 32] >> i / 32 & 1) << 2;
        d = in + 108;
        break;
    case FL_Q4_K:
    case FL_Q5_K: { /* d, m, 12 bytes of scales, (32 fifth bits,) 128 nibbles */
        const uint8_t *low = in + (layout == FL_Q4_K ? 16 : 48);
        scales_k(in + 4, out);
        for (int i = 0; i < 256; i++) q[i] = low[32 * (i / 64) + i % 32] >> 4 * (i % 64 / 32) & 15;
        if (layout == FL_Q5_K)
            for (int i = 0; i < 256; i++) q[i] |= (in[16 + i % 32] >> i / 32 & 1) << 4;
        break;
    }
    case FL_Q6_K: /* 128 low nibbles, 64 top crumbs, 16 signed scales, d */
        for (int i = 0; i < 16; i++) out->scales[i / 2][i % 2] = in[192 + i];
        for (int i = 0; i < 256; i++) {
            const int half = i / 128, quarter = i % 128 / 32, t = i % 32;
            q[i] = (in[64 * half + 32 * (quarter & 1) + t] >> 4 * (quarter >> 1) & 15) |
                   (in[128 + 32 * half + t] >> 2 * quarter & 3) << 4;
        }
        d = in + 208;
        break;
    default: /* FL_IQ4_XS: d, u16 of top crumbs, 4 bytes of low nibbles, 128 nibbles */
        for (int j = 0; j < 8; j++) {
            const int s = (in[4 + j / 2] >> 4 * (j % 2) & 15) | (fl_u16(in + 2) >> 2 * j & 3) << 4;
            out->scales[j][0] = (uint8_t)(s - 32);
            nibbles(in + 8 + 16 * j, q + 32 * j);
        }
        break;
    }
    memcpy(out->d, d, 2), memcpy(out->m, m, 2);
}

/* 32 codes of row r into the planes of a tile. x[j]: the four codes of step j in the bytes of a word. */
static void write_codes(const fl_layout *L, const uint8_t *q, int r, uint8_t *tile) {
    uint32_t x[8], word;
    uint8_t *low = tile + fl_low_at(L) + 4 * r, *high = tile + fl_high_at(L) + 4 * r;
    memcpy(x, q, 32);
    if (L->low == 8)
        for (int j = 0; j < 8; j++) memcpy(low + FL_LINE * j, &x[j], 4);
    if (L->low == 4)
        for (int j = 0; j < 4; j++) {
            word = (x[2 * j] & 0x0f0f0f0f) | (x[2 * j + 1] & 0x0f0f0f0f) << 4;
            memcpy(low + FL_LINE * j, &word, 4);
        }
    if (L->low == 2)
        for (int j = 0; j < 2; j++) {
            word = 0;
            for (int c = 0; c < 4; c++) word |= (x[4 * j + c] & 0x03030303) << 2 * c;
            memcpy(low + FL_LINE * j, &word, 4);
        }
    if (L->high == 1) {
        word = 0;
        for (int j = 0; j < 8; j++) word |= (x[j] >> L->low & 0x01010101) << j;
        memcpy(high, &word, 4);
    }
    if (L->high == 2)
        for (int j = 0; j < 2; j++) {
            word = 0;
            for (int c = 0; c < 4; c++) word |= (x[4 * j + c] >> L->low & 0x03030303) << 2 * c;
            memcpy(high + FL_LINE * j, &word, 4);
        }
}

static void pack_blocks(int layout, int rows, int64_t K, const uint8_t *src, uint8_t *dst) {
    const fl_layout *L = &FL_LAYOUT[layout];
    const int64_t blocks = K / L->block;
    const size_t packed = fl_block_packed(L), tile_bytes = (size_t)fl_tile_bytes(L);
    block_parts parts;
    for (int64_t b = 0; b < blocks; b++)
        for (int r = 0; r < rows; r++) {
            const uint8_t *in = src + ((size_t)r * (size_t)blocks + (size_t)b) * (size_t)L->block_bytes;
            uint8_t *head = dst + (size_t)b * packed, *tile = head + L->head;
            read_block(layout, in, &parts);
            if (L->scale == FL_SCALE_EXP) head[r] = in[0];
            else
                memcpy(head + 2 * r, parts.d, 2);
            if (L->scale == FL_SCALE_ZERO) head[64 + r] = in[2];
            else if (L->minimum)
                memcpy(head + 64 + 2 * r, parts.m, 2);
            for (int t = 0; t < L->block / FL_TILE_K; t++, tile += tile_bytes) {
                for (int l = 0; l < L->lines; l++) tile[FL_STRIP * l + r] = parts.scales[t][l];
                write_codes(L, parts.q + FL_TILE_K * t, r, tile);
            }
        }
}

/* The transpose of up to 32 rows of plain values, 16 k at a time. */
static void pack_plain(int size, int rows, int64_t K, const uint8_t *src, uint8_t *dst) {
    for (int64_t k0 = 0; k0 < K; k0 += 16)
        for (int r = 0; r < rows; r++)
            for (int64_t k = k0; k < K && k < k0 + 16; k++) {
                const uint8_t *in = src + ((size_t)r * (size_t)K + (size_t)k) * (size_t)size;
                uint8_t *out = dst + ((size_t)k * FL_STRIP + (size_t)r) * (size_t)size;
                if (size == 4) memcpy(out, in, 4);
                else
                    memcpy(out, in, 2);
            }
}

int fl_pack_strips(int layout, int64_t N, int64_t K, int64_t strip0, int64_t strip1, const uint8_t *src, uint8_t *dst) {
    const fl_layout *L = checked(layout, N, K);
    if (!L || !src || !dst || strip0 < 0 || strip1 < strip0 || strip1 > (N + FL_STRIP - 1) / FL_STRIP) return -1;
    const size_t strip = fl_strip_bytes(L, K), row = (size_t)(K / L->block) * (size_t)L->block_bytes;
    for (int64_t s = strip0; s < strip1; s++) {
        const int rows = N - s * FL_STRIP < FL_STRIP ? (int)(N - s * FL_STRIP) : FL_STRIP;
        const uint8_t *in = src + (size_t)(s - strip0) * FL_STRIP * row;
        uint8_t *out = dst + (size_t)(s - strip0) * strip;
        if (rows < FL_STRIP) memset(out, 0, strip);
        if (L->block == 1) pack_plain(L->block_bytes, rows, K, in, out);
        else
            pack_blocks(layout, rows, K, in, out);
    }
    return 0;
}

int fl_pack(int layout, int64_t N, int64_t K, const uint8_t *src, uint8_t *dst) {
    return fl_pack_strips(layout, N, K, 0, (N + FL_STRIP - 1) / FL_STRIP, src, dst);
}

/* ---- back --------------------------------------------------------------------------------------------------------------- */

/* 32 codes of row r out of the planes of a tile: the inverse of write_codes. */
static void read_codes(const fl_layout *L, const uint8_t *tile, int r, uint8_t *q) {
    const uint8_t *low = tile + fl_low_at(L) + 4 * r, *high = tile + fl_high_at(L) + 4 * r;
    for (int k = 0; k < FL_TILE_K; k++) {
        const int step = k / 4, i = k % 4;
        int code = L->low == 8   ? low[FL_LINE * step + i]
                   : L->low == 4 ? low[FL_LINE * (step / 2) + i] >> 4 * (step % 2) & 15
                                 : low[FL_LINE * (step / 4) + i] >> 2 * (step % 4) & 3;
        if (L->high == 1) code |= (high[i] >> step & 1) << L->low;
        if (L->high == 2) code |= (high[FL_LINE * (step / 4) + i] >> 2 * (step % 4) & 3) << L->low;
        q[k] = (uint8_t)code;
    }
}

static void put_nibbles(const uint8_t *q, uint8_t *out) {
    for (int i = 0; i < 16; i++) out[i] = (uint8_t)((q[i] & 15) | (q[i + 16] & 15) << 4);
}

static void put_fifth_bits(const uint8_t *q, uint8_t *bits) {
    for (int i = 0; i < 32; i++) bits[i / 8] |= (uint8_t)((q[i] >> 4 & 1) << i % 8);
}

static void put_scales_k(const block_parts *in, uint8_t *out) {
    for (int j = 0; j < 4; j++) {
        out[j] = (uint8_t)((in->scales[j][0] & 63) | in->scales[j + 4][0] >> 4 << 6);
        out[j + 4] = (uint8_t)((in->scales[j][1] & 63) | in->scales[j + 4][1] >> 4 << 6);
        out[j + 8] = (uint8_t)((in->scales[j + 4][0] & 15) | (in->scales[j + 4][1] & 15) << 4);
    }
}

/* One block of a row from its parts: the inverse of read_block. out is zeroed. */
static void write_block(int layout, const block_parts *in, uint8_t *out) {
    const uint8_t *q = in->q;
    uint8_t *d = out, *m = NULL;
    switch (layout) {
    case FL_Q4_0:
    case FL_IQ4_NL:
        put_nibbles(q, out + 2);
        break;
    case FL_Q4_1:
        m = out + 2, put_nibbles(q, out + 4);
        break;
    case FL_Q5_0:
        put_nibbles(q, out + 6), put_fifth_bits(q, out + 2);
        break;
    case FL_Q5_1:
        m = out + 2, put_nibbles(q, out + 8), put_fifth_bits(q, out + 4);
        break;
    case FL_Q8_0:
    case FL_INT8G64:
    case FL_INT8G128:
        memcpy(out + 2, q, (size_t)FL_LAYOUT[layout].block);
        break;
    case FL_MXFP4:
        out[0] = in->d[0], d = NULL, put_nibbles(q, out + 1);
        break;
    case FL_INT4G32:
    case FL_INT4G64:
    case FL_INT4G128:
    case FL_INT4G256:
        out[2] = in->m[0];
        for (int i = 0; i < FL_LAYOUT[layout].block / 32; i++) put_nibbles(q + 32 * i, out + 3 + 16 * i);
        break;
    case FL_INT4G64S:
    case FL_INT4G128S:
    case FL_INT4G256S:
        for (int i = 0; i < FL_LAYOUT[layout].block / 32; i++) put_nibbles(q + 32 * i, out + 2 + 16 * i);
        break;
    case FL_Q2_K:
        for (int i = 0; i < 16; i++) out[i] = in->scales[i / 2][i % 2];
        for (int i = 0; i < 256; i++) out[16 + 32 * (i / 128) + i % 32] |= (uint8_t)(q[i] << 2 * (i % 128 / 32));
        d = out + 80, m = out + 82;
        break;
    case FL_Q3_K:
        for (int i = 0; i < 16; i++) {
            const int s = (uint8_t)(in->scales[i / 2][i % 2] + 32);
            out[96 + i % 8] |= (uint8_t)((s & 15) << 4 * (i / 8));
            out[104 + i % 4] |= (uint8_t)((s >> 4 & 3) << 2 * (i / 4));
        }
        for (int i = 0; i < 256; i++) {
            out[32 + 32 * (i / 128) + i % 32] |= (uint8_t)((q[i] & 3) << 2 * (i % 128 / 32));
            out[i % 32] |= (uint8_t)((q[i] >> 2 & 1) << i / 32);
        }
        d = out + 108;
        break;
    case FL_Q4_K:
    case FL_Q5_K: {
        uint8_t *low = out + (layout == FL_Q4_K ? 16 : 48);
        m = out + 2;
        put_scales_k(in, out + 4);
        for (int i = 0; i < 256; i++) low[32 * (i / 64) + i % 32] |= (uint8_t)((q[i] & 15) << 4 * (i % 64 / 32));
        if (layout == FL_Q5_K)
            for (int i = 0; i < 256; i++) out[16 + i % 32] |= (uint8_t)((q[i] >> 4 & 1) << i / 32);
        break;
    }
    case FL_Q6_K:
        for (int i = 0; i < 16; i++) out[192 + i] = in->scales[i / 2][i % 2];
        for (int i = 0; i < 256; i++) {
            const int half = i / 128, quarter = i % 128 / 32, t = i % 32;
            out[64 * half + 32 * (quarter & 1) + t] |= (uint8_t)((q[i] & 15) << 4 * (quarter >> 1));
            out[128 + 32 * half + t] |= (uint8_t)((q[i] >> 4 & 3) << 2 * quarter);
        }
        d = out + 208;
        break;
    default: /* FL_IQ4_XS */
        for (int j = 0; j < 8; j++) {
            const int s = (uint8_t)(in->scales[j][0] + 32);
            out[2 + j / 4] |= (uint8_t)((s >> 4 & 3) << 2 * (j % 4));
            out[4 + j / 2] |= (uint8_t)((s & 15) << 4 * (j % 2));
            put_nibbles(q + 32 * j, out + 8 + 16 * j);
        }
        break;
    }
    if (d) memcpy(d, in->d, 2);
    if (m) memcpy(m, in->m, 2);
}

static void unpack_blocks(int layout, int rows, int64_t K, const uint8_t *src, uint8_t *dst) {
    const fl_layout *L = &FL_LAYOUT[layout];
    const int64_t blocks = K / L->block;
    const size_t packed = fl_block_packed(L), tile_bytes = (size_t)fl_tile_bytes(L);
    block_parts parts;
    for (int64_t b = 0; b < blocks; b++)
        for (int r = 0; r < rows; r++) {
            uint8_t *out = dst + ((size_t)r * (size_t)blocks + (size_t)b) * (size_t)L->block_bytes;
            const uint8_t *head = src + (size_t)b * packed, *tile = head + L->head;
            if (L->scale == FL_SCALE_EXP) parts.d[0] = head[r];
            else
                memcpy(parts.d, head + 2 * r, 2);
            if (L->scale == FL_SCALE_ZERO) parts.m[0] = head[64 + r];
            else if (L->minimum)
                memcpy(parts.m, head + 64 + 2 * r, 2);
            for (int t = 0; t < L->block / FL_TILE_K; t++, tile += tile_bytes) {
                for (int l = 0; l < L->lines; l++) parts.scales[t][l] = tile[FL_STRIP * l + r];
                read_codes(L, tile, r, parts.q + FL_TILE_K * t);
            }
            memset(out, 0, (size_t)L->block_bytes);
            write_block(layout, &parts, out);
        }
}

int fl_unpack(int layout, int64_t N, int64_t K, const uint8_t *src, uint8_t *dst) {
    const fl_layout *L = checked(layout, N, K);
    if (!L || !src || !dst) return -1;
    const size_t strip = fl_strip_bytes(L, K), row = (size_t)(K / L->block) * (size_t)L->block_bytes;
    for (int64_t s = 0; s < (N + FL_STRIP - 1) / FL_STRIP; s++) {
        const int rows = N - s * FL_STRIP < FL_STRIP ? (int)(N - s * FL_STRIP) : FL_STRIP;
        const uint8_t *in = src + (size_t)s * strip;
        uint8_t *out = dst + (size_t)s * FL_STRIP * row;
        if (L->block > 1) unpack_blocks(layout, rows, K, in, out);
        else
            for (int r = 0; r < rows; r++)
                for (int64_t k = 0; k < K; k++) {
                    const size_t size = (size_t)L->block_bytes, at = ((size_t)k * FL_STRIP + (size_t)r) * size;
                    memcpy(out + ((size_t)r * (size_t)K + (size_t)k) * size, in + at, size);
                }
    }
    return 0;
}
