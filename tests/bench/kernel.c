/* SPDX-License-Identifier: Apache-2.0
 *
 * Times whole forwards of one layer, replayed from a CUDA graph that goes round several batches with routings of their own, so that
 * neither weights nor x wait in the cache. The same run checks rows of the result against the scalar reference and that eager and
 * captured runs give the same bits. The floor is what no version can beat: every touched expert's weights and adapters read once
 * and the rows in and out, at the read bandwidth, or the products' operations at the dense rate.
 */
#include "tests/bench/kernel.h"
#include "engine/device.h"

#include <cuda_runtime_api.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_SETS 8
#define MOST_LIST 32
#define STEPS 7
#define NOISE_STEP 1000 /* elements between the beginnings of two matrices in the noise */

struct shape {
    const char *name;
    int experts, k, hidden, inter;
};

static const struct shape shapes[] = {
    {"olmoe64", 64, 8, 2048, 1024},
    {"qwen3-30b", 128, 8, 2048, 768},
    {"mixtral", 8, 2, 4096, 14336},
    {"dsv3", 256, 8, 7168, 2048},
};

struct settings {
    const char *code, *path, *csv;
    struct shape shape[MOST_LIST];
    int shape_count, rows[MOST_LIST], row_count;
    int adapters, rank, sets;
    bool steps, check;
    double bandwidth, rate; /* bytes and operations a second */
};

struct set {
    struct kernel_forward f;
    uint16_t *hidden, *out; /* device, [T, H] */
    struct kernel_row *row; /* host */
    int32_t *expert;
    float *weight;
    int32_t touched, pairs; /* experts; (adapter, expert) */
};

struct bench {
    const struct settings *settings;
    struct shape shape;
    const struct kernel_table *table;
    cudaStream_t stream;
    struct kernel_stream *wrapped, *pool;
    struct kernel_dims dims;
    uint16_t *noise; /* host: every matrix is a piece of it */
    size_t noise_count;
    char *gate_up, *down, *lora; /* device */
    struct kernel_lora_entry *entry; /* host copy; device addresses inside */
    struct kernel_lora_entry *entry_device;
    void *scratch;
    struct kernel_forward forward; /* scratch bound */
};

static void check(cudaError_t e, const char *what)
{
    if (e == cudaSuccess)
        return;
    fprintf(stderr, "expert-bench: %s: %s\n", what, cudaGetErrorString(e));
    exit(1);
}

static void check_status(enum kernel_status s, const char *what)
{
    if (s == KERNEL_OK)
        return;
    fprintf(stderr, "expert-bench: %s failed: %s\n", what, cudaGetErrorString(cudaGetLastError()));
    exit(1);
}

static void *host_alloc(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
    if (!p) {
        fprintf(stderr, "expert-bench: no memory for %zu bytes\n", bytes);
        exit(1);
    }
    return p;
}

static void *device_alloc(size_t bytes)
{
    void *p = NULL;
    check(cudaMalloc(&p, bytes ? bytes : 1), "device memory");
    return p;
}

