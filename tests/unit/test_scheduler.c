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
#include "orders.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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
    fixture_start(&x, 1, 0);
    order_init(&few, 2, ENGINE_AUTO, 4, 2);
    order_init(&many, 2, ENGINE_AUTO, 5, 2);
    order_init(&forced, 0, ENGINE_PREFILL, 1, 3);
    order_init(&ragged, 4, ENGINE_DECODE, 9, 0);
    order_submit(&x, &few);
    order_expect(&few, ENGINE_OK);
    order_submit(&x, &many);
    order_expect(&many, ENGINE_OK);
    order_submit(&x, &forced);
    order_expect(&forced, ENGINE_OK);
    order_submit(&x, &ragged);
    order_expect(&ragged, ENGINE_OK);
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
    fixture_stop(&x);
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
    fixture_start(&x, 1, 0);
    fake_hold(&x.fake);
    order_init(&o[0], 0, ENGINE_AUTO, 1, 1);
    order_submit(&x, &o[0]);
    assert_true(fake_wait_submitted(&x.fake, 1));
    order_init(&o[1], 0, ENGINE_DECODE, 3, 2);
    order_init(&o[2], 2, ENGINE_DECODE, 1, 1);
    order_init(&o[3], 0, ENGINE_DECODE, 2, 4); /* another K */
    order_init(&o[4], 0, ENGINE_PREFILL, 2, 2);
    order_init(&o[5], 2, ENGINE_DECODE, 2, 1);
    order_init(&o[6], 0, ENGINE_DECODE, 4, 0);
    for (int i = 1; i < 7; i++)
        order_submit(&x, &o[i]);
    fake_release(&x.fake);
    for (int i = 0; i < 7; i++)
        order_expect(&o[i], ENGINE_OK);
    assert_int_equal(fake_submitted(&x.fake), 4);
    expect_record(&x, 1, 0, 9, KERNEL_DECODE);
    expect_record(&x, 2, 1, 3, KERNEL_DECODE);
    expect_record(&x, 3, 0, 2, KERNEL_PREFILL);
    assert_int_equal(x.fake.record[1].slots, 6 + 8 + o[6].row_slots[4]);
    assert_true(o[1].sequence < o[3].sequence && o[3].sequence < o[6].sequence);
    assert_int_equal(o[3].request.batch_rows, 9);
    fixture_stop(&x);
    for (int i = 0; i < 7; i++)
        order_finish(&o[i]);
}

/* Requests that could be whole are not cut; a batch closes at the rows or the slots, whichever comes first. */
static void a_batch_closes_at_either_bound(void **state)
{
    (void)state;
    struct fixture x;
    struct order o[6];
    fixture_start(&x, 1, 0);
    fake_hold(&x.fake);
    order_init(&o[0], 0, ENGINE_DECODE, 1, 1);
    order_submit(&x, &o[0]);
    assert_true(fake_wait_submitted(&x.fake, 1));
    order_init(&o[1], 0, ENGINE_DECODE, 6, 1);
    order_init(&o[2], 0, ENGINE_DECODE, 5, 1); /* 11 rows: too many */
    order_init(&o[3], 0, ENGINE_DECODE, 4, 8); /* 5 + 32 slots: fits, 9 rows */
    order_init(&o[4], 0, ENGINE_DECODE, 1, 8); /* 45 slots: too many */
    order_init(&o[5], 0, ENGINE_DECODE, 9, 1);
    for (int i = 1; i < 6; i++)
        order_submit(&x, &o[i]);
    fake_release(&x.fake);
    for (int i = 0; i < 6; i++)
        order_expect(&o[i], ENGINE_OK);
    assert_int_equal(fake_submitted(&x.fake), 4);
    expect_record(&x, 1, 0, 6, KERNEL_DECODE);
    expect_record(&x, 2, 0, 9, KERNEL_DECODE);
    expect_record(&x, 3, 0, 10, KERNEL_DECODE);
    fixture_stop(&x);
    for (int i = 0; i < 6; i++)
        order_finish(&o[i]);
}

