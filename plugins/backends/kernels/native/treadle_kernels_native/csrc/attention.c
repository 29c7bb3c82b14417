/* Attention over the paged cache, with the softmax computed block by block of keys.
 *
 * A piece of work is some queries of one sequence for one KV head: with grouped heads they share the
 * keys that are read. Blocks of keys begin at multiples of TN_KEY_BLOCK, wherever a prompt was cut and
 * whatever else is in the step, so that a token's result depends on its own sequence only.
 */
#include <math.h>
#include <string.h>

#include "internal.h"

typedef struct {
    const tn_layer *layer;
    const int32_t *pages; /* of the sequence */
    int64_t kv_head, group, page_size;
    int64_t queries;  /* tokens · group, token by token */
    int64_t position; /* of the first token */
    int64_t first;    /* no key before it is read: a window's earlier pages may be others' by now */
} unit;

/* Normalise and turn the queries and the key that belong to one KV head, and store key and value. */
void tn_rope_token(tn_engine *engine, const tn_layer *layer, const tn_step *step, const tn_piece *piece, int64_t offset, int64_t kv_head) {
    const tn_model *model = &engine->model;
    const tn_kernels *kernels = &engine->kernels;
    const int64_t d = model->head_size, half = d / 2, group = model->heads / model->kv_heads;
    const int64_t position = piece->start + offset, width = (model->heads + 2 * model->kv_heads) * d;
    const float *cos = layer->cos + position * half, *sin = layer->sin + position * half;
    float *row = engine->qkv + (piece->first + offset) * width;
    for (int64_t i = 0; i < group; i++) {
        float *q = row + (kv_head * group + i) * d;
        if (layer->q_norm != NULL) kernels->rms_norm(q, layer->q_norm, (float)model->eps, d, q);
        kernels->rotate(q, cos, sin, half);
    }
    float *k = row + (model->heads + kv_head) * d;
    const float *v = k + model->kv_heads * d;
    if (layer->k_norm != NULL) kernels->rms_norm(k, layer->k_norm, (float)model->eps, d, k);
    kernels->rotate(k, cos, sin, half);
    const int32_t *pages = step->tables[layer->table] + (int64_t)piece->slot * step->columns;
    const int64_t token = pages[position / model->page_size] * model->page_size + position % model->page_size;
    const int64_t at = (token * model->kv_heads + kv_head) * d;
    if (model->cache_format == TN_F32) {
        memcpy((float *)layer->keys + at, k, (size_t)d * sizeof(float));
        memcpy((float *)layer->values + at, v, (size_t)d * sizeof(float));
    } else {
        kernels->to_bf16(k, d, (bf16 *)layer->keys + at);
        kernels->to_bf16(v, d, (bf16 *)layer->values + at);
    }
}

/* Ask for the rows of one KV head ahead of their use: they lie too far apart for the machine to guess. */
static void fetch(const tn_engine *engine, const unit *u, const void *cache, int64_t begin, int64_t end) {
    const tn_model *model = &engine->model;
    const int64_t element = model->cache_format == TN_F32 ? 4 : 2, row = model->head_size * element;
    for (int64_t key = begin; key < end; key++) {
        const int64_t token = (int64_t)u->pages[key / u->page_size] * u->page_size + key % u->page_size;
        const char *at = (const char *)cache + (token * model->kv_heads + u->kv_head) * row;
        for (int64_t i = 0; i < row; i += 64) __builtin_prefetch(at + i);
    }
}

