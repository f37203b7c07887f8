/* SPDX-License-Identifier: Apache-2.0
 *
 * The reference back end: the forward pass written down literally, in scalar C, on one thread. Every other back end is tested
 * against it entry by entry, so it shares no code with them but the element types. Weights lie row-major: an expert's gate rows,
 * then its up rows; its down rows.
 */
#include "kernels/kernels.h"

#include <math.h>
#include <string.h>

static int32_t round_up(int32_t v, int32_t to) { return (v + to - 1) / to * to; }

static size_t round_up_64(size_t v) { return (v + 63) & ~(size_t)63; }

static void ref_dims_init(struct kernel_dims *d)
{
    d->hidden_pad = round_up(d->hidden, 8);
    d->inter_pad = round_up(d->inter, 8);
}

static size_t ref_gate_up_bytes(const struct kernel_dims *d) { return round_up_64((size_t)2 * d->inter * d->hidden_pad * 2); }

static size_t ref_down_bytes(const struct kernel_dims *d) { return round_up_64((size_t)d->hidden * d->inter_pad * 2); }

static size_t ref_work_bytes(const struct kernel_dims *d, int32_t max_rows, int32_t max_slots, int32_t max_rank) { return 0; }

static int32_t columns(const struct kernel_dims *d, enum kernel_projection p) { return p == KERNEL_DOWN ? d->inter : d->hidden; }

static int32_t columns_pad(const struct kernel_dims *d, enum kernel_projection p)
{
    return p == KERNEL_DOWN ? d->inter_pad : d->hidden_pad;
}

static int32_t channels(const struct kernel_dims *d, enum kernel_projection p) { return p == KERNEL_DOWN ? d->hidden : d->inter; }

static void ref_span(const struct kernel_dims *d, enum kernel_projection p, int32_t row0, int32_t rows, struct kernel_span *out)
{
    size_t row_bytes = (size_t)columns_pad(d, p) * 2;
    out->offset = ((size_t)row0 + (p == KERNEL_UP ? (size_t)d->inter : 0)) * row_bytes;
    out->width = (size_t)rows * row_bytes;
    out->pitch = out->width;
    out->count = 1;
}

/* Rows of `width` elements padded with zeros to `pad`. */
static void copy_rows(uint16_t *dst, int32_t pad, const uint16_t *src, size_t src_stride, int32_t width, int32_t rows)
{
    for (int32_t r = 0; r < rows; r++) {
        memcpy(dst + (size_t)r * pad, src + r * src_stride, (size_t)width * 2);
        memset(dst + (size_t)r * pad + width, 0, (size_t)(pad - width) * 2);
    }
}

static void ref_pack(const struct kernel_dims *d, enum kernel_projection p, int32_t row0, int32_t rows, const void *src, size_t src_stride,
                     void *dst, size_t dst_pitch)
{
    copy_rows(dst, columns_pad(d, p), src, src_stride, columns(d, p), rows);
}

static size_t ref_lora_a_bytes(const struct kernel_dims *d, enum kernel_projection p, int32_t rank)
{
    return round_up_64((size_t)round_up(rank, KERNEL_RANK_PAD) * columns_pad(d, p) * 2);
}

static size_t ref_lora_b_bytes(const struct kernel_dims *d, enum kernel_projection p, int32_t rank)
{
    return round_up_64((size_t)round_up(rank, KERNEL_RANK_PAD) * channels(d, p) * 2);
}

static void ref_pack_lora_a(const struct kernel_dims *d, enum kernel_projection p, int32_t rank, const void *src, void *dst)
{
    memset(dst, 0, ref_lora_a_bytes(d, p, rank));
    copy_rows(dst, columns_pad(d, p), src, (size_t)columns(d, p), columns(d, p), rank);
}

static void ref_pack_lora_b(const struct kernel_dims *d, enum kernel_projection p, int32_t rank, const void *src, void *dst)
{
    memset(dst, 0, ref_lora_b_bytes(d, p, rank));
    copy_rows(dst, round_up(rank, KERNEL_RANK_PAD), src, (size_t)rank, rank, channels(d, p));
}

