/* Sizes of the key/value cache and of the attention kernel's scratch: what the planner needs before anything runs. */
#include "kernels.h"

int64_t fl_cache_block_bytes(const fl_cache *c) {
    /* the kernels read whole vectors: up to fifteen elements, or pairs, behind the last one, which this padding holds */
    return (fl_head_bytes(c) * c->heads + 30 * fl_element_bytes(c->dtype) + 63) / 64 * 64;
}

int64_t fl_attention_scratch(int32_t key_dim, int32_t value_dim) {
    int64_t width = ((int64_t)value_dim + 15) / 16 * 16, row = FL_SUB + 16,
            scales = fl_kv_groups(key_dim) + fl_kv_groups(value_dim);
    /* scores, sums twice, one step of keys and of values, their scales; queries and weights as bf16 */
    int64_t halves = FL_TILE * (fl_even(key_dim) + FL_SUB) / 2;
    return (FL_TILE * (row + 2 * width) + fl_even(key_dim) * row + FL_SUB * width + scales * row + halves + 64) *
           (int64_t)sizeof(float);
}
