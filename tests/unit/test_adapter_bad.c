/* SPDX-License-Identifier: Apache-2.0
 *
 * Adapters that must be refused, each with a sentence that names the field or the tensor.
 */
#include "engine/adapter.h"
#include "engine/peft.h"
#include "tests/unit/adapter_files.h"

#include <stdarg.h>
#include <setjmp.h>
#include <cmocka.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const struct test_model_shape shape = {4, 8, 6, DTYPE_BF16, false, false, 4, {0, 2, -1}, {0, 1, 3, -1}};

#define PREFIX "base_model.model.model.layers.0.mlp."
#define FINE "\"peft_type\":\"LORA\",\"peft_version\":\"0.21.0\",\"r\":2,\"lora_alpha\":4"

/* One tensor of a bad file: its name after PREFIX unless it starts with '!', type and shape. */
struct tensor {
    const char *name;
    int64_t rows, cols;
    const char *dtype; /* NULL: BF16 */
};

static void put(struct st_writer *w, const struct tensor *t)
{
    char name[800];
    snprintf(name, sizeof name, "%s%s", t->name[0] == '!' ? "" : PREFIX, t->name + (t->name[0] == '!'));
    test_adapter_tensor(w, name, t->dtype ? t->dtype : "BF16", t->rows, t->cols, 3);
}

static void expect_read(const struct scratch *s, const struct test_model_shape *model_shape, int64_t max_bytes, enum engine_code want,
                        const char *message)
{
    struct model *model = test_model_create(model_shape);
    struct engine_error error = {0};
    struct adapter_data *data = NULL;
    enum engine_code code = adapter_read(s->fd, model, max_bytes, NULL, &data, &error);
    if (code != want || error.code != want || !strstr(error.message, message))
        fail_msg("%s, \"%s\"; expected %s, \"%s\"", engine_code_name(code), error.message, engine_code_name(want), message);
    assert_null(data);
    test_model_destroy(model);
}

static void bad_tensors(const char *config, const struct tensor *t, size_t n, enum engine_code want, const char *message)
{
    struct scratch s;
    struct st_writer w;
    scratch_init(&s);
    st_writer_init(&w);
    scratch_write_text(&s, "adapter_config.json", "%s", config);
    for (size_t i = 0; i < n; i++)
        put(&w, &t[i]);
    st_writer_finish(&w, &s, "adapter_model.safetensors");
    expect_read(&s, &shape, 0, want, message);
    scratch_finish(&s);
}

#define BAD(message, ...)                                                                                                                  \
    do {                                                                                                                                   \
        const struct tensor list[] = {__VA_ARGS__};                                                                                        \
        bad_tensors("{" FINE "}", list, sizeof list / sizeof list[0], ENGINE_BAD_ADAPTER, message);                                        \
    } while (0)

static void bad_config(const char *config, enum engine_code want, const char *message)
{
    const struct tensor list[] = {{"experts.0.w1.lora_A.weight", 2, 8, NULL}, {"experts.0.w1.lora_B.weight", 6, 2, NULL}};
    bad_tensors(config, list, 2, want, message);
}

/* ---- adapter_config.json --------------------------------------------------------------------------------------- */

