/* Products of integers. For INT8 and INT4 a row's values are rounded to 8 bits, each 32 of them by a scale of their
 * own (prepare.c), as llama.cpp does for its Q8_0 and Q4_0. Sums within such a step are exact and steps are added
 * in order, so a result has the same bits whichever way weights were unpacked. */
#include "sluice.h"

/* How far ahead weights are asked for where they come from memory, bytes. */
#define AHEAD 2048

static const uint8_t *bytes_of(const Linear *linear, int panel) {
    int64_t size = (int64_t)linear->in * PANEL / (linear->kind == KIND_INT4 ? 2 : 1);
    return (const uint8_t *)linear->weight + panel * size;
}

/* sum += the product of four inputs of each row with those of each output, which are 0 to 255. */
ALWAYS_INLINE void add_four(const int rows, const int panels, const int8_t *x, int64_t stride,
                            const __m512i w[MAX_PANELS], __m512i sum[MAX_ROWS][MAX_PANELS]) {
    for (int r = 0; r < rows; r++) {
        const __m512i v = four_at(x + r * stride);
        for (int p = 0; p < panels; p++) sum[r][p] = _mm512_dpbusd_epi32(sum[r][p], w[p], v);
    }
}

/* -- weights of 8 bits ------------------------------------------------------------------------------------ */

ALWAYS_INLINE void int8_step(const int rows, const int panels, const int8_t *x, int64_t stride,
                             const uint8_t *const *weight, int64_t from, const int size,
                             __m512i sum[MAX_ROWS][MAX_PANELS]) {
    for (int k = 0; k < size; k += 4) {
        __m512i w[MAX_PANELS];
        for (int p = 0; p < panels; p++) {
            w[p] = _mm512_loadu_si512(weight[p] + (from + k) * PANEL);
            if (rows <= 2) _mm_prefetch((const char *)weight[p] + (from + k) * PANEL + AHEAD, _MM_HINT_T0);
        }
        add_four(rows, panels, x + from + k, stride, w, sum);
    }
}

ALWAYS_INLINE void int8_kernel(const int rows, const int panels, const Linear *linear, const Input *input, int row,
                               const int *at, float *tile) {
    const int in = linear->in, steps = num_steps(linear);
    const int8_t *x = (const int8_t *)input->levels + (int64_t)row * in;
    const float *scale = input->scale + (int64_t)row * steps;
    const int32_t *sums = input->sums + (int64_t)row * steps;
    const uint8_t *weight[MAX_PANELS];
    __m512 total[MAX_ROWS][MAX_PANELS];
    for (int p = 0; p < panels; p++) weight[p] = bytes_of(linear, at[p]);
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) total[r][p] = _mm512_setzero_ps();
    for (int step = 0; step < steps; step++) {
        __m512i sum[MAX_ROWS][MAX_PANELS];
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < panels; p++) sum[r][p] = _mm512_set1_epi32(-128 * sums[r * steps + step]);
        const int from = step * STEP;
        if (in - from >= STEP) int8_step(rows, panels, x, in, weight, from, STEP, sum);
        else int8_step(rows, panels, x, in, weight, from, in - from, sum);
        for (int r = 0; r < rows; r++) {
            const __m512 factor = _mm512_set1_ps(scale[r * steps + step]);
            for (int p = 0; p < panels; p++)
                total[r][p] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][p]), factor, total[r][p]);
        }
    }
    for (int p = 0; p < panels; p++) {
        const __m512 outputs = _mm512_loadu_ps((const float *)linear->scale + at[p] * PANEL);
        for (int r = 0; r < rows; r++)
            _mm512_storeu_ps(tile + r * TILE_WIDTH + p * PANEL, _mm512_mul_ps(total[r][p], outputs));
    }
}

void int8_product(const Linear *linear, const Input *input, int row, int rows, const int *at, int panels,
                  float *tile) {
    EACH_SIZE(int8_kernel, linear, input, row, at, tile)
}

