/* One step of a decoder from token ids to logits, in one parallel region: no thread is woken between a layer's
 * parts, and nothing is allocated. The residual stream stays in float32. */
#include "model.h"

#include <stddef.h>
#include <string.h>

/* What a thread's share of `count` is. */
typedef struct {
    int64_t first, end;
} Share;

static Share share(int64_t count, Team team) {
    return (Share){count * team.thread / team.num_threads, count * (team.thread + 1) / team.num_threads};
}

static void embed(const Model *model, const Step *step, const Work *work, int64_t row) {
    const bf16 *from = model->embedding + (int64_t)step->tokens[row] * model->hidden;
    float *to = work->residual + row * model->hidden;
    for (int64_t i = 0; i < model->hidden; i += PANEL) _mm512_storeu_ps(to + i, load_bf16(from + i));
}

/* Root mean square normalisation (arXiv 1910.07467). */
static void norm(const float *x, const bf16 *weight, int64_t width, float epsilon, bf16 *to) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += PANEL) {
        __m512 v = _mm512_loadu_ps(x + i);
        squares = _mm512_fmadd_ps(v, v, squares);
    }
    float mean = _mm512_reduce_add_ps(squares) / (float)width + epsilon;
    __m512 factor = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_sqrt_ps(_mm512_set1_ps(mean)));
    for (int64_t i = 0; i < width; i += PANEL)
        store_bf16(to + i, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + i), factor), load_bf16(weight + i)));
}

/* Rotary position embedding (arXiv 2104.09864) of one head, halves as transformers pairs them. */
static void rotate(bf16 *head, const bf16 *weight, const Model *model, const float *cosines, const float *sines) {
    const int64_t half = model->head_dim / 2;
    if (weight) {
        float wide[MAX_HEAD_DIM];
        for (int64_t i = 0; i < model->head_dim; i += PANEL) _mm512_storeu_ps(wide + i, load_bf16(head + i));
        norm(wide, weight, model->head_dim, model->epsilon, head);
    }
    for (int64_t i = 0; i < half; i += PANEL) {
        /* A half may end within 16 values. */
        const __mmask16 mask = half - i >= PANEL ? 0xffff : (__mmask16)((1u << (half - i)) - 1);
        __m512 c = _mm512_maskz_loadu_ps(mask, cosines + i), s = _mm512_maskz_loadu_ps(mask, sines + i);
        __m512 a = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, head + i)), 16));
        __m512 b = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, head + half + i)), 16));
        __m512 low = _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)), high = _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s));
        _mm256_mask_storeu_epi16(head + i, mask, (__m256i)_mm512_cvtneps_pbh(low));
        _mm256_mask_storeu_epi16(head + half + i, mask, (__m256i)_mm512_cvtneps_pbh(high));
    }
}

/* Rotate a token's queries and keys, and put its keys and values into their slot. */
static void place(const Model *model, const Work *work, const Layer *layer, int64_t row) {
    const int64_t dim = model->head_dim, half = dim / 2;
    bf16 *q = work->qkv + row * (model->heads + 2 * model->kv_heads) * dim;
    const float *cosines = model->cosines + work->position[row] * half, *sines = model->sines + work->position[row] * half;
    for (int64_t head = 0; head < model->heads; head++) rotate(q + head * dim, layer->query_norm, model, cosines, sines);
    bf16 *keys = q + model->heads * dim, *values = keys + model->kv_heads * dim;
    for (int64_t head = 0; head < model->kv_heads; head++) rotate(keys + head * dim, layer->key_norm, model, cosines, sines);
    write_kv(&layer->pages, work->slot[row], keys, values);
}

/* Normalise a row of the residual stream into row `to` of the next product's input. */
static void enter_row(const Model *model, const Work *work, const bf16 *weight, const Linear *next, int64_t row, int64_t to) {
    Input input = work->input;
    input.x = work->normed;
    norm(work->residual + row * model->hidden, weight, model->hidden, model->epsilon, work->normed + to * model->hidden);
    prepare_row(next, &input, (int)to);
}

/* The same for all rows. */
static void enter(const Model *model, const Work *work, const bf16 *weight, const Linear *next, int64_t rows, Team team) {
    const Share mine = share(rows, team);
    for (int64_t row = mine.first; row < mine.end; row++) enter_row(model, work, weight, next, row, row);
    meet_all(team);
}

