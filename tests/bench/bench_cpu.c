/* SPDX-License-Identifier: Apache-2.0
 *
 * Times the CPU back end's forward sequence beside a plain read loop over the same weights, on the same threads, in turns.
 *
 *     bench_cpu [--isa FAMILY] [--threads N] [--shape NAME] [--rows T,T,...] [--path decode|prefill] [--no-lora] [--no-huge-pages]
 *               [--seconds S] [--cpu-time] > figures.csv
 *
 * Two layers of weights take turns and experts are drawn at random (for one row: in rotation), so that a large last-level cache
 * does not stand in for memory. --cpu-time counts the processor time of all threads over their number, for a machine where others
 * run, too; it says nothing about balance among threads. Figures are medians; `read_gbs` is the read loop's over what the forward pass has to read.
 */
#include "kernels/kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#define LAYERS 2
#define ADAPTERS 8
#define RANK 16
#define MAX_SAMPLES 4000
#define READ_PIECE ((size_t)1 << 20)

struct shape {
    const char *name;
    int32_t experts, k, hidden, inter;
};

static const struct shape shapes[] = {
    {"olmoe64", 64, 8, 2048, 1024}, {"qwen3-30b", 128, 8, 2048, 768}, {"mixtral", 8, 2, 4096, 14336}, /* only when asked for: 5.6 GB */
};

struct options {
    const struct kernel_table *table;
    struct kernel_stream *stream;
    int32_t rows[16];
    int row_counts;
    int path; /* -1: by rows */
    bool lora, huge;
    clockid_t clock;
    double seconds;
};

struct layer {
    char *gate_up, *down;
    struct kernel_lora_entry *entry;
};

struct bench {
    const struct options *o;
    const struct shape *shape;
    struct kernel_dims dims;
    size_t gate_up_bytes, down_bytes;
    struct layer layer[LAYERS];
    uint32_t random;
    int32_t rotation; /* next expert for single rows */
};

static void die(const char *what)
{
    fprintf(stderr, "bench_cpu: %s\n", what);
    exit(1);
}

