/* SPDX-License-Identifier: Apache-2.0
 *
 * The infer request: what is taken, and the sentence for each thing that is not.
 */
#include "proto-json/proto.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

/* Parses from a copy of exactly that size, so that a sanitizer sees a read past the end. */
static enum proto_code parse_bytes(const void *bytes, size_t length, int64_t json_length, struct proto_infer *out,
                                   struct proto_error *error, void **copy)
{
    *copy = malloc(length ? length : 1);
    assert_non_null(*copy);
    memcpy(*copy, bytes, length);
    memset(error, 0, sizeof *error);
    return proto_infer_parse(*copy, length, json_length, out, error);
}

static void refuse_bytes(const void *bytes, size_t length, int64_t json_length, enum proto_code code, const char *sentence)
{
    struct proto_infer infer;
    struct proto_error error;
    void *copy;
    enum proto_code got = parse_bytes(bytes, length, json_length, &infer, &error, &copy);
    if (got != code || !strstr(error.message, sentence))
        print_error("%.*s\n  gave %s: %s\n", (int)(length < 200 ? length : 200), (const char *)bytes, proto_code_name(got), error.message);
    assert_int_equal(got, code);
    assert_int_equal(error.code, code);
    assert_non_null(strstr(error.message, sentence));
    assert_int_equal(infer.inputs, 0);
    proto_infer_finish(&infer);
    free(copy);
}

static void refuse(const char *text, enum proto_code code, const char *sentence) { refuse_bytes(text, strlen(text), -1, code, sentence); }

#define WHOLE                                                                                                                              \
    "{\"id\":\"a\\u0062c\",\"parameters\":{\"layer\":3,\"mode\":\"prefill\",\"adapter\":\"x/"                                              \
    "y\",\"binary_data_output\":true,\"other\":[1]},"                                                                                      \
    "\"inputs\":[{\"name\":\"hidden\",\"datatype\":\"FP32\",\"shape\":[1,4],\"data\":[0.1,-2,3e2,4.5E-1]},"                                \
    "{\"data\": [ [3 , 1] ] ,\"name\":\"expert_ids\",\"datatype\":\"INT32\",\"shape\":[1,2]},"                                             \
    "{\"name\":\"adapter\",\"datatype\":\"BYTES\",\"shape\":[2],\"data\":[\"a\\n\\u00e9\\ud83d\\ude00\",\"\"]}],\"unknown\":{\"a\":[{}]}}"

static void whole_request(void **state)
{
    struct proto_infer infer;
    struct proto_error error;
    void *copy;
    assert_int_equal(parse_bytes(WHOLE, strlen(WHOLE), -1, &infer, &error, &copy), PROTO_OK);
    assert_string_equal(infer.id, "abc");
    assert_true(infer.has_layer);
    assert_int_equal(infer.layer, 3);
    assert_int_equal(infer.mode, PROTO_PREFILL);
    assert_string_equal(infer.adapter, "x/y");
    assert_true(infer.binary_output);
    assert_int_equal(infer.inputs, 3);
    const struct proto_tensor *t = proto_infer_find(&infer, "hidden");
    assert_non_null(t);
    assert_int_equal(t->rank, 2);
    assert_int_equal(t->elements, 4);
    assert_memory_equal(t->data, ((float[]){0.1f, -2.0f, 300.0f, 0.45f}), 16);
    t = proto_infer_find(&infer, "expert_ids");
    assert_memory_equal(t->data, ((int32_t[]){3, 1}), 8);
    t = proto_infer_find(&infer, "adapter");
    size_t cursor = 0, length;
    const char *data;
    assert_true(proto_bytes_next(t, &cursor, &data, &length));
    assert_int_equal(length, 8);
    assert_memory_equal(data, "a\n\xc3\xa9\xf0\x9f\x98\x80", 8);
    assert_true(proto_bytes_next(t, &cursor, &data, &length));
    assert_int_equal(length, 0);
    assert_false(proto_bytes_next(t, &cursor, &data, &length));
    assert_null(proto_infer_find(&infer, "none"));
    proto_infer_finish(&infer);
    free(copy);
}

static void not_json(void **state)
{
    refuse("", PROTO_BAD_JSON, "empty");
    refuse("{", PROTO_BAD_JSON, "byte 1");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whole_request),
        cmocka_unit_test(not_json),
    };
    return cmocka_run_group_tests_name("proto_infer", tests, NULL, NULL);
}
