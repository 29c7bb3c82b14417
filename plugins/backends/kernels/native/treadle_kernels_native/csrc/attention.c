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
    int64_t kv_head, heads; /* KV heads [kv_head, kv_head + heads) */
    int64_t group, page_size;
    int64_t tokens;   /* one where there are several heads */
    int64_t position; /* of the first token */
    int64_t first;    /* no key before it is read: a window's earlier pages may be others' by now */
} unit;

/* A head of a query or a key, in place: normalised if there are weights for it, and turned. */
static void turn(const tn_engine *engine, const tn_layer *layer, const float *norm, int64_t position, float *x) {
    const int64_t d = engine->model.head_size, half = d / 2;
    if (norm != NULL) engine->kernels.rms_norm(x, norm, (float)engine->model.eps, d, x);
    engine->kernels.rotate(x, layer->cos + position * half, layer->sin + position * half, half);
}

/* Into the page of a position, for one KV head. */
static void store(const tn_engine *engine, const int32_t *pages, int64_t position, int64_t kv_head, const float *x, void *cache) {
    const tn_model *model = &engine->model;
    const int64_t d = model->head_size, size = model->page_size;
    const int64_t at = (((int64_t)pages[position / size] * size + position % size) * model->kv_heads + kv_head) * d;
    if (model->cache_format == TN_F32)
        memcpy((float *)cache + at, x, (size_t)d * sizeof(float));
    else
        engine->kernels.to_bf16(x, d, (bf16 *)cache + at);
}

static const int32_t *pages_of(const tn_layer *layer, const tn_step *step, const tn_piece *piece) { return step->tables[layer->table] + (int64_t)piece->slot * step->columns; }

/* Normalise and turn the queries and the key that belong to one KV head, and store key and value. */
void tn_rope_token(tn_engine *engine, const tn_layer *layer, const tn_step *step, const tn_piece *piece, int64_t offset, int64_t kv_head) {
    const tn_model *model = &engine->model;
    const int64_t d = model->head_size, group = model->heads / model->kv_heads;
    const int64_t position = piece->start + offset, width = (model->heads + 2 * model->kv_heads) * d;
    const int32_t *pages = pages_of(layer, step, piece);
    float *row = engine->qkv + (piece->first + offset) * width, *k = row + (model->heads + kv_head) * d;
    for (int64_t i = 0; i < group; i++) turn(engine, layer, layer->q_norm, position, row + (kv_head * group + i) * d);
    turn(engine, layer, layer->k_norm, position, k);
    store(engine, pages, position, kv_head, k, layer->keys);
    store(engine, pages, position, kv_head, k + model->kv_heads * d, layer->values);
}

void tn_rope_head(tn_engine *engine, const tn_layer *layer, const tn_step *step, const tn_piece *piece, int64_t offset, int64_t head, float *x) {
    const tn_model *model = &engine->model;
    const int64_t d = model->head_size, position = piece->start + offset, kv_head = (head - model->heads) % model->kv_heads;
    if (head >= model->heads + model->kv_heads) {
        store(engine, pages_of(layer, step, piece), position, kv_head, x, layer->values);
        return;
    }
    turn(engine, layer, head < model->heads ? layer->q_norm : layer->k_norm, position, x);
    if (head < model->heads)
        memcpy(engine->qkv + ((piece->first + offset) * (model->heads + 2 * model->kv_heads) + head) * d, x, (size_t)d * sizeof(float));
    else
        store(engine, pages_of(layer, step, piece), position, kv_head, x, layer->keys);
}

static int64_t queries_of(const unit *u) { return u->heads * u->tokens * u->group; }

