/* SPDX-License-Identifier: Apache-2.0
 *
 * Reading adapters: every fixture against numbers looked up in its file one by one, and the forms that no fixture has.
 */
#include "engine/adapter.h"
#include "engine/safetensors.h"
#include "tests/unit/adapter_files.h"

#include <stdarg.h>
#include <setjmp.h>
#include <cmocka.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define ALL                                                                                                                                \
    {                                                                                                                                      \
        -1                                                                                                                                 \
    }

/* An element of a named tensor, by plain indexing. */
static float element(const struct safetensors_file *file, const char *name, int64_t row, int64_t col)
{
    const struct safetensors_tensor *t = safetensors_find(file, name);
    if (!t)
        fail_msg("no tensor %s", name);
    enum dtype type;
    char value[4];
    assert_true(safetensors_dtype_float(t->dtype, &type));
    assert_true(row < t->shape[0] && col < t->shape[1]);
    size_t size = dtype_size(type);
    assert_int_equal(safetensors_read(file, t, (row * t->shape[1] + col) * (int64_t)size, value, size, NULL), ENGINE_OK);
    return dtype_load_f32(value, type);
}

static float held(const void *p, int64_t i, enum dtype op) { return dtype_load_f32((const uint16_t *)p + i, op); }

struct fixture {
    const char *folder;
    struct test_model_shape shape;
    const char *container; /* of fused adapters */
    bool swapped;
};

static const struct fixture fixtures[] = {
    {"mixtral", {8, 64, 96, DTYPE_BF16, false, false, 2, {0, 1, -1}, ALL}, "mlp", false},
    {"qwen3_moe", {16, 128, 64, DTYPE_BF16, false, false, 2, {0, 1, -1}, ALL}, "mlp", false},
    {"olmoe", {8, 64, 48, DTYPE_BF16, false, false, 2, {0, 1, -1}, ALL}, "mlp", false},
    {"deepseek_v3", {8, 64, 32, DTYPE_BF16, false, false, 2, {1, -1}, ALL}, "mlp", false},
    {"gpt_oss", {4, 64, 64, DTYPE_BF16, true, true, 2, {0, 1, -1}, ALL}, "mlp", false},
    {"llama4", {4, 64, 48, DTYPE_BF16, true, false, 2, {0, 1, -1}, ALL}, "feed_forward", true},
};

static const struct {
    const char *folder;
    bool gate_up, down;
    int rank;
    double scale;
} fused_adapters[] = {
    {"adapter_peft3d_0", true, true, 4, 2},
    {"adapter_peft3d_1", true, true, 8, 2.8284271247461903},
    {"adapter_peft3d_2", true, false, 4, 1},
    {"adapter_peft3d_3", false, true, 4, 3},
};

static int open_fixture(const struct fixture *f, const char *adapter)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s/%s", FIXTURES, f->folder, adapter);
    return open(path, O_RDONLY | O_DIRECTORY);
}

static struct adapter_data *read_fine(int dir_fd, const struct model *model)
{
    struct engine_error error = {0};
    struct adapter_data *data = NULL;
    if (adapter_read(dir_fd, model, 0, NULL, &data, &error) != ENGINE_OK)
        fail_msg("%s", error.message);
    return data;
}

static void check_sorted(const struct adapter_data *data)
{
    for (size_t i = 1; i < data->deltas; i++) {
        const struct adapter_delta *a = &data->delta[i - 1], *b = &data->delta[i];
        assert_true(a->layer_index < b->layer_index || (a->layer_index == b->layer_index && a->expert < b->expert) ||
                    (a->layer_index == b->layer_index && a->expert == b->expert && a->projection < b->projection));
    }
}

