/* SPDX-License-Identifier: Apache-2.0
 *
 * The engine's public face on a small checkpoint: options, a request's way, adapters in use, draining, figures.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "engine/clock.h"
#include "engine/internal.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct engine_options sound_options(void)
{
    return (struct engine_options){
        .model = FIXTURES "/olmoe",
        .device = "cpu",
        .threads = 2,
        .max_batch_rows = 16,
        .queue_rows = 100,
        .max_adapters = 4,
        .max_adapter_bytes = 1 << 20,
        .max_inflight_bytes = 1 << 20,
        .adapter_root = FIXTURES "/olmoe",
    };
}

static struct engine *make(const struct engine_options *options)
{
    struct engine *engine = NULL;
    struct engine_error error = {0};
    if (engine_create(options, NULL, &engine, &error) != ENGINE_OK)
        fail_msg("%s", error.message);
    return engine;
}

static void expect_bad(const struct engine_options *o, enum engine_code code, const char *name, const char *value)
{
    struct engine_error error = {0};
    struct engine *engine = NULL;
    assert_int_equal(engine_create(o, NULL, &engine, &error), code);
    assert_int_equal(error.code, code);
    assert_null(engine);
    if (!strstr(error.message, name) || !strstr(error.message, value))
        fail_msg("\"%s\" names neither %s nor %s", error.message, name, value);
}

static void bad_options_are_named(void **state)
{
    (void)state;
    struct engine_options o;
#define BAD(field, bad, name, value)                                                                                                       \
    o = sound_options();                                                                                                                   \
    o.field = (bad);                                                                                                                       \
    expect_bad(&o, ENGINE_BAD_OPTION, name, value)
    BAD(threads, -1, "threads", "-1");
    BAD(threads, 5000, "threads", "4096");
    BAD(max_batch_rows, -3, "max-batch-rows", "-3");
    BAD(max_batch_rows, 65537, "max-batch-rows", "65536");
    BAD(queue_rows, 0, "queue-rows", "0");
    BAD(queue_rows, INT64_C(1) << 40, "queue-rows", "1099511627776");
    BAD(batch_wait_us, -2, "batch-wait-us", "-2");
    BAD(max_adapters, -1, "max-adapters", "-1");
    BAD(max_adapter_bytes, 0, "max-adapter-bytes", "0");
    BAD(max_inflight_bytes, 0, "max-inflight-bytes", "0");
    BAD(model, NULL, "model", "--synthetic");
    BAD(synthetic, "E=2,K=1,H=8,I=8,L=1", "synthetic", "olmoe");
    BAD(device, "tpu", "device", "tpu");
    BAD(layers, "9", "layers", "9");
    BAD(experts, "0-99", "experts", "99");
    BAD(dtype, "fp8", "dtype", "fp8");
#undef BAD
}

/* Petabytes and terabytes: refused with the numbers before the machine suffers. */
static void what_does_not_fit_is_refused(void **state)
{
    (void)state;
    static const char *const shapes[] = {"E=256,K=8,H=7168,I=2048,L=61", "E=1024,K=8,H=65536,I=65536,L=64"};
    for (int i = 0; i < 2; i++) {
        struct engine_options o = sound_options();
        o.model = NULL;
        o.synthetic = shapes[i];
        struct engine_error error = {0};
        struct engine *engine = NULL;
        int64_t before = clock_now_ns();
        assert_int_equal(engine_create(&o, NULL, &engine, &error), ENGINE_OUT_OF_DEVICE_MEMORY);
        assert_true(clock_now_ns() - before < 5 * CLOCK_NS_PER_S);
        assert_null(engine);
    }
}

static void the_model_is_described(void **state)
{
    (void)state;
    struct engine_options o = sound_options();
    o.layers = "1";
    o.experts = "0-3,6";
    struct engine *engine = make(&o);
    const struct engine_model_info *info = engine_model(engine);
    assert_string_equal(info->device, "cpu");
    assert_string_equal(info->family, "olmoe");
    assert_string_equal(info->activation, "silu");
    assert_int_equal(info->experts_held, 5);
    assert_int_equal(info->held_experts[4], 6);
    assert_int_equal(info->layers_held, 1);
    assert_int_equal(info->held_layers[0], 1);
    assert_int_equal(info->max_batch_rows, 16);
    assert_int_equal(info->queue_rows, 100);
    assert_int_equal(info->max_adapters, 4);
    assert_true(info->weight_bytes > 0 && info->scratch_bytes > 0 && info->threads == 2);
    assert_false(engine_has_layer(engine, 0));
    assert_false(engine_failed(engine));
    engine_destroy(engine);
    engine_destroy(NULL);
}

/* ---- requests ----------------------------------------------------------------------------------------------- */

enum { MOST_ROWS = 120, K = 2 };

