/* SPDX-License-Identifier: Apache-2.0 */
#include "server/target.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

static int target_hex(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

bool target_decode(char *text)
{
    char *to = text;
    for (const char *p = text; *p; p++) {
        if (*p != '%') {
            *to++ = *p;
            continue;
        }
        int high = target_hex(p[1]), low = high < 0 ? -1 : target_hex(p[2]);
        int byte = high * 16 + low;
        if (low < 0 || byte < ' ' || byte == 0x7f)
            return false;
        *to++ = (char)byte;
        p += 2;
    }
    *to = '\0';
    return true;
}

bool target_split(char *uri, char **segment, size_t max, size_t *segments, const char **query, bool *too_many)
{
    *segments = 0;
    *query = NULL;
    *too_many = false;
    size_t scheme = strncasecmp(uri, "http://", 7) == 0 ? 7 : strncasecmp(uri, "https://", 8) == 0 ? 8 : 0;
    char *mark = strchr(uri, '?');
    if (mark) {
        *mark = '\0';
        *query = mark + 1;
    }
    if (scheme) {
        uri = strchr(uri + scheme, '/');
        if (!uri)
            return true;
    }
    if (*uri != '/')
        return false;
    while (uri) {
        uri++;
        if (*segments == max) {
            *too_many = true;
            return false;
        }
        char *next = strchr(uri, '/');
        if (next)
            *next = '\0';
        segment[(*segments)++] = uri;
        if (!target_decode(uri))
            return false;
        uri = next;
    }
    return true;
}

char *target_query(const char *query, const char *name)
{
    size_t length = strlen(name);
    for (const char *p = query; p && *p;) {
        const char *end = strchrnul(p, '&');
        if (strncmp(p, name, length) == 0 && p[length] == '=' && p + length < end) {
            char *value = strndup(p + length + 1, (size_t)(end - p) - length - 1);
            if (value && !target_decode(value))
                value[0] = '\0';
            return value;
        }
        p = *end ? end + 1 : NULL;
    }
    return NULL;
}
