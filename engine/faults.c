/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/faults.h"

#include <inttypes.h>

/* One damaged file can break a hundred thousand tensors; nobody reads so many lines. */
#define MAX_LINES 200

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

enum engine_code faults_finish(struct faults *faults, struct engine_error *error)
{
    if (!faults->count)
        return ENGINE_OK;
    if (faults->report && faults->count > MAX_LINES)
        fprintf(faults->report, "... and %" PRId64 " more\n", faults->count - MAX_LINES);
    if (error)
        *error = faults->first;
    return faults->first.code;
}
