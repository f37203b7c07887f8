/* SPDX-License-Identifier: Apache-2.0
 *
 * s = op(scale * A v) for the adapted positions. Compiled once for each family. A is row-major, so a product is a dot product
 * along K; four rank rows and a few positions at a time share their loads. Every sum has its own accumulator, whatever the shape
 * of the group that it is computed in.
 */
#include "kernels/cpu/family.h"
#include "kernels/cpu/vec.h"

#define RANKS 4 /* divides KERNEL_RANK_PAD */
#define POSITIONS 4 /* at most, at once */
#define RANK_RANGE 32 /* of an item */

struct shrink_job {
    const struct kernel_forward *f;
    bool down;
    int32_t ranges; /* of ranks, for each tile */
};

/* Adds the products of two vectors of pairs of elements. */
ALWAYS_INLINE vf dot_step(const bool fp16, vf sum, const uint16_t *a, const uint16_t *v)
{
    if (fp16) {
        sum = vf_fma(vf_load_fp16(a), vf_load_fp16(v), sum);
        return vf_fma(vf_load_fp16(a + VL), vf_load_fp16(v + VL), sum);
    }
#if defined(FAMILY_BF16)
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(a), (__m512bh)_mm512_loadu_si512(v));
#else
    vu pa = vu_load(a), pv = vu_load(v);
    sum = vf_fma((vf)(pa << 16), (vf)(pv << 16), sum);
    return vf_fma((vf)(pa & 0xffff0000u), (vf)(pv & 0xffff0000u), sum);
#endif
}

ALWAYS_INLINE void shrink_group(const int positions, const bool fp16, const uint16_t *a, size_t width, const uint16_t *const *v,
                                float scale, uint16_t *const *s)
{
    vf sum[POSITIONS][RANKS];
#pragma GCC unroll 4
    for (int r = 0; r < RANKS; r++)
#pragma GCC unroll 4
        for (int p = 0; p < positions; p++)
            sum[p][r] = vf_set(0);
    for (size_t k = 0; k < width; k += 2 * VL)
#pragma GCC unroll 4
        for (int r = 0; r < RANKS; r++)
#pragma GCC unroll 4
            for (int p = 0; p < positions; p++)
                sum[p][r] = dot_step(fp16, sum[p][r], a + r * width + k, v[p] + k);
#pragma GCC unroll 4
    for (int p = 0; p < positions; p++) {
        float whole[RANKS];
        vf_sum4(sum[p], whole);
#pragma GCC unroll 4
        for (int r = 0; r < RANKS; r++)
            dtype_store_f32(s[p] + r, fp16 ? DTYPE_FP16 : DTYPE_BF16, scale * whole[r]);
    }
}

static void shrink_bf16(int positions, const uint16_t *a, size_t width, const uint16_t *const *v, float scale, uint16_t *const *s)
{
    switch (positions) {
    case 1: shrink_group(1, false, a, width, v, scale, s); return;
    case 2: shrink_group(2, false, a, width, v, scale, s); return;
    case 3: shrink_group(3, false, a, width, v, scale, s); return;
    default: shrink_group(4, false, a, width, v, scale, s);
    }
}

static void shrink_fp16(int positions, const uint16_t *a, size_t width, const uint16_t *const *v, float scale, uint16_t *const *s)
{
    switch (positions) {
    case 1: shrink_group(1, true, a, width, v, scale, s); return;
    case 2: shrink_group(2, true, a, width, v, scale, s); return;
    case 3: shrink_group(3, true, a, width, v, scale, s); return;
    default: shrink_group(4, true, a, width, v, scale, s);
    }
}

