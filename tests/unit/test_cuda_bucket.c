/* SPDX-License-Identifier: Apache-2.0
 *
 * The sizes that forwards are captured for, and the layout of a batch's arrays: pure, so tested without a GPU.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "engine/device_cuda.h"

static void buckets_hold_what_they_are_for(void **state)
{
    (void)state;
    static const int32_t ladder[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024};
    enum { RUNGS = sizeof ladder / sizeof *ladder };
    for (int i = 0; i < RUNGS; i++) {
        assert_int_equal(cuda_bucket(ladder[i], 1 << 20), ladder[i]);
        if (i > 0)
            assert_int_equal(cuda_bucket(ladder[i - 1] + 1, 1 << 20), ladder[i]);
    }
    assert_int_equal(cuda_bucket(0, 100), 1); /* kernels always have a row and a slot to look at */
    for (int32_t n = 1; n <= 5000; n++) {
        int32_t bucket = cuda_bucket(n, 5000);
        assert_in_range(bucket, n, 5000);
        assert_true(bucket <= n + n / 2 + 1);
    }
    assert_int_equal(cuda_bucket(100, 100), 100); /* a bound that is no rung is one */
    assert_int_equal(cuda_bucket(99, 100), 100);
    assert_int_equal(cuda_bucket(1 << 26, 1 << 26), 1 << 26);
    assert_int_equal(cuda_bucket((1 << 26) - 1, 1 << 26), 1 << 26);
}

static void arrays_have_room_and_alignment(void **state)
{
    (void)state;
    assert_int_equal(cuda_arrays_bytes(1, 1), CUDA_ALIGN);
    for (size_t rows = 1; rows < 100; rows += 7) {
        for (size_t slots = 1; slots < 500; slots += 13) {
            size_t bytes = cuda_arrays_bytes(rows, slots);
            assert_true(bytes >= rows * sizeof(struct kernel_row) + slots * 12);
            assert_int_equal(bytes % CUDA_ALIGN, 0);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(buckets_hold_what_they_are_for),
        cmocka_unit_test(arrays_have_room_and_alignment),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
