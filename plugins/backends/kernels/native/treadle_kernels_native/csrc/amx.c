/* Products in tiles (AMX): weights are the left side, row by row as they are stored, activations the
 * right side, which operand.c has laid out. A result is therefore transposed: [feature][16 rows of x].
 */
#include "internal.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define AMX __attribute__((target("amx-tile,amx-bf16,amx-int8,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_config;

AMX void tn_amx_begin(void) {
    _Alignas(64) tile_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
    /* Some compilers believe that the instruction reads no more than a pointer of it. */
    __asm__ volatile("" ::"r"(&config) : "memory");
    _tile_loadconfig(&config);
}

AMX void tn_amx_end(void) { _tile_release(); }

/* Sixteen rows of the weight into a tile. The first blocks read them where they are stored, at any address
 * and far from one another, and leave them in the panel for the others. */
#define LOAD(tile, rows, at) \
    if (b > 0) { \
        _tile_loadd(tile, panel + (at), 64); \
    } else { \
        _tile_loadd(tile, rows + i * 4, stride); \
        if (blocks > 2) _tile_stored(tile, panel + (at), 64); \
    }

/* Two tiles of x into the L1 cache, before they are read: a tile waits for each of its lines. What lies behind
 * the last words is what the next blocks begin with. */
#define AHEAD 32
#define PREFETCH_BLOCKS(at) \
    for (int64_t r = 0; r < 16; r++) { \
        __builtin_prefetch((at) + r * 16, 0, 3); \
        __builtin_prefetch((at) + (words + r) * 16, 0, 3); \
    }

/* Tiles 0 to 3 are results: 32 features for two blocks of sixteen rows, of words [from, to) of each row. What
 * earlier words made is in the result already. What the next panel needs is asked for by and by: where few blocks
 * read it, the machine does so better itself. */
#define PRODUCT(multiply) \
    for (int64_t b = 0; b < blocks; b += 2) { \
        const int two = b + 1 < blocks; \
        const uint32_t *left = x + b * 16 * words, *right = two ? left + 16 * words : left; \
        float *sums = result + b * 512; \
        const int64_t first = b * 32 / blocks, last = b + 2 < blocks ? (b + 2) * 32 / blocks : 32; \
        if (from == 0) { \
            _tile_zero(0); \
            _tile_zero(1); \
            _tile_zero(2); \
            _tile_zero(3); \
        } else { \
            _tile_loadd(0, sums, 64); \
            _tile_loadd(1, sums + 256, 64); \
            _tile_loadd(2, sums + (two ? 512 : 0), 64); \
            _tile_loadd(3, sums + (two ? 768 : 256), 64); \
        } \
        for (int64_t i = from; i < to; i += 16) { \
            for (int64_t r = first; next != NULL && r < last; r++) __builtin_prefetch(next + r * stride + (i - from) * 4, 0, 2); \
            if (blocks > 2) PREFETCH_BLOCKS(i + AHEAD < to ? left + (i + AHEAD) * 16 : left + (32 * words) + (i + AHEAD - to + from) * 16) \
            _tile_loadd(6, left + i * 16, 64); \
            LOAD(4, upper, (i - from) * 32) \
            multiply(0, 4, 6); \
            LOAD(5, lower, (i - from) * 32 + 256) \
            multiply(1, 5, 6); \
            if (two) { \
                _tile_loadd(7, right + i * 16, 64); \
                multiply(2, 4, 7); \
                multiply(3, 5, 7); \
            } \
        } \
        _tile_stored(0, sums, 64); \
        _tile_stored(1, sums + 256, 64); \
        if (two) { \
            _tile_stored(2, sums + 512, 64); \
            _tile_stored(3, sums + 768, 64); \
        } \
    }

/* From whole numbers to floats, in place: the sums of codes, without the 128 that made them positive. */
AMX static void scale_tiles(const tn_linear *linear, int64_t n0, const tn_operand *x, int64_t blocks, float *result) {
    for (int64_t b = 0; b < blocks; b++) {
        const __m512 rows = _mm512_loadu_ps(x->scales + b * 16);
        for (int64_t c = 0; c < 32; c++) {
            float *at = result + (b * 32 + c) * 16;
            const __m512i sums = _mm512_sub_epi32(_mm512_loadu_si512(at), _mm512_set1_epi32(128 * ((const int32_t *)linear->sums)[n0 + c]));
            const __m512 scales = _mm512_mul_ps(rows, _mm512_set1_ps(linear->scales[n0 + c]));
            _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_cvtepi32_ps(sums), scales));
        }
    }
}

