/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs problems on kernel tables. See body.h.
 */
#include "body.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

const char *const body_step_name[BODY_STEPS] = {"enter", "route", "shrink_gate_up", "gate_up", "shrink_down", "down", "combine"};

struct body {
    struct body_target target;
    const struct problem *layer, *batch;
    struct kernel_forward f;
    struct kernel_lora lora;
    int32_t max_rank, max_slots, max_rows;
    size_t gate_up_bytes, down_bytes, work_bytes;
    char *in, *out;
    struct kernel_row *row;
    int32_t *slot_row, *slot_expert;
    float *slot_weight;
    void **held; /* everything allocated, to free */
    size_t held_count;
};

static void *host_alloc(size_t bytes)
{
    void *p = aligned_alloc(256, (bytes + 255) & ~(size_t)255);
    if (!p)
        fail_msg("no memory for the test");
    return p;
}

static void host_copy(void *dst, const void *src, size_t bytes) { memcpy(dst, src, bytes); }

static void host_fill(void *dst, int byte, size_t bytes) { memset(dst, byte, bytes); }

const struct body_memory body_host_memory = {host_alloc, free, host_copy, host_copy, host_fill};

static void *hold_raw(struct body *b, size_t bytes)
{
    b->held = realloc(b->held, (b->held_count + 1) * sizeof *b->held);
    assert_non_null(b->held);
    return b->held[b->held_count++] = b->target.memory->alloc(bytes ? bytes : 1);
}

static void *hold(struct body *b, size_t bytes)
{
    void *p = hold_raw(b, bytes);
    b->target.memory->fill(p, 0xff, bytes ? bytes : 1);
    return p;
}

static void *hold_copy(struct body *b, const void *src, size_t bytes)
{
    void *p = hold_raw(b, bytes);
    b->target.memory->upload(p, src, bytes);
    return p;
}

/* Packs in ragged portions, through a buffer with another pitch than the block's, as a loader might. */
static void pack_projection(struct body *b, enum kernel_projection q, int32_t expert, char *block)
{
    const struct kernel_table *k = b->target.table;
    const struct problem *p = b->layer;
    int32_t out = problem_out(p, q), in = problem_in(p, q);
    const uint16_t *src = p->weight[q] + (size_t)expert * (size_t)out * (size_t)in;
    for (int32_t row0 = 0, rows; row0 < out; row0 += rows) {
        struct kernel_span span;
        rows = k->pack_rows * (row0 ? 2 : 1);
        rows = rows < out - row0 ? rows : out - row0;
        k->span(&b->f.dims, q, row0, rows, &span);
        size_t pitch = span.width + 6;
        char *piece = problem_alloc(span.count * pitch);
        k->pack(&b->f.dims, q, row0, rows, src + (size_t)row0 * (size_t)in, (size_t)in, piece, pitch);
        for (size_t i = 0; i < span.count; i++)
            memcpy(block + span.offset + i * span.pitch, piece + i * pitch, span.width);
        free(piece);
    }
}

static void load_weights(struct body *b)
{
    const struct kernel_table *k = b->target.table;
    const struct problem *p = b->layer;
    struct kernel_weights *w = &b->f.weights;
    size_t experts = (size_t)p->o.experts;
    b->gate_up_bytes = k->gate_up_bytes(&b->f.dims);
    b->down_bytes = k->down_bytes(&b->f.dims);
    assert_int_equal(b->gate_up_bytes % 64 + b->down_bytes % 64, 0);
    char *gate_up = problem_alloc(experts * b->gate_up_bytes), *down = problem_alloc(experts * b->down_bytes);
    for (int32_t e = 0; e < p->o.experts; e++) {
        pack_projection(b, KERNEL_GATE, e, gate_up + (size_t)e * b->gate_up_bytes);
        pack_projection(b, KERNEL_UP, e, gate_up + (size_t)e * b->gate_up_bytes);
        pack_projection(b, KERNEL_DOWN, e, down + (size_t)e * b->down_bytes);
    }
    w->gate_up = hold_copy(b, gate_up, experts * b->gate_up_bytes);
    w->down = hold_copy(b, down, experts * b->down_bytes);
    free(gate_up);
    free(down);
    w->activation = p->o.activation;
    w->weight_on_input = p->o.weight_on_input;
    const float **bias[KERNEL_PROJECTIONS] = {&w->gate_bias, &w->up_bias, &w->down_bias};
    for (enum kernel_projection q = KERNEL_GATE; q < KERNEL_PROJECTIONS && p->o.bias; q++) {
        size_t width = (size_t)problem_out(p, q), pad = (size_t)(q == KERNEL_DOWN ? b->f.dims.hidden_pad : b->f.dims.inter_pad);
        float *padded = problem_alloc(experts * pad * sizeof *padded);
        for (size_t e = 0; e < experts; e++)
            memcpy(padded + e * pad, p->bias[q] + e * width, width * sizeof *padded);
        *bias[q] = hold_copy(b, padded, experts * pad * sizeof *padded);
        free(padded);
    }
}

