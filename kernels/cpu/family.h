/* SPDX-License-Identifier: Apache-2.0
 *
 * What the sources that are compiled once for each instruction family share with each other and with the sources that are not.
 */
#ifndef EXPERTD_KERNELS_CPU_FAMILY_H
#define EXPERTD_KERNELS_CPU_FAMILY_H

#include "kernels/cpu/layout.h"
#include "kernels/cpu/pool.h"

/* Some consecutive positions of one expert, small enough that their packed inputs fit a thread's scratch. */
struct tile {
    int32_t expert, first, rows;
};

/* Cuts every expert's positions into tiles of at most `rows`, into f->work; returns how many. */
int32_t tiles_cut(const struct kernel_forward *f, int32_t rows);

/* In how many ranges to cut `blocks`, so that `tiles` times as many items keep all threads busy to the end. */
int32_t tiles_ranges(const struct kernel_stream *stream, int32_t tiles, int32_t blocks);

/* NULL: that projection of that expert is not adapted. */
static inline const struct kernel_lora_entry *lora_find(const struct kernel_forward *f, int32_t expert, int32_t adapter,
                                                        enum kernel_projection p)
{
    if (!f->lora.entry || adapter < 0)
        return NULL;
    const struct kernel_lora_entry *e =
        &f->lora.entry[((size_t)adapter * (size_t)f->dims.experts + (size_t)expert) * KERNEL_PROJECTIONS + p];
    return e->a ? e : NULL;
}

static inline int32_t adapter_at(const struct kernel_forward *f, int32_t position)
{
    return f->batch.row[f->batch.slot_row[f->routing.order[position]]].adapter;
}

size_t route_work_bytes(const struct kernel_dims *d, int32_t max_rows, int32_t max_slots, int32_t max_rank);
enum kernel_status route_step(struct kernel_stream *stream, const struct kernel_forward *f);

/* The steps of one family. */
#define FAMILY_DECLARE(name)                                                                                                               \
    enum kernel_status enter_##name(struct kernel_stream *, const struct kernel_forward *);                                                \
    enum kernel_status shrink_gate_up_##name(struct kernel_stream *, const struct kernel_forward *);                                       \
    enum kernel_status gate_up_##name(struct kernel_stream *, const struct kernel_forward *);                                              \
    enum kernel_status shrink_down_##name(struct kernel_stream *, const struct kernel_forward *);                                          \
    enum kernel_status down_##name(struct kernel_stream *, const struct kernel_forward *);                                                 \
    enum kernel_status combine_##name(struct kernel_stream *, const struct kernel_forward *)

FAMILY_DECLARE(generic);
FAMILY_DECLARE(avx2);
FAMILY_DECLARE(avx512);
FAMILY_DECLARE(avx512bf16);
FAMILY_DECLARE(amx);

#endif
