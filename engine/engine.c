/* SPDX-License-Identifier: Apache-2.0
 *
 * The public face: checks options, builds the parts in order, takes them down in the reverse one, and forwards calls to them.
 */
#include "engine/engine.h"
#include "engine/adapter.h"
#include "engine/clock.h"
#include "engine/device.h"
#include "engine/internal.h"
#include "engine/model.h"
#include "engine/plan.h"
#include "engine/scheduler.h"
#include "engine/staging.h"

#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

enum {
    HOST_SCRATCH_BYTES = 96 * 1024 * 1024, /* of a CPU's default batch, within the 256 MiB that serving may add to the weights */
    HOST_KEEP_BYTES = 32 * 1024 * 1024, /* staging kept for reuse, likewise */
    LEAST_DEFAULT_ROWS = 32,
    DEFAULT_TOP_K = 8, /* for checkpoints that don't say */
    MAX_BATCH_ROWS = 65536,
    MAX_BATCH_SLOTS = 1 << 26,
};

struct engine {
    struct device *device;
    struct model *model;
    struct scheduler *scheduler;
    struct registry *registry;
    _Atomic(struct registry *) idle_registry; /* the same, once the engine thread may look at it */
    struct staging *staging;
    struct engine_model_info info;
    int64_t max_inflight_bytes;
    void (*log)(void *arg, const char *level, const char *message);
    void *log_arg;
};

static void engine_log(const struct engine *engine, const char *level, const char *format, ...) __attribute__((format(printf, 3, 4)));

static void engine_log(const struct engine *engine, const char *level, const char *format, ...)
{
    char line[640];
    va_list args;
    if (!engine->log)
        return;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    engine->log(engine->log_arg, level, line);
}

/* ---- start and stop -------------------------------------------------------------------------------------- */

static enum engine_code check_options(const struct engine_options *o, struct engine_error *error)
{
    const struct {
        const char *name;
        int64_t value, least, most;
    } numbers[] = {
        {"threads", o->threads, 0, 4096},
        {"max-batch-rows", o->max_batch_rows, 0, MAX_BATCH_ROWS},
        {"queue-rows", o->queue_rows, 1, INT32_MAX},
        {"batch-wait-us", o->batch_wait_us, ENGINE_BATCH_WAIT_AUTO, 10000000},
        {"max-adapters", o->max_adapters, 0, 65536},
        {"max-adapter-bytes", o->max_adapter_bytes, 1, INT64_MAX},
        {"max-inflight-bytes", o->max_inflight_bytes, 1, INT64_MAX},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        if (numbers[i].value < numbers[i].least || numbers[i].value > numbers[i].most)
            return engine_fail(error, ENGINE_BAD_OPTION, "--%s: %" PRId64 " is not within %" PRId64 "..%" PRId64, numbers[i].name,
                               numbers[i].value, numbers[i].least, numbers[i].most);
    }
    if (!o->model && !o->synthetic)
        return engine_fail(error, ENGINE_BAD_OPTION, "no checkpoint is named: give --model or --synthetic");
    if (o->model && o->synthetic)
        return engine_fail(error, ENGINE_BAD_OPTION, "--synthetic \"%.100s\" and --model \"%.200s\" exclude each other", o->synthetic,
                           o->model);
    return ENGINE_OK;
}

enum engine_code engine_options_check(const struct engine_options *o, struct engine_error *error)
{
    const struct device_options device = {.device = o->device, .threads = o->threads};
    enum engine_code code = check_options(o, error);
    if (code == ENGINE_OK)
        code = device_check(&device, error);
    if (code == ENGINE_OK)
        code = plan_check_options(o, error);
    if (code == ENGINE_OK && o->adapter_root)
        code = registry_check_root(o->adapter_root, error);
    return code;
}

void engine_batch_bounds(const struct device *device, const struct kernel_dims *dims, int32_t experts, int32_t top_k, int64_t asked,
                         int adapters, int32_t *rows, int32_t *slots)
{
    int64_t k = top_k > 0 ? top_k : DEFAULT_TOP_K < experts ? DEFAULT_TOP_K : experts;
    int64_t t = asked > 0 ? asked : device->default_batch_rows;
    for (;; t /= 2) {
        int64_t n = t * k > experts ? t * k : experts;
        if (n > MAX_BATCH_SLOTS)
            n = MAX_BATCH_SLOTS;
        struct device_limits limits = {.dims = *dims, .max_rows = (int32_t)t, .max_slots = (int32_t)n, .adapters = adapters, .layers = 1};
        *rows = limits.max_rows;
        *slots = limits.max_slots;
        /* On a device with memory of its own scratch is cheap next to the weights. */
        if (asked > 0 || !device->direct_memory || t <= LEAST_DEFAULT_ROWS ||
            forward_bind_scratch(device->kernels, &limits, NULL, NULL) <= HOST_SCRATCH_BYTES)
            return;
    }
}

