/* SPDX-License-Identifier: Apache-2.0
 *
 * Small bodies: adapter calls, ours and vLLM's, descriptions and errors.
 */
#include "proto-json/internal.h"

#include <stdlib.h>
#include <time.h>

enum proto_code proto_object_parse(const void *body, size_t length, bool empty_ok, json_t **out, struct proto_error *error)
{
    *out = NULL;
    if (!length && empty_ok) {
        *out = json_object();
        return *out ? PROTO_OK : proto_fail_memory(error);
    }
    enum proto_code code = proto_tree_parse(body, length, NULL, NULL, NULL, out, error);
    if (!code && !json_is_object(*out)) {
        json_decref(*out);
        *out = NULL;
        code = proto_fail(error, PROTO_BAD_REQUEST, "the body must be a JSON object");
    }
    return code;
}

static enum proto_code member_string(const json_t *object, const char *name, char **out, struct proto_error *error)
{
    const json_t *value = json_object_get(object, name);
    if (!value)
        return proto_fail(error, PROTO_BAD_REQUEST, "'%s' is missing", name);
    if (!json_is_string(value) || !json_string_length(value))
        return proto_fail(error, PROTO_BAD_REQUEST, "'%s' must be a string that is not empty", name);
    *out = strdup(json_string_value(value));
    return *out ? PROTO_OK : proto_fail_memory(error);
}

static enum proto_code member_boolean(const json_t *object, const char *name, bool *out, struct proto_error *error)
{
    const json_t *value = json_object_get(object, name);
    if (value && !json_is_boolean(value))
        return proto_fail(error, PROTO_BAD_REQUEST, "'%s' must be true or false", name);
    *out = value && json_is_true(value);
    return PROTO_OK;
}

static enum proto_code install_known(json_t *object, struct proto_error *error)
{
    struct proto_excerpt excerpt;
    const char *key;
    json_t *value;
    json_object_foreach(object, key, value)
    {
        if (strcmp(key, "name") != 0 && strcmp(key, "path") != 0 && strcmp(key, "replace") != 0)
            return proto_fail(error, PROTO_BAD_REQUEST, "unknown field '%s'; name, path and replace are taken",
                              proto_excerpt(&excerpt, key, strlen(key)));
    }
    return PROTO_OK;
}

enum proto_code proto_install_parse(const void *body, size_t length, struct proto_install *out, struct proto_error *error)
{
    json_t *object;
    memset(out, 0, sizeof *out);
    enum proto_code code = proto_object_parse(body, length, false, &object, error);
    if (!code && !(code = install_known(object, error)) && !(code = member_string(object, "name", &out->name, error)) &&
        !(code = member_string(object, "path", &out->path, error)))
        code = member_boolean(object, "replace", &out->replace, error);
    json_decref(object);
    if (code)
        proto_install_finish(out);
    return code;
}

void proto_install_finish(struct proto_install *install)
{
    free(install->name);
    free(install->path);
    memset(install, 0, sizeof *install);
}

enum proto_code proto_vllm_lora_parse(const void *body, size_t length, bool load, struct proto_vllm_lora *out, struct proto_error *error)
{
    json_t *object;
    memset(out, 0, sizeof *out);
    enum proto_code code = proto_object_parse(body, length, false, &object, error);
    if (!code)
        code = member_string(object, "lora_name", &out->lora_name, error);
    if (!code && load && !(code = member_string(object, "lora_path", &out->lora_path, error)))
        code = member_boolean(object, "load_inplace", &out->load_inplace, error);
    json_decref(object);
    if (code)
        proto_vllm_lora_finish(out);
    return code;
}

void proto_vllm_lora_finish(struct proto_vllm_lora *lora)
{
    free(lora->lora_name);
    free(lora->lora_path);
    memset(lora, 0, sizeof *lora);
}

/* ---- writing ---- */

/* Takes the reference; false: no memory, also when `value` is NULL. */
static bool list_append(json_t *list, json_t *value) { return json_array_append_new(list, value) == 0; }
static bool member_set(json_t *object, const char *name, json_t *value) { return json_object_set_new(object, name, value) == 0; }

