/* SPDX-License-Identifier: Apache-2.0
 *
 * Waiting for company: the decisions one by one, and what they come to for crowds of clients, in a model of the scheduler that runs
 * on a clock of its own. It prints its table: rows a second and mean latency without waiting and with it.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "engine/company.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_CLIENTS = 512, KEYS = 4, MAX_BATCH = 8192 };

/* ---- the model --------------------------------------------------------------------------------------------- */

/* What a batch takes, in microseconds: straight lines through these points. */
struct curve {
    double rows[5], us[5];
};

static const struct curve weights_dominate = {{0, 65536}, {3000, 3000 + 4 * 65536}};
static const struct curve measured = {{1, 32, 128, 256, 512}, {43, 290, 371, 400, 443}};
static const struct curve rows_dominate = {{0, 65536}, {20, 20 + 100 * 65536}};

struct crowd {
    const char *name;
    const struct curve *curve;
    int clients, rows, keys; /* with several keys each client goes through them in turn */
    double think_us; /* from an answer to the next request; 0 with `rate`: nobody comes back */
    double jitter; /* of think_us, both ways, evenly */
    double rate; /* requests a second beside them, at random, each from somebody else */
    double vanish; /* share of clients that leave at half-time */
    double leave; /* chance of a client to stay away for twenty times as long */
    double slow; /* chance of a client to think five times as long */
};

struct outcome {
    double rows_s, latency_us;
    int64_t batches, waits, in_vain;
};

struct request {
    int64_t at, key, client; /* client -1: of those at random */
    struct request *next;
};

struct model {
    const struct crowd *crowd;
    struct company company;
    uint64_t seed;
    int64_t now, end;
    int64_t next_at[MOST_CLIENTS], key[MOST_CLIENTS], random_at;
    struct request *head[KEYS], *tail[KEYS], *running;
    int32_t waiting[KEYS];
    int64_t begun, free_at; /* of the batch that runs; INT64_MAX: none */
    int64_t wake;
    int running_rows, running_count, running_key;
    double sum_latency, rows, requests;
    struct outcome out;
};

static double chance(struct model *m)
{
    m->seed = m->seed * 6364136223846793005u + 1442695040888963407u;
    return (double)(m->seed >> 11) / 9007199254740992.0;
}

static int64_t batch_ns(struct model *m, int rows)
{
    const struct curve *c = m->crowd->curve;
    int i = 1;
    while (i < 4 && c->us[i + 1] > 0 && c->rows[i] < rows)
        i++;
    double us = c->us[i - 1] + (c->us[i] - c->us[i - 1]) * (rows - c->rows[i - 1]) / (c->rows[i] - c->rows[i - 1]);
    return (int64_t)(us * 1e3 * (0.98 + 0.04 * chance(m)));
}

static int64_t think_ns(struct model *m)
{
    const struct crowd *c = m->crowd;
    double us = c->think_us * (1 + c->jitter * (2 * chance(m) - 1));
    us *= chance(m) < c->leave ? 20 : 1;
    us *= chance(m) < c->slow ? 5 : 1;
    return (int64_t)(us * 1e3) + 1;
}

static void arrive(struct model *m, int64_t client, int64_t key)
{
    struct request *r = calloc(1, sizeof *r);
    *r = (struct request){.at = m->now, .key = key, .client = client};
    if (m->head[key])
        m->tail[key]->next = r;
    else
        m->head[key] = r;
    m->tail[key] = r;
    m->waiting[key]++;
    company_count_arrival(&m->company, (int32_t)key, m->now);
}

static void complete(struct model *m)
{
    int64_t spent = m->now - m->begun;
    company_count_batch(&m->company, m->running_key, m->running_count, m->running_rows, spent, m->now, m->waiting[m->running_key] > 0);
    while (m->running) {
        struct request *r = m->running;
        m->running = r->next;
        if (m->now > m->end / 5) {
            m->rows += m->crowd->rows;
            m->requests++;
            m->sum_latency += (double)(m->now - r->at) * 1e-3;
        }
        if (r->client >= 0) {
            bool gone = m->now > m->end / 2 && r->client < m->crowd->vanish * m->crowd->clients;
            m->next_at[r->client] = gone ? INT64_MAX : m->now + think_ns(m);
            m->key[r->client] = (r->key + 1) % m->crowd->keys;
        }
        free(r);
    }
    m->free_at = INT64_MAX;
}

