/* Attention of prompts in tiles (AMX), for caches in bf16.
 *
 * Everything is transposed: keys are the left side of the scores, as they lie in their pages, and a tile
 * of scores is [16 keys][16 queries], so that the softmax works on lanes and never across them. Its
 * weights are then the right side of the product with the values, whose left side, values transposed, is
 * made once for all queries of a piece of work.
 */
#include "internal.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#define TARGET __attribute__((target("amx-tile,amx-bf16,amx-int8,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#define FN(name) name##_tiles
#include "lanes.inc"

#define KEYS 256 /* of a block */
#define TILES (TN_TILED_QUERIES / 16)

struct tn_tiled_attention {
    float largest[TN_TILED_QUERIES], total[TN_TILED_QUERIES];
    float scores[2][KEYS * 16];         /* [tile][key][query] */
    uint32_t weights[2][KEYS / 2 * 16]; /* [tile][pair of keys][query] */
    char rest[]; /* queries, values, output */
};

/* Where the parts lie that depend on the head size d. */
typedef struct {
    uint32_t *queries; /* [tile][d / 2][16] */
    uint32_t *values;  /* [d][KEYS / 2] */
    float *output;     /* [tile][d][16] */
    uint32_t *rows;    /* [16][d / 2] */
} parts;

static parts parts_of(struct tn_tiled_attention *scratch, int64_t d) {
    parts p;
    p.queries = (uint32_t *)(((uintptr_t)scratch->rest + 63) / 64 * 64);
    p.values = p.queries + TILES * 16 * (d / 2);
    p.output = (float *)(p.values + d * (KEYS / 2));
    p.rows = (uint32_t *)(p.output + TILES * 16 * d);
    return p;
}

int64_t tn_tiled_attention_bytes(const tn_model *model) {
    const int64_t d = model->head_size;
    return (int64_t)sizeof(struct tn_tiled_attention) + 64 + 4 * (TILES * 16 * (d / 2) + d * (KEYS / 2) + TILES * 16 * d + 16 * d);
}

int tn_attends_in_tiles(const tn_engine *engine) {
    const tn_model *model = &engine->model;
    return engine->isa >= TN_AMX && model->cache_format == TN_BF16 && model->page_size > 0 && model->page_size % 16 == 0;
}

/* Values of keys [base, end) as [feature][pair of keys]; what is not in [begin, end) counts as zero. */
TARGET static void turn_values(const tn_model *model, const parts *p, const bf16 *values, const int32_t *pages, int64_t kv_head, int64_t base, int64_t begin, int64_t end) {
    const int64_t d = model->head_size, stride = model->kv_heads * d, size = model->page_size;
    const int64_t until = (end - base + 31) / 32 * 32;
    for (int64_t key = 0; key < until; key += 32) { /* sixteen pairs */
        const bf16 *rows[32];
        for (int64_t j = 0; j < 32; j++) {
            const int64_t at = base + key + j;
            rows[j] = at < begin || at >= end ? NULL : values + ((int64_t)pages[at / size] * size + at % size) * stride + kv_head * d;
        }
        for (int64_t i = 0; i < d; i += 16) {
            __m512i pairs[16];
            for (int64_t j = 0; j < 16; j++) {
                const bf16 *even = rows[2 * j], *odd = rows[2 * j + 1];
                const __m512i low = even == NULL ? _mm512_setzero_si512() : _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(even + i)));
                const __m512i high = odd == NULL ? _mm512_setzero_si512() : _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(odd + i)));
                pairs[j] = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
            }
            tn_transpose16((const float *)pairs, 16, (float *)(p->values + i * (KEYS / 2) + key / 2), KEYS / 2, 0);
        }
    }
}

/* Scores of the keys of a block for one tile of queries or two, which lie one behind the other. */
TARGET static void score(const tn_model *model, struct tn_tiled_attention *scratch, const uint32_t *queries, int both, const bf16 *keys, const int32_t *pages, int64_t kv_head, int64_t base, int64_t from, int64_t end) {
    const int64_t d = model->head_size, stride = model->kv_heads * d, size = model->page_size;
    const uint32_t *others = queries + d / 2 * 16;
    TN_STORED();
    for (int64_t key = from; key < end; key += 32) {
        const int two = key + 16 < end;
        const bf16 *upper = keys + ((int64_t)pages[key / size] * size + key % size) * stride + kv_head * d;
        const bf16 *lower = two ? keys + ((int64_t)pages[(key + 16) / size] * size + (key + 16) % size) * stride + kv_head * d : upper;
        float *first = scratch->scores[0] + (key - base) * 16, *second = scratch->scores[1] + (key - base) * 16;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t i = 0; i < d; i += 32) {
            _tile_loadd(6, queries + i / 2 * 16, 64);
            _tile_loadd(4, upper + i, stride * 2);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, lower + i, stride * 2);
            _tile_dpbf16ps(1, 5, 6);
            if (both) {
                _tile_loadd(7, others + i / 2 * 16, 64);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, first, 64);
        if (two) _tile_stored(1, first + 256, 64);
        if (both) _tile_stored(2, second, 64);
        if (both && two) _tile_stored(3, second + 256, 64);
    }
}

