/* SPDX-License-Identifier: Apache-2.0
 *
 * Staging memory: exact bounds, reuse, and nothing hoarded.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "engine/staging.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* A device that counts what it has given. */
static atomic_llong live_bytes;
static atomic_int allocations;
static atomic_bool refuse;

static void *counted_alloc(struct device *device, size_t bytes)
{
    (void)device;
    if (atomic_load(&refuse))
        return NULL;
    atomic_fetch_add(&live_bytes, (long long)bytes);
    atomic_fetch_add(&allocations, 1);
    return aligned_alloc(256, bytes);
}

static void counted_free(struct device *device, void *memory, size_t bytes)
{
    (void)device;
    atomic_fetch_sub(&live_bytes, (long long)bytes);
    free(memory);
}

static const struct device_ops ops = {.host_alloc = counted_alloc, .host_free = counted_free};
static struct device device = {.ops = &ops};

static struct staging *make(int64_t limit, int64_t keep)
{
    atomic_store(&live_bytes, 0);
    atomic_store(&allocations, 0);
    struct staging *s = staging_create(&device, limit, keep);
    assert_non_null(s);
    return s;
}

static void the_bound_is_exact(void **state)
{
    (void)state;
    struct staging *s = make(1000000, 0);
    void *a = NULL, *b = NULL, *c = NULL;
    assert_int_equal(staging_acquire(s, 1000001, &a), ENGINE_TOO_LARGE);
    assert_int_equal(staging_acquire(s, SIZE_MAX, &a), ENGINE_TOO_LARGE);
    assert_int_equal(staging_acquire(s, SIZE_MAX - 100, &a), ENGINE_TOO_LARGE);
    assert_null(a);
    assert_int_equal(staging_check(s, 1000001), ENGINE_TOO_LARGE);
    assert_int_equal(staging_check(s, SIZE_MAX - 100), ENGINE_TOO_LARGE);
    assert_int_equal(staging_check(s, 1000000), ENGINE_OK);
    assert_int_equal(staging_bytes(s), 0);
    assert_int_equal(atomic_load(&live_bytes), 0);
    assert_int_equal(staging_acquire(s, 1000000, &a), ENGINE_OK);
    memset(a, 1, 1000000);
    assert_int_equal(staging_check(s, 1), ENGINE_QUEUE_FULL);
    assert_int_equal(staging_check(s, 1000001), ENGINE_TOO_LARGE);
    assert_int_equal(staging_bytes(s), 1000000);
    assert_int_equal(staging_acquire(s, 1, &b), ENGINE_QUEUE_FULL);
    assert_null(b);
    staging_release(s, a);
    assert_int_equal(staging_bytes(s), 0);
    assert_int_equal(staging_acquire(s, 999999, &a), ENGINE_OK);
    assert_int_equal(staging_acquire(s, 1, &b), ENGINE_OK);
    assert_int_equal(staging_acquire(s, 1, &c), ENGINE_QUEUE_FULL);
    assert_int_equal(staging_acquire(s, 0, &c), ENGINE_OK);
    assert_int_equal((uintptr_t)a % 64, (uintptr_t)b % 64);
    staging_release(s, a);
    staging_release(s, b);
    staging_release(s, c);
    staging_release(s, NULL);
    assert_int_equal(staging_bytes(s), 0);
    staging_destroy(s);
    assert_int_equal(atomic_load(&live_bytes), 0);
}

/* Every size class holds what it says, and wastes at most a quarter. */
static void blocks_hold_what_was_asked_for(void **state)
{
    (void)state;
    struct staging *s = make(INT64_C(1) << 40, 0);
    for (size_t bytes = 1; bytes < 3000000; bytes += bytes / 7 + 1) {
        void *p;
        assert_int_equal(staging_acquire(s, bytes, &p), ENGINE_OK);
        long long live = atomic_load(&live_bytes);
        assert_true(live >= (long long)bytes && live <= (long long)(bytes + bytes / 4 + 4096 + 512));
        memset(p, 0xa5, bytes); /* the sanitizers watch the end */
        staging_release(s, p);
    }
    staging_destroy(s);
}

