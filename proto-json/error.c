/* SPDX-License-Identifier: Apache-2.0
 *
 * Sentences of errors: whatever a caller sent, they come out as valid UTF-8 and short.
 */
#include "proto-json/internal.h"

#include <stdarg.h>
#include <stdio.h>

const char *proto_code_name(enum proto_code code)
{
    switch (code) {
    case PROTO_OK: return "ok";
    case PROTO_BAD_JSON: return "bad_json";
    case PROTO_BAD_REQUEST: return "bad_request";
    case PROTO_BAD_TENSOR: return "bad_tensor";
    case PROTO_SHAPE_MISMATCH: return "shape_mismatch";
    case PROTO_UNSUPPORTED_DATATYPE: return "unsupported_datatype";
    case PROTO_NON_FINITE_OUTPUT: return "non_finite_output";
    case PROTO_OUT_OF_MEMORY: return "out_of_memory";
    }
    return "internal";
}

size_t proto_utf8_length(const char *p, size_t length)
{
    if (!length)
        return 0;
    unsigned char a = (unsigned char)p[0];
    if (a < 0x80)
        return 1;
    size_t n = a >= 0xc2 && a < 0xe0 ? 2 : a >= 0xe0 && a < 0xf0 ? 3 : a >= 0xf0 && a < 0xf5 ? 4 : 0;
    if (!n || n > length)
        return 0;
    for (size_t i = 1; i < n; i++)
        if (((unsigned char)p[i] & 0xc0) != 0x80)
            return 0;
    unsigned char b = (unsigned char)p[1];
    /* Overlong three and four byte forms, surrogates, and what lies past U+10FFFF. */
    if ((a == 0xe0 && b < 0xa0) || (a == 0xed && b > 0x9f) || (a == 0xf0 && b < 0x90) || (a == 0xf4 && b > 0x8f))
        return 0;
    return n;
}

size_t proto_utf8_write(char *dst, uint32_t c)
{
    if (c < 0x80) {
        dst[0] = (char)c;
        return 1;
    }
    size_t n = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (size_t i = n - 1; i; i--, c >>= 6)
        dst[i] = (char)(0x80 | (c & 0x3f));
    dst[0] = (char)((0xf00u >> n) | c);
    return n;
}

const char *proto_excerpt(struct proto_excerpt *out, const char *bytes, size_t length)
{
    size_t used = 0, i = 0;
    while (i < length && used < 64) {
        size_t n = proto_utf8_length(bytes + i, length - i);
        if (!n || (unsigned char)bytes[i] < 0x20 || bytes[i] == 0x7f) {
            used += proto_utf8_write(out->text + used, 0xfffd);
            i += n ? n : 1;
            continue;
        }
        memcpy(out->text + used, bytes + i, n);
        used += n;
        i += n;
    }
    memcpy(out->text + used, "...", 4);
    if (i == length)
        out->text[used] = 0;
    return out->text;
}

/* vsnprintf may have cut inside a sequence. */
static void error_cut(char *message)
{
    size_t length = strlen(message), i = 0;
    while (i < length) {
        size_t n = proto_utf8_length(message + i, length - i);
        if (!n)
            break;
        i += n;
    }
    message[i] = 0;
}

enum proto_code proto_fail(struct proto_error *error, enum proto_code code, const char *format, ...)
{
    if (!error)
        return code;
    error->code = code;
    va_list list;
    va_start(list, format);
    if (vsnprintf(error->message, sizeof error->message, format, list) < 0)
        error->message[0] = 0;
    va_end(list);
    error_cut(error->message);
    return code;
}

enum proto_code proto_fail_memory(struct proto_error *error) { return proto_fail(error, PROTO_OUT_OF_MEMORY, "out of memory"); }