static enum kernel_status ref_enter(struct kernel_stream *stream, const struct kernel_forward *f)
{
    const struct kernel_dims *d = &f->dims;
    for (int32_t t = 0; t < f->batch.rows; t++) {
        const struct kernel_row *row = &f->batch.row[t];
        uint16_t *x = (uint16_t *)f->x + (size_t)t * d->hidden_pad;
        memset(x, 0, (size_t)d->hidden_pad * 2);
        if (row->in)
            dtype_convert(x, d->op, (const void *)(uintptr_t)row->in, (enum dtype)row->dtype, (size_t)d->hidden);
    }
    return KERNEL_OK;
}

static int32_t slot_adapter(const struct kernel_forward *f, int32_t slot) { return f->batch.row[f->batch.slot_row[slot]].adapter; }

static enum kernel_status ref_route(struct kernel_stream *stream, const struct kernel_forward *f)
{
    const struct kernel_batch *b = &f->batch;
    const struct kernel_routing *r = &f->routing;
    int32_t valid = 0, segments = 0;
    for (int32_t s = 0; s < b->slots; s++)
        r->position[s] = -1;
    for (int32_t e = 0; e < f->dims.experts; e++) {
        int32_t first = valid;
        r->expert_offset[e] = first;
        /* Insertion sort by adapter keeps slot order among equals. */
        for (int32_t s = 0; s < b->slots; s++) {
            if (b->slot_expert[s] != e)
                continue;
            int32_t i = valid++;
            for (; i > first && slot_adapter(f, r->order[i - 1]) > slot_adapter(f, s); i--)
                r->order[i] = r->order[i - 1];
            r->order[i] = s;
        }
        for (int32_t p = first; p < valid; p++) {
            int32_t adapter = slot_adapter(f, r->order[p]);
            r->position[r->order[p]] = p;
            if (p == first || adapter != r->segment_adapter[segments - 1]) {
                r->segment_begin[segments] = p;
                r->segment_expert[segments] = e;
                r->segment_adapter[segments++] = adapter;
            }
        }
    }
    r->expert_offset[f->dims.experts] = valid;
    r->segment_begin[segments] = valid;
    *r->segment_count = segments;
    return KERNEL_OK;
}

static float op_load(const struct kernel_dims *d, const void *p, size_t i) { return dtype_load_f32((const uint16_t *)p + i, d->op); }

static void op_store(const struct kernel_dims *d, void *p, size_t i, float v) { dtype_store_f32((uint16_t *)p + i, d->op, v); }

static float dot(const struct kernel_dims *d, const void *a, const void *b, int32_t n)
{
    const uint16_t *x = a, *y = b;
    float sum = 0;
    if (d->op == DTYPE_BF16)
        for (int32_t i = 0; i < n; i++)
            sum += dtype_bf16_to_f32(x[i]) * dtype_bf16_to_f32(y[i]);
    else
        for (int32_t i = 0; i < n; i++)
            sum += dtype_fp16_to_f32(x[i]) * dtype_fp16_to_f32(y[i]);
    return sum;
}

/* The entry of a position's adapter for a projection; NULL: its base weights stand alone. */
static const struct kernel_lora_entry *find_entry(const struct kernel_forward *f, int32_t expert, int32_t adapter, enum kernel_projection p)
{
    if (!f->lora.entry || adapter < 0)
        return NULL;
    const struct kernel_lora_entry *e = &f->lora.entry[((size_t)adapter * f->dims.experts + expert) * KERNEL_PROJECTIONS + p];
    return e->a ? e : NULL;
}

/* The plain fold, first half: s = op(scale * A v). */
static void lora_shrink(const struct kernel_dims *d, const struct kernel_lora_entry *e, const void *v, int32_t columns_v, void *s)
{
    for (int32_t r = 0; e && r < e->rank; r++)
        op_store(d, s, (size_t)r, e->scale * dot(d, (const uint16_t *)(uintptr_t)e->a + (size_t)r * columns_v, v, columns_v));
}

