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
    return proto_infer_parse(*copy, length, json_length, NULL, out, error);
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

#define INPUT(rest) "{\"inputs\":[{\"name\":\"x\"," rest "}]}"
#define FP32(shape, data) INPUT("\"datatype\":\"FP32\",\"shape\":" shape ",\"data\":" data)
#define INT32(data) INPUT("\"datatype\":\"INT32\",\"shape\":[1],\"data\":" data)
#define INT64(data) INPUT("\"datatype\":\"INT64\",\"shape\":[1],\"data\":" data)
#define STRINGS(data) INPUT("\"datatype\":\"BYTES\",\"shape\":[1],\"data\":" data)
#define ONE ",\"inputs\":[{\"name\":\"x\",\"datatype\":\"FP32\",\"shape\":[1],\"data\":[1]}]}"

static void take_bytes(const void *bytes, size_t length, int64_t json_length, const void *want, size_t size)
{
    struct proto_infer infer;
    struct proto_error error;
    void *copy;
    enum proto_code code = parse_bytes(bytes, length, json_length, &infer, &error, &copy);
    if (code)
        print_error("%.*s\n  gave %s: %s\n", (int)length, (const char *)bytes, proto_code_name(code), error.message);
    assert_int_equal(code, PROTO_OK);
    assert_int_equal(infer.input[0].bytes, size);
    assert_memory_equal(infer.input[0].data, want, size);
    proto_infer_finish(&infer);
    free(copy);
}

static void take(const char *text, const void *want, size_t size) { take_bytes(text, strlen(text), -1, want, size); }

static void not_json(void **state)
{
    refuse("", PROTO_BAD_JSON, "empty");
    refuse(" \n\t", PROTO_BAD_JSON, "empty");
    refuse("{", PROTO_BAD_JSON, "byte 1");
    refuse("{\"a\"}", PROTO_BAD_JSON, "':' is missing at byte 4");
    refuse("{\"a\":1,}", PROTO_BAD_JSON, "name is missing");
    refuse("{\"a\":[1,]}", PROTO_BAD_JSON, "value is missing at byte 8");
    refuse("{\"a\":[1 2]}", PROTO_BAD_JSON, "',' or ']' is missing");
    refuse("{\"a\":1 \"b\":2}", PROTO_BAD_JSON, "',' or '}' is missing");
    refuse("{'a':1}", PROTO_BAD_JSON, "name is missing");
    refuse("{\"a\":\"", PROTO_BAD_JSON, "doesn't end");
    refuse("{\"a\":\"\\", PROTO_BAD_JSON, "escape");
    refuse("{\"a\":}", PROTO_BAD_JSON, "value is missing");
    refuse("{\"a\":", PROTO_BAD_JSON, "ends where a value");
    refuse("{\"a\":nul}", PROTO_BAD_JSON, "nul at byte 5");
    refuse("{\"a\":truex}", PROTO_BAD_JSON, "',' or '}' is missing at byte 9");
    refuse("{\"a\":01}", PROTO_BAD_JSON, "byte");
    refuse("{\"a\":NaN}", PROTO_BAD_JSON, "NaN");
    refuse("{\"a\":1e999}", PROTO_BAD_JSON, "byte");
    refuse("{\"a\":\"\x80\"}", PROTO_BAD_JSON, "bytes that are not UTF-8 at byte 6");
    refuse("{\"a\":\"\xed\xa0\x80\"}", PROTO_BAD_JSON, "bytes that are not UTF-8 at byte 6");
    refuse("{\"a\":\"\xc0\x80\"}", PROTO_BAD_JSON, "bytes that are not UTF-8 at byte 6");
    refuse("{\"a\":\"\\ud800\"}", PROTO_BAD_JSON, "byte");
    refuse("{\"a\":\"\\x\"}", PROTO_BAD_JSON, "escape");
    refuse("{\"a\":\"\x01\"}", PROTO_BAD_JSON, "control");
    refuse("{\"a\":\"\\u0000\"}", PROTO_BAD_JSON, "u0000");
    refuse("{\"a\\u0000\":1}", PROTO_BAD_JSON, "byte");
    refuse("\xef\xbb\xbf{}", PROTO_BAD_JSON, "an object must begin at byte 0");
    refuse("{} {}", PROTO_BAD_JSON, "something follows");
    refuse("{}]", PROTO_BAD_JSON, "something follows");
    refuse("12", PROTO_BAD_JSON, "");
    refuse("[]", PROTO_BAD_REQUEST, "must be an object, not an array");
    refuse_bytes("{\"a\":1}\0", 8, -1, PROTO_BAD_JSON, "something follows");
    refuse_bytes("{\"a\":\"\0\"}", 9, -1, PROTO_BAD_JSON, "");
    refuse_bytes("{\"a\":\0}", 7, -1, PROTO_BAD_JSON, "");
    refuse_bytes("\0", 1, -1, PROTO_BAD_JSON, "");
    /* Offsets are those of the caller's text, though jansson doesn't see the data. */
    refuse("{\"inputs\":[{\"data\":[1,2,3,4,5,6,7,8,9,10,11,12]}],\"a\":{\"b\":1,\"b\":1}}", PROTO_BAD_JSON, "at byte 64");
}

static void depth(void **state)
{
    char text[1024];
    for (int levels = 60; levels <= 66; levels++) {
        size_t n = (size_t)sprintf(text, "{\"a\":");
        memset(text + n, '[', (size_t)levels);
        memset(text + n + levels, ']', (size_t)levels);
        strcpy(text + n + 2 * levels, ONE);
        if (1 + levels <= 64)
            take(text, (float[]){1}, 4);
        else
            refuse(text, PROTO_BAD_JSON, "64 levels at most");
        n = (size_t)sprintf(text, "{\"inputs\":[{\"data\":");
        memset(text + n, '[', (size_t)levels);
        memset(text + n + levels, ']', (size_t)levels);
        strcpy(text + n + 2 * levels, "}]}");
        if (3 + levels <= 64)
            refuse(text, PROTO_BAD_REQUEST, "has no name");
        else
            refuse(text, PROTO_BAD_JSON, "64 levels at most");
    }
    /* Unbalanced, and so deep that recursion would end the process. */
    size_t deep = 3000000;
    char *huge = malloc(deep);
    assert_non_null(huge);
    memset(huge, '[', deep);
    refuse_bytes(huge, deep, -1, PROTO_BAD_JSON, "64 levels");
    memcpy(huge, "{\"inputs\":[{\"data\":", 19);
    refuse_bytes(huge, deep, -1, PROTO_BAD_JSON, "64 levels");
    free(huge);
}

