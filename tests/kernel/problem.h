/* SPDX-License-Identifier: Apache-2.0
 *
 * A random layer and batch, in host memory and in no back end's layout: what every implementation is run on.
 */
#ifndef EXPERTD_TESTS_KERNEL_PROBLEM_H
#define EXPERTD_TESTS_KERNEL_PROBLEM_H

#include "kernels/kernels.h"

/* Where the experts of a batch's slots come from. */
enum spread {
    SPREAD_UNIFORM, /* any expert, different ones within a row */
    SPREAD_ONE, /* all to one expert in the middle: the others are empty */
    SPREAD_ENDS, /* the first and the last expert only */
    SPREAD_REPEATED, /* any expert, also the same one twice in a row */
};

struct problem_options {
    int32_t experts, hidden, inter;
    enum dtype op;
    enum kernel_activation activation;
    bool weight_on_input, bias;
    int32_t rows, k; /* slots of a row; 0: any number from 0 to experts */
    enum spread spread;
    int32_t skipped; /* one of this many slots has expert -1; 0: none */
    int32_t adapters; /* 0: no adapters at all */
    int32_t rank; /* of all adapters; 0: from 1 to 512, different ones side by side */
    bool subset; /* only some experts and projections are adapted, among them the first and the last */
    bool share_a; /* gate and up of an expert share A */
    bool mixed_dtypes; /* rows differ in type; else bf16 */
    bool misaligned; /* rows begin at odd addresses */
    bool filler; /* some rows have no slots and no data */
    bool cancelling; /* sums of base rows cancel: another order of their terms shows in the result's leading bits */
    uint32_t seed;
};

/* An adapter's part in one projection of one expert; rank 0: none. */
struct problem_delta {
    int32_t rank;
    float scale;
    uint16_t *a, *b; /* row-major [rank, in], [out, rank] */
};

struct problem {
    struct problem_options o;
    uint16_t *weight[KERNEL_PROJECTIONS]; /* [experts, out, in] */
    float *bias[KERNEL_PROJECTIONS]; /* [experts, out] or NULL */
    struct problem_delta *delta; /* [adapters, experts, projections] */
    struct kernel_row *row; /* `in` and `out` are byte offsets into `input` and the output; -1: filler */
    int32_t *slot_row, *slot_expert;
    float *slot_weight;
    int32_t slots;
    char *input;
    size_t io_bytes;
};

struct problem *problem_create(const struct problem_options *o);
void problem_destroy(struct problem *p); /* NULL is fine */

/* A part of `p`: its rows listed in `rows`, in that order. Shares everything but the batch with `p`, which must outlive it. */
struct problem *problem_select(const struct problem *p, const int32_t *rows, int32_t count);
void problem_select_destroy(struct problem *part);

/* Elements of a projection's row and rows. */
int32_t problem_in(const struct problem *p, enum kernel_projection projection);
int32_t problem_out(const struct problem *p, enum kernel_projection projection);

/* Element `i` of row `t` of the input becomes `v`. */
void problem_poke(struct problem *p, int32_t t, int32_t i, float v);

/* Test programs end when they have no memory. */
void *problem_alloc(size_t bytes);

uint32_t problem_random(uint32_t *state); /* 32 bits */
float problem_normal(uint32_t *state); /* mean 0, variance 1, bounded */

#endif
