/* SPDX-License-Identifier: Apache-2.0
 *
 * From pairs of tensors to deltas of the model's operand type. The work is cut into pieces, each of which one thread reads into
 * buffers small enough to stay in its cache: an adapter of all experts has tens of thousands of tensors and gigabytes, and neither
 * is ever in memory as a whole. All values are read and checked, also those for layers and experts that are not held here.
 */
#include "engine/convert.h"
#include "engine/peft.h"

#include <stdlib.h>
#include <string.h>

#define PIECE_BYTES ((size_t)512 << 10) /* of tensors in the file; one module may have more */
#define STEP_BYTES ((size_t)256 << 10) /* read at one time */

struct adapter_reader {
    struct adapter_data *data;
    uint16_t *values; /* [largest_piece] */
    uint16_t *next; /* where the piece's next values go */
    char *raw; /* [STEP_BYTES] as they are in the file */
    uint16_t *checked; /* [STEP_BYTES / 2] operands that nobody wants */
    uint16_t *fused[2]; /* a whole fused tensor, A and B */
    size_t fused_room[2];
};

static int64_t elements(const struct safetensors_tensor *t) { return t->shape[0] * t->shape[1]; }

static int32_t find_layer(const struct model *model, int64_t number)
{
    const struct model_layer *layer = model_find_layer(model, number);
    return layer ? (int32_t)(layer - model->layer) : -1;
}

static int compare_deltas(const void *pa, const void *pb)
{
    const struct adapter_delta *a = pa, *b = pb;
    if (a->layer_index != b->layer_index)
        return a->layer_index < b->layer_index ? -1 : 1;
    if (a->expert != b->expert)
        return a->expert < b->expert ? -1 : 1;
    return (int)a->projection - (int)b->projection;
}

/* ---- cutting --------------------------------------------------------------------------------------------------- */

/* Deltas of one pair, in a layer that is held, are `1` for a Linear of an expert that is held. */
static size_t count_deltas(const struct model *model, const struct peft_pair *pair)
{
    if (pair->expert >= 0)
        return model->local_expert[pair->expert] >= 0;
    return (size_t)model->dims.experts * (pair->projection == KERNEL_DOWN ? 1 : 2);
}

static size_t file_bytes(const struct peft_pair *pair) { return (size_t)(pair->a->end - pair->a->begin + pair->b->end - pair->b->begin); }

static void add_delta(struct adapter_data *data, const struct peft_pair *pair, int32_t layer_index, int32_t expert,
                      enum kernel_projection projection, bool shares_a)
{
    data->delta[data->deltas++] = (struct adapter_delta){.layer_index = layer_index,
                                                         .expert = expert,
                                                         .projection = projection,
                                                         .rank = pair->rank,
                                                         .scale = pair->scale,
                                                         .shares_a = shares_a};
}

static void add_deltas(struct adapter_data *data, const struct peft_pair *pair, int32_t layer_index)
{
    const struct model *model = data->files->model;
    if (pair->expert >= 0) {
        add_delta(data, pair, layer_index, model->local_expert[pair->expert], pair->projection, false);
        return;
    }
    for (int32_t e = 0; e < model->dims.experts; e++) {
        add_delta(data, pair, layer_index, e, pair->projection, false);
        if (pair->projection == KERNEL_GATE)
            add_delta(data, pair, layer_index, e, KERNEL_UP, true);
    }
}

/* The next piece: of a layer with fused pairs all, since their deltas lie among each other; else as many Linears as make a good size. */
static void cut_piece(struct adapter_data *data, size_t begin)
{
    const struct adapter_files *files = data->files;
    const struct peft_pair *first = &files->plan.pair[begin];
    const bool fused = first->expert < 0;
    const int32_t layer_index = find_layer(files->model, first->layer);
    struct adapter_piece *piece = &data->piece[data->pieces++];
    *piece = (struct adapter_piece){.pair = begin, .delta = data->deltas};
    size_t bytes = 0;
    for (size_t i = begin; i < files->plan.pairs; i++) {
        const struct peft_pair *pair = &files->plan.pair[i];
        const size_t deltas = layer_index < 0 ? 0 : count_deltas(files->model, pair),
                     whole = (size_t)(elements(pair->a) + elements(pair->b));
        if (pair->layer != first->layer || (!fused && i > begin && bytes + file_bytes(pair) > PIECE_BYTES))
            break;
        bytes += file_bytes(pair);
        piece->pairs++;
        if (deltas) {
            add_deltas(data, pair, layer_index);
            piece->elements += pair->expert >= 0 ? whole : whole / (size_t)files->model->experts * (size_t)files->model->dims.experts;
        }
        if (pair->rank > data->rank)
            data->rank = pair->rank;
    }
    piece->deltas = data->deltas - piece->delta;
    if (fused && piece->deltas)
        qsort(data->delta + piece->delta, piece->deltas, sizeof *data->delta, compare_deltas);
    if (piece->elements > data->largest_piece)
        data->largest_piece = piece->elements;
}

