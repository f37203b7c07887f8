/* SPDX-License-Identifier: Apache-2.0
 *
 * Between metrics.c, which counts, and metrics_render.c, which writes: the counters themselves and the writer's small pieces.
 */
#ifndef EXPERTD_SERVER_METRICS_COUNTERS_H
#define EXPERTD_SERVER_METRICS_COUNTERS_H

#include "server/metrics.h"

#include <stdatomic.h>
#include <stdio.h>

#define METRICS_METHODS 6
#define METRICS_STATUSES 22
#define METRICS_DURATIONS 18

typedef atomic_uint_fast64_t metrics_counter;

extern const char *const metrics_method_name[METRICS_METHODS]; /* the last stands for all others */
extern const int metrics_status_code[METRICS_STATUSES]; /* the last, 0, stands for all others */
extern const double metrics_duration_bound[METRICS_DURATIONS]; /* seconds */

struct metrics_route {
    const char *name;
    metrics_counter requests[METRICS_METHODS][METRICS_STATUSES];
    metrics_counter duration[METRICS_DURATIONS + 1]; /* not cumulative; the last is past every bound */
    metrics_counter duration_ns, bytes_in, bytes_out;
};

struct metrics {
    double start_time; /* of the process, seconds since 1970 */
    size_t routes;
    metrics_counter connections_opened, connections_closed, connections_refused;
    metrics_counter requests_started, requests_finished;
    metrics_counter outcome[METRICS_OTHER + 1];
    metrics_counter total_ns, input_ns, queue_ns, compute_ns, output_ns; /* of successful infer requests */
    struct metrics_route route[];
};

static inline uint64_t metrics_read(const metrics_counter *counter) { return atomic_load_explicit(counter, memory_order_relaxed); }

/* HELP and TYPE of a family; its samples follow. */
void metrics_write_family(FILE *out, const char *name, const char *type, const char *help);
/* A label's value with \, " and newline escaped. */
void metrics_write_label(FILE *out, const char *value);
/* The process_* families (metrics_process.c). */
void metrics_write_process(FILE *out, double start_time);
/* The families of a device with memory of its own (metrics_device.c). */
void metrics_write_device(FILE *out, const struct engine_device_stats *device);
/* When this process started, seconds since 1970; 0 when /proc doesn't say. */
double metrics_process_start(void);

#endif
