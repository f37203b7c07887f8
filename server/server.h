/* SPDX-License-Identifier: Apache-2.0
 *
 * What all parts of the daemon share: one struct, made by main and alive until every thread has ended.
 *
 * `options`, `model_name` and the module pointers are constant once the listeners run. `engine` is NULL until the model is loaded
 * and then constant until the listeners have stopped; `phase` only moves forward.
 */
#ifndef EXPERTD_SERVER_SERVER_H
#define EXPERTD_SERVER_SERVER_H

#include "engine/engine.h"
#include "server/options.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

enum server_phase { SERVER_LOADING, SERVER_READY, SERVER_DRAINING };

struct server {
    const struct options *options;
    const char *model_name;
    _Atomic(struct engine *) engine;
    atomic_int phase;
    struct auth *auth;
    struct metrics *metrics;
    struct watch *watch;
    struct workers *workers; /* for adapter calls, which block */
    struct workers *waiters; /* for those that wait for other requests, for as long as a minute: no install waits behind them */
    struct workers *parsers; /* for JSON so long that other connections would wait for it */
    struct spool *spool;
    atomic_int connections;
    atomic_int requests; /* heads that have arrived and whose answers are not out yet */
    atomic_int suspended; /* connections that wait for the engine or a worker */
    atomic_bool stopping; /* from here on none may begin to wait: the listeners are about to be stopped */
    atomic_int uploads; /* adapters being received */
    atomic_int_fast64_t last_inference_ms; /* since 1970 */
    int64_t started_at; /* seconds since 1970 */
};

static inline struct engine *server_engine(struct server *server) { return atomic_load_explicit(&server->engine, memory_order_acquire); }

/* The code and sentence of the 503 that data calls get now; NULL when they are served. */
static inline const char *server_unready(struct server *server, const char **message)
{
    struct engine *engine = server_engine(server);
    if (engine && engine_failed(engine)) {
        *message = "the device has failed; this server is about to exit";
        return "device_failed";
    }
    switch (atomic_load(&server->phase)) {
    case SERVER_DRAINING: *message = "the server is shutting down"; return "draining";
    case SERVER_LOADING: *message = "the model is still being loaded"; return "not_ready";
    default: return NULL;
    }
}

static inline int64_t server_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

#endif
