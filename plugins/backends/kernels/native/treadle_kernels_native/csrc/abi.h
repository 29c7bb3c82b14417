/* The structs that Python fills and the functions that it calls: the whole interface of the library.
 *
 * Every struct has only pointers, 64-bit and 32-bit numbers, in an order without padding, so that
 * structs.py mirrors it field by field. tn_abi() is checked when the library is loaded. Memory that is
 * pointed to belongs to the caller and must outlive the model.
 */
#ifndef TREADLE_NATIVE_ABI_H
#define TREADLE_NATIVE_ABI_H

#include <stdint.h>

#define TN_ABI 9
#define TN_EXPORT __attribute__((visibility("default")))
#define TN_MAX_TABLES 8

/* How the elements of a matrix are stored. */
enum { TN_F32 = 0, TN_BF16 = 1, TN_INT8 = 2, TN_INT4 = 3, TN_GROUPED_INT8 = 4, TN_GROUPED_FP8 = 5 };

/* Instruction sets: of every machine, of x86-64, of aarch64. Each includes those of its machine before it. */
enum { TN_GENERIC = 0, TN_AVX2 = 1, TN_AVX512 = 2, TN_AVX512_BF16 = 3, TN_AMX = 4, TN_DOTPROD = 5, TN_I8MM = 6 };

/* What the codes of a weight mean, if they are not numbers themselves. */
typedef struct {
    float numbers[16];     /* what each code stands for */
    int8_t multiples[16];  /* of the unit: what is nearest to it, for products of whole numbers */
    float unit;
} tn_levels;

/* y = x · weightᵀ + bias. The weight is [n, k], row by row as in a checkpoint.
 *
 * TN_INT4 has codes from -8 to 7, in two's complement, or from 0 to 15 where levels say what they mean, 128 of a row in
 * 64 bytes: the lower halves of the bytes are the first 64, the upper halves the others. `group` of them, a multiple of
 * 32, share a scale and an offset; of TN_GROUPED_INT8 and TN_GROUPED_FP8, which is float8_e4m3fn, a multiple of 16. */
typedef struct {
    const void *weight;
    const float *bias;    /* [n], or NULL */
    const float *scales;  /* TN_INT8: [n], others: [n, k / group]; weight = scale · code + offset */
    const float *offsets; /* the same, where codes have zero points; or NULL. Not of TN_INT8 */
    const void *sums;     /* [n], of a row: TN_INT8: int32, its codes; others: float, its codes times their scales, or NULL: x is not rounded */
    const int32_t *order; /* [k], of which feature of x an input is, if they are not in order; or NULL */
    const tn_levels *levels; /* of TN_INT4, or NULL; sums are then those of multiples of the unit */
    int64_t n, k;
    int64_t format;
    int64_t group; /* 0 of TN_INT8 */
} tn_linear;

typedef struct {
    const float *input_norm, *post_norm; /* [hidden] */
    const float *q_norm, *k_norm;        /* [head_size], or NULL */
    const float *cos, *sin;              /* [max_len, head_size / 2] */
    void *keys, *values;                 /* [pages, page_size, kv_heads, head_size] */
    tn_linear qkv, o, gate_up, down;
    double scale;   /* of the scores */
    int64_t window; /* tokens that a token sees, itself included; 0: all */
    int64_t table;  /* which page table */
} tn_layer;

typedef struct {
    const tn_layer *layers;
    const void *embedding;   /* [vocab, hidden], in the format of weights */
    const float *final_norm; /* [hidden] */
    tn_linear head;
    double eps;
    int64_t num_layers, hidden, heads, kv_heads, head_size, intermediate;
    int64_t embedding_format, cache_format, page_size;
} tn_model;

/* One step: rows that generate come first, with one token each, then pieces of prompts. */
typedef struct {
    const int32_t *slots, *starts, *counts; /* [rows]: slot, tokens in the cache, new tokens */
    const uint8_t *samples;                 /* [rows]: whether the row's last token has logits */
    const int64_t *prompt_ids;              /* of the rows after num_decodes, one after the other */
    int64_t *last_tokens;                   /* [slots]: the ids of rows that generate */
    const int32_t *tables[TN_MAX_TABLES];   /* [slots, columns] each */
    float *logits;                          /* [sampled rows, vocab] */
    int64_t columns, rows, num_decodes;
} tn_step;

typedef struct tn_engine tn_engine;

TN_EXPORT int64_t tn_abi(void);
/* The best instruction set of this machine; asks the system for the tiles of AMX. */
TN_EXPORT int64_t tn_best_isa(void);
/* Whether this machine has an instruction set. */
TN_EXPORT int64_t tn_has_isa(int64_t isa);
/* NULL if memory or threads are not to be had, or this machine lacks the instruction set. */
TN_EXPORT tn_engine *tn_create(const tn_model *model, int64_t threads, int64_t isa, int64_t pin);
/* Run a step. One call at a time. */
TN_EXPORT void tn_run(tn_engine *engine, const tn_step *step);
/* After a step all of whose rows have logits: the index of the largest of each, the lowest of equals, which becomes
 * the last token of its slot; -1 where one is NaN, and the last token becomes 0. result is [rows]. */
TN_EXPORT void tn_argmax(tn_engine *engine, const tn_step *step, int64_t *result);
/* One linear layer on x [m, k] in float, of up to 512 rows; y is [m, n]. One call at a time. */
TN_EXPORT void tn_multiply(tn_engine *engine, const tn_linear *linear, const float *x, int64_t m, float *y);
TN_EXPORT void tn_destroy(tn_engine *engine);
/* For tests: the innermost loops of an instruction set, or NULL if this machine lacks it. */
typedef struct tn_kernels tn_kernels;
TN_EXPORT const tn_kernels *tn_kernels_test(int64_t isa);
/* For tests: turn queries and keys, store keys and values, and attend. qkv is [tokens, (heads + 2 kv_heads) * head_size],
 * attended [tokens, heads * head_size]. */
TN_EXPORT void tn_attention_test(tn_engine *engine, const tn_layer *layer, const tn_step *step, const float *qkv, float *attended);

#endif
