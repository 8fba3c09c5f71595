/* A decoder of transformers' Llama family, and one step of it. Mirrored in `native.py`. */
#ifndef SLUICE_MODEL_H
#define SLUICE_MODEL_H

#include "sluice.h"

#define MAX_HEAD_DIM 256
#define KEYS 64       /* keys that a tile of queries meets at once */
#define MAX_QUERIES 64 /* rows of that tile: queries times the heads that share their keys */

typedef struct {
    const bf16 *input_norm, *post_norm; /* [hidden] */
    const bf16 *query_norm, *key_norm;  /* [head_dim] or NULL */
    const Linear *qkv, *o, *gate_up, *down;
    bf16 *keys, *values; /* [kv_heads, slots, head_dim] */
    int64_t window;      /* positions a query sees, its own included; 0: all */
} Layer;

typedef struct {
    const Layer *layers;
    const bf16 *embedding, *norm; /* [vocab, hidden], [hidden] */
    const Linear *head;
    const float *cosines, *sines; /* [positions, head_dim / 2] */
    int64_t num_layers, hidden, heads, kv_heads, head_dim, ffn, block_size, slots;
    float epsilon, scaling;
} Model;

/* One request's tokens: rows from `first`, positions from `start`; its blocks stand from `table`. */
typedef struct {
    int32_t first, num_queries, start, table;
} Span;

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
    int32_t *tile_span, *tile_first; /* [num_tiles]: a tile's request, and its first query there */
    int64_t num_tiles, queries_per_tile;
    int64_t *taken; /* [num_layers]: attention items that threads have taken */
    Input input;
} Work;

/* attention.c */
void attend(const Model *model, const Step *step, const Work *work, int64_t layer);

#endif
