/* SPDX-License-Identifier: Apache-2.0
 *
 * libmicrohttpd's callbacks: the life of connections and requests.
 *
 * Order of checks on a head: framing, route, method, encoding, key, readiness, length. A request without a body is answered in the
 * library's second call, which keeps the connection usable; one with a body that is refused from its head is answered in the first, before
 * a 100 Continue could go out, and its connection closes, with the watch reading on for a while. What goes wrong while a body comes in
 * is answered by hand (watch_cut), since the library takes no answer then.
 */
#include "server/http.h"

#include "server/framing.h"
#include "server/listener.h"
#include "server/log.h"
#include "server/reply.h"
#include "server/route.h"
#include "server/target.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>

#define HTTP_SECOND INT64_C(1000000000)
#define HTTP_IDLE_S 75 /* between two requests, and without progress in a body or reply */
#define HTTP_HEAD_S 10 /* from a request line to the head's end, and from accept to a head */
#define HTTP_SLOWEST (1 << 20) /* bytes a second that bodies and replies are given on top of --request-timeout-s */
#define HTTP_MEMORY (128 << 10) /* of a connection: the size that measured best for bodies of half a MiB */
/* Listeners' threads for each processor, and at most: connections fall to threads by chance, and those that share one wait for each other. */
#define HTTP_THREADS_EACH 4
#define HTTP_THREADS_MAX 64
#define HTTP_TARGET_SHOWN 128 /* bytes of a path in the log */
#define HTTP_UNIX_BUFFER (1 << 20) /* of an answer on a Unix socket, what need not wait for the client to read */
#define HTTP_LOOK_OUT_NS 500000
#define HTTP_LOOKOUTS 4 /* a thread for so many processors may look out */

/* A listener's thread. It outlives whatever counts as suspended. */
struct http_thread {
    int connections;
    atomic_uint resumed; /* requests, so far */
    unsigned before; /* `resumed` when it suspended one last */
};
static _Thread_local struct http_thread http_thread;
static atomic_int http_lookouts; /* how many more threads may look out */

struct http_daemon {
    struct server *server;
    const struct listener *listener;
    struct MHD_Daemon *mhd;
};

struct http {
    size_t count;
    struct http_daemon daemon[];
};

static int64_t http_limit_ns(const struct server *server, int64_t bytes)
{
    return server->options->request_timeout_s * HTTP_SECOND + bytes * (HTTP_SECOND / HTTP_SLOWEST);
}

static int64_t http_head_limit_ns(const struct server *server)
{
    return (server->options->request_timeout_s < HTTP_HEAD_S ? server->options->request_timeout_s : HTTP_HEAD_S) * HTTP_SECOND;
}

/* ---- small things about a request ----------------------------------------------------------------------------- */

const char *http_header(struct http_request *r, const char *name) { return MHD_lookup_connection_value(r->mhd, MHD_HEADER_KIND, name); }

char *http_query(struct http_request *r, const char *name) { return target_query(r->query, name); }

static void http_take_id(struct http_request *r)
{
    const char *given = http_header(r, "X-Request-Id");
    size_t length = given ? strlen(given) : 0;
    bool good = length >= 1 && length <= HTTP_REQUEST_ID_MAX;
    for (size_t i = 0; good && i < length; i++)
        good = given[i] >= ' ' && given[i] <= '~';
    if (good)
        memcpy(r->id, given, length + 1);
    else
        reply_new_id(r->id);
}

/* ---- bodies of control calls ------------------------------------------------------------------------------------ */

struct http_control {
    size_t length, capacity;
    char text[];
};

static bool http_control_begin(struct http_request *r)
{
    if (r->length > (int64_t)HTTP_CONTROL_MAX) {
        http_fail(r, 413, "too_large", "the body has %lld bytes; this call takes at most %zu", (long long)r->length, HTTP_CONTROL_MAX);
        return false;
    }
    size_t capacity = r->length > 0 ? (size_t)r->length : 4096;
    struct http_control *body = malloc(sizeof *body + capacity);
    if (!body) {
        http_fail_memory(r);
        return false;
    }
    body->length = 0;
    body->capacity = capacity;
    r->state = body;
    return true;
}