/* 25 rows in windows of 10: between two windows everybody else has a turn, also those of the same key. */
static void long_requests_run_in_windows_and_share(void **state)
{
    (void)state;
    struct fixture x;
    struct order big, other, same, wide;
    fixture_start(&x, 1, 0);
    fake_hold(&x.fake);
    order_init(&big, 0, ENGINE_PREFILL, 25, 2);
    order_init(&other, 2, ENGINE_PREFILL, 5, 2);
    order_init(&same, 0, ENGINE_PREFILL, 4, 2);
    order_submit(&x, &big);
    assert_true(fake_wait_submitted(&x.fake, 1));
    order_submit(&x, &other);
    order_submit(&x, &same);
    fake_release(&x.fake);
    order_expect(&big, ENGINE_OK);
    order_expect(&other, ENGINE_OK);
    order_expect(&same, ENGINE_OK);
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
    order_submit(&x, &wide);
    order_expect(&wide, ENGINE_OK);
    assert_int_equal(fake_submitted(&x.fake) - before, 3);
    order_finish(&wide);
    order_init(&wide, 4, ENGINE_PREFILL, 50, 0);
    order_submit(&x, &wide);
    order_expect(&wide, ENGINE_OK);
    assert_int_equal(wide.request.rows_done, 50);
    fixture_stop(&x);
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
    fixture_start(&x, 1, 0);
    fake_hold(&x.fake);
    order_init(&o[0], 0, ENGINE_DECODE, 1, 1);
    order_submit(&x, &o[0]);
    assert_true(fake_wait_submitted(&x.fake, 1));
    order_init(&o[1], 0, ENGINE_DECODE, 8, 1);
    order_submit(&x, &o[1]);
    order_init(&lone, 2, ENGINE_DECODE, 1, 1);
    order_submit(&x, &lone);
    for (int i = 2; i < 6; i++) {
        order_init(&o[i], 0, ENGINE_DECODE, 8, 1);
        order_submit(&x, &o[i]);
    }
    fake_release(&x.fake);
    order_expect(&lone, ENGINE_OK);
    for (int i = 0; i < 6; i++) {
        order_expect(&o[i], ENGINE_OK);
        order_finish(&o[i]);
    }
    assert_int_equal(x.fake.record[2].layer_index, 1);
    fixture_stop(&x);
    order_finish(&lone);
}

/* Deadlines and cancellations are answered while the device is busy with something long, and the device never sees them. */
static void dropped_requests_complete_behind_a_long_batch(void **state)
{
    (void)state;
    struct fixture x;
    struct order running, late, gone, kept;
    fixture_start(&x, 1, 0);
    fake_hold(&x.fake);
    order_init(&running, 0, ENGINE_DECODE, 1, 1);
    order_init(&late, 0, ENGINE_DECODE, 2, 1);
    order_init(&gone, 0, ENGINE_DECODE, 3, 1);
    order_init(&kept, 0, ENGINE_DECODE, 4, 1);
    order_submit(&x, &running);
    assert_true(fake_wait_submitted(&x.fake, 1));
    late.request.deadline_ns = clock_now_ns() + 30000000;
    kept.request.deadline_ns = clock_now_ns() + 60 * CLOCK_NS_PER_S;
    order_submit(&x, &late);
    order_submit(&x, &gone);
    order_submit(&x, &kept);
    scheduler_cancel(x.scheduler, &gone.request);
    order_expect(&gone, ENGINE_CANCELLED);
    order_expect(&late, ENGINE_DEADLINE_EXCEEDED);
    assert_true(late.done_ns >= late.request.deadline_ns);
    assert_true(late.done_ns < late.request.deadline_ns + CLOCK_NS_PER_S);
    assert_true(late.request.queue_ns >= 29000000);
    assert_false(atomic_load(&running.done));
    /* Who has begun finishes, whether his client is there or not. */
    scheduler_cancel(x.scheduler, &running.request);
    fake_release(&x.fake);
    order_expect(&running, ENGINE_OK);
    order_expect(&kept, ENGINE_OK);
    assert_int_equal(fake_submitted(&x.fake), 2);
    expect_record(&x, 1, 0, 4, KERNEL_DECODE);
    struct engine_stats stats;
    assert_true(scheduler_wait_idle(x.scheduler, 1000));
    scheduler_stats(x.scheduler, &stats);
    assert_int_equal(stats.requests_cancelled, 1);
    assert_int_equal(stats.requests_expired, 1);
    assert_int_equal(stats.requests_ok[0], 2);
    fixture_stop(&x);
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
    fixture_start(&x, 1, 0);
    order_init(&late, 0, ENGINE_DECODE, 2, 1);
    late.request.deadline_ns = clock_now_ns() - 1;
    order_submit(&x, &late);
    order_expect(&late, ENGINE_DEADLINE_EXCEEDED);
    assert_int_equal(fake_submitted(&x.fake), 0);
    fixture_stop(&x);
    order_finish(&late);
}

