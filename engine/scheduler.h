/* SPDX-License-Identifier: Apache-2.0
 *
 * The queue and the engine thread: merges waiting requests of one (layer, path) into batches and runs them on the device.
 */
#ifndef EXPERTD_ENGINE_SCHEDULER_H
#define EXPERTD_ENGINE_SCHEDULER_H

#include "engine/device.h"
#include "engine/engine.h"
#include "engine/model.h"

struct scheduler;

struct scheduler_options {
    struct device *device;
    const struct model *model;
    int64_t queue_rows;
    int64_t batch_wait_us; /* or ENGINE_BATCH_WAIT_AUTO */
    int32_t max_rows, max_slots; /* of one batch */
    /* Called once, from the engine thread, when the device fails. */
    void (*on_failure)(void *arg, const char *message);
    void *on_failure_arg;
    /* Called about once a second from the engine thread while there is nothing to do; NULL: none. Must not block. */
    void (*on_idle)(void *arg);
    void *on_idle_arg;
};

enum engine_code scheduler_create(const struct scheduler_options *options, struct scheduler **out, struct engine_error *error);
/* Queued requests complete with ENGINE_DRAINING, the running batch finishes, posted jobs run, then the threads end. Submits are
 * refused from then on; jobs posted later run in the poster's thread, as nothing runs on the device any more. */
void scheduler_stop(struct scheduler *scheduler);
void scheduler_destroy(struct scheduler *scheduler); /* stops first, if need be; NULL is fine */
enum engine_code scheduler_submit(struct scheduler *scheduler, struct engine_request *request, struct engine_error *error);
void scheduler_cancel(struct scheduler *scheduler, struct engine_request *request);
void scheduler_begin_drain(struct scheduler *scheduler);
bool scheduler_wait_idle(struct scheduler *scheduler, int64_t timeout_ms);
bool scheduler_failed(const struct scheduler *scheduler);
/* A struct adapter_publisher's post, with the scheduler as context. */
void scheduler_post(void *scheduler, void (*fn)(void *arg), void *arg);
/* Writes all of *out; figures that others keep are zero. */
void scheduler_stats(struct scheduler *scheduler, struct engine_stats *out);

#endif
