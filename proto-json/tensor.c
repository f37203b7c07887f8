/* SPDX-License-Identifier: Apache-2.0
 *
 * A tensor's data: JSON arrays scanned into values, and binary data checked against the shape.
 */
#include "proto-json/internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

struct scan {
    struct proto_tensor *tensor;
    const char *what;
    const char *p, *end;
    int32_t levels; /* of lists: 1 when flat, the shape's rank when nested */
    size_t index[PROTO_MAX_RANK];
    char *out; /* of numbers: where the next one goes */
    struct proto_text bytes; /* of strings */
    struct proto_error *error;
};

const char *proto_shape_text(struct proto_shape_text *out, const struct proto_tensor *tensor)
{
    size_t used = 0;
    out->text[used++] = '[';
    for (int32_t i = 0; i < tensor->rank; i++)
        used += (size_t)snprintf(out->text + used, sizeof out->text - used, "%s%" PRId64, i ? "," : "", tensor->shape[i]);
    snprintf(out->text + used, sizeof out->text - used, "]");
    return out->text;
}

/* "data", "data[5]", "data[1][2]": the list or element that `levels` indices lead to. */
struct place_text {
    char text[8 + PROTO_MAX_RANK * 22];
};
static const char *scan_place(const struct scan *s, int32_t levels, struct place_text *out)
{
    size_t used = (size_t)snprintf(out->text, sizeof out->text, "data");
    for (int32_t i = 0; i < levels; i++)
        used += (size_t)snprintf(out->text + used, sizeof out->text - used, "[%zu]", s->index[i]);
    return out->text;
}

static enum proto_code scan_fail_count(const struct scan *s, int32_t level, size_t want)
{
    struct proto_shape_text shape;
    struct place_text place;
    scan_place(s, level, &place);
    proto_shape_text(&shape, s->tensor);
    if (s->index[level] == want)
        return proto_fail(s->error, PROTO_BAD_TENSOR, "%s: %s has more than the %zu entries that shape %s says", s->what, place.text, want,
                          shape.text);
    return proto_fail(s->error, PROTO_BAD_TENSOR, "%s: %s has %zu entries, but shape %s says %zu", s->what, place.text, s->index[level],
                      shape.text, want);
}

/* The bytes at `p` are not an element of the kind that the tensor takes; says what they are. */
static enum proto_code scan_fail_element(const struct scan *s)
{
    struct proto_shape_text shape;
    struct place_text place;
    struct proto_excerpt excerpt;
    scan_place(s, s->levels, &place);
    const char *name = dtype_name(s->tensor->dtype), *kind = s->tensor->dtype == DTYPE_BYTES ? "strings" : "numbers";
    if (*s->p == '[')
        return proto_fail(s->error, PROTO_BAD_TENSOR, "%s: %s is a list, but shape %s ends there", s->what, place.text,
                          proto_shape_text(&shape, s->tensor));
    if (*s->p == '"')
        return proto_fail(s->error, PROTO_BAD_TENSOR, "%s: %s is a string, but %s takes %s", s->what, place.text, name, kind);
    const char *q = s->p;
    while (q < s->end && !proto_is_space(*q) && *q != ',' && *q != ']' && *q != '[' && *q != '"')
        q++;
    size_t length = (size_t)(q - s->p);
    proto_excerpt(&excerpt, s->p, length);
    if (!length)
        return proto_fail(s->error, PROTO_BAD_JSON, "%s: not JSON: %s is missing", s->what, place.text);
    if (!strcmp(excerpt.text, "true") || !strcmp(excerpt.text, "false") || !strcmp(excerpt.text, "null"))
        return proto_fail(s->error, PROTO_BAD_TENSOR, "%s: %s is %s, but %s takes %s", s->what, place.text, excerpt.text, name, kind);
    if (strchr("NIni", *s->p) || (*s->p == '-' && length > 1 && strchr("NIni", s->p[1])))
        return proto_fail(s->error, PROTO_BAD_JSON, "%s: %s is %s, which JSON can't hold; send the tensor as binary", s->what, place.text,
                          excerpt.text);
    float number;
    if (proto_scan_float(s->p, length, &number) == length)
        return proto_fail(s->error, PROTO_BAD_TENSOR, "%s: %s is the number %s, but %s takes %s", s->what, place.text, excerpt.text, name,
                          kind);
    return proto_fail(s->error, PROTO_BAD_JSON, "%s: not JSON: %s is %s", s->what, place.text, excerpt.text);
}

static __attribute__((noinline)) enum proto_code scan_fail_overflow(const struct scan *s, size_t used)
{
    static const char *const largest[] = {[DTYPE_BF16] = "3.3895314e38", [DTYPE_FP16] = "65504", [DTYPE_FP32] = "3.4028235e38"};
    enum dtype type = s->tensor->dtype;
    struct place_text place;
    struct proto_excerpt excerpt;
    return proto_fail(s->error, PROTO_BAD_TENSOR, "%s: %s is %s, but the largest %s is %s", s->what, scan_place(s, s->levels, &place),
                      proto_excerpt(&excerpt, s->p, used), dtype_name(type), largest[type]);
}

