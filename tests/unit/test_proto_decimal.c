/* SPDX-License-Identifier: Apache-2.0
 *
 * Decimals read to floats and floats written as decimals, against strtof, exact arithmetic in wider types, and each other.
 */
#include "proto-json/proto.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

static uint64_t random_state = 20261130;
static uint64_t random_next(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state * 0x2545f4914f6cdd1du;
}

/* ---- reading through a request, which is how every datatype is reached ---- */

static enum proto_code read_number(const char *number, enum dtype type, uint32_t *bits, struct proto_error *error)
{
    char text[4096];
    struct proto_infer infer;
    int n = snprintf(text, sizeof text, "{\"inputs\":[{\"name\":\"x\",\"datatype\":\"%s\",\"shape\":[1],\"data\":[%s]}]}", dtype_name(type),
                     number);
    assert_in_range(n, 1, sizeof text - 1);
    enum proto_code code = proto_infer_parse(text, (size_t)n, -1, NULL, &infer, error);
    *bits = 0;
    if (!code)
        memcpy(bits, infer.input[0].data, dtype_size(type));
    proto_infer_finish(&infer);
    return code;
}

static void expect_bits(const char *number, enum dtype type, uint32_t want)
{
    struct proto_error error;
    uint32_t bits;
    enum proto_code code = read_number(number, type, &bits, &error);
    if (code || bits != want)
        print_error("%s as %s: %08x, not %08x (%s)\n", number, dtype_name(type), bits, want, code ? error.message : "ok");
    assert_int_equal(code, PROTO_OK);
    assert_int_equal(bits, want);
}

static void expect_overflow(const char *number, enum dtype type, const char *limit)
{
    struct proto_error error;
    uint32_t bits;
    assert_int_equal(read_number(number, type, &bits, &error), PROTO_BAD_TENSOR);
    assert_non_null(strstr(error.message, limit));
    assert_non_null(strstr(error.message, "data[0]"));
}

/* The neighbours of a middle: exactly on it, and a hair to either side, by digits far behind those that fit a word. */
static void expect_middle(const char *middle, enum dtype type, uint32_t below, uint32_t above)
{
    char text[1024];
    size_t n = strlen(middle);
    assert_in_range(n, 1, 900);
    expect_bits(middle, type, below & 1 ? above : below);
    snprintf(text, sizeof text, "%s%s00000000000000000000000000000000000000001", middle, strchr(middle, '.') ? "" : ".");
    expect_bits(text, type, above);
    /* A last digit that is not 0 goes down by one, and nines follow. */
    memcpy(text, middle, n + 1);
    if (text[n - 1] == '0')
        return;
    text[n - 1]--;
    snprintf(text + n, sizeof text - n, "%s99999999999999999999999999999999999999", strchr(middle, '.') ? "" : ".");
    expect_bits(text, type, below);
}

static void middles_fp32(void **state)
{
    char text[512];
    for (int i = 0; i < 20000; i++) {
        uint32_t bits = (uint32_t)random_next() & 0x7fffffffu;
        if (i < 600)
            bits = i % 2 ? (uint32_t)i / 2 : (uint32_t)i / 2 << 23; /* the smallest ones and powers of two */
        if (bits >= 0x7f7fffffu)
            continue;
        /* The middle of two floats is a double, and "%f" writes doubles exactly. */
        double middle = ((double)dtype_f32_from_bits(bits) + (double)dtype_f32_from_bits(bits + 1)) / 2;
        int n = snprintf(text, sizeof text, "%.160f", middle);
        while (text[n - 1] == '0')
            text[--n] = 0;
        if (text[n - 1] == '.')
            text[n - 1] = 0;
        expect_middle(text, DTYPE_FP32, bits, bits + 1);
    }
}

