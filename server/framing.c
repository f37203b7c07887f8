/* SPDX-License-Identifier: Apache-2.0
 *
 * Rules of RFC 9112 that keep a proxy's idea of a request and ours the same.
 *
 * libmicrohttpd before 1.0 parses heads in place: a header's value stands right after its name, and each line's end has become NUL
 * bytes. A folded line moves the name elsewhere, a bare line feed leaves one NUL instead of two, and a NUL inside a value is followed
 * by more of it; so all three are seen from where the pieces lie. A line that begins with its colon ends the head for the library, and what
 * follows is taken for the body: then the head does not end right after its last header. From 1.0 on the library refuses all of them itself
 * at the level we ask for.
 */
#include "server/framing.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define FRAMING_GAP_MAX 65536

struct framing_scan {
    bool in_place; /* a version that parses as described above */
    int hosts, lengths, encodings, keys, heads;
    int64_t length;
    uintptr_t last; /* where the last line that was understood ends */
    char *message;
    size_t size;
    bool bad;
};

static bool framing_fail(struct framing_scan *s, const char *format, ...) __attribute__((format(printf, 2, 3)));
static bool framing_fail(struct framing_scan *s, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (!s->bad)
        vsnprintf(s->message, s->size, format, args);
    va_end(args);
    s->bad = true;
    return false;
}

static bool framing_is_token(const char *text, size_t length)
{
    for (size_t i = 0; i < length; i++) {
        unsigned char c = (unsigned char)text[i];
        bool alpha = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
        if (!alpha && !(c && strchr("!#$%&'*+-.^_`|~", c)))
            return false;
    }
    return length > 0;
}

/* Whether value follows name as one unfolded line that ended in CR LF. */
static bool framing_in_line(const char *name, size_t name_size, const char *value, size_t value_size)
{
    uintptr_t end = (uintptr_t)name + name_size, start = (uintptr_t)value;
    if (start <= end || start - end > FRAMING_GAP_MAX)
        return false;
    for (size_t i = 0; i < start - end; i++)
        if (!strchr(" \t", name[name_size + i])) /* NUL, which the colon became, too */
            return false;
    return value[value_size] == '\0' && value[value_size + 1] == '\0';
}

static enum MHD_Result framing_header(void *cls, enum MHD_ValueKind kind, const char *name, size_t name_size, const char *value,
                                      size_t value_size)
{
    struct framing_scan *s = cls;
    (void)kind;
    if (!framing_is_token(name, name_size)) {
        framing_fail(s, "a header's name has a character that is not allowed, or white space before its colon");
        return MHD_NO;
    }
    if (!value)
        value = "", value_size = 0;
    else if (s->in_place && !framing_in_line(name, name_size, value, value_size))
        framing_fail(s, "header %.64s is folded, or does not end in CR LF", name);
    else
        s->last = (uintptr_t)value + value_size;
    for (size_t i = 0; i < value_size; i++)
        if (((unsigned char)value[i] < ' ' && value[i] != '\t') || value[i] == 0x7f)
            framing_fail(s, "header %.64s has a control character", name);
    if (strcasecmp(name, "Host") == 0) {
        s->hosts++;
        if (strpbrk(value, " \t,/@\\?#"))
            framing_fail(s, "the Host header is malformed");
    } else if (strcasecmp(name, "Content-Length") == 0) {
        s->lengths++;
        if (!value_size || value_size > 18 || strspn(value, "0123456789") != value_size)
            framing_fail(s, "Content-Length is not a number of at most 18 digits");
        else
            s->length = strtoll(value, NULL, 10);
    } else if (strcasecmp(name, "Transfer-Encoding") == 0) {
        s->encodings++;
        if (strcasecmp(value, "chunked") != 0)
            framing_fail(s, "Transfer-Encoding may only be chunked");
    } else if (strcasecmp(name, "Authorization") == 0) {
        s->keys++;
    } else if (strcasecmp(name, "Inference-Header-Content-Length") == 0) {
        s->heads++;
    }
    return s->bad ? MHD_NO : MHD_YES;
}

/* Whether only blanks lie between a word of the request line and the next; the first one is a NUL by now. */
static bool framing_next_word(const char *word, size_t length, const char *next)
{
    uintptr_t end = (uintptr_t)word + length, start = (uintptr_t)next;
    bool good = start > end && start - end <= FRAMING_GAP_MAX;
    for (size_t i = 0; good && i < start - end; i++)
        good = strchr(" \t", word[length + i]) != NULL && (word[length + i] || !i);
    return good;
}

static bool framing_check_target(struct framing_scan *s, const char *method, const char *version, const char *raw_uri, size_t raw_length,
                                 const char *uri)
{
    /* A NUL in a word ends it early for the library. */
    if (s->in_place && !framing_next_word(method, strlen(method), raw_uri))
        return framing_fail(s, "the method has a NUL byte or is malformed");
    if (s->in_place && !framing_next_word(raw_uri, raw_length, version))
        return framing_fail(s, "the request target has a NUL byte or is malformed");
    for (const char *p = uri; *p; p++) {
        if ((unsigned char)*p <= ' ' || *p == 0x7f)
            return framing_fail(s, "the request target has a space or control character");
        if (p[0] == '%' && p[1] == '0' && p[2] == '0')
            return framing_fail(s, "the request target has an encoded NUL byte");
    }
    return true;
}

/* Whether the head ends with an empty line right after its last header. */
static bool framing_check_end(struct framing_scan *s, struct MHD_Connection *mhd, const char *method)
{
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_REQUEST_HEADER_SIZE);
    if (s->in_place && (!info || (uintptr_t)method + info->header_size != s->last + strlen("\r\n\r\n")))
        return framing_fail(s, "the last header is not followed by an empty line");
    return true;
}

bool framing_check(struct MHD_Connection *mhd, const char *method, const char *version, const char *raw_uri, size_t raw_length,
                   const char *uri, struct framing *out, char *message, size_t size)
{
    struct framing_scan s = {.last = (uintptr_t)version + strlen(version), .message = message, .size = size};
    const char *library = MHD_get_version();
    s.in_place = strncmp(library, "0.", 2) == 0;
    bool v11 = strcmp(version, "HTTP/1.1") == 0;
    if (!v11 && strcmp(version, "HTTP/1.0") != 0)
        return framing_fail(&s, "only HTTP/1.1 and HTTP/1.0 are spoken here");
    if (!framing_check_target(&s, method, version, raw_uri, raw_length, uri))
        return false;
    MHD_get_connection_values_n(mhd, MHD_HEADER_KIND, framing_header, &s);
    if (s.bad || !framing_check_end(&s, mhd, method))
        return false;
    if (s.lengths > 1)
        return framing_fail(&s, "there are %d Content-Length headers", s.lengths);
    if (s.encodings > 1)
        return framing_fail(&s, "there are %d Transfer-Encoding headers", s.encodings);
    if (s.lengths && s.encodings)
        return framing_fail(&s, "there are both Content-Length and Transfer-Encoding");
    if (s.encodings && !v11)
        return framing_fail(&s, "HTTP/1.0 has no Transfer-Encoding");
    if (s.hosts > 1 || (v11 && !s.hosts))
        return framing_fail(&s, "there must be one Host header, not %d", s.hosts);
    if (s.keys > 1)
        return framing_fail(&s, "there are %d Authorization headers", s.keys);
    if (s.heads > 1)
        return framing_fail(&s, "there are %d Inference-Header-Content-Length headers", s.heads);
    out->length = s.encodings ? -1 : s.length;
    return true;
}