static double clock_us(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static uint32_t next_random(struct bench *b)
{
    uint32_t x = b->random += 0x9e3779b9u;
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    return x ^ x >> 16;
}

static void *map(const struct options *o, size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        die("no memory");
    madvise(p, bytes, o->huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    return p;
}

/* Small numbers of both signs in bf16; any layout will do. */
static void *map_weights(struct bench *b, size_t bytes)
{
    uint32_t *p = map(b->o, bytes);
    for (size_t i = 0; i < bytes / 4; i++)
        p[i] = (next_random(b) & 0x807f807fu) | 0x3c803c80u;
    return p;
}

static void make_layers(struct bench *b)
{
    const struct kernel_table *k = b->o->table;
    size_t experts = (size_t)b->dims.experts;
    b->gate_up_bytes = k->gate_up_bytes(&b->dims);
    b->down_bytes = k->down_bytes(&b->dims);
    for (int l = 0; l < LAYERS; l++) {
        struct layer *layer = &b->layer[l];
        layer->gate_up = map_weights(b, experts * b->gate_up_bytes);
        layer->down = map_weights(b, experts * b->down_bytes);
        if (!b->o->lora)
            continue;
        size_t entries = ADAPTERS * experts * KERNEL_PROJECTIONS;
        layer->entry = map(b->o, entries * sizeof *layer->entry);
        for (size_t i = 0; i < entries; i++) {
            enum kernel_projection q = (enum kernel_projection)(i % KERNEL_PROJECTIONS);
            size_t a = k->lora_a_bytes(&b->dims, q, RANK);
            char *ab = map_weights(b, a + k->lora_b_bytes(&b->dims, q, RANK));
            layer->entry[i] = (struct kernel_lora_entry){(uint64_t)(uintptr_t)ab, (uint64_t)(uintptr_t)(ab + a), 0.1f, RANK};
        }
    }
}

static void free_layers(struct bench *b)
{
    const struct kernel_table *k = b->o->table;
    size_t experts = (size_t)b->dims.experts, entries = ADAPTERS * experts * KERNEL_PROJECTIONS;
    for (int l = 0; l < LAYERS; l++) {
        struct layer *layer = &b->layer[l];
        munmap(layer->gate_up, experts * b->gate_up_bytes);
        munmap(layer->down, experts * b->down_bytes);
        for (size_t i = 0; layer->entry && i < entries; i++) {
            enum kernel_projection q = (enum kernel_projection)(i % KERNEL_PROJECTIONS);
            munmap((void *)(uintptr_t)layer->entry[i].a, k->lora_a_bytes(&b->dims, q, RANK) + k->lora_b_bytes(&b->dims, q, RANK));
        }
        if (layer->entry)
            munmap(layer->entry, entries * sizeof *layer->entry);
    }
}

/* ---- the read loop ---- */

struct reading {
    const char **piece;
    size_t count;
    uint64_t sum; /* keeps the loads */
};

/* As fast as loads go: the widest vectors, several sums. */
#if defined(__x86_64__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
static uint64_t
read_span(const uint64_t *p, size_t n)
{
    typedef uint64_t wide __attribute__((vector_size(64)));
    wide sum[4] = {{0}};
    for (size_t j = 0; j < n; j += 32)
        for (int l = 0; l < 4; l++)
            sum[l] ^= *(const wide *)(const void *)(p + j + 8 * l);
    sum[0] ^= sum[1] ^ sum[2] ^ sum[3];
    return sum[0][0] ^ sum[0][1] ^ sum[0][2] ^ sum[0][3] ^ sum[0][4] ^ sum[0][5] ^ sum[0][6] ^ sum[0][7];
}

static void read_piece(void *arg, int i)
{
    struct reading *r = arg;
    __atomic_fetch_xor(&r->sum, read_span((const uint64_t *)(const void *)r->piece[i], READ_PIECE / 8), __ATOMIC_RELAXED);
}

static void add_pieces(struct reading *r, const char *p, size_t bytes)
{
    for (size_t at = 0; at + READ_PIECE <= bytes; at += READ_PIECE)
        r->piece[r->count++] = p + at;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *v, int n)
{
    qsort(v, (size_t)n, sizeof *v, compare);
    return v[n / 2];
}

/* ---- the forward pass ---- */

static struct kernel_forward make_forward(struct bench *b, int32_t rows)
{
    const struct kernel_dims *d = &b->dims;
    const struct options *o = b->o;
    size_t t = (size_t)rows, n = t * (size_t)b->shape->k;
    struct kernel_forward f = {.dims = *d};
    struct kernel_row *row = map(o, t * sizeof *row);
    char *in = map_weights(b, t * (size_t)d->hidden * 2), *out = map(o, t * (size_t)d->hidden * 2);
    int32_t *slot_row = map(o, n * 4);
    float *slot_weight = map(o, n * 4);
    for (int32_t i = 0; i < rows; i++)
        row[i] = (struct kernel_row){(uint64_t)(uintptr_t)(in + (size_t)i * (size_t)d->hidden * 2),
                                     (uint64_t)(uintptr_t)(out + (size_t)i * (size_t)d->hidden * 2),
                                     DTYPE_BF16,
                                     -1,
                                     i * b->shape->k,
                                     b->shape->k};
    for (size_t i = 0; i < n; i++) {
        slot_row[i] = (int32_t)i / b->shape->k;
        slot_weight[i] = 0.125f;
    }
    f.batch = (struct kernel_batch){rows, (int32_t)n, row, slot_row, map(o, n * 4), slot_weight};
    f.routing = (struct kernel_routing){map(o, n * 4), map(o, n * 4), map(o, ((size_t)d->experts + 1) * 4), map(o, 4), map(o, (n + 1) * 4),
                                        map(o, n * 4), map(o, n * 4)};
    f.x = map(o, t * (size_t)d->hidden_pad * 2);
    f.h = map(o, n * (size_t)d->inter_pad * 2);
    f.y = map(o, n * (size_t)d->hidden_pad * 2);
    f.s_gate = map(o, n * RANK * 2);
    f.s_up = map(o, n * RANK * 2);
    f.s_down = map(o, n * RANK * 2);
    f.work = map(o, o->table->work_bytes(d, rows, (int32_t)n, RANK));
    f.path = o->path >= 0 ? (enum kernel_path)o->path : rows <= 8 ? KERNEL_DECODE : KERNEL_PREFILL;
    return f;
}

static void free_forward(struct bench *b, struct kernel_forward *f)
{
    const struct kernel_dims *d = &b->dims;
    size_t t = (size_t)f->batch.rows, n = (size_t)f->batch.slots, io = t * (size_t)d->hidden * 2;
    munmap((void *)(uintptr_t)f->batch.row[0].in, io);
    munmap((void *)(uintptr_t)f->batch.row[0].out, io);
    munmap((void *)(uintptr_t)f->batch.row, t * sizeof *f->batch.row);
    const void *of_slots[] = {f->batch.slot_row,   f->batch.slot_weight,      f->batch.slot_expert,      f->routing.order,
                              f->routing.position, f->routing.segment_expert, f->routing.segment_adapter};
    for (size_t i = 0; i < sizeof of_slots / sizeof of_slots[0]; i++)
        munmap((void *)(uintptr_t)of_slots[i], n * 4);
    munmap(f->routing.expert_offset, ((size_t)d->experts + 1) * 4);
    munmap(f->routing.segment_count, 4);
    munmap(f->routing.segment_begin, (n + 1) * 4);
    munmap(f->x, t * (size_t)d->hidden_pad * 2);
    munmap(f->h, n * (size_t)d->inter_pad * 2);
    munmap(f->y, n * (size_t)d->hidden_pad * 2);
    munmap(f->s_gate, n * RANK * 2);
    munmap(f->s_up, n * RANK * 2);
    munmap(f->s_down, n * RANK * 2);
    munmap(f->work, b->o->table->work_bytes(d, (int32_t)t, (int32_t)n, RANK));
}

/* K different experts for each row; marks those touched. */
static void draw_experts(struct bench *b, const struct kernel_batch *batch, bool *touched)
{
    int32_t *expert = (int32_t *)(uintptr_t)batch->slot_expert, k = b->shape->k;
    memset(touched, 0, (size_t)b->dims.experts);
    for (int32_t s = 0; s < batch->slots; s++) {
        bool again;
        do {
            expert[s] = batch->rows == 1 ? b->rotation++ % b->dims.experts : (int32_t)(next_random(b) % (uint32_t)b->dims.experts);
            again = false;
            for (int32_t i = s / k * k; i < s; i++)
                again = again || expert[i] == expert[s];
        } while (again);
        touched[expert[s]] = true;
    }
}

static void run(const struct options *o, const struct kernel_forward *f, bool lora)
{
    const struct kernel_table *k = o->table;
    k->enter(o->stream, f);
    k->route(o->stream, f);
    if (lora)
        k->shrink_gate_up(o->stream, f);
    k->gate_up(o->stream, f);
    if (lora)
        k->shrink_down(o->stream, f);
    k->down(o->stream, f);
    k->combine(o->stream, f);
    if (k->wait(o->stream) != KERNEL_OK)
        die("a step failed");
}

enum { PLAIN, LORA, READ, KINDS };

static void bench_rows(struct bench *b, int32_t rows)
{
    const struct options *o = b->o;
    struct kernel_forward f = make_forward(b, rows);
    bool touched[KERNEL_MAX_EXPERTS];
    static double us[KINDS][MAX_SAMPLES], speed[KINDS][MAX_SAMPLES];
    int samples = 0;
    size_t expert_bytes = b->gate_up_bytes + b->down_bytes;
    struct reading reading = {calloc((size_t)b->dims.experts * (expert_bytes / READ_PIECE + 2), sizeof(char *)), 0, 0};
    if (!reading.piece)
        die("no memory");
    double end = clock_us(CLOCK_MONOTONIC) + o->seconds * 1e6;
    for (int turn = 0; samples < MAX_SAMPLES && (clock_us(CLOCK_MONOTONIC) < end || samples < 3); turn++) {
        /* Every kind sees every layer. */
        int kind = turn % KINDS;
        struct layer *layer = &b->layer[(turn + turn / KINDS) % LAYERS];
        if (kind == LORA && !o->lora) {
            us[kind][samples] = speed[kind][samples] = 0;
            continue;
        }
        draw_experts(b, &f.batch, touched);
        size_t bytes = 0;
        reading.count = 0;
        for (int32_t e = 0; e < b->dims.experts; e++)
            if (touched[e]) {
                bytes += expert_bytes;
                add_pieces(&reading, layer->gate_up + (size_t)e * b->gate_up_bytes, b->gate_up_bytes);
                add_pieces(&reading, layer->down + (size_t)e * b->down_bytes, b->down_bytes);
            }
        f.weights = (struct kernel_weights){.gate_up = layer->gate_up, .down = layer->down};
        f.lora = (struct kernel_lora){kind == LORA ? layer->entry : NULL, kind == LORA ? ADAPTERS : 0, kind == LORA ? RANK : 0};
        for (int32_t t = 0; t < rows; t++)
            ((struct kernel_row *)(uintptr_t)f.batch.row)[t].adapter = kind == LORA ? (int32_t)(next_random(b) % ADAPTERS) : -1;
        double start = clock_us(o->clock);
        if (kind == READ) {
            kernels_cpu_parallel(o->stream, (int)reading.count, read_piece, &reading);
            bytes = reading.count * READ_PIECE;
        } else {
            run(o, &f, kind == LORA);
        }
        us[kind][samples] = (clock_us(o->clock) - start) / (o->clock == CLOCK_MONOTONIC ? 1 : kernels_cpu_stream_threads(o->stream));
        speed[kind][samples] = (double)bytes / us[kind][samples] * 1e-3;
        if (kind == KINDS - 1)
            samples++;
    }
    double read = median(speed[READ], samples);
    double flops = 6.0 * rows * b->shape->k * (double)b->dims.hidden * b->dims.inter;
    double plain_us = median(us[PLAIN], samples);
    for (int kind = PLAIN; kind <= LORA; kind++) {
        double m = median(us[kind], samples), gbs = median(speed[kind], samples);
        if (m > 0)
            printf("%s,%s,%d,%s,%d,%s,%.1f,%.1f,%.2f,%.2f,%.1f,%.1f,%.1f,%d\n", b->shape->name, o->table->name,
                   kernels_cpu_stream_threads(o->stream), f.path == KERNEL_DECODE ? "decode" : "prefill", rows,
                   kind == LORA ? "r16x8" : "none", m, us[kind][0], gbs, read, 100 * gbs / read, flops / m * 1e-3, 100 * (m / plain_us - 1),
                   samples);
    }
    fflush(stdout);
    free(reading.piece);
    free_forward(b, &f);
}

static void bench_shape(const struct options *o, const struct shape *s)
{
    struct bench b = {.o = o, .shape = s, .random = 1};
    b.dims = (struct kernel_dims){.experts = s->experts, .hidden = s->hidden, .inter = s->inter, .op = DTYPE_BF16};
    o->table->dims_init(&b.dims);
    make_layers(&b);
    for (int i = 0; i < o->row_counts; i++)
        bench_rows(&b, o->rows[i]);
    free_layers(&b);
}

int main(int argc, char **argv)
{
    struct options o = {.rows = {1, 2, 4, 8, 64, 512, 2048},
                        .row_counts = 7,
                        .path = -1,
                        .lora = true,
                        .huge = true,
                        .clock = CLOCK_MONOTONIC,
                        .seconds = 2};
    const char *isa = NULL, *shape = NULL;
    int threads = 0;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (!strcmp(argv[i], "--no-lora")) {
            o.lora = false;
            continue;
        }
        if (!strcmp(argv[i], "--no-huge-pages")) {
            o.huge = false;
            continue;
        }
        if (!strcmp(argv[i], "--cpu-time")) {
            o.clock = CLOCK_PROCESS_CPUTIME_ID;
            continue;
        }
        if (!value)
            die("an option without its value");
        if (!strcmp(argv[i], "--isa"))
            isa = value;
        else if (!strcmp(argv[i], "--threads"))
            threads = atoi(value);
        else if (!strcmp(argv[i], "--shape"))
            shape = value;
        else if (!strcmp(argv[i], "--seconds"))
            o.seconds = atof(value);
        else if (!strcmp(argv[i], "--path"))
            o.path = strcmp(value, "decode") ? KERNEL_PREFILL : KERNEL_DECODE;
        else if (!strcmp(argv[i], "--rows")) {
            char *at = argv[i + 1];
            for (o.row_counts = 0; o.row_counts < 16 && *at; at += *at == ',')
                if ((o.rows[o.row_counts++] = (int32_t)strtol(at, &at, 10)) < 1)
                    die("--rows wants numbers above 0, separated by commas");
        } else
            die("unknown option; see the head of bench_cpu.c");
        i++;
    }
    o.table = kernels_cpu(isa);
    if (!o.table)
        die("this processor lacks that family");
    o.stream = kernels_cpu_stream_create(threads);
    if (!o.stream)
        die("no threads");
    printf("shape,kernels,threads,path,rows,lora,median_us,min_us,weights_gbs,read_gbs,percent_of_read,gflops,extra_percent,samples\n");
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        if (shape ? !strcmp(shape, shapes[i].name) : i < 2)
            bench_shape(&o, &shapes[i]);
    kernels_cpu_stream_destroy(o.stream);
    return 0;
}
