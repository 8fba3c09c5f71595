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

/* -- the same in float32 ---------------------------------------------------------------------------------- */

/* Some processors multiply floats twice as fast as pairs of bfloat16, others half as fast. */
int wide_is_faster = 0;

ALWAYS_INLINE void wide_kernel(const int rows, const int panels, const float *x, int64_t stride,
                               const bf16 *const *weight, int in, float *tile) {
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
    __m512 sum[MAX_ROWS][MAX_PANELS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) sum[r][p] = _mm512_setzero_ps();
    for (int k = 0; k < in; k += 2)
        for (int odd = 0; odd < 2; odd++) {
            __m512 w[MAX_PANELS];
            for (int p = 0; p < panels; p++) {
                const __m512i pairs = _mm512_loadu_si512(weight[p] + k * PANEL);
                w[p] = _mm512_castsi512_ps(odd ? _mm512_and_si512(pairs, upper) : _mm512_slli_epi32(pairs, 16));
                if (rows <= 2 && !odd) _mm_prefetch((const char *)(weight[p] + k * PANEL) + AHEAD, _MM_HINT_T0);
            }
            for (int r = 0; r < rows; r++) {
                const __m512 v = _mm512_set1_ps(x[r * stride + k + odd]);
                for (int p = 0; p < panels; p++) sum[r][p] = _mm512_fmadd_ps(v, w[p], sum[r][p]);
            }
            /* Pairs are loaded again, from the first-level cache: there are no registers to keep them in. */
            if (rows > 4) __asm__ volatile("" ::: "memory");
        }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) _mm512_storeu_ps(tile + r * TILE_WIDTH + p * PANEL, sum[r][p]);
}

static void wide_tile(int rows, int panels, const float *x, int64_t stride, const bf16 *const *weight, int in,
                      float *tile) {
    EACH_SIZE(wide_kernel, x, stride, weight, in, tile)
}

/* -- which of them ---------------------------------------------------------------------------------------- */

#define TRIED 256 /* inputs of the tile that is timed: it stays in the first-level cache */

/* Cycles of the processor's clock for some tiles, the least of several tries. */
static uint64_t cycles(int wide) {
    static bf16 weight[MAX_PANELS][TRIED * PANEL], x[MAX_ROWS * TRIED];
    static float floats[MAX_ROWS * TRIED], tile[MAX_ROWS * TILE_WIDTH];
    const bf16 *from[MAX_PANELS];
    for (int p = 0; p < MAX_PANELS; p++) from[p] = weight[p];
    uint64_t least = UINT64_MAX;
    for (int nth = 0; nth < 50; nth++) {
        /* As if all of it were read and written elsewhere, or the compiler would compute it once. */
        __asm__ volatile("" : : "r"(weight), "r"(x), "r"(floats), "r"(tile) : "memory");
        const uint64_t begin = __rdtsc();
        if (wide) wide_tile(MAX_ROWS, MAX_PANELS, floats, TRIED, from, TRIED, tile);
        else bf16_tile(MAX_ROWS, MAX_PANELS, x, TRIED, from, TRIED, tile);
        __asm__ volatile("" : : "r"(tile) : "memory");
        const uint64_t took = __rdtsc() - begin;
        if (took < least) least = took;
    }
    return least;
}

void fastest_tile(int rows, int panels, const bf16 *x, const float *wide, int64_t stride, const bf16 *const *weight,
                  int in, float *tile) {
    if (wide_is_faster) wide_tile(rows, panels, wide, stride, weight, in, tile);
    else bf16_tile(rows, panels, x, stride, weight, in, tile);
}

void bf16_product(const Linear *linear, const Input *input, int row, int rows, const int *at, int panels,
                  float *tile) {
    const int64_t from = (int64_t)row * linear->in;
    const bf16 *weight[MAX_PANELS];
    for (int p = 0; p < panels; p++) weight[p] = (const bf16 *)linear->weight + (int64_t)at[p] * PANEL * linear->in;
    fastest_tile(rows, panels, input->x + from, input->wide + from, linear->in, weight, linear->in, tile);
}

void choose_products(void) { wide_is_faster = cycles(1) < cycles(0); }
