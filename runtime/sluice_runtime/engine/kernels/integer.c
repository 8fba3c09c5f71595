/* Products with weights of 8 and 4 bits. Weight-only ones make exact bfloat16 of small integers on the way, so
 * that few rows (in registers) and many (expanded once for all) sum the same numbers in the same order. */
#include "sluice.h"

#include <math.h>

/* -- small integers to bfloat16 --------------------------------------------------------------------------- */

/* Bytes `low` and `low + 1` of each word as a pair of bfloat16: a float's upper half is exact up to 8 bits. */
ALWAYS_INLINE __m512i pair_of_bytes(__m512i bytes, const int low) {
    __m512i first = _mm512_srai_epi32(_mm512_slli_epi32(bytes, 24 - 8 * low), 24);
    __m512i second = _mm512_srai_epi32(_mm512_slli_epi32(bytes, 16 - 8 * low), 24);
    __m512i a = _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(first)), 16);
    return _mm512_or_si512(a, _mm512_castps_si512(_mm512_cvtepi32_ps(second)));
}

/* -8 to 7 as bfloat16, twice: the look-up takes five bits, and the fifth belongs to the next nibble. */
static inline __m512i nibble_table(void) {
    __m512i level = _mm512_sub_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(8));
    __m256i table = (__m256i)_mm512_cvtneps_pbh(_mm512_cvtepi32_ps(level));
    return _mm512_inserti64x4(_mm512_castsi256_si512(table), table, 1);
}
ALWAYS_INLINE __m512i pair_of_nibbles(__m512i words, const int which, __m512i table) {
    return _mm512_permutexvar_epi16(which ? _mm512_srli_epi16(words, 4 * which) : words, table);
}

static const int8_t *bytes_of(const Linear *linear, int panel) {
    int64_t size = (int64_t)linear->in * PANEL / (linear->kind == KIND_INT4 ? 2 : 1);
    return (const int8_t *)linear->weight + panel * size;
}

void expand(const Linear *linear, int panel, bf16 *to) {
    const int8_t *from = bytes_of(linear, panel);
    if (linear->kind == KIND_INT8) {
        for (int k = 0; k < linear->in; k += 4) {
            __m512i bytes = _mm512_loadu_si512(from + k * PANEL);
            _mm512_storeu_si512(to + k * PANEL, pair_of_bytes(bytes, 0));
            _mm512_storeu_si512(to + (k + 2) * PANEL, pair_of_bytes(bytes, 2));
        }
        return;
    }
    const __m512i table = nibble_table();
    for (int k = 0; k < linear->in; k += 8) {
        __m512i words = _mm512_loadu_si512(from + k * PANEL / 2);
        _mm512_storeu_si512(to + k * PANEL, pair_of_nibbles(words, 0, table));
        _mm512_storeu_si512(to + (k + 2) * PANEL, pair_of_nibbles(words, 1, table));
        _mm512_storeu_si512(to + (k + 4) * PANEL, pair_of_nibbles(words, 2, table));
        _mm512_storeu_si512(to + (k + 6) * PANEL, pair_of_nibbles(words, 3, table));
    }
}

/* -- 8 bits, weights only --------------------------------------------------------------------------------- */

static void scale_tile(const Linear *linear, int rows, const int *at, int panels, float *tile) {
    for (int p = 0; p < panels; p++) {
        __m512 scale = _mm512_loadu_ps((const float *)linear->scale + at[p] * PANEL);
        for (int r = 0; r < rows; r++) {
            float *to = tile + r * TILE_WIDTH + p * PANEL;
            _mm512_storeu_ps(to, _mm512_mul_ps(_mm512_loadu_ps(to), scale));
        }
    }
}

ALWAYS_INLINE void int8_kernel(const int rows, const int panels, const bf16 *x, int64_t stride,
                               const int8_t *const *weight, int in, float *tile) {
    __m512 sum[MAX_ROWS][MAX_PANELS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) sum[r][p] = _mm512_setzero_ps();
    for (int k = 0; k < in; k += 4) {
        __m512i w[2][MAX_PANELS];
        for (int p = 0; p < panels; p++) {
            const int8_t *from = weight[p] + k * PANEL;
            const __m512i bytes = _mm512_loadu_si512(from);
            _mm_prefetch((const char *)from + 2048, _MM_HINT_T0);
            w[0][p] = pair_of_bytes(bytes, 0), w[1][p] = pair_of_bytes(bytes, 2);
        }
        for (int half = 0; half < 2; half++)
            for (int r = 0; r < rows; r++) {
                const __m512i v = pair_at(x + r * stride + k + 2 * half);
                for (int p = 0; p < panels; p++)
                    sum[r][p] = _mm512_dpbf16_ps(sum[r][p], (__m512bh)v, (__m512bh)w[half][p]);
            }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) _mm512_storeu_ps(tile + r * TILE_WIDTH + p * PANEL, sum[r][p]);
}

