/* Linear layers: a piece of work is some rows of the weight, for all rows of x.
 *
 * Pieces have about as many bytes, whatever the shape, and threads take them one after the other, so
 * that a single row of x keeps every core reading memory.
 */
#include <string.h>

#include "internal.h"

#define PIECE_BYTES (512 << 10)
#define PIECE_ROWS 256 /* at most; engine.c makes room for so many results a token */
#define MANY 64        /* rows of x from which on tiles gain by large pieces */
#define ROW_BLOCK 48   /* rows of x whose results a piece collects at a time */
#define FEW_ROWS 32    /* rows of a weight that are unpacked at a time where rows of x are multiplied, not tiles */

static int is_tiled(const tn_operand *x) { return x->kind == TN_TILES_BF16 || x->kind == TN_TILES_UINT8; }

/* Rows of weights in a piece: a multiple of 32, fewer where threads would be left without. */
static int64_t piece_rows(const tn_engine *engine, const tn_linear *linear, const tn_operand *x, int64_t m, int64_t n) {
    int64_t rows = PIECE_BYTES * 8 / (linear->k * tn_weight_bits(linear)) / 32 * 32;
    if (is_tiled(x) && m >= MANY) rows = PIECE_ROWS;
    const int64_t share = (n / (2 * engine->threads) + 31) / 32 * 32;
    if (rows > share) rows = share;
    if (rows > PIECE_ROWS) rows = PIECE_ROWS;
    return rows < 32 ? 32 : rows;
}

/* Results [count][width] of rows [first, first + count) of x and rows [n0, n0 + width) of the weight. */
static void product(const tn_engine *engine, const tn_linear *linear, const tn_operand *x, int64_t first, int64_t count, int64_t n0, int64_t width, float *y, int64_t ldy) {
    const int64_t k = linear->k;
    const tn_kernels *kernels = &engine->kernels;
    switch (x->kind) {
    case TN_ROWS_F32: {
        const float *rows = (const float *)x->data + first * k;
        if (linear->format == TN_F32)
            kernels->dot_f32(rows, k, count, (const float *)linear->weight + n0 * k, k, width, k, y, ldy);
        else
            kernels->dot_f32_bf16(rows, k, count, (const bf16 *)linear->weight + n0 * k, k, width, k, y, ldy);
        break;
    }
    case TN_ROWS_BF16:
        kernels->dot_bf16((const bf16 *)x->data + first * k, k, count, (const bf16 *)linear->weight + n0 * k, k, width, k, y, ldy);
        break;
    case TN_ROWS_UINT8: {
        if (linear->format != TN_INT8) {
            const int64_t groups = k / linear->group;
            const float *sums = linear->sums, *offsets = tn_offsets_from(linear->offsets, n0 * groups);
            const float *x_sums = x->sums + first * groups, *scales = linear->scales + n0 * groups;
            const uint8_t *rows = (const uint8_t *)x->data + first * k, *codes = (const uint8_t *)linear->weight + n0 * k * tn_weight_bits(linear) / 8;
            if (linear->format == TN_INT4)
                kernels->dot_int4(rows, k, count, x_sums, codes, k, scales, offsets, linear->levels, linear->group, width, k, y, ldy);
            else
                kernels->dot_groups(rows, k, count, x_sums, codes, k, scales, offsets, linear->group, width, k, y, ldy);
            for (int64_t r = 0; r < count; r++)
                for (int64_t c = 0; c < width; c++) y[r * ldy + c] = (y[r * ldy + c] - (float)kernels->zero * sums[n0 + c]) * x->scales[first + r];
            break;
        }
        const int32_t *row_sums = linear->sums;
        int32_t *sums = (int32_t *)y; /* the same memory, element by element */
        kernels->dot_int8((const uint8_t *)x->data + first * k, k, count, (const int8_t *)linear->weight + n0 * k, k, width, k, sums, ldy);
        for (int64_t r = 0; r < count; r++)
            for (int64_t c = 0; c < width; c++) {
                int32_t sum;
                memcpy(&sum, y + r * ldy + c, sizeof sum);
                y[r * ldy + c] = (float)(sum - (int32_t)kernels->zero * row_sums[n0 + c]) * (linear->scales[n0 + c] * x->scales[first + r]);
            }
        break;
    }
    }
    if (linear->bias != NULL)
        for (int64_t r = 0; r < count; r++)
            for (int64_t c = 0; c < width; c++) y[r * ldy + c] += linear->bias[n0 + c];
}

