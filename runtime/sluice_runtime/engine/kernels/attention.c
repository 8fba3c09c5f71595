/* Causal attention straight on pages, the same for a prompt's many queries and a stream's one.
 *
 * A tile is some queries of one request times the query heads that share a key head. Keys and values come by
 * 64, counted from position 0, are laid out as panels of weights (pages.c), and meet the tile as two products with a
 * softmax that is corrected as larger scores turn up (Flash Attention, arXiv 2205.14135; online softmax,
 * arXiv 1805.02867). Scales of quantised pages meet the scores, and the weights. Invariant: what lies beyond a request's own positions is never read, so that nothing of
 * another request can reach it, not even a NaN.
 */
#include "model.h"

#include <string.h>

/* Where position `at` of a request lies in a head's KV. */
static inline int64_t slot_of(const int32_t *table, int64_t at, int64_t block_size) {
    return (int64_t)table[at / block_size] * block_size + at % block_size;
}

typedef struct {
    bf16 queries[MAX_QUERIES * MAX_HEAD_DIM];
    float wide_queries[MAX_QUERIES * MAX_HEAD_DIM], wide_weights[MAX_QUERIES * KEYS]; /* if `wide_is_faster` */
    float sum[MAX_QUERIES * MAX_HEAD_DIM];
    float scores[MAX_QUERIES * KEYS];
    bf16 weights[MAX_QUERIES * KEYS];
    float part[MAX_ROWS * TILE_WIDTH];
    Laid laid;
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
        score[p] = _mm512_mul_ps(_mm512_loadu_ps(t->scores + row * KEYS + p * PANEL),
                                 _mm512_load_ps(t->laid.key_scales + p * PANEL));
        score[p] = _mm512_mul_ps(score[p], _mm512_set1_ps(factor));
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
        weight = _mm512_maskz_mul_ps(seen[p], weight, _mm512_load_ps(t->laid.value_scales + p * PANEL));
        if (wide_is_faster) _mm512_storeu_ps(t->wide_weights + row * KEYS + p * PANEL, weight);
        else store_bf16(t->weights + row * KEYS + p * PANEL, weight);
    }
    t->total[row] = sum;
}

/* The keys from `first_key` on for all rows of a tile. */
static void meet(Tile *t, const Attention *attention, const int32_t *table, int64_t head, int64_t first_key,
                 int num_keys, int rows, int group, int64_t first_at) {
    const Pages *pages = attention->pages;
    const int64_t dim = pages->head_dim;
    int64_t slots[KEYS];
    for (int i = 0; i < num_keys; i++) slots[i] = slot_of(table, first_key + i, pages->block_size);
    lay_out_kv(pages, head, slots, num_keys, &t->laid);
    const int panels = (num_keys + PANEL - 1) / PANEL;
    for (int row = 0; row < rows; row += MAX_ROWS) {
        int count = rows - row < MAX_ROWS ? rows - row : MAX_ROWS;
        const bf16 *weight[MAX_PANELS];
        for (int p = 0; p < panels; p++) weight[p] = t->laid.keys + p * PANEL * dim;
        fastest_tile(count, panels, t->queries + row * dim, t->wide_queries + row * dim, dim, weight, (int)dim,
                     t->scores + row * KEYS);
        for (int r = row; r < row + count; r++)
            soften(t, r, first_key, first_at + r / group, attention->window, attention->scaling * 1.44269504f);
        for (int64_t d = 0; d < dim; d += TILE_WIDTH) {
            int wide = dim - d < TILE_WIDTH ? (int)(dim - d) / PANEL : MAX_PANELS;
            for (int p = 0; p < wide; p++) weight[p] = t->laid.values + (d + p * PANEL) * KEYS;
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

static void attend_tile(const Attention *attention, const Tiles *tiles, int64_t tile, int64_t head) {
    Tile t;
    const Span *span = attention->spans + tiles->span[tile];
    const int64_t dim = attention->pages->head_dim, heads = attention->heads, window = attention->window;
    const int group = (int)(heads / attention->pages->kv_heads), first = tiles->first[tile];
    int64_t queries = span->num_queries - first;
    if (queries > tiles->queries) queries = tiles->queries;
    const int rows = (int)queries * group;
    const int64_t first_row = span->first + first, first_at = span->start + first, end = first_at + queries;
    for (int64_t q = 0; q < queries; q++)
        memcpy(t.queries + q * group * dim, attention->queries + (first_row + q) * attention->stride + head * group * dim,
               group * dim * sizeof(bf16));
    if (wide_is_faster) widen_row(t.queries, (int)(rows * dim), t.wide_queries);
    memset(t.sum, 0, rows * dim * sizeof(float));
    for (int r = 0; r < rows; r++) t.total[r] = _mm512_setzero_ps(), t.largest[r] = -1e30f;
    int64_t from = window && first_at >= window ? (first_at + 1 - window) / KEYS * KEYS : 0;
    for (int64_t key = from; key < end; key += KEYS)
        meet(&t, attention, attention->tables + span->table, head, key, (int)(end - key < KEYS ? end - key : KEYS), rows,
             group, first_at);
    for (int r = 0; r < rows; r++) {
        const __m512 over = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(t.total[r]));
        bf16 *to = attention->attended + ((first_row + r / group) * heads + head * group + r % group) * dim;
        for (int64_t d = 0; d < dim; d += PANEL)
            store_bf16(to + d, _mm512_mul_ps(_mm512_loadu_ps(t.sum + r * dim + d), over));
    }
}

void cut_tiles(const Attention *attention, Tiles *tiles) {
    const int64_t group = attention->heads / attention->pages->kv_heads;
    tiles->num = 0, tiles->queries = group < FULL_TILE ? FULL_TILE / group : 1;
    for (int32_t s = 0; s < attention->num_spans; s++)
        for (int32_t first = 0; first < attention->spans[s].num_queries; first += (int32_t)tiles->queries) {
            tiles->span[tiles->num] = s;
            tiles->first[tiles->num++] = first;
        }
}

/* Threads take tiles as they get free, the last first: those of long contexts. */
void attend(const Attention *attention, const Tiles *tiles, int64_t *taken) {
    const int64_t kv_heads = attention->pages->kv_heads, items = tiles->num * kv_heads;
    for (;;) {
        int64_t item = items - 1 - __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED);
        if (item < 0) return;
        attend_tile(attention, tiles, item / kv_heads, item % kv_heads);
    }
}
