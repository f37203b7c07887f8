/* SPDX-License-Identifier: Apache-2.0
 *
 * gate_up and down: products of the rows of each expert with its weights, then everything that happens to an output while it is
 * still fp32 (adapter, bias, activation). Compiled once for each family.
 *
 * An item is a tile of one expert's positions times a range of blocks: the tile's rows are packed into the thread's scratch, where
 * they stay in the second-level cache, and the range's weights stream past them once. With few rows that runs at the speed of
 * memory, with many at that of the multipliers; decode and prefill share it, except where prefill has AMX.
 */
#include "kernels/cpu/activation.h"
#include "kernels/cpu/family.h"
#include "kernels/cpu/product.h"
#if defined(FAMILY_AMX)
#include "kernels/cpu/amx.h"
#define GROUP_ROWS AMX_ROWS
#else
#define GROUP_ROWS MAX_ROWS
#endif

struct product_job {
    const struct kernel_forward *f;
    bool down;
    bool amx;
    enum product_mode mode; /* where AMX is not used */
    int32_t ranges, blocks, width;
};

/* One row's 32 sums of one block and where they belong. */
struct output {
    int32_t position, expert, slot, block;
};

/* Adds an adapter's delta to one half of the sums of rows that share it; `s` is the first one's. */
static void add_delta(const struct kernel_forward *f, const struct kernel_lora_entry *e, int32_t half, const uint16_t *s, int rows,
                      float *sums)
{
    const uint16_t *b = (const uint16_t *)(uintptr_t)e->b + (size_t)half * LAYOUT_HALF * (size_t)e->rank;
    const size_t stride = (size_t)f->lora.max_rank;
    for (int r = 0; r < rows; r += EXPAND_ROWS) {
        const int n = rows - r < EXPAND_ROWS ? rows - r : EXPAND_ROWS;
        (f->dims.op == DTYPE_FP16 ? expand_fp16 : expand_bf16)(n, b, s + (size_t)r * stride, stride, e->rank, sums + r * LAYOUT_BLOCK);
    }
}

static const uint16_t *s_at(const struct kernel_forward *f, const void *s, int32_t position)
{
    return (const uint16_t *)s + (size_t)position * (size_t)f->lora.max_rank;
}

static void finish_gate_up(const struct kernel_forward *f, const struct output *o, const float *sums)
{
    const struct kernel_weights *w = &f->weights;
    size_t channel = (size_t)o->block * LAYOUT_HALF;
    uint16_t *h = (uint16_t *)f->h + (size_t)o->position * (size_t)f->dims.inter_pad + channel;
    size_t bias = (size_t)o->expert * (size_t)f->dims.inter_pad + channel;
    float factor = w->weight_on_input ? f->batch.slot_weight[o->slot] : 1.0f;
    vf gate[SUBS], up[SUBS];
    for (int i = 0; i < SUBS; i++) {
        gate[i] = vf_load(sums + i * VL);
        up[i] = vf_load(sums + LAYOUT_HALF + i * VL);
    }
    for (int i = 0; i < SUBS; i++) {
        if (w->gate_bias)
            gate[i] += vf_load(w->gate_bias + bias + i * VL);
        if (w->up_bias)
            up[i] += vf_load(w->up_bias + bias + i * VL);
        if (w->weight_on_input) {
            gate[i] *= factor;
            up[i] *= factor;
        }
        vf_store_half(h + i * VL, f->dims.op, vf_activate(w->activation, gate[i], up[i]));
    }
    /* Padding is zero even after an infinite input. */
    for (int i = 0; i < LAYOUT_HALF && f->dims.inter - (int32_t)channel < LAYOUT_HALF; i++)
        if ((int32_t)channel + i >= f->dims.inter)
            h[i] = 0;
}

