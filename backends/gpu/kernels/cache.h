/* The key/value cache: blocks of BLOCK_TOKENS tokens, each | keys [K][DK][BLOCK_TOKENS] | values [K][BLOCK_TOKENS][DV] |, f16 or
 * f32 (CACHE_F16). Keys lie across tokens, so that neighbours score neighbouring tokens; values lie along the head, so that neighbours
 * sum neighbouring elements. */
#ifndef FASTLLM_CACHE_H
#define FASTLLM_CACHE_H
#if CACHE_F16
typedef half cache_t;
#define LOAD_CACHE(p) LOAD_HALFV(p)
#define LOAD_CACHE_ONE(p) vload_half(0, (p))
#define STORE_CACHE(v, p) vstore_half_rte((v), 0, (p))
#else
typedef float cache_t;
#define LOAD_CACHE(p) LOADV(p)
#define LOAD_CACHE_ONE(p) (*(p))
#define STORE_CACHE(v, p) (*(p) = (v))
#endif
/* Elements, from the start of a block. */
#define KEY_AT(head, d, token) (((head) * DK + (d)) * BLOCK_TOKENS + (token))
#define VALUE_AT(head, token, d) (KV_HEADS * DK * BLOCK_TOKENS + ((head) * BLOCK_TOKENS + (token)) * DV + (d))
#define FAULT_SLOT 2
#define FAULT_PAGE 3
#define FAULT_CONTEXT 4
#define FAULT_START 5 /* a token of no sequence */
#endif
