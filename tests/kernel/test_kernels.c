/* SPDX-License-Identifier: Apache-2.0
 *
 * The CPU back end's families against the reference.
 *
 *     test_kernels [--bench] FAMILY      FAMILY as in kernels_cpu_isa; exit status 77: this processor lacks it
 *
 * Run on "ref" it checks the reference's own promises, and on "pool" the thread pool.
 */
#include "cases.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#define EXIT_SKIPPED 77

static struct body_target one_thread, three_threads; /* more threads than some machines have: order must not matter */

static void test_steps(void **state) { cases_check_steps(&three_threads); }
static void test_forward(void **state) { cases_check_forward(&three_threads); }
static void test_rule(void **state) { cases_check_rule(&three_threads); }
static void test_company(void **state) { cases_check_company(&three_threads); }
static void test_base(void **state) { cases_check_base(&three_threads); }
static void test_sums(void **state) { cases_check_sums(&three_threads); }
static void test_nan(void **state) { cases_check_nan(&three_threads); }
static void test_order(void **state) { cases_check_order(&three_threads); }
static void test_threads(void **state) { cases_check_same(&three_threads, &one_thread); }

/* Padding of h is zero even where infinity has met the weights' zeros. */
static void test_padding(void **state)
{
    struct problem_options o = {.experts = 2, .hidden = 40, .inter = 20, .rows = 5, .k = 2, .seed = 3};
    struct problem *p = problem_create(&o);
    problem_poke(p, 1, 7, INFINITY);
    struct body *b = body_create(&three_threads, p);
    for (int path = KERNEL_DECODE; path < KERNEL_PATHS; path++) {
        int32_t rows, width;
        body_set_batch(b, p, (enum kernel_path)path, true);
        body_run(b);
        free(body_get(b, BODY_H, &rows, &width)); /* looks at it */
        assert_int_equal(rows, 10);
    }
    body_destroy(b);
    problem_destroy(p);
}

static atomic_int counted[1000];

static void count_item(void *arg, int i) { atomic_fetch_add((atomic_int *)arg + i, 1); }

static void test_pool(void **state)
{
    for (int threads = 1; threads <= 5; threads++) {
        struct kernel_stream *s = kernels_cpu_stream_create(threads);
        assert_non_null(s);
        assert_int_equal(kernels_cpu_stream_threads(s), threads);
        int expected = 0;
        for (int round = 0; round < 300; round++) {
            int n = round % 7 == 6 ? 1000 : round % 5;
            expected += n;
            kernels_cpu_parallel(s, n, count_item, counted);
        }
        kernels_cpu_stream_destroy(s);
        int sum = 0;
        for (int i = 0; i < 1000; i++)
            sum += atomic_exchange(&counted[i], 0);
        assert_int_equal(sum, expected);
    }
}

static void test_pool_items_once(void **state)
{
    struct kernel_stream *s = kernels_cpu_stream_create(4);
    for (int round = 1; round <= 50; round++) {
        kernels_cpu_parallel(s, 1000, count_item, counted);
        for (int i = 0; i < 1000; i++)
            assert_int_equal(atomic_load(&counted[i]), round);
    }
    for (int i = 0; i < 1000; i++)
        atomic_store(&counted[i], 0);
    kernels_cpu_stream_destroy(s);
}

static void test_pool_edges(void **state)
{
    assert_null(kernels_cpu_stream_create(1 << 20));
    struct kernel_stream *s = kernels_cpu_stream_create(0);
    assert_non_null(s);
    assert_true(kernels_cpu_stream_threads(s) >= 1);
    kernels_cpu_stream_destroy(s);
    kernels_cpu_stream_destroy(NULL);
}

static void test_names(void **state)
{
    assert_null(kernels_cpu("no such family"));
    assert_null(kernels_cpu_isa(-1));
    int n = 0;
    while (kernels_cpu_isa(n))
        n++;
    assert_string_equal(kernels_cpu_isa(n - 1), "generic");
    assert_non_null(kernels_cpu("generic"));
    assert_ptr_equal(kernels_cpu(NULL), kernels_cpu("auto"));
    assert_null(kernels_cpu_isa(n));
}

static int run_pool(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pool),
        cmocka_unit_test(test_pool_items_once),
        cmocka_unit_test(test_pool_edges),
        cmocka_unit_test(test_names),
    };
    return cmocka_run_group_tests_name("pool", tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    bool bench = argc > 1 && !strcmp(argv[1], "--bench");
    const char *family = argc > 1 + bench ? argv[1 + bench] : "auto";
    if (!strcmp(family, "pool"))
        return run_pool();
    const struct kernel_table *table = !strcmp(family, "ref") ? kernels_ref() : kernels_cpu(family);
    if (!table) {
        fprintf(stderr, "skipped: this processor has no %s, or it is not compiled in\n", family);
        return EXIT_SKIPPED;
    }
    struct kernel_stream *one = kernels_cpu_stream_create(1), *three = kernels_cpu_stream_create(bench ? 0 : 3);
    if (!one || !three)
        return 1;
    one_thread = (struct body_target){table, one, &body_host_memory};
    three_threads = (struct body_target){table, three, &body_host_memory};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_steps),   cmocka_unit_test(test_forward), cmocka_unit_test(test_rule), cmocka_unit_test(test_sums),
        cmocka_unit_test(test_company), cmocka_unit_test(test_base),    cmocka_unit_test(test_nan),  cmocka_unit_test(test_threads),
        cmocka_unit_test(test_padding), cmocka_unit_test(test_order),
    };
    int failed = 0;
    if (bench)
        cases_bench(&three_threads);
    else
        failed = cmocka_run_group_tests_name(table->name, tests, NULL, NULL);
    kernels_cpu_stream_destroy(one);
    kernels_cpu_stream_destroy(three);
    return failed;
}
