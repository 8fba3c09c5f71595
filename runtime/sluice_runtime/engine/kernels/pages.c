/* How pages hold KV: a token's keys and values go in, and come out as panels of weights. `pages.py` is the
 * oracle of what is stored, to the last bit.
 *
 * INT8 and FP8 pages (e4m3, arXiv 2209.05433) hold levels of a byte, and a scale for each token of each head.
 * A level is exact in bfloat16, so panels hold levels as they are, and scales are left to whoever multiplies:
 * one for each key instead of one for each value.
 */
#include "model.h"

#include <string.h>

#define LEAST_SCALE 1e-12f

/* -- in ---------------------------------------------------------------------------------------------------- */

static inline bf16 to_bf16(float x) {
    return (bf16)_mm_extract_epi16((__m128i)_mm_cvtneps_pbh(_mm_set_ss(x)), 0);
}

/* Sixteen values of at most 448 as e4m3: to the nearest, of two the even one. */
static inline __m128i to_fp8(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(magnitude, 20), _mm512_set1_epi32(1));
    const __m512i nearest = _mm512_add_epi32(_mm512_add_epi32(magnitude, odd), _mm512_set1_epi32(0x7ffff));
    __m512i level = _mm512_sub_epi32(_mm512_srli_epi32(nearest, 20), _mm512_set1_epi32(120 << 3));
    /* Below 2^-6 all steps are 2^-9, and a level is their number. */
    const __mmask16 even_steps = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(121 << 23));
    const __m512 steps = _mm512_mul_ps(_mm512_castsi512_ps(magnitude), _mm512_set1_ps(512.0f));
    level = _mm512_mask_cvtps_epi32(level, even_steps, steps);
    const __m512i sign = _mm512_slli_epi32(_mm512_srli_epi32(bits, 31), 7);
    return _mm512_cvtepi32_epi8(_mm512_or_si512(level, sign));
}

/* [dim] as levels; returns their scale. */
static bf16 encode(int64_t kind, const bf16 *x, int64_t dim, uint8_t *levels) {
    __m256i most = _mm256_setzero_si256();
    /* Magnitudes compare as whole numbers, those that are not numbers above all: none is lost. */
    for (int64_t d = 0; d < dim; d += PANEL)
        most = _mm256_max_epu16(most, _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(x + d)),
                                                       _mm256_set1_epi16(0x7fff)));
    const float top = kind == PAGES_INT8 ? 127.0f : 448.0f;
    float scale = bf16_to_f32((bf16)_mm512_reduce_max_epu32(_mm512_cvtepu16_epi32(most))) / top;
    if (scale < LEAST_SCALE) scale = LEAST_SCALE;
    const bf16 rounded = to_bf16(scale);
    const __m512 divisor = _mm512_set1_ps(bf16_to_f32(rounded)), largest = _mm512_set1_ps(top);
    for (int64_t d = 0; d < dim; d += PANEL) {
        __m512 level = _mm512_div_ps(load_bf16(x + d), divisor);
        level = _mm512_max_ps(_mm512_min_ps(level, largest), _mm512_sub_ps(_mm512_setzero_ps(), largest));
        const __m128i bytes = kind == PAGES_INT8 ? _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(level)) : to_fp8(level);
        _mm_storeu_si128((__m128i *)(levels + d), bytes);
    }
    return rounded;
}

static void write_head(const Pages *pages, void *to, bf16 *scales, int64_t slot, const bf16 *x) {
    const int64_t dim = pages->head_dim;
    if (pages->kind == PAGES_BF16) memcpy((bf16 *)to + slot * dim, x, dim * sizeof(bf16));
    else scales[slot] = encode(pages->kind, x, dim, (uint8_t *)to + slot * dim);
}

void write_kv(const Pages *pages, int64_t slot, const bf16 *keys, const bf16 *values) {
    for (int64_t head = 0; head < pages->kv_heads; head++) {
        const int64_t at = head * pages->slots + slot;
        write_head(pages, pages->keys, pages->key_scales, at, keys + head * pages->head_dim);
        write_head(pages, pages->values, pages->value_scales, at, values + head * pages->head_dim);
    }
}

