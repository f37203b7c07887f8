/* SPDX-License-Identifier: Apache-2.0
 *
 * Faults, warnings and quoted text of the adapter reader.
 */
#include "engine/peft.h"

#include <stdlib.h>
#include <string.h>

bool peft_fault_error(struct peft_log *log, const struct engine_error *error)
{
    if (log->first == ENGINE_OK) {
        log->first = error->code;
        log->error = *error;
    }
    if (log->report)
        fprintf(log->report, "%s\n", error->message);
    return log->report && error->code != ENGINE_OUT_OF_MEMORY;
}

bool peft_fault(struct peft_log *log, enum engine_code code, const char *format, ...)
{
    struct engine_error error;
    va_list args;
    va_start(args, format);
    engine_vfail(&error, code, format, args);
    va_end(args);
    return peft_fault_error(log, &error);
}

bool peft_warn(struct peft_log *log, const char *format, ...)
{
    if (log->warning_count == PEFT_MAX_WARNINGS) {
        log->warnings_dropped++;
        return true;
    }
    char *text = NULL;
    va_list args;
    va_start(args, format);
    int len = vasprintf(&text, format, args);
    va_end(args);
    char **grown = len < 0 ? NULL : reallocarray(log->warnings, (size_t)log->warning_count + 1, sizeof *grown);
    if (!grown) {
        if (len >= 0)
            free(text);
        return peft_fault(log, ENGINE_OUT_OF_MEMORY, "out of memory while noting a warning");
    }
    log->warnings = grown;
    log->warnings[log->warning_count++] = text;
    return true;
}

enum engine_code peft_log_result(const struct peft_log *log, struct engine_error *error)
{
    if (log->first != ENGINE_OK && error)
        *error = log->error;
    return log->first;
}

void peft_log_finish(struct peft_log *log)
{
    for (int32_t i = 0; i < log->warning_count; i++)
        free(log->warnings[i]);
    free(log->warnings);
    log->warnings = NULL;
    log->warning_count = 0;
}

struct peft_text peft_quote(const char *text, size_t len)
{
    struct peft_text out;
    size_t room = sizeof out.s - 4, n = len < room ? len : room;
    while (n < len && n && ((unsigned char)text[n] & 0xc0) == 0x80)
        n--;
    memcpy(out.s, text, n);
    memcpy(out.s + n, n < len ? "..." : "", n < len ? 4 : 1);
    return out;
}
