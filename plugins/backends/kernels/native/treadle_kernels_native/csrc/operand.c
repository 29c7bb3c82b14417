/* The left side of a linear layer: rounded, quantized or laid out in tiles, once for each layer that
 * reads it.
 *
 * Tiles hold sixteen rows: [block][k / w][16 rows][w], where w elements make 32 bits. That is how AMX
 * wants its right side, and activations are the right side there, so that weights stay as the checkpoint
 * has them: mapped, in one copy, and readable by torch.
 */
#include <string.h>

#include "internal.h"

/* From so many rows on, tiles pay. */
#define TILE_ROWS 4

/* The rows from which on weights of groups are better unpacked. Where bytes are multiplied by bytes in one instruction
 * but not in tiles, and where registers are short, they are not. */
static int64_t unpack_rows(const tn_engine *engine, int tiles) { return tiles ? 8 : engine->isa == TN_AVX512 ? 24 : INT64_MAX; }

int tn_operand_kind(const tn_engine *engine, const tn_linear *linear, int64_t m) {
    const int tiles = engine->isa == TN_AMX && m >= TILE_ROWS && linear->n >= 32;
    switch (linear->format) {
    case TN_F32:
        return TN_ROWS_F32;
    case TN_INT4: /* the groups of a row have scales of their own, which costs a step for each product of one */
    case TN_GROUPED_INT8:
        if (m < unpack_rows(engine, tiles) && tn_takes_uint8(linear)) return TN_ROWS_UINT8;
        /* fall through */
    case TN_GROUPED_FP8:
    case TN_BF16:
        if (tiles && linear->k % 32 == 0) return TN_TILES_BF16;
        return engine->kernels.dot_bf16 != NULL ? TN_ROWS_BF16 : TN_ROWS_F32;
    default:
        return tiles && linear->k % 64 == 0 ? TN_TILES_UINT8 : TN_ROWS_UINT8;
    }
}

/* Of the numbers that codes stand for, with zero taken away. */
static void sum_groups(const uint8_t *codes, int64_t zero, int64_t group, int64_t groups, float *sums) {
    for (int64_t i = 0; i < groups; i++) {
        int32_t total = 0;
        for (int64_t j = 0; j < group; j++) total += (int8_t)(codes[i * group + j] - zero);
        sums[i] = (float)total;
    }
}

void tn_operand_fill(const tn_engine *engine, tn_operand *operand, const float *x, int64_t ldx, int64_t first, int64_t count) {
    const int64_t k = operand->k;
    const tn_kernels *kernels = &engine->kernels;
#if defined(__x86_64__)
    _Alignas(64) uint32_t words[16 * 32]; /* sixteen rows of 32 words */
#endif
    switch (operand->kind) {
    case TN_ROWS_F32:
        for (int64_t r = 0; r < count; r++) memcpy((float *)operand->data + (first + r) * k, x + r * ldx, (size_t)k * sizeof(float));
        return;
    case TN_ROWS_BF16:
        for (int64_t r = 0; r < count; r++) kernels->to_bf16(x + r * ldx, k, (bf16 *)operand->data + (first + r) * k);
        return;
    case TN_ROWS_UINT8:
        for (int64_t r = first; r < first + count; r++) {
            uint8_t *codes = (uint8_t *)operand->data + r * k;
            operand->scales[r] = kernels->to_uint8(x + (r - first) * ldx, k, codes);
            if (operand->group > 0) sum_groups(codes, kernels->zero, operand->group, k / operand->group, operand->sums + r * (k / operand->group));
        }
        return;
#if defined(__x86_64__)
    case TN_TILES_BF16:
        for (int64_t i = 0; i < k; i += 64) { /* 32 words of two */
            const int64_t width = k - i < 64 ? k - i : 64;
            for (int64_t r = 0; r < count; r++) kernels->to_bf16(x + r * ldx + i, width, (bf16 *)(words + r * 32));
            tn_pack_pairs(words, 32, count, width / 2, (uint32_t *)operand->data + first * (k / 2) + i / 2 * 16);
        }
        return;
    case TN_TILES_UINT8: {
        uint8_t *rows = (uint8_t *)operand->data + (operand->room + first) * k; /* rows lie behind the tiles */
        for (int64_t r = 0; r < count; r++) operand->scales[first + r] = kernels->to_uint8(x + r * ldx, k, rows + r * k);
        tn_pack_pairs((const uint32_t *)rows, k / 4, count, k / 4, (uint32_t *)operand->data + first * (k / 4));
        return;
    }
#endif
    }
}