struct ask {
    struct engine_request request;
    float *hidden, *out;
    int32_t ids[MOST_ROWS * K];
    float weights[MOST_ROWS * K];
    pthread_t thread; /* that called done */
    atomic_int done;
};

static void on_done(struct engine_request *request)
{
    struct ask *a = request->user;
    a->thread = pthread_self();
    atomic_fetch_add(&a->done, 1);
}

static void ask_init(struct ask *a, const struct engine *engine, int32_t rows)
{
    size_t n = (size_t)rows * (size_t)engine_model(engine)->hidden_size;
    memset(a, 0, sizeof *a);
    a->hidden = calloc(n, sizeof *a->hidden);
    a->out = calloc(n, sizeof *a->out);
    for (size_t i = 0; i < n; i++)
        a->hidden[i] = (float)(i % 13) - 6;
    for (int i = 0; i < MOST_ROWS * K; i++) {
        a->ids[i] = i % engine_model(engine)->experts;
        a->weights[i] = 0.5f;
    }
    a->request = (struct engine_request){
        .layer = 1,
        .rows = rows,
        .dtype = DTYPE_FP32,
        .hidden = a->hidden,
        .out = a->out,
        .k = K,
        .expert_ids = a->ids,
        .expert_weights = a->weights,
        .done = on_done,
        .user = a,
    };
}

static void ask_finish(struct ask *a)
{
    free(a->hidden);
    free(a->out);
}

static void wait_done(struct ask *a)
{
    for (int i = 0; i < 10000 && !atomic_load(&a->done); i++)
        usleep(1000);
    assert_int_equal(atomic_load(&a->done), 1);
}

static void a_request_goes_through(void **state)
{
    (void)state;
    struct engine_options o = sound_options();
    struct engine *engine = make(&o);
    struct engine_adapter_info info;
    struct engine_error error = {0};
    struct engine_stats stats;
    bool replaced = true;
    if (engine_adapter_install(engine, "mine", "adapter_2d_0", false, &info, &replaced, &error) != ENGINE_OK)
        fail_msg("%s", error.message);
    assert_false(replaced);
    engine_adapter_info_finish(&info);

    struct ask base, adapted, big;
    ask_init(&base, engine, 3);
    assert_int_equal(engine_submit(engine, &base.request, &error), ENGINE_OK);
    wait_done(&base);
    assert_int_equal(base.request.status, ENGINE_OK);
    assert_int_equal(base.request.path, ENGINE_DECODE);
    assert_false(pthread_equal(base.thread, pthread_self()));

    struct engine_adapter *adapter = engine_adapter_acquire_name(engine, "mine", 4);
    assert_non_null(adapter);
    assert_string_equal(engine_adapter_name(adapter), "mine");
    static const int32_t rows_of[] = {0, -1, 0};
    ask_init(&adapted, engine, 3);
    adapted.request.adapters = &adapter;
    adapted.request.adapter_count = 1;
    adapted.request.row_adapter = rows_of;
    assert_int_equal(engine_submit(engine, &adapted.request, &error), ENGINE_OK);
    wait_done(&adapted);
    size_t row = (size_t)engine_model(engine)->hidden_size * sizeof(float);
    assert_memory_not_equal(adapted.out, base.out, row);
    assert_memory_equal((char *)adapted.out + row, (char *)base.out + row, row);

    ask_init(&big, engine, 90);
    assert_int_equal(engine_submit(engine, &big.request, &error), ENGINE_OK);
    wait_done(&big);
    assert_int_equal(big.request.path, ENGINE_PREFILL);
    assert_int_equal(big.request.batch_rows, 16);
    big.request.rows = 101;
    assert_int_equal(engine_submit(engine, &big.request, &error), ENGINE_TOO_LARGE);

    engine_adapter_release(engine, adapter);
    assert_true(engine_wait_idle(engine, 1000));
    assert_int_equal(engine_adapter_show(engine, "mine", &info, &error), ENGINE_OK);
    assert_int_equal(info.rows_served, 2);
    assert_int_equal(info.in_flight, 0);
    engine_adapter_info_finish(&info);
    engine_stats_get(engine, &stats);
    assert_int_equal(stats.requests_ok[0], 2);
    assert_int_equal(stats.requests_ok[1], 1);
    assert_int_equal(stats.adapted_rows[0], 2);
    assert_int_equal(stats.requests_rejected, 1);
    assert_int_equal(stats.adapters_ready, 1);
    assert_int_equal(stats.staging_limit, 1 << 20);
    assert_true(stats.device_memory_free > 0 && stats.device_memory_total >= stats.device_memory_free);
    engine_destroy(engine);
    ask_finish(&base);
    ask_finish(&adapted);
    ask_finish(&big);
}