static void check_fused(const struct fixture *f, size_t which, const struct model *model)
{
    int dir = open_fixture(f, fused_adapters[which].folder);
    struct adapter_data *data = read_fine(dir, model);
    struct safetensors_file *file;
    assert_int_equal(safetensors_open(dir, NULL, "adapter_model.safetensors", ENGINE_BAD_ADAPTER, &file, NULL), ENGINE_OK);
    close(dir);
    bool gate_up = fused_adapters[which].gate_up, down = fused_adapters[which].down;
    int64_t r = fused_adapters[which].rank, E = model->experts, H = model->dims.hidden, I = model->dims.inter;
    assert_int_equal(data->deltas, (size_t)(model->layers * model->dims.experts) * ((gate_up ? 2u : 0u) + (down ? 1u : 0u)));
    assert_int_equal(data->tensors, safetensors_count(file));
    assert_int_equal(data->ignored, 0);
    assert_int_equal(data->rank, r);
    check_sorted(data);
    for (size_t i = 0; i < data->deltas; i++) {
        const struct adapter_delta *d = &data->delta[i];
        bool is_down = d->projection == KERNEL_DOWN;
        char a[256], b[256];
        const char *base = gate_up && down && !is_down ? ".base_layer" : "";
        int32_t layer = model->layer[d->layer_index].layer, e = model->held_experts[d->expert];
        snprintf(a, sizeof a, "base_model.model.model.layers.%d.%s.experts%s.lora_A.weight", layer, f->container, base);
        snprintf(b, sizeof b, "base_model.model.model.layers.%d.%s.experts%s.lora_B.weight", layer, f->container, base);
        assert_int_equal(d->rank, r);
        assert_true(fabs(d->scale - fused_adapters[which].scale) < 1e-6);
        int64_t in = is_down ? I : H, out = is_down ? H : I;
        for (int64_t j = 0; j < r; j++) {
            for (int64_t n = 0; n < in; n++) {
                float want = f->swapped ? element(file, b, n, j * E + e) : element(file, a, e * r + j, n);
                assert_true(held(d->a, j * in + n, model->dims.op) == want);
            }
            for (int64_t m = 0; m < out; m++) {
                int64_t row = is_down                                   ? m
                              : d->projection == KERNEL_GATE            ? (model->fused == MODEL_FUSED_INTERLEAVED ? 2 * m : m)
                              : model->fused == MODEL_FUSED_INTERLEAVED ? 2 * m + 1
                                                                        : I + m;
                float want = f->swapped ? element(file, a, e * r + j, row) : element(file, b, row, j * E + e);
                assert_true(held(d->b, m * r + j, model->dims.op) == want);
            }
        }
        if (d->projection == KERNEL_UP)
            assert_ptr_equal(d->a, data->delta[i - 1].a); /* shared with gate */
    }
    safetensors_close(file);
    adapter_data_destroy(data);
}

static void fused_fixtures(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof fixtures / sizeof fixtures[0]; i++) {
        struct model *model = test_model_create(&fixtures[i].shape);
        for (size_t k = 0; k < 4; k++)
            check_fused(&fixtures[i], k, model);
        test_model_destroy(model);
    }
}

/* A share of layers and experts gets the same numbers as the whole. */
static void fused_subset(void **state)
{
    (void)state;
    struct fixture f = fixtures[1];
    f.shape.layers[0] = 1;
    f.shape.layers[1] = -1;
    memcpy(f.shape.held, (int32_t[8]){3, 4, 15, -1}, sizeof f.shape.held);
    struct model *model = test_model_create(&f.shape);
    check_fused(&f, 0, model);
    test_model_destroy(model);
}