static bool http_control_data(struct http_request *r, const char *data, size_t size)
{
    struct http_control *body = r->state;
    if (size > HTTP_CONTROL_MAX - body->length) {
        http_fail(r, 413, "too_large", "the body has more than %zu bytes", HTTP_CONTROL_MAX);
        return false;
    }
    if (size > body->capacity - body->length) {
        size_t capacity = 2 * (body->length + size);
        struct http_control *grown = realloc(body, sizeof *body + capacity);
        if (!grown) {
            http_fail_memory(r);
            return false;
        }
        body = r->state = grown;
        body->capacity = capacity;
    }
    memcpy(body->text + body->length, data, size);
    body->length += size;
    return true;
}

static void http_control_destroy(struct http_request *r) { free(r->state); }

const struct http_body_ops http_body_control = {http_control_begin, http_control_data, http_control_destroy};

const char *http_control_body(const struct http_request *r, size_t *length)
{
    const struct http_control *body = r->state;
    *length = body->length;
    return body->text;
}

/* ---- the head --------------------------------------------------------------------------------------------------- */

static void http_check_key(struct http_request *r)
{
    switch (auth_check(r->server->auth, r->method->level, http_header(r, "Authorization"), r->connection->local)) {
    case AUTH_ALLOWED: break;
    case AUTH_NO_KEY: http_fail(r, 401, "unauthorized", "this call needs a key: Authorization: Bearer KEY"); break;
    case AUTH_WRONG_KEY: http_fail(r, 401, "unauthorized", "the key is wrong"); break;
    case AUTH_NOT_ADMIN: http_fail(r, 403, "forbidden", "this call needs the admin key"); break;
    case AUTH_NOT_LOCAL:
        http_fail(r, 403, "forbidden",
                  "without --admin-key-file this call is taken from this machine only, on a loopback or Unix listener");
        break;
    }
}

static void http_check_head(struct http_request *r, const char *method, const char *version)
{
    struct framing framing;
    char text[256];
    bool too_many;
    if (!framing_check(r->mhd, method, version, r->raw_uri, r->raw_length, r->uri, &framing, text, sizeof text)) {
        r->length = -1; /* unknown: answered at once, and closed */
        http_fail(r, 400, "bad_framing", "%s", text);
        return;
    }
    r->length = framing.length;
    if (!target_split(r->uri, r->segment, HTTP_MAX_SEGMENTS, &r->segments, &r->query, &too_many) && !too_many) {
        http_fail(r, 400, "bad_request", "the request target is malformed");
        return;
    }
    r->route = route_find(r->segment, too_many ? 0 : r->segments);
    if (!r->route) {
        http_fail(r, 404, "not_found", "there is no such call; /openapi.json lists those there are");
        return;
    }
    if (strcmp(r->route->pattern, "/adapters/{}") == 0)
        r->adapter = r->segment[1];
    r->method = route_find_method(r->route, r->method_name, r->allow);
    if (!r->method) {
        http_fail(r, 405, "method_not_allowed", "%s takes %s, not %s", r->route->pattern, r->allow, r->method_name);
        return;
    }
    const char *encoding = http_header(r, "Content-Encoding"), *code;
    if (encoding && strcasecmp(encoding, "identity") != 0) {
        http_fail(r, 415, "unsupported_media_type", "Content-Encoding %.64s is not supported; send the body as it is", encoding);
        return;
    }
    http_check_key(r);
    const char *message = NULL;
    if (!r->status && !r->method->always && (code = server_unready(r->server, &message)) != NULL)
        http_fail(r, 503, code, "%s", message);
    const char *json_length = http_header(r, "Inference-Header-Content-Length");
    r->json_length = -1;
    if (!r->status && json_length) {
        size_t digits = strspn(json_length, "0123456789");
        if (!digits || json_length[digits] || digits > 18)
            http_fail(r, 400, "bad_request", "Inference-Header-Content-Length is \"%.64s\", not a number of bytes", json_length);
        else
            r->json_length = strtoll(json_length, NULL, 10);
    }
    if (r->status)
        return;
    if (r->method->body)
        r->method->body->begin(r);
    else if (r->length > (int64_t)HTTP_CONTROL_MAX)
        http_fail(r, 413, "too_large", "the body has %lld bytes; this call takes at most %zu", (long long)r->length, HTTP_CONTROL_MAX);
}

