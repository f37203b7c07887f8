/* SPDX-License-Identifier: Apache-2.0
 *
 * The adapter arena against a model that knows which bytes are taken, on a device that counts what it hands out.
 */
#include "engine/arena.h"

#include <stdarg.h>
#include <setjmp.h>
#include <cmocka.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK ((size_t)4 << 20)

struct fake {
    struct device base;
    pthread_mutex_t lock;
    size_t limit, used;
    int calls, fail_at; /* fail_at: which call of alloc fails; 0: none */
    uint64_t next;
};

static enum engine_code fake_alloc(struct device *device, size_t bytes, uint64_t *out, struct engine_error *error)
{
    struct fake *f = (struct fake *)device;
    pthread_mutex_lock(&f->lock);
    bool fine = ++f->calls != f->fail_at && bytes <= f->limit - f->used;
    if (fine) {
        f->used += bytes;
        *out = f->next;
        f->next += (bytes + 255) / 256 * 256 + 4096; /* no two chunks touch */
    }
    pthread_mutex_unlock(&f->lock);
    return fine ? ENGINE_OK : engine_fail(error, ENGINE_OUT_OF_DEVICE_MEMORY, "%zu bytes wanted", bytes);
}

static void fake_free(struct device *device, uint64_t address, size_t bytes)
{
    struct fake *f = (struct fake *)device;
    pthread_mutex_lock(&f->lock);
    assert_true(address && f->used >= bytes);
    f->used -= bytes;
    pthread_mutex_unlock(&f->lock);
}

static const struct device_ops ops = {.alloc = fake_alloc, .free = fake_free};

static int setup(void **state)
{
    struct fake *f = calloc(1, sizeof *f);
    *f = (struct fake){.base.ops = &ops, .limit = (size_t)1 << 40, .next = 1 << 20};
    pthread_mutex_init(&f->lock, NULL);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fake *f = *state;
    assert_int_equal(f->used, 0);
    pthread_mutex_destroy(&f->lock);
    free(f);
    return 0;
}

static struct arena_stats stats(struct arena *a)
{
    struct arena_stats s;
    arena_get_stats(a, &s);
    return s;
}

static uint64_t take(struct arena *a, size_t bytes)
{
    uint64_t at = 0;
    assert_int_equal(arena_alloc(a, bytes, &at, NULL), ENGINE_OK);
    assert_true(at && at % ARENA_ALIGN == 0);
    return at;
}

static void small_requests_share_a_chunk(void **state)
{
    struct fake *f = *state;
    struct arena *a = arena_create(&f->base, CHUNK);
    uint64_t x = take(a, 1), y = take(a, 257), z = take(a, 256);
    assert_int_equal(y - x, 256);
    assert_int_equal(z - y, 512);
    assert_int_equal(stats(a).used, 1024);
    assert_int_equal(stats(a).chunks, CHUNK);
    assert_int_equal(f->calls, 1);
    arena_free(a, y);
    assert_int_equal(take(a, 512), y); /* first fit */
    arena_free(a, x);
    arena_free(a, y);
    arena_free(a, z);
    arena_free(a, 0);
    assert_int_equal(stats(a).used, 0);
    assert_int_equal(take(a, CHUNK), x); /* all joined again */
    arena_free(a, x);
    arena_destroy(a);
}

static void empty_chunks_stay_until_trimmed(void **state)
{
    struct fake *f = *state;
    struct arena *a = arena_create(&f->base, CHUNK);
    uint64_t at[4];
    for (int i = 0; i < 4; i++)
        at[i] = take(a, CHUNK - 256);
    assert_int_equal(stats(a).chunk_count, 4);
    arena_trim(a);
    assert_int_equal(stats(a).chunk_count, 4);
    for (int i = 0; i < 4; i++)
        arena_free(a, at[i]);
    assert_int_equal(f->used, 4 * CHUNK); /* freeing never calls the device */
    arena_trim(a);
    assert_int_equal(stats(a).chunk_count, 1);
    assert_int_equal(f->used, CHUNK);
    int calls = f->calls;
    uint64_t large = take(a, 3 * CHUNK + 1);
    assert_true(f->used >= 4 * CHUNK + 1);
    arena_free(a, large);
    assert_int_equal(take(a, 3 * CHUNK), large); /* the next of about that size needs no call */
    assert_int_equal(f->calls, calls + 1);
    arena_free(a, large);
    uint64_t small = take(a, CHUNK / 2);
    assert_true(small < large || small >= large + 3 * CHUNK); /* and small ones keep out of it */
    arena_trim(a);
    assert_int_equal(f->used, CHUNK);
    arena_free(a, small);
    arena_destroy(a);
}

