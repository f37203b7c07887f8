/* SPDX-License-Identifier: Apache-2.0
 *
 * Any bytes as a request: no crash, no leak, and what is taken keeps the header's word. The first byte says where the JSON ends,
 * the rest is the body. As a libFuzzer target with -Dfuzz=enabled (clang), else with replay.c over the files in infer/.
 */
#include "proto-json/proto.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t length);

#define HOLDS(condition)                                                                                                                   \
    do {                                                                                                                                   \
        if (!(condition)) {                                                                                                                \
            fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition);                                                  \
            abort();                                                                                                                       \
        }                                                                                                                                  \
    } while (0)

/* A sentence is UTF-8 without NUL that ends, and the reason is never a lack of memory: nothing here asks for much. */
static void check_error(enum proto_code code, const struct proto_error *error)
{
    size_t length;
    HOLDS(code == error->code && code != PROTO_OUT_OF_MEMORY);
    HOLDS(memchr(error->message, 0, sizeof error->message) && error->message[0]);
    json_t *plain = json_string(error->message);
    HOLDS(plain);
    json_decref(plain);
    char *text = proto_error_json(error->message, proto_code_name(code), "r", &length);
    json_t *tree = json_loadb(text, length, JSON_REJECT_DUPLICATES, NULL);
    HOLDS(tree && !strcmp(json_string_value(json_object_get(tree, "error")), error->message));
    json_decref(tree);
    free(text);
}

static void check_tensor(const struct proto_tensor *tensor)
{
    size_t product = 1;
    HOLDS(tensor->rank >= 1 && tensor->rank <= PROTO_MAX_RANK && tensor->name[0]);
    for (int32_t i = 0; i < tensor->rank; i++)
        product *= (size_t)tensor->shape[i];
    HOLDS(product == tensor->elements);
    unsigned char sum = 0;
    for (size_t i = 0; i < tensor->bytes; i++)
        sum = (unsigned char)(sum + ((const unsigned char *)tensor->data)[i]);
    (void)*(volatile unsigned char *)&sum;
    if (tensor->dtype == DTYPE_BYTES) {
        size_t cursor = 0, size, count = 0;
        const char *data;
        while (proto_bytes_next(tensor, &cursor, &data, &size)) {
            HOLDS(data + size <= (const char *)tensor->data + tensor->bytes);
            count++;
        }
        HOLDS(cursor == tensor->bytes && count == tensor->elements);
    } else {
        HOLDS(tensor->bytes == tensor->elements * dtype_size(tensor->dtype));
    }
}

/* Finite numbers written as an answer and read again are the same. */
static void check_round_trip(const struct proto_tensor *tensor, bool binary)
{
    struct proto_answer answer = {.model_name = "m",
                                  .id = tensor->name,
                                  .path = "decode",
                                  .rows = (int64_t)tensor->elements,
                                  .hidden_size = 1,
                                  .dtype = tensor->dtype,
                                  .data = tensor->data,
                                  .binary = binary};
    struct proto_error error;
    struct proto_infer again;
    char *json;
    size_t length;
    enum proto_code code = proto_answer_write(&answer, &json, &length, &error);
    if (code) {
        HOLDS(code == PROTO_NON_FINITE_OUTPUT && !binary && !tensor->owned);
        check_error(code, &error);
        return;
    }
    json_t *tree = json_loadb(json, length, JSON_REJECT_DUPLICATES, NULL);
    HOLDS(tree);
    json_decref(tree);
    if (!binary) {
        const char *outputs = strstr(json, "[{\"name\":\"hidden\"");
        char *text = malloc(length + 16);
        HOLDS(outputs && text);
        int n = snprintf(text, length + 16, "{\"inputs\":%s", outputs);
        HOLDS(n > 0 && !proto_infer_parse(text, (size_t)n, -1, NULL, &again, &error));
        HOLDS(again.input[0].bytes == tensor->bytes && (!tensor->bytes || !memcmp(again.input[0].data, tensor->data, tensor->bytes)));
        proto_infer_finish(&again);
        free(text);
    }
    free(json);
}

static void check_bodies(const char *body, size_t length)
{
    struct proto_install install;
    struct proto_vllm_lora lora;
    struct proto_error error;
    json_t *tree;
    enum proto_code code = proto_object_parse(body, length, true, &tree, &error);
    if (code)
        check_error(code, &error);
    json_decref(tree);
    if (!proto_install_parse(body, length, &install, &error))
        HOLDS(install.name && install.path);
    proto_install_finish(&install);
    if (!proto_vllm_lora_parse(body, length, true, &lora, &error))
        HOLDS(lora.lora_name && lora.lora_path);
    proto_vllm_lora_finish(&lora);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t length)
{
    if (!length)
        return 0;
    const char *body = (const char *)bytes + 1;
    length--;
    /* 0: no header; 1..99: the JSON ends so many bytes before the body; else at its last '}'. */
    int64_t head = -1;
    if (bytes[0] >= 100) {
        const char *last = length ? memrchr(body, '}', length) : NULL;
        head = last ? last + 1 - body : 0;
    } else if (bytes[0]) {
        head = (int64_t)length - bytes[0] + 1;
    }
    struct proto_infer infer;
    struct proto_error error;
    enum proto_code code = proto_infer_parse(body, length, head, NULL, &infer, &error);
    if (code) {
        HOLDS(!infer.inputs);
        check_error(code, &error);
    }
    for (int32_t i = 0; i < infer.inputs; i++) {
        check_tensor(&infer.input[i]);
        HOLDS(proto_infer_find(&infer, infer.input[i].name) == &infer.input[i]);
        if (dtype_is_float(infer.input[i].dtype))
            check_round_trip(&infer.input[i], infer.binary_output);
    }
    proto_infer_finish(&infer);
    check_bodies(body, length);
    return 0;
}