static void duplicates(void **state)
{
    refuse("{\"id\":\"a\",\"id\":\"b\"" ONE, PROTO_BAD_JSON, "duplicate");
    refuse("{\"id\":\"a\",\"i\\u0064\":\"b\"" ONE, PROTO_BAD_JSON, "duplicate");
    refuse(INPUT("\"datatype\":\"FP32\",\"shape\":[1],\"data\":[1],\"data\":[2]"), PROTO_BAD_JSON, "duplicate");
    refuse(INPUT("\"datatype\":\"FP32\",\"shape\":[1],\"data\":[1],\"d\\u0061ta\":[2]"), PROTO_BAD_JSON, "duplicate");
    refuse(INPUT("\"datatype\":\"FP32\",\"shape\":[1],\"\\u0064\\u0061\\u0074\\u0061\":[1],\"data\":[2]"), PROTO_BAD_JSON, "duplicate");
    refuse("{\"inputs\":[]" ONE, PROTO_BAD_JSON, "duplicate");
    refuse("{\"\\u0069nputs\":[]" ONE, PROTO_BAD_JSON, "duplicate");
    refuse(INPUT("\"datatype\":\"FP32\",\"shape\":[1],\"shape\":[1],\"data\":[1]"), PROTO_BAD_JSON, "duplicate");
    refuse("{\"unknown\":{\"a\":1,\"a\":1}" ONE, PROTO_BAD_JSON, "duplicate");
    refuse("{\"inputs\":[{\"name\":\"x\",\"datatype\":\"FP32\",\"shape\":[1],\"data\":[1]},{\"name\":\"x\",\"datatype\":\"FP32\",\"shape\":"
           "[1],"
           "\"data\":[1]}]}",
           PROTO_BAD_REQUEST, "inputs[1] 'x' appears twice");
}

/* Escaped names mean what they spell: their arrays are data as any other. */
static void escaped_names(void **state)
{
    take("{\"\\u0069nput\\u0073\":[{\"n\\u0061me\":\"x\",\"datatype\":\"FP32\",\"shape\":[2],\"d\\u0061t\\u0061\":[1.5,-2]}]}",
         (float[]){1.5f, -2}, 8);
    take("{\"\\u0069NPUTS\":[[[1]]]" ONE, (float[]){1}, 4);
    /* Data elsewhere is not data. */
    take("{\"data\":[\"x\",{}],\"outputs\":[{\"name\":\"hidden\",\"data\":{}}],\"x\":{\"inputs\":[{\"data\":7}]}" ONE, (float[]){1}, 4);
    /* And an integer can't stand for an array that was cut out. */
    refuse(INPUT("\"datatype\":\"FP32\",\"shape\":[1],\"data\":0"), PROTO_BAD_TENSOR, "data must be an array");
    refuse(INPUT("\"datatype\":\"FP32\",\"shape\":[1],\"dat\\u0061\":0"), PROTO_BAD_TENSOR, "data must be an array");
    refuse(INPUT("\"datatype\":\"FP32\",\"shape\":[1],\"data\":null"), PROTO_BAD_TENSOR, "data must be an array");
    refuse(INPUT("\"datatype\":\"FP32\",\"shape\":[1],\"data\":{\"a\":1}"), PROTO_BAD_TENSOR, "data must be an array");
    refuse(INPUT("\"datatype\":\"FP32\",\"shape\":[1],\"data\":[{\"a\":1}]"), PROTO_BAD_TENSOR, "may not hold objects");
    refuse(INPUT("\"datatype\":\"FP32\",\"shape\":[1],\"data\":"), PROTO_BAD_TENSOR, "data must be an array");
    refuse("{\"inputs\":[{\"data\":", PROTO_BAD_JSON, "");
    refuse("{\"inputs\":[{\"data\":[1,2", PROTO_BAD_JSON, "doesn't end");
    refuse("{\"inputs\":[{\"data\":[\"a", PROTO_BAD_JSON, "doesn't end");
    refuse("{\"inputs\":{\"data\":[1]}}", PROTO_BAD_REQUEST, "inputs must be an array");
    refuse("{\"inputs\":[[{\"data\":[1]}]]}", PROTO_BAD_REQUEST, "inputs[0] must be an object, not an array");
}

