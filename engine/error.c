/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/error.h"

#include <stdio.h>

enum engine_code engine_vfail(struct engine_error *e, enum engine_code code, const char *format, va_list args)
{
    if (e) {
        e->code = code;
        vsnprintf(e->message, sizeof e->message, format, args);
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
    case ENGINE_IO: return "io_error";
    case ENGINE_INTERNAL: return "internal";
    }
    return "internal";
}
