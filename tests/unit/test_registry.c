/* SPDX-License-Identifier: Apache-2.0
 *
 * The registry on a device that can be told to fail, with a small engine thread: installs, replaces, removals, their
 * races, and that whatever goes wrong leaves nothing behind.
 */
#include "engine/adapter.h"
#include "engine/clock.h"
#include "engine/registry.h"
#include "tests/unit/adapter_files.h"
#include "tests/unit/registry_fakes.h"

#include <stdarg.h>
#include <setjmp.h>
#include <cmocka.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const struct test_model_shape shape = {4, 8, 6, DTYPE_BF16, false, false, 4, {0, 2, -1}, {-1}};

/* ---- all together ---------------------------------------------------------------------------------------------- */

struct rig {
    struct scratch s;
    struct fake device;
    struct thread thread;
    struct model *model;
    struct registry *registry;
};

static struct rig *rig_create_shape(int slots, bool direct, const struct test_model_shape *of, int threads)
{
    struct rig *g = calloc(1, sizeof *g);
    scratch_init(&g->s);
    test_adapter_write(&g->s, "one", of, 0, 2, 2, 10);
    test_adapter_write(&g->s, "two", of, 2, 4, 9, 20);
    scratch_write_text(&g->s, "file", "x");
    g->model = test_model_create(of);
    g->device = (struct fake){.base = {.ops = &fake_ops, .kernels = kernels_ref(), .direct_memory = direct, .threads = threads},
                              .slots = slots,
                              .limit = (size_t)1 << 30};
    pthread_mutex_init(&g->device.lock, NULL);
    g->device.table = calloc(2 * (size_t)slots * 12 + 1, sizeof *g->device.table);
    g->thread.tail = &g->thread.head;
    pthread_mutex_init(&g->thread.lock, NULL);
    pthread_cond_init(&g->thread.work, NULL);
    assert_int_equal(pthread_create(&g->thread.id, NULL, thread_run, &g->thread), 0);
    struct registry_options o = {.device = &g->device.base,
                                 .model = g->model,
                                 .max_adapters = slots,
                                 .adapter_root = g->s.path,
                                 .publisher = {thread_post, &g->thread}};
    struct engine_error error;
    if (registry_create(&o, &g->registry, &error) != ENGINE_OK)
        fail_msg("%s", error.message);
    return g;
}

static struct rig *rig_create(int slots, bool direct) { return rig_create_shape(slots, direct, &shape, 1); }

/* Nothing that the registry took may be left. */
static void rig_destroy(struct rig *g)
{
    pthread_mutex_lock(&g->thread.lock);
    g->thread.stop = true;
    pthread_cond_signal(&g->thread.work);
    pthread_mutex_unlock(&g->thread.lock);
    pthread_join(g->thread.id, NULL);
    registry_destroy(g->registry);
    assert_int_equal(g->device.used, 0);
    pthread_mutex_destroy(&g->thread.lock);
    pthread_cond_destroy(&g->thread.work);
    pthread_mutex_destroy(&g->device.lock);
    free(g->device.table);
    test_model_destroy(g->model);
    scratch_finish(&g->s);
    free(g);
}

static enum engine_code install(struct rig *g, const char *name, const char *path, bool replace, int32_t *id, struct engine_error *error)
{
    struct engine_adapter_info info;
    bool replaced;
    enum engine_code code = registry_install(g->registry, name, path, -1, replace, &info, &replaced, error);
    if (code == ENGINE_OK) {
        if (id)
            *id = info.id;
        assert_int_equal(info.state, ENGINE_ADAPTER_READY);
        engine_adapter_info_finish(&info);
    }
    return code;
}

static void install_fine(struct rig *g, const char *name, const char *path, bool replace, int32_t *id)
{
    struct engine_error error;
    if (install(g, name, path, replace, id, &error) != ENGINE_OK)
        fail_msg("%s", error.message);
}