/* As the scheduler does when the device is free. */
static void begin(struct model *m)
{
    int key = -1, others = 0;
    m->wake = INT64_MAX;
    for (int i = 0; i < m->crowd->keys; i++) {
        others += m->head[i] != NULL;
        if (m->head[i] && (key < 0 || m->head[i]->at < m->head[key]->at))
            key = i;
    }
    if (key < 0)
        return;
    int rows = m->waiting[key] * m->crowd->rows;
    int64_t until = others > 1 ? m->now : company_until(&m->company, key, rows, MAX_BATCH, INT64_MAX, m->now);
    if (until > m->now) {
        m->wake = until;
        return;
    }
    struct company_wait wait = company_begin(&m->company, key, rows, m->now);
    m->out.waits += wait.ns > 0;
    m->out.in_vain += wait.in_vain;
    m->out.batches++;
    m->running = m->head[key];
    m->running_count = m->waiting[key];
    m->running_rows = rows;
    m->running_key = key;
    m->head[key] = NULL;
    m->waiting[key] = 0;
    m->begun = m->now;
    m->free_at = m->now + batch_ns(m, rows);
}

static struct outcome simulate(const struct crowd *crowd, bool waits, double seconds)
{
    static struct model model; /* too large for the stack */
    struct model *m = &model;
    *m = (struct model){.crowd = crowd, .seed = 1, .end = (int64_t)(seconds * 1e9), .now = 1, .free_at = INT64_MAX, .random_at = INT64_MAX};
    if (waits)
        assert_true(company_init(&m->company, KEYS, 1));
    for (int i = 0; i < crowd->clients; i++)
        m->next_at[i] = 1 + (int64_t)(chance(m) * 1e3 * (crowd->think_us + 1000));
    if (crowd->rate > 0)
        m->random_at = 1;
    while (m->now < m->end) {
        int64_t next = m->free_at < m->wake ? m->free_at : m->wake;
        int who = -1;
        for (int i = 0; i < crowd->clients; i++) {
            if (m->next_at[i] < next) {
                next = m->next_at[i];
                who = i;
            }
        }
        if (m->random_at < next) {
            next = m->random_at;
            who = -2;
        }
        m->now = next;
        if (who >= 0) {
            m->next_at[who] = INT64_MAX;
            arrive(m, who, m->key[who]);
        } else if (who == -2) {
            m->random_at = m->now + 1 + (int64_t)(-log(1 - chance(m)) / crowd->rate * 1e9);
            arrive(m, -1, 0);
        } else if (m->now == m->free_at) {
            complete(m);
        }
        if (m->free_at == INT64_MAX)
            begin(m);
    }
    m->out.rows_s = m->rows / (seconds * 0.8);
    m->out.latency_us = m->sum_latency / m->requests;
    while (m->running) {
        struct request *r = m->running;
        m->running = r->next;
        free(r);
    }
    for (int i = 0; i < KEYS; i++) {
        while (m->head[i]) {
            struct request *r = m->head[i];
            m->head[i] = r->next;
            free(r);
        }
    }
    company_finish(&m->company);
    return m->out;
}

static void compare(const struct crowd *crowd, double seconds, double *rate, double *latency)
{
    struct outcome plain = simulate(crowd, false, seconds), company = simulate(crowd, true, seconds);
    *rate = company.rows_s / plain.rows_s;
    *latency = company.latency_us / plain.latency_us;
    printf("%-44s %9.0f %9.0f %6.3f | %8.0f %8.0f %6.3f | %6lld %6lld %5lld\n", crowd->name, plain.rows_s, company.rows_s, *rate,
           plain.latency_us, company.latency_us, *latency, (long long)company.batches, (long long)company.waits,
           (long long)company.in_vain);
}