static void cancelling_between_windows_lets_the_request_finish(void **state)
{
    (void)state;
    struct fixture x;
    struct order big;
    fixture_start(&x, 1, 0);
    fake_hold(&x.fake);
    order_init(&big, 0, ENGINE_PREFILL, 30, 1);
    big.request.deadline_ns = clock_now_ns() + 5 * CLOCK_NS_PER_S;
    order_submit(&x, &big);
    assert_true(fake_wait_submitted(&x.fake, 1));
    scheduler_cancel(x.scheduler, &big.request);
    usleep(20000);
    fake_release(&x.fake);
    order_expect(&big, ENGINE_OK);
    assert_int_equal(fake_submitted(&x.fake), 3);
    fixture_stop(&x);
    order_finish(&big);
}

static void the_queue_is_bounded_in_rows(void **state)
{
    (void)state;
    struct fixture x;
    struct order o[4], huge, over, wide;
    struct engine_error error;
    fixture_start(&x, 1, 0);
    fake_hold(&x.fake);
    order_init(&o[0], 0, ENGINE_DECODE, 10, 1);
    order_submit(&x, &o[0]);
    assert_true(fake_wait_submitted(&x.fake, 1));
    order_init(&o[1], 0, ENGINE_DECODE, 49, 1);
    order_submit(&x, &o[1]);
    order_init(&over, 2, ENGINE_DECODE, 2, 1);
    assert_int_equal(scheduler_submit(x.scheduler, &over.request, &error), ENGINE_QUEUE_FULL);
    assert_non_null(strstr(error.message, "60")); /* the limit */
    order_init(&o[2], 2, ENGINE_DECODE, 1, 1);
    order_submit(&x, &o[2]); /* just fits */
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
        order_expect(&o[i], ENGINE_OK);
    assert_true(scheduler_wait_idle(x.scheduler, 1000));
    order_submit(&x, &over); /* there is room again */
    order_expect(&over, ENGINE_OK);
    assert_int_equal(atomic_load(&huge.done) + atomic_load(&wide.done), 0);
    fixture_stop(&x);
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

static void jobs_run_between_batches_and_when_idle(void **state)
{
    (void)state;
    struct fixture x;
    struct order o[2];
    fixture_start(&x, 1, 0);
    struct job_log log = {.x = &x};
    int64_t before = clock_now_ns();
    scheduler_post(x.scheduler, job_that_posts, &log);
    assert_true(wait_count(&log.count, 2));
    assert_true(clock_now_ns() - before < CLOCK_NS_PER_S / 2);
    assert_false(pthread_equal(log.thread, pthread_self()));

    fake_hold(&x.fake);
    order_init(&o[0], 0, ENGINE_DECODE, 1, 1);
    order_init(&o[1], 0, ENGINE_DECODE, 1, 1);
    order_submit(&x, &o[0]);
    assert_true(fake_wait_submitted(&x.fake, 1));
    order_submit(&x, &o[1]);
    scheduler_post(x.scheduler, job, &log);
    usleep(20000);
    assert_int_equal(atomic_load(&log.count), 2); /* not while a batch computes */
    fake_release(&x.fake);
    order_expect(&o[1], ENGINE_OK);
    assert_int_equal(atomic_load(&log.count), 3);
    assert_int_equal(log.finished[2], 1); /* before the batch that waited */

    scheduler_begin_drain(x.scheduler);
    scheduler_post(x.scheduler, job, &log);
    assert_true(wait_count(&log.count, 4));
    fixture_stop(&x);
    order_finish(&o[0]);
    order_finish(&o[1]);
}

static void draining_refuses_new_work_and_finishes_the_old(void **state)
{
    (void)state;
    struct fixture x;
    struct order running, queued, late;
    struct engine_error error;
    fixture_start(&x, 1, 500000);
    assert_true(scheduler_wait_idle(x.scheduler, 0));
    fake_hold(&x.fake);
    order_init(&running, 0, ENGINE_DECODE, 10, 1);
    order_init(&queued, 2, ENGINE_DECODE, 2, 1);
    order_init(&late, 2, ENGINE_DECODE, 2, 1);
    order_submit(&x, &running);
    assert_true(fake_wait_submitted(&x.fake, 1));
    order_submit(&x, &queued);
    scheduler_begin_drain(x.scheduler);
    assert_int_equal(scheduler_submit(x.scheduler, &late.request, &error), ENGINE_DRAINING);
    assert_false(scheduler_wait_idle(x.scheduler, 20));
    fake_release(&x.fake);
    int64_t before = clock_now_ns();
    assert_true(scheduler_wait_idle(x.scheduler, 5000));
    assert_true(clock_now_ns() - before < 400000000); /* nobody waits for company any more */
    order_expect(&running, ENGINE_OK);
    order_expect(&queued, ENGINE_OK);
    fixture_stop(&x);
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
    fixture_start(&x, 1, 0);
    struct job_log log = {.x = &x};
    fake_hold(&x.fake);
    order_init(&running, 0, ENGINE_PREFILL, 15, 1); /* its second window has yet to run */
    order_init(&queued[0], 0, ENGINE_PREFILL, 2, 1);
    order_init(&queued[1], 4, ENGINE_DECODE, 2, 1);
    order_submit(&x, &running);
    assert_true(fake_wait_submitted(&x.fake, 1));
    order_submit(&x, &queued[0]);
    order_submit(&x, &queued[1]);
    scheduler_post(x.scheduler, job, &log);
    assert_int_equal(pthread_create(&helper, NULL, release_soon, &x.fake), 0);
    scheduler_stop(x.scheduler);
    pthread_join(helper, NULL);
    assert_int_equal(atomic_load(&running.done) + atomic_load(&queued[0].done) + atomic_load(&queued[1].done), 3);
    order_expect(&running, ENGINE_OK);
    order_expect(&queued[0], ENGINE_DRAINING);
    order_expect(&queued[1], ENGINE_DRAINING);
    assert_int_equal(atomic_load(&log.count), 1);
    scheduler_post(x.scheduler, job, &log);
    assert_int_equal(atomic_load(&log.count), 2);
    assert_true(pthread_equal(log.thread, pthread_self()));
    assert_int_equal(scheduler_submit(x.scheduler, &running.request, &error), ENGINE_DRAINING);
    fixture_stop(&x);
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
        fixture_start(&x, depth, 0);
        fake_hold(&x.fake);
        x.fake.fail_submit = depth == 1 ? 2 : 0;
        x.fake.fail_wait = depth == 1 ? 0 : 2;
        x.fake.fail_code = ENGINE_DEVICE_FAILED;
        order_init(&running, 2, ENGINE_DECODE, 1, 1);
        order_init(&big, 0, ENGINE_PREFILL, 25, 1);
        order_init(&queued, 0, ENGINE_PREFILL, 8, 1);
        order_init(&late, 2, ENGINE_DECODE, 1, 1);
        order_submit(&x, &running);
        assert_true(fake_wait_submitted(&x.fake, 1));
        order_submit(&x, &big);
        order_submit(&x, &queued);
        fake_release(&x.fake);
        order_expect(&running, ENGINE_OK);
        order_expect(&big, ENGINE_DEVICE_FAILED);
        order_expect(&queued, ENGINE_DEVICE_FAILED);
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
        fixture_stop(&x);
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
        fixture_start(&x, depth, 0);
        x.fake.fail_submit = 2;
        x.fake.fail_code = ENGINE_OUT_OF_DEVICE_MEMORY;
        order_init(&big, 0, ENGINE_PREFILL, 25, 1); /* its second window fails, the third never runs */
        order_init(&next, 0, ENGINE_PREFILL, 8, 1);
        order_submit(&x, &big);
        order_expect(&big, ENGINE_OUT_OF_DEVICE_MEMORY);
        assert_true(scheduler_wait_idle(x.scheduler, 1000));
        order_submit(&x, &next);
        order_expect(&next, ENGINE_OK);
        assert_false(scheduler_failed(x.scheduler));
        assert_int_equal(atomic_load(&x.failures), 0);
        fixture_stop(&x);
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
    fixture_start(&x, 1, 0);
    assert_true(wait_count(&x.idles, 1));
    assert_false(scheduler_failed(x.scheduler));
    pthread_mutex_lock(&x.fake.lock);
    x.fake.canary_code = ENGINE_DEVICE_FAILED;
    pthread_mutex_unlock(&x.fake.lock);
    assert_true(wait_count(&x.failures, 1));
    order_init(&late, 2, ENGINE_DECODE, 1, 1);
    assert_int_equal(scheduler_submit(x.scheduler, &late.request, &error), ENGINE_DEVICE_FAILED);
    fixture_stop(&x);
    order_finish(&late);
}

static void a_lone_request_waits_for_company(void **state)
{
    (void)state;
    struct fixture x;
    struct order first, second, full[2];
    fixture_start(&x, 1, 150000);
    order_init(&first, 0, ENGINE_DECODE, 2, 1);
    order_init(&second, 0, ENGINE_DECODE, 3, 1);
    order_submit(&x, &first);
    usleep(20000);
    assert_int_equal(fake_submitted(&x.fake), 0);
    order_submit(&x, &second);
    order_expect(&first, ENGINE_OK);
    order_expect(&second, ENGINE_OK);
    assert_int_equal(fake_submitted(&x.fake), 1);
    assert_true(first.request.queue_ns >= 150000000);
    assert_true(second.request.queue_ns < 149000000);
    /* A full batch waits for nobody. */
    order_init(&full[0], 2, ENGINE_DECODE, 4, 1);
    order_init(&full[1], 2, ENGINE_DECODE, 6, 1);
    order_submit(&x, &full[0]);
    order_submit(&x, &full[1]);
    order_expect(&full[0], ENGINE_OK);
    order_expect(&full[1], ENGINE_OK);
    assert_true(full[0].request.queue_ns < 140000000);
    fixture_stop(&x);
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
    fixture_start(&x, 2, 0);
    fake_hold(&x.fake);
    for (int i = 0; i < 3; i++)
        order_init(&o[i], 2 * i, ENGINE_DECODE, 10, 1);
    order_submit(&x, &o[0]);
    /* The engine thread is in wait for the first by now, or soon: either way both others queue up. */
    order_submit(&x, &o[1]);
    order_submit(&x, &o[2]);
    assert_true(fake_wait_submitted(&x.fake, 1));
    usleep(20000);
    assert_true(fake_submitted(&x.fake) <= 2);
    fake_release(&x.fake);
    for (int i = 0; i < 3; i++)
        order_expect(&o[i], ENGINE_OK);
    assert_true(o[0].sequence < o[1].sequence && o[1].sequence < o[2].sequence);
    struct order big, small;
    order_init(&big, 0, ENGINE_PREFILL, 45, 1);
    order_init(&small, 0, ENGINE_PREFILL, 3, 1);
    order_submit(&x, &big);
    order_submit(&x, &small);
    order_expect(&big, ENGINE_OK);
    order_expect(&small, ENGINE_OK);
    assert_int_equal(x.fake.most_pending, 2);
    fixture_stop(&x);
    for (int i = 0; i < 3; i++)
        order_finish(&o[i]);
    order_finish(&big);
    order_finish(&small);
}

/* Small requests wait for the end of the batch at work, and for each other; large ones are handed over at once, when the device
 * can tell that it is not done yet. Whoever was passed over once goes next. */
static void a_second_batch_has_to_be_worthwhile(void **state)
{
    (void)state;
    struct fixture x;
    struct order first, small[3], large, other;
    fixture_start_wide(&x, 2, 160, true);
    fake_hold(&x.fake);
    order_init(&first, 0, ENGINE_DECODE, 1, 1);
    order_init(&large, 2, ENGINE_PREFILL, 10, 1);
    order_init(&other, 4, ENGINE_PREFILL, 150, 1);
    for (int i = 0; i < 3; i++)
        order_init(&small[i], 0, ENGINE_DECODE, 3, 1);
    order_submit(&x, &first);
    assert_true(fake_wait_submitted(&x.fake, 1));
    order_submit(&x, &small[0]);
    order_submit(&x, &small[1]);
    usleep(30000);
    assert_int_equal(fake_submitted(&x.fake), 1);
    order_submit(&x, &large);
    assert_true(fake_wait_submitted(&x.fake, 2)); /* though the device is held */
    assert_false(atomic_load(&first.done));
    order_submit(&x, &small[2]);
    order_submit(&x, &other);
    usleep(10000);
    assert_int_equal(fake_submitted(&x.fake), 2); /* both places are taken */
    fake_release(&x.fake);
    for (int i = 0; i < 3; i++)
        order_expect(&small[i], ENGINE_OK);
    order_expect(&first, ENGINE_OK);
    order_expect(&large, ENGINE_OK);
    order_expect(&other, ENGINE_OK);
    expect_record(&x, 1, 1, 10, KERNEL_PREFILL);
    expect_record(&x, 2, 0, 9, KERNEL_DECODE); /* passed over by `large`, so older than the batch at work */
    expect_record(&x, 3, 2, 150, KERNEL_PREFILL);
    fixture_stop(&x);
    order_finish(&first);
    order_finish(&large);
    order_finish(&other);
    for (int i = 0; i < 3; i++)
        order_finish(&small[i]);
}

/* Two clients, as has been seen for a while: while one computes and the other one has come nobody is left to wait for. The time that
 * its batch spends behind the first one on the device counts as waiting. */
static void the_last_one_who_could_come_is_handed_over_at_once(void **state)
{
    (void)state;
    enum { ROUNDS = 40 };
    struct fixture x;
    struct order a, b;
    fixture_start_wide(&x, 2, 160, true);
    order_init(&a, 0, ENGINE_DECODE, 2, 1);
    order_init(&b, 0, ENGINE_DECODE, 3, 1);
    for (int i = 0; i < ROUNDS; i++) {
        int before = fake_submitted(&x.fake);
        atomic_store(&a.done, 0);
        atomic_store(&b.done, 0);
        fake_hold(&x.fake);
        order_submit(&x, &a);
        assert_true(fake_wait_submitted(&x.fake, before + 1));
        order_submit(&x, &b);
        if (i == ROUNDS - 1)
            assert_true(fake_wait_submitted(&x.fake, before + 2));
        if (i == 0 || i == ROUNDS - 1)
            usleep(30000);
        if (i == 0)
            assert_int_equal(fake_submitted(&x.fake), before + 1); /* too little has been seen */
        fake_release(&x.fake);
        order_expect(&a, ENGINE_OK);
        order_expect(&b, ENGINE_OK);
        assert_int_equal(b.request.batch_rows, 3);
    }
    assert_true(b.request.queue_ns > 25000000);
    assert_true(a.request.compute_ns > 25000000 && a.request.queue_ns < 25000000);
    fixture_stop(&x);
    order_finish(&a);
    order_finish(&b);
}

static void jobs_run_beside_a_batch_where_the_device_tells(void **state)
{
    (void)state;
    struct fixture x;
    struct order running;
    fixture_start_wide(&x, 2, 160, true);
    struct job_log log = {.x = &x};
    fake_hold(&x.fake);
    order_init(&running, 0, ENGINE_DECODE, 1, 1);
    order_submit(&x, &running);
    assert_true(fake_wait_submitted(&x.fake, 1));
    scheduler_post(x.scheduler, job, &log);
    assert_true(wait_count(&log.count, 1));
    assert_int_equal(atomic_load(&running.done), 0);
    fake_release(&x.fake);
    order_expect(&running, ENGINE_OK);
    fixture_stop(&x);
    order_finish(&running);
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
        cmocka_unit_test(a_second_batch_has_to_be_worthwhile),
        cmocka_unit_test(the_last_one_who_could_come_is_handed_over_at_once),
        cmocka_unit_test(jobs_run_beside_a_batch_where_the_device_tells),
        cmocka_unit_test(a_deeper_device_gets_the_next_batch_meanwhile),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