static void install_fails(struct rig *g, const char *name, const char *path, bool replace, enum engine_code want, const char *message)
{
    struct engine_error error = {0};
    enum engine_code code = install(g, name, path, replace, NULL, &error);
    if (code != want || !strstr(error.message, message))
        fail_msg("%s, \"%s\"; expected %s, \"%s\"", engine_code_name(code), error.message, engine_code_name(want), message);
}

static enum engine_adapter_state remove_it(struct rig *g, const char *name, int64_t wait_ms)
{
    struct engine_adapter_info info;
    struct engine_error error;
    assert_int_equal(registry_remove(g->registry, name, wait_ms, &info, &error), ENGINE_OK);
    enum engine_adapter_state state = info.state;
    engine_adapter_info_finish(&info);
    return state;
}

static struct engine_stats stats(struct rig *g)
{
    struct engine_stats s = {0};
    registry_stats(g->registry, &s);
    return s;
}

static bool table_is_zero(const struct rig *g, int slot)
{
    for (int layer = 0; layer < 2; layer++)
        for (int i = 0; i < 12; i++) {
            const struct kernel_lora_entry *e = &g->device.table[(size_t)(layer * g->device.slots + slot) * 12 + (size_t)i];
            if (e->a || e->b || e->rank || e->scale != 0)
                return false;
        }
    return true;
}

/* The entries of an adapter's slot are those of its files, packed by the kernels. */
static void check_table(struct rig *g, const char *name, const char *folder)
{
    struct engine_adapter *adapter = registry_acquire_name(g->registry, name, strlen(name));
    assert_non_null(adapter);
    int dir = openat(g->s.fd, folder, O_RDONLY | O_DIRECTORY);
    struct adapter_data *data;
    assert_int_equal(adapter_read(dir, g->model, 0, NULL, &data, NULL), ENGINE_OK);
    close(dir);
    const struct kernel_table *k = kernels_ref();
    size_t found = 0;
    for (size_t i = 0; i < 24; i++) {
        const struct kernel_lora_entry *e =
            &g->device.table[(i / 12 * (size_t)g->device.slots + (size_t)engine_adapter_slot(adapter)) * 12 + i % 12];
        const struct adapter_delta *d = NULL;
        for (size_t n = 0; n < data->deltas; n++)
            if ((size_t)data->delta[n].layer_index == i / 12 && (size_t)data->delta[n].expert == i % 12 / 3 &&
                data->delta[n].projection == i % 3)
                d = &data->delta[n];
        if (!d) {
            assert_true(!e->a && !e->b);
            continue;
        }
        found++;
        assert_true(e->scale == d->scale);
        assert_int_equal(e->rank, (d->rank + 7) / 8 * 8);
        assert_true(e->a % 256 == 0 && e->b % 256 == 0);
        size_t a = k->lora_a_bytes(&g->model->dims, d->projection, d->rank), b = k->lora_b_bytes(&g->model->dims, d->projection, d->rank);
        char *packed = calloc(1, a + b);
        k->pack_lora_a(&g->model->dims, d->projection, d->rank, d->a, packed);
        k->pack_lora_b(&g->model->dims, d->projection, d->rank, d->b, packed + a);
        assert_memory_equal(packed, (void *)(uintptr_t)e->a, a);
        assert_memory_equal(packed + a, (void *)(uintptr_t)e->b, b);
        free(packed);
    }
    assert_int_equal(found, data->deltas);
    adapter_data_destroy(data);
    registry_release(g->registry, adapter);
}

/* ---- tests ----------------------------------------------------------------------------------------------------- */