bool peft_values_cut(struct adapter_data *data, struct faults *log)
{
    struct adapter_files *files = data->files;
    size_t deltas = 0;
    for (size_t i = 0; i < files->plan.pairs; i++) {
        size_t here = find_layer(files->model, files->plan.pair[i].layer) < 0 ? 0 : count_deltas(files->model, &files->plan.pair[i]);
        deltas += here;
        files->not_held += here ? 0 : 2;
    }
    data->delta = calloc(deltas + 1, sizeof *data->delta);
    data->piece = calloc(files->plan.pairs + 1, sizeof *data->piece);
    if (!data->delta || !data->piece)
        return faults_add(log, ENGINE_OUT_OF_MEMORY, "out of memory for an adapter of %zu parts", deltas);
    for (size_t i = 0; i < files->plan.pairs; i += data->piece[data->pieces - 1].pairs)
        cut_piece(data, i);
    return true;
}

/* ---- reading --------------------------------------------------------------------------------------------------- */

/* The first value of these that is not finite as an operand. */
static bool blame_value(const struct adapter_reader *r, const struct safetensors_tensor *t, size_t at, const char *raw, enum dtype type,
                        const uint16_t *operand, struct faults *log)
{
    const enum dtype op = r->data->files->model->dims.op;
    const uint16_t exponent = op == DTYPE_BF16 ? 0x7f80 : 0x7c00;
    size_t i = 0;
    while ((operand[i] & exponent) != exponent)
        i++;
    return faults_add(log, ENGINE_BAD_ADAPTER, "tensor \"%s\": element %zu is %g, which is not finite as %s", PEFT_QUOTE(t->name), at + i,
                      (double)dtype_load_f32(raw + i * dtype_size(type), type), dtype_name(op));
}

/* All of a tensor as operands; dst NULL: only checked. */
static bool read_tensor(struct adapter_reader *r, const struct safetensors_tensor *t, uint16_t *dst, struct faults *log)
{
    const enum dtype op = r->data->files->model->dims.op;
    enum dtype type = DTYPE_FP32;
    safetensors_dtype_float(t->dtype, &type);
    const size_t size = dtype_size(type), count = (size_t)elements(t), step = STEP_BYTES / size;
    for (size_t at = 0; at < count; at += step) {
        const size_t n = count - at < step ? count - at : step;
        uint16_t *to = dst ? dst + at : r->checked;
        char *raw = type == op ? (char *)to : r->raw; /* what needs no change is read into place */
        struct engine_error error;
        if (safetensors_read(r->data->files->file, t, (int64_t)(at * size), raw, n * size, &error) != ENGINE_OK)
            return faults_add_error(log, &error);
        struct convert_tally unused = {0}, tally = {0};
        if (type != op)
            convert_values(to, op, raw, type, n, &unused);
        convert_count_non_finite(to, op, n, &tally); /* also those that conversion made */
        if (tally.non_finite)
            return blame_value(r, t, at, raw, type, to, log);
    }
    return true;
}

static uint16_t *claim(struct adapter_reader *r, int64_t count)
{
    uint16_t *at = r->next;
    r->next += count;
    return at;
}

static struct adapter_delta *find_delta(const struct adapter_reader *r, const struct adapter_piece *piece, int32_t layer_index,
                                        int32_t expert, enum kernel_projection projection)
{
    struct adapter_delta key = {.layer_index = layer_index, .expert = expert, .projection = projection};
    return bsearch(&key, r->data->delta + piece->delta, piece->deltas, sizeof key, compare_deltas);
}

static bool read_linear(struct adapter_reader *r, const struct adapter_piece *piece, const struct peft_pair *pair, int32_t layer_index,
                        struct faults *log)
{
    int32_t expert = r->data->files->model->local_expert[pair->expert];
    if (layer_index < 0 || expert < 0)
        return read_tensor(r, pair->a, NULL, log) && read_tensor(r, pair->b, NULL, log);
    uint16_t *a = claim(r, elements(pair->a)), *b = claim(r, elements(pair->b));
    struct adapter_delta *d = find_delta(r, piece, layer_index, expert, pair->projection);
    d->a = a;
    d->b = b;
    return read_tensor(r, pair->a, a, log) && read_tensor(r, pair->b, b, log);
}

/* One expert's A, [rank, in], out of the fused pair: the tensor A has the expert slowest, B has it fastest. */
static void cut_a(const struct adapter_reader *r, const struct peft_pair *pair, int64_t expert, uint16_t *a)
{
    const uint16_t *fa = r->fused[0], *fb = r->fused[1];
    int64_t rank = pair->rank, experts = r->data->files->model->experts, n = pair->a->shape[1], m = pair->b->shape[0];
    if (!pair->swapped)
        memcpy(a, fa + expert * rank * n, (size_t)(rank * n) * sizeof *a);
    else
        for (int64_t i = 0; i < m; i++)
            for (int64_t j = 0; j < rank; j++)
                a[j * m + i] = fb[(i * rank + j) * experts + expert];
}