static void members(void **state)
{
    refuse("{}", PROTO_BAD_REQUEST, "no inputs");
    refuse("{\"inputs\":[]}", PROTO_BAD_REQUEST, "there are 0 inputs");
    refuse("{\"inputs\":[1]}", PROTO_BAD_REQUEST, "inputs[0] must be an object, not an integer");
    refuse("{\"inputs\":[{\"datatype\":\"FP32\",\"shape\":[1],\"data\":[1]}]}", PROTO_BAD_REQUEST, "inputs[0] has no name");
    refuse("{\"inputs\":[{\"name\":1,\"datatype\":\"FP32\",\"shape\":[1],\"data\":[1]}]}", PROTO_BAD_REQUEST,
           "inputs[0].name must be a string");
    refuse("{\"inputs\":[{\"name\":\"\",\"datatype\":\"FP32\",\"shape\":[1],\"data\":[1]}]}", PROTO_BAD_REQUEST, "has 0 bytes");
    refuse(INPUT("\"shape\":[1],\"data\":[1]"), PROTO_BAD_REQUEST, "inputs[0] 'x' has no datatype");
    refuse(INPUT("\"datatype\":3,\"shape\":[1],\"data\":[1]"), PROTO_BAD_REQUEST, "'x': datatype must be a string");
    refuse(INPUT("\"datatype\":\"FP64\",\"shape\":[1],\"data\":[1]"), PROTO_UNSUPPORTED_DATATYPE,
           "inputs[0] 'x': datatype 'FP64' is not supported; BF16, FP16, FP32, INT32, INT64 and BYTES are");
    refuse(INPUT("\"datatype\":\"fp32\",\"shape\":[1],\"data\":[1]"), PROTO_UNSUPPORTED_DATATYPE, "'fp32'");
    refuse(INPUT("\"datatype\":\"FP32\",\"data\":[1]"), PROTO_BAD_REQUEST, "inputs[0] 'x' has no shape");
    refuse(FP32("4", "[1]"), PROTO_BAD_REQUEST, "shape must be an array");
    refuse(FP32("[1.0]", "[1]"), PROTO_BAD_REQUEST, "shape[0] must be an integer, not a real number");
    refuse(FP32("[1,\"2\"]", "[1]"), PROTO_BAD_REQUEST, "shape[1] must be an integer, not a string");
    refuse(FP32("[-1]", "[1]"), PROTO_BAD_TENSOR, "shape[0] is -1");
    refuse(FP32("[]", "[1]"), PROTO_BAD_TENSOR, "0 dimensions; 1 to 4");
    refuse(FP32("[1,1,1,1,1]", "[1]"), PROTO_BAD_TENSOR, "5 dimensions; 1 to 4");
    refuse(FP32("[4294967296,4294967296]", "[1]"), PROTO_BAD_TENSOR, "shape [4294967296,4294967296] has more elements than can be counted");
    refuse(FP32("[4294967296,4294967296,0]", "[]"), PROTO_BAD_TENSOR, "more elements");
    refuse(FP32("[9223372036854775807]", "[1]"), PROTO_BAD_TENSOR, "more elements");
    refuse(FP32("[9223372036854775808]", "[1]"), PROTO_BAD_JSON, "integer");
    refuse(FP32("[1099511627776]", "[1]"), PROTO_BAD_TENSOR, "data has at most 1 entries, but shape [1099511627776] says 1099511627776");
    refuse(INPUT("\"datatype\":\"FP32\",\"shape\":[1]"), PROTO_BAD_REQUEST, "'x' has neither data nor parameters.binary_data_size");
    refuse(INPUT("\"datatype\":\"FP32\",\"shape\":[1],\"data\":[1],\"parameters\":{\"binary_data_size\":4}"), PROTO_BAD_REQUEST,
           "has both data");
    refuse(INPUT("\"datatype\":\"FP32\",\"shape\":[1],\"data\":[1],\"parameters\":[]"), PROTO_BAD_REQUEST, "parameters must be an object");
    refuse(INPUT("\"datatype\":\"FP32\",\"shape\":[1],\"parameters\":{\"shared_memory_region\":\"a\"}"), PROTO_BAD_REQUEST,
           "shared memory");
    take(INPUT("\"datatype\":\"FP32\",\"shape\":[1],\"data\":[1],\"parameters\":{\"content_type\":\"x\"},\"more\":null"), (float[]){1}, 4);
    refuse("{\"id\":5" ONE, PROTO_BAD_REQUEST, "id must be a string, not an integer");
    refuse("{\"id\":null" ONE, PROTO_BAD_REQUEST, "id must be a string, not null");
    /* Names: the longest, and one byte more. */
    char name[PROTO_MAX_NAME + 2], text[512];
    memset(name, 'n', sizeof name);
    name[PROTO_MAX_NAME] = 0;
    snprintf(text, sizeof text, "{\"inputs\":[{\"name\":\"%s\",\"datatype\":\"FP32\",\"shape\":[1],\"data\":[1]}]}", name);
    take(text, (float[]){1}, 4);
    name[PROTO_MAX_NAME] = 'n';
    name[PROTO_MAX_NAME + 1] = 0;
    snprintf(text, sizeof text, "{\"inputs\":[{\"name\":\"%s\",\"datatype\":\"FP32\",\"shape\":[1],\"data\":[1]}]}", name);
    refuse(text, PROTO_BAD_REQUEST, "has 129 bytes; a name has 1 to 128");
}

static void many_inputs(void **state)
{
    for (int count = PROTO_MAX_INPUTS; count <= PROTO_MAX_INPUTS + 1; count++) {
        for (int binary = 0; binary < 2; binary++) {
            char text[4096];
            size_t n = (size_t)sprintf(text, "{\"inputs\":[");
            for (int i = 0; i < count; i++)
                n += (size_t)sprintf(text + n, "%s{\"name\":\"n%d\",\"datatype\":\"FP32\",\"shape\":[1],%s}", i ? "," : "", i,
                                     binary ? "\"parameters\":{\"binary_data_size\":4}" : "\"data\":[1]");
            n += (size_t)sprintf(text + n, "]}");
            size_t json = n;
            memset(text + n, 0, 4 * (size_t)count * (size_t)binary);
            n += 4 * (size_t)count * (size_t)binary;
            if (count > PROTO_MAX_INPUTS) {
                refuse_bytes(text, n, binary ? (int64_t)json : -1, PROTO_BAD_REQUEST, "16");
                continue;
            }
            struct proto_infer infer;
            struct proto_error error;
            void *copy;
            assert_int_equal(parse_bytes(text, n, binary ? (int64_t)json : -1, &infer, &error, &copy), PROTO_OK);
            assert_int_equal(infer.inputs, count);
            assert_non_null(proto_infer_find(&infer, "n15"));
            proto_infer_finish(&infer);
            free(copy);
        }
    }
}