/* Never worse than without waiting by more than chance makes of it, whoever comes how; `least` and `most`: what is asked for besides. */
static void hold(const struct crowd *crowd, double seconds, double least_rate, double most_latency)
{
    double rate, latency;
    compare(crowd, seconds, &rate, &latency);
    assert_true(rate >= least_rate);
    assert_true(latency <= most_latency);
}

static void print_head(const char *title)
{
    printf("%s\n%-44s %9s %9s %6s | %8s %8s %6s | %6s %6s %5s\n", title, "", "rows/s", "waiting", "ratio", "us", "waiting", "ratio",
           "batch", "waits", "vain");
}

static const int some_clients[] = {1, 2, 3, 8, 16, 64};
static const double some_ratios[] = {0.1, 0.5, 0.7, 1.0, 1.5, 3.0};

static void clients_that_come_back_find_together(void **state)
{
    (void)state;
    char name[100];
    print_head("3 ms + 4 us a row, 32 rows a request; g: from an answer to the next request, C: batch of one request");
    for (int i = 0; i < 6; i++) {
        for (int k = 0; k < 6; k++) {
            for (int j = 0; j < 2; j++) {
                struct crowd c = {.name = name,
                                  .curve = &weights_dominate,
                                  .clients = some_clients[i],
                                  .rows = 32,
                                  .keys = 1,
                                  .think_us = some_ratios[k] * 3128,
                                  .jitter = j ? 0.3 : 0.05};
                snprintf(name, sizeof name, "%d clients, g/C %.1f +- %.0f%%", c.clients, some_ratios[k], c.jitter * 100);
                bool alone = c.clients == 1, pays = !alone && c.clients <= 16 && k < 2;
                hold(&c, 10, alone ? 1 : pays ? 1.1 : 0.97, alone ? 1 : pays ? 0.9 : 1.03);
            }
        }
    }
}

/* Batches as an H200 took them, and answers and requests as its clients. */
static void the_measured_crowd_finds_together(void **state)
{
    (void)state;
    char name[100];
    print_head("measured batches");
    for (int i = 0; i < 6; i++) {
        for (int k = 0; k < 6; k++) {
            struct crowd c = {.name = name,
                              .curve = &measured,
                              .clients = some_clients[i],
                              .rows = 32,
                              .keys = 1,
                              .think_us = 130 + 40 * (k / 2),
                              .jitter = 0.2,
                              .slow = k % 2 ? 0.05 : 0};
            snprintf(name, sizeof name, "%d clients, g %.0f us%s", c.clients, c.think_us, k % 2 ? ", one of 20 5 g" : "");
            bool eight = c.clients == 8 && (k == 0 || k == 2);
            hold(&c, 3, eight ? 1.1 : 0.97, eight ? 0.9 : 1.03);
        }
    }
}

static void requests_at_random_are_not_taxed(void **state)
{
    (void)state;
    char name[100];
    static const double rates[] = {20, 100, 200, 300, 500, 1000, 4000};
    print_head("requests at random");
    for (int i = 0; i < 7; i++) {
        for (int clients = 0; clients <= 4; clients += 4) {
            struct crowd c = {.name = name,
                              .curve = &weights_dominate,
                              .clients = clients,
                              .rows = 32,
                              .keys = 1,
                              .think_us = 1500,
                              .jitter = 0.2,
                              .rate = rates[i]};
            snprintf(name, sizeof name, "%.0f/s%s", rates[i], clients ? ", and 4 clients, g/C 0.5" : "");
            hold(&c, 60, 0.97, 1.03);
        }
    }
}

