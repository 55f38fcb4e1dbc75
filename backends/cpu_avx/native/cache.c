/* Sizes of the key/value cache and of the attention kernel's scratch: what the planner needs before anything runs. */
#include "kernels.h"

int64_t fl_cache_block_bytes(const fl_cache *c) {
    int64_t element = c->dtype == FL_DT_F16 ? 2 : 4;
    int64_t tokens = c->value_dim ? (c->block_size + 7) / 8 * 8 : c->block_size;
    int64_t head = (int64_t)c->key_dim * tokens + (int64_t)c->value_dim * c->block_size;
    /* the kernels read whole vectors: up to seven elements behind the last one, which this padding holds */
    return (head * c->heads * element + 32 + 63) / 64 * 64;
}

int64_t fl_attention_scratch(int32_t key_dim, int32_t value_dim) {
    int64_t width = (value_dim + 15) / 16 * 16, row = FL_SUB + 8;
    return (FL_TILE * (row + 2 * width) + key_dim * row + FL_SUB * width + 64) * (int64_t)sizeof(float);
}