/* ---- answers ------------------------------------------------------------------------------------------------------ */

static enum MHD_Result http_send(struct http_request *r, bool early)
{
    struct connection *c = r->connection;
    if (!r->response) {
        size_t length = 0;
        char *body = http_error_body(r, &length);
        r->response = body ? MHD_create_response_from_buffer(length, body, MHD_RESPMEM_MUST_FREE) : NULL;
        if (!r->response) {
            free(body);
            return MHD_NO; /* no memory even to say so */
        }
        r->bytes_out = (int64_t)length;
        MHD_add_response_header(r->response, "Content-Type", "application/json");
        if (r->status == 401)
            MHD_add_response_header(r->response, "WWW-Authenticate", "Bearer realm=\"expertd\"");
        if (r->status == 405)
            MHD_add_response_header(r->response, "Allow", r->allow);
        if (r->status == 429 || r->status == 503)
            MHD_add_response_header(r->response, "Retry-After", "1");
    }
    MHD_add_response_header(r->response, "X-Request-Id", r->id);
    if (early || r->close || atomic_load(&r->server->phase) == SERVER_DRAINING)
        MHD_add_response_header(r->response, "Connection", "close");
    r->reply_ns = server_now_ns();
    r->stage = HTTP_HANDLED;
    enum MHD_Result result = MHD_NO;
    if (watch_enter(c, CONNECTION_REPLY, http_limit_ns(r->server, r->bytes_out))) {
        if (early) {
            pthread_mutex_lock(&c->lock);
            c->linger = true;
            pthread_mutex_unlock(&c->lock);
        }
        result = MHD_queue_response(r->mhd, (unsigned)r->status, r->response);
    }
    MHD_destroy_response(r->response);
    r->response = NULL;
    return result;
}

/* Answers in the middle of a body and closes. */
static enum MHD_Result http_cut(struct http_request *r)
{
    char text[REPLY_RAW_MAX];
    size_t length = 0;
    char *body = http_error_body(r, &length);
    r->bytes_out = (int64_t)length;
    r->reply_ns = server_now_ns();
    watch_cut(r->connection, text, reply_raw(text, sizeof text, r->status, r->id, body, length));
    free(body);
    return MHD_NO;
}

/* ---- waiting ------------------------------------------------------------------------------------------------------ */

bool http_suspend(struct http_request *r, bool (*start)(struct http_request *r), void (*cancel)(struct http_request *r),
                  void (*resume)(struct http_request *r))
{
    struct connection *c = r->connection;
    struct server *server = r->server;
    struct MHD_Connection *mhd = r->mhd;
    pthread_mutex_lock(&c->lock);
    /* Counted before `stopping` is looked at, while main sets that before it looks at the count: one of the two sees the other. */
    atomic_fetch_add(&server->suspended, 1);
    if (c->gone || c->phase == CONNECTION_CUT || atomic_load(&server->stopping)) {
        pthread_mutex_unlock(&c->lock);
        atomic_fetch_sub(&server->suspended, 1);
        return false;
    }
    r->stage = HTTP_WAITING;
    r->resume = resume;
    r->thread = &http_thread;
    http_thread.before = atomic_load(&http_thread.resumed);
    c->phase = CONNECTION_WAIT;
    c->deadline_ns = 0;
    MHD_suspend_connection(mhd);
    /* Under the lock, so that http_resume, which takes it first, can't come before `cancel` is set. */
    bool started = start(r);
    if (started && cancel) {
        c->cancel = cancel;
        c->request = r;
    }
    pthread_mutex_unlock(&c->lock);
    if (!started) {
        MHD_resume_connection(mhd);
        atomic_fetch_add(&http_thread.resumed, 1);
        atomic_fetch_sub(&server->suspended, 1);
    }
    return true;
}

