/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/error.h"

#include <errno.h>
#include <stdio.h>

/* Bytes of the UTF-8 sequence at p, 0 when it is none. */
static int sequence_length(const unsigned char *p)
{
    int n = p[0] < 0x80 ? 1 : p[0] >= 0xc2 && p[0] < 0xe0 ? 2 : p[0] >= 0xe0 && p[0] < 0xf0 ? 3 : p[0] >= 0xf0 && p[0] < 0xf5 ? 4 : 0;
    for (int i = 1; i < n; i++)
        if ((p[i] & 0xc0) != 0x80)
            return 0;
    if ((p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xed && p[1] > 0x9f) || (p[0] == 0xf0 && p[1] < 0x90) || (p[0] == 0xf4 && p[1] > 0x8f))
        return 0;
    return n;
}

/* Messages quote names out of strangers' files, cut at any byte: what is no text, or would break a line of the log, becomes '?'. */
static void make_printable(char *message)
{
    for (unsigned char *p = (unsigned char *)message; *p;) {
        int n = sequence_length(p);
        if (!n || *p < 0x20 || *p == 0x7f) {
            *p++ = '?';
            continue;
        }
        p += n;
    }
}

enum engine_code engine_vfail(struct engine_error *e, enum engine_code code, const char *format, va_list args)
{
    if (e) {
        e->code = code;
        vsnprintf(e->message, sizeof e->message, format, args);
        make_printable(e->message);
    }
    return code;
}

enum engine_code engine_fail(struct engine_error *e, enum engine_code code, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    engine_vfail(e, code, format, args);
    va_end(args);
    return code;
}

enum engine_code engine_errno_code(int number)
{
    switch (number) {
    case ENOENT:
    case ENOTDIR:
    case EISDIR:
    case EACCES:
    case EPERM:
    case ELOOP:
    case ENAMETOOLONG:
    case ENXIO: /* a socket's name */ return ENGINE_NO_FILE;
    case ENOMEM:
    case EMFILE:
    case ENFILE: return ENGINE_OUT_OF_MEMORY;
    default: return ENGINE_IO;
    }
}

const char *engine_code_name(enum engine_code code)
{
    switch (code) {
    case ENGINE_OK: return "ok";
    case ENGINE_BAD_OPTION: return "bad_option";
    case ENGINE_BAD_CHECKPOINT: return "bad_checkpoint";
    case ENGINE_BAD_ADAPTER: return "bad_adapter";
    case ENGINE_ADAPTER_UNSUPPORTED: return "adapter_unsupported";
    case ENGINE_FORBIDDEN_PATH: return "forbidden_path";
    case ENGINE_BAD_REQUEST: return "bad_request";
    case ENGINE_ADAPTER_EXISTS: return "adapter_exists";
    case ENGINE_ADAPTER_NOT_FOUND: return "adapter_not_found";
    case ENGINE_LAYER_NOT_FOUND: return "layer_not_found";
    case ENGINE_TOO_LARGE: return "too_large";
    case ENGINE_QUEUE_FULL: return "queue_full";
    case ENGINE_DEADLINE_EXCEEDED: return "deadline_exceeded";
    case ENGINE_CANCELLED: return "cancelled";
    case ENGINE_DRAINING: return "draining";
    case ENGINE_DEVICE_FAILED: return "device_failed";
    case ENGINE_OUT_OF_MEMORY: return "out_of_memory";
    case ENGINE_OUT_OF_DEVICE_MEMORY: return "out_of_device_memory";
    case ENGINE_ADAPTER_SLOTS_FULL: return "adapter_slots_full";
    case ENGINE_NO_FILE: return "no_file";
    case ENGINE_IO: return "io_error";
    case ENGINE_INTERNAL: return "internal";
    }
    return "internal";
}
