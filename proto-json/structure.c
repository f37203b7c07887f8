/* SPDX-License-Identifier: Apache-2.0
 *
 * The structure of a JSON text: one pass that bounds its depth and cuts the data arrays out, before jansson checks the rest.
 *
 * The pass checks grammar, strings and numbers as jansson does, so that of a text that passes jansson can refuse only duplicates,
 * numbers out of range and U+0000: it has no reliable way to say that memory ran out. Both see every byte but the data arrays.
 */
#include "proto-json/internal.h"

#include <stdio.h>
#include <stdlib.h>

#define WALK_BLOCK 64 /* bytes */

enum place { PLACE_ROOT, PLACE_INPUTS, PLACE_INPUT, PLACE_OTHER };

struct walk {
    const char *text, *end, *p;
    const char *copied; /* what lies before is in `reduced` or was cut */
    struct proto_text reduced;
    struct proto_span *span;
    int32_t spans;
    struct proto_error *error;
    enum proto_code code;
};

static bool walk_fail(struct walk *w, const char *sentence)
{
    w->code = proto_fail(w->error, PROTO_BAD_JSON, "not JSON: %s at byte %zu", sentence, (size_t)(w->p - w->text));
    return false;
}

/* Passes over a string without looking into it. */
static bool walk_raw_string(struct walk *w)
{
    const char *p = w->p + 1;
    for (; p < w->end; p++) {
        if (*p == '"') {
            w->p = p + 1;
            return true;
        }
        if (*p == '\\' && w->end - p > 1)
            p++;
    }
    return walk_fail(w, "a string begins that doesn't end");
}

static bool walk_string(struct walk *w)
{
    const char *start = w->p;
    uint32_t c;
    w->p++;
    while (w->p < w->end && *w->p != '"') {
        size_t n = proto_utf8_length(w->p, (size_t)(w->end - w->p));
        if (!n)
            return walk_fail(w, "bytes that are not UTF-8");
        if ((unsigned char)*w->p < 0x20)
            return walk_fail(w, "a control character that is not escaped");
        if (*w->p == '\\') {
            n = proto_escape_read(w->p + 1, w->end, &c);
            if (!n)
                return walk_fail(w, "an escape that is none");
            n++;
        }
        w->p += n;
    }
    if (w->p == w->end) {
        w->p = start;
        return walk_fail(w, "a string begins that doesn't end");
    }
    w->p++;
    return true;
}

static bool walk_scalar(struct walk *w)
{
    static const char *const words[] = {"true", "false", "null"};
    size_t left = (size_t)(w->end - w->p);
    float number;
    size_t used = proto_scan_float(w->p, left, &number);
    for (size_t i = 0; i < 3 && !used; i++)
        if (left >= strlen(words[i]) && !memcmp(w->p, words[i], strlen(words[i])))
            used = strlen(words[i]);
    if (!used) {
        const char *p = w->p;
        while (p < w->end && !proto_is_space(*p) && !memchr(",:[]{}\"", *p, 7))
            p++;
        struct proto_excerpt excerpt;
        if (p == w->p)
            return walk_fail(w, "a value is missing");
        w->code = proto_fail(w->error, PROTO_BAD_JSON, "not JSON: %s at byte %zu", proto_excerpt(&excerpt, w->p, (size_t)(p - w->p)),
                             (size_t)(w->p - w->text));
        return false;
    }
    w->p += used;
    return true;
}

/* Whether the string at `p`, which walk_string has passed over, spells `word`, with escapes or without. */
static bool walk_string_is(const char *p, const char *end, const char *word)
{
    for (p++; *p != '"'; word++) {
        uint32_t c = (unsigned char)*p++;
        if (c == '\\')
            p += proto_escape_read(p, end, &c);
        if (!*word || c != (unsigned char)*word)
            return false;
    }
    return !*word;
}