static const char *activation_name(enum kernel_activation activation)
{
    switch (activation) {
    case KERNEL_ACT_SILU: return "silu";
    case KERNEL_ACT_GELU: return "gelu";
    case KERNEL_ACT_GELU_TANH: return "gelu_tanh";
    case KERNEL_ACT_GPT_OSS: return "gpt_oss";
    }
    return "unknown";
}

static void fill_info(struct engine *engine, const struct engine_options *o, int32_t max_rows)
{
    const struct model *m = engine->model;
    engine->info = (struct engine_model_info){
        .family = m->family,
        .device = engine->device->id,
        .device_name = engine->device->name,
        .activation = activation_name(m->activation),
        .weight_on_input = m->weight_on_input,
        .weight_dtype = m->dims.op,
        .hidden_size = m->dims.hidden,
        .intermediate_size = m->dims.inter,
        .experts = m->experts,
        .experts_held = m->dims.experts,
        .held_experts = m->held_experts,
        .top_k = m->top_k,
        .layers_held = m->layers,
        .held_layers = m->held_layers,
        .threads = engine->device->threads,
        .max_batch_rows = max_rows,
        .queue_rows = o->queue_rows,
        .weight_bytes = m->weight_bytes,
        .scratch_bytes = (int64_t)engine->device->scratch_bytes,
        .max_adapters = o->max_adapters,
    };
}

static void on_failure(void *arg, const char *message) { engine_log(arg, "error", "the device has failed: %s", message); }

static void on_idle(void *arg)
{
    struct engine *engine = arg;
    staging_trim(engine->staging);
    struct registry *registry = atomic_load(&engine->idle_registry);
    if (registry)
        registry_trim(registry);
}

static enum engine_code build(struct engine *engine, const struct engine_options *o, const char *isa, const atomic_bool *cancel,
                              struct engine_error *error)
{
    struct device_options device_options = {.device = o->device, .isa = isa, .threads = o->threads};
    enum engine_code code = device_create(&device_options, &engine->device, error);
    if (code != ENGINE_OK)
        return code;
    struct device *device = engine->device;
    engine_log(engine, "info", "device %s: %s", device->id, device->name);
    code = model_load(device, o, cancel, &engine->model, error);
    if (code != ENGINE_OK)
        return code;
    const struct model *model = engine->model;
    struct device_limits limits = {.dims = model->dims, .adapters = o->max_adapters, .layers = model->layers};
    engine_batch_bounds(device, &model->dims, model->experts, model->top_k, o->max_batch_rows, o->max_adapters, &limits.max_rows,
                        &limits.max_slots);
    const int64_t begin = clock_now_ns();
    code = device->ops->prepare(device, &limits, error);
    if (code != ENGINE_OK)
        return code;
    const int64_t prepared = clock_now_ns();
    for (int32_t i = 0; device->ops->warm && i < model->layers; i++) {
        code = device->ops->warm(device, i, &model->layer[i].weights, error);
        if (code != ENGINE_OK)
            return code;
    }
    engine_log(engine, "debug", "batches: scratch and tables in %.3f s, first forwards in %.3f s", (double)(prepared - begin) * 1e-9,
               (double)(clock_now_ns() - prepared) * 1e-9);
    fill_info(engine, o, limits.max_rows);

    engine->staging = staging_create(device, o->max_inflight_bytes, device->direct_memory ? HOST_KEEP_BYTES : o->max_inflight_bytes);
    if (!engine->staging)
        return engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory for staging");
    struct scheduler_options scheduler_options = {
        .device = device,
        .model = model,
        .queue_rows = o->queue_rows,
        .batch_wait_us = o->batch_wait_us,
        .max_rows = limits.max_rows,
        .max_slots = limits.max_slots,
        .on_failure = on_failure,
        .on_failure_arg = engine,
        .on_idle = on_idle,
        .on_idle_arg = engine,
    };
    code = scheduler_create(&scheduler_options, &engine->scheduler, error);
    if (code != ENGINE_OK)
        return code;
    struct registry_options registry_options = {
        .device = device,
        .model = model,
        .max_adapters = o->max_adapters,
        .max_adapter_bytes = o->max_adapter_bytes,
        .adapter_root = o->adapter_root,
        .publisher = {.post = scheduler_post, .context = engine->scheduler},
        .log = o->log,
        .log_arg = o->log_arg,
    };
    code = registry_create(&registry_options, &engine->registry, error);
    if (code != ENGINE_OK)
        return code;
    atomic_store(&engine->idle_registry, engine->registry);
    engine_log(engine, "info",
               "%s: %d layers, %d of %d experts, H %d, I %d; weights %" PRId64 " bytes, batches of %d rows with %zu bytes of scratch",
               model->family, model->layers, model->dims.experts, model->experts, model->dims.hidden, model->dims.inter,
               model->weight_bytes, limits.max_rows, device->scratch_bytes);
    return ENGINE_OK;
}