static void parameters(void **state)
{
#define WITH(parameters) "{\"parameters\":" parameters ONE
    refuse(WITH("[]"), PROTO_BAD_REQUEST, "parameters must be an object, not an array");
    refuse(WITH("{\"layer\":\"0\"}"), PROTO_BAD_REQUEST, "parameters.layer must be an integer, not a string");
    refuse(WITH("{\"layer\":0.0}"), PROTO_BAD_REQUEST, "parameters.layer must be an integer, not a real number");
    refuse(WITH("{\"layer\":true}"), PROTO_BAD_REQUEST, "parameters.layer must be an integer, not a boolean");
    refuse(WITH("{\"layer\":-1}"), PROTO_BAD_REQUEST, "parameters.layer is -1");
    refuse(WITH("{\"layer\":4294967296}"), PROTO_BAD_REQUEST, "parameters.layer is 4294967296");
    refuse(WITH("{\"layer\":99999999999999999999}"), PROTO_BAD_JSON, "integer");
    refuse(WITH("{\"mode\":\"fast\"}"), PROTO_BAD_REQUEST, "parameters.mode is 'fast'; it may be 'auto', 'decode' or 'prefill'");
    refuse(WITH("{\"mode\":1}"), PROTO_BAD_REQUEST, "parameters.mode must be a string");
    refuse(WITH("{\"adapter\":7}"), PROTO_BAD_REQUEST, "parameters.adapter must be a string, not an integer");
    refuse(WITH("{\"adapter\":\"a\\u0000b\"}"), PROTO_BAD_JSON, "u0000");
    refuse(WITH("{\"binary_data_output\":1}"), PROTO_BAD_REQUEST, "parameters.binary_data_output must be a boolean");
    struct proto_infer infer;
    struct proto_error error;
    void *copy;
    static const char *const modes[] = {"auto", "decode", "prefill"};
    for (int i = 0; i < 3; i++) {
        char text[256];
        snprintf(text, sizeof text, WITH("{\"mode\":\"%s\",\"sequence_id\":5,\"priority\":1}"), modes[i]);
        assert_int_equal(parse_bytes(text, strlen(text), -1, &infer, &error, &copy), PROTO_OK);
        assert_int_equal(infer.mode, i);
        assert_false(infer.has_layer);
        assert_false(infer.binary_output);
        assert_null(infer.adapter);
        assert_null(infer.id);
        proto_infer_finish(&infer);
        free(copy);
    }
}

/* Ignored, they would get the base's numbers for an answer. */
static void misnamed_adapters(void **state)
{
    static const char *const key[] = {"adapter_id", "adaptor",   "adapters", "Adapter",      "ADAPTER_NAME",
                                      "lora",       "lora_name", "LoRA",     "lora_request", "adapt\\u0065r_ids"};
    char text[512], sentence[128];
    for (size_t i = 0; i < sizeof key / sizeof key[0]; i++) {
        const char *shown = strchr(key[i], '\\') ? "adapter_ids" : key[i];
        snprintf(text, sizeof text, WITH("{\"layer\":0,\"adapter\":\"a\",\"%s\":7}"), key[i]);
        snprintf(sentence, sizeof sentence, "parameters.%s is not known; adapters are named by parameters.adapter", shown);
        refuse(text, PROTO_BAD_REQUEST, sentence);
        snprintf(text, sizeof text, "{\"%s\":null" ONE, key[i]);
        snprintf(sentence, sizeof sentence, "the request's member %s is not known; adapters are named by", shown);
        refuse(text, PROTO_BAD_REQUEST, sentence);
        /* Whichever reader sees it first. */
        snprintf(text, sizeof text,
                 "{\"parameters\":{\"%s\":7},\"inputs\":[{\"name\":\"x\",\"datatype\":\"BYTES\",\"shape\":[0],\"parameters\":{"
                 "\"binary_data_size\":0}}]}",
                 key[i]);
        refuse_bytes(text, strlen(text), (int64_t)strlen(text), PROTO_BAD_REQUEST, "is not known; adapters are named by");
    }
    refuse("{\"adapter\":\"a\"" ONE, PROTO_BAD_REQUEST, "the request's member adapter is not known");
    take(WITH("{\"adapter\":\"a\",\"adapt\":1,\"my_lora\":1,\"lor\":{\"adapters\":1}}"), (float[]){1}, 4);
    take("{\"model_name\":\"m\",\"my_adapter\":1" ONE, (float[]){1}, 4);
}

static void outputs(void **state)
{
#define OUTPUTS(outputs) "{\"outputs\":" outputs ONE
    static const struct {
        const char *text;
        bool binary;
    } taken[] = {
        {OUTPUTS("[]"), false},
        {OUTPUTS("[{\"name\":\"hidden\"}]"), false},
        {OUTPUTS("[{\"name\":\"hidden\",\"parameters\":{}}]"), false},
        {OUTPUTS("[{\"name\":\"hidden\",\"parameters\":{\"binary_data\":true,\"classification\":0}}]"), true},
        {OUTPUTS("[{\"name\":\"hidden\",\"parameters\":{\"binary_data\":false}}],\"parameters\":{\"binary_data_output\":true}"), false},
        {OUTPUTS("[{\"name\":\"hidden\"}],\"parameters\":{\"binary_data_output\":true}"), true},
        {OUTPUTS("[],\"parameters\":{\"binary_data_output\":true}"), true},
    };
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++) {
        struct proto_infer infer;
        struct proto_error error;
        void *copy;
        assert_int_equal(parse_bytes(taken[i].text, strlen(taken[i].text), -1, &infer, &error, &copy), PROTO_OK);
        assert_int_equal(infer.binary_output, taken[i].binary);
        proto_infer_finish(&infer);
        free(copy);
    }
    refuse(OUTPUTS("{}"), PROTO_BAD_REQUEST, "outputs must be an array");
    refuse(OUTPUTS("[\"hidden\"]"), PROTO_BAD_REQUEST, "outputs[0] must be an object");
    refuse(OUTPUTS("[{}]"), PROTO_BAD_REQUEST, "outputs[0] has no name");
    refuse(OUTPUTS("[{\"name\":null}]"), PROTO_BAD_REQUEST, "outputs[0].name must be a string, not null");
    refuse(OUTPUTS("[{\"name\":\"logits\"}]"), PROTO_BAD_REQUEST, "no output 'logits'; the only one is 'hidden'");
    refuse(OUTPUTS("[{\"name\":\"hidden\"},{\"name\":\"hidden\"}]"), PROTO_BAD_REQUEST, "outputs[1]: 'hidden' is asked for twice");
    refuse(OUTPUTS("[{\"name\":\"hidden\",\"parameters\":3}]"), PROTO_BAD_REQUEST, "outputs[0].parameters must be an object");
    refuse(OUTPUTS("[{\"name\":\"hidden\",\"parameters\":{\"binary_data\":\"true\"}}]"), PROTO_BAD_REQUEST,
           "binary_data must be a boolean");
    refuse(OUTPUTS("[{\"name\":\"hidden\",\"parameters\":{\"classification\":3}}]"), PROTO_BAD_REQUEST, "classification");
    refuse(OUTPUTS("[{\"name\":\"hidden\",\"parameters\":{\"shared_memory_region\":\"r\"}}]"), PROTO_BAD_REQUEST, "shared memory");
}

