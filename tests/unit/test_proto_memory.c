/* SPDX-License-Identifier: Apache-2.0
 *
 * Every allocation of every call fails once: the call says so, and leaves nothing behind. The linker puts the functions below in
 * place of malloc, calloc, realloc, strdup and free (meson.build); jansson is told to use them.
 */
#include "proto-json/proto.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

void *__real_malloc(size_t size);
void *__real_realloc(void *old, size_t size);
void __real_free(void *memory);
void *__wrap_malloc(size_t size);
void *__wrap_realloc(void *old, size_t size);
char *__wrap_strdup(const char *text);
void __wrap_free(void *memory);

static long fail_at = -1, calls, live;

static bool fails(void) { return calls++ == fail_at; }

void *__wrap_malloc(size_t size)
{
    void *memory = fails() ? NULL : __real_malloc(size);
    live += memory != NULL;
    return memory;
}

void *__wrap_realloc(void *old, size_t size)
{
    void *memory = fails() ? NULL : __real_realloc(old, size);
    live += memory && !old;
    return memory;
}

char *__wrap_strdup(const char *text)
{
    size_t size = strlen(text) + 1;
    char *copy = __wrap_malloc(size);
    return copy ? memcpy(copy, text, size) : NULL;
}

void __wrap_free(void *memory)
{
    live -= memory != NULL;
    __real_free(memory);
}

static enum proto_code run_infer(void)
{
    static const char text[] =
        "{\"id\":\"abc\",\"parameters\":{\"layer\":1,\"mode\":\"decode\",\"adapter\":\"x\",\"more\":[1,2.5,{\"a\":null}]},"
        "\"inputs\":[{\"name\":\"hidden\",\"datatype\":\"FP32\",\"shape\":[1,2],\"data\":[[0.5,2]]},"
        "{\"name\":\"ids\",\"datatype\":\"INT64\",\"shape\":[2],\"data\":[1,2]},"
        "{\"name\":\"adapter\",\"datatype\":\"BYTES\",\"shape\":[2],\"data\":[\"a\\n\",\"a string that is longer than the first room for "
        "text, "
        "a string that is longer than the first room for text, a string that is longer than the first room for text, a string that is "
        "longer "
        "than the first room for text, a string that is longer than the first room for text\"]}],"
        "\"outputs\":[{\"name\":\"hidden\",\"parameters\":{\"binary_data\":true}}]}";
    struct proto_infer infer;
    struct proto_error error;
    enum proto_code code = proto_infer_parse(text, sizeof text - 1, -1, NULL, &infer, &error);
    if (code)
        assert_int_equal(error.code, code);
    proto_infer_finish(&infer);
    return code;
}

static enum proto_code run_answer(void)
{
    static const float v[64] = {1, 2.5f};
    char *json;
    size_t length;
    struct proto_error error;
    struct proto_answer answer = {
        .model_name = "m", .id = "i", .path = "decode", .rows = 2, .hidden_size = 32, .dtype = DTYPE_FP32, .data = v};
    enum proto_code code = proto_answer_write(&answer, &json, &length, &error);
    if (code)
        assert_null(json);
    __wrap_free(json);
    if (code)
        return code;
    answer.binary = true;
    code = proto_answer_write(&answer, &json, &length, &error);
    __wrap_free(json);
    return code;
}

static enum proto_code run_bodies(void)
{
    static const char body[] = "{\"name\":\"a\",\"path\":\"b\"}";
    static const char vllm[] = "{\"lora_name\":\"c\",\"lora_path\":\"d\",\"other\":\"e\"}";
    struct proto_install install;
    struct proto_vllm_lora lora;
    struct proto_error error;
    enum proto_code code = proto_install_parse(body, sizeof body - 1, &install, &error);
    proto_install_finish(&install);
    if (code)
        return code;
    code = proto_vllm_lora_parse(vllm, sizeof vllm - 1, true, &lora, &error);
    proto_vllm_lora_finish(&lora);
    if (code)
        return code;
    json_t *tree;
    code = proto_object_parse("", 0, true, &tree, &error);
    json_decref(tree);
    return code;
}

static enum proto_code run_texts(void)
{
    char *warnings[] = {"plain", "bad \xff byte"};
    const int32_t layers[] = {0, 5};
    struct proto_adapter adapter = {.name = "a",
                                    .state = "ready",
                                    .layers = layers,
                                    .layer_count = 2,
                                    .gate = true,
                                    .up = true,
                                    .down = true,
                                    .warnings = warnings,
                                    .warning_count = 2};
    size_t length;
    char *text[] = {proto_dump(proto_adapter_json(&adapter), &length), proto_error_json("m", "c", "r", &length),
                    proto_vllm_error_json("m", "t", 400, &length)};
    enum proto_code code = PROTO_OK;
    for (size_t i = 0; i < 3; i++) {
        if (!text[i])
            code = PROTO_OUT_OF_MEMORY;
        __wrap_free(text[i]);
    }
    return code;
}

static void fail_each(enum proto_code (*run)(void), long at_least)
{
    fail_at = -1;
    calls = live = 0;
    assert_int_equal(run(), PROTO_OK);
    assert_int_equal(live, 0);
    long total = calls;
    assert_in_range(total, at_least, 10000);
    for (long i = 0; i < total; i++) {
        calls = live = 0;
        fail_at = i;
        enum proto_code code = run();
        fail_at = -1;
        /* One call has a second way, that of strings that are not UTF-8. */
        bool expected = code == PROTO_OUT_OF_MEMORY || (run == run_texts && code == PROTO_OK);
        if (!expected || live)
            print_error("allocation %ld of %ld: %s, %ld left\n", i, total, proto_code_name(code), live);
        assert_true(expected);
        assert_int_equal(live, 0);
    }
}

static void infer(void **state) { fail_each(run_infer, 40); }
static void answer(void **state) { fail_each(run_answer, 2); }
static void bodies(void **state) { fail_each(run_bodies, 12); }
static void texts(void **state) { fail_each(run_texts, 30); }

int main(void)
{
    json_object_seed(1); /* else jansson opens a file for its seed */
    json_set_alloc_funcs(__wrap_malloc, __wrap_free);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(infer),
        cmocka_unit_test(answer),
        cmocka_unit_test(bodies),
        cmocka_unit_test(texts),
    };
    return cmocka_run_group_tests_name("proto_memory", tests, NULL, NULL);
}
