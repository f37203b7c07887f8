/* SPDX-License-Identifier: Apache-2.0
 *
 * Values of files as operands (bf16 or fp16), at loading speed, with a count of those that are no finite numbers.
 */
#ifndef EXPERTD_ENGINE_CONVERT_H
#define EXPERTD_ENGINE_CONVERT_H

#include "kernels/dtype.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct convert_tally {
    int64_t non_finite; /* in the source */
    bool overflow; /* a finite value became infinite */
};

/* `v` as an operand type's bits. */
static inline uint16_t convert_narrow(float v, enum dtype op) { return op == DTYPE_FP16 ? dtype_f32_to_fp16(v) : dtype_f32_to_bf16(v); }

static inline uint16_t convert_one(const void *src, enum dtype from, enum dtype op, struct convert_tally *t)
{
    float v = dtype_load_f32(src, from);
    uint16_t out = convert_narrow(v, op);
    bool finite = isfinite(v);
    t->non_finite += !finite;
    t->overflow |= finite && op == DTYPE_FP16 && (out & 0x7fff) == 0x7c00;
    return out;
}

/* Values that are operands already; any alignment. */
void convert_count_non_finite(const void *src, enum dtype type, size_t n, struct convert_tally *t);
/* `from` differs from `op`; src of any alignment. */
void convert_values(uint16_t *dst, enum dtype op, const void *src, enum dtype from, size_t n, struct convert_tally *t);

#endif