static size_t check_linear(const struct fixture *f, const char *folder, const struct model *model)
{
    static const char *const names[2][3] = {{"gate_proj", "up_proj", "down_proj"}, {"w1", "w3", "w2"}};
    bool mixtral = !strcmp(f->folder, "mixtral");
    int dir = open_fixture(f, folder);
    struct adapter_data *data = read_fine(dir, model);
    struct safetensors_file *file;
    assert_int_equal(safetensors_open(dir, NULL, "adapter_model.safetensors", ENGINE_BAD_ADAPTER, &file, NULL), ENGINE_OK);
    close(dir);
    check_sorted(data);
    size_t n = data->deltas;
    assert_int_equal(data->tensors, safetensors_count(file));
    for (size_t i = 0; i < n; i++) {
        const struct adapter_delta *d = &data->delta[i];
        char a[256], b[256];
        const char *name = names[mixtral][d->projection], *container = mixtral ? "block_sparse_moe" : "mlp";
        int32_t layer = model->layer[d->layer_index].layer, e = model->held_experts[d->expert];
        snprintf(a, sizeof a, "base_model.model.model.layers.%d.%s.experts.%d.%s.lora_A.weight", layer, container, e, name);
        snprintf(b, sizeof b, "base_model.model.model.layers.%d.%s.experts.%d.%s.lora_B.weight", layer, container, e, name);
        int64_t r = d->projection == KERNEL_UP ? 2 : 4, in = d->projection == KERNEL_DOWN ? model->dims.inter : model->dims.hidden,
                out = d->projection == KERNEL_DOWN ? model->dims.hidden : model->dims.inter;
        assert_int_equal(d->rank, r);
        assert_true(d->scale == 16.0f / (float)r);
        for (int64_t k = 0; k < r * in; k++)
            assert_true(held(d->a, k, model->dims.op) == element(file, a, k / in, k % in));
        for (int64_t k = 0; k < r * out; k++)
            assert_true(held(d->b, k, model->dims.op) == element(file, b, k / r, k % r));
    }
    if (model->dims.experts == model->experts) {
        assert_int_equal(2 * n, safetensors_count(file));
        assert_int_equal(data->warning_count, 0);
    }
    safetensors_close(file);
    adapter_data_destroy(data);
    return n;
}

static void linear_fixtures(void **state)
{
    (void)state;
    for (size_t i = 0; i < 4; i++) {
        struct model *model = test_model_create(&fixtures[i].shape);
        assert_true(check_linear(&fixtures[i], "adapter_2d_0", model) > check_linear(&fixtures[i], "adapter_2d_1", model));
        test_model_destroy(model);
    }
}

static void linear_subset_warns(void **state)
{
    (void)state;
    struct fixture f = fixtures[0];
    memcpy(f.shape.held, (int32_t[8]){1, 2, -1}, sizeof f.shape.held);
    struct model *model = test_model_create(&f.shape);
    assert_int_equal(check_linear(&f, "adapter_2d_1", model), 2);
    int dir = open_fixture(&f, "adapter_2d_1");
    struct adapter_data *data = read_fine(dir, model);
    close(dir);
    assert_int_equal(data->warning_count, 1);
    assert_string_equal(data->warnings[0], "18 tensors are for layers or experts that this server does not hold");
    assert_int_equal(data->tensors, 22);
    adapter_data_destroy(data);
    test_model_destroy(model);
}

/* ---- made on the spot ------------------------------------------------------------------------------------------ */

static const struct test_model_shape small = {4, 8, 6, DTYPE_BF16, false, false, 4, {0, 2, -1}, ALL};
#define CONFIG "{\"peft_type\":\"LORA\",\"peft_version\":\"0.21.0\",\"r\":2,\"lora_alpha\":4"

struct made {
    struct scratch s;
    struct st_writer w;
};

static void begin(struct made *m, const char *config)
{
    scratch_init(&m->s);
    st_writer_init(&m->w);
    scratch_write_text(&m->s, "adapter_config.json", "%s", config);
}

static struct adapter_data *finish(struct made *m, const struct test_model_shape *shape)
{
    st_writer_finish(&m->w, &m->s, "adapter_model.safetensors");
    struct model *model = test_model_create(shape);
    struct adapter_data *data = read_fine(m->s.fd, model);
    test_model_destroy(model);
    scratch_finish(&m->s);
    return data;
}

static void linear(struct made *m, const char *module, const char *dtype, int64_t r, int64_t in, int64_t out)
{
    char name[512];
    snprintf(name, sizeof name, "%s.lora_A.weight", module);
    test_adapter_tensor(&m->w, name, dtype, r, in, 1);
    snprintf(name, sizeof name, "%s.lora_B.weight", module);
    test_adapter_tensor(&m->w, name, dtype, out, r, 2);
}