static void unsupported_features(void **state)
{
    (void)state;
    static const struct {
        const char *field, *message;
    } cases[] = {
        {"\"use_dora\":true", "use_dora is true, which is not supported"},
        {"\"bias\":\"all\"", "bias is \"all\"; only \"none\" is supported"},
        {"\"bias\":\"lora_only\"", "bias is \"lora_only\""},
        {"\"bias\":true", "bias is true"},
        {"\"lora_bias\":true", "lora_bias is true"},
        {"\"fan_in_fan_out\":true", "fan_in_fan_out is true"},
        {"\"modules_to_save\":[\"lm_head\"]", "modules_to_save is [\"lm_head\"]"},
        {"\"use_qalora\":true", "use_qalora is true"},
        {"\"use_bdlora\":{\"nblocks\":2}", "use_bdlora is {\"nblocks\":2}"},
        {"\"layer_replication\":[[0,4],[2,5]]", "layer_replication is [[0,4],[2,5]]"},
        {"\"megatron_config\":{\"x\":1}", "megatron_config is {\"x\":1}"},
        {"\"kasa_config\":{\"beta\":1}", "kasa_config is"},
        {"\"arrow_config\":{\"top_k\":3}", "arrow_config is"},
        {"\"init_lora_weights\":\"pissa_niter_16\"", "init_lora_weights is \"pissa_niter_16\", which changes the base weights as well"},
        {"\"init_lora_weights\":\"OLoRA\"", "init_lora_weights is \"OLoRA\""},
        {"\"init_lora_weights\":\"loftq\"", "init_lora_weights is \"loftq\""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char config[512];
        snprintf(config, sizeof config, "{" FINE ",%s}", cases[i].field);
        bad_config(config, ENGINE_ADAPTER_UNSUPPORTED, cases[i].message);
    }
    bad_config("{\"peft_type\":\"LOHA\",\"r\":2,\"lora_alpha\":4}", ENGINE_ADAPTER_UNSUPPORTED, "peft_type is \"LOHA\"; only \"LORA\"");
    bad_config("{\"peft_type\":7,\"r\":2,\"lora_alpha\":4}", ENGINE_ADAPTER_UNSUPPORTED, "peft_type is 7");
    bad_config("{\"r\":1024,\"lora_alpha\":4}", ENGINE_ADAPTER_UNSUPPORTED, "r is 1024; at most 512 is supported");
    bad_config("{" FINE ",\"rank_pattern\":{\"w1\":513}}", ENGINE_ADAPTER_UNSUPPORTED, "rank_pattern of \"w1\" is 513; at most 512");
}

static void malformed_configs(void **state)
{
    (void)state;
    static const struct {
        const char *config, *message;
    } cases[] = {
        {"", "adapter_config.json, line 1:"},
        {"{", "adapter_config.json, line 1:"},
        {"[]", "adapter_config.json is not a JSON object"},
        {"{\"r\":2,\"r\":4,\"lora_alpha\":4}", "duplicate object key"},
        {"{\"r\":2,\"lora_alpha\":4,\"use_dora\":false,\"use_dora\":true}", "duplicate object key"},
        {"{\"r\":2,\"lora_alpha\":4,\"x\":\"\\u0000\"}", "adapter_config.json, line 1:"},
        {"{\"lora_alpha\":4}", "adapter_config.json has no r"},
        {"{\"r\":2}", "adapter_config.json has no lora_alpha"},
        {"{\"r\":0,\"lora_alpha\":4}", "r is 0; expected 1 to 512"},
        {"{\"r\":-3,\"lora_alpha\":4}", "r is -3; expected 1 to 512"},
        {"{\"r\":2.0,\"lora_alpha\":4}", "r is 2.0; expected an integer"},
        {"{\"r\":\"2\",\"lora_alpha\":4}", "r is \"2\"; expected an integer"},
        {"{\"r\":2,\"lora_alpha\":true}", "lora_alpha is true; expected a number"},
        {"{\"r\":2,\"lora_alpha\":1e39}", "expected a number of at most 3.4e38"},
        {"{" FINE ",\"use_rslora\":1}", "use_rslora is 1; expected true or false"},
        {"{" FINE ",\"rank_pattern\":[]}", "rank_pattern is []; expected an object"},
        {"{" FINE ",\"rank_pattern\":{\"w1\":\"x\"}}", "rank_pattern of \"w1\" is \"x\"; expected an integer"},
        {"{" FINE ",\"alpha_pattern\":{\"w1\":null}}", "alpha_pattern of \"w1\" is null; expected a number"},
        {"{" FINE ",\"alpha_pattern\":{\"w(1\":2}}", "alpha_pattern key \"w(1\" is not a valid regular expression"},
        {"{" FINE ",\"rank_pattern\":{\"(.*)*(.*)*(.*)*x[yz]\":2}}",
         "takes too long to match against module \"model.layers.0.mlp.experts.0.w1\""},
        {"{" FINE ",\"target_modules\":3}", "target_modules is 3"},
        {"{" FINE ",\"target_parameters\":\"experts.down_proj\"}", "target_parameters is \"experts.down_proj\"; expected a list"},
        {"{" FINE ",\"target_parameters\":[1]}", "target_parameters has 1; expected names"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        bad_config(cases[i].config, ENGINE_BAD_ADAPTER, cases[i].message);
}

/* ---- files ----------------------------------------------------------------------------------------------------- */

static void missing_and_odd_files(void **state)
{
    (void)state;
    struct scratch s;
    scratch_init(&s);
    expect_read(&s, &shape, 0, ENGINE_NO_FILE, "the adapter's folder has no adapter_config.json");
    scratch_write_text(&s, "adapter_config.json", "{" FINE "}");
    expect_read(&s, &shape, 0, ENGINE_NO_FILE, "the adapter's folder has no adapter_model.safetensors");
    scratch_write_text(&s, "adapter_model.bin", "x");
    expect_read(&s, &shape, 0, ENGINE_ADAPTER_UNSUPPORTED, "adapter_model.bin is a pickle");
    scratch_write_text(&s, "adapter_model.safetensors", "too short");
    expect_read(&s, &shape, 0, ENGINE_BAD_ADAPTER, "adapter_model.safetensors");
    expect_read(&s, &shape, 8, ENGINE_TOO_LARGE, "adapter_model.safetensors has 9 bytes; the limit is 8");

    /* nothing that could hang or is no file */
    unlinkat(s.fd, "adapter_model.safetensors", 0);
    assert_int_equal(mkfifoat(s.fd, "adapter_model.safetensors", 0600), 0);
    expect_read(&s, &shape, 0, ENGINE_BAD_ADAPTER, "adapter_model.safetensors is not a regular file");
    unlinkat(s.fd, "adapter_config.json", 0);
    assert_int_equal(mkdirat(s.fd, "adapter_config.json", 0700), 0);
    expect_read(&s, &shape, 0, ENGINE_BAD_ADAPTER, "adapter_config.json is not a regular file");
    unlinkat(s.fd, "adapter_config.json", AT_REMOVEDIR);
    int fd = openat(s.fd, "adapter_config.json", O_WRONLY | O_CREAT, 0600);
    assert_int_equal(ftruncate(fd, PEFT_MAX_CONFIG + 1), 0);
    close(fd);
    expect_read(&s, &shape, 0, ENGINE_BAD_ADAPTER, "adapter_config.json has 4194305 bytes; at most 4194304 are allowed");
    scratch_finish(&s);
}

/* ---- tensors --------------------------------------------------------------------------------------------------- */

static void names_that_cannot_be_understood(void **state)
{
    (void)state;
    BAD("tensor \"" PREFIX "experts.0.w4.lora_A.weight\" seems to adapt routed experts but its name can't be understood: the projection",
        {"experts.0.w4.lora_A.weight", 2, 8, NULL});
    BAD("is neither an expert's number", {"experts.x.w1.lora_A.weight", 2, 8, NULL});
    BAD("is neither an expert's number", {"experts.01.w1.lora_A.weight", 2, 8, NULL});
    BAD("is neither an expert's number", {"experts.4294967296.w1.lora_A.weight", 2, 8, NULL});
    BAD("is neither an expert's number", {"experts.gate_up_proj.lora_A.weight", 2, 8, NULL});
    BAD("it ends after \"experts\"", {"experts", 2, 8, NULL});
    BAD("it ends after the expert's number", {"experts.3", 2, 8, NULL});
    BAD("what follows the projection", {"experts.0.w1.weight", 2, 8, NULL});
    BAD("what follows the projection", {"experts.0.w1.lora_B.bias", 2, 8, NULL});
    BAD("what follows the projection", {"experts.0.w1.lora_magnitude_vector", 2, 8, NULL});
    BAD("what follows the projection", {"experts.0.w1.lora_embedding_A.weight", 2, 8, NULL});
    BAD("what follows the projection", {"experts.0.w1.base_layer.lora_A.weight", 2, 8, NULL});
    BAD("what follows the projection", {"experts.0.w1.lora_A..weight", 2, 8, NULL});
    BAD("what follows base_layer", {"experts.base_layer.base_layer.lora_A.weight", 2, 8, NULL});
    BAD("what follows is not lora_A", {"experts.lora_A.x.y.weight", 2, 8, NULL});
    BAD("what comes before the layer's number is not a known prefix",
        {"!base_model.model.encoder.layers.0.mlp.experts.0.w1.lora_A.weight", 2, 8, NULL});
    BAD("what comes before the layer's number is not a known prefix", {"!experts.0.w1.lora_A.weight", 2, 8, NULL});
    char name[700], message[700];
    memset(name, 'x', sizeof name);
    memcpy(name, "experts.0.w1.", 13);
    name[sizeof name - 1] = 0;
    snprintf(message, sizeof message, "it is too long");
    BAD(message, {name, 2, 8, NULL});
}

static void places_that_do_not_exist(void **state)
{
    (void)state;
    BAD("lora_A.weight\" is for layer 4; the model's last layer with experts is 3",
        {"!base_model.model.model.layers.4.mlp.experts.0.w1.lora_A.weight", 2, 8, NULL},
        {"!base_model.model.model.layers.4.mlp.experts.0.w1.lora_B.weight", 6, 2, NULL});
    BAD("is for expert 4; the model has experts 0 to 3", {"experts.4.w1.lora_A.weight", 2, 8, NULL},
        {"experts.4.w1.lora_B.weight", 6, 2, NULL});
}

static void halves(void **state)
{
    (void)state;
    BAD("tensor \"" PREFIX "experts.0.w1.lora_A.weight\" has no lora_B beside it", {"experts.0.w1.lora_A.weight", 2, 8, NULL});
    BAD("tensor \"" PREFIX "experts.0.w1.lora_B.weight\" has no lora_A beside it", {"experts.0.w1.lora_B.weight", 6, 2, NULL});
    BAD("experts.lora_A.weight\" has no lora_B beside it", {"experts.lora_A.weight", 8, 6, NULL});
    BAD("experts.base_layer.lora_A.weight\" has none without base_layer beside it", {"experts.base_layer.lora_A.weight", 8, 8, NULL},
        {"experts.base_layer.lora_B.weight", 12, 8, NULL});
}

static void doubles(void **state)
{
    (void)state;
    BAD("are both lora_A of one module", {"experts.0.w1.lora_A.weight", 2, 8, NULL}, {"experts.0.w1.lora_B.weight", 6, 2, NULL},
        {"experts.0.gate_proj.lora_A.weight", 2, 8, NULL});
    BAD("are both lora_B of one module", {"experts.0.w1.lora_A.weight", 2, 8, NULL}, {"experts.0.w1.lora_B.weight", 6, 2, NULL},
        {"!base_model.model.layers.0.block_sparse_moe.experts.0.gate_proj.lora_B.weight", 6, 2, NULL});
    BAD("belongs to adapter \"other\", others of the file to \"\"", {"experts.0.w1.lora_A.weight", 2, 8, NULL},
        {"experts.0.w1.lora_B.other.weight", 6, 2, NULL});
    BAD("adapt the same projection of the same expert", {"experts.base_layer.lora_A.weight", 8, 8, NULL},
        {"experts.base_layer.lora_B.weight", 12, 8, NULL}, {"experts.lora_A.weight", 8, 6, NULL}, {"experts.lora_B.weight", 8, 8, NULL},
        {"experts.3.w3.lora_A.weight", 2, 8, NULL}, {"experts.3.w3.lora_B.weight", 6, 2, NULL});
    BAD("adapt the same projection of the same expert", {"experts.base_layer.lora_A.weight", 8, 8, NULL},
        {"experts.base_layer.lora_B.weight", 12, 8, NULL}, {"experts.lora_A.weight", 8, 6, NULL}, {"experts.lora_B.weight", 8, 8, NULL},
        {"!model.layers.0.block_sparse_moe.output_linear.lora_A.weight", 8, 6, NULL},
        {"!model.layers.0.block_sparse_moe.output_linear.lora_B.weight", 8, 8, NULL});
}

static void shapes(void **state)
{
    (void)state;
    BAD("tensor \"" PREFIX "experts.0.w1.lora_A.weight\" has shape [2, 7]; expected [2, 8]: rank by adapter_config.json, hidden size",
        {"experts.0.w1.lora_A.weight", 2, 7, NULL}, {"experts.0.w1.lora_B.weight", 6, 2, NULL});
    BAD("experts.0.w1.lora_A.weight\" has shape [3, 8]; expected [2, 8]", {"experts.0.w1.lora_A.weight", 3, 8, NULL},
        {"experts.0.w1.lora_B.weight", 6, 3, NULL});
    BAD("experts.0.w1.lora_B.weight\" has shape [5, 2]; expected [6, 2]: intermediate size, rank",
        {"experts.0.w1.lora_A.weight", 2, 8, NULL}, {"experts.0.w1.lora_B.weight", 5, 2, NULL});
    BAD("experts.2.w2.lora_A.weight\" has shape [2, 8]; expected [2, 6]: rank by adapter_config.json, intermediate size",
        {"experts.2.w2.lora_A.weight", 2, 8, NULL}, {"experts.2.w2.lora_B.weight", 8, 2, NULL});
    BAD("is of type I16; expected F32, F16 or BF16", {"experts.0.w1.lora_A.weight", 2, 4, "I16"},
        {"experts.0.w1.lora_B.weight", 6, 2, NULL});
    BAD("of shape [8, 9] and lora_B of shape [12, 8] don't fit gate_up_proj; expected [8, 8] and [12, 8], or [8, 12] and [8, 8]: 4 experts "
        "of rank 2",
        {"experts.base_layer.lora_A.weight", 8, 9, NULL}, {"experts.base_layer.lora_B.weight", 12, 8, NULL},
        {"experts.lora_A.weight", 8, 6, NULL}, {"experts.lora_B.weight", 8, 8, NULL});
    BAD("of shape [12, 6] and lora_B of shape [8, 12] don't fit down_proj", {"experts.base_layer.lora_A.weight", 8, 8, NULL},
        {"experts.base_layer.lora_B.weight", 12, 8, NULL}, {"experts.lora_A.weight", 12, 6, NULL}, {"experts.lora_B.weight", 8, 12, NULL});

    struct scratch s;
    struct st_writer w;
    scratch_init(&s);
    st_writer_init(&w);
    scratch_write_text(&s, "adapter_config.json", "{" FINE "}");
    st_writer_add(&w, PREFIX "experts.0.w1.lora_A.weight", "BF16", 3, (int64_t[]){1, 2, 8}, (char[32]){0}, 32);
    st_writer_finish(&w, &s, "adapter_model.safetensors");
    expect_read(&s, &shape, 0, ENGINE_BAD_ADAPTER, "lora_A.weight\" has shape [1, 2, 8]; expected two dimensions");
    scratch_finish(&s);
}

static void made_for_another_model(void **state)
{
    (void)state;
    BAD("the adapter is made for another hidden size (16, here 8)", {"experts.0.w1.lora_A.weight", 2, 16, NULL},
        {"experts.0.w1.lora_B.weight", 6, 2, NULL}, {"experts.9.w2.lora_A.weight", 2, 6, NULL},
        {"experts.9.w2.lora_B.weight", 16, 2, NULL});
    BAD("the adapter is made for another intermediate size (5, here 6)", {"experts.0.w1.lora_A.weight", 2, 8, NULL},
        {"experts.0.w1.lora_B.weight", 5, 2, NULL}, {"experts.1.w2.lora_A.weight", 2, 5, NULL}, {"experts.1.w2.lora_B.weight", 8, 2, NULL});
    BAD("the adapter is made for another hidden size (9, here 8)", {"experts.base_layer.lora_A.weight", 8, 9, NULL},
        {"experts.base_layer.lora_B.weight", 12, 8, NULL}, {"experts.lora_A.weight", 8, 6, NULL}, {"experts.lora_B.weight", 9, 8, NULL});
    BAD("the adapter is made for another hidden size (9 or 12, here 8)",
        {"!base_model.model.model.layers.0.block_sparse_moe.input_linear.lora_A.weight", 8, 9, NULL},
        {"!base_model.model.model.layers.0.block_sparse_moe.input_linear.lora_B.weight", 12, 8, NULL},
        {"!base_model.model.model.layers.2.block_sparse_moe.input_linear.lora_A.weight", 8, 9, NULL},
        {"!base_model.model.model.layers.2.block_sparse_moe.input_linear.lora_B.weight", 12, 8, NULL});
    /* not all tensors agree: each is looked at */
    BAD("experts.1.w1.lora_A.weight\" has shape [2, 16]; expected [2, 8]", {"experts.0.w1.lora_A.weight", 2, 8, NULL},
        {"experts.0.w1.lora_B.weight", 6, 2, NULL}, {"experts.1.w1.lora_A.weight", 2, 16, NULL},
        {"experts.1.w1.lora_B.weight", 6, 2, NULL});
    BAD("is for expert 4; the model has experts 0 to 3; tensors beyond them: 4", {"experts.4.w1.lora_A.weight", 2, 8, NULL},
        {"experts.4.w1.lora_B.weight", 6, 2, NULL}, {"experts.5.w1.lora_A.weight", 2, 8, NULL}, {"experts.5.w1.lora_B.weight", 6, 2, NULL});
}

static void fused_parameters_without_a_name(void **state)
{
    (void)state;
    const struct tensor down[] = {{"experts.lora_A.weight", 8, 6, NULL}, {"experts.lora_B.weight", 8, 8, NULL}};
    bad_tensors("{" FINE "}", down, 2, ENGINE_BAD_ADAPTER,
                "target_parameters of adapter_config.json names neither gate_up_proj nor down_proj");
    bad_tensors("{" FINE ",\"target_parameters\":[\"xperts.down_proj\"]}", down, 2, ENGINE_BAD_ADAPTER, "names neither");
    bad_tensors("{" FINE ",\"target_parameters\":[\"layers.1.mlp.experts.down_proj\"]}", down, 2, ENGINE_BAD_ADAPTER, "names neither");
    bad_tensors("{" FINE ",\"target_parameters\":[\"experts.gate_up_proj\",\"mlp.experts.down_proj\"]}", down, 2, ENGINE_BAD_ADAPTER,
                "names both");
    bad_tensors("{" FINE ",\"target_parameters\":[\"experts.gate_up_proj\"]}", down, 2, ENGINE_BAD_ADAPTER, "don't fit gate_up_proj");
}

static void values(void **state)
{
    (void)state;
    static const struct {
        const char *dtype, *message;
        enum dtype op;
        float value;
        int expert; /* 2 is not held, and checked all the same */
    } cases[] = {
        {"F32", "element 5 is nan, which is not finite as BF16", DTYPE_BF16, NAN, 0},
        {"F32", "element 5 is -inf, which is not finite as BF16", DTYPE_BF16, -INFINITY, 0},
        {"F32", "element 5 is 3.40282e+38, which is not finite as BF16", DTYPE_BF16, 3.4028235e38f, 0},
        {"F32", "element 5 is 70000, which is not finite as FP16", DTYPE_FP16, 70000, 0},
        {"F32", "element 5 is nan, which is not finite as BF16", DTYPE_BF16, NAN, 2},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct scratch s;
        struct st_writer w;
        float a[16] = {0}, b[12] = {0};
        char name[200];
        a[5] = cases[i].value;
        scratch_init(&s);
        st_writer_init(&w);
        scratch_write_text(&s, "adapter_config.json", "{" FINE "}");
        snprintf(name, sizeof name, PREFIX "experts.%d.w1.lora_A.weight", cases[i].expert);
        st_writer_add(&w, name, "F32", 2, (int64_t[]){2, 8}, a, sizeof a);
        snprintf(name, sizeof name, PREFIX "experts.%d.w1.lora_B.weight", cases[i].expert);
        st_writer_add(&w, name, "F32", 2, (int64_t[]){6, 2}, b, sizeof b);
        st_writer_finish(&w, &s, "adapter_model.safetensors");
        struct test_model_shape with = shape;
        with.op = cases[i].op;
        expect_read(&s, &with, 0, ENGINE_BAD_ADAPTER, cases[i].message);
        scratch_finish(&s);
    }
}

/* A report has every fault, and the first one is the result. */
static void reports(void **state)
{
    (void)state;
    struct scratch s;
    struct st_writer w;
    scratch_init(&s);
    st_writer_init(&w);
    scratch_write_text(&s, "adapter_config.json", "{\"peft_type\":\"LORA\",\"r\":2,\"lora_alpha\":4,\"use_dora\":true,\"lora_bias\":true}");
    const struct tensor list[] = {
        {"experts.0.w1.lora_A.weight", 2, 8, NULL}, {"experts.9.w1.lora_A.weight", 2, 8, NULL}, {"experts.1.wx.lora_A.weight", 2, 8, NULL}};
    for (size_t i = 0; i < 3; i++)
        put(&w, &list[i]);
    st_writer_finish(&w, &s, "adapter_model.safetensors");
    struct model *model = test_model_create(&shape);
    struct adapter_data *data;
    struct engine_error error;
    char *text = NULL;
    size_t len = 0;
    FILE *report = open_memstream(&text, &len);
    assert_int_equal(adapter_read(s.fd, model, 0, report, &data, &error), ENGINE_ADAPTER_UNSUPPORTED);
    fclose(report);
    assert_non_null(strstr(error.message, "use_dora"));
    int lines = 0;
    for (const char *c = text; *c; c++)
        lines += *c == '\n';
    assert_int_equal(lines, 5);
    assert_non_null(strstr(text, "lora_bias"));
    assert_non_null(strstr(text, "for expert 9"));
    assert_non_null(strstr(text, "experts.1.wx"));
    assert_non_null(strstr(text, "has no lora_B beside it"));
    free(text);
    test_model_destroy(model);
    scratch_finish(&s);
}

/* What strangers write is cut at characters' borders. */
static void quotes(void **state)
{
    (void)state;
    assert_string_equal(PEFT_QUOTE("short"), "short");
    char text[400];
    for (size_t shift = 0; shift < 3; shift++) {
        memset(text, 'x', shift);
        for (size_t i = shift; i + 3 < sizeof text; i += 3)
            memcpy(text + i, "\xe2\x82\xac", 4);
        struct peft_text q = peft_quote(text, strlen(text));
        size_t n = strlen(q.s);
        assert_true(n > 150 && n < sizeof q.s);
        assert_string_equal(q.s + n - 3, "...");
        assert_int_equal((n - 3 - shift) % 3, 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(unsupported_features),
        cmocka_unit_test(malformed_configs),
        cmocka_unit_test(missing_and_odd_files),
        cmocka_unit_test(names_that_cannot_be_understood),
        cmocka_unit_test(places_that_do_not_exist),
        cmocka_unit_test(halves),
        cmocka_unit_test(doubles),
        cmocka_unit_test(shapes),
        cmocka_unit_test(made_for_another_model),
        cmocka_unit_test(fused_parameters_without_a_name),
        cmocka_unit_test(values),
        cmocka_unit_test(reports),
        cmocka_unit_test(quotes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
