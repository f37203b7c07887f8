/* SPDX-License-Identifier: Apache-2.0
 *
 * What tests of adapters share: a model without weights, and adapter folders made on the spot.
 */
#ifndef EXPERTD_TESTS_ADAPTER_FILES_H
#define EXPERTD_TESTS_ADAPTER_FILES_H

#include "engine/model.h"
#include "tests/unit/scratch.h"

struct test_model_shape {
    int32_t experts, hidden, inter;
    enum dtype op;
    bool transposed, interleaved;
    int64_t checkpoint_layers;
    int32_t layers[4]; /* held, ended by -1 */
    int32_t held[8]; /* experts held, ended by -1; all of them when it starts with -1 */
};

/* Dimensions as the reference kernels pad them. Free with test_model_destroy. */
struct model *test_model_create(const struct test_model_shape *shape);
void test_model_destroy(struct model *model);

/* Adds a tensor whose element i is value(i), small and distinct for a seed. */
void test_adapter_tensor(struct st_writer *w, const char *name, const char *dtype, int64_t rows, int64_t cols, unsigned seed);
float test_adapter_value(unsigned seed, int64_t i);

/* A folder `name` in s with one Linear for each projection of experts 0.. of each layer: an adapter for the shape. */
void test_adapter_write(const struct scratch *s, const char *name, const struct test_model_shape *shape, int layer, int experts, int rank,
                        unsigned seed);

#endif
