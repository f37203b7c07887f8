/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory and threads that can't be had, at every place in turn: starting an engine and installing an adapter give an error, leave
 * nothing behind (the address sanitizer looks) and work at the next attempt. The linker sends our own allocations through here.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "engine/internal.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static atomic_long left; /* allocations until one fails; 0: none does */

static bool fails(void) { return atomic_load(&left) > 0 && atomic_fetch_sub(&left, 1) == 1; }

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *p, size_t size);
void *__real_aligned_alloc(size_t alignment, size_t size);
int __real_posix_memalign(void **out, size_t alignment, size_t size);
void *__real_mmap64(void *at, size_t size, int prot, int flags, int fd, off_t offset);
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *), void *arg);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *p, size_t size);
void *__wrap_aligned_alloc(size_t alignment, size_t size);
int __wrap_posix_memalign(void **out, size_t alignment, size_t size);
void *__wrap_mmap64(void *at, size_t size, int prot, int flags, int fd, off_t offset);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *), void *arg);

void *__wrap_malloc(size_t size) { return fails() ? NULL : __real_malloc(size); }
void *__wrap_calloc(size_t count, size_t size) { return fails() ? NULL : __real_calloc(count, size); }
void *__wrap_realloc(void *p, size_t size) { return fails() ? NULL : __real_realloc(p, size); }
void *__wrap_aligned_alloc(size_t alignment, size_t size) { return fails() ? NULL : __real_aligned_alloc(alignment, size); }
int __wrap_posix_memalign(void **out, size_t alignment, size_t size) { return fails() ? 12 : __real_posix_memalign(out, alignment, size); }
void *__wrap_mmap64(void *at, size_t size, int prot, int flags, int fd, off_t offset)
{
    return fails() ? MAP_FAILED : __real_mmap64(at, size, prot, flags, fd, offset);
}
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *), void *arg)
{
    return fails() ? 11 : __real_pthread_create(thread, attr, fn, arg);
}

static bool memory_code(enum engine_code code) { return code == ENGINE_OUT_OF_MEMORY || code == ENGINE_OUT_OF_DEVICE_MEMORY; }

static const struct engine_options options = {
    .model = FIXTURES "/mixtral",
    .device = "cpu",
    .threads = 2,
    .queue_rows = 100,
    .max_adapters = 4,
    .max_adapter_bytes = 1 << 20,
    .max_inflight_bytes = 1 << 20,
    .adapter_root = FIXTURES "/mixtral",
};

enum { MOST = 20000 };

static void starting(void **state)
{
    (void)state;
    int failures = 0;
    for (long n = 1; n < MOST; n++) {
        struct engine *engine = NULL;
        struct engine_error error = {0};
        atomic_store(&left, n);
        enum engine_code code = engine_create(&options, NULL, &engine, &error);
        bool reached = atomic_exchange(&left, 0) <= 0;
        if (code == ENGINE_OK) {
            engine_destroy(engine);
            if (!reached)
                break;
            continue; /* what failed was something that can be done without */
        }
        if (!memory_code(code) || !reached)
            fail_msg("allocation %ld: %s: %s", n, engine_code_name(code), error.message);
        assert_null(engine);
        failures++;
    }
    print_message("%d failed starts\n", failures);
    assert_in_range(failures, 20, MOST - 2);
}

static void installing(void **state)
{
    (void)state;
    struct engine *engine = NULL;
    struct engine_error error = {0};
    struct engine_stats before, after;
    assert_int_equal(engine_create(&options, NULL, &engine, &error), ENGINE_OK);
    engine_stats_get(engine, &before);
    int failures = 0;
    for (long n = 1; n < MOST; n++) {
        struct engine_adapter_info info;
        bool replaced;
        atomic_store(&left, n);
        enum engine_code code = engine_adapter_install(engine, "a", "adapter_2d_0", false, &info, &replaced, &error);
        bool reached = atomic_exchange(&left, 0) <= 0;
        engine_stats_get(engine, &after);
        if (code == ENGINE_OK) {
            engine_adapter_info_finish(&info);
            assert_int_equal(engine_adapter_remove(engine, "a", 1000, &info, &error), ENGINE_OK);
            assert_int_equal(info.state, ENGINE_ADAPTER_REMOVED);
            engine_adapter_info_finish(&info);
            if (!reached)
                break;
            continue;
        }
        if (!memory_code(code) || !reached)
            fail_msg("allocation %ld: %s: %s", n, engine_code_name(code), error.message);
        assert_int_equal(after.adapters_ready + after.adapters_draining, 0);
        assert_int_equal(after.adapter_bytes, before.adapter_bytes);
        failures++;
    }
    print_message("%d failed installs\n", failures);
    assert_in_range(failures, 10, MOST - 2);
    engine_destroy(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(starting),
        cmocka_unit_test(installing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
