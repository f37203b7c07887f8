/* SPDX-License-Identifier: Apache-2.0
 *
 * The scheduler's parts that are plain data structures: lists and turns, windows, jobs without memory, histograms.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "engine/batch.h"
#include "engine/jobs.h"
#include "engine/queue.h"
#include "engine/stats.h"

#include <stdlib.h>
#include <string.h>

/* The linker sends our own calls of malloc through here. */
static bool no_memory;
void *__real_malloc(size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_malloc(size_t size) { return no_memory ? NULL : __real_malloc(size); }

static struct engine_request waiting(int32_t rows, int64_t submitted_ns)
{
    return (struct engine_request){.rows = rows, .k = 1, .submitted_ns = submitted_ns};
}

static void turns_go_by_age(void **state)
{
    (void)state;
    struct queue q;
    int64_t next;
    assert_true(queue_init(&q, 4));
    assert_int_equal(queue_oldest(&q, 101, 10, &next), -1);
    assert_true(next == INT64_MAX);
    struct engine_request a = waiting(3, 50), b = waiting(2, 40), c = waiting(1, 60), d = waiting(9, 30);
    queue_push(&q, 2, &a);
    queue_push(&q, 0, &b);
    queue_push(&q, 2, &c);
    assert_int_equal(q.rows, 6);
    assert_int_equal(q.requests, 3);
    assert_int_equal(queue_oldest(&q, 101, 10, &next), 0);
    assert_ptr_equal(queue_pop(&q, 0), &b);
    assert_int_equal(queue_oldest(&q, 101, 10, &next), 2);
    /* Once begun, age counts from the last window. */
    queue_push(&q, 1, &d);
    assert_int_equal(queue_oldest(&q, 101, 10, &next), 1);
    queue_pop(&q, 1);
    d.rows_started = 4;
    d.started_ns = 70;
    queue_push(&q, 1, &d);
    assert_int_equal(q.rows, 4 + 5);
    assert_int_equal(queue_oldest(&q, 101, 10, &next), 2);
    queue_remove(&q, 2, &c);
    queue_remove(&q, 2, &a);
    assert_int_equal(queue_oldest(&q, 101, 10, &next), 1);
    queue_remove(&q, 1, &d);
    assert_int_equal(q.rows, 0);
    assert_int_equal(q.requests, 0);
    queue_push(&q, 2, &a); /* the tail was right */
    queue_push(&q, 2, &b);
    assert_ptr_equal(queue_pop(&q, 2), &a);
    assert_ptr_equal(queue_pop(&q, 2), &b);
    queue_finish(&q);
}

/* Young heads need enough rows behind them. */
static void the_young_wait_for_company(void **state)
{
    (void)state;
    struct queue q;
    int64_t next;
    assert_true(queue_init(&q, 2));
    struct engine_request a = waiting(3, 50), b = waiting(6, 70), c = waiting(1, 71);
    queue_push(&q, 0, &a);
    queue_push(&q, 1, &b);
    assert_int_equal(queue_oldest(&q, 50, 10, &next), -1);
    assert_int_equal(next, 50);
    assert_int_equal(queue_oldest(&q, 51, 10, &next), 0);
    assert_int_equal(next, 70);
    assert_int_equal(queue_oldest(&q, 50, 6, &next), 1); /* enough of them */
    assert_int_equal(queue_oldest(&q, 50, 7, &next), -1);
    queue_push(&q, 1, &c);
    assert_int_equal(queue_oldest(&q, 50, 7, &next), 1);
    assert_int_equal(queue_oldest(&q, 71, 10, &next), 0); /* the older of two */
    queue_pop(&q, 0);
    a.rows_started = 1; /* a window has run: the rest waits for nobody */
    a.started_ns = 79;
    queue_push(&q, 0, &a);
    assert_int_equal(queue_oldest(&q, 50, 10, &next), 0);
    queue_take_all(&q, true, ENGINE_OK);
    queue_finish(&q);
}

static void sweeping_takes_the_dropped_only(void **state)
{
    (void)state;
    struct queue q;
    assert_true(queue_init(&q, 3));
    struct engine_request r[6];
    for (int i = 0; i < 6; i++)
        r[i] = waiting(i + 1, i);
    r[0].deadline_ns = 500;
    r[1].deadline_ns = 100;
    atomic_store(&r[2].cancelled, 1);
    r[3].deadline_ns = 100; /* has begun: finishes */
    r[3].rows_started = 1;
    r[5].deadline_ns = 300;
    for (int i = 0; i < 6; i++)
        queue_push(&q, i % 3, &r[i]);
    assert_int_equal(q.next_deadline_ns, 100);
    struct engine_request *out = queue_sweep(&q, 100);
    assert_ptr_equal(out, &r[1]);
    assert_ptr_equal(out->next, &r[2]);
    assert_null(out->next->next);
    assert_int_equal(r[1].status, ENGINE_DEADLINE_EXCEEDED);
    assert_int_equal(r[2].status, ENGINE_CANCELLED);
    assert_int_equal(q.next_deadline_ns, 300);
    assert_int_equal(q.requests, 4);
    assert_int_equal(q.rows, 1 + 3 + 5 + 6);
    out = queue_take_all(&q, false, ENGINE_DRAINING);
    int taken = 0;
    for (; out; out = out->next, taken++)
        assert_int_equal(out->status, ENGINE_DRAINING);
    assert_int_equal(taken, 3);
    out = queue_take_all(&q, true, ENGINE_DEVICE_FAILED);
    assert_ptr_equal(out, &r[3]);
    assert_int_equal(q.rows, 0);
    queue_finish(&q);
}

/* Against counting one row at a time. */
static void windows_take_what_fits(void **state)
{
    (void)state;
    enum { ROWS = 40 };
    int32_t row_slots[ROWS + 1] = {0};
    for (int t = 0; t < ROWS; t++)
        row_slots[t + 1] = row_slots[t] + (t * 7) % 5;
    const struct engine_request forms[] = {
        {.rows = ROWS, .k = 3},
        {.rows = ROWS, .row_slots = row_slots},
        {.rows = INT32_MAX, .k = 1024},
    };
    for (int f = 0; f < 2; f++) {
        const struct engine_request *r = &forms[f];
        for (int32_t first = 0; first < ROWS; first += 3) {
            for (int32_t rows = 0; rows <= ROWS; rows += 4) {
                for (int64_t slots = 0; slots <= 130; slots += 3) {
                    int32_t fit = 0;
                    while (first + fit < ROWS && fit < rows && batch_request_slots(r, first, fit + 1) <= slots)
                        fit++;
                    assert_int_equal(batch_request_fit(r, first, rows, slots), fit);
                }
            }
        }
    }
    assert_int_equal(batch_request_widest(&forms[0]), 3);
    assert_int_equal(batch_request_widest(&forms[1]), 4);
    assert_true(batch_request_slots(&forms[2], 0, INT32_MAX) == (int64_t)INT32_MAX * 1024);
    assert_int_equal(batch_request_fit(&forms[2], 5, 100, 65536), 64);
}

static int ran;
static void count(void *arg) { ran = ran * 10 + *(int *)arg; }

static void jobs_survive_without_memory(void **state)
{
    (void)state;
    struct jobs *jobs = calloc(1, sizeof *jobs);
    struct job job;
    int one = 1, two = 2;
    jobs_init(jobs);
    assert_false(jobs_pop(jobs, &job));
    for (int round = 0; round < 3; round++) {
        int taken = 0;
        no_memory = true;
        while (jobs_push(jobs, count, &one))
            taken++;
        no_memory = false;
        assert_int_equal(taken, JOBS_SPARE);
        assert_true(jobs_push(jobs, count, &two));
        for (int i = 0; i < JOBS_SPARE; i++)
            assert_true(jobs_pop(jobs, &job) && job.arg == &one);
        assert_true(jobs_pop(jobs, &job) && job.arg == &two);
        assert_false(jobs_pop(jobs, &job));
    }
    ran = 0;
    jobs_push(jobs, count, &one);
    jobs_push(jobs, count, &two);
    while (jobs_pop(jobs, &job))
        job.fn(job.arg);
    assert_int_equal(ran, 12);
    free(jobs);
}

static void values_fall_into_their_buckets(void **state)
{
    (void)state;
    struct engine_histogram h = {0};
    static const int64_t values[] = {0, 1, 2, 3, 4, 5, 8, 9, 1 << 22, (1 << 22) + 1, INT64_MAX, -5};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        stats_count_value(&h, values[i]);
    static const int buckets[][2] = {{0, 3}, {1, 1}, {2, 2}, {3, 2}, {4, 1}, {22, 1}, {23, 2}};
    uint64_t all = 0;
    for (size_t i = 0; i < sizeof buckets / sizeof *buckets; i++) {
        assert_int_equal(h.bucket[buckets[i][0]], buckets[i][1]);
        all += h.bucket[buckets[i][0]];
    }
    assert_int_equal(h.count, all);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(turns_go_by_age),
        cmocka_unit_test(the_young_wait_for_company),
        cmocka_unit_test(sweeping_takes_the_dropped_only),
        cmocka_unit_test(windows_take_what_fits),
        cmocka_unit_test(jobs_survive_without_memory),
        cmocka_unit_test(values_fall_into_their_buckets),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