/* Row `row` of one expert's B, [out, rank]. */
static void cut_b_row(const struct adapter_reader *r, const struct peft_pair *pair, int64_t expert, int64_t row, uint16_t *b)
{
    const uint16_t *fa = r->fused[0], *fb = r->fused[1];
    int64_t rank = pair->rank, experts = r->data->files->model->experts, n = pair->a->shape[1];
    for (int64_t j = 0; j < rank; j++)
        b[j] = pair->swapped ? fa[(expert * rank + j) * n + row] : fb[(row * rank + j) * experts + expert];
}

static void cut_expert(struct adapter_reader *r, const struct adapter_piece *piece, const struct peft_pair *pair, int32_t layer_index,
                       int32_t held)
{
    const struct model *model = r->data->files->model;
    int64_t expert = model->held_experts[held], rank = pair->rank, inter = model->dims.inter, hidden = model->dims.hidden;
    bool down = pair->projection == KERNEL_DOWN, interleaved = model->fused == MODEL_FUSED_INTERLEAVED;
    uint16_t *a = claim(r, rank * (down ? inter : hidden));
    cut_a(r, pair, expert, a);
    int64_t out = down ? hidden : inter;
    for (int part = 0; part < (down ? 1 : 2); part++) { /* gate, then up, which share A */
        uint16_t *b = claim(r, out * rank);
        for (int64_t i = 0; i < out; i++)
            cut_b_row(r, pair, expert, down ? i : interleaved ? 2 * i + part : part * inter + i, b + i * rank);
        struct adapter_delta *d = find_delta(r, piece, layer_index, held, down ? KERNEL_DOWN : part ? KERNEL_UP : KERNEL_GATE);
        d->a = a;
        d->b = b;
    }
}

static bool read_fused(struct adapter_reader *r, const struct adapter_piece *piece, const struct peft_pair *pair, int32_t layer_index,
                       struct faults *log)
{
    if (layer_index < 0)
        return read_tensor(r, pair->a, NULL, log) && read_tensor(r, pair->b, NULL, log);
    const struct safetensors_tensor *t[2] = {pair->a, pair->b};
    for (int i = 0; i < 2; i++) {
        size_t count = (size_t)elements(t[i]);
        if (r->fused_room[i] < count) {
            free(r->fused[i]);
            r->fused[i] = malloc(count * sizeof *r->fused[i]);
            r->fused_room[i] = r->fused[i] ? count : 0;
        }
        if (!r->fused[i])
            return faults_add(log, ENGINE_OUT_OF_MEMORY, "out of memory for tensor \"%s\"", PEFT_QUOTE(t[i]->name));
        if (!read_tensor(r, t[i], r->fused[i], log))
            return false;
    }
    for (int32_t held = 0; held < r->data->files->model->dims.experts; held++)
        cut_expert(r, piece, pair, layer_index, held);
    return true;
}

/* Into `values`, of piece->elements. */
static bool read_piece(struct adapter_reader *r, const struct adapter_piece *piece, uint16_t *values, struct faults *log)
{
    const struct peft_pair *pair = &r->data->files->plan.pair[piece->pair];
    const int32_t layer_index = find_layer(r->data->files->model, pair->layer);
    r->next = values;
    for (size_t i = 0; i < piece->pairs; i++, pair++)
        if (!(pair->expert < 0 ? read_fused : read_linear)(r, piece, pair, layer_index, log))
            return false;
    return true;
}

static bool take_buffers(struct adapter_reader *r, bool values)
{
    r->raw = malloc(STEP_BYTES);
    r->checked = malloc(STEP_BYTES);
    r->values = values ? malloc((r->data->largest_piece + 1) * sizeof *r->values) : NULL;
    return r->raw && r->checked && (!values || r->values);
}

static void free_buffers(struct adapter_reader *r)
{
    free(r->raw);
    free(r->checked);
    free(r->values);
    free(r->fused[0]);
    free(r->fused[1]);
}

bool peft_values_read(struct adapter_data *data, struct faults *log)
{
    struct adapter_reader r = {.data = data};
    size_t count = 0, at = 0;
    for (size_t i = 0; i < data->pieces; i++) /* can't overflow: what is held is no more than the file, whose size is that of its tensors */
        count += data->piece[i].elements;
    uint16_t *values = data->memory = malloc((count + 1) * sizeof *values);
    bool on =
        (take_buffers(&r, false) && values) || faults_add(log, ENGINE_OUT_OF_MEMORY, "out of memory for an adapter of %zu values", count);
    for (size_t i = 0; on && i < data->pieces; i++) {
        on = read_piece(&r, &data->piece[i], values + at, log);
        at += data->piece[i].elements;
    }
    free_buffers(&r);
    return on;
}

struct adapter_reader *adapter_reader_create(struct adapter_data *data)
{
    struct adapter_reader *r = calloc(1, sizeof *r);
    if (!r)
        return NULL;
    r->data = data;
    if (take_buffers(r, true))
        return r;
    adapter_reader_destroy(r);
    return NULL;
}

void adapter_reader_destroy(struct adapter_reader *r)
{
    if (!r)
        return;
    free_buffers(r);
    free(r);
}

enum engine_code adapter_reader_read(struct adapter_reader *r, size_t piece, struct engine_error *error)
{
    struct faults log = {0};
    read_piece(r, &r->data->piece[piece], r->values, &log);
    return faults_finish(&log, error);
}