/* A reference that outlives its adapter's removal, and the requests, is still the caller's to give back. */
static void removed_adapters_serve_who_holds_them(void **state)
{
    (void)state;
    struct engine_options o = sound_options();
    struct engine *engine = make(&o);
    struct engine_adapter_info info;
    struct engine_error error = {0};
    bool replaced;
    assert_int_equal(engine_adapter_install(engine, "mine", "adapter_2d_0", false, &info, &replaced, &error), ENGINE_OK);
    engine_adapter_info_finish(&info);
    struct engine_adapter *adapter = engine_adapter_acquire_name(engine, "mine", 4);
    assert_int_equal(engine_adapter_remove(engine, "mine", 0, &info, &error), ENGINE_OK);
    assert_int_equal(info.state, ENGINE_ADAPTER_DRAINING);
    engine_adapter_info_finish(&info);
    assert_null(engine_adapter_acquire_name(engine, "mine", 4));
    struct ask base, held;
    ask_init(&base, engine, 1);
    ask_init(&held, engine, 1);
    held.request.adapters = &adapter;
    held.request.adapter_count = 1;
    assert_int_equal(engine_submit(engine, &base.request, &error), ENGINE_OK);
    assert_int_equal(engine_submit(engine, &held.request, &error), ENGINE_OK);
    wait_done(&base);
    wait_done(&held);
    assert_memory_not_equal(base.out, held.out, (size_t)engine_model(engine)->hidden_size * sizeof(float));
    engine_adapter_release(engine, adapter);
    engine_destroy(engine);
    ask_finish(&base);
    ask_finish(&held);
}

static void draining_refuses_and_destroying_completes(void **state)
{
    (void)state;
    struct engine_options o = sound_options();
    o.batch_wait_us = 10000000; /* requests stay queued */
    struct engine *engine = make(&o);
    struct engine_adapter_info info;
    struct engine_error error = {0};
    bool replaced;
    struct ask gone, queued, late;
    ask_init(&gone, engine, 2);
    ask_init(&queued, engine, 2);
    ask_init(&late, engine, 2);
    assert_int_equal(engine_submit(engine, &gone.request, &error), ENGINE_OK);
    assert_int_equal(engine_submit(engine, &queued.request, &error), ENGINE_OK);
    engine_cancel(engine, &gone.request);
    wait_done(&gone);
    assert_int_equal(gone.request.status, ENGINE_CANCELLED);
    assert_false(engine_wait_idle(engine, 10));
    engine_destroy(engine);
    assert_int_equal(atomic_load(&queued.done), 1);
    assert_int_equal(queued.request.status, ENGINE_DRAINING);

    engine = make(&o);
    engine_begin_drain(engine);
    assert_int_equal(engine_submit(engine, &late.request, &error), ENGINE_DRAINING);
    assert_int_equal(engine_adapter_install(engine, "mine", "adapter_2d_0", false, &info, &replaced, &error), ENGINE_DRAINING);
    assert_true(engine_wait_idle(engine, 0));
    engine_destroy(engine);
    ask_finish(&gone);
    ask_finish(&queued);
    ask_finish(&late);
}

static void staging_is_bounded(void **state)
{
    (void)state;
    struct engine_options o = sound_options();
    struct engine *engine = make(&o);
    struct engine_stats stats;
    void *a, *b;
    assert_int_equal(engine_staging_acquire(engine, (1 << 20) + 1, &a), ENGINE_TOO_LARGE);
    assert_int_equal(engine_staging_acquire(engine, 1 << 20, &a), ENGINE_OK);
    assert_int_equal(engine_staging_acquire(engine, 1, &b), ENGINE_QUEUE_FULL);
    engine_stats_get(engine, &stats);
    assert_int_equal(stats.staging_bytes, 1 << 20);
    engine_staging_release(engine, a);
    engine_staging_release(engine, NULL);
    engine_destroy(engine);
}

struct lines {
    int count;
    char all[4096];
};

static void on_log(void *arg, const char *level, const char *message)
{
    struct lines *l = arg;
    size_t at = strlen(l->all);
    snprintf(l->all + at, sizeof l->all - at, "%s: %s\n", level, message);
    l->count++;
}

static void starting_is_logged(void **state)
{
    (void)state;
    struct engine_options o = sound_options();
    struct lines lines = {0};
    o.log = on_log;
    o.log_arg = &lines;
    engine_destroy(make(&o));
    assert_true(lines.count >= 2);
    assert_non_null(strstr(lines.all, "info: device cpu"));
    assert_non_null(strstr(lines.all, "olmoe"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_options_are_named),
        cmocka_unit_test(what_does_not_fit_is_refused),
        cmocka_unit_test(the_model_is_described),
        cmocka_unit_test(a_request_goes_through),
        cmocka_unit_test(removed_adapters_serve_who_holds_them),
        cmocka_unit_test(draining_refuses_and_destroying_completes),
        cmocka_unit_test(staging_is_bounded),
        cmocka_unit_test(starting_is_logged),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
