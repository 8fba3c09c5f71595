/* Causal attention straight on pages, the same for a prompt's many queries and a stream's one.
 *
 * A tile is some queries of one request times the query heads that share a key head. Keys and values come by
 * 64, counted from position 0, are laid out as panels of weights, and meet the tile as two products with a
 * softmax that is corrected as larger scores turn up (Flash Attention, arXiv 2205.14135; online softmax,
 * arXiv 1805.02867). Invariant: what lies beyond a request's own positions is never read, so that nothing of
 * another request can reach it, not even a NaN.
 */
#include "model.h"

#include <string.h>

/* Where position `at` of a request lies in a head's KV. */
static inline int64_t slot_of(const int32_t *table, int64_t at, int64_t block_size) {
    return (int64_t)table[at / block_size] * block_size + at % block_size;
}

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

/* Keys [16 pointers] as a panel [head_dim/2][16][2]. */
static void pack_keys(const bf16 *const rows[PANEL], int64_t head_dim, bf16 *panel) {
    for (int64_t at = 0; at < head_dim / 2; at += PANEL) {
        const uint32_t *from[PANEL];
        for (int i = 0; i < PANEL; i++) from[i] = rows[i] ? (const uint32_t *)rows[i] + at : NULL;
        int left = (int)(head_dim / 2 - at);
        transpose(from, (uint32_t *)panel + at * PANEL, left < PANEL ? left : PANEL);
    }
}

