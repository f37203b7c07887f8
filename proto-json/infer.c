/* SPDX-License-Identifier: Apache-2.0
 *
 * The infer request: members and their types, then each tensor from its array or from the bytes behind the JSON.
 */
#include "proto-json/internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>

struct parse {
    struct proto_infer *out;
    struct proto_error *error;
    struct proto_span span[PROTO_MAX_INPUTS];
    int32_t spans;
    const char *binary; /* what follows the JSON, */
    size_t left; /* of it not yet taken, */
    size_t taken; /* and taken */
    size_t binary_total;
    bool has_header;
};

static const char *json_kind(const json_t *value)
{
    switch (json_typeof(value)) {
    case JSON_OBJECT: return "an object";
    case JSON_ARRAY: return "an array";
    case JSON_STRING: return "a string";
    case JSON_INTEGER: return "an integer";
    case JSON_REAL: return "a real number";
    case JSON_TRUE:
    case JSON_FALSE: return "a boolean";
    case JSON_NULL: break;
    }
    return "null";
}

static enum proto_code parse_fail_kind(struct parse *p, const char *what, const char *wanted, const json_t *value)
{
    return proto_fail(p->error, PROTO_BAD_REQUEST, "%s must be %s, not %s", what, wanted, json_kind(value));
}

/* "inputs[2] 'hidden'": how sentences call an input, with its name once that is known. */
struct what_text {
    char text[128];
};
static const char *parse_what(struct what_text *out, size_t index, const char *name)
{
    struct proto_excerpt excerpt;
    if (name)
        snprintf(out->text, sizeof out->text, "inputs[%zu] '%s'", index, proto_excerpt(&excerpt, name, strlen(name)));
    else
        snprintf(out->text, sizeof out->text, "inputs[%zu]", index);
    return out->text;
}

static enum proto_code parse_string(struct parse *p, const char *what, const json_t *value, char **out)
{
    if (!json_is_string(value))
        return parse_fail_kind(p, what, "a string", value);
    *out = strdup(json_string_value(value));
    return *out ? PROTO_OK : proto_fail_memory(p->error);
}

/* Keys that nobody knows are ignored, but one that means an adapter would get the base's numbers for an answer. */
static enum proto_code parse_strays(struct parse *p, json_t *object, const char *where, const char *known)
{
    static const char *const beginning[] = {"adapter", "adaptor", "lora"};
    struct proto_excerpt excerpt;
    const char *key;
    json_t *value;
    json_object_foreach(object, key, value)
    {
        if (known && !strcmp(key, known))
            continue;
        for (size_t i = 0; i < sizeof beginning / sizeof beginning[0]; i++)
            if (!strncasecmp(key, beginning[i], strlen(beginning[i])))
                return proto_fail(p->error, PROTO_BAD_REQUEST,
                                  "%s%s is not known; adapters are named by parameters.adapter, one name for all rows, or by the input "
                                  "'adapter' (names) or 'adapter_id' (ids), a tensor of shape [T]",
                                  where, proto_excerpt(&excerpt, key, strlen(key)));
    }
    return PROTO_OK;
}

static enum proto_code parse_parameters(struct parse *p, json_t *root)
{
    struct proto_infer *out = p->out;
    json_t *parameters = json_object_get(root, "parameters"), *value;
    if (!parameters)
        return PROTO_OK;
    if (!json_is_object(parameters))
        return parse_fail_kind(p, "parameters", "an object", parameters);
    enum proto_code code = parse_strays(p, parameters, "parameters.", "adapter");
    if (code)
        return code;
    if ((value = json_object_get(parameters, "layer"))) {
        if (!json_is_integer(value))
            return parse_fail_kind(p, "parameters.layer", "an integer", value);
        out->layer = json_integer_value(value);
        out->has_layer = true;
        if (out->layer < 0 || out->layer > INT32_MAX)
            return proto_fail(p->error, PROTO_BAD_REQUEST, "parameters.layer is %" PRId64 ", outside 0 to %d", out->layer, INT32_MAX);
    }
    if ((value = json_object_get(parameters, "mode"))) {
        static const char *const modes[] = {[PROTO_AUTO] = "auto", [PROTO_DECODE] = "decode", [PROTO_PREFILL] = "prefill"};
        struct proto_excerpt excerpt;
        if (!json_is_string(value))
            return parse_fail_kind(p, "parameters.mode", "a string", value);
        size_t mode = 0;
        while (mode < 3 && strcmp(json_string_value(value), modes[mode]))
            mode++;
        if (mode == 3)
            return proto_fail(p->error, PROTO_BAD_REQUEST, "parameters.mode is '%s'; it may be 'auto', 'decode' or 'prefill'",
                              proto_excerpt(&excerpt, json_string_value(value), json_string_length(value)));
        out->mode = (enum proto_mode)mode;
    }
    if ((value = json_object_get(parameters, "binary_data_output"))) {
        if (!json_is_boolean(value))
            return parse_fail_kind(p, "parameters.binary_data_output", "a boolean", value);
        out->binary_output = json_is_true(value);
    }
    if ((value = json_object_get(parameters, "adapter")))
        return parse_string(p, "parameters.adapter", value, &out->adapter);
    return PROTO_OK;
}