static void life_of(bool direct, bool no_host_memory)
{
    struct rig *g = rig_create(4, direct);
    g->device.no_host_memory = no_host_memory;
    struct engine_adapter_info info;
    bool replaced = true;
    struct engine_error error;
    time_t before = time(NULL);
    assert_int_equal(registry_install(g->registry, "a", "two", -1, false, &info, &replaced, &error), ENGINE_OK);
    assert_false(replaced);
    assert_string_equal(info.name, "a");
    assert_int_equal(info.state, ENGINE_ADAPTER_READY);
    assert_int_equal(info.rank, 9);
    assert_int_equal(info.layer_count, 1);
    assert_int_equal(info.layers[0], 2);
    assert_int_equal(info.experts, 4);
    assert_true(info.gate && info.up && info.down);
    assert_int_equal(info.tensors, 24);
    assert_int_equal(info.ignored, 0);
    assert_int_equal(info.warning_count, 0);
    assert_int_equal(info.bytes, stats(g).adapter_bytes);
    assert_true(info.installed_at >= before);
    assert_int_equal(info.in_flight, 0);
    assert_true(info.id > 0);
    check_table(g, "a", "two");
    assert_int_equal(g->device.uploads > 0, !direct);

    struct engine_adapter *by_id = registry_acquire_id(g->registry, info.id), *by_name = registry_acquire_name(g->registry, "axx", 1);
    assert_non_null(by_id);
    assert_ptr_equal(by_id, by_name);
    assert_string_equal(engine_adapter_name(by_id), "a");
    assert_null(registry_acquire_id(g->registry, info.id + 1));
    assert_null(registry_acquire_id(g->registry, -1));
    assert_null(registry_acquire_id(g->registry, (int64_t)info.id + ((int64_t)1 << 32)));
    assert_null(registry_acquire_name(g->registry, "ax", 2));
    engine_adapter_count_rows(by_id, 5);
    engine_adapter_count_rows(by_id, 7);
    struct engine_adapter_info shown;
    assert_int_equal(registry_show(g->registry, "a", &shown, &error), ENGINE_OK);
    assert_int_equal(shown.in_flight, 2);
    assert_int_equal(shown.rows_served, 12);
    assert_int_equal(shown.id, info.id);
    engine_adapter_info_finish(&shown);

    /* removed while in use: the name goes at once, the memory with the last reference */
    assert_int_equal(remove_it(g, "a", 30), ENGINE_ADAPTER_DRAINING);
    assert_null(registry_acquire_id(g->registry, info.id));
    assert_null(registry_acquire_name(g->registry, "a", 1));
    assert_int_equal(registry_show(g->registry, "a", &shown, &error), ENGINE_ADAPTER_NOT_FOUND);
    assert_string_equal(error.message, "no adapter is called \"a\"");
    struct engine_adapter_info *list;
    size_t count;
    assert_int_equal(registry_list(g->registry, &list, &count, &error), ENGINE_OK);
    assert_int_equal(count, 1);
    assert_int_equal(list[0].state, ENGINE_ADAPTER_DRAINING);
    assert_int_equal(list[0].in_flight, 2);
    engine_adapter_info_finish(&list[0]);
    free(list);
    int slot = engine_adapter_slot(by_id);
    assert_false(table_is_zero(g, slot));
    registry_release(g->registry, by_id);
    assert_int_equal(stats(g).adapters_draining, 1);
    registry_release(g->registry, by_name);
    while (stats(g).adapters_draining)
        usleep(1000);
    assert_true(table_is_zero(g, slot));
    assert_int_equal(stats(g).adapter_bytes, 0);
    engine_adapter_info_finish(&info);
    registry_release(g->registry, NULL);
    rig_destroy(g);
}

static void life(void **state)
{
    (void)state;
    life_of(true, false);
    life_of(false, false);
    life_of(false, true);
}

