/* SPDX-License-Identifier: Apache-2.0
 *
 * The infer request as clients write it, read in one pass without a tree: known members only, each once; strings of printable ASCII
 * without escapes; integers without a sign; every tensor binary. Whatever else a request may be, and whatever may be wrong with it, is
 * left to infer.c, so that verdicts and their sentences have one source. What is taken here infer.c would take with the same result.
 */
#include "proto-json/internal.h"

#include <stdlib.h>
#include <string.h>

#define PLAIN_LONGEST ((size_t)16 << 10) /* bytes of JSON; a longer one is not the common form */
#define PLAIN_DIGITS 18

struct plain_string {
    const char *text;
    size_t length;
};

struct plain {
    const char *p, *end;
    struct plain_string id, adapter; /* text NULL: absent */
    const char *binary; /* what follows the JSON and is not taken yet, */
    size_t left; /* and how much of it there is */
    unsigned root, parameters; /* members seen */
    bool output_given, output_binary; /* of outputs[0], which has the last word */
};

enum { TENSOR_NAME = 1, TENSOR_DATATYPE = 2, TENSOR_SHAPE = 4, TENSOR_PARAMETERS = 8, TENSOR_SIZE = 16, TENSOR_ALL = 31 };

struct plain_tensor {
    struct proto_tensor *tensor;
    unsigned seen;
    size_t size;
};

/* Reads what belongs to a member, or an element (name NULL). */
typedef bool plain_reader(struct plain *s, const struct plain_string *name, void *to);

static bool plain_is(const struct plain_string *s, const char *word)
{
    return s->length == strlen(word) && memcmp(s->text, word, s->length) == 0;
}

/* False when the bit was set already: the member stands there twice. */
static bool plain_once(unsigned *seen, unsigned bit)
{
    bool first = !(*seen & bit);
    *seen |= bit;
    return first;
}

/* Passes over space and then `c`. */
static bool plain_take(struct plain *s, char c)
{
    s->p = proto_skip_space(s->p, s->end);
    if (s->p == s->end || *s->p != c)
        return false;
    s->p++;
    return true;
}

static bool plain_string(struct plain *s, struct plain_string *out)
{
    if (!plain_take(s, '"'))
        return false;
    out->text = s->p;
    while (s->p < s->end && *s->p >= ' ' && *s->p <= '~' && *s->p != '"' && *s->p != '\\')
        s->p++;
    out->length = (size_t)(s->p - out->text);
    return s->p < s->end && *s->p++ == '"';
}

/* What follows the digits has to be a comma or bracket for whoever reads on, so fractions and exponents end there. */
static bool plain_integer(struct plain *s, int64_t *out)
{
    s->p = proto_skip_space(s->p, s->end);
    const char *start = s->p;
    int64_t value = 0;
    while (s->p < s->end && *s->p >= '0' && *s->p <= '9' && s->p - start < PLAIN_DIGITS)
        value = 10 * value + (*s->p++ - '0');
    *out = value;
    return s->p > start && (*start != '0' || s->p == start + 1);
}

static bool plain_boolean(struct plain *s, bool *out)
{
    s->p = proto_skip_space(s->p, s->end);
    *out = s->p < s->end && *s->p == 't';
    const char *word = *out ? "true" : "false";
    size_t length = strlen(word);
    if ((size_t)(s->end - s->p) < length || memcmp(s->p, word, length) != 0)
        return false;
    s->p += length;
    return true;
}

/* An object's members or an array's elements, at least one. */
static bool plain_each(struct plain *s, bool object, plain_reader *read, void *to)
{
    if (!plain_take(s, object ? '{' : '['))
        return false;
    do {
        struct plain_string name;
        if (object && (!plain_string(s, &name) || !plain_take(s, ':')))
            return false;
        if (!read(s, object ? &name : NULL, to))
            return false;
    } while (plain_take(s, ','));
    return plain_take(s, object ? '}' : ']');
}

static bool plain_parameter(struct plain *s, const struct plain_string *name, void *to)
{
    static const char *const modes[] = {[PROTO_AUTO] = "auto", [PROTO_DECODE] = "decode", [PROTO_PREFILL] = "prefill"};
    struct proto_infer *out = to;
    if (plain_is(name, "layer")) {
        out->has_layer = true;
        return plain_once(&s->parameters, 1) && plain_integer(s, &out->layer) && out->layer <= INT32_MAX;
    }
    if (plain_is(name, "mode")) {
        struct plain_string mode;
        if (!plain_once(&s->parameters, 2) || !plain_string(s, &mode))
            return false;
        for (int i = PROTO_AUTO; i <= PROTO_PREFILL; i++) {
            if (plain_is(&mode, modes[i])) {
                out->mode = (enum proto_mode)i;
                return true;
            }
        }
        return false;
    }
    if (plain_is(name, "binary_data_output"))
        return plain_once(&s->parameters, 4) && plain_boolean(s, &out->binary_output);
    return plain_is(name, "adapter") && plain_once(&s->parameters, 8) && plain_string(s, &s->adapter);
}