/* -- out --------------------------------------------------------------------------------------------------- */

/* 16 x 16 words, transposed: to[j][i] = from[i][j] for the first `columns` of j. */
static void transpose(const uint32_t *const from[PANEL], uint32_t *to, int columns) {
    __m512i a[PANEL], b[PANEL];
    const __mmask16 mask = columns >= PANEL ? 0xffff : (__mmask16)((1u << columns) - 1);
    for (int i = 0; i < PANEL; i++)
        a[i] = from[i] ? _mm512_maskz_loadu_epi32(mask, from[i]) : _mm512_setzero_si512();
    for (int i = 0; i < PANEL; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < PANEL; i += 4)
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
    /* a[4 g + c]: in each quarter q, rows 4 g to 4 g + 3 of column 4 q + c. */
    for (int c = 0; c < 4; c++) {
        __m512i low = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88), high = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
        b[c] = _mm512_shuffle_i32x4(low, high, 0x88);
        b[8 + c] = _mm512_shuffle_i32x4(low, high, 0xdd);
        low = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd), high = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
        b[4 + c] = _mm512_shuffle_i32x4(low, high, 0x88);
        b[12 + c] = _mm512_shuffle_i32x4(low, high, 0xdd);
    }
    for (int j = 0; j < columns && j < PANEL; j++) _mm512_storeu_si512(to + j * PANEL, b[j]);
}

/* Bytes of e4m3 in lanes of 16 bits, as bfloat16. */
static inline __m512i fp8_lanes(__m512i bytes) {
    const __m512i tiny = _mm512_broadcast_i32x4( /* 0 to 7 times 2^-9, which have no leading one */
        _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    __m512i value = _mm512_slli_epi16(_mm512_and_si512(bytes, _mm512_set1_epi16(0x7f)), 4);
    value = _mm512_add_epi16(value, _mm512_set1_epi16(120 << 7));
    const __mmask32 is_tiny = _mm512_testn_epi16_mask(bytes, _mm512_set1_epi16(0x78));
    value = _mm512_mask_permutexvar_epi16(value, is_tiny, bytes, tiny);
    /* value | (bytes << 8 & 0x8000) */
    return _mm512_ternarylogic_epi32(value, _mm512_slli_epi16(bytes, 8), _mm512_set1_epi16((int16_t)0x8000), 0xf8);
}

/* Small whole numbers, `low` in the lower and `high` in the upper half of each lane, as bfloat16. */
static inline __m512i int_lanes(__m512i low, __m512i high) {
    const __m512i lower = _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(low)), 16);
    return _mm512_or_si512(lower, _mm512_castps_si512(_mm512_cvtepi32_ps(high)));
}

/* Four levels in each lane to two vectors of pairs. */
static inline void unpack_levels(int64_t kind, __m512i words, bf16 *to) {
    __m512i first, second;
    if (kind == PAGES_INT8) {
        first = int_lanes(_mm512_srai_epi32(_mm512_slli_epi32(words, 24), 24),
                          _mm512_srai_epi32(_mm512_slli_epi32(words, 16), 24));
        second = int_lanes(_mm512_srai_epi32(_mm512_slli_epi32(words, 8), 24), _mm512_srai_epi32(words, 24));
    } else {
        const __m512i lower = _mm512_set1_epi32(0xff), upper = _mm512_set1_epi32(0xff0000);
        first = fp8_lanes(_mm512_or_si512(_mm512_and_si512(words, lower),
                                          _mm512_and_si512(_mm512_slli_epi32(words, 8), upper)));
        second = fp8_lanes(_mm512_or_si512(_mm512_and_si512(_mm512_srli_epi32(words, 16), lower),
                                           _mm512_and_si512(_mm512_srli_epi32(words, 8), upper)));
    }
    _mm512_storeu_si512(to, first);
    _mm512_storeu_si512(to + 2 * PANEL, second);
}