static void load_adapters(struct body *b)
{
    const struct kernel_table *k = b->target.table;
    const struct problem *p = b->layer;
    const struct kernel_dims *d = &b->f.dims;
    size_t entries = (size_t)p->o.adapters * (size_t)p->o.experts * KERNEL_PROJECTIONS;
    if (!entries)
        return;
    struct kernel_lora_entry *entry = problem_alloc(entries * sizeof *entry);
    for (size_t i = 0; i < entries; i++) {
        const struct problem_delta *delta = &p->delta[i];
        enum kernel_projection q = (enum kernel_projection)(i % KERNEL_PROJECTIONS);
        if (!delta->rank)
            continue;
        size_t a_bytes = k->lora_a_bytes(d, q, delta->rank), b_bytes = k->lora_b_bytes(d, q, delta->rank);
        assert_int_equal(a_bytes % 64 + b_bytes % 64, 0);
        char *packed = host_alloc(a_bytes + b_bytes);
        memset(packed, 0xff, a_bytes + b_bytes);
        k->pack_lora_a(d, q, delta->rank, delta->a, packed);
        k->pack_lora_b(d, q, delta->rank, delta->b, packed + a_bytes);
        entry[i].scale = delta->scale;
        entry[i].rank = (delta->rank + KERNEL_RANK_PAD - 1) / KERNEL_RANK_PAD * KERNEL_RANK_PAD;
        bool shared = q == KERNEL_UP && entry[i - 1].a && delta->a == p->delta[i - 1].a;
        entry[i].a = shared ? entry[i - 1].a : (uint64_t)(uintptr_t)hold_copy(b, packed, a_bytes);
        entry[i].b = (uint64_t)(uintptr_t)hold_copy(b, packed + a_bytes, b_bytes);
        free(packed);
        if (entry[i].rank > b->max_rank)
            b->max_rank = entry[i].rank;
    }
    b->lora = (struct kernel_lora){hold_copy(b, entry, entries * sizeof *entry), p->o.adapters, b->max_rank};
    free(entry);
}

struct body *body_create(const struct body_target *target, const struct problem *p)
{
    struct body *b = problem_alloc(sizeof *b);
    const struct kernel_table *k = target->table;
    b->target = *target;
    b->layer = p;
    b->f.dims = (struct kernel_dims){.experts = p->o.experts, .hidden = p->o.hidden, .inter = p->o.inter, .op = p->o.op};
    k->dims_init(&b->f.dims);
    load_weights(b);
    load_adapters(b);

