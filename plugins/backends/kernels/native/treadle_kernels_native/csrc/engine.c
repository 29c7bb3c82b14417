/* A model with its threads and its memory. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "internal.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define FORBID(at, bytes) ASAN_POISON_MEMORY_REGION(at, bytes)
#define ALLOW(at, bytes) ASAN_UNPOISON_MEMORY_REGION(at, bytes)
#else
#define FORBID(at, bytes) ((void)(at), (void)(bytes))
#define ALLOW(at, bytes) ((void)(at), (void)(bytes))
#endif

static int64_t largest(int64_t a, int64_t b) { return a > b ? a : b; }

static tn_kernels kernels_for(int64_t isa) {
    tn_kernels kernels = tn_kernels_generic;
#if defined(__x86_64__)
    if (isa >= TN_AVX2) kernels = tn_kernels_avx2;
    if (isa >= TN_AVX512) kernels = tn_kernels_avx512;
    if (isa >= TN_AVX512_BF16) kernels.dot_bf16 = tn_dot_bf16_avx512, kernels.mix_bf16 = tn_mix_bf16_avx512, kernels.dot_int8 = tn_dot_int8_vnni, kernels.dot_int4 = tn_dot_int4_vnni, kernels.dot_groups = tn_dot_groups_vnni, kernels.unpack_int4 = tn_unpack_int4_avx512, kernels.unpack_int8 = tn_unpack_int8_avx512, kernels.unpack_fp8 = tn_unpack_fp8_avx512;
#elif defined(__aarch64__)
    if (isa >= TN_DOTPROD) kernels.to_uint8 = tn_to_int8_neon, kernels.zero = 0, kernels.dot_int8 = tn_dot_int8_dotprod, kernels.dot_int4 = tn_dot_int4_dotprod, kernels.dot_groups = tn_dot_groups_dotprod;
    if (isa >= TN_I8MM) kernels.dot_int8 = tn_dot_int8_i8mm, kernels.dot_bf16 = tn_dot_bf16_neon;
#endif
    return kernels;
}

const tn_kernels *tn_kernels_test(int64_t isa) {
    static tn_kernels kernels[TN_I8MM + 1];
    if (!tn_has_isa(isa)) return NULL;
    kernels[isa] = kernels_for(isa);
    return &kernels[isa];
}

/* Two passes: the first one counts bytes from NULL, the second one hands them out. */
typedef struct {
    char *next;
    size_t bytes;
} arena;

static void *take(arena *from, int64_t bytes) {
    /* What is behind a part is nobody's: under a sanitizer it must not be touched. */
    const size_t size = ((size_t)bytes + 64 + 4095) / 4096 * 4096;
    void *result = from->next == NULL ? NULL : from->next + from->bytes;
    if (result != NULL) FORBID((char *)result + bytes, size - (size_t)bytes);
    from->bytes += size;
    return result;
}

