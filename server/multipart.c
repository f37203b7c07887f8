/* SPDX-License-Identifier: Apache-2.0
 *
 * The delimiter is CR LF "--" boundary. The stream is treated as if a CR LF stood before it, so that the first delimiter looks like the
 * others. A delimiter may be cut anywhere between two pieces: how much of it has matched is all that is kept, since its bytes
 * can be given out from the delimiter itself if the match fails.
 */
#include "server/multipart.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum multipart_state {
    MULTIPART_PREAMBLE, /* before the first delimiter */
    MULTIPART_AFTER, /* right after a delimiter: CR LF or "--" */
    MULTIPART_HEAD,
    MULTIPART_BODY,
    MULTIPART_EPILOGUE,
    MULTIPART_BROKEN,
};

#define MULTIPART_TEXT(n) MULTIPART_TEXT_OF(n)
#define MULTIPART_TEXT_OF(n) #n

struct multipart {
    struct multipart_sink sink;
    enum multipart_state state;
    char delimiter[MULTIPART_BOUNDARY_MAX + 5];
    size_t delimiter_length, matched;
    char after[2];
    size_t after_length;
    char head[MULTIPART_HEAD_MAX + 1];
    size_t head_length;
    const char *error;
};

static bool multipart_fail(struct multipart *m, const char *error)
{
    m->error = error;
    m->state = MULTIPART_BROKEN;
    return false;
}

/* A parameter of a header's value: name=token or name="quoted". False: absent, malformed, too long or given twice. */
static bool multipart_parameter(const char *value, const char *name, char *out, size_t size)
{
    size_t length = strlen(name);
    bool found = false;
    for (const char *p = strchr(value, ';'); p && *p == ';';) {
        p++;
        p += strspn(p, " \t");
        size_t key = strcspn(p, "=; \t");
        bool wanted = key == length && strncasecmp(p, name, length) == 0;
        p += key;
        if (*p != '=')
            return false;
        p++;
        size_t used = 0;
        bool quoted = *p == '"';
        if (quoted)
            p++;
        if (wanted && found)
            return false;
        while (quoted ? *p && *p != '"' : *p && !strchr("; \t", *p)) {
            if (quoted && *p == '\\' && p[1])
                p++;
            if (wanted) {
                if (used + 1 >= size)
                    return false;
                out[used++] = *p;
            }
            p++;
        }
        if (quoted && *p++ != '"')
            return false;
        if (wanted) {
            out[used] = '\0';
            found = used > 0;
        }
        p += strspn(p, " \t");
        if (*p && *p != ';')
            return false;
    }
    return found;
}

struct multipart *multipart_create(const char *content_type, const struct multipart_sink *sink, bool *memory)
{
    static const char type[] = "multipart/form-data";
    char boundary[MULTIPART_BOUNDARY_MAX + 1];
    *memory = false;
    if (!content_type || strncasecmp(content_type, type, sizeof type - 1) != 0 || !strchr("; \t", content_type[sizeof type - 1]) ||
        !multipart_parameter(content_type, "boundary", boundary, sizeof boundary) || boundary[strlen(boundary) - 1] == ' ')
        return NULL;
    for (const char *p = boundary; *p; p++)
        if ((*p < '0' || *p > '9') && ((*p | 0x20) < 'a' || (*p | 0x20) > 'z') && !strchr("'()+_,-./:=? ", *p))
            return NULL;
    struct multipart *m = calloc(1, sizeof *m);
    if (!m) {
        *memory = true;
        return NULL;
    }
    m->sink = *sink;
    memcpy(m->delimiter, "\r\n--", 4);
    memcpy(m->delimiter + 4, boundary, strlen(boundary));
    m->delimiter_length = 4 + strlen(boundary);
    m->matched = 2; /* the CR LF before the stream */
    return m;
}

void multipart_destroy(struct multipart *m) { free(m); }
bool multipart_complete(const struct multipart *m) { return m->state == MULTIPART_EPILOGUE; }
const char *multipart_error(const struct multipart *m) { return m->error; }