void http_resume(struct http_request *r)
{
    struct connection *c = r->connection;
    struct server *server = r->server;
    struct MHD_Connection *mhd = r->mhd;
    struct http_thread *thread = r->thread;
    pthread_mutex_lock(&c->lock);
    c->cancel = NULL;
    pthread_mutex_unlock(&c->lock);
    MHD_resume_connection(mhd);
    atomic_fetch_add(&thread->resumed, 1);
    atomic_fetch_sub(&server->suspended, 1);
}

void http_look_out(void)
{
    if (http_thread.connections != 1)
        return;
    if (atomic_fetch_sub(&http_lookouts, 1) > 0) {
        int64_t until = server_now_ns() + HTTP_LOOK_OUT_NS;
        while (atomic_load(&http_thread.resumed) == http_thread.before && server_now_ns() < until)
            sched_yield();
    }
    atomic_fetch_add(&http_lookouts, 1);
}

static void http_run_work(struct workers_job *job)
{
    struct http_request *r = (struct http_request *)((char *)job - offsetof(struct http_request, job));
    r->work(r);
    http_resume(r);
}

static bool http_start_work(struct http_request *r)
{
    if (workers_submit(r->workers, &r->job))
        return true;
    http_fail(r, 429, "queue_full", "%d calls of this kind wait already, and no more may", workers_most(r->workers));
    return false;
}

void http_offload(struct http_request *r, struct workers *workers, void (*work)(struct http_request *r),
                  void (*resume)(struct http_request *r))
{
    r->workers = workers;
    r->work = work;
    r->job.run = http_run_work;
    http_suspend(r, http_start_work, NULL, resume);
}

/* ---- libmicrohttpd's callbacks -------------------------------------------------------------------------------------- */

static size_t http_keep_escapes(void *cls, struct MHD_Connection *mhd, char *text)
{
    (void)cls, (void)mhd;
    return strlen(text); /* decoded by us, after the path was split */
}

/* A request line has arrived. */
static void *http_request_line(void *cls, const char *uri, struct MHD_Connection *mhd)
{
    struct http_daemon *d = cls;
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    struct connection *c = info ? info->socket_context : NULL;
    if (!c)
        return NULL;
    struct http_request *r = calloc(1, sizeof *r);
    size_t length = strlen(uri);
    if (!r || !(r->uri = malloc(length + 1))) {
        free(r);
        return NULL;
    }
    memcpy(r->uri, uri, length + 1);
    r->server = d->server;
    r->connection = c;
    r->mhd = mhd;
    r->raw_uri = uri;
    r->raw_length = length;
    r->layer = r->rows = r->adapters = r->queue_us = r->compute_us = -1;
    watch_enter(c, CONNECTION_HEAD, http_head_limit_ns(d->server));
    c->current = r;
    return r;
}

static enum MHD_Result http_receive(struct http_request *r, const char *data, size_t size)
{
    r->received += (int64_t)size;
    /* The time that a body is given grows with what has come of it, not with what was announced. */
    int64_t left = http_limit_ns(r->server, r->received) - (server_now_ns() - r->head_ns);
    if (!watch_enter(r->connection, CONNECTION_BODY, left > 0 ? left : 1))
        return MHD_NO;
    if (r->method->body)
        return r->method->body->data(r, data, size) ? MHD_YES : http_cut(r);
    if (r->received > (int64_t)HTTP_CONTROL_MAX) {
        http_fail(r, 413, "too_large", "the body has more than %zu bytes", HTTP_CONTROL_MAX);
        return http_cut(r);
    }
    return MHD_YES;
}

