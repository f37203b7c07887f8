/* SPDX-License-Identifier: Apache-2.0
 *
 * config.json: families name the same thing differently, and multimodal ones nest the language model's part.
 */
#include "engine/config.h"
#include "engine/path.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_CONFIG ((size_t)16 << 20)

/* Blanks out Python's non-finite literals in place, so that one in a key we don't look at does no harm. */
static void replace_non_finite(char *text, size_t length)
{
    static const char *const word[] = {"-Infinity", "Infinity", "NaN"};
    bool string = false;
    for (size_t i = 0; i < length; i++) {
        if (text[i] == '"')
            string = !string;
        else if (string && text[i] == '\\')
            i++;
        for (size_t w = 0; !string && w < sizeof word / sizeof word[0]; w++) {
            size_t n = strlen(word[w]);
            if (length - i < n || memcmp(text + i, word[w], n))
                continue;
            memset(text + i, ' ', n);
            if (n >= 4)
                memcpy(text + i, "null", 4);
            else
                text[i] = '0';
        }
    }
}

static enum engine_code read_text(int fd, const char *name, size_t limit, enum engine_code bad, char **out, size_t *length,
                                  struct engine_error *error)
{
    struct stat st;
    if (fstat(fd, &st))
        return engine_fail(error, engine_errno_code(errno), "%s: %s", name, strerror(errno));
    if (!S_ISREG(st.st_mode))
        return engine_fail(error, bad, "%s is not a regular file", name);
    if ((uint64_t)st.st_size > limit)
        return engine_fail(error, bad, "%s: %lld bytes are over the limit of %zu", name, (long long)st.st_size, limit);
    size_t size = (size_t)st.st_size, at = 0;
    char *text = malloc(size + 1);
    if (!text)
        return engine_fail(error, ENGINE_OUT_OF_MEMORY, "%s: out of memory for %zu bytes", name, size);
    while (at < size) {
        ssize_t n = pread(fd, text + at, size - at, (off_t)at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            enum engine_code code = n ? engine_fail(error, ENGINE_IO, "%s: %s", name, strerror(errno))
                                      : engine_fail(error, bad, "%s: the file shrank while it was being read", name);
            free(text);
            return code;
        }
        at += (size_t)n;
    }
    *out = text;
    *length = size;
    return ENGINE_OK;
}

enum engine_code config_load_json(int dir_fd, const char *folder, const char *name, size_t limit, enum engine_code bad, json_t **out,
                                  struct engine_error *error)
{
    const struct path_text path = path_show(folder, name);
    int fd = openat(dir_fd, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return engine_fail(error, engine_errno_code(errno), "%s: %s", path.s, strerror(errno));
    char *text = NULL;
    size_t length = 0;
    enum engine_code code = read_text(fd, path.s, limit, bad, &text, &length, error);
    close(fd);
    if (code)
        return code;
    replace_non_finite(text, length);
    json_error_t e;
    json_t *json = json_loadb(text, length, JSON_REJECT_DUPLICATES, &e);
    free(text);
    if (!json && (!e.text[0] || json_error_code(&e) == json_error_out_of_memory)) /* no text: it could not even begin */
        return engine_fail(error, ENGINE_OUT_OF_MEMORY, "%s: out of memory while parsing", path.s);
    if (!json)
        return engine_fail(error, bad, "%s: line %d: %s", path.s, e.line, e.text);
    if (!json_is_object(json)) {
        json_decref(json);
        return engine_fail(error, bad, "%s is not a JSON object", path.s);
    }
    *out = json;
    return ENGINE_OK;
}

/* The language model's own part, or the whole. */
static const json_t *nested_part(const json_t *whole)
{
    static const char *const key[] = {"text_config", "language_config", "llm_config"};
    for (size_t i = 0; i < sizeof key / sizeof key[0]; i++) {
        const json_t *part = json_object_get(whole, key[i]);
        if (json_is_object(part))
            return part;
    }
    return whole;
}

static const json_t *lookup(const json_t *part, const json_t *whole, const char *key)
{
    const json_t *v = json_object_get(part, key);
    return v && !json_is_null(v) ? v : json_object_get(whole, key);
}

/* The first of the keys that holds an integer (some families hold lists under the same key). */
static struct config_value find_integer(const json_t *part, const json_t *whole, const char *const *keys)
{
    for (; *keys; keys++) {
        const json_t *v = lookup(part, whole, *keys);
        if (json_is_integer(v))
            return (struct config_value){*keys, json_integer_value(v)};
    }
    return (struct config_value){0};
}

static enum engine_code copy_string(const char *path, const json_t *v, const char *key, char *dst, size_t size, struct engine_error *error)
{
    dst[0] = 0;
    if (!v || json_is_null(v))
        return ENGINE_OK;
    if (!json_is_string(v) || json_string_length(v) >= size)
        return engine_fail(error, ENGINE_BAD_CHECKPOINT, "%s: %s must be a string of less than %zu bytes", path, key, size);
    strcpy(dst, json_string_value(v));
    return ENGINE_OK;
}

enum engine_code config_read(int dir_fd, const char *folder, struct model_config *out, struct engine_error *error)
{
    static const char *const experts[] = {"num_experts",     "num_local_experts",  "n_routed_experts",
                                          "moe_num_experts", "num_routed_experts", NULL};
    static const char *const top_k[] = {"num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk",
                                        "moe_top_k",           "top_k_experts",         NULL};
    static const char *const moe_inter[] = {"moe_intermediate_size", NULL};
    static const char *const inter[] = {"intermediate_size", NULL};
    static const char *const hidden[] = {"hidden_size", NULL};
    static const char *const layers[] = {"num_hidden_layers", NULL};

    const struct path_text path = path_show(folder, CONFIG_FILE);
    json_t *whole;
    enum engine_code code = config_load_json(dir_fd, folder, CONFIG_FILE, MAX_CONFIG, ENGINE_BAD_CHECKPOINT, &whole, error);
    if (code)
        return code;
    const json_t *part = nested_part(whole);
    struct model_config c = {0};
    c.experts = find_integer(part, whole, experts);
    c.top_k = find_integer(part, whole, top_k);
    c.moe_inter = find_integer(part, whole, moe_inter);
    c.inter = find_integer(part, whole, inter);
    c.hidden = find_integer(part, whole, hidden);
    c.layers = find_integer(part, whole, layers);

    const json_t *limit = lookup(part, whole, "swiglu_limit");
    c.has_swiglu_limit = json_is_number(limit);
    c.swiglu_limit = c.has_swiglu_limit ? json_number_value(limit) : 0;

    code = copy_string(path.s, json_object_get(whole, "model_type"), "model_type", c.model_type, sizeof c.model_type, error);
    if (!code && part != whole)
        code = copy_string(path.s, json_object_get(part, "model_type"), "model_type", c.text_type, sizeof c.text_type, error);
    const json_t *act = lookup(part, whole, "hidden_act");
    if (!act || json_is_null(act))
        act = lookup(part, whole, "hidden_activation");
    if (!code)
        code = copy_string(path.s, act, "hidden_act", c.activation, sizeof c.activation, error);
    const json_t *quant = lookup(part, whole, "quantization_config");
    if (!code && json_is_object(quant)) {
        code = copy_string(path.s, json_object_get(quant, "quant_method"), "quant_method", c.quantization, sizeof c.quantization, error);
        if (!code && !c.quantization[0])
            strcpy(c.quantization, "unnamed");
    }
    json_decref(whole);
    if (!code)
        *out = c;
    return code;
}
