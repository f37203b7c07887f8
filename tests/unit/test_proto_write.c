/* SPDX-License-Identifier: Apache-2.0
 *
 * What goes out: answers, adapter objects, errors; and the small bodies that come in.
 */
#include "proto-json/proto.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

static json_t *read_back(const char *text, size_t length)
{
    json_error_t why;
    json_t *tree = json_loadb(text, length, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &why);
    if (!tree)
        print_error("%.*s\n  %s\n", (int)length, text, why.text);
    assert_non_null(tree);
    return tree;
}

static void answer_json(void **state)
{
    /* At an odd address, as behind a JSON head. */
    char bytes[1 + 6 * 4];
    const float v[] = {1, -0.0f, 0.1f, 1e-45f, -3.4028235e38f, 16777217};
    memcpy(bytes + 1, v, sizeof v);
    struct proto_answer answer = {.model_name = "mo\"del",
                                  .id = "7\n",
                                  .path = "decode",
                                  .layer = 3,
                                  .rows = 2,
                                  .hidden_size = 3,
                                  .queue_us = 12,
                                  .compute_us = 345,
                                  .dtype = DTYPE_FP32,
                                  .data = bytes + 1};
    char *json;
    size_t length;
    struct proto_error error;
    assert_int_equal(proto_answer_write(&answer, &json, &length, &error), PROTO_OK);
    assert_string_equal(
        json, "{\"model_name\":\"mo\\\"del\",\"model_version\":\"1\",\"id\":\"7\\n\",\"parameters\":{\"path\":\"decode\",\"layer\":3,"
              "\"rows\":2,\"queue_us\":12,\"compute_us\":345},\"outputs\":[{\"name\":\"hidden\",\"datatype\":\"FP32\",\"shape\":[2,3],"
              "\"data\":[1.0,-0.0,0.1,1e-45,-3.4028235e38,16777216.0]}]}");
    assert_int_equal(length, strlen(json));
    free(json);

    answer.binary = true;
    answer.id = NULL;
    assert_int_equal(proto_answer_write(&answer, &json, &length, &error), PROTO_OK);
    assert_string_equal(
        json, "{\"model_name\":\"mo\\\"del\",\"model_version\":\"1\",\"parameters\":{\"path\":\"decode\",\"layer\":3,"
              "\"rows\":2,\"queue_us\":12,\"compute_us\":345},\"outputs\":[{\"name\":\"hidden\",\"datatype\":\"FP32\",\"shape\":[2,3],"
              "\"parameters\":{\"binary_data_size\":24}}]}");
    free(json);

    answer.binary = false;
    answer.rows = 0;
    assert_int_equal(proto_answer_write(&answer, &json, &length, &error), PROTO_OK);
    assert_non_null(strstr(json, "\"shape\":[0,3],\"data\":[]}]}"));
    free(json);
}

static void answer_halves(void **state)
{
    const uint16_t v[] = {0x3c00, 0x8000, 0x7bff, 0x0001};
    struct proto_answer answer = {.model_name = "m", .path = "prefill", .rows = 1, .hidden_size = 4, .dtype = DTYPE_FP16, .data = v};
    char *json;
    size_t length;
    struct proto_error error;
    assert_int_equal(proto_answer_write(&answer, &json, &length, &error), PROTO_OK);
    assert_non_null(strstr(json, "\"datatype\":\"FP16\",\"shape\":[1,4],\"data\":[1.0,-0.0,65500.0,6e-8]"));
    free(json);
    answer.dtype = DTYPE_BF16;
    assert_int_equal(proto_answer_write(&answer, &json, &length, &error), PROTO_OK);
    assert_non_null(strstr(json, "\"datatype\":\"BF16\",\"shape\":[1,4],\"data\":[0.0078,-0.0,"));
    free(json);
}

