/* SPDX-License-Identifier: Apache-2.0
 *
 * Keys of rank_pattern and alpha_pattern: what they match, which wins, and that no key can hold the server up.
 */
#include "engine/pattern.h"

#include <stdarg.h>
#include <setjmp.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define MODULE "model.layers.3.mlp.experts.12.up_proj"

static double match(struct pattern_set *set, const char *module)
{
    struct engine_error error;
    double value = -1;
    assert_int_equal(pattern_set_match(set, module, &value, &error), ENGINE_OK);
    return value;
}

/* The value of the first of up to three keys, 1, 2, 3, that matches; -1 when none does. */
static double first_of(const char *module, const char *a, const char *b, const char *c)
{
    struct pattern_set *set = pattern_set_create("rank_pattern");
    assert_non_null(set);
    const char *const keys[] = {a, b, c};
    struct engine_error error;
    for (int i = 0; i < 3 && keys[i]; i++)
        assert_int_equal(pattern_set_add(set, keys[i], i + 1, &error), ENGINE_OK);
    double value = match(set, module);
    pattern_set_destroy(set);
    return value;
}

static void plain_keys(void **state)
{
    (void)state;
    assert_true(first_of(MODULE, "up_proj", NULL, NULL) == 1);
    assert_true(first_of(MODULE, MODULE, NULL, NULL) == 1);
    assert_true(first_of(MODULE, "experts.12.up_proj", NULL, NULL) == 1);
    assert_true(first_of(MODULE, "2.up_proj", NULL, NULL) == -1); /* a suffix, but not after a dot */
    assert_true(first_of(MODULE, "p_proj", NULL, NULL) == -1);
    assert_true(first_of(MODULE, "up", NULL, NULL) == -1);
    assert_true(first_of(MODULE, "experts", NULL, NULL) == -1);
    assert_true(first_of(MODULE, "", NULL, NULL) == -1);
    assert_true(first_of("up_proj", "up_proj", NULL, NULL) == 1);
}

static void first_in_file_order_wins(void **state)
{
    (void)state;
    assert_true(first_of(MODULE, "up_proj", "12.up_proj", NULL) == 1);
    assert_true(first_of(MODULE, "12.up_proj", "up_proj", NULL) == 1);
    assert_true(first_of(MODULE, "down_proj", "up_proj", "12.up_proj") == 2);
    assert_true(first_of(MODULE, "down_proj", ".*up_proj", "up_proj") == 2);
    assert_true(first_of(MODULE, "up_proj", ".*", NULL) == 1);
    assert_true(first_of(MODULE, ".*_proj", "up_proj", NULL) == 1);
}

static void regular_expressions(void **state)
{
    (void)state;
    assert_true(first_of(MODULE, "experts\\.1[0-9]\\.up_proj", NULL, NULL) == 1);
    assert_true(first_of(MODULE, "experts\\.2[0-9]\\.up_proj", NULL, NULL) == -1);
    assert_true(first_of(MODULE, "gate_proj|up_proj", NULL, NULL) == 1);
    assert_true(first_of(MODULE, "^model\\.layers\\.3\\..*", NULL, NULL) == 1);
    assert_true(first_of(MODULE, "^layers\\.3\\..*", NULL, NULL) == -1);
    assert_true(first_of(MODULE, "layers\\.3", NULL, NULL) == -1); /* must reach the end */
    assert_true(first_of(MODULE, "p_pro.", NULL, NULL) == -1); /* and begin after a dot */
    assert_true(first_of("model.layers.3.mlp.experts.7.w1", "(?P<n>w[13])", NULL, NULL) == 1);
}

static void many_plain_keys(void **state)
{
    (void)state;
    struct pattern_set *set = pattern_set_create("rank_pattern");
    struct engine_error error;
    char key[64];
    for (int i = 0; i < 20000; i++) {
        snprintf(key, sizeof key, "layers.%d.mlp.experts.%d.up_proj", i / 128, i % 128);
        assert_int_equal(pattern_set_add(set, key, i, &error), ENGINE_OK);
    }
    for (int i = 0; i < 20000; i += 7) {
        snprintf(key, sizeof key, "model.layers.%d.mlp.experts.%d.up_proj", i / 128, i % 128);
        assert_true(match(set, key) == i);
    }
    assert_true(match(set, "model.layers.500.mlp.experts.0.up_proj") == -1);
    pattern_set_destroy(set);
}