static void finish_down(const struct kernel_forward *f, const struct output *o, const float *sums)
{
    size_t channel = (size_t)o->block * LAYOUT_BLOCK;
    uint16_t *y = (uint16_t *)f->y + (size_t)o->position * (size_t)f->dims.hidden_pad + channel;
    for (int half = 0; half < 2; half++) {
        vf sum[SUBS];
        for (int i = 0; i < SUBS; i++)
            sum[i] = vf_load(sums + half * LAYOUT_HALF + i * VL);
        for (int i = 0; i < SUBS; i++) {
            size_t c = (size_t)(half * LAYOUT_HALF + i * VL);
            if (f->weights.down_bias)
                sum[i] += vf_load(f->weights.down_bias + (size_t)o->expert * (size_t)f->dims.hidden_pad + channel + c);
            vf_store_half(y + c, f->dims.op, sum[i]);
        }
    }
}

/* Fetches the next block's part of B: pieces of a few lines at scattered addresses, which no prefetcher foresees. */
static void fetch_next(const struct kernel_lora_entry *e, int32_t half, int32_t halves)
{
    size_t bytes = (size_t)LAYOUT_HALF * (size_t)e->rank * 2;
    const char *b = (const char *)(uintptr_t)e->b + (size_t)half * bytes;
    for (size_t at = 0; at < bytes * (size_t)halves && at < 2048; at += 64)
        __builtin_prefetch(b + at);
}

/* Adds the deltas of rows of one segment. */
static void adapt_rows(const struct product_job *job, int32_t expert, int32_t adapter, int32_t first, int rows, int32_t block, float *sums)
{
    const struct kernel_forward *f = job->f;
    const bool more = block + 1 < job->blocks;
    if (job->down) {
        const struct kernel_lora_entry *e = lora_find(f, expert, adapter, KERNEL_DOWN);
        if (e && more)
            fetch_next(e, 2 * block + 2, 2);
        for (int half = 0; e && half < 2; half++)
            add_delta(f, e, 2 * block + half, s_at(f, f->s_down, first), rows, sums + half * LAYOUT_HALF);
        return;
    }
    const struct kernel_lora_entry *gate = lora_find(f, expert, adapter, KERNEL_GATE), *up = lora_find(f, expert, adapter, KERNEL_UP);
    if (gate && more)
        fetch_next(gate, block + 1, 1);
    if (up && more)
        fetch_next(up, block + 1, 1);
    if (gate)
        add_delta(f, gate, block, s_at(f, f->s_gate, first), rows, sums);
    if (up)
        add_delta(f, up, block, s_at(f, f->s_up, first), rows, sums + LAYOUT_HALF);
}

static void finish_rows(const struct product_job *job, int32_t expert, int32_t first, int rows, int32_t block, float *sums)
{
    const struct kernel_forward *f = job->f;
    for (int begin = 0, end; f->lora.entry && begin < rows; begin = end) {
        const int32_t adapter = adapter_at(f, first + begin);
        for (end = begin + 1; end < rows && adapter_at(f, first + end) == adapter;)
            end++;
        if (adapter >= 0)
            adapt_rows(job, expert, adapter, first + begin, end - begin, block, sums + begin * LAYOUT_BLOCK);
    }
    for (int r = 0; r < rows; r++) {
        const struct output o = {.position = first + r, .expert = expert, .slot = f->routing.order[first + r], .block = block};
        if (job->down)
            finish_down(f, &o, sums + r * LAYOUT_BLOCK);
        else
            finish_gate_up(f, &o, sums + r * LAYOUT_BLOCK);
    }
}

static const uint16_t *input_row(const struct product_job *job, int32_t position)
{
    const struct kernel_forward *f = job->f;
    if (job->down)
        return (const uint16_t *)f->h + (size_t)position * (size_t)job->width;
    return (const uint16_t *)f->x + (size_t)f->batch.slot_row[f->routing.order[position]] * (size_t)job->width;
}

/* Groups of a tile are of nearly equal height, too: group g of n has rows [rows g / n, rows (g + 1) / n). */
static int32_t group_begin(int32_t rows, int32_t groups, int32_t g) { return (int32_t)((int64_t)rows * g / groups); }

