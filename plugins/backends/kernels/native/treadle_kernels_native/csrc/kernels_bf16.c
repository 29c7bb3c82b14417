/* Products of bf16 by bf16 (vdpbf16ps), and of bytes by bytes or by codes of four bits (vpdpbusd). */
#include "internal.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define UNROLL _Pragma("GCC unroll 8")
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define BF16 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#define VNNI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
/* A single row waits for memory, which is fastest where it is read in its order and asked for this far ahead. Not of a
 * cache, where what lies behind a head (ldw > k) is not read next. */
#define PREFETCH(at) _mm_prefetch((const char *)(at) + (16 << 10), _MM_HINT_T1)
#define INLINE static inline __attribute__((always_inline))

/* The sums of the lanes of four registers, each in the order of _mm512_reduce_add_ps. */
INLINE AVX512 __m128 sum_lanes(const __m512 sums[4]) {
    const __m512 first = _mm512_add_ps(_mm512_shuffle_f32x4(sums[0], sums[1], 0x44), _mm512_shuffle_f32x4(sums[0], sums[1], 0xee));
    const __m512 second = _mm512_add_ps(_mm512_shuffle_f32x4(sums[2], sums[3], 0x44), _mm512_shuffle_f32x4(sums[2], sums[3], 0xee));
    const __m512 fours = _mm512_add_ps(_mm512_shuffle_f32x4(first, second, 0x88), _mm512_shuffle_f32x4(first, second, 0xdd));
    const __m512 twos = _mm512_add_ps(fours, _mm512_permute_ps(fours, 0x4e)), ones = _mm512_add_ps(twos, _mm512_permute_ps(twos, 0xb1));
    return _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, ones));
}

/* A single row of x takes four rows of weights, one after the other, so that lanes are added up once for four results. */
INLINE BF16 void block_bf16(const int rows, const int columns, const bf16 *x, int64_t ldx, const bf16 *w, int64_t ldw, int64_t k, float *y, int64_t ldy) {
    const int together = rows == 1 ? 1 : columns;
    __m512 sums[6][8];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int c = 0; c < columns; c++) sums[r][c] = _mm512_setzero_ps();
    UNROLL for (int begin = 0; begin < columns; begin += together)
        for (int64_t i = 0; i < k; i += 32) {
            __m512i weights[8];
            UNROLL for (int c = begin; c < begin + together; c++) weights[c] = _mm512_loadu_si512(w + c * ldw + i);
            if (rows == 1 && ldw == k) PREFETCH(w + begin * ldw + i);
            UNROLL for (int r = 0; r < rows; r++) {
                const __m512i value = _mm512_loadu_si512(x + r * ldx + i);
                UNROLL for (int c = begin; c < begin + together; c++) sums[r][c] = _mm512_dpbf16_ps(sums[r][c], (__m512bh)value, (__m512bh)weights[c]);
            }
        }
    if (rows == 1 && columns == 4)
        _mm_storeu_ps(y, sum_lanes(sums[0]));
    else
        UNROLL for (int r = 0; r < rows; r++) UNROLL for (int c = 0; c < columns; c++) y[r * ldy + c] = _mm512_reduce_add_ps(sums[r][c]);
}

INLINE VNNI void block_int8(const int rows, const int columns, const uint8_t *x, int64_t ldx, const int8_t *w, int64_t ldw, int64_t k, int32_t *y, int64_t ldy) {
    __m512i sums[6][8];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int c = 0; c < columns; c++) sums[r][c] = _mm512_setzero_si512();
    for (int64_t i = 0; i < k; i += 64) {
        __m512i weights[8];
        /* The last half of a k that is an odd multiple of 32 reads zeros. */
        const __mmask64 mask = k - i >= 64 ? ~0ull : 0xffffffffull;
        UNROLL for (int c = 0; c < columns; c++) weights[c] = _mm512_maskz_loadu_epi8(mask, w + c * ldw + i);
        if (rows == 1 && ldw == k) PREFETCH(w + i);
        UNROLL for (int r = 0; r < rows; r++) {
            const __m512i value = _mm512_maskz_loadu_epi8(mask, x + r * ldx + i);
            UNROLL for (int c = 0; c < columns; c++) sums[r][c] = _mm512_dpbusd_epi32(sums[r][c], value, weights[c]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int c = 0; c < columns; c++) y[r * ldy + c] = _mm512_reduce_add_epi32(sums[r][c]);
}

/* What offsets add: the sums of x for each group, times factor. */
INLINE VNNI void add_offsets(const int rows, const int columns, const float *x_sums, const float *offsets, int64_t groups, float factor, __m512 sums[4][4]) {
    for (int64_t i = 0; offsets != NULL && i < groups; i += 16) {
        const __mmask16 mask = groups - i >= 16 ? 0xffff : (__mmask16)((1 << (groups - i)) - 1);
        __m512 values[4];
        UNROLL for (int r = 0; r < rows; r++) values[r] = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x_sums + r * groups + i), _mm512_set1_ps(factor));
        UNROLL for (int c = 0; c < columns; c++) {
            const __m512 added = _mm512_maskz_loadu_ps(mask, offsets + c * groups + i);
            UNROLL for (int r = 0; r < rows; r++) sums[r][c] = _mm512_fmadd_ps(values[r], added, sums[r][c]);
        }
    }
}

