/* SPDX-License-Identifier: Apache-2.0
 *
 * `--check`: what a checkpoint or an adapter holds and what would be served of it, or all that is wrong with it; and, at a start, what is
 * wrong with adapters before the weights are loaded. Allocates no weights and needs no device.
 */
#include "engine/adapter.h"
#include "engine/checkpoint.h"
#include "engine/config.h"
#include "engine/family.h"
#include "engine/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* `out` NULL: the first fault alone is told, by `error`. */
static enum engine_code inspect(const struct engine_options *options, FILE *out, struct model **model, struct engine_error *error)
{
    const struct kernel_table *kernels = kernels_cpu(NULL);
    enum engine_code code = model_inspect(kernels ? kernels : kernels_ref(), options, out, model, error);
    if (code && out)
        fprintf(out, "not fit to be served\n");
    return code;
}

/* ---- before loading -------------------------------------------------------------------------------------------- */

struct engine_outline {
    struct model *model;
    int64_t max_adapter_bytes;
};

enum engine_code engine_outline_create(const struct engine_options *options, struct engine_outline **out, struct engine_error *error)
{
    struct engine_outline *outline = calloc(1, sizeof *outline);
    if (!outline)
        return engine_fail(error, ENGINE_OUT_OF_MEMORY, "out of memory for a model");
    outline->max_adapter_bytes = options->max_adapter_bytes;
    enum engine_code code = inspect(options, NULL, &outline->model, error);
    if (code) {
        free(outline);
        return code;
    }
    *out = outline;
    return ENGINE_OK;
}

enum engine_code engine_outline_check_adapter(const struct engine_outline *outline, int dir_fd, struct engine_error *error)
{
    struct adapter_data *data = NULL;
    enum engine_code code = adapter_open(dir_fd, outline->model, outline->max_adapter_bytes, &data, error);
    adapter_data_destroy(data);
    return code;
}

void engine_outline_destroy(struct engine_outline *outline)
{
    if (!outline)
        return;
    model_destroy(outline->model);
    free(outline);
}

/* ---- --check --------------------------------------------------------------------------------------------------- */

/* "0-3,7" */
static void print_ranges(FILE *out, const int32_t *number, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        int32_t first = i;
        while (i + 1 < count && number[i + 1] == number[i] + 1)
            i++;
        fprintf(out, first == i ? "%s%d" : "%s%d-%d", first ? "," : "", number[first], number[i]);
    }
}

static void print_model(FILE *out, const struct model *m)
{
    fprintf(out, "family: %s\n", m->family);
    fprintf(out, "layers: %d (", m->layers);
    print_ranges(out, m->held_layers, m->layers);
    fprintf(out, ")\nexperts: %d of %d (", m->dims.experts, m->experts);
    print_ranges(out, m->held_experts, m->dims.experts);
    fprintf(out, ")\n");
    if (m->top_k)
        fprintf(out, "experts per token: %d\n", m->top_k);
    fprintf(out, "hidden size: %d\nintermediate size: %d\n", m->dims.hidden, m->dims.inter);
    fprintf(out, "weights: %s\nactivation: %s\n", dtype_name(m->dims.op), family_activation_name(m->activation));
    if (m->weight_on_input)
        fprintf(out, "routing weight: multiplies the input\n");
    fprintf(out, "memory: %" PRId64 " bytes (%.2f GiB)\n", m->weight_bytes, (double)m->weight_bytes / 0x1p30);
    fprintf(out, "tensors: %" PRId64 " used, %" PRId64 " ignored\n", m->tensors, m->ignored);
}

static void print_adapter(FILE *out, const struct model *model, const struct adapter_data *data)
{
    static const char *const projection[] = {"gate", "up", "down"};
    int64_t experts = 0;
    bool adapted[KERNEL_PROJECTIONS] = {false};
    int32_t *layer = calloc(data->deltas + 1, sizeof *layer), layers = 0;
    for (size_t i = 0; i < data->deltas; i++) {
        const struct adapter_delta *d = &data->delta[i], *before = i ? d - 1 : NULL;
        adapted[d->projection] = true;
        experts += !before || before->layer_index != d->layer_index || before->expert != d->expert;
        if (layer && (!before || before->layer_index != d->layer_index))
            layer[layers++] = model->held_layers[d->layer_index];
    }
    fprintf(out, "rank: %d\nlayers: %d (", data->rank, layers);
    print_ranges(out, layer, layers);
    free(layer);
    fprintf(out, ")\nadapted experts: %" PRId64 "\nprojections:", experts);
    for (int p = 0; p < KERNEL_PROJECTIONS; p++)
        if (adapted[p])
            fprintf(out, " %s", projection[p]);
    fprintf(out, "\ntensors: %" PRId64 " used, %" PRId64 " ignored\n", data->tensors, data->ignored);
    for (int32_t i = 0; i < data->warning_count; i++)
        fprintf(out, "warning: %s\n", data->warnings[i]);
}

/* Without a model only the files themselves can be looked at. */
static enum engine_code check_adapter_alone(int dir_fd, const char *path, FILE *out)
{
    struct engine_error error;
    struct safetensors_file *file = NULL;
    json_t *config = NULL;
    enum engine_code code = config_load_json(dir_fd, path, "adapter_config.json", (size_t)16 << 20, ENGINE_BAD_ADAPTER, &config, &error);
    if (!code)
        code = safetensors_open(dir_fd, path, "adapter_model.safetensors", ENGINE_BAD_ADAPTER, &file, &error);
    if (code)
        fprintf(out, "%s\n", error.message);
    else
        fprintf(out, "tensors: %zu\ngive --model to have them checked against a checkpoint\n", safetensors_count(file));
    json_decref(config);
    safetensors_close(file);
    return code;
}

static enum engine_code check_adapter(int dir_fd, const char *path, const struct engine_options *options, FILE *out)
{
    struct model *model = NULL;
    struct adapter_data *data = NULL;
    struct engine_error error;
    if (!options->model && !options->synthetic) {
        fprintf(out, "adapter: %s\n", path);
        return check_adapter_alone(dir_fd, path, out);
    }
    fprintf(out, "adapter: %s\nfor: %s\n", path, options->model ? options->model : options->synthetic);
    enum engine_code code = inspect(options, out, &model, &error);
    if (code)
        return code;
    fprintf(out, "family: %s\n", model->family);
    code = adapter_read(dir_fd, model, options->max_adapter_bytes ? options->max_adapter_bytes : INT64_MAX, out, &data, &error);
    if (code)
        fprintf(out, "not fit to be installed\n");
    else {
        print_adapter(out, model, data);
        fprintf(out, "fit to be installed\n");
    }
    adapter_data_destroy(data);
    model_destroy(model);
    return code;
}

enum engine_code engine_check(const char *path, const struct engine_options *options, FILE *out)
{
    int dir_fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir_fd < 0) {
        struct engine_error error;
        engine_fail(&error, engine_errno_code(errno), "%s: %s", path, strerror(errno));
        fprintf(out, "%s\n", error.message);
        return error.code;
    }
    enum engine_code code;
    if (checkpoint_is_adapter(dir_fd))
        code = check_adapter(dir_fd, path, options, out);
    else {
        struct engine_options own = *options;
        struct model *model = NULL;
        struct engine_error error;
        own.model = path;
        own.synthetic = NULL;
        fprintf(out, "checkpoint: %s\n", path);
        code = inspect(&own, out, &model, &error);
        if (!code) {
            print_model(out, model);
            fprintf(out, "fit to be served\n");
        }
        model_destroy(model);
    }
    close(dir_fd);
    return code;
}