/* Some rows of a weight as a layer of their own, in bf16. */
static tn_linear unpacked(const tn_engine *engine, int thread, const tn_linear *linear, int64_t n0, int64_t width) {
    const int64_t k = linear->k, groups = k / linear->group;
    const tn_kernels *kernels = &engine->kernels;
    const int64_t bytes = k * tn_weight_bits(linear) / 8;
    bf16 *to = engine->thread[thread].unpacked;
    for (int64_t r = 0; r < width; r++) {
        const uint8_t *codes = (const uint8_t *)linear->weight + (n0 + r) * bytes;
        const float *scales = linear->scales + (n0 + r) * groups, *offsets = tn_offsets_from(linear->offsets, (n0 + r) * groups);
        if (linear->format == TN_INT4)
            kernels->unpack_int4(codes, scales, offsets, linear->levels, linear->group, k, to + r * k);
        else
            (linear->format == TN_GROUPED_FP8 ? kernels->unpack_fp8 : kernels->unpack_int8)(codes, scales, offsets, linear->group, k, to + r * k);
    }
    return (tn_linear){.weight = to, .bias = linear->bias == NULL ? NULL : linear->bias + n0, .n = width, .k = k, .format = TN_BF16};
}

#if defined(__x86_64__)
/* Some times 32 rows of the weight at a time; results come transposed, [panel][block][32][16]. */
static void tiled_piece(tn_engine *engine, int thread, const tn_linear *linear, const tn_operand *x, int64_t m, int64_t n0, int64_t width, float *y, int64_t ldy, int add) {
    float *result = engine->thread[thread].columns;
    const int64_t blocks = (m + 15) / 16, most = tn_is_unpacked(linear, x) ? TN_UNPACKED / 32 : TN_PANELS;
    for (int64_t done = 0, panels; done < width; done += 32 * panels) {
        panels = (width - done) / 32 < most ? (width - done) / 32 : most;
        if (panels == 0) panels = 1;
        /* The last tile may begin early, and only its new columns are kept. */
        const int64_t begin = n0 + done + 32 * panels <= linear->n ? n0 + done : linear->n - 32, skip = n0 + done - begin;
        if (tn_is_unpacked(linear, x)) {
            const tn_linear part = unpacked(engine, thread, linear, begin, 32 * panels);
            tn_amx_product(&part, 0, panels, x, blocks, engine->thread[thread].panel, result);
        } else
            tn_amx_product(linear, begin, panels, x, blocks, engine->thread[thread].panel, result);
        for (int64_t r = 0; r < m; r += 16)
            for (int64_t i = 0; i < panels; i++) {
                const float *tile = result + (i * blocks * 16 + r) * 32;
                const int64_t rows = m - r < 16 ? m - r : 16, keep = width - done < 32 ? width - done : 32 - skip;
                float *to = y + r * ldy + begin + 32 * i;
                if (rows == 16 && keep == 32) {
                    tn_transpose16(tile, 16, to, ldy, add);
                    tn_transpose16(tile + 256, 16, to + 16, ldy, add);
                    continue;
                }
                for (int64_t c = skip; c < skip + keep; c++)
                    for (int64_t j = 0; j < rows; j++) to[j * ldy + c] = tile[c * 16 + j] + (add ? to[j * ldy + c] : 0.0f);
            }
    }
}
#endif

/* y has room for the rows [n0, n0 + width) of the weight from its first column on. */
static void rows_piece(tn_engine *engine, int thread, const tn_linear *linear, const tn_operand *x, int64_t m, int64_t n0, int64_t width, float *y, int64_t ldy, int add) {
    float *columns = engine->thread[thread].columns;
    for (int64_t first = 0; first < m; first += ROW_BLOCK) {
        const int64_t count = m - first < ROW_BLOCK ? m - first : ROW_BLOCK;
        float *to = y + first * ldy;
        if (!add) {
            product(engine, linear, x, first, count, n0, width, to, ldy);
            continue;
        }
        product(engine, linear, x, first, count, n0, width, columns, width);
        for (int64_t r = 0; r < count; r++)
            for (int64_t c = 0; c < width; c++) to[r * ldy + c] += columns[r * width + c];
    }
}

void tn_linear_run(tn_engine *engine, int thread, const tn_linear *linear, const tn_operand *x, int64_t m, float *y, int64_t ldy, int add) {
    const int64_t rows = piece_rows(engine, linear, x, m, linear->n), pieces = (linear->n + rows - 1) / rows;
    for (int64_t piece; (piece = tn_next(engine->pool)) < pieces;) {
        const int64_t n0 = piece * rows, width = linear->n - n0 < rows ? linear->n - n0 : rows;
#if defined(__x86_64__)
        if (is_tiled(x)) {
            tiled_piece(engine, thread, linear, x, m, n0, width, y, ldy, add);
            continue;
        }
#endif
        if (!tn_is_unpacked(linear, x)) {
            rows_piece(engine, thread, linear, x, m, n0, width, y + n0, ldy, add);
            continue;
        }
        for (int64_t done = 0; done < width; done += FEW_ROWS) {
            const int64_t count = width - done < FEW_ROWS ? width - done : FEW_ROWS;
            const tn_linear part = unpacked(engine, thread, linear, n0 + done, count);
            rows_piece(engine, thread, &part, x, m, 0, count, y + n0 + done, ldy, add);
        }
    }
}

