/* SPDX-License-Identifier: Apache-2.0
 *
 * POST /moe/forward and the OIP infer call: receives the body into staging memory, which grows with what arrives, hands a checked request
 * to the engine with the connection suspended, and sends the answer from where the engine wrote it.
 */
#include "server/forward.h"

#include "server/handlers.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define FORWARD_STEP 16 /* a body's memory grows so many times at once */
/* JSON longer than this, and answers with more numbers in JSON than this takes bytes, are left to other threads: a listener's thread has
 * other connections, too. It is some milliseconds' work. */
#define FORWARD_LONG ((size_t)1 << 20)

/* ---- the body --------------------------------------------------------------------------------------------------- */

/* Staging memory that the request holds by now. */
static size_t forward_held(const struct forward *f)
{
    size_t held = f->capacity;
    for (int32_t i = 0; i < f->infer.inputs; i++) {
        const struct proto_tensor *tensor = &f->infer.input[i];
        held += tensor->owned && tensor->dtype != DTYPE_BYTES ? tensor->bytes : 0;
    }
    return held;
}

/* Whether the staging memory's answer is yes; else the request has failed. Who could not have so much even alone is not told to try again. */
static bool forward_granted(struct http_request *r, enum engine_code code, size_t bytes)
{
    int64_t limit = r->server->options->max_inflight_bytes;
    size_t needed = forward_held(r->state) + bytes;
    if (code == ENGINE_OK)
        return true;
    if (code == ENGINE_TOO_LARGE || (code == ENGINE_QUEUE_FULL && needed > (uint64_t)limit))
        http_fail(r, 413, "too_large", "the request needs %zu bytes of memory; --max-inflight-bytes allows %" PRId64, needed, limit);
    else if (code == ENGINE_QUEUE_FULL)
        http_fail(r, 429, "too_many_bytes_in_flight",
                  "the request needs %zu bytes of memory; too many of the %" PRId64 " of --max-inflight-bytes are taken; try again", needed,
                  limit);
    else
        http_fail_memory(r);
    return false;
}

bool forward_acquire(struct http_request *r, struct forward *f, size_t bytes, void **out)
{
    return forward_granted(r, engine_staging_acquire(f->engine, bytes, out), bytes);
}

static bool forward_begin(struct http_request *r)
{
    int64_t limit = r->server->options->max_body_bytes;
    r->infer = true;
    if (r->length > limit) {
        http_fail(r, 413, "too_large", "the body has %" PRId64 " bytes; --max-body-bytes allows %" PRId64, r->length, limit);
        return false;
    }
    if (!model_named(r))
        return false;
    struct forward *f = calloc(1, sizeof *f);
    if (!f) {
        http_fail_memory(r);
        return false;
    }
    r->state = f;
    f->engine = server_engine(r->server);
    /* Nothing is taken by a head alone; but what can't be had now is better refused before it is sent. */
    return r->length < 0 || forward_granted(r, engine_staging_check(f->engine, (size_t)r->length), (size_t)r->length);
}

/* The memory to hold for a body of which so many bytes have come: the whole if that is at most FORWARD_STEP times as much, so that nobody
 * holds much with little, else a power of FORWARD_STEP less, so that what is copied on the way is a small part of the whole. The whole of a
 * chunked one is not known: twice as much, for a copy that stays linear. */
static size_t forward_room(const struct http_request *r, size_t come)
{
    size_t limit = (size_t)r->server->options->max_body_bytes, room = (size_t)r->length;
    if (r->length < 0)
        return 2 * come < limit ? 2 * come : limit;
    while (room / FORWARD_STEP >= come)
        room /= FORWARD_STEP;
    return room;
}

static bool forward_data(struct http_request *r, const char *data, size_t size)
{
    struct forward *f = r->state;
    size_t limit = (size_t)r->server->options->max_body_bytes;
    if (size > limit - f->length) {
        http_fail(r, 413, "too_large", "the body has more than the %zu bytes that --max-body-bytes allows", limit);
        return false;
    }
    if (size > f->capacity - f->length) {
        size_t wanted = forward_room(r, f->length + size);
        void *grown;
        if (!forward_acquire(r, f, wanted, &grown))
            return false;
        if (f->length)
            memcpy(grown, f->body, f->length);
        engine_staging_release(f->engine, f->body);
        f->body = grown;
        f->capacity = wanted;
    }
    memcpy(f->body + f->length, data, size);
    f->length += size;
    return true;
}

static void forward_destroy(struct http_request *r)
{
    struct forward *f = r->state;
    if (!f)
        return;
    forward_release_adapters(f);
    if (f->parsed)
        proto_infer_finish(&f->infer);
    engine_staging_release(f->engine, f->work);
    engine_staging_release(f->engine, f->body);
    free(f);
}

const struct http_body_ops forward_body = {forward_begin, forward_data, forward_destroy};

/* ---- the answer -------------------------------------------------------------------------------------------------- */

/* What a response that is being sent holds on to. */
struct forward_reply {
    struct engine *engine;
    void *work;
    char *json;
};

static void forward_reply_free(void *arg)
{
    struct forward_reply *reply = arg;
    engine_staging_release(reply->engine, reply->work);
    free(reply->json);
    free(reply);
}