static void nesting(void **state)
{
    const float six[] = {1, 2, 3, 4, 5, 6};
    take(FP32("[2,3]", "[1,2,3,4,5,6]"), six, 24);
    take(FP32("[2,3]", "[[1,2,3],[4,5,6]]"), six, 24);
    take(FP32("[2,3]", " [ [ 1 ,\t2,3 ]\n,\r[4, 5 , 6] ] "), six, 24);
    take(FP32("[1,2,3]", "[[[1,2,3],[4,5,6]]]"), six, 24);
    take(FP32("[1,2,3]", "[1,2,3,4,5,6]"), six, 24);
    take(FP32("[1,2,3,1]", "[[[[1],[2],[3]],[[4],[5],[6]]]]"), six, 24);
    take(FP32("[0]", "[]"), six, 0);
    take(FP32("[0,4]", "[]"), six, 0);
    take(FP32("[2,0]", "[[],[]]"), six, 0);
    take(FP32("[2,0]", "[ ]"), six, 0);
    refuse(FP32("[6]", "[[1,2,3],[4,5,6]]"), PROTO_BAD_TENSOR, "inputs[0] 'x': data is nested 2 levels deep, but shape [6] takes 1");
    refuse(FP32("[1,2,3]", "[[1,2,3],[4,5,6]]"), PROTO_BAD_TENSOR, "data is nested 2 levels deep, but shape [1,2,3] takes 1 or 3");
    refuse(FP32("[2,3]", "[[[1,2,3],[4,5,6]]]"), PROTO_BAD_TENSOR, "nested 3 levels deep, but shape [2,3] takes 1 or 2");
    refuse(FP32("[2,3]", "[[1,2],[3,4],[5,6]]"), PROTO_BAD_TENSOR, "data[0] has 2 entries, but shape [2,3] says 3");
    refuse(FP32("[2,3]", "[[1,2,3],[4,5,6,7]]"), PROTO_BAD_TENSOR, "data[1] has more than the 3 entries that shape [2,3] says");
    refuse(FP32("[2,3]", "[[1,2,3],[4,5,6],[7]]"), PROTO_BAD_TENSOR, "data has more than the 2 entries");
    refuse(FP32("[2,3]", "[[1,2,3]]"), PROTO_BAD_TENSOR, "data has 1 entries, but shape [2,3] says 2");
    refuse(FP32("[2,3]", "[[1,2,3],[]   ]"), PROTO_BAD_TENSOR, "data[1] has 0 entries");
    refuse(FP32("[2,3]", "[[1,2,3],4]  "), PROTO_BAD_TENSOR, "data[1] must be a list");
    refuse(FP32("[2,3]", "[[1,2,3],[4,[5],6]]"), PROTO_BAD_TENSOR, "data[1][1] is a list, but shape [2,3] ends there");
    refuse(FP32("[2,3]", "[1,2,3,[4,5,6]]"), PROTO_BAD_TENSOR, "data[3] is a list");
    refuse(FP32("[2,3]", "[1,2,3,4,5.2]"), PROTO_BAD_TENSOR, "data has 5 entries, but shape [2,3] says 6");
    refuse(FP32("[2,3]", "[1,2,3,4,5,6,7]"), PROTO_BAD_TENSOR, "data has more than the 6 entries that shape [2,3] says");
    refuse(FP32("[1]", "[]"), PROTO_BAD_TENSOR, "shape [1] says 1");
    refuse(FP32("[0]", "[1]"), PROTO_BAD_TENSOR, "more than the 0 entries");
    refuse(FP32("[2,0]", "[[],[1]]"), PROTO_BAD_TENSOR, "data[1] has more than the 0 entries");
    refuse(FP32("[2]", "[1,]"), PROTO_BAD_JSON, "'x': not JSON: data[1] is missing");
    refuse(FP32("[2]", "[,1]"), PROTO_BAD_JSON, "data[0] is missing");
    refuse(FP32("[2]", "[1 2]"), PROTO_BAD_JSON, "',' or ']' is missing behind data[0]");
    refuse(FP32("[2]", "[1:2]"), PROTO_BAD_JSON, "',' or ']' is missing behind data[0]");
    refuse(FP32("[1,2]", "[[1,2] [3]]"), PROTO_BAD_JSON, "',' or ']' is missing behind data[0]");
}

