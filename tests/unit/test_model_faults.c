/* SPDX-License-Identifier: Apache-2.0
 *
 * What loading refuses, and how it says so: damaged, incomplete, contradictory and quantised checkpoints, options that make no
 * sense, too little memory. Every refusal must leave nothing behind.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/checkpoint.h"
#include "engine/plan.h"
#include "engine/selection.h"
#include "tests/unit/made_checkpoint.h"

static struct scratch folder;

static void expect(enum engine_code code, const struct engine_error *e, enum engine_code want, const char *text)
{
    if (code != want || e->code != want || !strstr(e->message, text))
        fail_msg("expected %s with \"%s\", got %s: %s", engine_code_name(want), text, engine_code_name(code), e->message);
}

/* What loading the folder with these options says, on a device with room for everything. What is wrong with a file is said with its path. */
static void expect_refused(struct engine_options options, enum engine_code want, const char *text)
{
    struct heap_device d;
    struct model *model = NULL;
    struct engine_error e = {0};
    heap_device_init(&d, kernels_ref(), true);
    if (!options.model && !options.synthetic)
        options.model = folder.path;
    expect(model_load(&d.device, &options, NULL, &model, &e), &e, want, text);
    if ((want == ENGINE_BAD_CHECKPOINT || want == ENGINE_NO_FILE) && strncmp(e.message, options.model, strlen(options.model)))
        fail_msg("this does not begin with %s: %s", options.model, e.message);
    assert_null(model);
    assert_int_equal(d.allocated, 0);
    heap_device_finish(&d);
}

static void refuse(struct made made, struct engine_options options, enum engine_code want, const char *text)
{
    scratch_init(&folder);
    made_write(&made, &folder);
    expect_refused(options, want, text);
    scratch_finish(&folder);
}

/* ---- tensors ----------------------------------------------------------------------------------------------- */

#define IS(t, text) (strstr((t)->name, text) != NULL)

static bool rename_to(struct made_tensor *t, const char *from, const char *to)
{
    char *at = strstr(t->name, from);
    if (at && !strcmp(at, from))
        strcpy(at, to);
    return true;
}

static bool drop_one(struct made_tensor *t) { return !IS(t, "layers.1.mlp.experts.2.up_proj"); }
static bool drop_w2(struct made_tensor *t) { return !IS(t, "layers.0.block_sparse_moe.experts.3.w2"); }
static bool drop_granite(struct made_tensor *t) { return !IS(t, "layers.1.block_sparse_moe.output_linear"); }
static bool drop_fused(struct made_tensor *t) { return !IS(t, "layers.0.mlp.experts.gate_up_proj"); }
static bool drop_bias(struct made_tensor *t) { return !IS(t, "layers.0.mlp.experts.down_proj_bias"); }
static bool drop_experts(struct made_tensor *t) { return !IS(t, "experts"); }
static bool drop_last_expert(struct made_tensor *t) { return !IS(t, "experts.3."); }

static bool double_one(struct made_tensor *t)
{
    return rename_to(t, "layers.1.mlp.experts.2.up_proj.weight", "layers.1.mlp.experts.2.w1.weight");
}
static bool mix_forms(struct made_tensor *t)
{
    return rename_to(t, "layers.1.mlp.experts.2.up_proj.weight", "layers.1.mlp.experts.gate_up_proj");
}
static bool name_scale(struct made_tensor *t)
{
    return rename_to(t, "mlp.experts.2.up_proj.weight", "mlp.experts.2.up_proj.weight_scale_inv");
}
static bool name_packed(struct made_tensor *t)
{
    return rename_to(t, "mlp.experts.2.up_proj.weight", "mlp.experts.2.up_proj.weight_packed");
}
static bool name_qweight(struct made_tensor *t) { return rename_to(t, "mlp.experts.2.up_proj.weight", "mlp.experts.2.up_proj.qweight"); }
static bool name_blocks(struct made_tensor *t) { return rename_to(t, "experts.down_proj", "experts.down_proj_blocks"); }
static bool name_strange(struct made_tensor *t) { return rename_to(t, "mlp.experts.2.up_proj.weight", "mlp.experts.2.side_proj.weight"); }
static bool name_bias(struct made_tensor *t) { return rename_to(t, "mlp.experts.2.up_proj.weight", "mlp.experts.2.up_proj.bias"); }
static bool name_far_expert(struct made_tensor *t)
{
    return rename_to(t, "mlp.experts.2.up_proj.weight", "mlp.experts.1024.up_proj.weight");
}