static void who_leaves_is_not_waited_for(void **state)
{
    (void)state;
    char name[100];
    print_head("clients that leave, that walk through layers, that pay for every row");
    for (int i = 1; i < 5; i++) {
        for (int k = 0; k < 5; k++) {
            const struct crowd base = {.name = name,
                                       .curve = &weights_dominate,
                                       .clients = some_clients[i],
                                       .rows = 32,
                                       .keys = 1,
                                       .think_us = some_ratios[k] * 3128,
                                       .jitter = 0.2};
            struct crowd c = base;
            c.vanish = 0.7;
            snprintf(name, sizeof name, "%d clients, g/C %.1f, 70%% leave", c.clients, some_ratios[k]);
            hold(&c, 20, 0.97, 1.03);
            c = base;
            c.leave = 0.1;
            snprintf(name, sizeof name, "%d clients, g/C %.1f, one of 10 for 20 g", c.clients, some_ratios[k]);
            hold(&c, 60, 0.95, 1.05); /* the rare long absences decide, and these differ */
            c = base;
            c.keys = 2;
            snprintf(name, sizeof name, "%d clients, g/C %.1f, 2 layers", c.clients, some_ratios[k]);
            hold(&c, 20, 0.97, 1.03);
            c = base;
            c.curve = &rows_dominate;
            snprintf(name, sizeof name, "%d clients, g/C %.1f, rows dominate", c.clients, some_ratios[k]);
            hold(&c, 20, 0.97, 1.03);
        }
    }
}

/* ---- single decisions, on a clock of microseconds ------------------------------------------------------------ */

enum { ROWS = 32, FAR = 1 << 30 };

/* A batch of `requests` ends at `at` after `took`, while others wait or not; `back` of its clients follow, 10 apart, the last `gap`
 * after the end. */
static void see(struct company *c, int32_t key, int64_t at, int32_t requests, int64_t took, bool crowded, int32_t back, int64_t gap)
{
    company_count_batch(c, key, requests, requests * ROWS, took, at, crowded);
    for (int32_t i = back; i-- > 0;)
        company_count_arrival(c, key, at + gap - 10 * i);
}

static void two_groups_are_brought_together(void **state)
{
    (void)state;
    struct company c;
    assert_true(company_init(&c, KEYS, 2));
    /* Before anything was seen nobody waits. */
    assert_int_equal(company_until(&c, 0, 4 * ROWS, MAX_BATCH, FAR, 5), 5);
    for (int i = 1; i <= 4; i++)
        see(&c, 0, 1000 * i, 4, 360, true, 4, 200);
    company_count_batch(&c, 0, 4, 4 * ROWS, 360, 5000, true);
    int64_t until = company_until(&c, 0, 4 * ROWS, MAX_BATCH, FAR, 5001);
    assert_in_range(until, 5201, 5360);
    /* Neither past a deadline, nor for more than a batch holds, nor under another key. */
    assert_int_equal(company_until(&c, 0, 4 * ROWS, MAX_BATCH, until + 359, 5001), 5001);
    assert_int_equal(company_until(&c, 0, 4 * ROWS, 8 * ROWS - 1, FAR, 5001), 5001);
    assert_int_equal(company_until(&c, 2, 4 * ROWS, MAX_BATCH, FAR, 5001), 5001);
    for (int i = 1; i <= 3; i++) {
        company_count_arrival(&c, 0, 5180 + i);
        assert_int_equal(company_until(&c, 0, (4 + i) * ROWS, MAX_BATCH, FAR, 5180 + i), until);
    }
    company_count_arrival(&c, 0, 5200);
    assert_int_equal(company_until(&c, 0, 8 * ROWS, MAX_BATCH, FAR, 5200), 5200);
    struct company_wait wait = company_begin(&c, 0, 8 * ROWS, 5200);
    assert_int_equal(wait.ns, 199);
    assert_false(wait.in_vain);
    assert_int_equal(company_begin(&c, 0, 8 * ROWS, 5200).ns, 0);
    /* All eight are answered at once; the first that is back would break the group up. That a batch of it alone does not cost less has
     * to be known. */
    see(&c, 0, 5300, 1, 300, false, 0, 0);
    see(&c, 0, 5600, 8, 400, false, 8, 250);
    company_count_batch(&c, 0, 8, 8 * ROWS, 400, 6300, false);
    company_count_arrival(&c, 0, 6480);
    assert_in_range(company_until(&c, 0, ROWS, MAX_BATCH, FAR, 6480), 6550, 6700);
    company_finish(&c);
}