/* The scales of 64 codes, of which each lane has four: one, or several of a group that divides them. */
INLINE VNNI __m512 lane_scales(const float *scales, __mmask16 mask, __m512i lanes) { return _mm512_permutexvar_ps(lanes, _mm512_maskz_loadu_ps(mask, scales)); }
INLINE VNNI __m512i group_lanes(int64_t group) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return group == 16 ? _mm512_srli_epi32(lanes, 2) : group == 32 ? _mm512_srli_epi32(lanes, 3) : _mm512_setzero_si512();
}

/* Codes are multiplied where they lie in their bytes, sixteen times as large, or looked up: multiples of a unit. Sums stay
 * in lanes, which are added up once, behind the last group. wide: both halves of the bytes are always of one group; -1: of
 * two each. */
INLINE VNNI void block_int4(const int wide, const tn_levels *levels, const int rows, const int columns, const uint8_t *x, int64_t ldx, const float *x_sums, const uint8_t *w, int64_t ldw, const float *scales, const float *offsets, int64_t group, int64_t k, float *y, int64_t ldy) {
    const int64_t groups = k / group;
    const __m512i upper = _mm512_set1_epi8((char)0xf0), lower = _mm512_set1_epi8(15), zero = _mm512_setzero_si512(), lanes = group_lanes(group);
    const __m512i table = levels == NULL ? zero : _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)levels->multiples));
    const float unit = levels == NULL ? 1.0f / 16 : levels->unit;
    const int together = rows == 1 ? 1 : columns; /* as in block_bf16 */
    __m512 sums[4][4];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int c = 0; c < columns; c++) sums[r][c] = _mm512_setzero_ps();
    UNROLL for (int begin = 0; begin < columns; begin += together) {
        int64_t second = 0, end = group; /* the groups of both halves, and where the second one ends */
        for (int64_t i = 0; i < k; i += 128) {
            if (i == end) second++, end += group;
            const int64_t first = second;
            if (i + 64 == end) second++, end += group;
            __m512i values[2][4];
            UNROLL for (int r = 0; r < rows; r++) values[0][r] = _mm512_loadu_si512(x + r * ldx + i), values[1][r] = _mm512_loadu_si512(x + r * ldx + i + 64);
            UNROLL for (int c = begin; c < begin + together; c++) {
                const __m512i pairs = _mm512_loadu_si512(w + (c * ldw + i) / 2);
                if (rows == 1) PREFETCH(w + (c * ldw + i) / 2);
                const __m512i low = levels == NULL ? _mm512_and_si512(_mm512_slli_epi16(pairs, 4), upper) : _mm512_shuffle_epi8(table, _mm512_and_si512(pairs, lower));
                const __m512i high = levels == NULL ? _mm512_and_si512(pairs, upper) : _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(pairs, 4), lower));
                const float *at = scales + c * groups;
                const __m512 low_scale = wide < 0 ? lane_scales(at + i / 32, 3, lanes) : _mm512_set1_ps(at[first]), high_scale = wide < 0 ? lane_scales(at + i / 32 + 2, 3, lanes) : _mm512_set1_ps(at[second]);
                UNROLL for (int r = 0; r < rows; r++) {
                    const __m512i dots = _mm512_dpbusd_epi32(zero, values[0][r], low), others = _mm512_dpbusd_epi32(wide > 0 ? dots : zero, values[1][r], high);
                    if (wide <= 0) sums[r][c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), low_scale, sums[r][c]);
                    sums[r][c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(others), high_scale, sums[r][c]);
                }
            }
        }
    }
    add_offsets(rows, columns, x_sums, offsets, groups, 1 / unit, sums);
    if (rows == 1 && columns == 4)
        _mm_storeu_ps(y, _mm_mul_ps(sum_lanes(sums[0]), _mm_set1_ps(unit)));
    else
        UNROLL for (int r = 0; r < rows; r++) UNROLL for (int c = 0; c < columns; c++) y[r * ldy + c] = _mm512_reduce_add_ps(sums[r][c]) * unit;
}