static void product_item(void *arg, int i, void *scratch)
{
    const struct product_job *job = arg;
    const struct kernel_forward *f = job->f;
    const struct tile *tile = (const struct tile *)f->work + i / job->ranges;
    int32_t begin = group_begin(job->blocks, job->ranges, i % job->ranges);
    int32_t end = group_begin(job->blocks, job->ranges, i % job->ranges + 1);
    size_t block_elements = (size_t)job->width * LAYOUT_BLOCK;
    const uint16_t *w = job->down ? (const uint16_t *)f->weights.down + (size_t)tile->expert * (layout_down_bytes(&f->dims) / 2)
                                  : (const uint16_t *)f->weights.gate_up + (size_t)tile->expert * (layout_gate_up_bytes(&f->dims) / 2);
    _Alignas(64) float sums[GROUP_ROWS * LAYOUT_BLOCK];
#if defined(FAMILY_AMX)
    if (job->amx) {
        amx_begin();
        for (int32_t r = 0; r < tile->rows; r++)
            amx_pack_row(scratch, input_row(job, tile->first + r), r, job->width);
        amx_pad_rows(scratch, tile->rows, job->width);
        for (int32_t b = begin; b < end; b++)
            for (int32_t r = 0; r < tile->rows; r += AMX_ROWS) {
                int rows = tile->rows - r < AMX_ROWS ? tile->rows - r : AMX_ROWS;
                amx_product(scratch, r, rows, w + (size_t)b * block_elements, job->width, sums);
                finish_rows(job, tile->expert, tile->first + r, rows, b, sums);
            }
        amx_end();
        return;
    }
#endif
    size_t row_bytes = (size_t)job->width * panel_size(job->mode);
    int32_t groups = (tile->rows + MAX_ROWS - 1) / MAX_ROWS;
    for (int32_t g = 0; g < groups; g++) {
        const uint16_t *row[MAX_ROWS];
        int32_t r0 = group_begin(tile->rows, groups, g), rows = group_begin(tile->rows, groups, g + 1) - r0;
        for (int32_t r = 0; r < rows; r++)
            row[r] = input_row(job, tile->first + r0 + r);
        panel_pack(job->mode, (char *)scratch + (size_t)r0 * row_bytes, row, rows, job->width);
    }
    for (int32_t b = begin; b < end; b++)
        for (int32_t g = 0; g < groups; g++) {
            int32_t r0 = group_begin(tile->rows, groups, g), rows = group_begin(tile->rows, groups, g + 1) - r0;
            product_tile(job->mode, rows, (char *)scratch + (size_t)r0 * row_bytes, w + (size_t)b * block_elements, job->width, sums);
            finish_rows(job, tile->expert, tile->first + r0, rows, b, sums);
        }
}

static void run_product(struct kernel_stream *stream, const struct kernel_forward *f, bool down)
{
    struct product_job job = {.f = f, .down = down};
    job.width = down ? f->dims.inter_pad : f->dims.hidden_pad;
    job.blocks = (int32_t)((down ? f->dims.hidden_pad : 2 * f->dims.inter_pad) / LAYOUT_BLOCK);
    job.mode = product_choose(f->dims.op, f->path);
    size_t group = MAX_ROWS, row_bytes = (size_t)job.width * panel_size(job.mode);
#if defined(FAMILY_AMX)
    /* Not for rows so wide that a tile of them leaves the scratch: a matter of the shape, never of the batch. */
    job.amx = f->path == KERNEL_PREFILL && f->dims.op == DTYPE_BF16 && (size_t)job.width * 2 * AMX_ROWS <= POOL_SCRATCH_BYTES;
    if (job.amx) {
        group = AMX_ROWS;
        row_bytes = (size_t)job.width * 2;
    }
#endif
    size_t rows = POOL_SCRATCH_BYTES / row_bytes;
    if (rows >= group)
        rows -= rows % group;
    int32_t tiles = tiles_cut(f, (int32_t)rows);
    if (!tiles)
        return;
    job.ranges = tiles_ranges(stream, tiles, job.blocks);
    pool_run(stream, tiles * job.ranges, product_item, &job);
}

enum kernel_status FAMILY_NAME(gate_up)(struct kernel_stream *stream, const struct kernel_forward *f)
{
    run_product(stream, f, false);
    return KERNEL_OK;
}

enum kernel_status FAMILY_NAME(down)(struct kernel_stream *stream, const struct kernel_forward *f)
{
    run_product(stream, f, true);
    return KERNEL_OK;
}
