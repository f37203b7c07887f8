/* SPDX-License-Identifier: Apache-2.0
 *
 * On a GPU, a batch replayed from a captured graph has the bits of one whose kernels were launched, at exact size: promise 3 and the
 * rows that fill a bucket. Each shape runs twice, so that the second run is a replay for certain. And the engine's own memory: what
 * installs and removals leave behind.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "subject.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const enum engine_mode modes[] = {ENGINE_DECODE, ENGINE_PREFILL};
static const enum dtype dtypes[] = {DTYPE_BF16, DTYPE_FP16, DTYPE_FP32};

static void make(struct call *c, const struct subject *s, int i, int32_t rows, int32_t k)
{
    call_init(c, s, s->info->held_layers[i % s->info->layers_held], modes[i % 2], dtypes[i % 3], rows, k, (uint64_t)(rows * 100 + k));
    if (i % 3)
        call_mix_adapters(c, s, (uint64_t)i);
}

static void replayed_and_launched_forwards_have_the_same_bits(void **state)
{
    (void)state;
    static const int32_t rows[] = {1, 2, 3, 5, 8, 9, 31, 33, 64, 100, 129, 200, 300, 513, 700};
    enum { SIZES = sizeof rows / sizeof *rows };
    char eager[64];
    snprintf(eager, sizeof eager, "%s-eager", subject_backend);
    for (int f = 0; subject_fixtures[f]; f++) {
        struct subject graph, launch;
        subject_open(&graph, &(struct subject_options){.fixture = subject_fixtures[f], .adapters = true});
        subject_open(&launch, &(struct subject_options){.fixture = subject_fixtures[f], .adapters = true, .backend = eager});
        struct engine_stats stats;
        engine_stats_get(graph.engine, &stats);
        assert_true(stats.has_device && stats.device.graph_captures > 20); /* warmed */
        uint64_t warmed = stats.device.graph_captures;
        for (int i = 0; i < 2 * SIZES; i++) {
            struct call a, b, c;
            if (!subject_takes())
                continue;
            int32_t k = 1 + i % graph.info->experts;
            make(&a, &graph, i, rows[i / 2], k);
            make(&b, &graph, i, rows[i / 2], k);
            make(&c, &launch, i, rows[i / 2], k);
            call_run(&graph, &a);
            call_run(&graph, &b);
            call_run(&launch, &c);
            size_t bytes = (size_t)rows[i / 2] * call_row_bytes(&a);
            if (memcmp(a.out, c.out, bytes) || memcmp(b.out, c.out, bytes))
                fail_msg("%s: %d rows, K %d, variant %d: bits differ", subject_fixtures[f], rows[i / 2], k, i);
            call_finish(&a);
            call_finish(&b);
            call_finish(&c);
        }
        engine_stats_get(graph.engine, &stats);
        assert_true(stats.device.graph_captures <= warmed + 2 * SIZES);
        engine_stats_get(launch.engine, &stats);
        assert_int_equal(stats.device.graph_captures, 0);
        subject_close(&graph);
        subject_close(&launch);
    }
}

/* The checkpoint's own shapes need no capture once the server is ready. */
static void usual_shapes_are_captured_at_the_start(void **state)
{
    (void)state;
    struct subject s;
    struct engine_stats stats;
    subject_open(&s, &(struct subject_options){.fixture = "olmoe", .adapters = true});
    engine_stats_get(s.engine, &stats);
    uint64_t warmed = stats.device.graph_captures;
    for (int32_t rows = 1; rows <= 1000; rows += rows / 3 + 1) {
        struct call c;
        call_init(&c, &s, 0, ENGINE_AUTO, DTYPE_BF16, rows, s.info->top_k, 3);
        if (rows % 2)
            call_mix_adapters(&c, &s, 4);
        call_run(&s, &c);
        call_finish(&c);
    }
    engine_stats_get(s.engine, &stats);
    assert_int_equal(stats.device.graph_captures, warmed);
    assert_true(stats.device.bytes_in > 0 && stats.device.bytes_out > 0 && stats.device.bytes_uploaded > 0);
    subject_close(&s);
}

