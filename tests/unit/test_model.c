/* SPDX-License-Identifier: Apache-2.0
 *
 * Loading: every layout, dtype and subset, with the packed weights read back through the reference layout and compared with
 * what was put into the files; for the fixtures, with what an independent look at their tensors says.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/device.h"
#include "engine/model.h"
#include "engine/safetensors.h"

static struct device *device;

static int group_setup(void **state)
{
    (void)state;
    const struct device_options options = {.device = "cpu", .isa = "ref", .threads = 3};
    return device_cpu_create(&options, &device, NULL) != ENGINE_OK;
}

static int group_teardown(void **state)
{
    (void)state;
    device_destroy(device);
    return 0;
}

static struct model *load(const struct engine_options *options)
{
    struct model *model = NULL;
    struct engine_error e;
    if (model_load(device, options, NULL, &model, &e))
        fail_msg("%s: %s", options->model ? options->model : options->synthetic, e.message);
    return model;
}

/* One packed weight, as its operand type's bits. Indices are among those held. */
static uint16_t packed(const struct model *m, int32_t layer, int32_t expert, enum kernel_projection p, int32_t row, int32_t column)
{
    const struct kernel_table *k = device->kernels;
    const struct kernel_weights *w = &m->layer[layer].weights;
    const char *base = p == KERNEL_DOWN ? (const char *)w->down + k->down_bytes(&m->dims) * (size_t)expert
                                        : (const char *)w->gate_up + k->gate_up_bytes(&m->dims) * (size_t)expert;
    struct kernel_span span;
    k->span(&m->dims, p, row, 1, &span);
    uint16_t v;
    memcpy(&v, base + span.offset + 2 * (size_t)column, 2);
    return v;
}

/* ---- fixtures ---------------------------------------------------------------------------------------------- */

struct files {
    struct safetensors_file *file[16];
    int count;
};

static void open_files(struct files *f, const char *folder)
{
    int fd = open(folder, O_RDONLY | O_DIRECTORY);
    assert_true(fd >= 0);
    f->count = 0;
    if (!safetensors_open(fd, "model.safetensors", ENGINE_BAD_CHECKPOINT, &f->file[0], NULL))
        f->count = 1;
    for (int i = 1; !f->count || f->count == i - 1; i++) {
        char name[64];
        snprintf(name, sizeof name, "model-%05d-of-00008.safetensors", i);
        if (i > 8 || safetensors_open(fd, name, ENGINE_BAD_CHECKPOINT, &f->file[f->count], NULL))
            break;
        f->count++;
    }
    assert_true(f->count > 0);
    close(fd);
}

static void close_files(struct files *f)
{
    for (int i = 0; i < f->count; i++)
        safetensors_close(f->file[i]);
}

static float *read_floats(const struct files *f, const char *name)
{
    for (int i = 0; i < f->count; i++) {
        const struct safetensors_tensor *t = safetensors_find(f->file[i], name);
        enum dtype d;
        if (!t)
            continue;
        assert_true(safetensors_dtype_float(t->dtype, &d));
        size_t bytes = (size_t)(t->end - t->begin), n = bytes / dtype_size(d);
        char *raw = malloc(bytes);
        float *out = malloc(n * sizeof *out);
        assert_non_null(raw);
        assert_non_null(out);
        assert_int_equal(safetensors_read(f->file[i], t, 0, raw, bytes, NULL), ENGINE_OK);
        dtype_convert(out, DTYPE_FP32, raw, d, n);
        free(raw);
        return out;
    }
    fail_msg("no tensor %s", name);
    return NULL;
}

/* Where the fixture's file has element (row, column) of a projection, by the family's published layout. */
enum shape { SEPARATE, FUSED, GPT_OSS, LLAMA4 };

struct fixture {
    const char *name, *family, *container;
    const char *role[3];
    enum shape shape;
    int32_t first_layer, layers, experts, top_k, hidden, inter;
};

static const struct fixture fixtures[] = {
    {"mixtral", "mixtral", "block_sparse_moe", {"w1", "w3", "w2"}, SEPARATE, 0, 2, 8, 2, 64, 96},
    {"olmoe", "olmoe", "mlp", {"gate_proj", "up_proj", "down_proj"}, SEPARATE, 0, 2, 8, 4, 64, 48},
    {"qwen3_moe", "qwen3_moe", "mlp", {"gate_proj", "up_proj", "down_proj"}, SEPARATE, 0, 2, 16, 4, 128, 64},
    {"deepseek_v3", "deepseek_v3", "mlp", {"gate_proj", "up_proj", "down_proj"}, SEPARATE, 1, 1, 8, 2, 64, 32},
    {"gpt_oss", "gpt_oss", "mlp", {"gate_up_proj", "gate_up_proj", "down_proj"}, GPT_OSS, 0, 2, 4, 2, 64, 64},
    {"llama4", "llama4_text", "feed_forward", {"gate_up_proj", "gate_up_proj", "down_proj"}, LLAMA4, 0, 2, 4, 1, 64, 48},
};

