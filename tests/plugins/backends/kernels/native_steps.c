/* Steps of small models with every buffer allocated by itself, for the sanitizers and for machines that are
 * emulated: chunks of prompts, windows, rows that generate, more tokens than a slab, on every instruction set.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "abi.h"

enum { VOCAB = 100, HIDDEN = 128, HEADS = 4, KV_HEADS = 2, SIZE = 32, INNER = 608, MAX_LEN = 1024, SLOTS = 3 };

static uint32_t state;
static float draw(void) { return (float)((state = state * 1664525u + 1013904223u) >> 8) / (float)(1 << 24) - 0.5f; }

/* The same ones in every program, whatever else was drawn before. */
static void *numbers(int64_t n, int64_t format) {
    state = (uint32_t)n;
    void *memory = malloc((size_t)(format == TN_INT4 ? n / 2 : n * (format == TN_F32 ? 4 : format == TN_BF16 ? 2 : 1)));
    for (int64_t i = 0; i < n; i++) {
        const float x = draw();
        uint32_t bits;
        memcpy(&bits, &x, 4);
        if (format == TN_F32) ((float *)memory)[i] = x;
        if (format == TN_BF16) ((uint16_t *)memory)[i] = (uint16_t)(bits >> 16);
        if (format == TN_INT8 || format == TN_GROUPED_INT8 || format == TN_GROUPED_FP8) ((int8_t *)memory)[i] = (int8_t)(x * 200);
        if (format == TN_INT4 && i < n / 2) ((uint8_t *)memory)[i] = (uint8_t)(128 + x * 200);
    }
    return memory;
}

/* TN_INT4 with offsets, in larger groups, and in another order; and with levels */
enum { ZERO_POINTS = TN_GROUPED_FP8 + 1, LEVELS };
static const tn_levels levels = {{-9, -7, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 8, 10}, {-9, -7, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 8, 10}, 1};

static tn_linear linear(int64_t n, int64_t k, int64_t kind) {
    int64_t format = kind >= ZERO_POINTS ? TN_INT4 : kind;
    /* As --quantization int4 does, and as checkpoints do that leave layers in full precision. */
    if (format == TN_INT4 && k % 128 != 0) format = kind >= ZERO_POINTS ? TN_BF16 : TN_INT8;
    tn_linear l = {.weight = numbers(n * k, format), .bias = numbers(n, TN_F32), .n = n, .k = k, .format = format, .group = kind == ZERO_POINTS ? 128 : 64};
    if (format == TN_INT4) {
        const uint8_t *codes = l.weight;
        float *totals = calloc((size_t)n, 4), *scales = numbers(n * k / l.group, TN_F32);
        for (int64_t i = 0; i < n * k; i++) {
            const int pair = codes[i / 128 * 64 + i % 64], code = i % 128 < 64 ? pair & 15 : pair >> 4;
            totals[i / k] += (kind == LEVELS ? levels.numbers[code] : (float)(code < 8 ? code : code - 16)) * scales[i / l.group];
        }
        l.scales = scales, l.sums = totals;
        if (kind == LEVELS) l.levels = &levels;
        if (kind == ZERO_POINTS) l.offsets = numbers(n * k / l.group, TN_F32);
    }
    if (format >= TN_GROUPED_INT8) l.group = 16, l.scales = numbers(n * k / 16, TN_F32), l.offsets = numbers(n * k / 16, TN_F32);
    if (kind == ZERO_POINTS || format == TN_GROUPED_INT8) {
        int32_t *order = malloc((size_t)k * 4);
        for (int64_t i = 0; i < k; i++) order[i] = (int32_t)(k - 1 - i);
        l.order = order;
    }
    if (format != TN_INT8) return l;
    float *scales = malloc((size_t)n * 4);
    int32_t *sums = calloc((size_t)n, 4);
    for (int64_t i = 0; i < n; i++) {
        scales[i] = 0.01f;
        for (int64_t j = 0; j < k; j++) sums[i] += ((const int8_t *)l.weight)[i * k + j];
    }
    l.scales = scales, l.sums = sums;
    return l;
}

static void drop(tn_linear *l) { free((void *)l->weight), free((void *)l->bias), free((void *)l->scales), free((void *)l->offsets), free((void *)l->sums), free((void *)l->order); }