static bool make_fp8(struct made_tensor *t)
{
    if (IS(t, "layers.1.mlp.experts.2.up_proj"))
        t->dtype = "F8_E4M3";
    return true;
}

static bool make_int(struct made_tensor *t)
{
    if (IS(t, "layers.1.mlp.experts.2.up_proj"))
        t->dtype = "I16";
    return true;
}

static bool turn_one(struct made_tensor *t)
{
    if (IS(t, "layers.1.mlp.experts.2.up_proj")) {
        t->shape[0] = 24;
        t->shape[1] = 16;
    }
    return true;
}

static bool flatten_one(struct made_tensor *t)
{
    if (IS(t, "layers.0.mlp.experts.0.gate_proj")) {
        t->rank = 1;
        t->shape[0] = 24 * 16;
    }
    return true;
}

static bool shrink_fused(struct made_tensor *t)
{
    if (IS(t, "layers.1.mlp.experts.gate_up_proj"))
        t->shape[0] = 3;
    return true;
}

static bool turn_gpt_oss(struct made_tensor *t)
{
    if (t->rank == 3) {
        int64_t swap = t->shape[1];
        t->shape[1] = t->shape[2];
        t->shape[2] = swap;
    }
    return true;
}

static void tensors_are_checked(void **state)
{
    (void)state;
    static const struct {
        enum made_layout layout;
        bool (*edit)(struct made_tensor *t);
        const char *text;
    } bad[] = {
        {MADE_SEPARATE, drop_one, "tensor \"model.layers.1.mlp.experts.2.up_proj.weight\" is missing"},
        {MADE_MIXTRAL, drop_w2, "tensor \"model.layers.0.block_sparse_moe.experts.3.w2.weight\" is missing"},
        {MADE_GRANITE, drop_granite, "tensor \"model.layers.1.block_sparse_moe.output_linear.weight\" is missing"},
        {MADE_FUSED, drop_fused, "tensor \"model.layers.0.mlp.experts.gate_up_proj\" is missing"},
        {MADE_GPT_OSS, drop_bias, "tensor \"model.layers.0.mlp.experts.down_proj_bias\" is missing"},
        {MADE_SEPARATE, drop_experts, ": no tensor of a routed expert was found among 2"},
        {MADE_SEPARATE, drop_last_expert, "/config.json: it says num_experts 4, but the tensors have experts 3"},
        {MADE_SEPARATE, double_one,
         "\"model.layers.1.mlp.experts.2.gate_proj.weight\" and \"model.layers.1.mlp.experts.2.w1.weight\" are the same part"},
        {MADE_SEPARATE, mix_forms, "layer 1 has both fused experts"},
        {MADE_SEPARATE, name_scale, "up_proj.weight_scale_inv\" belongs to a quantised checkpoint"},
        {MADE_SEPARATE, name_packed, "weight_packed\" belongs to a quantised checkpoint"},
        {MADE_SEPARATE, name_qweight, "qweight\" belongs to a quantised checkpoint"},
        {MADE_GPT_OSS, name_blocks, "down_proj_blocks\" belongs to a quantised checkpoint"},
        {MADE_SEPARATE, make_fp8, "experts.2.up_proj.weight\" has dtype F8_E4M3, so it is of a quantised checkpoint"},
        {MADE_SEPARATE, make_int, "experts.2.up_proj.weight\" has dtype I16; BF16, F16 and F32 are served"},
        {MADE_SEPARATE, name_strange, "side_proj.weight\" is on a routed expert's path, but of no kind we know"},
        {MADE_SEPARATE, name_bias, "up_proj.bias\" is on a routed expert's path"},
        {MADE_SEPARATE, name_far_expert, "1025 experts; 1 to 1024 can be served"},
        {MADE_SEPARATE, turn_one, "layers.1.mlp.experts.2.up_proj.weight\" has shape [24, 16], expected [16, 24]"},
        {MADE_SEPARATE, flatten_one, "layers.0.mlp.experts.0.gate_proj.weight\" has shape [384], expected [16, 24]"},
        {MADE_FUSED, shrink_fused, "layers.1.mlp.experts.gate_up_proj\" has shape [3, 32, 24], expected [4, 32, 24]"},
        {MADE_GPT_OSS, turn_gpt_oss, "layers.0.mlp.experts.gate_up_proj\" has shape [4, 32, 24], expected [4, 24, 32]"},
        {MADE_FUSED_TRANSPOSED, NULL, "the order of gate and up in it is not known: name the family that it is like with --family"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        refuse((struct made){.layout = bad[i].layout, .edit = bad[i].edit}, (struct engine_options){0}, ENGINE_BAD_CHECKPOINT, bad[i].text);
    refuse((struct made){.layout = MADE_FUSED_TRANSPOSED, .config = "{\"model_type\":\"newcomer\"}"}, (struct engine_options){0},
           ENGINE_BAD_CHECKPOINT, "for model_type \"newcomer\" the order of gate and up");
    refuse((struct made){.layout = MADE_SEPARATE, .config = "{\"model_type\":\"gpt_oss\"}"}, (struct engine_options){0},
           ENGINE_BAD_CHECKPOINT, "gpt_oss has fused experts with biases");
}

static void faults_are_all_reported(void **state)
{
    (void)state;
    char *text = NULL;
    size_t size;
    FILE *out = open_memstream(&text, &size);
    struct made made = {.layout = MADE_SEPARATE, .edit = drop_last_expert};
    scratch_init(&folder);
    made_write(&made, &folder);
    scratch_write_text(&folder, "config.json",
                       "{\"model_type\":\"olmoe\",\"num_experts\":4,\"hidden_size\":25,\"intermediate_size\":17,\"hidden_act\":\"relu2\","
                       "\"num_experts_per_tok\":4}");
    assert_int_equal(engine_check(folder.path, &(struct engine_options){0}, out), ENGINE_BAD_CHECKPOINT);
    fclose(out);
    static const char *const want[] = {"hidden_act \"relu2\" is none of",
                                       "num_experts 4,",
                                       "hidden_size 25, but the tensors have hidden size 24",
                                       "intermediate_size 17, but the tensors have intermediate size 16",
                                       "num_experts_per_tok 4 is not within the 3 experts",
                                       "not fit to be served"};
    for (size_t i = 0; i < sizeof want / sizeof want[0]; i++)
        if (!strstr(text, want[i]))
            fail_msg("no \"%s\" in: %s", want[i], text);
    assert_null(strstr(text, "\nfit to be"));
    free(text);
    scratch_finish(&folder);
}

static void check_prints_what_it_would_serve(void **state)
{
    (void)state;
    char *text = NULL;
    size_t size;
    FILE *out = open_memstream(&text, &size);
    struct made made = {.layout = MADE_LLAMA4, .layers = 4};
    scratch_init(&folder);
    made_write(&made, &folder);
    assert_int_equal(engine_check(folder.path, &(struct engine_options){.layers = "0,2-3"}, out), ENGINE_OK);
    assert_int_equal(engine_check(FIXTURES "/gpt_oss/adapter_peft3d_0", &(struct engine_options){.model = FIXTURES "/gpt_oss"}, out),
                     ENGINE_OK);
    assert_int_equal(engine_check(FIXTURES "/gpt_oss/adapter_peft3d_0", &(struct engine_options){.model = FIXTURES "/mixtral"}, out),
                     ENGINE_BAD_ADAPTER);
    assert_int_equal(engine_check(FIXTURES "/gpt_oss/adapter_peft3d_0", &(struct engine_options){0}, out), ENGINE_OK);
    assert_int_equal(
        engine_check(FIXTURES "/gpt_oss/adapter_peft3d_0", &(struct engine_options){.model = FIXTURES "/gpt_oss/adapter_peft3d_0"}, out),
        ENGINE_BAD_CHECKPOINT);
    struct scratch half;
    scratch_init(&half);
    scratch_write_text(&half, "adapter_model.safetensors", "x");
    assert_int_equal(engine_check(half.path, &(struct engine_options){0}, out), ENGINE_NO_FILE);
    scratch_finish(&half);
    assert_int_equal(engine_check("/nowhere/at/all", &(struct engine_options){0}, out), ENGINE_NO_FILE);
    fclose(out);
    static const char *const want[] = {"family: llama4_text",
                                       "layers: 3 (0,2-3)",
                                       "experts: 4 of 4 (0-3)",
                                       "weights: BF16",
                                       "multiplies the input",
                                       "tensors: 6 used, 6 ignored",
                                       "adapted experts: 8",
                                       "projections: gate up down",
                                       "not fit to be installed",
                                       "give --model",
                                       "it is an adapter's folder",
                                       "adapter_config.json",
                                       "/nowhere/at/all: No such file",
                                       "\nfit to be served\n",
                                       "\nfit to be installed\n"};
    for (size_t i = 0; i < sizeof want / sizeof want[0]; i++)
        if (!strstr(text, want[i]))
            fail_msg("no \"%s\" in: %s", want[i], text);
    free(text);
    scratch_finish(&folder);
}

/* One fault is told in one line: not what follows from it as well. */
static void layers_that_are_not_there_are_all_that_is_said(void **state)
{
    (void)state;
    static const struct {
        bool (*edit)(struct made_tensor *t);
        const char *layers, *end;
    } wrong[] = {
        {NULL, "5-9", ": there are no experts in layer 5 of the checkpoint, whose last layer with experts is 1\nnot fit to be served\n"},
        {drop_experts, NULL, "gate_proj.weight)\nnot fit to be served\n"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        char *text = NULL;
        size_t size = 0, lines = 0;
        FILE *out = open_memstream(&text, &size);
        struct made made = {.layout = MADE_SEPARATE, .edit = wrong[i].edit};
        scratch_init(&folder);
        made_write(&made, &folder);
        assert_int_not_equal(engine_check(folder.path, &(struct engine_options){.layers = wrong[i].layers}, out), ENGINE_OK);
        fclose(out);
        for (const char *c = text; *c; c++)
            lines += *c == '\n';
        if (lines != 3 || !strstr(text, wrong[i].end))
            fail_msg("%zu lines: %s", lines, text);
        free(text);
        scratch_finish(&folder);
    }
}

/* ---- config and index --------------------------------------------------------------------------------------- */

static void the_config_is_checked(void **state)
{
    (void)state;
    static const struct {
        const char *config, *text;
    } bad[] = {
        {"", "config.json: line 1"},
        {"[]", "config.json is not a JSON object"},
        {"{\"model_type\":\"a\",\"model_type\":\"b\"}", "duplicate object key"},
        {"{\"model_type\":1}", "model_type must be a string"},
        {"{\"hidden_act\":[]}", "hidden_act must be a string"},
        {"{\"quantization_config\":{\"quant_method\":\"mxfp4\"}}", "quantised by mxfp4"},
        {"{\"text_config\":{\"quantization_config\":{}}}", "quantised by unnamed"},
        {"{\"model_type\":\"mixtral\",\"num_local_experts\":8}", "says num_local_experts 8, but the tensors have experts 4"},
        {"{\"n_routed_experts\":5}", "n_routed_experts 5"},
        {"{\"moe_num_experts\":5}", "moe_num_experts 5"},
        {"{\"hidden_size\":16}", "hidden_size 16"},
        {"{\"moe_intermediate_size\":8,\"intermediate_size\":16}", "moe_intermediate_size 8, but the tensors have intermediate size 16"},
        {"{\"model_type\":\"olmoe\",\"intermediate_size\":8}", "intermediate_size 8"},
        {"{\"num_experts_per_tok\":5}", "num_experts_per_tok 5 is not within the 4 experts"},
        {"{\"moe_k\":-1}", "moe_k -1 is not within"},
        {"{\"hidden_act\":\"relu\"}", "hidden_act \"relu\" is none of"},
        {"{\"swiglu_limit\":5.5}", "swiglu_limit 5.5"},
        {"{\"num_hidden_layers\":0}", "no layer below num_hidden_layers 0 has experts"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        refuse((struct made){.layout = MADE_SEPARATE, .config = bad[i].config}, (struct engine_options){0}, ENGINE_BAD_CHECKPOINT,
               bad[i].text);
    refuse((struct made){.layout = MADE_GPT_OSS, .config = "{\"model_type\":\"gpt_oss\",\"swiglu_limit\":6}"}, (struct engine_options){0},
           ENGINE_BAD_CHECKPOINT, "swiglu_limit 6 is not the 7");
    refuse((struct made){.layout = MADE_GPT_OSS, .config = "{\"model_type\":\"gpt_oss\",\"hidden_act\":\"gelu\"}"},
           (struct engine_options){0}, ENGINE_BAD_CHECKPOINT, "hidden_act \"gelu\" is not that of gpt_oss");

    struct made made = {.layout = MADE_SEPARATE};
    scratch_init(&folder);
    made_write(&made, &folder);
    assert_int_equal(unlinkat(folder.fd, "config.json", 0), 0);
    char where[1024];
    struct engine_error error;
    snprintf(where, sizeof where, "%s/config.json: No such file", folder.path);
    expect_refused((struct engine_options){0}, ENGINE_NO_FILE, where);
    assert_int_equal(plan_check_options(&(struct engine_options){.model = folder.path}, &error), ENGINE_NO_FILE);
    assert_memory_equal(error.message, where, strlen(where));
    assert_int_equal(mkfifoat(folder.fd, "config.json", 0600), 0);
    expect_refused((struct engine_options){0}, ENGINE_BAD_CHECKPOINT, "config.json is not a regular file");
    assert_int_equal(unlinkat(folder.fd, "config.json", 0), 0);
    char *deep = malloc(100001);
    memset(deep, '[', 100000);
    scratch_write(&folder, "config.json", deep, 100000);
    free(deep);
    expect_refused((struct engine_options){0}, ENGINE_BAD_CHECKPOINT, "depth");
    assert_int_equal(unlinkat(folder.fd, "model.safetensors", 0), 0);
    expect_refused((struct engine_options){0}, ENGINE_BAD_CHECKPOINT, "holds neither model.safetensors nor");
    scratch_write(&folder, "model.safetensors", "junk", 4);
    expect_refused((struct engine_options){0}, ENGINE_BAD_CHECKPOINT, "model.safetensors: 4 bytes");
    scratch_finish(&folder);
    expect_refused((struct engine_options){.model = "/nowhere/at/all"}, ENGINE_NO_FILE, "/nowhere/at/all: No such file");
}

#define INDEX "model.safetensors.index.json"

/* The shard that is replaced holds the routers of both layers, among others: twelve tensors, of which expert 2's gate. */
static void the_index_is_checked(void **state)
{
    (void)state;
    static const char *const bad_name[] = {"a/b", "..", ".", "", "/etc/passwd"};
    struct made made = {.layout = MADE_SEPARATE, .shards = 2};
    scratch_init(&folder);
    made_write(&made, &folder);
    assert_int_equal(renameat(folder.fd, "part1.safetensors", folder.fd, "kept"), 0);
    expect_refused((struct engine_options){0}, ENGINE_NO_FILE, "/part1.safetensors: No such file");
    scratch_write(&folder, "part1.safetensors", "junk", 4);
    expect_refused((struct engine_options){0}, ENGINE_BAD_CHECKPOINT, "/part1.safetensors: 4 bytes");
    scratch_write_header(&folder, "part1.safetensors", "{}", 0);
    expect_refused((struct engine_options){0}, ENGINE_BAD_CHECKPOINT,
                   "/part1.safetensors: tensor \"model.layers.0.mlp.experts.0.gate_proj.weight\" is not here, where " INDEX " says it is");
    assert_int_equal(linkat(folder.fd, "part0.safetensors", folder.fd, "twin", 0), 0);
    assert_int_equal(renameat(folder.fd, "twin", folder.fd, "part1.safetensors"), 0);
    assert_int_equal(unlinkat(folder.fd, "part1.safetensors", 0), 0);
    assert_int_equal(linkat(folder.fd, "part0.safetensors", folder.fd, "part1.safetensors", 0), 0);
    expect_refused((struct engine_options){0}, ENGINE_BAD_CHECKPOINT, "is here, but by " INDEX " in part0.safetensors");
    scratch_write_text(&folder, INDEX, "{\"weight_map\":{\"model.layers.0.mlp.experts.0.gate_proj.weight\":\"kept\"}}");
    expect_refused((struct engine_options){0}, ENGINE_BAD_CHECKPOINT, "is here, but not in " INDEX);
    for (size_t i = 0; i < sizeof bad_name / sizeof bad_name[0]; i++) {
        scratch_write_text(&folder, INDEX, "{\"weight_map\":{\"x\":\"%s\"}}", bad_name[i]);
        expect_refused((struct engine_options){0}, ENGINE_BAD_CHECKPOINT, "/" INDEX ": weight_map must map \"x\" to a plain file name");
    }
    scratch_write_text(&folder, INDEX, "{\"weight_map\":{\"x\":1}}");
    expect_refused((struct engine_options){0}, ENGINE_BAD_CHECKPOINT, "not to another type");
    scratch_write_text(&folder, INDEX, "{\"weight_map\":{\"x\":\"a\",\"x\":\"a\"}}");
    expect_refused((struct engine_options){0}, ENGINE_BAD_CHECKPOINT, "duplicate");
    scratch_write_text(&folder, INDEX, "{\"weight_map\":[]}");
    expect_refused((struct engine_options){0}, ENGINE_BAD_CHECKPOINT, "weight_map is missing or not an object");
    scratch_write_text(&folder, INDEX, "{\"weight_map\":{}}");
    expect_refused((struct engine_options){0}, ENGINE_BAD_CHECKPOINT, "no tensor of a routed expert was found among 0");
    scratch_finish(&folder);
}

/* ---- options ------------------------------------------------------------------------------------------------ */

static void options_are_checked(void **state)
{
    (void)state;
    struct made made = {.layout = MADE_SEPARATE, .first_layer = 1, .layers = 3};
    static const struct {
        struct engine_options options;
        const char *text;
    } bad[] = {
        {{.layers = "0"}, "--layers: there are no experts in layer 0 of the checkpoint, whose last layer with experts is 3"},
        {{.layers = "1-4"}, "--layers: there is no layer 4"},
        {{.layers = "3-1"}, "--layers: the range 3-1 is reversed"},
        {{.layers = ""}, "--layers: \"\" is not a list"},
        {{.layers = "1,"}, "is not a list"},
        {{.layers = "1-"}, "is not a list"},
        {{.layers = "-1"}, "is not a list"},
        {{.layers = "1 ,2"}, "is not a list"},
        {{.layers = "99999999999"}, "is not a list"},
        {{.experts = "4"}, "--experts: there is no expert 4; the model has 0 to 3"},
        {{.experts = "a"}, "--experts: \"a\" is not a list"},
        {{.dtype = "int8"}, "--dtype: \"int8\" is neither bf16 nor fp16"},
        {{.family = "bert"}, "--family: \"bert\" is none of mixtral, "},
        {{.synthetic = "E=4,K=2,H=8,I=8,L=1", .model = "x"}, "exclude each other"},
        {{.synthetic = "E=4,K=2,H=8,I=8"}, "L is missing"},
        {{.synthetic = "E=4,K=5,H=8,I=8,L=1"}, "K=5 is more than E=4"},
        {{.synthetic = "E=0,K=1,H=8,I=8,L=1"}, "E=0 is not a number from 1 to 1024"},
        {{.synthetic = "E=1025,K=1,H=8,I=8,L=1"}, "E=1025 is not"},
        {{.synthetic = "E=4x,K=1,H=8,I=8,L=1"}, "E=4x is not"},
        {{.synthetic = "E=4,K=1,H=8,I=8,L=1,Z=3"}, "Z: there is no such field"},
        {{.synthetic = "E=4,K=1,H=8,I=8,L=1,ACT=relu"}, "ACT=relu is none of"},
        {{.synthetic = "E"}, "is not NAME=VALUE"},
        {{.synthetic = "E=4,K=1,H=8,I=8,L=1", .layers = "1"}, "there is no layer 1; the model has 0 to 0"},
        {{.synthetic = "E=4,K=1,H=8,I=8,L=1", .experts = "4"}, "there is no expert 4"},
    };
    scratch_init(&folder);
    made_write(&made, &folder);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        expect_refused(bad[i].options, ENGINE_BAD_OPTION, bad[i].text);
        /* None of this needs a shard. */
        struct engine_options options = bad[i].options;
        struct engine_error e = {0};
        if (!options.synthetic)
            options.model = folder.path;
        expect(plan_check_options(&options, &e), &e, ENGINE_BAD_OPTION, bad[i].text);
    }
    struct engine_error e;
    assert_int_equal(plan_check_options(&(struct engine_options){.model = folder.path, .layers = "1-3", .experts = "0-3"}, &e), ENGINE_OK);
    /* Layers past num_hidden_layers are there for those who name them, which the names alone can tell. */
    scratch_write_text(&folder, "config.json", "{\"num_hidden_layers\":2}");
    assert_int_equal(plan_check_options(&(struct engine_options){.model = folder.path, .layers = "3"}, &e), ENGINE_OK);
    scratch_finish(&folder);
}

static void selections_parse(void **state)
{
    (void)state;
    struct selection s;
    assert_int_equal(selection_parse("0-3,7,7,2147483647", "--x", &s, NULL), ENGINE_OK);
    assert_true(selection_has(&s, 0) && selection_has(&s, 3) && selection_has(&s, 7) && selection_has(&s, INT32_MAX));
    assert_false(selection_has(&s, 4) || selection_has(&s, 6) || selection_has(&s, -1));
    assert_int_equal(selection_parse(NULL, "--x", &s, NULL), ENGINE_OK);
    assert_true(selection_has(&s, 5));
    char many[3 * (SELECTION_MAX_RANGES + 1) + 1] = "";
    for (int i = 0; i <= SELECTION_MAX_RANGES; i++)
        strcat(many, i ? ",1" : "1");
    assert_int_equal(selection_parse(many, "--x", &s, NULL), ENGINE_BAD_OPTION);
}

/* ---- memory, cancelling, progress, warnings ------------------------------------------------------------------ */

static void memory_is_budgeted_before_it_is_taken(void **state)
{
    (void)state;
    const struct engine_options options = {.synthetic = "E=4,K=2,H=64,I=32,L=4"}; /* 49152 bytes a layer */
    struct heap_device d;
    struct model *model = NULL;
    struct engine_error e;
    heap_device_init(&d, kernels_ref(), true);
    d.memory = 3 * 49152 - 1;
    expect(model_load(&d.device, &options, NULL, &model, &e), &e, ENGINE_OUT_OF_DEVICE_MEMORY,
           "4 layers need 196608 bytes of device memory (0.0 GiB), 147455 are free for them (0.0 GiB); --layers 0-1 would fit");
    d.batches = 49152; /* as if that were taken */
    expect(model_load(&d.device, &options, NULL, &model, &e), &e, ENGINE_OUT_OF_DEVICE_MEMORY, "98303 are free for them");
    d.batches = SIZE_MAX / 2;
    expect(model_load(&d.device, &options, NULL, &model, &e), &e, ENGINE_OUT_OF_DEVICE_MEMORY, "0 are free for them");
    d.batches = 0;
    d.memory = 100;
    expect(model_load(&d.device, &options, NULL, &model, &e), &e, ENGINE_OUT_OF_DEVICE_MEMORY, "not even one layer would fit");
    d.memory = 4 * 49152;
    d.allocations_left = 2; /* somebody else took it meanwhile */
    expect(model_load(&d.device, &options, NULL, &model, &e), &e, ENGINE_OUT_OF_DEVICE_MEMORY, "no room for 49152");
    assert_int_equal(d.allocated, 0);
    d.allocations_left = -1;
    assert_int_equal(model_load(&d.device, &options, NULL, &model, &e), ENGINE_OK);
    assert_int_equal(model->weight_bytes, 4 * 49152);
    model_destroy(model);
    model_destroy(NULL);
    heap_device_finish(&d);
    expect_refused((struct engine_options){.synthetic = "E=1024,K=1,H=65536,I=65536,L=4096"}, ENGINE_OUT_OF_DEVICE_MEMORY,
                   "no room for 26388279066624 bytes");
    expect_refused((struct engine_options){.synthetic = "E=8,K=1,H=65537,I=64,L=1"}, ENGINE_BAD_OPTION, "H=65537");
}

struct watch {
    int64_t calls, done, total;
    char log[2000];
};

static void watch_progress(void *arg, int64_t done, int64_t total)
{
    struct watch *w = arg;
    w->calls++;
    w->done = done;
    w->total = total;
}

static void watch_log(void *arg, const char *level, const char *message)
{
    struct watch *w = arg;
    if (!strcmp(level, "debug"))
        return; /* times */
    assert_string_equal(level, "warning");
    snprintf(w->log + strlen(w->log), sizeof w->log - strlen(w->log), "%s\n", message);
}

static bool make_f32(struct made_tensor *t)
{
    if (IS(t, "layers.1.mlp.experts.0.down_proj"))
        t->dtype = "F32";
    return true;
}

static void loading_is_watched_and_cancelled(void **state)
{
    (void)state;
    struct made made = {.layout = MADE_SEPARATE, .edit = make_f32};
    struct watch w = {0};
    struct engine_options options = {.progress = watch_progress, .progress_arg = &w, .log = watch_log, .log_arg = &w};
    struct heap_device d;
    struct model *model = NULL;
    struct engine_error e;
    scratch_init(&folder);
    made_write(&made, &folder);
    options.model = folder.path;
    heap_device_init(&d, kernels_ref(), true);
    assert_int_equal(model_load(&d.device, &options, NULL, &model, &e), ENGINE_OK);
    assert_true(w.calls > 0);
    assert_int_equal(w.total, 24 * 16 * (23 * 2 + 4)); /* bytes of the files */
    assert_int_equal(w.done, w.total);
    assert_string_equal(w.log, "");
    model_destroy(model);

    model = NULL;
    atomic_bool cancel = true;
    expect(model_load(&d.device, &options, &cancel, &model, &e), &e, ENGINE_CANCELLED, "cancelled");
    assert_null(model);
    assert_int_equal(d.allocated, 0);
    heap_device_finish(&d);
    scratch_finish(&folder);
}

static void odd_values_are_noticed(void **state)
{
    (void)state;
    static const enum made_layout layout[] = {MADE_SEPARATE, MADE_GPT_OSS};
    for (int i = 0; i < 2; i++) {
        struct made made = {.layout = layout[i], .scale = INFINITY};
        struct watch w = {0};
        struct engine_options options = {.log = watch_log, .log_arg = &w};
        struct heap_device d;
        struct model *model = NULL;
        struct engine_error e;
        scratch_init(&folder);
        made_write(&made, &folder);
        options.model = folder.path;
        heap_device_init(&d, kernels_ref(), true);
        assert_int_equal(model_load(&d.device, &options, NULL, &model, &e), ENGINE_OK);
        assert_non_null(
            strstr(w.log, i ? "tensor \"model.layers.0.mlp.experts.gate_up_proj\" holds 3072 values that are NaN or infinite"
                            : "tensor \"model.layers.0.mlp.experts.0.gate_proj.weight\" holds 384 values that are NaN or infinite"));
        assert_true(i || strstr(w.log, "4 more tensors hold"));
        model_destroy(model);
        heap_device_finish(&d);
        scratch_finish(&folder);

        refuse((struct made){.layout = layout[i], .scale = 65536}, (struct engine_options){.dtype = "fp16"}, ENGINE_BAD_CHECKPOINT,
               "holds finite values too large for fp16");
    }
}

static void names_of_layers_parse(void **state)
{
    (void)state;
    int64_t layer = -1;
    const char *rest = NULL;
    assert_true(model_parse_layer_name("model.language_model.layers.17.mlp.x", &layer, &rest));
    assert_int_equal(layer, 17);
    assert_string_equal(rest, "mlp.x");
    assert_true(model_parse_layer_name("layers.2147483647.", &layer, &rest));
    assert_string_equal(rest, "");
    static const char *const not_ours[] = {
        "mtp.layers.0.mlp",  "visual.layers.0.x",   "model.layers.", "model.layers.x.y",       "model.layers.1",
        "model.layers.01.x", "layers.2147483648.x", "layers.-1.x",   "model.model.layers.1.x", ""};
    for (size_t i = 0; i < sizeof not_ours / sizeof not_ours[0]; i++)
        assert_false(model_parse_layer_name(not_ours[i], &layer, &rest));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tensors_are_checked),
        cmocka_unit_test(faults_are_all_reported),
        cmocka_unit_test(check_prints_what_it_would_serve),
        cmocka_unit_test(layers_that_are_not_there_are_all_that_is_said),
        cmocka_unit_test(the_config_is_checked),
        cmocka_unit_test(the_index_is_checked),
        cmocka_unit_test(options_are_checked),
        cmocka_unit_test(selections_parse),
        cmocka_unit_test(memory_is_budgeted_before_it_is_taken),
        cmocka_unit_test(loading_is_watched_and_cancelled),
        cmocka_unit_test(odd_values_are_noticed),
        cmocka_unit_test(names_of_layers_parse),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