static void forward_reply_binary(struct http_request *r, struct forward *f, char *json, size_t json_length, size_t bytes)
{
    struct forward_reply *reply = malloc(sizeof *reply);
    struct MHD_Response *response = NULL;
    if (reply)
        *reply = (struct forward_reply){f->engine, f->work, json};
    if (reply && json_length <= f->room) {
        /* libmicrohttpd sends a buffer together with the headers, which saves a packet, but pieces behind them. */
        char *start = (char *)f->out - json_length;
        memcpy(start, json, json_length);
        response = MHD_create_response_from_buffer_with_free_callback_cls(json_length + bytes, start, forward_reply_free, reply);
    } else if (reply) {
        struct MHD_IoVec piece[2] = {{json, json_length}, {f->out, bytes}};
        response = MHD_create_response_from_iovec(piece, 2, forward_reply_free, reply);
    }
    if (!response) {
        free(reply);
        free(json);
        http_fail_memory(r);
        return;
    }
    f->work = NULL; /* the response's now */
    char text[24];
    snprintf(text, sizeof text, "%zu", json_length);
    MHD_add_response_header(response, "Content-Type", "application/octet-stream");
    MHD_add_response_header(response, "Inference-Header-Content-Length", text);
    http_reply_response(r, 200, response, (int64_t)(json_length + bytes));
}

static void forward_answer(struct http_request *r)
{
    struct forward *f = r->state;
    struct proto_error error;
    char *json;
    size_t length;
    struct proto_answer answer = {
        .model_name = r->server->model_name,
        .id = f->infer.id,
        .path = r->path,
        .layer = f->layer,
        .rows = f->rows,
        .hidden_size = engine_model(f->engine)->hidden_size,
        .queue_us = r->queue_us,
        .compute_us = r->compute_us,
        .dtype = f->request.dtype,
        .data = f->out,
        .binary = f->infer.binary_output,
    };
    /* The body's memory is free for others while the answer is sent. */
    engine_staging_release(f->engine, f->body);
    f->body = NULL;
    if (proto_answer_write(&answer, &json, &length, &error) != PROTO_OK)
        http_fail_proto(r, &error);
    else if (answer.binary)
        forward_reply_binary(r, f, json, length, (size_t)answer.rows * (size_t)answer.hidden_size * dtype_size(answer.dtype));
    else
        http_reply(r, 200, "application/json", json, length);
}

static void forward_fail(struct http_request *r, enum engine_code code)
{
    const char *name;
    int status = http_engine_status(code, &name);
    switch (code) {
    case ENGINE_DEADLINE_EXCEEDED:
        http_fail(r, status, name, "the request waited longer than --request-timeout-s (%" PRId64 " s)",
                  r->server->options->request_timeout_s);
        break;
    case ENGINE_DRAINING: http_fail(r, status, name, "the server is shutting down"); break;
    case ENGINE_DEVICE_FAILED: http_fail(r, status, name, "the device has failed; this server is about to exit"); break;
    default: http_fail(r, status, name, "the engine could not compute the request: %s", engine_code_name(code));
    }
}

static void forward_resume(struct http_request *r)
{
    struct forward *f = r->state;
    const struct engine_request *q = &f->request;
    forward_release_adapters(f);
    if (q->status == ENGINE_CANCELLED)
        return; /* nobody is there to answer */
    r->queue_us = q->queue_ns / 1000;
    r->compute_us = q->compute_ns / 1000;
    if (q->status != ENGINE_OK) {
        forward_fail(r, q->status);
        return;
    }
    r->path = q->path == ENGINE_DECODE ? "decode" : "prefill";
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    atomic_store_explicit(&r->server->last_inference_ms, (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000, memory_order_relaxed);
    if (!f->infer.binary_output && (size_t)f->rows * (size_t)engine_model(f->engine)->hidden_size > FORWARD_LONG / 8)
        http_offload(r, r->server->parsers, forward_answer, NULL);
    else
        forward_answer(r);
}

/* ---- waiting ------------------------------------------------------------------------------------------------------ */

static void forward_done(struct engine_request *q) { http_resume(q->user); }

static bool forward_submit(struct http_request *r)
{
    struct forward *f = r->state;
    struct engine_error error;
    if (engine_submit(f->engine, &f->request, &error) == ENGINE_OK)
        return true;
    http_fail_engine(r, &error);
    return false;
}

static void forward_cancel(struct http_request *r)
{
    struct forward *f = r->state;
    engine_cancel(f->engine, &f->request);
}

/* Memory for the tensors that came as JSON: counted like that of bodies, and the device copies from it as fast. */
static void *forward_take(void *context, size_t bytes)
{
    struct http_request *r = context;
    void *memory;
    return forward_acquire(r, r->state, bytes, &memory) ? memory : NULL;
}

static void forward_give(void *context, void *memory)
{
    struct http_request *r = context;
    engine_staging_release(((struct forward *)r->state)->engine, memory);
}

/* Whatever goes wrong is the request's answer. */
static void forward_parse(struct http_request *r)
{
    struct forward *f = r->state;
    struct proto_caller caller = {forward_take, forward_give, forward_look, r};
    struct proto_error error;
    f->parsed = true;
    if (proto_infer_parse(f->body ? f->body : "", f->length, r->json_length, &caller, &f->infer, &error) == PROTO_OK)
        forward_prepare(r, f);
    else if (!r->status)
        http_fail_proto(r, &error);
}

static void forward_wait(struct http_request *r)
{
    struct forward *f = r->state;
    struct engine *engine = f->engine;
    f->request.deadline_ns = server_now_ns() + r->server->options->request_timeout_s * INT64_C(1000000000);
    f->request.done = forward_done;
    f->request.user = r;
    r->body_ns = server_now_ns();
    bool waits = http_suspend(r, forward_submit, forward_cancel, forward_resume);
    if (waits && strcmp(engine_model(engine)->device, "cpu") != 0)
        http_look_out();
}

void forward_handle(struct http_request *r)
{
    const struct forward *f = r->state;
    size_t json = r->json_length >= 0 ? (size_t)r->json_length : f->length;
    if (json > FORWARD_LONG) {
        http_offload(r, r->server->parsers, forward_parse, forward_wait);
        return;
    }
    forward_parse(r);
    if (!r->status)
        forward_wait(r);
}
