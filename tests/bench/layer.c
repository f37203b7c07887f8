/* SPDX-License-Identifier: Apache-2.0
 *
 * The layer under measurement, its adapters and batches; see layer.h.
 */
#include "tests/bench/layer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NOISE_STEP 1000 /* elements between the beginnings of two matrices in the noise */

static const struct shape shapes[] = {
    {"olmoe64", 64, 8, 2048, 1024},
    {"qwen3-30b", 128, 8, 2048, 768},
    {"mixtral", 8, 2, 4096, 14336},
    {"dsv3", 256, 8, 7168, 2048},
};

bool shape_parse(const char *text, struct shape *out)
{
    *out = (struct shape){.name = text};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        if (!strcmp(text, shapes[i].name))
            *out = shapes[i];
    if (!out->experts && sscanf(text, "%d:%d:%d:%d", &out->experts, &out->k, &out->hidden, &out->inter) != 4)
        return false;
    return out->experts >= 1 && out->experts <= KERNEL_MAX_EXPERTS && out->k >= 1 && out->k <= out->experts && out->hidden >= 8 &&
           out->inter >= 8 && out->hidden <= KERNEL_MAX_WIDTH && out->inter <= KERNEL_MAX_WIDTH;
}

void cuda_check(cudaError_t e, const char *what)
{
    if (e == cudaSuccess)
        return;
    fprintf(stderr, "expert-bench: %s: %s\n", what, cudaGetErrorString(e));
    exit(1);
}

void status_check(enum kernel_status s, const char *what)
{
    if (s == KERNEL_OK)
        return;
    fprintf(stderr, "expert-bench: %s failed: %s\n", what, cudaGetErrorString(cudaGetLastError()));
    exit(1);
}

void *host_alloc(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
    if (!p) {
        fprintf(stderr, "expert-bench: no memory for %zu bytes\n", bytes);
        exit(1);
    }
    return p;
}

void *device_alloc(size_t bytes)
{
    void *p = NULL;
    cuda_check(cudaMalloc(&p, bytes ? bytes : 1), "device memory");
    return p;
}

/* A copy from ordinary memory may return when it has been staged, and streams of ours don't wait for it. */
void device_write(void *to, const void *src, size_t bytes)
{
    cuda_check(cudaMemcpy(to, src, bytes, cudaMemcpyHostToDevice), "upload");
    cuda_check(cudaDeviceSynchronize(), "upload");
}

void *device_copy(const void *src, size_t bytes)
{
    void *p = device_alloc(bytes);
    device_write(p, src, bytes);
    return p;
}