static void middles_half(void **state)
{
    char text[512];
    for (int t = 0; t < 2; t++) {
        enum dtype type = t ? DTYPE_FP16 : DTYPE_BF16;
        uint32_t infinity = t ? 0x7c00 : 0x7f80;
        for (uint32_t bits = 0; bits + 1 < infinity; bits += t ? 3 : 2) {
            double middle = t ? ((double)dtype_fp16_to_f32((uint16_t)bits) + (double)dtype_fp16_to_f32((uint16_t)(bits + 1))) / 2
                              : ((double)dtype_bf16_to_f32((uint16_t)bits) + (double)dtype_bf16_to_f32((uint16_t)(bits + 1))) / 2;
            int n = snprintf(text, sizeof text, "%.150f", middle);
            while (text[n - 1] == '0')
                text[--n] = 0;
            if (text[n - 1] == '.')
                text[n - 1] = 0;
            expect_middle(text, type, bits, bits + 1);
        }
    }
}

/* Rounding to float32 first would give the other neighbour. */
static void no_double_rounding(void **state)
{
    /* 1 + 2^-11 is the middle of two FP16 values; 1 + 2^-11 + 2^-30 rounds to it in float32. */
    expect_bits("1.000488282181322574615478515625", DTYPE_FP16, 0x3c01);
    expect_bits("1.00048828125", DTYPE_FP16, 0x3c00);
    expect_bits("1.000488280318677425384521484375", DTYPE_FP16, 0x3c00);
    /* The same for BF16 at 1 + 2^-8. */
    expect_bits("1.003906250931322574615478515625", DTYPE_BF16, 0x3f81);
    expect_bits("1.00390625", DTYPE_BF16, 0x3f80);
    expect_bits("1.01171874906867742538452148437500", DTYPE_BF16, 0x3f81);
    expect_bits("1.01171875", DTYPE_BF16, 0x3f82);
}

static void limits(void **state)
{
    expect_bits("65504", DTYPE_FP16, 0x7bff);
    expect_bits("-65519.99", DTYPE_FP16, 0xfbff);
    expect_bits("65519.999999999999999999999999999999999999", DTYPE_FP16, 0x7bff);
    expect_overflow("65520", DTYPE_FP16, "65504");
    expect_overflow("-65520.00000000000000000001", DTYPE_FP16, "65504");
    expect_bits("3.4028235e38", DTYPE_FP32, 0x7f7fffff);
    expect_bits("340282356779733661637539395458142568447", DTYPE_FP32, 0x7f7fffff);
    expect_overflow("340282356779733661637539395458142568448", DTYPE_FP32, "3.4028235e38");
    expect_overflow("1e39", DTYPE_FP32, "1e39");
    expect_overflow("-1e999999999999999999999", DTYPE_FP32, "3.4028235e38");
    expect_bits("3.3895314e38", DTYPE_BF16, 0x7f7f);
    expect_overflow("3.4e38", DTYPE_BF16, "3.3895314e38");
    expect_bits("1e-45", DTYPE_FP32, 1);
    expect_bits("0.7006492321624085e-45", DTYPE_FP32, 0);
    expect_bits("0.7006492321624086e-45", DTYPE_FP32, 1);
    expect_bits("1e-46", DTYPE_FP32, 0);
    expect_bits("-1e-999999999999999999999", DTYPE_FP32, 0x80000000u);
    expect_bits("2.9802322387695312e-8", DTYPE_FP16, 0);
    expect_bits("2.9802322387695313e-8", DTYPE_FP16, 1);
    expect_bits("0", DTYPE_FP32, 0);
    expect_bits("-0", DTYPE_FP16, 0x8000);
    expect_bits("-0.0e5", DTYPE_BF16, 0x8000);
    /* Many zeros, on both sides of what they cancel. */
    expect_bits("0.00000000000000000000000000000000000000000000000000000000000000000001e68", DTYPE_FP32, 0x3f800000);
    expect_bits("100000000000000000000000000000000000000000000000000000000000000000000e-68", DTYPE_FP32, 0x3f800000);
    expect_bits("0e999", DTYPE_FP32, 0);
}