/* Sixteen keys [dim] as a panel [dim/2][16][2]; NULL is zeros. */
static void lay_out_keys(int64_t kind, const void *const keys[PANEL], int64_t dim, bf16 *panel) {
    const int64_t words = kind == PAGES_BF16 ? dim / 2 : dim / 4;
    uint32_t levels[PANEL * PANEL];
    for (int64_t at = 0; at < words; at += PANEL) {
        const uint32_t *from[PANEL];
        for (int i = 0; i < PANEL; i++) from[i] = keys[i] ? (const uint32_t *)keys[i] + at : NULL;
        const int columns = words - at < PANEL ? (int)(words - at) : PANEL;
        if (kind == PAGES_BF16) {
            transpose(from, (uint32_t *)panel + at * PANEL, columns);
            continue;
        }
        transpose(from, levels, columns);
        for (int j = 0; j < columns; j++)
            unpack_levels(kind, _mm512_loadu_si512(levels + j * PANEL), panel + (at + j) * 4 * PANEL);
    }
}

/* Values of two keys, side by side, into row `pair` of each panel [KEYS/2][16][2] of 16 dimensions. */
static void lay_out_values(int64_t kind, const void *first, const void *second, int64_t dim, int pair, bf16 *panels) {
    for (int64_t d = 0; d < dim; d += PANEL) {
        __m512i both;
        if (kind == PAGES_BF16) {
            const __m256i low = first ? _mm256_loadu_si256((const __m256i *)((const bf16 *)first + d)) : _mm256_setzero_si256();
            const __m256i high = second ? _mm256_loadu_si256((const __m256i *)((const bf16 *)second + d)) : _mm256_setzero_si256();
            both = _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
        } else {
            const __m128i low = first ? _mm_loadu_si128((const __m128i *)((const uint8_t *)first + d)) : _mm_setzero_si128();
            const __m128i high = second ? _mm_loadu_si128((const __m128i *)((const uint8_t *)second + d)) : _mm_setzero_si128();
            if (kind == PAGES_INT8) both = int_lanes(_mm512_cvtepi8_epi32(low), _mm512_cvtepi8_epi32(high));
            else
                both = fp8_lanes(_mm512_or_si512(_mm512_cvtepu8_epi32(low),
                                                 _mm512_slli_epi32(_mm512_cvtepu8_epi32(high), 16)));
        }
        _mm512_storeu_si512(panels + d * KEYS + pair * 2 * PANEL, both);
    }
}

void lay_out_kv(const Pages *pages, int64_t head, const int64_t *slots, int num, Laid *to) {
    const int64_t bytes = pages->head_dim * (pages->kind == PAGES_BF16 ? (int64_t)sizeof(bf16) : 1);
    const void *keys[KEYS], *values[KEYS];
    for (int i = 0; i < KEYS; i++) {
        const int64_t at = i < num ? head * pages->slots + slots[i] : -1;
        keys[i] = at < 0 ? NULL : (const uint8_t *)pages->keys + at * bytes;
        values[i] = at < 0 ? NULL : (const uint8_t *)pages->values + at * bytes;
        to->key_scales[i] = at < 0 || !pages->key_scales ? 1.0f : bf16_to_f32(pages->key_scales[at]);
        to->value_scales[i] = at < 0 || !pages->value_scales ? 1.0f : bf16_to_f32(pages->value_scales[at]);
    }
    const int panels = (num + PANEL - 1) / PANEL;
    for (int p = 0; p < panels; p++)
        lay_out_keys(pages->kind, keys + p * PANEL, pages->head_dim, to->keys + p * PANEL * pages->head_dim);
    for (int pair = 0; pair < panels * PANEL / 2; pair++)
        lay_out_values(pages->kind, values[2 * pair], values[2 * pair + 1], pages->head_dim, pair, to->values);
}