/* Scores of keys [begin, end), which lie in one block, into scratch->scores from column begin - base. */
static void score(const tn_engine *engine, const tn_thread *scratch, const unit *u, int64_t begin, int64_t end, int64_t base) {
    const tn_model *model = &engine->model;
    const tn_kernels *kernels = &engine->kernels;
    const int64_t d = model->head_size, stride = model->kv_heads * d, queries = u->tokens * u->group;
    for (int64_t key = begin; key < end;) {
        const int64_t within = key % u->page_size, left = u->page_size - within, count = end - key < left ? end - key : left;
        const int64_t token = (int64_t)u->pages[key / u->page_size] * u->page_size + within;
        for (int64_t head = 0; head < u->heads; head++) {
            const int64_t at = token * stride + (u->kv_head + head) * d, first = head * queries;
            float *to = scratch->scores + first * TN_KEY_BLOCK + (key - base);
            if (model->cache_format == TN_F32)
                kernels->dot_f32(scratch->queries + first * d, d, queries, (const float *)u->layer->keys + at, stride, count, d, to, TN_KEY_BLOCK);
            else if (kernels->dot_bf16 != NULL)
                kernels->dot_bf16(scratch->queries_bf16 + first * d, d, queries, (const bf16 *)u->layer->keys + at, stride, count, d, to, TN_KEY_BLOCK);
            else
                kernels->dot_f32_bf16(scratch->queries + first * d, d, queries, (const bf16 *)u->layer->keys + at, stride, count, d, to, TN_KEY_BLOCK);
        }
        key += count;
    }
}

