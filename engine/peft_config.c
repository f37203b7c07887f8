/* SPDX-License-Identifier: Apache-2.0
 *
 * adapter_config.json. Everything that makes the adapted product something other than B(Av) on unchanged base weights is
 * refused by name; what only matters in training, or selects modules (the file's tensors tell), is passed over; a key
 * that nobody here has heard of gets a warning unless its value says "off".
 */
#include "engine/peft.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Known keys without a say in inference. */
static const char *const neutral[] = {
    "arrow_config",
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "monteclora_config",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "trainable_token_indices",
    "velora_config",
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_parameters",
    "alora_invocation_tokens",
};

/* Keys whose value must say "off". */
static const struct {
    const char *key, *why;
} refused[] = {
    {"use_dora", "DoRA rescales the base weights"},
    {"lora_bias", "biases of lora_B are not applied"},
    {"fan_in_fan_out", "the weights would be transposed"},
    {"modules_to_save", "whole modules that replace those of the model are not applied"},
    {"use_qalora", "QA-LoRA pools its input"},
    {"use_bdlora", "block-diagonal factors are not supported"},
    {"layer_replication", "the model's layers would be stacked anew"},
    {"arrow_config", "Arrow routes between adapters by itself"},
    {"kasa_config", "KaSA changes the base weights"},
    {"megatron_config", "adapters of Megatron's parallel layers are not supported"},
};

/* Ways of starting the training that also change the base weights, which the adapter then needs. */
static const char *const changing_inits[] = {"pissa", "olora", "corda", "loftq", "lora_ga"};

static bool is_off(const json_t *v)
{
    switch (json_typeof(v)) {
    case JSON_NULL:
    case JSON_FALSE: return true;
    case JSON_STRING: return !json_string_length(v);
    case JSON_ARRAY: return !json_array_size(v);
    case JSON_OBJECT: return !json_object_size(v);
    case JSON_INTEGER: return !json_integer_value(v);
    case JSON_REAL: return json_real_value(v) == 0;
    default: return false;
    }
}

/* The beginning of a dump; more of it than a quote shows. */
struct shown {
    char text[256];
    size_t length;
};

static int shown_append(const char *bytes, size_t length, void *arg)
{
    struct shown *shown = arg;
    size_t room = sizeof shown->text - shown->length, n = length < room ? length : room;
    memcpy(shown->text + shown->length, bytes, n);
    shown->length += n;
    return 0;
}

static struct peft_text show(const json_t *v)
{
    struct shown shown = {.length = 0};
    if (json_dump_callback(v, shown_append, &shown, JSON_COMPACT | JSON_ENCODE_ANY) || !shown.length)
        return peft_quote("?", 1);
    return peft_quote(shown.text, shown.length);
}

static bool one_of(const char *key, const char *const *list, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!strcmp(key, list[i]))
            return true;
    return false;
}

static bool check_keys(json_t *root, struct faults *log)
{
    const char *key;
    json_t *value;
    json_object_foreach(root, key, value)
    {
        bool known = one_of(key, neutral, sizeof neutral / sizeof neutral[0]) || !strcmp(key, "bias");
        for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++)
            if (!strcmp(key, refused[i].key)) {
                known = true;
                if (!is_off(value) &&
                    !faults_add(log, ENGINE_ADAPTER_UNSUPPORTED, "adapter_config.json: %s is %s, which is not supported: %s", key,
                                show(value).s, refused[i].why))
                    return false;
            }
        if (!known && !is_off(value) &&
            !faults_warn(log, "adapter_config.json: %s is unknown and was not looked at (%s)", PEFT_QUOTE(key), show(value).s))
            return false;
    }
    return true;
}

