/* A decoder of transformers' Llama family, and one step of it. Mirrored in `native.py`. */
#ifndef SLUICE_MODEL_H
#define SLUICE_MODEL_H

#include "sluice.h"

#define MAX_HEAD_DIM 256
#define KEYS 64       /* keys that a tile of queries meets at once */
#define MAX_QUERIES 64 /* rows of that tile: queries times the heads that share their keys */
#define FULL_TILE 48   /* rows that it is filled to, whole queries at a time */

typedef enum { PAGES_BF16 = 0, PAGES_INT8 = 1, PAGES_FP8 = 2 } PagesKind;

/* One layer's KV. INT8 and FP8 hold levels of a byte, which times their scale are values. */
typedef struct {
    void *keys, *values;             /* [kv_heads, slots, head_dim] */
    bf16 *key_scales, *value_scales; /* [kv_heads, slots]; BF16: NULL */
    int64_t kind, kv_heads, slots, block_size, head_dim;
} Pages;

/* Some keys and values of one head as panels; of quantised pages levels, beside their scales. Where there is
 * no scale it is 1. */
typedef struct {
    bf16 keys[KEYS * MAX_HEAD_DIM];   /* [KEYS/16][head_dim/2][16][2] */
    bf16 values[KEYS * MAX_HEAD_DIM]; /* [head_dim/16][KEYS/2][16][2] */
    _Alignas(64) float key_scales[KEYS], value_scales[KEYS];
} Laid;

typedef struct {
    const bf16 *input_norm, *post_norm; /* [hidden] */
    const bf16 *query_norm, *key_norm;  /* [head_dim] or NULL */
    const Linear *qkv, *o, *gate_up, *down;
    Pages pages;
    int64_t window; /* positions a query sees, its own included; 0: all */
} Layer;

typedef struct {
    const Layer *layers;
    const bf16 *embedding, *norm; /* [vocab, hidden], [hidden] */
    const Linear *head;
    const float *cosines, *sines; /* [positions, head_dim / 2] */
    int64_t num_layers, hidden, heads, kv_heads, head_dim, ffn;
    float epsilon, scaling;
} Model;

/* One request's tokens: rows from `first`, positions from `start`; its blocks stand from `table`. */
typedef struct {
    int32_t first, num_queries, start, table;
} Span;

/* A layer's attention over a step's rows. */
typedef struct {
    const Pages *pages;
    const Span *spans;
    const int32_t *tables;
    const bf16 *queries; /* [rows, stride], of which a row's first `heads * head_dim` */
    bf16 *attended;      /* [rows, heads, head_dim] */
    int64_t num_spans, heads, stride, window;
    float scaling;
} Attention;

/* How a step's queries are cut: a tile's request, and its first query there. */
typedef struct {
    int32_t *span, *first; /* [num] */
    int64_t num, queries;  /* in a tile at most */
} Tiles;

typedef struct {
    const int32_t *tokens; /* [rows] */
    const Span *spans;
    const int32_t *tables;
    const int32_t *kept; /* rows whose logits are wanted */
    float *logits;       /* [num_kept, vocab] */
    void *scratch;       /* of `scratch_bytes` */
    int64_t rows, num_spans, num_kept, num_threads;
} Step;

/* A step's scratch, cut into its parts. */
typedef struct {
    float *residual; /* [rows, hidden] */
    bf16 *normed, *qkv, *attended, *gated;
    int64_t *slot, *position; /* [rows] */
    Tiles tiles;
    int64_t *taken; /* [num_layers]: tiles of a head that threads have taken */
    Input input;
} Work;

/* pages.c */
void write_kv(const Pages *pages, int64_t slot, const bf16 *keys, const bf16 *values /* [kv_heads, head_dim] */);
void lay_out_kv(const Pages *pages, int64_t head, const int64_t *slots, int num, Laid *to);

/* attention.c */
void cut_tiles(const Attention *attention, Tiles *tiles);
void attend(const Attention *attention, const Tiles *tiles, int64_t *taken);

#endif