static void names_of_all_families(void **state)
{
    (void)state;
    struct made m;
    begin(&m, CONFIG "}");
    linear(&m, "base_model.model.model.layers.0.mlp.experts.0.gate_proj", "BF16", 2, 8, 6);
    linear(&m, "base_model.model.layers.0.block_sparse_moe.experts.1.w3", "F16", 2, 8, 6);
    linear(&m, "base_model.model.model.language_model.layers.2.feed_forward.experts.3.down_proj", "F32", 2, 6, 8);
    linear(&m, "base_model.model.language_model.model.layers.2.mlp.experts.2.w2", "BF16", 2, 6, 8);
    linear(&m, "model.layers.2.experts.0.up_proj", "BF16", 2, 8, 6);
    linear(&m, "base_model.model.model.layers.0.self_attn.q_proj", "BF16", 2, 8, 8);
    linear(&m, "base_model.model.model.layers.0.mlp.shared_expert.gate_proj", "BF16", 2, 8, 6);
    linear(&m, "base_model.model.model.layers.0.mlp.shared_experts.gate_proj", "BF16", 2, 8, 6);
    linear(&m, "base_model.model.model.layers.0.shared_mlp.input_linear", "BF16", 2, 8, 6);
    linear(&m, "base_model.model.model.layers.0.mlp.gate", "BF16", 2, 8, 4);
    struct adapter_data *data = finish(&m, &small);
    static const struct {
        int32_t layer, expert;
        enum kernel_projection p;
    } want[] = {{0, 0, KERNEL_GATE}, {0, 1, KERNEL_UP}, {1, 0, KERNEL_UP}, {1, 2, KERNEL_DOWN}, {1, 3, KERNEL_DOWN}};
    assert_int_equal(data->deltas, 5);
    for (size_t i = 0; i < 5; i++) {
        const struct adapter_delta *d = &data->delta[i];
        assert_int_equal(d->layer_index, want[i].layer);
        assert_int_equal(d->expert, want[i].expert);
        assert_int_equal(d->projection, want[i].p);
        assert_true(d->scale == 2);
        for (int k = 0; k < (d->projection == KERNEL_DOWN ? 12 : 16); k++)
            assert_true(held(d->a, k, DTYPE_BF16) == test_adapter_value(1, k));
    }
    assert_int_equal(data->tensors, 10);
    assert_int_equal(data->ignored, 10);
    assert_int_equal(data->warning_count, 0);
    adapter_data_destroy(data);
}

static void only_other_modules(void **state)
{
    (void)state;
    struct made m;
    begin(&m, CONFIG ",\"target_modules\":[\"q_proj\"]}");
    linear(&m, "base_model.model.model.layers.0.self_attn.q_proj", "BF16", 2, 8, 8);
    linear(&m, "base_model.model.mtp.layers.0.mlp.experts.0.up_proj", "BF16", 2, 8, 8);
    struct adapter_data *data = finish(&m, &small);
    assert_int_equal(data->deltas, 0);
    assert_int_equal(data->tensors, 0);
    assert_int_equal(data->ignored, 4);
    assert_int_equal(data->warning_count, 2);
    assert_string_equal(data->warnings[0], "2 tensors adapt experts outside the decoder's layers and were not looked at");
    assert_non_null(strstr(data->warnings[1], "no tensor adapts a routed expert"));
    adapter_data_destroy(data);
}

static void adapter_names_inside_names(void **state)
{
    (void)state;
    struct made m;
    begin(&m, CONFIG "}");
    test_adapter_tensor(&m.w, "base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.default.weight", "BF16", 2, 8, 1);
    test_adapter_tensor(&m.w, "base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_B.default.weight", "BF16", 6, 2, 2);
    struct adapter_data *data = finish(&m, &small);
    assert_int_equal(data->deltas, 1);
    adapter_data_destroy(data);
}