static void errors_change_nothing(void **state)
{
    (void)state;
    struct rig *g = rig_create(2, false);
    install_fine(g, "a", "one", false, NULL);
    int64_t bytes = stats(g).adapter_bytes;
    install_fails(g, "a", "two", false, ENGINE_ADAPTER_EXISTS, "an adapter called \"a\" is installed already");
    install_fails(g, "", "two", false, ENGINE_BAD_REQUEST, "an adapter's name has 1 to 128 characters");
    install_fails(g, ".x", "two", false, ENGINE_BAD_REQUEST, "name");
    install_fails(g, "b", "../x", false, ENGINE_FORBIDDEN_PATH, "leaves the adapter root");
    install_fails(g, "b", "/etc", false, ENGINE_FORBIDDEN_PATH, "is not beneath");
    install_fails(g, "b", "none", false, ENGINE_NO_FILE, "there is no folder");
    install_fails(g, "b", "file", false, ENGINE_BAD_ADAPTER, "is not a folder");
    install_fails(g, "a", "none", true, ENGINE_NO_FILE, "there is no folder");
    struct engine_stats s = stats(g);
    assert_int_equal(s.adapters_ready, 1);
    assert_int_equal(s.adapter_installs_failed, 8);
    assert_int_equal(s.adapter_bytes, bytes);
    char absolute[200];
    snprintf(absolute, sizeof absolute, "%s/two", g->s.path);
    install_fine(g, "b", absolute, false, NULL);
    check_table(g, "a", "one");
    check_table(g, "b", "two");
    rig_destroy(g);
}

static void names(void **state)
{
    (void)state;
    static const char *const good[] = {"a", "A-b_c.9", "org/name", "x.", "0"}, *const bad[] = {"",    ".a",  "/a",       "a/",
                                                                                               "a b", "a\n", "\xc3\xa9", "a%"};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++)
        assert_true(engine_adapter_name_valid(good[i], strlen(good[i])));
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        assert_false(engine_adapter_name_valid(bad[i], strlen(bad[i])));
    char name[130];
    memset(name, 'n', sizeof name);
    assert_true(engine_adapter_name_valid(name, 128));
    assert_false(engine_adapter_name_valid(name, 129));
}

static void without_root_or_slots(void **state)
{
    (void)state;
    struct rig *g = rig_create(0, false);
    install_fails(g, "a", "one", false, ENGINE_ADAPTER_SLOTS_FULL, "no slot is free for adapter \"a\": --max-adapters allows 0");
    struct registry_options o = {.device = &g->device.base, .model = g->model, .max_adapters = 1, .publisher = {thread_post, &g->thread}};
    struct registry *other;
    struct engine_error error;
    struct engine_adapter_info info;
    bool replaced;
    assert_int_equal(registry_create(&o, &other, &error), ENGINE_OK);
    assert_int_equal(registry_install(other, "a", "one", -1, false, &info, &replaced, &error), ENGINE_FORBIDDEN_PATH);
    assert_string_equal(error.message, "adapters can't be installed by path: the server was started without --adapter-root");
    registry_destroy(other);
    o.adapter_root = "/does/not/exist";
    assert_int_equal(registry_create(&o, &other, &error), ENGINE_NO_FILE);
    rig_destroy(g);
}

static void replacing(void **state)
{
    (void)state;
    struct rig *g = rig_create(2, false);
    int32_t first = 0, second, third;
    install_fine(g, "a", "one", true, &first);
    struct engine_adapter *old = registry_acquire_name(g->registry, "a", 1);
    struct engine_adapter_info info;
    bool replaced = false;
    struct engine_error error;
    assert_int_equal(registry_install(g->registry, "a", "two", -1, true, &info, &replaced, &error), ENGINE_OK);
    assert_true(replaced);
    second = info.id;
    engine_adapter_info_finish(&info);
    assert_true(second > first);
    assert_null(registry_acquire_id(g->registry, first));
    check_table(g, "a", "two");
    /* the old one is in use: it keeps its slot and its entries */
    assert_false(table_is_zero(g, engine_adapter_slot(old)));
    install_fails(g, "a", "one", true, ENGINE_ADAPTER_SLOTS_FULL,
                  "--max-adapters allows 2, and 1 of these are removed ones that requests still use");
    check_table(g, "a", "two");
    registry_release(g->registry, old);
    install_fine(g, "a", "one", true, &third);
    assert_true(third > second);
    check_table(g, "a", "one");
    for (int i = 0; i < 50; i++) { /* slots that are being given back are waited for */
        install_fine(g, "a", i & 1 ? "one" : "two", true, &second);
        assert_true(second > third);
        third = second;
    }
    struct engine_stats s = stats(g);
    assert_int_equal(s.adapters_ready, 1);
    assert_int_equal(s.adapters_installed, 53);
    assert_int_equal(s.adapters_replaced, 52);
    rig_destroy(g);
}