static void elements(void **state)
{
    refuse(FP32("[1]", "[\"1\"]"), PROTO_BAD_TENSOR, "data[0] is a string, but FP32 takes numbers");
    refuse(FP32("[2]", "[1,null]"), PROTO_BAD_TENSOR, "data[1] is null, but FP32 takes numbers");
    refuse(FP32("[1]", "[true]"), PROTO_BAD_TENSOR, "data[0] is true");
    refuse(FP32("[1]", "[NaN]"), PROTO_BAD_JSON, "data[0] is NaN, which JSON can't hold");
    refuse(FP32("[1]", "[-Infinity]"), PROTO_BAD_JSON, "data[0] is -Infinity, which JSON can't hold");
    refuse(FP32("[1]", "[01]"), PROTO_BAD_JSON, "data[0] is 01");
    refuse(FP32("[1]", "[.5]"), PROTO_BAD_JSON, "data[0] is .5");
    refuse(FP32("[1]", "[+1]"), PROTO_BAD_JSON, "data[0] is +1");
    refuse(FP32("[1]", "[1.]"), PROTO_BAD_JSON, "data[0] is 1.");
    refuse(FP32("[1]", "[0x10]"), PROTO_BAD_JSON, "behind data[0]");
    refuse(FP32("[1]", "[1\xff]"), PROTO_BAD_JSON, "behind data[0]");
    refuse(FP32("[1]", "[\xff]"), PROTO_BAD_JSON, "data[0] is \xef\xbf\xbd");
    refuse_bytes(FP32("[1]", "[\0]"), sizeof FP32("[1]", "[\0]") - 1, -1, PROTO_BAD_JSON, "data[0] is \xef\xbf\xbd");
    refuse(FP32("[1]", "[1e39]"), PROTO_BAD_TENSOR, "data[0] is 1e39, but the largest FP32 is 3.4028235e38");
    refuse(INPUT("\"datatype\":\"FP16\",\"shape\":[1,2],\"data\":[[1,-65520]]"), PROTO_BAD_TENSOR,
           "data[0][1] is -65520, but the largest FP16 is 65504");
    take(INT32("[-2147483648]"), (int32_t[]){INT32_MIN}, 4);
    take(INT32("[2147483647]"), (int32_t[]){INT32_MAX}, 4);
    take(INT32("[-0]"), (int32_t[]){0}, 4);
    take(INT64("[-9223372036854775808]"), (int64_t[]){INT64_MIN}, 8);
    take(INT64("[9223372036854775807]"), (int64_t[]){INT64_MAX}, 8);
    refuse(INT32("[2147483648]"), PROTO_BAD_TENSOR, "data[0] is 2147483648, outside INT32's range of -2147483648 to 2147483647");
    refuse(INT32("[-2147483649]"), PROTO_BAD_TENSOR, "outside INT32's range");
    refuse(INT64("[9223372036854775808]"), PROTO_BAD_TENSOR, "outside INT64's range");
    refuse(INT64("[-9223372036854775809]"), PROTO_BAD_TENSOR, "outside INT64's range");
    refuse(INT64("[18446744073709551617]"), PROTO_BAD_TENSOR, "outside INT64's range");
    refuse(INT64("[184467440737095516160000000000000000000001]"), PROTO_BAD_TENSOR, "outside INT64's range");
    refuse(INT32("[1.0]"), PROTO_BAD_TENSOR, "data[0] is 1.0; INT32 takes integers without a point or an exponent");
    refuse(INT32("[1e3]"), PROTO_BAD_TENSOR, "data[0] is 1e3; INT32 takes integers");
    refuse(INT32("[007]"), PROTO_BAD_JSON, "data[0] is 007");
    refuse(INT32("[\"7\"]"), PROTO_BAD_TENSOR, "data[0] is a string, but INT32 takes numbers");
    refuse(INT32("[false]"), PROTO_BAD_TENSOR, "data[0] is false");
    refuse(INT32("[-]"), PROTO_BAD_JSON, "data[0] is -");
    /* A number longer than any sentence. */
    char text[9000];
    size_t n = (size_t)sprintf(text, "{\"inputs\":[{\"name\":\"x\",\"datatype\":\"INT32\",\"shape\":[1],\"data\":[");
    memset(text + n, '9', 8000);
    strcpy(text + n + 8000, "]}]}");
    refuse(text, PROTO_BAD_TENSOR, "..., outside INT32's range");
}

static void strings(void **state)
{
    take(STRINGS("[\"\"]"), "\0\0\0", 4);
    take(STRINGS("[\"ab\"]"), "\2\0\0\0ab", 6);
    take(STRINGS("[ \"]\\\",[{\" ]"), "\5\0\0\0]\",[{", 9);
    take(STRINGS("[\"\\u0000\\b\\f\\n\\r\\t\\/\\\\\"]"), "\10\0\0\0\0\b\f\n\r\t/\\", 12);
    take(STRINGS("[\"\xf4\x8f\xbf\xbf\\ufFfF\\u0800\\u007f\\u0080\"]"), "\xd\0\0\0\xf4\x8f\xbf\xbf\xef\xbf\xbf\xe0\xa0\x80\x7f\xc2\x80",
         17);
    take(INPUT("\"datatype\":\"BYTES\",\"shape\":[1,2],\"data\":[[\"a\",\"b\"]]"), "\1\0\0\0a\1\0\0\0b", 10);
    take(INPUT("\"datatype\":\"BYTES\",\"shape\":[0],\"data\":[]"), "", 0);
    refuse(STRINGS("[1]"), PROTO_BAD_TENSOR, "data[0] is the number 1, but BYTES takes strings");
    refuse(STRINGS("[null]"), PROTO_BAD_TENSOR, "data[0] is null, but BYTES takes strings");
    refuse(STRINGS("[x]"), PROTO_BAD_JSON, "data[0] is x");
    refuse(STRINGS("[[\"a\"]]"), PROTO_BAD_TENSOR, "nested 2 levels deep");
    refuse(STRINGS("[\"a\",\"b\"]"), PROTO_BAD_TENSOR, "more than the 1 entries");
    refuse(STRINGS("[]"), PROTO_BAD_TENSOR, "0 entries");
    refuse(STRINGS("[\"\x80\"]"), PROTO_BAD_JSON, "data[0] has a byte 0x80 that is not UTF-8");
    refuse(STRINGS("[\"\xe0\x80\x80\"]"), PROTO_BAD_JSON, "0xe0 that is not UTF-8");
    refuse(STRINGS("[\"\xf0\x9f\"]"), PROTO_BAD_JSON, "0xf0 that is not UTF-8");
    refuse(STRINGS("[\"\x1f\"]"), PROTO_BAD_JSON, "data[0] has a byte 0x1f that must be escaped");
    refuse_bytes(STRINGS("[\"\0\"]"), sizeof STRINGS("[\"\0\"]") - 1, -1, PROTO_BAD_JSON, "0x00 that must be escaped");
    refuse(STRINGS("[\"\\x\"]"), PROTO_BAD_JSON, "escape");
    refuse(STRINGS("[\"\\u12g4\"]"), PROTO_BAD_JSON, "escape");
    refuse(STRINGS("[\"\\u12\"]"), PROTO_BAD_JSON, "escape");
    refuse(STRINGS("[\"\\ud83d\"]"), PROTO_BAD_JSON, "escape");
    refuse(STRINGS("[\"\\ude00\"]"), PROTO_BAD_JSON, "escape");
    refuse(STRINGS("[\"\\ud83d\\u0041\"]"), PROTO_BAD_JSON, "escape");
}