static enum engine_code install_and_remove(struct subject *s, int which, struct engine_error *error)
{
    struct engine_adapter_info info;
    bool replaced;
    char path[640];
    snprintf(path, sizeof path, "%s/%s", s->folder, s->adapter_name[which]);
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    enum engine_code code = engine_adapter_install_fd(s->engine, "passing", fd, false, &info, &replaced, error);
    close(fd);
    if (code != ENGINE_OK)
        return code;
    engine_adapter_info_finish(&info);
    code = engine_adapter_remove(s->engine, "passing", 5000, &info, error);
    if (code == ENGINE_OK)
        engine_adapter_info_finish(&info);
    return code;
}

static void adapters_that_left_leave_nothing(void **state)
{
    (void)state;
    struct subject s;
    struct engine_stats before, after;
    subject_open(&s, &(struct subject_options){.fixture = "olmoe"});
    struct engine_error error = {0};
    assert_int_equal(install_and_remove(&s, 0, &error), ENGINE_OK); /* takes the first arena */
    engine_stats_get(s.engine, &before);
    for (int i = 0; i < 1000; i++) {
        if (install_and_remove(&s, i % s.adapters, &error) != ENGINE_OK)
            fail_msg("%s", error.message);
    }
    engine_stats_get(s.engine, &after);
    assert_int_equal(after.adapter_bytes, before.adapter_bytes);
    assert_int_equal(after.adapter_arena_bytes + after.device_memory_free, before.adapter_arena_bytes + before.device_memory_free);
    subject_close(&s);
}

struct changes {
    struct subject *subject;
    atomic_bool stop;
    atomic_int rounds;
    enum engine_code code;
    struct engine_error error;
};

static void *change_adapters(void *arg)
{
    struct changes *c = arg;
    while (c->code == ENGINE_OK && !atomic_load(&c->stop)) {
        c->code = install_and_remove(c->subject, 0, &c->error);
        atomic_fetch_add(&c->rounds, 1);
    }
    return NULL;
}

/* Captures are the engine thread's own: threads that upload meanwhile neither fail nor spoil them. */
static void shapes_are_captured_while_adapters_change(void **state)
{
    (void)state;
    struct subject s;
    struct engine_stats stats;
    pthread_t thread;
    subject_open(&s, &(struct subject_options){.fixture = "olmoe", .adapters = true, .spare_adapters = 1});
    struct changes changes = {.subject = &s};
    assert_int_equal(pthread_create(&thread, NULL, change_adapters, &changes), 0);
    engine_stats_get(s.engine, &stats);
    uint64_t warmed = stats.device.graph_captures;
    while (atomic_load(&changes.rounds) == 0)
        usleep(100);
    for (int32_t i = 0; i < 80; i++) {
        struct call c;
        call_init(&c, &s, s.info->held_layers[i % s.info->layers_held], modes[i / 2 % 2], DTYPE_BF16, 1 + i / 4 % 4,
                  1 + i / 16 % s.info->experts, 5);
        call_run(&s, &c);
        call_finish(&c);
    }
    atomic_store(&changes.stop, true);
    pthread_join(thread, NULL);
    if (changes.code != ENGINE_OK)
        fail_msg("%s", changes.error.message);
    engine_stats_get(s.engine, &stats);
    print_message("%d adapters came and went beside %d captures\n", atomic_load(&changes.rounds),
                  (int)(stats.device.graph_captures - warmed));
    assert_true(stats.device.graph_captures > warmed + 20);
    subject_close(&s);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(replayed_and_launched_forwards_have_the_same_bits),
        cmocka_unit_test(usual_shapes_are_captured_at_the_start),
        cmocka_unit_test(adapters_that_left_leave_nothing),
        cmocka_unit_test(shapes_are_captured_while_adapters_change),
    };
    if (!subject_choose_backend(argc, argv)) {
        print_message("SKIP: this machine or build has no %s\n", subject_backend);
        return 77;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
