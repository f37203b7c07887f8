/* SPDX-License-Identifier: Apache-2.0
 *
 * Carries out a plan: reads, converts, transposes and packs the weights into device memory, on all host threads.
 *
 * The work is cut into units, a stretch of one projection's rows each, in the order of the files. A thread takes the next
 * unit, reads its bytes once into a buffer of its own of a few MiB, and packs them into place, or into a staging buffer that
 * is then uploaded. Rows of transposed tensors are columns of the file: such a unit reads a strip of columns, so the whole
 * matrix is asked for ahead, and the strips find it in the page cache.
 */
#include "engine/clock.h"
#include "engine/convert.h"
#include "engine/plan.h"

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK_BYTES ((size_t)1 << 20) /* a core's cache has room for it as read and as packed */
#define STRIP_BYTES ((size_t)8 << 20) /* wider strips make longer reads */
#define ALIGN_BYTES 64
#define PROGRESS_NS 100000000
#define MAX_WARNINGS 20

enum unit_kind {
    UNIT_ROWS, /* rows of a projection, row-major in the file */
    UNIT_STRIP, /* rows of a projection, columns in the file */
    UNIT_PAIR, /* rows of gate and up, interleaved columns in the file */
    UNIT_BIAS, /* all biases of one expert */
    UNIT_RANDOM, /* synthetic rows */
};

struct unit {
    int32_t layer, expert; /* indices among those held */
    int32_t row0, rows;
    uint8_t kind, projection;
};

struct loader {
    struct device *device;
    const struct kernel_table *kernels;
    struct model *model;
    struct plan *plan;
    const struct engine_options *options;
    const atomic_bool *cancel;
    struct unit *unit;
    size_t units, capacity;
    size_t raw_bytes, op_bytes, staging_bytes; /* the largest that any unit needs */
    size_t threads;
    atomic_size_t next;
    int64_t total;
    _Atomic int64_t done;
    atomic_bool stop;
    pthread_mutex_t lock; /* error, reported */
    struct engine_error error;
    int64_t reported_ns;
    _Atomic int64_t read_ns, upload_ns, busy_ns; /* of all threads */
};

/* One thread's buffers. */
struct worker {
    struct loader *loader;
    void *raw; /* as in the file */
    uint16_t *op; /* converted, rows contiguous */
    void *staging; /* packed, for devices that we can't write to */
    int64_t read_ns, upload_ns;
};

/* ---- cutting ----------------------------------------------------------------------------------------------- */

static int32_t projection_rows(const struct kernel_dims *d, int p) { return p == KERNEL_DOWN ? d->hidden : d->inter; }
static int32_t projection_columns(const struct kernel_dims *d, int p) { return p == KERNEL_DOWN ? d->inter : d->hidden; }

static struct plan_source *unit_source(const struct loader *l, const struct unit *u)
{
    const struct plan_layer *layer = &l->plan->layer[u->layer];
    if (!layer->source)
        return NULL;
    if (!layer->fused)
        return &layer->source[u->expert * KERNEL_PROJECTIONS + u->projection];
    return &layer->source[u->projection == KERNEL_DOWN ? PLAN_DOWN : PLAN_GATE_UP];
}

static void grow(size_t *most, size_t value)
{
    if (value > *most)
        *most = value;
}

static bool add_unit(struct loader *l, struct unit u)
{
    if (l->units == l->capacity) {
        size_t capacity = l->capacity ? 2 * l->capacity : 1024;
        struct unit *unit = reallocarray(l->unit, capacity, sizeof *unit);
        if (!unit)
            return false;
        l->unit = unit;
        l->capacity = capacity;
    }
    l->unit[l->units++] = u;
    return true;
}

