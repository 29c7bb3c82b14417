/* Products on aarch64: of bytes by bytes or by codes of four bits (sdot), and of pairs of rows by pairs of rows
 * (smmla, bfmmla). Codes of activations are signed here, because sdot has no other.
 */
#include "internal.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#define UNROLL _Pragma("GCC unroll 8")
#define DOTPROD __attribute__((target("arch=armv8.2-a+dotprod")))
#define I8MM __attribute__((target("arch=armv8.2-a+dotprod+i8mm+bf16")))
#define INLINE static inline __attribute__((always_inline))
#define LOAD(from) vld1q_u8((const uint8_t *)(from))

float tn_to_int8_neon(const float *x, int64_t n, uint8_t *y) {
    const float scale = tn_kernels_generic.to_uint8(x, n, y);
    for (int64_t i = 0; i < n; i++) y[i] ^= 128;
    return scale;
}

INLINE DOTPROD void tn_dot_int8_dotprod_block(const int rows, const int columns, const uint8_t *x, int64_t ldx, const int8_t *w, int64_t ldw, int64_t k, int32_t *y, int64_t ldy) {
    int32x4_t sums[4][8] = {};
    for (int64_t i = 0; i < k; i += 16) {
        int8x16_t weights[8];
        UNROLL for (int c = 0; c < columns; c++) weights[c] = vld1q_s8(w + c * ldw + i);
        UNROLL for (int r = 0; r < rows; r++) {
            const int8x16_t value = vreinterpretq_s8_u8(LOAD(x + r * ldx + i));
            UNROLL for (int c = 0; c < columns; c++) sums[r][c] = vdotq_s32(sums[r][c], value, weights[c]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int c = 0; c < columns; c++) y[r * ldy + c] = vaddvq_s32(sums[r][c]);
}

/* A register has eight bytes of each of two rows, and a product four results, [row][column]. The halves of what is
 * loaded have sums of their own. So has a row alone, whose halves are the two rows of the product: two of its results
 * are the same sums in the same order, the other two are not read. */
#define MATRIX(name, multiply, element, right, result, lanes) \
    INLINE I8MM void name##_block(const int rows, const int columns, const element *x, int64_t ldx, const right *w, int64_t ldw, int64_t k, result *y, int64_t ldy) { \
        const int pairs = rows / 2, wide = rows == 1 ? columns : columns / 2; \
        lanes sums[4][8][2] = {}; \
        for (int64_t i = 0; i < k; i += 16 / (int64_t)sizeof(element)) { \
            uint8x16_t weights[8][2]; \
            UNROLL for (int c = 0; c < wide && rows > 1; c++) pair_up(LOAD(w + 2 * c * ldw + i), LOAD(w + (2 * c + 1) * ldw + i), weights[c]); \
            UNROLL for (int r = 0; r < pairs; r++) { \
                uint8x16_t values[2]; \
                pair_up(LOAD(x + 2 * r * ldx + i), LOAD(x + (2 * r + 1) * ldx + i), values); \
                UNROLL for (int c = 0; c < wide; c++) multiply(sums[r][c][0], values[0], weights[c][0]), multiply(sums[r][c][1], values[1], weights[c][1]); \
            } \
            UNROLL for (int c = 0; c < wide && rows == 1; c++) multiply(sums[0][c][0], LOAD(x + i), LOAD(w + c * ldw + i)); \
        } \
        UNROLL for (int r = 0; r < pairs; r++) UNROLL for (int c = 0; c < wide; c++) { \
            const lanes total = sums[r][c][0] + sums[r][c][1]; \
            UNROLL for (int i = 0; i < 4; i++) y[(2 * r + i / 2) * ldy + 2 * c + i % 2] = total[i]; \
        } \
        UNROLL for (int c = 0; c < wide && rows == 1; c++) y[c] = sums[0][c][0][0] + sums[0][c][0][3]; \
    }

#define MULTIPLY_BF16(sum, a, b) sum = vbfmmlaq_f32(sum, vreinterpretq_bf16_u8(a), vreinterpretq_bf16_u8(b))
#define MULTIPLY_INT8(sum, a, b) sum = vmmlaq_s32(sum, vreinterpretq_s8_u8(a), vreinterpretq_s8_u8(b))

INLINE void pair_up(uint8x16_t a, uint8x16_t b, uint8x16_t *halves) {
    halves[0] = vreinterpretq_u8_u64(vzip1q_u64(vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b)));
    halves[1] = vreinterpretq_u8_u64(vzip2q_u64(vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b)));
}

