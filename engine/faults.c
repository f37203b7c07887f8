/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/faults.h"

#include <inttypes.h>
#include <stdlib.h>

/* One damaged file can break a hundred thousand tensors; nobody reads so many lines. */
#define MAX_LINES 200
#define MAX_WARNINGS 32

bool faults_add_error(struct faults *faults, const struct engine_error *error)
{
    if (!faults->count++)
        faults->first = *error;
    if (faults->report && faults->count <= MAX_LINES)
        fprintf(faults->report, "%s\n", error->message);
    return faults->report && error->code != ENGINE_OUT_OF_MEMORY;
}

bool faults_add(struct faults *faults, enum engine_code code, const char *format, ...)
{
    struct engine_error e;
    va_list args;
    va_start(args, format);
    engine_vfail(&e, code, format, args);
    va_end(args);
    return faults_add_error(faults, &e);
}

static void drop_warnings(struct faults *faults)
{
    for (int32_t i = 0; i < faults->warning_count; i++)
        free(faults->warnings[i]);
    free(faults->warnings);
    faults->warnings = NULL;
    faults->warning_count = 0;
}

bool faults_warn(struct faults *faults, const char *format, ...)
{
    if (faults->warning_count == MAX_WARNINGS) {
        faults->warnings_dropped++;
        return true;
    }
    char *text = NULL;
    va_list args;
    va_start(args, format);
    int len = vasprintf(&text, format, args);
    va_end(args);
    char **grown = len < 0 ? NULL : reallocarray(faults->warnings, (size_t)faults->warning_count + 1, sizeof *grown);
    if (!grown) {
        if (len >= 0)
            free(text);
        return faults_add(faults, ENGINE_OUT_OF_MEMORY, "out of memory while noting a warning");
    }
    faults->warnings = grown;
    faults->warnings[faults->warning_count++] = text;
    return true;
}

int32_t faults_take_warnings(struct faults *faults, char ***warnings)
{
    int32_t count = faults->warning_count;
    if (faults->warnings_dropped) {
        char **last = &faults->warnings[count - 1];
        free(*last);
        if (asprintf(last, "%d more warnings", faults->warnings_dropped + 1) < 0)
            count--;
    }
    *warnings = faults->warnings;
    faults->warnings = NULL;
    faults->warning_count = 0;
    return count;
}

enum engine_code faults_finish(struct faults *faults, struct engine_error *error)
{
    if (!faults->count)
        return ENGINE_OK;
    drop_warnings(faults);
    if (faults->report && faults->count > MAX_LINES)
        fprintf(faults->report, "... and %" PRId64 " more\n", faults->count - MAX_LINES);
    if (error)
        *error = faults->first;
    return faults->first.code;
}