/* Many bytes at a time over what numeric arrays consist of: digits, points, signs, commas and space. */
static const char *walk_skip_numbers(const char *p, const char *end)
{
    for (; end - p >= WALK_BLOCK; p += WALK_BLOCK) {
        unsigned char other = 0; /* no branch on a byte, so that compilers take vectors of them */
        for (int i = 0; i < WALK_BLOCK; i++)
            other |= (unsigned char)(((unsigned char)p[i] >= ':') | (p[i] == '"'));
        if (other)
            break;
    }
    while (p < end && (unsigned char)*p < ':' && *p != '"')
        p++;
    return p;
}

/* Takes what lies before `end` over into the text that jansson gets. Refused before it is copied: a body may be all of it. */
static bool walk_copy(struct walk *w, const char *end)
{
    size_t more = (size_t)(end - w->copied), whole = w->reduced.length + more;
    if (whole > PROTO_MAX_TREE_TEXT) {
        w->code = proto_fail(w->error, PROTO_BAD_REQUEST, "the JSON has %zu bytes besides the inputs' data; at most %u are taken", whole,
                             PROTO_MAX_TREE_TEXT);
        return false;
    }
    proto_text_append(&w->reduced, w->copied, more);
    w->copied = end;
    return true;
}

/* The array that is some input's data. Nothing is checked but its brackets and strings; tensor.c does that. */
static bool walk_data(struct walk *w, int depth)
{
    if (*w->p != '[') {
        w->code = proto_fail(w->error, PROTO_BAD_TENSOR, "inputs: data must be an array (at byte %zu)", (size_t)(w->p - w->text));
        return false;
    }
    if (w->spans == PROTO_MAX_INPUTS) {
        w->code = proto_fail(w->error, PROTO_BAD_REQUEST, "there are more than %d inputs with data", PROTO_MAX_INPUTS);
        return false;
    }
    const char *start = w->p;
    int level = 0;
    do {
        char c = *w->p;
        if (c == '[') {
            if (depth + ++level > PROTO_MAX_DEPTH)
                return walk_fail(w, "nested too deep (64 levels at most)");
            w->p++;
        } else if (c == ']') {
            level--;
            w->p++;
        } else if (c == '"') {
            if (!walk_raw_string(w))
                return false;
        } else if (c == '{' || c == '}') {
            w->code = proto_fail(w->error, PROTO_BAD_TENSOR, "inputs: data may not hold objects (at byte %zu)", (size_t)(w->p - w->text));
            return false;
        } else {
            w->p++;
        }
        if (level)
            w->p = walk_skip_numbers(w->p, w->end);
    } while (level && w->p < w->end);
    if (level) {
        w->p = start;
        return walk_fail(w, "an array begins that doesn't end");
    }
    if (!walk_copy(w, start))
        return false;
    w->span[w->spans] = (struct proto_span){.start = start, .length = (size_t)(w->p - start), .at = w->reduced.length};
    proto_text_format(&w->reduced, "%d", (int)w->spans++);
    w->copied = w->p;
    return true;
}

static bool walk_value(struct walk *w, int depth, enum place place);

static bool walk_members(struct walk *w, int depth, enum place place)
{
    w->p = proto_skip_space(w->p + 1, w->end);
    if (w->p < w->end && *w->p == '}') {
        w->p++;
        return true;
    }
    for (;;) {
        if (w->p == w->end || *w->p != '"')
            return walk_fail(w, "a member's name is missing");
        const char *name = w->p;
        if (!walk_string(w))
            return false;
        const char *name_end = w->p;
        w->p = proto_skip_space(w->p, w->end);
        if (w->p == w->end || *w->p != ':')
            return walk_fail(w, "':' is missing");
        w->p = proto_skip_space(w->p + 1, w->end);
        if (w->span && place == PLACE_INPUT && walk_string_is(name, name_end, "data") && w->p < w->end) {
            if (!walk_data(w, depth))
                return false;
        } else if (!walk_value(w, depth, place == PLACE_ROOT && walk_string_is(name, name_end, "inputs") ? PLACE_INPUTS : PLACE_OTHER)) {
            return false;
        }
        w->p = proto_skip_space(w->p, w->end);
        if (w->p < w->end && *w->p == '}') {
            w->p++;
            return true;
        }
        if (w->p == w->end || *w->p != ',')
            return walk_fail(w, "',' or '}' is missing");
        w->p = proto_skip_space(w->p + 1, w->end);
    }
}