static void refused(const char *key, const char *message)
{
    struct pattern_set *set = pattern_set_create("alpha_pattern");
    struct engine_error error = {0};
    assert_int_equal(pattern_set_add(set, key, 1, &error), ENGINE_BAD_ADAPTER);
    assert_non_null(strstr(error.message, message));
    pattern_set_destroy(set);
}

static void broken_expressions(void **state)
{
    (void)state;
    refused("(up_proj", "alpha_pattern key \"(up_proj\" is not a valid regular expression");
    refused("*", "not a valid regular expression");
    refused("[a", "not a valid regular expression");
    refused("\\Cx", "not a valid regular expression");
    refused("((((x{1,999}){1,999}){1,999}){1,999})", "not a valid regular expression");
    char nested[256] = "";
    memset(nested, '(', 100);
    nested[100] = 'x';
    memset(nested + 101, ')', 100);
    refused(nested, "not a valid regular expression");
    static char large[PATTERN_MAX_KEY + 2];
    memset(large, '?', sizeof large - 1);
    refused(large, "a regular expression of 1025 bytes; at most 1024");

    struct pattern_set *set = pattern_set_create("alpha_pattern");
    struct engine_error error;
    for (int i = 0; i < PATTERN_MAX_REGEX; i++)
        assert_int_equal(pattern_set_add(set, "x+", 1, &error), ENGINE_OK);
    assert_int_equal(pattern_set_add(set, "x+", 1, &error), ENGINE_BAD_ADAPTER);
    assert_string_equal(error.message, "alpha_pattern has more than 256 keys that are regular expressions");
    pattern_set_destroy(set);
}

/* Each would run for longer than anybody waits. */
static void catastrophic_expressions_are_cut_off(void **state)
{
    (void)state;
    static const char *const keys[] = {"(a+)+[bc]", "(a|aa)+[bc]", "(.*)*(.*)*(.*)*[bc]", "(a?){60}a{60}[bc]", "(((a*)*)*)*[bc]"};
    char module[301];
    memset(module, 'a', 300);
    module[300] = 0;
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        struct pattern_set *set = pattern_set_create("rank_pattern");
        struct engine_error error;
        double value;
        assert_int_equal(pattern_set_add(set, keys[i], 4, &error), ENGINE_OK);
        clock_t start = clock();
        assert_int_equal(pattern_set_match(set, module, &value, &error), ENGINE_BAD_ADAPTER);
        assert_true(clock() - start < 2 * CLOCKS_PER_SEC);
        assert_non_null(strstr(error.message, "takes too long to match against module \"aaa"));
        assert_non_null(strstr(error.message, keys[i]));
        pattern_set_destroy(set);
    }
}

/* Keys that are slow, but each time within bounds, use the set's budget up. */
static void slow_keys_run_out_of_budget(void **state)
{
    (void)state;
    struct pattern_set *set = pattern_set_create("rank_pattern");
    struct engine_error error;
    double value;
    assert_int_equal(pattern_set_add(set, "(a+)+[bc]", 4, &error), ENGINE_OK);
    enum engine_code code = ENGINE_OK;
    int calls = 0;
    clock_t start = clock();
    for (; code == ENGINE_OK && calls < 10000000; calls++)
        code = pattern_set_match(set, "aaaaaaaaaaaa", &value, &error);
    assert_int_equal(code, ENGINE_BAD_ADAPTER);
    assert_true(calls > 100);
    assert_true(clock() - start < 30 * CLOCKS_PER_SEC);
    pattern_set_destroy(set);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_keys),
        cmocka_unit_test(first_in_file_order_wins),
        cmocka_unit_test(regular_expressions),
        cmocka_unit_test(many_plain_keys),
        cmocka_unit_test(broken_expressions),
        cmocka_unit_test(catastrophic_expressions_are_cut_off),
        cmocka_unit_test(slow_keys_run_out_of_budget),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