static inline enum proto_code scan_float(struct scan *s, enum dtype type)
{
    uint32_t bits;
    bool overflow;
    size_t used = proto_decimal_read(s->p, s->end, type, &bits, &overflow);
    if (!used)
        return scan_fail_element(s);
    if (overflow)
        return scan_fail_overflow(s, used);
    s->p += used;
    if (type == DTYPE_FP32) {
        memcpy(s->out, &bits, 4);
        s->out += 4;
    } else {
        uint16_t half = (uint16_t)bits;
        memcpy(s->out, &half, 2);
        s->out += 2;
    }
    return PROTO_OK;
}

static enum proto_code scan_integer(struct scan *s)
{
    enum dtype type = s->tensor->dtype;
    int64_t value = 0;
    enum proto_integer status;
    size_t used = proto_integer_read(s->p, s->end, &value, &status);
    if (!used)
        return scan_fail_element(s);
    if (status == PROTO_INTEGER_OK && type == DTYPE_INT32 && (value < INT32_MIN || value > INT32_MAX))
        status = PROTO_INTEGER_RANGE;
    if (status != PROTO_INTEGER_OK) {
        struct place_text place;
        struct proto_excerpt excerpt;
        scan_place(s, s->levels, &place);
        proto_excerpt(&excerpt, s->p, used);
        if (status == PROTO_INTEGER_REAL)
            return proto_fail(s->error, PROTO_BAD_TENSOR, "%s: %s is %s; %s takes integers without a point or an exponent", s->what,
                              place.text, excerpt.text, dtype_name(type));
        return proto_fail(s->error, PROTO_BAD_TENSOR, "%s: %s is %s, outside %s's range of %s", s->what, place.text, excerpt.text,
                          dtype_name(type),
                          type == DTYPE_INT32 ? "-2147483648 to 2147483647" : "-9223372036854775808 to 9223372036854775807");
    }
    s->p += used;
    if (type == DTYPE_INT32) {
        int32_t narrow = (int32_t)value;
        memcpy(s->out, &narrow, 4);
        s->out += 4;
    } else {
        memcpy(s->out, &value, 8);
        s->out += 8;
    }
    return PROTO_OK;
}

static enum proto_code scan_string(struct scan *s)
{
    if (*s->p != '"')
        return scan_fail_element(s);
    struct proto_text *bytes = &s->bytes;
    struct place_text place;
    size_t at = bytes->length;
    proto_text_append(bytes, "\0\0\0\0", 4);
    const char *p = s->p + 1, *plain = p;
    while (p < s->end && *p != '"') {
        size_t n = proto_utf8_length(p, (size_t)(s->end - p));
        if (!n || (unsigned char)*p < 0x20)
            return proto_fail(s->error, PROTO_BAD_JSON, "%s: not JSON: %s has a byte 0x%02x that %s", s->what,
                              scan_place(s, s->levels, &place), (unsigned char)*p, n ? "must be escaped" : "is not UTF-8");
        if (*p != '\\') {
            p += n;
            continue;
        }
        proto_text_append(bytes, plain, (size_t)(p - plain));
        uint32_t c;
        size_t used = proto_escape_read(p + 1, s->end, &c);
        if (!used)
            return proto_fail(s->error, PROTO_BAD_JSON, "%s: not JSON: %s has an escape that is none", s->what,
                              scan_place(s, s->levels, &place));
        char utf8[4];
        proto_text_append(bytes, utf8, proto_utf8_write(utf8, c));
        p += 1 + used;
        plain = p;
    }
    proto_text_append(bytes, plain, (size_t)(p - plain));
    if (bytes->failed)
        return proto_fail_memory(s->error);
    size_t length = bytes->length - at - 4;
    if (length > UINT32_MAX)
        return proto_fail(s->error, PROTO_BAD_TENSOR, "%s: %s has %zu bytes; at most 4294967295 are taken", s->what,
                          scan_place(s, s->levels, &place), length);
    uint32_t stored = (uint32_t)length;
    memcpy(bytes->data + at, &stored, 4);
    s->p = p + 1;
    return PROTO_OK;
}

static inline enum proto_code scan_element(struct scan *s)
{
    enum dtype type = s->tensor->dtype;
    if (dtype_is_float(type))
        return scan_float(s, type);
    return type == DTYPE_BYTES ? scan_string(s) : scan_integer(s);
}

