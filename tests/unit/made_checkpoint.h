/* SPDX-License-Identifier: Apache-2.0
 *
 * Checkpoints made to order for tests, in every layout, with weights that are a function of their place; and a device whose
 * memory is the heap, so that tests can say how much of it there is and whether the host may write to it.
 */
#ifndef EXPERTD_TESTS_MADE_CHECKPOINT_H
#define EXPERTD_TESTS_MADE_CHECKPOINT_H

#include "engine/device.h"
#include "engine/model.h"
#include "tests/unit/scratch.h"

enum made_layout { MADE_MIXTRAL, MADE_SEPARATE, MADE_GRANITE, MADE_FUSED, MADE_FUSED_TRANSPOSED, MADE_GPT_OSS, MADE_LLAMA4 };

/* A tensor about to be written. */
struct made_tensor {
    char name[200];
    const char *dtype;
    int rank;
    int64_t shape[4];
};

struct made {
    enum made_layout layout;
    const char *prefix; /* NULL: "model." */
    const char *dtype; /* NULL: "BF16" */
    int32_t experts, hidden, inter, first_layer, layers; /* 0: 4, 24, 16, 0, 2 */
    const char *config; /* config.json; NULL: model_type and sizes that fit */
    int32_t shards; /* 0: a single file; else an index and so many shards, tensors dealt round */
    float scale; /* of all values; 0: 1 */
    /* Changes a tensor; false leaves it out. */
    bool (*edit)(struct made_tensor *tensor);
};

/* Writes the checkpoint into the folder; fills the zeros of `made` with what they mean. */
void made_write(struct made *made, const struct scratch *folder);

/* Kinds 0 to 2 are projections, 3 to 5 their biases. Exact in BF16 and FP16. */
float made_value(int32_t layer, int32_t expert, int kind, int32_t row, int32_t column);

struct heap_device {
    struct device device;
    size_t batches; /* what its prepare will take */
    int64_t memory; /* what memory_info calls free */
    int64_t allocated; /* bytes that are out */
    int64_t allocations_left; /* alloc fails at 0; -1: never */
    int64_t uploaded;
};
void heap_device_init(struct heap_device *d, const struct kernel_table *kernels, bool direct_memory);
void heap_device_finish(struct heap_device *d);

/* One packed weight, as its operand type's bits; indices are among those held. For kernels whose layout keeps rows whole. */
uint16_t packed_weight(const struct kernel_table *kernels, const struct model *m, int32_t layer, int32_t expert, enum kernel_projection p,
                       int32_t row, int32_t column);

#endif