static void blocks_of_about_one_size_are_reused(void **state)
{
    (void)state;
    struct staging *s = make(64 << 20, 8 << 20);
    for (int i = 0; i < 100; i++) {
        void *p, *q;
        assert_int_equal(staging_acquire(s, 500000 + (size_t)i * 10, &p), ENGINE_OK);
        assert_int_equal(staging_acquire(s, 600, &q), ENGINE_OK);
        staging_release(s, p);
        staging_release(s, q);
    }
    assert_int_equal(atomic_load(&allocations), 2);
    staging_destroy(s);
}

static void what_is_kept_is_bounded_and_trimmed(void **state)
{
    (void)state;
    struct staging *s = make(64 << 20, 4 << 20);
    void *p[16];
    for (int i = 0; i < 16; i++)
        assert_int_equal(staging_acquire(s, 3 << 20, &p[i]), ENGINE_OK);
    for (int i = 0; i < 16; i++)
        staging_release(s, p[i]);
    assert_true(atomic_load(&live_bytes) > 0 && atomic_load(&live_bytes) <= 4 << 20);
    assert_int_equal(staging_acquire(s, 40 << 20, &p[0]), ENGINE_OK); /* larger than may be kept */
    staging_release(s, p[0]);
    assert_true(atomic_load(&live_bytes) <= 4 << 20);
    /* A block survives one trim: it may have come back just now. */
    assert_int_equal(staging_acquire(s, 3 << 20, &p[0]), ENGINE_OK);
    staging_release(s, p[0]);
    staging_trim(s);
    assert_true(atomic_load(&live_bytes) > 0);
    staging_trim(s);
    assert_int_equal(atomic_load(&live_bytes), 0);
    staging_destroy(s);
}

/* Kept blocks make way for others instead of coming on top of the bound. */
static void kept_blocks_count_against_the_bound(void **state)
{
    (void)state;
    struct staging *s = make(10 << 20, 10 << 20);
    void *p[8];
    for (int i = 0; i < 8; i++)
        assert_int_equal(staging_acquire(s, 1 << 20, &p[i]), ENGINE_OK);
    for (int i = 0; i < 8; i++)
        staging_release(s, p[i]);
    assert_int_equal(staging_acquire(s, 9 << 20, &p[0]), ENGINE_OK);
    assert_true(atomic_load(&live_bytes) <= (10 << 20) + (10 << 20) / 4);
    staging_release(s, p[0]);
    staging_destroy(s);
}

static void a_refusing_allocator_changes_nothing(void **state)
{
    (void)state;
    struct staging *s = make(1000, 1000);
    void *p = NULL;
    atomic_store(&refuse, true);
    assert_int_equal(staging_acquire(s, 600, &p), ENGINE_OUT_OF_MEMORY);
    atomic_store(&refuse, false);
    assert_null(p);
    assert_int_equal(staging_bytes(s), 0);
    assert_int_equal(staging_acquire(s, 1000, &p), ENGINE_OK);
    staging_release(s, p);
    staging_destroy(s);
}

static void *churn(void *arg)
{
    struct staging *s = arg;
    unsigned seed = (unsigned)(uintptr_t)&seed;
    for (int i = 0; i < 3000; i++) {
        void *p;
        seed = seed * 1103515245u + 12345u;
        size_t bytes = (seed >> 8) % 200000;
        if (staging_acquire(s, bytes, &p) == ENGINE_OK) {
            memset(p, i, bytes < 100 ? bytes : 100);
            staging_release(s, p);
        }
        if (i % 100 == 0)
            staging_trim(s);
    }
    return NULL;
}

static void threads_share_the_pool(void **state)
{
    (void)state;
    struct staging *s = make(400000, 200000);
    pthread_t thread[4];
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, churn, s), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(thread[i], NULL);
    assert_int_equal(staging_bytes(s), 0);
    assert_true(atomic_load(&live_bytes) <= 200000);
    staging_destroy(s);
    assert_int_equal(atomic_load(&live_bytes), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_bound_is_exact),
        cmocka_unit_test(blocks_hold_what_was_asked_for),
        cmocka_unit_test(blocks_of_about_one_size_are_reused),
        cmocka_unit_test(what_is_kept_is_bounded_and_trimmed),
        cmocka_unit_test(kept_blocks_count_against_the_bound),
        cmocka_unit_test(a_refusing_allocator_changes_nothing),
        cmocka_unit_test(threads_share_the_pool),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
