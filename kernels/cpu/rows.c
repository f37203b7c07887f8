/* SPDX-License-Identifier: Apache-2.0
 *
 * The steps that touch each row once: enter (into the operand type) and combine (out of it, over a row's slots). Compiled once for
 * each family. Rows of callers have any alignment and length; ours are padded to whole vectors, so arithmetic never meets a tail.
 */
#include "kernels/cpu/family.h"
#include "kernels/cpu/vec.h"

/* Elements below which waking other threads costs more than it saves. */
#define ELEMENTS_PER_ITEM (64 * 1024)

struct rows_job {
    const struct kernel_forward *f;
    int32_t rows; /* of an item */
};

static void run_rows(struct kernel_stream *stream, const struct kernel_forward *f, int64_t elements_per_row, pool_fn fn)
{
    int64_t rows = ELEMENTS_PER_ITEM / (elements_per_row > 0 ? elements_per_row : 1);
    struct rows_job job = {f, rows < 1 ? 1 : (int32_t)rows};
    pool_run(stream, (f->batch.rows + job.rows - 1) / job.rows, fn, &job);
}

static void enter_row(const struct kernel_forward *f, int32_t t)
{
    const struct kernel_row *row = &f->batch.row[t];
    int32_t width = f->dims.hidden, i = 0;
    enum dtype from = (enum dtype)row->dtype, op = f->dims.op;
    const char *in = (const char *)(uintptr_t)row->in;
    uint16_t *x = (uint16_t *)f->x + (size_t)t * f->dims.hidden_pad;
    if (!in) {
        memset(x, 0, (size_t)f->dims.hidden_pad * 2);
        return;
    }
    if (from == op) {
        memcpy(x, in, (size_t)width * 2);
        i = width;
    }
    for (; i + VL <= width; i += VL)
        vf_store_half(x + i, op, vf_load_float(in + (size_t)i * dtype_size(from), from));
    for (; i < width; i++)
        dtype_store_f32(x + i, op, dtype_load_f32(in + (size_t)i * dtype_size(from), from));
    memset(x + width, 0, (size_t)(f->dims.hidden_pad - width) * 2);
}

static void enter_item(void *arg, int i, void *scratch)
{
    const struct rows_job *job = arg;
    for (int32_t t = i * job->rows; t < (i + 1) * job->rows && t < job->f->batch.rows; t++)
        enter_row(job->f, t);
}

enum kernel_status FAMILY_NAME(enter)(struct kernel_stream *stream, const struct kernel_forward *f)
{
    run_rows(stream, f, f->dims.hidden, enter_item);
    return KERNEL_OK;
}

/* VL outputs from column `c` on. */
ALWAYS_INLINE vf combine_columns(const struct kernel_forward *f, const struct kernel_row *row, int32_t c)
{
    vf sum = vf_set(0);
    for (int32_t s = row->first_slot; s < row->first_slot + row->slots; s++) {
        int32_t position = f->routing.position[s];
        if (position < 0)
            continue;
        vf y = vf_load_float((const uint16_t *)f->y + (size_t)position * f->dims.hidden_pad + c, f->dims.op);
        sum = f->weights.weight_on_input ? sum + y : vf_fma(vf_set(f->batch.slot_weight[s]), y, sum);
    }
    return sum;
}

static void combine_row(const struct kernel_forward *f, int32_t t)
{
    const struct kernel_row *row = &f->batch.row[t];
    enum dtype to = (enum dtype)row->dtype;
    size_t size = dtype_size(to);
    char *out = (char *)(uintptr_t)row->out;
    int32_t width = f->dims.hidden, c = 0;
    if (!out)
        return;
    for (; c + VL <= width; c += VL)
        vf_store_float(out + (size_t)c * size, to, combine_columns(f, row, c));
    if (c < width) {
        char tail[VL * sizeof(float)];
        vf_store_float(tail, to, combine_columns(f, row, c));
        memcpy(out + (size_t)c * size, tail, (size_t)(width - c) * size);
    }
}

static void combine_item(void *arg, int i, void *scratch)
{
    const struct rows_job *job = arg;
    for (int32_t t = i * job->rows; t < (i + 1) * job->rows && t < job->f->batch.rows; t++)
        combine_row(job->f, t);
}

enum kernel_status FAMILY_NAME(combine)(struct kernel_stream *stream, const struct kernel_forward *f)
{
    int64_t per_row = f->batch.rows ? (int64_t)f->batch.slots * f->dims.hidden / f->batch.rows : 0;
    run_rows(stream, f, per_row, combine_item);
    return KERNEL_OK;
}
