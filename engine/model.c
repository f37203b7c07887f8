/* SPDX-License-Identifier: Apache-2.0
 *
 * Makes and destroys models: plan, budget, device memory, loading. The weights of a layer are one piece of device memory.
 */
#include "engine/clock.h"
#include "engine/internal.h"
#include "engine/plan.h"

#include <inttypes.h>
#include <stdlib.h>

/* Device memory of each layer, in the model's `memory`. */
struct memory {
    int32_t layers; /* allocated so far */
    struct {
        uint64_t address;
        size_t bytes;
    } layer[];
};

void model_destroy(struct model *model)
{
    if (!model)
        return;
    struct memory *memory = model->memory;
    for (int32_t l = 0; memory && l < memory->layers; l++)
        model->device->ops->free(model->device, memory->layer[l].address, memory->layer[l].bytes);
    free(memory);
    free(model->held_experts);
    free(model->local_expert);
    free(model->held_layers);
    free(model->layer);
    free(model);
}

const struct model_layer *model_find_layer(const struct model *model, int64_t layer)
{
    int32_t lo = 0, hi = model->layers;
    while (lo < hi) {
        int32_t mid = lo + (hi - lo) / 2;
        if (model->layer[mid].layer == layer)
            return &model->layer[mid];
        if (model->layer[mid].layer < layer)
            lo = mid + 1;
        else
            hi = mid;
    }
    return NULL;
}

/* The parts of a layer's memory, in order. */
struct layout {
    size_t gate_up, down, bias, bias_down, total; /* offsets; of one of gate's and up's biases at `bias`, the other follows */
    bool biases;
};

static bool layer_layout(const struct kernel_table *kernels, const struct model *model, const struct plan_layer *layer, struct layout *out)
{
    const struct kernel_dims *d = &model->dims;
    size_t experts = (size_t)d->experts, bytes, inter = (size_t)d->inter_pad * sizeof(float),
           hidden = (size_t)d->hidden_pad * sizeof(float);
    bool overflow = false;
    *out = (struct layout){.biases = layer->fused && layer->source[PLAN_GATE_UP_BIAS].tensor};
    overflow |= __builtin_mul_overflow(kernels->gate_up_bytes(d), experts, &bytes);
    out->down = bytes;
    overflow |= __builtin_mul_overflow(kernels->down_bytes(d), experts, &bytes);
    overflow |= __builtin_add_overflow(out->down, bytes, &out->bias);
    out->total = out->bias;
    if (out->biases) {
        overflow |= __builtin_mul_overflow(2 * inter, experts, &bytes) || __builtin_add_overflow(out->bias, bytes, &out->bias_down);
        overflow |= __builtin_mul_overflow(hidden, experts, &bytes) || __builtin_add_overflow(out->bias_down, bytes, &out->total);
    }
    return !overflow && out->total <= INT64_MAX;
}

/* Sums what the layers need; when that is more than `have`, says how many of them would fit. */
static enum engine_code budget(const struct kernel_table *kernels, struct model *model, const struct plan *plan, int64_t have,
                               struct engine_error *error)
{
    int32_t fit = 0;
    int64_t total = 0;
    struct layout layout;
    for (int32_t l = 0; l < model->layers; l++) {
        if (!layer_layout(kernels, model, &plan->layer[l], &layout) || __builtin_add_overflow(total, (int64_t)layout.total, &total))
            return engine_fail(error, ENGINE_BAD_CHECKPOINT,
                               "the weights' size overflows: %d layers of %d experts, hidden %d, intermediate %d", model->layers,
                               model->dims.experts, model->dims.hidden, model->dims.inter);
        fit += total <= have;
    }
    model->weight_bytes = total;
    if (total <= have)
        return ENGINE_OK;
    char advice[160] = "not even one layer would fit: keep fewer --experts";
    if (fit)
        snprintf(advice, sizeof advice, "--layers %d-%d would fit", model->held_layers[0], model->held_layers[fit - 1]);
    return engine_fail(error, ENGINE_OUT_OF_DEVICE_MEMORY,
                       "the weights of %d layers need %" PRId64 " bytes of device memory (%.1f GiB), %" PRId64
                       " are free for them (%.1f GiB); %s",
                       model->layers, total, (double)total / 0x1p30, have, (double)have / 0x1p30, advice);
}