/* The head is whole: finds the field's name. */
static bool multipart_begin_part(struct multipart *m)
{
    char name[MULTIPART_NAME_MAX + 1] = "";
    int dispositions = 0;
    m->head[m->head_length] = '\0';
    if (strlen(m->head) != m->head_length)
        return multipart_fail(m, "a part's header has a NUL byte");
    for (char *line = m->head; *line;) {
        char *end = strstr(line, "\r\n");
        if (!end)
            break;
        *end = '\0';
        static const char disposition[] = "Content-Disposition:", encoding[] = "Content-Transfer-Encoding:";
        if (strncasecmp(line, disposition, sizeof disposition - 1) == 0) {
            const char *value = line + sizeof disposition - 1;
            value += strspn(value, " \t");
            if (strncasecmp(value, "form-data", 9) != 0 || !multipart_parameter(value, "name", name, sizeof name))
                return multipart_fail(
                    m, "a part's Content-Disposition is not form-data with a name of 1 to " MULTIPART_TEXT(MULTIPART_NAME_MAX) " bytes");
            dispositions++;
        } else if (strncasecmp(line, encoding, sizeof encoding - 1) == 0) {
            const char *value = line + sizeof encoding - 1;
            value += strspn(value, " \t");
            if (strcasecmp(value, "binary") != 0 && strcasecmp(value, "8bit") != 0 && strcasecmp(value, "7bit") != 0)
                return multipart_fail(m, "a part's Content-Transfer-Encoding is not supported");
        }
        line = end + 2;
    }
    if (dispositions != 1)
        return multipart_fail(m, "a part has no Content-Disposition, or several");
    m->state = MULTIPART_BODY;
    m->matched = 0;
    if (m->sink.begin(m->sink.arg, name))
        return true;
    m->state = MULTIPART_BROKEN;
    return false;
}

static bool multipart_give(struct multipart *m, const char *data, size_t size)
{
    if (m->state != MULTIPART_BODY || !size || m->sink.data(m->sink.arg, data, size))
        return true;
    m->state = MULTIPART_BROKEN;
    return false;
}

/* Preamble and bodies: looks for the delimiter. Returns bytes used; *good false on failure. */
static size_t multipart_search(struct multipart *m, const char *data, size_t size, bool *good)
{
    size_t at = 0, kept = 0; /* data[kept..at) is part of the body and not given out yet */
    while (at < size) {
        if (m->matched == 0) {
            const char *cr = memchr(data + at, '\r', size - at);
            at = cr ? (size_t)(cr - data) : size;
            if (!(*good = multipart_give(m, data + kept, at - kept)))
                return at;
            kept = at;
            if (!cr)
                break;
        }
        if (data[at] == m->delimiter[m->matched]) {
            at++;
            kept = at;
            if (++m->matched < m->delimiter_length)
                continue;
            if (m->state == MULTIPART_BODY && !m->sink.end(m->sink.arg)) {
                m->state = MULTIPART_BROKEN;
                *good = false;
                return at;
            }
            m->state = MULTIPART_AFTER;
            m->after_length = 0;
            return at;
        }
        /* CR stands only at the delimiter's start, so a failed match can begin anew at this byte but nowhere before it. */
        size_t failed = m->matched;
        m->matched = 0;
        if (!(*good = multipart_give(m, m->delimiter, failed)))
            return at;
        kept = at;
        if (data[at] != '\r') {
            at++;
            if (!(*good = multipart_give(m, data + kept, 1)))
                return at;
            kept = at;
        }
    }
    return size;
}

bool multipart_feed(struct multipart *m, const char *data, size_t size)
{
    bool good = true;
    while (size && good) {
        size_t used = 1;
        switch (m->state) {
        case MULTIPART_PREAMBLE:
        case MULTIPART_BODY: used = multipart_search(m, data, size, &good); break;
        case MULTIPART_AFTER:
            if (m->after_length == 0 && (*data == ' ' || *data == '\t'))
                break; /* white space that some senders pad with */
            m->after[m->after_length++] = *data;
            if (m->after_length < 2)
                break;
            if (memcmp(m->after, "--", 2) == 0) {
                m->state = MULTIPART_EPILOGUE;
            } else if (memcmp(m->after, "\r\n", 2) == 0) {
                m->state = MULTIPART_HEAD;
                m->head_length = 0;
            } else {
                good = multipart_fail(m, "a boundary is followed by neither a line's end nor \"--\"");
            }
            break;
        case MULTIPART_HEAD:
            if (m->head_length == MULTIPART_HEAD_MAX) {
                good = multipart_fail(m, "a part has more than " MULTIPART_TEXT(MULTIPART_HEAD_MAX) " bytes of headers");
                break;
            }
            m->head[m->head_length++] = *data;
            if ((m->head_length == 2 && memcmp(m->head, "\r\n", 2) == 0) ||
                (m->head_length >= 4 && memcmp(m->head + m->head_length - 4, "\r\n\r\n", 4) == 0))
                good = multipart_begin_part(m);
            break;
        case MULTIPART_EPILOGUE: used = size; break;
        case MULTIPART_BROKEN: return false;
        }
        data += used;
        size -= used;
    }
    return good;
}
