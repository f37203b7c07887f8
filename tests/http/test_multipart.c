/* SPDX-License-Identifier: Apache-2.0
 *
 * The reader of forms: bodies come out whole wherever the stream is cut, and nothing malformed passes for whole.
 */
#include "server/multipart.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

struct got {
    char text[4096]; /* "name=body;" for each part */
    size_t length;
    int stop_at; /* fail at this callback; 0: never */
    int calls;
};

static bool take(struct got *g, const char *data, size_t size)
{
    assert_true(g->length + size < sizeof g->text);
    memcpy(g->text + g->length, data, size);
    g->length += size;
    g->text[g->length] = '\0';
    return ++g->calls != g->stop_at;
}

static bool on_begin(void *arg, const char *name) { return take(arg, name, strlen(name)) && take(arg, "=", 1); }
static bool on_data(void *arg, const char *data, size_t size)
{
    assert_true(size > 0);
    return take(arg, data, size);
}
static bool on_end(void *arg) { return take(arg, ";", 1); }

static struct multipart *make(const char *type, struct got *g)
{
    bool memory;
    struct multipart *m = multipart_create(type, &(struct multipart_sink){on_begin, on_data, on_end, g}, &memory);
    assert_false(memory);
    return m;
}

#define TYPE "multipart/form-data; boundary=bnd"
#define PART(name, body) "--bnd\r\nContent-Disposition: form-data; name=\"" name "\"\r\n\r\n" body "\r\n"

/* Bodies that look like delimiters as long as they can. */
static const char tricky[] =
    PART("a", "\r\n--bn\r\n--bnX\r\r\n\r\n--b\r\n-") PART("b", "") PART("c", "\r\n--bn") PART("d", "\r") "--bnd--\r\n";
static const char tricky_out[] = "a=\r\n--bn\r\n--bnX\r\r\n\r\n--b\r\n-;b=;c=\r\n--bn;d=\r;";

static void test_cut_anywhere(void **state)
{
    (void)state;
    size_t size = sizeof tricky - 1;
    for (size_t first = 0; first <= size; first++)
        for (size_t step = 1; step <= 7; step += 3) {
            struct got g = {0};
            struct multipart *m = make(TYPE, &g);
            assert_true(multipart_feed(m, tricky, first));
            for (size_t at = first; at < size; at += step)
                assert_true(multipart_feed(m, tricky + at, size - at < step ? size - at : step));
            assert_true(multipart_complete(m));
            assert_string_equal(g.text, tricky_out);
            multipart_destroy(m);
        }
}

static void test_every_prefix_is_incomplete(void **state)
{
    (void)state;
    for (size_t size = 0; size < sizeof tricky - 1 - 2; size++) {
        struct got g = {0};
        struct multipart *m = make(TYPE, &g);
        assert_true(multipart_feed(m, tricky, size));
        assert_false(multipart_complete(m));
        multipart_destroy(m);
    }
}

static void test_stops_when_told(void **state)
{
    (void)state;
    for (int stop = 1; stop < 12; stop++) {
        struct got g = {.stop_at = stop};
        struct multipart *m = make(TYPE, &g);
        assert_false(multipart_feed(m, tricky, sizeof tricky - 1));
        assert_int_equal(g.calls, stop);
        assert_null(multipart_error(m));
        assert_false(multipart_feed(m, tricky, 1));
        assert_int_equal(g.calls, stop);
        assert_false(multipart_complete(m));
        multipart_destroy(m);
    }
}

static void check_broken_as(const char *text, const char *why)
{
    struct got g = {0};
    struct multipart *m = make(TYPE, &g);
    assert_false(multipart_feed(m, text, strlen(text)));
    assert_non_null(multipart_error(m));
    assert_non_null(strstr(multipart_error(m), why));
    assert_false(multipart_complete(m));
    multipart_destroy(m);
}

static void check_broken(const char *text) { check_broken_as(text, ""); }

