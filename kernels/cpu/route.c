/* SPDX-License-Identifier: Apache-2.0
 *
 * Sorting slots by (expert, adapter) and cutting the result into work; on the calling thread, since a large batch has a few
 * thousand slots per millisecond of products. Needs no instruction family of its own.
 */
#include "kernels/cpu/family.h"

#define DIGIT_BITS 11

static int32_t adapter_of(const struct kernel_batch *b, int32_t slot) { return b->row[b->slot_row[slot]].adapter; }

size_t route_work_bytes(const struct kernel_dims *d, int32_t max_rows, int32_t max_slots, int32_t max_rank)
{
    /* route sorts through one array of slots; later steps put tiles there, at most one for each slot. */
    return (size_t)(max_slots > 0 ? max_slots : 1) * sizeof(struct tile);
}

/* Stable sort of `n` slots by one digit of adapter + 1. */
static void sort_digit(const struct kernel_batch *b, const int32_t *from, int32_t *to, int32_t n, int shift)
{
    int32_t count[(1 << DIGIT_BITS) + 1] = {0};
    const uint32_t mask = (1 << DIGIT_BITS) - 1;
    for (int32_t i = 0; i < n; i++)
        count[((uint32_t)(adapter_of(b, from[i]) + 1) >> shift & mask) + 1]++;
    for (uint32_t i = 0; i < mask; i++)
        count[i + 1] += count[i];
    for (int32_t i = 0; i < n; i++)
        to[count[(uint32_t)(adapter_of(b, from[i]) + 1) >> shift & mask]++] = from[i];
}

enum kernel_status route_step(struct kernel_stream *stream, const struct kernel_forward *f)
{
    const struct kernel_batch *b = &f->batch;
    const struct kernel_routing *r = &f->routing;
    int32_t experts = f->dims.experts, valid = 0, top_adapter = -1;
    int32_t *next = r->expert_offset;
    memset(next, 0, (size_t)(experts + 1) * sizeof *next);

    /* Least significant key first: adapters, then experts. `order` and `work` take turns; the last pass must read `work`. */
    int32_t *sorted = f->work, *other = r->order;
    for (int32_t s = 0; s < b->slots; s++) {
        r->position[s] = -1;
        if (b->slot_expert[s] < 0)
            continue;
        next[b->slot_expert[s] + 1]++;
        int32_t adapter = adapter_of(b, s);
        top_adapter = adapter > top_adapter ? adapter : top_adapter;
        sorted[valid++] = s;
    }
    for (int shift = 0; (uint32_t)(top_adapter + 1) >> shift; shift += DIGIT_BITS) {
        sort_digit(b, sorted, other, valid, shift);
        int32_t *swap = sorted;
        sorted = other;
        other = swap;
    }
    if (sorted == r->order && valid)
        sorted = memcpy(other, sorted, (size_t)valid * sizeof *sorted);
    for (int32_t e = 0; e < experts; e++)
        next[e + 1] += next[e];
    for (int32_t i = 0; i < valid; i++) {
        int32_t slot = sorted[i], position = next[b->slot_expert[slot]]++;
        r->order[position] = slot;
        r->position[slot] = position;
    }
    /* Every offset has advanced to the next expert's. */
    memmove(next + 1, next, (size_t)experts * sizeof *next);
    next[0] = 0;

    int32_t segments = 0, expert = -1, adapter = -1;
    for (int32_t p = 0; p < valid; p++) {
        int32_t e = b->slot_expert[r->order[p]], a = adapter_at(f, p);
        if (e == expert && a == adapter)
            continue;
        r->segment_begin[segments] = p;
        r->segment_expert[segments] = expert = e;
        r->segment_adapter[segments++] = adapter = a;
    }
    r->segment_begin[segments] = valid;
    *r->segment_count = segments;
    return KERNEL_OK;
}

int32_t tiles_cut(const struct kernel_forward *f, int32_t rows)
{
    struct tile *tile = f->work;
    int32_t n = 0;
    for (int32_t e = 0; e < f->dims.experts; e++) {
        int32_t p = f->routing.expert_offset[e], left = f->routing.expert_offset[e + 1] - p;
        /* Tiles of nearly equal height. */
        for (int32_t parts = (left + rows - 1) / rows; parts; parts--) {
            int32_t height = (left + parts - 1) / parts;
            tile[n++] = (struct tile){e, p, height};
            p += height;
            left -= height;
        }
    }
    return n;
}

int32_t tiles_ranges(const struct kernel_stream *stream, int32_t tiles, int32_t blocks)
{
    int32_t ranges = (24 * kernels_cpu_stream_threads(stream) + tiles - 1) / tiles;
    return ranges < 1 ? 1 : ranges > blocks ? blocks : ranges;
}