static enum MHD_Result http_access(void *cls, struct MHD_Connection *mhd, const char *url, const char *method, const char *version,
                                   const char *data, size_t *size, void **state)
{
    struct http_request *r = *state;
    (void)cls, (void)url;
    if (!r || r->connection->refused)
        return MHD_NO;
    r->mhd = mhd;
    switch (r->stage) {
    case HTTP_NEW:
        r->stage = HTTP_BODY;
        r->head_ns = server_now_ns();
        r->started = true;
        atomic_fetch_add(&r->server->requests, 1);
        metrics_request_started(r->server->metrics);
        snprintf(r->method_name, sizeof r->method_name, "%s", method);
        http_take_id(r);
        pthread_mutex_lock(&r->connection->lock);
        memcpy(r->connection->request_id, r->id, sizeof r->id);
        pthread_mutex_unlock(&r->connection->lock);
        http_check_head(r, method, version);
        if (r->status && r->length != 0)
            return http_send(r, true);
        return watch_enter(r->connection, CONNECTION_BODY, http_limit_ns(r->server, 0)) ? MHD_YES : MHD_NO;
    case HTTP_BODY:
        if (*size) {
            size_t taken = *size;
            *size = 0;
            return http_receive(r, data, taken);
        }
        r->body_ns = r->done_ns = server_now_ns();
        if (!r->status)
            r->method->handle(r);
        break;
    case HTTP_WAITING:
        r->stage = HTTP_HANDLED;
        r->done_ns = server_now_ns();
        if (!r->status)
            r->resume(r);
        break;
    case HTTP_HANDLED: return MHD_YES;
    }
    if (r->stage == HTTP_WAITING)
        return MHD_YES;
    return r->status ? http_send(r, false) : MHD_NO; /* without a status: the client has gone */
}

static enum metrics_outcome http_outcome(const struct http_request *r, int status)
{
    if (!r->infer)
        return METRICS_NOT_INFER;
    switch (status) {
    case 200: return METRICS_SUCCESS;
    case 0: return METRICS_CANCELED;
    case 429:
    case 504: return METRICS_REJECTED;
    case 503: return strcmp(r->code, "device_failed") == 0 ? METRICS_BACKEND : METRICS_REJECTED;
    case 500: return METRICS_BACKEND;
    default: return METRICS_OTHER;
    }
}

/* The path as it was asked for, where the route does not tell; else NULL. Queries are left out: clients hide keys in them. */
static const char *http_show_target(const struct http_request *r, char *text, size_t size)
{
    if (r->route && r->status != 404 && r->status != 405)
        return NULL;
    size_t length = strcspn(r->raw_uri, "?");
    snprintf(text, size, "%.*s%s", length > HTTP_TARGET_SHOWN ? HTTP_TARGET_SHOWN : (int)length, r->raw_uri,
             length > HTTP_TARGET_SHOWN ? "..." : "");
    return text;
}

static void http_account(struct http_request *r, enum MHD_RequestTerminationCode how)
{
    int64_t now = server_now_ns();
    char target[HTTP_TARGET_SHOWN + 4];
    if (!r->status) {
        pthread_mutex_lock(&r->connection->lock);
        bool expired = r->connection->expired;
        pthread_mutex_unlock(&r->connection->lock);
        if (expired) {
            http_fail(r, 408, "timeout", "the request's body did not arrive within %.0f s", (double)(now - r->head_ns) * 1e-9);
        } else {
            r->code = "client_gone";
        }
    } else if (how != MHD_REQUEST_TERMINATED_COMPLETED_OK && !r->code) {
        r->code = "client_gone";
    }
    log_request(&(struct log_request){
        .request_id = r->id,
        .method = r->method_name,
        .route = r->route ? r->route->pattern : NULL,
        .target = http_show_target(r, target, sizeof target),
        .remote = r->connection->remote,
        .status = r->status ? r->status : 499,
        .code = r->code,
        .error = r->message[0] ? r->message : NULL,
        .adapter = r->adapter,
        .layer = r->layer,
        .path = r->path,
        .rows = r->rows,
        .adapters = r->adapters,
        .bytes_in = r->received,
        .bytes_out = r->bytes_out,
        .queue_us = r->queue_us,
        .compute_us = r->compute_us,
        .total_us = (now - r->head_ns) / 1000,
    });
    metrics_request_finished(r->server->metrics, &(struct metrics_request){
                                                     .route = (size_t)((r->route ? r->route : &route_table[route_count]) - route_table),
                                                     .method = r->method_name,
                                                     .status = r->status,
                                                     .bytes_in = (uint64_t)r->received,
                                                     .bytes_out = (uint64_t)r->bytes_out,
                                                     .total_ns = (uint64_t)(now - r->head_ns),
                                                     .outcome = http_outcome(r, r->status),
                                                     .input_ns = (uint64_t)(r->body_ns ? r->body_ns - r->head_ns : 0),
                                                     .queue_ns = (uint64_t)(r->queue_us > 0 ? r->queue_us * 1000 : 0),
                                                     .compute_ns = (uint64_t)(r->compute_us > 0 ? r->compute_us * 1000 : 0),
                                                     .output_ns = (uint64_t)(r->done_ns ? now - r->done_ns : 0),
                                                 });
}