static void int8_tile(int rows, int panels, const bf16 *x, int64_t stride, const int8_t *const *weight, int in,
                      float *tile) {
    EACH_SIZE(int8_kernel, x, stride, weight, in, tile)
}

void int8_product(const Linear *linear, const Input *input, int row, int rows, const int *at, int panels,
                  float *tile) {
    const int8_t *weight[MAX_PANELS];
    for (int p = 0; p < panels; p++) weight[p] = bytes_of(linear, at[p]);
    int8_tile(rows, panels, input->x + (int64_t)row * linear->in, linear->in, weight, linear->in, tile);
    scale_tile(linear, rows, at, panels, tile);
}

void int8_expanded(const Linear *linear, const Input *input, int row, int rows, const int *at, int panels,
                   float *tile) {
    const bf16 *weight[MAX_PANELS];
    for (int p = 0; p < panels; p++) weight[p] = input->expanded + (int64_t)p * PANEL * linear->in;
    bf16_tile(rows, panels, input->x + (int64_t)row * linear->in, linear->in, weight, linear->in, tile);
    scale_tile(linear, rows, at, panels, tile);
}

/* -- 4 bits, weights only --------------------------------------------------------------------------------- */

/* Add a group's sums to the tile: sum * scale + (sum of x) * (8 - zero) * scale. */
ALWAYS_INLINE void end_group(const Linear *linear, const int rows, const int panels, __m512 sum[MAX_ROWS][MAX_PANELS],
                             const int *at, int group, const float *sums, int64_t sums_stride, float *tile) {
    const int64_t groups = linear->in / linear->group;
    for (int p = 0; p < panels; p++) {
        const int64_t from = (at[p] * groups + group) * PANEL;
        const __m512 scale = load_bf16((const bf16 *)linear->scale + from);
        __m512 shift = _mm512_setzero_ps();
        if (linear->zero) {
            __m512i zero = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(linear->zero + from)));
            shift = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_set1_epi32(8), zero)));
        }
        for (int r = 0; r < rows; r++) {
            float *to = tile + r * TILE_WIDTH + p * PANEL;
            __m512 total = group ? _mm512_loadu_ps(to) : _mm512_setzero_ps();
            total = _mm512_fmadd_ps(sum[r][p], scale, total);
            if (linear->zero) total = _mm512_fmadd_ps(_mm512_set1_ps(sums[r * sums_stride + group]), shift, total);
            _mm512_storeu_ps(to, total);
        }
    }
}

/* `expanded`: weights are bfloat16 already. */
ALWAYS_INLINE void int4_kernel(const int rows, const int panels, const int expanded, const Linear *linear,
                               const Input *input, int row, const int *at, float *tile) {
    const int64_t groups = linear->in / linear->group;
    const bf16 *x = input->x + (int64_t)row * linear->in;
    const float *sums = linear->zero ? input->sums + row * groups : 0;
    const __m512i table = nibble_table();
    const uint8_t *packed[MAX_PANELS];
    for (int p = 0; p < panels; p++)
        packed[p] = expanded ? (const uint8_t *)(input->expanded + (int64_t)p * PANEL * linear->in)
                             : (const uint8_t *)bytes_of(linear, at[p]);
    for (int group = 0; group < groups; group++) {
        __m512 sum[MAX_ROWS][MAX_PANELS];
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < panels; p++) sum[r][p] = _mm512_setzero_ps();
        for (int k = group * linear->group; k < (group + 1) * linear->group; k += 8) {
            __m512i words[MAX_PANELS];
            if (!expanded)
                for (int p = 0; p < panels; p++) {
                    words[p] = _mm512_loadu_si512(packed[p] + k * PANEL / 2);
                    _mm_prefetch((const char *)packed[p] + k * PANEL / 2 + 1024, _MM_HINT_T0);
                }
            for (int pair = 0; pair < 4; pair++) {
                __m512i w[MAX_PANELS];
                for (int p = 0; p < panels; p++)
                    w[p] = expanded ? _mm512_loadu_si512(packed[p] + (k + 2 * pair) * PANEL * 2)
                                    : pair_of_nibbles(words[p], pair, table);
                for (int r = 0; r < rows; r++) {
                    const __m512i v = pair_at(x + (int64_t)r * linear->in + k + 2 * pair);
                    for (int p = 0; p < panels; p++)
                        sum[r][p] = _mm512_dpbf16_ps(sum[r][p], (__m512bh)v, (__m512bh)w[p]);
                }
            }
        }
        end_group(linear, rows, panels, sum, at, group, sums, groups, tile);
    }
}

void int4_product(const Linear *linear, const Input *input, int row, int rows, const int *at, int panels,
                  float *tile) {
    EACH_SIZE(int4_kernel, 0, linear, input, row, at, tile)
}

void int4_expanded(const Linear *linear, const Input *input, int row, int rows, const int *at, int panels,
                   float *tile) {
    EACH_SIZE(int4_kernel, 1, linear, input, row, at, tile)
}

