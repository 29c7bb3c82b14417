/* One step: all rows through all layers, in one call.
 *
 * The tokens of a step go through the model in slabs. Every thread runs the whole of it; between
 * operations they meet at barriers, five in a layer where few tokens are computed.
 */
#include <string.h>

#include "internal.h"

#define FEW 16 /* tokens of one block: each thread makes the operands itself, rather than wait for one that does */

typedef struct {
    tn_engine *engine;
    const tn_step *step;
    int64_t pieces, tokens, num_sampled;
    int alone;     /* every piece is one token */
    float *logits; /* of the first token that is sampled */
} slab;

/* An operand of rows of x, which are complete, normalised if there are weights for it, in the order of the layer. */
static tn_operand operand_of(tn_engine *engine, int thread, const tn_linear *linear, const float *x, const float *norm, int64_t m) {
    const int few = m <= FEW;
    const int64_t k = linear->k, blocks = (m + 15) / 16;
    tn_operand operand = few ? engine->thread[thread].few : engine->operand;
    operand.kind = tn_operand_kind(engine, linear, m);
    operand.k = k;
    operand.group = linear->offsets == NULL ? 0 : linear->group;
    float *normed = engine->thread[thread].normed, *ordered = engine->thread[thread].ordered;
    for (int64_t done = 0;; done++) {
        const int64_t block = few ? done : tn_next(engine->pool);
        if (block >= blocks) break;
        const int64_t first = block * 16, count = m - first < 16 ? m - first : 16;
        const float *rows = x + first * k;
        if (norm != NULL) {
            for (int64_t r = 0; r < count; r++) engine->kernels.rms_norm(rows + r * k, norm, (float)engine->model.eps, k, normed + r * k);
            rows = normed;
        }
        if (linear->order != NULL) {
            for (int64_t r = 0; r < count; r++)
                for (int64_t i = 0; i < k; i++) ordered[r * k + i] = rows[r * k + linear->order[i]];
            rows = ordered;
        }
        tn_operand_fill(engine, &operand, rows, k, first, count);
    }
    if (!few) tn_barrier(engine->pool);
    return operand;
}

static void embed(const slab *s) {
    tn_engine *engine = s->engine;
    const tn_model *model = &engine->model;
    const int64_t size = model->hidden;
    for (int64_t i; (i = tn_next(engine->pool)) < s->pieces;) {
        const tn_piece *piece = &engine->pieces[i];
        for (int64_t t = 0; t < piece->count; t++) {
            const int64_t id = piece->ids == NULL ? s->step->last_tokens[piece->slot] : piece->ids[t];
            float *to = engine->residual + (piece->first + t) * size;
            if (model->embedding_format == TN_F32)
                memcpy(to, (const float *)model->embedding + id * size, (size_t)size * sizeof(float));
            else
                engine->kernels.to_f32((const bf16 *)model->embedding + id * size, size, to);
        }
    }
    tn_barrier(engine->pool);
}

/* Turn and store the keys of all tokens before any of them attends. */
static void rope(const slab *s, const tn_layer *layer) {
    tn_engine *engine = s->engine;
    for (int64_t i; (i = tn_next(engine->pool)) < s->tokens;) {
        const tn_piece *piece = engine->pieces;
        while (i >= piece->first + piece->count) piece++;
        for (int64_t head = 0; head < engine->model.kv_heads; head++) tn_rope_token(engine, layer, s->step, piece, i - piece->first, head);
    }
    tn_barrier(engine->pool);
}

static void feed_forward(tn_engine *engine, int thread, const tn_layer *layer, int64_t m) {
    const int64_t hidden = engine->model.hidden, size = engine->model.intermediate;
    const tn_operand x = operand_of(engine, thread, &layer->gate_up, engine->residual, layer->post_norm, m);
    tn_operand activated = engine->activated;
    if (tn_gates_first(layer)) {
        tn_linear_run(engine, thread, &layer->gate_up, &x, m, engine->gate_up, 2 * size, 0);
        tn_barrier(engine->pool);
        for (int64_t r; (r = tn_next(engine->pool)) < m;) {
            const float *row = engine->gate_up + r * 2 * size;
            engine->kernels.silu_mul(row, row + size, size, engine->gated + r * size);
        }
        tn_barrier(engine->pool);
        activated = operand_of(engine, thread, &layer->down, engine->gated, NULL, m);
    } else {
        activated.kind = tn_operand_kind(engine, &layer->down, m);
        activated.k = size;
        tn_gated_run(engine, thread, &layer->gate_up, &x, m, &activated);
        tn_barrier(engine->pool);
    }
    tn_linear_run(engine, thread, &layer->down, &activated, m, engine->residual, hidden, 1);
    tn_barrier(engine->pool);
}

/* Move the tokens that have logits to the front: behind the last attention no other is needed. */
static void keep_sampled(const slab *s, int thread) {
    tn_engine *engine = s->engine;
    const int64_t hidden = engine->model.hidden, queries = engine->model.heads * engine->model.head_size;
    for (int64_t i = 0; thread == 0 && i < s->num_sampled; i++) {
        const int64_t from = engine->sampled[i];
        memmove(engine->residual + i * hidden, engine->residual + from * hidden, (size_t)hidden * sizeof(float));
        memmove(engine->attended + i * queries, engine->attended + from * queries, (size_t)queries * sizeof(float));
    }
    tn_barrier(engine->pool);
}