static void ids_start_anywhere(void **state)
{
    (void)state;
    int32_t id[3];
    for (int i = 0; i < 3; i++) {
        struct rig *g = rig_create(1, true);
        install_fine(g, "a", "one", false, &id[i]);
        assert_true(id[i] > 0 && id[i] <= (1 << 30));
        rig_destroy(g);
    }
    assert_true(id[0] != id[1] || id[1] != id[2]);
}

static void draining_refuses(void **state)
{
    (void)state;
    struct rig *g = rig_create(2, false);
    install_fine(g, "a", "one", false, NULL);
    registry_begin_drain(g->registry);
    install_fails(g, "b", "two", false, ENGINE_DRAINING, "going down");
    assert_int_equal(remove_it(g, "a", 5000), ENGINE_ADAPTER_REMOVED);
    rig_destroy(g);
}

static void device_memory_runs_out(void **state)
{
    (void)state;
    struct rig *g = rig_create(4, false);
    g->device.limit = 1000;
    install_fails(g, "a", "one", false, ENGINE_OUT_OF_DEVICE_MEMORY,
                  "adapter \"a\" takes 3072 bytes of device memory; 1000 of 1000 are free");
    assert_int_equal(stats(g).adapter_bytes, 0);
    g->device.limit = (size_t)1 << 30;
    install_fine(g, "a", "one", false, NULL);
    rig_destroy(g);
}

/* Every call of the device fails once, at every place where it is made. */
static void device_failures_are_undone(void **state)
{
    (void)state;
    struct rig *g = rig_create(3, false);
    int failures = 0;
    for (int kind = 0; kind < 3; kind++) {
        int *countdown = kind == 0 ? &g->device.fail_alloc : kind == 1 ? &g->device.fail_upload : &g->device.fail_write;
        for (int nth = 1; nth < 6; nth++) {
            pthread_mutex_lock(&g->device.lock);
            *countdown = nth;
            pthread_mutex_unlock(&g->device.lock);
            struct engine_error error = {0};
            enum engine_code code = install(g, "a", nth & 1 ? "one" : "two", false, NULL, &error);
            *countdown = 0;
            if (code == ENGINE_OK) {
                assert_int_equal(remove_it(g, "a", 5000), ENGINE_ADAPTER_REMOVED);
            } else {
                failures++;
                assert_true(error.message[0]);
                assert_null(registry_acquire_name(g->registry, "a", 1));
            }
            for (int slot = 0; slot < 3; slot++)
                assert_true(table_is_zero(g, slot));
            assert_int_equal(stats(g).adapter_bytes, 0);
        }
    }
    assert_true(failures >= 2);
    /* all three slots are still there */
    install_fine(g, "x", "one", false, NULL);
    install_fine(g, "y", "two", false, NULL);
    install_fine(g, "z", "one", false, NULL);
    rig_destroy(g);
}

