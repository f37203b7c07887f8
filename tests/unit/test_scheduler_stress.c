/* SPDX-License-Identifier: Apache-2.0
 *
 * Everything at once: clients that submit, cancel and set deadlines, and jobs between batches. Meant for the thread sanitizer.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "engine/clock.h"
#include "orders.h"

#include <stdlib.h>
#include <unistd.h>

struct client {
    struct fixture *x;
    pthread_mutex_t lock; /* over `done` of its orders: who holds it may cancel what is not done */
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
            o[i].lock = &c->lock;
            queued[i] = scheduler_submit(c->x->scheduler, &o[i].request, &error) == ENGINE_OK;
            c->refused += !queued[i];
        }
        if (dice(c, 3) == 0) {
            c->jobs++;
            scheduler_post(c->x->scheduler, count_job, c);
        }
        pthread_mutex_lock(&c->lock);
        for (int i = 0; i < FLOCK; i++) {
            if (queued[i] && dice(c, 4) == 0 && !atomic_load(&o[i].done))
                scheduler_cancel(c->x->scheduler, &o[i].request);
        }
        pthread_mutex_unlock(&c->lock);
        for (int i = 0; i < FLOCK; i++) {
            if (queued[i] && !order_wait(&o[i]))
                c->wrong = true;
            pthread_mutex_lock(&c->lock); /* done has let go of the order */
            pthread_mutex_unlock(&c->lock);
            if (queued[i]) {
                c->wrong |= o[i].request.status == ENGINE_OK && !order_right(&o[i]);
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
    for (int round = 0; round < 5; round++) {
        struct fixture x;
        int depth = 1 + round % 3;
        fixture_start_waiting(&x, depth, round < 3 ? 0 : ENGINE_BATCH_WAIT_AUTO, MAX_ROWS, depth == 2);
        struct client c[4];
        pthread_t thread[4];
        for (int i = 0; i < 4; i++) {
            c[i] = (struct client){.x = &x, .seed = (unsigned)i + 1, .until = clock_now_ns() + 700000000};
            pthread_mutex_init(&c[i].lock, NULL);
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
        assert_int_equal(stats.requests_expired + stats.requests_cancelled, dropped);
        assert_int_equal(stats.requests_rejected, refused);
        assert_true(ok > 100);
        fixture_stop(&x);
    }
}

/* The linker sends our own calls of malloc through here. */
static atomic_bool no_memory;
void *__real_malloc(size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_malloc(size_t size) { return atomic_load(&no_memory) ? NULL : __real_malloc(size); }

enum { POSTS = 200 }; /* more than are set aside */

struct posts {
    struct fixture x;
    atomic_int ran, last;
    atomic_bool disorder;
    struct numbered {
        struct posts *posts;
        int number;
    } job[2 * POSTS];
};

static void numbered_job(void *arg)
{
    struct numbered *n = arg;
    if (atomic_exchange(&n->posts->last, n->number) != n->number - 1)
        atomic_store(&n->posts->disorder, true);
    atomic_fetch_add(&n->posts->ran, 1);
}

static void job_that_posts_many(void *arg)
{
    struct posts *p = arg;
    for (int i = 0; i < POSTS; i++)
        scheduler_post(p->x.scheduler, numbered_job, &p->job[i]);
}

/* From the engine thread, which can't wait for itself, and from another one: every job runs once, in order. */
static void jobs_run_even_without_memory(void **state)
{
    (void)state;
    struct posts *p = calloc(1, sizeof *p);
    fixture_start(&p->x, 1, 0);
    atomic_store(&p->last, -1);
    for (int i = 0; i < 2 * POSTS; i++)
        p->job[i] = (struct numbered){p, i};
    atomic_store(&no_memory, true);
    scheduler_post(p->x.scheduler, job_that_posts_many, p);
    assert_true(wait_count(&p->ran, POSTS));
    for (int i = POSTS; i < 2 * POSTS; i++)
        scheduler_post(p->x.scheduler, numbered_job, &p->job[i]);
    assert_true(wait_count(&p->ran, 2 * POSTS));
    atomic_store(&no_memory, false);
    assert_int_equal(atomic_load(&p->ran), 2 * POSTS);
    assert_false(atomic_load(&p->disorder));
    fixture_stop(&p->x);
    free(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(many_clients_at_once),
        cmocka_unit_test(jobs_run_even_without_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
