/* What the files of the library share. */
#ifndef TREADLE_NATIVE_INTERNAL_H
#define TREADLE_NATIVE_INTERNAL_H

#include <stdatomic.h>
#include <stddef.h>

#include "abi.h"

/* Loads of tiles are not known to read memory by some compilers: what was stored before must be there. */
#define TN_STORED() __asm__ volatile("" ::: "memory")

#define TN_INTERNAL __attribute__((visibility("hidden")))

typedef uint16_t bf16; /* the upper half of a float */

static inline float from_bf16(bf16 x) {
    union {
        uint32_t bits;
        float value;
    } u = {(uint32_t)x << 16};
    return u.value;
}

/* The innermost loops, for one instruction set. Sums of a result are in the same order whatever m and n
 * are, so that no row depends on the others. k and head sizes are multiples of 32. */
struct tn_kernels {
    /* y[m][n] = x[m] · w[n]; ld* are distances of rows in elements */
    void (*dot_f32)(const float *x, int64_t ldx, int64_t m, const float *w, int64_t ldw, int64_t n, int64_t k, float *y, int64_t ldy);
    void (*dot_f32_bf16)(const float *x, int64_t ldx, int64_t m, const bf16 *w, int64_t ldw, int64_t n, int64_t k, float *y, int64_t ldy);
    /* NULL where the machine has no product of two bf16: x stays in float then */
    void (*dot_bf16)(const bf16 *x, int64_t ldx, int64_t m, const bf16 *w, int64_t ldw, int64_t n, int64_t k, float *y, int64_t ldy);
    void (*dot_int8)(const uint8_t *x, int64_t ldx, int64_t m, const int8_t *w, int64_t ldw, int64_t n, int64_t k, int32_t *y, int64_t ldy);
    /* Codes of 4 bits in the layout of TN_INT4; ldw counts them too. scales [n, k / group], and so are the
     * offsets, or NULL; sums [m, k / group] of what x stands for, x - zero, are read if there are offsets */
    void (*dot_int4)(const uint8_t *x, int64_t ldx, int64_t m, const float *sums, const uint8_t *w, int64_t ldw, const float *scales, const float *offsets, const tn_levels *levels, int64_t group, int64_t n, int64_t k, float *y, int64_t ldy);
    /* The same of codes of 8 bits; group divides 64, or is a multiple of it */
    void (*dot_groups)(const uint8_t *x, int64_t ldx, int64_t m, const float *sums, const uint8_t *w, int64_t ldw, const float *scales, const float *offsets, int64_t group, int64_t n, int64_t k, float *y, int64_t ldy);
    /* A row of such codes, or of bytes, as y[k]: scale · code + offset, rounded to bf16 once */
    void (*unpack_int4)(const uint8_t *w, const float *scales, const float *offsets, const tn_levels *levels, int64_t group, int64_t k, bf16 *y);
    void (*unpack_int8)(const uint8_t *w, const float *scales, const float *offsets, int64_t group, int64_t k, bf16 *y);
    void (*unpack_fp8)(const uint8_t *w, const float *scales, const float *offsets, int64_t group, int64_t k, bf16 *y);
    /* o[m][d] = o[m][d] · keep[m] + sum over keys of p[m][key] · v[key][d] */
    void (*mix_f32)(const float *p, int64_t ldp, const float *keep, int64_t m, const float *v, int64_t ldv, int64_t keys, int64_t d, float *o);
    void (*mix_bf16)(const float *p, int64_t ldp, const float *keep, int64_t m, const bf16 *v, int64_t ldv, int64_t keys, int64_t d, float *o);
    /* In place; returns the largest. n is a multiple of 16 */
    float (*scale_max)(float *x, int64_t n, float scale);
    /* In place; returns the sum. x[i] = exp(x[i] - shift); n is a multiple of 16 */
    float (*exp_sum)(float *x, int64_t n, float shift);
    void (*rms_norm)(const float *x, const float *weight, float eps, int64_t n, float *y);
    void (*rotate)(float *x, const float *cos, const float *sin, int64_t half);
    void (*silu_mul)(const float *gate, const float *up, int64_t n, float *y);
    void (*to_bf16)(const float *x, int64_t n, bf16 *y);
    void (*to_f32)(const bf16 *x, int64_t n, float *y);
    /* y = round(x / scale) + zero; returns the scale */
    float (*to_uint8)(const float *x, int64_t n, uint8_t *y);
    /* The first index of the largest, -1 if there is a NaN */
    int64_t (*argmax)(const float *x, int64_t n);
    /* The code of activations that stands for 0: 128, or 0 where they are multiplied as signed bytes */
    int64_t zero;
};

