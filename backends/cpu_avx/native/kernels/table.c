/* The table of one variant: everything that the interpreter (program.c) calls. */
#include "ops.h"
#include "vec.h"

extern const fl_linear_ops FL_NAME(fl_linear_table);

#define FL_STRING2(x) #x
#define FL_STRING(x) FL_STRING2(x)

const fl_kernels FL_NAME(fl_kernels) = {
    .name = FL_STRING(FL_VARIANT),
    .linear = &FL_NAME(fl_linear_table),
    .pairs = FL_WIDE == 16, /* as attention_pairs.c; in emulation only the linear kernels are that wide */
    .embed = FL_NAME(fl_embed),
    .rms_norm = FL_NAME(fl_rms_norm),
    .layer_norm = FL_NAME(fl_layer_norm),
    .rope = FL_NAME(fl_rope),
    .kv_write = FL_NAME(fl_kv_write),
    .attention = FL_NAME(fl_attention_unit),
    .attention_merge = FL_NAME(fl_attention_merge),
    .act_mul = FL_NAME(fl_act_mul),
    .add = FL_NAME(fl_add),
    .mul = FL_NAME(fl_mul),
    .softmax = FL_NAME(fl_softmax),
    .softcap = FL_NAME(fl_softcap),
    .matmul = FL_NAME(fl_matmul),
    .quantize = FL_NAME(fl_quantize),
    .dequantize = FL_NAME(fl_dequantize),
    .route_topk = FL_NAME(fl_route_topk),
    .add_weighted = FL_NAME(fl_add_weighted),
    .short_conv = FL_NAME(fl_short_conv),
    .delta_rule = FL_NAME(fl_delta_rule),
};