/* Positions [first, first + count) of one segment, ranks [rank0, rank1) of one entry. */
static void shrink_entry(const struct shrink_job *job, const struct kernel_lora_entry *e, int32_t first, int32_t count, int32_t rank0,
                         void *out, void *copy)
{
    const struct kernel_forward *f = job->f;
    int32_t rank1 = e->rank < rank0 + RANK_RANGE ? e->rank : rank0 + RANK_RANGE;
    size_t width = (size_t)(job->down ? f->dims.inter_pad : f->dims.hidden_pad);
    for (int32_t p0 = 0; p0 < count; p0 += POSITIONS) {
        int positions = count - p0 < POSITIONS ? count - p0 : POSITIONS;
        const uint16_t *v[POSITIONS];
        size_t at[POSITIONS];
        for (int p = 0; p < positions; p++) {
            int32_t position = first + p0 + p;
            v[p] = job->down ? (const uint16_t *)f->h + (size_t)position * width
                             : (const uint16_t *)f->x + (size_t)f->batch.slot_row[f->routing.order[position]] * width;
            at[p] = (size_t)position * (size_t)f->lora.max_rank;
        }
        for (int32_t r = rank0; r < rank1; r += RANKS) {
            uint16_t *s[POSITIONS];
            for (int p = 0; p < positions; p++)
                s[p] = (uint16_t *)out + at[p] + r;
            (f->dims.op == DTYPE_FP16 ? shrink_fp16 : shrink_bf16)(positions, (const uint16_t *)(uintptr_t)e->a + (size_t)r * width, width,
                                                                   v, e->scale, s);
        }
        for (int p = 0; copy && p < positions; p++)
            memcpy((uint16_t *)copy + at[p] + rank0, (uint16_t *)out + at[p] + rank0, (size_t)(rank1 > rank0 ? rank1 - rank0 : 0) * 2);
    }
}

static void shrink_item(void *arg, int i, void *scratch)
{
    const struct shrink_job *job = arg;
    const struct kernel_forward *f = job->f;
    const struct tile *tile = (const struct tile *)f->work + i / job->ranges;
    int32_t rank0 = i % job->ranges * RANK_RANGE;
    int32_t adapter = adapter_at(f, tile->first);
    if (job->down) {
        shrink_entry(job, lora_find(f, tile->expert, adapter, KERNEL_DOWN), tile->first, tile->rows, rank0, f->s_down, NULL);
        return;
    }
    const struct kernel_lora_entry *gate = lora_find(f, tile->expert, adapter, KERNEL_GATE);
    const struct kernel_lora_entry *up = lora_find(f, tile->expert, adapter, KERNEL_UP);
    bool shared = gate && up && gate->a == up->a;
    if (gate)
        shrink_entry(job, gate, tile->first, tile->rows, rank0, f->s_gate, shared ? f->s_up : NULL);
    if (up && !shared)
        shrink_entry(job, up, tile->first, tile->rows, rank0, f->s_up, NULL);
}

/* Tiles are pieces of segments here, and only of those that are adapted. */
static void run_shrink(struct kernel_stream *stream, const struct kernel_forward *f, bool down)
{
    struct tile *tile = f->work;
    int32_t n = 0, rank = 0;
    for (int32_t s = 0; f->lora.entry && s < *f->routing.segment_count; s++) {
        const struct kernel_lora_entry *any = NULL;
        for (enum kernel_projection p = down ? KERNEL_DOWN : KERNEL_GATE; p <= (down ? KERNEL_DOWN : KERNEL_UP); p++) {
            const struct kernel_lora_entry *e = lora_find(f, f->routing.segment_expert[s], f->routing.segment_adapter[s], p);
            if (e && e->rank > rank)
                rank = e->rank;
            any = e ? e : any;
        }
        if (!any)
            continue;
        for (int32_t p = f->routing.segment_begin[s], end = f->routing.segment_begin[s + 1]; p < end; p += 8 * POSITIONS)
            tile[n++] = (struct tile){f->routing.segment_expert[s], p, end - p < 8 * POSITIONS ? end - p : 8 * POSITIONS};
    }
    struct shrink_job job = {f, down, (rank + RANK_RANGE - 1) / RANK_RANGE};
    pool_run(stream, n * job.ranges, shrink_item, &job);
}

enum kernel_status FAMILY_NAME(shrink_gate_up)(struct kernel_stream *stream, const struct kernel_forward *f)
{
    run_shrink(stream, f, false);
    return KERNEL_OK;
}

enum kernel_status FAMILY_NAME(shrink_down)(struct kernel_stream *stream, const struct kernel_forward *f)
{
    run_shrink(stream, f, true);
    return KERNEL_OK;
}