static void run_slab(void *context, int thread) {
    const slab *s = context;
    tn_engine *engine = s->engine;
    const tn_model *model = &engine->model;
    const int64_t queries = model->heads * model->head_size, width = queries + 2 * model->kv_heads * model->head_size;
    int64_t m = s->tokens;
#if defined(__x86_64__)
    if (engine->isa >= TN_AMX) tn_amx_begin();
#endif
    embed(s);
    for (int64_t i = 0; i < model->num_layers; i++) {
        const tn_layer *layer = &model->layers[i];
        const int is_last = i + 1 == model->num_layers;
        const tn_operand x = operand_of(engine, thread, &layer->qkv, engine->residual, layer->input_norm, m);
        const int makes_heads = !s->alone && tn_makes_heads(engine, &layer->qkv, &x);
        if (makes_heads)
            tn_heads_run(engine, thread, layer, s->step, &x, m);
        else
            tn_linear_run(engine, thread, &layer->qkv, &x, m, engine->qkv, width, 0);
        tn_barrier(engine->pool);
        if (!s->alone && !makes_heads) rope(s, layer);
        if (is_last && s->num_sampled == 0) break; /* keys and values are stored */
        tn_attention_run(engine, thread, layer, s->step, engine->pieces, s->pieces, s->alone);
        tn_barrier(engine->pool);
        if (is_last && s->num_sampled < m) {
            keep_sampled(s, thread);
            m = s->num_sampled;
        }
        const tn_operand attended = operand_of(engine, thread, &layer->o, engine->attended, NULL, m);
        tn_linear_run(engine, thread, &layer->o, &attended, m, engine->residual, model->hidden, 1);
        tn_barrier(engine->pool);
        feed_forward(engine, thread, layer, m);
    }
    if (s->num_sampled > 0) {
        const tn_operand x = operand_of(engine, thread, &model->head, engine->residual, model->final_norm, m);
        tn_linear_run(engine, thread, &model->head, &x, m, s->logits, model->head.n, 0);
    }
#if defined(__x86_64__)
    if (engine->isa >= TN_AMX) tn_amx_end();
#endif
}

/* Where the next slab begins: a row, its tokens in earlier slabs, and all ids of prompts in them. */
typedef struct {
    int64_t row, done, prompt;
} cursor;

static slab next_slab(tn_engine *engine, const tn_step *step, cursor *at, float *logits) {
    slab s = {engine, step, 0, 0, 0, 1, logits};
    while (at->row < step->rows && s.tokens < TN_SLAB) {
        const int64_t left = step->counts[at->row] - at->done, room = TN_SLAB - s.tokens, count = left < room ? left : room;
        const int generates = at->row < step->num_decodes;
        engine->pieces[s.pieces++] = (tn_piece){step->slots[at->row], (int32_t)s.tokens, (int32_t)count, step->starts[at->row] + at->done, generates ? NULL : step->prompt_ids + at->prompt};
        if (!generates) at->prompt += count;
        if (count > 1) s.alone = 0;
        s.tokens += count;
        at->done += count;
        if (count < left) break;
        if (step->samples[at->row]) engine->sampled[s.num_sampled++] = (int32_t)s.tokens - 1;
        at->row++;
        at->done = 0;
    }
    return s;
}

void tn_run(tn_engine *engine, const tn_step *step) {
    cursor at = {0, 0, 0};
    float *logits = step->logits;
    while (at.row < step->rows) {
        slab s = next_slab(engine, step, &at, logits);
        logits += s.num_sampled * engine->model.head.n;
        tn_pool_run(engine->pool, run_slab, &s);
    }
}

typedef struct {
    tn_engine *engine;
    const tn_linear *linear;
    const float *x;
    float *y;
    int64_t m;
} linear_job;

static void run_linear(void *context, int thread) {
    const linear_job *job = context;
    tn_engine *engine = job->engine;
#if defined(__x86_64__)
    if (engine->isa >= TN_AMX) tn_amx_begin();
#endif
    const tn_operand x = operand_of(engine, thread, job->linear, job->x, NULL, job->m);
    tn_linear_run(engine, thread, job->linear, &x, job->m, job->y, job->linear->n, 0);
#if defined(__x86_64__)
    if (engine->isa >= TN_AMX) tn_amx_end();
#endif
}

void tn_multiply(tn_engine *engine, const tn_linear *linear, const float *x, int64_t m, float *y) {
    linear_job job = {engine, linear, x, y, m};
    tn_pool_run(engine->pool, run_linear, &job);
}

/* ------------------------------------------------------------------------------------- for tests */

typedef struct {
    const slab *slab;
    const tn_layer *layer;
} attention_job;

static void run_attention(void *context, int thread) {
    const attention_job *job = context;
    const slab *s = job->slab;
#if defined(__x86_64__)
    if (s->engine->isa >= TN_AMX) tn_amx_begin();
#endif
    if (!s->alone) rope(s, job->layer);
    tn_attention_run(s->engine, thread, job->layer, s->step, s->engine->pieces, s->pieces, s->alone);
#if defined(__x86_64__)
    if (s->engine->isa >= TN_AMX) tn_amx_end();
#endif
}

void tn_attention_test(tn_engine *engine, const tn_layer *layer, const tn_step *step, const float *qkv, float *attended) {
    const int64_t queries = engine->model.heads * engine->model.head_size, width = queries + 2 * engine->model.kv_heads * engine->model.head_size;
    cursor at = {0, 0, 0};
    while (at.row < step->rows) {
        const slab s = next_slab(engine, step, &at, NULL);
        memcpy(engine->qkv, qkv, (size_t)(s.tokens * width) * sizeof(float));
        tn_pool_run(engine->pool, run_attention, &(attention_job){&s, layer});
        memcpy(attended, engine->attended, (size_t)(s.tokens * queries) * sizeof(float));
        qkv += s.tokens * width, attended += s.tokens * queries;
    }
}
