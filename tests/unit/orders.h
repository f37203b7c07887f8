/* SPDX-License-Identifier: Apache-2.0
 *
 * A scheduler on a fake device, and requests ("orders") whose results are known, for tests of the scheduler.
 */
#ifndef EXPERTD_TESTS_ORDERS_H
#define EXPERTD_TESTS_ORDERS_H

#include "engine/scheduler.h"
#include "fake_device.h"

enum { MAX_ROWS = 10, MAX_SLOTS = 40, QUEUE_ROWS = 60 };

struct fixture {
    struct fake_device fake;
    struct scheduler *scheduler;
    atomic_int failures, idles; /* calls of on_failure and on_idle */
};

void fixture_start(struct fixture *x, int depth, int64_t wait_us);
/* Batches of so many rows, on a device that may tell when it is ready. */
void fixture_start_wide(struct fixture *x, int depth, int32_t max_rows, bool tells);
/* Likewise, with a batch_wait_us. */
void fixture_start_waiting(struct fixture *x, int depth, int64_t wait_us, int32_t max_rows, bool tells);
void fixture_stop(struct fixture *x); /* releases the device first */

/* A request with memory of its own. */
struct order {
    struct engine_request request;
    float *hidden, *out, *weights;
    int32_t *ids, *row_slots;
    int sequence; /* of its completion among all */
    int64_t done_ns;
    pthread_mutex_t *lock; /* held while `done` is counted; NULL: none */
    atomic_int done; /* calls of done */
};

/* Rows with k slots each, or when k is 0 row t with t % 4 slots. */
void order_init(struct order *o, int32_t layer, enum engine_mode mode, int32_t rows, int32_t k);
void order_finish(struct order *o);
void order_submit(struct fixture *x, struct order *o); /* has to be taken */
bool order_wait(struct order *o); /* false: not done once within five seconds */
bool order_right(const struct order *o); /* every number of the result */
/* Waits for it and looks at its code and, on success, at every number. */
void order_expect(struct order *o, enum engine_code code);
bool wait_count(atomic_int *count, int least);

#endif