/* Second half: what the adapter adds to output channel `channel`. Knows nothing of the base weights. */
static float lora_expand(const struct kernel_dims *d, const struct kernel_lora_entry *e, const void *s, int32_t channel)
{
    return e ? dot(d, (const uint16_t *)(uintptr_t)e->b + (size_t)channel * e->rank, s, e->rank) : 0;
}

/* Calls `fn` for every position with its expert, adapter and slot. */
static void for_positions(const struct kernel_forward *f,
                          void (*fn)(const struct kernel_forward *f, int32_t pos, int32_t slot, int32_t expert, int32_t adapter))
{
    for (int32_t e = 0; e < f->dims.experts; e++)
        for (int32_t p = f->routing.expert_offset[e]; p < f->routing.expert_offset[e + 1]; p++)
            fn(f, p, f->routing.order[p], e, slot_adapter(f, f->routing.order[p]));
}

static const uint16_t *x_of(const struct kernel_forward *f, int32_t slot)
{
    return (const uint16_t *)f->x + (size_t)f->batch.slot_row[slot] * f->dims.hidden_pad;
}

static uint16_t *s_at(const struct kernel_forward *f, void *s, int32_t pos) { return (uint16_t *)s + (size_t)pos * f->lora.max_rank; }

static void shrink_gate_up(const struct kernel_forward *f, int32_t pos, int32_t slot, int32_t expert, int32_t adapter)
{
    lora_shrink(&f->dims, find_entry(f, expert, adapter, KERNEL_GATE), x_of(f, slot), f->dims.hidden_pad, s_at(f, f->s_gate, pos));
    lora_shrink(&f->dims, find_entry(f, expert, adapter, KERNEL_UP), x_of(f, slot), f->dims.hidden_pad, s_at(f, f->s_up, pos));
}

static void shrink_down(const struct kernel_forward *f, int32_t pos, int32_t slot, int32_t expert, int32_t adapter)
{
    lora_shrink(&f->dims, find_entry(f, expert, adapter, KERNEL_DOWN), (const uint16_t *)f->h + (size_t)pos * f->dims.inter_pad,
                f->dims.inter_pad, s_at(f, f->s_down, pos));
}

static float sigmoid(float v) { return 1.0f / (1.0f + expf(-v)); }

static float activate(enum kernel_activation a, float g, float u)
{
    switch (a) {
    case KERNEL_ACT_SILU: return g * sigmoid(g) * u;
    case KERNEL_ACT_GELU: return 0.5f * g * erfcf(-0.70710678f * g) * u;
    case KERNEL_ACT_GELU_TANH: return 0.5f * g * (1.0f + tanhf(0.79788456f * (g + 0.044715f * g * g * g))) * u;
    case KERNEL_ACT_GPT_OSS: break;
    }
    /* Comparisons, not fminf: NaN must pass. */
    g = g > 7.0f ? 7.0f : g;
    u = u > 7.0f ? 7.0f : u < -7.0f ? -7.0f : u;
    return (u + 1.0f) * g * sigmoid(1.702f * g);
}

static void gate_up(const struct kernel_forward *f, int32_t pos, int32_t slot, int32_t expert, int32_t adapter)
{
    const struct kernel_dims *d = &f->dims;
    const struct kernel_weights *w = &f->weights;
    const uint16_t *x = x_of(f, slot);
    const uint16_t *gate = (const uint16_t *)w->gate_up + (size_t)expert * (ref_gate_up_bytes(d) / 2);
    const uint16_t *up = gate + (size_t)d->inter * d->hidden_pad;
    const struct kernel_lora_entry *eg = find_entry(f, expert, adapter, KERNEL_GATE), *eu = find_entry(f, expert, adapter, KERNEL_UP);
    uint16_t *h = (uint16_t *)f->h + (size_t)pos * d->inter_pad;
    for (int32_t i = 0; i < d->inter; i++) {
        float g = dot(d, gate + (size_t)i * d->hidden_pad, x, d->hidden_pad) + lora_expand(d, eg, s_at(f, f->s_gate, pos), i);
        float u = dot(d, up + (size_t)i * d->hidden_pad, x, d->hidden_pad) + lora_expand(d, eu, s_at(f, f->s_up, pos), i);
        if (w->gate_bias)
            g += w->gate_bias[(size_t)expert * d->inter_pad + i];
        if (w->up_bias)
            u += w->up_bias[(size_t)expert * d->inter_pad + i];
        if (w->weight_on_input) {
            g *= f->batch.slot_weight[slot];
            u *= f->batch.slot_weight[slot];
        }
        op_store(d, h, (size_t)i, activate(w->activation, g, u));
    }
    memset(h + d->inter, 0, (size_t)(d->inter_pad - d->inter) * 2);
}