/* A head, and bytes behind it. */
static size_t with_binary(char *text, const char *head, const void *bytes, size_t size)
{
    size_t n = strlen(head);
    memcpy(text, head, n);
    if (size)
        memcpy(text + n, bytes, size);
    return n + size;
}

/* Refuses rows of another width than 4, as one that knows the model does. */
static enum proto_code look_at_width(void *context, const struct proto_tensor *tensor, struct proto_error *error)
{
    ++*(int *)context;
    assert_null(tensor->data);
    if (tensor->rank == 2 && tensor->shape[1] == 4)
        return PROTO_OK;
    error->code = PROTO_SHAPE_MISMATCH;
    snprintf(error->message, sizeof error->message, "%s is not 4 wide", tensor->name);
    return error->code;
}

static void shapes_are_looked_at_first(void **state)
{
    static const struct {
        const char *text;
        enum proto_code code;
        const char *sentence;
    } requests[] = {
        {FP32("[1,4]", "[1,2,3,4]"), PROTO_OK, ""},
        {FP32("[1,4]", "[1,2,3]"), PROTO_BAD_TENSOR, "data has 3 entries"},
        {FP32("[1,3]", "[1,2,3]"), PROTO_SHAPE_MISMATCH, "x is not 4 wide"},
        {FP32("[1,3]", "[1,2,3,4]"), PROTO_SHAPE_MISMATCH, "x is not 4 wide"},
        {FP32("[1,3]", "[[NaN]]"), PROTO_SHAPE_MISMATCH, "x is not 4 wide"},
        {INPUT("\"datatype\":\"FP32\",\"shape\":[1,4],\"parameters\":{\"binary_data_size\":16}"), PROTO_OK, ""},
        {INPUT("\"datatype\":\"FP32\",\"shape\":[1,3],\"parameters\":{\"binary_data_size\":16}"), PROTO_SHAPE_MISMATCH, "x is not 4 wide"},
        {INPUT("\"datatype\":\"FP32\",\"shape\":[2,2],\"parameters\":{\"binary_data_size\":16}"), PROTO_SHAPE_MISMATCH, "x is not 4 wide"},
        {INPUT("\"datatype\":\"FP32\",\"shape\":[1,4],\"parameters\":{\"binary_data_size\":12}"), PROTO_BAD_TENSOR,
         "binary_data_size is 12"},
    };
    for (size_t i = 0; i < sizeof requests / sizeof requests[0]; i++) {
        int asked = 0;
        const struct proto_caller caller = {.look = look_at_width, .context = &asked};
        struct proto_infer infer;
        struct proto_error error = {0};
        char body[256];
        bool is_binary = strstr(requests[i].text, "binary_data_size") != NULL;
        size_t length = strlen(requests[i].text);
        memcpy(body, requests[i].text, length);
        memset(body + length, 0, 16);
        enum proto_code code =
            proto_infer_parse(body, length + (is_binary ? 16 : 0), is_binary ? (int64_t)length : -1, &caller, &infer, &error);
        if (code != requests[i].code || !strstr(error.message, requests[i].sentence))
            fail_msg("%s gave %s: %s", requests[i].text, proto_code_name(code), error.message);
        assert_in_range(asked, 1, 2);
        proto_infer_finish(&infer);
    }
}

static void binary(void **state)
{
#define BINARY(datatype, shape, size)                                                                                                      \
    "{\"name\":\"" datatype "\",\"datatype\":\"" datatype "\",\"shape\":" shape ",\"parameters\":{\"binary_data_size\":" size "}}"
#define INPUTS(inputs) "{\"inputs\":[" inputs "]}"
    char text[1024];
    const float two[] = {1.5f, -3};
    /* Every alignment: spaces make the head longer. */
    for (int spaces = 0; spaces < 8; spaces++) {
        char head[256];
        snprintf(head, sizeof head, "%*s%s", spaces, "", INPUTS(BINARY("FP32", "[1,2]", "8")));
        take_bytes(text, with_binary(text, head, two, 8), (int64_t)strlen(head), two, 8);
    }
    const char *head = INPUTS(BINARY("FP32", "[1,2]", "8") "," BINARY("INT64", "[1]", "8"));
    struct proto_infer infer;
    struct proto_error error;
    void *copy;
    int64_t id = -7;
    memcpy(text + 512, two, 8);
    memcpy(text + 520, &id, 8);
    size_t n = with_binary(text, head, text + 512, 16);
    assert_int_equal(parse_bytes(text, n, (int64_t)strlen(head), &infer, &error, &copy), PROTO_OK);
    assert_ptr_equal(infer.input[0].data, (char *)copy + strlen(head));
    assert_ptr_equal(infer.input[1].data, (char *)copy + strlen(head) + 8);
    assert_memory_equal(infer.input[1].data, &id, 8);
    assert_false(infer.input[0].owned);
    proto_infer_finish(&infer);
    free(copy);
    /* JSON and binary mixed. */
    head = INPUTS("{\"name\":\"j\",\"datatype\":\"FP32\",\"shape\":[1],\"data\":[2]}," BINARY("FP32", "[1,2]", "8"));
    n = with_binary(text, head, two, 8);
    assert_int_equal(parse_bytes(text, n, (int64_t)strlen(head), &infer, &error, &copy), PROTO_OK);
    assert_memory_equal(infer.input[1].data, two, 8);
    proto_infer_finish(&infer);
    free(copy);
    /* Some clients send the header though all is JSON. */
    take_bytes(FP32("[1]", "[1]"), strlen(FP32("[1]", "[1]")), (int64_t)strlen(FP32("[1]", "[1]")), (float[]){1}, 4);
    /* No rows: a binary tensor of no bytes is binary still. */
    head = INPUTS(BINARY("FP32", "[0,2]", "0"));
    take_bytes(head, strlen(head), (int64_t)strlen(head), "", 0);

    head = INPUTS(BINARY("FP32", "[1,2]", "8"));
    int64_t length = (int64_t)strlen(head);
    refuse(head, PROTO_BAD_REQUEST, "the header Inference-Header-Content-Length is missing");
    n = with_binary(text, head, two, 8);
    char follows[160];
    snprintf(follows, sizeof follows,
             "something follows the value at byte %d; before tensors' bytes, the header Inference-Header-Content-Length", (int)length);
    refuse_bytes(text, n, -1, PROTO_BAD_JSON, follows);
    refuse_bytes(text, n, (int64_t)n + 1, PROTO_BAD_REQUEST, "Inference-Header-Content-Length is");
    refuse_bytes(text, n, -2, PROTO_BAD_REQUEST, "Inference-Header-Content-Length is -2");
    refuse_bytes(text, n, INT64_MAX, PROTO_BAD_REQUEST, "Inference-Header-Content-Length is 9223372036854775807");
    refuse_bytes(text, n, 0, PROTO_BAD_JSON, "empty");
    refuse_bytes(text, n, length - 1, PROTO_BAD_JSON, "");
    refuse_bytes(text, n, length + 1, PROTO_BAD_JSON, "");
    refuse_bytes(text, n - 1, length, PROTO_BAD_REQUEST, "binary_data_size is 8, but of the 7 bytes that follow the JSON 7 are left");
    refuse_bytes(text, n + 1, length, PROTO_BAD_REQUEST, "add up to 8, but 9 bytes follow the JSON");
    refuse_bytes(FP32("[1]", "[1]") "x", strlen(FP32("[1]", "[1]")) + 1, (int64_t)strlen(FP32("[1]", "[1]")), PROTO_BAD_REQUEST,
                 "add up to 0, but 1 bytes follow");
    head = INPUTS(BINARY("FP32", "[1,3]", "8"));
    n = with_binary(text, head, two, 8);
    refuse_bytes(text, n, (int64_t)strlen(head), PROTO_BAD_TENSOR,
                 "inputs[0] 'FP32': binary_data_size is 8, but shape [1,3] of FP32 takes 12");
    head = INPUTS(BINARY("FP32", "[1,2]", "-8"));
    refuse_bytes(head, strlen(head), (int64_t)strlen(head), PROTO_BAD_REQUEST, "binary_data_size is -8");
    head = INPUTS(BINARY("FP32", "[1,2]", "8.0"));
    refuse_bytes(head, strlen(head), (int64_t)strlen(head), PROTO_BAD_REQUEST, "binary_data_size must be an integer, not a real number");
    head = INPUTS(BINARY("FP32", "[1,2]", "9223372036854775807") "," BINARY("INT64", "[1]", "9223372036854775807"));
    refuse_bytes(head, strlen(head), (int64_t)strlen(head), PROTO_BAD_REQUEST, "0 are left");
}