static void test_malformed(void **state)
{
    (void)state;
    check_broken("--bndx\r\n");
    check_broken("--bnd\n\n");
    check_broken("--bnd\r\n\r\nbody");
    check_broken("--bnd\r\nX: y\r\n\r\n");
    check_broken("--bnd\r\nContent-Disposition: attachment; name=\"a\"\r\n\r\n");
    check_broken("--bnd\r\nContent-Disposition: form-data\r\n\r\n");
    check_broken_as("--bnd\r\nContent-Disposition: form-data; name=\"\"\r\n\r\n", "a name of 1 to 64 bytes");
    check_broken("--bnd\r\nContent-Disposition: form-data; name=\"a\r\n\r\n");
    check_broken("--bnd\r\nContent-Disposition: form-data; name=a; name=b\r\n\r\n");
    check_broken("--bnd\r\nContent-Disposition: form-data; name=a\r\nContent-Disposition: form-data; name=b\r\n\r\n");
    check_broken("--bnd\r\nContent-Disposition: form-data; name=a\r\nContent-Transfer-Encoding: base64\r\n\r\n");
    char *longer = malloc(20000);
    assert_non_null(longer);
    strcpy(longer, "--bnd\r\nX: ");
    memset(longer + 10, 'y', 19000);
    longer[19010] = '\0';
    check_broken_as(longer, "more than 4096 bytes of headers");
    free(longer);
}

static void test_types(void **state)
{
    (void)state;
    static const char *const good[] = {TYPE, "multipart/form-data;boundary=bnd", "MULTIPART/Form-Data ; x=y; Boundary=\"bnd\"",
                                       "multipart/form-data; x=\"a;b\\\"=c\"; boundary=bnd"};
    static const char *const bad[] = {
        NULL,
        "",
        "multipart/form-data",
        "multipart/form-data; boundary",
        "multipart/form-data; boundary=",
        "multipart/form-data; boundary=\"bnd",
        "multipart/form-data; boundary=\"bnd \"",
        "multipart/form-data; boundary=b\x01",
        "multipart/form-data; boundary=a; boundary=b",
        "multipart/form-databoundary=bnd",
        "multipart/mixed; boundary=bnd",
        "multipart/form-data; boundary=0123456789012345678901234567890123456789012345678901234567890123456789x"};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        struct got g = {0};
        struct multipart *m = make(good[i], &g);
        assert_non_null(m);
        assert_true(multipart_feed(m, tricky, sizeof tricky - 1));
        assert_string_equal(g.text, tricky_out);
        multipart_destroy(m);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct got g = {0};
        assert_null(make(bad[i], &g));
    }
}

/* Any bytes: no crash, and complete only after the closing delimiter. */
static void test_noise(void **state)
{
    (void)state;
    static const char alphabet[] = "\r\n--bd;=\" Cnt:";
    uint32_t seed = 1;
    for (int round = 0; round < 3000; round++) {
        char text[200];
        size_t size = 0;
        while (size < sizeof text) {
            seed = seed * 1664525u + 1013904223u;
            uint32_t pick = seed >> 16;
            const char *piece = pick % 9 == 0 ? "\r\n--bnd" : pick % 9 == 1 ? "Content-Disposition: form-data; name=a" : NULL;
            size_t length = piece ? strlen(piece) : 1;
            if (size + length > sizeof text)
                break;
            memcpy(text + size, piece ? piece : &alphabet[pick % (sizeof alphabet - 1)], length);
            size += length;
        }
        struct got g = {0};
        struct multipart *m = make(TYPE, &g);
        bool good = multipart_feed(m, text, size);
        if (good && multipart_complete(m))
            assert_non_null(memmem(text, size, "--bnd", 5));
        multipart_destroy(m);
    }
    multipart_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cut_anywhere),    cmocka_unit_test(test_every_prefix_is_incomplete),
        cmocka_unit_test(test_stops_when_told), cmocka_unit_test(test_malformed),
        cmocka_unit_test(test_types),           cmocka_unit_test(test_noise),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
