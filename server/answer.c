/* SPDX-License-Identifier: Apache-2.0
 *
 * Answers: errors in the two shapes clients know, and the translation of lower layers' errors to status and code.
 */
#include "proto-json/proto.h"
#include "server/http.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void http_fail(struct http_request *r, int status, const char *code, const char *format, ...)
{
    va_list args;
    if (r->status)
        return; /* the first one counts */
    va_start(args, format);
    vsnprintf(r->message, sizeof r->message, format, args);
    va_end(args);
    r->status = status;
    r->code = code;
}

/* vLLM's names for kinds of errors. */
static const char *answer_vllm_type(const struct http_request *r)
{
    switch (r->status) {
    case 400: return strcmp(r->code, "bad_request") == 0 || strcmp(r->code, "adapter_exists") == 0 ? "InvalidUserInput" : "BadRequestError";
    case 401: return "AuthenticationError";
    case 403: return "PermissionDeniedError";
    case 404: return "NotFoundError";
    case 429: return "RateLimitError";
    default: return r->status < 500 ? "BadRequestError" : "InternalServerError";
    }
}

char *http_error_body(const struct http_request *r, size_t *length)
{
    if (r->route && r->route->vllm)
        return proto_vllm_error_json(r->message, answer_vllm_type(r), r->status, length);
    return proto_error_json(r->message, r->code, r->id, length);
}

void http_fail_memory(struct http_request *r) { http_fail(r, 500, "internal", "out of memory"); }

int http_engine_status(enum engine_code code, const char **name)
{
    *name = engine_code_name(code);
    switch (code) {
    case ENGINE_OK: return 200;
    case ENGINE_BAD_ADAPTER:
    case ENGINE_ADAPTER_UNSUPPORTED:
    case ENGINE_BAD_REQUEST: return 400;
    case ENGINE_FORBIDDEN_PATH: return 403;
    case ENGINE_ADAPTER_NOT_FOUND:
    case ENGINE_LAYER_NOT_FOUND: return 404;
    case ENGINE_ADAPTER_EXISTS: return 409;
    case ENGINE_TOO_LARGE: return 413;
    case ENGINE_QUEUE_FULL: return 429;
    case ENGINE_DRAINING:
    case ENGINE_DEVICE_FAILED: return 503;
    case ENGINE_DEADLINE_EXCEEDED: return 504;
    case ENGINE_OUT_OF_DEVICE_MEMORY:
    case ENGINE_ADAPTER_SLOTS_FULL: return 507;
    case ENGINE_BAD_OPTION:
    case ENGINE_BAD_CHECKPOINT:
    case ENGINE_CANCELLED:
    case ENGINE_OUT_OF_MEMORY:
    case ENGINE_NO_FILE:
    case ENGINE_IO:
    case ENGINE_INTERNAL: break;
    }
    *name = "internal";
    return 500;
}

void http_fail_engine(struct http_request *r, const struct engine_error *error)
{
    const char *name;
    int status = http_engine_status(error->code, &name);
    http_fail(r, status, name, "%s", error->message);
}

void http_fail_proto(struct http_request *r, const struct proto_error *error)
{
    int status = error->code == PROTO_NON_FINITE_OUTPUT ? 422 : error->code == PROTO_OUT_OF_MEMORY ? 500 : 400;
    http_fail(r, status, status == 500 ? "internal" : proto_code_name(error->code), "%s", error->message);
}

void http_reply_response(struct http_request *r, int status, struct MHD_Response *response, int64_t bytes)
{
    if (!response) {
        http_fail_memory(r);
        return;
    }
    r->status = status;
    r->response = response;
    r->bytes_out = bytes;
}

void http_reply(struct http_request *r, int status, const char *content_type, char *body, size_t length)
{
    struct MHD_Response *response = body ? MHD_create_response_from_buffer(length, body, MHD_RESPMEM_MUST_FREE) : NULL;
    if (!response)
        free(body);
    else if (content_type)
        MHD_add_response_header(response, "Content-Type", content_type);
    http_reply_response(r, status, response, (int64_t)length);
}

void http_reply_json(struct http_request *r, int status, json_t *tree)
{
    size_t length = 0;
    char *text = proto_dump(tree, &length);
    http_reply(r, status, "application/json", text, length);
}
