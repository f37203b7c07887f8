/* SPDX-License-Identifier: Apache-2.0
 *
 * Waiting requests: a list per key, a key being one (layer, path), in the order in which their turns come. It owns no
 * memory but the heads of the lists, takes no lock and looks at no clock: its owner does.
 *
 * A request's age counts from its arrival, and once a window of it has run, from the start of that window: that is how a
 * request of many windows shares the device with everybody else's.
 */
#ifndef EXPERTD_ENGINE_QUEUE_H
#define EXPERTD_ENGINE_QUEUE_H

#include "engine/engine.h"

struct queue_list {
    struct engine_request *head, *tail;
    int64_t rows; /* not yet started */
    int32_t requests;
};

struct queue {
    struct queue_list *list; /* [keys] */
    int32_t keys;
    int64_t rows, requests; /* waiting, of all keys; rows not yet started */
    int64_t next_deadline_ns; /* no waiting request's deadline is earlier; INT64_MAX: none has one */
};

bool queue_init(struct queue *queue, int32_t keys); /* false: no memory */
void queue_finish(struct queue *queue);

/* At the end of its list. */
void queue_push(struct queue *queue, int32_t key, struct engine_request *request);
/* The head of a list, which isn't empty. */
struct engine_request *queue_pop(struct queue *queue, int32_t key);
/* Wherever it is in its list. */
void queue_remove(struct queue *queue, int32_t key, struct engine_request *request);

/* The key whose head is oldest, among those whose head has begun or is older than `before_ns`, or of which `enough_rows` wait.
 * -1: none. *next_ns is the age of the oldest head that was left out, or INT64_MAX. */
int32_t queue_oldest(const struct queue *queue, int64_t before_ns, int64_t enough_rows, int64_t *next_ns);

/* Why a request that has not begun should be dropped, ENGINE_OK when it should not. */
enum engine_code queue_dropped(struct engine_request *request, int64_t now_ns);
/* Takes out all requests that should be dropped, with their status set; linked by next. */
struct engine_request *queue_sweep(struct queue *queue, int64_t now_ns);
/* Takes out all, or all that have not begun, with this status; linked by next. */
struct engine_request *queue_take_all(struct queue *queue, bool begun_too, enum engine_code status);

#endif