static bool plain_dimension(struct plain *s, const struct plain_string *name, void *to)
{
    struct proto_tensor *tensor = to;
    (void)name;
    int64_t value;
    if (tensor->rank == PROTO_MAX_RANK || !plain_integer(s, &value))
        return false;
    tensor->shape[tensor->rank++] = value;
    return !__builtin_mul_overflow(tensor->elements, (size_t)value, &tensor->elements);
}

static bool plain_size(struct plain *s, const struct plain_string *name, void *to)
{
    struct plain_tensor *t = to;
    int64_t size;
    if (!plain_is(name, "binary_data_size") || !plain_once(&t->seen, TENSOR_SIZE) || !plain_integer(s, &size))
        return false;
    t->size = (size_t)size;
    return true;
}

static bool plain_tensor_member(struct plain *s, const struct plain_string *name, void *to)
{
    struct plain_tensor *t = to;
    struct plain_string text;
    if (plain_is(name, "name")) {
        if (!plain_once(&t->seen, TENSOR_NAME) || !plain_string(s, &text) || !text.length || text.length > PROTO_MAX_NAME)
            return false;
        memcpy(t->tensor->name, text.text, text.length);
        t->tensor->name[text.length] = '\0';
        return true;
    }
    if (plain_is(name, "datatype"))
        return plain_once(&t->seen, TENSOR_DATATYPE) && plain_string(s, &text) && dtype_parse(text.text, text.length, &t->tensor->dtype);
    if (plain_is(name, "shape")) {
        t->tensor->elements = 1;
        return plain_once(&t->seen, TENSOR_SHAPE) && plain_each(s, false, plain_dimension, t->tensor);
    }
    return plain_is(name, "parameters") && plain_once(&t->seen, TENSOR_PARAMETERS) && plain_each(s, true, plain_size, t);
}

static bool plain_input(struct plain *s, const struct plain_string *name, void *to)
{
    struct proto_infer *out = to;
    (void)name;
    if (out->inputs == PROTO_MAX_INPUTS)
        return false;
    struct plain_tensor t = {.tensor = &out->input[out->inputs]};
    if (!plain_each(s, true, plain_tensor_member, &t) || t.seen != TENSOR_ALL || proto_infer_find(out, t.tensor->name))
        return false;
    size_t each = dtype_size(t.tensor->dtype), bytes;
    struct proto_error unused;
    if (__builtin_mul_overflow(t.tensor->elements, each ? each : 4, &bytes) || bytes > PTRDIFF_MAX || t.size > s->left ||
        (out->caller.look && out->caller.look(out->caller.context, t.tensor, &unused)) ||
        proto_tensor_view(t.tensor, "", s->binary, t.size, &unused) != PROTO_OK)
        return false;
    out->inputs++;
    s->binary += t.size;
    s->left -= t.size;
    return true;
}

static bool plain_output_parameter(struct plain *s, const struct plain_string *name, void *to)
{
    (void)to;
    bool first = !s->output_given;
    s->output_given = true;
    return first && plain_is(name, "binary_data") && plain_boolean(s, &s->output_binary);
}

static bool plain_output_member(struct plain *s, const struct plain_string *name, void *to)
{
    unsigned *seen = to;
    struct plain_string text;
    if (plain_is(name, "name"))
        return plain_once(seen, 1) && plain_string(s, &text) && plain_is(&text, "hidden");
    return plain_is(name, "parameters") && plain_once(seen, 2) && plain_each(s, true, plain_output_parameter, NULL);
}

static bool plain_output(struct plain *s, const struct plain_string *name, void *to)
{
    bool *first = to;
    unsigned seen = 0;
    (void)name;
    if (!*first || !plain_each(s, true, plain_output_member, &seen))
        return false;
    *first = false;
    return seen & 1;
}

static bool plain_root(struct plain *s, const struct plain_string *name, void *to)
{
    bool first = true;
    if (plain_is(name, "parameters"))
        return plain_once(&s->root, 1) && plain_each(s, true, plain_parameter, to);
    if (plain_is(name, "inputs"))
        return plain_once(&s->root, 2) && plain_each(s, false, plain_input, to);
    if (plain_is(name, "outputs"))
        return plain_once(&s->root, 4) && plain_each(s, false, plain_output, &first);
    return plain_is(name, "id") && plain_once(&s->root, 8) && plain_string(s, &s->id);
}

/* False: no memory. */
static bool plain_copy(const struct plain_string *s, char **out)
{
    if (!s->text)
        return true;
    *out = malloc(s->length + 1);
    if (!*out)
        return false;
    memcpy(*out, s->text, s->length);
    (*out)[s->length] = '\0';
    return true;
}

bool proto_plain_parse(const char *body, size_t length, size_t json_length, struct proto_infer *out)
{
    struct plain s = {.p = body, .end = body + json_length, .binary = body + json_length, .left = length - json_length};
    if (json_length > PLAIN_LONGEST || !plain_each(&s, true, plain_root, out) || proto_skip_space(s.p, s.end) != s.end || !out->inputs ||
        s.left)
        return false;
    if (s.output_given)
        out->binary_output = s.output_binary;
    return plain_copy(&s.id, &out->id) && plain_copy(&s.adapter, &out->adapter);
}
