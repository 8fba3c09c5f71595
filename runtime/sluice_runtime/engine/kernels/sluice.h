/* What the kernels and `native.py` agree on; the structures are mirrored there field by field.
 *
 * Everything runs inside one parallel region of the caller's OpenMP pool: a phase ends with `meet_all`, and
 * each thread takes its share by (`thread`, `num_threads`). Invariant: a row's result is made of the same
 * operations in the same order whatever other rows are in the batch, so it is the same bit for bit, alone or
 * batched, by prefill or by decode.
 */
#ifndef SLUICE_H
#define SLUICE_H

#include <immintrin.h>
#include <sched.h>
#include <stdint.h>

#define PANEL 16      /* outputs side by side in a register */
#define MAX_PANELS 4  /* panels computed at once */
#define MAX_ROWS 6    /* rows computed at once: 24 accumulators of 32 registers */
#define TILE_WIDTH (PANEL * MAX_PANELS)
#define STEP 32       /* INT8, INT4: values of a row that share a scale, */
#define LEAST_STEP 8  /* or as few where groups of weights end within */

typedef uint16_t bf16;

typedef enum { KIND_BF16 = 0, KIND_INT8 = 1, KIND_INT4 = 2, KIND_W8A8 = 3 } Kind;

/* y = x W^T + bias. Weights lie in panels of 16 outputs, padded with zeros to whole panels:
 *   BF16  [panel][in/2][16][2]      INT8, plus 128, and W8A8  [panel][in/4][16][4]
 *   INT4  [panel][in/8][16][4] of bytes, inputs 0 to 3 of eight in their lower nibbles, 4 to 7 in the upper */
typedef struct {
    const void *weight;
    const void *scale; /* INT8, W8A8: float [panels * 16]; INT4: bfloat16 [panel][in/group][16] */
    const uint8_t *zero; /* INT4: as scale; NULL: 8 */
    const int32_t *sums; /* W8A8: 128 times the sum of each output's weights, [panels * 16] */
    const float *bias;   /* [panels * 16] or NULL */
    int32_t kind, in, out, group;
} Linear;

/* A product's input of several rows; all but x is filled while it is computed. */
typedef struct {
    const bf16 *x; /* [rows, in] */
    uint8_t *levels; /* W8A8: x / scale + 128; INT8, INT4: x / scale with its sign; [rows, in] */
    float *scale;    /* W8A8: [rows]; INT8, INT4: [rows, steps] */
    int32_t *sums;   /* INT8, INT4: of the levels, [rows, steps] */
    float *wide;     /* BF16 where `wide_is_faster`: x, [rows, in] */
    uint8_t *expanded; /* INT4: a thread's [4][in/4][16][4] of the weights it is at, 0 to 15 */
} Input;

typedef enum { STORE_BF16, STORE_F32, ADD_F32, STORE_GATED } Store;

/* Where a product goes: `to` [rows, stride] of bf16 or float. */
typedef struct {
    Store store;
    void *to;
    int64_t stride;
} Output;

typedef struct {
    int32_t arrived, phase;
} Barrier;

typedef struct {
    int thread, num_threads;
    Barrier *barrier;
} Team;

/* Until all threads are here. Spins a while, since a layer's parts are uneven; then it gives its processor
 * away, since another thread may wait for just that one. */
static inline void meet_all(Team team) {
    Barrier *b = team.barrier;
    const int32_t phase = __atomic_load_n(&b->phase, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&b->arrived, 1, __ATOMIC_ACQ_REL) == team.num_threads) {
        __atomic_store_n(&b->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&b->phase, phase + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int spins = 0; __atomic_load_n(&b->phase, __ATOMIC_ACQUIRE) == phase; spins++)
        if (spins < 1000) _mm_pause();
        else sched_yield();
}

static inline float bf16_to_f32(bf16 x) {
    union { uint32_t u; float f; } v = {(uint32_t)x << 16};
    return v.f;
}
static inline __m512 load_bf16(const bf16 *x) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16));
}
static inline void store_bf16(bf16 *to, __m512 x) {
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(x));
}
/* 2^x for x <= 0 or so, to about 1e-7: x is split at the nearest whole number. */
static inline __m512 exp2_ps(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-126.0f));
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_sub_ps(x, whole);
    __m512 p = _mm512_set1_ps(1.5403530e-4f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.3333558e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6181291e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504109e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022651e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}

/* A kernel multiplies `rows` rows from `row` with the panels `at[0]` to `at[panels - 1]` into `tile`
 * [rows][64]; scales are applied, biases are not. */
typedef void Kernel(const Linear *linear, const Input *input, int row, int rows, const int *at, int panels,
                    float *tile);

/* tile.c */
void bf16_tile(int rows, int panels, const bf16 *x, int64_t stride, const bf16 *const *weight, int in,
               float *tile);
/* The same by the faster way; `wide` is x as floats, and is all that is read where `wide_is_faster`. */
void fastest_tile(int rows, int panels, const bf16 *x, const float *wide, int64_t stride, const bf16 *const *weight,
                  int in, float *tile);
Kernel bf16_product;
extern int wide_is_faster; /* whether products of bfloat16 are summed by float32's own instructions */
void choose_products(void);

/* integer.c */
Kernel int8_product, int4_product, w8a8_product, int4_expanded;
void expand(const Linear *linear, int panel, uint8_t *to /* [in/4][16][4] */);

/* prepare.c */
int step_size(const Linear *linear); /* INT8, INT4: at most STEP */
int num_steps(const Linear *linear);
int needs_preparation(const Linear *linear);
void widen_row(const bf16 *x, int in, float *to);
void prepare_row(const Linear *linear, const Input *input, int row);

/* linear.c */
int num_panels(const Linear *linear);
void product(const Linear *linear, const Input *input, int rows, const Output *output, Team team);

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* One copy of a kernel for each size of a tile, so that its accumulators stay in registers. */
#define EACH_PANELS(KERNEL, R, ...)                 \
    switch (panels) {                               \
        case 1: KERNEL(R, 1, __VA_ARGS__); return;  \
        case 2: KERNEL(R, 2, __VA_ARGS__); return;  \
        case 3: KERNEL(R, 3, __VA_ARGS__); return;  \
        default: KERNEL(R, 4, __VA_ARGS__); return; \
    }
#define EACH_SIZE(KERNEL, ...)                      \
    switch (rows) {                                 \
        case 1: EACH_PANELS(KERNEL, 1, __VA_ARGS__) \
        case 2: EACH_PANELS(KERNEL, 2, __VA_ARGS__) \
        case 3: EACH_PANELS(KERNEL, 3, __VA_ARGS__) \
        case 4: EACH_PANELS(KERNEL, 4, __VA_ARGS__) \
        case 5: EACH_PANELS(KERNEL, 5, __VA_ARGS__) \
        default: EACH_PANELS(KERNEL, 6, __VA_ARGS__) \
    }

/* Two neighbouring inputs of a row, or four of 8 bits, in every lane. */
static inline __m512i pair_at(const bf16 *x) {
    int32_t pair;
    __builtin_memcpy(&pair, x, 4);
    return _mm512_set1_epi32(pair);
}
static inline __m512i four_at(const void *x) {
    int32_t four;
    __builtin_memcpy(&four, x, 4);
    return _mm512_set1_epi32(four);
}

#endif