    struct kernel_forward *f = &b->f;
    size_t n = (size_t)p->slots, rank = (size_t)(b->max_rank ? b->max_rank : KERNEL_RANK_PAD), rows = (size_t)p->o.rows;
    b->max_slots = p->slots;
    b->max_rows = p->o.rows;
    b->work_bytes = k->work_bytes(&f->dims, p->o.rows, p->slots, b->max_rank);
    f->work = hold(b, b->work_bytes);
    f->x = hold(b, rows * (size_t)f->dims.hidden_pad * 2);
    f->h = hold(b, n * (size_t)f->dims.inter_pad * 2);
    f->y = hold(b, n * (size_t)f->dims.hidden_pad * 2);
    f->s_gate = hold(b, n * rank * 2);
    f->s_up = hold(b, n * rank * 2);
    f->s_down = hold(b, n * rank * 2);
    struct kernel_routing *r = &f->routing;
    r->order = hold(b, n * 4);
    r->position = hold(b, n * 4);
    r->expert_offset = hold(b, ((size_t)p->o.experts + 1) * 4);
    r->segment_count = hold(b, 4);
    r->segment_begin = hold(b, (n + 1) * 4);
    r->segment_expert = hold(b, n * 4);
    r->segment_adapter = hold(b, n * 4);
    b->row = hold(b, rows * sizeof *b->row);
    b->slot_row = hold(b, n * 4);
    b->slot_expert = hold(b, n * 4);
    b->slot_weight = hold(b, n * 4);
    b->in = hold(b, p->io_bytes);
    b->out = hold(b, p->io_bytes);
    body_set_batch(b, p, KERNEL_DECODE, true);
    return b;
}

void body_destroy(struct body *b)
{
    for (size_t i = 0; i < b->held_count; i++)
        b->target.memory->free(b->held[i]);
    free(b->held);
    free(b);
}

void body_set_batch(struct body *b, const struct problem *p, enum kernel_path path, bool adapters)
{
    const struct body_memory *m = b->target.memory;
    struct kernel_forward *f = &b->f;
    size_t n = (size_t)b->max_slots, rank = (size_t)(b->max_rank ? b->max_rank : KERNEL_RANK_PAD), rows = (size_t)b->max_rows;
    b->batch = p;
    f->path = path;
    body_set_adapters(b, adapters);
    m->fill(f->work, 0xff, b->work_bytes);
    m->fill(f->x, 0xff, rows * (size_t)f->dims.hidden_pad * 2);
    m->fill(f->h, 0xff, n * (size_t)f->dims.inter_pad * 2);
    m->fill(f->y, 0xff, n * (size_t)f->dims.hidden_pad * 2);
    m->fill(f->s_gate, 0xff, n * rank * 2);
    m->fill(f->s_up, 0xff, n * rank * 2);
    m->fill(f->s_down, 0xff, n * rank * 2);
    m->fill(b->out, 0xff, p->io_bytes);
    m->upload(b->in, p->input, p->io_bytes);
    struct kernel_row *row = problem_alloc((size_t)p->o.rows * sizeof *row);
    for (int32_t t = 0; t < p->o.rows; t++) {
        row[t] = p->row[t];
        row[t].in = row[t].in == UINT64_MAX ? 0 : row[t].in + (uint64_t)(uintptr_t)b->in;
        row[t].out = row[t].out == UINT64_MAX ? 0 : row[t].out + (uint64_t)(uintptr_t)b->out;
    }
    m->upload(b->row, row, (size_t)p->o.rows * sizeof *row);
    free(row);
    m->upload(b->slot_row, p->slot_row, (size_t)p->slots * 4);
    m->upload(b->slot_expert, p->slot_expert, (size_t)p->slots * 4);
    m->upload(b->slot_weight, p->slot_weight, (size_t)p->slots * 4);
    f->batch = (struct kernel_batch){p->o.rows, p->slots, b->row, b->slot_row, b->slot_expert, b->slot_weight};
}

void body_set_adapters(struct body *b, bool adapters) { b->f.lora = adapters ? b->lora : (struct kernel_lora){0}; }

static void launch_step(struct body *b, enum body_step step)
{
    const struct kernel_table *k = b->target.table;
    enum kernel_status (*const fn[BODY_STEPS])(struct kernel_stream *, const struct kernel_forward *) = {
        k->enter, k->route, k->shrink_gate_up, k->gate_up, k->shrink_down, k->down, k->combine};
    assert_int_equal(fn[step](b->target.stream, &b->f), KERNEL_OK);
}

void body_wait(struct body *b) { assert_int_equal(b->target.table->wait(b->target.stream), KERNEL_OK); }

void body_step(struct body *b, enum body_step step)
{
    launch_step(b, step);
    body_wait(b);
}

void body_launch(struct body *b)
{
    for (enum body_step s = BODY_ENTER; s < BODY_STEPS; s++)
        if (b->f.lora.entry || (s != BODY_SHRINK_GATE_UP && s != BODY_SHRINK_DOWN))
            launch_step(b, s);
}

