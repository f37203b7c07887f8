/* SPDX-License-Identifier: Apache-2.0
 *
 * The forward sequence, written once for every back end, and the layout of the scratch that it works in.
 */
#include "engine/device.h"

#include <stdint.h>

enum kernel_status forward_run(const struct kernel_table *kernels, struct kernel_stream *stream, const struct kernel_forward *f)
{
    bool adapted = f->lora.entry != NULL;
    enum kernel_status status = kernels->enter(stream, f);
    if (status == KERNEL_OK)
        status = kernels->route(stream, f);
    if (status == KERNEL_OK && adapted)
        status = kernels->shrink_gate_up(stream, f);
    if (status == KERNEL_OK)
        status = kernels->gate_up(stream, f);
    if (status == KERNEL_OK && adapted)
        status = kernels->shrink_down(stream, f);
    if (status == KERNEL_OK)
        status = kernels->down(stream, f);
    if (status == KERNEL_OK)
        status = kernels->combine(stream, f);
    return status;
}

/* Every array starts on a multiple of this, which suits vector loads and keeps two arrays out of one cache line. */
enum { SCRATCH_ALIGN = 256 };

/* Takes `count * size` bytes from the end of what was taken before; returns their offset. */
static size_t scratch_take(size_t *total, size_t count, size_t size)
{
    size_t at = *total, bytes, end;
    if (__builtin_mul_overflow(count, size, &bytes) || __builtin_add_overflow(at, bytes, &end) || end > SIZE_MAX - SCRATCH_ALIGN) {
        *total = SIZE_MAX - SCRATCH_ALIGN; /* no allocation of that size can succeed */
        return 0;
    }
    *total = (end + SCRATCH_ALIGN - 1) / SCRATCH_ALIGN * SCRATCH_ALIGN;
    return at;
}

size_t forward_bind_scratch(const struct kernel_table *kernels, const struct device_limits *limits, void *base, struct kernel_forward *f)
{
    const struct kernel_dims *d = &limits->dims;
    size_t rows = (size_t)limits->max_rows, slots = (size_t)limits->max_slots, experts = (size_t)d->experts, op = dtype_size(d->op);
    size_t rank = limits->adapters > 0 ? KERNEL_MAX_RANK : 0, total = 0;
    size_t x = scratch_take(&total, rows, (size_t)d->hidden_pad * op);
    size_t h = scratch_take(&total, slots, (size_t)d->inter_pad * op);
    size_t y = scratch_take(&total, slots, (size_t)d->hidden_pad * op);
    size_t s_gate = scratch_take(&total, slots, rank * op);
    size_t s_up = scratch_take(&total, slots, rank * op);
    size_t s_down = scratch_take(&total, slots, rank * op);
    size_t order = scratch_take(&total, slots, sizeof(int32_t));
    size_t position = scratch_take(&total, slots, sizeof(int32_t));
    size_t expert_offset = scratch_take(&total, experts + 1, sizeof(int32_t));
    size_t segment_count = scratch_take(&total, 1, sizeof(int32_t));
    size_t segment_begin = scratch_take(&total, slots + 1, sizeof(int32_t));
    size_t segment_expert = scratch_take(&total, slots, sizeof(int32_t));
    size_t segment_adapter = scratch_take(&total, slots, sizeof(int32_t));
    size_t work = scratch_take(&total, kernels->work_bytes(d, limits->max_rows, limits->max_slots, (int32_t)rank), 1);
    if (!f)
        return total;
    char *b = base;
    f->dims = *d;
    f->x = b + x;
    f->h = b + h;
    f->y = b + y;
    f->s_gate = b + s_gate;
    f->s_up = b + s_up;
    f->s_down = b + s_down;
    f->routing = (struct kernel_routing){
        .order = (int32_t *)(b + order),
        .position = (int32_t *)(b + position),
        .expert_offset = (int32_t *)(b + expert_offset),
        .segment_count = (int32_t *)(b + segment_count),
        .segment_begin = (int32_t *)(b + segment_begin),
        .segment_expert = (int32_t *)(b + segment_expert),
        .segment_adapter = (int32_t *)(b + segment_adapter),
    };
    f->work = b + work;
    f->lora.max_rank = (int32_t)rank;
    return total;
}