/* Cuts one projection (or gate and up together) of one expert. */
static bool cut_projection(struct loader *l, struct unit u)
{
    const struct kernel_dims *d = &l->model->dims;
    const int32_t all = projection_rows(d, u.projection);
    const size_t columns = (size_t)projection_columns(d, u.projection), parts = u.kind == UNIT_PAIR ? 2 : 1;
    const struct plan_source *source = unit_source(l, &u);
    const size_t width = source ? dtype_size(source->dtype) : 2, row_bytes = columns * width * parts;
    const int32_t unit_rows = l->kernels->pack_rows;
    size_t rows =
        (u.kind == UNIT_ROWS || u.kind == UNIT_RANDOM ? CHUNK_BYTES : STRIP_BYTES) / row_bytes / (size_t)unit_rows * (size_t)unit_rows;
    if (!rows)
        rows = (size_t)unit_rows;
    for (int32_t row0 = 0; row0 < all; row0 += u.rows) {
        u.row0 = row0;
        u.rows = (size_t)(all - row0) < rows ? all - row0 : (int32_t)rows;
        if (!add_unit(l, u))
            return false;
        struct kernel_span span;
        l->kernels->span(d, u.projection, u.row0, u.rows, &span);
        grow(&l->staging_bytes, span.width * span.count);
        grow(&l->raw_bytes, (size_t)u.rows * row_bytes);
        if (u.kind != UNIT_ROWS || source->dtype != d->op)
            grow(&l->op_bytes, (size_t)u.rows * columns * parts * 2);
        l->total += (int64_t)((size_t)u.rows * row_bytes);
    }
    return true;
}

static bool cut_bias(struct loader *l, int32_t layer, int32_t expert)
{
    const struct plan_source *source = l->plan->layer[layer].source;
    const size_t gate_up = 2 * (size_t)l->model->dims.inter * dtype_size(source[PLAN_GATE_UP_BIAS].dtype);
    const size_t down = (size_t)l->model->dims.hidden * dtype_size(source[PLAN_DOWN_BIAS].dtype);
    grow(&l->raw_bytes, gate_up > down ? gate_up : down);
    grow(&l->op_bytes, (2 * (size_t)l->model->dims.inter_pad + (size_t)l->model->dims.hidden_pad) * sizeof(float));
    l->total += (int64_t)(gate_up + down);
    return add_unit(l, (struct unit){.layer = layer, .expert = expert, .kind = UNIT_BIAS});
}

static int64_t unit_position(const struct loader *l, const struct unit *u, int32_t *file)
{
    const struct plan_source *s = u->kind == UNIT_BIAS ? &l->plan->layer[u->layer].source[PLAN_GATE_UP_BIAS] : unit_source(l, u);
    *file = s->file_index;
    int64_t begin = s->tensor->begin, per_expert = (s->tensor->end - begin) / l->model->experts;
    return l->plan->layer[u->layer].fused ? begin + per_expert * l->model->held_experts[u->expert] : begin;
}

static int compare_units(const void *a, const void *b, void *loader)
{
    const struct unit *x = a, *y = b;
    int32_t fx, fy;
    int64_t px = unit_position(loader, x, &fx), py = unit_position(loader, y, &fy);
    if (fx != fy)
        return fx < fy ? -1 : 1;
    if (px != py)
        return px < py ? -1 : 1;
    if (x->projection != y->projection)
        return x->projection < y->projection ? -1 : 1;
    return x->row0 < y->row0 ? -1 : x->row0 > y->row0;
}

static bool cut(struct loader *l)
{
    for (int32_t i = 0; i < l->plan->layers; i++) {
        const struct plan_layer *layer = &l->plan->layer[i];
        bool pairs = layer->transposed && l->model->fused == MODEL_FUSED_INTERLEAVED;
        enum unit_kind kind = !layer->source ? UNIT_RANDOM : layer->transposed ? UNIT_STRIP : UNIT_ROWS;
        for (int32_t e = 0; e < l->model->dims.experts; e++) {
            for (int p = KERNEL_GATE; p <= KERNEL_DOWN; p++) {
                if (pairs && p == KERNEL_UP)
                    continue;
                struct unit u = {.layer = i, .expert = e, .projection = (uint8_t)p};
                u.kind = (uint8_t)(pairs && p == KERNEL_GATE ? UNIT_PAIR : kind);
                if (!cut_projection(l, u))
                    return false;
            }
            if (layer->fused && layer->source[PLAN_GATE_UP_BIAS].tensor && !cut_bias(l, i, e))
                return false;
        }
    }
    if (l->plan->checkpoint)
        qsort_r(l->unit, l->units, sizeof *l->unit, compare_units, l);
    return true;
}

/* ---- converting -------------------------------------------------------------------------------------------- */