static uint64_t next_random(uint64_t *state)
{
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Mean 0, variance 1. */
static float next_normal(uint64_t *state)
{
    uint64_t r = next_random(state);
    int64_t sum = (int64_t)(r & 0xffff) + (int64_t)(r >> 16 & 0xffff) + (int64_t)(r >> 32 & 0xffff) + (int64_t)(r >> 48);
    return ((float)sum - 131070.0f) / 37837.0f;
}

/* ---- the layer ----------------------------------------------------------------------------------------- */

const uint16_t *layer_weights(const struct layer *l, int expert, enum kernel_projection p)
{
    return l->noise + ((size_t)expert * KERNEL_PROJECTIONS + p) * NOISE_STEP;
}

static const uint16_t *lora_of(const struct layer *l, int adapter, int expert, enum kernel_projection p, int second)
{
    size_t n = ((((size_t)adapter * (size_t)l->shape.experts + (size_t)expert) * KERNEL_PROJECTIONS) + p) * 2 + (size_t)second;
    return l->noise + n * 48 % ((size_t)l->shape.inter * (size_t)l->shape.hidden);
}

static void pack_projection(const struct kernel_table *table, const struct kernel_dims *d, const struct layer *l, int expert,
                            enum kernel_projection p, char *block)
{
    struct kernel_span span;
    const int32_t channels = p == KERNEL_DOWN ? l->shape.hidden : l->shape.inter,
                  columns = p == KERNEL_DOWN ? l->shape.inter : l->shape.hidden;
    table->span(d, p, 0, channels, &span);
    table->pack(d, p, 0, channels, layer_weights(l, expert, p), (size_t)columns, block + span.offset, span.pitch);
}

static void load_expert(void *arg, int expert)
{
    struct layer *l = arg;
    size_t gate_up = l->table->gate_up_bytes(&l->dims), down = l->table->down_bytes(&l->dims);
    char *block = host_alloc(gate_up + down);
    pack_projection(l->table, &l->dims, l, expert, KERNEL_GATE, block);
    pack_projection(l->table, &l->dims, l, expert, KERNEL_UP, block);
    pack_projection(l->table, &l->dims, l, expert, KERNEL_DOWN, block + gate_up);
    cuda_check(cudaMemcpy(l->gate_up + (size_t)expert * gate_up, block, gate_up, cudaMemcpyHostToDevice), "upload");
    cuda_check(cudaMemcpy(l->down + (size_t)expert * down, block + gate_up, down, cudaMemcpyHostToDevice), "upload");
    free(block);
}

static void fill_noise(void *arg, int piece)
{
    struct layer *l = arg;
    size_t begin = (size_t)piece << 16, end = begin + (1 << 16) < l->noise_count ? begin + (1 << 16) : l->noise_count;
    uint64_t seed = (uint64_t)piece << 32 | 1;
    for (size_t i = begin; i < end; i++)
        l->noise[i] = dtype_f32_to_bf16(0.02f * next_normal(&seed));
}

void layer_open(struct layer *l, const char *code)
{
    char why[256];
    *l = (struct layer){.table = kernels_cuda(code, 0, why, sizeof why)};
    if (!l->table) {
        fprintf(stderr, "expert-bench: %s\n", why);
        exit(1);
    }
    cuda_check(cudaStreamCreateWithFlags(&l->stream, cudaStreamNonBlocking), "stream");
    l->wrapped = kernels_cuda_stream_create(0, l->stream);
    l->pool = kernels_cpu_stream_create(0);
    if (!l->wrapped || !l->pool) {
        fprintf(stderr, "expert-bench: no stream or no threads\n");
        exit(1);
    }
}

void layer_close(struct layer *l)
{
    kernels_cuda_stream_destroy(l->wrapped);
    kernels_cpu_stream_destroy(l->pool);
    cuda_check(cudaStreamDestroy(l->stream), "stream");
}

static struct kernel_forward bind(const struct layer *l, int adapters, void **scratch)
{
    struct device_limits limits = {
        .dims = l->dims, .max_rows = l->most_rows, .max_slots = l->most_rows * l->shape.k, .adapters = adapters, .layers = 1};
    struct kernel_forward f = {.weights = {.gate_up = l->gate_up, .down = l->down, .activation = KERNEL_ACT_SILU}};
    *scratch = device_alloc(forward_bind_scratch(l->table, &limits, NULL, NULL));
    forward_bind_scratch(l->table, &limits, *scratch, &f);
    return f;
}

void layer_load(struct layer *l, const struct shape *shape, int most_rows)
{
    l->shape = *shape;
    l->most_rows = most_rows;
    l->dims = (struct kernel_dims){.experts = shape->experts, .hidden = shape->hidden, .inter = shape->inter, .op = DTYPE_BF16};
    l->table->dims_init(&l->dims);
    size_t widest = (size_t)(shape->hidden > shape->inter ? shape->hidden : shape->inter);
    l->noise_count =
        (size_t)shape->hidden * (size_t)shape->inter + (size_t)shape->experts * KERNEL_PROJECTIONS * NOISE_STEP + KERNEL_MAX_RANK * widest;
    l->noise = host_alloc(l->noise_count * 2);
    kernels_cpu_parallel(l->pool, (int)((l->noise_count + (1 << 16) - 1) >> 16), fill_noise, l);
    l->gate_up = device_alloc((size_t)shape->experts * l->table->gate_up_bytes(&l->dims));
    l->down = device_alloc((size_t)shape->experts * l->table->down_bytes(&l->dims));
    kernels_cpu_parallel(l->pool, shape->experts, load_expert, l);
    cuda_check(cudaDeviceSynchronize(), "upload");
    l->forward = bind(l, 0, &l->scratch);
}

void layer_unload(struct layer *l)
{
    layer_install(l, 0, 0);
    void *device[] = {l->gate_up, l->down, l->scratch};
    for (size_t i = 0; i < sizeof device / sizeof device[0]; i++)
        cuda_check(cudaFree(device[i]), "free");
    free(l->noise);
}

/* ---- adapters ------------------------------------------------------------------------------------------ */

static size_t lora_bytes(const struct layer *l)
{
    size_t bytes = 0;
    for (enum kernel_projection p = KERNEL_GATE; p < KERNEL_PROJECTIONS; p++)
        bytes += l->table->lora_a_bytes(&l->dims, p, l->rank) + l->table->lora_b_bytes(&l->dims, p, l->rank);
    return bytes;
}

static void load_pair(void *arg, int pair)
{
    struct layer *l = arg;
    int rank = l->rank, adapter = pair / l->shape.experts, expert = pair % l->shape.experts;
    size_t bytes = lora_bytes(l), at = 0;
    char *block = host_alloc(bytes), *device = l->lora + (size_t)pair * bytes;
    for (enum kernel_projection p = KERNEL_GATE; p < KERNEL_PROJECTIONS; p++) {
        struct kernel_lora_entry *e = &l->entry[(size_t)pair * KERNEL_PROJECTIONS + p];
        e->rank = (rank + KERNEL_RANK_PAD - 1) / KERNEL_RANK_PAD * KERNEL_RANK_PAD;
        e->scale = 2.0f;
        e->a = (uint64_t)(uintptr_t)(device + at);
        l->table->pack_lora_a(&l->dims, p, rank, lora_of(l, adapter, expert, p, 0), block + at);
        at += l->table->lora_a_bytes(&l->dims, p, rank);
        e->b = (uint64_t)(uintptr_t)(device + at);
        l->table->pack_lora_b(&l->dims, p, rank, lora_of(l, adapter, expert, p, 1), block + at);
        at += l->table->lora_b_bytes(&l->dims, p, rank);
    }
    cuda_check(cudaMemcpy(device, block, bytes, cudaMemcpyHostToDevice), "upload");
    free(block);
}

void layer_install(struct layer *l, int adapters, int rank)
{
    void *device[] = {l->lora, l->entry_device, l->lora_scratch};
    for (size_t i = 0; i < sizeof device / sizeof device[0]; i++)
        cuda_check(cudaFree(device[i]), "free");
    free(l->entry);
    l->entry = l->entry_device = NULL;
    l->lora = l->lora_scratch = NULL;
    l->adapters = adapters;
    l->rank = rank;
    if (!adapters)
        return;
    int pairs = adapters * l->shape.experts;
    size_t bytes = (size_t)pairs * KERNEL_PROJECTIONS * sizeof *l->entry;
    l->entry = host_alloc(bytes);
    l->lora = device_alloc((size_t)pairs * lora_bytes(l));
    kernels_cpu_parallel(l->pool, pairs, load_pair, l);
    l->entry_device = device_copy(l->entry, bytes);
    l->lora_forward = bind(l, adapters, &l->lora_scratch);
    l->lora_forward.lora.entry = l->entry_device;
    l->lora_forward.lora.adapters = adapters;
}

/* ---- batches ------------------------------------------------------------------------------------------- */

struct drawing {
    const struct layer *l;
    struct set *set;
    uint16_t *values;
    int32_t *slot_row;
    int index;
};

static int draw_expert(const struct mix *mix, int experts, const int32_t *row, int taken, uint64_t *seed)
{
    if (mix->skew > 0 && (double)(next_random(seed) >> 11) * 0x1p-53 < mix->skew)
        return 0;
    const int least = mix->skew > 0; /* the favourite is drawn above alone, */
    if (taken >= experts - least)
        return 0; /* unless all others may be taken */
    for (;;) {
        int e = least + (int)(next_random(seed) % (uint64_t)(experts - least)), again = 0;
        for (int j = 0; j < taken; j++)
            again |= row[j] == e;
        if (!again)
            return e;
    }
}

static void draw_row(void *arg, int t)
{
    const struct drawing *d = arg;
    const struct mix *mix = &d->set->mix;
    const int k = d->l->shape.k, hidden = d->l->shape.hidden, experts = mix->experts ? mix->experts : d->l->shape.experts;
    uint64_t seed = (uint64_t)(d->index + 1) << 40 | (uint64_t)t << 8;
    seed = next_random(&seed); /* so that rows' sequences don't overlap */
    struct set *set = d->set;
    for (int i = 0; i < k; i++) {
        set->expert[t * k + i] = draw_expert(mix, experts, set->expert + t * k, i, &seed);
        set->weight[t * k + i] = (float)(next_random(&seed) % 1000) * 1e-3f;
        d->slot_row[t * k + i] = t;
    }
    uint64_t choice = next_random(&seed);
    set->row[t] = (struct kernel_row){.in = (uint64_t)(uintptr_t)(set->hidden + (size_t)t * (size_t)hidden),
                                      .out = (uint64_t)(uintptr_t)(set->out + (size_t)t * (size_t)hidden),
                                      .dtype = DTYPE_BF16,
                                      .adapter = mix->adapters ? (int)(choice % (uint64_t)mix->adapters) : -1,
                                      .first_slot = t * k,
                                      .slots = k};
    for (int i = 0; i < hidden; i++)
        d->values[(size_t)t * (size_t)hidden + (size_t)i] = dtype_f32_to_bf16(next_normal(&seed));
}

static void count_touched(const struct layer *l, struct set *set)
{
    const int k = l->shape.k, columns = set->mix.adapters + 1;
    unsigned char *seen = calloc((size_t)l->shape.experts * (size_t)columns, 1);
    if (!seen)
        cuda_check(cudaErrorMemoryAllocation, "counting experts");
    set->touched = set->pairs = 0;
    for (int i = 0; i < set->mix.rows * k; i++) {
        unsigned char *whole = &seen[(size_t)set->expert[i] * (size_t)columns], *pair = whole + set->row[i / k].adapter + 1;
        set->touched += !whole[0];
        whole[0] |= 1;
        if (pair != whole)
            set->pairs += !pair[0];
        pair[0] |= 1;
    }
    free(seen);
}

void set_make(const struct layer *l, struct set *set, const struct mix *mix, int index)
{
    const int rows = mix->rows, slots = rows * l->shape.k;
    const size_t bytes = (size_t)rows * (size_t)l->shape.hidden * 2;
    *set = (struct set){.mix = *mix, .hidden = device_alloc(bytes), .out = device_alloc(bytes)};
    set->row = host_alloc((size_t)rows * sizeof *set->row);
    set->expert = host_alloc((size_t)slots * 4);
    set->weight = host_alloc((size_t)slots * 4);
    struct drawing d = {.l = l, .set = set, .values = host_alloc(bytes), .slot_row = host_alloc((size_t)slots * 4), .index = index};
    kernels_cpu_parallel(l->pool, rows, draw_row, &d);
    device_write(set->hidden, d.values, bytes);
    count_touched(l, set);
    set->batch = (struct kernel_batch){.rows = rows,
                                       .slots = slots,
                                       .row = device_copy(set->row, (size_t)rows * sizeof *set->row),
                                       .slot_row = device_copy(d.slot_row, (size_t)slots * 4),
                                       .slot_expert = device_copy(set->expert, (size_t)slots * 4),
                                       .slot_weight = device_copy(set->weight, (size_t)slots * 4)};
    free(d.slot_row);
    free(d.values);
}

void set_drop(struct set *set)
{
    cuda_check(cudaFree(set->hidden), "free");
    cuda_check(cudaFree(set->out), "free");
    cuda_check(cudaFree((void *)(uintptr_t)set->batch.row), "free");
    cuda_check(cudaFree((void *)(uintptr_t)set->batch.slot_row), "free");
    cuda_check(cudaFree((void *)(uintptr_t)set->batch.slot_expert), "free");
    cuda_check(cudaFree((void *)(uintptr_t)set->batch.slot_weight), "free");
    free(set->row);
    free(set->expert);
    free(set->weight);
}

struct kernel_forward set_forward(const struct layer *l, const struct set *set, enum kernel_path path)
{
    struct kernel_forward f = set->mix.adapters ? l->lora_forward : l->forward;
    f.batch = set->batch;
    f.path = path;
    return f;
}

enum kernel_path layer_automatic(const struct layer *l, int rows) { return rows <= l->table->decode_rows ? KERNEL_DECODE : KERNEL_PREFILL; }

/* ---- the reference ------------------------------------------------------------------------------------- */

double row_distance(const uint16_t *got, const uint16_t *want, int n)
{
    double error = 0, norm = 0;
    for (int i = 0; i < n; i++) {
        double g = dtype_bf16_to_f32(got[i]), w = dtype_bf16_to_f32(want[i]);
        error += (g - w) * (g - w);
        norm += w * w;
    }
    return error == error ? sqrt(error / norm) : INFINITY;
}

/* The row's experts are numbered 0.. for the reference. */
void layer_reference(const struct layer *l, const struct set *set, int t, uint16_t *want)
{
    const struct kernel_table *ref = kernels_ref();
    const int k = l->shape.k, hidden = l->shape.hidden, rank = l->rank, adapter = set->row[t].adapter;
    const bool adapted = adapter >= 0;
    struct device_limits limits = {.max_rows = 1, .max_slots = k, .adapters = 1, .layers = 1};
    limits.dims = (struct kernel_dims){.experts = k, .hidden = hidden, .inter = l->shape.inter, .op = DTYPE_BF16};
    ref->dims_init(&limits.dims);
    size_t gate_up = ref->gate_up_bytes(&limits.dims), down = ref->down_bytes(&limits.dims);
    struct kernel_forward f = {0};
    char *scratch = host_alloc(forward_bind_scratch(ref, &limits, NULL, NULL));
    forward_bind_scratch(ref, &limits, scratch, &f);
    char *w = host_alloc((size_t)k * (gate_up + down));
    struct kernel_lora_entry *entry = calloc((size_t)k * KERNEL_PROJECTIONS, sizeof *entry);
    void **packed = calloc((size_t)k * KERNEL_PROJECTIONS * 2, sizeof *packed);
    int32_t *slot_expert = host_alloc((size_t)k * 4), *slot_row = host_alloc((size_t)k * 4);
    if (!entry || !packed)
        cuda_check(cudaErrorMemoryAllocation, "the reference");
    for (int i = 0; i < k; i++) {
        int expert = set->expert[t * k + i];
        slot_expert[i] = i;
        slot_row[i] = 0;
        pack_projection(ref, &limits.dims, l, expert, KERNEL_GATE, w + (size_t)i * gate_up);
        pack_projection(ref, &limits.dims, l, expert, KERNEL_UP, w + (size_t)i * gate_up);
        pack_projection(ref, &limits.dims, l, expert, KERNEL_DOWN, w + (size_t)k * gate_up + (size_t)i * down);
        for (enum kernel_projection p = KERNEL_GATE; adapted && p < KERNEL_PROJECTIONS; p++) {
            struct kernel_lora_entry *e = &entry[i * KERNEL_PROJECTIONS + (int)p];
            void **two = &packed[(i * KERNEL_PROJECTIONS + (int)p) * 2];
            *e = l->entry[((size_t)adapter * (size_t)l->shape.experts + (size_t)expert) * KERNEL_PROJECTIONS + p];
            two[0] = host_alloc(ref->lora_a_bytes(&limits.dims, p, rank));
            two[1] = host_alloc(ref->lora_b_bytes(&limits.dims, p, rank));
            ref->pack_lora_a(&limits.dims, p, rank, lora_of(l, adapter, expert, p, 0), two[0]);
            ref->pack_lora_b(&limits.dims, p, rank, lora_of(l, adapter, expert, p, 1), two[1]);
            e->a = (uint64_t)(uintptr_t)two[0];
            e->b = (uint64_t)(uintptr_t)two[1];
        }
    }
    uint16_t *in = host_alloc((size_t)hidden * 2);
    cuda_check(cudaMemcpy(in, set->hidden + (size_t)t * (size_t)hidden, (size_t)hidden * 2, cudaMemcpyDeviceToHost), "download");
    struct kernel_row row = {(uint64_t)(uintptr_t)in, (uint64_t)(uintptr_t)want, DTYPE_BF16, adapted ? 0 : -1, 0, k};
    f.dims = limits.dims;
    f.weights = (struct kernel_weights){.gate_up = w, .down = w + (size_t)k * gate_up, .activation = KERNEL_ACT_SILU};
    f.batch = (struct kernel_batch){1, k, &row, slot_row, slot_expert, set->weight + t * k};
    f.lora.entry = adapted ? entry : NULL;
    f.lora.adapters = adapted;
    status_check(forward_run(ref, NULL, &f), "the reference");
    for (int i = 0; i < k * KERNEL_PROJECTIONS * 2; i++)
        free(packed[i]);
    void *all[] = {scratch, w, entry, packed, slot_expert, slot_row, in};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

struct judgement {
    const struct layer *l;
    const struct set *set;
    double error[2]; /* of the first and the last row */
};

static void judge_row(void *arg, int i)
{
    struct judgement *j = arg;
    const int hidden = j->l->shape.hidden, t = i * (j->set->mix.rows - 1);
    const size_t bytes = (size_t)hidden * 2;
    uint16_t *got = host_alloc(bytes), *want = host_alloc(bytes);
    cuda_check(cudaMemcpy(got, j->set->out + (size_t)t * (size_t)hidden, bytes, cudaMemcpyDeviceToHost), "download");
    layer_reference(j->l, j->set, t, want);
    j->error[i] = row_distance(got, want, hidden);
    free(got);
    free(want);
}

double set_error(const struct layer *l, const struct set *set)
{
    struct judgement j = {.l = l, .set = set};
    kernels_cpu_parallel(l->pool, set->mix.rows > 1 ? 2 : 1, judge_row, &j);
    return fmax(j.error[0], j.error[1]);
}