static void http_finish(struct http_request *r, enum MHD_RequestTerminationCode how)
{
    r->connection->current = NULL;
    if (r->started)
        http_account(r, how);
    watch_enter(r->connection, CONNECTION_IDLE, HTTP_IDLE_S * HTTP_SECOND + http_head_limit_ns(r->server));
    if (r->work_destroy)
        r->work_destroy(r);
    if (r->method && r->method->body)
        r->method->body->destroy(r);
    if (r->response)
        MHD_destroy_response(r->response);
    if (r->started)
        atomic_fetch_sub(&r->server->requests, 1);
    free(r->uri);
    free(r);
}

static void http_completed(void *cls, struct MHD_Connection *mhd, void **state, enum MHD_RequestTerminationCode how)
{
    struct http_request *r = *state;
    (void)cls, (void)mhd;
    *state = NULL;
    if (r)
        http_finish(r, how);
}

/* Fills c->remote and says whether the peer is on this machine. */
static bool http_describe_peer(struct connection *c, const struct sockaddr *a)
{
    char host[INET6_ADDRSTRLEN] = "";
    snprintf(c->remote, sizeof c->remote, "unix");
    if (!a || a->sa_family == AF_UNIX)
        return true;
    if (a->sa_family == AF_INET) {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)a;
        inet_ntop(AF_INET, &v4->sin_addr, host, sizeof host);
        snprintf(c->remote, sizeof c->remote, "%s:%u", host, ntohs(v4->sin_port));
        return ntohl(v4->sin_addr.s_addr) >> 24 == 127;
    }
    if (a->sa_family == AF_INET6) {
        const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)a;
        inet_ntop(AF_INET6, &v6->sin6_addr, host, sizeof host);
        snprintf(c->remote, sizeof c->remote, "[%s]:%u", host, ntohs(v6->sin6_port));
        return IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr);
    }
    return false;
}

/* TCP grows its buffers as it goes; a Unix socket has 208 KiB, and sender and receiver of a long answer take turns. More than everybody may
 * have takes a privilege: without it, that. */
static void http_widen(int fd, const struct sockaddr *peer)
{
    int bytes = HTTP_UNIX_BUFFER;
    if (peer && peer->sa_family != AF_UNIX)
        return;
    if (setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &bytes, sizeof bytes))
        (void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
}

static void http_opened(struct http_daemon *d, struct MHD_Connection *mhd, void **context)
{
    struct server *server = d->server;
    /* Since libmicrohttpd 1.0 the second call overwrites what the first one returned. */
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_CONNECTION_FD);
    int fd = info->connect_fd;
    const union MHD_ConnectionInfo *peer = MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
    struct connection *c = watch_add(server->watch, fd);
    *context = c;
    if (!c) {
        log_message(LOG_LEVEL_WARNING, "a connection was dropped: %s", strerror(errno));
        shutdown(fd, SHUT_RDWR);
        return;
    }
    http_thread.connections++;
    metrics_connection_opened(server->metrics);
    http_widen(fd, peer ? peer->client_addr : NULL);
    c->local = http_describe_peer(c, peer ? peer->client_addr : NULL) && d->listener->local;
    if (atomic_fetch_add(&server->connections, 1) >= server->options->max_connections) {
        char text[REPLY_RAW_MAX], message[96];
        c->refused = true;
        metrics_connection_refused(server->metrics);
        snprintf(message, sizeof message, "all %lld connections are taken", (long long)server->options->max_connections);
        watch_cut(c, text, reply_raw_error(text, sizeof text, 503, "too_many_connections", message, NULL));
        watch_expire_soon(c);
        return;
    }
    pthread_mutex_lock(&c->lock);
    c->phase_ns = server_now_ns();
    c->deadline_ns = c->phase_ns + http_head_limit_ns(server);
    pthread_mutex_unlock(&c->lock);
}