/* The list at `p`, with its brackets. The cut made sure that brackets match, so that `end` is not met inside. */
static enum proto_code scan_list(struct scan *s, int32_t level)
{
    struct place_text place;
    /* No tensor has more levels than `index` has places: the recursion ends there by itself, whatever `levels` says. */
    bool leaf = level == s->levels - 1 || level == PROTO_MAX_RANK - 1;
    size_t want = s->levels == 1 ? s->tensor->elements : (size_t)s->tensor->shape[level];
    size_t *index = &s->index[level];
    *index = 0;
    s->p = proto_skip_space(s->p + 1, s->end);
    if (*s->p == ']') {
        s->p++;
        return want ? scan_fail_count(s, level, want) : PROTO_OK;
    }
    for (;;) {
        if (*index == want)
            return scan_fail_count(s, level, want);
        enum proto_code code;
        if (leaf)
            code = scan_element(s);
        else if (*s->p == '[')
            code = scan_list(s, level + 1);
        else
            code =
                proto_fail(s->error, PROTO_BAD_TENSOR, "%s: %s must be a list, as data[0] is", s->what, scan_place(s, level + 1, &place));
        if (code)
            return code;
        s->p = proto_skip_space(s->p, s->end);
        char next = *s->p;
        if (next != ',' && next != ']')
            return proto_fail(s->error, PROTO_BAD_JSON, "%s: not JSON: ',' or ']' is missing behind %s", s->what,
                              scan_place(s, level + 1, &place));
        ++*index;
        s->p++;
        if (next == ']')
            return *index == want ? PROTO_OK : scan_fail_count(s, level, want);
        s->p = proto_skip_space(s->p, s->end);
    }
}

/* Whether lists are nested as they may be: not at all, or once for each dimension. */
static enum proto_code scan_levels(struct scan *s)
{
    struct proto_shape_text shape;
    int levels = 0;
    for (const char *p = s->p; p < s->end && *p == '['; p = proto_skip_space(p + 1, s->end))
        levels++;
    int32_t rank = s->tensor->rank;
    if (levels != 1 && levels != rank)
        return proto_fail(s->error, PROTO_BAD_TENSOR, "%s: data is nested %d levels deep, but shape %s takes %s%d", s->what, levels,
                          proto_shape_text(&shape, s->tensor), rank > 1 ? "1 or " : "", rank);
    s->levels = levels;
    return PROTO_OK;
}

enum proto_code proto_tensor_scan(struct proto_tensor *tensor, const char *what, const struct proto_span *span,
                                  const struct proto_caller *caller, struct proto_error *error)
{
    struct scan s = {.tensor = tensor, .what = what, .p = span->start, .end = span->start + span->length, .error = error};
    enum proto_code code = scan_levels(&s);
    if (code)
        return code;
    size_t size = dtype_size(tensor->dtype);
    if (!size) {
        code = scan_list(&s, 0);
        tensor->data = proto_text_finish(&s.bytes, &tensor->bytes);
        tensor->owned = true;
        return code || tensor->data ? code : proto_fail_memory(error);
    }
    /* Each number takes a byte and another for the comma or bracket behind it: a shape can't ask for more memory than this. A small one
     * may, for the sake of a sentence that names the place. */
    if (tensor->elements > (span->length - 1) / 2 && tensor->elements > 1024) {
        struct proto_shape_text shape;
        size_t count = 1;
        for (const char *p = s.p; p < s.end; p++)
            count += *p == ',';
        return proto_fail(error, PROTO_BAD_TENSOR, "%s: data has at most %zu entries, but shape %s says %zu", what, count,
                          proto_shape_text(&shape, tensor), tensor->elements);
    }
    tensor->bytes = tensor->elements * size;
    size_t bytes = tensor->bytes ? tensor->bytes : 1;
    s.out = caller->take ? caller->take(caller->context, bytes) : malloc(bytes);
    if (!s.out)
        return proto_fail_memory(error);
    tensor->data = s.out;
    tensor->owned = true;
    return scan_list(&s, 0);
}

enum proto_code proto_tensor_view(struct proto_tensor *tensor, const char *what, const char *bytes, size_t size, struct proto_error *error)
{
    struct proto_shape_text shape;
    size_t each = dtype_size(tensor->dtype);
    tensor->data = bytes;
    tensor->bytes = size;
    tensor->owned = false;
    if (each) {
        if (size == tensor->elements * each)
            return PROTO_OK;
        return proto_fail(error, PROTO_BAD_TENSOR, "%s: binary_data_size is %zu, but shape %s of %s takes %zu", what, size,
                          proto_shape_text(&shape, tensor), dtype_name(tensor->dtype), tensor->elements * each);
    }
    size_t at = 0;
    for (size_t i = 0; i < tensor->elements; i++) {
        uint32_t length;
        if (size - at < 4)
            return proto_fail(error, PROTO_BAD_TENSOR, "%s: its %zu bytes end before the length of element %zu of %zu", what, size, i,
                              tensor->elements);
        memcpy(&length, bytes + at, 4);
        at += 4;
        if (size - at < length)
            return proto_fail(error, PROTO_BAD_TENSOR, "%s: element %zu says %u bytes, but %zu are left", what, i, length, size - at);
        at += length;
    }
    if (at != size)
        return proto_fail(error, PROTO_BAD_TENSOR, "%s: %zu bytes follow the last of %zu elements", what, size - at, tensor->elements);
    return PROTO_OK;
}

bool proto_bytes_next(const struct proto_tensor *tensor, size_t *cursor, const char **data, size_t *length)
{
    uint32_t n;
    if (tensor->dtype != DTYPE_BYTES || tensor->bytes - *cursor < 4)
        return false;
    const char *at = (const char *)tensor->data + *cursor;
    memcpy(&n, at, 4);
    *data = at + 4;
    *length = n;
    *cursor += 4 + (size_t)n;
    return true;
}