enum engine_code engine_create_isa(const struct engine_options *options, const char *isa, atomic_bool *cancel, struct engine **out,
                                   struct engine_error *error)
{
    enum engine_code code = check_options(options, error);
    if (code != ENGINE_OK)
        return code;
    struct engine *engine = calloc(1, sizeof *engine);
    if (!engine)
        return engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory for the engine");
    engine->log = options->log;
    engine->log_arg = options->log_arg;
    engine->max_inflight_bytes = options->max_inflight_bytes;
    code = build(engine, options, isa, cancel, error);
    if (code != ENGINE_OK) {
        engine_destroy(engine);
        return code;
    }
    *out = engine;
    return ENGINE_OK;
}

enum engine_code engine_create(const struct engine_options *options, atomic_bool *cancel, struct engine **out, struct engine_error *error)
{
    return engine_create_isa(options, NULL, cancel, out, error);
}

void engine_begin_drain(struct engine *engine)
{
    scheduler_begin_drain(engine->scheduler);
    registry_begin_drain(engine->registry);
}

bool engine_wait_idle(struct engine *engine, int64_t timeout_ms) { return scheduler_wait_idle(engine->scheduler, timeout_ms); }

void engine_destroy(struct engine *engine)
{
    if (!engine)
        return;
    if (engine->scheduler)
        scheduler_stop(engine->scheduler);
    /* The registry may still post: references that requests held until just now are released into it. */
    registry_destroy(engine->registry);
    scheduler_destroy(engine->scheduler);
    staging_destroy(engine->staging);
    model_destroy(engine->model);
    device_destroy(engine->device);
    free(engine);
}

bool engine_failed(const struct engine *engine) { return scheduler_failed(engine->scheduler); }

/* ---- the model -------------------------------------------------------------------------------------------- */

const struct engine_model_info *engine_model(const struct engine *engine) { return &engine->info; }

bool engine_has_layer(const struct engine *engine, int64_t layer) { return model_find_layer(engine->model, layer) != NULL; }

/* ---- adapters --------------------------------------------------------------------------------------------- */

enum engine_code engine_adapter_install(struct engine *engine, const char *name, const char *path, bool replace,
                                        struct engine_adapter_info *info, bool *replaced, struct engine_error *error)
{
    return registry_install(engine->registry, name, path, -1, replace, info, replaced, error);
}

enum engine_code engine_adapter_install_fd(struct engine *engine, const char *name, int dir_fd, bool replace,
                                           struct engine_adapter_info *info, bool *replaced, struct engine_error *error)
{
    return registry_install(engine->registry, name, NULL, dir_fd, replace, info, replaced, error);
}

enum engine_code engine_adapter_remove(struct engine *engine, const char *name, int64_t wait_ms, struct engine_adapter_info *info,
                                       struct engine_error *error)
{
    return registry_remove(engine->registry, name, wait_ms, info, error);
}

enum engine_code engine_adapter_show(struct engine *engine, const char *name, struct engine_adapter_info *info, struct engine_error *error)
{
    return registry_show(engine->registry, name, info, error);
}

enum engine_code engine_adapter_list(struct engine *engine, struct engine_adapter_info **infos, size_t *count, struct engine_error *error)
{
    return registry_list(engine->registry, infos, count, error);
}

struct engine_adapter *engine_adapter_acquire_name(struct engine *engine, const char *name, size_t len)
{
    return registry_acquire_name(engine->registry, name, len);
}

struct engine_adapter *engine_adapter_acquire_id(struct engine *engine, int64_t id) { return registry_acquire_id(engine->registry, id); }

void engine_adapter_release(struct engine *engine, struct engine_adapter *adapter) { registry_release(engine->registry, adapter); }

/* ---- forward, staging, figures ----------------------------------------------------------------------------- */

enum engine_code engine_submit(struct engine *engine, struct engine_request *request, struct engine_error *error)
{
    return scheduler_submit(engine->scheduler, request, error);
}

void engine_cancel(struct engine *engine, struct engine_request *request) { scheduler_cancel(engine->scheduler, request); }

enum engine_code engine_staging_check(struct engine *engine, size_t bytes) { return staging_check(engine->staging, bytes); }

enum engine_code engine_staging_acquire(struct engine *engine, size_t bytes, void **out)
{
    return staging_acquire(engine->staging, bytes, out);
}

void engine_staging_release(struct engine *engine, void *memory) { staging_release(engine->staging, memory); }

void engine_stats_get(struct engine *engine, struct engine_stats *out)
{
    scheduler_stats(engine->scheduler, out);
    registry_stats(engine->registry, out);
    out->staging_bytes = staging_bytes(engine->staging);
    out->staging_limit = engine->max_inflight_bytes;
    engine->device->ops->memory_info(engine->device, &out->device_memory_total, &out->device_memory_free);
    out->has_device = engine->device->ops->stats != NULL;
    if (out->has_device)
        engine->device->ops->stats(engine->device, &out->device);
}