/* dst[c][r] = src[r][c * step + first]: columns of the file become rows. In tiles, so that neither side's cache lines are
 * fetched more than once. */
static void transpose(uint16_t *dst, enum dtype op, const void *src, enum dtype from, size_t rows, size_t columns, size_t src_stride,
                      size_t step, size_t first, struct convert_tally *t)
{
    enum { TILE = 32 };
    size_t size = dtype_size(from);
    for (size_t r0 = 0; r0 < rows; r0 += TILE) {
        size_t r1 = r0 + TILE < rows ? r0 + TILE : rows;
        for (size_t c0 = 0; c0 < columns; c0 += TILE) {
            size_t c1 = c0 + TILE < columns ? c0 + TILE : columns;
            for (size_t r = r0; r < r1; r++) {
                const char *p = (const char *)src + (r * src_stride + c0 * step + first) * size;
                uint16_t *q = dst + c0 * rows + r;
                if (from == op)
                    for (size_t c = c0; c < c1; c++, p += 2 * step, q += rows)
                        memcpy(q, p, 2);
                else
                    for (size_t c = c0; c < c1; c++, p += size * step, q += rows)
                        *q = convert_one(p, from, op, t);
            }
        }
    }
    if (from == op)
        convert_count_non_finite(dst, op, rows * columns, t);
}

/* ---- working ----------------------------------------------------------------------------------------------- */

static void give_up(struct loader *l, const struct engine_error *error)
{
    pthread_mutex_lock(&l->lock);
    if (!atomic_exchange(&l->stop, true))
        l->error = *error;
    pthread_mutex_unlock(&l->lock);
}

static void report_progress(struct loader *l, int64_t bytes, bool always)
{
    int64_t done = atomic_fetch_add(&l->done, bytes) + bytes;
    if (!l->options->progress || (!always && pthread_mutex_trylock(&l->lock)))
        return;
    if (always)
        pthread_mutex_lock(&l->lock);
    int64_t now = clock_now_ns();
    if (always || now - l->reported_ns >= PROGRESS_NS) {
        l->reported_ns = now;
        l->options->progress(l->options->progress_arg, done, l->total);
    }
    pthread_mutex_unlock(&l->lock);
}

/* Packs rows into the expert's block, through staging where the device can't be written to. */
static enum engine_code place_rows(struct worker *w, const struct unit *u, enum kernel_projection p, const void *rows,
                                   struct engine_error *error)
{
    const struct loader *l = w->loader;
    const struct kernel_dims *d = &l->model->dims;
    const struct kernel_weights *weights = &l->model->layer[u->layer].weights;
    const size_t block = p == KERNEL_DOWN ? l->kernels->down_bytes(d) : l->kernels->gate_up_bytes(d);
    struct kernel_span span;
    l->kernels->span(d, p, u->row0, u->rows, &span);
    uint64_t at = (uint64_t)(uintptr_t)(p == KERNEL_DOWN ? weights->down : weights->gate_up) + block * (size_t)u->expert + span.offset;
    const size_t stride = (size_t)projection_columns(d, p);
    if (l->device->direct_memory) {
        l->kernels->pack(d, p, u->row0, u->rows, rows, stride, (void *)(uintptr_t)at, span.pitch);
        return ENGINE_OK;
    }
    l->kernels->pack(d, p, u->row0, u->rows, rows, stride, w->staging, span.width);
    const int64_t begin = clock_now_ns();
    enum engine_code code = l->device->ops->upload(l->device, at, span.pitch, w->staging, span.width, span.width, span.count, error);
    w->upload_ns += clock_now_ns() - begin;
    return code;
}

static enum engine_code too_large(const struct plan_source *s, struct engine_error *error)
{
    return engine_fail(error, ENGINE_BAD_CHECKPOINT, "%s: tensor \"%.200s\" holds finite values too large for fp16: use --dtype bf16",
                       safetensors_name(s->file), s->tensor->name);
}