static void *device_copy(const void *src, size_t bytes)
{
    void *p = device_alloc(bytes);
    check(cudaMemcpy(p, src, bytes, cudaMemcpyHostToDevice), "upload");
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

static const uint16_t *weights_of(const struct bench *b, int expert, enum kernel_projection p)
{
    return b->noise + ((size_t)expert * KERNEL_PROJECTIONS + p) * NOISE_STEP;
}

static const uint16_t *lora_of(const struct bench *b, int adapter, int expert, enum kernel_projection p, int second)
{
    size_t n = ((((size_t)adapter * (size_t)b->shape.experts + (size_t)expert) * KERNEL_PROJECTIONS) + p) * 2 + (size_t)second;
    return b->noise + n * 48 % (size_t)(b->shape.inter / 2 * b->shape.hidden);
}

static int32_t columns(const struct bench *b, enum kernel_projection p) { return p == KERNEL_DOWN ? b->shape.inter : b->shape.hidden; }
static int32_t channels(const struct bench *b, enum kernel_projection p) { return p == KERNEL_DOWN ? b->shape.hidden : b->shape.inter; }

static void pack_projection(const struct kernel_table *table, const struct kernel_dims *d, const struct bench *b, int expert,
                            enum kernel_projection p, char *block)
{
    struct kernel_span span;
    table->span(d, p, 0, channels(b, p), &span);
    table->pack(d, p, 0, channels(b, p), weights_of(b, expert, p), (size_t)columns(b, p), block + span.offset, span.pitch);
}

static void load_expert(void *arg, int expert)
{
    struct bench *b = arg;
    size_t gate_up = b->table->gate_up_bytes(&b->dims), down = b->table->down_bytes(&b->dims);
    char *block = host_alloc(gate_up + down);
    pack_projection(b->table, &b->dims, b, expert, KERNEL_GATE, block);
    pack_projection(b->table, &b->dims, b, expert, KERNEL_UP, block);
    pack_projection(b->table, &b->dims, b, expert, KERNEL_DOWN, block + gate_up);
    check(cudaMemcpy(b->gate_up + (size_t)expert * gate_up, block, gate_up, cudaMemcpyHostToDevice), "upload");
    check(cudaMemcpy(b->down + (size_t)expert * down, block + gate_up, down, cudaMemcpyHostToDevice), "upload");
    free(block);
}

static size_t lora_bytes(const struct bench *b)
{
    size_t bytes = 0;
    for (enum kernel_projection p = KERNEL_GATE; p < KERNEL_PROJECTIONS; p++)
        bytes += b->table->lora_a_bytes(&b->dims, p, b->settings->rank) + b->table->lora_b_bytes(&b->dims, p, b->settings->rank);
    return bytes;
}

static void load_pair(void *arg, int pair)
{
    struct bench *b = arg;
    int rank = b->settings->rank, adapter = pair / b->shape.experts, expert = pair % b->shape.experts;
    size_t bytes = lora_bytes(b), at = 0;
    char *block = host_alloc(bytes), *device = b->lora + (size_t)pair * bytes;
    for (enum kernel_projection p = KERNEL_GATE; p < KERNEL_PROJECTIONS; p++) {
        struct kernel_lora_entry *e = &b->entry[(size_t)pair * KERNEL_PROJECTIONS + p];
        e->rank = (rank + KERNEL_RANK_PAD - 1) / KERNEL_RANK_PAD * KERNEL_RANK_PAD;
        e->scale = 2.0f;
        e->a = (uint64_t)(uintptr_t)(device + at);
        b->table->pack_lora_a(&b->dims, p, rank, lora_of(b, adapter, expert, p, 0), block + at);
        at += b->table->lora_a_bytes(&b->dims, p, rank);
        e->b = (uint64_t)(uintptr_t)(device + at);
        b->table->pack_lora_b(&b->dims, p, rank, lora_of(b, adapter, expert, p, 1), block + at);
        at += b->table->lora_b_bytes(&b->dims, p, rank);
    }
    check(cudaMemcpy(device, block, bytes, cudaMemcpyHostToDevice), "upload");
    free(block);
}

static void load_layer(struct bench *b)
{
    const struct settings *s = b->settings;
    const struct shape *shape = &b->shape;
    b->dims = (struct kernel_dims){.experts = shape->experts, .hidden = shape->hidden, .inter = shape->inter, .op = DTYPE_BF16};
    b->table->dims_init(&b->dims);
    b->noise_count = (size_t)shape->hidden * (size_t)shape->inter + (size_t)shape->experts * KERNEL_PROJECTIONS * NOISE_STEP;
    b->noise = host_alloc(b->noise_count * 2);
    uint64_t seed = 1;
    for (size_t i = 0; i < b->noise_count; i++)
        b->noise[i] = dtype_f32_to_bf16(0.02f * next_normal(&seed));
    b->gate_up = device_alloc((size_t)shape->experts * b->table->gate_up_bytes(&b->dims));
    b->down = device_alloc((size_t)shape->experts * b->table->down_bytes(&b->dims));
    kernels_cpu_parallel(b->pool, shape->experts, load_expert, b);
    if (s->adapters) {
        int pairs = s->adapters * shape->experts;
        size_t bytes = (size_t)pairs * KERNEL_PROJECTIONS * sizeof *b->entry;
        b->entry = host_alloc(bytes);
        b->lora = device_alloc((size_t)pairs * lora_bytes(b));
        kernels_cpu_parallel(b->pool, pairs, load_pair, b);
        b->entry_device = device_copy(b->entry, bytes);
    }
    int most = 0;
    for (int i = 0; i < s->row_count; i++)
        most = s->rows[i] > most ? s->rows[i] : most;
    struct device_limits limits = {.dims = b->dims, .max_rows = most, .max_slots = most * shape->k, .adapters = s->adapters, .layers = 1};
    size_t scratch = forward_bind_scratch(b->table, &limits, NULL, NULL);
    b->scratch = device_alloc(scratch);
    forward_bind_scratch(b->table, &limits, b->scratch, &b->forward);
    b->forward.weights = (struct kernel_weights){.gate_up = b->gate_up, .down = b->down, .activation = KERNEL_ACT_SILU};
}

static void unload_layer(struct bench *b)
{
    void *device[] = {b->gate_up, b->down, b->lora, b->entry_device, b->scratch};
    for (size_t i = 0; i < sizeof device / sizeof device[0]; i++)
        check(cudaFree(device[i]), "free");
    free(b->noise);
    free(b->entry);
}

/* ---- batches ------------------------------------------------------------------------------------------- */

static void make_set(struct bench *b, struct set *set, int rows, uint64_t seed)
{
    const int k = b->shape.k, experts = b->shape.experts, hidden = b->shape.hidden, slots = rows * k;
    int adapters = b->settings->adapters;
    uint16_t *values = host_alloc((size_t)rows * (size_t)hidden * 2);
    for (size_t i = 0; i < (size_t)rows * (size_t)hidden; i++)
        values[i] = dtype_f32_to_bf16(next_normal(&seed));
    set->hidden = device_copy(values, (size_t)rows * (size_t)hidden * 2);
    set->out = device_alloc((size_t)rows * (size_t)hidden * 2);
    free(values);
    set->row = host_alloc((size_t)rows * sizeof *set->row);
    set->expert = host_alloc((size_t)slots * 4);
    set->weight = host_alloc((size_t)slots * 4);
    int32_t *slot_row = host_alloc((size_t)slots * 4);
    unsigned char *seen = calloc((size_t)experts * (size_t)(adapters + 1), 1);
    set->touched = set->pairs = 0;
    for (int t = 0; t < rows; t++) {
        int adapter = adapters ? (int)(next_random(&seed) % (uint64_t)adapters) : -1;
        set->row[t] = (struct kernel_row){.in = (uint64_t)(uintptr_t)(set->hidden + (size_t)t * (size_t)hidden),
                                          .out = (uint64_t)(uintptr_t)(set->out + (size_t)t * (size_t)hidden),
                                          .dtype = DTYPE_BF16,
                                          .adapter = adapter,
                                          .first_slot = t * k,
                                          .slots = k};
        for (int i = 0; i < k; i++) {
            int e, again;
            do {
                e = (int)(next_random(&seed) % (uint64_t)experts);
                again = 0;
                for (int j = 0; j < i; j++)
                    again |= set->expert[t * k + j] == e;
            } while (again);
            set->expert[t * k + i] = e;
            set->weight[t * k + i] = (float)(next_random(&seed) % 1000) * 1e-3f;
            slot_row[t * k + i] = t;
            unsigned char *whole = &seen[(size_t)e * (size_t)(adapters + 1)];
            set->touched += !whole[0];
            whole[0] = 1;
            if (adapters) {
                set->pairs += !whole[adapter + 1];
                whole[adapter + 1] = 1;
            }
        }
    }
    free(seen);
    set->f = b->forward;
    set->f.batch = (struct kernel_batch){.rows = rows,
                                         .slots = slots,
                                         .row = device_copy(set->row, (size_t)rows * sizeof *set->row),
                                         .slot_row = device_copy(slot_row, (size_t)slots * 4),
                                         .slot_expert = device_copy(set->expert, (size_t)slots * 4),
                                         .slot_weight = device_copy(set->weight, (size_t)slots * 4)};
    free(slot_row);
}

static void drop_set(struct set *set)
{
    check(cudaFree(set->hidden), "free");
    check(cudaFree(set->out), "free");
    check(cudaFree((void *)(uintptr_t)set->f.batch.row), "free");
    check(cudaFree((void *)(uintptr_t)set->f.batch.slot_row), "free");
    check(cudaFree((void *)(uintptr_t)set->f.batch.slot_expert), "free");
    check(cudaFree((void *)(uintptr_t)set->f.batch.slot_weight), "free");
    free(set->row);
    free(set->expert);
    free(set->weight);
}

/* ---- the reference ------------------------------------------------------------------------------------- */

/* Relative error of row t of a set, which was run; its experts are numbered 0.. for the reference. */
static double row_error(const struct bench *b, const struct set *set, int t, bool adapted)
{
    const struct kernel_table *ref = kernels_ref();
    const int k = b->shape.k, hidden = b->shape.hidden, rank = b->settings->rank, adapter = set->row[t].adapter;
    struct device_limits limits = {.max_rows = 1, .max_slots = k, .adapters = 1, .layers = 1};
    limits.dims = (struct kernel_dims){.experts = k, .hidden = hidden, .inter = b->shape.inter, .op = DTYPE_BF16};
    ref->dims_init(&limits.dims);
    size_t gate_up = ref->gate_up_bytes(&limits.dims), down = ref->down_bytes(&limits.dims);
    struct kernel_forward f = {0};
    char *scratch = host_alloc(forward_bind_scratch(ref, &limits, NULL, NULL));
    forward_bind_scratch(ref, &limits, scratch, &f);
    char *w = host_alloc((size_t)k * (gate_up + down));
    struct kernel_lora_entry *entry = calloc((size_t)k * KERNEL_PROJECTIONS, sizeof *entry);
    void **packed = calloc((size_t)k * KERNEL_PROJECTIONS * 2, sizeof *packed);
    int32_t *slot_expert = host_alloc((size_t)k * 4), *slot_row = host_alloc((size_t)k * 4);
    for (int i = 0; i < k; i++) {
        int expert = set->expert[t * k + i];
        slot_expert[i] = i;
        slot_row[i] = 0;
        pack_projection(ref, &limits.dims, b, expert, KERNEL_GATE, w + (size_t)i * gate_up);
        pack_projection(ref, &limits.dims, b, expert, KERNEL_UP, w + (size_t)i * gate_up);
        pack_projection(ref, &limits.dims, b, expert, KERNEL_DOWN, w + (size_t)k * gate_up + (size_t)i * down);
        for (enum kernel_projection p = KERNEL_GATE; adapted && p < KERNEL_PROJECTIONS; p++) {
            struct kernel_lora_entry *e = &entry[i * KERNEL_PROJECTIONS + (int)p];
            void **two = &packed[(i * KERNEL_PROJECTIONS + (int)p) * 2];
            *e = b->entry[((size_t)adapter * (size_t)b->shape.experts + (size_t)expert) * KERNEL_PROJECTIONS + p];
            two[0] = host_alloc(ref->lora_a_bytes(&limits.dims, p, rank));
            two[1] = host_alloc(ref->lora_b_bytes(&limits.dims, p, rank));
            ref->pack_lora_a(&limits.dims, p, rank, lora_of(b, adapter, expert, p, 0), two[0]);
            ref->pack_lora_b(&limits.dims, p, rank, lora_of(b, adapter, expert, p, 1), two[1]);
            e->a = (uint64_t)(uintptr_t)two[0];
            e->b = (uint64_t)(uintptr_t)two[1];
        }
    }
    uint16_t *in = host_alloc((size_t)hidden * 2), *got = host_alloc((size_t)hidden * 2), *want = host_alloc((size_t)hidden * 2);
    check(cudaMemcpy(in, set->hidden + (size_t)t * (size_t)hidden, (size_t)hidden * 2, cudaMemcpyDeviceToHost), "download");
    check(cudaMemcpy(got, set->out + (size_t)t * (size_t)hidden, (size_t)hidden * 2, cudaMemcpyDeviceToHost), "download");
    struct kernel_row row = {(uint64_t)(uintptr_t)in, (uint64_t)(uintptr_t)want, DTYPE_BF16, adapted ? 0 : -1, 0, k};
    f.dims = limits.dims;
    f.weights = (struct kernel_weights){.gate_up = w, .down = w + (size_t)k * gate_up, .activation = KERNEL_ACT_SILU};
    f.batch = (struct kernel_batch){1, k, &row, slot_row, slot_expert, set->weight + t * k};
    f.lora.entry = adapted ? entry : NULL;
    f.lora.adapters = adapted;
    check_status(forward_run(ref, NULL, &f), "the reference");
    double error = 0, norm = 0;
    for (int i = 0; i < hidden; i++) {
        double g = dtype_bf16_to_f32(got[i]), r = dtype_bf16_to_f32(want[i]);
        error += (g - r) * (g - r);
        norm += r * r;
    }
    for (int i = 0; i < k * KERNEL_PROJECTIONS * 2; i++)
        free(packed[i]);
    void *all[] = {scratch, w, entry, packed, slot_expert, slot_row, in, got, want};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
    return error == error ? sqrt(error / norm) : INFINITY;
}

/* ---- timing -------------------------------------------------------------------------------------------- */

/* The first `steps` steps of each set, one after the other. */
static cudaGraphExec_t capture(struct bench *b, struct set *set, int sets, int steps)
{
    enum kernel_status (*const step[STEPS])(struct kernel_stream *, const struct kernel_forward *) = {
        b->table->enter,       b->table->route, b->table->shrink_gate_up, b->table->gate_up,
        b->table->shrink_down, b->table->down,  b->table->combine};
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    check(cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeThreadLocal), "capture");
    for (int s = 0; s < sets; s++)
        for (int i = 0; i < steps; i++)
            if (set[s].f.lora.entry || (i != 2 && i != 4))
                check_status(step[i](b->wrapped, &set[s].f), "a step under capture");
    check(cudaStreamEndCapture(b->stream, &graph), "capture");
    check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    check(cudaGraphDestroy(graph), "graph");
    return exec;
}

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Microseconds of one forward, the median of replays. */
static double replay(struct bench *b, cudaGraphExec_t exec, int sets)
{
    enum { MOST = 64 };
    float ms[MOST], total = 0;
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin), "event");
    check(cudaEventCreate(&end), "event");
    int n = 0;
    for (int i = -2; i < MOST && (i < 8 || total < 60); i++) {
        float took;
        check(cudaEventRecord(begin, b->stream), "event");
        check(cudaGraphLaunch(exec, b->stream), "replay");
        check(cudaEventRecord(end, b->stream), "event");
        check(cudaEventSynchronize(end), "replay");
        check(cudaEventElapsedTime(&took, begin, end), "event");
        if (i < 0)
            continue;
        ms[n++] = took;
        total += took;
    }
    check(cudaEventDestroy(begin), "event");
    check(cudaEventDestroy(end), "event");
    qsort(ms, (size_t)n, sizeof *ms, by_value);
    return (double)ms[n / 2] * 1e3 / sets;
}