static const void *device_pointer(uint64_t address) { return (const void *)(uintptr_t)address; }

static enum engine_code allocate(struct device *device, struct model *model, const struct plan *plan, struct engine_error *error)
{
    struct memory *memory = calloc(1, sizeof *memory + (size_t)model->layers * sizeof memory->layer[0]);
    if (!memory)
        return engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory for the description of %d layers", model->layers);
    model->memory = memory;
    model->device = device;
    for (int32_t l = 0; l < model->layers; l++) {
        struct kernel_weights *w = &model->layer[l].weights;
        struct layout layout;
        uint64_t base;
        layer_layout(device->kernels, model, &plan->layer[l], &layout);
        enum engine_code code = device->ops->alloc(device, layout.total, &base, error);
        if (code)
            return code;
        memory->layer[l].address = base;
        memory->layer[l].bytes = layout.total;
        memory->layers = l + 1;
        w->gate_up = device_pointer(base + layout.gate_up);
        w->down = device_pointer(base + layout.down);
        if (layout.biases) {
            w->gate_bias = device_pointer(base + layout.bias);
            w->up_bias = w->gate_bias + (size_t)model->dims.experts * (size_t)model->dims.inter_pad;
            w->down_bias = device_pointer(base + layout.bias_down);
        }
    }
    return ENGINE_OK;
}

/* Free device memory, less what batches will take there. */
static int64_t left_for_weights(struct device *device, const struct model *model, const struct engine_options *o)
{
    int64_t total, have;
    device->ops->memory_info(device, &total, &have);
    if (!device->ops->prepare_bytes)
        return have;
    struct device_limits limits = {.dims = model->dims, .adapters = o->max_adapters, .layers = model->layers};
    engine_batch_bounds(device, &model->dims, model->experts, model->top_k, o->max_batch_rows, o->max_adapters, &limits.max_rows,
                        &limits.max_slots);
    size_t batches = device->ops->prepare_bytes(device, &limits);
    return batches < (uint64_t)have ? have - (int64_t)batches : 0;
}

enum engine_code model_load(struct device *device, const struct engine_options *options, const atomic_bool *cancel, struct model **out,
                            struct engine_error *error)
{
    struct faults faults = {0};
    struct plan plan = {0};
    struct model *model = calloc(1, sizeof *model);
    if (!model)
        return engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory for a model");
    const int64_t begin = clock_now_ns();
    enum engine_code code = plan_read(device->kernels, options, &faults, model, &plan);
    const int64_t planned = clock_now_ns();
    if (code)
        code = faults_finish(&faults, error);
    else
        code = budget(device->kernels, model, &plan, left_for_weights(device, model, options), error);
    if (!code)
        code = allocate(device, model, &plan, error);
    if (!code && options->log) {
        char line[120];
        snprintf(line, sizeof line, "model: names in %.3f s, device memory in %.3f s", (double)(planned - begin) * 1e-9,
                 (double)(clock_now_ns() - planned) * 1e-9);
        options->log(options->log_arg, "debug", line);
    }
    if (!code)
        code = loader_run(device, model, &plan, options, cancel, error);
    plan_finish(&plan);
    if (code) {
        model_destroy(model);
        return code;
    }
    *out = model;
    return ENGINE_OK;
}

enum engine_code model_inspect(const struct kernel_table *kernels, const struct engine_options *options, FILE *report, struct model **out,
                               struct engine_error *error)
{
    struct faults faults = {.report = report};
    struct plan plan = {0};
    struct model *model = calloc(1, sizeof *model);
    if (!model)
        return engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory for a model");
    enum engine_code code = plan_read(kernels, options, &faults, model, &plan);
    struct engine_error e;
    if (!code && budget(kernels, model, &plan, INT64_MAX, &e))
        faults_add_error(&faults, &e);
    code = faults_finish(&faults, error);
    plan_finish(&plan);
    if (code) {
        model_destroy(model);
        return code;
    }
    *out = model;
    return ENGINE_OK;
}