static void waits_in_vain_become_rare(void **state)
{
    (void)state;
    struct company c;
    assert_true(company_init(&c, KEYS, 1));
    for (int i = 1; i <= 4; i++)
        see(&c, 0, 1000 * i, 4, 360, true, 4, 200);
    int waits = 0;
    for (int i = 5; i < 105; i++) {
        /* Four always come, but from now on after the time is up. */
        int64_t end = 1000 * i;
        company_count_batch(&c, 0, 4, 4 * ROWS, 360, end, true);
        int64_t until = company_until(&c, 0, 4 * ROWS, MAX_BATCH, FAR, end);
        if (until > end) {
            assert_int_equal(company_until(&c, 0, 4 * ROWS, MAX_BATCH, FAR, until), until);
            struct company_wait wait = company_begin(&c, 0, 4 * ROWS, until + 1);
            assert_int_equal(wait.ns, until - end);
            assert_true(wait.in_vain);
            waits++;
        }
        for (int j = 0; j < 4; j++)
            company_count_arrival(&c, 0, (until > end ? until : end) + 5 + j);
    }
    assert_in_range(waits, 1, 6);
    company_finish(&c);
}

static void some_are_never_waited_for(void **state)
{
    (void)state;
    struct company c;
    assert_true(company_init(&c, KEYS, 1));
    /* One client alone. */
    for (int i = 1; i <= 10; i++) {
        company_count_batch(&c, 0, 1, ROWS, 300, 1000 * i, false);
        company_count_arrival(&c, 0, 1000 * i + 100);
        assert_int_equal(company_until(&c, 0, ROWS, MAX_BATCH, FAR, 1000 * i + 100), 1000 * i + 100);
        assert_int_equal(company_begin(&c, 0, ROWS, 1000 * i + 100).ns, 0);
    }
    /* Clients that come back after more than four times the batch, or to another key, or later than a batch of their own would take. */
    static const struct {
        int32_t key;
        int64_t gap;
    } follow[] = {{1, 1500}, {2, 0}, {3, 350}};
    for (int j = 0; j < 3; j++) {
        int32_t key = follow[j].key;
        for (int i = 1; i <= 10; i++) {
            see(&c, key, 10000 * i, 4, 360, true, follow[j].gap ? 4 : 0, follow[j].gap);
            company_count_batch(&c, key, 4, 4 * ROWS, 360, 10000 * i + 5000, true);
            assert_int_equal(company_until(&c, key, 4 * ROWS, MAX_BATCH, FAR, 10000 * i + 5000), 10000 * i + 5000);
        }
    }
    /* Windows of longer requests, and batches that failed, answer nobody. */
    company_count_batch(&c, 0, 0, 4 * ROWS, 360, 200000, true);
    company_count_batch(&c, 0, 0, 4 * ROWS, 0, 201000, true);
    assert_int_equal(company_until(&c, 0, 4 * ROWS, MAX_BATCH, FAR, 201000), 201000);
    company_finish(&c);
}

static void without_estimates_nobody_waits(void **state)
{
    (void)state;
    struct company c = {0};
    see(&c, 0, 1000, 4, 360, true, 4, 100);
    assert_int_equal(company_until(&c, 0, ROWS, MAX_BATCH, FAR, 1100), 1100);
    assert_int_equal(company_begin(&c, 0, ROWS, 1100).ns, 0);
    company_finish(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_groups_are_brought_together),
        cmocka_unit_test(waits_in_vain_become_rare),
        cmocka_unit_test(some_are_never_waited_for),
        cmocka_unit_test(without_estimates_nobody_waits),
        cmocka_unit_test(clients_that_come_back_find_together),
        cmocka_unit_test(the_measured_crowd_finds_together),
        cmocka_unit_test(requests_at_random_are_not_taxed),
        cmocka_unit_test(who_leaves_is_not_waited_for),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
