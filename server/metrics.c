/* SPDX-License-Identifier: Apache-2.0
 *
 * Counting. Everything is allocated at the start; an update is a handful of relaxed additions.
 */
#include "server/metrics_counters.h"

#include <stdlib.h>
#include <string.h>

const char *const metrics_method_name[METRICS_METHODS] = {"GET", "HEAD", "POST", "PUT", "DELETE", "OTHER"};
/* 499 is how proxies have long written "the client closed the connection before an answer". */
const int metrics_status_code[METRICS_STATUSES] = {200, 201, 204, 400, 401, 403, 404, 405, 408, 409, 411,
                                                   413, 415, 417, 422, 429, 499, 500, 503, 504, 507, 0};
const double metrics_duration_bound[METRICS_DURATIONS] = {0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
                                                          0.1,    0.25,    0.5,    1,     2.5,    5,     10,   30,    60};

struct metrics *metrics_create(const char *const *route, size_t routes)
{
    struct metrics *m = calloc(1, sizeof *m + routes * sizeof m->route[0]);
    if (!m)
        return NULL;
    m->start_time = metrics_process_start();
    m->routes = routes;
    for (size_t i = 0; i < routes; i++)
        m->route[i].name = route[i];
    return m;
}

void metrics_destroy(struct metrics *metrics) { free(metrics); }

static void add(metrics_counter *counter, uint64_t value) { atomic_fetch_add_explicit(counter, value, memory_order_relaxed); }

void metrics_connection_opened(struct metrics *metrics) { add(&metrics->connections_opened, 1); }
void metrics_connection_closed(struct metrics *metrics) { add(&metrics->connections_closed, 1); }
void metrics_connection_refused(struct metrics *metrics) { add(&metrics->connections_refused, 1); }
void metrics_request_started(struct metrics *metrics) { add(&metrics->requests_started, 1); }

static size_t method_index(const char *method)
{
    for (size_t i = 0; i + 1 < METRICS_METHODS; i++) {
        if (!strcmp(method, metrics_method_name[i]))
            return i;
    }
    return METRICS_METHODS - 1;
}

static size_t status_index(int status)
{
    for (size_t i = 0; i + 1 < METRICS_STATUSES; i++) {
        if (metrics_status_code[i] == (status ? status : 499))
            return i;
    }
    return METRICS_STATUSES - 1;
}

static size_t duration_index(double seconds)
{
    size_t i = 0;
    while (i < METRICS_DURATIONS && seconds > metrics_duration_bound[i])
        i++;
    return i;
}

void metrics_request_finished(struct metrics *metrics, const struct metrics_request *request)
{
    struct metrics_route *route = &metrics->route[request->route];
    add(&route->requests[method_index(request->method)][status_index(request->status)], 1);
    add(&route->duration[duration_index((double)request->total_ns * 1e-9)], 1);
    add(&route->duration_ns, request->total_ns);
    add(&route->bytes_in, request->bytes_in);
    add(&route->bytes_out, request->bytes_out);
    add(&metrics->outcome[request->outcome], 1);
    if (request->outcome == METRICS_SUCCESS) {
        add(&metrics->total_ns, request->total_ns);
        add(&metrics->input_ns, request->input_ns);
        add(&metrics->queue_ns, request->queue_ns);
        add(&metrics->compute_ns, request->compute_ns);
        add(&metrics->output_ns, request->output_ns);
    }
    add(&metrics->requests_finished, 1);
}

void metrics_inference_get(const struct metrics *m, struct metrics_inference *out)
{
    *out = (struct metrics_inference){
        .success = metrics_read(&m->outcome[METRICS_SUCCESS]),
        .total_ns = metrics_read(&m->total_ns),
        .input_ns = metrics_read(&m->input_ns),
        .queue_ns = metrics_read(&m->queue_ns),
        .compute_ns = metrics_read(&m->compute_ns),
        .output_ns = metrics_read(&m->output_ns),
    };
    for (size_t i = METRICS_REJECTED; i <= METRICS_OTHER; i++)
        out->failure += metrics_read(&m->outcome[i]);
}