/* Add the values of keys [begin, end), after multiplying what was added before by keep. */
static void mix(const tn_engine *engine, const tn_thread *scratch, const unit *u, int64_t begin, int64_t end, int64_t base, const float *keep, const float *ones) {
    const tn_model *model = &engine->model;
    const int64_t d = model->head_size, stride = model->kv_heads * d, queries = u->tokens * u->group;
    for (int64_t key = begin; key < end; keep = ones) {
        const int64_t within = key % u->page_size, left = u->page_size - within, count = end - key < left ? end - key : left;
        const int64_t token = (int64_t)u->pages[key / u->page_size] * u->page_size + within;
        for (int64_t head = 0; head < u->heads; head++) {
            const int64_t at = token * stride + (u->kv_head + head) * d, first = head * queries;
            const float *weights = scratch->scores + first * TN_KEY_BLOCK + (key - base);
            if (model->cache_format == TN_F32)
                engine->kernels.mix_f32(weights, TN_KEY_BLOCK, keep + first, queries, (const float *)u->layer->values + at, stride, count, d, scratch->output + first * d);
            else
                engine->kernels.mix_bf16(weights, TN_KEY_BLOCK, keep + first, queries, (const bf16 *)u->layer->values + at, stride, count, d, scratch->output + first * d);
        }
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
    const int64_t d = engine->model.head_size, last = u->position + u->tokens, queries = queries_of(u);
    for (int64_t i = 0; i < queries; i++) largest[i] = -INFINITY, total[i] = 0.0f, ones[i] = 1.0f;
    memset(scratch->output, 0, (size_t)(queries * d) * sizeof(float));
    for (int64_t base = u->first / TN_KEY_BLOCK * TN_KEY_BLOCK; base < last; base += TN_KEY_BLOCK) {
        const int64_t begin = base > u->first ? base : u->first, end = last < base + TN_KEY_BLOCK ? last : base + TN_KEY_BLOCK;
        score(engine, scratch, u, begin, end, base);
        for (int64_t i = 0; i < queries; i++) {
            const int64_t seen = u->position + i / u->group % u->tokens + 1; /* keys before this one */
            const int64_t from = u->layer->window > 0 && seen - u->layer->window > begin ? seen - u->layer->window : begin;
            const int64_t until = seen < end ? seen : end;
            keep[i] = soften(engine, scratch->scores + i * TN_KEY_BLOCK, from - base, until - base, (float)u->layer->scale, &largest[i], &total[i]);
        }
        mix(engine, scratch, u, begin, end, base, keep, ones);
    }
    for (int64_t i = 0; i < queries; i++) {
        const float factor = 1.0f / total[i];
        for (int64_t j = 0; j < d; j++) scratch->output[i * d + j] *= factor;
    }
}

/* Tokens [first, first + count) of a piece, for one KV head; one token for several. */
static void run_unit(tn_engine *engine, int thread, const tn_layer *layer, const tn_step *step, const tn_piece *piece, int64_t first, int64_t count, int64_t kv_head, int64_t heads) {
    const tn_model *model = &engine->model;
    tn_thread *scratch = &engine->thread[thread];
    const int64_t d = model->head_size, group = model->heads / model->kv_heads, token = piece->first + first;
    const int64_t width = (model->heads + 2 * model->kv_heads) * d, size = heads * group * d; /* of a token */
    const int32_t *pages = pages_of(layer, step, piece);
#if defined(__x86_64__)
    if (count > 1 && tn_attends_in_tiles(engine)) {
        tn_tiled_attention(engine, thread, layer, pages, kv_head, token, count, piece->start + first);
        return;
    }
#endif
    unit u = {layer, pages, kv_head, heads, group, model->page_size, count, piece->start + first, 0};
    if (layer->window > 0 && u.position + 1 > layer->window) u.first = u.position + 1 - layer->window;
    for (int64_t t = 0; t < count; t++) memcpy(scratch->queries + t * size, engine->qkv + (token + t) * width + kv_head * group * d, (size_t)size * sizeof(float));
    if (model->cache_format == TN_BF16 && engine->kernels.dot_bf16 != NULL) engine->kernels.to_bf16(scratch->queries, count * size, scratch->queries_bf16);
    attend(engine, scratch, &u);
    for (int64_t t = 0; t < count; t++)
        memcpy(engine->attended + ((token + t) * model->heads + kv_head * group) * d, scratch->output + t * size, (size_t)size * sizeof(float));
}

/* How many KV heads of one token are taken together: their keys lie side by side, and memory is read in its order.
 * Not all, where threads would be left without. */
static int64_t heads_together(const tn_engine *engine, int64_t pieces) {
    const tn_model *model = &engine->model;
    const int64_t most = TN_QUERIES / (model->heads / model->kv_heads), shares = engine->threads == 1 ? 1 : (4 * engine->threads + pieces - 1) / pieces;
    const int64_t heads = (model->kv_heads + shares - 1) / shares;
    return heads < most ? heads : most;
}

/* alone: every piece is one token, whose keys and queries this call turns itself. */
void tn_attention_run(tn_engine *engine, int thread, const tn_layer *layer, const tn_step *step, const tn_piece *pieces, int64_t count, int alone) {
    const tn_model *model = &engine->model;
    const int64_t heads = heads_together(engine, count), shares = (model->kv_heads + heads - 1) / heads;
    int64_t block = TN_QUERIES / (model->heads / model->kv_heads);
#if defined(__x86_64__)
    if (tn_attends_in_tiles(engine)) block = TN_TILED_QUERIES / (model->heads / model->kv_heads);
#endif
    int64_t before = 0, number = tn_next(engine->pool); /* before: units of earlier pieces */
    for (const tn_piece *piece = pieces; piece < pieces + count; piece++) {
        const int64_t units = piece->count == 1 ? shares : (piece->count + block - 1) / block * model->kv_heads;
        for (; number < before + units; number = tn_next(engine->pool)) {
            const int64_t within = number - before, first = piece->count == 1 ? 0 : within / model->kv_heads * block, left = piece->count - first;
            const int64_t kv_head = piece->count == 1 ? within * heads : within % model->kv_heads;
            const int64_t together = piece->count > 1 ? 1 : model->kv_heads - kv_head < heads ? model->kv_heads - kv_head : heads;
            for (int64_t head = kv_head; alone && head < kv_head + together; head++) tn_rope_token(engine, layer, step, piece, 0, head);
            run_unit(engine, thread, layer, step, piece, first, left < block ? left : block, kv_head, together);
        }
        before += units;
    }
}