void body_run(struct body *b)
{
    body_launch(b);
    body_wait(b);
}

static int32_t *get_ints(struct body *b, const int32_t *from, size_t n)
{
    int32_t *v = problem_alloc(n * sizeof *v);
    b->target.memory->download(v, from, n * sizeof *v);
    return v;
}

void body_routing_get(struct body *b, struct body_routing *r)
{
    const struct kernel_routing *from = &b->f.routing;
    size_t n = (size_t)b->batch->slots;
    b->target.memory->download(&r->segments, from->segment_count, 4);
    r->expert_offset = get_ints(b, from->expert_offset, (size_t)b->f.dims.experts + 1);
    r->valid = r->expert_offset[b->f.dims.experts];
    r->order = get_ints(b, from->order, n);
    r->position = get_ints(b, from->position, n);
    r->begin = get_ints(b, from->segment_begin, n + 1);
    r->expert = get_ints(b, from->segment_expert, n);
    r->adapter = get_ints(b, from->segment_adapter, n);
}

void body_routing_finish(struct body_routing *r)
{
    free(r->order);
    free(r->position);
    free(r->expert_offset);
    free(r->begin);
    free(r->expert);
    free(r->adapter);
}

struct place {
    void *at;
    int32_t width, pitch;
    size_t rows;
    bool padded; /* with zeros */
};

static struct place find_array(struct body *b, enum body_array a)
{
    const struct kernel_dims *d = &b->f.dims;
    size_t n = (size_t)b->batch->slots;
    switch (a) {
    case BODY_X: return (struct place){b->f.x, d->hidden, d->hidden_pad, (size_t)b->batch->o.rows, true};
    case BODY_H: return (struct place){b->f.h, d->inter, d->inter_pad, n, true};
    case BODY_Y: return (struct place){b->f.y, d->hidden, d->hidden_pad, n, false};
    default: break;
    }
    return (struct place){a == BODY_S_GATE ? b->f.s_gate : a == BODY_S_UP ? b->f.s_up : b->f.s_down, b->max_rank, b->max_rank, n, false};
}

float *body_get(struct body *b, enum body_array array, int32_t *rows, int32_t *width)
{
    struct place p = find_array(b, array);
    size_t n = p.rows * (size_t)p.pitch;
    uint16_t *raw = problem_alloc(n * 2);
    float *v = problem_alloc(p.rows * (size_t)p.width * sizeof *v);
    b->target.memory->download(raw, p.at, n * 2);
    struct body_routing r = {0};
    body_routing_get(b, &r);
    size_t written = array == BODY_X ? p.rows : (size_t)r.valid;
    body_routing_finish(&r);
    for (size_t i = 0; i < p.rows; i++)
        for (int32_t j = 0; j < p.pitch; j++) {
            uint16_t e = raw[i * (size_t)p.pitch + (size_t)j];
            if (j < p.width)
                v[i * (size_t)p.width + (size_t)j] = b->f.dims.op == DTYPE_BF16 ? dtype_bf16_to_f32(e) : dtype_fp16_to_f32(e);
            else if (p.padded && i < written)
                assert_int_equal(e & 0x7fff, 0);
        }
    free(raw);
    *rows = (int32_t)written;
    *width = p.width;
    return v;
}

void body_put(struct body *b, enum body_array array, const float *values, int32_t rows, int32_t width)
{
    struct place p = find_array(b, array);
    size_t n = (size_t)rows * (size_t)p.pitch;
    uint16_t *raw = problem_alloc(n * 2);
    assert_int_equal(width, p.width);
    for (int32_t i = 0; i < rows; i++)
        for (int32_t j = 0; j < width; j++)
            dtype_store_f32(raw + (size_t)i * (size_t)p.pitch + j, b->f.dims.op, values[(size_t)i * (size_t)width + (size_t)j]);
    b->target.memory->upload(p.at, raw, n * 2);
    free(raw);
}

char *body_output(struct body *b)
{
    char *out = problem_alloc(b->batch->io_bytes);
    b->target.memory->download(out, b->out, b->batch->io_bytes);
    return out;
}