static void run_one(struct bench *b, int rows, enum kernel_path path, bool adapted, double *base_us, FILE *csv)
{
    static const char *const step_name[STEPS] = {"enter", "route", "shrink_gate_up", "gate_up", "shrink_down", "down", "combine"};
    const struct settings *s = b->settings;
    const struct shape *shape = &b->shape;
    const int sets = rows >= 2048 ? 4 : s->sets;
    struct set set[MOST_SETS];
    double touched = 0, pairs = 0;
    for (int i = 0; i < sets; i++) {
        make_set(b, &set[i], rows, (uint64_t)(i * 7919 + rows));
        set[i].f.path = path;
        set[i].f.lora.entry = adapted ? b->entry_device : NULL;
        set[i].f.lora.adapters = adapted ? s->adapters : 0;
        touched += (double)set[i].touched / sets;
        pairs += (double)set[i].pairs / sets;
    }
    const size_t out_bytes = (size_t)rows * (size_t)shape->hidden * 2;
    check(cudaMemset(set[0].out, 0xff, out_bytes), "poison");
    check(cudaDeviceSynchronize(), "poison");
    check_status(forward_run(b->table, b->wrapped, &set[0].f), "eager run");
    check_status(b->table->wait(b->wrapped), "eager run");
    double error = NAN;
    if (s->check) {
        error = row_error(b, &set[0], 0, adapted);
        double last = row_error(b, &set[0], rows - 1, adapted);
        error = last > error ? last : error;
    }
    char *eager = host_alloc(out_bytes), *replayed = host_alloc(out_bytes);
    check(cudaMemcpy(eager, set[0].out, out_bytes, cudaMemcpyDeviceToHost), "download");
    cudaGraphExec_t exec = capture(b, set, sets, STEPS);
    double us = replay(b, exec, sets);
    check(cudaMemcpy(replayed, set[0].out, out_bytes, cudaMemcpyDeviceToHost), "download");
    bool same = memcmp(eager, replayed, out_bytes) == 0;
    check(cudaGraphExecDestroy(exec), "graph");
    free(eager);
    free(replayed);

    double matrix = (double)shape->hidden * shape->inter, lora = 6.0 * s->rank * (shape->hidden + shape->inter);
    double bytes = touched * 6 * matrix + 4.0 * rows * shape->hidden + (adapted ? pairs * lora : 0);
    double flops = 6.0 * rows * shape->k * matrix;
    double memory_us = bytes / s->bandwidth * 1e6, math_us = flops / s->rate * 1e6, floor_us = memory_us > math_us ? memory_us : math_us;
    char adapters[48] = "base", added[48] = "";
    if (adapted) {
        snprintf(adapters, sizeof adapters, "%d x r%d", s->adapters, s->rank);
        snprintf(added, sizeof added, "  adds %.1f (bytes %.1f)", us - *base_us, pairs * lora / s->bandwidth * 1e6);
    } else {
        *base_us = us;
    }
    char verdict[48] = "unchecked";
    if (s->check)
        snprintf(verdict, sizeof verdict, "error %.1e %s", error, error < 4e-3 && same ? "ok" : same ? "WRONG" : "NOT SAME AS EAGER");
    printf("%-10s T=%-5d %-7s %-9s floor %7.1f us  time %7.1f us  %5.1f%% of floor  %5.2f TB/s  %6.1f TFLOP/s  %s%s\n", shape->name, rows,
           path == KERNEL_DECODE ? "decode" : "prefill", adapters, floor_us, us, 100 * floor_us / us, bytes / us * 1e-6, flops / us * 1e-6,
           verdict, added);
    if (csv)
        fprintf(csv, "%s,%s,%d,%s,%d,%d,%.2f,%.2f,%.3f,%.1f,%.3e,%d\n", b->table->name, shape->name, rows,
                path == KERNEL_DECODE ? "decode" : "prefill", adapted ? s->adapters : 0, adapted ? s->rank : 0, floor_us, us,
                bytes / us * 1e-6, flops / us * 1e-6, error, same);
    if (s->steps) {
        double before = 0;
        printf("           ");
        for (int i = 1; i <= STEPS; i++) {
            if (!adapted && (i == 3 || i == 5))
                continue;
            exec = capture(b, set, sets, i);
            double now = replay(b, exec, sets);
            check(cudaGraphExecDestroy(exec), "graph");
            printf("  %s %.1f", step_name[i - 1], now - before);
            before = now;
        }
        printf("\n");
    }
    fflush(stdout);
    for (int i = 0; i < sets; i++)
        drop_set(&set[i]);
}