static bool check_features(json_t *root, struct faults *log)
{
    const json_t *type = json_object_get(root, "peft_type");
    if (!type && !faults_warn(log, "adapter_config.json has no peft_type; taken for LORA"))
        return false;
    if (type && (!json_is_string(type) || strcmp(json_string_value(type), "LORA")) &&
        !faults_add(log, ENGINE_ADAPTER_UNSUPPORTED, "adapter_config.json: peft_type is %s; only \"LORA\" is supported", show(type).s))
        return false;

    const json_t *bias = json_object_get(root, "bias");
    if (bias && !is_off(bias) && (!json_is_string(bias) || strcmp(json_string_value(bias), "none")) &&
        !faults_add(log, ENGINE_ADAPTER_UNSUPPORTED, "adapter_config.json: bias is %s; only \"none\" is supported", show(bias).s))
        return false;

    const json_t *init = json_object_get(root, "init_lora_weights");
    for (size_t i = 0; json_is_string(init) && i < sizeof changing_inits / sizeof changing_inits[0]; i++)
        if (!strncasecmp(json_string_value(init), changing_inits[i], strlen(changing_inits[i])) &&
            !faults_add(log, ENGINE_ADAPTER_UNSUPPORTED,
                        "adapter_config.json: init_lora_weights is %s, which changes the base weights as well; save the adapter with "
                        "path_initial_model_for_weight_conversion",
                        show(init).s))
            return false;

    const json_t *alora = json_object_get(root, "alora_invocation_tokens");
    if (alora && !is_off(alora) &&
        !faults_warn(log,
                     "adapter_config.json has alora_invocation_tokens: rows before the invocation must be sent as rows of the base model"))
        return false;
    return true;
}

static bool read_rank(const json_t *v, const char *what, const char *key, int32_t *out, struct faults *log)
{
    if (!json_is_integer(v))
        return faults_add(log, ENGINE_BAD_ADAPTER, "adapter_config.json: %s%s is %s; expected an integer", what, key, show(v).s);
    json_int_t r = json_integer_value(v);
    if (r < 1)
        return faults_add(log, ENGINE_BAD_ADAPTER, "adapter_config.json: %s%s is %" JSON_INTEGER_FORMAT "; expected 1 to %d", what, key, r,
                          KERNEL_MAX_RANK);
    if (r > KERNEL_MAX_RANK)
        return faults_add(log, ENGINE_ADAPTER_UNSUPPORTED, "adapter_config.json: %s%s is %" JSON_INTEGER_FORMAT "; at most %d is supported",
                          what, key, r, KERNEL_MAX_RANK);
    *out = (int32_t)r;
    return true;
}

static bool read_alpha(const json_t *v, const char *what, const char *key, double *out, struct faults *log)
{
    if (!json_is_number(v) || !isfinite((float)json_number_value(v)))
        return faults_add(log, ENGINE_BAD_ADAPTER, "adapter_config.json: %s%s is %s; expected a number%s", what, key, show(v).s,
                          json_is_number(v) ? " of at most 3.4e38" : "");
    *out = json_number_value(v);
    return true;
}

static bool read_patterns(json_t *root, const char *field, bool rank, struct pattern_set *set, struct faults *log)
{
    json_t *object = json_object_get(root, field), *value;
    if (!object || json_is_null(object))
        return true;
    if (!json_is_object(object))
        return faults_add(log, ENGINE_BAD_ADAPTER, "adapter_config.json: %s is %s; expected an object", field, show(object).s);
    const char *key;
    json_object_foreach(object, key, value)
    {
        char what[200];
        snprintf(what, sizeof what, " of \"%s\"", PEFT_QUOTE(key));
        int32_t r = 1;
        double number = 0;
        if (rank ? !read_rank(value, field, what, &r, log) : !read_alpha(value, field, what, &number, log))
            return false;
        struct engine_error error;
        enum engine_code code = pattern_set_add(set, key, rank ? r : number, &error);
        if (code != ENGINE_OK && !faults_add_error(log, &error))
            return false;
    }
    return true;
}

static bool read_targets(json_t *root, struct peft_config *config, struct faults *log)
{
    const json_t *modules = json_object_get(root, "target_modules"), *parameters = json_object_get(root, "target_parameters");
    if (modules && !json_is_null(modules) && !json_is_string(modules) && !json_is_array(modules) &&
        !faults_add(log, ENGINE_BAD_ADAPTER, "adapter_config.json: target_modules is %s; expected a list of names or an expression",
                    show(modules).s))
        return false;
    if (!parameters || json_is_null(parameters))
        return true;
    if (!json_is_array(parameters))
        return faults_add(log, ENGINE_BAD_ADAPTER, "adapter_config.json: target_parameters is %s; expected a list of names",
                          show(parameters).s);
    size_t n = json_array_size(parameters);
    config->target_parameters = calloc(n ? n : 1, sizeof *config->target_parameters);
    if (!config->target_parameters)
        return faults_add(log, ENGINE_OUT_OF_MEMORY, "out of memory while reading target_parameters");
    for (size_t i = 0; i < n; i++) {
        const json_t *v = json_array_get(parameters, i);
        if (!json_is_string(v)) {
            if (!faults_add(log, ENGINE_BAD_ADAPTER, "adapter_config.json: target_parameters has %s; expected names", show(v).s))
                return false;
            continue;
        }
        char *name = strdup(json_string_value(v));
        if (!name)
            return faults_add(log, ENGINE_OUT_OF_MEMORY, "out of memory while reading target_parameters");
        config->target_parameters[config->target_parameter_count++] = name;
    }
    return true;
}

