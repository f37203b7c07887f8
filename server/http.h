/* SPDX-License-Identifier: Apache-2.0
 *
 * HTTP as the handlers see it: one struct for each request, from its head to the end of its answer.
 *
 * A request belongs to the listener thread that runs its connection, except while it is suspended: then whoever will call http_resume
 * owns it. Handlers run on listener threads and must not block; what blocks goes to http_offload. Every request is answered exactly
 * once, by http_fail or http_reply*, or its connection is closed because the client has gone.
 */
#ifndef EXPERTD_SERVER_HTTP_H
#define EXPERTD_SERVER_HTTP_H

#include "server/auth.h"
#include "server/metrics.h"
#include "server/server.h"
#include "server/watch.h"
#include "server/workers.h"

#include <jansson.h>
#include <microhttpd.h>

#define HTTP_MAX_SEGMENTS 8
#define HTTP_CONTROL_MAX ((size_t)1 << 20) /* bytes of a control call's body */

struct http_request;
struct http_thread;

/* How a body is received. `begin` sees the head (r->length, or -1 when chunked) and may fail the request; `data` takes each piece
 * in order and may fail it; then the route's handler runs. */
struct http_body_ops {
    bool (*begin)(struct http_request *r);
    bool (*data)(struct http_request *r, const char *data, size_t size);
    void (*destroy)(struct http_request *r); /* frees r->state; also after a success */
};

struct http_method {
    const char *name;
    enum auth_level level;
    bool always; /* also while loading and draining */
    const struct http_body_ops *body; /* NULL: a body is read and ignored */
    void (*handle)(struct http_request *r);
};

struct http_route {
    const char *pattern; /* segments; "{}" matches any one segment */
    bool vllm; /* errors as vLLM's clients expect them */
    struct http_method method[3];
};

enum http_stage { HTTP_NEW, HTTP_BODY, HTTP_WAITING, HTTP_HANDLED };

struct http_request {
    struct server *server;
    struct connection *connection;
    struct MHD_Connection *mhd;
    char *uri; /* a copy, which segments and query point into */
    const char *raw_uri; /* where it stands in libmicrohttpd's buffer, as long as the request lasts */
    size_t raw_length;
    char *segment[HTTP_MAX_SEGMENTS]; /* of the path, decoded */
    size_t segments;
    const char *query; /* raw; NULL: none */
    char method_name[16];
    char id[HTTP_REQUEST_ID_MAX + 1];
    const struct http_route *route;
    const struct http_method *method;
    enum http_stage stage;
    bool started; /* counted in server->requests and the metrics */

    int64_t length; /* of the body; -1 chunked */
    int64_t received;
    int64_t json_length; /* Inference-Header-Content-Length, or -1 */

    /* The answer. */
    int status; /* 0: none yet */
    struct MHD_Response *response; /* NULL for errors until they are sent */
    const char *code; /* of an error */
    char message[600];
    char allow[32]; /* with 405 */
    bool close;
    int64_t bytes_out;

    void *state; /* of the route's body ops, which free it */
    void *work_state; /* of a handler; work_destroy, when set, frees it */
    void (*work_destroy)(struct http_request *r);
    void (*resume)(struct http_request *r); /* runs on the listener thread after http_resume */
    struct http_thread *thread; /* that has suspended it */
    struct workers *workers;
    struct workers_job job;
    void (*work)(struct http_request *r);

    /* For log and metrics. */
    int64_t head_ns, body_ns, done_ns, reply_ns;
    int64_t layer, rows, adapters, queue_us, compute_us;
    const char *path;
    const char *adapter; /* that an adapter call names; alive as long as the request */
    bool infer;
};

/* ---- answers ------------------------------------------------------------------------------------------------ */

void http_fail(struct http_request *r, int status, const char *code, const char *format, ...) __attribute__((format(printf, 4, 5)));
void http_fail_memory(struct http_request *r);
/* An engine's error, with its own sentence. */
void http_fail_engine(struct http_request *r, const struct engine_error *error);
struct proto_error;
void http_fail_proto(struct http_request *r, const struct proto_error *error);
/* The status of an engine code, and the code HTTP calls it by. */
int http_engine_status(enum engine_code code, const char **name);

/* `body` is malloc'ed and taken. */
void http_reply(struct http_request *r, int status, const char *content_type, char *body, size_t length);
/* Takes the reference; NULL is answered as out of memory. */
void http_reply_json(struct http_request *r, int status, json_t *tree);
/* Takes a response made by the caller; NULL is out of memory. */
void http_reply_response(struct http_request *r, int status, struct MHD_Response *response, int64_t bytes);

/* ---- waiting ------------------------------------------------------------------------------------------------ */

/* Runs `work` on one of the workers' threads with the connection suspended, then, unless it has answered, `resume` here. */
void http_offload(struct http_request *r, struct workers *workers, void (*work)(struct http_request *r),
                  void (*resume)(struct http_request *r));
/* Suspends around `start`, which hands the request to someone: true means that http_resume will be called, false that it has failed
 * the request. `cancel` (NULL: none) is called if the client goes away in between, with the connection's lock held. False when the
 * client has gone already: nothing was started and there is nothing to answer. */
bool http_suspend(struct http_request *r, bool (*start)(struct http_request *r), void (*cancel)(struct http_request *r),
                  void (*resume)(struct http_request *r));
void http_resume(struct http_request *r); /* any thread; the request is not the caller's any more */
/* After http_suspend, where nobody else needs this processor: looks out for http_resume for up to 0.5 ms before the thread may sleep,
 * because to be woken takes longer. Only a thread that has no other connection does so, and only few at a time. */
void http_look_out(void);

/* ---- the request ---------------------------------------------------------------------------------------------- */

const char *http_header(struct http_request *r, const char *name); /* NULL: absent */
/* A query parameter, decoded, malloc'ed; NULL: absent. */
char *http_query(struct http_request *r, const char *name);
/* A body of at most HTTP_CONTROL_MAX bytes in memory. */
extern const struct http_body_ops http_body_control;
const char *http_control_body(const struct http_request *r, size_t *length);

/* The body of the error that r->code and r->message describe, malloc'ed; NULL: no memory. */
char *http_error_body(const struct http_request *r, size_t *length);

/* ---- the daemon ----------------------------------------------------------------------------------------------- */

struct listener_set;
struct http;
/* Starts serving on every listener. NULL: `message` says why. */
struct http *http_start(struct server *server, struct listener_set *listeners, char *message, size_t size);
/* Closes every connection; none may be suspended. NULL is fine. */
void http_stop(struct http *http);

#endif