MATRIX(tn_dot_bf16_neon, MULTIPLY_BF16, bf16, bf16, float, float32x4_t)
MATRIX(tn_dot_int8_i8mm, MULTIPLY_INT8, uint8_t, int8_t, int32_t, int32x4_t)

/* Results of `most` rows and four columns fill the registers; fewer rows read eight rows of weights at a time. */
#define PRODUCT(name, target, most, element, right, result) \
    target void name(const element *x, int64_t ldx, int64_t m, const right *w, int64_t ldw, int64_t n, int64_t k, result *y, int64_t ldy) { \
        for (int64_t r = 0; r < m;) { \
            const element *from = x + r * ldx; \
            result *to = y + r * ldy; \
            const int64_t rows = m - r >= most ? most : m - r >= 2 ? 2 : 1; \
            int64_t c = 0; \
            if (rows == most) \
                for (; c + 4 <= n; c += 4) name##_block(most, 4, from, ldx, w + c * ldw, ldw, k, to + c, ldy); \
            else if (rows == 2) \
                for (; c + 8 <= n; c += 8) name##_block(2, 8, from, ldx, w + c * ldw, ldw, k, to + c, ldy); \
            else \
                for (; c + 8 <= n; c += 8) name##_block(1, 8, from, ldx, w + c * ldw, ldw, k, to + c, ldy); \
            for (; c < n; c++) \
                for (int64_t i = 0; i < rows; i++) name##_block(1, 1, from + i * ldx, ldx, w + c * ldw, ldw, k, to + i * ldy + c, ldy); \
            r += rows; \
        } \
    }

PRODUCT(tn_dot_int8_dotprod, DOTPROD, 4, uint8_t, int8_t, int32_t)
PRODUCT(tn_dot_int8_i8mm, I8MM, 8, uint8_t, int8_t, int32_t)
PRODUCT(tn_dot_bf16_neon, I8MM, 8, bf16, bf16, float)

/* Numbers of one to four columns that lie apart, the first one in all lanes where there is one column. */
INLINE float32x4_t gather(const int columns, const float *x, int64_t ld) {
    float32x4_t y = vdupq_n_f32(x[0]);
    UNROLL for (int c = 1; c < columns; c++) y[c] = x[c * ld];
    return y;
}

/* Codes of one group at most, with its scale. Their sum is exact, whatever its order; from there on each lane is a
 * column, and adds up in the order of the groups. Codes of four bits are multiplied as bytes, sixteen times as large or
 * looked up, from the lower (4) or the upper (0) halves of bytes, those of eight bits (-1) as they are. columns is four or
 * one. */
INLINE DOTPROD void add_group(const int shift, const tn_levels *levels, const int rows, const int columns, int64_t run, const uint8_t *x, int64_t ldx, const uint8_t *w, int64_t ldw, const float *scales, int64_t groups, float32x4_t *sums) {
    int32x4_t dots[4][4] = {};
    const int8x16_t table = levels == NULL ? vdupq_n_s8(0) : vld1q_s8(levels->multiples);
    for (int64_t j = 0; j < run; j += 16) {
        int8x16_t codes[4];
        UNROLL for (int c = 0; c < columns; c++) {
            const uint8x16_t bytes = LOAD(w + c * ldw + j);
            codes[c] = levels != NULL ? vqtbl1q_s8(table, shift == 0 ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15))) : vreinterpretq_s8_u8(shift < 0 ? bytes : shift == 0 ? vandq_u8(bytes, vdupq_n_u8(0xf0)) : vshlq_n_u8(bytes, 4));
        }
        UNROLL for (int r = 0; r < rows; r++) {
            const int8x16_t value = vreinterpretq_s8_u8(LOAD(x + r * ldx + j));
            UNROLL for (int c = 0; c < columns; c++) dots[r][c] = vdotq_s32(dots[r][c], value, codes[c]);
        }
    }
    const float32x4_t factors = gather(columns, scales, groups);
    UNROLL for (int r = 0; r < rows; r++) {
        const int32x4_t total = columns == 1 ? vdupq_n_s32(vaddvq_s32(dots[r][0])) : vpaddq_s32(vpaddq_s32(dots[r][0], dots[r][1]), vpaddq_s32(dots[r][2], dots[r][3]));
        sums[r] = vfmaq_f32(sums[r], vcvtq_f32_s32(total), factors);
    }
}