/* Adapters of many pieces, packed by several threads: the same table; and what fails in one of them fails the install. */
static void packed_by_many_threads(void **state)
{
    (void)state;
    static const struct test_model_shape large = {4, 8192, 1024, DTYPE_BF16, false, false, 4, {0, 2, -1}, {-1}};
    for (int direct = 0; direct < 2; direct++) {
        struct rig *g = rig_create_shape(2, direct, &large, 16);
        install_fine(g, "a", "two", false, NULL);
        check_table(g, "a", "two");
        assert_int_equal(g->registry->helpers, 0);
        assert_int_equal(g->registry->stages_busy, 0);
        for (int nth = 1; !direct && nth < 4; nth++) {
            g->device.fail_upload = nth;
            install_fails(g, "b", "two", false, ENGINE_DEVICE_FAILED, "upload failed");
        }
        install_fine(g, "b", "two", false, NULL);
        check_table(g, "b", "two");
        rig_destroy(g);
    }
}

/* A file that somebody writes anew while it is read is taken whole or not at all. */
static void a_file_that_changes_is_refused(void **state)
{
    (void)state;
    struct rig *g = rig_create(2, false);
    char path[128];
    int32_t id = 0;
    install_fine(g, "a", "one", false, &id);
    static const char *const file[] = {"adapter_model.safetensors", "adapter_config.json"};
    for (int i = 0; i < 2; i++) {
        char text[128];
        snprintf(path, sizeof path, "%s/two/%s", g->s.path, file[i]);
        snprintf(text, sizeof text, "%s: the file was written to while it was being read", file[i]);
        g->device.touched = path;
        install_fails(g, "a", "two", true, ENGINE_BAD_ADAPTER, text);
        g->device.touched = NULL;
    }
    struct engine_adapter *old = registry_acquire_id(g->registry, id);
    assert_non_null(old);
    registry_release(g->registry, old);
    install_fine(g, "a", "two", true, NULL);
    check_table(g, "a", "two");
    rig_destroy(g);
}

static void listed_in_order(void **state)
{
    (void)state;
    struct rig *g = rig_create(5, true);
    install_fine(g, "c", "one", false, NULL);
    install_fine(g, "a", "two", false, NULL);
    install_fine(g, "b", "one", false, NULL);
    install_fine(g, "c", "two", true, NULL);
    assert_int_equal(remove_it(g, "a", 5000), ENGINE_ADAPTER_REMOVED);
    install_fine(g, "a", "two", false, NULL);
    struct engine_adapter_info *list;
    size_t count;
    struct engine_error error;
    assert_int_equal(registry_list(g->registry, &list, &count, &error), ENGINE_OK);
    char order[8] = "";
    for (size_t i = 0, n = 0; i < count; i++) {
        if (list[i].state == ENGINE_ADAPTER_READY)
            order[n++] = list[i].name[0];
        engine_adapter_info_finish(&list[i]);
    }
    free(list);
    assert_string_equal(order, "bca");
    rig_destroy(g);
}

/* ---- races ----------------------------------------------------------------------------------------------------- */

struct contender {
    struct rig *rig;
    const char *name, *path;
    bool replace;
    enum engine_code code;
    int32_t id;
};

static void *contend(void *arg)
{
    struct contender *c = arg;
    c->code = install(c->rig, c->name, c->path, c->replace, &c->id, NULL);
    return NULL;
}

static void one_of_two_installs_wins(void **state)
{
    (void)state;
    struct rig *g = rig_create(4, false);
    for (int round = 0; round < 20; round++) {
        struct contender c[2] = {{g, "a", "one", false, ENGINE_OK, 0}, {g, "a", "two", false, ENGINE_OK, 0}};
        pthread_t t[2];
        for (int i = 0; i < 2; i++)
            pthread_create(&t[i], NULL, contend, &c[i]);
        for (int i = 0; i < 2; i++)
            pthread_join(t[i], NULL);
        assert_true((c[0].code == ENGINE_OK) != (c[1].code == ENGINE_OK));
        assert_int_equal(c[0].code == ENGINE_OK ? c[1].code : c[0].code, ENGINE_ADAPTER_EXISTS);
        check_table(g, "a", c[0].code == ENGINE_OK ? "one" : "two");
        assert_int_equal(remove_it(g, "a", 5000), ENGINE_ADAPTER_REMOVED);
    }
    rig_destroy(g);
}

