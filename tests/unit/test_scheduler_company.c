/* SPDX-License-Identifier: Apache-2.0
 *
 * The scheduler where batches may wait for company: clients that come back, on a device whose batches take a while.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "engine/clock.h"
#include "orders.h"

#include <unistd.h>

struct returning {
    struct fixture *x;
    int32_t layer;
    int64_t requests; /* at most so many */
    atomic_bool enough;
    bool wrong;
};

/* A client that comes back soon after each answer. */
static void *returning_main(void *arg)
{
    struct returning *c = arg;
    for (int64_t i = 0; i < c->requests && !atomic_load(&c->enough); i++) {
        struct order o;
        struct engine_error error;
        order_init(&o, c->layer, ENGINE_DECODE, 2, 1);
        c->wrong |= scheduler_submit(c->x->scheduler, &o.request, &error) != ENGINE_OK || !order_wait(&o) || !order_right(&o);
        order_finish(&o);
        usleep(500);
    }
    return NULL;
}

static void start_returning(struct fixture *x, struct returning c[2], pthread_t thread[2], int clients, int layers, int64_t requests,
                            int64_t busy_ns)
{
    x->fake.busy_ns = busy_ns;
    for (int i = 0; i < clients; i++) {
        c[i] = (struct returning){.x = x, .layer = i % layers * 2, .requests = requests};
        assert_int_equal(pthread_create(&thread[i], NULL, returning_main, &c[i]), 0);
    }
}

/* Clients that come back in a fraction of the time that a batch takes find together, sooner or later: a busy machine makes them late. */
static void batches_wait_for_those_who_come_back(void **state)
{
    (void)state;
    for (int depth = 1; depth <= 2; depth++) {
        struct fixture x;
        struct returning c[2];
        pthread_t thread[2];
        struct engine_stats stats;
        fixture_start_waiting(&x, depth, ENGINE_BATCH_WAIT_AUTO, 160, depth == 2);
        start_returning(&x, c, thread, 2, 1, INT64_MAX, 40000000);
        int64_t until = clock_now_ns() + 15 * CLOCK_NS_PER_S;
        do {
            usleep(10000);
            scheduler_stats(x.scheduler, &stats);
        } while (clock_now_ns() < until && stats.batch_waits < stats.batch_waits_in_vain + 3);
        for (int i = 0; i < 2; i++)
            atomic_store(&c[i].enough, true);
        for (int i = 0; i < 2; i++) {
            pthread_join(thread[i], NULL);
            assert_false(c[i].wrong);
        }
        int together = 0;
        for (int i = 0; i < fake_submitted(&x.fake); i++)
            together += x.fake.record[i].rows == 4;
        assert_true(stats.batch_waits >= stats.batch_waits_in_vain + 3 && stats.batch_wait_ns > 0);
        assert_true(together >= 3);
        fixture_stop(&x);
    }
}

/* One client alone, and clients of whom each wants another layer. */
static void nobody_waits_for_nobody(void **state)
{
    (void)state;
    enum { REQUESTS = 30 };
    for (int clients = 1; clients <= 2; clients++) {
        struct fixture x;
        struct returning c[2];
        pthread_t thread[2];
        struct engine_stats stats;
        fixture_start_waiting(&x, 2, ENGINE_BATCH_WAIT_AUTO, 160, true);
        start_returning(&x, c, thread, clients, clients, REQUESTS, 5000000);
        for (int i = 0; i < clients; i++) {
            pthread_join(thread[i], NULL);
            assert_false(c[i].wrong);
        }
        scheduler_stats(x.scheduler, &stats);
        assert_int_equal(stats.batch_waits, 0);
        assert_int_equal(fake_submitted(&x.fake), clients * REQUESTS);
        fixture_stop(&x);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(batches_wait_for_those_who_come_back),
        cmocka_unit_test(nobody_waits_for_nobody),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