/* patterns see the module without base_model.model, and a parameter with its own name */
static void patterns_and_scales(void **state)
{
    (void)state;
    struct made m;
    begin(&m, CONFIG ",\"use_rslora\":true,\"rank_pattern\":{\"^model\\\\.layers\\\\.0\\\\..*experts\\\\.1\\\\.w3\":4,\"down_proj\":1},"
                     "\"alpha_pattern\":{\"layers.0.mlp.experts.0.down_proj\":3,\"experts.gate_up_proj\":10,\"w3\":16.5}}");
    linear(&m, "base_model.model.model.layers.0.mlp.experts.1.w3", "BF16", 4, 8, 6);
    linear(&m, "base_model.model.model.layers.0.mlp.experts.0.w1", "BF16", 2, 8, 6);
    linear(&m, "base_model.model.model.layers.0.mlp.experts.0.down_proj", "BF16", 1, 6, 8);
    linear(&m, "base_model.model.model.layers.2.mlp.experts.base_layer", "BF16", 2 * 4, 8, 12);
    linear(&m, "base_model.model.model.layers.2.mlp.experts", "BF16", 1 * 4, 6, 8);
    struct adapter_data *data = finish(&m, &small);
    assert_int_equal(data->deltas, 3 + 3 * 4);
    assert_true(data->delta[0].scale == (float)(4 / sqrt(2)) && data->delta[0].projection == KERNEL_GATE);
    assert_true(data->delta[1].scale == 3 && data->delta[1].rank == 1);
    assert_true(data->delta[2].scale == 8.25f && data->delta[2].rank == 4);
    assert_true(data->delta[3].scale == (float)(10 / sqrt(2)) && data->delta[3].projection == KERNEL_GATE);
    assert_true(data->delta[5].scale == 4 && data->delta[5].rank == 1 && data->delta[5].projection == KERNEL_DOWN);
    assert_int_equal(data->rank, 4);
    adapter_data_destroy(data);
}

/* The order in the file decides, not the kind of key. */
static void first_pattern_of_the_file_wins(void **state)
{
    (void)state;
    static const char *const patterns[] = {"{\"zz.*|w1\":8,\"w1\":12}", "{\"w1\":12,\"zz.*|w1\":8}",
                                           "{\"w3\":1,\"0.w1\":8,\"experts.0.w1\":2,\"w1\":12}"};
    static const float scales[] = {4, 6, 4};
    for (int i = 0; i < 3; i++) {
        struct made m;
        char config[256];
        snprintf(config, sizeof config, CONFIG ",\"alpha_pattern\":%s}", patterns[i]);
        begin(&m, config);
        linear(&m, "base_model.model.model.layers.0.mlp.experts.0.w1", "BF16", 2, 8, 6);
        struct adapter_data *data = finish(&m, &small);
        assert_true(data->delta[0].scale == scales[i]);
        adapter_data_destroy(data);
    }
}

static void granite_parameters(void **state)
{
    (void)state;
    struct made m;
    begin(&m, CONFIG ",\"alpha_pattern\":{\"output_linear.weight\":6}}");
    linear(&m, "base_model.model.model.layers.0.block_sparse_moe.input_linear", "BF16", 2 * 4, 8, 12);
    linear(&m, "base_model.model.model.layers.0.block_sparse_moe.output_linear", "BF16", 2 * 4, 6, 8);
    struct adapter_data *data = finish(&m, &small);
    assert_int_equal(data->deltas, 12);
    for (int32_t e = 0; e < 4; e++) {
        const struct adapter_delta *d = &data->delta[3 * e];
        assert_true(d[0].scale == 2 && d[2].scale == 3);
        for (int j = 0; j < 2; j++)
            for (int k = 0; k < 6; k++) {
                assert_true(held(d[2].a, j * 6 + k, DTYPE_BF16) == test_adapter_value(1, (e * 2 + j) * 6 + k));
                assert_true(held(d[0].b, k * 2 + j, DTYPE_BF16) == test_adapter_value(2, k * 8 + j * 4 + e));
                assert_true(held(d[1].b, k * 2 + j, DTYPE_BF16) == test_adapter_value(2, (6 + k) * 8 + j * 4 + e));
            }
    }
    adapter_data_destroy(data);
}