TN_INTERNAL extern const tn_kernels tn_kernels_generic;
#if defined(__x86_64__)
TN_INTERNAL extern const tn_kernels tn_kernels_avx2, tn_kernels_avx512;
TN_INTERNAL void tn_dot_bf16_avx512(const bf16 *x, int64_t ldx, int64_t m, const bf16 *w, int64_t ldw, int64_t n, int64_t k, float *y, int64_t ldy);
TN_INTERNAL void tn_mix_bf16_avx512(const float *p, int64_t ldp, const float *keep, int64_t m, const bf16 *v, int64_t ldv, int64_t keys, int64_t d, float *o);
TN_INTERNAL void tn_dot_int8_vnni(const uint8_t *x, int64_t ldx, int64_t m, const int8_t *w, int64_t ldw, int64_t n, int64_t k, int32_t *y, int64_t ldy);
TN_INTERNAL void tn_dot_int4_vnni(const uint8_t *x, int64_t ldx, int64_t m, const float *sums, const uint8_t *w, int64_t ldw, const float *scales, const float *offsets, const tn_levels *levels, int64_t group, int64_t n, int64_t k, float *y, int64_t ldy);
TN_INTERNAL void tn_dot_groups_vnni(const uint8_t *x, int64_t ldx, int64_t m, const float *sums, const uint8_t *w, int64_t ldw, const float *scales, const float *offsets, int64_t group, int64_t n, int64_t k, float *y, int64_t ldy);
TN_INTERNAL void tn_unpack_int4_avx512(const uint8_t *w, const float *scales, const float *offsets, const tn_levels *levels, int64_t group, int64_t k, bf16 *y);
TN_INTERNAL void tn_unpack_int8_avx512(const uint8_t *w, const float *scales, const float *offsets, int64_t group, int64_t k, bf16 *y);
TN_INTERNAL void tn_unpack_fp8_avx512(const uint8_t *w, const float *scales, const float *offsets, int64_t group, int64_t k, bf16 *y);
#elif defined(__aarch64__)
TN_INTERNAL void tn_dot_bf16_neon(const bf16 *x, int64_t ldx, int64_t m, const bf16 *w, int64_t ldw, int64_t n, int64_t k, float *y, int64_t ldy);
TN_INTERNAL void tn_dot_int8_dotprod(const uint8_t *x, int64_t ldx, int64_t m, const int8_t *w, int64_t ldw, int64_t n, int64_t k, int32_t *y, int64_t ldy);
TN_INTERNAL void tn_dot_int8_i8mm(const uint8_t *x, int64_t ldx, int64_t m, const int8_t *w, int64_t ldw, int64_t n, int64_t k, int32_t *y, int64_t ldy);
TN_INTERNAL void tn_dot_int4_dotprod(const uint8_t *x, int64_t ldx, int64_t m, const float *sums, const uint8_t *w, int64_t ldw, const float *scales, const float *offsets, const tn_levels *levels, int64_t group, int64_t n, int64_t k, float *y, int64_t ldy);
TN_INTERNAL void tn_dot_groups_dotprod(const uint8_t *x, int64_t ldx, int64_t m, const float *sums, const uint8_t *w, int64_t ldw, const float *scales, const float *offsets, int64_t group, int64_t n, int64_t k, float *y, int64_t ldy);
TN_INTERNAL float tn_to_int8_neon(const float *x, int64_t n, uint8_t *y);
#endif

/* ------------------------------------------------------------------------------------- threads */

typedef struct tn_pool tn_pool;
typedef void (*tn_job)(void *context, int thread);