/* -- weights of 4 bits ------------------------------------------------------------------------------------ */

/* Four neighbouring inputs of each output, 0 to 15; the `upper` ones are the next four. */
ALWAYS_INLINE __m512i nibbles(__m512i bytes, const int upper) {
    return _mm512_and_si512(upper ? _mm512_srli_epi16(bytes, 4) : bytes, _mm512_set1_epi8(15));
}

void expand(const Linear *linear, int panel, uint8_t *to) {
    const uint8_t *from = bytes_of(linear, panel);
    for (int k = 0; k < linear->in; k += 8) {
        const __m512i bytes = _mm512_loadu_si512(from + k * PANEL / 2);
        _mm512_storeu_si512(to + k * PANEL, nibbles(bytes, 0));
        _mm512_storeu_si512(to + (k + 4) * PANEL, nibbles(bytes, 1));
    }
}

/* Of a group's weights: scale, and (8 - zero) * scale. */
typedef struct {
    __m512 scale, shift;
} Group;

ALWAYS_INLINE Group group_at(const Linear *linear, int64_t from, const int zeros) {
    Group found = {load_bf16((const bf16 *)linear->scale + from), _mm512_setzero_ps()};
    if (zeros && linear->zero) {
        const __m512i zero = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(linear->zero + from)));
        found.shift = _mm512_mul_ps(found.scale, _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_set1_epi32(8), zero)));
    }
    return found;
}

/* `expanded`: `packed` holds bytes. */
ALWAYS_INLINE void int4_step(const int rows, const int panels, const int expanded, const int size, const int8_t *x,
                             int64_t stride, const uint8_t *const *packed, int64_t from,
                             __m512i sum[MAX_ROWS][MAX_PANELS]) {
    for (int64_t k = from; k < from + size; k += 8)
        for (int upper = 0; upper < 2; upper++) {
            __m512i w[MAX_PANELS];
            for (int p = 0; p < panels; p++) {
                if (expanded) {
                    w[p] = _mm512_loadu_si512(packed[p] + (k + 4 * upper) * PANEL);
                    continue;
                }
                w[p] = nibbles(_mm512_loadu_si512(packed[p] + k * PANEL / 2), upper);
                if (rows <= 2 && !upper) _mm_prefetch((const char *)packed[p] + k * PANEL / 2 + AHEAD, _MM_HINT_T0);
            }
            add_four(rows, panels, x + k + 4 * upper, stride, w, sum);
            /* They are loaded again, from the first-level cache: there are no registers to keep them in. */
            if (rows > 4) __asm__ volatile("" ::: "memory");
        }
}

/* Levels are 0 to 15, so eight times the sum of a row's is taken off. */
ALWAYS_INLINE void int4_kernel(const int rows, const int panels, const int expanded, const int zeros, const int size,
                               const Linear *linear, const Input *input, int row, const int *at, float *tile) {
    const int in = linear->in, steps = in / size, groups = in / linear->group;
    const int8_t *x = (const int8_t *)input->levels + (int64_t)row * in;
    const float *scale = input->scale + (int64_t)row * steps;
    const int32_t *sums = input->sums + (int64_t)row * steps;
    const uint8_t *packed[MAX_PANELS];
    __m512 total[MAX_ROWS][MAX_PANELS];
    for (int p = 0; p < panels; p++)
        packed[p] = expanded ? input->expanded + (int64_t)p * PANEL * in : bytes_of(linear, at[p]);
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) total[r][p] = _mm512_setzero_ps();
    for (int step = 0, group = 0; step < steps; step++) {
        __m512i sum[MAX_ROWS][MAX_PANELS];
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < panels; p++) sum[r][p] = _mm512_set1_epi32(-8 * sums[r * steps + step]);
        int4_step(rows, panels, expanded, size, x, in, packed, (int64_t)step * size, sum);
        if (step * size == (group + 1) * linear->group) group++;
        /* Unrolled, or sums would have to lie in memory. */