INLINE VNNI void dot_int4(const int wide, const tn_levels *levels, const uint8_t *x, int64_t ldx, int64_t m, const float *sums, const uint8_t *w, int64_t ldw, const float *scales, const float *offsets, int64_t group, int64_t n, int64_t k, float *y, int64_t ldy) {
    const int64_t groups = k / group;
    for (int64_t r = 0; r < m;) {
        const uint8_t *from = x + r * ldx;
        const float *totals = sums + r * groups;
        float *to = y + r * ldy;
        const int64_t rows = m - r >= 4 ? 4 : 1;
        int64_t c = 0;
        if (rows == 4)
            for (; c + 2 <= n; c += 2) block_int4(wide, levels, 4, 2, from, ldx, totals, w + c * ldw / 2, ldw, scales + c * groups, tn_offsets_from(offsets, c * groups), group, k, to + c, ldy);
        else
            for (; c + 4 <= n; c += 4) block_int4(wide, levels, 1, 4, from, ldx, totals, w + c * ldw / 2, ldw, scales + c * groups, tn_offsets_from(offsets, c * groups), group, k, to + c, ldy);
        for (; c < n; c++)
            for (int64_t i = 0; i < rows; i++) block_int4(wide, levels, 1, 1, from + i * ldx, ldx, totals + i * groups, w + c * ldw / 2, ldw, scales + c * groups, tn_offsets_from(offsets, c * groups), group, k, to + i * ldy + c, ldy);
        r += rows;
    }
}

VNNI void tn_dot_int4_vnni(const uint8_t *x, int64_t ldx, int64_t m, const float *sums, const uint8_t *w, int64_t ldw, const float *scales, const float *offsets, const tn_levels *levels, int64_t group, int64_t n, int64_t k, float *y, int64_t ldy) {
    /* One loop for each kind, without what the others need. */
    const int wide = group % 128 == 0;
    if (levels != NULL && wide)
        dot_int4(1, levels, x, ldx, m, sums, w, ldw, scales, offsets, group, n, k, y, ldy);
    else if (levels != NULL && group % 64 == 0)
        dot_int4(0, levels, x, ldx, m, sums, w, ldw, scales, offsets, group, n, k, y, ldy);
    else if (levels != NULL)
        dot_int4(-1, levels, x, ldx, m, sums, w, ldw, scales, offsets, group, n, k, y, ldy);
    else if (group % 64 != 0)
        dot_int4(-1, NULL, x, ldx, m, sums, w, ldw, scales, offsets, group, n, k, y, ldy);
    else if (offsets == NULL && wide)
        dot_int4(1, NULL, x, ldx, m, sums, w, ldw, scales, NULL, group, n, k, y, ldy);
    else if (offsets == NULL)
        dot_int4(0, NULL, x, ldx, m, sums, w, ldw, scales, NULL, group, n, k, y, ldy);
    else if (wide)
        dot_int4(1, NULL, x, ldx, m, sums, w, ldw, scales, offsets, group, n, k, y, ldy);
    else
        dot_int4(0, NULL, x, ldx, m, sums, w, ldw, scales, offsets, group, n, k, y, ldy);
}

INLINE VNNI void block_groups(const int rows, const int columns, const uint8_t *x, int64_t ldx, const float *x_sums, const uint8_t *w, int64_t ldw, const float *scales, const float *offsets, int64_t group, int64_t k, float *y, int64_t ldy) {
    const int64_t groups = k / group, step = group < 64 ? 64 / group : 1;
    const __m512i lanes = group_lanes(group), zero = _mm512_setzero_si512();
    __m512 sums[4][4];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int c = 0; c < columns; c++) sums[r][c] = _mm512_setzero_ps();
    for (int64_t i = 0, at = 0, end = group; i < k; i += 64) {
        const __mmask64 some = k - i >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << (k - i)) - 1;
        const __mmask16 mask = (__mmask16)((1 << (groups - at < step ? groups - at : step)) - 1);
        __m512i values[4];
        UNROLL for (int r = 0; r < rows; r++) values[r] = _mm512_maskz_loadu_epi8(some, x + r * ldx + i);
        UNROLL for (int c = 0; c < columns; c++) {
            const __m512i codes = _mm512_maskz_loadu_epi8(some, w + c * ldw + i);
            if (rows == 1) PREFETCH(w + c * ldw + i);
            const __m512 scale = lane_scales(scales + c * groups + at, mask, lanes);
            UNROLL for (int r = 0; r < rows; r++) sums[r][c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_dpbusd_epi32(zero, values[r], codes)), scale, sums[r][c]);
        }
        if (group < 64)
            at += step;
        else if (i + 64 == end)
            at++, end += group;
    }
    add_offsets(rows, columns, x_sums, offsets, groups, 1, sums);
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int c = 0; c < columns; c++) y[r * ldy + c] = _mm512_reduce_add_ps(sums[r][c]);
}

