/* SPDX-License-Identifier: Apache-2.0
 *
 * How long a request and an answer of 64 x 4096 numbers take as JSON, on one core: the best and the median of several runs.
 * Numbers are written as Python's json module writes a float32 taken for a double: 17 or 18 digits.
 */
#include "proto-json/proto.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { ROWS = 64, COLUMNS = 4096, RUNS = 15 };

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void report(const char *what, enum dtype type, double *ms, size_t bytes)
{
    qsort(ms, RUNS, sizeof *ms, compare);
    printf("%-5s %-4s  best %6.2f ms  median %6.2f ms  %5.1f ns a number  %zu bytes\n", what, dtype_name(type), ms[0], ms[RUNS / 2],
           ms[0] * 1e6 / (ROWS * COLUMNS), bytes);
}

/* Roughly normal values, the same in every run. */
static float next_value(uint64_t *state)
{
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        *state = *state * 6364136223846793005u + 1442695040888963407u;
        sum += (float)(*state >> 40) * 0x1p-23f - 1.0f;
    }
    return sum;
}

static bool bench_type(enum dtype type)
{
    size_t capacity = (size_t)ROWS * COLUMNS * 26 + 256, used;
    char *text = malloc(capacity);
    if (!text)
        return false;
    used = (size_t)snprintf(text, capacity, "{\"inputs\":[{\"name\":\"hidden\",\"datatype\":\"%s\",\"shape\":[%d,%d],\"data\":[",
                            dtype_name(type), ROWS, COLUMNS);
    uint64_t state = 1;
    for (int i = 0; i < ROWS * COLUMNS; i++) {
        double v = dtype_round_f32(type, next_value(&state));
        int digits = 15;
        char number[320];
        do {
            snprintf(number, sizeof number, "%.*g", digits++, v);
        } while (strtod(number, NULL) != v);
        used += (size_t)snprintf(text + used, capacity - used, "%s%s", i ? ", " : "", number);
    }
    used += (size_t)snprintf(text + used, capacity - used, "]}]}");

    double parse[RUNS], write[RUNS];
    size_t written = 0;
    bool ok = true;
    for (int run = 0; ok && run < RUNS; run++) {
        struct proto_infer infer;
        struct proto_error error;
        double start = now_ms();
        ok = proto_infer_parse(text, used, -1, NULL, &infer, &error) == PROTO_OK;
        parse[run] = now_ms() - start;
        if (!ok) {
            fprintf(stderr, "parse: %s\n", error.message);
            break;
        }
        struct proto_answer answer = {
            .model_name = "m", .path = "prefill", .rows = ROWS, .hidden_size = COLUMNS, .dtype = type, .data = infer.input[0].data};
        char *json;
        start = now_ms();
        ok = proto_answer_write(&answer, &json, &written, &error) == PROTO_OK;
        write[run] = now_ms() - start;
        if (!ok)
            fprintf(stderr, "write: %s\n", error.message);
        free(json);
        proto_infer_finish(&infer);
    }
    free(text);
    if (!ok)
        return false;
    report("parse", type, parse, used);
    report("write", type, write, written);
    return true;
}

int main(void) { return bench_type(DTYPE_FP32) && bench_type(DTYPE_BF16) && bench_type(DTYPE_FP16) ? 0 : 1; }