static void down(const struct kernel_forward *f, int32_t pos, int32_t slot, int32_t expert, int32_t adapter)
{
    const struct kernel_dims *d = &f->dims;
    const uint16_t *h = (const uint16_t *)f->h + (size_t)pos * d->inter_pad;
    const uint16_t *w = (const uint16_t *)f->weights.down + (size_t)expert * (ref_down_bytes(d) / 2);
    const struct kernel_lora_entry *e = find_entry(f, expert, adapter, KERNEL_DOWN);
    for (int32_t i = 0; i < d->hidden; i++) {
        float y = dot(d, w + (size_t)i * d->inter_pad, h, d->inter_pad) + lora_expand(d, e, s_at(f, f->s_down, pos), i);
        if (f->weights.down_bias)
            y += f->weights.down_bias[(size_t)expert * d->hidden_pad + i];
        op_store(d, f->y, (size_t)pos * d->hidden_pad + i, y);
    }
}

static enum kernel_status ref_shrink_gate_up(struct kernel_stream *stream, const struct kernel_forward *f)
{
    for_positions(f, shrink_gate_up);
    return KERNEL_OK;
}

static enum kernel_status ref_gate_up(struct kernel_stream *stream, const struct kernel_forward *f)
{
    for_positions(f, gate_up);
    return KERNEL_OK;
}

static enum kernel_status ref_shrink_down(struct kernel_stream *stream, const struct kernel_forward *f)
{
    for_positions(f, shrink_down);
    return KERNEL_OK;
}

static enum kernel_status ref_down(struct kernel_stream *stream, const struct kernel_forward *f)
{
    for_positions(f, down);
    return KERNEL_OK;
}

static enum kernel_status ref_combine(struct kernel_stream *stream, const struct kernel_forward *f)
{
    for (int32_t t = 0; t < f->batch.rows; t++) {
        const struct kernel_row *row = &f->batch.row[t];
        if (!row->out)
            continue;
        for (int32_t i = 0; i < f->dims.hidden; i++) {
            float sum = 0;
            for (int32_t s = row->first_slot; s < row->first_slot + row->slots; s++) {
                if (f->routing.position[s] < 0)
                    continue;
                float y = op_load(&f->dims, f->y, (size_t)f->routing.position[s] * f->dims.hidden_pad + i);
                sum += f->weights.weight_on_input ? y : f->batch.slot_weight[s] * y;
            }
            dtype_store_f32((char *)(uintptr_t)row->out + (size_t)i * dtype_size((enum dtype)row->dtype), (enum dtype)row->dtype, sum);
        }
    }
    return KERNEL_OK;
}

static enum kernel_status ref_wait(struct kernel_stream *stream) { return KERNEL_OK; }

static const struct kernel_table table = {
    .name = "ref",
    .device = "cpu",
    .decode_rows = 32,
    .dims_init = ref_dims_init,
    .gate_up_bytes = ref_gate_up_bytes,
    .down_bytes = ref_down_bytes,
    .work_bytes = ref_work_bytes,
    .pack_rows = 1,
    .span = ref_span,
    .pack = ref_pack,
    .lora_a_bytes = ref_lora_a_bytes,
    .lora_b_bytes = ref_lora_b_bytes,
    .pack_lora_a = ref_pack_lora_a,
    .pack_lora_b = ref_pack_lora_b,
    .enter = ref_enter,
    .route = ref_route,
    .shrink_gate_up = ref_shrink_gate_up,
    .gate_up = ref_gate_up,
    .shrink_down = ref_shrink_down,
    .down = ref_down,
    .combine = ref_combine,
    .wait = ref_wait,
};

const struct kernel_table *kernels_ref(void) { return &table; }