VNNI void tn_dot_groups_vnni(const uint8_t *x, int64_t ldx, int64_t m, const float *sums, const uint8_t *w, int64_t ldw, const float *scales, const float *offsets, int64_t group, int64_t n, int64_t k, float *y, int64_t ldy) {
    const int64_t groups = k / group;
    for (int64_t r = 0; r < m;) {
        const uint8_t *from = x + r * ldx;
        const float *totals = sums + r * groups;
        float *to = y + r * ldy;
        const int64_t rows = m - r >= 4 ? 4 : 1;
        int64_t c = 0;
        if (rows == 4)
            for (; c + 4 <= n; c += 4) block_groups(4, 4, from, ldx, totals, w + c * ldw, ldw, scales + c * groups, tn_offsets_from(offsets, c * groups), group, k, to + c, ldy);
        for (; c < n; c++)
            for (int64_t i = 0; i < rows; i++) block_groups(1, 1, from + i * ldx, ldx, totals + i * groups, w + c * ldw, ldw, scales + c * groups, tn_offsets_from(offsets, c * groups), group, k, to + i * ldy + c, ldy);
        r += rows;
    }
}

/* The sixteen weights that a group may have, twice over: a register to look codes up in. */
INLINE BF16 __m512i weights_of(__m512 numbers, const float *scales, const float *offsets, int64_t group) {
    return _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(_mm512_fmadd_ps(numbers, _mm512_set1_ps(scales[group]), _mm512_set1_ps(offsets == NULL ? 0.0f : offsets[group]))));
}

BF16 void tn_unpack_int4_avx512(const uint8_t *w, const float *scales, const float *offsets, const tn_levels *levels, int64_t group, int64_t k, bf16 *y) {
    const __m512 numbers = levels != NULL ? _mm512_loadu_ps(levels->numbers) : _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    const __m512i lower = _mm512_set1_epi16(15);
    __m512i tables[4] = {}; /* of 32 codes each */
    for (int64_t i = 0, at = -1, end = 0; i < k; i += 128) {
        UNROLL for (int j = 0; j < 4; j++) {
            if (i + 32 * j == end)
                tables[j] = weights_of(numbers, scales, offsets, ++at), end += group;
            else
                tables[j] = tables[(j + 3) % 4];
        }
        UNROLL for (int j = 0; j < 2; j++) {
            const __m512i pairs = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(w + i / 2 + 32 * j)));
            _mm512_storeu_si512(y + i + 32 * j, _mm512_permutexvar_epi16(_mm512_and_si512(pairs, lower), tables[j]));
            _mm512_storeu_si512(y + i + 64 + 32 * j, _mm512_permutexvar_epi16(_mm512_srli_epi16(pairs, 4), tables[2 + j]));
        }
    }
}

INLINE BF16 __m512 load_int8(const uint8_t *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p))); }

/* float8_e4m3fn without NaN: an exponent of 0 has no leading one, which is taken off again. */
INLINE BF16 __m512 load_fp8(const uint8_t *p) {
    const __m512i bits = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)), size = _mm512_slli_epi32(_mm512_and_si512(bits, _mm512_set1_epi32(127)), 20);
    const __mmask16 least = _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(1 << 23));
    const __m512i whole = _mm512_add_epi32(size, _mm512_mask_blend_epi32(least, _mm512_set1_epi32(120 << 23), _mm512_set1_epi32(121 << 23)));
    const __m512 value = _mm512_castsi512_ps(whole);
    const __m512i signless = _mm512_castps_si512(_mm512_mask_sub_ps(value, least, value, _mm512_set1_ps(0x1p-6f)));
    return _mm512_castsi512_ps(_mm512_or_si512(signless, _mm512_and_si512(bits, _mm512_set1_epi32((int)0x80000000))));
}