int tn_makes_heads(const tn_engine *engine, const tn_linear *linear, const tn_operand *x) {
    return is_tiled(x) && !tn_is_unpacked(linear, x) && engine->model.head_size <= 32 * TN_PANELS;
}

void tn_heads_run(tn_engine *engine, int thread, const tn_layer *layer, const tn_step *step, const tn_operand *x, int64_t m) {
#if defined(__x86_64__)
    const int64_t d = engine->model.head_size, blocks = (m + 15) / 16;
    const float *result = engine->thread[thread].columns;
    float *rows = engine->thread[thread].normed;
    for (int64_t head; (head = tn_next(engine->pool)) < layer->qkv.n / d;) {
        tn_amx_product(&layer->qkv, head * d, d / 32, x, blocks, engine->thread[thread].panel, engine->thread[thread].columns);
        const tn_piece *piece = engine->pieces;
        for (int64_t block = 0; block < blocks; block++) {
            for (int64_t i = 0; i < d; i += 16) tn_transpose16(result + (i / 32 * blocks + block) * 512 + i % 32 * 16, 16, rows + i, d, 0);
            for (int64_t token = block * 16; token < m && token < block * 16 + 16; token++) {
                while (token >= piece->first + piece->count) piece++;
                tn_rope_head(engine, layer, step, piece, token - piece->first, head, rows + token % 16 * d);
            }
        }
    }
#endif
}

#if defined(__x86_64__)
/* Gate and up come transposed, and so does what down reads: pairs of features side by side for a row. */
static void tiled_gate(tn_engine *engine, int thread, const tn_linear *linear, const tn_operand *x, int64_t m, int64_t n0, int64_t width, tn_operand *y) {
    const int64_t size = linear->n / 2, blocks = (m + 15) / 16;
    float *gate = engine->thread[thread].columns, *up = gate + TN_PANELS / 2 * blocks * 512;
    for (int64_t done = 0; done < width; done += 32 * (TN_PANELS / 2)) {
        const int64_t begin = n0 + done, panels = width - done < 32 * (TN_PANELS / 2) ? (width - done) / 32 : TN_PANELS / 2;
        tn_amx_product(linear, begin, panels, x, blocks, engine->thread[thread].panel, gate);
        tn_amx_product(linear, size + begin, panels, x, blocks, engine->thread[thread].panel, up);
        engine->kernels.silu_mul(gate, up, panels * blocks * 512, gate);
        for (int64_t block = 0; block < blocks; block++) {
            bf16 *to = (bf16 *)y->data + block * 16 * y->k + begin * 16;
            for (int64_t i = 0; i < panels; i++, to += 512)
                for (int64_t c = 0; c < 32; c += 2) {
                    const float *tile = gate + (i * blocks + block) * 512 + c * 16;
                    tn_interleave_bf16(tile, tile + 16, to + c * 16);
                }
        }
    }
}
#endif

void tn_gated_run(tn_engine *engine, int thread, const tn_linear *linear, const tn_operand *x, int64_t m, tn_operand *y) {
    const int64_t size = linear->n / 2;
    const int64_t rows = (piece_rows(engine, linear, x, m, size) + 1) / 2 / 32 * 32 < 32 ? 32 : piece_rows(engine, linear, x, m, size) / 64 * 32;
    const int64_t pieces = (size + rows - 1) / rows;
    float *gate = engine->thread[thread].columns, *up = gate + ROW_BLOCK * PIECE_ROWS;
    for (int64_t piece; (piece = tn_next(engine->pool)) < pieces;) {
        const int64_t n0 = piece * rows, width = size - n0 < rows ? size - n0 : rows;
#if defined(__x86_64__)
        if (is_tiled(x)) {
            tiled_gate(engine, thread, linear, x, m, n0, width, y);
            continue;
        }
#endif
        for (int64_t first = 0; first < m; first += ROW_BLOCK) {
            const int64_t count = m - first < ROW_BLOCK ? m - first : ROW_BLOCK;
            product(engine, linear, x, first, count, n0, width, gate, width);
            product(engine, linear, x, first, count, size + n0, width, up, width);
            engine->kernels.silu_mul(gate, up, count * width, gate);
            for (int64_t r = 0; r < count; r++) {
                const int64_t at = (first + r) * size + n0;
                if (y->kind == TN_ROWS_BF16)
                    engine->kernels.to_bf16(gate + r * width, width, (bf16 *)y->data + at);
                else
                    memcpy((float *)y->data + at, gate + r * width, (size_t)width * sizeof(float));
            }
        }
    }
}