static void take_all(tn_engine *engine, arena *from) {
    const tn_model *model = &engine->model;
    const int64_t d = model->head_size, queries = model->heads * d, real = sizeof(float);
    const int64_t k = largest(largest(model->hidden, model->intermediate), queries);
    int gates_first = 0;
    for (int64_t i = 0; i < model->num_layers; i++) gates_first |= tn_gates_first(&model->layers[i]);
    engine->residual = take(from, TN_SLAB * model->hidden * real);
    engine->qkv = take(from, TN_SLAB * (queries + 2 * model->kv_heads * d) * real);
    engine->attended = take(from, TN_SLAB * queries * real);
    engine->gate_up = gates_first ? take(from, TN_SLAB * 2 * model->intermediate * real) : NULL;
    engine->gated = gates_first ? take(from, TN_SLAB * model->intermediate * real) : NULL;
    engine->operand.room = engine->activated.room = TN_SLAB;
    engine->operand.data = take(from, TN_SLAB * k * real);
    engine->operand.scales = take(from, TN_SLAB * real);
    engine->operand.sums = take(from, TN_SLAB * (k / 16) * real);
    engine->activated.data = take(from, TN_SLAB * model->intermediate * real);
    engine->activated.scales = take(from, TN_SLAB * real);
    engine->pieces = take(from, TN_SLAB * (int64_t)sizeof(tn_piece));
    engine->sampled = take(from, TN_SLAB * (int64_t)sizeof(int32_t));
    for (int i = 0; i < engine->threads; i++) {
        tn_thread *thread = &engine->thread[i];
        thread->normed = take(from, 16 * k * real);
        thread->ordered = take(from, 16 * k * real);
        thread->columns = take(from, (engine->isa == TN_AMX ? 32 * TN_PANELS : 64) * TN_SLAB * real);
        thread->scores = take(from, TN_QUERIES * TN_KEY_BLOCK * real);
        thread->output = take(from, TN_QUERIES * d * real);
        thread->queries = take(from, TN_QUERIES * d * real);
        thread->queries_bf16 = take(from, TN_QUERIES * d * (int64_t)sizeof(bf16));
#if defined(__x86_64__)
        thread->panel = engine->isa >= TN_AMX ? take(from, 32 * TN_PART * (int64_t)sizeof(uint32_t)) : NULL;
        thread->tiled = tn_attends_in_tiles(engine) ? take(from, tn_tiled_attention_bytes(model)) : NULL;
#endif
        thread->unpacked = take(from, TN_UNPACKED * k * (int64_t)sizeof(bf16));
        thread->few.room = 16;
        thread->few.data = take(from, 16 * k * real);
        thread->few.scales = take(from, 16 * real);
        thread->few.sums = take(from, 16 * (k / 16) * real);
    }
}

tn_engine *tn_create(const tn_model *model, int64_t threads, int64_t isa, int64_t pin) {
    if (!tn_has_isa(isa)) return NULL; /* rather than SIGILL */
    tn_engine *engine = calloc(1, sizeof *engine);
    if (engine == NULL) return NULL;
    engine->model = *model;
    engine->isa = (int)isa;
    engine->threads = (int)threads;
    engine->kernels = kernels_for(isa);
    engine->thread = calloc((size_t)threads, sizeof *engine->thread);
    engine->pool = tn_pool_create((int)threads, (int)pin);
    arena count = {NULL, 0};
    if (engine->thread != NULL && engine->pool != NULL) {
        take_all(engine, &count);
        /* Pages become resident when they are first written: a slab that is never full costs less. */
        engine->memory = tn_large_pages(&count.bytes);
        engine->bytes = count.bytes;
    }
    if (engine->memory == NULL) {
        tn_destroy(engine);
        return NULL;
    }
    arena memory = {engine->memory, 0};
    take_all(engine, &memory);
    tn_use_large_pages(model);
    return engine;
}

void tn_destroy(tn_engine *engine) {
    if (engine == NULL) return;
    tn_pool_destroy(engine->pool);
    if (engine->memory != NULL) ALLOW(engine->memory, engine->bytes);
    free(engine->memory);
    free(engine->thread);
    free(engine);
}

typedef struct {
    tn_engine *engine;
    const tn_step *step;
    int64_t *result;
} argmax_job;

static void argmax_row(const argmax_job *job, int64_t row) {
    const int64_t n = job->engine->model.head.n, token = job->engine->kernels.argmax(job->step->logits + row * n, n);
    job->result[row] = token;
    job->step->last_tokens[job->step->slots[row]] = token < 0 ? 0 : token;
}

static void argmax(void *context, int thread) {
    const argmax_job *job = context;
    (void)thread;
    for (int64_t row; (row = tn_next(job->engine->pool)) < job->step->rows;) argmax_row(job, row);
}

void tn_argmax(tn_engine *engine, const tn_step *step, int64_t *result) {
    argmax_job job = {engine, step, result};
    if (step->rows * engine->model.head.n < (1 << 18)) { /* not worth waking others for */
        for (int64_t row = 0; row < step->rows; row++) argmax_row(&job, row);
        return;
    }
    tn_pool_run(engine->pool, argmax, &job);
}