TN_INTERNAL tn_pool *tn_pool_create(int threads, int pin);
TN_INTERNAL void tn_pool_destroy(tn_pool *pool);
/* Run the job in every thread, the caller's being number 0, and return when all have. */
TN_INTERNAL void tn_pool_run(tn_pool *pool, tn_job job, void *context);
/* Within a job: wait for all threads. Work that was shared out with tn_next begins anew. */
TN_INTERNAL void tn_barrier(tn_pool *pool);
/* The next piece of work, 0, 1, …, each to one thread. */
TN_INTERNAL int64_t tn_next(tn_pool *pool);
TN_INTERNAL int tn_pool_threads(const tn_pool *pool);

/* Ask for large pages for the weights of a model. */
TN_INTERNAL void tn_use_large_pages(const tn_model *model);
/* Memory to be freed, on large pages where it fills them; rounds the bytes up. */
TN_INTERNAL void *tn_large_pages(size_t *bytes);

/* ------------------------------------------------------------------------------------- operands */

/* The left side of a linear layer, in the form that its kernel reads. */
enum { TN_ROWS_F32, TN_ROWS_BF16, TN_ROWS_UINT8, TN_TILES_BF16, TN_TILES_UINT8 };

typedef struct {
    int kind;
    int64_t k, room; /* room: rows that there is memory for */
    void *data;
    float *scales; /* [rows] of the kinds in 8 bits */
    float *sums;   /* [rows, k / group] of the numbers in 8 bits, without their scale */
    int64_t group; /* 0: nobody reads the sums */
} tn_operand;

/* ------------------------------------------------------------------------------------- the engine */

/* A piece of one sequence in a slab. */
typedef struct {
    int32_t slot, first, count; /* first: index of its first token in the slab */
    int64_t start;              /* position of that token */
    const int64_t *ids;         /* [count]; NULL: what the slot sampled last */
} tn_piece;

#define TN_SLAB 512 /* tokens that go through all layers together; scratch memory is for so many */
#define TN_KEY_BLOCK 64
#define TN_QUERIES 48 /* queries of one KV head that attention takes together */
#define TN_TILED_QUERIES 256 /* in tiles */
#define TN_UNPACKED 128 /* rows of a weight that are unpacked at a time, at most */
#define TN_PART 128 /* words of each of 32 rows of a weight, which stay in a third of the L1 cache: activations pass through the rest */
#define TN_PANELS 8 /* of 32 rows of a weight, whose results a thread has room for */

typedef struct {
    float *normed;   /* [16, the largest k] */
    float *ordered;  /* the same */
    float *columns;  /* results of one piece of a linear layer; with AMX [32 · TN_PANELS, TN_SLAB] */
    float *scores;   /* [TN_QUERIES, TN_KEY_BLOCK] */
    float *output;   /* [TN_QUERIES, head_size] */
    float *queries;  /* [TN_QUERIES, head_size] */
    bf16 *queries_bf16;
    struct tn_tiled_attention *tiled; /* of AMX */
    uint32_t *panel; /* of AMX: [32, TN_PART] of a weight, a tile after the other */
    bf16 *unpacked;  /* TN_UNPACKED rows of a weight */
    tn_operand few; /* of steps of one block of tokens, for which each thread makes its own */
} tn_thread;

struct tn_engine {
    tn_model model;
    tn_kernels kernels;
    tn_pool *pool;
    int isa, threads;
    tn_thread *thread;
    void *memory;
    size_t bytes;
    float *residual, *qkv, *attended; /* [TN_SLAB, …] */
    float *gate_up, *gated;           /* [TN_SLAB, …], of layers that gate first */
    tn_operand operand;               /* shared */
    tn_operand activated;             /* what gate and up make */
    tn_piece *pieces;                 /* [TN_SLAB] */
    int32_t *sampled;                 /* [TN_SLAB] */
};