AMX static void add_bias(const float *bias, int64_t blocks, float *result) {
    for (int64_t i = 0; i < blocks * 32; i++) _mm512_storeu_ps(result + i * 16, _mm512_add_ps(_mm512_loadu_ps(result + i * 16), _mm512_set1_ps(bias[i % 32])));
}

/* Words [from, to) of 32 rows of the weight, for all blocks. next: where the words of the panel behind this one begin */
AMX static void panel_product(const tn_linear *linear, int64_t n0, const uint32_t *x, int64_t blocks, int64_t from, int64_t to, const uint8_t *next, uint32_t *panel, float *result) {
    const int64_t size = linear->format == TN_BF16 ? 2 : 1, words = linear->k * size / 4, stride = linear->k * size;
    const uint8_t *upper = (const uint8_t *)linear->weight + n0 * stride, *lower = upper + 16 * stride;
    if (linear->format == TN_BF16) {
        PRODUCT(_tile_dpbf16ps)
    } else {
        PRODUCT(_tile_dpbsud)
    }
}

AMX void tn_amx_product(const tn_linear *linear, int64_t n0, int64_t panels, const tn_operand *x, int64_t blocks, uint32_t *panel, float *result) {
    const int64_t words = linear->k * (linear->format == TN_BF16 ? 2 : 1) / 4, part = blocks > 2 ? TN_PART : words;
    TN_STORED();
    for (int64_t from = 0; from < words; from += part)
        for (int64_t i = 0; i < panels; i++) {
            const int64_t row = i + 1 < panels ? n0 + 32 * (i + 1) : n0, word = i + 1 < panels ? from : from + part;
            const uint8_t *next = blocks > 2 && word < words ? (const uint8_t *)linear->weight + (row * words + word) * 4 : NULL;
            panel_product(linear, n0 + 32 * i, x->data, blocks, from, words - from < part ? words : from + part, next, panel, result + i * blocks * 512);
        }
    for (int64_t i = 0; i < panels; i++) {
        if (linear->format != TN_BF16) scale_tiles(linear, n0 + 32 * i, x, blocks, result + i * blocks * 512);
        if (linear->bias != NULL) add_bias(linear->bias + n0 + 32 * i, blocks, result + i * blocks * 512);
    }
}

/* Sixteen registers of sixteen words, transposed: pairs, quadruples, then quarters of registers. */
#define TRANSPOSE(r) \
    for (int i = 0; i < 16; i += 2) { \
        const __m512i a = _mm512_unpacklo_epi32(r[i], r[i + 1]), b = _mm512_unpackhi_epi32(r[i], r[i + 1]); \
        r[i] = a, r[i + 1] = b; \
    } \
    for (int i = 0; i < 16; i += 4) { \
        const __m512i a = _mm512_unpacklo_epi64(r[i], r[i + 2]), b = _mm512_unpackhi_epi64(r[i], r[i + 2]); \
        const __m512i c = _mm512_unpacklo_epi64(r[i + 1], r[i + 3]), d = _mm512_unpackhi_epi64(r[i + 1], r[i + 3]); \
        r[i] = a, r[i + 1] = b, r[i + 2] = c, r[i + 3] = d; \
    } \
    for (int i = 0; i < 4; i++) { \
        const __m512i a = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88), b = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd); \
        const __m512i c = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88), d = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd); \
        r[i] = _mm512_shuffle_i32x4(a, c, 0x88), r[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd); \
        r[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88), r[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd); \
    }

AMX void tn_transpose16(const float *x, int64_t ldx, float *y, int64_t ldy, int add) {
    __m512i r[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(x + i * ldx);
    TRANSPOSE(r)
    for (int i = 0; i < 16; i++) {
        __m512 value = _mm512_castsi512_ps(r[i]);
        if (add) value = _mm512_add_ps(value, _mm512_loadu_ps(y + i * ldy));
        _mm512_storeu_ps(y + i * ldy, value);
    }
}

/* Words of up to sixteen rows, side by side: tiles[word][16]. Rows that are missing become zeros. */
AMX void tn_pack_pairs(const uint32_t *rows, int64_t ld, int64_t count, int64_t words, uint32_t *tiles) {
    for (int64_t i = 0; i < words; i += 16) {
        __m512i r[16];
        for (int j = 0; j < 16; j++) r[j] = j < count ? _mm512_loadu_si512(rows + j * ld + i) : _mm512_setzero_si512();
        TRANSPOSE(r)
        for (int j = 0; j < 16; j++) _mm512_storeu_si512(tiles + (i + j) * 16, r[j]);
    }
}

/* y[2 i] = even[i], y[2 i + 1] = odd[i], of sixteen rows. */
AMX void tn_interleave_bf16(const float *even, const float *odd, bf16 *y) {
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(even)));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(odd)));
    _mm512_storeu_si512(y, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}
#endif