/* Scores of keys [begin, end), which lie in one block, into scratch->scores from column begin - base. */
static void score(const tn_engine *engine, const tn_thread *scratch, const unit *u, int64_t begin, int64_t end, int64_t base) {
    const tn_model *model = &engine->model;
    const int64_t d = model->head_size, stride = model->kv_heads * d;
    for (int64_t key = begin; key < end;) {
        const int64_t within = key % u->page_size, left = u->page_size - within, count = end - key < left ? end - key : left;
        const int64_t at = ((int64_t)u->pages[key / u->page_size] * u->page_size + within) * stride + u->kv_head * d;
        float *to = scratch->scores + (key - base);
        if (model->cache_format == TN_F32)
            engine->kernels.dot_f32(scratch->queries, d, u->queries, (const float *)u->layer->keys + at, stride, count, d, to, TN_KEY_BLOCK);
        else if (engine->kernels.dot_bf16 != NULL)
            engine->kernels.dot_bf16(scratch->queries_bf16, d, u->queries, (const bf16 *)u->layer->keys + at, stride, count, d, to, TN_KEY_BLOCK);
        else
            engine->kernels.dot_f32_bf16(scratch->queries, d, u->queries, (const bf16 *)u->layer->keys + at, stride, count, d, to, TN_KEY_BLOCK);
        key += count;
    }
}

/* Add the values of keys [begin, end), after multiplying what was added before by keep. */
static void mix(const tn_engine *engine, const tn_thread *scratch, const unit *u, int64_t begin, int64_t end, int64_t base, const float *keep, const float *ones) {
    const tn_model *model = &engine->model;
    const int64_t d = model->head_size, stride = model->kv_heads * d;
    for (int64_t key = begin; key < end; keep = ones) {
        const int64_t within = key % u->page_size, left = u->page_size - within, count = end - key < left ? end - key : left;
        const int64_t at = ((int64_t)u->pages[key / u->page_size] * u->page_size + within) * stride + u->kv_head * d;
        const float *weights = scratch->scores + (key - base);
        if (model->cache_format == TN_F32)
            engine->kernels.mix_f32(weights, TN_KEY_BLOCK, keep, u->queries, (const float *)u->layer->values + at, stride, count, d, scratch->output);
        else
            engine->kernels.mix_bf16(weights, TN_KEY_BLOCK, keep, u->queries, (const bf16 *)u->layer->values + at, stride, count, d, scratch->output);
        key += count;
    }
}

/* Scores to weights of one query, which sees keys [begin, end) of the block; returns by how much what
 * came before shrinks. */
static float soften(const tn_engine *engine, float *scores, int64_t begin, int64_t end, float scale, float *largest, float *total) {
    if (begin > TN_KEY_BLOCK) begin = TN_KEY_BLOCK; /* the window begins behind this block */
    for (int64_t i = 0; i < begin; i++) scores[i] = -INFINITY;
    for (int64_t i = end > begin ? end : begin; i < TN_KEY_BLOCK; i++) scores[i] = -INFINITY;
    const float found = engine->kernels.scale_max(scores, TN_KEY_BLOCK, scale), most = found > *largest ? found : *largest;
    if (begin >= end || most == -INFINITY) {
        memset(scores, 0, TN_KEY_BLOCK * sizeof *scores);
        return 1.0f;
    }
    const float keep = *largest == -INFINITY ? 0.0f : expf(*largest - most);
    *total = *total * keep + engine->kernels.exp_sum(scores, TN_KEY_BLOCK, most);
    *largest = most;
    return keep;
}

static void attend(tn_engine *engine, tn_thread *scratch, const unit *u) {
    float largest[TN_QUERIES], total[TN_QUERIES], keep[TN_QUERIES], ones[TN_QUERIES];
    const int64_t d = engine->model.head_size, last = u->position + u->queries / u->group;
    for (int64_t i = 0; i < u->queries; i++) largest[i] = -INFINITY, total[i] = 0.0f, ones[i] = 1.0f;
    memset(scratch->output, 0, (size_t)(u->queries * d) * sizeof(float));
    for (int64_t base = u->first / TN_KEY_BLOCK * TN_KEY_BLOCK; base < last; base += TN_KEY_BLOCK) {
        const int64_t begin = base > u->first ? base : u->first, end = last < base + TN_KEY_BLOCK ? last : base + TN_KEY_BLOCK;
        fetch(engine, u, u->layer->values, begin, end);
        score(engine, scratch, u, begin, end, base);
        for (int64_t i = 0; i < u->queries; i++) {
            const int64_t seen = u->position + i / u->group + 1; /* keys before this one */
            const int64_t from = u->layer->window > 0 && seen - u->layer->window > begin ? seen - u->layer->window : begin;
            const int64_t until = seen < end ? seen : end;
            keep[i] = soften(engine, scratch->scores + i * TN_KEY_BLOCK, from - base, until - base, (float)u->layer->scale, &largest[i], &total[i]);
        }
        fetch(engine, u, u->layer->keys, end, last < end + TN_KEY_BLOCK ? last : end + TN_KEY_BLOCK);
        mix(engine, scratch, u, begin, end, base, keep, ones);
    }
    for (int64_t i = 0; i < u->queries; i++) {
        const float factor = 1.0f / total[i];
        for (int64_t j = 0; j < d; j++) scratch->output[i * d + j] *= factor;
    }
}