/* -- both sides in 8 bits --------------------------------------------------------------------------------- */

ALWAYS_INLINE void w8a8_kernel(const int rows, const int panels, const Linear *linear, const Input *input, int row,
                               const int *at, float *tile) {
    const int in = linear->in;
    const uint8_t *x = input->levels + (int64_t)row * in;
    const int8_t *weight[MAX_PANELS];
    __m512i sum[MAX_ROWS][MAX_PANELS];
    for (int p = 0; p < panels; p++) weight[p] = bytes_of(linear, at[p]);
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) sum[r][p] = _mm512_setzero_si512();
    for (int k = 0; k < in; k += 4) {
        __m512i w[MAX_PANELS];
        for (int p = 0; p < panels; p++) {
            w[p] = _mm512_loadu_si512(weight[p] + k * PANEL);
            if (rows <= 2) _mm_prefetch((const char *)weight[p] + k * PANEL + 2048, _MM_HINT_T0);
        }
        for (int r = 0; r < rows; r++) {
            const __m512i v = pair_at((const bf16 *)(x + (int64_t)r * in + k));
            for (int p = 0; p < panels; p++) sum[r][p] = _mm512_dpbusd_epi32(sum[r][p], v, w[p]);
        }
    }
    for (int p = 0; p < panels; p++) {
        const __m512i offset = _mm512_loadu_si512(linear->sums + at[p] * PANEL);
        const __m512 scale = _mm512_loadu_ps((const float *)linear->scale + at[p] * PANEL);
        for (int r = 0; r < rows; r++) {
            __m512 value = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum[r][p], offset));
            value = _mm512_mul_ps(_mm512_mul_ps(value, _mm512_set1_ps(input->scale[row + r])), scale);
            _mm512_storeu_ps(tile + r * TILE_WIDTH + p * PANEL, value);
        }
    }
}

void w8a8_product(const Linear *linear, const Input *input, int row, int rows, const int *at, int panels,
                  float *tile) {
    EACH_SIZE(w8a8_kernel, linear, input, row, at, tile)
}

/* -- what a row's input needs ----------------------------------------------------------------------------- */

int needs_preparation(const Linear *linear) {
    return linear->kind == KIND_W8A8 || (linear->kind == KIND_INT4 && linear->zero) ||
           (linear->kind == KIND_BF16 && wide_is_faster);
}

static void quantize_row(const bf16 *x, int in, uint8_t *levels, float *scale) {
    __m512 most = _mm512_setzero_ps();
    for (int i = 0; i < in; i += PANEL) {
        const __mmask16 mask = in - i >= PANEL ? 0xffff : (__mmask16)((1u << (in - i)) - 1);
        __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x + i)), 16);
        most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_castsi512_ps(bits)));
    }
    *scale = fmaxf(_mm512_reduce_max_ps(most) / 127.0f, 1e-12f);
    const __m512 over = _mm512_set1_ps(1.0f / *scale);
    for (int i = 0; i < in; i += PANEL) {
        const __mmask16 mask = in - i >= PANEL ? 0xffff : (__mmask16)((1u << (in - i)) - 1);
        __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x + i)), 16);
        __m512i level = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(bits), over));
        _mm512_mask_cvtusepi32_storeu_epi8(levels + i, mask, _mm512_add_epi32(level, _mm512_set1_epi32(128)));
    }
}

void widen_row(const bf16 *x, int in, float *to) {
    for (int i = 0; i < in; i += PANEL) {
        const __mmask16 mask = in - i >= PANEL ? 0xffff : (__mmask16)((1u << (in - i)) - 1);
        const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x + i));
        _mm512_mask_storeu_epi32(to + i, mask, _mm512_slli_epi32(bits, 16));
    }
}

void prepare_row(const Linear *linear, const Input *input, int row) {
    if (!needs_preparation(linear)) return;
    const bf16 *x = input->x + (int64_t)row * linear->in;
    if (linear->kind == KIND_BF16) {
        widen_row(x, linear->in, input->wide + (int64_t)row * linear->in);
        return;
    }
    if (linear->kind == KIND_W8A8) {
        quantize_row(x, linear->in, input->levels + (int64_t)row * linear->in, input->scale + row);
        return;
    }
    const int groups = linear->in / linear->group;
    for (int group = 0; group < groups; group++) {
        const bf16 *from = x + group * linear->group;
        float sum = 0;
        if (linear->group % PANEL == 0) {
            __m512 sums = _mm512_setzero_ps();
            for (int i = 0; i < linear->group; i += PANEL) sums = _mm512_add_ps(sums, load_bf16(from + i));
            sum = _mm512_reduce_add_ps(sums);
        } else {
            for (int i = 0; i < linear->group; i++) sum += bf16_to_f32(from[i]);
        }
        input->sums[(int64_t)row * groups + group] = sum;
    }
}