static void multiply(const Linear *linear, const Work *work, const bf16 *x, int prepared, Store store, void *to,
                     int64_t stride, int64_t rows, Team team) {
    Input input = work->input;
    input.x = x;
    if (!prepared && needs_preparation(linear)) {
        const Share mine = share(rows, team);
        for (int64_t row = mine.first; row < mine.end; row++) prepare_row(linear, &input, (int)row);
        meet_all(team);
    }
    product(linear, &input, (int)rows, &(Output){store, to, stride}, team);
    meet_all(team);
}

static Attention attention_of(const Model *model, const Step *step, const Work *work, const Layer *layer) {
    return (Attention){.pages = &layer->pages,
                       .spans = step->spans,
                       .tables = step->tables,
                       .queries = work->qkv,
                       .attended = work->attended,
                       .num_spans = step->num_spans,
                       .heads = model->heads,
                       .stride = (model->heads + 2 * model->kv_heads) * model->head_dim,
                       .window = layer->window,
                       .scaling = model->scaling};
}

static void run_layer(const Model *model, const Step *step, const Work *work, int64_t index, Team team) {
    const Layer *layer = model->layers + index;
    const int64_t rows = step->rows, hidden = model->hidden;
    enter(model, work, layer->input_norm, layer->qkv, rows, team);
    multiply(layer->qkv, work, work->normed, 1, STORE_BF16, work->qkv, layer->qkv->out, rows, team);
    const Share mine = share(rows, team);
    for (int64_t row = mine.first; row < mine.end; row++) place(model, work, layer, row);
    meet_all(team);
    const Attention attention = attention_of(model, step, work, layer);
    attend(&attention, &work->tiles, work->taken + index);
    meet_all(team);
    multiply(layer->o, work, work->attended, 0, ADD_F32, work->residual, hidden, rows, team);
    enter(model, work, layer->post_norm, layer->gate_up, rows, team);
    multiply(layer->gate_up, work, work->normed, 1, STORE_GATED, work->gated, model->ffn, rows, team);
    multiply(layer->down, work, work->gated, 0, ADD_F32, work->residual, hidden, rows, team);
}

static void run_head(const Model *model, const Step *step, const Work *work, Team team) {
    const Share mine = share(step->num_kept, team);
    for (int64_t i = mine.first; i < mine.end; i++)
        enter_row(model, work, model->norm, model->head, step->kept[i], i);
    meet_all(team);
    multiply(model->head, work, work->normed, 1, STORE_F32, step->logits, model->head->out, step->num_kept, team);
}

/* -- a step's scratch ------------------------------------------------------------------------------------- */

static int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

/* Takes the next bytes of `base`, where there is one; else only counts. */
#define PART(NAME, COUNT) \
    (NAME) = (void *)(base ? base + at : NULL), at += ((COUNT) * (int64_t)sizeof(*(NAME)) + 63) / 64 * 64

/* The parts of an input of `width` values a row, from `at` on; returns where they end. */
static int64_t cut_input(Input *input, int64_t rows, int64_t width, int64_t num_threads, uint8_t *base, int64_t at) {
    PART(input->levels, rows * width);
    PART(input->scale, rows * (width / LEAST_STEP + 1));
    PART(input->sums, rows * (width / LEAST_STEP + 1));
    PART(input->wide, wide_is_faster ? rows * width : 0);
    PART(input->expanded, num_threads * TILE_WIDTH * width);
    return at;
}

/* The bytes of a step's scratch; `base` NULL only counts. */
static int64_t cut(const Model *model, const Step *step, uint8_t *base, Work *work) {
    int64_t at = 0;
    const int64_t rows = step->rows;
    const int64_t widest = max_of(max_of(model->hidden, model->ffn), model->heads * model->head_dim);
    PART(work->residual, rows * model->hidden);
    PART(work->normed, rows * model->hidden);
    PART(work->qkv, rows * (model->heads + 2 * model->kv_heads) * model->head_dim);
    PART(work->attended, rows * model->heads * model->head_dim);
    PART(work->gated, rows * model->ffn);
    PART(work->slot, rows);
    PART(work->position, rows);
    PART(work->tiles.span, rows);
    PART(work->tiles.first, rows);
    PART(work->taken, model->num_layers);
    return cut_input(&work->input, rows, widest, step->num_threads, base, at);
}

int64_t sluice_scratch_bytes(const Model *model, int64_t rows, int64_t num_threads) {
    Work work;
    return cut(model, &(Step){.rows = rows, .num_threads = num_threads}, NULL, &work);
}

