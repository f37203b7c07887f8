/* SPDX-License-Identifier: Apache-2.0
 *
 * Counting what HTTP does, and writing everything as Prometheus text (format 0.0.4).
 *
 * Counters are relaxed atomics: counting never blocks and may be done by any thread. Rendering reads them while they move, so that
 * two figures of one page may be an instant apart. The struct belongs to who created it.
 */
#ifndef EXPERTD_SERVER_METRICS_H
#define EXPERTD_SERVER_METRICS_H

#include "engine/engine.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct metrics;

/* `route` texts are the values of the route label, such as "/adapters/{name}"; metrics_request.route counts into them. Keep one for
 * requests that match no route. The strings must outlive the struct. NULL: out of memory. */
struct metrics *metrics_create(const char *const *route, size_t routes);
void metrics_destroy(struct metrics *metrics); /* NULL is fine */

void metrics_connection_opened(struct metrics *metrics);
void metrics_connection_closed(struct metrics *metrics);
/* Turned away at --max-connections. */
void metrics_connection_refused(struct metrics *metrics);

/* A request's head has arrived; metrics_request_finished follows exactly once, also when the client vanished. */
void metrics_request_started(struct metrics *metrics);

/* What became of an infer request, in the words of Triton's nv_inference_request_failure. */
enum metrics_outcome {
    METRICS_NOT_INFER, /* some other route */
    METRICS_SUCCESS,
    METRICS_REJECTED, /* queue or memory full, draining, deadline passed */
    METRICS_CANCELED, /* the client went away */
    METRICS_BACKEND, /* the device or the engine failed */
    METRICS_OTHER, /* malformed, unknown names, not authorized */
};

struct metrics_request {
    size_t route;
    const char *method; /* anything but the usual five is counted as OTHER */
    int status; /* 0: the client vanished before an answer */
    uint64_t bytes_in, bytes_out; /* of bodies */
    uint64_t total_ns; /* from the head's arrival until the answer was sent */
    enum metrics_outcome outcome;
    /* Of METRICS_SUCCESS: reading and checking the request, the engine's figures, writing the reply. */
    uint64_t input_ns, queue_ns, compute_ns, output_ns;
};
void metrics_request_finished(struct metrics *metrics, const struct metrics_request *request);

/* Of all infer requests so far, as nv_inference_* on the page and the statistics calls tell it. */
struct metrics_inference {
    uint64_t success, failure;
    uint64_t total_ns, input_ns, queue_ns, compute_ns, output_ns; /* of the successful */
};
void metrics_inference_get(const struct metrics *metrics, struct metrics_inference *out);

/* What rendering needs besides the counters; without an engine (still loading) `model`, `stats` and `adapter` are NULL. */
struct metrics_sources {
    const char *model_name;
    bool ready;
    bool draining;
    const struct engine_model_info *model;
    const struct engine_stats *stats;
    const struct engine_adapter_info *adapter; /* [adapters], as engine_adapter_list gives them */
    size_t adapters;
};

#define METRICS_CONTENT_TYPE "text/plain; version=0.0.4; charset=utf-8"

/* The page, malloc'ed; NULL: out of memory. */
char *metrics_render(struct metrics *metrics, const struct metrics_sources *sources, size_t *length);

#endif
