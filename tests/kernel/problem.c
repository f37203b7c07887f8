/* SPDX-License-Identifier: Apache-2.0
 *
 * Random layers and batches for the kernel tests.
 */
#include "problem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void *problem_alloc(size_t bytes)
{
    void *p = calloc(1, bytes ? bytes : 1);
    if (!p) {
        fprintf(stderr, "no memory for the test\n");
        exit(1);
    }
    return p;
}

uint32_t problem_random(uint32_t *state)
{
    uint32_t x = *state += 0x9e3779b9u;
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    return x ^ x >> 16;
}

float problem_normal(uint32_t *state)
{
    /* Four uniform bytes: near enough, and quick. */
    uint32_t r = problem_random(state);
    int sum = (int)(r & 255) + (int)(r >> 8 & 255) + (int)(r >> 16 & 255) + (int)(r >> 24);
    return ((float)sum - 510.0f) * (1.0f / 147.8f);
}

int32_t problem_in(const struct problem *p, enum kernel_projection q) { return q == KERNEL_DOWN ? p->o.inter : p->o.hidden; }

int32_t problem_out(const struct problem *p, enum kernel_projection q) { return q == KERNEL_DOWN ? p->o.hidden : p->o.inter; }

static uint16_t *random_elements(uint32_t *state, enum dtype op, size_t n, float sigma)
{
    uint16_t *v = problem_alloc(n * sizeof *v);
    for (size_t i = 0; i < n; i++)
        dtype_store_f32(&v[i], op, sigma * problem_normal(state));
    return v;
}

static float *random_floats(uint32_t *state, size_t n, float sigma)
{
    float *v = problem_alloc(n * sizeof *v);
    for (size_t i = 0; i < n; i++)
        v[i] = sigma * problem_normal(state);
    return v;
}

static void make_delta(struct problem *p, uint32_t *state, int32_t adapter, int32_t expert)
{
    static const int32_t ranks[] = {1, 16, 3, 8, 512, 64, 9, 33};
    const struct problem_options *o = &p->o;
    struct problem_delta *d = p->delta + ((size_t)adapter * o->experts + expert) * KERNEL_PROJECTIONS;
    bool end = expert == 0 || expert == o->experts - 1;
    for (enum kernel_projection q = KERNEL_GATE; q < KERNEL_PROJECTIONS; q++) {
        if (o->subset && (!end || (problem_random(state) & 1)) && problem_random(state) % 3)
            continue;
        int32_t rank = o->rank ? o->rank : ranks[(size_t)(adapter + expert + (int)q) % (sizeof ranks / sizeof ranks[0])];
        if (q == KERNEL_UP && o->share_a && d[KERNEL_GATE].rank) {
            d[q] = d[KERNEL_GATE];
            rank = d[q].rank;
        } else {
            d[q].rank = rank;
            d[q].scale = 0.5f + (float)(problem_random(state) % 8) * 0.25f;
            d[q].a = random_elements(state, o->op, (size_t)rank * problem_in(p, q), 1.0f / sqrtf((float)problem_in(p, q)));
        }
        d[q].b = random_elements(state, o->op, (size_t)problem_out(p, q) * rank, 0.5f / sqrtf((float)rank));
    }
}

static int32_t pick_expert(const struct problem_options *o, uint32_t *state, int32_t i, int32_t start, int32_t step)
{
    switch (o->spread) {
    case SPREAD_ONE: return o->experts / 2;
    case SPREAD_ENDS: return i & 1 ? 0 : o->experts - 1;
    case SPREAD_REPEATED: return (int32_t)(problem_random(state) % (uint32_t)o->experts);
    case SPREAD_UNIFORM: break;
    }
    return (int32_t)(((int64_t)start + (int64_t)i * step) % o->experts);
}

static void make_batch(struct problem *p, uint32_t *state)
{
    const struct problem_options *o = &p->o;
    size_t most = (size_t)o->rows * (size_t)(o->k > o->experts ? o->k : o->experts);
    p->row = problem_alloc((size_t)o->rows * sizeof *p->row);
    p->slot_row = problem_alloc(most * sizeof *p->slot_row);
    p->slot_expert = problem_alloc(most * sizeof *p->slot_expert);
    p->slot_weight = problem_alloc(most * sizeof *p->slot_weight);
    for (int32_t t = 0; t < o->rows; t++) {
        struct kernel_row *row = &p->row[t];
        *row = (struct kernel_row){.in = UINT64_MAX, .out = UINT64_MAX, .adapter = -1, .first_slot = p->slots};
        if (o->filler && t % 5 == 3)
            continue;
        row->dtype = o->mixed_dtypes ? t % 3 : DTYPE_BF16;
        if (o->adapters)
            row->adapter = (int32_t)(problem_random(state) % (uint32_t)(o->adapters + 1)) - 1;
        p->io_bytes += o->misaligned ? 1 + problem_random(state) % 7 : 0;
        if (!o->misaligned)
            p->io_bytes = (p->io_bytes + 63) & ~(size_t)63;
        row->in = row->out = p->io_bytes;
        p->io_bytes += (size_t)o->hidden * dtype_size((enum dtype)row->dtype);
        row->slots = o->k ? o->k : (int32_t)(problem_random(state) % (uint32_t)(o->experts + 1));
        int32_t start = (int32_t)(problem_random(state) % (uint32_t)o->experts), step = 1;
        /* A step without a common factor with the number of experts meets each once. */
        for (int32_t a = o->experts, b = step = 1 + (int32_t)(problem_random(state) % (uint32_t)o->experts), c; b; c = a % b, a = b, b = c)
            if (a > 1 && !(a % b) && b > 1)
                step = 1;
        for (int32_t i = 0; i < row->slots; i++, p->slots++) {
            bool skip = o->skipped && !(problem_random(state) % (uint32_t)o->skipped);
            p->slot_row[p->slots] = t;
            p->slot_expert[p->slots] = skip ? -1 : pick_expert(o, state, i, start, step);
            p->slot_weight[p->slots] = 0.05f + (float)(problem_random(state) % 100) * 0.01f;
        }
    }
    p->input = problem_alloc(p->io_bytes);
    for (int32_t t = 0; t < o->rows; t++)
        for (int32_t i = 0; i < o->hidden && p->row[t].in != UINT64_MAX; i++)
            problem_poke(p, t, i, problem_normal(state));
}