/* Where a UNIT_ROWS begins in its tensor, and its length, both in bytes. */
static int64_t rows_offset(const struct loader *l, const struct unit *u, const struct plan_source *s, size_t *bytes)
{
    const struct kernel_dims *d = &l->model->dims;
    const int64_t row_bytes = projection_columns(d, u->projection) * (int64_t)dtype_size(s->dtype);
    int64_t row = u->row0;
    if (l->plan->layer[u->layer].fused)
        row += (int64_t)l->model->held_experts[u->expert] * s->tensor->shape[1] + (u->projection == KERNEL_UP ? d->inter : 0);
    *bytes = (size_t)(u->rows * row_bytes);
    return row * row_bytes;
}

/* Keeps the disk busy while threads compute. */
static void prefetch_unit(const struct loader *l, size_t index)
{
    if (index >= l->units || l->unit[index].kind != UNIT_ROWS)
        return;
    const struct plan_source *s = unit_source(l, &l->unit[index]);
    size_t bytes;
    int64_t offset = rows_offset(l, &l->unit[index], s, &bytes);
    safetensors_prefetch(s->file, s->tensor, offset, (int64_t)bytes);
}

static enum engine_code load_rows(struct worker *w, const struct unit *u, struct engine_error *error)
{
    const struct loader *l = w->loader;
    const struct kernel_dims *d = &l->model->dims;
    struct plan_source *s = unit_source(l, u);
    size_t bytes;
    int64_t offset = rows_offset(l, u, s, &bytes);
    const size_t n = bytes / dtype_size(s->dtype);
    const int64_t begin = clock_now_ns();
    enum engine_code code = safetensors_read(s->file, s->tensor, offset, w->raw, bytes, error);
    w->read_ns += clock_now_ns() - begin;
    if (code)
        return code;
    struct convert_tally t = {0};
    const void *rows = w->raw;
    if (s->dtype == d->op)
        convert_count_non_finite(rows, d->op, n, &t);
    else {
        convert_values(w->op, d->op, rows, s->dtype, n, &t);
        rows = w->op;
    }
    s->non_finite += t.non_finite;
    return t.overflow ? too_large(s, error) : place_rows(w, u, u->projection, rows, error);
}

static enum engine_code load_strip(struct worker *w, const struct unit *u, struct engine_error *error)
{
    const struct loader *l = w->loader;
    const struct kernel_dims *d = &l->model->dims;
    struct plan_source *s = unit_source(l, u);
    const size_t size = dtype_size(s->dtype), in = (size_t)projection_columns(d, u->projection), parts = u->kind == UNIT_PAIR ? 2 : 1;
    const size_t strip = (size_t)u->rows * parts, out = (size_t)u->rows * in;
    const int64_t line = s->tensor->shape[2], expert = l->model->held_experts[u->expert] * (int64_t)in * line;
    const int64_t column = (int64_t)u->row0 * (int64_t)parts + (u->projection == KERNEL_UP ? d->inter : 0);
    if (!u->row0) /* the first strip asks for the whole matrix, in order */
        safetensors_prefetch(s->file, s->tensor, expert * (int64_t)size, (int64_t)in * line * (int64_t)size);
    const int64_t begin = clock_now_ns();
    for (size_t r = 0; r < in; r++) {
        enum engine_code code = safetensors_read(s->file, s->tensor, (expert + (int64_t)r * line + column) * (int64_t)size,
                                                 (char *)w->raw + r * strip * size, strip * size, error);
        if (code)
            return code;
    }
    w->read_ns += clock_now_ns() - begin;
    struct convert_tally t = {0};
    for (size_t part = 0; part < parts; part++)
        transpose(w->op + part * out, d->op, w->raw, s->dtype, in, (size_t)u->rows, strip, parts, part, &t);
    s->non_finite += t.non_finite;
    if (t.overflow)
        return too_large(s, error);
    enum engine_code code = place_rows(w, u, u->projection, w->op, error);
    return code || parts == 1 ? code : place_rows(w, u, KERNEL_UP, w->op + out, error);
}

/* Copies fp32 to the device. */
static enum engine_code place_floats(const struct loader *l, const float *dst, const float *src, size_t n, struct engine_error *error)
{
    uint64_t at = (uint64_t)(uintptr_t)dst;
    size_t bytes = n * sizeof *src;
    if (!l->device->direct_memory)
        return l->device->ops->upload(l->device, at, bytes, src, bytes, bytes, 1, error);
    memcpy((void *)(uintptr_t)at, src, bytes);
    return ENGINE_OK;
}