static void against_strtof(void **state)
{
    char text[96];
    float got;
    for (int i = 0; i < 600000; i++) {
        int digits = 1 + (int)(random_next() % 24), n = 0, point = (int)(random_next() % (unsigned)(digits + 1));
        if (random_next() & 1)
            text[n++] = '-';
        for (int d = 0; d < digits; d++) {
            if (d && d == point)
                text[n++] = '.';
            text[n++] = (char)('0' + random_next() % 10);
            if (d == 0 && text[n - 1] == '0' && point != 1)
                text[n - 1] = '7';
        }
        if (random_next() & 1)
            n += snprintf(text + n, sizeof text - (size_t)n, "e%d", (int)(random_next() % 110) - 60);
        text[n] = 0;
        float want = strtof(text, NULL);
        size_t used = proto_scan_float(text, (size_t)n, &got);
        if (used != (size_t)n || memcmp(&got, &want, 4))
            print_error("%s: %a, not %a (%zu of %d bytes)\n", text, (double)got, (double)want, used, n);
        assert_int_equal(used, n);
        assert_memory_equal(&got, &want, 4);
    }
}

static void not_numbers(void **state)
{
    static const char *const texts[] = {"",   "-",   "+1",  ".5", "1.",  "1.e5", "01",  "-01",       "00",
                                        "1e", "1e+", "1e-", "e5", "--1", "0x",   "NaN", "-Infinity", " 1"};
    static const char *const taken[] = {"0x10", "1 ", "1.5.2", "1e5e", "0-", "12,"};
    static const size_t used[] = {1, 1, 3, 3, 1, 2};
    float v;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        if (!strcmp(texts[i], "0x"))
            continue;
        if (proto_scan_float(texts[i], strlen(texts[i]), &v))
            print_error("'%s' was taken\n", texts[i]);
        assert_int_equal(proto_scan_float(texts[i], strlen(texts[i]), &v), 0);
    }
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++)
        assert_int_equal(proto_scan_float(taken[i], strlen(taken[i]), &v), used[i]);
    /* The length ends a number, whatever stands behind it. */
    assert_int_equal(proto_scan_float("12345678901234", 2, &v), 2);
    assert_true(v == 12.0f);
}

/* ---- writing ---- */

static bool is_json_real(const char *text, size_t length)
{
    float v;
    return length <= 24 && proto_scan_float(text, length, &v) == length && (memchr(text, '.', length) || memchr(text, 'e', length));
}

static size_t significant(const char *text, size_t length)
{
    char digits[32];
    size_t n = 0;
    for (size_t i = 0; i < length && text[i] != 'e'; i++)
        if (text[i] >= '0' && text[i] <= '9' && (n || text[i] != '0'))
            digits[n++] = text[i];
    while (n && digits[n - 1] == '0')
        n--;
    return n;
}

static void half_round_trip(void **state)
{
    struct proto_error error;
    for (int t = 0; t < 2; t++) {
        enum dtype type = t ? DTYPE_FP16 : DTYPE_BF16;
        for (uint32_t bits = 0; bits < 65536; bits++) {
            float v = t ? dtype_fp16_to_f32((uint16_t)bits) : dtype_bf16_to_f32((uint16_t)bits);
            if (!isfinite(v))
                continue;
            char text[32], shorter[40];
            memset(text, '#', sizeof text);
            size_t n = proto_write_float(text, v, type);
            for (size_t i = n; i < sizeof text; i++)
                assert_int_equal(text[i], '#');
            assert_true(is_json_real(text, n));
            text[n] = 0;
            expect_bits(text, type, bits);
            /* No number with a digit less, rounded either way, reads back. */
            int digits = (int)significant(text, n);
            if (digits < 2)
                continue;
            uint32_t other;
            snprintf(shorter, sizeof shorter, "%.*e", digits - 2, (double)v);
            for (int up = 0; up < 3; up++) {
                char *e = strchr(shorter, 'e');
                char *last = e - 1;
                if (up && (*last == (up == 1 ? '9' : '0')))
                    continue;
                *last = (char)(*last + (up == 1 ? 1 : up == 2 ? -1 : 0));
                if (!read_number(shorter, type, &other, &error) && other == bits)
                    fail_msg("%s of %s reads back as well as %s", shorter, dtype_name(type), text);
                snprintf(shorter, sizeof shorter, "%.*e", digits - 2, (double)v);
            }
        }
    }
}