/* Whether the kernels of a weight read activations in 8 bits. */
static inline int tn_takes_uint8(const tn_linear *linear) { return linear->format >= TN_INT8 && linear->sums != NULL && (linear->format == TN_INT8 || linear->group % 64 == 0 || 64 % linear->group == 0); }
static inline int64_t tn_weight_bits(const tn_linear *linear) { return linear->format == TN_F32 ? 32 : linear->format == TN_BF16 ? 16 : linear->format == TN_INT4 ? 4 : 8; }
static inline const float *tn_offsets_from(const float *offsets, int64_t index) { return offsets == NULL ? NULL : offsets + index; }
/* Whether what gate and up make is complete before down reads it: the scale of a row in 8 bits needs all of it, so does
 * another order, and tn_gated_run unpacks nothing. */
static inline int tn_gates_first(const tn_layer *layer) { return tn_takes_uint8(&layer->down) || layer->down.order != NULL || layer->gate_up.format >= TN_INT4; }
/* Whether a weight is unpacked for all rows of the operand, which are not in 8 bits then. */
static inline int tn_is_unpacked(const tn_linear *linear, const tn_operand *x) { return linear->format >= TN_INT4 && x->kind != TN_ROWS_UINT8; }
TN_INTERNAL int tn_operand_kind(const tn_engine *engine, const tn_linear *linear, int64_t m);
/* Rows [first, first + count) of x, count ≤ 16, into the operand; first is a multiple of 16. */
TN_INTERNAL void tn_operand_fill(const tn_engine *engine, tn_operand *operand, const float *x, int64_t ldx, int64_t first, int64_t count);

/* All threads call this. add: y += the product. */
TN_INTERNAL void tn_linear_run(tn_engine *engine, int thread, const tn_linear *linear, const tn_operand *x, int64_t m, float *y, int64_t ldy, int add);
/* Whether tn_heads_run can make queries, keys and values of x. */
TN_INTERNAL int tn_makes_heads(const tn_engine *engine, const tn_linear *linear, const tn_operand *x);
/* Queries, keys and values, normalised, turned and stored before they leave the cache of the thread. */
TN_INTERNAL void tn_heads_run(tn_engine *engine, int thread, const tn_layer *layer, const tn_step *step, const tn_operand *x, int64_t m);
/* silu(x · gateᵀ) · (x · upᵀ) into y, whose kind and k the caller has set. */
TN_INTERNAL void tn_gated_run(tn_engine *engine, int thread, const tn_linear *linear, const tn_operand *x, int64_t m, tn_operand *y);

#if defined(__x86_64__)
TN_INTERNAL void tn_amx_begin(void);
TN_INTERNAL void tn_amx_end(void);
/* Columns [n0, n0 + 32 · panels) of the product for blocks of 16 rows, transposed: result[panel][m block][32][16]. */
TN_INTERNAL void tn_amx_product(const tn_linear *linear, int64_t n0, int64_t panels, const tn_operand *x, int64_t blocks, uint32_t *panel, float *result);
/* Attention of prompts in tiles: see attention_amx.c. */
TN_INTERNAL int tn_attends_in_tiles(const tn_engine *engine);
TN_INTERNAL int64_t tn_tiled_attention_bytes(const tn_model *model);
TN_INTERNAL void tn_tiled_attention(tn_engine *engine, int thread, const tn_layer *layer, const int32_t *pages, int64_t kv_head, int64_t token, int64_t count, int64_t position);
TN_INTERNAL void tn_transpose16(const float *x, int64_t ldx, float *y, int64_t ldy, int add);
TN_INTERNAL void tn_pack_pairs(const uint32_t *rows, int64_t ld, int64_t count, int64_t words, uint32_t *tiles);
TN_INTERNAL void tn_interleave_bf16(const float *even, const float *odd, bf16 *y);
#endif

TN_INTERNAL void tn_attention_run(tn_engine *engine, int thread, const tn_layer *layer, const tn_step *step, const tn_piece *pieces, int64_t count, int alone);
TN_INTERNAL void tn_rope_token(tn_engine *engine, const tn_layer *layer, const tn_step *step, const tn_piece *piece, int64_t offset, int64_t kv_head);
/* One head of a token, d numbers which this call changes: of a query, from heads on of a key, behind them of a value. */
TN_INTERNAL void tn_rope_head(tn_engine *engine, const tn_layer *layer, const tn_step *step, const tn_piece *piece, int64_t offset, int64_t head, float *x);

#endif