static enum engine_code load_bias(struct worker *w, const struct unit *u, struct engine_error *error)
{
    const struct loader *l = w->loader;
    const struct kernel_dims *d = &l->model->dims;
    const struct kernel_weights *weights = &l->model->layer[u->layer].weights;
    const size_t inter = (size_t)d->inter_pad, hidden = (size_t)d->hidden_pad, e = (size_t)u->expert;
    float *gate = (float *)w->op, *up = gate + inter, *down = up + inter;
    memset(gate, 0, (2 * inter + hidden) * sizeof *gate);
    for (int part = PLAN_GATE_UP_BIAS; part <= PLAN_DOWN_BIAS; part++) {
        struct plan_source *s = &l->plan->layer[u->layer].source[part];
        const size_t size = dtype_size(s->dtype), n = (size_t)s->tensor->shape[1];
        enum engine_code code =
            safetensors_read(s->file, s->tensor, l->model->held_experts[u->expert] * (int64_t)(n * size), w->raw, n * size, error);
        if (code)
            return code;
        for (size_t i = 0; i < n; i++) {
            float v = dtype_load_f32((const char *)w->raw + i * size, s->dtype);
            s->non_finite += !isfinite(v);
            if (part == PLAN_DOWN_BIAS)
                down[i] = v;
            else if (l->model->fused == MODEL_FUSED_INTERLEAVED)
                (i % 2 ? up : gate)[i / 2] = v;
            else
                (i < n / 2 ? gate : up)[i % (n / 2)] = v;
        }
    }
    enum engine_code code = place_floats(l, weights->gate_bias + e * inter, gate, inter, error);
    if (!code)
        code = place_floats(l, weights->up_bias + e * inter, up, inter, error);
    return code ? code : place_floats(l, weights->down_bias + e * hidden, down, hidden, error);
}

static enum engine_code make_rows(struct worker *w, const struct unit *u, struct engine_error *error)
{
    const struct loader *l = w->loader;
    const struct model *m = l->model;
    synthetic_rows(l->plan->seed, m->held_layers[u->layer], m->held_experts[u->expert], u->projection, u->row0, u->rows,
                   projection_columns(&m->dims, u->projection), m->dims.op, w->op);
    return place_rows(w, u, u->projection, w->op, error);
}

static int64_t unit_bytes(const struct loader *l, const struct unit *u)
{
    const struct kernel_dims *d = &l->model->dims;
    if (u->kind == UNIT_BIAS) {
        const struct plan_source *s = l->plan->layer[u->layer].source;
        return 2 * (int64_t)d->inter * (int64_t)dtype_size(s[PLAN_GATE_UP_BIAS].dtype) +
               d->hidden * (int64_t)dtype_size(s[PLAN_DOWN_BIAS].dtype);
    }
    const struct plan_source *s = unit_source(l, u);
    return (int64_t)u->rows * projection_columns(d, u->projection) * (int64_t)(s ? dtype_size(s->dtype) : 2) *
           (u->kind == UNIT_PAIR ? 2 : 1);
}

static enum engine_code run_unit(struct worker *w, const struct unit *u, struct engine_error *error)
{
    switch ((enum unit_kind)u->kind) {
    case UNIT_ROWS: return load_rows(w, u, error);
    case UNIT_STRIP:
    case UNIT_PAIR: return load_strip(w, u, error);
    case UNIT_BIAS: return load_bias(w, u, error);
    case UNIT_RANDOM: return make_rows(w, u, error);
    }
    return ENGINE_OK;
}

static bool take_buffers(struct worker *w, struct engine_error *error)
{
    const struct loader *l = w->loader;
    bool staged = !l->device->direct_memory;
    w->raw = aligned_alloc(ALIGN_BYTES, (l->raw_bytes + ALIGN_BYTES) / ALIGN_BYTES * ALIGN_BYTES);
    w->op = aligned_alloc(ALIGN_BYTES, (l->op_bytes + ALIGN_BYTES) / ALIGN_BYTES * ALIGN_BYTES);
    w->staging = staged ? l->device->ops->host_alloc(l->device, l->staging_bytes) : NULL;
    if (w->raw && w->op && (!staged || w->staging))
        return true;
    engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory for a loading thread's buffers of %zu bytes",
                l->raw_bytes + l->op_bytes + l->staging_bytes);
    return false;
}