/* The first element of expert 1's A tells which way it was read, in = out = 12. */
static void orientation(const char *version, bool transposed, bool interleaved, bool with_down, bool down_swapped, int swapped)
{
    const struct test_model_shape shape = {4, 12, 6, DTYPE_BF16, transposed, interleaved, 1, {0, -1}, ALL};
    struct made m;
    char config[512];
    snprintf(config, sizeof config,
             "{\"peft_type\":\"LORA\",%s\"r\":2,\"lora_alpha\":4,\"target_parameters\":[\"experts.gate_up_proj\"%s]}", version,
             with_down ? ",\"experts.down_proj\"" : "");
    begin(&m, config);
    linear(&m, with_down ? "base_model.model.model.layers.0.mlp.experts.base_layer" : "base_model.model.model.layers.0.mlp.experts", "BF16",
           8, 12, 12);
    if (with_down)
        linear(&m, "base_model.model.model.layers.0.mlp.experts", "BF16", 8, down_swapped ? 12 : 6, down_swapped ? 6 : 12);
    if (swapped >= 0) {
        struct adapter_data *data = finish(&m, &shape);
        const struct adapter_delta *d = &data->delta[with_down ? 3 : 2];
        assert_int_equal(d->expert, 1);
        assert_true(held(d->a, 1, DTYPE_BF16) == (swapped ? test_adapter_value(2, 1 * 8 + 1) : test_adapter_value(1, 2 * 12 + 1)));
        adapter_data_destroy(data);
        return;
    }
    st_writer_finish(&m.w, &m.s, "adapter_model.safetensors");
    struct model *model = test_model_create(&shape);
    struct adapter_data *data;
    struct engine_error error;
    assert_int_equal(adapter_read(m.s.fd, model, 0, NULL, &data, &error), ENGINE_BAD_ADAPTER);
    assert_non_null(strstr(error.message, "fits gate_up_proj both as it is and transposed, and"));
    test_model_destroy(model);
    scratch_finish(&m.s);
}

static void square_parameters(void **state)
{
    (void)state;
    /* the other parameter of the file tells, whatever the version */
    orientation("", false, false, true, false, 0);
    orientation("", false, false, true, true, 1);
    orientation("\"peft_version\":\"0.21.0\",", false, false, true, true, 1);
    /* then version and family */
    orientation("\"peft_version\":\"0.21.0\",", false, false, false, false, 0);
    orientation("\"peft_version\":\"0.17.1\",", false, false, false, false, 1);
    orientation("\"peft_version\":\"0.21.0\",", true, false, false, false, 1);
    orientation("\"peft_version\":\"0.17.1\",", true, false, false, false, 0);
    orientation("\"peft_version\":\"0.21.0\",", true, true, false, false, 0);
    orientation("\"peft_version\":\"1.0\",", false, false, false, false, 0);
    /* or nothing does */
    orientation("", false, false, false, false, -1);
    orientation("\"peft_version\":\"0.18.2.dev0\",", false, false, false, false, -1);
}

static void rounds_to_the_operand_type(void **state)
{
    (void)state;
    for (int half = 0; half < 2; half++) {
        struct test_model_shape shape = small;
        shape.op = half ? DTYPE_FP16 : DTYPE_BF16;
        struct made m;
        begin(&m, CONFIG "}");
        float a[16] = {1.00390625f, 1.01171875f, -1.0009765625f, 3.1415927f, 1e-8f, 0x1p-24f, 65504.0f, -0.0f}, b[12] = {0};
        st_writer_add(&m.w, "base_model.model.model.layers.0.mlp.experts.0.w1.lora_A.weight", "F32", 2, (int64_t[]){2, 8}, a, sizeof a);
        st_writer_add(&m.w, "base_model.model.model.layers.0.mlp.experts.0.w1.lora_B.weight", "F32", 2, (int64_t[]){6, 2}, b, sizeof b);
        struct adapter_data *data = finish(&m, &shape);
        for (int i = 0; i < 16; i++)
            assert_int_equal(dtype_bits_from_f32(held(data->delta[0].a, i, shape.op)),
                             dtype_bits_from_f32(dtype_round_f32(shape.op, a[i])));
        adapter_data_destroy(data);
    }
}

static void unknown_keys_warn(void **state)
{
    (void)state;
    struct made m;
    begin(&m, "{\"r\":2,\"lora_alpha\":4,\"unsloth_fixed\":true,\"other\":null,\"more\":{},\"bias\":\"none\",\"use_dora\":false,\"modules_"
              "to_save\":[],"
              "\"lora_dropout\":0.1,\"layers_to_transform\":[0],\"alora_invocation_tokens\":[1,2],\"init_lora_weights\":\"gaussian\"}");
    linear(&m, "base_model.model.model.layers.0.mlp.experts.0.w1", "BF16", 2, 8, 6);
    struct adapter_data *data = finish(&m, &small);
    assert_int_equal(data->warning_count, 3);
    assert_string_equal(data->warnings[0], "adapter_config.json has no peft_type; taken for LORA");
    assert_non_null(strstr(data->warnings[1], "rows before the invocation"));
    assert_string_equal(data->warnings[2], "adapter_config.json: unsloth_fixed is unknown and was not looked at (true)");
    adapter_data_destroy(data);
}