static enum proto_code parse_output(struct parse *p, size_t index, const json_t *output)
{
    char what[64];
    snprintf(what, sizeof what, "outputs[%zu]", index);
    if (!json_is_object(output))
        return parse_fail_kind(p, what, "an object", output);
    const json_t *name = json_object_get(output, "name"), *parameters = json_object_get(output, "parameters"), *value;
    if (!name)
        return proto_fail(p->error, PROTO_BAD_REQUEST, "%s has no name", what);
    snprintf(what, sizeof what, "outputs[%zu].name", index);
    if (!json_is_string(name))
        return parse_fail_kind(p, what, "a string", name);
    if (strcmp(json_string_value(name), "hidden")) {
        struct proto_excerpt excerpt;
        return proto_fail(p->error, PROTO_BAD_REQUEST, "outputs[%zu]: there is no output '%s'; the only one is 'hidden'", index,
                          proto_excerpt(&excerpt, json_string_value(name), json_string_length(name)));
    }
    if (index)
        return proto_fail(p->error, PROTO_BAD_REQUEST, "outputs[%zu]: 'hidden' is asked for twice", index);
    if (!parameters)
        return PROTO_OK;
    snprintf(what, sizeof what, "outputs[%zu].parameters", index);
    if (!json_is_object(parameters))
        return parse_fail_kind(p, what, "an object", parameters);
    if ((value = json_object_get(parameters, "classification")) && !(json_is_integer(value) && !json_integer_value(value)))
        return proto_fail(p->error, PROTO_BAD_REQUEST, "%s.classification: classes are not computed here", what);
    if (json_object_get(parameters, "shared_memory_region"))
        return proto_fail(p->error, PROTO_BAD_REQUEST, "%s.shared_memory_region: shared memory is not supported", what);
    if ((value = json_object_get(parameters, "binary_data"))) {
        snprintf(what, sizeof what, "outputs[%zu].parameters.binary_data", index);
        if (!json_is_boolean(value))
            return parse_fail_kind(p, what, "a boolean", value);
        p->out->binary_output = json_is_true(value);
    }
    return PROTO_OK;
}

static enum proto_code parse_outputs(struct parse *p, const json_t *root)
{
    const json_t *outputs = json_object_get(root, "outputs");
    if (!outputs)
        return PROTO_OK;
    if (!json_is_array(outputs))
        return parse_fail_kind(p, "outputs", "an array", outputs);
    for (size_t i = 0; i < json_array_size(outputs); i++) {
        enum proto_code code = parse_output(p, i, json_array_get(outputs, i));
        if (code)
            return code;
    }
    return PROTO_OK;
}

static enum proto_code parse_name(struct parse *p, size_t index, const json_t *input, struct proto_tensor *tensor)
{
    char what[64];
    const json_t *name = json_object_get(input, "name");
    if (!name)
        return proto_fail(p->error, PROTO_BAD_REQUEST, "inputs[%zu] has no name", index);
    snprintf(what, sizeof what, "inputs[%zu].name", index);
    if (!json_is_string(name))
        return parse_fail_kind(p, what, "a string", name);
    size_t length = json_string_length(name);
    if (!length || length > PROTO_MAX_NAME)
        return proto_fail(p->error, PROTO_BAD_REQUEST, "%s has %zu bytes; a name has 1 to %d", what, length, PROTO_MAX_NAME);
    memcpy(tensor->name, json_string_value(name), length + 1);
    if (proto_infer_find(p->out, tensor->name)) {
        struct what_text text;
        return proto_fail(p->error, PROTO_BAD_REQUEST, "%s appears twice", parse_what(&text, index, tensor->name));
    }
    return PROTO_OK;
}