static void http_connection(void *cls, struct MHD_Connection *mhd, void **context, enum MHD_ConnectionNotificationCode what)
{
    struct http_daemon *d = cls;
    struct connection *c = *context;
    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
        http_opened(d, mhd, context);
    } else if (c) {
        http_thread.connections--;
        atomic_fetch_sub(&d->server->connections, 1);
        metrics_connection_closed(d->server->metrics);
        *context = NULL;
        /* Where its memory ran out over a head, the library closes without a word about the request. */
        if (c->current)
            http_finish(c->current, MHD_REQUEST_TERMINATED_WITH_ERROR);
        watch_remove(c);
    }
}

/* ---- start and stop ------------------------------------------------------------------------------------------------- */

static int http_processors(void)
{
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    return n < 1 ? 1 : n;
}

struct http *http_start(struct server *server, struct listener_set *listeners, char *message, size_t size)
{
    struct http *http = calloc(1, sizeof *http + listeners->count * sizeof http->daemon[0]);
    if (!http) {
        snprintf(message, size, "out of memory");
        return NULL;
    }
    int processors = http_processors();
    unsigned threads = processors < HTTP_THREADS_MAX / HTTP_THREADS_EACH ? (unsigned)processors * HTTP_THREADS_EACH : HTTP_THREADS_MAX;
    atomic_store(&http_lookouts, processors / HTTP_LOOKOUTS);
    /* Our own limit answers; the library's, which it splits among its threads, must not be reached. */
    uint64_t limit = ((uint64_t)server->options->max_connections + 256) * threads;
    for (size_t i = 0; i < listeners->count; i++) {
        struct http_daemon *d = &http->daemon[http->count];
        d->server = server;
        d->listener = &listeners->item[i];
        struct MHD_OptionItem more[] = {
#if MHD_VERSION >= 0x01000000
            {MHD_OPTION_CLIENT_DISCIPLINE_LVL, 1, NULL},
#endif
            {MHD_OPTION_THREAD_POOL_SIZE, threads, NULL},
            {MHD_OPTION_END, 0, NULL},
        };
        d->mhd = MHD_start_daemon(MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME, 0, NULL, NULL, http_access, d,
                                  MHD_OPTION_LISTEN_SOCKET, d->listener->fd, MHD_OPTION_CONNECTION_LIMIT,
                                  (unsigned)(limit > UINT32_MAX / 2 ? UINT32_MAX / 2 : limit), MHD_OPTION_CONNECTION_TIMEOUT,
                                  (unsigned)HTTP_IDLE_S, MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)HTTP_MEMORY,
                                  MHD_OPTION_NOTIFY_COMPLETED, http_completed, d, MHD_OPTION_NOTIFY_CONNECTION, http_connection, d,
                                  MHD_OPTION_URI_LOG_CALLBACK, http_request_line, d, MHD_OPTION_UNESCAPE_CALLBACK, http_keep_escapes, d,
                                  MHD_OPTION_SIGPIPE_HANDLED_BY_APP, 1, MHD_OPTION_ARRAY, more, MHD_OPTION_END);
        if (!d->mhd) {
            snprintf(message, size, "can't serve on %s: %s", d->listener->text, strerror(errno));
            http_stop(http);
            return NULL;
        }
        listeners->item[i].fd = -1; /* libmicrohttpd closes it */
        http->count++;
    }
    return http;
}

void http_stop(struct http *http)
{
    if (!http)
        return;
    for (size_t i = 0; i < http->count; i++)
        MHD_stop_daemon(http->daemon[i].mhd);
    free(http);
}
