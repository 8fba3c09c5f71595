/* Whole products. A thread takes a range of panels and goes over all rows for four panels at a time: weights
 * come from memory once, and from the second-level cache for the next rows. */
#include "sluice.h"

/* From so many rows on it pays to unpack nibbles once for all. */
#define MANY_ROWS (2 * MAX_ROWS)

int num_panels(const Linear *linear) { return (linear->out + PANEL - 1) / PANEL; }

/* SiLU (arXiv 1606.08415) of the tile's first half, times its second. */
static void put_gated(const float *tile, int rows, int panel, int panels, bf16 *to, int64_t stride) {
    const __m512 one = _mm512_set1_ps(1.0f), log2e = _mm512_set1_ps(-1.44269504f);
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) {
            __m512 gate = _mm512_loadu_ps(tile + r * TILE_WIDTH + p * PANEL);
            __m512 up = _mm512_loadu_ps(tile + r * TILE_WIDTH + (panels + p) * PANEL);
            __m512 grown = exp2_ps(_mm512_min_ps(_mm512_mul_ps(gate, log2e), _mm512_set1_ps(126.0f)));
            __m512 silu = _mm512_div_ps(gate, _mm512_add_ps(one, grown));
            store_bf16(to + r * stride + (panel + p) * PANEL, _mm512_mul_ps(silu, up));
        }
}

static void add_bias(const float *bias, const int *at, float *tile, int rows, int panels) {
    for (int p = 0; p < panels; p++) {
        const __m512 more = _mm512_loadu_ps(bias + at[p] * PANEL);
        for (int r = 0; r < rows; r++) {
            float *to = tile + r * TILE_WIDTH + p * PANEL;
            _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), more));
        }
    }
}

static void put(const Linear *linear, const float *tile, int row, int rows, const int *at, int panels,
                const Output *output) {
    for (int p = 0; p < panels; p++) {
        const int column = at[p] * PANEL, left = linear->out - column;
        const __mmask16 mask = left >= PANEL ? 0xffff : (__mmask16)((1u << left) - 1);
        for (int r = 0; r < rows; r++) {
            __m512 value = _mm512_loadu_ps(tile + r * TILE_WIDTH + p * PANEL);
            const int64_t to = (row + r) * output->stride + column;
            if (output->store == STORE_BF16) {
                _mm256_mask_storeu_epi16((bf16 *)output->to + to, mask, (__m256i)_mm512_cvtneps_pbh(value));
                continue;
            }
            float *sum = (float *)output->to + to;
            if (output->store == ADD_F32) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, sum));
            _mm512_mask_storeu_ps(sum, mask, value);
        }
    }
}

static Kernel *kernel_of(const Linear *linear, int many) {
    switch ((Kind)linear->kind) {
        case KIND_INT8: return int8_product;
        case KIND_INT4: return many ? int4_expanded : int4_product;
        case KIND_W8A8: return w8a8_product;
        default: return bf16_product;
    }
}

void product(const Linear *linear, const Input *input, int rows, const Output *output, Team team) {
    const int gated = output->store == STORE_GATED, half = num_panels(linear) / 2;
    const int count = gated ? half : num_panels(linear), step = gated ? MAX_PANELS / 2 : MAX_PANELS;
    const int first = count * team.thread / team.num_threads, end = count * (team.thread + 1) / team.num_threads;
    const int many = rows >= MANY_ROWS && linear->kind == KIND_INT4 && step_size(linear) == STEP;
    Kernel *const kernel = kernel_of(linear, many);
    Input own = *input;
    own.expanded += (int64_t)team.thread * TILE_WIDTH * linear->in;
    float tile[MAX_ROWS * TILE_WIDTH];
    for (int panel = first; panel < end; panel += step) {
        const int wide = end - panel < step ? end - panel : step, panels = gated ? 2 * wide : wide;
        int at[MAX_PANELS];
        for (int p = 0; p < panels; p++) at[p] = p < wide ? panel + p : half + panel + p - wide;
        for (int p = 0; many && p < panels; p++) expand(linear, at[p], own.expanded + (int64_t)p * PANEL * linear->in);
        for (int row = 0; row < rows; row += MAX_ROWS) {
            const int few = rows - row < MAX_ROWS ? rows - row : MAX_ROWS;
            kernel(linear, &own, row, few, at, panels, tile);
            if (linear->bias) add_bias(linear->bias, at, tile, few, panels);
            if (gated)
                put_gated(tile, few, panel, wide, (bf16 *)output->to + row * output->stride, output->stride);
            else
                put(linear, tile, row, few, at, panels, output);
        }
    }
}
