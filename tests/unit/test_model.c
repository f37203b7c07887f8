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
#include "tests/unit/made_checkpoint.h"

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
    if (!safetensors_open(fd, NULL, "model.safetensors", ENGINE_BAD_CHECKPOINT, &f->file[0], NULL))
        f->count = 1;
    for (int i = 1; !f->count || f->count == i - 1; i++) {
        char name[64];
        snprintf(name, sizeof name, "model-%05d-of-00008.safetensors", i);
        if (i > 8 || safetensors_open(fd, NULL, name, ENGINE_BAD_CHECKPOINT, &f->file[f->count], NULL))
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
            if (packed_weight(device->kernels, m, layer, expert, (enum kernel_projection)p, r, c) !=
                dtype_f32_to_bf16(v[position(x, p, expert, r, c)]))
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

/* ---- checkpoints made to order ------------------------------------------------------------------------------ */

static struct scratch folder;

static struct model *load_on(struct heap_device *d, struct engine_options options)
{
    struct model *model = NULL;
    struct engine_error e;
    if (!options.synthetic)
        options.model = folder.path;
    if (model_load(&d->device, &options, NULL, &model, &e))
        fail_msg("%s", e.message);
    return model;
}

/* Every weight and bias of the model is what was written, rounded to its operand type; padding is zero. */
static void check_values(const struct heap_device *d, const struct model *m, const struct made *made)
{
    for (int32_t l = 0; l < m->layers; l++)
        for (int32_t e = 0; e < m->dims.experts; e++) {
            int32_t layer = m->held_layers[l], expert = m->held_experts[e];
            for (int p = 0; p < KERNEL_PROJECTIONS; p++) {
                int32_t rows = p == KERNEL_DOWN ? made->hidden : made->inter, columns = p == KERNEL_DOWN ? made->inter : made->hidden;
                int32_t padded = p == KERNEL_DOWN ? m->dims.inter_pad : m->dims.hidden_pad;
                for (int32_t r = 0; r < rows; r++)
                    for (int32_t c = 0; c < padded; c++) {
                        float v = c < columns ? made->scale * made_value(layer, expert, p, r, c) : 0;
                        uint16_t want = m->dims.op == DTYPE_FP16 ? dtype_f32_to_fp16(v) : dtype_f32_to_bf16(v);
                        if (packed_weight(d->device.kernels, m, l, e, (enum kernel_projection)p, r, c) != want)
                            fail_msg("layout %d: layer %d expert %d projection %d [%d, %d]", made->layout, layer, expert, p, r, c);
                    }
            }
            const struct kernel_weights *w = &m->layer[l].weights;
            assert_int_equal(w->gate_bias != NULL, made->layout == MADE_GPT_OSS);
            for (int32_t i = 0; w->gate_bias && i < m->dims.inter_pad; i++) {
                bool in = i < made->inter;
                assert_true(w->gate_bias[e * m->dims.inter_pad + i] == (in ? made_value(layer, expert, 3, i, 0) : 0));
                assert_true(w->up_bias[e * m->dims.inter_pad + i] == (in ? made_value(layer, expert, 4, i, 0) : 0));
            }
            for (int32_t i = 0; w->gate_bias && i < m->dims.hidden_pad; i++)
                assert_true(w->down_bias[e * m->dims.hidden_pad + i] == (i < made->hidden ? made_value(layer, expert, 5, i, 0) : 0));
        }
}

static void load_and_check(struct made made, struct engine_options options, enum dtype op)
{
    scratch_init(&folder);
    made_write(&made, &folder);
    for (int direct = 0; direct < 2; direct++) {
        struct heap_device d;
        heap_device_init(&d, kernels_ref(), direct);
        struct model *m = load_on(&d, options);
        assert_int_equal(m->dims.op, op);
        assert_int_equal(m->experts, made.experts);
        check_values(&d, m, &made);
        assert_true(d.allocated == m->weight_bytes);
        assert_int_equal(d.uploaded > 0, !direct);
        model_destroy(m);
        assert_int_equal(d.allocated, 0);
        heap_device_finish(&d);
    }
    scratch_finish(&folder);
}

static void every_layout_loads(void **state)
{
    (void)state;
    for (int layout = MADE_MIXTRAL; layout <= MADE_LLAMA4; layout++) {
        struct engine_options o = {.family = layout == MADE_FUSED_TRANSPOSED ? "qwen3_vl_moe" : NULL};
        load_and_check((struct made){.layout = (enum made_layout)layout}, o, DTYPE_BF16);
        load_and_check((struct made){.layout = (enum made_layout)layout, .hidden = 23, .inter = 13, .experts = 3, .shards = 3}, o,
                       DTYPE_BF16);
    }
}

static void every_dtype_loads(void **state)
{
    (void)state;
    static const enum made_layout layout[] = {MADE_MIXTRAL, MADE_FUSED, MADE_GPT_OSS};
    for (int i = 0; i < 3; i++) {
        const struct engine_options none = {0}, bf16 = {.dtype = "bf16"}, fp16 = {.dtype = "fp16"};
        load_and_check((struct made){.layout = layout[i], .dtype = "F32"}, none, DTYPE_BF16);
        load_and_check((struct made){.layout = layout[i], .dtype = "F32"}, fp16, DTYPE_FP16);
        load_and_check((struct made){.layout = layout[i], .dtype = "F16"}, none, DTYPE_FP16);
        load_and_check((struct made){.layout = layout[i], .dtype = "F16"}, bf16, DTYPE_BF16);
        load_and_check((struct made){.layout = layout[i], .dtype = "BF16"}, fp16, DTYPE_FP16);
    }
    /* values that need rounding */
    load_and_check((struct made){.layout = MADE_MIXTRAL, .dtype = "F32", .scale = 1.1f, .hidden = 130}, (struct engine_options){0},
                   DTYPE_BF16);
    load_and_check((struct made){.layout = MADE_LLAMA4, .dtype = "F32", .scale = 1.1f}, (struct engine_options){0}, DTYPE_BF16);
}

/* Larger than one thread's buffer, so that pieces must fit together. */
static void matrices_are_cut_and_fit_together(void **state)
{
    (void)state;
    static const enum made_layout layout[] = {MADE_SEPARATE, MADE_GPT_OSS, MADE_LLAMA4};
    for (int i = 0; i < 3; i++)
        load_and_check((struct made){.layout = layout[i], .dtype = "F32", .experts = 2, .layers = 1, .hidden = 600, .inter = 3700},
                       (struct engine_options){.experts = "1"}, DTYPE_BF16);
}

static void the_cpu_layout_is_the_same_direct_and_staged(void **state)
{
    (void)state;
    const struct kernel_table *kernels = kernels_cpu(NULL);
    struct made made = {.layout = MADE_GPT_OSS, .hidden = 200, .inter = 100};
    scratch_init(&folder);
    made_write(&made, &folder);
    struct heap_device d[2];
    struct model *m[2];
    for (int i = 0; i < 2; i++) {
        heap_device_init(&d[i], kernels, i);
        m[i] = load_on(&d[i], (struct engine_options){0});
    }
    for (int32_t l = 0; l < m[0]->layers; l++) {
        assert_memory_equal(m[0]->layer[l].weights.gate_up, m[1]->layer[l].weights.gate_up, kernels->gate_up_bytes(&m[0]->dims) * 4);
        assert_memory_equal(m[0]->layer[l].weights.down, m[1]->layer[l].weights.down, kernels->down_bytes(&m[0]->dims) * 4);
    }
    for (int i = 0; i < 2; i++) {
        model_destroy(m[i]);
        heap_device_finish(&d[i]);
    }
    scratch_finish(&folder);
}

static void subsets_keep_what_they_name(void **state)
{
    (void)state;
    load_and_check((struct made){.layout = MADE_SEPARATE, .layers = 3}, (struct engine_options){.layers = "0,2", .experts = "1,3"},
                   DTYPE_BF16);
    load_and_check((struct made){.layout = MADE_GPT_OSS, .layers = 3}, (struct engine_options){.layers = "1-2", .experts = "2-3"},
                   DTYPE_BF16);

    /* The rest is not even opened: of 13 shards, one for each tensor of a layer, three hold expert 0. */
    struct made made = {.layout = MADE_SEPARATE, .shards = 13};
    scratch_init(&folder);
    made_write(&made, &folder);
    for (int i = 0; i < 13; i++) {
        char name[64];
        snprintf(name, sizeof name, "part%d.safetensors", i);
        if (i < 1 || i > 3)
            assert_int_equal(unlinkat(folder.fd, name, 0), 0);
    }
    struct heap_device d;
    heap_device_init(&d, kernels_ref(), true);
    struct model *m = load_on(&d, (struct engine_options){.experts = "0"});
    assert_int_equal(m->experts, 4);
    assert_int_equal(m->dims.experts, 1);
    assert_int_equal(m->local_expert[0], 0);
    assert_int_equal(m->local_expert[1], -1);
    assert_int_equal(m->tensors, 6);
    assert_int_equal(m->ignored, 20);
    check_values(&d, m, &made);
    model_destroy(m);
    heap_device_finish(&d);
    scratch_finish(&folder);
}

static bool move_layer_1(struct made_tensor *t)
{
    char *at = strstr(t->name, "model.layers.1.");
    if (at)
        memcpy(at, "visio", 5);
    return true;
}

static void inspect_one(struct made made, struct engine_options options, void (*check)(const struct model *m))
{
    scratch_init(&folder);
    made_write(&made, &folder);
    struct model *m = NULL;
    struct engine_error e;
    options.model = folder.path;
    if (model_inspect(kernels_ref(), &options, NULL, &m, &e))
        fail_msg("%s", e.message);
    check(m);
    model_destroy(m);
    scratch_finish(&folder);
}

static void has_layer_0_alone(const struct model *m)
{
    assert_int_equal(m->layers, 1);
    assert_int_equal(m->held_layers[0], 0);
    assert_null(m->layer[0].weights.gate_up);
    assert_true(m->weight_bytes > 0);
}

static void has_both_layers(const struct model *m)
{
    assert_int_equal(m->layers, 2);
    assert_int_equal(m->checkpoint_layers, 2);
}

static void is_nested(const struct model *m)
{
    assert_string_equal(m->family, "qwen3_vl_moe");
    assert_int_equal(m->top_k, 3);
    assert_int_equal(m->activation, KERNEL_ACT_GELU_TANH);
}

static void is_unknown(const struct model *m)
{
    assert_string_equal(m->family, "newcomer");
    assert_int_equal(m->top_k, 0);
    assert_false(m->transposed);
}

static void layers_and_families_are_found(void **state)
{
    (void)state;
    const struct engine_options none = {0};
    static const char *const prefix[] = {"", "model.", "model.language_model.", "language_model.model."};
    for (int i = 0; i < 4; i++)
        inspect_one((struct made){.layout = MADE_SEPARATE, .prefix = prefix[i]}, none, has_both_layers);
    inspect_one((struct made){.layout = MADE_SEPARATE, .edit = move_layer_1}, none, has_layer_0_alone);
    const char *one = "{\"model_type\":\"deepseek_v3\",\"num_hidden_layers\":1,\"x\":[NaN,Infinity,-Infinity,\"NaN\\\"\"]}";
    inspect_one((struct made){.layout = MADE_SEPARATE, .config = one}, none, has_layer_0_alone);
    inspect_one((struct made){.layout = MADE_SEPARATE, .config = one}, (struct engine_options){.layers = "0-1"}, has_both_layers);
    inspect_one(
        (struct made){.layout = MADE_FUSED,
                      .config = "{\"model_type\":\"qwen3_vl_moe\",\"hidden_size\":9,\"vision_config\":{\"hidden_size\":1},\"text_config\":{"
                                "\"model_type\":\"qwen3_vl_moe_text\",\"hidden_size\":24,\"moe_intermediate_size\":16,\"num_experts\":4,"
                                "\"intermediate_size\":999,\"num_experts_per_tok\":3,\"hidden_act\":\"gelu_pytorch_tanh\"}}"},
        none, is_nested);
    for (int layout = MADE_MIXTRAL; layout <= MADE_FUSED; layout++)
        inspect_one((struct made){.layout = (enum made_layout)layout, .config = "{\"model_type\":\"newcomer\",\"intermediate_size\":5}"},
                    none, is_unknown);
}

/* ---- synthetic ---------------------------------------------------------------------------------------------- */

static double spread(const struct heap_device *d, const struct model *m, enum kernel_projection p, int32_t rows, int32_t columns)
{
    double sum = 0, squares = 0, n = (double)rows * columns;
    for (int32_t r = 0; r < rows; r++)
        for (int32_t c = 0; c < columns; c++) {
            double v = dtype_bf16_to_f32(packed_weight(d->device.kernels, m, 0, 0, p, r, c));
            sum += v;
            squares += v * v;
        }
    assert_true(sum * sum / n < 9 * squares / n); /* the mean is zero within three deviations */
    return squares / n * columns;
}

static void synthetic_models_depend_on_the_seed_alone(void **state)
{
    (void)state;
    struct heap_device d[2];
    struct model *m[2], *other;
    const char *shape = "E=3,K=2,H=602,I=1801,L=2";
    for (int i = 0; i < 2; i++) {
        heap_device_init(&d[i], kernels_ref(), i);
        m[i] = load_on(&d[i], (struct engine_options){.synthetic = shape});
        kernels_cpu_stream_destroy(d[i].device.host_pool);
        d[i].device.host_pool = kernels_cpu_stream_create(1);
    }
    assert_string_equal(m[0]->family, "synthetic");
    assert_int_equal(m[0]->layers, 2);
    assert_int_equal(m[0]->top_k, 2);
    assert_int_equal(m[0]->dims.hidden, 602);
    assert_int_equal(m[0]->dims.inter, 1801);
    assert_int_equal(m[0]->checkpoint_layers, 2);
    const size_t bytes = kernels_ref()->gate_up_bytes(&m[0]->dims);
    for (int l = 0; l < 2; l++)
        assert_memory_equal(m[0]->layer[l].weights.gate_up, m[1]->layer[l].weights.gate_up, 3 * bytes);
    assert_memory_not_equal(m[0]->layer[0].weights.gate_up, m[0]->layer[1].weights.gate_up, bytes);
    assert_memory_not_equal(m[0]->layer[0].weights.gate_up, (const char *)m[0]->layer[0].weights.gate_up + bytes, bytes);
    double gate = spread(&d[0], m[0], KERNEL_GATE, 1801, 602), down = spread(&d[0], m[0], KERNEL_DOWN, 602, 1801);
    assert_true(gate > 0.98 && gate < 1.02 && down > 0.98 && down < 1.02);

    /* One thread, a subset, and other numbers for the same experts: the same bits. */
    other = load_on(&d[0], (struct engine_options){.synthetic = shape, .layers = "1", .experts = "2"});
    assert_memory_equal(other->layer[0].weights.gate_up, (const char *)m[0]->layer[1].weights.gate_up + 2 * bytes, bytes);
    model_destroy(other);
    other = load_on(&d[0], (struct engine_options){.synthetic = "E=3,K=2,H=602,I=1801,L=1,SEED=7,ACT=gpt_oss"});
    assert_int_equal(other->activation, KERNEL_ACT_GPT_OSS);
    assert_memory_not_equal(other->layer[0].weights.gate_up, m[0]->layer[0].weights.gate_up, bytes);
    model_destroy(other);
    for (int i = 0; i < 2; i++) {
        model_destroy(m[i]);
        heap_device_finish(&d[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fixtures_load_as_their_files_say),
        cmocka_unit_test(every_layout_loads),
        cmocka_unit_test(every_dtype_loads),
        cmocka_unit_test(matrices_are_cut_and_fit_together),
        cmocka_unit_test(the_cpu_layout_is_the_same_direct_and_staged),
        cmocka_unit_test(subsets_keep_what_they_name),
        cmocka_unit_test(layers_and_families_are_found),
        cmocka_unit_test(synthetic_models_depend_on_the_seed_alone),
    };
    return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