/* Installs begun and not ended, and jobs that the engine thread has yet to take. */
static int queued_installs(struct rig *g)
{
    int n = 0;
    pthread_mutex_lock(&g->registry->lock);
    for (const struct registry_install *in = g->registry->installs; in; in = in->next)
        n++;
    pthread_mutex_unlock(&g->registry->lock);
    return n;
}

static int queued_jobs(struct rig *g)
{
    int n = 0;
    pthread_mutex_lock(&g->thread.lock);
    for (const struct job *job = g->thread.head; job; job = job->next)
        n++;
    pthread_mutex_unlock(&g->thread.lock);
    return n;
}

/* Ten seconds at most. */
static void await(struct rig *g, int (*count)(struct rig *), int want)
{
    for (int i = 0; i < 10000 && count(g) != want; i++)
        usleep(1000);
    assert_int_equal(count(g), want);
}

/* An install of a name that waits for another gets its turn when that one fails. The first is held before the step in which it
 * fails until the second has queued behind it. */
static void a_failed_install_lets_the_next_in(void **state)
{
    (void)state;
    struct rig *g = rig_create(1, false);
    struct contender c[2] = {{g, "a", "one", false, ENGINE_OK, 0}, {g, "a", "two", false, ENGINE_OK, 0}};
    pthread_t t[2];
    g->device.fail_write = 1;
    thread_pause(&g->thread, true);
    assert_int_equal(pthread_create(&t[0], NULL, contend, &c[0]), 0);
    await(g, queued_jobs, 1);
    assert_int_equal(pthread_create(&t[1], NULL, contend, &c[1]), 0);
    await(g, queued_installs, 2);
    assert_int_equal(stats(g).adapters_ready, 0);
    thread_pause(&g->thread, false);
    for (int i = 0; i < 2; i++)
        pthread_join(t[i], NULL);
    assert_int_equal(c[0].code, ENGINE_DEVICE_FAILED);
    assert_int_equal(c[1].code, ENGINE_OK);
    check_table(g, "a", "two");
    rig_destroy(g);
}

/* Removed with nobody using it, but the engine thread has not come to it: draining, and its slot is waited for. */
static void waits_for_the_engine_thread(void **state)
{
    (void)state;
    struct rig *g = rig_create(1, false);
    install_fine(g, "a", "one", false, NULL);
    thread_pause(&g->thread, true);
    int64_t start = clock_now_ns();
    assert_int_equal(remove_it(g, "a", 0), ENGINE_ADAPTER_DRAINING);
    struct contender c = {g, "b", "two", false, ENGINE_OK, 0};
    pthread_t t;
    pthread_create(&t, NULL, contend, &c);
    usleep(20000);
    assert_int_equal(stats(g).adapters_draining, 1);
    thread_pause(&g->thread, false);
    pthread_join(t, NULL);
    assert_int_equal(c.code, ENGINE_OK);
    struct engine_adapter *held = registry_acquire_name(g->registry, "b", 1);
    start = clock_now_ns();
    assert_int_equal(remove_it(g, "b", 50), ENGINE_ADAPTER_DRAINING);
    assert_true(clock_now_ns() - start >= 50 * 1000000);
    registry_release(g->registry, held);
    rig_destroy(g);
}

struct crowd {
    struct rig *rig;
    unsigned seed;
};