static int run(int64_t isa, int64_t format, int64_t threads, int64_t page_size, int64_t window, int32_t prompt, int shown) {
    const int64_t real = format == TN_F32 ? TN_F32 : TN_BF16, columns = (MAX_LEN + page_size - 1) / page_size, pages = SLOTS * columns + 1;
    tn_layer layers[2];
    for (int i = 0; i < 2; i++)
        layers[i] = (tn_layer){
            numbers(HIDDEN, TN_F32), numbers(HIDDEN, TN_F32), numbers(SIZE, TN_F32), numbers(SIZE, TN_F32), numbers(MAX_LEN * SIZE / 2, TN_F32), numbers(MAX_LEN * SIZE / 2, TN_F32),
            numbers(pages * page_size * KV_HEADS * SIZE, real), numbers(pages * page_size * KV_HEADS * SIZE, real),
            linear((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN, format), linear(HIDDEN, HEADS * SIZE, format), linear(2 * INNER, HIDDEN, format), linear(HIDDEN, INNER, format),
            0.2, i == 0 ? window : 0, 0,
        };
    tn_model model = {layers, numbers(VOCAB * HIDDEN, real), numbers(HIDDEN, TN_F32), linear(VOCAB, HIDDEN, real), 1e-6, 2, HIDDEN, HEADS, KV_HEADS, SIZE, INNER, real, real, page_size};
    tn_engine *engine = tn_create(&model, threads, isa, 1);
    int32_t *table = malloc((size_t)(SLOTS * columns) * 4);
    for (int64_t i = 0; i < SLOTS * columns; i++) table[i] = (int32_t)(i + 1);
    int64_t last[SLOTS] = {1, 2, 3}, *ids = malloc(700 * 8), tokens[SLOTS];
    for (int i = 0; i < 700; i++) ids[i] = i * 7 % VOCAB;
    float *logits = malloc(SLOTS * VOCAB * 4);
    int32_t slots[SLOTS] = {0, 1, 2}, starts[SLOTS] = {0, 0, 0};
    /* Counts of each row in each step; rows with one token before num_decodes generate. */
    const int32_t counts[][SLOTS] = {{prompt, 17, 33}, {1, 70, 5}, {1, 1, 1}, {1, 1, 90}};
    static const int64_t decodes[] = {0, 1, 3, 2};
    int bad = 0;
    for (int i = 0; i < 4; i++) {
        const uint8_t samples[SLOTS] = {1, i != 1, 1};
        const int64_t sampled = 2 + samples[1];
        tn_step step = {slots, starts, counts[i], samples, ids, last, {table}, logits, columns, SLOTS, decodes[i]};
        tn_run(engine, &step);
        if (sampled == SLOTS) {
            tn_argmax(engine, &step, tokens);
            for (int64_t j = 0; j < sampled; j++) bad |= tokens[j] < 0 || tokens[j] >= VOCAB || last[j] != tokens[j];
        }
        for (int64_t j = 0; j < SLOTS; j++) last[j] = 5 * i + j; /* whatever was generated */
        if (shown) printf("%d %d %d %d:", (int)isa, (int)format, (int)threads, i);
        for (int64_t j = 0; shown && j < sampled * VOCAB; j++) printf(j + 1 < sampled * VOCAB ? " %.8g" : " %.8g\n", logits[j]);
        for (int r = 0; r < SLOTS; r++) starts[r] += counts[i][r];
    }
    tn_destroy(engine);
    for (int i = 0; i < 2; i++) {
        tn_layer *l = &layers[i];
        free((void *)l->input_norm), free((void *)l->post_norm), free((void *)l->q_norm), free((void *)l->k_norm), free((void *)l->cos), free((void *)l->sin), free(l->keys), free(l->values);
        drop(&l->qkv), drop(&l->o), drop(&l->gate_up), drop(&l->down);
    }
    free((void *)model.embedding), free((void *)model.final_norm), drop(&model.head), free(table), free(ids), free(logits);
    return bad;
}

/* The first argument: tokens of the longest prompt, up to 650. If it is left away they are more than a slab with one
 * thread, and more than the window with several ones. With a second one the logits are printed, behind instruction set,
 * format, threads and number of the step. */
int main(int number, char **arguments) {
    const int32_t prompt = number > 1 ? atoi(arguments[1]) : 520;
    const int32_t windowed = number > 1 ? prompt : 320;
    int bad = 0;
    for (int64_t isa = TN_GENERIC; isa <= tn_best_isa(); isa++)
        for (int64_t format = TN_F32; tn_has_isa(isa) && format <= LEVELS; format++) {
            bad |= run(isa, format, 1, 16, 40, prompt, number > 2);
            bad |= run(isa, format, 3, isa == TN_GENERIC ? 5 : 32, 300, windowed, number > 2);
        }
    printf(bad ? "NaN\n" : "sound to %d\n", (int)tn_best_isa());
    return bad;
}