static void read_version(const json_t *root, struct peft_config *config)
{
    const char *text = json_string_value(json_object_get(root, "peft_version"));
    int major, minor;
    config->version_major = config->version_minor = -1;
    if (!text || sscanf(text, "%6d.%6d", &major, &minor) != 2 || major < 0 || minor < 0)
        return;
    config->version_major = major;
    config->version_minor = minor;
    config->version_development = strstr(text, "dev") != NULL;
}

static bool read_numbers(json_t *root, struct peft_config *config, struct faults *log)
{
    json_t *r = json_object_get(root, "r"), *alpha = json_object_get(root, "lora_alpha"), *rslora = json_object_get(root, "use_rslora");
    config->ranks = pattern_set_create("rank_pattern");
    config->alphas = pattern_set_create("alpha_pattern");
    if (!config->ranks || !config->alphas)
        return faults_add(log, ENGINE_OUT_OF_MEMORY, "out of memory while reading adapter_config.json");
    /* A rank that could not be read stays 0, which no tensor is held against. */
    if (r ? !read_rank(r, "r", "", &config->r, log) : !faults_add(log, ENGINE_BAD_ADAPTER, "adapter_config.json has no r"))
        return false;
    if (alpha ? !read_alpha(alpha, "lora_alpha", "", &config->alpha, log)
              : !faults_add(log, ENGINE_BAD_ADAPTER, "adapter_config.json has no lora_alpha"))
        return false;
    if (rslora && !json_is_boolean(rslora) && !json_is_null(rslora) &&
        !faults_add(log, ENGINE_BAD_ADAPTER, "adapter_config.json: use_rslora is %s; expected true or false", show(rslora).s))
        return false;
    config->rslora = json_is_true(rslora);
    return read_patterns(root, "rank_pattern", true, config->ranks, log) &&
           read_patterns(root, "alpha_pattern", false, config->alphas, log);
}

bool peft_config_parse(const char *text, size_t len, struct peft_config *config, struct faults *log)
{
    json_error_t why;
    json_t *root = json_loadb(text, len, JSON_REJECT_DUPLICATES, &why);
    if (!root && (!why.text[0] || json_error_code(&why) == json_error_out_of_memory)) /* no text: it could not even begin */
        return faults_add(log, ENGINE_OUT_OF_MEMORY, "out of memory while reading adapter_config.json");
    if (!root)
        return faults_add(log, ENGINE_BAD_ADAPTER, "adapter_config.json, line %d: %s", why.line, PEFT_QUOTE(why.text)) && false;
    bool on;
    if (json_is_object(root)) {
        read_version(root, config);
        on = check_features(root, log) && check_keys(root, log) && read_numbers(root, config, log) && read_targets(root, config, log);
    } else {
        on = faults_add(log, ENGINE_BAD_ADAPTER, "adapter_config.json is not a JSON object") && false;
    }
    json_decref(root);
    return on;
}

void peft_config_finish(struct peft_config *config)
{
    pattern_set_destroy(config->ranks);
    pattern_set_destroy(config->alphas);
    for (size_t i = 0; i < config->target_parameter_count; i++)
        free(config->target_parameters[i]);
    free(config->target_parameters);
    memset(config, 0, sizeof *config);
}

enum engine_code peft_config_scale(struct peft_config *config, const char *module, int32_t *rank, float *scale, struct engine_error *error)
{
    double r = config->r, alpha = config->alpha;
    enum engine_code code = pattern_set_match(config->ranks, module, &r, error);
    if (code == ENGINE_OK)
        code = pattern_set_match(config->alphas, module, &alpha, error);
    if (code != ENGINE_OK)
        return code;
    *rank = (int32_t)r;
    if (*rank)
        *scale = (float)(config->rslora ? alpha / sqrt(r) : alpha / r);
    return ENGINE_OK;
}
