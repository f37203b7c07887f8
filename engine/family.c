/* SPDX-License-Identifier: Apache-2.0
 *
 * The table of families and the parser of tensor names.
 *
 * A name is matched by its parts, not by its family: `experts.` in any of the containers that families use, then either an
 * expert's number and a projection under one of its two customary names, or a fused parameter.
 */
#include "engine/family.h"

#include <string.h>

static const struct family table[] = {
    {.name = "mixtral"},
    {.name = "phimoe"},
    {.name = "minimax"},
    {.name = "minimax_m1"},
    {.name = "minimax_m2"},
    {.name = "qwen2_moe"},
    {.name = "qwen3_moe"},
    {.name = "qwen3_next"},
    {.name = "qwen3_5_moe"},
    {.name = "qwen3_vl_moe", .may_be_transposed = true},
    {.name = "olmoe"},
    {.name = "deepseek_v2"},
    {.name = "deepseek_v3"},
    {.name = "glm4_moe"},
    {.name = "kimi"},
    {.name = "kimi_k2"},
    {.name = "kimi_vl"},
    {.name = "granitemoe"},
    {.name = "granitemoeshared"},
    {.name = "granitemoehybrid"},
    {.name = "gpt_oss", .transposed = true, .biases = true, .fused = MODEL_FUSED_INTERLEAVED, .gpt_oss = true},
    {.name = "llama4", .transposed = true, .weight_on_input = true, .top_k = 1},
};

const char *family_name(size_t index) { return index < sizeof table / sizeof table[0] ? table[index].name : NULL; }

const struct family *family_find(const char *model_type)
{
    size_t n = strlen(model_type);
    if (n > 5 && !strcmp(model_type + n - 5, "_text"))
        n -= 5;
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        if (strlen(table[i].name) == n && !memcmp(table[i].name, model_type, n))
            return &table[i];
    return NULL;
}

/* What follows `prefix`, or NULL. */
static const char *after(const char *s, const char *prefix)
{
    size_t n = strlen(prefix);
    return strncmp(s, prefix, n) ? NULL : s + n;
}

/* A plain decimal number that fits INT32, followed by a dot. */
static const char *parse_number(const char *s, int64_t *out)
{
    int64_t v = 0;
    const char *p = s;
    for (; *p >= '0' && *p <= '9'; p++) {
        v = v * 10 + (*p - '0');
        if (v > INT32_MAX)
            return NULL;
    }
    if (p == s || *p != '.' || (*s == '0' && p > s + 1))
        return NULL;
    *out = v;
    return p + 1;
}

bool model_parse_layer_name(const char *name, int64_t *layer, const char **rest)
{
    static const char *const prefix[] = {"", "model.", "model.language_model.", "language_model.model."};
    for (size_t i = 0; i < sizeof prefix / sizeof prefix[0]; i++) {
        const char *s = after(name, prefix[i]);
        s = s ? after(s, "layers.") : NULL;
        s = s ? parse_number(s, layer) : NULL;
        if (s) {
            *rest = s;
            return true;
        }
    }
    return false;
}

struct named_role {
    const char *name;
    enum family_role role;
};

static void find_role(const struct named_role *roles, const char *name, enum family_role *out)
{
    for (; roles->name; roles++)
        if (!strcmp(roles->name, name))
            *out = roles->role;
}

static bool ends_with(const char *s, const char *suffix)
{
    size_t n = strlen(s), m = strlen(suffix);
    return n >= m && !strcmp(s + n - m, suffix);
}

/* FP8, MXFP4, NVFP4, compressed-tensors, AWQ and GPTQ by the names of their scales and packed words. */
static bool is_quantised(const char *name)
{
    static const char *const suffix[] = {"weight_scale_inv",
                                         "weight_scale",
                                         "weight_scale_2",
                                         "input_scale",
                                         "activation_scale",
                                         "_scale_inv",
                                         "_blocks",
                                         "_scales",
                                         "_scale",
                                         ".scales",
                                         ".qweight",
                                         ".qzeros",
                                         ".g_idx",
                                         ".weight_packed",
                                         ".weight_shape",
                                         ".weight_zero_point",
                                         ".weight_global_scale",
                                         ".input_global_scale"};
    for (size_t i = 0; i < sizeof suffix / sizeof suffix[0]; i++)
        if (ends_with(name, suffix[i]))
            return true;
    return false;
}

bool family_parse_tensor(const char *name, struct family_tensor *out)
{
    static const char *const container[] = {"mlp.", "block_sparse_moe.", "feed_forward."};
    static const struct named_role single[] = {
        {"gate_proj.weight", FAMILY_GATE},
        {"up_proj.weight", FAMILY_UP},
        {"down_proj.weight", FAMILY_DOWN},
        {"w1.weight", FAMILY_GATE},
        {"w3.weight", FAMILY_UP},
        {"w2.weight", FAMILY_DOWN},
        {NULL, 0},
    };
    static const struct named_role fused[] = {
        {"gate_up_proj", FAMILY_FUSED_GATE_UP},
        {"gate_up_proj_bias", FAMILY_FUSED_GATE_UP_BIAS},
        {"down_proj", FAMILY_FUSED_DOWN},
        {"down_proj_bias", FAMILY_FUSED_DOWN_BIAS},
        {NULL, 0},
    };
    const char *rest, *s = NULL, *inner;
    if (!model_parse_layer_name(name, &out->layer, &rest))
        return false;
    out->expert = -1;
    for (size_t i = 0; !s && i < sizeof container / sizeof container[0]; i++)
        s = after(rest, container[i]);
    if (!s)
        return false;
    out->role = FAMILY_UNKNOWN;
    if ((inner = after(rest, "block_sparse_moe.input_linear."))) { /* Granite */
        if (!strcmp(inner, "weight"))
            out->role = FAMILY_FUSED_GATE_UP;
    } else if ((inner = after(rest, "block_sparse_moe.output_linear."))) {
        if (!strcmp(inner, "weight"))
            out->role = FAMILY_FUSED_DOWN;
    } else if ((s = after(s, "experts."))) {
        inner = parse_number(s, &out->expert);
        find_role(inner ? single : fused, inner ? inner : s, &out->role);
    } else {
        return false;
    }
    if (out->role == FAMILY_UNKNOWN && is_quantised(name))
        out->role = FAMILY_QUANTISED;
    return true;
}

static const struct {
    const char *name;
    enum kernel_activation activation;
} activations[] = {
    /* ours first: family_activation_name reads them */
    {"silu", KERNEL_ACT_SILU},          {"gelu", KERNEL_ACT_GELU},  {"gelu_tanh", KERNEL_ACT_GELU_TANH},
    {"gpt_oss", KERNEL_ACT_GPT_OSS},    {"swish", KERNEL_ACT_SILU}, {"gelu_pytorch_tanh", KERNEL_ACT_GELU_TANH},
    {"gelu_new", KERNEL_ACT_GELU_TANH},
};

bool family_parse_activation(const char *name, enum kernel_activation *out)
{
    for (size_t i = 0; i < sizeof activations / sizeof activations[0]; i++)
        if (!strcmp(activations[i].name, name)) {
            *out = activations[i].activation;
            return true;
        }
    return false;
}

const char *family_activation_name(enum kernel_activation activation) { return activations[activation].name; }