/* What is written reads back as the same bits, through the request's parser. */
static void answer_round_trip(void **state)
{
    enum { ROWS = 37, COLUMNS = 129 };
    for (enum dtype type = DTYPE_BF16; type <= DTYPE_FP32; type++) {
        size_t size = dtype_size(type), bytes = ROWS * COLUMNS * size;
        char *data = malloc(bytes), *json, head[128];
        assert_non_null(data);
        uint64_t x = 99;
        for (size_t i = 0; i < ROWS * COLUMNS; i++) {
            x = x * 6364136223846793005u + 1442695040888963407u;
            float v = ldexpf((float)(int32_t)(x >> 32), (int)(x >> 20 & 63) - 56);
            dtype_store_f32(data + i * size, type, type == DTYPE_FP16 ? fmodf(v, 60000) : v);
        }
        struct proto_answer answer = {
            .model_name = "m", .path = "decode", .rows = ROWS, .hidden_size = COLUMNS, .dtype = type, .data = data};
        size_t length;
        struct proto_error error;
        assert_int_equal(proto_answer_write(&answer, &json, &length, &error), PROTO_OK);
        json_decref(read_back(json, length));
        /* The output becomes an input. */
        int n = snprintf(head, sizeof head, "{\"inputs\":");
        char *outputs = strstr(json, "[{\"name\""), *text = malloc((size_t)n + strlen(outputs) + 1);
        assert_non_null(text);
        memcpy(text, head, (size_t)n);
        strcpy(text + n, outputs);
        struct proto_infer infer;
        assert_int_equal(proto_infer_parse(text, strlen(text), -1, NULL, &infer, &error), PROTO_OK);
        assert_int_equal(infer.input[0].bytes, bytes);
        assert_memory_equal(infer.input[0].data, data, bytes);
        proto_infer_finish(&infer);
        free(text);
        free(json);
        free(data);
    }
}

static void answer_not_finite(void **state)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    static const char *const said[] = {"row 1 has NaN in column 2", "row 1 has Infinity in column 2", "row 1 has -Infinity in column 2"};
    for (enum dtype type = DTYPE_BF16; type <= DTYPE_FP32; type++)
        for (int i = 0; i < 3; i++) {
            char data[9 * 4] = {0}, *json;
            size_t length;
            struct proto_error error;
            dtype_store_f32(data + 5 * dtype_size(type), type, bad[i]);
            dtype_store_f32(data + 6 * dtype_size(type), type, NAN);
            struct proto_answer answer = {.model_name = "m", .path = "decode", .rows = 3, .hidden_size = 3, .dtype = type, .data = data};
            assert_int_equal(proto_answer_write(&answer, &json, &length, &error), PROTO_NON_FINITE_OUTPUT);
            assert_non_null(strstr(error.message, said[i]));
            assert_null(json);
            answer.binary = true;
            assert_int_equal(proto_answer_write(&answer, &json, &length, &error), PROTO_OK);
            free(json);
        }
}

static void answer_too_large(void **state)
{
    char *json;
    size_t length;
    struct proto_error error;
    struct proto_answer answer = {.model_name = "m", .path = "decode", .rows = INT64_MAX, .hidden_size = 3, .dtype = DTYPE_FP32};
    assert_int_equal(proto_answer_write(&answer, &json, &length, &error), PROTO_OUT_OF_MEMORY);
    answer.rows = INT64_MAX / 8;
    answer.hidden_size = 2;
    assert_int_equal(proto_answer_write(&answer, &json, &length, &error), PROTO_OUT_OF_MEMORY);
    assert_null(json);
}

static void errors(void **state)
{
    size_t length;
    char *text = proto_error_json("no layer 'a\"b\\\x01\xff\xc3\xa9\xe2\x82'", "layer_not_found", "req-1", &length);
    assert_string_equal(
        text, "{\"error\":\"no layer 'a\\\"b\\\\\\u0001\xef\xbf\xbd\xc3\xa9\xef\xbf\xbd\xef\xbf\xbd'\",\"code\":\"layer_not_found\","
              "\"request_id\":\"req-1\"}");
    assert_int_equal(length, strlen(text));
    json_decref(read_back(text, length));
    free(text);
    text = proto_vllm_error_json("The lora adapter 'x' cannot be found.", "NotFoundError", 404, &length);
    assert_string_equal(text, "{\"error\":{\"message\":\"The lora adapter 'x' cannot be found.\",\"type\":\"NotFoundError\",\"param\":null,"
                              "\"code\":404}}");
    assert_int_equal(length, strlen(text));
    free(text);
    assert_string_equal(proto_code_name(PROTO_BAD_JSON), "bad_json");
    assert_string_equal(proto_code_name(PROTO_BAD_REQUEST), "bad_request");
    assert_string_equal(proto_code_name(PROTO_BAD_TENSOR), "bad_tensor");
    assert_string_equal(proto_code_name(PROTO_SHAPE_MISMATCH), "shape_mismatch");
    assert_string_equal(proto_code_name(PROTO_UNSUPPORTED_DATATYPE), "unsupported_datatype");
    assert_string_equal(proto_code_name(PROTO_NON_FINITE_OUTPUT), "non_finite_output");
    assert_string_equal(proto_code_name(PROTO_OUT_OF_MEMORY), "out_of_memory");
}

