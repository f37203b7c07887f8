/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/queue.h"

#include <stdlib.h>

bool queue_init(struct queue *queue, int32_t keys)
{
    *queue = (struct queue){.keys = keys, .next_deadline_ns = INT64_MAX};
    queue->list = calloc((size_t)keys, sizeof *queue->list);
    return queue->list != NULL;
}

void queue_finish(struct queue *queue)
{
    free(queue->list);
    queue->list = NULL;
}

static int64_t waiting_rows(const struct engine_request *request) { return request->rows - request->rows_started; }

void queue_push(struct queue *queue, int32_t key, struct engine_request *request)
{
    struct queue_list *list = &queue->list[key];
    request->next = NULL;
    if (list->tail)
        list->tail->next = request;
    else
        list->head = request;
    list->tail = request;
    list->rows += waiting_rows(request);
    list->requests++;
    queue->rows += waiting_rows(request);
    queue->requests++;
    if (request->rows_started == 0 && request->deadline_ns > 0 && request->deadline_ns < queue->next_deadline_ns)
        queue->next_deadline_ns = request->deadline_ns;
}

/* `before` precedes the request in its list; NULL: it is the head. */
static void unlink_after(struct queue *queue, struct queue_list *list, struct engine_request *before, struct engine_request *request)
{
    if (before)
        before->next = request->next;
    else
        list->head = request->next;
    if (list->tail == request)
        list->tail = before;
    request->next = NULL;
    list->rows -= waiting_rows(request);
    list->requests--;
    queue->rows -= waiting_rows(request);
    queue->requests--;
}

struct engine_request *queue_pop(struct queue *queue, int32_t key)
{
    struct queue_list *list = &queue->list[key];
    struct engine_request *request = list->head;
    unlink_after(queue, list, NULL, request);
    return request;
}

void queue_remove(struct queue *queue, int32_t key, struct engine_request *request)
{
    struct queue_list *list = &queue->list[key];
    struct engine_request *before = NULL;
    for (struct engine_request *r = list->head; r; before = r, r = r->next) {
        if (r == request) {
            unlink_after(queue, list, before, request);
            return;
        }
    }
}

int32_t queue_oldest(const struct queue *queue, int64_t before_ns, int64_t enough_rows, int64_t *next_ns)
{
    int32_t best = -1;
    int64_t best_since = INT64_MAX;
    *next_ns = INT64_MAX;
    for (int32_t key = 0; key < queue->keys; key++) {
        const struct engine_request *head = queue->list[key].head;
        if (!head)
            continue;
        bool begun = head->rows_started > 0;
        int64_t since = begun ? head->started_ns : head->submitted_ns;
        if (!begun && since >= before_ns && queue->list[key].rows < enough_rows) {
            if (since < *next_ns)
                *next_ns = since;
        } else if (best < 0 || since < best_since) {
            best = key;
            best_since = since;
        }
    }
    return best;
}

enum engine_code queue_dropped(struct engine_request *request, int64_t now_ns)
{
    if (request->rows_started > 0)
        return ENGINE_OK;
    if (atomic_load(&request->cancelled))
        return ENGINE_CANCELLED;
    return request->deadline_ns > 0 && request->deadline_ns <= now_ns ? ENGINE_DEADLINE_EXCEEDED : ENGINE_OK;
}

struct engine_request *queue_sweep(struct queue *queue, int64_t now_ns)
{
    struct engine_request *out = NULL, **last = &out;
    int64_t deadline = INT64_MAX;
    for (int32_t key = 0; key < queue->keys; key++) {
        struct engine_request *before = NULL, *next;
        for (struct engine_request *r = queue->list[key].head; r; r = next) {
            next = r->next;
            enum engine_code why = queue_dropped(r, now_ns);
            if (why != ENGINE_OK) {
                unlink_after(queue, &queue->list[key], before, r);
                r->status = why;
                *last = r;
                last = &r->next;
                continue;
            }
            if (r->rows_started == 0 && r->deadline_ns > 0 && r->deadline_ns < deadline)
                deadline = r->deadline_ns;
            before = r;
        }
    }
    queue->next_deadline_ns = deadline;
    return out;
}

struct engine_request *queue_take_all(struct queue *queue, bool begun_too, enum engine_code status)
{
    struct engine_request *out = NULL, **last = &out;
    for (int32_t key = 0; key < queue->keys; key++) {
        struct engine_request *before = NULL, *next;
        for (struct engine_request *r = queue->list[key].head; r; r = next) {
            next = r->next;
            if (r->rows_started > 0 && !begun_too) {
                before = r;
                continue;
            }
            unlink_after(queue, &queue->list[key], before, r);
            r->status = status;
            *last = r;
            last = &r->next;
        }
    }
    return out;
}