/* exp(x · factor - shift), which is no more than one; 0 below exp(-87), NaN of NaN */
TARGET static inline v16 weight_of(v16 x, v16 factor, v16 shift) {
    const v16 y = x * factor - shift, whole = (v16)_mm512_roundscale_ps((__m512)(y * 1.44269504088896341f), 0);
    const v16 rest = (y - whole * 0.693359375f) - whole * -2.12194440e-4f;
    v16 z = (v16){} + 1.9875691500e-4f;
    z = z * rest + 1.3981999507e-3f;
    z = z * rest + 8.3334519073e-3f;
    z = z * rest + 4.1665795894e-2f;
    z = z * rest + 1.6666665459e-1f;
    z = z * rest + 5.0000001201e-1f;
    z = z * (rest * rest) + rest + 1.0f;
    const __mmask16 large = _mm512_cmp_ps_mask((__m512)y, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    return (v16)_mm512_maskz_scalef_ps(large, (__m512)z, (__m512)whole);
}

/* Sixteen queries and the keys that each of them sees: those from after on and before upto. */
typedef struct {
    int32_t after[16], upto[16];
    float *largest, *total;
} lanes;

/* Scores to weights; returns by how much what came before shrinks, a query a lane. Keys from - base and on have
 * scores. */
TARGET static v16 soften(float *scores, uint32_t *weights, float scale, int64_t from, int64_t end, int64_t base, const lanes *q) {
    const v16 before = load_f32_tiles(q->largest), none = (v16){} - __builtin_inff();
    v16 most = before, factor = (v16){} + scale;
    if (q->after[15] <= from && q->upto[0] >= end) {
        for (int64_t key = from; key < end; key++) most = (v16)_mm512_max_ps((__m512)(load_f32_tiles(scores + (key - base) * 16) * scale), (__m512)most);
    } else {
        i16 after, upto;
        memcpy(&after, q->after, sizeof after);
        memcpy(&upto, q->upto, sizeof upto);
        for (int64_t key = from; key < end; key++) {
            float *at = scores + (key - base) * 16;
            const i16 number = (i16){} + (int32_t)key, seen = (number >= after) & (number < upto);
            const v16 masked = (v16)(((i16)(load_f32_tiles(at) * scale) & seen) | ((i16)none & ~seen));
            store_tiles(at, masked);
            most = max_tiles(masked, most);
        }
        factor = (v16){} + 1.0f;
    }
    /* A query that has seen nothing yet: its weights are zero, whatever they are compared with. */
    const v16 shift = (v16)((i16)most & ~(i16)(most == none));
    v16 sum = {};
    for (int64_t key = from; key < end; key += 2) {
        const float *at = scores + (key - base) * 16;
        const v16 even = weight_of(load_f32_tiles(at), factor, shift), odd = key + 1 < end ? weight_of(load_f32_tiles(at + 16), factor, shift) : (v16){};
        sum += even + odd;
        const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)even)), high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)odd));
        _mm512_storeu_si512(weights + (key - base) / 2 * 16, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
    const int64_t last = (end - base + 31) / 32 * 32; /* of the last tile */
    for (int64_t key = (end - base + 1) / 2 * 2; key < last; key += 2) memset(weights + key / 2 * 16, 0, 64);
    const v16 keep = weight_of(before, (v16){} + 1.0f, shift);
    store_tiles(q->largest, most);
    store_tiles(q->total, load_f32_tiles(q->total) * keep + sum);
    return keep;
}

/* output += valuesᵀ · weights, for keys [from, end) of the block and one tile of queries or two. */
TARGET static void mix(struct tn_tiled_attention *scratch, const parts *p, float *output, int both, int64_t d, int64_t from, int64_t end, int64_t base) {
    const int64_t first = (from - base) / 32 * 32, last = (end - base + 31) / 32 * 32;
    float *others = output + d * 16;
    TN_STORED();
    for (int64_t i = 0; i < d; i += 32) {
        _tile_loadd(0, output + i * 16, 64);
        _tile_loadd(1, output + (i + 16) * 16, 64);
        if (both) {
            _tile_loadd(2, others + i * 16, 64);
            _tile_loadd(3, others + (i + 16) * 16, 64);
        }
        for (int64_t key = first; key < last; key += 32) {
            _tile_loadd(6, scratch->weights[0] + key / 2 * 16, 64);
            _tile_loadd(4, p->values + i * (KEYS / 2) + key / 2, KEYS * 2);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, p->values + (i + 16) * (KEYS / 2) + key / 2, KEYS * 2);
            _tile_dpbf16ps(1, 5, 6);
            if (both) {
                _tile_loadd(7, scratch->weights[1] + key / 2 * 16, 64);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, output + i * 16, 64);
        _tile_stored(1, output + (i + 16) * 16, 64);
        if (both) {
            _tile_stored(2, others + i * 16, 64);
            _tile_stored(3, others + (i + 16) * 16, 64);
        }
    }
}