static void adapter_object(void **state)
{
    char *warnings[] = {"plain", "bad \xff byte"};
    const int32_t layers[] = {0, 5};
    struct proto_adapter adapter = {.name = "a/b",
                                    .state = "ready",
                                    .id = 123456,
                                    .rank = 16,
                                    .layers = layers,
                                    .layer_count = 2,
                                    .experts = 12,
                                    .gate = true,
                                    .down = true,
                                    .tensors = 48,
                                    .ignored = 3,
                                    .warnings = warnings,
                                    .warning_count = 2,
                                    .bytes = 1 << 20,
                                    .in_flight = 1,
                                    .rows_served = 99,
                                    .installed_at = 1767225599};
    size_t length;
    char *text = proto_dump(proto_adapter_json(&adapter), &length);
    assert_non_null(text);
    assert_int_equal(length, strlen(text));
    json_t *got = read_back(text, length);
    json_t *want = json_pack("{s:s,s:I,s:s,s:i,s:[i,i],s:i,s:[s,s],s:i,s:i,s:[s,s],s:i,s:i,s:i,s:s}", "name", "a/b", "id",
                             (json_int_t)123456, "state", "ready", "rank", 16, "layers", 0, 5, "experts", 12, "projections", "gate", "down",
                             "tensors", 48, "ignored", 3, "warnings", "plain", "bad \xef\xbf\xbd byte", "bytes", 1 << 20, "in_flight", 1,
                             "rows_served", 99, "installed_at", "2025-12-31T23:59:59Z");
    assert_non_null(want);
    assert_true(json_equal(got, want));
    json_decref(got);
    json_decref(want);
    free(text);
    assert_null(proto_dump(NULL, &length));
    assert_int_equal(length, 0);
}

static void refuse_install(const char *body, enum proto_code code, const char *sentence)
{
    struct proto_install install;
    struct proto_error error;
    assert_int_equal(proto_install_parse(body, strlen(body), &install, &error), code);
    if (!strstr(error.message, sentence))
        print_error("%s gave %s\n", body, error.message);
    assert_non_null(strstr(error.message, sentence));
    assert_null(install.name);
    assert_null(install.path);
    proto_install_finish(&install);
}

static void install(void **state)
{
    struct proto_install got;
    struct proto_error error;
    const char *body = "{\"name\":\"a\",\"path\":\"x/y\",\"replace\":true}";
    assert_int_equal(proto_install_parse(body, strlen(body), &got, &error), PROTO_OK);
    assert_string_equal(got.name, "a");
    assert_string_equal(got.path, "x/y");
    assert_true(got.replace);
    proto_install_finish(&got);
    body = "{\"path\":\"x\",\"name\":\"b\"}";
    assert_int_equal(proto_install_parse(body, strlen(body), &got, &error), PROTO_OK);
    assert_false(got.replace);
    proto_install_finish(&got);
    refuse_install("", PROTO_BAD_JSON, "empty");
    refuse_install("[]", PROTO_BAD_REQUEST, "must be a JSON object");
    refuse_install("{\"name\":\"a\"", PROTO_BAD_JSON, "byte 11");
    refuse_install("{\"path\":\"x\"}", PROTO_BAD_REQUEST, "'name' is missing");
    refuse_install("{\"name\":\"a\",\"path\":\"x\",\"foo\":1}", PROTO_BAD_REQUEST, "unknown field 'foo'; name, path and replace are taken");
    refuse_install("{\"Replace\":true,\"name\":\"a\",\"path\":\"x\"}", PROTO_BAD_REQUEST, "unknown field 'Replace'");
    refuse_install("{\"name\":\"a\"}", PROTO_BAD_REQUEST, "'path' is missing");
    refuse_install("{\"name\":\"\",\"path\":\"x\"}", PROTO_BAD_REQUEST, "'name' must be a string that is not empty");
    refuse_install("{\"name\":\"a\",\"path\":7}", PROTO_BAD_REQUEST, "'path' must be a string");
    refuse_install("{\"name\":\"a\",\"path\":\"x\",\"replace\":\"yes\"}", PROTO_BAD_REQUEST, "'replace' must be true or false");
    refuse_install("{\"name\":\"a\",\"name\":\"b\",\"path\":\"x\"}", PROTO_BAD_JSON, "duplicate");
    refuse_install("{\"name\":\"a\\u0000b\",\"path\":\"x\"}", PROTO_BAD_JSON, "u0000");
}