INLINE DOTPROD void block_codes(const int four, const tn_levels *levels, const int rows, const int columns, const uint8_t *x, int64_t ldx, const float *x_sums, const uint8_t *w, int64_t ldw, const float *scales, const float *offsets, int64_t group, int64_t k, float *y, int64_t ldy) {
    const int64_t groups = k / group, run = group < 64 ? group : 64;
    const float unit = !four ? 1 : levels == NULL ? 1.0f / 16 : levels->unit;
    float32x4_t sums[4] = {};
    for (int64_t i = 0; !four && i < k; i += run) add_group(-1, NULL, rows, columns, run, x + i, ldx, w + i, ldw, scales + i / group, groups, sums);
    for (int64_t i = 0; four && i < k; i += 128) {
        for (int64_t at = 0; at < 64; at += run) add_group(4, levels, rows, columns, run, x + i + at, ldx, w + i / 2 + at, ldw, scales + (i + at) / group, groups, sums);
        for (int64_t at = 0; at < 64; at += run) add_group(0, levels, rows, columns, run, x + i + 64 + at, ldx, w + i / 2 + at, ldw, scales + (i + 64 + at) / group, groups, sums);
    }
    for (int64_t i = 0; offsets != NULL && i < groups; i++) {
        const float32x4_t column = gather(columns, offsets + i, groups);
        UNROLL for (int r = 0; r < rows; r++) sums[r] = vfmaq_f32(sums[r], vdupq_n_f32(x_sums[r * groups + i] / unit), column);
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int c = 0; c < columns; c++) y[r * ldy + c] = sums[r][c] * unit;
}

#define CODES(name, four, bytes) \
    INLINE DOTPROD void name(const uint8_t *x, int64_t ldx, int64_t m, const float *sums, const uint8_t *w, int64_t ldw, const float *scales, const float *offsets, const tn_levels *levels, int64_t group, int64_t n, int64_t k, float *y, int64_t ldy) { \
        const int64_t groups = k / group, row = bytes; \
        for (int64_t r = 0, rows; r < m; r += rows, x += rows * ldx, sums += rows * groups, y += rows * ldy) { \
            int64_t c = 0; \
            rows = m - r >= 4 ? 4 : 1; \
            if (rows == 4) \
                for (; c + 4 <= n; c += 4) block_codes(four, levels, 4, 4, x, ldx, sums, w + c * row, row, scales + c * groups, tn_offsets_from(offsets, c * groups), group, k, y + c, ldy); \
            else \
                for (; c + 4 <= n; c += 4) block_codes(four, levels, 1, 4, x, ldx, sums, w + c * row, row, scales + c * groups, tn_offsets_from(offsets, c * groups), group, k, y + c, ldy); \
            for (; c < n; c++) \
                for (int64_t i = 0; i < rows; i++) block_codes(four, levels, 1, 1, x + i * ldx, ldx, sums + i * groups, w + c * row, row, scales + c * groups, tn_offsets_from(offsets, c * groups), group, k, y + i * ldy + c, ldy); \
        } \
    }

CODES(dot_int4, 1, ldw / 2)
CODES(dot_groups, 0, ldw)

DOTPROD void tn_dot_int4_dotprod(const uint8_t *x, int64_t ldx, int64_t m, const float *sums, const uint8_t *w, int64_t ldw, const float *scales, const float *offsets, const tn_levels *levels, int64_t group, int64_t n, int64_t k, float *y, int64_t ldy) {
    if (levels == NULL)
        dot_int4(x, ldx, m, sums, w, ldw, scales, offsets, NULL, group, n, k, y, ldy);
    else
        dot_int4(x, ldx, m, sums, w, ldw, scales, offsets, levels, group, n, k, y, ldy);
}

DOTPROD void tn_dot_groups_dotprod(const uint8_t *x, int64_t ldx, int64_t m, const float *sums, const uint8_t *w, int64_t ldw, const float *scales, const float *offsets, int64_t group, int64_t n, int64_t k, float *y, int64_t ldy) {
    dot_groups(x, ldx, m, sums, w, ldw, scales, offsets, NULL, group, n, k, y, ldy);
}
#endif