/* Terms i and i + n / 2 are large and each other's negative, for the first quarter of the terms. That takes inputs that repeat: of h they
 * do, since the rows of gate and up do. */
static void make_cancelling(struct problem *p)
{
    for (enum kernel_projection q = KERNEL_GATE; q < KERNEL_PROJECTIONS; q++) {
        const size_t in = (size_t)problem_in(p, q), out = (size_t)problem_out(p, q), rows = (size_t)p->o.experts * out;
        for (size_t r = 0; r < rows; r++)
            for (size_t i = 0; i < in / 4; i++) {
                float large = 4096 * dtype_load_f32(&p->weight[q][r * in + i], p->o.op);
                dtype_store_f32(&p->weight[q][r * in + i], p->o.op, large);
                dtype_store_f32(&p->weight[q][r * in + i + in / 2], p->o.op, -large);
            }
        for (size_t r = 0; r < rows && q != KERNEL_DOWN; r++)
            if (r % out >= out / 2)
                memcpy(&p->weight[q][r * in], &p->weight[q][(r - out / 2) * in], in * 2);
    }
    for (int32_t t = 0; t < p->o.rows; t++)
        for (int32_t i = 0; i < p->o.hidden / 4; i++) {
            enum dtype d = (enum dtype)p->row[t].dtype;
            problem_poke(p, t, i + p->o.hidden / 2, dtype_load_f32(p->input + p->row[t].in + (size_t)i * dtype_size(d), d));
        }
}

struct problem *problem_create(const struct problem_options *o)
{
    struct problem *p = problem_alloc(sizeof *p);
    uint32_t state = o->seed * 2654435761u + 1;
    p->o = *o;
    for (enum kernel_projection q = KERNEL_GATE; q < KERNEL_PROJECTIONS; q++) {
        size_t out = (size_t)o->experts * (size_t)problem_out(p, q);
        p->weight[q] = random_elements(&state, o->op, out * (size_t)problem_in(p, q), 1.0f / sqrtf((float)problem_in(p, q)));
        if (o->bias)
            p->bias[q] = random_floats(&state, out, 0.5f);
    }
    if (o->adapters) {
        p->delta = problem_alloc((size_t)o->adapters * (size_t)o->experts * KERNEL_PROJECTIONS * sizeof *p->delta);
        for (int32_t a = 0; a < o->adapters; a++)
            for (int32_t e = 0; e < o->experts; e++)
                make_delta(p, &state, a, e);
    }
    make_batch(p, &state);
    if (o->cancelling)
        make_cancelling(p);
    return p;
}

static void free_batch(struct problem *p)
{
    free(p->row);
    free(p->slot_row);
    free(p->slot_expert);
    free(p->slot_weight);
    free(p->input);
    free(p);
}

void problem_destroy(struct problem *p)
{
    if (!p)
        return;
    size_t deltas = (size_t)p->o.adapters * (size_t)p->o.experts * KERNEL_PROJECTIONS;
    for (size_t i = 0; p->delta && i < deltas; i++) {
        if (!(i % KERNEL_PROJECTIONS == KERNEL_UP && p->delta[i].a == p->delta[i - 1].a))
            free(p->delta[i].a);
        free(p->delta[i].b);
    }
    free(p->delta);
    for (enum kernel_projection q = KERNEL_GATE; q < KERNEL_PROJECTIONS; q++) {
        free(p->weight[q]);
        free(p->bias[q]);
    }
    free_batch(p);
}

struct problem *problem_select(const struct problem *p, const int32_t *rows, int32_t count)
{
    struct problem *part = problem_alloc(sizeof *part);
    *part = *p;
    part->o.rows = count;
    part->slots = 0;
    part->row = problem_alloc((size_t)count * sizeof *part->row);
    for (int32_t i = 0; i < count; i++)
        part->slots += p->row[rows[i]].slots;
    part->slot_row = problem_alloc((size_t)part->slots * sizeof *part->slot_row);
    part->slot_expert = problem_alloc((size_t)part->slots * sizeof *part->slot_expert);
    part->slot_weight = problem_alloc((size_t)part->slots * sizeof *part->slot_weight);
    part->input = memcpy(problem_alloc(p->io_bytes), p->input, p->io_bytes);
    int32_t slot = 0;
    for (int32_t i = 0; i < count; i++) {
        const struct kernel_row *from = &p->row[rows[i]];
        part->row[i] = *from;
        part->row[i].first_slot = slot;
        for (int32_t s = from->first_slot; s < from->first_slot + from->slots; s++, slot++) {
            part->slot_row[slot] = i;
            part->slot_expert[slot] = p->slot_expert[s];
            part->slot_weight[slot] = p->slot_weight[s];
        }
    }
    return part;
}

void problem_select_destroy(struct problem *part)
{
    if (part)
        free_batch(part);
}

void problem_poke(struct problem *p, int32_t t, int32_t i, float v)
{
    enum dtype d = (enum dtype)p->row[t].dtype;
    dtype_store_f32(p->input + p->row[t].in + (size_t)i * dtype_size(d), d, v);
}