#pragma clang loop unroll(full)
        for (int p = 0; p < panels; p++) {
            const Group of = group_at(linear, ((int64_t)at[p] * groups + group) * PANEL, zeros);
#pragma clang loop unroll(full)
            for (int r = 0; r < rows; r++) {
                const float own = scale[r * steps + step];
                const __m512 factor = _mm512_mul_ps(of.scale, _mm512_set1_ps(own));
                total[r][p] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][p]), factor, total[r][p]);
                if (!zeros) continue;
                const __m512 all = _mm512_set1_ps(own * (float)sums[r * steps + step]);
                total[r][p] = _mm512_fmadd_ps(all, of.shift, total[r][p]);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) _mm512_storeu_ps(tile + r * TILE_WIDTH + p * PANEL, total[r][p]);
}

static void int4_tile(int rows, int panels, const Linear *linear, const Input *input, int row, const int *at,
                      float *tile) {
    EACH_SIZE(int4_kernel, 0, 0, STEP, linear, input, row, at, tile)
}
static void int4_tile_zeros(int rows, int panels, const Linear *linear, const Input *input, int row, const int *at,
                            float *tile) {
    EACH_SIZE(int4_kernel, 0, 1, STEP, linear, input, row, at, tile)
}
static void expanded_tile(int rows, int panels, const Linear *linear, const Input *input, int row, const int *at,
                          float *tile) {
    EACH_SIZE(int4_kernel, 1, 0, STEP, linear, input, row, at, tile)
}
static void expanded_tile_zeros(int rows, int panels, const Linear *linear, const Input *input, int row,
                                const int *at, float *tile) {
    EACH_SIZE(int4_kernel, 1, 1, STEP, linear, input, row, at, tile)
}
/* Groups that are no multiples of STEP: seldom, so a row at a time. */
static void odd_tile(int panels, const Linear *linear, const Input *input, int row, const int *at, float *tile) {
    EACH_PANELS(int4_kernel, 1, 0, 1, step_size(linear), linear, input, row, at, tile)
}

void int4_product(const Linear *linear, const Input *input, int row, int rows, const int *at, int panels,
                  float *tile) {
    if (step_size(linear) != STEP)
        for (int r = 0; r < rows; r++) odd_tile(panels, linear, input, row + r, at, tile + r * TILE_WIDTH);
    else (linear->zero ? int4_tile_zeros : int4_tile)(rows, panels, linear, input, row, at, tile);
}

void int4_expanded(const Linear *linear, const Input *input, int row, int rows, const int *at, int panels,
                   float *tile) {
    (linear->zero ? expanded_tile_zeros : expanded_tile)(rows, panels, linear, input, row, at, tile);
}

/* -- both sides in 8 bits --------------------------------------------------------------------------------- */

ALWAYS_INLINE void w8a8_kernel(const int rows, const int panels, const Linear *linear, const Input *input, int row,
                               const int *at, float *tile) {
    const int in = linear->in;
    const uint8_t *x = input->levels + (int64_t)row * in;
    const uint8_t *weight[MAX_PANELS];
    __m512i sum[MAX_ROWS][MAX_PANELS];
    for (int p = 0; p < panels; p++) weight[p] = bytes_of(linear, at[p]);
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) sum[r][p] = _mm512_setzero_si512();
    for (int k = 0; k < in; k += 4) {
        __m512i w[MAX_PANELS];
        for (int p = 0; p < panels; p++) {
            w[p] = _mm512_loadu_si512(weight[p] + k * PANEL);
            if (rows <= 2) _mm_prefetch((const char *)weight[p] + k * PANEL + AHEAD, _MM_HINT_T0);
        }
        for (int r = 0; r < rows; r++) {
            const __m512i v = four_at(x + (int64_t)r * in + k);
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