static void empty_chunks_go_when_memory_is_short(void **state)
{
    struct fake *f = *state;
    f->limit = 6 * CHUNK;
    struct arena *a = arena_create(&f->base, CHUNK);
    uint64_t four = take(a, 4 * CHUNK), one = take(a, CHUNK), large;
    arena_free(a, four);
    assert_int_equal(arena_alloc(a, 6 * CHUNK, &large, NULL), ENGINE_OUT_OF_DEVICE_MEMORY);
    assert_int_equal(f->used, CHUNK);
    large = take(a, 5 * CHUNK);
    arena_free(a, one);
    arena_free(a, large);
    assert_int_equal(take(a, 6 * CHUNK - 256) % 256, 0);
    arena_destroy(a);
    assert_int_equal(f->used, 0);
}

static void falls_back_to_the_least_that_will_do(void **state)
{
    struct fake *f = *state;
    f->limit = (size_t)2 << 20;
    struct arena *a = arena_create(&f->base, CHUNK);
    uint64_t x = take(a, 1000), y = 7;
    assert_int_equal(stats(a).chunks, 2 << 20);
    struct engine_error error;
    assert_int_equal(arena_alloc(a, 2 << 20, &y, &error), ENGINE_OUT_OF_DEVICE_MEMORY);
    assert_string_equal(error.message, "2097152 bytes wanted");
    assert_int_equal(y, 7);
    assert_int_equal(stats(a).used, 1024);
    arena_free(a, x);
    assert_int_equal(arena_alloc(a, SIZE_MAX, &y, &error), ENGINE_OUT_OF_DEVICE_MEMORY);
    arena_destroy(a);
}

/* Random requests; no two may overlap, and what is used is what was asked for. */
static void random_requests(void **state)
{
    struct fake *f = *state;
    f->limit = 64 * CHUNK;
    struct arena *a = arena_create(&f->base, CHUNK);
    enum { SLOTS = 200 };
    struct {
        uint64_t at;
        size_t bytes;
    } held[SLOTS] = {0};
    unsigned seed = 12345;
    size_t used = 0, refused = 0;
    for (int step = 0; step < 20000; step++) {
        int i = rand_r(&seed) % SLOTS;
        if (held[i].at) {
            arena_free(a, held[i].at);
            used -= held[i].bytes;
            held[i].at = 0;
        } else {
            size_t bytes = 1 + (size_t)rand_r(&seed) % (rand_r(&seed) % 16 ? 100000 : 3 * CHUNK);
            if (rand_r(&seed) % 50 == 0)
                f->fail_at = f->calls + 1;
            if (arena_alloc(a, bytes, &held[i].at, NULL) != ENGINE_OK) {
                held[i].at = 0;
                refused++;
                continue;
            }
            held[i].bytes = (bytes + 255) / 256 * 256;
            used += held[i].bytes;
            for (int j = 0; j < SLOTS; j++)
                assert_true(j == i || !held[j].at || held[i].at + held[i].bytes <= held[j].at || held[j].at + held[j].bytes <= held[i].at);
        }
        assert_int_equal(stats(a).used, used);
        assert_int_equal(stats(a).chunks, f->used);
        assert_true(stats(a).chunks >= used);
    }
    assert_true(refused > 0);
    for (int i = 0; i < SLOTS; i++)
        arena_free(a, held[i].at);
    assert_int_equal(stats(a).used, 0);
    arena_trim(a);
    assert_true(stats(a).chunks <= CHUNK);
    arena_destroy(a);
}

static void *churn(void *arg)
{
    struct arena *a = arg;
    unsigned seed = (unsigned)(uintptr_t)&seed;
    uint64_t held[16] = {0};
    for (int step = 0; step < 3000; step++) {
        int i = rand_r(&seed) % 16;
        if (held[i]) {
            arena_free(a, held[i]);
            held[i] = 0;
        } else if (arena_alloc(a, 1 + (size_t)rand_r(&seed) % CHUNK, &held[i], NULL) != ENGINE_OK) {
            held[i] = 0;
        }
    }
    for (int i = 0; i < 16; i++)
        arena_free(a, held[i]);
    return NULL;
}

static void many_threads(void **state)
{
    struct fake *f = *state;
    struct arena *a = arena_create(&f->base, CHUNK);
    pthread_t t[4];
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&t[i], NULL, churn, a), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(t[i], NULL);
    assert_int_equal(stats(a).used, 0);
    arena_trim(a);
    assert_true(stats(a).chunks <= CHUNK);
    arena_destroy(a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(small_requests_share_a_chunk, setup, teardown),
        cmocka_unit_test_setup_teardown(empty_chunks_stay_until_trimmed, setup, teardown),
        cmocka_unit_test_setup_teardown(empty_chunks_go_when_memory_is_short, setup, teardown),
        cmocka_unit_test_setup_teardown(falls_back_to_the_least_that_will_do, setup, teardown),
        cmocka_unit_test_setup_teardown(random_requests, setup, teardown),
        cmocka_unit_test_setup_teardown(many_threads, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
