/* SPDX-License-Identifier: Apache-2.0
 *
 * The scheduler on a device that waits to be told: order, merging, windows, fairness, dropping, jobs, draining, failure.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "engine/clock.h"
#include "engine/scheduler.h"
#include "fake_device.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_ROWS = 10, MAX_SLOTS = 40, QUEUE_ROWS = 60 };

struct fixture {
    struct fake_device fake;
    struct scheduler *scheduler;
    atomic_int failures, idles;
};

/* A request with memory of its own. Row t of the result is known from `seed`. */
struct order {
    struct engine_request request;
    float *hidden, *out, *weights;
    int32_t *ids, *row_slots;
    atomic_int done;
    int sequence; /* of its completion among all */
    int64_t done_ns;
};

static atomic_int sequence;

static void on_done(struct engine_request *request)
{
    struct order *o = request->user;
    o->sequence = atomic_fetch_add(&sequence, 1);
    o->done_ns = clock_now_ns();
    atomic_fetch_add(&o->done, 1);
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

static void start(struct fixture *x, int depth, int64_t wait_us)
{
    memset(x, 0, sizeof *x);
    fake_init(&x->fake, depth);
    struct scheduler_options options = {
        .device = &x->fake.base,
        .model = &x->fake.model,
        .queue_rows = QUEUE_ROWS,
        .batch_wait_us = wait_us,
        .max_rows = MAX_ROWS,
        .max_slots = MAX_SLOTS,
        .on_failure = on_failure,
        .on_failure_arg = x,
        .on_idle = on_idle,
        .on_idle_arg = x,
    };
    struct engine_error error;
    assert_int_equal(scheduler_create(&options, &x->scheduler, &error), ENGINE_OK);
}

static void stop(struct fixture *x)
{
    fake_release(&x->fake);
    scheduler_destroy(x->scheduler);
    fake_finish(&x->fake);
}

/* Rows with k slots each, or when k is 0 row t with t % 4 slots. */
static void order_init(struct order *o, int32_t layer, enum engine_mode mode, int32_t rows, int32_t k)
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

static void order_finish(struct order *o)
{
    free(o->hidden);
    free(o->out);
    free(o->ids);
    free(o->weights);
    free(o->row_slots);
}

static void submit(struct fixture *x, struct order *o)
{
    struct engine_error error = {0};
    enum engine_code code = scheduler_submit(x->scheduler, &o->request, &error);
    if (code != ENGINE_OK)
        fail_msg("%s: %s", engine_code_name(code), error.message);
}

static bool wait_done(struct order *o)
{
    for (int i = 0; i < 5000 && !atomic_load(&o->done); i++)
        usleep(1000);
    return atomic_load(&o->done) == 1;
}

/* Waits for the request and looks at its code and, on success, at every number. */
static void expect(struct order *o, enum engine_code code)
{
    assert_true(wait_done(o));
    assert_int_equal(o->request.status, code);
    if (code != ENGINE_OK)
        return;
    for (int32_t t = 0; t < o->request.rows; t++) {
        int32_t from = o->row_slots ? o->row_slots[t] : t * o->request.k, to = o->row_slots ? o->row_slots[t + 1] : from + o->request.k;
        float add = 0;
        for (int32_t s = from; s < to; s++)
            add += 1000.f * (float)(o->ids[s] == FAKE_EXPERTS - 1 ? -1 : o->ids[s]) + o->weights[s];
        for (int32_t j = 0; j < FAKE_HIDDEN; j++)
            assert_true(o->out[t * FAKE_HIDDEN + j] == o->hidden[t * FAKE_HIDDEN + j] + add);
    }
}

static void expect_record(struct fixture *x, int i, int32_t layer_index, int32_t rows, enum kernel_path path)
{
    assert_int_equal(x->fake.record[i].layer_index, layer_index);
    assert_int_equal(x->fake.record[i].rows, rows);
    assert_int_equal(x->fake.record[i].path, path);
}

static void a_request_is_computed_and_its_path_follows_its_rows(void **state)
{
    (void)state;
    struct fixture x;
    struct order few, many, forced, ragged;
    start(&x, 1, 0);
    order_init(&few, 2, ENGINE_AUTO, 4, 2);
    order_init(&many, 2, ENGINE_AUTO, 5, 2);
    order_init(&forced, 0, ENGINE_PREFILL, 1, 3);
    order_init(&ragged, 4, ENGINE_DECODE, 9, 0);
    submit(&x, &few);
    expect(&few, ENGINE_OK);
    submit(&x, &many);
    expect(&many, ENGINE_OK);
    submit(&x, &forced);
    expect(&forced, ENGINE_OK);
    submit(&x, &ragged);
    expect(&ragged, ENGINE_OK);
    assert_int_equal(few.request.path, ENGINE_DECODE);
    assert_int_equal(many.request.path, ENGINE_PREFILL);
    expect_record(&x, 0, 1, 4, KERNEL_DECODE);
    expect_record(&x, 1, 1, 5, KERNEL_PREFILL);
    expect_record(&x, 2, 0, 1, KERNEL_PREFILL);
    expect_record(&x, 3, 2, 9, KERNEL_DECODE);
    assert_int_equal(x.fake.record[3].slots, ragged.row_slots[9]);
    assert_int_equal(few.request.batch_rows, 4);
    assert_true(few.request.queue_ns >= 0 && few.request.compute_ns > 0);

    struct engine_stats stats;
    assert_true(scheduler_wait_idle(x.scheduler, 1000));
    scheduler_stats(x.scheduler, &stats);
    assert_int_equal(stats.requests_ok[0], 2);
    assert_int_equal(stats.requests_ok[1], 2);
    assert_int_equal(stats.rows_ok[0], 13);
    assert_int_equal(stats.slots_ok[1], 13);
    assert_int_equal(stats.batches[0], 2);
    assert_int_equal(stats.batch_rows[1].bucket[3], 1); /* 5 rows: over 4, at most 8 */
    assert_int_equal(stats.batch_rows[1].bucket[0], 1);
    assert_int_equal(stats.queue_us[0].count, 2);
    assert_int_equal(stats.running_rows + stats.queued_rows + stats.queued_requests, 0);
    stop(&x);
    order_finish(&few);
    order_finish(&many);
    order_finish(&forced);
    order_finish(&ragged);
}

/* What waits together under one key runs together, in order of arrival; keys take turns by age. */
static void waiting_requests_of_a_key_merge(void **state)
{
    (void)state;
    struct fixture x;
    struct order o[7];
    start(&x, 1, 0);
    fake_hold(&x.fake);
    order_init(&o[0], 0, ENGINE_AUTO, 1, 1);
    submit(&x, &o[0]);
    assert_true(fake_wait_submitted(&x.fake, 1));
    order_init(&o[1], 0, ENGINE_DECODE, 3, 2);
    order_init(&o[2], 2, ENGINE_DECODE, 1, 1);
    order_init(&o[3], 0, ENGINE_DECODE, 2, 4); /* another K */
    order_init(&o[4], 0, ENGINE_PREFILL, 2, 2);
    order_init(&o[5], 2, ENGINE_DECODE, 2, 1);
    order_init(&o[6], 0, ENGINE_DECODE, 4, 0);
    for (int i = 1; i < 7; i++)
        submit(&x, &o[i]);
    fake_release(&x.fake);
    for (int i = 0; i < 7; i++)
        expect(&o[i], ENGINE_OK);
    assert_int_equal(fake_submitted(&x.fake), 4);
    expect_record(&x, 1, 0, 9, KERNEL_DECODE);
    expect_record(&x, 2, 1, 3, KERNEL_DECODE);
    expect_record(&x, 3, 0, 2, KERNEL_PREFILL);
    assert_int_equal(x.fake.record[1].slots, 6 + 8 + o[6].row_slots[4]);
    assert_true(o[1].sequence < o[3].sequence && o[3].sequence < o[6].sequence);
    assert_int_equal(o[3].request.batch_rows, 9);
    stop(&x);
    for (int i = 0; i < 7; i++)
        order_finish(&o[i]);
}

/* Requests that could be whole are not cut; a batch closes at the rows or the slots, whichever comes first. */
static void a_batch_closes_at_either_bound(void **state)
{
    (void)state;
    struct fixture x;
    struct order o[6];
    start(&x, 1, 0);
    fake_hold(&x.fake);
    order_init(&o[0], 0, ENGINE_DECODE, 1, 1);
    submit(&x, &o[0]);
    assert_true(fake_wait_submitted(&x.fake, 1));
    order_init(&o[1], 0, ENGINE_DECODE, 6, 1);
    order_init(&o[2], 0, ENGINE_DECODE, 5, 1); /* 11 rows: too many */
    order_init(&o[3], 0, ENGINE_DECODE, 4, 8); /* 5 + 32 slots: fits, 9 rows */
    order_init(&o[4], 0, ENGINE_DECODE, 1, 8); /* 45 slots: too many */
    order_init(&o[5], 0, ENGINE_DECODE, 9, 1);
    for (int i = 1; i < 6; i++)
        submit(&x, &o[i]);
    fake_release(&x.fake);
    for (int i = 0; i < 6; i++)
        expect(&o[i], ENGINE_OK);
    assert_int_equal(fake_submitted(&x.fake), 4);
    expect_record(&x, 1, 0, 6, KERNEL_DECODE);
    expect_record(&x, 2, 0, 9, KERNEL_DECODE);
    expect_record(&x, 3, 0, 10, KERNEL_DECODE);
    stop(&x);
    for (int i = 0; i < 6; i++)
        order_finish(&o[i]);
}

/* 25 rows in windows of 10: between two windows everybody else has a turn, also those of the same key. */
static void long_requests_run_in_windows_and_share(void **state)
{
    (void)state;
    struct fixture x;
    struct order big, other, same, wide;
    start(&x, 1, 0);
    fake_hold(&x.fake);
    order_init(&big, 0, ENGINE_PREFILL, 25, 2);
    order_init(&other, 2, ENGINE_PREFILL, 5, 2);
    order_init(&same, 0, ENGINE_PREFILL, 4, 2);
    submit(&x, &big);
    assert_true(fake_wait_submitted(&x.fake, 1));
    submit(&x, &other);
    submit(&x, &same);
    fake_release(&x.fake);
    expect(&big, ENGINE_OK);
    expect(&other, ENGINE_OK);
    expect(&same, ENGINE_OK);
    /* big 10 | other (older than big's turn) | big's next 10 | ... `same` queued behind big's remainder of the same list. */
    assert_int_equal(x.fake.record[0].rows, 10);
    assert_true(other.sequence < big.sequence);
    assert_true(same.sequence < big.sequence);
    assert_int_equal(big.request.batch_rows, 10);
    int32_t rows = 0;
    for (int i = 0; i < fake_submitted(&x.fake); i++) {
        assert_true(x.fake.record[i].rows <= MAX_ROWS && x.fake.record[i].slots <= MAX_SLOTS);
        rows += x.fake.record[i].rows;
    }
    assert_int_equal(rows, 34);

    /* Cut by slots: 8 a row leaves room for 5 rows; and by slots of rows that own different numbers. */
    int before = fake_submitted(&x.fake);
    order_init(&wide, 4, ENGINE_PREFILL, 12, 8);
    submit(&x, &wide);
    expect(&wide, ENGINE_OK);
    assert_int_equal(fake_submitted(&x.fake) - before, 3);
    order_finish(&wide);
    order_init(&wide, 4, ENGINE_PREFILL, 50, 0);
    submit(&x, &wide);
    expect(&wide, ENGINE_OK);
    assert_int_equal(wide.request.rows_done, 50);
    stop(&x);
    order_finish(&big);
    order_finish(&other);
    order_finish(&same);
    order_finish(&wide);
}

/* However many requests keep coming for one layer, another layer's request waits only for those that came before it. */
static void no_layer_starves(void **state)
{
    (void)state;
    struct fixture x;
    struct order o[40], lone;
    start(&x, 1, 0);
    fake_hold(&x.fake);
    order_init(&o[0], 0, ENGINE_DECODE, 1, 1);
    submit(&x, &o[0]);
    assert_true(fake_wait_submitted(&x.fake, 1));
    order_init(&o[1], 0, ENGINE_DECODE, 8, 1);
    submit(&x, &o[1]);
    order_init(&lone, 2, ENGINE_DECODE, 1, 1);
    submit(&x, &lone);
    for (int i = 2; i < 6; i++) {
        order_init(&o[i], 0, ENGINE_DECODE, 8, 1);
        submit(&x, &o[i]);
    }
    fake_release(&x.fake);
    expect(&lone, ENGINE_OK);
    for (int i = 0; i < 6; i++) {
        expect(&o[i], ENGINE_OK);
        order_finish(&o[i]);
    }
    assert_int_equal(x.fake.record[2].layer_index, 1);
    stop(&x);
    order_finish(&lone);
}

/* Deadlines and cancellations are answered while the device is busy with something long, and the device never sees them. */
static void dropped_requests_complete_behind_a_long_batch(void **state)
{
    (void)state;
    struct fixture x;
    struct order running, late, gone, kept;
    start(&x, 1, 0);
    fake_hold(&x.fake);
    order_init(&running, 0, ENGINE_DECODE, 1, 1);
    order_init(&late, 0, ENGINE_DECODE, 2, 1);
    order_init(&gone, 0, ENGINE_DECODE, 3, 1);
    order_init(&kept, 0, ENGINE_DECODE, 4, 1);
    submit(&x, &running);
    assert_true(fake_wait_submitted(&x.fake, 1));
    late.request.deadline_ns = clock_now_ns() + 30000000;
    kept.request.deadline_ns = clock_now_ns() + 60 * CLOCK_NS_PER_S;
    submit(&x, &late);
    submit(&x, &gone);
    submit(&x, &kept);
    scheduler_cancel(x.scheduler, &gone.request);
    expect(&gone, ENGINE_CANCELLED);
    expect(&late, ENGINE_DEADLINE_EXCEEDED);
    assert_true(late.done_ns >= late.request.deadline_ns);
    assert_true(late.done_ns < late.request.deadline_ns + CLOCK_NS_PER_S);
    assert_true(late.request.queue_ns >= 29000000);
    assert_false(atomic_load(&running.done));
    /* Who has begun finishes, whether his client is there or not. */
    scheduler_cancel(x.scheduler, &running.request);
    fake_release(&x.fake);
    expect(&running, ENGINE_OK);
    expect(&kept, ENGINE_OK);
    assert_int_equal(fake_submitted(&x.fake), 2);
    expect_record(&x, 1, 0, 4, KERNEL_DECODE);
    struct engine_stats stats;
    assert_true(scheduler_wait_idle(x.scheduler, 1000));
    scheduler_stats(x.scheduler, &stats);
    assert_int_equal(stats.requests_cancelled, 1);
    assert_int_equal(stats.requests_expired, 1);
    assert_int_equal(stats.requests_ok[0], 2);
    stop(&x);
    order_finish(&running);
    order_finish(&late);
    order_finish(&gone);
    order_finish(&kept);
}

static void a_request_past_its_deadline_is_never_computed(void **state)
{
    (void)state;
    struct fixture x;
    struct order late;
    start(&x, 1, 0);
    order_init(&late, 0, ENGINE_DECODE, 2, 1);
    late.request.deadline_ns = clock_now_ns() - 1;
    submit(&x, &late);
    expect(&late, ENGINE_DEADLINE_EXCEEDED);
    assert_int_equal(fake_submitted(&x.fake), 0);
    stop(&x);
    order_finish(&late);
}

static void cancelling_between_windows_lets_the_request_finish(void **state)
{
    (void)state;
    struct fixture x;
    struct order big;
    start(&x, 1, 0);
    fake_hold(&x.fake);
    order_init(&big, 0, ENGINE_PREFILL, 30, 1);
    big.request.deadline_ns = clock_now_ns() + 5 * CLOCK_NS_PER_S;
    submit(&x, &big);
    assert_true(fake_wait_submitted(&x.fake, 1));
    scheduler_cancel(x.scheduler, &big.request);
    usleep(20000);
    fake_release(&x.fake);
    expect(&big, ENGINE_OK);
    assert_int_equal(fake_submitted(&x.fake), 3);
    stop(&x);
    order_finish(&big);
}

static void the_queue_is_bounded_in_rows(void **state)
{
    (void)state;
    struct fixture x;
    struct order o[4], huge, over, wide;
    struct engine_error error;
    start(&x, 1, 0);
    fake_hold(&x.fake);
    order_init(&o[0], 0, ENGINE_DECODE, 10, 1);
    submit(&x, &o[0]);
    assert_true(fake_wait_submitted(&x.fake, 1));
    order_init(&o[1], 0, ENGINE_DECODE, 49, 1);
    submit(&x, &o[1]);
    order_init(&over, 2, ENGINE_DECODE, 2, 1);
    assert_int_equal(scheduler_submit(x.scheduler, &over.request, &error), ENGINE_QUEUE_FULL);
    assert_non_null(strstr(error.message, "60")); /* the limit */
    order_init(&o[2], 2, ENGINE_DECODE, 1, 1);
    submit(&x, &o[2]); /* just fits */
    struct engine_stats stats;
    scheduler_stats(x.scheduler, &stats);
    assert_int_equal(stats.queued_rows, 50);
    assert_int_equal(stats.running_rows, 10);
    assert_int_equal(stats.queued_requests, 2);
    order_init(&huge, 0, ENGINE_DECODE, QUEUE_ROWS + 1, 1);
    assert_int_equal(scheduler_submit(x.scheduler, &huge.request, &error), ENGINE_TOO_LARGE);
    order_init(&wide, 0, ENGINE_DECODE, 1, MAX_SLOTS + 1);
    assert_int_equal(scheduler_submit(x.scheduler, &wide.request, &error), ENGINE_TOO_LARGE);
    wide.request.layer = 1;
    assert_int_equal(scheduler_submit(x.scheduler, &wide.request, &error), ENGINE_LAYER_NOT_FOUND);
    fake_release(&x.fake);
    for (int i = 0; i < 3; i++)
        expect(&o[i], ENGINE_OK);
    assert_true(scheduler_wait_idle(x.scheduler, 1000));
    submit(&x, &over); /* there is room again */
    expect(&over, ENGINE_OK);
    assert_int_equal(atomic_load(&huge.done) + atomic_load(&wide.done), 0);
    stop(&x);
    for (int i = 0; i < 3; i++)
        order_finish(&o[i]);
    order_finish(&over);
    order_finish(&huge);
    order_finish(&wide);
}

struct job_log {
    struct fixture *x;
    pthread_t thread;
    int at[4];
    int finished[4]; /* batches that had left the device */
    atomic_int count;
};

static void job(void *arg)
{
    struct job_log *log = arg;
    int i = atomic_load(&log->count);
    pthread_mutex_lock(&log->x->fake.lock);
    log->finished[i] = log->x->fake.finished;
    pthread_mutex_unlock(&log->x->fake.lock);
    log->thread = pthread_self();
    atomic_fetch_add(&log->count, 1);
}

static void job_that_posts(void *arg)
{
    struct job_log *log = arg;
    scheduler_post(log->x->scheduler, job, log);
    job(log);
}

static bool wait_count(atomic_int *count, int least)
{
    for (int i = 0; i < 5000 && atomic_load(count) < least; i++)
        usleep(1000);
    return atomic_load(count) >= least;
}

static void jobs_run_between_batches_and_when_idle(void **state)
{
    (void)state;
    struct fixture x;
    struct order o[2];
    start(&x, 1, 0);
    struct job_log log = {.x = &x};
    int64_t before = clock_now_ns();
    scheduler_post(x.scheduler, job_that_posts, &log);
    assert_true(wait_count(&log.count, 2));
    assert_true(clock_now_ns() - before < CLOCK_NS_PER_S / 2);
    assert_false(pthread_equal(log.thread, pthread_self()));

    fake_hold(&x.fake);
    order_init(&o[0], 0, ENGINE_DECODE, 1, 1);
    order_init(&o[1], 0, ENGINE_DECODE, 1, 1);
    submit(&x, &o[0]);
    assert_true(fake_wait_submitted(&x.fake, 1));
    submit(&x, &o[1]);
    scheduler_post(x.scheduler, job, &log);
    usleep(20000);
    assert_int_equal(atomic_load(&log.count), 2); /* not while a batch computes */
    fake_release(&x.fake);
    expect(&o[1], ENGINE_OK);
    assert_int_equal(atomic_load(&log.count), 3);
    assert_int_equal(log.finished[2], 1); /* before the batch that waited */

    scheduler_begin_drain(x.scheduler);
    scheduler_post(x.scheduler, job, &log);
    assert_true(wait_count(&log.count, 4));
    stop(&x);
    order_finish(&o[0]);
    order_finish(&o[1]);
}

static void draining_refuses_new_work_and_finishes_the_old(void **state)
{
    (void)state;
    struct fixture x;
    struct order running, queued, late;
    struct engine_error error;
    start(&x, 1, 500000);
    assert_true(scheduler_wait_idle(x.scheduler, 0));
    fake_hold(&x.fake);
    order_init(&running, 0, ENGINE_DECODE, 10, 1);
    order_init(&queued, 2, ENGINE_DECODE, 2, 1);
    order_init(&late, 2, ENGINE_DECODE, 2, 1);
    submit(&x, &running);
    assert_true(fake_wait_submitted(&x.fake, 1));
    submit(&x, &queued);
    scheduler_begin_drain(x.scheduler);
    assert_int_equal(scheduler_submit(x.scheduler, &late.request, &error), ENGINE_DRAINING);
    assert_false(scheduler_wait_idle(x.scheduler, 20));
    fake_release(&x.fake);
    int64_t before = clock_now_ns();
    assert_true(scheduler_wait_idle(x.scheduler, 5000));
    assert_true(clock_now_ns() - before < 400000000); /* nobody waits for company any more */
    expect(&running, ENGINE_OK);
    expect(&queued, ENGINE_OK);
    stop(&x);
    order_finish(&running);
    order_finish(&queued);
    order_finish(&late);
}

static void *release_soon(void *arg)
{
    usleep(50000);
    fake_release(arg);
    return NULL;
}

static void stopping_completes_everything(void **state)
{
    (void)state;
    struct fixture x;
    struct order running, queued[2];
    struct engine_error error;
    pthread_t helper;
    start(&x, 1, 0);
    struct job_log log = {.x = &x};
    fake_hold(&x.fake);
    order_init(&running, 0, ENGINE_PREFILL, 15, 1); /* its second window has yet to run */
    order_init(&queued[0], 0, ENGINE_PREFILL, 2, 1);
    order_init(&queued[1], 4, ENGINE_DECODE, 2, 1);
    submit(&x, &running);
    assert_true(fake_wait_submitted(&x.fake, 1));
    submit(&x, &queued[0]);
    submit(&x, &queued[1]);
    scheduler_post(x.scheduler, job, &log);
    assert_int_equal(pthread_create(&helper, NULL, release_soon, &x.fake), 0);
    scheduler_stop(x.scheduler);
    pthread_join(helper, NULL);
    assert_int_equal(atomic_load(&running.done) + atomic_load(&queued[0].done) + atomic_load(&queued[1].done), 3);
    expect(&running, ENGINE_OK);
    expect(&queued[0], ENGINE_DRAINING);
    expect(&queued[1], ENGINE_DRAINING);
    assert_int_equal(atomic_load(&log.count), 1);
    scheduler_post(x.scheduler, job, &log);
    assert_int_equal(atomic_load(&log.count), 2);
    assert_true(pthread_equal(log.thread, pthread_self()));
    assert_int_equal(scheduler_submit(x.scheduler, &running.request, &error), ENGINE_DRAINING);
    stop(&x);
    order_finish(&running);
    order_finish(&queued[0]);
    order_finish(&queued[1]);
}

/* In depth 1 the fault shows in submit, in depth 2 in wait. */
static void a_failed_device_fails_everybody_once(void **state)
{
    (void)state;
    for (int depth = 1; depth <= 2; depth++) {
        struct fixture x;
        struct order running, big, queued, late;
        struct engine_error error;
        start(&x, depth, 0);
        fake_hold(&x.fake);
        x.fake.fail_submit = depth == 1 ? 2 : 0;
        x.fake.fail_wait = depth == 1 ? 0 : 2;
        x.fake.fail_code = ENGINE_DEVICE_FAILED;
        order_init(&running, 2, ENGINE_DECODE, 1, 1);
        order_init(&big, 0, ENGINE_PREFILL, 25, 1);
        order_init(&queued, 0, ENGINE_PREFILL, 8, 1);
        order_init(&late, 2, ENGINE_DECODE, 1, 1);
        submit(&x, &running);
        assert_true(fake_wait_submitted(&x.fake, 1));
        submit(&x, &big);
        submit(&x, &queued);
        fake_release(&x.fake);
        expect(&running, ENGINE_OK);
        expect(&big, ENGINE_DEVICE_FAILED);
        expect(&queued, ENGINE_DEVICE_FAILED);
        assert_true(scheduler_wait_idle(x.scheduler, 1000));
        assert_true(scheduler_failed(x.scheduler));
        assert_int_equal(scheduler_submit(x.scheduler, &late.request, &error), ENGINE_DEVICE_FAILED);
        assert_non_null(strstr(error.message, "injected fault"));
        assert_int_equal(atomic_load(&x.failures), 1);
        struct engine_stats stats;
        scheduler_stats(x.scheduler, &stats);
        assert_true(stats.failed);
        assert_int_equal(stats.requests_failed, 2);
        assert_int_equal(stats.running_rows + stats.queued_rows + stats.queued_requests, 0);
        struct job_log log = {.x = &x};
        scheduler_post(x.scheduler, job, &log); /* jobs still run: adapters must be let go */
        assert_true(wait_count(&log.count, 1));
        stop(&x);
        order_finish(&running);
        order_finish(&big);
        order_finish(&queued);
        order_finish(&late);
    }
}

/* Running out of memory for one batch is no reason to give the device up. */
static void a_passing_fault_fails_one_batch(void **state)
{
    (void)state;
    for (int depth = 1; depth <= 2; depth++) {
        struct fixture x;
        struct order big, next;
        start(&x, depth, 0);
        x.fake.fail_submit = 2;
        x.fake.fail_code = ENGINE_OUT_OF_DEVICE_MEMORY;
        order_init(&big, 0, ENGINE_PREFILL, 25, 1); /* its second window fails, the third never runs */
        order_init(&next, 0, ENGINE_PREFILL, 8, 1);
        submit(&x, &big);
        expect(&big, ENGINE_OUT_OF_DEVICE_MEMORY);
        assert_true(scheduler_wait_idle(x.scheduler, 1000));
        submit(&x, &next);
        expect(&next, ENGINE_OK);
        assert_false(scheduler_failed(x.scheduler));
        assert_int_equal(atomic_load(&x.failures), 0);
        stop(&x);
        order_finish(&big);
        order_finish(&next);
    }
}

static void an_idle_device_is_probed(void **state)
{
    (void)state;
    struct fixture x;
    struct order late;
    struct engine_error error;
    start(&x, 1, 0);
    assert_true(wait_count(&x.idles, 1));
    assert_false(scheduler_failed(x.scheduler));
    pthread_mutex_lock(&x.fake.lock);
    x.fake.canary_code = ENGINE_DEVICE_FAILED;
    pthread_mutex_unlock(&x.fake.lock);
    assert_true(wait_count(&x.failures, 1));
    order_init(&late, 2, ENGINE_DECODE, 1, 1);
    assert_int_equal(scheduler_submit(x.scheduler, &late.request, &error), ENGINE_DEVICE_FAILED);
    stop(&x);
    order_finish(&late);
}

static void a_lone_request_waits_for_company(void **state)
{
    (void)state;
    struct fixture x;
    struct order first, second, full[2];
    start(&x, 1, 150000);
    order_init(&first, 0, ENGINE_DECODE, 2, 1);
    order_init(&second, 0, ENGINE_DECODE, 3, 1);
    submit(&x, &first);
    usleep(20000);
    assert_int_equal(fake_submitted(&x.fake), 0);
    submit(&x, &second);
    expect(&first, ENGINE_OK);
    expect(&second, ENGINE_OK);
    assert_int_equal(fake_submitted(&x.fake), 1);
    assert_true(first.request.queue_ns >= 150000000);
    assert_true(second.request.queue_ns < 149000000);
    /* A full batch waits for nobody. */
    order_init(&full[0], 2, ENGINE_DECODE, 4, 1);
    order_init(&full[1], 2, ENGINE_DECODE, 6, 1);
    submit(&x, &full[0]);
    submit(&x, &full[1]);
    expect(&full[0], ENGINE_OK);
    expect(&full[1], ENGINE_OK);
    assert_true(full[0].request.queue_ns < 140000000);
    stop(&x);
    order_finish(&first);
    order_finish(&second);
    order_finish(&full[0]);
    order_finish(&full[1]);
}

static void a_deeper_device_gets_the_next_batch_meanwhile(void **state)
{
    (void)state;
    struct fixture x;
    struct order o[3];
    start(&x, 2, 0);
    fake_hold(&x.fake);
    for (int i = 0; i < 3; i++)
        order_init(&o[i], 2 * i, ENGINE_DECODE, 10, 1);
    submit(&x, &o[0]);
    /* The engine thread is in wait for the first by now, or soon: either way both others queue up. */
    submit(&x, &o[1]);
    submit(&x, &o[2]);
    assert_true(fake_wait_submitted(&x.fake, 1));
    usleep(20000);
    assert_true(fake_submitted(&x.fake) <= 2);
    fake_release(&x.fake);
    for (int i = 0; i < 3; i++)
        expect(&o[i], ENGINE_OK);
    assert_true(o[0].sequence < o[1].sequence && o[1].sequence < o[2].sequence);
    struct order big, small;
    order_init(&big, 0, ENGINE_PREFILL, 45, 1);
    order_init(&small, 0, ENGINE_PREFILL, 3, 1);
    submit(&x, &big);
    submit(&x, &small);
    expect(&big, ENGINE_OK);
    expect(&small, ENGINE_OK);
    assert_int_equal(x.fake.most_pending, 2);
    stop(&x);
    for (int i = 0; i < 3; i++)
        order_finish(&o[i]);
    order_finish(&big);
    order_finish(&small);
}

/* ---- everything at once ------------------------------------------------------------------------------------- */

struct client {
    struct fixture *x;
    unsigned seed;
    int64_t until;
    int ok, dropped, refused, jobs;
    atomic_int job_runs;
    bool wrong;
};

static void count_job(void *arg)
{
    struct client *c = arg;
    atomic_fetch_add(&c->job_runs, 1);
}

static unsigned dice(struct client *c, unsigned n)
{
    c->seed = c->seed * 1103515245u + 12345u;
    return (c->seed >> 16) % n;
}

static void *client_main(void *arg)
{
    struct client *c = arg;
    struct engine_error error;
    enum { FLOCK = 4 };
    struct order o[FLOCK];
    while (clock_now_ns() < c->until) {
        bool queued[FLOCK];
        for (int i = 0; i < FLOCK; i++) {
            order_init(&o[i], (int32_t)dice(c, 3) * 2, ENGINE_AUTO, 1 + (int32_t)dice(c, 14), (int32_t)dice(c, 5));
            if (dice(c, 4) == 0)
                o[i].request.deadline_ns = clock_now_ns() + dice(c, 300000);
            queued[i] = scheduler_submit(c->x->scheduler, &o[i].request, &error) == ENGINE_OK;
            c->refused += !queued[i];
        }
        if (dice(c, 3) == 0) {
            c->jobs++;
            scheduler_post(c->x->scheduler, count_job, c);
        }
        /* The owner's word that a request hasn't completed is the fake's hold: cancel only what can't have run. */
        for (int i = 0; i < FLOCK; i++) {
            if (queued[i] && !wait_done(&o[i]))
                c->wrong = true;
            if (queued[i]) {
                c->ok += o[i].request.status == ENGINE_OK;
                c->dropped += o[i].request.status != ENGINE_OK;
            }
            order_finish(&o[i]);
        }
    }
    return NULL;
}

static void many_clients_at_once(void **state)
{
    (void)state;
    for (int depth = 1; depth <= 3; depth += 2) {
        struct fixture x;
        start(&x, depth, 0);
        struct client c[4];
        pthread_t thread[4];
        for (int i = 0; i < 4; i++) {
            c[i] = (struct client){.x = &x, .seed = (unsigned)i + 1, .until = clock_now_ns() + 700000000};
            assert_int_equal(pthread_create(&thread[i], NULL, client_main, &c[i]), 0);
        }
        struct engine_stats stats;
        for (int i = 0; i < 30; i++) {
            scheduler_stats(x.scheduler, &stats);
            assert_true(stats.queued_rows + stats.running_rows <= QUEUE_ROWS);
            usleep(10000);
        }
        int ok = 0, dropped = 0, refused = 0;
        for (int i = 0; i < 4; i++) {
            pthread_join(thread[i], NULL);
            assert_false(c[i].wrong);
            ok += c[i].ok;
            dropped += c[i].dropped;
            refused += c[i].refused;
        }
        assert_true(scheduler_wait_idle(x.scheduler, 5000));
        for (int i = 0; i < 4; i++)
            assert_true(wait_count(&c[i].job_runs, c[i].jobs));
        scheduler_stats(x.scheduler, &stats);
        assert_int_equal(stats.requests_ok[0] + stats.requests_ok[1], ok);
        assert_int_equal(stats.requests_expired, dropped);
        assert_int_equal(stats.requests_rejected, refused);
        assert_true(ok > 100);
        stop(&x);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_request_is_computed_and_its_path_follows_its_rows),
        cmocka_unit_test(waiting_requests_of_a_key_merge),
        cmocka_unit_test(a_batch_closes_at_either_bound),
        cmocka_unit_test(long_requests_run_in_windows_and_share),
        cmocka_unit_test(no_layer_starves),
        cmocka_unit_test(dropped_requests_complete_behind_a_long_batch),
        cmocka_unit_test(a_request_past_its_deadline_is_never_computed),
        cmocka_unit_test(cancelling_between_windows_lets_the_request_finish),
        cmocka_unit_test(the_queue_is_bounded_in_rows),
        cmocka_unit_test(jobs_run_between_batches_and_when_idle),
        cmocka_unit_test(draining_refuses_new_work_and_finishes_the_old),
        cmocka_unit_test(stopping_completes_everything),
        cmocka_unit_test(a_failed_device_fails_everybody_once),
        cmocka_unit_test(a_passing_fault_fails_one_batch),
        cmocka_unit_test(an_idle_device_is_probed),
        cmocka_unit_test(a_lone_request_waits_for_company),
        cmocka_unit_test(a_deeper_device_gets_the_next_batch_meanwhile),
        cmocka_unit_test(many_clients_at_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
