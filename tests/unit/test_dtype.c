/* SPDX-License-Identifier: Apache-2.0
 *
 * Element conversions against first principles: every 16-bit value round-trips, and narrowing picks the nearest neighbour.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "kernels/dtype.h"

static void every_value_round_trips(void **state)
{
    (void)state;
    for (uint32_t v = 0; v < 0x10000; v++) {
        float b = dtype_bf16_to_f32((uint16_t)v), h = dtype_fp16_to_f32((uint16_t)v);
        if (isnan(b))
            assert_true(isnan(dtype_bf16_to_f32(dtype_f32_to_bf16(b))));
        else
            assert_int_equal(dtype_f32_to_bf16(b), v);
        if (isnan(h))
            assert_true(isnan(dtype_fp16_to_f32(dtype_f32_to_fp16(h))));
        else
            assert_int_equal(dtype_f32_to_fp16(h), v);
    }
}

/* Between two neighbours the midpoint goes to the even one, anything past it to the nearer. */
static void narrowing_rounds_to_nearest_even(void **state)
{
    (void)state;
    for (uint32_t v = 0; v < 0x7c00 - 1; v++) {
        double lo = dtype_fp16_to_f32((uint16_t)v), hi = dtype_fp16_to_f32((uint16_t)(v + 1)), mid = (lo + hi) / 2;
        assert_int_equal(dtype_f32_to_fp16((float)mid), v & 1 ? v + 1 : v);
        assert_int_equal(dtype_f32_to_fp16(nextafterf((float)mid, 0)), v);
        assert_int_equal(dtype_f32_to_fp16(nextafterf((float)mid, INFINITY)), v + 1);
        assert_int_equal(dtype_f32_to_fp16(-(float)mid), 0x8000 | (v & 1 ? v + 1 : v));
    }
    for (uint32_t v = 0; v < 0x7f80 - 1; v++) {
        float mid = dtype_f32_from_bits(v << 16 | 0x8000);
        assert_int_equal(dtype_f32_to_bf16(mid), v & 1 ? v + 1 : v);
        assert_int_equal(dtype_f32_to_bf16(dtype_f32_from_bits(v << 16 | 0x7fff)), v);
        assert_int_equal(dtype_f32_to_bf16(dtype_f32_from_bits(v << 16 | 0x8001)), v + 1);
    }
    assert_int_equal(dtype_f32_to_fp16(65519.996f), 0x7bff);
    assert_int_equal(dtype_f32_to_fp16(65520.0f), 0x7c00);
    assert_int_equal(dtype_f32_to_bf16(3.4e38f), 0x7f80);
}

static void bulk_equals_single(void **state)
{
    (void)state;
    float in[5] = {1.0f, -0.3f, 65504.0f, NAN, -INFINITY};
    unsigned char raw[1 + sizeof in];
    memcpy(raw + 1, in, sizeof in); /* misaligned on purpose */
    uint16_t out[5];
    dtype_convert(out, DTYPE_BF16, raw + 1, DTYPE_FP32, 5);
    for (int i = 0; i < 5; i++)
        assert_int_equal(out[i], dtype_f32_to_bf16(in[i]));
    enum dtype d;
    assert_true(dtype_parse("INT64", 5, &d) && d == DTYPE_INT64);
    assert_false(dtype_parse("INT", 3, &d));
    assert_string_equal(dtype_name(DTYPE_BYTES), "BYTES");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_value_round_trips),
        cmocka_unit_test(narrowing_rounds_to_nearest_even),
        cmocka_unit_test(bulk_equals_single),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
