/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "orders.h"

#include "engine/clock.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static atomic_int sequence;

static void on_done(struct engine_request *request)
{
    struct order *o = request->user;
    o->sequence = atomic_fetch_add(&sequence, 1);
    o->done_ns = clock_now_ns();
    pthread_mutex_t *lock = o->lock;
    if (lock)
        pthread_mutex_lock(lock);
    atomic_fetch_add(&o->done, 1);
    if (lock)
        pthread_mutex_unlock(lock);
}

static void on_failure(void *arg, const char *message)
{
    struct fixture *x = arg;
    assert_non_null(strstr(message, x->fake.canary_code == ENGINE_OK ? "injected" : "canary"));
    atomic_fetch_add(&x->failures, 1);
}

static void on_idle(void *arg)
{
    struct fixture *x = arg;
    atomic_fetch_add(&x->idles, 1);
}

void fixture_start_waiting(struct fixture *x, int depth, int64_t wait_us, int32_t max_rows, bool tells)
{
    memset(x, 0, sizeof *x);
    fake_init(&x->fake, depth, tells);
    struct scheduler_options options = {
        .device = &x->fake.base,
        .model = &x->fake.model,
        .queue_rows = QUEUE_ROWS * max_rows / MAX_ROWS,
        .batch_wait_us = wait_us,
        .max_rows = max_rows,
        .max_slots = MAX_SLOTS * max_rows / MAX_ROWS,
        .on_failure = on_failure,
        .on_failure_arg = x,
        .on_idle = on_idle,
        .on_idle_arg = x,
    };
    struct engine_error error;
    assert_int_equal(scheduler_create(&options, &x->scheduler, &error), ENGINE_OK);
}

void fixture_start(struct fixture *x, int depth, int64_t wait_us) { fixture_start_waiting(x, depth, wait_us, MAX_ROWS, false); }

void fixture_start_wide(struct fixture *x, int depth, int32_t max_rows, bool tells) { fixture_start_waiting(x, depth, 0, max_rows, tells); }

void fixture_stop(struct fixture *x)
{
    fake_release(&x->fake);
    scheduler_destroy(x->scheduler);
    fake_finish(&x->fake);
}

void order_init(struct order *o, int32_t layer, enum engine_mode mode, int32_t rows, int32_t k)
{
    memset(o, 0, sizeof *o);
    size_t n = (size_t)rows * FAKE_HIDDEN, slots = k ? (size_t)rows * (size_t)k : 0;
    if (!k) {
        o->row_slots = calloc((size_t)rows + 1, sizeof *o->row_slots);
        for (int32_t t = 0; t < rows; t++)
            o->row_slots[t + 1] = o->row_slots[t] + t % 4;
        slots = (size_t)o->row_slots[rows];
    }
    o->hidden = calloc(n, sizeof *o->hidden);
    o->out = calloc(n, sizeof *o->out);
    o->ids = calloc(slots + 1, sizeof *o->ids);
    o->weights = calloc(slots + 1, sizeof *o->weights);
    for (size_t i = 0; i < n; i++)
        o->hidden[i] = (float)(i % 97);
    for (size_t i = 0; i < slots; i++) {
        o->ids[i] = (int32_t)(i % (FAKE_EXPERTS + 1)) - 1;
        o->weights[i] = (float)(i % 5);
    }
    o->request = (struct engine_request){
        .layer = layer,
        .mode = mode,
        .rows = rows,
        .dtype = DTYPE_FP32,
        .hidden = o->hidden,
        .out = o->out,
        .k = k,
        .row_slots = o->row_slots,
        .expert_ids = o->ids,
        .expert_weights = o->weights,
        .done = on_done,
        .user = o,
    };
}

void order_finish(struct order *o)
{
    free(o->hidden);
    free(o->out);
    free(o->ids);
    free(o->weights);
    free(o->row_slots);
}

void order_submit(struct fixture *x, struct order *o)
{
    struct engine_error error = {0};
    enum engine_code code = scheduler_submit(x->scheduler, &o->request, &error);
    if (code != ENGINE_OK)
        fail_msg("%s: %s", engine_code_name(code), error.message);
}

bool order_wait(struct order *o)
{
    for (int i = 0; i < 5000 && !atomic_load(&o->done); i++)
        usleep(1000);
    return atomic_load(&o->done) == 1;
}

bool order_right(const struct order *o)
{
    for (int32_t t = 0; t < o->request.rows; t++) {
        int32_t from = o->row_slots ? o->row_slots[t] : t * o->request.k, to = o->row_slots ? o->row_slots[t + 1] : from + o->request.k;
        float add = 0;
        for (int32_t s = from; s < to; s++)
            add += 1000.f * (float)(o->ids[s] == FAKE_EXPERTS - 1 ? -1 : o->ids[s]) + o->weights[s];
        for (int32_t j = 0; j < FAKE_HIDDEN; j++) {
            if (o->out[t * FAKE_HIDDEN + j] != o->hidden[t * FAKE_HIDDEN + j] + add)
                return false;
        }
    }
    return true;
}

void order_expect(struct order *o, enum engine_code code)
{
    assert_true(order_wait(o));
    assert_int_equal(o->request.status, code);
    if (code == ENGINE_OK)
        assert_true(order_right(o));
}

bool wait_count(atomic_int *count, int least)
{
    for (int i = 0; i < 5000 && atomic_load(count) < least; i++)
        usleep(1000);
    return atomic_load(count) >= least;
}
