/* Declarations of the kernels of elementwise.c, rows.c, attention.c, kv_write.c, moe.c and recurrent.c, for the table of their variant. */
#ifndef FL_OPS_H
#define FL_OPS_H
#include "../kernels.h"

void FL_NAME(fl_embed)(const int32_t *ids, const fl_view *table, const fl_view *out, int64_t i0, int64_t i1);
void FL_NAME(fl_rms_norm)(const fl_view *x, const float *weight, float eps, const fl_view *out, int64_t i0, int64_t i1);
void FL_NAME(fl_layer_norm)(const fl_view *x, const float *weight, const float *bias, float eps, const fl_view *out, int64_t i0,
                            int64_t i1);
void FL_NAME(fl_rope)(const fl_view *x, const float *table, int32_t r, int32_t pairs, const fl_view *out, int64_t i0,
                      int64_t i1);
void FL_NAME(fl_act_mul)(int32_t kind, const fl_view *gate, const fl_view *up, const fl_view *out, int64_t i0, int64_t i1,
                         int32_t c0, int32_t c1);
void FL_NAME(fl_add)(const fl_view *x, const fl_view *y, int32_t shape, const fl_view *out, int64_t i0, int64_t i1);
void FL_NAME(fl_mul)(const fl_view *x, const fl_view *y, int32_t shape, const fl_view *out, int64_t i0, int64_t i1);
void FL_NAME(fl_softmax)(const fl_view *x, const fl_view *out, int64_t i0, int64_t i1);
void FL_NAME(fl_softcap)(const fl_view *x, float cap, const fl_view *out, int64_t i0, int64_t i1);
void FL_NAME(fl_matmul)(const fl_view *a, const fl_view *b, const fl_view *out, int64_t i0, int64_t i1);
void FL_NAME(fl_quantize)(const fl_view *x, int32_t group, const fl_view *codes, const fl_view *scales, int64_t i0, int64_t i1);
void FL_NAME(fl_dequantize)(const fl_view *codes, const fl_view *scales, int32_t group, const fl_view *out, int64_t i0,
                            int64_t i1);
void FL_NAME(fl_route_topk)(const fl_route *r, const fl_view *logits, const float *bias, const fl_view *ids,
                            const fl_view *weights, int64_t i0, int64_t i1, void *scratch);
void FL_NAME(fl_add_weighted)(float *out, const float *y, float weight, int32_t n);
void FL_NAME(fl_kv_write)(const fl_cache *cache, const fl_view *key, const fl_view *value, const int32_t *slots, int64_t i0,
                          int64_t i1);
void FL_NAME(fl_attention_unit)(const fl_attention *a, int64_t sequence, int32_t head, int32_t count, int32_t head0,
                                int64_t row0, int64_t row1, int64_t range0, int64_t range1, void *scratch);
void FL_NAME(fl_attention_merge)(const fl_attention *a, int64_t sequence, int64_t row, int32_t query_head);
void FL_NAME(fl_short_conv)(const fl_conv *a, int32_t c0, int32_t c1);
void FL_NAME(fl_delta_rule)(const fl_delta *d, int64_t sequence, int32_t head, int32_t column, void *scratch);

#endif