/* ---- the command line ---------------------------------------------------------------------------------- */

static int usage(FILE *out, int status)
{
    fputs("usage: expert-bench kernel [OPTIONS]\n"
          "  --shape LIST      olmoe64, qwen3-30b, mixtral, dsv3, or E:K:H:I (default olmoe64)\n"
          "  --rows LIST       rows of a batch (default 1,8,32,128,512,2048,8192)\n"
          "  --path PATH       auto, decode, prefill or both (default auto)\n"
          "  --adapters N      also with every row on a random one of N adapters\n"
          "  --rank R          of the adapters (default 16)\n"
          "  --code CODE       auto, sm90 or portable (default auto)\n"
          "  --sets N          batches that a replay goes round (default 8)\n"
          "  --bandwidth TB/s, --rate TFLOP/s   the limits that the floor is drawn from (default 4.57, 790)\n"
          "  --steps           also the time of each step\n"
          "  --no-check        no comparison with the reference\n"
          "  --csv FILE        one line a measurement\n"
          "  --help            print this\n",
          out);
    return status;
}

static bool parse_shapes(struct settings *s, char *list)
{
    for (char *save, *name = strtok_r(list, ",", &save); name; name = strtok_r(NULL, ",", &save)) {
        struct shape *shape = &s->shape[s->shape_count];
        if (s->shape_count == MOST_LIST)
            return false;
        *shape = (struct shape){.name = name};
        for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
            if (!strcmp(name, shapes[i].name))
                *shape = shapes[i];
        if (!shape->experts && sscanf(name, "%d:%d:%d:%d", &shape->experts, &shape->k, &shape->hidden, &shape->inter) != 4)
            return false;
        if (shape->experts < 1 || shape->experts > KERNEL_MAX_EXPERTS || shape->k < 1 || shape->k > shape->experts || shape->hidden < 8 ||
            shape->inter < 8 || shape->hidden > 1 << 16 || shape->inter > 1 << 16)
            return false;
        s->shape_count++;
    }
    return s->shape_count > 0;
}

