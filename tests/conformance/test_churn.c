/* SPDX-License-Identifier: Apache-2.0
 *
 * Clients that compute while adapters come, go and are replaced: every reply has the bits of its own adapter, whole.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "subject.h"

#include "engine/clock.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CLIENTS = 3, ROUNDS = 3, REPLIES = 21 }; /* at least */
#define RUN_NS INT64_C(1500000000)
#define LONGEST_NS INT64_C(60000000000) /* for the least, on back ends that take long */

struct churn {
    struct subject s;
    struct call truth[2 * (SUBJECT_ADAPTERS + 1)]; /* [variant of rows and path][adapter + 1], each computed in peace */
    atomic_bool stop;
};

struct client {
    struct churn *churn;
    uint64_t seed;
    atomic_int replies, swapped[2];
    const char *wrong; /* what went wrong, or NULL */
};

/* Variant 0: some rows decoded; 1: more rows than a batch has, prefilled. */
static void make_call(struct call *c, const struct churn *churn, int variant)
{
    call_init(c, &churn->s, churn->s.info->held_layers[0], variant ? ENGINE_PREFILL : ENGINE_DECODE, DTYPE_BF16, variant ? 40 : 3, 2, 77);
}

static const char *run_client(struct client *c)
{
    struct churn *churn = c->churn;
    int variant = (int)(subject_random(&c->seed) % 2), columns = churn->s.adapters + 1;
    int pick = (int)(subject_random(&c->seed) % (uint64_t)(columns + 2)) - 1; /* -1 base, an adapter, or the name that changes hands */
    struct engine_adapter *adapter = NULL;
    struct call call;
    make_call(&call, churn, variant);
    if (pick >= churn->s.adapters) {
        adapter = engine_adapter_acquire_name(churn->s.engine, "swap", 4);
        if (!adapter) {
            call_finish(&call);
            return "the name that is always there was not found";
        }
        call.request.adapters = &adapter;
        call.request.adapter_count = 1;
    } else if (pick >= 0) {
        call.request.adapters = &churn->s.adapter[pick];
        call.request.adapter_count = 1;
    }
    const char *wrong = NULL;
    struct engine_error error;
    if (engine_submit(churn->s.engine, &call.request, &error) != ENGINE_OK) {
        wrong = "a request was refused";
    } else {
        while (!atomic_load(&call.done))
            usleep(50);
        size_t bytes = (size_t)call.request.rows * call_row_bytes(&call);
        const struct call *truth = &churn->truth[variant * columns];
        if (call.request.status != ENGINE_OK)
            wrong = "a request failed";
        else if (adapter && !memcmp(call.out, truth[1].out, bytes))
            c->swapped[0]++;
        else if (adapter && !memcmp(call.out, truth[2].out, bytes))
            c->swapped[1]++;
        else if (adapter)
            wrong = "a reply is of neither the old nor the new adapter";
        else if (memcmp(call.out, truth[pick + 1].out, bytes))
            wrong = "a reply has other bits than in peace";
    }
    if (adapter)
        engine_adapter_release(churn->s.engine, adapter);
    call_finish(&call);
    c->replies++;
    return wrong;
}

static void *client_main(void *arg)
{
    struct client *c = arg;
    while (!c->wrong && !atomic_load(&c->churn->stop))
        c->wrong = run_client(c);
    return NULL;
}

static bool install(struct churn *churn, const char *name, int which, bool replace)
{
    char path[640];
    struct engine_adapter_info info;
    struct engine_error error;
    bool replaced;
    snprintf(path, sizeof path, "%s/%s", churn->s.folder, churn->s.adapter_name[which]);
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    enum engine_code code = engine_adapter_install_fd(churn->s.engine, name, fd, replace, &info, &replaced, &error);
    close(fd);
    if (code == ENGINE_OK)
        engine_adapter_info_finish(&info);
    return code == ENGINE_OK;
}