static void vllm_calls(void **state)
{
    struct proto_vllm_lora got;
    struct proto_error error;
    const char *body = "{\"lora_name\":\"a\",\"lora_path\":\"/p\",\"load_inplace\":true,\"base_model_name\":null}";
    assert_int_equal(proto_vllm_lora_parse(body, strlen(body), true, &got, &error), PROTO_OK);
    assert_string_equal(got.lora_name, "a");
    assert_string_equal(got.lora_path, "/p");
    assert_true(got.load_inplace);
    proto_vllm_lora_finish(&got);
    body = "{\"lora_name\":\"a\",\"lora_int_id\":3}";
    assert_int_equal(proto_vllm_lora_parse(body, strlen(body), false, &got, &error), PROTO_OK);
    assert_null(got.lora_path);
    assert_false(got.load_inplace);
    proto_vllm_lora_finish(&got);
    assert_int_equal(proto_vllm_lora_parse(body, strlen(body), true, &got, &error), PROTO_BAD_REQUEST);
    assert_string_equal(error.message, "'lora_path' is missing");
    assert_null(got.lora_name);
    body = "{\"lora_name\":\"a\",\"lora_path\":\"/p\",\"load_inplace\":1}";
    assert_int_equal(proto_vllm_lora_parse(body, strlen(body), true, &got, &error), PROTO_BAD_REQUEST);
    body = "{}";
    assert_int_equal(proto_vllm_lora_parse(body, strlen(body), false, &got, &error), PROTO_BAD_REQUEST);
    assert_string_equal(error.message, "'lora_name' is missing");
}

static void objects(void **state)
{
    json_t *tree;
    struct proto_error error;
    assert_int_equal(proto_object_parse("", 0, true, &tree, &error), PROTO_OK);
    assert_int_equal(json_object_size(tree), 0);
    json_decref(tree);
    assert_int_equal(proto_object_parse("", 0, false, &tree, &error), PROTO_BAD_JSON);
    assert_null(tree);
    /* A member called inputs or data is nothing special here. */
    const char *body = "{\"inputs\":[{\"data\":[1,{\"a\":2}]}]}";
    assert_int_equal(proto_object_parse(body, strlen(body), false, &tree, &error), PROTO_OK);
    assert_int_equal(json_array_size(json_object_get(json_array_get(json_object_get(tree, "inputs"), 0), "data")), 2);
    json_decref(tree);
    body = "\"text\"";
    assert_int_equal(proto_object_parse(body, strlen(body), false, &tree, &error), PROTO_BAD_JSON);
    body = "[{}]";
    assert_int_equal(proto_object_parse(body, strlen(body), true, &tree, &error), PROTO_BAD_REQUEST);
    assert_null(tree);
    char deep[256];
    for (int levels = 64; levels <= 65; levels++) {
        size_t n = (size_t)sprintf(deep, "{\"a\":");
        memset(deep + n, '[', (size_t)levels - 1);
        memset(deep + n + levels - 1, ']', (size_t)levels - 1);
        n += 2 * (size_t)levels - 2;
        deep[n++] = '}';
        assert_int_equal(proto_object_parse(deep, n, false, &tree, &error), levels == 64 ? PROTO_OK : PROTO_BAD_JSON);
        json_decref(tree);
    }
    /* Nobody need ask why. */
    assert_int_equal(proto_object_parse("{", 1, false, &tree, NULL), PROTO_BAD_JSON);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answer_json),       cmocka_unit_test(answer_halves),    cmocka_unit_test(answer_round_trip),
        cmocka_unit_test(answer_not_finite), cmocka_unit_test(answer_too_large), cmocka_unit_test(errors),
        cmocka_unit_test(adapter_object),    cmocka_unit_test(install),          cmocka_unit_test(vllm_calls),
        cmocka_unit_test(objects),
    };
    return cmocka_run_group_tests_name("proto_write", tests, NULL, NULL);
}