static void binary_strings(void **state)
{
    char text[512];
    const char *head = INPUTS(BINARY("BYTES", "[2]", "11"));
    int64_t length = (int64_t)strlen(head);
    take_bytes(text, with_binary(text, head, "\3\0\0\0a\0b\0\0\0\0", 11), length, "\3\0\0\0a\0b\0\0\0\0", 11);
    refuse_bytes(text, with_binary(text, head, "\4\0\0\0a\0b\0\0\0\0", 11), length, PROTO_BAD_TENSOR,
                 "end before the length of element 1 of 2");
    refuse_bytes(text, with_binary(text, head, "\10\0\0\0a\0b\0\0\0\0", 11), length, PROTO_BAD_TENSOR,
                 "element 0 says 8 bytes, but 7 are left");
    refuse_bytes(text, with_binary(text, head, "\377\377\377\377a\0b\0\0\0\0", 11), length, PROTO_BAD_TENSOR, "says 4294967295 bytes");
    refuse_bytes(text, with_binary(text, head, "\2\0\0\0a\0\0\0\0\0b", 11), length, PROTO_BAD_TENSOR,
                 "1 bytes follow the last of 2 elements");
    head = INPUTS(BINARY("BYTES", "[1000000000000]", "4"));
    refuse_bytes(text, with_binary(text, head, "\0\0\0\0", 4), (int64_t)strlen(head), PROTO_BAD_TENSOR, "element 1 of 1000000000000");
}

/* Whatever a caller sends comes back as valid UTF-8 that fits. */
static void sentences(void **state)
{
    char text[2048];
    size_t n = (size_t)sprintf(text, "{\"parameters\":{\"mode\":\"");
    for (int i = 0; i < 300; i++)
        n += (size_t)sprintf(text + n, "\xe2\x82\xac");
    sprintf(text + n, "\"}" ONE);
    refuse(text, PROTO_BAD_REQUEST, "\xe2\x82\xac...'; it may be");
    refuse("{\"parameters\":{\"mode\":\"a\\u0007\\u007fb\"}" ONE, PROTO_BAD_REQUEST,
           "'a\xef\xbf\xbd\xef\xbf\xbd"
           "b'");
}

/* jansson's tree takes many times the text. */
static void bulk_outside_data(void **state)
{
    size_t size = (2u << 20) + 200, n;
    char *text = malloc(size);
    assert_non_null(text);
    n = (size_t)sprintf(text, "{\"a\":[[]");
    while (n < size - 150) {
        memcpy(text + n, ",[]", 3);
        n += 3;
    }
    strcpy(text + n, "]" ONE);
    refuse(text, PROTO_BAD_REQUEST, "besides the inputs' data; at most 1048576 are taken");
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whole_request),
        cmocka_unit_test(not_json),
        cmocka_unit_test(depth),
        cmocka_unit_test(duplicates),
        cmocka_unit_test(escaped_names),
        cmocka_unit_test(members),
        cmocka_unit_test(many_inputs),
        cmocka_unit_test(parameters),
        cmocka_unit_test(outputs),
        cmocka_unit_test(nesting),
        cmocka_unit_test(elements),
        cmocka_unit_test(strings),
        cmocka_unit_test(binary),
        cmocka_unit_test(binary_strings),
        cmocka_unit_test(sentences),
        cmocka_unit_test(bulk_outside_data),
        cmocka_unit_test(misnamed_adapters),
        cmocka_unit_test(shapes_are_looked_at_first),
    };
    return cmocka_run_group_tests_name("proto_infer", tests, NULL, NULL);
}