static bool goes_on(struct client *client, int rounds, int64_t ns)
{
    int replies = 0, swapped[2] = {0};
    for (int i = 0; i < CLIENTS; i++) {
        replies += client[i].replies;
        swapped[0] += client[i].swapped[0];
        swapped[1] += client[i].swapped[1];
    }
    return ns < RUN_NS || (ns < LONGEST_NS && (rounds < ROUNDS || replies < REPLIES || !swapped[0] || !swapped[1]));
}

static void replies_stay_right_while_adapters_change(void **state)
{
    (void)state;
    struct churn *churn = calloc(1, sizeof *churn);
    subject_open(&churn->s, &(struct subject_options){.fixture = "olmoe", .adapters = true, .max_batch_rows = 16, .spare_adapters = 3});
    int columns = churn->s.adapters + 1;
    for (int i = 0; i < 2 * columns; i++) {
        make_call(&churn->truth[i], churn, i / columns);
        if (i % columns) {
            churn->truth[i].request.adapters = &churn->s.adapter[i % columns - 1];
            churn->truth[i].request.adapter_count = 1;
        }
        call_run(&churn->s, &churn->truth[i]);
    }
    struct engine_stats before, after;
    assert_true(install(churn, "swap", 0, false));
    engine_stats_get(churn->s.engine, &before);

    struct client client[CLIENTS];
    pthread_t thread[CLIENTS];
    for (int i = 0; i < CLIENTS; i++) {
        memset(&client[i], 0, sizeof client[i]);
        client[i].churn = churn;
        client[i].seed = (uint64_t)i + 1;
        assert_int_equal(pthread_create(&thread[i], NULL, client_main, &client[i]), 0);
    }
    int64_t begin = clock_now_ns();
    int rounds = 0;
    bool fine = true;
    for (; fine && goes_on(client, rounds, clock_now_ns() - begin); rounds++) {
        struct engine_adapter_info info;
        struct engine_error error;
        fine = install(churn, "swap", (rounds + 1) % 2, true) && install(churn, "passing", rounds % churn->s.adapters, false);
        fine = fine && engine_adapter_remove(churn->s.engine, "passing", 5000, &info, &error) == ENGINE_OK;
        if (fine)
            engine_adapter_info_finish(&info);
    }
    atomic_store(&churn->stop, true);
    int swapped[2] = {0}, replies = 0;
    for (int i = 0; i < CLIENTS; i++) {
        pthread_join(thread[i], NULL);
        replies += client[i].replies;
        swapped[0] += client[i].swapped[0];
        swapped[1] += client[i].swapped[1];
    }
    for (int i = 0; i < CLIENTS; i++) {
        if (client[i].wrong)
            fail_msg("client %d: %s", i, client[i].wrong);
    }
    assert_true(fine);
    print_message("%s: %d rounds, %d replies, of the swapped name %d and %d\n", subject_backend, rounds, replies, swapped[0], swapped[1]);
    assert_true(rounds >= ROUNDS && replies >= REPLIES && swapped[0] > 0 && swapped[1] > 0);

    /* What was removed and replaced gave its memory back. */
    assert_true(engine_wait_idle(churn->s.engine, 5000));
    assert_true(install(churn, "swap", 0, true));
    for (int i = 0; i < 5000; i++) {
        engine_stats_get(churn->s.engine, &after);
        if (!after.adapters_draining)
            break;
        usleep(1000);
    }
    assert_int_equal(after.adapters_draining, 0);
    assert_int_equal(after.adapters_ready, before.adapters_ready);
    assert_int_equal(after.adapter_bytes, before.adapter_bytes);
    for (int i = 0; i < 2 * columns; i++)
        call_finish(&churn->truth[i]);
    subject_close(&churn->s);
    free(churn);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(replies_stay_right_while_adapters_change)};
    if (!subject_choose_backend(argc, argv)) {
        print_message("SKIP: this machine or build has no %s\n", subject_backend);
        return 77;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