/* Tokens [token, token + count) of the slab, which begin at a position of the sequence, for one KV head. */
TARGET void tn_tiled_attention(tn_engine *engine, int thread, const tn_layer *layer, const int32_t *pages, int64_t kv_head, int64_t token, int64_t count, int64_t position) {
    const tn_model *model = &engine->model;
    struct tn_tiled_attention *scratch = engine->thread[thread].tiled;
    const int64_t d = model->head_size, group = model->heads / model->kv_heads, number = count * group, tiles = (number + 15) / 16;
    const int64_t width = (model->heads + 2 * model->kv_heads) * d, end = position + count;
    const parts p = parts_of(scratch, d);
    for (int64_t q = 0; q < number; q++) {
        const float *from = engine->qkv + (token + q / group) * width + (kv_head * group + q % group) * d;
        engine->kernels.to_bf16(from, d, (bf16 *)(p.rows + q % 16 * (d / 2)));
        if (q % 16 == 15 || q + 1 == number) tn_pack_pairs(p.rows, d / 2, q % 16 + 1, d / 2, p.queries + q / 16 * 16 * (d / 2));
    }
    for (int64_t q = 0; q < tiles * 16; q++) scratch->largest[q] = -__builtin_inff(), scratch->total[q] = 0.0f;
    memset(p.output, 0, (size_t)(tiles * 16 * d) * sizeof(float));
    const int64_t begin = layer->window > 0 && position + 1 > layer->window ? position + 1 - layer->window : 0;
    for (int64_t base = begin / KEYS * KEYS; base < end; base += KEYS) {
        const int64_t first = base > begin ? base : begin, last = end < base + KEYS ? end : base + KEYS;
        turn_values(model, &p, layer->values, pages, kv_head, base, first, last);
        for (int64_t tile = 0; tile < tiles; tile += 2) {
            const int both = tile + 1 < tiles;
            lanes queries[2];
            for (int64_t q = 0; q < 32; q++) {
                lanes *to = &queries[q / 16];
                const int64_t at = position + (tile * 16 + q) / group;
                to->upto[q % 16] = (int32_t)(at + 1);
                to->after[q % 16] = layer->window > 0 && at + 1 > layer->window ? (int32_t)(at + 1 - layer->window) : 0;
                to->largest = scratch->largest + (tile + q / 16) * 16, to->total = scratch->total + (tile + q / 16) * 16;
            }
            /* Nothing before what the first query sees, nothing behind the last query. */
            const int64_t behind = queries[both].upto[15], from = (queries[0].after[0] > first ? queries[0].after[0] : first) / 32 * 32, until = behind < last ? behind : last;
            if (from >= until) continue;
            const int64_t start = from < base ? base : from;
            float *output = p.output + tile * 16 * d;
            score(model, scratch, p.queries + tile * 16 * (d / 2), both, layer->keys, pages, kv_head, base, start, until);
            for (int64_t i = 0; i <= both; i++) {
                const v16 keep = soften(scratch->scores[i], scratch->weights[i], (float)layer->scale, start, until, base, &queries[i]);
                for (int64_t j = i * d * 16; j < (i + 1) * d * 16; j += 16) store_tiles(output + j, load_f32_tiles(output + j) * keep);
            }
            mix(scratch, &p, output, both, d, start, until, base);
        }
    }
    for (int64_t tile = 0; tile < tiles; tile++) {
        float *output = p.output + tile * 16 * d, *rows = (float *)p.rows;
        const v16 factor = 1.0f / load_f32_tiles(scratch->total + tile * 16);
        for (int64_t i = 0; i < d * 16; i += 16) store_tiles(output + i, load_f32_tiles(output + i) * factor);
        for (int64_t i = 0; i < d; i += 16) tn_transpose16(output + i * 16, 16, rows + i, d, 0);
        for (int64_t q = tile * 16; q < number && q < tile * 16 + 16; q++)
            memcpy(engine->attended + ((token + q / group) * model->heads + kv_head * group + q % group) * d, rows + (q - tile * 16) * d, (size_t)d * sizeof(float));
    }
}
#endif