/* Values of two keys, side by side, into each panel [KEYS/2][16][2] of 16 dimensions. */
static void pack_values(const bf16 *first, const bf16 *second, int64_t head_dim, int pair, bf16 *panels) {
    for (int64_t d = 0; d < head_dim; d += PANEL) {
        __m256i low = first ? _mm256_loadu_si256((const __m256i *)(first + d)) : _mm256_setzero_si256();
        __m256i high = second ? _mm256_loadu_si256((const __m256i *)(second + d)) : _mm256_setzero_si256();
        __m512i both = _mm512_or_si512(_mm512_cvtepu16_epi32(low),
                                       _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
        _mm512_storeu_si512(panels + d * KEYS + pair * 2 * PANEL, both);
    }
}

typedef struct {
    bf16 queries[MAX_QUERIES * MAX_HEAD_DIM];
    float wide_queries[MAX_QUERIES * MAX_HEAD_DIM], wide_weights[MAX_QUERIES * KEYS]; /* if `wide_is_faster` */
    float sum[MAX_QUERIES * MAX_HEAD_DIM];
    float scores[MAX_QUERIES * KEYS];
    bf16 weights[MAX_QUERIES * KEYS];
    float part[MAX_ROWS * TILE_WIDTH];
    bf16 keys[KEYS * MAX_HEAD_DIM], values[KEYS * MAX_HEAD_DIM];
    __m512 total[MAX_QUERIES];
    float largest[MAX_QUERIES], decay[MAX_QUERIES];
} Tile;

/* Scores of one row to weights; what position `at` may not see (beyond it, or `window` behind) weighs 0. */
static void soften(Tile *t, int row, int64_t first_key, int64_t at, int64_t window, float factor) {
    __m512 score[KEYS / PANEL], most = _mm512_set1_ps(-1e30f);
    __mmask16 seen[KEYS / PANEL];
    for (int p = 0; p < KEYS / PANEL; p++) {
        int64_t end = at + 1 - first_key - p * PANEL, begin = window ? end - window : 0;
        seen[p] = end >= PANEL ? 0xffff : end <= 0 ? 0 : (__mmask16)((1u << end) - 1);
        if (begin > 0) seen[p] &= begin >= PANEL ? 0 : (__mmask16)(0xffffu << begin);
        score[p] = _mm512_mul_ps(_mm512_loadu_ps(t->scores + row * KEYS + p * PANEL), _mm512_set1_ps(factor));
        most = _mm512_mask_max_ps(most, seen[p], most, score[p]);
    }
    float before = t->largest[row], now = _mm512_reduce_max_ps(most);
    if (now < before) now = before;
    t->largest[row] = now;
    __m512 decay = exp2_ps(_mm512_set1_ps(before - now)), sum = _mm512_mul_ps(t->total[row], decay);
    t->decay[row] = _mm512_cvtss_f32(decay);
    for (int p = 0; p < KEYS / PANEL; p++) {
        __m512 weight = _mm512_maskz_mov_ps(seen[p], exp2_ps(_mm512_sub_ps(score[p], _mm512_set1_ps(now))));
        sum = _mm512_add_ps(sum, weight);
        if (wide_is_faster) _mm512_storeu_ps(t->wide_weights + row * KEYS + p * PANEL, weight);
        else store_bf16(t->weights + row * KEYS + p * PANEL, weight);
    }
    t->total[row] = sum;
}

/* The keys from `first_key` on for all rows of a tile. */
static void meet(Tile *t, const Model *model, const Layer *layer, const int32_t *table, int64_t head,
                 int64_t first_key, int64_t num_keys, int rows, int group, int64_t first_at) {
    const int64_t dim = model->head_dim;
    const bf16 *keys = layer->keys + head * model->slots * dim, *values = layer->values + head * model->slots * dim;
    const bf16 *from[KEYS], *value[KEYS];
    for (int64_t i = 0; i < KEYS; i++) {
        int64_t at = i < num_keys ? slot_of(table, first_key + i, model->block_size) * dim : -1;
        from[i] = at < 0 ? NULL : keys + at;
        value[i] = at < 0 ? NULL : values + at;
    }
    const int panels = (int)((num_keys + PANEL - 1) / PANEL);
    for (int p = 0; p < panels; p++) pack_keys(from + p * PANEL, dim, t->keys + p * PANEL * dim);
    for (int pair = 0; pair < panels * PANEL / 2; pair++)
        pack_values(value[2 * pair], value[2 * pair + 1], dim, pair, t->values);
    for (int row = 0; row < rows; row += MAX_ROWS) {
        int count = rows - row < MAX_ROWS ? rows - row : MAX_ROWS;
        const bf16 *weight[MAX_PANELS];
        for (int p = 0; p < panels; p++) weight[p] = t->keys + p * PANEL * dim;
        fastest_tile(count, panels, t->queries + row * dim, t->wide_queries + row * dim, dim, weight, (int)dim,
                     t->scores + row * KEYS);
        for (int r = row; r < row + count; r++)
            soften(t, r, first_key, first_at + r / group, layer->window, model->scaling * 1.44269504f);
        for (int64_t d = 0; d < dim; d += TILE_WIDTH) {
            int wide = dim - d < TILE_WIDTH ? (int)(dim - d) / PANEL : MAX_PANELS;
            for (int p = 0; p < wide; p++) weight[p] = t->values + (d + p * PANEL) * KEYS;
            fastest_tile(count, wide, t->weights + row * KEYS, t->wide_weights + row * KEYS, KEYS, weight,
                         panels * PANEL, t->part);
            for (int r = 0; r < count; r++)
                for (int p = 0; p < wide; p++) {
                    float *sum = t->sum + (row + r) * dim + d + p * PANEL;
                    __m512 part = _mm512_loadu_ps(t->part + r * TILE_WIDTH + p * PANEL);
                    _mm512_storeu_ps(sum, _mm512_fmadd_ps(_mm512_loadu_ps(sum), _mm512_set1_ps(t->decay[row + r]), part));
                }
        }
    }
}

static void attend_tile(const Model *model, const Step *step, const Work *work, const Layer *layer, int64_t tile,
                        int64_t head) {
    Tile t;
    const Span *span = step->spans + work->tile_span[tile];
    const int64_t dim = model->head_dim, width = (model->heads + 2 * model->kv_heads) * dim;
    const int group = (int)(model->heads / model->kv_heads), first = work->tile_first[tile];
    int64_t queries = span->num_queries - first;
    if (queries > work->queries_per_tile) queries = work->queries_per_tile;
    const int rows = (int)queries * group;
    const int64_t first_row = span->first + first, first_at = span->start + first, end = first_at + queries;
    for (int64_t q = 0; q < queries; q++)
        memcpy(t.queries + q * group * dim, work->qkv + (first_row + q) * width + head * group * dim,
               group * dim * sizeof(bf16));
    if (wide_is_faster) widen_row(t.queries, (int)(rows * dim), t.wide_queries);
    memset(t.sum, 0, rows * dim * sizeof(float));
    for (int r = 0; r < rows; r++) t.total[r] = _mm512_setzero_ps(), t.largest[r] = -1e30f;
    int64_t from = layer->window && first_at >= layer->window ? (first_at + 1 - layer->window) / KEYS * KEYS : 0;
    for (int64_t key = from; key < end; key += KEYS)
        meet(&t, model, layer, step->tables + span->table, head, key, end - key < KEYS ? end - key : KEYS, rows,
             group, first_at);
    for (int r = 0; r < rows; r++) {
        const __m512 over = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(t.total[r]));
        bf16 *to = work->attended + (first_row + r / group) * model->heads * dim + (head * group + r % group) * dim;
        for (int64_t d = 0; d < dim; d += PANEL)
            store_bf16(to + d, _mm512_mul_ps(_mm512_loadu_ps(t.sum + r * dim + d), over));
    }
}

/* Threads take tiles as they get free, the last first: those of long contexts. */
void attend(const Model *model, const Step *step, const Work *work, int64_t layer) {
    const int64_t items = work->num_tiles * model->kv_heads;
    for (;;) {
        int64_t item = items - 1 - __atomic_fetch_add(work->taken + layer, 1, __ATOMIC_RELAXED);
        if (item < 0) return;
        attend_tile(model, step, work, model->layers + layer, item / model->kv_heads, item % model->kv_heads);
    }
}
