/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "subject.h"

#include "engine/internal.h"

#include <dirent.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const char *subject_backend;
const char *const subject_fixtures[] = {"deepseek_v3", "gpt_oss", "llama4", "mixtral", "olmoe", "qwen3_moe", NULL};

static unsigned one_in = 1, asked;

bool subject_choose_backend(int argc, char **argv)
{
    subject_backend = argc > 1 ? argv[1] : "ref";
    one_in = argc > 2 ? (unsigned)atoi(argv[2]) : 1;
    if (!strncmp(subject_backend, "cuda", 4))
        return device_cuda_available();
    return !strcmp(subject_backend, "ref") || kernels_cpu(subject_backend);
}

bool subject_takes(void) { return asked++ % one_in == 0; }

/* ---- engines ------------------------------------------------------------------------------------------------ */

static int by_name(const void *a, const void *b) { return strcmp(a, b); }

static void find_adapters(struct subject *s)
{
    DIR *dir = opendir(s->folder);
    assert_non_null(dir);
    for (struct dirent *e; (e = readdir(dir));) {
        if (!strncmp(e->d_name, "adapter_", 8)) {
            assert_true(s->adapters < SUBJECT_ADAPTERS);
            snprintf(s->adapter_name[s->adapters++], sizeof s->adapter_name[0], "%.63s", e->d_name);
        }
    }
    closedir(dir);
    qsort(s->adapter_name, (size_t)s->adapters, sizeof s->adapter_name[0], by_name);
}

