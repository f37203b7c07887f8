/* SPDX-License-Identifier: Apache-2.0
 *
 * The text under construction, JSON strings of bytes that nobody has checked, and the escapes of those that come in.
 */
#include "proto-json/internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

bool proto_text_reserve(struct proto_text *text, size_t more)
{
    if (text->failed)
        return false;
    if (more <= text->capacity - text->length)
        return true;
    size_t want, grown = text->capacity + text->capacity / 2;
    if (__builtin_add_overflow(text->length, more, &want) || want > PTRDIFF_MAX - 64) {
        text->failed = true;
        return false;
    }
    if (want < grown)
        want = grown;
    if (want < 256)
        want = 256;
    char *data = realloc(text->data, want);
    if (!data) {
        text->failed = true;
        return false;
    }
    text->data = data;
    text->capacity = want;
    return true;
}

void proto_text_append(struct proto_text *text, const char *bytes, size_t length)
{
    if (!length || !proto_text_reserve(text, length))
        return;
    memcpy(text->data + text->length, bytes, length);
    text->length += length;
}

void proto_text_format(struct proto_text *text, const char *format, ...)
{
    char small[256];
    va_list list;
    va_start(list, format);
    int n = vsnprintf(small, sizeof small, format, list);
    va_end(list);
    /* Only numbers and short fixed words pass here. */
    if (n < 0 || (size_t)n >= sizeof small)
        text->failed = true;
    else
        proto_text_append(text, small, (size_t)n);
}

void proto_text_string(struct proto_text *text, const char *bytes, size_t length)
{
    static const char hex[] = "0123456789abcdef";
    proto_text_append(text, "\"", 1);
    size_t plain = 0, i = 0;
    while (i < length) {
        unsigned char c = (unsigned char)bytes[i];
        size_t n = proto_utf8_length(bytes + i, length - i);
        if (n && c >= 0x20 && c != '"' && c != '\\' && c != 0x7f) {
            i += n;
            continue;
        }
        proto_text_append(text, bytes + plain, i - plain);
        char escape[6] = {'\\', 'u', '0', '0', hex[c >> 4], hex[c & 15]};
        if (!n)
            proto_text_append(text, "\xef\xbf\xbd", 3);
        else if (c == '"' || c == '\\')
            proto_text_append(text, (char[]){'\\', (char)c}, 2);
        else if (c == '\n')
            proto_text_append(text, "\\n", 2);
        else
            proto_text_append(text, escape, sizeof escape);
        plain = ++i;
    }
    proto_text_append(text, bytes + plain, i - plain);
    proto_text_append(text, "\"", 1);
}

char *proto_text_finish(struct proto_text *text, size_t *length)
{
    /* A NUL behind the text costs nothing and helps whoever prints it. */
    if (proto_text_reserve(text, 1)) {
        text->data[text->length] = 0;
        *length = text->length;
        return text->data;
    }
    free(text->data);
    text->data = NULL;
    *length = 0;
    return NULL;
}

static bool escape_hex(const char *p, const char *end, uint32_t *value)
{
    if (end - p < 4)
        return false;
    *value = 0;
    for (int i = 0; i < 4; i++) {
        char c = p[i], lower = (char)(c | 0x20);
        uint32_t v = c >= '0' && c <= '9' ? (uint32_t)(c - '0') : lower >= 'a' && lower <= 'f' ? (uint32_t)(lower - 'a' + 10) : 16;
        if (v == 16)
            return false;
        *value = *value * 16 + v;
    }
    return true;
}

size_t proto_escape_read(const char *p, const char *end, uint32_t *c)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    if (p == end)
        return 0;
    if (*p != 'u') {
        const char *at = *p ? strchr(from, *p) : NULL;
        *c = at ? (uint32_t)to[at - from] : 0;
        return at != NULL;
    }
    if (!escape_hex(p + 1, end, c))
        return 0;
    if (*c < 0xd800 || *c > 0xdfff)
        return 5;
    uint32_t low;
    if (*c > 0xdbff || end - p < 11 || p[5] != '\\' || p[6] != 'u' || !escape_hex(p + 7, end, &low) || low < 0xdc00 || low > 0xdfff)
        return 0;
    *c = 0x10000 + ((*c - 0xd800) << 10) + (low - 0xdc00);
    return 11;
}
