/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/selection.h"

#include <ctype.h>
#include <stdlib.h>

static const char *parse_number(const char *s, int32_t *out)
{
    if (!isdigit((unsigned char)*s))
        return NULL;
    int64_t v = 0;
    for (; isdigit((unsigned char)*s); s++) {
        v = v * 10 + (*s - '0');
        if (v > INT32_MAX)
            return NULL;
    }
    *out = (int32_t)v;
    return s;
}

enum engine_code selection_parse(const char *text, const char *option, struct selection *out, struct engine_error *error)
{
    out->all = !text;
    out->ranges = 0;
    for (const char *s = text; s;) {
        if (out->ranges == SELECTION_MAX_RANGES)
            return engine_fail(error, ENGINE_BAD_OPTION, "%s: more than %d ranges", option, SELECTION_MAX_RANGES);
        int32_t first, last;
        s = parse_number(s, &first);
        last = first;
        if (s && *s == '-')
            s = parse_number(s + 1, &last);
        if (!s || (*s && *s != ','))
            return engine_fail(error, ENGINE_BAD_OPTION, "%s: \"%.200s\" is not a list of numbers and ranges like 0-3,7", option, text);
        if (last < first)
            return engine_fail(error, ENGINE_BAD_OPTION, "%s: the range %d-%d is reversed", option, first, last);
        out->range[out->ranges].first = first;
        out->range[out->ranges++].last = last;
        s = *s ? s + 1 : NULL;
    }
    return ENGINE_OK;
}

bool selection_has(const struct selection *selection, int64_t number)
{
    for (int32_t i = 0; i < selection->ranges; i++)
        if (number >= selection->range[i].first && number <= selection->range[i].last)
            return true;
    return selection->all;
}
