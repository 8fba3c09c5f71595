/* The product that everything rests on: up to six rows with up to 64 outputs in bfloat16, sums in float32. */
#include "sluice.h"

/* How far ahead weights are asked for where they come from memory, bytes. */
#define AHEAD 2048

ALWAYS_INLINE void bf16_kernel(const int rows, const int panels, const bf16 *x, int64_t stride,
                               const bf16 *const *weight, int in, float *tile) {
    __m512 sum[MAX_ROWS][MAX_PANELS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) sum[r][p] = _mm512_setzero_ps();
    for (int k = 0; k < in; k += 2) {
        __m512i w[MAX_PANELS];
        for (int p = 0; p < panels; p++) {
            w[p] = _mm512_loadu_si512(weight[p] + k * PANEL);
            if (rows <= 2) _mm_prefetch((const char *)(weight[p] + k * PANEL) + AHEAD, _MM_HINT_T0);
        }
        for (int r = 0; r < rows; r++) {
            const __m512i v = pair_at(x + r * stride + k);
            for (int p = 0; p < panels; p++) sum[r][p] = _mm512_dpbf16_ps(sum[r][p], (__m512bh)v, (__m512bh)w[p]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) _mm512_storeu_ps(tile + r * TILE_WIDTH + p * PANEL, sum[r][p]);
}

void bf16_tile(int rows, int panels, const bf16 *x, int64_t stride, const bf16 *const *weight, int in,
               float *tile) {
    EACH_SIZE(bf16_kernel, x, stride, weight, in, tile)
}

void bf16_product(const Linear *linear, const Input *input, int row, int rows, const int *at, int panels,
                  float *tile) {
    const bf16 *weight[MAX_PANELS];
    for (int p = 0; p < panels; p++) weight[p] = (const bf16 *)linear->weight + (int64_t)at[p] * PANEL * linear->in;
    bf16_tile(rows, panels, input->x + row * input->stride, input->stride, weight, linear->in, tile);
}