static void lay_out(const Model *model, const Step *step, Work *work) {
    cut(model, step, step->scratch, work);
    memset(work->taken, 0, model->num_layers * sizeof(*work->taken));
    const Attention attention = attention_of(model, step, work, model->layers);
    cut_tiles(&attention, &work->tiles);
    const int64_t block_size = model->layers->pages.block_size;
    for (int64_t s = 0; s < step->num_spans; s++) {
        const Span *span = step->spans + s;
        for (int32_t q = 0; q < span->num_queries; q++) {
            const int64_t at = span->start + q;
            const int64_t block = step->tables[span->table + at / block_size];
            work->position[span->first + q] = at;
            work->slot[span->first + q] = block * block_size + at % block_size;
        }
    }
}

/* -- entry points ----------------------------------------------------------------------------------------- */

typedef struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    int (*thread_num)(void);
    int (*num_threads)(void);
} OpenMP;

static OpenMP openmp;

/* The caller's OpenMP: GOMP_parallel, omp_get_thread_num, omp_get_num_threads. */
void sluice_use_openmp(const OpenMP *functions) { openmp = *functions; }

/* How bfloat16 is multiplied: in pairs (0), by float32's instructions (1), or by what is faster here (-1).
 * Returns which it is. */
int sluice_choose_products(int wide) {
    if (wide < 0) choose_products();
    else wide_is_faster = wide;
    return wide_is_faster;
}

static Team team_of(Barrier *barrier) { return (Team){openmp.thread_num(), openmp.num_threads(), barrier}; }

typedef struct {
    const Model *model;
    const Step *step;
    Work work;
    Barrier barrier;
} StepJob;

static void run_step(void *data) {
    StepJob *job = data;
    const Team team = team_of(&job->barrier);
    const Share mine = share(job->step->rows, team);
    for (int64_t row = mine.first; row < mine.end; row++) embed(job->model, job->step, &job->work, row);
    meet_all(team);
    for (int64_t layer = 0; layer < job->model->num_layers; layer++)
        run_layer(job->model, job->step, &job->work, layer, team);
    run_head(job->model, job->step, &job->work, team);
}

void sluice_step(const Model *model, const Step *step) {
    StepJob job = {.model = model, .step = step};
    lay_out(model, step, &job.work);
    openmp.parallel(run_step, &job, (unsigned)step->num_threads, 0);
}

/* Keys and values [rows, kv_heads, head_dim], dense, into their slots [rows]. */
void sluice_write_kv(const Pages *pages, const bf16 *keys, const bf16 *values, const int64_t *slots, int64_t rows) {
    const int64_t width = pages->kv_heads * pages->head_dim;
    for (int64_t row = 0; row < rows; row++) write_kv(pages, slots[row], keys + row * width, values + row * width);
}

typedef struct {
    const Attention *attention;
    Tiles tiles;
    int64_t taken;
} AttentionJob;

static void run_attention(void *data) {
    AttentionJob *job = data;
    attend(job->attention, &job->tiles, &job->taken);
}

/* Attention by itself, for models that run by their modules; `scratch` of 8 bytes a row. */
void sluice_attend(const Attention *attention, int64_t rows, int64_t num_threads, int32_t *scratch) {
    AttentionJob job = {attention, {.span = scratch, .first = scratch + rows}, 0};
    cut_tiles(attention, &job.tiles);
    openmp.parallel(run_attention, &job, (unsigned)num_threads, 0);
}

typedef struct {
    const Linear *linear;
    Input input;
    Output output;
    int rows;
    Barrier barrier;
} ProductJob;

static void run_product(void *data) {
    ProductJob *job = data;
    const Team team = team_of(&job->barrier);
    if (needs_preparation(job->linear)) {
        const Share mine = share(job->rows, team);
        for (int64_t row = mine.first; row < mine.end; row++) prepare_row(job->linear, &job->input, (int)row);
        meet_all(team);
    }
    product(job->linear, &job->input, job->rows, &job->output, team);
}

int64_t sluice_product_bytes(const Linear *linear, int64_t rows, int64_t num_threads) {
    Input input;
    return cut_input(&input, rows, linear->in, num_threads, NULL, 0);
}

/* x [rows, in] to y [rows, out], both bfloat16 and dense; `scratch` of `sluice_product_bytes`. */
void sluice_product(const Linear *linear, const bf16 *x, bf16 *y, int64_t rows, int64_t num_threads, void *scratch) {
    ProductJob job = {linear, {.x = x}, {STORE_BF16, y, linear->out}, (int)rows, {0, 0}};
    cut_input(&job.input, rows, linear->in, num_threads, scratch, 0);
    openmp.parallel(run_product, &job, (unsigned)num_threads, 0);
}

/* The digest of the sources that this was built from. */
const char *sluice_sources(void) { return SLUICE_SOURCES; }
