/* SPDX-License-Identifier: Apache-2.0
 *
 * Names of adapter tensors. They are those of the model in training, whose prefix and names may differ from the
 * checkpoint's: what counts is layer, expert and projection.
 */
#include "engine/peft.h"

#include <string.h>

static const struct {
    const char *name;
    enum kernel_projection projection;
} projections[] = {
    {"w1", KERNEL_GATE},        {"w3", KERNEL_UP},      {"w2", KERNEL_DOWN},
    {"gate_proj", KERNEL_GATE}, {"up_proj", KERNEL_UP}, {"down_proj", KERNEL_DOWN},
};

static bool starts(const char *s, const char *prefix) { return !strncmp(s, prefix, strlen(prefix)); }

/* The next component of a dotted name; *at moves behind it and its dot. */
static bool next(const char **at, const char **begin, size_t *len)
{
    if (!**at)
        return false;
    *begin = *at;
    *len = strcspn(*at, ".");
    *at += *len + ((*at)[*len] == '.');
    return true;
}

static bool equals(const char *begin, size_t len, const char *word) { return strlen(word) == len && !memcmp(begin, word, len); }

/* Behind the component of routed experts ("experts", or Granite's input_linear and output_linear), or NULL when the name
 * does not lead there. */
static const char *find_experts(const char *rest, const char **word, size_t *word_len)
{
    const char *at = rest, *c, *before = NULL;
    size_t len, before_len = 0;
    while (next(&at, &c, &len)) {
        if (len >= 6 && memmem(c, len, "shared", 6))
            return NULL;
        bool granite =
            before && equals(before, before_len, "block_sparse_moe") && (equals(c, len, "input_linear") || equals(c, len, "output_linear"));
        if (granite || equals(c, len, "experts")) {
            *word = c;
            *word_len = len;
            return at;
        }
        before = c;
        before_len = len;
    }
    return NULL;
}

/* "lora_A.weight" and "lora_A.<adapter>.weight". */
static bool parse_lora(const char *at, struct peft_name *out)
{
    if (!starts(at, "lora_A.") && !starts(at, "lora_B."))
        return false;
    out->b = at[5] == 'B';
    at += 7;
    if (!strcmp(at, "weight"))
        return true;
    size_t len = strcspn(at, ".");
    if (!len || strcmp(at + len, ".weight"))
        return false;
    memcpy(out->adapter, at, len);
    out->adapter[len] = 0;
    return true;
}

static bool parse_expert(const char *c, size_t len, int64_t *out)
{
    if (!len || len > 9 || (len > 1 && c[0] == '0'))
        return false;
    int64_t v = 0;
    for (size_t i = 0; i < len; i++) {
        if (c[i] < '0' || c[i] > '9')
            return false;
        v = 10 * v + (c[i] - '0');
    }
    *out = v;
    return true;
}

static const char *parse_linear(const char *expert, size_t expert_len, const char *at, const char **module_end, struct peft_name *out)
{
    const char *c;
    size_t len;
    if (!parse_expert(expert, expert_len, &out->expert))
        return "what follows \"experts\" is neither an expert's number nor lora_A, lora_B or base_layer";
    if (!next(&at, &c, &len))
        return "it ends after the expert's number";
    for (size_t i = 0; i < sizeof projections / sizeof projections[0]; i++)
        if (equals(c, len, projections[i].name)) {
            out->projection = projections[i].projection;
            out->kind = PEFT_LINEAR;
            *module_end = c + len;
            return parse_lora(at, out) ? NULL : "what follows the projection is not lora_A.weight or lora_B.weight";
        }
    return "the projection is not one of gate_proj, up_proj, down_proj, w1, w3, w2";
}

static const char *parse_routed(const char *word, size_t word_len, const char *at, const char **module_end, struct peft_name *out)
{
    bool granite = !equals(word, word_len, "experts");
    out->fused = !granite ? PEFT_OUTER : equals(word, word_len, "input_linear") ? PEFT_GATE_UP : PEFT_DOWN;
    *module_end = word + word_len;
    if (starts(at, "lora_") || granite) {
        out->kind = PEFT_FUSED;
        return parse_lora(at, out) ? NULL : "what follows is not lora_A.weight or lora_B.weight";
    }
    if (starts(at, "base_layer.")) {
        out->kind = PEFT_FUSED;
        out->fused = PEFT_INNER;
        return parse_lora(at + strlen("base_layer."), out) ? NULL : "what follows base_layer is not lora_A.weight or lora_B.weight";
    }
    const char *expert;
    size_t len;
    if (!next(&at, &expert, &len))
        return "it ends after \"experts\"";
    return parse_linear(expert, len, at, module_end, out);
}

void peft_name_parse(const char *tensor, struct peft_name *out)
{
    *out = (struct peft_name){.kind = PEFT_OTHER, .expert = -1};
    const char *name = starts(tensor, "base_model.model.") ? tensor + strlen("base_model.model.") : tensor;
    const char *word, *rest;
    size_t word_len;
    const char *at = find_experts(name, &word, &word_len);
    if (!at)
        return;
    const char *inner = starts(name, "model.") ? name + strlen("model.") : name;
    if (starts(inner, "mtp.") || starts(inner, "visual.")) {
        out->foreign = true;
        return;
    }
    const char *module_end = NULL;
    if (strlen(tensor) > PEFT_MAX_NAME)
        out->why = "it is too long";
    else if (!model_parse_layer_name(name, &out->layer, &rest))
        out->why = "what comes before the layer's number is not a known prefix";
    else
        out->why = parse_routed(word, word_len, at, &module_end, out);
    if (out->why) {
        out->kind = PEFT_UNKNOWN;
        return;
    }
    memcpy(out->module, name, (size_t)(module_end - name));
    out->module[module_end - name] = 0;
}

struct peft_text peft_quote(const char *text, size_t len)
{
    struct peft_text out;
    size_t room = sizeof out.s - 4, n = len < room ? len : room;
    while (n < len && n && ((unsigned char)text[n] & 0xc0) == 0x80)
        n--;
    memcpy(out.s, text, n);
    memcpy(out.s + n, n < len ? "..." : "", n < len ? 4 : 1);
    return out;
}