static enum proto_code parse_datatype(struct parse *p, const char *what, const json_t *input, struct proto_tensor *tensor)
{
    char member[160];
    struct proto_excerpt excerpt;
    const json_t *datatype = json_object_get(input, "datatype");
    if (!datatype)
        return proto_fail(p->error, PROTO_BAD_REQUEST, "%s has no datatype", what);
    snprintf(member, sizeof member, "%s: datatype", what);
    if (!json_is_string(datatype))
        return parse_fail_kind(p, member, "a string", datatype);
    if (!dtype_parse(json_string_value(datatype), json_string_length(datatype), &tensor->dtype))
        return proto_fail(p->error, PROTO_UNSUPPORTED_DATATYPE,
                          "%s: datatype '%s' is not supported; BF16, FP16, FP32, INT32, INT64 and BYTES are", what,
                          proto_excerpt(&excerpt, json_string_value(datatype), json_string_length(datatype)));
    return PROTO_OK;
}

static enum proto_code parse_shape(struct parse *p, const char *what, const json_t *input, struct proto_tensor *tensor)
{
    char member[160];
    const json_t *shape = json_object_get(input, "shape");
    if (!shape)
        return proto_fail(p->error, PROTO_BAD_REQUEST, "%s has no shape", what);
    snprintf(member, sizeof member, "%s: shape", what);
    if (!json_is_array(shape))
        return parse_fail_kind(p, member, "an array", shape);
    size_t rank = json_array_size(shape);
    if (!rank || rank > PROTO_MAX_RANK)
        return proto_fail(p->error, PROTO_BAD_TENSOR, "%s has %zu dimensions; 1 to %d are taken", member, rank, PROTO_MAX_RANK);
    /* A string takes at least its 4-byte length. */
    size_t size = dtype_size(tensor->dtype) ? dtype_size(tensor->dtype) : 4, elements = 1, bytes = 0;
    bool overflow = false;
    for (size_t i = 0; i < rank; i++) {
        const json_t *dimension = json_array_get(shape, i);
        snprintf(member, sizeof member, "%s: shape[%zu]", what, i);
        if (!json_is_integer(dimension))
            return parse_fail_kind(p, member, "an integer", dimension);
        int64_t value = json_integer_value(dimension);
        if (value < 0)
            return proto_fail(p->error, PROTO_BAD_TENSOR, "%s is %" PRId64 "; it must not be negative", member, value);
        tensor->shape[i] = value;
        tensor->rank = (int32_t)i + 1;
        overflow = __builtin_mul_overflow(elements, (size_t)value, &elements) || overflow;
    }
    /* A 0 does not heal a product that overflowed before it: whoever multiplies in another order must be safe as well. */
    if (overflow || __builtin_mul_overflow(elements, size, &bytes) || bytes > PTRDIFF_MAX) {
        struct proto_shape_text text;
        return proto_fail(p->error, PROTO_BAD_TENSOR, "%s: shape %s has more elements than can be counted", what,
                          proto_shape_text(&text, tensor));
    }
    tensor->elements = elements;
    return PROTO_OK;
}

static enum proto_code parse_binary(struct parse *p, const char *what, const json_t *size, struct proto_tensor *tensor)
{
    char member[192];
    snprintf(member, sizeof member, "%s: parameters.binary_data_size", what);
    if (!json_is_integer(size))
        return parse_fail_kind(p, member, "an integer", size);
    int64_t value = json_integer_value(size);
    if (value < 0)
        return proto_fail(p->error, PROTO_BAD_REQUEST, "%s is %" PRId64 "; it must not be negative", member, value);
    if (!p->has_header)
        return proto_fail(p->error, PROTO_BAD_REQUEST, "%s is %" PRId64 ", but the header Inference-Header-Content-Length is missing",
                          member, value);
    if ((uint64_t)value > p->left)
        return proto_fail(p->error, PROTO_BAD_REQUEST, "%s is %" PRId64 ", but of the %zu bytes that follow the JSON %zu are left", member,
                          value, p->binary_total, p->left);
    const char *bytes = p->binary + p->taken;
    p->taken += (size_t)value;
    p->left -= (size_t)value;
    return proto_tensor_view(tensor, what, bytes, (size_t)value, p->error);
}

