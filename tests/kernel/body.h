/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs a problem on a kernel table, step by step, with memory that the table's device can reach: one body for every back end.
 */
#ifndef EXPERTD_TESTS_KERNEL_BODY_H
#define EXPERTD_TESTS_KERNEL_BODY_H

#include "problem.h"

/* Memory of a device, as the body needs it; `alloc` fails the test itself rather than return NULL. */
struct body_memory {
    void *(*alloc)(size_t bytes);
    void (*free)(void *p);
    void (*upload)(void *dst, const void *src, size_t bytes);
    void (*download)(void *dst, const void *src, size_t bytes);
    void (*fill)(void *dst, int byte, size_t bytes);
};

/* Of the host. */
extern const struct body_memory body_host_memory;

/* An implementation under test. */
struct body_target {
    const struct kernel_table *table;
    struct kernel_stream *stream;
    const struct body_memory *memory;
};

enum body_step { BODY_ENTER, BODY_ROUTE, BODY_SHRINK_GATE_UP, BODY_GATE_UP, BODY_SHRINK_DOWN, BODY_DOWN, BODY_COMBINE, BODY_STEPS };
extern const char *const body_step_name[BODY_STEPS];

/* A problem resident on a target: weights and adapters packed, scratch and outputs poisoned with 0xff. */
struct body;
struct body *body_create(const struct body_target *target, const struct problem *p);
void body_destroy(struct body *b);

/* Another batch over the same layer: `p` is a problem_select of the first, or the first. Poisons scratch and outputs again.
 * `adapters` false: as if none were installed. */
void body_set_batch(struct body *b, const struct problem *p, enum kernel_path path, bool adapters);

/* From here on as if adapters were installed, or none; nothing else changes, also while launched steps are still to be done. */
void body_set_adapters(struct body *b, bool adapters);

void body_step(struct body *b, enum body_step step); /* and waits for it */
void body_launch(struct body *b); /* all steps, as the engine does: without waiting */
void body_wait(struct body *b);
void body_run(struct body *b); /* all steps, and waits */

/* What the steps have written, in host memory without padding, to free(). Operand elements become floats. */
struct body_routing {
    int32_t valid, segments;
    int32_t *order, *position, *expert_offset, *begin, *expert, *adapter;
};
void body_routing_get(struct body *b, struct body_routing *r);
void body_routing_finish(struct body_routing *r);

enum body_array { BODY_X, BODY_S_GATE, BODY_S_UP, BODY_S_DOWN, BODY_H, BODY_Y };
/* Rows of x or positions of the others; `width` gets the elements of a row. Padding is checked to be zero in x and h. */
float *body_get(struct body *b, enum body_array array, int32_t *rows, int32_t *width);
/* The reverse: puts rows of `width` in place, padding zero. */
void body_put(struct body *b, enum body_array array, const float *values, int32_t rows, int32_t width);
/* The output bytes, laid out as the problem's rows say; untouched bytes are 0xff. */
char *body_output(struct body *b);

#endif