static bool walk_elements(struct walk *w, int depth, enum place place)
{
    w->p = proto_skip_space(w->p + 1, w->end);
    if (w->p < w->end && *w->p == ']') {
        w->p++;
        return true;
    }
    for (;;) {
        if (!walk_value(w, depth, place == PLACE_INPUTS ? PLACE_INPUT : PLACE_OTHER))
            return false;
        w->p = proto_skip_space(w->p, w->end);
        if (w->p < w->end && *w->p == ']') {
            w->p++;
            return true;
        }
        if (w->p == w->end || *w->p != ',')
            return walk_fail(w, "',' or ']' is missing");
        w->p = proto_skip_space(w->p + 1, w->end);
    }
}

/* `depth` containers are open around the value. An array of inputs or an input that is of another kind has no data. */
static bool walk_value(struct walk *w, int depth, enum place place)
{
    if (w->p == w->end)
        return walk_fail(w, "the text ends where a value should be");
    char c = *w->p;
    if (c == '"')
        return walk_string(w);
    if (c == '{' || c == '[') {
        if (depth == PROTO_MAX_DEPTH)
            return walk_fail(w, "nested too deep (64 levels at most)");
        if (c == '{')
            return walk_members(w, depth + 1, place == PLACE_INPUTS ? PLACE_OTHER : place);
        return walk_elements(w, depth + 1, place == PLACE_INPUTS ? PLACE_INPUTS : PLACE_OTHER);
    }
    return walk_scalar(w);
}

/* jansson's offset is one of the reduced text. */
static size_t walk_original_offset(const struct walk *w, size_t at)
{
    size_t original = at;
    for (int32_t i = 0; i < w->spans && w->span[i].at < at; i++)
        original += w->span[i].length - (i < 10 ? 1 : 2);
    return original;
}

static enum proto_code walk_load(struct walk *w, json_t **out)
{
    if (!walk_copy(w, w->end))
        return w->code;
    if (w->reduced.failed)
        return proto_fail_memory(w->error);
    json_error_t why = {0}; /* when it can't even begin, jansson leaves the code as it finds it */
    *out = json_loadb(w->reduced.data, w->reduced.length, JSON_REJECT_DUPLICATES, &why);
    if (*out)
        return PROTO_OK;
    const char *text = why.text;
    switch (json_error_code(&why)) {
    case json_error_duplicate_key:
    case json_error_numeric_overflow: break;
    case json_error_null_character:
    case json_error_null_byte_in_key: text = "a string that holds \\u0000"; break;
    default: return proto_fail_memory(w->error);
    }
    struct proto_excerpt excerpt;
    size_t at = why.position > 0 ? (size_t)why.position : 0;
    return proto_fail(w->error, PROTO_BAD_JSON, "not JSON: %s at byte %zu", proto_excerpt(&excerpt, text, strlen(text)),
                      walk_original_offset(w, at));
}

enum proto_code proto_tree_parse(const char *text, size_t length, const char *behind, struct proto_span *span, int32_t *count, json_t **out,
                                 struct proto_error *error)
{
    struct walk w = {.text = text, .end = text + length, .p = text, .copied = text, .span = span, .error = error};
    *out = NULL;
    w.p = proto_skip_space(w.p, w.end);
    if (w.p == w.end)
        return proto_fail(error, PROTO_BAD_JSON, "not JSON: the text is empty");
    enum proto_code code;
    const bool object = *w.p == '{';
    if (!object && *w.p != '[')
        return proto_fail(error, PROTO_BAD_JSON, "not JSON: an object must begin at byte %zu", (size_t)(w.p - text));
    if (!walk_value(&w, 0, PLACE_ROOT)) {
        code = w.code;
    } else {
        w.p = proto_skip_space(w.p, w.end);
        if (w.p != w.end)
            code = proto_fail(error, PROTO_BAD_JSON, "not JSON: something follows the value at byte %zu%s", (size_t)(w.p - text),
                              object && behind ? behind : "");
        else
            code = walk_load(&w, out);
    }
    free(w.reduced.data);
    if (count)
        *count = w.spans;
    return code;
}