/* Tokens [first, first + count) of a piece, for one KV head. */
static void run_unit(tn_engine *engine, int thread, const tn_layer *layer, const tn_step *step, const tn_piece *piece, int64_t first, int64_t count, int64_t kv_head) {
    const tn_model *model = &engine->model;
    tn_thread *scratch = &engine->thread[thread];
    const int64_t d = model->head_size, group = model->heads / model->kv_heads, token = piece->first + first;
    const int64_t width = (model->heads + 2 * model->kv_heads) * d;
#if defined(__x86_64__)
    if (count > 1 && tn_attends_in_tiles(engine)) {
        tn_tiled_attention(engine, thread, layer, step->tables[layer->table] + (int64_t)piece->slot * step->columns, kv_head, token, count, piece->start + first);
        return;
    }
#endif
    unit u = {layer, step->tables[layer->table] + (int64_t)piece->slot * step->columns, kv_head, group, model->page_size, count * group, piece->start + first, 0};
    if (layer->window > 0 && u.position + 1 > layer->window) u.first = u.position + 1 - layer->window;
    for (int64_t t = 0; t < count; t++)
        memcpy(scratch->queries + t * group * d, engine->qkv + (token + t) * width + kv_head * group * d, (size_t)(group * d) * sizeof(float));
    if (model->cache_format == TN_BF16 && engine->kernels.dot_bf16 != NULL) engine->kernels.to_bf16(scratch->queries, count * group * d, scratch->queries_bf16);
    attend(engine, scratch, &u);
    for (int64_t t = 0; t < count; t++)
        memcpy(engine->attended + ((token + t) * model->heads + kv_head * group) * d, scratch->output + t * group * d, (size_t)(group * d) * sizeof(float));
}

/* alone: every piece is one token, whose keys and queries this call turns itself. */
void tn_attention_run(tn_engine *engine, int thread, const tn_layer *layer, const tn_step *step, const tn_piece *pieces, int64_t count, int alone) {
    const tn_model *model = &engine->model;
    const int64_t group = model->heads / model->kv_heads;
    int64_t block = TN_QUERIES / group;
#if defined(__x86_64__)
    if (tn_attends_in_tiles(engine)) block = TN_TILED_QUERIES / group;
#endif
    int64_t units = 0;
    for (int64_t i = 0; i < count; i++) units += (pieces[i].count + block - 1) / block;
    int64_t piece = 0, before = 0; /* units of the pieces before this one */
    for (int64_t number; (number = tn_next(engine->pool)) < units * model->kv_heads;) {
        const int64_t unit_index = number / model->kv_heads, kv_head = number % model->kv_heads;
        for (int64_t size; unit_index >= before + (size = (pieces[piece].count + block - 1) / block); piece++) before += size;
        const int64_t first = (unit_index - before) * block, left = pieces[piece].count - first;
        if (alone) tn_rope_token(engine, layer, step, &pieces[piece], 0, kv_head);
        run_unit(engine, thread, layer, step, &pieces[piece], first, left < block ? left : block, kv_head);
    }
}