static bool parse_rows(struct settings *s, char *list)
{
    s->row_count = 0;
    for (char *save, *item = strtok_r(list, ",", &save); item && s->row_count < MOST_LIST; item = strtok_r(NULL, ",", &save)) {
        s->rows[s->row_count] = atoi(item);
        if (s->rows[s->row_count] < 1 || s->rows[s->row_count++] > 1 << 17)
            return false;
    }
    return s->row_count > 0;
}

int kernel_main(int argc, char **argv)
{
    static const struct option options[] = {
        {"shape", required_argument, NULL, 's'}, {"rows", required_argument, NULL, 't'},
        {"path", required_argument, NULL, 'p'},  {"adapters", required_argument, NULL, 'a'},
        {"rank", required_argument, NULL, 'r'},  {"code", required_argument, NULL, 'c'},
        {"sets", required_argument, NULL, 'n'},  {"steps", no_argument, NULL, 'S'},
        {"no-check", no_argument, NULL, 'C'},    {"bandwidth", required_argument, NULL, 'b'},
        {"rate", required_argument, NULL, 'f'},  {"csv", required_argument, NULL, 'o'},
        {"help", no_argument, NULL, 'h'},        {NULL, 0, NULL, 0},
    };
    char default_rows[] = "1,8,32,128,512,2048,8192", default_shape[] = "olmoe64";
    struct settings s = {.path = "auto", .rank = 16, .sets = MOST_SETS, .check = true, .bandwidth = 4.57e12, .rate = 790e12};
    bool good = parse_rows(&s, default_rows);
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        switch (c) {
        case 's': good = good && parse_shapes(&s, optarg); break;
        case 't': good = good && parse_rows(&s, optarg); break;
        case 'p': s.path = optarg; break;
        case 'a': s.adapters = atoi(optarg); break;
        case 'r': s.rank = atoi(optarg); break;
        case 'c': s.code = optarg; break;
        case 'n': s.sets = atoi(optarg); break;
        case 'S': s.steps = true; break;
        case 'C': s.check = false; break;
        case 'b': s.bandwidth = atof(optarg) * 1e12; break;
        case 'f': s.rate = atof(optarg) * 1e12; break;
        case 'o': s.csv = optarg; break;
        case 'h': return usage(stdout, 0);
        default: return usage(stderr, 2);
        }
    }
    bool both = !strcmp(s.path, "both"), known = both || !strcmp(s.path, "auto") || !strcmp(s.path, "decode") || !strcmp(s.path, "prefill");
    if (!s.shape_count)
        parse_shapes(&s, default_shape);
    if (!good || !known || optind != argc || s.sets < 1 || s.sets > MOST_SETS || s.adapters < 0 || s.adapters > 1024 || s.rank < 1 ||
        s.rank > KERNEL_MAX_RANK || s.bandwidth <= 0 || s.rate <= 0)
        return usage(stderr, 2);
    char why[256];
    struct bench b = {.settings = &s, .table = kernels_cuda(s.code, 0, why, sizeof why)};
    if (!b.table) {
        fprintf(stderr, "expert-bench: %s\n", why);
        return 1;
    }
    check(cudaStreamCreateWithFlags(&b.stream, cudaStreamNonBlocking), "stream");
    b.wrapped = kernels_cuda_stream_create(0, b.stream);
    b.pool = kernels_cpu_stream_create(0);
    FILE *csv = s.csv ? fopen(s.csv, "w") : NULL;
    if (!b.wrapped || !b.pool || (s.csv && !csv)) {
        fprintf(stderr, "expert-bench: no stream, threads or file\n");
        return 1;
    }
    if (csv)
        fputs("code,shape,rows,path,adapters,rank,floor_us,time_us,tb_s,tflop_s,error,same_bits_as_eager\n", csv);
    struct cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, 0), "properties");
    printf("%s, %s, limits %.2f TB/s and %.0f TFLOP/s\n", properties.name, b.table->name, s.bandwidth * 1e-12, s.rate * 1e-12);
    for (int i = 0; i < s.shape_count; i++) {
        b.shape = s.shape[i];
        b.lora = NULL;
        b.entry = b.entry_device = NULL;
        load_layer(&b);
        for (int t = 0; t < s.row_count; t++) {
            for (enum kernel_path path = KERNEL_DECODE; path < KERNEL_PATHS; path++) {
                enum kernel_path automatic = s.rows[t] <= b.table->decode_rows ? KERNEL_DECODE : KERNEL_PREFILL;
                bool wanted = both || (!strcmp(s.path, "auto") ? path == automatic : !strcmp(s.path, path ? "prefill" : "decode"));
                double base = 0;
                if (wanted)
                    run_one(&b, s.rows[t], path, false, &base, csv);
                if (wanted && s.adapters)
                    run_one(&b, s.rows[t], path, true, &base, csv);
            }
        }
        unload_layer(&b);
    }
    if (csv && fclose(csv))
        fprintf(stderr, "expert-bench: %s can't be written\n", s.csv);
    kernels_cuda_stream_destroy(b.wrapped);
    kernels_cpu_stream_destroy(b.pool);
    check(cudaStreamDestroy(b.stream), "stream");
    return 0;
}