static void write_fp32(uint32_t bits)
{
    char text[32], shorter[40];
    float v = dtype_f32_from_bits(bits), back;
    size_t n = proto_write_float(text, v, DTYPE_FP32);
    text[n] = 0;
    assert_true(is_json_real(text, n));
    back = strtof(text, NULL);
    if (memcmp(&back, &v, 4))
        print_error("%08x: %s reads back as %a\n", bits, text, (double)back);
    assert_memory_equal(&back, &v, 4);
    /* "%.*e" is the nearest with so many digits: if even that doesn't read back, one in the same binade hardly does, and where the
     * gap is wide on one side its upper neighbour is tried too. */
    int digits = (int)significant(text, n);
    if (digits < 2)
        return;
    snprintf(shorter, sizeof shorter, "%.*e", digits - 2, (double)v);
    back = strtof(shorter, NULL);
    if (!memcmp(&back, &v, 4))
        fail_msg("%08x: %s is longer than %s", bits, text, shorter);
}

static void fp32_round_trip(void **state)
{
    static const uint32_t hard[] = {0,          0x80000000u, 1,           2,          0x7fffff,   0x800000,
                                    0x800001,   0x7f7fffff,  0xff7fffffu, 0x3f800000, 0x3f7fffff, 0x3dcccccd,
                                    0x4b800000, 0x4b7fffff,  0x5a000000,  0x00000009, 0x7e967699, 0x4c23d70a};
    for (size_t i = 0; i < sizeof hard / sizeof *hard; i++)
        write_fp32(hard[i]);
    /* Every power of two and its neighbours: there the gap is wider above than below. */
    for (uint32_t e = 0; e < 255; e++)
        for (uint32_t d = 0; d < 8; d++)
            if (e || d >= 4)
                write_fp32((e << 23) + d - 4);
    for (int i = 0; i < 300000; i++) {
        uint32_t bits = (uint32_t)random_next();
        if ((bits & 0x7f800000u) != 0x7f800000u)
            write_fp32(bits);
    }
}

static void written_forms(void **state)
{
    static const struct {
        float v;
        enum dtype type;
        const char *text;
    } cases[] = {
        {0.0f, DTYPE_FP32, "0.0"},
        {-0.0f, DTYPE_FP32, "-0.0"},
        {-0.0f, DTYPE_BF16, "-0.0"},
        {1.0f, DTYPE_FP32, "1.0"},
        {-12.0f, DTYPE_FP16, "-12.0"},
        {0.1f, DTYPE_FP32, "0.1"},
        {0.1f, DTYPE_BF16, "0.1"},
        {0.1f, DTYPE_FP16, "0.1"},
        {0.333251953125f, DTYPE_FP16, "0.3333"},
        {123456.0f, DTYPE_FP32, "123456.0"},
        {16777216.0f, DTYPE_FP32, "16777216.0"},
        {1e9f, DTYPE_FP32, "1000000000.0"},
        {1e10f, DTYPE_FP32, "1e10"},
        {3.4028235e38f, DTYPE_FP32, "3.4028235e38"},
        {-1e-45f, DTYPE_FP32, "-1e-45"},
        {0.0001f, DTYPE_FP32, "0.0001"},
        {0.00012345678f, DTYPE_FP32, "0.00012345678"},
        {0.00001f, DTYPE_FP32, "1e-5"},
        {1.25e-7f, DTYPE_FP32, "1.25e-7"},
        {65504.0f, DTYPE_FP16, "65500.0"},
        {1.5f, DTYPE_FP32, "1.5"},
        {1234.5678f, DTYPE_FP32, "1234.5677"},
        {0.012345679f, DTYPE_FP32, "0.012345679"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[25];
        size_t n = proto_write_float(text, cases[i].v, cases[i].type);
        text[n] = 0;
        assert_string_equal(text, cases[i].text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(middles_fp32),  cmocka_unit_test(middles_half),    cmocka_unit_test(no_double_rounding),
        cmocka_unit_test(limits),        cmocka_unit_test(against_strtof),  cmocka_unit_test(not_numbers),
        cmocka_unit_test(written_forms), cmocka_unit_test(half_round_trip), cmocka_unit_test(fp32_round_trip),
    };
    return cmocka_run_group_tests_name("proto_decimal", tests, NULL, NULL);
}
