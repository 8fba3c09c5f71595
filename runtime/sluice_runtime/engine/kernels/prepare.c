/* What products need of a row before it is multiplied. */
#include "sluice.h"

#include <math.h>

/* As in quantized.py. */
#define LEAST_SCALE 1e-12f

int needs_preparation(const Linear *linear) { return linear->kind != KIND_BF16 || wide_is_faster; }

/* The largest that divides both STEP and a group of weights, so that a step lies within one group. */
int step_size(const Linear *linear) {
    int size = STEP;
    while (linear->kind == KIND_INT4 && linear->group % size) size /= 2;
    return size;
}

int num_steps(const Linear *linear) { return (linear->in + step_size(linear) - 1) / step_size(linear); }

ALWAYS_INLINE __mmask16 mask_of(int left) { return left >= PANEL ? 0xffff : (__mmask16)((1u << left) - 1); }

ALWAYS_INLINE __m512 load_some(const bf16 *x, __mmask16 mask) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x)), 16));
}

void widen_row(const bf16 *x, int in, float *to) {
    for (int i = 0; i < in; i += PANEL) {
        const __mmask16 mask = mask_of(in - i);
        _mm512_mask_storeu_ps(to + i, mask, load_some(x + i, mask));
    }
}

/* Of values whose magnitudes as whole numbers are at most `most`: 127 is the largest; what is not finite has the
 * largest bits of all and makes the scale NaN, so that it stays seen. */
static float scale_of(__m512i most) {
    const float largest = bf16_to_f32((bf16)(_mm512_reduce_max_epu32(most) >> 16));
    return isfinite(largest) ? fmaxf(largest / 127.0f, LEAST_SCALE) : NAN;
}

ALWAYS_INLINE __m512i magnitude(__m512 x) { return _mm512_castps_si512(_mm512_abs_ps(x)); }

/* A row to 8 bits, plus 128. */
static void round_row(const bf16 *x, int in, uint8_t *levels, float *scale) {
    __m512i most = _mm512_setzero_si512();
    for (int i = 0; i < in; i += PANEL) most = _mm512_max_epu32(most, magnitude(load_some(x + i, mask_of(in - i))));
    *scale = scale_of(most);
    const __m512 over = _mm512_set1_ps(1.0f / *scale);
    for (int i = 0; i < in; i += PANEL) {
        const __mmask16 mask = mask_of(in - i);
        __m512i level = _mm512_cvtps_epi32(_mm512_mul_ps(load_some(x + i, mask), over));
        _mm512_mask_cvtusepi32_storeu_epi8(levels + i, mask, _mm512_add_epi32(level, _mm512_set1_epi32(128)));
    }
}

/* Up to 32 values to 8 bits; returns the sum of their levels. */
static int32_t round_step(const bf16 *x, int count, int8_t *levels, float *scale) {
    const __mmask16 masks[2] = {mask_of(count), count > PANEL ? mask_of(count - PANEL) : 0};
    const __m512 values[2] = {load_some(x, masks[0]), load_some(x + PANEL, masks[1])};
    *scale = scale_of(_mm512_max_epu32(magnitude(values[0]), magnitude(values[1])));
    const __m512 over = _mm512_set1_ps(1.0f / *scale);
    __m512i sum = _mm512_setzero_si512();
    for (int half = 0; half < 2; half++) {
        const __m512i level = _mm512_cvtps_epi32(_mm512_mul_ps(values[half], over));
        _mm512_mask_cvtsepi32_storeu_epi8(levels + half * PANEL, masks[half], level);
        sum = _mm512_add_epi32(sum, level);
    }
    return isfinite(*scale) ? _mm512_reduce_add_epi32(sum) : 0;
}

void prepare_row(const Linear *linear, const Input *input, int row) {
    const int in = linear->in;
    const int64_t from = (int64_t)row * in;
    if (linear->kind == KIND_BF16) {
        if (wide_is_faster) widen_row(input->x + from, in, input->wide + from);
    } else if (linear->kind == KIND_W8A8) {
        round_row(input->x + from, in, input->levels + from, input->scale + row);
    } else {
        const int size = step_size(linear), steps = num_steps(linear);
        for (int step = 0; step < steps; step++) {
            const int k = step * size, count = in - k < size ? in - k : size;
            const int64_t at = (int64_t)row * steps + step;
            int8_t *levels = (int8_t *)input->levels + from + k;
            input->sums[at] = round_step(input->x + from + k, count, levels, input->scale + at);
        }
    }
}