#define UNPACK(name, load) \
    BF16 void name(const uint8_t *w, const float *scales, const float *offsets, int64_t group, int64_t k, bf16 *y) { \
        for (int64_t i = 0, end = 0, at = -1; i < k; i += 16) { \
            if (i == end) at++, end += group; \
            const __m512 value = _mm512_fmadd_ps(load(w + i), _mm512_set1_ps(scales[at]), _mm512_set1_ps(offsets == NULL ? 0.0f : offsets[at])); \
            _mm256_storeu_si256((__m256i *)(y + i), (__m256i)_mm512_cvtneps_pbh(value)); \
        } \
    }

UNPACK(tn_unpack_int8_avx512, load_int8)
UNPACK(tn_unpack_fp8_avx512, load_fp8)

/* More rows than one use the registers for six by four results. alone: the columns of a block of one row. */
#define PRODUCT(name, target, block, alone, left, right, result) \
    target void name(const left *x, int64_t ldx, int64_t m, const right *w, int64_t ldw, int64_t n, int64_t k, result *y, int64_t ldy) { \
        for (int64_t r = 0; r < m;) { \
            const left *from = x + r * ldx; \
            result *to = y + r * ldy; \
            const int64_t rows = m - r >= 6 ? 6 : m - r >= 2 ? 2 : 1; \
            int64_t c = 0; \
            if (rows == 6) \
                for (; c + 4 <= n; c += 4) block(6, 4, from, ldx, w + c * ldw, ldw, k, to + c, ldy); \
            else if (rows == 2) \
                for (; c + 8 <= n; c += 8) block(2, 8, from, ldx, w + c * ldw, ldw, k, to + c, ldy); \
            else \
                for (; c + alone <= n; c += alone) block(1, alone, from, ldx, w + c * ldw, ldw, k, to + c, ldy); \
            for (; c < n; c++) \
                for (int64_t i = 0; i < rows; i++) block(1, 1, from + i * ldx, ldx, w + c * ldw, ldw, k, to + i * ldy + c, ldy); \
            r += rows; \
        } \
    }

/* Values times weights, as mix_bf16 of vectors.inc: a number of bf16 is widened once for two rows. */
INLINE BF16 void block_mix(const int rows, const int vectors, const float *p, int64_t ldp, const float *keep, const bf16 *v, int64_t ldv, int64_t keys, int64_t d, float *o) {
    __m512 sums[2][8];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int j = 0; j < vectors; j++) sums[r][j] = _mm512_mul_ps(_mm512_loadu_ps(o + r * d + 16 * j), _mm512_set1_ps(keep[r]));
    for (int64_t key = 0; key < keys; key++)
        UNROLL for (int j = 0; j < vectors; j++) {
            const __m512 value = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(v + key * ldv + 16 * j))), 16));
            UNROLL for (int r = 0; r < rows; r++) sums[r][j] = _mm512_fmadd_ps(value, _mm512_set1_ps(p[r * ldp + key]), sums[r][j]);
        }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int j = 0; j < vectors; j++) _mm512_storeu_ps(o + r * d + 16 * j, sums[r][j]);
}

BF16 void tn_mix_bf16_avx512(const float *p, int64_t ldp, const float *keep, int64_t m, const bf16 *v, int64_t ldv, int64_t keys, int64_t d, float *o) {
    for (int64_t r = 0, rows; r < m; r += rows, p += rows * ldp, keep += rows, o += rows * d) {
        int64_t i = 0;
        rows = m - r >= 2 ? 2 : 1;
        if (rows == 2) {
            for (; i + 128 <= d; i += 128) block_mix(2, 8, p, ldp, keep, v + i, ldv, keys, d, o + i);
            for (; i < d; i += 16) block_mix(2, 1, p, ldp, keep, v + i, ldv, keys, d, o + i);
        } else {
            for (; i + 128 <= d; i += 128) block_mix(1, 8, p, ldp, keep, v + i, ldv, keys, d, o + i);
            for (; i < d; i += 16) block_mix(1, 1, p, ldp, keep, v + i, ldv, keys, d, o + i);
        }
    }
}

PRODUCT(tn_dot_bf16_avx512, BF16, block_bf16, 4, bf16, bf16, float)
PRODUCT(tn_dot_int8_vnni, VNNI, block_int8, 1, uint8_t, int8_t, int32_t)
#endif