/* A string of bytes that may not be UTF-8: warnings quote what stands in files. */
static json_t *json_lenient_string(const char *bytes)
{
    json_t *plain = json_string(bytes);
    if (plain)
        return plain;
    struct proto_text text = {0};
    size_t length = strlen(bytes), i = 0;
    while (i < length) {
        size_t n = proto_utf8_length(bytes + i, length - i);
        proto_text_append(&text, n ? bytes + i : "\xef\xbf\xbd", n ? n : 3);
        i += n ? n : 1;
    }
    char *clean = proto_text_finish(&text, &length);
    json_t *value = clean ? json_stringn(clean, length) : NULL;
    free(clean);
    return value;
}

static json_t *json_time(int64_t seconds)
{
    struct tm tm;
    char text[40];
    time_t at = (time_t)seconds;
    if (!gmtime_r(&at, &tm) || !strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &tm))
        return json_null();
    return json_string(text);
}

static bool adapter_set_lists(json_t *object, const struct proto_adapter *a)
{
    json_t *layers = json_array(), *projections = json_array(), *warnings = json_array();
    bool ok = layers && projections && warnings;
    for (size_t i = 0; ok && i < a->layer_count; i++)
        ok = list_append(layers, json_integer(a->layers[i]));
    ok = ok && (!a->gate || list_append(projections, json_string("gate")));
    ok = ok && (!a->up || list_append(projections, json_string("up")));
    ok = ok && (!a->down || list_append(projections, json_string("down")));
    for (size_t i = 0; ok && i < a->warning_count; i++)
        ok = list_append(warnings, json_lenient_string(a->warnings[i]));
    ok = ok && json_object_set(object, "layers", layers) == 0;
    ok = ok && json_object_set(object, "projections", projections) == 0;
    ok = ok && json_object_set(object, "warnings", warnings) == 0;
    json_decref(layers);
    json_decref(projections);
    json_decref(warnings);
    return ok;
}

json_t *proto_adapter_json(const struct proto_adapter *a)
{
    json_t *object = json_object();
    if (!object)
        return NULL;
    bool ok = member_set(object, "name", json_lenient_string(a->name)) && member_set(object, "id", json_integer(a->id)) &&
              member_set(object, "state", json_string(a->state)) && member_set(object, "rank", json_integer(a->rank)) &&
              adapter_set_lists(object, a) && member_set(object, "experts", json_integer(a->experts)) &&
              member_set(object, "tensors", json_integer(a->tensors)) && member_set(object, "ignored", json_integer(a->ignored)) &&
              member_set(object, "bytes", json_integer(a->bytes)) && member_set(object, "in_flight", json_integer(a->in_flight)) &&
              member_set(object, "rows_served", json_integer(a->rows_served)) &&
              member_set(object, "installed_at", json_time(a->installed_at));
    if (ok)
        return object;
    json_decref(object);
    return NULL;
}

char *proto_error_json(const char *message, const char *code, const char *request_id, size_t *length)
{
    struct proto_text text = {0};
    proto_text_append(&text, "{\"error\":", 9);
    proto_text_string(&text, message, strlen(message));
    proto_text_append(&text, ",\"code\":", 8);
    proto_text_string(&text, code, strlen(code));
    if (request_id) {
        proto_text_append(&text, ",\"request_id\":", 14);
        proto_text_string(&text, request_id, strlen(request_id));
    }
    proto_text_append(&text, "}", 1);
    return proto_text_finish(&text, length);
}

char *proto_vllm_error_json(const char *message, const char *type, int status, size_t *length)
{
    struct proto_text text = {0};
    proto_text_append(&text, "{\"error\":{\"message\":", 20);
    proto_text_string(&text, message, strlen(message));
    proto_text_append(&text, ",\"type\":", 8);
    proto_text_string(&text, type, strlen(type));
    proto_text_format(&text, ",\"param\":null,\"code\":%d}}", status);
    return proto_text_finish(&text, length);
}

static int control_append(const char *bytes, size_t length, void *text)
{
    proto_text_append(text, bytes, length);
    return ((struct proto_text *)text)->failed ? -1 : 0;
}

/* Not json_dumps, whose text only jansson's own allocator can free. */
char *proto_dump(json_t *tree, size_t *length)
{
    struct proto_text text = {0};
    if (!tree || json_dump_callback(tree, control_append, &text, JSON_COMPACT))
        text.failed = true;
    json_decref(tree);
    return proto_text_finish(&text, length);
}