void subject_install(struct subject *s)
{
    struct engine_error error = {0};
    int root = open(s->folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    assert_true(root >= 0);
    for (int i = 0; i < s->adapters; i++) {
        struct engine_adapter_info info;
        bool replaced;
        int fd = openat(root, s->adapter_name[i], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        assert_true(fd >= 0);
        if (engine_adapter_install_fd(s->engine, s->adapter_name[i], fd, false, &info, &replaced, &error) != ENGINE_OK)
            fail_msg("%s: %s", s->adapter_name[i], error.message);
        close(fd);
        engine_adapter_info_finish(&info);
        s->adapter[i] = engine_adapter_acquire_name(s->engine, s->adapter_name[i], strlen(s->adapter_name[i]));
        assert_non_null(s->adapter[i]);
    }
    close(root);
}

/* Elsewhere when the test program was carried to another machine. */
static const char *fixtures(void)
{
    const char *folder = getenv("EXPERTD_FIXTURES");
    return folder ? folder : FIXTURES;
}

void subject_open(struct subject *s, const struct subject_options *options)
{
    const char *backend = options->backend ? options->backend : subject_backend;
    bool cuda = !strncmp(backend, "cuda", 4);
    const char *isa = !cuda ? backend : backend[4] == '-' ? backend + 5 : NULL;
    struct engine_error error = {0};
    memset(s, 0, sizeof *s);
    if (options->fixture)
        snprintf(s->folder, sizeof s->folder, "%s/%s", fixtures(), options->fixture);
    struct engine_options o = {
        .model = options->fixture ? s->folder : NULL,
        .synthetic = options->synthetic,
        .layers = options->layers,
        .experts = options->experts,
        .dtype = options->dtype,
        .device = cuda ? "cuda" : "cpu",
        .threads = 2,
        .max_batch_rows = options->max_batch_rows,
        .queue_rows = 65536,
        .batch_wait_us = options->batch_wait_us,
        .max_adapters = SUBJECT_ADAPTERS + options->spare_adapters,
        .max_adapter_bytes = 64 << 20,
        .max_inflight_bytes = 64 << 20,
    };
    if (engine_create_isa(&o, isa, NULL, &s->engine, &error) != ENGINE_OK)
        fail_msg("%s on %s: %s", options->fixture ? options->fixture : options->synthetic, backend, error.message);
    s->info = engine_model(s->engine);
    if (!options->fixture)
        return;
    int dir = open(s->folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (safetensors_open(dir, NULL, "golden.safetensors", ENGINE_BAD_CHECKPOINT, &s->golden, &error) != ENGINE_OK)
        fail_msg("%s", error.message);
    close(dir);
    find_adapters(s);
    if (options->adapters)
        subject_install(s);
}

void subject_close(struct subject *s)
{
    for (int i = 0; i < s->adapters; i++) {
        if (s->adapter[i])
            engine_adapter_release(s->engine, s->adapter[i]);
    }
    engine_destroy(s->engine);
    safetensors_close(s->golden);
}

static const struct safetensors_tensor *golden_find(const struct subject *s, int32_t layer, const char *name, size_t *count)
{
    char full[128];
    snprintf(full, sizeof full, "layer%d.%s", layer, name);
    const struct safetensors_tensor *t = safetensors_find(s->golden, full);
    if (!t)
        fail_msg("%s has no %s", s->folder, full);
    *count = 1;
    for (int i = 0; i < t->rank; i++)
        *count *= (size_t)t->shape[i];
    return t;
}

float *subject_golden_f32(const struct subject *s, int32_t layer, const char *name, size_t *count)
{
    const struct safetensors_tensor *t = golden_find(s, layer, name, count);
    enum dtype dtype;
    assert_true(safetensors_dtype_float(t->dtype, &dtype));
    size_t bytes = *count * dtype_size(dtype);
    void *raw = malloc(bytes);
    float *out = malloc(*count * sizeof *out);
    assert_int_equal(safetensors_read(s->golden, t, 0, raw, bytes, NULL), ENGINE_OK);
    dtype_convert(out, DTYPE_FP32, raw, dtype, *count);
    free(raw);
    return out;
}

int32_t *subject_golden_i32(const struct subject *s, int32_t layer, const char *name, size_t *count)
{
    const struct safetensors_tensor *t = golden_find(s, layer, name, count);
    assert_int_equal(t->dtype, ST_I32);
    int32_t *out = malloc(*count * sizeof *out);
    assert_int_equal(safetensors_read(s->golden, t, 0, out, *count * sizeof *out, NULL), ENGINE_OK);
    return out;
}

/* ---- calls --------------------------------------------------------------------------------------------------- */

uint64_t subject_random(uint64_t *seed)
{
    uint64_t v = *seed += UINT64_C(0x9e3779b97f4a7c15);
    v = (v ^ v >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    v = (v ^ v >> 27) * UINT64_C(0x94d049bb133111eb);
    return v ^ v >> 31;
}

static void on_done(struct engine_request *request)
{
    struct call *c = request->user;
    atomic_store(&c->done, 1);
}

/* Allocates for so many rows and slots, and sets what is common to all calls. */
static void call_make(struct call *c, size_t columns, int32_t layer, enum engine_mode mode, enum dtype dtype, int32_t rows, int32_t k,
                      size_t slots)
{
    memset(c, 0, sizeof *c);
    c->columns = columns;
    size_t bytes = (size_t)rows * columns * dtype_size(dtype);
    c->hidden = calloc(bytes, 1);
    c->out = malloc(bytes);
    memset(c->out, 0x5a, bytes);
    c->ids = calloc(slots + 1, sizeof *c->ids);
    c->weights = calloc(slots + 1, sizeof *c->weights);
    c->request = (struct engine_request){
        .layer = layer,
        .mode = mode,
        .rows = rows,
        .dtype = dtype,
        .hidden = c->hidden,
        .out = c->out,
        .k = k,
        .expert_ids = c->ids,
        .expert_weights = c->weights,
        .done = on_done,
        .user = c,
    };
}

void call_init(struct call *c, const struct subject *s, int32_t layer, enum engine_mode mode, enum dtype dtype, int32_t rows, int32_t k,
               uint64_t seed)
{
    size_t columns = (size_t)s->info->hidden_size, slots = (size_t)rows * (size_t)k;
    call_make(c, columns, layer, mode, dtype, rows, k, slots);
    for (size_t i = 0; i < (size_t)rows * columns; i++) {
        float v = (float)(int32_t)(subject_random(&seed) >> 32) * 0x1p-30f; /* uniform in ±2 */
        dtype_store_f32((char *)c->hidden + i * dtype_size(dtype), dtype, v);
    }
    for (size_t i = 0; i < slots; i++) {
        c->ids[i] = (int32_t)(subject_random(&seed) % (uint64_t)s->info->experts);
        c->weights[i] = (float)(subject_random(&seed) >> 40) * 0x1p-24f;
    }
}

void call_init_golden(struct call *c, const struct subject *s, int32_t layer, enum engine_mode mode, enum dtype dtype, int all)
{
    size_t elements, slots, rows;
    float *hidden = subject_golden_f32(s, layer, "hidden", &elements), *weights = subject_golden_f32(s, layer, "expert_weights", &slots);
    int32_t *ids = subject_golden_i32(s, layer, "expert_ids", &slots), *mixed = subject_golden_i32(s, layer, "row_adapter", &rows);
    call_make(c, elements / rows, layer, mode, dtype, (int32_t)rows, (int32_t)(slots / rows), slots);
    dtype_convert(c->hidden, dtype, hidden, DTYPE_FP32, elements);
    memcpy(c->ids, ids, slots * sizeof *ids);
    memcpy(c->weights, weights, slots * sizeof *weights);
    if (all >= 0) {
        c->request.adapters = &s->adapter[all]; /* row_adapter NULL: the first for every row */
        c->request.adapter_count = 1;
        free(mixed);
    } else if (all == -2) {
        c->row_adapter = mixed;
        c->request.row_adapter = mixed;
        c->request.adapters = s->adapter;
        c->request.adapter_count = s->adapters;
    } else {
        free(mixed);
    }
    free(hidden);
    free(weights);
    free(ids);
}

void call_init_row(struct call *c, const struct call *from, int32_t t)
{
    const struct engine_request *r = &from->request;
    int32_t first = r->row_slots ? r->row_slots[t] : t * r->k, k = r->row_slots ? r->row_slots[t + 1] - first : r->k;
    call_make(c, from->columns, r->layer, r->path, r->dtype, 1, k, (size_t)k);
    if (k == 0) { /* a row without slots exists in the ragged form only */
        c->row_slots = calloc(2, sizeof *c->row_slots);
        c->request.row_slots = c->row_slots;
    }
    memcpy(c->hidden, (char *)from->hidden + (size_t)t * call_row_bytes(from), call_row_bytes(from));
    memcpy(c->ids, from->ids + first, (size_t)k * sizeof *c->ids);
    memcpy(c->weights, from->weights + first, (size_t)k * sizeof *c->weights);
    c->request.adapters = r->adapters;
    c->request.adapter_count = r->adapter_count;
    if (r->row_adapter) {
        c->row_adapter = malloc(sizeof *c->row_adapter);
        c->row_adapter[0] = r->row_adapter[t];
        c->request.row_adapter = c->row_adapter;
    }
}

void call_mix_adapters(struct call *c, const struct subject *s, uint64_t seed)
{
    c->row_adapter = malloc((size_t)c->request.rows * sizeof *c->row_adapter);
    for (int32_t t = 0; t < c->request.rows; t++)
        c->row_adapter[t] = (int32_t)(subject_random(&seed) % (uint64_t)(s->adapters + 1)) - 1;
    c->request.row_adapter = c->row_adapter;
    c->request.adapters = s->adapter;
    c->request.adapter_count = s->adapters;
}

void call_finish(struct call *c)
{
    free(c->hidden);
    free(c->out);
    free(c->ids);
    free(c->row_slots);
    free(c->row_adapter);
    free(c->weights);
}

void calls_run(struct subject *s, struct call **calls, int n)
{
    struct engine_error error = {0};
    for (int i = 0; i < n; i++) {
        atomic_store(&calls[i]->done, 0);
        if (engine_submit(s->engine, &calls[i]->request, &error) != ENGINE_OK)
            fail_msg("%s", error.message);
    }
    for (int i = 0; i < n; i++) {
        for (int waited = 0; !atomic_load(&calls[i]->done); waited++) {
            if (waited == 600000)
                fail_msg("a request did not complete within a minute");
            usleep(100);
        }
        assert_int_equal(calls[i]->request.status, ENGINE_OK);
    }
}

void call_run(struct subject *s, struct call *c) { calls_run(s, &c, 1); }

size_t call_row_bytes(const struct call *c) { return c->columns * dtype_size(c->request.dtype); }

bool call_row_equal(const struct call *a, int32_t i, const struct call *b, int32_t j)
{
    size_t bytes = call_row_bytes(a);
    return bytes == call_row_bytes(b) && !memcmp((char *)a->out + (size_t)i * bytes, (char *)b->out + (size_t)j * bytes, bytes);
}

float call_value(const struct call *c, int32_t row, size_t column)
{
    return dtype_load_f32((char *)c->out + ((size_t)row * c->columns + column) * dtype_size(c->request.dtype), c->request.dtype);
}

double call_error(const struct call *c, const float *expected)
{
    double square = 0, norm = 0;
    for (int32_t t = 0; t < c->request.rows; t++) {
        for (size_t j = 0; j < c->columns; j++) {
            double e = expected[(size_t)t * c->columns + j], d = call_value(c, t, j) - e;
            square += d * d;
            norm += e * e;
        }
    }
    return isfinite(square) && norm > 0 ? sqrt(square / norm) : INFINITY;
}

double call_distance(const struct call *a, const struct call *b)
{
    size_t n = (size_t)b->request.rows * b->columns;
    float *values = malloc(n * sizeof *values);
    dtype_convert(values, DTYPE_FP32, b->out, b->request.dtype, n);
    double d = call_error(a, values);
    free(values);
    return d;
}