static void hub_caches_are_followed(void **state)
{
    (void)state;
    struct scratch s;
    scratch_init(&s);
    struct model *model = test_model_create(&small);
    test_adapter_write(&s, "blobs", &small, 0, 2, 2, 7);
    assert_int_equal(mkdirat(s.fd, "snapshots", 0755), 0);
    assert_int_equal(mkdirat(s.fd, "snapshots/x", 0755), 0);
    assert_int_equal(symlinkat("../../blobs/adapter_config.json", s.fd, "snapshots/x/adapter_config.json"), 0);
    assert_int_equal(symlinkat("../../blobs/adapter_model.safetensors", s.fd, "snapshots/x/adapter_model.safetensors"), 0);
    struct adapter_data *data = NULL;
    struct engine_error error;
    assert_int_equal(adapter_open_beneath(s.fd, s.path, "snapshots/x", model, 0, &data, &error), ENGINE_OK);
    assert_int_equal(data->deltas, 6);
    adapter_data_destroy(data);

    /* the same folder, with the root so low that its files lie outside */
    int low = openat(s.fd, "snapshots", O_PATH | O_DIRECTORY);
    assert_int_equal(adapter_open_beneath(low, "/nowhere", "x", model, 0, &data, &error), ENGINE_FORBIDDEN_PATH);
    assert_string_equal(error.message, "adapter_config.json is a link that leaves the adapter root");
    close(low);
    test_model_destroy(model);
    scratch_finish(&s);
}

struct swap {
    const struct scratch *s;
    atomic_bool stop;
};

static void *swap_versions(void *arg)
{
    struct swap *swap = arg;
    int fd = swap->s->fd;
    for (int i = 0; !atomic_load(&swap->stop); i++) {
        symlinkat(i % 2 ? "v1" : "v2", fd, "next");
        renameat(fd, "next", fd, "current");
    }
    return NULL;
}

/* A link to the version in use is swapped all the time: configuration and tensors are always of the same version. */
static void versions_are_not_mixed(void **state)
{
    (void)state;
    struct scratch s;
    scratch_init(&s);
    struct model *model = test_model_create(&small);
    test_adapter_write(&s, "v1", &small, 0, 2, 2, 7);
    test_adapter_write(&s, "v2", &small, 0, 2, 4, 8);
    assert_int_equal(symlinkat("v1", s.fd, "current"), 0);
    struct swap swap = {.s = &s};
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, swap_versions, &swap), 0);
    int good = 0, other = 0;
    for (int i = 0; i < 1000 && !other; i++) {
        struct adapter_data *data = NULL;
        struct engine_error error;
        enum engine_code code = adapter_open_beneath(s.fd, s.path, "current", model, 0, &data, &error);
        good += code == ENGINE_OK;
        other += code != ENGINE_OK && code != ENGINE_NO_FILE; /* that: swapped in each of many tries */
        if (other)
            print_error("%s\n", error.message);
        adapter_data_destroy(data);
    }
    atomic_store(&swap.stop, true);
    pthread_join(thread, NULL);
    assert_int_equal(other, 0);
    assert_true(good > 0);
    test_model_destroy(model);
    scratch_finish(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(versions_are_not_mixed),
        cmocka_unit_test(fused_fixtures),
        cmocka_unit_test(fused_subset),
        cmocka_unit_test(linear_fixtures),
        cmocka_unit_test(linear_subset_warns),
        cmocka_unit_test(names_of_all_families),
        cmocka_unit_test(only_other_modules),
        cmocka_unit_test(adapter_names_inside_names),
        cmocka_unit_test(patterns_and_scales),
        cmocka_unit_test(first_pattern_of_the_file_wins),
        cmocka_unit_test(granite_parameters),
        cmocka_unit_test(square_parameters),
        cmocka_unit_test(rounds_to_the_operand_type),
        cmocka_unit_test(unknown_keys_warn),
        cmocka_unit_test(hub_caches_are_followed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