static void *churn(void *arg)
{
    struct crowd *c = arg;
    static const char *const names[] = {"a", "b", "c"};
    for (int i = 0; i < 150; i++) {
        const char *name = names[rand_r(&c->seed) % 3];
        struct engine_adapter_info info;
        struct engine_error error;
        bool replaced;
        switch (rand_r(&c->seed) % 4) {
        case 0:
        case 1:
            if (registry_install(c->rig->registry, name, rand_r(&c->seed) % 2 ? "one" : "two", -1, rand_r(&c->seed) % 4, &info, &replaced,
                                 &error) == ENGINE_OK)
                engine_adapter_info_finish(&info);
            else
                assert_true(error.code == ENGINE_ADAPTER_EXISTS || error.code == ENGINE_ADAPTER_SLOTS_FULL);
            break;
        case 2:
            if (registry_remove(c->rig->registry, name, rand_r(&c->seed) % 3, &info, &error) == ENGINE_OK)
                engine_adapter_info_finish(&info);
            break;
        default: {
            struct engine_adapter_info *list;
            size_t count;
            assert_int_equal(registry_list(c->rig->registry, &list, &count, &error), ENGINE_OK);
            for (size_t k = 0; k < count; k++)
                engine_adapter_info_finish(&list[k]);
            free(list);
        }
        }
    }
    return NULL;
}

static void *use(void *arg)
{
    struct crowd *c = arg;
    static const char *const names[] = {"a", "b", "c"};
    struct engine_adapter *held[8] = {NULL};
    for (int i = 0; i < 4000; i++) {
        int at = rand_r(&c->seed) % 8, n = rand_r(&c->seed) % 3;
        registry_release(c->rig->registry, held[at]);
        held[at] = registry_acquire_name(c->rig->registry, names[n], 1);
        if (held[at]) {
            assert_string_equal(engine_adapter_name(held[at]), names[n]);
            assert_true(engine_adapter_slot(held[at]) >= 0 && engine_adapter_slot(held[at]) < 6);
            engine_adapter_count_rows(held[at], 1);
        }
        if (i % 64 == 0)
            usleep(200);
    }
    for (int i = 0; i < 8; i++)
        registry_release(c->rig->registry, held[i]);
    return NULL;
}

static void crowds(void **state)
{
    (void)state;
    struct rig *g = rig_create(6, false);
    struct crowd c[5];
    pthread_t t[5];
    for (int i = 0; i < 5; i++) {
        c[i] = (struct crowd){g, 77 + (unsigned)i};
        pthread_create(&t[i], NULL, i < 3 ? churn : use, &c[i]);
    }
    for (int i = 0; i < 5; i++)
        pthread_join(t[i], NULL);
    struct engine_adapter_info info;
    for (int i = 0; i < 3; i++)
        if (registry_remove(g->registry, (const char *const[]){"a", "b", "c"}[i], 5000, &info, NULL) == ENGINE_OK) {
            assert_int_equal(info.state, ENGINE_ADAPTER_REMOVED);
            engine_adapter_info_finish(&info);
        }
    while (stats(g).adapters_draining)
        usleep(1000);
    assert_int_equal(stats(g).adapters_ready, 0);
    assert_int_equal(stats(g).adapter_bytes, 0);
    for (int slot = 0; slot < 6; slot++)
        assert_true(table_is_zero(g, slot));
    for (int i = 0; i < 6; i++) { /* and no slot was lost */
        char name[2] = {(char)('p' + i), 0};
        install_fine(g, name, "one", false, NULL);
    }
    rig_destroy(g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(life),
        cmocka_unit_test(errors_change_nothing),
        cmocka_unit_test(names),
        cmocka_unit_test(without_root_or_slots),
        cmocka_unit_test(replacing),
        cmocka_unit_test(ids_start_anywhere),
        cmocka_unit_test(draining_refuses),
        cmocka_unit_test(device_memory_runs_out),
        cmocka_unit_test(device_failures_are_undone),
        cmocka_unit_test(packed_by_many_threads),
        cmocka_unit_test(a_file_that_changes_is_refused),
        cmocka_unit_test(listed_in_order),
        cmocka_unit_test(one_of_two_installs_wins),
        cmocka_unit_test(a_failed_install_lets_the_next_in),
        cmocka_unit_test(waits_for_the_engine_thread),
        cmocka_unit_test(crowds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