static size_t position(const struct fixture *x, int p, int32_t expert, int32_t row, int32_t column)
{
    size_t h = (size_t)x->hidden, i = (size_t)x->inter, e = (size_t)expert, r = (size_t)row, c = (size_t)column;
    if (x->shape == SEPARATE)
        return r * (p == KERNEL_DOWN ? i : h) + c;
    if (p == KERNEL_DOWN)
        return e * i * h + c * h + r;
    return e * 2 * i * h + c * 2 * i + (x->shape == GPT_OSS ? 2 * r + (p == KERNEL_UP) : r + (p == KERNEL_UP ? i : 0));
}

static void check_projection(const struct fixture *x, const struct files *f, const struct model *m, int32_t layer, int32_t expert, int p)
{
    char name[128];
    if (x->shape == SEPARATE)
        snprintf(name, sizeof name, "model.layers.%d.%s.experts.%d.%s.weight", x->first_layer + layer, x->container, expert, x->role[p]);
    else
        snprintf(name, sizeof name, "model.layers.%d.%s.experts.%s", x->first_layer + layer, x->container, x->role[p]);
    float *v = read_floats(f, name);
    int32_t rows = p == KERNEL_DOWN ? x->hidden : x->inter, columns = p == KERNEL_DOWN ? x->inter : x->hidden;
    for (int32_t r = 0; r < rows; r++)
        for (int32_t c = 0; c < columns; c++)
            if (packed(m, layer, expert, (enum kernel_projection)p, r, c) != dtype_f32_to_bf16(v[position(x, p, expert, r, c)]))
                fail_msg("%s: layer %d expert %d projection %d [%d, %d]", x->name, layer, expert, p, r, c);
    free(v);
}

static void check_biases(const struct fixture *x, const struct files *f, const struct model *m, int32_t layer)
{
    char name[128];
    snprintf(name, sizeof name, "model.layers.%d.mlp.experts.gate_up_proj_bias", layer);
    float *gate_up = read_floats(f, name);
    snprintf(name, sizeof name, "model.layers.%d.mlp.experts.down_proj_bias", layer);
    float *down = read_floats(f, name);
    const struct kernel_weights *w = &m->layer[layer].weights;
    for (int32_t e = 0; e < x->experts; e++) {
        for (int32_t i = 0; i < x->inter; i++) {
            assert_true(w->gate_bias[e * m->dims.inter_pad + i] == gate_up[(e * x->inter + i) * 2]);
            assert_true(w->up_bias[e * m->dims.inter_pad + i] == gate_up[(e * x->inter + i) * 2 + 1]);
        }
        for (int32_t i = 0; i < x->hidden; i++)
            assert_true(w->down_bias[e * m->dims.hidden_pad + i] == down[e * x->hidden + i]);
    }
    free(gate_up);
    free(down);
}

static void fixtures_load_as_their_files_say(void **state)
{
    (void)state;
    for (size_t n = 0; n < sizeof fixtures / sizeof fixtures[0]; n++) {
        const struct fixture *x = &fixtures[n];
        char folder[512];
        snprintf(folder, sizeof folder, "%s/%s", FIXTURES, x->name);
        struct model *m = load(&(struct engine_options){.model = folder});
        assert_string_equal(m->family, x->family);
        assert_int_equal(m->experts, x->experts);
        assert_int_equal(m->dims.experts, x->experts);
        assert_int_equal(m->top_k, x->top_k);
        assert_int_equal(m->dims.hidden, x->hidden);
        assert_int_equal(m->dims.inter, x->inter);
        assert_int_equal(m->dims.op, DTYPE_BF16);
        assert_int_equal(m->layers, x->layers);
        assert_int_equal(m->held_layers[0], x->first_layer);
        assert_int_equal(m->checkpoint_layers, x->first_layer + x->layers);
        assert_int_equal(m->activation, x->shape == GPT_OSS ? KERNEL_ACT_GPT_OSS : KERNEL_ACT_SILU);
        assert_int_equal(m->layer[0].weights.activation, m->activation);
        assert_int_equal(m->weight_on_input, x->shape == LLAMA4);
        assert_int_equal(m->layer[0].weights.weight_on_input, x->shape == LLAMA4);
        assert_int_equal(m->transposed, x->shape == LLAMA4 || x->shape == GPT_OSS);
        assert_int_equal(m->fused, x->shape == GPT_OSS ? MODEL_FUSED_INTERLEAVED : MODEL_FUSED_HALVES);
        assert_int_equal(m->layer[0].weights.gate_bias != NULL, x->shape == GPT_OSS);
        struct files f;
        open_files(&f, folder);
        for (int32_t l = 0; l < x->layers; l++) {
            for (int32_t e = 0; e < x->experts; e++)
                for (int p = 0; p < KERNEL_PROJECTIONS; p++)
                    check_projection(x, &f, m, l, e, p);
            if (x->shape == GPT_OSS)
                check_biases(x, &f, m, l);
        }
        close_files(&f);
        assert_non_null(model_find_layer(m, x->first_layer));
        assert_null(model_find_layer(m, x->first_layer + x->layers));
        assert_null(model_find_layer(m, -1));
        model_destroy(m);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fixtures_load_as_their_files_say),
    };
    return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