static enum proto_code parse_input(struct parse *p, size_t index, const json_t *input)
{
    struct what_text what;
    struct proto_tensor *tensor = &p->out->input[index];
    if (!json_is_object(input))
        return parse_fail_kind(p, parse_what(&what, index, NULL), "an object", input);
    enum proto_code code = parse_name(p, index, input, tensor);
    p->out->inputs++;
    if (code)
        return code;
    parse_what(&what, index, tensor->name);
    if ((code = parse_datatype(p, what.text, input, tensor)) || (code = parse_shape(p, what.text, input, tensor)))
        return code;
    if (p->out->caller.look && (code = p->out->caller.look(p->out->caller.context, tensor, p->error)))
        return code;
    const json_t *data = json_object_get(input, "data"), *parameters = json_object_get(input, "parameters"), *binary = NULL;
    if (parameters) {
        char member[160];
        snprintf(member, sizeof member, "%s: parameters", what.text);
        if (!json_is_object(parameters))
            return parse_fail_kind(p, member, "an object", parameters);
        if (json_object_get(parameters, "shared_memory_region"))
            return proto_fail(p->error, PROTO_BAD_REQUEST, "%s.shared_memory_region: shared memory is not supported", member);
        binary = json_object_get(parameters, "binary_data_size");
    }
    if (data && binary)
        return proto_fail(p->error, PROTO_BAD_REQUEST, "%s has both data and parameters.binary_data_size", what.text);
    if (binary)
        return parse_binary(p, what.text, binary, tensor);
    if (!data)
        return proto_fail(p->error, PROTO_BAD_REQUEST, "%s has neither data nor parameters.binary_data_size", what.text);
    return proto_tensor_scan(tensor, what.text, &p->span[json_integer_value(data)], &p->out->caller, p->error);
}

static enum proto_code parse_inputs(struct parse *p, const json_t *root)
{
    const json_t *inputs = json_object_get(root, "inputs");
    if (!inputs)
        return proto_fail(p->error, PROTO_BAD_REQUEST, "the request has no inputs");
    if (!json_is_array(inputs))
        return parse_fail_kind(p, "inputs", "an array", inputs);
    size_t count = json_array_size(inputs);
    if (!count || count > PROTO_MAX_INPUTS)
        return proto_fail(p->error, PROTO_BAD_REQUEST, "there are %zu inputs; 1 to %d are taken", count, PROTO_MAX_INPUTS);
    for (size_t i = 0; i < count; i++) {
        enum proto_code code = parse_input(p, i, json_array_get(inputs, i));
        if (code)
            return code;
    }
    if (p->left)
        return proto_fail(p->error, PROTO_BAD_REQUEST, "the inputs' binary_data_size add up to %zu, but %zu bytes follow the JSON",
                          p->taken, p->binary_total);
    return PROTO_OK;
}

static enum proto_code parse_root(struct parse *p, json_t *root)
{
    if (!json_is_object(root))
        return parse_fail_kind(p, "the request", "an object", root);
    const json_t *id = json_object_get(root, "id");
    enum proto_code code = id ? parse_string(p, "id", id, &p->out->id) : PROTO_OK;
    if (code || (code = parse_strays(p, root, "the request's member ", NULL)) || (code = parse_parameters(p, root)) ||
        (code = parse_outputs(p, root)))
        return code;
    return parse_inputs(p, root);
}

enum proto_code proto_infer_parse(const void *body, size_t length, int64_t json_length, const struct proto_caller *caller,
                                  struct proto_infer *out, struct proto_error *error)
{
    memset(out, 0, sizeof *out);
    if (caller)
        out->caller = *caller;
    if (json_length < -1 || (json_length >= 0 && (uint64_t)json_length > length))
        return proto_fail(error, PROTO_BAD_REQUEST, "Inference-Header-Content-Length is %" PRId64 ", but the body has %zu bytes",
                          json_length, length);
    if (json_length > 0) {
        if (proto_plain_parse(body, length, (size_t)json_length, out))
            return PROTO_OK;
        proto_infer_finish(out);
        if (caller)
            out->caller = *caller;
    }
    struct parse p = {.out = out, .error = error, .has_header = json_length >= 0};
    size_t head = p.has_header ? (size_t)json_length : length;
    p.left = p.binary_total = length - head;
    p.binary = length ? (const char *)body + head : NULL;
    const char *behind =
        p.has_header ? NULL : "; before tensors' bytes, the header Inference-Header-Content-Length says how long the JSON is";
    json_t *root;
    enum proto_code code = proto_tree_parse(body, head, behind, p.span, &p.spans, &root, error);
    if (!code)
        code = parse_root(&p, root);
    json_decref(root);
    if (code)
        proto_infer_finish(out);
    return code;
}

void proto_infer_finish(struct proto_infer *infer)
{
    for (int32_t i = 0; i < infer->inputs; i++) {
        const struct proto_tensor *tensor = &infer->input[i];
        void *data = (void *)(uintptr_t)tensor->data;
        if (tensor->owned && tensor->dtype != DTYPE_BYTES && infer->caller.give)
            infer->caller.give(infer->caller.context, data);
        else if (tensor->owned)
            free(data);
    }
    free(infer->id);
    free(infer->adapter);
    memset(infer, 0, sizeof *infer);
}

const struct proto_tensor *proto_infer_find(const struct proto_infer *infer, const char *name)
{
    for (int32_t i = 0; i < infer->inputs; i++)
        if (!strcmp(infer->input[i].name, name))
            return &infer->input[i];
    return NULL;
}
