/* SPDX-License-Identifier: Apache-2.0
 *
 * Request targets and the route table.
 */
#include "server/route.h"
#include "server/target.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void check_split(const char *uri, const char *joined, const char *query)
{
    char text[256], out[256] = "", *segment[4];
    const char *q;
    size_t n;
    bool many;
    strcpy(text, uri);
    bool good = target_split(text, segment, 4, &n, &q, &many);
    if (!joined) {
        assert_false(good);
        return;
    }
    assert_true(good);
    for (size_t i = 0; i < n; i++) {
        strcat(out, "|");
        strcat(out, segment[i]);
    }
    assert_string_equal(out, joined);
    if (query)
        assert_string_equal(q, query);
    else
        assert_null(q);
}

static void test_split(void **state)
{
    (void)state;
    check_split("/", "|", NULL);
    check_split("/a/b", "|a|b", NULL);
    check_split("/a/b/", "|a|b|", NULL);
    check_split("//a", "||a", NULL);
    check_split("/a%2Fb/c%2fd", "|a/b|c/d", NULL);
    check_split("/a?b/c?d", "|a", "b/c?d");
    check_split("/a?", "|a", "");
    check_split("/%41+", "|A+", NULL);
    check_split("http://host/a?b", "|a", "b");
    check_split("HTTPS://host", "", NULL);
    check_split("", NULL, NULL);
    check_split("*", NULL, NULL);
    check_split("a/b", NULL, NULL);
    check_split("/%", NULL, NULL);
    check_split("/%4", NULL, NULL);
    check_split("/%4g", NULL, NULL);
    check_split("/%00", NULL, NULL);
    check_split("/a%0ab", NULL, NULL);
    check_split("/a/b/c/d/e", NULL, NULL);
}

static void check_query(const char *query, const char *name, const char *want)
{
    char *got = target_query(query, name);
    if (want)
        assert_string_equal(got, want);
    else
        assert_null(got);
    free(got);
}

static void test_query(void **state)
{
    (void)state;
    check_query("wait=5", "wait", "5");
    check_query("a=1&wait=5&wait=6", "wait", "5");
    check_query("waits=5", "wait", NULL);
    check_query("awaits=5&wait", "wait", NULL);
    check_query("wait=", "wait", "");
    check_query("wait=%35%", "wait", "");
    check_query("wait=a%26b&c", "wait", "a&b");
    check_query("", "wait", NULL);
    check_query(NULL, "wait", NULL);
}

static void test_routes(void **state)
{
    (void)state;
    char *adapters[] = {"adapters", "a/b"}, *stats[] = {"v2", "models", "stats"}, *model[] = {"v2", "models", "x"},
         *none[] = {"adapters", ""};
    assert_string_equal(route_find(adapters, 2)->pattern, "/adapters/{}");
    assert_string_equal(route_find(adapters, 1)->pattern, "/adapters");
    assert_string_equal(route_find(stats, 3)->pattern, "/v2/models/stats");
    assert_string_equal(route_find(model, 3)->pattern, "/v2/models/{}");
    assert_null(route_find(none, 2));
    assert_null(route_find(none, 0));
    assert_null(route_find(stats, 2));
    char allow[32] = "";
    assert_non_null(route_find_method(route_find(adapters, 2), "PUT", allow));
    assert_ptr_equal(route_find_method(route_find(adapters, 2), "HEAD", allow), route_find_method(route_find(adapters, 2), "GET", allow));
    assert_null(route_find_method(route_find(adapters, 2), "POST", allow));
    assert_string_equal(allow, "GET, HEAD, PUT, DELETE");
    for (size_t i = 0; i < route_count; i++) { /* every list of methods fits what a request keeps */
        assert_null(route_find_method(&route_table[i], "NONE", allow));
        assert_true(strlen(allow) < sizeof allow - 1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_split), cmocka_unit_test(test_query), cmocka_unit_test(test_routes)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