static void run_worker(void *arg, int index)
{
    (void)index;
    struct loader *l = arg;
    struct worker w = {.loader = l};
    struct engine_error error;
    const int64_t begin = clock_now_ns();
    if (!take_buffers(&w, &error))
        give_up(l, &error);
    for (size_t i; !atomic_load(&l->stop) && (i = atomic_fetch_add(&l->next, 1)) < l->units;) {
        enum engine_code code = ENGINE_OK;
        if (l->cancel && atomic_load(l->cancel))
            code = engine_fail(&error, ENGINE_CANCELLED, "loading was cancelled");
        prefetch_unit(l, i + l->threads);
        if (!code)
            code = run_unit(&w, &l->unit[i], &error);
        if (code)
            give_up(l, &error);
        else
            report_progress(l, unit_bytes(l, &l->unit[i]), false);
    }
    l->read_ns += w.read_ns;
    l->upload_ns += w.upload_ns;
    l->busy_ns += clock_now_ns() - begin;
    free(w.raw);
    free(w.op);
    if (w.staging)
        l->device->ops->host_free(l->device, w.staging, l->staging_bytes);
}

/* NaN and Inf in weights are the checkpoint's own; they are served, but not silently. */
static void warn_non_finite(const struct loader *l)
{
    int64_t tensors = 0;
    char line[400];
    for (int32_t i = 0; l->options->log && l->plan->checkpoint && i < l->plan->layers; i++) {
        const struct plan_layer *layer = &l->plan->layer[i];
        int32_t n = layer->fused ? PLAN_FUSED : l->model->dims.experts * KERNEL_PROJECTIONS;
        for (int32_t s = 0; s < n; s++) {
            if (!layer->source[s].non_finite || ++tensors > MAX_WARNINGS)
                continue;
            snprintf(line, sizeof line, "tensor \"%.200s\" holds %" PRId64 " values that are NaN or infinite",
                     layer->source[s].tensor->name, layer->source[s].non_finite);
            l->options->log(l->options->log_arg, "warning", line);
        }
    }
    if (tensors > MAX_WARNINGS) {
        snprintf(line, sizeof line, "%" PRId64 " more tensors hold values that are NaN or infinite", tensors - MAX_WARNINGS);
        l->options->log(l->options->log_arg, "warning", line);
    }
}

static void log_times(const struct loader *l, int64_t whole_ns)
{
    if (!l->options->log)
        return;
    const double s = 1e-9, each = s / (double)l->threads;
    char line[240];
    snprintf(line, sizeof line,
             "weights: %.2f GB in %.3f s, %.2f GB/s; of %zu threads each was busy for %.3f s, read for %.3f and uploaded for %.3f",
             (double)l->total * 1e-9, (double)whole_ns * s, (double)l->total / (double)whole_ns, l->threads, (double)l->busy_ns * each,
             (double)l->read_ns * each, (double)l->upload_ns * each);
    l->options->log(l->options->log_arg, "debug", line);
}

enum engine_code loader_run(struct device *device, struct model *model, struct plan *plan, const struct engine_options *options,
                            const atomic_bool *cancel, struct engine_error *error)
{
    struct loader l = {
        .device = device,
        .kernels = device->kernels,
        .model = model,
        .plan = plan,
        .options = options,
        .cancel = cancel,
        .lock = PTHREAD_MUTEX_INITIALIZER,
    };
    if (!cut(&l)) {
        free(l.unit);
        return engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory for the list of %zu pieces to load", l.units);
    }
    l.threads = (size_t)kernels_cpu_stream_threads(device->host_pool);
    const int64_t begin = clock_now_ns();
    kernels_cpu_parallel(device->host_pool, (int)l.threads, run_worker, &l);
    free(l.unit);
    if (atomic_load(&l.stop)) {
        if (error)
            *error = l.error;
        return l.error.code;
    }
    enum engine_code code = plan->checkpoint ? checkpoint_check_unchanged(plan->checkpoint, error) : ENGINE_OK;
    if (code)
        return code;
    report_progress(&l, 0, true);
    warn_non_finite(&l);
    log_times(&l, clock_now_ns() - begin);
    return ENGINE_OK;
}
