/* SPDX-License-Identifier: Apache-2.0
 *
 * The infer response: its head, and the numbers when they go out as JSON.
 */
#include "proto-json/internal.h"

#include <inttypes.h>
#include <stdlib.h>

/* Bytes that a number takes with its comma, on an average. */
#define NUMBER_USUAL 13

static enum proto_code answer_write_data(const struct proto_answer *a, struct proto_text *text, struct proto_error *error)
{
    const char *from = a->data;
    size_t columns = (size_t)a->hidden_size, size = dtype_size(a->dtype), room, written;
    if (__builtin_mul_overflow(columns, (size_t)PROTO_NUMBER_LONGEST + 1, &room) ||
        __builtin_add_overflow(room, (size_t)PROTO_NUMBER_SPACE, &room))
        return proto_fail_memory(error);
    for (int64_t row = 0; row < a->rows; row++, from += columns * size) {
        if (!proto_text_reserve(text, room))
            return proto_fail_memory(error);
        char *end = proto_row_write(text->data + text->length, from, columns, a->dtype, &written);
        if (written < columns) {
            float v = dtype_load_f32(from + written * size, a->dtype);
            return proto_fail(error, PROTO_NON_FINITE_OUTPUT,
                              "output 'hidden': row %" PRId64 " has %s in column %zu, which JSON can't hold; ask for binary output", row,
                              v != v  ? "NaN"
                              : v > 0 ? "Infinity"
                                      : "-Infinity",
                              written);
        }
        text->length = (size_t)(end - text->data);
    }
    if (a->rows && columns)
        text->length--;
    return PROTO_OK;
}

enum proto_code proto_answer_write(const struct proto_answer *a, char **json, size_t *length, struct proto_error *error)
{
    struct proto_text text = {0};
    size_t elements, bytes, guess;
    *json = NULL;
    *length = 0;
    if (a->rows < 0 || a->hidden_size < 0 || __builtin_mul_overflow((size_t)a->rows, (size_t)a->hidden_size, &elements) ||
        __builtin_mul_overflow(elements, dtype_size(a->dtype), &bytes) || __builtin_mul_overflow(elements, (size_t)NUMBER_USUAL, &guess) ||
        __builtin_add_overflow(guess, (size_t)1024, &guess))
        return proto_fail_memory(error);
    proto_text_reserve(&text, a->binary ? 1024 : guess);
    proto_text_append(&text, "{\"model_name\":", 14);
    proto_text_string(&text, a->model_name, strlen(a->model_name));
    proto_text_format(&text, ",\"model_version\":\"1\"");
    if (a->id) {
        proto_text_append(&text, ",\"id\":", 6);
        proto_text_string(&text, a->id, strlen(a->id));
    }
    proto_text_format(&text, ",\"parameters\":{\"path\":");
    proto_text_string(&text, a->path, strlen(a->path));
    proto_text_format(&text, ",\"layer\":%" PRId64 ",\"rows\":%" PRId64 ",\"queue_us\":%" PRId64 ",\"compute_us\":%" PRId64 "}", a->layer,
                      a->rows, a->queue_us, a->compute_us);
    proto_text_format(&text, ",\"outputs\":[{\"name\":\"hidden\",\"datatype\":\"%s\",\"shape\":[%" PRId64 ",%" PRId64 "]",
                      dtype_name(a->dtype), a->rows, a->hidden_size);
    enum proto_code code = PROTO_OK;
    if (a->binary) {
        proto_text_format(&text, ",\"parameters\":{\"binary_data_size\":%zu}}]}", bytes);
    } else {
        proto_text_format(&text, ",\"data\":[");
        code = answer_write_data(a, &text, error);
        proto_text_format(&text, "]}]}");
    }
    if (code) {
        free(text.data);
        return code;
    }
    *json = proto_text_finish(&text, length);
    return *json ? PROTO_OK : proto_fail_memory(error);
}
